//! Files whose weights other programs have quantized, against what those programs make of them.

mod bitsandbytes;
mod comfy;
mod gguf;
mod modes;
mod nunchaku;
mod quark;
mod torchao;

use std::path::Path;

use crate::common::{cpu_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, DotDims, Graph, Init};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::{LOW_RANK, Policy, annotate, divided_by_factors, low_rank_beside, lower};
use maxdiff::shape::Shape;
use maxdiff::weights::{Checkpoint, cast};

const ROWS: usize = 3;

/// One linear layer for each weight of a checkpoint that is stored in codes.
fn layers(file: &Checkpoint, dtype: DType) -> (Graph, Vec<String>) {
    let stored = file.quantization().unwrap().layers.clone();
    let b = Builder::new();
    for layer in stored.keys() {
        let shape = file.info(&format!("{layer}.weight")).unwrap();
        let at = b.root("m").scope(layer);
        let weight = at.param("weight", shape.with_dtype(DType::F32), Init::Ones, &[]);
        let weight = at.convert(weight.unwrap(), dtype).unwrap();
        let x = Shape::new(dtype, [ROWS, shape.dims[1]]);
        let x = b.input(&format!("x/{layer}"), x, &[]).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        let y = at.dot_general(x, weight, dims, DType::F32).unwrap();
        b.output(layer, y, None).unwrap();
    }
    let names = stored.keys().cloned().collect();
    let policy = Policy::stored("m/", stored);
    annotate(&b, &policy).unwrap();
    let graph = divided_by_factors(&b.finish(), &policy.smoothed()).unwrap();
    let graph = low_rank_beside(&graph, &policy.low_ranks(), LOW_RANK, 1.0, None).unwrap();
    (lower(&graph).unwrap(), names)
}

/// The device multiplies the weights of a file as they are stored: products are those with the floats that they stand for.
#[track_caller]
fn check_products(path: &Path, expected: &[&str]) {
    check_products_of(&|| Checkpoint::open(path).unwrap(), expected);
}

/// The same of the file that `open` opens.
#[track_caller]
fn check_products_of(open: &dyn Fn() -> Checkpoint, expected: &[&str]) {
    let floats = open();
    let mut packed = open();
    packed.pack();
    let session = cpu_session(1);
    // A weight is rounded to bf16.
    for (dtype, most) in [(DType::F32, 1e-6), (DType::BF16, 2f64.powi(-8))] {
        let (graph, layers) = layers(&packed, dtype);
        assert_eq!(layers, expected);
        let graph = graph.inline_composites(&|_, _| true);
        let input = |name: &str, shape: &Shape| match name.strip_prefix("m/") {
            Some(key) => packed.read_as(key, shape.dtype).unwrap(),
            None => {
                let values: Vec<f32> = (0..shape.count())
                    .map(|i| ((i * 31) % 97) as f32 / 48.0 - 1.0)
                    .collect();
                let x = HostTensor::from_f32(shape.dims.clone(), &values).unwrap();
                cast(x, shape.dtype).unwrap()
            }
        };
        let inputs: Vec<HostTensor> = graph
            .inputs
            .iter()
            .map(|i| input(&i.name, &i.shape))
            .collect();
        let results = run_on(&session, &graph, &inputs);
        for (layer, found) in layers.iter().zip(&results) {
            let weight = floats
                .read_as(&format!("{layer}.weight"), DType::F32)
                .unwrap();
            let (outputs, terms) = (weight.shape.dims[0], weight.shape.dims[1]);
            let weight = weight.to_f64_vec().unwrap();
            let x = input("x", &Shape::new(dtype, [ROWS, terms]))
                .to_f64_vec()
                .unwrap();
            for (at, found) in found.to_f64_vec().unwrap().into_iter().enumerate() {
                let (row, out) = (at / outputs, at % outputs);
                let terms = (0..terms).map(|k| x[row * terms + k] * weight[out * terms + k]);
                let magnitude: f64 = terms.clone().map(f64::abs).sum();
                let error = (found - terms.sum::<f64>()).abs();
                assert!(error <= most * magnitude, "{layer} {dtype}: {error:e}");
            }
        }
    }
}
