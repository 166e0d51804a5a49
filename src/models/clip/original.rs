//! Text encoders by the names of transformers and of OpenCLIP.

use serde_json::{Map, Value, json};

use crate::models::original::{
    Converted, Original, OriginalPart, OriginalTensors, StructureError, Transform, count_blocks,
    number, numbered, originals, renamed, same, set, tensors_of,
};
use crate::shape::Shape;

/// Channels of one attention head in all of CLIP's text encoders.
const HEAD_CHANNELS: usize = 64;

const PROJECTION: &str = "text_projection.weight";

const TRAINING: &str = "used in training only";
const NO_PROJECTION: &str = "the projection, which this text encoder's model does not use";

/// The projection of a text encoder's pooled output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// There is none.
    None,
    /// That of the file.
    Stored,
    /// One that changes nothing, whatever the file has.
    Unit,
}

/// Reads the tensors of transformers' text encoder, whose activation no tensor tells.
///
/// # Errors
/// When a tensor is missing.
pub fn read<'a>(
    tensors: &OriginalTensors<'a>,
    activation: &'static str,
    projection: Projection,
) -> Result<OriginalPart<'a>, StructureError> {
    // Some versions of transformers leave the first word out.
    let root = if tensors.has("text_model.embeddings.token_embedding.weight") {
        "text_model."
    } else {
        ""
    };
    let table = format!("{root}embeddings.token_embedding.weight");
    let layer = |i: usize| format!("{root}encoder.layers.{i}.mlp.fc1.weight");
    let hidden = tensors.dim(&table, 1)?;
    let sizes = Sizes {
        activation,
        vocabulary: tensors.dim(&table, 0)?,
        hidden,
        intermediate: tensors.dim(&layer(0), 0)?,
        projection: match projection {
            Projection::None | Projection::Unit => hidden,
            Projection::Stored => tensors.dim(PROJECTION, 0)?,
        },
        layers: tensors.count(layer),
        positions: tensors.dim(&format!("{root}embeddings.position_embedding.weight"), 0)?,
    };
    let mut converted =
        tensors.converted(|key, _| of_transformers(key, projection == Projection::Stored));
    if projection == Projection::Unit {
        // No tensor of the file holds it: it has the size of one that every encoder has.
        let norm = format!("{root}final_layer_norm.weight");
        for (name, converted) in &mut converted {
            if let (true, Converted::To(new)) = (*name == norm, converted) {
                new.push((PROJECTION.to_owned(), Transform::UnitMatrix));
            }
        }
    }
    Ok(OriginalPart {
        config: sizes.config(projection != Projection::None),
        tensors: converted,
    })
}

/// Reads the tensors of OpenCLIP's text tower, of which the first layers are used: all, or at most `used`; with the
/// projection or without.
///
/// # Errors
/// When a tensor is missing.
pub fn read_open_clip<'a>(
    tensors: &OriginalTensors<'a>,
    used: Option<usize>,
    projected: bool,
) -> Result<OriginalPart<'a>, StructureError> {
    let layer = |i: usize| format!("transformer.resblocks.{i}.mlp.c_fc.weight");
    let all = tensors.count(layer);
    let layers = used.map_or(all, |used| all.min(used));
    let projection = match projected {
        true if tensors.has(PROJECTION) => tensors.dim(PROJECTION, 0)?,
        true => tensors.dim("text_projection", 1)?,
        // What SD 2's published configuration says.
        false => 512,
    };
    let sizes = Sizes {
        activation: "gelu",
        vocabulary: tensors.dim("token_embedding.weight", 0)?,
        hidden: tensors.dim("token_embedding.weight", 1)?,
        intermediate: tensors.dim(&layer(0), 0)?,
        projection,
        layers,
        positions: tensors.dim("positional_embedding", 0)?,
    };
    Ok(OriginalPart {
        config: sizes.config(projected),
        tensors: tensors.converted(|key, shape| of_open_clip(key, shape, projected, layers)),
    })
}

/// What tensors tell of a text encoder.
struct Sizes {
    activation: &'static str,
    vocabulary: usize,
    hidden: usize,
    intermediate: usize,
    projection: usize,
    layers: usize,
    positions: usize,
}

impl Sizes {
    fn config(&self, projected: bool) -> Map<String, Value> {
        let class = match projected {
            true => "CLIPTextModelWithProjection",
            false => "CLIPTextModel",
        };
        let heads = (self.hidden / HEAD_CHANNELS).max(1);
        let mut config = Map::new();
        set(
            &mut config,
            [
                ("architectures", json!([class])),
                ("attention_dropout", json!(0.0)),
                ("bos_token_id", json!(0)),
                // What the published configurations say, by mistake: it stands for the highest token id.
                ("eos_token_id", json!(2)),
                ("hidden_act", json!(self.activation)),
                ("hidden_size", json!(self.hidden)),
                ("initializer_factor", json!(1.0)),
                ("initializer_range", json!(0.02)),
                ("intermediate_size", json!(self.intermediate)),
                ("layer_norm_eps", json!(1e-5)),
                ("max_position_embeddings", json!(self.positions)),
                ("model_type", json!("clip_text_model")),
                ("num_attention_heads", json!(heads)),
                ("num_hidden_layers", json!(self.layers)),
                ("pad_token_id", json!(1)),
                ("projection_dim", json!(self.projection)),
                ("vocab_size", json!(self.vocabulary)),
            ],
        );
        config
    }
}

