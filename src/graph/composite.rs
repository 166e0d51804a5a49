//! Composites: layers and quantization steps that stay whole until a backend had the chance to claim them.
//!
//! A composite's body, made of primitives, is its meaning. Shape inference checks the attributes against the body, the
//! evaluator runs the body, and the derivative goes through it. A backend that has a kernel for a composite puts the
//! kernel in its place ([`crate::backend`]); [`Graph::inline_composites`] puts the body in place of all others.

use crate::dtype::DType;
use crate::shape::Shape;

use super::infer::InferError;
use super::op::{ConvDims, DotDims, TensorFormat};
use super::{Graph, Node, Op};

/// What a composite computes, with its attributes.
#[derive(Clone, Debug, PartialEq)]
pub enum Composite {
    /// `softmax(q k^T / sqrt(size)) v` for each head. Operands: q `[batch, queries, heads, size]`, k and v
    /// `[batch, keys, heads, size]`; the result has the dimensions of q. If `causal`, a query sees the keys up to its
    /// own position.
    Attention { causal: bool },
    /// Operands: an image `[batch, height, width, channels]`, weight and bias `f32[channels]`. With `silu`, SiLU of it.
    GroupNorm {
        groups: usize,
        epsilon: f64,
        silu: bool,
    },
    /// Over the last dimension. Operands: x, weight and bias `f32[features]`.
    LayerNorm { epsilon: f64 },
    /// The first half of the last dimension times the exact GELU of the second half.
    GatedGelu,
    /// The scale of a tensor in `format`: one for each index of the `kept` dimensions (ascending).
    FindScale {
        kept: Vec<usize>,
        format: TensorFormat,
    },
    /// Operands: x, and its scale along the `kept` dimensions. The result is of the format's element type.
    Quantize {
        kept: Vec<usize>,
        format: TensorFormat,
    },
    /// A contraction of quantized operands, in the result's float type. Operands: lhs, rhs, then the lhs's scale if
    /// `lhs_scale`, then the rhs's if `rhs_scale`; a scale lies along its operand's kept dimensions.
    ScaledContraction {
        contraction: Contraction,
        lhs_scale: bool,
        rhs_scale: bool,
    },
}

/// Which contraction, with its dimension numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Contraction {
    Dot(DotDims),
    Convolution(Box<ConvDims>),
}

impl Composite {
    /// The name in errors and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Composite::Attention { .. } => "attention",
            Composite::GroupNorm { silu: false, .. } => "group_norm",
            Composite::GroupNorm { silu: true, .. } => "group_norm_silu",
            Composite::LayerNorm { .. } => "layer_norm",
            Composite::GatedGelu => "gated_gelu",
            Composite::FindScale { .. } => "find_scale",
            Composite::Quantize { .. } => "quantize",
            Composite::ScaledContraction {
                contraction: Contraction::Dot(_),
                ..
            } => "scaled_dot_general",
            Composite::ScaledContraction {
                contraction: Contraction::Convolution(_),
                ..
            } => "scaled_convolution",
        }
    }

    /// The result's shape: the body's, where the operands, the attributes and the body agree.
    ///
    /// # Errors
    /// Names what the attributes ask for and what the operands or the body have.
    pub(super) fn infer(&self, operands: &[&Shape], body: &Graph) -> Result<Shape, InferError> {
        let wrong = |detail: String| InferError::Composite {
            name: self.name(),
            detail,
        };
        let declared: Vec<&Shape> = body.inputs.iter().map(|input| &input.shape).collect();
        if declared != operands {
            return Err(wrong(format!(
                "the body takes {}, the operands are {}",
                shapes(&declared),
                shapes(operands)
            )));
        }
        let [output] = &body.outputs[..] else {
            let found = body.outputs.len();
            return Err(wrong(format!(
                "the body gives {found} results, expected one"
            )));
        };
        let result = &body.nodes[output.node as usize].shape;
        let expected = self.result_dims(operands).map_err(wrong)?;
        if result.dims != expected {
            return Err(wrong(format!(
                "the attributes give dimensions {expected:?}, the body {result}"
            )));
        }
        if let Composite::Quantize { format, .. } = self
            && result.dtype != format.element
        {
            return Err(wrong(format!(
                "the format's elements are {}, the body gives {result}",
                format.element
            )));
        }
        Ok(result.clone())
    }

    /// The dimensions of the result by attributes and operands.
    fn result_dims(&self, operands: &[&Shape]) -> Result<Vec<usize>, String> {
        let count = |expected: usize| match operands.len() == expected {
            true => Ok(()),
            false => Err(format!(
                "takes {expected} operands, found {}",
                operands.len()
            )),
        };
        match self {
            Composite::Attention { .. } => {
                count(3)?;
                attention_dims(operands[0], operands[1], operands[2])
            }
            Composite::GroupNorm { groups, .. } => {
                count(3)?;
                let x = operands[0];
                let fits = |channels: &usize| *groups > 0 && channels.is_multiple_of(*groups);
                if x.rank() != 4 || !x.dims.last().is_some_and(fits) {
                    return Err(format!("{groups} groups do not divide the channels of {x}"));
                }
                affine_dims(x, &operands[1..])
            }
            Composite::LayerNorm { .. } => {
                count(3)?;
                affine_dims(operands[0], &operands[1..])
            }
            Composite::GatedGelu => {
                count(1)?;
                match operands[0].dims.split_last() {
                    Some((last, leading)) if last.is_multiple_of(2) => {
                        Ok([leading, &[last / 2]].concat())
                    }
                    _ => Err(format!("{} has no halves", operands[0])),
                }
            }
            Composite::FindScale { kept, .. } => {
                count(1)?;
                kept_dims(operands[0], kept)
            }
            Composite::Quantize { kept, .. } => {
                count(2)?;
                if operands[1].dims != kept_dims(operands[0], kept)? {
                    return Err(format!(
                        "the scale {} does not lie along dimensions {kept:?} of {}",
                        operands[1], operands[0]
                    ));
                }
                Ok(operands[0].dims.clone())
            }
            Composite::ScaledContraction {
                contraction,
                lhs_scale,
                rhs_scale,
            } => {
                count(2 + usize::from(*lhs_scale) + usize::from(*rhs_scale))?;
                // The dimensions are the same whatever the types are.
                let floats = [0, 1].map(|at| operands[at].with_dtype(DType::F32));
                let op = contraction.op(DType::F32);
                let result = super::infer::infer(&op, &[&floats[0], &floats[1]]);
                Ok(result.map_err(|e| e.to_string())?.dims)
            }
        }
    }
}

