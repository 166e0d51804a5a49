//! `evaluate` with networks: CLIP score, LPIPS, FID and Inception score against torchmetrics, torch-fidelity and clean-fid, and
//! ImageReward against its package. The networks' weights are made here by the formula of `scripts/oracles/common.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{Golden, golden as golden_file, json, keep_programs, program, text};
use image::RgbImage;
use maxdiff::data::Tokenizer;
use maxdiff::data::resample::{bicubic_bytes, bicubic_floats};
use maxdiff::dtype::DType;
use maxdiff::evaluate::{frechet_distance, inception_score};
use maxdiff::pipelines::image_file::{GenerationSettings, write_numbered};
use maxdiff::weights::{TensorView, save};
use serde_json::Value;

const FILE: &str = "evaluate_networks.safetensors";
const IMAGE_REWARD: &str = "image_reward.safetensors";
const PAIRS: usize = 12;

fn picture(golden: &Golden, name: &str) -> RgbImage {
    let dims = golden.dims(name);
    let bytes = golden.values(name).iter().map(|x| *x as u8).collect();
    RgbImage::from_raw(dims[1] as u32, dims[0] as u32, bytes).unwrap()
}

fn rows(golden: &Golden, name: &str) -> Vec<Vec<f32>> {
    let columns = golden.dims(name)[1];
    let values = golden.values(name);
    let row = |row: &[f64]| row.iter().map(|x| *x as f32).collect();
    values.chunks(columns).map(row).collect()
}

#[track_caller]
fn close(found: f64, expected: f64, within: f64) {
    assert!(
        (found - expected).abs() <= within,
        "{found}, expected {expected}"
    );
}

#[test]
fn resampling_is_pillows() {
    let golden = Golden::read(FILE);
    let image = picture(&golden, "in/resample");
    let expected = picture(&golden, "out/resample/bytes");
    let (width, height) = expected.dimensions();
    assert_eq!(bicubic_bytes(&image, width, height), expected);
    let found = bicubic_floats(&image, width, height);
    for (found, expected) in found.iter().zip(golden.values("out/resample/floats")) {
        close(f64::from(*found), *expected, 1e-4);
    }
    // What keeps its size keeps its pixels.
    assert_eq!(bicubic_bytes(&image, image.width(), image.height()), image);
}

#[test]
fn statistics_are_torch_fidelitys() {
    let golden = Golden::read(FILE);
    for name in ["few", "many"] {
        let sets = [0, 1].map(|which| rows(&golden, &format!("in/features/{name}/{which}")));
        let expected = golden.values(&format!("out/frechet/{name}"))[0];
        let found = frechet_distance(&sets[0], &sets[1]).unwrap();
        close(found, expected, 1e-6 * expected);
    }
    let score = inception_score(&rows(&golden, "in/logits")).unwrap();
    let expected = golden.values("out/inception_score/logits");
    close(score.mean, expected[0], 1e-6);
    close(score.deviation, expected[1], 1e-6);
}

/// The number `at` of the tensor `name`: SplitMix64 from the FNV-1a hash of the name, the upper 24 bits as a float.
fn formula(name: &str, count: usize, scale: f32, offset: f32) -> Vec<u8> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let value = |at: u64| {
        let z = seed.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * scale + offset
    };
    (0..count as u64)
        .flat_map(|at| value(at).to_le_bytes())
        .collect()
}

/// Writes the weights of a network, without those that `left_out` names.
fn write_weights(golden: &Golden, network: &str, path: &Path, left_out: &str) {
    write_by_rules(&golden.meta["weights"][network], path, left_out);
}

