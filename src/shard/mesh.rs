//! From `dcn_*`/`ici_*` parallelism and device descriptions to a mesh.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

use super::layout::{DeviceDescription, slice_order};
use super::{Axis, Group, MESH_NAME, ShardError};

/// The `dcn_*_parallelism` and `ici_*_parallelism` of a configuration, in the order of
/// [`Axis::ALL`]; -1 takes what is left, at most once in each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallelism {
    pub dcn: [i64; 4],
    pub ici: [i64; 4],
    /// Whether an axis may take part of a physical dimension of the slice.
    pub allow_split_physical_axes: bool,
}

impl Default for Parallelism {
    /// MaxDiffusion's: everything data parallel.
    fn default() -> Self {
        Self {
            dcn: [-1, 1, 1, 1],
            ici: [-1, 1, 1, 1],
            allow_split_physical_axes: false,
        }
    }
}

/// Devices on the four named axes.
///
/// The linear position of a device (row major over [`Axis::ALL`]) is its partition id in the
/// compiled program; [`Mesh::device_assignment`] says which device that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    sizes: [usize; 4],
    dcn: [usize; 4],
    device_ids: Vec<i64>,
    slices: Vec<i64>,
    /// What it was made of.
    parallelism: Parallelism,
    devices: Vec<DeviceDescription>,
}

impl Mesh {
    /// Refuses an axis of several devices over which a program splits nothing, where it splits something over others.
    /// A program without logical axes runs whole on every device, which no rule could change.
    ///
    /// # Errors
    /// [`ShardError::IdleAxis`].
    pub fn check_asked(&self, asked: &HashSet<Axis>) -> Result<(), ShardError> {
        let idle = |axis: &Axis| self.size(*axis) > 1 && !asked.contains(axis);
        match Axis::ALL.into_iter().find(idle) {
            Some(axis) if !asked.is_empty() => Err(ShardError::IdleAxis {
                axis,
                size: self.size(axis),
            }),
            _ => Ok(()),
        }
    }

    /// Lays `devices` out: axis `i` has `dcn_i * ici_i` positions, the slice being the slower
    /// part, so that only the DCN part of an axis crosses slices.
    ///
    /// # Errors
    /// When the parallelism does not fit the devices ([`ShardError`] says the numbers), or the
    /// descriptions are not of whole, equal slices.
    pub fn new(
        parallelism: &Parallelism,
        devices: &[DeviceDescription],
    ) -> Result<Self, ShardError> {
        let slices = group_by_slice(devices)?;
        let num_slices = slices.len();
        if num_slices == 1 {
            for (axis, found) in Axis::ALL.into_iter().zip(parallelism.dcn) {
                if found != 1 && found != -1 {
                    return Err(ShardError::DcnOnOneSlice {
                        key: Group::Dcn.key(axis),
                        found,
                    });
                }
            }
        }
        let dcn = fill(Group::Dcn, parallelism.dcn, num_slices)?;
        let ici = fill(Group::Ici, parallelism.ici, devices.len() / num_slices)?;
        let orders = slices
            .values()
            .map(|slice| slice_order(slice, ici, parallelism.allow_split_physical_axes))
            .collect::<Result<Vec<_>, _>>()?;
        let slice_ids: Vec<i64> = slices.keys().copied().collect();

        let sizes: [usize; 4] = std::array::from_fn(|i| dcn[i] * ici[i]);
        let mut device_ids = Vec::with_capacity(devices.len());
        let mut device_slices = Vec::with_capacity(devices.len());
        for position in positions(sizes) {
            let granule = linear(std::array::from_fn(|i| position[i] / ici[i]), dcn);
            let within = linear(std::array::from_fn(|i| position[i] % ici[i]), ici);
            device_ids.push(orders[granule][within]);
            device_slices.push(slice_ids[granule]);
        }
        Ok(Self {
            sizes,
            dcn,
            device_ids,
            slices: device_slices,
            parallelism: *parallelism,
            devices: devices.to_vec(),
        })
    }

