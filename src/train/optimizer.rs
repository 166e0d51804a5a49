//! AdamW, gradient clipping and the moving average of weights, as part of the training program.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, GraphError, Input, InputKind, Tensor, Unary, scopes};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// Settings of the update; names are the configuration's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerOptions {
    pub adam_b1: f64,
    pub adam_b2: f64,
    pub adam_eps: f64,
    pub adam_weight_decay: f64,
    /// Clip each element of the gradient to this absolute value.
    pub max_grad_value: Option<f64>,
    /// Scale the whole gradient down to this L2 norm.
    pub max_grad_norm: Option<f64>,
    /// Decay of the moving average of weights; `None` keeps none.
    pub ema_decay: Option<f64>,
}

/// One trained weight: its value and its gradient.
pub struct Trained {
    pub name: String,
    pub weight: Tensor,
    pub gradient: Tensor,
    pub logical_axes: Vec<Option<&'static str>>,
}

/// Prefixes of the optimizer's state, before a weight's name.
pub const FIRST_MOMENT: &str = "optimizer/m/";
pub const SECOND_MOMENT: &str = "optimizer/v/";
pub const EMA: &str = "ema/";
/// The number of updates applied so far: `s32`, 0 before the first.
pub const UPDATES: &str = "optimizer/updates";

/// The report of an update.
pub struct Update {
    /// L2 norm of the gradient before clipping.
    pub grad_norm: Tensor,
    /// Whether loss and gradient were finite; otherwise all state stays as it was.
    pub finite: Tensor,
}

/// Adds one AdamW step (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2) on all
/// of `trained`, with outputs that take over the buffers of weights and state.
///
/// With `t` the number of updates including this one: `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`,
/// `w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)`, which is what `optax.adamw` and
/// `torch.optim.AdamW` compute. The moving average is diffusers' `EMAModel`: it is a copy of the weights at the first
/// update, and its decay at update `t` is `min(ema_decay, t / (9 + t))` after it.
///
/// With both kinds of clipping, elements are clipped first and the norm is that of what they leave, as in
/// `optax.chain(clip, clip_by_global_norm)`.
///
/// Where loss or gradient is not finite, nothing changes.
///
/// # Errors
/// When a weight is given twice.
pub fn adamw(
    b: &Builder,
    trained: &[Trained],
    loss: Tensor,
    learning_rate: Tensor,
    options: &OptimizerOptions,
) -> Result<Update> {
    let b = &b.root(scopes::OPTIMIZER);
    let updates = declare(b, UPDATES, Shape::scalar(DType::S32), &[])?;
    let gradients = trained
        .iter()
        .map(|t| b.convert(t.gradient, DType::F32))
        .collect::<Result<Vec<_>>>()?;
    let grad_norm = global_norm(b, &gradients)?;
    let finite_loss = b.unary(Unary::IsFinite, loss)?;
    let finite_norm = b.unary(Unary::IsFinite, grad_norm)?;
    let finite = b.binary(crate::graph::Binary::And, finite_loss, finite_norm)?;

    let (gradients, clip) = clip(b, gradients, grad_norm, options)?;

    let one = b.scalar(DType::S32, 1.0)?;
    let next = b.add(updates, one)?;
    let t = b.convert(next, DType::F32)?;
    let correction = |decay: f64| -> Result<Tensor> {
        let log = b.mul_scalar(t, decay.ln())?;
        // 1 - decay^t, with decay^t as exp(t ln decay).
        b.add_scalar(b.neg(b.exp(log)?)?, 1.0)
    };
    let correct_m = correction(options.adam_b1)?;
    let correct_v = correction(options.adam_b2)?;
    let ema_keep = match options.ema_decay {
        Some(decay) => Some(ema_keep(b, t, decay)?),
        None => None,
    };

    for (trained, gradient) in trained.iter().zip(gradients) {
        let name = &trained.name;
        let axes = &trained.logical_axes;
        let b = &b.at(format!("{}/{name}", scopes::OPTIMIZER));
        let shape = b.shape(trained.weight);
        let state = shape.with_dtype(DType::F32);
        let m = declare(b, &format!("{FIRST_MOMENT}{name}"), state.clone(), axes)?;
        let v = declare(b, &format!("{SECOND_MOMENT}{name}"), state.clone(), axes)?;
        let mut g = gradient;
        if let Some(scale) = clip {
            g = b.mul(g, scale)?;
        }
        let mix = |old: Tensor, new: Tensor, decay: f64| {
            b.add(b.mul_scalar(old, decay)?, b.mul_scalar(new, 1.0 - decay)?)
        };
        let new_m = mix(m, g, options.adam_b1)?;
        let new_v = mix(v, b.square(g)?, options.adam_b2)?;
        let weight = b.convert(trained.weight, DType::F32)?;
        let numerator = b.div(new_m, correct_m)?;
        let root = b.sqrt(b.div(new_v, correct_v)?)?;
        let step = b.div(numerator, b.add_scalar(root, options.adam_eps)?)?;
        let decayed = b.add(step, b.mul_scalar(weight, options.adam_weight_decay)?)?;
        let new_weight = b.sub(weight, b.mul(decayed, learning_rate)?)?;
        let kept = |new: Tensor, old: Tensor, of: Tensor, what: &str| {
            let chosen = b.select(finite, new, old)?;
            b.output(what, b.convert(chosen, b.dtype(of))?, Some(of))
        };
        kept(new_weight, weight, trained.weight, name)?;
        kept(new_m, m, m, &format!("{FIRST_MOMENT}{name}"))?;
        kept(new_v, v, v, &format!("{SECOND_MOMENT}{name}"))?;
        if let Some(keep) = ema_keep {
            let ema = declare(b, &format!("{EMA}{name}"), state, axes)?;
            // ema + (1 - keep) (w - ema): one rounding less than two products.
            let drop = b.add_scalar(b.neg(keep)?, 1.0)?;
            let moved = b.add(ema, b.mul(b.sub(new_weight, ema)?, drop)?)?;
            kept(moved, ema, ema, &format!("{EMA}{name}"))?;
        }
    }
    let counted = b.select(finite, next, updates)?;
    b.output(UPDATES, counted, Some(updates))?;
    Ok(Update { grad_norm, finite })
}

