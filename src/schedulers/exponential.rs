//! The common part of the solvers that integrate the linear part of the ODE exactly (Lu et al., 2022,
//! arXiv:2211.01095): samples that keep the variance of training's noisy ones, or lie on the line of flow matching, and
//! steps of `lambda`, the logarithm of signal over noise.

use super::{AlgorithmType, SchedulerConfig, SolverType};

/// What a noise level says of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) enum Path {
    /// The quotient of noise over signal, whose squares add up to 1.
    KeepsVariance,
    /// The noise; the signal is the rest of 1.
    Flow,
}

impl Path {
    pub fn of(config: &SchedulerConfig) -> Path {
        match config.is_flow() {
            true => Path::Flow,
            false => Path::KeepsVariance,
        }
    }

    /// Coefficients of a clean sample and of noise.
    pub fn noised(self, sigma: f64) -> [f64; 2] {
        match self {
            Path::KeepsVariance => {
                let alpha = 1.0 / sigma.hypot(1.0);
                [alpha, sigma * alpha]
            }
            Path::Flow => [1.0 - sigma, sigma],
        }
    }

    /// `lambda` at a noise level.
    pub fn lambda(self, sigma: f64) -> f64 {
        match self {
            Path::KeepsVariance => -sigma.ln(),
            Path::Flow => (1.0 - sigma).ln() - sigma.ln(),
        }
    }
}

/// Coefficients of DPM-Solver++'s step from one noise level to another: of the sample, of fresh noise and
/// of the clean sample and its first and second derivative by `lambda / h`, where the step is one of length `h`.
///
/// With `z = h` for the ODE and `2h` for the SDE, and `e = exp(-z) - 1`, the integrals are `-alpha e`,
/// `alpha (e/z + 1)` and `-alpha ((e + z) / z^2 - 1/2)`. For the SDE diffusers has `+ 1/2` in the last of them, and so
/// have we.
pub(super) struct Integrals {
    pub h: f64,
    pub sample: f64,
    pub noise: f64,
    pub clean: f64,
    pub first: f64,
    pub second: f64,
    /// The coefficient of a first derivative from two points: `first` or, for [`SolverType::Midpoint`], half of
    /// `clean`.
    pub slope: f64,
}

impl Integrals {
    pub fn new(config: &SchedulerConfig, from: f64, to: f64) -> Integrals {
        let path = Path::of(config);
        let ([alpha, deviation], [_, deviation_from]) = (path.noised(to), path.noised(from));
        let h = path.lambda(to) - path.lambda(from);
        let ratio = deviation / deviation_from;
        let (z, sample, noise, half) = match config.algorithm_type {
            AlgorithmType::DpmSolverPlusPlus => (h, ratio, 0.0, 0.5),
            AlgorithmType::SdeDpmSolverPlusPlus => (
                2.0 * h,
                ratio * (-h).exp(),
                deviation * (-(-2.0 * h).exp_m1()).sqrt(),
                -0.5,
            ),
        };
        let e = (-z).exp_m1();
        let (clean, first) = (-alpha * e, alpha * (e / z + 1.0));
        Integrals {
            h,
            sample,
            noise,
            clean,
            first,
            second: -alpha * ((e + z) / (z * z) - half),
            slope: match config.solver_type {
                SolverType::Heun => first,
                SolverType::Midpoint | SolverType::Logrho | SolverType::Bh1 | SolverType::Bh2 => {
                    clean / 2.0
                }
            },
        }
    }
}
