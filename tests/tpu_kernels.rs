//! The TPU kernels against the graphs that they stand for, on the host; and that the TPU compiler takes them.

mod compiled;
mod images;

use maxdiff::backend::tpu::claim;
use maxdiff::dtype::DType;
use maxdiff::graph::{Binary, Builder, Composite, Graph, Init, Op, Tensor, evaluate};
use maxdiff::host_tensor::HostTensor;
use maxdiff::kernels::{Case, Layer, LayerQuantization};
use maxdiff::lowering::Traced;
use maxdiff::nn::{
    Attention, Linear, Precision, attention, gated_gelu, layer_norm, linear as linear_layer,
};
use maxdiff::quant::{Policy, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

/// Attention of bf16: batch, heads, queries, keys, size of a head.
pub fn attention_layer([batch, heads, queries, keys, size]: [usize; 5], causal: bool) -> Graph {
    let b = Builder::new();
    let input = |name: &str, length: usize| {
        let shape = Shape::new(DType::BF16, [batch, length, heads * size]);
        b.input(name, shape, &[]).unwrap()
    };
    let qkv = [input("q", queries), input("k", keys), input("v", keys)];
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let y = attention(&b.root("m"), qkv, Attention { heads, causal }, precision).unwrap();
    b.output("y", y, None).unwrap();
    lower(&b.finish()).unwrap()
}

pub fn calls(graph: &Graph) -> usize {
    let nodes = graph.nodes.iter().zip(graph.live_nodes());
    let is_call = |op: &Op| matches!(op, Op::CustomCall(_));
    let calls = nodes.filter(|(node, live)| *live && is_call(&node.op));
    calls.count()
}

/// The names of its kernels, in their order.
pub fn names(graph: &Graph) -> Vec<&'static str> {
    let nodes = graph.nodes.iter().zip(graph.live_nodes());
    let names = nodes.filter(|(_, live)| *live).filter_map(|(node, _)| {
        let Op::CustomCall(call) = &node.op else {
            return None;
        };
        Some(call.name())
    });
    names.collect()
}

/// Uniform in [-3, 3], so that some keys count and others do not.
pub fn inputs(graph: &Graph) -> Vec<HostTensor> {
    let inputs = graph.inputs.iter().enumerate();
    let values = inputs.map(|(i, input)| {
        let values = Init::Uniform { bound: 3.0 }.sample(i as u64, "x", input.shape.count());
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        HostTensor::from_f64(input.shape.clone(), &values).unwrap()
    });
    values.collect()
}

/// The relative L2 distance between the results of two graphs.
pub fn distance(graph: &Graph, kernel: &Graph) -> f64 {
    let inputs = inputs(graph);
    let [expected, found] =
        [graph, kernel].map(|g| evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap());
    let norm: f64 = expected.iter().map(|y| y * y).sum();
    let pairs = expected.iter().zip(&found);
    let distance: f64 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
    (distance / norm).sqrt()
}

#[test]
fn attention_is_its_body() {
    // Queries and keys that fill no block, an odd number of heads, heads that fill no register, several blocks of keys in
    // pairs and alone, one query; several blocks of queries whose heads fill each other's lanes; keys that fit the core's memory once.
    let cases = [
        (Chip::V5e, [2, 2, 19, 77, 64]),
        (Chip::V5e, [1, 3, 40, 128, 64]),
        (Chip::V5e, [1, 2, 16, 1100, 64]),
        (Chip::V5e, [1, 2, 16, 2400, 64]),
        (Chip::V5e, [1, 1, 8, 1024, 128]),
        (Chip::V5e, [1, 1, 8, 2400, 128]),
        (Chip::V5e, [1, 2, 530, 20, 40]),
        (Chip::V5e, [1, 1, 20, 130, 160]),
        (Chip::V5e, [1, 1, 1, 5, 80]),
        (Chip::V6e, [1, 2, 1040, 520, 64]),
        (Chip::V6e, [2, 1, 16, 11_600, 512]),
    ];
    for (chip, case) in cases {
        let graph = attention_layer(case, false);
        let kernel = claim(&graph, chip.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 1, "{case:?}");
        let error = distance(&graph, &kernel);
        // Each rounds its weights and its result to bf16, by up to 2^-9 (2e-3), and the weights differ by a factor: the
        // body shifts scores by a whole number, the kernel by the largest score.
        assert!(error <= 4e-3, "{case:?}: {error}");
    }
}

