//! `quantize` with calibration from the outside, and what `generate` and `lower` do with its results.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::common::{
    cpu_plugin, golden, json, keep_programs, program, text, without_optimizations,
};
use crate::generate;
use maxdiff::models::Part;
use maxdiff::weights::source::ModelSource;
use serde_json::Value;

pub fn quantize(output: &Path, words: &[&str]) -> Output {
    cpu_plugin();
    let tokenizer = golden("tokenizer");
    without_optimizations(&mut program(["quantize", "sd21", "model_family="]))
        .arg(format!(
            "pretrained_model_name_or_path={}",
            golden("pipeline_sd21").display()
        ))
        .arg(format!(
            "tokenizer_model_name_or_path={}",
            tokenizer.display()
        ))
        .args(["activations_dtype=float32", &keep_programs()])
        .arg("--output")
        .arg(output)
        .args(words)
        .output()
        .unwrap()
}

pub fn quantized(output: &Path, words: &[&str]) -> Value {
    json(&quantize(output, &[words, &["--json"]].concat()))
}

fn drawn(dir: &Path, words: &[&str]) -> image::RgbImage {
    let small = [
        "prompt=a cat",
        "height=16",
        "width=16",
        "num_inference_steps=2",
        "--json",
    ];
    let words = [&small[..], words].concat();
    let report = json(&generate::command(dir, &words).output().unwrap());
    let path = report["images"][0]["path"].as_str().unwrap().to_owned();
    image::open(path).unwrap().to_rgb8()
}

/// The mean distance of two images' numbers.
fn distance(a: &image::RgbImage, b: &image::RgbImage) -> f64 {
    let both = a.as_raw().iter().zip(b.as_raw());
    let sum: f64 = both.map(|(a, b)| f64::from(a.abs_diff(*b))).sum();
    sum / a.as_raw().len() as f64
}

pub const SMALL: &str =
    "calibration={prompts: [a cat, a red dog], steps: 2, height: 16, width: 16}";

#[test]
fn a_calibrated_checkpoint_draws_nearly_what_its_source_draws() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("static");
    let captions = dir.path().join("captions.tsv");
    fs::write(
        &captions,
        "id\timage_id\tcaption\n1\t7\ta cat\n2\t8\t a red dog \n3\t9\tno\n",
    )
    .unwrap();
    let of_file = format!(
        "calibration={{prompts_file: '{}', max_prompts: 2, steps: 2, height: 16, width: 16, observer: mse}}",
        captions.display()
    );
    let report = quantized(&output, &["quantization=int8_w8a8_static", &of_file]);
    // Guidance is on, and both of its rows are in one run.
    assert_eq!(report["calibration_steps"], 4);
    let [calibration, all] =
        ["calibration_seconds", "seconds"].map(|key| report[key].as_f64().unwrap());
    assert!(
        0.0 < calibration && calibration < all,
        "{calibration} {all}"
    );
    let tensors = report["tensors"].as_array().unwrap();
    for row in tensors {
        let ratio = row["output_sqnr_db"].as_f64().unwrap();
        assert!((30.0..60.0).contains(&ratio), "{row}");
    }
    let [layers] = &report["quantization_config"]["formats"].as_array().unwrap()[..] else {
        panic!("one format");
    };
    assert_eq!(layers["activation"]["granularity"], "tensor");
    let stored = ModelSource::open(&output).unwrap();
    let checkpoint = &stored.components[&Part::Unet].checkpoint;
    let scale = |name: &str| {
        let path = format!("down_blocks.0.attentions.0.transformer_blocks.0.{name}.input_scale");
        checkpoint.read(&path).unwrap().to_f32_vec().unwrap()
    };
    // What reads the same has the same scale.
    assert_eq!(scale("attn1.to_q"), scale("attn1.to_v"));
    assert_ne!(scale("attn1.to_q"), scale("attn1.to_out.0"));

    let named = format!("pretrained_model_name_or_path={}", output.display());
    let float = drawn(dir.path(), &[]);
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!(found < 12.0, "{found}");
    let mut command = program(["lower", "sd21", "--json", "resolution=16", "hardware=cpu"]);
    let lowered = json(&command.args([&named, "model_family="]).output().unwrap());
    assert_eq!(lowered["quantized"], tensors.len());
}

