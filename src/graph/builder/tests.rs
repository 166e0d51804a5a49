use super::*;
use crate::graph::{Comparison, DotDims};

fn f32(dims: &[usize]) -> Shape {
    Shape::new(DType::F32, dims)
}

#[test]
fn scope_paths_are_checkpoint_keys() {
    let b = Builder::new();
    let unet = b.root("unet").scope("down_blocks").scope(0);
    let w = unet.param("weight", f32(&[4, 2]), Init::Ones, &[]).unwrap();
    assert_eq!(unet.path(), "unet/down_blocks.0");
    b.output("w", w, None).unwrap();
    let graph = b.finish();
    assert_eq!(graph.inputs[0].name, "unet/down_blocks.0.weight");
    assert_eq!(graph.inputs[0].key(), "down_blocks.0.weight");
    assert_eq!(graph.parameter_count(), 8);
}

#[test]
fn errors_name_the_place_the_operation_and_the_shapes() {
    let b = Builder::new();
    let x = b.input("x", f32(&[2, 320]), &[]).unwrap();
    let w = b.input("w", f32(&[640, 8]), &[]).unwrap();
    let error = b
        .root("unet")
        .scope("to_q")
        .dot_general(
            x,
            w,
            DotDims {
                lhs_contract: vec![1],
                rhs_contract: vec![0],
                ..DotDims::default()
            },
            DType::F32,
        )
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "unet/to_q: dot_general: contracting dimensions: lhs sizes [320] and rhs sizes [640] differ"
    );
}

#[test]
fn binary_operations_broadcast_by_numpys_rules() {
    let b = Builder::new();
    let x = b.input("x", f32(&[2, 1, 3]), &[]).unwrap();
    let y = b.input("y", f32(&[4, 1]), &[]).unwrap();
    let z = b.add(x, y).unwrap();
    assert_eq!(b.dims(z), [2, 4, 3]);
    let w = b.input("w", f32(&[5]), &[]).unwrap();
    assert!(b.add(x, w).is_err());
}

#[test]
fn a_region_cannot_see_outer_tensors() {
    let b = Builder::new();
    let x = b.input("x", f32(&[]), &[]).unwrap();
    let error = b
        .while_loop(
            &[x],
            |b, c| {
                let zero = b.scalar(DType::F32, 0.0)?;
                b.compare(Comparison::Gt, c[0], zero)
            },
            |b, c| Ok(vec![b.sub(c[0], x)?]),
        )
        .unwrap_err();
    assert!(matches!(error, GraphError::ForeignTensor { .. }), "{error}");
}

#[test]
fn an_output_takes_over_only_one_input_of_its_shape() {
    let b = Builder::new();
    let x = b.input("x", f32(&[2]), &[]).unwrap();
    let y = b.input("y", f32(&[3]), &[]).unwrap();
    assert!(b.output("wrong", y, Some(x)).is_err());
    b.output("first", x, Some(x)).unwrap();
    assert!(b.output("second", x, Some(x)).is_err());
}

#[test]
fn a_tensor_too_large_to_count_is_refused() {
    let b = Builder::new();
    let error = b.input("x", f32(&[1 << 40, 1 << 20]), &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the program: f32[1099511627776,1048576] has 1152921504606846976 elements, more than any device or pod holds \
         (2^56); check batch, resolution and the model's sizes"
    );
    let x = b.input("x", f32(&[1 << 30]), &[]).unwrap();
    let wide = b
        .scope("attn")
        .broadcast_in_dim(x, &[0], &[1 << 30, usize::MAX]);
    let error = wide.unwrap_err().to_string();
    assert!(error.starts_with("attn: f32[1073741824,"), "{error}");
    // A reshape whose product overflows is one of another count.
    assert!(b.reshape(x, &[usize::MAX, usize::MAX]).is_err());
}
