//! Calibration: the pipeline draws images, and what layers read of them gives the scales of activations.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::config::{
    self, Config, Loaded, Prompts, QuantRule, QuantRules, SvdOrder, WeightAlgorithm,
    WeightGranularity,
};
use crate::dtype::DType;
use crate::graph::{Granularity, Range, TensorFormat};
use crate::host_tensor::HostTensor;
use crate::models::DenoiserKind;
use crate::pipelines::prompt_file::read_prompts;
use crate::pipelines::{BoxError, Event, Phase, Pipeline};
use crate::pjrt::install::TryLoad;
use crate::pjrt::prepare_process;
use crate::quant::{
    Action, AwqWeight, CalibrationError, Formats, LowRankOptions, Observer, ObserverKind, Policy,
    Statistics, StoredLayer, Watch, Watched, awq_factors, balance, input_scale_name,
    largest_of_features, smooth_factor_name,
};
use crate::util::text::binary_size;
use crate::util::{files, memory};
use crate::weights::Checkpoint;
use crate::weights::quantized::{Quantization, weight_name};
use crate::weights::source::LayerPlan;

use super::formats::rule_formats;
use super::generate::generation;
use super::preset::with_arguments;
use super::qat::TrainedRanges;
use super::roundings::{Rounding, Roundings, check_float};
use super::session::open_session;
use super::{Notice, Notify, RecipeError};

/// What the pipeline is opened with.
pub(super) struct Run<'a> {
    pub loaded: &'a Loaded,
    pub recipe_file: &'a Path,
    pub try_load: &'a TryLoad<'a>,
    pub kind: DenoiserKind,
}

/// Largest file of captions that is read.
const MAX_CAPTION_BYTES: u64 = 256 << 20;
/// The column of a caption in COCO's `captions.tsv`, whose first line names the columns.
const CAPTION_COLUMN: usize = 2;

/// Checks what the configuration alone says of calibration.
///
/// # Errors
/// When there is a mode with recorded scales and no prompt, calibration has no effect, or weights of a format are not rounded as
/// the configuration or a rule says. `is_measured`: it tells what errors do, whatever the modes.
pub(super) fn check_calibration(
    config: &Config,
    policy: &Policy,
    is_measured: bool,
) -> Result<(), RecipeError> {
    let calibration = &config.calibration;
    let refuse = |problem: &str| Err(RecipeError::Usage(problem.to_owned()));
    let (formats, roundings) = asked_roundings(config, policy)?;
    let is_static = formats.iter().any(|formats| {
        formats
            .activation
            .is_some_and(TensorFormat::has_stored_scale)
    });
    let has_low_rank = formats.iter().any(|formats| formats.low_rank);
    let fed = roundings.iter().find(|(_, rounding)| rounding.is_fed());
    let is_fed = fed.is_some();
    let needs = match fed {
        Some((Some(rule), rounding)) if rule.algorithm.is_some() => {
            format!("{}: algorithm {} needs", rule.path, rounding.algorithm)
        }
        _ => "quantization_algorithm=gptq and awq need".to_owned(),
    };
    let mut observers = roundings.iter().map(|(_, rounding)| rounding.observer);
    if config.quantization_percentile != Observer::default().percentile
        && !observers.any(|observer| observer == ObserverKind::Percentile)
    {
        return refuse(
            "quantization_percentile has no effect: no weight has the observer percentile; leave it out",
        );
    }
    let mut weights = formats.iter().filter_map(|formats| formats.weight);
    if config.observer_compat.is_some() && !weights.all(|w| w.granularity == Granularity::Tensor) {
        return refuse(
            "observer_compat=quark: Quark has these observers for whole tensors: give quantization_granularity=tensor, or leave it out",
        );
    }
    let has_prompts = calibration.is_asked();
    if !calibration.prompts.0.is_empty() && !calibration.prompts_file.is_empty() {
        return refuse("calibration has both prompts and prompts_file: give one of the two");
    }
    match (
        is_static && !may_be_trained(config),
        has_low_rank,
        has_prompts,
    ) {
        (true, _, false) => Err(needs_calibration()),
        (_, _, false) if is_fed => refuse(&format!(
            "{needs} calibration: give prompts, such as calibration='{{prompts: [a lighthouse at sunrise, a bowl of fruit], steps: \
             20}}', or calibration.prompts_file"
        )),
        (_, false, true) if !is_static && !is_fed && !is_measured => refuse(
            "calibration has no effect: no mode reads activations; leave it out, or take int8_w8a8_static, fp8_w8a8_static, \
             svdquant_w4a16, svdquant_w4a4, quantization_algorithm=gptq or awq, --sensitivity or a budget",
        ),
        _ if config.svd_alpha < 0.0 && has_low_rank && !has_prompts => refuse(
            "svd_alpha=-1 tries how activations and weights share their range, which needs calibration: give calibration \
             prompts, or leave svd_alpha out",
        ),
        _ if config.svd_order == SvdOrder::Paper && has_low_rank && !has_prompts => refuse(
            "svd_order=paper divides activations by factors, which need calibration: give calibration prompts, or leave \
             svd_order out",
        ),
        _ if config.svd_order == SvdOrder::Paper && config.svd_alpha < 0.0 => refuse(
            "svd_alpha=-1 tries factors for each layer, and with svd_order=paper layers that read the same activation share \
             them: give svd_alpha a number from 0 to 1",
        ),
        _ if config.quantization_smooth_alpha.is_some()
            && calibration.observer != ObserverKind::MinMax =>
        {
            refuse(
                "quantization_smooth_alpha takes the largest magnitude of each feature: leave calibration.observer out",
            )
        }
        _ if calibration.split_skips
            && (config.quantization_smooth_alpha.is_some()
                || calibration.observer != ObserverKind::MinMax) =>
        {
            refuse(
                "calibration.split_skips takes the largest magnitude of each part: leave quantization_smooth_alpha, which has a scale \
                 for each feature, and calibration.observer out",
            )
        }
        _ if config.quantization_smooth_alpha.is_some() && !is_static => refuse(
            "quantization_smooth_alpha has no effect: no rule has mode int8_w8a8_static or fp8_w8a8_static",
        ),
        _ => Ok(()),
    }
}

