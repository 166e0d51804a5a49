//! From a configuration to what the library takes: model, session, policies.

use std::path::Path;

use crate::config::{self, Config, Hardware};
use crate::data::Tokenizer;
use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::graph::{Graph, InputKind, NumericsConvention};
use crate::models::clip::ClipTextConfig;
use crate::models::unet::{ROOT, UNet2DConditionConfig};
use crate::models::{DiffusionModel, HiddenState, MicroConditioning, TEXT_ENCODER, TextEncoder};
use crate::nn::{Precision, Remat};
use crate::pipelines::pixels::RGB;
use crate::pipelines::text_to_image::Guidance;
use crate::pjrt::install::{self, InstallError, Installed, PluginKind};
use crate::pjrt::{NamedValue, Plugin, has_tpu};
use crate::quant::{Action, Decision, Policy, Rule};
use crate::runtime::{ExecutableCache, RuntimeError, Session};
use crate::shard::{LogicalAxisRule, LogicalAxisRules, Mesh, MeshAxes, Parallelism, ShardPlan};
use crate::topology::{Accelerator, Chip, Format, Platform};
use crate::train::checkpoint::{Check, SavedCheckpoint, latest};
use crate::train::optimizer::OptimizerOptions;
use crate::train::step::{LossWeighting, StepOptions, Timesteps};

use super::CliError;
use super::sampler::{sampling_plan, scheduler};

/// Tokens of a prompt where no text encoder says otherwise: CLIP's.
pub const CLIP_TOKENS: usize = 77;

fn float(ty: config::FloatType) -> DType {
    match ty {
        config::FloatType::Float32 => DType::F32,
        config::FloatType::Bfloat16 => DType::BF16,
    }
}

/// Element types of weights and activations.
pub fn precision(config: &Config) -> Precision {
    Precision {
        weights: float(config.weights_dtype),
        activations: float(config.activations_dtype),
    }
}

/// What float contractions ask of the compiler.
pub fn dot_precision(config: &Config) -> DotPrecision {
    match config.precision {
        config::Precision::Default => DotPrecision::Default,
        config::Precision::High => DotPrecision::High,
        config::Precision::Highest => DotPrecision::Highest,
    }
}

/// What SDXL's time ids say after size and crop.
pub fn micro_conditioning(config: &Config, requires_aesthetics_score: bool) -> MicroConditioning {
    match requires_aesthetics_score {
        true => MicroConditioning::AestheticScore {
            score: config.aesthetic_score as f32,
            negative: config.negative_aesthetic_score as f32,
        },
        false => MicroConditioning::TargetSize,
    }
}

/// The UNet as configured.
pub fn unet(config: &Config) -> Result<UNet2DConditionConfig, CliError> {
    UNet2DConditionConfig::from_map(config.unet_config_json()?).map_err(CliError::usage)
}

/// The whole model. A text encoder that does not state `vocab_size` or `eos_token_id` takes the tokenizer's.
pub fn model(config: &Config, tokenizer: Option<&Tokenizer>) -> Result<DiffusionModel, CliError> {
    let unet = unet(config)?;
    let text_encoder = match config.text_encoder_config_json()? {
        None => None,
        Some(mut fields) => {
            if let Some(tokenizer) = tokenizer {
                let mut or_insert = |field: &str, value: serde_json::Value| {
                    fields.entry(field).or_insert(value);
                };
                or_insert("vocab_size", tokenizer.vocabulary_size().into());
                or_insert("eos_token_id", tokenizer.end_id().into());
            }
            let text = ClipTextConfig::from_map(fields).map_err(CliError::usage)?;
            Some(text)
        }
    };
    if let (Some(text), Some(tokenizer)) = (&text_encoder, tokenizer) {
        check_tokenizer(text, tokenizer)?;
    }
    let side = config.sample_size(unet.in_channels as u64)? as usize;
    Ok(DiffusionModel {
        tokens: text_encoder
            .as_ref()
            .map_or(CLIP_TOKENS, |t| t.max_position_embeddings),
        unet,
        text_encoders: text_encoder
            .map(|config| TextEncoder {
                root: TEXT_ENCODER,
                config,
                hidden: HiddenState::Normed { skip: 0 },
            })
            .into_iter()
            .collect(),
        vae: None,
        controlnets: Vec::new(),
        precision: precision(config),
        remat: match config.remat_policy {
            config::RematPolicy::None => Remat::None,
            config::RematPolicy::Full => Remat::Full,
        },
        scheduler: scheduler(config)?,
        sample_size: [side, side],
        image_size: [config.resolution as usize; 2],
        micro_conditioning: micro_conditioning(
            config,
            config.model_family == config::ModelFamily::SdxlRefiner,
        ),
        decode_tile: None,
    })
}

