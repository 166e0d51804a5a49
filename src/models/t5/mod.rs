//! transformers' `T5EncoderModel` in the layout of T5 v1.1.

pub mod original;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Builder, Init, Tensor};
use crate::host_tensor::HostTensor;
use crate::nn::{
    Linear, Precision, Remat, Result, biased_attention, constrain_tokens, dims, embedding,
    gelu_tanh, linear, linear_f32, rms_norm,
};
use crate::shape::Shape;

use super::clip::INPUT_IDS;
use super::{LARGEST_DEPTH, ModelConfigError, check_sizes, parse_error, take_fixed};

const MODEL: &str = "T5EncoderModel";

/// The run-time input that tells tokens (1) from padding (0).
pub const ATTENTION_MASK: &str = "attention_mask";

/// Attributes of the text encoder, with the names and defaults of transformers' `T5Config`.
///
/// Other fields of a `config.json` (those of the decoder, dropout, generation settings) do not change the encoder's
/// results and are ignored; feed-forward layers other than T5 v1.1's are refused.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct T5EncoderConfig {
    pub vocab_size: usize,
    pub d_model: usize,
    /// Features of one attention head.
    pub d_kv: usize,
    /// Features between the feed-forward layers.
    pub d_ff: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// Rows of the table of relative positions, half of them for each direction.
    pub relative_attention_num_buckets: usize,
    /// The distance from which on all share a bucket.
    pub relative_attention_max_distance: usize,
    pub layer_norm_epsilon: f64,
    pub initializer_factor: f64,
}

impl Default for T5EncoderConfig {
    fn default() -> Self {
        T5EncoderConfig {
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            layer_norm_epsilon: 1e-6,
            initializer_factor: 1.0,
        }
    }
}

impl T5EncoderConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_json(text: &str) -> std::result::Result<Self, ModelConfigError> {
        Self::from_map(serde_json::from_str(text).map_err(parse_error(MODEL))?)
    }

    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// As for [`T5EncoderConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> std::result::Result<Self, ModelConfigError> {
        fields.retain(|_, value| !value.is_null());
        take_fixed(MODEL, &mut fields, "model_type", &[json!("t5")])?;
        // The original T5 has one layer with ReLU, which is also the default of transformers.
        let found = fields.remove("feed_forward_proj").unwrap_or(json!("relu"));
        if found != "gated-gelu" {
            return Err(ModelConfigError::Unsupported {
                model: MODEL,
                field: "feed_forward_proj".to_string(),
                found: found.to_string(),
                expected: "\"gated-gelu\", that of T5 v1.1".to_string(),
            });
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> std::result::Result<(), ModelConfigError> {
        let inconsistent = |message| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        check_sizes(
            MODEL,
            [
                ("vocab_size", self.vocab_size),
                ("d_model", self.d_model),
                ("d_kv", self.d_kv),
                ("d_ff", self.d_ff),
                ("num_heads", self.num_heads),
                (
                    "relative_attention_num_buckets",
                    self.relative_attention_num_buckets,
                ),
                (
                    "relative_attention_max_distance",
                    self.relative_attention_max_distance,
                ),
            ],
        )?;
        // Each layer becomes operations of the program, so a slip of the keyboard would be traced for hours.
        if self.num_layers == 0 || self.num_layers > LARGEST_DEPTH {
            return inconsistent(format!(
                "num_layers = {}; expected 1 to {LARGEST_DEPTH}",
                self.num_layers
            ));
        }
        let (buckets, distance) = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        );
        if !buckets.is_multiple_of(4) || distance <= buckets / 4 {
            return inconsistent(format!(
                "relative_attention_num_buckets = {buckets} and relative_attention_max_distance = {distance}; expected a \
                 multiple of 4, and more than a quarter of it"
            ));
        }
        Ok(())
    }

    /// The bucket of each relative position (key minus query) from `1 - length` to `length - 1`: half of the buckets
    /// are for each direction; of these half are for one distance each, and the others grow with its logarithm.
    fn buckets(&self, length: usize) -> Vec<i32> {
        let half = self.relative_attention_num_buckets / 2;
        let exact = half / 2;
        // Rounded to f32 at each step, as in PyTorch: whole results of the logarithm are edges of buckets.
        let range = (self.relative_attention_max_distance as f64 / exact as f64).ln() as f32;
        let bucket = |position: i64| {
            let distance = position.unsigned_abs() as usize;
            let of_distance = match distance < exact {
                true => distance,
                false => {
                    let log = (distance as f32 / exact as f32).ln();
                    let further = log / range * (half - exact) as f32;
                    (exact + further as usize).min(half - 1)
                }
            };
            let direction = if position > 0 { half } else { 0 };
            (direction + of_distance) as i32
        };
        let last = length as i64 - 1;
        (-last..=last).map(bucket).collect()
    }
}

