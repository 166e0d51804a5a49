use super::*;
use crate::dtype::DType;
use crate::graph::{Builder, Comparison, DotDims, Init, Reduction};
use crate::shape::Shape;

fn f32(dims: &[usize]) -> Shape {
    Shape::new(DType::F32, dims)
}

#[test]
fn a_small_program_has_exactly_this_text() {
    let b = Builder::new();
    let x = b.input("x", f32(&[2, 3]), &[]).unwrap();
    let layer = b.root("unet").scope("proj");
    let w = layer
        .param("weight", f32(&[4, 3]), Init::Ones, &[])
        .unwrap();
    let y = layer
        .dot_general(
            x,
            w,
            DotDims {
                lhs_contract: vec![1],
                rhs_contract: vec![1],
                ..DotDims::default()
            },
            DType::F32,
        )
        .unwrap();
    let m = layer.reduce(Reduction::Max, y, &[1]).unwrap();
    // Nothing depends on this one: it is left out.
    layer.exp(y).unwrap();
    b.output("y", m, None).unwrap();
    b.output("w", w, Some(w)).unwrap();
    let expected = r#"#loc0 = loc("unet/proj/dot_general")
#loc1 = loc("unet/proj/reduce")
module @toy attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<2x3xf32> loc("x"), %arg1: tensor<4x3xf32> {tf.aliasing_output = 1 : i32} loc("unet/proj.weight")) -> (tensor<2xf32> {jax.result_info = "y"}, tensor<4x3xf32> {jax.result_info = "w"}) {
    %2 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [1] : (tensor<2x3xf32>, tensor<4x3xf32>) -> tensor<2x4xf32> loc(#loc0)
    %r1_init = stablehlo.constant dense<0xFF800000> : tensor<f32> loc(#loc1)
    %3 = stablehlo.reduce(%2 init: %r1_init) applies stablehlo.maximum across dimensions = [1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<2xf32> loc(#loc1)
    return %3, %arg1 : tensor<2xf32>, tensor<4x3xf32>
  }
}
"#;
    assert_eq!(
        stablehlo(&b.finish(), "toy", &EmitOptions::default()),
        expected
    );
}

#[test]
fn shardings_reach_the_signature_and_the_constraints() {
    let b = Builder::new();
    let x = b.input("x", f32(&[8, 3]), &[Some("batch"), None]).unwrap();
    let y = b.constrain(x, &[Some("batch"), None]).unwrap();
    b.output("y", y, None).unwrap();
    let graph = b.finish();
    let options = EmitOptions {
        sharding: Some(ShardingText {
            mesh: r#"sdy.mesh @mesh = <["data"=2]>"#.to_string(),
            num_partitions: 2,
            inputs: vec![r#"#sdy.sharding<@mesh, [{"data"}, {}]>"#.to_string()],
            outputs: vec![r#"#sdy.sharding<@mesh, [{}, {}]>"#.to_string()],
            constraints: HashMap::from([(
                (vec![Some("batch"), None], vec![8, 3]),
                r#"#sdy.sharding<@mesh, [{"data"}, {}]>"#.to_string(),
            )]),
            ..ShardingText::default()
        }),
        ..EmitOptions::default()
    };
    let text = stablehlo(&graph, "toy", &options);
    assert!(text.contains(r#"sdy.mesh @mesh = <["data"=2]>"#), "{text}");
    assert!(
        text.contains(r#"{sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>} loc("x")"#),
        "{text}"
    );
    assert!(
        text.contains(r#"sdy.sharding_constraint %arg0 <@mesh, [{"data"}, {}]> : tensor<8x3xf32>"#),
        "{text}"
    );
    assert!(text.contains("mhlo.num_partitions = 2 : i32"), "{text}");
}

#[test]
fn loops_name_their_values_apart_from_the_outside() {
    let b = Builder::new();
    let i = b.input("i", Shape::scalar(DType::S32), &[]).unwrap();
    let x = b.input("x", f32(&[2]), &[]).unwrap();
    let out = b
        .while_loop(
            &[i, x],
            |b, c| {
                let limit = b.scalar(DType::S32, 10.0)?;
                b.compare(Comparison::Lt, c[0], limit)
            },
            |b, c| Ok(vec![b.add_scalar(c[0], 1.0)?, b.mul_scalar(c[1], 2.0)?]),
        )
        .unwrap();
    b.output("x", out[1], None).unwrap();
    let text = stablehlo(&b.finish(), "loop", &EmitOptions::default());
    assert!(text.contains("%2:2 = stablehlo.while(%r1_0_arg = %arg0, %r1_1_arg = %arg1) : tensor<i32>, tensor<2xf32>"), "{text}");
    assert!(text.contains("return %2#1 : tensor<2xf32>"), "{text}");
}
