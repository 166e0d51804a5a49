//! Copies of graphs in which some nodes are others.

use std::collections::HashMap;

use super::{
    Builder, Composite, Graph, GraphError, InputKind, Node, Op, Output, Recomputed, Tensor,
};
use crate::dtype::DType;

/// The function that [`Graph::rewrite`] calls for each node: a builder at its scope, the node and its operands in the
/// copy.
pub type Replace<'a> =
    dyn FnMut(&Builder, &Node, &[Tensor]) -> Result<Option<Tensor>, GraphError> + 'a;

/// The function that [`Graph::substitute`] calls for each node: a builder at its scope, the node's index, and the
/// copies of all nodes before it that outputs depend on.
pub type Substitute<'a> =
    dyn FnMut(&Builder, usize, &[Tensor]) -> Result<Option<Tensor>, GraphError> + 'a;

impl Graph {
    /// The same program for weights as `stored` says they are: `f32` weights that are stored as `bf16` or `f16` are
    /// inputs of that type where all that the program does with them is to convert them.
    ///
    /// # Errors
    /// None for a well-typed graph.
    pub fn with_stored_weights(
        &self,
        stored: &dyn Fn(&str) -> Option<DType>,
    ) -> Result<Graph, GraphError> {
        let live = self.live_nodes();
        let mut only_converted = vec![true; self.nodes.len()];
        for (node, _) in self.nodes.iter().zip(&live).filter(|(_, live)| **live) {
            for operand in &node.operands {
                only_converted[*operand as usize] &= matches!(node.op, Op::Convert(_));
            }
        }
        for output in &self.outputs {
            only_converted[output.node as usize] = false;
        }
        let mut graph = self.clone();
        for (i, node) in self.nodes.iter().enumerate() {
            let Op::Parameter(index) = node.op else {
                continue;
            };
            let input = &mut graph.inputs[index];
            let is_weight = matches!(input.kind, InputKind::Weight(_));
            if !is_weight || input.shape.dtype != DType::F32 || !only_converted[i] {
                continue;
            }
            if let Some(dtype @ (DType::BF16 | DType::F16)) = stored(&input.name) {
                input.shape = input.shape.with_dtype(dtype);
                graph.nodes[i].shape = input.shape.clone();
            }
        }
        graph.substitute(&mut |_, i, copies| {
            let node = &graph.nodes[i];
            let Op::Convert(dtype) = node.op else {
                return Ok(None);
            };
            let operand = node.operands[0] as usize;
            Ok((graph.nodes[operand].shape.dtype == dtype).then(|| copies[operand]))
        })
    }

    /// A copy in which `replace` may put other nodes in an operation's place. What stands in its place is recomputed where
    /// it was.
    ///
    /// `replace` gets a builder at the node's scope, the node, and its operands in the copy. `None` keeps the node.
    /// Loop bodies are rewritten by the same function.
    ///
    /// # Errors
    /// Errors of `replace`, and when a replacement's shape is not the node's.
    pub fn rewrite(&self, replace: &mut Replace<'_>) -> Result<Graph, GraphError> {
        self.substitute(&mut |b, i, copies| {
            let node = &self.nodes[i];
            let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
            match (replace(b, node, &operands)?, &node.op) {
                (None, Op::While { cond, body }) => {
                    let op = Op::While {
                        cond: Box::new(cond.rewrite(replace)?),
                        body: Box::new(body.rewrite(replace)?),
                    };
                    b.push(op, &operands).map(Some)
                }
                (other, _) => Ok(other),
            }
        })
    }

