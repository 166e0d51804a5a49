//! The state of optimizers: declared, rounded, and kept where an update does not count.

use crate::dtype::DType;
use crate::graph::random::RandomKey;
use crate::graph::random::{fold_in, rounding_bits};
use crate::graph::{
    Binary, Builder, Comparison, GraphError, Input, InputKind, Op, RoundingStream, Tensor, scopes,
};
use crate::quant::is_log_scale;
use crate::shape::Shape;

use super::{OptimizerOptions, Trained, UpdateInputs};

type Result<T> = std::result::Result<T, GraphError>;

/// Before the name of every optimizer's state.
pub const STATE: &str = "optimizer/";
/// The number of updates applied so far: `s32`, 0 before the first.
pub const UPDATES: &str = "optimizer/updates";
/// Before a weight's name: its value before the first update.
pub const INITIAL: &str = "optimizer/p0/";
/// Before a weight's name: its moving average.
pub const EMA: &str = "ema/";

/// The stream of random numbers that rounding weights and state has of the rounding key, beside quantization's.
const STREAM: u32 = 0x0071;

/// What the updates of all weights share.
pub(super) struct Frame {
    pub b: Builder,
    /// The number of updates with this one, in f32.
    pub t: Tensor,
    pub learning_rate: Tensor,
    /// Whether the update counts; otherwise all state stays as it was.
    pub applies: Tensor,
    /// How much of the moving averages is kept, if there are any.
    ema_keep: Option<Tensor>,
    weight_decay: f64,
    decays_vectors: bool,
    rounds_weights: bool,
    key: Option<RandomKey>,
    /// How many tensors are rounded so far.
    rounded: u32,
}

impl Frame {
    pub fn new(
        b: &Builder,
        next: Tensor,
        applies: Tensor,
        inputs: UpdateInputs,
        options: &OptimizerOptions,
    ) -> Result<Frame> {
        let key = match (options.rounds(), inputs.rounding) {
            (false, _) => None,
            (true, Some(key)) => Some(fold_in(b, key, STREAM)?),
            (true, None) => return Err(b.invalid("rounding at random needs a key")),
        };
        let t = b.convert(next, DType::F32)?;
        let ema_keep = options.ema_decay.map(|decay| ema_keep(b, t, decay));
        Ok(Frame {
            b: b.clone(),
            t,
            learning_rate: inputs.learning_rate,
            applies,
            ema_keep: ema_keep.transpose()?,
            weight_decay: options.weight_decay,
            decays_vectors: options.decays_vectors,
            rounds_weights: options.stochastic_rounding,
            key,
            rounded: 0,
        })
    }

    /// A builder in the scope of a weight's update.
    pub fn at(&self, trained: &Trained) -> Builder {
        self.b.at(format!("{}/{}", scopes::OPTIMIZER, trained.name))
    }

    /// `1 - decay^t` without cancellation: with `h = tanh(-t ln(decay) / 2)`, `decay^t` is `(1 - h) / (1 + h)`.
    pub fn correction(&self, decay: f64) -> Result<Tensor> {
        let b = &self.b;
        let h = b.tanh(b.mul_scalar(self.t, -decay.ln() / 2.0)?)?;
        b.div(b.mul_scalar(h, 2.0)?, b.add_scalar(h, 1.0)?)
    }

    /// The learning rate of a weight.
    pub fn rate(&self, trained: &Trained) -> Tensor {
        trained.learning_rate.unwrap_or(self.learning_rate)
    }

    /// How much a weight decays, relative to its learning rate. Scales do not.
    pub fn weight_decay(&self, trained: &Trained) -> f64 {
        match (self.decays_vectors || !trained.is_vector) && !is_log_scale(&trained.name) {
            true => self.weight_decay,
            false => 0.0,
        }
    }

    /// The value of a weight, in f32, times `1 - rate decay`.
    pub fn decayed(&self, b: &Builder, trained: &Trained, rate: Tensor) -> Result<Tensor> {
        let weight = b.convert(trained.weight, DType::F32)?;
        let decay = self.weight_decay(trained);
        if decay == 0.0 {
            return Ok(weight);
        }
        let lost = b.mul_scalar(rate, decay)?;
        b.mul(weight, b.add_scalar(b.neg(lost)?, 1.0)?)
    }

    /// Gives the state `of`, called `name`, the value `new` if the update counts. Values in bfloat16 are rounded at
    /// random.
    pub fn keep(&mut self, b: &Builder, name: &str, new: Tensor, of: Tensor) -> Result<()> {
        let new = match (b.dtype(new), b.dtype(of)) {
            (DType::F32, DType::BF16) => {
                let (stream, key) = self.stream(b)?;
                round(b, new, stream, key)?
            }
            (_, dtype) => b.convert(new, dtype)?,
        };
        b.output(name, b.select(self.applies, new, of)?, Some(of))
    }

