//! Group norms of images `[batch, height, width, channels]`, and their derivatives: kernels read pixels, and between them the compiler
//! computes a few numbers for each channel.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, Node, Op, Tensor};

use super::super::channels::TILE;
use super::super::group_norm::{Finds, GroupNormGradient};
use super::super::{OfChannels, ScaleShift};
use super::image::{of_bf16, of_channels, pixels};
use super::{Result, is_split};

/// The attributes of a group norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GroupNorm {
    groups: usize,
    epsilon: f64,
    silu: bool,
}

/// Means of groups, and one over their deviations, `f32[batch, groups]`.
#[derive(Clone, Copy)]
struct Statistics {
    mean: Tensor,
    inverse: Tensor,
}

/// Sums over the pixels of each channel of each image, and what else the derivative reads, `f32[batch, groups, channels of a group]`.
#[derive(Clone, Copy)]
struct Sums {
    statistics: Statistics,
    scale_and_shift: [Tensor; 2],
    /// Of the gradient of `x * scale + shift`.
    of_gradient: Tensor,
    /// Of its product with x, less the mean.
    of_product: Tensor,
}

impl GroupNorm {
    /// What a composite is, if a group norm, and of which of its operands the gradient, if that.
    fn of(kind: &Composite) -> Option<(GroupNorm, Option<usize>)> {
        let (layer, operand) = kind.layer();
        let Composite::GroupNorm {
            groups,
            epsilon,
            silu,
        } = *layer
        else {
            return None;
        };
        let norm = GroupNorm {
            groups,
            epsilon,
            silu,
        };
        Some((norm, operand))
    }

    fn gradient(self, finds: Finds) -> GroupNormGradient {
        GroupNormGradient {
            finds,
            silu: self.silu,
        }
    }

    /// `None` where no kernel takes the image.
    fn statistics(self, b: &Builder, x: Tensor) -> Result<Option<Statistics>> {
        let Some(dims) = of_bf16(b, x) else {
            return Ok(None);
        };
        let [_, height, width, channels] = dims;
        if !ScaleShift::fits(height * width, channels) {
            return Ok(None);
        }
        let Some(sums) = of_channels(b, x, dims, OfChannels::Sums)? else {
            return Ok(None);
        };
        let group_mean = |first: usize| {
            let of_channels = self.of_groups(b, sums, first)?;
            self.group_mean(b, dims, of_channels)
        };
        let mean = group_mean(0)?;
        let variance = b.sub(group_mean(TILE)?, b.square(mean)?)?;
        let variance = b.max(variance, b.scalar(DType::F32, 0.0)?)?;
        let inverse = b.rsqrt(b.add_scalar(variance, self.epsilon)?)?;
        Ok(Some(Statistics { mean, inverse }))
    }

    /// The sum of 16 rows of `f32[batch, rows, channels]`, from the row `first`, by group.
    fn of_groups(self, b: &Builder, sums: Tensor, first: usize) -> Result<Tensor> {
        let [batch, _, channels] = [0, 1, 2].map(|d| b.dims(sums)[d]);
        let rows = b.slice_dim(sums, 1, first, first + TILE)?;
        let size = channels / self.groups;
        let rows = b.reshape(rows, &[batch, TILE, self.groups, size])?;
        b.sum(rows, &[1])
    }

    /// Means over groups of images of these dimensions, given sums over the pixels of each channel.
    fn group_mean(
        self,
        b: &Builder,
        [_, height, width, channels]: [usize; 4],
        sums: Tensor,
    ) -> Result<Tensor> {
        let numbers = height * width * channels / self.groups;
        b.mul_scalar(b.sum(sums, &[2])?, 1.0 / numbers as f64)
    }

    /// The number of its group for each channel, `f32[batch, groups, channels of a group]`.
    fn of_channels(self, b: &Builder, of_groups: Tensor, channels: usize) -> Result<Tensor> {
        let [batch, groups] = [0, 1].map(|d| b.dims(of_groups)[d]);
        b.broadcast_in_dim(of_groups, &[0, 1], &[batch, groups, channels / groups])
    }

