//! Over which mesh axes each dimension of a tensor is split.

use std::fmt;

use super::{Axis, MESH_NAME, Mesh, ShardError};

/// Mesh axes of each dimension, major to minor; an empty list leaves a dimension whole. No axis
/// occurs twice.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PartitionSpec {
    dims: Vec<Vec<Axis>>,
}

impl PartitionSpec {
    /// # Errors
    /// [`ShardError::AxisUsedTwice`] when an axis occurs more than once.
    pub fn new(dims: Vec<Vec<Axis>>) -> Result<Self, ShardError> {
        let spec = Self { dims };
        let mut seen = [false; 4];
        for &axis in spec.dims.iter().flatten() {
            if std::mem::replace(&mut seen[axis as usize], true) {
                return Err(ShardError::AxisUsedTwice {
                    axis,
                    spec: spec.to_string(),
                });
            }
        }
        Ok(spec)
    }

    /// Every device holds the whole tensor.
    pub fn replicated(rank: usize) -> Self {
        Self {
            dims: vec![Vec::new(); rank],
        }
    }

    /// Mesh axes of each dimension.
    pub fn dims(&self) -> &[Vec<Axis>] {
        &self.dims
    }

    /// The Shardy attribute, `#sdy.sharding<@mesh, [{"data", "fsdp"}, {}]>`. Dimensions are
    /// closed: the partitioner may not split them further.
    pub fn to_sdy(&self) -> String {
        format!("#sdy.sharding<@{MESH_NAME}, [{}]>", self.dim_list(", "))
    }

    fn dim_list(&self, separator: &str) -> String {
        let dims: Vec<String> = self
            .dims
            .iter()
            .map(|axes| {
                let axes: Vec<String> = axes.iter().map(|a| format!("\"{a}\"")).collect();
                format!("{{{}}}", axes.join(", "))
            })
            .collect();
        dims.join(separator)
    }

    /// Shape of the part one device holds.
    ///
    /// # Errors
    /// When the rank differs or a dimension does not divide; `path` names the tensor.
    pub fn local_shape(
        &self,
        path: &str,
        shape: &[usize],
        mesh: &Mesh,
    ) -> Result<Vec<usize>, ShardError> {
        self.check_rank(path, shape)?;
        shape
            .iter()
            .zip(&self.dims)
            .enumerate()
            .map(|(dim, (&size, axes))| {
                let product = mesh.product(axes);
                if size.is_multiple_of(product) {
                    return Ok(size / product);
                }
                Err(ShardError::NotDivisible {
                    path: path.to_owned(),
                    dim,
                    size,
                    product,
                    axes: describe(axes, mesh),
                })
            })
            .collect()
    }

    fn check_rank(&self, path: &str, shape: &[usize]) -> Result<(), ShardError> {
        if self.dims.len() == shape.len() {
            return Ok(());
        }
        Err(ShardError::Rank {
            path: path.to_owned(),
            spec: self.to_string(),
            found: self.dims.len(),
            expected: shape.len(),
        })
    }
}

/// `data=2 x fsdp=4`.
pub(super) fn describe(axes: &[Axis], mesh: &Mesh) -> String {
    let parts: Vec<String> = axes
        .iter()
        .map(|&a| format!("{a}={}", mesh.size(a)))
        .collect();
    parts.join(" x ")
}

impl fmt::Display for PartitionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.dim_list(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{DeviceDescription, Parallelism};

    fn mesh(sizes: [i64; 4]) -> Mesh {
        let devices = DeviceDescription::numbered(sizes.iter().product(), 1);
        let parallelism = Parallelism {
            dcn: [1; 4],
            ici: sizes,
            allow_split_physical_axes: false,
        };
        Mesh::new(&parallelism, &devices).unwrap()
    }

    #[test]
    fn shardy_text() {
        let spec = PartitionSpec::new(vec![vec![Axis::Data, Axis::Fsdp], vec![]]).unwrap();
        assert_eq!(
            spec.to_sdy(),
            r#"#sdy.sharding<@mesh, [{"data", "fsdp"}, {}]>"#
        );
        assert_eq!(
            PartitionSpec::replicated(0).to_sdy(),
            "#sdy.sharding<@mesh, []>"
        );
    }

    #[test]
    fn an_axis_is_used_once() {
        let error = PartitionSpec::new(vec![vec![Axis::Fsdp], vec![Axis::Data, Axis::Fsdp]])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            r#"mesh axis "fsdp" is used twice in the partition spec [{"fsdp"}, {"data", "fsdp"}]"#
        );
    }

    #[test]
    fn local_shapes() {
        let mesh = mesh([2, 4, 1, 1]);
        let spec =
            PartitionSpec::new(vec![vec![Axis::Data, Axis::Fsdp], vec![Axis::Tensor]]).unwrap();
        assert_eq!(spec.local_shape("x", &[16, 5], &mesh).unwrap(), [2, 5]);
        assert_eq!(
            spec.local_shape("latents", &[12, 5], &mesh)
                .unwrap_err()
                .to_string(),
            "dimension 0 of latents has size 12, not divisible by 8 (data=2 x fsdp=4)"
        );
        assert!(spec.local_shape("x", &[16], &mesh).is_err());
    }
}
