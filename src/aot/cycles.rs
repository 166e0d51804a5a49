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
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use regex::Regex;

use crate::backend::tpu::mosaic::backend_config;
use crate::report::{KernelCall, KernelCode, KernelCycles, VliwBundles};
use crate::shape::gcd;
use crate::topology::{Accelerator, Chip, Format};

use super::simulator_child::{SimulationError, SimulatorChild};
use super::vliw;

/// Of a grid, no more steps of the outer dimensions are simulated than take about this many cycles at the chip's peak
/// rates, but at least one, and once more another.
const MOST_CYCLES: f64 = 10_000.0;

/// If all steps of the last dimension compute more than this, or wait longer for HBM, some of them are simulated, and a step of the others
/// counts as so many of the last. Such are convolutions, each part of which takes ten seconds and more to compile and simulate,
/// however small. Of an attention's eight, two said 8 % less than all. The gradients of an attention with 2e10 took six minutes on a
/// v5p, and more memory than a machine of 24 GB had. That is the same for chips of other peak rates: what is simulated are instructions.
const MOST_FLOPS_OF_LAST: f64 = 1e10;
const MOST_HBM_CYCLES_OF_LAST: f64 = 75_000.0;

/// Trips of loops that are simulated. Where there are no more than both together, all are.
const FEW_TRIPS: [usize; 2] = [2, 3];

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
}

impl Simulator {
    /// `program` is `maxdiff-rs`, or another that calls [`crate::cli::main`].
    pub fn new(program: PathBuf) -> Simulator {
        Simulator {
            program,
            bundles: false,
        }
    }

    /// Also counts the bundles of a kernel's code. That takes as long again as compiling it, for large convolutions twice as long.
    pub fn with_bundles(self) -> Simulator {
        Simulator {
            bundles: true,
            ..self
        }
    }

    /// Simulates kernels for `chip`; the child process is started with the first.
    pub fn of_chip(&self, chip: Chip) -> ChipSimulator {
        ChipSimulator {
            simulator: self.clone(),
            chip,
            child: None,
        }
    }
}

