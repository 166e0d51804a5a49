//! The format of each layer under a budget of bytes: a multiple-choice knapsack problem, solved as an integer program.

use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions, SolveOutcome, Variable};

/// The share of the sum of errors by which a choice may be worse than the best.
const GAP: f64 = 1e-4;
/// Nodes of the search after which the best choice that was found is taken. A time would make other plans on other machines.
const NODES: u64 = 20_000;

/// One format that a layer could have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    pub bytes: u64,
    /// What it costs in quality; of several layers they add up.
    pub error: f64,
}

/// Why no formats were chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BudgetError {
    #[error("{budget} bytes are fewer than the least possible, {least}")]
    TooSmall { budget: u64, least: u64 },
    #[error("a layer has no format to choose")]
    NoChoice,
    #[error("the integer program was not solved: {0}")]
    Solver(String),
}

/// Chooses one of each layer's formats, so that they have at most `budget` bytes and the sum of errors is the least, but for
/// one part in 10,000.
///
/// # Errors
/// When the smallest formats have more bytes, a layer has no format, or the solver fails.
pub fn choose(layers: &[Vec<Choice>], budget: u64) -> Result<Vec<usize>, BudgetError> {
    let smallest = |choices: &Vec<Choice>| choices.iter().map(|choice| choice.bytes).min();
    let least: Option<u64> = layers.iter().map(smallest).sum();
    let least = least.ok_or(BudgetError::NoChoice)?;
    if least > budget {
        return Err(BudgetError::TooSmall { budget, least });
    }
    let bytes = |chosen: &[usize]| -> u64 {
        let each = layers.iter().zip(chosen);
        each.map(|(choices, at)| choices[*at].bytes).sum()
    };
    // The solver computes in floats: what it finds may be over by their rounding.
    let mut bound = budget;
    loop {
        let chosen = solve(layers, bound)?;
        let excess = bytes(&chosen).saturating_sub(budget);
        if excess == 0 {
            return Ok(chosen);
        }
        bound = bound.saturating_sub(excess);
        if bound < least {
            return Err(BudgetError::Solver("its choice is over the budget".into()));
        }
    }
}

fn solve(layers: &[Vec<Choice>], budget: u64) -> Result<Vec<usize>, BudgetError> {
    let failed = BudgetError::Solver;
    // Numbers near one, which floats and the solver's tolerances suit.
    let largest = layers.iter().flatten().map(|choice| choice.error);
    let largest = largest.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let least = |choices: &[Choice]| choices.iter().map(|c| c.bytes).min().unwrap_or(0);
    let spent: u64 = layers.iter().map(|choices| least(choices)).sum();
    let left = budget.saturating_sub(spent).max(1) as f64;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let mut bytes = Vec::new();
    let variables: Vec<Vec<(usize, Variable)>> = layers
        .iter()
        .map(|choices| {
            let own: Vec<(usize, Variable)> = sensible(choices)
                .map(|at| (at, problem.add_binary_var(choices[at].error / largest)))
                .collect();
            for (at, variable) in &own {
                let more = choices[*at].bytes - least(choices);
                bytes.push((*variable, more as f64 / left));
            }
            let ones = own.iter().map(|(_, variable)| (*variable, 1.0));
            problem.add_constraint(ones.collect::<Vec<_>>(), ComparisonOp::Eq, 1.0);
            own
        })
        .collect();
    problem.add_constraint(bytes, ComparisonOp::Le, 1.0);
    let mut options = SolveOptions::default();
    (options.mip_gap, options.node_limit) = (GAP, Some(NODES));
    let outcome = problem
        .solve_with(options)
        .map_err(|e| failed(e.to_string()))?;
    let SolveOutcome::Solution(solution) = outcome else {
        return Err(failed(format!("no choice was found in {NODES} nodes")));
    };
    let chosen = variables.iter().map(|own| {
        let taken = own.iter().max_by(|a, b| {
            let [a, b] = [a.1, b.1].map(|variable| solution[variable]);
            a.total_cmp(&b)
        });
        taken.map_or(0, |(at, _)| *at)
    });
    Ok(chosen.collect())
}

/// The choices to which no other is better in both: any other is never taken.
fn sensible(choices: &[Choice]) -> impl Iterator<Item = usize> {
    let is_worse = |at: usize| {
        let own = choices[at];
        let mut others = choices.iter().enumerate();
        others.any(|(other, choice)| {
            let is_no_worse = choice.bytes <= own.bytes && choice.error <= own.error;
            let is_better = choice.bytes < own.bytes || choice.error < own.error;
            is_no_worse && (is_better || other < at)
        })
    };
    (0..choices.len()).filter(move |at| !is_worse(*at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least sum of errors of all combinations.
    fn best(layers: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = layers.split_first() else {
            return Some(0.0);
        };
        let each = first.iter().filter_map(|choice| {
            let left = budget.checked_sub(choice.bytes)?;
            Some(choice.error + best(rest, left)?)
        });
        each.min_by(f64::total_cmp)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn the_choice_is_the_best_of_all(
            layers in prop::collection::vec(prop::collection::vec((1u64..2000, 0u32..1000), 1..4), 1..7),
            share in 0.0f64..1.2,
        ) {
            let layers: Vec<Vec<Choice>> = layers
                .iter()
                .map(|l| l.iter().map(|(bytes, error)| Choice { bytes: *bytes, error: f64::from(*error) / 7e6 }).collect())
                .collect();
            let most: u64 = layers.iter().map(|l| l.iter().map(|c| c.bytes).max().unwrap()).sum();
            let budget = (most as f64 * share) as u64;
            match (best(&layers, budget), choose(&layers, budget)) {
                (None, Err(BudgetError::TooSmall { least, .. })) => prop_assert!(least > budget),
                (Some(best), Ok(chosen)) => {
                    let taken = || layers.iter().zip(&chosen).map(|(l, at)| l[*at]);
                    prop_assert!(taken().map(|c| c.bytes).sum::<u64>() <= budget);
                    let error: f64 = taken().map(|c| c.error).sum();
                    prop_assert!(error <= best * (1.0 + 2.0 * GAP) && error >= best * (1.0 - 1e-9), "{error}, best {best}");
                }
                (best, found) => prop_assert!(false, "{best:?} {found:?}"),
            }
        }
    }

    /// Layers of the sizes of SDXL's UNet, of which it has six times as many.
    #[test]
    fn a_large_model_is_planned() {
        let layers: Vec<Vec<Choice>> = (0..130u64)
            .map(|at| {
                let weights = 1280 * (320 + at * at * 7919 % 4800);
                let error = (at * 2_654_435_761 % 1000) as f64 * 1e-6;
                let choice = |bits: u64, error| Choice {
                    bytes: weights * bits / 32,
                    error,
                };
                vec![
                    choice(17, error),
                    choice(33, error / 250.0),
                    choice(64, 0.0),
                ]
            })
            .collect();
        let all: u64 = layers.iter().map(|l| l[2].bytes).sum();
        // 5.5 bits of 16.
        let budget = all * 55 / 160;
        let chosen = choose(&layers, budget).unwrap();
        let counts = [0, 1].map(|which| chosen.iter().filter(|at| **at == which).count());
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        let bytes: u64 = layers.iter().zip(&chosen).map(|(l, at)| l[*at].bytes).sum();
        // It is used up to less than a layer's step.
        assert!(
            bytes <= budget && bytes > budget - budget / 50,
            "{bytes} of {budget}"
        );
    }
}
