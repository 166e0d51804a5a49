mod convolutions;

use super::*;
use crate::dtype::DType;
use crate::graph::{Arithmetic, DotDims, Granularity, Init, Range, Tensor, evaluate, grad};
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

fn f32s(dims: &[usize]) -> Shape {
    Shape::new(DType::F32, dims)
}

fn linear(b: &Builder, x: Tensor, inputs: usize, outputs: usize) -> Tensor {
    let w = b
        .param("weight", f32s(&[outputs, inputs]), Init::Ones, &[])
        .unwrap();
    let dims = DotDims {
        lhs_contract: vec![2],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    b.dot_general(x, w, dims, DType::F32).unwrap()
}

/// Values in [-1, 1] that depend on `seed`.
fn wave(count: usize, seed: f32) -> Vec<f32> {
    Init::Uniform { bound: 1.0 }.sample(u64::from(seed.to_bits()), "values", count)
}

fn count(graph: &crate::graph::Graph, op: &str, dtype: DType) -> usize {
    graph
        .nodes
        .iter()
        .filter(|n| n.op.name() == op && n.shape.dtype == dtype)
        .count()
}

#[test]
fn rules_decide_by_path_and_built_in_ones_keep_sensitive_layers_in_float() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[2, 3, 4]), &[]).unwrap();
    let unet = b.root("unet");
    linear(&unet.scope("time_embedding").scope("linear_1"), x, 4, 4);
    linear(&unet.scope("down_blocks").scope(0).scope("to_q"), x, 4, 4);
    linear(&unet.scope("down_blocks").scope(1).scope("to_q"), x, 4, 4);
    linear(&b.root("text_encoder").scope("q_proj"), x, 4, 4);
    let user = Rule::new(r"down_blocks\.1\..*", Action::Float, true).unwrap();
    let policy = Policy::aqt_int8(
        "unet/",
        1,
        vec![user],
        &crate::models::unet::INT8_FLOAT_LAYERS,
    )
    .unwrap();
    let decisions = annotate(&b, &policy).unwrap();
    let quantized: Vec<&str> = decisions
        .iter()
        .filter(|d| d.quantized())
        .map(|d| d.path.as_str())
        .collect();
    assert_eq!(quantized, ["down_blocks.0.to_q"]);
    assert_eq!(decisions.len(), 3, "the text encoder is not the policy's");
    let stray = Rule::new("up_blocks.*", Action::Float, true).unwrap();
    let error = annotate(
        &b,
        &Policy::aqt_int8(
            "unet/",
            1,
            vec![stray],
            &crate::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap(),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "quantization rule 'up_blocks.*' matches no contraction of unet; paths look like time_embedding.linear_1"
    );
}

#[test]
fn a_rule_for_a_product_of_activations_is_told_of_qwix() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[2, 3, 4]), &[]).unwrap();
    let unet = b.root("unet");
    let q = linear(&unet.scope("attn").scope("to_q"), x, 4, 4);
    let dims = DotDims {
        lhs_batch: vec![0],
        rhs_batch: vec![0],
        lhs_contract: vec![2],
        rhs_contract: vec![2],
    };
    let scores = unet.scope("attn").scope("qk_product");
    scores.dot_general(q, q, dims, DType::F32).unwrap();
    let rule = Rule::new(".*qk_product", Action::Quantize(Formats::aqt_int8(1)), true).unwrap();
    let error = annotate(
        &b,
        &Policy::aqt_int8(
            "unet/",
            1,
            vec![rule],
            &crate::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap(),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the quantization rule '.*qk_product' matches only products of two activations of unet, such as \
         'attn.qk_product', which AQT's numerics leave in float; use_qwix_quantization=True quantizes them"
    );
}

/// The training graph of one linear layer: outputs y, dx, dw.
fn layer(
    local_shards: usize,
    dims: [usize; 3],
    outputs: usize,
) -> Result<crate::graph::Graph, QuantError> {
    layer_in(Arithmetic::Native, local_shards, dims, outputs)
}

fn layer_in(
    arithmetic: Arithmetic,
    local_shards: usize,
    dims: [usize; 3],
    outputs: usize,
) -> Result<crate::graph::Graph, QuantError> {
    let b = Builder::new();
    let x = b.input("x", f32s(&dims), &[])?;
    let u = b.input("u", f32s(&[dims[0], dims[1], outputs]), &[])?;
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])?;
    let y = linear(&b.root("unet").scope("to_q"), x, dims[2], outputs);
    let float_layers = &crate::models::unet::INT8_FLOAT_LAYERS;
    let mut policy = Policy::aqt_int8("unet/", local_shards, vec![], float_layers)?;
    policy.arithmetic = arithmetic;
    annotate(&b, &policy)?;
    let loss = b.sum(b.mul(y, u)?, &[0, 1, 2])?;
    let w =
        b.root("unet")
            .scope("to_q")
            .param("weight", f32s(&[outputs, dims[2]]), Init::Ones, &[])?;
    let grads = grad(&b, loss, &[x, w])?;
    b.output("y", y, None)?;
    b.output("dx", grads[0], None)?;
    b.output("dw", grads[1], None)?;
    Ok(lower(&b.finish())?.inline_composites(&|_, _| true))
}

