//! Quantizing a published model's weights, from file to file.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::config::{Config, Loaded, ModelConfig, Place, WeightAlgorithm};
use crate::dtype::DType;
use crate::graph::{Graph, TensorFormat};
use crate::hub::RepoId;
use crate::models::{Denoiser, Family, FamilySpec, Part};
use crate::pjrt::install::TryLoad;
use crate::quant::{Action, Decision, ObserverKind, Policy, Rule, annotate};
use crate::shape::Shape;
use crate::weights::match_parameters;
use crate::weights::quantized::{Quantization, QuantizedLayout, weight_name};
use crate::weights::source::{
    ModelSource, QuantizedTensor, SourceError, WrittenPart, check_quark_layer,
};

use super::calibrate::{Run, calibrate, calibrated, check_calibration, needs_calibration};
use super::denoiser_flops::{DenoiserFlops, traced};
use super::formats::{mode_of, policy_of_quantize};
use super::layers::{is_static, stored, unet_quantization};
use super::plan::{Budget, Plan, Planning, activation_roundings, correlated, plan};
use super::qat::TrainedRanges;
use super::roundings::{Rounding, Roundings};
use super::source::{Source, denoiser, find_model};
use super::{Notice, Notify, RecipeError, precision};

/// What [`quantize`] did.
#[derive(Debug)]
pub struct QuantizeReport {
    /// The model that was quantized.
    pub source: PathBuf,
    pub family: Family,
    /// How the result is stored.
    pub stored: Quantization,
    pub parts: Vec<WrittenPart>,
    /// Every quantized tensor, by the names of layers.
    pub tensors: Vec<QuantizedTensor>,
    /// The rules in the order in which they are asked.
    pub rules: Vec<RuleMatch>,
    /// Dots and convolutions of the UNet, those of two activations included.
    pub contractions: usize,
    /// Weights of the UNet, as single numbers.
    pub parameters: usize,
    /// Bytes of the UNet in the source.
    pub source_bytes: u64,
    /// Runs of the denoiser that calibration saw; `None` without calibration.
    pub calibration_steps: Option<usize>,
    /// What calibration took: the pipeline was opened and compiled, and drew the images. `None` without calibration.
    pub calibration_seconds: Option<f64>,
    /// Operations of the denoiser; `None` where it has no samples of the recipe's size.
    pub flops: Option<DenoiserFlops>,
    /// What each algorithm treated; none of what is rounded to nearest.
    pub treated: Vec<Treated>,
    /// How formats were chosen, where there was a budget.
    pub plan: Option<Plan>,
}

/// What [`quantize`] is asked for beside the configuration.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeRequest<'a> {
    /// The new folder.
    pub output: &'a Path,
    /// Formats are chosen under it.
    pub budget: Option<Budget>,
    /// Whether calibration tells what an error of each layer does to the steps' results. A budget asks for it too.
    pub sensitivity: bool,
}

impl QuantizeRequest<'_> {
    fn is_measured(&self) -> bool {
        self.sensitivity || self.budget.is_some()
    }
}

/// The layers of one format, together.
#[derive(Clone, Copy, Debug)]
pub struct FormatSum {
    pub format: TensorFormat,
    pub layers: usize,
    /// Numbers in their weights.
    pub parameters: usize,
    /// With their scales.
    pub bytes: u64,
    /// Bytes in the source.
    pub source_bytes: u64,
    /// Operations of the layers in one run of the denoiser, where [`QuantizeReport::flops`] are known.
    pub flops: Option<u64>,
}

impl FormatSum {
    /// Bits of a weight, with its share of the scales.
    pub fn bits(&self) -> f64 {
        8.0 * self.bytes as f64 / self.parameters as f64
    }
}

/// The layers that a rule decided.
#[derive(Clone, Debug)]
pub struct RuleMatch {
    pub pattern: String,
    pub action: Action,
    pub layers: Vec<String>,
    /// Numbers in their weights.
    pub parameters: usize,
}

