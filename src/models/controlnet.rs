//! diffusers' `ControlNetModel`, of Stable Diffusion 1.x, 2.x and XL: a copy of the UNet's down blocks and
//! mid block that also sees an image, and whose outputs are added to the UNet's (Zhang et al. 2023, "Adding Conditional
//! Control to Text-to-Image Diffusion Models").

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Builder, Init, Tensor};
use crate::nn::{Conv2d, Precision, Remat, Result, conv2d, dims, silu};

use super::unet::{self, ResSamples, UNet2DConditionConfig, UNetInputs};
use super::{ModelConfigError, check_class, check_sizes, each_size, parse_error, take_fixed};

const MODEL: &str = "ControlNetModel";

/// The root of the parameter paths of a text-to-image model's first ControlNet.
pub const ROOT: &str = "controlnet";

/// The root of ControlNet `which`'s parameter paths: `controlnet`, `controlnet_1`, the folders that diffusers'
/// `MultiControlNetModel` saves them in.
pub fn root(which: usize) -> String {
    match which {
        0 => ROOT.to_string(),
        _ => format!("{ROOT}_{which}"),
    }
}

/// The order of the channels that a ControlNet was trained with. Images are RGB always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChannelOrder {
    Rgb,
    Bgr,
}

/// Attributes of a ControlNet, with the names and defaults of diffusers' `ControlNetModel`.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlNetConfig {
    /// The fields in common with the UNet it controls. `up_block_types` mirrors the down blocks; fields of the up
    /// blocks and of the output have no effect.
    pub unet: UNet2DConditionConfig,
    /// The fields of ControlNets alone.
    pub condition: ConditionConfig,
}

/// The configuration of a ControlNet's conditioning image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConditionConfig {
    /// Channels of the image.
    pub conditioning_channels: usize,
    /// Channels of the convolutions that bring the image to the latents' size: each after the first halves it.
    pub conditioning_embedding_out_channels: Vec<usize>,
    pub controlnet_conditioning_channel_order: ChannelOrder,
}

impl Default for ConditionConfig {
    fn default() -> Self {
        ConditionConfig {
            conditioning_channels: 3,
            conditioning_embedding_out_channels: vec![16, 32, 96, 256],
            controlnet_conditioning_channel_order: ChannelOrder::Rgb,
        }
    }
}

/// The fields that a ControlNet has in common with the UNet.
const SHARED_FIELDS: [&str; 28] = [
    "in_channels",
    "flip_sin_to_cos",
    "freq_shift",
    "down_block_types",
    "mid_block_type",
    "only_cross_attention",
    "block_out_channels",
    "layers_per_block",
    "downsample_padding",
    "mid_block_scale_factor",
    "act_fn",
    "norm_num_groups",
    "norm_eps",
    "cross_attention_dim",
    "transformer_layers_per_block",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
    "attention_head_dim",
    "num_attention_heads",
    "use_linear_projection",
    "class_embed_type",
    "addition_embed_type",
    "addition_time_embed_dim",
    "num_class_embeds",
    "upcast_attention",
    "resnet_time_scale_shift",
    "projection_class_embeddings_input_dim",
    "addition_embed_type_num_heads",
];

/// Most entries of `conditioning_embedding_out_channels`: each after the first halves height and width.
const LARGEST_COUNT: usize = 16;

