//! Logical axis names to partition specs.

use std::collections::HashSet;
use std::fmt;

use super::spec::describe;
use super::{Axis, Mesh, PartitionSpec, ShardError};

/// The mesh axes that a logical axis lies on: none pins it whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogicalAxisRule {
    pub logical: String,
    pub mesh: Vec<Axis>,
}

impl LogicalAxisRule {
    pub fn new(logical: &str, mesh: &[Axis]) -> Self {
        LogicalAxisRule {
            logical: logical.to_owned(),
            mesh: mesh.to_vec(),
        }
    }
}

/// Rules from logical axis names to mesh axes, in order of precedence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogicalAxisRules(pub Vec<LogicalAxisRule>);

/// A dimension that stays whole on every device because its size does not divide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsharded {
    /// Which tensor.
    pub path: String,
    pub dim: usize,
    pub size: usize,
    /// The mesh axes the rules asked for, with their sizes.
    pub axes: String,
    pub product: usize,
}

impl fmt::Display for Unsharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            dim,
            size,
            axes,
            product,
        } = self;
        write!(
            f,
            "{path}: dimension {dim} of size {size} is left unsharded: not divisible by {product} ({axes})"
        )
    }
}

impl Default for LogicalAxisRules {
    /// MaxDiffusion's rules for SDXL (`base_xl.yml`).
    fn default() -> Self {
        use Axis::{Data, Fsdp, Tensor};
        let rule = LogicalAxisRule::new;
        LogicalAxisRules(vec![
            rule("batch", &[Data]),
            rule("activation_batch", &[Data, Fsdp]),
            rule("activation_heads", &[Tensor]),
            rule("activation_kv", &[Tensor]),
            rule("embed", &[Fsdp]),
            rule("heads", &[Tensor]),
            rule("conv_batch", &[Data, Fsdp]),
            rule("out_channels", &[Tensor]),
            rule("conv_out", &[Fsdp]),
        ])
    }
}

impl LogicalAxisRules {
    /// The spec of a tensor whose dimensions carry `logical_axes` (`None`: never split).
    ///
    /// Flax's `logical_to_mesh_axes`: rules are tried in order; a rule applies to its dimension
    /// when none of its mesh axes is used in this spec yet and the dimension has no rule so far.
    /// A rule without mesh axes pins its dimension whole.
    ///
    /// # Errors
    /// [`ShardError::DuplicateLogicalAxis`] when a name occurs twice in one tensor.
    pub fn spec(
        &self,
        path: &str,
        logical_axes: &[Option<&str>],
    ) -> Result<PartitionSpec, ShardError> {
        let mut names = HashSet::new();
        for name in logical_axes.iter().flatten() {
            if !names.insert(*name) {
                return Err(ShardError::DuplicateLogicalAxis {
                    path: path.to_owned(),
                    name: (*name).to_owned(),
                });
            }
        }
        let mut dims: Vec<Option<&[Axis]>> = vec![None; logical_axes.len()];
        for LogicalAxisRule { logical, mesh } in &self.0 {
            let Some(dim) = logical_axes
                .iter()
                .position(|l| *l == Some(logical.as_str()))
            else {
                continue;
            };
            let free = |axis| !dims.iter().flatten().any(|used| used.contains(axis));
            if dims[dim].is_none() && mesh.iter().all(free) {
                dims[dim] = Some(mesh);
            }
        }
        PartitionSpec::new(
            dims.into_iter()
                .map(|axes| axes.unwrap_or_default().to_vec())
                .collect(),
        )
    }

    /// The mesh axes over which the rules split a batch.
    ///
    /// # Errors
    /// As [`LogicalAxisRules::spec`].
    pub fn batch_axes(&self) -> Result<Vec<Axis>, ShardError> {
        Ok(self.spec("the batch", &[Some("activation_batch")])?.dims()[0].clone())
    }

    /// The parts of a batch on the devices of `mesh`, if nothing else of activations is split: then each device computes its
    /// part without the others. `None` where they share more.
    ///
    /// # Errors
    /// As [`LogicalAxisRules::spec`].
    pub fn batch_parts(&self, mesh: &Mesh) -> Result<Option<usize>, ShardError> {
        let parts = mesh.product(&self.batch_axes()?);
        Ok((parts == mesh.num_devices()).then_some(parts))
    }

