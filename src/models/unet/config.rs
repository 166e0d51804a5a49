//! The UNet's configuration: the `config.json` of a diffusers checkpoint.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::models::{
    LARGEST_DEPTH, ModelConfigError, check_class, check_sizes, each_size, parse_error, take_fixed,
};
use crate::nn::Activation;

const MODEL: &str = "UNet2DConditionModel";

/// One value for all blocks, or one for each, from the highest resolution down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected one value or a list with one for each block"
)]
pub enum PerBlock<T> {
    All(T),
    Each(Vec<T>),
}

impl<T: Copy> PerBlock<T> {
    /// The value of block `index`, if the list is that long.
    pub fn get(&self, index: usize) -> Option<T> {
        match self {
            PerBlock::All(value) => Some(*value),
            PerBlock::Each(values) => values.get(index).copied(),
        }
    }

    fn len(&self) -> Option<usize> {
        match self {
            PerBlock::All(_) => None,
            PerBlock::Each(values) => Some(values.len()),
        }
    }
}

/// Down blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DownBlockType {
    DownBlock2D,
    CrossAttnDownBlock2D,
}

/// Up blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpBlockType {
    UpBlock2D,
    CrossAttnUpBlock2D,
}

/// How a resnet block takes the time embedding in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeScaleShift {
    /// Added after the first convolution.
    Default,
    /// A scale and a shift of the second norm's result.
    ScaleShift,
}

/// The conditioning that is added to the time embedding besides the timestep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdditionEmbedType {
    /// SDXL's: pooled text embeddings and the sizes and crops of the image.
    TextTime,
}

/// The spatial size a checkpoint was trained at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a size or [height, width]")]
pub enum SampleSize {
    Square(usize),
    HeightWidth([usize; 2]),
}

/// Attributes of the UNet, with the names and defaults of diffusers' `UNet2DConditionModel`.
///
/// Deserializing refuses by name every field that is unknown, and every known one whose value asks for an
/// architecture that is not built here. Fields that start with `_` (diffusers' own notes) are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default, deny_unknown_fields)]
pub struct UNet2DConditionConfig {
    /// Height and width of the latents the checkpoint was trained on. Nothing in the forward pass depends on it.
    pub sample_size: Option<SampleSize>,
    pub in_channels: usize,
    pub out_channels: usize,
    /// Whether samples in [0, 1] are mapped to [-1, 1] first.
    pub center_input_sample: bool,
    pub flip_sin_to_cos: bool,
    pub freq_shift: f64,
    pub down_block_types: Vec<DownBlockType>,
    pub up_block_types: Vec<UpBlockType>,
    /// Whether the first attention of a transformer block attends to the text instead of the image.
    pub only_cross_attention: PerBlock<bool>,
    pub block_out_channels: Vec<usize>,
    pub layers_per_block: PerBlock<usize>,
    /// 1 pads all sides before a downsampling convolution; 0 pads bottom and right only.
    pub downsample_padding: i64,
    /// Divides the results of the middle block's resnets.
    pub mid_block_scale_factor: f64,
    pub act_fn: Activation,
    pub norm_num_groups: usize,
    pub norm_eps: f64,
    /// The size of the text encoder's hidden states.
    pub cross_attention_dim: PerBlock<usize>,
    pub transformer_layers_per_block: PerBlock<usize>,
    /// The **number** of heads, in spite of its name: a misnomer that diffusers keeps for its checkpoints.
    pub attention_head_dim: PerBlock<usize>,
    /// Whether transformers are entered and left by linear layers instead of 1x1 convolutions.
    pub use_linear_projection: bool,
    /// Asks for attention scores in `f32`. They always are here, so both values compute the same.
    pub upcast_attention: bool,
    pub resnet_time_scale_shift: TimeScaleShift,
    pub time_embedding_dim: Option<usize>,
    pub conv_in_kernel: usize,
    pub conv_out_kernel: usize,
    pub addition_embed_type: Option<AdditionEmbedType>,
    /// The size of the sinusoidal embedding of each time id.
    pub addition_time_embed_dim: Option<usize>,
    /// The size of text and time embeddings together.
    pub projection_class_embeddings_input_dim: Option<usize>,
}

