//! The programs of a model before they are compiled: traced, then lowered.

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Graph, GraphError};
use crate::lowering::{Lowered, Traced};
use crate::models::DiffusionModel;
use crate::quant::Decision;
use crate::runtime::{RuntimeError, Session};

use super::PipelineError;
use super::latents::{trace_decode, trace_encode_image};
use super::memory::MemoryAdvice;
use super::text_to_image::{DenoiseOptions, DenoiseStep, trace_denoise, trace_encode};
use super::tiling::TilePlan;

/// The use of the last samples, with the program for it.
pub(super) enum Ending<T> {
    /// They are images.
    Pixels,
    /// Images are decoded of them.
    Decoded(T),
    /// Another model continues with them.
    Handed,
}

impl<T> Ending<T> {
    pub(super) fn as_ref(&self) -> Ending<&T> {
        match self {
            Ending::Pixels => Ending::Pixels,
            Ending::Decoded(program) => Ending::Decoded(program),
            Ending::Handed => Ending::Handed,
        }
    }

    pub(super) fn program(&self) -> Option<&T> {
        match self.as_ref() {
            Ending::Decoded(program) => Some(program),
            Ending::Pixels | Ending::Handed => None,
        }
    }

    /// The same with what `map` makes of the program.
    ///
    /// # Errors
    /// Those of `map`.
    pub(super) fn try_map<U, E>(self, map: impl FnOnce(T) -> Result<U, E>) -> Result<Ending<U>, E> {
        Ok(match self {
            Ending::Pixels => Ending::Pixels,
            Ending::Decoded(program) => Ending::Decoded(map(program)?),
            Ending::Handed => Ending::Handed,
        })
    }
}

/// The programs of one model.
pub struct ModelPrograms<T> {
    pub(super) encoders: Vec<T>,
    pub(super) denoise: DenoiseStep<T>,
    pub(super) ending: Ending<T>,
    pub(super) encode_image: Option<T>,
    pub(super) options: DenoiseOptions,
}

pub type TracedModel = ModelPrograms<Traced>;

/// Lowered for the devices of one session.
pub type LoweredModel = ModelPrograms<Lowered>;

impl TracedModel {
    /// Traces every program of `model`; `from_image` asks for the one that encodes an image to start from.
    ///
    /// # Errors
    /// When the model's parts do not fit together, or quantization is refused.
    pub fn new(
        model: &DiffusionModel,
        options: DenoiseOptions,
        from_image: bool,
    ) -> Result<TracedModel, PipelineError> {
        let encoders = (0..model.text_encoders.len())
            .map(|which| trace_encode(model, which, options.prompts()))
            .collect::<Result<Vec<_>, _>>()?;
        let denoise = trace_denoise(model, &options)?;
        let ending = match &model.vae {
            Some(_) => {
                let [rows, columns] = TilePlan::of(model)?.tile();
                Ending::Decoded(trace_decode(model, [rows, columns])?)
            }
            None => Ending::Pixels,
        };
        Ok(TracedModel {
            encoders,
            denoise,
            ending,
            encode_image: match from_image {
                true => Some(trace_encode_image(model)?),
                false => None,
            },
            options,
        })
    }

    /// The same without the decoder: another model continues with its samples, and it makes no images.
    pub fn handed_on(mut self) -> TracedModel {
        self.ending = Ending::Handed;
        self
    }

    /// The same for weights that are stored otherwise than the model holds them ([`Graph::with_stored_weights`]): less is
    /// copied on the way to the devices.
    ///
    /// # Errors
    /// None for programs that were traced.
    pub fn with_stored_weights(
        mut self,
        stored: &dyn Fn(&str) -> Option<DType>,
    ) -> Result<TracedModel, GraphError> {
        let encoders = self.encoders.iter_mut();
        let ending = match &mut self.ending {
            Ending::Decoded(traced) => Some(traced),
            Ending::Pixels | Ending::Handed => None,
        };
        let all = encoders
            .chain([&mut self.denoise.model])
            .chain(ending)
            .chain(&mut self.encode_image);
        for traced in all {
            traced.graph = traced.graph.with_stored_weights(stored)?;
        }
        Ok(self)
    }

    /// Lowers every program for the devices of `session`, side by side.
    ///
    /// # Errors
    /// Those of lowering.
    pub fn lower(&self, session: &Session) -> Result<LoweredModel, PipelineError> {
        let lower = |traced: &Traced| session.lower(traced).map_err(RuntimeError::from);
        let all = |traced: &[Traced]| traced.par_iter().map(lower).collect::<Result<Vec<_>, _>>();
        let one = |traced: Option<&Traced>| traced.map(lower).transpose();
        let (denoise, (encoders, (ending, encode_image))) = rayon::join(
            || {
                Ok::<_, RuntimeError>(DenoiseStep {
                    model: lower(&self.denoise.model)?,
                    advance: one(self.denoise.advance.as_ref())?,
                })
            },
            || {
                rayon::join(
                    || all(&self.encoders),
                    || {
                        rayon::join(
                            || self.ending.as_ref().try_map(lower),
                            || one(self.encode_image.as_ref()),
                        )
                    },
                )
            },
        );
        Ok(LoweredModel {
            encoders: encoders?,
            denoise: denoise?,
            ending: ending?,
            encode_image: encode_image?,
            options: self.options.clone(),
        })
    }

    /// The decision of quantization for each contraction of the denoising step.
    pub fn decisions(&self) -> &[Decision] {
        &self.denoise.model.decisions
    }

    /// The programs that have weights: each those of one part of the model.
    pub fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.encoders
            .iter()
            .chain([&self.denoise.model])
            .chain(self.ending.program())
            .chain(&self.encode_image)
            .map(|traced| &traced.graph)
    }
}

impl LoweredModel {
    /// Checks that each program fits the devices of `session`, and warns of one whose activations may not.
    ///
    /// # Errors
    /// [`PipelineError::OutOfMemory`] when weights alone do not fit.
    pub(super) fn check_memory(
        &self,
        session: &Session,
        advice: &MemoryAdvice,
    ) -> Result<(), PipelineError> {
        let check = |title: &str, lowered: &Lowered, advice: &[String]| {
            session.fit(advice).check(title, &lowered.step)
        };
        for encoder in &self.encoders {
            check("the text encoder", encoder, &advice.model)?;
        }
        check("the denoising step", &self.denoise.model, &advice.model)?;
        if let Some(decoder) = self.ending.program() {
            check("the decoder of images", decoder, &advice.images)?;
        }
        if let Some(encoder) = &self.encode_image {
            check("the encoder of images", encoder, &advice.images)?;
        }
        Ok(())
    }
}
