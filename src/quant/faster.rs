//! Contractions that low precision does not make faster stay in float (`int8_where_faster`).

use serde::Serialize;

use crate::dtype::DType;
use crate::graph::{ContractionQuant, Graph, Node, Op, Range, Rounding, TensorFormat};
use crate::shape::Shape;

/// Which of a layer's contractions one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Forward,
    /// The gradient of what the layer reads: the incoming one, rounded at random, times the weight.
    Dlhs,
    /// The gradient of the weight, or another product of two activations.
    Drhs,
}

/// The sizes of a contraction of two rounded operands, on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Product {
    pub role: Role,
    /// Rows of the result; for a convolution its places.
    pub rows: usize,
    /// Terms of each sum.
    pub contracted: usize,
    /// Columns of the result; for a convolution its features.
    pub columns: usize,
    pub is_convolution: bool,
    /// Whether an operand is a weight that is rounded while weights are loaded.
    pub is_prepared: bool,
}

/// A contraction that stays in float.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Slower {
    pub path: String,
    #[serde(flatten)]
    pub product: Product,
}

/// Takes the formats from the contractions of a graph, and of its composites, whose operands are both rounded to int8 by scales
/// that are found, and of which `pays` says no; returns these. `parts` devices share a batch; weights are `prepared` before the
/// program runs, or change in it.
pub fn keep_where_faster(
    graph: &mut Graph,
    parts: usize,
    prepared: bool,
    pays: &dyn Fn(&Product) -> bool,
) -> Vec<Slower> {
    let mut pass = Pass {
        parts,
        prepared,
        pays,
        slower: Vec::new(),
    };
    let inputs: Vec<bool> = graph.inputs.iter().map(|input| input.is_weight()).collect();
    pass.graph(graph, &inputs);
    pass.slower
}

struct Pass<'a> {
    parts: usize,
    prepared: bool,
    pays: &'a dyn Fn(&Product) -> bool,
    slower: Vec<Slower>,
}

impl Pass<'_> {
    /// `inputs` says which inputs are weights.
    fn graph(&mut self, graph: &mut Graph, inputs: &[bool]) {
        let of_weights = graph.made_of(inputs);
        for at in 0..graph.nodes.len() {
            let operands: Vec<usize> = graph.nodes[at]
                .operands
                .iter()
                .map(|o| *o as usize)
                .collect();
            let weights: Vec<bool> = operands.iter().map(|o| of_weights[*o]).collect();
            if let Op::Composite { body, .. } = &mut graph.nodes[at].op {
                self.graph(body, &weights);
                continue;
            }
            let [lhs, rhs, ..] = operands[..] else {
                continue;
            };
            let node = &graph.nodes[at];
            let shapes = [lhs, rhs].map(|operand| &graph.nodes[operand].shape);
            let Some(product) = self.product(node, shapes, [weights[0], weights[1]]) else {
                continue;
            };
            if (self.pays)(&product) {
                continue;
            }
            let path = graph.path(node).to_owned();
            if let Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } =
                &mut graph.nodes[at].op
            {
                *quant = None;
            }
            self.slower.push(Slower { path, product });
        }
    }

    /// The sizes of a contraction that is eligible.
    fn product(&self, node: &Node, shapes: [&Shape; 2], weights: [bool; 2]) -> Option<Product> {
        let of = |shape: &Shape, places: &[usize]| -> usize {
            places.iter().map(|d| shape.dims[*d]).product()
        };
        let (quant, [rows, contracted, columns], is_convolution) = match &node.op {
            Op::DotGeneral { quant, dims, .. } => {
                let batch = of(shapes[0], &dims.lhs_batch);
                let contracted = of(shapes[0], &dims.lhs_contract);
                let free = |shape: &Shape| shape.count() / (contracted * batch).max(1);
                // Of each of the products that dimensions of a batch make many of.
                let sizes = [free(shapes[0]), contracted, free(shapes[1])];
                (quant, sizes, false)
            }
            Op::Convolution { quant, dims, .. } => {
                let columns = node.shape.dims[dims.out.feature];
                let contracted = shapes[1].count() / columns.max(1);
                let places = node.shape.count() / columns.max(1);
                (quant, [places, contracted, columns], true)
            }
            _ => return None,
        };
        let quant = &quant.as_deref()?.forward;
        if !finds_int8(quant) {
            return None;
        }
        let is_prepared = self.prepared && weights.contains(&true);
        // Derivatives read a weight behind a barrier, beside values that are none: it is a matrix beside the rows of a batch.
        let is_beside_rows = |at: usize| shapes[at].rank() == 2 && shapes[1 - at].rank() > 2;
        let weights = [0, 1].map(|at| weights[at] || !is_convolution && is_beside_rows(at));
        // Devices share what the batch makes many of. A weight gradient's terms are these.
        let share = |size: usize| size.div_ceil(self.parts);
        let (rows, contracted, columns) = match weights {
            [true, false] => (rows, contracted, share(columns)),
            [false, true] => (share(rows), contracted, columns),
            _ => (rows, share(contracted), columns),
        };
        Some(Product {
            role: role(quant, weights),
            rows,
            contracted,
            columns,
            is_convolution,
            is_prepared,
        })
    }
}

