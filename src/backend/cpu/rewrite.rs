//! The forms that XLA's CPU backend runs fastest.

use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, ConvLayout, DotDims, Graph, GraphError, Op, PadDim, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

/// The graph, without composites, as XLA's CPU backend runs it fastest.
///
/// Integer convolutions get channels-last images and a kernel `[spatial.., input, output]`: those run on vector
/// instructions, any other layout on a scalar loop 20 to 40 times slower.
///
/// bf16 convolutions of many channels become a sum of dots of shifted images: the backend has a bf16 kernel for dots,
/// and none for convolutions.
///
/// bf16 dots with an f32 result stay as they are where they are plain matrix products; any other gets f32 operands,
/// which changes no value: the backend's fallback for them has no such kernel and fails when it runs.
///
/// # Errors
/// When the graph is ill-typed.
pub fn rewrite(graph: &Graph) -> Result<Graph> {
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
        Op::Convolution {
            dims,
            quant: None,
            result: DType::F32,
        } if b.dtype(operands[0]) == DType::BF16 && is_sum_of_dots(b, operands, dims) => {
            shifted_dots(b, operands, dims, &node.shape.dims).map(Some)
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

/// Input channels from which dots of shifted images are faster than a convolution in bf16 (docs/performance-how.md).
const WIDE: usize = 128;

/// Whether a convolution is of channels-last images, with no dilation, group or negative padding.
pub(super) fn is_plain_convolution(dims: &ConvDims) -> bool {
    let is_one = |n: &usize| *n == 1;
    let image = ConvLayout::channels_last(2);
    dims.lhs == image
        && dims.out == image
        && dims.lhs_dilation.iter().all(is_one)
        && dims.rhs_dilation.iter().all(is_one)
        && is_one(&dims.feature_groups)
        && is_one(&dims.batch_groups)
        && dims
            .padding
            .iter()
            .all(|(low, high)| *low >= 0 && *high >= 0)
}

/// Whether a convolution moves over every pixel of channels-last images of many channels.
fn is_sum_of_dots(b: &Builder, operands: &[Tensor], dims: &ConvDims) -> bool {
    let lhs = b.dims(operands[0]);
    is_plain_convolution(dims)
        && dims.strides.iter().all(|stride| *stride == 1)
        && lhs[3] >= WIDE
        && lhs[..3].iter().product::<usize>() > 1
}

/// The sum over the places of the kernel of the image, moved there, times the kernel's matrix of that place.
fn shifted_dots(
    b: &Builder,
    operands: &[Tensor],
    dims: &ConvDims,
    result: &[usize],
) -> Result<Tensor> {
    let &[batch, rows, columns, features] = result else {
        return Err(b.invalid("a convolution of images has four dimensions"));
    };
    let to_last = [
        dims.rhs.spatial[0],
        dims.rhs.spatial[1],
        dims.rhs.feature,
        dims.rhs.batch,
    ];
    let kernel = b.transpose(operands[1], &to_last)?;
    let [height, width, channels] = [0, 1, 2].map(|d| b.dims(kernel)[d]);
    let side = |(low, high): (i64, i64)| PadDim {
        low,
        high,
        interior: 0,
    };
    let none = PadDim::default();
    let padding = [none, side(dims.padding[0]), side(dims.padding[1]), none];
    let image = match padding.iter().all(|p| *p == none) {
        true => operands[0],
        false => b.pad(operands[0], 0.0, &padding)?,
    };
    let mut sum = None;
    for y in 0..height {
        for x in 0..width {
            let moved = b.slice_dim(image, 1, y, y + rows)?;
            let moved = b.slice_dim(moved, 2, x, x + columns)?;
            let moved = b.reshape(moved, &[batch * rows * columns, channels])?;
            let matrix = b.slice_dim(kernel, 0, y, y + 1)?;
            let matrix = b.slice_dim(matrix, 1, x, x + 1)?;
            let matrix = b.reshape(matrix, &[channels, features])?;
            let product = DotDims {
                lhs_contract: vec![1],
                rhs_contract: vec![0],
                ..DotDims::default()
            };
            let part = b.dot_general(moved, matrix, product, DType::F32)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => b.add(sum, part)?,
            });
        }
    }
    match sum {
        Some(sum) => b.reshape(sum, result),
        None => Err(b.invalid("a convolution whose kernel has no place")),
    }
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
    let image = dims.lhs.channels_last_order();
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
                let rewritten = rewrite(&graph).unwrap();
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
        let rewritten = rewrite(&graph).unwrap();
        assert_eq!(rewritten.nodes.len(), graph.nodes.len());
    }

    /// 3x3 and 1x1 kernels over 128 channels; the sums of a dot and of a convolution differ in their order alone.
    #[test]
    fn wide_bf16_convolutions_become_dots_and_keep_their_values() {
        for (side, padding) in [(3, 1), (1, 0)] {
            let b = Builder::new();
            let shape = |dims: [usize; 4]| Shape::new(DType::BF16, dims);
            let x = b.input("x", shape([2, 4, 3, WIDE]), &[]).unwrap();
            let w = b.input("w", shape([5, WIDE, side, side]), &[]).unwrap();
            let dims = ConvDims::of_image(1, (padding, padding));
            let y = b.convolution(x, w, dims, DType::F32).unwrap();
            b.output("y", y, None).unwrap();
            let graph = b.finish();
            let rewritten = rewrite(&graph).unwrap();
            let named = |name: &str| {
                rewritten
                    .nodes
                    .iter()
                    .filter(|n| n.op.name() == name)
                    .count()
            };
            assert_eq!(named("convolution"), 0);
            assert_eq!(named("dot_general"), side * side);
            let inputs: Vec<HostTensor> = graph.inputs.iter().map(|i| counting(&i.shape)).collect();
            // Integers below 2^24 are exact in float32, whatever the order of the sum.
            assert_eq!(
                evaluate(&rewritten, &inputs).unwrap(),
                evaluate(&graph, &inputs).unwrap()
            );
        }
    }
}
