//! The parts of a request for each model of a pipeline.

use std::borrow::Cow;

use crate::data::Tokenizer;
use crate::models::{Family, Part, TextEncoder};
use crate::schedulers::{FlowLevels, PlanOptions, SamplingPlan, SchedulerConfig, Start};

use super::PipelineError;
use super::batch::TokenizedImage;
use super::observer::{Event, Observer};
use super::prompt::{PromptSyntax, PromptTokens, align_chunks, encode_prompt};
use super::request::{GenerateRequest, ImageRequest};
use super::textual_inversion::{EmbeddingRows, TextualInversions};

/// The part of one model.
pub(super) struct ModelRequest {
    /// The images with their prompts as token ids of the model's text encoders.
    pub images: Vec<TokenizedImage>,
    /// The model's part of the steps, for each number of steps that images have.
    pub plans: Vec<SamplingPlan>,
    /// The same of the second pass of a hi-res fix; empty without one.
    pub redraw_plans: Vec<SamplingPlan>,
    /// Rows of the text encoders' embedding tables that textual inversions replace.
    pub rows: Vec<EmbeddingRows>,
}

impl ModelRequest {
    /// Chunks of every prompt.
    pub fn chunks(&self) -> usize {
        let first = self.images.first().and_then(|image| image.prompt.first());
        first.map_or(1, |tokens| tokens.chunks.len())
    }
}

/// What reads one model's prompts, and its sampler.
pub(super) struct PromptReader<'a> {
    pub text_encoders: &'a [TextEncoder],
    pub tokenizers: &'a [Tokenizer],
    pub inversions: &'a TextualInversions,
    pub scheduler: &'a SchedulerConfig,
    /// The tokens of an image, on which its noise levels may depend.
    pub image_seq_len: Option<usize>,
    pub flow_levels: FlowLevels,
    pub family: Family,
}

impl PromptReader<'_> {
    fn place(&self, images: &mut [TokenizedImage]) -> Result<Vec<EmbeddingRows>, PipelineError> {
        let placed = self
            .inversions
            .place(self.text_encoders, self.tokenizers, images);
        Ok(placed?)
    }
}

/// The parts of the base model and of the refiner, if there is one.
///
/// # Errors
/// When a prompt cannot be read or encoded, the steps do not fit a schedule, or the vocabulary has no room for the textual
/// inversions of all prompts.
pub(super) fn prepare(
    request: &GenerateRequest,
    base: &PromptReader<'_>,
    refiner: Option<&PromptReader<'_>>,
    observer: &mut Observer<'_>,
) -> Result<(ModelRequest, Option<ModelRequest>), PipelineError> {
    let mut steps: Vec<usize> = request.images.iter().map(|image| image.steps).collect();
    steps.sort_unstable();
    steps.dedup();
    // All tokenizers at once, so that the prompts of all models have the same number of chunks.
    let refining = refiner.into_iter().flat_map(|refiner| refiner.tokenizers);
    let tokenizers: Vec<&Tokenizer> = base.tokenizers.iter().chain(refining).collect();
    let refining = refiner
        .into_iter()
        .flat_map(|refiner| refiner.text_encoders);
    let parts = base.text_encoders.iter().chain(refining);
    let is_second: Vec<bool> = parts.map(|e| e.part == Part::TextEncoder2).collect();
    let requests = requests_of(&request.images, base.family);
    let mut images = tokenize(
        &tokenizers,
        &is_second,
        &requests,
        &steps,
        request.prompt_syntax,
        observer,
    )?;
    let mut of_refiner = split_off(&mut images, base.tokenizers.len());
    for warning in base.inversions.unused(&images) {
        observer(Event::Warning(&warning)).map_err(PipelineError::Observer)?;
    }
    let options = |steps: usize, start: Start| PlanOptions {
        start,
        eta: request.eta,
        use_clipped_model_output: true,
        ..PlanOptions::new(steps)
    };
    let plans = |reader: &PromptReader<'_>, start: Start, end: Option<f64>| {
        let plan = |steps: &usize| {
            reader.scheduler.plan(&PlanOptions {
                end,
                image_seq_len: reader.image_seq_len,
                flow_levels: reader.flow_levels,
                ..options(*steps, start)
            })
        };
        steps.iter().map(plan).collect::<Result<Vec<_>, _>>()
    };
    let redraw_plans = match &request.hires {
        None => Vec::new(),
        Some(hires) => {
            let plan = |steps: &usize| {
                let steps = hires.steps.unwrap_or(*steps);
                base.scheduler.plan(&PlanOptions {
                    image_seq_len: hires.image_seq_len,
                    flow_levels: base.flow_levels,
                    ..options(steps, Start::Strength(hires.strength))
                })
            };
            steps.iter().map(plan).collect::<Result<Vec<_>, _>>()?
        }
    };
    let start = Start::Strength(match request.init_images {
        Some(_) => request.strength,
        None => 1.0,
    });
    let handover = &request.handover;
    let end = refiner.map(|_| handover.denoising_end);
    let base = ModelRequest {
        plans: plans(base, start, end)?,
        rows: base.place(&mut images)?,
        redraw_plans,
        images,
    };
    let refiner = match refiner {
        None => None,
        Some(refiner) => Some(ModelRequest {
            plans: plans(refiner, Start::After(handover.denoising_start), None)?,
            rows: refiner.place(&mut of_refiner)?,
            redraw_plans: Vec::new(),
            images: of_refiner,
        }),
    };
    Ok((base, refiner))
}

