//! Runs of equal blocks as loops.
//!
//! A transformer is dozens of blocks that differ in their weights alone. As one loop they are compiled once, and the
//! program is as small as one of them. The pass looks at the finished graph, so no model says what repeats: the
//! derivative's blocks are rolled as those of the forward pass are, and values go from one loop to the other as stacks.

mod lists;

use std::collections::{BTreeMap, HashMap};

use lists::{entry, lists};

use super::scopes::BACKWARD;
use super::stack::{entry_of, merged, place_in, run_of, stack};
use super::stage::Known;
use super::{Builder, Comparison, Graph, GraphError, Node, Op, Output, Tensor};
use crate::dtype::DType;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph with a loop in place of each run of at least `shortest` equal blocks, of which each takes what the one
/// before it gives. Blocks are lists in the checkpoint, `transformer_blocks.0`, `transformer_blocks.1` and so on, and equal
/// if they have the same operations in the same places.
///
/// What is known before the step ([`super::stage`], with the inputs of a `request`) stays outside: stacks of weights, along a
/// new first dimension, are made once. `None` for a program without stages, where all is computed in every run.
///
/// # Errors
/// None for a well-typed graph.
pub fn roll(graph: Graph, request: Option<&[&str]>, shortest: usize) -> Result<Graph> {
    let shortest = shortest.max(2);
    let lists = lists(&graph, shortest);
    let mut graph = graph;
    let mut done = 0;
    let mut is_rolled = false;
    // A loop changes the numbers of all nodes.
    while let Some((list, rolled)) = first_rolled(&graph, request, &lists[done..], shortest)? {
        graph = rolled;
        done += list;
        is_rolled = true;
    }
    match is_rolled {
        true => merged(&graph),
        false => Ok(graph),
    }
}

/// The number of the first list with blocks that can be a loop, and the graph with that loop.
fn first_rolled(
    graph: &Graph,
    request: Option<&[&str]>,
    lists: &[String],
    shortest: usize,
) -> Result<Option<(usize, Graph)>> {
    let known = match request {
        Some(request) => Known::new(graph, request),
        None => Known::in_one_stage(graph),
    };
    let live = graph.live_nodes();
    for (number, list) in lists.iter().enumerate() {
        if let Some(rolled) = Blocks::of(graph, &known, &live, list).rolled(shortest)? {
            return Ok(Some((number, rolled)));
        }
    }
    Ok(None)
}

/// Whether these are blocks of the derivative.
fn is_derivative(list: &str) -> bool {
    list.starts_with(BACKWARD)
}

/// The blocks of one list.
struct Blocks<'g> {
    graph: &'g Graph,
    list: &'g str,
    /// By the number of a block, its nodes in the order of the graph.
    nodes: BTreeMap<usize, Vec<u32>>,
    /// For each node in a block, the block and the place in it.
    places: Vec<Option<(usize, usize)>>,
    /// By scope, what follows the block's number.
    rests: Vec<Option<(usize, &'g str)>>,
    live: &'g [bool],
    known: &'g Known<'g>,
}

/// A value that a block takes from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// The same in each block.
    Invariant,
    /// What the block before computes at this place; the first takes something else.
    Carried(usize),
    /// One for each block.
    Stacked,
}

/// What is used of a block's value outside the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    /// That of the last block.
    Last,
    /// Those of all.
    All,
    /// Those of all, and what the first block takes where the others take them, by the number of its slot. In one stack they are what
    /// the blocks take, which their derivative wants.
    WithFirst(usize),
}

/// Values that blocks take from outside.
struct Slot {
    /// Their nodes, in the loop's order.
    values: Vec<u32>,
    how: Taken,
    /// What blocks take as another shape of the values.
    dims: Option<Vec<usize>>,
    /// What vectors are in a stack of them: rows, `[1, 1, features]`, where blocks take them as nothing else, as kernels do. Rows of a
    /// matrix lie in tiles with those of other blocks.
    row: Option<Vec<usize>>,
}

