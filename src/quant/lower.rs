//! Lowers annotated contractions: operands become integers with scales, and scales are applied to the product.

use crate::dtype::DType;
use crate::graph::RoundingStream;
use crate::graph::random::{RandomKey, rounding_noise};
use crate::graph::scopes::RANGE_FINDING;
use crate::graph::{
    Builder, Comparison, Composite, Contraction, ContractionQuant, Granularity, Graph, GraphError,
    Node, NumericsConvention, Op, Range, Reduction, Rounding, Tensor, TensorFormat, Unary,
};
use crate::shard::LOCAL_SHARDS;

use super::QuantError;
use super::stored::{is_stored, with_stored_weights};

type Result<T> = std::result::Result<T, GraphError>;

/// The input that seeds stochastic rounding: `u32[2]`, another value each step.
pub const ROUNDING_KEY: &str = "rounding_key";

/// Where stochastic rounding takes its noise from.
///
/// It gets a builder at the contraction's scope and the sizes of what is rounded, and gives `f32` of those sizes,
/// uniform in [-0.5, 0.5).
pub type NoiseSource<'a> = dyn FnMut(&Builder, &[usize]) -> Result<Tensor> + 'a;

/// The graph with every annotated contraction in the formats of its annotation; stochastic rounding draws from the
/// graph's input [`ROUNDING_KEY`], a stream of its own for each use.
///
/// Range finding, rounding and the scaled product are composites; quantized weights are marked as stored.
///
/// # Errors
/// When a contraction rounds stochastically and the graph has no [`ROUNDING_KEY`] input, or its first contracting
/// dimension does not divide into the local shards.
pub fn lower(graph: &Graph) -> std::result::Result<Graph, QuantError> {
    let key_input = graph
        .inputs
        .iter()
        .find(|i| i.name == ROUNDING_KEY)
        .cloned();
    let mut stream = 0;
    lower_with_noise(graph, &mut |b, dims| {
        let Some(input) = &key_input else {
            return Err(b.invalid(format!(
                "stochastic rounding needs the input {ROUNDING_KEY} (u32[2]) in this program"
            )));
        };
        let words = b.declare(input.clone())?;
        stream += 1;
        let stream = RoundingStream(stream);
        let kind = Composite::RoundingNoise {
            stream,
            dims: dims.to_vec(),
        };
        b.composite(kind, &[words], |b, operands| {
            let word = |i| b.reshape(b.slice_dim(operands[0], 0, i, i + 1)?, &[]);
            let key = RandomKey {
                high: word(0)?,
                low: word(1)?,
            };
            rounding_noise(b, key, stream, dims)
        })
    })
}

/// [`lower`] with another source of rounding noise, such as inputs of the program.
///
/// # Errors
/// Errors of `noise`, and when a first contracting dimension does not divide into the local shards.
pub fn lower_with_noise(
    graph: &Graph,
    noise: &mut NoiseSource<'_>,
) -> std::result::Result<Graph, QuantError> {
    // A kernel for a composite would not compute what an annotation within it asks for.
    let graph = graph.inline_composites(&|_, body| body.nodes.iter().any(is_annotated));
    let (graph, stored) = with_stored_weights(graph)?;
    let of_weights = graph.weight_only();
    let lowered = graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let (contraction, result, quant) = match &node.op {
            Op::DotGeneral {
                dims,
                result,
                quant: Some(quant),
            } => (Contraction::Dot(dims.clone()), *result, quant),
            Op::Convolution {
                dims,
                result,
                quant: Some(quant),
            } => (Contraction::Convolution(dims.clone()), *result, quant),
            _ => return Ok(None),
        };
        let operand = |i: usize| {
            let id = node.operands[i];
            let quantized = [quant.forward.lhs, quant.forward.rhs][i];
            let stored = stored.get(&id).filter(|_| quantized.is_some_and(is_stored));
            Ok::<_, GraphError>(match stored {
                Some(weight) => Operand {
                    values: copies[weight.node as usize],
                    is_weight: true,
                    scale: Some(b.declare(weight.scale.clone())?),
                },
                None => Operand {
                    values: copies[id as usize],
                    is_weight: of_weights[id as usize],
                    scale: None,
                },
            })
        };
        let operands = [operand(0)?, operand(1)?];
        Lowering { b, noise }
            .contraction(contraction, operands, result, &quant.forward)
            .map(Some)
    })?;
    Ok(lowered)
}

