//! Running the autoencoder and the text encoders over a dataset.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::data::{DataError, Dataset, Prefetcher, Sample};
use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::pipelines::conditioning::{Conditioning, Encoder, TextLayout};
use crate::pipelines::init_image::signed_planes;
use crate::pipelines::latents::trace_encode_distribution;
use crate::pipelines::text_to_image::{names, trace_encode};
use crate::pipelines::{PartProgram, PipelineModel, TakeWeight, WeightSource};
use crate::runtime::{Prepared, Session, Slot};
use crate::shape::Shape;

use super::store::{Entry, Store};
use super::{
    DEVIATION, HIDDEN, Image, MASK, MEAN, POOLED, WEIGHT, mask_dims, of_size, stop_on_break,
};
use crate::train::error::TrainError;
use crate::train::observer::{Encoded, TrainEvent, TrainObserver};

/// Captions that are encoded at once, on each device.
const CAPTIONS: usize = 4;
/// Images that are read ahead.
const AHEAD: usize = 4;
/// Bytes of the entries of a shard; the last entry goes beyond.
const SHARD_BYTES: usize = 32 << 20;

/// What encodes, and where the results go.
pub(super) struct Encoding<'a, 'o, 'i> {
    pub session: &'a Session,
    pub base: &'a PipelineModel,
    pub precision: DotPrecision,
    pub store: &'a mut Store,
    pub observer: &'o mut TrainObserver<'i>,
}

/// Entries on their way to a shard.
#[derive(Default)]
struct Shard {
    entries: BTreeMap<String, Entry>,
    bytes: usize,
}

