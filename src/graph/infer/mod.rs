//! Shape inference: one exhaustive match, with StableHLO's constraints.

mod composite;
mod contract;
mod index;

use crate::dtype::DType;
use crate::shape::Shape;

use super::{Binary, Graph, InferError, Op, PadDim, Reduction, Unary, constraint};
use composite::composite;
use contract::{convolution, dot};
use index::{dynamic_slice, dynamic_update_slice, gather, scatter, slice};

type Result<T> = std::result::Result<T, InferError>;

/// The shape of `op`'s result.
///
/// `Parameter` has none to infer: its shape is declared. Regions of `While` are checked against the operands.
///
/// # Errors
/// The first broken constraint.
pub fn infer(op: &Op, operands: &[&Shape]) -> Result<Shape> {
    match op {
        Op::Parameter(_) => Err(constraint("parameter", "shapes are declared, not inferred")),
        Op::Uninitialized => Err(constraint(
            "uninitialized",
            "shapes are declared, not inferred",
        )),
        Op::Constant(value) => exactly(operands).map(|[]| value.shape.clone()),
        // An iota's shape is an attribute; the builder passes it as a pseudo operand.
        Op::Iota(dim) => iota(exactly(operands)?, *dim),
        Op::Unary(kind) => unary(*kind, exactly(operands)?),
        Op::Binary(kind) => binary(*kind, exactly(operands)?),
        Op::Compare(_) => {
            let [lhs, rhs] = exactly(operands)?;
            same(lhs, rhs)?;
            Ok(lhs.with_dtype(DType::Pred))
        }
        Op::Select => select(exactly(operands)?),
        Op::Clamp => {
            let [low, x, high] = exactly(operands)?;
            same(low, x)?;
            same(x, high)?;
            Ok(x.clone())
        }
        Op::Convert(dtype) => exactly(operands).map(|[x]| x.with_dtype(*dtype)),
        Op::BitcastConvert(dtype) => bitcast_convert(exactly(operands)?, *dtype),
        Op::BroadcastInDim { dims, result } => broadcast_in_dim(exactly(operands)?, dims, result),
        Op::Reshape(dims) => reshape(exactly(operands)?, dims),
        Op::Transpose(perm) => transpose(exactly(operands)?, perm),
        Op::Slice {
            start,
            limit,
            stride,
        } => slice(exactly(operands)?, start, limit, stride),
        Op::DynamicSlice(sizes) => dynamic_slice(operands, sizes),
        Op::DynamicUpdateSlice => dynamic_update_slice(operands),
        Op::Pad(dims) => pad(exactly(operands)?, dims),
        Op::Concatenate(dim) => concatenate(operands, *dim),
        Op::Reverse(dims) => {
            let [x] = exactly(operands)?;
            distinct("reverse", dims, x.rank())?;
            Ok(x.clone())
        }
        Op::Gather(dims) => gather(exactly(operands)?, dims),
        Op::Scatter(_, dims) => scatter(exactly(operands)?, dims),
        Op::Reduce { kind, dims } => reduce(*kind, exactly(operands)?, dims),
        Op::DotGeneral { dims, result, .. } => dot(exactly(operands)?, dims, *result),
        Op::Convolution { dims, result, .. } => convolution(exactly(operands)?, dims, *result),
        Op::While { cond, body } => while_loop(operands, cond, body),
        Op::GetTupleElement(_) => Err(constraint(
            "get_tuple_element",
            "the builder gives it the element's shape",
        )),
        Op::Composite { kind, body } => composite(kind, operands, body),
        Op::CustomCall(call) => call.infer(operands),
        Op::Stored => exactly(operands).map(|[x]| x.clone()),
        Op::OptimizationBarrier => first(operands).cloned(),
        Op::ShardingConstraint(axes) => {
            let [x] = exactly(operands)?;
            attribute_length("logical axes", x.rank(), axes.len())?;
            Ok(x.clone())
        }
    }
}

