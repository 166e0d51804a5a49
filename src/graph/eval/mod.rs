//! A host evaluator: what every operation means, for tests and small constants.
//!
//! Floats are computed in `f64` and rounded to the node's element type after every operation, integers wrap.
//! It is written to be obviously right, not fast.

mod contract;
mod elementwise;
mod index;
mod layout;
pub(super) mod value;

use crate::host_tensor::{HostTensor, HostTensorError};
use crate::shape::Shape;

use super::{Binary, Graph, Op, Reduction};
use contract::{convolution, dot_general};
pub use elementwise::erf;
use elementwise::{binary, compare, convert, select, unary};
use index::{gather, scatter};
use layout::{
    broadcast_in_dim, concatenate, dynamic_slice, dynamic_update_slice, pad, reverse, slice,
    transpose,
};
pub use value::{Data, Value, round_float};
use value::{for_each_index, position};

/// Why a graph could not be evaluated on the host.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    #[error("input {name}: expected {expected}, found {found}")]
    Input {
        name: String,
        expected: Shape,
        found: Shape,
    },
    #[error("expected {expected} inputs, found {found}")]
    InputCount { expected: usize, found: usize },
    #[error("{path}: {op}: a quantized contraction must be lowered before it is evaluated")]
    Quantized { path: String, op: &'static str },
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
}

/// The outputs of `graph` for `inputs`, in order.
///
/// # Errors
/// When the inputs do not fit the graph's, hold 4-bit or 8-bit floats, or a contraction is still annotated.
pub fn evaluate(graph: &Graph, inputs: &[HostTensor]) -> Result<Vec<HostTensor>, EvalError> {
    if inputs.len() != graph.inputs.len() {
        return Err(EvalError::InputCount {
            expected: graph.inputs.len(),
            found: inputs.len(),
        });
    }
    let mut arguments = Vec::with_capacity(inputs.len());
    for (input, tensor) in graph.inputs.iter().zip(inputs) {
        if input.shape != tensor.shape {
            return Err(EvalError::Input {
                name: input.name.clone(),
                expected: input.shape.clone(),
                found: tensor.shape.clone(),
            });
        }
        arguments.push(Value::from_host(tensor)?);
    }
    run(graph, &arguments)?
        .iter()
        .map(|v| v.to_host().map_err(EvalError::from))
        .collect()
}

fn run(graph: &Graph, arguments: &[Value]) -> Result<Vec<Value>, EvalError> {
    // One entry a node; nodes with several results have several values.
    let mut values: Vec<Vec<Value>> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let operand = |i: usize| &values[node.operands[i] as usize][0];
        let result = match &node.op {
            Op::Parameter(i) => vec![arguments[*i].clone()],
            Op::GetTupleElement(i) => vec![values[node.operands[0] as usize][*i].clone()],
            Op::OptimizationBarrier => (0..node.operands.len())
                .map(|i| operand(i).clone())
                .collect(),
            Op::While { cond, body } => {
                let mut carry: Vec<Value> = (0..node.operands.len())
                    .map(|i| operand(i).clone())
                    .collect();
                while run(cond, &carry)?[0].int(0) != 0 {
                    carry = run(body, &carry)?;
                }
                carry
            }
            Op::Composite { body, .. } => {
                let operands: Vec<Value> = (0..node.operands.len())
                    .map(|i| operand(i).clone())
                    .collect();
                run(body, &operands)?
            }
            Op::CustomCall(call) => {
                let operands: Vec<&Value> = (0..node.operands.len()).map(operand).collect();
                let results = call.evaluate_all(&operands, node.shape.clone());
                results.into_iter().map(Value::rounded).collect()
            }
            Op::DotGeneral { quant: Some(_), .. } | Op::Convolution { quant: Some(_), .. } => {
                return Err(EvalError::Quantized {
                    path: graph.path(node).to_string(),
                    op: node.op.name(),
                });
            }
            op => {
                let operands: Vec<&Value> = (0..node.operands.len()).map(operand).collect();
                vec![single(op, &operands, &node.shape)?.rounded()]
            }
        };
        values.push(result);
    }
    Ok(graph
        .outputs
        .iter()
        .map(|o| values[o.node as usize][0].clone())
        .collect())
}

