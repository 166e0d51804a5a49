//! Low-rank products beside those with the weights of a traced program.

use std::collections::{BTreeMap, BTreeSet};

use crate::dtype::DType;
use crate::graph::random::{RandomKey, dropped, fold_in, fold_in_each};
use crate::graph::{Builder, DotDims, Graph, GraphError, Init, Input, InputKind, Node, Op, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The scopes of the factors that a quantized weight leaves in float, below their layer's.
pub const LOW_RANK: [&str; 2] = ["svd_down", "svd_up"];

/// Whether a weight of this name is a factor that a quantized weight leaves in float.
pub fn is_low_rank_factor(name: &str) -> bool {
    let layer = name.strip_suffix(".weight");
    let scope = layer.and_then(|layer| layer.rsplit_once('.'));
    scope.is_some_and(|(_, scope)| LOW_RANK.contains(&scope))
}

/// What a training step leaves out of the input of low-rank products: elements at random, others in each step and beside each
/// weight. What stays counts `1 / (1 - share)` times (Srivastava et al. 2014), as with PEFT's `lora_dropout`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The share that is left out, in `[0, 1)`.
    pub share: f64,
    /// The name of the input with the step's key, `u32[2]`.
    pub key: &'static str,
    /// The stream of that key which the keys of the weights are drawn from.
    pub stream: u32,
}

/// The keys of dropout beside each weight.
struct DropoutKeys {
    dropout: Dropout,
    /// How many weights there are.
    count: usize,
    /// The words of all keys, once one of them is needed.
    table: Option<Tensor>,
}

impl DropoutKeys {
    /// `x`, which weight number `at` is multiplied with, without what is dropped.
    fn dropped(&mut self, b: &Builder, x: Tensor, at: usize) -> Result<Tensor> {
        // Equal blocks are a loop if what differs between them comes from outside: the key is made there, and of it the mask
        // in the block, where that is computed again with it.
        let outside = b.root("dropout").without_remat();
        let table = match self.table {
            Some(table) => table,
            None => self.keys(&outside)?,
        };
        self.table = Some(table);
        let words = outside.reshape(outside.slice_dim(table, 0, at, at + 1)?, &[2])?;
        dropped(b, x, RandomKey::of_words(b, words)?, self.dropout.share)
    }

    fn keys(&self, b: &Builder) -> Result<Tensor> {
        let words = b.input(self.dropout.key, Shape::new(DType::U32, [2]), &[])?;
        let key = fold_in(b, RandomKey::of_words(b, words)?, self.dropout.stream)?;
        fold_in_each(b, key, self.count)
    }
}

/// The graph with `scale * up @ (down @ x)` added to every dot and convolution of the weights whose names `ranks` has.
///
/// The factors are new weights of type `f32`, for a weight `<path>.weight` `[out, in, ..]` of rank r `<path>.<down>.weight`
/// `[r, in, ..]` and `<path>.<up>.weight` `[out, r]`, where `names` are down and up. Both products are of the type of `x`
/// and accumulate in `f32`, as those with the weight itself. They are not quantized: this comes after
/// [`super::annotate`] and before [`super::lower`], and needs a graph that is no derivative. With `dropout`, elements of the `x`
/// that `down` is multiplied with are zero.
///
/// # Errors
/// When no dot or convolution has one of the weights as its right operand, in the layout of [`crate::nn`].
pub fn low_rank_beside(
    graph: &Graph,
    ranks: &BTreeMap<String, usize>,
    names: [&str; 2],
    scale: f64,
    dropout: Option<Dropout>,
) -> Result<Graph> {
    let mut used = BTreeSet::new();
    // The factor of what stays is that of the sum.
    let scale = scale / (1.0 - dropout.map_or(0.0, |dropout| dropout.share));
    let mut keys = dropout.map(|dropout| DropoutKeys {
        dropout,
        count: ranks.len(),
        table: None,
    });
    let result = graph.rewrite(&mut |b, node, operands| {
        let Some(weight) = contracted_weight(b, node, operands) else {
            return Ok(None);
        };
        let mut ranked = ranks.iter().enumerate();
        let Some((at, (_, &rank))) = ranked.find(|(_, (name, _))| **name == weight.name) else {
            return Ok(None);
        };
        let base = b.copy_node(node, operands)?;
        let x = match &mut keys {
            None => operands[0],
            Some(keys) => keys.dropped(&b.scope(names[0]), operands[0], at)?,
        };
        let update = low_rank(b, node, x, &weight, rank, names)?;
        let update = match scale == 1.0 {
            true => update,
            false => b.mul_scalar(update, scale)?,
        };
        used.insert(weight.name);
        b.add(base, update).map(Some)
    })?;
    match ranks.keys().find(|name| !used.contains(*name)) {
        None => Ok(result),
        Some(name) => Err(Builder::new().invalid(format!(
            "no dot or convolution takes {name}, which low-rank factors are to be put beside"
        ))),
    }
}

