//! Simulations of a program's kernels, beside the compiler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use regex::Regex;

use crate::report::{KernelCall, KernelCode, KernelCycles};
use crate::topology::Chip;

use super::cycles::{Simulated, Simulator};
use super::simulator_child::SimulationError;

/// Kernels that are simulated by threads of their own, each in a child process that takes one processor for seconds a kernel, for
/// convolutions minutes. Dropped, it ends them.
pub struct Simulations {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

struct Work {
    simulator: Simulator,
    /// The compiler's description of its build.
    compiler: String,
    chip: Chip,
    calls: Mutex<Calls>,
    stop: AtomicBool,
}

/// What is simulated has its code [`at_first_rows`].
#[derive(Default)]
struct Calls {
    /// What was ever to be simulated.
    known: BTreeSet<KernelCode>,
    /// What no thread has begun, the longest last.
    waiting: Vec<KernelCall>,
    done: BTreeMap<KernelCode, Simulated>,
}

impl Simulations {
    /// Begins with what a program is expected to call. One processor is left to the compiler.
    pub fn start(
        simulator: Simulator,
        compiler: String,
        chip: Chip,
        expected: BTreeSet<KernelCall>,
    ) -> Simulations {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads = processors.saturating_sub(1).max(1).min(expected.len());
        let work = Arc::new(Work {
            simulator,
            compiler,
            chip,
            calls: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        work.lock().expect_only(&expected);
        let threads = (0..threads).map(|_| {
            let work = Arc::clone(&work);
            thread::spawn(move || work.run())
        });
        Simulations {
            threads: threads.collect(),
            work,
        }
    }

    /// The cycles of `calls`, those of the compiled program. A kernel that cannot be simulated is left out: the report says so.
    pub fn finish(mut self, calls: BTreeSet<KernelCall>) -> BTreeMap<KernelCall, KernelCycles> {
        self.work.lock().expect_only(&calls);
        // The compiler's processor is free now.
        self.work.run();
        self.join();
        let done = &self.work.lock().done;
        let cycles = calls.into_iter().filter_map(|call| {
            let simulated = done.get(&at_first_rows(&call.code))?;
            let cycles = simulated.cycles(self.work.chip, &call);
            Some((call, cycles))
        });
        cycles.collect()
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A thread that panicked has told so, and its kernel has no time.
            let _ = thread.join();
        }
    }
}

impl Drop for Simulations {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Relaxed);
        self.join();
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Simulates what waits, until nothing does.
    fn run(&self) {
        let mut simulator = self.simulator.of_chip(self.chip, &self.compiler);
        while !self.stop.load(Ordering::Relaxed) {
            let Some(call) = self.lock().waiting.pop() else {
                return;
            };
            match simulator.simulated(&call, &self.stop) {
                Ok(simulated) => {
                    self.lock().done.insert(call.code, simulated);
                }
                Err(SimulationError::Stopped) => return,
                Err(error) => tracing::warn!(
                    "the time of the kernel {} is not predicted: {error}",
                    call.name
                ),
            }
        }
    }
}

impl Calls {
    /// Nothing but the kernels of `calls` is simulated from now on, and of these what was not known before.
    fn expect_only(&mut self, calls: &BTreeSet<KernelCall>) {
        let mut codes = BTreeSet::new();
        for call in calls {
            let code = at_first_rows(&call.code);
            if self.known.insert(code.clone()) {
                self.waiting.push(KernelCall {
                    code: code.clone(),
                    ..call.clone()
                });
            }
            codes.insert(code);
        }
        self.waiting.retain(|call| codes.contains(&call.code));
        self.waiting.sort_by_key(|call| call.flops);
    }
}

static FIRST_ROWS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"%from = arith\.constant [0-9]+ :").ok());

/// The code of a kernel that reads the first rows of larger arrays, whichever it reads: all take as long.
fn at_first_rows(code: &KernelCode) -> KernelCode {
    let text = FIRST_ROWS
        .as_ref()
        .map(|place| place.replace_all(&code.text, "%from = arith.constant 0 :"));
    KernelCode {
        text: text.map_or_else(|| code.text.clone(), Into::into),
        ..code.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::tpu::mosaic::{Kernel, Place, Window};
    use crate::dtype::DType;

    /// A kernel that reads a block of an array of 3 from the block `first` on.
    fn reading(first: usize) -> KernelCode {
        let x = Window {
            dtype: DType::BF16,
            array: [1, 96, 128],
            block: [32, 128],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let result = Window {
            array: [1, 32, 128],
            ..x
        };
        let mut kernel = Kernel::new(vec![1], vec![x, result]);
        assert!(kernel.read_rows(0, 32 * first, 96));
        let row = kernel.row(0);
        let x = kernel.load(0, row, 32);
        kernel.store(x, [0, 0]);
        KernelCode {
            text: kernel.text(),
            memory: 0,
            operands: vec!["1x96x128xbf16".to_owned()],
            result: "1x32x128xbf16".to_owned(),
        }
    }

    #[test]
    fn kernels_that_differ_by_the_rows_they_read_are_simulated_once() {
        let [first, other] = [0, 2].map(reading);
        assert_ne!(first, other);
        assert_eq!(at_first_rows(&first), first);
        assert_eq!(at_first_rows(&other), first);
    }
}
