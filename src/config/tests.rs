//! Loading: what is accepted, and the messages for what is refused.

use proptest::prelude::*;
use serde_json::json;

use super::condition::Condition;
use super::field::Schema;
use super::key::{Key, Status, Ty};
use super::*;
use crate::schedulers::{PredictionType, SchedulerKind, TimestepSpacing};
use crate::shard::{Axis, LogicalAxisRule};

fn words(overrides: &[&str]) -> Vec<String> {
    overrides.iter().map(|w| (*w).to_owned()).collect()
}

fn load(text: &str, overrides: &[&str], verb: Option<Verb>) -> Loaded {
    Config::from_text("run.yml", text, &words(overrides), verb).unwrap_or_else(|e| panic!("{e}"))
}

fn with(overrides: &[&str]) -> Config {
    load("", overrides, None).config
}

/// The messages of a load that must fail.
fn errors(text: &str, overrides: &[&str], verb: Option<Verb>) -> Vec<String> {
    match Config::from_text("run.yml", text, &words(overrides), verb) {
        Ok(_) => panic!("loaded"),
        Err(errors) => errors.0.iter().map(ToString::to_string).collect(),
    }
}

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
        "quant_rules=[{path: 'mid_block.*', dtype: none}, {path: '.*', dtype: int8}]",
    ]);
    assert_eq!(rules.quant_rules.0[0].dtype, QuantRuleType::None);
    assert_eq!(rules.quant_rules.0[1].path, ".*");
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
    let dict = c.unet_config_json().unwrap();
    assert_eq!(dict["transformer_layers_per_block"], json!([1, 1, 2]));
    assert_eq!(dict["cross_attention_dim"], 2048);
    let file = "train_new_unet: True\nunet_config:\n  in_channels: 3\n";
    let c = load(file, &["unet_config.act_fn=silu"], None).config;
    assert_eq!(
        serde_json::Value::Object(c.unet_config_json().unwrap()),
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
    assert_eq!(c.unet_config_json().unwrap()["in_channels"], 3);
    std::fs::write(folder.path().join("models/u.json"), "[1]").unwrap();
    let message = c.unet_config_json().unwrap_err().to_string();
    assert!(
        message.contains("u.json") && message.contains("unet_config"),
        "{message}"
    );
}

#[test]
fn unknown_keys_have_maxdiffusions_words_and_the_nearest_key() {
    assert_eq!(
        errors(
            "",
            &["lerning_rate=1", "zzz=2", "timestep_bias.strateg=x"],
            None
        ),
        [
            "Key lerning_rate was passed at the command line but isn't in config. Did you mean learning_rate?",
            "Key zzz was passed at the command line but isn't in config.",
            "Key timestep_bias.strateg was passed at the command line but isn't in config. Did you mean timestep_bias.strategy?",
        ]
    );
    assert_eq!(
        errors(
            "seed: 1\nquantisation: int8\ntimestep_bias:\n  portoin: 1\n",
            &[],
            None
        ),
        [
            "run.yml:2: quantisation: no such key; did you mean quantization?",
            "run.yml:4: timestep_bias.portoin: no such key; did you mean portion?",
        ]
    );
}

#[test]
fn wrong_types_name_key_type_value_and_place() {
    let file = "max_train_steps: many\nlearning_rate: [1]\nrun_name: 2024\nadam_eps: 1\nmesh_axes: data\ntimestep_bias: 3\nseed:\n";
    assert_eq!(
        errors(
            file,
            &[
                "log_period=1.5",
                "adam_b1=x",
                "write_metrics=maybe",
                "mesh_axes=[data"
            ],
            None
        ),
        [
            "run.yml:1: max_train_steps: expected integer, found string 'many'",
            "run.yml:2: learning_rate: expected float, found list [1]",
            "run.yml:3: run_name: expected string (quote it), found integer 2024",
            "run.yml:5: mesh_axes: expected list of mesh axes, found string 'data'",
            "run.yml:6: timestep_bias: expected dict, found integer 3",
            "run.yml:7: seed: expected integer, found nothing (null)",
            "command line: mesh_axes: expected list of mesh axes, found '[data' (unclosed bracket '[')",
            "command line: log_period: expected integer, found float 1.5",
            "command line: adam_b1: expected float, found string 'x'",
            "command line: write_metrics: expected boolean, found string 'maybe'",
        ]
    );
}

