//! Training with rounded operands whose scales are trained or follow their ranges: fake quantization before the derivative.
//! Ranges that are found anew in every step need none of this: the derivative of a marked contraction multiplies floats.

use crate::dtype::DType;
use crate::graph::{
    Binary, Builder, Comparison, Composite, Contraction, Granularity, Graph, GraphError, Init,
    Input, InputKind, Node, Op, QuantDot, Range, Reduction, Tensor, TensorFormat, Unary,
    grouped_dims,
};
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

use super::codes::quantize_weight;
use super::low_rank::weight_behind;
use super::lower::{Integers, Place, dequantized, is_annotated};
use super::observer::Extent;
use super::rounding::{quantize, scale_of};
use super::weight::{Element, RunRounding, WeightQuantError, nearest_groups, scale_dims};

type Result<T> = std::result::Result<T, GraphError>;

const LOG_SCALE: &str = ".weight_log_scale";
const INPUT_RANGE: &str = ".input_range";

/// The name of the natural logarithm of the learned scale of the layer at `path`, as a program's input and in a checkpoint: `f32`
/// of the scale's dimensions. Steps of a fixed size, such as Adam's, then change a scale by a share of it (Jain et al. 2020,
/// "Trained quantization thresholds").
pub fn log_scale_name(path: &str) -> String {
    format!("{path}{LOG_SCALE}")
}

/// The name of the moving average of the lowest and the highest number that the layer at `path` reads, `f32[2]`, likewise.
pub fn input_range_name(path: &str) -> String {
    format!("{path}{INPUT_RANGE}")
}

/// Whether an input is the logarithm of a learned scale.
pub fn is_log_scale(name: &str) -> bool {
    name.ends_with(LOG_SCALE)
}

/// Whether an input is a range or the logarithm of a scale that training finds.
pub fn is_trained_range(name: &str) -> bool {
    is_log_scale(name) || name.ends_with(INPUT_RANGE)
}

/// How training finds the scales of what it rounds, where they are not found anew in every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FakeQuantization {
    /// Whether scales of weights are learned (LSQ).
    pub learns_scales: bool,
    /// The share of a batch's range in the moving average of an activation's (PyTorch's `averaging_constant`).
    pub averaging_constant: f64,
    /// Updates after which scales and ranges stay as they are.
    pub freeze_after: Option<u64>,
}

/// The ranges of activations in a program.
#[derive(Clone, Copy, Debug)]
pub enum ActivationRanges<'a> {
    /// They follow the activations; the input counts the updates before the step, `s32[]`.
    Follow { updates: &'a Input },
    /// They are as training left them.
    Stay,
}

impl FakeQuantization {
    /// The graph with fake quantization in place of the marks of operands whose scale is learned, or is that of a moving
    /// average: activations whose format has a stored range. Learned scales are new weights, ranges are state; results that take
    /// over its buffers come after the graph's own.
    ///
    /// # Errors
    /// When such an operand belongs to no layer with a weight, or a scale does not fit the weight.
    pub fn apply(&self, graph: &Graph, ranges: ActivationRanges<'_>) -> Result<Graph> {
        let graph = graph.inline_composites(&|_, body| body.nodes.iter().any(is_annotated));
        let mut moved: Vec<(String, Tensor)> = Vec::new();
        let graph = graph.rewrite(&mut |b, node, operands| {
            let (contraction, quant) = match &node.op {
                Op::DotGeneral {
                    dims,
                    quant: Some(quant),
                    ..
                } => (Contraction::Dot(dims.clone()), quant),
                Op::Convolution {
                    dims,
                    quant: Some(quant),
                    ..
                } => (Contraction::Convolution(dims.clone()), quant),
                _ => return Ok(None),
            };
            let mut quant = **quant;
            let mut operands = operands.to_vec();
            let weights = [0, 1].map(|side| weight_of(b, operands[side]));
            let kept = contraction.kept([0, 1].map(|side| b.dims(operands[side]).len()));
            let sides = [&mut quant.forward.lhs, &mut quant.forward.rhs];
            for (side, mark) in sides.into_iter().enumerate() {
                let Some(format) = *mark else {
                    continue;
                };
                let place = Place {
                    contraction: &contraction,
                    side,
                    kept: &kept[side],
                };
                let x = operands[side];
                operands[side] = match (&weights[side], &weights[1 - side]) {
                    (Some(weight), _) if self.learns_scales => {
                        learned(b, x, weight, format, place)?
                    }
                    (None, Some(weight)) if format.has_stored_scale() => {
                        let range = self.range(b, x, layer(b, weight)?, ranges, &mut moved)?;
                        in_range(b, x, range, format)?
                    }
                    _ => continue,
                };
                *mark = None;
            }
            let is_marked = quant.forward.lhs.is_some() || quant.forward.rhs.is_some();
            let op = with_marks(node, is_marked.then_some(quant));
            b.push(op, &operands).map(Some)
        })?;
        // The copies have the same numbers in the finished graph.
        let b = Builder::resume(graph);
        for (name, range) in moved {
            let old = b.declare(range_input(name.clone(), InputKind::State))?;
            b.output(&name, b.tensor(range.index() as u32), Some(old))?;
        }
        Ok(b.finish())
    }

