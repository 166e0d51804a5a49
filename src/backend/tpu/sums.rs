//! Sums over rows as products.
//!
//! The gradient of a bias is the sum over all rows of its layer's gradient. Rows of a register are added one by one: for
//! bf16[1024,10240] libtpu predicts 58,188 cycles on a v5p, and 5,190 for the product of eight rows of ones with it, of which one
//! is then the sum. bf16 times one is exact, and both add in f32.

use crate::dtype::DType;
use crate::graph::{DotDims, Graph, GraphError, Op, Reduction};
use crate::shape::Shape;

use super::mosaic::LANES;

/// Rows of ones: those of a tile. A product with one row would be a sum again.
const ONES: usize = 8;

/// The scope of such a product, which tells it from those of its layer.
pub const SUM_OF_ROWS: &str = "sum_of_rows";

/// The graph with products in place of sums of bf16, in f32, over all dimensions but the last.
///
/// # Errors
/// When the graph is ill-typed.
pub fn products_of_ones(graph: &Graph) -> Result<Graph, GraphError> {
    graph.substitute(&mut |b, i, copies| {
        let Some(values) = summed(graph, i) else {
            return Ok(None);
        };
        let dims = &graph.nodes[values as usize].shape.dims;
        let (last, rows) = (dims.len() - 1, &dims[..dims.len() - 1]);
        let ones = Shape::new(DType::BF16, [&[ONES], rows].concat());
        let over = DotDims {
            lhs_contract: (1..=last).collect(),
            rhs_contract: (0..last).collect(),
            ..DotDims::default()
        };
        let b = b.scope(SUM_OF_ROWS);
        let ones = b.full(&ones, 1.0)?;
        let sums = b.dot_general(ones, copies[values as usize], over, DType::F32)?;
        let sum = b.slice_dim(sums, 0, 0, 1)?;
        b.reshape(sum, &dims[last..]).map(Some)
    })
}

/// The bf16 node of which node `id` is such a sum, of enough rows for a product.
fn summed(graph: &Graph, id: usize) -> Option<u32> {
    let operand = |id: usize| graph.nodes[id].operands.first().copied();
    let (wide, node) = (operand(id)?, &graph.nodes[id]);
    let Op::Reduce {
        kind: Reduction::Sum,
        dims,
    } = &node.op
    else {
        return None;
    };
    let is_widened = matches!(graph.nodes[wide as usize].op, Op::Convert(DType::F32));
    let values = operand(wide as usize).filter(|_| is_widened)?;
    let shape = &graph.nodes[values as usize].shape;
    let last = shape.rank().checked_sub(1)?;
    let is_of_rows = dims.len() == last && dims.iter().all(|dim| *dim < last);
    let rows: usize = shape.dims[..last].iter().product();
    (is_of_rows && shape.dtype == DType::BF16 && rows >= LANES).then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, evaluate};
    use crate::host_tensor::HostTensor;

    /// The sum over `dims` of `dtype[2, 96, 5]`, in f32.
    fn sum(dtype: DType, dims: &[usize]) -> Graph {
        let b = Builder::new();
        let x = b.input("x", Shape::new(dtype, [2, 96, 5]), &[]).unwrap();
        let x = b.convert(x, DType::F32).unwrap();
        b.output("y", b.sum(x, dims).unwrap(), None).unwrap();
        b.finish()
    }

    fn products(graph: &Graph) -> usize {
        let nodes = graph.nodes.iter();
        nodes
            .filter(|node| matches!(node.op, Op::DotGeneral { .. }))
            .count()
    }

    #[test]
    fn sums_over_rows_are_products() {
        let graph = sum(DType::BF16, &[0, 1]);
        let rewritten = products_of_ones(&graph).unwrap();
        assert_eq!(products(&rewritten), 1);
        let values: Vec<f64> = (0..2 * 96 * 5).map(|i| (i * 37 % 64) as f64).collect();
        let x = HostTensor::from_f64(Shape::new(DType::BF16, [2, 96, 5]), &values).unwrap();
        let inputs = [x];
        let [before, after] = [&graph, &rewritten].map(|graph| evaluate(graph, &inputs).unwrap());
        assert_eq!(before, after);
    }

    #[test]
    fn other_sums_stay() {
        for graph in [
            sum(DType::F32, &[0, 1]),
            sum(DType::BF16, &[1]),
            sum(DType::BF16, &[1, 2]),
        ] {
            assert_eq!(products(&products_of_ones(&graph).unwrap()), 0);
        }
    }
}
