//! The TPU kernels of int8 by recorded scales against the graphs that they stand for, on the host; and
//! that the TPU compiler takes them.

use maxdiff::backend::tpu::claim;
use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{
    Builder, Granularity, Graph, NumericsConvention, Range, Tensor, TensorFormat, evaluate,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::lowering::Traced;
use maxdiff::nn::{Attention, Conv2d, Precision, attention, conv2d, gated_gelu, layer_norm};
use maxdiff::pjrt::{CompileOptions, Topology};
use maxdiff::quant::{Formats, Policy, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::{Accelerator, Chip};

use crate::common::tpu_plugin;
use crate::tpu_kernels::{calls, inputs, norms, project};

const HALF: Precision = Precision {
    weights: DType::BF16,
    activations: DType::BF16,
};

/// int8 with one recorded scale of activations, or with one for each feature.
fn policy(granularity: Granularity) -> Policy {
    let int8 = TensorFormat::int8(NumericsConvention::Quark);
    let activation = TensorFormat {
        granularity,
        range: Range::Stored(DType::BF16),
        ..int8
    };
    let formats = Formats {
        activation: Some(activation),
        ..Formats::of_weights(int8)
    };
    Policy::of_layers("m/", Vec::new(), &[], formats).unwrap()
}

/// Layer norm of rows, and what reads it.
fn normed_in(
    policy: &Policy,
    [rows, features]: [usize; 2],
    read: impl FnOnce(&Builder, Tensor) -> Tensor,
) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [1, rows, features]);
    let x = b.input("x", shape, &[]).unwrap();
    let m = b.root("m");
    let y = layer_norm(&m.scope("norm"), x, 1e-5, HALF).unwrap();
    let y = read(&m, y);
    b.output("y", y, None).unwrap();
    let traced = Traced::new("layer", b.finish());
    lower(&traced.quantized(Some(policy)).unwrap().graph).unwrap()
}

/// What the graph's inputs are, with positive scales: some values are beyond the integers.
fn with_scales(graph: &Graph) -> Vec<HostTensor> {
    let both = inputs(graph).into_iter().zip(&graph.inputs);
    let positive = both.map(|(tensor, input)| {
        if !input.name.ends_with("input_scale") {
            return tensor;
        }
        let values = tensor.to_f64_vec().unwrap();
        let values: Vec<f64> = values.iter().map(|x| 0.01 + 0.005 * x.abs()).collect();
        HostTensor::from_f64(input.shape.clone(), &values).unwrap()
    });
    positive.collect()
}

fn results(graph: &Graph, kernel: &Graph) -> [Vec<f64>; 2] {
    let inputs = with_scales(graph);
    [graph, kernel].map(|g| evaluate(g, &inputs).unwrap()[0].to_f64_vec().unwrap())
}

/// A 3x3 or 1x1 convolution with its bias.
fn convolution(policy: &Policy, [batch, side, channels, outputs, kernel]: [usize; 5]) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [batch, side, 32, channels]);
    let x = b.input("x", shape, &[]).unwrap();
    let layer = Conv2d::same(outputs, kernel);
    let y = conv2d(&b.root("m").scope("conv"), x, layer, HALF).unwrap();
    b.output("y", y, None).unwrap();
    let traced = Traced::new("layer", b.finish());
    lower(&traced.quantized(Some(policy)).unwrap().graph).unwrap()
}

#[test]
fn products_and_convolutions_are_their_bodies() {
    for granularity in [Granularity::Tensor, Granularity::Feature] {
        let policy = policy(granularity);
        let plain = |rows, features, outputs| {
            let b = Builder::new();
            let shape = Shape::new(DType::BF16, [1, rows, features]);
            let x = b.input("x", shape, &[]).unwrap();
            let y = project(&b.root("m"), "q", x, outputs);
            b.output("y", y, None).unwrap();
            let traced = Traced::new("layer", b.finish());
            lower(&traced.quantized(Some(&policy)).unwrap().graph).unwrap()
        };
        // Whole blocks; rows, terms and columns that fill none; several blocks of columns; images.
        let graphs = [
            plain(32, 128, 16),
            plain(50, 40, 30),
            plain(40, 8, 1536),
            convolution(&policy, [2, 3, 20, 30, 3]),
            convolution(&policy, [1, 64, 5, 7, 1]),
        ];
        for (at, graph) in graphs.iter().enumerate() {
            let kernel = claim(graph, Chip::V5e.features(), 1).unwrap();
            // Nothing finds a range.
            assert_eq!(calls(&kernel), 1, "{granularity:?} {at}");
            let [expected, found] = results(graph, &kernel);
            assert!(expected == found, "{granularity:?} {at}");
            assert!(expected.iter().any(|y| *y != 0.0));
        }
    }
}

/// The layer norm is inside, and queries, keys and values, which share their scale, are one product.
#[test]
fn queries_keys_and_values_share_a_scale_and_a_product() {
    for granularity in [Granularity::Tensor, Granularity::Feature] {
        let graph = normed_in(&policy(granularity), [128, 128], |m, x| {
            let [q, k, v] = ["q", "k", "v"].map(|name| project(m, name, x, 128));
            let layer = Attention {
                heads: 2,
                causal: false,
            };
            attention(m, [q, k, v], layer, HALF).unwrap()
        });
        let scales = graph
            .inputs
            .iter()
            .filter(|i| i.name.ends_with("input_scale"));
        assert_eq!(scales.count(), 1);
        let kernel = claim(&graph, Chip::V5e.features(), 1).unwrap();
        assert_eq!((calls(&kernel), norms(&kernel)), (2, 0));
        let [expected, found] = results(&graph, &kernel);
        let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let distance = sum(&mut expected.iter().zip(&found).map(|(a, b)| a - b));
        let error = (distance / sum(&mut expected.iter().copied())).sqrt();
        // Sums of the norm in another order change what is rounded.
        assert!(error <= 4e-3, "{error}");
    }
}

#[test]
fn the_compiler_takes_the_kernels() {
    let plugin = tpu_plugin();
    let policy = policy(Granularity::Feature);
    let gated = normed_in(&policy, [256, 640], |m, x| {
        gated_gelu(m, project(m, "proj", x, 2560)).unwrap()
    });
    let image = convolution(&policy, [2, 64, 40, 24, 3]);
    let accelerator = Accelerator::lookup("v5e-1").unwrap();
    let options = accelerator.create_options(1).unwrap();
    let topology = Topology::create(&plugin, accelerator.pjrt_topology_name(), &options).unwrap();
    for graph in [gated, image] {
        let claimed = accelerator.backend().claim(&graph, 1).unwrap();
        assert_eq!(calls(&claimed), 1);
        let graph = claimed.inline_composites(&|_, _| true);
        let text = stablehlo(&graph, "kernel", &EmitOptions::default());
        let compiled = topology.compile(&text, &CompileOptions::new(1, 1)).unwrap();
        let hlo = compiled.optimized_hlo().unwrap();
        let instructions = hlo.computations.iter().flat_map(|c| &c.instructions);
        let kernels = instructions.filter(|i| i.custom_call_target == "tpu_custom_call");
        assert_eq!(kernels.count(), 1);
    }
}
