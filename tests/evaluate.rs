//! `evaluate`: similarity against torchmetrics, and the verb from the outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{golden, json, program, text};
use image::RgbImage;
use maxdiff::evaluate::{Requirement, RequirementError, decibels, mean_squared_error, ssim};
use maxdiff::host_tensor::HostTensor;
use maxdiff::pipelines::image_file::{GenerationSettings, write_latents, write_numbered};
use maxdiff::weights::Checkpoint;

fn picture(golden: &Checkpoint, name: &str) -> RgbImage {
    let found = golden.read(name).unwrap();
    let dims = &found.shape.dims;
    RgbImage::from_raw(dims[1] as u32, dims[0] as u32, found.data).unwrap()
}

fn number(golden: &Checkpoint, name: &str) -> f64 {
    golden.read(name).unwrap().to_f64_vec().unwrap()[0]
}

fn close(found: f64, expected: f64) {
    assert!(
        (found / expected - 1.0).abs() < 1e-5,
        "{found}, expected {expected}"
    );
}

#[test]
fn similarity_is_torchmetrics() {
    let golden = Checkpoint::open(&golden("evaluate.safetensors")).unwrap();
    let mut sums = [0.0; 2];
    for name in ["slight", "strong", "small"] {
        let [reference, found] =
            ["reference", "picture"].map(|which| picture(&golden, &format!("in/{name}/{which}")));
        let error = mean_squared_error(&reference, &found);
        let similarity = ssim(&reference, &found).unwrap();
        close(
            decibels(error),
            number(&golden, &format!("out/{name}/psnr")),
        );
        close(similarity, number(&golden, &format!("out/{name}/ssim")));
        assert_eq!(decibels(mean_squared_error(&found, &found)), f64::INFINITY);
        close(ssim(&found, &found).unwrap(), 1.0);
        if name != "small" {
            sums = [sums[0] + error, sums[1] + similarity];
        }
    }
    close(decibels(sums[0] / 2.0), number(&golden, "out/all/psnr"));
    close(sums[1] / 2.0, number(&golden, "out/all/ssim"));
    assert!(ssim(&RgbImage::new(5, 30), &RgbImage::new(5, 30)).is_none());
}

const PROMPTS: [&str; 2] = [
    "a large red circle on a white background",
    "a small blue square on a white background",
];

/// A run's pictures; the second one of the prompts is `changed` by so much, and the samples by a thousandth of it.
fn run(dir: &Path, name: &str, changed: u8) -> PathBuf {
    let folder = dir.join(name).join("images");
    fs::create_dir_all(&folder).unwrap();
    let model = dir.join(format!("model-{name}/unet"));
    fs::create_dir_all(&model).unwrap();
    let weights = vec![0; 1000 + usize::from(changed)];
    fs::write(model.join("diffusion_pytorch_model.safetensors"), weights).unwrap();
    for (at, prompt) in PROMPTS.iter().enumerate() {
        let color = [255, 255 - changed * at as u8, 255];
        let image = RgbImage::from_pixel(32, 32, image::Rgb(color));
        let path = write_numbered(&folder, "image", &image, Some(&settings(prompt, 7)));
        let path = path.unwrap();
        let drift = |step: usize| 1.0 + step as f32 * f32::from(changed) / 1000.0;
        let samples = (0..3).map(|step| HostTensor::from_f32([1, 2, 2], &[drift(step); 4]));
        let samples: Vec<HostTensor> = samples.map(Result::unwrap).collect();
        write_latents(&path, &samples).unwrap();
    }
    dir.join(name)
}

fn settings(prompt: &str, seed: u64) -> GenerationSettings {
    GenerationSettings {
        prompt: prompt.to_owned(),
        seed,
        steps: 3,
        guidance_scale: 1.0,
        ..GenerationSettings::default()
    }
}

fn evaluate(words: &[&Path], options: &[&str]) -> Output {
    let mut command = program(["evaluate"]);
    command.args(words).args(options).output().unwrap()
}

