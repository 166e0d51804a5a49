//! Weights that are quantized in their checkpoint: what the graph takes in place of floats.

use std::collections::{BTreeMap, HashMap};

use crate::dtype::DType;
use crate::graph::{
    Builder, Contraction, Graph, GraphError, Init, Input, InputKind, Node, Op, Range, TensorFormat,
};
use crate::shape::Shape;

use super::weight::scale_dims;

/// The name of the scale of a weight, as a program's input and in a checkpoint.
pub fn scale_name(weight: &str) -> String {
    format!("{weight}_scale")
}

/// The name of the zero point of a weight, likewise.
pub fn zero_point_name(weight: &str) -> String {
    format!("{weight}_zero_point")
}

/// The name of the number that multiplies all scales of a weight, likewise.
pub fn tensor_scale_name(weight: &str) -> String {
    format!("{weight}_scale_2")
}

/// The name of the scale that calibration found for the activation of a layer, as a program's input and in a checkpoint.
/// `layer` is its path.
pub fn input_scale_name(layer: &str) -> String {
    format!("{layer}.input_scale")
}

/// A weight whose integers are an input.
#[derive(Clone)]
pub(super) struct StoredWeight {
    /// The node of the integers.
    pub node: u32,
    /// The type of the float that they stand for.
    pub float: DType,
    /// The input that its scale is.
    pub scale: Input,
    /// The input that its zero point is, of the scale's dimensions.
    pub zero_point: Option<Input>,
    /// The input that multiplies its scale, `f32[]`.
    pub tensor_scale: Option<Input>,
}

/// The graph with integers as the inputs of weights that contractions take as they are stored, and those weights by
/// the nodes that stand for them: the input, and what it is converted to.
///
/// # Errors
/// When a weight that is stored quantized is used otherwise.
pub(super) fn with_stored_weights(
    mut graph: Graph,
) -> Result<(Graph, HashMap<u32, StoredWeight>), GraphError> {
    let parameters = weights_behind(&graph);
    let stored = stored_weights(&graph, &parameters)?;
    let floats: Vec<DType> = graph.nodes.iter().map(|node| node.shape.dtype).collect();
    let mut nodes = HashMap::new();
    for (&parameter, weight) in &stored {
        let node = &mut graph.nodes[parameter as usize];
        node.shape = node.shape.with_dtype(weight.element.dtype);
        if let Op::Parameter(index) = node.op {
            graph.inputs[index].shape = node.shape.clone();
        }
    }
    for (id, parameter) in parameters.iter().enumerate() {
        if let Some((parameter, weight)) = parameter.and_then(|p| Some((p, stored.get(&p)?))) {
            let stored = StoredWeight {
                node: parameter,
                float: floats[id],
                scale: weight.scale.clone(),
                zero_point: weight.zero_point.clone(),
                tensor_scale: weight.tensor_scale.clone(),
            };
            nodes.insert(id as u32, stored);
        }
    }
    Ok((graph, nodes))
}

/// The input behind each node that is a weight, maybe converted.
fn weights_behind(graph: &Graph) -> Vec<Option<u32>> {
    let mut parameters: Vec<Option<u32>> = Vec::with_capacity(graph.nodes.len());
    for (id, node) in graph.nodes.iter().enumerate() {
        parameters.push(match node.op {
            Op::Parameter(index) if graph.inputs[index].is_weight() => Some(id as u32),
            Op::Convert(_) => parameters[node.operands[0] as usize],
            _ => None,
        });
    }
    parameters
}

/// What becomes of a weight's input.
struct Stored {
    /// The integers' shape.
    element: Shape,
    scale: Input,
    zero_point: Option<Input>,
    tensor_scale: Option<Input>,
}

