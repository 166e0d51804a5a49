//! `module run`: the forward pass of one part of a model on saved tensors.
//!
//! Names are diffusers' and transformers', so that the same file of inputs goes through PyTorch and the two results
//! can be compared.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Subcommand};
use serde_json::{Map, Value as Json, json};

use super::{CliError, completions, help, notices, print, progress, tell};
use crate::config::{Config, Loaded, Verb};
use crate::dtype::DType;
use crate::graph::{Builder, GraphError};
use crate::host_tensor::HostTensor;
use crate::lowering::Traced;
use crate::models::ModelConfigError;
use crate::models::Part;
use crate::models::clip::{ClipTextConfig, clip_text};
use crate::models::unet::{self, AdditionEmbedType, UNet2DConditionConfig};
use crate::nn::{Precision, Remat};
use crate::quant::Policy;
use crate::recipe;
use crate::runtime::{Prepared, ProgramOptions, Session, StagedProgram, Value};
use crate::shape::Shape;
use crate::util::files::{Access, AtomicFile, Durability, Existing, check_writable, parent_of};
use crate::weights::save::FilePlan;
use crate::weights::{Checkpoint, TensorSpec, WeightsError, cast, match_parameters};

/// More than any `config.json` of a model.
const LARGEST_CONFIG: u64 = 1 << 20;

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
    /// `time_ids`, and gives `sample`. CLIPTextModel takes `input_ids` and gives `last_hidden_state` and
    /// `pooler_output`, with a projection also `text_embeds`. Results are float32.
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
    /// Keys such as hardware=cpu weights_dtype=bfloat16 quantization=int8
    #[arg(value_name = "KEY=VALUE", add = completions::overrides())]
    overrides: Vec<String>,
    /// Print JSON: parameters, devices, outputs, seconds by phase
    #[arg(long)]
    json: bool,
}

/// Why a module could not be run.
#[derive(Debug, thiserror::Error)]
enum ModuleError {
    #[error("{}: {reason}", path.display())]
    Config { path: PathBuf, reason: String },
    #[error("{}: {source}", path.display())]
    Model {
        path: PathBuf,
        source: ModelConfigError,
    },
    #[error("{}: does not fit the module:\n  {}", path.display(), problems.join("\n  "))]
    Inputs {
        path: PathBuf,
        problems: Vec<String>,
    },
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
    check_output(&args.outputs)?;
    let checkpoint = Checkpoint::open(&args.folder).map_err(CliError::failed)?;
    let module = Module::read(&args.folder).map_err(CliError::failed)?;
    let file = Checkpoint::open(&args.inputs).map_err(CliError::failed)?;
    let wanted = module.inputs();
    let sizes = bind_sizes(&wanted, &file).map_err(CliError::failed)?;
    let inputs = read_inputs(&module, &wanted, &sizes, &file)?;

    let start = Instant::now();
    let mut policy = recipe::policy(&config, &unet::INT8_FLOAT_LAYERS, 0)?;
    if let Some(policy) = &mut policy {
        policy.model = format!("{}/", module.root());
    }
    let traced = trace(&module, &sizes, recipe::precision(&config), policy.as_ref())?;
    let (graph, decisions) = (&traced.graph, &traced.decisions);
    let expected: Vec<(&str, &[usize])> = graph
        .weights()
        .map(|(_, w)| (w.key(), w.shape.dims.as_slice()))
        .collect();
    match_parameters(&expected, &checkpoint).map_err(CliError::failed)?;
    let trace_seconds = start.elapsed().as_secs_f64();

    let opened = recipe::open_session(&config, &mut notices())?;
    let session = &opened.session;
    progress(&format!("{}: {}", module.class(), opened.chosen));
    if let Some(policy) = &policy {
        progress(&recipe::quantization_summary(policy, decisions));
    }
    let options = ProgramOptions {
        precision: config.precision,
    };
    let program = StagedProgram::compile(session, &traced, &options).map_err(CliError::failed)?;

