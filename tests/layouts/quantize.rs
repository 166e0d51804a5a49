//! `quantize` of single files.

use std::fs;
use std::path::Path;

use crate::common::{json, program};

use super::{MODELS, converted};

/// A single file is quantized as the folder that `convert` makes of it.
#[test]
fn single_files_are_quantized_as_folders() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family) in MODELS {
        let (folder, _) = converted(dir.path(), name);
        let quantize = |model: &Path, output: &Path| {
            let output = program(["quantize", "sd15", "--json", "quantization=int8_w8a16"])
                .arg("norm_num_groups=4")
                .arg(format!("model_family={}", family.name()))
                .arg(format!("pretrained_model_name_or_path={}", model.display()))
                .arg("--output")
                .arg(output)
                .output()
                .unwrap();
            json(&output)
        };
        let [one, two] = ["one", "two"].map(|out| dir.path().join(format!("{name}_{out}")));
        let file = dir.path().join(format!("{name}.safetensors"));
        let reports = [quantize(&file, &one), quantize(&folder, &two)];
        for key in ["tensors", "rules", "quantization_config", "parameters"] {
            assert_eq!(reports[0][key], reports[1][key], "{name} {key}");
        }
        for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
            let [one, two] = [&one, &two].map(|out| fs::read(out.join("unet").join(file)).unwrap());
            assert!(one == two, "{name} {file}");
        }
    }
}
