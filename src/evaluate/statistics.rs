//! Numbers of sets of pictures, from what a network says of each.

use nalgebra::{Cholesky, DMatrix, DVector};

use crate::pipelines::noise::NoiseGenerator;

/// Parts of the pictures whose Inception scores are averaged.
pub const SPLITS: usize = 10;
/// torch-fidelity's seed of the order in which pictures are split.
const SEED: u64 = 2020;

/// An Inception score: the mean and the standard deviation of the splits' scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InceptionScore {
    pub mean: f64,
    pub deviation: f64,
}

/// The mean and a factor of the covariance of vectors: `factor^T factor`.
struct Gaussian {
    mean: DVector<f64>,
    factor: DMatrix<f64>,
    /// The trace of the covariance.
    trace: f64,
}

/// Fréchet distance of the normal distributions of two sets of vectors (Heusel et al. 2017), with covariances over `n - 1`:
/// `|m - m'|^2 + tr C + tr C' - 2 tr (C C')^(1/2)`. `None` of sets of fewer than two, and where a number is not finite.
///
/// With factors `F^T F = C`, the root's trace is the sum of the singular values of `F F'^T`: no root of a matrix is taken, and
/// covariances need not be regular, as those of few vectors are not.
pub fn frechet_distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> Option<f64> {
    let [a, b] = [gaussian(a)?, gaussian(b)?];
    let root = (&a.factor * b.factor.transpose()).singular_values().sum();
    let distance = (a.mean - b.mean).norm_squared() + a.trace + b.trace - 2.0 * root;
    // Rounding makes the distance of equal sets negative.
    Some(distance.max(0.0))
}

fn gaussian(vectors: &[Vec<f32>]) -> Option<Gaussian> {
    let (count, size) = (vectors.len(), vectors.first()?.len());
    // Singular values of what is not finite are never found.
    if count < 2 || vectors.iter().flatten().any(|x| !x.is_finite()) {
        return None;
    }
    let mut rows = DMatrix::from_fn(count, size, |row, column| f64::from(vectors[row][column]));
    let mean = rows.row_mean().transpose();
    for mut row in rows.row_iter_mut() {
        row -= mean.transpose();
    }
    rows /= ((count - 1) as f64).sqrt();
    let trace = rows.norm_squared();
    let factor = match count <= size {
        true => rows,
        // As many rows as dimensions suffice.
        false => root(rows.tr_mul(&rows)),
    };
    Some(Gaussian {
        mean,
        factor,
        trace,
    })
}

/// `F` with `F^T F` the covariance.
fn root(covariance: DMatrix<f64>) -> DMatrix<f64> {
    // A minute faster for 2048 features; there is none where some feature depends on others, as one that is always 0 does.
    if let Some(cholesky) = Cholesky::new(covariance.clone()) {
        return cholesky.l().transpose();
    }
    let eigen = covariance.symmetric_eigen();
    let mut factor = eigen.eigenvectors.transpose();
    for (mut row, value) in factor.row_iter_mut().zip(eigen.eigenvalues.iter()) {
        // Rounding makes zeros negative.
        row *= value.max(0.0).sqrt();
    }
    factor
}

/// Inception score (Salimans et al. 2016) of logits without their biases, as torch-fidelity's with its defaults: the pictures in
/// its random order in [`SPLITS`] parts, of each the exponential of the mean divergence of a picture's classes from the part's.
/// `None` of fewer pictures than parts, and where a logit is not finite.
pub fn inception_score(logits: &[Vec<f32>]) -> Option<InceptionScore> {
    let count = logits.len();
    if count < SPLITS || logits.iter().flatten().any(|x| !x.is_finite()) {
        return None;
    }
    let order = NoiseGenerator::new(SEED).permutation(count);
    let scores: Vec<f64> = (0..SPLITS)
        .map(|split| &order[split * count / SPLITS..(split + 1) * count / SPLITS])
        .map(|part| {
            let logs: Vec<Vec<f64>> = part.iter().map(|at| log_softmax(&logits[*at])).collect();
            divergence(&logs).exp()
        })
        .collect();
    let mean = scores.iter().sum::<f64>() / SPLITS as f64;
    let variance = scores.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / SPLITS as f64;
    Some(InceptionScore {
        mean,
        deviation: variance.sqrt(),
    })
}

