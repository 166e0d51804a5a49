//! AdamW, with moments as floats or as blocks of 8-bit codes.

use crate::dtype::DType;
use crate::graph::blockwise::{BLOCK, BlockwiseAdamW};
use crate::graph::random::RandomKey;
use crate::graph::{Builder, Comparison, Composite, GraphError, Tensor};
use crate::shape::Shape;

use super::blockwise::{from_blocks, in_blocks};
use super::state::{Frame, declare, mix, moment, round};
use super::{AdamOptions, Changed, Trained};

type Result<T> = std::result::Result<T, GraphError>;

/// Prefixes of the moments of gradients and of their squares, before a weight's name.
pub const FIRST_MOMENT: &str = "optimizer/m/";
pub const SECOND_MOMENT: &str = "optimizer/v/";
/// Prefixes of the largest absolute values of their blocks.
const FIRST_LARGEST: &str = "optimizer/m_absmax/";
const SECOND_LARGEST: &str = "optimizer/v_absmax/";

/// Weights with fewer elements have their moments in float32: bitsandbytes' `min_8bit_size`.
const SMALLEST: usize = 4096;

/// The new values of the weights. With `t` the number of updates including this one: `m = b1 m + (1 - b1) g`,
/// `v = b2 v + (1 - b2) g^2`, `w = w - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)`, which is what
/// `optax.adamw` and `torch.optim.AdamW` compute. Moments are rounded after they are used.
pub fn update(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    adam: AdamOptions,
    moments: DType,
) -> Result<Vec<Changed>> {
    let step = Step::new(frame, adam)?;
    let each = trained.iter().zip(gradients);
    each.map(|(trained, &gradient)| step.in_floats(frame, trained, gradient, moments))
        .collect()
}

/// Gradients for [`update_8bit`] before clipping by the norm, and what that multiplies them by.
pub struct Blockwise<'a> {
    pub unscaled: &'a [Tensor],
    pub factor: Option<Tensor>,
}

/// The same with moments in 8 bits, as bitsandbytes' `AdamW8bit`. A moving average follows what such a weight is rounded to.
pub fn update_8bit(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    blockwise: Blockwise<'_>,
    adam: AdamOptions,
) -> Result<Vec<Changed>> {
    let step = Step::new(frame, adam)?;
    let each = trained.iter().zip(gradients).zip(blockwise.unscaled);
    each.map(|((trained, &gradient), &unscaled)| {
        match frame.b.shape(trained.weight).count() < SMALLEST {
            true => step.in_floats(frame, trained, gradient, DType::F32),
            false => step.in_codes(frame, trained, unscaled, blockwise.factor),
        }
    })
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
    ) -> Result<Changed> {
        let b = &frame.at(trained);
        let (m_name, m) = moment(b, trained, FIRST_MOMENT, moments)?;
        let (v_name, v) = moment(b, trained, SECOND_MOMENT, moments)?;
        let [old_m, old_v] = [b.convert(m, DType::F32)?, b.convert(v, DType::F32)?];
        let [new_m, new_v] = moments_after(b, self.adam, [old_m, old_v], gradient)?;
        frame.keep(b, &m_name, new_m, m)?;
        frame.keep(b, &v_name, new_v, v)?;
        let weight = b.convert(trained.weight, DType::F32)?;
        let decay = frame.weight_decay(trained);
        let change = change(b, self.adam.eps, [new_m, new_v], self.corrections)?;
        let new = decayed(b, weight, change, frame.rate(trained), decay)?;
        Ok(Changed::New(new))
    }

    /// The update of a weight with moments in codes, as a composite that backends may have a kernel for.
    fn in_codes(
        &self,
        frame: &mut Frame,
        trained: &Trained,
        gradient: Tensor,
        factor: Option<Tensor>,
    ) -> Result<Changed> {
        let b = &frame.at(trained);
        let blocks = b.shape(trained.weight).count().div_ceil(BLOCK);
        let mut names = vec![trained.name.clone()];
        let mut operands = vec![trained.weight];
        for (prefix, largest) in [
            (FIRST_MOMENT, FIRST_LARGEST),
            (SECOND_MOMENT, SECOND_LARGEST),
        ] {
            let (name, codes) = moment(b, trained, prefix, DType::U8)?;
            let largest_name = format!("{largest}{}", trained.name);
            let largest = declare(b, &largest_name, Shape::new(DType::F32, [blocks]), &[])?;
            names.extend([name, largest_name]);
            operands.extend([codes, largest]);
        }
        let olds = operands.clone();
        let factor = match factor {
            Some(factor) => factor,
            None => b.scalar(DType::F32, 1.0)?,
        };
        let counts = b.convert(frame.applies, DType::F32)?;
        let [first, second] = self.corrections;
        let scalars = [factor, frame.rate(trained), first, second, counts];
        operands.extend([gradient, vector(b, &scalars)?]);
        let rounding = frame.rounding(b, trained)?;
        if let Some((_, key)) = rounding {
            operands.push(vector(b, &[key.high, key.low])?);
        }
        let step = BlockwiseAdamW {
            b1: self.adam.b1,
            b2: self.adam.b2,
            eps: self.adam.eps,
            weight_decay: frame.weight_decay(trained),
            rounding: rounding.map(|(stream, _)| stream),
        };
        let news = step_8bit(b, step, &operands)?;
        for ((name, new), old) in names.iter().zip(&news).zip(olds) {
            b.output(name, *new, Some(old))?;
        }
        frame.keep_average(trained, b.convert(news[0], DType::F32)?)?;
        Ok(Changed::Kept)
    }
}