    /// The parallelism that was asked for.
    pub fn parallelism(&self) -> &Parallelism {
        &self.parallelism
    }

    /// The same devices with `ici_fsdp_parallelism` of `size`, and all that are left in a slice for data.
    ///
    /// # Errors
    /// When that does not fit the devices.
    pub fn with_ici_fsdp(&self, size: usize) -> Result<Mesh, ShardError> {
        let mut parallelism = self.parallelism;
        parallelism.ici[Axis::Fsdp as usize] = size as i64;
        parallelism.ici[Axis::Data as usize] = -1;
        Mesh::new(&parallelism, &self.devices)
    }

    /// Positions along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Slices along an axis: how many parts of it are joined by DCN.
    pub fn dcn_size(&self, axis: Axis) -> usize {
        self.dcn[axis as usize]
    }

    /// Positions over several axes together; 1 for none.
    pub fn product(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|&a| self.size(a)).product()
    }

    pub fn num_devices(&self) -> usize {
        self.device_ids.len()
    }

    pub fn num_slices(&self) -> usize {
        self.dcn.iter().product()
    }

    /// Global device ids by partition id: the device assignment of the compile options
    /// (one replica, as many computations as devices).
    pub fn device_assignment(&self) -> &[i64] {
        &self.device_ids
    }

    /// `slice_index` by partition id, for telling which collectives cross slices.
    pub fn slice_of_partition(&self) -> &[i64] {
        &self.slices
    }

    /// The `sdy.mesh` declaration. Positions are logical (partition ids); the devices behind them
    /// are [`Mesh::device_assignment`], as JAX does it: Shardy's own `device_ids` must be a
    /// permutation of 0..n, which ids of several slices are not.
    pub fn to_sdy(&self) -> String {
        let mut text = format!("sdy.mesh @{MESH_NAME} = <[");
        for (i, axis) in Axis::ALL.into_iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            // Writing to a String does not fail.
            let _ = write!(text, "{comma}\"{axis}\"={}", self.size(axis));
        }
        text.push_str("]>");
        text
    }
}

/// Devices by slice, in the order of `slice_index`.
fn group_by_slice(
    devices: &[DeviceDescription],
) -> Result<BTreeMap<i64, Vec<&DeviceDescription>>, ShardError> {
    let mut slices: BTreeMap<i64, Vec<&DeviceDescription>> = BTreeMap::new();
    let mut seen: BTreeMap<i64, usize> = BTreeMap::new();
    for device in devices {
        slices.entry(device.slice_index).or_default().push(device);
        *seen.entry(device.id).or_default() += 1;
    }
    if let Some((&id, &count)) = seen.iter().find(|(_, count)| **count > 1) {
        return Err(ShardError::DuplicateDevice { id, count });
    }
    let Some((&first, first_devices)) = slices.first_key_value() else {
        return Err(ShardError::NoDevices);
    };
    let first_devices = first_devices.len();
    if let Some((&other, uneven)) = slices.iter().find(|(_, s)| s.len() != first_devices) {
        return Err(ShardError::UnevenSlices {
            first,
            first_devices,
            other,
            other_devices: uneven.len(),
        });
    }
    Ok(slices)
}

