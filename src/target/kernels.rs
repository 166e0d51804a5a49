//! The CPU plugin's own kernels in place of what its compiler does slowly.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::graph::kernel::{Contract, LANES, Window, group};
use crate::graph::{
    Binary, Builder, ConvDims, Graph, GraphError, Kernel, Node, Op, PadDim, Tensor,
};

use super::cpu::is_plain_convolution;
use super::pattern::{Heads, Norm, View};

type Result<T> = std::result::Result<T, GraphError>;

/// Multiply-adds of int8 products that cannot overflow 32 bits, whatever the values: 255 * 128 * 65,000 < 2^31.
const MOST_INT8_TERMS: usize = 65_000;

/// The graph with the CPU plugin's kernels in place of
///
/// - products of bf16 or int8 activations with weights that are known when they are loaded, and convolutions of images
///   whose channels come last, together with the scales, the bias and the rounding that follow them,
/// - in bf16: attention, norms (with SiLU after them), GEGLU, the range finding and rounding of int8.
///
/// Weights are packed for the kernels by operations on weights alone, which [`crate::graph::stage`] moves to where
/// weights are loaded. Apply it to a lowered graph of one partition.
///
/// # Errors
/// When the graph is ill-typed.
pub fn with_kernels(graph: &Graph) -> Result<Graph> {
    let finder = Finder::new(graph);
    let found = finder.find();
    graph.substitute(&mut |b, i, copies| {
        let copy = |id: u32| copies[id as usize];
        let call = |kernel: Kernel, operands: &[Tensor]| {
            b.push(Op::Kernel(Box::new(kernel)), operands).map(Some)
        };
        match found.get(&i) {
            None => Ok(None),
            Some(Found::Contraction(c)) => contraction(b, &finder.view, c, copies).map(Some),
            Some(Found::Attention(heads)) => {
                let &Heads { scale, causal, .. } = heads;
                let kernel = Kernel::Attention { scale, causal };
                call(kernel, &heads.operands.map(copy))
            }
            Some(Found::AbsMax { x, scale_of }) => {
                let kept = graph.nodes[i].shape.rank();
                let scale = scale_of.is_some();
                call(Kernel::AbsMax { kept, scale }, &[copy(*x)])
            }
            Some(Found::Norm(norm, silu)) => {
                let kernel = match norm.groups {
                    0 => Kernel::LayerNorm {
                        epsilon: norm.epsilon,
                    },
                    groups => Kernel::GroupNorm {
                        groups,
                        epsilon: norm.epsilon,
                        silu: *silu,
                    },
                };
                call(kernel, &[norm.x, norm.weight, norm.bias].map(copy))
            }
            Some(Found::Geglu(x)) => call(Kernel::Geglu, &[copy(*x)]),
        }
    })
}

/// What a kernel computes up to some node of the graph; numbers are nodes.
enum Found {
    Contraction(Contraction),
    Attention(Heads),
    AbsMax {
        x: u32,
        /// The maximum, where this is AQT's scale of it.
        scale_of: Option<u32>,
    },
    /// With whether SiLU follows.
    Norm(Norm, bool),
    Geglu(u32),
}

/// A product with what follows it.
struct Contraction {
    product: usize,
    result: DType,
    /// With the result's dimensions along which it goes.
    row_scale: Option<(u32, Vec<usize>)>,
    column_scale: Option<u32>,
    bias: Option<u32>,
}

