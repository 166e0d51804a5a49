//! Layer norms and their derivatives, as training steps have them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{Binary, Builder, Composite, Graph, Node, Op, Tensor};
use crate::shape::Shape;

use super::super::Features;
use super::super::layer_norm::{Finds, LayerNorm};
use super::{Result, is_split};

/// The nodes that read each node ([`follow::users`]).
type Users = [Vec<Option<usize>>];

/// Whether [`super::claim_training`] takes a layer norm and its derivative, where the devices compute `parts` parts of the batch. One
/// that stayed whole and that no kernel took would be inlined behind the derivative, where its operations stand in another scope, and
/// in another order from block to block: equal blocks would then be no loop.
pub(super) fn is_claimed(kind: &Composite, body: &Graph, features: Features, parts: usize) -> bool {
    let Composite::LayerNorm { epsilon } = *kind else {
        return false;
    };
    let x = body.inputs.first().map(|input| &input.shape);
    let result = body.outputs.first();
    let is_bf16 = result.is_some_and(|y| body.nodes[y.node as usize].shape.dtype == DType::BF16);
    is_bf16
        && x.is_some_and(|x| {
            let all = [
                Finds::Norm,
                Finds::GradientOfX { added: true },
                Finds::GradientsOfWeights,
            ];
            all.into_iter().all(|finds| {
                let kernel = LayerNorm {
                    finds,
                    epsilon,
                    memory: features.kernel_memory,
                };
                grouped(kernel, x, parts, 1).is_some()
            })
        })
}

/// The sizes of groups of rows, of which each of the `cores` has one of each part of the batch, if the kernel takes them.
fn grouped(kernel: LayerNorm, x: &Shape, parts: usize, cores: usize) -> Option<[usize; 3]> {
    let columns = x.dims.last().copied().filter(|columns| *columns > 0)?;
    let (count, groups) = (x.count() / columns, parts * cores);
    let takes = x.dtype == DType::BF16 && is_split(x, parts) && count.is_multiple_of(groups);
    (takes && kernel.fits(count / groups, columns)).then_some([groups, count / groups, columns])
}

/// Calls the kernels of layer norms.
pub(super) struct LayerNorms<'g> {
    graph: &'g Graph,
    features: Features,
    /// Of the batch.
    parts: usize,
    /// Gradients of x and what they are added to, by the node of the sum that alone reads them.
    added: HashMap<usize, [u32; 2]>,
    /// The gradients of weight and bias that were found so far, by the nodes that they read.
    found: HashMap<&'g [u32], [Tensor; 2]>,
}

impl<'g> LayerNorms<'g> {
    pub fn of(graph: &'g Graph, users: &Users, features: Features, parts: usize) -> Self {
        let added = (0..graph.nodes.len()).filter_map(|i| {
            let (Some((_, Finds::GradientOfX { .. })), &[Some(user)]) =
                (of_norm(&graph.nodes[i]), &users[i][..])
            else {
                return None;
            };
            let sum = &graph.nodes[user];
            let other = follow::other_term(i as u32, sum)?;
            let is_sum = matches!(sum.op, Op::Binary(Binary::Add));
            is_sum.then_some((user, [i as u32, other]))
        });
        LayerNorms {
            graph,
            features,
            parts,
            added: added.collect(),
            found: HashMap::new(),
        }
    }

