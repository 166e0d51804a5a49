//! A dataset as latents and text embeddings, which are computed once and kept in files.
//!
//! An entry is called by the hash of all that decides it: of latents the picture, its mask, its crop, whether it is mirrored,
//! the autoencoder and its precision; of embeddings the token ids, the text encoders and their precision.

mod encode;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::{Value, json};

use crate::data::{BatchOptions, BatchRows, Dataset, MaskOrigin, Permutation, Rows, TagOrders};
use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::joint::names as joint;
use crate::models::pixart::names as pixart;
use crate::models::unet::names as unet;
use crate::models::{DenoiserKind, DiffusionModel, vae};
use crate::pipelines::PipelineModel;
use crate::runtime::Session;
use crate::shape::Shape;
use crate::util::hash::{Hasher, Sha256};
use crate::util::known::Known;
use crate::weights::{Checkpoint, WeightsError};

use super::error::TrainError;
use super::observer::{TrainEvent, TrainObserver};
use super::step::names;

use store::Store;
pub use store::StoreError;

/// The inputs of a training step that come from the dataset, by their names.
pub type StepInputs = BTreeMap<&'static str, HostTensor>;

/// The tensors of an entry: the distribution of latents, and the results of the text encoders.
const MEAN: &str = "mean";
const DEVIATION: &str = "deviation";
/// Only where a picture has a mask: how much each place of its latents counts.
const WEIGHT: &str = "weight";
const HIDDEN: &str = "hidden";
const POOLED: &str = "pooled";
/// Only where padding is masked.
const MASK: &str = "mask";

/// The file beside the shards with what is known of pictures and weights, so that a start reads neither.
pub const KNOWN_FILES: &str = "known.json";

/// The version of keys and entries: it changes with what they mean.
const VERSION: u32 = 2;

/// What of the model decides latents and embeddings.
struct Encoders {
    vae: Value,
    text: Value,
}

/// The keys of a sample's entries, and its time ids.
#[derive(Debug)]
struct SampleKeys {
    /// Of each caption those of the orders of its tags.
    captions: Vec<Vec<String>>,
    /// As the picture is, and mirrored if mirrored ones are drawn.
    latents: Vec<String>,
    has_mask: bool,
    time_ids: Vec<Vec<f32>>,
}

/// A dataset whose samples are encoded.
#[derive(Debug)]
pub struct EncodedDataset {
    store: Store,
    samples: Vec<SampleKeys>,
    empty_caption: String,
    /// The step's input of pooled text.
    pooled_input: &'static str,
    /// Whether captions have a mask of what fills them up.
    is_masked: bool,
    /// Whether steps take masks of pictures.
    has_masks: bool,
    /// For text encoders that are trained: the token ids for each of them, by the keys of captions.
    ids: Option<BTreeMap<String, Vec<Vec<i32>>>>,
    /// The samples of each size that training does not see.
    held_out: Vec<Vec<usize>>,
    rows: Rows,
}

/// What is encoded, and where it is kept.
pub struct Samples<'a> {
    pub dataset: Dataset,
    pub options: BatchOptions,
    /// The orders in which tags of captions are used; `None` leaves captions as they are.
    pub tags: Option<TagOrders>,
    /// The heights and widths of images, of which a batch has one.
    pub sizes: &'a [[usize; 2]],
    /// Whether steps take token ids, so that captions are not encoded.
    pub keeps_ids: bool,
    /// How many samples are held out of training.
    pub held_out: usize,
    pub dir: &'a Path,
}

/// An image to be encoded: its sample and whether it is mirrored.
type Image = (usize, bool);

/// What is to be encoded, by the keys of its entries.
struct Work {
    /// By their heights and widths.
    images: BTreeMap<[usize; 2], BTreeMap<String, Image>>,
    /// Token ids for each text encoder.
    captions: BTreeMap<String, Vec<Vec<i32>>>,
}