/// Replaces the -1 of a group by what is left of `target`, and checks the product.
///
/// MaxDiffusion's `fill_unspecified_mesh_axes` takes the integer part of a fraction; here a
/// fraction is refused.
fn fill(group: Group, values: [i64; 4], target: usize) -> Result<[usize; 4], ShardError> {
    let mut filled = [1usize; 4];
    let mut unspecified = Vec::new();
    for (i, (&found, axis)) in values.iter().zip(Axis::ALL).enumerate() {
        match found {
            -1 => unspecified.push(axis),
            1.. => filled[i] = usize::try_from(found).unwrap_or(usize::MAX),
            _ => {
                return Err(ShardError::Parallelism {
                    key: group.key(axis),
                    found,
                });
            }
        }
    }
    let listing = || {
        let parts: Vec<String> = Axis::ALL
            .into_iter()
            .zip(values)
            .map(|(axis, v)| format!("{}={v}", group.key(axis)))
            .collect();
        parts.join(", ")
    };
    // Four factors of at most 64 bits overflow 128; no device count comes near.
    let product = filled
        .iter()
        .fold(1u128, |p, &v| p.saturating_mul(v as u128));
    match unspecified[..] {
        [] if product == target as u128 => Ok(filled),
        [] => Err(ShardError::Product {
            group,
            target,
            product,
            values: listing(),
        }),
        [axis] if (target as u128).is_multiple_of(product) => {
            filled[axis as usize] = target / product as usize;
            Ok(filled)
        }
        [axis] => Err(ShardError::Fraction {
            group,
            key: group.key(axis),
            target,
            rest: product,
            values: listing(),
        }),
        _ => Err(ShardError::ManyUnspecified {
            group,
            keys: unspecified.into_iter().map(|a| group.key(a)).collect(),
        }),
    }
}

/// All positions of a 4-dimensional array, row major.
fn positions(sizes: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..sizes.iter().product()).map(move |mut linear| {
        let mut position = [0; 4];
        for i in (0..4).rev() {
            position[i] = linear % sizes[i];
            linear /= sizes[i];
        }
        position
    })
}

