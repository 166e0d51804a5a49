//! Traced programs, the input of lowering.

use std::fmt;
use std::sync::Arc;

use crate::graph::{Builder, Graph, GraphError, Input};
use crate::quant::{self, Decision, Policy, QuantError};

/// How devices add up gradients.
pub struct Sums<'a> {
    /// Whether several devices have parts of the batch, and add up what each of them found.
    pub between_devices: bool,
    /// Whether they may add up the gradient of a weight in a type of fewer bits than `f32`.
    pub may_narrow: &'a dyn Fn(&Input) -> bool,
}

/// Adds operations to a program.
type Add = dyn Fn(&Builder, &Sums<'_>) -> Result<(), GraphError> + Send + Sync;

/// What follows the forward pass of a training step.
#[derive(Clone)]
pub struct Update {
    /// Adds it: the derivative and the optimizer.
    pub add: Arc<Add>,
    /// Whether it can update weights of equal blocks that are one input ([`crate::graph::stacked`]).
    pub takes_stacks: bool,
}

/// A traced program: its graph with composites, contractions annotated with their formats.
#[derive(Clone)]
pub struct Traced {
    pub name: String,
    /// For training the forward pass; `update` adds the rest.
    pub graph: Graph,
    /// The quantization policy.
    pub policy: Option<Policy>,
    /// The decision of quantization for each contraction.
    pub decisions: Vec<Decision>,
    /// The run-time inputs that are known before the others and stay for a request, such as a prompt's embeddings.
    pub request_inputs: Vec<String>,
    /// Whether runs of equal blocks become loops; `None`: as the backend says.
    pub scan_layers: Option<bool>,
    /// Weights are trained; `None` for a program that only reads them.
    pub update: Option<Update>,
}

impl Traced {
    /// A program that only reads its weights, in float.
    pub fn new(name: &str, graph: Graph) -> Traced {
        Traced {
            name: name.to_string(),
            graph,
            policy: None,
            decisions: Vec::new(),
            request_inputs: Vec::new(),
            scan_layers: None,
            update: None,
        }
    }

    /// The same with contractions annotated by the policy's rules, and with what stored layers multiply beside their
    /// weights.
    ///
    /// # Errors
    /// When a rule of the policy matches nothing, or nothing at all is quantized.
    pub fn quantized(mut self, policy: Option<&Policy>) -> Result<Traced, QuantError> {
        if let Some(policy) = policy {
            let b = Builder::resume(self.graph);
            self.decisions = quant::annotate(&b, policy)?;
            self.graph = b.finish();
            let smoothed = policy.smoothed();
            if !smoothed.is_empty() {
                self.graph = quant::divided_by_factors(&self.graph, &smoothed)?;
            }
            let ranks = policy.low_ranks();
            if !ranks.is_empty() {
                let names = quant::LOW_RANK;
                self.graph = quant::low_rank_beside(&self.graph, &ranks, names, 1.0, None)?;
            }
            self.policy = Some(policy.clone());
        }
        Ok(self)
    }

    /// The same with inputs that stay for a request: what they decide is computed once for all steps. Names that are
    /// no input of the program have no effect.
    pub fn with_request_inputs<'a>(mut self, names: impl IntoIterator<Item = &'a str>) -> Traced {
        self.request_inputs = names.into_iter().map(str::to_string).collect();
        self
    }

    /// The same with runs of equal blocks as loops, or not.
    pub fn with_scan_layers(mut self, scan_layers: Option<bool>) -> Traced {
        self.scan_layers = scan_layers;
        self
    }

    /// The same, trained: `update` adds the derivative and the optimizer.
    pub fn trained(mut self, update: Update) -> Traced {
        self.update = Some(update);
        self
    }

    /// [`Traced::request_inputs`] by reference.
    pub(super) fn request(&self) -> Vec<&str> {
        self.request_inputs.iter().map(String::as_str).collect()
    }
}

impl fmt::Debug for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.update {
            None => "reads its weights",
            Some(_) => "trains its weights",
        };
        write!(f, "{}: {} nodes, {kind}", self.name, self.graph.nodes.len())
    }
}