/// The images with their prompts as models of the family read them.
pub fn requests_of(images: &[ImageRequest], family: Family) -> Cow<'_, [ImageRequest]> {
    let spec = family.spec();
    if !spec.lower_case_prompts {
        return Cow::Borrowed(images);
    }
    let as_read = |text: &str| spec.read_prompt(text);
    let read = |image: &ImageRequest| ImageRequest {
        prompt: as_read(&image.prompt),
        prompt_2: image.prompt_2.as_deref().map(as_read),
        negative_prompt: as_read(&image.negative_prompt),
        ..image.clone()
    };
    images.iter().map(read).collect()
}

/// Images with the tokens of their prompts for every text encoder, all with the same number of chunks. Those for which
/// `is_second` says so read [`ImageRequest::prompt_2`], where there is one. `observer` gets a warning for each part of a
/// prompt that is lost.
///
/// # Errors
/// When a prompt cannot be read or encoded; errors of `observer`.
pub fn tokenize(
    tokenizers: &[&Tokenizer],
    is_second: &[bool],
    requests: &[ImageRequest],
    steps: &[usize],
    syntax: PromptSyntax,
    observer: &mut Observer<'_>,
) -> Result<Vec<TokenizedImage>, PipelineError> {
    let mut told = Vec::new();
    let mut encode = |text: &str, second: &str| -> Result<Vec<PromptTokens>, PipelineError> {
        let mut all = Vec::with_capacity(tokenizers.len());
        for (which, tokenizer) in tokenizers.iter().enumerate() {
            let text = match is_second.get(which) {
                Some(true) => second,
                Some(false) | None => text,
            };
            let tokens = encode_prompt(tokenizer, text, syntax)?;
            for warning in &tokens.warnings {
                let warning = format!("'{text}': {warning}");
                if !told.contains(&warning) {
                    observer(Event::Warning(&warning)).map_err(PipelineError::Observer)?;
                    told.push(warning);
                }
            }
            all.push(tokens);
        }
        Ok(all)
    };
    let mut images = requests
        .iter()
        .map(|request| {
            Ok(TokenizedImage {
                plan: steps.iter().position(|s| *s == request.steps).unwrap_or(0),
                guidance_scale: request.guidance_scale as f32,
                prompt: encode(
                    &request.prompt,
                    request.prompt_2.as_ref().unwrap_or(&request.prompt),
                )?,
                negative: encode(&request.negative_prompt, &request.negative_prompt)?,
                negative_is_empty: request.negative_prompt.is_empty(),
                seed: request.seed,
                init: request.init,
            })
        })
        .collect::<Result<Vec<_>, PipelineError>>()?;
    let mut all: Vec<&mut PromptTokens> = images
        .iter_mut()
        .flat_map(|image| image.prompt.iter_mut().chain(&mut image.negative))
        .collect();
    align_chunks(&mut all);
    Ok(images)
}

/// The same images for a second model: takes the prompts after the first `own` text encoders off.
fn split_off(images: &mut [TokenizedImage], own: usize) -> Vec<TokenizedImage> {
    let split = |image: &mut TokenizedImage| TokenizedImage {
        prompt: image.prompt.split_off(own.min(image.prompt.len())),
        negative: image.negative.split_off(own.min(image.negative.len())),
        ..*image
    };
    images.iter_mut().map(split).collect()
}
