//! `quantize` from the outside, and what the program does with its results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{golden, json, keep_programs, program, text, without_optimizations};
use crate::generate;
use crate::module_run::Inputs;
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use maxdiff::models::Part;
use maxdiff::quant::{Observer, ObserverKind, quantize_observed, quantize_weight};
use maxdiff::weights::source::ModelSource;
use maxdiff::weights::{Checkpoint, TensorView, cast, save};
use serde_json::{Value, json};

/// A small Stable Diffusion 1.x in `dir`: the UNet that is recorded alone, with the other parts of a pipeline.
pub fn model(dir: &Path) -> PathBuf {
    let model = dir.join("model");
    for (from, to, files) in [
        ("pipeline_sd15", "", &["model_index.json"][..]),
        (
            "pipeline_sd15/scheduler",
            "scheduler",
            &["scheduler_config.json"],
        ),
        (
            "pipeline_sd15/text_encoder",
            "text_encoder",
            &["config.json", "model.safetensors"],
        ),
        (
            "pipeline_sd15/vae",
            "vae",
            &["config.json", "diffusion_pytorch_model.safetensors"],
        ),
        (
            "unet_sd15",
            "unet",
            &["config.json", "diffusion_pytorch_model.safetensors"],
        ),
    ] {
        fs::create_dir_all(model.join(to)).unwrap();
        for file in files {
            fs::copy(golden(from).join(file), model.join(to).join(file)).unwrap();
        }
    }
    model
}

pub fn quantize(model: &Path, output: &Path, words: &[&str]) -> Output {
    program(["quantize", "sd15"])
        .arg(format!("pretrained_model_name_or_path={}", model.display()))
        .arg("--output")
        .arg(output)
        .args(words)
        .output()
        .unwrap()
}

/// Quantizes what must succeed; the report.
pub fn quantized(model: &Path, output: &Path, words: &[&str]) -> Value {
    json(&quantize(model, output, &[words, &["--json"]].concat()))
}

/// The last line of the errors of a call that must end with `code`.
#[track_caller]
pub fn refused(output: &Output, code: i32, expected: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.contains(expected), "{error}");
    assert!(output.stdout.is_empty());
}

/// Runs a model's UNet; the bytes of the result, and how many contractions were quantized.
fn run(model: &Path, words: &[&str]) -> (Vec<u8>, u64) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let mut command = program(["module", "run", "--json"]);
    let output = without_optimizations(&mut command)
        .arg(model.join("unet"))
        .arg("--inputs")
        .arg(Inputs::sd15().write(dir.path()))
        .arg("--outputs")
        .arg(&out)
        .args(["hardware=cpu", &keep_programs()])
        .args(words)
        .output()
        .unwrap();
    let report = json(&output);
    let sample = Checkpoint::open(&out).unwrap().read("sample").unwrap();
    let count = report["contractions"]["quantized"].as_u64().unwrap();
    (sample.data, count)
}

