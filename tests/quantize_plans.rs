//! Formats chosen under a budget, from the outside.

use std::fs;
use std::path::Path;

use crate::calibrate::{SMALL, quantize, quantized};
use crate::common::text;
use serde_json::Value;

const CANDIDATES: &str = "quantization_candidates=[{path: '.*', mode: w4a16, granularity: channel}, {path: '.*', mode: int8_w8a16}, \
                          {path: '.*to_out.*', mode: none}]";

fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let common = [
        "quantization=w4a16",
        "quantization_granularity=channel",
        CANDIDATES,
    ];
    [&common[..], more].concat()
}

/// The sum over layers of candidate `which`: bytes and errors; of those that were taken with `None`.
fn sums(plan: &Value, which: Option<u64>) -> (u64, f64) {
    let layers = plan["layers"].as_array().unwrap();
    let of = |layer: &Value| {
        let chosen = which.or(layer["chosen"].as_u64()).unwrap();
        let candidate = &layer["candidates"][chosen as usize];
        (
            candidate["bytes"].as_u64().unwrap(),
            candidate["error"].as_f64().unwrap(),
        )
    };
    layers
        .iter()
        .map(of)
        .fold((0, 0.0), |(bytes, error), (b, e)| (bytes + b, error + e))
}

fn unet(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("unet/diffusion_pytorch_model.safetensors")).unwrap()
}

#[test]
fn a_plan_keeps_its_budget_and_is_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let [output, again, all] = ["mixed", "again", "all"].map(|name| dir.path().join(name));
    // Between the smallest and int8.
    let plan = &quantized(&all, &words(&["--budget-bits", "30"]))["plan"];
    let weights = plan["layers"].as_array().unwrap().iter();
    let weights: u64 = weights.map(|l| l["parameters"].as_u64().unwrap()).sum();
    let [least, most] = [0, 1].map(|which| 8.0 * sums(plan, Some(which)).0 as f64 / weights as f64);
    let budget = (least + most) / 2.0;
    let asked = budget.to_string();
    let [plan_file, page] = ["plan.yml", "report.html"].map(|name| dir.path().join(name));
    let [plan_word, page_word] = [&plan_file, &page].map(|path| path.to_str().unwrap());
    let report = quantized(
        &output,
        &words(&[
            SMALL,
            "--budget-bits",
            &asked,
            "--plan",
            plan_word,
            "--html",
            page_word,
        ]),
    );
    let plan = &report["plan"];
    let (bytes, error) = sums(plan, None);
    assert_eq!(bytes, plan["bytes"].as_u64().unwrap());
    assert!((error / plan["error"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    let bits = plan["bits"].as_f64().unwrap();
    assert!(bits <= budget && bits > 0.9 * budget, "{bits} of {budget}");
    // All in int4 are smaller and worse, all in int8 larger and better.
    let [(least, worst), (most, best)] = [0, 1].map(|which| sums(plan, Some(which)));
    assert!(least < bytes && bytes < most, "{least} {bytes} {most}");
    assert!(
        best < error && error < 0.5 * worst,
        "{best} {error} {worst}"
    );
    // What was planned was written.
    let tensors = report["tensors"].as_array().unwrap();
    let written: u64 = tensors
        .iter()
        .map(|row| row["bytes"].as_u64().unwrap())
        .sum();
    let floats: u64 = plan["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| {
            let taken = &layer["candidates"][layer["chosen"].as_u64().unwrap() as usize];
            if taken["mode"] == "none" {
                taken["bytes"].as_u64().unwrap()
            } else {
                0
            }
        })
        .sum();
    assert_eq!(written + floats, bytes);
    for row in tensors {
        assert_eq!(row["step_errors"].as_array().unwrap().len(), 2, "{row}");
        assert_eq!(row["relative_errors"].as_array().unwrap().len(), 2, "{row}");
    }
    let page = fs::read_to_string(&page).unwrap();
    assert_eq!(page.matches("<svg").count(), 4);
    assert!(page.contains(tensors[0]["layer"].as_str().unwrap()));
    assert!(!page.contains("NaN") && !page.contains("<script"));
    for told in [
        "<h2>Formats</h2>",
        "<td>not quantized: products of two activations (attention)</td>",
        "<th>lowest scale</th><th>highest scale</th>",
        // The rule of the mode; those of the plan are one a layer.
        "<tr><td>.*</td><td>w4a16</td>",
    ] {
        assert!(page.contains(told), "{told}");
    }
    assert!(!page.contains(r"down_blocks\."));

    let rules = format!("quant_rules={plan_word}");
    let report = quantized(&again, &["quantization=w4a16", &rules]);
    assert!(report["plan"].is_null());
    assert_eq!(unet(&output), unet(&again));
}

/// Without calibration the weights alone decide.
#[test]
fn a_plan_needs_no_calibration_and_keeps_the_bytes_of_files() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("mixed");
    let all = quantized(&dir.path().join("int8"), &["quantization=int8_w8a16"]);
    let budget = all["parts"]["unet"]["bytes"].as_u64().unwrap() - 2000;
    let text_of = budget.to_string();
    let report = quantized(&output, &words(&["--budget-bytes", &text_of]));
    let bytes = report["parts"]["unet"]["bytes"].as_u64().unwrap();
    assert!(bytes <= budget && bytes > budget / 2, "{bytes} of {budget}");
    assert!(
        report["plan"]["error_is"]
            .as_str()
            .unwrap()
            .contains("weight")
    );
    assert!(report["tensors"][0]["step_errors"].is_null());
}

