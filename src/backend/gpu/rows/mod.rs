//! Operations on the rows of arrays, many at once: one kernel reads each row, and computes norms, ranges, rounding and what stands
//! between them without memory.
//!
//! XLA's compiler makes a kernel of its own of each reduction and of what reads it: between two products of a transformer in int8
//! or fp8 there are five or six, and as many passes over the rows.

mod emit;
mod find;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use crate::graph::eval::Value;
use crate::graph::{
    Attribute, Configuration, CustomCall, Graph, GraphError, InferError, Node, Op, constraint,
};
use crate::shape::Shape;

use super::triton;
use find::Group;

/// The graph with a kernel in place of each group of operations on rows in which one depends on a reduction of its row: of a
/// program of one device, without composites.
///
/// # Errors
/// When the graph is ill-typed.
pub fn fuse(graph: &Graph) -> Result<Graph, GraphError> {
    let mut graph = graph.clone().without_repeats();
    for node in &mut graph.nodes {
        if let Op::While { body, .. } = &mut node.op {
            **body = fuse(body)?;
        }
    }
    let mut fused = Vec::new();
    for group in find::groups(&graph) {
        if let Some(kernel) = RowKernel::new(group.body(&graph)?) {
            fused.push((group, Arc::new(kernel)));
        }
    }
    Ok(match fused.is_empty() {
        true => graph,
        false => with_kernels(&graph, &fused),
    })
}

type Fused = (Group, Arc<RowKernel>);

/// The graph with calls in place of the groups. Nodes keep their order where the calls allow it.
fn with_kernels(graph: &Graph, groups: &[Fused]) -> Graph {
    let mut copied = Copied {
        graph,
        nodes: Vec::with_capacity(graph.nodes.len()),
        places: vec![0; graph.nodes.len()],
    };
    for unit in Units::new(graph, groups).in_order() {
        match unit {
            Unit::Node(i) => copied.node(i),
            Unit::Group(number) => copied.group(&groups[number]),
        }
    }
    let mut outputs = graph.outputs.clone();
    for output in &mut outputs {
        output.node = copied.places[output.node as usize];
    }
    Graph {
        nodes: copied.nodes,
        inputs: graph.inputs.clone(),
        outputs,
        scopes: graph.scopes.clone(),
    }
}

/// A node that stays as it is, or a group.
#[derive(Clone, Copy)]
enum Unit {
    Node(usize),
    Group(usize),
}

/// What the new graph computes one after the other. Places in `units` are its numbers.
struct Units<'a> {
    graph: &'a Graph,
    groups: &'a [Fused],
    units: Vec<Unit>,
    /// The unit of each node.
    of: Vec<usize>,
}

impl<'a> Units<'a> {
    fn new(graph: &'a Graph, groups: &'a [Fused]) -> Units<'a> {
        let mut units: Vec<Unit> = (0..groups.len()).map(Unit::Group).collect();
        let mut group_of: HashMap<usize, usize> = HashMap::new();
        for (number, (group, _)) in groups.iter().enumerate() {
            group_of.extend(group.members.iter().map(|member| (*member, number)));
        }
        let of = (0..graph.nodes.len()).map(|i| {
            group_of.get(&i).copied().unwrap_or_else(|| {
                units.push(Unit::Node(i));
                units.len() - 1
            })
        });
        let of = of.collect();
        Units {
            graph,
            groups,
            units,
            of,
        }
    }

    fn reads(&self, unit: usize) -> Vec<usize> {
        match self.units[unit] {
            Unit::Node(i) => {
                let operands = self.graph.nodes[i].operands.iter();
                operands.map(|operand| self.of[*operand as usize]).collect()
            }
            Unit::Group(number) => {
                let inputs = self.groups[number].0.inputs.iter();
                inputs.map(|input| self.of[*input]).collect()
            }
        }
    }

    /// Which units the outputs are computed of, and the inputs. Some copies of what a group computes are the group's alone.
    fn needed(&self) -> Vec<bool> {
        let mut needed: Vec<bool> = self.units.iter().map(|unit| self.is_input(unit)).collect();
        let outputs = self.graph.outputs.iter();
        let mut found: Vec<usize> = outputs.map(|o| self.of[o.node as usize]).collect();
        while let Some(unit) = found.pop() {
            if !std::mem::replace(&mut needed[unit], true) {
                found.extend(self.reads(unit));
            }
        }
        needed
    }

    fn is_input(&self, unit: &Unit) -> bool {
        match unit {
            Unit::Node(i) => matches!(self.graph.nodes[*i].op, Op::Parameter(_)),
            Unit::Group(_) => false,
        }
    }

    /// The node whose place a unit has.
    fn place(&self, unit: usize) -> usize {
        match self.units[unit] {
            Unit::Node(i) => i,
            Unit::Group(number) => self.groups[number].0.outputs[0],
        }
    }

    /// Those that are needed, each after what it reads.
    fn in_order(&self) -> Vec<Unit> {
        let needed = self.needed();
        let mut waits = vec![0; self.units.len()];
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); self.units.len()];
        let mut ready = BinaryHeap::new();
        for unit in (0..self.units.len()).filter(|unit| needed[*unit]) {
            let reads = self.reads(unit);
            waits[unit] = reads.len();
            if reads.is_empty() {
                ready.push(Reverse((self.place(unit), unit)));
            }
            reads.iter().for_each(|read| readers[*read].push(unit));
        }
        let mut ordered = Vec::new();
        while let Some(Reverse((_, unit))) = ready.pop() {
            ordered.push(self.units[unit]);
            for reader in &readers[unit] {
                waits[*reader] -= 1;
                if waits[*reader] == 0 {
                    ready.push(Reverse((self.place(*reader), *reader)));
                }
            }
        }
        ordered
    }
}