impl RuleMatch {
    /// The mode that it gives.
    pub fn mode(&self) -> &'static str {
        match self.action {
            Action::Float => "float",
            Action::Quantize(formats) => mode_of(&formats).name(),
        }
    }
}

/// The quantized layers that an algorithm of rounding weights treated, and those that it does not.
#[derive(Clone, Debug)]
pub struct Treated {
    pub algorithm: WeightAlgorithm,
    pub layers: usize,
    /// Convolutions that were rounded to nearest: the algorithm is one of linear layers.
    pub convolutions: Vec<String>,
}

impl QuantizeReport {
    /// What is in each format, in the order in which layers have them.
    pub fn formats(&self) -> Vec<FormatSum> {
        let mut sums: Vec<FormatSum> = Vec::new();
        for tensor in &self.tensors {
            let at = match sums.iter().position(|sum| sum.format == tensor.format) {
                Some(at) => at,
                None => {
                    sums.push(FormatSum {
                        format: tensor.format,
                        layers: 0,
                        parameters: 0,
                        bytes: 0,
                        source_bytes: 0,
                        flops: self.flops.as_ref().map(|_| 0),
                    });
                    sums.len() - 1
                }
            };
            let sum = &mut sums[at];
            sum.layers += 1;
            sum.parameters += tensor.dims.iter().product::<usize>();
            sum.bytes += tensor.bytes;
            sum.source_bytes += tensor.source_bytes;
            if let (Some(flops), Some(known)) = (&mut sum.flops, &self.flops) {
                let of_layer = known.layers.get(&tensor.layer).copied();
                *flops = flops.saturating_add(of_layer.unwrap_or(0));
            }
        }
        sums
    }

    /// Operations of the layers that stay in float, where [`QuantizeReport::flops`] are known.
    pub fn float_flops(&self) -> Option<u64> {
        let formats = self.formats();
        let quantized = formats.iter().filter_map(|sum| sum.flops);
        let quantized = quantized.fold(0, u64::saturating_add);
        Some(self.flops.as_ref()?.of_layers().saturating_sub(quantized))
    }

    /// So many operations in percent of all, where [`QuantizeReport::flops`] are known.
    pub fn percent_of_flops(&self, flops: Option<u64>) -> Option<f64> {
        Some(self.flops.as_ref()?.percent(flops?))
    }

    /// The rules without those that a plan made, of which each layer has one.
    pub fn given_rules(&self) -> impl Iterator<Item = &RuleMatch> {
        let of_plan = self.plan.as_ref().map_or(&[][..], |plan| &plan.rules.0);
        let is_given = move |rule: &&RuleMatch| of_plan.iter().all(|r| r.path != rule.pattern);
        self.rules.iter().filter(is_given)
    }

    /// Percent of the UNet's weights that are in the layers of a rule.
    pub fn percent_of_weights(&self, rule: &RuleMatch) -> f64 {
        100.0 * rule.parameters as f64 / self.parameters as f64
    }

    /// Numbers in the weights that were quantized.
    pub fn quantized_parameters(&self) -> usize {
        let sizes = self
            .tensors
            .iter()
            .map(|t| t.dims.iter().product::<usize>());
        sizes.sum()
    }

    /// Bits of a quantized weight, with its share of the scales.
    pub fn bits_of_quantized(&self) -> f64 {
        let bytes: u64 = self.tensors.iter().map(|t| t.bytes).sum();
        8.0 * bytes as f64 / self.quantized_parameters() as f64
    }

    /// Bits of a weight of the whole UNet.
    pub fn bits_of_unet(&self) -> f64 {
        let is_denoiser = |part: Part| part == self.family.spec().denoiser.part();
        let unet = self.parts.iter().find(|written| is_denoiser(written.part));
        8.0 * unet.map_or(0, |unet| unet.bytes) as f64 / self.parameters as f64
    }

