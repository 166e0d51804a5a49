//! `KEY=VALUE` overrides: those of a command line, and those that repeat an image from the settings in its file.

use std::collections::BTreeMap;
use std::path::Path;

use crate::config::{Config, is_image_option, is_read_with};
use crate::pipelines::image_file::{
    GenerationSettings, NamedSampler, Recorded, WebSettings, read_recorded,
};
use crate::schedulers::SchedulerKind;

use super::{Notice, Notify, RecipeError};

/// The overrides of a command line.
#[derive(Clone, Copy, Debug)]
pub struct Overrides<'a>(pub &'a [String]);

impl Overrides<'_> {
    /// Whether they give `key`.
    pub fn give(&self, key: &str) -> bool {
        self.pairs().any(|(given, _)| given == key)
    }

    /// Overrides needed to reproduce the images, besides the settings that have fields of their own.
    pub fn recorded(&self) -> BTreeMap<String, String> {
        self.pairs()
            .filter(|(key, _)| is_image_option(key))
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect()
    }

    /// The sampler that they give.
    fn sampler(&self) -> Option<SchedulerKind> {
        const KEYS: [&str; 2] = ["scheduler", "diffusion_scheduler_config._class_name"];
        let last = self.pairs().filter(|(key, _)| KEYS.contains(key)).last();
        let (_, name) = last?;
        let named = || NamedSampler::read(name).map(|sampler| sampler.kind);
        SchedulerKind::from_name(name).or_else(named)
    }

    /// Whether they take no hi-res fix.
    fn switches_hires_off(&self) -> bool {
        let mut given = self.pairs().filter(|(key, _)| *key == "hires_scale");
        given.any(|(_, value)| matches!(value, "" | "None" | "null"))
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|word| word.split_once('='))
    }
}

/// An image to make again.
pub struct Repeat<'a> {
    given: Overrides<'a>,
    settings: GenerationSettings,
}

impl<'a> Repeat<'a> {
    /// Reads the settings of the image file at `path`, before which `given` goes.
    ///
    /// # Errors
    /// When the file has no settings that can be read, or a sampler that is not here.
    pub fn read(
        path: &Path,
        given: Overrides<'a>,
        notify: &mut Notify<'_>,
    ) -> Result<Repeat<'a>, RecipeError> {
        let settings = match read_recorded(path).map_err(RecipeError::usage)? {
            Recorded::Own(settings) => settings,
            Recorded::Web(read) => of_web_interface(path, given, read, notify)?,
        };
        Ok(Repeat { given, settings })
    }

    /// The overrides to load the configuration with.
    pub fn overrides(&self) -> Vec<String> {
        let settings = &self.settings;
        let numbers = [
            ("seed", settings.seed.to_string()),
            ("num_inference_steps", settings.steps.to_string()),
            ("guidance_scale", settings.guidance_scale.to_string()),
            (
                "scheduler",
                match self.given.sampler() {
                    Some(_) => String::new(),
                    None => settings.scheduler.clone(),
                },
            ),
        ];
        let options = settings.options.iter();
        options
            .map(|(key, value)| (key.as_str(), value.clone()))
            .chain(numbers)
            .filter(|(key, value)| self.is_free(key) && !value.is_empty())
            .map(|(key, value)| format!("{key}={value}"))
            .chain(self.given.0.iter().cloned())
            .collect()
    }

    /// Sets what overrides cannot express: prompts as they are, and the size.
    pub fn apply(self, config: &mut Config) {
        if self.is_free("prompt") && self.is_free("prompts_file") {
            config.prompt.0 = vec![self.settings.prompt.clone()];
        }
        if self.is_free("negative_prompt") {
            config.negative_prompt = self.settings.negative_prompt.clone();
        }
        // A pixel-space model has a fixed size.
        if config.pixel_unshuffle == 1 && self.is_free("height") && self.is_free("width") {
            config.height = u64::from(self.settings.height);
            config.width = u64::from(self.settings.width);
        }
    }

    /// Whether the image decides `key`. What only the image's own sampler or its hi-res fix reads goes with it.
    fn is_free(&self, key: &str) -> bool {
        let sampler = self.given.sampler();
        if key.starts_with("hires_") && self.given.switches_hires_off() {
            return false;
        }
        !self.given.give(key) && sampler.is_none_or(|sampler| is_read_with(key, sampler))
    }
}

/// The settings of an image that a web interface made; a warning names each setting that is ignored.
fn of_web_interface(
    path: &Path,
    given: Overrides<'_>,
    read: WebSettings,
    notify: &mut Notify<'_>,
) -> Result<GenerationSettings, RecipeError> {
    if let (Some(name), None) = (read.unknown_sampler, given.sampler()) {
        return Err(RecipeError::Usage(format!(
            "{}: its sampler, {name}, is not here; give scheduler=, or take an image with one of {}",
            path.display(),
            WebSettings::samplers()
        )));
    }
    notify(Notice::Note(&format!(
        "{} was made by another program: its settings are used, but noise and steps differ, and so will the image",
        path.display()
    )));
    for unused in read.unused {
        notify(Notice::Warning(&format!("ignored: {unused}")));
    }
    Ok(read.settings)
}