fn is_annotated(node: &Node) -> bool {
    matches!(
        node.op,
        Op::DotGeneral { quant: Some(_), .. } | Op::Convolution { quant: Some(_), .. }
    )
}

/// One operand of a contraction.
#[derive(Clone, Copy)]
struct Operand {
    values: Tensor,
    /// Whether it is computed from weights alone.
    is_weight: bool,
    /// The scale, where the values are integers of the checkpoint.
    scale: Option<Tensor>,
}

/// An operand as the contraction multiplies it.
struct Quantized {
    values: Tensor,
    /// One for each index of the kept dimensions, in ascending order; `None` where values are floats.
    scale: Option<Tensor>,
}

/// Lowers one contraction, at its scope.
struct Lowering<'a, 'n> {
    b: &'a Builder,
    noise: &'a mut NoiseSource<'n>,
}

impl Lowering<'_, '_> {
    fn contraction(
        &mut self,
        mut contraction: Contraction,
        [mut lhs, mut rhs]: [Operand; 2],
        result: DType,
        quant: &ContractionQuant,
    ) -> Result<Tensor> {
        let b = self.b;
        let shards = quant.local_shards;
        match &mut contraction {
            Contraction::Dot(dims) if shards > 1 => {
                let (batch, contract) = (&mut dims.lhs_batch, &mut dims.lhs_contract);
                lhs.values = split_contraction(b, lhs.values, batch, contract, shards)?;
                let (batch, contract) = (&mut dims.rhs_batch, &mut dims.rhs_contract);
                rhs.values = split_contraction(b, rhs.values, batch, contract, shards)?;
            }
            Contraction::Convolution(dims) if dims.batch_groups > 1 => {
                return Err(b.invalid(
                    "a convolution with batch groups cannot have one scale a batch element",
                ));
            }
            _ => {}
        }
        let ranks = [lhs, rhs].map(|operand| b.dims(operand.values).len());
        let kept = contraction.kept(ranks);
        let l = self.operand(lhs, &kept[0], quant.lhs, &contraction)?;
        let r = self.operand(rhs, &kept[1], quant.rhs, &contraction)?;
        let kind = Composite::ScaledContraction {
            contraction: contraction.clone(),
            lhs_scale: l.scale.is_some(),
            rhs_scale: r.scale.is_some(),
        };
        let mut operands = vec![l.values, r.values];
        operands.extend(l.scale);
        operands.extend(r.scale);
        let product = |b: &Builder, operands: &[Tensor]| {
            let scaled = [l.scale.is_some(), r.scale.is_some()];
            scaled_product(b, operands, &contraction, scaled, result)
        };
        if shards == 1 {
            return b.composite(kind, &operands, product);
        }
        let partial = product(b, &operands)?;
        let mut axes = vec![None; b.dims(partial).len()];
        axes[0] = Some(LOCAL_SHARDS);
        b.sum(b.constrain(partial, &axes)?, &[0])
    }

    fn operand(
        &mut self,
        operand: Operand,
        kept: &[usize],
        format: Option<TensorFormat>,
        contraction: &Contraction,
    ) -> Result<Quantized> {
        let b = self.b;
        let x = operand.values;
        let Some(format) = format else {
            return Ok(Quantized {
                values: x,
                scale: None,
            });
        };
        if let Some(scale) = operand.scale {
            let sizes: Vec<usize> = kept.iter().map(|d| b.dims(x)[*d]).collect();
            return Ok(Quantized {
                values: b.stored(x)?,
                scale: Some(b.broadcast_to(scale, &sizes)?),
            });
        }
        if format.zero_point || matches!(format.granularity, Granularity::Group(_)) {
            let values = self.dequantized(operand, kept, format, contraction)?;
            return Ok(Quantized {
                values,
                scale: None,
            });
        }
        let along = match format.granularity {
            Granularity::Tensor => &[][..],
            _ => kept,
        };
        let scale = find_scale(b, x, along, format)?;
        let values = quantize(b, x, scale, along, format, self.noise)?;
        let sizes: Vec<usize> = kept.iter().map(|d| b.dims(x)[*d]).collect();
        Ok(Quantized {
            values: stored(b, values, operand.is_weight)?,
            scale: Some(b.broadcast_to(scale, &sizes)?),
        })
    }