#[test]
fn a_query_without_a_number_has_no_result_and_the_others_have() {
    let graph = attention_layer([1, 2, 19, 77, 64], false);
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    let mut inputs = inputs(&graph);
    let mut values = inputs[0].to_f64_vec().unwrap();
    // The second head of the third query.
    values[2 * 128 + 70] = f64::NAN;
    inputs[0] = HostTensor::from_f64(inputs[0].shape.clone(), &values).unwrap();
    let [expected, found] = [&graph, &kernel].map(|g| {
        let values = evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap();
        let nan = values.iter().map(|y| y.is_nan());
        nan.collect::<Vec<bool>>()
    });
    assert_eq!(expected.iter().filter(|nan| **nan).count(), 64);
    assert_eq!(found, expected);
}

#[test]
fn what_no_kernel_takes_stays() {
    // Causal; more keys than a core can hold.
    let causal = attention_layer([1, 2, 16, 16, 64], true);
    let many = attention_layer([1, 2, 16, 40_000, 64], false);
    for graph in [causal, many] {
        assert_eq!(calls(&claim(&graph, Chip::V5e.features(), 1).unwrap()), 0);
    }
}

/// A layer by its dimensions in order, in int8 or in bf16.
fn alone(layer: Layer, dims: &[usize], int8: bool) -> Graph {
    alone_in(layer, dims, int8.then_some(LayerQuantization::Int8))
}

fn alone_in(layer: Layer, dims: &[usize], quantization: Option<LayerQuantization>) -> Graph {
    let pairs = layer.dims().iter().zip(dims);
    let given: Vec<String> = pairs
        .map(|((name, _), size)| format!("{name}={size}"))
        .collect();
    let case = Case::new(layer, &given, quantization).unwrap();
    lower(&case.traced().unwrap().graph).unwrap()
}

/// A linear layer in int8: batch, tokens, inputs, outputs.
fn linear(dims: [usize; 4]) -> Graph {
    alone(Layer::Linear, &dims, true)
}

#[test]
fn products_and_convolutions_of_bf16_are_their_bodies() {
    // Rows that fill no block; several blocks of columns. The convolutions: several images, channels that fill no register;
    // several blocks of outputs. Smaller ones stay, and products of features that fill no register.
    let layers: [(Layer, &[usize], usize); 8] = [
        (Layer::Linear, &[2, 25, 256, 128], 1),
        (Layer::Linear, &[2, 25, 136, 200], 0),
        (Layer::Linear, &[1, 32, 128, 1408], 1),
        (Layer::Linear, &[1, 32, 128, 64], 0),
        (Layer::Conv2d, &[2, 2, 32, 136, 130, 3], 1),
        (Layer::Conv2d, &[1, 1, 32, 128, 1408, 1], 1),
        (Layer::Conv2d, &[1, 1, 32, 64, 128, 3], 0),
        (Layer::Conv2d, &[1, 1, 40, 128, 128, 1], 0),
    ];
    for (layer, dims, count) in layers {
        let graph = alone(layer, dims, false);
        // Every chip multiplies bf16.
        let kernel = claim(&graph, Chip::V4.features(), 1).unwrap();
        assert_eq!(calls(&kernel), count, "{layer} {dims:?}");
        // Sums in another order are rounded to bf16.
        let error = distance(&graph, &kernel);
        assert!(error <= 5e-4, "{layer} {dims:?}: {error}");
    }
}