/// Equal blocks that can be a loop.
struct Run<'g> {
    list: &'g str,
    /// The number of the first and of the last block.
    range: [usize; 2],
    /// Whether the loop begins with the last block.
    descends: bool,
    /// The nodes of each block, in the loop's order.
    blocks: Vec<Vec<u32>>,
    /// For each operand from outside, by its block's node and the operand's number, its number in `taken`.
    slots: HashMap<(usize, usize), usize>,
    /// What comes from outside.
    taken: Vec<Slot>,
    /// What is used outside, by place.
    given: BTreeMap<usize, Given>,
    /// The places of other shapes of what is used outside, which are used there too, with the places of that.
    shapes: BTreeMap<usize, usize>,
    /// By scope, what follows the block's number.
    rests: Vec<Option<(usize, &'g str)>>,
    /// Nodes that depend on the run, or are in it.
    after: Vec<bool>,
    live: &'g [bool],
}

impl<'g> Blocks<'g> {
    fn of(graph: &'g Graph, known: &'g Known<'g>, live: &'g [bool], list: &'g str) -> Blocks<'g> {
        let rests: Vec<_> = graph.scopes.iter().map(|path| entry(path, list)).collect();
        let mut nodes: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        let mut places = vec![None; graph.nodes.len()];
        for (id, node) in graph.nodes.iter().enumerate() {
            let Some((block, _)) = rests[node.scope as usize] else {
                continue;
            };
            let id = id as u32;
            let is_input = matches!(node.op, Op::Parameter(_));
            if !is_input && live[id as usize] && known.is_in_step(id) {
                let block_nodes = nodes.entry(block).or_default();
                places[id as usize] = Some((block, block_nodes.len()));
                block_nodes.push(id);
            }
        }
        Blocks {
            graph,
            list,
            nodes,
            places,
            rests,
            live,
            known,
        }
    }

    /// The graph with a loop in place of the first run that can be one.
    fn rolled(&self, shortest: usize) -> Result<Option<Graph>> {
        let mut ranges: Vec<[usize; 2]> = Vec::new();
        for &block in self.nodes.keys() {
            match ranges.last_mut() {
                Some([_, last]) if *last + 1 == block && self.are_equal(*last, block) => {
                    *last = block;
                }
                _ => ranges.push([block, block]),
            }
        }
        let mut long = ranges
            .into_iter()
            .filter(|[first, last]| last - first + 1 >= shortest);
        let run = long.find_map(|range| self.run(range, false).or_else(|| self.run(range, true)));
        run.map(|run| run.rolled(self.graph)).transpose()
    }

    /// Whether two blocks have the same operations in the same places.
    fn are_equal(&self, one: usize, other: usize) -> bool {
        let [in_one, in_other] = [one, other].map(|block| &self.nodes[&block]);
        let place_in = |block: usize, operand: u32| {
            let (own, place) = self.places[operand as usize]?;
            (own == block).then_some(place)
        };
        in_one.len() == in_other.len()
            && in_one.iter().zip(in_other).all(|(&a, &b)| {
                let [left, right] = [a, b].map(|id| &self.graph.nodes[id as usize]);
                let rest = |node: &Node| self.rests[node.scope as usize].map(|(_, rest)| rest);
                let operands = left.operands.iter().zip(&right.operands);
                left.shape == right.shape
                    && rest(left) == rest(right)
                    && left.operands.len() == right.operands.len()
                    && operands
                        .into_iter()
                        .all(|(&x, &y)| place_in(one, x) == place_in(other, y))
                    && left.op == right.op
            })
    }

    /// The run of blocks `first` to `last`, if it is a chain in this order.
    fn run(&self, [first, last]: [usize; 2], descends: bool) -> Option<Run<'g>> {
        let mut blocks: Vec<&Vec<u32>> = (first..=last).map(|block| &self.nodes[&block]).collect();
        if descends {
            blocks.reverse();
        }
        let step = |id: u32| {
            let (block, place) = self.places[id as usize]?;
            let at = (first..=last).contains(&block).then_some(block)?;
            Some((if descends { last - at } else { at - first }, place))
        };
        let after = self.after(&blocks);
        let mut slots = HashMap::new();
        let mut taken: Vec<Slot> = Vec::new();
        let mut known: HashMap<Vec<u32>, usize> = HashMap::new();
        for (place, id) in blocks[0].iter().enumerate() {
            let operands = &self.graph.nodes[*id as usize].operands;
            for number in 0..operands.len() {
                let of =
                    |block: &Vec<u32>| self.graph.nodes[block[place] as usize].operands[number];
                if step(of(blocks[0])).is_some_and(|(at, _)| at == 0) {
                    continue;
                }
                let values: Vec<u32> = blocks.iter().map(|block| of(block)).collect();
                let slot = match known.get(&values) {
                    Some(slot) => *slot,
                    None => {
                        let how = self.taken(&values, &step, &after)?;
                        known.insert(values.clone(), taken.len());
                        taken.push(self.slot(values, how));
                        taken.len() - 1
                    }
                };
                slots.insert((place, number), slot);
            }
        }
        let is_chain = taken
            .iter()
            .any(|slot| matches!(slot.how, Taken::Carried(_)));
        is_chain.then_some(())?;
        for number in 0..taken.len() {
            taken[number].row = self.row(blocks[0], &slots, &taken, number);
        }
        let (mut given, shapes) = self.given(&blocks, &step, &after)?;
        for (number, slot) in taken.iter().enumerate() {
            if let Taken::Carried(place) = slot.how
                && let root = shapes.get(&place).unwrap_or(&place)
                && let Some(of_place @ Given::All) = given.get_mut(root)
                && self.is_used_behind(slot.values[0], &blocks, &after)
            {
                *of_place = Given::WithFirst(number);
            }
        }
        Some(Run {
            list: self.list,
            range: [first, last],
            descends,
            blocks: blocks.into_iter().cloned().collect(),
            slots,
            taken,
            given,
            shapes,
            rests: self.rests.clone(),
            after,
            live: self.live,
        })
    }

