//! Kernels of images: convolutions in int8, norms, and what is around them.

use maxdiff::backend::tpu::claim;
use maxdiff::dtype::DType;
use maxdiff::graph::{Binary, Builder, Graph, Op, Tensor, evaluate};
use maxdiff::host_tensor::HostTensor;
use maxdiff::kernels::{Case, Layer, LayerQuantization};
use maxdiff::nn::{
    Activation, Conv2d, GroupNorm, Precision, conv2d, group_norm, upsample_nearest_2x,
};
use maxdiff::quant::lower;
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

use super::{STORED, alone, alone_in, calls, distance, inputs, lowered, names};

/// A 3x3 convolution of int8 with its bias.
pub(super) fn convolution([batch, height, width, inputs, outputs]: [usize; 5]) -> Graph {
    convolution_of([batch, height, width, inputs, outputs, 3])
}

/// A convolution of int8 with its bias; the last of the sizes is the kernel's side.
fn convolution_of(dims: [usize; 6]) -> Graph {
    alone(Layer::Conv2d, &dims, true)
}

#[test]
fn an_int8_convolution_is_its_body() {
    // One block; several images, channels that fill no register; several blocks of rows, several of outputs. Each with
    // the kernel that finds the ranges of the images.
    let cases = [
        [1, 2, 32, 8, 16, 3],
        [3, 3, 32, 20, 30, 3],
        // The range of weights whose numbers fill tiles is not the kernel's.
        [1, 2, 32, 16, 16, 3],
        [1, 64, 32, 5, 7, 3],
        [1, 2, 32, 8, 1536, 3],
        [3, 3, 32, 20, 30, 1],
        [1, 64, 32, 5, 7, 1],
        [1, 2, 32, 8, 1536, 1],
    ];
    for case in cases {
        let graph = convolution_of(case);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 2, "{case:?}");
        let mut inputs = inputs(&graph);
        let mut x = inputs[0].to_f64_vec().unwrap();
        if case[0] > 1 {
            // An image of zeros, and one whose scale has no finite reciprocal.
            let each = x.len() / case[0];
            x[..each].fill(0.0);
            x[each..2 * each].fill(2f64.powi(-130));
        }
        inputs[0] = HostTensor::from_f64(inputs[0].shape.clone(), &x).unwrap();
        let [expected, found] = [&graph, &kernel].map(|g| {
            let values = evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap();
            values.iter().map(|y| y.to_bits()).collect::<Vec<u64>>()
        });
        assert_eq!(found, expected, "{case:?}");
    }
}

#[test]
fn convolutions_that_the_kernel_does_not_compute_stay() {
    // Rows of pixels that fill no tile, whose ranges are found all the same where all together fill tiles; a chip without
    // int8.
    let cases = [
        ([1, 4, 40, 8, 8], Chip::V5e, 1),
        ([1, 3, 40, 8, 8], Chip::V5e, 0),
        ([1, 4, 32, 8, 8], Chip::V4, 0),
    ];
    for (case, chip, ranges) in cases {
        let kernel = claim(&convolution(case), chip.features(), 1).unwrap();
        assert_eq!(calls(&kernel), ranges, "{case:?}");
    }
}

/// Convolutions of `channels` channels, in int8 or in bf16, with a kernel of `side`, and what is added to them.
fn sums_of_convolutions(channels: usize, side: usize, int8: bool) -> Graph {
    let b = Builder::new();
    let image = [2, 4, 32, channels];
    let x = b.input("x", Shape::new(DType::BF16, image), &[]).unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let conv =
        |name: &str| conv2d(&m.scope(name), x, Conv2d::same(channels, side), precision).unwrap();
    let two = b.add(conv("one"), conv("two")).unwrap();
    let y = b.add(conv("three"), b.add(x, two).unwrap()).unwrap();
    // The same for all pixels of an image.
    let time = Shape::new(DType::BF16, [2, channels]);
    let time = b.input("time", time, &[]).unwrap();
    let over_pixels = b.broadcast_in_dim(time, &[0, 3], &image).unwrap();
    let four = b.add(conv("four"), over_pixels).unwrap();
    let y = b.add(y, four).unwrap();
    b.output("y", y, None).unwrap();
    lowered(b, int8)
}

