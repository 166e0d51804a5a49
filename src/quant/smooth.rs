//! Activations divided by factors that weights have taken over, as in SVDQuant's paper (Li et al. 2024, section 4.1).

use std::collections::{BTreeSet, HashMap};

use crate::dtype::DType;
use crate::graph::{Builder, Graph, GraphError, Init, Input, InputKind, Tensor};
use crate::shape::Shape;

use super::low_rank::contracted_weight;

type Result<T> = std::result::Result<T, GraphError>;

/// The name of the factors of a layer, as a program's input and in a checkpoint: nunchaku's. `layer` is its path.
pub fn smooth_factor_name(layer: &str) -> String {
    format!("{layer}.smooth_factor")
}

/// The graph in which what the layers of `weights` read is divided by their factors, one for each feature.
///
/// The factors are new weights of type `f32[in]`, for a weight `<path>.weight` `[out, in]` `<path>.smooth_factor`. Layers of
/// one parent that read the same activation have the same factors in a checkpoint: the first one's divide for all of them.
/// The quotient is computed in `f32` and rounded to the activation's type. This comes before [`super::low_rank_beside`],
/// whose products read the quotient, and needs a graph that is no derivative.
///
/// # Errors
/// When no dot has one of the weights as its right operand, in the layout of [`crate::nn`].
pub fn divided_by_factors(graph: &Graph, weights: &BTreeSet<String>) -> Result<Graph> {
    let mut quotients: HashMap<(usize, String), Tensor> = HashMap::new();
    let mut used = BTreeSet::new();
    let result = graph.rewrite(&mut |b, node, operands| {
        let weight = contracted_weight(b, node, operands);
        let Some(weight) = weight.filter(|weight| weights.contains(&weight.name)) else {
            return Ok(None);
        };
        let x = operands[0];
        let layer = weight.name.trim_end_matches(".weight");
        let parent = layer.rsplit_once('.').map_or("", |(parent, _)| parent);
        let key = (x.index(), parent.to_owned());
        let quotient = match quotients.get(&key) {
            Some(known) => *known,
            None => {
                let quotient = quotient(b, x, layer, &weight)?;
                quotients.insert(key, quotient);
                quotient
            }
        };
        used.insert(weight.name);
        b.copy_node(node, &[quotient, operands[1]]).map(Some)
    })?;
    match weights.iter().find(|name| !used.contains(*name)) {
        None => Ok(result),
        Some(name) => Err(Builder::new().invalid(format!(
            "no dot takes {name}, whose input is to be divided by factors"
        ))),
    }
}

/// `x` divided by the factors of `layer`, in the type of `x`. Features are its last dimension.
fn quotient(b: &Builder, x: Tensor, layer: &str, weight: &Input) -> Result<Tensor> {
    let shape = b.shape(x);
    let (Some(&features), &[_, inputs]) = (shape.dims.last(), &weight.shape.dims[..]) else {
        return Err(b.invalid(format!("{} is no linear layer's", weight.name)));
    };
    if features != inputs {
        return Err(b.invalid(format!("{} reads no rows of {shape}", weight.name)));
    }
    let factors = b.declare(Input {
        name: smooth_factor_name(layer),
        kind: InputKind::Weight(Init::Ones),
        logical_axes: match weight.logical_axes[..] {
            [_, of_inputs] => vec![of_inputs],
            _ => vec![None],
        },
        shape: Shape::new(DType::F32, [features]),
    })?;
    let factors = b.broadcast_in_dim(factors, &[shape.rank() - 1], &shape.dims)?;
    let quotient = b.div(b.convert(x, DType::F32)?, factors)?;
    b.convert(quotient, shape.dtype)
}
