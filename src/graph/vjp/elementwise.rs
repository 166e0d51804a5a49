//! Derivatives of elementwise operations.

use super::{Pass, Result, Site};
use crate::graph::{Binary, Builder, Comparison, GraphError, Tensor, Unary};

impl Pass<'_> {
    pub(super) fn unary(
        &mut self,
        b: &Builder,
        kind: Unary,
        id: u32,
        site: &Site,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let operand = site.operands[0];
        Ok(Some(match kind {
            Unary::Ceil
            | Unary::Floor
            | Unary::IsFinite
            | Unary::Not
            | Unary::RoundNearestEven
            | Unary::Sign => return Ok(None),
            Unary::Abs => {
                let x = self.value(operand)?;
                b.mul(g, b.unary(Unary::Sign, x)?)?
            }
            Unary::Cos => {
                let x = self.value(operand)?;
                b.neg(b.mul(g, b.sin(x)?)?)?
            }
            Unary::Sin => {
                let x = self.value(operand)?;
                b.mul(g, b.cos(x)?)?
            }
            Unary::Erf => {
                // d erf(x)/dx = 2/sqrt(pi) exp(-x^2)
                let x = self.value(operand)?;
                let bell = b.exp(b.neg(b.square(x)?)?)?;
                b.mul(g, b.mul_scalar(bell, std::f64::consts::FRAC_2_SQRT_PI)?)?
            }
            Unary::Exp => {
                let y = self.value(id)?;
                b.mul(g, y)?
            }
            Unary::Log => {
                let x = self.value(operand)?;
                b.div(g, x)?
            }
            Unary::Logistic => {
                let y = self.value(id)?;
                let slope = b.sub(y, b.square(y)?)?;
                b.mul(g, slope)?
            }
            Unary::Neg => b.neg(g)?,
            Unary::Rsqrt => {
                // d x^(-1/2)/dx = -1/2 x^(-3/2)
                let y = self.value(id)?;
                let cube = b.mul(b.square(y)?, y)?;
                b.mul(g, b.mul_scalar(cube, -0.5)?)?
            }
            Unary::Sqrt => {
                let y = self.value(id)?;
                b.div(b.mul_scalar(g, 0.5)?, y)?
            }
            Unary::Tanh => {
                let y = self.value(id)?;
                b.sub(g, b.mul(g, b.square(y)?)?)?
            }
        }))
    }

    pub(super) fn binary(
        &mut self,
        b: &Builder,
        kind: Binary,
        id: u32,
        site: &Site,
        position: usize,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let other = site.operands[1 - position];
        Ok(Some(match kind {
            Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::ShiftLeft
            | Binary::ShiftRightLogical => return Ok(None),
            Binary::Add => g,
            Binary::Sub => match position {
                0 => g,
                _ => b.neg(g)?,
            },
            Binary::Mul => {
                let y = self.value(other)?;
                b.mul(g, y)?
            }
            Binary::Div => {
                let divisor = self.value(site.operands[1])?;
                let scaled = b.div(g, divisor)?;
                match position {
                    0 => scaled,
                    _ => {
                        let quotient = self.value(id)?;
                        b.neg(b.mul(scaled, quotient)?)?
                    }
                }
            }
            Binary::Max | Binary::Min => {
                // Ties share the cotangent equally, as in JAX.
                let x = self.value(site.operands[position])?;
                let y = self.value(other)?;
                let wins = if kind == Binary::Max {
                    Comparison::Gt
                } else {
                    Comparison::Lt
                };
                let win = b.compare(wins, x, y)?;
                let tie = b.compare(Comparison::Eq, x, y)?;
                let half = b.mul_scalar(g, 0.5)?;
                let zero = b.full(&site.shape, 0.0)?;
                b.select(win, g, b.select(tie, half, zero)?)?
            }
            Binary::Pow => self.power(b, id, site, position, g)?,
            Binary::Rem => {
                return Err(GraphError::NotDifferentiable {
                    path: site.path.clone(),
                    op: site.op.name(),
                });
            }
        }))
    }

    /// The slopes of `x^y`: `y x^(y-1)` in x, `x^y log x` in y.
    fn power(
        &mut self,
        b: &Builder,
        id: u32,
        site: &Site,
        position: usize,
        g: Tensor,
    ) -> Result<Tensor> {
        let x = self.value(site.operands[0])?;
        let y = self.value(site.operands[1])?;
        let zero = b.full(&site.shape, 0.0)?;
        let one = b.full(&site.shape, 1.0)?;
        if position == 0 {
            // Where y is 0 the power is 1 and its slope in x is 0, not 0 * inf at x = 0.
            let flat = b.compare(Comparison::Eq, y, zero)?;
            let below = b.select(flat, one, b.add_scalar(y, -1.0)?)?;
            let lower = b.binary(Binary::Pow, x, below)?;
            return b.mul(g, b.mul(y, lower)?);
        }
        // Where x is 0 the slope in y is 0, not 0 * -inf.
        let at_zero = b.compare(Comparison::Eq, x, zero)?;
        let log = b.log(b.select(at_zero, one, x)?)?;
        let z = self.value(id)?;
        b.mul(g, b.mul(z, log)?)
    }

    pub(super) fn select(
        &mut self,
        b: &Builder,
        site: &Site,
        position: usize,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let pred = self.value(site.operands[0])?;
        let zero = b.full(&site.shape, 0.0)?;
        match position {
            0 => Ok(None),
            1 => b.select(pred, g, zero).map(Some),
            _ => b.select(pred, zero, g).map(Some),
        }
    }

    /// The cotangent of the clamped value.
    pub(super) fn clamp(&mut self, b: &Builder, site: &Site, g: Tensor) -> Result<Tensor> {
        let low = self.value(site.operands[0])?;
        let x = self.value(site.operands[1])?;
        let high = self.value(site.operands[2])?;
        let above = b.compare(Comparison::Gt, x, low)?;
        let below = b.compare(Comparison::Lt, x, high)?;
        let inside = b.binary(Binary::And, above, below)?;
        let zero = b.full(&site.shape, 0.0)?;
        b.select(inside, g, zero)
    }
}