struct Finder<'a> {
    graph: &'a Graph,
    of_weights: Vec<bool>,
    view: View<'a>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        Finder {
            graph,
            of_weights: graph.weight_only(),
            view: View::new(graph),
        }
    }

    fn node(&self, id: u32) -> &'a Node {
        self.view.node(id)
    }

    /// What kernels compute, by the node whose value they give.
    fn find(&self) -> HashMap<usize, Found> {
        let mut found = HashMap::new();
        for (i, node) in self.graph.nodes.iter().enumerate() {
            let id = i as u32;
            if self.view.users[i].is_empty() {
                continue;
            }
            if self.of_weights[i] {
                // Weights are computed with once; but XLA widens all of one to find its range.
                found.extend(self.aqt_range(id).map(|range| (i, range)));
                continue;
            }
            if self.is_product(node) {
                let (root, contraction) = self.with_what_follows(i);
                if contraction.result != DType::S32 {
                    found.insert(root, Found::Contraction(contraction));
                }
            } else if let Some(other) = self.other(id) {
                // What is taken into this kernel is no value of its own any more.
                match other {
                    Found::Norm(_, true) => found.remove(&(node.operands[0] as usize)),
                    Found::AbsMax {
                        scale_of: Some(most),
                        ..
                    } => found.remove(&(most as usize)),
                    _ => None,
                };
                found.insert(i, other);
            }
        }
        found
    }

    /// AQT's scale of a tensor.
    fn aqt_range(&self, id: u32) -> Option<Found> {
        let most = self.view.aqt_scale(id)?;
        Some(Found::AbsMax {
            x: self.view.abs_max(most)?,
            scale_of: Some(most),
        })
    }

    fn other(&self, id: u32) -> Option<Found> {
        let view = &self.view;
        match &self.node(id).op {
            Op::Transpose(_) => view.attention(id).map(Found::Attention),
            Op::Reduce { .. } => view
                .abs_max(id)
                .map(|x| Found::AbsMax { x, scale_of: None }),
            Op::Convert(DType::BF16) => {
                let norm = view.group_norm(id).or_else(|| view.layer_norm(id));
                let norm = norm.map(|norm| Found::Norm(norm, false));
                norm.or_else(|| self.aqt_range(id))
            }
            Op::Binary(Binary::Mul) => match view.silu(id).and_then(|y| view.group_norm(y)) {
                Some(norm) => Some(Found::Norm(norm, true)),
                None => view.geglu(id).map(Found::Geglu),
            },
            _ => None,
        }
    }

    /// Whether a node multiplies rows with weights as the kernel can.
    fn is_product(&self, node: &Node) -> bool {
        let operands = match node.op {
            Op::DotGeneral { quant: None, .. } | Op::Convolution { quant: None, .. } => {
                [node.operands[0], node.operands[1]]
            }
            _ => return false,
        };
        let [lhs, rhs] = operands.map(|id| &self.node(id).shape);
        let types = (lhs.dtype, rhs.dtype, node.shape.dtype);
        let has_kernel = matches!(
            types,
            (DType::BF16, DType::BF16, DType::F32) | (DType::S8, DType::S8, DType::S32)
        );
        let Some(group) = group(lhs.dtype).filter(|_| has_kernel) else {
            return false;
        };
        if self.of_weights[operands[0] as usize] || !self.of_weights[operands[1] as usize] {
            return false;
        }
        let (terms, channels) = match &node.op {
            Op::DotGeneral { dims, .. } => {
                let fits = dims.lhs_batch.is_empty()
                    && dims.lhs_contract == [lhs.rank() - 1]
                    && dims.rhs_contract.len() == 1
                    && rhs.rank() == 2;
                if !fits {
                    return false;
                }
                let terms = lhs.dims[lhs.rank() - 1];
                (terms, terms)
            }
            Op::Convolution { dims, .. } => {
                if !is_plain_convolution(dims) {
                    return false;
                }
                let taps: usize = dims.rhs.spatial.iter().map(|d| rhs.dims[*d]).product();
                (taps * lhs.dims[3], lhs.dims[3])
            }
            _ => return false,
        };
        let exact = lhs.dtype == DType::BF16 || terms <= MOST_INT8_TERMS;
        exact && channels.is_multiple_of(group) && node.shape.count() > 0 && terms > 0
    }

    /// The product at `i` with the scales, the bias and the rounding that are its value's only use, up to the last.
    fn with_what_follows(&self, i: usize) -> (usize, Contraction) {
        let mut found = Contraction {
            product: i,
            result: self.graph.nodes[i].shape.dtype,
            row_scale: None,
            column_scale: None,
            bias: None,
        };
        let mut root = i;
        while found.result != DType::BF16 {
            let [Some(user)] = self.view.users[root][..] else {
                break;
            };
            if !self.follows(root as u32, &self.graph.nodes[user], &mut found) {
                break;
            }
            root = user;
        }
        (root, found)
    }

    /// Whether `user` is one more thing that the kernel does to its sums, noted in `found`.
    fn follows(&self, sums: u32, user: &Node, found: &mut Contraction) -> bool {
        match (&user.op, found.result) {
            (Op::Convert(DType::F32), DType::S32) => {
                found.result = DType::F32;
                true
            }
            (Op::Convert(DType::BF16), DType::F32) => {
                found.result = DType::BF16;
                true
            }
            (Op::Binary(kind @ (Binary::Mul | Binary::Add)), DType::F32) => {
                let other = match user.operands[..] {
                    [a, b] if a == sums => b,
                    [a, _] => a,
                    _ => return false,
                };
                let spread = self.node(other);
                let Op::BroadcastInDim { dims, .. } = &spread.op else {
                    return false;
                };
                // The kernel widens bf16 by itself.
                let source = self.view.widened(spread.operands[0]);
                let sizes = &self.node(source).shape.dims;
                let last = user.shape.rank() - 1;
                let whole = dims
                    .iter()
                    .zip(sizes)
                    .all(|(d, n)| user.shape.dims[*d] == *n);
                let by_column = dims[..] == [last];
                let by_row = !dims.contains(&last) && !dims.is_empty();
                let before_bias = found.bias.is_none();
                if !whole || other == sums {
                    return false;
                }
                match kind {
                    Binary::Add if by_column && before_bias => found.bias = Some(source),
                    Binary::Mul if by_column && before_bias && found.column_scale.is_none() => {
                        found.column_scale = Some(source);
                    }
                    Binary::Mul
                        if by_row
                            && before_bias
                            && found.column_scale.is_none()
                            && found.row_scale.is_none() =>
                    {
                        found.row_scale = Some((source, dims.clone()));
                    }
                    _ => return false,
                }
                true
            }
            _ => false,
        }
    }
}