/// Everything that is wrong with a configuration for the verb and can be told without data, devices or plugins.
///
/// # Errors
/// The first of it: what the keys make together is looked at one after the other.
pub fn check(config: &Config, verb: Option<config::Verb>) -> Result<(), CliError> {
    use config::Verb::{Compile, Generate, Lower, Train};
    let model = model(config, None)?;
    policy(config, 0)?;
    axis_rules(config)?;
    if verb.is_none_or(|v| [Compile, Lower].contains(&v)) {
        compile_topology(config)?;
    }
    if verb.is_some_and(|v| [Train, Generate].contains(&v)) {
        check_pixels(config, &model)?;
        sampling_plan(
            config,
            &model.scheduler,
            config.num_inference_steps as usize,
        )?;
    }
    if verb == Some(Train) {
        check_training(config, &model)?;
    }
    Ok(())
}

/// Refuses to train what cannot be trained yet.
///
/// # Errors
/// Says what is missing.
pub fn check_training(config: &Config, model: &DiffusionModel) -> Result<(), CliError> {
    if !config.train_new_unet {
        return Err(CliError::Usage(
            "train_new_unet=False: starting from the weights of pretrained_model_name_or_path is not here yet; set \
             train_new_unet=True to train from scratch"
                .to_string(),
        ));
    }
    if model.text_encoders.is_empty() || !config.train_text_encoder {
        return Err(CliError::Usage(
            "training works on prompts: give text_encoder_config and train_text_encoder=True (training on cached \
             text embeddings is not here yet)"
                .to_string(),
        ));
    }
    check_pixels(config, model)
}

/// Token ids beyond the embedding's rows would be read as its last row, and a wrong end token pools a wrong place: both
/// train, and mean nothing.
pub fn check_tokenizer(text: &ClipTextConfig, tokenizer: &Tokenizer) -> Result<(), CliError> {
    let tokens = tokenizer.vocabulary_size();
    if text.vocab_size < tokens {
        return Err(CliError::Usage(format!(
            "text_encoder_config.vocab_size={}, but the tokenizer has {tokens} tokens: leave vocab_size out, or give at \
             least that many",
            text.vocab_size
        )));
    }
    // Checkpoints of CLIP state 2 and mean the highest id (`clip_text` says how).
    if ![tokenizer.end_id(), 2].contains(&text.eos_token_id) {
        return Err(CliError::Usage(format!(
            "text_encoder_config.eos_token_id={}, but the tokenizer ends a text with {}: leave eos_token_id out",
            text.eos_token_id,
            tokenizer.end_id()
        )));
    }
    Ok(())
}

/// Refuses a UNet that does not work on the pixels of RGB pictures, which is what there is to train on and to draw.
///
/// # Errors
/// Names the channels.
pub fn check_pixels(config: &Config, model: &DiffusionModel) -> Result<(), CliError> {
    let k = config.pixel_unshuffle as usize;
    let unet = &model.unet;
    let expected = RGB * k * k;
    if (unet.in_channels, unet.out_channels) == (expected, expected) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "unet_config: in_channels={} and out_channels={}, but RGB pictures with pixel_unshuffle={k} have {expected}; models \
         of latents need a VAE, which is not here yet",
        unet.in_channels, unet.out_channels
    )))
}

