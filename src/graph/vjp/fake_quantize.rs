//! The derivative of values that are rounded to a format and widened again.

use super::{Pass, Result, Site};
use crate::dtype::DType;
use crate::graph::scopes::{BACKWARD, GRADIENT};
use crate::graph::{Binary, Builder, Comparison, Tensor, TensorFormat, Unary, grouped_dims};

impl Pass<'_> {
    /// The cotangents of [`Composite::FakeQuantize`](crate::graph::Composite::FakeQuantize)'s operands. With `v = x / scale`, the
    /// lowest and the highest number `lowest` and `highest` of the format, and `n` numbers for a scale, that of x is `g` where
    /// `lowest <= v <= highest` and 0 elsewhere. That of a learned scale is the sum over its numbers of `g (q - v)` where they
    /// are in the range and of `g q` elsewhere, where `q` is `v` clipped and rounded, times `1 / sqrt(n highest)` (Esser et al.
    /// 2020, equations 3 to 5 and section 2.2).
    pub(super) fn fake_quantize(
        &mut self,
        site: &Site,
        along: &[usize],
        format: TensorFormat,
        learned: bool,
        g: Tensor,
    ) -> Result<()> {
        let [of_x, of_scale] = [site.operands[0], site.operands[1]];
        let (x, scale) = (self.value(of_x)?, self.value(of_scale)?);
        let builder = |pass: &Self, id: u32| {
            let path = format!("{BACKWARD}/{}", site.path);
            pass.b
                .without_remat()
                .at(match pass.weight_only[id as usize] {
                    true => format!("{path}/{GRADIENT}"),
                    false => path,
                })
        };
        let b = &builder(self, of_x);
        let (shape, scale_shape) = (b.shape(x), b.shape(scale));
        let (split, places) = grouped_dims(&shape.dims, along, &scale_shape.dims);
        let wide = |t: Tensor| b.reshape(b.convert(t, DType::F32)?, &split);
        let spread = b.broadcast_in_dim(b.convert(scale, DType::F32)?, &places, &split)?;
        let steps = b.div(wide(x)?, spread)?;
        let g = wide(g)?;
        let full = |value: f64| b.full(&b.shape(steps), value);
        let [lowest, highest] = format.ends();
        let above = b.compare(Comparison::Ge, steps, full(lowest)?)?;
        let below = b.compare(Comparison::Le, steps, full(highest)?)?;
        let inside = b.binary(Binary::And, above, below)?;
        let zero = full(0.0)?;
        if self.active[of_x as usize] {
            let passed = b.reshape(b.select(inside, g, zero)?, &shape.dims)?;
            self.accumulate(b, of_x, 0, b.convert(passed, shape.dtype)?)?;
        }
        if !learned || !self.active[of_scale as usize] {
            return Ok(());
        }
        let b = &builder(self, of_scale);
        let moved = b.sub(rounded(b, steps, format)?, b.select(inside, steps, zero)?)?;
        let others: Vec<usize> = (0..split.len()).filter(|d| !places.contains(d)).collect();
        let sum = b.sum(b.mul(g, moved)?, &others)?;
        let each = (shape.count() / scale_shape.count().max(1)) as f64;
        let scaled = b.mul_scalar(sum, 1.0 / (each * highest).sqrt())?;
        self.accumulate(b, of_scale, 0, b.convert(scaled, scale_shape.dtype)?)
    }
}

/// The numbers of the format that are the nearest to `steps`, `f32`.
fn rounded(b: &Builder, steps: Tensor, format: TensorFormat) -> Result<Tensor> {
    let [lowest, highest] = format.ends();
    let clipped = b.clamp(steps, lowest, highest)?;
    match format.element.is_float() {
        true => b.convert(b.convert(clipped, format.element)?, DType::F32),
        false => b.unary(Unary::RoundNearestEven, clipped),
    }
}
