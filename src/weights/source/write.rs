//! Writing a model as a diffusers pipeline folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::{Map, Value, json};

use super::{Component, Family, ModelSource, Part, SourceError, io_error};
use crate::dtype::DType;
use crate::weights::save::{check_free_space, parent_of, sync_dir, write_error};
use crate::weights::{TensorSpec, save_streaming};

/// What was written of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenPart {
    pub part: Part,
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}

impl ModelSource {
    /// Writes the model to the new folder `dir` in diffusers' layout: `model_index.json`, each part with its
    /// `config.json` and safetensors, the scheduler's configuration, and the tokenizers if the source has them. Floats
    /// are cast to `dtype` where it is given. One tensor at a time is in memory.
    ///
    /// The folder appears under its name when all of it is on disk; after an error there is none.
    ///
    /// # Errors
    /// When something of that name exists, or a file cannot be read or written.
    pub fn write_pipeline(
        &self,
        dir: &Path,
        dtype: Option<DType>,
    ) -> Result<Vec<WrittenPart>, SourceError> {
        if dir.symlink_metadata().is_ok() {
            return Err(SourceError::Exists {
                path: dir.to_owned(),
            });
        }
        let specs: BTreeMap<Part, Vec<TensorSpec>> = self
            .components
            .iter()
            .map(|(&part, component)| (part, specs(component, dtype)))
            .collect();
        let written: Vec<WrittenPart> = specs
            .iter()
            .map(|(&part, specs)| WrittenPart {
                part,
                tensors: specs.len(),
                bytes: specs.iter().map(|s| s.shape.bytes() as u64).sum(),
            })
            .collect();
        let parent = parent_of(dir);
        check_free_space(dir, parent, written.iter().map(|w| w.bytes).sum())?;

        let temp = TempDir::create(dir)?;
        for (part, specs) in &specs {
            if let Some(component) = self.components.get(part) {
                write_part(&temp.path.join(part.name()), *part, component, specs)?;
            }
        }
        if let Some(config) = &self.scheduler {
            let folder = temp.path.join("scheduler");
            make_dir(&folder)?;
            write_json(&folder.join("scheduler_config.json"), config)?;
            sync(&folder)?;
        }
        for (name, folder) in TOKENIZERS.iter().zip(&self.tokenizers) {
            if let Some(folder) = folder {
                copy_files(folder, &temp.path.join(name))?;
            }
        }
        write_json(&temp.path.join("model_index.json"), &self.index())?;
        sync(&temp.path)?;
        temp.commit(dir)?;
        sync(parent)?;
        Ok(written)
    }

    /// The content of `model_index.json`.
    fn index(&self) -> Map<String, Value> {
        let (class, own) = match (self.family, self.inpaint) {
            (Family::SdxlRefiner, _) => (
                "StableDiffusionXLImg2ImgPipeline",
                vec![
                    ("force_zeros_for_empty_prompt", json!(false)),
                    ("requires_aesthetics_score", json!(true)),
                ],
            ),
            (Family::Sdxl, inpaint) => (
                match inpaint {
                    true => "StableDiffusionXLInpaintPipeline",
                    false => "StableDiffusionXLPipeline",
                },
                vec![("force_zeros_for_empty_prompt", json!(true))],
            ),
            (Family::Sd1 | Family::Sd2 | Family::Sd3 | Family::Flux, inpaint) => (
                match inpaint {
                    true => "StableDiffusionInpaintPipeline",
                    false => "StableDiffusionPipeline",
                },
                vec![
                    ("requires_safety_checker", json!(false)),
                    ("safety_checker", json!([null, null])),
                ],
            ),
        };
        let entry = |class: Option<(&str, &str)>| match class {
            Some((library, class)) => json!([library, class]),
            None => json!([null, null]),
        };
        let part = |part: Part| {
            let class = match part {
                Part::Unet => ("diffusers", "UNet2DConditionModel"),
                Part::Vae => ("diffusers", "AutoencoderKL"),
                Part::TextEncoder => ("transformers", "CLIPTextModel"),
                Part::TextEncoder2 => ("transformers", "CLIPTextModelWithProjection"),
            };
            entry(self.components.contains_key(&part).then_some(class))
        };
        let tokenizer = |folder: &Option<PathBuf>| {
            entry(folder.as_ref().map(|_| ("transformers", "CLIPTokenizer")))
        };
        let scheduler = self.scheduler.as_ref().map(|config| {
            let class = config.get("_class_name").and_then(Value::as_str);
            ("diffusers", class.unwrap_or("EulerDiscreteScheduler"))
        });
        let mut entries = vec![
            ("_class_name", json!(class)),
            ("feature_extractor", json!([null, null])),
            ("image_encoder", json!([null, null])),
            ("scheduler", entry(scheduler)),
            ("text_encoder", part(Part::TextEncoder)),
            ("tokenizer", tokenizer(&self.tokenizers[0])),
            ("unet", part(Part::Unet)),
            ("vae", part(Part::Vae)),
        ];
        if matches!(self.family, Family::Sdxl | Family::SdxlRefiner) {
            entries.push(("text_encoder_2", part(Part::TextEncoder2)));
            entries.push(("tokenizer_2", tokenizer(&self.tokenizers[1])));
        }
        entries.extend(own);
        entries.sort_by_key(|(key, _)| *key);
        entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }
}

