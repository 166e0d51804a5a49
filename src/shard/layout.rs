//! Order of the devices inside one slice.

use std::collections::{BTreeMap, BTreeSet};

use crate::shape::gcd;

use super::{Axis, Group, ShardError};

/// One device as its PJRT description states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Global id. In a multi-slice topology ids are not a count from 0.
    pub id: i64,
    /// `slice_index`; 0 where the plugin gives none (one slice, CPU).
    pub slice_index: i64,
    /// Position of the chip in its slice (`coords`); empty where the plugin gives none.
    pub coords: Vec<i64>,
    /// Which of the chip's devices this is (`core_on_chip`); 0 where the plugin gives none.
    pub core_on_chip: i64,
}

impl DeviceDescription {
    /// Devices of which nothing is known but how many there are, numbered slice by slice: enough for a mesh's sizes,
    /// and for programs, which name axes and not devices.
    pub fn numbered(per_slice: i64, slices: i64) -> Vec<DeviceDescription> {
        (0..per_slice * slices)
            .map(|id| DeviceDescription {
                id,
                slice_index: id / per_slice,
                coords: Vec::new(),
                core_on_chip: 0,
            })
            .collect()
    }
}

/// How much of each physical dimension a mesh axis takes; the product is the axis' size.
type Factors = Vec<usize>;

/// Device ids of one slice in row-major order of the `ici` mesh.
///
/// Each mesh axis, innermost first, takes whole physical dimensions of the slice where its size
/// allows it (as many as possible, for the links of each add bandwidth), so that its collectives
/// run along rings or lines of neighbours. When that fails and `allow_split` is given, it takes
/// parts of dimensions, the inner axes the parts with the smaller stride.
///
/// Devices without coordinates (CPU, GPU), or which do not fill a box, count as one dimension in
/// the order of their ids.
pub(super) fn slice_order(
    devices: &[&DeviceDescription],
    ici: [usize; 4],
    allow_split: bool,
) -> Result<Vec<i64>, ShardError> {
    let grid = Grid::new(devices);
    let factors = grid.assign(ici, allow_split)?;
    let num_devices = devices.len();
    let mut ids = Vec::with_capacity(num_devices);
    for linear in 0..num_devices {
        let mut rest = linear;
        let mut coords = vec![0; grid.shape.len()];
        // Innermost axis first; `stride` is what inner axes already took of each dimension.
        let mut stride = vec![1; grid.shape.len()];
        for (axis, factors) in factors.iter().enumerate().rev() {
            let mut index = rest % ici[axis];
            rest /= ici[axis];
            // The last dimension of the grid varies fastest within an axis.
            for dim in (0..grid.shape.len()).rev() {
                coords[dim] += index % factors[dim] * stride[dim];
                index /= factors[dim];
                stride[dim] *= factors[dim];
            }
        }
        ids.push(grid.ids[&coords]);
    }
    Ok(ids)
}

/// The slice as a dense box of devices. Dimensions go from the slowest to the fastest:
/// `z, y, x, core`.
struct Grid {
    shape: Vec<usize>,
    ids: BTreeMap<Vec<usize>, i64>,
    /// Whether dimensions stand for real links, so that splitting one costs something.
    physical: bool,
}

impl Grid {
    fn new(devices: &[&DeviceDescription]) -> Self {
        Self::from_coords(devices).unwrap_or_else(|| {
            let mut ids: Vec<i64> = devices.iter().map(|d| d.id).collect();
            ids.sort_unstable();
            Self {
                shape: vec![ids.len()],
                ids: ids
                    .into_iter()
                    .enumerate()
                    .map(|(i, id)| (vec![i], id))
                    .collect(),
                physical: false,
            }
        })
    }

