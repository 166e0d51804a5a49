//! Schedules and samplers against diffusers, step by step.

use std::collections::BTreeMap;

use crate::common::{Golden, distance};
use maxdiff::schedulers::{
    FlowLevels, NOISE, NoiseSchedule, OUTPUT, PlanOptions, PredictionType, STATES, SamplingPlan,
    SchedulerConfig, SchedulerKind, Start, Step,
};
use serde_json::{Map, Value};

/// diffusers' tables are float32, and so are a step's coefficients; both computed otherwise in double precision.
const TOLERANCE: f64 = 1e-6;

/// One recorded sequence.
struct Case<'a> {
    /// The class and what else tells it from others.
    name: String,
    config: SchedulerConfig,
    plan: SamplingPlan,
    init_noise_sigma: f64,
    timesteps: &'a [f64],
    /// The sample before the first run and after each.
    samples: Vec<&'a [f64]>,
    /// The predicted clean sample of each run, or none.
    clean: Vec<&'a [f64]>,
    noised: Vec<&'a [f64]>,
}

/// Takes `rows` rows of `size` values off the front.
fn take<'a>(values: &mut &'a [f64], rows: usize, size: usize) -> Vec<&'a [f64]> {
    let (taken, rest) = values.split_at(rows * size);
    *values = rest;
    taken.chunks(size).collect()
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn cases(golden: &Golden) -> Vec<Case<'_>> {
    let size = golden.values("in/noise").len();
    let mut timesteps = golden.values("out/timesteps");
    let mut samples = golden.values("out/samples");
    let mut clean = golden.values("out/clean");
    let mut noised = golden.values("out/noised");
    let cases: Vec<Case> = golden.meta["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| {
            let class = case["class"].as_str().unwrap();
            let schedule = case["schedule"].as_str().unwrap();
            let mut fields = object(&golden.meta["schedules"][schedule]);
            fields.extend(object(&case["config"]));
            fields.insert("_class_name".to_string(), class.into());
            let config = SchedulerConfig::from_map(&fields).unwrap();
            let number = |key: &str| case[key].as_f64();
            let options = PlanOptions {
                start: match (number("strength"), number("after")) {
                    (Some(strength), _) => Start::Strength(strength),
                    (_, Some(after)) => Start::After(after),
                    _ => Start::Strength(1.0),
                },
                end: number("end"),
                eta: number("eta").unwrap_or(0.0),
                use_clipped_model_output: case["use_clipped_model_output"] == true,
                ..PlanOptions::new(case["steps"].as_u64().unwrap() as usize)
            };
            let runs = case["runs"].as_u64().unwrap() as usize;
            Case {
                name: format!("{class} {schedule} {} {options:?}", case["config"]),
                plan: config
                    .plan(&options)
                    .unwrap_or_else(|error| panic!("{case}: {error}")),
                config,
                init_noise_sigma: number("init_noise_sigma").unwrap(),
                timesteps: take(&mut timesteps, 1, runs)[0],
                samples: take(&mut samples, runs + 1, size),
                clean: take(
                    &mut clean,
                    if case["clean"] == true { runs } else { 0 },
                    size,
                ),
                noised: take(&mut noised, runs + 1, 2),
            }
        })
        .collect();
    for rest in [timesteps, samples, clean, noised] {
        assert!(rest.is_empty(), "{} values of no case", rest.len());
    }
    cases
}

/// The program of the device for one element: the next states and the predicted clean value, in double precision or,
/// as the device has it, rounded to `f32` after each operation.
fn advance(
    step: &Step,
    clip: bool,
    states: [f64; STATES],
    (offset, noise): (f64, f64),
    round: fn(f64) -> f64,
) -> ([f64; STATES], f64) {
    let product = |a: f32, b: f64| round(f64::from(a) * b);
    let output = round(round(0.5 * product(step.in_scale, states[0])) + offset);
    let mut clean = round(product(step.clean[0], states[0]) + product(step.clean[1], output));
    let clipped = clean.clamp(-1.0, 1.0);
    let next = std::array::from_fn(|state| {
        let row = &step.update[state];
        let mut next = (0..STATES).fold(0.0, |sum, column| {
            round(sum + product(row[column], states[column]))
        });
        next = round(next + product(row[OUTPUT], output));
        next = round(next + product(row[NOISE], noise));
        match clip {
            true => round(next + product(step.clip[state], round(clipped - clean))),
            false => next,
        }
    });
    if clip {
        clean = clipped;
    }
    (next, clean)
}

