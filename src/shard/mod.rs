//! Meshes, partition specs and logical axis rules.
//!
//! A [`Mesh`] lays the devices of all slices out on four named axes; a [`PartitionSpec`] says over
//! which of them each dimension of a tensor is split; [`LogicalAxisRules`] turn the names a model
//! gives its dimensions into such specs. All are emitted as Shardy text.

mod layout;
mod local;
mod mesh;
mod plan;
mod rules;
mod spec;

pub use layout::DeviceDescription;
pub use mesh::{Mesh, Parallelism};
pub use plan::{CallSharding, Constraints, ShardPlan, ShardingText, SharedCalls};
pub use rules::{LogicalAxisRule, LogicalAxisRules, Unsharded};
pub use spec::PartitionSpec;

use std::fmt;

use thiserror::Error;

use crate::util::named;

/// The logical axis of partial sums, one for each part of the batch that a weight gradient finds its ranges in. A
/// constraint with it in front keeps part `i` in slice `i` and splits the rest over that slice's devices.
pub const LOCAL_SHARDS: &str = "local_shards";

/// Name of the mesh in the emitted program.
pub const MESH_NAME: &str = "mesh";

named! {
    /// A mesh axis. The order is MaxDiffusion's `mesh_axes`: the first is outermost.
    #[derive(PartialOrd, Ord)]
    pub enum Axis {
        Data = "data",
        Fsdp = "fsdp",
        Context = "context",
        Tensor = "tensor",
    }
}

/// The two groups of parallelism keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Across slices, over the data center network.
    Dcn,
    /// Inside a slice, over the chips' own links.
    Ici,
}

impl Group {
    /// The configuration key of an axis in this group, `dcn_data_parallelism`.
    pub fn key(self, axis: Axis) -> String {
        let group = match self {
            Group::Dcn => "dcn",
            Group::Ici => "ici",
        };
        format!("{group}_{axis}_parallelism")
    }

    /// The required product of the group's values.
    fn counts(self) -> &'static str {
        match self {
            Group::Dcn => "slices",
            Group::Ici => "devices per slice",
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Group::Dcn => "DCN",
            Group::Ici => "ICI",
        })
    }
}

/// Why a mesh, spec or rule is refused.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ShardError {
    #[error(
        "per_device_batch_size: the batch of {size} does not divide by {product} ({axes}) on {devices} devices"
    )]
    Batch {
        size: usize,
        product: usize,
        axes: String,
        devices: usize,
    },
    #[error("{key}={found}: a parallelism is a positive number, or -1 to take what is left")]
    Parallelism { key: String, found: i64 },
    #[error("at most one {group} parallelism may be -1, found {}: {}", keys.len(), keys.join(", "))]
    ManyUnspecified { group: Group, keys: Vec<String> },
    #[error(
        "{key}=-1 cannot be filled: number of {} {target} is not divisible by {rest}, the product of the other {group} parallelisms ({values})",
        group.counts()
    )]
    Fraction {
        group: Group,
        key: String,
        target: usize,
        rest: u128,
        values: String,
    },
    #[error(
        "number of {} {target} does not match the product of the {group} parallelism {product} ({values})",
        group.counts()
    )]
    Product {
        group: Group,
        target: usize,
        product: u128,
        values: String,
    },
    #[error(
        "{key}={found} has no effect on one slice: set it to 1 or -1, or compile for more with compile_topology_num_slices"
    )]
    DcnOnOneSlice { key: String, found: i64 },
    #[error("a mesh needs at least one device, found none")]
    NoDevices,
    #[error("device id {id} is described {count} times")]
    DuplicateDevice { id: i64, count: usize },
    #[error(
        "slices differ in size: slice {first} has {first_devices} devices, slice {other} has {other_devices}"
    )]
    UnevenSlices {
        first: i64,
        first_devices: usize,
        other: i64,
        other_devices: usize,
    },
    #[error(
        "{key}={size} splits a dimension of the {shape} slice: choose sizes that are products of whole dimensions, or set allow_split_physical_axes=True (neighbours on that axis may then be further apart)"
    )]
    SplitPhysicalAxis {
        key: String,
        size: usize,
        shape: String,
    },
    #[error(
        "the devices along mesh axis {axis} ({size}) would all do the same work: no rule of logical_axis_rules splits \
         anything of this program over {axis}; leave dcn_{axis}_parallelism and ici_{axis}_parallelism at 1, or add a rule"
    )]
    IdleAxis { axis: Axis, size: usize },
    #[error("mesh axis \"{axis}\" is used twice in the partition spec {spec}")]
    AxisUsedTwice { axis: Axis, spec: String },
    #[error("partition spec {spec} has {found} dimensions, the tensor {path} has {expected}")]
    Rank {
        path: String,
        spec: String,
        found: usize,
        expected: usize,
    },
    #[error("logical axis \"{name}\" occurs more than once in the axes of {path}")]
    DuplicateLogicalAxis { path: String, name: String },
    #[error("dimension {dim} of {path} has size {size}, not divisible by {product} ({axes})")]
    NotDivisible {
        path: String,
        dim: usize,
        size: usize,
        product: usize,
        axes: String,
    },
}
