//! The ranges of columns.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::super::arithmetic::block_of_columns;
use super::super::call::{KernelCall, refused};
use super::super::mosaic::{Kernel, LANES, Place, Window, most_bytes};
use super::{Tiles, absmax, ranges_of};

/// Columns of a block, at most: what is between fits the registers.
const MOST_COLUMNS: usize = 640;

/// The largest magnitude of each column of each part of the batch: of `bf16[parts, rows, columns]`, `f32[parts, 1, columns]`.
///
/// The compiler's reduction of bf16[1024,10240] takes 146,858 cycles on a v5e, and reading it 38,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnRanges {
    /// Cores that share the columns of a part.
    pub cores: usize,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

impl ColumnRanges {
    /// Whether the kernel takes so many rows of a part of the batch.
    pub fn fits(&self, rows: usize, columns: usize) -> bool {
        self.block([1, rows, columns]).is_some()
    }

    /// Columns of the largest block that fits the core's memory.
    fn block(&self, array: [usize; 3]) -> Option<usize> {
        let [_, rows, columns] = array;
        let is_whole = rows > 0
            && rows.is_multiple_of(LANES)
            && columns > 0
            && columns.is_multiple_of(self.cores * LANES);
        if !is_whole {
            return None;
        }
        let mut widths = (1..=MOST_COLUMNS / LANES)
            .rev()
            .filter_map(|tiles| block_of_columns(columns / self.cores, tiles * LANES));
        widths.find(|width| {
            let kernel = Kernel::new(Vec::new(), self.windows(array, *width).to_vec());
            kernel.window_bytes() <= most_bytes(self.memory)
        })
    }

    fn windows(&self, array: [usize; 3], width: usize) -> [Window; 2] {
        let x = Window {
            dtype: DType::BF16,
            array,
            block: [array[1], width],
            index: [Some(0), None, Some(2)],
            place: Place::Own,
            first_column: 0,
        };
        [x, ranges_of(x)]
    }

    fn array(operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x] = operands else {
            return None;
        };
        let array = x.dims[..].try_into().ok()?;
        (x.dtype == DType::BF16).then_some(array)
    }
}

impl KernelCall for ColumnRanges {
    fn name(&self) -> &'static str {
        "int8_ranges_of_columns"
    }

    fn batch(&self, _operands: &[&Shape]) -> Option<Batch> {
        Some(Batch {
            operands: vec![Some(0)],
            result: 0,
        })
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let array = Self::array(operands)?;
        let width = self.block(array)?;
        let [parts, rows, columns] = array;
        let grid = vec![parts, self.cores, columns / width / self.cores];
        let mut k = Kernel::new(grid, self.windows(array, width).to_vec());
        k.memory = self.memory;
        k.share_last_dims();
        let highest = absmax(&mut k, 0, rows, 0..width, Tiles::Loop, DType::F32);
        k.store(highest, [0, 0]);
        Some(k)
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let array = Self::array(operands);
        match array.filter(|array| self.block(*array).is_some()) {
            Some([parts, _, columns]) => Ok(Shape::new(DType::F32, [parts, 1, columns])),
            None => Err(refused("kernel of ranges of columns", self, operands)),
        }
    }
}
