//! Contractions that kernels may compute, with what quantizes their operands.

use crate::dtype::DType;
use crate::graph::{
    Composite, Contraction, ConvDims, DotDims, Granularity, NumericsConvention, Op, TensorFormat,
};

use super::super::Arithmetic;
use super::Claims;

/// Attributes and operands of a contraction of bf16, or of integers that both have scales. Numbers are nodes.
pub(super) struct Contracted<'a> {
    pub(super) dims: ContractedDims<'a>,
    pub(super) lhs: u32,
    pub(super) weights: u32,
    pub(super) scales: Scales,
}

/// The scales of the lhs and of the weights.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Scales {
    /// Those of bf16.
    None,
    /// That of the lhs is found while the program runs.
    Found([u32; 2]),
    /// That of the lhs is recorded, and that of the weights is for the whole product.
    Recorded([u32; 2]),
}

impl Scales {
    pub(super) fn arithmetic(self) -> Arithmetic {
        match self {
            Scales::None => Arithmetic::Bf16,
            Scales::Found(_) => Arithmetic::Int8,
            Scales::Recorded(_) => Arithmetic::RecordedInt8,
        }
    }

    /// That of the weights.
    pub(super) fn of_columns(self) -> Option<u32> {
        match self {
            Scales::None => None,
            Scales::Found([_, columns]) | Scales::Recorded([_, columns]) => Some(columns),
        }
    }

    pub(super) fn recorded(self) -> Option<u32> {
        match self {
            Scales::None | Scales::Found(_) => None,
            Scales::Recorded([scale, _]) => Some(scale),
        }
    }
}

pub(super) enum ContractedDims<'a> {
    Dot(&'a DotDims),
    Convolution(&'a ConvDims),
}

impl<'a> Claims<'a> {
    /// Node `i` as a contraction with weights that a kernel may compute.
    pub(super) fn contracted(&self, i: usize) -> Option<Contracted<'a>> {
        let node = &self.graph.nodes[i];
        let (dims, scales) = match &node.op {
            Op::Composite {
                kind:
                    Composite::ScaledContraction {
                        contraction,
                        rhs_scale: true,
                        ..
                    },
                ..
            } if self.int8 => {
                let dims = match contraction {
                    Contraction::Dot(dims) => ContractedDims::Dot(dims),
                    Contraction::Convolution(dims) => ContractedDims::Convolution(dims),
                };
                let scales = match node.operands[2..] {
                    [found, columns] => Scales::Found([found, columns]),
                    [columns] => Scales::Recorded([self.recorded(node.operands[0])?, columns]),
                    _ => return None,
                };
                (dims, scales)
            }
            Op::DotGeneral {
                dims, quant: None, ..
            } => (ContractedDims::Dot(dims), Scales::None),
            Op::Convolution {
                dims, quant: None, ..
            } => (ContractedDims::Convolution(dims), Scales::None),
            _ => return None,
        };
        let &[lhs, weights, ..] = &node.operands[..] else {
            return None;
        };
        let known = [Some(weights), scales.of_columns()];
        let known = known.into_iter().flatten();
        // The compiler widens a stored weight while it multiplies, a kernel's operand is widened to memory in every run.
        let takes = node.shape.dtype == DType::F32
            && known.clone().all(|id| self.of_weights[id as usize])
            && (scales != Scales::None || !self.from_stored[weights as usize])
            && self.node(weights).shape.dtype == scales.arithmetic().operand();
        takes.then_some(Contracted {
            dims,
            lhs,
            weights,
            scales,
        })
    }

    /// The activation of a contraction, before it is quantized along the dimensions `kept` if it is. `None` where it is not
    /// in bf16.
    pub(super) fn activation(&self, found: &Contracted<'a>, kept: &[usize]) -> Option<u32> {
        let x = match found.scales {
            Scales::None => found.lhs,
            Scales::Found([scale, _]) => self.quantized(found.lhs, scale, kept)?,
            Scales::Recorded(_) => self.node(found.lhs).operands[0],
        };
        (self.node(x).shape.dtype == DType::BF16).then_some(x)
    }

    /// The scale by which AMD Quark's int8 quantized `lhs`, if it is recorded: one, or one for each of its features, which
    /// are its last dimension.
    fn recorded(&self, lhs: u32) -> Option<u32> {
        let node = self.node(lhs);
        let Op::Composite {
            kind: Composite::Quantize { kept, format },
            ..
        } = &node.op
        else {
            return None;
        };
        let granularity = match kept[..] {
            [] => Granularity::Tensor,
            [last] if last + 1 == node.shape.rank() => Granularity::Feature,
            _ => return None,
        };
        let recorded = TensorFormat {
            granularity,
            range: format.range,
            ..TensorFormat::int8(NumericsConvention::Quark)
        };
        let scale = *node.operands.get(1)?;
        (*format == recorded && self.of_weights[scale as usize]).then_some(scale)
    }

    /// What `lhs` was before AQT's int8 quantized it with the scales `scale`, which were found in it, along the
    /// dimensions `kept`.
    fn quantized(&self, lhs: u32, scale: u32, kept: &[usize]) -> Option<u32> {
        let aqt = TensorFormat::int8(NumericsConvention::Aqt);
        let rounding = self.node(lhs);
        let finding = self.node(scale);
        let kinds = [rounding, finding].map(|node| match &node.op {
            Op::Composite { kind, .. } => Some(kind),
            _ => None,
        });
        let [
            Some(Composite::Quantize {
                kept: rounded,
                format,
            }),
            Some(Composite::FindScale {
                kept: found,
                format: found_format,
            }),
        ] = kinds
        else {
            return None;
        };
        let fits = [rounded, found].iter().all(|own| own[..] == *kept);
        let same = rounding.operands[1] == scale && rounding.operands[0] == finding.operands[0];
        (fits && same && [*format, *found_format] == [aqt; 2]).then_some(rounding.operands[0])
    }
}
