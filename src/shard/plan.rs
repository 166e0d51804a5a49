//! The partition specs of a whole program.

use std::collections::HashMap;

use crate::graph::{Graph, Op};

use super::{LogicalAxisRules, Mesh, PartitionSpec, ShardError, Unsharded};

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
    /// By node index of the main graph, for each sharding constraint.
    pub constraints: HashMap<u32, String>,
}

/// How each input, output and constraint of one program is split over a mesh.
#[derive(Debug, Clone)]
pub struct ShardPlan {
    pub inputs: Vec<PartitionSpec>,
    pub outputs: Vec<PartitionSpec>,
    constraints: HashMap<u32, PartitionSpec>,
    /// Dimensions the rules would split but whose size does not divide: for the log.
    pub unsharded: Vec<Unsharded>,
}

impl ShardPlan {
    /// Applies the rules to the logical axes of every input, aliased output and constraint.
    ///
    /// An input without logical axes, and an output that takes over no input, is whole on every device.
    ///
    /// # Errors
    /// When a tensor names a logical axis twice.
    pub fn new(graph: &Graph, mesh: &Mesh, rules: &LogicalAxisRules) -> Result<Self, ShardError> {
        let mut unsharded = Vec::new();
        let mut spec = |path: &str, axes: &[Option<&'static str>], dims: &[usize]| {
            if axes.is_empty() {
                return Ok(PartitionSpec::replicated(dims.len()));
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
        let mut constraints = HashMap::new();
        for (id, node) in graph.nodes.iter().enumerate() {
            if let Op::ShardingConstraint(axes) = &node.op {
                let spec = spec(graph.path(node), axes, &node.shape.dims)?;
                constraints.insert(id as u32, spec);
            }
        }
        Ok(Self {
            inputs,
            outputs,
            constraints,
            unsharded,
        })
    }

    /// What emission writes, or `None` for a mesh of one device.
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
            constraints: self
                .constraints
                .iter()
                .map(|(id, spec)| (*id, spec.to_sdy()))
                .collect(),
        })
    }
}