/// Simulates kernels for a chip, in one child process as long as it lives: starting one and loading libtpu takes 0.6 s.
pub struct ChipSimulator {
    simulator: Simulator,
    chip: Chip,
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
        let whole = grid_of(&call.code.text);
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
        let trips = few_trips(&call.code.text).filter(|_| least_of_part > MOST_CYCLES);
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
        let mut child = match self.child.take() {
            Some(child) => child,
            None => {
                let accelerator = Accelerator::smallest(self.chip);
                let accelerator = accelerator.ok_or(SimulationError::NotTpu(self.chip))?;
                let Simulator { program, bundles } = &self.simulator;
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
        result
    }
}

impl Simulated {
    /// The cycles of `call`, whose code is the one that was simulated.
    pub fn cycles(&self, chip: Chip, call: &KernelCall) -> KernelCycles {
        let hbm_cycles = hbm_cycles(chip, call);
        KernelCycles {
            cycles: self.cycles.max(hbm_cycles) as u64,
            hbm_cycles: hbm_cycles as u64,
            product_cycles: product_cycles(chip, call) as u64,
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

/// The steps of a kernel: those of the grid's outer dimensions, and of the last one, whose steps share work.
#[derive(Clone, Debug, PartialEq)]
struct Grid {
    outer: Vec<u64>,
    last: u64,
}

impl Grid {
    fn steps(&self) -> u64 {
        self.outer_steps() * self.last
    }

    fn outer_steps(&self) -> u64 {
        self.outer.iter().product()
    }

    /// The parts that are simulated in place of the whole, which takes `cycles` at least and is `work` times what may be simulated
    /// of the last dimension: a small one that keeps all `cores` busy and one that has more steps, if there is room, from which
    /// [`Grid::extrapolated`] tells what a step takes. `None` where that is the whole.
    fn parts(&self, cycles: f64, work: f64, cores: u64) -> Option<Vec<Grid>> {
        if cycles <= MOST_CYCLES {
            return None;
        }
        let with = |steps: f64, last: u64| {
            // From the outermost dimension inwards.
            let mut left = self.outer_steps() as f64 / steps;
            let outer = self.outer.iter().map(|bound| {
                let kept = (*bound as f64 / left) as u64;
                let kept = kept.clamp(1, *bound);
                left /= *bound as f64 / kept as f64;
                kept
            });
            Grid {
                outer: outer.collect(),
                last,
            }
        };
        let outer_cycles = cycles / self.outer_steps() as f64;
        let (outer, last) = match self.outer_steps() >= cores {
            true => (cores as f64, 1),
            false => (1.0, cores),
        };
        let parts = if work <= self.outer_steps() as f64 {
            let mut steps = (MOST_CYCLES / outer_cycles).max(outer);
            let part = with(steps, self.last);
            let mut more = part.clone();
            while more == part && more != *self {
                steps *= 2.0;
                more = with(steps, self.last);
            }
            vec![part, more]
        } else {
            let more = match 2 * last <= self.last {
                true => with(outer, 2 * last),
                false => with(2.0 * outer, last),
            };
            vec![with(outer, last), more]
        };
        let fits = |part: &Grid| part.last <= self.last && part.outer_steps() <= self.outer_steps();
        let mut fitting: Vec<Grid> = Vec::new();
        for part in parts.into_iter().filter(fits) {
            if !fitting.contains(&part) {
                fitting.push(part);
            }
        }
        (!fitting.is_empty() && !fitting.contains(self)).then_some(fitting)
    }

    /// What the whole takes if `parts` take `times`: as much more for each step of one of `cores` as the second part's take than
    /// the first's.
    fn extrapolated(&self, parts: &[Grid], times: &[f64], cores: u64) -> f64 {
        let steps = |grid: &Grid| grid.steps().div_ceil(cores) as f64;
        match (parts, times) {
            ([part, more], [time, more_time]) => {
                let step = (more_time - time) / (steps(more) - steps(part));
                time + (steps(self) - steps(part)) * step
            }
            ([part], [time]) => time / steps(part) * steps(self),
            _ => 0.0,
        }
    }
}

static BOUNDS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"iteration_bounds = array<i64: ([0-9, ]+)>").ok());

/// The grid of a kernel's text.
fn grid_of(text: &str) -> Option<Grid> {
    let found = BOUNDS.as_ref()?.captures(text)?;
    let bounds = found[1].split(',').map(|bound| bound.trim().parse().ok());
    let bounds: Vec<u64> = bounds.collect::<Option<_>>()?;
    let (last, outer) = bounds.split_last()?;
    Some(Grid {
        outer: outer.to_vec(),
        last: *last,
    })
}

/// How many trips of loops are simulated: `simulated` of `common`, which each of the loops has or has a multiple of.
#[derive(Clone, Debug, PartialEq)]
struct Trips {
    simulated: usize,
    common: usize,
    /// The loops.
    of: Vec<String>,
}

/// A loop that is in no other.
#[derive(Debug)]
struct Loop {
    name: String,
    trips: usize,
    multiplies: bool,
}

/// What multiplies in a kernel's text.
const MULTIPLIES: &str = "tpu.matmul";

static TRIPS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(%\w+)_u = arith\.constant ([0-9]+) : i32").ok());

/// The loops of a kernel's text, without those inside of others.
fn loops(text: &str) -> Vec<Loop> {
    let mut loops: Vec<Loop> = Vec::new();
    // The braces that are open, and those that were at the loop that is.
    let (mut open, mut at_loop) = (0i64, None);
    for line in text.lines() {
        let trips = TRIPS.as_ref().and_then(|trips| trips.captures(line));
        let trips = trips.and_then(|found| Some((found[1].to_owned(), found[2].parse().ok()?)));
        match (trips, at_loop, loops.last_mut()) {
            (Some((name, trips)), None, _) => loops.push(Loop {
                name,
                trips,
                multiplies: false,
            }),
            (_, Some(_), Some(last)) => last.multiplies |= line.contains(MULTIPLIES),
            _ => {}
        }
        if line.contains("scf.for") && at_loop.is_none() {
            at_loop = Some(open);
        }
        open += line.matches('{').count() as i64 - line.matches('}').count() as i64;
        at_loop = at_loop.filter(|before| open > *before);
    }
    loops
}

/// Few trips of a kernel's loops, and then more. Of a kernel that multiplies these are of loops that do: products outside of loops
/// take longer to compile, once more for each number of trips, than all trips of other loops to simulate. `None` where there are no
/// such loops, or no more trips than would be simulated.
fn few_trips(text: &str) -> Option<[Trips; 2]> {
    let multiplies = text.contains(MULTIPLIES);
    let loops = loops(text).into_iter();
    let loops: Vec<Loop> = loops.filter(|of| of.multiplies == multiplies).collect();
    let common = loops.iter().map(|of| of.trips).reduce(gcd)?;
    (common > FEW_TRIPS.iter().sum()).then(|| {
        FEW_TRIPS.map(|simulated| Trips {
            simulated,
            common,
            of: loops.iter().map(|of| of.name.clone()).collect(),
        })
    })
}

/// The configuration of a call of `code`, with another grid and fewer trips if such are given.
fn configuration(code: &KernelCode, grid: Option<&Grid>, trips: Option<&Trips>) -> String {
    let mut text = Cow::from(&code.text);
    if let Some((grid, place)) = grid.zip(BOUNDS.as_ref()) {
        let bounds = grid.outer.iter().chain([&grid.last]);
        let bounds: Vec<String> = bounds.map(ToString::to_string).collect();
        let bounds = format!("iteration_bounds = array<i64: {}>", bounds.join(", "));
        text = Cow::from(place.replacen(&text, 1, bounds.as_str()).into_owned());
    }
    if let Some((trips, place)) = trips.zip(TRIPS.as_ref()) {
        let fewer = |found: &regex::Captures<'_>| {
            let (name, all) = (&found[1], found[2].parse().unwrap_or(trips.common));
            let fewer = match trips.of.iter().any(|of| of == name) {
                true => all / trips.common * trips.simulated,
                false => all,
            };
            format!("{name}_u = arith.constant {fewer} : i32")
        };
        text = Cow::from(place.replace_all(&text, fewer).into_owned());
    }
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