#[test]
fn an_int8_product_is_its_body() {
    // Whole blocks; rows, terms and columns that fill none; several blocks of columns; several of rows; terms that
    // are multiplied in runs.
    let cases = [
        [1, 32, 128, 16],
        [2, 25, 40, 30],
        [1, 40, 8, 1536],
        [1, 260, 24, 16],
        [1, 40, 1536, 16],
    ];
    for case in cases {
        let graph = linear(case);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 1, "{case:?}");
        let mut inputs = inputs(&graph);
        let mut x = inputs[0].to_f64_vec().unwrap();
        let terms = case[2];
        // A row of zeros, one without a range, one whose scale has no finite reciprocal, one with a tie at its end.
        x[..terms].fill(0.0);
        x[terms] = f64::NAN;
        x[2 * terms..3 * terms].fill(2f64.powi(-130));
        x[3 * terms] = -127.5;
        inputs[0] = HostTensor::from_f64(inputs[0].shape.clone(), &x).unwrap();
        let [expected, found] = [&graph, &kernel].map(|g| {
            let values = evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap();
            values.iter().map(|y| y.to_bits()).collect::<Vec<u64>>()
        });
        assert_eq!(found, expected, "{case:?}");
    }
}

/// The program of `b`, whose layers are under `m/`, quantized to int8 if asked for.
fn lowered(b: Builder, int8: bool) -> Graph {
    let traced = Traced::new("layer", b.finish());
    let policy = Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap();
    let traced = traced.quantized(int8.then_some(&policy)).unwrap();
    lower(&traced.graph).unwrap()
}

/// An int8 layer of 32 outputs, and what follows it.
fn followed(follow: impl FnOnce(&Builder, Tensor, Tensor) -> Tensor) -> Graph {
    let b = Builder::new();
    let shape = |columns| Shape::new(DType::BF16, [1, 40, columns]);
    let x = b.input("x", shape(24), &[]).unwrap();
    let other = b.input("other", shape(32), &[]).unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let layer = Linear::new(32, "embed", "mlp");
    let y = linear_layer(&b.root("m"), x, layer, precision).unwrap();
    let y = follow(&b, y, other);
    b.output("y", y, None).unwrap();
    let policy = Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap();
    let traced = Traced::new("layer", b.finish());
    lower(&traced.quantized(Some(&policy)).unwrap().graph).unwrap()
}

#[test]
fn an_int8_product_takes_what_follows_it() {
    // A sum of two bf16 is rounded once by both. The body rounds each operation of GELU to bf16, the kernel the result.
    let sum = followed(|b, y, other| b.add(other, y).unwrap());
    let gated = followed(|b, y, _| gated_gelu(&b.root("m"), y).unwrap());
    for (graph, tolerance) in [(sum, 0.0), (gated, 8e-3)] {
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        let is_left = |op: &Op| match op {
            Op::Composite { kind, .. } => *kind == Composite::GatedGelu,
            op => matches!(op, Op::Binary(Binary::Add)),
        };
        let nodes = kernel.nodes.iter().zip(kernel.live_nodes());
        let left = nodes.filter(|(node, live)| *live && is_left(&node.op));
        assert_eq!((calls(&kernel), left.count()), (1, 0));
        let error = distance(&graph, &kernel);
        assert!(error <= tolerance, "{tolerance}: {error}");
    }
}

/// Layer norm of rows, and what reads it, in int8 or in bf16.
fn normed_in(
    int8: bool,
    [rows, features]: [usize; 2],
    read: impl FnOnce(&Builder, Tensor) -> Tensor,
) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [1, rows, features]);
    let x = b.input("x", shape, &[]).unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let y = layer_norm(&m.scope("norm"), x, 1e-5, precision).unwrap();
    let y = read(&m, y);
    b.output("y", y, None).unwrap();
    lowered(b, int8)
}

/// The same in int8.
fn normed(dims: [usize; 2], read: impl FnOnce(&Builder, Tensor) -> Tensor) -> Graph {
    normed_in(true, dims, read)
}

