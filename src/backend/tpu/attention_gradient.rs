//! The derivative of attention, with scores that stay on the chip: they are computed again from queries and keys, block
//! by block (Dao et al., "FlashAttention", 2022, section 3 and appendix B).
//!
//! One kernel gives the gradient of the queries, block by block of them, and what the other needs of each query: the
//! highest score, the inverse sum of its weights, and the sum of its result times the result's gradient. The other gives
//! the gradients of keys and values, block by block of those. It has the scores transposed, so that no operand of a
//! product has to be.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::attention::{Attention, Blocks, TILE_ROWS};
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, VMEM_BYTES, Value as KernelValue, Window};

/// Rows of a tile of `f32`: the statistics of a block of queries are as many rows.
pub(super) const STATISTICS: usize = 8;
/// The statistics of a head.
const OF_HEAD: usize = 3;

/// Which gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Operands: q, k, v, the attention's result and that one's gradient, as [`Attention`] has them. The result is
    /// `f32[batch, blocks * 2 * size, columns]`: for each block of queries the rows of their gradient, then as many rows of
    /// statistics, in the first lanes of each slab of heads.
    Queries,
    /// Operands: k, v, q, the gradient of the attention's result, and the statistics, `f32[batch, slabs * blocks * 8,
    /// size]`, in the lanes those of a block of queries. The result is bf16 `[batch, blocks * 2 * size, columns]`: for each
    /// block of keys the rows of their gradient, then those of the values' gradient.
    Keys,
}

/// The derivative of an [`Attention`].
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradient {
    pub of: Attention,
    pub side: Side,
}

/// The blocks of a call, and the columns of the attention's operands.
#[derive(Clone, Copy)]
struct Extents {
    batch: usize,
    queries: Blocks,
    keys: Blocks,
    columns: usize,
}

/// What is known of the queries of a block, for one head: columns.
#[derive(Clone, Copy)]
struct Statistics {
    highest: KernelValue,
    /// Of the sum of the weights.
    inverse: KernelValue,
    /// The sum of the result times its gradient.
    product: KernelValue,
}

impl AttentionGradient {
    /// The blocks of so many queries, or keys, that a result has rows of: how many there are, and their size.
    pub fn blocks(side: Side, length: usize) -> [usize; 2] {
        let blocks = match side {
            Side::Queries => Blocks::of(length, TILE_ROWS),
            Side::Keys => Blocks::of(length, LANES),
        };
        [blocks.count, blocks.size]
    }

    /// Whether a core can hold what the kernels work with for these padded queries and keys.
    pub fn fits(of: &Attention, q: &Shape, k: &Shape) -> bool {
        [Side::Queries, Side::Keys].into_iter().all(|side| {
            let gradient = AttentionGradient {
                of: of.clone(),
                side,
            };
            let extents = gradient.extents([q, k]);
            let kernel = gradient.kernel(extents);
            // Scores, weights, and their gradients of each head that shares the lanes.
            let scores = of.heads_of_slab() * extents.queries.size * extents.keys.size * 16;
            kernel.window_bytes() + kernel.scratch_bytes() + scores <= VMEM_BYTES
        })
    }

    fn extents(&self, [q, k]: [&Shape; 2]) -> Extents {
        let [queries, keys] = Blocks::of_both([q.dims[1], k.dims[1]]);
        Extents {
            batch: q.dims[0],
            queries,
            keys,
            columns: q.dims[2],
        }
    }

