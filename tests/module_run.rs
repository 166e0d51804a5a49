//! `module run` from the outside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{
    Golden, distance, golden, json, keep_programs, program, text, without_optimizations,
};
use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::weights::{Checkpoint, TensorView, cast, save};
use serde_json::Value;

const F32: [&str; 3] = [
    "hardware=cpu",
    "weights_dtype=float32",
    "activations_dtype=float32",
];

/// A file of inputs, from those recorded with a module.
pub struct Inputs(BTreeMap<String, HostTensor>);

impl Inputs {
    fn of(module: &str, names: &[&str]) -> Inputs {
        let io = Checkpoint::open(&golden(module).join("io.safetensors")).unwrap();
        let read = |name: &&str| {
            let tensor = io.read(&format!("in/{name}")).unwrap();
            ((*name).to_string(), tensor)
        };
        Inputs(names.iter().map(read).collect())
    }

    fn sdxl() -> Inputs {
        Inputs::of(
            "unet_sdxl",
            &[
                "sample",
                "timestep",
                "encoder_hidden_states",
                "text_embeds",
                "time_ids",
            ],
        )
    }

    pub fn sd15() -> Inputs {
        Inputs::of(
            "unet_sd15",
            &["sample", "timestep", "encoder_hidden_states"],
        )
    }

    fn set(&mut self, name: &str, tensor: HostTensor) {
        self.0.insert(name.to_string(), tensor);
    }

    pub fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("in.safetensors");
        let views = self.0.iter().map(|(name, tensor)| TensorView {
            name,
            dtype: tensor.shape.dtype,
            dims: &tensor.shape.dims,
            data: &tensor.data,
        });
        save(&path, views, &BTreeMap::new()).unwrap();
        path
    }

    /// Runs the module on these inputs; the results are in `out.safetensors` of `folder`.
    fn run(&self, folder: &Path, module: &Path, settings: &[&str]) -> Output {
        self.command(folder, module, settings).output().unwrap()
    }

    fn command(&self, folder: &Path, module: &Path, settings: &[&str]) -> Command {
        let inputs = self.write(folder);
        let mut command = program(["module", "run", "--json"]);
        without_optimizations(&mut command)
            .arg(module)
            .arg("--inputs")
            .arg(inputs)
            .arg("--outputs")
            .arg(folder.join("out.safetensors"))
            .arg(keep_programs())
            .args(settings);
        command
    }
}

/// Runs a recorded module; the report, and the results' relative L2 distances from what was recorded.
fn run(module: &str, inputs: &Inputs, settings: &[&str]) -> (Value, BTreeMap<String, f64>) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = inputs.command(folder.path(), &golden(module), settings);
    compared(module, folder.path(), &mut command)
}

/// Runs a recorded module by `command`, which writes to `folder`; what [`run`] gives.
fn compared(module: &str, folder: &Path, command: &mut Command) -> (Value, BTreeMap<String, f64>) {
    let report = json(&command.output().unwrap());
    let results = Checkpoint::open(&folder.join("out.safetensors")).unwrap();
    let recorded = Golden::read(&format!("{module}/io.safetensors"));
    let mut distances = BTreeMap::new();
    for (name, shape) in results.iter() {
        let key = format!("out/{name}");
        if !recorded.has(&key) {
            continue;
        }
        assert_eq!(shape.dtype, DType::F32);
        assert_eq!(shape.dims, recorded.dims(&key), "{name}");
        let found = results.read(name).unwrap().to_f64_vec().unwrap();
        distances.insert(name.to_string(), distance(&found, recorded.values(&key)));
    }
    (report, distances)
}

/// The tolerance of `tests/models.rs`: PyTorch's own float32 run is up to 7e-7 from float64.
#[test]
fn unets_match_diffusers() {
    for (module, inputs, parameters) in [
        ("unet_sdxl", Inputs::sdxl(), 202_596),
        ("unet_sd15", Inputs::sd15(), 140_540),
    ] {
        let (report, distances) = run(module, &inputs, &F32);
        assert_eq!(distances.keys().collect::<Vec<_>>(), ["sample"]);
        assert!(distances["sample"] <= 1e-5, "{module}: {distances:?}");
        assert_eq!(report["module"], "UNet2DConditionModel");
        assert_eq!(report["parameters"], parameters);
        assert_eq!(report["tensors"]["sample"]["dtype"], "f32");
        assert_eq!(
            report["tensors"]["sample"]["shape"],
            serde_json::json!([2, 4, 8, 12])
        );
        assert_eq!(report["nonfinite"], 0);
    }
}

