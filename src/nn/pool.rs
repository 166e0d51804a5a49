//! Pooling of images `[batch, height, width, channels]`.

use crate::graph::{Builder, PadDim, Tensor};
use crate::host_tensor::HostTensor;

use super::{Result, dims};

/// Square windows of an image: torch's `MaxPool2d` and `AvgPool2d`.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// Height and width of a window.
    pub kernel: usize,
    pub stride: usize,
    /// Places before the first and after the last pixel that windows reach over.
    pub padding: usize,
}

/// The dimensions that windows have.
const SPATIAL: [usize; 2] = [1, 2];

/// The largest value of each window; places outside of the image are never the largest.
///
/// # Errors
/// When `x` is not of rank 4, or smaller than a window.
pub fn max_pool(b: &Builder, x: Tensor, pool: Pool) -> Result<Tensor> {
    let [_, _, _, _] = dims(b, "max_pool", x)?;
    // The largest of a square is the largest of its rows' largest.
    SPATIAL.into_iter().try_fold(x, |x, dim| {
        let places = places(b, x, dim, pool, f64::NEG_INFINITY)?;
        folded(&places, |x, y| b.max(x, y))
    })
}

/// The mean of each window's pixels; places outside of the image do not count (`count_include_pad=False`).
///
/// # Errors
/// As for [`max_pool`].
pub fn average_pool(b: &Builder, x: Tensor, pool: Pool) -> Result<Tensor> {
    let [_, _, _, _] = dims(b, "average_pool", x)?;
    SPATIAL.into_iter().try_fold(x, |x, dim| {
        let size = b.dims(x)[dim];
        let places = places(b, x, dim, pool, 0.0)?;
        let sum = folded(&places, |x, y| b.add(x, y))?;
        let shares: Vec<f32> = (0..b.dims(sum)[dim])
            .map(|at| {
                let first = (at * pool.stride).saturating_sub(pool.padding);
                let end = (at * pool.stride + pool.kernel).saturating_sub(pool.padding);
                1.0 / (end.min(size) - first) as f32
            })
            .collect();
        let mut shape = [1; 4];
        shape[dim] = shares.len();
        let shares = b.constant(HostTensor::from_f32(shape, &shares)?)?;
        b.mul(sum, b.convert(shares, b.dtype(x))?)
    })
}

/// For each place of a window along `dim`, what all windows have there.
fn places(b: &Builder, x: Tensor, dim: usize, pool: Pool, outside: f64) -> Result<Vec<Tensor>> {
    let none = PadDim {
        low: 0,
        high: 0,
        interior: 0,
    };
    let mut padding = [none; 4];
    padding[dim].low = pool.padding as i64;
    padding[dim].high = pool.padding as i64;
    let x = match pool.padding {
        0 => x,
        _ => b.pad(x, outside, &padding)?,
    };
    let sizes = b.dims(x);
    if sizes[dim] < pool.kernel {
        let message = format!("a window of {} pixels does not fit {sizes:?}", pool.kernel);
        return Err(b.invalid(message));
    }
    let windows = (sizes[dim] - pool.kernel) / pool.stride + 1;
    let mut strides = [1; 4];
    strides[dim] = pool.stride;
    (0..pool.kernel)
        .map(|place| {
            let (mut start, mut limit) = ([0; 4], sizes.clone());
            start[dim] = place;
            limit[dim] = place + (windows - 1) * pool.stride + 1;
            b.slice(x, &start, &limit, &strides)
        })
        .collect()
}

fn folded(places: &[Tensor], join: impl Fn(Tensor, Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (first, rest) = (places[0], &places[1..]);
    rest.iter().try_fold(first, |x, y| join(x, *y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::eval::evaluate;
    use crate::nn::tests::input;

    fn pooled(
        dims: &[usize],
        values: &[f32],
        pool: impl Fn(&Builder, Tensor) -> Result<Tensor>,
    ) -> Vec<f32> {
        let b = Builder::new();
        let x = input(&b, "x", dims);
        let y = pool(&b, x).unwrap();
        b.output("y", y, None).unwrap();
        let x = HostTensor::from_f32(dims, values).unwrap();
        let found = evaluate(&b.finish(), &[x]).unwrap();
        found[0].to_f32_vec().unwrap()
    }

    #[test]
    fn places_outside_are_never_the_largest_and_do_not_count() {
        let whole = Pool {
            kernel: 3,
            stride: 1,
            padding: 1,
        };
        let values = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0];
        let largest = pooled(&[1, 2, 3, 1], &values, |b, x| max_pool(b, x, whole));
        assert_eq!(largest, [-1.0, -1.0, -2.0, -1.0, -1.0, -2.0]);
        let means = pooled(&[1, 2, 3, 1], &values, |b, x| average_pool(b, x, whole));
        for (found, expected) in means.iter().zip([-3.0, -3.5, -4.0, -3.0, -3.5, -4.0]) {
            assert!((found - expected).abs() < 1e-6, "{means:?}");
        }
    }

    /// Of 6 pixels, windows of 3 with stride 2 leave the last out.
    #[test]
    fn strides_leave_out_what_no_window_reaches() {
        let halved = Pool {
            kernel: 3,
            stride: 2,
            padding: 0,
        };
        let values: Vec<f32> = (0..36).map(|at| at as f32).collect();
        let largest = pooled(&[1, 6, 6, 1], &values, |b, x| max_pool(b, x, halved));
        assert_eq!(largest, [14.0, 16.0, 26.0, 28.0]);
        let means = pooled(&[1, 6, 6, 1], &values, |b, x| average_pool(b, x, halved));
        for (found, expected) in means.iter().zip([7.0, 9.0, 19.0, 21.0]) {
            assert!((found - expected).abs() < 1e-5, "{means:?}");
        }
        let b = Builder::new();
        let x = input(&b, "x", &[1, 2, 6, 1]);
        let error = max_pool(&b.root("m"), x, halved).unwrap_err().to_string();
        assert!(
            error.contains("a window of 3 pixels does not fit"),
            "{error}"
        );
    }
}
