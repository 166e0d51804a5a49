//! Which values of recomputation regions are not computed again.

use crate::graph::{Binary, Composite, Graph, Keeps, Node, Op};

/// The nodes outside a region that its operations read.
pub(super) fn outside(graph: &Graph, region: u32) -> Vec<u32> {
    let is_inside = |node: &Node| node.remat.is_some_and(|remat| remat.region == region);
    let inside = graph.nodes.iter().filter(|node| is_inside(node));
    let mut ids: Vec<u32> = inside
        .flat_map(|node| node.operands.iter().copied())
        .filter(|id| !is_inside(&graph.nodes[*id as usize]))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Of each node, whether its region keeps its value ([`Keeps::Products`]): an attention, or a contraction without batch
/// dimensions, or the conversion to fewer bits that its sums reach through nothing but additions, whose derivative needs no values.
pub(super) fn kept(graph: &Graph) -> Vec<bool> {
    let mut kept = vec![false; graph.nodes.len()];
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    for (id, node) in graph.nodes.iter().enumerate() {
        for operand in &node.operands {
            users[*operand as usize].push(id);
        }
    }
    for (id, node) in graph.nodes.iter().enumerate() {
        let keeps = node.remat.map(|remat| remat.keeps);
        if keeps == Some(Keeps::Products) && is_product(&node.op) {
            kept[rounded(graph, &users, id).unwrap_or(id)] = true;
        }
    }
    kept
}

fn is_product(op: &Op) -> bool {
    match op {
        Op::DotGeneral { dims, .. } => dims.lhs_batch.is_empty(),
        Op::Convolution { .. }
        | Op::Composite {
            kind: Composite::Attention { .. },
            ..
        } => true,
        _ => false,
    }
}

/// The conversion to fewer bits that the sums of node `id` reach through additions in the same region.
fn rounded(graph: &Graph, users: &[Vec<usize>], mut id: usize) -> Option<usize> {
    let region = graph.nodes[id].remat;
    loop {
        let [user] = users[id][..] else {
            return None;
        };
        let node = &graph.nodes[user];
        match node.op {
            _ if node.remat != region => return None,
            Op::Convert(dtype) => {
                let narrows = dtype.bits() < graph.nodes[id].shape.dtype.bits();
                return narrows.then_some(user);
            }
            Op::Binary(Binary::Add) => id = user,
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{Builder, DotDims, Init, Reduction, Unary, evaluate, grad};
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// The sum, and its gradient, of `tanh(bf16(x V + b) + w)^2 U`, whose operations are a region that keeps what `keeps` says.
    fn gradient(keeps: Option<Keeps>) -> Graph {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, [2, 3]), &[]).unwrap();
        let root = b.root("m");
        let at = match keeps {
            Some(keeps) => root.checkpoint(keeps),
            None => root.clone(),
        };
        let param = |name: &str, dims: &[usize]| {
            let shape = Shape::new(DType::F32, dims);
            at.param(name, shape, Init::Zeros, &[]).unwrap()
        };
        let weights = [("v", &[3, 3][..]), ("b", &[3]), ("w", &[3]), ("u", &[3, 3])];
        let [v, bias, w, u] = weights.map(|(name, dims)| param(name, dims));
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let sums = at.dot_general(x, v, dims.clone(), DType::F32).unwrap();
        let y = at.add(sums, bias).unwrap();
        let y = at.convert(y, DType::BF16).unwrap();
        let y = at.convert(y, DType::F32).unwrap();
        let y = at.tanh(at.add(y, w).unwrap()).unwrap();
        let y = at.mul(y, y).unwrap();
        let y = at.dot_general(y, u, dims, DType::F32).unwrap();
        let loss = b.reduce(Reduction::Sum, y, &[0, 1]).unwrap();
        b.output("loss", loss, None).unwrap();
        let gradients = grad(&b, loss, &[v, bias, w, u]).unwrap();
        for (i, gradient) in gradients.into_iter().enumerate() {
            b.output(&format!("gradient{i}"), gradient, None).unwrap();
        }
        b.finish()
    }

    fn count(graph: &Graph, is: fn(&Op) -> bool) -> usize {
        let nodes = graph.nodes.iter().zip(graph.live_nodes());
        nodes.filter(|(node, live)| *live && is(&node.op)).count()
    }

    #[test]
    fn kept_products_are_not_computed_again() {
        let [whole, nothing, products] =
            [None, Some(Keeps::Nothing), Some(Keeps::Products)].map(gradient);
        let inputs: Vec<HostTensor> = (whole.inputs.iter().enumerate())
            .map(|(i, input)| {
                let values = (0..input.shape.count()).map(|j| ((7 * i + j) as f32).sin());
                HostTensor::from_f32(&input.shape.dims[..], &values.collect::<Vec<_>>()).unwrap()
            })
            .collect();
        let expected = evaluate(&whole, &inputs).unwrap();
        for graph in [&nothing, &products] {
            assert_eq!(evaluate(graph, &inputs).unwrap(), expected);
        }
        let dots = |graph| count(graph, |op| matches!(op, Op::DotGeneral { .. }));
        let tanhs = |graph| count(graph, |op| matches!(op, Op::Unary(Unary::Tanh)));
        assert_eq!(dots(&products), dots(&whole));
        assert!(dots(&nothing) > dots(&whole));
        assert!(tanhs(&products) > tanhs(&whole));
    }

    #[test]
    fn what_is_kept_of_a_layer_is_what_it_rounds() {
        // The barriers of the derivative say what it was given.
        let types = |keeps| {
            let graph = gradient(Some(keeps));
            let barriers = (graph.nodes.iter())
                .filter(|node| matches!(node.op, Op::OptimizationBarrier))
                .filter_map(|node| node.operands.get(1).filter(|_| node.operands.len() == 2));
            let types = barriers.map(|id| graph.nodes[*id as usize].shape.dtype);
            types.collect::<Vec<_>>()
        };
        assert_eq!(types(Keeps::Products), [DType::BF16]);
        assert!(types(Keeps::Nothing).is_empty());
    }
}
