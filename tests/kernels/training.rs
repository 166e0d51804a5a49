//! The kernels of training steps: products whose operands are new in every step, weights that are stored as integers, and updates.

use crate::common::{cpu_session, kernels_run, run_on};
use maxdiff::backend::cpu::claim_training;
use maxdiff::backend::cpu::kernel::{
    Form, Gradient, Kernel, Product, ProductForm, QuantizedProduct,
};
use maxdiff::dtype::DType;
use maxdiff::graph::blockwise::{BLOCK, BlockwiseAdamW};
use maxdiff::graph::{
    Builder, ConvDims, DotDims, Graph, Op, RoundingStream, Tensor, evaluate, vjp,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{
    Activation, Attention, Conv2d, GroupNorm, Linear, Precision, attention, conv2d, gated_gelu,
    group_norm, layer_norm, linear,
};
use maxdiff::quant::{Policy, ROUNDING_KEY, annotate, lower};
use maxdiff::shape::Shape;
use maxdiff::train::optimizer::step_8bit;

use super::{BF16, inputs, kernels, relative};

/// A training step's int8 products of activations in this precision, forward and both of the derivative: rows, columns and
/// terms that fill no vector, no tile and no group of four, products that all threads share, convolutions of few channels and
/// of more.
pub(super) fn products_of_training(precision: Precision) -> Graph {
    let b = Builder::new();
    let m = b.root("m");
    let dtype = precision.activations;
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(dtype, dims), &[]).unwrap();
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
        .unwrap();
    let layer = |features| Linear::new(features, "embed", "heads");
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..Conv2d::same(20, 3)
    };
    let rows = [
        ("a", x("a", &[2, 19, 72]), layer(100)),
        ("b", x("b", &[5, 6]), layer(33).without_bias()),
        ("c", x("c", &[260, 64]), layer(50)),
    ];
    let images = [
        ("d", x("d", &[2, 7, 6, 6]), Conv2d::same(17, 3)),
        ("e", x("e", &[2, 7, 6, 32]), strided),
        ("f", x("f", &[3, 4, 5, 70]), Conv2d::same(5, 1)),
    ];
    let products = rows.map(|(name, x, spec)| linear(&m.scope(name), x, spec, precision).unwrap());
    let convolutions =
        images.map(|(name, x, spec)| conv2d(&m.scope(name), x, spec, precision).unwrap());
    let policy = Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap();
    annotate(&b, &policy).unwrap();
    for (i, y) in products.iter().chain(&convolutions).enumerate() {
        b.output(&format!("y{i}"), *y, None).unwrap();
    }
    for ((name, x, _), y) in rows.into_iter().zip(products) {
        let g = b.input(&format!("g_{name}"), b.shape(y), &[]).unwrap();
        let wrt = [x, parameter(&b, &format!("m/{name}.weight"))];
        for (i, gradient) in vjp(&b, &[(y, g)], &wrt).unwrap().into_iter().enumerate() {
            b.output(&format!("d{name}{i}"), gradient, None).unwrap();
        }
    }
    lower(&b.finish()).unwrap()
}

