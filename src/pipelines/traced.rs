//! The programs of a model before they are compiled: traced, then lowered.

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Graph, GraphError};
use crate::lowering::{Lowered, Traced};
use crate::models::{DiffusionModel, Part, vae};
use crate::quant::{
    self, ActivationRanges, Decision, FakeQuantization, Policy, StoredFormats, Watch, Watched,
};
use crate::runtime::{RuntimeError, Session};
use crate::weights::lora::{self, LoraRanks};

use super::PipelineError;
use super::latents::{trace_decode, trace_encode_image};
use super::memory::MemoryAdvice;
use super::text_to_image::{
    DenoiseOptions, DenoiseStep, trace_denoise, trace_encode, trace_image_tokens,
};
use super::tiling::TilePlan;
use super::upscaler::{HiresUpscaler, Upscaling};

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
    /// The part that denoises.
    pub(super) denoiser: Part,
    pub(super) ending: Ending<T>,
    /// The decoder of previews, where it is not that of `ending`.
    pub(super) preview: Option<T>,
    pub(super) encode_image: Option<T>,
    /// That of an IP-Adapter's image.
    pub(super) image_tokens: Option<T>,
    pub(super) hires: Option<HiresPrograms<T>>,
    pub(super) options: DenoiseOptions,
}

/// The programs of the second pass of a hi-res fix; the decoder of its samples is the model's.
pub(super) struct HiresPrograms<T> {
    /// The model for images of the final size.
    pub model: DiffusionModel,
    pub denoise: DenoiseStep<T>,
    pub upscaling: Upscaling<T, T>,
}

pub type TracedModel = ModelPrograms<Traced>;

/// Lowered for the devices of one session.
pub type LoweredModel = ModelPrograms<Lowered>;

impl<T> HiresPrograms<T> {
    /// Those that have weights.
    fn programs(&self) -> impl Iterator<Item = &T> {
        let parts = self.upscaling.programs().into_iter();
        let parts = parts.flat_map(|(decoder, encoder)| [decoder, encoder]);
        [&self.denoise.model].into_iter().chain(parts)
    }
}

/// The decoder of the model's samples, for one tile.
fn ending(model: &DiffusionModel) -> Result<Ending<Traced>, PipelineError> {
    Ok(match &model.vae {
        Some(_) => {
            let tile = TilePlan::of(model)?.tile();
            Ending::Decoded(trace_decode(model, vae::ROOT, tile)?)
        }
        None => Ending::Pixels,
    })
}

