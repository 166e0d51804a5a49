//! T5's names in files of the whole model, and in those of its encoder alone.

use serde_json::{Map, json};

use crate::models::Part;
use crate::models::original::{
    Converted, OriginalPart, OriginalTensors, Root, StructureError, number, renamed, same, set,
    tensors_of,
};

/// Where files of whole models have T5-XXL, which becomes this part.
pub const fn root(part: Part) -> Root {
    Root {
        prefix: "text_encoders.t5xxl.transformer.",
        part,
        read: |tensors, _| read(tensors),
        originals: Some(|paths| tensors_of(&same(paths), |key, _| of_transformers(key))),
    }
}

/// Reads the tensors of an encoder.
///
/// # Errors
/// When a tensor is missing, or there are no heads.
pub fn read<'a>(tensors: &OriginalTensors<'a>) -> Result<OriginalPart<'a>, StructureError> {
    let layer = |i: usize| format!("encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight");
    let bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";
    let heads = tensors.dim(bias, 1)?;
    let inner = tensors.dim("encoder.block.0.layer.0.SelfAttention.q.weight", 0)?;
    let head = inner.checked_div(heads);
    let head =
        head.ok_or_else(|| StructureError(format!("{}{bias} has no heads", tensors.prefix)))?;
    let mut config = Map::new();
    set(
        &mut config,
        [
            ("architectures", json!(["T5EncoderModel"])),
            ("d_ff", json!(tensors.dim(&layer(0), 0)?)),
            ("d_kv", json!(head)),
            ("d_model", json!(tensors.dim("shared.weight", 1)?)),
            ("dropout_rate", json!(0.1)),
            ("feed_forward_proj", json!("gated-gelu")),
            ("initializer_factor", json!(1.0)),
            ("is_encoder_decoder", json!(true)),
            ("layer_norm_epsilon", json!(1e-6)),
            ("model_type", json!("t5")),
            ("num_heads", json!(heads)),
            ("num_layers", json!(tensors.count(layer))),
            ("relative_attention_max_distance", json!(128)),
            (
                "relative_attention_num_buckets",
                json!(tensors.dim(bias, 0)?),
            ),
            ("tie_word_embeddings", json!(false)),
            ("vocab_size", json!(tensors.dim("shared.weight", 0)?)),
        ],
    );
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(|key, _| of_transformers(key)),
    })
}

/// The name in transformers of a tensor of llama.cpp's files; `None` where it is none of an encoder's (facts: gguf-py's
/// `constants.py`, `MODEL_ARCH.T5ENCODER`).
pub fn of_llama_cpp(key: &str) -> Option<String> {
    const LEAVES: [(&str, &str); 10] = [
        ("attn_q.", "layer.0.SelfAttention.q."),
        ("attn_k.", "layer.0.SelfAttention.k."),
        ("attn_v.", "layer.0.SelfAttention.v."),
        ("attn_o.", "layer.0.SelfAttention.o."),
        ("attn_norm.", "layer.0.layer_norm."),
        (
            "attn_rel_b.",
            "layer.0.SelfAttention.relative_attention_bias.",
        ),
        ("ffn_gate.", "layer.1.DenseReluDense.wi_0."),
        ("ffn_up.", "layer.1.DenseReluDense.wi_1."),
        ("ffn_down.", "layer.1.DenseReluDense.wo."),
        ("ffn_norm.", "layer.1.layer_norm."),
    ];
    const FIXED: [(&str, &str); 2] = [
        ("token_embd.", "shared."),
        ("enc.output_norm.", "encoder.final_layer_norm."),
    ];
    if let Some((block, leaf)) = key.strip_prefix("enc.blk.").and_then(number) {
        return renamed(&LEAVES, leaf).map(|leaf| format!("encoder.block.{block}.{leaf}"));
    }
    renamed(&FIXED, key)
}

/// What becomes of a tensor of transformers; files such as `t5xxl_fp16.safetensors` have the same names.
pub fn of_transformers(key: &str) -> Converted {
    match key.split_once('.') {
        Some(("decoder" | "lm_head", _)) => {
            Converted::Ignored("the decoder, which makes no embeddings")
        }
        _ if key == "spiece_model" => {
            Converted::Ignored("the tokenizer, which is read from its own file")
        }
        _ if key == "encoder.embed_tokens.weight" => Converted::Ignored("a copy of shared.weight"),
        _ => Some(key.to_owned()).into(),
    }
}
