//! Kernels that read rows of what another kernel gave, where they lie.
//!
//! A kernel has one result, so what it finds for several tensors are rows of one array, such as the gradients of an attention's queries, keys
//! and values. The compiler's own operations slice them as they read; for a kernel each slice would be copied.

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Graph, GraphError, Node, Op, Rows, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph, whose kernels take rows of other kernels' results with the rest of these. Where the batch is in several `parts`, each on a
/// device of its own, rows of all entries can be those of one matrix only if a part has one entry.
///
/// # Errors
/// None for a well-typed graph.
pub fn in_rows(graph: &Graph, parts: usize) -> Result<Graph> {
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let op = match &node.op {
            Op::While { cond, body } => Op::While {
                cond: cond.clone(),
                body: Box::new(in_rows(body, parts)?),
            },
            Op::CustomCall(call) => {
                let found: Vec<Option<(u32, Rows)>> = node
                    .operands
                    .iter()
                    .map(|operand| rows_of(graph, *operand, parts))
                    .collect();
                if found.iter().all(Option::is_none) {
                    return Ok(None);
                }
                let sources = found.iter().zip(&node.operands);
                let sources = sources.map(|(found, own)| found.map_or(*own, |(source, _)| source));
                let sources: Vec<u32> = sources.collect();
                let shapes: Vec<&Shape> = sources.iter().map(|id| shape(graph, *id)).collect();
                let rows: Vec<Option<Rows>> =
                    found.iter().map(|of| of.map(|(_, rows)| rows)).collect();
                let Some(call) = Arc::clone(call).in_rows(&rows, &shapes, parts) else {
                    return Ok(None);
                };
                let operands: Vec<Tensor> = sources.iter().map(|id| copies[*id as usize]).collect();
                return b.push(Op::CustomCall(call), &operands).map(Some);
            }
            _ => return Ok(None),
        };
        let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
        b.push(op, &operands).map(Some)
    })
}

fn node(graph: &Graph, id: u32) -> &Node {
    &graph.nodes[id as usize]
}

fn shape(graph: &Graph, id: u32) -> &Shape {
    &node(graph, id).shape
}

/// The kernel's result that an operand is rows of, and which.
fn rows_of(graph: &Graph, operand: u32, parts: usize) -> Option<(u32, Rows)> {
    let at = node(graph, origin(graph, operand));
    let Op::Slice {
        start,
        limit,
        stride,
    } = &at.op
    else {
        return None;
    };
    let source = at.operands[0];
    let ([0, first, 0], [_, end, _]) = (&start[..], &limit[..]) else {
        return None;
    };
    let [batch, _, columns] = shape(graph, source).dims[..] else {
        return None;
    };
    let (first, count) = (*first, end - first);
    let own = &shape(graph, operand).dims;
    let is_merged = *own != [batch, count, columns];
    let is_rows = limit[0] == batch && limit[2] == columns && stride.iter().all(|step| *step == 1);
    let is_known = !is_merged || (*own == [1, batch * count, columns] && batch == parts);
    let is_call = matches!(&node(graph, source).op, Op::CustomCall(call) if call.in_place() == 0 && call.others().is_empty());
    let rows = Rows {
        first,
        count,
        is_merged,
    };
    (is_rows && is_known && is_call).then_some((source, rows))
}

/// What a node is without reshapes, marks, shardings, and conversions to `f32` and back.
fn origin(graph: &Graph, mut id: u32) -> u32 {
    loop {
        let at = node(graph, id);
        id = match &at.op {
            Op::Reshape(_) | Op::Stored | Op::ShardingConstraint(_) => at.operands[0],
            Op::Convert(DType::BF16) => {
                let wide = node(graph, at.operands[0]);
                match wide.op {
                    Op::Convert(DType::F32)
                        if shape(graph, wide.operands[0]).dtype == DType::BF16 =>
                    {
                        wide.operands[0]
                    }
                    _ => return id,
                }
            }
            _ => return id,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::GatedGelu;
    use super::super::mosaic::VMEM_BYTES;
    use super::*;
    use crate::graph::{Batch, Builder, CustomCall, evaluate};
    use crate::host_tensor::HostTensor;

    const GATED: GatedGelu = GatedGelu {
        derivative: false,
        memory: VMEM_BYTES,
    };

    /// A gated GELU of 32 rows of what another one gave for 96, from `first` on.
    fn chained(first: usize) -> Graph {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::BF16, [1, 96, 512]), &[]);
        let call = |x: Tensor| b.push(Op::CustomCall(Arc::new(GATED)), &[x]).unwrap();
        let rows = b.slice_dim(call(x.unwrap()), 1, first, first + 32).unwrap();
        let wide = b.convert(rows, DType::F32).unwrap();
        let rows = b.convert(wide, DType::BF16).unwrap();
        b.output("y", call(rows), None).unwrap();
        b.finish()
    }

    fn slices(graph: &Graph) -> usize {
        let live = graph.live_nodes();
        let nodes = graph.nodes.iter().zip(live).filter(|(_, live)| *live);
        nodes
            .filter(|(node, _)| matches!(node.op, Op::Slice { .. }))
            .count()
    }

    fn values(shape: &Shape) -> HostTensor {
        let values = (0..shape.count()).map(|i| ((i * 37 + i / 7) % 61) as f64 / 20.0 - 1.5);
        HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn rows_are_read_where_they_lie() {
        // The last begin where no block does.
        for (first, left) in [(0, 0), (32, 0), (64, 0), (16, 1)] {
            let graph = chained(first);
            let found = in_rows(&graph, 1).unwrap();
            assert_eq!(slices(&found), left, "from {first}");
            let x = values(&graph.inputs[0].shape);
            let [before, after] =
                [&graph, &found].map(|g| evaluate(g, std::slice::from_ref(&x)).unwrap());
            assert_eq!(before, after, "from {first}");
        }
    }

    #[test]
    fn rows_of_all_entries_are_those_of_one_where_a_part_has_one() {
        let all = Shape::new(DType::BF16, [4, 96, 256]);
        let rows = [Some(Rows {
            first: 32,
            count: 32,
            is_merged: true,
        })];
        let of = |parts| Arc::new(GATED).in_rows(&rows, &[&all], parts);
        assert!(of(1).is_none() && of(2).is_none());
        let call = of(4).unwrap();
        let result = call.infer(&[&all]).unwrap();
        assert_eq!(result, Shape::new(DType::BF16, [1, 128, 128]));
        let batch = Batch {
            operands: vec![Some(0)],
            result: 1,
        };
        assert_eq!(call.batch(&[&all]), Some(batch));
    }
}
