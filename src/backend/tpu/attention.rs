//! Attention that keeps its scores on the chip: softmax over blocks of keys, with a running maximum and sum (Milakov
//! and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).

use std::f64::consts::LOG2_E;

use crate::dtype::DType;
use crate::graph::{Batch, InferError, constraint};
use crate::shape::Shape;

use super::Features;
use super::call::KernelCall;
use super::mosaic::{Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes};

/// Queries and keys are padded to whole blocks of at most so many.
const MOST_ROWS: usize = 512;
/// Keys that a step of the grid computes together, at most, the most first. Matrix units load keys and values once for a block of
/// queries, so larger blocks take fewer cycles, on v6e the most: 4,096 queries and keys of two heads 75,724, and 104,797 in blocks of
/// 512 by 512.
const MOST_KEYS: [usize; 3] = [2048, 1024, MOST_ROWS];
/// Rows of a bf16 tile.
pub(super) const TILE_ROWS: usize = 16;

/// Attention of heads that lie side by side in the lanes.
///
/// Operands: q `[batch, queries, heads * size]`, k and v `[batch, keys, heads * size]`, all bf16, and so is the result,
/// which has the shape of q. Queries and keys are padded to whole blocks ([`Attention::padded`]). If `side_by_side`, each
/// operand is the same `[batch, keys, 3 * heads * size]`: q, k and v, as one product gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Of the scores.
    pub scale: f64,
    /// Columns of a head: 64 or a multiple of 128.
    pub size: usize,
    /// Keys that are no padding.
    pub keys: usize,
    /// Whether q, k and v are columns of one array.
    pub side_by_side: bool,
    pub features: Features,
}

/// Blocks of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub count: usize,
    pub size: usize,
}

impl Blocks {
    /// As few blocks as [`MOST_ROWS`] allows, of a multiple of `step`.
    pub fn of(length: usize, step: usize) -> Blocks {
        let count = length.div_ceil(MOST_ROWS).max(1);
        let size = length.div_ceil(count).next_multiple_of(step);
        Blocks { count, size }
    }

    /// Those of so many queries and keys.
    pub fn of_both([queries, keys]: [usize; 2]) -> [Blocks; 2] {
        [Blocks::of(queries, TILE_ROWS), Blocks::of(keys, LANES)]
    }

    pub fn length(self) -> usize {
        self.count * self.size
    }

    /// The same rows, as many blocks side by side as are `most` rows together at most.
    fn joined(self, most: usize) -> Blocks {
        let together = (1..=self.count)
            .rev()
            .find(|together| self.count.is_multiple_of(*together) && together * self.size <= most);
        let together = together.unwrap_or(1);
        Blocks {
            count: self.count / together,
            size: self.size * together,
        }
    }
}

/// The softmax of one head up to a block of keys.
#[derive(Clone, Copy)]
struct Softmax {
    /// The highest score of each query, a column.
    highest: KernelValue,
    /// The sum of the weights of each query, a column. `None` where the lanes of the other head hold it, as the product of
    /// the weights with ones.
    total: Option<KernelValue>,
    /// The sum of values by their weights, not yet divided by the sum of the weights.
    values: KernelValue,
}

/// What a step multiplies for one head.
struct Operands {
    queries: KernelValue,
    filled: Option<Filled>,
}

/// Keys and values for one of two heads that share the lanes, with something of use in the lanes of the other. The matrix units multiply
/// these anyway, but they have to be filled first, which does not pay for few keys.
#[derive(Clone, Copy)]
struct Filled {
    /// The head's keys once more, for what rounding left of the queries.
    keys: Scratch,
    /// Ones, for the sums of the weights.
    values: Scratch,
}

impl Attention {
    /// The columns that a head of `size` is padded to.
    pub fn padded_size(size: usize) -> usize {
        match size {
            0..=64 => 64,
            _ => size.next_multiple_of(LANES),
        }
    }

    /// Queries and keys with their padding.
    pub fn padded(queries: usize, keys: usize) -> [usize; 2] {
        Blocks::of_both([queries, keys]).map(Blocks::length)
    }

    /// Whether a core can hold what the kernel works with for these padded queries and keys.
    pub fn fits(&self, q: &Shape, k: &Shape) -> bool {
        self.holds(q, k, self.blocks(q, k))
    }

