//! Fine-tuning in latents against the arithmetic of diffusers' training scripts, and as a user runs it.

mod buckets;
mod dreambooth;
mod kills;
mod low_rank;
mod mix;
mod runs;
mod text;
mod token;
mod transformer_runs;

mod transformers;

use std::collections::BTreeMap;

use crate::common::{self, Golden, assert_close, distance, keeping_session, put_state};
use crate::pipelines::case::Case;
use maxdiff::dtype::DType;
use maxdiff::graph::Graph;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::clip::TOKEN_EMBEDDING;
use maxdiff::models::unet::UNet2DConditionConfig;
use maxdiff::models::{Denoiser, Part};
use maxdiff::nn::Precision;
use maxdiff::pipelines::PipelineError;
use maxdiff::pipelines::init_image::signed_planes;
use maxdiff::pipelines::latents::trace_encode_distribution;
use maxdiff::runtime::{Program, ProgramOptions, Session, Value};
use maxdiff::train::optimizer::{AdamOptions, FIRST_MOMENT, Optimizer, OptimizerOptions};
use maxdiff::train::step::{
    self, CleanSamples, DdpmObjective, Draws, LossWeighting, Objective, StepOptions, names,
};
use maxdiff::train::{InversionOptions, LoraOptions, TEXT_PROJECTIONS};
use maxdiff::weights::Checkpoint;

const CASES: [&str; 3] = ["sd15", "sd21", "sdxl"];
const STEPS: usize = 5;
const TOKENS: usize = 6;
const BATCH: usize = 2;
/// AdamW divides by the root of squared gradients, so that where gradients are small their rounding counts.
const TOLERANCE: f64 = 1e-4;

/// What a recorded run trains: the whole UNet, or what is given.
#[derive(Default)]
struct Trains {
    lora: Option<LoraOptions>,
    inversion: Option<InversionOptions>,
    masked: bool,
}

impl Trains {
    fn lora(lora: LoraOptions) -> Trains {
        Trains {
            lora: Some(lora),
            ..Trains::default()
        }
    }
}

/// A recorded run, and the step that should compute the same.
struct Run<'a> {
    name: &'static str,
    /// Batches of a step, which together are the recorded batch.
    batches: usize,
    session: &'a Session,
    golden: Golden,
    graph: Graph,
    program: Program,
    state: BTreeMap<String, HostTensor>,
}