/// Of a contraction of which `weights` says which operands are weights.
fn role(quant: &ContractionQuant, weights: [bool; 2]) -> Role {
    let is_random = |format: &TensorFormat| format.rounding == Rounding::Stochastic;
    match weights {
        [false, false] => Role::Drhs,
        _ if quant.lhs.as_ref().is_some_and(is_random) => Role::Dlhs,
        _ => Role::Forward,
    }
}

/// Whether both operands become int8 by scales that are found in them.
fn finds_int8(quant: &ContractionQuant) -> bool {
    [quant.lhs, quant.rhs].iter().all(|format| {
        format.is_some_and(|format| format.element == DType::S8 && format.range == Range::Dynamic)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, DotDims, Init, grad};
    use crate::quant::{Policy, annotate};

    /// A linear layer of 256 inputs and 512 outputs on 4 rows of 32 tokens, with the derivatives of its weight and input.
    fn trained_layer() -> Graph {
        let b = Builder::new();
        let x = b
            .input("x", Shape::new(DType::F32, [4, 32, 256]), &[])
            .unwrap();
        let layer = b.root("unet").scope("to_q");
        let w = layer
            .param(
                "weight",
                Shape::new(DType::F32, [512, 256]),
                Init::Ones,
                &[],
            )
            .unwrap();
        let dims = DotDims {
            lhs_contract: vec![2],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        let y = layer.dot_general(x, w, dims, DType::F32).unwrap();
        let policy = Policy::aqt_int8("unet/", 1, Vec::new(), &[]).unwrap();
        annotate(&b, &policy).unwrap();
        let loss = b.sum(b.mul(y, y).unwrap(), &[0, 1, 2]).unwrap();
        for (name, gradient) in ["dx", "dw"]
            .into_iter()
            .zip(grad(&b, loss, &[x, w]).unwrap())
        {
            b.output(name, gradient, None).unwrap();
        }
        b.finish()
    }

    fn annotated(graph: &Graph) -> usize {
        let is_annotated = |node: &&Node| matches!(&node.op, Op::DotGeneral { quant: Some(_), .. });
        graph.nodes.iter().filter(is_annotated).count()
    }

    #[test]
    fn sizes_are_those_of_one_device() {
        let mut graph = trained_layer();
        assert_eq!(annotated(&graph), 3);
        let seen = std::cell::RefCell::new(Vec::new());
        let left = keep_where_faster(&mut graph, 2, false, &|product| {
            seen.borrow_mut().push(*product);
            true
        });
        assert_eq!((left, annotated(&graph)), (Vec::new(), 3));
        let mut seen: Vec<_> = seen
            .take()
            .iter()
            .map(|p| (p.role, [p.rows, p.columns, p.contracted]))
            .collect();
        seen.sort_unstable_by_key(|(_, sizes)| *sizes);
        // Two of the four rows are on a device: 64 tokens. The weight's derivative has them as terms.
        let expected = [
            (Role::Dlhs, [64, 256, 512]),
            (Role::Forward, [64, 512, 256]),
            (Role::Drhs, [512, 256, 64]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn what_does_not_pay_loses_its_formats_and_is_named() {
        let mut graph = trained_layer();
        let left = keep_where_faster(&mut graph, 1, false, &|product| product.rows != 128);
        assert_eq!(annotated(&graph), 1);
        assert_eq!(left.len(), 2);
        assert!(
            left.iter().any(|slower| slower.path == "unet/to_q"),
            "{left:?}"
        );
    }

    #[test]
    fn weights_that_are_prepared_are_not_rounded_in_the_step() {
        let mut graph = trained_layer();
        keep_where_faster(&mut graph, 1, true, &|product| {
            assert_eq!(product.is_prepared, product.rows == 128, "{product:?}");
            true
        });
    }
}
