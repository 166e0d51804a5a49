//! The update of weights, as part of the training program: optimizers, gradient clipping, and the moving average.

mod accumulate;
mod adafactor;
mod adamw;
mod blockwise;
mod lion;
mod prodigy;
mod state;

use std::collections::BTreeMap;

use crate::dtype::DType;
use crate::graph::random::RandomKey;
use crate::graph::{Binary, Builder, Comparison, GraphError, Tensor, Unary, scopes};

pub use accumulate::ACCUMULATED;
pub use adamw::{FIRST_MOMENT, SECOND_MOMENT, step_8bit};
pub use state::{EMA, INITIAL, STATE, UPDATES, updates_input};

use state::Frame;

type Result<T> = std::result::Result<T, GraphError>;

/// The decays of the two moments of Adam and of what is made like it, and what is added to its denominator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamOptions {
    pub b1: f64,
    pub b2: f64,
    pub eps: f64,
}

/// How weights follow their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, with moments of this type.
    AdamW { adam: AdamOptions, moments: DType },
    /// The same with moments in blocks of 8-bit codes (Dettmers et al., "8-bit optimizers via block-wise quantization",
    /// 2022).
    AdamW8bit { adam: AdamOptions },
    /// Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018, without a first moment
    /// and with the learning rate that is given.
    Adafactor {
        /// Multiply the learning rate with the root mean square of each weight.
        scale_parameter: bool,
    },
    /// Chen et al., "Symbolic discovery of optimization algorithms", 2023.
    Lion { b1: f64, b2: f64, moment: DType },
    /// Mishchenko and Defazio, "Prodigy: an expeditiously adaptive parameter-free learner", 2023.
    Prodigy {
        adam: AdamOptions,
        /// Factor of the estimated distance.
        d_coef: f64,
        use_bias_correction: bool,
        /// Leave the learning rate out of the estimate of the distance.
        safeguard_warmup: bool,
    },
}

impl Optimizer {
    /// Whether its state is rounded at random.
    fn rounds(self) -> bool {
        match self {
            Optimizer::AdamW { moments, .. } => moments == DType::BF16,
            Optimizer::Lion { moment, .. } => moment == DType::BF16,
            Optimizer::AdamW8bit { .. }
            | Optimizer::Adafactor { .. }
            | Optimizer::Prodigy { .. } => false,
        }
    }

    /// Whether it treats each element of a weight alike, so that several weights may be one tensor.
    fn is_elementwise(self) -> bool {
        match self {
            Optimizer::AdamW { .. } | Optimizer::Lion { .. } | Optimizer::Prodigy { .. } => true,
            // Blocks of 256 elements; rows, columns and the root mean square of each weight.
            Optimizer::AdamW8bit { .. } | Optimizer::Adafactor { .. } => false,
        }
    }
}

/// Settings of the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerOptions {
    pub optimizer: Optimizer,
    pub weight_decay: f64,
    /// Whether weights of one dimension, norms and biases, decay too.
    pub decays_vectors: bool,
    /// How many batches have their gradients averaged for one update; 1 updates after each.
    pub accumulated: usize,
    /// Round weights in bfloat16 up or down at random, so that they follow small updates on average.
    pub stochastic_rounding: bool,
    /// Clip each element of the gradient to this absolute value.
    pub max_grad_value: Option<f64>,
    /// Scale the whole gradient down to this L2 norm.
    pub max_grad_norm: Option<f64>,
    /// Decay of the moving average of weights; `None` keeps none.
    pub ema_decay: Option<f64>,
}

impl OptimizerOptions {
    /// Whether the update needs random numbers.
    pub fn rounds(&self) -> bool {
        self.stochastic_rounding || self.optimizer.rounds()
    }

    /// Whether weights of equal blocks may be one tensor.
    pub fn takes_stacks(&self) -> bool {
        self.optimizer.is_elementwise()
    }
}