fn single(op: &Op, operands: &[&Value], shape: &Shape) -> Result<Value, EvalError> {
    let shape = shape.clone();
    Ok(match op {
        // All but the last have more than one value, or one that is not made of operands: [`run`] knows them.
        Op::Parameter(_)
        | Op::GetTupleElement(_)
        | Op::OptimizationBarrier
        | Op::While { .. }
        | Op::Composite { .. }
        | Op::CustomCall(_)
        | Op::Stored => operands[0].clone(),
        Op::Constant(value) => Value::from_host(value)?,
        Op::Iota(dim) => iota(*dim, shape),
        Op::Uninitialized => uninitialized(shape),
        Op::Unary(kind) => unary(*kind, operands[0], shape),
        Op::Binary(kind) => binary(*kind, operands[0], operands[1], shape),
        Op::Compare(kind) => compare(*kind, operands[0], operands[1], shape),
        Op::Select => select(operands, shape),
        Op::Clamp => {
            let above = binary(Binary::Max, operands[0], operands[1], shape.clone());
            binary(Binary::Min, &above, operands[2], shape)
        }
        Op::Convert(_) => convert(operands[0], shape),
        Op::BitcastConvert(_) => {
            let host = operands[0].to_host()?;
            Value::from_host(&HostTensor::new(shape, host.data)?)?
        }
        Op::BroadcastInDim { dims, .. } => broadcast_in_dim(operands[0], dims, shape),
        Op::Reshape(_) | Op::ShardingConstraint(_) => Value {
            shape,
            data: operands[0].data.clone(),
        },
        Op::Transpose(perm) => transpose(operands[0], perm, shape),
        Op::Slice { start, stride, .. } => slice(operands[0], start, stride, shape),
        Op::DynamicSlice(_) => dynamic_slice(operands, shape),
        Op::DynamicUpdateSlice => dynamic_update_slice(operands, &shape),
        Op::Pad(pads) => pad(operands[0], operands[1], pads, shape),
        Op::Concatenate(dim) => concatenate(operands, *dim, shape),
        Op::Reverse(dims) => reverse(operands[0], dims, shape),
        Op::Gather(dims) => gather(operands[0], operands[1], dims, shape),
        Op::Scatter(kind, dims) => scatter(*kind, operands[0], operands[1], operands[2], dims),
        Op::Reduce { kind, dims } => reduce(*kind, operands[0], dims, shape),
        Op::DotGeneral { dims, .. } => dot_general(operands[0], operands[1], dims, shape),
        Op::Convolution { dims, .. } => convolution(operands[0], operands[1], dims, shape),
    })
}

/// Of floats no numbers, so that results show whether something reads them.
fn uninitialized(shape: Shape) -> Value {
    let data = match shape.dtype.is_float() {
        true => Data::F(vec![f64::NAN; shape.count()]),
        false => Data::I(vec![0; shape.count()]),
    };
    Value { shape, data }
}

fn iota(dim: usize, shape: Shape) -> Value {
    let mut values = Vec::with_capacity(shape.count());
    for_each_index(&shape.dims, |i| values.push(i[dim] as i64));
    let data = match shape.dtype.is_float() {
        true => Data::F(values.into_iter().map(|v| v as f64).collect()),
        false => Data::I(values),
    };
    Value { shape, data }
}

fn reduce(kind: Reduction, x: &Value, dims: &[usize], shape: Shape) -> Value {
    let mut groups: Vec<Vec<usize>> = vec![Vec::new(); shape.count()];
    let mut source = 0;
    for_each_index(&x.shape.dims, |index| {
        let kept: Vec<usize> = (0..index.len())
            .filter(|d| !dims.contains(d))
            .map(|d| index[d])
            .collect();
        groups[position(&shape.dims, &kept)].push(source);
        source += 1;
    });
    let data = if shape.dtype.is_float() {
        Data::F(
            groups
                .iter()
                .map(|group| {
                    let values = group.iter().map(|i| x.float(*i));
                    match kind {
                        Reduction::Sum | Reduction::And | Reduction::Or => values.sum(),
                        // NaN wins, as in XLA.
                        Reduction::Max | Reduction::Min if values.clone().any(f64::is_nan) => {
                            f64::NAN
                        }
                        Reduction::Max => values.fold(f64::NEG_INFINITY, f64::max),
                        Reduction::Min => values.fold(f64::INFINITY, f64::min),
                    }
                })
                .collect(),
        )
    } else {
        Data::I(
            groups
                .iter()
                .map(|group| {
                    let mut values = group.iter().map(|i| x.int(*i));
                    match kind {
                        Reduction::Sum => values.fold(0, i64::wrapping_add),
                        Reduction::Max => values.max().unwrap_or(i64::MIN),
                        Reduction::Min => values.min().unwrap_or(i64::MAX),
                        Reduction::And => i64::from(values.all(|v| v != 0)),
                        Reduction::Or => i64::from(values.any(|v| v != 0)),
                    }
                })
                .collect(),
        )
    };
    Value { shape, data }
}