#[test]
fn non_finite_numbers_are_refused() {
    assert_eq!(
        errors(
            "learning_rate: .inf\n",
            &["adam_eps=nan", "seed=1e400"],
            None
        ),
        [
            "run.yml:1: learning_rate: expected float, found string 'inf'",
            "command line: adam_eps: expected float, found string 'nan'",
            "command line: seed: expected integer, found string '1e400'",
        ]
    );
}

#[test]
fn names_outside_a_set_show_the_set() {
    assert_eq!(
        errors(
            "",
            &["quantization=int9", "use_qwix_quantization=True"],
            None
        ),
        [
            "command line: quantization: 'int9' is not a valid value; valid: '', int8, int8_w8a16; did you mean int8?",
            "command line: use_qwix_quantization: has no effect: it needs quantization=int8 or int8_w8a16"
        ]
    );
    assert_eq!(
        errors(
            "quantization: fp8_full\n",
            &["hardware=gpus", "weights_dtype=float16"],
            None
        ),
        [
            "run.yml:1: quantization: 'fp8_full' is a MaxDiffusion value that is not here yet; valid: '', int8, int8_w8a16",
            "command line: hardware: 'gpus' is not a valid value; valid: auto, cpu, tpu, gpu; did you mean gpu?",
            "command line: weights_dtype: 'float16' is not a valid value; valid: float32, bfloat16; did you mean bfloat16?",
        ]
    );
    assert_eq!(
        errors("mesh_axes: [data, sequence]\n", &[], None),
        [
            "run.yml:1: mesh_axes: 'sequence' is not a valid value; valid: data, fsdp, context, tensor"
        ]
    );
}

#[test]
fn ranges_are_checked() {
    assert_eq!(
        errors(
            "caption_dropout: 1.5\n",
            &[
                "seed=-1",
                "adam_b1=1",
                "ici_fsdp_parallelism=0",
                "per_device_batch_size=0",
                "norm_num_groups=0"
            ],
            None
        ),
        [
            "run.yml:1: caption_dropout: 1.5 is out of range: expected 0 to 1",
            "command line: seed: -1 is out of range: expected at least 0",
            "command line: adam_b1: 1.0 is out of range: expected at least 0 and less than 1",
            "command line: ici_fsdp_parallelism: 0 is out of range: expected -1 or at least 1",
            "command line: per_device_batch_size: 0.0 is out of range: expected more than 0",
            "command line: norm_num_groups: 0 is out of range: expected at least 1",
        ]
    );
}

#[test]
fn the_mesh_takes_one_free_axis_in_a_group() {
    assert_eq!(
        errors("ici_fsdp_parallelism: -1\n", &[], None),
        [
            "run.yml:1: ici_data_parallelism, ici_fsdp_parallelism: more than one -1 among ici_*_parallelism: only one axis can take what the others leave"
        ]
    );
    assert_eq!(errors("", &["dcn_tensor_parallelism=-1"], None).len(), 1);
    load(
        "",
        &["ici_fsdp_parallelism=-1", "ici_data_parallelism=1"],
        None,
    );
    // Files from before the context axis.
    let old = "mesh_axes: [data, fsdp, tensor]\ndata_sharding: [[data, fsdp, tensor]]\n";
    load(old, &[], None);
    assert_eq!(
        errors(old, &["ici_context_parallelism=2"], None),
        [
            "command line: ici_context_parallelism, mesh_axes: ici_context_parallelism is 2 and mesh_axes has no context"
        ]
    );
    assert_eq!(
        errors(
            "mesh_axes: [fsdp, data]\ndata_sharding: [[data]]\n",
            &[],
            None
        )
        .len(),
        5
    );
    assert_eq!(
        errors("data_sharding: [[data, data]]\n", &[], None).len(),
        1
    );
}

