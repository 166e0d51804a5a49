//! Training whose forward pass rounds with learned scales or with moving ranges, and the checkpoints that come out of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{Golden, distance, json, keep_programs, program, without_optimizations};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Granularity, NumericsConvention, TensorFormat, evaluate, grad};
use maxdiff::quant::fake_quantize;
use maxdiff::shape::Shape;
use maxdiff::weights::Checkpoint;

/// The recorded quantizer of the paper and its gradients, of which those of the scale are sums of 32 to 192 terms.
#[test]
fn learned_scales_have_the_gradients_of_the_paper() {
    let golden = Golden::read("quant_lsq.safetensors");
    let cases = golden.meta["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 4);
    for (case, ends) in cases {
        let [lowest, highest] = [0, 1].map(|at| ends[at].as_f64().unwrap());
        let name = |what: &str, of: &str| format!("{what}/{case}/{of}");
        let scale_dims = golden.dims(&name("in", "scale"));
        let format = TensorFormat {
            element: if highest > 100.0 {
                DType::S8
            } else {
                DType::S4
            },
            granularity: match scale_dims.len() {
                0 => Granularity::Tensor,
                1 => Granularity::Channel,
                _ => Granularity::Group(8),
            },
            ..TensorFormat::int8(NumericsConvention::Quark)
        };
        assert_eq!(format.ends(), [lowest, highest]);
        let b = Builder::new();
        let shape = Shape::new(DType::F32, [6, 32]);
        let of_scale = Shape::new(DType::F32, scale_dims.clone());
        let w = b.input("w", shape.clone(), &[]).unwrap();
        let s = b.input("s", of_scale.clone(), &[]).unwrap();
        let g = b.input("g", shape.clone(), &[]).unwrap();
        let along: Vec<usize> = (0..scale_dims.len()).collect();
        let y = fake_quantize(&b, w, s, &along, format, true).unwrap();
        let loss = b.sum(b.mul(y, g).unwrap(), &[0, 1]).unwrap();
        let gradients = grad(&b, loss, &[w, s]).unwrap();
        for (name, x) in ["y", "w", "s"]
            .into_iter()
            .zip([y, gradients[0], gradients[1]])
        {
            b.output(name, x, None).unwrap();
        }
        let inputs = [
            golden.tensor("in/weight", &shape),
            golden.tensor(&name("in", "scale"), &of_scale),
            golden.tensor("in/gradient", &shape),
        ];
        let found = evaluate(&b.finish(), &inputs).unwrap();
        for (found, (what, of)) in
            found
                .iter()
                .zip([("out", "weight"), ("grad", "weight"), ("grad", "scale")])
        {
            let error = distance(&found.to_f64_vec().unwrap(), golden.values(&name(what, of)));
            assert!(error < 2e-6, "{case} {what}/{of}: {error}");
        }
    }
}

fn maxdiff(verb: &str, out: &Path, words: &[&str]) -> Command {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    without_optimizations(&mut command)
        .arg(verb)
        .arg(recipe)
        .arg(format!("output_dir={}", out.display()))
        .arg(keep_programs())
        .args(words)
        .stdin(Stdio::null());
    command
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}\n{log}");
    output
}

/// What a command that is refused says.
fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{command:?}\n{log}");
    log
}

fn floats(file: &Path) -> BTreeMap<String, Vec<f32>> {
    let file = Checkpoint::open(file).unwrap();
    let names = file.names().map(str::to_owned).collect::<Vec<_>>();
    let read = |name: String| {
        let values = file.read(&name).unwrap().to_f32_vec().unwrap();
        (name, values)
    };
    names.into_iter().map(read).collect()
}

fn checkpoint(out: &Path, step: u64) -> PathBuf {
    out.join(format!("tiny/checkpoints/step-{step:08}"))
}