fn run(
    graph: &crate::graph::Graph,
    dims: [usize; 3],
    outputs: usize,
    key: [u32; 2],
) -> Vec<Vec<f64>> {
    run_with(graph, dims, outputs, key, &wave(outputs * dims[2], 2.1))
}

/// [`run`] with weights of one's own.
fn run_with(
    graph: &crate::graph::Graph,
    dims: [usize; 3],
    outputs: usize,
    key: [u32; 2],
    weights: &[f32],
) -> Vec<Vec<f64>> {
    let [batch, tokens, inputs] = dims;
    let key = HostTensor::from_f64(Shape::new(DType::U32, [2]), &key.map(f64::from)).unwrap();
    let inputs = [
        HostTensor::from_f32(dims, &wave(batch * tokens * inputs, 0.7)).unwrap(),
        HostTensor::from_f32(
            [batch, tokens, outputs],
            &wave(batch * tokens * outputs, 1.3),
        )
        .unwrap(),
        key,
        HostTensor::from_f32([outputs, inputs], weights).unwrap(),
    ];
    evaluate(graph, &inputs)
        .unwrap()
        .iter()
        .map(|t| t.to_f64_vec().unwrap())
        .collect()
}

#[test]
fn forward_and_both_backward_dots_multiply_int8_and_stay_near_the_float_result() {
    let dims = [4, 3, 16];
    let quantized = layer(2, dims, 8).unwrap();
    assert_eq!(count(&quantized, "dot_general", DType::S32), 3);
    assert_eq!(count(&quantized, "dot_general", DType::F32), 0);
    let float_drhs = layer(0, dims, 8).unwrap();
    assert_eq!(count(&float_drhs, "dot_general", DType::S32), 2);
    assert_eq!(count(&float_drhs, "dot_general", DType::F32), 1);
    let found = run(&quantized, dims, 8, [1, 2]);
    // The same sums in f64.
    let (x, u, w) = (
        wave(4 * 3 * 16, 0.7),
        wave(4 * 3 * 8, 1.3),
        wave(8 * 16, 2.1),
    );
    let at = |v: &[f32], i: usize| f64::from(v[i]);
    let mut y = vec![0.0; 12 * 8];
    let mut dx = vec![0.0; 12 * 16];
    let mut dw = vec![0.0; 8 * 16];
    for t in 0..12 {
        for o in 0..8 {
            for i in 0..16 {
                y[t * 8 + o] += at(&x, t * 16 + i) * at(&w, o * 16 + i);
                dx[t * 16 + i] += at(&u, t * 8 + o) * at(&w, o * 16 + i);
                dw[o * 16 + i] += at(&u, t * 8 + o) * at(&x, t * 16 + i);
            }
        }
    }
    // 8 bits leave a relative error near 1/255 an operand; stochastic rounding doubles the gradient's.
    for (found, expected, tolerance) in [
        (&found[0], &y, 0.01),
        (&found[1], &dx, 0.02),
        (&found[2], &dw, 0.02),
    ] {
        let norm = |v: &[f64]| v.iter().map(|a| a * a).sum::<f64>().sqrt();
        let difference: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(expected);
        assert!(error < tolerance && error > 1e-5, "{error}");
    }
}

#[test]
fn emulated_products_are_those_of_int8_in_the_derivative_too() {
    let dims = [4, 3, 16];
    let [native, emulated] = [Arithmetic::Native, Arithmetic::Emulated]
        .map(|arithmetic| layer_in(arithmetic, 2, dims, 8).unwrap());
    assert_eq!(count(&emulated, "dot_general", DType::S32), 0);
    assert_eq!(count(&emulated, "dot_general", DType::F32), 3);
    // The same key rounds alike.
    let [native, emulated] = [native, emulated].map(|graph| run(&graph, dims, 8, [1, 2]));
    for (native, emulated) in native.iter().zip(&emulated) {
        let largest = native.iter().fold(0f64, |m, y| m.max(y.abs()));
        for (a, b) in native.iter().zip(emulated) {
            assert!((a - b).abs() <= 1e-6 * largest, "{a} {b}");
        }
    }
}

