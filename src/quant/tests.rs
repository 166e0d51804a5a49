//! Rules, and what they give layers.

mod convolutions;
mod training;
mod weights;

use super::*;
use crate::dtype::DType;
use crate::graph::{DotDims, Granularity, Init, Tensor, evaluate};
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