/// Writes weights by the formula, without those that `left_out` names.
fn write_by_rules(rules: &Value, path: &Path, left_out: &str) {
    let rules = rules.as_object().unwrap();
    let tensors: Vec<(&String, Vec<usize>, Vec<u8>)> = rules
        .iter()
        .filter(|(name, _)| *name != left_out)
        .map(|(name, rule)| {
            let number = |at: usize| rule[at].as_f64().unwrap() as f32;
            let dims: Vec<usize> = serde_json::from_value(rule[0].clone()).unwrap();
            let count = dims.iter().product();
            let data = formula(name, count, number(1), number(2));
            (name, dims, data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dims, data)| TensorView {
        name,
        dtype: DType::F32,
        dims,
        data,
    });
    save(path, views, &BTreeMap::new()).unwrap();
}

/// A folder of transformers' `CLIPModel`.
fn clip_folder(golden: &Golden, dir: &Path) -> PathBuf {
    let folder = dir.join("clip");
    fs::create_dir_all(&folder).unwrap();
    let mut config = golden.meta["clip"].clone();
    config["model_type"] = "clip".into();
    config["architectures"] = vec!["CLIPModel"].into();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for file in ["vocab.json", "merges.txt"] {
        fs::copy(golden_file("tokenizer").join(file), folder.join(file)).unwrap();
    }
    let processor = serde_json::json!({
        "resample": 3, "size": 32, "crop_size": {"height": 32, "width": 32},
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    });
    fs::write(
        folder.join("preprocessor_config.json"),
        processor.to_string(),
    )
    .unwrap();
    write_weights(golden, "clip", &folder.join("model.safetensors"), "");
    folder
}

/// The recorded pictures as runs of `generate` with the prompts of the file.
fn runs(golden: &Golden, dir: &Path, count: usize) -> [PathBuf; 2] {
    runs_of(golden, &golden.meta["prompts"], dir, count)
}

fn runs_of(golden: &Golden, prompts: &Value, dir: &Path, count: usize) -> [PathBuf; 2] {
    ["reference", "picture"].map(|name| {
        let folder = dir.join(name).join("images");
        fs::create_dir_all(&folder).unwrap();
        for at in 0..count {
            let settings = GenerationSettings {
                prompt: prompts[at].as_str().unwrap().to_owned(),
                seed: at as u64,
                ..GenerationSettings::default()
            };
            let image = picture(golden, &format!("in/{name}/{at}"));
            write_numbered(&folder, "image", &image, Some(&settings)).unwrap();
        }
        dir.join(name)
    })
}

fn evaluate<'a>(words: impl IntoIterator<Item = &'a Path>, options: &[&str]) -> Output {
    let mut command = program(["evaluate"]);
    command
        .args(words)
        .args([keep_programs(), "hardware=cpu".to_owned()]);
    command.args(options).output().unwrap()
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

/// The numbers of one field of all pictures.
fn of_pictures(run: &Value, field: &str) -> Vec<f64> {
    let pictures = run["pictures"].as_array().unwrap();
    pictures
        .iter()
        .map(|picture| number(&picture[field]))
        .collect()
}

#[track_caller]
fn all_close(found: &[f64], expected: &[f64], relative: f64, absolute: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        close(*found, *expected, relative * expected.abs() + absolute);
    }
}

