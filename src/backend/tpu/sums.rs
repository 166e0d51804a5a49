//! Sums over rows as products.
//!
//! The gradient of a bias is the sum over all rows of its layer's gradient. Rows of a register are added one by one: for
//! bf16[1024,10240] libtpu predicts 58,188 cycles on a v5p, and 5,190 for the product of eight rows of ones with it, of which one
//! is then the sum. bf16 times one is exact, and both add in f32.
//!
//! What is added to all pixels of an image has a gradient of its own for each image, rounded to bf16: for bf16[1,16384,320] libtpu
//! predicts 112,647 cycles on a v6e.

use crate::dtype::DType;
use crate::graph::{DotDims, Graph, GraphError, Op, Reduction};
use crate::shape::Shape;

use super::mosaic::LANES;

/// Rows of ones: those of a tile. A product with one row would be a sum again.
const ONES: usize = 8;

/// The scope of such a product, which tells it from those of its layer.
pub const SUM_OF_ROWS: &str = "sum_of_rows";

/// The graph with products in place of sums of bf16 over all dimensions but the last, in f32; or, in bf16, over all but the last and
/// the first.
///
/// # Errors
/// When the graph is ill-typed.
pub fn products_of_ones(graph: &Graph) -> Result<Graph, GraphError> {
    graph.substitute(&mut |b, i, copies| {
        let Some(Summed { values, batch }) = summed(graph, i) else {
            return Ok(None);
        };
        let node = &graph.nodes[i];
        let dims = &graph.nodes[values as usize].shape.dims;
        let last = dims.len() - 1;
        let ones = [&dims[..batch], &[ONES], &dims[batch..last]].concat();
        let over = DotDims {
            lhs_batch: (0..batch).collect(),
            rhs_batch: (0..batch).collect(),
            lhs_contract: (batch + 1..=last).collect(),
            rhs_contract: (batch..last).collect(),
        };
        let b = b.scope(SUM_OF_ROWS);
        let ones = b.full(&Shape::new(DType::BF16, ones), 1.0)?;
        let sums = b.dot_general(ones, copies[values as usize], over, DType::F32)?;
        let sum = b.slice_dim(sums, batch, 0, 1)?;
        let sum = b.convert(sum, node.shape.dtype)?;
        b.reshape(sum, &node.shape.dims).map(Some)
    })
}

/// What is summed up.
struct Summed {
    /// The node, of bf16.
    values: u32,
    /// Leading dimensions that each have sums of their own.
    batch: usize,
}

/// What node `id` is the sum of, if it is one of enough rows for a product.
fn summed(graph: &Graph, id: usize) -> Option<Summed> {
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
    let (values, batch) = match is_widened {
        true => (operand(wide as usize)?, 0),
        false => (wide, 1),
    };
    let shape = &graph.nodes[values as usize].shape;
    let last = shape.rank().checked_sub(1)?;
    let is_of_rows = batch < last && dims.iter().copied().eq(batch..last);
    let rows: usize = shape.dims.get(batch..last)?.iter().product();
    (is_of_rows && shape.dtype == DType::BF16 && rows >= LANES).then_some(Summed { values, batch })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, evaluate};
    use crate::host_tensor::HostTensor;

    /// The sum over `dims` of `dtype[2, 96, 5]`, in f32.
    fn sum(dtype: DType, dims: &[usize]) -> Graph {
        sum_in(DType::F32, Shape::new(dtype, [2, 96, 5]), dims)
    }

    fn sum_in(dtype: DType, shape: Shape, dims: &[usize]) -> Graph {
        let b = Builder::new();
        let x = b.input("x", shape, &[]).unwrap();
        let x = b.convert(x, dtype).unwrap();
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
    fn sums_of_each_image_in_bf16_are_products() {
        let shape = Shape::new(DType::BF16, [2, 16, 8, 5]);
        let graph = sum_in(DType::BF16, shape.clone(), &[1, 2]);
        let rewritten = products_of_ones(&graph).unwrap();
        assert_eq!(products(&rewritten), 1);
        // Sums that bf16 holds.
        let values: Vec<f64> = (0..shape.count()).map(|i| (i * 37 % 2) as f64).collect();
        let inputs = [HostTensor::from_f64(shape, &values).unwrap()];
        let [before, after] = [&graph, &rewritten].map(|graph| evaluate(graph, &inputs).unwrap());
        assert_eq!(before, after);
    }

    #[test]
    fn other_sums_stay() {
        let narrow = |shape: &[usize], dims: &[usize]| {
            sum_in(DType::BF16, Shape::new(DType::BF16, shape), dims)
        };
        for graph in [
            narrow(&[2, 8, 8, 5], &[1, 2]),
            narrow(&[16, 16, 5], &[0, 1]),
            narrow(&[2, 16, 16, 5], &[0, 1, 2]),
            narrow(&[2, 16, 16], &[2]),
            sum(DType::F32, &[0, 1]),
            sum(DType::BF16, &[1]),
            sum(DType::BF16, &[1, 2]),
        ] {
            assert_eq!(products(&products_of_ones(&graph).unwrap()), 0);
        }
    }
}