impl Default for UNet2DConditionConfig {
    fn default() -> Self {
        use DownBlockType::{CrossAttnDownBlock2D, DownBlock2D};
        use UpBlockType::{CrossAttnUpBlock2D, UpBlock2D};
        UNet2DConditionConfig {
            sample_size: None,
            in_channels: 4,
            out_channels: 4,
            center_input_sample: false,
            flip_sin_to_cos: true,
            freq_shift: 0.0,
            down_block_types: vec![
                CrossAttnDownBlock2D,
                CrossAttnDownBlock2D,
                CrossAttnDownBlock2D,
                DownBlock2D,
            ],
            up_block_types: vec![
                UpBlock2D,
                CrossAttnUpBlock2D,
                CrossAttnUpBlock2D,
                CrossAttnUpBlock2D,
            ],
            only_cross_attention: PerBlock::All(false),
            block_out_channels: vec![320, 640, 1280, 1280],
            layers_per_block: PerBlock::All(2),
            downsample_padding: 1,
            mid_block_scale_factor: 1.0,
            act_fn: Activation::Silu,
            norm_num_groups: 32,
            norm_eps: 1e-5,
            cross_attention_dim: PerBlock::All(1280),
            transformer_layers_per_block: PerBlock::All(1),
            attention_head_dim: PerBlock::All(8),
            use_linear_projection: false,
            upcast_attention: false,
            resnet_time_scale_shift: TimeScaleShift::Default,
            time_embedding_dim: None,
            conv_in_kernel: 3,
            conv_out_kernel: 3,
            addition_embed_type: None,
            addition_time_embed_dim: None,
            projection_class_embeddings_input_dim: None,
        }
    }
}

