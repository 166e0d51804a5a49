//! Kernels in loops that read entries of stacks, and put their results into stacks, where these lie.
//!
//! A loop over equal blocks takes what differs between them as stacks, and gives what is used behind it as stacks. The compiler's own
//! operations read and write entries in place; for a kernel each entry would be copied.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, CustomCall, Graph, GraphError, Node, Op, Stacks, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph, in whose loops kernels take entries of stacks by their number. Where several `devices` share a batch, each may have only
/// its part of other stacks, such as weights: they would have to be gathered whole, so their entries stay sliced, but for vectors.
///
/// # Errors
/// None for a well-typed graph.
pub fn in_stacks(graph: &Graph, devices: usize) -> Result<Graph> {
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let Op::While { cond, body } = &node.op else {
            return Ok(None);
        };
        let op = Op::While {
            cond: cond.clone(),
            body: Box::new(Body::of(body, devices).rewritten()?),
        };
        let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
        b.push(op, &operands).map(Some)
    })
}

/// An entry of a stack. Numbers are nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    stack: u32,
    /// Its place in the stack.
    number: u32,
}

/// The body of a loop.
struct Body<'g> {
    graph: &'g Graph,
    devices: usize,
    /// The stacks that results of kernels are put into, by the kernel's node.
    written: HashMap<usize, Entry>,
    /// The kernel whose result alone is put into a stack, by the node that puts it there.
    writes: HashMap<usize, usize>,
}

impl<'g> Body<'g> {
    fn of(graph: &'g Graph, devices: usize) -> Body<'g> {
        let mut body = Body {
            graph,
            devices,
            written: HashMap::new(),
            writes: HashMap::new(),
        };
        let mut readers = vec![0; graph.nodes.len()];
        let live = graph.live_nodes();
        for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| *live) {
            for operand in &node.operands {
                readers[*operand as usize] += 1;
            }
        }
        for output in &graph.outputs {
            readers[output.node as usize] += 1;
        }
        for (i, node) in graph.nodes.iter().enumerate() {
            let Some((call, entry)) = body.written_by(node) else {
                continue;
            };
            // Nothing reads what was there before, and the result is in one stack alone.
            let is_own = readers[entry.stack as usize] == 1 && !body.written.contains_key(&call);
            if is_own {
                body.written.insert(call, entry);
                body.writes.insert(i, call);
            }
        }
        body
    }

