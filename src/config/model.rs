//! Where a model's architecture comes from.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::models::{DenoiserKind, Family};
use crate::schedulers::PredictionType;
use crate::util::files;

use super::error::{ConfigError, ConfigErrors, Place, Problem};
use super::schema::Config;
use super::values::ModelConfig;

/// diffusers' `unet/config.json` of a known model with a UNet, by its name on the hub.
pub fn builtin_unet_config(pretrained_model_name_or_path: &str) -> Option<&'static str> {
    let (family, published) = Family::of_repository(pretrained_model_name_or_path)?;
    match family.spec().denoiser {
        DenoiserKind::Unet => Some(published.denoiser),
        DenoiserKind::Flux | DenoiserKind::Sd3 | DenoiserKind::PixArt => None,
    }
}

/// What a known model's denoiser predicts, by its name on the hub.
pub(super) fn builtin_prediction(pretrained_model_name_or_path: &str) -> Option<PredictionType> {
    let (_, published) = Family::of_repository(pretrained_model_name_or_path)?;
    if published.epsilon.contains(&pretrained_model_name_or_path) {
        return Some(PredictionType::Epsilon);
    }
    let scheduler: Map<String, Value> = serde_json::from_str(published.scheduler).ok()?;
    PredictionType::from_name(scheduler.get("prediction_type")?.as_str()?)
}

/// The names of the known models, for messages.
fn known_names() -> String {
    let names: Vec<_> = Family::published()
        .flat_map(|(_, published)| published.repositories)
        .copied()
        .collect();
    names.join(", ")
}

/// Reads a JSON object. `key` is the configuration key it serves.
pub(super) fn read_json(path: &Path, key: &str) -> Result<Map<String, Value>, ConfigErrors> {
    let error = |message: String| {
        ConfigErrors::from(ConfigError {
            key: key.to_owned(),
            place: Place::File {
                path: path.display().to_string(),
                line: 0,
            },
            problem: Problem::Read(message),
        })
    };
    let text = files::read_to_string(path).map_err(|e| error(e.to_string()))?;
    serde_json::from_str(&text).map_err(|e| error(e.to_string()))
}

impl Config {
    /// The configuration of a part in the folder `pretrained_model_name_or_path`.
    pub fn folder_config(&self, part: &str) -> PathBuf {
        let folder = Path::new(&self.pretrained_model_name_or_path);
        folder.join(part).join("config.json")
    }

    /// The denoiser's configuration in the folder `pretrained_model_name_or_path`, if it is one of a model.
    pub fn folder_denoiser_config(&self) -> Option<PathBuf> {
        let mut files = DenoiserKind::ALL
            .map(|kind| self.folder_config(kind.part().name()))
            .into_iter();
        files.find(|file| !self.pretrained_model_name_or_path.is_empty() && file.is_file())
    }

    /// Where [`Config::denoiser_config_json`] is written, for messages.
    pub fn denoiser_config_place(&self) -> String {
        let file = self.folder_denoiser_config();
        let part = file
            .as_deref()
            .and_then(Path::parent)
            .and_then(Path::file_name);
        let part = part.map_or("unet".into(), |part| part.to_string_lossy());
        self.place_of(&self.unet_config.0, "unet_config", &part)
    }

    /// Where [`Config::text_encoder_config_json`] is written, for messages.
    pub fn text_encoder_config_place(&self) -> String {
        let key = "text_encoder_config";
        self.place_of(&self.text_encoder_config.0, key, "text_encoder")
    }

    fn place_of(&self, own: &ModelConfig, key: &str, part: &str) -> String {
        match own {
            ModelConfig::Inline(_) => key.to_owned(),
            ModelConfig::Path(path) => format!("{key}={path}"),
            ModelConfig::Unset => match self.folder_config(part) {
                file if file.is_file() => file.display().to_string(),
                _ => self.pretrained_model_name_or_path.clone(),
            },
        }
    }

    /// The denoiser's dict by diffusers' names: `unet_config`, else `unet/config.json` or `transformer/config.json` in
    /// the folder `pretrained_model_name_or_path`, else that of the known model of this name; with `norm_num_groups` put
    /// into a UNet's where it is set.
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON; a name that is neither a folder nor known.
    pub fn denoiser_config_json(&self) -> Result<Map<String, Value>, ConfigErrors> {
        let mut dict = match self.unet_config.0.resolve("unet_config")? {
            Some(dict) => dict,
            None => self.pretrained_denoiser_config()?,
        };
        // MaxDiffusion's files for transformers have the key too.
        let class = dict.get("_class_name").and_then(Value::as_str);
        let is_unet = class.is_none_or(|class| class.ends_with("UNet2DConditionModel"));
        if let (true, Some(groups)) = (is_unet, self.norm_num_groups) {
            dict.insert("norm_num_groups".into(), groups.into());
        }
        Ok(dict)
    }

