//! How each dialect's tensor names give the tensor's role and its module of the model.
//!
//! A tensor's name is the module's name with a suffix for its role. The module's name is a path of the model below its
//! root, with dots or (kohya) with underscores in their place, in diffusers' block names or those of the original code
//! (LDM, in SDXL's repository SGM). Underscores can not be turned back into dots, so it is done the other way round:
//! [`aliases`] gives every name that a weight of the model goes by, with underscores, and a file's names are looked up
//! among them. Where the original code has one layer and diffusers several, [`Original`] says so.

use crate::models::Part;
use crate::models::unet::original::Blocks;

/// The part with parameter paths under `root`, if LoRAs change it. None changes the autoencoder.
pub(super) fn part_of_root(root: &str) -> Option<Part> {
    Part::from_name(root).filter(|part| *part != Part::Vae)
}

/// The role of a tensor in its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// `[rank, in]`, for a convolution `[rank, in, k, k]`.
    Down,
    /// `[out, rank]`, for a convolution `[out, rank, 1, 1]`.
    Up,
    /// A scalar.
    Alpha,
    /// `[out]`, which is added to the layer's own: PEFT's `lora_bias`.
    Bias,
}

/// `_lora.down` is that of diffusers' first attention processors: `to_q_lora.down.weight` belongs to `to_q`.
const SUFFIXES: [(&str, Role); 16] = [
    (".lora_down.weight", Role::Down),
    (".lora_up.weight", Role::Up),
    (".lora_A.weight", Role::Down),
    (".lora_B.weight", Role::Up),
    (".lora_B.bias", Role::Bias),
    (".lora.down.weight", Role::Down),
    (".lora.up.weight", Role::Up),
    (".lora_linear_layer.down.weight", Role::Down),
    (".lora_linear_layer.up.weight", Role::Up),
    ("_lora.down.weight", Role::Down),
    ("_lora.up.weight", Role::Up),
    // XLabs-AI's: one for the image and one for the text.
    ("_lora1.down.weight", Role::Down),
    ("_lora1.up.weight", Role::Up),
    ("_lora2.down.weight", Role::Down),
    ("_lora2.up.weight", Role::Up),
    (".alpha", Role::Alpha),
];

/// The module's name as the file has it, and what the tensor is for it. `None` for what is no LoRA tensor.
pub(super) fn split_role(tensor: &str) -> Option<(&str, Role)> {
    let known = SUFFIXES.iter().find_map(|(suffix, role)| {
        let module = tensor.strip_suffix(suffix)?;
        // Which of XLabs-AI's two it is belongs to the module's name.
        let kept = ["_lora1", "_lora2"]
            .into_iter()
            .find(|kept| suffix.starts_with(kept));
        Some((&tensor[..module.len() + kept.map_or(0, str::len)], *role))
    });
    known.or_else(|| {
        // PEFT inside a model names the adapter too: `to_q.lora_A.default.weight`.
        let (module, _adapter) = tensor.strip_suffix(".weight")?.rsplit_once('.')?;
        let down = module.strip_suffix(".lora_A").map(|m| (m, Role::Down));
        down.or_else(|| module.strip_suffix(".lora_B").map(|m| (m, Role::Up)))
    })
}

/// The layer that a tensor is a whole weight of, by its name in the file: norms of queries and keys, which FLUX.1's control
/// LoRAs replace. The names are Black Forest Labs' or diffusers'.
pub(super) fn replaced_layer(tensor: &str) -> Option<&str> {
    const NORMS: [(&str, &str); 6] = [
        (".query_norm", ".scale"),
        (".key_norm", ".scale"),
        (".norm_q", ".weight"),
        (".norm_k", ".weight"),
        (".norm_added_q", ".weight"),
        (".norm_added_k", ".weight"),
    ];
    NORMS.iter().find_map(|(norm, weight)| {
        let layer = tensor.strip_suffix(weight)?;
        layer.ends_with(norm).then_some(layer)
    })
}

/// Adapters that are no plain LoRA, by what their tensors' names hold.
const OTHER_KINDS: [(&str, &str); 11] = [
    ("dora_scale", DORA),
    ("lora_magnitude_vector", DORA),
    (".hada_", "LoHa (a Hadamard product of factors)"),
    (".lokr_", "LoKr (a Kronecker product of factors)"),
    (".lora_mid.", "a convolution's Tucker core (lora_mid)"),
    (".oft_", "OFT (orthogonal fine-tuning)"),
    (".a1.weight", "GLoRA"),
    (".b1.weight", "GLoRA"),
    (".w_norm", "trained norms"),
    (".b_norm", "trained norms"),
    ("lora_embedding_", "a LoRA of an embedding table"),
];
pub(super) const DORA: &str = "DoRA (weights decomposed by magnitude)";