    /// Bits of a weight of the UNet in the source.
    pub fn bits_of_source(&self) -> f64 {
        8.0 * self.source_bytes as f64 / self.parameters as f64
    }
}

/// Checks what the configuration alone says of quantizing. `is_measured`: calibration may also be there for what errors do.
///
/// # Errors
/// When there is no mode, or a key contradicts it.
pub fn check_quantize(config: &Config, is_measured: bool) -> Result<(), RecipeError> {
    let of_run = config.unet_config.0 != ModelConfig::Unset;
    let name = &config.pretrained_model_name_or_path;
    if !of_run && !Path::new(name).exists() && RepoId::parse(name).is_none() {
        return Err(RecipeError::Usage(format!(
            "pretrained_model_name_or_path='{name}' is neither a file or folder here nor a repository's name \
             (organization/name)"
        )));
    }
    let family = match of_run {
        true => Family::Pixels,
        false => config.model_family.unwrap_or(Family::ALL[0]),
    };
    let policy = weight_policy(config, family.spec())?;
    check_calibration(config, &policy, is_measured)
}

/// Checks what is asked for beside the configuration.
fn check_request(
    Loaded { config, given, .. }: &Loaded,
    request: &QuantizeRequest<'_>,
) -> Result<(), RecipeError> {
    let refuse = |problem: &str| Err(RecipeError::Usage(problem.to_owned()));
    let has_prompts = config.calibration.is_asked();
    if request.sensitivity && !has_prompts {
        return refuse(
            "--sensitivity tells what errors do to samples, which needs calibration: give prompts, such as calibration='{prompts: \
             [a lighthouse at sunrise, a bowl of fruit], steps: 20}'",
        );
    }
    let mut of_runs = ["hardware", "gpu_memory_fraction"].into_iter();
    if let Some(key) = of_runs.find(|key| given.place(key) == Place::CommandLine)
        && !has_prompts
    {
        return refuse(&format!(
            "{key} has no effect: `quantize` runs a model for calibration alone, and there is none; leave it out, or give calibration \
             prompts"
        ));
    }
    match (request.budget, config.quantization_candidates.0.is_empty()) {
        (None, false) => refuse(
            "quantization_candidates has no effect without a budget: give --budget-bits or --budget-bytes, or leave it out",
        ),
        (Some(Budget::Bits(bits)), _) if !(bits.is_finite() && bits > 0.0) => {
            refuse("--budget-bits: expected a number above 0")
        }
        _ => Ok(()),
    }
}

/// The policy that decides which weights are quantized.
fn weight_policy(config: &Config, family: &FamilySpec) -> Result<Policy, RecipeError> {
    let policy = policy_of_quantize(config, family, 0)?.ok_or_else(|| {
        RecipeError::Usage(
            "quantization is not set, so nothing would be quantized; give quantization=int8_w8a16 or w4a16, or quantization=int8 or fp8 \
             to compute in them as well"
                .to_owned(),
        )
    })?;
    match policy.activations {
        false => Ok(policy),
        true => Err(RecipeError::Usage(
            "use_qwix_quantization=True also quantizes products of two activations, for which a checkpoint \
             stores nothing: leave it out, or give quantization=int8_w8a16"
                .to_owned(),
        )),
    }
}

