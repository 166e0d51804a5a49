//! The CPU plugin's own kernels in place of what its compiler does slowly.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::graph::kernel::{Contract, LANES, Window, group};
use crate::graph::{
    Binary, Builder, ConvDims, ConvLayout, DotDims, Graph, GraphError, Kernel, Node, Op, PadDim,
    Reduction, Tensor, Unary,
};

type Result<T> = std::result::Result<T, GraphError>;

/// Multiply-adds of int8 products that cannot overflow 32 bits, whatever the values: 255 * 128 * 65,000 < 2^31.
const MOST_INT8_TERMS: usize = 65_000;

/// The graph with the CPU plugin's kernels in place of
///
/// - products of bf16 or int8 activations with weights that are known when they are loaded, and convolutions of images
///   whose channels come last, together with the scales, the bias and the rounding that follow them,
/// - attention in bf16 without a mask.
///
/// Weights are packed for the kernels by operations on weights alone, which [`crate::graph::stage`] moves to where
/// weights are loaded. Apply it to a lowered graph of one partition.
///
/// # Errors
/// When the graph is ill-typed.
pub fn with_kernels(graph: &Graph) -> Result<Graph> {
    let found = Finder::new(graph).find();
    graph.substitute(&mut |b, i, copies| match found.get(&i) {
        None => Ok(None),
        Some(Found::Contraction(c)) => contraction(b, graph, c, copies).map(Some),
        Some(Found::Attention { scale, operands }) => {
            let operands = operands.map(|id| copies[id as usize]);
            let y = b.push(
                Op::Kernel(Box::new(Kernel::Attention { scale: *scale })),
                &operands,
            )?;
            Ok(Some(y))
        }
    })
}

