//! Weights as a low-rank product and what it leaves: SVDQuant (Li et al. 2024) in AMD Quark's order, by a randomized
//! singular value decomposition (Halko, Martinsson and Tropp 2011, algorithm 4.4).

use nalgebra::DMatrix;
use ndarray::{Array1, Array2, ArrayView2, Axis, CowArray, s};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::TensorFormat;
use crate::host_tensor::{HostTensor, HostTensorError, float_bytes};
use crate::shape::Shape;

use super::gptq::WeightRounding;
use super::weight::{QuantizedWeight, WeightQuantError};

/// Columns beyond the rank that the decomposition computes with.
const MORE_COLUMNS: usize = 8;
/// Times that the columns are multiplied with the matrix and its transpose: what the product leaves is then within 2 % of the
/// least possible, even of a matrix of random numbers (`tests/quant_calibrated.rs`).
const POWER_STEPS: usize = 3;
/// Rows that one thread multiplies at a time.
const ROWS: usize = 256;

/// What [`with_low_rank`] is told of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankOptions {
    pub rank: usize,
    /// Times that the product is chosen for what quantizing leaves.
    pub iterations: usize,
    /// The activations' share in the factors by which features count ([`balance`]); several are tried.
    pub alphas: Vec<f64>,
    /// Of each input feature the largest magnitude and the mean square; `None` where nothing is known of them.
    pub features: Option<[Vec<f32>; 2]>,
}

/// A quantized weight with the product that stands beside it.
#[derive(Clone, Debug)]
pub struct LowRankWeight {
    pub weight: QuantizedWeight,
    /// `f32[rank, in]`
    pub down: HostTensor,
    /// `f32[out, rank]`
    pub up: HostTensor,
    /// The one of [`LowRankOptions::alphas`] that was taken.
    pub alpha: f64,
}

/// Why a weight was not decomposed.
#[derive(Debug, thiserror::Error)]
pub enum LowRankError {
    #[error(transparent)]
    Weight(#[from] WeightQuantError),
    #[error(transparent)]
    Host(#[from] HostTensorError),
    #[error(
        "a low-rank product stands beside matrices `[out, in]`, and this weight has dimensions {dims:?}"
    )]
    Shape { dims: Vec<usize> },
}

/// The factors of features by which weights and activations share their ranges: `activation^alpha / weight^(1 - alpha)` of
/// the largest magnitudes, between 1e-5 and 1e5 (SmoothQuant, Xiao et al. 2023, equation 4; limits of AMD Quark).
pub fn balance(activations: &[f32], weights: &[f32], alpha: f64) -> Vec<f32> {
    let each = activations.iter().zip(weights);
    let factor = |(activation, weight): (&f32, &f32)| {
        let activation = activation.max(1e-8).powf(alpha as f32);
        let weight = weight.max(1e-5).powf(1.0 - alpha as f32);
        (activation / weight).clamp(1e-5, 1e5)
    };
    each.map(factor).collect()
}

/// The largest magnitude of each input feature of a weight `[out, in, ..]`.
pub fn largest_of_features(weight: &[f32], dims: &[usize]) -> Vec<f32> {
    let inputs = dims.get(1).copied().unwrap_or(1).max(1);
    let positions = dims.iter().skip(2).product::<usize>().max(1);
    // Of each position of each feature first: neighbours in memory, so that several are compared at a time.
    let mut largest = vec![0f32; inputs * positions];
    for row in weight.chunks(inputs * positions) {
        for (largest, value) in largest.iter_mut().zip(row) {
            *largest = largest.max(value.abs());
        }
    }
    let of_features = largest.chunks(positions);
    of_features
        .map(|of| of.iter().fold(0f32, |m, x| m.max(*x)))
        .collect()
}

