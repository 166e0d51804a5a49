//! The programs that `compile` and `lower` make of a configuration alone.

use clap::ValueEnum;

use crate::aot::{self, Compiler};
use crate::backend::{Backend, cpu, tpu::Features};
use crate::config::{Config, Hardware, check_local_shard_count};
use crate::lowering::Traced;
use crate::models::DiffusionModel;
use crate::nn::Remat;
use crate::pipelines::text_to_image::{DenoiseOptions, trace_denoise};
use crate::pjrt::install::{self, TryLoad};
use crate::pjrt::prepare_process;
use crate::shard::{DeviceDescription, Mesh};
use crate::train;
use crate::train::step::{self, StepOptions};

use super::{
    Notice, Notify, RecipeError, check_formats, check_low_rank, check_trainable, compile_topology,
    data, described_policy, guidance, mode_name, model, open_session, parallelism, skip_layers,
    step_options, stored_policy,
};

/// Which program of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// Loss, gradient and optimizer
    Train,
    /// One denoising step
    Denoise,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Step::Train => "train",
            Step::Denoise => "denoise",
        }
    }
}

/// Traces a program for the devices of `mesh`.
///
/// # Errors
/// When the configuration does not fit together.
pub fn trace(config: &Config, step: Step, mesh: &Mesh) -> Result<Traced, RecipeError> {
    match step {
        Step::Train => {
            let (model, options) = training_step(config, mesh)?;
            step::trace(&model, &options).map_err(RecipeError::usage)
        }
        Step::Denoise => {
            let derived = config.derived(mesh.num_devices() as u64, mesh.num_slices() as u64)?;
            // The text encoder, and with it the vocabulary, is not part of this program.
            let model = model(config, None)?;
            let options = DenoiseOptions {
                batch: derived.total_train_batch_size as usize,
                tokens: model.tokens,
                guidance: guidance(config, model.family),
                skip_layers: skip_layers(config, &model)?,
                quantization: described_policy(config, model.family.spec())?,
            };
            let traced = trace_denoise(&model, &options).map_err(RecipeError::usage)?;
            Ok(traced.model)
        }
    }
}

/// Operations of the training step over all devices ([`train::model_flops`]).
///
/// # Errors
/// As [`trace`].
pub fn model_flops(config: &Config, mesh: &Mesh) -> Result<u64, RecipeError> {
    let (model, options) = training_step(config, mesh)?;
    train::model_flops(model, &options).map_err(RecipeError::usage)
}

/// The model and the options that the training step is traced with.
fn training_step(
    config: &Config,
    mesh: &Mesh,
) -> Result<(DiffusionModel, StepOptions), RecipeError> {
    let derived = config.derived(mesh.num_devices() as u64, mesh.num_slices() as u64)?;
    let batch = derived.total_train_batch_size;
    let shards = derived.quantization_local_shard_count;
    check_local_shard_count(batch, shards)?;
    let tokenizer = data::tokenizer_for_vocab_size(config)?;
    let model = model(config, tokenizer.as_ref())?;
    check_trainable(config, &model, &config.pretrained_model_name_or_path)?;
    let mut options = step_options(config, &model, batch as usize, shards as usize)?;
    if let Some(policy) = described_policy(config, model.family.spec())?
        && !policy.stored.is_empty()
    {
        options.quantization = Some(stored_policy(config, policy)?);
    }
    check_low_rank(
        config,
        options.quantization.as_ref(),
        &config.pretrained_model_name_or_path,
    )?;
    Ok((model, options))
}

/// The mesh and the backend that programs are lowered for without asking any device: those of `compile_topology`, or of
/// one device of the `hardware` that the configuration names.
///
/// # Errors
/// When there is no such topology, or another key contradicts it.
pub fn lowering_target(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<(Mesh, Backend), RecipeError> {
    let topology = compile_topology(config, notify)?;
    let (devices_per_slice, slices) = match &topology {
        None => (1, 1),
        Some((accelerator, slices)) => (accelerator.devices_per_slice as i64, *slices),
    };
    // The text names mesh axes, not devices: where a device lies in its slice is for the compiler to know.
    let devices = DeviceDescription::numbered(devices_per_slice, slices);
    let mesh = Mesh::new(&parallelism(config), &devices).map_err(RecipeError::usage)?;
    let backend = match (topology, config.hardware) {
        (Some((accelerator, _)), _) => accelerator.backend(),
        (None, Hardware::Cpu) => Backend::Cpu {
            kernels: cpu::missing_features().is_empty() && mesh.num_devices() == 1,
        },
        (None, Hardware::Tpu) => Backend::Tpu {
            kernels: mesh.num_devices() == 1,
            features: Features::UNKNOWN,
        },
        (None, hardware @ (Hardware::Gpu | Hardware::Auto)) => Backend::Gpu {
            features: None,
            kernels: hardware == Hardware::Gpu,
        },
    };
    Ok((mesh, backend))
}

/// The compiler for `compile_topology`, or for the devices here that `hardware` asks for. `try_load` is for a plugin
/// that has not been loaded here ([`install::locate_checked`]).
///
/// # Errors
/// When the configuration does not fit the devices, or the plugin is missing.
pub fn compiler(
    config: &Config,
    try_load: &TryLoad<'_>,
    notify: &mut Notify<'_>,
) -> Result<Compiler, RecipeError> {
    if let Some((accelerator, slices)) = compile_topology(config, notify)? {
        install::locate_checked(accelerator.platform.plugin(), try_load)
            .map_err(RecipeError::failed)?;
        let rules = config.logical_axis_rules.clone();
        return Ok(Compiler::for_topology(
            accelerator,
            slices,
            &parallelism(config),
            rules,
        )?);
    }
    prepare_process().map_err(RecipeError::failed)?;
    let opened = open_session(config, try_load, notify)?;
    notify(Notice::Progress(&format!("devices: {}", opened.chosen)));
    let compiler = Compiler::for_session(&opened.session)?;
    if let Some(chip) = compiler.chip() {
        check_formats(config, chip, notify)?;
    }
    Ok(compiler)
}

/// What the program `step`, which was traced, is compiled with.
pub fn compile_options(config: &Config, step: Step, traced: &Traced) -> aot::Options {
    aot::Options {
        step: step.name(),
        precision: config.precision,
        weights_dtype: config.weights_dtype.name(),
        activations_dtype: config.activations_dtype.name(),
        quantization: mode_name(&traced.decisions),
        memory_advice: memory_advice(config, step),
    }
}

/// What makes the program `step` smaller, for messages.
pub fn memory_advice(config: &Config, step: Step) -> Vec<String> {
    let mut advice = Vec::new();
    if step == Step::Train && config.remat_policy != Remat::Full {
        advice.push("recomputing activations with remat_policy=FULL".to_owned());
    }
    if config.weights_dtype.name() == "float32" {
        advice.push("weights_dtype=bfloat16".to_owned());
    }
    if config.per_device_batch_size > 1.0 {
        advice.push(format!(
            "a per_device_batch_size below {}",
            config.per_device_batch_size
        ));
    }
    advice.push("a larger topology, or a chip with more memory".to_owned());
    advice
}
