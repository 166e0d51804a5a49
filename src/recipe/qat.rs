//! Quantization-aware training: how scales are found while a model is trained, and what `quantize` takes of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::config::{Config, OptimizerType, QatObserver};
use crate::graph::TensorFormat;
use crate::host_tensor::HostTensor;
use crate::quant::{
    Action, FakeQuantization, Formats, Policy, input_range_name, is_learnable, log_scale_name,
    scale_dims, scale_of_range,
};
use crate::train::{EMA_SUFFIX, RANGES_FILE};
use crate::weights::Checkpoint;
use crate::weights::quantized::{Quantization, weight_name};
use crate::weights::source::Component;

use super::RecipeError;

/// How training finds scales that are not found anew in every step; `None` where there are none.
///
/// # Errors
/// When scales are to be learned or ranges to be followed that cannot be.
pub(super) fn fake_quantization(
    config: &Config,
    policy: Option<&Policy>,
) -> Result<Option<FakeQuantization>, RecipeError> {
    let refuse = |problem: &str| Err(RecipeError::Usage(problem.to_owned()));
    let rules = policy.iter().flat_map(|policy| &policy.rules);
    let formats: Vec<Formats> = rules
        .filter_map(|rule| match rule.action() {
            Action::Float => None,
            Action::Quantize(formats) => Some(formats),
        })
        .collect();
    let learns_scales = config.qat_observer == QatObserver::Lsq;
    let follows = formats.iter().any(|formats| {
        formats
            .activation
            .is_some_and(TensorFormat::has_stored_scale)
    });
    if !learns_scales && !follows {
        return match config.qat_freeze_observer_steps {
            -1 => Ok(None),
            _ => refuse(
                "qat_freeze_observer_steps has no effect: scales are found anew in every step; give qat_observer=lsq, or leave it out",
            ),
        };
    }
    if config.lora_rank > 0 || !config.placeholder_token.is_empty() {
        return refuse(
            "qat_observer=lsq and the static modes of quantization train the weights that they round: leave lora_rank and \
             placeholder_token out, or take another mode",
        );
    }
    let has_scales =
        |formats: &Formats| formats.backward.is_none() && formats.weight.is_some_and(is_learnable);
    if learns_scales && !formats.iter().all(has_scales) {
        return refuse(
            "qat_observer=lsq learns symmetric scales of weights that are rounded in the forward pass alone: leave \
             quantization_symmetric=False and rules with mode int8 or fp8_full out",
        );
    }
    let freezes = config.qat_freeze_observer_steps >= 0;
    if learns_scales && freezes && config.optimizer_type == OptimizerType::Prodigy {
        return refuse(
            "qat_freeze_observer_steps: Prodigy has one learning rate for all: leave it out, or take another optimizer_type",
        );
    }
    Ok(Some(FakeQuantization {
        learns_scales,
        averaging_constant: config.qat_averaging_constant,
        freeze_after: u64::try_from(config.qat_freeze_observer_steps).ok(),
    }))
}

/// The keys that decide what a scale is of, with their values, as the file of scales has them.
pub(super) fn format_keys(config: &Config) -> BTreeMap<String, String> {
    const KEYS: [&str; 7] = [
        "activations_dtype",
        "quant_rules",
        "quantization",
        "quantization_granularity",
        "quantization_numerics",
        "quantization_symmetric",
        "use_qwix_quantization",
    ];
    let values = config.to_json();
    let value = |key: &str| {
        values
            .get(key)
            .map_or_else(String::new, ToString::to_string)
    };
    KEYS.iter()
        .map(|key| ((*key).to_owned(), value(key)))
        .collect()
}

/// Scales and ranges that training found.
pub(super) struct TrainedRanges {
    path: PathBuf,
    /// By the paths of layers.
    scales: BTreeMap<String, HostTensor>,
    ranges: BTreeMap<String, [f32; 2]>,
}

/// The file of scales in the checkpoint folder `dir`, if it is one of training with such.
pub(super) fn ranges_file(dir: &Path) -> Option<PathBuf> {
    Some(dir.join(RANGES_FILE)).filter(|file| file.is_file())
}

