//! The tensors that a submodule takes.

use std::collections::BTreeMap;
use std::path::Path;

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::Denoiser;
use crate::models::clip::INPUT_IDS;
use crate::models::flux::{POSITION_AXES, names as flux_names};
use crate::models::joint::names as joint;
use crate::models::pixart::names as pixart;
use crate::models::t5::ATTENTION_MASK;
use crate::models::unet::{AdditionEmbedType, SIZE_TIME_IDS, names};
use crate::shape::Shape;
use crate::weights::{Checkpoint, cast};

use super::super::PipelineError;
use super::SubmoduleError;
use super::network::{IMAGES, LATENTS, Network, Sizes};

/// The tensors that a submodule takes, by diffusers' or transformers' names.
pub struct SubmoduleInputs {
    pub(super) sizes: Sizes,
    pub(super) tensors: BTreeMap<&'static str, HostTensor>,
}

impl SubmoduleInputs {
    /// Reads the tensors of a safetensors file and casts them to what the network takes.
    ///
    /// # Errors
    /// [`SubmoduleError::Inputs`] with every tensor that is missing, unknown, or of another type or shape.
    pub(super) fn read(network: &Network, path: &Path) -> Result<Self, SubmoduleError> {
        let file = Checkpoint::open(path).map_err(PipelineError::from)?;
        let mut wanted = wanted(network);
        wanted.retain(|input| input.name != ATTENTION_MASK || file.info(input.name).is_some());
        if let Network::Vae(_) = network {
            // Each half of a VAE runs alone too.
            wanted.retain(|input| file.info(input.name).is_some());
            if wanted.is_empty() {
                return Err(SubmoduleError::Inputs {
                    path: path.to_owned(),
                    problems: vec![format!(
                        "missing: {IMAGES}, images for the encoder, or {LATENTS}, latents for the decoder"
                    )],
                });
            }
        }
        let sizes = bind_sizes(&wanted, &file)?;
        let tensor = |input: &Wanted| Ok((input.name, read(network, input, &sizes, &file)?));
        let tensors = wanted
            .iter()
            .map(tensor)
            .collect::<Result<_, SubmoduleError>>()?;
        Ok(SubmoduleInputs { sizes, tensors })
    }
}

fn read(
    network: &Network,
    input: &Wanted,
    sizes: &Sizes,
    file: &Checkpoint,
) -> Result<HostTensor, SubmoduleError> {
    let found = file.read(input.name).map_err(PipelineError::from)?;
    let vocabulary = match network {
        Network::ClipText(config) => Some(config.vocab_size),
        Network::T5(config) if input.name == INPUT_IDS => Some(config.vocab_size),
        Network::T5(_) | Network::Denoiser(_) | Network::Vae(_) => None,
    };
    if let Some(vocabulary) = vocabulary {
        check_ids(file.path(), input.name, &found, vocabulary)?;
    }
    let tensor = cast(found, input.dtype()).map_err(PipelineError::from)?;
    if !input.is_for_all(&tensor.shape.dims) {
        return Ok(tensor);
    }
    let shape = Shape::new(input.dtype(), input.dims(sizes));
    Ok(HostTensor {
        data: tensor.data.repeat(shape.count()),
        shape,
    })
}

/// A lookup past the end of a table gives its last row, so that a wrong tokenizer would go unnoticed.
fn check_ids(
    path: &Path,
    name: &str,
    ids: &HostTensor,
    vocabulary: usize,
) -> Result<(), SubmoduleError> {
    let values = ids.to_f64_vec().map_err(PipelineError::from)?;
    let outside = |v: &&f64| !(0.0..vocabulary as f64).contains(*v);
    match values.iter().find(outside) {
        None => Ok(()),
        Some(first) => Err(SubmoduleError::Inputs {
            path: path.to_owned(),
            problems: vec![format!(
                "{name}: {} of {} ids are outside the vocabulary of {vocabulary}, the first is {first}",
                values.iter().filter(outside).count(),
                values.len()
            )],
        }),
    }
}

