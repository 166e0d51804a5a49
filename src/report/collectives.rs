//! Which collectives a program runs, over which links, and how many bytes they move.

use std::collections::{BTreeMap, HashSet};

use crate::proto::xla::hlo_instruction_proto::ReplicaGroupList;
use crate::proto::xla::{
    HloInstructionProto, IotaReplicaGroupListProto, MeshAxesReplicaGroupListProto,
};

use super::instruction::{attribute, bytes, is_megascale};
use super::program::{HloProgram, Site};
use super::purpose::{Provenance, Transfer};
use super::runs::RunCounts;
use super::{ByPurpose, Collective, Link, Purpose};

const TRANSFER_TYPE: &str = "_xla_megascale_transfer_type";
const REDUCE_OPERATION: &str = "_xla_megascale_reduce_operation";
/// Marks the kernels over which the TPU compiler spreads one collective, to overlap it with others.
const CHAIN: &str = "chain_id";
const SEND_RECV_PAIRS: &str = "_xla_send_recv_source_target_pairs";

/// All collectives that run, in program order; a combined one gives an entry for each purpose of
/// its operands.
pub(super) fn collectives(
    program: &HloProgram<'_>,
    counts: &RunCounts<'_>,
    slice_of_partition: &[i64],
    provenance: &Provenance<'_>,
) -> Vec<Collective> {
    let links = Links::new(program, counts, slice_of_partition);
    let mut chains = HashSet::new();
    let mut list = Vec::new();
    for (site, runs) in counts.running() {
        let instruction = program.instruction(site);
        let Some(kind) = kind(program, site) else {
            continue;
        };
        let Some(link) = links.of(instruction) else {
            continue;
        };
        if let Some(chain) = attribute(instruction, CHAIN) {
            // A copy of a loop body has chains of its own.
            let callers = &program.computations[site.comp].callers;
            let within = callers.first().map(|caller| caller.comp);
            if !chains.insert((within, chain, instruction.channel_id)) {
                continue;
            }
        }
        let transfer = match kind.as_str() {
            "all-gather" => Transfer::Gather,
            "all-reduce" | "reduce-scatter" if is_extremum(program, site) => Transfer::Extremum,
            "all-reduce" | "reduce-scatter" => Transfer::Sum,
            _ => Transfer::Move,
        };
        let mut by_purpose: BTreeMap<Purpose, (u64, String)> = BTreeMap::new();
        let operands: Vec<Site> = match instruction.opcode.as_str() {
            // The second operand of a send is its token.
            "send" => program.operand(site, 0).into_iter().collect(),
            _ => program.operands(site).collect(),
        };
        for (number, operand) in operands.into_iter().enumerate() {
            let (purpose, op_name) = provenance.of(site, number, operand, transfer);
            let entry = by_purpose.entry(purpose).or_insert((0, op_name));
            let shape = program.instruction(operand).shape.as_ref();
            entry.0 += shape.map_or(0, bytes);
        }
        for (purpose, (bytes, op_name)) in by_purpose {
            list.push(Collective {
                kind: kind.clone(),
                bytes: bytes.saturating_mul(runs.count),
                count: runs.count,
                link,
                purpose,
                op_name,
                instruction: instruction.name.clone(),
            });
        }
    }
    list
}

pub(super) fn total(collectives: &[Collective], link: Link) -> ByPurpose {
    let mut total = ByPurpose::default();
    for c in collectives.iter().filter(|c| c.link == link) {
        *total.of_mut(c.purpose) += c.bytes;
    }
    total
}

/// The kind of collective, by HLO's name; `None` for every other instruction, and for the second
/// half (`-done`, `recv`) of one already counted.
fn kind(program: &HloProgram<'_>, site: Site) -> Option<String> {
    let instruction = program.instruction(site);
    let opcode = instruction.opcode.as_str();
    match opcode.strip_suffix("-start").unwrap_or(opcode) {
        // The TPU compiler writes a fused reduce-scatter as an all-reduce and a slice.
        "all-reduce"
            if program.computations[site.comp]
                .proto
                .name
                .starts_with("all-reduce-scatter") =>
        {
            Some("reduce-scatter".to_owned())
        }
        base @ ("all-reduce"
        | "all-gather"
        | "reduce-scatter"
        | "all-to-all"
        | "ragged-all-to-all"
        | "collective-permute"
        | "collective-broadcast") => Some(base.to_owned()),
        "send" if is_megascale(instruction) => {
            let transfer = attribute(instruction, TRANSFER_TYPE).unwrap_or("send");
            Some(match transfer {
                "ONE_TO_ONE" => "collective-permute".to_owned(),
                other => other.to_lowercase().replace('_', "-"),
            })
        }
        // Between devices, where a compiler splits a permute in its two halves.
        "send" if !instruction.is_host_transfer => Some("collective-permute".to_owned()),
        _ => None,
    }
}