#[test]
fn all_errors_come_together_by_line_then_command_line() {
    let text = Config::from_text(
        "run.yml",
        "seed: x\nwarmup_steps_fraction: 2\n",
        &words(&["foo", "quantization=int9"]),
        None,
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        text,
        "4 errors in the configuration:\n  run.yml:1: seed: expected integer, found string 'x'\n  \
         run.yml:2: warmup_steps_fraction: 2.0 is out of range: expected 0 to 1\n  \
         command line: foo: expected key=value\n  \
         command line: quantization: 'int9' is not a valid value; valid: '', int8, int8_w8a16; did you mean int8?"
    );
}

#[test]
fn broken_yaml_has_a_line_and_does_not_hide_the_command_line() {
    let found = errors(
        "seed: 1\nprompt: [a\nresolution: 3\n",
        &["lerning_rate=1"],
        Some(Verb::Train),
    );
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("run.yml:") && found[0].contains("not valid YAML"),
        "{found:?}"
    );
    assert_eq!(
        errors("seed: 1\nseed: 2\n", &[], None),
        ["run.yml:2: seed: given twice with different values (first on line 1); keep one"]
    );
    assert_eq!(
        errors("- a\n", &[], None),
        ["run.yml:1: expected a mapping of keys to values, found list [\"a\"]"]
    );
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let error = Config::load(std::path::Path::new("no/such.yml"), &[], None).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("no/such.yml: cannot read the configuration: "),
        "{text}"
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("big.yml");
    std::fs::write(&file, vec![b'#'; (1 << 20) + 1]).unwrap();
    let text = Config::load(&file, &[], None).unwrap_err().to_string();
    assert!(text.ends_with("larger than 1048576 bytes"), "{text}");
    std::fs::write(&file, b"run_name: \xff\n").unwrap();
    assert!(Config::load(&file, &[], None).is_err());
}

#[test]
fn what_maxdiffusion_ignores_warns_and_what_is_not_here_is_refused() {
    let loaded = load(
        "center_crop: True\nscale_lr: False\n",
        &["random_flip=False"],
        None,
    );
    assert_eq!(
        loaded.warnings,
        ["run.yml:1: center_crop: has no effect: MaxDiffusion ignores it too"]
    );
    assert_eq!(
        errors("", &["random_flip=True"], None),
        ["command line: random_flip: has no effect: MaxDiffusion ignores it too"]
    );
    assert_eq!(
        errors(
            "unet_checkpoint: x\nlightning_repo: x\n",
            &["quantization=fp8"],
            None
        ),
        [
            "run.yml:1: unet_checkpoint: loading a UNet checkpoint of MaxDiffusion is not here yet: remove the key or set it to ''",
            "run.yml:2: lightning_repo: SDXL-Lightning is not here yet: remove the key or set it to ''",
            "command line: quantization: 'fp8' is a MaxDiffusion value that is not here yet; valid: '', int8, int8_w8a16",
        ]
    );
    for (text, expected) in [
        (
            "timestep_bias: {strategy: range, begin: 900, end: 1200}\n",
            "strategy range from 900 up to 1200 is not a range of the 1000 timesteps",
        ),
        ("snr_gamma: 0\n", "0 is neither -1 (off) nor above 0"),
        (
            "loss_weighting: snr_plus_one\n",
            "loss_weighting=snr_plus_one caps the signal-to-noise ratio at snr_gamma",
        ),
    ] {
        let found = errors(text, &[], None).join("\n");
        assert!(found.contains(expected), "{found}");
    }
    assert_eq!(
        load("from_pt: True\n", &[], None).warnings,
        [
            "run.yml:1: from_pt: has no effect: models are read from safetensors, which are the same for PyTorch and Flax"
        ]
    );
    assert_eq!(
        errors("", &["from_pt=True"], None),
        [
            "command line: from_pt: has no effect: models are read from safetensors, which are the same for PyTorch and Flax"
        ]
    );
    // A kernel computes the same function, so a file that names one is still right.
    assert_eq!(
        load("attention: tokamax_flash\n", &[], None).warnings.len(),
        1
    );
    assert_eq!(errors("", &["attention=tokamax_flash"], None).len(), 1);
    assert_eq!(errors("attention: flahs\n", &[], None).len(), 1);
}