    /// The values of a format whose scales do not leave the sum of a contraction: `(integers - zero point) * scale`,
    /// in the operand's type. What is stored of a weight is its integers.
    fn dequantized(
        &mut self,
        operand: Operand,
        kept: &[usize],
        format: TensorFormat,
        contraction: &Contraction,
    ) -> Result<Tensor> {
        let b = self.b;
        let shape = b.shape(operand.values);
        // Groups become a dimension of their own, before their elements.
        let (x, along) = match format.granularity {
            Granularity::Group(size) => {
                let at = grouped_dimension(b, kept, &shape.dims, size, contraction)?;
                let mut dims = shape.dims.clone();
                dims[at] = size;
                dims.insert(at, shape.dims[at] / size);
                let grouped = (0..dims.len()).filter(|d| *d != at + 1);
                let in_kept = |d: usize| d == at || kept.contains(&(d - usize::from(d > at)));
                let along = grouped.filter(|d| in_kept(*d)).collect();
                (b.reshape(operand.values, &dims)?, along)
            }
            Granularity::Tensor => (operand.values, Vec::new()),
            Granularity::Channel => (operand.values, kept.to_vec()),
        };
        let dims = b.dims(x);
        let spread = |t: Tensor| b.broadcast_in_dim(t, &along, &dims);
        let float = if format.zero_point {
            let affine = Affine::new(b, x, &along, format)?;
            let values = affine.quantize(b, x, &along, format.element)?;
            let values = stored(b, values, operand.is_weight)?;
            let wide = b.convert(values, DType::F32)?;
            b.mul(
                b.sub(wide, spread(affine.zero_point)?)?,
                spread(affine.scale)?,
            )?
        } else {
            let scale = find_scale(b, x, &along, format)?;
            let values = quantize(b, x, scale, &along, format, self.noise)?;
            let values = stored(b, values, operand.is_weight)?;
            let scale = b.convert(scale, DType::F32)?;
            b.mul(b.convert(values, DType::F32)?, spread(scale)?)?
        };
        b.convert(b.reshape(float, &shape.dims)?, shape.dtype)
    }
}

/// Marks the integers of a weight as what stays in memory.
fn stored(b: &Builder, values: Tensor, is_weight: bool) -> Result<Tensor> {
    match is_weight {
        true => b.stored(values),
        false => Ok(values),
    }
}

/// The contracting dimension that groups of `size` elements divide.
fn grouped_dimension(
    b: &Builder,
    kept: &[usize],
    dims: &[usize],
    size: usize,
    contraction: &Contraction,
) -> Result<usize> {
    let contracted: Vec<usize> = match contraction {
        Contraction::Dot(_) => (0..dims.len()).filter(|d| !kept.contains(d)).collect(),
        // Input channels; groups do not cross the kernel's positions.
        Contraction::Convolution(conv) => vec![conv.rhs.feature],
    };
    match contracted[..] {
        [at] if size > 0 && dims[at].is_multiple_of(size) => Ok(at),
        [at] => Err(b.invalid(format!(
            "groups of {size} do not divide the {} elements along the contracting dimension; take a group size that \
             does, or one scale a channel",
            dims[at]
        ))),
        _ => Err(b.invalid("groups need one contracting dimension")),
    }
}

/// `lhs rhs`, times the scales that follow it in `operands`, in `result`. Integers accumulate in `s32`; where one
/// operand is float, the integers of the other are converted to its type.
fn scaled_product(
    b: &Builder,
    operands: &[Tensor],
    contraction: &Contraction,
    scaled: [bool; 2],
    result: DType,
) -> Result<Tensor> {
    let (mut lhs, mut rhs) = (operands[0], operands[1]);
    let types = [b.dtype(lhs), b.dtype(rhs)];
    let floats = types.map(DType::is_float);
    let accumulator = if floats == [false; 2] {
        DType::S32
    } else {
        result
    };
    match floats {
        [true, false] => rhs = b.convert(rhs, types[0])?,
        [false, true] => lhs = b.convert(lhs, types[1])?,
        _ => {}
    }
    let ranks = [lhs, rhs].map(|t| b.dims(t).len());
    let product = b.push(Op::contraction(contraction, accumulator), &[lhs, rhs])?;
    let mut out = b.convert(product, result)?;
    let mut scales = operands[2..].iter();
    let places = contraction.places(ranks);
    for (_, places) in scaled.iter().zip(&places).filter(|(scaled, _)| **scaled) {
        let Some(scale) = scales.next() else {
            return Err(b.invalid("a scaled contraction without one of its scales"));
        };
        let scale = b.convert(*scale, result)?;
        out = b.mul(out, b.broadcast_in_dim(scale, places, &b.dims(out))?)?;
    }
    Ok(out)
}

