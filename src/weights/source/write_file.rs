//! Writing a model as one file with the names of the original code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::Path;

use super::write::{WrittenPart, blame_source, infinities, specs};
use super::{Component, ModelSource, SourceError};
use crate::dtype::DType;
use crate::models::Part;
use crate::models::original::{ARCHITECTURE, Original, PREDICTION, RESOLUTION, Root, Transform};
use crate::shape::Shape;
use crate::util::files::{Access, AtomicFile, Durability, Existing, parent_of};
use crate::weights::save::{FilePlan, check_free_space, pytorch_metadata, write_error};
use crate::weights::{Checkpoint, TensorSpec};

/// Pixels of a side for each latent, in all models that say how large their samples were in training.
const PIXELS: u64 = 8;

/// One part of the file.
struct Rewritten {
    part: Part,
    /// The part's tensors by diffusers' names, each as the original code has it.
    tensors: Checkpoint,
    /// The file's tensors, each with those of `tensors` that have its rows.
    pieces: Vec<(TensorSpec, Vec<String>)>,
}

impl ModelSource {
    /// Writes the model to the new file `path` with the names of the family's original code: all parts, or the denoiser
    /// alone, whose names have no prefix then. Floats are cast to `dtype` where it is given. `observe` takes how many bytes
    /// of how many are written, from 0 on.
    ///
    /// The file appears under its name when all of it is on disk. It has neither tokenizers nor a sampler's configuration.
    ///
    /// # Errors
    /// When something of that name exists, the original code has no such part or lacks a tensor of it, a file cannot be
    /// read or written, or finite values would become infinite in `dtype`.
    pub fn write_single_file(
        &self,
        path: &Path,
        dtype: Option<DType>,
        denoiser_alone: bool,
        observe: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<WrittenPart>, SourceError> {
        if path.symlink_metadata().is_ok() {
            let path = path.to_owned();
            return Err(SourceError::Exists { path });
        }
        let roots = self.roots(denoiser_alone)?;
        let parts = roots
            .into_iter()
            .map(|(root, component)| Rewritten::new(root, component, dtype))
            .collect::<Result<Vec<_>, SourceError>>()?;
        let written = parts.iter().map(|rewritten| {
            let specs = rewritten.pieces.iter().map(|(spec, _)| spec);
            WrittenPart::of(rewritten.part, specs)
        });
        let written: Vec<WrittenPart> = written.collect();
        let total = written.iter().map(|w| w.bytes).sum();
        observe(0, total);
        let mut done = 0;
        let overflown = self.write_parts(path, &parts, &mut |bytes| {
            done += bytes;
            observe(done, total);
        })?;
        match (dtype, overflown.is_empty()) {
            (Some(dtype), false) => Err(SourceError::Overflow {
                path: self.path.clone(),
                dtype,
                tensors: overflown,
            }),
            _ => Ok(written),
        }
    }

    /// The parts to write, each with its place in the file.
    fn roots(&self, denoiser_alone: bool) -> Result<Vec<(Root, &Component)>, SourceError> {
        let single_file = &self.published()?.single_file;
        let denoiser = self.component(self.family.spec().denoiser.part())?;
        if denoiser_alone || self.components.len() == 1 {
            let alone = Root {
                prefix: "",
                ..single_file.denoiser
            };
            return Ok(vec![(alone, denoiser)]);
        }
        let others = single_file.autoencoder.iter();
        let others = others.chain(single_file.text_encoders);
        let mut roots = vec![(single_file.denoiser, denoiser)];
        for root in others {
            let taken = roots.iter().any(|(taken, _)| taken.part == root.part);
            if let (false, Some(component)) = (taken, self.components.get(&root.part)) {
                roots.push((*root, component));
            }
        }
        Ok(roots)
    }

    /// What the file says of itself: where no tensor tells the family or the size, reading takes it from here.
    fn said_of_itself(&self) -> BTreeMap<String, String> {
        let mut metadata = pytorch_metadata();
        let mut say = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        say(ARCHITECTURE, self.family.name().replace('_', "-"));
        let denoiser = self.components.get(&self.family.spec().denoiser.part());
        let side = denoiser.and_then(|denoiser| denoiser.config.get("sample_size")?.as_u64());
        if let Some(pixels) = side.and_then(|side| side.checked_mul(PIXELS)) {
            say(RESOLUTION, format!("{pixels}x{pixels}"));
        }
        let scheduler = self.scheduler.as_ref();
        let prediction = scheduler.and_then(|config| config.get("prediction_type")?.as_str());
        if let Some(prediction @ ("epsilon" | "v_prediction")) = prediction {
            say(PREDICTION, prediction.to_owned());
        }
        metadata
    }

    /// Writes the file; the tensors whose values became infinite, and how many did. There is no file then.
    fn write_parts(
        &self,
        path: &Path,
        parts: &[Rewritten],
        wrote: &mut dyn FnMut(u64),
    ) -> Result<Vec<(String, usize)>, SourceError> {
        let mut pieces = BTreeMap::new();
        let mut specs = Vec::new();
        for part in parts {
            for (spec, sources) in &part.pieces {
                pieces.insert(spec.name.as_str(), (&part.tensors, sources));
                specs.push(spec.clone());
            }
        }
        let plan = FilePlan::new(path, &specs, &self.said_of_itself())?;
        check_free_space(path, parent_of(path), plan.bytes)?;
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::AlreadyExists => SourceError::Exists {
                path: path.to_owned(),
            },
            _ => write_error(path, plan.bytes, source).into(),
        };
        let mut file = AtomicFile::create(path, Access::Umask).map_err(failed)?;
        let mut overflown = Vec::new();
        let written = plan.write(path, &mut file, |spec| {
            let mut data = Vec::with_capacity(spec.shape.bytes());
            let mut count = 0;
            if let Some((tensors, sources)) = pieces.get(spec.name.as_str()) {
                for source in *sources {
                    let tensor = tensors.read_as(source, spec.shape.dtype)?;
                    count += infinities(&tensor)?.unwrap_or(0);
                    data.extend_from_slice(&tensor.data);
                }
            }
            if count > 0 {
                overflown.push((spec.name.clone(), count));
            }
            wrote(data.len() as u64);
            Ok(data.into())
        });
        written.map_err(blame_source)?;
        if overflown.is_empty() {
            let committed = file.commit(path, Existing::Refuse, Durability::Synced);
            committed.map_err(failed)?;
        }
        Ok(overflown)
    }
}