/// A training step's products and convolutions of bf16, forward and both of the derivative: rows, columns and terms that fill
/// no vector and are odd, what all threads share, strides, uneven padding, kernels of more places than a vector has lanes, and
/// patches that do not overlap.
pub(super) fn bf16_products_of_training() -> Graph {
    let b = Builder::new();
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let layer = |features| Linear::new(features, "embed", "heads");
    let conv = |out, kernel, stride, padding| Conv2d {
        stride,
        padding,
        ..Conv2d::same(out, kernel)
    };
    let rows = [
        ("a", x("a", &[2, 19, 72]), layer(100)),
        ("b", x("b", &[5, 6]), layer(34).without_bias()),
        ("c", x("c", &[530, 64]), layer(50)),
    ];
    let images = [
        ("d", x("d", &[2, 7, 6, 6]), conv(18, 3, 1, (1, 1))),
        ("e", x("e", &[2, 7, 6, 32]), conv(20, 3, 2, (0, 1))),
        ("f", x("f", &[3, 4, 5, 70]), conv(4, 1, 1, (0, 0))),
        ("g", x("g", &[1, 9, 8, 4]), conv(2, 5, 1, (2, 2))),
        ("h", x("h", &[1, 8, 12, 2]), conv(40, 4, 4, (0, 0))),
        ("i", x("i", &[1, 24, 22, 36]), conv(34, 3, 1, (1, 1))),
    ];
    let products = rows.map(|(name, x, spec)| linear(&m.scope(name), x, spec, BF16).unwrap());
    let convolutions = images.map(|(name, x, spec)| conv2d(&m.scope(name), x, spec, BF16).unwrap());
    let names = rows.map(|(name, x, _)| (name, x)).into_iter();
    let names = names.chain(images.map(|(name, x, _)| (name, x)));
    for ((name, x), y) in names.zip(products.into_iter().chain(convolutions)) {
        b.output(name, y, None).unwrap();
        let g = b.input(&format!("g_{name}"), b.shape(y), &[]).unwrap();
        let wrt = [x, parameter(&b, &format!("m/{name}.weight"))];
        for (i, gradient) in vjp(&b, &[(y, g)], &wrt).unwrap().into_iter().enumerate() {
            b.output(&format!("d{name}{i}"), gradient, None).unwrap();
        }
    }
    b.finish()
}

/// A product and a convolution with weights that are stored as integers, as a step has them that trains other weights: forward
/// with a scale and a bias of each column, and the derivative by what is multiplied.
pub(super) fn stored_products_of_training() -> Graph {
    let b = Builder::new();
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let stored = |name: &str, dims: &[usize]| {
        let integers = b.input(name, Shape::new(DType::S8, dims), &[]).unwrap();
        b.convert(integers, DType::BF16).unwrap()
    };
    let dot = Op::DotGeneral {
        dims: DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        },
        result: DType::F32,
        quant: None,
    };
    let convolution = Op::Convolution {
        dims: Box::new(ConvDims::of_image(1, (1, 1))),
        result: DType::F32,
        quant: None,
    };
    let products = [
        ("a", dot, x("x_a", &[37, 70]), stored("w_a", &[50, 70])),
        (
            "b",
            convolution,
            x("x_b", &[2, 5, 6, 34]),
            stored("w_b", &[18, 34, 3, 3]),
        ),
    ];
    for (name, op, x, weight) in products {
        let sum = b.push(op, &[x, weight]).unwrap();
        let dims = b.dims(sum);
        let last = dims.len() - 1;
        let [scale, bias] = ["scale", "bias"].map(|of| {
            let shape = Shape::new(DType::F32, [dims[last]]);
            let vector = b.input(&format!("{of}_{name}"), shape, &[]).unwrap();
            b.broadcast_in_dim(vector, &[last], &dims).unwrap()
        });
        let y = b.add(b.mul(sum, scale).unwrap(), bias).unwrap();
        let y = b.convert(y, DType::BF16).unwrap();
        b.output(name, y, None).unwrap();
        let g = b.input(&format!("g_{name}"), b.shape(y), &[]).unwrap();
        let [dx] = vjp(&b, &[(y, g)], &[x]).unwrap()[..] else {
            panic!("one gradient for one operand");
        };
        b.output(&format!("d{name}"), dx, None).unwrap();
    }
    b.finish()
}

