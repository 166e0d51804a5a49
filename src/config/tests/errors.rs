//! What is wrong is named, with its place.

use super::*;

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
            "command line: quantization: 'int9' is not a valid value; valid: '', int8, int8_w8a16, w4a16, fp8, fp8_full, fp8_w8a16, nf4, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, int8_w8a8_static, fp8_w8a8_static, svdquant_w4a16, w4a4, svdquant_w4a4; did you mean int8?",
            "command line: use_qwix_quantization: has no effect: it needs quantization=int8, int8_w8a16, w4a16, fp8, fp8_full, fp8_w8a16, nf4, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, int8_w8a8_static, fp8_w8a8_static, svdquant_w4a16, w4a4 or svdquant_w4a4"
        ]
    );
    assert_eq!(
        errors("hardware: gpus\n", &["weights_dtype=float16"], None),
        [
            "run.yml:1: hardware: 'gpus' is not a valid value; valid: auto, cpu, tpu, gpu; did you mean gpu?",
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
                "seed=-2",
                "adam_b1=1",
                "ici_fsdp_parallelism=0",
                "per_device_batch_size=0",
                "norm_num_groups=0"
            ],
            None
        ),
        [
            "run.yml:1: caption_dropout: 1.5 is out of range: expected 0 to 1",
            "command line: seed: -2 is out of range: expected at least 0",
            "command line: adam_b1: 1.0 is out of range: expected at least 0 and less than 1",
            "command line: ici_fsdp_parallelism: 0 is out of range: expected -1 or 1 to 65536",
            "command line: per_device_batch_size: 0.0 is out of range: expected more than 0, at most 65536",
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
         command line: quantization: 'int9' is not a valid value; valid: '', int8, int8_w8a16, w4a16, fp8, fp8_full, fp8_w8a16, nf4, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, int8_w8a8_static, fp8_w8a8_static, svdquant_w4a16, w4a4, svdquant_w4a4; did you mean int8?"
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
fn a_recipe_of_a_family_that_is_not_here_has_one_error() {
    // The keys and values by which MaxDiffusion's recipes tell their families.
    for (sign, family) in [
        ("model_name: wan2.2", "Wan"),
        ("model_name: \"ltx2.3\"", "LTX-2"),
        ("model_name: ltx2_video", "LTX-2"),
        (
            "pretrained_model_name_or_path: 'Lightricks/LTX-Video'",
            "LTX-Video",
        ),
        ("pretrained_model_name_or_path: 'Lightricks/LTX-2'", "LTX-2"),
        ("model_name: z_image", "Z-Image"),
        ("flux_name: flux2klein_9B", "FLUX.2"),
        (
            "pretrained_model_name_or_path: black-forest-labs/FLUX.1-Kontext-dev",
            "FLUX.1 Kontext",
        ),
    ] {
        let found = errors(&format!("frame_rate: 30\n{sign}\n"), &["zzz=1"], None);
        assert_eq!(found.len(), 1, "{found:?}");
        let key = sign.split(':').next().unwrap();
        assert!(
            found[0].starts_with(&format!("run.yml:2: {key}: ")),
            "{found:?}"
        );
        let expected =
            format!(" is {family}, which is not here yet; supported are Stable Diffusion 1.x, ");
        assert!(found[0].contains(&expected), "{found:?}");
    }
}