impl EncodedDataset {
    /// Encodes what the folder does not hold yet of the dataset's images and, unless steps take token ids, captions.
    /// `observer` hears of it, and may stop it.
    ///
    /// # Errors
    /// When a caption cannot be tokenized, an image cannot be read any more, an encoder fails, or the folder cannot be
    /// written; [`TrainError::EncodingStopped`] when `observer` asks to stop: what is encoded by then stays.
    pub fn new(
        session: &Session,
        base: &PipelineModel,
        precision: DotPrecision,
        samples: Samples<'_>,
        observer: &mut TrainObserver<'_>,
    ) -> Result<EncodedDataset, TrainError> {
        let Samples {
            dataset,
            options,
            tags,
            sizes,
            keeps_ids,
            held_out,
            dir,
        } = samples;
        stop_on_break(observer(TrainEvent::Hashing))?;
        let mut known = Known::read(&dir.join(KNOWN_FILES));
        let encoders = Encoders::of(base, precision, &mut known)?;
        let mut work = Work {
            images: BTreeMap::new(),
            captions: BTreeMap::new(),
        };
        let empty_caption = work.caption("", base, &encoders)?;
        let mut groups = dataset.groups(sizes);
        let held_out = hold_out(&mut groups, held_out, options.seed)?;
        let measured: BTreeSet<usize> = held_out.iter().flatten().copied().collect();
        let mut samples = Vec::with_capacity(dataset.len());
        for index in 0..dataset.len() {
            // What the loss is measured on has its captions as they are written.
            let tags = tags.as_ref().filter(|_| !measured.contains(&index));
            samples.push(work.sample(index, &dataset, base, &options, tags, &encoders)?);
        }
        let rows = Rows::new(options, groups).with_classes(dataset.classes());
        let has_masks = dataset.has_masks();
        let ids = keeps_ids.then(|| std::mem::take(&mut work.captions));
        let wanted: BTreeSet<String> = work.keys().cloned().collect();
        let mut store = Store::open(dir, &wanted)?;
        known.write().map_err(|source| StoreError::Io {
            path: dir.join(KNOWN_FILES),
            source,
        })?;
        dataset.remember()?;
        for (path, reason) in store.damaged() {
            tracing::warn!("{}: {reason}; it is made again", path.display());
        }
        for images in work.images.values_mut() {
            images.retain(|key, _| !store.has(key));
        }
        work.captions.retain(|key, _| !store.has(key));
        let mut encoding = encode::Encoding {
            session,
            base,
            precision,
            store: &mut store,
            observer,
        };
        encoding.captions(work.captions)?;
        encoding.images(work.images, &Arc::new(dataset))?;
        store.remove_damaged()?;
        Ok(EncodedDataset {
            store,
            samples,
            empty_caption,
            pooled_input: match base.model.denoiser.kind() {
                DenoiserKind::Unet => unet::TEXT_EMBEDS,
                DenoiserKind::Flux | DenoiserKind::Sd3 | DenoiserKind::PixArt => {
                    joint::POOLED_PROJECTIONS
                }
            },
            is_masked: base.model.text_encoders.iter().any(|e| e.masked),
            has_masks,
            ids,
            held_out,
            rows,
        })
    }

    /// Samples of a batch.
    pub fn batch_size(&self) -> usize {
        self.rows.options().batch_size
    }

