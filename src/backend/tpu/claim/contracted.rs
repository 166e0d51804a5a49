//! Contractions that kernels may compute, with what quantizes their operands.

use crate::dtype::DType;
use crate::graph::{
    Composite, Contraction, ConvDims, DotDims, Granularity, NumericsConvention, Op, TensorFormat,
};

use super::super::{Arithmetic, StoredWeights};
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
    /// Those of stored weights beside an lhs of bf16.
    Stored(StoredWeights, u32),
}

impl Scales {
    pub(super) fn arithmetic(self) -> Arithmetic {
        match self {
            Scales::None => Arithmetic::Bf16,
            Scales::Found(_) => Arithmetic::Int8,
            Scales::Recorded(_) => Arithmetic::RecordedInt8,
            Scales::Stored(weights, _) => Arithmetic::Stored(weights),
        }
    }

    /// That of the weights.
    pub(super) fn of_columns(self) -> Option<u32> {
        match self {
            Scales::None => None,
            Scales::Stored(weights, scale) => weights.group.is_none().then_some(scale),
            Scales::Found([_, columns]) | Scales::Recorded([_, columns]) => Some(columns),
        }
    }

    pub(super) fn recorded(self) -> Option<u32> {
        match self {
            Scales::None | Scales::Found(_) | Scales::Stored(..) => None,
            Scales::Recorded([scale, _]) => Some(scale),
        }
    }

    /// Those of groups of weights.
    pub(super) fn of_groups(self) -> Option<u32> {
        match self {
            Scales::Stored(weights, scale) => weights.group.map(|_| scale),
            Scales::None | Scales::Found(_) | Scales::Recorded(_) => None,
        }
    }
}

/// A 3x3 convolution that keeps an image's size, in bf16, with weights that are not stored otherwise: what is made of these would be made
/// in every run. Numbers are nodes.
pub(super) struct ImageConvolution {
    pub(super) image: u32,
    pub(super) weights: u32,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
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
                kind: Composite::ScaledContraction { contraction, .. },
                ..
            } => {
                let dims = match contraction {
                    Contraction::Dot(dims) => ContractedDims::Dot(dims),
                    Contraction::Convolution(dims) => ContractedDims::Convolution(dims),
                };
                (dims, &node.operands[2..])
            }
            Op::DotGeneral {
                dims, quant: None, ..
            } => (ContractedDims::Dot(dims), &[][..]),
            Op::Convolution {
                dims, quant: None, ..
            } => (ContractedDims::Convolution(dims), &[][..]),
            _ => return None,
        };
        let (weights, scales) = self.scaled([node.operands[0], node.operands[1]], scales)?;
        let lhs = node.operands[0];
        let known = [Some(weights), scales.of_columns(), scales.of_groups()];
        let known = known.into_iter().flatten();
        // The compiler widens a stored weight while it multiplies, a kernel's operand is widened to memory in every run. Of
        // convolutions that takes less time than moving images to the compiler's and back.
        let is_convolution = matches!(dims, ContractedDims::Convolution(_));
        let takes = node.shape.dtype == DType::F32
            && known.clone().all(|id| self.of_weights[id as usize])
            && (scales != Scales::None || is_convolution || !self.from_stored[weights as usize])
            && self.node(weights).shape.dtype == scales.arithmetic().operand();
        takes.then_some(Contracted {
            dims,
            lhs,
            weights,
            scales,
        })
    }

    /// Node `i` as a convolution whose weights a kernel has in a form of its own.
    pub(super) fn convolution_of_image(&self, i: usize) -> Option<ImageConvolution> {
        let contracted = self.contracted(i)?;
        let ContractedDims::Convolution(dims) = contracted.dims else {
            return None;
        };
        let shape = &self.graph.nodes[i].shape;
        let &[outputs, inputs, 3, 3] = &self.node(contracted.weights).shape.dims[..] else {
            return None;
        };
        let takes = self.is_split(shape)
            && shape.dims.last() == Some(&outputs)
            && self.node(contracted.lhs).shape.dtype == DType::BF16
            && contracted.scales == Scales::None
            && !self.from_stored[contracted.weights as usize]
            && *dims == ConvDims::of_image(1, (1, 1));
        takes.then_some(ImageConvolution {
            image: contracted.lhs,
            weights: contracted.weights,
            inputs,
            outputs,
        })
    }

    /// The weights that a kernel multiplies of these operands of a contraction, with their scales and those of the lhs.
    fn scaled(&self, [lhs, rhs]: [u32; 2], scales: &[u32]) -> Option<(u32, Scales)> {
        let is_float = self.node(lhs).shape.dtype == DType::BF16;
        let scales = match *scales {
            [] => {
                let is_matrix = self.node(rhs).shape.rank() == 2;
                match self
                    .in_groups(rhs)
                    .filter(|_| self.features.int8 && is_matrix)
                {
                    Some((integers, weights, scale)) => {
                        return Some((integers, Scales::Stored(weights, scale)));
                    }
                    None => Scales::None,
                }
            }
            _ if !self.features.int8 => return None,
            [found, columns] => Scales::Found([found, columns]),
            [columns] if is_float => {
                let weights = StoredWeights::new(self.node(rhs).shape.dtype, None)?;
                Scales::Stored(weights, columns)
            }
            [columns] => Scales::Recorded([self.recorded(lhs)?, columns]),
            _ => return None,
        };
        Some((rhs, scales))
    }

    /// The activation of a contraction, before it is quantized along the dimensions `kept` if it is. `None` where it is not
    /// in bf16.
    pub(super) fn activation(&self, found: &Contracted<'a>, kept: &[usize]) -> Option<u32> {
        let x = match found.scales {
            Scales::None | Scales::Stored(..) => found.lhs,
            Scales::Found([scale, _]) => self.quantized(found.lhs, scale, kept)?,
            Scales::Recorded(_) => self.node(found.lhs).operands[0],
        };
        (self.node(x).shape.dtype == DType::BF16).then_some(x)
    }

    /// The integers that node `weights` is made of, with a scale for so many of them along their second dimension: that which a
    /// linear layer contracts, and the channels that a convolution reads.
    pub(super) fn in_groups(&self, weights: u32) -> Option<(u32, StoredWeights, u32)> {
        let node = self.node(weights);
        let Op::Composite {
            kind:
                Composite::Dequantize {
                    along,
                    zero_point: false,
                    result: DType::BF16,
                },
            ..
        } = &node.op
        else {
            return None;
        };
        let [integers, scale] = node.operands[..] else {
            return None;
        };
        let [of_integers, of_scale] = [integers, scale].map(|id| &self.node(id).shape);
        let &[outputs, terms, ..] = &of_integers.dims[..] else {
            return None;
        };
        let groups = match (&along[..], &of_scale.dims[..]) {
            ([0, 1], &[own, groups]) if own == outputs && terms.is_multiple_of(groups) => groups,
            _ => return None,
        };
        let weights = StoredWeights::new(of_integers.dtype, Some(terms / groups))?;
        Some((integers, weights, scale))
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