    let start = Instant::now();
    let weights = prepare(session, &program, &checkpoint)?;
    let load_seconds = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let mut data = BTreeMap::new();
    for input in graph.inputs.iter().filter(|input| !input.is_weight()) {
        let name = input.name.as_str();
        let spec = match program.input(name) {
            Some(slot) => &slot.spec,
            // Nothing depends on it.
            None => continue,
        };
        let array = session.put(&inputs[name], spec).map_err(CliError::failed)?;
        data.insert(name, array);
    }
    let lookup = |name: &str| weights.get(name).or_else(|| data.get(name));
    let step = program.step();
    let results = step.call(&lookup, Vec::new()).map_err(CliError::failed)?;
    let mut outputs: Vec<(TensorSpec, HostTensor)> = Vec::new();
    for (slot, result) in step.outputs().iter().zip(&results) {
        let tensor = result.to_host(session.mesh()).map_err(CliError::failed)?;
        let spec = TensorSpec {
            name: slot.name.clone(),
            shape: tensor.shape.clone(),
        };
        outputs.push((spec, tensor));
    }
    let run_seconds = start.elapsed().as_secs_f64();

    let mut nonfinite = 0;
    for (spec, tensor) in &outputs {
        let values = tensor.to_f32_vec().map_err(CliError::failed)?;
        let count = values.iter().filter(|v| !v.is_finite()).count();
        if count > 0 {
            tell(&format!(
                "warning: {}: {count} of {} values are infinite or NaN",
                spec.name,
                values.len()
            ));
        }
        nonfinite += count;
    }
    write_outputs(&args.outputs, &outputs, &settings(&config, &module))?;

    if args.json {
        let tensors: Map<String, Json> = outputs
            .iter()
            .map(|(spec, _)| {
                let value =
                    json!({"dtype": spec.shape.dtype.to_string(), "shape": spec.shape.dims});
                (spec.name.clone(), value)
            })
            .collect();
        let report = json!({
            "module": module.class(),
            "parameters": graph.parameter_count(),
            "hardware": opened.chosen,
            "settings": settings(&config, &module),
            "kernels": program.kernels(),
            "contractions": {
                "quantized": decisions.iter().filter(|d| d.quantized).count(),
                "float": decisions.iter().filter(|d| !d.quantized).map(|d| &d.path).collect::<Vec<_>>(),
            },
            "output": args.outputs,
            "tensors": tensors,
            "nonfinite": nonfinite,
            "seconds": {
                "trace": trace_seconds,
                "emit": program.timings().emit,
                "compile": program.timings().compile,
                "load": load_seconds,
                "run": run_seconds,
            },
        });
        print(&report.to_string())?;
    } else {
        let tensors: Vec<String> = outputs
            .iter()
            .map(|(spec, _)| format!("{} {}", spec.name, spec.shape))
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
fn settings(config: &Config, module: &Module) -> BTreeMap<String, String> {
    let mut settings: BTreeMap<String, String> = [
        ("maxdiff-rs", env!("CARGO_PKG_VERSION")),
        ("module", module.class()),
        ("hardware", config.hardware.name()),
        ("weights_dtype", config.weights_dtype.name()),
        ("activations_dtype", config.activations_dtype.name()),
        ("precision", config.precision.name()),
        ("quantization", config.quantization.name()),
    ]
    .map(|(key, value)| (key.to_string(), value.to_string()))
    .into();
    settings.insert(
        "use_qwix_quantization".to_string(),
        config.use_qwix_quantization.to_string(),
    );
    settings
}

/// A part of a model, by its configuration.
enum Module {
    UNet(Box<UNet2DConditionConfig>),
    ClipText(Box<ClipTextConfig>),
}

impl Module {
    /// Reads `config.json`, which says by `_class_name` (diffusers) or `architectures` (transformers) what it is of.
    fn read(folder: &Path) -> Result<Module, ModuleError> {
        let path = folder.join("config.json");
        let fail = |reason: String| ModuleError::Config {
            path: path.clone(),
            reason,
        };
        let bytes = std::fs::metadata(&path)
            .map_err(|e| fail(e.to_string()))?
            .len();
        if bytes > LARGEST_CONFIG {
            return Err(fail(format!(
                "{bytes} bytes; a model's configuration has at most {LARGEST_CONFIG}"
            )));
        }
        let text = std::fs::read_to_string(&path).map_err(|e| fail(e.to_string()))?;
        let fields: Map<String, Json> =
            serde_json::from_str(&text).map_err(|e| fail(format!("not a JSON object: {e}")))?;
        let classes: Vec<&str> = fields
            .get("_class_name")
            .into_iter()
            .chain(
                fields
                    .get("architectures")
                    .and_then(Json::as_array)
                    .into_iter()
                    .flatten(),
            )
            .filter_map(Json::as_str)
            .collect();
        let is = |name: &str| classes.contains(&name);
        let model = |source| ModuleError::Model {
            path: path.clone(),
            source,
        };
        if is("UNet2DConditionModel") {
            let config = UNet2DConditionConfig::from_map(fields.clone()).map_err(model)?;
            Ok(Module::UNet(Box::new(config)))
        } else if is("CLIPTextModel") || is("CLIPTextModelWithProjection") {
            let config = ClipTextConfig::from_map(fields.clone()).map_err(model)?;
            Ok(Module::ClipText(Box::new(config)))
        } else {
            let found = if classes.is_empty() {
                "neither _class_name nor architectures says what it is of".to_string()
            } else {
                format!("of {}, which is not here", classes.join(", "))
            };
            Err(fail(format!(
                "{found}; working: UNet2DConditionModel, CLIPTextModel, CLIPTextModelWithProjection"
            )))
        }
    }

    fn class(&self) -> &'static str {
        match self {
            Module::UNet(_) => "UNet2DConditionModel",
            Module::ClipText(config) if config.has_projection() => "CLIPTextModelWithProjection",
            Module::ClipText(_) => "CLIPTextModel",
        }
    }

    /// The root of the parameter paths.
    fn root(&self) -> &'static str {
        match self {
            Module::UNet(_) => unet::ROOT,
            Module::ClipText(_) => Part::TextEncoder.name(),
        }
    }