/// The quantization policy for the UNet, or `None` when quantization is off.
///
/// `local_shards` is the number of parts of range finding in weight gradients.
pub fn policy(config: &Config, local_shards: usize) -> Result<Option<Policy>, CliError> {
    if config.quantization == config::Quantization::Off {
        return Ok(None);
    }
    let root = format!("{ROOT}/");
    let mut rules = Vec::new();
    for rule in &config.quant_rules.0 {
        let action = match rule.dtype {
            config::QuantRuleType::None => Action::Float,
            config::QuantRuleType::Int8 => Action::Int8,
        };
        rules.push(Rule::new(&rule.path, action, true).map_err(CliError::usage)?);
    }
    let policy = if config.use_qwix_quantization {
        let mut policy = Policy::qwix_int8(&root, ".*").map_err(CliError::usage)?;
        rules.append(&mut policy.rules);
        policy.rules = rules;
        policy
    } else {
        Policy::aqt_int8(&root, local_shards, rules).map_err(CliError::usage)?
    };
    Ok(Some(policy))
}

/// One line that says what quantization does.
pub fn quantization_summary(policy: &Policy, decisions: &[Decision]) -> String {
    let quantized = decisions.iter().filter(|d| d.quantized).count();
    let convention = match policy.convention {
        NumericsConvention::Aqt => "AQT",
        NumericsConvention::Qwix => "Qwix",
    };
    format!(
        "int8 ({convention} numerics): {quantized} of {} dots and convolutions of {}",
        decisions.len(),
        policy.model.trim_end_matches('/')
    )
}

/// The accelerator that `compile_topology` names, and the number of its slices; `None` for the devices here.
///
/// # Errors
/// When there is no such topology, or another key contradicts it.
pub fn compile_topology(config: &Config) -> Result<Option<(Accelerator, i64)>, CliError> {
    let name = &config.compile_topology;
    let slices = config.compile_topology_num_slices;
    if name.is_empty() {
        return match slices {
            -1 => Ok(None),
            given => Err(CliError::Usage(format!(
                "compile_topology_num_slices={given} has no effect without compile_topology"
            ))),
        };
    }
    let accelerator = Accelerator::lookup(name).map_err(CliError::usage)?;
    let fits = match accelerator.platform {
        Platform::Tpu => matches!(config.hardware, Hardware::Auto | Hardware::Tpu),
        Platform::Gpu => matches!(config.hardware, Hardware::Auto | Hardware::Gpu),
    };
    if !fits {
        return Err(CliError::Usage(format!(
            "hardware={} contradicts compile_topology={name}: leave hardware=auto, or leave compile_topology out",
            config.hardware.name()
        )));
    }
    if config.num_devices > 0 {
        return Err(CliError::Usage(format!(
            "num_devices={} has no effect with compile_topology={name}: the topology says how many devices there are",
            config.num_devices
        )));
    }
    let slices = if slices == -1 { 1 } else { slices };
    accelerator.check_slices(slices).map_err(CliError::usage)?;
    check_formats(config, accelerator.chip)?;
    Ok(Some((accelerator, slices)))
}

/// Refuses a quantization the chip has no units for, and tells of one that gains no time there.
///
/// # Errors
/// Names the format and the chip.
pub fn check_formats(config: &Config, chip: Chip) -> Result<(), CliError> {
    match config.quantization {
        config::Quantization::Off => Ok(()),
        config::Quantization::Int8 => {
            let speedup = chip
                .speedup(Format::Int8)
                .map_err(|e| CliError::Usage(format!("quantization=int8: {e}")))?;
            if speedup <= 1.0 {
                super::tell(&format!(
                    "warning: quantization=int8 saves memory but no time on {chip}: int8 runs at the rate of bf16 there"
                ));
            }
            Ok(())
        }
    }
}

/// The `dcn_*` and `ici_*` keys.
pub fn parallelism(config: &Config) -> Parallelism {
    Parallelism {
        dcn: [
            config.dcn_data_parallelism,
            config.dcn_fsdp_parallelism,
            config.dcn_context_parallelism,
            config.dcn_tensor_parallelism,
        ],
        ici: [
            config.ici_data_parallelism,
            config.ici_fsdp_parallelism,
            config.ici_context_parallelism,
            config.ici_tensor_parallelism,
        ],
        allow_split_physical_axes: config.allow_split_physical_axes,
    }
}