/// What becomes of a tensor of transformers, some versions of which leave `text_model.` out.
pub fn of_transformers(key: &str, with_projection: bool) -> Converted {
    let key = match key.split_once('.') {
        Some(("embeddings" | "encoder" | "final_layer_norm", _)) => format!("text_model.{key}"),
        _ => key.to_owned(),
    };
    match key.as_str() {
        "text_model.embeddings.position_ids" => {
            Converted::Ignored("the numbers of the positions, which are no weights")
        }
        "logit_scale" => Converted::Ignored(TRAINING),
        PROJECTION if !with_projection => Converted::Ignored(NO_PROJECTION),
        _ => Some(key).into(),
    }
}

/// The tensors of transformers' text encoder in files that have its names.
pub fn tensors(paths: &[&str], projection: Projection) -> Vec<Original> {
    let is_stored = projection == Projection::Stored;
    let mut tensors = tensors_of(&same(paths), |key, _| of_transformers(key, is_stored));
    if projection == Projection::Unit {
        let norm = |tensor: &&mut Original| tensor.name == "text_model.final_layer_norm.weight";
        if let Some(norm) = tensors.iter_mut().find(norm) {
            norm.parts
                .push((PROJECTION.to_owned(), Transform::UnitMatrix));
        }
    }
    tensors
}

/// The tensors that OpenCLIP has of a text encoder with these names in transformers, all of whose layers are used.
pub fn open_clip_tensors(paths: &[&str]) -> Vec<Original> {
    let layers = count_blocks(paths, "text_model.encoder.layers.");
    let leaves: Vec<&str> = originals(&OPEN_CLIP_LAYER).chain(FUSED).collect();
    let outer = originals(&OPEN_CLIP).chain([OPEN_CLIP_PROJECTION]);
    let mut names: Vec<String> = outer.map(str::to_owned).collect();
    names.extend(numbered("transformer.resblocks", layers, &leaves));
    tensors_of(&names, |key, shape| of_open_clip(key, shape, true, layers))
}

/// Outside layers.
const OPEN_CLIP: [(&str, &str); 3] = [
    (
        "positional_embedding",
        "text_model.embeddings.position_embedding.weight",
    ),
    ("token_embedding.", "text_model.embeddings.token_embedding."),
    ("ln_final.", "text_model.final_layer_norm."),
];
const OPEN_CLIP_LAYER: [(&str, &str); 5] = [
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
    ("attn.out_proj.", "self_attn.out_proj."),
];
/// Queries, keys and values in one, one below the other.
const FUSED: [&str; 2] = ["attn.in_proj_weight", "attn.in_proj_bias"];
/// A parameter that is multiplied from the right, where a linear layer's weight is from the left.
const OPEN_CLIP_PROJECTION: &str = "text_projection";

/// What becomes of a tensor of OpenCLIP, of which the first `layers` are used.
fn of_open_clip(key: &str, shape: &Shape, with_projection: bool, layers: usize) -> Converted {
    match key {
        "logit_scale" => return Converted::Ignored(TRAINING),
        OPEN_CLIP_PROJECTION | PROJECTION if !with_projection => {
            return Converted::Ignored(NO_PROJECTION);
        }
        OPEN_CLIP_PROJECTION => {
            let name = PROJECTION.to_owned();
            return Converted::To(vec![(name, Transform::Transpose)]);
        }
        PROJECTION => return Some(key.to_owned()).into(),
        _ => {}
    }
    if let Some(name) = renamed(&OPEN_CLIP, key) {
        return Some(name).into();
    }
    let Some((layer, leaf)) = key.strip_prefix("transformer.resblocks.").and_then(number) else {
        return Converted::Unknown;
    };
    if layer >= layers {
        return Converted::Ignored("the last layer, whose result this model does not use");
    }
    open_clip_layer(&format!("text_model.encoder.layers.{layer}"), leaf, shape)
}

fn open_clip_layer(layer: &str, leaf: &str, shape: &Shape) -> Converted {
    if let Some(kind) = leaf.strip_prefix("attn.in_proj_") {
        let rows = shape.dims.first().copied().unwrap_or(0) / 3;
        let third = |i: usize, name: &str| {
            let rows = Transform::Rows(i * rows..(i + 1) * rows);
            (format!("{layer}.self_attn.{name}.{kind}"), rows)
        };
        return Converted::To(vec![
            third(0, "q_proj"),
            third(1, "k_proj"),
            third(2, "v_proj"),
        ]);
    }
    renamed(&OPEN_CLIP_LAYER, leaf)
        .map(|leaf| format!("{layer}.{leaf}"))
        .into()
}