    /// What the forward pass takes. The first input that has a named size sets it.
    fn inputs(&self) -> Vec<Wanted> {
        use Size::{Is, Named};
        let wanted = |name, elements, sizes: &[Size]| Wanted {
            name,
            elements,
            sizes: sizes.to_vec(),
        };
        let batch = Named("batch");
        match self {
            Module::UNet(config) => {
                let features = config.cross_attention_dim.get(0).unwrap_or_default();
                let mut inputs = vec![
                    wanted(
                        "sample",
                        Elements::Floats,
                        &[
                            batch,
                            Is(config.in_channels),
                            Named("height"),
                            Named("width"),
                        ],
                    ),
                    wanted("timestep", Elements::Numbers, &[batch]),
                    wanted(
                        "encoder_hidden_states",
                        Elements::Floats,
                        &[batch, Named("length"), Is(features)],
                    ),
                ];
                match config.addition_embed_type {
                    None => {}
                    Some(AdditionEmbedType::TextTime) => {
                        let time = 6 * config.addition_time_embed_dim.unwrap_or_default();
                        let total = config.projection_class_embeddings_input_dim;
                        let text = total.unwrap_or_default().saturating_sub(time);
                        inputs.push(wanted("text_embeds", Elements::Floats, &[batch, Is(text)]));
                        inputs.push(wanted("time_ids", Elements::Numbers, &[batch, Is(6)]));
                    }
                }
                inputs
            }
            Module::ClipText(_) => vec![wanted(
                "input_ids",
                Elements::Integers,
                &[batch, Named("length")],
            )],
        }
    }
}

/// One input of a module.
struct Wanted {
    name: &'static str,
    elements: Elements,
    sizes: Vec<Size>,
}

/// One dimension: fixed by the configuration, or the same in all inputs that name it.
#[derive(Clone, Copy)]
enum Size {
    Is(usize),
    Named(&'static str),
}

/// Which element types an input may have in the file; they are cast to what the module takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Elements {
    Floats,
    /// Floats or integers.
    Numbers,
    Integers,
}

type Sizes = BTreeMap<&'static str, usize>;

impl Wanted {
    /// The type the module is traced with.
    fn dtype(&self) -> DType {
        match self.elements {
            Elements::Floats | Elements::Numbers => DType::F32,
            Elements::Integers => DType::S32,
        }
    }

    fn takes(&self, dtype: DType) -> bool {
        let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        let int = dtype.is_int() && dtype.bits() >= 8;
        match self.elements {
            Elements::Floats => float,
            Elements::Numbers => float || int,
            Elements::Integers => int,
        }
    }

    /// Whether one value may stand for the whole batch, as diffusers has it for timesteps.
    fn is_for_all(&self, dims: &[usize]) -> bool {
        self.name == "timestep" && matches!(dims, [] | [1])
    }

