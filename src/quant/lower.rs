//! Lowers annotated contractions to int8 operands, an int32 product and scales.

use crate::dtype::DType;
use crate::graph::random::{Key, rounding_noise};
use crate::graph::scopes::RANGE_FINDING;
use crate::graph::{
    Builder, Comparison, ContractionQuant, ConvDims, DotDims, Graph, GraphError, Node,
    NumericsConvention, Op, OperandQuant, Reduction, Rounding, Tensor, Unary,
};
use crate::shard::LOCAL_SHARDS;

use super::QuantError;

type Result<T> = std::result::Result<T, GraphError>;

/// The input that seeds stochastic rounding: `u32[2]`, another value each step.
pub const ROUNDING_KEY: &str = "rounding_key";

/// Where stochastic rounding takes its noise from.
///
/// It gets a builder at the contraction's scope and the sizes of what is rounded, and gives `f32` of those sizes,
/// uniform in [-0.5, 0.5).
pub type NoiseSource<'a> = dyn FnMut(&Builder, &[usize]) -> Result<Tensor> + 'a;

/// The graph with every annotated contraction expanded to integer primitives; stochastic rounding draws from the
/// graph's input [`ROUNDING_KEY`], a stream of its own for each use.
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
        let word = |i| b.reshape(b.slice_dim(words, 0, i, i + 1)?, &[]);
        let key = Key {
            high: word(0)?,
            low: word(1)?,
        };
        stream += 1;
        rounding_noise(b, key, stream, dims)
    })
}

/// [`lower`] with another source of rounding noise, such as inputs of the program.
///
/// # Errors
/// Those of `noise`, and when a first contracting dimension does not divide into the local shards.
pub fn lower_with_noise(
    graph: &Graph,
    noise: &mut NoiseSource<'_>,
) -> std::result::Result<Graph, QuantError> {
    let lowered = graph.rewrite(&mut |b, node, operands| {
        let (Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. }) = &node.op else {
            return Ok(None);
        };
        let Some(quant) = quant else {
            return Ok(None);
        };
        contraction(b, node, operands, &quant.forward, noise).map(Some)
    })?;
    Ok(lowered)
}

fn contraction(
    b: &Builder,
    node: &Node,
    operands: &[Tensor],
    quant: &ContractionQuant,
    noise: &mut NoiseSource<'_>,
) -> Result<Tensor> {
    match &node.op {
        Op::DotGeneral { dims, result, .. } => dot(b, operands, dims, *result, quant, noise),
        Op::Convolution { dims, result, .. } => {
            convolution(b, node, operands, dims, *result, quant, noise)
        }
        other => Err(b.invalid(format!("{} is no contraction", other.name()))),
    }
}

/// An operand as integers, with its scale: one for each index of the kept dimensions, in ascending order, of the
/// operand's element type.
struct Quantized {
    values: Tensor,
    scale: Tensor,
}

/// Quantizes `x` with one scale for each index of `kept`, over all other dimensions.
///
/// Every line of `docs/quantization.md` is one operation here and rounds to `x`'s element type where it says so. Where
/// XLA would turn a division into a product with a reciprocal, the product is written: the graph then means the same
/// on the host and on every device.
fn quantize(
    b: &Builder,
    x: Tensor,
    kept: &[usize],
    quant: OperandQuant,
    noise: &mut NoiseSource<'_>,
) -> Result<Quantized> {
    let shape = b.shape(x);
    let dtype = shape.dtype;
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let reduced: Vec<usize> = (0..shape.rank()).filter(|d| !kept.contains(d)).collect();
    let range = b.at(format!("{}/{RANGE_FINDING}", b.path()));
    let mut absmax = range.reduce(Reduction::Max, range.abs(x)?, &reduced)?;
    let one = b.full(&b.shape(absmax), 1.0)?;
    if quant.convention == NumericsConvention::Aqt {
        let zero = b.full(&b.shape(absmax), 0.0)?;
        let empty = b.compare(Comparison::Eq, absmax, zero)?;
        absmax = b.select(empty, one, absmax)?;
    }
    let scale = b.mul_scalar(b.convert(absmax, DType::F32)?, 1.0 / 127.5)?;
    let mut scale = b.convert(scale, dtype)?;
    let scaled = match quant.convention {
        NumericsConvention::Aqt => {
            let inverse = b.div(one, scale)?;
            let infinity = b.full(&b.shape(inverse), f64::INFINITY)?;
            let overflown = b.compare(Comparison::Eq, inverse, infinity)?;
            let inverse = b.select(overflown, one, inverse)?;
            b.mul(x, b.broadcast_in_dim(inverse, &kept, &shape.dims)?)?
        }
        NumericsConvention::Qwix => {
            // Qwix takes 1 where the scale is below the square root of the smallest normal number.
            let smallest = smallest_normal(dtype).sqrt();
            let tiny = b.compare(Comparison::Lt, scale, b.full(&b.shape(scale), smallest)?)?;
            scale = b.select(tiny, one, scale)?;
            let wide = b.convert(scale, DType::F32)?;
            let inverse = b.div(b.full(&b.shape(wide), 1.0)?, wide)?;
            let inverse = b.broadcast_in_dim(inverse, &kept, &shape.dims)?;
            b.convert(b.mul(b.convert(x, DType::F32)?, inverse)?, dtype)?
        }
    };
    let scaled = match quant.rounding {
        Rounding::NearestEven => scaled,
        Rounding::Stochastic => {
            let noise = noise(b, &shape.dims)?;
            b.convert(b.add(b.convert(scaled, DType::F32)?, noise)?, dtype)?
        }
    };
    let rounded = match quant.convention {
        NumericsConvention::Aqt => {
            b.unary(Unary::RoundNearestEven, b.clamp(scaled, -127.0, 127.0)?)?
        }
        NumericsConvention::Qwix => {
            b.clamp(b.unary(Unary::RoundNearestEven, scaled)?, -128.0, 127.0)?
        }
    };
    Ok(Quantized {
        values: b.convert(rounded, quant.dtype)?,
        scale,
    })
}

fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-14),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

fn dot(
    b: &Builder,
    operands: &[Tensor],
    dims: &DotDims,
    result: DType,
    quant: &ContractionQuant,
    noise: &mut NoiseSource<'_>,
) -> Result<Tensor> {
    let (mut lhs, mut rhs, mut dims) = (operands[0], operands[1], dims.clone());
    let shards = quant.local_shards;
    if shards > 1 {
        lhs = split_contraction(b, lhs, &mut dims.lhs_batch, &mut dims.lhs_contract, shards)?;
        rhs = split_contraction(b, rhs, &mut dims.rhs_batch, &mut dims.rhs_contract, shards)?;
    }
    let free = |x: Tensor, batch: &[usize], contract: &[usize]| -> Vec<usize> {
        (0..b.dims(x).len())
            .filter(|d| !batch.contains(d) && !contract.contains(d))
            .collect()
    };
    let lhs_free = free(lhs, &dims.lhs_batch, &dims.lhs_contract);
    let rhs_free = free(rhs, &dims.rhs_batch, &dims.rhs_contract);
    let lhs_kept = [dims.lhs_batch.as_slice(), &lhs_free].concat();
    let rhs_kept = [dims.rhs_batch.as_slice(), &rhs_free].concat();
    let l = quantize(b, lhs, &lhs_kept, quant.lhs, noise)?;
    let r = quantize(b, rhs, &rhs_kept, quant.rhs, noise)?;
    let batch = dims.lhs_batch.len();
    let product = b.dot_general(l.values, r.values, dims, DType::S32)?;
    let mut out = b.convert(product, result)?;
    let lhs_places: Vec<usize> = (0..batch + lhs_free.len()).collect();
    let rhs_places: Vec<usize> = (0..batch)
        .chain(batch + lhs_free.len()..b.dims(out).len())
        .collect();
    out = apply_scale(b, out, l.scale, &lhs_kept, &lhs_places)?;
    out = apply_scale(b, out, r.scale, &rhs_kept, &rhs_places)?;
    if shards > 1 {
        let mut axes = vec![None; b.dims(out).len()];
        axes[0] = Some(LOCAL_SHARDS);
        out = b.sum(b.constrain(out, &axes)?, &[0])?;
    }
    Ok(out)
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

/// Multiplies `out` by `scale`, whose index `i` (of the sorted kept dimensions) belongs to result dimension `places[i]`
/// after bringing the kept dimensions into the order of `kept`.
fn apply_scale(
    b: &Builder,
    out: Tensor,
    scale: Tensor,
    kept: &[usize],
    places: &[usize],
) -> Result<Tensor> {
    let mut sorted = kept.to_vec();
    sorted.sort_unstable();
    // Scale dimension i is kept dimension sorted[i]; it goes where that dimension stands in the result.
    let dims: Vec<usize> = sorted
        .iter()
        .filter_map(|d| kept.iter().position(|k| k == d).map(|i| places[i]))
        .collect();
    let scale = b.convert(scale, b.dtype(out))?;
    b.mul(out, b.broadcast_in_dim(scale, &dims, &b.dims(out))?)
}

fn convolution(
    b: &Builder,
    node: &Node,
    operands: &[Tensor],
    dims: &ConvDims,
    result: DType,
    quant: &ContractionQuant,
    noise: &mut NoiseSource<'_>,
) -> Result<Tensor> {
    if dims.batch_groups > 1 {
        return Err(
            b.invalid("a convolution with batch groups cannot have one scale a batch element")
        );
    }
    let l = quantize(b, operands[0], &[dims.lhs.batch], quant.lhs, noise)?;
    let r = quantize(b, operands[1], &[dims.rhs.batch], quant.rhs, noise)?;
    let product = b.convolution(l.values, r.values, dims.clone(), DType::S32)?;
    let out = b.convert(product, result)?;
    let scaled = |out: Tensor, scale: Tensor, place: usize| -> Result<Tensor> {
        let scale = b.convert(scale, result)?;
        b.mul(out, b.broadcast_in_dim(scale, &[place], &node.shape.dims)?)
    };
    let out = scaled(out, l.scale, dims.out.batch)?;
    scaled(out, r.scale, dims.out.feature)
}