    fn holds(&self, q: &Shape, k: &Shape, [rows, keys]: [Blocks; 2]) -> bool {
        // The weights of each head that shares the lanes take 2 bytes; of scores the compiler keeps but a part at a time.
        let scores = self.heads_of_slab() * rows.size * keys.size * 4;
        let kernel = self.kernel_of_blocks(q, k, [rows, keys]);
        kernel.window_bytes() + kernel.scratch_bytes() + scores
            <= most_bytes(self.features.kernel_memory)
    }

    /// The blocks that a step of the grid computes, of padded queries and keys.
    fn blocks(&self, q: &Shape, k: &Shape) -> [Blocks; 2] {
        let keys = k.dims[1];
        let most_keys = match keys <= self.few_keys() {
            true => MOST_ROWS,
            false => keys,
        };
        self.largest_blocks([q, k], |both| {
            both[1].size <= most_keys && self.holds(q, k, both)
        })
    }

    /// Keys whose weights the vector units sum, in blocks of [`MOST_ROWS`]. Of wide matrix units 1,024 keys are not few: four
    /// heads with as many queries take 12,875 cycles so on v6e, and 11,997 otherwise; on v5e 21,063 and 22,105.
    fn few_keys(&self) -> usize {
        match self.features.wide_units {
            true => MOST_ROWS,
            false => 2 * MOST_ROWS,
        }
    }

    /// The largest blocks of padded queries and keys that a core can hold; those of the padding where it can hold none.
    pub(super) fn largest_blocks(
        &self,
        of: [&Shape; 2],
        fit: impl Fn([Blocks; 2]) -> bool,
    ) -> [Blocks; 2] {
        let [queries, keys] = Blocks::of_both(of.map(|shape| shape.dims[1]));
        // By the simulation of v5e and v6e: the fewer keys, the more queries it takes to pay for what each block does once.
        let most = match keys.length() {
            0..=MOST_ROWS => 4 * MOST_ROWS,
            length if length <= 2 * MOST_ROWS => 2 * MOST_ROWS,
            _ => MOST_ROWS * self.heads_of_slab(),
        };
        let mut all = [most, MOST_ROWS].into_iter().flat_map(|most| {
            MOST_KEYS.map(|most_keys| [queries.joined(most), keys.joined(most_keys)])
        });
        all.find(|both| fit(*both)).unwrap_or([queries, keys])
    }

    /// The shapes of q and of k, and of v.
    fn shapes(&self, operands: &[&Shape]) -> Option<[Shape; 2]> {
        let &[q, k, v] = operands else {
            return None;
        };
        if !self.side_by_side {
            return (k == v).then(|| [q.clone(), k.clone()]);
        }
        let (columns, leading) = q.dims.split_last()?;
        let own = Shape::new(q.dtype, [leading, &[columns / 3]].concat());
        (q == k && q == v && columns.is_multiple_of(3)).then(|| [own.clone(), own])
    }

    /// Columns that a step of the grid computes: whole heads that fill whole registers.
    pub(super) fn slab(&self) -> usize {
        self.size.max(LANES)
    }

    /// The slabs of as many columns.
    pub(super) fn slabs(&self, columns: usize) -> usize {
        columns / self.slab()
    }

    pub(super) fn heads_of_slab(&self) -> usize {
        self.slab() / self.size
    }

    /// The kernel for queries and keys of these shapes.
    fn kernel(&self, q: &Shape, k: &Shape) -> Kernel {
        self.kernel_of_blocks(q, k, self.blocks(q, k))
    }

    fn kernel_of_blocks(&self, q: &Shape, k: &Shape, [rows, keys]: [Blocks; 2]) -> Kernel {
        let [batch, _, columns] = [0, 1, 2].map(|d| q.dims[d]);
        let slab = self.slab();
        let slabs = columns / slab;
        let result = Window {
            dtype: DType::BF16,
            array: [batch, q.dims[1], columns],
            block: [rows.size, slab],
            index: [Some(0), Some(2), Some(1)],
            place: Place::Own,
            first_column: 0,
        };
        // Of q, k and v; of several that lie side by side, each begins where the one before it ends.
        let operand = |number: usize| {
            let (beside, count) = match self.side_by_side {
                true => (number, 3),
                false => (0, 1),
            };
            let own = match number {
                0 => result,
                _ => Window {
                    array: [batch, k.dims[1], columns],
                    block: [keys.length(), slab],
                    index: [Some(0), None, Some(1)],
                    ..result
                },
            };
            Window {
                array: [batch, own.array[1], count * columns],
                first_column: beside * slabs,
                ..own
            }
        };
        // The blocks of queries come last, so that the keys of some heads stay where they are.
        let grid = vec![batch, slabs, rows.count];
        let windows = vec![operand(0), operand(1), operand(2), result];
        let mut kernel = Kernel::new(grid, windows);
        kernel.memory = self.features.kernel_memory;
        if self.buffers_keys_once(k) {
            kernel.buffer_once(&[1, 2]);
        }
        self.step(&mut kernel, rows, keys);
        kernel
    }

