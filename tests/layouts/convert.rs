//! `convert` from the outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{golden, program, text};
use maxdiff::dtype::DType;
use maxdiff::models::Part;
use maxdiff::weights::cast;
use maxdiff::weights::source::{Layout, ModelSource};
use serde_json::{Value, json};

use super::{MODELS, Recorded};

pub fn convert(input: &Path, output: &Path, options: &[&str]) -> Output {
    program(["convert"])
        .arg(input)
        .arg(output)
        .args(options)
        .output()
        .unwrap()
}

pub fn stderr(output: &Output) -> &str {
    text(&output.stderr)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Writes the single file and converts it; the folder, and the verb's report.
pub fn converted(dir: &Path, name: &str) -> (PathBuf, Value) {
    let file = dir.join(format!("{name}.safetensors"));
    Recorded::read(name).write(&file, &[], |_| {});
    let folder = dir.join(name);
    let output = convert(&file, &folder, &["--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    (folder, serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn convert_writes_diffusers_folders() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family) in MODELS {
        let recorded = Recorded::read(name);
        let (folder, report) = converted(dir.path(), name);
        assert_eq!(report["family"], json!(family.title()));
        assert_eq!(report["recipe"], json!(family.spec().recipe));
        let unet = recorded.parts[&Part::Unet].tensors.len();
        assert_eq!(report["parts"]["unet"]["tensors"], json!(unet));

        let source = ModelSource::open(&folder).unwrap();
        assert_eq!(source.layout, Layout::Pipeline);
        assert_eq!(source.family, family);
        recorded.assert_holds(&source);
        let single = ModelSource::open(&dir.path().join(format!("{name}.safetensors"))).unwrap();
        assert_eq!(source.scheduler, single.scheduler);
        for (part, component) in &source.components {
            assert_eq!(component.config, single.components[part].config);
        }
        let index: Value =
            serde_json::from_str(&fs::read_to_string(folder.join("model_index.json")).unwrap())
                .unwrap();
        assert_eq!(index["unet"], json!(["diffusers", "UNet2DConditionModel"]));
        assert_eq!(index["tokenizer"], json!([null, null]));
    }
    let expected = [
        "model_index.json",
        "scheduler",
        "text_encoder",
        "unet",
        "vae",
    ];
    assert_eq!(names(&dir.path().join("sd1")), expected);
    let vae = ["config.json", "diffusion_pytorch_model.safetensors"];
    assert_eq!(names(&dir.path().join("sd1/vae")), vae);
    // Nothing is left of the writing.
    assert_eq!(names(dir.path()).len(), 2 * MODELS.len());
}

#[test]
fn convert_casts_floats_and_copies_tokenizers() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _) = converted(dir.path(), "sdxl");
    for name in ["tokenizer", "tokenizer_2"] {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("vocab.json"), name).unwrap();
    }
    // It says that there are none.
    fs::remove_file(folder.join("model_index.json")).unwrap();
    let single = ModelSource::open(&folder).unwrap();
    for (option, dtype) in [
        ("bf16", DType::BF16),
        ("fp32", DType::F32),
        ("fp16", DType::F16),
    ] {
        let out = dir.path().join(option);
        let output = convert(&folder, &out, &[&format!("dtype={option}")]);
        assert!(output.status.success(), "{}", stderr(&output));
        let source = ModelSource::open(&out).unwrap();
        for (part, component) in &source.components {
            let whole = &single.components[part].checkpoint;
            assert!(component.checkpoint.names().eq(whole.names()));
            for name in whole.names() {
                let expected = cast(whole.read(name).unwrap(), dtype).unwrap();
                assert_eq!(component.checkpoint.read(name).unwrap(), expected, "{name}");
            }
        }
        let copied = fs::read_to_string(out.join("tokenizer_2/vocab.json")).unwrap();
        assert_eq!(copied, "tokenizer_2");
        assert_eq!(source.tokenizers[&Part::TextEncoder], out.join("tokenizer"));
    }
}