/// A step of a weight whose moments have 8 bits, as [`Composite::BlockwiseAdamW`] of `operands`: its results.
///
/// # Errors
/// When the operands are not those of the composite.
pub fn step_8bit(b: &Builder, step: BlockwiseAdamW, operands: &[Tensor]) -> Result<Vec<Tensor>> {
    let kind = Composite::BlockwiseAdamW(step);
    b.composite_in_place(kind, operands, |b, operands| {
        step_in_blocks(b, step, operands)
    })
}

/// Scalars of one type as a vector.
fn vector(b: &Builder, scalars: &[Tensor]) -> Result<Tensor> {
    let parts = scalars.iter().map(|scalar| b.reshape(*scalar, &[1]));
    b.concatenate(&parts.collect::<Result<Vec<_>>>()?, 0)
}

/// The body of [`Composite::BlockwiseAdamW`]. What is computed of a weight is [`in_blocks`].
fn step_in_blocks(b: &Builder, step: BlockwiseAdamW, operands: &[Tensor]) -> Result<Vec<Tensor>> {
    const RESULTS: usize = BlockwiseAdamW::RESULTS;
    let (olds, rest) = operands.split_at(RESULTS);
    let entry = |of: Tensor, at: usize| b.reshape(b.slice_dim(of, 0, at, at + 1)?, &[]);
    let scalar = |at: usize| entry(rest[1], at);
    let adam = AdamOptions {
        b1: step.b1,
        b2: step.b2,
        eps: step.eps,
    };
    let gradient = b.convert(rest[0], DType::F32)?;
    let gradient = b.mul(in_blocks(b, gradient)?, scalar(0)?)?;
    let [first, second] = BlockwiseAdamW::CODES;
    let old = [
        first.decode(b, olds[1], olds[2])?,
        second.decode(b, olds[3], olds[4])?,
    ];
    let moments = moments_after(b, adam, old, gradient)?;
    let change = change(b, step.eps, moments, [scalar(2)?, scalar(3)?])?;
    let weight = b.convert(in_blocks(b, olds[0])?, DType::F32)?;
    let weight = decayed(b, weight, change, scalar(1)?, step.weight_decay)?;
    let weight = match (step.rounding, rest.get(2)) {
        (Some(stream), Some(&key)) => {
            let key = RandomKey {
                high: entry(key, 0)?,
                low: entry(key, 1)?,
            };
            round(b, weight, stream, key)?
        }
        _ => b.convert(weight, b.dtype(olds[0]))?,
    };
    let mut news = vec![weight];
    for (codes, moment) in BlockwiseAdamW::CODES.into_iter().zip(moments) {
        let (codes, largest) = codes.encode(b, moment)?;
        news.extend([codes, largest]);
    }
    let applies = b.compare(Comparison::Gt, scalar(4)?, b.scalar(DType::F32, 0.0)?)?;
    let kept = news.into_iter().zip(olds).map(|(new, &old)| {
        let dims = b.dims(old);
        // The largest of each block are as they are.
        let in_place = match b.dims(new) == dims {
            true => old,
            false => in_blocks(b, old)?,
        };
        from_blocks(b, b.select(applies, new, in_place)?, &dims)
    });
    kept.collect()
}

fn moments_after(
    b: &Builder,
    adam: AdamOptions,
    [m, v]: [Tensor; 2],
    gradient: Tensor,
) -> Result<[Tensor; 2]> {
    Ok([
        mix(b, m, gradient, adam.b1)?,
        mix(b, v, b.square(gradient)?, adam.b2)?,
    ])
}

/// What a weight changes by, before the learning rate and without weight decay. `corrections` are `1 - b1^t` and `1 - b2^t`.
fn change(b: &Builder, eps: f64, [m, v]: [Tensor; 2], corrections: [Tensor; 2]) -> Result<Tensor> {
    let numerator = b.div(m, corrections[0])?;
    let root = b.sqrt(b.div(v, corrections[1])?)?;
    b.div(numerator, b.add_scalar(root, eps)?)
}

/// The new value of `weight`, in f32.
fn decayed(
    b: &Builder,
    weight: Tensor,
    change: Tensor,
    rate: Tensor,
    decay: f64,
) -> Result<Tensor> {
    let decayed = b.add(change, b.mul_scalar(weight, decay)?)?;
    b.sub(weight, b.mul(decayed, rate)?)
}