fn convert(model: &Path, output: &Path, dtype: &str) {
    let output = program(["convert"])
        .args([model, output])
        .arg(format!("dtype={dtype}"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn save_tensors(path: &Path, tensors: &[(String, maxdiff::host_tensor::HostTensor)]) {
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    save(path, views, &BTreeMap::new()).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_quantized_checkpoint_runs_as_the_source_that_is_quantized_while_it_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let half = dir.path().join("half");
    convert(&source, &half, "bf16");
    let w8a16 = "quantization=int8_w8a16";
    let w4a16 = "quantization=w4a16";
    let w4a4 = "quantization=w4a4";
    let channel = "quantization_granularity=channel";
    let group = "quantization_granularity=4";
    let tensor = "quantization_granularity=tensor";
    let quark = "quantization_numerics=quark";
    let affine = "quantization_symmetric=False";
    let mixed = r"quant_rules=[{path: '.*\.ff\..*', mode: w4a16, granularity: 8}, {path: '.*conv1', mode: int8_w8a16}, {path: 'mid.*', mode: none}]";
    let int8 = "quantization=int8";
    let f32 = "activations_dtype=float32";
    let qwix = "use_qwix_quantization=True";
    // The source; what `quantize` is given; then what the result and what the source are run with.
    type Case<'a> = (
        &'a Path,
        &'a [&'a str],
        &'a [(&'a [&'a str], &'a [&'a str])],
    );
    let narrow = "quantization_numerics=narrow";
    let cases: [Case<'_>; 13] = [
        (&half, &[w8a16], &[(&[], &[w8a16]), (&[int8], &[int8])]),
        (&source, &[int8], &[(&[], &[int8])]),
        (&source, &[w8a16, f32], &[(&[f32], &[w8a16, f32])]),
        (&source, &[w8a16, qwix], &[(&[], &[w8a16, qwix])]),
        // int4 in groups, in bf16; asymmetric; int8 in one scale; layers of several formats.
        (&source, &[w4a16, group], &[(&[], &[w4a16, group])]),
        (
            &source,
            &[w4a16, group, quark, affine, f32],
            &[(&[f32], &[w4a16, group, quark, affine, f32])],
        ),
        (&source, &[w8a16, tensor], &[(&[], &[w8a16, tensor])]),
        // Activations in int4: by groups, and by tokens, whose integers are multiplied.
        (
            &source,
            &[w4a4, group, f32],
            &[(&[f32], &[w4a4, group, f32])],
        ),
        (&source, &[w4a4, channel], &[(&[], &[w4a4, channel])]),
        // The narrow range, of weights alone and with activations in int8 and int4.
        (
            &source,
            &[w4a16, group, narrow],
            &[(&[], &[w4a16, group, narrow])],
        ),
        (
            &source,
            &[int8, narrow],
            &[(&[], &[int8, narrow]), (&[int8], &[int8, narrow])],
        ),
        (
            &source,
            &[w4a4, group, narrow, f32],
            &[(&[f32], &[w4a4, group, narrow, f32])],
        ),
        (&source, &[int8, mixed], &[(&[], &[int8, mixed])]),
    ];
    for (i, (source, words, runs)) in cases.into_iter().enumerate() {
        let output = dir.path().join(i.to_string());
        let report = quantized(source, &output, words);
        for (own, of_source) in runs {
            let (found, count) = run(&output, own);
            let (expected, as_many) = run(source, of_source);
            assert!(found == expected, "{words:?} {own:?}");
            assert_eq!(count, as_many);
            assert_eq!(report["tensors"].as_array().unwrap().len() as u64, count);
        }
    }
}

#[test]
fn generate_and_lower_take_a_quantized_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let source = golden("pipeline_sd21");
    let output = dir.path().join("int8");
    let words = [
        "model_family=",
        "quantization=int8_w8a16",
        "activations_dtype=float32",
    ];
    quantized(&source, &output, &words);
    let named = format!("pretrained_model_name_or_path={}", output.display());
    let small = [
        "prompt=a cat",
        "height=16",
        "width=16",
        "num_inference_steps=2",
        "--json",
    ];
    let drawn = |words: &[&str]| {
        let words = [&small[..], words].concat();
        let report = json(&generate::command(dir.path(), &words).output().unwrap());
        let path = report["images"][0]["path"].as_str().unwrap().to_owned();
        image::open(path).unwrap().to_rgb8()
    };
    assert!(drawn(&[&named]) == drawn(&["quantization=int8_w8a16"]));

    let lower = |words: &[&str]| {
        let mut command = program(["lower", "sd21", "--json", "resolution=16", "hardware=cpu"]);
        json(&command.args(words).output().unwrap())
    };
    // Of the known model there is no folder.
    let lowered = lower(&[&named, "model_family="]);
    let tensors = ModelSource::open(&output).unwrap().components[&Part::Unet]
        .checkpoint
        .quantization()
        .unwrap()
        .layers
        .len();
    assert_eq!(lowered["quantized"], json!(tensors));

    let rules = "quant_rules=[{path: 'mid_block.*', mode: none}]";
    let with_rules = generate::command(
        dir.path(),
        &[&small[..], &[&named, "quantization=int8_w8a16", rules]].concat(),
    );
    refused(
        &{ with_rules }.output().unwrap(),
        2,
        "quant_rules has no effect",
    );
    let qwix = [
        "quantization=int8_w8a16",
        "use_qwix_quantization=True",
        &named,
    ];
    let qwix = generate::command(dir.path(), &[&small[..], &qwix].concat()).output();
    refused(&qwix.unwrap(), 2, "were quantized with AQT's numerics");
}

/// Every tensor is as the library quantizes it, or as it was; other parts and the configuration are copied.
#[test]
fn what_is_written_is_what_the_source_has() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    let rule = "quant_rules=[{path: 'mid_block.*', mode: none}]";
    let report = quantized(&source, &output, &["quantization=int8_w8a16", rule]);
    assert_eq!(names(dir.path()), ["model", "out"]);
    let [before, after] = [&source, &output].map(|path| ModelSource::open(path).unwrap());
    assert_eq!(before.components.len(), after.components.len());
    assert_eq!(before.scheduler, after.scheduler);
    let unets = [&before, &after].map(|model| &model.components[&Part::Unet]);
    let [floats, stored] = unets.map(|unet| &unet.checkpoint);
    let quantization = stored.quantization().unwrap();
    let format = TensorFormat {
        range: Range::Stored(DType::BF16),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    assert_eq!(format.granularity, Granularity::Channel);
    let rows = report["tensors"].as_array().unwrap();
    let mut rows: BTreeMap<&str, &Value> = rows
        .iter()
        .map(|row| (row["layer"].as_str().unwrap(), row))
        .collect();
    let mut parameters = 0;
    for (name, shape) in floats.iter() {
        parameters += shape.count();
        let Some(found) = quantization.format_of(name) else {
            assert_eq!(stored.read(name).unwrap(), floats.read(name).unwrap());
            continue;
        };
        assert_eq!(found, format);
        let layer = name.strip_suffix(".weight").unwrap();
        assert!(!layer.starts_with("mid_block"), "{layer}");
        let half = cast(floats.read(name).unwrap(), DType::BF16).unwrap();
        let expected = quantize_weight(&half, format).unwrap();
        assert_eq!(stored.read(name).unwrap(), expected.values);
        assert_eq!(
            stored.read(&format!("{name}_scale")).unwrap(),
            expected.scale
        );
        let row = rows.remove(layer).unwrap();
        assert_eq!(row["shape"], json!(shape.dims));
        assert_eq!(row["format"], "int8, a scale a channel, aqt");
        assert_eq!(row["bytes"], json!(shape.count() + 2 * shape.dims[0]));
        assert_eq!(row["source_bytes"], json!(4 * shape.count()));
        assert!((row["sqnr_db"].as_f64().unwrap() - expected.sqnr_db()).abs() < 1e-9);
        assert!(expected.sqnr_db() > 35.0, "{layer}: {}", expected.sqnr_db());
    }
    assert!(rows.is_empty());
    assert_eq!(report["parameters"], json!(parameters));
    let rules = report["rules"].as_array().unwrap();
    assert_eq!(rules[0]["pattern"], "mid_block.*");
    assert!(rules[0]["share_percent"].as_f64().unwrap() > 1.0);
    let shares: f64 = rules
        .iter()
        .map(|rule| rule["share_percent"].as_f64().unwrap())
        .sum();
    assert!((80.0..100.0).contains(&shares), "{shares}");
    // Operations at the recipe's size: of layers that are quantized, of the others, and of attention, which are all.
    let flops = &report["flops"];
    assert_eq!([&flops["height"], &flops["width"]], [512, 512]);
    assert_eq!(flops["tokens"], 77);
    let parts = [
        &report["formats"][0],
        &flops["layers_in_float"],
        &flops["products_of_activations"],
    ];
    let operations = parts.map(|part| part["flops"].as_u64().unwrap());
    assert!(operations.iter().all(|operations| *operations > 0));
    assert_eq!(flops["all"], operations.iter().sum::<u64>());
    let percent = parts.map(|part| part["flops_percent"].as_f64().unwrap());
    assert!((percent.iter().sum::<f64>() - 100.0).abs() < 1e-9);
    assert_eq!(report["algorithms"], serde_json::json!([]));
    for key in ["calibration_steps", "calibration_seconds"] {
        assert!(report[key].is_null(), "{key}");
    }
    for (part, component) in &before.components {
        let mut config = after.components[part].config.clone();
        config.remove("quantization_config");
        assert_eq!(config, component.config);
        if *part != Part::Unet {
            let copied = &after.components[part].checkpoint;
            for name in component.checkpoint.names() {
                let tensor = component.checkpoint.read(name).unwrap();
                assert_eq!(copied.read(name).unwrap(), tensor);
            }
        }
    }
    // What people read has the same.
    let again = dir.path().join("again");
    let told = quantize(&source, &again, &["quantization=int8_w8a16", rule]);
    let told = text(&told.stdout);
    assert!(told.contains("  float       mid_block.*: "), "{told}");
    let count = quantization.layers.len();
    assert!(told.contains(&format!("{count} of ")), "{told}");
    assert!(told.contains(" % of the operations\n"), "{told}");
    let attention = "products of two activations (attention), ";
    assert!(told.contains(attention), "{told}");
}

#[test]
fn floats_are_stored_no_wider_than_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    quantized(
        &source,
        &output,
        &["quantization=int8_w8a16", "weights_dtype=bfloat16"],
    );
    let after = ModelSource::open(&output).unwrap();
    for component in after.components.values() {
        for (name, shape) in component.checkpoint.iter() {
            assert!(
                !shape.dtype.is_float() || shape.dtype.bits() == 16,
                "{name} {shape}"
            );
        }
    }
    let own = ["weights_dtype=bfloat16"];
    let of_source = ["quantization=int8_w8a16", "weights_dtype=bfloat16"];
    assert!(run(&output, &own) == run(&source, &of_source));
}

#[test]
fn a_model_that_cannot_be_quantized_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    let w8a16 = "quantization=int8_w8a16";
    let taken = dir.path().join("taken");
    fs::create_dir(&taken).unwrap();
    refused(&quantize(&source, &taken, &[w8a16]), 2, "exists already");
    let nowhere = dir.path().join("no/parent");
    refused(&quantize(&source, &nowhere, &[w8a16]), 1, "No such file");
    let stray = "quant_rules=[{path: 'nowhere.*', mode: none}]";
    let stray = quantize(&source, &output, &[w8a16, stray]);
    refused(
        &stray,
        2,
        "quantization rule 'nowhere.*' matches no contraction of unet",
    );
    let all = "quant_rules=[{path: '.*', mode: none}]";
    refused(
        &quantize(&source, &output, &[w8a16, all]),
        2,
        "applies to nothing",
    );

    // A number that is none, in the last layer that is written.
    let unet = source.join("unet/diffusion_pytorch_model.safetensors");
    let file = Checkpoint::open(&unet).unwrap();
    let mut tensors: Vec<_> = file
        .names()
        .map(|name| (name.to_owned(), file.read(name).unwrap()))
        .collect();
    let broken = "up_blocks.3.resnets.2.conv2.weight";
    let place = tensors.iter().position(|(name, _)| name == broken);
    let place = place.unwrap_or_else(|| {
        let last = |(name, tensor): &(String, maxdiff::host_tensor::HostTensor)| {
            name.starts_with("up_blocks") && tensor.shape.rank() == 4
        };
        tensors.iter().rposition(last).unwrap()
    });
    let name = tensors[place].0.clone();
    tensors[place].1.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    save_tensors(&unet, &tensors);
    let expected = format!("tensor {name}: it holds NaN or infinity");
    refused(&quantize(&source, &output, &[w8a16]), 1, &expected);

    // More than the scales' type holds: the largest f32 is infinite in bfloat16.
    tensors[place].1.data[..4].copy_from_slice(&f32::MAX.to_le_bytes());
    save_tensors(&unet, &tensors);
    let layer = name.strip_suffix(".weight").unwrap();
    let expected = format!("{layer}: values too large for bf16");
    refused(&quantize(&source, &output, &[w8a16]), 1, &expected);
    assert_eq!(names(dir.path()), ["model", "taken"]);
    assert!(names(&taken).is_empty());
}

