//! Scales of activations that calibration found: inputs of the program that lie in the checkpoint beside the weights.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::graph::{
    Builder, Contraction, Granularity, Graph, GraphError, Init, Input, InputKind, Node, Op, Range,
    Tensor, TensorFormat,
};
use crate::shape::Shape;

use super::low_rank::weight_behind;
use super::stored::input_scale_name;

type Result<T> = std::result::Result<T, GraphError>;

/// The scales that calibration found, which layers of one parent share that read the same activation.
#[derive(Default)]
pub(super) struct RecordedScales {
    /// By the activation, the path of the layer's parent, and the format.
    known: HashMap<(u32, String, TensorFormat), Tensor>,
}

impl RecordedScales {
    /// That of operand `at` of the contraction `node`, whose other operand is a weight, in the operand's type.
    pub fn of(
        &mut self,
        b: &Builder,
        graph: &Graph,
        node: &Node,
        at: usize,
        format: TensorFormat,
    ) -> Result<Tensor> {
        let weight = weight_behind(graph, node.operands[1 - at] as usize);
        let layer = weight.and_then(|weight| weight.name.strip_suffix(".weight"));
        let (Some(layer), Range::Stored(dtype)) = (layer, format.range) else {
            return Err(b.invalid("a recorded scale belongs to a layer with a weight"));
        };
        let parent = layer.rsplit_once('.').map_or("", |(parent, _)| parent);
        let key = (node.operands[at], parent.to_owned(), format);
        if let Some(scale) = self.known.get(&key) {
            return Ok(*scale);
        }
        let dims = match (format.granularity, &node.op) {
            (Granularity::Feature, Op::DotGeneral { dims, .. }) => {
                let of = &graph.nodes[node.operands[at] as usize].shape.dims;
                let contract = [&dims.lhs_contract, &dims.rhs_contract][at];
                contract.iter().map(|d| of[*d]).collect()
            }
            (Granularity::Feature, Op::Convolution { dims, .. }) => {
                let of = &graph.nodes[node.operands[at] as usize].shape.dims;
                vec![of[dims.lhs.feature]]
            }
            _ => Vec::new(),
        };
        let scale = b.declare(Input {
            name: input_scale_name(layer),
            kind: InputKind::Weight(Init::Ones),
            logical_axes: vec![None; dims.len()],
            shape: Shape::new(dtype, dims),
        })?;
        let scale = b.convert(scale, graph.nodes[node.operands[at] as usize].shape.dtype)?;
        self.known.insert(key, scale);
        Ok(scale)
    }
}

/// The dimension of an activation that a contraction sums over; the activation is on the left.
pub(super) fn activation_feature(b: &Builder, contraction: &Contraction) -> Result<usize> {
    match contraction {
        Contraction::Convolution(dims) => Ok(dims.lhs.feature),
        Contraction::Dot(dims) => match dims.lhs_contract[..] {
            [feature] => Ok(feature),
            _ => Err(b.invalid("a scale for each feature needs one contracting dimension")),
        },
    }
}

/// Scales in `dtype` times the one scale of the other operand.
pub(super) fn times_whole(
    b: &Builder,
    scale: Option<Tensor>,
    whole: Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let Some(scale) = scale else {
        return Err(b.invalid(
            "an activation with a recorded scale is multiplied by a weight that has a scale, and neither groups nor zero points",
        ));
    };
    let scale = b.convert(scale, dtype)?;
    b.mul(
        scale,
        b.broadcast_to(b.convert(whole, dtype)?, &b.dims(scale))?,
    )
}
