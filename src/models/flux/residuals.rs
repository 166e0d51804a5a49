//! What ControlNets add to the transformer.

use crate::graph::{Builder, Tensor};
use crate::nn::Result;

/// What ControlNets add to the image's tokens after the transformer's blocks: each `[B, image, inner_dim]`, for as many
/// successive blocks as there are more of.
#[derive(Clone, Debug, Default)]
pub struct FluxResiduals {
    pub double: Vec<Tensor>,
    pub single: Vec<Tensor>,
}

impl FluxResiduals {
    /// Those of two ControlNets together.
    ///
    /// # Errors
    /// When they have different numbers of outputs.
    pub fn add(&self, b: &Builder, other: &FluxResiduals) -> Result<FluxResiduals> {
        let sum = |kind: &str, first: &[Tensor], second: &[Tensor]| match (first, second) {
            (given, []) | ([], given) => Ok(given.to_vec()),
            _ if first.len() == second.len() => {
                let pairs = first.iter().zip(second);
                pairs.map(|(x, y)| b.add(*x, *y)).collect()
            }
            _ => Err(b.invalid(format!(
                "ControlNets with {} and {} {kind} blocks do not add up; give one of them",
                first.len(),
                second.len()
            ))),
        };
        Ok(FluxResiduals {
            double: sum("double", &self.double, &other.double)?,
            single: sum("single", &self.single, &other.single)?,
        })
    }

    /// What is added after block `index` of `count`: diffusers' intervals.
    pub(super) fn after(residuals: &[Tensor], index: usize, count: usize) -> Option<Tensor> {
        let interval = count.div_ceil(residuals.len().max(1));
        residuals.get(index / interval.max(1)).copied()
    }
}
