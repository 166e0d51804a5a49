//! The TPU kernels of products that training steps round to int8, against the graphs that they stand for, on the host.

use std::sync::Arc;

use maxdiff::backend::tpu::{RoundedProduct, claim_training};
use maxdiff::dtype::DType;
use maxdiff::graph::random::key_of_row;
use maxdiff::graph::{Builder, ConvDims, DotDims, Graph, Init, Op, evaluate, vjp};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::{Policy, ROUNDING_KEY, annotate, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

use crate::tpu_gradients::{every_chip_compiles, every_chip_takes};
use crate::tpu_kernels::inputs;

/// A linear layer in bf16 with its derivative, in int8: rows of the batch, tokens, inputs and outputs. Ranges of the weights' gradient
/// are found in `parts` parts of the batch.
fn trained_linear(sizes: [usize; 4], parts: usize) -> Graph {
    trained_sum(sizes, parts, false)
}

/// The same, with what is added to the result and to the gradient of `x` if there is a residual.
fn trained_sum(
    [batch, tokens, inputs, outputs]: [usize; 4],
    parts: usize,
    residual: bool,
) -> Graph {
    let b = Builder::new();
    let of = |name: &str, features: usize| {
        let shape = Shape::new(DType::BF16, [batch, tokens, features]);
        b.input(name, shape, &[]).unwrap()
    };
    let [x, gradient] = [of("x", inputs), of("gradient", outputs)];
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
        .unwrap();
    let layer = b.root("m");
    let parameter = |name: &str, dims: &[usize]| {
        let shape = Shape::new(DType::BF16, dims);
        layer.param(name, shape, Init::Ones, &[]).unwrap()
    };
    let [weight, bias] = [
        parameter("weight", &[outputs, inputs]),
        parameter("bias", &[outputs]),
    ];
    let dims = DotDims {
        lhs_contract: vec![2],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let y = layer.dot_general(x, weight, dims, DType::F32).unwrap();
    let bias = layer.convert(bias, DType::F32).unwrap();
    let bias = layer.broadcast_in_dim(bias, &[2], &[batch, tokens, outputs]);
    let y = layer.add(y, bias.unwrap()).unwrap();
    let mut y = layer.convert(y, DType::BF16).unwrap();
    annotate(&b, &Policy::aqt_int8("m/", parts, Vec::new(), &[]).unwrap()).unwrap();
    let found = vjp(&b, &[(y, gradient)], &[x, weight]).unwrap();
    let mut dx = found[0];
    if residual {
        y = b.add(of("residual", outputs), y).unwrap();
        dx = b.add(dx, of("other", inputs)).unwrap();
    }
    for (name, value) in [("y", y), ("dx", dx), ("dw", found[1])] {
        b.output(name, value, None).unwrap();
    }
    lower(&b.finish()).unwrap()
}

/// A 3x3 convolution of an image in bf16 with its derivatives, of which int8 rounds the first: images, height, width, inputs, outputs.
fn trained_convolution([images, height, width, inputs, outputs]: [usize; 5]) -> Graph {
    let b = Builder::new();
    let of = |name: &str, channels: usize| {
        let shape = Shape::new(DType::BF16, [images, height, width, channels]);
        b.input(name, shape, &[]).unwrap()
    };
    let [x, gradient] = [of("x", inputs), of("gradient", outputs)];
    let layer = b.root("m");
    let shape = Shape::new(DType::BF16, [outputs, inputs, 3, 3]);
    let weight = layer.param("weight", shape, Init::Ones, &[]).unwrap();
    let dims = ConvDims::of_image(1, (1, 1));
    let y = layer.convolution(x, weight, dims, DType::F32).unwrap();
    let y = layer.convert(y, DType::BF16).unwrap();
    annotate(&b, &Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap()).unwrap();
    let found = vjp(&b, &[(y, gradient)], &[x, weight]).unwrap();
    for (name, value) in [("y", y), ("dx", found[0]), ("dw", found[1])] {
        b.output(name, value, None).unwrap();
    }
    lower(&b.finish()).unwrap()
}

/// Numbers for all inputs; of the key two words that fill their bits.
fn values(graph: &Graph) -> Vec<HostTensor> {
    let values = graph.inputs.iter().zip(inputs(graph));
    let values = values.map(|(input, value)| match input.name == ROUNDING_KEY {
        true => {
            let words = [f64::from(0x9E37_79B9_u32), f64::from(0xDEAD_BEEF_u32)];
            HostTensor::from_f64(input.shape.clone(), &words).unwrap()
        }
        false => value,
    });
    values.collect()
}

/// The kernels of a graph, by name.
fn names(graph: &Graph) -> Vec<&'static str> {
    let mut names = Vec::new();
    graph.visit_calls(&mut |_, _, call| names.push(call.name()));
    names.sort_unstable();
    names
}

const ALL: [&str; 3] = [
    "int8_gradient_of_weights",
    "rounded_int8_product",
    "stochastic_int8_product",
];

#[test]
fn a_linear_layer_and_its_derivative_are_kernels_bit_for_bit() {
    // One block, of a weight that lies as it is, is shared along its outputs, or along its inputs; several blocks of rows, and columns that cores
    // do not share; several of columns, and of terms on either side of the weight; a part of the batch that is one entry, and one that is two.
    let one_core = (None, Chip::V5e);
    let two_cores = (None, Chip::V5p);
    let bf16_vectors = (None, Chip::V6e);
    let shared = |dim: usize, chip| (Some(dim), chip);
    let of_weight = [
        one_core,
        two_cores,
        shared(0, Chip::V5e),
        shared(1, Chip::V5p),
        bf16_vectors,
    ];
    let cases = [
        ([1, 128, 128, 256], 1, &of_weight[..]),
        ([1, 384, 128, 128], 1, &[one_core, two_cores, bf16_vectors]),
        // Too many rows for parts of a block.
        ([1, 4224, 128, 128], 1, &[one_core]),
        ([1, 128, 128, 1408], 1, &[one_core]),
        ([1, 128, 1408, 128], 1, &[one_core]),
        ([2, 128, 256, 256], 2, &[one_core]),
        ([4, 64, 128, 256], 2, &[two_cores]),
    ];
    for (sizes, parts, forms) in cases {
        let graph = trained_linear(sizes, parts);
        let weight = graph.inputs.iter().position(|i| i.name == "m/weight");
        let inputs = values(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        for (split, chip) in forms {
            let mut is_split = vec![Vec::new(); graph.inputs.len()];
            is_split[weight.unwrap()] = [0, 1].map(|dim| Some(dim) == *split).to_vec();
            let kernels = claim_training(&graph, chip.features(), parts, &is_split).unwrap();
            assert_eq!(names(&kernels), ALL, "{sizes:?} {parts} {split:?} {chip:?}");
            let found = evaluate(&kernels, &inputs).unwrap();
            assert!(expected == found, "{sizes:?} {parts} {split:?} {chip:?}");
        }
    }
}

/// Parts of the batch, each a device's, share the ranges of the gradient of weights: those of all, or of a slice. Sums of parts are added
/// in `f32` then, where the graph adds integers.
#[test]
fn parts_share_ranges() {
    for (sizes, groups, parts) in [
        ([2, 128, 128, 256], 1, 2),
        ([4, 128, 256, 128], 2, 4),
        ([4, 64, 128, 128], 1, 2),
    ] {
        let graph = trained_linear(sizes, groups);
        let inputs = values(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        let chip = Chip::V5p.features();
        let kernels = claim_training(&graph, chip, parts, &[]).unwrap();
        let mut with_ranges = vec!["int8_ranges_of_columns"; 2];
        with_ranges.extend(ALL);
        with_ranges.sort_unstable();
        assert_eq!(names(&kernels), with_ranges, "{sizes:?} {groups} {parts}");
        let found = evaluate(&kernels, &inputs).unwrap();
        assert!(expected[..2] == found[..2], "{sizes:?} {groups} {parts}");
        let [expected, found] = [&expected[2], &found[2]].map(|dw| dw.to_f64_vec().unwrap());
        let differ = expected.iter().zip(&found).filter(|(x, y)| x != y);
        let differ: Vec<_> = differ.collect();
        // The gradient is rounded to bf16: few are between two.
        assert!(differ.len() * 100 < expected.len(), "{}", differ.len());
        for (x, y) in differ {
            assert!((x - y).abs() <= x.abs() / 128.0, "{sizes:?}: {x}, {y}");
        }
    }
}

/// Rows of a tensor with more positions than a word tells apart: each word of rows has a key of its own.
fn rounded_rows(rows: usize, rows_in_a_word: Option<u32>) -> Graph {
    let b = Builder::new();
    let input = |name: &str, dtype: DType, dims: &[usize]| {
        let shape = Shape::new(dtype, dims);
        b.input(name, shape, &[]).unwrap()
    };
    let operands = [
        input("x", DType::BF16, &[1, rows, 128]),
        input("weights", DType::S8, &[1, 128, 128]),
        input("absmax", DType::F32, &[1, 1, 128]),
        input(ROUNDING_KEY, DType::U32, &[1, 1, 2]),
        input("first", DType::U32, &[1, 1, 1]),
    ];
    let kernel = RoundedProduct {
        terms_first: false,
        bias: false,
        noise: true,
        rows_in_a_word,
        residual: false,
        wide_units: false,
        bf16_vectors: false,
        memory: Chip::V5e.features().kernel_memory,
    };
    let y = b.push(Op::CustomCall(Arc::new(kernel)), &operands).unwrap();
    b.output("y", y, None).unwrap();
    b.finish()
}

#[test]
fn rows_of_another_word_have_another_key() {
    let whole = rounded_rows(128, Some(6));
    let mut all = values(&whole);
    let first = |row: u32| {
        HostTensor::from_f64(Shape::new(DType::U32, [1, 1, 1]), &[f64::from(row)]).unwrap()
    };
    let key = |of: [u32; 2]| {
        HostTensor::from_f64(Shape::new(DType::U32, [1, 1, 2]), &of.map(f64::from)).unwrap()
    };
    all[4] = first(0);
    let y = evaluate(&whole, &all).unwrap()[0].to_f64_vec().unwrap();
    // Each half alone, with what its word makes of the key.
    let half = rounded_rows(64, None);
    let x = all[0].to_f64_vec().unwrap();
    for (word, row) in [(0, 0), (1, 64)] {
        let mut of_half = all.clone();
        let rows = row as usize * 128..(row as usize + 64) * 128;
        let shape = Shape::new(DType::BF16, [1, 64, 128]);
        of_half[0] = HostTensor::from_f64(shape, &x[rows.clone()]).unwrap();
        of_half[3] = key(key_of_row([0x9E37_79B9, 0xDEAD_BEEF], word, 0));
        of_half[4] = first(row);
        let expected = evaluate(&half, &of_half).unwrap()[0].to_f64_vec().unwrap();
        assert!(expected == y[rows], "word {word}");
    }
    let int8 = |chip: Chip| !matches!(chip, Chip::V4 | Chip::Tpu7x);
    for (chip, found) in every_chip_compiles(|chip| match int8(chip) {
        true => rounded_rows(128, Some(6)),
        false => trained_linear([1, 8, 8, 8], 1).inline_composites(&|_, _| true),
    }) {
        assert_eq!(found, usize::from(int8(chip)), "{chip:?}");
    }
}

#[test]
fn what_is_added_to_a_product_is_in_its_kernel() {
    for (sizes, parts) in [([1, 128, 128, 256], 1), ([2, 128, 128, 1408], 2)] {
        let graph = trained_sum(sizes, parts, true);
        let inputs = values(&graph);
        let chip = Chip::V5e.features();
        let kernels = claim_training(&graph, chip, parts, &[]).unwrap();
        let mut residuals = 0;
        kernels.visit_calls(&mut |_, _, call| {
            residuals += usize::from(format!("{call:?}").contains("residual: true"));
        });
        assert_eq!((names(&kernels), residuals), (ALL.to_vec(), 2));
        let [expected, found] = [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap());
        assert!(expected == found, "{sizes:?}");
    }
}

#[test]
fn a_convolution_is_a_kernel_bit_for_bit() {
    // An image that is wide, with its derivatives in bf16, which are kernels then; one that is not, of which the gradient of
    // weights has too few places; the same in two parts.
    let cases = [
        (
            [1, 4, 32, 128, 128],
            1,
            &[
                "convolution",
                "convolution_gradient_of_kernel",
                "int8_convolution",
            ][..],
        ),
        (
            [2, 1, 32, 128, 128],
            1,
            &["convolution", "int8_convolution"],
        ),
        ([2, 1, 32, 128, 128], 2, &["int8_convolution"]),
    ];
    for (sizes, parts, expected) in cases {
        let graph = trained_convolution(sizes);
        let kernels = claim_training(&graph, Chip::V5e.features(), parts, &[]).unwrap();
        assert_eq!(names(&kernels), expected, "{sizes:?} in {parts}");
        let inputs = values(&graph);
        let [expected, found] =
            [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap()[0].clone());
        assert!(expected == found, "{sizes:?}");
    }
}

#[test]
fn every_chip_that_multiplies_int8_takes_the_kernels() {
    // Several blocks of rows and of columns; the gradient's rows are inputs in one and outputs in the other.
    let sums = [([1, 1024, 256, 2560], false), ([1, 1024, 1280, 256], true)];
    for (sizes, residual) in sums {
        every_chip_takes(&trained_sum(sizes, 1, residual), |chip| match chip {
            Chip::V4 | Chip::Tpu7x => 0,
            _ => 3,
        });
    }
    let shared = trained_linear([2, 256, 256, 384], 1);
    let claimed = |chip: Chip| {
        let graph = claim_training(&shared, chip.features(), 2, &[]).unwrap();
        graph.inline_composites(&|_, _| true)
    };
    for (chip, found) in every_chip_compiles(claimed) {
        let expected = match chip {
            Chip::V4 | Chip::Tpu7x => 0,
            _ => 5,
        };
        assert_eq!(found, expected, "{chip:?}");
    }
    every_chip_takes(
        &trained_convolution([1, 32, 32, 256, 128]),
        |chip| match chip {
            Chip::V4 | Chip::Tpu7x => 2,
            _ => 3,
        },
    );
}

#[test]
fn what_the_kernels_do_not_take_stays_the_compilers() {
    // Rows that are no tiles, features that fill no register; parts of the batch that no devices' parts make up.
    let names_of = |sizes, shards, parts| {
        let graph = trained_linear(sizes, shards);
        names(&claim_training(&graph, Chip::V5e.features(), parts, &[]).unwrap())
    };
    assert_eq!(names_of([1, 77, 128, 256], 1, 1), [""; 0]);
    assert_eq!(names_of([1, 128, 320, 320], 1, 1), ALL[1..]);
    assert_eq!(names_of([6, 128, 128, 256], 3, 2), ALL[1..]);
    // A chip that does not multiply int8.
    let graph = trained_linear([1, 128, 128, 256], 1);
    let kernels = claim_training(&graph, Chip::V4.features(), 1, &[]).unwrap();
    assert_eq!(names(&kernels), [""; 0]);
}

#[test]
fn gradients_lie_as_their_weights_do() {
    let graph = trained_linear([2, 128, 256, 256], 2);
    let weight = graph.inputs.iter().position(|i| i.name == "m/weight");
    for split in [0, 1] {
        let mut is_split = vec![Vec::new(); graph.inputs.len()];
        is_split[weight.unwrap()] = [0, 1].map(|dim| dim == split).to_vec();
        let kernels = claim_training(&graph, Chip::V5e.features(), 2, &is_split).unwrap();
        let mut found = Vec::new();
        kernels.visit_calls(&mut |_, _, call| found.push(format!("{call:?}")));
        let expected = format!("inputs_first: {}", split == 1);
        assert!(
            found.iter().any(|call| call.contains(&expected)),
            "{found:?}"
        );
    }
}