/// The error that is allowed in what follows from a schedule's tables.
///
/// - diffusers' rescaling to zero terminal SNR rounds an alpha near 1 up to three units in the last place from ours,
///   and `sqrt(1 - alpha)` is steepest at the first; an error of it is one of the noise that it is multiplied with.
/// - `KDPM2AncestralDiscreteScheduler` finds how far down a step goes as a difference of squares in float32.
fn table_tolerance(config: &SchedulerConfig) -> f64 {
    if config.kind == SchedulerKind::Kdpm2Ancestral {
        return 1e-5;
    }
    if !config.rescale_betas_zero_snr {
        return TOLERANCE;
    }
    let alpha = f64::from(NoiseSchedule::new(config).unwrap().alphas_cumprod[0]);
    let unit = f64::from(f32::EPSILON) / 2.0;
    TOLERANCE.max(3.0 * unit / (2.0 * (1.0 - alpha).sqrt()))
}

/// The norm of what is added up to the next samples of all elements: a coefficient's rounding to `f32` is an error of
/// half a unit in the last place of its term, which may be larger than the sum.
fn size_of_terms(step: &Step, states: &[[f64; STATES]], offset: &[f64]) -> f64 {
    let terms = states.iter().zip(offset).map(|(states, offset)| {
        let output = 0.5 * f64::from(step.in_scale) * states[0] + offset;
        let row = step.update[0].map(f64::from);
        let of_states: f64 = (0..STATES).map(|i| (row[i] * states[i]).abs()).sum();
        let [x, y] = step.clean.map(f64::from);
        let clipped = f64::from(step.clip[0]).abs() * ((x * states[0]).abs() + (y * output).abs());
        of_states + (row[OUTPUT] * output).abs() + clipped
    });
    terms.map(|term| term * term).sum::<f64>().sqrt()
}

fn norm(values: &[f64]) -> f64 {
    distance(values, &vec![0.0; values.len()])
}

#[test]
fn every_step_of_every_sampler_is_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let offset = golden.values("in/model_offset");
    let noise = golden.values("in/variance_noise");
    let mut compared = BTreeMap::new();
    for case in cases(&golden) {
        let name = &case.name;
        assert_eq!(case.plan.steps.len(), case.timesteps.len(), "{name}");
        let sigma = f64::from(case.plan.init_noise_sigma) / case.init_noise_sigma;
        assert!((sigma - 1.0).abs() < TOLERANCE, "{name}: init_noise_sigma");
        let allowed = table_tolerance(&case.config);
        let check = |what: &str, found: &[f64], expected: &[f64], allowed: f64| {
            let error = distance(found, expected);
            assert!(
                error < allowed,
                "{name}: {what}: error {error:e} above {allowed:e}"
            );
        };
        let noised = case.plan.noised.map(f64::from);
        check("noised", &noised, case.noised[0], allowed);

        let mut states = vec![[0.0; STATES]; offset.len()];
        for (i, step) in case.plan.steps.iter().enumerate() {
            let what = |value: &str| format!("{value} of run {i}");
            // KDPM2Ancestral's timesteps in the middle come from logarithms of its tables in float32.
            let near = match case.config.kind {
                SchedulerKind::Kdpm2Ancestral => 2e-4,
                _ => 0.0,
            };
            let timestep = (f64::from(step.timestep) - case.timesteps[i]).abs();
            let near = near + TOLERANCE * case.timesteps[i].abs().max(1.0);
            assert!(
                timestep <= near,
                "{name}: {} is {timestep:e} away",
                what("timestep")
            );

            // Each step starts from the recorded sample, so that errors show where they are made, and from what our
            // own steps remembered of the recorded samples before.
            for (states, &sample) in states.iter_mut().zip(case.samples[i]) {
                states[0] = sample;
            }
            let terms = size_of_terms(step, &states, offset);
            let mut clean = Vec::new();
            for (j, states) in states.iter_mut().enumerate() {
                let values = (offset[j], noise[i * offset.len() + j]);
                let (next, predicted) =
                    advance(step, case.config.clip_sample, *states, values, |x| x);
                *states = next;
                clean.push(predicted);
            }
            let next: Vec<f64> = states.iter().map(|states| states[0]).collect();
            let expected = case.samples[i + 1];
            let size = norm(expected);
            let rounding = f64::from(f32::EPSILON) / 2.0 * terms / size;
            let noise = (offset.len() as f64).sqrt().max(norm(case.samples[i])) / size;
            let allowed_here = match allowed > TOLERANCE {
                true => allowed * noise.max(1.0),
                false => TOLERANCE,
            };
            check(&what("sample"), &next, expected, allowed_here.max(rounding));
            if let Some(expected) = case.clean.get(i) {
                check(&what("clean"), &clean, expected, allowed);
            }
            // diffusers puts the known part of an image at the end of KDPM2's step while the sample is in its middle.
            if case.config.kind != SchedulerKind::Kdpm2 || i % 2 == 1 {
                let noised = step.noised.map(f64::from);
                check(&what("noised"), &noised, case.noised[i + 1], allowed);
            }
            *compared.entry(case.config.kind.name()).or_insert(0) += 1;
        }
    }
    let with_betas = SchedulerKind::ALL.iter().filter(|kind| !kind.is_flow());
    assert_eq!(compared.len(), with_betas.count(), "{compared:?}");
    assert!(compared.values().all(|&steps| steps > 80), "{compared:?}");
}

