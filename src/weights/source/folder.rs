//! diffusers pipeline folders.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    Component, Ignored, Layout, ModelSource, PipelineKind, SourceError, io_error, read_json,
    read_scheduler,
};
use crate::models::family::UNSUPPORTED;
use crate::models::original::{Converted, Transform};
use crate::models::spec::Signs;
use crate::models::{DenoiserKind, Family, Part, clip, t5, vae};
use crate::util::files::sorted_entries;
use crate::weights::{Checkpoint, WeightsError};

const INDEX: &str = "model_index.json";
pub(super) const SCHEDULER: &str = "scheduler/scheduler_config.json";
const PICKLES: [&str; 3] = ["ckpt", "pt", "bin"];
/// The parts that may denoise, of which a model has one.
pub(crate) fn denoisers() -> impl Iterator<Item = Part> {
    DenoiserKind::ALL.into_iter().map(DenoiserKind::part)
}

/// Whether a folder has the parts of a model in subfolders.
pub fn is_pipeline(dir: &Path) -> bool {
    let has_config = |part: Part| dir.join(part.name()).join("config.json").is_file();
    dir.join(INDEX).is_file() || denoisers().any(has_config)
}

/// The file of a tokenizer that `train` has built.
const TOKENIZER: &str = "tokenizer.json";

/// Opens what training on pixels writes.
pub(super) fn of_run(dir: &Path, suffix: &str) -> Result<ModelSource, SourceError> {
    let mut components = BTreeMap::new();
    for part in Part::ALL {
        let folder = dir.join(format!("{}{suffix}", part.name()));
        if folder.is_dir() {
            components.insert(part, component(&folder, part)?);
        }
    }
    if !denoisers().any(|part| components.contains_key(&part)) {
        return Err(no_denoiser(dir, &Map::new(), entries(dir)?));
    }
    // Checkpoints of `train` have it beside the models, folders of `quantize` in a folder of its own.
    let place = match dir.join(TOKENIZER).is_file() {
        true => dir.to_owned(),
        false => dir.join("tokenizer"),
    };
    let tokenizer = place.is_dir().then_some((Part::TextEncoder, place));
    let spec = Family::Pixels.spec();
    Ok(ModelSource {
        path: dir.to_owned(),
        layout: Layout::Run,
        family: Family::Pixels,
        kind: PipelineKind::Text,
        components,
        scheduler: None,
        zero_empty_prompts: spec.zero_empty_prompts,
        requires_aesthetics_score: spec.aesthetic_score,
        tokenizers: tokenizer.into_iter().collect(),
        ignored: Vec::new(),
        notes: Vec::new(),
    })
}

/// Opens the parts that are there.
pub(super) fn open(dir: &Path) -> Result<ModelSource, SourceError> {
    let index = match dir.join(INDEX) {
        path if path.is_file() => read_json(&path)?,
        _ => Map::new(),
    };
    check_class(dir, &index)?;
    let mut components = BTreeMap::new();
    for part in Part::ALL {
        let folder = dir.join(part.name());
        if folder.is_dir() && !is_null(&index, part.name()) {
            components.insert(part, component(&folder, part)?);
        }
    }
    let mut denoisers = denoisers().filter_map(|part| components.get(&part));
    let Some(denoiser) = denoisers.next() else {
        return Err(no_denoiser(dir, &index, entries(dir)?));
    };
    let family = Family::of_folder(&Signs {
        denoiser: &denoiser.config,
        has: &|part| components.contains_key(&part),
    });
    let scheduler = dir.join(SCHEDULER);
    Ok(ModelSource {
        path: dir.to_owned(),
        layout: Layout::Pipeline,
        family,
        kind: pipeline_kind(&denoiser.config),
        scheduler: match scheduler.is_file() {
            true => Some(read_scheduler(&scheduler)?),
            false => None,
        },
        zero_empty_prompts: index
            .get("force_zeros_for_empty_prompt")
            .and_then(Value::as_bool)
            .unwrap_or(family.spec().zero_empty_prompts),
        requires_aesthetics_score: index
            .get("requires_aesthetics_score")
            .and_then(Value::as_bool)
            .unwrap_or(family.spec().aesthetic_score),
        tokenizers: Part::ALL
            .into_iter()
            .filter_map(|part| Some((part, part.tokenizer()?)))
            .filter(|(_, name)| !is_null(&index, name))
            .map(|(part, name)| (part, dir.join(name)))
            .filter(|(_, folder)| folder.is_dir())
            .collect(),
        ignored: others(&index),
        notes: Vec::new(),
        components,
    })
}

/// Refuses a `model_index.json` of a family that is known and not built; `path` is for the message.
pub(crate) fn check_class(path: &Path, index: &Map<String, Value>) -> Result<(), SourceError> {
    let class = index.get("_class_name").and_then(Value::as_str);
    let is_of = |start| class.is_some_and(|class| class.starts_with(start));
    match UNSUPPORTED.iter().find(|family| is_of(family.pipeline)) {
        Some(family) => Err(SourceError::UnsupportedFamily {
            path: path.to_owned(),
            family: family.name,
        }),
        None => Ok(()),
    }
}

