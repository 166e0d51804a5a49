//! Models in one file, by the names of the original code.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::detect::{Detected, detect, tensors};
use super::folder::{component, only_file, pipeline_kind};
use super::{Component, Ignored, Layout, ModelSource, PipelineKind, SourceError, built_in};
use crate::models::original::{Converted, OriginalPart, PREDICTION, Root, Transform};
use crate::models::{Part, Published, TextEncoderKind, t5};
use crate::weights::Checkpoint;

/// Tensors that are marks: the model predicts the velocity; its noise schedule ends in pure noise. ComfyUI's and
/// NoobAI's convention.
const VELOCITY: &str = "v_pred";
const ZERO_TERMINAL_SNR: &str = "ztsnr";

/// The configuration of a part in diffusers' layout.
const CONFIG: &str = "config.json";

/// Opens a whole model or a UNet alone.
pub(super) fn open(path: &Path) -> Result<ModelSource, SourceError> {
    let file = Checkpoint::open(path)?;
    let Detected {
        family,
        published,
        roots,
    } = detect(&file)?;
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
        let component = convert(&file, root, published, &mut ignored)?;
        components.insert(root.part, component);
    }
    let denoiser = components.get(&family.spec().denoiser.part());
    let kind = denoiser.map_or(PipelineKind::Text, |denoiser| {
        pipeline_kind(&denoiser.config)
    });
    let inpaint = kind == PipelineKind::Inpaint;
    let mut notes = Vec::new();
    let scheduler = scheduler(&file, published, inpaint, &mut notes)?;
    Ok(ModelSource {
        path: path.to_owned(),
        layout: Layout::SingleFile,
        family,
        kind,
        components,
        scheduler: Some(scheduler),
        zero_empty_prompts: family.spec().zero_empty_prompts,
        requires_aesthetics_score: family.spec().aesthetic_score,
        tokenizers: BTreeMap::new(),
        ignored: ignored.into_list(),
        notes,
    })
}

impl ModelSource {
    /// Takes the autoencoder from elsewhere, also where the model has none: a folder in diffusers' layout of it or of a
    /// whole model, or a file by the names of the original code, of it or of a whole model. What a file does not say is
    /// as the family publishes it.
    ///
    /// # Errors
    /// When there is no autoencoder, or a file cannot be opened.
    pub fn replace_autoencoder(&mut self, path: &Path) -> Result<(), SourceError> {
        let component = self.other_autoencoder(path)?;
        self.components.insert(Part::Vae, component);
        Ok(())
    }

    /// An autoencoder for this model's latents, as [`ModelSource::replace_autoencoder`] opens it.
    ///
    /// # Errors
    /// When there is no autoencoder, or a file cannot be opened.
    pub fn other_autoencoder(&self, path: &Path) -> Result<Component, SourceError> {
        let folder = match path.join(Part::Vae.name()) {
            folder if folder.join(CONFIG).is_file() => folder,
            _ => path.to_owned(),
        };
        match folder.join(CONFIG).is_file() {
            true => component(&folder, Part::Vae),
            false if path.is_dir() => self.autoencoder(&only_file(path)?),
            false => self.autoencoder(path),
        }
    }

    /// Takes the T5 text encoder from elsewhere, also where the model has none: a folder in transformers' layout, or a file
    /// by the names of transformers or of llama.cpp.
    ///
    /// # Errors
    /// When the family has no T5, there is none, or a file cannot be opened.
    pub fn replace_t5(&mut self, path: &Path) -> Result<(), SourceError> {
        let mut encoders = self.family.spec().text_encoders.iter();
        let t5 = encoders.find(|e| matches!(e.kind, TextEncoderKind::T5 { .. }));
        let Some(part) = t5.map(|encoder| encoder.part) else {
            return Err(SourceError::OtherKind {
                path: self.path.clone(),
                what: self.family.title(),
                advice: "it reads prompts without T5",
            });
        };
        let encoder = match path.join(CONFIG).is_file() {
            true => component(path, part)?,
            false => t5_of_file(path, part)?,
        };
        self.components.insert(part, encoder);
        Ok(())
    }

    /// The autoencoder of a file by the names of the original code.
    fn autoencoder(&self, path: &Path) -> Result<Component, SourceError> {
        let file = Checkpoint::open(path)?;
        let other = |what, advice| SourceError::OtherKind {
            path: path.to_owned(),
            what,
            advice,
        };
        let published = self.family.spec().published.as_ref();
        let alone = published.and_then(|published| {
            let mut roots = published.single_file.autoencoder.iter().copied();
            let alone = roots.clone().next().map(|root| Root { prefix: "", ..root });
            let has = |root: &Root| {
                let sign = format!("{}decoder.up.0.block.0.conv1.weight", root.prefix);
                file.info(&sign).is_some()
            };
            let root = roots.find(has).or(alone.filter(has));
            root.map(|root| (root, published))
        });
        if let Some((root, published)) = alone {
            return convert(&file, root, published, &mut Unused::default());
        }
        Err(match file.info("decoder.conv_in.weight").is_some() {
            true => other(
                "an autoencoder with diffusers' names",
                "name its folder, which has a config.json",
            ),
            false => other(
                "no autoencoder of the original code",
                "name a folder with an autoencoder in diffusers' layout, or a file such as sdxl_vae.safetensors",
            ),
        })
    }
}