    /// The inputs of batch `number`: latents, embeddings and time ids of the rows of [`Rows::batch`]. Also which of the
    /// sizes that the dataset was opened with its images have.
    ///
    /// # Errors
    /// When an entry cannot be read.
    pub fn inputs(&self, number: u64) -> Result<(usize, StepInputs), TrainError> {
        let BatchRows { group, rows } = self.rows.batch(number);
        let rows = rows
            .into_par_iter()
            .map(|row| {
                let sample = &self.samples[row.index];
                let flipped = usize::from(row.is_flipped);
                let caption = match row.drops_caption {
                    true => &self.empty_caption,
                    false => {
                        let orders = &sample.captions[row.pick(sample.captions.len())];
                        &orders[row.pick_order(orders.len())]
                    }
                };
                self.row(sample, flipped, caption)
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        Ok((group, stacked(rows)?))
    }

    /// The samples of one of the sizes that training does not see.
    pub fn held_out(&self, size: usize) -> &[usize] {
        self.held_out.get(size).map_or(&[], Vec::as_slice)
    }

    /// The mean of a sample's latents, with the first of its captions.
    ///
    /// # Errors
    /// When an entry cannot be read.
    pub fn held_out_row(&self, sample: usize) -> Result<StepInputs, TrainError> {
        let sample = &self.samples[sample];
        let mut row = self.row(sample, 0, &sample.captions[0][0])?;
        row.remove(names::DEVIATION);
        Ok(row)
    }

    /// The inputs of one sample, as it is (0) or mirrored (1), without a dimension of the batch.
    fn row(
        &self,
        sample: &SampleKeys,
        flipped: usize,
        caption: &str,
    ) -> Result<StepInputs, TrainError> {
        let read = |key: &str, name| -> Result<HostTensor, TrainError> {
            Ok(self.store.read(key, name)?.convert(DType::F32)?)
        };
        let latents = &sample.latents[flipped];
        let mean = read(latents, MEAN)?;
        let ids = &sample.time_ids[flipped];
        let mut row = StepInputs::from([
            (names::DEVIATION, read(latents, DEVIATION)?),
            // Only SDXL's step has them as an input.
            (unet::TIME_IDS, HostTensor::from_f32([ids.len()], ids)?),
        ]);
        if self.has_masks {
            let mask = match sample.has_mask {
                true => read(latents, WEIGHT)?,
                false => everywhere(&mean.shape.dims)?,
            };
            row.insert(names::MASK, mask);
        }
        row.insert(names::SAMPLE, mean);
        if let Some(ids) = &self.ids {
            let ids = ids.get(caption).into_iter().flatten();
            for (name, ids) in names::INPUT_IDS.into_iter().zip(ids) {
                row.insert(name, HostTensor::from_i32([ids.len()], ids)?);
            }
            return Ok(row);
        }
        row.insert(unet::ENCODER_HIDDEN_STATES, read(caption, HIDDEN)?);
        let pooled = read(caption, POOLED)?;
        // Of encoders without a pooled result it has no elements.
        if pooled.shape.count() > 0 {
            row.insert(self.pooled_input, pooled);
        }
        if self.is_masked {
            row.insert(pixart::ENCODER_ATTENTION_MASK, read(caption, MASK)?);
        }
        Ok(row)
    }
}

impl Work {
    fn keys(&self) -> impl Iterator<Item = &String> {
        let images = self.images.values().flat_map(BTreeMap::keys);
        images.chain(self.captions.keys())
    }

    /// The keys of sample `index`, which are to be made.
    fn sample(
        &mut self,
        index: usize,
        dataset: &Dataset,
        base: &PipelineModel,
        options: &BatchOptions,
        tags: Option<&TagOrders>,
        encoders: &Encoders,
    ) -> Result<SampleKeys, TrainError> {
        let (captions, picture) = dataset.entry(index)?;
        let model = of_size(&base.model, picture.size);
        let images = self.images.entry(picture.size).or_default();
        let mut latents = Vec::new();
        let mut time_ids = Vec::new();
        for is_flipped in [false, true] {
            if is_flipped && !options.random_flip {
                continue;
            }
            let mut decides = json!({
                "vae": encoders.vae,
                "picture": picture.content.to_string(),
                "corner": picture.corner,
                "extent": picture.extent,
                "size": picture.size,
                "is_flipped": is_flipped,
            });
            match picture.mask {
                MaskOrigin::Everywhere => {}
                MaskOrigin::Alpha => decides["mask"] = "alpha".into(),
                MaskOrigin::File(content) => decides["mask"] = content.to_string().into(),
            }
            let key = key(&decides);
            images.insert(key.clone(), (index, is_flipped));
            latents.push(key);
            let corner = picture.crop_top_left(is_flipped);
            time_ids.push(model.time_ids_of(picture.original_size, corner));
        }
        let orders = captions.into_iter().map(|caption| {
            let texts = match tags {
                Some(tags) => tags.of(&caption),
                None => vec![caption],
            };
            let keys = texts.iter().map(|text| self.caption(text, base, encoders));
            keys.collect()
        });
        Ok(SampleKeys {
            captions: orders.collect::<Result<_, _>>()?,
            latents,
            has_mask: picture.mask != MaskOrigin::Everywhere,
            time_ids,
        })
    }

    /// The key of a caption, which is to be made.
    fn caption(
        &mut self,
        caption: &str,
        base: &PipelineModel,
        encoders: &Encoders,
    ) -> Result<String, TrainError> {
        let mut ids = Vec::with_capacity(base.tokenizers.len());
        let read = base.model.family.spec().read_prompt(caption);
        for tokenizer in &base.tokenizers {
            let encoded = tokenizer.encode(&read)?;
            for warning in encoded.warnings() {
                tracing::warn!("caption \"{caption}\": {warning}");
            }
            ids.push(encoded.ids);
        }
        let key = key(&json!({ "text": encoders.text, "ids": ids }));
        self.captions.insert(key.clone(), ids);
        Ok(key)
    }
}

impl Encoders {
    /// # Errors
    /// When a file of the model cannot be read.
    fn of(
        base: &PipelineModel,
        dot_precision: DotPrecision,
        known: &mut Known,
    ) -> Result<Encoders, TrainError> {
        let model = &base.model;
        let mut fingerprint = |root: &str| -> Result<String, TrainError> {
            let checkpoint = base.files.get(root).map_err(TrainError::encode)?;
            Ok(fingerprint(checkpoint, known)?)
        };
        let precision = json!([
            model.precision.weights.to_string(),
            model.precision.activations.to_string(),
            format!("{dot_precision:?}"),
        ]);
        let text = model
            .text_encoders
            .iter()
            .map(|encoder| {
                let mut decides = json!({
                    "weights": fingerprint(encoder.part.name())?,
                    "config": format!("{:?}", encoder.config),
                    "hidden": format!("{:?}", encoder.hidden),
                });
                if encoder.masked {
                    decides["masked"] = true.into();
                }
                Ok(decides)
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        Ok(Encoders {
            vae: json!({
                "version": VERSION,
                "weights": fingerprint(vae::ROOT)?,
                "config": format!("{:?}", model.vae),
                "precision": precision,
            }),
            text: {
                let mut text =
                    json!({ "version": VERSION, "encoders": text, "precision": precision });
                if let Some(features) = model.padded_features() {
                    text["filled"] = json!([model.tokens, features]);
                }
                text
            },
        })
    }
}

/// Takes `count` samples out of `groups`, which seed and number decide: those of each group.
fn hold_out(
    groups: &mut [Vec<usize>],
    count: usize,
    seed: u64,
) -> Result<Vec<Vec<usize>>, TrainError> {
    let all: BTreeSet<usize> = groups.iter().flatten().copied().collect();
    if count > 0 && count >= all.len() {
        return Err(TrainError::HeldOut {
            count,
            all: all.len(),
        });
    }
    let order = Permutation::new(seed, u64::MAX, 0, all.len());
    let all: Vec<usize> = all.into_iter().collect();
    let held: BTreeSet<usize> = (0..count).map(|at| all[order.index(at)]).collect();
    let mut found = Vec::with_capacity(groups.len());
    for group in groups {
        let own: BTreeSet<usize> = group.iter().copied().filter(|s| held.contains(s)).collect();
        group.retain(|sample| !held.contains(sample));
        found.push(own.into_iter().collect());
    }
    Ok(found)
}

/// The mask of latents `[channels, rows, columns]` all of which counts: `f32[1, rows, columns]`.
fn everywhere(latents: &[usize]) -> Result<HostTensor, TrainError> {
    let dims = mask_dims(latents);
    let ones = vec![1.0; dims.iter().product()];
    Ok(HostTensor::from_f32(dims, &ones)?)
}

/// The dimensions of the mask of latents `[channels, rows, columns]`: one channel.
fn mask_dims(latents: &[usize]) -> Vec<usize> {
    let places = latents.get(1..).unwrap_or_default();
    [&[1], places].concat()
}

/// The same model for images of this height and width.
pub(super) fn of_size(model: &DiffusionModel, size: [usize; 2]) -> DiffusionModel {
    let pixels = |which: usize| model.image_size[which] / model.sample_size[which].max(1);
    model.resized([0, 1].map(|which| size[which] / pixels(which).max(1)))
}

/// SHA-256 of what decides an entry, whose fields are always in the same order.
fn key(decides: &Value) -> String {
    Sha256::of(decides.to_string()).to_string()
}

/// SHA-256 of a checkpoint's tensors, the same in every layout; they are read if it is not known.
fn fingerprint(checkpoint: &Checkpoint, known: &mut Known) -> Result<String, WeightsError> {
    let key = || {
        let stamp = checkpoint.stamp()?;
        Ok::<_, WeightsError>(stamp.map(|stamp| format!("weights {stamp}")))
    };
    let before = key()?;
    if let Some(found) = before.as_deref().and_then(|key| known.get(key)) {
        return Ok(found.to_owned());
    }
    let mut hasher = Hasher::default();
    for (name, shape) in checkpoint.iter() {
        hasher.update(format!("{name} {shape}\n"));
        hasher.update(checkpoint.read(name)?.data);
    }
    let fingerprint = hasher.finish().to_string();
    if let Some(before) = before
        && key()?.as_ref() == Some(&before)
    {
        known.insert(before, fingerprint.clone());
    }
    Ok(fingerprint)
}

/// The error of an observer that asks to stop.
fn stop_on_break(flow: ControlFlow<()>) -> Result<(), TrainError> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(TrainError::EncodingStopped),
    }
}

/// Rows with the same inputs as a batch.
pub(super) fn stacked(rows: Vec<StepInputs>) -> Result<StepInputs, TrainError> {
    let Some(first) = rows.first() else {
        return Ok(StepInputs::new());
    };
    let stack = |name: &&'static str| {
        let shape = &first[name].shape;
        let mut data = Vec::with_capacity(rows.len() * shape.bytes());
        for row in &rows {
            let tensor = row.get(name).filter(|tensor| tensor.shape == *shape);
            let tensor = tensor.ok_or_else(|| TrainError::UnknownInput((*name).to_owned()))?;
            data.extend(&tensor.data);
        }
        let dims = [&[rows.len()], shape.dims.as_slice()].concat();
        Ok((*name, HostTensor::new(Shape::new(shape.dtype, dims), data)?))
    };
    first.keys().map(stack).collect()
}
