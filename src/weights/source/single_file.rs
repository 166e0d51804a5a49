//! Models in one file, by the names of the original code.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::detect::{Detected, Dialect, Root, VAES, detect};
use super::keys::{self, Converted};
use super::structure::{self, Tensors};
use super::{Component, Family, Ignored, Layout, ModelSource, Part, SourceError, folder};
use crate::weights::{Checkpoint, Transform};

/// Tensors that are marks: the model predicts the velocity; its noise schedule ends in pure noise. ComfyUI's and
/// NoobAI's convention.
const VELOCITY: &str = "v_pred";
const ZERO_TERMINAL_SNR: &str = "ztsnr";

/// Opens a whole model or a UNet alone.
pub(super) fn open(path: &Path) -> Result<ModelSource, SourceError> {
    let file = Checkpoint::open(path)?;
    let Detected { family, roots } = detect(&file)?;
    let mut ignored = Unused::default();
    for name in file.names() {
        if !roots.iter().any(|root| name.starts_with(root.prefix))
            && ![VELOCITY, ZERO_TERMINAL_SNR].contains(&name)
        {
            ignored.add(name, outside(name));
        }
    }
    let mut components = BTreeMap::new();
    for root in roots {
        let component = convert(&file, root, family, &mut ignored)?;
        components.insert(root.part, component);
    }
    let inpaint = components
        .get(&Part::Unet)
        .is_some_and(|unet| is_inpainting(&unet.config));
    let mut notes = Vec::new();
    let scheduler = scheduler(&file, family, inpaint, &mut notes);
    Ok(ModelSource {
        path: path.to_owned(),
        layout: Layout::SingleFile,
        family,
        inpaint,
        components,
        scheduler: Some(scheduler),
        zero_empty_prompts: family == Family::Sdxl,
        requires_aesthetics_score: family == Family::SdxlRefiner,
        tokenizers: [None, None],
        ignored: ignored.into_list(),
        notes,
    })
}

/// Opens a VAE alone: a folder of diffusers, or a file in the original layout, whole models included. `family` decides
/// the scaling of the latents, which no tensor tells.
///
/// # Errors
/// When there is no VAE, or a file cannot be opened.
pub fn open_vae(path: &Path, family: Family) -> Result<Component, SourceError> {
    if path.is_dir() {
        return folder::component(path, Part::Vae);
    }
    if path.symlink_metadata().is_err() {
        return Err(SourceError::NotFound {
            path: path.to_owned(),
        });
    }
    let file = Checkpoint::open(path)?;
    let root = VAES.into_iter().find(|root| {
        file.info(&format!("{}decoder.up.0.block.0.conv1.weight", root.prefix))
            .is_some()
    });
    match root {
        Some(root) => convert(&file, root, family, &mut Unused::default()),
        None => Err(SourceError::OtherKind {
            path: path.to_owned(),
            what: "a file without decoder.up.0.block.0.conv1.weight",
            advice: "a VAE is a file in the original layout, or a folder of diffusers with config.json",
        }),
    }
}

/// Whether a UNet with this configuration takes a mask and a masked picture beside the sample.
pub(super) fn is_inpainting(unet: &Map<String, Value>) -> bool {
    unet.get("in_channels").and_then(Value::as_u64) == Some(9)
}

/// One part by the names of diffusers or transformers.
fn convert(
    file: &Checkpoint,
    root: Root,
    family: Family,
    ignored: &mut Unused,
) -> Result<Component, SourceError> {
    let tensors = Tensors {
        file,
        prefix: root.prefix,
        part: root.part,
    };
    let projected = root.part == Part::TextEncoder2;
    // What is counted is what its names need: layers of a block, resolutions, layers.
    let (config, count) = match root.dialect {
        Dialect::LdmUnet => structure::unet(tensors, family)?,
        Dialect::LdmVae => structure::vae(tensors, family)?,
        Dialect::Clip => structure::clip(tensors)?,
        Dialect::OpenClip => structure::open_clip(tensors)?,
    };
    let mut map = Vec::new();
    for (name, shape) in file.iter() {
        let Some(key) = name.strip_prefix(root.prefix) else {
            continue;
        };
        let converted = match root.dialect {
            Dialect::LdmUnet => keys::unet(key, count),
            Dialect::LdmVae => keys::vae(key, shape, count),
            Dialect::Clip => keys::clip(key, projected),
            Dialect::OpenClip => keys::open_clip(key, shape, projected, count),
        };
        match converted {
            Converted::To(new) => {
                map.extend(new.into_iter().map(|(n, t)| (n, (name.to_owned(), t))));
            }
            Converted::Ignored(reason) => ignored.add(name, reason),
            // Shown as it is: comparing with the model's parameters tells of it.
            Converted::Unknown => {
                map.push((key.to_owned(), (name.to_owned(), Transform::Identity)));
            }
        }
    }
    Ok(Component {
        config,
        checkpoint: file.view(map)?,
    })
}

/// Unused tensors by the reason.
#[derive(Default)]
struct Unused(BTreeMap<&'static str, Vec<String>>);

impl Unused {
    fn add(&mut self, name: &str, reason: &'static str) {
        self.0.entry(reason).or_default().push(name.to_owned());
    }

    fn into_list(self) -> Vec<Ignored> {
        self.0
            .into_iter()
            .map(|(reason, names)| Ignored { names, reason })
            .collect()
    }
}

/// Why a tensor outside all parts is not used.
fn outside(name: &str) -> &'static str {
    // The buffers of LDM's and SGM's noise schedules.
    const SCHEDULE: [&str; 6] = [
        "alphas_cumprod",
        "betas",
        "sqrt_",
        "log_one_minus_alphas_cumprod",
        "posterior_",
        "denoiser.",
    ];
    if name.starts_with("model_ema.") {
        "averaged weights; the others are taken"
    } else if SCHEDULE.iter().any(|prefix| name.starts_with(prefix)) {
        "the noise schedule, which is the family's"
    } else {
        "of no part that is known here"
    }
}

/// The family's noise schedule, with what the file says of it.
fn scheduler(
    file: &Checkpoint,
    family: Family,
    inpaint: bool,
    notes: &mut Vec<String>,
) -> Map<String, Value> {
    let mut config = structure::scheduler(family);
    let mut set = |key: &str, value: Value| {
        config.insert(key.to_owned(), value);
    };
    let marked = file.info(VELOCITY).is_some();
    let said = file.metadata().get("modelspec.prediction_type");
    let prediction = match (marked, said.map(String::as_str)) {
        (true, _) | (false, Some("v" | "v_prediction")) => Some("v_prediction"),
        (false, Some("epsilon")) => Some("epsilon"),
        (false, Some(other)) => {
            notes.push(format!(
                "modelspec.prediction_type is {other:?}, which is not known here (epsilon and v are); it is passed over"
            ));
            None
        }
        (false, None) => None,
    };
    match (prediction, family) {
        (Some(prediction), _) => set("prediction_type", json!(prediction)),
        (None, Family::Sd2) if inpaint => set("prediction_type", json!("epsilon")),
        (None, Family::Sd2) => notes.push(
            "the file does not say what its UNet predicts: v_prediction is taken, as in Stable Diffusion 2.1 at 768 \
             pixels; for a model of 512 pixels set prediction_type=epsilon"
                .to_owned(),
        ),
        (None, _) => {}
    }
    if file.info(ZERO_TERMINAL_SNR).is_some() {
        // Sampling must then begin at the last timestep (Lin et al., 2023, section 3.3).
        set("rescale_betas_zero_snr", json!(true));
        set("timestep_spacing", json!("trailing"));
    }
    config
}
