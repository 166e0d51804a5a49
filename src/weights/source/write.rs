//! Writing a model as a diffusers pipeline folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::quantize::{QuantizedTensor, UNetQuantization};
use super::{Component, Layout, ModelSource, PipelineKind, SourceError, built_in, io_error};
use crate::dtype::DType;
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::{Part, Published, TextEncoderKind};
use crate::shape::Shape;
use crate::util::files::{AtomicDir, parent_of, sync_dir, write_synced};
use crate::weights::cast::has_infinity;
use crate::weights::matching::is_parameter;
use crate::weights::quantized::CONFIG_KEY;
use crate::weights::save::{ScatteredFile, check_free_space, pytorch_metadata, write_error};
use crate::weights::{Checkpoint, TensorSpec, WeightsError};

/// The files written for one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenPart {
    pub part: Part,
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}

impl WrittenPart {
    pub(super) fn of<'a>(part: Part, specs: impl Iterator<Item = &'a TensorSpec>) -> WrittenPart {
        let mut written = WrittenPart {
            part,
            tensors: 0,
            bytes: 0,
        };
        for spec in specs {
            written.tensors += 1;
            written.bytes += spec.shape.bytes() as u64;
        }
        written
    }
}

impl ModelSource {
    /// Writes the model to the new folder `dir` in diffusers' layout: `model_index.json`, each part with its
    /// `config.json` and safetensors, the scheduler's configuration, and the tokenizers if the source has them. Floats
    /// are cast to `dtype` where it is given. One tensor at a time is in memory. `observe` takes how many bytes of how
    /// many are written, from 0 on.
    ///
    /// The folder appears under its name when all of it is on disk; after an error there is none.
    ///
    /// # Errors
    /// When something of that name exists, a file cannot be read or written, or finite values would become infinite in
    /// `dtype`: [`SourceError::Overflow`] names all such tensors.
    pub fn write_pipeline(
        &self,
        dir: &Path,
        dtype: Option<DType>,
        observe: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<WrittenPart>, SourceError> {
        self.write(dir, dtype, None, observe)
            .map(|(parts, _)| parts)
    }

    /// As [`ModelSource::write_pipeline`], with the UNet's weights quantized as `quantization` says, which is written
    /// to its `config.json`. Of other tensors floats that are wider than its `weights_dtype` are cast to that.
    ///
    /// The second result has every quantized tensor, in the order of names.
    ///
    /// # Errors
    /// As [`ModelSource::write_pipeline`]; when the UNet is quantized already, and when a weight cannot be
    /// ([`SourceError::Quantize`] names it).
    pub fn write_quantized(
        &self,
        dir: &Path,
        quantization: &UNetQuantization,
        observe: &mut dyn FnMut(u64, u64),
    ) -> Result<(Vec<WrittenPart>, Vec<QuantizedTensor>), SourceError> {
        self.write(dir, None, Some(quantization), observe)
    }

    fn write(
        &self,
        dir: &Path,
        dtype: Option<DType>,
        quantization: Option<&UNetQuantization>,
        observe: &mut dyn FnMut(u64, u64),
    ) -> Result<(Vec<WrittenPart>, Vec<QuantizedTensor>), SourceError> {
        if dir.symlink_metadata().is_ok() {
            return Err(SourceError::Exists {
                path: dir.to_owned(),
            });
        }
        // What training on pixels writes is no pipeline of diffusers.
        let index = match self.layout {
            Layout::Run => None,
            Layout::Pipeline | Layout::SingleFile => Some(self.index_fields()?),
        };
        let denoiser = self.family.spec().denoiser.part();
        let specs = self
            .components
            .iter()
            .map(|(&part, component)| {
                let types = |shape: &Shape| match quantization {
                    None => dtype.unwrap_or(shape.dtype),
                    Some(quantization) => quantization.float_type(shape.dtype),
                };
                let specs = specs(&component.checkpoint, &types)?;
                Ok((
                    part,
                    match quantization.filter(|_| part == denoiser) {
                        None => specs,
                        Some(quantization) => quantization.specs(specs),
                    },
                ))
            })
            .collect::<Result<BTreeMap<Part, Vec<TensorSpec>>, SourceError>>()?;
        let written: Vec<WrittenPart> = specs
            .iter()
            .map(|(&part, specs)| WrittenPart::of(part, specs.iter()))
            .collect();
        let total = written.iter().map(|w| w.bytes).sum();
        check_free_space(dir, parent_of(dir), total)?;
        observe(0, total);
        let mut done = 0;
        let mut wrote = |bytes: u64| {
            done += bytes;
            observe(done, total);
        };

        let mut temp = AtomicDir::create(dir).map_err(|e| io_error(dir, e))?;
        let mut overflown = Vec::new();
        let mut quantized = Vec::new();
        for (part, specs) in &specs {
            let Some(component) = self.components.get(part) else {
                continue;
            };
            let folder = temp.path().join(part.name());
            make_dir(&folder)?;
            match quantization.filter(|_| *part == denoiser) {
                None => {
                    // What it says of the files that were read is not true of those that are written.
                    let mut config = component.config.clone();
                    config.remove(CONFIG_KEY);
                    write_json(&folder.join("config.json"), &config)?;
                    overflown.extend(write_part(&folder, *part, component, specs, &mut wrote)?);
                }
                Some(quantization) => {
                    let config = quantization.config(component);
                    write_json(&folder.join("config.json"), &config)?;
                    let file = folder.join(part.weights_file());
                    quantized = quantization.write(component, specs, &file, &mut wrote)?;
                }
            }
            sync(&folder)?;
        }
        match (dtype, quantization, overflown.first()) {
            (Some(dtype), _, Some(_)) => {
                return Err(SourceError::Overflow {
                    path: self.path.clone(),
                    dtype,
                    tensors: overflown,
                });
            }
            (None, Some(quantization), Some((tensor, _))) => {
                return Err(quantization.overflow(&self.path, tensor));
            }
            _ => {}
        }
        if let Some(config) = &self.scheduler {
            let folder = temp.path().join("scheduler");
            make_dir(&folder)?;
            write_json(&folder.join("scheduler_config.json"), config)?;
            sync(&folder)?;
        }
        for (part, folder) in &self.tokenizers {
            if let Some(name) = part.tokenizer() {
                // Beside the tokenizer of a checkpoint lie the files of its training.
                let is_tokenizers =
                    |name: &str| self.layout != Layout::Run || name.starts_with("tokenizer");
                copy_files(folder, &temp.path().join(name), &is_tokenizers)?;
            }
        }
        if let Some(index) = &index {
            write_json(&temp.path().join("model_index.json"), index)?;
        }
        sync(temp.path())?;
        temp.commit(dir).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => SourceError::Exists {
                path: dir.to_owned(),
            },
            _ => io_error(dir, e),
        })?;
        Ok((written, quantized))
    }

    /// The content of `model_index.json`.
    ///
    /// # Errors
    /// When a part is of a class that is not supported, or the model has none for pipelines.
    pub fn index_fields(&self) -> Result<Map<String, Value>, SourceError> {
        self.index(self.published()?)
    }

    pub(super) fn published(&self) -> Result<&'static Published, SourceError> {
        let published = self.family.spec().published.as_ref();
        published.ok_or_else(|| SourceError::OtherKind {
            path: self.path.clone(),
            what: self.family.title(),
            advice: "diffusers has no pipeline for it; name the folder as it is",
        })
    }

    fn index(&self, published: &Published) -> Result<Map<String, Value>, SourceError> {
        let class = match self.kind {
            PipelineKind::Text => published.pipeline,
            PipelineKind::Inpaint => published.inpaint_pipeline,
            PipelineKind::Control => published.control_pipeline.unwrap_or(published.pipeline),
        };
        let entry = |class: Option<[&str; 2]>| json!(class.map_or([None; 2], |c| c.map(Some)));
        let scheduler = self.scheduler.as_ref().map(|config| {
            let class = config.get("_class_name").and_then(Value::as_str);
            ["diffusers", class.unwrap_or("EulerDiscreteScheduler")]
        });
        let mut entries: BTreeMap<String, Value> = BTreeMap::from([
            ("_class_name".to_owned(), json!(class)),
            ("feature_extractor".to_owned(), entry(None)),
            ("image_encoder".to_owned(), entry(None)),
            ("scheduler".to_owned(), entry(scheduler)),
        ]);
        // A pipeline also lists the text encoder that it does not have before one that it has.
        let spec = self.family.spec();
        let last = spec.text_encoders.last().map(|e| e.part);
        let is_listed = |part: &Part| match part {
            Part::Unet | Part::Transformer => *part == spec.denoiser.part(),
            Part::Vae | Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => {
                Some(*part) <= last
            }
        };
        for part in Part::ALL.into_iter().filter(is_listed) {
            let component = self.components.get(&part);
            let class = component.map(|component| class_of(part, component));
            entries.insert(part.name().to_owned(), entry(class.transpose()?));
            if let Some(tokenizer) = part.tokenizer() {
                let has = self.tokenizers.contains_key(&part);
                let encoder = spec.text_encoders.iter().find(|e| e.part == part);
                let class = match encoder.map(|encoder| encoder.kind) {
                    Some(TextEncoderKind::T5 { .. }) => "T5TokenizerFast",
                    Some(TextEncoderKind::Clip) | None => "CLIPTokenizer",
                };
                let class = has.then_some(["transformers", class]);
                entries.insert(tokenizer.to_owned(), entry(class));
            }
        }
        entries.extend(built_in(&self.path, published.index)?);
        Ok(entries.into_iter().collect())
    }
}

