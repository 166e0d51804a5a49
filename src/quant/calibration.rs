//! Calibration: statistics of the activations that layers read. A pass adds them to a program as results, reduced where
//! it runs, and they are summed up over its runs; no activation is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{
    Binary, Builder, Contraction, DotDims, Granularity, Graph, GraphError, Node, Op, Range,
    Reduction, ScatterDims, ScatterKind, Tensor, TensorFormat,
};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::shape::Shape;

use super::lower::{Place, rounded_activation};
use super::observer::{Extent, MovingRange, Observer, ObserverKind};
use super::reads::joined_inputs;
use super::sensitivity::{LayerActivity, WatchedLayer, layer_results};
use super::weight::{Element, RunRounding};

/// Names of the results.
mod names {
    /// `f32[activations, 2]`: the lowest and the highest value of each.
    pub const RANGES: &str = "statistics/ranges";
    /// `f32[features of all activations]`: the largest magnitude of each feature.
    pub const FEATURES: &str = "statistics/features";
    /// `f32[features of all activations]`: the mean square of each feature.
    pub const SQUARES: &str = "statistics/squares";
    /// `f32[features of all activations]`: the mean magnitude of each feature.
    pub const MAGNITUDES: &str = "statistics/magnitudes";
    /// `s32[activations, BINS]`: how many values of each are in each bin.
    pub const COUNTS: &str = "statistics/counts";
    /// `f32[features of all roundings]`: the mean square of what rounding leaves of each feature.
    pub const ROUNDINGS: &str = "statistics/roundings";
    /// `f32[features, features]` of one activation, whose number follows: the mean of `x^T x`.
    pub const HESSIAN: &str = "statistics/hessian";
}

/// Magnitudes from 2^-32 to 2^32 have a bin each, those of bf16; smaller ones share that of zero. Half of the bins are for
/// negative numbers.
const BINS: usize = 2 * MAGNITUDES;
const MAGNITUDES: usize = 64 << 7;
/// The bits of 2^-32 as bf16.
const FIRST: u32 = (127 - 32) << 7;

/// Why calibration gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    #[error(
        "calibration captured nothing: no denoising step ran; give it prompts and at least one step"
    )]
    Nothing,
    #[error(
        "{layer}: its input has NaN or infinity in step {step} of calibration; take float32 as activations_dtype, or leave \
         the layer in float by a rule of quant_rules"
    )]
    NotFinite { layer: String, step: usize },
    #[error("calibration did not see the inputs of {layer}")]
    NoLayer { layer: String },
    #[error(transparent)]
    Host(#[from] HostTensorError),
}

/// The layers whose inputs are watched.
#[derive(Clone, Debug)]
pub struct Watch {
    /// The root scope of their model, e.g. `unet/`.
    pub model: String,
    /// Their paths below it.
    pub layers: BTreeSet<String>,
    /// Whether values are counted. Without, there are the lowest and highest ones, and each feature's.
    pub counts: bool,
    /// Those of them that are linear and whose features are correlated: GPTQ reads that.
    pub hessians: BTreeSet<String>,
    /// Whether the program is differentiated: [`super::LayerActivity`] then has gains, and all of it for each step.
    pub gains: bool,
    /// Formats with scales that are found at run time, by the layers for whose activations it is told what rounding to them
    /// leaves. Groups that do not divide an activation are left out.
    pub roundings: BTreeMap<String, Vec<TensorFormat>>,
}

/// What a program tells of its activations, in the order in which it computes them.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// The features of each.
    features: Vec<usize>,
    /// Which activation a layer reads.
    of_layer: BTreeMap<String, usize>,
    /// Of layers whose activation is two joined ones the features of the first.
    joined: BTreeMap<String, usize>,
    /// In the order of their results.
    layers: Vec<WatchedLayer>,
    gains: bool,
    counts: bool,
    /// The activations whose features are correlated.
    hessians: BTreeSet<usize>,
    /// The activations that are rounded, in the order of their results.
    rounded: Vec<usize>,
    /// The places in `rounded` of a layer's formats.
    roundings: BTreeMap<String, Vec<(TensorFormat, usize)>>,
}

