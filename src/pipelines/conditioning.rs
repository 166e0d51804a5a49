//! The conditioning of the denoiser: prompts as embeddings, and the programs that compute them.

use std::time::Instant;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::lowering::Lowered;
use crate::models::{DiffusionModel, TextPlace};
use crate::runtime::{Prepared, Session};
use crate::shape::Shape;

use super::PipelineError;
use super::batch::{Phases, TokenizedImage, batches};
use super::observer::{Observer, Phase, enter};
use super::part_program::PartProgram;
use super::prompt::apply_weights;
use super::text_to_image::{DenoiseOptions, Guidance, names};
use super::weights::WeightSource;

/// The embeddings of one call's prompts, on the host.
#[derive(Clone, Debug)]
pub struct Conditioning {
    /// `f32[rows, tokens, features]`
    pub hidden: HostTensor,
    /// `f32[rows, features]`, for a denoiser that takes pooled embeddings.
    pub pooled: Option<HostTensor>,
    /// `f32[rows, tokens]`, for a denoiser that does not attend to the tokens that fill a prompt up: 0 for those.
    pub mask: Option<HostTensor>,
}

/// What one encoder gives for the prompts.
#[derive(Clone, Debug, Default)]
pub struct EncodedPart {
    /// `f32[rows, tokens, features]`, if the denoiser attends to its hidden states.
    pub hidden: Option<HostTensor>,
    /// `f32[rows, features]`
    pub pooled: Option<HostTensor>,
    /// `f32[rows, tokens]`, if padding is masked.
    pub mask: Option<HostTensor>,
}

/// How the results of a model's text encoders make its conditioning.
#[derive(Clone, Debug)]
pub struct TextLayout {
    /// Of each encoder.
    places: Vec<TextPlace>,
    /// Tokens and features that are filled up with zeros.
    filled: Option<[usize; 2]>,
}

impl TextLayout {
    /// That of `model` for prompts of `tokens` tokens.
    pub fn of(model: &DiffusionModel, tokens: usize) -> TextLayout {
        let encoders = model.text_encoders.iter();
        TextLayout {
            places: encoders.map(|encoder| encoder.place).collect(),
            filled: model.padded_features().map(|features| [tokens, features]),
        }
    }

    /// The results of all encoders together; `None` without hidden states.
    ///
    /// # Errors
    /// When their numbers of prompts or tokens differ, or there are more tokens or features than the model takes.
    pub fn join(&self, parts: Vec<EncodedPart>) -> Result<Option<Conditioning>, PipelineError> {
        let mut segments: Vec<HostTensor> = Vec::new();
        let (mut pooled, mut mask) = (None, None);
        for (place, part) in self.places.iter().zip(parts) {
            pooled = match (pooled, part.pooled) {
                (Some(left), Some(right)) => Some(side_by_side(left, right)?),
                (left, right) => left.or(right),
            };
            mask = part.mask.or(mask);
            let Some(hidden) = part.hidden else {
                continue;
            };
            let last = segments.pop();
            match (place, last) {
                (TextPlace::Beside, Some(last)) => segments.push(side_by_side(last, hidden)?),
                (_, last) => segments.extend(last.into_iter().chain([hidden])),
            }
        }
        let hidden = match self.filled {
            Some(dims) if !segments.is_empty() => Some(fill(&segments, dims)?),
            Some(_) | None => segments.pop(),
        };
        Ok(hidden.map(|hidden| Conditioning {
            hidden,
            pooled,
            mask,
        }))
    }
}

/// Tokens of one prompt after another, with zeros for the features and tokens that there are not.
fn fill(segments: &[HostTensor], dims: [usize; 2]) -> Result<HostTensor, PipelineError> {
    let [tokens, features] = dims;
    let rows = segments.first().map_or(0, |first| first.shape.dims[0]);
    let mut values = vec![0.0; rows * tokens * features];
    let mut before = 0;
    for segment in segments {
        let [own_rows, own, width] = segment.shape.dims[..] else {
            return Err(misfit(vec![rows, tokens, features], segment));
        };
        if own_rows != rows || before + own > tokens || width > features {
            return Err(misfit(vec![rows, tokens - before, features], segment));
        }
        let source = segment.to_f32_vec()?;
        for (at, token) in source.chunks(width).enumerate() {
            let (row, token_at) = (at / own, before + at % own);
            let start = (row * tokens + token_at) * features;
            values[start..start + width].copy_from_slice(token);
        }
        before += own;
    }
    Ok(HostTensor::from_f32([rows, tokens, features], &values)?)
}

