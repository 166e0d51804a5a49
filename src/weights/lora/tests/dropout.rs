//! What a training step leaves out of the input of updates.

use super::*;
use crate::graph::{Builder, Graph, Keeps, Op, Reduction, Tensor, evaluate, grad, roll};
use crate::nn::{Conv2d, Linear, Precision, conv2d, linear};
use crate::quant::Dropout;
use crate::shape::Shape;

const BLOCKS: usize = 3;
const WIDTH: usize = 4;
const RANK: usize = 2;

fn dropout(share: f64) -> Dropout {
    Dropout {
        share,
        key: "key",
        stream: 5,
    }
}

/// The value of each input: the step's key is `key`.
fn given(graph: &Graph, key: u32) -> Vec<HostTensor> {
    let inputs = graph.inputs.iter().zip(0..);
    inputs
        .map(|(input, seed)| match input.name.as_str() {
            "key" => HostTensor::from_f64(input.shape.clone(), &[f64::from(key), 3.0]).unwrap(),
            _ => tensor(&input.shape.dims, seed),
        })
        .collect()
}

fn values(graph: &Graph, key: u32) -> Vec<Vec<f64>> {
    let found = evaluate(graph, &given(graph, key)).unwrap();
    found.iter().map(|t| t.to_f64_vec().unwrap()).collect()
}

/// `x + layer(x)` a few times, by linear layers or convolutions, each in a region of its own if they are `recomputed`.
fn blocks(kernel: bool, recomputed: bool) -> Builder {
    let b = Builder::new();
    b.input("key", Shape::new(DType::U32, [2]), &[]).unwrap();
    let dims: &[usize] = if kernel {
        &[2, 3, 3, WIDTH]
    } else {
        &[2, 5, WIDTH]
    };
    let mut x = b.input("x", Shape::new(DType::F32, dims), &[]).unwrap();
    for at in 0..BLOCKS {
        let at = b.root("unet").scope("blocks").scope(at);
        let at = if recomputed {
            at.checkpoint(Keeps::Nothing)
        } else {
            at
        };
        let layer = at.scope("layer");
        let y = match kernel {
            true => conv2d(&layer, x, Conv2d::same(WIDTH, 3), Precision::F32),
            false => linear(
                &layer,
                x,
                Linear::new(WIDTH, "embed", "heads"),
                Precision::F32,
            ),
        };
        x = at.add(x, at.tanh(y.unwrap()).unwrap()).unwrap();
    }
    b.output("y", x, None).unwrap();
    b
}

fn with_updates(graph: &Graph, scale: f64, share: f64) -> Graph {
    let names = adaptable(graph).into_keys();
    let ranks: LoraRanks = names.map(|name| (name.to_owned(), RANK)).collect();
    beside_with_dropout(graph, &ranks, scale, dropout(share)).unwrap()
}

/// The sum of the squares of the result, and its gradients by all factors.
fn derivative(graph: Graph) -> Graph {
    let b = Builder::resume(graph);
    let (_, y) = b.take_outputs().remove(0);
    let all: Vec<usize> = (0..b.dims(y).len()).collect();
    let loss = b
        .reduce(Reduction::Sum, b.square(y).unwrap(), &all)
        .unwrap();
    let factors: Vec<(String, Tensor)> = b.with_graph(|graph| {
        let nodes = graph.nodes.iter().zip(0..);
        let inputs = nodes.filter_map(|(node, id)| match node.op {
            Op::Parameter(at) => Some((graph.inputs[at].name.clone(), b.tensor(id))),
            _ => None,
        });
        inputs.filter(|(name, _)| name.contains(".lora_")).collect()
    });
    assert_eq!(factors.len(), 2 * BLOCKS);
    let wrt: Vec<Tensor> = factors.iter().map(|(_, factor)| *factor).collect();
    let gradients = grad(&b, loss, &wrt).unwrap();
    b.output("loss", loss, None).unwrap();
    for ((name, _), gradient) in factors.iter().zip(gradients) {
        b.output(name, gradient, None).unwrap();
    }
    b.finish()
}

