//! Shape inference: one exhaustive match, with StableHLO's constraints.

use crate::dtype::DType;
use crate::shape::Shape;

use super::op::{
    Binary, ConvDims, ConvLayout, DotDims, GatherDims, Op, PadDim, Reduction, ScatterDims, Unary,
};

/// Which constraint of an operation its operands or attributes break.
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    #[error("takes {expected} operands, found {found}")]
    OperandCount { expected: usize, found: usize },
    #[error("operands must have one shape, found {lhs} and {rhs}")]
    ShapesDiffer { lhs: Shape, rhs: Shape },
    #[error("{what} of element type {found} is not supported; expected {expected}")]
    ElementType {
        what: &'static str,
        expected: &'static str,
        found: DType,
    },
    #[error("{what}: {left} sizes {lhs:?} and {right} sizes {rhs:?} differ")]
    SizesDiffer {
        what: &'static str,
        left: &'static str,
        lhs: Vec<usize>,
        right: &'static str,
        rhs: Vec<usize>,
    },
    #[error(
        "dimension numbers {dims:?} of {what} are not distinct dimensions of a rank-{rank} tensor"
    )]
    DimensionNumbers {
        what: &'static str,
        dims: Vec<usize>,
        rank: usize,
    },
    #[error("{what} has {found} entries for {expected} dimensions")]
    AttributeLength {
        what: &'static str,
        expected: usize,
        found: usize,
    },
    #[error("cannot reshape {from} to {to:?}: {from_count} elements are not {to_count}")]
    Reshape {
        from: Shape,
        to: Vec<usize>,
        from_count: usize,
        to_count: usize,
    },
    #[error("composite {name}: {detail}")]
    Composite { name: &'static str, detail: String },
    #[error("{what}: {detail}")]
    Constraint { what: &'static str, detail: String },
}

type Result<T> = std::result::Result<T, InferError>;

/// A constraint that has no variant of its own.
pub fn constraint(what: &'static str, detail: impl Into<String>) -> InferError {
    InferError::Constraint {
        what,
        detail: detail.into(),
    }
}

/// The shape of `op`'s result.
///
/// `Parameter` has none to infer: its shape is declared. Regions of `While` are checked against the operands.
///
/// # Errors
/// The first broken constraint.
pub fn infer(op: &Op, operands: &[&Shape]) -> Result<Shape> {
    let arity = |expected: usize| {
        if operands.len() == expected {
            Ok(())
        } else {
            Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            })
        }
    };
    match op {
        Op::Parameter(_) => Err(constraint("parameter", "shapes are declared, not inferred")),
        Op::Constant(value) => {
            arity(0)?;
            Ok(value.shape.clone())
        }
        // An iota's shape is an attribute; the builder passes it as a pseudo operand.
        Op::Iota(dim) => {
            arity(1)?;
            distinct("iota", &[*dim], operands[0].rank())?;
            if operands[0].dtype == DType::Pred {
                return Err(element_type("iota", "a number", DType::Pred));
            }
            Ok(operands[0].clone())
        }
        Op::Unary(kind) => {
            arity(1)?;
            unary(*kind, operands[0])
        }
        Op::Binary(kind) => {
            arity(2)?;
            same(operands[0], operands[1])?;
            binary(*kind, operands[0])
        }
        Op::Compare(_) => {
            arity(2)?;
            same(operands[0], operands[1])?;
            Ok(operands[0].with_dtype(DType::Pred))
        }
        Op::Select => {
            arity(3)?;
            same(operands[1], operands[2])?;
            if operands[0].dtype != DType::Pred {
                return Err(element_type("the predicate", "pred", operands[0].dtype));
            }
            same_sizes("select", "predicate", operands[0], "value", operands[1])?;
            Ok(operands[1].clone())
        }
        Op::Clamp => {
            arity(3)?;
            same(operands[0], operands[1])?;
            same(operands[1], operands[2])?;
            Ok(operands[1].clone())
        }
        Op::Convert(dtype) => {
            arity(1)?;
            Ok(operands[0].with_dtype(*dtype))
        }
        Op::BitcastConvert(dtype) => {
            arity(1)?;
            if dtype.bits() != operands[0].dtype.bits() {
                return Err(constraint(
                    "bitcast_convert",
                    format!("{} and {dtype} differ in width", operands[0].dtype),
                ));
            }
            Ok(operands[0].with_dtype(*dtype))
        }
        Op::BroadcastInDim { dims, result } => {
            arity(1)?;
            let x = operands[0];
            attribute_length("dims", x.rank(), dims.len())?;
            distinct("broadcast_in_dim", dims, result.len())?;
            for (i, &d) in dims.iter().enumerate() {
                if x.dims[i] != 1 && x.dims[i] != result[d] {
                    return Err(constraint(
                        "broadcast_in_dim",
                        format!("operand {x} dimension {i} does not fit {result:?} dimension {d}"),
                    ));
                }
            }
            Ok(x.with_dims(result.clone()))
        }
        Op::Reshape(dims) => {
            arity(1)?;
            // A product too large to count is no operand's.
            let product = |n: usize, &d: &usize| n.checked_mul(d);
            let to_count = dims.iter().try_fold(1, product).unwrap_or(usize::MAX);
            if operands[0].count() != to_count {
                return Err(InferError::Reshape {
                    from: operands[0].clone(),
                    to: dims.clone(),
                    from_count: operands[0].count(),
                    to_count,
                });
            }
            Ok(operands[0].with_dims(dims.clone()))
        }
        Op::Transpose(perm) => {
            arity(1)?;
            let x = operands[0];
            attribute_length("permutation", x.rank(), perm.len())?;
            distinct("transpose", perm, x.rank())?;
            Ok(x.with_dims(perm.iter().map(|&p| x.dims[p]).collect::<Vec<_>>()))
        }
        Op::Slice {
            start,
            limit,
            stride,
        } => {
            arity(1)?;
            slice(operands[0], start, limit, stride)
        }
        Op::DynamicSlice(sizes) => {
            let x = first(operands)?;
            arity(1 + x.rank())?;
            scalar_indices(&operands[1..])?;
            attribute_length("slice sizes", x.rank(), sizes.len())?;
            fits("dynamic_slice", sizes, &x.dims)?;
            Ok(x.with_dims(sizes.clone()))
        }
        Op::DynamicUpdateSlice => {
            let x = first(operands)?;
            arity(2 + x.rank())?;
            let update = operands[1];
            scalar_indices(&operands[2..])?;
            if update.dtype != x.dtype {
                return Err(InferError::ShapesDiffer {
                    lhs: x.clone(),
                    rhs: update.clone(),
                });
            }
            attribute_length("the update", x.rank(), update.rank())?;
            fits("dynamic_update_slice", &update.dims, &x.dims)?;
            Ok(x.clone())
        }
        Op::Pad(dims) => {
            arity(2)?;
            pad(operands[0], operands[1], dims)
        }
        Op::Concatenate(dim) => concatenate(operands, *dim),
        Op::Reverse(dims) => {
            arity(1)?;
            distinct("reverse", dims, operands[0].rank())?;
            Ok(operands[0].clone())
        }
        Op::Gather(dims) => {
            arity(2)?;
            gather(operands[0], operands[1], dims)
        }
        Op::Scatter(_, dims) => {
            arity(3)?;
            scatter(operands[0], operands[1], operands[2], dims)
        }
        Op::Reduce { kind, dims } => {
            arity(1)?;
            reduce(*kind, operands[0], dims)
        }
        Op::DotGeneral { dims, result, .. } => {
            arity(2)?;
            dot(operands[0], operands[1], dims, *result)
        }
        Op::Convolution { dims, result, .. } => {
            arity(2)?;
            convolution(operands[0], operands[1], dims, *result)
        }
        Op::While { cond, body } => while_loop(operands, cond, body),
        Op::GetTupleElement(_) => Err(constraint(
            "get_tuple_element",
            "the builder gives it the element's shape",
        )),
        Op::Composite { kind, body } => kind.infer(operands, body),
        Op::CustomCall(call) => call.infer(operands),
        Op::Stored => {
            arity(1)?;
            Ok(operands[0].clone())
        }
        Op::OptimizationBarrier => Ok(first(operands)?.clone()),
        Op::ShardingConstraint(axes) => {
            arity(1)?;
            attribute_length("logical axes", operands[0].rank(), axes.len())?;
            Ok(operands[0].clone())
        }
    }
}