impl ControlNetConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_json(text: &str) -> std::result::Result<Self, ModelConfigError> {
        Self::from_map(serde_json::from_str(text).map_err(parse_error(MODEL))?)
    }

    /// Reads and checks the fields of a `config.json`: refuses by name what is unknown or not built here, and ignores
    /// fields that start with `_`.
    ///
    /// # Errors
    /// As for [`ControlNetConfig::from_json`].
    pub fn from_map(fields: Map<String, Value>) -> std::result::Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        let (mut unet, mut own): (Map<String, Value>, Map<String, Value>) = fields
            .into_iter()
            .partition(|(name, _)| SHARED_FIELDS.contains(&name.as_str()));
        own.retain(|name, value| !name.starts_with('_') && !value.is_null());
        take_fixed(MODEL, &mut own, "global_pool_conditions", &[json!(false)])?;
        let condition =
            ConditionConfig::deserialize(Value::Object(own)).map_err(parse_error(MODEL))?;

        // A UNet has as many up blocks; a ControlNet's configuration does not list them.
        if let Some(down) = unet.get("down_block_types").and_then(Value::as_array) {
            let up = down.iter().rev().map(|kind| match kind.as_str() {
                Some(name) => Value::from(name.replace("Down", "Up")),
                None => kind.clone(),
            });
            let up = up.collect();
            unet.insert("up_block_types".to_string(), Value::Array(up));
        }
        let config = ControlNetConfig {
            unet: UNet2DConditionConfig::from_map(unet).map_err(|e| e.of(MODEL))?,
            condition,
        };
        config.check()?;
        Ok(config)
    }

    /// Rows of the image to a row of latents.
    ///
    /// The configuration must have passed [`ControlNetConfig::check`].
    pub fn spatial_multiple(&self) -> usize {
        let convolutions = self.condition.conditioning_embedding_out_channels.len();
        1 << convolutions.saturating_sub(1)
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> std::result::Result<(), ModelConfigError> {
        self.unet.check().map_err(|e| e.of(MODEL))?;
        let inconsistent = |message| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        let channels = &self.condition.conditioning_embedding_out_channels;
        if channels.is_empty() || channels.len() > LARGEST_COUNT {
            return inconsistent(format!(
                "conditioning_embedding_out_channels has {} entries; expected 1 to {LARGEST_COUNT}",
                channels.len()
            ));
        }
        let single = (
            "conditioning_channels".to_owned(),
            self.condition.conditioning_channels,
        );
        let channels = each_size("conditioning_embedding_out_channels", channels);
        check_sizes(MODEL, std::iter::once(single).chain(channels))
    }
}

/// The inputs of a ControlNet besides the UNet's.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    /// An image for each sample, `[B, conditioning_channels, m * height, m * width]` with `m` the configuration's
    /// spatial multiple; values in [0, 1], RGB.
    pub image: Tensor,
    /// The factor of the result: a scalar of a float type.
    pub scale: Tensor,
}

/// The residuals that a ControlNet adds to the UNet, in `precision.activations`; see
/// [`UNetInputs::additional_residuals`].
///
/// Weights are declared under `root/` with diffusers' keys. Under [`Remat::Full`] each resnet and each transformer
/// layer is a recomputation region.
///
/// # Errors
/// When the configuration contradicts itself, or an input's shape does not fit it.
pub fn controlnet(
    b: &Builder,
    root: &str,
    config: &ControlNetConfig,
    inputs: &UNetInputs,
    control: Control,
    precision: Precision,
    remat: Remat,
) -> Result<ResSamples> {
    let b = b.root(root);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    if inputs.additional_residuals.is_some() {
        return Err(b.invalid("a ControlNet takes no additional_residuals: they are the UNet's"));
    }
    check_control(&b, config, inputs, control)?;
    let shared = unet::shared(&b, &config.unet, inputs, precision, remat)?;
    let sample = unet::conv_in(&b, &shared, inputs.sample)?;
    let hint = embed(
        &b.scope("controlnet_cond_embedding"),
        config,
        control.image,
        precision,
    )?;
    let sample = b.add(sample, hint)?;
    let copied = unet::encode(&b, &shared, sample)?;

    let scale = b.convert(control.scale, DType::F32)?;
    let project = |b: &Builder, x: Tensor| {
        let [_, _, _, channels] = dims(b, "residual", x)?;
        let layer = Conv2d::same(channels, 1).with_init(Init::Zeros);
        let y = conv2d(b, x, layer, precision)?;
        let y = b.convert(y, DType::F32)?;
        let y = b.mul(y, scale)?;
        b.convert(y, precision.activations)
    };
    let blocks = b.scope("controlnet_down_blocks");
    let down_blocks = copied.down_blocks.iter().enumerate();
    Ok(ResSamples {
        down_blocks: down_blocks
            .map(|(index, &x)| project(&blocks.scope(index), x))
            .collect::<Result<_>>()?,
        mid_block: project(&b.scope("controlnet_mid_block"), copied.mid_block)?,
    })
}