/// Refuses a batch that does not divide: it would be computed whole on every device, an error and not a slow program.
///
/// # Errors
/// Names the batch and the devices that share it.
pub fn check_batch(graph: &Graph, plan: &ShardPlan, mesh: &Mesh) -> Result<(), CliError> {
    let data = |name: &str| {
        graph
            .inputs
            .iter()
            .any(|input| input.name == name && matches!(input.kind, InputKind::Data))
    };
    let devices = mesh.num_devices();
    match plan
        .unsharded
        .iter()
        .find(|note| note.dim == 0 && data(&note.path))
    {
        None => Ok(()),
        Some(note) => Err(CliError::Usage(format!(
            "per_device_batch_size: the batch of {} does not divide by {} ({}) on {devices} devices",
            note.size, note.product, note.axes
        ))),
    }
}

/// The logical axis rules.
pub fn axis_rules(config: &Config) -> Result<LogicalAxisRules, CliError> {
    let rules: Vec<LogicalAxisRule> = config
        .logical_axis_rules
        .0
        .iter()
        .map(|rule| {
            let mesh = rule.mesh.iter().map(|a| a.name().to_string()).collect();
            LogicalAxisRule(rule.logical.clone(), Some(MeshAxes::Many(mesh)))
        })
        .collect();
    LogicalAxisRules::try_from(rules).map_err(CliError::usage)
}

/// The newest whole checkpoint of the run. Damaged ones are passed over, and told of.
///
/// # Errors
/// When the folder cannot be read.
pub fn newest_checkpoint(config: &Config) -> Result<Option<SavedCheckpoint>, CliError> {
    let found = latest(&config.checkpoint_folder(), Check::Hashes).map_err(CliError::failed)?;
    for skipped in &found.skipped {
        super::tell(&format!(
            "passed over {}: {}",
            skipped.path.display(),
            skipped.reason
        ));
    }
    Ok(found.checkpoint)
}

/// A session and what to tell the user of it.
pub struct Opened {
    pub session: Session,
    /// Which hardware was taken, and why.
    pub chosen: String,
}

/// Opens the devices that `hardware` asks for. `auto` takes a TPU if there is one, then a GPU, then the CPU, and says
/// which and why; hardware without its plugin is passed over with a warning. A named kind is taken or is an error.
///
/// # Errors
/// When the plugin is not installed, finds no device, or the parallelism does not fit the devices.
pub fn open_session(config: &Config) -> Result<Opened, CliError> {
    let named = match config.hardware {
        Hardware::Auto => None,
        Hardware::Cpu => Some(PluginKind::Cpu),
        Hardware::Tpu => Some(PluginKind::Tpu),
        Hardware::Gpu => Some(PluginKind::Cuda),
    };
    let (installed, passed) = match named {
        Some(kind) => (install::locate(kind).map_err(CliError::failed)?, Vec::new()),
        None => choose(has_hardware, install::locate)?,
    };
    for kind in passed.iter().filter_map(Passed::not_installed) {
        super::tell(&format!(
            "warning: this machine has hardware for the {kind} plugin, which is not installed; run \
             `maxdiff-rs plugin install {kind}` to use it"
        ));
    }
    if let Some(stale) = super::plugin::stale(&installed) {
        super::tell(&format!(
            "warning: the {} plugin was {stale}",
            installed.kind
        ));
    }
    let session = open(config, &installed)?;
    let devices = session.devices().len();
    Ok(Opened {
        chosen: format!(
            "{} {} device{}, plugin {} (hardware={}{})",
            devices,
            session.client().platform_name(),
            if devices == 1 { "" } else { "s" },
            installed.version,
            config.hardware.name(),
            reasons(&passed)
        ),
        session,
    })
}

/// Why `hardware=auto` did not take a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    NoHardware(PluginKind),
    NotInstalled(PluginKind),
}

impl Passed {
    fn not_installed(&self) -> Option<PluginKind> {
        match self {
            Passed::NoHardware(_) => None,
            Passed::NotInstalled(kind) => Some(*kind),
        }
    }
}

