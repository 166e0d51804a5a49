//! UniPC (Zhao et al., 2023, arXiv:2302.04867).

use super::exponential::Path;
use super::sigmas::Sigmas;
use super::value::{SAMPLE, Value, predicted_clean, predicted_noise};
use super::{
    FinalSigmas, PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, SolverType, Step,
};

/// The plan of diffusers' `UniPCMultistepScheduler`.
///
/// A run of the model first corrects the step that led to it, then predicts the next sample from the corrected one
/// (the paper's algorithms 5 and 6 for `predict_x0`, 1 and 2 for the noise).
///
/// # Errors
/// When the steps do not fit the schedule, `solver_order` is not 1 to 3, or the last step would go to sigma 0 with an
/// order above 1.
pub(super) fn unipc(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let order = config.solver_order()?;
    if order > 1 && !config.lower_order_final && config.final_sigmas_type == FinalSigmas::Zero {
        return Err(SchedulerError::Unsupported {
            field: "lower_order_final".to_string(),
            found: "false".to_string(),
            expected: "true, or final_sigmas_type = sigma_min: an infinite step has order 1"
                .to_string(),
        });
    }
    let levels = Sigmas::new(config, options)?;
    let sigmas = &levels.sigmas;
    let path = Path::of(config);
    let runs = options.runs(&levels.timesteps, 1, config)?;
    let order_at = |i: usize| match config.lower_order_final {
        true => order.min(options.steps - i).min(i - runs.start + 1),
        false => order.min(i - runs.start + 1),
    };
    let step = |i: usize| {
        let [signal, deviation] = path.noised(sigmas[i]);
        let clean = predicted_clean(config.prediction_type, signal, deviation);
        let output = match config.predict_x0 {
            true => clean,
            false => predicted_noise(config.prediction_type, signal, deviation),
        };
        let [begin, first, second, third] = [0, 1, 2, 3].map(Value::remembered);
        let corrected = match i.checked_sub(1) {
            Some(last) if i > runs.start && !config.disable_corrector.contains(&last) => {
                let outputs = [first, second, third];
                update(
                    config,
                    sigmas,
                    last,
                    order_at(last),
                    begin,
                    outputs,
                    Some(output),
                )
            }
            _ => SAMPLE,
        };
        let outputs = [output, first, second];
        let next = update(config, sigmas, i, order_at(i), corrected, outputs, None);
        let states = [next, corrected, output, first, second];
        Step::new(levels.timesteps[i], 1.0, clean, states)
    };
    SamplingPlan::of_runs(
        runs.clone(),
        options.steps,
        1.0,
        |i| path.noised(sigmas[i]),
        step,
    )
}

/// The sample after the step from level `i` to the next, which begins at `begin`: the predictor, or with the output
/// of the model at its end, `reached`, the corrector. `outputs` are those at level `i` and before, the newest first,
/// of which it takes as many as its order.
///
/// With `r_k = (lambda_k - lambda) / h` of the earlier outputs and 1 for `reached`, the weights of their differences
/// from the newest output solve `sum_k w_k r_k^(n-1) = b_n` for n from 1 to their number (the paper's formula 9 with
/// its `R_p` and `a_p`, and appendix E.1 for its special cases: the weight is 1/2 where there is one). `reached` weighs
/// `w_k` and an earlier output `w_k / r_k`.
fn update(
    config: &SchedulerConfig,
    sigmas: &[f64],
    i: usize,
    order: usize,
    begin: Value,
    outputs: [Value; 3],
    reached: Option<Value>,
) -> Value {
    let path = Path::of(config);
    let ([signal_from, deviation_from], [signal, deviation]) =
        (path.noised(sigmas[i]), path.noised(sigmas[i + 1]));
    let lambda = |level: usize| path.lambda(sigmas[level]);
    let h = lambda(i + 1) - lambda(i);
    // The linear part is integrated exactly; the rest is `scale` times an integral over steps of length `z`.
    let (z, scale, newest) = match config.predict_x0 {
        true => (-h, signal, -signal * (-h).exp_m1()),
        // -deviation (e^h - 1), finite where deviation is 0.
        false => (
            h,
            deviation,
            deviation - signal * deviation_from / signal_from,
        ),
    };
    let kept = match config.predict_x0 {
        true => deviation / deviation_from,
        false => signal / signal_from,
    };
    let start = begin * kept + outputs[0] * newest;

    let mut points: Vec<(f64, Value)> = (1..order)
        .map(|k| {
            let r = (lambda(i - k) - lambda(i)) / h;
            (r, (outputs[k] - outputs[0]) * (1.0 / r))
        })
        .collect();
    points.extend(reached.map(|output| (1.0, output - outputs[0])));
    if points.is_empty() {
        return start;
    }
    let divisor = match config.solver_type {
        SolverType::Bh1 => z,
        SolverType::Bh2 | SolverType::Midpoint | SolverType::Heun | SolverType::Logrho => {
            z.exp_m1()
        }
    };
    let weights = match points.len() {
        1 => vec![0.5],
        count => {
            let nodes: Vec<f64> = points.iter().map(|(r, _)| *r).collect();
            vandermonde(&nodes, &right_side(z, divisor, count))
        }
    };
    points
        .into_iter()
        .zip(weights)
        .fold(start, |sum, ((_, difference), weight)| {
            sum - difference * (scale * divisor * weight)
        })
}

/// `b_n = n! phi_(n+1)(z) z / divisor` for n from 1 to `count`, where `phi_1 = (e^z - 1) / z` and
/// `phi_(n+1) = (phi_n - 1/n!) / z`.
fn right_side(z: f64, divisor: f64, count: usize) -> Vec<f64> {
    let mut phi = z.exp_m1() / z - 1.0;
    let mut factorial = 1.0;
    (1..=count)
        .map(|n| {
            let b = phi * factorial / divisor;
            factorial *= (n + 1) as f64;
            phi = phi / z - 1.0 / factorial;
            b
        })
        .collect()
}

/// Solves `sum_k w_k nodes_k^n = b_n` for n from 0, by elimination with the Newton form of the polynomials: Björck and
/// Pereyra, 1970.
fn vandermonde(nodes: &[f64], b: &[f64]) -> Vec<f64> {
    let mut w = b.to_vec();
    let count = nodes.len();
    for (k, node) in nodes.iter().enumerate() {
        for n in (k + 1..count).rev() {
            w[n] -= node * w[n - 1];
        }
    }
    for k in (0..count - 1).rev() {
        for n in k + 1..count {
            w[n] /= nodes[n] - nodes[n - k - 1];
        }
        for n in k..count - 1 {
            w[n] -= w[n + 1];
        }
    }
    w
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vandermonde_systems_are_solved() {
        let nodes = [-2.5f64, -1.0, 1.0];
        let weights = [0.3, -1.7, 2.0];
        let b: Vec<f64> = (0..3)
            .map(|n| (0..3).map(|k| weights[k] * nodes[k].powi(n)).sum())
            .collect();
        for (found, expected) in vandermonde(&nodes, &b).into_iter().zip(weights) {
            assert!((found - expected).abs() < 1e-14, "{found} {expected}");
        }
    }
}
