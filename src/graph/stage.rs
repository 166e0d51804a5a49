//! Splitting a program by when its values are known.
//!
//! Most of what a denoising step computes does not change from step to step: weights in the type and layout that the
//! hardware wants, int8 weights with their scales, the keys and values of the prompt. [`stage`] finds all of it by
//! looking at what each value depends on, and moves it to programs that run once: no model says what is computed when.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Builder, Graph, GraphError, Init, Input, InputKind, Node, Op, Output, Tensor};

/// When a value is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Always: it depends on no input.
    Constant,
    /// When the weights are loaded.
    Load,
    /// With the inputs of a request: a prompt.
    Request,
    /// In every run.
    Step,
}

/// A program in stages. Inputs of a later one that no caller knows are results of an earlier one of the same name.
#[derive(Clone, Debug)]
pub struct Staged {
    /// Values computed from weights alone: one program for each group of weights that have a result in common. Weights
    /// that are used as they are occur in none.
    pub load: Vec<Graph>,
    /// Values computed once for the inputs of a request; `None` if there are none.
    pub request: Option<Graph>,
    /// The rest, with the results of the program.
    pub step: Graph,
}

/// Elements up to which a float that becomes a wider one is converted in every run: it then takes less memory, and what
/// is converted (biases, scales of norms) costs no time. Larger ones are kernels, converted once.
const SMALL: usize = 1 << 16;

/// Splits `graph`; `request` names the run-time inputs that are known before the others.
///
/// The stages together compute what `graph` does, with the same operations. A result that is only an enlarged copy of
/// something smaller (a broadcast) is not kept but computed again where it is used, and so is everything computed from
/// a value that is marked as stored.
///
/// # Errors
/// When the graph is ill-typed.
pub fn stage(graph: &Graph, request: &[&str]) -> Result<Staged, GraphError> {
    let known = Known::new(graph, request);
    let stages = &known.stages;
    let splitter = Splitter {
        graph,
        known: &known,
        names: names(graph),
        axes: axes(graph),
    };
    let (step, mut cuts) = splitter.program(Stage::Step, None)?;
    let asked: Vec<u32> = cuts
        .iter()
        .copied()
        .filter(|id| stages[*id as usize] == Stage::Request)
        .collect();
    let request = match asked.is_empty() {
        true => None,
        false => {
            let (program, more) = splitter.program(Stage::Request, Some(&asked))?;
            cuts.extend(more);
            Some(program)
        }
    };
    let mut prepared: Vec<u32> = cuts
        .into_iter()
        .filter(|id| stages[*id as usize] == Stage::Load)
        .collect();
    prepared.sort_unstable();
    prepared.dedup();
    let load = splitter
        .groups(&prepared)
        .iter()
        .map(|group| Ok(splitter.program(Stage::Load, Some(group))?.0))
        .collect::<Result<Vec<_>, GraphError>>()?;
    Ok(Staged {
        load,
        request,
        step,
    })
}

fn stages(graph: &Graph, request: &[&str]) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        stages.push(match node.op {
            Op::Parameter(index) => {
                let input = &graph.inputs[index];
                match input.kind {
                    InputKind::Weight(_) => Stage::Load,
                    InputKind::Data if request.contains(&input.name.as_str()) => Stage::Request,
                    InputKind::Data | InputKind::State => Stage::Step,
                }
            }
            _ => node
                .operands
                .iter()
                .map(|o| stages[*o as usize])
                .max()
                .unwrap_or(Stage::Constant),
        });
    }
    stages
}

/// A name for each node, should it become an input: its scope and operation, counted.
fn names(graph: &Graph) -> Vec<String> {
    let mut seen: HashMap<(u32, &str), usize> = HashMap::new();
    graph
        .nodes
        .iter()
        .map(|node| {
            let count = seen.entry((node.scope, node.op.name())).or_default();
            *count += 1;
            format!("{}:{}.{count}", graph.path(node), node.op.name())
        })
        .collect()
}