/// The error for conditioning of other sizes.
fn misfit(expected: Vec<usize>, found: &HostTensor) -> PipelineError {
    PipelineError::Shape {
        what: names::ENCODER_HIDDEN_STATES,
        expected: found.shape.with_dims(expected),
        found: found.shape.clone(),
    }
}

impl Conditioning {
    /// Sets the rows `rows` to zero, which is SDXL's conditioning for no prompt.
    pub fn zero(&mut self, rows: impl Iterator<Item = usize>) {
        let rows: Vec<usize> = rows.collect();
        for tensor in [Some(&mut self.hidden), self.pooled.as_mut()]
            .into_iter()
            .flatten()
        {
            let bytes = tensor.data.len() / tensor.shape.dims[0].max(1);
            for row in &rows {
                tensor.data[row * bytes..(row + 1) * bytes].fill(0);
            }
        }
    }
}

/// The features of two tensors of the same prompts and, for hidden states, tokens.
fn side_by_side(left: HostTensor, right: HostTensor) -> Result<HostTensor, PipelineError> {
    let (Some((of_left, same)), Some((of_right, others))) =
        (left.shape.dims.split_last(), right.shape.dims.split_last())
    else {
        return Err(misfit(left.shape.dims.clone(), &right));
    };
    if same != others {
        return Err(misfit(left.shape.dims.clone(), &right));
    }
    let dims = [same, &[of_left + of_right]].concat();
    let (a, b) = (left.to_f32_vec()?, right.to_f32_vec()?);
    let values: Vec<f32> = a
        .chunks(*of_left)
        .zip(b.chunks(*of_right))
        .flat_map(|(a, b)| a.iter().chain(b).copied())
        .collect();
    Ok(HostTensor::from_f32(dims, &values)?)
}

/// One text encoder for a fixed number of prompts.
pub struct Encoder {
    program: PartProgram,
    rows: usize,
    tokens: usize,
}

impl Encoder {
    /// Compiles the program that was traced and lowered for `rows` prompts of `tokens` tokens.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        [rows, tokens]: [usize; 2],
        precision: DotPrecision,
    ) -> Result<Encoder, PipelineError> {
        Ok(Encoder {
            program: PartProgram::compile(session, lowered, precision)?,
            rows,
            tokens,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &PartProgram {
        &self.program
    }

    /// Tokens of a sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Encodes token ids: the same number of sequences for each prompt, one after the other. The hidden states of a
    /// prompt's sequences follow one another; its pooled output is that of the first.
    ///
    /// # Errors
    /// When the ids do not divide into the prompts, a weight is missing, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        ids: &[i32],
    ) -> Result<EncodedPart, PipelineError> {
        let sequences = ids.len() / (self.rows * self.tokens);
        if ids.len() != sequences * self.rows * self.tokens || sequences == 0 {
            return Err(PipelineError::Shape {
                what: names::INPUT_IDS,
                expected: Shape::new(DType::S32, [self.rows, sequences.max(1) * self.tokens]),
                found: Shape::new(DType::S32, [ids.len()]),
            });
        }
        let mut inputs = self.program.inputs(session);
        let row_ids = sequences * self.tokens;
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); self.rows];
        let mut features = 0;
        let (mut pooled, mut mask) = (None, None);
        for sequence in 0..sequences {
            let ids: Vec<i32> = (0..self.rows)
                .flat_map(|row| &ids[row * row_ids + sequence * self.tokens..][..self.tokens])
                .copied()
                .collect();
            let ids = HostTensor::from_i32([self.rows, self.tokens], &ids)?;
            inputs.set(names::INPUT_IDS, &ids)?;
            let results = self.program.run(weights, &inputs)?;
            let slots = self.program.stages().step().outputs();
            for (slot, result) in slots.iter().zip(results) {
                match slot.name.as_str() {
                    names::ENCODER_HIDDEN_STATES => {}
                    names::ENCODER_ATTENTION_MASK => {
                        mask.get_or_insert(result);
                        continue;
                    }
                    _ => {
                        pooled.get_or_insert(result);
                        continue;
                    }
                }
                features = result.shape.dims[2];
                let values = result.to_f32_vec()?;
                for (row, values) in hidden.iter_mut().zip(values.chunks(self.tokens * features)) {
                    row.extend(values);
                }
            }
        }
        let dims = [self.rows, row_ids, features];
        Ok(EncodedPart {
            hidden: match features {
                0 => None,
                _ => Some(HostTensor::from_f32(dims, &hidden.concat())?),
            },
            pooled,
            mask,
        })
    }
}

