//! Multiply-adds of dots and convolutions by their shapes.

use crate::proto::xla::{HloInstructionProto, PrimitiveType, ShapeProto, WindowDimension};

use super::instruction::{bits, elements};

/// The element type of two operands that a product runs at the rate of.
pub(super) fn wider(lhs: &ShapeProto, rhs: &ShapeProto) -> PrimitiveType {
    match bits(rhs.element_type()) > bits(lhs.element_type()) {
        true => rhs.element_type(),
        false => lhs.element_type(),
    }
}

pub(super) fn dot_macs(instruction: &HloInstructionProto, lhs: &ShapeProto) -> Option<u64> {
    let dims = instruction.dot_dimension_numbers.as_ref()?;
    contraction_macs(
        lhs,
        instruction.shape.as_ref()?,
        &dims.lhs_contracting_dimensions,
    )
}

/// Products of two elements in a dot of `lhs` whose result is `output`.
pub(super) fn contraction_macs(
    lhs: &ShapeProto,
    output: &ShapeProto,
    contracted: &[i64],
) -> Option<u64> {
    let contracted = contracted.iter().map(|&d| dimension(lhs, d));
    Some(elements(output).saturating_mul(contracted.product::<Option<u64>>()?))
}

/// As XLA's `HloCostAnalysis` counts: only products of an input element with a kernel element,
/// not those with padding or with the holes of a dilated input. The TPU compiler writes batched
/// dots as convolutions that are mostly holes. The shapes are those of the input, the kernel and the output.
pub(super) fn convolution_macs(
    instruction: &HloInstructionProto,
    [lhs, rhs, output]: [&ShapeProto; 3],
) -> Option<u64> {
    let numbers = instruction.convolution_dimension_numbers.as_ref()?;
    let windows = instruction
        .window
        .as_ref()
        .map_or(&[][..], |w| &w.dimensions);
    let mut macs = dimension(lhs, numbers.input_batch_dimension)?
        / u64::try_from(instruction.batch_group_count.max(1)).ok()?;
    macs = macs.saturating_mul(
        dimension(lhs, numbers.input_feature_dimension)?
            / u64::try_from(instruction.feature_group_count.max(1)).ok()?,
    );
    macs = macs.saturating_mul(dimension(rhs, numbers.kernel_output_feature_dimension)?);
    for (i, window) in windows.iter().enumerate() {
        let input = dimension(lhs, *numbers.input_spatial_dimensions.get(i)?)?;
        let output = dimension(output, *numbers.output_spatial_dimensions.get(i)?)?;
        macs = macs.saturating_mul(valid_positions(window, input, output));
    }
    Some(macs)
}

/// Pairs of an output position and a kernel position that meet an element of the input.
fn valid_positions(window: &WindowDimension, input: u64, output: u64) -> u64 {
    let (input, output) = (to_i64(input), to_i64(output));
    let stride = window.stride.max(1);
    let dilation = window.window_dilation.max(1);
    let base_dilation = window.base_dilation.max(1);
    let last = (input - 1) * base_dilation;
    let mut valid = 0;
    for k in 0..window.size.max(1) {
        let offset = k * dilation - window.padding_low;
        if base_dilation == 1 {
            // First and last output whose element lies in 0..=last.
            let first = (-offset).max(0).div_euclid(stride)
                + i64::from((-offset).max(0).rem_euclid(stride) != 0);
            let until = (last - offset).div_euclid(stride).min(output - 1);
            valid += (until - first + 1).max(0);
        } else {
            valid += (0..output)
                .map(|o| o * stride + offset)
                .filter(|at| (0..=last).contains(at) && at % base_dilation == 0)
                .count() as i64;
        }
    }
    u64::try_from(valid).unwrap_or(0)
}

fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn dimension(shape: &ShapeProto, dimension: i64) -> Option<u64> {
    let size = shape.dimensions.get(usize::try_from(dimension).ok()?)?;
    u64::try_from(*size).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(size: i64, stride: i64, padding: i64, base_dilation: i64) -> WindowDimension {
        WindowDimension {
            size,
            stride,
            padding_low: padding,
            padding_high: padding,
            window_dilation: 1,
            base_dilation,
            window_reversal: false,
        }
    }

    #[test]
    fn valid_positions_leave_padding_and_holes_out() {
        // 3 taps over 5 elements padded by 1: the outer taps miss one position each.
        assert_eq!(valid_positions(&window(3, 1, 1, 1), 5, 5), 13);
        assert_eq!(valid_positions(&window(3, 2, 1, 1), 5, 3), 7);
        assert_eq!(valid_positions(&window(1, 1, 0, 1), 5, 5), 5);
        // The form of a dot with a batch of 8: each output meets one element.
        assert_eq!(valid_positions(&window(8, 7, 0, 8), 8, 8), 8);
        // Transposed convolution: 2 of 3 taps of every second output meet a hole.
        let brute: u64 = (0..9)
            .flat_map(|o| (0..3).map(move |k| o + k - 1))
            .filter(|at| (0..=8).contains(at) && at % 2 == 0)
            .count() as u64;
        assert_eq!(valid_positions(&window(3, 1, 1, 2), 5, 9), brute);
    }
}
