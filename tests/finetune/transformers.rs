//! Training steps of FLUX.1, Stable Diffusion 3 and PixArt against diffusers' training scripts.

use std::collections::BTreeMap;

use super::{BATCH, Run, TOKENS, adamw, recorded_factor};
use crate::common::{Golden, golden, keeping_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, evaluate};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::{Denoiser, DiffusionModel, Family, MicroConditioning};
use maxdiff::nn::{Precision, Remat};
use maxdiff::runtime::{Program, ProgramOptions, Session};
use maxdiff::schedulers::{SchedulerConfig, scheduler_fields, training_sigmas};
use maxdiff::shape::Shape;
use maxdiff::train::optimizer::FIRST_MOMENT;
use maxdiff::train::step::{
    self, CleanSamples, DdpmObjective, Draws, FlowMatching, Objective, StepOptions,
    WeightingScheme, names, timesteps_at,
};
use maxdiff::train::{LoraOptions, default_targets};
use maxdiff::weights::Checkpoint;

/// What a run trains, and how its loss is made.
struct Trains {
    family: Family,
    objective: Objective,
    lora: Option<LoraOptions>,
}

fn flow(weighting: WeightingScheme, precondition_outputs: bool) -> Objective {
    Objective::FlowMatching(FlowMatching {
        weighting,
        precondition_outputs,
    })
}

/// The scheduler of a recorded pipeline.
fn scheduler(case: &str) -> SchedulerConfig {
    let text = Golden::text(&format!("pipeline_{case}/scheduler/scheduler_config.json"));
    SchedulerConfig::from_map(&scheduler_fields(&text).unwrap()).unwrap()
}

fn model(case: &str, family: Family, recorded: &Golden) -> DiffusionModel {
    let config = Golden::text(&format!("pipeline_{case}/transformer/config.json"));
    let config = serde_json::from_str(&config).unwrap();
    let image_size =
        [0, 1].map(|side| recorded.meta["image_size"][side as usize].as_u64().unwrap());
    let image_size = image_size.map(|side| side as usize);
    DiffusionModel {
        family,
        denoiser: Denoiser::from_map(family.spec().denoiser, config).unwrap(),
        controlnets: Vec::new(),
        ip_adapter: None,
        text_encoders: Vec::new(),
        vae: None,
        preview_vae: None,
        precision: Precision::F32,
        remat: Remat::None,
        scan_layers: None,
        scheduler: scheduler(case),
        sample_size: image_size.map(|side| side / 2),
        image_size,
        micro_conditioning: MicroConditioning::TargetSize,
        tokens: TOKENS,
        decode_tile: None,
    }
}

fn run<'a>(session: &'a Session, case: &'static str, trains: Trains, batches: usize) -> Run<'a> {
    let recorded = Golden::read(&format!("finetune/{case}.safetensors"));
    let meta = |key: &str| recorded.meta[key].as_f64().unwrap();
    let options = StepOptions {
        batch: BATCH / batches,
        clean: CleanSamples::Given,
        draws: Draws::Inputs,
        lora: trains.lora,
        inversion: None,
        optimizer: adamw(&recorded, batches),
        objective: trains.objective,
        gradient_reduce_dtype: None,
        guidance_scale: meta("guidance_scale"),
        masked: false,
        prior_loss_weight: None,
        trains_low_rank: false,
        train_text_encoder: false,
        quantization: None,
        fake_quantization: None,
    };
    let traced = step::trace(&model(case, trains.family, &recorded), &options).unwrap();
    let lowered = session.lower(&traced).unwrap().step;
    let program = Program::of_step(session, &lowered, &ProgramOptions::default()).unwrap();
    let weights = golden(&format!("pipeline_{case}/transformer"));
    let weights = Checkpoint::open(&weights).unwrap();
    let mut state = BTreeMap::new();
    for slot in program.inputs() {
        let value = match slot.name.strip_prefix("transformer/") {
            None => HostTensor::zeros(slot.shape.clone()),
            Some(key) if weights.info(key).is_some() => weights.read_as(key, DType::F32).unwrap(),
            Some(key) => recorded.tensor(&format!("in/lora/{}", recorded_factor(key)), &slot.shape),
        };
        state.insert(slot.name.clone(), value);
    }
    let rate = meta("learning_rate") as f32;
    let rate = HostTensor::scalar_f32(DType::F32, rate).unwrap();
    state.insert(names::LEARNING_RATE.to_owned(), rate);
    Run {
        name: case,
        batches,
        session,
        golden: recorded,
        graph: lowered.graph,
        program,
        state,
    }
}