/// What `hardware=auto` takes, and what it passes over on the way.
fn choose(
    has_hardware: impl Fn(PluginKind) -> bool,
    locate: impl Fn(PluginKind) -> Result<Installed, InstallError>,
) -> Result<(Installed, Vec<Passed>), CliError> {
    let mut passed = Vec::new();
    for kind in [PluginKind::Tpu, PluginKind::Cuda] {
        if !has_hardware(kind) {
            passed.push(Passed::NoHardware(kind));
            continue;
        }
        match locate(kind) {
            Ok(installed) => return Ok((installed, passed)),
            Err(InstallError::NotInstalled { .. }) => passed.push(Passed::NotInstalled(kind)),
            Err(error) => return Err(CliError::failed(error)),
        }
    }
    let installed = locate(PluginKind::Cpu).map_err(CliError::failed)?;
    Ok((installed, passed))
}

fn reasons(passed: &[Passed]) -> String {
    let mut absent = Vec::new();
    let mut reasons = Vec::new();
    for passed in passed {
        match passed {
            Passed::NoHardware(kind) => absent.push(format!("no {kind}")),
            Passed::NotInstalled(kind) => {
                reasons.push(format!("the {kind} plugin is not installed"));
            }
        }
    }
    if !absent.is_empty() {
        reasons.insert(0, format!("{} in this machine", absent.join(", ")));
    }
    if reasons.is_empty() {
        return String::new();
    }
    format!(": {}", reasons.join("; "))
}

/// Whether this machine has hardware of the plugin's kind, by its device files.
pub fn has_hardware(kind: PluginKind) -> bool {
    match kind {
        PluginKind::Cpu => true,
        PluginKind::Cuda => Path::new("/dev/nvidiactl").exists(),
        PluginKind::Tpu => has_tpu(),
    }
}

fn open(config: &Config, installed: &Installed) -> Result<Session, CliError> {
    let plugin = Plugin::load(&installed.library).map_err(CliError::failed)?;
    let mut options = Vec::new();
    if installed.kind == PluginKind::Cpu {
        let devices = config.num_devices.max(1);
        options.push(("cpu_device_count".to_string(), NamedValue::Int64(devices)));
    } else if config.num_devices > 0 {
        return Err(CliError::Usage(format!(
            "num_devices={} splits a processor into virtual devices; on {} all devices are used: leave it at -1",
            config.num_devices, installed.kind
        )));
    }
    let session = Session::open(&plugin, &options, &parallelism(config), axis_rules(config)?)
        .map_err(|error| match error {
            // The mesh is the configuration's.
            RuntimeError::Shard(error) => CliError::usage(error),
            error => CliError::failed(error),
        })?;
    let mut session = session.with_cuda_data_dir(installed.cuda_data_dir.clone());
    if let Some(cache) = program_cache(&config.jax_cache_dir)
        && let Err(error) = session.keep_programs(cache)
    {
        super::tell(&format!("warning: {error}; compiled programs are not kept"));
    }
    Ok(session)
}

/// The cache of compiled programs that `jax_cache_dir` names; `None` where there is to be none.
pub fn program_cache(jax_cache_dir: &str) -> Option<ExecutableCache> {
    let dir = match jax_cache_dir {
        "" => return None,
        "auto" => ExecutableCache::default_dir()?,
        // As MaxDiffusion reads paths.
        path => match (path.strip_prefix("~/"), dirs::home_dir()) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => path.into(),
        },
    };
    Some(ExecutableCache::new(dir, ExecutableCache::MAX_BYTES))
}

/// How a denoising step is guided.
pub fn guidance(config: &Config) -> Guidance {
    match (
        config.do_classifier_free_guidance,
        config.guidance_in_two_passes,
    ) {
        (false, _) => Guidance::Off,
        (true, false) => Guidance::OneBatch,
        (true, true) => Guidance::TwoPasses,
    }
}

/// The settings of the update.
pub fn optimizer(config: &Config) -> OptimizerOptions {
    OptimizerOptions {
        adam_b1: config.adam_b1,
        adam_b2: config.adam_b2,
        adam_eps: config.adam_eps,
        adam_weight_decay: config.adam_weight_decay,
        max_grad_value: config
            .opt_enable_grad_clipping
            .then_some(config.max_grad_value),
        max_grad_norm: config
            .opt_enable_grad_global_norm_clipping
            .then_some(config.max_grad_norm),
        ema_decay: (config.ema_decay > 0.0).then_some(config.ema_decay),
    }
}