    /// Whether keys and values of a slab, twice each, are more than the core's memory, as those of the one head of 512 columns of a decoder
    /// of 1024x1024 pixels. Copying them takes little of the time in which all queries see them.
    fn buffers_keys_once(&self, k: &Shape) -> bool {
        let both = 2 * 2 * k.dims[1] * self.slab();
        2 * both > most_bytes(self.features.kernel_memory)
    }

    /// One block of queries against all keys.
    fn step(&self, k: &mut Kernel, queries: Blocks, keys: Blocks) {
        let rows = queries.size;
        let slab = self.slab();
        let heads = self.heads_of_slab();
        let first = k.row(0);
        let q = k.load(0, first, rows);
        let fills = heads == 2 && keys.length() > self.few_keys();
        let filled = fills.then(|| self.filled(k, keys));
        let sums_alone = filled.is_none();
        let of_head = |head| match filled {
            Some(filled) => Operands {
                queries: self.scaled_queries(k, q, head),
                filled: Some(filled[head]),
            },
            None => Operands {
                queries: self.lanes(k, q, head, 0.0),
                filled: None,
            },
        };
        let operands: Vec<Operands> = (0..heads).map(of_head).collect();
        // Two blocks of keys in a turn: one's products overlap the other's softmax. A single pair needs no loop.
        let pairs = match self.keys / keys.size / 2 {
            1 => 0,
            pairs => pairs,
        };
        let mut states = Vec::new();
        if pairs > 0 {
            let start = Softmax {
                // Below every score, and finite: the first block's correction is then 0 and no NaN.
                highest: k.splat(DType::F32, [rows, 1], -1e30),
                total: sums_alone.then(|| k.splat(DType::F32, [rows, 1], 0.0)),
                values: k.splat(DType::F32, [rows, slab], 0.0),
            };
            let results = k.repeat(pairs, flat(&vec![start; heads]), |k, turn, carry| {
                let mut states = unflat(carry, heads);
                for half in 0..2 {
                    let row = k.row_of(turn, 2 * keys.size, half * keys.size);
                    states = self.block(k, &operands, row, [rows, keys.size], None, &states);
                }
                flat(&states)
            });
            states = unflat(&results, heads);
        }
        for block in 2 * pairs..keys.count {
            let row = k.row(block * keys.size);
            let valid = self.keys - (block * keys.size).min(self.keys);
            let limit = (valid < keys.size).then_some(valid);
            states = self.block(k, &operands, row, [rows, keys.size], limit, &states);
        }
        let result = self.result(k, &states, rows);
        let result = k.convert(result, DType::BF16);
        k.store(result, [0, 0]);
    }

    /// The values of all heads, divided by the sums of their weights.
    fn result(&self, k: &mut Kernel, states: &[Softmax], rows: usize) -> KernelValue {
        let quotient = |k: &mut Kernel, values: KernelValue, totals: KernelValue| {
            let inverse = k.inverse(totals);
            k.mul(values, inverse)
        };
        let of_heads = states.iter().filter_map(|state| {
            let totals = k.broadcast(state.total?, self.slab());
            Some(quotient(k, state.values, totals))
        });
        let of_heads: Vec<KernelValue> = of_heads.collect();
        match (states, &of_heads[..]) {
            (_, &[low, high]) => {
                let is_low = self.is_low(k, rows);
                k.select(is_low, low, high)
            }
            ([low, high], _) => {
                let is_low = self.is_low(k, rows);
                let values = k.select(is_low, low.values, high.values);
                let others = k.select(is_low, high.values, low.values);
                let totals = k.rotate(others, self.size);
                quotient(k, values, totals)
            }
            _ => of_heads[0],
        }
    }