#[test]
fn stochastic_rounding_is_unbiased_and_changes_with_the_key() {
    let dims = [2, 1, 4];
    let graph = layer(1, dims, 4).unwrap();
    // Weights of 1 are all 127 steps of 1/127.5: what they do to the mean is known, and a bias adds up over them.
    let runs: Vec<Vec<f64>> = (0..400)
        .map(|k| run_with(&graph, dims, 4, [k, 9], &[1.0; 16]).remove(1))
        .collect();
    assert_ne!(runs[0], runs[1]);
    let forward = run(&graph, dims, 4, [0, 9]).remove(0);
    assert_eq!(
        forward,
        run(&graph, dims, 4, [5, 9]).remove(0),
        "the forward pass rounds to nearest"
    );
    // The mean over keys approaches the product with the unrounded gradient, whose largest element of a token is
    // clipped from 127.5 steps to 127.
    let u = wave(8, 1.3);
    for t in 0..2 {
        let token = &u[t * 4..(t + 1) * 4];
        let step = f64::from(token.iter().fold(0f32, |m, v| m.max(v.abs()))) / 127.5;
        let clipped = |v: &f32| (f64::from(*v) / step).clamp(-127.0, 127.0) * step;
        let exact: f64 = token.iter().map(clipped).sum::<f64>() * 127.0 / 127.5;
        // A rounded element is off by half a step at most; five standard errors of the mean of 400 sums of four.
        let allowed = 5.0 * (0.5 * step) * 2.0 / 20.0;
        for i in 0..4 {
            let mean = runs.iter().map(|r| r[t * 4 + i]).sum::<f64>() / 400.0;
            assert!((mean - exact).abs() < allowed, "{mean} {exact} {allowed}");
        }
    }
}

#[test]
fn a_batch_that_the_shards_do_not_divide_is_an_error() {
    let error = layer(3, [4, 3, 16], 8).unwrap_err();
    assert_eq!(
        error.to_string(),
        "backward/unet/to_q/gradient: quantization_local_shard_count=3 does not divide the batch of 4 that this weight gradient sums over"
    );
}

