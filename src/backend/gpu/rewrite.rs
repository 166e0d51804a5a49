//! The forms that XLA's GPU backend runs fastest.

use std::collections::{HashMap, HashSet};

use crate::backend::follow::{self, Followed};
use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, ConvLayout, Graph, GraphError, Node, Op, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

/// The graph, without composites, as XLA's GPU backend runs it fastest.
///
/// Contractions of bf16 whose sums are rounded to bf16, after a bias if there is one, give bf16 themselves, and the bias is added
/// in bf16. The libraries sum in `f32` all the same. A convolution that gives `f32` would be one of `f32` operands, at half the rate
/// and twice the bytes, and a product would store its sums in twice the bytes for another pass to round. For that reason convolutions
/// also give bf16 where their sums are scaled before they are rounded, as with weights of one scale a channel.
///
/// Products of 8 bits whose sums are scaled and rounded to bf16 round them before they are scaled too: half as many bytes are then
/// stored, for the next pass to read.
///
/// Convolutions of 8 bits multiply the same numbers in bf16, which holds them, and give their sums in bf16. cuDNN has no
/// convolution of integers that gives `s32`, so XLA would widen both operands to `f32`; with those of fp8, programs were not compiled
/// after minutes. XLA would join the conversions from fp8 with the convolution into one of fp8 again, but for a barrier between them.
///
/// The kernels of convolutions get their input channels last, as the libraries read them. Of weights that is done where they are
/// loaded.
///
/// # Errors
/// When the graph is ill-typed.
pub fn rewrite(graph: &Graph) -> Result<Graph> {
    let graph = graph.rewrite(&mut |b, node, operands| match &node.op {
        Op::Convolution {
            dims,
            quant: None,
            result,
        } if operands
            .iter()
            .all(|operand| is_exact_in_bf16(b.dtype(*operand))) =>
        {
            let [lhs, rhs] = [0, 1].map(|i| b.convert(operands[i], DType::BF16));
            let (mut lhs, (mut rhs, dims)) = (lhs?, channels_last_kernel(b, rhs?, dims)?);
            if operands.iter().all(|operand| b.dtype(*operand).is_float()) {
                let barred = b.optimization_barrier(&[lhs, rhs])?;
                (lhs, rhs) = (barred[0], barred[1]);
            }
            let sums = b.convolution(lhs, rhs, dims, DType::BF16)?;
            b.convert(sums, *result).map(Some)
        }
        _ => Ok(None),
    })?;
    with_rounded_sums(&with_narrow_sums(&graph)?, |_| true)
}

/// The graph in which the sums of products of 8 bits are bf16 where they are rounded to it after they are scaled.
fn with_narrow_sums(graph: &Graph) -> Result<Graph> {
    let users = follow::users(graph);
    let of_8_bits = |node: &Node, sums: DType| {
        let is_narrow = |operand: &u32| graph.nodes[*operand as usize].shape.dtype.bits() == 8;
        matches!(node.op, Op::DotGeneral { quant: None, .. })
            && node.shape.dtype == sums
            && node.operands.iter().all(is_narrow)
    };
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let operand = |at: usize| node.operands[at] as usize;
        let is_rounded = || follow::is_rounded_when_scaled(graph, &users, i);
        let sums = match &node.op {
            Op::DotGeneral { dims, .. } if of_8_bits(node, DType::F32) && is_rounded() => {
                let [lhs, rhs] = [0, 1].map(|at| copies[operand(at)]);
                b.dot_general(lhs, rhs, dims.clone(), DType::BF16)?
            }
            Op::Convert(DType::F32)
                if of_8_bits(&graph.nodes[operand(0)], DType::S32) && is_rounded() =>
            {
                b.convert(copies[operand(0)], DType::BF16)?
            }
            _ => return Ok(None),
        };
        b.convert(sums, DType::F32).map(Some)
    })
}

/// Whether this is another type of at most 8 bits, of which bf16 holds every value.
fn is_exact_in_bf16(dtype: DType) -> bool {
    dtype.bits() <= 8 && dtype != DType::Pred
}