/// The narrow range of integers, for weights and for activations by recorded scales.
#[test]
fn a_calibrated_checkpoint_may_be_narrow() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("narrow");
    let words = [
        "quantization=int8_w8a8_static",
        "quantization_numerics=narrow",
        SMALL,
    ];
    let report = quantized(&output, &words);
    let formats = &report["quantization_config"]["formats"][0];
    for operand in ["weight", "activation"] {
        assert_eq!(formats[operand]["element"], "int8");
        assert_eq!(formats[operand]["numerics"], "narrow");
    }
    let named = format!("pretrained_model_name_or_path={}", output.display());
    let float = drawn(dir.path(), &[]);
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!(found < 12.0, "{found}");
}

/// fp8 with recorded scales and with those of each token, weights of the first with activations as the second has them, and
/// weights alone in groups.
#[test]
fn fp8_checkpoints_draw_nearly_what_their_source_draws() {
    let dir = tempfile::tempdir().unwrap();
    let float = drawn(dir.path(), &[]);
    for (mode, more, granularity, activation) in [
        ("fp8", &[][..], "channel", "channel"),
        ("fp8_w8a8_static", &[SMALL], "tensor", "tensor"),
        ("mxfp8", &["quantization_granularity=4"], "group", ""),
    ] {
        let output = dir.path().join(mode);
        let asked = format!("quantization={mode}");
        let words = [&[&*asked][..], more].concat();
        let report = quantized(&output, &words);
        let [layers] = &report["quantization_config"]["formats"].as_array().unwrap()[..] else {
            panic!("one format");
        };
        let weight = &layers["weight"];
        assert_eq!(weight["element"], "float8_e4m3fn");
        assert_eq!(weight["granularity"], granularity);
        let found = layers["activation"]["granularity"].as_str();
        assert_eq!(found.unwrap_or_default(), activation);
        let named = format!("pretrained_model_name_or_path={}", output.display());
        let in_fp8 = (!activation.is_empty()).then_some("quantization=fp8");
        for asked in ["quantization="].into_iter().chain(in_fp8) {
            let found = distance(&drawn(dir.path(), &[&named, asked]), &float);
            assert!((0.01..24.0).contains(&found), "{mode} {asked}: {found}");
        }
    }
}

/// `calibration.split_skips`: the layers of a UNet behind skip connections, and no others, have two scales. `text_in_float`: those
/// that read text have none.
#[test]
fn ranges_behind_skip_connections_are_split() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("split");
    let split = SMALL.replace('}', ", split_skips: True, text_in_float: True}");
    let report = quantized(&output, &["quantization=int8_w8a8_static", &split]);
    let formats = report["quantization_config"]["formats"].as_array().unwrap();
    let of = |granularity: &str| {
        let found = formats
            .iter()
            .find(|f| f["activation"]["granularity"] == granularity);
        found.unwrap()["layers"].as_array().unwrap().clone()
    };
    let (with_parts, others) = (of("feature"), of("tensor"));
    assert!(with_parts.len() < others.len());
    // Those that read text alone.
    let floats = formats.iter().find(|f| f["activation"].is_null()).unwrap();
    let floats = floats["layers"].as_array().unwrap();
    assert!(!floats.is_empty());
    for layer in floats {
        let layer = layer.as_str().unwrap();
        assert!(
            layer.ends_with("attn2.to_k") || layer.ends_with("attn2.to_v"),
            "{layer}"
        );
    }
    let stored = ModelSource::open(&output).unwrap();
    let checkpoint = &stored.components[&Part::Unet].checkpoint;
    for layer in &with_parts {
        let layer = layer.as_str().unwrap();
        assert!(layer.starts_with("up_blocks."), "{layer}");
        assert!(
            layer.ends_with("conv1") || layer.ends_with("conv_shortcut"),
            "{layer}"
        );
        let scales = checkpoint.read(&format!("{layer}.input_scale")).unwrap();
        let mut scales = scales.to_f32_vec().unwrap();
        scales.dedup();
        assert_eq!(scales.len(), 2, "{layer}");
    }
    let named = format!("pretrained_model_name_or_path={}", output.display());
    let found = distance(&drawn(dir.path(), &[&named]), &drawn(dir.path(), &[]));
    assert!(found < 12.0, "{found}");
    let smooth = quantize(
        &dir.path().join("out"),
        &[
            "quantization=int8_w8a8_static",
            "quantization_smooth_alpha=0.5",
            &split,
        ],
    );
    let error = text(&smooth.stderr);
    assert!(
        error.contains("calibration.split_skips takes the largest magnitude of each part"),
        "{error}"
    );
}

