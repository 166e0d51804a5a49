//! Tensors on the devices of a mesh.

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::pjrt::Buffer;
use crate::shape::{Shape, row_major_strides};
use crate::shard::{Axis, Mesh, PartitionSpec};

use super::{RuntimeError, Session, element_type};

/// A tensor on a mesh: for each device, in mesh order, the part it holds.
pub struct Array {
    pub(super) shape: Shape,
    pub(super) spec: PartitionSpec,
    pub(super) parts: Vec<Buffer>,
}

impl Array {
    /// The whole tensor's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn spec(&self) -> &PartitionSpec {
        &self.spec
    }

    pub(super) fn from_host(
        session: &Session,
        tensor: &HostTensor,
        spec: &PartitionSpec,
    ) -> Result<Array, RuntimeError> {
        let mesh = &session.mesh;
        let kind = element_type(tensor.shape.dtype)?;
        let local = spec.local_shape("the tensor", &tensor.shape.dims, mesh)?;
        let dims: Vec<i64> = local.iter().map(|d| *d as i64).collect();
        let data = tensor.whole_bytes();
        let parts = session
            .devices
            .iter()
            .enumerate()
            .map(|(device, handle)| {
                let start = part_start(mesh, spec, &local, device);
                let buffer = if local == tensor.shape.dims {
                    Buffer::from_host(&session.client, &data, kind, &dims, handle)
                } else {
                    let part = copy_part(&tensor.shape, &data, &start, &local);
                    Buffer::from_host(&session.client, &part, kind, &dims, handle)
                };
                buffer.map_err(RuntimeError::from)
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Array {
            shape: tensor.shape.clone(),
            spec: spec.clone(),
            parts,
        })
    }

    /// The whole tensor on the host, assembled from one copy of each part.
    ///
    /// # Errors
    /// The error of the work that makes it, or of the transfer.
    pub fn to_host(&self, mesh: &Mesh) -> Result<HostTensor, RuntimeError> {
        let local = self
            .spec
            .local_shape("the tensor", &self.shape.dims, mesh)?;
        if local == self.shape.dims {
            let data = self.parts[0].to_host()?;
            return Ok(HostTensor::of_whole_bytes(self.shape.clone(), data)?);
        }
        let mut whole = vec![0; self.shape.count() * element_bytes(self.shape.dtype)];
        let mut seen = Vec::new();
        for (device, part) in self.parts.iter().enumerate() {
            let start = part_start(mesh, &self.spec, &local, device);
            if !seen.contains(&start) {
                place_part(&self.shape, &mut whole, &part.to_host()?, &start, &local);
                seen.push(start);
            }
        }
        Ok(HostTensor::of_whole_bytes(self.shape.clone(), whole)?)
    }
}

/// Bytes of one element where PJRT takes and gives it.
fn element_bytes(dtype: DType) -> usize {
    dtype.bits().div_ceil(8)
}

/// Where the part of mesh position `device` starts in the whole tensor.
fn part_start(mesh: &Mesh, spec: &PartitionSpec, local: &[usize], device: usize) -> Vec<usize> {
    let sizes = Axis::ALL.map(|axis| mesh.size(axis));
    let strides = row_major_strides(&sizes);
    let position = |axis: Axis| device / strides[axis as usize] % sizes[axis as usize];
    spec.dims()
        .iter()
        .zip(local)
        .map(|(axes, size)| {
            // Major to minor: the first axis of a dimension moves slowest.
            let index = axes
                .iter()
                .fold(0, |index, axis| index * mesh.size(*axis) + position(*axis));
            index * size
        })
        .collect()
}

/// Calls `visit(offset in the whole, offset in the part, length)`, in bytes, for each contiguous row of a part.
fn for_each_row(
    whole: &Shape,
    start: &[usize],
    local: &[usize],
    mut visit: impl FnMut(usize, usize, usize),
) {
    let rank = local.len();
    let width = element_bytes(whole.dtype);
    let strides = row_major_strides(&whole.dims);
    let row = local.last().copied().unwrap_or(1) * width;
    let rows: usize = local[..rank.saturating_sub(1)].iter().product();
    let mut index = vec![0; rank];
    for r in 0..rows {
        let offset: usize = (0..rank).map(|d| (start[d] + index[d]) * strides[d]).sum();
        visit(offset * width, r * row, row);
        for d in (0..rank.saturating_sub(1)).rev() {
            index[d] += 1;
            if index[d] < local[d] {
                break;
            }
            index[d] = 0;
        }
    }
}

/// The part of a tensor, whose elements are whole bytes.
fn copy_part(shape: &Shape, data: &[u8], start: &[usize], local: &[usize]) -> Vec<u8> {
    let count: usize = local.iter().product();
    let mut part = vec![0; count * element_bytes(shape.dtype)];
    for_each_row(shape, start, local, |whole, at, length| {
        part[at..at + length].copy_from_slice(&data[whole..whole + length]);
    });
    part
}

fn place_part(shape: &Shape, whole: &mut [u8], part: &[u8], start: &[usize], local: &[usize]) {
    for_each_row(shape, start, local, |at, from, length| {
        whole[at..at + length].copy_from_slice(&part[from..from + length]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{DeviceDescription, Parallelism};

    #[test]
    fn parts_cover_the_tensor_in_mesh_order() {
        let devices = DeviceDescription::numbered(4, 1);
        let parallelism = Parallelism {
            dcn: [1; 4],
            ici: [2, 1, 1, 2],
            allow_split_physical_axes: false,
        };
        let mesh = Mesh::new(&parallelism, &devices).unwrap();
        let spec = PartitionSpec::new(vec![vec![Axis::Tensor], vec![Axis::Data]]).unwrap();
        let values: Vec<i32> = (0..24).collect();
        let whole = HostTensor::from_i32([4, 6], &values).unwrap();
        let local = spec.local_shape("x", &[4, 6], &mesh).unwrap();
        assert_eq!(local, [2, 3]);
        let mut again = vec![0; whole.data.len()];
        for device in 0..4 {
            let start = part_start(&mesh, &spec, &local, device);
            let data = copy_part(&whole.shape, &whole.data, &start, &local);
            if device == 1 {
                // Data position 0, tensor position 1: rows 2 and 3, columns 0 to 2.
                let expected: Vec<u8> = [12, 13, 14, 18, 19, 20]
                    .iter()
                    .flat_map(|v: &i32| v.to_le_bytes())
                    .collect();
                assert_eq!(data, expected);
            }
            place_part(&whole.shape, &mut again, &data, &start, &local);
        }
        assert_eq!(again, whole.data);
    }
}
