//! A pipeline of models, weights and programs, from requests to images.

use std::thread;
use std::time::Instant;

use image::RgbImage;

use crate::data::Tokenizer;
use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::{ControlNet, DiffusionModel};
use crate::quant::{Policy, Watch};
use crate::runtime::{Session, Slot};
use crate::weights::lora::Adapter;

use super::PipelineError;
use super::batch::Phases;
use super::conditioning::{Encoded, PromptEncoders};
use super::generator::{CompiledModel, ImageGenerator, ModelOutput, Redraw, SamplingOptions};
use super::lora::{LoraChoice, adapter};
use super::memory::MemoryAdvice;
use super::model_files::{ModelFiles, WeightChanges};
use super::observer::{Event, Observer, Phase, enter};
use super::prepared::{ModelRequest, PromptReader, prepare};
use super::request::GenerateRequest;
use super::text_to_image::{DenoiseOptions, Guidance};
use super::textual_inversion::{InversionError, TextualInversion, TextualInversions};
use super::traced::{LoweredModel, TracedModel};
use super::upscaler::HiresUpscaler;
use super::weights::{TakeWeight, WeightSource};

/// A model of the pipeline.
pub struct PipelineModel {
    pub model: DiffusionModel,
    /// One for each text encoder.
    pub tokenizers: Vec<Tokenizer>,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text.
    pub zero_empty_prompts: bool,
    pub files: ModelFiles,
    /// The formats of the denoiser's contractions.
    pub quantization: Option<Policy>,
    /// What prompts may name beside the words of the tokenizers; see [`PipelineModel::add_inversion`].
    pub inversions: TextualInversions,
}

impl PipelineModel {
    /// Lets prompts name a textual inversion.
    ///
    /// # Errors
    /// When it is not one for this model's text encoders, or a vocabulary has its token already.
    pub fn add_inversion(&mut self, inversion: &TextualInversion) -> Result<(), InversionError> {
        let encoders = &self.model.text_encoders;
        self.inversions
            .add(inversion, encoders, &mut self.tokenizers)
    }

    fn prompt_reader(&self) -> PromptReader<'_> {
        PromptReader {
            text_encoders: &self.model.text_encoders,
            tokenizers: &self.tokenizers,
            inversions: &self.inversions,
            scheduler: &self.model.scheduler,
            image_seq_len: self.model.image_seq_len(),
            flow_levels: self.model.denoiser.kind().flow_levels(),
            family: self.model.family,
        }
    }
}

/// The models of a pipeline.
pub struct PipelineOptions {
    pub base: PipelineModel,
    /// The model for the last steps. It has the base model's latents, and neither ControlNets nor LoRAs.
    pub refiner: Option<PipelineModel>,
    /// For the base model's weights.
    pub loras: Vec<LoraChoice>,
    pub guidance: Guidance,
    /// Layers of the base model that skip-layer guidance leaves out; only with [`Guidance::TwoPasses`].
    pub skip_layers: Vec<usize>,
    pub precision: DotPrecision,
    /// Side of the blocks of pixels that a pixel-space model sees as one position; 1 for latent models.
    pub pixel_unshuffle: usize,
    /// Largest number of images in a batch.
    pub max_batch: usize,
    pub memory_advice: MemoryAdvice,
    /// The layers of the base model's denoiser whose inputs are watched ([`Event::Watched`]). No images are made then.
    pub watch: Option<Watch>,
}

impl PipelineOptions {
    /// Checks what needs neither devices nor weights: prompts and steps.
    ///
    /// # Errors
    /// When the refiner's latents are not the base model's, the request has a hi-res fix that has no meaning, a prompt
    /// cannot be read or encoded, or the steps do not fit a model's schedule.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), PipelineError> {
        self.check_refiner()?;
        self.check_hires(request)?;
        self.prepare(request, &mut |_| Ok(())).map(drop)
    }

    fn check_refiner(&self) -> Result<(), PipelineError> {
        let Some(refiner) = &self.refiner else {
            return Ok(());
        };
        let dims = [&self.base, refiner].map(|model| model.model.sample_dims(1));
        if dims[0] == dims[1] {
            return Ok(());
        }
        Err(PipelineError::Request(format!(
            "{}: a refiner whose latents are {:?}; those of {} are {:?}",
            refiner.files.path().display(),
            &dims[1][1..],
            self.base.files.path().display(),
            &dims[0][1..]
        )))
    }

    /// Whether the ControlNets see the latents of their images.
    fn nets_see_latents(&self) -> bool {
        let mut nets = self.base.model.controlnets.iter();
        nets.any(ControlNet::sees_latents)
    }

    fn check_hires(&self, request: &GenerateRequest) -> Result<(), PipelineError> {
        let other = match &request.hires {
            None => return Ok(()),
            Some(_) if request.init_images.is_some() => "an image to start from",
            Some(_) if self.refiner.is_some() => "a refiner",
            Some(_) if request.control_image.is_some() => "an image that the model sees",
            Some(_) if self.nets_see_latents() => "ControlNets that see an image's latents",
            Some(_) => return Ok(()),
        };
        Err(PipelineError::Request(format!(
            "a hi-res fix has no second pass with {other}"
        )))
    }

    fn prepare(
        &self,
        request: &GenerateRequest,
        observer: &mut Observer<'_>,
    ) -> Result<(ModelRequest, Option<ModelRequest>), PipelineError> {
        let refiner = self.refiner.as_ref().map(PipelineModel::prompt_reader);
        prepare(
            request,
            &self.base.prompt_reader(),
            refiner.as_ref(),
            observer,
        )
    }
}