/// The masks of each block, as the update of ones by factors that copy their input shows them.
fn masks(key: u32, share: f64) -> Vec<Vec<f64>> {
    const ROWS: usize = 4096;
    let b = Builder::new();
    b.input("key", Shape::new(DType::U32, [2]), &[]).unwrap();
    let shape = Shape::new(DType::F32, [ROWS, RANK]);
    let x = b.full(&shape, 1.0).unwrap();
    for at in 0..BLOCKS {
        let layer = b.root("unet").scope("blocks").scope(at);
        let y = linear(
            &layer,
            x,
            Linear::new(RANK, "embed", "heads").without_bias(),
            Precision::F32,
        );
        b.output(&at.to_string(), y.unwrap(), None).unwrap();
    }
    let graph = with_updates(&b.finish(), 1.0, share);
    let one = HostTensor::from_f32([RANK, RANK], &[1.0, 0.0, 0.0, 1.0]).unwrap();
    let mut inputs = given(&graph, key);
    for (input, value) in graph.inputs.iter().zip(&mut inputs) {
        match input.name.as_str() {
            "key" => {}
            name if name.contains(".lora_") => *value = one.clone(),
            _ => *value = HostTensor::zeros(input.shape.clone()),
        }
    }
    let found = evaluate(&graph, &inputs).unwrap();
    found.iter().map(|t| t.to_f64_vec().unwrap()).collect()
}

/// What stays counts so much more that the mean is kept; each layer and each step draws anew, and the same step the same.
#[test]
fn masks_keep_the_mean_and_differ_by_layer_and_step() {
    let share = 0.25;
    let all = [masks(1, share), masks(2, share)].concat();
    let kept = f64::from(1.0f32 / 0.75);
    for (at, mask) in all.iter().enumerate() {
        assert!(
            mask.iter()
                .all(|v: &f64| *v == 0.0 || (v - kept).abs() < 1e-6)
        );
        let mean = mask.iter().sum::<f64>() / mask.len() as f64;
        let spread = (share / (1.0 - share) / mask.len() as f64).sqrt();
        assert!((mean - 1.0).abs() < 5.0 * spread, "{mean}");
        for other in &all[..at] {
            // Two masks agree as often as independent ones do.
            let pairs = mask.iter().zip(other);
            let equal = pairs.filter(|(a, b)| a == b).count() as f64 / mask.len() as f64;
            let expected = share * share + (1.0 - share) * (1.0 - share);
            let spread = (expected * (1.0 - expected) / mask.len() as f64).sqrt();
            assert!((equal - expected).abs() < 5.0 * spread, "{equal}");
        }
    }
    assert_eq!(masks(1, share), all[..BLOCKS]);
}

/// Without a share nothing changes; with one the layer's own product does not, whose input is whole.
#[test]
fn the_input_of_the_weight_itself_is_whole() {
    for kernel in [false, true] {
        let graph = blocks(kernel, false).finish();
        let names = adaptable(&graph).into_keys();
        let ranks: LoraRanks = names.map(|name| (name.to_owned(), RANK)).collect();
        let plain = values(&beside(&graph, &ranks, 1.5).unwrap(), 1);
        assert_eq!(values(&with_updates(&graph, 1.5, 0.0), 1), plain);
        assert_ne!(values(&with_updates(&graph, 1.5, 0.5), 1), plain);
        let base = values(&beside(&graph, &ranks, 0.0).unwrap(), 1);
        assert_eq!(values(&with_updates(&graph, 0.0, 0.5), 1), base);
    }
}

/// A block that is computed again in the backward pass has the mask that it had in the forward pass.
#[test]
fn a_recomputed_block_has_the_same_mask() {
    for kernel in [false, true] {
        let gradients = |recomputed: bool, key: u32| {
            let graph = with_updates(&blocks(kernel, recomputed).finish(), 1.5, 0.5);
            values(&derivative(graph), key)
        };
        let kept = gradients(false, 1);
        assert_eq!(gradients(true, 1), kept);
        assert_ne!(gradients(false, 2), kept);
    }
}

/// Equal blocks are loops, forward and backward, though each has a mask of its own.
#[test]
fn blocks_with_dropout_are_loops() {
    let graph = derivative(with_updates(&blocks(false, true).finish(), 1.5, 0.5));
    let rolled = roll(graph.clone(), None, 2).unwrap();
    let nodes = rolled.nodes.iter();
    let loops = nodes.filter(|node| matches!(node.op, Op::While { .. }));
    assert_eq!(loops.count(), 2);
    assert_eq!(values(&rolled, 1), values(&graph, 1));
    assert_ne!(values(&rolled, 1), values(&rolled, 2));
}