    /// [`Graph::rewrite`] for replacements that reach further back than a node's operands; loop bodies stay as they
    /// are.
    ///
    /// # Errors
    /// Errors of `replace`, and when a replacement's shape is not the node's.
    pub fn substitute(&self, replace: &mut Substitute<'_>) -> Result<Graph, GraphError> {
        let b = Builder::new();
        let inputs = self
            .inputs
            .iter()
            .map(|input| b.declare(input.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        self.substitute_onto(&b, &inputs, replace)?;
        Ok(b.finish())
    }

    /// The graph, and those of its loops, with the bodies of kernels in place of their calls; `None` if no kernel has one
    /// ([`CustomCall::body`](super::CustomCall::body)).
    ///
    /// # Errors
    /// When a body is ill-typed.
    pub fn without_calls(&self) -> Result<Option<Graph>, GraphError> {
        let has_body =
            |node: &Node| matches!(&node.op, Op::CustomCall(call) if call.body().is_some());
        let mut loops = HashMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            if let Op::While { body, .. } = &node.op
                && let Some(body) = body.without_calls()?
            {
                loops.insert(i, body);
            }
        }
        if loops.is_empty() && !self.nodes.iter().any(has_body) {
            return Ok(None);
        }
        let mut results: HashMap<u32, Vec<Tensor>> = HashMap::new();
        let graph = self.substitute(&mut |b, i, copies| {
            let node = &self.nodes[i];
            let operands = || -> Vec<Tensor> {
                let operands = node.operands.iter();
                operands.map(|o| copies[*o as usize]).collect()
            };
            Ok(match &node.op {
                Op::CustomCall(call) => match call.body() {
                    Some(body) => {
                        let all = b.insert_all(body, &operands())?;
                        let first = all.first().copied();
                        results.insert(i as u32, all);
                        first
                    }
                    None => None,
                },
                Op::GetTupleElement(at) => results.get(&node.operands[0]).map(|all| all[*at]),
                Op::While { cond, .. } if loops.contains_key(&i) => {
                    let op = Op::While {
                        cond: cond.clone(),
                        body: Box::new(loops[&i].clone()),
                    };
                    Some(b.push(op, &operands())?)
                }
                _ => None,
            })
        })?;
        Ok(Some(graph))
    }

    /// [`Graph::substitute`] onto a builder in which `inputs` stand for the program's inputs.
    ///
    /// # Errors
    /// The same, and when a result takes over an input that is none of the builder's.
    pub(super) fn substitute_onto(
        &self,
        b: &Builder,
        inputs: &[Tensor],
        replace: &mut Substitute<'_>,
    ) -> Result<(), GraphError> {
        let mut copies: Vec<Tensor> = Vec::with_capacity(self.nodes.len());
        let live = self.live_nodes();
        for (i, node) in self.nodes.iter().enumerate() {
            if let Op::Parameter(index) = node.op {
                copies.push(inputs[index]);
                continue;
            }
            // A node that no output needs is not copied; its entry holds any earlier tensor, never read.
            if !live[i] {
                copies.push(Tensor {
                    graph: u32::MAX,
                    id: 0,
                });
                continue;
            }
            let at = b.at(self.path(node)).in_region(node.remat);
            let copy = match replace(&at, i, &copies)? {
                Some(t) => t,
                None => {
                    let operands: Vec<Tensor> =
                        node.operands.iter().map(|o| copies[*o as usize]).collect();
                    at.copy_node(node, &operands)?
                }
            };
            if at.shape(copy) != node.shape {
                return Err(at.invalid(format!(
                    "{}: replaced {} by {}",
                    node.op.name(),
                    node.shape,
                    at.shape(copy)
                )));
            }
            copies.push(copy);
        }
        for output in &self.outputs {
            let taken_over = |input: usize| {
                b.with_graph(|graph| match graph.nodes[inputs[input].index()].op {
                    Op::Parameter(index) => Ok(index),
                    _ => Err(b.invalid(format!("{}: takes over no input", output.name))),
                })
            };
            b.push_output(Output {
                node: copies[output.node as usize].id,
                alias: output.alias.map(taken_over).transpose()?,
                ..output.clone()
            });
        }
        Ok(())
    }

    /// The same program with the body in place of each composite that `chosen` takes, also within loops, and without
    /// what no output depends on.
    ///
    /// Operations of a body keep their scope, and are recomputed where their composite is.
    pub fn inline_composites(&self, chosen: &dyn Fn(&Composite, &Graph) -> bool) -> Graph {
        let mut inlined = Graph {
            nodes: Vec::with_capacity(self.nodes.len()),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            scopes: self.scopes.clone(),
        };
        let scopes: Vec<Option<u32>> = (0..self.scopes.len() as u32).map(Some).collect();
        let copies = inlined.append(self, scopes, None, None, chosen);
        for output in &mut inlined.outputs {
            output.node = copies[output.node as usize];
        }
        inlined
    }

    fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    /// Adds the nodes of `graph` that its outputs depend on, and gives the copy of each node; the entries of the others
    /// are never read.
    ///
    /// `scopes` says which scopes of `graph` are known here, and as which. A body's inputs are `arguments`, and its
    /// operations are recomputed where its composite is, `remat`.
    fn append(
        &mut self,
        graph: &Graph,
        mut scopes: Vec<Option<u32>>,
        arguments: Option<&[u32]>,
        remat: Option<Recomputed>,
        chosen: &dyn Fn(&Composite, &Graph) -> bool,
    ) -> Vec<u32> {
        let live = graph.live_nodes();
        let mut copies: Vec<u32> = Vec::with_capacity(graph.nodes.len());
        // The results of bodies, by the composite that they stand in place of.
        let mut results: HashMap<u32, Vec<u32>> = HashMap::new();
        for (i, (node, live)) in graph.nodes.iter().zip(live).enumerate() {
            let operands = || node.operands.iter().map(|o| copies[*o as usize]).collect();
            let remat = remat.or(node.remat);
            let inlined = match node.op {
                Op::GetTupleElement(at) => results.get(&node.operands[0]).map(|all| all[at]),
                _ => None,
            };
            if let Some(result) = inlined {
                copies.push(result);
                continue;
            }
            let copy = match (&node.op, arguments) {
                (Op::Parameter(index), Some(arguments)) => arguments[*index],
                // A program's inputs stay, used or not.
                (op, _) if !live && !matches!(op, Op::Parameter(_)) => u32::MAX,
                (Op::Composite { kind, body }, _) if chosen(kind, body) => {
                    let operands: Vec<u32> = operands();
                    let unknown = vec![None; body.scopes.len()];
                    let copies = self.append(body, unknown, Some(&operands), remat, chosen);
                    let outputs = body.outputs.iter();
                    let all: Vec<u32> = outputs.map(|o| copies[o.node as usize]).collect();
                    // There is at least one: shape inference has checked it.
                    let first = all[0];
                    results.insert(i as u32, all);
                    first
                }
                (op, _) => {
                    let path = graph.path(node);
                    let scope = scopes[node.scope as usize].get_or_insert_with(|| self.scope(path));
                    let copy = Node {
                        op: op.with_regions(&|g| g.inline_composites(chosen)),
                        operands: operands(),
                        shape: node.shape.clone(),
                        scope: *scope,
                        remat,
                    };
                    self.push(copy)
                }
            };
            copies.push(copy);
        }
        copies
    }

    /// The number of a scope, which is added if it is not there.
    fn scope(&mut self, path: &str) -> u32 {
        // Most bodies stand in the scope that was added last.
        let known = self.scopes.iter().rposition(|s| s == path);
        known.unwrap_or_else(|| {
            self.scopes.push(path.to_string());
            self.scopes.len() - 1
        }) as u32
    }
}