/// The mean Kullback-Leibler divergence of distributions, given as logarithms, from their mean.
fn divergence(logs: &[Vec<f64>]) -> f64 {
    let count = logs.len() as f64;
    let classes = logs.first().map_or(0, Vec::len);
    let of_class = |class: usize| {
        let share = |log: &Vec<f64>| log[class].exp();
        let mean = (logs.iter().map(share).sum::<f64>() / count).ln();
        // A class of no probability adds nothing, though its logarithm is infinite.
        let terms = logs.iter().filter(|log| share(log) > 0.0);
        terms
            .map(|log| share(log) * (log[class] - mean))
            .sum::<f64>()
    };
    (0..classes).map(of_class).sum::<f64>() / count
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits
        .iter()
        .fold(f64::NEG_INFINITY, |most, x| most.max(f64::from(*x)));
    let shifted = logits.iter().map(|x| f64::from(*x) - largest);
    let sum = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|x| x - sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between -0.5 and 0.5.
    fn vectors(count: usize, size: usize, key: f64) -> Vec<Vec<f32>> {
        let value = |at: usize| ((at as f64 + key) * 78.233).sin() * 43_758.545_3;
        let row = |row: usize| (0..size).map(move |at| value(row * size + at));
        (0..count)
            .map(|at| row(at).map(|x| (x - x.floor() - 0.5) as f32).collect())
            .collect()
    }

    /// The covariance of a set and of its repetitions is the same but for `n - 1`, so few vectors and many vectors, which take
    /// two ways, have distances that are known from each other.
    #[test]
    fn few_and_many_vectors_have_one_distance() {
        let (a, b) = (vectors(20, 24, 0.3), vectors(17, 24, 900.7));
        let few = frechet_distance(&a, &b).unwrap();
        // Repeated `n` times, `n k - 1` in place of `k - 1`: scaled to the same covariance about the same mean.
        let repeated = |set: &[Vec<f32>], times: usize| {
            let count = set.len();
            let share = (count * times - 1) as f64 / ((count - 1) * times) as f64;
            let mean = |at: usize| set.iter().map(|v| f64::from(v[at])).sum::<f64>() / count as f64;
            let means: Vec<f64> = (0..set[0].len()).map(mean).collect();
            let scaled = set.iter().map(|v| {
                let both = v.iter().zip(&means);
                both.map(|(x, m)| (m + (f64::from(*x) - m) * share.sqrt()) as f32)
                    .collect()
            });
            let scaled: Vec<Vec<f32>> = scaled.collect();
            (0..times).flat_map(|_| scaled.clone()).collect::<Vec<_>>()
        };
        let (many_a, many_b) = (repeated(&a, 3), repeated(&b, 2));
        for found in [
            frechet_distance(&many_a, &many_b),
            frechet_distance(&many_a, &b),
        ] {
            let found = found.unwrap();
            assert!((found / few - 1.0).abs() < 1e-5, "{found} {few}");
        }
        for set in [&a, &many_a] {
            let own = frechet_distance(set, set).unwrap();
            assert!(own.abs() < 1e-9, "{own}");
        }
    }

    /// Independent numbers: the distance of each dimension is that of two normal distributions of one number.
    #[test]
    fn independent_dimensions_add() {
        // Variances 4/3 and 12; then 16/3 and 12, about means that are 1 and 2 larger.
        let a = [[1.0, 3.0], [1.0, -3.0], [-1.0, 3.0], [-1.0, -3.0]];
        let b = a.map(|[x, y]: [f32; 2]| vec![2.0 * x + 1.0, y + 2.0]);
        let a = a.map(|v| v.to_vec());
        let variance: f64 = 4.0 / 3.0;
        let expected = 1.0 + 4.0 + (2.0 * variance.sqrt() - variance.sqrt()).powi(2);
        let found = frechet_distance(&a, &b).unwrap();
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }

    #[test]
    fn too_few_and_not_finite_have_no_number() {
        let set = vectors(12, 4, 0.1);
        assert_eq!(frechet_distance(&set[..1], &set), None);
        assert_eq!(inception_score(&set[..9]), None);
        let mut broken = set.clone();
        broken[3][1] = f32::NAN;
        assert_eq!(frechet_distance(&broken, &set), None);
        assert_eq!(inception_score(&broken), None);
        // Equal pictures tell of no classes; a class of no probability is none.
        let alike = vec![vec![0.0, 1.0, -2000.0]; 12];
        let score = inception_score(&alike).unwrap();
        assert!(
            (score.mean - 1.0).abs() < 1e-12 && score.deviation < 1e-12,
            "{score:?}"
        );
    }
}
