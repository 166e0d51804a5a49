//! AdamW, with moments as floats or as blocks of 8-bit codes.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::shape::Shape;

use super::blockwise::{BLOCK, Codes, in_blocks};
use super::state::{Frame, declare, mix, moment};
use super::{AdamOptions, Trained};

type Result<T> = std::result::Result<T, GraphError>;

/// Prefixes of the moments of gradients and of their squares, before a weight's name.
pub const FIRST_MOMENT: &str = "optimizer/m/";
pub const SECOND_MOMENT: &str = "optimizer/v/";
/// Prefixes of the largest absolute values of their blocks.
const FIRST_LARGEST: &str = "optimizer/m_absmax/";
const SECOND_LARGEST: &str = "optimizer/v_absmax/";

/// Weights with fewer elements have their moments in float32: bitsandbytes' `min_8bit_size`.
const SMALLEST: usize = 4096;

/// The new values of the weights, in f32. With `t` the number of updates including this one: `m = b1 m + (1 - b1) g`,
/// `v = b2 v + (1 - b2) g^2`, `w = w - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)`, which is what
/// `optax.adamw` and `torch.optim.AdamW` compute. Moments are rounded after they are used.
pub fn update(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    adam: AdamOptions,
    moments: DType,
) -> Result<Vec<Tensor>> {
    let step = Step::new(frame, adam)?;
    let each = trained.iter().zip(gradients);
    each.map(|(trained, &gradient)| step.in_floats(frame, trained, gradient, moments))
        .collect()
}

/// The same with moments in 8 bits, as bitsandbytes' `AdamW8bit`. Weights whose moments are in 8 bits are [`in_blocks`].
pub fn update_8bit(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    adam: AdamOptions,
) -> Result<Vec<Tensor>> {
    let step = Step::new(frame, adam)?;
    let each = trained.iter().zip(gradients);
    each.map(
        |(trained, &gradient)| match frame.b.shape(trained.weight).count() < SMALLEST {
            true => step.in_floats(frame, trained, gradient, DType::F32),
            false => step.in_codes(frame, trained, gradient),
        },
    )
    .collect()
}

struct Step {
    adam: AdamOptions,
    /// `1 - b1^t` and `1 - b2^t`.
    corrections: [Tensor; 2],
}

impl Step {
    fn new(frame: &Frame, adam: AdamOptions) -> Result<Step> {
        Ok(Step {
            adam,
            corrections: [frame.correction(adam.b1)?, frame.correction(adam.b2)?],
        })
    }

    fn in_floats(
        &self,
        frame: &mut Frame,
        trained: &Trained,
        gradient: Tensor,
        moments: DType,
    ) -> Result<Tensor> {
        let b = &frame.at(trained);
        let (m_name, m) = moment(b, trained, FIRST_MOMENT, moments)?;
        let (v_name, v) = moment(b, trained, SECOND_MOMENT, moments)?;
        let [old_m, old_v] = [b.convert(m, DType::F32)?, b.convert(v, DType::F32)?];
        let [new_m, new_v] = self.moments(b, [old_m, old_v], gradient)?;
        frame.keep(b, &m_name, new_m, m)?;
        frame.keep(b, &v_name, new_v, v)?;
        self.weight(frame, b, trained, trained.weight, [new_m, new_v])
    }

    fn in_codes(&self, frame: &mut Frame, trained: &Trained, gradient: Tensor) -> Result<Tensor> {
        let b = &frame.at(trained);
        let shape = b.shape(trained.weight);
        let blocks = shape.count().div_ceil(BLOCK);
        let mut olds = Vec::new();
        let mut states = Vec::new();
        for (codes, prefix, largest) in [
            (Codes::Signed, FIRST_MOMENT, FIRST_LARGEST),
            (Codes::Unsigned, SECOND_MOMENT, SECOND_LARGEST),
        ] {
            let (name, code) = moment(b, trained, prefix, DType::U8)?;
            let largest_name = format!("{largest}{}", trained.name);
            let largest = declare(b, &largest_name, Shape::new(DType::F32, [blocks]), &[])?;
            olds.push(codes.decode(b, code, largest)?);
            states.push((codes, [name, largest_name], [code, largest]));
        }
        let news = self.moments(b, [olds[0], olds[1]], in_blocks(b, gradient)?)?;
        for (new, (codes, names, old)) in news.into_iter().zip(states) {
            let (code, largest) = codes.encode(b, new)?;
            frame.keep(b, &names[0], code, old[0])?;
            frame.keep(b, &names[1], largest, old[1])?;
        }
        let weight = in_blocks(b, trained.weight)?;
        self.weight(frame, b, trained, weight, news)
    }

    fn moments(&self, b: &Builder, [m, v]: [Tensor; 2], gradient: Tensor) -> Result<[Tensor; 2]> {
        Ok([
            mix(b, m, gradient, self.adam.b1)?,
            mix(b, v, b.square(gradient)?, self.adam.b2)?,
        ])
    }

    fn weight(
        &self,
        frame: &Frame,
        b: &Builder,
        trained: &Trained,
        weight: Tensor,
        [m, v]: [Tensor; 2],
    ) -> Result<Tensor> {
        let weight = b.convert(weight, DType::F32)?;
        let numerator = b.div(m, self.corrections[0])?;
        let root = b.sqrt(b.div(v, self.corrections[1])?)?;
        let step = b.div(numerator, b.add_scalar(root, self.adam.eps)?)?;
        let decayed = b.add(step, b.mul_scalar(weight, frame.weight_decay(trained))?)?;
        b.sub(weight, b.mul(decayed, frame.rate(trained))?)
    }
}
