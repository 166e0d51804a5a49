//! transformers' `CLIPTextModel` and `CLIPTextModelWithProjection`.

pub mod original;
pub mod vision;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, Init, Reduction, Tensor};
use crate::nn::{
    Activation, Attention, Linear, Precision, Remat, Result, attention, constrain_tokens, dims,
    embedding, layer_norm, linear,
};
use crate::shape::Shape;

use super::{ModelConfigError, check_depth, check_sizes, parse_error, take_fixed};

const MODEL: &str = "CLIPTextModel";

/// The weight with a row for each token, below the model's root.
pub const TOKEN_EMBEDDING: &str = "text_model.embeddings.token_embedding.weight";

/// The run-time input of token ids.
pub const INPUT_IDS: &str = "input_ids";

/// Attributes of the text encoder, with the names and defaults of transformers' `CLIPTextConfig`.
///
/// Other fields of a `config.json` (generation settings, versions) do not change the forward pass and are ignored;
/// dropout and other model types are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default)]
pub struct ClipTextConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// Features of the projection of the pooled output, when the architecture has one.
    pub projection_dim: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub max_position_embeddings: usize,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
    pub initializer_factor: f64,
    /// The token whose position is pooled. 2 is what checkpoints before transformers 4.31 say by mistake: they pool
    /// at the highest token id.
    pub eos_token_id: i32,
    /// `CLIPTextModelWithProjection` here adds `text_projection.weight`.
    pub architectures: Vec<String>,
}

impl Default for ClipTextConfig {
    fn default() -> Self {
        ClipTextConfig {
            vocab_size: 49408,
            hidden_size: 512,
            intermediate_size: 2048,
            projection_dim: 512,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            max_position_embeddings: 77,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
            initializer_factor: 1.0,
            eos_token_id: 49407,
            architectures: vec![MODEL.to_string()],
        }
    }
}

impl ClipTextConfig {
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
    /// As for [`ClipTextConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> std::result::Result<Self, ModelConfigError> {
        fields.retain(|_, value| !value.is_null());
        let classes = fields.get("architectures").and_then(Value::as_array);
        let is_clip = |class: &Value| class.as_str().is_some_and(|class| class.contains("CLIP"));
        if let Some(classes) = classes.filter(|classes| !classes.iter().any(is_clip)) {
            return Err(ModelConfigError::Unsupported {
                model: MODEL,
                field: "architectures".to_string(),
                found: Value::from(classes.as_slice()).to_string(),
                expected: format!("{MODEL} or CLIPTextModelWithProjection"),
            });
        }
        take_fixed(
            MODEL,
            &mut fields,
            "model_type",
            &[json!("clip_text_model")],
        )?;
        for field in ["attention_dropout", "dropout"] {
            take_fixed(MODEL, &mut fields, field, &[json!(0.0), json!(0)])?;
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    fn layer(&self) -> EncoderLayer {
        EncoderLayer {
            features: self.hidden_size,
            inner: self.intermediate_size,
            attention: Attention {
                heads: self.num_attention_heads,
                causal: true,
            },
            activation: self.hidden_act,
            epsilon: self.layer_norm_eps,
            depth: self.num_hidden_layers,
            initializer_factor: self.initializer_factor,
        }
    }

    /// Whether the pooled output is projected.
    pub fn has_projection(&self) -> bool {
        self.architectures
            .iter()
            .any(|a| a == "CLIPTextModelWithProjection")
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
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        let projection = ("projection_dim", self.projection_dim);
        let projection = self.has_projection().then_some(projection);
        check_sizes(MODEL, sizes.into_iter().chain(projection))?;
        if self.num_attention_heads == 0
            || !self.hidden_size.is_multiple_of(self.num_attention_heads)
        {
            return inconsistent(format!(
                "num_attention_heads = {} does not divide hidden_size = {}",
                self.num_attention_heads, self.hidden_size
            ));
        }
        check_depth(MODEL, [("num_hidden_layers", self.num_hidden_layers)])
    }
}

impl<'de> Deserialize<'de> for ClipTextConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_map(fields).map_err(serde::de::Error::custom)
    }
}