impl<'a> Run<'a> {
    fn new(
        session: &'a Session,
        name: &'static str,
        Trains {
            lora,
            inversion,
            masked,
        }: Trains,
        batches: usize,
    ) -> Run<'a> {
        let trains_text = lora
            .as_ref()
            .is_some_and(|lora| !lora.text_modules.is_empty());
        let mut case = Case::read(name, Precision::F32);
        case.model.tokens = TOKENS;
        let unet = Golden::text(&format!("finetune/{name}/unet/config.json"));
        let unet = UNet2DConditionConfig::from_json(&unet).unwrap();
        case.model.denoiser = Denoiser::Unet(unet.into());
        let initial = Golden::read(&format!("finetune/{name}/steps.safetensors"));
        let golden = match &inversion {
            Some(_) => Golden::read(&format!("finetune/{name}/token.safetensors")),
            None => Golden::read(&format!("finetune/{name}/steps.safetensors")),
        };
        let meta = |key: &str| golden.meta[key].as_f64().unwrap();
        let options = StepOptions {
            batch: BATCH / batches,
            clean: CleanSamples::Given,
            draws: Draws::Inputs,
            optimizer: adamw(&golden, batches),
            objective: Objective::Ddpm(DdpmObjective {
                loss_weighting: match golden.meta["snr_gamma"].as_f64() {
                    Some(gamma) if lora.is_none() => LossWeighting::MinSnr { gamma },
                    _ => LossWeighting::None,
                },
                ..DdpmObjective::default()
            }),
            gradient_reduce_dtype: None,
            guidance_scale: 1.0,
            masked,
            prior_loss_weight: None,
            lora,
            inversion: inversion.clone(),
            trains_low_rank: false,
            train_text_encoder: trains_text,
            quantization: None,
            fake_quantization: None,
        };
        let traced = step::trace(&case.model, &options).unwrap();
        let lowered = session.lower(&traced).unwrap().step;
        let program = Program::of_step(session, &lowered, &ProgramOptions::default()).unwrap();
        let unet = Checkpoint::open(&common::golden(&format!("finetune/{name}/unet"))).unwrap();
        let mut vectors = BTreeMap::new();
        if let Some(inversion) = &inversion {
            let read = &mut |part: Part| -> Result<_, PipelineError> {
                let file = &case.source.components[&part].checkpoint;
                Ok(file.read_as(TOKEN_EMBEDDING, DType::F32)?)
            };
            vectors = inversion.initial(read).unwrap();
        }
        let mut state = BTreeMap::new();
        for slot in program.inputs() {
            let (root, key) = slot.name.split_once('/').unwrap_or(("", &slot.name));
            let file = match Part::from_name(root) {
                None => None,
                Some(Part::Unet) => Some(&unet),
                Some(part) => Some(&case.source.components[&part].checkpoint),
            };
            let value = match file {
                Some(file) if file.info(key).is_some() => file.read_as(key, DType::F32).unwrap(),
                Some(_) if vectors.contains_key(&slot.name) => vectors[&slot.name].clone(),
                Some(_) => {
                    let recorded = match root {
                        "unet" => format!("in/lora/{}", recorded_factor(key)),
                        _ => format!("in/text/{}", recorded_factor(&slot.name)),
                    };
                    initial.tensor(&recorded, &slot.shape)
                }
                None => HostTensor::zeros(slot.shape.clone()),
            };
            state.insert(slot.name.clone(), value);
        }
        for (name, part) in names::TEXT_LEARNING_RATES
            .iter()
            .zip(["text_encoder", "text_encoder_2"])
        {
            let rate = initial.meta["text_rates"][part].as_f64().unwrap();
            let rate = HostTensor::scalar_f32(DType::F32, rate as f32).unwrap();
            state.insert((*name).to_owned(), rate);
        }
        if inversion.is_some() {
            let rate = meta("token_learning_rate") as f32;
            let rate = HostTensor::scalar_f32(DType::F32, rate).unwrap();
            state.insert(names::TOKEN_LEARNING_RATE.to_owned(), rate);
        }
        let rate = HostTensor::scalar_f32(DType::F32, meta("learning_rate") as f32).unwrap();
        state.insert(names::LEARNING_RATE.to_owned(), rate);
        Run {
            name,
            batches,
            session,
            golden,
            graph: lowered.graph,
            program,
            state,
        }
    }

    /// Takes step `step`; its loss and the norm of its gradient.
    fn step(&mut self, step: usize) -> [f64; 2] {
        let mut loss = 0.0;
        let mut norm = 0.0;
        for at in 0..self.batches {
            let is_last = f32::from(u8::from(at + 1 == self.batches));
            let is_last = HostTensor::scalar_f32(DType::F32, is_last).unwrap();
            self.state.insert(names::IS_LAST.to_owned(), is_last);
            let [own, of_all] = self.batch(step * self.batches + at);
            loss += own / self.batches as f64;
            norm = of_all;
        }
        [loss, norm]
    }

    /// Runs the program on batch `step`.
    fn batch(&mut self, step: usize) -> [f64; 2] {
        for input in self.graph.inputs.iter().map(|input| &input.name) {
            let recorded = match input.as_str() {
                names::SAMPLE => "in/latents".to_owned(),
                names::TIMESTEP => "in/timesteps".to_owned(),
                "input_ids" => "in/ids".to_owned(),
                "input_ids_2" => "in/ids_2".to_owned(),
                names::MASK => "in/mask".to_owned(),
                other => format!("in/{other}"),
            };
            if self.golden.has(&recorded) {
                let slot = self.state.get_mut(input).unwrap();
                let count = slot.shape.count();
                let values = &self.golden.values(&recorded)[step * count..][..count];
                *slot = HostTensor::from_f64(slot.shape.clone(), values).unwrap();
            }
        }
        let arrays = put_state(self.session, &self.program, &self.state);
        let arguments = arrays.iter().map(Value::Borrow).collect();
        let results = self.program.run(arguments).unwrap();
        let mut told = BTreeMap::new();
        for (slot, array) in self.program.outputs().iter().zip(&results) {
            let value = array.to_host(self.session.mesh()).unwrap();
            match self.state.get_mut(&slot.name) {
                Some(state) => *state = value,
                None => {
                    told.insert(slot.name.clone(), value.to_f64_vec().unwrap()[0]);
                }
            }
        }
        assert_eq!(told[names::FINITE], 1.0);
        [told[names::LOSS], told[names::GRAD_NORM]]
    }

    /// Takes all steps, and compares losses, norms, the first gradients and the last weights with those of `run`.
    fn check(mut self, run: &str, recorded: &dyn Fn(&str) -> String) -> usize {
        let place = |what: &str| format!("out/{run}/{what}");
        let mut first = BTreeMap::new();
        for step in 0..STEPS {
            let found = self.step(step);
            for (found, what) in found.iter().zip(["loss", "grad_norm"]) {
                let expected = self.golden.values(&place(what))[step];
                let error = (found - expected).abs() / expected;
                let name = self.name;
                assert!(
                    error < TOLERANCE,
                    "{name} {run} {what} {step}: {found} {expected}"
                );
            }
            if step == 0 {
                first = self.state.clone();
            }
        }
        let limit = self.golden.meta["max_grad_norm"]
            .as_f64()
            .unwrap_or(f64::INFINITY);
        let norm = self.golden.values(&place("grad_norm"))[0];
        let clip = (limit / norm).min(1.0);
        let mut compared = 0;
        for (name, weight) in &self.state {
            let of_denoiser = ["unet/", "transformer/"].map(|root| name.strip_prefix(root));
            let key = recorded(of_denoiser.into_iter().flatten().next().unwrap_or(name));
            if !self.golden.has(&place(&key)) {
                continue;
            }
            assert_close(&place(&key), weight, &self.golden, TOLERANCE);
            // After one step the first moment is a tenth of the clipped gradient.
            let moment = first[&format!("{FIRST_MOMENT}{name}")]
                .to_f64_vec()
                .unwrap();
            let gradient: Vec<f64> = moment.iter().map(|m| m / (1.0 - 0.9) / clip).collect();
            let gradient = distance(
                &gradient,
                self.golden.values(&place(&format!("grad/{key}"))),
            );
            assert!(
                gradient < TOLERANCE,
                "{run} gradient of {key}: {gradient:e}"
            );
            compared += 1;
        }
        compared
    }
}

