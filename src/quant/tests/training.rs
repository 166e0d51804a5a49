//! Training steps of linear layers in int8 and fp8.

use super::*;
use crate::graph::{Arithmetic, grad};

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
    // Eight sums of four integers: two keys may round to the same.
    let differ = runs.iter().filter(|run| **run != runs[0]).count();
    assert!(differ > 200, "{differ} of 400 keys round otherwise");
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