fn element_type(what: &'static str, expected: &'static str, found: DType) -> InferError {
    InferError::ElementType {
        what,
        expected,
        found,
    }
}

fn first<'a>(operands: &[&'a Shape]) -> Result<&'a Shape> {
    operands.first().copied().ok_or(InferError::OperandCount {
        expected: 1,
        found: 0,
    })
}

fn same(lhs: &Shape, rhs: &Shape) -> Result<()> {
    if lhs == rhs {
        Ok(())
    } else {
        Err(InferError::ShapesDiffer {
            lhs: lhs.clone(),
            rhs: rhs.clone(),
        })
    }
}

fn same_sizes(
    what: &'static str,
    left: &'static str,
    lhs: &Shape,
    right: &'static str,
    rhs: &Shape,
) -> Result<()> {
    if lhs.dims == rhs.dims {
        Ok(())
    } else {
        Err(InferError::SizesDiffer {
            what,
            left,
            lhs: lhs.dims.clone(),
            right,
            rhs: rhs.dims.clone(),
        })
    }
}

fn attribute_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(InferError::AttributeLength {
            what,
            expected,
            found,
        })
    }
}

/// Checks that `dims` are distinct and below `rank`.
fn distinct(what: &'static str, dims: &[usize], rank: usize) -> Result<()> {
    let ok = dims
        .iter()
        .enumerate()
        .all(|(i, d)| *d < rank && !dims[..i].contains(d));
    if ok {
        Ok(())
    } else {
        Err(InferError::DimensionNumbers {
            what,
            dims: dims.to_vec(),
            rank,
        })
    }
}

