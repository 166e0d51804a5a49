//! The element type in which gradients are summed over the batch, on each device and between devices.

use crate::dtype::DType;
use crate::graph::{Binary, Builder, GraphError, Op, Reduction, Tensor};

/// `gradient`, in its own type, as sums of `dtype`.
///
/// A weight's gradient sums over the batch in a product, or for a bias in a sum; devices and slices that have parts of the batch
/// add theirs up in the type of its result. So the result takes `dtype`, and what only moves, converts or adds it follows.
/// Sums of biases and norms only become wider: in bfloat16 they would lose more than they save. So do all, unless they `may_narrow`.
pub(super) fn summed_in(
    b: &Builder,
    gradient: Tensor,
    dtype: DType,
    may_narrow: bool,
) -> Result<Tensor, GraphError> {
    let path = b.with_graph(|graph| graph.path(&graph.nodes[gradient.index()]).to_string());
    let sums = Sums { dtype, may_narrow };
    b.at(path)
        .convert(sums.retyped(b, gradient)?, b.dtype(gradient))
}

/// The type that sums take.
#[derive(Clone, Copy)]
struct Sums {
    dtype: DType,
    may_narrow: bool,
}

impl Sums {
    /// The type of sums that are `own`.
    fn of(self, own: DType) -> DType {
        let fits = self.may_narrow || self.dtype.bits() >= own.bits();
        if fits { self.dtype } else { own }
    }

    fn retyped(self, b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
        let own = b.dtype(x);
        if !own.is_float() {
            return Ok(x);
        }
        let (mut op, operands, path) = b.with_graph(|graph| {
            let node = &graph.nodes[x.index()];
            let path = graph.path(node).to_string();
            (node.op.clone(), node.operands.clone(), path)
        });
        let at = b.at(path);
        let operands: Vec<Tensor> = operands.into_iter().map(|id| b.tensor(id)).collect();
        match &mut op {
            Op::Convert(_) => self.retyped(&at, operands[0]),
            Op::DotGeneral { result, .. } | Op::Convolution { result, .. } => {
                *result = self.of(own);
                at.push(op, &operands)
            }
            Op::Reduce {
                kind: Reduction::Sum,
                ..
            } if self.dtype == DType::F32 => {
                let wide = at.convert(operands[0], DType::F32)?;
                at.push(op, &[wide])
            }
            Op::Transpose(_)
            | Op::Reshape(_)
            | Op::Reverse(_)
            | Op::ShardingConstraint(_)
            | Op::Binary(Binary::Add) => {
                let operands = operands
                    .into_iter()
                    .map(|operand| self.retyped(&at, operand));
                let operands = operands.collect::<Result<Vec<_>, _>>()?;
                at.push(op, &operands)
            }
            _ => at.convert(x, self.of(own)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{DotDims, Graph, evaluate, grad};
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// A linear layer with a bias, used twice, that multiplies in `compute` and gives sums in `result`: the gradients of weight and
    /// bias, both float32, as sums of `sums`.
    fn gradients_of([compute, result]: [DType; 2], sums: DType, may_narrow: bool) -> Graph {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, [6, 4]), &[]).unwrap();
        let w = b.input("w", Shape::new(DType::F32, [5, 4]), &[]).unwrap();
        let bias = b.input("bias", Shape::new(DType::F32, [5]), &[]).unwrap();
        let [x, weight] = [x, w].map(|t| b.convert(t, compute).unwrap());
        let bias_in = b.convert(bias, result).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        let layer = |x: Tensor| {
            let y = b.dot_general(x, weight, dims.clone(), result).unwrap();
            let bias = b.broadcast_in_dim(bias_in, &[1], &[6, 5]).unwrap();
            b.add(y, bias).unwrap()
        };
        let twice = b.mul(layer(x), layer(b.mul(x, x).unwrap())).unwrap();
        let loss = b.sum(b.convert(twice, DType::F32).unwrap(), &[0, 1]);
        let found = grad(&b, loss.unwrap(), &[w, bias]).unwrap();
        for (name, gradient) in ["dw", "dbias"].into_iter().zip(found) {
            let gradient = summed_in(&b, gradient, sums, may_narrow).unwrap();
            b.output(name, gradient, None).unwrap();
        }
        b.finish()
    }

    fn gradients(compute: DType, sums: DType) -> Graph {
        gradients_of([compute; 2], sums, true)
    }

    /// The result types of live products in the derivative, and of live sums.
    fn types(graph: &Graph) -> [Vec<DType>; 2] {
        let live = graph.live_nodes();
        let of = |wanted: &dyn Fn(&Op) -> bool| {
            let nodes = graph.nodes.iter().zip(&live);
            let nodes = nodes.filter(|(node, live)| **live && wanted(&node.op));
            nodes.map(|(node, _)| node.shape.dtype).collect()
        };
        let is_gradient = |op: &Op| match op {
            Op::DotGeneral { dims, .. } => dims.rhs_contract != [1],
            _ => false,
        };
        let is_sum = |op: &Op| matches!(op, Op::Reduce { .. });
        [of(&is_gradient), of(&is_sum)]
    }

    #[test]
    fn gradients_are_sums_of_the_type_that_is_asked_for() {
        let (wide, narrow) = (DType::F32, DType::BF16);
        // Both uses of the weight, and of the bias.
        assert_eq!(types(&gradients(narrow, wide)), [[wide; 2], [wide; 2]]);
        assert_eq!(types(&gradients(wide, wide)), [[wide; 2], [wide; 2]]);
        // Sums of biases stay wide.
        assert_eq!(
            types(&gradients(wide, narrow)),
            [[narrow; 2].to_vec(), [wide; 2].to_vec()]
        );
    }

    #[test]
    fn sums_that_may_not_narrow_only_become_wider() {
        let (wide, narrow) = (DType::F32, DType::BF16);
        let all_wide = [[wide; 2], [wide; 2]];
        assert_eq!(
            types(&gradients_of([narrow, wide], narrow, false)),
            all_wide
        );
        assert_eq!(types(&gradients_of([narrow; 2], wide, false)), all_wide);
    }

    #[test]
    fn wide_sums_of_narrow_products_are_nearer_to_the_wide_gradient() {
        let values = |seed: usize, dims: &[usize]| {
            let count = dims.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|i| ((i * 37 + seed * 11) % 101) as f32 / 64.0 - 0.7)
                .collect();
            HostTensor::from_f32(dims, &values).unwrap()
        };
        let inputs = [values(1, &[6, 4]), values(2, &[5, 4]), values(3, &[5])];
        let result = |compute: DType, sums: DType| {
            let found = evaluate(&gradients(compute, sums), &inputs).unwrap();
            assert!(found.iter().all(|t| t.shape.dtype == DType::F32));
            found[0].to_f64_vec().unwrap()
        };
        let exact = result(DType::F32, DType::F32);
        let error = |found: Vec<f64>| -> f64 {
            let pairs = found.iter().zip(&exact);
            pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
        };
        let wide = error(result(DType::BF16, DType::F32));
        let narrow = error(result(DType::BF16, DType::BF16));
        let rounded = error(result(DType::F32, DType::BF16));
        assert!(wide < narrow, "{wide} {narrow}");
        assert!(rounded > 0.0 && rounded < narrow, "{rounded} {narrow}");
    }
}
