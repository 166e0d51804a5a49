//! The TPU kernel for norms and positions of queries and keys, on the host.

use maxdiff::backend::tpu::{claim, pad_heads};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Granularity, Graph, NumericsConvention, Op, TensorFormat};
use maxdiff::lowering::Traced;
use maxdiff::nn::{Attention, Linear, Precision, RotaryTables, attention, linear, rms_norm};
use maxdiff::quant::{Formats, Policy, annotate, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

use crate::tpu_kernels::{calls, distance};

/// Two streams of heads as FLUX.1's blocks have them: each normed, one after the other, and rotated.
fn heads_with_positions(streams: &[usize], size: usize) -> Graph {
    let b = Builder::new();
    let positions: usize = streams.iter().sum();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let streams = streams.iter().enumerate().map(|(i, rows)| {
        let shape = Shape::new(DType::BF16, [2, *rows, 3 * size]);
        let x = b.input(&format!("x{i}"), shape, &[]).unwrap();
        let x = b.reshape(x, &[2, *rows, 3, size]).unwrap();
        rms_norm(&m.scope(format!("norm{i}")), x, 1e-6, precision).unwrap()
    });
    let x = b.concatenate(&streams.collect::<Vec<_>>(), 1).unwrap();
    let ids = b.input("ids", Shape::new(DType::F32, [positions, 2]), &[]);
    let tables = RotaryTables::new(&m, ids.unwrap(), &[size / 4, size - size / 4]).unwrap();
    let y = tables.apply(&m, x).unwrap();
    let y = b.reshape(y, &[2, positions, 3 * size]).unwrap();
    b.output("y", y, None).unwrap();
    b.finish()
}

#[test]
fn heads_are_normed_and_rotated_in_kernels() {
    // A norm for each stream, and the rotation of both.
    for (streams, kernels) in [(&[48][..], 2), (&[16, 32], 3)] {
        let graph = heads_with_positions(streams, 128);
        let kernel = claim(&graph, Chip::V4.features(), 2).unwrap();
        assert_eq!(calls(&kernel), kernels);
        let error = distance(&graph, &kernel);
        assert!(error <= 2e-3, "{streams:?}: {error}");
    }
    // Other sizes of heads and positions that fill no tile are the compiler's.
    for (streams, size) in [(&[48][..], 64), (&[24], 128)] {
        let graph = heads_with_positions(streams, size);
        assert_eq!(calls(&claim(&graph, Chip::V4.features(), 1).unwrap()), 0);
    }
}

/// Attention between projections, with `bias` in them, whose contractions are marked for int8 if asked for: batch, heads, queries, keys,
/// size of a head.
fn projected([batch, heads, queries, keys, size]: [usize; 5], bias: bool, int8: bool) -> Graph {
    let b = Builder::new();
    let features = heads * size;
    let input = |name: &str, rows: usize| {
        let shape = Shape::new(DType::BF16, [batch, rows, features]);
        b.input(name, shape, &[]).unwrap()
    };
    let (x, context) = (input("x", queries), input("context", keys));
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let project = |name: &str, x| {
        let layer = Linear::new(features, "embed", "heads");
        let layer = if bias { layer } else { layer.without_bias() };
        linear(&m.scope(name), x, layer, precision).unwrap()
    };
    let qkv = [
        project("q", x),
        project("k", context),
        project("v", context),
    ];
    let spec = Attention {
        heads,
        causal: false,
    };
    let y = attention(&m, qkv, spec, precision).unwrap();
    let y = project("out", y);
    b.output("y", m.add(y, x).unwrap(), None).unwrap();
    let traced = Traced::new("layer", b.finish());
    let policy = Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap();
    let traced = traced.quantized(int8.then_some(&policy)).unwrap();
    traced.graph
}

/// Heads that fill no register get their zeros from weights, before these are quantized: what is padded of activations are rows alone.
#[test]
fn heads_are_padded_in_weights() {
    let cases = [
        ([2, 3, 32, 128, 40], false),
        ([1, 2, 64, 256, 80], true),
        ([1, 1, 40, 77, 160], false),
    ];
    let all = cases
        .into_iter()
        .flat_map(|case| [(case, false), (case, true)]);
    for ((dims, bias), int8) in all {
        let graph = projected(dims, bias, int8);
        let features = Chip::V5e.features();
        let padded = pad_heads(&graph, features, 1).unwrap();
        let kernel = claim(&lower(&padded).unwrap(), features, 1).unwrap();
        let of_weights = kernel.weight_only();
        let nodes = kernel.nodes.iter().zip(kernel.live_nodes()).enumerate();
        for (_, (node, _)) in nodes.filter(|(i, (_, live))| *live && !of_weights[*i]) {
            if matches!(node.op, Op::Pad { .. } | Op::Slice { .. }) {
                let from = &kernel.nodes[node.operands[0] as usize].shape;
                assert_eq!(node.shape.dims[2..], from.dims[2..], "{dims:?} {int8}");
            }
        }
        assert_ne!(calls(&kernel), 0, "{dims:?} {int8}");
        let error = distance(&lower(&graph).unwrap(), &kernel);
        let limit = if int8 { 2e-2 } else { 6e-3 };
        assert!(error <= limit, "{dims:?} {int8}: {error}");
    }
}

/// Qwix's rules quantize the products of attention, which the kernel multiplies in float.
#[test]
fn quantized_attention_is_no_kernel() {
    let b = Builder::resume(projected([1, 2, 64, 256, 80], false, false));
    let policy = Policy::qwix("m/", ".*", Vec::new(), Formats::aqt_int8(1)).unwrap();
    annotate(&b, &policy).unwrap();
    let padded = pad_heads(&b.finish(), Chip::V5e.features(), 1).unwrap();
    assert_eq!(calls(&padded), 0);
}

/// Scales of groups of features would be others with zeros among them.
#[test]
fn heads_of_grouped_weights_are_padded_themselves() {
    let graph = projected([1, 2, 64, 256, 80], false, false);
    let b = Builder::resume(graph);
    let groups = TensorFormat {
        granularity: Granularity::Group(16),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    let formats = Formats::of_weights(groups);
    let policy = Policy::of_layers("m/", Vec::new(), &[], formats).unwrap();
    annotate(&b, &policy).unwrap();
    let graph = b.finish();
    let padded = pad_heads(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!(calls(&padded), 0);
}
