//! Cotangents of the operands of contractions.
//!
//! The incoming gradient is converted to the residual's element type first, so that a bf16 model multiplies
//! bf16 by bf16 in its backward pass too; results accumulate in the forward result's type.

use crate::dtype::DType;
use crate::shape::Shape;

use crate::graph::patches::{Patches, Places};
use crate::graph::{Builder, ContractionQuant, ConvDims, DotDims, GraphError, QuantDot, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

fn free_dims(rank: usize, batch: &[usize], contract: &[usize]) -> Vec<usize> {
    (0..rank)
        .filter(|d| !batch.contains(d) && !contract.contains(d))
        .collect()
}

fn sorted(dims: &[usize]) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims.sort_unstable();
    dims
}

/// One side of a dot: its dimension numbers, rank and element type.
struct Side<'a> {
    batch: &'a [usize],
    contract: &'a [usize],
    rank: usize,
    dtype: DType,
}

/// `dot(g, other)` contracted over the dimensions that came from `other`, in the order of the wanted operand.
///
/// `g_free` are the positions in `g` of the other side's free dimensions.
fn dot_operand(
    b: &Builder,
    g: Tensor,
    other: Tensor,
    wanted: &Side<'_>,
    other_side: &Side<'_>,
    g_free: Vec<usize>,
    quant: Option<QuantDot>,
) -> Result<Tensor> {
    let batch = wanted.batch.len();
    let result = b.dtype(g);
    let g = b.convert(g, b.dtype(other))?;
    let product = b.dot_general_quant(
        g,
        other,
        DotDims {
            lhs_batch: (0..batch).collect(),
            rhs_batch: other_side.batch.to_vec(),
            lhs_contract: g_free,
            rhs_contract: free_dims(other_side.rank, other_side.batch, other_side.contract),
        },
        result,
        quant,
    )?;
    // The product's dimensions: batch, the wanted side's free ones, the other side's contracted ones in its order.
    let free = free_dims(wanted.rank, wanted.batch, wanted.contract);
    let order = sorted(other_side.contract);
    let mut perm = vec![0; wanted.rank];
    for (i, &d) in wanted.batch.iter().enumerate() {
        perm[d] = i;
    }
    for (i, &d) in free.iter().enumerate() {
        perm[d] = batch + i;
    }
    for (k, &d) in wanted.contract.iter().enumerate() {
        let partner = other_side.contract[k];
        let place = order.iter().filter(|c| **c < partner).count();
        perm[d] = batch + free.len() + place;
    }
    b.convert(b.transpose(product, &perm)?, wanted.dtype)
}

/// The cotangent of a dot's lhs.
pub fn dot_lhs(
    b: &Builder,
    g: Tensor,
    rhs: Tensor,
    dims: &DotDims,
    lhs_shape: &Shape,
    quant: Option<&QuantDot>,
) -> Result<Tensor> {
    let (wanted, other) = sides(b, dims, lhs_shape, rhs);
    let lhs_free = wanted.rank - wanted.batch.len() - wanted.contract.len();
    let g_rank = b.dims(g).len();
    let g_free = (wanted.batch.len() + lhs_free..g_rank).collect();
    let quant = quant.and_then(|q| q.dlhs).map(forward_only);
    dot_operand(b, g, rhs, &wanted, &other, g_free, quant)
}

/// The cotangent of a dot's rhs.
pub fn dot_rhs(
    b: &Builder,
    g: Tensor,
    lhs: Tensor,
    dims: &DotDims,
    rhs_shape: &Shape,
    quant: Option<&QuantDot>,
) -> Result<Tensor> {
    let swapped = DotDims {
        lhs_batch: dims.rhs_batch.clone(),
        rhs_batch: dims.lhs_batch.clone(),
        lhs_contract: dims.rhs_contract.clone(),
        rhs_contract: dims.lhs_contract.clone(),
    };
    let (wanted, other) = sides(b, &swapped, rhs_shape, lhs);
    let lhs_free = other.rank - other.batch.len() - other.contract.len();
    let g_free = (wanted.batch.len()..wanted.batch.len() + lhs_free).collect();
    let quant = quant.and_then(|q| q.drhs).map(forward_only);
    dot_operand(b, g, lhs, &wanted, &other, g_free, quant)
}

fn sides<'a>(
    b: &Builder,
    dims: &'a DotDims,
    wanted_shape: &Shape,
    other: Tensor,
) -> (Side<'a>, Side<'a>) {
    (
        Side {
            batch: &dims.lhs_batch,
            contract: &dims.lhs_contract,
            rank: wanted_shape.rank(),
            dtype: wanted_shape.dtype,
        },
        Side {
            batch: &dims.rhs_batch,
            contract: &dims.rhs_contract,
            rank: b.dims(other).len(),
            dtype: b.dtype(other),
        },
    )
}

fn forward_only(forward: ContractionQuant) -> QuantDot {
    QuantDot {
        forward,
        dlhs: None,
        drhs: None,
    }
}

fn dilated(size: usize, dilation: usize) -> i64 {
    if size == 0 {
        0
    } else {
        ((size - 1) * dilation + 1) as i64
    }
}