/// How weights are rounded, and the rule that says so.
type Asked<'a> = (Option<&'a QuantRule>, Rounding);

/// The formats of what the policy quantizes, and how weights are rounded to them or to those of candidates.
///
/// # Errors
/// When weights of a format are not rounded so.
fn asked_roundings<'a>(
    config: &'a Config,
    policy: &Policy,
) -> Result<(Vec<Formats>, Vec<Asked<'a>>), RecipeError> {
    // The policy has the configuration's rules first.
    let rules = config.quant_rules.0.iter().map(Some);
    let rules = rules.chain(std::iter::repeat(None));
    let (mut formats, mut roundings) = (Vec::new(), Vec::new());
    for (asked, rule) in policy.rules.iter().zip(rules) {
        match asked.action() {
            Action::Float => check_float(rule)?,
            Action::Quantize(own) => {
                let rounding = Rounding::of(config, rule);
                rounding.check(config, rule, &own)?;
                formats.push(own);
                roundings.push((rule, rounding));
            }
        }
    }
    let candidates = config.quantization_candidates.0.iter();
    for rule in candidates.filter(|rule| rule.says_rounding()) {
        match rule_formats(config, rule)? {
            None => check_float(Some(rule))?,
            Some(own) => {
                let rounding = Rounding::of(config, Some(rule));
                rounding.check(config, Some(rule), &own)?;
                roundings.push((Some(rule), rounding));
            }
        }
    }
    Ok((formats, roundings))
}

/// Whether the model may be one that was trained with ranges of activations: as far as the configuration tells.
fn may_be_trained(config: &Config) -> bool {
    config.unet_config.0 != config::ModelConfig::Unset
        || Path::new(&config.pretrained_model_name_or_path).is_dir()
}

/// Static activations without their scales.
pub(super) fn needs_calibration() -> RecipeError {
    RecipeError::Usage(
        "quantization=int8_w8a8_static and fp8_w8a8_static need calibration: give prompts, such as calibration='{prompts: [a lighthouse at \
         sunrise, a bowl of fruit], steps: 20}', or calibration.prompts_file; or train the model in this mode"
            .to_owned(),
    )
}

