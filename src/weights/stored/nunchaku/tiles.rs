//! The order in which nunchaku's GPU kernels take weights, scales, vectors and low-rank factors (facts: `NunchakuWeightPacker`
//! of `nunchaku/lora/flux/packer.py`, for 4 bits and warps of 128 output features), and that of AWQ's products with 16-bit
//! activations (facts: `deepcompressor/backend/tinychat/utils.py`).

use rayon::prelude::*;

use crate::dtype::DType;
use crate::shape::Shape;

/// Output features of a tile.
pub(super) const TILE: usize = 128;

/// How a matrix lies in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights) struct Tiles {
    pub kind: Kind,
    /// The rows that the file has from the tensor's offset on.
    pub stored: usize,
    /// The first of them that is shown.
    pub first: usize,
}

/// What lies in tiles. A matrix is `[out, in]`, `[out, groups]`, `[rank, in]` or `[out, rank]` as it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights) enum Kind {
    /// Codes of 4 bits.
    Codes,
    /// Scales of 16 bits, and with one column vectors.
    Scales,
    /// Scales of 8 bits, each for 16 input features.
    SmallScales,
    /// The low-rank factor that is multiplied first.
    Down,
    /// The other one.
    Up,
    /// AWQ's codes of 4 bits, of rows that lie in turn: the first of each of so many equal parts, then the second.
    AwqCodes(usize),
    /// AWQ's scales and minimums of 16 bits, and with one column its bias, likewise.
    AwqScales(usize),
}

/// Columns that lie beside each other in a file, and the bytes that they take.
struct Unit {
    columns: usize,
    bytes: usize,
}

impl Tiles {
    /// The bytes of the file that a tensor of this shape is read from.
    pub fn stored_bytes(self, shape: &Shape) -> usize {
        shape.dtype.storage_bytes(self.stored * columns(shape))
    }

    /// The rows of a tensor of this shape in row-major order. `data` has [`Tiles::stored_bytes`].
    pub fn unpack(self, shape: &Shape, data: &[u8]) -> Vec<u8> {
        let (count, columns) = (shape.dims.first().copied().unwrap_or(0), columns(shape));
        let mut rows = vec![0; shape.dtype.storage_bytes(count * columns)];
        let bytes = shape.dtype.storage_bytes(columns).max(1);
        let unit = self.kind.unit(shape.dtype);
        rows.par_chunks_exact_mut(bytes)
            .enumerate()
            .for_each(|(row, out)| {
                let row = self.first + row;
                match self.kind {
                    Kind::AwqCodes(splits) => {
                        let row = in_turn(row, self.stored, splits);
                        awq_row(row, columns, data, out);
                    }
                    _ => {
                        for (at, out) in out.chunks_exact_mut(unit.bytes).enumerate() {
                            let from = self.place(row, at * unit.columns, columns) / unit.columns;
                            out.copy_from_slice(&data[from * unit.bytes..][..unit.bytes]);
                        }
                    }
                }
            });
        rows
    }

    /// Where the element of a row and a column lies in the file, counted in elements.
    fn place(self, row: usize, column: usize, columns: usize) -> usize {
        match self.kind {
            Kind::Codes => code(row, column, columns),
            Kind::Scales => scale(row, column, columns),
            Kind::SmallScales => small_scale(row, column, columns),
            // A row is a column of the file's blocks, of which those of one input feature lie together.
            Kind::Down => factor(column / 16 * (self.stored / 16) + row / 16, row, column),
            Kind::Up => factor(row / 16 * (columns / 16) + column / 16, row, column),
            Kind::AwqScales(splits) => column * self.stored + in_turn(row, self.stored, splits),
            // Its rows are unpacked as a whole.
            Kind::AwqCodes(_) => 0,
        }
    }
}

impl Kind {
    fn unit(self, dtype: DType) -> Unit {
        match self {
            Kind::Codes | Kind::AwqCodes(_) => Unit {
                columns: 8,
                bytes: 4,
            },
            Kind::Scales | Kind::SmallScales | Kind::Down | Kind::Up | Kind::AwqScales(_) => Unit {
                columns: 1,
                bytes: dtype.storage_bytes(1),
            },
        }
    }
}

/// The elements of a row.
fn columns(shape: &Shape) -> usize {
    shape.dims.iter().skip(1).product()
}

/// Eight columns make a word; a lane takes the words of two runs of 32 columns and of two rows that are 8 apart.
fn code(row: usize, column: usize, columns: usize) -> usize {
    let tile = row / TILE * (columns / 64) + column / 64;
    let of_rows = tile * 8 + row / 16 % 8;
    let lane = (of_rows * 8 + row % 8) * 4 + column / 8 % 4;
    let word = (lane * 2 + row / 8 % 2) * 2 + column / 32 % 2;
    word * 8 + column % 8
}

/// A lane takes two rows, and the two that follow 8 later, of a column.
fn scale(row: usize, column: usize, columns: usize) -> usize {
    let of_rows = (row / TILE * columns + column) * 8 + row / 16 % 8;
    let lane = of_rows * 4 + row / 2 % 4;
    (lane * 2 + row / 8 % 2) * 2 + row % 2
}

/// A lane takes four columns of four rows that are 32 apart.
fn small_scale(row: usize, column: usize, columns: usize) -> usize {
    let of_columns = row / TILE * (columns / 4) + column / 4;
    let lane = (of_columns * 8 + row % 8) * 4 + row / 8 % 4;
    (lane * 4 + row / 32 % 4) * 4 + column % 4
}

/// The place in a block of 16 rows and columns.
fn factor(block: usize, row: usize, column: usize) -> usize {
    let lane = (block * 8 + row % 8) * 4 + column / 2 % 4;
    ((lane * 2 + row / 8 % 2) * 2 + column / 8 % 2) * 2 + column % 2
}

/// The place of a row of which each of `splits` equal parts has one in turn.
fn in_turn(row: usize, rows: usize, splits: usize) -> usize {
    let part = (rows / splits).max(1);
    row % part * splits + row / part
}

/// A row of AWQ's codes. Of 32 columns four that are 8 apart share 16 bits; of four rows 16 such words lie in turn.
fn awq_row(row: usize, columns: usize, data: &[u8], out: &mut [u8]) {
    for (run, out) in out.chunks_exact_mut(16).enumerate() {
        let block = row / 4 * (columns / 64) + run / 2;
        let start = (block * 4 + row % 4) * 16 + run % 2 * 8;
        let words = &data[2 * start..2 * start + 16];
        for (at, out) in out.iter_mut().enumerate() {
            let code = |column: usize| {
                let byte = words[2 * (column % 8) + column / 16];
                byte >> (4 * (column / 8 % 2)) & 0xf
            };
            *out = code(2 * at) | code(2 * at + 1) << 4;
        }
    }
}