    /// [`LogicalAxisRules::spec`] for a tensor of a given shape: a dimension whose size the mesh
    /// does not divide stays whole, and is reported.
    ///
    /// # Errors
    /// As [`LogicalAxisRules::spec`], and when ranks differ.
    pub fn spec_for_shape(
        &self,
        path: &str,
        logical_axes: &[Option<&str>],
        shape: &[usize],
        mesh: &Mesh,
    ) -> Result<(PartitionSpec, Vec<Unsharded>), ShardError> {
        let spec = self.spec(path, logical_axes)?;
        if spec.dims().len() != shape.len() {
            return Err(ShardError::Rank {
                path: path.to_owned(),
                spec: spec.to_string(),
                found: spec.dims().len(),
                expected: shape.len(),
            });
        }
        let mut notes = Vec::new();
        let dims = spec
            .dims()
            .iter()
            .zip(shape)
            .enumerate()
            .map(|(dim, (axes, &size))| {
                let product = mesh.product(axes);
                if size.is_multiple_of(product) {
                    return axes.clone();
                }
                notes.push(Unsharded {
                    path: path.to_owned(),
                    dim,
                    size,
                    axes: describe(axes, mesh),
                    product,
                });
                Vec::new()
            })
            .collect();
        Ok((PartitionSpec::new(dims)?, notes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{DeviceDescription, Parallelism};
    use Axis::{Data, Fsdp, Tensor};

    fn rules<const N: usize>(rules: [(&str, &[Axis]); N]) -> LogicalAxisRules {
        let rules = rules.map(|(logical, mesh)| LogicalAxisRule::new(logical, mesh));
        LogicalAxisRules(rules.into())
    }

    fn dims(rules: &LogicalAxisRules, axes: &[&str]) -> Vec<Vec<Axis>> {
        let axes: Vec<Option<&str>> = axes.iter().map(|a| Some(*a)).collect();
        rules.spec("w", &axes).unwrap().dims().to_vec()
    }

    #[test]
    fn sdxl_defaults() {
        let rules = LogicalAxisRules::default();
        // A query projection (in, out), an activation, and a convolution kernel.
        assert_eq!(dims(&rules, &["embed", "heads"]), [[Fsdp], [Tensor]]);
        assert_eq!(
            dims(&rules, &["activation_batch", "length", "activation_heads"]),
            [vec![Data, Fsdp], vec![], vec![Tensor]]
        );
        assert_eq!(
            dims(&rules, &["kh", "kw", "conv_in", "conv_out"]),
            [vec![], vec![], vec![], vec![Fsdp]]
        );
    }

    #[test]
    fn the_order_of_rules_decides_not_the_order_of_dimensions() {
        let rules = rules([("b", &[Fsdp]), ("a", &[Fsdp]), ("a", &[Tensor])]);
        // `b` comes first in the rules and takes fsdp; `a` falls to its second rule.
        assert_eq!(dims(&rules, &["a", "b"]), [[Tensor], [Fsdp]]);
        assert_eq!(dims(&rules, &["a"]), [[Fsdp]]);
    }

    #[test]
    fn a_rule_partly_used_is_skipped_whole_and_null_pins() {
        let partly = rules([("a", &[Data]), ("b", &[Data, Fsdp])]);
        assert_eq!(dims(&partly, &["a", "b"]), [vec![Data], vec![]]);
        let pinned = rules([("a", &[]), ("a", &[Data])]);
        assert_eq!(dims(&pinned, &["a"]), [vec![]]);
    }

    #[test]
    fn a_logical_axis_twice_in_one_tensor_is_refused() {
        let error = LogicalAxisRules::default()
            .spec("conv_in.weight", &[Some("embed"), Some("embed")])
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "logical axis \"embed\" occurs more than once in the axes of conv_in.weight"
        );
    }

    #[test]
    fn a_dimension_that_does_not_divide_is_left_whole_and_reported() {
        let devices = DeviceDescription::numbered(8, 1);
        let parallelism = Parallelism {
            dcn: [1; 4],
            ici: [1, 4, 1, 2],
            allow_split_physical_axes: false,
        };
        let mesh = Mesh::new(&parallelism, &devices).unwrap();
        let (spec, notes) = LogicalAxisRules::default()
            .spec_for_shape(
                "conv_out.weight",
                &[None, None, Some("heads"), Some("conv_out")],
                &[3, 3, 320, 6],
                &mesh,
            )
            .unwrap();
        assert_eq!(spec.dims(), [vec![], vec![], vec![Tensor], vec![]]);
        let notes: Vec<String> = notes.iter().map(ToString::to_string).collect();
        assert_eq!(
            notes,
            [
                "conv_out.weight: dimension 3 of size 6 is left unsharded: not divisible by 4 (fsdp=4)"
            ]
        );
    }
}