/// Quantizes the UNet of the model that `pretrained_model_name_or_path` names, and writes the model to the new folder of
/// `request` in diffusers' layout. `observe` takes how many bytes of how many are written, from 0 on.
///
/// A tensor at a time is in memory, and some that are read ahead. The folder appears when it is complete; after an
/// error there is none. `recipe_file` is the file that the configuration was read from.
///
/// # Errors
/// When there is no such model, it is quantized already, a rule matches nothing, a budget cannot be met, a weight is not finite,
/// or a file cannot be read or written.
pub fn quantize(
    loaded: &Loaded,
    recipe_file: &Path,
    request: &QuantizeRequest<'_>,
    try_load: &TryLoad<'_>,
    notify: &mut Notify<'_>,
    observe: &mut dyn FnMut(u64, u64),
) -> Result<QuantizeReport, RecipeError> {
    let config = &loaded.config;
    check_request(loaded, request)?;
    check_quantize(config, request.is_measured())?;
    let source = model_to_quantize(loaded, recipe_file, notify)?;
    let family = source.family.spec();
    let denoiser = source
        .component(family.denoiser.part())
        .map_err(RecipeError::failed)?;
    if denoiser.checkpoint.quantization().is_some() {
        let path = denoiser.checkpoint.path().to_owned();
        return Err(RecipeError::failed(SourceError::QuantizedAlready { path }));
    }
    let checkpoint = &denoiser.checkpoint;
    let mut decided = Decided::new(config, &source)?;
    let weights: Vec<(&str, &[usize])> = decided.sizes();
    match_parameters(&weights, checkpoint).map_err(RecipeError::failed)?;
    check_layout(config, &decided)?;
    let trained = TrainedRanges::of(config, denoiser)?;
    check_trained(config, request, trained.as_ref(), &decided)?;
    check_treated(config, &treated(&decided))?;
    let watch = calibrated(
        config,
        &decided.policy,
        &decided.stored,
        request.is_measured(),
        activation_roundings(config, &decided.stored, request.budget.is_some())?,
        correlated(
            config,
            &decided.stored,
            &decided.roundings,
            request.budget.is_some(),
        )?,
    );
    let started = Instant::now();
    let statistics = match watch {
        None => None,
        Some(watch) => {
            let run = Run {
                loaded,
                recipe_file,
                try_load,
                kind: family.denoiser,
            };
            Some(calibrate(&run, watch, notify)?)
        }
    };
    let calibration_seconds = statistics.as_ref().map(|_| started.elapsed().as_secs_f64());
    let planning = request.budget.map(|budget| {
        let planning = Planning {
            config,
            graph: &decided.graph,
            decisions: &decided.decisions,
            stored: &decided.stored,
            statistics: statistics.as_ref(),
            checkpoint,
        };
        plan(&planning, budget, notify)
    });
    let plan = planning.transpose()?;
    let planned = plan.as_ref().map(|plan| {
        let mut planned = config.clone();
        planned.quant_rules.0.extend(plan.rules.0.iter().cloned());
        planned
    });
    let config = planned.as_ref().unwrap_or(config);
    if planned.is_some() {
        decided = Decided::new(config, &source)?;
        check_layout(config, &decided)?;
    }
    let stored = decided.stored.clone();
    let quantization = unet_quantization(
        config,
        stored,
        &decided.roundings,
        statistics.as_ref(),
        trained.as_ref(),
        checkpoint,
    )?;
    let (parts, tensors) = source
        .write_quantized(request.output, &quantization, observe)
        .map_err(RecipeError::failed)?;
    let flops = match DenoiserFlops::of_recipe(config, &source) {
        Ok(flops) => Some(flops),
        Err(error) => {
            // What is written does not depend on the size.
            notify(Notice::Note(&format!(
                "the report has no shares of operations, which are those of the recipe's size: {error}"
            )));
            None
        }
    };
    let source_bytes = checkpoint.iter().map(|(_, shape)| shape.bytes() as u64);
    let sizes = decided.sizes();
    let sizes: HashMap<&str, usize> = sizes
        .into_iter()
        .map(|(key, dims)| (key, dims.iter().product()))
        .collect();
    Ok(QuantizeReport {
        family: source.family,
        parts,
        tensors,
        rules: rule_matches(&decided.policy, &decided.decisions, &sizes),
        contractions: decided.decisions.len(),
        parameters: sizes.values().sum(),
        source_bytes: source_bytes.sum(),
        calibration_steps: statistics.map(|statistics| statistics.steps()),
        calibration_seconds,
        flops,
        treated: treated(&decided),
        stored: quantization.stored,
        source: source.path,
        plan,
    })
}