    /// What each channel of each image is multiplied by, and what is added then.
    fn scale_and_shift(
        self,
        b: &Builder,
        Statistics { mean, inverse }: Statistics,
        [weight, bias]: [Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let channels = b.dims(weight)[0];
        let [weight, bias] = [weight, bias].map(|of_channels| self.by_group(b, of_channels));
        let scale = b.mul(self.of_channels(b, inverse, channels)?, weight?)?;
        let offset = b.mul(self.of_channels(b, mean, channels)?, scale)?;
        Ok([scale, b.sub(bias?, offset)?])
    }

    /// `[channels]` by group, in `f32`.
    fn by_group(self, b: &Builder, of_channels: Tensor) -> Result<Tensor> {
        let channels = b.dims(of_channels)[0];
        let wide = b.convert(of_channels, DType::F32)?;
        b.reshape(wide, &[self.groups, channels / self.groups])
    }

    /// The norm of an image that has these statistics.
    fn normalized(
        self,
        b: &Builder,
        [x, weight, bias]: [Tensor; 3],
        statistics: Statistics,
    ) -> Result<Tensor> {
        let numbers = self.scale_and_shift(b, statistics, [weight, bias])?;
        let kernel = Op::CustomCall(Arc::new(ScaleShift { silu: self.silu }));
        let y = b.push(kernel, &[pixels(b, x)?, rows(b, &numbers)?])?;
        b.reshape(y, &b.dims(x))
    }

    fn sums(
        self,
        b: &Builder,
        [x, weight, bias, gradient]: [Tensor; 4],
        statistics: Statistics,
    ) -> Result<Sums> {
        let scale_and_shift = self.scale_and_shift(b, statistics, [weight, bias])?;
        let numbers = rows(b, &scale_and_shift)?;
        let operands = [pixels(b, x)?, pixels(b, gradient)?, numbers];
        let call = Op::CustomCall(Arc::new(self.gradient(Finds::Sums)));
        let sums = b.push(call, &operands)?;
        let of_gradient = self.of_groups(b, sums, 0)?;
        let mean = self.of_channels(b, statistics.mean, b.dims(weight)[0])?;
        let of_mean = b.mul(mean, of_gradient)?;
        Ok(Sums {
            statistics,
            scale_and_shift,
            of_gradient,
            of_product: b.sub(self.of_groups(b, sums, TILE)?, of_mean)?,
        })
    }

    /// The gradient of the image. With `n = (x - mean) * inverse`, and means over groups, it is `inverse * (g - mean(g) - n * mean(g * n))`,
    /// where g is the weight times the gradient of `x * scale + shift`.
    fn gradient_of_x(
        self,
        b: &Builder,
        [x, weight, _, gradient]: [Tensor; 4],
        sums: Sums,
    ) -> Result<Tensor> {
        let dims = [0, 1, 2, 3].map(|d| b.dims(x)[d]);
        let Statistics { mean, inverse } = sums.statistics;
        let of_weight = self.by_group(b, weight)?;
        let weighted_mean = |of_channels: Tensor| {
            let weighted = b.mul(of_channels, of_weight)?;
            self.group_mean(b, dims, weighted)
        };
        let of_gradient = b.mul(weighted_mean(sums.of_gradient)?, inverse)?;
        let cube = b.mul(b.square(inverse)?, inverse)?;
        let of_product = b.mul(weighted_mean(sums.of_product)?, cube)?;
        let slope = b.neg(of_product)?;
        let offset = b.sub(b.mul(of_product, mean)?, of_gradient)?;
        let [scale, shift] = sums.scale_and_shift;
        let [slope, offset] = [slope, offset].map(|of| self.of_channels(b, of, dims[3]));
        let numbers = rows(b, &[scale, shift, slope?, offset?])?;
        let call = Op::CustomCall(Arc::new(self.gradient(Finds::GradientOfX)));
        let operands = [pixels(b, x)?, pixels(b, gradient)?, numbers];
        b.reshape(b.push(call, &operands)?, &dims)
    }
}

/// Numbers of channels by group, one row below the other: `f32[batch, count, channels]`.
fn rows(b: &Builder, numbers: &[Tensor]) -> Result<Tensor> {
    let rows = numbers.iter().map(|of_channels| {
        let [batch, groups, size] = [0, 1, 2].map(|d| b.dims(*of_channels)[d]);
        b.reshape(*of_channels, &[batch, 1, groups * size])
    });
    b.concatenate(&rows.collect::<Result<Vec<_>>>()?, 1)
}

/// The group norm of the image `x` with weight and bias `[channels]`: sums by one kernel, the norm of pixels by another. `None` where
/// the kernels do not take it.
pub(super) fn group_norm(
    b: &Builder,
    kind: &Composite,
    operands: [Tensor; 3],
) -> Result<Option<Tensor>> {
    let Some((norm, None)) = GroupNorm::of(kind) else {
        return Ok(None);
    };
    match norm.statistics(b, operands[0])? {
        Some(statistics) => norm.normalized(b, operands, statistics).map(Some),
        None => Ok(None),
    }
}

/// Whether [`super::claim_training`] may take a composite, where the devices compute `parts` parts of the batch: a group norm of bf16
/// whose rows make whole tiles, and its derivative.
pub(super) fn is_claimed(kind: &Composite, body: &Graph, parts: usize) -> bool {
    let (Some((norm, operand)), Some(x), Some(y)) = (
        GroupNorm::of(kind),
        body.inputs.first(),
        body.outputs.first(),
    ) else {
        return false;
    };
    let &[_, height, width, channels] = &x.shape.dims[..] else {
        return false;
    };
    let rows = height * width;
    let derivatives = [Finds::Sums, Finds::GradientOfX].map(|finds| norm.gradient(finds));
    let is_of_bf16 = body.nodes[y.node as usize].shape.dtype == DType::BF16;
    x.shape.dtype == DType::BF16
        && (is_of_bf16 || operand.is_some())
        && is_split(&x.shape, parts)
        && OfChannels::fits(rows, channels)
        && ScaleShift::fits(rows, channels)
        && derivatives.iter().all(|kernel| kernel.fits(rows, channels))
}

/// Calls the kernels of group norms and of their derivatives.
#[derive(Default)]
pub(super) struct GroupNorms<'g> {
    /// By the nodes of images.
    statistics: HashMap<u32, (GroupNorm, Statistics)>,
    /// By the operands of derivatives, which give the gradient of one operand each.
    sums: HashMap<&'g [u32], (GroupNorm, Sums)>,
}