/// The logical axes of each value: those of the first operand that has any, as far as the operation keeps dimensions.
fn axes(graph: &Graph) -> Vec<Vec<Option<&'static str>>> {
    let mut axes: Vec<Vec<Option<&'static str>>> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let rank = node.shape.rank();
        let of_operand = |at: usize| axes[node.operands[at] as usize].as_slice();
        let dims_of = |at: usize| &graph.nodes[node.operands[at] as usize].shape.dims;
        let own = match &node.op {
            Op::Parameter(index) => graph.inputs[*index].logical_axes.clone(),
            Op::ShardingConstraint(axes) => axes.clone(),
            Op::Convert(_)
            | Op::Stored
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select => (0..node.operands.len())
                .filter(|at| dims_of(*at).len() == rank)
                .map(of_operand)
                .find(|axes| !axes.is_empty())
                .unwrap_or_default()
                .to_vec(),
            Op::Clamp => of_operand(1).to_vec(),
            Op::Concatenate(dim) => {
                let mut all = of_operand(0).to_vec();
                if let Some(axis) = all.get_mut(*dim) {
                    *axis = None;
                }
                all
            }
            Op::Transpose(perm) => match of_operand(0) {
                [] => Vec::new(),
                axes => perm.iter().map(|d| axes[*d]).collect(),
            },
            Op::Reduce { dims, .. } => of_operand(0)
                .iter()
                .enumerate()
                .filter(|(d, _)| !dims.contains(d))
                .map(|(_, axis)| *axis)
                .collect(),
            // Rows stay where they are; what the second operand adds is whole.
            Op::DotGeneral { dims, .. } if !of_operand(0).is_empty() => {
                let left = (0..dims_of(0).len())
                    .filter(|d| !dims.lhs_batch.contains(d) && !dims.lhs_contract.contains(d));
                let kept = dims.lhs_batch.iter().copied().chain(left);
                let mut all: Vec<_> = kept.map(|d| of_operand(0)[d]).collect();
                all.resize(rank, None);
                all
            }
            Op::BroadcastInDim { dims, result } if !of_operand(0).is_empty() => {
                let mut all = vec![None; result.len()];
                for ((axis, place), size) in of_operand(0).iter().zip(dims).zip(dims_of(0)) {
                    all[*place] = axis.filter(|_| *size == result[*place]);
                }
                all
            }
            _ => Vec::new(),
        };
        axes.push(own);
    }
    axes
}

/// When each value of a graph is known.
pub(super) struct Known<'a> {
    graph: &'a Graph,
    stages: Vec<Stage>,
    /// Which nodes are computed from values that are marked as stored, or are such marks.
    from_stored: Vec<bool>,
}

impl Known<'_> {
    /// `request` names the run-time inputs that are known before the others.
    pub(super) fn new<'a>(graph: &'a Graph, request: &[&str]) -> Known<'a> {
        Known {
            graph,
            stages: stages(graph, request),
            from_stored: graph.from_stored(),
        }
    }

    /// Of a program without stages: what no input decides is a constant, all else is computed in every run.
    pub(super) fn in_one_stage(graph: &Graph) -> Known<'_> {
        let mut known = Known::new(graph, &[]);
        for stage in known
            .stages
            .iter_mut()
            .filter(|stage| **stage != Stage::Constant)
        {
            *stage = Stage::Step;
        }
        known
    }

    /// Whether a node cannot be computed before a run.
    pub(super) fn is_of_step(&self, id: u32) -> bool {
        self.stages[id as usize] == Stage::Step
    }

    /// Whether a node is computed in every run.
    pub(super) fn is_in_step(&self, id: u32) -> bool {
        self.is_of_step(id) || self.is_made_again(id)
    }

    /// Whether a node of an earlier stage is made again where it is used, instead of being kept.
    fn is_made_again(&self, id: u32) -> bool {
        let node = &self.graph.nodes[id as usize];
        match node.op {
            Op::BroadcastInDim { .. } | Op::Reshape(_) | Op::ShardingConstraint(_) => true,
            _ if self.from_stored[id as usize] && self.stages[id as usize] <= Stage::Load => true,
            Op::Convert(to) => {
                let from = self.graph.nodes[node.operands[0] as usize].shape.dtype;
                from.is_float() && to.bits() > from.bits() && node.shape.count() <= SMALL
            }
            _ => self.stages[id as usize] == Stage::Constant,
        }
    }
}

struct Splitter<'a> {
    graph: &'a Graph,
    known: &'a Known<'a>,
    names: Vec<String>,
    /// The logical axes of each node.
    axes: Vec<Vec<Option<&'static str>>>,
}

