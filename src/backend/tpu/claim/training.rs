//! What kernels take of training steps.

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::patches::ordered;
use crate::graph::{Builder, ConvDims, Graph, Op, Reduction, Tensor};
use crate::shape::Shape;

use super::super::ConvolutionGradient;
use super::super::mosaic::LANES;
use super::super::patches::is_wide;
use super::attention::{Gradients, attention_or_gradient, claims_in_training};
use super::{Result, is_split, pad_to};

/// The graph of a training step with kernels in place of attention that is not causal, of its derivative, and of the
/// derivatives of the kernels of 3x3 convolutions. Products and norms are left to the compiler, which fuses them with what the
/// derivative needs of them.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim_training(graph: &Graph, parts: usize) -> Result<Graph> {
    claim(graph, parts, LANES)
}

/// The same with kernels for convolutions of `narrowest` features and more.
fn claim(graph: &Graph, parts: usize, narrowest: usize) -> Result<Graph> {
    let mut gradients = Gradients::new();
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        match &node.op {
            Op::Composite { kind, body }
                if claims_in_training(kind, body) && is_split(&node.shape, parts) =>
            {
                attention_or_gradient(b, node, kind, copies, &mut gradients)
            }
            Op::Convolution { dims, .. } => {
                let operands = [0, 1].map(|at| copies[node.operands[at] as usize]);
                gradient_of_kernel(b, operands, dims, &node.shape, parts, narrowest)
            }
            _ => Ok(None),
        }
    })
}

