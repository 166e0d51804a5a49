//! Conditions between keys, and values that follow from them.

use std::path::{Path, PathBuf};

use crate::schedulers::{PredictionType, SchedulerKind, TimestepSpacing};
use crate::shard::Axis;

use super::error::{ConfigError, ConfigErrors, Place, Problem};
use super::model::builtin_prediction;
use super::schema::{Calibration, Config};
use super::values::{
    BiasStrategy, DatasetType, LossWeighting, MaskedLoss, ModelConfig, OptimizerType, Quantization,
};
use super::verb::Verb;

/// The keys involved and what is wrong.
pub(super) type Conflict = (Vec<&'static str>, String);

/// Values that are right one by one and wrong together, for the verb (all of them without one).
pub(super) fn conflicts(config: &Config, verb: Option<Verb>) -> Vec<Conflict> {
    let mut found = Vec::new();
    mesh(config, &mut found);
    if config.use_qwix_quantization && config.quantization == Quantization::Off {
        found.push((
            vec!["use_qwix_quantization", "quantization"],
            "use_qwix_quantization=True needs a quantization; valid: int8, int8_w8a16, w4a16"
                .into(),
        ));
    }
    if let (ModelConfig::Inline(dict), Some(groups)) =
        (&config.unet_config.0, config.norm_num_groups)
        && let Some(own) = dict.get("norm_num_groups")
        && own.as_u64() != Some(groups)
    {
        found.push((
            vec!["norm_num_groups", "unet_config"],
            format!("norm_num_groups is {groups} and unet_config says {own}: give it once"),
        ));
    }
    let scheduler = &config.diffusion_scheduler_config;
    if scheduler.beta_start > scheduler.beta_end {
        found.push((
            vec!["diffusion_scheduler_config"],
            format!(
                "beta_start {} is above beta_end {}",
                scheduler.beta_start, scheduler.beta_end
            ),
        ));
    }
    let bias = &config.timestep_bias;
    if bias.strategy == BiasStrategy::Range
        && (bias.begin >= bias.end || bias.end > scheduler.num_train_timesteps)
    {
        found.push((
            vec!["timestep_bias", "diffusion_scheduler_config"],
            format!(
                "strategy range from {} up to {} is not a range of the {} timesteps",
                bias.begin, bias.end, scheduler.num_train_timesteps
            ),
        ));
    }
    let weighted = config.loss_weighting == LossWeighting::SnrPlusOne;
    if config.loss_weighting == LossWeighting::Debiased && config.snr_gamma != -1.0 {
        found.push((
            vec!["snr_gamma", "loss_weighting"],
            format!(
                "loss_weighting=debiased has a weight of its own, which snr_gamma={} does not cap",
                config.snr_gamma
            ),
        ));
    } else if config.snr_gamma <= 0.0 && (config.snr_gamma != -1.0 || weighted) {
        let weighting = config.loss_weighting;
        let message = match weighted {
            true => format!(
                "loss_weighting={weighting} caps the signal-to-noise ratio at snr_gamma: give one above 0, such as 5"
            ),
            false => format!("{} is neither -1 (off) nor above 0", config.snr_gamma),
        };
        found.push((vec!["snr_gamma", "loss_weighting"], message));
    }
    if verb.is_none_or(|v| matches!(v, Verb::Generate | Verb::Train))
        && config.num_inference_steps > scheduler.num_train_timesteps
    {
        found.push((
            vec!["num_inference_steps", "diffusion_scheduler_config"],
            format!(
                "{} denoising steps are more than the {} timesteps of the noise schedule",
                config.num_inference_steps, scheduler.num_train_timesteps
            ),
        ));
    }
    if verb == Some(Verb::Train) {
        training(config, &mut found);
    }
    masks(config, &mut found);
    if config.lr_warmup_steps > 0 && config.warmup_steps_fraction > 0.0 {
        found.push((
            vec!["lr_warmup_steps", "warmup_steps_fraction"],
            "both say how long the learning rate rises: give one of them".into(),
        ));
    }
    if config.stochastic_rounding && config.lora_rank > 0 {
        found.push((
            vec!["stochastic_rounding", "lora_rank"],
            "low-rank updates are trained in float32, where nothing is rounded at random: leave stochastic_rounding out"
                .into(),
        ));
    }
    low_rank_factors(config, &mut found);
    if config.optimizer_type == OptimizerType::Prodigy && config.lora_plus_ratio != 1.0 {
        found.push((
            vec!["lora_plus_ratio", "optimizer_type"],
            "Prodigy finds one learning rate for all weights: leave lora_plus_ratio out".into(),
        ));
    }
    if config.use_controlnet
        && verb.is_none_or(|v| v == Verb::Generate)
        && config.controlnet_image.0.iter().any(String::is_empty)
    {
        found.push((
            vec!["controlnet_image", "use_controlnet"],
            "use_controlnet=True needs controlnet_image=FILE, what the ControlNet goes by; for several a list of files".into(),
        ));
    }
    let nets = config.controlnet_model_name_or_path.0.len();
    for (key, count) in [
        ("controlnet_image", config.controlnet_image.0.len()),
        (
            "controlnet_conditioning_scale",
            config.controlnet_conditioning_scale.0.len(),
        ),
        ("controlnet_canny", config.controlnet_canny.0.len()),
        (
            "control_guidance_start",
            config.control_guidance_start.0.len(),
        ),
        ("control_guidance_end", config.control_guidance_end.0.len()),
        ("control_mode", config.control_mode.0.len()),
    ] {
        if config.use_controlnet && ![1, nets].contains(&count) {
            found.push((
                vec![key, "controlnet_model_name_or_path"],
                format!("{key} has {count} entries for {nets} ControlNets: give one for all, or one for each"),
            ));
        }
    }
    if verb.is_none_or(|v| v == Verb::Generate)
        && !config.lightning_repo.is_empty()
        && config.lightning_ckpt.is_empty()
    {
        found.push((
            vec!["lightning_ckpt", "lightning_repo"],
            "lightning_repo needs lightning_ckpt, a file of it such as sdxl_lightning_4step_unet.safetensors".into(),
        ));
    }
    if !config.refiner_model_name_or_path.is_empty() && !config.mask_image.is_empty() {
        found.push((
            vec!["mask_image", "refiner_model_name_or_path"],
            "a refiner does not see the mask and would change the parts that it keeps: inpaint first, then refine the image with \
             refiner_xl.yml and image=FILE"
                .into(),
        ));
    }
    if !config.ip_adapter_path.is_empty() && config.ip_adapter_image.is_empty() {
        found.push((
            vec!["ip_adapter_image", "ip_adapter_path"],
            "an IP-Adapter needs ip_adapter_image=FILE, what it shows the model".into(),
        ));
    }
    if config.input_images().iter().any(String::is_empty) {
        found.push((
            vec!["image"],
            "one of the images has no name: give a file for each".into(),
        ));
    }
    if let Some(scale) = config.hires_scale {
        let hires = |key: &'static str, message: String| (vec!["hires_scale", key], message);
        if !config.input_images().is_empty() {
            found.push(hires(
                "image",
                format!(
                    "hires_scale={scale} draws an image from a text and then again, larger; to enlarge image={} give the larger \
                     height and width, and a strength",
                    config.image.0.join(", ")
                ),
            ));
        }
        if !config.refiner_model_name_or_path.is_empty() {
            found.push(hires(
                "refiner_model_name_or_path",
                format!(
                    "hires_scale={scale} does not work with a refiner: enlarge first, then refine the image with refiner_xl.yml \
                     and image=FILE"
                ),
            ));
        }
    }
    if verb == Some(Verb::Generate)
        && config.held_out_prompts == 0
        && config.prompts_file.is_empty()
        && config.prompt.0.is_empty()
    {
        found.push((
            vec!["prompt"],
            "there is no prompt: give prompt='...' or a list of prompts".into(),
        ));
    }
    found
}

fn mesh(config: &Config, found: &mut Vec<Conflict>) {
    let dcn = [
        ("dcn_data_parallelism", config.dcn_data_parallelism),
        ("dcn_fsdp_parallelism", config.dcn_fsdp_parallelism),
        ("dcn_context_parallelism", config.dcn_context_parallelism),
        ("dcn_tensor_parallelism", config.dcn_tensor_parallelism),
    ];
    let ici = [
        ("ici_data_parallelism", config.ici_data_parallelism),
        ("ici_fsdp_parallelism", config.ici_fsdp_parallelism),
        ("ici_context_parallelism", config.ici_context_parallelism),
        ("ici_tensor_parallelism", config.ici_tensor_parallelism),
    ];
    for (group, what) in [(dcn, "dcn_*"), (ici, "ici_*")] {
        let auto: Vec<_> = group
            .iter()
            .filter(|(_, v)| *v == -1)
            .map(|(k, _)| *k)
            .collect();
        if auto.len() > 1 {
            found.push((
                auto,
                format!("more than one -1 among {what}_parallelism: only one axis can take what the others leave"),
            ));
        }
    }
    let axes = &config.mesh_axes.0;
    let mut rest = Axis::ALL.iter();
    // In order, with the missing ones left out: MaxDiffusion's older files have no `context`.
    let ordered = axes.iter().all(|a| rest.any(|m| m == a));
    if !ordered {
        found.push((
            vec!["mesh_axes"],
            "the axes are data, fsdp, context, tensor, each at most once and in this order".into(),
        ));
    }
    for (axis, (dcn, dcn_n), (ici, ici_n)) in [
        (Axis::Data, dcn[0], ici[0]),
        (Axis::Fsdp, dcn[1], ici[1]),
        (Axis::Context, dcn[2], ici[2]),
        (Axis::Tensor, dcn[3], ici[3]),
    ] {
        for (key, n) in [(dcn, dcn_n), (ici, ici_n)] {
            if n != 1 && !axes.contains(&axis) {
                found.push((
                    vec![key, "mesh_axes"],
                    format!("{key} is {n} and mesh_axes has no {axis}"),
                ));
            }
        }
    }
    // Files without `context` still name it in no rule, so an axis that is named has to be there.
    let missing = |a: &Axis| !axes.contains(a);
    for rule in &config.logical_axis_rules.0 {
        if let Some(axis) = rule.mesh.iter().find(|a| missing(a)) {
            found.push((
                vec!["logical_axis_rules", "mesh_axes"],
                format!(
                    "the rule for {} names {axis}, which is not in mesh_axes",
                    rule.logical
                ),
            ));
        }
        if twice(&rule.mesh) {
            found.push((
                vec!["logical_axis_rules"],
                format!("the rule for {} names a mesh axis twice", rule.logical),
            ));
        }
    }
    let sharding: Vec<Axis> = config.data_sharding.0.concat();
    if twice(&sharding) {
        found.push((
            vec!["data_sharding"],
            "a mesh axis is named twice: it can split one dimension only".into(),
        ));
    }
}

fn twice(axes: &[Axis]) -> bool {
    axes.iter().enumerate().any(|(i, a)| axes[..i].contains(a))
}

fn training(config: &Config, found: &mut Vec<Conflict>) {
    let is_dreambooth = !config.instance_data_dir.is_empty();
    match config.dataset_type {
        _ if is_dreambooth => dreambooth(config, found),
        DatasetType::Shapes => {}
        own @ (DatasetType::Folder
        | DatasetType::Webdataset
        | DatasetType::Hf
        | DatasetType::Tfrecord) => folders(config, own, found),
        other @ (DatasetType::Tf | DatasetType::Grain | DatasetType::Synthetic) => found.push((
            vec!["dataset_type"],
            format!(
                "{other} is a dataset type of MaxDiffusion that is not here yet; supported: shapes, folder, webdataset, hf, tfrecord"
            ),
        )),
    }
    let rates = [
        config.text_encoder_learning_rate,
        config
            .text_encoder_2_learning_rate
            .unwrap_or(config.text_encoder_learning_rate),
    ];
    if config.optimizer_type == OptimizerType::Prodigy
        && config.train_text_encoder
        && !config.train_new_unet
        && rates != [config.learning_rate; 2]
    {
        found.push((
            vec!["text_encoder_learning_rate", "optimizer_type"],
            format!(
                "Prodigy finds one learning rate for all weights: give the text encoders learning_rate, {}",
                config.learning_rate
            ),
        ));
    }
    if !config.placeholder_token.is_empty() && config.initializer_token.is_empty() {
        found.push((
            vec!["placeholder_token", "initializer_token"],
            format!(
                "{} needs a word that it starts from: give initializer_token, such as the class of what it names",
                config.placeholder_token
            ),
        ));
    }
    if config.optimizer_type == OptimizerType::Prodigy
        && config
            .token_learning_rate
            .is_some_and(|rate| rate != config.learning_rate)
    {
        found.push((
            vec!["token_learning_rate", "optimizer_type"],
            "Prodigy finds one learning rate for all weights: leave token_learning_rate out".into(),
        ));
    }
    if config.unet_config.0 != ModelConfig::Unset
        && !config.train_new_unet
        && !Path::new(&config.pretrained_model_name_or_path).is_dir()
    {
        found.push((
            vec!["unet_config", "train_new_unet"],
            "unet_config gives an architecture of your own: set train_new_unet=True to start from random weights, name the folder of \
             a run with that architecture by pretrained_model_name_or_path, or leave unet_config out"
                .into(),
        ));
    }
}

/// The folders of pictures.
fn folders(config: &Config, own: DatasetType, found: &mut Vec<Conflict>) {
    let is_mixed = !config.train_data_mix.0.is_empty();
    match config.train_data_dir.is_empty() {
        true if !is_mixed && own != DatasetType::Hf => found.push((
            vec!["train_data_dir", "dataset_type"],
            format!("dataset_type={own} needs train_data_dir, or several folders in train_data_mix"),
        )),
        false if is_mixed => found.push((
            vec!["train_data_mix", "train_data_dir"],
            "the folders of pictures are given twice: put train_data_dir into train_data_mix, with a weight".into(),
        )),
        _ => {}
    }
    if is_mixed && config.max_train_samples > 0 {
        found.push((
            vec!["train_data_mix", "max_train_samples"],
            "max_train_samples takes the first pictures of one dataset, not of several: leave one of the two out".into(),
        ));
    }
}

/// What is not trained with low-rank factors, and what has no effect on them.
fn low_rank_factors(config: &Config, found: &mut Vec<Conflict>) {
    if !config.train_low_rank {
        return;
    }
    for (key, is_given) in [
        ("lora_rank", config.lora_rank > 0),
        ("placeholder_token", !config.placeholder_token.is_empty()),
        ("train_text_encoder", config.train_text_encoder),
    ] {
        if is_given {
            found.push((
                vec![key, "train_low_rank"],
                format!(
                    "train_low_rank=True trains the low-rank factors of the denoiser and nothing else: leave {key} out"
                ),
            ));
        }
    }
    if config.stochastic_rounding {
        found.push((
            vec!["stochastic_rounding", "train_low_rank"],
            "low-rank factors are trained in float32, where nothing is rounded at random: leave stochastic_rounding out".into(),
        ));
    }
}

/// Masks in a folder need the folder, and pictures that have names.
fn masks(config: &Config, found: &mut Vec<Conflict>) {
    if config.masked_loss != MaskedLoss::Folder {
        return;
    }
    if config.conditioning_data_dir.is_empty() {
        found.push((
            vec!["masked_loss", "conditioning_data_dir"],
            "masked_loss=folder needs the folder of the masks: give conditioning_data_dir".into(),
        ));
    }
    if !config.train_data_mix.0.is_empty() {
        found.push((
            vec!["masked_loss", "train_data_mix"],
            "masked_loss=folder finds masks by the names of the pictures' files, which several folders may share: put the masks \
             into the pictures' alpha channels and set masked_loss=alpha"
                .into(),
        ));
    }
    if config.instance_data_dir.is_empty() && config.dataset_type != DatasetType::Folder {
        found.push((
            vec!["masked_loss", "dataset_type"],
            format!(
                "masked_loss=folder finds masks by the names of the pictures' files, which dataset_type={} does not have: put the \
                 masks into the pictures' alpha channels and set masked_loss=alpha",
                config.dataset_type
            ),
        ));
    }
}

fn dreambooth(config: &Config, found: &mut Vec<Conflict>) {
    if !config.train_data_mix.0.is_empty() {
        found.push((
            vec!["instance_data_dir", "train_data_mix"],
            "DreamBooth has one folder of pictures: give one of the two".into(),
        ));
    }
    if !config.train_data_dir.is_empty() {
        found.push((
            vec!["instance_data_dir", "train_data_dir"],
            "two folders of pictures: give one of the two".into(),
        ));
    }
    if !config.with_prior_preservation {
        return;
    }
    if config.class_prompt.is_empty() {
        found.push((
            vec!["with_prior_preservation", "class_prompt"],
            "prior preservation without class prompt: say what the class is, as in class_prompt='a photo of a dog'".into(),
        ));
    }
    if config.enable_bucket {
        found.push((
            vec!["with_prior_preservation", "enable_bucket"],
            "class pictures are squares, and a batch has pictures of one size: leave one of the two out".into(),
        ));
    }
}

/// Where the meaning differs from MaxDiffusion's in a way that a reader of its files must know.
pub(super) fn remarks(config: &Config, verb: Option<Verb>) -> Vec<String> {
    let mut remarks = Vec::new();
    if verb.is_none_or(|v| v == Verb::Train)
        && config.checkpoint_every > 0
        && config.unet_config.0 == ModelConfig::Unset
        && config
            .pretrained_model_name_or_path
            .contains("stable-diffusion-xl")
    {
        remarks.push(format!(
            "checkpoint_every: {} counts steps; MaxDiffusion counts examples for SDXL",
            config.checkpoint_every
        ));
    }
    remarks
}

/// Values that follow from a configuration and the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Derived {
    /// Devices in all slices together.
    pub num_devices: u64,
    pub num_slices: u64,
    /// Examples of one step over all devices: `per_device_batch_size` times devices.
    pub total_train_batch_size: u64,
    /// Parts of the batch contraction of the weight gradient; 0 leaves it in float.
    pub quantization_local_shard_count: u64,
}

