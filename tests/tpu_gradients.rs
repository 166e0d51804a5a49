//! The TPU kernels of training against the graphs that they stand for, on the host; and that the TPU compiler takes them.

use maxdiff::backend::tpu::claim_training;
use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{Builder, Graph, evaluate, vjp};
use maxdiff::nn::{Attention, Precision, attention};
use maxdiff::pjrt::{CompileOptions, Topology};
use maxdiff::shape::Shape;
use maxdiff::topology::Accelerator;

use crate::common::tpu_plugin;
use crate::tpu_kernels::{calls, inputs};

/// The gradients of attention's operands in bf16, given that of its result: batch, heads, queries, keys, size of a head.
fn derivative([batch, heads, queries, keys, size]: [usize; 5]) -> Graph {
    let b = Builder::new();
    let input = |name: &str, length: usize| {
        let shape = Shape::new(DType::BF16, [batch, length, heads * size]);
        b.input(name, shape, &[]).unwrap()
    };
    let qkv = [input("q", queries), input("k", keys), input("v", keys)];
    let gradient = input("gradient", queries);
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let attributes = Attention {
        heads,
        causal: false,
    };
    let y = attention(&b.root("m"), qkv, attributes, precision).unwrap();
    let found = vjp(&b, &[(y, gradient)], &qkv).unwrap();
    for (name, found) in ["q", "k", "v"].into_iter().zip(found) {
        b.output(&format!("gradient of {name}"), found, None)
            .unwrap();
    }
    b.finish()
}

#[test]
fn the_derivative_of_attention_is_its_body() {
    // Queries and keys that fill no block, an odd number of heads, heads that fill no register, several blocks of queries and
    // of keys, one query.
    let cases = [
        [2, 2, 19, 257, 64],
        [1, 3, 40, 256, 64],
        [1, 1, 8, 1100, 64],
        [1, 1, 530, 256, 128],
        [1, 2, 20, 300, 40],
        [1, 1, 1, 270, 160],
    ];
    for case in cases {
        let graph = derivative(case);
        let kernels = claim_training(&graph, 1).unwrap();
        assert_eq!(calls(&kernels), 3, "{case:?}");
        let inputs = inputs(&graph);
        let [expected, found] = [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap());
        for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let [a, b] = [expected, found].map(|x| x.to_f64_vec().unwrap());
            let norm: f64 = a.iter().map(|x| x * x).sum();
            let distance: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
            let error = (distance / norm).sqrt();
            // Both round weights, their gradients and the results to bf16, by up to 2^-9 (2e-3), but not at the same places.
            assert!(error <= 1e-2, "{case:?}, gradient {i}: {error}");
        }
    }
}

#[test]
fn attention_to_few_keys_stays_the_compilers() {
    let graph = claim_training(&derivative([1, 2, 64, 77, 64]), 1).unwrap();
    assert_eq!(calls(&graph), 0);
}

#[test]
fn every_chip_takes_the_derivatives_kernels() {
    let plugin = tpu_plugin();
    let graph = claim_training(&derivative([1, 4, 600, 1100, 64]), 1).unwrap();
    let text = stablehlo(&graph, "kernel", &EmitOptions::default());
    for name in ["v4-8", "v5e-1", "v5p-8", "v6e-1", "tpu7x-8"] {
        let accelerator = Accelerator::lookup(name).unwrap();
        let options = accelerator.create_options(1).unwrap();
        let topology =
            Topology::create(&plugin, accelerator.pjrt_topology_name(), &options).unwrap();
        let compiled = topology.compile(&text, &CompileOptions::new(1, 1));
        let hlo = compiled.unwrap_or_else(|error| panic!("{name}: {error}"));
        let hlo = hlo.optimized_hlo().unwrap();
        let instructions = hlo.computations.iter().flat_map(|c| &c.instructions);
        let kernels = instructions.filter(|i| i.custom_call_target == "tpu_custom_call");
        // The attention itself, and two for its derivative.
        assert_eq!(kernels.count(), 3, "{name}");
    }
}