fn fits(what: &'static str, inner: &[usize], outer: &[usize]) -> Result<()> {
    if inner.iter().zip(outer).all(|(i, o)| i <= o) {
        Ok(())
    } else {
        Err(constraint(
            what,
            format!("sizes {inner:?} do not fit into {outer:?}"),
        ))
    }
}

fn scalar_indices(indices: &[&Shape]) -> Result<()> {
    for index in indices {
        if index.rank() != 0 || !index.dtype.is_int() {
            return Err(constraint(
                "start index",
                format!("expected an integer scalar, found {index}"),
            ));
        }
    }
    Ok(())
}

fn unary(kind: Unary, x: &Shape) -> Result<Shape> {
    let float = |what| {
        if x.dtype.is_float() {
            Ok(x.clone())
        } else {
            Err(element_type(what, "a float", x.dtype))
        }
    };
    match kind {
        Unary::Abs | Unary::Neg | Unary::Sign => {
            if x.dtype.is_float() || x.dtype.is_signed_int() {
                Ok(x.clone())
            } else {
                Err(element_type(kind.name(), "a signed number", x.dtype))
            }
        }
        Unary::Not => {
            if x.dtype.is_float() {
                Err(element_type("not", "pred or an integer", x.dtype))
            } else {
                Ok(x.clone())
            }
        }
        Unary::IsFinite => float("is_finite").map(|s| s.with_dtype(DType::Pred)),
        Unary::Ceil
        | Unary::Cos
        | Unary::Erf
        | Unary::Exp
        | Unary::Floor
        | Unary::Log
        | Unary::Logistic
        | Unary::RoundNearestEven
        | Unary::Rsqrt
        | Unary::Sin
        | Unary::Sqrt
        | Unary::Tanh => float(kind.name()),
    }
}

fn binary(kind: Binary, x: &Shape) -> Result<Shape> {
    let ok = match kind {
        Binary::Add | Binary::Max | Binary::Min | Binary::Mul => true,
        Binary::And | Binary::Or | Binary::Xor => !x.dtype.is_float(),
        Binary::Div | Binary::Pow | Binary::Rem | Binary::Sub => x.dtype != DType::Pred,
        Binary::ShiftLeft | Binary::ShiftRightLogical => x.dtype.is_int(),
    };
    if ok {
        Ok(x.clone())
    } else {
        Err(element_type(kind.name(), "another element type", x.dtype))
    }
}

fn slice(x: &Shape, start: &[usize], limit: &[usize], stride: &[usize]) -> Result<Shape> {
    attribute_length("start", x.rank(), start.len())?;
    attribute_length("limit", x.rank(), limit.len())?;
    attribute_length("stride", x.rank(), stride.len())?;
    let mut dims = Vec::with_capacity(x.rank());
    for i in 0..x.rank() {
        if start[i] > limit[i] || limit[i] > x.dims[i] || stride[i] == 0 {
            return Err(constraint(
                "slice",
                format!(
                    "{}:{}:{} is no slice of dimension {i} of {x}",
                    start[i], limit[i], stride[i]
                ),
            ));
        }
        dims.push((limit[i] - start[i]).div_ceil(stride[i]));
    }
    Ok(x.with_dims(dims))
}