impl Watched {
    /// Bytes of the correlations of all activations.
    pub fn hessian_bytes(&self) -> u64 {
        let sizes = self.hessians.iter().map(|at| self.features[*at] as u64);
        sizes.map(|size| 4 * size * size).sum()
    }

    /// The layers that read activation `at`.
    fn readers(&self, at: usize) -> impl Iterator<Item = &String> {
        let readers = self.of_layer.iter().filter(move |(_, read)| **read == at);
        readers.map(|(layer, _)| layer)
    }
}

/// The graph with statistics of what the layers read as further results, after its own. Layers that read the same value
/// share them.
///
/// # Errors
/// When a layer is no dot or convolution of an activation with a weight.
pub fn watch(graph: Graph, watch: &Watch) -> Result<(Graph, Watched), GraphError> {
    let of_weights = graph.weight_only();
    let mut watched = Watched {
        counts: watch.counts,
        gains: watch.gains,
        joined: joined_inputs(&graph, &watch.model),
        ..Watched::default()
    };
    let mut computed = Vec::new();
    let mut roundings = Roundings::default();
    let mut activations: Vec<(u32, usize)> = Vec::new();
    for (id, node) in graph.nodes.iter().enumerate() {
        let path = graph.path(node).strip_prefix(&watch.model);
        let Some(path) = path.filter(|path| watch.layers.contains(*path)) else {
            continue;
        };
        if !matches!(node.op, Op::DotGeneral { .. } | Op::Convolution { .. }) {
            continue;
        }
        let known = [0, 1].map(|at| of_weights[node.operands[at] as usize]);
        let at = match known {
            [false, true] => 0,
            [true, false] => 1,
            _ => continue,
        };
        let feature = match (&node.op, at) {
            (Op::Convolution { dims, .. }, 0) => dims.lhs.feature,
            (Op::DotGeneral { dims, .. }, _) => {
                match [&dims.lhs_contract, &dims.rhs_contract][at][..] {
                    [feature] => feature,
                    _ => continue,
                }
            }
            _ => continue,
        };
        let read = (node.operands[at], feature);
        let place = activations.iter().position(|known| *known == read);
        let place = place.unwrap_or_else(|| {
            activations.push(read);
            let shape = &graph.nodes[read.0 as usize].shape;
            watched.features.push(shape.dims[feature]);
            activations.len() - 1
        });
        if watch.hessians.contains(path) && matches!(node.op, Op::DotGeneral { .. }) {
            watched.hessians.insert(place);
        }
        if watched.of_layer.insert(path.to_owned(), place).is_none() {
            computed.push((path.to_owned(), id as u32, at));
            let formats = watch.roundings.get(path).into_iter().flatten();
            let features = watched.features[place];
            let formats = formats.filter(|format| divides(**format, features));
            let known: Vec<_> = formats
                .map(|format| (*format, roundings.place(&graph, node, at, place, *format)))
                .collect();
            watched.roundings.insert(path.to_owned(), known);
        }
    }
    let unseen = |layer: &&String| !watched.of_layer.contains_key(*layer);
    if let Some(layer) = watch.layers.iter().find(unseen) {
        let reason = format!("{layer} multiplies no activation with a weight");
        return Err(Builder::new()
            .at(watch.model.trim_end_matches('/'))
            .invalid(reason));
    }
    let b = Builder::resume(graph);
    let of_each = activations
        .iter()
        .map(|(node, feature)| statistics(&b.root("statistics"), b.tensor(*node), *feature));
    let of_each = of_each.collect::<Result<Vec<_>, _>>()?;
    let b = b.root("statistics");
    let joined = |which: usize| {
        let parts: Vec<Tensor> = of_each.iter().map(|parts| parts[which]).collect();
        b.concatenate(&parts, 0)
    };
    if !activations.is_empty() {
        b.output(names::RANGES, joined(0)?, None)?;
        b.output(names::FEATURES, joined(1)?, None)?;
        b.output(names::SQUARES, joined(2)?, None)?;
        b.output(names::MAGNITUDES, joined(3)?, None)?;
        watched.layers = layer_results(&b, &computed, watch.gains)?;
    }
    watched.rounded = roundings
        .0
        .iter()
        .map(|rounding| rounding.activation)
        .collect();
    if !roundings.0.is_empty() {
        let each = roundings.0.iter().map(|rounding| {
            let (node, feature) = activations[rounding.activation];
            rounding.errors(&b, b.tensor(node), feature)
        });
        let each = each.collect::<Result<Vec<_>, _>>()?;
        b.output(names::ROUNDINGS, b.concatenate(&each, 0)?, None)?;
    }
    if watch.counts && !activations.is_empty() {
        let counts = activations
            .iter()
            .map(|(node, _)| counts(&b, b.tensor(*node)));
        let counts = counts.collect::<Result<Vec<_>, _>>()?;
        b.output(names::COUNTS, b.concatenate(&counts, 0)?, None)?;
    }
    for at in &watched.hessians {
        let (node, feature) = activations[*at];
        let hessian = correlation(&b, b.tensor(node), feature)?;
        b.output(&format!("{}/{at}", names::HESSIAN), hessian, None)?;
    }
    Ok((b.finish(), watched))
}