    /// Which nodes are of the step and in `blocks`, or depend on such nodes. What else is in blocks is made again in the loop,
    /// and stays for what uses it outside.
    fn after(&self, blocks: &[&Vec<u32>]) -> Vec<bool> {
        let mut after = vec![false; self.graph.nodes.len()];
        for id in blocks.iter().copied().flatten() {
            after[*id as usize] = self.known.is_of_step(*id);
        }
        for (id, node) in self.graph.nodes.iter().enumerate() {
            after[id] |= node.operands.iter().any(|operand| after[*operand as usize]);
        }
        after
    }

    /// Whether something that depends on the blocks, and is not in them, uses a value that is computed before them.
    fn is_used_behind(&self, id: u32, blocks: &[&Vec<u32>], after: &[bool]) -> bool {
        let is_input = matches!(self.graph.nodes[id as usize].op, Op::Parameter(_));
        let mut nodes = self.graph.nodes.iter().enumerate();
        !is_input
            && nodes.any(|(at, node)| {
                let is_behind = after[at] && self.live[at] && node.operands.contains(&id);
                is_behind && !blocks.iter().any(|block| block.contains(&(at as u32)))
            })
    }

    /// Whether a node stands for several values, which a carry cannot hold as one.
    fn has_several_results(&self, id: u32) -> bool {
        let op = &self.graph.nodes[id as usize].op;
        matches!(op, Op::OptimizationBarrier | Op::While { .. })
    }

    /// How the blocks take these values, one each. `None` if no loop can: a block needs what another one than that before
    /// it computes, or what is computed from it outside.
    fn taken(
        &self,
        values: &[u32],
        step: &dyn Fn(u32) -> Option<(usize, usize)>,
        after: &[bool],
    ) -> Option<Taken> {
        let is_before = |id: &u32| !after[*id as usize];
        if values.iter().any(|id| self.has_several_results(*id)) {
            return None;
        }
        let first = values[0];
        if let Some((0, place)) = values.get(1).and_then(|id| step(*id)) {
            let mut rest = values.iter().enumerate().skip(1);
            let follows = rest.all(|(at, id)| step(*id) == Some((at - 1, place)));
            return (follows && is_before(&first)).then_some(Taken::Carried(place));
        }
        match values.iter().all(is_before) {
            true if values.iter().all(|id| *id == first) => Some(Taken::Invariant),
            true => Some(Taken::Stacked),
            false => None,
        }
    }