/// A weight `f32[out, in]` as a low-rank product and quantized integers of what that leaves. As in AMD Quark, the factors
/// of [`balance`] say which features the product fits best, and are divided out again: the layer reads its input as it is.
/// What is left is quantized in `dtype`, `f32` or `bf16`.
///
/// # Errors
/// When the weight is no matrix, or the format is not one of [`WeightRounding::quantize`].
pub fn with_low_rank(
    weight: &HostTensor,
    format: TensorFormat,
    rounding: &WeightRounding<'_>,
    options: &LowRankOptions,
    dtype: DType,
) -> Result<LowRankWeight, LowRankError> {
    let &[out, inputs] = &weight.shape.dims[..] else {
        return Err(LowRankError::Shape {
            dims: weight.shape.dims.clone(),
        });
    };
    let values = weight.to_f32_vec()?;
    let whole =
        ArrayView2::from_shape((out, inputs), &values).map_err(|_| LowRankError::Shape {
            dims: weight.shape.dims.clone(),
        })?;
    let features = options.features.as_ref();
    let largest = features.map(|[of, _]| (of, largest_of_features(&values, &weight.shape.dims)));
    let mut best: Option<(f64, LowRankWeight)> = None;
    for &alpha in &options.alphas {
        let factors = largest.as_ref();
        let factors = factors.map(|(of, own)| Array1::from(balance(of, own, alpha)));
        let mut of = CowArray::from(whole);
        let mut found = None;
        for _ in 0..options.iterations {
            let [up, down] = match &factors {
                Some(factors) => {
                    let [up, down] = low_rank((&of * factors).view(), options.rank);
                    [up, down / factors]
                }
                None => low_rank(of.view(), options.rank),
            };
            let [up, down] = [up, down].map(|factor| factor.mapv_into(to_bf16));
            let residual = typed(&less(whole, product(up.view(), down.view())), dtype)?;
            let quantized = rounding.quantize(&residual, format)?;
            if options.iterations > 1 {
                let left = quantized.dequantized()?;
                let left = Array2::from_shape_vec((out, inputs), left).unwrap_or_default();
                of = less(whole, left).into();
            }
            found = Some((quantized, up, down));
        }
        let Some((quantized, up, down)) = found else {
            continue;
        };
        let error = match &options.features {
            Some([_, squares]) if options.alphas.len() > 1 => {
                let left = quantized.dequantized()?;
                let left = Array2::from_shape_vec((out, inputs), left).unwrap_or_default();
                let error = less(whole, product(up.view(), down.view())) - &left;
                let of_rows = error.axis_iter(Axis(0)).map(|row| {
                    let each = row.iter().zip(squares);
                    each.map(|(e, square)| f64::from(e * e * square))
                        .sum::<f64>()
                });
                of_rows.sum()
            }
            _ => quantized.noise,
        };
        if best.as_ref().is_none_or(|(smallest, _)| error < *smallest) {
            let found = LowRankWeight {
                weight: quantized,
                down: typed(&down, DType::F32)?,
                up: typed(&up, DType::F32)?,
                alpha,
            };
            best = Some((error, found));
        }
    }
    best.map(|(_, found)| found)
        .ok_or(LowRankError::Weight(WeightQuantError::Scalar))
}

/// The first matrix without the second, in the memory of the second.
fn less(whole: ArrayView2<'_, f32>, mut part: Array2<f32>) -> Array2<f32> {
    part.zip_mut_with(&whole, |part, whole| *part = whole - *part);
    part
}

/// A matrix in `f32` or `bf16`.
fn typed(x: &Array2<f32>, dtype: DType) -> Result<HostTensor, HostTensorError> {
    let data = float_bytes(dtype, x.iter().copied());
    HostTensor::new(Shape::new(dtype, [x.nrows(), x.ncols()]), data)
}

/// The value of bf16 nearest to `x`.
fn to_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// `up [out, rank]` with orthonormal columns and `down [rank, in]`, whose product is near the best one of this rank.
fn low_rank(matrix: ArrayView2<'_, f32>, rank: usize) -> [Array2<f32>; 2] {
    let (out, inputs) = matrix.dim();
    let columns = (rank + MORE_COLUMNS).min(out).min(inputs);
    let rank = rank.min(columns);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let signs = Array2::from_shape_simple_fn((inputs, columns), || {
        if rng.next_u32() & 1 == 0 { 1.0 } else { -1.0 }
    });
    let transposed = matrix.t();
    let mut basis = orthonormal(&product(matrix, signs.view()));
    for _ in 0..POWER_STEPS {
        let of_inputs = orthonormal(&product(transposed, basis.view()));
        basis = orthonormal(&product(matrix, of_inputs.view()));
    }
    // The matrix in this basis is [in, columns], the other way round.
    let small = product(transposed, basis.view());
    let small = to_nalgebra(&small).svd(true, true);
    let (Some(right), Some(left)) = (small.u, small.v_t) else {
        return [Array2::zeros((out, rank)), Array2::zeros((rank, inputs))];
    };
    // Singular values come in any order.
    let mut order: Vec<usize> = (0..small.singular_values.len()).collect();
    order.sort_by(|a, b| small.singular_values[*b].total_cmp(&small.singular_values[*a]));
    order.truncate(rank);
    let down = Array2::from_shape_fn((order.len(), inputs), |(i, j)| {
        small.singular_values[order[i]] * right[(j, order[i])]
    });
    let rotation = Array2::from_shape_fn((columns, order.len()), |(i, j)| left[(order[j], i)]);
    [product(basis.view(), rotation.view()), down]
}

fn to_nalgebra(x: &Array2<f32>) -> DMatrix<f32> {
    DMatrix::from_fn(x.nrows(), x.ncols(), |i, j| x[(i, j)])
}

/// An orthonormal basis of the columns.
fn orthonormal(x: &Array2<f32>) -> Array2<f32> {
    let q = to_nalgebra(x).qr().q();
    Array2::from_shape_fn((q.nrows(), q.ncols()), |(i, j)| q[(i, j)])
}

/// The product of two matrices, some rows at a time.
fn product(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>) -> Array2<f32> {
    let mut out = Array2::zeros((a.nrows(), b.ncols()));
    let parts: Vec<_> = out
        .axis_chunks_iter_mut(Axis(0), ROWS)
        .enumerate()
        .collect();
    parts.into_par_iter().for_each(|(at, mut out)| {
        let first = at * ROWS;
        let rows = a.slice(s![first..first + out.nrows(), ..]);
        out.assign(&rows.dot(&b));
    });
    out
}