/// The sequences as a device runs them: from the first sample to the last in `f32`.
#[test]
fn whole_sequences_in_single_precision_stay_with_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let offset = golden.values("in/model_offset");
    let noise = golden.values("in/variance_noise");
    for case in cases(&golden) {
        let allowed = match table_tolerance(&case.config) > TOLERANCE {
            true => 2e-5,
            false => 1e-5,
        };
        let mut states = vec![[0.0; STATES]; offset.len()];
        for (states, &sample) in states.iter_mut().zip(case.samples[0]) {
            states[0] = sample;
        }
        for (i, step) in case.plan.steps.iter().enumerate() {
            for (j, states) in states.iter_mut().enumerate() {
                let values = (offset[j], noise[i * offset.len() + j]);
                let round = |x: f64| f64::from(x as f32);
                (*states, _) = advance(step, case.config.clip_sample, *states, values, round);
            }
            let sample: Vec<f64> = states.iter().map(|states| states[0]).collect();
            let error = distance(&sample, case.samples[i + 1]);
            assert!(
                error < allowed,
                "{}: after run {i}: relative L2 error {error:e}",
                case.name
            );
        }
    }
}

/// The schedules of training: the name of each and its configuration.
fn training(golden: &Golden) -> Vec<(String, SchedulerConfig)> {
    object(&golden.meta["training"])
        .into_iter()
        .map(|(name, fields)| {
            let mut fields = object(&fields);
            fields.insert("_class_name".to_string(), "DDPMScheduler".into());
            (name, SchedulerConfig::from_map(&fields).unwrap())
        })
        .collect()
}

