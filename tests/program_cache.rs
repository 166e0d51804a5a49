//! Programs kept on disk: the same results bit for bit, in a new client and in a new process, and no start fails of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{
    cpu_plugin, cpu_session, golden, json, lowered, program, run_on, without_optimizations,
};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Init};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{Conv2d, GroupNorm, Linear, Precision, conv2d, group_norm, linear};
use maxdiff::runtime::{ExecutableCache, ProgramCounts, Session};
use maxdiff::shape::Shape;
use serde_json::Value;

fn session(devices: i64, dir: &Path) -> Session {
    let cache = ExecutableCache::new(dir, ExecutableCache::MAX_BYTES);
    let mut session = cpu_session(devices);
    session.keep_programs(cache).unwrap();
    session
}

fn counts(compiled: usize, from_cache: usize) -> ProgramCounts {
    ProgramCounts {
        compiled,
        from_cache,
    }
}

/// Layers that become the plugin's kernels where it has some, in float and in int8; in float32 XLA's own.
fn graph(dtype: DType, int8: bool) -> Graph {
    let b = Builder::new();
    let m = b.root("m");
    let precision = Precision {
        weights: dtype,
        activations: dtype,
    };
    let batch = [Some("activation_batch"), None, None, None];
    let image = Shape::new(dtype, [2, 8, 8, 6]);
    let x = b.input("image", image, &batch).unwrap();
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..Conv2d::same(32, 3)
    };
    let x = conv2d(&m.scope("first"), x, Conv2d::same(16, 3), precision).unwrap();
    let x = conv2d(&m.scope("strided"), x, strided, precision).unwrap();
    let layer = GroupNorm {
        groups: 8,
        epsilon: 1e-5,
        activation: None,
    };
    let x = group_norm(&m.scope("norm"), x, layer, precision).unwrap();
    let layer = Linear::new(48, "embed", "heads");
    let y = linear(&m.scope("linear"), x, layer, precision).unwrap();
    b.output("y", y, None).unwrap();
    lowered(b, int8)
}

fn inputs(graph: &Graph) -> Vec<HostTensor> {
    let value = |(i, shape): (usize, &Shape)| {
        let values = Init::Uniform { bound: 1.0 }.sample(i as u64, "x", shape.count());
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        HostTensor::from_f64(shape.clone(), &values).unwrap()
    };
    let shapes = graph.inputs.iter().map(|input| &input.shape);
    shapes.enumerate().map(value).collect()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

#[test]
fn a_new_client_loads_the_same_program() {
    let dir = tempfile::tempdir().unwrap();
    let kinds = [
        (DType::F32, false, 1),
        (DType::BF16, false, 1),
        (DType::BF16, true, 1),
        (DType::F32, false, 2),
        (DType::BF16, false, 2),
    ];
    for (dtype, int8, devices) in kinds {
        let graph = graph(dtype, int8);
        let inputs = inputs(&graph);
        let run = |session: &Session| {
            run_on(
                session,
                &session.backend().claim(&graph, 1).unwrap(),
                &inputs,
            )
        };
        let plain = run(&cpu_session(devices));

        let first = session(devices, dir.path());
        assert_eq!(run(&first), plain);
        assert_eq!(first.program_counts(), counts(1, 0));
        assert_eq!(run(&first), plain);
        assert_eq!(first.program_counts(), counts(1, 1));
        drop(first);
        let second = session(devices, dir.path());
        assert_eq!(run(&second), plain);
        assert_eq!(second.program_counts(), counts(0, 1));
    }
    assert_eq!(files(dir.path()).len(), kinds.len());
}

#[test]
fn a_damaged_or_useless_folder_costs_a_compilation_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let graph = graph(DType::BF16, false);
    let inputs = inputs(&graph);
    let run = |session: &Session| run_on(session, &graph, &inputs);
    let expected = run(&session(1, dir.path()));
    let file = &files(dir.path())[0];
    let whole = fs::read(file).unwrap();
    let mut changed = whole.clone();
    changed[whole.len() / 2] ^= 0x40;
    for damaged in [
        &changed[..],
        &whole[..whole.len() / 2],
        b"",
        b"not a program",
    ] {
        fs::write(file, damaged).unwrap();
        let mended = session(1, dir.path());
        assert_eq!(run(&mended), expected);
        assert_eq!(mended.program_counts(), counts(1, 0));
        let after = session(1, dir.path());
        assert_eq!(run(&after), expected);
        assert_eq!(after.program_counts(), counts(0, 1));
    }
    // A whole file of the right key that the plugin does not take.
    let mut refused = whole[..44].to_vec();
    refused.extend(7u64.to_le_bytes());
    refused.extend(sha256(b"no code"));
    refused.extend(b"no code");
    fs::write(file, refused).unwrap();
    let mended = session(1, dir.path());
    assert_eq!(run(&mended), expected);
    assert_eq!(mended.program_counts(), counts(1, 0));

    // A folder that cannot be made.
    let nowhere = session(1, &file.join("folder"));
    assert_eq!(run(&nowhere), expected);
    assert_eq!(nowhere.program_counts(), counts(1, 0));
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).to_vec()
}

/// `generate --json` with the recorded SD 2.x pipeline.
fn generate(out: &Path, cache: &Path, words: &[&str]) -> Value {
    let mut command = program(["generate", "--json"]);
    let output = without_optimizations(&mut command)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base21.yml"))
        .args(["hardware=cpu", "model_family=", "height=16", "width=16"])
        .args([
            format!(
                "pretrained_model_name_or_path={}",
                golden("pipeline_sd21").display()
            ),
            format!(
                "tokenizer_model_name_or_path={}",
                golden("tokenizer").display()
            ),
            format!("output_dir={}", out.display()),
            format!("jax_cache_dir={}", cache.display()),
        ])
        .args(words)
        // No test asks the hub.
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", out.join("hub"))
        .output()
        .unwrap();
    json(&output)
}

fn pixels(report: &Value) -> image::RgbImage {
    let path = report["images"][0]["path"].as_str().unwrap();
    image::open(path).unwrap().to_rgb8()
}

fn made(report: &Value) -> ProgramCounts {
    let number = |key: &str| report[key].as_u64().unwrap() as usize;
    counts(number("programs_compiled"), number("programs_from_cache"))
}

#[test]
fn a_second_process_compiles_nothing() {
    cpu_plugin();
    let dir = tempfile::tempdir().unwrap();
    let float32 = ["weights_dtype=float32", "activations_dtype=float32"];
    for kind in [&float32[..], &["quantization=int8"]] {
        let cache = dir.path().join(format!("cache{}", kind.len()));
        let draw = |words: &[&str]| generate(dir.path(), &cache, &[kind, words].concat());
        let words = ["prompt=a cat", "seed=3", "num_inference_steps=2"];
        let cold = draw(&words);
        // Where two parts of a model pack a weight alike, the second takes the first one's program.
        let programs = made(&cold).compiled + made(&cold).from_cache;
        assert!(made(&cold).compiled > 2);
        let warm = draw(&words);
        assert_eq!(made(&warm), counts(0, programs));
        assert_eq!(pixels(&warm), pixels(&cold));

        // Another prompt, negative prompt, seed, step count, guidance and sampler.
        let other = draw(&[
            "prompt=another one",
            "negative_prompt=fog",
            "seed=8",
            "guidance_scale=3",
            "num_inference_steps=5",
            "scheduler=ddim",
        ]);
        assert_eq!(made(&other), counts(0, programs));
        assert_ne!(pixels(&other), pixels(&cold));
    }
}