/// The kind of adapter that a tensor tells which is no plain LoRA's.
pub(super) fn other_kind(tensor: &str) -> Option<&'static str> {
    if tensor.ends_with(".diff") || tensor.ends_with(".diff_b") {
        return Some("differences of whole weights");
    }
    if tensor.contains("lora") && tensor.ends_with(".bias") {
        return Some("a LoRA with biases");
    }
    OTHER_KINDS
        .iter()
        .find_map(|(part, kind)| tensor.contains(part).then_some(*kind))
}

/// The part of the model that a module's name says it belongs to, if it does, and the name below that. Names that say
/// only that it is the denoiser's, or T5's, give the part of the first models that had one: see [`stands_for`].
pub(super) fn split_part(module: &str) -> (Option<Part>, &str) {
    const WRAPPER: &str = "base_model.model.";
    let prefixes = [
        ("lora_transformer_", Part::Transformer),
        ("transformer.", Part::Transformer),
        ("lora_unet_", Part::Unet),
        ("lora_te1_", Part::TextEncoder),
        ("lora_te2_", Part::TextEncoder2),
        ("lora_te3_", Part::TextEncoder3),
        ("lora_te_", Part::TextEncoder),
        ("unet.", Part::Unet),
        ("text_encoder_3.", Part::TextEncoder3),
        ("text_encoder_2.", Part::TextEncoder2),
        ("text_encoder.", Part::TextEncoder),
        ("diffusion_model.", Part::Unet),
        ("text_encoders.clip_l.transformer.", Part::TextEncoder),
        ("text_encoders.clip_g.transformer.", Part::TextEncoder2),
        ("text_encoders.t5xxl.transformer.", Part::TextEncoder3),
    ];
    let unwrapped = |name| str::strip_prefix(name, WRAPPER).unwrap_or(name);
    let module = unwrapped(module);
    let found = prefixes
        .iter()
        .find_map(|(prefix, part)| Some((*part, module.strip_prefix(prefix)?)));
    match found {
        Some((part, below)) => (Some(part), unwrapped(below)),
        None => (None, module),
    }
}

/// The part of a model that a name of `named` means where the model has no such part: trainers and ComfyUI call every
/// denoiser `unet` or `diffusion_model`, and kohya's call T5 the third text encoder, in FLUX.1 too, where it is the
/// second.
pub(super) fn stands_for(named: Part) -> Option<Part> {
    match named {
        Part::Unet => Some(Part::Transformer),
        Part::TextEncoder3 => Some(Part::TextEncoder2),
        Part::Transformer | Part::Vae | Part::TextEncoder | Part::TextEncoder2 => None,
    }
}

/// A module's name below its part in the form that names are compared in.
pub(super) fn comparable(name: &str) -> String {
    name.replace(".processor.", ".").replace('.', "_")
}

/// Every name that files give the module `path` of `part`, in the form of [`comparable`].
///
/// `blocks` are those of the UNet; see [`Blocks`].
pub(super) fn aliases(part: Part, path: &str, blocks: &Blocks) -> Vec<String> {
    let mut names = vec![path.to_owned()];
    match part {
        Part::Unet => {
            names.extend(blocks.original_name(path));
            // The first attention processors have no list behind `to_out`.
            names.extend(
                path.strip_suffix(".to_out.0")
                    .map(|m| format!("{m}.to_out")),
            );
        }
        // No file is for the first; the original names of the second are those of whole layers.
        Part::Vae | Part::Transformer => {}
        Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => {
            // transformers 5 has no `text_model` around an encoder without projection.
            names.extend(path.strip_prefix("text_model.").map(str::to_owned));
            for (ours, theirs) in [
                ("q_proj", "to_q"),
                ("k_proj", "to_k"),
                ("v_proj", "to_v"),
                ("out_proj", "to_out"),
            ] {
                let old = path.strip_suffix(ours).map(|m| format!("{m}{theirs}"));
                names.extend(old);
            }
        }
    }
    names.iter().map(|name| comparable(name)).collect()
}
