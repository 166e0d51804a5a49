//! Adafactor.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};

use super::adamw::SECOND_MOMENT;
use super::state::{Frame, declare, moment};
use super::{Changed, Trained, sum_all};

type Result<T> = std::result::Result<T, GraphError>;

/// Prefixes of the mean squares of the rows and of the columns of gradients.
const ROWS: &str = "optimizer/v_row/";
const COLUMNS: &str = "optimizer/v_col/";

/// Added to squared gradients; the least root mean square of a weight; the most of an update; the exponent of the decay
/// of mean squares. All are the defaults of transformers' `Adafactor`.
const SQUARE_EPS: f64 = 1e-30;
const LEAST_SCALE: f64 = 1e-3;
const CLIP: f64 = 1.0;
const DECAY: f64 = -0.8;

/// The new values of the weights, in f32, as transformers' `Adafactor` computes them without relative steps: squares of
/// gradients are kept as their means over the last and over the last but one dimension, of vectors in full.
pub fn update(
    frame: &mut Frame,
    trained: &[Trained],
    gradients: &[Tensor],
    scale_parameter: bool,
) -> Result<Vec<Changed>> {
    let b = frame.b.clone();
    // 1 - b2 = t^-0.8.
    let fresh = b.exp(b.mul_scalar(b.log(frame.t)?, DECAY)?)?;
    let mut changed = Vec::with_capacity(trained.len());
    for (trained, &gradient) in trained.iter().zip(gradients) {
        let b = &frame.at(trained);
        let squares = b.add_scalar(b.square(gradient)?, SQUARE_EPS)?;
        let scaled = match b.dims(gradient).len() {
            0 | 1 => {
                let (name, v) = moment(b, trained, SECOND_MOMENT, DType::F32)?;
                let new = moved(b, v, squares, fresh)?;
                frame.keep(b, &name, new, v)?;
                b.rsqrt(new)?
            }
            rank => factored(frame, b, trained, squares, fresh, rank)?,
        };
        let update = b.mul(scaled, gradient)?;
        let one = b.scalar(DType::F32, 1.0)?;
        let excess = b.max(b.mul_scalar(rms(b, update)?, 1.0 / CLIP)?, one)?;
        let rate = match scale_parameter {
            false => frame.rate(trained),
            true => {
                let least = b.scalar(DType::F32, LEAST_SCALE)?;
                let weight = b.convert(trained.weight, DType::F32)?;
                b.mul(b.max(rms(b, weight)?, least)?, frame.rate(trained))?
            }
        };
        let update = b.mul(b.div(update, excess)?, rate)?;
        changed.push(Changed::New(
            b.sub(frame.decayed(b, trained, rate)?, update)?,
        ));
    }
    Ok(changed)
}

/// The factor of each element of the gradient: one over the root of the mean square that its row and its column have.
fn factored(
    frame: &mut Frame,
    b: &Builder,
    trained: &Trained,
    squares: Tensor,
    fresh: Tensor,
    rank: usize,
) -> Result<Tensor> {
    let mut kept = |prefix: &str, dropped: usize| {
        let mut shape = b.shape(squares);
        let mut axes = trained.logical_axes.clone();
        let size = shape.dims.remove(dropped);
        if dropped < axes.len() {
            axes.remove(dropped);
        }
        let name = format!("{prefix}{}", trained.name);
        let old = declare(b, &name, shape, &axes)?;
        let means = b.mul_scalar(b.sum(squares, &[dropped])?, 1.0 / size as f64)?;
        let new = moved(b, old, means, fresh)?;
        frame.keep(b, &name, new, old)?;
        Ok::<_, GraphError>(new)
    };
    let rows = kept(ROWS, rank - 1)?;
    let columns = kept(COLUMNS, rank - 2)?;
    let with_one = |x: Tensor, at: usize| {
        let mut dims = b.dims(x);
        dims.insert(at, 1);
        b.reshape(x, &dims)
    };
    let count = b.dims(rows)[rank - 2] as f64;
    let mean = b.mul_scalar(b.sum(rows, &[rank - 2])?, 1.0 / count)?;
    let relative = b.div(rows, with_one(mean, rank - 2)?)?;
    let of_rows = with_one(b.rsqrt(relative)?, rank - 1)?;
    let of_columns = with_one(b.rsqrt(columns)?, rank - 2)?;
    b.mul(of_rows, of_columns)
}

/// `old (1 - fresh) + new fresh`.
fn moved(b: &Builder, old: Tensor, new: Tensor, fresh: Tensor) -> Result<Tensor> {
    let stays = b.add_scalar(b.neg(fresh)?, 1.0)?;
    b.add(b.mul(old, stays)?, b.mul(new, fresh)?)
}

/// The root of the mean square.
fn rms(b: &Builder, x: Tensor) -> Result<Tensor> {
    let count = b.shape(x).count() as f64;
    b.sqrt(b.mul_scalar(sum_all(b, b.square(x)?)?, 1.0 / count)?)
}