/// Whether an activation of so many features has the format.
fn divides(format: TensorFormat, features: usize) -> bool {
    match format.granularity {
        Granularity::Group(size) => size > 0 && features.is_multiple_of(size),
        Granularity::Tensor | Granularity::Channel | Granularity::Part(_) => true,
        Granularity::Feature => false,
    }
}

/// An activation that is rounded as a contraction would round it.
struct Rounding {
    activation: usize,
    format: TensorFormat,
    contraction: Contraction,
    /// Which operand it is, and its dimensions along which scales of channels lie.
    side: usize,
    kept: Vec<usize>,
}

/// Those of a program. Layers that would round the same alike share one.
#[derive(Default)]
struct Roundings(Vec<Rounding>);

impl Roundings {
    /// The place of the rounding of operand `side` of a contraction, which is the activation number `activation`.
    fn place(
        &mut self,
        graph: &Graph,
        node: &Node,
        side: usize,
        activation: usize,
        format: TensorFormat,
    ) -> usize {
        let contraction = match &node.op {
            Op::Convolution { dims, .. } => Contraction::Convolution(dims.clone()),
            Op::DotGeneral { dims, .. } => Contraction::Dot(dims.clone()),
            _ => Contraction::Dot(DotDims::default()),
        };
        let ranks = [0, 1].map(|at| graph.nodes[node.operands[at] as usize].shape.rank());
        let kept = contraction.kept(ranks)[side].clone();
        let is_convolution = |c: &Contraction| matches!(c, Contraction::Convolution(_));
        let alike = self.0.iter().position(|known| {
            known.activation == activation
                && known.format == format
                && known.kept == kept
                && is_convolution(&known.contraction) == is_convolution(&contraction)
        });
        alike.unwrap_or_else(|| {
            self.0.push(Rounding {
                activation,
                format,
                contraction,
                side,
                kept,
            });
            self.0.len() - 1
        })
    }
}

impl Rounding {
    /// The mean square of what rounding leaves of each feature of `x`, `f32[features]`.
    fn errors(&self, b: &Builder, x: Tensor, feature: usize) -> Result<Tensor, GraphError> {
        let place = Place {
            contraction: &self.contraction,
            side: self.side,
            kept: &self.kept,
        };
        let rounded = rounded_activation(b, x, place, self.format)?;
        let error = b.sub(b.convert(x, DType::F32)?, rounded)?;
        let others: Vec<usize> = (0..b.dims(x).len()).filter(|d| *d != feature).collect();
        let count: usize = others.iter().map(|d| b.dims(x)[*d]).product();
        b.mul_scalar(b.sum(b.square(error)?, &others)?, 1.0 / count as f64)
    }
}