/// AdamW as `golden` was recorded with.
fn adamw(golden: &Golden, accumulated: usize) -> OptimizerOptions {
    OptimizerOptions {
        optimizer: Optimizer::AdamW {
            adam: AdamOptions {
                b1: 0.9,
                b2: 0.999,
                eps: 1e-8,
            },
            moments: DType::F32,
        },
        weight_decay: golden.meta["weight_decay"].as_f64().unwrap(),
        decays_vectors: true,
        accumulated,
        stochastic_rounding: false,
        max_grad_value: None,
        max_grad_norm: golden.meta["max_grad_norm"].as_f64(),
        ema_decay: None,
    }
}

/// The updates of the UNet that `golden` was recorded with.
fn recorded_updates(golden: &Golden) -> LoraOptions {
    LoraOptions {
        rank: golden.meta["rank"].as_u64().unwrap() as usize,
        alpha: golden.meta["alpha"].as_f64().unwrap(),
        target_modules: ["to_[kqv]", "to_out.0", "proj_in"]
            .map(str::to_owned)
            .to_vec(),
        text_modules: Vec::new(),
        dropout: 0.0,
        plus_ratio: 1.0,
    }
}

/// The recorded name of a factor: its layer's with `.down` or `.up`.
fn recorded_factor(key: &str) -> String {
    let layer = key.strip_suffix(".weight").unwrap_or(key);
    layer.replace(".lora_", ".")
}