#[test]
fn convert_writes_a_tiny_autoencoder() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    for (part, from) in [("unet", "pipeline_sd15/unet"), ("vae", "vae_tiny")] {
        fs::create_dir_all(model.join(part)).unwrap();
        for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
            fs::copy(golden(from).join(file), model.join(part).join(file)).unwrap();
        }
    }
    let out = dir.path().join("out");
    let output = convert(&model, &out, &["dtype=fp32"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let index = fs::read_to_string(out.join("model_index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["vae"], json!(["diffusers", "AutoencoderTiny"]));
    let [expected, found] = [model, out].map(|path| ModelSource::open(&path).unwrap());
    let [expected, found] = [&expected, &found].map(|source| &source.components[&Part::Vae]);
    assert_eq!(found.config, expected.config);
    assert!(found.checkpoint.names().eq(expected.checkpoint.names()));

    let config = dir.path().join("model/vae/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let text = text.replace("AutoencoderTiny", "AsymmetricAutoencoderKL");
    fs::write(&config, text).unwrap();
    let output = convert(&dir.path().join("model"), &dir.path().join("other"), &[]);
    let error = "of class AsymmetricAutoencoderKL, expected AutoencoderKL or AutoencoderTiny";
    assert!(stderr(&output).contains(error), "{}", stderr(&output));
}

#[test]
fn convert_refuses_before_it_writes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sd1.safetensors");
    Recorded::read("sd1").write(&file, &[], |_| {});
    let taken = dir.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let code = |output: &Output| output.status.code().unwrap();
    let exists = convert(&file, &taken, &[]);
    assert_eq!(code(&exists), 2);
    assert!(
        stderr(&exists).contains("exists already"),
        "{}",
        stderr(&exists)
    );
    let option = convert(&file, &dir.path().join("x"), &["dtype=int8"]);
    assert_eq!(code(&option), 2);
    assert!(
        stderr(&option).contains("dtype=fp16"),
        "{}",
        stderr(&option)
    );
    let nothing = convert(&dir.path().join("no/such"), &dir.path().join("x"), &[]);
    assert_eq!(code(&nothing), 1);
    assert!(
        stderr(&nothing).contains("not the name of a repository"),
        "{}",
        stderr(&nothing)
    );
    // A part that cannot be written: no folder is left.
    let strange = convert(&file, &dir.path().join("no/parent/x"), &[]);
    assert_eq!(code(&strange), 1);
    assert_eq!(names(dir.path()), ["sd1.safetensors", "taken"]);
    assert!(names(&taken).is_empty());
}

/// The cache as `huggingface_hub` leaves it where links are not to be had.
#[test]
fn convert_refuses_numbers_that_are_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sd1.safetensors");
    Recorded::read("sd1").write(&file, &[], |tensors| {
        let name = "model.diffusion_model.input_blocks.0.0.bias";
        let (_, bias) = tensors.iter_mut().find(|(n, _)| n == name).unwrap();
        // Infinity, in each of the usual types.
        let infinity = match bias.shape.dtype {
            DType::F16 => vec![0, 0x7c],
            _ => vec![0, 0, 0x80, 0x7f],
        };
        bias.data[..infinity.len()].copy_from_slice(&infinity);
    });
    let output = dir.path().join("out");
    let refused = convert(&file, &output, &[]);
    assert_eq!(refused.status.code(), Some(1));
    let found = stderr(&refused);
    let expected = format!(
        "error: {}: tensor conv_in.bias: it holds NaN or infinity",
        file.display()
    );
    assert!(found.contains(&expected), "{found}");
    assert!(!output.exists());
}

#[test]
fn convert_takes_a_name_on_the_hub_from_the_cache() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join("hub/models--some--model");
    let snapshot = cache.join("snapshots").join(COMMIT);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pipeline_sd21");
    for name in [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ] {
        fs::create_dir_all(snapshot.join(name).parent().unwrap()).unwrap();
        fs::copy(golden.join(name), snapshot.join(name)).unwrap();
    }
    fs::create_dir(snapshot.join("tokenizer")).unwrap();
    fs::write(snapshot.join("tokenizer/tokenizer.json"), "{}").unwrap();
    fs::create_dir(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), COMMIT).unwrap();

    let out = home.path().join("out");
    let convert = |name: &str, words: &[&str]| {
        program(["convert", name])
            .arg(&out)
            .args(words)
            .current_dir(home.path())
            .env_remove("HF_HUB_CACHE")
            .env_remove("HUGGINGFACE_HUB_CACHE")
            .env("HF_HOME", home.path())
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap()
    };
    let refused = |code, name: &str, words: &[&str], expected: &str| {
        let output = convert(name, words);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    let missing = "some/other at main is not complete in the cache";
    refused(1, "some/other", &[], missing);
    refused(
        1,
        "some/model",
        &["revision=v2"],
        "the revision v2 is not there",
    );
    refused(
        2,
        "some/model",
        &["revision=../x"],
        "cannot be the name of a branch",
    );
    // Paths are no names of repositories, and a folder goes before one.
    refused(1, "./some/model", &[], "no such file or folder");
    refused(
        2,
        "./some/model",
        &["revision=v2"],
        "revision has no effect",
    );
    fs::create_dir_all(home.path().join("some/model")).unwrap();
    refused(1, "some/model", &[], "no model in this folder");
    fs::remove_dir_all(home.path().join("some")).unwrap();

    let output = convert("some/model", &[&format!("revision={COMMIT}")]);
    assert!(output.status.success(), "{}", stderr(&output));
    let source = ModelSource::open(&out).unwrap();
    assert_eq!(source.layout, Layout::Pipeline);
    assert_eq!(source.components.len(), 3);
}