/// Whether a batch can be split for range finding.
///
/// # Errors
/// `count` is not 0 and does not divide `global_batch`.
pub fn check_local_shard_count(global_batch: u64, count: u64) -> Result<(), ConfigErrors> {
    if count == 0 || global_batch.is_multiple_of(count) {
        return Ok(());
    }
    Err(conflict(
        &["quantization_local_shard_count", "per_device_batch_size"],
        format!(
            "{count} parts do not divide the batch of {global_batch}: take a divisor of the batch, or 0 for a weight gradient in float"
        ),
    ))
}

fn conflict(keys: &[&str], message: String) -> ConfigErrors {
    ConfigErrors::from(ConfigError {
        key: keys.join(", "),
        place: Place::Default,
        problem: Problem::Conflict {
            keys: keys.iter().map(|k| (*k).to_owned()).collect(),
            message,
        },
    })
}

impl Calibration {
    /// Whether prompts ask for a calibration.
    pub fn is_asked(&self) -> bool {
        !self.prompts.0.is_empty() || !self.prompts_file.is_empty()
    }
}

impl Config {
    /// Batch sizes and shard count for `num_devices` devices in `num_slices` slices.
    ///
    /// # Errors
    /// `per_device_batch_size` times devices is not a whole number above 0.
    pub fn derived(&self, num_devices: u64, num_slices: u64) -> Result<Derived, ConfigErrors> {
        let total = self.per_device_batch_size * num_devices as f64;
        let whole = total.round();
        // 0.1 * 30 is not exactly 3 in binary.
        if whole < 1.0 || (total - whole).abs() > 1e-6 || whole > 1e15 {
            return Err(conflict(
                &["per_device_batch_size"],
                format!(
                    "{} for each of {num_devices} devices makes a batch of {total}: it has to be a whole number above 0",
                    self.per_device_batch_size
                ),
            ));
        }
        Ok(Derived {
            num_devices,
            num_slices,
            total_train_batch_size: whole as u64,
            quantization_local_shard_count: u64::try_from(self.quantization_local_shard_count)
                .unwrap_or(num_slices),
        })
    }