#[test]
fn five_steps_of_whole_transformers_are_those_of_diffusers_scripts() {
    let session = keeping_session();
    for (case, family, objective) in [
        (
            "flux_dev",
            Family::FluxDev,
            flow(WeightingScheme::None, false),
        ),
        ("sd3", Family::Sd3, flow(WeightingScheme::Cosmap, true)),
        (
            "pixart_alpha",
            Family::PixArtAlpha,
            Objective::Ddpm(DdpmObjective::default()),
        ),
    ] {
        let trains = Trains {
            family,
            objective,
            lora: None,
        };
        let run = run(&session, case, trains, 1);
        // diffusers keeps these positions as a buffer, which no optimizer sees.
        let positions = format!("{FIRST_MOMENT}transformer/pos_embed.pos_embed");
        assert!(!run.state.contains_key(&positions));
        assert_eq!(
            run.state.contains_key("transformer/pos_embed.pos_embed"),
            case == "sd3"
        );
        let compared = run.check("full", &str::to_owned);
        assert!(compared >= 7, "{case}: {compared} weights are recorded");
    }
}

/// With the layers that diffusers' script for FLUX.1 trains, and the two samples of a batch one after the other.
#[test]
fn five_steps_of_low_rank_updates_of_a_transformer_are_those_of_peft() {
    let session = keeping_session();
    let recorded = Golden::read("finetune/flux_dev.safetensors");
    let trains = Trains {
        family: Family::FluxDev,
        objective: flow(WeightingScheme::SigmaSqrt, false),
        lora: Some(LoraOptions {
            rank: recorded.meta["rank"].as_u64().unwrap() as usize,
            alpha: recorded.meta["alpha"].as_f64().unwrap(),
            target_modules: default_targets(Family::FluxDev.spec().denoiser)
                .iter()
                .map(|layer| (*layer).to_owned())
                .collect(),
            text_modules: Vec::new(),
            dropout: 0.0,
            plus_ratio: 1.0,
        }),
    };
    let shapes = recorded.shapes();
    let factors = shapes
        .iter()
        .filter(|(name, _)| name.starts_with("in/lora/"));
    let compared = run(&session, "flux_dev", trains, 2).check("lora", &recorded_factor);
    assert_eq!(compared, factors.count());
}

/// Noise levels, how often they are drawn and how much they count, from the same uniform and normal draws.
#[test]
fn noise_levels_are_drawn_and_weighed_as_diffusers_does() {
    let recorded = Golden::read("finetune/flow_matching.safetensors");
    let cases = recorded.meta["cases"].as_object().unwrap();
    for (name, case) in cases {
        let number = |key: &str| case[key].as_f64().unwrap();
        let scheme = match case["scheme"].as_str().unwrap() {
            "none" => WeightingScheme::None,
            "logit_normal" => WeightingScheme::LogitNormal {
                mean: number("logit_mean"),
                std: number("logit_std"),
            },
            _ => WeightingScheme::Mode {
                scale: number("mode_scale"),
            },
        };
        let draws = match scheme.is_normal() {
            true => "in/normal",
            false => "in/uniform",
        };
        let b = Builder::new();
        let shape = Shape::new(DType::F32, recorded.dims(draws));
        let input = b.input("draws", shape.clone(), &[None]).unwrap();
        let places = scheme.density(&b, input).unwrap();
        let timesteps = timesteps_at(&b, places, 1000).unwrap();
        b.output("places", places, None).unwrap();
        b.output("timesteps", timesteps, None).unwrap();
        let graph = b.finish();
        let given = [recorded.tensor(draws, &shape)];
        for found in [
            evaluate(&graph, &given).unwrap(),
            run_on(&keeping_session(), &graph, &given),
        ] {
            let places = found[0].to_f64_vec().unwrap();
            let expected = recorded.values(&format!("out/density/{name}"));
            for (found, expected) in places.iter().zip(expected) {
                assert!(
                    (found - expected).abs() < 1e-6,
                    "{name}: {found} {expected}"
                );
            }
            // diffusers' indices count from the most noise.
            let timesteps = found[1].to_f64_vec().unwrap();
            let indices: Vec<f64> = timesteps.iter().map(|t| 999.0 - t).collect();
            assert_eq!(indices, recorded.values(&format!("out/timesteps/{name}")));
        }
    }
    for model in ["sd3", "flux_dev"] {
        let mut sigmas = training_sigmas(&scheduler(model)).unwrap();
        sigmas.reverse();
        let expected = recorded.values(&format!("out/sigmas/{model}"));
        assert!(
            sigmas
                .iter()
                .zip(expected)
                .all(|(s, e)| f64::from(*s) == *e)
        );
        for (scheme, name) in [
            (WeightingScheme::SigmaSqrt, "sigma_sqrt"),
            (WeightingScheme::Cosmap, "cosmap"),
        ] {
            let expected = recorded.values(&format!("out/weights/{model}/{name}"));
            for (sigma, expected) in sigmas.iter().zip(expected) {
                let found = scheme.loss_weight(f64::from(*sigma)).unwrap();
                assert!((found / expected - 1.0).abs() < 1e-6, "{sigma}: {found}");
            }
        }
    }
}