/// The layer `name` of bf16.
pub fn project(m: &Builder, name: &str, x: Tensor, outputs: usize) -> Tensor {
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let layer = Linear::new(outputs, "embed", "mlp");
    linear_layer(&m.scope(name), x, layer, precision).unwrap()
}

/// How many layer norms a graph computes outside kernels.
pub fn norms(graph: &Graph) -> usize {
    let nodes = graph.nodes.iter().zip(graph.live_nodes());
    let is_norm = |op: &Op| match op {
        Op::Composite { kind, .. } => matches!(kind, Composite::LayerNorm { .. }),
        _ => false,
    };
    nodes
        .filter(|(node, live)| *live && is_norm(&node.op))
        .count()
}

#[test]
fn an_int8_product_takes_the_layer_norm_before_it() {
    // Two readers of one norm, rows and features that fill no block; several blocks of columns; a gated layer.
    let two = normed([41, 40], |m, x| {
        m.add(project(m, "q", x, 24), project(m, "k", x, 24))
            .unwrap()
    });
    let wide = normed([32, 32], |m, x| project(m, "q", x, 1536));
    let gated = normed([40, 32], |m, x| {
        gated_gelu(m, project(m, "q", x, 64)).unwrap()
    });
    // Sums in another order change what is rounded to bf16, and with it some integers by 1.
    for (graph, products, tolerance) in [(two, 2, 2e-3), (wide, 1, 2e-3), (gated, 1, 1e-2)] {
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!((calls(&kernel), norms(&kernel)), (products, 0));
        let error = distance(&graph, &kernel);
        assert!(error <= tolerance, "{products} products: {error}");
    }
}

#[test]
fn a_product_of_bf16_takes_what_is_around_it() {
    // Norms and gated GELU; several blocks of columns; queries, keys and values; a sum.
    let wide = normed_in(false, [32, 128], |m, x| project(m, "q", x, 1408));
    let gated = normed_in(false, [40, 128], |m, x| {
        gated_gelu(m, project(m, "q", x, 256)).unwrap()
    });
    let qkv = normed_in(false, [128, 128], |m, x| {
        let [q, k, v] = ["q", "k", "v"].map(|name| project(m, name, x, 128));
        let precision = Precision {
            weights: DType::BF16,
            activations: DType::BF16,
        };
        let layer = Attention {
            heads: 2,
            causal: false,
        };
        let y = attention(m, [q, k, v], layer, precision).unwrap();
        m.add(project(m, "out", y, 128), y).unwrap()
    });
    for (graph, count) in [(wide, 1), (gated, 1), (qkv, 3)] {
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!((calls(&kernel), norms(&kernel)), (count, 0));
        let error = distance(&graph, &kernel);
        assert!(error <= 1e-2, "{count} calls: {error}");
    }
    let graph = normed_in(false, [40, 128], |m, x| {
        m.add(project(m, "q", x, 128), x).unwrap()
    });
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!((calls(&kernel), norms(&kernel)), (1, 1));
}

#[test]
fn a_layer_norm_with_another_reader_stays() {
    let graph = normed([40, 32], |m, x| m.add(project(m, "q", x, 32), x).unwrap());
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!((calls(&kernel), norms(&kernel)), (1, 1));
}

/// Attention in int8 of 128 tokens, whose queries are of a norm, and keys and values of what `text` makes of it.
fn self_attention(text: impl FnOnce(&Builder, Tensor) -> Tensor) -> Graph {
    normed([128, 128], |m, x| {
        let of = text(m, x);
        let [q, k, v] = [("q", x), ("k", of), ("v", of)].map(|(name, x)| project(m, name, x, 128));
        let precision = Precision {
            weights: DType::BF16,
            activations: DType::BF16,
        };
        let layer = Attention {
            heads: 2,
            causal: false,
        };
        attention(m, [q, k, v], layer, precision).unwrap()
    })
}

