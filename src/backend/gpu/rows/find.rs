//! Which operations of a graph one kernel computes row by row.
//!
//! Members of a group hold matrices, whose last dimension is that of a row, or one value a row. What lies between a group and
//! operations that no kernel takes counts up: a path that leaves a group comes back to none of the same count, so a call in its
//! place waits for nothing that waits for it.

use std::collections::{HashMap, HashSet};

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{Builder, Graph, GraphError, Node, Op, Tensor};

use super::super::triton::Binary;
use super::emit;

/// Operations that one kernel computes.
pub(super) struct Group {
    /// In ascending order.
    pub members: Vec<usize>,
    /// Values that the kernel reads.
    pub inputs: Vec<usize>,
    /// Members that others read.
    pub outputs: Vec<usize>,
}

/// The groups of a graph, without those in its loops.
pub(super) fn groups(graph: &Graph) -> Vec<Group> {
    Finder::new(graph).groups()
}

/// What a node may be of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Member,
    /// A number, or the same in all rows or in all that agree in their first dimensions. Each kernel computes it for itself.
    Shared,
    /// A value of each row along the row, or a value in a wider type. What reads it computes it for itself.
    Copied,
    Outside,
}

struct Finder<'a> {
    graph: &'a Graph,
    live: Vec<bool>,
    users: Vec<Vec<Option<usize>>>,
    roles: Vec<Role>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Finder<'a> {
        let mut roles: Vec<Role> = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            let of_shared = || {
                let mut operands = node.operands.iter();
                operands.all(|operand| roles[*operand as usize] == Role::Shared)
            };
            let role = match is_shared(graph, node) {
                true => Role::Shared,
                false if is_elementwise(graph, node) && of_shared() => Role::Shared,
                false if is_spread(graph, node) || is_widened(graph, node) => Role::Copied,
                false if is_elementwise(graph, node) || is_of_rows(graph, node) => Role::Member,
                false => Role::Outside,
            };
            roles.push(role);
        }
        Finder {
            graph,
            live: graph.live_nodes(),
            users: follow::users(graph),
            roles,
        }
    }

    fn node(&self, i: usize) -> &'a Node {
        &self.graph.nodes[i]
    }

    /// The nodes that node `i` reads, in place of copies what they are made of.
    fn reads(&self, i: usize) -> impl Iterator<Item = usize> + '_ {
        let operands = self.node(i).operands.iter();
        operands.map(|operand| self.source(*operand as usize))
    }

    fn source(&self, mut i: usize) -> usize {
        while self.roles[i] == Role::Copied {
            i = self.node(i).operands[0] as usize;
        }
        i
    }

    fn is_member(&self, i: usize) -> bool {
        self.roles[i] == Role::Member
    }

    fn groups(&self) -> Vec<Group> {
        let count = self.graph.nodes.len();
        // How often a path to each node left members.
        let mut left = vec![0usize; count];
        let mut sets = Sets((0..count).collect());
        for i in (0..count).filter(|i| self.live[*i]) {
            let of_reads = self.reads(i).map(|read| {
                let leaves = self.is_member(read) && !self.is_member(i);
                left[read] + usize::from(leaves)
            });
            left[i] = of_reads.max().unwrap_or(0);
            if self.is_member(i) {
                for read in self.reads(i).filter(|read| left[*read] == left[i]) {
                    if self.is_member(read) {
                        sets.join(i, read);
                    }
                }
            }
        }
        let mut members: HashMap<usize, Vec<usize>> = HashMap::new();
        for i in (0..count).filter(|i| self.live[*i] && self.is_member(*i)) {
            members.entry(sets.root(i)).or_default().push(i);
        }
        let groups = members.into_values();
        let mut groups: Vec<Group> = groups.filter_map(|members| self.group(members)).collect();
        groups.sort_by_key(|group| group.members[0]);
        groups
    }

    /// These members as a group, if a kernel takes them and one of them depends on a reduction.
    fn group(&self, members: Vec<usize>) -> Option<Group> {
        has_rows(self.graph, &members).then_some(())?;
        let own: HashSet<usize> = members.iter().copied().collect();
        let of_row = |operand: &u32| {
            let operand = *operand as usize;
            is_spread(self.graph, self.node(operand)) && own.contains(&self.source(operand))
        };
        let reads_row = |i: &usize| self.node(*i).operands.iter().any(of_row);
        members.iter().any(reads_row).then_some(())?;
        let outputs = members.iter().copied();
        let outputs: Vec<usize> = outputs.filter(|i| self.is_read(*i, &own)).collect();
        let is_stored = |i: &usize| emit::is_stored(self.node(*i).shape.dtype);
        if outputs.is_empty() || !outputs.iter().all(is_stored) {
            return None;
        }
        let mut inputs = Vec::new();
        for i in &members {
            self.add_inputs(*i, &own, &mut inputs);
        }
        // What is no member and spread over rows would be stored in all its copies.
        let is_small =
            |i: &usize| !matches!(self.node(*i).op, Op::BroadcastInDim { .. } | Op::Iota(_));
        if !inputs
            .iter()
            .all(|i| is_small(i) && emit::is_float(self.node(*i).shape.dtype))
        {
            return None;
        }
        Some(Group {
            members,
            inputs,
            outputs,
        })
    }

    /// Whether something other than the members `own` reads node `i`, or a copy of it.
    fn is_read(&self, i: usize, own: &HashSet<usize>) -> bool {
        self.users[i].iter().any(|user| match user {
            Some(copy) if self.roles[*copy] == Role::Copied => self.is_read(*copy, own),
            Some(user) => !own.contains(user),
            None => true,
        })
    }

    /// Adds what the operands of node `i` are made of and the kernel reads.
    fn add_inputs(&self, i: usize, own: &HashSet<usize>, inputs: &mut Vec<usize>) {
        for read in self.reads(i) {
            if self.roles[read] == Role::Shared {
                self.add_inputs(read, own, inputs);
            } else if !own.contains(&read) && !inputs.contains(&read) {
                inputs.push(read);
            }
        }
    }
}

