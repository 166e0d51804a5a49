//! The partition specs of a whole program.

use std::collections::{HashMap, HashSet};

use crate::graph::{Batch, CustomCall, Graph, InputKind, Op};
use crate::shape::Shape;

use super::local::{local_shards, misaligned};
use super::{
    Axis, LOCAL_SHARDS, LogicalAxisRules, MESH_NAME, Mesh, PartitionSpec, ShardError, Unsharded,
};

/// The shardings of one program as Shardy text: what emission writes.
///
/// Each sharding is a whole attribute, e.g. `#sdy.sharding<@mesh, [{"data"}, {}]>`.
#[derive(Clone, Debug, Default)]
pub struct ShardingText {
    /// The mesh declaration, e.g. `sdy.mesh @mesh = <["data"=2, "fsdp"=4]>`.
    pub mesh: String,
    /// The number of devices of the mesh.
    pub num_partitions: usize,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Of each sharding constraint, here and in loops.
    pub constraints: Constraints,
    /// How devices share the calls of kernels, where they share anything.
    pub calls: Option<SharedCalls>,
}

/// The sharding of each constraint, which its logical axes and dimensions decide.
pub type Constraints = HashMap<(Vec<Option<&'static str>>, Vec<usize>), String>;

/// The mesh axes that split a batch over `parts` parts.
#[derive(Clone, Debug)]
pub struct SharedCalls {
    pub parts: usize,
    /// For example `"data", "fsdp"`.
    pub axes: String,
}

impl SharedCalls {
    /// How devices share a kernel's call on operands of these shapes. `None` if the kernel cannot compute a part of it.
    pub fn of(&self, call: &dyn CustomCall, operands: &[&Shape]) -> Option<CallSharding<'_>> {
        Some(CallSharding {
            parts: self.parts,
            batch: call.batch(operands)?,
            axes: &self.axes,
        })
    }
}

/// How the devices share a kernel's call: each computes a part of the batch.
#[derive(Clone, Debug)]
pub struct CallSharding<'a> {
    /// Parts of the batch.
    pub parts: usize,
    pub batch: Batch,
    /// The mesh axes that split the batch.
    pub axes: &'a str,
}

impl CallSharding<'_> {
    /// The Shardy attribute's body for an operand or result of this rank that is split along dimension `batch`.
    pub fn spec(&self, rank: usize, batch: Option<usize>) -> String {
        let dim = |d| match Some(d) == batch {
            true => format!("{{{}}}", self.axes),
            false => "{}".to_string(),
        };
        let dims: Vec<String> = (0..rank).map(dim).collect();
        format!("<@{MESH_NAME}, [{}]>", dims.join(", "))
    }

    /// The part of an operand or result on one device.
    pub fn part(&self, shape: &Shape, batch: Option<usize>) -> Shape {
        shape.part(batch, self.parts)
    }
}

/// How each input, output and constraint of one program is split over a mesh.
#[derive(Debug, Clone)]
pub struct ShardPlan {
    pub inputs: Vec<PartitionSpec>,
    pub outputs: Vec<PartitionSpec>,
    constraints: Constraints,
    /// How devices share the calls of kernels, where they share anything.
    pub calls: Option<SharedCalls>,
    /// The mesh axes over which the rules would split something.
    pub asked: HashSet<Axis>,
    /// Dimensions the rules would split but whose size does not divide.
    pub unsharded: Vec<Unsharded>,
    /// Why the parts of range finding are not those of slices, where they are not.
    pub misaligned: Option<String>,
}

impl ShardPlan {
    /// Refuses a batch that does not divide: it would be computed whole on every device, an error and not a slow
    /// program.
    ///
    /// # Errors
    /// Names the batch and the devices that share it.
    pub fn check_batch(&self, graph: &Graph, mesh: &Mesh) -> Result<(), ShardError> {
        let is_data = |name: &str| {
            let mut inputs = graph.inputs.iter();
            inputs.any(|input| input.name == name && input.kind == InputKind::Data)
        };
        let mut notes = self.unsharded.iter();
        match notes.find(|note| note.dim == 0 && is_data(&note.path)) {
            None => Ok(()),
            Some(note) => Err(ShardError::Batch {
                size: note.size,
                product: note.product,
                axes: note.axes.clone(),
                devices: mesh.num_devices(),
            }),
        }
    }