impl Rewritten {
    fn new(
        root: Root,
        component: &Component,
        dtype: Option<DType>,
    ) -> Result<Rewritten, SourceError> {
        let checkpoint = &component.checkpoint;
        let layout = layout(root, checkpoint)?;
        let mut map = Vec::new();
        for (path, transform) in layout.iter().flat_map(|original| &original.parts) {
            if *transform == Transform::UnitMatrix {
                check_unit_matrix(checkpoint, path)
                    .map_err(|reason| refused(root, checkpoint, path, reason))?;
            } else if let Some(shape) = checkpoint.info(path) {
                map.push((path.clone(), (path.clone(), inverse(transform, shape))));
            }
        }
        let tensors = checkpoint.view(map)?;
        let types = |shape: &Shape| dtype.unwrap_or(shape.dtype);
        let shapes: BTreeMap<String, Shape> = specs(&tensors, &types)?
            .into_iter()
            .map(|spec| (spec.name, spec.shape))
            .collect();
        let pieces = layout.into_iter().map(|Original { name, parts }| {
            let sources: Vec<String> = parts
                .into_iter()
                .filter(|(_, transform)| *transform != Transform::UnitMatrix)
                .map(|(path, _)| path)
                .collect();
            let shape = stacked(sources.iter().filter_map(|path| shapes.get(path)));
            let shape = shape.map_err(|reason| refused(root, checkpoint, &name, reason))?;
            let name = format!("{}{name}", root.prefix);
            Ok((TensorSpec { name, shape }, sources))
        });
        Ok(Rewritten {
            part: root.part,
            pieces: pieces.collect::<Result<_, SourceError>>()?,
            tensors,
        })
    }
}

