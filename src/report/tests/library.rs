//! Products that the GPU compiler hands to cuBLAS and cuDNN.

use super::*;
use crate::proto::xla::{ConvolutionDimensionNumbers, Window, WindowDimension};
use PrimitiveType::{F8e4m3fn, U8};

/// A call whose result has memory to work in beside it.
fn call(target: &str, shape: ShapeProto, operands: &[i64]) -> HloInstructionProto {
    HloInstructionProto {
        custom_call_target: target.to_owned(),
        ..op(
            "custom-call",
            tuple(vec![shape, array(U8, &[64])]),
            operands,
        )
    }
}

/// A 3x3 convolution `b01f_o01i->b01f` that keeps its size.
fn convolution(target: &str, shape: ShapeProto, operands: &[i64]) -> HloInstructionProto {
    let of_three = WindowDimension {
        size: 3,
        stride: 1,
        padding_low: 1,
        padding_high: 1,
        window_dilation: 1,
        base_dilation: 1,
        window_reversal: false,
    };
    HloInstructionProto {
        window: Some(Window {
            dimensions: vec![of_three, of_three],
        }),
        convolution_dimension_numbers: Some(ConvolutionDimensionNumbers {
            input_batch_dimension: 0,
            input_spatial_dimensions: vec![1, 2],
            input_feature_dimension: 3,
            kernel_output_feature_dimension: 0,
            kernel_spatial_dimensions: vec![1, 2],
            kernel_input_feature_dimension: 3,
            output_batch_dimension: 0,
            output_spatial_dimensions: vec![1, 2],
            output_feature_dimension: 3,
        }),
        feature_group_count: 1,
        batch_group_count: 1,
        ..call(target, shape, operands)
    }
}

#[test]
fn calls_of_cublas_and_cudnn_count_as_the_products_that_they_are() {
    let mut m = Module::new(1);
    let mut body = Vec::new();
    let b = &mut body;
    let shapes = [
        array(F8e4m3fn, &[8, 64]),
        array(F8e4m3fn, &[16, 64]),
        array(Bf16, &[2, 4, 4, 8]),
        array(Bf16, &[32, 3, 3, 8]),
        array(Bf16, &[2, 4, 4, 32]),
    ];
    let mut number = 0;
    let [x, weight, input, kernel, output] = shapes.map(|shape| {
        number += 1;
        m.add(b, parameter(number - 1, shape))
    });
    let mut gemm = call("__cublas$lt$matmul$f8", array(F32, &[8, 16]), &[x, weight]);
    gemm.backend_config = br#"{"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":
        {"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}"#
        .to_vec();
    m.add(b, gemm);
    for (target, shape, operands) in [
        ("__cudnn$convForward", &[2, 4, 4, 32][..], [input, kernel]),
        ("__cudnn$convForwardGraph", &[2, 4, 4, 32], [input, kernel]),
        ("__cudnn$convBackwardInput", &[2, 4, 4, 8], [output, kernel]),
        (
            "__cudnn$convBackwardFilter",
            &[32, 3, 3, 8],
            [input, output],
        ),
    ] {
        m.add(b, convolution(target, array(Bf16, shape), &operands));
    }
    let report = report(&m.entry(body));
    // Of 4 x 4 places and 3 x 3 weights 10 x 10 pairs meet an element, not padding.
    let pairs = 2 * 8 * 32 * 10 * 10;
    assert_eq!(
        report.flops,
        [("bf16", 4 * 2 * pairs), ("f8e4m3fn", 2 * 8 * 16 * 64)]
            .map(|(k, v)| (k.to_owned(), v))
            .into()
    );
}
