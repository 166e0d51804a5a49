//! Products of training steps whose operands are rounded to int8: forward, and both of the derivative.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::follow;
use crate::backend::rounding::Rounded;
use crate::dtype::DType;
use crate::graph::scopes::RANGE_FINDING;
use crate::graph::{
    Binary, Builder, Composite, Contraction, DotDims, Graph, Node, Op, Reduction, Tensor,
};
use crate::quant;
use crate::shape::Shape;

use super::super::{ColumnRanges, Features, RoundedGradient, RoundedProduct};
use super::{Result, is_split, rounding_of_sum};

/// The nodes that read each node ([`follow::users`]).
type Users = [Vec<Option<usize>>];

/// The scope of what is the same for all calls.
const FIRST_ROWS: &str = "first_rows";

/// A product that the kernel takes. Numbers are nodes.
pub(super) struct Product {
    kernel: RoundedProduct,
    x: Rounded,
    weights: u32,
    /// What the weights were before they were rounded.
    wide_weights: u32,
    bias: Option<u32>,
    /// What is added to the result.
    residual: Option<u32>,
    /// The scope of the product, which what is added to it has not.
    scope: String,
    /// The dimension of the weights that is contracted.
    contracted: usize,
    /// Of the result.
    shape: Shape,
    parts: usize,
}

impl Product {
    pub(super) fn call(
        &self,
        b: &Builder,
        copies: &[Tensor],
        shared: &mut Shared,
    ) -> Result<Tensor> {
        let b = &b.at(&self.scope);
        let copy = |id: u32| copies[id as usize];
        let mut weights = copy(self.weights);
        if (self.contracted == 0) != self.kernel.terms_first {
            weights = b.transpose(weights, &[1, 0])?;
        }
        let lying = [&[1], &b.dims(weights)[..]].concat();
        let columns = self.shape.dims.last().copied().unwrap_or(1);
        let rows = self.shape.count() / columns.max(1);
        let x = copy(self.x.x);
        let terms = b.shape(x).count() / rows.max(1);
        let vector = |x: Tensor| {
            let wide = b.convert(x, DType::F32)?;
            b.reshape(wide, &[1, 1, columns])
        };
        // The same as in the search for the scale, which is then left to those that round the weights.
        let absmax = quant::absmax(b, copy(self.wide_weights), &[self.contracted])?;
        let mut operands = vec![
            b.reshape(x, &[1, rows, terms])?,
            b.reshape(weights, &lying)?,
            vector(absmax)?,
        ];
        if let Some(bias) = self.bias {
            operands.push(vector(copy(bias))?);
        }
        if let Some(of) = self.x.noise {
            operands.extend(shared.noise(b, copy(of.key), self.parts, rows / self.parts)?);
        }
        if let Some(residual) = self.residual {
            operands.push(b.reshape(copy(residual), &[1, rows, columns])?);
        }
        let y = b.push(Op::CustomCall(Arc::new(self.kernel)), &operands)?;
        b.reshape(y, &self.shape.dims)
    }
}

/// What several calls take, of which the first one makes it.
#[derive(Default)]
pub(super) struct Shared {
    /// The numbers of the first rows of parts, by the rows of one.
    first_rows: HashMap<usize, Tensor>,
    /// The ranges of columns, by the node that they are of, and the groups of parts that share them.
    ranges: HashMap<(u32, usize), Tensor>,
}

impl Shared {
    /// The operands that noise is made from: the key, and the first row of each part of the batch, of `rows` rows each. Each device finds
    /// its own of these rows among those of all, outside of loops.
    fn noise(
        &mut self,
        b: &Builder,
        key: Tensor,
        parts: usize,
        rows: usize,
    ) -> Result<[Tensor; 2]> {
        let key = b.reshape(key, &[1, 1, 2])?;
        if let Some(first) = self.first_rows.get(&rows) {
            return Ok([key, *first]);
        }
        let outside = b.at(FIRST_ROWS);
        let first = outside.iota(Shape::new(DType::U32, [parts, 1, 1]), 0)?;
        let first = outside.mul_scalar(first, rows as f64)?;
        self.first_rows.insert(rows, first);
        Ok([key, first])
    }
}

/// Decides which products the kernels take.
pub(super) struct Claims<'a> {
    graph: &'a Graph,
    features: Features,
    /// Parts of the batch.
    parts: usize,
    /// Which dimensions of each input devices share.
    is_split: &'a [Vec<bool>],
}