/// The weights that contractions take as they are stored, by their inputs' nodes.
fn stored_weights(
    graph: &Graph,
    parameters: &[Option<u32>],
) -> Result<BTreeMap<u32, Stored>, GraphError> {
    let live = graph.live_nodes();
    let of_weights = graph.weight_only();
    let formats = |node: &Node| -> Vec<(usize, TensorFormat)> {
        let is_weight = |at: usize| of_weights[node.operands[at] as usize];
        formats(node).filter(|(at, _)| is_weight(*at)).collect()
    };
    let nodes = || graph.nodes.iter().zip(&live).filter(|(_, live)| **live);
    let invalid = |node: &Node, reason: String| {
        let at = Builder::new().at(graph.path(node));
        Err(at.invalid(reason))
    };
    let mut stored = BTreeMap::new();
    for (node, _) in nodes() {
        for (operand, format) in formats(node) {
            let Some(parameter) = parameters[node.operands[operand] as usize] else {
                return invalid(
                    node,
                    "its weight is stored quantized, and is changed before it is multiplied".into(),
                );
            };
            let of_weight = kept(graph, node)[operand].clone();
            let Op::Parameter(index) = graph.nodes[parameter as usize].op else {
                continue;
            };
            match (Stored::new(&graph.inputs[index], format), &of_weight[..]) {
                (Some(weight), [0]) => stored.insert(parameter, weight),
                _ => {
                    let shape = &graph.inputs[index].shape;
                    return invalid(
                        node,
                        format!("a weight of shape {shape} is not stored as {format:?}"),
                    );
                }
            };
        }
    }
    for (node, _) in nodes() {
        let taken: Vec<usize> = formats(node).iter().map(|(operand, _)| *operand).collect();
        let is_convert = matches!(node.op, Op::Convert(_));
        for (at, operand) in node.operands.iter().enumerate() {
            let parameter = parameters[*operand as usize];
            let is_stored = parameter.is_some_and(|p| stored.contains_key(&p));
            if is_stored && !is_convert && !taken.contains(&at) {
                let reason = "a weight that is stored quantized is used outside of its layer";
                return invalid(node, reason.into());
            }
        }
    }
    Ok(stored)
}

/// The operands of a contraction that are stored quantized.
fn formats(node: &Node) -> impl Iterator<Item = (usize, TensorFormat)> {
    let formats = match &node.op {
        Op::DotGeneral {
            quant: Some(quant), ..
        }
        | Op::Convolution {
            quant: Some(quant), ..
        } => [quant.forward.lhs, quant.forward.rhs],
        _ => [None; 2],
    };
    let formats = formats.into_iter().enumerate();
    formats.filter_map(|(at, format)| Some((at, format.filter(|f| f.has_stored_scale())?)))
}

/// The dimensions of a contraction's operands along which scales lie.
fn kept(graph: &Graph, node: &Node) -> [Vec<usize>; 2] {
    let ranks = [0, 1].map(|at| graph.nodes[node.operands[at] as usize].shape.rank());
    match &node.op {
        Op::DotGeneral { dims, .. } => Contraction::Dot(dims.clone()).kept(ranks),
        Op::Convolution { dims, .. } => Contraction::Convolution(dims.clone()).kept(ranks),
        _ => Default::default(),
    }
}

impl Stored {
    /// `None` where a weight of this shape has no such format.
    fn new(weight: &Input, format: TensorFormat) -> Option<Stored> {
        let Range::Stored(dtype) = format.range else {
            return None;
        };
        let dims = scale_dims(&weight.shape.dims, format.granularity)?;
        let axes = weight.logical_axes.iter().copied().chain([None, None]);
        let beside = |name: String, dtype: DType| Input {
            name,
            kind: InputKind::Weight(Init::Ones),
            logical_axes: match weight.logical_axes.is_empty() {
                true => Vec::new(),
                false => axes.clone().take(dims.len()).collect(),
            },
            shape: Shape::new(dtype, dims.clone()),
        };
        let zero_point = || beside(zero_point_name(&weight.name), format.zero_point_type());
        let tensor_scale = || Input {
            name: tensor_scale_name(&weight.name),
            kind: InputKind::Weight(Init::Ones),
            logical_axes: Vec::new(),
            shape: Shape::scalar(DType::F32),
        };
        Some(Stored {
            element: weight.shape.with_dtype(format.element),
            scale: beside(scale_name(&weight.name), dtype),
            zero_point: format.zero_point.then(zero_point),
            tensor_scale: format.has_tensor_scale().then(tensor_scale),
        })
    }
}
