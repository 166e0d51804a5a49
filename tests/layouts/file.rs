//! `convert` into one file with the names of the original code, and back.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use maxdiff::host_tensor::HostTensor;
use maxdiff::models::{Family, Part};
use maxdiff::weights::Checkpoint;
use maxdiff::weights::source::{Layout, ModelSource};
use serde_json::{Value, json};

use super::convert::{convert, converted, stderr};
use super::{Recorded, write};

/// Those whose folders have all that the original code has, and their denoisers.
const MODELS: [(&str, Part); 6] = [
    ("sd1", Part::Unet),
    ("sdxl", Part::Unet),
    ("sdxl_refiner", Part::Unet),
    ("flux", Part::Transformer),
    ("sd35", Part::Transformer),
    ("pixart", Part::Transformer),
];

fn run(input: &Path, output: &Path, options: &[&str]) {
    let output = convert(input, output, options);
    assert!(output.status.success(), "{}", stderr(&output));
}

fn tensors(checkpoint: &Checkpoint) -> BTreeMap<String, HostTensor> {
    let read = |name: &str| (name.to_owned(), checkpoint.read(name).unwrap());
    checkpoint.names().map(read).collect()
}

fn assert_same(found: &ModelSource, expected: &ModelSource) {
    assert_eq!(found.family, expected.family);
    assert!(found.components.keys().eq(expected.components.keys()));
    for (part, component) in &found.components {
        let expected = &expected.components[part];
        assert_eq!(
            tensors(&component.checkpoint),
            tensors(&expected.checkpoint)
        );
    }
}

#[test]
fn a_folder_becomes_the_file_that_it_was_made_from() {
    let dir = tempfile::tempdir().unwrap();
    for (name, denoiser) in MODELS {
        let (folder, report) = converted(dir.path(), name);
        let back = dir.path().join(format!("{name}-back.safetensors"));
        run(&folder, &back, &[]);
        let found = tensors(&Checkpoint::open(&back).unwrap());
        // What reading ignores is not in the folder.
        let ignored = report["ignored"].as_array().unwrap().iter();
        let ignored: Vec<&Value> = ignored
            .flat_map(|group| group["names"].as_array().unwrap())
            .collect();
        let mut expected: BTreeMap<String, HostTensor> =
            Recorded::read(name).filled().into_iter().collect();
        expected.retain(|name, _| !ignored.contains(&&json!(name)));
        assert!(found.keys().eq(expected.keys()), "{name}");
        assert!(found == expected, "{name}");

        let single = ModelSource::open(&back).unwrap();
        assert_eq!(single.layout, Layout::SingleFile);
        let original = ModelSource::open(&folder).unwrap();
        assert_same(&single, &original);
        let again = dir.path().join(format!("{name}-again"));
        run(&back, &again, &[]);
        assert_same(&ModelSource::open(&again).unwrap(), &original);
        for (part, component) in &single.components {
            assert_eq!(component.config, original.components[part].config);
        }

        let alone = dir.path().join(format!("{name}-alone.safetensors"));
        // From the file, whose tensors are views of others, with values that do not change.
        run(&back, &alone, &["parts=denoiser"]);
        let source = ModelSource::open(&alone).unwrap();
        assert_eq!(source.components.keys().collect::<Vec<_>>(), [&denoiser]);
        let [found, expected] =
            [&source, &original].map(|s| tensors(&s.components[&denoiser].checkpoint));
        assert_eq!(found, expected, "{name}");
        let names: Vec<String> = tensors(&Checkpoint::open(&alone).unwrap())
            .into_keys()
            .collect();
        let is_prefixed = |name: &String| name.starts_with("model.diffusion_model.");
        assert!(!names.iter().any(is_prefixed), "{name}");
    }
}

#[test]
fn a_file_without_captions_says_which_pixart_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _) = converted(dir.path(), "pixart");
    let config = folder.join("transformer/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let mut fields: Value = serde_json::from_str(&text).unwrap();
    // Alpha's configurations do not say whether it takes the size.
    fields
        .as_object_mut()
        .unwrap()
        .remove("use_additional_conditions");
    fields["sample_size"] = json!(64);
    fs::write(&config, fields.to_string()).unwrap();
    let back = dir.path().join("back.safetensors");
    run(&folder, &back, &[]);
    let source = ModelSource::open(&back).unwrap();
    assert_eq!(source.family, Family::PixArtAlpha);
    let config = &source.components[&Part::Transformer].config;
    assert_eq!(config["sample_size"], json!(64));
}

#[test]
fn what_the_original_code_does_not_have_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |input: &Path, options: &[&str], code, expected: &str| {
        let file = dir.path().join("refused.safetensors");
        let output = convert(input, &file, options);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(expected), "{error}");
        assert!(!file.exists());
    };
    // The original has 24 layers, the folder 23.
    let (sd2, _) = converted(dir.path(), "sd2");
    refused(
        &sd2,
        &[],
        1,
        "text_encoder has no place in files with the names",
    );
    refused(
        &sd2,
        &["parts=none"],
        2,
        "'parts=none' is not an option of convert",
    );
    let folder = dir.path().join("folder");
    let output = convert(&sd2, &folder, &["parts=denoiser"]);
    assert!(stderr(&output).contains("parts has no effect"));

    let (sd35, _) = converted(dir.path(), "sd35");
    let change = |part: &str, file: &str, change: &dyn Fn(&mut BTreeMap<String, HostTensor>)| {
        let path = sd35.join(part).join(file);
        let mut all = tensors(&Checkpoint::open(&path).unwrap());
        change(&mut all);
        fs::remove_file(&path).unwrap();
        write(&path, &[], &all.into_iter().collect::<Vec<_>>());
    };
    change("text_encoder", "model.safetensors", &|all| {
        all.get_mut("text_projection.weight").unwrap().data[1] = 0x40;
    });
    refused(
        &sd35,
        &[],
        1,
        "text_encoder/text_projection.weight has no place",
    );
    refused(&sd35, &[], 1, "it is not the unit matrix");
    let transformer = "diffusion_pytorch_model.safetensors";
    change("transformer", transformer, &|all| {
        all.remove("transformer_blocks.0.attn.to_k.weight");
    });
    let reason = "joint_blocks.0.x_block.attn.qkv.weight is made of it and transformer_blocks.0.attn.to_k.weight, which \
                  is missing";
    refused(&sd35, &["parts=denoiser"], 1, reason);
    let (sdxl, _) = converted(dir.path(), "sdxl");
    let path = sdxl.join("unet").join(transformer);
    let mut all = tensors(&Checkpoint::open(&path).unwrap());
    all.insert(
        "strange.weight".to_owned(),
        HostTensor::from_f32([1], &[1.0]).unwrap(),
    );
    fs::remove_file(&path).unwrap();
    write(&path, &[], &all.into_iter().collect::<Vec<_>>());
    refused(&sdxl, &[], 1, "unet/strange.weight has no place");
}
