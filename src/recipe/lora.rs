//! The LoRAs of `lora_config`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::Config;
use crate::hub::RepoId;
use crate::pipelines::prompt::{LoraTag, PromptSyntax, split_lora_tags};
use crate::pipelines::{ImageRequest, LoraChoice};

use super::RecipeError;

/// The configuration with the LoRAs that prompts name, `<lora:name:0.8>`, behind those of `lora_config`. A name is a
/// path, without `.safetensors` if one likes, or that of a repository on the hub.
///
/// # Errors
/// When images have different LoRAs, or there is none of a name.
pub fn with_prompt_loras(
    mut config: Config,
    images: &[ImageRequest],
) -> Result<Config, RecipeError> {
    if config.prompt_syntax == PromptSyntax::Plain {
        return Ok(config);
    }
    let tags = |image: &ImageRequest| {
        let split = split_lora_tags(&image.prompt).map_err(RecipeError::usage)?;
        Ok::<_, RecipeError>(split.1)
    };
    let Some(first) = images.first() else {
        return Ok(config);
    };
    let shared = tags(first)?;
    for image in images {
        if tags(image)? != shared {
            return Err(RecipeError::Usage(format!(
                "'{}' and '{}' name different LoRAs, which are merged into the weights of all images of a call: generate them \
                 in two calls",
                first.prompt, image.prompt
            )));
        }
    }
    let lists = &mut config.lora_config;
    for LoraTag { name, scale } in shared {
        let path = path_of(&name)?;
        let before = lists.lora_model_name_or_path.0.len();
        // Lists that are left out have the defaults of all entries.
        for (list, default) in [
            (&mut lists.weight_name, Value::from("")),
            (&mut lists.adapter_name, Value::from("")),
            (&mut lists.scale, Value::from(1.0)),
        ] {
            if list.0.is_empty() {
                list.0.resize(before, default);
            }
        }
        lists.lora_model_name_or_path.0.push(path.into());
        lists.weight_name.0.push("".into());
        lists.adapter_name.0.push(name.into());
        lists.scale.0.push(scale.into());
    }
    Ok(config)
}

/// The file, folder or repository of a LoRA that a prompt names.
fn path_of(name: &str) -> Result<String, RecipeError> {
    let file = format!("{name}.safetensors");
    if Path::new(&file).is_file() {
        return Ok(file);
    }
    if Path::new(name).exists() || RepoId::parse(name).is_some() {
        return Ok(name.to_owned());
    }
    Err(RecipeError::Usage(format!(
        "prompt: <lora:{name}>: there is no file {name} or {file} here; write the path of the LoRA, or the name of its \
         repository (organization/name)"
    )))
}

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