impl<'a> Claims<'a> {
    pub fn of(
        graph: &'a Graph,
        features: Features,
        parts: usize,
        is_split: &'a [Vec<bool>],
    ) -> Claims<'a> {
        Claims {
            graph,
            features,
            parts,
            is_split,
        }
    }

    fn shape(&self, id: u32) -> &'a Shape {
        &self.graph.nodes[id as usize].shape
    }

    /// The products of rows with weights, by the node whose value the kernel gives.
    pub fn products(&self, users: &Users) -> HashMap<usize, Product> {
        let live = self.live(users);
        live.filter_map(|i| self.product(users, i)).collect()
    }

    /// The gradients of weights, by the node whose value the kernel gives.
    pub fn gradients(&self, users: &Users) -> HashMap<usize, Gradient> {
        let live = self.live(users);
        let weights = self.weights_by_rows();
        live.filter_map(|i| {
            let rounded = rounding_of_sum(self.graph, users, i, self.parts);
            let (root, result) = match rounded {
                Some(rounded) => (rounded, DType::BF16),
                None => (i, DType::F32),
            };
            Some((root, self.gradient(i, &weights, result)?))
        })
        .collect()
    }

    /// The weights that rows are multiplied with, by these rows before they were rounded.
    fn weights_by_rows(&self) -> HashMap<u32, u32> {
        let products = (0..self.graph.nodes.len()).filter_map(|i| {
            let (dims, [lhs, rhs, ..]) = self.scaled(i)?;
            let rounding = &self.graph.nodes[lhs as usize];
            let rows = self.origin(*rounding.operands.first()?);
            (dims.rhs_contract.len() == 1).then_some((rows, rhs))
        });
        products.collect()
    }

    fn live(&self, users: &Users) -> impl Iterator<Item = usize> {
        let nodes = 0..self.graph.nodes.len();
        nodes.filter(|i| !users[*i].is_empty() && self.features.int8)
    }

    fn product(&self, users: &Users, i: usize) -> Option<(usize, Product)> {
        let (dims, [lhs, rhs, lhs_scale, rhs_scale]) = self.scaled(i)?;
        let last = self.shape(lhs).rank().checked_sub(1)?;
        let &[contracted] = &dims.rhs_contract[..] else {
            return None;
        };
        let weights = self.shape(rhs);
        let is_matrix = dims.lhs_batch.is_empty()
            && dims.lhs_contract == [last]
            && weights.rank() == 2
            && weights.dtype == DType::S8;
        let kept: Vec<usize> = (0..last).collect();
        let x = Rounded::to(self.graph, lhs, lhs_scale, &kept).filter(|_| is_matrix)?;
        let followed = follow::bias_and_rounding(self.graph, users, i);
        let result = self.shape(followed.root as u32);
        let wide_weights = Rounded::to(self.graph, rhs, rhs_scale, &[1 - contracted])?.x;
        let takes = self.shape(x.x).dtype == DType::BF16
            && self.shape(wide_weights).dtype == DType::BF16
            && followed.result == DType::BF16
            && is_split(result, self.parts);
        let [terms, columns] = [contracted, 1 - contracted].map(|d| weights.dims[d]);
        let rows = result.count() / columns.max(1);
        // The dimension that is shared cannot be the one that lies along memory.
        let contiguous = match self.shared_dim(rhs) {
            Some(shared) => 1 - shared,
            None => 1,
        };
        let kernel = RoundedProduct {
            terms_first: contiguous != contracted,
            bias: followed.bias.is_some(),
            noise: x.noise.is_some(),
            rows_in_a_word: x.noise.and_then(|noise| noise.rows_in_a_word),
            residual: false,
            wide_units: self.features.wide_units,
            bf16_vectors: self.features.bf16_vectors,
            memory: self.features.kernel_memory,
        };
        let fits = |kernel: &RoundedProduct| kernel.fits(rows / self.parts, terms, columns);
        let product = |kernel, residual| Product {
            kernel,
            x,
            weights: rhs,
            wide_weights,
            bias: followed.bias,
            residual,
            scope: self.graph.scopes[self.graph.nodes[i].scope as usize].to_string(),
            contracted,
            shape: result.clone(),
            parts: self.parts,
        };
        if !takes || !fits(&kernel) {
            return None;
        }
        let with_sum = RoundedProduct {
            residual: true,
            ..kernel
        };
        let sum = self.sum(users, followed.root).filter(|_| fits(&with_sum));
        Some(match sum {
            Some((sum, residual)) => (sum, product(with_sum, Some(residual))),
            None => (followed.root, product(kernel, None)),
        })
    }

    /// The sum that alone reads node `root`, and the other term. Of two products that are added, the later takes the other's result; the
    /// gradient of a norm is added by the norm's kernel.
    fn sum(&self, users: &Users, root: usize) -> Option<(usize, u32)> {
        let [Some(user)] = users[root][..] else {
            return None;
        };
        let sum = &self.graph.nodes[user];
        let other = follow::other_term(root as u32, sum)?;
        let is_sum = matches!(sum.op, Op::Binary(Binary::Add))
            && (other as usize) < root
            && !matches!(self.graph.nodes[other as usize].op, Op::Composite { .. });
        is_sum.then_some((user, other))
    }

    /// The gradient that node `i` is, in `result`.
    fn gradient(&self, i: usize, weights: &HashMap<u32, u32>, result: DType) -> Option<Gradient> {
        let (dims, [lhs, rhs, lhs_scale, rhs_scale]) = self.scaled(i)?;
        let last = self.shape(lhs).rank().checked_sub(1)?;
        let batch = dims.lhs_batch.len();
        let contracted: Vec<usize> = (batch..last).collect();
        let own: Vec<usize> = (0..batch).collect();
        let all =
            |places: [&Vec<usize>; 2], are: &[usize]| places.iter().all(|dims| ***dims == *are);
        let is_gradient = batch <= 1
            && self.shape(rhs).rank() == last + 1
            && all([&dims.lhs_batch, &dims.rhs_batch], &own)
            && all([&dims.lhs_contract, &dims.rhs_contract], &contracted);
        if !is_gradient {
            return None;
        }
        let kept: Vec<usize> = own.iter().copied().chain([last]).collect();
        let gradient = Rounded::to(self.graph, lhs, lhs_scale, &kept)?;
        let x = Rounded::to(self.graph, rhs, rhs_scale, &kept)?;
        let of_gradient = self.shape(gradient.x);
        // Scales are those of groups of the parts of the batch, or of all.
        let groups = if batch == 1 { of_gradient.dims[0] } else { 1 };
        let images = groups * of_gradient.dims.get(batch)?;
        let rows: usize = contracted.iter().map(|d| of_gradient.dims[*d]).product();
        let is_split =
            self.parts.is_multiple_of(groups) && images.is_multiple_of(self.parts) && last > batch;
        let rows = rows * groups / self.parts;
        let [outputs, inputs] = [gradient.x, x.x].map(|id| self.shape(id).dims[last]);
        // It lies as the weights do, by which the derivative of `x` multiplies the same gradient. The result's rows are moved on the
        // chip, where the weights do not say so the fewer.
        let weights = weights.get(&self.origin(gradient.x));
        let shared = weights.and_then(|weights| self.shared_dim(*weights));
        let noise = gradient.noise?;
        let of = |cores: usize| RoundedGradient {
            inputs_first: shared.map_or(inputs < outputs, |shared| shared == 1),
            ranges: groups < self.parts,
            rows_in_a_word: noise.rows_in_a_word,
            result,
            cores,
            bf16_vectors: self.features.bf16_vectors,
            memory: self.features.kernel_memory,
        };
        let mut kernels = self.features.cores().iter().map(|cores| of(*cores));
        let kernel = kernels.find(|kernel| kernel.fits(rows, outputs, inputs))?;
        let product = &self.graph.nodes[i].shape;
        let is_bf16 = |id: u32| self.shape(id).dtype == DType::BF16;
        let takes = is_split
            && is_bf16(gradient.x)
            && is_bf16(x.x)
            && product.dtype == DType::F32
            && x.noise.is_none();
        let ranges = |columns: usize| self.column_ranges(rows, columns);
        let ranges = match kernel.ranges {
            true => Some([ranges(outputs)?, ranges(inputs)?]),
            false => None,
        };
        takes.then(|| Gradient {
            kernel,
            operands: [gradient.x, x.x],
            ranges,
            sources: [gradient.x, x.x].map(|id| self.before_reshapes(id)),
            key: noise.key,
            groups,
            parts: self.parts,
            rows,
            shape: Shape::new(result, &product.dims[..]),
        })
    }

    /// The kernel that finds the ranges of a part of `rows` rows.
    fn column_ranges(&self, rows: usize, columns: usize) -> Option<ColumnRanges> {
        let of = |cores: &usize| ColumnRanges {
            cores: *cores,
            memory: self.features.kernel_memory,
        };
        let mut kernels = self.features.cores().iter().map(of);
        kernels.find(|kernel| kernel.fits(rows, columns))
    }

    /// What a node is without reshapes.
    fn before_reshapes(&self, mut id: u32) -> u32 {
        while let Node {
            op: Op::Reshape(_),
            operands,
            ..
        } = &self.graph.nodes[id as usize]
        {
            id = operands[0];
        }
        id
    }

    /// Node `i` as a product of matrices with scales of both, and its operands: both, then the scales.
    fn scaled(&self, i: usize) -> Option<(&'a DotDims, [u32; 4])> {
        let node = &self.graph.nodes[i];
        match &node.op {
            Op::Composite {
                kind:
                    Composite::ScaledContraction {
                        contraction: Contraction::Dot(dims),
                        lhs_scale: true,
                        rhs_scale: true,
                    },
                ..
            } => Some((dims, node.operands[..].try_into().ok()?)),
            _ => None,
        }
    }

    /// What a node is without reshapes and conversions.
    fn origin(&self, mut id: u32) -> u32 {
        while let Node {
            op: Op::Reshape(_) | Op::Convert(_),
            operands,
            ..
        } = &self.graph.nodes[id as usize]
        {
            id = operands[0];
        }
        id
    }

    /// The dimension of a matrix that devices share, where it is made of an input, or of one of a stack of them, element by element.
    fn shared_dim(&self, matrix: u32) -> Option<usize> {
        let mut at = matrix;
        loop {
            let node = &self.graph.nodes[at as usize];
            match &node.op {
                Op::Parameter(input) => {
                    let is_split = self.is_split.get(*input)?;
                    let own = is_split.len().checked_sub(2)?;
                    return is_split[own..].iter().position(|is_split| *is_split);
                }
                Op::Composite {
                    kind: Composite::Quantize { .. },
                    ..
                }
                | Op::Stored
                | Op::Convert(_)
                | Op::ShardingConstraint(_)
                | Op::Slice { .. } => at = *node.operands.first()?,
                // Derivatives compute a weight's own form again, behind a barrier.
                Op::GetTupleElement(of) => {
                    let barrier = &self.graph.nodes[node.operands[0] as usize];
                    if !matches!(barrier.op, Op::OptimizationBarrier) {
                        return None;
                    }
                    at = *barrier.operands.get(*of)?;
                }
                // That of a stack without the others.
                Op::Reshape(dims) if self.shape(node.operands[0]).dims.ends_with(dims) => {
                    at = node.operands[0];
                }
                _ => return None,
            }
        }
    }
}