    /// The shapes of q and k among the operands.
    fn shapes<'s>(&self, operands: &[&'s Shape]) -> Option<[&'s Shape; 2]> {
        match (self.side, operands) {
            (Side::Queries, [q, k, v, y, gradient]) if k == v && q == y && q == gradient => {
                Some([q, k])
            }
            (Side::Keys, [k, v, q, gradient, _]) if k == v && q == gradient => Some([q, k]),
            _ => None,
        }
    }

    fn result(&self, extents: Extents) -> Shape {
        let Extents { batch, columns, .. } = extents;
        let (dtype, blocks) = match self.side {
            Side::Queries => (DType::F32, extents.queries),
            Side::Keys => (DType::BF16, extents.keys),
        };
        Shape::new(dtype, [batch, 2 * blocks.length(), columns])
    }

    /// The statistics that the gradient of keys takes.
    fn statistics(&self, extents: Extents) -> Shape {
        let rows = extents.columns / self.of.slab() * extents.queries.count * STATISTICS;
        Shape::new(DType::F32, [extents.batch, rows, extents.queries.size])
    }

    fn kernel(&self, extents: Extents) -> Kernel {
        let Extents {
            batch,
            queries,
            keys,
            columns,
        } = extents;
        let slab = self.of.slab();
        let blocks = match self.side {
            Side::Queries => queries,
            Side::Keys => keys,
        };
        let result = self.result(extents);
        let slabs = columns / slab;
        let result = Window {
            dtype: result.dtype,
            array: [batch, result.dims[1], columns],
            block: [2 * blocks.size, slab],
            index: [Some(0), Some(2), Some(1)],
            place: Place::Own,
            first_column: 0,
        };
        let own = |blocks: Blocks| Window {
            dtype: DType::BF16,
            array: [batch, blocks.length(), columns],
            block: [blocks.size, slab],
            ..result
        };
        let whole = |blocks: Blocks| Window {
            block: [blocks.length(), slab],
            index: [Some(0), None, Some(1)],
            ..own(blocks)
        };
        // The blocks come last, so that what is whole stays where it is.
        let grid = vec![batch, slabs, blocks.count];
        match self.side {
            Side::Queries => {
                let [q, k] = [own(queries), whole(keys)];
                let mut kernel = Kernel::new(grid, vec![q, k, k, q, q, result]);
                self.of_queries(&mut kernel, queries, keys);
                kernel
            }
            Side::Keys => {
                let [k, q] = [own(keys), whole(queries)];
                let rows = queries.count * STATISTICS;
                let statistics = Window {
                    dtype: DType::F32,
                    array: [batch, slabs * rows, queries.size],
                    block: [rows, queries.size],
                    index: [Some(0), Some(1), None],
                    ..result
                };
                let mut kernel = Kernel::new(grid, vec![k, k, q, q, statistics, result]);
                self.of_keys(&mut kernel, queries, keys);
                kernel
            }
        }
    }

    /// Runs `body` for each block of keys, from a row and with the place of the first key that is padding, if there is one.
    fn over_keys(
        &self,
        k: &mut Kernel,
        keys: Blocks,
        start: Vec<KernelValue>,
        body: impl Fn(&mut Kernel, KernelValue, Option<usize>, &[KernelValue]) -> Vec<KernelValue>,
    ) -> Vec<KernelValue> {
        let last = keys.length() - keys.size;
        let limit = (self.of.keys < keys.length()).then(|| self.of.keys.saturating_sub(last));
        let states = match keys.count - 1 {
            0 => start,
            before => k.repeat(before, start, |k, turn, carry| {
                let row = k.row_of(turn, keys.size, 0);
                body(k, row, None, carry)
            }),
        };
        let row = k.row(last);
        body(k, row, limit, &states)
    }

    /// One block of queries against all keys.
    fn of_queries(&self, k: &mut Kernel, queries: Blocks, keys: Blocks) {
        let (rows, slab, heads) = (queries.size, self.of.slab(), self.of.heads_of_slab());
        let first = k.row(0);
        let [q, y, gradient] = [0, 3, 4].map(|window| k.load(window, first, rows));
        let own = |k: &mut Kernel, x| -> Vec<KernelValue> {
            (0..heads)
                .map(|head| self.of.lanes(k, x, head, 0.0))
                .collect()
        };
        let q = own(k, q);
        let gradients = own(k, gradient);
        let statistics = self.statistics_of_queries(k, keys, &q, y, &gradients);
        let zero = k.splat(DType::F32, [rows, slab], 0.0);
        let found = self.over_keys(k, keys, vec![zero; heads], |k, row, limit, carry| {
            let [these, values] = [1, 2].map(|window| k.load(window, row, keys.size));
            let of_head = |head: usize| {
                let scores = self.of.scores_of_keys(k, q[head], these, limit);
                let highest = k.broadcast(statistics[head].highest, keys.size);
                let inverse = k.broadcast(statistics[head].inverse, keys.size);
                let product = k.broadcast(statistics[head].product, keys.size);
                let weights = weights(k, scores, highest, inverse);
                let zero = k.splat(DType::F32, [rows, keys.size], 0.0);
                let of_weights = k.matmul_transposed(gradients[head], values, zero);
                let of_scores = gradient_of_scores(k, weights, of_weights, product);
                k.matmul(of_scores, these, carry[head])
            };
            (0..heads).map(of_head).collect()
        });
        let found = self.of_heads(k, &found);
        let scale = k.splat(DType::F32, [rows, slab], self.of.scale);
        let found = k.mul(found, scale);
        k.store(found, [0, 0]);
        self.store_statistics(k, &statistics, rows);
    }

    /// The statistics of each head: a pass over all keys.
    fn statistics_of_queries(
        &self,
        k: &mut Kernel,
        keys: Blocks,
        q: &[KernelValue],
        y: KernelValue,
        gradients: &[KernelValue],
    ) -> Vec<Statistics> {
        let rows = k.size(y)[0];
        // Below every score, and finite: the first block's correction is then 0 and no NaN.
        let lowest = k.splat(DType::F32, [rows, 1], -1e30);
        let none = k.splat(DType::F32, [rows, 1], 0.0);
        let start: Vec<KernelValue> = q.iter().flat_map(|_| [lowest, none]).collect();
        let states = self.over_keys(k, keys, start, |k, row, limit, carry| {
            let these = k.load(1, row, keys.size);
            let of_head = |(q, before): (&KernelValue, &[KernelValue])| {
                let scores = self.of.scores_of_keys(k, *q, these, limit);
                let block = k.row_max(scores);
                let highest = k.max(before[0], block);
                let shift = k.broadcast(highest, keys.size);
                let shifted = k.sub(scores, shift);
                let weights = k.exp2(shifted);
                let sum = k.row_sum(weights);
                let change = k.sub(before[0], highest);
                let correction = k.exp2(change);
                let total = k.mul(before[1], correction);
                [highest, k.add(total, sum)]
            };
            q.iter()
                .zip(carry.chunks_exact(2))
                .flat_map(of_head)
                .collect()
        });
        let y = k.convert(y, DType::F32);
        let of_head = |(state, gradient): (&[KernelValue], &KernelValue)| {
            let gradient = k.convert(*gradient, DType::F32);
            let product = k.mul(y, gradient);
            Statistics {
                highest: state[0],
                inverse: k.inverse(state[1]),
                product: k.row_sum(product),
            }
        };
        states.chunks_exact(2).zip(gradients).map(of_head).collect()
    }

    /// Puts the statistics into the rows behind the gradient.
    fn store_statistics(&self, k: &mut Kernel, statistics: &[Statistics], rows: usize) {
        let columns = statistics
            .iter()
            .flat_map(|s| [s.highest, s.inverse, s.product]);
        let columns: Vec<KernelValue> = columns.collect();
        let lane = k.columns([rows, LANES]);
        let mut all = k.splat(DType::F32, [rows, LANES], 0.0);
        for (place, column) in columns.into_iter().enumerate().rev() {
            let own = k.broadcast(column, LANES);
            let end = k.splat(DType::S32, [rows, LANES], (place + 1) as f64);
            let is_own = k.less(lane, end);
            all = k.select(is_own, own, all);
        }
        k.store(all, [rows, 0]);
    }

    /// One block of keys against all queries.
    fn of_keys(&self, k: &mut Kernel, queries: Blocks, keys: Blocks) {
        let (rows, slab, heads) = (keys.size, self.of.slab(), self.of.heads_of_slab());
        let first = k.row(0);
        let [these, values] = [0, 1].map(|window| {
            let x = k.load(window, first, rows);
            let own: Vec<KernelValue> = (0..heads).map(|h| self.of.lanes(k, x, h, 0.0)).collect();
            own
        });
        let zero = k.splat(DType::F32, [rows, slab], 0.0);
        let found = k.repeat(queries.count, vec![zero; 2 * heads], |k, turn, carry| {
            let row = k.row_of(turn, queries.size, 0);
            let [q, gradient] = [2, 3].map(|window| k.load(window, row, queries.size));
            let of_head = |head: usize| {
                let [highest, inverse, product] = [0, 1, 2].map(|place| {
                    let row = k.row_of(turn, STATISTICS, OF_HEAD * head + place);
                    let own = k.load(4, row, 1);
                    k.broadcast_row(own, rows)
                });
                let scores = self.of.scores(k, these[head], q);
                let weights = weights(k, scores, highest, inverse);
                let zero = k.splat(DType::F32, [rows, queries.size], 0.0);
                let of_weights = k.matmul_transposed(values[head], gradient, zero);
                let of_scores = gradient_of_scores(k, weights, of_weights, product);
                let of_keys = k.matmul(of_scores, q, carry[2 * head]);
                let weights = k.convert(weights, DType::BF16);
                [of_keys, k.matmul(weights, gradient, carry[2 * head + 1])]
            };
            (0..heads).flat_map(of_head).collect()
        });
        let [of_keys, of_values] = [0, 1].map(|which| {
            let found: Vec<KernelValue> = found.iter().skip(which).step_by(2).copied().collect();
            self.of_heads(k, &found)
        });
        let scale = k.splat(DType::F32, [rows, slab], self.of.scale);
        let of_keys = k.mul(of_keys, scale);
        for (found, row) in [(of_keys, 0), (of_values, rows)] {
            let found = k.convert(found, DType::BF16);
            k.store(found, [row, 0]);
        }
    }

    /// The lanes of each head, of products that have all lanes.
    fn of_heads(&self, k: &mut Kernel, found: &[KernelValue]) -> KernelValue {
        match *found {
            [low, high] => {
                let is_low = self.of.is_low(k, k.size(low)[0]);
                k.select(is_low, low, high)
            }
            _ => found[0],
        }
    }
}