/// A file system without room for the result: the source is as it was, and nothing is left of the result.
#[test]
fn a_full_disk_leaves_the_source_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let unet = source.join("unet/diffusion_pytorch_model.safetensors");
    let before = fs::read(&unet).unwrap();
    let output = std::process::Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .args(["quantize", "sd15", "quantization=int8_w8a16"])
        .arg(format!(
            "pretrained_model_name_or_path={}",
            source.display()
        ))
        .arg("--output")
        .arg(dir.path().join("out"))
        .output()
        .unwrap();
    refused(&output, 1, "no space left on the device");
    assert_eq!(names(dir.path()), ["model"]);
    assert!(fs::read(&unet).unwrap() == before);
}

/// A checkpoint whose description and tensors disagree is refused when it is opened, by every verb that reads it.
#[test]
fn a_quantized_checkpoint_that_contradicts_itself_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    quantized(&source, &output, &["quantization=int8_w8a16"]);
    let again = quantize(
        &output,
        &dir.path().join("again"),
        &["quantization=int8_w8a16"],
    );
    refused(&again, 1, "quantized already");
    let floats = program(["convert"])
        .args([&output, &dir.path().join("again")])
        .output();
    refused(
        &floats.unwrap(),
        1,
        "a quantized checkpoint cannot be converted",
    );

    let place = output.join("unet/config.json");
    let whole: Value = serde_json::from_str(&fs::read_to_string(&place).unwrap()).unwrap();
    let opened = |change: &dyn Fn(&mut Value)| {
        let mut config = whole.clone();
        change(&mut config["quantization_config"]);
        fs::write(&place, config.to_string()).unwrap();
        let error = ModelSource::open(&output)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(&output.display().to_string()), "{error}");
        error
    };
    let has = |error: String, expected: &str| assert!(error.contains(expected), "{error}");
    let layers = |config: &Value| config["formats"][0]["layers"].as_array().unwrap().clone();
    let first = layers(&whole["quantization_config"])[0]
        .as_str()
        .unwrap()
        .to_owned();
    let lacking = opened(&|config| {
        config["formats"][0]["layers"] = layers(config)[1..].into();
    });
    has(lacking, &format!("{first}.weight s8["));
    let more = opened(&|config| {
        let more = [layers(config), vec![json!("nowhere")]].concat();
        config["formats"][0]["layers"] = more.into();
    });
    has(
        more,
        "1 tensors are not as its quantization_config says: nowhere.weight is missing",
    );
    let twice = opened(&|config| {
        let more = [layers(config), vec![json!(first)]].concat();
        config["formats"][0]["layers"] = more.into();
    });
    has(twice, &format!("the layer {first} stands twice"));
    let granularity =
        opened(&|config| config["formats"][0]["weight"]["granularity"] = "tensor".into());
    has(granularity, "_scale is bf16[");
    let scale = opened(&|config| config["formats"][0]["weight"]["scale_dtype"] = "float32".into());
    has(scale, ", expected f32[");
    let dtype = opened(&|config| config["formats"][0]["weight"]["scale_dtype"] = "float8".into());
    has(dtype, "scale_dtype is \"float8\", which is not read here");
    let element = opened(&|config| config["formats"][0]["weight"]["element"] = "int3".into());
    has(
        element,
        "element is \"int3\", which is not read here; read are int8, int4, uint4, float8_e4m3fn",
    );
    let numerics = opened(&|config| config["formats"][0]["weight"]["numerics"] = "none".into());
    has(
        numerics,
        "expected one of `aqt`, `qwix`, `quark`, `narrow`, `gguf`, `nf4`, `mx`, `mx_e2m3`, `mx_e3m2`, `nv`",
    );
    let group = opened(&|config| {
        let weight = &mut config["formats"][0]["weight"];
        (weight["granularity"], weight["group_size"]) = ("group".into(), 4.into());
    });
    has(group, "_scale is bf16[");
    let no_size = opened(&|config| config["formats"][0]["weight"]["granularity"] = "group".into());
    has(no_size, "expected a number above 0");
    let int4 = opened(&|config| config["formats"][0]["weight"]["element"] = "int4".into());
    has(int4, "is s8[");
    let affine = opened(&|config| config["formats"][0]["weight"]["symmetric"] = false.into());
    has(affine, "symmetric is false, and aqt has no zero points");
    let affine = opened(&|config| {
        let weight = &mut config["formats"][0]["weight"];
        (weight["symmetric"], weight["numerics"]) = (false.into(), "quark".into());
    });
    has(affine, "_zero_point is missing");
    let version = opened(&|config| config["version"] = 3.into());
    has(version, "has version 3, this program reads version 2");
    let foreign = opened(&|config| config["quant_method"] = "gptq".into());
    has(
        foreign,
        "quantized by \"gptq\", whose files are not read here",
    );
    let nothing = opened(&|config| config["formats"] = json!([]));
    has(nothing, "no layer is quantized");
    let unknown = opened(&|config| config["zero_points"] = true.into());
    has(unknown, "unknown field `zero_points`");

    // Without the description the integers are no weights.
    let mut config = whole.clone();
    config
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    fs::write(&place, config.to_string()).unwrap();
    let inputs = Inputs::sd15().write(dir.path());
    let run = program(["module", "run"])
        .arg(output.join("unet"))
        .arg("--inputs")
        .arg(inputs)
        .arg("--outputs")
        .arg(dir.path().join("result.safetensors"))
        .output()
        .unwrap();
    refused(&run, 1, "expected floating-point numbers, found s8");
}