    /// The kernel of node `i`, where that is a layer norm, of its derivative, or the sum of a gradient and another; `None` where there is
    /// none.
    pub fn claim(&mut self, b: &Builder, i: usize, copies: &[Tensor]) -> Result<Option<Tensor>> {
        let sum = self.added.get(&i).copied();
        let node = match sum {
            Some([gradient, _]) => &self.graph.nodes[gradient as usize],
            None => &self.graph.nodes[i],
        };
        let Some((epsilon, finds)) = of_norm(node) else {
            return Ok(None);
        };
        let copy = |id: u32| copies[id as usize];
        let operands: Vec<Tensor> = node.operands.iter().map(|id| copy(*id)).collect();
        let kernel = |finds| LayerNorm {
            finds,
            epsilon,
            memory: self.features.kernel_memory,
        };
        match (finds, &operands[..]) {
            (Finds::Norm, &[x, weight, bias]) => {
                self.call(b, kernel(finds), vec![x], &[weight, bias], &node.shape)
            }
            (Finds::GradientOfX { .. }, &[x, weight, _, gradient]) => {
                let added = sum.is_some();
                let mut rows = vec![x, gradient];
                rows.extend(sum.map(|[_, other]| copy(other)));
                let kernel = kernel(Finds::GradientOfX { added });
                self.call(b, kernel, rows, &[weight], &node.shape)
            }
            (Finds::GradientsOfWeights, &[x, _, _, gradient]) => {
                let found = match self.found.get(&node.operands[..]) {
                    Some(found) => *found,
                    None => match self.sums(b, kernel(finds), [x, gradient])? {
                        Some(found) => {
                            self.found.insert(&node.operands, found);
                            found
                        }
                        None => return Ok(None),
                    },
                };
                Ok(operand_of_gradient(node).and_then(|at| found.get(at - 1).copied()))
            }
            _ => Ok(None),
        }
    }

    /// [`grouped`] of tensors of one shape.
    fn grouped(
        &self,
        b: &Builder,
        kernel: LayerNorm,
        rows: &[Tensor],
        cores: usize,
    ) -> Option<[usize; 3]> {
        let shape = b.shape(*rows.first()?);
        let are_equal = rows.iter().all(|of_rows| b.shape(*of_rows) == shape);
        grouped(kernel, &shape, self.parts, cores).filter(|_| are_equal)
    }

    /// The kernel's call with `vectors` behind the first of the `rows`, which is x; the result has its shape.
    fn call(
        &self,
        b: &Builder,
        kernel: LayerNorm,
        rows: Vec<Tensor>,
        vectors: &[Tensor],
        result: &Shape,
    ) -> Result<Option<Tensor>> {
        let Some(sizes) = self
            .grouped(b, kernel, &rows, 1)
            .filter(|_| result.dtype == DType::BF16)
        else {
            return Ok(None);
        };
        let mut operands = Vec::new();
        for of_rows in rows {
            operands.push(b.reshape(of_rows, &sizes)?);
        }
        for (place, vector) in vectors.iter().enumerate() {
            let vector = b.convert(*vector, DType::F32)?;
            operands.insert(1 + place, b.reshape(vector, &[1, 1, sizes[2]])?);
        }
        let y = b.push(Op::CustomCall(Arc::new(kernel)), &operands)?;
        b.reshape(y, &result.dims).map(Some)
    }

    /// The gradients of weight and bias.
    fn sums(
        &self,
        b: &Builder,
        kernel: LayerNorm,
        rows: [Tensor; 2],
    ) -> Result<Option<[Tensor; 2]>> {
        let cores = self.features.cores().iter();
        let mut sizes = cores.map(|cores| self.grouped(b, kernel, &rows, *cores));
        let Some(sizes) = sizes.find_map(|sizes| sizes) else {
            return Ok(None);
        };
        let [x, gradient] = rows.map(|of_rows| b.reshape(of_rows, &sizes));
        let sums = b.push(Op::CustomCall(Arc::new(kernel)), &[x?, gradient?])?;
        let half = b.dims(sums)[1] / 2;
        let [of_weight, of_bias] = [0, half].map(|first| {
            let own = b.slice_dim(sums, 1, first, first + half)?;
            b.sum(own, &[0, 1])
        });
        Ok(Some([of_weight?, of_bias?]))
    }
}

/// What a kernel finds of a layer norm that is this node, and its epsilon.
fn of_norm(node: &Node) -> Option<(f64, Finds)> {
    let Op::Composite { kind, .. } = &node.op else {
        return None;
    };
    let (Composite::LayerNorm { epsilon }, operand) = kind.layer() else {
        return None;
    };
    let finds = match operand {
        None => Finds::Norm,
        Some(0) => Finds::GradientOfX { added: false },
        Some(_) => Finds::GradientsOfWeights,
    };
    Some((*epsilon, finds))
}