#[test]
fn a_convolution_takes_the_sum_that_follows_it() {
    // In int8 each convolution has its range beside it.
    let cases = [(24, 3, true, 8, 0.0), (128, 1, false, 4, 2e-3)];
    for (channels, side, int8, count, tolerance) in cases {
        let graph = sums_of_convolutions(channels, side, int8);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        let nodes = kernel.nodes.iter().zip(kernel.live_nodes());
        let is_sum = |op: &Op| matches!(op, Op::Binary(Binary::Add));
        let left = nodes.filter(|(node, live)| *live && is_sum(&node.op));
        // What is left is `x + two` and the last sum.
        assert_eq!((calls(&kernel), left.count()), (count, 2));
        let error = distance(&graph, &kernel);
        assert!(error <= tolerance, "{channels} channels: {error}");
    }
}

/// A layer of images alone, by its dimensions in order.
fn of_images(layer: Layer, dims: &[usize]) -> Graph {
    let names = layer.dims().iter().map(|(name, _)| name);
    let pairs = names.zip(dims);
    let given: Vec<String> = pairs.map(|(name, size)| format!("{name}={size}")).collect();
    let case = Case::new(layer, &given, None).unwrap();
    lower(&case.traced().unwrap().graph).unwrap()
}

#[test]
fn a_group_norm_is_its_body() {
    // Several images and blocks; channels that fill no register, several parts of channels, a group that crosses them.
    let cases = [
        [3, 4, 8, 24, 3],
        [1, 64, 64, 320, 32],
        [2, 4, 4, 1280, 32],
        [1, 2, 8, 640, 5],
    ];
    for case in cases {
        for (layer, limit) in [(Layer::GroupNorm, 1e-3), (Layer::GroupNormSilu, 4e-3)] {
            let graph = of_images(layer, &case);
            let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
            assert_eq!(calls(&kernel), 2, "{case:?}");
            // Where sums in another order round otherwise; the body rounds within SiLU too, the kernel after it.
            let error = distance(&graph, &kernel);
            assert!(error <= limit, "{layer} {case:?}: {error}");
        }
    }
    // Pixels that fill no tile.
    let graph = of_images(Layer::GroupNorm, &[1, 3, 5, 32, 4]);
    assert_eq!(calls(&claim(&graph, Chip::V5e.features(), 1).unwrap()), 0);
}

/// The norm and the int8 convolution of two images' channels, one after the other.
fn joined(channels: [usize; 2]) -> Graph {
    let b = Builder::new();
    let images = ["a", "c"].into_iter().zip(channels);
    let images = images.map(|(name, channels)| {
        let shape = Shape::new(DType::BF16, [2, 4, 32, channels]);
        b.input(name, shape, &[]).unwrap()
    });
    let images: Vec<Tensor> = images.collect();
    let x = b.concatenate(&images, 3).unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let norm = GroupNorm {
        groups: 4,
        epsilon: 1e-5,
        activation: Some(Activation::Silu),
    };
    let y = group_norm(&m.scope("norm"), x, norm, precision).unwrap();
    let y = conv2d(&m.scope("conv"), y, Conv2d::same(24, 3), precision).unwrap();
    b.output("y", y, None).unwrap();
    lowered(b, true)
}

#[test]
fn channels_side_by_side_are_their_concatenation() {
    // Norm and convolution are two kernels each; channels that fill no register are left to the compiler.
    for (channels, expected) in [([128, 24], 5), ([24, 128], 4)] {
        let graph = joined(channels);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!(calls(&kernel), expected, "{channels:?}");
        // A number of the norm that rounds otherwise may be another integer.
        let error = distance(&graph, &kernel);
        assert!(error <= 1e-2, "{channels:?}: {error}");
    }
}

#[test]
fn norms_between_the_compilers_convolutions_stay() {
    let b = Builder::new();
    let x = b
        .input("x", Shape::new(DType::BF16, [1, 4, 32, 16]), &[])
        .unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let norm = GroupNorm {
        groups: 4,
        epsilon: 1e-5,
        activation: None,
    };
    let m = b.root("m");
    let y = group_norm(&m.scope("norm"), x, norm, precision).unwrap();
    let y = upsample_nearest_2x(&m, y).unwrap();
    let y = conv2d(&m.scope("conv"), y, Conv2d::same(16, 3), precision).unwrap();
    b.output("y", y, None).unwrap();
    assert_eq!(
        calls(&claim(&b.finish(), Chip::V5e.features(), 1).unwrap()),
        0
    );
}