#[test]
fn text_encoders_match_transformers() {
    for (module, class, names) in [
        (
            "clip_quick_gelu",
            "CLIPTextModel",
            vec!["last_hidden_state", "pooler_output"],
        ),
        (
            "clip_gelu",
            "CLIPTextModelWithProjection",
            vec!["last_hidden_state", "text_embeds"],
        ),
    ] {
        let inputs = Inputs::of(module, &["input_ids"]);
        let (report, distances) = run(module, &inputs, &F32);
        assert_eq!(report["module"], class);
        assert_eq!(distances.keys().collect::<Vec<_>>(), names);
        assert!(
            distances.values().all(|d| *d <= 1e-5),
            "{module}: {distances:?}"
        );
    }
}

/// Each half alone, and both at once.
#[test]
fn vaes_match_diffusers() {
    let io = Golden::read("vae_sd/io.safetensors");
    let config: Value = serde_json::from_str(&Golden::text("vae_sd/config.json")).unwrap();
    let scale = config["scaling_factor"].as_f64().unwrap();
    let unscaled: Vec<f32> = io
        .values("in/latents")
        .iter()
        .map(|value| (value / scale) as f32)
        .collect();
    let latents = HostTensor::from_f32(io.dims("in/latents"), &unscaled).unwrap();
    let images: Vec<f32> = io.values("in/images").iter().map(|v| *v as f32).collect();
    let images = HostTensor::from_f32(io.dims("in/images"), &images).unwrap();
    for (inputs, outputs) in [
        (vec![("x", &images)], vec!["logvar", "mean"]),
        (
            vec![("x", &images), ("z", &latents)],
            vec!["logvar", "mean", "sample"],
        ),
        (vec![("z", &latents)], vec!["sample"]),
    ] {
        let mut file = Inputs(BTreeMap::new());
        for (name, tensor) in inputs {
            file.set(name, tensor.clone());
        }
        let folder = tempfile::tempdir().unwrap();
        let report = json(&file.run(folder.path(), &golden("vae_sd"), &F32));
        assert_eq!(report["module"], "AutoencoderKL");
        let results = Checkpoint::open(&folder.path().join("out.safetensors")).unwrap();
        assert_eq!(results.names().collect::<Vec<_>>(), outputs);
        for name in outputs {
            let recorded = match name {
                "sample" => "out/images".to_owned(),
                name => format!("out/{name}"),
            };
            let found = results.read(name).unwrap().to_f64_vec().unwrap();
            let distance = distance(&found, io.values(&recorded));
            assert!(distance <= 1e-5, "{name}: {distance:e}");
        }
    }
}

#[test]
fn a_tiny_vae_matches_diffusers() {
    for (input, output) in [("x", "latents"), ("z", "sample")] {
        let (report, distances) = run("vae_tiny", &Inputs::of("vae_tiny", &[input]), &F32);
        assert_eq!(report["module"], "AutoencoderTiny");
        assert_eq!(distances.keys().collect::<Vec<_>>(), [output]);
        assert!(distances[output] <= 1e-5, "{distances:?}");
    }
}