    fn dims(&self, sizes: &Sizes) -> Vec<usize> {
        let size = |size: &Size| match size {
            Size::Is(n) => *n,
            Size::Named(name) => sizes.get(name).copied().unwrap_or_default(),
        };
        self.sizes.iter().map(size).collect()
    }

    /// Sets the sizes that are still open, and says whether `dims` fits.
    fn bind(&self, dims: &[usize], sizes: &mut Sizes) -> bool {
        if self.is_for_all(dims) {
            return true;
        }
        if dims.len() != self.sizes.len() || dims.contains(&0) {
            return false;
        }
        let mut bound = sizes.clone();
        let fits = self
            .sizes
            .iter()
            .zip(dims)
            .all(|(size, &found)| match size {
                Size::Is(n) => *n == found,
                Size::Named(name) => *bound.entry(name).or_insert(found) == found,
            });
        if fits {
            *sizes = bound;
        }
        fits
    }

    /// Type and sizes in words, e.g. `floats [batch = 2, length, 24]`.
    fn describe(&self, sizes: &Sizes) -> String {
        let each: Vec<String> = self
            .sizes
            .iter()
            .map(|size| match size {
                Size::Is(n) => n.to_string(),
                Size::Named(name) => match sizes.get(name) {
                    Some(n) => format!("{name} = {n}"),
                    None => (*name).to_string(),
                },
            })
            .collect();
        let elements = match self.elements {
            Elements::Floats => "floats",
            Elements::Numbers => "floats or integers",
            Elements::Integers => "integers",
        };
        format!("{elements} [{}]", each.join(", "))
    }
}

/// Compares a file's tensors with what the module takes, and gives the named sizes.
///
/// # Errors
/// Lists every input that is missing, unknown, or of another type or shape.
fn bind_sizes(wanted: &[Wanted], file: &Checkpoint) -> Result<Sizes, ModuleError> {
    let mut sizes = Sizes::new();
    let mut problems = Vec::new();
    for input in wanted {
        match file.info(input.name) {
            None => problems.push(format!(
                "missing: {}, {}",
                input.name,
                input.describe(&sizes)
            )),
            Some(shape) => {
                let expected = input.describe(&sizes);
                if !input.takes(shape.dtype) || !input.bind(&shape.dims, &mut sizes) {
                    problems.push(format!(
                        "{}: expected {expected}, found {shape}",
                        input.name
                    ));
                }
            }
        }
    }
    for (name, shape) in file.iter() {
        if !wanted.iter().any(|w| w.name == name) {
            let takes: Vec<&str> = wanted.iter().map(|w| w.name).collect();
            problems.push(format!(
                "unknown: {name} {shape}; the module takes {}",
                takes.join(", ")
            ));
        }
    }
    if problems.is_empty() {
        return Ok(sizes);
    }
    Err(ModuleError::Inputs {
        path: file.path().to_owned(),
        problems,
    })
}

/// Reads the inputs as the module takes them.
fn read_inputs(
    module: &Module,
    wanted: &[Wanted],
    sizes: &Sizes,
    file: &Checkpoint,
) -> Result<BTreeMap<&'static str, HostTensor>, CliError> {
    let mut inputs = BTreeMap::new();
    for input in wanted {
        let found = file.read(input.name).map_err(CliError::failed)?;
        if let Module::ClipText(config) = module {
            check_ids(file.path(), input.name, &found, config.vocab_size)?;
        }
        let mut tensor = cast(found, input.dtype()).map_err(CliError::failed)?;
        let shape = Shape::new(input.dtype(), input.dims(sizes));
        if input.is_for_all(&tensor.shape.dims) {
            tensor = HostTensor {
                data: tensor.data.repeat(shape.count()),
                shape,
            };
        }
        inputs.insert(input.name, tensor);
    }
    Ok(inputs)
}

/// A lookup past the end of a table gives its last row, so that a wrong tokenizer would go unnoticed.
fn check_ids(path: &Path, name: &str, ids: &HostTensor, vocabulary: usize) -> Result<(), CliError> {
    let values = ids.to_f64_vec().map_err(CliError::failed)?;
    let outside = |v: &&f64| !(0.0..vocabulary as f64).contains(*v);
    match values.iter().find(outside) {
        None => Ok(()),
        Some(first) => Err(CliError::failed(ModuleError::Inputs {
            path: path.to_owned(),
            problems: vec![format!(
                "{name}: {} of {} ids are outside the vocabulary of {vocabulary}, the first is {first}",
                values.iter().filter(outside).count(),
                values.len()
            )],
        })),
    }
}

