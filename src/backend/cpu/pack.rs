//! Weights in the order in which kernels multiply them, by operations on weights alone.

use crate::dtype::DType;
use crate::graph::{Binary, Builder, ConvDims, GraphError, Op, PadDim, Tensor};

use super::kernel::{LANES, Window, group};

type Result<T> = std::result::Result<T, GraphError>;

/// A convolution's kernel as a matrix `[out, places * in]`.
pub(super) fn columns_of_kernel(
    b: &Builder,
    kernel: Tensor,
    dims: &ConvDims,
) -> Result<(Tensor, Option<Window>)> {
    let (kernel, window) = channels_last_kernel(b, kernel, dims)?;
    let sizes = b.dims(kernel);
    let matrix = b.reshape(kernel, &[sizes[0], sizes[1..].iter().product()])?;
    Ok((matrix, Some(window)))
}

/// A convolution's kernel as `[out, height, width, in]`, and how it moves.
pub(super) fn channels_last_kernel(
    b: &Builder,
    kernel: Tensor,
    dims: &ConvDims,
) -> Result<(Tensor, Window)> {
    let kernel = b.transpose(kernel, &dims.rhs.channels_last_order())?;
    let sizes = b.dims(kernel);
    let padding = [0, 1].map(|i| {
        let (low, high) = dims.padding[i];
        (low.unsigned_abs() as usize, high.unsigned_abs() as usize)
    });
    let window = Window {
        size: [sizes[1], sizes[2]],
        strides: [dims.strides[0], dims.strides[1]],
        padding,
    };
    Ok((kernel, window))
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

/// `[columns, k]` as the kernel reads it ([`super::kernel::packed_shape`]).
pub(super) fn packed(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let Some(group) = group(b.dtype(matrix)) else {
        return Err(b.invalid(format!("no kernel multiplies {}", b.shape(matrix))));
    };
    let matrix = padded(b, matrix)?;
    let [columns, k] = [0, 1].map(|d| b.dims(matrix)[d]);
    let blocks = b.reshape(matrix, &[columns / LANES, LANES, k / group, group])?;
    b.transpose(blocks, &[0, 2, 1, 3])
}

/// The same of integers that are multiplied as bf16: two of a column share a lane, and of 4 bits a byte.
pub(super) fn packed_integers(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let matrix = padded(b, matrix)?;
    let [columns, k] = [0, 1].map(|d| b.dims(matrix)[d]);
    let blocks = b.reshape(matrix, &[columns / LANES, LANES, k / 2, 2])?;
    let pairs = b.transpose(blocks, &[0, 2, 1, 3])?;
    if b.dtype(pairs) == DType::S8 {
        return Ok(pairs);
    }
    let bytes = b.push(
        Op::BitcastConvert(DType::U8),
        &[b.convert(pairs, DType::S8)?],
    )?;
    let half = |at| {
        b.reshape(
            b.slice_dim(bytes, 3, at, at + 1)?,
            &[columns / LANES, k / 2, LANES],
        )
    };
    let (first, second) = (half(0)?, half(1)?);
    let full = |value| b.full(&b.shape(first), value);
    let first = b.binary(Binary::And, first, full(15.0)?)?;
    let second = b.binary(Binary::ShiftLeft, second, full(4.0)?)?;
    b.binary(Binary::Or, first, second)
}

/// Scales, or zero points, that lie `along` dimensions of a rhs whose columns and channels are at `places`, as
/// `[columns / 16, groups, 16]` of the given columns and groups; zero points as bf16.
pub(super) fn packed_scales(
    b: &Builder,
    scales: Tensor,
    along: &[usize],
    places: [usize; 2],
    sizes: [usize; 2],
) -> Result<Tensor> {
    let scales = match b.dtype(scales) {
        DType::S8 => b.convert(scales, DType::BF16)?,
        DType::F16 => b.convert(scales, DType::F32)?,
        _ => scales,
    };
    let mut to = Vec::with_capacity(along.len());
    for d in along {
        match places.iter().position(|place| place == d) {
            Some(place) => to.push(place),
            None => return Err(b.invalid("scales lie along columns and channels of a weight")),
        }
    }
    // Where channels come first.
    let (scales, to) = match to[..] {
        [1, 0] => (b.transpose(scales, &[1, 0])?, vec![0, 1]),
        _ => (scales, to),
    };
    let matrix = b.broadcast_in_dim(scales, &to, &sizes)?;
    let matrix = padded(b, matrix)?;
    let blocks = b.dims(matrix)[0] / LANES;
    let matrix = b.reshape(matrix, &[blocks, LANES, sizes[1]])?;
    b.transpose(matrix, &[0, 2, 1])
}

/// The correction of the sums for the 128 that was added to every value of the lhs.
pub(super) fn start(b: &Builder, matrix: Tensor) -> Result<Tensor> {
    let wide = b.convert(padded(b, matrix)?, DType::S32)?;
    let sums = b.sum(wide, &[1])?;
    b.mul(sums, b.full(&b.shape(sums), -128.0)?)
}