#[test]
fn five_steps_of_the_whole_unet_are_those_of_diffusers_scripts() {
    let session = keeping_session();
    for name in CASES {
        let run = Run::new(&session, name, Trains::default(), 1);
        let compared = run.check("full", &str::to_owned);
        assert!(compared >= 6, "{name}: {compared} weights are recorded");
    }
}

/// Masks of ones change nothing, and masks that are one together share the loss and the gradient of every weight.
#[test]
fn masks_share_the_loss_and_the_gradient() {
    let session = keeping_session();
    // The clipped gradient is ten times the first moment after one step.
    let first_step = |run: &mut Run<'_>| {
        let [loss, norm] = run.step(0);
        let limit = run.golden.meta["max_grad_norm"].as_f64();
        let clip = (limit.unwrap_or(f64::INFINITY) / norm).min(1.0);
        let moments = run.state.iter();
        let moments = moments.filter(|(name, _)| name.starts_with(FIRST_MOMENT));
        let scale = |moment: f64| 10.0 * moment / clip;
        let gradient: Vec<f64> = moments
            .flat_map(|(_, moment)| moment.to_f64_vec().unwrap())
            .map(scale)
            .collect();
        (loss, gradient)
    };
    let mut plain = Run::new(&session, "sd21", Trains::default(), 1);
    assert!(!plain.state.contains_key(names::MASK));
    let (loss, gradient) = first_step(&mut plain);
    let trains = Trains {
        masked: true,
        ..Trains::default()
    };
    let mut run = Run::new(&session, "sd21", trains, 1);
    let (initial, shape) = (run.state.clone(), run.state[names::MASK].shape.clone());
    let mut masked = |weight: &dyn Fn(usize) -> f64| {
        run.state = initial.clone();
        let weights: Vec<f64> = (0..shape.count()).map(weight).collect();
        let mask = HostTensor::from_f64(shape.clone(), &weights).unwrap();
        run.state.insert(names::MASK.to_owned(), mask);
        first_step(&mut run)
    };
    let (all, of_all) = masked(&|_| 1.0);
    assert!((all - loss).abs() < 1e-6 * loss, "{all} {loss}");
    assert!(distance(&of_all, &gradient) < TOLERANCE);
    let share = |at: usize| (at * 7 % 5) as f64 / 4.0;
    let (one, of_one) = masked(&share);
    let (other, of_other) = masked(&|at| 1.0 - share(at));
    assert!(one > 0.1 * loss && other > 0.1 * loss, "{one} {other}");
    assert!(
        (one + other - loss).abs() < 1e-6 * loss,
        "{one} {other} {loss}"
    );
    let sum: Vec<f64> = of_one.iter().zip(&of_other).map(|(a, b)| a + b).collect();
    assert!(distance(&sum, &gradient) < TOLERANCE);
    assert!(distance(&of_one, &gradient) > 0.1);
}

#[test]
fn five_steps_of_low_rank_updates_are_those_of_peft() {
    let session = keeping_session();
    for name in CASES {
        let golden = Golden::read(&format!("finetune/{name}/steps.safetensors"));
        let lora = recorded_updates(&golden);
        // Of one case the two samples of a batch come one after the other, and their gradients are averaged.
        let batches = if name == "sd15" { 2 } else { 1 };
        let run = Run::new(&session, name, Trains::lora(lora), batches);
        let factors = golden.shapes();
        let factors = factors
            .iter()
            .filter(|(name, _)| name.starts_with("in/lora/"));
        assert_eq!(
            run.check("lora", &recorded_factor),
            factors.count(),
            "{name}"
        );
    }
}