impl TrainedRanges {
    /// What the checkpoint folder has that the denoiser is a folder of; `None` where training found nothing.
    ///
    /// # Errors
    /// When the file cannot be read, or the configuration has other formats than training.
    pub fn of(config: &Config, denoiser: &Component) -> Result<Option<TrainedRanges>, RecipeError> {
        let file = denoiser.checkpoint.files().next();
        let Some(folder) = file.and_then(Path::parent) else {
            return Ok(None);
        };
        let Some(path) = folder.parent().and_then(ranges_file) else {
            return Ok(None);
        };
        let open = |path: &Path| Checkpoint::open(path).map_err(RecipeError::failed);
        let own = open(&path)?;
        for (key, asked) in format_keys(config) {
            let found = own.metadata().get(&key).cloned().unwrap_or_default();
            if found != asked {
                return Err(RecipeError::Usage(format!(
                    "{key}={asked}: {} has scales that were trained with {key}={found}: quantize with the same",
                    path.display()
                )));
            }
        }
        let is_average = folder
            .file_name()
            .is_some_and(|name| name.to_string_lossy().ends_with(EMA_SUFFIX));
        let averaged = path.with_file_name("ema").join(RANGES_FILE);
        let of_scales = match is_average && averaged.is_file() {
            true => open(&averaged)?,
            false => open(&path)?,
        };
        let mut trained = TrainedRanges {
            scales: BTreeMap::new(),
            ranges: BTreeMap::new(),
            path,
        };
        let read = |file: &Checkpoint, name: &str| file.read(name).map_err(RecipeError::failed);
        for name in of_scales.names() {
            if let Some(layer) = name.strip_suffix(&log_scale_name("")) {
                let logs = read(&of_scales, name)?;
                let scales: Vec<f32> = floats(&logs)?.iter().map(|log| log.exp()).collect();
                let scales = HostTensor::from_f32(logs.shape.dims.clone(), &scales);
                let scales = scales.map_err(RecipeError::failed)?;
                trained.scales.insert(layer.to_owned(), scales);
            }
        }
        for name in own.names() {
            if let Some(layer) = name.strip_suffix(&input_range_name(""))
                && let [lowest, highest] = floats(&read(&own, name)?)?[..]
            {
                trained.ranges.insert(layer.to_owned(), [lowest, highest]);
            }
        }
        Ok(Some(trained))
    }

    /// Whether it has the ranges of activations.
    pub fn has_ranges(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Whether it has scales of weights.
    pub fn has_scales(&self) -> bool {
        !self.scales.is_empty()
    }

    /// The learned scale of a layer's weight, `f32`.
    pub fn scale(&self, layer: &str) -> Option<&HostTensor> {
        self.scales.get(layer)
    }

    /// The scale of what a layer reads.
    pub fn input_scale(&self, layer: &str, format: TensorFormat) -> Option<f32> {
        let range = self.ranges.get(layer)?;
        Some(scale_of_range(*range, format))
    }

    /// Checks that each layer has its scale, and no other has.
    ///
    /// # Errors
    /// Names the layer.
    pub fn check(
        &self,
        stored: &Quantization,
        sizes: &[(&str, &[usize])],
    ) -> Result<(), RecipeError> {
        let refuse = |layer: &str, problem: String| {
            Err(RecipeError::Usage(format!(
                "{}: {layer}: {problem}; quantize the float weights of another folder, or train again",
                self.path.display()
            )))
        };
        let all = self.scales.keys().chain(self.ranges.keys());
        for layer in all {
            if !stored.layers.contains_key(layer) {
                return refuse(layer, "it has a scale, and is not quantized".to_owned());
            }
        }
        for (layer, formats) in &stored.layers {
            let name = weight_name(layer);
            let dims = sizes.iter().find(|(key, _)| *key == name);
            let expected = dims.and_then(|(_, dims)| scale_dims(dims, formats.weight.granularity));
            let found = self.scale(layer).map(|scale| scale.shape.dims.clone());
            if self.has_scales() && found != expected {
                return refuse(
                    layer,
                    format!("a scale {expected:?} is expected, found {found:?}"),
                );
            }
            let is_static = formats
                .activation
                .is_some_and(TensorFormat::has_stored_scale);
            if is_static && self.has_ranges() && !self.ranges.contains_key(layer) {
                return refuse(layer, "the range of what it reads is missing".to_owned());
            }
        }
        Ok(())
    }
}

fn floats(tensor: &HostTensor) -> Result<Vec<f32>, RecipeError> {
    tensor.to_f32_vec().map_err(RecipeError::failed)
}

/// Refuses to round the floats of a checkpoint folder whose scales training has found: a program would find others.
///
/// # Errors
/// Where the configuration has a mode and the folder has such scales.
pub(super) fn check_rounded_by_quantize(config: &Config, dir: &Path) -> Result<(), RecipeError> {
    match ranges_file(dir) {
        Some(file) if config.quantization != crate::config::Quantization::Off => {
            Err(RecipeError::Usage(format!(
                "quantization={}: {} has scales that were trained, which `maxdiff-rs quantize` takes: quantize the run with the same \
                 keys, and name the folder that it writes as pretrained_model_name_or_path",
                config.quantization,
                file.display()
            )))
        }
        _ => Ok(()),
    }
}
