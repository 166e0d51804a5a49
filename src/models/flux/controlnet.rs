//! diffusers' `FluxControlNetModel`: a few blocks like those of the transformer, on the same tokens with those of an image's
//! latents added, whose outputs are added to what the transformer's blocks give.

use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Builder, Init, Tensor};
use crate::models::joint::outer_linear;
use crate::models::{ModelConfigError, check_class, check_sizes, parse_error, take_fixed};
use crate::nn::{Linear, Precision, Remat, Result, embedding, linear};

use super::config::FluxTransformer2DConfig;
use super::residuals::FluxResiduals;
use super::transformer::{Block, FluxInputs, embed, run_blocks};

const MODEL: &str = "FluxControlNetModel";

/// Attributes of a ControlNet, with the names and defaults of diffusers' `FluxControlNetModel`.
#[derive(Clone, Debug, PartialEq)]
pub struct FluxControlNetConfig {
    /// The fields in common with the transformer that it controls.
    pub transformer: FluxTransformer2DConfig,
    /// Kinds of images that it was trained on, of which one is chosen (`control_mode`); `None` where there is one.
    pub num_mode: Option<usize>,
}

impl FluxControlNetConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_json(text: &str) -> std::result::Result<Self, ModelConfigError> {
        let mut fields: Map<String, Value> =
            serde_json::from_str(text).map_err(parse_error(MODEL))?;
        check_class(MODEL, &fields)?;
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        // XLabs-AI's, which see pixels and repeat their outputs.
        let pixels = "conditioning_embedding_channels";
        take_fixed(MODEL, &mut fields, pixels, &[json!(null)])?;
        // The result has no tokens.
        take_fixed(MODEL, &mut fields, "out_channels", &[json!(null)])?;
        let num_mode = match fields.remove("num_mode") {
            None => None,
            Some(found) => Some(serde_json::from_value(found).map_err(parse_error(MODEL))?),
        };
        if let Some(modes) = num_mode {
            check_sizes(MODEL, [("num_mode", modes)])?;
        }
        Ok(FluxControlNetConfig {
            transformer: FluxTransformer2DConfig::from_map(fields).map_err(|e| e.of(MODEL))?,
            num_mode,
        })
    }
}

/// What a ControlNet sees beside the transformer's inputs.
#[derive(Clone, Debug)]
pub struct FluxControl {
    /// The root of its parameter paths.
    pub root: String,
    pub config: FluxControlNetConfig,
    /// The image's latents: as the sample's for [`super::denoise_latents`], tokens for [`flux_controlnet`].
    pub latents: Tensor,
    /// The factor of the result: a scalar of a float type.
    pub scale: Tensor,
    /// The kind of the image, `s32[]`; given exactly when the configuration asks for it.
    pub mode: Option<Tensor>,
}

/// The residuals of one ControlNet for the transformer's `inputs`, in `precision.activations`. `control.latents` are tokens
/// here.
///
/// Weights are declared under its root with diffusers' keys. Under [`Remat::Full`] each block is a recomputation region.
///
/// # Errors
/// When the configuration contradicts itself, or an input's shape does not fit it.
pub fn flux_controlnet(
    b: &Builder,
    inputs: &FluxInputs<'_>,
    control: &FluxControl,
    precision: Precision,
    remat: Remat,
) -> Result<FluxResiduals> {
    let b = b.root(&control.root);
    let FluxControlNetConfig {
        transformer: config,
        num_mode,
    } = &control.config;
    let inner = config.inner_dim();
    let batch = b.dims(inputs.hidden_states)[0];
    let mode = match (num_mode, control.mode) {
        (None, None) => None,
        (Some(modes), Some(mode)) => {
            let ids = b.broadcast_to(mode, &[batch, 1])?;
            let b = b.scope("controlnet_mode_embedder");
            let init = Init::Normal { std: 1.0 };
            Some(embedding(&b, ids, *modes, inner, init, precision)?)
        }
        (Some(modes), None) => {
            let message = format!("num_mode = {modes} needs the kind of the image");
            return Err(b.invalid(message));
        }
        (None, Some(_)) => {
            return Err(b.invalid("the kind of the image is given, but num_mode is not"));
        }
    };
    if b.dims(control.latents) != b.dims(inputs.hidden_states) {
        return Err(b.invalid(format!(
            "the image's tokens are {}; expected those of the sample, {}",
            b.shape(control.latents),
            b.shape(inputs.hidden_states)
        )));
    }
    let mut inputs = *inputs;
    if !config.guidance_embeds {
        inputs.conditioning.guidance = None;
    }
    let mut embedded = embed(&b, config, &inputs, mode, precision)?;
    let hint = outer_linear(
        &b,
        "controlnet_x_embedder",
        control.latents,
        inner,
        precision,
    )?;
    embedded.image = b.add(embedded.image, hint)?;
    let scale = b.convert(control.scale, DType::F32)?;
    let mut residuals = FluxResiduals::default();
    let project = |name: &str, index: usize, x: Tensor| {
        let layer = Linear::new(inner, "embed", "heads").with_init(Init::Zeros);
        let y = linear(&b.scope(name).scope(index), x, layer, precision)?;
        let y = b.mul(b.convert(y, DType::F32)?, scale)?;
        b.convert(y, precision.activations)
    };
    let mut keep = |block, x| {
        let (kept, name, index) = match block {
            Block::Double(index) => (&mut residuals.double, "controlnet_blocks", index),
            Block::Single(index) => (&mut residuals.single, "controlnet_single_blocks", index),
        };
        kept.push(project(name, index, x)?);
        Ok(None)
    };
    run_blocks(&b, config, embedded, remat, Some(&mut keep))?;
    Ok(residuals)
}
