//! Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) over several axes.

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Tensor};
use crate::host_tensor::HostTensor;

use super::{Result, dims};

/// Period of the slowest rotation, over `2 pi`.
const THETA: f64 = 10_000.0;

/// The rotations of the features of each position: each even feature makes a pair with the one after it.
///
/// With `y` a feature's neighbour of its pair, the rotated feature is `x cos + y sin`, where the sign of `sin` is that
/// of the feature's place. The neighbour is taken by shifting all features by one in each direction: a reshape to pairs
/// would make the smallest dimension 2, which accelerators pad to a whole register.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTables {
    /// `f32[positions, features]`
    cos: Tensor,
    /// What the feature after one is multiplied with: 0 for odd features.
    next: Tensor,
    /// What the feature before one is multiplied with: 0 for even features.
    previous: Tensor,
}

impl RotaryTables {
    /// The tables for positions `ids` `f32[positions, axes]`. Axis `i` has the next `axes_dims[i]` features, whose
    /// frequencies fall from 1 by the powers of [`THETA`]: diffusers' `FluxPosEmbed`.
    ///
    /// # Errors
    /// When `ids` has another number of axes, or an axis an odd number of features.
    pub fn new(b: &Builder, ids: Tensor, axes_dims: &[usize]) -> Result<RotaryTables> {
        let [positions, axes] = dims(b, "position ids", ids)?;
        if axes != axes_dims.len() || axes_dims.iter().any(|dim| !dim.is_multiple_of(2)) {
            return Err(b.invalid(format!(
                "rotary embedding: position ids {} for axes of {axes_dims:?} features; expected an even number of \
                 features for each",
                b.shape(ids)
            )));
        }
        let ids = b.convert(ids, DType::F32)?;
        let angles = axes_dims
            .iter()
            .enumerate()
            .map(|(axis, &features)| {
                let frequency = |i: usize| {
                    let share = (i - i % 2) as f64 / features as f64;
                    THETA.powf(-share) as f32
                };
                let frequencies: Vec<f32> = (0..features).map(frequency).collect();
                let frequencies = b.constant(HostTensor::from_f32([1, features], &frequencies)?)?;
                let column = b.slice_dim(ids, 1, axis, axis + 1)?;
                let size = [positions, features];
                b.mul(
                    b.broadcast_to(column, &size)?,
                    b.broadcast_to(frequencies, &size)?,
                )
            })
            .collect::<Result<Vec<_>>>()?;
        let angles = b.concatenate(&angles, 1)?;
        let sin = b.sin(angles)?;
        let signed = |of_even: f32, of_odd: f32| {
            let sign = [of_even, of_odd];
            let features: usize = axes_dims.iter().sum();
            let signs: Vec<f32> = (0..features).map(|i| sign[i % 2]).collect();
            b.mul(sin, b.constant(HostTensor::from_f32([features], &signs)?)?)
        };
        Ok(RotaryTables {
            cos: b.cos(angles)?,
            next: signed(-1.0, 0.0)?,
            previous: signed(0.0, 1.0)?,
        })
    }

    /// Rotates `x` `[batch, positions, heads, features]`, in `f32`; the result has its type.
    ///
    /// # Errors
    /// When it has other positions or features than the tables.
    pub fn apply(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let size: [usize; 4] = dims(b, "rotary embedding", x)?;
        let [_, positions, _, features] = size;
        if b.dims(self.cos) != [positions, features] {
            return Err(b.invalid(format!(
                "rotary embedding: {} for positions and features {}",
                b.shape(x),
                b.shape(self.cos)
            )));
        }
        let operands = [x, self.cos, self.next, self.previous];
        b.composite(Composite::Rotary, &operands, rotated)
    }
}

/// [`Composite::Rotary`] of its operands.
fn rotated(b: &Builder, operands: &[Tensor]) -> Result<Tensor> {
    let &[x, cos, next, previous] = operands else {
        return Err(b.invalid("rotary embedding: takes a tensor and three tables"));
    };
    let size = b.dims(x);
    let features = size[3];
    let dtype = b.dtype(x);
    let x = b.convert(x, DType::F32)?;
    let rotated_by = |by: usize| {
        let first = b.slice_dim(x, 3, by, features)?;
        b.concatenate(&[first, b.slice_dim(x, 3, 0, by)?], 3)
    };
    let term =
        |value: Tensor, table: Tensor| b.mul(value, b.broadcast_in_dim(table, &[1, 3], &size)?);
    let y = b.add(term(x, cos)?, term(rotated_by(1)?, next)?)?;
    let y = b.add(y, term(rotated_by(features - 1)?, previous)?)?;
    b.convert(y, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::input;

    #[test]
    fn axes_must_have_even_features_and_an_id_each() {
        let b = Builder::new();
        let ids = input(&b, "ids", &[6, 2]);
        let tables = RotaryTables::new(&b, ids, &[4, 8]).unwrap();
        let x = input(&b, "x", &[1, 6, 3, 12]);
        assert_eq!(b.dims(tables.apply(&b, x).unwrap()), [1, 6, 3, 12]);
        let short = input(&b, "short", &[1, 5, 3, 12]);
        let error = tables.apply(&b, short).unwrap_err().to_string();
        assert!(error.contains("f32[1,5,3,12]"), "{error}");
        for axes in [&[4, 7][..], &[4], &[4, 4, 4]] {
            let error = RotaryTables::new(&b, ids, axes).unwrap_err().to_string();
            assert!(error.contains(&format!("{axes:?}")), "{error}");
        }
    }
}
