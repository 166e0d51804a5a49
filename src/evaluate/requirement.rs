//! What a run has to reach: `psnr>30`.

use std::fmt;
use std::str::FromStr;

use super::{Comparison, Metric};
use crate::util::Named;

/// A bound of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Requirement {
    pub metric: Metric,
    pub relation: Relation,
    pub bound: f64,
}

/// How a number lies to a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    Above,
    AtLeast,
    Below,
    AtMost,
}

impl Relation {
    /// The longer texts first.
    const ALL: [(&'static str, Relation); 4] = [
        (">=", Relation::AtLeast),
        ("<=", Relation::AtMost),
        (">", Relation::Above),
        ("<", Relation::Below),
    ];
}

/// Why a text is no requirement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    #[error("'{text}': expected a metric, one of > >= < <= and a number, as in psnr>30")]
    Form { text: String },
    #[error("'{name}' is no metric; here are {}", Metric::NAMES.join(", "))]
    Unknown { name: String },
}

impl FromStr for Requirement {
    type Err = RequirementError;

    fn from_str(text: &str) -> Result<Self, RequirementError> {
        let form = || RequirementError::Form {
            text: text.to_owned(),
        };
        let split = Relation::ALL
            .into_iter()
            .find_map(|(sign, relation)| Some((text.split_once(sign)?, relation)));
        let ((name, bound), relation) = split.ok_or_else(form)?;
        let name = name.trim();
        let bound: f64 = bound.trim().parse().map_err(|_| form())?;
        if bound.is_nan() {
            return Err(form());
        }
        match Metric::from_name(name) {
            Some(metric) => Ok(Requirement {
                metric,
                relation,
                bound,
            }),
            None => Err(RequirementError::Unknown {
                name: name.to_owned(),
            }),
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Relation::ALL.iter().find(|(_, of)| *of == self.relation);
        let sign = named.map_or("", |(sign, _)| *sign);
        write!(f, "{}{sign}{}", self.metric, self.bound)
    }
}

impl Requirement {
    /// Whether a run meets it; one without the metric does not.
    pub fn is_met(&self, comparison: &Comparison) -> bool {
        comparison
            .metric(self.metric)
            .is_some_and(|found| match self.relation {
                Relation::Above => found > self.bound,
                Relation::AtLeast => found >= self.bound,
                Relation::Below => found < self.bound,
                Relation::AtMost => found <= self.bound,
            })
    }
}