/// Whether the collective takes a maximum or minimum, as range finding does and sums do not.
fn is_extremum(program: &HloProgram<'_>, site: Site) -> bool {
    if let Some(operation) = attribute(program.instruction(site), REDUCE_OPERATION) {
        return matches!(operation, "MAX" | "MIN");
    }
    program.called(site).any(|comp| {
        let root = program.instruction(program.root(comp));
        matches!(root.opcode.as_str(), "maximum" | "minimum")
    })
}

/// Tells links from device groups.
struct Links<'a> {
    /// Slice of each device the groups speak of; empty when groups cannot span slices.
    slices: &'a [i64],
}

impl<'a> Links<'a> {
    /// The TPU compiler makes one program for a slice: its groups number the devices of that
    /// slice alone, and all that leaves it is a megascale transfer. Other compilers number all
    /// devices.
    fn new(
        program: &HloProgram<'_>,
        counts: &RunCounts<'_>,
        slice_of_partition: &'a [i64],
    ) -> Self {
        let own = program.module.device_assignment.as_ref().map(|a| {
            i64::from(a.computation_count).saturating_mul(i64::from(a.replica_count.max(1)))
        });
        let all = i64::try_from(slice_of_partition.len()).unwrap_or(i64::MAX);
        let has_megascale = counts
            .running()
            .any(|(site, _)| is_megascale(program.instruction(site)));
        let slice_local = has_megascale || own.is_some_and(|own| own < all);
        Self {
            slices: if slice_local { &[] } else { slice_of_partition },
        }
    }

    /// `None` when the collective moves nothing: it has no group of more than one device.
    fn of(&self, instruction: &HloInstructionProto) -> Option<Link> {
        if is_megascale(instruction) {
            return Some(Link::Dcn);
        }
        let slice = |id: i64| usize::try_from(id).ok().and_then(|id| self.slices.get(id));
        let spans = |group: &[i64]| group.windows(2).any(|w| slice(w[0]) != slice(w[1]));
        let crosses = match groups(instruction, self.slices.len()) {
            None => self.slices.windows(2).any(|w| w[0] != w[1]),
            Some(groups) if groups.iter().all(|g| g.len() <= 1) => return None,
            Some(groups) => groups.iter().any(|g| spans(g)),
        };
        Some(if crosses { Link::Dcn } else { Link::Ici })
    }
}

/// Groups of device positions: `None` for one of all devices, an empty list where no device hands on anything.
fn groups(instruction: &HloInstructionProto, num_devices: usize) -> Option<Vec<Vec<i64>>> {
    if !instruction.source_target_pairs.is_empty() {
        let pairs = instruction.source_target_pairs.iter();
        return Some(moving(pairs.map(|pair| [pair.source, pair.target])));
    }
    if let Some(pairs) = attribute(instruction, SEND_RECV_PAIRS) {
        return parse_pairs(pairs);
    }
    let explicit = |groups: &[crate::proto::xla::ReplicaGroup]| -> Vec<Vec<i64>> {
        groups.iter().map(|g| g.replica_ids.clone()).collect()
    };
    let groups = match &instruction.replica_group_list {
        Some(ReplicaGroupList::CollectiveDeviceList(list)) => match &list.iota_replica_group_list {
            Some(iota) => iota_groups(iota),
            None => explicit(&list.replica_groups),
        },
        Some(ReplicaGroupList::IotaCollectiveDeviceList(iota)) => iota_groups(iota),
        Some(ReplicaGroupList::MeshAxesReplicaGroupList(mesh)) => mesh_groups(mesh),
        None => explicit(&instruction.replica_groups),
    };
    // With a channel but without global ids, groups are of replicas, each standing for all
    // partitions. Programs here have one replica: such a group is all devices.
    let by_replica = instruction.channel_id != 0
        && !instruction.use_global_device_ids
        && matches!(
            instruction.opcode.trim_end_matches("-start"),
            "all-reduce" | "all-gather" | "reduce-scatter"
        );
    if by_replica && groups.iter().all(|g| g.len() <= 1) && num_devices != 1 {
        return None;
    }
    (!groups.is_empty()).then_some(groups)
}

/// The pairs of a permute without those of a device with itself, which stay where they are.
fn moving(pairs: impl Iterator<Item = [i64; 2]>) -> Vec<Vec<i64>> {
    pairs
        .filter(|[source, target]| source != target)
        .map(Vec::from)
        .collect()
}

/// `{{0,1},{1,0}}`, as [`groups`] has it. A text without any pair is not understood: it stands for all devices, for
/// the report would rather count too much than nothing.
fn parse_pairs(text: &str) -> Option<Vec<Vec<i64>>> {
    let pairs: Vec<[i64; 2]> = text
        .split('}')
        .filter_map(|pair| {
            let ids: Vec<i64> = pair
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|id| id.parse().ok())
                .collect();
            ids.try_into().ok()
        })
        .collect();
    (!pairs.is_empty()).then(|| moving(pairs.into_iter()))
}

