//! The shape of a composite's result.

use crate::dtype::DType;
use crate::graph::blockwise::{BLOCK, BlockwiseAdamW};
use crate::graph::{Composite, Graph, InferError, Op, Rounding};
use crate::shape::Shape;

use super::{Result, infer};

/// Dimensions, or what is wrong with the operands.
type Dims = std::result::Result<Vec<usize>, String>;

/// The result's shape: the body's, where the operands, the attributes and the body agree.
///
/// # Errors
/// Names what the attributes ask for and what the operands or the body have.
pub(super) fn composite(kind: &Composite, operands: &[&Shape], body: &Graph) -> Result<Shape> {
    let wrong = |detail: String| InferError::Composite {
        name: kind.name(),
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
    let results: Vec<&Shape> = body
        .outputs
        .iter()
        .map(|o| &body.nodes[o.node as usize].shape)
        .collect();
    let expected = kind.results();
    if results.len() != expected {
        let found = results.len();
        return Err(wrong(format!(
            "the body gives {found} results, expected {expected}"
        )));
    }
    if expected > 1 && results != operands[..expected.min(operands.len())] {
        return Err(wrong(format!(
            "the body gives {}, the first operands are {}",
            shapes(&results),
            shapes(operands)
        )));
    }
    let result = results[0];
    let expected = result_dims(kind, operands).map_err(wrong)?;
    if result.dims != expected {
        return Err(wrong(format!(
            "the attributes give dimensions {expected:?}, the body {result}"
        )));
    }
    if let Composite::Quantize { format, .. } = kind
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
fn result_dims(kind: &Composite, operands: &[&Shape]) -> Dims {
    let count = |expected: usize| match operands.len() == expected {
        true => Ok(()),
        false => Err(format!(
            "takes {expected} operands, found {}",
            operands.len()
        )),
    };
    match kind {
        Composite::BlockwiseAdamW(step) => {
            count(step.operands())?;
            blockwise_dims(operands)
        }
        Composite::Attention { causal } => match operands {
            [q, k, v, visible] if !causal => {
                let dims = attention_dims(q, k, v)?;
                let expected = Shape::new(DType::Pred, [k.dims[0], k.dims[1]]);
                match **visible == expected {
                    true => Ok(dims),
                    false => Err(format!("takes a mask {expected}, found {visible}")),
                }
            }
            _ => {
                count(3)?;
                attention_dims(operands[0], operands[1], operands[2])
            }
        },
        Composite::Gradient { of, operand } => {
            let count = operands.len().saturating_sub(of.results_in_gradient());
            if !of.has_gradient(count) {
                return Err(format!("{} of {count} operands has none", of.name()));
            }
            let (operands, results) = operands.split_at(count);
            let dims = result_dims(of, operands)?;
            match operands.get(*operand) {
                Some(found) if results.iter().all(|result| result.dims == dims) => {
                    Ok(found.dims.clone())
                }
                Some(_) => Err(format!(
                    "results of {} are {dims:?}, found {}",
                    of.name(),
                    shapes(results)
                )),
                None => Err(format!("{} has no operand {operand}", of.name())),
            }
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
        Composite::RmsNorm { .. } => {
            count(2)?;
            affine_dims(operands[0], &operands[1..])
        }
        Composite::Rotary => {
            count(4)?;
            let x = operands[0];
            let [_, positions, _, features] = x.dims[..] else {
                return Err(format!("{x} has no heads"));
            };
            let table = Shape::new(DType::F32, [positions, features]);
            match operands[1..].iter().find(|found| ***found != table) {
                None => Ok(x.dims.clone()),
                Some(found) => Err(format!("takes tables {table}, found {found}")),
            }
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
        Composite::UpsampleNearest2x => {
            count(1)?;
            match operands[0].dims[..] {
                [n, h, w, c] => Ok(vec![n, 2 * h, 2 * w, c]),
                _ => Err(format!("{} is no image", operands[0])),
            }
        }
        Composite::FindScale { kept, .. } => {
            count(1)?;
            kept_dims(operands[0], kept)
        }
        Composite::RoundingNoise { dims, .. } => {
            count(1)?;
            let key = Shape::new(DType::U32, [2]);
            match *operands[0] == key {
                true => Ok(dims.clone()),
                false => Err(format!("takes {key}, found {}", operands[0])),
            }
        }
        Composite::Quantize { kept, format } => {
            let is_stochastic = format.rounding == Rounding::Stochastic;
            count(2 + usize::from(is_stochastic))?;
            let noise = Shape::new(DType::F32, operands[0].dims.clone());
            if is_stochastic && *operands[2] != noise {
                return Err(format!("takes the noise {noise}, found {}", operands[2]));
            }
            if operands[1].dims != kept_dims(operands[0], kept)? {
                return Err(format!(
                    "the scale {} does not lie along dimensions {kept:?} of {}",
                    operands[1], operands[0]
                ));
            }
            Ok(operands[0].dims.clone())
        }
        Composite::Dequantize {
            along, zero_point, ..
        } => {
            count(2 + usize::from(*zero_point))?;
            let (integers, scale) = (operands[0], operands[1]);
            check_groups(integers, scale, along)?;
            if let Some(found) = operands.get(2)
                && !(found.dims == scale.dims
                    && (found.dtype == DType::S8 || found.dtype.is_float()))
            {
                return Err(format!(
                    "takes the zero point {}, found {found}",
                    scale.with_dtype(DType::S8)
                ));
            }
            Ok(integers.dims.clone())
        }
        Composite::FakeQuantize { along, .. } => {
            count(2)?;
            check_groups(operands[0], operands[1], along)?;
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
            let op = Op::contraction(contraction, DType::F32);
            let result = infer(&op, &[&floats[0], &floats[1]]);
            Ok(result.map_err(|e| e.to_string())?.dims)
        }
    }
}

/// Refuses a scale that does not lie along dimensions of x, or does not divide them.
fn check_groups(x: &Shape, scale: &Shape, along: &[usize]) -> std::result::Result<(), String> {
    let sizes = kept_dims(x, along)?;
    let divides = |(size, groups): (&usize, &usize)| *groups > 0 && size.is_multiple_of(*groups);
    match scale.rank() == sizes.len() && sizes.iter().zip(&scale.dims).all(divides) {
        true => Ok(()),
        false => Err(format!(
            "the scale {scale} does not divide dimensions {along:?} of {x}"
        )),
    }
}

fn attention_dims(q: &Shape, k: &Shape, v: &Shape) -> Dims {
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

fn affine_dims(x: &Shape, affine: &[&Shape]) -> Dims {
    let Some(last) = x.dims.last() else {
        return Err("a scalar has no feature dimension".to_string());
    };
    let expected = Shape::new(DType::F32, [*last]);
    match affine.iter().find(|operand| ***operand != expected) {
        None => Ok(x.dims.clone()),
        Some(found) => Err(format!("takes {expected} for {x}, found {found}")),
    }
}

fn kept_dims(x: &Shape, kept: &[usize]) -> Dims {
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

/// The dimensions of the weight of [`Composite::BlockwiseAdamW`].
fn blockwise_dims(operands: &[&Shape]) -> Dims {
    let weight = operands[0];
    match BlockwiseAdamW::fits(operands) {
        true => Ok(weight.dims.clone()),
        false => Err(format!(
            "takes {weight}, twice its codes u8 and the f32 of each {BLOCK} of them, a gradient of its dimensions, f32[{}], and a \
             key u32[2] if it is rounded at random, found {}",
            BlockwiseAdamW::SCALARS,
            shapes(operands)
        )),
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
}