/// Attention in bf16 with the derivatives by its query, key and value: heads, queries and keys that fill no vector and no block,
/// and several blocks of both.
pub(super) fn attentions_of_training() -> Graph {
    let b = Builder::new();
    for (name, [batch, queries, keys, heads, size]) in [
        ("a", [2, 5, 7, 3, 6]),
        ("b", [1, 197, 530, 2, 20]),
        ("c", [1, 33, 3, 2, 40]),
        ("d", [1, 96, 80, 1, 64]),
    ] {
        let x = |of: &str, length: usize| {
            let shape = Shape::new(DType::BF16, [batch, length, heads * size]);
            b.input(&format!("{of}_{name}"), shape, &[]).unwrap()
        };
        let qkv = [x("q", queries), x("k", keys), x("v", keys)];
        let spec = Attention {
            heads,
            causal: false,
        };
        let y = attention(&b.root(name), qkv, spec, BF16).unwrap();
        b.output(name, y, None).unwrap();
        let gradients = vjp(&b, &[(y, x("g", queries))], &qkv).unwrap();
        for (of, gradient) in ["q", "k", "v"].into_iter().zip(gradients) {
            b.output(&format!("d{of}_{name}"), gradient, None).unwrap();
        }
    }
    b.finish()
}

/// A group norm without and with SiLU, a layer norm and a gate with their derivatives, by weights and biases too if `affine`, of
/// images of `height` x 7 pixels and 3 x `length` rows.
pub(super) fn norms_and_gates_of_training(height: usize, length: usize, affine: bool) -> Graph {
    let b = Builder::new();
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let image = x("image", &[2, height, 7, 72]);
    let rows = x("rows", &[3, length, 90]);
    let norm = |name: &str, activation| {
        let layer = GroupNorm {
            groups: 8,
            epsilon: 1e-5,
            activation,
        };
        group_norm(&m.scope(name), image, layer, BF16).unwrap()
    };
    let layers = [
        ("plain", image, norm("plain", None)),
        (
            "activated",
            image,
            norm("activated", Some(Activation::Silu)),
        ),
        (
            "rows",
            rows,
            layer_norm(&m.scope("rows"), rows, 1e-5, BF16).unwrap(),
        ),
        ("gate", rows, gated_gelu(&m.scope("gate"), rows).unwrap()),
    ];
    for (name, x, y) in layers {
        b.output(name, y, None).unwrap();
        let g = b.input(&format!("g_{name}"), b.shape(y), &[]).unwrap();
        let mut wrt = vec![x];
        if affine && name != "gate" {
            wrt.extend(["weight", "bias"].map(|of| parameter(&b, &format!("m/{name}.{of}"))));
        }
        for (i, gradient) in vjp(&b, &[(y, g)], &wrt).unwrap().into_iter().enumerate() {
            b.output(&format!("d{name}{i}"), gradient, None).unwrap();
        }
    }
    b.finish()
}

/// The same as [`inputs`], with integers of all values.
pub(super) fn inputs_with_integers(graph: &Graph) -> Vec<HostTensor> {
    let given = graph.inputs.iter().zip(inputs(graph));
    given
        .map(|(input, value)| match input.shape.dtype {
            DType::S8 => {
                let integers = (0..input.shape.count()).map(|i| (i * 37 % 256) as f64 - 128.0);
                HostTensor::from_f64(input.shape.clone(), &integers.collect::<Vec<_>>()).unwrap()
            }
            _ => value,
        })
        .collect()
}

/// A step of AdamW on a weight of `dtype` with moments in 8 bits, of `count` values in rows of three.
pub(super) fn update_in_8_bits(dtype: DType, count: usize, rounds: bool) -> Graph {
    let b = Builder::new();
    let input =
        |name: &str, dtype, dims: &[usize]| b.input(name, Shape::new(dtype, dims), &[]).unwrap();
    let (dims, blocks) = ([count / 3, 3], [count.div_ceil(BLOCK)]);
    let mut operands = vec![
        input("weight", dtype, &dims),
        input("m", DType::U8, &dims),
        input("m_absmax", DType::F32, &blocks),
        input("v", DType::U8, &dims),
        input("v_absmax", DType::F32, &blocks),
        b.convert(input("gradient", DType::BF16, &dims), DType::F32)
            .unwrap(),
        input("scalars", DType::F32, &[BlockwiseAdamW::SCALARS]),
    ];
    if rounds {
        operands.push(input(ROUNDING_KEY, DType::U32, &[2]));
    }
    let step = BlockwiseAdamW {
        b1: 0.9,
        b2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        rounding: rounds.then_some(RoundingStream(3)),
    };
    for (i, result) in step_8bit(&b, step, &operands)
        .unwrap()
        .into_iter()
        .enumerate()
    {
        b.output(&format!("result{i}"), result, None).unwrap();
    }
    b.finish()
}

