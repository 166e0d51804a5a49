//! Simulations of a program's kernels, beside the compiler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

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
    chip: Chip,
    calls: Mutex<Calls>,
    stop: AtomicBool,
}

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
    pub fn start(simulator: Simulator, chip: Chip, expected: BTreeSet<KernelCall>) -> Simulations {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads = processors.saturating_sub(1).max(1).min(expected.len());
        let work = Arc::new(Work {
            simulator,
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
            let simulated = done.get(&call.code)?;
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
        let mut simulator = self.simulator.of_chip(self.chip);
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
        let codes: BTreeSet<&KernelCode> = calls.iter().map(|call| &call.code).collect();
        self.waiting.retain(|call| codes.contains(&call.code));
        for call in calls {
            if self.known.insert(call.code.clone()) {
                self.waiting.push(call.clone());
            }
        }
        self.waiting.sort_by_key(|call| call.flops);
    }
}