/// The mean of `x^T x` over all but the features of an activation, `f32[features, features]`.
fn correlation(b: &Builder, x: Tensor, feature: usize) -> Result<Tensor, GraphError> {
    let others: Vec<usize> = (0..b.dims(x).len()).filter(|d| *d != feature).collect();
    let count: usize = others.iter().map(|d| b.dims(x)[*d]).product();
    let dims = DotDims {
        lhs_contract: others.clone(),
        rhs_contract: others,
        ..DotDims::default()
    };
    let sum = b.dot_general(x, x, dims, DType::F32)?;
    b.mul_scalar(sum, 1.0 / count as f64)
}

/// The range `f32[1, 2]`, and the largest magnitude, the mean square and the mean magnitude of each feature, of one activation.
fn statistics(b: &Builder, x: Tensor, feature: usize) -> Result<[Tensor; 4], GraphError> {
    let rank = b.dims(x).len();
    let all: Vec<usize> = (0..rank).collect();
    let others: Vec<usize> = (0..rank).filter(|d| *d != feature).collect();
    let end = |kind: Reduction| -> Result<Tensor, GraphError> {
        let end = b.convert(b.reduce(kind, x, &all)?, DType::F32)?;
        b.reshape(end, &[1, 1])
    };
    let range = b.concatenate(&[end(Reduction::Min)?, end(Reduction::Max)?], 1)?;
    let features = b.reduce(Reduction::Max, b.abs(x)?, &others)?;
    let count: usize = others.iter().map(|d| b.dims(x)[*d]).product();
    let wide = b.convert(x, DType::F32)?;
    let mean = |of: Tensor| b.mul_scalar(b.sum(of, &others)?, 1.0 / count as f64);
    let [squares, magnitudes] = [mean(b.square(wide)?)?, mean(b.abs(wide)?)?];
    Ok([range, b.convert(features, DType::F32)?, squares, magnitudes])
}

/// How many values are in each bin, `s32[1, BINS]`.
fn counts(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let count = b.shape(x).count();
    let rounded = b.convert(b.convert(x, DType::BF16)?, DType::F32)?;
    let bits = b.push(Op::BitcastConvert(DType::U32), &[rounded])?;
    let bits = b.reshape(bits, &[count])?;
    let full = |value: u32| b.full(&b.shape(bits), f64::from(value));
    let high = b.binary(Binary::ShiftRightLogical, bits, full(16)?)?;
    let magnitude = b.binary(Binary::And, high, full(0x7fff)?)?;
    let sign = b.binary(Binary::ShiftRightLogical, high, full(15)?)?;
    let last = FIRST + MAGNITUDES as u32 - 1;
    let magnitude = b.min(b.max(magnitude, full(FIRST)?)?, full(last)?)?;
    let bin = b.sub(magnitude, full(FIRST)?)?;
    let bin = b.add(bin, b.mul(sign, full(MAGNITUDES as u32)?)?)?;
    let bin = b.reshape(b.convert(bin, DType::S32)?, &[count, 1])?;
    let zeros = b.full(&Shape::new(DType::S32, [BINS]), 0.0)?;
    let ones = b.full(&Shape::new(DType::S32, [count]), 1.0)?;
    let dims = ScatterDims {
        update_window_dims: Vec::new(),
        inserted_window_dims: vec![0],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 1,
    };
    let counts = b.scatter(ScatterKind::Add, zeros, bin, ones, dims)?;
    b.reshape(counts, &[1, BINS])
}

/// The number that a bin is of.
fn value_of(bin: usize) -> f32 {
    let magnitude = bin % MAGNITUDES;
    let value = match magnitude {
        0 => 0.0,
        _ => f32::from_bits((FIRST + magnitude as u32) << 16),
    };
    if bin < MAGNITUDES { value } else { -value }
}

/// What is known of one activation.
#[derive(Clone, Debug, Default)]
pub struct ActivationStatistics {
    lowest: f32,
    highest: f32,
    moving: MovingRange,
    /// The largest magnitude of each feature.
    features: Vec<f32>,
    /// The sum over runs of each feature's mean square.
    squares: Vec<f64>,
    /// The sum over runs of each feature's mean magnitude.
    magnitudes: Vec<f64>,
    /// The squares for each step, where the program is differentiated.
    of_steps: Vec<Vec<f32>>,
    steps: usize,
    /// Empty where values are not counted.
    counts: Vec<u64>,
    /// The sum over steps of the mean of `x^T x`; empty where features are not correlated.
    correlations: Arc<Vec<f32>>,
}

