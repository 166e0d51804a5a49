//! The memory that programs take on each device, estimated from graph and shardings before anything is compiled.
//!
//! Weights, optimizer state and inputs are there while a program runs, so they are a lower bound, and what they do not
//! fit is refused ([`Fit::check`]). The activations are an estimate: compilers fuse and order operations in their own
//! ways.

mod error;
mod layouts;
mod live;
mod split;

pub use error::OutOfMemory;
pub use layouts::log;

use crate::graph::InputKind;
use crate::lowering::LoweredProgram;
use crate::shape::Shape;
use crate::shard::{LogicalAxisRules, Mesh, PartitionSpec};
use crate::util::text::binary_size;

use layouts::better_split;

/// Bytes of one device that a program takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    pub weights: u64,
    /// Of optimizer moments and moving averages.
    pub state: u64,
    /// Of all other inputs.
    pub data: u64,
    /// The largest weight or state, and its bytes.
    pub largest: Option<(String, u64)>,
    /// The most of all other values that are needed at once, roughly.
    pub activations: u64,
    /// The path of the operation at which they are.
    pub activations_at: String,
}

impl Footprint {
    /// The footprint of `program`, which was lowered for `mesh` by `rules`.
    pub fn of(program: &LoweredProgram, mesh: &Mesh, rules: &LogicalAxisRules) -> Footprint {
        let LoweredProgram { graph, plan, .. } = program;
        let mut footprint = Footprint::default();
        for (input, spec) in graph.inputs.iter().zip(&plan.inputs) {
            let bytes = local_bytes(&input.shape, spec, mesh);
            let sum = match input.kind {
                InputKind::Weight(_) => &mut footprint.weights,
                InputKind::State => &mut footprint.state,
                InputKind::Data => &mut footprint.data,
            };
            *sum = sum.saturating_add(bytes);
            let is_larger = footprint.largest.as_ref().is_none_or(|(_, b)| *b < bytes);
            if input.kind != InputKind::Data && is_larger {
                footprint.largest = Some((input.name.clone(), bytes));
            }
        }
        let parts = split::parts(graph, plan, mesh, rules);
        let peak = live::peak(graph, &parts);
        footprint.activations = peak.bytes;
        footprint.activations_at = peak.node.map_or_else(String::new, |node| {
            graph.path(&graph.nodes[node]).to_owned()
        });
        footprint
    }

    /// What is there while the program runs, whatever the compiler does.
    pub fn resident(&self) -> u64 {
        let sum = self.weights.saturating_add(self.state);
        sum.saturating_add(self.data)
    }

    /// `weights 9.56 GiB, optimizer state 19.13 GiB, activations about 2.10 GiB`.
    pub fn describe(&self) -> String {
        let parts = [
            ("weights ", self.weights),
            ("optimizer state ", self.state),
            ("activations about ", self.activations),
        ];
        let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = parts
            .map(|(name, bytes)| format!("{name}{}", binary_size(*bytes)))
            .collect();
        parts.join(", ")
    }
}

/// The devices that programs are to fit.
#[derive(Clone, Copy, Debug)]
pub struct Fit<'a> {
    pub mesh: &'a Mesh,
    pub rules: &'a LogicalAxisRules,
    /// The devices in messages, `2 slices of v5e-16`.
    pub target: &'a str,
    /// Bytes of memory of one device, where it is known.
    pub limit: Option<u64>,
    /// What makes programs smaller.
    pub advice: &'a [String],
}

