//! What the calls of this backend's kernels have in common: their cost, their result on the host, and how they read entries of stacks.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Batch, Configuration, CustomCall, InferError, Rows, Stacks, constraint};
use crate::shape::Shape;

use super::mosaic::{CostEstimate, Kernel, evaluated};

/// A call of a kernel. Its operands are the kernel's windows, in order, and behind them is the result.
pub trait KernelCall: Any + Debug + Send + Sync {
    /// As [`CustomCall::name`].
    fn name(&self) -> &'static str;

    /// As [`CustomCall::batch`].
    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let _ = operands;
        None
    }

    /// As [`CustomCall::infer`].
    ///
    /// # Errors
    /// When the operands do not fit the kernel.
    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError>;

    /// The kernel of operands that fit it.
    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel>;

    /// Operations of products: multiply-adds times two.
    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let _ = (operands, result);
        0
    }

    fn transcendentals(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let _ = (operands, result);
        0
    }
}

/// Why a kernel has no result for these operands.
pub(super) fn refused(what: &'static str, call: &dyn Debug, operands: &[&Shape]) -> InferError {
    let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
    constraint(
        what,
        format!(
            "{} are not the operands of {call:?}, or no block fits the core's memory",
            found.join(", ")
        ),
    )
}

fn configuration(
    call: &dyn KernelCall,
    kernel: &Kernel,
    operands: &[&Shape],
    result: &Shape,
) -> String {
    kernel.backend_config(CostEstimate {
        flops: call.flops(operands, result),
        transcendentals: call.transcendentals(operands, result),
        bytes_accessed: kernel.bytes_moved(),
    })
}

impl<T: KernelCall> CustomCall for T {
    fn target(&self) -> &'static str {
        TARGET
    }

    fn name(&self) -> &'static str {
        KernelCall::name(self)
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        KernelCall::batch(self, operands)
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let text = KernelCall::infer(self, operands).ok().and_then(|result| {
            let kernel = self.kernel_of(operands)?;
            Some(configuration(self, &kernel, operands, &result))
        });
        Configuration::Text(text.unwrap_or_default())
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        KernelCall::infer(self, operands)
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        KernelCall::flops(self, operands, result)
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        evaluated(self.kernel_of(&shapes(operands)).as_ref(), operands, result)
    }

    fn in_stacks(self: Arc<Self>, stacks: &Stacks) -> Option<Arc<dyn CustomCall>> {
        Some(Arc::new(InStacks {
            call: self,
            stacks: stacks.clone(),
        }))
    }

    fn in_rows(
        self: Arc<Self>,
        rows: &[Option<Rows>],
        operands: &[&Shape],
        parts: usize,
    ) -> Option<Arc<dyn CustomCall>> {
        Some(Arc::new(InRows::of(self, rows, operands, parts)?))
    }
}

/// The custom call that Mosaic's modules are compiled for.
const TARGET: &str = "tpu_custom_call";

fn shapes<'v>(operands: &[&'v Value]) -> Vec<&'v Shape> {
    operands.iter().map(|operand| &operand.shape).collect()
}

/// A kernel some of whose operands are entries of stacks, or whose result is: it takes the number of the entry, and reads and writes
/// it where it lies ([`CustomCall::in_stacks`]).
#[derive(Debug)]
struct InStacks {
    call: Arc<dyn KernelCall>,
    stacks: Stacks,
}

/// What one call reads and writes.
struct Entries {
    operands: Vec<Shape>,
    result: Shape,
    /// Entries of the stack that the result is put into.
    count: Option<usize>,
}

impl Entries {
    fn shapes(&self) -> Vec<&Shape> {
        self.operands.iter().collect()
    }
}