/// LoRA+: the learning rate of second factors is a multiple of that of first ones.
#[test]
fn five_steps_with_another_rate_of_second_factors_are_those_of_pytorch() {
    let session = keeping_session();
    let golden = Golden::read("finetune/sd15/steps.safetensors");
    let lora = LoraOptions {
        plus_ratio: golden.meta["lora_plus_ratio"].as_f64().unwrap(),
        ..recorded_updates(&golden)
    };
    let run = Run::new(&session, "sd15", Trains::lora(lora), 1);
    // Nine layers of the middle block.
    assert_eq!(run.check("plus", &recorded_factor), 2 * 9);
}

/// Masks weigh squared errors as kohya's `apply_masked_loss`; of each batch others.
#[test]
fn five_steps_with_masks_are_those_of_pytorch() {
    let session = keeping_session();
    let golden = Golden::read("finetune/sd15/steps.safetensors");
    let trains = Trains {
        masked: true,
        ..Trains::lora(recorded_updates(&golden))
    };
    let run = Run::new(&session, "sd15", trains, 1);
    // Nine layers of the middle block.
    assert_eq!(run.check("masked", &recorded_factor), 2 * 9);
}

/// Updates of the UNet and of all text encoders, each part with its own learning rate.
#[test]
fn five_steps_of_text_encoders_are_those_of_peft() {
    let session = keeping_session();
    for name in ["sd15", "sdxl"] {
        let golden = Golden::read(&format!("finetune/{name}/steps.safetensors"));
        let lora = LoraOptions {
            text_modules: TEXT_PROJECTIONS.map(str::to_owned).to_vec(),
            ..recorded_updates(&golden)
        };
        let run = Run::new(&session, name, Trains::lora(lora), 1);
        let factors = golden.shapes();
        let of = |prefix: &str| {
            factors
                .iter()
                .filter(|(name, _)| name.starts_with(prefix))
                .count()
        };
        let (unet, text) = (of("in/lora/"), of("in/text/"));
        assert!(text >= 24, "{name}: {text}");
        assert_eq!(run.check("text", &recorded_factor), unet + text, "{name}");
    }
}

#[test]
fn the_distribution_of_latents_is_diffusers() {
    let session = keeping_session();
    for name in CASES {
        let case = Case::read(name, Precision::F32);
        let golden = Golden::read(&format!("finetune/{name}/steps.safetensors"));
        let bytes = golden.values("in/image").iter().map(|v| *v as u8).collect();
        let image = image::RgbImage::from_raw(16, 16, bytes).unwrap();
        let image = signed_planes(&image).unwrap();
        let traced = trace_encode_distribution(&case.model).unwrap();
        let vae = &case.source.components[&Part::Vae].checkpoint;
        let arguments: Vec<HostTensor> = traced
            .graph
            .inputs
            .iter()
            .map(|input| match input.is_weight() {
                true => vae.read_as(input.key(), DType::F32).unwrap(),
                false => image.clone(),
            })
            .collect();
        let results = common::run_on(&session, &traced.graph, &arguments);
        let [mean, deviation] = [0, 1].map(|i: usize| results[i].to_f64_vec().unwrap());
        let noise = golden.values("in/image_noise");
        let drawn = mean.iter().zip(&deviation).zip(noise);
        let sample: Vec<f64> = drawn.map(|((m, d), n)| m + d * n).collect();
        assert!(
            distance(&sample, golden.values("out/sample")) < 1e-5,
            "{name}"
        );
        let factor = case.model.vae.as_ref().unwrap().latent_scale().factor;
        for (found, what) in [(&mean, "out/mean"), (&deviation, "out/deviation")] {
            let unscaled: Vec<f64> = found.iter().map(|v| v / factor).collect();
            let error = distance(&unscaled, golden.values(what));
            assert!(error < 1e-5, "{name} {what}: {error:e}");
        }
    }
}
