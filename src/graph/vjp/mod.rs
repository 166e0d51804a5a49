//! Reverse-mode derivative: one exhaustive match, written with the builder the models use.

mod contract;
mod elementwise;
mod fake_quantize;
mod index;
mod layout;
mod remat;

use std::collections::HashMap;

use crate::shape::Shape;

use super::scopes::{BACKWARD, GRADIENT};
use super::{
    Builder, Comparison, Composite, Graph, GraphError, Op, Reduction, ScatterKind, Tensor,
};
use contract::{conv_lhs, conv_rhs, dot_lhs, dot_rhs};
use index::{gather_operand, scatter_updates};

type Result<T> = std::result::Result<T, GraphError>;

/// The gradient of the scalar `loss` with respect to each of `wrt`, in their order and shapes.
///
/// Operations of the derivative have the scope `backward/<forward path>`; those that make the cotangent of a weight
/// have `backward/<forward path>/gradient`. Values made inside a [`Builder::checkpoint`] region are computed again.
/// A tensor that `loss` does not depend on has a gradient of zeros.
///
/// # Errors
/// When `loss` is no float scalar, or depends on `wrt` through an operation without a derivative.
pub fn grad(b: &Builder, loss: Tensor, wrt: &[Tensor]) -> Result<Vec<Tensor>> {
    let shape = b.shape(loss);
    if shape.rank() != 0 || !shape.dtype.is_float() {
        return Err(b.invalid(format!(
            "the gradient needs a float scalar to start from, found {shape}"
        )));
    }
    let one = b.scalar(shape.dtype, 1.0)?;
    vjp(b, &[(loss, one)], wrt)
}

/// The cotangents of `wrt`, given those of some outputs: `sum over outputs of (d output / d wrt)^T cotangent`.
///
/// # Errors
/// As for [`grad`], and when a cotangent's shape is not its output's.
pub fn vjp(b: &Builder, outputs: &[(Tensor, Tensor)], wrt: &[Tensor]) -> Result<Vec<Tensor>> {
    vjp_from(b, 0, outputs, wrt)
}

/// [`vjp`] of the program from node `first` on; `wrt` may be any earlier nodes.
fn vjp_from(
    b: &Builder,
    first: usize,
    outputs: &[(Tensor, Tensor)],
    wrt: &[Tensor],
) -> Result<Vec<Tensor>> {
    let mut pass = Pass::new(b, first, outputs, wrt);
    for &(output, cotangent) in outputs {
        if b.shape(output) != b.shape(cotangent) {
            return Err(b.invalid(format!(
                "cotangent {} for an output {}",
                b.shape(cotangent),
                b.shape(output)
            )));
        }
        pass.accumulate(b, output.id, 0, cotangent)?;
    }
    for id in (first as u32..pass.active.len() as u32).rev() {
        if pass.active[id as usize] {
            pass.node(id)?;
        }
    }
    wrt.iter()
        .map(|t| match pass.cotangents.get(&(t.id, 0)) {
            Some(g) => Ok(*g),
            None => b.full(&b.shape(*t), 0.0),
        })
        .collect()
}

struct Pass<'a> {
    b: &'a Builder,
    /// Nodes on a path of float values from `wrt` to the outputs.
    active: Vec<bool>,
    /// Nodes that depend on weights and constants only: their cotangents are gradients, not activations.
    weight_only: Vec<bool>,
    /// Cotangent of each node's result (by element, for nodes with several).
    cotangents: HashMap<(u32, usize), Tensor>,
    /// Recomputed copies of nodes in recomputation regions.
    recomputed: HashMap<u32, Tensor>,
    /// Of each node, whether its value is kept in spite of its region.
    kept: Vec<bool>,
    /// The regions entered, by their numbers.
    regions: HashMap<u32, Region>,
    /// The region of the node whose rule is at work.
    region: Option<u32>,
}