/// The gradients with their elements clipped, and the factor that clips their norm, where `options` ask for it.
fn clip(
    b: &Builder,
    gradients: Vec<Tensor>,
    grad_norm: Tensor,
    options: &OptimizerOptions,
) -> Result<(Vec<Tensor>, Option<Tensor>)> {
    let (gradients, clipped_norm) = match options.max_grad_value {
        None => (gradients, grad_norm),
        Some(limit) => {
            let clipped = gradients
                .into_iter()
                .map(|g| b.clamp(g, -limit, limit))
                .collect::<Result<Vec<_>>>()?;
            let norm = match options.max_grad_norm {
                None => grad_norm,
                Some(_) => global_norm(b, &clipped)?,
            };
            (clipped, norm)
        }
    };
    let Some(limit) = options.max_grad_norm else {
        return Ok((gradients, None));
    };
    // optax.clip_by_global_norm: unchanged below the limit, g / norm * limit above it.
    let limit = b.scalar(DType::F32, limit)?;
    let one = b.scalar(DType::F32, 1.0)?;
    let above = b.compare(Comparison::Gt, clipped_norm, limit)?;
    let factor = b.select(above, b.div(limit, clipped_norm)?, one)?;
    Ok((gradients, Some(factor)))
}

/// How much of the moving average is kept at update `t`. diffusers counts from 0, where its decay is 0.
fn ema_keep(b: &Builder, t: Tensor, decay: f64) -> Result<Tensor> {
    let zero = b.scalar(DType::F32, 0.0)?;
    let warm = b.div(t, b.add_scalar(t, 9.0)?)?;
    let kept = b.min(warm, b.scalar(DType::F32, decay)?)?;
    let later = b.compare(Comparison::Gt, t, b.scalar(DType::F32, 1.0)?)?;
    b.select(later, kept, zero)
}

fn declare(b: &Builder, name: &str, shape: Shape, axes: &[Option<&'static str>]) -> Result<Tensor> {
    b.declare(Input {
        name: name.to_string(),
        kind: InputKind::State,
        shape,
        logical_axes: axes.to_vec(),
    })
}

fn global_norm(b: &Builder, gradients: &[Tensor]) -> Result<Tensor> {
    let b = &b.at("optimizer/global_norm".to_string());
    let mut total = b.scalar(DType::F32, 0.0)?;
    for &g in gradients {
        let dims: Vec<usize> = (0..b.dims(g).len()).collect();
        total = b.add(total, b.sum(b.square(g)?, &dims)?)?;
    }
    b.sqrt(total)
}