/// The `N` operands that an operation takes.
fn exactly<'a, const N: usize>(operands: &[&'a Shape]) -> Result<[&'a Shape; N]> {
    operands.try_into().map_err(|_| InferError::OperandCount {
        expected: N,
        found: operands.len(),
    })
}

/// Checks that there are `expected` operands.
fn count(operands: &[&Shape], expected: usize) -> Result<()> {
    match operands.len() {
        found if found == expected => Ok(()),
        found => Err(InferError::OperandCount { expected, found }),
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

fn element_type(what: &'static str, expected: &'static str, found: DType) -> InferError {
    InferError::ElementType {
        what,
        expected,
        found,
    }
}

fn iota([shape]: [&Shape; 1], dim: usize) -> Result<Shape> {
    distinct("iota", &[dim], shape.rank())?;
    if shape.dtype == DType::Pred {
        return Err(element_type("iota", "a number", DType::Pred));
    }
    Ok(shape.clone())
}

fn unary(kind: Unary, [x]: [&Shape; 1]) -> Result<Shape> {
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

fn binary(kind: Binary, [x, y]: [&Shape; 2]) -> Result<Shape> {
    same(x, y)?;
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

fn select([predicate, on_true, on_false]: [&Shape; 3]) -> Result<Shape> {
    same(on_true, on_false)?;
    if predicate.dtype != DType::Pred {
        return Err(element_type("the predicate", "pred", predicate.dtype));
    }
    if predicate.dims != on_true.dims {
        return Err(InferError::SizesDiffer {
            what: "select",
            left: "predicate",
            lhs: predicate.dims.clone(),
            right: "value",
            rhs: on_true.dims.clone(),
        });
    }
    Ok(on_true.clone())
}

fn bitcast_convert([x]: [&Shape; 1], dtype: DType) -> Result<Shape> {
    if dtype.bits() != x.dtype.bits() {
        return Err(constraint(
            "bitcast_convert",
            format!("{} and {dtype} differ in width", x.dtype),
        ));
    }
    Ok(x.with_dtype(dtype))
}

fn broadcast_in_dim([x]: [&Shape; 1], dims: &[usize], result: &[usize]) -> Result<Shape> {
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
    Ok(x.with_dims(result))
}

fn reshape([x]: [&Shape; 1], dims: &[usize]) -> Result<Shape> {
    // A product too large to count is no operand's.
    let product = |n: usize, &d: &usize| n.checked_mul(d);
    let to_count = dims.iter().try_fold(1, product).unwrap_or(usize::MAX);
    if x.count() != to_count {
        return Err(InferError::Reshape {
            from: x.clone(),
            to: dims.to_vec(),
            from_count: x.count(),
            to_count,
        });
    }
    Ok(x.with_dims(dims))
}

fn transpose([x]: [&Shape; 1], perm: &[usize]) -> Result<Shape> {
    attribute_length("permutation", x.rank(), perm.len())?;
    distinct("transpose", perm, x.rank())?;
    Ok(x.with_dims(perm.iter().map(|&p| x.dims[p]).collect::<Vec<_>>()))
}

fn pad([x, value]: [&Shape; 2], dims: &[PadDim]) -> Result<Shape> {
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

fn reduce(kind: Reduction, [x]: [&Shape; 1], dims: &[usize]) -> Result<Shape> {
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

fn while_loop(operands: &[&Shape], cond: &Graph, body: &Graph) -> Result<Shape> {
    let head = first(operands)?;
    let mismatch = |what, found: Vec<String>| {
        let expected: Vec<String> = operands.iter().map(|s| s.to_string()).collect();
        constraint(
            what,
            format!("carry {} became {}", expected.join(", "), found.join(", ")),
        )
    };
    let inputs = |g: &Graph| g.inputs.iter().map(|i| i.shape.clone()).collect::<Vec<_>>();
    let outputs = |g: &Graph| {
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
