//! The TPU kernel for norms and positions of queries and keys, on the host.

use maxdiff::backend::tpu::claim;
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph};
use maxdiff::nn::{Precision, RotaryTables, rms_norm};
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
