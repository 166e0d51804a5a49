//! The largest magnitudes of images, for the ranges of int8. The compiler's reduction of 16384 x 320 takes 146,000 cycles
//! on v5e, where reading the image takes 38,000.

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Configuration, CustomCall, InferError, constraint};
use crate::shape::Shape;

use super::mosaic::{CostEstimate, Kernel, LANES, Place, VMEM_BYTES, Window, evaluated};

/// Rows of a tile of bf16, of which the result has as many.
pub const ROWS: usize = 16;
/// Registers of 32 bits that a step of the loop loads, at most: those of the maxima stay in registers too.
const MOST_REGISTERS: usize = 64;

/// Of `bf16[batch, rows, columns]`, the largest magnitude among every 16th row: `f32[batch, 16, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsMax;

impl AbsMax {
    /// Whether rows make whole tiles of which a core can hold some.
    pub fn fits(rows: usize, columns: usize) -> bool {
        block_rows(rows, columns).is_some()
    }

    fn kernel([batch, rows, columns]: [usize; 3]) -> Option<Kernel> {
        let block = block_rows(rows, columns)?;
        let x = Window {
            dtype: DType::BF16,
            array: [batch, rows, columns],
            block: [block, columns],
            index: [Some(0), Some(1), None],
            place: Place::Own,
        };
        let result = Window {
            dtype: DType::F32,
            array: [batch, ROWS, columns],
            block: [ROWS, columns],
            index: [Some(0), None, None],
            place: Place::Own,
        };
        let steps = rows / block;
        let mut kernel = Kernel::new(vec![batch, steps], vec![x, result]);
        let k = &mut kernel;
        let size = [ROWS, columns];
        let kept = k.scratch(DType::F32, size);
        k.when_first(1, |k| {
            let zeros = k.splat(DType::F32, size, 0.0);
            k.keep(kept, zeros, [0, 0]);
        });
        let tiles = block / ROWS;
        let registers = 2 * columns.div_ceil(LANES);
        let most = (MOST_REGISTERS / registers).clamp(1, tiles);
        let at_once = (1..=most)
            .rev()
            .find(|count| tiles.is_multiple_of(*count))?;
        let start = k.kept(kept);
        let highest = k.repeat(tiles / at_once, vec![start], |k, counter, highest| {
            let highest = (0..at_once).fold(highest[0], |highest, tile| {
                let row = k.row_of(counter, at_once * ROWS, tile * ROWS);
                let x = k.load(0, row, ROWS);
                let x = k.convert(x, DType::F32);
                let x = k.abs(x);
                k.max(highest, x)
            });
            vec![highest]
        });
        k.keep(kept, highest[0], [0, 0]);
        k.when(1, steps - 1, |k| {
            let highest = k.kept(kept);
            k.store(highest, 0);
        });
        Some(kernel)
    }

    fn sizes(operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x] = operands else {
            return None;
        };
        let sizes: [usize; 3] = x.dims[..].try_into().ok()?;
        (x.dtype == DType::BF16).then_some(sizes)
    }
}

/// The most rows of a block that divide all, as whole tiles.
fn block_rows(rows: usize, columns: usize) -> Option<usize> {
    // Blocks are there twice; a quarter of the memory is enough to hide the latency of transfers.
    let most = VMEM_BYTES / 8 / (2 * columns.next_multiple_of(LANES)).max(1);
    let blocks = (1..=most / ROWS).rev().map(|tiles| tiles * ROWS);
    let mut blocks = blocks.filter(|block| rows > 0 && rows.is_multiple_of(*block));
    blocks.next().filter(|_| columns > 0)
}

impl CustomCall for AbsMax {
    fn target(&self) -> &'static str {
        "tpu_custom_call"
    }

    fn name(&self) -> &'static str {
        "absmax"
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let Some(kernel) = AbsMax::sizes(operands).and_then(AbsMax::kernel) else {
            return Configuration::Text(String::new());
        };
        let cost = CostEstimate {
            flops: 0,
            transcendentals: 0,
            bytes_accessed: operands.iter().map(|shape| shape.bytes() as u64).sum(),
        };
        Configuration::Text(kernel.backend_config(cost))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes =
            AbsMax::sizes(operands).filter(|[_, rows, columns]| AbsMax::fits(*rows, *columns));
        let Some([batch, _, columns]) = sizes else {
            let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
            return Err(constraint(
                "absmax kernel",
                format!(
                    "takes bf16[batch, rows, columns] of rows that are a multiple of {ROWS}, not {}",
                    found.join(", ")
                ),
            ));
        };
        Ok(Shape::new(DType::F32, [batch, ROWS, columns]))
    }

    fn flops(&self, _: &[&Shape], _: &Shape) -> u64 {
        0
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        let shapes: Vec<&Shape> = operands.iter().map(|operand| &operand.shape).collect();
        let kernel = AbsMax::sizes(&shapes).and_then(AbsMax::kernel);
        evaluated(kernel.as_ref(), operands, result)
    }
}