    /// What says how the denoiser's weights are stored, and where it is written: the `config.json` in the folder
    /// `pretrained_model_name_or_path`, also where `unet_config` says what the UNet is, else [`Config::denoiser_config_json`].
    ///
    /// # Errors
    /// A file that cannot be read or is not a JSON object, or a name that is neither a folder nor a known model.
    pub fn stored_denoiser_config(&self) -> Result<(String, Map<String, Value>), ConfigErrors> {
        match self.folder_denoiser_config() {
            Some(file) => {
                let fields = read_json(&file, "pretrained_model_name_or_path")?;
                Ok((file.display().to_string(), fields))
            }
            None => Ok((self.denoiser_config_place(), self.denoiser_config_json()?)),
        }
    }

    fn pretrained_denoiser_config(&self) -> Result<Map<String, Value>, ConfigErrors> {
        let key = "pretrained_model_name_or_path";
        let name = &self.pretrained_model_name_or_path;
        if let Some(file) = self.folder_denoiser_config() {
            return read_json(&file, key);
        }
        let error = |message: String| {
            ConfigErrors::from(ConfigError {
                key: key.to_owned(),
                place: Place::Default,
                problem: Problem::Read(message),
            })
        };
        let known = Family::of_repository(name).map(|(_, published)| published.denoiser);
        let text = known.ok_or_else(|| {
            error(format!(
                "'{name}' is neither a folder with unet/config.json or transformer/config.json nor a known model ({}); \
                 give unet_config or a folder",
                known_names()
            ))
        })?;
        serde_json::from_str(text).map_err(|e| error(e.to_string()))
    }

    /// The autoencoder's dict by diffusers' names: `vae/config.json` in the folder `pretrained_model_name_or_path`;
    /// `None` where there is none, or the UNet is not that of the folder.
    ///
    /// # Errors
    /// A file that cannot be read or is not a JSON object.
    pub fn vae_config_json(&self) -> Result<Option<Map<String, Value>>, ConfigErrors> {
        let name = &self.pretrained_model_name_or_path;
        let file = self.folder_config("vae");
        if self.unet_config.0 != ModelConfig::Unset || name.is_empty() || !file.is_file() {
            return Ok(None);
        }
        read_json(&file, "pretrained_model_name_or_path").map(Some)
    }

    /// The text encoder's dict by transformers' names: `text_encoder_config`, else
    /// `text_encoder/config.json` in the folder `pretrained_model_name_or_path`; `None` if
    /// neither is there.
    ///
    /// # Errors
    /// A file that cannot be read or is not a JSON object.
    pub fn text_encoder_config_json(&self) -> Result<Option<Map<String, Value>>, ConfigErrors> {
        if self.text_encoder_config.0 != ModelConfig::Unset {
            return self.text_encoder_config.0.resolve("text_encoder_config");
        }
        let name = &self.pretrained_model_name_or_path;
        let file = self.folder_config("text_encoder");
        if name.is_empty() || !file.is_file() {
            return Ok(None);
        }
        read_json(&file, "pretrained_model_name_or_path").map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_dicts_have_the_published_shapes() {
        let of = |name: &str| -> Value {
            serde_json::from_str(builtin_unet_config(name).unwrap()).unwrap()
        };
        let sd15 = of("runwayml/stable-diffusion-v1-5");
        assert_eq!(sd15, of("CompVis/stable-diffusion-v1-4"));
        assert_eq!(sd15["cross_attention_dim"], 768);
        let sd21 = of("stabilityai/stable-diffusion-2-1");
        assert_eq!(
            sd21["attention_head_dim"],
            serde_json::json!([5, 10, 20, 20])
        );
        let xl = of("stabilityai/stable-diffusion-xl-base-1.0");
        assert_eq!(xl["projection_class_embeddings_input_dim"], 2816);
        assert_eq!(builtin_unet_config("someone/something"), None);
        assert_eq!(builtin_unet_config("black-forest-labs/FLUX.1-dev"), None);
    }

    #[test]
    fn every_name_of_a_built_in_dict_is_accepted_as_unet_config() {
        let of_unets = Family::published().filter(|(f, _)| f.spec().denoiser == DenoiserKind::Unet);
        for (_, model) in of_unets {
            let word = format!("unet_config={}", model.denoiser);
            let loaded =
                Config::from_overrides(&[word, "train_new_unet=True".into()], None).unwrap();
            let want: Value = serde_json::from_str(model.denoiser).unwrap();
            assert_eq!(
                Value::Object(loaded.config.denoiser_config_json().unwrap()),
                want
            );
        }
    }

    #[test]
    fn an_unknown_model_is_named_with_the_known_ones() {
        let config = Config {
            pretrained_model_name_or_path: "someone/something".into(),
            ..Config::default()
        };
        let message = config.denoiser_config_json().unwrap_err().to_string();
        assert!(message.contains("'someone/something'"), "{message}");
        assert!(
            message.contains("stable-diffusion-xl-base-1.0"),
            "{message}"
        );
    }

    #[test]
    fn norm_num_groups_reaches_the_unet() {
        let mut config = Config::default();
        assert_eq!(
            config.denoiser_config_json().unwrap()["norm_num_groups"],
            32
        );
        config.norm_num_groups = Some(16);
        assert_eq!(
            config.denoiser_config_json().unwrap()["norm_num_groups"],
            16
        );
    }
}