/// A recomputation region, as the derivative sees it.
struct Region {
    /// The first cotangent that reached the region, behind the region's barrier.
    entry: Tensor,
    /// What stands for the values that are not computed again, behind a barrier.
    values: HashMap<u32, Tensor>,
}

/// The inputs of a node's rule, copied out of the graph.
struct Site {
    op: Op,
    operands: Vec<u32>,
    shape: Shape,
    region: Option<u32>,
    path: String,
}

impl<'a> Pass<'a> {
    fn new(b: &'a Builder, first: usize, outputs: &[(Tensor, Tensor)], wrt: &[Tensor]) -> Self {
        let (active, weight_only) = b.with_graph(|g| {
            let end = outputs
                .iter()
                .map(|(o, _)| o.index() + 1)
                .max()
                .unwrap_or(0);
            let mut depends = vec![false; end];
            for t in wrt {
                if t.index() < end {
                    depends[t.index()] = true;
                }
            }
            for i in first..end {
                let node = &g.nodes[i];
                let differentiable =
                    node.shape.dtype.is_float() || !matches!(node.op, Op::Convert(_));
                depends[i] |= differentiable && node.operands.iter().any(|o| depends[*o as usize]);
            }
            let mut reaches = vec![false; end];
            for (output, _) in outputs {
                reaches[output.index()] = true;
            }
            for i in (0..end).rev() {
                if reaches[i] {
                    for o in &g.nodes[i].operands {
                        reaches[*o as usize] = true;
                    }
                }
            }
            let active = (0..end).map(|i| depends[i] && reaches[i]).collect();
            (active, g.weight_only())
        });
        Pass {
            b,
            active,
            weight_only,
            cotangents: HashMap::new(),
            recomputed: HashMap::new(),
            kept: b.with_graph(remat::kept),
            regions: HashMap::new(),
            region: None,
        }
    }

    fn site(&self, id: u32) -> Site {
        self.b.with_graph(|g| {
            let node = &g.nodes[id as usize];
            Site {
                op: node.op.clone(),
                operands: node.operands.clone(),
                shape: node.shape.clone(),
                region: node.remat.map(|remat| remat.region),
                path: g.path(node).to_string(),
            }
        })
    }

    fn accumulate(&mut self, b: &Builder, id: u32, element: usize, g: Tensor) -> Result<()> {
        let total = match self.cotangents.get(&(id, element)) {
            Some(before) => match layout::joined(b, *before, g)? {
                Some(joined) => joined,
                None => b.add(*before, g)?,
            },
            None => g,
        };
        self.cotangents.insert((id, element), total);
        Ok(())
    }

    /// The forward value of node `id` for use in the derivative: itself, or its recomputed copy where the node at work
    /// is of the same region. What leaves a region is kept, as its inputs are: else each region would be computed
    /// again for the next one's inputs, before its own barrier, and the compiler would keep all of it. What a region reads from
    /// outside is behind its barrier for all of its rules.
    fn value(&mut self, id: u32) -> Result<Tensor> {
        let site = self.site(id);
        let Some(region) = site.region.filter(|_| site.region == self.region) else {
            let barred = self
                .region
                .and_then(|at| self.regions.get(&at)?.values.get(&id));
            return Ok(barred.copied().unwrap_or(self.b.tensor(id)));
        };
        if self.kept[id as usize] {
            return self.kept_value(region, id, &site.path);
        }
        if let Some(copy) = self.recomputed.get(&id) {
            return Ok(*copy);
        }
        let mut operands = Vec::with_capacity(site.operands.len());
        for operand in &site.operands {
            let outside = self
                .regions
                .get(&region)
                .and_then(|region| region.values.get(operand))
                .copied();
            operands.push(match outside {
                Some(t) => t,
                None => self.value(*operand)?,
            });
        }
        let node = self.b.with_graph(|g| g.nodes[id as usize].clone());
        let copy = self.backward(&site.path).copy_node(&node, &operands)?;
        self.recomputed.insert(id, copy);
        Ok(copy)
    }