/// The decoder of previews of the model's samples, if it is another.
fn preview(model: &DiffusionModel) -> Result<Option<Traced>, PipelineError> {
    let Some(model) = model.previewing() else {
        return Ok(None);
    };
    let tile = TilePlan::of(&model)?.tile();
    Ok(Some(trace_decode(&model, vae::PREVIEW_ROOT, tile)?))
}

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
        Ok(TracedModel {
            encoders,
            denoise,
            denoiser: model.denoiser.part(),
            ending: ending(model)?,
            preview: preview(model)?,
            encode_image: match from_image {
                true => Some(trace_encode_image(model)?),
                false => None,
            },
            image_tokens: trace_image_tokens(model)?,
            hires: None,
            options,
        })
    }

    /// The same with the second pass of a hi-res fix, whose samples have `sample_size`. `model` is that of the first
    /// pass.
    ///
    /// # Errors
    /// When the model has no VAE, or quantization is refused.
    pub fn with_hires(
        mut self,
        model: &DiffusionModel,
        sample_size: [usize; 2],
        upscaler: HiresUpscaler,
    ) -> Result<TracedModel, PipelineError> {
        let large = model.resized(sample_size);
        let small = std::mem::replace(&mut self.ending, ending(&large)?);
        self.preview = preview(&large)?;
        let upscaling = match (upscaler.of_latents(), small) {
            (Some(interpolation), _) => Upscaling::Latents(interpolation),
            (None, Ending::Decoded(decoder)) => Upscaling::Images {
                decoder,
                encoder: trace_encode_image(&large)?,
            },
            (None, Ending::Pixels | Ending::Handed) => {
                return Err(PipelineError::Request(format!(
                    "{upscaler} enlarges decoded images; this model decodes none"
                )));
            }
        };
        self.hires = Some(HiresPrograms {
            denoise: trace_denoise(&large, &self.options)?,
            upscaling,
            model: large,
        });
        Ok(self)
    }

    /// The same without the decoder: another model continues with its samples, and it makes no images.
    pub fn handed_on(mut self) -> TracedModel {
        self.ending = Ending::Handed;
        self.preview = None;
        self
    }

    /// The same for weights that are stored otherwise than the model holds them ([`Graph::with_stored_weights`]): less
    /// is copied on the way to the devices.
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
        let hires = self.hires.iter_mut().flat_map(|hires| {
            let parts = match &mut hires.upscaling {
                Upscaling::Latents(_) => None,
                Upscaling::Images { decoder, encoder } => Some([decoder, encoder]),
            };
            [&mut hires.denoise.model]
                .into_iter()
                .chain(parts.into_iter().flatten())
        });
        let all = encoders
            .chain([&mut self.denoise.model])
            .chain(ending)
            .chain(&mut self.preview)
            .chain(&mut self.encode_image)
            .chain(&mut self.image_tokens)
            .chain(hires);
        for traced in all {
            traced.graph = traced.graph.with_stored_weights(stored)?;
        }
        Ok(self)
    }

    /// The same with low-rank updates beside weights of the denoiser and of text encoders ([`lora::beside`]).
    ///
    /// # Errors
    /// When a weight is no linear layer's or convolution's of its part.
    pub fn with_lora_beside(
        mut self,
        ranks: &LoraRanks,
        scale: f64,
    ) -> Result<TracedModel, GraphError> {
        let hires = self.hires.iter_mut().map(|hires| &mut hires.denoise.model);
        let encoders = self.encoders.iter_mut();
        for traced in encoders.chain([&mut self.denoise.model]).chain(hires) {
            let weights = traced.graph.weights();
            let own: LoraRanks = weights
                .filter_map(|(_, weight)| ranks.get_key_value(&weight.name))
                .map(|(name, rank)| (name.clone(), *rank))
                .collect();
            if !own.is_empty() {
                traced.graph = lora::beside(&traced.graph, &own, scale)?;
            }
        }
        Ok(self)
    }

    /// The same with scales and ranges as training left them, which are weights of its programs.
    ///
    /// # Errors
    /// As [`FakeQuantization::apply`].
    pub fn with_trained_ranges(
        mut self,
        fake: &FakeQuantization,
    ) -> Result<TracedModel, GraphError> {
        let denoiser = &mut self.denoise.model;
        denoiser.graph = fake.apply(&denoiser.graph, ActivationRanges::Stay)?;
        Ok(self)
    }

    /// The same with statistics of what layers of the denoiser read as further results of its program, and without the
    /// decoder. All of the program then runs in every step.
    ///
    /// # Errors
    /// When a layer is none of the denoiser's.
    pub fn watched(mut self, watch: &Watch) -> Result<(TracedModel, Watched), GraphError> {
        let denoiser = &mut self.denoise.model;
        let (graph, watched) = quant::watch(denoiser.graph.clone(), watch)?;
        denoiser.graph = graph;
        denoiser.request_inputs.clear();
        Ok((self.handed_on(), watched))
    }

    /// Lowers every program for the devices of `session`, side by side.
    ///
    /// # Errors
    /// Those of lowering.
    pub fn lower(&self, session: &Session) -> Result<LoweredModel, PipelineError> {
        let lower = |traced: &Traced| session.lower(traced).map_err(RuntimeError::from);
        let all = |traced: &[Traced]| traced.par_iter().map(lower).collect::<Result<Vec<_>, _>>();
        let one = |traced: Option<&Traced>| traced.map(lower).transpose();
        let step = |step: &DenoiseStep<Traced>| {
            Ok::<_, RuntimeError>(DenoiseStep {
                model: lower(&step.model)?,
                advance: one(step.advance.as_ref())?,
            })
        };
        let second = |hires: &HiresPrograms<Traced>| {
            Ok::<_, RuntimeError>(HiresPrograms {
                model: hires.model.clone(),
                denoise: step(&hires.denoise)?,
                upscaling: match &hires.upscaling {
                    Upscaling::Latents(interpolation) => Upscaling::Latents(*interpolation),
                    Upscaling::Images { decoder, encoder } => Upscaling::Images {
                        decoder: lower(decoder)?,
                        encoder: lower(encoder)?,
                    },
                },
            })
        };
        let ((denoise, hires), (encoders, (ending, encode_image))) = rayon::join(
            || {
                rayon::join(
                    || step(&self.denoise),
                    || self.hires.as_ref().map(second).transpose(),
                )
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
            denoiser: self.denoiser,
            ending: ending?,
            preview: one(self.preview.as_ref())?,
            encode_image: encode_image?,
            image_tokens: one(self.image_tokens.as_ref())?,
            hires: hires?,
            options: self.options.clone(),
        })
    }

    /// The quantization policy of the denoising step.
    pub fn policy(&self) -> Option<&Policy> {
        self.denoise.model.policy.as_ref()
    }

    /// The decision of quantization for each contraction of the denoising step.
    pub fn decisions(&self) -> &[Decision] {
        &self.denoise.model.decisions
    }

    /// The formats in which the denoising step takes weights as they are stored.
    pub fn stored_formats(&self) -> StoredFormats {
        self.policy()
            .map(|policy| policy.stored.clone())
            .unwrap_or_default()
    }

    /// The programs that have weights: each those of one part of the model.
    pub fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.encoders
            .iter()
            .chain([&self.denoise.model])
            .chain(self.ending.program())
            .chain(&self.preview)
            .chain(&self.encode_image)
            .chain(&self.image_tokens)
            .chain(self.hires.iter().flat_map(HiresPrograms::programs))
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
        if let Some(encoder) = &self.image_tokens {
            check("the encoder of the image prompt", encoder, &advice.model)?;
        }
        check("the denoising step", &self.denoise.model, &advice.model)?;
        if let Some(decoder) = self.ending.program() {
            check("the decoder of images", decoder, &advice.images)?;
        }
        if let Some(decoder) = &self.preview {
            check("the decoder of previews", decoder, &advice.images)?;
        }
        if let Some(encoder) = &self.encode_image {
            check("the encoder of images", encoder, &advice.images)?;
        }
        if let Some(hires) = &self.hires {
            let title = "the denoising step of the second pass";
            check(title, &hires.denoise.model, &advice.model)?;
            if let Some((decoder, encoder)) = hires.upscaling.programs() {
                let title = "the first pass's decoder of images";
                check(title, decoder, &advice.images)?;
                check("the encoder of images", encoder, &advice.images)?;
            }
        }
        Ok(())
    }
}