/// The library and the class of a part.
///
/// # Errors
/// When its configuration is of a class that is not supported.
fn class_of(part: Part, component: &Component) -> Result<[&'static str; 2], SourceError> {
    let (library, classes) = part.classes();
    let config = &component.config;
    let class = config.get("_class_name").and_then(Value::as_str);
    // transformers names it so, where it does not name a larger model that the encoder is of.
    let architecture = config.get("architectures").and_then(|names| names.get(0));
    let architecture = architecture.and_then(Value::as_str);
    let is_t5 = config.get("model_type") == Some(&json!("t5"));
    let found = class
        .or(architecture.filter(|name| classes.contains(name)))
        .or(is_t5.then_some("T5EncoderModel"));
    let mut supported = classes.iter();
    match supported.find(|class| found.is_none_or(|found| found == **class)) {
        Some(class) => Ok([library, class]),
        None => Err(SourceError::Structure {
            path: component.checkpoint.path().to_owned(),
            part,
            reason: format!(
                "its config.json is of class {}, expected {}",
                found.unwrap_or_default(),
                classes.join(" or ")
            ),
        }),
    }
}

/// The tensors of a part as they are written: `types` says in which type a float is.
pub(super) fn specs(
    checkpoint: &Checkpoint,
    types: &dyn Fn(&Shape) -> DType,
) -> Result<Vec<TensorSpec>, SourceError> {
    let spec = |(name, shape): (&str, &Shape)| {
        if !shape.dtype.is_float() && is_parameter(name) {
            return Err(SourceError::NotFloat {
                path: checkpoint.path().to_owned(),
                tensor: name.to_owned(),
                found: shape.dtype,
            });
        }
        Ok(TensorSpec {
            name: name.to_owned(),
            shape: match shape.dtype.is_float() {
                true => shape.with_dtype(types(shape)),
                false => shape.clone(),
            },
        })
    };
    checkpoint.iter().map(spec).collect()
}