impl Contraction {
    /// The operation, without quantization.
    pub fn op(&self, result: DType) -> Op {
        match self {
            Contraction::Dot(dims) => Op::DotGeneral {
                dims: dims.clone(),
                result,
                quant: None,
            },
            Contraction::Convolution(dims) => Op::Convolution {
                dims: dims.clone(),
                result,
                quant: None,
            },
        }
    }

    /// The dimensions of each operand along which a scale of its own may lie, in ascending order: those that are not
    /// contracted, and for a convolution the batch of the lhs and the output features of the rhs.
    pub fn kept(&self, ranks: [usize; 2]) -> [Vec<usize>; 2] {
        match self {
            Contraction::Dot(dims) => {
                let free = |rank: usize, contract: &[usize]| -> Vec<usize> {
                    (0..rank).filter(|d| !contract.contains(d)).collect()
                };
                [
                    free(ranks[0], &dims.lhs_contract),
                    free(ranks[1], &dims.rhs_contract),
                ]
            }
            Contraction::Convolution(dims) => [vec![dims.lhs.batch], vec![dims.rhs.batch]],
        }
    }

    /// For each of [`Contraction::kept`], the dimension of the result that it becomes.
    pub fn places(&self, ranks: [usize; 2]) -> [Vec<usize>; 2] {
        let dims = match self {
            Contraction::Dot(dims) => dims,
            Contraction::Convolution(dims) => {
                return [vec![dims.out.batch], vec![dims.out.feature]];
            }
        };
        // The result's dimensions are batch, lhs free, rhs free.
        let batch = dims.lhs_batch.len();
        let lhs_free = ranks[0] - batch - dims.lhs_contract.len();
        let place = |kept: &[usize], of_batch: &[usize], first: usize| -> Vec<usize> {
            let mut free = first..;
            let mut place = |d: &usize| match of_batch.iter().position(|b| b == d) {
                Some(place) => place,
                None => free.next().unwrap_or(first),
            };
            kept.iter().map(&mut place).collect()
        };
        let [lhs, rhs] = self.kept(ranks);
        [
            place(&lhs, &dims.lhs_batch, batch),
            place(&rhs, &dims.rhs_batch, batch + lhs_free),
        ]
    }
}

fn attention_dims(q: &Shape, k: &Shape, v: &Shape) -> Result<Vec<usize>, String> {
    let fits = q.rank() == 4
        && k.rank() == 4
        && (q.dims[0], &q.dims[2..]) == (k.dims[0], &k.dims[2..])
        && k == v;
    match fits {
        true => Ok(q.dims.clone()),
        false => Err(format!(
            "query {q}, key {k} and value {v} are not [batch, length, heads, size]"
        )),
    }
}

