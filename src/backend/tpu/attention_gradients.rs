//! The derivative of attention as one kernel, where a core holds the scores of a block of queries with all keys (Dao et
//! al., "FlashAttention", 2022, appendix B; it computes scores for a block of keys again instead).
//!
//! All that has a column for each key is transposed: `[keys, queries]`. So a query's statistics lie along the lanes, where
//! they are found and used without crossing them, and of five products none has an operand that has to be transposed but
//! that of the queries' gradient, which takes the keys so: each slab of them is transposed once.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::attention::{Attention, Blocks};
use super::attention_gradient::gradient_of_scores;
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes};

/// The dimension of the grid that counts blocks of queries.
const BLOCKS: usize = 2;
/// The windows.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const Y: usize = 3;
const GRADIENT: usize = 4;

/// The derivative of an [`Attention`].
///
/// Operands: q, k, v, the attention's result and that one's gradient, as [`Attention`] has them. The result is bf16
/// `[batch, queries + 2 * keys, columns]`: the rows of the queries' gradient, the keys' and the values'.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradients {
    pub of: Attention,
}

/// What a step keeps beside its blocks.
struct Memories {
    /// The transposed keys of each block, `[columns, keys]`, one below the other.
    transposed: Scratch,
    /// The sums of the keys' and of the values' gradients.
    of_keys: Scratch,
    of_values: Scratch,
    /// Scores of each head `[keys, queries]`, then their weights before these are divided by their sums.
    scores: Vec<Scratch>,
    /// `[columns, queries]`.
    columns: Scratch,
}

/// What is known of a head in a block of queries: the operands with zeros in the lanes of other heads, and rows.
#[derive(Clone, Copy)]
struct Head {
    q: KernelValue,
    gradient: KernelValue,
    /// Of the sum of the weights.
    inverse: KernelValue,
    /// The sum of the result times its gradient.
    product: KernelValue,
}

impl AttentionGradients {
    /// Whether there is a kernel for these padded queries and keys, and a core can hold what it works with.
    pub fn fits(&self, q: &Shape, k: &Shape) -> bool {
        let [queries, keys] = self.blocks([q, k]);
        queries.size.is_multiple_of(LANES) && self.holds([q, k], [queries, keys])
    }

    fn blocks(&self, shapes: [&Shape; 2]) -> [Blocks; 2] {
        self.of
            .largest_blocks(shapes, |both| self.holds(shapes, both))
    }

    fn holds(&self, shapes: [&Shape; 2], [queries, keys]: [Blocks; 2]) -> bool {
        let kernel = self.kernel_of_blocks(shapes, [queries, keys]);
        // One head after the other: weights and the gradients of scores take 2 bytes, those of weights 4.
        let scores = queries.size * keys.size * (2 + 2 + 4);
        let bytes = kernel.window_bytes() + kernel.scratch_bytes() + scores;
        bytes <= most_bytes(self.of.features.kernel_memory)
    }

