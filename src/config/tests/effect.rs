//! What changes nothing is refused or warned of.

use super::*;

#[test]
fn what_maxdiffusion_ignores_warns_and_what_is_not_here_is_refused() {
    let loaded = load(
        "scale_lr: True\nenable_mllog: False\n",
        &["max_train_samples=-1"],
        None,
    );
    assert_eq!(
        loaded.warnings,
        ["run.yml:1: scale_lr: has no effect: MaxDiffusion ignores it too"]
    );
    assert_eq!(
        errors("", &["scale_lr=True"], None),
        ["command line: scale_lr: has no effect: MaxDiffusion ignores it too"]
    );
    assert_eq!(
        errors("unet_checkpoint: x\nreuse_example_batch: True\n", &[], None),
        [
            "run.yml:1: unet_checkpoint: loading a UNet checkpoint of MaxDiffusion is not here yet: remove the key or set it to ''",
            "run.yml:2: reuse_example_batch: training on one batch over and over is not here yet: remove the key or set it to False",
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
fn derivatives_are_in_int8_with_the_numerics_of_aqt_alone() {
    let words = |numerics: &'static str| {
        [
            "quantization=int8",
            numerics,
            "quantization_convolution_gradients=True",
        ]
    };
    let narrow = words("quantization_numerics=narrow");
    assert_eq!(
        errors("", &narrow, None),
        [
            "command line: quantization_convolution_gradients: has no effect: it needs quantization=int8 and use_qwix_quantization=False and quantization_numerics='' or aqt or quantization=fp8_full"
        ]
    );
    assert!(with(&words("quantization_numerics=aqt")).quantization_convolution_gradients);
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
    assert_eq!(
        errors(
            "dataset_type: tfrecord\ntrain_data_dir: x\n",
            &["shapes_words={circle: ring}"],
            None
        ),
        ["command line: shapes_words: has no effect: it needs dataset_type=shapes"]
    );
    // In a file it is let be: one file serves all verbs. So are features of other verbs.
    load(
        "max_train_steps: 3\nreuse_example_batch: True\nlightning_repo: x\n",
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
            "command line: train_data_dir: has no effect: it needs dataset_type=folder, webdataset, hf or tfrecord",
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
            "dataset_type: tf is a dataset type of MaxDiffusion that is not here yet; supported: shapes, folder, webdataset, hf, tfrecord"
        ]
    );
    assert_eq!(
        errors("dataset_type: folder\n", &[], Some(Verb::Train)),
        [
            "run.yml:1: train_data_dir, dataset_type: dataset_type=folder needs train_data_dir, or several folders in train_data_mix"
        ]
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
            "run.yml:2: unet_config, train_new_unet: unet_config gives an architecture of your own: set train_new_unet=True to start from random weights, name the folder of a run with that architecture by pretrained_model_name_or_path, or leave unet_config out"
        ]
    );
    assert_eq!(
        errors(
            "instance_data_dir: dogs\nwith_prior_preservation: True\n",
            &[],
            Some(Verb::Train)
        ),
        [
            "run.yml:2: with_prior_preservation, class_prompt: prior preservation without class prompt: say what the class is, as in class_prompt='a photo of a dog'"
        ]
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
