//! Convolutions of images whose pixels are repeated.

use crate::common::{cpu_session, run_on};
use maxdiff::backend::cpu::claim;
use maxdiff::backend::cpu::kernel::Kernel;
use maxdiff::graph::{Builder, Tensor, evaluate};
use maxdiff::nn::{Precision, upsample_2x};
use maxdiff::shape::Shape;

use super::{BF16, graph_of, inputs, kernels, on_device, relative};

/// Images whose pixels are repeated before a convolution, up to this height and width.
fn doubled_to(b: &Builder, precision: Precision, size: [usize; 2]) -> Vec<Tensor> {
    let image = Shape::new(precision.activations, [2, 5, 16, 64]);
    let image = b.input("image", image, &[]).unwrap();
    vec![upsample_2x(&b.root("m"), image, size, precision).unwrap()]
}

#[test]
fn a_convolution_of_a_doubled_image_is_four_of_the_image() {
    for (precision, most) in [(BF16, 5e-3), (Precision::F32, 1e-6)] {
        let graph = graph_of(|b| doubled_to(b, precision, [10, 32]), false);
        let with = claim(&graph).unwrap();
        let windows = kernels(&with).into_iter().map(|kernel| match kernel {
            Kernel::Contract(contract) => contract.window.as_ref().unwrap().padding,
            other => panic!("{other:?}"),
        });
        let windows: Vec<_> = windows.collect();
        let [even, odd] = [(1, 0), (0, 1)];
        let phases = [[even, even], [even, odd], [odd, even], [odd, odd]];
        assert_eq!(windows, phases, "{precision:?}");
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &inputs);
        for found in [&evaluate(&with, &inputs).unwrap()[0], &device[0]] {
            // Sums of two weights are rounded to bf16.
            let error = relative(found, &expected[0]);
            assert!(error <= most, "{precision:?}: {error}");
        }
    }
}

#[test]
fn other_convolutions_of_doubled_images_see_the_doubled_image() {
    let odd = graph_of(|b| doubled_to(b, BF16, [9, 32]), false);
    let in_int8 = graph_of(|b| doubled_to(b, BF16, [10, 32]), true);
    for graph in [odd, in_int8] {
        let with = claim(&graph).unwrap();
        let sizes = kernels(&with)
            .into_iter()
            .filter_map(|kernel| match kernel {
                Kernel::Contract(contract) => Some(contract.window.as_ref().unwrap().size),
                _ => None,
            });
        assert_eq!(sizes.collect::<Vec<_>>(), [[3, 3]]);
    }
}