/// One trained weight, or those of equal blocks along a new first dimension: value and gradient.
pub struct Trained {
    pub name: String,
    /// Whether it is a weight of one dimension, such as a bias, or a stack of such.
    pub is_vector: bool,
    pub weight: Tensor,
    pub gradient: Tensor,
    /// Its own learning rate, where that is not the common one.
    pub learning_rate: Option<Tensor>,
    pub logical_axes: Vec<Option<&'static str>>,
}

/// What an update is made of beside the weights: scalars.
#[derive(Clone, Copy)]
pub struct UpdateInputs {
    pub loss: Tensor,
    pub learning_rate: Tensor,
    /// Whether the batch is the last one before an update, as `f32` 1 or 0; where [`OptimizerOptions::accumulated`] is above 1.
    pub is_last: Option<Tensor>,
    /// Where [`OptimizerOptions::rounds`].
    pub rounding: Option<RandomKey>,
}

/// The report of an update.
pub struct Update {
    /// L2 norm of the gradient before clipping.
    pub grad_norm: Tensor,
    /// The same of the weights of each [`group`], by its name; none where all weights are of one.
    pub group_norms: Vec<(String, Tensor)>,
    /// Whether loss and gradient were finite; otherwise all state stays as it was.
    pub finite: Tensor,
}

/// Adds one step of the optimizer on all of `trained`, with outputs that take over the buffers of weights and state.
///
/// The moving average is diffusers' `EMAModel`: it is a copy of the weights at the first update, and its decay at
/// update `t` is `min(ema_decay, t / (9 + t))` after it.
///
/// With both kinds of clipping, elements are clipped first and the norm is that of what they leave, as in
/// `optax.chain(clip, clip_by_global_norm)`.
///
/// Where loss or gradient is not finite, nothing changes. Of several batches that are averaged, the last one's run of the
/// program makes the update; the others add to sums, which are 0 after it.
///
/// # Errors
/// When a weight is given twice, or random numbers are needed and there is no key.
pub fn update(
    b: &Builder,
    trained: &[Trained],
    inputs: UpdateInputs,
    options: &OptimizerOptions,
) -> Result<Update> {
    let b = &b.root(scopes::OPTIMIZER);
    let updates = b.declare(updates_input())?;
    let gradients = trained
        .iter()
        .map(|t| b.convert(t.gradient, DType::F32))
        .collect::<Result<Vec<_>>>()?;
    let averaged = accumulate::averaged(b, trained, gradients, inputs, options.accumulated)?;
    let gradients = averaged.gradients;
    let squares = squares(b, &gradients)?;
    let grad_norm = norm(b, &squares)?;
    let group_norms = group_norms(b, trained, &squares)?;
    let finite_loss = b.unary(Unary::IsFinite, averaged.loss)?;
    let finite_norm = b.unary(Unary::IsFinite, grad_norm)?;
    let finite = b.binary(Binary::And, finite_loss, finite_norm)?;
    let (gradients, factor) = clip(b, gradients, grad_norm, options)?;
    let scaled = gradients.iter().map(|&g| match factor {
        Some(factor) => b.mul(g, factor),
        None => Ok(g),
    });
    let scaled = scaled.collect::<Result<Vec<_>>>()?;

    let next = b.add(updates, b.scalar(DType::S32, 1.0)?)?;
    let applies = match averaged.is_last {
        Some(is_last) => b.binary(Binary::And, finite, is_last)?,
        None => finite,
    };
    let mut frame = Frame::new(b, next, applies, inputs, options)?;
    let changed = match options.optimizer {
        Optimizer::AdamW { adam, moments } => {
            adamw::update(&mut frame, trained, &scaled, adam, moments)?
        }
        Optimizer::AdamW8bit { adam } => {
            let blockwise = adamw::Blockwise {
                unscaled: &gradients,
                factor,
            };
            adamw::update_8bit(&mut frame, trained, &scaled, blockwise, adam)?
        }
        Optimizer::Adafactor { scale_parameter } => {
            adafactor::update(&mut frame, trained, &scaled, scale_parameter)?
        }
        Optimizer::Lion { b1, b2, moment } => {
            lion::update(&mut frame, trained, &scaled, [b1, b2], moment)?
        }
        Optimizer::Prodigy {
            adam,
            d_coef,
            use_bias_correction,
            safeguard_warmup,
        } => {
            let prodigy = prodigy::Prodigy {
                adam,
                d_coef,
                use_bias_correction,
                safeguard_warmup,
            };
            prodigy.update(&mut frame, trained, &scaled)?
        }
    };
    for (trained, change) in trained.iter().zip(changed) {
        match change {
            Changed::New(weight) => frame.keep_weight(trained, weight)?,
            Changed::Kept => {}
        }
    }
    let counted = b.select(frame.applies, next, updates)?;
    b.output(UPDATES, counted, Some(updates))?;
    Ok(Update {
        grad_norm,
        group_norms,
        finite,
    })
}

