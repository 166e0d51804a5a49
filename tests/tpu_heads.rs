//! The TPU kernel for norms and positions of queries and keys, on the host.

use maxdiff::backend::tpu::claim;
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Op};
use maxdiff::nn::{Attention, Linear, Precision, RotaryTables, attention, linear, rms_norm};
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

/// Attention between projections, with `bias` in those of queries, keys and values: batch, heads, queries, keys, size of a head.
fn projected([batch, heads, queries, keys, size]: [usize; 5], bias: bool) -> Graph {
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
    b.finish()
}

/// Heads that fill no register get their zeros from weights: what is padded of activations are rows alone.
#[test]
fn heads_are_padded_in_weights() {
    let cases = [
        ([2, 3, 32, 128, 40], false, 0),
        ([1, 2, 64, 256, 80], true, 0),
        ([1, 1, 40, 77, 160], false, 3),
    ];
    for (dims, bias, of_rows) in cases {
        let graph = projected(dims, bias);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        let of_weights = kernel.weight_only();
        let nodes = || kernel.nodes.iter().zip(kernel.live_nodes()).enumerate();
        let of_activations = |wanted: fn(&Op) -> bool| {
            let found =
                nodes().filter(|(i, (node, live))| *live && wanted(&node.op) && !of_weights[*i]);
            found.count()
        };
        assert_eq!(
            of_activations(|op| matches!(op, Op::Pad { .. })),
            of_rows,
            "{dims:?}"
        );
        assert!(
            of_activations(|op| matches!(op, Op::Slice { .. })) <= of_rows,
            "{dims:?}"
        );
        assert!(calls(&kernel) >= 1, "{dims:?}");
        let error = distance(&graph, &kernel);
        assert!(error <= 6e-3, "{dims:?}: {error}");
    }
}