#[test]
fn an_override_for_another_verb_is_refused() {
    assert_eq!(
        errors("", &["max_train_steps=3"], Some(Verb::Lower)),
        ["command line: max_train_steps: has no effect on `lower`; it affects train"]
    );
    assert_eq!(
        errors("", &["dcn_data_parallelism=1"], Some(Verb::ModuleRun)),
        [
            "command line: dcn_data_parallelism: has no effect on `module run`; it affects train, generate, compile, lower"
        ]
    );
    // In a file it is let be: one file serves all verbs. So are features of other verbs.
    load(
        "max_train_steps: 3\nlightning_repo: x\n",
        &[],
        Some(Verb::Lower),
    );
    assert_eq!(
        errors(
            "prompt: a\n",
            &["max_grad_norm=2", "train_data_dir=x"],
            None
        ),
        [
            "command line: max_grad_norm: has no effect: it needs opt_enable_grad_global_norm_clipping=True",
            "command line: train_data_dir: has no effect: it needs dataset_type=folder",
        ]
    );
    load(
        "",
        &[
            "max_grad_norm=2",
            "opt_enable_grad_global_norm_clipping=True",
        ],
        None,
    );
}

#[test]
fn what_a_verb_needs_is_asked_for() {
    assert_eq!(
        errors("", &[], Some(Verb::Train)),
        [
            "dataset_type: tf is a dataset type of MaxDiffusion that is not here yet; supported: shapes, folder"
        ]
    );
    assert_eq!(
        errors("dataset_type: folder\n", &[], Some(Verb::Train)),
        ["run.yml:1: train_data_dir, dataset_type: dataset_type=folder needs train_data_dir"]
    );
    assert_eq!(
        errors("", &[], Some(Verb::Generate)),
        ["prompt: there is no prompt: give prompt='...' or a list of prompts"]
    );
    assert_eq!(
        errors(
            "dataset_type: shapes\nunet_config: {in_channels: 3}\n",
            &[],
            Some(Verb::Train)
        ),
        [
            "run.yml:2: unet_config, train_new_unet: unet_config gives a new architecture, which starts from random weights: set train_new_unet=True, or leave unet_config out"
        ]
    );
    assert_eq!(
        errors(
            "dataset_type: shapes\ntrain_text_encoder: True\n",
            &[],
            Some(Verb::Train)
        )
        .len(),
        1
    );
    // A value that was refused brings no second error about what it would have meant.
    assert_eq!(
        errors("dataset_type: foldre\n", &[], Some(Verb::Train)).len(),
        1
    );
    load("", &[], Some(Verb::Lower));
    load("", &[], Some(Verb::ModuleRun));
}

#[test]
fn what_the_sampler_does_not_read_has_no_effect() {
    let karras = "diffusion_scheduler_config.use_karras_sigmas=True";
    let verb = Some(Verb::Generate);
    let found = errors("prompt: x\nscheduler: ddim\n", &[karras], verb);
    assert_eq!(found.len(), 1, "{found:?}");
    let expected = "use_karras_sigmas: has no effect: it needs scheduler=euler, heun,";
    assert!(found[0].contains(expected), "{found:?}");
    // A file may be for several samplers.
    let file =
        "prompt: x\nscheduler: euler\ndiffusion_scheduler_config: {use_karras_sigmas: true}\n";
    assert_eq!(load(file, &[], verb).warnings, [""; 0]);
    let found = load(file, &["scheduler=ddim"], verb).warnings;
    assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
    // Where nothing names the sampler, the model's own files do.
    let unsaid = "prompt: x\ndiffusion_scheduler_config: {_class_name: ''}\n";
    assert_eq!(load(unsaid, &[karras], verb).warnings, [""; 0]);
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
    assert_eq!(
        load(unsaid, &[], None).config.prediction(),
        PredictionType::Epsilon
    );
}