/// Reads the weights and makes of each what the program uses: one group of weights at a time is in memory twice.
fn prepare<'a>(
    session: &Session,
    program: &StagedProgram,
    checkpoint: &Checkpoint,
) -> Result<Prepared<'a>, CliError> {
    let mut preparation = program.preparation();
    for slot in program.weights() {
        // A large tensor is read by several threads.
        let tensor = checkpoint
            .read_as(slot.key(), slot.shape.dtype)
            .map_err(CliError::failed)?;
        let array = session.put(&tensor, &slot.spec).map_err(CliError::failed)?;
        preparation
            .take(Value::Donate(array))
            .map_err(CliError::failed)?;
    }
    preparation.finish().map_err(CliError::failed)
}

/// Traces the forward pass, annotated by the policy.
fn trace(
    module: &Module,
    sizes: &Sizes,
    precision: Precision,
    policy: Option<&Policy>,
) -> Result<Traced, CliError> {
    let b = Builder::new();
    for (name, tensor) in declare(&b, module, sizes, precision).map_err(CliError::failed)? {
        b.output(name, tensor, None).map_err(CliError::failed)?;
    }
    let traced = Traced::new(module.root(), b.finish());
    traced.quantized(policy).map_err(CliError::usage)
}

/// The module's results by name, in `f32`.
fn declare(
    b: &Builder,
    module: &Module,
    sizes: &Sizes,
    precision: Precision,
) -> Result<Vec<(&'static str, crate::graph::Tensor)>, GraphError> {
    let size = |name: &str| sizes.get(name).copied().unwrap_or_default();
    let outputs = match module {
        Module::UNet(config) => {
            let dims = ["batch", "height", "width", "length"].map(size);
            let inputs = unet::declare_inputs(b, config, dims, DType::F32)?;
            vec![(
                "sample",
                unet::unet(b, config, inputs, precision, Remat::None)?,
            )]
        }
        Module::ClipText(config) => {
            let ids = b.input(
                "input_ids",
                Shape::new(DType::S32, ["batch", "length"].map(size)),
                &[Some("activation_batch"), None],
            )?;
            let y = clip_text(
                b,
                Part::TextEncoder.name(),
                config,
                ids,
                precision,
                Remat::None,
            )?;
            let mut outputs = vec![
                ("last_hidden_state", y.last_hidden_state),
                ("pooler_output", y.pooler_output),
            ];
            outputs.extend(y.text_embeds.map(|t| ("text_embeds", t)));
            outputs
        }
    };
    outputs
        .into_iter()
        .map(|(name, tensor)| Ok((name, b.convert(tensor, DType::F32)?)))
        .collect()
}

fn exists(path: &Path) -> CliError {
    CliError::Usage(format!(
        "{}: exists already; choose another name or remove it",
        path.display()
    ))
}

/// Finds before the work what would stop its result from being written.
fn check_output(path: &Path) -> Result<(), CliError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists(path));
    }
    let folder = parent_of(path);
    check_writable(folder).map_err(|e| {
        CliError::Usage(format!(
            "{}: cannot be written: {}: {e}",
            path.display(),
            folder.display(),
        ))
    })
}

/// Writes the results to a file that must not exist; after an error there is none.
fn write_outputs(
    path: &Path,
    outputs: &[(TensorSpec, HostTensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(), CliError> {
    let specs: Vec<TensorSpec> = outputs.iter().map(|(spec, _)| spec.clone()).collect();
    let plan = FilePlan::new(path, &specs, metadata).map_err(CliError::failed)?;
    let io = |source| {
        CliError::failed(WeightsError::Io {
            path: path.to_owned(),
            source,
        })
    };
    let mut file = AtomicFile::create(path, Access::Umask).map_err(io)?;
    plan.write(path, &mut file, |spec| {
        let found = outputs.iter().find(|(s, _)| s.name == spec.name);
        Ok(Cow::Borrowed(found.map_or(&[][..], |(_, t)| &t.data)))
    })
    .map_err(CliError::failed)?;
    file.commit(path, Existing::Refuse, Durability::Synced)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => exists(path),
            _ => io(e),
        })
}
