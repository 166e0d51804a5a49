//! One kind of hardware: the composites that it has kernels for, and the forms that its compiler runs fastest.
//!
//! Models say what is computed; a backend says how its chip does it. A backend's rules keep values equal (to rounding
//! for floats, exactly for integers), the operations' scopes, and the element types of contractions.
//! `docs/performance-how.md` gives the measurement behind each rule.

mod attention;
pub mod cpu;
mod doubled;
mod follow;
pub mod gpu;
mod rounding;
pub mod tpu;

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::graph::{Composite, Graph, GraphError};
use crate::shape::Shape;

/// The hardware that programs are lowered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Cpu {
        /// Whether the plugin's own kernels may be used: it has them for this processor, and the program is not
        /// partitioned, because the partitioner knows nothing of them.
        kernels: bool,
    },
    Gpu {
        /// `None` where no library's calls may be used: they are planned on the GPU itself, so for one that is not here there
        /// are none.
        features: Option<gpu::Features>,
        /// Whether this program's kernels may be used.
        kernels: bool,
    },
    Tpu {
        /// Whether this program's kernels may be used.
        kernels: bool,
        features: tpu::Features,
    },
}

impl Backend {
    /// The backend of a PJRT platform's name, for programs over `devices`: with the `features` of a TPU's chip, those of a `gpu`,
    /// and where `plugin_kernels` says that a CPU plugin's kernels run on this processor. Unknown platforms get what GPUs get.
    pub fn of_platform(
        name: &str,
        features: tpu::Features,
        gpu: Option<gpu::Features>,
        plugin_kernels: bool,
        devices: usize,
    ) -> Backend {
        match name {
            "cpu" => Backend::Cpu {
                kernels: plugin_kernels && devices == 1,
            },
            "tpu" => Backend::Tpu {
                kernels: true,
                features,
            },
            _ => Backend::Gpu {
                features: gpu,
                kernels: gpu.is_some(),
            },
        }
    }

    /// Whether kernels run on parts of a batch, so that a program over several devices may have them.
    pub fn splits_kernels(&self) -> bool {
        match self {
            Backend::Tpu { kernels, .. } => *kernels,
            Backend::Gpu { kernels, .. } => *kernels,
            Backend::Cpu { .. } => false,
        }
    }

    /// The same with no kernels.
    pub fn without_kernels(self) -> Backend {
        match self {
            Backend::Cpu { .. } => Backend::Cpu { kernels: false },
            Backend::Tpu { features, .. } => Backend::Tpu {
                kernels: false,
                features,
            },
            Backend::Gpu { .. } => Backend::Gpu {
                features: None,
                kernels: false,
            },
        }
    }