/// Seconds that a call took.
#[derive(Clone, Copy, Debug, Default)]
pub struct GenerateSeconds {
    /// Tracing the programs and opening the files of weights.
    pub open: f64,
    pub compile: f64,
    /// The part of `compile` with nothing else to do.
    pub compile_waited: f64,
    pub phases: Phases,
}

/// The result of a call.
#[derive(Debug)]
pub struct Generated {
    /// In the order of [`GenerateRequest::images`].
    pub images: Vec<RgbImage>,
    /// The denoiser's last samples: see [`ModelOutput::samples`].
    pub samples: Vec<HostTensor>,
    /// Denoising steps of all batches and models together.
    pub steps: usize,
    pub seconds: GenerateSeconds,
}

/// Models on a session's devices, ready to make images.
///
/// Programs are compiled by the first call and used again by those of the same [`ProgramSizes`]. Weights are read when
/// a program needs them, and freed before those of the next are read.
pub struct Pipeline {
    session: Session,
    options: PipelineOptions,
    programs: Option<Programs>,
}

/// The sizes that programs are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProgramSizes {
    /// Images in a batch.
    batch: usize,
    /// Chunks of every prompt.
    chunks: usize,
    from_image: bool,
    /// The final samples of a hi-res fix, and what enlarges to them.
    hires: Option<([usize; 2], HiresUpscaler)>,
}

/// The compiled programs of all models.
struct Programs {
    sizes: ProgramSizes,
    encoders: PromptEncoders,
    base: ImageGenerator,
    refiner: Option<CompiledModel>,
    adapter: Option<Adapter>,
}

/// The programs of all models before they are compiled.
struct LoweredModels {
    base: LoweredModel,
    refiner: Option<LoweredModel>,
    adapter: Option<Adapter>,
}