impl Fit<'_> {
    /// The footprint of a program, which messages call `title`. Warns of activations that may be too many.
    ///
    /// # Errors
    /// When weights, state and inputs alone are more than a device has.
    pub fn check(
        &self,
        title: &str,
        program: &LoweredProgram,
    ) -> Result<Footprint, Box<OutOfMemory>> {
        let footprint = Footprint::of(program, self.mesh, self.rules);
        tracing::debug!("{}: {}", program.name, footprint.describe());
        let Some(limit) = self.limit else {
            return Ok(footprint);
        };
        if footprint.resident() > limit {
            let needed = format!("at least {}", binary_size(footprint.resident()));
            return Err(Box::new(self.error(
                title,
                program,
                footprint,
                Some(needed),
            )));
        }
        if footprint.resident().saturating_add(footprint.activations) > limit {
            tracing::warn!(
                "{title} may not fit {}: beside {} of weights, state and inputs it needs about {} for activations (at {}) on \
                 each device, which has {}; {}",
                self.target,
                binary_size(footprint.resident()),
                binary_size(footprint.activations),
                footprint.activations_at,
                binary_size(limit),
                self.advice_for(program).join(", or ")
            );
        }
        Ok(footprint)
    }

    /// The error for a program that the compiler found to need more memory than a device has: `needed`, where it says
    /// that.
    pub fn refusal(
        &self,
        title: &str,
        program: &LoweredProgram,
        needed: Option<String>,
    ) -> OutOfMemory {
        let footprint = Footprint::of(program, self.mesh, self.rules);
        self.error(title, program, footprint, needed)
    }

    fn error(
        &self,
        title: &str,
        program: &LoweredProgram,
        footprint: Footprint,
        needed: Option<String>,
    ) -> OutOfMemory {
        OutOfMemory {
            title: title.to_owned(),
            target: self.target.to_owned(),
            needed,
            limit: self.limit,
            footprint,
            advice: self.advice_for(program),
            message: String::new(),
        }
    }

    /// What makes `program` smaller: first a layout of its weights that makes a difference.
    fn advice_for(&self, program: &LoweredProgram) -> Vec<String> {
        let split = better_split(&program.graph, self.mesh, self.rules);
        let least = self.limit.unwrap_or(0) / 20;
        let split = split.filter(|split| split.saved > least).map(|split| {
            format!(
                "{} (weights and state then take {} on each device)",
                split.keys(self.mesh),
                binary_size(split.bytes)
            )
        });
        split
            .into_iter()
            .chain(self.advice.iter().cloned())
            .collect()
    }
}

/// Bytes of the part of a tensor that one device holds.
fn local_bytes(shape: &Shape, spec: &PartitionSpec, mesh: &Mesh) -> u64 {
    let parts: usize = spec.dims().iter().map(|axes| mesh.product(axes)).product();
    (shape.bytes() / parts.max(1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::dtype::DType;
    use crate::graph::{Builder, DotDims, Init};
    use crate::lowering::Options;
    use crate::shard::{DeviceDescription, Parallelism};

    /// A batch of 8 rows times a weight of 4 KiB, on 8 devices.
    fn checked(limit: u64) -> Result<Footprint, String> {
        let b = Builder::new();
        let rows = [Some("activation_batch"), None];
        let x = b.input("x", Shape::new(DType::F32, [8, 32]), &rows);
        let weight = Shape::new(DType::F32, [32, 32]);
        let axes = [Some("embed"), Some("heads")];
        let weight = b.root("m").param("w", weight, Init::Zeros, &axes);
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let y = b.dot_general(x.unwrap(), weight.unwrap(), dims, DType::F32);
        b.output("y", y.unwrap(), None).unwrap();
        let devices = DeviceDescription::numbered(8, 1);
        let mesh = Mesh::new(&Parallelism::default(), &devices).unwrap();
        let rules = LogicalAxisRules::default();
        let options = Options {
            mesh: &mesh,
            rules: &rules,
        };
        let backend = Backend::Gpu {
            features: None,
            kernels: false,
        };
        let program = LoweredProgram::whole("p", &b.finish(), backend, &options).unwrap();
        let fit = Fit {
            mesh: &mesh,
            rules: &rules,
            target: "a device",
            limit: Some(limit),
            advice: &["less".to_owned()],
        };
        fit.check("the program", &program)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn weights_are_whole_and_rows_are_split() {
        let footprint = checked(1 << 20).unwrap();
        assert_eq!(footprint.weights, 4096);
        // A row of 32 numbers each.
        assert_eq!((footprint.data, footprint.activations), (128, 128));
        assert_eq!(footprint.largest, Some(("m/w".to_owned(), 4096)));
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_layout_that_fits() {
        assert!(checked(4096 + 128).is_ok());
        assert_eq!(
            checked(4096).unwrap_err(),
            "the program does not fit a device: it needs at least 4.12 KiB of memory on each device, which has 4.00 KiB; \
             weights take 4.00 KiB of it (the largest: m/w, 4.00 KiB). Try ici_fsdp_parallelism=8 (weights and state then \
             take 512 B on each device), or less"
        );
    }
}