impl ActivationStatistics {
    /// The lowest and the highest value of all steps.
    pub fn range(&self) -> [f32; 2] {
        [self.lowest, self.highest]
    }

    /// The largest magnitude of each feature.
    pub fn features(&self) -> &[f32] {
        &self.features
    }

    /// The mean square of each feature.
    pub fn squares(&self) -> Vec<f32> {
        self.mean(&self.squares)
    }

    /// The mean magnitude of each feature.
    pub fn magnitudes(&self) -> Vec<f32> {
        self.mean(&self.magnitudes)
    }

    fn mean(&self, sums: &[f64]) -> Vec<f32> {
        let steps = self.steps.max(1) as f64;
        sums.iter().map(|sum| (sum / steps) as f32).collect()
    }

    /// `x^T x`, `[features, features]`, up to a factor, which GPTQ does not depend on; `None` where it was not asked for.
    pub fn hessian(&self) -> Option<Arc<Vec<f32>>> {
        (!self.correlations.is_empty()).then(|| self.correlations.clone())
    }

    /// The scale of the range that `observer` finds, for a format with one scale. It is of the type of the format's range
    /// [`Range::Stored`].
    pub fn scale(&self, observer: Observer, format: TensorFormat) -> f32 {
        match format.range {
            Range::Stored(DType::BF16) => self.scale_in::<[u8; 2]>(observer, format),
            Range::Stored(_) | Range::Dynamic | Range::Static(_) => {
                self.scale_in::<[u8; 4]>(observer, format)
            }
        }
    }

    fn scale_in<T: Element>(&self, observer: Observer, format: TensorFormat) -> f32 {
        let [lowest, highest] = match observer.kind {
            ObserverKind::Ema => self.moving.range(),
            _ => self.range(),
        };
        let whole = Extent { lowest, highest }.in_format(format);
        let counts = self.counts.iter().enumerate();
        let counts = counts.filter(|(_, count)| **count > 0);
        let values = counts.map(|(bin, count)| {
            // The ends are known exactly.
            (
                value_of(bin).clamp(self.lowest, self.highest),
                *count as f64,
            )
        });
        let mut tried = |extent: Extent| {
            let rounding = RunRounding::new::<T>(extent, format);
            let errors = values.clone().map(|(x, count)| {
                let bytes = T::bytes(&[x]);
                rounding.run(T::all(&bytes), &mut [0]).noise * count
            });
            (rounding.parameters().0, errors.sum())
        };
        let extent = observer.extent(whole, values.clone(), &mut tried, format);
        RunRounding::new::<T>(extent, format).parameters().0
    }
}

/// The statistics of a program's runs.
#[derive(Clone, Debug)]
pub struct Statistics {
    watched: Watched,
    activations: Vec<ActivationStatistics>,
    steps: usize,
    /// Of each step, how often the program ran.
    runs: Vec<usize>,
    /// Of each layer.
    layers: Vec<LayerSums>,
    /// The sums over the runs of each step of what each rounding leaves.
    roundings: Vec<Vec<Vec<f32>>>,
}

/// The sums over the runs of each step of what a layer's results say of it.
#[derive(Clone, Debug, Default)]
struct LayerSums {
    /// The mean square of what it computes.
    outputs: Vec<f64>,
    /// [`LayerActivity::gains`]; empty where the program is not differentiated.
    gains: Vec<Vec<f32>>,
}

impl Statistics {
    /// Of a program that has not run.
    pub fn new(watched: Watched) -> Statistics {
        let each = watched.features.iter().enumerate();
        let activations = each.map(|(at, features)| ActivationStatistics {
            lowest: f32::INFINITY,
            highest: f32::NEG_INFINITY,
            features: vec![0.0; *features],
            squares: vec![0.0; *features],
            magnitudes: vec![0.0; *features],
            counts: vec![0; if watched.counts { BINS } else { 0 }],
            correlations: match watched.hessians.contains(&at) {
                true => Arc::new(vec![0.0; features * features]),
                false => Arc::default(),
            },
            ..ActivationStatistics::default()
        });
        Statistics {
            activations: activations.collect(),
            layers: vec![LayerSums::default(); watched.layers.len()],
            roundings: vec![Vec::new(); watched.rounded.len()],
            watched,
            steps: 0,
            runs: Vec::new(),
        }
    }

