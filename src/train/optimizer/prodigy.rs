//! Prodigy: Adam that finds its learning rate by an estimate `d` of how far the weights have to go.

use crate::dtype::DType;
use crate::graph::{Binary, Builder, Comparison, GraphError, Tensor};
use crate::shape::Shape;

use super::adamw::{FIRST_MOMENT, SECOND_MOMENT};
use super::state::{Frame, INITIAL, declare, mix, moment};
use super::{AdamOptions, Changed, Trained, sum_all};

type Result<T> = std::result::Result<T, GraphError>;

/// Prefix of the weighted sums of gradients.
const SUM: &str = "optimizer/s/";
/// The estimate, and the numerator of the next one: scalars, 0 before the first update.
const D: &str = "optimizer/d";
const D_NUMERATOR: &str = "optimizer/d_numerator";

/// The first estimate, prodigyopt's default.
const D0: f64 = 1e-6;

pub(super) struct Prodigy {
    pub adam: AdamOptions,
    pub d_coef: f64,
    pub use_bias_correction: bool,
    pub safeguard_warmup: bool,
}

/// The moments of one weight after the update.
struct Moments {
    first: Tensor,
    second: Tensor,
}

impl Prodigy {
    /// The new values of the weights, in f32, as prodigyopt computes them with `decouple`, and with `beta3` the root of
    /// `beta2`. A step whose learning rate is 0 does not count.
    pub fn update(
        &self,
        frame: &mut Frame,
        trained: &[Trained],
        gradients: &[Tensor],
    ) -> Result<Vec<Changed>> {
        let b = &frame.b.clone();
        let zero = b.scalar(DType::F32, 0.0)?;
        let moves = b.compare(Comparison::Gt, frame.learning_rate, zero)?;
        frame.applies = b.binary(Binary::And, frame.applies, moves)?;
        let one = b.scalar(DType::F32, 1.0)?;
        let is_first = b.compare(Comparison::Eq, frame.t, one)?;
        let scalar = |name: &str| declare(b, name, Shape::scalar(DType::F32), &[]);
        let [d_state, numerator_state] = [scalar(D)?, scalar(D_NUMERATOR)?];
        let d0 = b.scalar(DType::F32, D0)?;
        let d = b.select(is_first, d0, d_state)?;
        let mut rate = b.mul(d, frame.learning_rate)?;
        if self.use_bias_correction {
            let [first, second] = [self.adam.b1, self.adam.b2].map(|decay| frame.correction(decay));
            rate = b.mul(rate, b.div(b.sqrt(second?)?, first?)?)?;
        }

        let beta3 = self.adam.b2.sqrt();
        let relative = b.mul_scalar(d, 1.0 / D0)?;
        let weight_of_gradient = match self.safeguard_warmup {
            true => b.mul(relative, d)?,
            false => b.mul(relative, rate)?,
        };
        let mut products = b.scalar(DType::F32, 0.0)?;
        let mut denominator = b.scalar(DType::F32, 0.0)?;
        let mut moments = Vec::with_capacity(trained.len());
        for (trained, &gradient) in trained.iter().zip(gradients) {
            let b = &frame.at(trained);
            let weight = b.convert(trained.weight, DType::F32)?;
            let (initial_name, initial) = moment(b, trained, INITIAL, DType::F32)?;
            b.output(&initial_name, initial, Some(initial))?;
            let way = b.sub(initial, weight)?;
            products = b.add(products, sum_all(b, b.mul(gradient, way)?)?)?;
            let (sum_name, sum) = moment(b, trained, SUM, DType::F32)?;
            let new_sum = b.add(
                b.mul_scalar(sum, beta3)?,
                b.mul(gradient, weight_of_gradient)?,
            )?;
            frame.keep(b, &sum_name, new_sum, sum)?;
            denominator = b.add(denominator, sum_all(b, b.abs(new_sum)?)?)?;
            moments.push(self.moments(frame, b, trained, gradient, d)?);
        }

        let gained = b.mul(b.mul(relative, rate)?, products)?;
        let numerator = b.add(b.mul_scalar(numerator_state, beta3)?, gained)?;
        let found = b.mul_scalar(b.div(numerator, denominator)?, self.d_coef)?;
        // Without a limit of its growth, prodigyopt's default, the estimate is the largest so far.
        let new_d = b.max(d, found)?;
        let some = b.compare(Comparison::Gt, denominator, zero)?;
        frame.applies = b.binary(Binary::And, frame.applies, some)?;
        frame.keep(b, D, new_d, d_state)?;
        frame.keep(b, D_NUMERATOR, numerator, numerator_state)?;

        let mut changed = Vec::with_capacity(trained.len());
        for (trained, moments) in trained.iter().zip(moments) {
            let b = &frame.at(trained);
            let eps = b.mul_scalar(new_d, self.adam.eps)?;
            let root = b.add(b.sqrt(moments.second)?, eps)?;
            let step = b.mul(b.div(moments.first, root)?, rate)?;
            changed.push(Changed::New(b.sub(frame.decayed(b, trained, rate)?, step)?));
        }
        Ok(changed)
    }

    /// `m = b1 m + (1 - b1) d g` and `v = b2 v + (1 - b2) (d g)^2`.
    fn moments(
        &self,
        frame: &mut Frame,
        b: &Builder,
        trained: &Trained,
        gradient: Tensor,
        d: Tensor,
    ) -> Result<Moments> {
        let scaled = b.mul(gradient, d)?;
        let mut kept = |prefix: &str, new: Tensor, decay: f64| {
            let (name, old) = moment(b, trained, prefix, DType::F32)?;
            let mixed = mix(b, old, new, decay)?;
            frame.keep(b, &name, mixed, old)?;
            Ok::<_, GraphError>(mixed)
        };
        Ok(Moments {
            first: kept(FIRST_MOMENT, scaled, self.adam.b1)?,
            second: kept(SECOND_MOMENT, b.square(scaled)?, self.adam.b2)?,
        })
    }
}
