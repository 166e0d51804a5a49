//! How each dialect's tensor names give the tensor's role and its module of the model.
//!
//! A tensor's name is the module's name with a suffix for its role. The module's name is a path of the model below its
//! root, with dots or (kohya) with underscores in their place, in diffusers' block names or those of the original code
//! (LDM, in SDXL's repository SGM). Underscores can not be turned back into dots, so it is done the other way round:
//! [`aliases`] gives every name that a weight of the model goes by, with underscores, and a file's names are looked up
//! among them.

use std::collections::BTreeMap;

use crate::models::Part;

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
}

/// `_lora.down` is that of diffusers' first attention processors: `to_q_lora.down.weight` belongs to `to_q`.
const SUFFIXES: [(&str, Role); 11] = [
    (".lora_down.weight", Role::Down),
    (".lora_up.weight", Role::Up),
    (".lora_A.weight", Role::Down),
    (".lora_B.weight", Role::Up),
    (".lora.down.weight", Role::Down),
    (".lora.up.weight", Role::Up),
    (".lora_linear_layer.down.weight", Role::Down),
    (".lora_linear_layer.up.weight", Role::Up),
    ("_lora.down.weight", Role::Down),
    ("_lora.up.weight", Role::Up),
    (".alpha", Role::Alpha),
];

/// The module's name as the file has it, and what the tensor is for it. `None` for what is no LoRA tensor.
pub(super) fn split_role(tensor: &str) -> Option<(&str, Role)> {
    let known = SUFFIXES
        .iter()
        .find_map(|(suffix, role)| Some((tensor.strip_suffix(suffix)?, *role)));
    known.or_else(|| {
        // PEFT inside a model names the adapter too: `to_q.lora_A.default.weight`.
        let (module, _adapter) = tensor.strip_suffix(".weight")?.rsplit_once('.')?;
        let down = module.strip_suffix(".lora_A").map(|m| (m, Role::Down));
        down.or_else(|| module.strip_suffix(".lora_B").map(|m| (m, Role::Up)))
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

/// The part of the model that a module's name says it belongs to, if it does, and the name below that.
pub(super) fn split_part(module: &str) -> (Option<Part>, &str) {
    const WRAPPER: &str = "base_model.model.";
    let prefixes = [
        ("lora_unet_", Part::Unet),
        ("lora_te1_", Part::TextEncoder),
        ("lora_te2_", Part::TextEncoder2),
        ("lora_te_", Part::TextEncoder),
        ("unet.", Part::Unet),
        ("text_encoder_2.", Part::TextEncoder2),
        ("text_encoder.", Part::TextEncoder),
        ("diffusion_model.", Part::Unet),
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
        // No file is for it.
        Part::Vae => {}
        Part::TextEncoder | Part::TextEncoder2 => {
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

/// Where a UNet's blocks stand in the original code's flat lists of blocks.
///
/// There, `input_blocks` holds `conv_in`, then each block's layers and its downsampler; `output_blocks` holds each
/// block's layers, the last of which has the upsampler.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The place in `input_blocks` of each down block's first layer.
    down: Vec<usize>,
    /// The place in `output_blocks` of each up block's first layer, and whether the block has attentions.
    up: Vec<(usize, bool)>,
    /// Layers of each up block.
    up_layers: Vec<usize>,
}

impl Blocks {
    /// The blocks of the UNet that has these parameter paths.
    pub fn of<'a>(paths: impl Iterator<Item = &'a str>) -> Blocks {
        #[derive(Default)]
        struct Block {
            layers: usize,
            attentions: bool,
        }
        let mut down: BTreeMap<usize, Block> = BTreeMap::new();
        let mut up: BTreeMap<usize, Block> = BTreeMap::new();
        for path in paths {
            let mut words = path.split('.');
            let blocks = match words.next() {
                Some("down_blocks") => &mut down,
                Some("up_blocks") => &mut up,
                _ => continue,
            };
            let (Some(block), Some(kind), Some(layer)) =
                (number(words.next()), words.next(), number(words.next()))
            else {
                continue;
            };
            let block = blocks.entry(block).or_default();
            match kind {
                "resnets" => block.layers = block.layers.max(layer + 1),
                "attentions" => block.attentions = true,
                _ => {}
            }
        }
        let mut result = Blocks::default();
        // `conv_in` is the first.
        let mut next = 1;
        for block in down.values() {
            result.down.push(next);
            next += block.layers + 1;
        }
        next = 0;
        for block in up.values() {
            result.up.push((next, block.attentions));
            result.up_layers.push(block.layers);
            next += block.layers;
        }
        result
    }

    /// The original code's name of a diffusers path, where it has one.
    fn original_name(&self, path: &str) -> Option<String> {
        for (ours, theirs) in [
            ("conv_in", "input_blocks.0.0"),
            ("conv_out", "out.2"),
            ("time_embedding.linear_1", "time_embed.0"),
            ("time_embedding.linear_2", "time_embed.2"),
            ("add_embedding.linear_1", "label_emb.0.0"),
            ("add_embedding.linear_2", "label_emb.0.2"),
        ] {
            if path == ours {
                return Some(theirs.to_owned());
            }
        }
        let (side, rest) = path.split_once('.')?;
        if side == "mid_block" {
            let (kind, rest) = rest.split_once('.')?;
            let (layer, rest) = rest.split_once('.')?;
            let layer = number(Some(layer))?;
            return Some(match kind {
                "resnets" => format!("middle_block.{}.{}", 2 * layer, resnet_part(rest)?),
                "attentions" => format!("middle_block.{}.{rest}", 2 * layer + 1),
                _ => return None,
            });
        }
        let mut words = rest.splitn(4, '.');
        let (block, kind, layer) = (number(words.next())?, words.next()?, number(words.next())?);
        let rest = words.next()?;
        let (list, first, layers, attentions) = match side {
            "down_blocks" => ("input_blocks", *self.down.get(block)?, 0, false),
            "up_blocks" => {
                let (first, attentions) = *self.up.get(block)?;
                (
                    "output_blocks",
                    first,
                    *self.up_layers.get(block)?,
                    attentions,
                )
            }
            _ => return None,
        };
        let place = first + layer;
        Some(match kind {
            "resnets" => format!("{list}.{place}.0.{}", resnet_part(rest)?),
            "attentions" => format!("{list}.{place}.1.{rest}"),
            // It is an entry of its own, after the block's layers.
            "downsamplers" => format!("{list}.{}.0.op", self.down.get(block + 1)?.checked_sub(1)?),
            "upsamplers" => {
                let last = (first + layers).checked_sub(1)?;
                format!("{list}.{last}.{}.conv", if attentions { 2 } else { 1 })
            }
            _ => return None,
        })
    }
}

fn number(word: Option<&str>) -> Option<usize> {
    // A digit more than any model has blocks, so that sums can not overflow.
    word.filter(|w| w.len() <= 4)?.parse().ok()
}

/// The original code's name of a resnet's layer.
fn resnet_part(layer: &str) -> Option<&'static str> {
    Some(match layer {
        "norm1" => "in_layers.0",
        "conv1" => "in_layers.2",
        "time_emb_proj" => "emb_layers.1",
        "norm2" => "out_layers.0",
        "conv2" => "out_layers.3",
        "conv_shortcut" => "skip_connection",
        _ => return None,
    })
}