/// The kernel's call for the derivative of a kernel; `None` for other convolutions, and where the kernel does not take it. Of images
/// that are not wide the forward pass has patches, of which the compiler's product is faster: 0.164 ms for 32x32 places and 1,280
/// features on a v5e, and 0.218 in the kernel.
fn gradient_of_kernel(
    b: &Builder,
    [image, gradient]: [Tensor; 2],
    dims: &ConvDims,
    result: &Shape,
    parts: usize,
    narrowest: usize,
) -> Result<Option<Tensor>> {
    let of_image = ConvDims::of_image(1, (1, 1));
    let derivative = ConvDims {
        lhs: of_image.lhs.swapped(),
        rhs: of_image.out.swapped(),
        out: of_image.rhs.swapped(),
        ..of_image
    };
    let [x, dy] = [image, gradient].map(|operand| b.shape(operand));
    let (&[batch, height, width, inputs], &[_, _, _, outputs]) = (&x.dims[..], &dy.dims[..]) else {
        return Ok(None);
    };
    let call = ConvolutionGradient {
        height,
        width,
        images: batch / parts,
        result: result.dtype,
    };
    let takes = *dims == derivative
        && result.dims[2..] == [3, 3]
        && [x.dtype, dy.dtype] == [DType::BF16; 2]
        && [DType::BF16, DType::F32].contains(&call.result)
        && is_split(&x, parts)
        && inputs.min(outputs) >= narrowest
        && is_wide(height * width, [inputs, outputs]);
    // Inputs that fill no register are one block, which may be too large.
    let columns = [inputs, inputs.next_multiple_of(LANES)];
    let mut columns = columns
        .into_iter()
        .filter(|columns| call.fits(*columns, outputs));
    let Some(columns) = columns.next().filter(|_| takes) else {
        return Ok(None);
    };
    let pixels = call.images * height * width;
    let x = b.reshape(image, &[parts, pixels, inputs])?;
    let x = pad_to(b, x, &[parts, pixels, columns])?;
    let dy = b.reshape(gradient, &[parts, pixels, outputs])?;
    let dy = b.transpose(dy, &[0, 2, 1])?;
    let sums = b.push(Op::CustomCall(Arc::new(call)), &[x, x, x, dy])?;
    let sum = match parts {
        1 => sums,
        _ => b.reduce(Reduction::Sum, sums, &[0])?,
    };
    let mut places = b.reshape(sum, &[3, 3, outputs, columns])?;
    if columns != inputs {
        places = b.slice_dim(places, 3, 0, inputs)?;
    }
    ordered(b, places, &[2, 3, 0, 1]).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{evaluate, vjp};
    use crate::host_tensor::HostTensor;

    /// The gradient of the weights of a 3x3 convolution in bf16, given that of its result: images, height, width, inputs,
    /// outputs.
    fn derivative([images, height, width, inputs, outputs]: [usize; 5]) -> Graph {
        let b = Builder::new();
        let input = |name: &str, dims: [usize; 4]| {
            let shape = Shape::new(DType::BF16, dims);
            b.input(name, shape, &[]).unwrap()
        };
        let x = input("x", [images, height, width, inputs]);
        let weight = input("weight", [outputs, inputs, 3, 3]);
        let gradient = input("gradient", [images, height, width, outputs]);
        let dims = ConvDims::of_image(1, (1, 1));
        let y = b.convolution(x, weight, dims, DType::F32).unwrap();
        let y = b.convert(y, DType::BF16).unwrap();
        let found = vjp(&b, &[(y, gradient)], &[weight]).unwrap();
        b.output("gradient of weight", found[0], None).unwrap();
        b.finish()
    }

    fn calls(graph: &Graph) -> usize {
        let live = graph.nodes.iter().zip(graph.live_nodes());
        let is_call = |op: &Op| matches!(op, Op::CustomCall(_));
        live.filter(|(node, live)| *live && is_call(&node.op))
            .count()
    }

    #[test]
    fn the_derivative_of_a_convolutions_kernel_is_the_kernels() {
        // One image, two that are one part of the batch, and parts of one image and of two.
        let cases = [
            ([1, 8, 16, 24, 16], 1),
            ([2, 8, 16, 16, 32], 1),
            ([2, 8, 16, 24, 16], 2),
            ([4, 8, 16, 16, 16], 2),
        ];
        for (case, parts) in cases {
            let graph = derivative(case);
            let kernels = claim(&graph, parts, 16).unwrap();
            assert_eq!(calls(&kernels), 1, "{case:?} in {parts}");
            // Small integers: sums are exact in any order.
            let inputs = graph.inputs.iter().map(|input| {
                let count = input.shape.count();
                let values: Vec<f64> = (0..count).map(|i| (i * 7 % 5) as f64 - 2.0).collect();
                HostTensor::from_f64(input.shape.clone(), &values).unwrap()
            });
            let inputs: Vec<HostTensor> = inputs.collect();
            let [expected, found] = [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap());
            assert_eq!(expected, found, "{case:?} in {parts}");
        }
    }

    #[test]
    fn other_convolutions_stay_the_compilers() {
        // Rows that are no whole tiles, few channels, an image that is not wide, parts of half an image.
        let cases = [
            ([1, 64, 8, 128, 128], 1),
            ([1, 32, 16, 4, 128], 1),
            ([1, 16, 16, 128, 128], 1),
            ([1, 32, 16, 128, 128], 2),
        ];
        for (case, parts) in cases {
            let kernels = claim_training(&derivative(case), parts).unwrap();
            assert_eq!(calls(&kernels), 0, "{case:?} in {parts}");
        }
        let taken = claim_training(&derivative([1, 32, 16, 128, 128]), 1).unwrap();
        assert_eq!(calls(&taken), 1);
    }

    /// Inputs that fill no register are padded where one block of all of them is too large.
    #[test]
    fn inputs_are_padded_to_blocks() {
        let graph = derivative([1, 64, 64, 960, 640]);
        let kernels = claim_training(&graph, 1).unwrap();
        assert_eq!(calls(&kernels), 1);
        let [before, after] = [&graph, &kernels].map(|graph| &graph.outputs[0]);
        let shape = |graph: &Graph, node: u32| graph.nodes[node as usize].shape.clone();
        assert_eq!(shape(&graph, before.node), shape(&kernels, after.node));
    }
}
