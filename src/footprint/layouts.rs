//! Other layouts of weights over the same devices.

use crate::graph::{Graph, InputKind};
use crate::lowering::LoweredProgram;
use crate::shard::{Axis, LogicalAxisRules, Mesh};
use crate::util::text::binary_size;

use super::local_bytes;

/// Weights split over devices of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// `ici_fsdp_parallelism`.
    pub fsdp: usize,
    /// Bytes of weights and state on each device.
    pub bytes: u64,
    /// How many fewer these are than now.
    pub saved: u64,
}

impl Split {
    /// The keys for it.
    pub(super) fn keys(&self, mesh: &Mesh) -> String {
        let fsdp = format!("ici_fsdp_parallelism={}", self.fsdp);
        match mesh.parallelism().ici[Axis::Data as usize] {
            -1 => fsdp,
            _ => format!("{fsdp} ici_data_parallelism=-1"),
        }
    }
}

/// The split over the devices of a slice that leaves the fewest bytes on each, if they are fewer than now.
pub(super) fn better_split(graph: &Graph, mesh: &Mesh, rules: &LogicalAxisRules) -> Option<Split> {
    let per_slice = mesh.num_devices() / mesh.num_slices();
    let sizes = (1..=per_slice).filter(|size| per_slice.is_multiple_of(*size));
    let now = weights_and_state(graph, mesh, rules)?;
    let splits = sizes.filter_map(|fsdp| {
        let mesh = mesh.with_ici_fsdp(fsdp).ok()?;
        let bytes = weights_and_state(graph, &mesh, rules)?;
        let saved = now.checked_sub(bytes)?;
        Some(Split { fsdp, bytes, saved })
    });
    // The first of equals: the fewer devices share a weight, the less they send each other.
    let best = splits.min_by_key(|split| split.bytes)?;
    (best.saved > 0).then_some(best)
}

/// Bytes of weights and state on each device of `mesh`.
fn weights_and_state(graph: &Graph, mesh: &Mesh, rules: &LogicalAxisRules) -> Option<u64> {
    let kept = graph.inputs.iter().filter(|i| i.kind != InputKind::Data);
    let bytes = kept.map(|input| {
        if input.logical_axes.is_empty() {
            return Some(input.shape.bytes() as u64);
        }
        let (axes, dims) = (&input.logical_axes, &input.shape.dims);
        let (spec, _) = rules.spec_for_shape(&input.name, axes, dims, mesh).ok()?;
        Some(local_bytes(&input.shape, &spec, mesh))
    });
    bytes.sum()
}

/// Logs what the rules could not do for a program.
pub fn log(program: &LoweredProgram, mesh: &Mesh, rules: &LogicalAxisRules) {
    let LoweredProgram { name, graph, plan } = program;
    if let Some(why) = &plan.misaligned {
        tracing::warn!("{name}: {why}");
    }
    if let Some(text) = whole_weights(program, mesh, rules) {
        tracing::warn!("{name}: {text}");
    }
    let is_input = |path: &str| graph.inputs.iter().any(|input| input.name == path);
    let mut others = plan.unsharded.iter().filter(|note| !is_input(&note.path));
    if let Some(first) = others.next() {
        let others = match others.count() {
            0 => String::new(),
            n => format!(", and {n} others (RUST_LOG=maxdiff=debug lists them)"),
        };
        tracing::warn!("{name}: {first}{others}");
    }
    for note in &plan.unsharded {
        tracing::debug!("{name}: {note}");
    }
}

/// What to say of weights and state that the rules split but whose sizes do not divide: how much stays whole on every
/// device, and what splits more. `None` if everything divides.
fn whole_weights(
    program: &LoweredProgram,
    mesh: &Mesh,
    rules: &LogicalAxisRules,
) -> Option<String> {
    let LoweredProgram { graph, plan, .. } = program;
    let inputs = graph.inputs.iter().zip(&plan.inputs);
    let whole: Vec<_> = inputs
        .filter(|(input, _)| input.kind != InputKind::Data)
        .filter_map(|(input, spec)| {
            let note = plan.unsharded.iter().find(|note| note.path == input.name)?;
            Some((local_bytes(&input.shape, spec, mesh), note))
        })
        .collect();
    let (_, largest) = whole.iter().max_by_key(|(bytes, _)| *bytes)?;
    let bytes: u64 = whole.iter().map(|(bytes, _)| bytes).sum();
    let mut text = format!(
        "{} stay whole on each device, {} tensors of weights and state that do not divide; the largest is {largest}",
        binary_size(bytes),
        whole.len(),
    );
    if let Some(split) = better_split(graph, mesh, rules) {
        text.push_str(&format!(
            "; {} leaves {} of weights and state on each device, now {}",
            split.keys(mesh),
            binary_size(split.bytes),
            binary_size(split.bytes + split.saved)
        ));
    }
    Some(text)
}