/// Codes of all values, largest absolute values of which one is 0, and a step that counts or does not.
pub(super) fn inputs_of_update(graph: &Graph, counts: bool) -> Vec<HostTensor> {
    let given = graph.inputs.iter().zip(inputs(graph));
    given
        .map(|(input, value)| {
            let values = value.to_f64_vec().unwrap();
            let numbered = values.iter().enumerate();
            let values: Vec<f64> = match &input.name[..] {
                "m" | "v" => (0..values.len()).map(|i| (i * 7 % 256) as f64).collect(),
                "m_absmax" | "v_absmax" => numbered.map(|(i, x)| (i as f64 * x).abs()).collect(),
                "scalars" => vec![0.7, 1e-2, 0.19, 0.002, f64::from(u8::from(counts))],
                ROUNDING_KEY => vec![3_123_456_789.0, 4_000_000_007.0],
                _ => values,
            };
            HostTensor::from_f64(input.shape.clone(), &values).unwrap()
        })
        .collect()
}

#[test]
fn updates_in_8_bits_are_one_kernel_and_what_the_graph_says() {
    let sessions = kernels_run().then(|| cpu_session(1));
    for (dtype, count, rounds) in [
        (DType::BF16, 4 * BLOCK, true),
        (DType::BF16, 3 * BLOCK + 6, false),
        (DType::F32, 99 * BLOCK + 3, false),
    ] {
        let graph = update_in_8_bits(dtype, count, rounds);
        let with = claim_training(&graph).unwrap();
        let [Kernel::AdamW8bit(_)] = kernels(&with)[..] else {
            panic!("{:?}", kernels(&with));
        };
        for counts in [true, false] {
            let inputs = inputs_of_update(&graph, counts);
            let expected = evaluate(&with, &inputs).unwrap();
            let body = evaluate(&graph, &inputs).unwrap();
            for codes in [1, 3] {
                let [found, body] = [&expected, &body].map(|of| of[codes].to_f64_vec().unwrap());
                let distances = found.iter().zip(&body).map(|(a, b)| (a - b).abs());
                let other: Vec<f64> = distances.filter(|distance| *distance > 0.0).collect();
                // Moments in the middle between two values.
                assert!(other.len() <= count / 500, "{} of {count}", other.len());
                assert!(other.iter().all(|distance| *distance == 1.0));
            }
            assert!(relative(&body[0], &expected[0]) < 1e-4);
            assert_eq!(expected[0] == inputs[0], !counts);
            if let Some(session) = &sessions {
                assert!(
                    run_on(session, &with, &inputs) == expected,
                    "{dtype} {count}"
                );
                // Without a kernel, as other backends compute it.
                let inlined = run_on(session, &graph, &inputs);
                assert!(relative(&inlined[0], &expected[0]) < 1e-2);
            }
        }
    }
}

