//! Layer norms and their derivatives, as training steps have them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, Node, Op, Tensor};
use crate::shape::Shape;

use super::super::Features;
use super::super::layer_norm::{Finds, LayerNorm};
use super::{Result, is_split};

/// Whether [`super::claim_training`] may take a composite: a layer norm of bf16, and its derivative.
pub(super) fn is_claimed(kind: &Composite, body: &Graph) -> bool {
    let is_norm = match kind {
        Composite::LayerNorm { .. } => true,
        Composite::Gradient { of, .. } => matches!(**of, Composite::LayerNorm { .. }),
        _ => false,
    };
    let x = body.inputs.first();
    is_norm && x.is_some_and(|x| x.shape.dtype == DType::BF16)
}

/// Calls the kernels of layer norms.
pub(super) struct LayerNorms<'g> {
    features: Features,
    /// Of the batch.
    parts: usize,
    /// The gradients of weight and bias that were found so far, by the nodes that they read.
    found: HashMap<&'g [u32], [Tensor; 2]>,
}

impl<'g> LayerNorms<'g> {
    pub fn of(features: Features, parts: usize) -> Self {
        LayerNorms {
            features,
            parts,
            found: HashMap::new(),
        }
    }

    /// The kernel of what [`is_claimed`] says yes to; `None` where there is none.
    pub fn claim(
        &mut self,
        b: &Builder,
        node: &'g Node,
        kind: &Composite,
        copies: &[Tensor],
    ) -> Result<Option<Tensor>> {
        let operands: Vec<Tensor> = node
            .operands
            .iter()
            .map(|id| copies[*id as usize])
            .collect();
        let (epsilon, finds) = match kind {
            Composite::LayerNorm { epsilon } => (*epsilon, Finds::Norm),
            Composite::Gradient { of, operand } => match **of {
                Composite::LayerNorm { epsilon } if *operand == 0 => (epsilon, Finds::GradientOfX),
                Composite::LayerNorm { epsilon } => (epsilon, Finds::GradientsOfWeights),
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        let kernel = LayerNorm {
            finds,
            epsilon,
            memory: self.features.kernel_memory,
        };
        match (kind, finds, &operands[..]) {
            (_, Finds::Norm, &[x, weight, bias]) => {
                self.call(b, kernel, vec![x], &[weight, bias], &node.shape)
            }
            (_, Finds::GradientOfX, &[x, weight, _, gradient]) => {
                self.call(b, kernel, vec![x, gradient], &[weight], &node.shape)
            }
            (Composite::Gradient { operand, .. }, _, &[x, _, _, gradient]) => {
                let found = match self.found.get(&node.operands[..]) {
                    Some(found) => *found,
                    None => match self.sums(b, kernel, [x, gradient])? {
                        Some(found) => {
                            self.found.insert(&node.operands, found);
                            found
                        }
                        None => return Ok(None),
                    },
                };
                // The weight is the second operand, and the bias the third.
                Ok(operand.checked_sub(1).and_then(|at| found.get(at)).copied())
            }
            _ => Ok(None),
        }
    }

    /// The sizes of groups of rows, of which each core has one of each part of the batch, if the kernel takes them.
    fn grouped(
        &self,
        b: &Builder,
        kernel: LayerNorm,
        rows: &[Tensor],
        cores: usize,
    ) -> Option<[usize; 3]> {
        let shape = b.shape(*rows.first()?);
        let columns = shape.dims.last().copied().filter(|columns| *columns > 0)?;
        let (count, groups) = (shape.count() / columns, self.parts * cores);
        let takes = shape.dtype == DType::BF16
            && rows.iter().all(|of_rows| b.shape(*of_rows) == shape)
            && is_split(&shape, self.parts)
            && count.is_multiple_of(groups);
        (takes && kernel.fits(count / groups, columns)).then_some([groups, count / groups, columns])
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
        let cores: &[usize] = if self.features.one_core {
            &[1]
        } else {
            &[2, 1]
        };
        let mut sizes = cores
            .iter()
            .map(|cores| self.grouped(b, kernel, &rows, *cores));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{evaluate, vjp};
    use crate::host_tensor::HostTensor;
    use crate::nn::{self, Precision};
    use crate::topology::Chip;

    /// A layer norm of bf16, and its gradients: batch, tokens and features.
    fn trained(dims: [usize; 3]) -> Graph {
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
        let found = vjp(&b, &[(y, gradient)], &[x, weights[0], weights[1]]).unwrap();
        let names = ["y", "dx", "dweight", "dbias"];
        for (name, value) in names.into_iter().zip([vec![y], found].concat()) {
            b.output(name, value, None).unwrap();
        }
        b.finish()
    }

    fn claimed(graph: &Graph, chip: Chip, parts: usize) -> (Graph, usize) {
        let mut norms = LayerNorms::of(chip.features(), parts);
        let claimed = graph.substitute(&mut |b, i, copies| match &graph.nodes[i].op {
            Op::Composite { kind, .. } => norms.claim(b, &graph.nodes[i], kind, copies),
            _ => Ok(None),
        });
        let claimed = claimed.unwrap();
        let mut calls = 0;
        claimed.visit_calls(&mut |_, _, _| calls += 1);
        (claimed, calls)
    }

    #[test]
    fn kernels_are_the_norm_and_its_derivative() {
        // Blocks of 128, 48 and 16 rows; a part of the batch that is two entries; rows that two cores share; rows that make no tile.
        let cases = [
            ([1, 128, 128], Chip::V5e, 1, 3),
            ([1, 48, 256], Chip::V5e, 1, 3),
            ([4, 16, 128], Chip::V5e, 2, 3),
            ([1, 256, 128], Chip::V5p, 1, 3),
            ([1, 24, 128], Chip::V5e, 1, 0),
        ];
        for (dims, chip, parts, count) in cases {
            let graph = trained(dims);
            let (kernels, calls) = claimed(&graph, chip, parts);
            assert_eq!(calls, count, "{dims:?}");
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