    /// The graph with the kernels whose padding belongs into weights before these are quantized, and with weights so padded. For graphs
    /// whose weights are floats.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn pad_weights<'g>(
        &self,
        graph: &'g Graph,
        parts: usize,
    ) -> Result<Cow<'g, Graph>, GraphError> {
        match self {
            Backend::Tpu {
                kernels: true,
                features,
            } => tpu::pad_heads(graph, *features, parts).map(Cow::Owned),
            Backend::Cpu { .. } | Backend::Gpu { .. } | Backend::Tpu { kernels: false, .. } => {
                Ok(Cow::Borrowed(graph))
            }
        }
    }

    /// The graph with this backend's kernels in place of the composites and contractions that it claims. Weights are
    /// brought into the kernels' layout by operations on weights alone, which [`crate::graph::stage`] moves to where
    /// weights are loaded. The devices compute `parts` parts of the batch, each without the others.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn claim<'g>(&self, graph: &'g Graph, parts: usize) -> Result<Cow<'g, Graph>, GraphError> {
        match self {
            Backend::Cpu { kernels: true } => cpu::claim(graph).map(Cow::Owned),
            Backend::Tpu {
                kernels: true,
                features,
            } => tpu::claim(graph, *features, parts).map(Cow::Owned),
            Backend::Gpu {
                features,
                kernels: true,
            } => gpu::claim(graph, *features, parts).map(Cow::Owned),
            Backend::Cpu { kernels: false }
            | Backend::Gpu { kernels: false, .. }
            | Backend::Tpu { kernels: false, .. } => Ok(Cow::Borrowed(graph)),
        }
    }

    /// The same for a training step, whose weights are new in every step. `is_split` says of each input, if anything is, which of its
    /// dimensions the devices share.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn claim_training<'g>(
        &self,
        graph: &'g Graph,
        parts: usize,
        is_split: &[Vec<bool>],
    ) -> Result<Cow<'g, Graph>, GraphError> {
        match self {
            Backend::Cpu { kernels: true } => cpu::claim_training(graph).map(Cow::Owned),
            Backend::Tpu {
                kernels: true,
                features,
            } => tpu::claim_training(graph, *features, parts, is_split).map(Cow::Owned),
            Backend::Cpu { kernels: false }
            | Backend::Gpu { .. }
            | Backend::Tpu { kernels: false, .. } => Ok(Cow::Borrowed(graph)),
        }
    }

    /// Whether devices may add up their parts of a tensor of `shape` in bfloat16, of which each is to have one of `split` parts of each
    /// dimension.
    pub fn adds_narrow_parts(&self, shape: &Shape, split: &[usize]) -> bool {
        match self {
            Backend::Tpu { .. } => tpu::adds_narrow_parts(shape, split),
            Backend::Cpu { .. } | Backend::Gpu { .. } => true,
        }
    }

    /// Whether a composite of a training step's forward pass stays whole, for [`Backend::claim_training`] with as many `parts`. Its
    /// derivative then computes the body again.
    pub fn claims_in_training(&self, kind: &Composite, body: &Graph, parts: usize) -> bool {
        match self {
            Backend::Cpu { kernels: true } => cpu::claims_in_training(kind, body),
            Backend::Tpu {
                kernels: true,
                features,
            } => tpu::claims_in_training(kind, body, *features, parts),
            Backend::Cpu { kernels: false }
            | Backend::Gpu { .. }
            | Backend::Tpu { kernels: false, .. } => false,
        }
    }

    /// The shortest run of equal blocks that is compiled as a loop; `None` if none is. A step that trains has three to
    /// four times the operations.
    pub fn shortest_scan(&self, trains: bool) -> Option<usize> {
        match (self, trains) {
            // Calls in loops cost what they cost outside, but each trip copies its weights.
            (Backend::Cpu { .. }, _) => None,
            (Backend::Tpu { .. } | Backend::Gpu { .. }, false) => Some(16),
            (Backend::Tpu { .. } | Backend::Gpu { .. }, true) => Some(2),
        }
    }

    /// Whether the compiler has memory without contents ([`crate::graph::Op::Uninitialized`]).
    pub fn allocates(&self) -> bool {
        match self {
            Backend::Tpu { .. } => true,
            Backend::Cpu { .. } | Backend::Gpu { .. } => false,
        }
    }

    /// Switches of this backend's compiler that its programs are compiled with, in place of the compiler's own choice.
    pub fn compiler_switches(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Backend::Cpu { .. } => &[],
            Backend::Gpu { .. } => &gpu::COMPILER_SWITCHES,
            Backend::Tpu { .. } => &tpu::COMPILER_SWITCHES,
        }
    }

    /// The graph, of which composites are inlined, in the forms that this backend's compiler runs fastest.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn rewrite(&self, graph: Graph) -> Result<Graph, GraphError> {
        match self {
            Backend::Cpu { .. } => cpu::rewrite(&graph),
            Backend::Gpu { .. } => gpu::rewrite(&graph),
            Backend::Tpu { .. } => Ok(graph),
        }
    }

    /// The graph of a program of one device, of which composites are inlined, with this backend's kernels in place of groups of
    /// operations.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn fuse(&self, graph: Graph) -> Result<Graph, GraphError> {
        match self {
            Backend::Gpu { kernels: true, .. } => gpu::fuse(&graph),
            Backend::Cpu { .. } | Backend::Gpu { kernels: false, .. } | Backend::Tpu { .. } => {
                Ok(graph)
            }
        }
    }

    /// The graph of a program for so many devices, which share a batch in so many parts. Its kernels read rows of what others gave where they
    /// lie, and those in loops read and write entries of stacks.
    ///
    /// # Errors
    /// None for a well-typed graph.
    pub fn in_place(
        &self,
        graph: Graph,
        devices: usize,
        parts: usize,
    ) -> Result<Graph, GraphError> {
        match self {
            Backend::Tpu { kernels: true, .. } => {
                tpu::in_stacks(&tpu::in_rows(&graph, parts)?, devices)
            }
            Backend::Cpu { .. } | Backend::Gpu { .. } | Backend::Tpu { kernels: false, .. } => {
                Ok(graph)
            }
        }
    }

    /// [`Backend::rewrite`] for a training step.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub fn rewrite_training(&self, graph: Graph) -> Result<Graph, GraphError> {
        match self {
            Backend::Tpu { .. } => tpu::products_of_ones(&tpu::products_of_patches(&graph)?),
            Backend::Gpu { .. } => gpu::rewrite_training(&graph),
            Backend::Cpu { .. } => self.rewrite(graph),
        }
    }
}

/// How many of a backend's kernels a graph calls, by name; those in loops once.
pub fn kernel_counts(graph: &Graph) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    graph.visit_calls(&mut |_, _, call| *counts.entry(call.name()).or_default() += 1);
    counts
}
