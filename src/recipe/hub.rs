//! Names on the hub where the configuration takes paths.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Notice, Notify, RecipeError};
use crate::config::Config;
use crate::hub::{self, Fetched, HubError, HubOptions, RepoId, Revision, Wanted};
use crate::util::names::nearest;

/// A repository that a name was found to be, with its files on this machine.
pub struct Found {
    pub repo: RepoId,
    pub path: PathBuf,
}

/// The repository that `name` means, downloaded if need be; `None` if it is the path of something here, or no name of a
/// repository. A name whose first half is a folder here is a path. `token` goes before those of the environment where
/// it is not empty.
///
/// # Errors
/// The error of [`hub::fetch`]; when the name is that of something missing in a folder here.
pub fn find(
    name: &str,
    revision: &str,
    token: &str,
    wanted: &Wanted<'_>,
    notify: &mut Notify<'_>,
) -> Result<Option<Found>, RecipeError> {
    if Path::new(name).exists() {
        return Ok(None);
    }
    let Some(repo) = RepoId::parse(name) else {
        return Ok(None);
    };
    if let Some(advice) = missing_here(Path::new(name)) {
        return Err(RecipeError::Usage(format!(
            "{name}: no such file or folder{advice}"
        )));
    }
    let fetched =
        fetch(&repo, revision, token, wanted, notify).map_err(|error| match error.is_usage() {
            true => RecipeError::usage(error),
            false => RecipeError::failed(error),
        })?;
    tracing::debug!("{repo} is commit {}", fetched.commit);
    Ok(Some(Found {
        repo,
        path: fetched.path,
    }))
}

/// The parquet files of the dataset that the configuration names, downloaded if need be: the folder, and the files in it.
///
/// # Errors
/// The error of [`hub::fetch`]; when it is no name of a repository.
pub fn find_dataset(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<(PathBuf, Vec<PathBuf>), RecipeError> {
    let name = &config.dataset_name;
    let Some(repo) = RepoId::parse_dataset(name) else {
        return Err(RecipeError::Usage(format!(
            "dataset_name={name}: expected the name of a dataset on the hub, organization/name; for files here give train_data_dir"
        )));
    };
    let folder = config.hf_data_dir.trim_matches('/');
    let wanted = Wanted::Dataset {
        split: &config.train_split,
        folder,
    };
    let (revision, token) = (&config.dataset_revision, &config.hf_access_token);
    let fetched = fetch(&repo, revision, token, &wanted, notify).map_err(|error| match error {
        error if error.is_usage() => RecipeError::Usage(format!("dataset_name: {error}")),
        error => RecipeError::failed(error),
    })?;
    tracing::debug!("{repo} is commit {}", fetched.commit);
    let below = |name: &String| {
        PathBuf::from(
            Path::new(name)
                .strip_prefix(folder)
                .unwrap_or(Path::new(name)),
        )
    };
    let files = fetched.files.iter().map(below).collect();
    Ok((fetched.path, files))
}

/// Whether `generate` would look a name of the configuration up on the hub.
pub fn names_repositories(config: &Config) -> bool {
    let controlnets = config.controlnet_model_name_or_path.0.iter();
    let loras = config.lora_config.lora_model_name_or_path.0.iter();
    let names = [
        &config.pretrained_model_name_or_path,
        &config.refiner_model_name_or_path,
        &config.tokenizer_model_name_or_path,
        &config.lightning_repo,
        &config.vae_model_name_or_path,
        &config.denoiser_model_name_or_path,
        &config.t5_model_name_or_path,
        &config.preview_vae_model_name_or_path,
    ];
    names
        .into_iter()
        .chain(controlnets.filter(|_| config.use_controlnet))
        .map(String::as_str)
        .chain(loras.filter_map(Value::as_str))
        .any(|name| !Path::new(name).exists() && RepoId::parse(name).is_some())
}

/// Refuses parts that are neither here nor the name of a repository, before anything is downloaded.
///
/// # Errors
/// Names the key.
pub fn check_autoencoders(config: &Config) -> Result<(), RecipeError> {
    let named = [
        ("vae_model_name_or_path", &config.vae_model_name_or_path),
        (
            "denoiser_model_name_or_path",
            &config.denoiser_model_name_or_path,
        ),
        ("t5_model_name_or_path", &config.t5_model_name_or_path),
        (
            "preview_vae_model_name_or_path",
            &config.preview_vae_model_name_or_path,
        ),
    ];
    for (key, name) in named {
        let path = Path::new(name);
        if !name.is_empty() && !path.exists() && RepoId::parse(name).is_none() {
            let advice = missing_here(path).unwrap_or_default();
            return Err(RecipeError::Usage(format!(
                "{key}={name}: no such file or folder, and not the name of a repository on the hub{advice}"
            )));
        }
    }
    Ok(())
}

/// For a path that is not there, in a folder that is: what else lies there. `None` where the folder is not there
/// either, so that it may be a repository's name.
fn missing_here(path: &Path) -> Option<String> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty())?;
    let entries = std::fs::read_dir(folder).ok()?;
    let names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let name = path.file_name()?.to_string_lossy();
    Some(match nearest(&name, names.iter().map(String::as_str)) {
        Some(near) => format!("; did you mean {}?", folder.join(near).display()),
        None => format!("; the folder {} is here", folder.display()),
    })
}