    /// What fills the lanes for each of two heads, made in the first step that sees these keys and values.
    fn filled(&self, k: &mut Kernel, keys: Blocks) -> [Filled; 2] {
        let size = [keys.length(), self.slab()];
        let of_heads = [0, 1].map(|_| Filled {
            keys: k.scratch(DType::BF16, size),
            values: k.scratch(DType::BF16, size),
        });
        k.when_first(2, |k| {
            k.repeat(keys.count, Vec::new(), |k, counter, _| {
                let row = k.row_of(counter, keys.size, 0);
                let [these, values] = [1, 2].map(|window| k.load(window, row, keys.size));
                let these = k.convert(these, DType::F32);
                let other = k.rotate(these, self.size);
                for (head, to) in of_heads.into_iter().enumerate() {
                    let twice = self.side_by_side(k, head, these, other);
                    k.keep_at(to.keys, twice, row, 0);
                    let with_ones = self.lanes(k, values, head, 1.0);
                    k.keep_at(to.values, with_ones, row, 0);
                }
                Vec::new()
            });
        });
        of_heads
    }

    /// The queries of one of two heads, scaled so that products with keys are scores in powers of two: rounded to bf16 in the head's
    /// lanes, and what rounding left in the other's. Scaling so takes less than scaling scores, and loses no more.
    fn scaled_queries(&self, k: &mut Kernel, q: KernelValue, head: usize) -> KernelValue {
        let q = k.convert(q, DType::F32);
        let scale = k.splat(DType::F32, k.size(q), self.scale * LOG2_E);
        let q = k.mul(q, scale);
        let rounded = k.convert(q, DType::BF16);
        let rounded = k.convert(rounded, DType::F32);
        let rest = k.sub(q, rounded);
        let rest = k.rotate(rest, self.size);
        self.side_by_side(k, head, rounded, rest)
    }

    /// The lanes of one of two heads from `own`, and those of the other from `other`, in bf16.
    fn side_by_side(
        &self,
        k: &mut Kernel,
        head: usize,
        own: KernelValue,
        other: KernelValue,
    ) -> KernelValue {
        let is_low = self.is_low(k, k.size(own)[0]);
        let all = match head {
            0 => k.select(is_low, own, other),
            _ => k.select(is_low, other, own),
        };
        k.convert(all, DType::BF16)
    }

    /// Which lanes are those of the first of two heads.
    pub(super) fn is_low(&self, k: &mut Kernel, rows: usize) -> KernelValue {
        let lane = k.columns([rows, self.slab()]);
        let middle = k.splat(DType::S32, [rows, self.slab()], self.size as f64);
        k.less(lane, middle)
    }

    /// The lanes of one head, with a number in those of the other. With zeros, a product of all lanes is that head's.
    pub(super) fn lanes(
        &self,
        k: &mut Kernel,
        x: KernelValue,
        head: usize,
        other: f64,
    ) -> KernelValue {
        if self.heads_of_slab() == 1 {
            return x;
        }
        let wide = k.convert(x, DType::F32);
        let other = k.splat(DType::F32, k.size(x), other);
        self.side_by_side(k, head, wide, other)
    }

    /// Scores in powers of two, which are what the chip has: `rows` times the transposed `columns`, of one head.
    pub(super) fn scores(
        &self,
        k: &mut Kernel,
        rows: KernelValue,
        columns: KernelValue,
    ) -> KernelValue {
        let scores = product(k, rows, columns);
        let scale = k.splat(DType::F32, k.size(scores), self.scale * LOG2_E);
        k.mul(scores, scale)
    }

    /// The scores of queries with the block of keys from `row`, of which those from `limit` on are padding.
    pub(super) fn scores_of_keys(
        &self,
        k: &mut Kernel,
        q: KernelValue,
        keys: KernelValue,
        limit: Option<usize>,
    ) -> KernelValue {
        let scores = self.scores(k, q, keys);
        without_padding(k, scores, limit)
    }