/// The nodes of the new graph, and where those of the old one are in it.
struct Copied<'a> {
    graph: &'a Graph,
    nodes: Vec<Node>,
    places: Vec<u32>,
}

impl Copied<'_> {
    fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn node(&mut self, i: usize) {
        let mut node = self.graph.nodes[i].clone();
        for operand in &mut node.operands {
            *operand = self.places[*operand as usize];
        }
        self.places[i] = self.push(node);
    }

    fn group(&mut self, (group, kernel): &Fused) {
        let inputs = group.inputs.iter().map(|input| self.places[*input]);
        let first = &self.graph.nodes[group.outputs[0]];
        let call = Node {
            op: Op::CustomCall(kernel.clone()),
            operands: inputs.collect(),
            shape: first.shape.clone(),
            scope: first.scope,
            remat: None,
        };
        let call = self.push(call);
        for (number, output) in group.outputs.iter().enumerate() {
            let node = &self.graph.nodes[*output];
            self.places[*output] = match group.outputs.len() {
                1 => call,
                _ => self.push(Node {
                    op: Op::GetTupleElement(number),
                    operands: vec![call],
                    shape: node.shape.clone(),
                    scope: node.scope,
                    remat: None,
                }),
            };
        }
    }
}

/// A group as a kernel. Its body says what it computes, and is what its text is made of.
#[derive(Clone, Debug)]
pub struct RowKernel {
    body: Graph,
    kernel: triton::Kernel,
}

impl RowKernel {
    /// `None` if a kernel does not take an operation of the body.
    fn new(body: Graph) -> Option<RowKernel> {
        let kernel = emit::kernel(&body)?;
        Some(RowKernel { body, kernel })
    }

    fn results(&self) -> Vec<Shape> {
        let outputs = self.body.outputs.iter();
        outputs
            .map(|output| self.body.nodes[output.node as usize].shape.clone())
            .collect()
    }
}

const NAME: &str = "rows";

impl CustomCall for RowKernel {
    fn target(&self) -> &'static str {
        "__gpu$xla.gpu.triton"
    }

    fn name(&self) -> &'static str {
        NAME
    }

    fn configuration(&self, _: &[&Shape]) -> Configuration {
        Configuration::Attributes(vec![
            ("name", Attribute::Text(NAME.to_owned())),
            ("ir", Attribute::Text(self.kernel.text(NAME))),
            ("num_warps", Attribute::I32(self.kernel.warps as i32)),
            ("num_stages", Attribute::I32(1)),
            ("grid_x", Attribute::I32(self.kernel.programs as i32)),
            ("grid_y", Attribute::I32(1)),
            ("grid_z", Attribute::I32(1)),
        ])
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let inputs = self.body.inputs.iter().map(|input| &input.shape);
        match inputs.eq(operands.iter().copied()) {
            true => Ok(self.results().swap_remove(0)),
            false => Err(constraint(
                "a kernel of rows",
                format!("operands {operands:?} are not those that it was made for"),
            )),
        }
    }

    fn others(&self) -> Vec<Shape> {
        self.results().split_off(1)
    }

    fn body(&self) -> Option<&Graph> {
        Some(&self.body)
    }

    fn flops(&self, _: &[&Shape], _: &Shape) -> u64 {
        0
    }

    fn evaluate(&self, operands: &[&Value], first: Shape) -> Value {
        self.evaluate_all(operands, first).swap_remove(0)
    }

    fn evaluate_all(&self, operands: &[&Value], _: Shape) -> Vec<Value> {
        triton::evaluated(&self.kernel, operands, &self.results())
    }
}