    /// The same for a weight, and for its moving average.
    pub fn keep_weight(&mut self, trained: &Trained, new: Tensor) -> Result<()> {
        let b = &self.at(trained);
        let (name, weight) = (&trained.name, trained.weight);
        let rounded = match self.rounding(b, trained)? {
            Some((stream, key)) => round(b, new, stream, key)?,
            None => b.convert(new, b.dtype(weight))?,
        };
        b.output(name, b.select(self.applies, rounded, weight)?, Some(weight))?;
        self.keep_average(trained, new)
    }

    /// The moving average of a weight whose value is `new` in f32, if there is one.
    pub fn keep_average(&mut self, trained: &Trained, new: Tensor) -> Result<()> {
        let Some(keep) = self.ema_keep else {
            return Ok(());
        };
        let b = &self.at(trained);
        let shape = b.shape(trained.weight).with_dtype(DType::F32);
        let ema_name = format!("{EMA}{}", trained.name);
        let ema = declare(b, &ema_name, shape, &trained.logical_axes)?;
        // ema + (1 - keep) (w - ema): one rounding less than two products.
        let drop = b.add_scalar(b.neg(keep)?, 1.0)?;
        let moved = b.add(ema, b.mul(b.sub(new, ema)?, drop)?)?;
        self.keep(b, &ema_name, moved, ema)
    }

    /// The stream and the key that a weight is rounded at random with, if it is.
    pub fn rounding(
        &mut self,
        b: &Builder,
        trained: &Trained,
    ) -> Result<Option<(RoundingStream, RandomKey)>> {
        match self.rounds_weights && b.dtype(trained.weight) == DType::BF16 {
            true => self.stream(b).map(Some),
            false => Ok(None),
        }
    }

    /// The stream of the next tensor that is rounded, and the key.
    fn stream(&mut self, b: &Builder) -> Result<(RoundingStream, RandomKey)> {
        let Some(key) = self.key else {
            return Err(b.invalid("rounding at random needs a key"));
        };
        self.rounded += 1;
        Ok((RoundingStream(self.rounded), key))
    }
}

/// How much of the moving average is kept. diffusers counts from 0, where its decay is 0.
fn ema_keep(b: &Builder, t: Tensor, decay: f64) -> Result<Tensor> {
    let warm = b.div(t, b.add_scalar(t, 9.0)?)?;
    let kept = b.min(warm, b.scalar(DType::F32, decay)?)?;
    let later = b.compare(Comparison::Gt, t, b.scalar(DType::F32, 1.0)?)?;
    b.select(later, kept, b.scalar(DType::F32, 0.0)?)
}

/// `x` in bfloat16, rounded up with the probability of its distance from the number below: 16 random bits are added
/// to those that are cut off.
pub(super) fn round(
    b: &Builder,
    x: Tensor,
    stream: RoundingStream,
    key: RandomKey,
) -> Result<Tensor> {
    let bits = rounding_bits(b, key, stream, &b.dims(x))?;
    let word = |value: u32| b.full(&b.shape(bits), f64::from(value));
    let low = b.binary(Binary::ShiftRightLogical, bits, word(16)?)?;
    let sum = b.add(b.push(Op::BitcastConvert(DType::U32), &[x])?, low)?;
    let high = b.binary(Binary::And, sum, word(0xFFFF_0000)?)?;
    b.convert(
        b.push(Op::BitcastConvert(DType::F32), &[high])?,
        DType::BF16,
    )
}

/// `old decay + new (1 - decay)`.
pub(super) fn mix(b: &Builder, old: Tensor, new: Tensor, decay: f64) -> Result<Tensor> {
    b.add(b.mul_scalar(old, decay)?, b.mul_scalar(new, 1.0 - decay)?)
}

/// The number of updates before a step, as an input of its program.
pub fn updates_input() -> Input {
    Input {
        name: UPDATES.to_owned(),
        kind: InputKind::State,
        shape: Shape::scalar(DType::S32),
        logical_axes: Vec::new(),
    }
}

pub(super) fn declare(
    b: &Builder,
    name: &str,
    shape: Shape,
    axes: &[Option<&'static str>],
) -> Result<Tensor> {
    b.declare(Input {
        name: name.to_string(),
        kind: InputKind::State,
        shape,
        logical_axes: axes.to_vec(),
    })
}

/// The state of one weight, of its shape: its name and its tensor in `dtype`.
pub(super) fn moment(
    b: &Builder,
    trained: &Trained,
    prefix: &str,
    dtype: DType,
) -> Result<(String, Tensor)> {
    let name = format!("{prefix}{}", trained.name);
    let shape = b.shape(trained.weight).with_dtype(dtype);
    let tensor = declare(b, &name, shape, &trained.logical_axes)?;
    Ok((name, tensor))
}
