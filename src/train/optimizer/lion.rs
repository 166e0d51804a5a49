//! Lion.

use crate::dtype::DType;
use crate::graph::{GraphError, Tensor, Unary};

use super::adamw::FIRST_MOMENT;
use super::state::{Frame, mix, moment};
use super::{Changed, Trained};

/// The new values of the weights, in f32: `w = w (1 - rate decay) - rate sign(b1 m + (1 - b1) g)`, then
/// `m = b2 m + (1 - b2) g`, as lion-pytorch computes it.
pub fn update(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    [b1, b2]: [f64; 2],
    dtype: DType,
) -> Result<Vec<Changed>, GraphError> {
    let mut changed = Vec::with_capacity(trained.len());
    for (trained, &gradient) in trained.iter().zip(gradients) {
        let b = &frame.at(trained);
        let (name, m) = moment(b, trained, FIRST_MOMENT, dtype)?;
        let old = b.convert(m, DType::F32)?;
        let direction = b.unary(Unary::Sign, mix(b, old, gradient, b1)?)?;
        let rate = frame.rate(trained);
        let decayed = frame.decayed(b, trained, rate)?;
        changed.push(Changed::New(b.sub(decayed, b.mul(direction, rate)?)?));
        let new = mix(b, old, gradient, b2)?;
        frame.keep(b, &name, new, m)?;
    }
    Ok(changed)
}
