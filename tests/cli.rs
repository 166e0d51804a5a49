//! The program from the outside: `module run`, `plugin`, `doctor`, exit codes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{Golden, cpu_plugin, distance, keep_programs, kernels_run};
use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::weights::{Checkpoint, TensorView, cast, save};
use serde_json::Value;

const F32: [&str; 3] = [
    "hardware=cpu",
    "weights_dtype=float32",
    "activations_dtype=float32",
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

fn program<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    command.args(args).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A file of inputs, from those recorded with a module.
struct Inputs(BTreeMap<String, HostTensor>);

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

    fn sd15() -> Inputs {
        Inputs::of(
            "unet_sd15",
            &["sample", "timestep", "encoder_hidden_states"],
        )
    }

    fn set(&mut self, name: &str, tensor: HostTensor) {
        self.0.insert(name.to_string(), tensor);
    }

    fn write(&self, folder: &Path) -> PathBuf {
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
        let inputs = self.write(folder);
        program(["module", "run", "--json"])
            .arg(module)
            .arg("--inputs")
            .arg(inputs)
            .arg("--outputs")
            .arg(folder.join("out.safetensors"))
            .arg(keep_programs())
            .args(settings)
            .output()
            .unwrap()
    }
}

/// Runs a recorded module; the report, and the results' relative L2 distances from what was recorded.
fn run(module: &str, inputs: &Inputs, settings: &[&str]) -> (Value, BTreeMap<String, f64>) {
    let folder = tempfile::tempdir().unwrap();
    let report = json(&inputs.run(folder.path(), &golden(module), settings));
    let results = Checkpoint::open(&folder.path().join("out.safetensors")).unwrap();
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

/// Each setting changes the result, and by as much as its rounding: bf16 keeps 8 bits, int8 about 7 of each operand.
#[test]
fn settings_are_obeyed() {
    let inputs = Inputs::sdxl();
    let with = |more: &[&str]| {
        let settings: Vec<&str> = F32.iter().chain(more).copied().collect();
        run("unet_sdxl", &inputs, &settings)
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
        r"quant_rules=[{path: 'down_blocks\..*', dtype: none}]",
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
    std::fs::write(
        module.join("config.json"),
        r#"{"_class_name": "AutoencoderKL"}"#,
    )
    .unwrap();
    let output = Inputs::sd15().run(folder.path(), &module, &F32);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(
        error.contains("of AutoencoderKL, which is not here; supported: UNet2DConditionModel"),
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
        "quant_rules=[{path: 'nowhere', dtype: int8}]",
    ];
    let output = Inputs::sd15().run(folder.path(), &golden("unet_sd15"), &rules);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("'nowhere' matches no contraction of unet"));
}

#[test]
fn doctor_finds_the_installed_plugins() {
    cpu_plugin();
    let output = program(["doctor", "--json"]).output().unwrap();
    let report = json(&output);
    assert_eq!(report["ok"], true);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["plugins"][0]["kind"], "cpu");
    assert_eq!(report["plugins"][0]["error"], Value::Null);
    let version = report["plugins"][0]["api_version"].as_str().unwrap();
    assert!(version.starts_with("0."), "{version}");
    assert_eq!(
        report["plugins"][0]["devices"],
        serde_json::json!(["cpu 0"])
    );
    let kernels = serde_json::to_value(cpu_plugin().kernels()).unwrap();
    assert_eq!(report["plugins"][0]["kernels"], kernels);
    let text = program(["doctor"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let expected = match kernels_run() {
        true => "kernels: maxdiff.contract maxdiff.attention ",
        false => "kernels: none, ",
    };
    assert!(text.contains(expected), "{text}");
}

#[test]
fn the_number_of_threads_is_that_which_the_process_may_use_or_the_variables() {
    let threads = |command: &mut Command| {
        let report = json(&command.stdin(Stdio::null()).output().unwrap());
        report["processor"]["threads"].as_u64().unwrap()
    };
    let own = env!("CARGO_BIN_EXE_maxdiff-rs");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let one = allowed.unwrap().trim().split([',', '-']).next().unwrap();
    let mut bound = Command::new("taskset");
    bound.args(["--cpu-list", one, own, "doctor", "--json"]);
    bound.env_remove("MAXDIFF_CPU_THREADS");
    assert_eq!(threads(&mut bound), 1);
    let set = |value| {
        let mut command = program(["doctor", "--json"]);
        command.env("MAXDIFF_CPU_THREADS", value);
        command
    };
    assert_eq!(threads(&mut set("3")), 3);
    let output = set("none").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let problem = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .find(|problem| {
            problem["what"]
                == "MAXDIFF_CPU_THREADS is 'none', expected a whole number from 1 to 1024"
        });
    assert_eq!(
        problem.unwrap()["remedy"],
        "set MAXDIFF_CPU_THREADS to a number of threads, or unset it"
    );
}

#[test]
fn without_a_plugin_doctor_fails_and_names_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let output = program(["doctor"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report = text(&output.stdout);
    assert!(
        report.contains(
            "wrong: the cpu plugin is not installed; run `maxdiff-rs plugin install cpu`"
        ),
        "{report}"
    );
}

/// Libraries that are plugins by their looks: doctor says what came of loading one, and goes on.
#[test]
fn doctor_outlives_a_plugin_that_does_not_load() {
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.so");
    let mut bytes = b"\x7fELF".to_vec();
    bytes.extend_from_slice(b" GetPjrtApi\0");
    std::fs::write(&broken, bytes).unwrap();
    let plugin = |kind: &str, library: &Path| {
        let output = program(["plugin", "install", kind, "--json", "--path"])
            .arg(library)
            .env("MAXDIFF_PLUGIN_DIR", folder.path())
            .output()
            .unwrap();
        json(&output);
    };
    plugin("cpu", &own.library);
    plugin("tpu", &broken);
    let output = program(["doctor", "--json"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["plugins"][0]["error"], Value::Null);
    let error = report["plugins"][1]["error"].as_str().unwrap();
    assert!(error.contains("broken.so"), "{error}");
    let problem = &report["problems"][0];
    assert_eq!(problem["remedy"], "run `maxdiff-rs plugin install tpu`");
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

/// A plugin of one's own is used where it lies, and the pinned one comes back.
#[test]
fn plugins_are_listed_and_taken_by_path() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let plugin = |args: &[&str]| {
        program(["plugin"])
            .args(args)
            .env("MAXDIFF_PLUGIN_DIR", folder.path())
            .output()
            .unwrap()
    };
    assert_eq!(
        json(&plugin(&["list", "--json"]))["plugins"],
        serde_json::json!([])
    );
    let library = own.library.to_str().unwrap();
    let installed = json(&plugin(&["install", "cpu", "--path", library, "--json"]));
    assert_eq!(installed["version"], "local");
    assert_eq!(installed["library"], library);
    assert_eq!(installed["problem"], Value::Null);
    let listed = json(&plugin(&["list", "--json"]));
    assert_eq!(listed["plugins"], serde_json::json!([installed]));
    let list = plugin(&["list"]);
    assert!(text(&list.stdout).contains("tpu    not installed; `maxdiff-rs plugin install tpu`"));

    let missing = plugin(&["install", "cpu", "--path", "/nowhere/plugin.so"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("/nowhere/plugin.so"));
    assert_eq!(plugin(&["install", "gpu"]).status.code(), Some(2));
    let quiet = plugin(&["install", "cpu", "--path", library, "--quiet"]);
    assert!(quiet.status.success());
    assert_eq!(text(&quiet.stderr), "");
}

/// What runs before every build of other things must not download, nor write where it may not.
#[test]
fn a_plugin_that_is_in_use_is_installed_only_if_needed() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("own.so");
    std::fs::copy(&own.library, &library).unwrap();
    let plugins = folder.path().join("plugins");
    let run = |args: &[&str]| {
        let mut command = program(args);
        // No python3 is found, so nothing is downloaded.
        command.env("MAXDIFF_PLUGIN_DIR", &plugins).env("PATH", "");
        command.output().unwrap()
    };
    let if_needed = ["plugin", "install", "cpu", "--if-needed"];
    let path = library.to_str().unwrap();
    let absent = run(&if_needed);
    assert_eq!(absent.status.code(), Some(1));
    let error = text(&absent.stderr);
    assert!(error.contains("python3 with pip is needed"), "{error}");

    let given = run(&["plugin", "install", "cpu", "--path", path]);
    assert!(given.status.success(), "{}", text(&given.stderr));
    std::fs::remove_file(plugins.join(".cpu.lock")).unwrap();
    let again = run(&if_needed);
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(text(&again.stdout).trim_end(), path);
    let said = format!("the cpu plugin local is in use: {path}");
    assert_eq!(text(&again.stderr).trim_end(), said);
    assert!(!plugins.join(".cpu.lock").exists(), "a lock was taken");
    let both = run(&["plugin", "install", "cpu", "--if-needed", "--path", path]);
    assert_eq!(both.status.code(), Some(2));

    // One that has changed is not complete. The remedy keeps it.
    let mut bytes = std::fs::read(&library).unwrap();
    bytes.push(0);
    std::fs::write(&library, bytes).unwrap();
    assert_eq!(run(&if_needed).status.code(), Some(1));
    let report = run(&["doctor", "--json"]);
    assert_eq!(report.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let problem = &report["problems"][0];
    assert_eq!(
        problem["remedy"],
        format!("run `maxdiff-rs plugin install cpu --path {path}`"),
        "{problem}"
    );
}

/// A program that was updated runs on the plugin of before, and says so; `--if-needed` builds the new one.
#[test]
fn a_stale_plugin_is_used_with_a_warning() {
    cpu_plugin();
    let own = maxdiff::pjrt::install::locate(maxdiff::pjrt::install::PluginKind::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder
        .path()
        .join(format!("cpu-{}", own.kind.pinned_version()));
    std::fs::create_dir(&plugin).unwrap();
    // The same library, but for the hash of its sources that it carries, beside the libraries that it needs.
    let folder_of_own = own.library.parent().unwrap();
    let listed = std::fs::read_to_string(folder_of_own.join("manifest.json")).unwrap();
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    for name in listed["members"].as_object().unwrap().keys() {
        std::os::unix::fs::symlink(folder_of_own.join(name), plugin.join(name)).unwrap();
    }
    let hash = listed["sources_sha256"].as_str().unwrap().as_bytes();
    let mut bytes = std::fs::read(&own.library).unwrap();
    let places: Vec<usize> = bytes
        .windows(hash.len())
        .enumerate()
        .filter(|(_, window)| *window == hash)
        .map(|(at, _)| at)
        .collect();
    assert!(
        !places.is_empty(),
        "the library carries the hash of its sources"
    );
    for at in places {
        bytes[at..at + hash.len()].fill(b'0');
    }
    let library = plugin.join(own.library.file_name().unwrap());
    std::fs::write(&library, &bytes).unwrap();
    let manifest = serde_json::json!({
        "kind": "cpu",
        "version": own.kind.pinned_version(),
        "library": library,
        "sha256": maxdiff::util::hash::Sha256::of(&bytes).to_string(),
        "size": bytes.len(),
        "source": own.source,
        "sources_sha256": "00",
    });
    std::fs::write(plugin.join("manifest.json"), manifest.to_string()).unwrap();
    let inputs = Inputs::sd15().write(folder.path());
    let output = program(["module", "run", "--quiet"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .arg(golden("unet_sd15"))
        .args(["hardware=cpu", "jax_cache_dir="])
        .arg("--inputs")
        .arg(&inputs)
        .arg("--outputs")
        .arg(folder.path().join("out.safetensors"))
        .output()
        .unwrap();
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(
        told,
        "warning: the cpu plugin was built from other sources than this program's, so its kernels are not used; run \
         `maxdiff-rs plugin install cpu`\n"
    );
    let output = program(["plugin", "install", "cpu", "--if-needed"])
        .env("MAXDIFF_PLUGIN_DIR", folder.path())
        .env("PATH", "")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("python3 with pip is needed"), "{error}");
}

#[test]
fn paths_that_are_no_unicode_are_shown_all_the_same() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let strange = folder.path().join(std::ffi::OsStr::from_bytes(b"f\xff"));
    for (args, pointer, code) in [
        (&["plugin", "list", "--json"][..], "/folder", 0),
        (&["doctor", "--json"][..], "/plugin_folder/path", 1),
    ] {
        let mut command = program(args);
        let output = command.env("MAXDIFF_PLUGIN_DIR", &strange).output();
        let output = output.unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let shown = report.pointer(pointer).and_then(Value::as_str).unwrap();
        assert!(shown.ends_with("f\u{fffd}"), "{shown}");
    }
}

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
    // The source's own infinity is not of the conversion's making.
    values[7] = f32::INFINITY;
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