/// The layers to watch; `None` where nothing is calibrated. `is_measured` asks what errors of all of them do, also where they read
/// activations rounded to `roundings`. GPTQ reads the inputs of those that are `correlated`.
pub(super) fn calibrated(
    config: &Config,
    policy: &Policy,
    stored: &Quantization,
    is_measured: bool,
    roundings: BTreeMap<String, Vec<TensorFormat>>,
    correlated: BTreeSet<String>,
) -> Option<Watch> {
    if !config.calibration.is_asked() {
        return None;
    }
    let reads = |layer: &StoredLayer| {
        let is_static = layer.activation.is_some_and(TensorFormat::has_stored_scale);
        is_measured || layer.smoothed || layer.low_rank.is_some() || is_static
    };
    let layers = stored.layers.iter();
    let layers = layers.filter(|(path, layer)| reads(layer) || correlated.contains(*path));
    let layers: BTreeSet<String> = layers.map(|(path, _)| path.clone()).collect();
    let observer = Observer::of(config.calibration.observer);
    (!layers.is_empty()).then(|| Watch {
        model: policy.model.clone(),
        hessians: correlated,
        layers,
        counts: observer.reads_counts(),
        gains: is_measured,
        roundings: match is_measured {
            true => roundings,
            false => BTreeMap::new(),
        },
    })
}

/// Draws the images of `calibration`, and gives the statistics of what the layers read.
///
/// # Errors
/// When there are no prompts, the model cannot be opened or run, or an activation is not finite.
pub(super) fn calibrate(
    run: &Run<'_>,
    watch: Watch,
    notify: &mut Notify<'_>,
) -> Result<Statistics, RecipeError> {
    let config = with_arguments(run.loaded.config.clone(), run.kind);
    let config = run_config(&config)?;
    let seed = config.calibration.seed;
    let mut generation = generation(&config, &run.loaded.given, run.recipe_file, notify)?;
    // An image at a time, from the same noise.
    generation.options.max_batch = 1;
    generation.options.watch = Some(watch);
    generation
        .request
        .images
        .iter_mut()
        .for_each(|image| image.seed = seed);
    let count = generation.request.images.len();
    prepare_process().map_err(RecipeError::failed)?;
    let opened = open_session(&config, run.try_load, notify)?;
    notify(Notice::Progress(&format!(
        "calibrating with {count} prompts of {} steps on {}",
        config.num_inference_steps, opened.chosen
    )));
    let mut pipeline =
        Pipeline::open(opened.session, generation.options).map_err(RecipeError::failed)?;
    let mut statistics: Option<Statistics> = None;
    let mut step = 0;
    let generated = pipeline.generate(&generation.request, &mut |event| {
        match (event, &mut statistics) {
            (Event::Watched(watched), _) => {
                check_memory(watched)?;
                statistics = Some(Statistics::new(watched.clone()));
            }
            (Event::Phase(Phase::Denoise), _) => step = 0,
            (Event::Statistics(results), Some(statistics)) => statistics.add(step, results)?,
            (Event::Step, _) => step += 1,
            (Event::Warning(text), _) => notify(Notice::Warning(text)),
            _ => {}
        }
        Ok(())
    });
    generated.map_err(RecipeError::failed)?;
    match statistics.filter(|statistics| statistics.steps() > 0) {
        Some(statistics) => Ok(statistics),
        None => Err(RecipeError::failed(CalibrationError::Nothing)),
    }
}

/// Refuses correlations that do not fit the memory of this machine: they are summed up over all steps.
fn check_memory(watched: &Watched) -> Result<(), BoxError> {
    let needed = watched.hessian_bytes();
    match memory::available() {
        Some(left) if needed > left => Err(format!(
            "quantization_algorithm=gptq needs {} for what layers read of each other's features, and {} are left: quantize some \
             layers by a rule of quant_rules with another mode, or leave it out",
            binary_size(needed),
            binary_size(left)
        )
        .into()),
        _ => Ok(()),
    }
}

/// The configuration of the float pipeline that draws the images.
fn run_config(config: &Config) -> Result<Config, RecipeError> {
    let calibration = &config.calibration;
    let prompts = match calibration.prompts_file.as_str() {
        "" => calibration.prompts.0.clone(),
        file => captions(Path::new(file), calibration.max_prompts as usize)?,
    };
    Ok(Config {
        quantization: config::Quantization::Off,
        quant_rules: QuantRules::default(),
        quantization_granularity: WeightGranularity::default(),
        quantization_numerics: None,
        quantization_symmetric: true,
        use_qwix_quantization: false,
        prompt: Prompts(prompts),
        num_inference_steps: calibration.steps,
        guidance_scale: calibration.guidance_scale.unwrap_or(config.guidance_scale),
        height: calibration.height,
        width: calibration.width,
        ..config.clone()
    })
}