impl InStacks {
    /// Those of these operands; `None` where they do not fit.
    fn entries(&self, operands: &[&Shape]) -> Option<Entries> {
        let (number, rest) = operands.split_first()?;
        let (own, stack) = rest.split_at_checked(self.stacks.operands.len())?;
        let entry = |shape: &Shape| {
            let dims = shape.dims.get(1..)?;
            Some(Shape::new(shape.dtype, dims))
        };
        let of = own.iter().zip(&self.stacks.operands);
        let operands: Option<Vec<Shape>> = of
            .map(|(shape, is_stack)| match is_stack {
                true => entry(shape),
                false => Some((*shape).clone()),
            })
            .collect();
        let operands = operands?;
        let result = KernelCall::infer(&*self.call, &operands.iter().collect::<Vec<_>>()).ok()?;
        let count = match (self.stacks.result, stack) {
            (false, []) => None,
            (true, [stack]) if entry(stack)? == result => Some(stack.dims[0]),
            _ => return None,
        };
        (**number == Shape::new(DType::S32, [1])).then_some(Entries {
            operands,
            result,
            count,
        })
    }

    fn kernel(&self, entries: &Entries) -> Option<Kernel> {
        let mut kernel = self.call.kernel_of(&entries.shapes())?;
        kernel.read_entries(&self.stacks.operands);
        if let Some(count) = entries.count {
            kernel.write_entry(count);
        }
        Some(kernel)
    }
}

impl CustomCall for InStacks {
    fn target(&self) -> &'static str {
        TARGET
    }

    fn name(&self) -> &'static str {
        self.call.name()
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let entries = self.entries(operands)?;
        let of = self.call.batch(&entries.shapes())?;
        let pairs = of.operands.iter().zip(&self.stacks.operands);
        let own = pairs.map(|(dim, is_stack)| dim.map(|dim| dim + usize::from(*is_stack)));
        let result = of.result + usize::from(self.stacks.result);
        let stack = self.stacks.result.then_some(Some(result));
        Some(Batch {
            operands: [None].into_iter().chain(own).chain(stack).collect(),
            result,
        })
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let text = self.entries(operands).and_then(|entries| {
            let kernel = self.kernel(&entries)?;
            let (operands, result) = (entries.shapes(), &entries.result);
            Some(configuration(&*self.call, &kernel, &operands, result))
        });
        Configuration::Text(text.unwrap_or_default())
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let entries = self
            .entries(operands)
            .ok_or_else(|| refused(self.call.name(), self, operands))?;
        Ok(match operands.last().filter(|_| self.stacks.result) {
            Some(stack) => (*stack).clone(),
            None => entries.result,
        })
    }

    fn flops(&self, operands: &[&Shape], _: &Shape) -> u64 {
        let entries = self.entries(operands);
        entries.map_or(0, |of| self.call.flops(&of.shapes(), &of.result))
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        let entries = self.entries(&shapes(operands));
        let kernel = entries.and_then(|entries| self.kernel(&entries));
        evaluated(kernel.as_ref(), operands, result)
    }

    fn replaces(&self, operands: usize) -> Option<usize> {
        self.stacks.result.then(|| operands - 1)
    }
}

/// A kernel some of whose operands are rows of larger arrays ([`CustomCall::in_rows`]).
#[derive(Debug)]
struct InRows {
    call: Arc<dyn KernelCall>,
    rows: Vec<Option<Rows>>,
}

impl InRows {
    /// `None` where the kernel cannot read a part of the batch so.
    fn of(
        call: Arc<dyn KernelCall>,
        rows: &[Option<Rows>],
        operands: &[&Shape],
        parts: usize,
    ) -> Option<InRows> {
        let call = InRows {
            call,
            rows: rows.to_vec(),
        };
        let batch = KernelCall::batch(&call, operands)?;
        let pairs = operands.iter().zip(&batch.operands);
        let of_part: Vec<Shape> = pairs.map(|(shape, dim)| shape.part(*dim, parts)).collect();
        call.kernel_of(&of_part.iter().collect::<Vec<_>>())?;
        Some(call)
    }

    /// The shapes that the kernel alone has; `None` where these have no such rows.
    fn own(&self, operands: &[&Shape]) -> Option<Vec<Shape>> {
        let own = |(shape, rows): (&&Shape, &Option<Rows>)| match (rows, &shape.dims[..]) {
            (None, _) => Some((*shape).clone()),
            (Some(rows), &[batch, all, columns]) if rows.first + rows.count <= all => {
                let dims = match rows.is_merged {
                    true => [1, batch * rows.count, columns],
                    false => [batch, rows.count, columns],
                };
                Some(Shape::new(shape.dtype, dims))
            }
            (Some(_), _) => None,
        };
        let is_known = operands.len() == self.rows.len();
        let own = operands.iter().zip(&self.rows).map(own);
        own.collect::<Option<Vec<Shape>>>().filter(|_| is_known)
    }
}