fn pad(x: &Shape, value: &Shape, dims: &[PadDim]) -> Result<Shape> {
    attribute_length("padding", x.rank(), dims.len())?;
    if value.rank() != 0 || value.dtype != x.dtype {
        return Err(constraint(
            "padding value",
            format!("expected a {} scalar, found {value}", x.dtype),
        ));
    }
    let mut out = Vec::with_capacity(x.rank());
    for (size, p) in x.dims.iter().zip(dims) {
        let inner = size + size.saturating_sub(1) * p.interior;
        let padded = inner as i64 + p.low + p.high;
        if padded < 0 {
            return Err(constraint("pad", format!("{p:?} makes {x} negative")));
        }
        out.push(padded as usize);
    }
    Ok(x.with_dims(out))
}

fn concatenate(operands: &[&Shape], dim: usize) -> Result<Shape> {
    let head = first(operands)?;
    distinct("concatenate", &[dim], head.rank())?;
    let mut dims = head.dims.clone();
    for x in &operands[1..] {
        let agrees = x.rank() == head.rank()
            && x.dtype == head.dtype
            && (0..head.rank()).all(|i| i == dim || x.dims[i] == head.dims[i]);
        if !agrees {
            return Err(constraint(
                "concatenate",
                format!("{head} and {x} differ outside dimension {dim}"),
            ));
        }
        dims[dim] += x.dims[dim];
    }
    Ok(head.with_dims(dims))
}

/// The dimensions of `indices` other than the index vector's.
fn index_batch(indices: &Shape, index_vector_dim: usize) -> Result<Vec<usize>> {
    if !indices.dtype.is_int() {
        return Err(element_type("indices", "an integer", indices.dtype));
    }
    if index_vector_dim > indices.rank() {
        return Err(InferError::DimensionNumbers {
            what: "index_vector_dim",
            dims: vec![index_vector_dim],
            rank: indices.rank(),
        });
    }
    let mut dims = indices.dims.clone();
    if index_vector_dim < dims.len() {
        dims.remove(index_vector_dim);
    }
    Ok(dims)
}

fn index_vector_len(indices: &Shape, index_vector_dim: usize) -> usize {
    indices.dims.get(index_vector_dim).copied().unwrap_or(1)
}

fn gather(x: &Shape, indices: &Shape, dims: &GatherDims) -> Result<Shape> {
    let batch = index_batch(indices, dims.index_vector_dim)?;
    attribute_length("slice sizes", x.rank(), dims.slice_sizes.len())?;
    fits("gather", &dims.slice_sizes, &x.dims)?;
    distinct("collapsed_slice_dims", &dims.collapsed_slice_dims, x.rank())?;
    distinct("start_index_map", &dims.start_index_map, x.rank())?;
    attribute_length(
        "start_index_map",
        index_vector_len(indices, dims.index_vector_dim),
        dims.start_index_map.len(),
    )?;
    if let Some(d) = dims
        .collapsed_slice_dims
        .iter()
        .find(|d| dims.slice_sizes[**d] != 1)
    {
        return Err(constraint(
            "gather",
            format!(
                "collapsed dimension {d} has slice size {}",
                dims.slice_sizes[*d]
            ),
        ));
    }
    let offsets: Vec<usize> = (0..x.rank())
        .filter(|d| !dims.collapsed_slice_dims.contains(d))
        .map(|d| dims.slice_sizes[d])
        .collect();
    attribute_length("offset_dims", offsets.len(), dims.offset_dims.len())?;
    let rank = batch.len() + offsets.len();
    distinct("offset_dims", &dims.offset_dims, rank)?;
    let mut batch = batch.into_iter();
    let mut offsets = offsets.into_iter();
    let out: Vec<usize> = (0..rank)
        .filter_map(|d| {
            if dims.offset_dims.contains(&d) {
                offsets.next()
            } else {
                batch.next()
            }
        })
        .collect();
    Ok(x.with_dims(out))
}