/// The weights of scores in powers of two.
fn weights(
    k: &mut Kernel,
    scores: KernelValue,
    highest: KernelValue,
    inverse: KernelValue,
) -> KernelValue {
    let shifted = k.sub(scores, highest);
    let powers = k.exp2(shifted);
    k.mul(powers, inverse)
}

/// `weights * (their gradient - product)`, in bf16: the gradient of scores before they are scaled.
pub(super) fn gradient_of_scores(
    k: &mut Kernel,
    weights: KernelValue,
    of_weights: KernelValue,
    product: KernelValue,
) -> KernelValue {
    let difference = k.sub(of_weights, product);
    let found = k.mul(weights, difference);
    k.convert(found, DType::BF16)
}

impl KernelCall for AttentionGradient {
    fn name(&self) -> &'static str {
        match self.side {
            Side::Queries => "attention_gradient_of_queries",
            Side::Keys => "attention_gradient_of_keys",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let shapes = self.shapes(operands)?;
        Some(self.kernel(self.extents(shapes)))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let found = self.shapes(operands).and_then(|[q, k]| {
            // As the attention itself takes them.
            self.of.infer(&[q, k, k]).ok()?;
            let extents = self.extents([q, k]);
            let has_statistics = match self.side {
                Side::Queries => true,
                Side::Keys => *operands[4] == self.statistics(extents),
            };
            has_statistics.then(|| self.result(extents))
        });
        found.ok_or_else(|| refused("attention gradient kernel", self, operands))
    }

    fn flops(&self, operands: &[&Shape], _: &Shape) -> u64 {
        // Four products of a multiply and an add for each query and key.
        let Some([q, k]) = self.shapes(operands) else {
            return 0;
        };
        (8 * q.count() as u64).saturating_mul(k.dims[1] as u64)
    }

    fn transcendentals(&self, operands: &[&Shape], result: &Shape) -> u64 {
        // A power for each score, and in the gradient of queries another, of which a product of two has `size` terms.
        self.flops(operands, result) / (4 * self.of.size as u64)
    }
}