/// The error for a pipeline without denoiser that has `found` beside its index.
pub(crate) fn no_denoiser(
    path: &Path,
    index: &Map<String, Value>,
    found: Vec<String>,
) -> SourceError {
    let path = path.to_owned();
    let is_known = |class: &str| {
        ["StableDiffusion", "Flux", "PixArt"]
            .iter()
            .any(|s| class.starts_with(s))
    };
    match index.get("_class_name").and_then(Value::as_str) {
        Some(class) if !is_known(class) => SourceError::UnknownPipeline {
            path,
            class: class.to_owned(),
        },
        _ => SourceError::NotAModel { path, found },
    }
}

/// Whether the index says that the model goes without this part.
pub(crate) fn is_null(index: &Map<String, Value>, name: &str) -> bool {
    let entry = index.get(name).and_then(Value::as_array);
    entry.is_some_and(|pair| pair.iter().all(Value::is_null))
}

/// Parts that the index lists and that are not used.
fn others(index: &Map<String, Value>) -> Vec<Ignored> {
    let used = |name: &str| {
        let of = |part: Part| part.name() == name || part.tokenizer() == Some(name);
        Part::ALL.into_iter().any(of) || name == "scheduler"
    };
    let names: Vec<String> = index
        .iter()
        .filter(|(name, value)| value.is_array() && !is_null(index, name) && !used(name))
        .map(|(name, _)| name.clone())
        .collect();
    let reason = "not used for making images here";
    if names.is_empty() {
        return Vec::new();
    }
    vec![Ignored { names, reason }]
}

/// Opens one part, its tensors by the names that diffusers and transformers give them today.
pub(super) fn component(folder: &Path, part: Part) -> Result<Component, SourceError> {
    let place = folder.join("config.json");
    let config = read_json(&place)?;
    let file = Checkpoint::open(folder)?;
    let is_t5 = config.get("model_type") == Some(&Value::from("t5"));
    let projected = config.get("architectures").is_some_and(|classes| {
        let classes = classes.as_array().map_or(&[][..], Vec::as_slice);
        classes.contains(&Value::from("CLIPTextModelWithProjection"))
    });
    let mut map = Vec::new();
    for (name, shape) in file.iter() {
        let converted = match part {
            Part::Unet | Part::Transformer => Converted::Unknown,
            Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 if is_t5 => {
                t5::original::of_transformers(name)
            }
            Part::Vae => vae::original::of_diffusers(name, shape),
            Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => {
                clip::original::of_transformers(name, projected)
            }
        };
        match converted {
            Converted::To(new) => {
                map.extend(new.into_iter().map(|(n, t)| (n, (name.to_owned(), t))));
            }
            Converted::Ignored(_) => {}
            Converted::Unknown => {
                map.push((name.to_owned(), (name.to_owned(), Transform::Identity)));
            }
        }
    }
    let checkpoint = file.view(map)?.described_by(&place, &config)?;
    Ok(Component { config, checkpoint })
}

/// The one safetensors or GGUF file of a folder without parts.
pub(super) fn only_file(dir: &Path) -> Result<PathBuf, SourceError> {
    let found = entries(dir)?;
    let with = |suffixes: &[&str]| -> Vec<String> {
        let matches = |name: &&String| {
            let suffix = Path::new(name).extension().and_then(|e| e.to_str());
            suffix.is_some_and(|s| suffixes.contains(&s))
        };
        found.iter().filter(matches).cloned().collect()
    };
    let files = with(&["safetensors", "gguf"]);
    match files.as_slice() {
        [one] => Ok(dir.join(one)),
        [] => match with(&PICKLES).first() {
            Some(pickle) => Err(SourceError::Weights(WeightsError::Pickle {
                path: dir.join(pickle),
            })),
            None => Err(SourceError::NotAModel {
                path: dir.to_owned(),
                found,
            }),
        },
        _ => Err(SourceError::SeveralFiles {
            path: dir.to_owned(),
            found: files,
        }),
    }
}

/// The names in a folder, sorted.
fn entries(dir: &Path) -> Result<Vec<String>, SourceError> {
    sorted_entries(dir).map_err(|e| io_error(dir, e))
}

/// The pipeline that a denoiser with this configuration is for, by the width of its input beside that of its result.
pub(super) fn pipeline_kind(denoiser: &Map<String, Value>) -> PipelineKind {
    let channels = |field: &str| denoiser.get(field).and_then(Value::as_u64);
    if denoiser.get("_class_name").and_then(Value::as_str) == Some(DenoiserKind::Flux.name()) {
        let taken = channels("in_channels");
        let made = channels("out_channels").or(taken).map(|made| 2 * made);
        return match taken.cmp(&made) {
            Ordering::Less => PipelineKind::Text,
            Ordering::Equal if taken.is_none() => PipelineKind::Text,
            Ordering::Equal => PipelineKind::Control,
            Ordering::Greater => PipelineKind::Inpaint,
        };
    }
    // Both are 4 where a configuration does not say.
    let [taken, made] = ["in_channels", "out_channels"].map(|field| channels(field).unwrap_or(4));
    match taken == 2 * made + 1 {
        true => PipelineKind::Inpaint,
        false => PipelineKind::Text,
    }
}