    /// The kept value of node `id` of a region, behind a barrier of its own: the compiler would keep what is computed
    /// from it too, if both passes computed it from the same value.
    fn kept_value(&mut self, number: u32, id: u32, path: &str) -> Result<Tensor> {
        let value = self.b.tensor(id);
        let b = self.backward(path);
        let Some(region) = self.regions.get_mut(&number) else {
            return Ok(value);
        };
        if let Some(value) = region.values.get(&id) {
            return Ok(*value);
        }
        let barred = b.optimization_barrier(&[region.entry, value])?[1];
        region.values.insert(id, barred);
        Ok(barred)
    }

    /// The builder of what the derivative computes for an operation at `path`.
    fn backward(&self, path: &str) -> Builder {
        self.b.without_remat().at(format!("{BACKWARD}/{path}"))
    }

    /// On the first cotangent that reaches a recomputation region: puts a barrier between it with the region's
    /// inputs and everything recomputed from them, so that the compiler neither shares the copies with the
    /// originals nor computes them before the backward pass arrives here.
    fn enter_region(&mut self, region: u32, id: u32, element: usize) -> Result<()> {
        if self.regions.contains_key(&region) {
            return Ok(());
        }
        let outside = self.b.with_graph(|g| remat::outside(g, region));
        let mut values = vec![self.cotangents[&(id, element)]];
        values.extend(outside.iter().map(|&o| self.b.tensor(o)));
        let b = self.backward(&self.site(id).path);
        let barred = b.optimization_barrier(&values)?;
        let entry = barred[0];
        self.cotangents.insert((id, element), entry);
        let values = outside.into_iter().zip(barred[1..].iter().copied());
        let values = values.collect();
        self.regions.insert(region, Region { entry, values });
        Ok(())
    }

    fn node(&mut self, id: u32) -> Result<()> {
        let site = self.site(id);
        // Nodes with several results hand their elements' cotangents on without a rule of their own.
        if matches!(site.op, Op::OptimizationBarrier) {
            for (element, &operand) in site.operands.iter().enumerate() {
                if let Some(g) = self.cotangents.remove(&(id, element)) {
                    self.accumulate(self.b, operand, 0, g)?;
                }
            }
            return Ok(());
        }
        // The cotangents of inputs and other leaves are what the caller reads.
        if site.operands.is_empty() {
            return Ok(());
        }
        let has_cotangent = self.cotangents.contains_key(&(id, 0));
        if !has_cotangent {
            return Ok(());
        }
        self.region = site.region;
        if let Some(region) = site.region {
            self.enter_region(region, id, 0)?;
        }
        let g = self.cotangents[&(id, 0)];
        if let Op::GetTupleElement(element) = site.op {
            return self.accumulate(self.b, site.operands[0], element, g);
        }
        if let Op::Composite { kind, body } = &site.op {
            return match (kind, &site.operands[..]) {
                (kind, operands) if kind.has_gradient(operands.len()) => {
                    self.gradients_of(id, &site, kind, body, g)
                }
                (
                    Composite::FakeQuantize {
                        along,
                        format,
                        learned,
                    },
                    [_, _],
                ) => self.fake_quantize(&site, along, *format, *learned, g),
                _ => self.through_body(&site, body, g),
            };
        }
        for (position, &operand) in site.operands.iter().enumerate() {
            if !self.active[operand as usize] {
                continue;
            }
            let b = match self.weight_only[operand as usize] {
                true => self.backward(&format!("{}/{GRADIENT}", site.path)),
                false => self.backward(&site.path),
            };
            if let Some(cotangent) = self.operand_cotangent(&b, id, &site, position, g)? {
                self.accumulate(&b, operand, 0, cotangent)?;
            }
        }
        Ok(())
    }

