//! The networks that are submodules.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::host_tensor::HostTensor;
use crate::models::clip::{ClipTextConfig, INPUT_IDS, clip_text};
use crate::models::t5::{ATTENTION_MASK, T5EncoderConfig, t5_encoder};
use crate::models::vae::{self, Autoencoder, EncodedImages};
use crate::models::{Denoiser, DenoiserKind, Part};
use crate::nn::{Precision, Remat};
use crate::shape::Shape;
use crate::util::files;

use super::SubmoduleError;

/// More than any `config.json` of a model.
const LARGEST_CONFIG: u64 = 1 << 20;

/// The file that says what a folder is of.
pub const CONFIG: &str = "config.json";

/// A part of a model, by its configuration.
pub enum Network {
    Denoiser(Denoiser),
    ClipText(Box<ClipTextConfig>),
    T5(Box<T5EncoderConfig>),
    Vae(Box<Autoencoder>),
}

/// The images that a VAE encodes, and the unscaled latents that it decodes: the arguments of diffusers' `encode` and
/// `decode`.
pub const IMAGES: &str = "x";
pub const LATENTS: &str = "z";

/// The sizes of a network's inputs that its configuration leaves open, by name.
pub type Sizes = BTreeMap<&'static str, usize>;

impl Network {
    /// Reads `config.json`, which says by `_class_name` (diffusers) or `architectures` (transformers) what it is of, and
    /// gives its fields too.
    pub fn read(folder: &Path) -> Result<(Network, Map<String, Json>), SubmoduleError> {
        let path = folder.join(CONFIG);
        let fail = |reason: String| SubmoduleError::Config {
            path: path.clone(),
            reason,
        };
        let bytes = std::fs::metadata(&path)
            .map_err(|e| fail(e.to_string()))?
            .len();
        if bytes > LARGEST_CONFIG {
            return Err(fail(format!(
                "{bytes} bytes; a model's configuration has at most {LARGEST_CONFIG}"
            )));
        }
        let text = files::read_to_string(&path).map_err(|e| fail(e.to_string()))?;
        let fields: Map<String, Json> =
            serde_json::from_str(&text).map_err(|e| fail(format!("not a JSON object: {e}")))?;
        let classes: Vec<&str> = fields
            .get("_class_name")
            .into_iter()
            .chain(
                fields
                    .get("architectures")
                    .and_then(Json::as_array)
                    .into_iter()
                    .flatten(),
            )
            .filter_map(Json::as_str)
            .collect();
        let is = |name: &str| classes.contains(&name);
        let model = |source| SubmoduleError::Model {
            path: path.clone(),
            source,
        };
        let denoiser = classes
            .iter()
            .find_map(|class| DenoiserKind::from_name(class));
        let network = if let Some(kind) = denoiser {
            Network::Denoiser(Denoiser::from_map(kind, fields.clone()).map_err(model)?)
        } else if is("T5EncoderModel") {
            let config = T5EncoderConfig::from_map(fields.clone()).map_err(model)?;
            Network::T5(Box::new(config))
        } else if is("CLIPTextModel") || is("CLIPTextModelWithProjection") {
            let config = ClipTextConfig::from_map(fields.clone()).map_err(model)?;
            Network::ClipText(Box::new(config))
        } else if is("AutoencoderKL") || is("AutoencoderTiny") {
            let config = Autoencoder::from_map(fields.clone()).map_err(model)?;
            Network::Vae(Box::new(config))
        } else {
            let found = if classes.is_empty() {
                "neither _class_name nor architectures says what it is of".to_string()
            } else {
                format!("of {}, which is not here", classes.join(", "))
            };
            let denoisers = DenoiserKind::ALL.map(DenoiserKind::name).join(", ");
            return Err(fail(format!(
                "{found}; supported: {denoisers}, AutoencoderKL, AutoencoderTiny, CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel"
            )));
        };
        Ok((network, fields))
    }

    pub fn class(&self) -> &'static str {
        match self {
            Network::Denoiser(denoiser) => denoiser.class(),
            Network::T5(_) => "T5EncoderModel",
            Network::ClipText(config) if config.has_projection() => "CLIPTextModelWithProjection",
            Network::ClipText(_) => "CLIPTextModel",
            Network::Vae(config) => config.class(),
        }
    }

    /// The root of the parameter paths.
    pub fn root(&self) -> &'static str {
        match self {
            Network::Denoiser(denoiser) => denoiser.part().name(),
            Network::ClipText(_) | Network::T5(_) => Part::TextEncoder.name(),
            Network::Vae(_) => vae::ROOT,
        }
    }

    /// Declares inputs of these sizes and gives the results by name, in `f32`. Of inputs that may be left out, those
    /// that are in `tensors` are declared: a VAE has their results.
    ///
    /// # Errors
    /// When sizes do not fit the network.
    pub fn declare(
        &self,
        b: &Builder,
        sizes: &Sizes,
        tensors: &BTreeMap<&'static str, HostTensor>,
        precision: Precision,
    ) -> Result<Vec<(&'static str, Tensor)>, GraphError> {
        let size = |name: &str| sizes.get(name).copied().unwrap_or_default();
        let integers = |name: &str| {
            let shape = Shape::new(DType::S32, ["batch", "length"].map(size));
            b.input(name, shape, &[Some("activation_batch"), None])
        };
        let outputs = match self {
            Network::Denoiser(denoiser) => {
                vec![("sample", denoiser.declare_forward(b, &size, precision)?)]
            }
            Network::T5(config) => {
                let ids = integers(INPUT_IDS)?;
                let mask = match tensors.contains_key(ATTENTION_MASK) {
                    true => Some(integers(ATTENTION_MASK)?),
                    false => None,
                };
                let root = self.root();
                vec![(
                    "last_hidden_state",
                    t5_encoder(b, root, config, ids, mask, precision, Remat::None)?,
                )]
            }
            Network::ClipText(config) => {
                let ids = integers(INPUT_IDS)?;
                let y = clip_text(
                    b,
                    Part::TextEncoder.name(),
                    config,
                    ids,
                    precision,
                    Remat::None,
                )?;
                let mut outputs = vec![
                    ("last_hidden_state", y.last_hidden_state),
                    ("pooler_output", y.pooler_output),
                ];
                outputs.extend(y.text_embeds.map(|t| ("text_embeds", t)));
                outputs
            }
            Network::Vae(config) => {
                let given = |name: &'static str| {
                    let tensor = tensors.get(name);
                    let axes = [Some("activation_batch"), None, None, None];
                    tensor
                        .map(|tensor| b.input(name, tensor.shape.clone(), &axes))
                        .transpose()
                };
                let mut outputs = Vec::new();
                if let Some(images) = given(IMAGES)? {
                    match vae::encode(b, vae::ROOT, config, images, precision)? {
                        EncodedImages::Latents(latents) => outputs.push(("latents", latents)),
                        EncodedImages::Distribution(encoded) => {
                            outputs.push(("mean", encoded.mean));
                            outputs.push(("logvar", encoded.logvar));
                        }
                    }
                }
                if let Some(latents) = given(LATENTS)? {
                    let images = vae::decode(b, vae::ROOT, config, latents, precision)?;
                    outputs.push(("sample", images));
                }
                outputs
            }
        };
        outputs
            .into_iter()
            .map(|(name, tensor)| Ok((name, b.convert(tensor, DType::F32)?)))
            .collect()
    }
}
