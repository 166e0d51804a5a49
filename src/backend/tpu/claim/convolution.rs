//! Convolutions that the kernel takes.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{Binary, Builder, Comparison, ConvDims, Op, Tensor};
use crate::shape::Shape;

use super::super::mosaic::LANES;
use super::super::{Added, Convolution, Weights, Widen};
use super::contracted::{Contracted, ContractedDims, Scales};
use super::{Claims, Result, inverse_of_features};

/// A convolution with what belongs to it. Numbers are nodes.
#[derive(Clone)]
pub(super) struct Found {
    kernel: Convolution,
    contraction: usize,
    /// The image, before it is quantized if it is.
    x: u32,
    weights: u32,
    /// Those of images and of outputs, in int8.
    scales: Scales,
    bias: Option<u32>,
    /// What [`Convolution::added`] adds, `[batch, outputs]` if it is a row.
    added: Option<u32>,
    /// The shape of the result.
    shape: Shape,
}

impl Found {
    /// The node of the convolution alone.
    pub(super) fn contraction(&self) -> usize {
        self.contraction
    }
}

impl Claims<'_> {
    /// The convolutions that the kernel takes, by the node whose value it gives. None takes a sum that `products` have.
    pub(super) fn convolutions(
        &self,
        products: &HashMap<usize, super::Found>,
    ) -> HashMap<usize, Found> {
        let nodes = 0..self.graph.nodes.len();
        let live = nodes.filter(|i| !self.users[*i].is_empty() && !self.of_weights[*i]);
        let alone: HashMap<usize, Found> = live
            .filter_map(|i| {
                let found = self.convolution(i)?;
                let (bias, root) = self.bias_and_rounding(i)?;
                Some((root, Found { bias, ..found }))
            })
            .collect();
        let with_sums = alone.iter().map(|(root, found)| {
            let sum = self.with_sum(*root, found).filter(|(sum, with)| {
                // Of two convolutions that are added, the later takes the other's result.
                let other = with.added.map(|other| other as usize);
                let is_later =
                    other.is_none_or(|other| other < *root || !alone.contains_key(&other));
                is_later && !products.contains_key(sum)
            });
            sum.unwrap_or_else(|| (*root, found.clone()))
        });
        with_sums.collect()
    }

    /// Node `i` as a convolution of an image with weights.
    fn convolution(&self, i: usize) -> Option<Found> {
        let node = &self.graph.nodes[i];
        let contracted = self.contracted(i)?;
        let ContractedDims::Convolution(dims) = contracted.dims else {
            return None;
        };
        let x = self.activation(&contracted, &[0])?;
        let [image, kernel] = [x, contracted.weights].map(|id| &self.node(id).shape);
        let &[_, height, width, inputs] = &image.dims[..] else {
            return None;
        };
        let outputs = *node.shape.dims.last()?;
        let side = *kernel.dims.last()?;
        let around = (side / 2) as i64;
        let same_size = ConvDims::of_image(1, (around, around));
        let of = |weights: u32, scales: Scales, layout: Weights| Found {
            kernel: Convolution {
                arithmetic: scales.arithmetic(),
                height,
                width,
                side,
                weights: layout,
                added: Added::Nothing,
                features: self.features,
            },
            contraction: i,
            x,
            weights,
            scales,
            bias: None,
            added: None,
            shape: node.shape.clone(),
        };
        let stored = self.stored(&contracted).map(|(weights, scales)| {
            let one_core = self.features.one_core;
            of(weights, scales, Weights::Terms { one_core })
        });
        let other = of(contracted.weights, contracted.scales, Weights::Rows);
        let takes = |found: &Found| {
            let is_integer = found.kernel.arithmetic.sum() == DType::S32;
            let fills_lanes = is_integer || inputs >= LANES && outputs >= LANES;
            self.is_split(&node.shape)
                && *dims == same_size
                && kernel.dims == [outputs, inputs, side, side]
                && fills_lanes
                && found.kernel.fits(inputs, outputs)
        };
        stored.into_iter().chain([other]).find(takes)
    }

    /// The integers and scales of a contraction's weights, where these are stored so and a kernel widens them.
    fn stored(&self, contracted: &Contracted<'_>) -> Option<(u32, Scales)> {
        if !self.features.int8 {
            return None;
        }
        match (self.in_groups(contracted.weights), contracted.scales) {
            (Some((integers, stored, scale)), Scales::None) => {
                Some((integers, Scales::Stored(stored, scale)))
            }
            (None, scales @ Scales::Stored(..)) => Some((contracted.weights, scales)),
            _ => None,
        }
    }

    /// The convolution with the sum that follows it, and the sum's node. `None` where none does, or the kernel does not
    /// take it.
    fn with_sum(&self, root: usize, alone: &Found) -> Option<(usize, Found)> {
        let (sum, node) = self.only_user(root)?;
        if !matches!(node.op, Op::Binary(Binary::Add)) {
            return None;
        }
        let other = follow::other_term(root as u32, node)?;
        let (added, other) = match &self.node(other).op {
            Op::BroadcastInDim { dims, .. }
                if dims[..] == [0, 3] && self.node(other).shape.dtype == DType::BF16 =>
            {
                (Added::Row, self.node(other).operands[0])
            }
            _ => (Added::Image, other),
        };
        let kernel = Convolution {
            added,
            ..alone.kernel
        };
        let [inputs, outputs] = [alone.x, root as u32].map(|id| self.node(id).shape.dims[3]);
        kernel.fits(inputs, outputs).then_some(())?;
        let found = Found {
            kernel,
            added: Some(other),
            ..alone.clone()
        };
        Some((sum, found))
    }

    /// Integers in rows as bf16, for a kernel that does not widen them.
    fn widened(&self, b: &Builder, integers: Tensor) -> Result<Tensor> {
        let shape = b.shape(integers);
        let kernel = Widen {
            element: shape.dtype,
            scaled: false,
        };
        // Devices that share a batch would each have to be told that they widen all of it.
        match self.parts == 1 && self.features.int8 && kernel.fits(shape.dims[1], shape.dims[2]) {
            true => b.push(Op::CustomCall(Arc::new(kernel)), &[integers]),
            false => b.convert(integers, DType::BF16),
        }
    }

    /// The weights in rows, where they are integers in groups that a kernel of its own widens.
    fn grouped(
        &self,
        b: &Builder,
        found: &Found,
        block: usize,
        copies: &[Tensor],
    ) -> Result<Option<Tensor>> {
        let Some((integers, stored, scale)) = self.in_groups(found.weights) else {
            return Ok(None);
        };
        let Some(group) = stored.group else {
            return Ok(None);
        };
        let side = found.kernel.side;
        let [outputs, inputs] = [0, 1].map(|d| self.node(integers).shape.dims[d]);
        let padded = Convolution::padded_inputs(inputs);
        let kernel = Widen {
            element: stored.element,
            scaled: true,
        };
        let (groups, terms) = (padded / group, side * padded);
        let takes = self.parts == 1
            && self.features.int8
            && self.node(scale).shape.dtype == DType::BF16
            && padded.is_multiple_of(group)
            && side * groups <= LANES
            && kernel.fits(side * outputs, terms);
        if !takes {
            return Ok(None);
        }
        let [integers, scale] = [integers, scale].map(|id| self.before_storage(id, copies));
        // What is stored lies as the kernel reads it, and is widened in every run: no wider copy stays.
        let integers = b.stored(in_rows(b, integers, side, block)?)?;
        // Inputs that fill registers up are zeros.
        let scale = super::pad_to(b, scale, &[outputs, groups])?;
        let blocks = outputs / block;
        let scale = b.reshape(scale, &[blocks, block, groups])?;
        let each = [blocks, side, block, side, groups];
        let scale = b.broadcast_in_dim(scale, &[0, 2, 4], &each)?;
        let scale = b.reshape(scale, &[1, side * outputs, side * groups])?;
        let scale = super::pad_to(b, scale, &[1, side * outputs, LANES])?;
        let places = Shape::new(DType::S32, [LANES, side * groups]);
        let [rows, columns] = [0, 1].map(|dim| b.iota(places.clone(), dim));
        let is_own = b.compare(Comparison::Eq, rows?, columns?)?;
        let [one, zero] = [1.0, 0.0].map(|n| b.full(&places.with_dtype(DType::BF16), n));
        let own = b.select(is_own, one?, zero?)?;
        let own = b.broadcast_in_dim(own, &[0, 1], &[LANES, side * groups, group])?;
        let own = b.reshape(own, &[1, LANES, terms])?;
        let call = Op::CustomCall(Arc::new(kernel));
        b.push(call, &[integers, scale, own]).map(Some)
    }

    /// The kernel's call in place of a convolution and what belongs to it.
    pub(super) fn convolution_call(
        &self,
        b: &Builder,
        found: &Found,
        copies: &[Tensor],
    ) -> Result<Tensor> {
        let copy = |id: u32| copies[id as usize];
        let x = copy(found.x);
        let [batch, height, width, inputs] = [0, 1, 2, 3].map(|d| b.dims(x)[d]);
        let outputs = found.shape.dims[3];
        let x = b.reshape(x, &[batch, height * width, inputs])?;
        let side = found.kernel.side;
        let weights = self.before_storage(found.weights, copies);
        let block = found.kernel.columns(inputs, outputs).unwrap_or(outputs);
        let mut operands = vec![x; side];
        let weights = match (found.kernel.weights, found.scales) {
            (Weights::Terms { .. }, _) => in_terms(b, weights)?,
            (_, Scales::Stored(..)) => {
                // As in groups.
                let integers = b.stored(in_rows(b, weights, side, block)?)?;
                self.widened(b, integers)?
            }
            _ => match self.grouped(b, found, block, copies)? {
                Some(weights) => weights,
                None => in_rows(b, weights, side, block)?,
            },
        };
        operands.push(weights);
        if let Some(scale) = found.scales.of_groups() {
            let scale = b.convert(self.before_storage(scale, copies), DType::F32)?;
            let scale = b.transpose(scale, &[1, 0])?;
            let groups = b.dims(scale)[0];
            operands.push(b.reshape(scale, &[1, groups, outputs])?);
        }

        let row = |x: Tensor, dim: usize| -> Result<Tensor> {
            let x = b.convert(x, DType::F32)?;
            b.broadcast_in_dim(x, &[dim], &[batch, 1, outputs])
        };
        let mut rows = Vec::new();
        match found.scales {
            Scales::None => {}
            Scales::Stored(..) => {
                if let Some(columns) = found.scales.of_columns() {
                    rows.push(row(copy(columns), 2)?);
                }
            }
            Scales::Found(scales) => {
                let [image, columns] = scales.map(copy);
                let inverse = inverse_scale(b, image)?;
                operands.push(b.broadcast_in_dim(inverse, &[0], &[batch, 1, inputs])?);
                rows.extend([row(image, 0)?, row(columns, 2)?]);
            }
            Scales::Recorded(scales) => {
                let [scale, columns] = scales.map(copy);
                let one = b.full(&Shape::new(DType::F32, [batch]), 1.0)?;
                operands.push(inverse_of_features(b, scale, &[batch, 1, inputs])?);
                rows.extend([row(one, 0)?, row(columns, 2)?]);
            }
        }
        rows.push(match found.bias {
            Some(bias) => row(copy(bias), 2)?,
            None => b.full(&Shape::new(DType::F32, [batch, 1, outputs]), 0.0)?,
        });
        let added = found.added.map(copy);
        if let (Added::Row, Some(added)) = (found.kernel.added, added) {
            let added = b.convert(added, DType::F32)?;
            rows.push(b.reshape(added, &[batch, 1, outputs])?);
        }
        operands.push(match rows[..] {
            [alone] => alone,
            _ => b.concatenate(&rows, 1)?,
        });
        if let (Added::Image, Some(added)) = (found.kernel.added, added) {
            operands.push(b.reshape(added, &[batch, height * width, outputs])?);
        }
        let y = b.push(Op::CustomCall(Arc::new(found.kernel)), &operands)?;
        b.reshape(y, &found.shape.dims)
    }
}