/// Fields with one supported value besides null, which is also what their absence means.
fn fixed_fields() -> [(&'static str, Value); 20] {
    [
        ("mid_block_type", json!("UNetMidBlock2DCrossAttn")),
        ("dropout", json!(0.0)),
        ("reverse_transformer_layers_per_block", Value::Null),
        ("encoder_hid_dim", Value::Null),
        ("encoder_hid_dim_type", Value::Null),
        ("num_attention_heads", Value::Null),
        ("dual_cross_attention", json!(false)),
        ("class_embed_type", Value::Null),
        ("num_class_embeds", Value::Null),
        ("resnet_skip_time_act", json!(false)),
        ("resnet_out_scale_factor", json!(1.0)),
        ("time_embedding_type", json!("positional")),
        ("time_embedding_act_fn", Value::Null),
        ("timestep_post_act", Value::Null),
        ("time_cond_proj_dim", Value::Null),
        ("attention_type", json!("default")),
        ("class_embeddings_concat", json!(false)),
        ("mid_block_only_cross_attention", json!(false)),
        ("cross_attention_norm", Value::Null),
        // Read by diffusers for another `addition_embed_type` only.
        ("addition_embed_type_num_heads", json!(64)),
    ]
}

/// Most blocks of a way: each halves height and width.
const LARGEST_LEVELS: usize = 16;

/// Largest side of a convolution's kernel.
const LARGEST_KERNEL: usize = 99;

impl UNet2DConditionConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_json(text: &str) -> Result<Self, ModelConfigError> {
        let fields = serde_json::from_str(text).map_err(parse_error(MODEL))?;
        Self::from_map(fields)
    }

    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// As for [`UNet2DConditionConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        fields.retain(|name, _| !name.starts_with('_'));
        // How weights are stored, not what they are of ([`crate::weights::quantized`]).
        fields.remove("quantization_config");
        // Null means "the default" except here, where diffusers leaves the layer out.
        for (field, expected) in [
            ("norm_num_groups", "a number of groups"),
            ("mid_block_type", "\"UNetMidBlock2DCrossAttn\""),
        ] {
            if fields.get(field) == Some(&Value::Null) {
                return Err(ModelConfigError::Unsupported {
                    model: MODEL,
                    field: field.to_string(),
                    found: "null".to_string(),
                    expected: expected.to_string(),
                });
            }
        }
        fields.retain(|_, value| !value.is_null());
        for (field, value) in fixed_fields() {
            let mut allowed = vec![value];
            // JSON writers differ in whether they write 0.0 or 0.
            if let Some(number) = allowed[0].as_f64() {
                allowed.push(json!(number as i64));
            }
            take_fixed(MODEL, &mut fields, field, &allowed)?;
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    /// The number of blocks on each way.
    pub fn levels(&self) -> usize {
        self.block_out_channels.len()
    }

    /// Height and width of a sample must be multiples of this: each block but the last halves them.
    pub fn spatial_multiple(&self) -> usize {
        1 << self.levels().saturating_sub(1)
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> Result<(), ModelConfigError> {
        self.check_lengths()?;
        self.check_sizes()?;
        for level in 0..self.levels() {
            self.check_block(level)?;
        }
        self.check_depth()?;
        for (field, kernel) in [
            ("conv_in_kernel", self.conv_in_kernel),
            ("conv_out_kernel", self.conv_out_kernel),
        ] {
            if kernel.is_multiple_of(2) || kernel > LARGEST_KERNEL {
                return inconsistent(format!(
                    "{field} = {kernel}; expected an odd number up to {LARGEST_KERNEL}, which keeps the size"
                ));
            }
        }
        if !matches!(self.downsample_padding, 0 | 1) {
            return inconsistent(format!(
                "downsample_padding = {}; expected 0 or 1",
                self.downsample_padding
            ));
        }
        let text_time = [
            self.addition_time_embed_dim,
            self.projection_class_embeddings_input_dim,
        ];
        match self.addition_embed_type {
            Some(AdditionEmbedType::TextTime) if text_time.contains(&None) => inconsistent(
                "addition_embed_type = text_time needs addition_time_embed_dim and \
                 projection_class_embeddings_input_dim",
            ),
            None if text_time != [None, None] => inconsistent(
                "addition_time_embed_dim and projection_class_embeddings_input_dim have no effect without \
                 addition_embed_type = text_time",
            ),
            _ => Ok(()),
        }
    }

    /// Sizes are those of models.
    fn check_sizes(&self) -> Result<(), ModelConfigError> {
        let attended = (0..self.levels()).filter_map(|level| {
            Some((
                format!("cross_attention_dim[{level}]"),
                self.cross_attention_dim.get(level)?,
            ))
        });
        let single = [
            ("in_channels", Some(self.in_channels)),
            ("out_channels", Some(self.out_channels)),
            ("time_embedding_dim", self.time_embedding_dim),
            ("addition_time_embed_dim", self.addition_time_embed_dim),
            (
                "projection_class_embeddings_input_dim",
                self.projection_class_embeddings_input_dim,
            ),
        ];
        let single = single
            .into_iter()
            .filter_map(|(field, size)| Some((field.to_owned(), size?)));
        let channels = each_size("block_out_channels", &self.block_out_channels);
        check_sizes(MODEL, single.chain(channels).chain(attended))
    }

    /// Lists have one entry for each block.
    fn check_lengths(&self) -> Result<(), ModelConfigError> {
        let levels = self.levels();
        if levels == 0 || levels > LARGEST_LEVELS {
            return inconsistent(format!(
                "block_out_channels has {levels} entries; expected 1 to {LARGEST_LEVELS}"
            ));
        }
        for (field, length) in [
            ("down_block_types", Some(self.down_block_types.len())),
            ("up_block_types", Some(self.up_block_types.len())),
            ("only_cross_attention", self.only_cross_attention.len()),
            ("layers_per_block", self.layers_per_block.len()),
            ("cross_attention_dim", self.cross_attention_dim.len()),
            (
                "transformer_layers_per_block",
                self.transformer_layers_per_block.len(),
            ),
            ("attention_head_dim", self.attention_head_dim.len()),
        ] {
            if length.is_some_and(|length| length != levels) {
                return inconsistent(format!(
                    "{field} has {} entries for the {levels} of block_out_channels",
                    length.unwrap_or_default()
                ));
            }
        }
        Ok(())
    }

    /// The numbers of block `level` fit each other.
    fn check_block(&self, level: usize) -> Result<(), ModelConfigError> {
        let channels = self.block_out_channels[level];
        if self.norm_num_groups == 0 || !channels.is_multiple_of(self.norm_num_groups) {
            return inconsistent(format!(
                "norm_num_groups = {} does not divide block_out_channels[{level}] = {channels}",
                self.norm_num_groups
            ));
        }
        let heads = self.attention_head_dim.get(level).unwrap_or(0);
        if heads == 0 || !channels.is_multiple_of(heads) {
            return inconsistent(format!(
                "attention_head_dim (the number of heads) = {heads} does not divide \
                 block_out_channels[{level}] = {channels}"
            ));
        }
        if self.layers_per_block.get(level) == Some(0) {
            return inconsistent(format!("layers_per_block is 0 in block {level}"));
        }
        Ok(())
    }

    /// Each layer becomes operations of the program, so a typing mistake would be traced for hours.
    fn check_depth(&self) -> Result<(), ModelConfigError> {
        let layers = (0..self.levels()).map(|level| {
            let blocks = self.layers_per_block.get(level).unwrap_or(0);
            let each = self.transformer_layers_per_block.get(level).unwrap_or(0);
            blocks.saturating_mul(each.max(1))
        });
        let depth = layers.fold(0, usize::saturating_add);
        if depth > LARGEST_DEPTH {
            return inconsistent(format!(
                "layers_per_block and transformer_layers_per_block make {depth} layers in the down blocks; expected \
                 at most \
                 {LARGEST_DEPTH} (SDXL has 26)"
            ));
        }
        Ok(())
    }
}

fn inconsistent(message: impl Into<String>) -> Result<(), ModelConfigError> {
    Err(ModelConfigError::Inconsistent {
        model: MODEL,
        message: message.into(),
    })
}

impl<'de> Deserialize<'de> for UNet2DConditionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_map(fields).map_err(serde::de::Error::custom)
    }
}

