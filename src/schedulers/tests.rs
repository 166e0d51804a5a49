//! Properties of the plans themselves; tests/schedulers.rs compares them with diffusers.

use serde_json::{Map, Value, json};

use super::*;

fn sd(kind: SchedulerKind) -> SchedulerConfig {
    SchedulerConfig::stable_diffusion(kind)
}

fn fields(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn read(value: Value) -> Result<SchedulerConfig, SchedulerError> {
    SchedulerConfig::from_map(&fields(value))
}

const SDXL: &str = r#"{"_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.19.0.dev0",
    "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false,
    "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon",
    "sample_max_value": 1.0, "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1,
    "timestep_spacing": "leading", "trained_betas": null, "use_karras_sigmas": false}"#;

#[test]
fn any_sampler_is_made_from_sdxls_configuration() {
    let mut fields = scheduler_fields(SDXL).unwrap();
    for kind in SchedulerKind::ALL {
        fields.insert("_class_name".to_string(), json!(kind.class_name()));
        let config = SchedulerConfig::from_map(&fields).unwrap();
        let plan = config.plan(&PlanOptions::new(4)).unwrap();
        assert!(plan.steps.len() >= 4, "{kind:?}");
    }
    let config = SchedulerConfig::from_map(&scheduler_fields(SDXL).unwrap()).unwrap();
    assert_eq!(config.beta_schedule, BetaSchedule::ScaledLinear);
    assert_eq!(config.timestep_spacing, TimestepSpacing::Leading);
}

#[test]
fn defaults_are_those_of_the_class() {
    let class = |name: &str| read(json!({"_class_name": name, "skip_prk_steps": true})).unwrap();
    let ddim = class("DDIMScheduler");
    assert_eq!((ddim.beta_start, ddim.clip_sample), (0.0001, true));
    assert_eq!(ddim.timestep_spacing, TimestepSpacing::Leading);
    let euler = class("EulerDiscreteScheduler");
    assert_eq!(euler.timestep_spacing, TimestepSpacing::Linspace);
    let lcm = class("LCMScheduler");
    assert_eq!(lcm.beta_schedule, BetaSchedule::ScaledLinear);
    assert!(!lcm.clip_sample && !class("PNDMScheduler").set_alpha_to_one);
    assert_eq!(
        class("FlaxDDIMScheduler"),
        SchedulerConfig::new(SchedulerKind::Ddim)
    );
}

/// As diffusers does: a class takes the fields that it has.
#[test]
fn fields_of_other_classes_null_and_private_ones_are_dropped() {
    let config = read(json!({
        "_class_name": "EulerDiscreteScheduler", "_anything": [1], "prediction_type": null, "clip_sample": true,
        "thresholding": true, "solver_order": 9, "variance_type": "learned", "sigma_min": null, "unheard_of": {}
    }));
    assert_eq!(config.unwrap(), SchedulerConfig::new(SchedulerKind::Euler));
}

#[test]
fn solver_types_of_other_solvers_mean_the_default() {
    let read = |class: &str, solver: &str| {
        let config = read(json!({"_class_name": class, "solver_type": solver})).unwrap();
        config.plan(&PlanOptions::new(5)).unwrap()
    };
    let dpm = |solver| read("DPMSolverMultistepScheduler", solver);
    assert_eq!(dpm("bh2"), dpm("midpoint"));
    assert_ne!(dpm("heun"), dpm("midpoint"));
    let unipc = |solver| read("UniPCMultistepScheduler", solver);
    assert_eq!(unipc("midpoint"), unipc("bh2"));
    assert_ne!(unipc("bh1"), unipc("bh2"));
}

#[test]
fn pythons_infinity_is_the_default() {
    let text = r#"{"_class_name": "DPMSolverMultistepScheduler", "lambda_min_clipped": -Infinity,
        "note": "a \" quote and NaN -Infinity", "sigma_max": NaN}"#;
    let fields = scheduler_fields(text).unwrap();
    assert_eq!(fields["lambda_min_clipped"], Value::Null);
    assert_eq!(fields["sigma_max"], Value::Null);
    assert_eq!(fields["note"], "a \" quote and NaN -Infinity");
    let config = SchedulerConfig::from_map(&fields).unwrap();
    assert_eq!(config, SchedulerConfig::new(SchedulerKind::DpmMultistep));
    for text in ["[]", "{\"a\": Infinit}", "{\"a\": \"", ""] {
        assert!(scheduler_fields(text).is_err(), "{text}");
    }
}