#[test]
fn queries_keys_and_values_are_one_product() {
    let graph = self_attention(|_, x| x);
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!((calls(&kernel), norms(&kernel)), (2, 0));
    let error = distance(&graph, &kernel);
    assert!(error <= 4e-3, "{error}");
    // Those of two activations are not.
    let graph = self_attention(|m, x| m.add(x, x).unwrap());
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!(calls(&kernel), 4);
    let error = distance(&graph, &kernel);
    assert!(error <= 4e-3, "{error}");
}

#[test]
fn small_products_stay() {
    let graph = linear([1, 31, 128, 128]);
    assert_eq!(calls(&claim(&graph, Chip::V5e.features(), 1).unwrap()), 0);
}

/// Weights that are stored in int8 with a scale a channel, and in int4 with one for 64 features.
const STORED: [LayerQuantization; 2] = [LayerQuantization::Int8W8A16, LayerQuantization::W4A16];

/// A linear layer of stored weights.
fn stored(mode: LayerQuantization, dims: [usize; 4]) -> Graph {
    alone_in(Layer::Linear, &dims, Some(mode))
}

/// A transformer block, whose products have norms, gates and sums around them, and queries, keys and values in one.
fn stored_block(mode: LayerQuantization, heads: usize) -> Graph {
    alone_in(
        Layer::TransformerBlock,
        &[1, 128, 80, heads, 64],
        Some(mode),
    )
}

#[test]
fn products_of_stored_weights_are_their_bodies() {
    for mode in STORED {
        // Rows that fill no block; several blocks of rows, and of columns.
        for dims in [[1, 40, 192, 320], [1, 530, 128, 1408]] {
            let graph = stored(mode, dims);
            let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
            assert_eq!(calls(&kernel), 1, "{dims:?}");
            let error = distance(&graph, &kernel);
            assert!(error <= 2e-3, "{dims:?}: {error}");
        }
        let graph = stored_block(mode, 2);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        // Two attentions; queries, keys and values, the text's queries, two outputs and the feed-forward layers.
        assert_eq!((calls(&kernel), norms(&kernel)), (8, 0), "{mode}");
        let error = distance(&graph, &kernel);
        assert!(error <= 1e-2, "{mode}: {error}");
    }
    // A chip that does not have the memory.
    let graph = stored(LayerQuantization::W4A16, [1, 300, 128, 128]);
    assert_eq!(calls(&claim(&graph, Chip::V4.features(), 1).unwrap()), 0);
}

/// A convolution of stored weights; the last of the sizes is the kernel's side.
fn stored_convolution(mode: LayerQuantization, dims: [usize; 6]) -> Graph {
    alone_in(Layer::Conv2d, &dims, Some(mode))
}

#[test]
fn convolutions_of_stored_weights_are_their_bodies() {
    // Several images, outputs that fill no register; several blocks of outputs.
    let cases = [[2, 2, 32, 192, 136, 3], [2, 1, 32, 128, 1408, 1]];
    let of_v5e = STORED
        .iter()
        .flat_map(|mode| cases.map(|case| (Chip::V5e, *mode, case)));
    let w4a16 = LayerQuantization::W4A16;
    let others = [
        // Two cores share the steps of a v5p.
        (Chip::V5p, w4a16, cases[0]),
        (Chip::V5p, LayerQuantization::Int8W8A16, cases[1]),
        // Several blocks of rows.
        (Chip::V5e, w4a16, [1, 34, 32, 128, 128, 3]),
    ];
    for (chip, mode, case) in of_v5e.chain(others) {
        let graph = stored_convolution(mode, case);
        let kernel = claim(&graph, chip.features(), 1).unwrap();
        assert_eq!(calls(&kernel), 1, "{chip} {mode} {case:?}");
        let error = distance(&graph, &kernel);
        assert!(error <= 2e-3, "{chip} {mode} {case:?}: {error}");
    }
    // Inputs that make no tiles of integers are widened by another kernel.
    let graph = stored_convolution(LayerQuantization::Int8W8A16, [1, 1, 32, 136, 128, 3]);
    let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
    assert_eq!(calls(&kernel), 2);
    let error = distance(&graph, &kernel);
    assert!(error <= 2e-3, "{error}");
}