    /// Takes a block of keys into the softmax of each head; of the first there is none before. From column `limit` on,
    /// keys are padding.
    fn block(
        &self,
        k: &mut Kernel,
        operands: &[Operands],
        row: KernelValue,
        size: [usize; 2],
        limit: Option<usize>,
        before: &[Softmax],
    ) -> Vec<Softmax> {
        let own = [size[1], self.slab()];
        let take = |(head, operands): (usize, &Operands)| {
            let (scores, values) = match operands.filled {
                Some(filled) => {
                    let keys = k.kept_at(filled.keys, row, 0, own);
                    let scores = product(k, operands.queries, keys);
                    let scores = without_padding(k, scores, limit);
                    (scores, k.kept_at(filled.values, row, 0, own))
                }
                None => {
                    let [keys, values] = [1, 2].map(|window| k.load(window, row, size[1]));
                    let scores = self.scores_of_keys(k, operands.queries, keys, limit);
                    (scores, values)
                }
            };
            let before = before.get(head);
            let mut highest = k.row_max(scores);
            if let Some(before) = before {
                highest = k.max(before.highest, highest);
            }
            let shift = k.broadcast(highest, size[1]);
            let shifted = k.sub(scores, shift);
            let weights = k.exp2(shifted);
            let sums_alone = operands.filled.is_none();
            let mut total = sums_alone.then(|| k.row_sum(weights));
            let mut start = k.splat(DType::F32, [size[0], self.slab()], 0.0);
            if let Some(before) = before {
                let change = k.sub(before.highest, highest);
                let correction = k.exp2(change);
                if let (Some(sum), Some(before)) = (total, before.total) {
                    let before = k.mul(before, correction);
                    total = Some(k.add(before, sum));
                }
                let correction = k.broadcast(correction, self.slab());
                start = k.mul(before.values, correction);
            }
            let weights = k.convert(weights, DType::BF16);
            Softmax {
                highest,
                total,
                values: k.matmul(weights, values, start),
            }
        };
        operands.iter().enumerate().map(take).collect()
    }
}

/// `rows` times the transposed `columns`.
fn product(k: &mut Kernel, rows: KernelValue, columns: KernelValue) -> KernelValue {
    let size = [k.size(rows)[0], k.size(columns)[0]];
    let zero = k.splat(DType::F32, size, 0.0);
    k.matmul_transposed(rows, columns, zero)
}

/// Scores, the lowest there are for keys from column `limit` on.
fn without_padding(k: &mut Kernel, scores: KernelValue, limit: Option<usize>) -> KernelValue {
    let Some(limit) = limit else {
        return scores;
    };
    let size = k.size(scores);
    let column = k.columns(size);
    let limit = k.splat(DType::S32, size, limit as f64);
    let is_key = k.less(column, limit);
    let lowest = k.splat(DType::F32, size, -1e30);
    k.select(is_key, scores, lowest)
}

fn flat(states: &[Softmax]) -> Vec<KernelValue> {
    let parts = |s: &Softmax| [Some(s.highest), s.total, Some(s.values)];
    states.iter().flat_map(parts).flatten().collect()
}

/// What [`flat`] made of the states of this many heads.
fn unflat(values: &[KernelValue], heads: usize) -> Vec<Softmax> {
    let states = values.chunks_exact(values.len() / heads);
    let states = states.map(|parts| Softmax {
        highest: parts[0],
        total: (parts.len() == 3).then(|| parts[1]),
        values: parts[parts.len() - 1],
    });
    states.collect()
}

impl KernelCall for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let [q, k] = self.shapes(operands)?;
        Some(self.kernel(&q, &k))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let size_fits = self.size == 64 || (self.size > 0 && self.size.is_multiple_of(LANES));
        let shapes = self.shapes(operands).filter(|[q, k]| {
            size_fits
                && [q, k]
                    .iter()
                    .all(|s| s.rank() == 3 && s.dtype == DType::BF16 && s.count() > 0)
                && (q.dims[0], q.dims[2]) == (k.dims[0], k.dims[2])
                && q.dims[2].is_multiple_of(self.slab())
                && Blocks::of(q.dims[1], TILE_ROWS).length() == q.dims[1]
                && Attention::padded(1, self.keys)[1] == k.dims[1]
        });
        shapes.map(|[q, _]| q).ok_or_else(|| {
            let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
            constraint(
                "attention kernel",
                format!(
                    "{} are not bf16 [batch, length, heads * {}] of queries, keys and values in whole blocks, with {} \
                     keys and their padding, as {self:?} takes them",
                    found.join(", "),
                    self.size,
                    self.keys
                ),
            )
        })
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        // Two products of a multiply and an add for each key.
        let keys = operands.last().map_or(0, |k| k.dims[1] as u64);
        (4 * result.count() as u64).saturating_mul(keys)
    }

    fn transcendentals(&self, operands: &[&Shape], result: &Shape) -> u64 {
        // A power for each score, of which a product of two has `size` terms.
        self.flops(operands, result) / (4 * self.size as u64)
    }
}
