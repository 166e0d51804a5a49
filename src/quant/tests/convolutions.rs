//! Derivatives of convolutions in int8.

use super::*;
use crate::graph::{ConvDims, Graph, grad};

/// What the derivatives of a convolution are multiplied in.
#[derive(Clone, Copy, PartialEq)]
enum Backward {
    Float,
    /// Int8, in so many parts of the batch.
    Parts(usize),
}

/// Rows and columns before features.
const IMAGE: [usize; 4] = [4, 6, 6, 3];
const OUTPUTS: usize = 5;

/// A convolution and its derivatives, of which the result's gradient is the input `u`: outputs y, dx, dw.
fn program(side: usize, stride: usize, backward: Backward) -> Graph {
    let b = Builder::new();
    let padding = (side as i64 / 2, side as i64 / 2);
    let dims = ConvDims::of_image(stride, padding);
    let out = [IMAGE[0], IMAGE[1] / stride, IMAGE[2] / stride, OUTPUTS];
    let x = b.input("x", f32s(&IMAGE), &[]).unwrap();
    let u = b.input("u", f32s(&out), &[]).unwrap();
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
        .unwrap();
    let at = b.root("unet").scope("conv");
    let kernel = f32s(&[OUTPUTS, IMAGE[3], side, side]);
    let w = at.param("weight", kernel, Init::Ones, &[]).unwrap();
    let y = at.convolution(x, w, dims, DType::F32).unwrap();
    if let Backward::Parts(parts) = backward {
        let formats = Formats::aqt_int8(parts).with_convolution_gradients(true);
        let policy = Policy::of_layers("unet/", Vec::new(), &[], formats).unwrap();
        annotate(&b, &policy).unwrap();
    }
    let loss = b.sum(b.mul(y, u).unwrap(), &[0, 1, 2, 3]).unwrap();
    let gradients = grad(&b, loss, &[x, w]).unwrap();
    for (name, value) in [("y", y), ("dx", gradients[0]), ("dw", gradients[1])] {
        b.output(name, value, None).unwrap();
    }
    lower(&b.finish()).unwrap().inline_composites(&|_, _| true)
}

fn results(graph: &Graph) -> Vec<Vec<f64>> {
    let inputs: Vec<HostTensor> = graph
        .inputs
        .iter()
        .map(|input| {
            let dims = &input.shape.dims;
            match input.shape.dtype {
                DType::U32 => HostTensor::from_f64(input.shape.clone(), &[1.0, 2.0]).unwrap(),
                _ => {
                    let values =
                        Init::Normal { std: 1.0 }.sample(3, &input.name, dims.iter().product());
                    HostTensor::from_f32(dims.clone(), &values).unwrap()
                }
            }
        })
        .collect();
    let found = evaluate(graph, &inputs).unwrap();
    found.iter().map(|t| t.to_f64_vec().unwrap()).collect()
}

#[test]
fn both_derivatives_of_convolutions_multiply_int8_on_request_and_stay_near_the_float_results() {
    for (side, stride) in [(3, 1), (3, 2), (1, 1)] {
        let exact = results(&program(side, stride, Backward::Float));
        for parts in [1, 2] {
            let case = format!("{side}x{side}, stride {stride}, {parts} parts");
            let graph = program(side, stride, Backward::Parts(parts));
            assert_eq!(count(&graph, "dot_general", DType::S32), 2, "{case}");
            assert_eq!(count(&graph, "convolution", DType::S32), 1, "{case}");
            for op in ["dot_general", "convolution"] {
                assert_eq!(count(&graph, op, DType::F32), 0, "{case}");
            }
            for (found, exact) in results(&graph).iter().zip(&exact) {
                let norm = |v: &[f64]| v.iter().map(|a| a * a).sum::<f64>().sqrt();
                let difference: Vec<f64> = found.iter().zip(exact).map(|(a, b)| a - b).collect();
                let error = norm(&difference) / norm(exact);
                // As of dots: about 1/255 an operand, twice that of a gradient that is rounded at random.
                assert!(error < 0.025 && error > 1e-5, "{case}: {error}");
            }
        }
        // No part at all leaves the kernel's derivative in float.
        let graph = program(side, stride, Backward::Parts(0));
        assert_eq!(count(&graph, "dot_general", DType::S32), 1);
        assert_eq!(count(&graph, "convolution", DType::F32), 1);
    }
}

/// The sum over the parts of a batch is that of programs that see one part each: nothing of a part is rounded by another's range.
#[test]
fn parts_of_a_batch_have_ranges_of_their_own() {
    // With stride 2 the image of the gradient has as few places as a kernel may have.
    for stride in [1, 2] {
        let graph = program(3, stride, Backward::Parts(2));
        // A dot of two parts, and the sum over them.
        let of_parts = graph.nodes.iter().filter(|node| match &node.op {
            Op::DotGeneral { dims, .. } => dims.lhs_batch.len() == 1,
            _ => false,
        });
        let shapes: Vec<&[usize]> = of_parts.map(|node| &node.shape.dims[..]).collect();
        assert_eq!(shapes, [&[2, OUTPUTS, 9 * IMAGE[3]][..]], "stride {stride}");
    }
}