/// What an optimizer did with a weight.
enum Changed {
    /// Its new value in f32, to be kept if the update counts.
    New(Tensor),
    /// The optimizer has kept it.
    Kept,
}

/// The gradients, whose elements are clipped where `options` ask for it, and what clipping by the norm multiplies them by.
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
                Some(_) => norm(b, &squares(b, &clipped)?)?,
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

/// The part of a model whose gradient has a norm of its own: the root of the weight's path (`unet`), or the list of blocks
/// below it (`unet/down_blocks`).
pub fn group(weight: &str) -> &str {
    let (root, key) = weight.split_once('/').unwrap_or((weight, ""));
    let first = key.split('.').next().unwrap_or("");
    match first.contains("block") {
        true => &weight[..root.len() + 1 + first.len()],
        false => root,
    }
}

/// The norms of the gradients of each group.
fn group_norms(
    b: &Builder,
    trained: &[Trained],
    squares: &[Tensor],
) -> Result<Vec<(String, Tensor)>> {
    let mut groups: BTreeMap<&str, Vec<Tensor>> = BTreeMap::new();
    for (trained, square) in trained.iter().zip(squares) {
        groups
            .entry(group(&trained.name))
            .or_default()
            .push(*square);
    }
    if groups.len() == 1 {
        return Ok(Vec::new());
    }
    let norms = groups.into_iter();
    let norms = norms.map(|(group, squares)| Ok((group.to_owned(), norm(b, &squares)?)));
    norms.collect()
}

/// The sum of the squares of each gradient.
fn squares(b: &Builder, gradients: &[Tensor]) -> Result<Vec<Tensor>> {
    let b = &b.at("optimizer/global_norm");
    let squares = gradients.iter().map(|&g| sum_all(b, b.square(g)?));
    squares.collect()
}

/// The L2 norm of tensors by the sums of their squares.
fn norm(b: &Builder, squares: &[Tensor]) -> Result<Tensor> {
    let b = &b.at("optimizer/global_norm");
    let mut total = b.scalar(DType::F32, 0.0)?;
    for &square in squares {
        total = b.add(total, square)?;
    }
    b.sqrt(total)
}

/// The sum of all elements.
fn sum_all(b: &Builder, x: Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = (0..b.dims(x).len()).collect();
    b.sum(x, &dims)
}

#[cfg(test)]
mod tests {
    use super::group;

    #[test]
    fn groups_are_the_lists_of_blocks_and_the_rest_of_each_part() {
        for (weight, expected) in [
            (
                "unet/down_blocks.0.resnets.0.conv1.weight",
                "unet/down_blocks",
            ),
            (
                "unet/mid_block.attentions.0.proj_in.lora_down.weight",
                "unet/mid_block",
            ),
            ("unet/time_embedding.linear_1.bias", "unet"),
            (
                "transformer/single_transformer_blocks.3.norm.weight",
                "transformer/single_transformer_blocks",
            ),
            (
                "text_encoder_2/text_model.final_layer_norm.weight",
                "text_encoder_2",
            ),
            ("text_encoder/learned_embeds", "text_encoder"),
        ] {
            assert_eq!(group(weight), expected);
        }
    }
}