impl Serialize for ClipTextConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

/// The outputs of the text encoder. All values are in the activation type.
#[derive(Clone, Debug)]
pub struct ClipTextOutput {
    /// After the final layer norm: `[B, length, hidden_size]`.
    pub last_hidden_state: Tensor,
    /// The embeddings, then each layer's result, before the final layer norm. SD 2.x conditions on the last but one
    /// with the final layer norm, SDXL on the last but one as it is.
    pub hidden_states: Vec<Tensor>,
    /// `last_hidden_state` at the end-of-text token: `[B, hidden_size]`.
    pub pooler_output: Tensor,
    /// The projection of `pooler_output`: `[B, projection_dim]`.
    pub text_embeds: Option<Tensor>,
}

/// Encodes token ids `[B, length]` (`s32`).
///
/// Weights are declared under `root/` with the keys of Stable Diffusion's text encoders. Under [`Remat::Full`] each
/// layer is a recomputation region.
///
/// # Errors
/// When the configuration contradicts itself, or there are more tokens than position embeddings.
pub fn clip_text(
    b: &Builder,
    root: &str,
    config: &ClipTextConfig,
    input_ids: Tensor,
    precision: Precision,
    remat: Remat,
) -> Result<ClipTextOutput> {
    let root = b.root(root);
    config.check().map_err(|e| root.invalid(e.to_string()))?;
    let [_, length] = dims(&root, INPUT_IDS, input_ids)?;
    if length > config.max_position_embeddings {
        return Err(root.invalid(format!(
            "{length} tokens do not fit max_position_embeddings = {}",
            config.max_position_embeddings
        )));
    }
    let b = root.scope("text_model");
    let mut x = embeddings(&b.scope("embeddings"), config, input_ids, length, precision)?;
    let mut hidden_states = vec![x];
    for layer in 0..config.num_hidden_layers {
        let b = remat.block(&b.scope("encoder").scope("layers").scope(layer));
        x = encoder_layer(&b, &config.layer(), x, precision)?;
        hidden_states.push(x);
    }
    let last_hidden_state = final_layer_norm(&root, config, x, precision)?;
    let pooler_output = pool(&b.scope("pooler"), config, input_ids, last_hidden_state)?;
    let text_embeds = if config.has_projection() {
        let std = config.initializer_factor / (config.hidden_size as f64).sqrt();
        let layer = Linear::replicated(config.projection_dim)
            .without_bias()
            .with_init(Init::Normal { std: std as f32 });
        Some(linear(
            &root.scope("text_projection"),
            pooler_output,
            layer,
            precision,
        )?)
    } else {
        None
    };
    Ok(ClipTextOutput {
        last_hidden_state,
        hidden_states,
        pooler_output,
        text_embeds,
    })
}

/// The encoder's final layer norm, applied to any of its hidden states. `root` is the builder of the model's root.
///
/// # Errors
/// When the weights were declared with another shape.
pub fn final_layer_norm(
    root: &Builder,
    config: &ClipTextConfig,
    hidden_state: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let b = root.scope("text_model").scope("final_layer_norm");
    layer_norm(&b, hidden_state, config.layer_norm_eps, precision)
}

/// The sum of token and position embeddings.
fn embeddings(
    b: &Builder,
    config: &ClipTextConfig,
    input_ids: Tensor,
    length: usize,
    precision: Precision,
) -> Result<Tensor> {
    let features = config.hidden_size;
    let init = Init::Normal {
        std: (0.02 * config.initializer_factor) as f32,
    };
    let tokens = embedding(
        &b.scope("token_embedding"),
        input_ids,
        config.vocab_size,
        features,
        init,
        precision,
    )?;
    let table = b.scope("position_embedding").param(
        "weight",
        Shape::new(
            precision.weights,
            [config.max_position_embeddings, features],
        ),
        init,
        &[None, Some("embed")],
    )?;
    let positions = b.slice_dim(table, 0, 0, length)?;
    let positions = b.convert(positions, precision.activations)?;
    let x = b.add(tokens, positions)?;
    constrain_tokens(b, x)
}