#[test]
fn a_word_given_twice_is_remarked() {
    let loaded = load("", &["seed=1", "seed=2"], None);
    assert_eq!(loaded.config.seed, 2);
    assert_eq!(
        loaded.warnings,
        ["command line: seed: given more than once; the last counts"]
    );
}

#[test]
fn derived_numbers_follow_maxdiffusion() {
    let mut c = Config::default();
    let d = c.derived(32, 2).unwrap();
    assert_eq!(
        (d.total_train_batch_size, d.quantization_local_shard_count),
        (64, 2)
    );
    c.quantization_local_shard_count = 0;
    assert_eq!(c.derived(32, 2).unwrap().quantization_local_shard_count, 0);
    c.quantization_local_shard_count = 4;
    assert_eq!(c.derived(32, 2).unwrap().quantization_local_shard_count, 4);
    c.per_device_batch_size = 0.1;
    assert_eq!(c.derived(30, 1).unwrap().total_train_batch_size, 3);
    assert_eq!(
        c.derived(4, 1).unwrap_err().to_string(),
        "per_device_batch_size: 0.1 for each of 4 devices makes a batch of 0.4: it has to be a whole number above 0"
    );
    assert!(c.derived(0, 1).is_err());
    check_local_shard_count(8, 2).unwrap();
    check_local_shard_count(8, 0).unwrap();
    let message = check_local_shard_count(8, 3).unwrap_err().to_string();
    assert!(
        message.contains("3 parts do not divide the batch of 8"),
        "{message}"
    );
}

#[test]
fn folders_and_sizes() {
    let mut c = Config {
        output_dir: "out".into(),
        run_name: "r".into(),
        ..Config::default()
    };
    assert_eq!(
        c.checkpoint_folder(),
        std::path::Path::new("out/r/checkpoints")
    );
    c.checkpoint_dir = "elsewhere".into();
    assert_eq!(c.checkpoint_folder(), std::path::Path::new("elsewhere"));
}

#[test]
fn explain_says_what_a_key_is() {
    assert_eq!(
        explain("max_grad_norm").unwrap(),
        "max_grad_norm\n  Largest norm of the whole gradient.\n  type     float, more than 0\n  default  1.0\n  \
         affects  train, compile, lower\n  needs    opt_enable_grad_global_norm_clipping=True\n  \
         resume   a run continues only with the same value\n  status   key of MaxDiffusion"
    );
    assert!(
        explain("timestep_bias")
            .unwrap()
            .contains("    strategy (one of none, earlier, later, range; default 'none')")
    );
    assert!(
        explain("diffusion_scheduler_config.beta_start")
            .unwrap()
            .contains("not in MaxDiffusion")
    );
    assert_eq!(
        explain("quantizatoin").unwrap_err(),
        "quantizatoin: no such key; did you mean quantization?"
    );
    assert!(explain("seed.x").unwrap_err().contains("no keys inside"));
    assert_eq!(explain_json("seed").unwrap()["default"], 0);
}

fn all_keys() -> Vec<(String, &'static Key)> {
    let mut all = Vec::new();
    for key in Config::KEYS {
        all.push((key.name.to_owned(), key));
        if let Ty::Dict(inner) = key.ty {
            all.extend(
                inner
                    .iter()
                    .map(|k| (format!("{}.{}", key.name, k.name), k)),
            );
        }
    }
    all
}

#[test]
fn the_schema_is_sound() {
    let mut seen = std::collections::HashSet::new();
    for (path, key) in all_keys() {
        assert!(seen.insert(path.clone()), "{path} declared twice");
        assert!(!key.verbs.is_empty(), "{path} affects nothing");
        assert!(
            key.doc.trim().ends_with('.') || key.doc.contains(':'),
            "{path}: {}",
            key.doc
        );
        if key.status == Status::Ours || key.status == Status::Used {
            continue;
        }
        assert!(
            key.condition.is_none(),
            "{path}: a condition on a key without effect"
        );
    }
}