/// The timesteps that training draws: diffusers' `generate_timestep_weights`.
fn timesteps(config: &Config) -> Timesteps {
    let bias = &config.timestep_bias;
    let steps = config.diffusion_scheduler_config.num_train_timesteps as usize;
    let portion = (bias.portion * steps as f64) as usize;
    let biased = match bias.strategy {
        config::BiasStrategy::None => return Timesteps::Uniform,
        config::BiasStrategy::Earlier => 0..portion,
        config::BiasStrategy::Later => steps - portion..steps,
        config::BiasStrategy::Range => bias.begin as usize..bias.end as usize,
    };
    let weight = |t| match biased.contains(&t) {
        true => bias.multiplier,
        false => 1.0,
    };
    Timesteps::Weighted((0..steps).map(weight).collect())
}

/// How the loss weighs timesteps: `snr_gamma` alone is min-SNR, as in MaxDiffusion.
pub fn loss_weighting(config: &Config) -> LossWeighting {
    let gamma = config.snr_gamma;
    match config.loss_weighting {
        config::LossWeighting::SnrPlusOne => LossWeighting::SnrPlusOne { gamma },
        config::LossWeighting::None if gamma > 0.0 => LossWeighting::MinSnr { gamma },
        config::LossWeighting::None => LossWeighting::None,
    }
}

/// The training step for `batch` samples over all devices.
pub fn step_options(
    config: &Config,
    batch: usize,
    local_shards: usize,
) -> Result<StepOptions, CliError> {
    Ok(StepOptions {
        batch,
        optimizer: optimizer(config),
        timesteps: timesteps(config),
        loss_weighting: loss_weighting(config),
        train_text_encoder: config.train_text_encoder,
        quantization: policy(config, local_shards)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BiasStrategy;

    #[test]
    fn timesteps_are_biased_as_asked() {
        let mut config = Config::default();
        assert_eq!(timesteps(&config), Timesteps::Uniform);
        config.diffusion_scheduler_config.num_train_timesteps = 8;
        config.timestep_bias.multiplier = 3.0;
        config.timestep_bias.begin = 2;
        config.timestep_bias.end = 4;
        for (strategy, biased) in [
            (BiasStrategy::Earlier, 0..2),
            (BiasStrategy::Later, 6..8),
            (BiasStrategy::Range, 2..4),
        ] {
            config.timestep_bias.strategy = strategy;
            let mut expected = vec![1.0; 8];
            expected[biased].fill(3.0);
            assert_eq!(timesteps(&config), Timesteps::Weighted(expected));
        }
    }
    #[test]
    fn auto_takes_the_first_hardware_whose_plugin_is_here() {
        use PluginKind::{Cpu, Cuda, Tpu};
        let choose = |hardware: &[PluginKind], plugins: &[PluginKind]| {
            let locate = |kind: PluginKind| {
                let missing = InstallError::NotInstalled {
                    kind,
                    dir: "plugins".into(),
                };
                let installed = Installed {
                    kind,
                    version: "1".to_owned(),
                    library: "p.so".into(),
                    source: String::new(),
                    sha256: String::new(),
                    cuda_data_dir: None,
                    stale: false,
                };
                plugins.contains(&kind).then_some(installed).ok_or(missing)
            };
            let (taken, passed) = choose(|kind| hardware.contains(&kind), locate)?;
            Ok::<_, CliError>((taken.kind, reasons(&passed)))
        };
        let taken = |hardware, plugins| choose(hardware, plugins).unwrap();
        let none = ": no tpu, no cuda13 in this machine";
        assert_eq!(taken(&[], &[Cpu]), (Cpu, none.to_owned()));
        assert_eq!(taken(&[Tpu, Cuda], &[Cpu, Tpu]), (Tpu, String::new()));
        assert_eq!(
            taken(&[Cuda], &[Cpu, Tpu]),
            (
                Cpu,
                ": no tpu in this machine; the cuda13 plugin is not installed".to_owned()
            )
        );
        assert_eq!(
            taken(&[Tpu, Cuda], &[Cpu, Cuda]),
            (Cuda, ": the tpu plugin is not installed".to_owned())
        );
        let error = choose(&[Cuda], &[]).unwrap_err().to_string();
        assert!(error.contains("plugin install cpu"), "{error}");
    }
}