/// One of the layers of an encoder of text or of images.
struct EncoderLayer {
    features: usize,
    /// Features between the two feed-forward layers.
    inner: usize,
    attention: Attention,
    activation: Activation,
    epsilon: f64,
    /// Layers of the encoder, which initial weights depend on.
    depth: usize,
    initializer_factor: f64,
}

/// `CLIPEncoderLayer`: self-attention and a feed-forward layer, each after its norm and with a residual.
fn encoder_layer(
    b: &Builder,
    layer: &EncoderLayer,
    x: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let features = layer.features;
    // Standard deviations of transformers' `CLIPPreTrainedModel._init_weights`.
    let width = (features as f64).powf(-0.5) * layer.initializer_factor;
    let depth = (2.0 * layer.depth as f64).powf(-0.5);
    let EncoderLayer {
        inner,
        attention: attributes,
        activation,
        epsilon,
        ..
    } = *layer;
    let normal = |std: f64| Init::Normal { std: std as f32 };
    let norm = |name: &str, x: Tensor| layer_norm(&b.scope(name), x, epsilon, precision);

    let y = norm("layer_norm1", x)?;
    let attn = b.scope("self_attn");
    let project = |name: &str| {
        let layer = Linear::new(features, "embed", "heads").with_init(normal(width * depth));
        let y = linear(&attn.scope(name), y, layer, precision)?;
        constrain_tokens(&attn, y)
    };
    let q = project("q_proj")?;
    let k = project("k_proj")?;
    let v = project("v_proj")?;
    let y = attention(&attn, [q, k, v], attributes, precision)?;
    let y = constrain_tokens(&attn, y)?;
    let layer = Linear::new(features, "heads", "embed").with_init(normal(width));
    let y = linear(&attn.scope("out_proj"), y, layer, precision)?;
    let x = b.add(x, y)?;

    let y = norm("layer_norm2", x)?;
    let mlp = b.scope("mlp");
    let layer = Linear::new(inner, "embed", "mlp")
        .with_init(normal(width * std::f64::consts::FRAC_1_SQRT_2));
    let y = linear(&mlp.scope("fc1"), y, layer, precision)?;
    let y = activation.apply(&mlp, y)?;
    let layer = Linear::new(features, "mlp", "embed").with_init(normal(width * depth));
    let y = linear(&mlp.scope("fc2"), y, layer, precision)?;
    b.add(x, y)
}

