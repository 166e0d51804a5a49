//! Kernels of convolutions whose images have each pixel twice in both directions.
//!
//! Of the three rows of a kernel two see the same row of the image before it was doubled: those at 1 and 2 where the result's row is
//! even, those at 0 and 1 where it is odd. The same holds for columns. So their weights are added when they are loaded, and a result
//! takes 4 products in place of 9.

use crate::graph::{Builder, GraphError, Tensor};

/// The places of a kernel of three that are added: of the result's even rows or columns those on both sides of the image before it is
/// doubled, then of its odd ones.
pub const ADDED: [(usize, usize); 4] = [(0, 1), (1, 3), (0, 2), (2, 3)];

/// A kernel whose places along dimension `dim` are the sums of those from the first of each pair to before the second.
///
/// # Errors
/// When the kernel has no such places.
pub fn added(
    b: &Builder,
    kernel: Tensor,
    dim: usize,
    pairs: &[(usize, usize)],
) -> Result<Tensor, GraphError> {
    let sums = pairs.iter().map(|(first, end)| {
        let place = |at| b.slice_dim(kernel, dim, at, at + 1);
        (first + 1..*end).try_fold(place(*first)?, |sum, at| b.add(sum, place(at)?))
    });
    let sums: Vec<Tensor> = sums.collect::<Result<_, _>>()?;
    b.concatenate(&sums, dim)
}
