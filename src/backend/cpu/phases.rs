//! Convolutions of images whose pixels are repeated, as four convolutions of the images themselves. [`super::super::doubled`]
//! says why two places of a kernel in each direction are enough.

use crate::backend::doubled::{ADDED, added};
use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, GraphError, Tensor};
use crate::shape::Shape;

use super::kernel::{Contract, Kernel, Window, call};
use super::pack::packed;
use super::rewrite::is_plain_convolution;

type Result<T> = std::result::Result<T, GraphError>;

/// Whether a convolution of a doubled image with `kernel` has such a form: three places in each direction, and a result of the
/// image's size.
pub(super) fn takes(dims: &ConvDims, kernel: &Shape) -> bool {
    is_plain_convolution(dims)
        && dims.strides == [1, 1]
        && dims.padding == [(1, 1), (1, 1)]
        && dims.rhs.spatial.iter().all(|d| kernel.dims[*d] == 3)
}

/// The convolution of `image [n, h, w, in]` with each pixel twice in both directions and `kernel [out, 3, 3, in]`, plus the bias:
/// `[n, 2 h, 2 w, out]`.
///
/// # Errors
/// When the shapes are others.
pub(super) fn of_doubled(
    b: &Builder,
    image: Tensor,
    kernel: Tensor,
    bias: Option<Tensor>,
    result: DType,
) -> Result<Tensor> {
    let [columns, channels] = [0, 3].map(|d| b.dims(kernel)[d]);
    let [n, height, width] = [0, 1, 2].map(|d| b.dims(image)[d]);
    // The pixels of the result in odd rows if `odd[0]` is 1, in odd columns if `odd[1]` is.
    let phase = |odd: [usize; 2]| {
        let wide = b.convert(kernel, DType::F32)?;
        let [rows, columns_of_kernel] = odd.map(|odd| &ADDED[2 * odd..][..2]);
        let joined = added(b, added(b, wide, 1, rows)?, 2, columns_of_kernel)?;
        let joined = b.convert(joined, b.dtype(kernel))?;
        let matrix = b.reshape(joined, &[columns, 4 * channels])?;
        let mut operands = vec![image, packed(b, matrix)?];
        operands.extend(bias);
        let contract = Contract {
            columns,
            window: Some(Window {
                size: [2, 2],
                strides: [1, 1],
                padding: odd.map(|odd| (1 - odd, odd)),
            }),
            stored: None,
            row_scale: false,
            column_scale: false,
            bias: bias.is_some(),
            result,
        };
        let y = call(b, Kernel::Contract(contract), &operands)?;
        b.reshape(y, &[n, height, 1, width, 1, columns])
    };
    let rows = |odd| b.concatenate(&[phase([odd, 0])?, phase([odd, 1])?], 4);
    let all = b.concatenate(&[rows(0)?, rows(1)?], 2)?;
    b.reshape(all, &[n, 2 * height, 2 * width, columns])
}