/// The same for a training step, of contractions with a bias alone, which are those of the forward pass. Gradients are summed in the type
/// that the training asks for, also where they are rounded then.
///
/// # Errors
/// When the graph is ill-typed.
pub fn rewrite_training(graph: &Graph) -> Result<Graph> {
    with_rounded_sums(graph, |followed| followed.bias.is_some())
}

fn with_rounded_sums(graph: &Graph, takes: fn(&Followed) -> bool) -> Result<Graph> {
    let users = follow::users(graph);
    let sums = || (0..graph.nodes.len()).filter(|i| sums_bf16(graph, &graph.nodes[*i]));
    let scaled: HashSet<usize> = sums()
        .filter(|i| matches!(graph.nodes[*i].op, Op::Convolution { .. }))
        .filter(|i| {
            follow::scale(graph, &users, *i).is_some_and(|(scaled, _)| {
                let followed = follow::bias_and_rounding(graph, &users, scaled);
                followed.result == DType::BF16 && takes(&followed)
            })
        })
        .collect();
    let rounded: HashMap<usize, (usize, Followed)> = sums()
        .map(|i| (i, follow::bias_and_rounding(graph, &users, i)))
        .filter(|(_, followed)| followed.result == DType::BF16 && takes(followed))
        .map(|(i, followed)| (followed.root, (i, followed)))
        .collect();
    graph.substitute(&mut |b, i, copies| {
        if scaled.contains(&i) {
            let sums = bf16_sums(b, &graph.nodes[i], copies)?;
            return b.convert(sums, DType::F32).map(Some);
        }
        let Some((contraction, followed)) = rounded.get(&i) else {
            return Ok(None);
        };
        let sums = bf16_sums(b, &graph.nodes[*contraction], copies)?;
        let Some(bias) = followed.bias else {
            return Ok(Some(sums));
        };
        let bias = b.convert(copies[bias as usize], DType::BF16)?;
        let shape = b.dims(sums);
        let bias = b.broadcast_in_dim(bias, &[shape.len() - 1], &shape)?;
        b.add(sums, bias).map(Some)
    })
}

/// A contraction, for which [`sums_bf16`] holds, that gives bf16.
fn bf16_sums(b: &Builder, node: &Node, copies: &[Tensor]) -> Result<Tensor> {
    let [lhs, rhs] = [0, 1].map(|operand| copies[node.operands[operand] as usize]);
    match &node.op {
        Op::Convolution { dims, .. } => {
            let (rhs, dims) = channels_last_kernel(b, rhs, dims)?;
            b.convolution(lhs, rhs, dims, DType::BF16)
        }
        Op::DotGeneral { dims, .. } => b.dot_general(lhs, rhs, dims.clone(), DType::BF16),
        _ => unreachable!("{} is not a contraction", node.op.name()),
    }
}

/// Whether a node is a contraction of bf16 operands that gives `f32`.
fn sums_bf16(graph: &Graph, node: &Node) -> bool {
    let is_contraction = matches!(
        node.op,
        Op::DotGeneral { quant: None, .. } | Op::Convolution { quant: None, .. }
    );
    let is_bf16 = |operand: &u32| graph.nodes[*operand as usize].shape.dtype == DType::BF16;
    is_contraction && node.shape.dtype == DType::F32 && node.operands.iter().all(is_bf16)
}