/// Checks the shapes of the inputs besides the UNet's.
fn check_control(
    b: &Builder,
    config: &ControlNetConfig,
    inputs: &UNetInputs,
    control: Control,
) -> Result<()> {
    let [batch, _, height, width] = dims(b, "sample", inputs.sample)?;
    let multiple = config.spatial_multiple();
    let expected = [
        batch,
        config.condition.conditioning_channels,
        multiple.saturating_mul(height),
        multiple.saturating_mul(width),
    ];
    if b.dims(control.image) != expected {
        return Err(b.invalid(format!(
            "control image {} for sample {}; expected sizes {expected:?}",
            b.shape(control.image),
            b.shape(inputs.sample)
        )));
    }
    if !b.dims(control.scale).is_empty() {
        return Err(b.invalid(format!(
            "conditioning scale {} is not a scalar",
            b.shape(control.scale)
        )));
    }
    Ok(())
}

/// `ControlNetConditioningEmbedding`: the conditioning image `[B, channels, m * height, m * width]` as features of
/// the latents' size, with the channels of the UNet's first block.
fn embed(
    b: &Builder,
    config: &ControlNetConfig,
    image: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let conv = |b: &Builder, x: Tensor, layer: Conv2d| {
        let y = conv2d(b, x, layer, precision)?;
        silu(b, y)
    };
    let channels = &config.condition.conditioning_embedding_out_channels;
    let x = b.convert(image, precision.activations)?;
    let mut x = b.transpose(x, &[0, 2, 3, 1])?;
    x = match config.condition.controlnet_conditioning_channel_order {
        ChannelOrder::Rgb => x,
        ChannelOrder::Bgr => b.reverse(x, &[3])?,
    };
    x = conv(&b.scope("conv_in"), x, Conv2d::same(channels[0], 3))?;
    let blocks = b.scope("blocks");
    for (index, pair) in channels.windows(2).enumerate() {
        let keep = Conv2d::same(pair[0], 3);
        x = conv(&blocks.scope(2 * index), x, keep)?;
        let halve = Conv2d {
            stride: 2,
            ..Conv2d::same(pair[1], 3)
        };
        x = conv(&blocks.scope(2 * index + 1), x, halve)?;
    }
    let layer = Conv2d::same(config.unet.block_out_channels[0], 3).with_init(Init::Zeros);
    conv2d(&b.scope("conv_out"), x, layer, precision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::unet::UpBlockType::{CrossAttnUpBlock2D, UpBlock2D};

    #[test]
    fn reads_what_diffusers_writes() {
        let text = r#"{
            "_class_name": "ControlNetModel", "_diffusers_version": "0.19.3", "act_fn": "silu",
            "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "class_embed_type": null,
            "conditioning_channels": 3, "conditioning_embedding_out_channels": [16, 32, 96, 256],
            "controlnet_conditioning_channel_order": "bgr", "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "encoder_hid_dim": null, "global_pool_conditions": false, "norm_eps": 1e-05,
            "projection_class_embeddings_input_dim": 2816, "transformer_layers_per_block": [1, 2, 10],
            "upcast_attention": null, "use_linear_projection": true
        }"#;
        let config = ControlNetConfig::from_json(text).unwrap();
        assert_eq!(config.spatial_multiple(), 8);
        assert_eq!(
            config.condition.controlnet_conditioning_channel_order,
            ChannelOrder::Bgr
        );
        assert_eq!(
            config.unet.up_block_types,
            [CrossAttnUpBlock2D, CrossAttnUpBlock2D, UpBlock2D]
        );
    }

    #[test]
    fn refuses_by_name_what_is_not_built() {
        let error = |text: &str| ControlNetConfig::from_json(text).unwrap_err().to_string();
        assert_eq!(
            error(r#"{"global_pool_conditions": true}"#),
            "ControlNetModel: global_pool_conditions = true is not supported; expected false"
        );
        assert_eq!(
            error(r#"{"class_embed_type": "timestep"}"#),
            "ControlNetModel: class_embed_type = \"timestep\" is not supported; expected null"
        );
        // A field of the UNet's up blocks is unknown to a ControlNet.
        assert!(error(r#"{"out_channels": 4}"#).contains("unknown field `out_channels`"));
        assert!(
            error(r#"{"down_block_types": ["AttnDownBlock2D"]}"#).contains("`AttnDownBlock2D`")
        );
        assert!(error(r#"{"down_block_types": [3]}"#).contains("not valid"));
        assert!(error(r#"{"conditioning_embedding_out_channels": []}"#).contains("has 0 entries"));
        assert!(error(r#"{"conditioning_channels": 0}"#).contains("conditioning_channels = 0"));
        assert!(error(r#"{"controlnet_conditioning_channel_order": "rgba"}"#).contains("`rgba`"));
    }
}
