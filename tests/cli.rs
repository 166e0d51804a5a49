//! The program from the outside: `compile`, `lower`, `convert`, logs, exit codes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::{cpu_plugin, golden, json, program, text};
use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::weights::{Checkpoint, TensorView, save};
use serde_json::Value;

#[test]
fn a_wrong_log_filter_is_told_of() {
    let mut command = program(["config", "explain", "seed"]);
    let output = command.env("RUST_LOG", "maxdiff=loud").output().unwrap();
    assert!(output.status.success());
    let told = text(&output.stderr);
    assert!(
        told.starts_with("warning: RUST_LOG='maxdiff=loud' is ignored: "),
        "{told}"
    );
}

/// The disk that a bundle does not fit on is a limit on the size of files, under which the empty file can be made that
/// `compile` tries its folder with.
#[test]
fn a_report_outlives_its_bundle() {
    cpu_plugin();
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("step.bundle");
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", limited, "sh", env!("CARGO_BIN_EXE_maxdiff-rs")])
        .arg("compile")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml"))
        .args(["hardware=cpu", "--json", "--output"])
        .arg(&bundle)
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("devices: 1 cpu device"), "{error}");
    let last = error.lines().next_back().unwrap();
    assert!(last.starts_with("error: cannot write "), "{error}");
    assert!(last.contains("/.step.bundle."), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["bundle"], Value::Null);
    assert_eq!(report["step"], "denoise");
    assert!(report["parameters"].as_u64().unwrap() > 0);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// What `int8_where_faster` leaves in float is told, is less for more rows, on GPUs is all convolutions, and is not known of CPUs.