#[test]
fn scales_that_training_learns_are_stored_by_quantize() {
    let dir = tempfile::tempdir().unwrap();
    let int4 = ["quantization=w4a4", "quantization_granularity=4"];
    let learned = [
        &int4[..],
        &[
            "qat_observer=lsq",
            "qat_freeze_observer_steps=2",
            "checkpoint_every=1",
        ],
    ]
    .concat();
    let train = |steps: &str| {
        let schedule = ["learning_rate_schedule_steps=3", steps];
        succeed(&mut maxdiff(
            "train",
            dir.path(),
            &[&learned[..], &schedule].concat(),
        ))
    };
    // It stops and continues: scales are part of its state.
    train("max_train_steps=2");
    train("max_train_steps=3");
    let file = "quantization_ranges.safetensors";
    let [first, second, third] =
        [1, 2, 3].map(|step| floats(&checkpoint(dir.path(), step).join(file)));
    assert!(first.len() > 5 && first.keys().all(|name| name.ends_with(".weight_log_scale")));
    assert_ne!(first, second);
    // They are frozen then, and weights are not.
    assert_eq!(second, third);
    let weights = |step| {
        fs::read(checkpoint(dir.path(), step).join("unet/diffusion_pytorch_model.safetensors"))
            .unwrap()
    };
    assert!(weights(2) != weights(3));

    let stored = dir.path().join("stored");
    let output = stored.display().to_string();
    let quantize = [&int4[..], &["--output", &output]].concat();
    succeed(&mut maxdiff("quantize", dir.path(), &quantize));
    let quantized = floats(&stored.join("unet/diffusion_pytorch_model.safetensors"));
    // What is drawn with, and stored, is the moving average.
    let averaged = floats(&checkpoint(dir.path(), 3).join("ema").join(file));
    for (name, logs) in &averaged {
        let scale = &quantized[&name.replace("_log_scale", "_scale")];
        let expected: Vec<f32> = logs.iter().map(|log| log.exp()).collect();
        assert_eq!(scale, &expected, "{name}");
    }
    // The recipe says what the UNet is, and the folder how its weights are stored, for programs that need no weights too.
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let named = format!("pretrained_model_name_or_path={output}");
    let words = ["--json", "--step=denoise", "hardware=cpu"];
    let mut lower = program(["lower"]);
    let lowered = lower.arg(tiny).args(words).arg(named).output();
    let lowered = json(&lowered.unwrap());
    let scales = quantized
        .keys()
        .filter(|name| name.ends_with(".weight_scale"));
    assert_eq!(lowered["quantized"], scales.count());
    let other = dir.path().join("other").display().to_string();
    for (verb, words, said) in [
        ("generate", &int4[..], "scales that were trained"),
        (
            "quantize",
            &[
                "quantization=w4a16",
                "quantization_granularity=4",
                "--output",
                &other,
            ],
            "quantize with the same",
        ),
        (
            "quantize",
            &[
                int4[0],
                int4[1],
                "quantization_observer=mse",
                "--output",
                &other,
            ],
            "leave it out",
        ),
    ] {
        let prompt = ["prompt=a red circle"];
        let words = match verb {
            "generate" => [words, &prompt].concat(),
            _ => words.to_vec(),
        };
        let log = refused(&mut maxdiff(verb, dir.path(), &words));
        assert!(log.contains(said), "{log}");
    }
}

/// Static activations are trained with moving ranges, and need no calibration then; samples are drawn with these, and with the
/// averages of learned scales.
#[test]
fn ranges_that_training_follows_are_those_of_static_activations() {
    let dir = tempfile::tempdir().unwrap();
    let static_int8 = ["quantization=int8_w8a8_static"];
    let train = [
        &static_int8[..],
        &[
            "qat_observer=lsq",
            "max_train_steps=2",
            "checkpoint_every=1",
            "sample_every=2",
            "qat_averaging_constant=0.5",
        ],
    ]
    .concat();
    succeed(&mut maxdiff("train", dir.path(), &train));
    let file = |step| {
        let file = checkpoint(dir.path(), step).join("quantization_ranges.safetensors");
        let mut ranges = floats(&file);
        ranges.retain(|name, _| !name.ends_with(".weight_log_scale"));
        ranges
    };
    let (first, last) = (file(1), file(2));
    assert!(first.len() > 5);
    for (name, range) in &last {
        assert!(
            name.ends_with(".input_range") && range[0] <= 0.0 && range[1] > 0.0,
            "{name} {range:?}"
        );
    }
    assert_ne!(first, last);
    let stored = dir.path().join("stored").display().to_string();
    succeed(&mut maxdiff(
        "quantize",
        dir.path(),
        &[static_int8[0], "--output", &stored],
    ));
    let quantized = floats(&Path::new(&stored).join("unet/diffusion_pytorch_model.safetensors"));
    for (name, range) in &last {
        let scale = &quantized[&name.replace(".input_range", ".input_scale")];
        assert_eq!(scale, &[range[1].max(-range[0]) / 127.5], "{name}");
    }
}

#[test]
fn what_learned_scales_do_not_go_with_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for (words, said) in [
        (
            &["quantization=int8", "qat_observer=lsq"][..],
            "qat_observer: has no effect",
        ),
        (
            &[
                "quantization=w4a16",
                "qat_observer=lsq",
                "quantization_numerics=quark",
                "quantization_symmetric=False",
            ],
            "symmetric scales",
        ),
        (
            &[
                "quantization=w4a16",
                "qat_observer=lsq",
                "quant_rules=[{path: '.*conv1', mode: int8}]",
            ],
            "rules with mode int8",
        ),
        (
            &["quantization=w4a16", "qat_averaging_constant=0.5"],
            "qat_averaging_constant: has no effect",
        ),
        (
            &["quantization=w4a16", "qat_freeze_observer_steps=5"],
            "qat_freeze_observer_steps: has no effect",
        ),
        (
            &[
                "quantization=w4a16",
                "qat_observer=lsq",
                "qat_freeze_observer_steps=5",
                "optimizer_type=Prodigy",
                "learning_rate=1",
            ],
            "Prodigy has one learning rate",
        ),
    ] {
        let log = refused(&mut maxdiff(
            "train",
            dir.path(),
            &[words, &["max_train_steps=1"]].concat(),
        ));
        assert!(log.contains(said), "{words:?}: {log}");
    }
}
