//! Detection of a single file's kind from its tensors.

use super::SourceError;
use crate::models::family::UNSUPPORTED;
use crate::models::original::{DENOISER_PREFIX, OriginalTensors, Root};
use crate::models::spec::Claim;
use crate::models::{Family, Published, vae};
use crate::weights::Checkpoint;

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
    let (family, published, denoiser) = denoiser(file)?;
    let single_file = &published.single_file;
    let mut roots = vec![denoiser];
    if !denoiser.prefix.is_empty() {
        for root in single_file
            .autoencoder
            .iter()
            .chain(single_file.text_encoders)
        {
            // Of a part that stands twice the first is taken.
            let taken = roots.iter().any(|r| r.part == root.part);
            if !taken && file.names().any(|n| n.starts_with(root.prefix)) {
                roots.push(*root);
            }
        }
    }
    Ok(Detected {
        family,
        published,
        roots,
    })
}

/// The tensors of one part of a file.
pub(super) fn tensors(file: &Checkpoint, root: Root) -> OriginalTensors<'_> {
    let shapes = file.iter();
    OriginalTensors {
        part: root.part,
        prefix: root.prefix,
        metadata: file.metadata(),
        shapes: shapes
            .filter_map(|(name, shape)| Some((name.strip_prefix(root.prefix)?, shape)))
            .collect(),
    }
}

/// The family of the file's denoiser, and where that stands: with the prefix of a whole model, else alone.
fn denoiser(file: &Checkpoint) -> Result<(Family, &'static Published, Root), SourceError> {
    for whole in [true, false] {
        let root = |published: &Published| match published.single_file.denoiser {
            root if whole => root,
            root => Root { prefix: "", ..root },
        };
        let candidates: Vec<(Family, &Published)> = Family::published()
            .filter(|(_, published)| {
                let name = format!("{}{}", root(published).prefix, published.single_file.sign);
                file.info(&name).is_some()
            })
            .collect();
        for &(family, published) in &candidates {
            let root = root(published);
            match (published.single_file.claims)(&tensors(file, root)) {
                Claim::Yes => return Ok((family, published, root)),
                Claim::No => {}
                Claim::Lookalike { name, advice } => {
                    return Err(SourceError::OtherKind {
                        path: file.path().to_owned(),
                        what: name,
                        advice,
                    });
                }
            }
        }
        if !candidates.is_empty() {
            return Err(unknown(file));
        }
    }
    Err(without_denoiser(file))
}

fn unknown(file: &Checkpoint) -> SourceError {
    SourceError::UnknownFamily {
        path: file.path().to_owned(),
        names: file.names().map(str::to_owned).collect(),
        architecture: file.metadata().get("general.architecture").cloned(),
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
    for prefix in ["", DENOISER_PREFIX] {
        let has = |name: &str| has(&format!("{prefix}{name}"));
        let is_of = |sign: Option<&str>| sign.is_some_and(has);
        if let Some(unsupported) = UNSUPPORTED.iter().find(|family| is_of(family.tensor)) {
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

/// Whether a tensor's name is that of a LoRA's factor.
pub fn is_lora(name: &str) -> bool {
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

/// Whether a file is a denoiser by diffusers' names.
pub(super) fn is_denoiser_of_diffusers(file: &Checkpoint) -> bool {
    // Of a UNet, of FLUX.1 and Stable Diffusion 3, and of PixArt.
    let signs = [
        "down_blocks.0.resnets.0.conv1.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.attn1.to_q.weight",
    ];
    signs.into_iter().any(|sign| file.info(sign).is_some())
}

/// A file without a denoiser of a known layout: often one part of something.
fn without_denoiser(file: &Checkpoint) -> SourceError {
    let has = |name: &str| file.info(name).is_some();
    let path = file.path().to_owned();
    let diffusers = "name the folder with model_index.json that it belongs to";
    let (what, advice) = if is_denoiser_of_diffusers(file) {
        ("the denoiser of a diffusers folder", diffusers)
    } else if has("encoder.down_blocks.0.resnets.0.conv1.weight") {
        ("the VAE of a diffusers folder", diffusers)
    } else if vae::original::ROOTS
        .iter()
        .map(|root| root.prefix)
        .chain([""])
        .any(|prefix| has(&format!("{prefix}decoder.up.0.block.0.conv1.weight")))
    {
        (
            "a VAE alone",
            "it replaces the VAE of a model: name the model itself",
        )
    } else if has("text_model.embeddings.token_embedding.weight") {
        ("a text encoder of a diffusers folder", diffusers)
    } else {
        return unknown(file);
    };
    SourceError::OtherKind { path, what, advice }
}