#[test]
fn unknown_classes_are_told_the_known_ones() {
    for class in [json!("DEISMultistepScheduler"), json!(7), Value::Null] {
        let error = read(json!({"_class_name": class})).unwrap_err().to_string();
        assert!(error.contains("_class_name"), "{error}");
        for kind in SchedulerKind::ALL {
            assert!(error.contains(kind.class_name()), "{error}");
        }
    }
    assert!(read(json!({})).is_err());
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    for (class, field, value) in [
        ("DDIMScheduler", "thresholding", json!(true)),
        ("DDIMScheduler", "clip_sample_range", json!(2.0)),
        ("DDPMScheduler", "variance_type", json!("learned_range")),
        ("DDPMScheduler", "beta_schedule", json!("sigmoid")),
        ("PNDMScheduler", "skip_prk_steps", json!(false)),
        ("EulerDiscreteScheduler", "trained_betas", json!([0.1])),
        (
            "EulerDiscreteScheduler",
            "interpolation_type",
            json!("log_linear"),
        ),
        (
            "EulerDiscreteScheduler",
            "num_train_timesteps",
            json!("many"),
        ),
        ("LMSDiscreteScheduler", "prediction_type", json!("flow")),
        ("DPMSolverMultistepScheduler", "use_lu_lambdas", json!(true)),
        (
            "DPMSolverMultistepScheduler",
            "lambda_min_clipped",
            json!(-5.1),
        ),
        (
            "DPMSolverMultistepScheduler",
            "algorithm_type",
            json!("dpmsolver"),
        ),
        (
            "DPMSolverMultistepScheduler",
            "variance_type",
            json!("learned"),
        ),
        ("UniPCMultistepScheduler", "solver_p", json!({})),
        ("UniPCMultistepScheduler", "disable_corrector", json!([-1])),
    ] {
        let error = read(json!({"_class_name": class, field: value}))
            .unwrap_err()
            .to_string();
        let start = format!("scheduler: {field} = {value} is not supported; expected ");
        assert!(error.starts_with(&start), "{error}");
    }
    let error = read(json!({"_class_name": "PNDMScheduler"})).unwrap_err();
    assert!(error.to_string().contains("skip_prk_steps"), "{error}");
    let error = read(json!({
        "_class_name": "HeunDiscreteScheduler", "use_karras_sigmas": true, "use_beta_sigmas": true
    }));
    assert!(error.unwrap_err().to_string().contains("choose one"));
}

#[test]
fn plans_that_cannot_be_made_say_why() {
    let error = |config: &SchedulerConfig, options: PlanOptions| {
        config.plan(&options).unwrap_err().to_string()
    };
    for kind in SchedulerKind::ALL {
        for steps in [0, 1001] {
            let error = error(&sd(kind), PlanOptions::new(steps));
            assert!(
                error.contains(&format!("{steps} inference steps")),
                "{error}"
            );
        }
        let options = PlanOptions {
            start: Start::Strength(0.05),
            ..PlanOptions::new(10)
        };
        // PNDM has one run more than steps, which is left, and flow matching takes the step that is cut.
        if kind != SchedulerKind::Pndm && !kind.is_flow() {
            let error = error(&sd(kind), options);
            assert!(error.contains("none of 10 steps"), "{error}");
        }
    }
    for kind in [
        SchedulerKind::EulerAncestral,
        SchedulerKind::Kdpm2,
        SchedulerKind::Kdpm2Ancestral,
        SchedulerKind::Pndm,
    ] {
        let config = SchedulerConfig {
            prediction_type: PredictionType::Sample,
            ..sd(kind)
        };
        let error = error(&config, PlanOptions::new(4));
        assert!(error.contains("prediction_type = sample"), "{error}");
    }
    for kind in [
        SchedulerKind::DpmMultistep,
        SchedulerKind::DpmSinglestep,
        SchedulerKind::UniPc,
    ] {
        let config = SchedulerConfig {
            solver_order: 4,
            ..sd(kind)
        };
        let error = error(&config, PlanOptions::new(4));
        assert!(error.contains("solver_order = 4"), "{error}");
    }
    for kind in [SchedulerKind::Ddim, SchedulerKind::Tcd] {
        let options = PlanOptions {
            eta: 1.5,
            ..PlanOptions::new(4)
        };
        assert!(error(&sd(kind), options).contains("eta = 1.5"));
    }
    let config = SchedulerConfig {
        lower_order_final: false,
        ..sd(SchedulerKind::UniPc)
    };
    assert!(error(&config, PlanOptions::new(4)).contains("lower_order_final"));
    for original_inference_steps in [0, 1001] {
        let config = SchedulerConfig {
            original_inference_steps,
            ..sd(SchedulerKind::Lcm)
        };
        assert!(error(&config, PlanOptions::new(4)).contains("original_inference_steps"));
    }
    let config = SchedulerConfig {
        use_karras_sigmas: true,
        sigma_min: Some(-1.0),
        ..sd(SchedulerKind::Euler)
    };
    assert!(error(&config, PlanOptions::new(4)).contains("sigma_min = -1"));
    let error = error(&sd(SchedulerKind::Lcm), PlanOptions::new(51));
    assert!(error.contains("original_inference_steps = 50"), "{error}");
}