/// What `quantize` is told of formats that do not fit together, or do not fit a layer.
#[test]
fn formats_that_do_not_fit_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    for (words, expected) in [
        (
            &["quantization=w4a16"][..],
            "unet/down_blocks.0.resnets.0.conv1: groups of 64 do not divide its 8 input features; nearest: 8; a rule",
        ),
        (
            &["quantization=w4a16", "quantization_granularity=0"],
            "expected tensor, channel, or a number of input features",
        ),
        (
            &["quantization=int8", "quantization_granularity=32"],
            "it needs quantization=int8_w8a16, w4a16, fp8, fp8_full, fp8_w8a16, nf4, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, int8_w8a8_static, fp8_w8a8_static, svdquant_w4a16, w4a4 or svdquant_w4a4",
        ),
        (
            &["quantization=w4a16", "quantization_symmetric=False"],
            "it needs quantization=int8_w8a16, w4a16, fp8, fp8_w8a16, int8_w8a8_static, fp8_w8a8_static, svdquant_w4a16, w4a4 or svdquant_w4a4 and quantization_numerics=quark",
        ),
        (
            &[
                "quantization=int8",
                "quant_rules=[{path: 'mid.*', mode: w4a16, granularity: 4, symmetric: False}]",
            ],
            "mid.*: AQT has no zero points",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: int8, granularity: 4}]",
            ],
            "mid.*: mode int8 multiplies integers",
        ),
        (
            &["quantization=int8", "quantization_numerics=quark"],
            "AMD Quark's numerics are here for weights alone",
        ),
        (
            &[
                "quantization=int8_w8a16",
                "quantization_numerics=narrow",
                "quant_rules=[{path: 'mid.*', mode: int8_w8a16, symmetric: False}]",
            ],
            "mid.*: the narrow range has no zero points",
        ),
        (
            &["quantization=fp8_w8a16", "quantization_numerics=narrow"],
            "fp8 weights are here in AMD Quark's numerics",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: w4a16, group: 4}]",
            ],
            "quant_rules.group: no such key",
        ),
    ] {
        refused(&quantize(&source, &output, words), 2, expected);
    }
    assert_eq!(names(dir.path()), ["model"]);
}