impl Pipeline {
    /// Models for the devices of `session`.
    ///
    /// # Errors
    /// When the refiner's latents are not the base model's.
    pub fn open(session: Session, options: PipelineOptions) -> Result<Pipeline, PipelineError> {
        options.check_refiner()?;
        Ok(Pipeline {
            session,
            options,
            programs: None,
        })
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    pub fn options(&self) -> &PipelineOptions {
        &self.options
    }

    /// Makes the images of `request`.
    ///
    /// # Errors
    /// When the request does not fit the models, files are not those of the models, weights cannot be read, a program
    /// fails, or what it makes is not finite; what `observer` fails with.
    pub fn generate(
        &mut self,
        request: &GenerateRequest,
        observer: &mut Observer<'_>,
    ) -> Result<Generated, PipelineError> {
        self.options.check_hires(request)?;
        let (base, refining) = self.options.prepare(request, observer)?;
        let devices = self.session.devices().len();
        let count = base.images.len().min(self.options.max_batch);
        let sizes = ProgramSizes {
            batch: count.max(1).next_multiple_of(devices),
            chunks: base.chunks(),
            from_image: request.init_images.is_some()
                || request.control_image.is_some()
                || self.options.nets_see_latents(),
            hires: request
                .hires
                .as_ref()
                .map(|hires| (hires.sample_size, hires.upscaler)),
        };
        let mut seconds = GenerateSeconds::default();
        let (programs, encoded) = match self.programs.take().filter(|p| p.sizes == sizes) {
            Some(programs) => {
                let adapter = programs.adapter.as_ref();
                let encoded = self.encode(&programs.encoders, adapter, &base, observer)?;
                (programs, encoded)
            }
            None => self.compile(sizes, &base, &mut seconds, observer)?,
        };
        let programs = self.programs.insert(programs);

        let (session, options) = (&self.session, &self.options);
        let files = &options.base.files;
        let changes = WeightChanges {
            adapter: programs.adapter.as_ref(),
            rows: &base.rows,
        };
        let read =
            |slots: &[Slot], take: &mut TakeWeight<'_>| files.read(session, changes, slots, take);
        let inits = request.init_images.as_ref();
        let sampling = SamplingOptions {
            true_cfg_scale: request.true_cfg_scale,
            guidance_rescale: request.guidance_rescale,
            skip_layer_guidance: request.skip_layer_guidance,
            zero_empty_prompts: options.base.zero_empty_prompts,
            images: inits.map_or(&[], |inits| &inits.images),
            mask: inits.and_then(|inits| inits.mask.as_ref()),
            control_image: request.control_image.as_ref(),
            controls: &request.controls,
            latents: request.latents.as_ref(),
            image_prompt: request.image_prompt.as_ref(),
            redraw: request.hires.as_ref().map(|hires| Redraw {
                plans: &base.redraw_plans,
                controls: &hires.controls,
            }),
            image_size: request.image_size,
            preview_every: request.preview_every,
            tell_samples: request.tell_samples,
            ..SamplingOptions::new(&base.plans)
        };
        let mut passes = programs.base.steps(&base.images, &sampling);
        if let (Some(model), Some(refining)) = (&programs.refiner, &refining) {
            let sampling = SamplingOptions::new(&refining.plans);
            passes.extend(model.generator().steps(&refining.images, &sampling));
        }
        observer(Event::Started { passes: &passes }).map_err(PipelineError::Observer)?;
        let mut output = programs.base.run(
            session,
            &WeightSource::Files(&read),
            &base.images,
            encoded,
            &sampling,
            observer,
        )?;
        if let (Some(compiled), Some(model), Some(refining)) =
            (&programs.refiner, &options.refiner, &refining)
        {
            output = refine(
                session, compiled, model, refining, &sampling, output, observer,
            )?;
        }
        seconds.phases = output.phases;
        Ok(Generated {
            images: output.images,
            samples: output.samples,
            steps: passes.iter().map(|pass| pass.steps).sum(),
            seconds,
        })
    }

    /// The prompts of `request` as the base model takes them.
    fn encode(
        &self,
        encoders: &PromptEncoders,
        adapter: Option<&Adapter>,
        request: &ModelRequest,
        observer: &mut Observer<'_>,
    ) -> Result<Encoded, PipelineError> {
        let files = &self.options.base.files;
        let changes = WeightChanges {
            adapter,
            rows: &request.rows,
        };
        let read = |slots: &[Slot], take: &mut TakeWeight<'_>| {
            files.read(&self.session, changes, slots, take)
        };
        let source = WeightSource::Files(&read);
        encoders.run(&self.session, &source, &request.images, observer)
    }

    /// Compiles all programs, and encodes the prompts of `request` meanwhile.
    fn compile(
        &mut self,
        sizes: ProgramSizes,
        request: &ModelRequest,
        seconds: &mut GenerateSeconds,
        observer: &mut Observer<'_>,
    ) -> Result<(Programs, Encoded), PipelineError> {
        enter(observer, Phase::Open)?;
        let start = Instant::now();
        let LoweredModels {
            mut base,
            refiner,
            adapter,
        } = self.lower(sizes, observer)?;
        seconds.open = start.elapsed().as_secs_f64();

        let programs = "the text encoders";
        enter(observer, Phase::Compile { programs })?;
        let start = Instant::now();
        let (session, options) = (&self.session, &self.options);
        let model = &options.base.model;
        let (precision, unshuffle) = (options.precision, options.pixel_unshuffle);
        let encoders = std::mem::take(&mut base.encoders);
        let encoders = PromptEncoders::compile(session, model, encoders, &base.options, precision)?;
        let waited = start.elapsed().as_secs_f64();
        let refiner = options.refiner.as_ref().zip(refiner);
        let compile = || {
            let base = ImageGenerator::compile(session, model, base, precision, unshuffle)?;
            let refiner = refiner.map(|(refiner, lowered)| {
                CompiledModel::compile(session, &refiner.model, lowered, precision, unshuffle)
            });
            let refiner = refiner.transpose()?;
            Ok::<_, PipelineError>((base, refiner, start.elapsed().as_secs_f64()))
        };
        // Prompts are encoded meanwhile, which waits for weights most of the time. The threads are other ones than
        // those that read, which would wait for the compiler.
        let threads = rayon::ThreadPoolBuilder::new()
            .build()
            .map_err(|error| PipelineError::Threads(error.to_string()))?;
        let (encoded, encoded_at, compiled) = thread::scope(|scope| {
            let compiled = scope.spawn(|| threads.install(compile));
            let encoded = self
                .encode(&encoders, adapter.as_ref(), request, observer)
                .and_then(|encoded| {
                    let programs = "the denoiser and the decoder";
                    enter(observer, Phase::Compile { programs })?;
                    Ok(encoded)
                });
            (encoded, start.elapsed().as_secs_f64(), compiled.join())
        });
        let compiled = compiled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (base, refiner, compiled_at) = compiled?;
        seconds.compile = compiled_at;
        seconds.compile_waited = waited + (compiled_at - encoded_at).max(0.0);
        let programs = Programs {
            sizes,
            encoders,
            base,
            refiner,
            adapter,
        };
        Ok((programs, encoded?))
    }