/// With one scale an operand, each part of a batch is quantized and multiplied as if it were alone: what comes of a part does
/// not depend on the others, and the gradient of the weight is the sum of theirs.
#[test]
fn parts_of_a_batch_have_fp8_scales_of_their_own() {
    let (batch, tokens, features, outputs) = (4, 3, 8, 5);
    let program = |batch: usize, parts: usize| {
        let b = Builder::new();
        let x = b.input("x", f32s(&[batch, tokens, features]), &[]).unwrap();
        let u = b.input("u", f32s(&[batch, tokens, outputs]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, features, outputs);
        let formats = Formats::fp8_full(Granularity::Tensor, parts);
        let policy = Policy::of_layers("unet/", Vec::new(), &[], formats).unwrap();
        annotate(&b, &policy).unwrap();
        let loss = b.sum(b.mul(y, u).unwrap(), &[0, 1, 2]).unwrap();
        let at = b.root("unet").scope("to_q");
        let w = at.param("weight", f32s(&[outputs, features]), Init::Ones, &[]);
        let grads = grad(&b, loss, &[x, w.unwrap()]).unwrap();
        b.output("y", y, None).unwrap();
        b.output("dx", grads[0], None).unwrap();
        b.output("dw", grads[1], None).unwrap();
        lower(&b.finish()).unwrap()
    };
    let random = |name: &str, dims: &[usize]| {
        let values = Init::Normal { std: 1.0 }.sample(3, name, dims.iter().product());
        HostTensor::from_f32(dims.to_vec(), &values).unwrap()
    };
    let x = random("x", &[batch, tokens, features]);
    let u = random("u", &[batch, tokens, outputs]);
    let weight = random("w", &[outputs, features]);
    // The second half is larger, so that one range for all would be another.
    let part = |tensor: &HostTensor, at: usize| {
        let values = tensor.to_f32_vec().unwrap();
        let half = values.len() / 2;
        let scaled = values[at * half..(at + 1) * half].iter();
        let scaled: Vec<f32> = scaled.map(|v| v * [1.0, 50.0][at]).collect();
        let mut dims = tensor.shape.dims.clone();
        dims[0] /= 2;
        HostTensor::from_f32(dims, &scaled).unwrap()
    };
    let joined = |tensor: &HostTensor| {
        let parts = [0, 1].map(|at| part(tensor, at).to_f32_vec().unwrap());
        HostTensor::from_f32(tensor.shape.dims.clone(), &parts.concat()).unwrap()
    };
    let run = |graph: &crate::graph::Graph, x: HostTensor, u: HostTensor| -> Vec<Vec<f64>> {
        let results = evaluate(graph, &[x, u, weight.clone()]).unwrap();
        results.iter().map(|r| r.to_f64_vec().unwrap()).collect()
    };
    let whole = run(&program(batch, 2), joined(&x), joined(&u));
    let one = program(batch / 2, 1);
    let halves = [0, 1].map(|at| run(&one, part(&x, at), part(&u, at)));
    for result in [0, 1] {
        let expected = [&halves[0][result][..], &halves[1][result]].concat();
        assert_eq!(whole[result], expected, "result {result}");
    }
    for (i, found) in whole[2].iter().enumerate() {
        let expected = halves[0][2][i] + halves[1][2][i];
        assert!((found - expected).abs() <= 1e-5 * expected.abs().max(1.0));
    }
    // Of one range the first half would be coarser.
    assert_ne!(whole[0], run(&program(batch, 1), joined(&x), joined(&u))[0]);
}

#[test]
fn a_zero_operand_gives_zero_and_no_nan() {
    for policy in [
        Policy::aqt_int8("unet/", 0, vec![], &crate::models::unet::INT8_FLOAT_LAYERS).unwrap(),
        Policy::qwix("unet/", ".*", Vec::new(), Formats::qwix_int8()).unwrap(),
        Policy::qwix("unet/", ".*", Vec::new(), Formats::fp8(Granularity::Tensor)).unwrap(),
        of_narrow_int8(),
    ] {
        let b = Builder::new();
        let x = b.input("x", f32s(&[1, 2, 4]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, 4, 3);
        annotate(&b, &policy).unwrap();
        b.output("y", y, None).unwrap();
        let graph = lower(&b.finish()).unwrap();
        let inputs = [
            HostTensor::from_f32([1, 2, 4], &[0.0; 8]).unwrap(),
            HostTensor::from_f32([3, 4], &wave(12, 0.3)).unwrap(),
        ];
        let out = evaluate(&graph, &inputs).unwrap().remove(0);
        assert_eq!(out.to_f32_vec().unwrap(), vec![0.0; 6]);
    }
}

/// The policy of weights and activations in narrow int8.
fn of_narrow_int8() -> Policy {
    let formats = Formats::forward_int8(NumericsConvention::Narrow);
    Policy::of_layers("unet/", vec![], &[], formats).unwrap()
}

/// The policy of weights alone in a format.
fn of_weights(format: TensorFormat) -> Policy {
    Policy::of_layers("unet/", vec![], &[], Formats::of_weights(format)).unwrap()
}

/// Every format of weights alone, with groups of 4.
fn formats_of_weights() -> Vec<TensorFormat> {
    let mut formats = Vec::new();
    for element in [DType::S8, DType::S4] {
        for granularity in [
            Granularity::Tensor,
            Granularity::Channel,
            Granularity::Group(4),
        ] {
            for convention in [
                NumericsConvention::Aqt,
                NumericsConvention::Qwix,
                NumericsConvention::Quark,
                NumericsConvention::Narrow,
            ] {
                let format = TensorFormat {
                    element,
                    granularity,
                    ..TensorFormat::int8(convention)
                };
                formats.push(format);
                if convention == NumericsConvention::Quark {
                    formats.push(TensorFormat {
                        zero_point: true,
                        ..format
                    });
                }
            }
        }
    }
    for granularity in [Granularity::Tensor, Granularity::Channel] {
        for convention in [NumericsConvention::Quark, NumericsConvention::Qwix] {
            formats.push(TensorFormat {
                element: DType::F8E4M3Fn,
                granularity,
                ..TensorFormat::int8(convention)
            });
        }
    }
    formats
}

/// `x W^T` in the weight's format, and in float: results on the host, with how the lowered graph looks.
fn weight_only(format: TensorFormat) -> (crate::graph::Graph, Vec<f64>, Vec<f64>) {
    let trace = |policy: Option<Policy>| {
        let b = Builder::new();
        let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
        if let Some(policy) = policy {
            annotate(&b, &policy).unwrap();
        }
        b.output("y", y, None).unwrap();
        lower(&b.finish()).unwrap()
    };
    let policy = of_weights(format);
    let inputs = [
        HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap(),
        HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap(),
    ];
    let run = |graph: &crate::graph::Graph| {
        let out = evaluate(graph, &inputs).unwrap().remove(0);
        out.to_f64_vec().unwrap()
    };
    let (quantized, float) = (trace(Some(policy)), trace(None));
    let results = [run(&quantized), run(&float)];
    let [found, expected] = results;
    (quantized, found, expected)
}

#[test]
fn a_weight_alone_is_quantized_in_every_format() {
    let fixed = TensorFormat {
        range: Range::Static(1f32.to_bits()),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    for format in formats_of_weights().into_iter().chain([fixed]) {
        let (_, found, expected) = weight_only(format);
        // A step is 1/127.5 or 1/7.5 of at most 1, of the narrow range 1/127 or 1/7, an element is off by half of one at most, or
        // a whole one where the largest is clipped; over 16 products with |x| <= 1.
        let most = match format.element {
            DType::S4 => 16.0 / 7.5,
            // Half of a step is 1/16 of a number.
            DType::F8E4M3Fn => 16.0 / 16.0,
            _ => 16.0 * 0.5 / 127.5 * 1.01,
        };
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let worst = worst.fold(0.0, f64::max);
        assert!(worst > 0.0 && worst < most, "{format:?}: {worst}");
    }
}

/// What is multiplied is what the integers stand for: `(integers - zero point) * scale` in float.
#[test]
fn a_quantized_weight_is_worth_its_integers_times_scales() {
    let x = wave(64, 0.7);
    let weight = HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap();
    for format in formats_of_weights() {
        let (_, found, _) = weight_only(format);
        let quantized = quantize_weight(&weight, format).unwrap();
        let values = quantized.values.to_f64_vec().unwrap();
        let scales = quantized.scale.to_f64_vec().unwrap();
        let zero_points = match &quantized.zero_point {
            Some(zero_point) => zero_point.to_f64_vec().unwrap(),
            None => vec![0.0; scales.len()],
        };
        let run = 96 / scales.len();
        for (at, found) in found.iter().enumerate() {
            let (token, out) = (at / 6, at % 6);
            let term = |i: usize| {
                let place = out * 16 + i;
                let steps = values[place] - zero_points[place / run];
                f64::from(x[token * 16 + i]) * steps * scales[place / run]
            };
            let expected: f64 = (0..16).map(term).sum();
            // Sums of 16 products of at most 1, in f32.
            assert!(
                (found - expected).abs() < 1e-6 * 4.0,
                "{format:?}: {found} {expected}"
            );
        }
    }
}

#[test]
fn what_is_kept_of_a_weight_is_its_integers() {
    for format in formats_of_weights() {
        let (graph, expected, _) = weight_only(format);
        let graph = graph.inline_composites(&|_, _| true);
        let staged = crate::graph::stage(&graph, &[]).unwrap();
        let largest = staged.step.inputs.iter().filter(|i| i.is_weight());
        let largest = largest.max_by_key(|i| i.shape.count()).unwrap();
        assert_eq!(largest.shape.dtype, format.element, "{format:?}");
        let ranges = |graph: &crate::graph::Graph| {
            let paths = graph.nodes.iter().map(|node| graph.path(node));
            paths.filter(|path| path.ends_with("range_finding")).count()
        };
        assert_eq!(
            ranges(&staged.step),
            0,
            "no step finds the range of a weight"
        );
        assert!(staged.load.iter().map(ranges).sum::<usize>() > 0);
        // The stages together are the program.
        let weight = HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap();
        let kept = evaluate(&staged.load[0], &[weight]).unwrap();
        let inputs: Vec<HostTensor> = staged
            .step
            .inputs
            .iter()
            .map(|input| {
                let outputs = &staged.load[0].outputs;
                match outputs.iter().position(|o| o.name == input.name) {
                    Some(at) => kept[at].clone(),
                    None => HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap(),
                }
            })
            .collect();
        let found = evaluate(&staged.step, &inputs).unwrap().remove(0);
        assert_eq!(found.to_f64_vec().unwrap(), expected, "{format:?}");
    }
}

#[test]
fn groups_that_do_not_divide_are_refused() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
    let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
    let policy = of_weights(TensorFormat {
        granularity: Granularity::Group(5),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    });
    b.output("y", y, None).unwrap();
    assert_eq!(
        annotate(&b, &policy).unwrap_err().to_string(),
        "unet/to_q: groups of 5 do not divide its 16 input features; nearest: 4 and 8; a rule of quant_rules gives this \
         layer others, or one scale a channel"
    );
}

/// `x W^T` with `W` `[6, 16]` used in `dtype`, lowered by `policy`.
fn lowered_linear(policy: &Policy, dtype: DType) -> crate::graph::Graph {
    let b = Builder::new();
    let x = b.input("x", Shape::new(dtype, [1, 4, 16]), &[]).unwrap();
    let at = b.root("unet").scope("to_q");
    let w = at.param("weight", f32s(&[6, 16]), Init::Ones, &[]).unwrap();
    let dims = DotDims {
        lhs_contract: vec![2],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let w = at.convert(w, dtype).unwrap();
    let y = at.dot_general(x, w, dims, DType::F32).unwrap();
    annotate(&b, policy).unwrap();
    b.output("y", y, None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    graph.inline_composites(&|_, _| true)
}

/// Rows of ordinary numbers, of ties, of one outlier, of zeros, of tiny numbers, and of large ones.
fn weight() -> HostTensor {
    let mut values = wave(96, 2.1);
    for (i, value) in values.iter_mut().enumerate() {
        *value = match i / 16 {
            1 => (i % 16) as f32 * 8.5 - 63.75,
            2 if i % 16 == 3 => 77.0,
            3 => 0.0,
            4 => *value * 1e-30,
            5 => *value * 1e30,
            _ => *value,
        };
    }
    HostTensor::from_f32([6, 16], &values).unwrap()
}

/// The integers and scales of the host are those that the load stage computes, in every granularity.
#[test]
fn weights_are_quantized_on_the_host_as_in_the_graph() {
    let formats = formats_of_weights().into_iter();
    let cases = formats.flat_map(|format| [DType::F32, DType::BF16].map(|dtype| (dtype, format)));
    for (dtype, format) in cases {
        let policy = of_weights(format);
        let staged = crate::graph::stage(&lowered_linear(&policy, dtype), &[]).unwrap();
        let kept = evaluate(&staged.load[0], &[weight()]).unwrap();
        let cast = crate::weights::cast(weight(), dtype).unwrap();
        let found = quantize_weight(&cast, format).unwrap();
        let what = format!("{dtype} {format:?}");
        let of_shape = |shape: &Shape| {
            let mut kept = kept
                .iter()
                .filter(|tensor| tensor.shape.dtype == shape.dtype);
            let tensor = kept.find(|tensor| tensor.shape.count() == shape.count());
            tensor.unwrap_or_else(|| panic!("{what}: no {shape}"))
        };
        assert_eq!(found.values.shape, Shape::new(format.element, [6, 16]));
        assert_eq!(
            found.values.data,
            of_shape(&found.values.shape).data,
            "{what}"
        );
        assert_eq!(
            found.scale.data,
            of_shape(&found.scale.shape).data,
            "{what}"
        );
        if let Some(zero_point) = &found.zero_point {
            assert_eq!(zero_point.data, of_shape(&zero_point.shape).data, "{what}");
        }
        assert_eq!(kept.len(), 2 + usize::from(format.zero_point), "{what}");
        let scales = found.scale.to_f64_vec().unwrap();
        let lowest = scales.iter().copied().fold(f64::MAX, f64::min);
        let highest = scales.iter().copied().fold(0.0, f64::max);
        assert_eq!(found.scale_range.map(f64::from), [lowest, highest]);
    }
}

/// Rows whose integers differ between conventions, computed by hand: with half a step above the highest integer their scale is 1.
#[test]
fn conventions_round_as_their_formulas_say() {
    let rows = [
        (DType::S8, [-127.5, 127.5, 63.5, 1.5, 126.6, 0.0]),
        (DType::S4, [-7.5, 7.5, 3.5, 1.5, 5.6, 0.0]),
    ];
    let cases: [(NumericsConvention, [[i32; 6]; 2]); 4] = [
        (
            NumericsConvention::Aqt,
            [[-127, 127, 64, 2, 127, 0], [-7, 7, 4, 2, 6, 0]],
        ),
        (
            NumericsConvention::Qwix,
            [[-128, 127, 64, 2, 127, 0], [-8, 7, 4, 2, 6, 0]],
        ),
        (
            NumericsConvention::Quark,
            [[-128, 127, 64, 2, 127, 0], [-8, 7, 4, 2, 6, 0]],
        ),
        // 63.5 / (127.5 / 127) is 63.25, 3.5 / (7.5 / 7) is 3.27.
        (
            NumericsConvention::Narrow,
            [[-127, 127, 63, 1, 126, 0], [-7, 7, 3, 1, 5, 0]],
        ),
    ];
    for (convention, expected) in cases {
        for ((element, row), expected) in rows.into_iter().zip(expected) {
            let format = TensorFormat {
                element,
                ..TensorFormat::int8(convention)
            };
            let weight = HostTensor::from_f32([1, 6], &row).unwrap();
            let found = quantize_weight(&weight, format).unwrap();
            let found = found.values.to_f64_vec().unwrap();
            assert_eq!(found, expected.map(f64::from), "{element} {convention}");
        }
    }
}

/// Numbers are divided by the scale, ties go to the even integer, and both ends are the highest integer.
#[test]
fn narrow_integers_are_quotients() {
    let int8 = TensorFormat::int8(NumericsConvention::Narrow);
    let int4 = TensorFormat {
        element: DType::S4,
        ..int8
    };
    assert_eq!((int8.bound(), int8.ends()), (127.0, [-127.0, 127.0]));
    assert_eq!((int4.bound(), int4.ends()), (7.0, [-7.0, 7.0]));
    let integers = |weight: &QuantizedWeight| weight.values.to_f64_vec().unwrap();
    // The scale is 7: 45.5 / 7 is 6.5, where its product with the reciprocal of 7 in f32 would be 6.5000005.
    for (format, row, expected) in [
        (
            int8,
            [889.0_f32, -889.0, 45.5, -45.5, 87.5, 10.5],
            [127.0_f64, -127.0, 6.0, -6.0, 12.0, 2.0],
        ),
        (
            int4,
            [49.0, -49.0, 45.5, -45.5, 31.5, 10.5],
            [7.0, -7.0, 6.0, -6.0, 4.0, 2.0],
        ),
    ] {
        // Beside it a row of zeros.
        let rows = [row, [0.0; 6]].concat();
        let weight = HostTensor::from_f32([2, 6], &rows).unwrap();
        let found = quantize_weight(&weight, format).unwrap();
        assert_eq!(integers(&found), [expected, [0.0; 6]].concat());
        assert_eq!(found.scale.to_f32_vec().unwrap(), [7.0, 1.0]);
    }
    let weight = HostTensor::from_f32([1, 6], &[889.0, -889.0, 45.5, -45.5, 87.5, 10.5]).unwrap();
    let given = WeightRounding {
        observer: Observer::default(),
        algorithm: RoundingAlgorithm::Given(&[0.5]),
    };
    let found = given.quantize(&weight, int8).unwrap();
    assert_eq!(integers(&found), [127.0, -127.0, 91.0, -91.0, 127.0, 21.0]);
    // In bf16 the scale is rounded to it, the quotients are not: 126.5 / 1.0078125 is 125.52.
    let weight = HostTensor::from_f32([1, 6], &[-127.5, 127.5, 63.5, 1.5, 126.5, 0.0]).unwrap();
    let weight = crate::weights::cast(weight, DType::BF16).unwrap();
    let found = quantize_weight(&weight, int8).unwrap();
    assert_eq!(found.scale.to_f32_vec().unwrap(), [1.0078125]);
    assert_eq!(integers(&found), [-127.0, 127.0, 63.0, 1.0, 126.0, 0.0]);
}

/// The same of an activation, whose scale is found while the program runs.
#[test]
fn narrow_activations_are_quotients() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[1, 1, 4]), &[]).unwrap();
    let y = linear(&b.root("unet").scope("to_q"), x, 4, 1);
    annotate(&b, &of_narrow_int8()).unwrap();
    b.output("y", y, None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    // 127, 6, -6 and 12 times 7; 127, 64, 0 and 2 times 1.
    let inputs = [
        HostTensor::from_f32([1, 1, 4], &[889.0, 45.5, -45.5, 87.5]).unwrap(),
        HostTensor::from_f32([1, 4], &[127.0, 63.5, -0.5, 2.5]).unwrap(),
    ];
    let found = evaluate(&graph, &inputs).unwrap().remove(0);
    let expected: i32 = 7 * (127 * 127 + 6 * 64 + 12 * 2);
    assert_eq!(found.to_f64_vec().unwrap(), [f64::from(expected)]);
}

#[test]
fn the_error_of_a_weight_is_measured() {
    let weight = HostTensor::from_f32([2, 3], &[1.0, 0.5, -0.25, 0.0, 0.0, 0.0]).unwrap();
    let quantized = quantize_weight(&weight, TensorFormat::int8(NumericsConvention::Aqt)).unwrap();
    let integers: Vec<i8> = quantized.values.data.iter().map(|b| *b as i8).collect();
    // 127.5, 63.75 and -31.875 are clipped to 127 and rounded.
    assert_eq!(integers, [127, 64, -32, 0, 0, 0]);
    assert_eq!(quantized.signal, 1.3125);
    let expected = (0.5f64.powi(2) + 0.25f64.powi(2) + 0.125f64.powi(2)) / 127.5f64.powi(2);
    assert!(
        (quantized.noise / expected - 1.0).abs() < 1e-4,
        "{}",
        quantized.noise
    );
    let db = 10.0 * (1.3125 / expected).log10();
    assert!((quantized.sqnr_db() - db).abs() < 1e-3);
    let zeros = HostTensor::zeros(f32s(&[2, 3]));
    let zeros = quantize_weight(&zeros, TensorFormat::int8(NumericsConvention::Aqt)).unwrap();
    assert_eq!(zeros.sqnr_db(), f64::INFINITY);
}

/// Many elements are split over threads; each of them has the scale of its row, or the one of all.
#[test]
fn large_weights_are_quantized_in_parts() {
    let (rows, columns) = (5, 50_001);
    let values: Vec<f32> = (0..rows * columns)
        .map(|i| ((i * 7919) % 10_007) as f32 - 5000.0)
        .collect();
    let weight = HostTensor::from_f32([rows, columns], &values).unwrap();
    for granularity in [Granularity::Tensor, Granularity::Channel] {
        let format = TensorFormat {
            granularity,
            ..TensorFormat::int8(NumericsConvention::Aqt)
        };
        let found = quantize_weight(&weight, format).unwrap();
        let scales = found.scale.to_f32_vec().unwrap();
        for (i, (value, integer)) in values.iter().zip(&found.values.data).enumerate() {
            let scale = scales[(i / columns).min(scales.len() - 1)];
            let expected = (value * scale.recip())
                .clamp(-127.0, 127.0)
                .round_ties_even();
            assert_eq!(f32::from(*integer as i8), expected, "{i}");
        }
    }
}

#[test]
fn weights_without_the_format_are_refused() {
    let int8 = TensorFormat::int8(NumericsConvention::Aqt);
    let group = TensorFormat {
        granularity: Granularity::Group(5),
        ..int8
    };
    let error =
        |weight: &HostTensor, format| quantize_weight(weight, format).unwrap_err().to_string();
    assert_eq!(
        error(&weight(), group),
        "its 16 input features are not a multiple of the group size 5; nearest: 4 and 8"
    );
    let infinite = HostTensor::from_f32([1, 2], &[1.0, f32::INFINITY]).unwrap();
    assert!(error(&infinite, int8).contains("too large for f32"));
    assert!(
        error(&HostTensor::zeros(Shape::scalar(DType::F32)), int8).contains("no output features")
    );
    let narrow = TensorFormat::int8(NumericsConvention::Narrow);
    for unknown in [
        TensorFormat {
            element: DType::U8,
            ..int8
        },
        TensorFormat {
            zero_point: true,
            ..int8
        },
        TensorFormat {
            zero_point: true,
            ..narrow
        },
        TensorFormat {
            element: DType::F8E4M3Fn,
            ..narrow
        },
    ] {
        assert!(error(&weight(), unknown).contains("not quantized here"));
    }
}

/// A weight that its checkpoint stores in int8 is an input with its scale: nothing is computed while it is loaded.
#[test]
fn stored_weights_are_inputs_with_their_scales() {
    let formats = formats_of_weights().into_iter();
    let cases = formats.flat_map(|format| [DType::F32, DType::BF16].map(|dtype| (dtype, format)));
    for (dtype, format) in cases {
        let policy = of_weights(format);
        let x = HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap();
        let x = crate::weights::cast(x, dtype).unwrap();
        let graph = lowered_linear(&policy, dtype);
        let expected = evaluate(&graph, &[x.clone(), weight()]).unwrap();

        let weight_format = TensorFormat {
            range: Range::Stored(dtype),
            ..format
        };
        let layer = StoredLayer {
            weight: weight_format,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let policy = Policy::stored("unet/", [("to_q".to_string(), layer)].into());
        let graph = lowered_linear(&policy, dtype);
        let cast = crate::weights::cast(weight(), dtype).unwrap();
        let quantized = quantize_weight(&cast, format).unwrap();
        let mut tensors = vec![x, quantized.values, quantized.scale];
        tensors.extend(quantized.zero_point);
        let inputs = graph.inputs.iter().map(|i| (i.name.as_str(), &i.shape));
        let names = ["", "", "_scale", "_zero_point"].map(|end| format!("unet/to_q.weight{end}"));
        let shapes = tensors.iter().map(|tensor| &tensor.shape);
        let expected_inputs = names.iter().map(String::as_str).zip(shapes).skip(1);
        assert!(inputs.skip(1).eq(expected_inputs), "{dtype} {format:?}");
        let found = evaluate(&graph, &tensors).unwrap();
        assert_eq!(found, expected, "{dtype} {format:?}");

        let staged = crate::graph::stage(&graph, &[]).unwrap();
        assert!(staged.load.is_empty());
        let types = |graph: &crate::graph::Graph| -> Vec<DType> {
            graph.inputs.iter().map(|i| i.shape.dtype).collect()
        };
        assert_eq!(types(&staged.step), types(&graph));
    }
}

/// The first rule that matches gives a layer its formats; a product of two activations has none of a weight alone.
#[test]
fn rules_give_layers_formats_of_their_own() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[2, 3, 8]), &[]).unwrap();
    let unet = b.root("unet");
    let of = |name: &str| linear(&unet.scope("blocks").scope(name), x, 8, 8);
    let [q, k, _] = ["to_q", "to_k", "ff"].map(of);
    let dims = DotDims {
        lhs_batch: vec![0],
        rhs_batch: vec![0],
        lhs_contract: vec![2],
        rhs_contract: vec![2],
    };
    let scores = unet.scope("blocks").scope("scores");
    scores.dot_general(q, k, dims, DType::F32).unwrap();
    let int8 = Formats::aqt_int8(0);
    let int4 = Formats::of_weights(TensorFormat {
        element: DType::S4,
        granularity: Granularity::Group(4),
        ..TensorFormat::int8(NumericsConvention::Quark)
    });
    let rule = |pattern: &str, action| Rule::new(pattern, action, true).unwrap();
    let rules = vec![
        rule(r".*\.to_k", Action::Float),
        rule(r"blocks\.to_.*", Action::Quantize(int8)),
        rule(".*", Action::Quantize(int4)),
    ];
    let policy = Policy::of_layers("unet/", rules, &[], Formats::aqt_int8(1)).unwrap();
    let decisions = annotate(&b, &policy).unwrap();
    let found: Vec<(&str, Option<Formats>)> = decisions
        .iter()
        .map(|d| (d.path.as_str(), d.formats))
        .collect();
    let expected = [
        ("blocks.to_q", Some(int8)),
        ("blocks.to_k", None),
        ("blocks.ff", Some(int4)),
        ("blocks.scores", None),
    ];
    assert_eq!(found, expected);

    let all = vec![rule(r".*scores", Action::Quantize(int4))];
    let qwix = Policy::qwix("unet/", ".*", all, Formats::qwix_int8()).unwrap();
    let error = annotate(&b, &qwix).unwrap_err().to_string();
    assert!(
        error.contains("'.*scores' matches no contraction of unet"),
        "{error}"
    );
}

