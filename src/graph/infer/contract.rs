//! Shapes of the results of contractions.

use crate::dtype::DType;
use crate::graph::{ConvDims, ConvLayout, DotDims, InferError, constraint};
use crate::shape::Shape;

use super::{Result, attribute_length, distinct};

pub(super) fn dot([lhs, rhs]: [&Shape; 2], dims: &DotDims, result: DType) -> Result<Shape> {
    let lhs_used = [dims.lhs_batch.as_slice(), &dims.lhs_contract].concat();
    let rhs_used = [dims.rhs_batch.as_slice(), &dims.rhs_contract].concat();
    distinct("the lhs", &lhs_used, lhs.rank())?;
    distinct("the rhs", &rhs_used, rhs.rank())?;
    contraction_types(lhs, rhs, result)?;
    for (what, l, r) in [
        ("batch dimensions", &dims.lhs_batch, &dims.rhs_batch),
        (
            "contracting dimensions",
            &dims.lhs_contract,
            &dims.rhs_contract,
        ),
    ] {
        let (l, r) = (sizes(lhs, l), sizes(rhs, r));
        if l != r {
            return Err(InferError::SizesDiffer {
                what,
                left: "lhs",
                lhs: l,
                right: "rhs",
                rhs: r,
            });
        }
    }
    let mut out = sizes(lhs, &dims.lhs_batch);
    out.extend(
        (0..lhs.rank())
            .filter(|d| !lhs_used.contains(d))
            .map(|d| lhs.dims[d]),
    );
    out.extend(
        (0..rhs.rank())
            .filter(|d| !rhs_used.contains(d))
            .map(|d| rhs.dims[d]),
    );
    Ok(Shape::new(result, out))
}

pub(super) fn convolution(
    [lhs, rhs]: [&Shape; 2],
    dims: &ConvDims,
    result: DType,
) -> Result<Shape> {
    check_layout("lhs layout", &dims.lhs, lhs)?;
    check_layout("kernel layout", &dims.rhs, rhs)?;
    contraction_types(lhs, rhs, result)?;
    let spatial = dims.lhs.spatial.len();
    let mut out_dims = vec![dims.out.batch, dims.out.feature];
    out_dims.extend(&dims.out.spatial);
    if rhs.rank() != lhs.rank() || out_dims.len() != lhs.rank() {
        return Err(constraint(
            "layouts",
            "lhs, kernel and result must have one rank",
        ));
    }
    distinct("result layout", &out_dims, lhs.rank())?;
    for (what, found) in [
        ("strides", dims.strides.len()),
        ("padding", dims.padding.len()),
        ("lhs_dilation", dims.lhs_dilation.len()),
        ("rhs_dilation", dims.rhs_dilation.len()),
    ] {
        attribute_length(what, spatial, found)?;
    }
    check_groups(lhs, rhs, dims)?;
    let mut out = vec![0; lhs.rank()];
    out[dims.out.batch] = lhs.dims[dims.lhs.batch] / dims.batch_groups;
    out[dims.out.feature] = rhs.dims[dims.rhs.batch];
    for (s, &place) in dims.out.spatial.iter().enumerate() {
        let size = lhs.dims[dims.lhs.spatial[s]];
        let window = rhs.dims[dims.rhs.spatial[s]];
        out[place] = places_of_window(size, window, dims, s)?;
    }
    Ok(Shape::new(result, out))
}

fn check_groups(lhs: &Shape, rhs: &Shape, dims: &ConvDims) -> Result<()> {
    let (fg, bg) = (dims.feature_groups, dims.batch_groups);
    let in_features = lhs.dims[dims.lhs.feature];
    let batch = lhs.dims[dims.lhs.batch];
    let out_features = rhs.dims[dims.rhs.batch];
    let kernel_features = rhs.dims[dims.rhs.feature];
    if fg == 0 || bg == 0 || (fg > 1 && bg > 1) {
        return Err(constraint(
            "groups",
            format!("feature groups {fg} and batch groups {bg}: one must be 1, none 0"),
        ));
    }
    if kernel_features * fg != in_features {
        return Err(constraint(
            "features",
            format!(
                "kernel {rhs} takes {kernel_features} input features in {fg} groups, lhs {lhs} has {in_features}"
            ),
        ));
    }
    if !out_features.is_multiple_of(fg)
        || !out_features.is_multiple_of(bg)
        || !batch.is_multiple_of(bg)
    {
        return Err(constraint(
            "groups",
            format!(
                "{out_features} output features and batch {batch} do not divide into {fg} feature groups and {bg} batch groups"
            ),
        ));
    }
    Ok(())
}

/// In how many places of spatial dimension `s` the window is applied.
fn places_of_window(size: usize, window: usize, dims: &ConvDims, s: usize) -> Result<usize> {
    if dims.strides[s] == 0 || dims.lhs_dilation[s] == 0 || dims.rhs_dilation[s] == 0 {
        return Err(constraint("window", "strides and dilations start at 1"));
    }
    let dilate = |n: usize, d: usize| if n == 0 { 0 } else { (n - 1) * d + 1 };
    let (low, high) = dims.padding[s];
    let padded = dilate(size, dims.lhs_dilation[s]) as i64 + low + high;
    let window = dilate(window, dims.rhs_dilation[s]) as i64;
    if padded < 0 {
        return Err(constraint("padding", "crops more than there is"));
    }
    Ok(match padded < window {
        true => 0,
        false => (padded - window) as usize / dims.strides[s] + 1,
    })
}

fn contraction_types(lhs: &Shape, rhs: &Shape, result: DType) -> Result<()> {
    let both_int = lhs.dtype.is_int() && rhs.dtype.is_int();
    let both_float = lhs.dtype.is_float() && rhs.dtype.is_float();
    if (both_int && result.is_int()) || (both_float && result.is_float()) {
        Ok(())
    } else {
        Err(constraint(
            "element types",
            format!("{} times {} does not give {result}", lhs.dtype, rhs.dtype),
        ))
    }
}

fn check_layout(what: &'static str, layout: &ConvLayout, x: &Shape) -> Result<()> {
    if layout.rank() != x.rank() {
        return Err(InferError::AttributeLength {
            what,
            expected: x.rank(),
            found: layout.rank(),
        });
    }
    let mut dims = vec![layout.batch, layout.feature];
    dims.extend(&layout.spatial);
    distinct(what, &dims, x.rank())
}

fn sizes(x: &Shape, dims: &[usize]) -> Vec<usize> {
    dims.iter().map(|&d| x.dims[d]).collect()
}