    /// Applies the rules to the logical axes of every input, aliased output and constraint.
    ///
    /// An input without logical axes, and an output that takes over no input, is whole on every device.
    ///
    /// # Errors
    /// When a tensor names a logical axis twice.
    pub fn new(graph: &Graph, mesh: &Mesh, rules: &LogicalAxisRules) -> Result<Self, ShardError> {
        let mut unsharded = Vec::new();
        let mut asked = HashSet::new();
        let mut spec = |path: &str, axes: &[Option<&'static str>], dims: &[usize]| {
            if axes.is_empty() {
                return Ok(PartitionSpec::replicated(dims.len()));
            }
            if mesh.num_devices() > 1 {
                asked.extend(rules.spec(path, axes)?.dims().iter().flatten().copied());
            }
            let (spec, mut notes) = rules.spec_for_shape(path, axes, dims, mesh)?;
            unsharded.append(&mut notes);
            Ok::<_, ShardError>(spec)
        };
        let inputs = graph
            .inputs
            .iter()
            .map(|i| spec(&i.name, &i.logical_axes, &i.shape.dims))
            .collect::<Result<Vec<_>, _>>()?;
        let outputs = graph
            .outputs
            .iter()
            .map(|o| match o.alias {
                Some(input) => Ok(inputs[input].clone()),
                None => spec(
                    &o.name,
                    &o.logical_axes,
                    &graph.nodes[o.node as usize].shape.dims,
                ),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let batch_axes = rules.batch_axes()?;
        let mut note = None;
        let mut constraints = HashMap::new();
        let mut open = vec![graph];
        while let Some(graph) = open.pop() {
            for node in &graph.nodes {
                open.extend(node.op.loop_regions());
                let Op::ShardingConstraint(axes) = &node.op else {
                    continue;
                };
                let dims = &node.shape.dims;
                let text = if axes.first() == Some(&Some(LOCAL_SHARDS)) {
                    note = note.or_else(|| misaligned(mesh, &batch_axes, dims[0]));
                    local_shards(mesh, &batch_axes, dims)
                } else {
                    spec(graph.path(node), axes, dims)?.to_sdy()
                };
                constraints.insert((axes.clone(), dims.clone()), text);
            }
        }
        Ok(Self {
            asked,
            inputs,
            outputs,
            constraints,
            calls: shared_calls(mesh, &batch_axes),
            unsharded,
            misaligned: note,
        })
    }

    /// The sharding that emission writes, or `None` for a mesh of one device.
    pub fn text(&self, mesh: &Mesh) -> Option<ShardingText> {
        if mesh.num_devices() == 1 {
            return None;
        }
        let texts = |specs: &[PartitionSpec]| specs.iter().map(PartitionSpec::to_sdy).collect();
        Some(ShardingText {
            mesh: mesh.to_sdy(),
            num_partitions: mesh.num_devices(),
            inputs: texts(&self.inputs),
            outputs: texts(&self.outputs),
            constraints: self.constraints.clone(),
            calls: self.calls.clone(),
        })
    }
}

/// How devices share the calls of kernels; `None` if each computes the whole batch.
fn shared_calls(mesh: &Mesh, batch_axes: &[Axis]) -> Option<SharedCalls> {
    let parts = mesh.product(batch_axes);
    let axes = batch_axes.iter().filter(|axis| mesh.size(**axis) > 1);
    let axes: Vec<String> = axes.map(|axis| format!("\"{}\"", axis.name())).collect();
    let axes = axes.join(", ");
    (parts > 1).then_some(SharedCalls { parts, axes })
}