/// Splits dimension `from` into `groups` and the rest, and merges `groups`, outermost, into dimension `into`.
fn move_groups(b: &Builder, x: Tensor, from: usize, into: usize, groups: usize) -> Result<Tensor> {
    let dims = b.dims(x);
    let mut split = dims.clone();
    split[from] = dims[from] / groups;
    split.insert(from, groups);
    let x = b.reshape(x, &split)?;
    // After the split every dimension from `from` on has moved up by one; `from` itself holds the groups.
    let moved = |d: usize| if d >= from { d + 1 } else { d };
    let mut perm = Vec::with_capacity(split.len());
    let mut merged = Vec::with_capacity(dims.len());
    for (d, &whole) in dims.iter().enumerate() {
        let size = if d == from { whole / groups } else { whole };
        if d == into {
            perm.push(from);
            merged.push(size * groups);
        } else {
            merged.push(size);
        }
        perm.push(moved(d));
    }
    b.reshape(b.transpose(x, &perm)?, &merged)
}

/// The cotangent of a convolution's lhs: a convolution of the dilated gradient with the reversed kernel,
/// input and output features swapped.
pub fn conv_lhs(
    b: &Builder,
    g: Tensor,
    rhs: Tensor,
    dims: &ConvDims,
    lhs_shape: &Shape,
    quant: Option<&QuantDot>,
) -> Result<Tensor> {
    let rhs_shape = b.shape(rhs);
    let g_dims = b.dims(g);
    let result = b.dtype(g);
    let groups = dims.feature_groups.max(dims.batch_groups);
    let mut kernel = rhs;
    if groups > 1 {
        kernel = move_groups(b, kernel, dims.rhs.batch, dims.rhs.feature, groups)?;
    }
    let kernel = b.reverse(kernel, &dims.rhs.spatial)?;
    let padding = (0..dims.strides.len())
        .map(|s| {
            let lhs = dilated(lhs_shape.dims[dims.lhs.spatial[s]], dims.lhs_dilation[s]);
            let k = dilated(rhs_shape.dims[dims.rhs.spatial[s]], dims.rhs_dilation[s]);
            let out = dilated(g_dims[dims.out.spatial[s]], dims.strides[s]);
            let low = k - dims.padding[s].0 - 1;
            (low, lhs + k - 1 - out - low)
        })
        .collect();
    let g = b.convert(g, rhs_shape.dtype)?;
    let of_image = ConvDims {
        lhs: dims.out.clone(),
        rhs: dims.rhs.swapped(),
        out: dims.lhs.clone(),
        strides: dims.lhs_dilation.clone(),
        padding,
        lhs_dilation: dims.strides.clone(),
        rhs_dilation: dims.rhs_dilation.clone(),
        feature_groups: groups,
        batch_groups: 1,
    };
    let out = Shape::new(result, &lhs_shape.dims[..]);
    let quant = quant.and_then(|q| Some((q.dlhs?, Places::Kernel)));
    let mut out = conv_gradient(b, [g, kernel], of_image, &out, quant)?;
    if dims.batch_groups > 1 {
        out = move_groups(b, out, dims.lhs.feature, dims.lhs.batch, dims.batch_groups)?;
    }
    b.convert(out, lhs_shape.dtype)
}

/// The cotangent of a convolution's kernel: a convolution of the lhs with the gradient as kernel,
/// batch and feature dimensions swapped.
pub fn conv_rhs(
    b: &Builder,
    g: Tensor,
    lhs: Tensor,
    dims: &ConvDims,
    rhs_shape: &Shape,
    quant: Option<&QuantDot>,
) -> Result<Tensor> {
    let lhs_shape = b.shape(lhs);
    let g_dims = b.dims(g);
    let result = b.dtype(g);
    let padding = (0..dims.strides.len())
        .map(|s| {
            let lhs = dilated(lhs_shape.dims[dims.lhs.spatial[s]], dims.lhs_dilation[s]);
            let k = dilated(rhs_shape.dims[dims.rhs.spatial[s]], dims.rhs_dilation[s]);
            let out = dilated(g_dims[dims.out.spatial[s]], dims.strides[s]);
            let low = dims.padding[s].0;
            (low, out - lhs + k - low - 1)
        })
        .collect();
    let g = b.convert(g, lhs_shape.dtype)?;
    let of_kernel = ConvDims {
        lhs: dims.lhs.swapped(),
        rhs: dims.out.swapped(),
        out: dims.rhs.swapped(),
        strides: dims.rhs_dilation.clone(),
        padding,
        lhs_dilation: dims.lhs_dilation.clone(),
        rhs_dilation: dims.strides.clone(),
        feature_groups: dims.batch_groups,
        batch_groups: dims.feature_groups,
    };
    let out = Shape::new(result, &rhs_shape.dims[..]);
    // Whatever the image's size: the gradient is the lhs then, and the batch the first dimension that is contracted.
    let quant = quant.and_then(|q| Some((q.drhs?, Places::Result)));
    let out = conv_gradient(b, [lhs, g], of_kernel, &out, quant)?;
    b.convert(out, rhs_shape.dtype)
}

/// One of the two convolutions of a derivative, of the shape and type of `result`. Where its operands have formats it is a
/// product of patches: each row of these has a scale of its own then, and what slices have of the batch is rounded apart, as
/// in dots. Convolutions that are no such product stay in float: those with groups, and of kernels that have more places
/// than are taken side by side.
fn conv_gradient(
    b: &Builder,
    operands: [Tensor; 2],
    dims: ConvDims,
    result: &Shape,
    quant: Option<(ContractionQuant, Places)>,
) -> Result<Tensor> {
    let shapes = operands.map(|operand| b.shape(operand));
    let patches = quant.and_then(|(quant, places)| {
        let patches = Patches::at(places, &dims, &shapes, result)?;
        Some((patches, forward_only(quant)))
    });
    match patches {
        Some((patches, quant)) => patches.product(b, operands, Some(quant)),
        None => b.convolution(operands[0], operands[1], dims, result.dtype),
    }
}