/// T5's encoder in a file of its own.
fn t5_of_file(path: &Path, part: Part) -> Result<Component, SourceError> {
    let mut file = Checkpoint::open(path)?;
    if file.info("token_embd.weight").is_some() {
        let renamed = |name: &str| {
            let new = t5::original::of_llama_cpp(name);
            (
                new.unwrap_or_else(|| name.to_owned()),
                (name.to_owned(), Transform::Identity),
            )
        };
        file = file.view(file.names().map(renamed).collect::<Vec<_>>())?;
    }
    let root = Root {
        prefix: "",
        ..t5::original::root(part)
    };
    match file.info("shared.weight") {
        Some(_) => of_root(&file, root, Map::new(), &mut Unused::default()),
        None => Err(SourceError::OtherKind {
            path: path.to_owned(),
            what: "no T5 text encoder",
            advice: "name a folder in transformers' layout, or a file such as t5xxl_fp16.safetensors or \
                     t5-v1_1-xxl-encoder-Q8_0.gguf",
        }),
    }
}

/// One part by the names of diffusers or transformers.
fn convert(
    file: &Checkpoint,
    root: Root,
    published: &Published,
    ignored: &mut Unused,
) -> Result<Component, SourceError> {
    let published = match root.part {
        Part::Unet | Part::Transformer => built_in(file.path(), published.denoiser)?,
        Part::Vae => built_in(file.path(), published.vae)?,
        Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => Map::new(),
    };
    of_root(file, root, published, ignored)
}

/// One part whose published configuration is `published`.
fn of_root(
    file: &Checkpoint,
    root: Root,
    published: Map<String, Value>,
    ignored: &mut Unused,
) -> Result<Component, SourceError> {
    let read = (root.read)(&tensors(file, root), published);
    let OriginalPart { config, tensors } = read.map_err(|e| SourceError::Structure {
        path: file.path().to_owned(),
        part: root.part,
        reason: e.to_string(),
    })?;
    let mut map = Vec::new();
    for (key, converted) in tensors {
        let name = format!("{}{key}", root.prefix);
        match converted {
            Converted::To(new) => {
                map.extend(new.into_iter().map(|(n, t)| (n, (name.clone(), t))));
            }
            Converted::Ignored(reason) => ignored.add(&name, reason),
            // Shown as it is: comparing with the model's parameters tells of it.
            Converted::Unknown => map.push((key.to_owned(), (name, Transform::Identity))),
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
        "averaged weights; the others are used"
    } else if SCHEDULE.iter().any(|prefix| name.starts_with(prefix)) {
        "the noise schedule, which the family decides"
    } else {
        "of no known part"
    }
}

/// The family's noise schedule, with what the file says of it.
fn scheduler(
    file: &Checkpoint,
    published: &Published,
    inpaint: bool,
    notes: &mut Vec<String>,
) -> Result<Map<String, Value>, SourceError> {
    let mut config = built_in(file.path(), published.scheduler)?;
    let mut set = |key: &str, value: Value| {
        config.insert(key.to_owned(), value);
    };
    let marked = file.info(VELOCITY).is_some();
    let said = file.metadata().get(PREDICTION);
    let prediction = match (marked, said.map(String::as_str)) {
        (true, _) | (false, Some("v" | "v_prediction")) => Some("v_prediction"),
        (false, Some("epsilon")) => Some("epsilon"),
        (false, Some(other)) => {
            notes.push(format!(
                "modelspec.prediction_type is {other:?}, which is not known here (epsilon and v are); it is ignored"
            ));
            None
        }
        (false, None) => None,
    };
    match (prediction, published.single_file.unknown_prediction) {
        (Some(prediction), _) => set("prediction_type", json!(prediction)),
        (None, Some(unknown)) if inpaint => set("prediction_type", json!(unknown.inpaint)),
        (None, Some(unknown)) => notes.push(unknown.note.to_owned()),
        (None, None) => {}
    }
    if file.info(ZERO_TERMINAL_SNR).is_some() {
        // Sampling must then begin at the last timestep (Lin et al., 2023, section 3.3).
        set("rescale_betas_zero_snr", json!(true));
        set("timestep_spacing", json!("trailing"));
    }
    Ok(config)
}