/// The inputs of the forward pass. The first input that has a named size sets it.
fn wanted(network: &Network) -> Vec<Wanted> {
    use Size::{Is, Named};
    let input = |name, elements, sizes: &[Size]| Wanted {
        name,
        elements,
        sizes: sizes.to_vec(),
    };
    let batch = Named("batch");
    match network {
        Network::Denoiser(Denoiser::Unet(config)) => {
            let features = config.cross_attention_dim.get(0).unwrap_or_default();
            let mut inputs = vec![
                input(
                    names::SAMPLE,
                    Elements::Floats,
                    &[
                        batch,
                        Is(config.in_channels),
                        Named("height"),
                        Named("width"),
                    ],
                ),
                input(names::TIMESTEP, Elements::Numbers, &[batch]),
                input(
                    names::ENCODER_HIDDEN_STATES,
                    Elements::Floats,
                    &[batch, Named("length"), Is(features)],
                ),
            ];
            match config.addition_embed_type {
                None => {}
                Some(AdditionEmbedType::TextTime) => {
                    let time = SIZE_TIME_IDS * config.addition_time_embed_dim.unwrap_or_default();
                    let total = config.projection_class_embeddings_input_dim;
                    let text = total.unwrap_or_default().saturating_sub(time);
                    inputs.push(input(
                        names::TEXT_EMBEDS,
                        Elements::Floats,
                        &[batch, Is(text)],
                    ));
                    inputs.push(input(
                        names::TIME_IDS,
                        Elements::Numbers,
                        &[batch, Is(SIZE_TIME_IDS)],
                    ));
                }
            }
            inputs
        }
        Network::Denoiser(Denoiser::Sd3(config)) => vec![
            input(
                joint::HIDDEN_STATES,
                Elements::Floats,
                &[
                    batch,
                    Is(config.in_channels),
                    Named("height"),
                    Named("width"),
                ],
            ),
            input(
                joint::ENCODER_HIDDEN_STATES,
                Elements::Floats,
                &[batch, Named("text"), Is(config.joint_attention_dim)],
            ),
            input(
                joint::POOLED_PROJECTIONS,
                Elements::Floats,
                &[batch, Is(config.pooled_projection_dim)],
            ),
            input(joint::TIMESTEP, Elements::Numbers, &[batch]),
        ],
        Network::Denoiser(Denoiser::PixArt(config)) => {
            let text = Named("text");
            let latents = [
                batch,
                Is(config.in_channels),
                Named("height"),
                Named("width"),
            ];
            let mut inputs = vec![
                input(joint::HIDDEN_STATES, Elements::Floats, &latents),
                input(
                    joint::ENCODER_HIDDEN_STATES,
                    Elements::Floats,
                    &[batch, text, Is(config.caption_channels)],
                ),
                input(
                    pixart::ENCODER_ATTENTION_MASK,
                    Elements::Numbers,
                    &[batch, text],
                ),
                input(joint::TIMESTEP, Elements::Numbers, &[batch]),
            ];
            if config.takes_size() {
                inputs.push(input(
                    pixart::RESOLUTION,
                    Elements::Numbers,
                    &[batch, Is(2)],
                ));
                inputs.push(input(
                    pixart::ASPECT_RATIO,
                    Elements::Numbers,
                    &[batch, Is(1)],
                ));
            }
            inputs
        }
        Network::Denoiser(Denoiser::Flux(config)) => {
            let (image, text) = (Named("image"), Named("text"));
            let mut inputs = vec![
                input(
                    joint::HIDDEN_STATES,
                    Elements::Floats,
                    &[batch, image, Is(config.in_channels)],
                ),
                input(
                    joint::ENCODER_HIDDEN_STATES,
                    Elements::Floats,
                    &[batch, text, Is(config.joint_attention_dim)],
                ),
                input(
                    joint::POOLED_PROJECTIONS,
                    Elements::Floats,
                    &[batch, Is(config.pooled_projection_dim)],
                ),
                input(joint::TIMESTEP, Elements::Numbers, &[batch]),
                input(
                    flux_names::IMG_IDS,
                    Elements::Numbers,
                    &[image, Is(POSITION_AXES)],
                ),
                input(
                    flux_names::TXT_IDS,
                    Elements::Numbers,
                    &[text, Is(POSITION_AXES)],
                ),
            ];
            if config.guidance_embeds {
                inputs.push(input(flux_names::GUIDANCE, Elements::Numbers, &[batch]));
            }
            inputs
        }
        Network::T5(_) => [INPUT_IDS, ATTENTION_MASK]
            .map(|name| input(name, Elements::Integers, &[batch, Named("length")]))
            .into(),
        Network::ClipText(_) => vec![input(
            INPUT_IDS,
            Elements::Integers,
            &[batch, Named("length")],
        )],
        Network::Vae(config) => {
            let images = [Is(config.in_channels()), Named("height"), Named("width")];
            let latents = [
                Is(config.latent_channels()),
                Named("rows"),
                Named("columns"),
            ];
            vec![
                input(IMAGES, Elements::Floats, &[&[batch], &images[..]].concat()),
                input(
                    LATENTS,
                    Elements::Floats,
                    &[&[batch], &latents[..]].concat(),
                ),
            ]
        }
    }
}