fn contraction(b: &Builder, view: &View<'_>, c: &Contraction, copies: &[Tensor]) -> Result<Tensor> {
    let node = &view.graph.nodes[c.product];
    let [lhs, rhs] = [0, 1].map(|i| copies[node.operands[i] as usize]);
    let (matrix, window) = match &node.op {
        Op::Convolution { dims, .. } => columns_of_kernel(b, rhs, dims)?,
        Op::DotGeneral { dims, .. } => match dims.rhs_contract[..] {
            [0] => (b.transpose(rhs, &[1, 0])?, None),
            _ => (rhs, None),
        },
        _ => return Err(b.invalid(format!("{} is no contraction", node.op.name()))),
    };
    let columns = b.dims(matrix)[0];
    let mut operands = vec![lhs, packed(b, matrix)?];
    if b.dtype(lhs) == DType::S8 {
        // The processor's int8 product takes one unsigned factor: values plus 128, which is their top bit flipped.
        operands[0] = match view.quantized(node.operands[0]) {
            Some(operands) => {
                let operands = operands.map(|id| copies[id as usize]);
                b.push(Op::Kernel(Box::new(Kernel::Quantize)), &operands)?
            }
            None => {
                let bits = b.push(Op::BitcastConvert(DType::U8), &[lhs])?;
                let top = b.full(&b.shape(bits), 128.0)?;
                b.binary(Binary::Xor, bits, top)?
            }
        };
        operands.push(start(b, matrix)?);
    }
    let leading = &node.shape.dims[..node.shape.rank() - 1];
    if let Some((scale, dims)) = &c.row_scale {
        operands.push(b.broadcast_in_dim(copies[*scale as usize], dims, leading)?);
    }
    operands.extend(c.column_scale.map(|id| copies[id as usize]));
    operands.extend(c.bias.map(|id| copies[id as usize]));
    let kernel = Kernel::Contract(Contract {
        columns,
        window,
        row_scale: c.row_scale.is_some(),
        column_scale: c.column_scale.is_some(),
        bias: c.bias.is_some(),
        result: c.result,
    });
    b.push(Op::Kernel(Box::new(kernel)), &operands)
}

/// A convolution's kernel as a matrix `[out, places * in]`.
fn columns_of_kernel(
    b: &Builder,
    kernel: Tensor,
    dims: &ConvDims,
) -> Result<(Tensor, Option<Window>)> {
    let order = [
        dims.rhs.batch,
        dims.rhs.spatial[0],
        dims.rhs.spatial[1],
        dims.rhs.feature,
    ];
    let kernel = b.transpose(kernel, &order)?;
    let sizes = b.dims(kernel);
    let matrix = b.reshape(kernel, &[sizes[0], sizes[1..].iter().product()])?;
    let padding = [0, 1].map(|i| {
        let (low, high) = dims.padding[i];
        (low.unsigned_abs() as usize, high.unsigned_abs() as usize)
    });
    let window = Window {
        size: [sizes[1], sizes[2]],
        strides: [dims.strides[0], dims.strides[1]],
        padding,
    };
    Ok((matrix, Some(window)))
}

/// `[columns, k]` with zero columns up to a multiple of [`LANES`].
fn padded(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let columns = b.dims(matrix)[0];
    let missing = columns.next_multiple_of(LANES) - columns;
    if missing == 0 {
        return Ok(matrix);
    }
    let high = PadDim {
        high: missing as i64,
        ..PadDim::default()
    };
    b.pad(matrix, 0.0, &[high, PadDim::default()])
}

/// `[columns, k]` as the kernel reads it ([`crate::graph::kernel::packed_shape`]).
fn packed(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let Some(group) = group(b.dtype(matrix)) else {
        return Err(b.invalid(format!("no kernel multiplies {}", b.shape(matrix))));
    };
    let matrix = padded(b, matrix)?;
    let [columns, k] = [0, 1].map(|d| b.dims(matrix)[d]);
    let blocks = b.reshape(matrix, &[columns / LANES, LANES, k / group, group])?;
    b.transpose(blocks, &[0, 2, 1, 3])
}

/// What takes the 128 that was added to every value of the lhs out of the sums again.
fn start(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let wide = b.convert(padded(b, matrix)?, DType::S32)?;
    let sums = b.sum(wide, &[1])?;
    b.mul(sums, b.full(&b.shape(sums), -128.0)?)
}