/// Of which operand a node is the gradient.
fn operand_of_gradient(node: &Node) -> Option<usize> {
    match &node.op {
        Op::Composite { kind, .. } => kind.layer().1,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{evaluate, vjp};
    use crate::host_tensor::HostTensor;
    use crate::nn::{self, Precision};
    use crate::topology::Chip;

    /// A layer norm of bf16, with `residual` added to what is normalized, and its gradients: batch, tokens and features.
    fn trained(dims: [usize; 3], residual: bool) -> Graph {
        let b = Builder::new();
        let shape = Shape::new(DType::BF16, dims);
        let [x, gradient] =
            ["x", "gradient"].map(|name| b.input(name, shape.clone(), &[]).unwrap());
        let precision = Precision {
            weights: DType::F32,
            activations: DType::BF16,
        };
        let y = nn::layer_norm(&b.root("m"), x, 1e-5, precision).unwrap();
        let weights = b.with_graph(|graph| graph.nodes[y.id as usize].operands.clone());
        let weights = [1, 2].map(|at| b.tensor(weights[at]));
        let y = if residual { b.add(x, y).unwrap() } else { y };
        let found = vjp(&b, &[(y, gradient)], &[x, weights[0], weights[1]]).unwrap();
        let names = ["y", "dx", "dweight", "dbias"];
        for (name, value) in names.into_iter().zip([vec![y], found].concat()) {
            b.output(name, value, None).unwrap();
        }
        b.finish()
    }

    fn claimed(graph: &Graph, chip: Chip, parts: usize) -> (Graph, Vec<&'static str>) {
        let users = follow::users(graph);
        let mut norms = LayerNorms::of(graph, &users, chip.features(), parts);
        let claimed = graph.substitute(&mut |b, i, copies| norms.claim(b, i, copies));
        let claimed = claimed.unwrap();
        let mut names = Vec::new();
        claimed.visit_calls(&mut |_, _, call| names.push(call.name()));
        names.sort_unstable();
        (claimed, names)
    }

    #[test]
    fn kernels_are_the_norm_and_its_derivative() {
        // Blocks of 128, 48, 32 and 256 rows; a part of the batch that is two entries; rows that two cores share; rows that make no tile.
        let cases = [
            ([1, 128, 128], Chip::V5e, 1, true),
            ([1, 48, 256], Chip::V5e, 1, true),
            ([4, 16, 128], Chip::V5e, 2, true),
            ([1, 512, 128], Chip::V5p, 1, true),
            ([1, 24, 128], Chip::V5e, 1, false),
        ];
        let residual = cases.iter().flat_map(|case| [(case, false), (case, true)]);
        for (&(dims, chip, parts, takes), residual) in residual {
            let graph = trained(dims, residual);
            let (kernels, calls) = claimed(&graph, chip, parts);
            let expected = match (takes, residual) {
                (false, _) => vec![],
                (true, false) => vec![
                    "layer_norm",
                    "layer_norm_gradient",
                    "layer_norm_gradients_of_weights",
                ],
                (true, true) => vec![
                    "layer_norm",
                    "layer_norm_added_gradient",
                    "layer_norm_gradients_of_weights",
                ],
            };
            assert_eq!(calls, expected, "{dims:?}");
            let values = |shape: &Shape, seed: usize| {
                let values = (0..shape.count()).map(|i| ((i * 37 + seed * 11) % 61) as f64 / 20.0);
                HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap()
            };
            let inputs = graph.inputs.iter().enumerate();
            let inputs: Vec<HostTensor> = inputs.map(|(i, of)| values(&of.shape, i)).collect();
            let [expected, found] = [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap());
            for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let [a, b] = [expected, found].map(|x| x.to_f64_vec().unwrap());
                let norm: f64 = a.iter().map(|x| x * x).sum();
                let distance: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
                // Results of bf16 are rounded by up to 2^-9 (2e-3), which they all are at the same place.
                let error = (distance / norm).sqrt();
                assert!(error <= 1e-3, "{dims:?}, result {i}: {error}");
            }
        }
    }
}