/// One input of a network.
struct Wanted {
    name: &'static str,
    elements: Elements,
    sizes: Vec<Size>,
}

/// One dimension: fixed by the configuration, or the same in all inputs that name it.
#[derive(Clone, Copy)]
enum Size {
    Is(usize),
    Named(&'static str),
}

/// Which element types an input may have in the file; they are cast to what the network takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Elements {
    Floats,
    /// Floats or integers.
    Numbers,
    Integers,
}

impl Wanted {
    /// The type that the input is declared with.
    fn dtype(&self) -> DType {
        match self.elements {
            Elements::Floats | Elements::Numbers => DType::F32,
            Elements::Integers => DType::S32,
        }
    }

    fn takes(&self, dtype: DType) -> bool {
        let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        let int = dtype.is_int() && dtype.bits() >= 8;
        match self.elements {
            Elements::Floats => float,
            Elements::Numbers => float || int,
            Elements::Integers => int,
        }
    }

    /// Whether one value may stand for the whole batch, as diffusers has it for timesteps and guidance.
    fn is_for_all(&self, dims: &[usize]) -> bool {
        [names::TIMESTEP, flux_names::GUIDANCE].contains(&self.name) && matches!(dims, [] | [1])
    }

    fn dims(&self, sizes: &Sizes) -> Vec<usize> {
        let size = |size: &Size| match size {
            Size::Is(n) => *n,
            Size::Named(name) => sizes.get(name).copied().unwrap_or_default(),
        };
        self.sizes.iter().map(size).collect()
    }

    /// Sets the sizes that are still open, and says whether `dims` fits.
    fn bind(&self, dims: &[usize], sizes: &mut Sizes) -> bool {
        if self.is_for_all(dims) {
            return true;
        }
        if dims.len() != self.sizes.len() || dims.contains(&0) {
            return false;
        }
        let mut bound = sizes.clone();
        let fits = self
            .sizes
            .iter()
            .zip(dims)
            .all(|(size, &found)| match size {
                Size::Is(n) => *n == found,
                Size::Named(name) => *bound.entry(name).or_insert(found) == found,
            });
        if fits {
            *sizes = bound;
        }
        fits
    }

    /// Type and sizes in words, e.g. `floats [batch = 2, length, 24]`.
    fn describe(&self, sizes: &Sizes) -> String {
        let each: Vec<String> = self
            .sizes
            .iter()
            .map(|size| match size {
                Size::Is(n) => n.to_string(),
                Size::Named(name) => match sizes.get(name) {
                    Some(n) => format!("{name} = {n}"),
                    None => (*name).to_string(),
                },
            })
            .collect();
        let elements = match self.elements {
            Elements::Floats => "floats",
            Elements::Numbers => "floats or integers",
            Elements::Integers => "integers",
        };
        format!("{elements} [{}]", each.join(", "))
    }
}

/// Compares a file's tensors with what the network takes, and gives the named sizes.
///
/// # Errors
/// Lists every input that is missing, unknown, or of another type or shape.
fn bind_sizes(wanted: &[Wanted], file: &Checkpoint) -> Result<Sizes, SubmoduleError> {
    let mut sizes = Sizes::new();
    let mut problems = Vec::new();
    for input in wanted {
        match file.info(input.name) {
            None => problems.push(format!(
                "missing: {}, {}",
                input.name,
                input.describe(&sizes)
            )),
            Some(shape) => {
                let expected = input.describe(&sizes);
                if !input.takes(shape.dtype) || !input.bind(&shape.dims, &mut sizes) {
                    problems.push(format!(
                        "{}: expected {expected}, found {shape}",
                        input.name
                    ));
                }
            }
        }
    }
    for (name, shape) in file.iter() {
        if !wanted.iter().any(|w| w.name == name) {
            let takes: Vec<&str> = wanted.iter().map(|w| w.name).collect();
            problems.push(format!(
                "unknown: {name} {shape}; the module takes {}",
                takes.join(", ")
            ));
        }
    }
    if problems.is_empty() {
        return Ok(sizes);
    }
    Err(SubmoduleError::Inputs {
        path: file.path().to_owned(),
        problems,
    })
}