/// The scale of `x` with one value for each index of `kept`, over all other dimensions, in the type of `x`.
///
/// Every line of `docs/quantization.md` is one operation here and rounds to `x`'s element type where it says so. Where
/// XLA would turn a division into a product with a reciprocal, the product is written: the graph then means the same
/// on the host and on every device.
fn find_scale(b: &Builder, x: Tensor, kept: &[usize], format: TensorFormat) -> Result<Tensor> {
    let kind = Composite::FindScale {
        kept: kept.to_vec(),
        format,
    };
    b.composite(kind, &[x], |b, operands| {
        let x = operands[0];
        let shape = b.shape(x);
        let reduced: Vec<usize> = (0..shape.rank()).filter(|d| !kept.contains(d)).collect();
        let absmax = match format.range {
            Range::Dynamic => {
                let range = b.at(format!("{}/{RANGE_FINDING}", b.path()));
                range.reduce(Reduction::Max, range.abs(x)?, &reduced)?
            }
            Range::Static(bits) => {
                let sizes: Vec<usize> = kept.iter().map(|d| shape.dims[*d]).collect();
                b.full(&shape.with_dims(sizes), f64::from(f32::from_bits(bits)))?
            }
            Range::Stored(_) => {
                return Err(b.invalid("a scale that is stored with its weight is not found again"));
            }
        };
        scale_of(b, absmax, format)
    })
}

/// The scale that belongs to the largest magnitudes `absmax`, in their type.
pub fn scale_of(b: &Builder, absmax: Tensor, format: TensorFormat) -> Result<Tensor> {
    let shape = b.shape(absmax);
    let one = b.full(&shape, 1.0)?;
    let absmax = match format.convention {
        NumericsConvention::Aqt => {
            let zero = b.full(&shape, 0.0)?;
            let empty = b.compare(Comparison::Eq, absmax, zero)?;
            b.select(empty, one, absmax)?
        }
        NumericsConvention::Qwix => absmax,
    };
    let (lowest, highest) = integer_range(format.element);
    let half = (highest - lowest) / 2.0;
    let scale = b.mul_scalar(b.convert(absmax, DType::F32)?, 1.0 / half)?;
    let scale = b.convert(scale, shape.dtype)?;
    match format.convention {
        NumericsConvention::Aqt => Ok(scale),
        NumericsConvention::Qwix => {
            // Qwix takes 1 where the scale is below the square root of the smallest normal number.
            let smallest = smallest_normal(shape.dtype).sqrt();
            let tiny = b.compare(Comparison::Lt, scale, b.full(&shape, smallest)?)?;
            b.select(tiny, one, scale)
        }
    }
}

/// The lowest and the highest value of an integer type.
fn integer_range(element: DType) -> (f64, f64) {
    let values = 2f64.powi(element.bits() as i32);
    match element.is_signed_int() {
        true => (-values / 2.0, values / 2.0 - 1.0),
        false => (0.0, values - 1.0),
    }
}

/// `x` as integers of `format`, by its scale along `kept`.
fn quantize(
    b: &Builder,
    x: Tensor,
    scale: Tensor,
    kept: &[usize],
    format: TensorFormat,
    noise: &mut NoiseSource<'_>,
) -> Result<Tensor> {
    let kind = Composite::Quantize {
        kept: kept.to_vec(),
        format,
    };
    let mut operands = vec![x, scale];
    if format.rounding == Rounding::Stochastic {
        operands.push(noise(b, &b.dims(x))?);
    }
    b.composite(kind, &operands, |b, operands| {
        let mut scaled = scaled_values(b, operands[0], operands[1], kept, format)?;
        if let Some(noise) = operands.get(2) {
            let noisy = b.add(b.convert(scaled, DType::F32)?, *noise)?;
            scaled = b.convert(noisy, b.dtype(operands[0]))?;
        }
        rounded(b, scaled, format)
    })
}

/// `x / scale`, in the type of `x`.
fn scaled_values(
    b: &Builder,
    x: Tensor,
    scale: Tensor,
    kept: &[usize],
    format: TensorFormat,
) -> Result<Tensor> {
    let shape = b.shape(x);
    let one = |t: Tensor| b.full(&b.shape(t), 1.0);
    match format.convention {
        NumericsConvention::Aqt => {
            let one = one(scale)?;
            let inverse = b.div(one, scale)?;
            let infinity = b.full(&b.shape(inverse), f64::INFINITY)?;
            let overflown = b.compare(Comparison::Eq, inverse, infinity)?;
            let inverse = b.select(overflown, one, inverse)?;
            b.mul(x, b.broadcast_in_dim(inverse, kept, &shape.dims)?)
        }
        NumericsConvention::Qwix => {
            let wide = b.convert(scale, DType::F32)?;
            let inverse = b.div(one(wide)?, wide)?;
            let inverse = b.broadcast_in_dim(inverse, kept, &shape.dims)?;
            b.convert(b.mul(b.convert(x, DType::F32)?, inverse)?, shape.dtype)
        }
    }
}