/// The positions 0, 1, ... reshaped, transposed and cut into rows.
fn iota_groups(iota: &IotaReplicaGroupListProto) -> Vec<Vec<i64>> {
    let permutation: Vec<i64> = iota
        .iota_transpose_perm
        .iter()
        .map(|&p| i64::from(p))
        .collect();
    let ids = transposed_iota(&iota.iota_reshape_dims, &permutation);
    match usize::try_from(iota.num_devices_per_group) {
        Ok(size) if size > 0 => ids.chunks(size).map(<[i64]>::to_vec).collect(),
        _ => Vec::new(),
    }
}

/// Row-major elements of `transpose(reshape(iota, dims), permutation)`.
fn transposed_iota(dims: &[i64], permutation: &[i64]) -> Vec<i64> {
    let dims: Vec<usize> = dims
        .iter()
        .map(|&d| usize::try_from(d).unwrap_or(0))
        .collect();
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    let order: Vec<usize> = if permutation.is_empty() {
        (0..dims.len()).collect()
    } else {
        permutation
            .iter()
            .filter_map(|&p| usize::try_from(p).ok().filter(|&p| p < dims.len()))
            .collect()
    };
    (0..dims.iter().product())
        .map(|mut linear: usize| {
            let mut id = 0;
            for &dim in order.iter().rev() {
                id += linear % dims[dim] * strides[dim];
                linear /= dims[dim];
            }
            i64::try_from(id).unwrap_or(i64::MAX)
        })
        .collect()
}

/// Devices that agree on every mesh axis (or part of one) the collective does not name.
fn mesh_groups(list: &MeshAxesReplicaGroupListProto) -> Vec<Vec<i64>> {
    let Some(mesh) = &list.mesh else {
        return Vec::new();
    };
    let sizes: Vec<i64> = mesh.axes.iter().map(|a| a.size.max(1)).collect();
    let count: i64 = sizes.iter().product();
    let device_of: Vec<i64> = match &mesh.iota_transform {
        Some(iota) => transposed_iota(&iota.reshape_dims, &iota.transpose_perm),
        None if mesh.device_ids.is_empty() => (0..count).collect(),
        None => mesh.device_ids.clone(),
    };
    let mut groups: BTreeMap<Vec<i64>, Vec<i64>> = BTreeMap::new();
    for (position, &device) in (0..count).zip(&device_of) {
        let mut rest = position;
        let mut coords = vec![0; sizes.len()];
        for (coord, size) in coords.iter_mut().zip(&sizes).rev() {
            *coord = rest % size;
            rest /= size;
        }
        for axis in &list.axes {
            let Some(index) = usize::try_from(axis.mesh_axis_index)
                .ok()
                .filter(|&i| i < sizes.len())
            else {
                continue;
            };
            coords[index] = match &axis.sub_axis_info {
                None => 0,
                // An axis of size S is pre x size x rest; drop the middle part.
                Some(sub) => {
                    let inner = sizes[index] / (sub.pre_size.max(1) * sub.size.max(1)).max(1);
                    let inner = inner.max(1);
                    let span = inner * sub.size.max(1);
                    coords[index] / span * span + coords[index] % inner
                }
            };
        }
        groups.entry(coords).or_default().push(device);
    }
    groups.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::xla::axis_ref_proto::SubAxis;
    use crate::proto::xla::mesh_proto::MeshAxis;
    use crate::proto::xla::{AxisRefProto, MeshProto};

    #[test]
    fn iota_group_lists() {
        // [4,2]<=[2,4]T(1,0): the columns of a 2x4 array.
        let list = IotaReplicaGroupListProto {
            num_replica_groups: 4,
            num_devices_per_group: 2,
            iota_reshape_dims: vec![2, 4],
            iota_transpose_perm: vec![1, 0],
        };
        assert_eq!(iota_groups(&list), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    }

    #[test]
    fn mesh_axis_group_lists() {
        let axis = |name: &str, size| MeshAxis {
            name: name.to_owned(),
            size,
        };
        let mut list = MeshAxesReplicaGroupListProto {
            mesh: Some(MeshProto {
                axes: vec![axis("data", 4), axis("fsdp", 2)],
                ..Default::default()
            }),
            axes: vec![AxisRefProto {
                mesh_axis_index: 1,
                sub_axis_info: None,
            }],
        };
        assert_eq!(mesh_groups(&list), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        // The outer half of data: positions two apart on that axis.
        list.axes = vec![AxisRefProto {
            mesh_axis_index: 0,
            sub_axis_info: Some(SubAxis {
                pre_size: 1,
                size: 2,
            }),
        }];
        assert_eq!(mesh_groups(&list), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    }

    #[test]
    fn pairs_of_split_permutes() {
        assert_eq!(
            parse_pairs("{{0,1},{1,0}}"),
            Some(vec![vec![0, 1], vec![1, 0]])
        );
        assert_eq!(parse_pairs("{{0,0},{1,2}}"), Some(vec![vec![1, 2]]));
        assert_eq!(parse_pairs("{{0,0},{1,1}}"), Some(vec![]), "all stays");
        assert_eq!(parse_pairs(""), None);
    }
}
