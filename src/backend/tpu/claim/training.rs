//! What kernels take of training steps.

use crate::backend::follow;
use crate::graph::{Binary, Composite, Graph, Op};

use super::super::Features;
use super::super::mosaic::LANES;
use super::attention::{self, Gradients, attention_or_gradient};
use super::gated::{self, gated};
use super::group_norm::{self, GroupNorms};
use super::image;
use super::layer_norm::{self, LayerNorms};
use super::trained_convolution::{OfKernel, gradient_of_kernel, images};
use super::{Result, is_split, rounded, rounding_of_sum};

/// Whether [`claim_training`] may take a composite of a step, which then stays whole.
pub fn claims_in_training(
    kind: &Composite,
    body: &Graph,
    features: Features,
    parts: usize,
) -> bool {
    attention::is_claimed(kind, body, features)
        || gated::is_claimed(kind, body)
        || group_norm::is_claimed(kind, body, parts)
        || image::is_upsampling(kind, body)
        || layer_norm::is_claimed(kind, body, features, parts)
}

/// The graph of a training step with kernels in place of
///
/// - attention that is not causal, and of its derivative,
/// - the gated GELU, layer and group norms that stayed whole, upsampling, and their derivatives,
/// - 3x3 convolutions with the bias after them, and of the derivatives of their images, where that pays,
/// - the derivatives of the kernels of these convolutions,
/// - products of bf16 that int8 rounds, and 3x3 convolutions: of rows with weights, together with the bias after them, and the gradients of
///   weights, with the ranges of what they multiply where several of the `parts` parts of the batch share these. `is_split` says which
///   dimensions of each input devices share, and so how weights lie.
///
/// Other products are left to the compiler, which fuses them with what the derivative needs of them.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim_training(
    graph: &Graph,
    features: Features,
    parts: usize,
    is_split: &[Vec<bool>],
) -> Result<Graph> {
    claim(graph, features, parts, is_split, LANES)
}