#[test]
fn low_rank_products_stand_beside_int4() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("svd");
    let words = [
        "quantization=svdquant_w4a16",
        "svd_rank=4",
        "quantization_granularity=4",
        "quantization_algorithm=gptq",
    ];
    let report = quantized(&output, &[&words[..], &[SMALL]].concat());
    let tensors = report["tensors"].as_array().unwrap();
    let is_number = |row: &&Value, key: &str| row[key].is_number();
    let with = tensors
        .iter()
        .filter(|row| is_number(row, "low_rank_alpha"));
    let with: Vec<&Value> = with.collect();
    // Linear layers have one, convolutions none.
    assert!(with.len() > 20 && with.len() < tensors.len());
    // Which are the layers that GPTQ treats.
    let algorithm = &report["algorithms"][0];
    assert_eq!(algorithm["name"], "gptq");
    assert_eq!(algorithm["layers"], with.len());
    let convolutions = algorithm["convolutions_to_nearest"].as_array().unwrap();
    assert_eq!(with.len() + convolutions.len(), tensors.len());
    for row in with {
        let [rest, output] = ["sqnr_db", "output_sqnr_db"].map(|key| row[key].as_f64().unwrap());
        // What is left of a weight is smaller than the weight, and so is its error.
        assert!(output > rest, "{row}");
    }
    let named = format!("pretrained_model_name_or_path={}", output.display());
    let float = drawn(dir.path(), &[]);
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!(found < 16.0, "{found}");
}

/// Weights and activations in int4, alone and with a low-rank product in the paper's order, whose activations are divided by
/// factors that layers of one parent share.
#[test]
fn int4_activations_draw_from_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let float = drawn(dir.path(), &[]);
    let group = "quantization_granularity=4";
    let plain = dir.path().join("plain");
    let report = quantized(&plain, &["quantization=w4a4", group]);
    let formats = &report["quantization_config"]["formats"][0];
    assert_eq!(formats["activation"]["element"], "int4");
    assert_eq!(formats["activation"]["group_size"], 4);
    let named = format!("pretrained_model_name_or_path={}", plain.display());
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!((0.1..50.0).contains(&found), "{found}");

    let paper = dir.path().join("paper");
    let words = [
        "quantization=svdquant_w4a4",
        "svd_rank=4",
        "svd_order=paper",
        group,
    ];
    let refused = quantize(&paper, &words);
    let error = text(&refused.stderr);
    assert!(
        error.contains("svd_order=paper divides activations by factors"),
        "{error}"
    );
    quantized(&paper, &[&words[..], &[SMALL]].concat());
    let stored = ModelSource::open(&paper).unwrap();
    let checkpoint = &stored.components[&Part::Unet].checkpoint;
    let factors = |name: &str| {
        let path = format!("down_blocks.0.attentions.0.transformer_blocks.0.{name}.smooth_factor");
        checkpoint.read(&path).unwrap().to_f32_vec().unwrap()
    };
    assert_eq!(factors("attn1.to_q"), factors("attn1.to_v"));
    assert_ne!(factors("attn1.to_q"), factors("attn1.to_out.0"));
    let named = format!("pretrained_model_name_or_path={}", paper.display());
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!((0.1..50.0).contains(&found), "{found}");
}

/// Leaves the linear layers of the model in float: the others that are quantized are convolutions.
const WITHOUT_LINEAR_LAYERS: &str = "quant_rules=[{path: '.*transformer_blocks.*', mode: none}]";