/// The hidden state at each sequence's end-of-text token: `[B, hidden_size]`.
///
/// That is the first `eos_token_id`, or position 0 when there is none; with the mistaken id 2, the first highest id.
/// The row is picked by a sum over a mask: it shards over the batch, and its derivative needs no scatter.
fn pool(
    b: &Builder,
    config: &ClipTextConfig,
    input_ids: Tensor,
    hidden_state: Tensor,
) -> Result<Tensor> {
    let ids = b.convert(input_ids, DType::S32)?;
    let [batch, length] = dims(b, INPUT_IDS, ids)?;
    let eos = if config.eos_token_id == 2 {
        b.reduce_keep(Reduction::Max, ids, &[1])?
    } else {
        b.scalar(DType::S32, f64::from(config.eos_token_id))?
    };
    let is_eos = b.compare(Comparison::Eq, ids, eos)?;
    let positions = b.iota(Shape::new(DType::S32, [batch, length]), 1)?;
    let none = b.scalar(DType::S32, length as f64)?;
    let candidates = b.select(is_eos, positions, none)?;
    let first = b.reduce_keep(Reduction::Min, candidates, &[1])?;
    let missing = b.compare(Comparison::Eq, first, none)?;
    let zero = b.scalar(DType::S32, 0.0)?;
    let first = b.select(missing, zero, first)?;
    let chosen = b.compare(Comparison::Eq, positions, first)?;

    let dtype = b.dtype(hidden_state);
    let chosen = b.broadcast_in_dim(chosen, &[0, 1], &b.dims(hidden_state))?;
    let zero = b.scalar(dtype, 0.0)?;
    let rows = b.select(chosen, hidden_state, zero)?;
    b.sum(rows, &[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(b: &Builder, batch: usize, length: usize) -> Tensor {
        b.input(INPUT_IDS, Shape::new(DType::S32, [batch, length]), &[])
            .unwrap()
    }

    #[test]
    fn stable_diffusions_text_encoder_has_its_parameters() {
        let config = ClipTextConfig::from_json(
            r#"{"architectures": ["CLIPTextModel"], "attention_dropout": 0.0, "bos_token_id": 0, "dropout": 0.0,
                "eos_token_id": 2, "hidden_act": "quick_gelu", "hidden_size": 768, "initializer_factor": 1.0,
                "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
                "max_position_embeddings": 77, "model_type": "clip_text_model", "num_attention_heads": 12,
                "num_hidden_layers": 12, "pad_token_id": 1, "projection_dim": 768, "torch_dtype": "float32",
                "transformers_version": "4.22.0.dev0", "vocab_size": 49408}"#,
        )
        .unwrap();
        let b = Builder::new();
        let ids = tokens(&b, 2, 77);
        let y = clip_text(
            &b,
            "text_encoder",
            &config,
            ids,
            Precision::F32,
            Remat::None,
        )
        .unwrap();
        assert_eq!(b.dims(y.last_hidden_state), [2, 77, 768]);
        assert_eq!(b.dims(y.pooler_output), [2, 768]);
        assert_eq!(y.hidden_states.len(), 13);
        assert!(y.text_embeds.is_none());
        let graph = b.finish();
        // openai/clip-vit-large-patch14's text model.
        assert_eq!(graph.parameter_count(), 123_060_480);
        assert!(
            graph
                .input_index("text_encoder/text_model.encoder.layers.11.mlp.fc2.bias")
                .is_some()
        );
    }

    #[test]
    fn sdxls_second_text_encoder_has_a_projection() {
        let config = ClipTextConfig::from_json(
            r#"{"architectures": ["CLIPTextModelWithProjection"], "hidden_act": "gelu", "hidden_size": 1280,
                "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32,
                "projection_dim": 1280, "vocab_size": 49408, "model_type": "clip_text_model"}"#,
        )
        .unwrap();
        let b = Builder::new();
        let ids = tokens(&b, 1, 77);
        let y = clip_text(
            &b,
            "text_encoder_2",
            &config,
            ids,
            Precision::F32,
            Remat::Full,
        )
        .unwrap();
        assert_eq!(b.dims(y.text_embeds.unwrap()), [1, 1280]);
        assert_eq!(b.finish().parameter_count(), 694_659_840);
    }

    #[test]
    fn refuses_dropout_other_models_and_long_texts() {
        let error = ClipTextConfig::from_json(r#"{"attention_dropout": 0.1}"#).unwrap_err();
        assert!(
            error.to_string().contains("attention_dropout = 0.1"),
            "{error}"
        );
        let error = ClipTextConfig::from_json(r#"{"model_type": "t5"}"#).unwrap_err();
        assert!(error.to_string().contains("model_type = \"t5\""), "{error}");
        let b = Builder::new();
        let ids = tokens(&b, 1, 78);
        let config = ClipTextConfig::default();
        let error = clip_text(
            &b,
            "text_encoder",
            &config,
            ids,
            Precision::F32,
            Remat::None,
        )
        .unwrap_err();
        assert!(error.to_string().contains("78 tokens"), "{error}");
    }
}