#[test]
fn int8_stays_where_it_is_faster() {
    let lower = |args: &[&str]| {
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base15.yml");
        let step = ["--json", "quantization=int8", "int8_where_faster=True"];
        let mut command = program(["lower"]);
        command.arg(recipe).args(step).args(args).output().unwrap()
    };
    let slower = |batch: &str| {
        let output = lower(&["--step=train", "compile_topology=v5e-1", batch]);
        let report = json(&output);
        let slower = report["slower_in_int8"].as_array().unwrap().clone();
        for product in slower
            .iter()
            .filter(|product| product["is_convolution"] == false)
        {
            let sizes = ["rows", "columns", "contracted"];
            let [rows, columns, contracted] = sizes.map(|size| product[size].as_u64().unwrap());
            let in_kernels = match product["role"].as_str().unwrap() {
                "drhs" => [rows, columns, contracted].map(|size| size % 128) == [0; 3],
                _ => [columns, contracted].map(|size| size % 128) == [0; 2],
            };
            let uses = rows * columns / (rows + columns);
            match product["role"].as_str().unwrap() {
                "drhs" if in_kernels => assert!(uses < 700, "{product}"),
                _ if in_kernels => assert!(columns < 640, "{product}"),
                _ => assert!(uses <= 7697, "{product}"),
            }
            assert!(
                product["path"].as_str().unwrap().contains("unet/"),
                "{product}"
            );
        }
        // Derivatives of stacks of blocks read their weights behind a barrier.
        let reads_320 = |product: &Value| product["role"] == "dlhs" && product["columns"] == 320;
        assert!(slower.iter().any(reads_320));
        slower.len()
    };
    let [few, many] = ["per_device_batch_size=1", "per_device_batch_size=256"].map(slower);
    assert!(many > 0 && many < few, "{many} {few}");

    let report = json(&lower(&["compile_topology=v5e-1", "--step=denoise"]));
    let slower = report["slower_in_int8"].as_array().unwrap();
    let fills_no_tile =
        |product: &&Value| !product["columns"].as_u64().unwrap().is_multiple_of(128);
    assert!(!slower.is_empty());
    assert_eq!(slower.iter().filter(fills_no_tile).count(), slower.len());

    let report = json(&lower(&["compile_topology=h100", "--step=denoise"]));
    let slower = report["slower_in_int8"].as_array().unwrap();
    let convolutions = slower
        .iter()
        .filter(|product| product["is_convolution"] == true);
    // Those of Stable Diffusion 1.5's UNet but the first and last, which are float in any case.
    assert_eq!((slower.len(), convolutions.count()), (96, 96));

    let output = lower(&["hardware=cpu"]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(
        error.contains("known of TPUs and GPUs alone, and this program is for a CPU"),
        "{error}"
    );
}

/// What a chip has no units for is emulated on request, if anything is quantized.
#[test]
fn a_mode_is_emulated_on_any_chip() {
    let lower = |args: &[&str]| {
        let mut command = program(["lower", "quickstart", "--step=denoise"]);
        command.args(args).output().unwrap()
    };
    let refused = |output: &Output, expected: &str| {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    let int8 = ["compile_topology=tpu7x-8", "quantization=int8"];
    refused(&lower(&int8), "use quantization=fp8");
    refused(
        &lower(&["quantization_emulate=True"]),
        "nothing is quantized",
    );
    let both = ["int8_where_faster=True", "quantization_emulate=True"];
    refused(&lower(&[int8, both].concat()), "quantization_emulate");
    let output = lower(&[&int8[..], &both[1..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let program = text(&output.stdout);
    // What is stored of weights is int8, and no product is.
    let mut products = program
        .lines()
        .filter(|line| line.contains("stablehlo.dot_general"));
    assert!(program.contains("xi8>"));
    assert!(products.all(|line| !line.contains("xi8>") && !line.contains("xi32>")));
}

/// fp8 is multiplied at the rate of bf16 on a v6e and a v5e, which is told; on a v7x it is faster, and weights alone are not
/// multiplied in it.
#[test]
fn a_format_that_saves_no_time_on_a_chip_is_told() {
    let told = |args: &[&str]| {
        let mut command = program(["lower", "quickstart", "--step=denoise", "--json"]);
        let output = command.args(args).output().unwrap();
        let told = text(&output.stderr);
        assert!(output.status.success(), "{told}");
        told.to_owned()
    };
    for (topology, chip) in [("v6e-1", "TPU v6e"), ("v5e-1", "TPU v5e")] {
        let topology = format!("compile_topology={topology}");
        let fp8 = told(&[topology.as_str(), "quantization=fp8"]);
        let expected = format!(
            "warning: quantization=fp8 saves memory but no time on {chip}: fp8 runs at the rate of bf16 there"
        );
        assert!(fp8.contains(&expected), "{fp8}");
        let weights = told(&[topology.as_str(), "quantization=fp8_w8a16"]);
        assert!(!weights.contains("saves memory"), "{weights}");
    }
    let faster = told(&["compile_topology=tpu7x-2", "quantization=fp8"]);
    assert!(!faster.contains("saves memory"), "{faster}");
    // int4 in groups is multiplied as floats, so a chip without products of integers takes it.
    let grouped = ["quantization=w4a4", "quantization_granularity=16"];
    told(&[&grouped[..], &["compile_topology=tpu7x-2"]].concat());
}

/// A limit on the size of files stands for a full disk.
#[test]
fn a_text_that_does_not_fit_on_the_disk_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("step.mlir");
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", limited, "sh", env!("CARGO_BIN_EXE_maxdiff-rs")])
        .args(["lower", "quickstart", "--output"])
        .arg(&file)
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains(&format!("error: {}: ", file.display())),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// `maxdiff-rs config explain | head -1`: the reader leaves, and that is no failure.
#[test]
fn a_reader_that_leaves_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = program(["config", "explain", "--markdown"])
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));

    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = program(["config", "explain", "no_such_key"])
        .stderr(writer)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2));
}