/// What a configuration decides for a model.
struct Decided {
    policy: Policy,
    /// The denoiser for one small sample.
    graph: Graph,
    decisions: Vec<Decision>,
    roundings: Roundings,
    stored: Quantization,
}

impl Decided {
    fn new(config: &Config, source: &ModelSource) -> Result<Decided, RecipeError> {
        let policy = weight_policy(config, source.family.spec())?;
        let denoiser = denoiser(config, source)?;
        let (graph, decisions) = decisions(config, &denoiser, &policy)?;
        let roundings = Roundings::of(config, &decisions);
        Ok(Decided {
            stored: stored(config, &policy.model, &decisions, &graph, &roundings)?,
            policy,
            graph,
            decisions,
            roundings,
        })
    }

    /// The weights with their dimensions.
    fn sizes(&self) -> Vec<(&str, &[usize])> {
        let weights = self.graph.weights();
        weights
            .map(|(_, weight)| (weight.key(), weight.shape.dims.as_slice()))
            .collect()
    }
}

/// What each algorithm treats of the layers that are quantized; none of those that are rounded to nearest.
fn treated(decided: &Decided) -> Vec<Treated> {
    let sizes: HashMap<&str, &[usize]> = decided.sizes().into_iter().collect();
    let is_matrix = |layer: &str| {
        let dims = sizes.get(weight_name(layer).as_str());
        dims.is_some_and(|dims| dims.len() == 2)
    };
    let mut all: Vec<Treated> = Vec::new();
    for layer in decided.stored.layers.keys() {
        let algorithm = decided.roundings.of_layer(layer).algorithm;
        let takes = match algorithm {
            WeightAlgorithm::Nearest => continue,
            // Both are of products with matrices.
            WeightAlgorithm::Gptq | WeightAlgorithm::Awq => is_matrix(layer),
            WeightAlgorithm::Hqq => true,
        };
        let at = all.iter().position(|known| known.algorithm == algorithm);
        let at = at.unwrap_or_else(|| {
            all.push(Treated {
                algorithm,
                layers: 0,
                convolutions: Vec::new(),
            });
            all.len() - 1
        });
        match takes {
            true => all[at].layers += 1,
            false => all[at].convolutions.push(layer.clone()),
        }
    }
    all
}

/// Refuses an algorithm that treats no layer, before images are drawn for it.
fn check_treated(config: &Config, treated: &[Treated]) -> Result<(), RecipeError> {
    let algorithm = config.quantization_algorithm;
    let own = treated.iter().find(|known| known.algorithm == algorithm);
    let why = match own {
        _ if algorithm == WeightAlgorithm::Nearest => return Ok(()),
        Some(own) if own.layers > 0 => return Ok(()),
        Some(own) => format!(
            "it is one of linear layers, and all {} layers that it is to round are convolutions; quantize linear layers too, or leave \
             it out",
            own.convolutions.len()
        ),
        None => {
            "rules have other algorithms for all layers that are quantized; leave it out".to_owned()
        }
    };
    Err(RecipeError::Usage(format!(
        "quantization_algorithm={algorithm} has no effect: {why}"
    )))
}