#[test]
fn silu_of_numbers_far_from_zero_is_its_body() {
    let graph = of_images(Layer::GroupNormSilu, &[1, 16, 16, 1, 1]);
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    let mut inputs = inputs(&graph);
    for (input, value) in graph.inputs.iter().zip(&mut inputs) {
        let count = input.shape.count();
        let values = match input.name.as_str() {
            // Up to 11 deviations from the mean.
            "x" => (0..count)
                .map(|i| [1.0, -1.0][i % 2] * f64::from(u8::from(i < 2)))
                .collect(),
            _ => vec![1e5; count],
        };
        *value = HostTensor::from_f64(input.shape.clone(), &values).unwrap();
    }
    let [expected, found] =
        [&graph, &kernel].map(|g| evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap());
    assert!(
        expected[0] > 1e6 && expected[1].abs() < 1e-30,
        "{:?}",
        &expected[..2]
    );
    for (expected, found) in expected.iter().zip(&found) {
        let near = (expected - found).abs() <= 4e-3 * expected.abs() + 1e-30;
        assert!(near, "{expected} {found}");
    }
}

#[test]
fn upsampling_is_its_body() {
    for case in [[2, 3, 16, 24], [1, 1, 48, 320]] {
        let graph = of_images(Layer::UpsampleNearest2x, &case);
        let kernel = claim(&graph, Chip::V4.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 1, "{case:?}");
        assert_eq!(distance(&graph, &kernel), 0.0, "{case:?}");
    }
    let graph = of_images(Layer::UpsampleNearest2x, &[1, 3, 5, 8]);
    assert_eq!(calls(&claim(&graph, Chip::V4.features(), 1).unwrap()), 0);
}

#[test]
fn a_convolution_of_a_doubled_image_reads_the_image_itself() {
    // One block; several images and an odd number of rows; several blocks of rows; several of outputs.
    let cases = [
        (Chip::V5e, [1, 2, 32, 128]),
        (Chip::V5e, [2, 3, 64, 128]),
        (Chip::V5e, [1, 34, 64, 128]),
        (Chip::V4, [1, 1, 32, 512]),
    ];
    for (chip, case) in cases {
        let graph = of_images(Layer::Upsample2x, &case);
        let kernel = claim(&graph, chip.features(), 1).unwrap();
        assert_eq!(names(&kernel), ["doubled_convolution"], "{case:?}");
        // Sums of two weights are rounded to bf16.
        let error = distance(&graph, &kernel);
        assert!(error <= 5e-3, "{case:?}: {error}");
    }
}

#[test]
fn other_convolutions_of_doubled_images_read_the_doubled_image() {
    let [rows_of_no_tiles, channels_of_no_registers] =
        [[1, 4, 16, 128], [1, 2, 32, 136]].map(|case| of_images(Layer::Upsample2x, &case));
    let in_int8 = alone(Layer::Upsample2x, &[1, 2, 32, 128], true);
    let stored = STORED.map(|mode| alone_in(Layer::Upsample2x, &[1, 2, 32, 128], Some(mode)));
    let graphs = [rows_of_no_tiles, channels_of_no_registers, in_int8];
    for graph in graphs.iter().chain(&stored) {
        let kernel = claim(graph, Chip::V5e.features(), 1).unwrap();
        let names = names(&kernel);
        assert!(names.contains(&"upsample_nearest_2x"), "{names:?}");
        assert!(!names.contains(&"doubled_convolution"), "{names:?}");
        assert!(distance(graph, &kernel) <= 5e-3);
    }
}

#[test]
fn a_convolution_with_few_outputs_is_its_body() {
    // One row; several images, inputs that fill no register, as many outputs as there may be; several blocks of rows.
    let cases = [
        [1, 1, 128, 16, 3, 3],
        [2, 3, 256, 20, 8, 3],
        [1, 80, 128, 8, 1, 3],
    ];
    for case in cases {
        let graph = alone(Layer::Conv2d, &case, false);
        let kernel = claim(&graph, Chip::V4.features(), 1).unwrap();
        assert_eq!(names(&kernel), ["narrow_convolution"], "{case:?}");
        // Sums in another order are rounded to bf16.
        let error = distance(&graph, &kernel);
        assert!(error <= 5e-4, "{case:?}: {error}");
    }
    // More outputs, rows that fill no register, other kernels.
    for case in [
        [1, 2, 128, 16, 9, 3],
        [1, 2, 64, 16, 3, 3],
        [1, 2, 128, 16, 3, 1],
    ] {
        let kernel = claim(&alone(Layer::Conv2d, &case, false), Chip::V5e.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 0, "{case:?}");
    }
    // Weights in int8, and stored ones.
    let quantized = [
        LayerQuantization::Int8,
        LayerQuantization::Int8W8A16,
        LayerQuantization::W4A16,
    ];
    for mode in quantized {
        let graph = alone_in(Layer::Conv2d, &[1, 2, 128, 64, 8, 3], Some(mode));
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert!(!names(&kernel).contains(&"narrow_convolution"), "{mode}");
    }
}
