//! What is computed: merged weights, stacked factors, products beside weights.

use super::*;
use crate::graph::{Builder, Init, Keeps, evaluate};
use crate::nn::{Conv2d, Linear, Precision, conv2d, linear};
use crate::quant::{self, Policy};
use crate::shape::Shape;

/// `w + scale * up @ down` in `f64`; kernels are part of the input dimension.
fn expected(w: &HostTensor, updates: &[(&HostTensor, &HostTensor, f64)]) -> Vec<f64> {
    let mut sum = w.to_f64_vec().unwrap();
    let columns = sum.len() / w.shape.dims[0];
    for (down, up, scale) in updates {
        let rank = down.shape.dims[0];
        let (down, up) = (down.to_f64_vec().unwrap(), up.to_f64_vec().unwrap());
        for (place, value) in sum.iter_mut().enumerate() {
            let (row, column) = (place / columns, place % columns);
            let product: f64 = (0..rank)
                .map(|r| up[row * rank + r] * down[r * columns + column])
                .sum();
            *value += scale * product;
        }
    }
    sum
}

fn assert_near(found: &HostTensor, expected: &[f64], tolerance: f64) {
    let found = found.to_f64_vec().unwrap();
    assert_eq!(found.len(), expected.len());
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance, "{f} {e}");
    }
}

/// Two files, which change `conv_in` both and one of them `to_q` (with a 1x1 kernel) and the text encoder.
fn two_files() -> Adapter {
    let conv: [(&str, &[usize]); 3] = [
        ("lora_unet_conv_in.lora_down.weight", &[4, 4, 3, 3]),
        ("lora_unet_conv_in.lora_up.weight", &[320, 4, 1, 1]),
        ("lora_unet_conv_in.alpha", &[]),
    ];
    let q = format!(
        "lora_unet_{}",
        TO_Q.trim_end_matches(".weight").replace('.', "_")
    );
    let (q_down, q_up) = (
        format!("{q}.lora_down.weight"),
        format!("{q}.lora_up.weight"),
    );
    let text = "lora_te_text_model_encoder_layers_0_self_attn_q_proj";
    let (text_down, text_up) = (
        format!("{text}.lora_down.weight"),
        format!("{text}.lora_up.weight"),
    );
    let mut first = conv.to_vec();
    first.extend([
        (q_down.as_str(), &[2, 320, 1, 1][..]),
        (&q_up, &[320, 2, 1, 1]),
    ]);
    first.extend([(text_down.as_str(), &[1, 768][..]), (&text_up, &[768, 1])]);
    let scale = LoraScale {
        unet: 0.5,
        text_encoder: -2.0,
    };
    let first = open(&first, &[]).unwrap().resolve(&SD15, scale).unwrap();
    let second = open(&conv[..2], &[])
        .unwrap()
        .resolve(&SD15, 3.0.into())
        .unwrap();
    Adapter::stack([first, second]).unwrap()
}

#[test]
fn updates_are_added_with_their_scales() {
    let adapter = two_files();
    let text = "text_model.encoder.layers.0.self_attn.q_proj.weight";
    let ranks = [
        ("text_encoder/", text, 1),
        ("unet/", "conv_in.weight", 8),
        ("unet/", TO_Q, 2),
    ];
    assert_eq!(
        adapter.ranks(),
        ranks
            .map(|(root, key, rank)| (format!("{root}{key}"), rank))
            .into()
    );

    // Factor `i` of a file has seed `i`.
    let (down, up) = (tensor(&[4, 4, 3, 3], 0), tensor(&[320, 4, 1, 1], 1));
    let w = tensor(&[320, 4, 3, 3], 9);
    let found = adapter.apply("unet", "conv_in.weight", w.clone()).unwrap();
    let alpha_over_rank = 0.25;
    let sum = expected(
        &w,
        &[(&down, &up, 0.5 * alpha_over_rank), (&down, &up, 3.0)],
    );
    assert_eq!(found.shape, w.shape);
    assert_near(&found, &sum, 1e-5);
    assert!(
        sum.iter()
            .zip(w.to_f64_vec().unwrap())
            .any(|(a, b)| (a - b).abs() > 0.1)
    );

    let w = tensor(&[320, 320], 9);
    let found = adapter.apply("unet", TO_Q, w.clone()).unwrap();
    let (down, up) = (tensor(&[2, 320], 3), tensor(&[320, 2], 4));
    assert_near(&found, &expected(&w, &[(&down, &up, 0.5)]), 1e-6);

    let w = tensor(&[768, 768], 9);
    let found = adapter.apply("text_encoder", text, w.clone()).unwrap();
    let (down, up) = (tensor(&[1, 768], 5), tensor(&[768, 1], 6));
    assert_near(&found, &expected(&w, &[(&down, &up, -2.0)]), 1e-6);

    let untouched = tensor(&[320, 768], 9);
    assert!(adapter.apply("unet", TO_K, untouched.clone()).unwrap() == untouched);
    assert_eq!(adapter.factors("unet", TO_K).unwrap(), None);
}

