//! `module run`: the forward pass of one part of a model on saved tensors.
//!
//! Names are diffusers' and transformers', so that the same file of inputs goes through PyTorch and the two results
//! can be compared.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Subcommand};
use serde_json::{Map, Value as Json, json};

use super::doctor::try_load;
use super::{
    CliError, check_new_file, completions, exists, help, notices, print, progress, status, tell,
};
use crate::config::{Config, Loaded, Verb};
use crate::host_tensor::HostTensor;
use crate::pipelines::submodule::Submodule;
use crate::recipe;
use crate::weights::{TensorView, WeightsError, save_new};

/// `module ...`
#[derive(Debug, Args)]
pub struct ModuleArgs {
    #[command(subcommand)]
    command: ModuleCommand,
}

#[derive(Debug, Subcommand)]
enum ModuleCommand {
    /// Run the forward pass of a folder in diffusers' layout on named tensors
    ///
    /// UNet2DConditionModel takes `sample`, `timestep` and `encoder_hidden_states`, for SDXL also `text_embeds` and
    /// `time_ids`, and gives `sample`. FluxTransformer2DModel takes `hidden_states`, `encoder_hidden_states`,
    /// `pooled_projections`, `timestep`, `img_ids`, `txt_ids` and, if it was distilled with it, `guidance`, and gives
    /// `sample`. SD3Transformer2DModel takes `hidden_states`, `encoder_hidden_states`, `pooled_projections` and `timestep`,
    /// PixArtTransformer2DModel `hidden_states`, `encoder_hidden_states`, `encoder_attention_mask`, `timestep` and, if it
    /// takes the size, `resolution` and `aspect_ratio`; both give `sample`. T5EncoderModel takes `input_ids`, and `attention_mask` if there is one, and gives `last_hidden_state`.
    /// CLIPTextModel takes `input_ids` and gives `last_hidden_state` and
    /// `pooler_output`, with a projection also `text_embeds`. AutoencoderKL takes images in [-1, 1] as `x` and gives `mean` and
    /// `logvar` of their latents, or takes unscaled latents as `z` and gives `sample`, or both; AutoencoderTiny gives `latents`
    /// in place of the former. Results are float32.
    #[command(after_long_help = help::MODULE_RUN)]
    Run(RunArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Folder with config.json and safetensors, sharded or not
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Safetensors file of the inputs
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// Safetensors file for the results; an existing one is not replaced
    #[arg(long, value_name = "FILE")]
    outputs: PathBuf,
    /// Run the module so many times; the time of a run is the least
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Keys such as hardware=cpu weights_dtype=bfloat16 quantization=int8
    #[arg(value_name = "KEY=VALUE", add = completions::overrides())]
    overrides: Vec<String>,
    /// Print JSON: parameters, devices, outputs, seconds by phase
    #[arg(long)]
    json: bool,
}

/// Runs `module`.
///
/// # Errors
/// When the configuration, the folder or the inputs do not fit, the program fails, or the output file exists or
/// cannot be written.
pub fn run(args: ModuleArgs) -> Result<ExitCode, CliError> {
    let ModuleCommand::Run(args) = args.command;
    let Loaded {
        config, warnings, ..
    } = Config::from_overrides(&args.overrides, Some(Verb::ModuleRun))?;
    for warning in warnings {
        tell(&format!("warning: {warning}"));
    }
    check_new_file(&args.outputs)?;
    let submodule = Submodule::open(&args.folder)?;
    let inputs = submodule.read_inputs(&args.inputs)?;

    let start = Instant::now();
    let policy = recipe::policy_of_checkpoint(
        &config,
        submodule.quantization(),
        &args.folder,
        submodule.family(),
    )?;
    let traced = submodule.trace(&inputs, recipe::precision(&config), policy)?;
    let decisions = &traced.decisions;
    let trace_seconds = start.elapsed().as_secs_f64();

    status::spin("opening the devices");
    let opened = recipe::open_session(&config, &try_load, &mut notices())?;
    progress(&format!("{}: {}", submodule.class(), opened.chosen));
    if let Some(policy) = &traced.policy {
        progress(&recipe::quantization_summary(policy, decisions));
    }
    status::spin("compiling and running");
    let (session, precision) = (&opened.session, config.precision);
    let run = submodule.run(session, &traced, precision, &inputs, args.runs)?;
    status::clear();
    let nonfinite = warn_of_nonfinite(&run.outputs)?;
    let mode = &recipe::mode_name(decisions);
    let settings = settings(&config, submodule.class(), mode);
    write(&args.outputs, &run.outputs, &settings)?;

    if args.json {
        let tensors: Map<String, Json> = run
            .outputs
            .iter()
            .map(|(name, tensor)| {
                let shape = &tensor.shape;
                let value = json!({"dtype": shape.dtype.to_string(), "shape": shape.dims});
                (name.clone(), value)
            })
            .collect();
        let report = json!({
            "module": submodule.class(),
            "parameters": traced.graph.parameter_count(),
            "hardware": opened.chosen,
            "settings": settings,
            "kernels": run.kernels,
            "contractions": {
                "quantized": decisions.iter().filter(|d| d.quantized()).count(),
                "float": decisions.iter().filter(|d| !d.quantized()).map(|d| &d.path).collect::<Vec<_>>(),
            },
            "output": args.outputs,
            "tensors": tensors,
            "nonfinite": nonfinite,
            "seconds": {
                "trace": trace_seconds,
                "emit": run.seconds.emit,
                "compile": run.seconds.compile,
                "load": run.seconds.load,
                "run": run.seconds.run,
            },
        });
        print(&report.to_string())?;
    } else {
        let outputs = run.outputs.iter();
        let tensors: Vec<String> = outputs
            .map(|(name, tensor)| format!("{name} {}", tensor.shape))
            .collect();
        print(&format!(
            "{}: {}",
            args.outputs.display(),
            tensors.join(", ")
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the numbers depend on beside the files; kept with the results.
fn settings(config: &Config, class: &str, mode: &str) -> BTreeMap<String, String> {
    let qwix = config.use_qwix_quantization.to_string();
    [
        ("maxdiff-rs", env!("CARGO_PKG_VERSION")),
        ("module", class),
        ("hardware", config.hardware.name()),
        ("weights_dtype", config.weights_dtype.name()),
        ("activations_dtype", config.activations_dtype.name()),
        ("precision", config.precision.name()),
        ("quantization", mode),
        ("use_qwix_quantization", &qwix),
    ]
    .map(|(key, value)| (key.to_string(), value.to_string()))
    .into()
}

/// Warns of values that are infinite or NaN, and says how many there are.
fn warn_of_nonfinite(outputs: &[(String, HostTensor)]) -> Result<usize, CliError> {
    let mut nonfinite = 0;
    for (name, tensor) in outputs {
        let values = tensor.to_f32_vec().map_err(CliError::failed)?;
        let count = values.iter().filter(|v| !v.is_finite()).count();
        if count > 0 {
            tell(&format!(
                "warning: {name}: {count} of {} values are infinite or NaN",
                values.len()
            ));
        }
        nonfinite += count;
    }
    Ok(nonfinite)
}

/// Writes the results to a file that must not exist; after an error there is none.
fn write(
    path: &Path,
    outputs: &[(String, HostTensor)],
    settings: &BTreeMap<String, String>,
) -> Result<(), CliError> {
    let views = outputs.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    save_new(path, views, settings).map_err(|error| match error {
        WeightsError::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => {
            exists(path)
        }
        error => CliError::failed(error),
    })
}
