//! Low-rank updates beside the weights of a traced program.

use std::collections::BTreeMap;

use super::LoraRanks;
use crate::graph::{Graph, GraphError};
use crate::quant::{self, Dropout, contracted_weights};
use crate::shape::Shape;

/// The scopes of an update's factors below their layer's.
const NAMES: [&str; 2] = ["lora_down", "lora_up"];

/// The layer that a weight beside it is a factor of, and whether that is the second factor; `None` for other weights.
pub(super) fn factor_layer(key: &str) -> Option<(&str, bool)> {
    let (layer, factor) = key.strip_suffix(".weight")?.rsplit_once('.')?;
    let which = NAMES.iter().position(|name| *name == factor)?;
    Some((layer, which == 1))
}

/// The graph with `scale * up @ (down @ x)` added to every dot and convolution of the weights that `ranks` names
/// ([`quant::low_rank_beside`]).
///
/// For a weight `<path>.weight` the factors are `<path>.lora_down.weight` and `<path>.lora_up.weight`, with the shapes that
/// [`super::Factors`] have.
///
/// # Errors
/// When no dot or convolution has one of the weights as its right operand, in the layout of [`crate::nn`].
pub fn beside(graph: &Graph, ranks: &LoraRanks, scale: f64) -> Result<Graph, GraphError> {
    quant::low_rank_beside(graph, ranks, NAMES, scale, None)
}

/// [`beside`] as a training step multiplies: `scale * up @ (down @ dropout(x))`.
///
/// # Errors
/// As [`beside`].
pub fn beside_with_dropout(
    graph: &Graph,
    ranks: &LoraRanks,
    scale: f64,
    dropout: Dropout,
) -> Result<Graph, GraphError> {
    quant::low_rank_beside(graph, ranks, NAMES, scale, Some(dropout))
}

/// The weights that [`beside`] can put an update beside, by their names: those of linear layers and convolutions that
/// outputs depend on.
pub fn adaptable(graph: &Graph) -> BTreeMap<&str, &Shape> {
    let weights = contracted_weights(graph).filter(|weight| weight.shape.rank() >= 2);
    weights
        .map(|weight| (weight.name.as_str(), &weight.shape))
        .collect()
}