fn fetch(
    repo: &RepoId,
    revision: &str,
    token: &str,
    wanted: &Wanted<'_>,
    notify: &mut Notify<'_>,
) -> Result<Fetched, HubError> {
    let revision = Revision::parse(revision)?;
    let mut options = HubOptions::from_env()?;
    if let Some(token) = hub::Token::parse(token, "hf_access_token")? {
        options.token = Some(token);
    }
    hub::fetch(repo, &revision, wanted, &options, &mut |progress| {
        notify(Notice::Download {
            repo,
            cache: &options.cache,
            progress,
        });
    })
}

/// The configuration with paths where it names repositories: of ControlNets, the refiner, autoencoders, the tokenizer,
/// distilled weights and LoRAs. The model itself is found by [`super::source::Source::find`], since a run's own
/// checkpoint goes before it.
///
/// # Errors
/// The error of [`find`].
pub fn with_paths(mut config: Config, notify: &mut Notify<'_>) -> Result<Config, RecipeError> {
    let token = config.hf_access_token.clone();
    let mut find = |name: &str, wanted: Wanted<'_>| {
        let found = find(name, "", &token, &wanted, notify)?;
        found.map(|found| path_text(&found.path)).transpose()
    };
    if config.use_controlnet {
        for name in &mut config.controlnet_model_name_or_path.0 {
            if let Some(path) = find(name, Wanted::Part)? {
                *name = path;
            }
        }
    }
    let wanted = Wanted::Model {
        expected: None,
        without: None,
    };
    if let Some(path) = find(&config.refiner_model_name_or_path, wanted)? {
        config.refiner_model_name_or_path = path;
    }
    for name in [
        &mut config.vae_model_name_or_path,
        &mut config.denoiser_model_name_or_path,
        &mut config.t5_model_name_or_path,
        &mut config.preview_vae_model_name_or_path,
    ] {
        if let Some(path) = find(name, Wanted::Part)? {
            *name = path;
        }
    }
    if let Some(path) = find(&config.tokenizer_model_name_or_path, Wanted::Tokenizer)? {
        config.tokenizer_model_name_or_path = path;
    }
    let wanted = Wanted::Lora {
        file: Some(&config.lightning_ckpt),
    };
    if let Some(path) = find(&config.lightning_repo, wanted)? {
        config.lightning_repo = path;
    }
    let loras = config.lora_config.lora_model_name_or_path.0.clone();
    for (which, name) in loras.iter().enumerate() {
        let file = config.lora_config.weight_name.0.get(which);
        let file = file.and_then(Value::as_str).filter(|file| !file.is_empty());
        let Some(name) = name.as_str() else { continue };
        if let Some(path) = find(name, Wanted::Lora { file })? {
            config.lora_config.lora_model_name_or_path.0[which] = path.into();
        }
    }
    Ok(config)
}

fn path_text(path: &Path) -> Result<String, RecipeError> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        RecipeError::Usage(format!(
            "the cache {} is not named in UTF-8; set HF_HUB_CACHE to another folder",
            path.display()
        ))
    })
}