/// Writes a part's tensors, and tells `wrote` the bytes of each tensor; the tensors whose values became infinite, and how many
/// did.
fn write_part(
    folder: &Path,
    part: Part,
    component: &Component,
    specs: &[TensorSpec],
    wrote: &mut dyn FnMut(u64),
) -> Result<Vec<(String, usize)>, SourceError> {
    let mut overflown = Vec::new();
    let path = folder.join(part.weights_file());
    let mut file = ScatteredFile::create(&path, specs, &pytorch_metadata())?;
    let wanted = specs.iter().map(|spec| (&spec.name, spec.shape.dtype));
    let wanted: Vec<(&String, DType)> = wanted.collect();
    component
        .checkpoint
        .read_all_with(&wanted, |name, tensor| {
            let count = infinities(tensor).map_err(|source| WeightsError::Fetch {
                path: path.clone(),
                tensor: name.to_owned(),
                source: source.into(),
            })?;
            overflown.extend(count.map(|count| (format!("{part}/{name}"), count)));
            file.write(name, &tensor.data)?;
            wrote(tensor.data.len() as u64);
            Ok::<_, SourceError>(())
        })?;
    file.finish()?;
    Ok(overflown)
}

/// How many values of a tensor became infinite; those of the file that it was read from are finite, because others are
/// not read.
pub(super) fn infinities(tensor: &HostTensor) -> Result<Option<usize>, HostTensorError> {
    if !has_infinity(tensor) {
        return Ok(None);
    }
    let values = tensor.to_f32_vec()?;
    Ok(Some(values.iter().filter(|v| v.is_infinite()).count()))
}

/// The error of a file that is read while another is written.
pub(super) fn blame_source(error: WeightsError) -> WeightsError {
    match error {
        WeightsError::Fetch {
            path,
            tensor,
            source,
        } => match source.downcast::<WeightsError>() {
            Ok(read) => *read,
            Err(source) => WeightsError::Fetch {
                path,
                tensor,
                source,
            },
        },
        other => other,
    }
}

fn make_dir(path: &Path) -> Result<(), SourceError> {
    fs::create_dir(path).map_err(|e| io_error(path, e))
}

fn sync(dir: &Path) -> Result<(), SourceError> {
    sync_dir(dir).map_err(|e| io_error(dir, e))
}

fn write_json(path: &Path, object: &Map<String, Value>) -> Result<(), SourceError> {
    let text = format!("{:#}\n", json!(object));
    write_synced(path, |out| out.write_all(text.as_bytes()))
        .map_err(|e: io::Error| write_error(path, text.len() as u64, e).into())
}

/// Copies the files of a folder whose names are `wanted`, not its subfolders.
fn copy_files(from: &Path, to: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<(), SourceError> {
    make_dir(to)?;
    for entry in fs::read_dir(from).map_err(|e| io_error(from, e))? {
        let entry = entry.map_err(|e| io_error(from, e))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if !source.is_file() || !wanted(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let copied = fs::copy(&source, &target)
            .and_then(|_| File::open(&target))
            .and_then(|file| file.sync_all());
        copied.map_err(|e| io_error(&source, e))?;
    }
    sync(to)
}
