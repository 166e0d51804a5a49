//! The settings of an image as texts of its PNG file: one for web interfaces, and one that this program reads
//! back.

use std::collections::BTreeMap;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::super::upscaler::HiresUpscaler;
use super::web_sampler::WebSampler;

/// Keyword of the text that web interfaces for Stable Diffusion read.
pub(super) const PARAMETERS: &str = "parameters";
/// Keyword of the settings as JSON.
pub(super) const SETTINGS: &str = "maxdiff";

/// The settings that made an image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationSettings {
    pub prompt: String,
    #[serde(default)]
    pub negative_prompt: String,
    pub seed: u64,
    pub steps: u32,
    pub guidance_scale: f64,
    /// Name of the sampler: diffusers' class.
    pub scheduler: String,
    /// The sampler as web interfaces name it; not part of what is read back.
    #[serde(skip)]
    pub web_sampler: Option<WebSampler>,
    /// Name of the configuration, such as `quickstart`.
    pub config: String,
    /// Size in pixels, before a hi-res fix. Files of older versions do not have it: that of the image is read instead.
    #[serde(default)]
    pub width: u32,
    #[serde(default)]
    pub height: u32,
    /// Name of the model; empty: that of the configuration.
    #[serde(default)]
    pub model: String,
    /// The first ten hexadecimal digits of the SHA-256 of the model's file, as web interfaces show
    /// it.
    #[serde(default)]
    pub model_hash: Option<String>,
    /// The second pass of a hi-res fix; what is read back of it is among the options.
    #[serde(skip)]
    pub hires: Option<HiresSettings>,
    /// Whatever else the image needs, by its name in the configuration.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

/// The second pass of a hi-res fix, as web interfaces tell it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HiresSettings {
    pub scale: f64,
    pub strength: f64,
    /// Steps of its whole schedule; those of the image where there are none.
    pub steps: Option<u32>,
    pub upscaler: HiresUpscaler,
}

impl GenerationSettings {
    /// The text under the keyword `parameters`: prompt, negative prompt and one line of settings, in
    /// the layout of AUTOMATIC1111's web interface, with its names of samplers and schedules.
    pub fn parameters(&self) -> String {
        let mut text = self.prompt.clone();
        if !self.negative_prompt.is_empty() {
            text.push_str("\nNegative prompt: ");
            text.push_str(&self.negative_prompt);
        }
        let model = match self.model.as_str() {
            "" => &self.config,
            model => model,
        };
        let sampler = self.web_sampler.as_ref();
        let hires = self.hires.as_ref();
        // Web interfaces count the steps that run.
        let hires_steps =
            hires.map(|h| (f64::from(h.steps.unwrap_or(self.steps)) * h.strength) as u32);
        let fields = [
            ("Steps", Some(self.steps.to_string())),
            (
                "Sampler",
                Some(sampler.map_or(&self.scheduler, |s| &s.name).clone()),
            ),
            ("Schedule type", sampler.map(|s| s.schedule.to_owned())),
            ("CFG scale", Some(self.guidance_scale.to_string())),
            ("Seed", Some(self.seed.to_string())),
            ("Size", Some(format!("{}x{}", self.width, self.height))),
            ("Model hash", self.model_hash.clone()),
            ("Model", Some(model.to_owned())),
            ("Denoising strength", hires.map(|h| h.strength.to_string())),
            ("Hires upscale", hires.map(|h| h.scale.to_string())),
            ("Hires steps", hires_steps.map(|steps| steps.to_string())),
            (
                "Hires upscaler",
                hires.map(|h| h.upscaler.web_name().to_owned()),
            ),
            (
                "Version",
                Some(format!("maxdiff-rs {}", env!("CARGO_PKG_VERSION"))),
            ),
        ];
        let fields: Vec<String> = fields
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name}: {}", quoted(&value?))))
            .collect();
        text.push('\n');
        text.push_str(&fields.join(", "));
        text.trim().to_owned()
    }

    /// Adds the texts to a file that is being written.
    pub(super) fn add_to<W: Write>(
        &self,
        encoder: &mut png::Encoder<'_, W>,
    ) -> Result<(), png::EncodingError> {
        let json = serde_json::to_string(self).map_err(std::io::Error::from)?;
        for (keyword, text) in [(PARAMETERS, self.parameters()), (SETTINGS, json)] {
            // tEXt is read by more programs, but holds Latin-1 only.
            if text.chars().all(|c| u32::from(c) < 256 && c != '\0') {
                encoder.add_text_chunk(keyword.to_owned(), text)?;
            } else {
                encoder.add_itxt_chunk(keyword.to_owned(), text.replace('\0', " "))?;
            }
        }
        Ok(())
    }
}

/// A value of the line of settings: as JSON where it would be torn apart otherwise.
fn quoted(value: &str) -> String {
    match value.contains([',', ':', '\n']) {
        true => serde_json::Value::from(value).to_string(),
        false => value.to_owned(),
    }
}