/// The weights of the UNet of [`model`] before they are quantized in `dir`, after it, and the report.
fn quantized_unet(dir: &Path, words: &[&str]) -> ([Checkpoint; 2], Value) {
    let source = model(dir);
    let output = dir.join("out");
    let report = quantized(&source, &output, words);
    let floats = Checkpoint::open(&source.join("unet")).unwrap();
    let mut described = ModelSource::open(&output).unwrap();
    let unet = described.components.remove(&Part::Unet).unwrap();
    ([floats, unet.checkpoint], report)
}

/// int4 with a scale for 4 input features.
fn int4_in_groups(convention: NumericsConvention) -> TensorFormat {
    TensorFormat {
        element: DType::S4,
        granularity: Granularity::Group(4),
        ..TensorFormat::int8(convention)
    }
}

/// The observer of a rule decides the ranges of the weights of its layers, and that of the configuration those of the others.
#[test]
fn rules_have_observers() {
    let dir = tempfile::tempdir().unwrap();
    let words = [
        "quantization=w4a16",
        "quantization_granularity=4",
        "quantization_observer=power_of_two",
        "quant_rules=[{path: '.*conv1', mode: w4a16, granularity: 4, observer: mse}]",
    ];
    let ([floats, described], _) = quantized_unet(dir.path(), &words);
    let format = int4_in_groups(NumericsConvention::Aqt);
    for (layer, [own, other]) in [
        ("conv1", [ObserverKind::Mse, ObserverKind::PowerOfTwo]),
        ("conv2", [ObserverKind::PowerOfTwo, ObserverKind::Mse]),
    ] {
        let name = format!("down_blocks.0.resnets.0.{layer}.weight");
        let float = cast(floats.read(&name).unwrap(), DType::BF16).unwrap();
        let of = |kind| quantize_observed(&float, format, Observer::of(kind)).unwrap();
        let scale = described.read(&format!("{name}_scale")).unwrap();
        assert_eq!(described.read(&name).unwrap(), of(own).values, "{name}");
        assert_eq!(scale, of(own).scale, "{name}");
        assert_ne!(scale, of(other).scale, "{name}");
    }
}