    /// Traces and lowers all programs for weights as the files have them. A checkpoint that does not fit the model, and
    /// programs that do not fit the devices, are found here, before anything is compiled.
    fn lower(
        &mut self,
        sizes: ProgramSizes,
        observer: &mut Observer<'_>,
    ) -> Result<LoweredModels, PipelineError> {
        let options = &mut self.options;
        let denoise = |model: &PipelineModel| DenoiseOptions {
            batch: sizes.batch,
            tokens: model.model.tokens * sizes.chunks,
            guidance: options.guidance,
            skip_layers: options.skip_layers.clone(),
            quantization: model.quantization.clone(),
        };
        let model = &options.base.model;
        let base = TracedModel::new(model, denoise(&options.base), sizes.from_image)?;
        let base = match sizes.hires {
            None => base,
            Some((sample_size, upscaler)) => base.with_hires(model, sample_size, upscaler)?,
        };
        let (base, refiner) = match &options.refiner {
            None => (base, None),
            Some(refiner) => {
                let refiner = TracedModel::new(&refiner.model, denoise(refiner), false)?;
                (base.handed_on(), Some(refiner))
            }
        };
        options.base.files.open(&base)?;
        if let (Some(model), Some(traced)) = (&mut options.refiner, &refiner) {
            model.files.open(traced)?;
        }
        let mut adapter = adapter(&options.loras, &base, model.family, observer)?;
        let base = match &mut adapter {
            // Integers cannot take an update: its products stand beside theirs.
            Some(adapter) => {
                let stored = options.base.files.stored(adapter)?;
                adapter.leave(&stored);
                base.with_lora_beside(&stored, 1.0)?
            }
            None => base,
        };
        let mut base = options.base.files.as_stored(base, adapter.as_ref())?;
        if let Some(watch) = &options.watch {
            let watched;
            (base, watched) = base.watched(watch)?;
            observer(Event::Watched(&watched)).map_err(PipelineError::Observer)?;
        }
        let refiner = match (&options.refiner, refiner) {
            (Some(model), Some(traced)) => Some(model.files.as_stored(traced, None)?),
            _ => None,
        };
        for traced in [Some(&base), refiner.as_ref()].into_iter().flatten() {
            if let Some(policy) = traced.policy() {
                let decisions = traced.decisions();
                observer(Event::Quantized { policy, decisions })
                    .map_err(PipelineError::Observer)?;
            }
        }
        let lower = |traced: &TracedModel| {
            let lowered = traced.lower(&self.session)?;
            lowered.check_memory(&self.session, &options.memory_advice)?;
            Ok::<_, PipelineError>(lowered)
        };
        Ok(LoweredModels {
            base: lower(&base)?,
            refiner: refiner.as_ref().map(lower).transpose()?,
            adapter,
        })
    }
}

/// The last steps, after the base model's.
fn refine(
    session: &Session,
    compiled: &CompiledModel,
    model: &PipelineModel,
    request: &ModelRequest,
    sampling: &SamplingOptions<'_>,
    begun: ModelOutput,
    observer: &mut Observer<'_>,
) -> Result<ModelOutput, PipelineError> {
    let changes = WeightChanges {
        adapter: None,
        rows: &request.rows,
    };
    let read =
        |slots: &[Slot], take: &mut TakeWeight<'_>| model.files.read(session, changes, slots, take);
    let sampling = SamplingOptions {
        plans: &request.plans,
        zero_empty_prompts: model.zero_empty_prompts,
        images: &[],
        image_prompt: None,
        controls: &[],
        latents: None,
        continues: Some(&begun),
        ..*sampling
    };
    let mut refined = compiled.run(
        session,
        &WeightSource::Files(&read),
        &request.images,
        &sampling,
        observer,
    )?;
    refined.phases += begun.phases;
    Ok(refined)
}
