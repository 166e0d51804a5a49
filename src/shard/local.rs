//! Shardings by slice: only here is a mesh axis split into its DCN part and its ICI part.

use super::{Axis, MESH_NAME, Mesh};

/// The sharding of partial sums `[parts, ...]`, each of one part of the batch: part `i` lies in slice `i`, and the
/// first dimension that the devices of a slice divide is split over them. All dimensions are open, so that other axes
/// keep what they split.
///
/// The sum over a slice's devices then ends as a reduce-scatter on ICI, and each device sends its share alone across
/// DCN. Where the parts are not those of slices, everything is open: no constraint.
pub(super) fn local_shards(mesh: &Mesh, batch_axes: &[Axis], dims: &[usize]) -> String {
    let mut parts = vec![Vec::new(); dims.len()];
    if aligned(mesh, batch_axes, dims[0]) {
        let inside: usize = batch_axes.iter().map(|&a| ici_size(mesh, a)).product();
        if let Some(dim) = (1..dims.len()).find(|&d| inside > 1 && dims[d].is_multiple_of(inside)) {
            parts[0] = dcn_parts(mesh, batch_axes);
            parts[dim] = ici_parts(mesh, batch_axes);
        }
    }
    let dims: Vec<String> = parts
        .into_iter()
        .map(|mut axes| {
            axes.push("?".to_string());
            format!("{{{}}}", axes.join(", "))
        })
        .collect();
    format!("#sdy.sharding<@{MESH_NAME}, [{}]>", dims.join(", "))
}

/// Why `parts` equal parts of the batch are not those of slices, or `None` where they are, or lie inside them.
pub(super) fn misaligned(mesh: &Mesh, batch_axes: &[Axis], parts: usize) -> Option<String> {
    let slices = slices_of_batch(mesh, batch_axes);
    if slices == 1 {
        return None;
    }
    if leads(mesh, batch_axes) {
        return (!parts.is_multiple_of(slices)).then(|| {
            format!(
                "range finding crosses slices: each of its {parts} equal parts of the batch lies in several of the {slices} \
                 slices; make quantization_local_shard_count a multiple of {slices}"
            )
        });
    }
    let axes: Vec<String> = batch_axes
        .iter()
        .map(|&axis| {
            format!(
                "{axis} ({} slices x {})",
                mesh.dcn_size(axis),
                ici_size(mesh, axis)
            )
        })
        .collect();
    Some(format!(
        "range finding crosses slices: the batch is split over {}, so its {parts} equal parts are not those of \
         slices; put an axis that joins slices first in the rule for activation_batch, or leave the axes before it at 1",
        axes.join(", then ")
    ))
}

/// Whether `parts` equal parts of the batch are those of the slices.
fn aligned(mesh: &Mesh, batch_axes: &[Axis], parts: usize) -> bool {
    parts == slices_of_batch(mesh, batch_axes) && parts > 1 && leads(mesh, batch_axes)
}

/// Whether the slices are the slowest part of the batch: no axis splits it inside a slice before one that joins slices.
fn leads(mesh: &Mesh, batch_axes: &[Axis]) -> bool {
    let last_dcn = batch_axes.iter().rposition(|&a| mesh.dcn_size(a) > 1);
    last_dcn.is_none_or(|last| batch_axes[..last].iter().all(|&a| ici_size(mesh, a) == 1))
}

fn slices_of_batch(mesh: &Mesh, batch_axes: &[Axis]) -> usize {
    batch_axes.iter().map(|&a| mesh.dcn_size(a)).product()
}

fn ici_size(mesh: &Mesh, axis: Axis) -> usize {
    mesh.size(axis) / mesh.dcn_size(axis)
}

/// The slower part of each axis, `"data":(1)2`: Shardy's sub-axes are `"axis":(size before)size`.
fn dcn_parts(mesh: &Mesh, axes: &[Axis]) -> Vec<String> {
    axes.iter()
        .filter(|&&a| mesh.dcn_size(a) > 1)
        .map(|&a| match ici_size(mesh, a) {
            1 => format!("\"{a}\""),
            _ => format!("\"{a}\":(1){}", mesh.dcn_size(a)),
        })
        .collect()
}

/// The faster part of each axis, `"data":(2)8`.
fn ici_parts(mesh: &Mesh, axes: &[Axis]) -> Vec<String> {
    axes.iter()
        .filter(|&&a| ici_size(mesh, a) > 1)
        .map(|&a| match mesh.dcn_size(a) {
            1 => format!("\"{a}\""),
            dcn => format!("\"{a}\":({dcn}){}", ici_size(mesh, a)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{DeviceDescription, Parallelism};
    use Axis::{Data, Fsdp};

    fn mesh(dcn: [i64; 4], ici: [i64; 4]) -> Mesh {
        let inside: i64 = ici.iter().product();
        let devices = DeviceDescription::numbered(inside, dcn.iter().product());
        let parallelism = Parallelism {
            dcn,
            ici,
            allow_split_physical_axes: false,
        };
        Mesh::new(&parallelism, &devices).unwrap()
    }

    #[test]
    fn parts_lie_in_their_slice_and_are_split_inside_it() {
        let two = mesh([2, 1, 1, 1], [8, 1, 1, 1]);
        assert_eq!(
            local_shards(&two, &[Data, Fsdp], &[2, 12, 64]),
            r#"#sdy.sharding<@mesh, [{"data":(1)2, ?}, {?}, {"data":(2)8, ?}]>"#
        );
        let both = mesh([2, 1, 1, 1], [2, 4, 1, 1]);
        assert_eq!(
            local_shards(&both, &[Data, Fsdp], &[2, 64]),
            r#"#sdy.sharding<@mesh, [{"data":(1)2, ?}, {"data":(2)2, "fsdp", ?}]>"#
        );
        // Nothing that a slice's devices divide, one slice, or parts that are not the slices: no constraint.
        for (mesh, dims) in [
            (&two, [2, 12]),
            (&two, [4, 64]),
            (&mesh([1, 1, 1, 1], [8, 1, 1, 1]), [2, 64]),
        ] {
            assert_eq!(
                local_shards(mesh, &[Data, Fsdp], &dims),
                "#sdy.sharding<@mesh, [{?}, {?}]>"
            );
        }
    }

    #[test]
    fn parts_that_are_not_those_of_slices_are_named() {
        let mixed = mesh([1, 2, 1, 1], [4, 2, 1, 1]);
        let why = misaligned(&mixed, &[Data, Fsdp], 2).unwrap();
        assert!(
            why.contains("data (1 slices x 4), then fsdp (2 slices x 2)"),
            "{why}"
        );
        assert_eq!(
            local_shards(&mixed, &[Data, Fsdp], &[2, 64]),
            "#sdy.sharding<@mesh, [{?}, {?}]>"
        );
        assert_eq!(misaligned(&mixed, &[Fsdp, Data], 2), None);
        assert_eq!(
            misaligned(&mesh([1, 2, 1, 1], [1, 8, 1, 1]), &[Data, Fsdp], 2),
            None
        );
    }

    #[test]
    fn parts_that_span_slices_are_told_of() {
        let four = mesh([4, 1, 1, 1], [2, 1, 1, 1]);
        for parts in [4, 8] {
            assert_eq!(misaligned(&four, &[Data, Fsdp], parts), None);
        }
        let note = misaligned(&four, &[Data, Fsdp], 2).unwrap();
        assert!(
            note.contains("its 2 equal parts of the batch lies in several of the 4 slices"),
            "{note}"
        );
    }
}