/// int4 in the file: two input features a byte, for convolutions too, and the bits that are told.
#[test]
fn int4_weights_share_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let words = [
        "quantization=w4a16",
        "quantization_granularity=4",
        "quantization_numerics=quark",
        "quant_rules=[{path: '.*conv2', mode: int8_w8a16, granularity: tensor}]",
    ];
    let ([floats, described], report) = quantized_unet(dir.path(), &words);
    let file = Checkpoint::open(&dir.path().join("out/unet")).unwrap();
    let name = "down_blocks.0.resnets.0.conv1.weight";
    let shape = floats.info(name).unwrap();
    let [out, inputs, height, width] = shape.dims[..] else {
        panic!("{shape}");
    };
    assert_eq!(
        file.info(name).unwrap().to_string(),
        format!("u8[{out},{},{height},{width}]", inputs / 2)
    );
    let float = cast(floats.read(name).unwrap(), DType::BF16).unwrap();
    let format = int4_in_groups(NumericsConvention::Quark);
    let expected = quantize_weight(&float, format).unwrap();
    let found = described.read(name).unwrap();
    assert_eq!(found, expected.values);
    // The second input feature of the first output feature is in the upper half of the first byte.
    let byte = file.read(name).unwrap().data[0];
    let values = found.to_f64_vec().unwrap();
    assert_eq!(f64::from((byte << 4) as i8 >> 4), values[0]);
    assert_eq!(f64::from(byte as i8 >> 4), values[height * width]);

    let formats = report["formats"].as_array().unwrap();
    let told: Vec<(&str, f64)> = formats
        .iter()
        .map(|f| (f["format"].as_str().unwrap(), f["bits"].as_f64().unwrap()))
        .collect();
    let [(int4, of_int4), (int8, of_int8)] = told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(
        [int4, int8],
        ["int4, a scale for 4, quark", "int8, one scale, quark"]
    );
    // A bf16 scale for 4 features of a linear layer, or for 36 numbers of a convolution; one for a whole weight.
    assert!((4.0 + 16.0 / 36.0..8.0).contains(&of_int4), "{of_int4}");
    assert!((8.0..8.1).contains(&of_int8), "{of_int8}");
    assert_eq!(report["bits_of_source"].as_f64().unwrap(), 32.0);
}