impl Encoding<'_, '_, '_> {
    /// Encodes captions, the token ids for each text encoder by the keys of their entries.
    pub fn captions(&mut self, work: BTreeMap<String, Vec<Vec<i32>>>) -> Result<(), TrainError> {
        if work.is_empty() {
            return Ok(());
        }
        let model = &self.base.model;
        let total = work.len();
        let mut shard = Shard::default();
        self.tell((Encoded::Captions, 0, total), &mut shard)?;
        let (session, files) = (self.session, &self.base.files);
        let read =
            |slots: &[Slot], take: &mut TakeWeight<'_>| files.read_unchanged(session, slots, take);
        let weights = WeightSource::Files(&read);
        let rows = CAPTIONS * session.devices().len();
        let layout = TextLayout::of(model, model.tokens);
        let mut encoders = Vec::with_capacity(model.text_encoders.len());
        for which in 0..model.text_encoders.len() {
            let traced = trace_encode(model, which, rows).map_err(TrainError::encode)?;
            let lowered = self.session.lower(&traced)?;
            let sizes = [rows, model.text_encoders[which].tokens];
            let encoder = Encoder::compile(self.session, lowered, sizes, self.precision)
                .map_err(TrainError::encode)?;
            let prepared = weights.prepare(encoder.program().stages(), &mut |_| Ok(()));
            let prepared = prepared.map_err(TrainError::encode)?;
            encoders.push((encoder, prepared));
        }
        let work: Vec<(String, Vec<Vec<i32>>)> = work.into_iter().collect();
        let mut done = 0;
        for captions in work.chunks(rows) {
            let mut parts = Vec::with_capacity(encoders.len());
            for (which, (encoder, prepared)) in encoders.iter().enumerate() {
                // A batch that is not full is filled up with its first caption.
                let of_row = |row: usize| captions.get(row).unwrap_or(&captions[0]);
                let ids: Vec<i32> = (0..rows)
                    .flat_map(|row| of_row(row).1[which].iter().copied())
                    .collect();
                let part = encoder.run(session, prepared, &ids);
                parts.push(part.map_err(TrainError::encode)?);
            }
            let Some(joined) = layout.join(parts).map_err(TrainError::encode)? else {
                continue;
            };
            for (row, (key, _)) in captions.iter().enumerate() {
                let entry = self.embeddings(&joined, row)?;
                shard.add(key.clone(), entry, self.store)?;
            }
            done += captions.len();
            self.tell((Encoded::Captions, done, total), &mut shard)?;
        }
        shard.write(self.store)
    }

    /// The entry of one row: what the encoders computed has no more digits than their activations.
    fn embeddings(&self, joined: &Conditioning, row: usize) -> Result<Entry, TrainError> {
        let dtype = self.base.model.precision.activations;
        let pooled = match &joined.pooled {
            Some(pooled) => of_row(pooled, row)?.convert(dtype)?,
            None => HostTensor::zeros(Shape::new(dtype, [0])),
        };
        let hidden = of_row(&joined.hidden, row)?.convert(dtype)?;
        let mut entry = Entry::from([(HIDDEN, hidden), (POOLED, pooled)]);
        if let Some(mask) = &joined.mask {
            entry.insert(MASK, of_row(mask, row)?.convert(dtype)?);
        }
        Ok(entry)
    }

    /// Encodes images of several heights and widths, by the keys of their entries.
    pub fn images(
        &mut self,
        work: BTreeMap<[usize; 2], BTreeMap<String, Image>>,
        dataset: &Arc<Dataset>,
    ) -> Result<(), TrainError> {
        let total = work.values().map(BTreeMap::len).sum();
        if total == 0 {
            return Ok(());
        }
        let mut shard = Shard::default();
        self.tell((Encoded::Images, 0, total), &mut shard)?;
        let mut done = 0;
        for (size, images) in work {
            if !images.is_empty() {
                self.images_of_size((size, images), dataset, &mut shard, (&mut done, total))?;
            }
        }
        shard.write(self.store)
    }

    fn images_of_size(
        &mut self,
        (size, work): ([usize; 2], BTreeMap<String, Image>),
        dataset: &Arc<Dataset>,
        shard: &mut Shard,
        (done, total): (&mut usize, usize),
    ) -> Result<(), TrainError> {
        let model = of_size(&self.base.model, size);
        let traced = trace_encode_distribution(&model).map_err(TrainError::encode)?;
        let (session, files) = (self.session, &self.base.files);
        let read =
            |slots: &[Slot], take: &mut TakeWeight<'_>| files.read_unchanged(session, slots, take);
        let program = PartProgram::compile(session, session.lower(&traced)?, self.precision)
            .map_err(TrainError::encode)?;
        let prepared = WeightSource::Files(&read)
            .prepare(program.stages(), &mut |_| Ok(()))
            .map_err(TrainError::encode)?;
        // In the order of the samples: those of one file are read together.
        let mut work: Vec<(String, Image)> = work.into_iter().collect();
        work.sort_by_key(|(_, image)| *image);
        let (keys, wanted): (Vec<String>, Vec<Image>) = work.into_iter().unzip();
        let dataset = Arc::clone(dataset);
        let mut samples: Prefetcher<Sample, DataError> =
            Prefetcher::spawn(0, AHEAD, move |at| match wanted.get(at as usize) {
                Some(&(index, is_flipped)) => {
                    let mut sample = dataset.get(index)?;
                    if is_flipped {
                        sample.flip();
                    }
                    Ok(sample)
                }
                // After the last: nobody asks for it.
                None => Err(DataError::Index {
                    index: at as usize,
                    len: wanted.len(),
                }),
            })?;
        let (begun, mut waited) = (Instant::now(), Duration::ZERO);
        let count = keys.len();
        for key in keys {
            let asked = Instant::now();
            let sample = samples.next()?;
            waited += asked.elapsed();
            let entry = self.latents(&program, &prepared, &sample)?;
            shard.add(key, entry, self.store)?;
            *done += 1;
            self.tell((Encoded::Images, *done, total), shard)?;
        }
        tracing::info!(
            "{count} images were encoded in {:.1} s, {:.1} s of it waiting for pictures to be decoded",
            begun.elapsed().as_secs_f64(),
            waited.as_secs_f64()
        );
        Ok(())
    }

    fn latents(
        &self,
        program: &PartProgram,
        prepared: &Prepared<'_>,
        sample: &Sample,
    ) -> Result<Entry, TrainError> {
        let dtype = self.base.model.precision.activations;
        let mut inputs = program.inputs(self.session);
        inputs
            .set(names::IMAGES, &signed_planes(&sample.image())?)
            .map_err(TrainError::encode)?;
        let mut results = program
            .run(prepared, &inputs)
            .map_err(TrainError::encode)?
            .into_iter();
        let mean = results
            .next()
            .ok_or_else(|| TrainError::UnknownOutput(names::LATENTS.to_owned()))?;
        let mean = of_row(&mean, 0)?.convert(dtype)?;
        let deviation = match results.next() {
            Some(deviation) => of_row(&deviation, 0)?.convert(dtype)?,
            None => HostTensor::zeros(mean.shape.clone()),
        };
        let mut entry = Entry::from([(DEVIATION, deviation)]);
        if let Some(mask) = &sample.mask {
            let dims = mask_dims(&mean.shape.dims);
            let places = mask.averaged([1, 2].map(|at| dims.get(at).copied().unwrap_or(1)));
            entry.insert(WEIGHT, HostTensor::from_f32(dims, &places)?);
        }
        entry.insert(MEAN, mean);
        Ok(entry)
    }

    /// Tells of `done` of `total`. If the observer asks to stop, what is in `shard` is written first.
    fn tell(
        &mut self,
        (what, done, total): (Encoded, usize, usize),
        shard: &mut Shard,
    ) -> Result<(), TrainError> {
        let flow = (self.observer)(TrainEvent::Encoding { what, done, total });
        if flow.is_break() {
            std::mem::take(shard).write(self.store)?;
        }
        stop_on_break(flow)
    }
}

impl Shard {
    /// Takes an entry, and writes the shard when it is large enough.
    fn add(&mut self, key: String, entry: Entry, store: &mut Store) -> Result<(), TrainError> {
        self.bytes += entry.values().map(|t| t.data.len()).sum::<usize>();
        self.entries.insert(key, entry);
        match self.bytes >= SHARD_BYTES {
            true => std::mem::take(self).write(store),
            false => Ok(()),
        }
    }

    fn write(self, store: &mut Store) -> Result<(), TrainError> {
        Ok(store.add(&self.entries)?)
    }
}

/// Row `row` of a batch, without its dimension.
fn of_row(batch: &HostTensor, row: usize) -> Result<HostTensor, TrainError> {
    let dims = batch.shape.dims.get(1..).unwrap_or_default().to_vec();
    let shape = batch.shape.with_dims(dims);
    let bytes = shape.bytes();
    let data = batch.data[row * bytes..(row + 1) * bytes].to_vec();
    Ok(HostTensor::new(shape, data)?)
}