#[test]
fn stored_weights_of_training_are_multiplied_as_integers() {
    let graph = stored_products_of_training();
    let with = claim_training(&graph).unwrap();
    let products: Vec<&Product> = kernels(&with)
        .into_iter()
        .map(|kernel| match kernel {
            Kernel::Product(product) => product,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(products.len(), 4);
    for (i, product) in products.into_iter().enumerate() {
        let is_forward = i % 2 == 0;
        assert_eq!(
            [product.scale, product.bias],
            [is_forward; 2],
            "{product:?}"
        );
        assert_eq!(product.result, DType::BF16);
    }
    // Nothing widens the integers.
    let nodes = with.nodes.iter().zip(with.live_nodes());
    let mut live = nodes.filter(|(_, live)| *live).map(|(node, _)| node);
    assert!(!live.any(|node| matches!(node.op, Op::Convert(DType::BF16))
        && with.nodes[node.operands[0] as usize].shape.dtype == DType::S8));
    let inputs = inputs_with_integers(&graph);
    let expected = evaluate(&graph, &inputs).unwrap();
    assert_eq!(evaluate(&with, &inputs).unwrap(), expected);
}

/// The same as [`inputs`], with words of many bits for the key of the noise.
pub(super) fn inputs_with_key(graph: &Graph) -> Vec<HostTensor> {
    let mut inputs = inputs(graph);
    let key = graph.inputs.iter().position(|i| i.name == ROUNDING_KEY);
    let key = &mut inputs[key.unwrap()];
    *key = HostTensor::from_f64(key.shape.clone(), &[3_123_456_789.0, 4_000_000_007.0]).unwrap();
    inputs
}

fn parameter(b: &Builder, name: &str) -> Tensor {
    let input = b.with_graph(|g| g.inputs.iter().find(|i| i.name == name).cloned());
    b.declare(input.unwrap()).unwrap()
}

#[test]
fn products_of_training_become_one_kernel_each() {
    // In bf16 a sum is rounded before its bias is added.
    for (precision, with_bias) in [(Precision::F32, 5), (BF16, 0)] {
        let graph = products_of_training(precision);
        let with = claim_training(&graph).unwrap();
        let found = kernels(&with);
        let of_training: Vec<&QuantizedProduct> = found
            .iter()
            .filter_map(|kernel| match kernel {
                Kernel::QuantizedProduct(product) => Some(product),
                _ => None,
            })
            .collect();
        assert_eq!(of_training.len(), found.len());
        assert_eq!(found.len(), 3 * 3 + 3);
        let count =
            |is: &dyn Fn(&QuantizedProduct) -> bool| of_training.iter().filter(|p| is(p)).count();
        assert_eq!(count(&|p| p.bias), with_bias);
        assert_eq!(count(&|p| p.noise), 6);
        assert_eq!(count(&|p| p.in_bf16), if with_bias == 0 { 12 } else { 0 });
        assert_eq!(count(&|p| matches!(p.form, Form::Convolution(_))), 3);
        let inputs = inputs_with_key(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        assert_eq!(evaluate(&with, &inputs).unwrap(), expected);
    }
}

#[test]
fn bf16_products_of_training_become_one_kernel_each() {
    let graph = bf16_products_of_training();
    let with = claim_training(&graph).unwrap();
    let products = kernels(&with).into_iter().map(|kernel| match kernel {
        Kernel::Product(product) => product,
        other => panic!("{other:?}"),
    });
    let products: Vec<&Product> = products.collect();
    let count = |is: &dyn Fn(&Product) -> bool| products.iter().filter(|p| is(p)).count();
    assert_eq!(products.len(), 3 * 9);
    assert_eq!(count(&|p| p.bias), 8);
    assert_eq!(count(&|p| p.result == DType::BF16), 3 * 9);
    assert_eq!(count(&|p| matches!(p.form, ProductForm::Matrix { .. })), 9);
    assert_eq!(
        count(&|p| matches!(p.form, ProductForm::KernelGradient(_))),
        6
    );
    let inputs = inputs(&graph);
    // The host's sums are exact, and every rounding after them is the same.
    assert_eq!(
        evaluate(&with, &inputs).unwrap(),
        evaluate(&graph, &inputs).unwrap()
    );
}

/// The root of the mean square of the distance between two tensors, by the largest value of the second.
pub(super) fn distance(found: &HostTensor, expected: &HostTensor) -> f64 {
    let [found, expected] = [found, expected].map(|x| x.to_f64_vec().unwrap());
    let squares = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2));
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    (squares.sum::<f64>() / expected.len() as f64).sqrt() / largest.max(f64::MIN_POSITIVE)
}

#[test]
fn an_attention_that_is_trained_is_two_kernels() {
    let graph = attentions_of_training();
    let with = claim_training(&graph).unwrap();
    let count = |is: &dyn Fn(&Kernel) -> bool| kernels(&with).iter().filter(|k| is(k)).count();
    assert_eq!(count(&|k| matches!(k, Kernel::Attention { .. })), 4);
    assert_eq!(count(&|k| matches!(k, Kernel::Gradient(_))), 4);
    assert_eq!(kernels(&with).len(), 8);
    let inputs = inputs(&graph);
    let expected = evaluate(&graph, &inputs).unwrap();
    let host = evaluate(&with, &inputs).unwrap();
    let device = kernels_run().then(|| run_on(&cpu_session(1), &with, &inputs));
    for (i, output) in graph.outputs.iter().enumerate() {
        // The gradient of a score is rounded to bf16, and so is what the graph computes it from.
        let found = [Some(&host[i]), device.as_ref().map(|found| &found[i])];
        for found in found.into_iter().flatten() {
            let error = distance(found, &expected[i]);
            assert!(error <= 4e-3, "{}: {error}", output.name);
        }
    }
}

#[test]
fn norms_and_gates_that_are_trained_are_two_kernels_each() {
    let sessions = kernels_run().then(|| cpu_session(1));
    // On one thread, and on all: the latter from 32,768 values on.
    for (height, length, affine) in [(5, 11, true), (41, 250, true), (5, 11, false)] {
        let graph = norms_and_gates_of_training(height, length, affine);
        let with = claim_training(&graph).unwrap();
        let found = kernels(&with)
            .into_iter()
            .filter_map(|kernel| match kernel {
                Kernel::Gradient(gradient) => Some(gradient.clone()),
                _ => None,
            });
        let of_groups = |silu| Gradient::GroupNorm {
            groups: 8,
            epsilon: 1e-5,
            silu,
            affine,
        };
        let of_rows = Gradient::LayerNorm {
            epsilon: 1e-5,
            affine,
        };
        let expected = [of_groups(false), of_groups(true), of_rows, Gradient::Geglu];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!(kernels(&with).len(), 8);
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        let host = evaluate(&with, &inputs).unwrap();
        let device = sessions
            .as_ref()
            .map(|session| run_on(session, &with, &inputs));
        for (i, output) in graph.outputs.iter().enumerate() {
            // The graphs of SiLU and GELU round to bf16 at every operation.
            let is_exact = ["plain", "rows"]
                .iter()
                .any(|name| output.name.contains(name));
            let limit = if is_exact { 1e-3 } else { 8e-3 };
            let found = [Some(&host[i]), device.as_ref().map(|found| &found[i])];
            for found in found.into_iter().flatten() {
                let error = relative(found, &expected[i]);
                assert!(error <= limit, "{}: {error}", output.name);
            }
        }
    }
}

#[test]
fn sums_of_squares_are_a_kernel_and_what_the_graph_says() {
    let b = Builder::new();
    for (name, dtype, dims) in [
        ("a", DType::BF16, &[33, 1000][..]),
        ("b", DType::F32, &[70_001]),
    ] {
        let x = b.input(name, Shape::new(dtype, dims), &[]).unwrap();
        let x = b.convert(x, DType::F32).unwrap();
        let all: Vec<usize> = (0..dims.len()).collect();
        let sum = b.sum(b.square(x).unwrap(), &all).unwrap();
        b.output(name, sum, None).unwrap();
    }
    let graph = b.finish();
    let with = claim_training(&graph).unwrap();
    assert!(matches!(
        kernels(&with)[..],
        [Kernel::SumOfSquares, Kernel::SumOfSquares]
    ));
    let inputs = inputs(&graph);
    let expected = evaluate(&graph, &inputs).unwrap();
    assert_eq!(evaluate(&with, &inputs).unwrap(), expected);
    if kernels_run() {
        let found = run_on(&cpu_session(1), &with, &inputs);
        for (found, expected) in found.iter().zip(&expected) {
            assert!(relative(found, expected) < 1e-6);
        }
    }
}