#[test]
fn timesteps_that_a_formula_divides_by_are_refused() {
    let no_noise = SchedulerConfig {
        beta_start: 0.0,
        prediction_type: PredictionType::Sample,
        timestep_spacing: TimestepSpacing::Linspace,
        ..sd(SchedulerKind::Ddim)
    };
    let error = no_noise.plan(&PlanOptions::new(10)).unwrap_err();
    assert!(error.to_string().contains("timestep 0 divides"), "{error}");
    for kind in [SchedulerKind::Ddim, SchedulerKind::Ddpm] {
        let no_signal = SchedulerConfig {
            rescale_betas_zero_snr: true,
            timestep_spacing: TimestepSpacing::Trailing,
            ..sd(kind)
        };
        let error = no_signal.plan(&PlanOptions::new(10)).unwrap_err();
        assert!(error.to_string().contains("use v_prediction"), "{error}");
        let velocity = SchedulerConfig {
            prediction_type: PredictionType::VPrediction,
            ..no_signal
        };
        assert!(velocity.plan(&PlanOptions::new(10)).is_ok());
    }
    // As many steps as training has leave no room between them.
    let crowded = sd(SchedulerKind::DpmMultistep).plan(&PlanOptions::new(1000));
    let error = crowded.unwrap_err().to_string();
    assert!(error.contains("the same noise level"), "{error}");
}

#[test]
fn the_first_sigma_is_stable_diffusions() {
    for kind in [SchedulerKind::Euler, SchedulerKind::Lms] {
        let config = SchedulerConfig {
            timestep_spacing: TimestepSpacing::Linspace,
            ..sd(kind)
        };
        let plan = config.plan(&PlanOptions::new(30)).unwrap();
        // 14.6146, the sigma_max of Stable Diffusion in k-diffusion.
        let sigma = plan.init_noise_sigma;
        assert!((sigma - 14.6146).abs() < 1e-4, "{sigma}");
        assert_eq!(plan.steps[29].timestep, 0.0);
    }
}

/// A value made of the clean image, of the first noise and of the noise of each run.
type Mix = Vec<f64>;

/// Every configuration that a perfect model is tried with.
fn configurations() -> Vec<SchedulerConfig> {
    let mut configs = Vec::new();
    for kind in SchedulerKind::ALL {
        let config = SchedulerConfig {
            set_alpha_to_one: true,
            ..sd(kind)
        };
        for use_karras_sigmas in [false, true] {
            configs.push(SchedulerConfig {
                use_karras_sigmas,
                ..config.clone()
            });
        }
        for solver_order in [1, 3] {
            configs.push(SchedulerConfig {
                solver_order,
                solver_type: SolverType::Heun,
                algorithm_type: AlgorithmType::SdeDpmSolverPlusPlus,
                predict_x0: false,
                timestep_spacing: TimestepSpacing::Trailing,
                final_sigmas_type: FinalSigmas::Zero,
                ..config.clone()
            });
        }
    }
    configs
}