#[test]
fn stored_layers_that_do_not_fit_the_model_are_refused() {
    let stored = TensorFormat {
        range: Range::Stored(DType::F32),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    let annotated = |paths: &[&str]| {
        let b = Builder::new();
        let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
        let layer = StoredLayer {
            weight: stored,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let layers = paths.iter().map(|path| ((*path).to_string(), layer));
        let policy = Policy::stored("unet/", layers.collect());
        let decisions = annotate(&b, &policy);
        b.output("y", y, None).unwrap();
        (decisions, b)
    };
    let (decisions, _) = annotated(&["to_q", "to_k", "to_v"]);
    assert_eq!(
        decisions.unwrap_err().to_string(),
        "the checkpoint says that 2 layers of unet are quantized, which has no such layers: to_k, to_v"
    );
    // The weight has a second use, in float.
    let (decisions, b) = annotated(&["to_q"]);
    decisions.unwrap();
    let at = b.root("unet").scope("to_q");
    let again = at.param("weight", f32s(&[6, 16]), Init::Ones, &[]).unwrap();
    b.output("again", at.neg(again).unwrap(), None).unwrap();
    assert_eq!(
        lower(&b.finish()).unwrap_err().to_string(),
        "unet/to_q: a weight that is stored quantized is used outside of its layer"
    );
}
