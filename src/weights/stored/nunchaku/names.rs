//! The layers of nunchaku's files, and the layers of diffusers that they are (facts: the maps of
//! `deepcompressor/backend/nunchaku/convert.py`, and `convert_flux_state_dict` and `convert_sdxl_state_dict` of nunchaku).

/// Queries, keys and values of the attention of an image, of a text, and of a UNet's own.
const IMAGE: [&str; 3] = ["attn.to_q", "attn.to_k", "attn.to_v"];
const TEXT: [&str; 3] = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"];
const OWN: [&str; 3] = ["attn1.to_q", "attn1.to_k", "attn1.to_v"];

/// What a layer of a file is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// These layers, of as many output features, one after the other.
    Fused([&'static str; 3]),
    Layer {
        name: &'static str,
        after_gelu: bool,
    },
    /// A part of the input features of a layer: the first one, or the second.
    Part { name: &'static str, second: bool },
    /// A layer whose output features are so many vectors, in AWQ's packing.
    Modulation { name: &'static str, vectors: usize },
}

/// The names of a layer in a block, in nunchaku's older files and in its newer ones.
type Names = (&'static [&'static str], Role);

const fn layer(name: &'static str) -> Role {
    Role::Layer {
        name,
        after_gelu: false,
    }
}

const fn after_gelu(name: &'static str) -> Role {
    Role::Layer {
        name,
        after_gelu: true,
    }
}

const fn part(second: bool) -> Role {
    Role::Part {
        name: "proj_out",
        second,
    }
}

const fn modulation(name: &'static str, vectors: usize) -> Role {
    Role::Modulation { name, vectors }
}

/// FLUX.1's blocks of two streams.
const DOUBLE: [Names; 10] = [
    (&["qkv_proj", "attn.to_qkv"], Role::Fused(IMAGE)),
    (
        &["qkv_proj_context", "attn.add_qkv_proj"],
        Role::Fused(TEXT),
    ),
    (&["out_proj", "attn.to_out.0"], layer("attn.to_out.0")),
    (
        &["out_proj_context", "attn.to_add_out"],
        layer("attn.to_add_out"),
    ),
    (&["mlp_fc1", "ff.net.0.proj"], layer("ff.net.0.proj")),
    (&["mlp_fc2", "ff.net.2"], after_gelu("ff.net.2")),
    (
        &["mlp_context_fc1", "ff_context.net.0.proj"],
        layer("ff_context.net.0.proj"),
    ),
    (
        &["mlp_context_fc2", "ff_context.net.2"],
        after_gelu("ff_context.net.2"),
    ),
    (&["norm1.linear"], modulation("norm1.linear", 6)),
    (
        &["norm1_context.linear"],
        modulation("norm1_context.linear", 6),
    ),
];

/// FLUX.1's blocks of one stream. Their `proj_out` reads attention and, second, what GELU leaves.
const SINGLE: [Names; 5] = [
    (&["qkv_proj", "attn.to_qkv"], Role::Fused(IMAGE)),
    (&["out_proj", "attn.to_out"], part(false)),
    (&["mlp_fc1"], layer("proj_mlp")),
    (&["mlp_fc2"], part(true)),
    (&["norm.linear"], modulation("norm.linear", 3)),
];

/// The transformer blocks of SDXL's UNet.
const UNET: [Names; 6] = [
    (&["attn1.to_qkv"], Role::Fused(OWN)),
    (&["attn1.to_out.0"], layer("attn1.to_out.0")),
    (&["attn2.to_q"], layer("attn2.to_q")),
    (&["attn2.to_out.0"], layer("attn2.to_out.0")),
    (&["ff.net.0.proj"], layer("ff.net.0.proj")),
    (&["ff.net.2"], layer("ff.net.2")),
];

/// Norms of older files that stand in the block itself.
const NORMS: [&str; 4] = ["norm_q", "norm_k", "norm_added_q", "norm_added_k"];

/// The path of a layer's block, and what the layer is; `None` where it is of no model that is read.
pub(super) fn role(layer: &str) -> Option<(&str, Role)> {
    let (block, local) = in_block(layer)?;
    let names: &[Names] = if block.starts_with("single_transformer_blocks.") {
        &SINGLE
    } else if block.starts_with("transformer_blocks.") {
        &DOUBLE
    } else if block.contains("attentions.") {
        &UNET
    } else {
        return None;
    };
    let found = names.iter().find(|(names, _)| names.contains(&local));
    Some((block, found?.1))
}

/// The name in diffusers of a tensor that is stored as it is, where it has another.
pub(super) fn renamed(tensor: &str) -> Option<String> {
    let (block, local) = in_block(tensor)?;
    let norm = local.strip_suffix(".weight")?;
    NORMS
        .contains(&norm)
        .then(|| format!("{block}.attn.{local}"))
}

/// A path below `transformer_blocks.<n>`, and that.
fn in_block(path: &str) -> Option<(&str, &str)> {
    const BLOCKS: &str = "transformer_blocks.";
    let number = path.rfind(BLOCKS)? + BLOCKS.len();
    let end = number + path[number..].find('.')?;
    Some((&path[..end], &path[end + 1..]))
}
