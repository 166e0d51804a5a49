//! Attention that keeps its scores on the chip: softmax over blocks of keys, with a running maximum and sum (Milakov
//! and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).

use std::f64::consts::LOG2_E;

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Configuration, CustomCall, InferError, constraint};
use crate::shape::Shape;

use super::mosaic::{
    CostEstimate, Kernel, LANES, Place, VMEM_BYTES, Value as KernelValue, Window, evaluated,
};

/// Queries and keys of a block, at most. By the compiler's simulation of 4,096 queries and keys on v5e, blocks of 256
/// or 1024 take 1 to 14 % more cycles.
const MOST_ROWS: usize = 512;
/// Rows of a bf16 tile.
const TILE_ROWS: usize = 16;

/// Attention of heads that lie side by side in the lanes.
///
/// Operands: q `[batch, queries, heads * size]`, k and v `[batch, keys, heads * size]`, all bf16, and so is the result,
/// which has the shape of q. Queries and keys are padded to whole blocks ([`Attention::padded`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Of the scores.
    pub scale: f64,
    /// Columns of a head: 64 or a multiple of 128.
    pub size: usize,
    /// Keys that are no padding.
    pub keys: usize,
}

/// Blocks of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    count: usize,
    size: usize,
}

impl Blocks {
    /// As few blocks as [`MOST_ROWS`] allows, of a multiple of `step`.
    fn of(length: usize, step: usize) -> Blocks {
        let count = length.div_ceil(MOST_ROWS).max(1);
        let size = length.div_ceil(count).next_multiple_of(step);
        Blocks { count, size }
    }

    fn length(self) -> usize {
        self.count * self.size
    }
}