    /// Runs that were added.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Adds the further results of one run, which was of the sampler's step number `step` of an image.
    ///
    /// # Errors
    /// When an activation is not finite, or there are other results.
    pub fn add(&mut self, step: usize, results: &[HostTensor]) -> Result<(), CalibrationError> {
        self.steps += 1;
        // One sum for all, where nothing is told for each step.
        let step = if self.watched.gains { step } else { 0 };
        self.runs.resize(self.runs.len().max(step + 1), 0);
        self.runs[step] += 1;
        let [ranges, features, squares, magnitudes, outputs, rest @ ..] = results else {
            return Err(CalibrationError::Nothing);
        };
        let (gains, rest) = rest.split_at(usize::from(self.watched.gains).min(rest.len()));
        self.add_layers(step, outputs, gains.first())?;
        let has_roundings = !self.watched.rounded.is_empty();
        let (roundings, rest) = rest.split_at(usize::from(has_roundings).min(rest.len()));
        self.add_roundings(step, roundings.first())?;
        let (counts, correlations) =
            rest.split_at(usize::from(self.watched.counts).min(rest.len()));
        let (ranges, features) = (ranges.to_f32_vec()?, features.to_f32_vec()?);
        let mut features = features.into_iter();
        let mut squares = squares.to_f32_vec()?.into_iter();
        let mut magnitudes = magnitudes.to_f32_vec()?.into_iter();
        let activations = self.activations.iter_mut().enumerate();
        for ((at, activation), range) in activations.zip(ranges.as_chunks().0) {
            let [lowest, highest] = *range;
            let largest = features.by_ref().take(activation.features.len());
            for (known, found) in activation.features.iter_mut().zip(largest) {
                *known = known.max(found);
            }
            let count = activation.squares.len();
            let squares: Vec<f32> = squares.by_ref().take(count).collect();
            for (sum, square) in activation.squares.iter_mut().zip(&squares) {
                *sum += f64::from(*square);
            }
            for (sum, magnitude) in activation.magnitudes.iter_mut().zip(magnitudes.by_ref()) {
                *sum += f64::from(magnitude);
            }
            if self.watched.gains {
                add_to_step(&mut activation.of_steps, step, &squares);
            }
            activation.steps += 1;
            if !lowest.is_finite() || !highest.is_finite() {
                let layer = self.watched.readers(at).next().cloned();
                return Err(CalibrationError::NotFinite {
                    layer: layer.unwrap_or_default(),
                    step: self.steps,
                });
            }
            activation.lowest = activation.lowest.min(lowest);
            activation.highest = activation.highest.max(highest);
            activation.moving.add(*range);
        }
        for (at, found) in self.watched.hessians.iter().zip(correlations) {
            let sums = Arc::make_mut(&mut self.activations[*at].correlations);
            let sums = sums.iter_mut();
            sums.zip(found.to_f32_vec()?)
                .for_each(|(sum, found)| *sum += found);
        }
        for counts in counts {
            let each = counts.data.as_chunks().0.chunks(BINS);
            for (activation, counts) in self.activations.iter_mut().zip(each) {
                for (sum, count) in activation.counts.iter_mut().zip(counts) {
                    *sum += u64::from(u32::from_le_bytes(*count));
                }
            }
        }
        Ok(())
    }

