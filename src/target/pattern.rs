//! What layers look like in a lowered graph, read back from their last operation.
//!
//! The functions follow [`crate::nn`] and [`crate::quant`] operation by operation; a graph that differs anywhere is not
//! recognized, and stays as it is.

use crate::dtype::DType;
use crate::graph::{Binary, Comparison, DotDims, Graph, Node, Op, Reduction, Unary};

/// A graph to look for layers in. Numbers are nodes; `None` is "not this".
pub struct View<'a> {
    pub graph: &'a Graph,
    /// The live nodes that read each node; an output of the program counts as one more, `None`.
    pub users: Vec<Vec<Option<usize>>>,
}

/// A norm of a bf16 tensor.
pub struct Norm {
    pub x: u32,
    pub weight: u32,
    pub bias: u32,
    pub epsilon: f32,
    /// 0 for a layer norm.
    pub groups: usize,
}

/// Attention.
pub struct Heads {
    pub scale: f32,
    pub causal: bool,
    /// q, k and v `[batch, length, heads, size]`.
    pub operands: [u32; 3],
}

impl<'a> View<'a> {
    pub fn new(graph: &'a Graph) -> Self {
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
        View { graph, users }
    }

    pub fn node(&self, id: u32) -> &'a Node {
        &self.graph.nodes[id as usize]
    }

    fn dims(&self, id: u32) -> &'a [usize] {
        &self.node(id).shape.dims
    }

    fn is(&self, id: u32, dtype: DType) -> Option<u32> {
        (self.node(id).shape.dtype == dtype).then_some(id)
    }

    fn binary(&self, id: u32, kind: Binary) -> Option<[u32; 2]> {
        let node = self.node(id);
        match node.op {
            Op::Binary(found) if found == kind => Some([node.operands[0], node.operands[1]]),
            _ => None,
        }
    }

    fn unary(&self, id: u32, kind: Unary) -> Option<u32> {
        let node = self.node(id);
        matches!(node.op, Op::Unary(found) if found == kind).then(|| node.operands[0])
    }

    fn convert(&self, id: u32, to: DType) -> Option<u32> {
        let node = self.node(id);
        matches!(node.op, Op::Convert(found) if found == to).then(|| node.operands[0])
    }

    /// The bf16 tensor that `id` is in `f32`, or `id` itself.
    pub fn widened(&self, id: u32) -> u32 {
        let source = self.convert(id, DType::F32);
        source.and_then(|x| self.is(x, DType::BF16)).unwrap_or(id)
    }

    fn reshape(&self, id: u32) -> Option<u32> {
        let node = self.node(id);
        matches!(node.op, Op::Reshape(_)).then(|| node.operands[0])
    }

    fn reduce(&self, id: u32, kind: Reduction, over: &[usize]) -> Option<u32> {
        let node = self.node(id);
        match &node.op {
            Op::Reduce { kind: found, dims } if *found == kind && dims == over => {
                Some(node.operands[0])
            }
            _ => None,
        }
    }

    /// What is spread along the other dimensions, if it is along `along` and fills them.
    fn spread(&self, id: u32, along: &[usize]) -> Option<u32> {
        let node = self.node(id);
        let Op::BroadcastInDim { dims, result } = &node.op else {
            return None;
        };
        let sizes = self.dims(node.operands[0]);
        let fills = dims.iter().zip(sizes).all(|(d, n)| result[*d] == *n);
        (dims == along && fills).then(|| node.operands[0])
    }

    /// What is spread from size 1 to the size of the last dimension.
    fn spread_last(&self, id: u32) -> Option<u32> {
        let node = self.node(id);
        let Op::BroadcastInDim { dims, result } = &node.op else {
            return None;
        };
        let sizes = self.dims(node.operands[0]);
        let in_order = dims.iter().copied().eq(0..result.len());
        let last = result.len().checked_sub(1)?;
        let same = (0..last).all(|d| sizes.get(d) == Some(&result[d]));
        (in_order && same && sizes[last] == 1).then(|| node.operands[0])
    }

    /// The value that all elements have.
    fn scalar(&self, id: u32) -> Option<f64> {
        let node = self.node(id);
        let constant = match node.op {
            Op::BroadcastInDim { .. } => self.node(node.operands[0]),
            _ => node,
        };
        match &constant.op {
            Op::Constant(value) if value.shape.count() == 1 => {
                value.to_f64_vec().ok()?.first().copied()
            }
            _ => None,
        }
    }

    /// `y = x * value`: x, for a value within rounding.
    fn scaled(&self, id: u32, value: f64) -> Option<u32> {
        let [x, by] = self.binary(id, Binary::Mul)?;
        ((self.scalar(by)? - value).abs() <= 1e-6 * value.abs()).then_some(x)
    }

    /// The bf16 tensor whose magnitudes `id` is the maximum of, over all but its first dimensions.
    pub fn abs_max(&self, id: u32) -> Option<u32> {
        let node = self.node(id);
        let Op::Reduce {
            kind: Reduction::Max,
            dims,
        } = &node.op
        else {
            return None;
        };
        let kept = node.shape.rank();
        let x = self.is(self.unary(node.operands[0], Unary::Abs)?, DType::BF16)?;
        dims.iter()
            .copied()
            .eq(kept..self.dims(x).len())
            .then_some(x)
    }

    /// AQT's scale of the maximum `magnitude` of [`View::abs_max`]: the maximum.
    pub fn aqt_scale(&self, id: u32) -> Option<u32> {
        let wide = self.scaled(self.convert(id, DType::BF16)?, 1.0 / 127.5)?;
        let nonzero = self.node(self.convert(wide, DType::F32)?);
        matches!(nonzero.op, Op::Select).then_some(())?;
        let &[is_zero, one, most] = &nonzero.operands[..] else {
            return None;
        };
        (self.is_value(is_zero, most, 0.0) && self.scalar(one)? == 1.0).then_some(most)
    }

    /// Whether `id` compares `x` with a value for equality.
    fn is_value(&self, id: u32, x: u32, value: f64) -> bool {
        let node = self.node(id);
        matches!(node.op, Op::Compare(Comparison::Eq))
            && node.operands[0] == x
            && self.scalar(node.operands[1]) == Some(value)
    }

    /// `1 / scale`, and 1 where that is infinite: the scale.
    fn inverse(&self, id: u32) -> Option<u32> {
        let node = self.node(id);
        matches!(node.op, Op::Select).then_some(())?;
        let &[is_infinite, one, inverse] = &node.operands[..] else {
            return None;
        };
        let [again, scale] = self.binary(inverse, Binary::Div)?;
        let ones = [one, again].map(|id| self.scalar(id));
        let fits = ones == [Some(1.0); 2] && self.is_value(is_infinite, inverse, f64::INFINITY);
        fits.then_some(scale)
    }

    /// `id` as integers from -127 to 127: x and its scale, for each index of its first dimensions.
    pub fn quantized(&self, id: u32) -> Option<[u32; 2]> {
        let rounded = self.convert(id, DType::S8)?;
        let clamped = self.node(self.unary(rounded, Unary::RoundNearestEven)?);
        matches!(clamped.op, Op::Clamp).then_some(())?;
        let limits = [0, 2].map(|i| self.scalar(clamped.operands[i]));
        (limits == [Some(-127.0), Some(127.0)]).then_some(())?;
        let [x, factor] = self.binary(clamped.operands[1], Binary::Mul)?;
        let kept: Vec<usize> = match &self.node(factor).op {
            Op::BroadcastInDim { dims, .. } => (0..dims.len()).collect(),
            _ => return None,
        };
        let scale = self.inverse(self.spread(factor, &kept)?)?;
        Some([self.is(x, DType::BF16)?, self.is(scale, DType::BF16)?])
    }

    /// `1 / sqrt(max(squares - mean^2, 0) + epsilon)`: the mean, the mean of squares, and epsilon.
    fn inverse_deviation(&self, id: u32) -> Option<(u32, u32, f32)> {
        let [variance, epsilon] = self.binary(self.unary(id, Unary::Rsqrt)?, Binary::Add)?;
        let [difference, zero] = self.binary(variance, Binary::Max)?;
        (self.scalar(zero)? == 0.0).then_some(())?;
        let [squares, square] = self.binary(difference, Binary::Sub)?;
        let [mean, again] = self.binary(square, Binary::Mul)?;
        (mean == again).then_some((mean, squares, self.scalar(epsilon)? as f32))
    }

    /// The square's operand.
    fn square(&self, id: u32) -> Option<u32> {
        let [x, again] = self.binary(id, Binary::Mul)?;
        (x == again).then_some(x)
    }

    /// [`crate::nn::layer_norm`] in bf16.
    pub fn layer_norm(&self, id: u32) -> Option<Norm> {
        let y = self.convert(id, DType::BF16)?;
        let last = self.dims(y).len().checked_sub(1)?;
        let features = self.dims(y)[last];
        let rows: Vec<usize> = (0..last).collect();
        let [y, bias] = self.binary(y, Binary::Add)?;
        let [y, weight] = self.binary(y, Binary::Mul)?;
        let [y, inverse] = self.binary(y, Binary::Mul)?;
        let [x, mean] = self.binary(y, Binary::Sub)?;
        let [inverse, mean] = [self.spread(inverse, &rows)?, self.spread(mean, &rows)?];
        let (own_mean, squares, epsilon) = self.inverse_deviation(inverse)?;
        let mean_of = |id: u32| {
            let sum = self.scaled(id, 1.0 / features as f64)?;
            self.reduce(sum, Reduction::Sum, &[last])
        };
        let fits = mean == own_mean
            && mean_of(mean) == Some(x)
            && mean_of(squares).and_then(|id| self.square(id)) == Some(x);
        Some(Norm {
            x: self.is(self.convert(x, DType::F32).filter(|_| fits)?, DType::BF16)?,
            weight: self.spread(weight, &[last])?,
            bias: self.spread(bias, &[last])?,
            epsilon,
            groups: 0,
        })
    }

    /// [`crate::nn::group_norm`] in bf16.
    pub fn group_norm(&self, id: u32) -> Option<Norm> {
        let y = self.convert(id, DType::BF16)?;
        let &[n, h, w, c] = self.dims(y) else {
            return None;
        };
        let [y, shift] = self.binary(y, Binary::Add)?;
        let [x, scale] = self.binary(y, Binary::Mul)?;
        let [scale, shift] = [self.spread(scale, &[0, 3])?, self.spread(shift, &[0, 3])?];
        let [inverse, weight] = self.binary(scale, Binary::Mul)?;
        let [bias, offset] = self.binary(shift, Binary::Sub)?;
        let [mean, again] = self.binary(offset, Binary::Mul)?;
        (again == scale).then_some(())?;
        let per_group = |id: u32| self.spread(self.reshape(id)?, &[0, 1]);
        let [inverse, mean] = [per_group(inverse)?, per_group(mean)?];
        let &[_, groups] = self.dims(mean) else {
            return None;
        };
        let (own_mean, squares, epsilon) = self.inverse_deviation(inverse)?;
        let size = c / groups.max(1);
        let mean_of = |id: u32| {
            let sum = self.scaled(id, 1.0 / (h * w * size) as f64)?;
            let grouped = self.reduce(sum, Reduction::Sum, &[2])?;
            (self.dims(grouped) == [n, groups, size]).then_some(())?;
            self.reduce(self.reshape(grouped)?, Reduction::Sum, &[1, 2])
        };
        let fits = mean == own_mean
            && mean_of(mean) == Some(x)
            && mean_of(squares).and_then(|id| self.square(id)) == Some(x);
        Some(Norm {
            x: self.is(self.convert(x, DType::F32).filter(|_| fits)?, DType::BF16)?,
            weight: self.spread(weight, &[1])?,
            bias: self.spread(bias, &[1])?,
            epsilon,
            groups,
        })
    }

    /// `y * logistic(y)`: y, if nothing else reads it.
    pub fn silu(&self, id: u32) -> Option<u32> {
        let [y, gate] = self.binary(id, Binary::Mul)?;
        let alone = self.users[y as usize].len() == 2 && self.users[gate as usize].len() == 1;
        (alone && self.unary(gate, Unary::Logistic)? == y).then_some(y)
    }

    /// A slice of the last dimension: of what, and where it begins.
    fn part_of_last(&self, id: u32) -> Option<(u32, usize)> {
        let node = self.node(id);
        let Op::Slice { start, stride, .. } = &node.op else {
            return None;
        };
        let (from, others) = start.split_last()?;
        let of = self.dims(node.operands[0]);
        let whole = of[..others.len()] == node.shape.dims[..others.len()];
        (whole && stride.iter().all(|s| *s == 1)).then_some((node.operands[0], *from))
    }

    /// The first half of the last dimension times [`crate::nn::gelu`] of the second, in bf16: the whole.
    pub fn geglu(&self, id: u32) -> Option<u32> {
        let [value, activated] = self.binary(id, Binary::Mul)?;
        let [gate, phi] = self.binary(activated, Binary::Mul)?;
        let sum = self.scaled(phi, 0.5)?;
        let [erf, one] = self.binary(sum, Binary::Add)?;
        (self.scalar(one)? == 1.0).then_some(())?;
        let [again, by] = self.binary(self.unary(erf, Unary::Erf)?, Binary::Mul)?;
        // The constant is rounded to the type of the gate.
        let close = (self.scalar(by)? - std::f64::consts::FRAC_1_SQRT_2).abs() < 2e-3;
        let size = *self.dims(id).last()?;
        let ((x, 0), (same, middle)) = (self.part_of_last(value)?, self.part_of_last(gate)?) else {
            return None;
        };
        let fits = close && again == gate && x == same && middle == size;
        let is_whole = self.dims(x).last() == Some(&(2 * size));
        self.is(x, DType::BF16).filter(|_| fits && is_whole)
    }

    fn dot(&self, id: u32, dims: &DotDims) -> Option<[u32; 2]> {
        let node = self.node(id);
        match &node.op {
            Op::DotGeneral {
                dims: found,
                quant: None,
                ..
            } if found == dims => Some([node.operands[0], node.operands[1]]),
            _ => None,
        }
    }

    /// Scores of which a query keeps those up to its own place: the scores.
    fn causal(&self, id: u32) -> Option<u32> {
        let node = self.node(id);
        matches!(node.op, Op::Select).then_some(())?;
        let &[visible, scores, lowest] = &node.operands[..] else {
            return None;
        };
        let order = self.node(self.spread(visible, &[2, 3])?);
        let places: Option<Vec<usize>> = order
            .operands
            .iter()
            .map(|id| match self.node(*id).op {
                Op::Iota(dim) => Some(dim),
                _ => None,
            })
            .collect();
        let fits = matches!(order.op, Op::Compare(Comparison::Ge)) && places? == [0, 1];
        (fits && self.scalar(lowest)? == f64::from(f32::MIN)).then_some(scores)
    }

    /// [`crate::nn::attention`] in bf16, up to the transposition of heads behind positions.
    pub fn attention(&self, id: u32) -> Option<Heads> {
        let node = self.node(id);
        matches!(&node.op, Op::Transpose(perm) if perm[..] == [0, 2, 1, 3]).then_some(())?;
        let divided = self.convert(node.operands[0], DType::BF16)?;
        let [product, total] = self.binary(divided, Binary::Div)?;
        let weights_times_values = DotDims {
            lhs_batch: vec![0, 1],
            rhs_batch: vec![0, 2],
            lhs_contract: vec![3],
            rhs_contract: vec![1],
        };
        let [rounded, v] = self.dot(product, &weights_times_values)?;
        let weights = self.convert(rounded, DType::BF16)?;
        let total = self.spread(total, &[0, 1, 2])?;
        (self.reduce(total, Reduction::Sum, &[3])? == weights).then_some(())?;
        let [scaled, shift] = self.binary(self.unary(weights, Unary::Exp)?, Binary::Sub)?;
        // The shift changes no value; it is the rounded maximum of the scores.
        let shift = self.unary(self.spread_last(shift)?, Unary::RoundNearestEven)?;
        let highest = self.reduce(self.reshape(shift)?, Reduction::Max, &[3])?;
        (highest == scaled).then_some(())?;
        let masked = self.causal(scaled);
        let scaled = masked.unwrap_or(scaled);
        let [scores, scale] = self.binary(scaled, Binary::Mul)?;
        let queries_times_keys = DotDims {
            lhs_batch: vec![0, 2],
            rhs_batch: vec![0, 2],
            lhs_contract: vec![3],
            rhs_contract: vec![3],
        };
        let [q, k] = self.dot(scores, &queries_times_keys)?;
        let operands = [q, k, v];
        let shapes = operands.map(|id| &self.node(id).shape);
        let fits = shapes
            .iter()
            .all(|s| s.dtype == DType::BF16 && s.count() > 0)
            && shapes[0].dims[3].is_multiple_of(2)
            && shapes[1] == shapes[2];
        Some(Heads {
            scale: self.scalar(scale).filter(|_| fits)? as f32,
            causal: masked.is_some(),
            operands,
        })
    }
}
