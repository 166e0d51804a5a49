//! Cycles of kernels, simulated by the TPU compiler without a TPU.
//!
//! The compiler predicts no time for kernels that are not its own. But if libtpu is loaded with the flag
//! `--xla_jf_dump_static_llo_profile_to`, it simulates every operation that it compiles: it unrolls loops and the steps
//! of grids, and models stalls of the matrix units and the latency of transfers. So a [`Simulator`] compiles
//! programs of one kernel each in a child process, and reads the file that libtpu writes of each.
//!
//! The simulation takes about a second for 15,000 cycles, so of a large grid only some steps are simulated, and once
//! more of them: the difference is what a step takes without the transfers before the first one and after the last. The
//! simulation knows the latency of transfers but not the bandwidth of HBM, so no kernel is faster than its bytes.
//!
//! Of a kernel whose smallest part takes longer the loops are simulated with fewer trips, two and three of which tell what all take: a part
//! of an attention's gradients with all trips takes 27 s, as what the simulation takes grows faster than the trips. Its cycles do not: from the second on
//! each adds as many.
//!
//! Two cores of a v4 or a v5p share the steps of a grid: simulated for a v5p, 1, 3 and 9 steps took as long as 1, 2 and
//! 5 steps of one core. So the parts that are compared keep both busy.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use crate::backend::tpu::mosaic::backend_config;
use crate::report::{KernelCall, KernelCode, KernelCycles, VliwBundles};
use crate::runtime::ExecutableCache;
use crate::topology::{Accelerator, Chip, Format};

use super::grid::{Grid, MOST_CYCLES};
use super::kept_cycles::KeptCycles;
use super::simulator_child::{SimulationError, SimulatorChild};
use super::trips::Trips;
use super::vliw;

/// If all steps of the last dimension compute more than this, or wait longer for HBM, some of them are simulated, and a step of the others
/// counts as so many of the last. Such are convolutions, each part of which takes seconds to compile and simulate, however small. Of an
/// attention's eight, two said 8 % less than all. The gradients of an attention with 2e10 took six minutes on a v5p, and more memory than
/// a machine of 24 GB had. That is the same for chips of other peak rates: what is simulated are instructions.
const MOST_FLOPS_OF_LAST: f64 = 1e10;
const MOST_HBM_CYCLES_OF_LAST: f64 = 75_000.0;

/// What the simulation of a kernel told.
#[derive(Debug, Clone)]
pub struct Simulated {
    cycles: f64,
    bundles: Option<VliwBundles>,
    /// The share of the kernel's grid that was simulated.
    share: f64,
}

/// Starts the child processes.
#[derive(Debug, Clone)]
pub struct Simulator {
    program: PathBuf,
    bundles: bool,
    /// Where cycles are kept, if they are.
    cache: Option<ExecutableCache>,
}

impl Simulator {
    /// `program` is `maxdiff-rs`, or another that calls [`crate::cli::main`].
    pub fn new(program: PathBuf) -> Simulator {
        Simulator {
            program,
            bundles: false,
            cache: None,
        }
    }

    /// Keeps cycles beside the programs of `cache`, and reads those that are there. Bundles are counted anew.
    pub fn with_cache(self, cache: Option<ExecutableCache>) -> Simulator {
        Simulator { cache, ..self }
    }

    /// Also counts the bundles of a kernel's code. That takes as long again as compiling it, for large convolutions twice as long.
    pub fn with_bundles(self) -> Simulator {
        Simulator {
            bundles: true,
            ..self
        }
    }

    /// Simulates kernels for `chip`; the child process is started with the first. `compiler` is the compiler's own description of its
    /// build.
    pub fn of_chip(&self, chip: Chip, compiler: &str) -> ChipSimulator {
        let cache = self.cache.as_ref().filter(|_| !self.bundles);
        ChipSimulator {
            simulator: self.clone(),
            chip,
            kept: cache.map(|cache| KeptCycles::new(cache, compiler)),
            child: None,
        }
    }
}

/// Simulates kernels for a chip, in one child process as long as it lives: starting one and loading libtpu takes 0.6 s.
pub struct ChipSimulator {
    simulator: Simulator,
    chip: Chip,
    kept: Option<KeptCycles>,
    child: Option<SimulatorChild>,
}