    /// Values from outside as blocks take them: stacks are of what they are other shapes of, as kernels gave it.
    fn slot(&self, mut values: Vec<u32>, how: Taken) -> Slot {
        let node = |id: &u32| &self.graph.nodes[*id as usize];
        let shape = |id: &u32| &node(id).shape;
        let dims = shape(&values[0]).dims.clone();
        let is_other_shape = |id: &u32| {
            matches!(node(id).op, Op::Reshape(_)) && place_in(self.graph, *id as usize).is_none()
        };
        while how == Taken::Stacked && values.iter().all(is_other_shape) {
            let of: Vec<u32> = values.iter().map(|id| node(id).operands[0]).collect();
            if of.iter().any(|id| shape(id) != shape(&of[0])) {
                break;
            }
            values = of;
        }
        let is_same = shape(&values[0]).dims == dims;
        Slot {
            values,
            how,
            dims: (!is_same).then_some(dims),
            row: None,
        }
    }

    /// The dimensions of the rows that a block takes of a stack of vectors, if it takes nothing else of slot `number`.
    fn row(
        &self,
        block: &[u32],
        slots: &HashMap<(usize, usize), usize>,
        taken: &[Slot],
        number: usize,
    ) -> Option<Vec<usize>> {
        let slot = &taken[number];
        let of = &self.graph.nodes[slot.values[0] as usize].shape;
        let [features] = of.dims[..] else {
            return None;
        };
        let row = vec![1, 1, features];
        let is_stack = slot.how == Taken::Stacked && slot.dims.is_none();
        let mut users = slots.iter().filter(|(_, slot)| **slot == number);
        let are_rows =
            users.all(|((place, operand), _)| self.takes_row(block, block[*place], *operand, &row));
        (is_stack && are_rows).then_some(row)
    }

    /// Whether node `user` of a block takes an operand as such a row, or a derivative does behind the barrier that it is.
    fn takes_row(&self, block: &[u32], user: u32, operand: usize, row: &[usize]) -> bool {
        match &self.graph.nodes[user as usize].op {
            Op::Reshape(dims) => dims == row,
            Op::OptimizationBarrier if is_derivative(self.list) => {
                let node = |id: &u32| &self.graph.nodes[*id as usize];
                let value = Op::GetTupleElement(operand);
                let is_value = |id: &u32| node(id).operands == [user] && node(id).op == value;
                block.iter().all(|id| {
                    let mut operands = node(id).operands.iter().enumerate();
                    operands.all(|(at, of)| !is_value(of) || self.takes_row(block, *id, at, row))
                })
            }
            _ => false,
        }
    }

    /// The places whose values are used outside the run; those that are other shapes of what the block computes, with the places of that,
    /// which are used in their stead. `None` if one of them has several results.
    fn given(
        &self,
        blocks: &[&Vec<u32>],
        step: &dyn Fn(u32) -> Option<(usize, usize)>,
        after: &[bool],
    ) -> Option<(BTreeMap<usize, Given>, BTreeMap<usize, usize>)> {
        let mut given: BTreeMap<usize, Given> = BTreeMap::new();
        let mut shapes = BTreeMap::new();
        let nodes = self.graph.nodes.iter().enumerate();
        let is_outside = |id: usize| step(id as u32).is_none() || !after[id];
        let users = nodes.filter(|(id, _)| self.live[*id] && is_outside(*id));
        let used = users.flat_map(|(_, node)| node.operands.iter().copied());
        let results = self.graph.outputs.iter().map(|output| output.node);
        for id in used.chain(results) {
            let Some((at, used)) = step(id).filter(|_| after[id as usize]) else {
                continue;
            };
            let mut root = (id, used);
            while let Op::Reshape(_) = self.graph.nodes[root.0 as usize].op {
                let of = self.graph.nodes[root.0 as usize].operands[0];
                match step(of) {
                    Some((own, place)) if own == at && after[of as usize] => root = (of, place),
                    _ => break,
                }
            }
            let (id, place) = root;
            if place != used {
                shapes.insert(used, place);
            }
            if self.has_several_results(id) {
                return None;
            }
            let how = match at + 1 == blocks.len() {
                true => Given::Last,
                false => Given::All,
            };
            let known = given.entry(place).or_insert(how);
            if how == Given::All {
                *known = how;
            }
        }
        Some((given, shapes))
    }
}