#[test]
fn adapters_of_different_models_do_not_stack() {
    let tensors: [(&str, &[usize]); 2] = [
        ("unet.conv_in.lora_A.weight", &[2, 4, 3, 3]),
        ("unet.conv_in.lora_B.weight", &[320, 2, 1, 1]),
    ];
    let inpainting: [(&str, &[usize]); 2] = [
        ("unet.conv_in.lora_A.weight", &[2, 9, 3, 3]),
        ("unet.conv_in.lora_B.weight", &[320, 2, 1, 1]),
    ];
    let other = LoraTarget {
        dims: &[320, 9, 3, 3],
        ..SD15[0]
    };
    let first = open(&tensors, &[]).unwrap().resolve(&SD15, 1.0.into());
    let second = open(&inpainting, &[])
        .unwrap()
        .resolve(&[other], 1.0.into());
    let text = message(Adapter::stack([first.unwrap(), second.unwrap()]));
    assert!(text.contains("[320, 9, 3, 3] given"), "{text}");
}

#[test]
fn halves_are_rounded_once() {
    let adapter = two_files();
    for dtype in [DType::BF16, DType::F16] {
        let w = tensor(&[320, 320], 9).convert(dtype).unwrap();
        let found = adapter.apply("unet", TO_Q, w.clone()).unwrap();
        assert_eq!(found.shape.dtype, dtype);
        let wide = adapter
            .apply("unet", TO_Q, w.convert(DType::F32).unwrap())
            .unwrap();
        let once: Vec<u8> = wide
            .to_f32_vec()
            .unwrap()
            .into_iter()
            .flat_map(|v| match dtype {
                DType::BF16 => half::bf16::from_f32(v).to_le_bytes(),
                _ => half::f16::from_f32(v).to_le_bytes(),
            })
            .collect();
        assert!(found.data == once, "{dtype}");
    }
    let ints = HostTensor::zeros(Shape::new(DType::S8, [320, 320]));
    let text = message(adapter.apply("unet", TO_Q, ints));
    assert!(
        text.contains("cannot be merged into elements of type s8"),
        "{text}"
    );
    let text = message(adapter.apply("unet", TO_Q, tensor(&[320, 4], 0)));
    assert_eq!(
        text,
        format!("unet/{TO_Q}: [320, 4] given, but the LoRA was resolved for [320, 320]")
    );
}

#[test]
fn stacked_factors_make_the_whole_update() {
    let adapter = two_files();
    for (key, dims, rank) in [
        ("conv_in.weight", &[320, 4, 3, 3][..], 8),
        (TO_Q, &[320, 320], 2),
    ] {
        let factors = adapter.factors("unet", key).unwrap().unwrap();
        assert_eq!(factors.up.shape.dims, [320, rank]);
        assert_eq!(factors.down.shape.dims, [&[rank], &dims[1..]].concat());
        let w = tensor(dims, 9);
        let sum = expected(&w, &[(&factors.down, &factors.up, 1.0)]);
        assert_near(&adapter.apply("unet", key, w).unwrap(), &sum, 1e-5);
    }
}

/// A program of a linear layer or a convolution, its weights by name, and `x`.
fn layer_program(kernel: bool, precision: Precision, int8: bool) -> Builder {
    let b = Builder::new();
    let x = |dims: &[usize]| b.input("x", Shape::new(DType::F32, dims), &[]).unwrap();
    let at = b.root("unet").scope("block").scope("layer");
    let y = if kernel {
        let conv = Conv2d {
            stride: 2,
            ..Conv2d::same(5, 3)
        };
        conv2d(&at, x(&[2, 6, 4, 3]), conv, precision).unwrap()
    } else {
        linear(
            &at,
            x(&[2, 7, 3]),
            Linear::new(5, "embed", "heads"),
            precision,
        )
        .unwrap()
    };
    if int8 {
        quant::annotate(
            &b,
            &Policy::aqt_int8(
                "unet/",
                0,
                Vec::new(),
                &crate::models::unet::INT8_FLOAT_LAYERS,
            )
            .unwrap(),
        )
        .unwrap();
    }
    b.output("y", b.convert(y, DType::F32).unwrap(), None)
        .unwrap();
    b
}