    /// The cotangents of a composite's operands, each as a composite that a backend may have a kernel for.
    fn gradients_of(
        &mut self,
        id: u32,
        site: &Site,
        kind: &Composite,
        body: &Graph,
        g: Tensor,
    ) -> Result<()> {
        let b = self.backward(&site.path);
        let mut operands = Vec::with_capacity(site.operands.len() + 2);
        for operand in &site.operands {
            operands.push(self.value(*operand)?);
        }
        if kind.results_in_gradient() > 1 {
            operands.push(self.value(id)?);
        }
        operands.push(g);
        for (position, operand) in site.operands.iter().enumerate() {
            if !self.active[*operand as usize] {
                continue;
            }
            let kind = Composite::Gradient {
                of: Box::new(kind.clone()),
                operand: position,
            };
            let cotangent = b.composite(kind, &operands, |b, operands| {
                let inputs = &operands[..site.operands.len()];
                let g = operands[operands.len() - 1];
                let first = b.with_graph(|graph| graph.nodes.len());
                let result = b.insert(body, inputs)?;
                let cotangents = vjp_from(b, first, &[(result, g)], &[operands[position]])?;
                Ok(cotangents[0])
            })?;
            self.accumulate(&b, *operand, 0, cotangent)?;
        }
        Ok(())
    }

    /// The cotangents of a composite's operands: its body, computed again, and the derivative of that.
    fn through_body(&mut self, site: &Site, body: &Graph, g: Tensor) -> Result<()> {
        let b = self.b.without_remat();
        let mut operands = Vec::with_capacity(site.operands.len());
        for operand in &site.operands {
            operands.push(self.value(*operand)?);
        }
        let first = b.with_graph(|g| g.nodes.len());
        let result = b.insert(body, &operands)?;
        let cotangents = vjp_from(&b, first, &[(result, g)], &operands)?;
        for (operand, cotangent) in site.operands.iter().zip(cotangents) {
            if self.active[*operand as usize] {
                self.accumulate(&b, *operand, 0, cotangent)?;
            }
        }
        Ok(())
    }

    /// The cotangent of operand `position`, or `None` where the derivative is zero everywhere.
    fn operand_cotangent(
        &mut self,
        b: &Builder,
        id: u32,
        site: &Site,
        position: usize,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let operand_shape = b.shape(b.tensor(site.operands[position]));
        let not_differentiable = || GraphError::NotDifferentiable {
            path: site.path.clone(),
            op: site.op.name(),
        };
        let cotangent = match &site.op {
            // Leaves have no operands; multi-result nodes were handled by the caller.
            Op::Parameter(_)
            | Op::Constant(_)
            | Op::Iota(_)
            | Op::Uninitialized
            | Op::GetTupleElement(_)
            | Op::OptimizationBarrier
            | Op::Compare(_) => return Ok(None),
            Op::While { .. }
            | Op::BitcastConvert(_)
            | Op::CustomCall(_)
            | Op::Composite { .. }
            | Op::Scatter(ScatterKind::Set, _) => return Err(not_differentiable()),
            Op::Unary(kind) => return self.unary(b, *kind, id, site, g),
            Op::Binary(kind) => return self.binary(b, *kind, id, site, position, g),
            Op::Select => return self.select(b, site, position, g),
            Op::Clamp if position == 1 => self.clamp(b, site, g)?,
            Op::Clamp => return Err(not_differentiable()),
            Op::Convert(_) if !operand_shape.dtype.is_float() || !site.shape.dtype.is_float() => {
                return Ok(None);
            }
            Op::Convert(_) => b.convert(g, operand_shape.dtype)?,
            Op::Stored => g,
            Op::BroadcastInDim { dims, .. } => layout::sum_to(b, g, dims, &operand_shape)?,
            Op::Reshape(_) => b.reshape(g, &operand_shape.dims)?,
            Op::Transpose(perm) => layout::transpose(b, g, perm)?,
            Op::Slice { start, stride, .. } => layout::slice(b, g, start, stride, &operand_shape)?,
            Op::DynamicSlice(_) | Op::Gather(_) if position > 0 => return Ok(None),
            Op::DynamicSlice(_) => self.dynamic_slice(b, site, g, &operand_shape)?,
            Op::DynamicUpdateSlice => return self.dynamic_update_slice(b, site, position, g),
            Op::Pad(pads) => layout::pad(b, g, pads, position)?,
            Op::Concatenate(dim) => {
                let before = site.operands[..position].iter();
                let start = before.map(|o| b.dims(b.tensor(*o))[*dim]).sum();
                b.slice_dim(g, *dim, start, start + operand_shape.dims[*dim])?
            }
            Op::Reverse(dims) => b.reverse(g, dims)?,
            Op::Gather(dims) => {
                let indices = self.value(site.operands[1])?;
                gather_operand(b, g, indices, dims, &operand_shape)?
            }
            Op::Scatter(ScatterKind::Add, dims) => match position {
                0 => g,
                1 => return Ok(None),
                _ => {
                    let indices = self.value(site.operands[1])?;
                    scatter_updates(b, g, indices, dims, &operand_shape)?
                }
            },
            Op::Reduce { kind, dims } => return self.reduce(b, *kind, dims, id, site, g),
            Op::DotGeneral { dims, quant, .. } => {
                let other = self.value(site.operands[1 - position])?;
                let quant = quant.as_deref();
                match position {
                    0 => dot_lhs(b, g, other, dims, &operand_shape, quant)?,
                    _ => dot_rhs(b, g, other, dims, &operand_shape, quant)?,
                }
            }
            Op::Convolution { dims, quant, .. } => {
                let other = self.value(site.operands[1 - position])?;
                let quant = quant.as_deref();
                match position {
                    0 => conv_lhs(b, g, other, dims, &operand_shape, quant)?,
                    _ => conv_rhs(b, g, other, dims, &operand_shape, quant)?,
                }
            }
            Op::ShardingConstraint(axes) => b.constrain(g, axes)?,
        };
        Ok(Some(cotangent))
    }