/// The keys that a condition names, with the values it asks for.
fn named_in(condition: Condition) -> Vec<(&'static str, Vec<&'static str>)> {
    match condition {
        Condition::Is(path, values) => vec![(path, values.to_vec())],
        Condition::IsNot(path, value) => vec![(path, vec![value])],
        Condition::Given(path) | Condition::Positive(path) => vec![(path, Vec::new())],
        Condition::SamplerReads(field) => {
            let readers = SchedulerKind::ALL.iter().filter(|kind| kind.reads(field));
            assert_ne!(readers.count(), 0, "no sampler reads {field}");
            Vec::new()
        }
        Condition::FamilyTakesAestheticScore => vec![("model_family", Vec::new())],
        Condition::Both(a, b) | Condition::Either(a, b) => [named_in(*a), named_in(*b)].concat(),
    }
}

fn accepts(ty: Ty, value: &str) -> bool {
    match ty {
        Ty::Choice(names) => names.contains(&value),
        Ty::Optional(inner) => value.is_empty() || accepts(*inner, value),
        Ty::Bool => ["True", "False"].contains(&value),
        _ => false,
    }
}

#[test]
fn conditions_name_keys_and_values_that_there_are() {
    let all = all_keys();
    for (path, key) in &all {
        for (needed, values) in key.condition.map(named_in).unwrap_or_default() {
            let found = all.iter().find(|(path, _)| path == needed);
            let (_, needed) = found.unwrap_or_else(|| panic!("{path} needs {needed}"));
            for value in values {
                assert!(
                    accepts(needed.ty, value),
                    "{path} needs {}={value}",
                    needed.name
                );
            }
        }
    }
}

#[test]
fn what_is_shown_loads_again() {
    let c = with(&[
        "prompt=['a','b']",
        "quantization=int8",
        "quant_rules=[{path: x, dtype: none}]",
        "unet_config.dropout=0",
    ]);
    // JSON is YAML.
    assert_eq!(load(&c.to_json().to_string(), &[], None).config, c);
}

fn key_name() -> impl Strategy<Value = String> {
    let names: Vec<String> = all_keys().into_iter().map(|(path, _)| path).collect();
    prop_oneof![
        4 => proptest::sample::select(names),
        1 => "[a-z_.]{0,20}",
    ]
}

fn value_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|v| v.to_string()),
        any::<f64>().prop_map(|v| format!("{v:e}")),
        r#"[\[\]{}'",:a-z0-9 .-]{0,30}"#,
        any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_command_line_panics(
        named in proptest::collection::vec((key_name(), value_text()), 0..4),
        free in proptest::collection::vec(any::<String>(), 0..2),
        verb in proptest::option::of(proptest::sample::select(&Verb::ALL[..])),
    ) {
        let mut overrides: Vec<String> = named.into_iter().map(|(k, v)| format!("{k}={v}")).collect();
        overrides.extend(free);
        match Config::from_text("run.yml", "timestep_bias: {begin: 1}\n", &overrides, verb) {
            // What was accepted says itself again, but for the secret.
            Ok(mut loaded) => {
                if !loaded.config.hf_access_token.is_empty() {
                    loaded.config.hf_access_token = "(not shown)".into();
                }
                let shown = loaded.config.to_json().to_string();
                let again = Config::from_text("run.yml", &shown, &[], verb).unwrap();
                prop_assert_eq!(again.config, loaded.config);
            }
            Err(errors) => prop_assert!(!errors.0.is_empty() && !errors.to_string().is_empty()),
        }
    }

    #[test]
    fn no_file_panics(text in any::<String>(), lines in proptest::collection::vec((key_name(), value_text()), 0..4)) {
        let _ = Config::from_text("run.yml", &text, &[], None);
        let text: String = lines.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        let _ = Config::from_text("run.yml", &text, &[], Some(Verb::Train));
    }
}