/// Refuses what contradicts scales and ranges that training found, and static activations that have neither these nor
/// calibration.
fn check_trained(
    config: &Config,
    request: &QuantizeRequest<'_>,
    trained: Option<&TrainedRanges>,
    decided: &Decided,
) -> Result<(), RecipeError> {
    let has_prompts = config.calibration.is_asked();
    let needs_ranges = decided.stored.layers.values().any(is_static);
    let Some(trained) = trained else {
        return match needs_ranges && !has_prompts {
            true => Err(needs_calibration()),
            false => Ok(()),
        };
    };
    for (key, is_given) in [
        ("--budget-bits and --budget-bytes", request.budget.is_some()),
        ("calibration", has_prompts),
        (
            "quantization_smooth_alpha",
            config.quantization_smooth_alpha.is_some(),
        ),
        (
            "quantization_observer",
            trained.has_scales() && config.quantization_observer != ObserverKind::MinMax,
        ),
        (
            "quantization_algorithm",
            trained.has_scales() && config.quantization_algorithm != WeightAlgorithm::Nearest,
        ),
    ] {
        if is_given {
            return Err(RecipeError::Usage(format!(
                "{key}: training found the scales of this model: leave it out"
            )));
        }
    }
    if needs_ranges && !trained.has_ranges() {
        return Err(needs_calibration());
    }
    trained.check(&decided.stored, &decided.sizes())
}

/// Refuses layers that the layout does not have.
fn check_layout(config: &Config, decided: &Decided) -> Result<(), RecipeError> {
    let refuse = |layer: &str, reason: &str| {
        Err(RecipeError::Usage(format!(
            "quantized_layout=quark: {layer}: {reason}"
        )))
    };
    if config.quantized_layout == QuantizedLayout::Own {
        return Ok(());
    }
    if config.quantization_algorithm != WeightAlgorithm::Nearest
        || config.quantization_observer != ObserverKind::MinMax
    {
        return refuse(
            "quantization_algorithm and quantization_observer",
            "its description names Quark's own: leave both out",
        );
    }
    let mut rules = config.quant_rules.0.iter();
    if let Some(rule) = rules.find(|rule| Rounding::of(config, Some(*rule)) != Rounding::NEAREST) {
        return refuse(
            &rule.path,
            "its description names Quark's own algorithm and observer: leave both out",
        );
    }
    let mut ranks = BTreeSet::new();
    for (key, dims) in decided.sizes() {
        let layer = key.trim_end_matches(".weight");
        if let Some(stored) = decided.stored.layers.get(layer) {
            ranks.extend(stored.low_rank);
            let shape = Shape::new(DType::F32, dims.to_vec());
            check_quark_layer(&shape, stored).or_else(|reason| refuse(layer, &reason))?;
        }
    }
    if !ranks.is_empty() && config.svd_iterations > 1 {
        return refuse(
            "svd_iterations",
            "Quark decomposes a weight once: leave it out",
        );
    }
    match ranks.len() {
        0 | 1 => Ok(()),
        _ => {
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            refuse(
                "svd_rank",
                &format!(
                    "its description has one rank for all layers, and these have {}",
                    ranks.join(" and ")
                ),
            )
        }
    }
}

/// The model that `pretrained_model_name_or_path` names; of a recipe with a UNet of its own what `generate` would draw with.
fn model_to_quantize(
    Loaded { config, given, .. }: &Loaded,
    recipe_file: &Path,
    notify: &mut Notify<'_>,
) -> Result<ModelSource, RecipeError> {
    if config.unet_config.0 == ModelConfig::Unset {
        let mut keys = ["run_name", "output_dir"].into_iter();
        if let Some(key) = keys.find(|key| given.place(key) == Place::CommandLine) {
            return Err(RecipeError::Usage(format!(
                "{key} has no effect: `quantize` takes the model that pretrained_model_name_or_path names, or with a recipe that \
                 has a unet_config the newest checkpoint of its run; leave it out"
            )));
        }
        return Ok(find_model(config, recipe_file, notify)?.0);
    }
    match Source::find(config, recipe_file, notify)? {
        source if source.has_beside() => Err(RecipeError::Usage(format!(
            "the newest checkpoint of the run has low-rank updates or a new token, which stand beside {}: quantize that model",
            source.path().display()
        ))),
        Source::Run { dir, suffix, .. } => {
            ModelSource::of_run(&dir, suffix).map_err(RecipeError::failed)
        }
        Source::Model { source, .. } => Err(RecipeError::Usage(format!(
            "unet_config: {} is a published model, which has a UNet of its own; leave unet_config out",
            source.path.display()
        ))),
    }
}