impl Splitter<'_> {
    fn node(&self, id: u32) -> &Node {
        &self.graph.nodes[id as usize]
    }

    /// The program of one stage, and the nodes of earlier stages that are its inputs. `results` are nodes of the stage;
    /// without them the program has the results of the whole.
    fn program(
        &self,
        stage: Stage,
        results: Option<&[u32]>,
    ) -> Result<(Graph, Vec<u32>), GraphError> {
        // Everything that the results need, back to inputs and to values that an earlier stage keeps.
        let mut needed = HashSet::new();
        let mut cuts = Vec::new();
        let mut open: Vec<u32> = match results {
            Some(results) => results.to_vec(),
            None => self.graph.outputs.iter().map(|o| o.node).collect(),
        };
        while let Some(id) = open.pop() {
            if !needed.insert(id) {
                continue;
            }
            let is_input = matches!(self.node(id).op, Op::Parameter(_));
            if self.known.stages[id as usize] >= stage || self.known.is_made_again(id) {
                open.extend(&self.node(id).operands);
            } else if !is_input {
                cuts.push(id);
            }
        }
        cuts.sort_unstable();

        let b = Builder::new();
        let mut copies: HashMap<u32, Tensor> = HashMap::new();
        let mut places: HashMap<usize, usize> = HashMap::new();
        let parameters: BTreeMap<usize, u32> = needed
            .iter()
            .filter_map(|id| match self.node(*id).op {
                Op::Parameter(index) => Some((index, *id)),
                _ => None,
            })
            .collect();
        for (place, (index, id)) in parameters.into_iter().enumerate() {
            places.insert(index, place);
            copies.insert(id, b.declare(self.graph.inputs[index].clone())?);
        }
        for &id in &cuts {
            copies.insert(id, b.declare(self.kept(id))?);
        }
        let mut order: Vec<u32> = needed.into_iter().collect();
        order.sort_unstable();
        for id in order {
            if copies.contains_key(&id) {
                continue;
            }
            let node = self.node(id);
            let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[o]).collect();
            let at = b.at(self.graph.path(node));
            copies.insert(id, at.copy_node(node, &operands)?);
        }
        match results {
            Some(results) => {
                for id in results {
                    b.push_output(Output {
                        name: self.names[*id as usize].clone(),
                        node: copies[id].index() as u32,
                        alias: None,
                        logical_axes: self.axes[*id as usize].clone(),
                    });
                }
            }
            None => {
                for output in &self.graph.outputs {
                    b.push_output(Output {
                        node: copies[&output.node].index() as u32,
                        alias: output.alias.and_then(|index| places.get(&index).copied()),
                        ..output.clone()
                    });
                }
            }
        }
        Ok((b.finish(), cuts))
    }

    /// The input that stands for the kept node `id`.
    fn kept(&self, id: u32) -> Input {
        Input {
            name: self.names[id as usize].clone(),
            kind: match self.known.stages[id as usize] {
                Stage::Constant | Stage::Load => InputKind::Weight(Init::Zeros),
                Stage::Request | Stage::Step => InputKind::Data,
            },
            shape: self.node(id).shape.clone(),
            logical_axes: self.axes[id as usize].clone(),
        }
    }

    /// The weights that each of `prepared` is computed from decide which of them are computed together.
    fn groups(&self, prepared: &[u32]) -> Vec<Vec<u32>> {
        let mut groups: Vec<(HashSet<u32>, Vec<u32>)> = Vec::new();
        let mut group_of: HashMap<u32, usize> = HashMap::new();
        for &id in prepared {
            let weights = self.weights_of(id);
            let mut touched: Vec<usize> = weights
                .iter()
                .filter_map(|w| group_of.get(w).copied())
                .collect();
            touched.sort_unstable();
            touched.dedup();
            let at = match touched.split_first() {
                None => {
                    groups.push((HashSet::new(), Vec::new()));
                    groups.len() - 1
                }
                Some((&first, rest)) => {
                    for &other in rest {
                        let (weights, members) = std::mem::take(&mut groups[other]);
                        groups[first].0.extend(weights);
                        groups[first].1.extend(members);
                    }
                    first
                }
            };
            groups[at].0.extend(weights);
            groups[at].1.push(id);
            for weight in &groups[at].0 {
                group_of.insert(*weight, at);
            }
        }
        groups
            .into_iter()
            .map(|(_, members)| members)
            .filter(|members| !members.is_empty())
            .collect()
    }

    /// The nodes of the weights that `id` depends on.
    fn weights_of(&self, id: u32) -> HashSet<u32> {
        let mut weights = HashSet::new();
        let mut seen = HashSet::new();
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if !seen.insert(id) {
                continue;
            }
            match self.node(id).op {
                Op::Parameter(_) => {
                    weights.insert(id);
                }
                _ => open.extend(&self.node(id).operands),
            }
        }
        weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{DotDims, Reduction, evaluate};
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    const LENGTH: usize = 3;

    /// `(x W^T + prompt V^T) * absmax(W) + bias`, with W in bf16.
    fn graph() -> Graph {
        let b = Builder::new();
        let weight = |name: &str, dims: &[usize], axes: &[Option<&'static str>]| {
            let shape = Shape::new(DType::F32, dims);
            b.root("m").param(name, shape, Init::Zeros, axes).unwrap()
        };
        let w = weight("w", &[2, 4], &[Some("out"), Some("in")]);
        let v = weight("v", &[2, 4], &[]);
        let bias = weight("bias", &[2], &[]);
        let unused = weight("unused", &[2], &[]);
        let data = |name: &str| {
            b.input(name, Shape::new(DType::F32, [LENGTH, 4]), &[])
                .unwrap()
        };
        let (x, prompt) = (data("x"), data("prompt"));
        let state = b
            .input("state", Shape::new(DType::F32, [LENGTH, 2]), &[])
            .unwrap();
        let dot = |x: Tensor, w: Tensor| {
            let dims = DotDims {
                lhs_contract: vec![1],
                rhs_contract: vec![1],
                ..DotDims::default()
            };
            b.dot_general(x, w, dims, DType::F32).unwrap()
        };
        let _ = unused;
        let half = b.convert(b.transpose(w, &[1, 0]).unwrap(), DType::BF16);
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let x = b.convert(x, DType::BF16).unwrap();
        let own = b.dot_general(x, half.unwrap(), dims, DType::F32).unwrap();
        let text = dot(prompt, v);
        let absmax = b.reduce(Reduction::Max, b.abs(w).unwrap(), &[1]).unwrap();
        let y = b.add(own, text).unwrap();
        let y = b.mul(y, absmax).unwrap();
        let y = b.add(y, bias).unwrap();
        let y = b.add(y, state).unwrap();
        b.output("state", y, Some(state)).unwrap();
        b.finish()
    }

    fn values(names: &[String]) -> Vec<HostTensor> {
        names
            .iter()
            .map(|name| {
                let dims: &[usize] = match name.as_str() {
                    "m/bias" | "m/unused" => &[2],
                    "state" => &[LENGTH, 2],
                    "x" | "prompt" => &[LENGTH, 4],
                    _ => &[2, 4],
                };
                let seed = name.len() as f32;
                let count: usize = dims.iter().product();
                let values: Vec<f32> = (0..count).map(|i| (seed + i as f32).sin()).collect();
                HostTensor::from_f32(dims, &values).unwrap()
            })
            .collect()
    }

    #[test]
    fn what_weights_and_prompts_decide_is_computed_before_the_step() {
        let whole = graph();
        let staged = stage(&whole, &["prompt"]).unwrap();
        // W's two results are one group; the others are used as they are.
        assert_eq!(staged.load.len(), 1);
        let load = &staged.load[0];
        let of = |graph: &Graph| -> Vec<String> {
            graph.inputs.iter().map(|i| i.name.clone()).collect()
        };
        assert_eq!(of(load), ["m/w"]);
        assert_eq!(load.outputs.len(), 2);
        assert_eq!(load.outputs[0].logical_axes, [Some("in"), Some("out")]);
        let request = staged.request.as_ref().unwrap();
        assert_eq!(of(request), ["m/v", "prompt"]);
        assert_eq!(request.outputs.len(), 1);
        // The bias is broadcast in the step, not kept at its full size.
        assert!(of(&staged.step).contains(&"m/bias".to_string()));
        assert_eq!(staged.step.inputs.len(), 6);
        let alias = staged.step.outputs[0].alias.unwrap();
        assert_eq!(staged.step.inputs[alias].name, "state");

        let names = of(&whole);
        let expected = evaluate(&whole, &values(&names)).unwrap();
        let mut known: HashMap<String, HostTensor> =
            names.iter().cloned().zip(values(&names)).collect();
        let mut last = Vec::new();
        for program in [load, request, &staged.step] {
            let inputs: Vec<HostTensor> =
                of(program).iter().map(|name| known[name].clone()).collect();
            last = evaluate(program, &inputs).unwrap();
            for (output, value) in program.outputs.iter().zip(&last) {
                known.insert(output.name.clone(), value.clone());
            }
        }
        assert_eq!(last, expected);
    }

    #[test]
    fn a_program_without_a_prompt_has_no_request() {
        let staged = stage(&graph(), &[]).unwrap();
        assert!(staged.request.is_none());
    }
}