impl Run<'_> {
    fn count(&self) -> usize {
        self.blocks.len()
    }

    /// The graph with the loop in place of the run.
    fn rolled(&self, graph: &Graph) -> Result<Graph> {
        let b = Builder::new();
        // Entries of nodes that are dead or in the loop are never read.
        let mut copies = vec![
            Tensor {
                graph: u32::MAX,
                id: 0
            };
            graph.nodes.len()
        ];
        let inputs = graph.inputs.iter();
        let inputs = inputs
            .map(|input| b.declare(input.clone()))
            .collect::<Result<Vec<_>>>()?;
        let copy = |copies: &mut [Tensor], is_chosen: &dyn Fn(usize) -> bool| -> Result<()> {
            for (id, node) in graph
                .nodes
                .iter()
                .enumerate()
                .filter(|(id, _)| is_chosen(*id))
            {
                copies[id] = match node.op {
                    Op::Parameter(index) => inputs[index],
                    _ => {
                        let operands: Vec<Tensor> =
                            node.operands.iter().map(|o| copies[*o as usize]).collect();
                        let at = b.at(graph.path(node)).in_region(node.remat);
                        at.copy_node(node, &operands)?
                    }
                };
            }
            Ok(())
        };
        let mut in_run = vec![false; graph.nodes.len()];
        for id in self.blocks.iter().flatten() {
            in_run[*id as usize] = true;
        }
        // The rest stays where it is: other blocks, whose order counts, have values too that do not depend on this run.
        let before = self.before(graph);
        copy(&mut copies, &|id| before[id])?;
        for (id, tensor) in self.call(&b, graph, &copies)? {
            copies[id as usize] = tensor;
        }
        copy(&mut copies, &|id| {
            self.live[id] && !before[id] && !(in_run[id] && self.after[id])
        })?;
        for output in &graph.outputs {
            b.push_output(Output {
                node: copies[output.node as usize].index() as u32,
                ..output.clone()
            });
        }
        Ok(b.finish())
    }

    /// Which nodes the loop's inputs depend on, or are.
    fn before(&self, graph: &Graph) -> Vec<bool> {
        let mut before = vec![false; graph.nodes.len()];
        for id in self.taken.iter().flat_map(|slot| &slot.values) {
            before[*id as usize] = !self.after[*id as usize];
        }
        for (id, node) in graph.nodes.iter().enumerate().rev() {
            if before[id] {
                for operand in &node.operands {
                    before[*operand as usize] = true;
                }
            }
        }
        before
    }

    /// The loop, and what stands for the values that are used outside.
    fn call(&self, b: &Builder, graph: &Graph, copies: &[Tensor]) -> Result<Vec<(u32, Tensor)>> {
        let [first, last] = self.range;
        let path = format!("{}.{first}-{last}", self.list);
        let b = &b.at(&path);
        let copy = |id: u32| copies[id as usize];
        // The carry: the counter, what blocks take, what they give.
        let mut carry = vec![b.scalar(DType::S32, 0.0)?];
        // In stacks that are carried, the places of the entries of the first block.
        let mut firsts = Vec::with_capacity(self.taken.len());
        for slot in &self.taken {
            let (value, first) = match slot.how {
                Taken::Invariant | Taken::Carried(_) => (copy(slot.values[0]), 0),
                Taken::Stacked => {
                    let mut values: Vec<Tensor> = slot.values.iter().map(|id| copy(*id)).collect();
                    if self.descends {
                        values.reverse();
                    }
                    let (stack, first) = match run_of(b, &values) {
                        Some(found) => found,
                        None => (stack(b, &values)?, 0),
                    };
                    let whole = slot.row.as_ref().map(|row| {
                        let dims = [&b.dims(stack)[..1], row].concat();
                        b.reshape(stack, &dims)
                    });
                    (whole.transpose()?.unwrap_or(stack), first)
                }
            };
            carry.push(value);
            firsts.push(first);
        }
        for (place, how) in self.kept() {
            let mut shape = graph.nodes[self.blocks[0][place] as usize].shape.clone();
            match how {
                Given::Last => {}
                Given::All => shape.dims.insert(0, self.count()),
                Given::WithFirst(_) => shape.dims.insert(0, self.count() + 1),
            }
            let stack = b.uninitialized(shape);
            carry.push(match how {
                Given::Last | Given::All => stack,
                Given::WithFirst(slot) => {
                    let number = if self.descends { self.count() } else { 0 };
                    let number = b.scalar(DType::S32, number as f64)?;
                    with_entry(b, stack, copy(self.taken[slot].values[0]), number)?
                }
            });
        }
        let holds = |r: &Builder, carry: &[Tensor]| {
            let end = r.scalar(DType::S32, self.count() as f64)?;
            r.compare(Comparison::Lt, carry[0], end)
        };
        let body = |r: &Builder, carry: &[Tensor]| self.body(r, graph, &path, &firsts, carry);
        let results = b.while_loop(&carry, holds, body)?;
        let mut outside = Vec::new();
        let last_block = &self.blocks[self.count() - 1];
        for (slot, result) in self.taken.iter().zip(&results[1..]) {
            if let Taken::Carried(place) = slot.how {
                outside.push((last_block[place], *result));
                if let Some(root) = self.shapes.get(&place) {
                    let root = last_block[*root];
                    let dims = &graph.nodes[root as usize].shape.dims;
                    outside.push((root, b.reshape(*result, dims)?));
                }
            }
        }
        for ((place, how), result) in self.kept().zip(&results[1 + self.taken.len()..]) {
            match how {
                Given::Last => outside.push((last_block[place], *result)),
                Given::All => {
                    for (at, block) in self.blocks.iter().enumerate() {
                        outside.push((block[place], entry_of(b, *result, self.number(at))?));
                    }
                }
                // The last block's is carried.
                Given::WithFirst(slot) => {
                    let first = if self.descends { self.count() } else { 0 };
                    let taken = self.taken[slot].values[0];
                    let value = entry_of(b, *result, first)?;
                    let dims = &graph.nodes[taken as usize].shape.dims;
                    outside.push((taken, b.reshape(value, dims)?));
                    let behind = usize::from(!self.descends);
                    let blocks = self.blocks[..self.count() - 1].iter();
                    for (at, block) in blocks.enumerate() {
                        let value = entry_of(b, *result, self.number(at) + behind)?;
                        outside.push((block[place], value));
                    }
                }
            }
        }
        let roots: HashMap<u32, Tensor> = outside.iter().copied().collect();
        for (place, root) in &self.shapes {
            for block in &self.blocks {
                if let Some(value) = roots.get(&block[*root]) {
                    let dims = &graph.nodes[block[*place] as usize].shape.dims;
                    outside.push((block[*place], b.reshape(*value, dims)?));
                }
            }
        }
        Ok(outside)
    }

    /// What is used outside and has a place of its own in the carry: all but the last values of what blocks hand on.
    fn kept(&self) -> impl Iterator<Item = (usize, Given)> {
        let carried = |place: usize| {
            let mut taken = self.taken.iter();
            taken.any(|slot| slot.how == Taken::Carried(place))
        };
        let given = self.given.iter().map(|(place, how)| (*place, *how));
        given.filter(move |(place, how)| *how != Given::Last || !carried(*place))
    }

    /// The place in stacks of the block that the loop comes to at `at`.
    fn number(&self, at: usize) -> usize {
        match self.descends {
            true => self.count() - 1 - at,
            false => at,
        }
    }

    /// What a block takes of a slot, whose entries of stacks begin with the place `first`.
    fn value(
        &self,
        r: &Builder,
        slot: usize,
        carry: &[Tensor],
        number: Tensor,
        first: usize,
    ) -> Result<Tensor> {
        let value = match self.taken[slot].how {
            Taken::Invariant | Taken::Carried(_) => carry[1 + slot],
            Taken::Stacked => {
                let number = match first {
                    0 => number,
                    _ => r.add(number, r.scalar(DType::S32, first as f64)?)?,
                };
                dynamic_entry(r, carry[1 + slot], number)?
            }
        };
        match &self.taken[slot].dims {
            Some(dims) => r.reshape(value, dims),
            None => Ok(value),
        }
    }

    /// One block: the next carry.
    fn body(
        &self,
        r: &Builder,
        graph: &Graph,
        path: &str,
        firsts: &[usize],
        carry: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let counter = carry[0];
        let number = match self.descends {
            true => r.sub(r.scalar(DType::S32, self.count() as f64 - 1.0)?, counter)?,
            false => counter,
        };
        let mut values: Vec<Option<Tensor>> = vec![None; self.taken.len()];
        let mut copies: Vec<Tensor> = Vec::with_capacity(self.blocks[0].len());
        let places: HashMap<u32, usize> = self.blocks[0]
            .iter()
            .enumerate()
            .map(|(place, id)| (*id, place))
            .collect();
        // What keeps the compiler from sharing values between a block and its derivative keeps nothing apart in here: the
        // block itself is in another loop. It would only keep entries of stacks out of the operations that read them.
        let is_derivative = is_derivative(self.list);
        let mut barred: HashMap<usize, Vec<Tensor>> = HashMap::new();
        for (place, id) in self.blocks[0].iter().enumerate() {
            let node = &graph.nodes[*id as usize];
            let mut operands = Vec::with_capacity(node.operands.len());
            for (at, operand) in node.operands.iter().enumerate() {
                operands.push(match self.slots.get(&(place, at)) {
                    None => copies[places[operand]],
                    Some(&slot) => match values[slot] {
                        Some(value) => value,
                        None => {
                            let value = self.value(r, slot, carry, number, firsts[slot])?;
                            *values[slot].insert(value)
                        }
                    },
                });
            }
            let rest = self.rests[node.scope as usize].map_or("", |(_, rest)| rest);
            let results = |id: &u32| barred.get(places.get(id)?);
            let copy = match &node.op {
                Op::OptimizationBarrier if is_derivative => operands[0],
                Op::GetTupleElement(at) if let Some(all) = results(&node.operands[0]) => all[*at],
                _ => r.at(format!("{path}{rest}")).copy_node(node, &operands)?,
            };
            copies.push(copy);
            if is_derivative && matches!(node.op, Op::OptimizationBarrier) {
                barred.insert(place, operands);
            }
        }
        let one = r.scalar(DType::S32, 1.0)?;
        let mut next = vec![r.add(counter, one)?];
        for (slot, of) in self.taken.iter().enumerate() {
            next.push(match of.how {
                Taken::Carried(place) => copies[place],
                Taken::Invariant | Taken::Stacked => carry[1 + slot],
            });
        }
        let before = &carry[1 + self.taken.len()..];
        for ((place, how), before) in self.kept().zip(before) {
            next.push(match how {
                Given::Last => copies[place],
                Given::All => with_entry(r, *before, copies[place], number)?,
                Given::WithFirst(_) => {
                    let behind = match self.descends {
                        true => number,
                        false => r.add(number, one)?,
                    };
                    with_entry(r, *before, copies[place], behind)?
                }
            });
        }
        Ok(next)
    }
}

/// Entry `number` of a stack, where only the program knows the number.
fn dynamic_entry(b: &Builder, stack: Tensor, number: Tensor) -> Result<Tensor> {
    let mut dims = b.dims(stack);
    dims[0] = 1;
    let entry = b.dynamic_slice(stack, &start(b, number, dims.len())?, &dims)?;
    b.reshape(entry, &dims[1..])
}

/// The stack with another entry `number`.
fn with_entry(b: &Builder, stack: Tensor, value: Tensor, number: Tensor) -> Result<Tensor> {
    let mut dims = b.dims(stack);
    dims[0] = 1;
    let value = b.reshape(value, &dims)?;
    b.dynamic_update_slice(stack, value, &start(b, number, dims.len())?)
}

fn start(b: &Builder, number: Tensor, rank: usize) -> Result<Vec<Tensor>> {
    let zero = b.scalar(DType::S32, 0.0)?;
    let mut start = vec![zero; rank];
    start[0] = number;
    Ok(start)
}

#[cfg(test)]
mod tests;