/// The gradient of weights that the kernel takes. Numbers are nodes.
pub(super) struct Gradient {
    kernel: RoundedGradient,
    /// The gradient of the result and `x`.
    operands: [u32; 2],
    /// What finds their ranges, where parts share these.
    ranges: Option<[ColumnRanges; 2]>,
    /// What they are without reshapes.
    sources: [u32; 2],
    key: u32,
    /// Groups of parts that share ranges, and whose sum is the result.
    groups: usize,
    /// Parts of the batch, and rows of each.
    parts: usize,
    rows: usize,
    /// Of the result.
    shape: Shape,
}

impl Gradient {
    pub(super) fn call(
        &self,
        b: &Builder,
        copies: &[Tensor],
        shared: &mut Shared,
    ) -> Result<Tensor> {
        let [gradient, x] = self.operands.map(|id| {
            let x = copies[id as usize];
            let columns = b.dims(x).last().copied().unwrap_or(1);
            b.reshape(x, &[self.parts, self.rows, columns])
        });
        let both = [gradient?, x?];
        let noise = shared.noise(b, copies[self.key as usize], self.parts, self.rows)?;
        let mut operands = [both, noise].concat();
        for (of, kernel) in self.ranges.iter().flatten().enumerate() {
            let key = (self.sources[of], self.groups);
            let ranges = match shared.ranges.get(&key) {
                Some(ranges) => *ranges,
                None => self.ranges_of(b, *kernel, both[of])?,
            };
            shared.ranges.insert(key, ranges);
            operands.push(ranges);
        }
        let mut y = b.push(Op::CustomCall(Arc::new(self.kernel)), &operands)?;
        if self.kernel.inputs_first {
            y = b.transpose(y, &[0, 2, 1])?;
        }
        if self.groups < self.parts {
            let of_groups = [self.groups, self.parts / self.groups];
            let of_groups = [&of_groups, &b.dims(y)[1..]].concat();
            y = b.sum(b.reshape(y, &of_groups)?, &[1])?;
        }
        b.reshape(y, &self.shape.dims)
    }

    /// The ranges that the parts of a group share, `f32[parts, 1, columns]`.
    fn ranges_of(&self, b: &Builder, kernel: ColumnRanges, x: Tensor) -> Result<Tensor> {
        let b = &b.at(format!("{}/{RANGE_FINDING}", b.path()));
        let columns = b.dims(x).last().copied().unwrap_or(1);
        let own = b.push(Op::CustomCall(Arc::new(kernel)), &[x])?;
        let of_groups = [self.groups, self.parts / self.groups, columns];
        let highest = b.reduce(Reduction::Max, b.reshape(own, &of_groups)?, &[1])?;
        let shared = b.broadcast_in_dim(highest, &[0, 2], &of_groups)?;
        b.reshape(shared, &[self.parts, 1, columns])
    }
}