fn scatter(x: &Shape, indices: &Shape, updates: &Shape, dims: &ScatterDims) -> Result<Shape> {
    let batch = index_batch(indices, dims.index_vector_dim)?;
    distinct(
        "update_window_dims",
        &dims.update_window_dims,
        updates.rank(),
    )?;
    distinct("inserted_window_dims", &dims.inserted_window_dims, x.rank())?;
    distinct(
        "scatter_dims_to_operand_dims",
        &dims.scatter_dims_to_operand_dims,
        x.rank(),
    )?;
    attribute_length(
        "scatter_dims_to_operand_dims",
        index_vector_len(indices, dims.index_vector_dim),
        dims.scatter_dims_to_operand_dims.len(),
    )?;
    if updates.dtype != x.dtype {
        return Err(InferError::ShapesDiffer {
            lhs: x.clone(),
            rhs: updates.clone(),
        });
    }
    let update_batch: Vec<usize> = (0..updates.rank())
        .filter(|d| !dims.update_window_dims.contains(d))
        .map(|d| updates.dims[d])
        .collect();
    if update_batch != batch {
        return Err(InferError::SizesDiffer {
            what: "scatter",
            left: "update batch",
            lhs: update_batch,
            right: "index batch",
            rhs: batch,
        });
    }
    let window: Vec<usize> = dims
        .update_window_dims
        .iter()
        .map(|&d| updates.dims[d])
        .collect();
    let target: Vec<usize> = (0..x.rank())
        .filter(|d| !dims.inserted_window_dims.contains(d))
        .map(|d| x.dims[d])
        .collect();
    attribute_length("update_window_dims", target.len(), window.len())?;
    fits("scatter", &window, &target)?;
    Ok(x.clone())
}

fn reduce(kind: Reduction, x: &Shape, dims: &[usize]) -> Result<Shape> {
    distinct("reduce", dims, x.rank())?;
    let ok = match kind {
        Reduction::Sum | Reduction::Max | Reduction::Min => x.dtype != DType::Pred,
        Reduction::And | Reduction::Or => x.dtype == DType::Pred,
    };
    if !ok {
        return Err(element_type(kind.name(), "another element type", x.dtype));
    }
    let kept: Vec<usize> = (0..x.rank())
        .filter(|d| !dims.contains(d))
        .map(|d| x.dims[d])
        .collect();
    Ok(x.with_dims(kept))
}

fn sizes(x: &Shape, dims: &[usize]) -> Vec<usize> {
    dims.iter().map(|&d| x.dims[d]).collect()
}

fn dot(lhs: &Shape, rhs: &Shape, dims: &DotDims, result: DType) -> Result<Shape> {
    let lhs_used = [dims.lhs_batch.as_slice(), &dims.lhs_contract].concat();
    let rhs_used = [dims.rhs_batch.as_slice(), &dims.rhs_contract].concat();
    distinct("the lhs", &lhs_used, lhs.rank())?;
    distinct("the rhs", &rhs_used, rhs.rank())?;
    contraction_types(lhs, rhs, result)?;
    for (what, l, r) in [
        ("batch dimensions", &dims.lhs_batch, &dims.rhs_batch),
        (
            "contracting dimensions",
            &dims.lhs_contract,
            &dims.rhs_contract,
        ),
    ] {
        let (l, r) = (sizes(lhs, l), sizes(rhs, r));
        if l != r {
            return Err(InferError::SizesDiffer {
                what,
                left: "lhs",
                lhs: l,
                right: "rhs",
                rhs: r,
            });
        }
    }
    let mut out = sizes(lhs, &dims.lhs_batch);
    out.extend(
        (0..lhs.rank())
            .filter(|d| !lhs_used.contains(d))
            .map(|d| lhs.dims[d]),
    );
    out.extend(
        (0..rhs.rank())
            .filter(|d| !rhs_used.contains(d))
            .map(|d| rhs.dims[d]),
    );
    Ok(Shape::new(result, out))
}

fn contraction_types(lhs: &Shape, rhs: &Shape, result: DType) -> Result<()> {
    let both_int = lhs.dtype.is_int() && rhs.dtype.is_int();
    let both_float = lhs.dtype.is_float() && rhs.dtype.is_float();
    if (both_int && result.is_int()) || (both_float && result.is_float()) {
        Ok(())
    } else {
        Err(constraint(
            "element types",
            format!("{} times {} gives no {result}", lhs.dtype, rhs.dtype),
        ))
    }
}

fn check_layout(what: &'static str, layout: &ConvLayout, x: &Shape) -> Result<()> {
    if layout.rank() != x.rank() {
        return Err(InferError::AttributeLength {
            what,
            expected: x.rank(),
            found: layout.rank(),
        });
    }
    let mut dims = vec![layout.batch, layout.feature];
    dims.extend(&layout.spatial);
    distinct(what, &dims, x.rank())
}