/// The folders of the tokenizers.
pub(crate) const TOKENIZERS: [&str; 2] = ["tokenizer", "tokenizer_2"];

fn specs(component: &Component, dtype: Option<DType>) -> Vec<TensorSpec> {
    component
        .checkpoint
        .iter()
        .map(|(name, shape)| TensorSpec {
            name: name.to_owned(),
            shape: match dtype {
                Some(dtype) if shape.dtype.is_float() => shape.with_dtype(dtype),
                _ => shape.clone(),
            },
        })
        .collect()
}

fn write_part(
    folder: &Path,
    part: Part,
    component: &Component,
    specs: &[TensorSpec],
) -> Result<(), SourceError> {
    make_dir(folder)?;
    write_json(&folder.join("config.json"), &component.config)?;
    let file = match part {
        Part::Unet | Part::Vae => "diffusion_pytorch_model.safetensors",
        Part::TextEncoder | Part::TextEncoder2 => "model.safetensors",
    };
    // What PyTorch's readers of the format look for.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save_streaming(&folder.join(file), specs, &metadata, |spec| {
        let tensor = component.checkpoint.read_as(&spec.name, spec.shape.dtype)?;
        Ok(tensor.data.into())
    })?;
    Ok(())
}

fn make_dir(path: &Path) -> Result<(), SourceError> {
    fs::create_dir(path).map_err(|e| io_error(path, e))
}

fn sync(dir: &Path) -> Result<(), SourceError> {
    sync_dir(dir).map_err(|e| io_error(dir, e))
}

fn write_json(path: &Path, object: &Map<String, Value>) -> Result<(), SourceError> {
    let text = format!("{:#}\n", json!(object));
    File::create(path)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .map_err(|e| write_error(path, text.len() as u64, e).into())
}

/// Copies the files of a folder, not its subfolders.
fn copy_files(from: &Path, to: &Path) -> Result<(), SourceError> {
    make_dir(to)?;
    for entry in fs::read_dir(from).map_err(|e| io_error(from, e))? {
        let entry = entry.map_err(|e| io_error(from, e))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if !source.is_file() {
            continue;
        }
        let copied = fs::copy(&source, &target)
            .and_then(|_| File::open(&target))
            .and_then(|file| file.sync_all());
        copied.map_err(|e| io_error(&source, e))?;
    }
    sync(to)
}

/// A folder beside its final place that goes away unless it is committed.
struct TempDir {
    path: PathBuf,
    committed: bool,
}

impl TempDir {
    fn create(target: &Path) -> Result<Self, SourceError> {
        let error = |source| io_error(target, source);
        let name = target.file_name().ok_or_else(|| {
            error(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the path names no folder",
            ))
        })?;
        let name = name.to_string_lossy();
        let mut number = 0;
        loop {
            let temp = format!(".{name}.tmp-{}-{number}", std::process::id());
            let path = parent_of(target).join(temp);
            match fs::create_dir(&path) {
                Ok(()) => {
                    return Ok(TempDir {
                        path,
                        committed: false,
                    });
                }
                // Left by a killed process that had the same id.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(io_error(&path, e)),
            }
        }
    }

    /// Gives the folder its name, unless something has it.
    fn commit(mut self, target: &Path) -> Result<(), SourceError> {
        let renamed = match renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE) {
            // A file system that cannot rename without replacing: at most an empty folder that was made since the
            // start is replaced.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => fs::rename(&self.path, target),
            other => other.map_err(io::Error::from),
        };
        match renamed {
            Ok(()) => {
                self.committed = true;
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(SourceError::Exists {
                path: target.to_owned(),
            }),
            Err(e) => Err(io_error(target, e)),
        }
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if !self.committed {
            // Best effort: the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