    /// The shapes of q and k among the operands.
    fn shapes<'s>(&self, operands: &[&'s Shape]) -> Option<[&'s Shape; 2]> {
        match operands {
            [q, k, v, y, gradient] if k == v && q == y && q == gradient => Some([q, k]),
            _ => None,
        }
    }

    fn result([q, k]: [&Shape; 2]) -> Shape {
        let [batch, queries, columns] = [0, 1, 2].map(|d| q.dims[d]);
        Shape::new(DType::BF16, [batch, queries + 2 * k.dims[1], columns])
    }

    fn kernel(&self, shapes: [&Shape; 2]) -> Kernel {
        self.kernel_of_blocks(shapes, self.blocks(shapes))
    }

    fn kernel_of_blocks(&self, shapes: [&Shape; 2], [queries, keys]: [Blocks; 2]) -> Kernel {
        let result = Self::result(shapes);
        let [batch, rows, columns] = [0, 1, 2].map(|d| result.dims[d]);
        let slab = self.of.slab();
        let whole = |rows: usize| Window {
            dtype: DType::BF16,
            array: [batch, rows, columns],
            block: [rows, slab],
            index: [Some(0), None, Some(1)],
            place: Place::Own,
            first_column: 0,
        };
        let own = Window {
            block: [queries.size, slab],
            index: [Some(0), Some(BLOCKS), Some(1)],
            ..whole(queries.length())
        };
        let k = whole(keys.length());
        // The blocks come last, so that what is whole stays where it is.
        let grid = vec![batch, self.of.slabs(columns), queries.count];
        let mut kernel = Kernel::new(grid, vec![own, k, k, own, own, whole(rows)]);
        kernel.memory = self.of.features.kernel_memory;
        self.step(&mut kernel, queries, keys);
        kernel
    }

    /// One block of queries against all keys.
    fn step(&self, k: &mut Kernel, queries: Blocks, keys: Blocks) {
        let slab = self.of.slab();
        let of_all_keys = [keys.length(), slab];
        let scores = (0..self.of.heads_of_slab())
            .map(|_| k.scratch(DType::F32, [keys.length(), queries.size]));
        let scores = scores.collect();
        let memories = Memories {
            transposed: k.scratch(DType::BF16, [keys.count * slab, keys.size]),
            of_keys: k.scratch(DType::F32, of_all_keys),
            of_values: k.scratch(DType::F32, of_all_keys),
            scores,
            columns: k.scratch(DType::F32, [slab, queries.size]),
        };
        k.when_first(BLOCKS, |k| self.prepare(k, &memories, keys));
        let heads = self.heads(k, &memories, queries.size, keys);
        self.add_block(k, &memories, &heads, keys);
        self.store_of_queries(k, &memories, queries.size);
        k.when(BLOCKS, queries.count - 1, |k| {
            self.store_sums(k, &memories, queries, keys);
        });
    }

    /// Transposes a slab of keys, and begins their sums.
    fn prepare(&self, k: &mut Kernel, memories: &Memories, keys: Blocks) {
        let slab = self.of.slab();
        k.repeat(keys.count, Vec::new(), |k, turn, _| {
            let row = k.row_of(turn, keys.size, 0);
            let zero = k.splat(DType::F32, [keys.size, slab], 0.0);
            k.keep_at(memories.of_keys, zero, row, 0);
            k.keep_at(memories.of_values, zero, row, 0);
            let these = k.load(K, row, keys.size);
            let these = k.convert(these, DType::F32);
            let these = k.transpose(these);
            let these = k.convert(these, DType::BF16);
            let row = k.row_of(turn, slab, 0);
            k.keep_at(memories.transposed, these, row, 0);
            Vec::new()
        });
    }

    /// The statistics of each head, with its weights left in their memory.
    fn heads(&self, k: &mut Kernel, memories: &Memories, rows: usize, keys: Blocks) -> Vec<Head> {
        let first = k.row(0);
        let [q, y, gradient] = [Q, Y, GRADIENT].map(|window| k.load(window, first, rows));
        let [y, wide] = [y, gradient].map(|x| k.convert(x, DType::F32));
        let products = k.mul(y, wide);
        let products = k.transpose(products);
        k.keep(memories.columns, products, [0, 0]);
        let [count, size] = [self.of.heads_of_slab(), self.of.size];
        let queries: Vec<KernelValue> = (0..count).map(|h| self.of.lanes(k, q, h, 0.0)).collect();
        let highest = self.scores(k, memories, &queries, keys);
        let sums = self.weights(k, memories, &highest, rows, keys);
        let of_head = |(head, (q, sum)): (usize, (KernelValue, KernelValue))| {
            let own = k.kept_part(memories.columns, [head * size, 0], [size, rows]);
            Head {
                q,
                gradient: self.of.lanes(k, gradient, head, 0.0),
                inverse: k.inverse(sum),
                product: k.column_sum(own),
            }
        };
        let heads = queries.into_iter().zip(sums);
        heads.enumerate().map(of_head).collect()
    }

    /// Computes the scores of each head, and gives the highest of each query.
    fn scores(
        &self,
        k: &mut Kernel,
        memories: &Memories,
        queries: &[KernelValue],
        keys: Blocks,
    ) -> Vec<KernelValue> {
        let rows = k.size(queries[0])[0];
        // Below every score, and finite.
        let lowest = k.splat(DType::F32, [1, rows], -1e30);
        let start = vec![lowest; queries.len()];
        let padding = (self.of.keys < keys.length()).then_some(self.of.keys);
        let block = |k: &mut Kernel, row, limit: Option<usize>, carry: &[KernelValue]| {
            let these = k.load(K, row, keys.size);
            let of_head = |((q, to), before): ((&KernelValue, &Scratch), &KernelValue)| {
                let mut scores = self.of.scores(k, these, *q);
                if let Some(limit) = limit {
                    let size = k.size(scores);
                    let place = k.rows(keys.size, size);
                    let limit = k.splat(DType::S32, size, limit as f64);
                    let is_key = k.less(place, limit);
                    let lowest = k.splat(DType::F32, size, -1e30);
                    scores = k.select(is_key, scores, lowest);
                }
                k.keep_at(*to, scores, row, 0);
                let highest = k.column_max(scores);
                k.max(*before, highest)
            };
            let heads = queries.iter().zip(&memories.scores).zip(carry);
            heads.map(of_head).collect::<Vec<_>>()
        };
        let whole = keys.count - usize::from(padding.is_some());
        let found = match whole {
            0 => start,
            _ => k.repeat(whole, start, |k, turn, carry| {
                let row = k.row_of(turn, keys.size, 0);
                block(k, row, None, carry)
            }),
        };
        let Some(padding) = padding else {
            return found;
        };
        let last = whole * keys.size;
        let row = k.row(last);
        block(k, row, Some(padding.saturating_sub(last)), &found)
    }

    /// Puts weights in the place of scores, and gives their sums.
    fn weights(
        &self,
        k: &mut Kernel,
        memories: &Memories,
        highest: &[KernelValue],
        rows: usize,
        keys: Blocks,
    ) -> Vec<KernelValue> {
        let none = k.splat(DType::F32, [1, rows], 0.0);
        let start = vec![none; highest.len()];
        k.repeat(keys.count, start, |k, turn, carry| {
            let row = k.row_of(turn, keys.size, 0);
            let of_head = |((at, highest), before): ((&Scratch, &KernelValue), &KernelValue)| {
                let scores = k.kept_at(*at, row, 0, [keys.size, rows]);
                let shift = k.broadcast_row(*highest, keys.size);
                let shifted = k.sub(scores, shift);
                let weights = k.exp2(shifted);
                k.keep_at(*at, weights, row, 0);
                let sum = k.column_sum(weights);
                k.add(*before, sum)
            };
            let heads = memories.scores.iter().zip(highest).zip(carry);
            heads.map(of_head).collect()
        })
    }

    /// Adds a block of queries to the gradients of keys and values, and leaves the queries' gradient in the memory of columns.
    fn add_block(&self, k: &mut Kernel, memories: &Memories, heads: &[Head], keys: Blocks) {
        let slab = self.of.slab();
        let rows = k.size(heads[0].q)[0];
        let size = [keys.size, rows];
        let none = k.splat(DType::F32, [self.of.size, rows], 0.0);
        let found = k.repeat(keys.count, vec![none; heads.len()], |k, turn, carry| {
            let row = k.row_of(turn, keys.size, 0);
            let values = k.load(V, row, keys.size);
            let [mut of_keys, mut of_values] = [memories.of_keys, memories.of_values]
                .map(|sums| k.kept_at(sums, row, 0, [keys.size, slab]));
            let mut next = Vec::new();
            for (number, (head, before)) in heads.iter().zip(carry).enumerate() {
                let weights = k.kept_at(memories.scores[number], row, 0, size);
                let [inverse, product] =
                    [head.inverse, head.product].map(|x| k.broadcast_row(x, keys.size));
                let weights = k.mul(weights, inverse);
                let zero = k.splat(DType::F32, size, 0.0);
                let of_weights = k.matmul_transposed(values, head.gradient, zero);
                let of_scores = gradient_of_scores(k, weights, of_weights, product);
                let weights = k.convert(weights, DType::BF16);
                of_values = k.matmul(weights, head.gradient, of_values);
                of_keys = k.matmul(of_scores, head.q, of_keys);
                let own = k.row_of(turn, slab, number * self.of.size);
                let own = k.kept_at(memories.transposed, own, 0, [self.of.size, keys.size]);
                next.push(k.matmul(own, of_scores, *before));
            }
            k.keep_at(memories.of_keys, of_keys, row, 0);
            k.keep_at(memories.of_values, of_values, row, 0);
            next
        });
        for (number, found) in found.into_iter().enumerate() {
            k.keep(memories.columns, found, [number * self.of.size, 0]);
        }
    }

    fn store_of_queries(&self, k: &mut Kernel, memories: &Memories, rows: usize) {
        let found = k.kept(memories.columns);
        let found = k.transpose(found);
        let found = self.scaled(k, found);
        let found = k.convert(found, DType::BF16);
        let row = k.row_of_step(BLOCKS, rows, 0);
        k.store_at(found, row, 0);
    }

    fn store_sums(&self, k: &mut Kernel, memories: &Memories, queries: Blocks, keys: Blocks) {
        let size = [keys.size, self.of.slab()];
        k.repeat(keys.count, Vec::new(), |k, turn, _| {
            let row = k.row_of(turn, keys.size, 0);
            let of_keys = k.kept_at(memories.of_keys, row, 0, size);
            let of_keys = self.scaled(k, of_keys);
            let of_values = k.kept_at(memories.of_values, row, 0, size);
            let first = queries.length();
            for (found, first) in [(of_keys, first), (of_values, first + keys.length())] {
                let found = k.convert(found, DType::BF16);
                let row = k.row_of(turn, keys.size, first);
                k.store_at(found, row, 0);
            }
            Vec::new()
        });
    }

    fn scaled(&self, k: &mut Kernel, x: KernelValue) -> KernelValue {
        let scale = k.splat(DType::F32, k.size(x), self.of.scale);
        k.mul(x, scale)
    }
}

impl KernelCall for AttentionGradients {
    fn name(&self) -> &'static str {
        "attention_gradients"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        self.shapes(operands).map(|shapes| self.kernel(shapes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let found = self.shapes(operands).and_then(|[q, k]| {
            // As the attention itself takes them.
            self.of.infer(&[q, k, k]).ok()?;
            self.fits(q, k).then(|| Self::result([q, k]))
        });
        found.ok_or_else(|| refused("attention gradients kernel", self, operands))
    }

    fn flops(&self, operands: &[&Shape], _: &Shape) -> u64 {
        // Five products of a multiply and an add for each query and key.
        let Some([q, k]) = self.shapes(operands) else {
            return 0;
        };
        (10 * q.count() as u64).saturating_mul(k.dims[1] as u64)
    }

    fn transcendentals(&self, operands: &[&Shape], result: &Shape) -> u64 {
        // A power for each score, of which a product of five has `size` terms.
        self.flops(operands, result) / (10 * self.of.size as u64)
    }
}