#[test]
fn runs_are_compared_picture_by_picture() {
    let dir = tempfile::tempdir().unwrap();
    let [float, near, far] = [("float", 0), ("near", 5), ("far", 100)]
        .map(|(name, changed)| run(dir.path(), name, changed));
    let page = dir.path().join("page.html");
    let html = format!("--html={}", page.display());
    let model = |name: &str| {
        dir.path()
            .join(format!("model-{name}"))
            .display()
            .to_string()
    };
    let models = ["float", "near", "far", "float"].map(model);
    let models: Vec<&str> = models.iter().map(String::as_str).collect();
    let options = [&["--json", &html, "--models"], &models[..]].concat();
    let report = json(&evaluate(&[&float, &near, &far, &float], &options));
    let [near_report, far_report, own] = &report["runs"].as_array().unwrap()[..] else {
        panic!("three runs");
    };
    // Of two pictures one has one of three channels changed.
    let expected = -10.0 * ((5.0 / 255.0f64).powi(2) / 6.0).log10();
    close(near_report["psnr"].as_f64().unwrap(), expected);
    assert!(near_report["ssim"].as_f64() > far_report["ssim"].as_f64());
    assert_eq!(near_report["pictures"][0]["psnr"], serde_json::Value::Null);
    let drift = near_report["drift"].as_array().unwrap();
    let drift: Vec<f64> = drift.iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(drift.len(), 3);
    assert_eq!(drift[0], 0.0);
    assert!((drift[2] - 0.01).abs() < 1e-6, "{drift:?}");
    assert_eq!(near_report["bytes"], 1005);
    assert_eq!(near_report["reference_bytes"], 1000);
    // Nothing is drawn on the background.
    assert_eq!(near_report["adherence"], 0.0);
    assert_eq!(own["psnr"], serde_json::Value::Null);
    close(own["ssim"].as_f64().unwrap(), 1.0);
    let page = fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("data:image/png;base64,").count(), 2 * 4);
    assert!(page.contains("<polyline"), "{page}");

    let met = evaluate(
        &[&float, &near],
        &["--require", "psnr>40", "--require", "drift<=0.011"],
    );
    assert_eq!(met.status.code(), Some(0), "{}", text(&met.stderr));
    let missed = evaluate(&[&float, &far], &["--require", "psnr>40"]);
    assert_eq!(missed.status.code(), Some(1));
    let error = text(&missed.stderr);
    assert!(
        error.contains("far: psnr>40 is not met: it is 15.91"),
        "{error}"
    );
}

#[test]
fn runs_that_cannot_be_compared_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let [float, other] =
        [("float", 0), ("other", 9)].map(|(name, changed)| run(dir.path(), name, changed));
    let refused = |words: &[&Path], options: &[&str], expected: &str| {
        let output = evaluate(words, options);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    for (bound, expected) in [
        ("psnr", "expected a metric, one of > >= < <= and a number"),
        (
            "lpips<0.1",
            "lpips<0.1: lpips needs the weights of a network: give --lpips with",
        ),
        ("psnrr>1", "'psnrr' is no metric; here are psnr, ssim"),
    ] {
        refused(&[&float, &other], &["--require", bound], expected);
    }
    let bound: Result<Requirement, RequirementError> = "ssim >= 0.5".parse();
    assert_eq!(bound.unwrap().to_string(), "ssim>=0.5");

    let nowhere = ["--models", "nowhere", "nowhere"];
    refused(
        &[&float, &other],
        &nowhere,
        "nowhere: expected a model's folder",
    );
    refused(&[&float, &other], &nowhere[..2], "--models has 1 folders");
    // A key behind the models is none of them.
    refused(
        &[&float, &other],
        &[&nowhere[..], &["hardware=cpu"]].concat(),
        "hardware=cpu has no effect without a network",
    );
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    refused(
        &[&float, &empty],
        &[],
        "no pictures: expected files image-*.png",
    );
    // A picture more, and one of another size.
    let images = other.join("images");
    let large = RgbImage::new(40, 32);
    let more = settings("a cat", 8);
    write_numbered(&images, "image", &large, Some(&more)).unwrap();
    refused(
        &[&float, &other],
        &[],
        "float has no picture of 'a cat' with seed 8",
    );
    let more = settings("a cat", 8);
    let small = RgbImage::new(32, 32);
    write_numbered(&float.join("images"), "image", &small, Some(&more)).unwrap();
    refused(&[&float, &other], &[], "has 32x32 pixels");
}