/// The kernel of a convolution of images whose channels come last, as `[output, spatial.., input]`; of others as it is.
fn channels_last_kernel(
    b: &Builder,
    kernel: Tensor,
    dims: &ConvDims,
) -> Result<(Tensor, ConvDims)> {
    let spatial = dims.strides.len();
    let wanted = ConvLayout::channels_last(spatial);
    if dims.lhs != wanted || dims.rhs == wanted {
        return Ok((kernel, dims.clone()));
    }
    let kernel = b.transpose(kernel, &dims.rhs.channels_last_order())?;
    let dims = ConvDims {
        rhs: wanted,
        ..dims.clone()
    };
    Ok((kernel, dims))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{DotDims, evaluate};
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// A convolution, or a product, with a bias, rounded where `rounds` says so.
    fn layer(is_convolution: bool, rounds: bool) -> Graph {
        let b = Builder::new();
        let input = |name: &str, dims: &[usize]| {
            let shape = Shape::new(DType::BF16, dims);
            b.input(name, shape, &[]).unwrap()
        };
        let sums = match is_convolution {
            true => {
                let (x, w) = (input("x", &[1, 4, 4, 3]), input("w", &[5, 3, 3, 3]));
                b.convolution(x, w, ConvDims::of_image(1, (1, 1)), DType::F32)
                    .unwrap()
            }
            false => {
                let (x, w) = (input("x", &[4, 6]), input("w", &[5, 6]));
                let dims = DotDims {
                    lhs_contract: vec![1],
                    rhs_contract: vec![1],
                    ..DotDims::default()
                };
                b.dot_general(x, w, dims, DType::F32).unwrap()
            }
        };
        let bias = b.convert(input("bias", &[5]), DType::F32).unwrap();
        let shape = b.dims(sums);
        let bias = b
            .broadcast_in_dim(bias, &[shape.len() - 1], &shape)
            .unwrap();
        let mut y = b.add(sums, bias).unwrap();
        if rounds {
            y = b.convert(y, DType::BF16).unwrap();
        }
        b.output("y", y, None).unwrap();
        b.finish()
    }

    /// A convolution of images whose sums have one scale a channel, before they are rounded where `rounds` says so.
    fn scaled_convolution(rounds: bool) -> Graph {
        let b = Builder::new();
        let input = |name: &str, dtype, dims: &[usize]| {
            b.input(name, Shape::new(dtype, dims), &[]).unwrap()
        };
        let x = input("x", DType::BF16, &[1, 4, 4, 3]);
        let w = input("w", DType::S8, &[5, 3, 3, 3]);
        let w = b.convert(w, DType::BF16).unwrap();
        let dims = ConvDims::of_image(1, (1, 1));
        let sums = b.convolution(x, w, dims, DType::F32).unwrap();
        let scale = input("scale", DType::F32, &[5]);
        let scale = b.broadcast_in_dim(scale, &[3], &b.dims(sums)).unwrap();
        let mut y = b.mul(sums, scale).unwrap();
        if rounds {
            y = b.convert(y, DType::BF16).unwrap();
        }
        b.output("y", y, None).unwrap();
        b.finish()
    }

    fn values(shape: &Shape) -> HostTensor {
        let values = (0..shape.count()).map(|i| ((i * 37 % 64) as f64 - 32.0) / 16.0);
        HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap()
    }

    fn integers(shape: &Shape) -> HostTensor {
        let values = (0..shape.count()).map(|i| (i * 37 % 255) as f64 - 127.0);
        HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn rounded_sums_come_out_of_the_contraction_in_bf16() {
        for is_convolution in [true, false] {
            let graph = layer(is_convolution, true);
            let rewritten = rewrite(&graph).unwrap();
            let live = rewritten.live_nodes();
            let mut nodes = rewritten.nodes.iter().zip(live).filter(|(_, live)| *live);
            assert!(nodes.all(|(node, _)| node.shape.dtype == DType::BF16));
            let inputs: Vec<HostTensor> = graph.inputs.iter().map(|i| values(&i.shape)).collect();
            let [before, after] = [&graph, &rewritten]
                .map(|graph| evaluate(graph, &inputs).unwrap()[0].to_f32_vec().unwrap());
            for (a, b) in before.iter().zip(&after) {
                assert!(
                    (a - b).abs() <= 2.0_f32.powi(-7) * a.abs().max(1.0),
                    "{a} and {b}"
                );
            }
        }
    }

    #[test]
    fn convolutions_whose_scaled_sums_are_rounded_give_bf16() {
        for rounds in [true, false] {
            let graph = scaled_convolution(rounds);
            let rewritten = rewrite(&graph).unwrap();
            let nodes = rewritten.nodes.iter().zip(rewritten.live_nodes());
            let wide = nodes.filter(|(node, live)| *live && sums_bf16(&rewritten, node));
            assert_eq!(wide.count(), usize::from(!rounds));
            let inputs: Vec<HostTensor> = (graph.inputs.iter())
                .map(|i| match i.shape.dtype {
                    DType::S8 => integers(&i.shape),
                    _ => values(&i.shape),
                })
                .collect();
            let [before, after] = [&graph, &rewritten]
                .map(|graph| evaluate(graph, &inputs).unwrap()[0].to_f32_vec().unwrap());
            for (a, b) in before.iter().zip(&after) {
                assert!((a - b).abs() <= 2.0_f32.powi(-7) * a.abs(), "{a} and {b}");
            }
        }
    }

    #[test]
    fn gradients_keep_their_sums_in_training() {
        // The weight's gradient of a layer that multiplies in bf16, as `gradient_reduce_dtype: float32` has it.
        let b = Builder::new();
        let input = |name: &str, dims: &[usize]| {
            let shape = Shape::new(DType::BF16, dims);
            b.input(name, shape, &[]).unwrap()
        };
        let dims = DotDims {
            lhs_contract: vec![0],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let (gradient, x) = (input("gradient", &[8, 5]), input("x", &[8, 6]));
        let sums = b.dot_general(gradient, x, dims, DType::F32).unwrap();
        let rounded = b.convert(sums, DType::BF16).unwrap();
        b.output("y", rounded, None).unwrap();
        let graph = b.finish();
        let wide = |graph: &Graph| {
            let nodes = graph.nodes.iter().zip(graph.live_nodes());
            nodes
                .filter(|(node, live)| *live && sums_bf16(graph, node))
                .count()
        };
        assert_eq!(wide(&rewrite_training(&graph).unwrap()), 1);
        assert_eq!(wide(&rewrite(&graph).unwrap()), 0);
        assert_eq!(wide(&rewrite_training(&layer(true, true)).unwrap()), 0);
    }

    #[test]
    fn convolutions_of_8_bits_multiply_in_bf16() {
        for (narrow, sums) in [(DType::S8, DType::S32), (DType::F8E4M3Fn, DType::F32)] {
            let b = Builder::new();
            let input = |name: &str, dims: &[usize]| {
                let shape = Shape::new(narrow, dims);
                b.input(name, shape, &[]).unwrap()
            };
            let (x, w) = (input("x", &[1, 4, 4, 3]), input("w", &[5, 3, 3, 3]));
            let dims = ConvDims::of_image(1, (1, 1));
            let y = b.convolution(x, w, dims, sums).unwrap();
            b.output("y", y, None).unwrap();
            let graph = b.finish();
            let rewritten = rewrite(&graph).unwrap();
            let nodes = rewritten.nodes.iter().zip(rewritten.live_nodes());
            let mut contractions =
                nodes.filter(|(node, live)| *live && matches!(node.op, Op::Convolution { .. }));
            assert!(contractions.all(|(node, _)| node.shape.dtype == DType::BF16));
            let inputs: Vec<HostTensor> = graph.inputs.iter().map(|i| integers(&i.shape)).collect();
            let [exact, rounded] = [&graph, &rewritten]
                .map(|graph| evaluate(graph, &inputs).unwrap()[0].to_f64_vec().unwrap());
            assert!(exact.iter().any(|sum| sum.abs() > 256.0));
            for (exact, rounded) in exact.iter().zip(&rounded) {
                let bound = 2.0_f64.powi(-8) * exact.abs();
                assert!((exact - rounded).abs() <= bound, "{exact} and {rounded}");
            }
        }
    }

    #[test]
    fn sums_that_stay_in_f32_stay_as_they_are() {
        for is_convolution in [true, false] {
            let rewritten = rewrite(&layer(is_convolution, false)).unwrap();
            let nodes = rewritten.nodes.iter().zip(rewritten.live_nodes());
            let contractions = nodes.filter(|(node, live)| *live && sums_bf16(&rewritten, node));
            assert_eq!(contractions.count(), 1);
        }
    }
}