#[test]
fn beside_a_weight_the_product_is_that_of_the_merged_weight() {
    let ranks = BTreeMap::from([("unet/block.layer.weight".to_owned(), 2)]);
    for kernel in [false, true] {
        let tail: &[usize] = if kernel { &[3, 3] } else { &[] };
        let of = |first: &[usize], seed| tensor(&[first, tail].concat(), seed);
        let (w, down, up, bias) = (
            of(&[5, 3], 1),
            of(&[2, 3], 2),
            tensor(&[5, 2], 3),
            tensor(&[5], 4),
        );
        let merged = expected(&w, &[(&down, &up, 1.0)]);
        let merged = HostTensor::from_f64(w.shape.clone(), &merged).unwrap();
        let run = |graph: &crate::graph::Graph, w: &HostTensor| {
            let inputs: Vec<HostTensor> = graph
                .inputs
                .iter()
                .map(|input| match input.name.as_str() {
                    "x" => tensor(&input.shape.dims, 5),
                    "unet/block.layer.weight" => w.clone(),
                    "unet/block.layer.bias" => bias.clone(),
                    "unet/block.layer.lora_down.weight" => down.clone(),
                    "unet/block.layer.lora_up.weight" => up.clone(),
                    other => panic!("{other}"),
                })
                .collect();
            assert!(
                graph
                    .inputs
                    .iter()
                    .zip(&inputs)
                    .all(|(i, v)| i.shape == v.shape)
            );
            evaluate(graph, &inputs).unwrap().remove(0)
        };
        let float = layer_program(kernel, Precision::F32, false).finish();
        let with = beside(&float, &ranks, 1.0).unwrap();
        let sum = run(&float, &merged).to_f64_vec().unwrap();
        assert_near(&run(&with, &w), &sum, 1e-5);

        // The integers of the base do not change, and the update is not rounded to any.
        let int8 = layer_program(kernel, Precision::F32, true).finish();
        let base = run(&quant::lower(&int8).unwrap(), &w).to_f64_vec().unwrap();
        let with = beside(&int8, &ranks, 1.0).unwrap();
        let float_base = run(&float, &w).to_f64_vec().unwrap();
        let update: Vec<f64> = sum
            .iter()
            .zip(float_base)
            .zip(&base)
            .map(|((s, f), b)| s - f + b)
            .collect();
        assert_near(&run(&quant::lower(&with).unwrap(), &w), &update, 1e-5);

        let axes = |name: &str| {
            with.inputs[with.input_index(name).unwrap()]
                .logical_axes
                .clone()
        };
        let (down, up) = (
            axes("unet/block.layer.lora_down.weight"),
            axes("unet/block.layer.lora_up.weight"),
        );
        if kernel {
            assert_eq!(
                down,
                [None, Some("conv_in"), Some("keep_1"), Some("keep_2")]
            );
            assert_eq!(up, [Some("conv_out"), None]);
        } else {
            assert_eq!(
                (down, up),
                (vec![None, Some("embed")], vec![Some("heads"), None])
            );
        }
    }
}

#[test]
fn beside_a_weight_products_are_of_the_activations_type() {
    let precision = Precision {
        weights: DType::F32,
        activations: DType::BF16,
    };
    let ranks = BTreeMap::from([("unet/block.layer.weight".to_owned(), 2)]);
    let graph = beside(
        &layer_program(false, precision, false).finish(),
        &ranks,
        1.0,
    )
    .unwrap();
    let dots: Vec<_> = graph
        .nodes
        .iter()
        .filter(|n| n.op.name() == "dot_general")
        .collect();
    assert_eq!(dots.len(), 3);
    for dot in dots {
        assert_eq!(dot.shape.dtype, DType::F32);
        assert!(
            dot.operands
                .iter()
                .all(|&o| graph.nodes[o as usize].shape.dtype == DType::BF16)
        );
    }
}

#[test]
fn a_weight_that_no_contraction_takes_is_named() {
    let graph = layer_program(false, Precision::F32, false).finish();
    let ranks = |name: &str| BTreeMap::from([(name.to_owned(), 2)]);
    let text = beside(&graph, &ranks("unet/block.layer.bias"), 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("no dot or convolution takes unet/block.layer.bias"),
        "{text}"
    );
}

/// With recomputation of activations, what stands beside a layer is recomputed with it.
#[test]
fn updates_are_recomputed_where_their_layer_is() {
    let b = Builder::new();
    let x = b.input("x", Shape::new(DType::F32, [2, 4]), &[]).unwrap();
    let layer = b.root("unet").checkpoint(Keeps::Nothing);
    let shape = Shape::new(DType::F32, [3, 4]);
    let weight = layer.param("weight", shape, Init::Zeros, &[]).unwrap();
    let dims = crate::graph::DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..Default::default()
    };
    let y = layer.dot_general(x, weight, dims, DType::F32).unwrap();
    b.output("y", y, None).unwrap();
    let graph = b.finish();
    let ranks = LoraRanks::from([(graph.inputs[1].name.clone(), 2)]);
    let with = beside(&graph, &ranks, 3.0).unwrap();
    let computed = with.nodes.iter().filter(|node| !node.operands.is_empty());
    let regions = computed.map(|node| node.remat.map(|remat| remat.region));
    let regions: Vec<Option<u32>> = regions.collect();
    assert!(regions.len() >= 5, "{regions:?}");
    assert!(
        regions.iter().all(|region| *region == Some(0)),
        "{regions:?}"
    );
}