/// Without plugins: the mesh of a topology is known from its name.
#[test]
fn lower_obeys_the_topology_and_refuses_what_it_does_not_read() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let lower = |more: &[&str]| {
        let mut command = program(["lower"]);
        command.arg(&recipe).args(more);
        command.output().unwrap()
    };
    let output = lower(&[
        "compile_topology=v5e-16",
        "compile_topology_num_slices=2",
        "ici_fsdp_parallelism=4",
        "hardware=tpu",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let program = text(&output.stdout);
    assert!(
        program.contains(r#"sdy.mesh @mesh = <["data"=8, "fsdp"=4, "context"=1, "tensor"=1]>"#),
        "{}",
        &program[..500]
    );
    // 32 devices with 4 images each, in rows with and without the prompt.
    assert!(program.contains("tensor<256x3x16x16xf32>"));
    // So are the keys and values that are computed once for the prompts: a device holds those of its rows.
    let main = program.lines().find(|line| line.contains("@main")).unwrap();
    let keys: Vec<&str> = main.split("%arg").filter(|a| a.contains("to_k:")).collect();
    assert!(!keys.is_empty());
    for argument in keys {
        assert!(
            argument.contains(r#"[{"data", "fsdp"}, {}, {}]"#),
            "{argument}"
        );
    }
    assert!(!text(&lower(&["hardware=tpu"]).stdout).contains("sdy."));
    for (overrides, word) in [
        (&["compile_topology=v5e-17", "hardware=tpu"][..], "v5e-16"),
        (
            &["compile_topology_num_slices=2"][..],
            "without compile_topology",
        ),
        (&["ici_fsdp_parallelism=4"][..], "ici_fsdp_parallelism=4"),
        (&["adam_b1=0.5"][..], "--step train"),
        (&["num_inference_steps=3"][..], "num_inference_steps"),
    ] {
        let output = lower(overrides);
        assert_eq!(output.status.code(), Some(2), "{overrides:?}");
        assert!(
            text(&output.stderr).contains(word),
            "{overrides:?}: {}",
            text(&output.stderr)
        );
    }
}

/// Integers in place of weights, and a part of another class, are refused before anything is written.
#[test]
fn convert_copies_nothing_that_is_no_model() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(golden("pipeline_sd21")).arg(&source);
    assert!(copy.status().unwrap().success());
    let refused = |expected: &str| {
        let mut command = program(["convert"]);
        let output = command.arg(&source).arg(dir.path().join("out"));
        let output = output.output().unwrap();
        let found = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{found}");
        assert!(found.contains(expected), "{found}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    };
    let config = source.join("vae/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let other = text.replace("AutoencoderKL", "AutoencoderDC");
    assert_ne!(text, other);
    std::fs::write(&config, other).unwrap();
    refused("vae: its config.json is of class AutoencoderDC, expected AutoencoderKL");
    std::fs::write(&config, text).unwrap();

    let weights = source.join("unet/diffusion_pytorch_model.safetensors");
    let integers = TensorView {
        name: "conv_in.weight",
        dtype: DType::S8,
        dims: &[4],
        data: &[1, 2, 3, 4],
    };
    save(&weights, [integers], &BTreeMap::new()).unwrap();
    refused("conv_in.weight: expected floating-point numbers, found s8");
}

/// Values beyond half precision's are an error that names them, and no folder is left.
#[test]
fn convert_does_not_make_infinities() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(golden("pipeline_sd21")).arg(&source);
    assert!(copy.status().unwrap().success());
    let weights = source.join("unet/diffusion_pytorch_model.safetensors");
    let file = Checkpoint::open(&weights).unwrap();
    let mut tensors: Vec<(String, HostTensor)> = file
        .names()
        .map(|name| (name.to_owned(), file.read(name).unwrap()))
        .collect();
    let (name, tensor) = tensors
        .iter_mut()
        .find(|(name, _)| name == "conv_in.weight")
        .unwrap();
    let mut values = tensor.to_f32_vec().unwrap();
    (values[0], values[3], values[5]) = (65504.0, 65536.0, -1e30);
    let dims: [usize; 4] = tensor.shape.dims.clone().try_into().unwrap();
    let name = name.clone();
    *tensor = HostTensor::from_f32(dims, &values).unwrap();
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    save(&weights, views, &BTreeMap::new()).unwrap();

    let convert = |dtype: &str| {
        let output = dir.path().join("out");
        let mut command = program(["convert"]);
        command
            .arg(&source)
            .arg(output)
            .arg(dtype)
            .output()
            .unwrap()
    };
    let refused = convert("dtype=fp16");
    let found = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{found}");
    let expected = format!(
        "2 values of 1 tensors are too large for f16 and would become infinite: unet/{name} (2)"
    );
    assert!(found.contains(&expected), "{found}");
    assert!(found.contains("convert with dtype=bf16"), "{found}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let done = convert("dtype=bf16");
    assert!(done.status.success(), "{}", text(&done.stderr));
}