/// Each setting changes the result, and by as much as its rounding: bf16 keeps 8 bits, int8 about 7 of each operand.
#[test]
fn settings_are_obeyed() {
    let inputs = Inputs::sd15();
    let with = |more: &[&str]| {
        let settings: Vec<&str> = F32.iter().chain(more).copied().collect();
        let folder = tempfile::tempdir().unwrap();
        let mut command = inputs.command(folder.path(), &golden("unet_sd15"), &settings);
        compared("unet_sd15", folder.path(), &mut command)
    };
    let distance = |(_, distances): &(Value, BTreeMap<String, f64>)| distances["sample"];

    let int8 = with(&["quantization=int8"]);
    assert!((1e-4..0.1).contains(&distance(&int8)), "{int8:?}");
    let quantized = int8.0["contractions"]["quantized"].as_u64().unwrap();
    assert!(quantized > 100, "{quantized}");
    let float = |report: &Value| -> Vec<String> {
        let paths = report["contractions"]["float"].as_array().unwrap();
        let paths = paths.iter().map(|p| p.as_str().unwrap().to_string());
        paths.collect()
    };
    assert!(float(&int8.0).contains(&"conv_in".to_string()));

    let qwix = with(&["quantization=int8", "use_qwix_quantization=True"]);
    assert!((1e-4..0.2).contains(&distance(&qwix)), "{qwix:?}");
    assert_ne!(distance(&qwix), distance(&int8));

    let rules = with(&[
        "quantization=int8",
        r"quant_rules=[{path: 'down_blocks\..*', mode: none}]",
    ]);
    assert!((1e-4..0.1).contains(&distance(&rules)), "{rules:?}");
    assert!(rules.0["contractions"]["quantized"].as_u64().unwrap() < quantized);

    let weights = with(&["weights_dtype=bfloat16"]);
    assert!((1e-4..0.05).contains(&distance(&weights)), "{weights:?}");
    let activations = with(&["activations_dtype=bfloat16"]);
    assert!(
        (1e-4..0.05).contains(&distance(&activations)),
        "{activations:?}"
    );
    assert_ne!(distance(&weights), distance(&activations));
}

#[test]
fn two_virtual_devices_compute_the_same() {
    let settings = [F32[0], F32[1], F32[2], "num_devices=2"];
    let (report, distances) = run("unet_sd15", &Inputs::sd15(), &settings);
    assert!(distances["sample"] <= 1e-5, "{distances:?}");
    let hardware = report["hardware"].as_str().unwrap();
    assert!(hardware.starts_with("2 cpu devices"), "{hardware}");
}

/// Values that survive the narrower type give the same result as in `f32`.
#[test]
fn inputs_of_other_types_are_cast() {
    let sample = |inputs: &Inputs| {
        let folder = tempfile::tempdir().unwrap();
        json(&inputs.run(folder.path(), &golden("unet_sd15"), &F32));
        let results = Checkpoint::open(&folder.path().join("out.safetensors")).unwrap();
        results.read("sample").unwrap()
    };
    let mut inputs = Inputs::sd15();
    let half = cast(inputs.0["sample"].clone(), DType::BF16).unwrap();
    inputs.set("sample", cast(half.clone(), DType::F32).unwrap());
    inputs.set("timestep", HostTensor::from_f32([2], &[7.0, 7.0]).unwrap());
    let expected = sample(&inputs);
    inputs.set("sample", half);
    let scalar = HostTensor::from_f32([], &[7.0]).unwrap();
    inputs.set("timestep", scalar.convert(DType::S64).unwrap());
    assert_eq!(sample(&inputs), expected);
}

#[test]
fn inputs_that_do_not_fit_are_all_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut inputs = Inputs::sdxl();
    inputs.0.remove("time_ids");
    inputs.set("mask", HostTensor::from_f32([1], &[0.0]).unwrap());
    inputs.set(
        "encoder_hidden_states",
        HostTensor::from_f32([3, 5, 24], &[0.0; 360]).unwrap(),
    );
    inputs.set(
        "text_embeds",
        HostTensor::from_i32([2, 10], &[0; 20]).unwrap(),
    );
    let output = inputs.run(folder.path(), &golden("unet_sdxl"), &F32);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    for line in [
        "in.safetensors: does not fit the module:",
        "\n  encoder_hidden_states: expected floats [batch = 2, length, 24], found f32[3,5,24]\n",
        "\n  text_embeds: expected floats [batch = 2, 10], found s32[2,10]\n",
        "\n  missing: time_ids, floats or integers [batch = 2, 6]\n",
        "\n  unknown: mask f32[1]; the module takes sample, timestep,",
    ] {
        assert!(error.contains(line), "{line}\n{error}");
    }
    assert!(!folder.path().join("out.safetensors").exists());

    let mut ids = Inputs::of("clip_gelu", &["input_ids"]);
    ids.set("input_ids", HostTensor::from_i32([1, 2], &[3, 64]).unwrap());
    let output = ids.run(folder.path(), &golden("clip_gelu"), &F32);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.contains("input_ids: 1 of 2 ids are outside the vocabulary of 64, the first is 64"),
        "{error}"
    );
}

