//! The operations of one run of a denoiser, layer by layer.

use std::collections::BTreeMap;

use crate::config::Config;
use crate::graph::{Builder, contraction_flops};
use crate::models::vae::{Autoencoder, AutoencoderKlConfig};
use crate::models::{Denoiser, Part, SampleSpace, TextEncoderConfig, unet};
use crate::nn::Precision;
use crate::weights::source::ModelSource;

use super::model::{check_positions, drawn_size, prompt_tokens};
use super::source::denoiser;
use super::{RecipeError, precision};

/// The operations of one run of a denoiser on one sample: a multiply and an add are two. Low-rank products beside quantized
/// weights are not counted: they are no part of the model.
#[derive(Clone, Debug)]
pub struct DenoiserFlops {
    /// Height and width of the image in pixels.
    pub image_size: [usize; 2],
    /// Tokens of the text.
    pub tokens: usize,
    /// Of products with weights, by the paths of the layers.
    pub layers: BTreeMap<String, u64>,
    /// Of products of two activations: the scores of attention, and what they make of the values.
    pub of_activations: u64,
}

impl DenoiserFlops {
    /// Those of the recipe's size, of a model's denoiser.
    ///
    /// # Errors
    /// When the denoiser has no samples of this size, or a part's configuration is not supported.
    pub(super) fn of_recipe(config: &Config, source: &ModelSource) -> Result<Self, RecipeError> {
        let denoiser = denoiser(config, source)?;
        let factor = space(config, source)?.factor();
        let image_size = drawn_size(config, &denoiser, factor * denoiser.kind().patch())?;
        check_positions(&denoiser, factor, image_size)?;
        let tokens = prompt_tokens(config, source.family, clip_tokens(source))?.all;
        let sample = image_size.map(|side| side / factor);
        let (layers, of_activations) = counted(&denoiser, sample, tokens, precision(config))?;
        Ok(DenoiserFlops {
            image_size,
            tokens,
            layers,
            of_activations,
        })
    }

    /// All of them.
    pub fn all(&self) -> u64 {
        self.of_layers().saturating_add(self.of_activations)
    }

    /// Those of all products with weights.
    pub fn of_layers(&self) -> u64 {
        self.layers.values().copied().fold(0, u64::saturating_add)
    }

    /// So many of all in percent.
    pub fn percent(&self, flops: u64) -> f64 {
        100.0 * flops as f64 / self.all().max(1) as f64
    }
}

/// A denoiser that is traced for one sample. `size` is that of [`Denoiser::declare_forward`].
///
/// # Errors
/// When the sizes do not fit the network.
pub(super) fn traced(
    denoiser: &Denoiser,
    size: &dyn Fn(&str) -> usize,
    precision: Precision,
) -> Result<Builder, RecipeError> {
    let b = Builder::new();
    let sample = denoiser.declare_forward(&b, size, precision);
    let sample = sample.map_err(RecipeError::usage)?;
    b.output(unet::names::SAMPLE, sample, None)
        .map_err(RecipeError::usage)?;
    Ok(b)
}

/// The operations of each layer, and of products of two activations, for one sample of these rows and columns.
fn counted(
    denoiser: &Denoiser,
    [rows, columns]: [usize; 2],
    tokens: usize,
    precision: Precision,
) -> Result<(BTreeMap<String, u64>, u64), RecipeError> {
    let image = denoiser.kind().image_seq_len([rows, columns]);
    let size = |name: &str| match name {
        "height" => rows,
        "width" => columns,
        "image" => image.unwrap_or(rows * columns),
        "length" | "text" => tokens,
        _ => 1,
    };
    let graph = traced(denoiser, &size, precision)?.finish();
    let root = format!("{}/", denoiser.part());
    let mut layers: BTreeMap<String, u64> = BTreeMap::new();
    let mut of_activations = 0u64;
    for contraction in contraction_flops(&graph) {
        let sum = match contraction.has_weight {
            false => &mut of_activations,
            true => {
                let path = contraction.path.strip_prefix(&root);
                let path = path.unwrap_or(&contraction.path).to_owned();
                layers.entry(path).or_default()
            }
        };
        *sum = sum.saturating_add(contraction.flops);
    }
    Ok((layers, of_activations))
}

/// The samples of a model: latents of its autoencoder, or of the one that its family is published with; or pixels.
fn space(config: &Config, source: &ModelSource) -> Result<SampleSpace, RecipeError> {
    let Some(published) = &source.family.spec().published else {
        return Ok(SampleSpace::Pixels {
            block: config.pixel_unshuffle as usize,
        });
    };
    let vae: Autoencoder = match source.components.get(&Part::Vae) {
        Some(component) => {
            let place = source.config_path(Part::Vae).display().to_string();
            Autoencoder::from_map(component.config.clone()).map_err(RecipeError::at(place))?
        }
        None => AutoencoderKlConfig::from_json(published.vae)
            .map_err(RecipeError::usage)?
            .into(),
    };
    Ok(SampleSpace::latents(&vae))
}

/// The tokens that CLIP takes, as its configuration has them; `None` where the source has no CLIP.
fn clip_tokens(source: &ModelSource) -> Option<usize> {
    let encoders = source.family.spec().text_encoders.iter();
    let configs = encoders.filter_map(|encoder| {
        let fields = source.components.get(&encoder.part)?.config.clone();
        TextEncoderConfig::from_map(encoder.kind, fields).ok()
    });
    configs
        .filter_map(|config| Some(config.clip()?.max_position_embeddings))
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Family;

    /// FLUX.1 dev at 1024x1024, by hand: 4,096 tokens of the image and 512 of the text in blocks of 3,072 features.
    #[test]
    fn operations_of_flux_are_those_of_its_sizes() {
        let spec = Family::FluxDev.spec();
        let published = spec.published.as_ref().unwrap();
        let fields = serde_json::from_str(published.denoiser).unwrap();
        let flux = Denoiser::from_map(spec.denoiser, fields).unwrap();
        let (layers, of_activations) = counted(&flux, [128, 128], 512, Precision::F32).unwrap();
        let (image, text, inner) = (4096, 512, 3072);
        let all = image + text;
        let of = |layer: &str| layers[layer];
        let single = 2 * all * (inner + 4 * inner) * inner;
        assert_eq!(of("single_transformer_blocks.37.proj_out"), single);
        assert_eq!(of("proj_out"), 2 * image * inner * 64);
        let double = 2 * image * inner * inner;
        assert_eq!(of("transformer_blocks.0.attn.to_q"), double);
        let added = 2 * text * inner * inner;
        assert_eq!(of("transformer_blocks.0.attn.add_q_proj"), added);
        // Modulations and what they are made of read one row.
        let modulation = 2 * inner * 6 * inner;
        assert_eq!(of("transformer_blocks.18.norm1.linear"), modulation);
        // Scores and values of 57 blocks.
        assert_eq!(of_activations, 57 * 2 * 2 * all * all * inner);
    }
}