    fn node(&self, id: u32) -> &'g Node {
        &self.graph.nodes[id as usize]
    }

    /// The kernel whose result this node puts into a stack that the loop carries, and where.
    fn written_by(&self, node: &Node) -> Option<(usize, Entry)> {
        let (Op::DynamicUpdateSlice, [stack, value, start @ ..]) = (&node.op, &node.operands[..])
        else {
            return None;
        };
        let is_carried = matches!(self.node(*stack).op, Op::Parameter(_));
        let entry = self.entry(*stack, &self.node(*value).shape.dims, start)?;
        let call = self.origin(*value);
        let is_call = matches!(&self.node(call).op, Op::CustomCall(call) if call.in_place() == 0 && call.others().is_empty());
        (is_carried && is_call && self.lies_alike(call, entry)).then_some((call as usize, entry))
    }

    /// The entry of a stack at `start`, if a slice of `dims` there is one.
    fn entry(&self, stack: u32, dims: &[usize], start: &[u32]) -> Option<Entry> {
        let (first, rest) = dims.split_first()?;
        let (number, others) = start.split_first()?;
        let is_zero = |id: &u32| match &self.node(*id).op {
            Op::Constant(value) => value.to_f64_vec().is_ok_and(|values| values == [0.0]),
            _ => false,
        };
        let is_entry = *first == 1 && *rest == self.node(stack).shape.dims[1..];
        (is_entry && others.iter().all(is_zero)).then_some(Entry {
            stack,
            number: *number,
        })
    }

    /// What a node is without reshapes and marks, and without shardings: those of a kernel's operands and result are told with its
    /// call.
    fn origin(&self, mut id: u32) -> u32 {
        while let Op::Reshape(_) | Op::Stored | Op::ShardingConstraint(_) = self.node(id).op {
            id = self.node(id).operands[0];
        }
        id
    }

    /// Whether the stack with its entries in the shape of a kernel's operand or result, `id`, is the same memory: tiles of rows and
    /// columns stay what they are.
    fn lies_alike(&self, id: u32, entry: Entry) -> bool {
        let [own, stack] = [id, entry.stack].map(|id| &self.node(id).shape);
        let tile = 8 * 32 / own.dtype.bits().max(1);
        let ([.., rows, columns], [_, .., of_rows, of_columns]) = (&own.dims[..], &stack.dims[..])
        else {
            return false;
        };
        let in_tiles = |rows: &usize| rows.is_multiple_of(tile);
        let is_known = own.rank() == 3 && stack.rank() > 2 && own.dtype != DType::U32;
        is_known
            && columns == of_columns
            && (rows == of_rows || [rows, of_rows].into_iter().all(in_tiles))
    }

    /// The entry of a stack that an operand of a kernel is: one that is sliced, or one that the kernel of a node in `stacks` put there.
    fn read(&self, operand: u32, stacks: &HashMap<usize, Tensor>) -> Option<Entry> {
        let at = self.origin(operand);
        let entry = match (&self.node(at).op, &self.node(at).operands[..]) {
            (Op::DynamicSlice(dims), [stack, start @ ..]) => self.entry(*stack, dims, start)?,
            (Op::CustomCall(_), _) if stacks.contains_key(&(at as usize)) => {
                *self.written.get(&(at as usize))?
            }
            _ => return None,
        };
        self.lies_alike(operand, entry).then_some(entry)
    }

    fn rewritten(&self) -> Result<Graph> {
        // The stacks with results of kernels in place, by the kernel's node.
        let mut stacks: HashMap<usize, Tensor> = HashMap::new();
        self.graph.substitute(&mut |b, i, copies| {
            let node = &self.graph.nodes[i];
            match &node.op {
                Op::CustomCall(call) => self.call(b, i, call, copies, &mut stacks),
                Op::DynamicUpdateSlice => {
                    let stack = self.writes.get(&i).and_then(|call| stacks.get(call));
                    let whole = stack.map(|stack| b.reshape(*stack, &node.shape.dims));
                    whole.transpose()
                }
                _ => Ok(None),
            }
        })
    }

    fn call(
        &self,
        b: &Builder,
        i: usize,
        call: &Arc<dyn CustomCall>,
        copies: &[Tensor],
        stacks: &mut HashMap<usize, Tensor>,
    ) -> Result<Option<Tensor>> {
        let node = &self.graph.nodes[i];
        let copy = |id: u32| copies[id as usize];
        let written = self.written.get(&i).copied();
        let mut entries: Vec<Option<Entry>> = node
            .operands
            .iter()
            .map(|operand| self.read(*operand, stacks))
            .collect();
        let shapes: Vec<&Shape> = node
            .operands
            .iter()
            .map(|id| &self.node(*id).shape)
            .collect();
        let batch = call.batch(&shapes);
        for (at, entry) in entries.iter_mut().enumerate() {
            let is_of_batch = batch
                .as_ref()
                .is_some_and(|batch| batch.operands[at].is_some());
            let is_vector = shapes[at].dims.last() == Some(&shapes[at].count());
            *entry = entry.filter(|_| is_of_batch || is_vector || self.devices == 1);
        }
        let Some(of) = entries.iter().copied().chain([written]).flatten().next() else {
            return Ok(None);
        };
        // One number is told.
        entries
            .iter_mut()
            .for_each(|entry| *entry = entry.filter(|entry| entry.number == of.number));
        let written = written.filter(|entry| entry.number == of.number);
        let of_stacks = Stacks {
            operands: entries.iter().map(Option::is_some).collect(),
            result: written.is_some(),
        };
        let Some(call) = Arc::clone(call).in_stacks(&of_stacks) else {
            return Ok(None);
        };
        let whole = |stack: Tensor, own: &[usize]| {
            let dims = [&b.dims(stack)[..1], own].concat();
            b.reshape(stack, &dims)
        };
        let mut operands = vec![b.reshape(copy(of.number), &[1])?];
        for (operand, entry) in node.operands.iter().zip(&entries) {
            let own = &self.node(*operand).shape.dims;
            operands.push(match entry {
                None => copy(*operand),
                Some(entry) => {
                    let by_kernel = stacks.get(&(self.origin(*operand) as usize));
                    whole(by_kernel.copied().unwrap_or(copy(entry.stack)), own)?
                }
            });
        }
        let dims = &node.shape.dims;
        if let Some(entry) = written {
            operands.push(whole(copy(entry.stack), dims)?);
        }
        let y = b.push(Op::CustomCall(call), &operands)?;
        if written.is_none() {
            return Ok(Some(y));
        }
        stacks.insert(i, y);
        let zero = b.scalar(DType::S32, 0.0)?;
        let mut start = vec![zero; dims.len() + 1];
        start[0] = copy(of.number);
        let own = b.dynamic_slice(y, &start, &[&[1], &dims[..]].concat())?;
        b.reshape(own, dims).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::super::GatedGelu;
    use super::super::mosaic::VMEM_BYTES;
    use super::*;
    use crate::graph::{Comparison, evaluate};
    use crate::host_tensor::HostTensor;

    const BLOCKS: usize = 3;

    fn bf16(dims: &[usize]) -> Shape {
        Shape::new(DType::BF16, dims)
    }

    /// A loop over entries of a stack, `tokens` rows of 256 columns each: their gated GELU goes into a stack of results, and from there
    /// into a sum; the rows as one of `rows` for the kernel.
    fn looped(tokens: usize, rows: usize) -> Graph {
        let b = Builder::new();
        let x = bf16(&[BLOCKS, rows / tokens, tokens, 256]);
        let x = b.input("x", x, &[]).unwrap();
        let kept = b.uninitialized(bf16(&[BLOCKS, rows / tokens, tokens, 128]));
        let sum = b.full(&bf16(&[1, rows, 128]), 0.0).unwrap();
        let zero = b.scalar(DType::S32, 0.0).unwrap();
        let holds = |r: &Builder, carry: &[Tensor]| {
            let end = r.scalar(DType::S32, BLOCKS as f64)?;
            r.compare(Comparison::Lt, carry[0], end)
        };
        let results = b.while_loop(&[zero, x, kept, sum], holds, |r, carry| {
            let start = |rank: usize| -> Result<Vec<Tensor>> {
                let mut start = vec![r.scalar(DType::S32, 0.0)?; rank];
                start[0] = carry[0];
                Ok(start)
            };
            let dims = r.dims(carry[1]);
            let own = r.dynamic_slice(carry[1], &start(4)?, &[&[1], &dims[1..]].concat())?;
            let own = r.reshape(own, &dims[1..])?;
            let own = r.reshape(own, &[1, rows, 256])?;
            let call = GatedGelu {
                derivative: false,
                memory: VMEM_BYTES,
            };
            let y = r.push(Op::CustomCall(Arc::new(call)), &[own])?;
            let entry = r.reshape(y, &[1, rows / tokens, tokens, 128])?;
            let kept = r.dynamic_update_slice(carry[2], entry, &start(4)?)?;
            let one = r.scalar(DType::S32, 1.0)?;
            Ok(vec![
                r.add(carry[0], one)?,
                carry[1],
                kept,
                r.add(carry[3], y)?,
            ])
        });
        for (name, result) in ["kept", "sum"].into_iter().zip(&results.unwrap()[2..]) {
            b.output(name, *result, None).unwrap();
        }
        b.finish()
    }

    /// Calls of loops that take the number of an entry, and slices and updates beside them.
    fn counts(graph: &Graph) -> [usize; 3] {
        let mut counts = [0; 3];
        for body in graph.nodes.iter().filter_map(|node| match &node.op {
            Op::While { body, .. } => Some(body),
            _ => None,
        }) {
            let live = body.live_nodes();
            for (node, _) in body.nodes.iter().zip(live).filter(|(_, live)| *live) {
                match &node.op {
                    Op::CustomCall(_) => {
                        let first = &body.nodes[node.operands[0] as usize].shape;
                        counts[0] += usize::from(*first == Shape::new(DType::S32, [1]));
                    }
                    Op::DynamicSlice(_) => counts[1] += 1,
                    Op::DynamicUpdateSlice => counts[2] += 1,
                    _ => {}
                }
            }
        }
        counts
    }

    #[test]
    fn kernels_of_loops_read_and_write_stacks() {
        // Rows of one image, and of two, whose tiles stay; what is added up is sliced from the results.
        let cases = [(32, 32, [1, 1, 0]), (16, 32, [1, 1, 0]), (8, 32, [0, 1, 1])];
        for (tokens, rows, expected) in cases {
            let graph = looped(tokens, rows);
            let found = in_stacks(&graph, 1).unwrap();
            assert_eq!(counts(&found), expected, "{tokens} of {rows}");
            let shape = &graph.inputs[0].shape;
            let values = (0..shape.count()).map(|i| ((i * 37 + i / 7) % 61) as f64 / 20.0 - 1.5);
            let x = HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap();
            let [before, after] =
                [&graph, &found].map(|g| evaluate(g, std::slice::from_ref(&x)).unwrap());
            assert_eq!(before, after);
        }
    }
}