#[test]
fn clip_score_and_lpips_are_torchmetrics() {
    let golden = Golden::read(FILE);
    let dir = tempfile::tempdir().unwrap();
    let [reference, run] = runs(&golden, dir.path(), PAIRS);
    let clip = clip_folder(&golden, dir.path());
    let clip = format!("--clip={}", clip.display());
    let page = dir.path().join("page.html");
    let html = format!("--html={}", page.display());
    for network in ["alex", "vgg"] {
        let file = dir.path().join(format!("{network}.safetensors"));
        write_weights(&golden, network, &file, "");
        let lpips = format!("--lpips={}", file.display());
        let mut options = vec!["--json", "--require=lpips<1", &lpips];
        if network == "alex" {
            options.extend([&clip, &html, "--require=clip_score>0.3"]);
        }
        let report = json(&evaluate([&*reference, &*run], &options));
        let found = &report["runs"][0];
        let name = format!("out/lpips_{network}");
        let expected = golden.values(&name);
        all_close(&of_pictures(found, "lpips"), expected, 2e-5, 0.0);
        let expected = golden.values(&format!("{name}/all"))[0];
        close(number(&found["lpips"]), expected, 2e-5 * expected);
        if network == "vgg" {
            assert_eq!(found["clip_score"], Value::Null);
            assert_eq!(found["fid"], Value::Null);
            continue;
        }
        for (field, set) in [
            ("clip_score", "picture"),
            ("reference_clip_score", "reference"),
        ] {
            let expected = golden.values(&format!("out/clip_score/{set}"));
            all_close(&of_pictures(found, field), expected, 0.0, 2e-4);
            let expected = golden.values(&format!("out/clip_score/{set}/all"))[0];
            close(number(&found[field]), expected, 1e-4);
        }
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<td>0.36 (2.60)</td>"), "{page}");
    assert_eq!(page.matches(", LPIPS 0.00").count(), PAIRS);
    assert_eq!(page.matches(", CLIP score ").count(), PAIRS);
}

/// A folder of ImageReward, without the weight that `left_out` names.
fn image_reward_folder(dir: &Path, left_out: &str) -> PathBuf {
    let folder = dir.join("image-reward");
    fs::create_dir_all(&folder).unwrap();
    let vocabulary = golden_file("image_reward/vocab.txt");
    fs::copy(vocabulary, folder.join("vocab.txt")).unwrap();
    let rules = &Golden::read(IMAGE_REWARD).meta["weights"];
    write_by_rules(rules, &folder.join("model.safetensors"), left_out);
    folder
}

#[test]
fn image_reward_is_its_packages() {
    let golden = Golden::read(IMAGE_REWARD);
    let dir = tempfile::tempdir().unwrap();
    let prompts = &golden.meta["prompts"];
    let [reference, run] = runs_of(&Golden::read(FILE), prompts, dir.path(), PAIRS);
    let folder = image_reward_folder(dir.path(), "");
    let weights = format!("--image-reward={}", folder.display());
    let page = dir.path().join("page.html");
    let html = format!("--html={}", page.display());
    let options = ["--json", "--require=image_reward>0", &weights, &html];
    let output = evaluate([&*reference, &*run], &options);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = &report["runs"][0];
    for (field, set) in [
        ("image_reward", "picture"),
        ("reference_image_reward", "reference"),
    ] {
        let expected = golden.values(&format!("out/reward/{set}"));
        all_close(&of_pictures(found, field), expected, 0.0, 2e-5);
        let mean = expected.iter().sum::<f64>() / PAIRS as f64;
        close(number(&found[field]), mean, 2e-5);
    }
    assert_eq!(found["clip_score"], Value::Null);
    let note = found["notes"][0].as_str().unwrap();
    assert!(
        note.starts_with("1 of 12 prompts have more than 35 tokens"),
        "{note}"
    );
    let page = fs::read_to_string(page).unwrap();
    assert_eq!(page.matches(", ImageReward ").count(), PAIRS);

    // A weight of BLIP, one behind it, and the vocabulary of another model.
    for (left_out, expected) in [
        (
            "blip.visual_encoder.pos_embed",
            "visual_encoder.pos_embed of rank 3 is expected; found no such weight",
        ),
        ("mlp.layers.7.bias", "missing: mlp.layers.7.bias [1]"),
    ] {
        image_reward_folder(dir.path(), left_out);
        let output = evaluate([&*reference, &*run], &[&weights]);
        let error = text(&output.stderr);
        assert!(error.contains(expected), "{error}");
    }
    image_reward_folder(dir.path(), "");
    let vocabulary = folder.join("vocab.txt");
    let lines = fs::read_to_string(&vocabulary).unwrap();
    fs::write(&vocabulary, lines.replace("roof\n", "")).unwrap();
    let output = evaluate([&*reference, &*run], &[&weights]);
    let error = text(&output.stderr);
    let expected = "vocab.txt and BLIP's two tokens are 137 tokens, the weights know 138";
    assert!(error.contains(expected), "{error}");
    fs::remove_file(&vocabulary).unwrap();
    let output = evaluate([&*reference, &*run], &[&weights]);
    let error = text(&output.stderr);
    assert!(
        error.contains("expected vocab.txt; found model.safetensors"),
        "{error}"
    );
}

#[test]
fn blips_tokens_are_transformers() {
    let golden = Golden::read(IMAGE_REWARD);
    let tokenizer = Tokenizer::blip_from_dir(&golden_file("image_reward"), 35).unwrap();
    let texts = golden.meta["texts"].as_array().unwrap();
    let expected = golden.values("out/ids").chunks(35);
    for (text, expected) in texts.iter().zip(expected) {
        let found = tokenizer.encode(text.as_str().unwrap()).unwrap().ids;
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn fid_and_inception_score_are_torch_fidelitys_and_clean_fids() {
    let golden = Golden::read(FILE);
    let dir = tempfile::tempdir().unwrap();
    let [reference, run] = runs(&golden, dir.path(), PAIRS);
    let file = dir.path().join("inception.safetensors");
    write_weights(&golden, "inception", &file, "");
    let weights = format!("--inception={}", file.display());
    let page = dir.path().join("page.html");
    let html = format!("--html={}", page.display());
    let others = format!("--fid-reference={}", reference.join("images").display());
    for resize in ["tensorflow", "clean"] {
        let way = format!("--inception-resize={resize}");
        let mut options = vec!["--json", "--require=inception_score<1.001", &weights, &way];
        // The same pictures, as a folder of any.
        if resize == "clean" {
            options.extend([others.as_str(), html.as_str()]);
        }
        let output = evaluate([&*reference, &*run], &options);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = &report["runs"][0];
        let expected = golden.values(&format!("out/fid_{resize}"))[0];
        close(number(&found["fid"]), expected, 2e-5 * expected);
        assert_eq!(found["inception_resize"], resize);
        assert_eq!(found["unmet"][0], "inception_score<1.001");
        let note = found["notes"][0].as_str().unwrap();
        assert!(
            note.starts_with("FID is of 12 pictures and too high"),
            "{note}"
        );
        if resize == "clean" {
            close(number(&found["reference_fid"]), 0.0, 1e-6);
            let page = fs::read_to_string(&page).unwrap();
            assert!(page.contains("<td>59.05 (0.00)</td>"), "{page}");
            continue;
        }
        assert_eq!(found["reference_fid"], Value::Null);
        for (field, set) in [
            ("inception_score", "picture"),
            ("reference_inception_score", "reference"),
        ] {
            let expected = golden.values(&format!("out/inception_score/{set}"));
            close(number(&found[field]["mean"]), expected[0], 1e-4);
            close(number(&found[field]["deviation"]), expected[1], 1e-4);
        }
    }
}

#[test]
fn networks_that_do_not_fit_are_named() {
    let golden = Golden::read(FILE);
    let dir = tempfile::tempdir().unwrap();
    let [reference, run] = runs(&golden, dir.path(), 2);
    let refused = |options: &[&str], expected: &str| {
        let mut command = program(["evaluate"]);
        command.args([&reference, &run]).args(options);
        let output = command.output().unwrap();
        let error = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{options:?}");
        assert!(error.contains(expected), "{options:?}: {error}");
    };
    for (bound, expected) in [
        (
            "lpips<0.1",
            "lpips needs the weights of a network: give --lpips with",
        ),
        (
            "clip_score>20",
            "give --clip with a folder of transformers' CLIPModel",
        ),
        ("fid<10", "give --inception with"),
        ("inception_score>10", "give --inception with"),
        (
            "image_reward>0",
            "give --image-reward with a folder with ImageReward's weights",
        ),
    ] {
        refused(&["--require", bound], expected);
    }
    let clip = clip_folder(&golden, dir.path());
    let [given, weights] = ["", "/model.safetensors"].map(|end| format!("{}{end}", clip.display()));
    refused(
        &["hardware=cpu"],
        "hardware=cpu has no effect without a network",
    );
    refused(
        &["--clip", &given, "guidance_scale=3"],
        "no key that evaluate takes; it takes hardware",
    );
    refused(&["--clip", &given, "revision=x"], "revision has no effect");
    refused(&["--inception-resize=clean"], "--inception <FILE>");
    refused(&["--fid-reference=."], "--inception <FILE>");
    refused(
        &["--lpips", &weights],
        "expected features.0.weight of [64, 3, 11, 11] (AlexNet)",
    );
    refused(
        &["--inception", &weights],
        "missing: Conv2d_1a_3x3.bn.bias [32]",
    );
    let alex = dir.path().join("alex.safetensors");
    write_weights(&golden, "alex", &alex, "lin3.model.1.weight");
    let alex = alex.display().to_string();
    refused(
        &["--lpips", &alex],
        "missing: lin3.model.1.weight [1, 256, 1, 1]",
    );

    // Pictures that are prepared in another way, and a model of another kind.
    let processor = clip.join("preprocessor_config.json");
    fs::write(&processor, r#"{"size": {"shortest_edge": 48}}"#).unwrap();
    refused(
        &["--clip", &given],
        "size: expected 32, as CLIP's; found {\"shortest_edge\":48}",
    );
    fs::write(clip.join("config.json"), r#"{"model_type": "siglip"}"#).unwrap();
    refused(
        &["--clip", &given],
        "expected \"clip\", a CLIPModel such as",
    );
}