/// The weight that a contraction's right operand is, maybe converted.
pub(super) fn contracted_weight(b: &Builder, node: &Node, operands: &[Tensor]) -> Option<Input> {
    if !is_contraction(node) {
        return None;
    }
    b.with_graph(|g| weight_behind(g, operands.get(1)?.index()).cloned())
}

fn is_contraction(node: &Node) -> bool {
    matches!(node.op, Op::DotGeneral { .. } | Op::Convolution { .. })
}

/// The weight that a node is, maybe converted.
pub(super) fn weight_behind(graph: &Graph, id: usize) -> Option<&Input> {
    let mut node = &graph.nodes[id];
    while let Op::Convert(_) = node.op {
        node = &graph.nodes[*node.operands.first()? as usize];
    }
    let Op::Parameter(index) = node.op else {
        return None;
    };
    let input = &graph.inputs[index];
    matches!(input.kind, InputKind::Weight(_)).then_some(input)
}

/// The weights that dots and convolutions have as their right operands, of those that outputs depend on.
pub fn contracted_weights(graph: &Graph) -> impl Iterator<Item = &Input> {
    let nodes = graph.nodes.iter().zip(graph.live_nodes());
    let contractions =
        nodes.filter_map(|(node, live)| (live && is_contraction(node)).then_some(node));
    contractions.filter_map(|node| weight_behind(graph, *node.operands.get(1)? as usize))
}

/// `up @ (down @ x)` in the shape and type of `node`, the product of `x` with `weight`.
fn low_rank(
    b: &Builder,
    node: &Node,
    x: Tensor,
    weight: &Input,
    rank: usize,
    [of_down, of_up]: [&str; 2],
) -> Result<Tensor> {
    let layout = || {
        b.invalid(format!(
            "{} {}: low-rank factors stand beside linear layers and convolutions only",
            weight.name, weight.shape
        ))
    };
    let [out, _, ..] = weight.shape.dims[..] else {
        return Err(layout());
    };
    let axes = weight.logical_axes.as_slice();
    let dtype = b.dtype(x);
    let factor = |name: &str, dims: Vec<usize>, axes: Vec<_>, init: Init| {
        let shape = Shape::new(DType::F32, dims);
        let factor = b.scope(name).param("weight", shape, init, &axes)?;
        b.convert(factor, dtype)
    };
    let mut down_dims = weight.shape.dims.clone();
    down_dims[0] = rank;
    let (mut down_axes, mut up_axes) = (Vec::new(), Vec::new());
    if let [of_out, of_in @ ..] = axes {
        down_axes.push(None);
        down_axes.extend(of_in);
        up_axes.extend([*of_out, None]);
    }
    // PEFT's `gaussian`; an update of zero until the factors are loaded or trained.
    let init = Init::Normal {
        std: 1.0 / rank as f32,
    };
    let down = factor(of_down, down_dims, down_axes, init)?;
    let up = factor(of_up, vec![out, rank], up_axes, Init::Zeros)?;

    let (inner, result) = match &node.op {
        Op::DotGeneral { dims, result, .. } => {
            let last = b.dims(x).len().checked_sub(1);
            if dims.rhs_contract != [1]
                || Some(dims.lhs_contract.as_slice()) != last.as_ref().map(std::slice::from_ref)
                || !dims.rhs_batch.is_empty()
                || weight.shape.rank() != 2
            {
                return Err(layout());
            }
            let at = b.scope(of_down);
            (at.dot_general(x, down, dims.clone(), DType::F32)?, *result)
        }
        Op::Convolution { dims, result, .. } => {
            let channels_last = dims.out.feature + 1 == node.shape.rank();
            if dims.rhs.batch != 0
                || dims.rhs.feature != 1
                || !channels_last
                || dims.feature_groups != 1
            {
                return Err(layout());
            }
            let at = b.scope(of_down);
            let inner = at.convolution(x, down, (**dims).clone(), DType::F32)?;
            (inner, *result)
        }
        _ => return Err(layout()),
    };
    let at = b.scope(of_up);
    let inner = at.convert(inner, dtype)?;
    let last = b.dims(inner).len() - 1;
    let dims = DotDims {
        lhs_contract: vec![last],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    at.dot_general(inner, up, dims, result)
}