/// What AQT's numerics multiply images with that have this scale, in `f32`.
pub(super) fn inverse_scale(b: &Builder, scale: Tensor) -> Result<Tensor> {
    let one = b.full(&b.shape(scale), 1.0)?;
    let inverse = b.div(one, scale)?;
    let infinity = b.full(&b.shape(inverse), f64::INFINITY)?;
    let overflown = b.compare(Comparison::Eq, inverse, infinity)?;
    let inverse = b.select(overflown, one, inverse)?;
    b.convert(inverse, DType::F32)
}

/// The kernel `[outputs, inputs, side, side]` as [`Weights::Terms`] has it.
fn in_terms(b: &Builder, weights: Tensor) -> Result<Tensor> {
    let [outputs, inputs, height, width] = [0, 1, 2, 3].map(|d| b.dims(weights)[d]);
    let x = b.transpose(weights, &[2, 3, 1, 0])?;
    b.reshape(x, &[1, height * width * inputs, outputs])
}

/// The kernel `[outputs, inputs, side, side]` as [`Weights::Rows`] has it, in blocks of `block` outputs.
fn in_rows(b: &Builder, weights: Tensor, side: usize, block: usize) -> Result<Tensor> {
    let [outputs, inputs] = [0, 1].map(|d| b.dims(weights)[d]);
    let padded = Convolution::padded_inputs(inputs);
    let x = b.transpose(weights, &[2, 0, 3, 1])?;
    let x = super::pad_to(b, x, &[side, outputs, side, padded])?;
    let x = b.reshape(x, &[side, outputs / block, block, side * padded])?;
    let x = b.transpose(x, &[1, 0, 2, 3])?;
    b.reshape(x, &[1, side * outputs, side * padded])
}