    fn values(&mut self, ids: &[u32]) -> Result<Vec<Tensor>> {
        ids.iter().map(|id| self.value(*id)).collect()
    }

    fn dynamic_slice(
        &mut self,
        b: &Builder,
        site: &Site,
        g: Tensor,
        operand: &Shape,
    ) -> Result<Tensor> {
        let start = self.values(&site.operands[1..])?;
        let zeros = b.full(operand, 0.0)?;
        b.dynamic_update_slice(zeros, g, &start)
    }

    fn dynamic_update_slice(
        &mut self,
        b: &Builder,
        site: &Site,
        position: usize,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let start = self.values(&site.operands[2..])?;
        let update = b.shape(b.tensor(site.operands[1]));
        match position {
            0 => {
                let zeros = b.full(&update, 0.0)?;
                b.dynamic_update_slice(g, zeros, &start).map(Some)
            }
            1 => b.dynamic_slice(g, &start, &update.dims).map(Some),
            _ => Ok(None),
        }
    }

    fn reduce(
        &mut self,
        b: &Builder,
        kind: Reduction,
        dims: &[usize],
        id: u32,
        site: &Site,
        g: Tensor,
    ) -> Result<Option<Tensor>> {
        let sizes = b.dims(b.tensor(site.operands[0]));
        let kept: Vec<usize> = (0..sizes.len()).filter(|d| !dims.contains(d)).collect();
        match kind {
            Reduction::Sum => b.broadcast_in_dim(g, &kept, &sizes).map(Some),
            Reduction::Max | Reduction::Min => {
                // Ties share the cotangent equally, as in JAX.
                let x = self.value(site.operands[0])?;
                let y = self.value(id)?;
                let y = b.broadcast_in_dim(y, &kept, &sizes)?;
                let hit = b.convert(b.compare(Comparison::Eq, x, y)?, site.shape.dtype)?;
                let share = b.div(g, b.sum(hit, dims)?)?;
                let share = b.broadcast_in_dim(share, &kept, &sizes)?;
                b.mul(share, hit).map(Some)
            }
            Reduction::And | Reduction::Or => Ok(None),
        }
    }
}