/// The text encoders of one model.
pub struct PromptEncoders {
    encoders: Vec<Encoder>,
    layout: TextLayout,
    batch: usize,
    guidance: bool,
}

/// The embeddings of the prompts of some images, and the seconds that they took.
#[derive(Debug)]
pub struct Encoded {
    /// The embeddings of each batch; with guidance, the negative prompt of each image comes before its prompt.
    pub(super) conditioning: Vec<Conditioning>,
    pub(super) phases: Phases,
}

impl PromptEncoders {
    /// Compiles the text encoders of `model`, which were traced with `options`.
    ///
    /// # Errors
    /// When one does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        encoders: Vec<Lowered>,
        options: &DenoiseOptions,
        precision: DotPrecision,
    ) -> Result<PromptEncoders, PipelineError> {
        let tokens: Vec<usize> = model.text_encoders.iter().map(|e| e.tokens).collect();
        Ok(PromptEncoders {
            encoders: encoders
                .into_par_iter()
                .zip(tokens)
                .map(|(encoder, tokens)| {
                    let sizes = [options.prompts(), tokens];
                    Encoder::compile(session, encoder, sizes, precision)
                })
                .collect::<Result<_, _>>()?,
            layout: TextLayout::of(model, options.tokens),
            batch: options.batch,
            guidance: options.guidance != Guidance::Off,
        })
    }

    /// The compiled programs.
    pub fn programs(&self) -> impl Iterator<Item = &PartProgram> {
        self.encoders.iter().map(Encoder::program)
    }

    /// Encodes the prompts of `images`. The weights of each encoder are freed before those of the next are read.
    ///
    /// # Errors
    /// When weights cannot be read, or a program fails; what `observer` fails with.
    pub fn run(
        &self,
        session: &Session,
        source: &WeightSource<'_>,
        images: &[TokenizedImage],
        observer: &mut Observer<'_>,
    ) -> Result<Encoded, PipelineError> {
        let mut phases = Phases::default();
        let batches = batches(images, self.batch);
        let mut parts: Vec<Vec<EncodedPart>> = vec![Vec::new(); batches.len()];
        for (which, encoder) in self.encoders.iter().enumerate() {
            let start = Instant::now();
            let prepared = source.prepare(encoder.program().stages(), observer)?;
            phases.load += start.elapsed().as_secs_f64();
            enter(observer, Phase::Encode)?;
            let start = Instant::now();
            for (batch, parts) in batches.iter().zip(&mut parts) {
                let batch = batch.filled(images, self.batch);
                parts.push(self.encode(session, encoder, &prepared, which, &batch)?);
            }
            phases.encode += start.elapsed().as_secs_f64();
        }
        let joined = parts.into_iter().map(|parts| {
            let joined = self.layout.join(parts)?;
            joined
                .ok_or_else(|| PipelineError::Request("the model has no text encoder".to_string()))
        });
        Ok(Encoded {
            conditioning: joined.collect::<Result<_, _>>()?,
            phases,
        })
    }

    /// Encodes the prompts of a batch by text encoder `which`; with guidance, the negative prompt before each prompt.
    fn encode(
        &self,
        session: &Session,
        encoder: &Encoder,
        prepared: &Prepared<'_>,
        which: usize,
        batch: &[&TokenizedImage],
    ) -> Result<EncodedPart, PipelineError> {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for image in batch {
            let negative = self.guidance.then(|| image.negative.get(which)).flatten();
            for tokens in negative.into_iter().chain(image.prompt.get(which)) {
                ids.extend(tokens.ids());
                weights.extend(tokens.weights());
            }
        }
        let mut encoded = encoder.run(session, prepared, &ids)?;
        if let Some(states) = &mut encoded.hidden
            && weights.iter().any(|weight| *weight != 1.0)
        {
            let mut hidden = states.to_f32_vec()?;
            apply_weights(&mut hidden, &weights, encoder.tokens())?;
            *states = HostTensor::from_f32(states.shape.dims.clone(), &hidden)?;
        }
        Ok(encoded)
    }
}