fn convolution(lhs: &Shape, rhs: &Shape, dims: &ConvDims, result: DType) -> Result<Shape> {
    check_layout("lhs layout", &dims.lhs, lhs)?;
    check_layout("kernel layout", &dims.rhs, rhs)?;
    contraction_types(lhs, rhs, result)?;
    let spatial = dims.lhs.spatial.len();
    let mut out_dims = vec![dims.out.batch, dims.out.feature];
    out_dims.extend(&dims.out.spatial);
    if rhs.rank() != lhs.rank() || out_dims.len() != lhs.rank() {
        return Err(constraint(
            "layouts",
            "lhs, kernel and result must have one rank",
        ));
    }
    distinct("result layout", &out_dims, lhs.rank())?;
    for (what, found) in [
        ("strides", dims.strides.len()),
        ("padding", dims.padding.len()),
        ("lhs_dilation", dims.lhs_dilation.len()),
        ("rhs_dilation", dims.rhs_dilation.len()),
    ] {
        attribute_length(what, spatial, found)?;
    }
    let (fg, bg) = (dims.feature_groups, dims.batch_groups);
    let in_features = lhs.dims[dims.lhs.feature];
    let batch = lhs.dims[dims.lhs.batch];
    let out_features = rhs.dims[dims.rhs.batch];
    let kernel_features = rhs.dims[dims.rhs.feature];
    if fg == 0 || bg == 0 || (fg > 1 && bg > 1) {
        return Err(constraint(
            "groups",
            format!("feature groups {fg} and batch groups {bg}: one must be 1, none 0"),
        ));
    }
    if kernel_features * fg != in_features {
        return Err(constraint(
            "features",
            format!(
                "kernel {rhs} takes {kernel_features} input features in {fg} groups, lhs {lhs} has {in_features}"
            ),
        ));
    }
    if !out_features.is_multiple_of(fg)
        || !out_features.is_multiple_of(bg)
        || !batch.is_multiple_of(bg)
    {
        return Err(constraint(
            "groups",
            format!(
                "{out_features} output features and batch {batch} do not divide into {fg} feature groups and {bg} batch groups"
            ),
        ));
    }
    let mut out = vec![0; lhs.rank()];
    out[dims.out.batch] = batch / bg;
    out[dims.out.feature] = out_features;
    for s in 0..spatial {
        let dilate = |n: usize, d: usize| if n == 0 { 0 } else { (n - 1) * d + 1 };
        if dims.strides[s] == 0 || dims.lhs_dilation[s] == 0 || dims.rhs_dilation[s] == 0 {
            return Err(constraint("window", "strides and dilations start at 1"));
        }
        let n = dilate(lhs.dims[dims.lhs.spatial[s]], dims.lhs_dilation[s]) as i64
            + dims.padding[s].0
            + dims.padding[s].1;
        let k = dilate(rhs.dims[dims.rhs.spatial[s]], dims.rhs_dilation[s]) as i64;
        if n < 0 {
            return Err(constraint("padding", "crops more than there is"));
        }
        out[dims.out.spatial[s]] = if n < k {
            0
        } else {
            (n - k) as usize / dims.strides[s] + 1
        };
    }
    Ok(Shape::new(result, out))
}

fn while_loop(operands: &[&Shape], cond: &super::Graph, body: &super::Graph) -> Result<Shape> {
    let head = first(operands)?;
    let mismatch = |what, found: Vec<String>| {
        let expected: Vec<String> = operands.iter().map(|s| s.to_string()).collect();
        constraint(
            what,
            format!("carry {} became {}", expected.join(", "), found.join(", ")),
        )
    };
    let inputs = |g: &super::Graph| g.inputs.iter().map(|i| i.shape.clone()).collect::<Vec<_>>();
    let outputs = |g: &super::Graph| {
        g.outputs
            .iter()
            .map(|o| g.nodes[o.node as usize].shape.clone())
            .collect::<Vec<_>>()
    };
    for (what, shapes) in [
        ("condition operands", inputs(cond)),
        ("body operands", inputs(body)),
        ("body results", outputs(body)),
    ] {
        if !shapes.iter().eq(operands.iter().copied()) {
            return Err(mismatch(
                what,
                shapes.iter().map(|s| s.to_string()).collect(),
            ));
        }
    }
    if outputs(cond) != [Shape::scalar(DType::Pred)] {
        return Err(constraint("condition", "must give one pred scalar"));
    }
    Ok(head.clone())
}