    /// The files of the images to start from; none where there is no `image`.
    pub fn input_images(&self) -> &[String] {
        match self.image.0.as_slice() {
            [none] if none.is_empty() => &[],
            given => given,
        }
    }

    /// Folder of the run: `output_dir`, and in it `run_name` if there is one.
    pub fn run_dir(&self) -> PathBuf {
        Path::new(&self.output_dir).join(&self.run_name)
    }

    /// Folder of the checkpoints.
    pub fn checkpoint_folder(&self) -> PathBuf {
        if self.checkpoint_dir.is_empty() {
            self.run_dir().join("checkpoints")
        } else {
            PathBuf::from(&self.checkpoint_dir)
        }
    }

    /// The sampler; DDIM when neither `scheduler` nor `diffusion_scheduler_config` says.
    pub fn sampler(&self) -> SchedulerKind {
        self.scheduler.unwrap_or(SchedulerKind::Ddim)
    }

    /// What the UNet predicts. The default is that of the known model, otherwise epsilon.
    pub fn prediction(&self) -> PredictionType {
        self.prediction_type
            .or_else(|| match self.unet_config.0 {
                ModelConfig::Unset => builtin_prediction(&self.pretrained_model_name_or_path),
                ModelConfig::Path(_) | ModelConfig::Inline(_) => None,
            })
            .unwrap_or(PredictionType::Epsilon)
    }

    /// Which timesteps the sampler visits; by default leading.
    pub fn timestep_spacing(&self) -> TimestepSpacing {
        self.diffusion_scheduler_config
            .timestep_spacing
            .unwrap_or(TimestepSpacing::Leading)
    }
}