impl<'g> GroupNorms<'g> {
    /// The kernels of what [`is_claimed`] says yes to; `None` where there are none.
    pub fn claim(
        &mut self,
        b: &Builder,
        node: &'g Node,
        kind: &Composite,
        copies: &[Tensor],
    ) -> Result<Option<Tensor>> {
        let Some((norm, operand)) = GroupNorm::of(kind) else {
            return Ok(None);
        };
        let Some(statistics) = self.statistics(b, norm, node.operands[0], copies)? else {
            return Ok(None);
        };
        let operands: Vec<Tensor> = node
            .operands
            .iter()
            .map(|id| copies[*id as usize])
            .collect();
        match (operand, &operands[..]) {
            (None, &[x, weight, bias]) => {
                norm.normalized(b, [x, weight, bias], statistics).map(Some)
            }
            (Some(operand), &[x, weight, bias, gradient]) => {
                let all = [x, weight, bias, gradient];
                let sums = match self.sums.get(&node.operands[..]) {
                    Some((found, sums)) if *found == norm => *sums,
                    _ => {
                        let sums = norm.sums(b, all, statistics)?;
                        self.sums.insert(&node.operands, (norm, sums));
                        sums
                    }
                };
                let of_channels = match operand {
                    0 => return norm.gradient_of_x(b, all, sums).map(Some),
                    1 => {
                        let inverse = statistics.inverse;
                        let inverse = norm.of_channels(b, inverse, b.dims(weight)[0])?;
                        b.mul(sums.of_product, inverse)?
                    }
                    _ => sums.of_gradient,
                };
                let sum = b.sum(of_channels, &[0])?;
                let sum = b.convert(sum, node.shape.dtype)?;
                b.reshape(sum, &node.shape.dims).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn statistics(
        &mut self,
        b: &Builder,
        norm: GroupNorm,
        x: u32,
        copies: &[Tensor],
    ) -> Result<Option<Statistics>> {
        match self.statistics.get(&x) {
            Some((found, statistics)) if *found == norm => Ok(Some(*statistics)),
            _ => {
                let found = norm.statistics(b, copies[x as usize])?;
                let kept = found.map(|found| (norm, found));
                self.statistics.extend(kept.map(|kept| (x, kept)));
                Ok(found)
            }
        }
    }
}
