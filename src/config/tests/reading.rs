//! Files and overrides become values.

use serde_json::json;

use super::*;
use crate::quant::ObserverKind;
use crate::schedulers::{PredictionType, SchedulerKind, TimestepSpacing};
use crate::shard::{Axis, LogicalAxisRule};

#[test]
fn an_empty_file_is_the_defaults() {
    let loaded = load("", &[], None);
    assert_eq!(loaded.warnings, [""; 0]);
    // The short keys repeat what the dict says.
    let expected = Config {
        scheduler: Some(SchedulerKind::Euler),
        prediction_type: Some(PredictionType::Epsilon),
        ..Config::default()
    };
    assert_eq!(loaded.config, expected);
}

#[test]
fn overrides_are_typed_by_the_schema() {
    let c = with(&[
        "per_device_batch_size=4",
        "learning_rate=1e-5",
        "max_train_steps=1e3",
        "adam_eps=1",
        "write_metrics=FALSE",
        "run_name=010",
        "log_period=10_000",
        "prompt=[\"a\", 'b']",
        "negative_prompt=",
    ]);
    assert_eq!(c.per_device_batch_size, 4.0);
    assert_eq!(c.learning_rate, 1e-5);
    assert_eq!(c.max_train_steps, 1000);
    assert_eq!(c.adam_eps, 1.0);
    assert!(!c.write_metrics);
    assert_eq!(c.run_name, "010");
    assert_eq!(c.log_period, 10_000);
    assert_eq!(c.prompt.0, ["a", "b"]);
    assert_eq!(
        with(&["per_device_batch_size=0.5"]).per_device_batch_size,
        0.5
    );
    // What only looks like a list is a prompt, and an equals sign may stand in a value.
    assert_eq!(with(&["prompt=[a] b=c"]).prompt.0, ["[a] b=c"]);
    for prompt in ["[a cat]", "[a, b]", "['a', b]", "['a'] b", "[red:blue:0.5]"] {
        assert_eq!(with(&[&format!("prompt={prompt}")]).prompt.0, [prompt]);
    }
    assert_eq!(
        with(&[r#"prompt=[ 'it''s', "a \"b\"", ]"#]).prompt.0,
        ["it's", "a \"b\""]
    );
    assert_eq!(with(&["prompt="]).prompt.0, [""]);
    let drawn = with(&["seed=-1"]).seed;
    assert!(drawn != with(&["seed=-1"]).seed && drawn.0 <= u64::from(u32::MAX));
    assert_eq!(with(&["norm_num_groups=None"]).norm_num_groups, None);
}

#[test]
fn lists_come_as_json_or_python() {
    let python = with(&["logical_axis_rules=[['batch', ['data','fsdp']], ['heads', None]]"]);
    let json = with(&[r#"logical_axis_rules=[["batch", ["data","fsdp"]], ["heads", null]]"#]);
    assert_eq!(python, json);
    assert_eq!(
        json.logical_axis_rules.0,
        [
            LogicalAxisRule::new("batch", &[Axis::Data, Axis::Fsdp]),
            LogicalAxisRule::new("heads", &[]),
        ]
    );
    let rules = with(&[
        "quantization=int8",
        "quant_rules=[{path: 'mid_block.*', mode: none}, {path: '.*', mode: int8}]",
    ]);
    assert_eq!(rules.quant_rules.0[0].mode, QuantRuleMode::None);
    assert_eq!(rules.quant_rules.0[1].path, ".*");
}

#[test]
fn rules_say_how_weights_are_rounded() {
    let rules = with(&[
        "quantization=w4a16",
        "quant_rules=[{path: 'mid.*', mode: w4a16, observer: mse, algorithm: hqq}, {path: '.*', mode: int8_w8a16}]",
    ]);
    let rules = rules.quant_rules;
    assert_eq!(rules.0[0].observer, Some(ObserverKind::Mse));
    assert_eq!(rules.0[0].algorithm, Some(WeightAlgorithm::Hqq));
    assert!(rules.0[0].says_rounding() && !rules.0[1].says_rounding());
    assert_eq!(
        rules.to_yaml(),
        "- {path: 'mid.*', mode: w4a16, observer: mse, algorithm: hqq}\n- {path: '.*', mode: int8_w8a16}\n"
    );
    for (key, expected) in [
        (
            "observer: median",
            "command line: quant_rules.observer: 'median' is not a valid value; valid: min_max, percentile",
        ),
        (
            "algorithm: gtpq",
            "command line: quant_rules.algorithm: 'gtpq' is not a valid value; valid: nearest, gptq, awq, hqq",
        ),
    ] {
        let rule = format!("quant_rules=[{{path: 'mid.*', mode: w4a16, {key}}}]");
        let found = errors("", &["quantization=w4a16", &rule], None);
        assert!(found[0].starts_with(expected), "{found:?}");
    }
}

#[test]
fn dicts_are_merged_and_dots_reach_inside() {
    let file = "diffusion_scheduler_config: {timestep_spacing: leading, beta_start: 0.001}\n";
    let c = load(
        file,
        &[
            r#"diffusion_scheduler_config={"clip_sample": true}"#,
            "diffusion_scheduler_config.prediction_type=v_prediction",
            "diffusion_scheduler_config.beta_end=1",
        ],
        None,
    )
    .config;
    let s = &c.diffusion_scheduler_config;
    assert_eq!(s.timestep_spacing, Some(TimestepSpacing::Leading));
    assert_eq!(s.beta_start, 0.001);
    assert!(s.clip_sample);
    assert_eq!(c.prediction(), PredictionType::VPrediction);
    assert_eq!(s.beta_end, 1.0);
    assert_eq!(s.num_train_timesteps, 1000);
}

#[test]
fn a_part_of_unet_config_changes_the_chosen_model() {
    let c = with(&[
        "unet_config.transformer_layers_per_block=[1, 1, 2]",
        "pretrained_model_name_or_path=stabilityai/stable-diffusion-xl-base-1.0",
    ]);
    let dict = c.denoiser_config_json().unwrap();
    assert_eq!(dict["transformer_layers_per_block"], json!([1, 1, 2]));
    assert_eq!(dict["cross_attention_dim"], 2048);
    let file = "train_new_unet: True\nunet_config:\n  in_channels: 3\n";
    let c = load(file, &["unet_config.act_fn=silu"], None).config;
    assert_eq!(
        serde_json::Value::Object(c.denoiser_config_json().unwrap()),
        json!({"in_channels": 3, "act_fn": "silu"})
    );
    assert_eq!(
        errors(
            "unet_config: a/unet.json\n",
            &["unet_config.in_channels=3"],
            None
        ),
        [
            "command line: unet_config.in_channels: unet_config is the file a/unet.json: change it there, or write the dict in the configuration"
        ]
    );
    assert_eq!(
        errors("", &["text_encoder_config.hidden_size=3"], None),
        [
            "command line: text_encoder_config.hidden_size: there is no text_encoder_config to change a part of: write the dict in the configuration"
        ]
    );
    assert_eq!(
        errors("unet_config: {block_out_chanels: [1]}\n", &[], None),
        ["run.yml:1: unet_config.block_out_chanels: no such key; did you mean block_out_channels?"]
    );
}

#[test]
fn a_model_file_counts_from_the_configuration_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("models")).unwrap();
    std::fs::write(folder.path().join("models/u.json"), r#"{"in_channels": 3}"#).unwrap();
    let file = folder.path().join("run.yml");
    std::fs::write(&file, "unet_config: models/u.json\n").unwrap();
    let c = Config::load(&file, &[], None).unwrap().config;
    assert_eq!(c.denoiser_config_json().unwrap()["in_channels"], 3);
    std::fs::write(folder.path().join("models/u.json"), "[1]").unwrap();
    let message = c.denoiser_config_json().unwrap_err().to_string();
    assert!(
        message.contains("u.json") && message.contains("unet_config"),
        "{message}"
    );
}

#[test]
fn short_and_long_keys_agree() {
    let file = "diffusion_scheduler_config: {_class_name: FlaxEulerDiscreteScheduler}\n";
    let c = load(file, &["scheduler=ddim"], None).config;
    assert_eq!(c.sampler(), SchedulerKind::Ddim);
    assert_eq!(
        c.diffusion_scheduler_config._class_name,
        Some(SchedulerKind::Ddim)
    );
    let c = load(
        "scheduler: ddim\n",
        &["diffusion_scheduler_config._class_name=EulerDiscreteScheduler"],
        None,
    )
    .config;
    assert_eq!(c.scheduler, Some(SchedulerKind::Euler));
    assert_eq!(
        errors(&format!("{file}scheduler: ddim\n"), &[], None),
        [
            "run.yml:2: scheduler: ddim here and euler in diffusion_scheduler_config._class_name: give it once"
        ]
    );
    // Nothing said: as the model does.
    let unsaid = "diffusion_scheduler_config: {_class_name: '', prediction_type: ''}\n";
    let c = load(
        unsaid,
        &["pretrained_model_name_or_path=stabilityai/stable-diffusion-2-1"],
        None,
    )
    .config;
    assert_eq!(
        (c.sampler(), c.prediction()),
        (SchedulerKind::Ddim, PredictionType::VPrediction)
    );
    // One architecture, and another prediction.
    for word in [
        &[][..],
        &["pretrained_model_name_or_path=stabilityai/stable-diffusion-2-base"],
    ] {
        let prediction = load(unsaid, word, None).config.prediction();
        assert_eq!(prediction, PredictionType::Epsilon);
    }
}

#[test]
fn a_word_given_twice_is_remarked() {
    let loaded = load("", &["seed=1", "seed=2"], None);
    assert_eq!(loaded.config.seed.0, 2);
    assert_eq!(
        loaded.warnings,
        ["command line: seed: given more than once; the last counts"]
    );
}

#[test]
fn samplers_have_the_names_of_other_programs() {
    let karras = |c: &Config| (c.scheduler, c.diffusion_scheduler_config.use_karras_sigmas);
    let named = (Some(SchedulerKind::DpmMultistep), true);
    assert_eq!(karras(&with(&["scheduler=DPM++ 2M Karras"])), named);
    let file = "scheduler: dpmpp_2m_karras\ndiffusion_scheduler_config: {_class_name: '', solver_order: 3}\n";
    let c = load(file, &[], None).config;
    assert_eq!(karras(&c), named);
    assert_eq!(c.diffusion_scheduler_config.solver_order, 3);
    let own = "diffusion_scheduler_config.use_karras_sigmas=False";
    let c = with(&["scheduler=dpm++ 2m karras", own]);
    assert!(!c.diffusion_scheduler_config.use_karras_sigmas);
    let file = "diffusion_scheduler_config: {_class_name: FlaxPNDMScheduler}\n";
    let c = load(file, &[], None).config;
    assert_eq!(c.sampler(), SchedulerKind::Pndm);
    assert!(c.diffusion_scheduler_config.skip_prk_steps);
}