/// The first prompts of a file: one a line, or of COCO's `captions.tsv`.
fn captions(path: &Path, count: usize) -> Result<Vec<String>, RecipeError> {
    let usage = |problem: String| {
        RecipeError::Usage(format!(
            "calibration.prompts_file={}: {problem}",
            path.display()
        ))
    };
    if path.extension().is_none_or(|extension| extension != "tsv") {
        let lines = read_prompts(path).map_err(RecipeError::usage)?;
        let prompts = lines.into_iter().map(|line| line.prompt).take(count);
        return Ok(prompts.collect());
    }
    let size = std::fs::metadata(path).map_err(|e| usage(e.to_string()))?;
    if size.len() > MAX_CAPTION_BYTES {
        return Err(usage(format!(
            "larger than {} MiB",
            MAX_CAPTION_BYTES >> 20
        )));
    }
    let text = files::read_to_string(path).map_err(|e| usage(e.to_string()))?;
    let captions = text.lines().skip(1).filter_map(|line| {
        let caption = line.split('\t').nth(CAPTION_COLUMN)?.trim();
        (!caption.is_empty()).then(|| caption.to_owned())
    });
    let captions: Vec<String> = captions.take(count).collect();
    match captions.is_empty() {
        true => Err(usage(
            "no line has a caption in its third column; expected COCO's captions.tsv".to_owned(),
        )),
        false => Ok(captions),
    }
}

/// What is known of a model's layers beside their weights.
pub(super) struct Known<'a> {
    /// What calibration saw.
    pub statistics: Option<&'a Statistics>,
    /// What training found.
    pub trained: Option<&'a TrainedRanges>,
}

/// What is done with the weights of layers, by their paths.
///
/// # Errors
/// When a layer was not seen, or a weight cannot be read.
pub(super) fn plans(
    config: &Config,
    stored: &Quantization,
    roundings: &Roundings,
    known: &Known<'_>,
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, LayerPlan>, RecipeError> {
    let (statistics, trained) = (known.statistics, known.trained);
    let mut plans = BTreeMap::new();
    let shared = |alpha: Option<f64>, reads: &Reads<'_>| match (alpha, statistics) {
        (Some(alpha), Some(statistics)) => {
            shared_factors(alpha, stored, reads, statistics, checkpoint)
        }
        _ => Ok(BTreeMap::new()),
    };
    let of_features = |_: &str, layer: &StoredLayer| has_feature_scales(layer);
    let smooth = shared(config.quantization_smooth_alpha, &of_features)?;
    let mut smooth = smooth_scales(stored, smooth, statistics)?;
    if config.calibration.split_skips {
        smooth = split_scales(stored, statistics)?;
    }
    let of_low_rank = |path: &str, layer: &StoredLayer| {
        layer.smoothed && !roundings.has(path, WeightAlgorithm::Awq)
    };
    let mut divided = shared(Some(config.svd_alpha), &of_low_rank)?;
    if let Some(statistics) = statistics {
        divided.extend(awq(config, stored, roundings, statistics, checkpoint)?);
    }
    for (path, layer) in &stored.layers {
        let is_gptq = roundings.has(path, WeightAlgorithm::Gptq);
        let recorded = layer.activation.filter(|format| format.has_stored_scale());
        let scales = trained.and_then(|trained| trained.scale(path));
        let is_plain = recorded.is_none()
            && layer.low_rank.is_none()
            && !layer.smoothed
            && !is_gptq
            && scales.is_none();
        let seen = statistics.filter(|s| !is_plain || s.activation(path).is_some());
        if is_plain && seen.is_none() {
            continue;
        }
        let known = seen.map(|statistics| statistics.of_layer(path)).transpose();
        let known = known.map_err(RecipeError::failed)?;
        let activity = seen.map(|statistics| statistics.activity(path)).transpose();
        let mut plan = LayerPlan {
            activity: activity.map_err(RecipeError::failed)?,
            // Another layer that reads the same may have asked for it.
            hessian: known.filter(|_| is_gptq).and_then(|known| known.hessian()),
            scales: scales
                .map(HostTensor::to_f32_vec)
                .transpose()
                .map_err(RecipeError::failed)?,
            ..LayerPlan::default()
        };
        if let (Some(format), Some(trained)) = (recorded, trained)
            && let Some(scale) = trained.input_scale(path, format)
        {
            let scale = HostTensor::from_f32([], &[scale]).map_err(RecipeError::failed)?;
            let scale = in_range_type(scale, format)?;
            plan.beside.push((input_scale_name(path), scale));
        }
        if let (Some(format), Some(known)) = (recorded, known) {
            let scales = match (format.granularity, smooth.get(path)) {
                (Granularity::Feature, Some(scales)) => scales.clone(),
                _ => {
                    let observer = Observer {
                        percentile: config.calibration.percentile,
                        ..Observer::of(config.calibration.observer)
                    };
                    vec![known.scale(observer, format)]
                }
            };
            let dims = match format.granularity {
                Granularity::Feature => vec![scales.len()],
                Granularity::Tensor
                | Granularity::Channel
                | Granularity::Part(_)
                | Granularity::Group(_) => Vec::new(),
            };
            let scale = HostTensor::from_f32(dims, &scales).map_err(RecipeError::failed)?;
            let scale = in_range_type(scale, format)?;
            if format.granularity == Granularity::Feature {
                // The weight takes over what is stored.
                plan.factors = Some(scale.to_f32_vec().map_err(RecipeError::failed)?);
            }
            plan.beside.push((input_scale_name(path), scale));
        }
        if let Some(factors) = divided.get(path) {
            let tensor = HostTensor::from_f32([factors.len()], factors);
            let tensor = tensor.map_err(RecipeError::failed)?;
            plan.beside.push((smooth_factor_name(path), tensor));
            plan.factors = Some(factors.clone());
        }
        plan.low_rank = layer.low_rank.map(|rank| LowRankOptions {
            rank,
            iterations: config.svd_iterations as usize,
            alphas: match config.svd_alpha {
                alpha if alpha < 0.0 => (1..20).map(|i| f64::from(i) / 20.0).collect(),
                alpha => vec![alpha],
            },
            // A weight that has taken factors over is decomposed as it is.
            features: known
                .filter(|_| !layer.smoothed)
                .map(|known| [known.features().to_vec(), known.squares()]),
        });
        plans.insert(path.clone(), plan);
    }
    Ok(plans)
}