/// The tensors of the original code that those of a part make, each of which has its place in one.
fn layout(root: Root, checkpoint: &Checkpoint) -> Result<Vec<Original>, SourceError> {
    let Some(originals) = root.originals else {
        return Err(SourceError::NotOriginal {
            path: checkpoint.path().to_owned(),
            tensor: root.part.to_string(),
            reason: "they have layers that this model lacks".to_owned(),
        });
    };
    let paths: Vec<&str> = checkpoint.names().collect();
    let mut left: BTreeSet<&str> = paths.iter().copied().collect();
    let mut layout = Vec::new();
    for original in originals(&paths) {
        let parts = &original.parts;
        let has = |(path, _): &&(String, Transform)| left.contains(path.as_str());
        let missing = parts.iter().find(|part| !has(part));
        match (missing, parts.iter().find(has)) {
            (None, _) => {}
            (Some(_), None) => continue,
            (Some((missing, _)), Some((found, _))) => {
                let name = &original.name;
                let reason = format!("{name} is made of it and {missing}, which is missing");
                return Err(refused(root, checkpoint, found, reason));
            }
        }
        for (path, _) in parts {
            left.remove(path.as_str());
        }
        layout.push(original);
    }
    match left.into_iter().next() {
        None => Ok(layout),
        Some(path) => {
            let reason = "that code has no name for it".to_owned();
            Err(refused(root, checkpoint, path, reason))
        }
    }
}

/// The error of a tensor of a part.
fn refused(root: Root, checkpoint: &Checkpoint, tensor: &str, reason: String) -> SourceError {
    SourceError::NotOriginal {
        path: checkpoint.path().to_owned(),
        tensor: format!("{}/{tensor}", root.part),
        reason,
    }
}

/// What is shown of a tensor of diffusers' so that reading the original with `transform` gives it back.
fn inverse(transform: &Transform, shape: &Shape) -> Transform {
    match transform {
        // The rows of several are put together again.
        Transform::Identity | Transform::Rows(_) | Transform::UnitMatrix => Transform::Identity,
        Transform::Transpose => Transform::Transpose,
        Transform::SwapHalves => Transform::SwapHalves,
        // The original is a convolution with a kernel of 1 x 1.
        Transform::Reshape(_) => Transform::Reshape([&shape.dims[..], &[1, 1]].concat()),
    }
}

/// The shape of tensors whose rows follow one another.
fn stacked<'a>(mut shapes: impl Iterator<Item = &'a Shape>) -> Result<Shape, String> {
    let mut all = shapes.next().cloned().ok_or("it has no parts")?;
    for shape in shapes {
        if shape.dtype != all.dtype || shape.dims.get(1..) != all.dims.get(1..) {
            return Err(format!(
                "its parts {all} and {shape} do not fit each other; dtype= gives all the same type"
            ));
        }
        all.dims[0] += shape.dims[0];
    }
    Ok(all)
}

/// Checks that a matrix which the original code does not have changes nothing.
fn check_unit_matrix(checkpoint: &Checkpoint, path: &str) -> Result<(), String> {
    let values = checkpoint.read_as(path, DType::F32);
    let values = values.map_err(|e| e.to_string())?;
    let columns = values.shape.dims.get(1).copied().unwrap_or(1);
    let values = values.to_f32_vec().map_err(|e| e.to_string())?;
    let is_unit = |(index, value): (usize, &f32)| {
        *value == f32::from(u8::from(index / columns == index % columns))
    };
    match values.iter().enumerate().all(is_unit) {
        true => Ok(()),
        false => Err("that code leaves it out, and it is not the unit matrix".to_owned()),
    }
}