/// With calibration modes that round activations are candidates too: they cost more than the same weights alone.
#[test]
fn a_plan_rounds_activations() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("mixed");
    let candidates = "quantization_candidates=[{path: '.*', mode: w4a4, granularity: channel}, {path: '.*', mode: w4a16, \
                      granularity: channel, numerics: quark}, {path: '.*', mode: int8}, {path: '.*', mode: int8_w8a16}]";
    let calibration = SMALL;
    let report = quantized(
        &output,
        &[
            "quantization=w4a16",
            "quantization_granularity=channel",
            candidates,
            calibration,
            "--budget-bits",
            "30",
        ],
    );
    let layers = report["plan"]["layers"].as_array().unwrap();
    for layer in layers {
        let [w4a4, w4a16, int8, int8_alone] = [0, 1, 2, 3].map(|at| &layer["candidates"][at]);
        for (rounded, alone) in [(w4a4, w4a16), (int8, int8_alone)] {
            assert_eq!(rounded["bytes"], alone["bytes"], "{layer}");
            let [more, less] = [rounded, alone].map(|c| c["error"].as_f64().unwrap());
            assert!(more > less && less > 0.0, "{layer}");
        }
    }
    // Of as many bytes weights alone are better, so a plan rounds activations where no other candidate has its bytes.
    let both = "quantization_candidates=[{path: '.*', mode: w4a4, granularity: channel}, {path: '.*', mode: int8}]";
    let rounded = dir.path().join("rounded");
    let bits = |which: usize| {
        let bytes: u64 = layers
            .iter()
            .map(|l| l["candidates"][which]["bytes"].as_u64().unwrap())
            .sum();
        let weights: u64 = layers
            .iter()
            .map(|l| l["parameters"].as_u64().unwrap())
            .sum();
        8.0 * bytes as f64 / weights as f64
    };
    let budget = ((bits(0) + bits(2)) / 2.0).to_string();
    let report = quantized(
        &rounded,
        &[
            "quantization=w4a16",
            "quantization_granularity=channel",
            both,
            calibration,
            "--budget-bits",
            &budget,
        ],
    );
    let chosen = report["plan"]["layers"].as_array().unwrap().iter();
    let int8 = chosen.filter(|layer| layer["chosen"] == 1).count();
    assert!(
        int8 > 0 && int8 < layers.len(),
        "{int8} of {}",
        layers.len()
    );
    let config: Value =
        serde_json::from_str(&fs::read_to_string(rounded.join("unet/config.json")).unwrap())
            .unwrap();
    let formats = config["quantization_config"]["formats"].as_array().unwrap();
    assert_eq!(formats.len(), 2);
    assert!(
        formats.iter().all(|format| !format["activation"].is_null()),
        "{config}"
    );
}

#[test]
fn plans_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let missing = dir.path().join("missing.yml");
    let missing = format!("quant_rules={}", missing.display());
    for (more, expected) in [
        (
            &["--budget-bits", "3"][..],
            "3 bits a weight is too small: the least possible with these candidates is ",
        ),
        (
            &["--budget-bytes", "1000"],
            "1000 bytes is too small: the least possible with these candidates is ",
        ),
        (&["--budget-bits", "0"], "expected a number above 0"),
        (
            &["--plan", "plan.yml"],
            "--plan has no effect without a budget",
        ),
        (
            &[],
            "quantization_candidates has no effect without a budget",
        ),
        (
            &[
                "--budget-bits",
                "9",
                "quant_rules=[{path: '.*', mode: int8_w8a16}]",
            ],
            "quant_rules decide every layer",
        ),
        (
            &[
                "--budget-bits",
                "9",
                "quantization_candidates=[{path: '.*', mode: w4a4}]",
            ],
            "w4a4 rounds activations, whose error calibration measures",
        ),
        (
            &[
                "--budget-bits",
                "9",
                "quantization_candidates=[{path: '.*', mode: w4a16, granularity: 7}]",
            ],
            "none of quantization_candidates fits it",
        ),
        (
            &["--sensitivity"],
            "--sensitivity tells what errors do to samples, which needs calibration",
        ),
        (&[&missing], "missing.yml: "),
    ] {
        let refused = quantize(&output, &words(more));
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {error}");
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(!output.exists());
    }
}
