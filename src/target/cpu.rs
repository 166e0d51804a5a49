//! XLA's CPU back end.

use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, ConvLayout, DotDims, Graph, GraphError, Op, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

/// The graph as XLA's CPU back end runs it fastest. Apply it to a lowered graph, before emission.
///
/// Integer convolutions get channels-last images and a kernel `[spatial.., input, output]`: those run on vector
/// instructions, any other layout on a scalar loop 20 to 40 times slower.
///
/// bf16 dots with an f32 result stay as they are where they are plain matrix products; any other gets f32 operands,
/// which changes no value: the back end's fallback for them has no such kernel and fails when it runs.
///
/// # Errors
/// When the graph is ill-typed.
pub fn for_cpu(graph: &Graph) -> Result<Graph> {
    graph.rewrite(&mut |b, node, operands| match &node.op {
        Op::Convolution {
            dims,
            quant: None,
            result,
        } if !b.dtype(operands[0]).is_float() && !is_channels_last(dims) => {
            let (lhs, rhs, inner) = channels_last(b, operands[0], operands[1], dims)?;
            let y = b.convolution(lhs, rhs, inner, *result)?;
            from_channels_last(b, y, &dims.out).map(Some)
        }
        Op::DotGeneral {
            dims,
            quant: None,
            result: DType::F32,
        } if b.dtype(operands[0]) == DType::BF16 && !is_matrix_product(b, operands, dims) => {
            let lhs = b.convert(operands[0], DType::F32)?;
            let rhs = b.convert(operands[1], DType::F32)?;
            b.dot_general(lhs, rhs, dims.clone(), DType::F32).map(Some)
        }
        _ => Ok(None),
    })
}

/// Whether a dot contracts the last dimension of the lhs with one of a matrix, and neither side is a vector.
fn is_matrix_product(b: &Builder, operands: &[Tensor], dims: &DotDims) -> bool {
    let (lhs, rhs) = (b.dims(operands[0]), b.dims(operands[1]));
    let rows: usize = lhs.iter().rev().skip(1).product();
    dims.lhs_batch.is_empty()
        && dims.lhs_contract == [lhs.len() - 1]
        && dims.rhs_contract.len() == 1
        && rhs.len() == 2
        && rows > 1
        && rhs.iter().all(|size| *size > 1)
}

/// `[spatial.., input, output]`
fn kernel_layout(spatial: usize) -> ConvLayout {
    ConvLayout {
        batch: spatial + 1,
        feature: spatial,
        spatial: (0..spatial).collect(),
    }
}

fn is_channels_last(dims: &ConvDims) -> bool {
    let spatial = dims.strides.len();
    dims.lhs == ConvLayout::channels_last(spatial)
        && dims.out == ConvLayout::channels_last(spatial)
        && dims.rhs == kernel_layout(spatial)
}

/// Both operands transposed to channels last, with the attributes of their convolution.
fn channels_last(
    b: &Builder,
    lhs: Tensor,
    rhs: Tensor,
    dims: &ConvDims,
) -> Result<(Tensor, Tensor, ConvDims)> {
    let spatial = dims.strides.len();
    let image = [
        &[dims.lhs.batch],
        dims.lhs.spatial.as_slice(),
        &[dims.lhs.feature],
    ]
    .concat();
    let kernel = [
        dims.rhs.spatial.as_slice(),
        &[dims.rhs.feature, dims.rhs.batch],
    ]
    .concat();
    let attributes = ConvDims {
        lhs: ConvLayout::channels_last(spatial),
        rhs: kernel_layout(spatial),
        out: ConvLayout::channels_last(spatial),
        ..dims.clone()
    };
    Ok((
        b.transpose(lhs, &image)?,
        b.transpose(rhs, &kernel)?,
        attributes,
    ))
}

/// A channels-last result in the wanted layout.
fn from_channels_last(b: &Builder, y: Tensor, layout: &ConvLayout) -> Result<Tensor> {
    let mut perm = vec![0; layout.rank()];
    perm[layout.batch] = 0;
    perm[layout.feature] = layout.rank() - 1;
    for (i, &d) in layout.spatial.iter().enumerate() {
        perm[d] = i + 1;
    }
    b.transpose(y, &perm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::evaluate;
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// A convolution of two inputs `[n, h, w, i]` and `[o, i, 3, 3]` with stride 2 and uneven padding.
    fn convolution(dtype: DType, result: DType, lhs: ConvLayout, out: ConvLayout) -> Graph {
        let sizes = |layout: &ConvLayout, batch, feature, spatial: [usize; 2]| {
            let mut dims = vec![0; 4];
            dims[layout.batch] = batch;
            dims[layout.feature] = feature;
            for (d, size) in layout.spatial.iter().zip(spatial) {
                dims[*d] = size;
            }
            dims
        };
        let b = Builder::new();
        let rhs = ConvLayout::channels_first(2);
        let x = Shape::new(dtype, sizes(&lhs, 2, 3, [7, 6]));
        let w = Shape::new(dtype, sizes(&rhs, 5, 3, [3, 3]));
        let x = b.input("x", x, &[]).unwrap();
        let w = b.input("w", w, &[]).unwrap();
        let dims = ConvDims {
            lhs,
            rhs,
            out,
            strides: vec![2, 1],
            padding: vec![(1, 0), (2, 1)],
            lhs_dilation: vec![1; 2],
            rhs_dilation: vec![1, 2],
            feature_groups: 1,
            batch_groups: 1,
        };
        let layer = b.root("unet").scope("conv");
        let y = layer.convolution(x, w, dims, result).unwrap();
        b.output("y", y, None).unwrap();
        b.finish()
    }

    fn counting(shape: &Shape) -> HostTensor {
        let values: Vec<f64> = (0..shape.count())
            .map(|i| ((i * 37 + 11) % 255) as f64 - 127.0)
            .collect();
        HostTensor::from_f64(shape.clone(), &values).unwrap()
    }

    fn layouts() -> [ConvLayout; 3] {
        let odd = ConvLayout {
            batch: 2,
            feature: 0,
            spatial: vec![3, 1],
        };
        [
            ConvLayout::channels_last(2),
            ConvLayout::channels_first(2),
            odd,
        ]
    }

    #[test]
    fn integer_convolutions_become_channels_last_and_keep_their_values() {
        for lhs in layouts() {
            for out in layouts() {
                let graph = convolution(DType::S8, DType::S32, lhs.clone(), out);
                let rewritten = for_cpu(&graph).unwrap();
                let conv = rewritten
                    .nodes
                    .iter()
                    .find(|n| matches!(n.op, Op::Convolution { .. }))
                    .unwrap();
                let Op::Convolution { dims, .. } = &conv.op else {
                    unreachable!()
                };
                assert!(is_channels_last(dims), "{dims:?}");
                assert_eq!(rewritten.path(conv), "unet/conv");
                let inputs: Vec<HostTensor> =
                    graph.inputs.iter().map(|i| counting(&i.shape)).collect();
                assert_eq!(
                    evaluate(&rewritten, &inputs).unwrap(),
                    evaluate(&graph, &inputs).unwrap()
                );
            }
        }
    }

    #[test]
    fn float_convolutions_stay_as_they_are() {
        let [last, first, _] = layouts();
        let graph = convolution(DType::F32, DType::F32, first, last);
        let rewritten = for_cpu(&graph).unwrap();
        assert_eq!(rewritten.nodes.len(), graph.nodes.len());
    }
}
