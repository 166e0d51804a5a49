//! What an operand of a product was before AQT's int8 rounded it, for claims whose kernels round it themselves.

use crate::dtype::DType;
use crate::graph::random::rows_in_a_word;
use crate::graph::{Composite, Graph, NumericsConvention, Op, Rounding, TensorFormat};

/// An operand before it was rounded. Numbers are nodes.
#[derive(Clone, Copy)]
pub(super) struct Rounded {
    pub x: u32,
    /// The noise that it was rounded with.
    pub noise: Option<Noise>,
}

/// The noise of stochastic rounding.
#[derive(Clone, Copy)]
pub(super) struct Noise {
    /// The node of the key.
    pub key: u32,
    /// [`rows_in_a_word`] of what is rounded.
    pub rows_in_a_word: Option<u32>,
}

impl Rounded {
    /// What was rounded to `values` by AQT's int8, with the scale `scale` that was found for each index of `kept`; `f32` or `bf16`.
    pub fn to(graph: &Graph, values: u32, scale: u32, kept: &[usize]) -> Option<Rounded> {
        let node = |id: u32| &graph.nodes[id as usize];
        let rounding = match node(values).op {
            Op::Stored => node(node(values).operands[0]),
            _ => node(values),
        };
        let Op::Composite {
            kind:
                Composite::Quantize {
                    kept: along,
                    format,
                },
            ..
        } = &rounding.op
        else {
            return None;
        };
        let x = rounding.operands[0];
        let finding = node(scale);
        let finds = matches!(
            &finding.op,
            Op::Composite { kind: Composite::FindScale { kept: of_scale, format: found }, .. }
                if of_scale == kept && found == format
        );
        let nearest = TensorFormat {
            rounding: Rounding::NearestEven,
            ..*format
        };
        let is_whole = finds
            && along == kept
            && rounding.operands[1] == scale
            && finding.operands[0] == x
            && nearest == TensorFormat::int8(NumericsConvention::Aqt)
            && matches!(node(x).shape.dtype, DType::F32 | DType::BF16);
        if !is_whole {
            return None;
        }
        let noise = match rounding.operands.get(2) {
            None => None,
            Some(noise) => Some(of_program(graph, *noise)?),
        };
        Some(Rounded { x, noise })
    }
}

/// What is the noise of this program.
fn of_program(graph: &Graph, noise: u32) -> Option<Noise> {
    let node = &graph.nodes[noise as usize];
    match &node.op {
        Op::Composite {
            kind: Composite::RoundingNoise { .. },
            ..
        } => Some(Noise {
            key: node.operands[0],
            rows_in_a_word: rows_in_a_word(&node.shape.dims),
        }),
        _ => None,
    }
}