/// The softmax of one head up to a block of keys. Each but the sum of values is a column.
#[derive(Clone, Copy)]
struct Softmax {
    highest: KernelValue,
    total: KernelValue,
    /// The sum of values by their weights, not yet divided by `total`.
    values: KernelValue,
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
        [
            Blocks::of(queries, TILE_ROWS).length(),
            Blocks::of(keys, LANES).length(),
        ]
    }

    /// Whether a core can hold what the kernel works with for these padded operands.
    pub fn fits(&self, q: &Shape, k: &Shape) -> bool {
        let [rows, keys] = [
            Blocks::of(q.dims[1], TILE_ROWS),
            Blocks::of(k.dims[1], LANES),
        ];
        // Scores, their weights, and the weights in bf16, of each head that shares the lanes.
        let scores = self.heads_of_slab() * rows.size * keys.size * (4 + 4 + 2);
        self.kernel(q, k).window_bytes() + scores <= VMEM_BYTES
    }

    /// Columns that a step of the grid computes: whole heads that fill whole registers.
    fn slab(&self) -> usize {
        self.size.max(LANES)
    }

    fn heads_of_slab(&self) -> usize {
        self.slab() / self.size
    }

    /// The kernel for operands of these shapes.
    fn kernel(&self, q: &Shape, k: &Shape) -> Kernel {
        let [batch, _, columns] = [0, 1, 2].map(|d| q.dims[d]);
        let rows = Blocks::of(q.dims[1], TILE_ROWS);
        let keys = Blocks::of(k.dims[1], LANES);
        let slab = self.slab();
        let window = |length: usize, block: usize, index: Option<usize>| Window {
            dtype: DType::BF16,
            array: [batch, length, columns],
            block: [block, slab],
            index: [Some(0), index, Some(1)],
            place: Place::Own,
        };
        let queries = window(q.dims[1], rows.size, Some(2));
        let all_keys = window(k.dims[1], keys.length(), None);
        // The blocks of queries come last, so that the keys of some heads stay where they are.
        let grid = vec![batch, columns / slab, rows.count];
        let mut kernel = Kernel::new(grid, vec![queries, all_keys, all_keys, queries]);
        self.step(&mut kernel, rows.size, keys);
        kernel
    }

    /// One block of queries against all keys.
    fn step(&self, k: &mut Kernel, rows: usize, keys: Blocks) {
        let slab = self.slab();
        let heads = self.heads_of_slab();
        let first = k.row(0);
        let q = k.load(0, first, rows);
        let queries: Vec<KernelValue> = (0..heads)
            .map(|head| self.lanes(k, q, head, rows))
            .collect();
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
                total: k.splat(DType::F32, [rows, 1], 0.0),
                values: k.splat(DType::F32, [rows, slab], 0.0),
            };
            let results = k.repeat(pairs, flat(&vec![start; heads]), |k, turn, carry| {
                let mut states = unflat(carry);
                for half in 0..2 {
                    let row = k.row_of(turn, 2 * keys.size, half * keys.size);
                    states = self.block(k, &queries, row, [rows, keys.size], None, &states);
                }
                flat(&states)
            });
            states = unflat(&results);
        }
        for block in 2 * pairs..keys.count {
            let row = k.row(block * keys.size);
            let valid = self.keys - (block * keys.size).min(self.keys);
            let limit = (valid < keys.size).then_some(valid);
            states = self.block(k, &queries, row, [rows, keys.size], limit, &states);
        }
        let results: Vec<KernelValue> = states
            .iter()
            .map(|state| {
                let total = k.broadcast(state.total, slab);
                let inverse = k.inverse(total);
                k.mul(state.values, inverse)
            })
            .collect();
        let result = match results[..] {
            [low, high] => {
                let is_low = self.is_low(k, rows);
                k.select(is_low, low, high)
            }
            _ => results[0],
        };
        let result = k.convert(result, DType::BF16);
        k.store(result, [0, 0]);
    }

    /// Which lanes are those of the first of two heads.
    fn is_low(&self, k: &mut Kernel, rows: usize) -> KernelValue {
        let lane = k.columns([rows, self.slab()]);
        let middle = k.splat(DType::S32, [rows, self.slab()], self.size as f64);
        k.less(lane, middle)
    }

    /// The queries of one head, with zeros in the lanes of the other: a product with all lanes is then that head's.
    fn lanes(&self, k: &mut Kernel, q: KernelValue, head: usize, rows: usize) -> KernelValue {
        if self.heads_of_slab() == 1 {
            return q;
        }
        let wide = k.convert(q, DType::F32);
        let zero = k.splat(DType::F32, [rows, self.slab()], 0.0);
        let is_low = self.is_low(k, rows);
        let own = match head {
            0 => k.select(is_low, wide, zero),
            _ => k.select(is_low, zero, wide),
        };
        k.convert(own, DType::BF16)
    }

    /// Takes a block of keys into the softmax of each head; of the first there is none before. From column `limit` on,
    /// keys are padding.
    fn block(
        &self,
        k: &mut Kernel,
        queries: &[KernelValue],
        row: KernelValue,
        size: [usize; 2],
        limit: Option<usize>,
        before: &[Softmax],
    ) -> Vec<Softmax> {
        let keys = k.load(1, row, size[1]);
        let values = k.load(2, row, size[1]);
        let take = |(head, q): (usize, &KernelValue)| {
            let zero = k.splat(DType::F32, size, 0.0);
            let scores = k.matmul_transposed(*q, keys, zero);
            // Powers of two are what the chip has.
            let scale = k.splat(DType::F32, size, self.scale * LOG2_E);
            let mut scores = k.mul(scores, scale);
            if let Some(limit) = limit {
                let column = k.columns(size);
                let limit = k.splat(DType::S32, size, limit as f64);
                let is_key = k.less(column, limit);
                let lowest = k.splat(DType::F32, size, -1e30);
                scores = k.select(is_key, scores, lowest);
            }
            let before = before.get(head);
            let mut highest = k.row_max(scores);
            if let Some(before) = before {
                highest = k.max(before.highest, highest);
            }
            let shift = k.broadcast(highest, size[1]);
            let shifted = k.sub(scores, shift);
            let weights = k.exp2(shifted);
            let mut total = k.row_sum(weights);
            let mut start = k.splat(DType::F32, [size[0], self.slab()], 0.0);
            if let Some(before) = before {
                let change = k.sub(before.highest, highest);
                let correction = k.exp2(change);
                let total_before = k.mul(before.total, correction);
                total = k.add(total_before, total);
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
        queries.iter().enumerate().map(take).collect()
    }
}

fn flat(states: &[Softmax]) -> Vec<KernelValue> {
    let parts = |s: &Softmax| [s.highest, s.total, s.values];
    states.iter().flat_map(parts).collect()
}

fn unflat(values: &[KernelValue]) -> Vec<Softmax> {
    let states = values.chunks_exact(3).map(|parts| Softmax {
        highest: parts[0],
        total: parts[1],
        values: parts[2],
    });
    states.collect()
}

impl CustomCall for Attention {
    fn target(&self) -> &'static str {
        "tpu_custom_call"
    }

    fn name(&self) -> &'static str {
        "attention"
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let &[q, k, v] = operands else {
            return Configuration::Text(String::new());
        };
        let flops = self.flops(operands, q);
        let cost = CostEstimate {
            flops,
            // A power for each score, of which a product of two has `size` terms.
            transcendentals: flops / (4 * self.size as u64),
            bytes_accessed: [q, k, v, q].iter().map(|s| s.bytes() as u64).sum(),
        };
        Configuration::Text(self.kernel(q, k).backend_config(cost))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let &[q, k, v] = operands else {
            return Err(InferError::OperandCount {
                expected: 3,
                found: operands.len(),
            });
        };
        let size_fits = self.size == 64 || (self.size > 0 && self.size.is_multiple_of(LANES));
        let fits = size_fits
            && [q, k]
                .iter()
                .all(|s| s.rank() == 3 && s.dtype == DType::BF16 && s.count() > 0)
            && (q.dims[0], q.dims[2]) == (k.dims[0], k.dims[2])
            && k == v
            && q.dims[2].is_multiple_of(self.slab())
            && Blocks::of(q.dims[1], TILE_ROWS).length() == q.dims[1]
            && Attention::padded(1, self.keys)[1] == k.dims[1];
        match fits {
            true => Ok(q.clone()),
            false => Err(constraint(
                "attention kernel",
                format!(
                    "query {q}, key {k} and value {v} are not bf16 [batch, length, heads * {}] in whole blocks, with \
                     {} keys and their padding",
                    self.size, self.keys
                ),
            )),
        }
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        // Two products of a multiply and an add for each key.
        (4 * result.count() as u64).saturating_mul(operands[1].dims[1] as u64)
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        let kernel = self.kernel(&operands[0].shape, &operands[1].shape);
        evaluated(Some(&kernel), operands, result)
    }
}