impl ChipSimulator {
    /// The cycles of a kernel's call on one device. Once `stop` is set, the child process is ended.
    ///
    /// # Errors
    /// When the child process cannot be started, its compiler refuses the kernel, or it is stopped.
    pub fn simulated(
        &mut self,
        call: &KernelCall,
        stop: &AtomicBool,
    ) -> Result<Simulated, SimulationError> {
        let chip = self.chip;
        // Those of the last part. All parts have the same, unless one runs a loop once.
        let mut bundles = None;
        let mut simulate = |grid: Option<&Grid>, trips: Option<&Trips>| {
            let (cycles, of_part) = self.simulate(&module(&call.code, grid, trips), stop)?;
            bundles = of_part;
            Ok::<f64, SimulationError>(cycles as f64)
        };
        let whole = Grid::of(&call.code.text);
        let cores = chip.cores_per_device();
        let hbm = hbm_cycles(chip, call);
        let least = product_cycles(chip, call).max(hbm);
        let work = (call.flops as f64 / MOST_FLOPS_OF_LAST).max(hbm / MOST_HBM_CYCLES_OF_LAST);
        let parts = whole.and_then(|whole| {
            let parts = whole.parts(least, work, cores)?;
            Some((whole, parts))
        });
        let Some((whole, parts)) = parts else {
            return Ok(Simulated {
                cycles: simulate(None, None)?,
                bundles,
                share: 1.0,
            });
        };
        let least_of_part = least / whole.steps() as f64 * parts[0].steps() as f64;
        let trips = Trips::few(&call.code.text).filter(|_| least_of_part > MOST_CYCLES);
        let times = parts.iter().map(|part| {
            let Some([few, more]) = &trips else {
                return simulate(Some(part), None);
            };
            let of_few = simulate(Some(part), Some(few))?;
            let each = (simulate(Some(part), Some(more))? - of_few)
                / (more.simulated - few.simulated) as f64;
            Ok(of_few + each * (few.common - few.simulated) as f64)
        });
        let times: Vec<f64> = times.collect::<Result<_, _>>()?;
        let most = parts.iter().map(Grid::steps).max().unwrap_or(1);
        let of_trips = trips.map_or(1.0, |[_, more]| more.simulated as f64 / more.common as f64);
        Ok(Simulated {
            cycles: whole.extrapolated(&parts, &times, cores),
            bundles,
            share: most as f64 / whole.steps() as f64 * of_trips,
        })
    }

    /// The cycles of all operations of a StableHLO module together, and the bundles of the one with the most.
    fn simulate(
        &mut self,
        stablehlo: &str,
        stop: &AtomicBool,
    ) -> Result<(u64, Option<VliwBundles>), SimulationError> {
        let kept = self.kept.as_ref();
        if let Some(cycles) = kept.and_then(|kept| kept.read(self.chip, stablehlo)) {
            return Ok((cycles, None));
        }
        let mut child = match self.child.take() {
            Some(child) => child,
            None => {
                let accelerator = Accelerator::smallest(self.chip);
                let accelerator = accelerator.ok_or(SimulationError::NotTpu(self.chip))?;
                let Simulator {
                    program, bundles, ..
                } = &self.simulator;
                SimulatorChild::start(program, &accelerator.name, *bundles)?
            }
        };
        let lives = child.compile(stablehlo, stop)?;
        // libtpu may end the process after it has written: only the files count.
        let files = child.take_files()?;
        let cycles = files.profiles.iter().filter_map(|text| cycles_of(text));
        let cycles = cycles.reduce(|one, other| one + other);
        let bundles = files.bundles.iter().filter_map(|text| vliw::parse(text));
        let bundles = bundles.max_by_key(|bundles| bundles.count);
        let result = cycles.ok_or_else(|| SimulationError::NoResult(child.last_words()));
        let result = result.map(|cycles| (cycles, bundles));
        self.child = lives.then_some(child);
        if let (Some(kept), Ok((cycles, _))) = (&self.kept, &result) {
            kept.write(self.chip, stablehlo, *cycles);
        }
        result
    }
}

impl Simulated {
    /// The cycles of `call`, whose code is the one that was simulated.
    pub fn cycles(&self, chip: Chip, call: &KernelCall) -> KernelCycles {
        let hbm_cycles = hbm_cycles(chip, call);
        let product_cycles = product_cycles(chip, call);
        KernelCycles {
            // The simulation knows nothing of HBM's bandwidth, and lets some kernels multiply faster than the chip can.
            cycles: self.cycles.max(hbm_cycles).max(product_cycles) as u64,
            hbm_cycles: hbm_cycles as u64,
            product_cycles: product_cycles as u64,
            simulated_share: self.share,
            bundles: self.bundles.clone(),
        }
    }
}

/// What a call's products take at the chip's peak rate; 0 where its clock is not known, as nothing is then known of how cycles and
/// seconds compare.
fn product_cycles(chip: Chip, call: &KernelCall) -> f64 {
    let format = match call.multiplies_int8() {
        true => Format::Int8,
        false => Format::Bf16,
    };
    let peak = chip.peak(format).unwrap_or(f64::INFINITY);
    call.flops as f64 / peak * chip.clock_hz().unwrap_or(0.0)
}

/// What a call's bytes take at the bandwidth of HBM; 0 where the clock is not known.
fn hbm_cycles(chip: Chip, call: &KernelCall) -> f64 {
    call.bytes as f64 / chip.hbm_bytes_per_second() as f64 * chip.clock_hz().unwrap_or(0.0)
}