/// What a kernel computes up to some node of the graph; numbers are nodes.
enum Found {
    Contraction(Contraction),
    Attention { scale: f32, operands: [u32; 3] },
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
    /// The live nodes that read each node; an output of the program counts as one more, `None`.
    users: Vec<Vec<Option<usize>>>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        let live = graph.live_nodes();
        let mut users = vec![Vec::new(); graph.nodes.len()];
        for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| live[*i]) {
            for operand in &node.operands {
                users[*operand as usize].push(Some(i));
            }
        }
        for output in &graph.outputs {
            users[output.node as usize].push(None);
        }
        Finder {
            graph,
            of_weights: graph.weight_only(),
            users,
        }
    }

    fn node(&self, id: u32) -> &'a Node {
        &self.graph.nodes[id as usize]
    }

    /// What kernels compute, by the node whose value they give.
    fn find(&self) -> HashMap<usize, Found> {
        let mut found = HashMap::new();
        for (i, node) in self.graph.nodes.iter().enumerate() {
            if self.users[i].is_empty() {
                continue;
            }
            if self.is_product(node) {
                let (root, contraction) = self.with_what_follows(i);
                if contraction.result != DType::S32 {
                    found.insert(root, Found::Contraction(contraction));
                }
            } else if let Some(attention) = self.attention(node) {
                found.insert(i, attention);
            }
        }
        found
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
                let is_one = |n: &usize| *n == 1;
                let image = ConvLayout::channels_last(2);
                let fits = dims.lhs == image
                    && dims.out == image
                    && dims.lhs_dilation.iter().all(is_one)
                    && dims.rhs_dilation.iter().all(is_one)
                    && is_one(&dims.feature_groups)
                    && is_one(&dims.batch_groups)
                    && dims
                        .padding
                        .iter()
                        .all(|(low, high)| *low >= 0 && *high >= 0);
                if !fits {
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
            let [Some(user)] = self.users[root][..] else {
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
                let source = spread.operands[0];
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

    /// The attention that `node` ends: the transposition of heads behind positions in [`crate::nn::attention`].
    fn attention(&self, node: &Node) -> Option<Found> {
        let operand = |node: &Node, at: usize| self.node(node.operands[at]);
        let is = |node: &Node, kind: Binary| matches!(node.op, Op::Binary(k) if k == kind);
        let dot = |node: &'a Node, dims: &DotDims| -> Option<&'a Node> {
            match &node.op {
                Op::DotGeneral {
                    dims: own,
                    quant: None,
                    ..
                } if own == dims => Some(node),
                _ => None,
            }
        };
        // Each step of the pattern, from its end; `?` leaves at the first that differs.
        matches!(&node.op, Op::Transpose(perm) if perm[..] == [0, 2, 1, 3]).then_some(())?;
        let rounded = operand(node, 0);
        matches!(rounded.op, Op::Convert(DType::BF16)).then_some(())?;
        let divided = operand(rounded, 0);
        is(divided, Binary::Div).then_some(())?;
        let product = dot(
            operand(divided, 0),
            &DotDims {
                lhs_batch: vec![0, 1],
                rhs_batch: vec![0, 2],
                lhs_contract: vec![3],
                rhs_contract: vec![1],
            },
        )?;
        let spread = |node: &'a Node| -> Option<&'a Node> {
            matches!(node.op, Op::BroadcastInDim { .. }).then(|| operand(node, 0))
        };
        let total = spread(operand(divided, 1))?;
        let is_sum =
            |op: &Op| matches!(op, Op::Reduce { kind: Reduction::Sum, dims } if dims[..] == [3]);
        is_sum(&total.op).then_some(())?;
        let weights = operand(product, 0);
        matches!(weights.op, Op::Convert(DType::BF16)).then_some(())?;
        (weights.operands[0] == total.operands[0]).then_some(())?;
        let exponential = operand(weights, 0);
        matches!(exponential.op, Op::Unary(Unary::Exp)).then_some(())?;
        let shifted = operand(exponential, 0);
        is(shifted, Binary::Sub).then_some(())?;
        // The softmax has one value whatever it is shifted by, so the shift need not be known but as the scores' own.
        let scaled_id = shifted.operands[0];
        let shift = spread(operand(shifted, 1))?;
        self.is_shift(shift, scaled_id).then_some(())?;
        let scaled = self.node(scaled_id);
        is(scaled, Binary::Mul).then_some(())?;
        let scores = dot(
            operand(scaled, 0),
            &DotDims {
                lhs_batch: vec![0, 2],
                rhs_batch: vec![0, 2],
                lhs_contract: vec![3],
                rhs_contract: vec![3],
            },
        )?;
        let Op::Constant(scale) = &spread(operand(scaled, 1))?.op else {
            return None;
        };
        let scale = scale.to_f64_vec().ok()?.first().copied()? as f32;
        let operands = [scores.operands[0], scores.operands[1], product.operands[1]];
        let [q, k, v] = operands.map(|id| &self.node(id).shape);
        let all_bf16 = [q, k, v].iter().all(|s| s.dtype == DType::BF16);
        let is_even = q.dims[3].is_multiple_of(2);
        (all_bf16 && is_even && k == v && q.count() > 0 && k.count() > 0)
            .then_some(Found::Attention { scale, operands })
    }

    /// Whether `shift` is the rounded maximum of `scores` and nothing else.
    fn is_shift(&self, shift: &Node, scores: u32) -> bool {
        let mut node = shift;
        loop {
            match &node.op {
                Op::Reshape(_) | Op::Unary(Unary::RoundNearestEven) => {
                    node = self.node(node.operands[0]);
                }
                Op::Reduce {
                    kind: Reduction::Max,
                    dims,
                } => return dims[..] == [3] && node.operands[0] == scores,
                _ => return false,
            }
        }
    }
}

fn contraction(b: &Builder, graph: &Graph, c: &Contraction, copies: &[Tensor]) -> Result<Tensor> {
    let node = &graph.nodes[c.product];
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
        let bits = b.push(Op::BitcastConvert(DType::U8), &[lhs])?;
        let top = b.full(&b.shape(bits), 128.0)?;
        operands[0] = b.binary(Binary::Xor, bits, top)?;
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