/// The last hidden state of token ids `[B, length]` (`s32`): `[B, length, d_model]` in the activation type.
///
/// `attention_mask` `[B, length]`, integers, hides the tokens where it is 0 from all; without one, all see all. The sum
/// of the residuals is `f32`, because it leaves the range of `f16`. Weights are declared under `root/` with the keys of
/// transformers. Under [`Remat::Full`] each block is a recomputation region.
///
/// # Errors
/// When the configuration contradicts itself, or the shapes do not fit each other.
pub fn t5_encoder(
    b: &Builder,
    root: &str,
    config: &T5EncoderConfig,
    input_ids: Tensor,
    attention_mask: Option<Tensor>,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let root = b.root(root);
    config.check().map_err(|e| root.invalid(e.to_string()))?;
    let [_, length] = dims(&root, INPUT_IDS, input_ids)?;
    let x = embedding(
        &root.scope("shared"),
        input_ids,
        config.vocab_size,
        config.d_model,
        normal(config.initializer_factor),
        precision,
    )?;
    let mut x = b.convert(constrain_tokens(&root, x)?, DType::F32)?;
    let encoder = root.scope("encoder");
    let shared = Shared {
        config,
        precision,
        bias: position_bias(&encoder, config, length, precision)?,
        attention_mask,
    };
    for index in 0..config.num_layers {
        let b = remat.block(&encoder.scope("block").scope(index));
        x = shared.block(&b, x)?;
    }
    let norm = encoder.scope("final_layer_norm");
    rms_norm(&norm, x, config.layer_norm_epsilon, precision)
}

/// What all blocks of one forward pass share.
struct Shared<'a> {
    config: &'a T5EncoderConfig,
    precision: Precision,
    /// Added to the scores of attention: `f32[heads, length, length]`.
    bias: Tensor,
    attention_mask: Option<Tensor>,
}

impl Shared<'_> {
    /// `T5Block` of an encoder: self-attention and a gated feed-forward layer, each after its norm and with a residual.
    fn block(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let config = self.config;
        let (inner, precision) = (config.num_heads * config.d_kv, self.precision);
        let factor = config.initializer_factor;
        let norm = |b: &Builder, x: Tensor| {
            rms_norm(
                &b.scope("layer_norm"),
                x,
                config.layer_norm_epsilon,
                precision,
            )
        };
        // Standard deviations of transformers' `T5PreTrainedModel._init_weights`.
        let init = |fan_in: usize| normal(factor / (fan_in as f64).sqrt());

        let attention = b.scope("layer").scope(0);
        let y = norm(&attention, x)?;
        let attention = attention.scope("SelfAttention");
        let project = |name: &str, fan_in: usize| {
            let layer = Linear::new(inner, "embed", "heads").without_bias();
            let layer = layer.with_init(init(fan_in));
            let y = linear(&attention.scope(name), y, layer, precision)?;
            constrain_tokens(&attention, y)
        };
        let qkv = [
            project("q", config.d_model * config.d_kv)?,
            project("k", config.d_model)?,
            project("v", config.d_model)?,
        ];
        let y = biased_attention(&attention, qkv, self.bias, self.attention_mask, precision)?;
        let y = constrain_tokens(&attention, y)?;
        let layer = Linear::new(config.d_model, "heads", "embed").without_bias();
        let layer = layer.with_init(init(inner));
        let x = b.add(x, linear_f32(&attention.scope("o"), y, layer, precision)?)?;

        let feed_forward = b.scope("layer").scope(1);
        let y = norm(&feed_forward, x)?;
        let feed_forward = feed_forward.scope("DenseReluDense");
        let enter = |name: &str| {
            let layer = Linear::new(config.d_ff, "embed", "mlp").without_bias();
            let layer = layer.with_init(init(config.d_model));
            linear(&feed_forward.scope(name), y, layer, precision)
        };
        let gate = gelu_tanh(&feed_forward, enter("wi_0")?)?;
        let y = b.mul(gate, enter("wi_1")?)?;
        let layer = Linear::new(config.d_model, "mlp", "embed").without_bias();
        let layer = layer.with_init(init(config.d_ff));
        b.add(
            x,
            linear_f32(&feed_forward.scope("wo"), y, layer, precision)?,
        )
    }
}