    /// `None` when the devices have no coordinates or do not fill a box.
    fn from_coords(devices: &[&DeviceDescription]) -> Option<Self> {
        let rank = devices.first()?.coords.len();
        if rank == 0 || devices.iter().any(|d| d.coords.len() != rank) {
            return None;
        }
        let place = |d: &DeviceDescription| -> Vec<i64> {
            let coords = d.coords.iter().rev().copied();
            coords.chain([d.core_on_chip]).collect()
        };
        // Values of each dimension in order: a slice need not start at 0.
        let values: Vec<Vec<i64>> = (0..=rank)
            .map(|dim| {
                let values: BTreeSet<i64> = devices.iter().map(|d| place(d)[dim]).collect();
                values.into_iter().collect()
            })
            .collect();
        let shape: Vec<usize> = values.iter().map(Vec::len).collect();
        let ids: BTreeMap<Vec<usize>, i64> = devices
            .iter()
            .map(|d| {
                let index = place(d)
                    .iter()
                    .zip(&values)
                    .map(|(c, values)| values.partition_point(|v| v < c))
                    .collect();
                (index, d.id)
            })
            .collect();
        (ids.len() == devices.len() && shape.iter().product::<usize>() == ids.len()).then_some(
            Self {
                shape,
                ids,
                physical: true,
            },
        )
    }

    /// For each mesh axis, its share of each dimension.
    fn assign(&self, ici: [usize; 4], allow_split: bool) -> Result<[Factors; 4], ShardError> {
        if let Some(whole) = self.assign_whole(ici) {
            return Ok(whole);
        }
        if self.physical && !allow_split {
            let axis = Axis::ALL
                .into_iter()
                .rev()
                .find(|&a| self.whole_subset(&self.shape, ici[a as usize]).is_none())
                // Each fits alone, not together: name the largest.
                .or_else(|| Axis::ALL.into_iter().max_by_key(|&a| ici[a as usize]))
                .unwrap_or(Axis::Data);
            // The user knows the slice by its chips: x first, cores left out.
            let chips = &self.shape[..self.shape.len() - 1];
            let mut shape: Vec<String> = chips.iter().rev().map(usize::to_string).collect();
            while shape.len() > 2 && shape.last().is_some_and(|d| d == "1") {
                shape.pop();
            }
            return Err(ShardError::SplitPhysicalAxis {
                key: Group::Ici.key(axis),
                size: ici[axis as usize],
                shape: shape.join("x"),
            });
        }
        // What is left of each dimension times nothing more equals what is left to place, so the
        // greatest common divisors always use a size up.
        let mut left = self.shape.clone();
        let mut factors = [const { Vec::new() }; 4];
        for axis in (0..4).rev() {
            let mut need = ici[axis];
            factors[axis] = vec![1; left.len()];
            for dim in (0..left.len()).rev() {
                let part = gcd(left[dim], need);
                factors[axis][dim] = part;
                left[dim] /= part;
                need /= part;
            }
        }
        Ok(factors)
    }

    /// [`Grid::assign`] in whole dimensions only.
    fn assign_whole(&self, ici: [usize; 4]) -> Option<[Factors; 4]> {
        let mut left = self.shape.clone();
        let mut factors = [const { Vec::new() }; 4];
        for axis in (0..4).rev() {
            let subset = self.whole_subset(&left, ici[axis])?;
            factors[axis] = (0..left.len())
                .map(|dim| if subset >> dim & 1 == 1 { left[dim] } else { 1 })
                .collect();
            for (dim, left) in left.iter_mut().enumerate() {
                if subset >> dim & 1 == 1 {
                    *left = 1;
                }
            }
        }
        Some(factors)
    }

