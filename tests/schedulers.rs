//! Schedules and samplers against diffusers, step by step.

mod common;

use common::{Golden, distance};
use maxdiff::schedulers::{
    NOISE, NoiseSchedule, OUTPUT, SamplingPlan, SchedulerConfig, ddim, euler_discrete,
};
use serde_json::Value;

/// diffusers computes in float32, with a few roundings for each number and step.
const TOLERANCE: f64 = 1e-6;

fn cases(golden: &Golden) -> Vec<(String, Value)> {
    golden.meta["cases"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, case)| (name.clone(), case.clone()))
        .collect()
}

/// The case's configuration.
fn config(case: &Value) -> SchedulerConfig {
    SchedulerConfig::from_map(case["config"].as_object().unwrap().clone()).unwrap()
}

/// The error that is allowed: PyTorch's rescaling to zero terminal SNR rounds an alpha near 1 up to three units in
/// the last place from ours, and `sqrt(1 - alpha)` is steepest at the first.
fn tolerance(config: &SchedulerConfig) -> f64 {
    if !config.rescale_betas_zero_snr {
        return TOLERANCE;
    }
    let alpha = f64::from(NoiseSchedule::new(config).unwrap().alphas_cumprod[0]);
    let unit = f64::from(f32::EPSILON) / 2.0;
    TOLERANCE.max(3.0 * unit / (2.0 * (1.0 - alpha).sqrt()))
}

fn plan(case: &Value, config: &SchedulerConfig) -> SamplingPlan {
    let steps = case["num_inference_steps"].as_u64().unwrap() as usize;
    match case["scheduler"].as_str().unwrap() {
        "DDIMScheduler" => {
            let eta = case["step"]["eta"].as_f64().unwrap_or(0.0);
            let clipped = case["step"]["use_clipped_model_output"]
                .as_bool()
                .unwrap_or(false);
            ddim(config, steps, eta, clipped).unwrap()
        }
        "EulerDiscreteScheduler" => euler_discrete(config, steps).unwrap(),
        other => panic!("{other} has no sampling case"),
    }
}

#[test]
fn every_step_of_every_sampler_is_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let noise = golden.values("in/noise");
    let offset = golden.values("in/model_offset");
    let size = noise.len();
    let mut compared = 0;
    let mut clipped = 0;
    for (name, case) in cases(&golden) {
        if case["training"] == Value::Bool(true) {
            continue;
        }
        let config = config(&case);
        let plan = plan(&case, &config);
        let timesteps: Vec<f64> = plan.steps.iter().map(|s| f64::from(s.timestep)).collect();
        assert!(
            distance(&timesteps, golden.values(&format!("out/{name}/timesteps"))) < 1e-7,
            "{name}: {timesteps:?}"
        );
        let sigma = case["init_noise_sigma"].as_f64().unwrap();
        assert!(
            (f64::from(plan.init_noise_sigma) / sigma - 1.0).abs() < TOLERANCE,
            "{name}"
        );
        clipped += usize::from(case["step"]["use_clipped_model_output"] == Value::Bool(true));
        let samples = golden.values(&format!("out/{name}/samples"));
        for (i, step) in plan.steps.iter().enumerate() {
            // Each step starts from the recorded sample, so that errors show where they are made.
            let x = &samples[i * size..(i + 1) * size];
            let next: Vec<f64> = (0..size)
                .map(|j| {
                    let model = 0.5 * f64::from(step.in_scale) * x[j] + offset[j];
                    let row = step.update[0].map(f64::from);
                    let mut next = row[0] * x[j] + row[OUTPUT] * model;
                    if config.clip_sample {
                        let [of_x, of_model] = step.clean.map(f64::from);
                        let clean = of_x * x[j] + of_model * model;
                        next += f64::from(step.clip[0]) * (clean.clamp(-1.0, 1.0) - clean);
                    }
                    if step.is_noisy() {
                        next += row[NOISE] * golden.values("in/variance_noise")[i * size + j];
                    }
                    next
                })
                .collect();
            let expected = &samples[(i + 1) * size..(i + 2) * size];
            let error = distance(&next, expected);
            // diffusers adds the step to the sample in float32: where it takes most of the sample away (from sigma
            // 4096 under zero terminal SNR), what is left has the rounding errors of the sample.
            let zeros = vec![0.0; size];
            let taken = distance(x, &zeros) / distance(expected, &zeros);
            let cancelled = f64::from(f32::EPSILON) * taken;
            // An error of sqrt(1 - alpha) is one of the noise that it is multiplied with: at most what the sample and
            // a clipped prediction make of it.
            let noise = (size as f64).sqrt().max(distance(x, &zeros)) / distance(expected, &zeros);
            let allowed = match config.rescale_betas_zero_snr {
                true => tolerance(&config) * noise.max(1.0),
                false => TOLERANCE,
            };
            assert!(
                error < allowed.max(cancelled),
                "{name}: step {i}: relative L2 error {error:e}"
            );
            compared += 1;
        }
    }
    assert!(compared > 80, "{compared} steps compared");
    // As the pictures are made: one case for each kind of prediction.
    assert_eq!(clipped, 3);
}

#[test]
fn noise_and_velocity_are_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let timesteps = golden.values("in/timesteps");
    let clean = golden.values("in/clean");
    let noise = golden.values("in/training_noise");
    let size = clean.len() / timesteps.len();
    let mut compared = 0;
    for (name, case) in cases(&golden) {
        if case["training"] != Value::Bool(true) {
            continue;
        }
        let config = config(&case);
        let schedule = NoiseSchedule::new(&config).unwrap();
        let velocity = NoiseSchedule {
            prediction_type: maxdiff::schedulers::PredictionType::VPrediction,
            ..schedule.clone()
        };
        let mix = |(a, b): (f32, f32), at: usize| {
            (at..at + size)
                .map(|j| f64::from(a) * clean[j] + f64::from(b) * noise[j])
                .collect::<Vec<f64>>()
        };
        for (i, &t) in timesteps.iter().enumerate() {
            let at = i * size;
            for (what, found) in [
                (
                    "add_noise",
                    mix(schedule.noise_coefficients(t as usize).unwrap(), at),
                ),
                (
                    "velocity",
                    mix(velocity.target_coefficients(t as usize).unwrap(), at),
                ),
            ] {
                let expected = &golden.values(&format!("out/{name}/{what}"))[at..at + size];
                let error = distance(&found, expected);
                assert!(
                    error < tolerance(&config),
                    "{name}: {what} at {t}: relative L2 error {error:e}"
                );
                compared += 1;
            }
        }
    }
    // Five schedules, six timesteps, noise and velocity.
    assert_eq!(compared, 60);
}

#[test]
fn cumulative_alphas_are_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let mut compared = 0;
    for (name, case) in cases(&golden) {
        let key = format!("out/{name}/alphas_cumprod");
        if !golden.shapes().iter().any(|(n, _)| *n == key) {
            continue;
        }
        let schedule = NoiseSchedule::new(&config(&case)).unwrap();
        let expected = golden.values(&key);
        for (t, (&found, &expected)) in schedule.alphas_cumprod.iter().zip(expected).enumerate() {
            // Euler replaces the last 0 of a zero-SNR schedule in its own plan.
            if name == "euler_zero_snr" && t == 999 {
                continue;
            }
            // The rescaled schedule's last values are differences of numbers near 0.07: absolute error there.
            let error = (f64::from(found) - expected).abs();
            assert!(
                error <= 1e-6 * expected + 1e-9,
                "{name}: {t}: {found} {expected}"
            );
        }
        compared += 1;
    }
    assert!(compared >= 4, "{compared} schedules compared");
}