/// Row-major index of a position.
fn linear(position: [usize; 4], sizes: [usize; 4]) -> usize {
    position
        .iter()
        .zip(sizes)
        .fold(0, |acc, (&p, size)| acc * size + p)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// libtpu 0.0.51's description of `v5e:{x}x{y}` and `slices` slices: ids start at
    /// 100000 * (slice + 1), listed host by host (2x2 chips).
    pub(crate) fn v5e(x: i64, y: i64, slices: i64) -> Vec<DeviceDescription> {
        let mut devices = Vec::new();
        for slice in 0..slices {
            for (hy, hx) in (0..y / 2).flat_map(|hy| (0..x / 2).map(move |hx| (hy, hx))) {
                for (dy, dx) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let (cx, cy) = (hx * 2 + dx, hy * 2 + dy);
                    let base = if slices > 1 { 100_000 * (slice + 1) } else { 0 };
                    devices.push(DeviceDescription {
                        id: base + cy * x + cx,
                        slice_index: slice,
                        coords: vec![cx, cy, 0],
                        core_on_chip: 0,
                    });
                }
            }
        }
        devices
    }

    fn parallelism(dcn: [i64; 4], ici: [i64; 4]) -> Parallelism {
        Parallelism {
            dcn,
            ici,
            allow_split_physical_axes: false,
        }
    }

    fn error(dcn: [i64; 4], ici: [i64; 4], devices: &[DeviceDescription]) -> String {
        Mesh::new(&parallelism(dcn, ici), devices)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn hybrid_order_is_slice_major_and_row_major_inside() {
        let devices = v5e(4, 4, 2);
        let mesh = Mesh::new(&parallelism([-1, 1, 1, 1], [4, 4, 1, 1]), &devices).unwrap();
        assert_eq!([mesh.size(Axis::Data), mesh.size(Axis::Fsdp)], [8, 4]);
        assert_eq!(mesh.num_slices(), 2);
        // The order JAX's create_hybrid_device_mesh((4, 4), (2, 1)) gives for this topology.
        let expected: Vec<i64> = (0..16)
            .map(|i| 100_000 + i)
            .chain((0..16).map(|i| 200_000 + i))
            .collect();
        assert_eq!(mesh.device_assignment(), expected);
        assert_eq!(mesh.slice_of_partition()[15..17], [0, 1]);
    }

    #[test]
    fn an_inner_axis_across_slices_interleaves_them() {
        let devices = v5e(2, 2, 2);
        let mesh = Mesh::new(&parallelism([1, 2, 1, 1], [2, 2, 1, 1]), &devices).unwrap();
        assert_eq!([mesh.size(Axis::Data), mesh.size(Axis::Fsdp)], [2, 4]);
        assert_eq!(
            mesh.device_assignment(),
            [
                100_000, 100_001, 200_000, 200_001, 100_002, 100_003, 200_002, 200_003
            ]
        );
        assert_eq!(mesh.slice_of_partition(), [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(mesh.dcn_size(Axis::Fsdp), 2);
    }

    #[test]
    fn one_slice_keeps_description_ids() {
        let mesh = Mesh::new(&Parallelism::default(), &v5e(4, 4, 1)).unwrap();
        let mut ids = mesh.device_assignment().to_vec();
        ids.sort_unstable();
        assert_eq!(ids, (0..16).collect::<Vec<_>>());
        assert_eq!(mesh.size(Axis::Data), 16);
    }

    #[test]
    fn shardy_mesh_text() {
        let mesh = Mesh::new(&parallelism([-1, 1, 1, 1], [2, 1, 1, 2]), &v5e(2, 2, 2)).unwrap();
        assert_eq!(
            mesh.to_sdy(),
            r#"sdy.mesh @mesh = <["data"=4, "fsdp"=1, "context"=1, "tensor"=2]>"#
        );
    }

    #[test]
    fn a_product_that_does_not_fit_says_the_numbers() {
        assert_eq!(
            error([-1, 1, 1, 1], [3, 5, 1, 1], &v5e(4, 4, 2)),
            "number of devices per slice 16 does not match the product of the ICI parallelism 15 \
             (ici_data_parallelism=3, ici_fsdp_parallelism=5, ici_context_parallelism=1, ici_tensor_parallelism=1)"
        );
        assert!(
            error([4, 1, 1, 1], [-1, 1, 1, 1], &v5e(4, 4, 2)).starts_with(
                "number of slices 2 does not match the product of the DCN parallelism 4"
            )
        );
        // A product past 64 bits is refused, not wrapped to something that fits.
        let huge = error([1; 4], [1 << 62, 1 << 62, 16, 1], &v5e(4, 4, 1));
        assert!(huge.contains("does not match the product"), "{huge}");
    }

    #[test]
    fn fractions_are_refused() {
        let text = error([-1, 1, 1, 1], [-1, 3, 1, 1], &v5e(4, 4, 2));
        assert!(
            text.starts_with(
                "ici_data_parallelism=-1 cannot be filled: number of devices per slice 16 is not divisible by 3"
            ),
            "{text}"
        );
    }

    #[test]
    fn bad_values_are_refused() {
        assert_eq!(
            error([-1, 1, 1, -1], [-1, 1, 1, 1], &v5e(4, 4, 2)),
            "at most one DCN parallelism may be -1, found 2: dcn_data_parallelism, dcn_tensor_parallelism"
        );
        for bad in [0, -2] {
            let text = error([-1, 1, 1, 1], [-1, bad, 1, 1], &v5e(4, 4, 2));
            assert!(
                text.starts_with(&format!("ici_fsdp_parallelism={bad}:")),
                "{text}"
            );
        }
        let text = error([2, 1, 1, 1], [-1, 1, 1, 1], &v5e(4, 4, 1));
        assert!(
            text.starts_with("dcn_data_parallelism=2 has no effect on one slice"),
            "{text}"
        );
    }

    #[test]
    fn bad_descriptions_are_refused() {
        assert_eq!(
            error([1; 4], [-1, 1, 1, 1], &[]),
            ShardError::NoDevices.to_string()
        );
        let mut devices = v5e(2, 2, 2);
        devices.pop();
        assert_eq!(
            error([-1, 1, 1, 1], [-1, 1, 1, 1], &devices),
            "slices differ in size: slice 0 has 4 devices, slice 1 has 3"
        );
        devices.push(devices[0].clone());
        assert!(error([-1, 1, 1, 1], [-1, 1, 1, 1], &devices).contains("described 2 times"));
    }
}