    fn grid(outer: &[u64], last: u64) -> Grid {
        Grid {
            outer: outer.to_vec(),
            last,
        }
    }

    #[test]
    fn grids_are_read_and_replaced() {
        let of = |bounds| grid_of(&code(bounds).text);
        assert_eq!(of("2, 5, 8"), Some(grid(&[2, 5], 8)));
        assert_eq!(of("64"), Some(grid(&[], 64)));
        assert_eq!(grid_of("module {}"), None);
        let replaced = configuration(&code("2, 5, 8"), Some(&grid(&[1, 3], 2)), None);
        assert_eq!(replaced, configuration(&code("1, 3, 2"), None, None));
    }

    #[test]
    fn trips_of_loops_that_multiply_are_shortened_alike() {
        let looped = |trips: u64, body: &str| {
            format!(
                "%v{trips}_u = arith.constant {trips} : i32\nscf.for %v{trips} = %l to %v{trips}_u {{\n{body}scf.yield\n}}\n"
            )
        };
        let of = |text: &str| {
            let [few, more] = few_trips(text)?;
            assert_eq!([few.simulated, more.simulated], FEW_TRIPS);
            assert_eq!((more.common, &more.of), (few.common, &few.of));
            Some((few.common, few.of))
        };
        let branch = "scf.if %c {\n} else {\n}\n";
        let product = "%p = tpu.matmul %a, %b\n";
        let loops = |body: &str| [24, 16].map(|trips| looped(trips, body)).concat();
        let both = vec!["%v24".to_owned(), "%v16".to_owned()];
        assert_eq!(of(&loops(branch)), Some((8, both.clone())));
        assert_eq!(of(&loops(product)), Some((8, both)));
        // Loops inside of others have all their trips.
        assert_eq!(
            of(&looped(8, &loops(product))),
            Some((8, vec!["%v8".to_owned()]))
        );
        // Loops beside products have all too, whether those are in loops of their own or in none.
        let beside = looped(24, branch) + &looped(16, product);
        assert_eq!(of(&beside), Some((16, vec!["%v16".to_owned()])));
        assert_eq!(of(&(loops(branch) + product)), None);
        assert_eq!(of(product), None);
        // So few that all are simulated.
        assert_eq!(of(&looped(5, product)), None);

        let configured = |text: &str, trips: Option<&Trips>| {
            let text = text.to_owned();
            configuration(&KernelCode { text, ..code("1") }, None, trips)
        };
        let [_, more] = few_trips(&beside).unwrap();
        let fewer = beside.replace("constant 16", "constant 3");
        assert_eq!(configured(&beside, Some(&more)), configured(&fewer, None));
    }