impl Group {
    /// The members as a graph of their own, whose inputs and outputs are the group's.
    ///
    /// # Errors
    /// None of a graph that was checked.
    pub fn body(&self, graph: &Graph) -> Result<Graph, GraphError> {
        let b = Builder::new();
        let mut copies: HashMap<usize, Tensor> = HashMap::new();
        for (number, input) in self.inputs.iter().enumerate() {
            let shape = graph.nodes[*input].shape.clone();
            copies.insert(*input, b.input(&format!("input{number}"), shape, &[])?);
        }
        for (number, output) in self.outputs.iter().enumerate() {
            let result = copy(&b, graph, *output, &mut copies)?;
            b.output(&format!("output{number}"), result, None)?;
        }
        Ok(b.finish())
    }
}

/// The copy of a node, with those of what it is made of.
fn copy(
    b: &Builder,
    graph: &Graph,
    i: usize,
    copies: &mut HashMap<usize, Tensor>,
) -> Result<Tensor, GraphError> {
    if let Some(copy) = copies.get(&i) {
        return Ok(*copy);
    }
    let node = &graph.nodes[i];
    let operands = node.operands.iter();
    let operands = operands.map(|operand| copy(b, graph, *operand as usize, copies));
    let operands: Vec<Tensor> = operands.collect::<Result<_, _>>()?;
    let copied = b.copy_node(node, &operands)?;
    copies.insert(i, copied);
    Ok(copied)
}

/// Whether a value is a number, or along the columns the same in all rows or in all that agree in their first dimensions.
fn is_shared(graph: &Graph, node: &Node) -> bool {
    let Op::BroadcastInDim { dims, .. } = &node.op else {
        return matches!(node.op, Op::Constant(_)) && node.shape.rank() == 0;
    };
    let source = &graph.nodes[node.operands[0] as usize];
    match dims[..] {
        [] => matches!(source.op, Op::Constant(_)),
        _ => emit::shared_by(dims, &source.shape.dims, &node.shape.dims).is_some(),
    }
}

/// Whether a value is one of each row, along the row.
fn is_spread(graph: &Graph, node: &Node) -> bool {
    let Op::BroadcastInDim { dims, result } = &node.op else {
        return false;
    };
    let rows = &graph.nodes[node.operands[0] as usize].shape.dims;
    let is_leading = dims.iter().copied().eq(0..rows.len());
    !rows.is_empty()
        && is_leading
        && result
            .split_last()
            .is_some_and(|(_, leading)| leading == rows)
}

/// Whether kernels compute a node element by element.
fn is_elementwise(graph: &Graph, node: &Node) -> bool {
    let from = |at: usize| graph.nodes[node.operands[at] as usize].shape.dtype;
    let dtype = node.shape.dtype;
    match &node.op {
        Op::Unary(kind) => emit::is_float(dtype) && emit::has_unary(*kind),
        Op::Binary(kind) => emit::is_float(dtype) && Binary::of(*kind).is_some(),
        Op::Compare(_) => emit::is_float(from(0)),
        Op::Select | Op::Clamp => emit::is_float(dtype),
        // Not of integers: the compiler rounds their sums in the product.
        Op::Convert(to) => emit::is_float(from(0)) && emit::is_stored(*to),
        _ => false,
    }
}

/// Whether a node is a value of bf16 in `f32`.
fn is_widened(graph: &Graph, node: &Node) -> bool {
    let from = || graph.nodes[node.operands[0] as usize].shape.dtype;
    matches!(node.op, Op::Convert(DType::F32)) && from() == DType::BF16
}

/// Whether kernels compute a node of whole rows.
fn is_of_rows(graph: &Graph, node: &Node) -> bool {
    let from = || &graph.nodes[node.operands[0] as usize].shape;
    let is_float = emit::is_float(node.shape.dtype);
    match &node.op {
        Op::Reduce { kind, dims } => {
            let is_last = matches!(dims[..], [last] if last + 1 == from().rank());
            is_float && is_last && Binary::of_reduction(*kind).is_some()
        }
        Op::Slice {
            start,
            limit,
            stride,
        } => {
            let whole = |d: usize| start[d] == 0 && limit[d] == from().dims[d];
            let leading = from().rank().saturating_sub(1);
            is_float && stride.iter().all(|step| *step == 1) && (0..leading).all(whole)
        }
        _ => false,
    }
}

/// Whether members reduce rows, have the same ones, and columns that kernels take.
fn has_rows(graph: &Graph, members: &[usize]) -> bool {
    let shapes = || members.iter().map(|i| &graph.nodes[*i]);
    let mut reductions = shapes().filter(|node| matches!(node.op, Op::Reduce { .. }));
    let Some(rows) = reductions.next().map(|node| &node.shape.dims[..]) else {
        return false;
    };
    shapes().all(|node| match node.shape.dims.split_last() {
        Some((columns, leading)) if leading == rows => emit::pieces(*columns).is_some(),
        _ => node.shape.dims == rows,
    })
}

/// Disjoint sets of nodes.
struct Sets(Vec<usize>);

impl Sets {
    fn root(&mut self, i: usize) -> usize {
        let mut at = i;
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.0[a.max(b)] = a.min(b);
    }
}