    /// The range of what the layer at `path` reads.
    fn range(
        &self,
        b: &Builder,
        x: Tensor,
        path: &str,
        ranges: ActivationRanges<'_>,
        moved: &mut Vec<(String, Tensor)>,
    ) -> Result<Tensor> {
        let name = input_range_name(path);
        let ActivationRanges::Follow { updates } = ranges else {
            return b.declare(range_input(name, InputKind::Weight(Init::Zeros)));
        };
        let old = b.declare(range_input(name.clone(), InputKind::State))?;
        let all: Vec<usize> = (0..b.dims(x).len()).collect();
        let end = |kind: Reduction| {
            let end = b.convert(b.reduce(kind, x, &all)?, DType::F32)?;
            b.reshape(end, &[1])
        };
        let batch = b.concatenate(&[end(Reduction::Min)?, end(Reduction::Max)?], 0)?;
        let distance = b.mul_scalar(b.sub(batch, old)?, self.averaging_constant)?;
        // The first batch's range is the first average. A range of zeros is none.
        let largest = b.reduce(Reduction::Max, b.unary(Unary::Abs, old)?, &[0])?;
        let largest = b.broadcast_to(largest, &[2])?;
        let unknown = b.compare(Comparison::Eq, largest, b.full(&b.shape(largest), 0.0)?)?;
        let mut new = b.select(unknown, batch, b.add(old, distance)?)?;
        if let Some(last) = self.freeze_after {
            let updates = b.broadcast_to(b.declare(updates.clone())?, &[2])?;
            let last = b.full(&b.shape(updates), last as f64)?;
            let is_over = b.compare(Comparison::Ge, updates, last)?;
            let known = b.unary(Unary::Not, unknown)?;
            let stays = b.binary(Binary::And, is_over, known)?;
            new = b.select(stays, old, new)?;
        }
        moved.push((name, new));
        Ok(new)
    }
}

fn range_input(name: String, kind: InputKind) -> Input {
    Input {
        name,
        kind,
        shape: Shape::new(DType::F32, [2]),
        logical_axes: vec![None],
    }
}

/// The weight that an operand is, maybe converted.
fn weight_of(b: &Builder, x: Tensor) -> Option<Input> {
    b.with_graph(|g| weight_behind(g, x.index()).cloned())
}

/// The path of the layer whose weight it is.
fn layer<'w>(b: &Builder, weight: &'w Input) -> Result<&'w str> {
    let path = weight.name.strip_suffix(".weight");
    path.ok_or_else(|| b.invalid(format!("{} is no layer's weight", weight.name)))
}

/// The contraction `node` with these marks.
fn with_marks(node: &Node, marks: Option<QuantDot>) -> Op {
    let mut op = node.op.clone();
    if let Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } = &mut op {
        *quant = marks.map(Box::new);
    }
    op
}