impl KernelCall for InRows {
    fn name(&self) -> &'static str {
        self.call.name()
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let own = self.own(operands)?;
        let mut batch = self.call.batch(&own.iter().collect::<Vec<_>>())?;
        for (dim, rows) in batch.operands.iter_mut().zip(&self.rows) {
            match (dim, rows) {
                (Some(dim), Some(rows)) if rows.is_merged && *dim == 1 => *dim = 0,
                (None, Some(_)) => return None,
                _ => {}
            }
        }
        Some(batch)
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let own = self.own(operands);
        let own = own.ok_or_else(|| refused("kernel of rows", self, operands))?;
        self.call.infer(&own.iter().collect::<Vec<_>>())
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let own = self.own(operands)?;
        let mut kernel = self.call.kernel_of(&own.iter().collect::<Vec<_>>())?;
        for (window, (rows, shape)) in self.rows.iter().zip(operands).enumerate() {
            let Some(rows) = rows else { continue };
            // Those of several entries do not lie together.
            let lies_together = !rows.is_merged || shape.dims[0] == 1;
            if !lies_together || !kernel.read_rows(window, rows.first, shape.dims[1]) {
                return None;
            }
        }
        Some(kernel)
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let own = self.own(operands).unwrap_or_default();
        self.call.flops(&own.iter().collect::<Vec<_>>(), result)
    }

    fn transcendentals(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let own = self.own(operands).unwrap_or_default();
        self.call
            .transcendentals(&own.iter().collect::<Vec<_>>(), result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::GatedGelu;
    use super::super::mosaic::VMEM_BYTES;
    use super::*;
    use crate::graph::{Builder, Op, evaluate};
    use crate::host_tensor::HostTensor;

    const GATED: GatedGelu = GatedGelu {
        derivative: false,
        memory: VMEM_BYTES,
    };

    /// What a call gives for these operands.
    fn run(call: Arc<dyn CustomCall>, operands: &[HostTensor]) -> Vec<f64> {
        let b = Builder::new();
        let inputs = operands.iter().enumerate().map(|(i, operand)| {
            b.input(&format!("input{i}"), operand.shape.clone(), &[])
                .unwrap()
        });
        let y = b.push(Op::CustomCall(call), &inputs.collect::<Vec<_>>());
        b.output("y", y.unwrap(), None).unwrap();
        let found = evaluate(&b.finish(), operands).unwrap();
        found[0].to_f64_vec().unwrap()
    }

    fn values(shape: &Shape) -> HostTensor {
        let values = (0..shape.count()).map(|i| ((i * 37 + i / 5) % 61) as f64 / 20.0 - 1.5);
        HostTensor::from_f64(shape.clone(), &values.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn entries_are_read_and_written_where_they_lie() {
        let x = values(&Shape::new(DType::BF16, [3, 1, 32, 256]));
        let stack = values(&Shape::new(DType::BF16, [3, 1, 32, 128]));
        let [all, before] = [&x, &stack].map(|x| x.to_f64_vec().unwrap());
        let in_stacks = |result: bool| {
            let operands = vec![true];
            Arc::new(GATED)
                .in_stacks(&Stacks { operands, result })
                .unwrap()
        };
        let mut results = Vec::new();
        for at in 0..3 {
            let own = &all[at * 32 * 256..][..32 * 256];
            let own = HostTensor::from_f64(Shape::new(DType::BF16, [1, 32, 256]), own).unwrap();
            let result = run(Arc::new(GATED), &[own]);
            let number = HostTensor::from_f64(Shape::new(DType::S32, [1]), &[at as f64]).unwrap();
            let read = run(in_stacks(false), &[number.clone(), x.clone()]);
            assert_eq!(read, result);
            let written = run(in_stacks(true), &[number, x.clone(), stack.clone()]);
            let mut expected = before.clone();
            expected[at * 32 * 128..][..32 * 128].copy_from_slice(&result);
            assert_eq!(written, expected);
            results.push(result);
        }
        assert_ne!(results[0], results[1]);
    }
}