    /// Adds what a run of step number `step` says of what layers compute.
    fn add_layers(
        &mut self,
        step: usize,
        outputs: &HostTensor,
        gains: Option<&HostTensor>,
    ) -> Result<(), CalibrationError> {
        let gains = gains.map(HostTensor::to_f32_vec).transpose()?;
        let mut gains = gains.unwrap_or_default().into_iter();
        let outputs = outputs.to_f32_vec()?;
        let layers = self.layers.iter_mut().zip(&self.watched.layers);
        for ((sums, layer), output) in layers.zip(outputs) {
            sums.outputs.resize(sums.outputs.len().max(step + 1), 0.0);
            sums.outputs[step] += f64::from(output);
            if self.watched.gains {
                let own: Vec<f32> = gains.by_ref().take(layer.features).collect();
                add_to_step(&mut sums.gains, step, &own);
            }
        }
        Ok(())
    }

    /// Adds what a run of step number `step` says of activations that are rounded.
    fn add_roundings(
        &mut self,
        step: usize,
        found: Option<&HostTensor>,
    ) -> Result<(), CalibrationError> {
        let found = found.map(HostTensor::to_f32_vec).transpose()?;
        let mut found = found.unwrap_or_default().into_iter();
        for (sums, activation) in self.roundings.iter_mut().zip(&self.watched.rounded) {
            let features = self.watched.features[*activation];
            let own: Vec<f32> = found.by_ref().take(features).collect();
            add_to_step(sums, step, &own);
        }
        Ok(())
    }

    /// What the layer at `path` reads and computes in each step, and where the program is differentiated what an error of it
    /// does.
    ///
    /// # Errors
    /// As [`Statistics::of_layer`].
    pub fn activity(&self, path: &str) -> Result<LayerActivity, CalibrationError> {
        let known = self.of_layer(path)?;
        let found = self.watched.layers.iter().position(|l| l.path == path);
        let sums = found.map(|at| self.layers[at].clone()).unwrap_or_default();
        let mean = |mut steps: Vec<Vec<f32>>| {
            for (of_step, runs) in steps.iter_mut().zip(&self.runs) {
                of_step.iter_mut().for_each(|sum| *sum /= *runs as f32);
            }
            steps
        };
        let outputs = sums.outputs.iter().zip(&self.runs);
        let roundings = self.watched.roundings.get(path).into_iter().flatten();
        Ok(LayerActivity {
            roundings: roundings
                .map(|(format, at)| (*format, mean(self.roundings[*at].clone())))
                .collect(),
            squares: match self.watched.gains {
                true => mean(known.of_steps.clone()),
                false => vec![known.squares()],
            },
            outputs: outputs.map(|(sum, runs)| sum / *runs as f64).collect(),
            gains: mean(sums.gains),
        })
    }

    /// What the layer at `path` reads.
    ///
    /// # Errors
    /// When nothing ran, or the layer was not watched.
    pub fn of_layer(&self, path: &str) -> Result<&ActivationStatistics, CalibrationError> {
        if self.steps == 0 {
            return Err(CalibrationError::Nothing);
        }
        let at = self.watched.of_layer.get(path);
        let found = at.and_then(|at| self.activations.get(*at));
        found.ok_or_else(|| CalibrationError::NoLayer {
            layer: path.to_owned(),
        })
    }

    /// The largest magnitudes of both parts of what the layer at `path` reads, and the features of the first, where it reads two
    /// joined activations ([`joined_inputs`]).
    ///
    /// # Errors
    /// As [`Statistics::of_layer`].
    pub fn parts(&self, path: &str) -> Result<Option<([f32; 2], usize)>, CalibrationError> {
        let features = self.of_layer(path)?.features();
        let first = self.watched.joined.get(path).copied();
        let first = first.filter(|first| *first <= features.len());
        let largest = |part: &[f32]| part.iter().copied().fold(0.0, f32::max);
        Ok(first.map(|first| {
            let (a, b) = features.split_at(first);
            ([largest(a), largest(b)], first)
        }))
    }

    /// A number for what the layer at `path` reads: that of other layers which read the same.
    pub fn activation(&self, path: &str) -> Option<usize> {
        self.watched.of_layer.get(path).copied()
    }
}

/// Adds numbers to those of a step.
fn add_to_step(steps: &mut Vec<Vec<f32>>, step: usize, numbers: &[f32]) {
    steps.resize(steps.len().max(step + 1), Vec::new());
    let sums = &mut steps[step];
    sums.resize(numbers.len(), 0.0);
    sums.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x);
}