/// A scale of activations in the type in which checkpoints have it.
fn in_range_type(scale: HostTensor, format: TensorFormat) -> Result<HostTensor, RecipeError> {
    match format.range {
        Range::Stored(dtype) => scale.convert(dtype).map_err(RecipeError::failed),
        Range::Dynamic | Range::Static(_) => Ok(scale),
    }
}

/// Whether calibration finds a scale for each feature of what a layer reads.
fn has_feature_scales(layer: &StoredLayer) -> bool {
    layer.activation.is_some_and(|format| {
        format.has_stored_scale() && format.granularity == Granularity::Feature
    })
}

/// SmoothQuant: the scales of the features of what layers read, of the factors by which they share their ranges. What is read
/// divided by the factors becomes the format's bound at most.
fn smooth_scales(
    stored: &Quantization,
    factors: BTreeMap<String, Vec<f32>>,
    statistics: Option<&Statistics>,
) -> Result<BTreeMap<String, Vec<f32>>, RecipeError> {
    let mut scales = BTreeMap::new();
    let Some(statistics) = statistics else {
        return Ok(scales);
    };
    for (layer, mut factors) in factors {
        let known = statistics.of_layer(&layer).map_err(RecipeError::failed)?;
        let smoothed = known.features().iter().zip(&factors);
        let highest = smoothed.fold(0f32, |highest, (a, factor)| highest.max(a / factor));
        let step = (highest / bound(stored.layers.get(&layer))).max(f32::EPSILON);
        factors.iter_mut().for_each(|factor| *factor *= step);
        scales.insert(layer, factors);
    }
    Ok(scales)
}

/// [`TensorFormat::bound`] of what a layer reads.
fn bound(layer: Option<&StoredLayer>) -> f32 {
    let activation = layer.and_then(|layer| layer.activation);
    activation.map_or(1.0, |format| format.bound() as f32)
}

