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
use super::recorded::{RecordedScales, activation_feature, times_whole};
use super::stored::{is_stored, with_stored_weights};
use super::weight::{QUARK_SMALLEST, nearest_groups};

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
    let mut recorded = RecordedScales::default();
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
        let mut operand = |i: usize| {
            let id = node.operands[i];
            let quantized = [quant.forward.lhs, quant.forward.rhs][i];
            let stored = stored.get(&id).filter(|_| quantized.is_some_and(is_stored));
            Ok::<_, GraphError>(match stored {
                Some(weight) => Operand {
                    values: copies[weight.node as usize],
                    float: weight.float,
                    is_weight: true,
                    stored: Some(StoredScale {
                        scale: b.declare(weight.scale.clone())?,
                        zero_point: match &weight.zero_point {
                            Some(input) => Some(b.declare(input.clone())?),
                            None => None,
                        },
                        tensor_scale: match &weight.tensor_scale {
                            Some(input) => Some(b.declare(input.clone())?),
                            None => None,
                        },
                    }),
                    recorded: None,
                },
                None => Operand {
                    values: copies[id as usize],
                    float: graph.nodes[id as usize].shape.dtype,
                    is_weight: of_weights[id as usize],
                    stored: None,
                    recorded: match quantized {
                        Some(format) if is_stored(format) && !of_weights[id as usize] => {
                            Some(recorded.of(b, &graph, node, i, format)?)
                        }
                        _ => None,
                    },
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
    /// The type in which it is multiplied unless it is multiplied as integers.
    float: DType,
    /// Whether it is computed from weights alone.
    is_weight: bool,
    /// What belongs to values that are integers of the checkpoint.
    stored: Option<StoredScale>,
    /// The scale that calibration found for an activation.
    recorded: Option<Tensor>,
}

/// A scale of the checkpoint, and its zero point.
#[derive(Clone, Copy)]
struct StoredScale {
    scale: Tensor,
    zero_point: Option<Tensor>,
    tensor_scale: Option<Tensor>,
}

/// An operand as the contraction multiplies it.
struct Quantized {
    values: Tensor,
    /// One for each index of the kept dimensions, in ascending order; `None` where values are floats, or `whole` is it.
    scale: Option<Tensor>,
    /// The one scale of all values, known before the program runs.
    whole: Option<Tensor>,
}

/// The integers of an operand, in its shape, with the scale along some of its dimensions.
struct Integers {
    values: Tensor,
    scale: Tensor,
    zero_point: Option<Tensor>,
    /// What multiplies the scale.
    tensor_scale: Option<Tensor>,
    /// The dimensions along which scale and zero point lie, ascending; they divide those of the values.
    along: Vec<usize>,
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
        let mut l = self.operand(lhs, &kept[0], quant.lhs, &contraction)?;
        let mut r = self.operand(rhs, &kept[1], quant.rhs, &contraction)?;
        let wholes = [l.whole, r.whole];
        for (whole, other) in wholes.into_iter().zip([&mut r, &mut l]) {
            if let Some(whole) = whole {
                other.scale = Some(times_whole(b, other.scale, whole, result)?);
            }
        }
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
        let Some(format) = format else {
            return Ok(Quantized {
                values: operand.values,
                scale: None,
                whole: None,
            });
        };
        if let Some(scale) = operand.recorded {
            return self.recorded(operand.values, scale, format, contraction);
        }
        let mut integers = self.integers(operand, kept, format, contraction)?;
        if !format.scales_results() {
            let mark = |t: Tensor| stored(b, t, operand.is_weight);
            integers.scale = mark(integers.scale)?;
            integers.zero_point = integers.zero_point.map(mark).transpose()?;
            return Ok(Quantized {
                values: dequantized(b, &integers, format, operand.float)?,
                scale: None,
                whole: None,
            });
        }
        let sizes: Vec<usize> = kept.iter().map(|d| b.dims(integers.values)[*d]).collect();
        Ok(Quantized {
            scale: Some(b.broadcast_to(integers.scale, &sizes)?),
            values: integers.values,
            whole: None,
        })
    }

    /// An activation by the scale that calibration found: one for all of it, or one for each feature, which the weight
    /// has taken over.
    fn recorded(
        &mut self,
        x: Tensor,
        scale: Tensor,
        format: TensorFormat,
        contraction: &Contraction,
    ) -> Result<Quantized> {
        let b = self.b;
        let along = match format.granularity {
            Granularity::Feature => vec![activation_feature(b, contraction)?],
            _ => Vec::new(),
        };
        Ok(Quantized {
            values: quantize(b, x, scale, &along, format, self.noise)?,
            scale: None,
            whole: along.is_empty().then_some(scale),
        })
    }

    /// The integers of the checkpoint, or of values that are rounded here. Those of a weight are what is stored of it.
    fn integers(
        &mut self,
        operand: Operand,
        kept: &[usize],
        format: TensorFormat,
        contraction: &Contraction,
    ) -> Result<Integers> {
        let b = self.b;
        let dims = b.dims(operand.values);
        let grouped = match format.granularity {
            Granularity::Group(size) => {
                Some((grouped_of_size(b, kept, &dims, size, contraction)?, size))
            }
            Granularity::Tensor | Granularity::Channel => None,
            Granularity::Feature => {
                return Err(b.invalid("a scale for each feature is recorded, not found"));
            }
        };
        let along: Vec<usize> = match format.granularity {
            Granularity::Tensor => Vec::new(),
            _ => {
                let is_along =
                    |d: &usize| kept.contains(d) || grouped.is_some_and(|(g, _)| g == *d);
                (0..dims.len()).filter(is_along).collect()
            }
        };
        if let Some(stored) = operand.stored {
            return Ok(Integers {
                values: b.stored(operand.values)?,
                scale: stored.scale,
                zero_point: stored.zero_point,
                tensor_scale: stored.tensor_scale,
                along,
            });
        }
        // Groups become a dimension of their own, before their elements.
        let (x, of_x) = match grouped {
            None => (operand.values, along.clone()),
            Some((at, size)) => {
                let mut split = dims.clone();
                split[at] = size;
                split.insert(at, dims[at] / size);
                let of_x = along.iter().map(|d| d + usize::from(*d > at)).collect();
                (b.reshape(operand.values, &split)?, of_x)
            }
        };
        let (values, scale, zero_point) = match format.zero_point {
            true => {
                let affine = Affine::new(b, x, &of_x, format)?;
                let values = affine.quantize(b, x, &of_x, format.element)?;
                (values, affine.scale, Some(affine.zero_point))
            }
            false => {
                let scale = find_scale(b, x, &of_x, format)?;
                let values = quantize(b, x, scale, &of_x, format, self.noise)?;
                (values, scale, None)
            }
        };
        let values = match grouped {
            None => values,
            Some(_) => b.reshape(values, &dims)?,
        };
        Ok(Integers {
            values: stored(b, values, operand.is_weight)?,
            scale,
            zero_point,
            tensor_scale: None,
            along,
        })
    }
}

/// `(integers - zero point) * scale` in `f32`, rounded to `float`: where scales do not leave the sum of a contraction. In
/// GGUF's numerics `integers * scale + zero point`; codes of a codebook become its numbers first.
fn dequantized(
    b: &Builder,
    integers: &Integers,
    format: TensorFormat,
    float: DType,
) -> Result<Tensor> {
    let kind = Composite::Dequantize {
        along: integers.along.clone(),
        zero_point: integers.zero_point.is_some(),
        result: float,
    };
    let scale = match integers.tensor_scale {
        None => integers.scale,
        Some(one) => {
            let wide = b.convert(integers.scale, DType::F32)?;
            b.mul(wide, b.broadcast_to(one, &b.dims(wide))?)?
        }
    };
    let mut operands = vec![integers.values, scale];
    operands.extend(integers.zero_point);
    let along = &integers.along;
    b.composite(kind, &operands, |b, operands| {
        let shape = b.shape(operands[0]);
        // A dimension with groups becomes two.
        let sizes = b.dims(operands[1]);
        let (mut split, mut places) = (Vec::new(), Vec::new());
        for (d, size) in shape.dims.iter().enumerate() {
            match along.iter().position(|at| *at == d) {
                Some(at) if sizes[at] != *size => {
                    places.push(split.len());
                    split.extend([sizes[at], size / sizes[at]]);
                }
                at => {
                    places.extend(at.map(|_| split.len()));
                    split.push(*size);
                }
            }
        }
        let codes = b.convert(operands[0], DType::F32)?;
        let wide = match format.codebook() {
            None => codes,
            Some(codebook) => looked_up(b, codes, codebook, 0)?,
        };
        let wide = b.reshape(wide, &split)?;
        let spread = |t: Tensor| {
            let wide = b.convert(t, DType::F32)?;
            b.broadcast_in_dim(wide, &places, &split)
        };
        let scale = spread(operands[1])?;
        let value = match operands.get(2) {
            None => b.mul(wide, scale)?,
            Some(zero_point) => match format.convention {
                NumericsConvention::Gguf => b.add(b.mul(wide, scale)?, spread(*zero_point)?)?,
                _ => b.mul(b.sub(wide, spread(*zero_point)?)?, scale)?,
            },
        };
        b.convert(b.reshape(value, &shape.dims)?, float)
    })
}

/// The numbers of a codebook, of codes from `first` on in `f32`. A tree of selections: it becomes part of what multiplies
/// the weight on every backend, where a gather would not.
fn looked_up(b: &Builder, codes: Tensor, codebook: &[f32], first: usize) -> Result<Tensor> {
    let shape = b.shape(codes);
    if let [one] = codebook {
        return b.full(&shape, f64::from(*one));
    }
    let (low, high) = codebook.split_at(codebook.len() / 2);
    let middle = first + low.len();
    let is_low = b.compare(Comparison::Lt, codes, b.full(&shape, middle as f64)?)?;
    let low = looked_up(b, codes, low, first)?;
    b.select(is_low, low, looked_up(b, codes, high, middle)?)
}

/// Marks what stays in memory of a weight.
fn stored(b: &Builder, values: Tensor, is_weight: bool) -> Result<Tensor> {
    match is_weight {
        true => b.stored(values),
        false => Ok(values),
    }
}

/// The dimension of an operand of `rank` dimensions that groups divide: the contracted one, of a convolution's kernel the
/// input channels, whose groups have all positions of the kernel. `None` where there is no such one.
pub(super) fn grouped_dimension(
    contraction: &Contraction,
    kept: &[usize],
    rank: usize,
) -> Option<usize> {
    let mut contracted = match contraction {
        Contraction::Dot(_) => (0..rank).filter(|d| !kept.contains(d)).collect(),
        Contraction::Convolution(conv) => vec![conv.rhs.feature],
    };
    contracted.pop().filter(|_| contracted.is_empty())
}

/// The dimension that groups of `size` elements divide.
fn grouped_of_size(
    b: &Builder,
    kept: &[usize],
    dims: &[usize],
    size: usize,
    contraction: &Contraction,
) -> Result<usize> {
    match grouped_dimension(contraction, kept, dims.len()) {
        Some(at) if size > 0 && dims[at].is_multiple_of(size) => Ok(at),
        Some(at) => Err(b.invalid(format!(
            "groups of {size} do not divide the {} elements along the contracting dimension; {}",
            dims[at],
            nearest_groups(dims[at], size)
        ))),
        None => Err(b.invalid("groups need one contracting dimension")),
    }
}

/// `lhs rhs`, times the scales that follow it in `operands`, in `result`. Integers accumulate in `s32`; where one
/// operand is float, what the other is stored as is converted to its type.
fn scaled_product(
    b: &Builder,
    operands: &[Tensor],
    contraction: &Contraction,
    scaled: [bool; 2],
    result: DType,
) -> Result<Tensor> {
    let (mut lhs, mut rhs) = (operands[0], operands[1]);
    let types = [b.dtype(lhs), b.dtype(rhs)];
    let floats = types.map(|dtype| dtype.is_float() && dtype.bits() > 8);
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
        NumericsConvention::Qwix | NumericsConvention::Quark => absmax,
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    let bound = format.bound();
    let scale = match format.convention {
        NumericsConvention::Aqt | NumericsConvention::Qwix => {
            b.mul_scalar(b.convert(absmax, DType::F32)?, 1.0 / bound)?
        }
        NumericsConvention::Quark => divided(b, absmax, bound)?,
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    let scale = b.convert(scale, shape.dtype)?;
    match format.convention {
        NumericsConvention::Aqt => Ok(scale),
        NumericsConvention::Quark if format.element.is_float() => {
            let zero = b.compare(Comparison::Eq, scale, b.full(&shape, 0.0)?)?;
            b.select(zero, b.full(&shape, QUARK_SMALLEST)?, scale)
        }
        NumericsConvention::Quark => b.max(scale, b.full(&shape, QUARK_SMALLEST)?),
        NumericsConvention::Qwix => {
            // Qwix takes 1 where the scale is below the square root of the smallest normal number.
            let smallest = smallest_normal(shape.dtype).sqrt();
            let tiny = b.compare(Comparison::Lt, scale, b.full(&shape, smallest)?)?;
            b.select(tiny, one, scale)
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::Nv => Err(on_host(b, format)),
    }
}

/// The error of a convention whose weights are quantized on the host alone.
fn on_host(b: &Builder, format: TensorFormat) -> GraphError {
    b.invalid(format!(
        "weights in {}'s numerics are quantized by `maxdiff-rs quantize` alone: give it this mode, and run what it writes",
        format.convention
    ))
}

/// `x / divisor` rounded to `f32`, of `x` in `f32` or less. XLA makes a product of a division by a constant; in `f64` the
/// product with the reciprocal rounds to the same `f32`, because no such quotient is near a tie.
fn divided(b: &Builder, x: Tensor, divisor: f64) -> Result<Tensor> {
    let wide = b.mul_scalar(b.convert(x, DType::F64)?, 1.0 / divisor)?;
    b.convert(wide, DType::F32)
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

/// `x / scale`, in the type of `x`, by AMD Quark in `f32`.
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
        // A quotient in float64, which XLA makes a product with the reciprocal, rounds to the same float32 as the division:
        // none is near a tie.
        NumericsConvention::Quark if format.element.is_float() => {
            let scale = b.convert(scale, DType::F64)?;
            let scale = b.broadcast_in_dim(scale, kept, &shape.dims)?;
            let quotient = b.div(b.convert(x, DType::F64)?, scale)?;
            b.convert(b.convert(quotient, DType::F32)?, shape.dtype)
        }
        NumericsConvention::Quark => {
            let wide = b.convert(scale, DType::F32)?;
            let inverse = b.div(one(wide)?, wide)?;
            let inverse = b.broadcast_in_dim(inverse, kept, &shape.dims)?;
            b.mul(b.convert(x, DType::F32)?, inverse)
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::Nv => Err(on_host(b, format)),
    }
}

fn rounded(b: &Builder, scaled: Tensor, format: TensorFormat) -> Result<Tensor> {
    if format.element.is_float() {
        // XLA's conversion rounds to nearest, and gives NaN for what is beyond the largest number.
        let bound = format.bound();
        return b.convert(b.clamp(scaled, -bound, bound)?, format.element);
    }
    let (lowest, highest) = format.element.integer_range();
    let rounded = match format.convention {
        NumericsConvention::Aqt => {
            b.unary(Unary::RoundNearestEven, b.clamp(scaled, -highest, highest)?)?
        }
        NumericsConvention::Qwix | NumericsConvention::Quark => {
            b.clamp(b.unary(Unary::RoundNearestEven, scaled)?, lowest, highest)?
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    b.convert(rounded, format.element)
}

/// Scale and zero point of values between their lowest and highest: `scale = (highest - lowest) / (qmax - qmin)`, at
/// least 2^-23, in the type of the values, and `zero_point = clamp(qmin - round(lowest / scale))`, an int8, where zero is
/// always among the values (AMD Quark's asymmetric integers).
struct Affine {
    scale: Tensor,
    zero_point: Tensor,
}

impl Affine {
    fn new(b: &Builder, x: Tensor, kept: &[usize], format: TensorFormat) -> Result<Affine> {
        if format.convention != NumericsConvention::Quark {
            return Err(b.invalid(format!(
                "{} has no zero points; take AMD Quark's numerics",
                format.convention
            )));
        }
        if format.range != Range::Dynamic {
            return Err(b.invalid(
                "a recorded largest magnitude gives no zero point; take a symmetric format, or a dynamic range",
            ));
        }
        let (qmin, qmax) = format.element.integer_range();
        let rank = b.dims(x).len();
        let reduced: Vec<usize> = (0..rank).filter(|d| !kept.contains(d)).collect();
        let range = &b.at(format!("{}/{RANGE_FINDING}", b.path()));
        let lowest = range.reduce(Reduction::Min, x, &reduced)?;
        let highest = range.reduce(Reduction::Max, x, &reduced)?;
        let shape = b.shape(lowest);
        let zero = b.full(&shape, 0.0)?;
        let lowest = b.binary(crate::graph::Binary::Min, lowest, zero)?;
        let highest = b.max(highest, zero)?;
        let scale = divided(b, b.sub(highest, lowest)?, qmax - qmin)?;
        let scale = b.convert(scale, shape.dtype)?;
        let scale = b.max(scale, b.full(&shape, QUARK_SMALLEST)?)?;
        let wide = |t: Tensor| b.convert(t, DType::F32);
        let quotient = b.div(wide(lowest)?, wide(scale)?)?;
        // PyTorch promotes numbers with no dimensions.
        let quotient = match kept.is_empty() {
            true => quotient,
            false => wide(b.convert(quotient, shape.dtype)?)?,
        };
        let steps = b.unary(Unary::RoundNearestEven, quotient)?;
        let zero_point = b.sub(b.full(&b.shape(steps), qmin)?, steps)?;
        Ok(Affine {
            scale,
            zero_point: b.convert(b.clamp(zero_point, qmin, qmax)?, DType::S8)?,
        })
    }

    /// `clamp(round(x / scale) + zero_point)`
    fn quantize(&self, b: &Builder, x: Tensor, kept: &[usize], element: DType) -> Result<Tensor> {
        let dims = b.dims(x);
        let spread = |t: Tensor| b.broadcast_in_dim(t, kept, &dims);
        let (qmin, qmax) = element.integer_range();
        let scale = b.convert(self.scale, DType::F32)?;
        let inverse = b.div(b.full(&b.shape(scale), 1.0)?, scale)?;
        let scaled = b.mul(b.convert(x, DType::F32)?, spread(inverse)?)?;
        let steps = b.unary(Unary::RoundNearestEven, scaled)?;
        let zero_point = b.convert(self.zero_point, DType::F32)?;
        let shifted = b.add(steps, spread(zero_point)?)?;
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