/// The denoiser for one small sample, and what the policy's rules decide for its contractions.
fn decisions(
    config: &Config,
    denoiser: &Denoiser,
    policy: &Policy,
) -> Result<(Graph, Vec<Decision>), RecipeError> {
    let size = |name: &str| match name {
        "height" | "width" => denoiser.smallest_side(),
        _ => 1,
    };
    let b = traced(denoiser, &size, precision(config))?;
    let decisions = annotate(&b, policy).map_err(RecipeError::usage)?;
    Ok((b.finish(), decisions))
}

/// What each rule decided; `sizes` has the numbers in each weight.
fn rule_matches(
    policy: &Policy,
    decisions: &[Decision],
    sizes: &HashMap<&str, usize>,
) -> Vec<RuleMatch> {
    let of = |rule: &Rule| {
        let decided = decisions.iter();
        let decided = decided.filter(|d| d.rule.as_deref() == Some(rule.pattern()));
        let layers: Vec<String> = decided.map(|d| d.path.clone()).collect();
        let size = |layer: &String| sizes.get(weight_name(layer).as_str()).copied();
        RuleMatch {
            pattern: rule.pattern().to_owned(),
            action: rule.action(),
            parameters: layers.iter().filter_map(size).sum(),
            layers,
        }
    };
    policy.rules.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{QuantPreset, Quantization as Mode};

    /// What the rule with this pattern decides of FLUX.1 dev, and the share of the weights, in percent.
    fn matched(config: &Config, pattern: &str) -> (RuleMatch, f64) {
        let spec = Family::FluxDev.spec();
        let published = spec.published.as_ref().unwrap();
        let fields = serde_json::from_str(published.denoiser).unwrap();
        let flux = Denoiser::from_map(spec.denoiser, fields).unwrap();
        let policy = weight_policy(config, spec).unwrap();
        let (graph, decisions) = decisions(config, &flux, &policy).unwrap();
        let weights = graph.weights();
        let sizes = weights.map(|(_, weight)| (weight.key(), weight.shape.count()));
        let sizes: HashMap<&str, usize> = sizes.collect();
        let all: usize = sizes.values().sum();
        let rules = rule_matches(&policy, &decisions, &sizes);
        let rule = rules.into_iter().find(|rule| rule.pattern == pattern);
        let rule = rule.unwrap();
        let share = 100.0 * rule.parameters as f64 / all as f64;
        (rule, share)
    }

    /// The pattern `*proj_out*` of AMD Quark's guide means the last layer, and also takes one of each single block: the report says
    /// so. Our own pattern takes the last layer alone.
    #[test]
    fn quarks_pattern_for_flux_takes_a_layer_of_each_single_block() {
        let mut config = Config {
            quantization: Mode::SvdQuantW4A16,
            quantization_preset: QuantPreset::Quark,
            ..Config::default()
        };
        let (rule, share) = matched(&config, ".*proj_out.*");
        assert_eq!((rule.action, rule.mode()), (Action::Float, "float"));
        let blocks = (0..38).map(|block| format!("single_transformer_blocks.{block}.proj_out"));
        let expected: Vec<String> = blocks.chain(["proj_out".to_owned()]).collect();
        assert_eq!(rule.layers, expected);
        let (inner, last) = (3072, 64);
        assert_eq!(
            rule.parameters,
            38 * inner * (inner + 4 * inner) + inner * last
        );
        assert!((15.0..15.2).contains(&share), "{share}");

        config.quantization_preset = QuantPreset::Family;
        let (rule, share) = matched(&config, "proj_out");
        assert_eq!(rule.layers, ["proj_out"]);
        assert!(share < 0.01, "{share}");
    }
}
