//! Latents to images and back: the VAE's programs.

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::graph::{Builder, GraphError};
use crate::host_tensor::HostTensor;
use crate::lowering::{Lowered, Traced};
use crate::models::vae::{Autoencoder, EncodedImages};
use crate::models::{DiffusionModel, vae};
use crate::runtime::{Prepared, Session};
use crate::shape::Shape;

use super::PipelineError;
use super::noise::NoiseGenerator;
use super::part_program::PartProgram;
use super::sampler_step::names as sampler_names;
use super::text_to_image::names;
use super::tiling::TilePlan;

/// Traces the decoder for one image, with weights under `root/`: `latents` `f32[1, channels, rows, columns]` as
/// denoising leaves them, to `images` `f32[1, 3, height, width]` in [-1, 1] or a little beyond.
///
/// # Errors
/// When the model has no VAE, or the latents do not fit it.
pub fn trace_decode(
    model: &DiffusionModel,
    root: &str,
    [rows, columns]: [usize; 2],
) -> Result<Traced, GraphError> {
    let b = Builder::new();
    let Some(config) = &model.vae else {
        return Err(b.invalid("this model has no VAE: its samples are images"));
    };
    let dims = [1, model.denoiser.out_channels(), rows, columns];
    let latents = b.input(names::LATENTS, Shape::new(DType::F32, dims), &[])?;
    let unscaled = config.latent_scale().undo(&b, latents)?;
    let images = vae::decode(&b, root, config, unscaled, model.precision)?;
    b.output(names::IMAGES, b.convert(images, DType::F32)?, None)?;
    Ok(Traced::new("decode", b.finish()))
}

/// Traces the encoder of images: `images` `f32[1, 3, height, width]` in [-1, 1] to `latents` as denoising takes them.
/// Where the VAE gives a distribution they are drawn from it by unit normal `noise` of the latents' shape, another
/// input.
///
/// # Errors
/// When the model has no VAE, or the images do not fit it.
pub fn trace_encode_image(model: &DiffusionModel) -> Result<Traced, GraphError> {
    let b = Builder::new();
    let (config, encoded) = encoded(&b, model)?;
    let latents = match encoded {
        EncodedImages::Latents(latents) => latents,
        EncodedImages::Distribution(distribution) => {
            let noise = Shape::new(DType::F32, model.sample_dims(1));
            let noise = b.input(sampler_names::NOISE, noise, &[])?;
            let noise = b.convert(noise, model.precision.activations)?;
            distribution.sample(&b, noise)?
        }
    };
    let latents = config.latent_scale().apply(&b, latents)?;
    b.output(names::LATENTS, b.convert(latents, DType::F32)?, None)?;
    Ok(Traced::new("encode_image", b.finish()))
}

/// Traces the encoder of images for later draws: `images` `f32[1, 3, height, width]` in [-1, 1] to the distribution of
/// `latents` as denoising takes them, their mean, and `latents_deviation`. A VAE that gives latents and no distribution
/// has no second result.
///
/// # Errors
/// When the model has no VAE, or the images do not fit it.
pub fn trace_encode_distribution(model: &DiffusionModel) -> Result<Traced, GraphError> {
    let b = Builder::new();
    let (config, encoded) = encoded(&b, model)?;
    let scale = config.latent_scale();
    let (mean, deviation) = match encoded {
        EncodedImages::Latents(latents) => (latents, None),
        EncodedImages::Distribution(distribution) => {
            (distribution.mean, Some(distribution.deviation(&b)?))
        }
    };
    let mean = scale.apply(&b, mean)?;
    b.output(names::LATENTS, b.convert(mean, DType::F32)?, None)?;
    if let Some(deviation) = deviation {
        let scaled = b.mul_scalar(deviation, scale.factor)?;
        let scaled = b.convert(scaled, DType::F32)?;
        b.output(names::LATENTS_DEVIATION, scaled, None)?;
    }
    Ok(Traced::new("encode_distribution", b.finish()))
}

/// Declares `images`, one of the model's size, and encodes it.
fn encoded<'m>(
    b: &Builder,
    model: &'m DiffusionModel,
) -> Result<(&'m Autoencoder, EncodedImages), GraphError> {
    let Some(config) = &model.vae else {
        return Err(b.invalid("this model has no VAE: its samples are images"));
    };
    let [height, width] = model.image_size;
    let images = Shape::new(DType::F32, [1, config.in_channels(), height, width]);
    let images = b.input(names::IMAGES, images, &[])?;
    let encoded = vae::encode(b, vae::ROOT, config, images, model.precision)?;
    Ok((config, encoded))
}

/// The compiled encoder of images.
pub struct ImageEncoder {
    program: PartProgram,
    latent_dims: [usize; 4],
}

impl ImageEncoder {
    /// Compiles the lowered program of [`trace_encode_image`] for latents `latent_dims`, those of one image.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        latent_dims: [usize; 4],
        precision: DotPrecision,
    ) -> Result<ImageEncoder, PipelineError> {
        Ok(ImageEncoder {
            program: PartProgram::compile(session, lowered, precision)?,
            latent_dims,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &PartProgram {
        &self.program
    }

    /// Latents of `image` `f32[1, 3, height, width]`: `f32[1, channels, rows, columns]`. `generator` gives the noise of
    /// the draw, if there is one.
    ///
    /// # Errors
    /// When a weight is missing, the image has another size, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        image: &HostTensor,
        generator: &mut NoiseGenerator,
    ) -> Result<HostTensor, PipelineError> {
        let mut inputs = self.program.inputs(session);
        inputs.set(names::IMAGES, image)?;
        if self.program.stages().input(sampler_names::NOISE).is_some() {
            let each: usize = self.latent_dims.iter().product();
            let noise = HostTensor::from_f32(self.latent_dims, &generator.normal(each))?;
            inputs.set(sampler_names::NOISE, &noise)?;
        }
        self.program.run_for_one(weights, &inputs)
    }
}

/// The compiled decoder.
pub struct Decoder {
    program: PartProgram,
    tiles: TilePlan,
}

impl Decoder {
    /// Compiles the lowered program of [`trace_decode`] for one of `tiles`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        tiles: TilePlan,
        precision: DotPrecision,
    ) -> Result<Decoder, PipelineError> {
        Ok(Decoder {
            program: PartProgram::compile(session, lowered, precision)?,
            tiles,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &PartProgram {
        &self.program
    }

    /// The images of `latents` `f32[batch, channels, rows, columns]`, one after the other:
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
        let mut inputs = self.program.inputs(session);
        let mut images = Vec::new();
        let mut sizes = dims.clone();
        for values in latents.to_f32_vec()?.chunks(each.max(1)) {
            let one = [[1].as_slice(), &dims[1..]].concat();
            let one = HostTensor::from_f32(one, values)?;
            let mut decoded = Vec::new();
            for tile in self.tiles.cut(&one)? {
                inputs.set(names::LATENTS, &tile)?;
                decoded.push(self.program.run_for_one(weights, &inputs)?);
            }
            let image = self.tiles.blend(&decoded)?;
            sizes[1..].copy_from_slice(&image.shape.dims[1..]);
            images.extend(image.data);
        }
        Ok(HostTensor::new(Shape::new(DType::F32, sizes), images)?)
    }
}