    #[test]
    fn a_grid_is_shortened_from_outside() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, cycles / MOST_HBM_CYCLES_OF_LAST, 1);
        // Small enough.
        assert_eq!(parts(&grid(&[2, 5], 8), 10_000.0), None);
        // One of ten is more than is simulated at least.
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 1], 8), grid(&[1, 2], 8)]);
        let found = parts(&grid(&[8], 5), 40_000.0).unwrap();
        assert_eq!(found, [grid(&[2], 5), grid(&[4], 5)]);
        // Steps of the last dimension alone are more than that.
        let found = parts(&grid(&[2, 1], 5), 250_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 1], 1), grid(&[1, 1], 2)]);
        let found = parts(&grid(&[3], 1), 400_000.0).unwrap();
        assert_eq!(found, [grid(&[1], 1), grid(&[2], 1)]);
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 1), grid(&[], 2)]);
        // On a faster chip as much work takes fewer cycles, and as long to simulate.
        let found = grid(&[5], 8).parts(205_000.0, 10.7, 1).unwrap();
        assert_eq!(found, [grid(&[1], 1), grid(&[1], 2)]);
        // No part is smaller than the whole.
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
        assert_eq!(parts(&grid(&[2], 1), 1e6), None);
    }

    #[test]
    fn parts_keep_two_cores_busy() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, cycles / MOST_HBM_CYCLES_OF_LAST, 2);
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 2], 8), grid(&[1, 4], 8)]);
        // Steps of the last dimension are shared where there are no others.
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 2), grid(&[], 4)]);
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
    }

    #[test]
    fn the_whole_is_extrapolated_from_its_parts() {
        let time = |grid: &Grid, cores, outer_step: f64| {
            let steps = grid.steps().div_ceil(cores) as f64;
            700.0 + steps / grid.last as f64 * outer_step + steps * 11.0
        };
        let wholes = [
            grid(&[2, 5], 8),
            grid(&[8], 5),
            grid(&[1, 16], 5),
            grid(&[3, 3], 4),
        ];
        for (whole, cores) in wholes.iter().flat_map(|whole| [(whole, 1), (whole, 2)]) {
            for cycles in [4e4, 2e5, 1e6] {
                let Some(parts) = whole.parts(cycles, cycles / MOST_HBM_CYCLES_OF_LAST, cores)
                else {
                    continue;
                };
                // Parts with as many outer steps do not tell what these take of their own.
                let tells = parts[1].outer_steps() > parts[0].outer_steps();
                let outer_step = if tells { 90.0 } else { 0.0 };
                let times = parts.iter().map(|part| time(part, cores, outer_step));
                let times: Vec<f64> = times.collect();
                let found = whole.extrapolated(&parts, &times, cores);
                let expected = time(whole, cores, outer_step);
                assert!((found - expected).abs() < 1e-6, "{whole:?}: {found}");
            }
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
    fn cycles_are_read_from_libtpus_text() {
        let text = "hlo_op_estimate {\n  hlo_op_name: \"m.1\"\n  estimated_cycles: 3179\n  num_equivalent_hlos: 2\n}\n";
        assert_eq!(cycles_of(text), Some(6358));
        assert_eq!(cycles_of(""), None);
    }
}