/// The scales of the features of what layers read that is two joined activations: one for each part.
fn split_scales(
    stored: &Quantization,
    statistics: Option<&Statistics>,
) -> Result<BTreeMap<String, Vec<f32>>, RecipeError> {
    let mut scales = BTreeMap::new();
    let Some(statistics) = statistics else {
        return Ok(scales);
    };
    let layers = stored.layers.iter();
    for (path, layer) in layers.filter(|(_, layer)| has_feature_scales(layer)) {
        let features = statistics
            .of_layer(path)
            .map_err(RecipeError::failed)?
            .features()
            .len();
        let parts = statistics.parts(path).map_err(RecipeError::failed)?;
        let Some((largest, first)) = parts else {
            return Err(RecipeError::failed(CalibrationError::NoLayer {
                layer: path.clone(),
            }));
        };
        let bound = bound(Some(layer));
        let [a, b] = largest.map(|largest| (largest / bound).max(f32::EPSILON));
        let of_feature = |at: usize| if at < first { a } else { b };
        scales.insert(path.clone(), (0..features).map(of_feature).collect());
    }
    Ok(scales)
}

/// Which layers, by their paths.
type Reads<'a> = dyn Fn(&str, &StoredLayer) -> bool + 'a;

/// Layers of one parent that read the same activation, of those that `reads` takes.
fn readers<'a>(
    stored: &'a Quantization,
    reads: &Reads<'_>,
    statistics: &Statistics,
) -> Vec<Vec<(&'a String, &'a StoredLayer)>> {
    let mut groups: BTreeMap<(usize, &str), Vec<_>> = BTreeMap::new();
    for (path, layer) in &stored.layers {
        let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
        if let Some(activation) = statistics.activation(path).filter(|_| reads(path, layer)) {
            groups
                .entry((activation, parent))
                .or_default()
                .push((path, layer));
        }
    }
    groups.into_values().collect()
}

/// A weight of the checkpoint in `f32`, with its dimensions.
fn float_weight(
    checkpoint: &Checkpoint,
    layer: &str,
) -> Result<(Vec<f32>, Vec<usize>), RecipeError> {
    let weight = checkpoint
        .read_as(&weight_name(layer), DType::F32)
        .map_err(RecipeError::failed)?;
    let values = weight.to_f32_vec().map_err(RecipeError::failed)?;
    Ok((values, weight.shape.dims))
}

/// AWQ's factors of the features of what linear layers read, by their paths.
fn awq(
    config: &Config,
    stored: &Quantization,
    roundings: &Roundings,
    statistics: &Statistics,
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, Vec<f32>>, RecipeError> {
    let mut factors = BTreeMap::new();
    let of_awq = |path: &str, layer: &StoredLayer| {
        layer.smoothed && roundings.has(path, WeightAlgorithm::Awq)
    };
    for layers in readers(stored, &of_awq, statistics) {
        let known = statistics
            .of_layer(layers[0].0)
            .map_err(RecipeError::failed)?;
        let weights = layers.iter().map(|(path, layer)| {
            let (values, _) = float_weight(checkpoint, path)?;
            Ok(AwqWeight {
                values,
                format: layer.weight,
                dtype: match layer.weight.range {
                    Range::Stored(DType::BF16) => DType::BF16,
                    _ => DType::F32,
                },
                observer: roundings.of_layer(path).weight_observer(config),
            })
        });
        let weights = weights.collect::<Result<Vec<_>, RecipeError>>()?;
        let (magnitudes, squares) = (known.magnitudes(), known.squares());
        let (found, _) =
            awq_factors(&weights, &magnitudes, &squares).map_err(RecipeError::at(layers[0].0))?;
        factors.extend(
            layers
                .iter()
                .map(|(path, _)| ((*path).clone(), found.clone())),
        );
    }
    Ok(factors)
}

/// The factors ([`balance`]) by which the layers that `reads` takes share ranges with what they read. Layers of one parent that
/// read the same activation share them: the largest of their weights decide.
fn shared_factors(
    alpha: f64,
    stored: &Quantization,
    reads: &Reads<'_>,
    statistics: &Statistics,
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, Vec<f32>>, RecipeError> {
    let mut factors = BTreeMap::new();
    for layers in readers(stored, reads, statistics) {
        let known = statistics
            .of_layer(layers[0].0)
            .map_err(RecipeError::failed)?;
        let mut largest = vec![0f32; known.features().len()];
        for (layer, _) in &layers {
            let (values, dims) = float_weight(checkpoint, layer)?;
            let of_layer = largest_of_features(&values, &dims);
            let both = largest.iter_mut().zip(of_layer);
            both.for_each(|(largest, own)| *largest = largest.max(own));
        }
        let shared = balance(known.features(), &largest, alpha);
        for (layer, _) in layers {
            factors.insert(layer.clone(), shared.clone());
        }
    }
    Ok(factors)
}
