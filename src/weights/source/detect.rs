//! What a single file is, by its tensors.

use super::SourceError;
use crate::models::family::UNSUPPORTED;
use crate::models::spec::{Lookalike, OriginalNames, Root};
use crate::models::{Family, Part, Published};
use crate::weights::Checkpoint;

const UNET: Root = Root {
    prefix: "model.diffusion_model.",
    part: Part::Unet,
    names: OriginalNames::LdmUnet,
};
const UNET_ALONE: Root = Root { prefix: "", ..UNET };

/// Where an autoencoder may stand, alone or in a whole model.
const VAES: [&str; 3] = ["first_stage_model.", "vae.", ""];

/// What a single file holds.
pub(super) struct Detected {
    pub family: Family,
    pub published: &'static Published,
    /// One for each part.
    pub roots: Vec<Root>,
}

/// Tells the family of `file` and where its parts stand.
pub(super) fn detect(file: &Checkpoint) -> Result<Detected, SourceError> {
    refuse_other_kinds(file)?;
    let has = |name: &str| file.info(name).is_some();
    let Some(unet) = [UNET, UNET_ALONE]
        .into_iter()
        .find(|root| has(&format!("{}input_blocks.0.0.weight", root.prefix)))
    else {
        return Err(without_unet(file));
    };
    let (family, published) = family(file, unet)?;
    let whole = [UNET]
        .into_iter()
        .chain(
            VAES.into_iter()
                .filter(|prefix| !prefix.is_empty())
                .map(vae),
        )
        .chain(published.single_file.text_encoders.iter().copied());
    let mut roots: Vec<Root> = Vec::new();
    if unet.prefix.is_empty() {
        roots.push(unet);
    } else {
        for root in whole {
            // Of a part that stands twice the first is taken.
            let taken = roots.iter().any(|r| r.part == root.part);
            if !taken && file.names().any(|n| n.starts_with(root.prefix)) {
                roots.push(root);
            }
        }
    }
    Ok(Detected {
        family,
        published,
        roots,
    })
}

fn vae(prefix: &'static str) -> Root {
    Root {
        prefix,
        part: Part::Vae,
        names: OriginalNames::LdmVae,
    }
}

/// Refuses by its name what is known and no model of a family here.
fn refuse_other_kinds(file: &Checkpoint) -> Result<(), SourceError> {
    let has = |name: &str| file.info(name).is_some();
    let path = || file.path().to_owned();
    let other = |what, advice| {
        Err(SourceError::OtherKind {
            path: path(),
            what,
            advice,
        })
    };
    if file.names().any(is_lora) {
        return other("a LoRA", "it is added to a model: name the model itself");
    }
    for prefix in ["", UNET.prefix] {
        let has = |name: &str| has(&format!("{prefix}{name}"));
        if let Some(unsupported) = UNSUPPORTED.iter().find(|family| has(family.tensor)) {
            return Err(SourceError::UnsupportedFamily {
                path: path(),
                family: unsupported.name,
            });
        }
        if has("label_emb.weight") {
            return other("the x4 upscaler", "use a text-to-image model");
        }
    }
    if file
        .names()
        .any(|n| n.starts_with("control_model.") || n.starts_with("input_hint_block."))
        || has("controlnet_cond_embedding.conv_in.weight")
    {
        return other("a ControlNet", "use a text-to-image model");
    }
    if has("edm_mean") || has("edm_vpred.sigma_max") {
        return other(
            "SDXL with EDM's preconditioning (Playground 2.5, CosXL)",
            "its noise levels are not built here",
        );
    }
    Ok(())
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

/// The family whose UNet stands at `unet`: by the features of the text that it attends to.
fn family(file: &Checkpoint, unet: Root) -> Result<(Family, &'static Published), SourceError> {
    let unknown = || SourceError::UnknownFamily {
        path: file.path().to_owned(),
        names: file.names().map(str::to_owned).collect(),
    };
    let (family, published) = file
        .iter()
        .find(|(name, _)| name.starts_with(unet.prefix) && name.ends_with(".attn2.to_k.weight"))
        .and_then(|(_, to_k)| Family::of_text_features(*to_k.dims.get(1)?))
        .ok_or_else(unknown)?;
    let labels = format!("{}label_emb.0.0.weight", unet.prefix);
    let single_file = &published.single_file;
    if file.info(&labels).is_some() == single_file.label_embedding {
        return Ok((family, published));
    }
    Err(match single_file.lookalike {
        Some(Lookalike { name, advice }) => SourceError::OtherKind {
            path: file.path().to_owned(),
            what: name,
            advice,
        },
        None => unknown(),
    })
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
        .any(|prefix| has(&format!("{prefix}decoder.up.0.block.0.conv1.weight")))
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