    /// Dimensions (as a bit set) whose sizes multiply to `size`; the most of them, and among
    /// equals the fastest ones.
    fn whole_subset(&self, left: &[usize], size: usize) -> Option<u32> {
        let product = |subset: u32| -> usize {
            (0..left.len())
                .filter(|dim| subset >> dim & 1 == 1)
                .map(|dim| left[dim])
                .product()
        };
        let used = |subset: u32| (0..left.len()).all(|d| subset >> d & 1 == 0 || left[d] > 1);
        (0..1u32 << left.len())
            .filter(|&s| used(s) && product(s) == size)
            .max_by_key(|&s| (s.count_ones(), s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(shape: [i64; 3], cores: i64) -> Vec<DeviceDescription> {
        let [x, y, z] = shape;
        let mut all = Vec::new();
        for (z, y, x) in (0..z)
            .flat_map(|z| (0..y).map(move |y| (z, y)))
            .flat_map(|(z, y)| (0..x).map(move |x| (z, y, x)))
        {
            for core_on_chip in 0..cores {
                all.push(DeviceDescription {
                    id: all.len() as i64,
                    slice_index: 0,
                    coords: vec![x, y, z],
                    core_on_chip,
                });
            }
        }
        // Descriptions come host by host: the order in the list must not matter.
        all.reverse();
        all
    }

    fn order(shape: [i64; 3], cores: i64, ici: [usize; 4]) -> Result<Vec<i64>, ShardError> {
        let devices = devices(shape, cores);
        slice_order(&devices.iter().collect::<Vec<_>>(), ici, false)
    }

    fn split(shape: [i64; 3], ici: [usize; 4]) -> Vec<i64> {
        let devices = devices(shape, 1);
        slice_order(&devices.iter().collect::<Vec<_>>(), ici, true).unwrap()
    }

    #[test]
    fn tensor_neighbours_are_chips_with_a_link() {
        // 4x4, tensor 4: each tensor group is a row of x.
        let ids = order([4, 4, 1], 1, [4, 1, 1, 4]).unwrap();
        assert_eq!(ids, (0..16).collect::<Vec<_>>());
        // 2x4x4 (v5p-64) with tensor 2: x is the only dimension of size 2.
        let ids = order([2, 4, 4], 1, [16, 1, 1, 2]).unwrap();
        assert_eq!(ids[..4], [0, 1, 2, 3]);
        // fsdp takes x although it is not innermost: 4 and 4 are left for data.
        let ids = order([2, 4, 4], 1, [4, 2, 1, 4]).unwrap();
        assert_eq!(ids[..5], [0, 2, 4, 6, 1]);
    }

    #[test]
    fn cores_of_a_chip_are_nearest() {
        let ids = order([2, 2, 1], 2, [2, 2, 1, 2]).unwrap();
        assert_eq!(ids, (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn splitting_a_dimension_has_to_be_allowed() {
        let error = order([4, 4, 1], 1, [2, 1, 1, 8]).unwrap_err().to_string();
        assert!(
            error.starts_with("ici_tensor_parallelism=8 splits a dimension of the 4x4 slice"),
            "{error}"
        );
        assert!(error.contains("allow_split_physical_axes=True"), "{error}");
        // Tensor takes x whole and the near half of y.
        let ids = split([4, 4, 1], [2, 1, 1, 8]);
        assert_eq!(ids, (0..16).collect::<Vec<_>>());
        // Tensor has pairs along x; context the other pair of x and the near half of y.
        let ids = split([4, 4, 1], [2, 1, 4, 2]);
        assert_eq!(ids, (0..16).collect::<Vec<_>>());
        // 2x4 with tensor 4: whole y, so that neighbours in tensor are two apart in id.
        let ids = split([2, 4, 1], [2, 1, 1, 4]);
        assert_eq!(ids, [0, 2, 4, 6, 1, 3, 5, 7]);
    }

    #[test]
    fn every_order_is_a_permutation() {
        for ici in [
            [16, 1, 1, 1],
            [2, 2, 2, 2],
            [1, 4, 2, 2],
            [1, 1, 1, 16],
            [8, 1, 2, 1],
        ] {
            let mut ids = split([4, 4, 1], ici);
            ids.sort_unstable();
            assert_eq!(ids, (0..16).collect::<Vec<_>>(), "{ici:?}");
        }
        let mut ids = split([12, 16, 24], [3, 4, 6, 64]);
        ids.sort_unstable();
        assert_eq!(ids, (0..4608).collect::<Vec<_>>());
    }

    #[test]
    fn devices_without_coordinates_go_by_id() {
        let devices: Vec<DeviceDescription> = [3, 1, 0, 2]
            .map(|id| DeviceDescription {
                id,
                slice_index: 0,
                coords: Vec::new(),
                core_on_chip: 0,
            })
            .into();
        let devices: Vec<_> = devices.iter().collect();
        assert_eq!(
            slice_order(&devices, [2, 1, 1, 2], false).unwrap(),
            [0, 1, 2, 3]
        );
    }
}