/// With the right prediction every sample has the image and the noise of its level: what a plan says of them for
/// image-to-image and inpainting, and what clipping and previews take for the clean sample.
#[test]
fn a_perfect_model_finds_the_image_and_keeps_the_level_of_noise() {
    for config in configurations() {
        let predictions = match config.kind.is_flow() {
            true => &[PredictionType::FlowPrediction][..],
            false => &[
                PredictionType::Epsilon,
                PredictionType::VPrediction,
                PredictionType::Sample,
            ],
        };
        for &prediction_type in predictions {
            let config = SchedulerConfig {
                prediction_type,
                ..config.clone()
            };
            if config.plan(&PlanOptions::new(8)).is_err() {
                assert_eq!(prediction_type, PredictionType::Sample);
                continue;
            }
            for strength in [1.0, 0.6] {
                // PNDM combines velocities of different timesteps, and in the middle tells the model another timestep.
                let exact = strength == 1.0 && prediction_type == PredictionType::Epsilon;
                if config.kind != SchedulerKind::Pndm || exact {
                    check_perfect_model(&config, strength);
                }
            }
        }
    }
}

fn check_perfect_model(config: &SchedulerConfig, strength: f64) {
    let options = PlanOptions {
        start: Start::Strength(strength),
        eta: 0.7,
        ..PlanOptions::new(8)
    };
    let plan = config.plan(&options).unwrap();
    let combine = |terms: &[(f64, &Mix)]| -> Mix {
        (0..plan.steps.len() + 2)
            .map(|i| terms.iter().map(|(factor, mix)| factor * mix[i]).sum())
            .collect()
    };
    let unit = |i: usize| -> Mix {
        (0..plan.steps.len() + 2)
            .map(|k| f64::from(k == i))
            .collect()
    };
    let image = unit(0);
    let mut states = vec![combine(&[]); STATES];
    let mut level = plan.noised.map(f64::from);
    states[0] = combine(&[(level[0], &image), (level[1], &unit(1))]);
    for (run, step) in plan.steps.iter().enumerate() {
        let (signal, deviation) = (level[0], level[1]);
        let noise = combine(&[(1.0 / deviation, &states[0]), (-signal / deviation, &image)]);
        let size = signal.hypot(deviation);
        let output = match config.prediction_type {
            PredictionType::Epsilon => noise,
            PredictionType::Sample => image.clone(),
            PredictionType::VPrediction => {
                combine(&[(signal / size, &noise), (-deviation / size, &image)])
            }
            PredictionType::FlowPrediction => combine(&[(1.0, &noise), (-1.0, &image)]),
        };
        let clean = step.clean.map(f64::from);
        let clean = combine(&[(clean[0], &states[0]), (clean[1], &output)]);
        let fresh = unit(2 + run);
        states = (0..STATES)
            .map(|state| {
                let row = step.update[state].map(f64::from);
                let mut terms: Vec<(f64, &Mix)> = row.into_iter().zip(&states).collect();
                terms.push((row[OUTPUT], &output));
                terms.push((row[NOISE], &fresh));
                combine(&terms)
            })
            .collect();
        level = step.noised.map(f64::from);
        if config.kind == SchedulerKind::Tcd && level == [1.0, 0.0] {
            // It ends at the first timestep of training.
            let (signal, deviation) = NoiseSchedule::new(config)
                .unwrap()
                .noise_coefficients(0)
                .unwrap();
            level = [signal, deviation].map(f64::from);
        }
        let of_noise = states[0][1..].iter().map(|c| c * c).sum::<f64>().sqrt();
        // Coefficients up to 15 are rounded to f32, and LCM leaves (1 / 20 t)^2 of the sample in its clean one.
        let near = |found: f64, expected: f64| (found - expected).abs() < 1e-5 * size.max(1.0);
        assert!(
            near(clean[0], 1.0) && clean[1..].iter().all(|&c| near(c, 0.0)),
            "{config:?} {strength}: run {run} predicts {clean:?}"
        );
        assert!(
            near(states[0][0], level[0]) && near(of_noise, level[1]),
            "{config:?} {strength}: run {run} makes {:?}, of {level:?}",
            states[0]
        );
    }
}

#[test]
fn every_sampler_has_the_name_of_a_class() {
    for kind in SchedulerKind::ALL {
        let class = kind.class_name();
        assert!(class.ends_with("Scheduler"), "{kind}: {class}");
        assert!(!class.starts_with("Flax"), "{kind}: {class}");
    }
}