/// A weight, rounded by a scale that is learned.
fn learned(
    b: &Builder,
    x: Tensor,
    weight: &Input,
    format: TensorFormat,
    place: Place<'_>,
) -> Result<Tensor> {
    let dims = &weight.shape.dims;
    let sizes = scale_dims(dims, format.granularity).ok_or_else(|| match format.granularity {
        Granularity::Group(size) if dims.len() > 1 => b.invalid(format!(
            "groups of {size} do not divide its {} input features; {}",
            dims[1],
            nearest_groups(dims[1], size)
        )),
        _ => b.invalid(format!(
            "{} {} has no such scales",
            weight.name, weight.shape
        )),
    })?;
    let (_, along) = place.along(b, &b.dims(x), format.granularity)?;
    let axes = weight.logical_axes.iter().copied().take(sizes.len());
    let scale = b.declare(Input {
        name: log_scale_name(layer(b, weight)?),
        kind: InputKind::Weight(Init::Zeros),
        logical_axes: axes.collect(),
        shape: Shape::new(DType::F32, sizes),
    })?;
    let scale = b.convert(b.exp(scale)?, b.dtype(x))?;
    fake_quantize(b, x, scale, &along, format, true)
}

/// An activation, rounded by the scale of its range.
fn in_range(b: &Builder, x: Tensor, range: Tensor, format: TensorFormat) -> Result<Tensor> {
    let end = |at: usize| b.reshape(b.slice_dim(range, 0, at, at + 1)?, &[]);
    let largest = b.max(b.neg(end(0)?)?, end(1)?)?;
    let scale = scale_of(b, b.convert(largest, b.dtype(x))?, format)?;
    fake_quantize(b, x, scale, &[], format, false)
}

/// `x` rounded to `format` by its scale, which lies `along` dimensions of it, and widened again, in its own type: what a program
/// multiplies in which it is stored so. Scales are in the type of x. The derivative is that of
/// [`Composite::FakeQuantize`].
///
/// # Errors
/// When the scale does not fit x, or the format's numbers are not made by a program.
pub fn fake_quantize(
    b: &Builder,
    x: Tensor,
    scale: Tensor,
    along: &[usize],
    format: TensorFormat,
    learned: bool,
) -> Result<Tensor> {
    let kind = Composite::FakeQuantize {
        along: along.to_vec(),
        format,
        learned,
    };
    b.composite(kind, &[x, scale], |b, operands| {
        let (x, scale) = (operands[0], operands[1]);
        let dims = b.dims(x);
        let (split, places) = grouped_dims(&dims, along, &b.dims(scale));
        let parts = b.reshape(x, &split)?;
        let none = &mut |b: &Builder, _: &[usize]| {
            Err(b.invalid("scales that training finds are not for stochastic rounding"))
        };
        let values = quantize(b, parts, scale, &places, format, none)?;
        let integers = Integers {
            values: b.reshape(values, &dims)?,
            scale,
            zero_point: None,
            tensor_scale: None,
            along: along.to_vec(),
        };
        dequantized(b, &integers, format, b.dtype(x))
    })
}

/// Whether scales of weights in this format are learned: of numbers around zero that a program rounds to.
pub fn is_learnable(format: TensorFormat) -> bool {
    format.convention.is_of_programs() && !format.zero_point && !format.has_stored_scale()
}

/// The logarithms from which the scales of a weight are learned: of those that its ranges have. The weight is of the type that
/// is multiplied.
///
/// # Errors
/// As [`quantize_weight`].
pub fn initial_log_scale(
    weight: &HostTensor,
    format: TensorFormat,
) -> std::result::Result<HostTensor, WeightQuantError> {
    let scale = quantize_weight(weight, format)?.scale;
    let dtype = scale.shape.dtype;
    let logs = scale.to_f32_vec().and_then(|scales| {
        let logs: Vec<f32> = scales.iter().map(|scale| scale.ln()).collect();
        HostTensor::from_f32(scale.shape.dims.clone(), &logs)
    });
    logs.map_err(|_| WeightQuantError::Unsupported { dtype })
}

/// The scale of an activation in `format` between these ends, as [`FakeQuantization`] makes it of a moving average, in `f32`.
pub fn scale_of_range([lowest, highest]: [f32; 2], format: TensorFormat) -> f32 {
    let extent = Extent { lowest, highest }.in_format(format);
    let scale = match format.range {
        Range::Stored(DType::BF16) => RunRounding::new::<[u8; 2]>(bf16(extent), format),
        _ => RunRounding::new::<[u8; 4]>(extent, format),
    };
    scale.parameters().0
}

/// The range in bfloat16, as a program converts it.
fn bf16(extent: Extent) -> Extent {
    Extent {
        lowest: <[u8; 2]>::rounded(extent.lowest),
        highest: <[u8; 2]>::rounded(extent.highest),
    }
}