fn rounded(b: &Builder, scaled: Tensor, format: TensorFormat) -> Result<Tensor> {
    let (lowest, highest) = integer_range(format.element);
    let rounded = match format.convention {
        NumericsConvention::Aqt => {
            b.unary(Unary::RoundNearestEven, b.clamp(scaled, -highest, highest)?)?
        }
        NumericsConvention::Qwix => {
            b.clamp(b.unary(Unary::RoundNearestEven, scaled)?, lowest, highest)?
        }
    };
    b.convert(rounded, format.element)
}

/// Scale and zero point, both `f32`, of values between their lowest and highest: `scale = (highest - lowest) / (qmax -
/// qmin)`, at least 2^-23, and `zero_point = clamp(qmin - round(lowest / scale))`, where zero is always among the
/// values (AMD Quark's asymmetric integers).
struct Affine {
    scale: Tensor,
    zero_point: Tensor,
}

impl Affine {
    fn new(b: &Builder, x: Tensor, kept: &[usize], format: TensorFormat) -> Result<Affine> {
        if format.range != Range::Dynamic {
            return Err(b.invalid(
                "a recorded largest magnitude gives no zero point; take a symmetric format, or a dynamic range",
            ));
        }
        let (qmin, qmax) = integer_range(format.element);
        let rank = b.dims(x).len();
        let reduced: Vec<usize> = (0..rank).filter(|d| !kept.contains(d)).collect();
        let range = &b.at(format!("{}/{RANGE_FINDING}", b.path()));
        let wide = range.convert(x, DType::F32)?;
        let lowest = range.reduce(Reduction::Min, wide, &reduced)?;
        let highest = range.reduce(Reduction::Max, wide, &reduced)?;
        let zero = b.full(&b.shape(lowest), 0.0)?;
        let lowest = b.binary(crate::graph::Binary::Min, lowest, zero)?;
        let highest = b.max(highest, zero)?;
        let scale = b.mul_scalar(b.sub(highest, lowest)?, 1.0 / (qmax - qmin))?;
        let scale = b.max(scale, b.full(&b.shape(scale), 2f64.powi(-23))?)?;
        let steps = b.unary(Unary::RoundNearestEven, b.div(lowest, scale)?)?;
        let zero_point = b.sub(b.full(&b.shape(steps), qmin)?, steps)?;
        Ok(Affine {
            scale,
            zero_point: b.clamp(zero_point, qmin, qmax)?,
        })
    }

    /// `clamp(round(x / scale) + zero_point)`
    fn quantize(&self, b: &Builder, x: Tensor, kept: &[usize], element: DType) -> Result<Tensor> {
        let dims = b.dims(x);
        let spread = |t: Tensor| b.broadcast_in_dim(t, kept, &dims);
        let (qmin, qmax) = integer_range(element);
        let one = b.full(&b.shape(self.scale), 1.0)?;
        let inverse = b.div(one, self.scale)?;
        let scaled = b.mul(b.convert(x, DType::F32)?, spread(inverse)?)?;
        let steps = b.unary(Unary::RoundNearestEven, scaled)?;
        let shifted = b.add(steps, spread(self.zero_point)?)?;
        b.convert(b.clamp(shifted, qmin, qmax)?, element)
    }
}

fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-14),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Splits the first contracting dimension into `shards` parts and makes the parts the first batch dimension.
fn split_contraction(
    b: &Builder,
    x: Tensor,
    batch: &mut Vec<usize>,
    contract: &mut [usize],
    shards: usize,
) -> Result<Tensor> {
    let at = contract[0];
    let mut dims = b.dims(x);
    if !dims[at].is_multiple_of(shards) {
        return Err(b.invalid(format!(
            "quantization_local_shard_count={shards} does not divide the batch of {} that this weight gradient sums over",
            dims[at]
        )));
    }
    dims[at] /= shards;
    dims.insert(at, shards);
    for d in batch.iter_mut().chain(contract.iter_mut()) {
        if *d >= at {
            *d += 1;
        }
    }
    batch.insert(0, at);
    b.reshape(x, &dims)
}