#[test]
fn calibration_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let static_int8 = "quantization=int8_w8a8_static";
    for (words, expected) in [
        (
            &[static_int8][..],
            "int8_w8a8_static and fp8_w8a8_static need calibration",
        ),
        (
            &["quantization=w4a16", "quantization_algorithm=gptq"],
            "quantization_algorithm=gptq and awq need calibration",
        ),
        (
            &[
                "quantization=fp8_w8a16",
                "quantization_algorithm=gptq",
                SMALL,
            ],
            "quantization_algorithm=gptq rounds to integers",
        ),
        (
            &[
                "quantization=int8_w8a16",
                "quantization_algorithm=gptq",
                WITHOUT_LINEAR_LAYERS,
                SMALL,
            ],
            "quantization_algorithm=gptq has no effect: it is one of linear layers, and all 31 layers that it is to round are \
             convolutions",
        ),
        (
            &[
                "quantization=int8_w8a16",
                "quantization_algorithm=awq",
                WITHOUT_LINEAR_LAYERS,
                SMALL,
            ],
            "quantization_algorithm=awq has no effect",
        ),
        (
            &["quantization=svdquant_w4a16", "svd_alpha=-1"],
            "svd_alpha=-1 tries how activations and weights share their range",
        ),
        (
            &["quantization=fp8", "quantization_numerics=quark"],
            "fp8 with scales that are found at run time is here in Qwix's numerics",
        ),
        (
            &[static_int8, "calibration={prompts: a, prompts_file: b}"],
            "calibration has both prompts and prompts_file",
        ),
        (
            &[static_int8, "calibration={prompts_file: nowhere.tsv}"],
            "calibration.prompts_file=nowhere.tsv: ",
        ),
        (
            &[
                "quantization=svdquant_w4a16",
                "calibration={prompts: [], steps: 5}",
            ],
            "calibration.steps: has no effect: it needs calibration.prompts or calibration.prompts_file",
        ),
        (
            &[static_int8, SMALL, "quantization_granularity=8"],
            "int8 and fp8 by recorded scales are here in AMD Quark's numerics",
        ),
        (
            &[
                "quantization=fp8_w8a8_static",
                SMALL,
                "quantization_numerics=narrow",
            ],
            "int8 in narrow numerics too",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: mid.*, mode: none}]",
                SMALL,
            ],
            "calibration has no effect",
        ),
        (
            &[static_int8, SMALL, "quantization_observer=entropy"],
            "valid: min_max, percentile, histogram",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: w4a16, algorithm: gptq}]",
            ],
            "mid.*: algorithm gptq needs calibration",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: w4a16, observer: mse, algorithm: gptq}]",
                SMALL,
            ],
            "mid.*: algorithm gptq changes weights while it finds their ranges: leave observer out",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: w4a4, algorithm: awq}]",
                SMALL,
            ],
            "mid.*: algorithm awq is of weights alone",
        ),
        (
            &[
                "quantization=w4a16",
                "quantization_granularity=4",
                "quant_rules=[{path: '.*conv1', mode: w4a16, granularity: 4, algorithm: awq}]",
                SMALL,
            ],
            ".*conv1: algorithm awq has no effect: it is of linear layers",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: nf4, observer: mse}]",
            ],
            "mid.*: observer has no effect on llama.cpp's blocks",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: none, observer: mse}]",
            ],
            "mid.*: mode none leaves these layers in float",
        ),
        (
            &[
                "quantization=w4a16",
                "quant_rules=[{path: 'mid.*', mode: w4a16, observer: mse}]",
                "quantization_percentile=99",
            ],
            "quantization_percentile has no effect",
        ),
    ] {
        let refused = quantize(&output, words);
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(!output.exists());
    }
    // A checkpoint of floats has not what these modes need.
    for (mode, expected) in [
        (
            static_int8,
            "needs the scales of activations, which calibration finds",
        ),
        (
            "quantization=nf4",
            "quantized by `maxdiff-rs quantize` alone",
        ),
        (
            "quantization=svdquant_w4a4",
            "needs the low-rank parts of weights",
        ),
    ] {
        let float = generate::command(dir.path(), &[mode]).output().unwrap();
        let error = text(&float.stderr);
        assert_eq!(float.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    // Weights that are quantized while they are loaded are rounded to the nearest number.
    let words = [
        "quantization=int8_w8a16",
        "quant_rules=[{path: 'mid.*', mode: int8_w8a16, observer: mse}]",
    ];
    let float = generate::command(dir.path(), &words).output().unwrap();
    let error = text(&float.stderr);
    assert_eq!(float.status.code(), Some(2), "{error}");
    assert!(
        error.contains("mid.*: observer and algorithm have no effect"),
        "{error}"
    );
}

/// The algorithm of a rule rounds the weights of its linear layers, and leaves all others as they are without it.
#[test]
fn rules_have_algorithms() {
    let dir = tempfile::tempdir().unwrap();
    let int4 = ["quantization=w4a16", "quantization_granularity=4"];
    let rules = "quant_rules=[{path: '.*attn1.*', mode: w4a16, granularity: 4, algorithm: gptq}, {path: '.*attn2.*', mode: w4a16, \
                 granularity: 4, algorithm: awq}]";
    let [plain, own] = ["plain", "own"].map(|name| dir.path().join(name));
    quantized(&plain, &int4);
    quantized(&own, &[&int4[..], &[rules, SMALL]].concat());
    let [plain, written] = [&plain, &own].map(|path| ModelSource::open(path).unwrap());
    let [plain, written] =
        [&plain, &written].map(|model| &model.components[&Part::Unet].checkpoint);
    let block = "down_blocks.0.attentions.0.transformer_blocks.0";
    for (layer, differs, has_factors) in [
        ("attn1.to_q", Some(true), false),
        // AWQ may find that factors of 1 are the best.
        ("attn2.to_q", None, true),
        ("ff.net.2", Some(false), false),
    ] {
        let name = format!("{block}.{layer}.weight");
        let [before, after] = [plain, written].map(|file| file.read(&name).unwrap());
        if let Some(differs) = differs {
            assert_eq!(before != after, differs, "{name}");
        }
        let factors = written.read(&format!("{block}.{layer}.smooth_factor"));
        assert_eq!(factors.is_ok(), has_factors, "{name}");
    }
    let named = format!("pretrained_model_name_or_path={}", own.display());
    let float = drawn(dir.path(), &[]);
    let found = distance(&drawn(dir.path(), &[&named]), &float);
    assert!(found < 16.0, "{found}");
}

/// AWQ's checkpoint divides activations by factors that layers of one parent share, and HQQ's has floats beside codes; both draw
/// nearly what the source draws, and a layer's error is smaller than that of rounding to nearest.
#[test]
fn awq_and_hqq_draw_nearly_what_the_source_draws() {
    let dir = tempfile::tempdir().unwrap();
    let float = drawn(dir.path(), &[]);
    let group = "quantization_granularity=4";
    let with_minimums = ["quantization_numerics=gguf", "quantization_symmetric=False"];
    let of = |name: &str, words: &[&str]| {
        let output = dir.path().join(name);
        let report = quantized(
            &output,
            &[
                &["quantization=w4a16", group, "--sensitivity", SMALL],
                words,
            ]
            .concat(),
        );
        let tensors = report["tensors"].as_array().unwrap();
        let ratios = tensors.iter().map(|row| {
            let ratio = row["output_sqnr_db"].as_f64().unwrap();
            10f64.powf(-ratio / 10.0)
        });
        let error = ratios.sum::<f64>() / tensors.len() as f64;
        let algorithm = &report["algorithms"][0];
        let left = algorithm["convolutions_to_nearest"].as_array();
        let treated = (algorithm["layers"].as_u64(), left.map(Vec::len));
        (output, error, treated)
    };
    let (_, nearest, treated) = of("nearest", &[]);
    assert_eq!(treated, (None, None));
    let (awq, error, treated) = of("awq", &["quantization_algorithm=awq"]);
    assert!(error < nearest, "{error}, to the nearest {nearest}");
    assert_eq!(treated, (Some(40), Some(31)));
    let stored = ModelSource::open(&awq).unwrap();
    let checkpoint = &stored.components[&Part::Unet].checkpoint;
    let factors = |name: &str| {
        let path = format!("down_blocks.0.attentions.0.transformer_blocks.0.{name}.smooth_factor");
        checkpoint.read(&path).unwrap().to_f32_vec().unwrap()
    };
    assert_eq!(factors("attn1.to_q"), factors("attn1.to_v"));
    assert_ne!(factors("attn1.to_q"), factors("attn1.to_out.0"));
    let (_, plain, _) = of("q4_1", &with_minimums);
    let (hqq, error, treated) = of(
        "hqq",
        &[&with_minimums[..], &["quantization_algorithm=hqq"]].concat(),
    );
    assert!(error < 1.2 * plain, "{error}, to the nearest {plain}");
    // Minimums of convolutions are chosen too.
    assert_eq!(treated, (Some(71), Some(0)));
    for output in [awq, hqq] {
        let named = format!("pretrained_model_name_or_path={}", output.display());
        let found = distance(&drawn(dir.path(), &[&named]), &float);
        assert!(found < 16.0, "{}: {found}", output.display());
    }
    for (words, expected) in [
        (
            &["quantization=w4a16", "quantization_algorithm=awq"][..],
            "quantization_algorithm=gptq and awq need calibration",
        ),
        (
            &[
                "quantization=svdquant_w4a16",
                "quantization_algorithm=awq",
                SMALL,
            ],
            "quantization_algorithm=awq is of weights alone",
        ),
        (
            &["quantization=w4a16", "quantization_algorithm=hqq"],
            "quantization_algorithm=hqq chooses the float that is added to codes",
        ),
    ] {
        let output = dir.path().join("refused");
        let refused = quantize(&output, words);
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(!output.exists());
    }
}