/// The cycles in libtpu's text: `hlo_op_estimate { estimated_cycles: 42 num_equivalent_hlos: 1 }`.
fn cycles_of(text: &str) -> Option<u64> {
    let number = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
        line?.parse::<u64>().ok()
    };
    Some(number("estimated_cycles")? * number("num_equivalent_hlos").unwrap_or(1))
}

/// The configuration of a call of `code`, with another grid and fewer trips if such are given.
fn configuration(code: &KernelCode, grid: Option<&Grid>, trips: Option<&Trips>) -> String {
    let text = Cow::from(&code.text);
    let text = grid.map_or(text.clone(), |grid| grid.put_into(&text).into());
    let text = trips.map_or(text.clone(), |trips| trips.put_into(&text).into());
    backend_config(&text, code.memory, None)
}

/// A StableHLO module of one call of `code`, with another grid and fewer trips of loops if such are given. Its arguments and its result have the call's layouts: the compiler would otherwise
/// choose others for some, and add copies, which would be simulated too, for minutes, and count as the kernel's.
fn module(code: &KernelCode, grid: Option<&Grid>, trips: Option<&Trips>) -> String {
    let places = 0..code.operands.len();
    let names: Vec<String> = places.map(|i| format!("%arg{i}")).collect();
    let with_layout = |of: &String| {
        let order = order(of);
        format!("tensor<{of}> {{mhlo.layout_mode = \"{{{order}}}\"}}")
    };
    let arguments = names.iter().zip(&code.operands);
    let arguments: Vec<String> = arguments
        .map(|(name, of)| format!("{name}: {}", with_layout(of)))
        .collect();
    let types = code.operands.iter().map(|of| format!("tensor<{of}>"));
    let types: Vec<String> = types.collect();
    let layouts: Vec<String> = code.operands.iter().map(|of| row_major(of)).collect();
    format!(
        "module @kernel {{\n  func.func public @main({}) -> ({}) {{\n    \
         %0 = stablehlo.custom_call @tpu_custom_call({}) {{backend_config = \"{}\", operand_layouts = [{}], \
         result_layouts = [{}]}} : ({}) -> tensor<{result}>\n    return %0 : tensor<{result}>\n  }}\n}}\n",
        arguments.join(", "),
        with_layout(&code.result),
        names.join(", "),
        configuration(code, grid, trips)
            .replace('\\', "\\5C")
            .replace('"', "\\22"),
        layouts.join(", "),
        row_major(&code.result),
        types.join(", "),
        result = code.result,
    )
}

/// The dimensions of an array of a type from the one that changes fastest, row-major.
fn order(of: &str) -> String {
    let rank = of.matches('x').count();
    let order: Vec<String> = (0..rank).rev().map(|d| d.to_string()).collect();
    order.join(",")
}

/// The layout of an array of a type in StableHLO.
fn row_major(of: &str) -> String {
    let rank = of.matches('x').count();
    format!("dense<[{}]> : tensor<{rank}xindex>", order(of)).replace("<[]>", "<>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(bounds: &str) -> KernelCode {
        KernelCode {
            text: format!("iteration_bounds = array<i64: {bounds}>, dimension_semantics"),
            memory: 0,
            operands: vec!["2x64x320xbf16".to_owned(), "f32".to_owned()],
            result: "2x64x320xbf16".to_owned(),
        }
    }

    #[test]
    fn arguments_and_result_have_the_calls_layouts() {
        let text = module(&code("1"), None, None);
        let main = text.lines().nth(1).unwrap();
        assert_eq!(
            main.trim(),
            r#"func.func public @main(%arg0: tensor<2x64x320xbf16> {mhlo.layout_mode = "{2,1,0}"}, %arg1: tensor<f32> {mhlo.layout_mode = "{}"}) -> (tensor<2x64x320xbf16> {mhlo.layout_mode = "{2,1,0}"}) {"#
        );
        assert!(text.contains(
            "operand_layouts = [dense<[2,1,0]> : tensor<3xindex>, dense<> : tensor<0xindex>]"
        ));
    }

    #[test]
    fn no_kernel_is_faster_than_its_chip() {
        let of = |cycles: f64, flops: u64, bytes: u64| {
            let simulated = Simulated {
                cycles,
                bundles: None,
                share: 1.0,
            };
            let call = KernelCall {
                name: "attention".to_owned(),
                code: code("1"),
                flops,
                bytes,
            };
            simulated.cycles(Chip::V5e, &call).cycles
        };
        // 197 TFLOPS and 819 GB/s at 1.5 GHz.
        assert_eq!(of(1e4, 131_333_333, 0), 1e4 as u64);
        assert_eq!(of(1e4, 13_133_333_333, 0), 99_999);
        assert_eq!(of(1e4, 0, 54_600_000), 100_000);
    }

    #[test]
    fn cycles_are_read_from_libtpus_text() {
        let text = "hlo_op_estimate {\n  hlo_op_name: \"m.1\"\n  estimated_cycles: 3179\n  num_equivalent_hlos: 2\n}\n";
        assert_eq!(cycles_of(text), Some(6358));
        assert_eq!(cycles_of(""), None);
    }
}