impl Serialize for UNet2DConditionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_diffusers_writes_and_keeps_it() {
        let text = r#"{
            "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.19.0.dev0",
            "act_fn": "silu", "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64,
            "addition_time_embed_dim": 256, "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280], "class_embed_type": null, "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "dropout": 0, "mid_block_type": "UNetMidBlock2DCrossAttn", "norm_eps": 1e-05,
            "projection_class_embeddings_input_dim": 2816, "resnet_out_scale_factor": 1.0,
            "sample_size": 128, "transformer_layers_per_block": [1, 2, 10],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "upcast_attention": null, "use_linear_projection": true
        }"#;
        let config = UNet2DConditionConfig::from_json(text).unwrap();
        assert_eq!(config.attention_head_dim, PerBlock::Each(vec![5, 10, 20]));
        assert_eq!(config.sample_size, Some(SampleSize::Square(128)));
        assert_eq!(config.spatial_multiple(), 4);
        let again: UNet2DConditionConfig =
            serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn refuses_by_name_what_is_not_built() {
        let error = |text: &str| {
            UNet2DConditionConfig::from_json(text)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(r#"{"dual_cross_attention": true}"#),
            "UNet2DConditionModel: dual_cross_attention = true is not supported; expected false"
        );
        assert_eq!(
            error(r#"{"class_embed_type": "timestep"}"#),
            "UNet2DConditionModel: class_embed_type = \"timestep\" is not supported; expected null"
        );
        assert!(error(r#"{"norm_num_groups": null}"#).contains("norm_num_groups = null"));
        assert!(error(r#"{"hidden_layers": 3}"#).contains("unknown field `hidden_layers`"));
        assert!(error(r#"{"down_block_types": ["AttnDownBlock2D"]}"#).contains("AttnDownBlock2D"));
        assert!(
            error(r#"{"attention_head_dim": [8, 8]}"#)
                .contains("attention_head_dim has 2 entries for the 4")
        );
        assert!(
            error(r#"{"norm_num_groups": 48}"#).contains("norm_num_groups = 48 does not divide")
        );
        assert!(
            error(r#"{"addition_embed_type": "text_time"}"#).contains("addition_time_embed_dim")
        );
        assert!(error(r#"{"block_out_channels": "wide"}"#).contains("not valid"));
        assert!(error(r#"{"layers_per_block": 100000}"#).contains("make 400000 layers"));
        assert_eq!(
            error(r#"{"block_out_channels": [320, 1099511627776, 1280, 1280]}"#),
            "UNet2DConditionModel: block_out_channels[1] = 1099511627776 is not supported; expected 1 to 1048576"
        );
        assert!(error(r#"{"cross_attention_dim": 4611686018427387904}"#).contains("_dim[0] = 46"));
        assert!(error(r#"{"conv_in_kernel": 101}"#).contains("expected an odd number up to 99"));
        // 2^98 rows of latents to one of the innermost block would overflow.
        let deep = vec![320; 99];
        assert!(
            error(&format!(r#"{{"block_out_channels": {deep:?}}}"#)).contains("has 99 entries")
        );
    }
}