#[test]
fn noise_and_velocity_are_diffusers() {
    let golden = Golden::read("schedulers.safetensors");
    let timesteps = golden.values("in/timesteps");
    let clean = golden.values("in/clean");
    let noise = golden.values("in/training_noise");
    let size = clean.len() / timesteps.len();
    let mut compared = 0;
    for (name, config) in training(&golden) {
        let schedule = NoiseSchedule::new(&config).unwrap();
        let velocity = NoiseSchedule {
            prediction_type: PredictionType::VPrediction,
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
                    error < table_tolerance(&config),
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
    let training = training(&golden);
    assert_eq!(training.len(), 5);
    for (name, config) in training {
        let schedule = NoiseSchedule::new(&config).unwrap();
        let expected = golden.values(&format!("out/{name}/alphas_cumprod"));
        for (t, (&found, &expected)) in schedule.alphas_cumprod.iter().zip(expected).enumerate() {
            // The rescaled schedule's last values are differences of numbers near 0.07: absolute error there.
            let error = (f64::from(found) - expected).abs();
            assert!(
                error <= 1e-6 * expected + 1e-9,
                "{name}: {t}: {found} {expected}"
            );
        }
    }
}

/// Noise levels, timesteps and each step of flow matching, shifted in all ways.
#[test]
fn every_step_of_flow_matching_is_diffusers() {
    let golden = Golden::read("flow_match.safetensors");
    let offset = golden.values("in/model_offset");
    let noise = golden.values("in/variance_noise");
    let (mut timesteps, mut samples, mut noised) = (
        golden.values("out/timesteps"),
        golden.values("out/samples"),
        golden.values("out/noised"),
    );
    for case in golden.meta["cases"].as_array().unwrap() {
        let mut fields = object(&case["config"]);
        let class = "FlowMatchEulerDiscreteScheduler";
        fields.insert("_class_name".to_string(), class.into());
        let config = SchedulerConfig::from_map(&fields).unwrap();
        assert_eq!(config.prediction_type, PredictionType::FlowPrediction);
        let steps = case["steps"].as_u64().unwrap() as usize;
        let plan = config.plan(&PlanOptions {
            image_seq_len: case["image_seq_len"].as_u64().map(|n| n as usize),
            flow_levels: match case["own_levels"].as_bool().unwrap() {
                true => FlowLevels::OfTraining,
                false => FlowLevels::OfSteps,
            },
            ..PlanOptions::new(steps)
        });
        let plan = plan.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!((plan.steps.len(), plan.init_noise_sigma), (steps, 1.0));
        let timesteps = take(&mut timesteps, 1, steps)[0];
        let samples = take(&mut samples, steps + 1, offset.len());
        let noised = take(&mut noised, steps + 1, 2);
        let check = |what: &str, found: &[f64], expected: &[f64]| {
            let error = distance(found, expected);
            assert!(error < TOLERANCE, "{case}: {what}: error {error:e}");
        };
        let found: Vec<f64> = plan.steps.iter().map(|step| step.timestep.into()).collect();
        check("timesteps", &found, timesteps);
        check("noised", &plan.noised.map(f64::from), noised[0]);
        let mut sequence: Vec<f64> = samples[0].to_vec();
        for (i, step) in plan.steps.iter().enumerate() {
            let next = |samples: &[f64]| -> Vec<f64> {
                let values = samples.iter().enumerate();
                let states = values.map(|(j, &sample)| {
                    let mut states = [0.0; STATES];
                    states[0] = sample;
                    let more = (offset[j], noise[i * offset.len() + j]);
                    advance(step, false, states, more, |x| x).0[0]
                });
                states.collect()
            };
            check("sample", &next(samples[i]), samples[i + 1]);
            sequence = next(&sequence);
            check("noised", &step.noised.map(f64::from), noised[i + 1]);
        }
        check("the whole sequence", &sequence, samples[steps]);
    }
    assert!(timesteps.is_empty() && samples.is_empty() && noised.is_empty());
}

/// The other samplers of flow matching: Heun's, that of consistency models, and those that are for betas too.
#[test]
fn every_solver_of_flow_matching_is_diffusers() {
    let golden = Golden::read("flow_solvers.safetensors");
    let offset = golden.values("in/model_offset");
    let noise = golden.values("in/variance_noise");
    let (mut timesteps, mut samples, mut sigmas) = (
        golden.values("out/timesteps"),
        golden.values("out/samples"),
        golden.values("out/sigmas"),
    );
    for case in golden.meta["cases"].as_array().unwrap() {
        let mut fields = object(&case["config"]);
        fields.insert("_class_name".to_string(), case["class"].clone());
        let config = SchedulerConfig::from_map(&fields).unwrap();
        assert!(config.is_flow());
        let plan = config.plan(&PlanOptions {
            image_seq_len: case["image_seq_len"].as_u64().map(|n| n as usize),
            flow_levels: FlowLevels::OfTraining,
            ..PlanOptions::new(case["steps"].as_u64().unwrap() as usize)
        });
        let plan = plan.unwrap_or_else(|error| panic!("{case}: {error}"));
        let runs = plan.steps.len();
        let timesteps = take(&mut timesteps, 1, runs)[0];
        let samples = take(&mut samples, runs + 1, offset.len());
        let sigmas = take(&mut sigmas, 1, runs)[0];
        let check = |what: &str, found: &[f64], expected: &[f64]| {
            let error = distance(found, expected);
            assert!(error < TOLERANCE, "{case}: {what}: error {error:e}");
        };
        let found: Vec<f64> = plan.steps.iter().map(|step| step.timestep.into()).collect();
        check("timesteps", &found, timesteps);
        let mut states = vec![[0.0; STATES]; offset.len()];
        for (states, &sample) in states.iter_mut().zip(samples[0]) {
            states[0] = sample;
        }
        let mut noised = plan.noised.map(f64::from);
        for (i, step) in plan.steps.iter().enumerate() {
            check("noised", &noised, &[1.0 - sigmas[i], sigmas[i]]);
            noised = step.noised.map(f64::from);
            for (j, states) in states.iter_mut().enumerate() {
                let values = (offset[j], noise[i * offset.len() + j]);
                (*states, _) = advance(step, false, *states, values, |x| x);
            }
            let sample: Vec<f64> = states.iter().map(|states| states[0]).collect();
            check(&format!("run {i}"), &sample, samples[i + 1]);
        }
        assert_eq!(noised, [1.0, 0.0]);
    }
    assert!(timesteps.is_empty() && samples.is_empty() && sigmas.is_empty());
}

#[test]
fn flow_matching_that_is_not_built_or_has_no_meaning_is_refused() {
    let plan = |fields: Value, tokens: Option<usize>, steps: usize| {
        let mut fields = object(&fields);
        fields.insert("_class_name".to_string(), "flow_match_euler".into());
        SchedulerConfig::from_map(&fields).and_then(|config| {
            config.plan(&PlanOptions {
                image_seq_len: tokens,
                ..PlanOptions::new(steps)
            })
        })
    };
    let dynamic = serde_json::json!({"use_dynamic_shifting": true});
    let equal = serde_json::json!({"use_dynamic_shifting": true, "base_image_seq_len": 4096});
    for (fields, tokens, steps, expected) in [
        (
            serde_json::json!({"invert_sigmas": true}),
            None,
            4,
            "invert_sigmas = true",
        ),
        (serde_json::json!({"shift": 0.0}), None, 4, "a factor of 0"),
        (
            serde_json::json!({"shift_terminal": 0.1}),
            None,
            1,
            "more than one step",
        ),
        (
            serde_json::json!({"shift_terminal": 1.5}),
            None,
            4,
            "shift_terminal = 1.5",
        ),
        (dynamic, None, 4, "tokens is not known"),
        (equal, Some(64), 4, "not above base_image_seq_len"),
        (
            serde_json::json!({}),
            None,
            1001,
            "expected 1 to num_train_timesteps",
        ),
    ] {
        let error = plan(fields, tokens, steps).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // A schedule with betas does not predict the velocity of flow matching, and flow matching has no betas.
    let fields =
        serde_json::json!({"_class_name": "DDIMScheduler", "prediction_type": "flow_prediction"});
    let error = SchedulerConfig::from_map(&object(&fields))
        .unwrap_err()
        .to_string();
    assert!(error.contains("take flow_match_euler"), "{error}");
    for (fields, expected) in [
        (
            serde_json::json!({"use_flow_sigmas": true}),
            "flow_prediction, because",
        ),
        (
            serde_json::json!({"use_flow_sigmas": true, "prediction_type": "flow_prediction", "use_karras_sigmas": true}),
            "choose one",
        ),
        (
            serde_json::json!({"use_flow_sigmas": true, "prediction_type": "flow_prediction", "predict_x0": false}),
            "predict_x0 = false",
        ),
    ] {
        let mut fields = object(&fields);
        fields.insert("_class_name".to_string(), "unipc".into());
        let error = SchedulerConfig::from_map(&fields).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = NoiseSchedule::new(&SchedulerConfig::new(SchedulerKind::FlowMatchEuler));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("a scheduler with betas")
    );
}