/// The same with kernels for convolutions of `narrowest` features and more.
fn claim(
    graph: &Graph,
    features: Features,
    parts: usize,
    shared: &[Vec<bool>],
    narrowest: usize,
) -> Result<Graph> {
    let users = follow::users(graph);
    let images = images(graph, &users, features, parts, narrowest);
    let rounded = rounded::Claims::of(graph, features, parts, shared);
    let products = rounded.products(&users);
    let gradients_of_weights = rounded.gradients(&users);
    let mut shared_by_calls = rounded::Shared::default();
    let mut gradients = Gradients::of(features);
    let mut norms = LayerNorms::of(graph, &users, features, parts);
    let mut group_norms = GroupNorms::default();
    graph.substitute(&mut |b, i, copies| {
        if let Some(image) = images.get(&i) {
            return image.call(b, copies).map(Some);
        }
        if let Some(product) = products.get(&i) {
            return product.call(b, copies, &mut shared_by_calls).map(Some);
        }
        if let Some(gradient) = gradients_of_weights.get(&i) {
            return gradient.call(b, copies, &mut shared_by_calls).map(Some);
        }
        let node = &graph.nodes[i];
        match &node.op {
            Op::Composite { kind, body }
                if attention::is_claimed(kind, body, features) && is_split(&node.shape, parts) =>
            {
                attention_or_gradient(b, node, kind, copies, &mut gradients)
            }
            Op::Composite { kind, body } if gated::is_claimed(kind, body) => {
                gated(b, node, kind, copies, parts, features)
            }
            Op::Composite { kind, body } if group_norm::is_claimed(kind, body, parts) => {
                group_norms.claim(b, node, kind, copies)
            }
            Op::Composite { kind, body } if image::is_upsampling(kind, body) => {
                image::upsampling(b, node, kind, copies, parts)
            }
            Op::Composite { .. } | Op::Binary(Binary::Add) => norms.claim(b, i, copies),
            Op::Convolution { dims, .. } => {
                let operands = [0, 1].map(|at| copies[node.operands[at] as usize]);
                let is_rounded = rounding_of_sum(graph, &users, i, parts).is_some();
                let of_kernel = OfKernel {
                    dims,
                    result: &node.shape,
                    is_rounded,
                };
                gradient_of_kernel(b, operands, of_kernel, features, parts, narrowest)
            }
            _ => Ok(None),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{Builder, ConvDims, evaluate, vjp};
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// A 3x3 convolution in bf16 with its bias, and the gradients of image and weights, given that of the result: images,
    /// height, width, inputs, outputs.
    fn trained([images, height, width, inputs, outputs]: [usize; 5]) -> Graph {
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
        let bias = Shape::new(DType::F32, [outputs]);
        let bias = b.input("bias", bias, &[]).unwrap();
        let bias = b.broadcast_in_dim(bias, &[3], &b.dims(y)).unwrap();
        let y = b.convert(b.add(y, bias).unwrap(), DType::BF16).unwrap();
        let found = vjp(&b, &[(y, gradient)], &[x, weight]).unwrap();
        for (name, value) in [("y", y), ("dx", found[0]), ("dw", found[1])] {
            b.output(name, value, None).unwrap();
        }
        b.finish()
    }

    fn calls(graph: &Graph) -> usize {
        let live = graph.nodes.iter().zip(graph.live_nodes());
        let is_call = |op: &Op| matches!(op, Op::CustomCall(_));
        live.filter(|(node, live)| *live && is_call(&node.op))
            .count()
    }

    #[test]
    fn a_convolution_and_its_derivatives_are_kernels() {
        // One image, two that are one part of the batch, and parts of one image and of two.
        let cases = [
            ([1, 8, 32, 24, 16], 1),
            ([2, 8, 32, 16, 32], 1),
            ([2, 8, 32, 24, 16], 2),
            ([4, 8, 32, 16, 16], 2),
        ];
        for (case, parts) in cases {
            let graph = trained(case);
            let kernels = claim(&graph, Features::UNKNOWN, parts, &[], 16).unwrap();
            assert_eq!(calls(&kernels), 3, "{case:?} in {parts}");
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
        // Rows that are no whole tiles, few channels, too narrow, parts of half an image.
        let cases = [
            ([1, 64, 8, 128, 128], 1),
            ([1, 32, 16, 4, 128], 1),
            ([1, 8, 8, 128, 128], 1),
            ([1, 32, 16, 128, 128], 2),
        ];
        for (case, parts) in cases {
            let kernels = claim_training(&trained(case), Features::UNKNOWN, parts, &[]).unwrap();
            assert_eq!(calls(&kernels), 0, "{case:?} in {parts}");
        }
    }

    /// Fewer places than features: the compiler rounds what several parts share in a pass of its own.
    #[test]
    fn narrow_images_of_one_part_are_kernels() {
        for ([images, outputs], kernels) in
            [([1, 128], 3), ([1, 640], 3), ([2, 128], 3), ([2, 640], 0)]
        {
            let graph = trained([images, 16, 32, 128, outputs]);
            let taken = claim_training(&graph, Features::UNKNOWN, images, &[]).unwrap();
            assert_eq!(calls(&taken), kernels, "{images} parts, {outputs} features");
        }
    }

    /// Inputs that fill no register are padded where one block of all of them is too large.
    #[test]
    fn inputs_are_padded_to_blocks() {
        let graph = trained([1, 64, 64, 960, 640]);
        let kernels = claim_training(&graph, Features::UNKNOWN, 1, &[]).unwrap();
        assert!(calls(&kernels) >= 1);
        let [before, after] = [&graph, &kernels].map(|graph| &graph.outputs[2]);
        let shape = |graph: &Graph, node: u32| graph.nodes[node as usize].shape.clone();
        assert_eq!(shape(&graph, before.node), shape(&kernels, after.node));
    }
}