#[test]
fn an_existing_output_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.safetensors");
    std::fs::write(&path, "precious").unwrap();
    let output = Inputs::sd15().run(folder.path(), &golden("unet_sd15"), &F32);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("out.safetensors: exists already"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");

    let output = program(["module", "run"])
        .arg(golden("unet_sd15"))
        .arg("--inputs")
        .arg(folder.path().join("in.safetensors"))
        .arg("--outputs")
        .arg(folder.path().join("nowhere/out.safetensors"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(
        error.contains("nowhere/out.safetensors: cannot be written"),
        "{error}"
    );
}

/// Copies a module, with `change` made to its only file of weights.
fn changed_copy(folder: &Path, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let copy = folder.join("module");
    std::fs::create_dir(&copy).unwrap();
    let from = golden("unet_sd15");
    std::fs::copy(from.join("config.json"), copy.join("config.json")).unwrap();
    let name = "diffusion_pytorch_model.safetensors";
    let mut bytes = std::fs::read(from.join(name)).unwrap();
    change(&mut bytes);
    std::fs::write(copy.join(name), bytes).unwrap();
    copy
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_with_every_difference() {
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let folder = tempfile::tempdir().unwrap();
        let module = changed_copy(folder.path(), change);
        let output = Inputs::sd15().run(folder.path(), &module, &F32);
        assert_eq!(output.status.code(), Some(1));
        assert!(!folder.path().join("out.safetensors").exists());
        text(&output.stderr).to_string()
    };
    let truncated = error(&|bytes| bytes.truncate(bytes.len() - 1));
    assert!(truncated.contains("truncated"), "{truncated}");
    // A name of the same length leaves the header's length as it is.
    let renamed = error(&|bytes| {
        let (from, to) = (b"\"conv_out.bias\"", b"\"conv_out.bios\"");
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to);
    });
    for line in [
        "1 missing, 1 extra, 0 of another shape",
        "missing: conv_out.bias [4] (the checkpoint has conv_out.bios)",
        "extra: conv_out.bios [4]",
    ] {
        assert!(renamed.contains(line), "{line}\n{renamed}");
    }

    let folder = tempfile::tempdir().unwrap();
    let module = changed_copy(folder.path(), |_| {});
    std::fs::write(module.join("config.json"), r#"{"_class_name": "VQModel"}"#).unwrap();
    let output = Inputs::sd15().run(folder.path(), &module, &F32);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.contains("of VQModel, which is not here; supported: UNet2DConditionModel"),
        "{error}"
    );
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (setting, expected) in [
        ("quantisation=int8", "Did you mean quantization?"),
        ("quantization=int7", "valid: "),
        ("seed=1", "has no effect on `module run`"),
        ("num_devices=3.5", "expected integer"),
    ] {
        let output = Inputs::sd15().run(folder.path(), &golden("unet_sd15"), &[setting]);
        assert_eq!(output.status.code(), Some(2), "{setting}");
        let error = text(&output.stderr);
        assert!(error.contains(expected), "{setting}: {error}");
    }
    let rules = [
        F32[0],
        "quantization=int8",
        "quant_rules=[{path: 'nowhere', mode: int8}]",
    ];
    let output = Inputs::sd15().run(folder.path(), &golden("unet_sd15"), &rules);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("'nowhere' matches no contraction of unet"));
}

#[test]
fn running_without_a_plugin_names_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = Inputs::sd15().write(folder.path());
    let output = program(["module", "run"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .arg(golden("unet_sd15"))
        .arg("hardware=cpu")
        .arg("--inputs")
        .arg(&inputs)
        .arg("--outputs")
        .arg(folder.path().join("out.safetensors"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.contains("run `maxdiff-rs plugin install cpu`"),
        "{error}"
    );
}
