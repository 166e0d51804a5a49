//! What a single file is, by its tensors.

use super::{Family, Part, SourceError};
use crate::weights::Checkpoint;

/// Whose names the tensors of one part have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `openaimodel.UNetModel` of LDM and SGM.
    LdmUnet,
    /// `AutoencoderKL` of LDM and SGM.
    LdmVae,
    /// transformers' CLIP.
    Clip,
    /// OpenCLIP's text tower.
    OpenClip,
}

/// Where the tensors of one part stand in a single file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub prefix: &'static str,
    pub part: Part,
    pub dialect: Dialect,
}

const fn root(prefix: &'static str, part: Part, dialect: Dialect) -> Root {
    Root {
        prefix,
        part,
        dialect,
    }
}

const UNET: Root = root("model.diffusion_model.", Part::Unet, Dialect::LdmUnet);
const UNET_ALONE: Root = root("", Part::Unet, Dialect::LdmUnet);

/// Where a VAE may stand, alone or in a whole model.
pub(super) const VAES: [Root; 3] = [
    root("first_stage_model.", Part::Vae, Dialect::LdmVae),
    root("vae.", Part::Vae, Dialect::LdmVae),
    root("", Part::Vae, Dialect::LdmVae),
];

/// All roots of a whole model; of a part that stands twice the first is taken.
const ROOTS: [Root; 8] = [
    UNET,
    VAES[0],
    VAES[1],
    root(
        "cond_stage_model.transformer.",
        Part::TextEncoder,
        Dialect::Clip,
    ),
    root(
        "cond_stage_model.model.",
        Part::TextEncoder,
        Dialect::OpenClip,
    ),
    root(
        "conditioner.embedders.0.transformer.",
        Part::TextEncoder,
        Dialect::Clip,
    ),
    root(
        "conditioner.embedders.1.model.",
        Part::TextEncoder2,
        Dialect::OpenClip,
    ),
    // The refiner has the larger of SDXL's text encoders only.
    root(
        "conditioner.embedders.0.model.",
        Part::TextEncoder2,
        Dialect::OpenClip,
    ),
];

/// What a single file holds.
pub(super) struct Detected {
    pub family: Family,
    /// One for each part.
    pub roots: Vec<Root>,
}

/// Tells the family of `file` and where its parts stand.
///
/// The width of the text that the UNet attends to tells SD 1 (768), SD 2 (1024), SDXL (2048) and its refiner (1280)
/// apart; nothing else of a UNet's size is looked at.
pub(super) fn detect(file: &Checkpoint) -> Result<Detected, SourceError> {
    let has = |name: &str| file.info(name).is_some();
    let path = || file.path().to_owned();
    let other = |what, advice| SourceError::OtherKind {
        path: path(),
        what,
        advice,
    };
    let unsupported = |family| SourceError::UnsupportedFamily {
        path: path(),
        family,
    };
    if file.names().any(is_lora) {
        return Err(other(
            "a LoRA",
            "it is added to a model: name the model itself",
        ));
    }
    for prefix in ["", UNET.prefix] {
        let has = |name: &str| has(&format!("{prefix}{name}"));
        if has("joint_blocks.0.context_block.adaLN_modulation.1.bias") {
            return Err(unsupported(Family::Sd3));
        }
        if has("double_blocks.0.img_attn.norm.key_norm.scale") {
            return Err(unsupported(Family::Flux));
        }
        if has("label_emb.weight") {
            return Err(other("the x4 upscaler", "use a text-to-image model"));
        }
    }
    if file
        .names()
        .any(|n| n.starts_with("control_model.") || n.starts_with("input_hint_block."))
        || has("controlnet_cond_embedding.conv_in.weight")
    {
        return Err(other("a ControlNet", "use a text-to-image model"));
    }
    if has("edm_mean") || has("edm_vpred.sigma_max") {
        return Err(other(
            "SDXL with EDM's preconditioning (Playground 2.5, CosXL)",
            "its noise levels are not built here",
        ));
    }
    let Some(unet) = [UNET, UNET_ALONE]
        .into_iter()
        .find(|root| has(&format!("{}input_blocks.0.0.weight", root.prefix)))
    else {
        return Err(without_unet(file));
    };
    let family = family(file, unet).ok_or_else(|| SourceError::UnknownFamily {
        path: path(),
        names: file.names().map(str::to_owned).collect(),
    })?;
    if family == Family::Sd2 && has(&format!("{}label_emb.0.0.weight", unet.prefix)) {
        return Err(other(
            "Stable Diffusion 2.1 unCLIP",
            "its conditioning on pictures is not built here",
        ));
    }
    let mut roots: Vec<Root> = Vec::new();
    if unet.prefix.is_empty() {
        roots.push(unet);
    } else {
        for root in ROOTS {
            let taken = roots.iter().any(|r| r.part == root.part);
            if !taken && file.names().any(|n| n.starts_with(root.prefix)) {
                roots.push(root);
            }
        }
    }
    Ok(Detected { family, roots })
}

fn is_lora(name: &str) -> bool {
    [
        "lora_down",
        "lora_up",
        "lora_A",
        "lora_B",
        "lora.down",
        "lora.up",
        "lora_linear_layer",
    ]
    .iter()
    .any(|part| name.contains(part))
}

fn family(file: &Checkpoint, unet: Root) -> Option<Family> {
    let (_, to_k) = file
        .iter()
        .find(|(name, _)| name.starts_with(unet.prefix) && name.ends_with(".attn2.to_k.weight"))?;
    let has_labels = file
        .info(&format!("{}label_emb.0.0.weight", unet.prefix))
        .is_some();
    match (to_k.dims.get(1)?, has_labels) {
        (768, false) => Some(Family::Sd1),
        (1024, _) => Some(Family::Sd2),
        (2048, true) => Some(Family::Sdxl),
        (1280, true) => Some(Family::SdxlRefiner),
        _ => None,
    }
}

/// A file without a UNet in the original layout: often one part of something.
fn without_unet(file: &Checkpoint) -> SourceError {
    let has = |name: &str| file.info(name).is_some();
    let path = file.path().to_owned();
    let diffusers = "name the folder with model_index.json that it belongs to";
    let (what, advice) = if has("down_blocks.0.resnets.0.conv1.weight") {
        ("the UNet of a diffusers folder", diffusers)
    } else if has("encoder.down_blocks.0.resnets.0.conv1.weight") {
        ("the VAE of a diffusers folder", diffusers)
    } else if VAES
        .iter()
        .any(|root| has(&format!("{}decoder.up.0.block.0.conv1.weight", root.prefix)))
    {
        (
            "a VAE alone",
            "it replaces the VAE of a model: name the model itself",
        )
    } else if has("text_model.embeddings.token_embedding.weight") {
        ("a text encoder of a diffusers folder", diffusers)
    } else {
        return SourceError::UnknownFamily {
            path,
            names: file.names().map(str::to_owned).collect(),
        };
    };
    SourceError::OtherKind { path, what, advice }
}