/// The bias of each head for each query and key, from the table of the first block: `f32[heads, length, length]`.
fn position_bias(
    encoder: &Builder,
    config: &T5EncoderConfig,
    length: usize,
    precision: Precision,
) -> Result<Tensor> {
    let b = encoder.scope("block.0.layer.0.SelfAttention.relative_attention_bias");
    let size = [config.relative_attention_num_buckets, config.num_heads];
    let table = b.param(
        "weight",
        Shape::new(precision.weights, size),
        normal(config.initializer_factor / (config.d_model as f64).sqrt()),
        &[None, Some("heads")],
    )?;
    let table = b.convert(table, DType::F32)?;
    let buckets = config.buckets(length);
    let buckets = b.constant(HostTensor::from_i32([buckets.len()], &buckets)?)?;
    let of_positions = b.take(table, buckets)?;
    let positions = Shape::new(DType::S32, [length, length]);
    let difference = b.sub(b.iota(positions.clone(), 1)?, b.iota(positions, 0)?)?;
    let index = b.add_scalar(difference, length as f64 - 1.0)?;
    let bias = b.take(of_positions, index)?;
    b.transpose(bias, &[2, 0, 1])
}

fn normal(std: f64) -> Init {
    Init::Normal { std: std as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `google/t5-v1_1-xxl`, whose encoder FLUX.1 has.
    const XXL: &str = r#"{"architectures": ["T5EncoderModel"], "classifier_dropout": 0.0, "d_ff": 10240, "d_kv": 64,
        "d_model": 4096, "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1,
        "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": true,
        "is_gated_act": true, "layer_norm_epsilon": 1e-06, "model_type": "t5", "num_decoder_layers": 24,
        "num_heads": 64, "num_layers": 24, "output_past": true, "pad_token_id": 0,
        "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.43.3", "use_cache": true,
        "vocab_size": 32128}"#;

    #[test]
    fn xxl_has_the_parameters_of_its_checkpoint() {
        let config = T5EncoderConfig::from_json(XXL).unwrap();
        let b = Builder::new();
        let ids = b
            .input(INPUT_IDS, Shape::new(DType::S32, [1, 512]), &[])
            .unwrap();
        let y = t5_encoder(
            &b,
            "text_encoder_2",
            &config,
            ids,
            None,
            Precision::F32,
            Remat::None,
        )
        .unwrap();
        assert_eq!(b.dims(y), [1, 512, 4096]);
        let graph = b.finish();
        assert_eq!(graph.parameter_count(), 4_762_310_656);
        let last = "text_encoder_2/encoder.block.23.layer.1.DenseReluDense.wo.weight";
        let axes = |name: &str| {
            graph.inputs[graph.input_index(name).unwrap()]
                .logical_axes
                .clone()
        };
        assert_eq!(axes(last), [Some("embed"), Some("mlp")]);
        assert_eq!(
            axes("text_encoder_2/shared.weight"),
            [Some("vocab"), Some("embed")]
        );
    }

    #[test]
    fn the_original_t5_and_other_models_are_refused_by_name() {
        let error = |text: &str| T5EncoderConfig::from_json(text).unwrap_err().to_string();
        assert!(error("{}").contains("feed_forward_proj = \"relu\""));
        assert!(error(r#"{"model_type": "umt5"}"#).contains("model_type = \"umt5\""));
        let with = |field: &str| {
            error(&format!(
                r#"{{"feed_forward_proj": "gated-gelu", {field}}}"#
            ))
        };
        assert!(with(r#""num_layers": 0"#).contains("num_layers = 0"));
        assert!(with(r#""d_kv": 0"#).contains("d_kv = 0"));
        assert!(with(r#""relative_attention_num_buckets": 6"#).contains("= 6 and"));
    }
}