fn affine_dims(x: &Shape, affine: &[&Shape]) -> Result<Vec<usize>, String> {
    let Some(last) = x.dims.last() else {
        return Err("a scalar has no feature dimension".to_string());
    };
    let expected = Shape::new(DType::F32, [*last]);
    match affine.iter().find(|operand| ***operand != expected) {
        None => Ok(x.dims.clone()),
        Some(found) => Err(format!("takes {expected} for {x}, found {found}")),
    }
}

fn kept_dims(x: &Shape, kept: &[usize]) -> Result<Vec<usize>, String> {
    let ascending = kept.windows(2).all(|pair| pair[0] < pair[1]);
    match ascending && kept.iter().all(|d| *d < x.rank()) {
        true => Ok(kept.iter().map(|d| x.dims[*d]).collect()),
        false => Err(format!(
            "{kept:?} are not dimensions of {x} in ascending order"
        )),
    }
}

fn shapes(shapes: &[&Shape]) -> String {
    let texts: Vec<String> = shapes.iter().map(ToString::to_string).collect();
    format!("({})", texts.join(", "))
}

impl Graph {
    /// The same program with the body in place of each composite that `chosen` takes, also within loops.
    ///
    /// Operations of a body keep their scope, and are recomputed where their composite is.
    pub fn inline_composites(&self, chosen: &dyn Fn(&Composite, &Graph) -> bool) -> Graph {
        let mut inlined = Graph {
            nodes: Vec::with_capacity(self.nodes.len()),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            scopes: self.scopes.clone(),
        };
        let mut copies: Vec<u32> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let operands: Vec<u32> = node.operands.iter().map(|o| copies[*o as usize]).collect();
            let copy = match &node.op {
                Op::Composite { kind, body } if chosen(kind, body) => {
                    inlined.append(&body.inline_composites(chosen), &operands, node.remat)
                }
                _ => inlined.push(Node {
                    op: node.op.with_regions(&|g| g.inline_composites(chosen)),
                    operands,
                    ..node.clone()
                }),
            };
            copies.push(copy);
        }
        for output in &mut inlined.outputs {
            output.node = copies[output.node as usize];
        }
        inlined
    }

    fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    /// Adds the nodes of a body whose inputs are `operands`, and gives the node of its result.
    fn append(&mut self, body: &Graph, operands: &[u32], remat: Option<u32>) -> u32 {
        let mut scopes = vec![None; body.scopes.len()];
        let mut copies: Vec<u32> = Vec::with_capacity(body.nodes.len());
        for node in &body.nodes {
            if let Op::Parameter(index) = node.op {
                copies.push(operands[index]);
                continue;
            }
            let scope = *scopes[node.scope as usize].get_or_insert_with(|| {
                let path = body.path(node);
                // Most bodies stand in the scope that was added last.
                let known = self.scopes.iter().rposition(|s| s == path);
                known.unwrap_or_else(|| {
                    self.scopes.push(path.to_string());
                    self.scopes.len() - 1
                }) as u32
            });
            let copy = Node {
                operands: node.operands.iter().map(|o| copies[*o as usize]).collect(),
                scope,
                remat,
                ..node.clone()
            };
            copies.push(self.push(copy));
        }
        // A body has one output: shape inference has checked it.
        body.outputs
            .first()
            .map_or(0, |output| copies[output.node as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Builder;

    fn bf16(dims: &[usize]) -> Shape {
        Shape::new(DType::BF16, dims)
    }

    #[test]
    fn attributes_operands_and_body_that_disagree_are_named() {
        let b = Builder::new();
        let layer = b.root("unet").scope("ff");
        let odd = b.input("odd", bf16(&[2, 7]), &[]).unwrap();
        let error = layer.composite(Composite::GatedGelu, &[odd], |_, x| Ok(x[0]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "unet/ff: gated_gelu: composite gated_gelu: bf16[2,7] has no halves"
        );
        let even = b.input("even", bf16(&[2, 8]), &[]).unwrap();
        let error = layer.composite(Composite::GatedGelu, &[even], |_, x| Ok(x[0]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "unet/ff: gated_gelu: composite gated_gelu: the attributes give dimensions [2, 4], the body bf16[2,8]"
        );
    }

    #[test]
    fn places_follow_the_results_dimensions() {
        // The result's dimensions are batch, lhs free, rhs free; batch dimensions stand second here.
        let dot = Contraction::Dot(DotDims {
            lhs_batch: vec![1],
            rhs_batch: vec![2],
            lhs_contract: vec![2],
            rhs_contract: vec![0],
        });
        assert_eq!(dot.kept([3, 3]), [vec![0, 1], vec![1, 2]]);
        assert_eq!(dot.places([3, 3]), [vec![1, 0], vec![2, 0]]);
    }
}
