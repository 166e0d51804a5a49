//! The LoRAs of `lora_config`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::Config;
use crate::pipelines::LoraChoice;

use super::RecipeError;

/// The LoRAs that the configuration names.
///
/// # Errors
/// When the lists do not fit each other.
pub fn loras(config: &Config) -> Result<Vec<LoraChoice>, RecipeError> {
    let lists = &config.lora_config;
    let paths = texts("lora_model_name_or_path", &lists.lora_model_name_or_path.0)?;
    let files = texts("weight_name", &lists.weight_name.0)?;
    let names = texts("adapter_name", &lists.adapter_name.0)?;
    let scales = &lists.scale.0;
    for (key, count) in [
        ("weight_name", files.len()),
        ("adapter_name", names.len()),
        ("scale", scales.len()),
    ] {
        if count > 0 && count != paths.len() {
            return Err(RecipeError::Usage(format!(
                "lora_config.{key} has {count} entries for the {} of lora_model_name_or_path; give one for each, or leave \
                 it out",
                paths.len()
            )));
        }
    }
    paths
        .iter()
        .enumerate()
        .map(|(i, path)| {
            let scale = match scales.get(i) {
                None => 1.0,
                Some(value) => value
                    .as_f64()
                    .map(|scale| scale as f32)
                    .filter(|scale| scale.is_finite())
                    .ok_or_else(|| {
                        RecipeError::Usage(format!(
                            "lora_config.scale: expected numbers, found {value}"
                        ))
                    })?,
            };
            let path = match files.get(i).filter(|file| !file.is_empty()) {
                Some(file) => Path::new(path).join(file),
                None => PathBuf::from(path),
            };
            let name = match names.get(i).filter(|name| !name.is_empty()) {
                Some(name) => (*name).to_string(),
                None => path.display().to_string(),
            };
            Ok(LoraChoice { path, name, scale })
        })
        .collect()
}

fn texts<'a>(key: &str, values: &'a [Value]) -> Result<Vec<&'a str>, RecipeError> {
    values
        .iter()
        .map(|value| {
            value.as_str().ok_or_else(|| {
                RecipeError::Usage(format!(
                    "lora_config.{key}: expected strings, found {value}"
                ))
            })
        })
        .collect()
}
