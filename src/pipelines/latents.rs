//! Latents to pictures and back: the VAE's programs.

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::graph::{Builder, Graph, GraphError};
use crate::host_tensor::HostTensor;
use crate::models::{DiffusionModel, vae};
use crate::runtime::{Prepared, ProgramOptions, Session, StagedProgram};
use crate::shape::Shape;

use super::noise::NoiseGenerator;
use super::sampler::names as sampler_names;
use super::text_to_image::{PipelineError, names, put};
use super::tiling::TilePlan;

/// Traces the decoder for one picture: `latents` `f32[1, channels, rows, columns]` as denoising leaves them, to
/// `images` `f32[1, 3, height, width]` in [-1, 1] or a little beyond.
///
/// # Errors
/// When the model has no VAE, or the latents do not fit it.
pub fn trace_decode(
    model: &DiffusionModel,
    [rows, columns]: [usize; 2],
) -> Result<Graph, GraphError> {
    let b = Builder::new();
    let Some(config) = &model.vae else {
        return Err(b.invalid("this model has no VAE: its samples are pictures"));
    };
    let dims = [1, model.unet.out_channels, rows, columns];
    let latents = b.input(names::LATENTS, Shape::new(DType::F32, dims), &[])?;
    let unscaled = vae::unscale_latents(&b, config, latents)?;
    let images = vae::decode(&b, vae::ROOT, config, unscaled, model.precision)?;
    b.output(names::IMAGES, b.convert(images, DType::F32)?, None)?;
    Ok(b.finish())
}

/// Traces the encoder of pictures: `images` `f32[1, 3, height, width]` in [-1, 1] and unit normal `noise` of the latents'
/// shape, to `latents` as denoising takes them, drawn from the distribution that the VAE gives.
///
/// # Errors
/// When the model has no VAE, or the pictures do not fit it.
pub fn trace_encode_image(model: &DiffusionModel) -> Result<Graph, GraphError> {
    let b = Builder::new();
    let Some(config) = &model.vae else {
        return Err(b.invalid("this model has no VAE: its samples are pictures"));
    };
    let [height, width] = model.image_size;
    let images = Shape::new(DType::F32, [1, config.in_channels, height, width]);
    let images = b.input(names::IMAGES, images, &[])?;
    let encoded = vae::encode(&b, vae::ROOT, config, images, model.precision)?;
    let latents = Shape::new(DType::F32, model.sample_dims(1));
    let noise = b.input(sampler_names::NOISE, latents, &[])?;
    let noise = b.convert(noise, model.precision.activations)?;
    let latents = vae::scale_latents(&b, config, encoded.sample(&b, noise)?)?;
    b.output(names::LATENTS, b.convert(latents, DType::F32)?, None)?;
    Ok(b.finish())
}

/// The compiled encoder of pictures.
pub struct ImageEncoder {
    program: StagedProgram,
    latent_dims: [usize; 4],
}

impl ImageEncoder {
    /// Compiles the program that [`trace_encode_image`] made for latents `latent_dims`, those of one picture.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        graph: &Graph,
        latent_dims: [usize; 4],
        precision: DotPrecision,
    ) -> Result<ImageEncoder, PipelineError> {
        let options = ProgramOptions { precision };
        Ok(ImageEncoder {
            program: StagedProgram::compile(session, graph, "encode_image", &[], &options)?,
            latent_dims,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &StagedProgram {
        &self.program
    }

    /// Latents of `image` `f32[1, 3, height, width]`, one for each generator, which gives the noise of the draw:
    /// `f32[generators, channels, rows, columns]`.
    ///
    /// # Errors
    /// When a weight is missing, the picture has another size, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        image: &HostTensor,
        generators: &mut [NoiseGenerator],
    ) -> Result<HostTensor, PipelineError> {
        let image = put(session, [&self.program], names::IMAGES, image)?;
        let each: usize = self.latent_dims.iter().product();
        let mut latents = Vec::with_capacity(each * generators.len());
        for generator in generators.iter_mut() {
            let noise = HostTensor::from_f32(self.latent_dims, &generator.normal(each))?;
            let noise = put(session, [&self.program], sampler_names::NOISE, &noise)?;
            let results = self.program.step().call(
                &|name| match name {
                    names::IMAGES => Some(&image),
                    sampler_names::NOISE => Some(&noise),
                    _ => weights.get(name),
                },
                Vec::new(),
            )?;
            for result in &results {
                latents.extend(result.to_host(session.mesh())?.to_f32_vec()?);
            }
        }
        let [_, channels, rows, columns] = self.latent_dims;
        let dims = [generators.len(), channels, rows, columns];
        Ok(HostTensor::from_f32(dims, &latents)?)
    }
}

/// The compiled decoder.
pub struct Decoder {
    program: StagedProgram,
    tiles: TilePlan,
}

impl Decoder {
    /// Compiles the decoder that [`trace_decode`] made for one of `tiles`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        graph: &Graph,
        tiles: TilePlan,
        precision: DotPrecision,
    ) -> Result<Decoder, PipelineError> {
        let options = ProgramOptions { precision };
        Ok(Decoder {
            program: StagedProgram::compile(session, graph, "decode", &[], &options)?,
            tiles,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &StagedProgram {
        &self.program
    }

    /// The pictures of `latents` `f32[batch, channels, rows, columns]`, one after the other:
    /// `f32[batch, 3, height, width]`.
    ///
    /// # Errors
    /// When the latents have another shape, a weight is missing, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        latents: &HostTensor,
    ) -> Result<HostTensor, PipelineError> {
        let dims = &latents.shape.dims;
        let each: usize = dims[1..].iter().product();
        let mut pictures = Vec::new();
        let mut sizes = dims.clone();
        for values in latents.to_f32_vec()?.chunks(each.max(1)) {
            let one = [[1].as_slice(), &dims[1..]].concat();
            let one = HostTensor::from_f32(one, values)?;
            let mut decoded = Vec::new();
            for tile in self.tiles.cut(&one)? {
                let tile = put(session, [&self.program], names::LATENTS, &tile)?;
                let results = self.program.step().call(
                    &|name| match name {
                        names::LATENTS => Some(&tile),
                        _ => weights.get(name),
                    },
                    Vec::new(),
                )?;
                for picture in &results {
                    decoded.push(picture.to_host(session.mesh())?);
                }
            }
            let picture = self.tiles.blend(&decoded)?;
            sizes[1..].copy_from_slice(&picture.shape.dims[1..]);
            pictures.extend(picture.data);
        }
        Ok(HostTensor::new(Shape::new(DType::F32, sizes), pictures)?)
    }
}
