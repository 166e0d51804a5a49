//! Cycles of kernels, simulated by the TPU compiler without a TPU.
//!
//! The compiler predicts no time for kernels that are not its own. But if libtpu is loaded with the flag
//! `--xla_jf_dump_static_llo_profile_to`, it simulates every operation that it compiles: it unrolls loops and the steps
//! of grids, and models stalls of the matrix units and the latency of transfers. So a [`Simulator`] compiles a program
//! of one kernel in a child process and reads the file that libtpu writes.
//!
//! The simulation takes about a second for 15,000 cycles, so of a large grid only some steps are simulated, and once
//! more of them: the difference is what a step takes without the transfers before the first one and after the last. The
//! simulation knows the latency of transfers but not the bandwidth of HBM, so no kernel is faster than its bytes.
//!
//! Two cores of a v4 or a v5p share the steps of a grid: simulated for a v5p, 1, 3 and 9 steps took as long as 1, 2 and
//! 5 steps of one core. So the parts that are compared keep both busy.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regex::Regex;
use serde_json::Value;

use crate::report::{KernelCall, KernelCycles};
use crate::topology::{Accelerator, Chip, Format};

/// Of a grid, no more steps of the outer dimensions are simulated than take about this many cycles at the chip's peak
/// rates, but at least one, and once more another.
const MOST_CYCLES: f64 = 10_000.0;

/// If all steps of the last dimension take more than this, some of them are simulated. Of an attention's eight, two
/// said 8 % less than all.
const MOST_CYCLES_OF_LAST: f64 = 100_000.0;

/// What libtpu is told in the child process.
const FLAG: &str = "--xla_jf_dump_static_llo_profile_to";

/// Why a kernel was not simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    #[error("{}: {what}: {error}", path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        error: std::io::Error,
    },
    #[error("{0} has no TPU compiler")]
    NotTpu(Chip),
    #[error("the TPU compiler simulated nothing: {0}")]
    NoResult(String),
}

/// Starts the child processes.
#[derive(Debug, Clone)]
pub struct Simulator {
    program: PathBuf,
}

impl Simulator {
    /// `program` is `maxdiff-rs`, or another that calls [`crate::cli::main`].
    pub fn new(program: PathBuf) -> Simulator {
        Simulator { program }
    }

    /// The cycles of a kernel's call on one device of `chip`.
    ///
    /// # Errors
    /// When the child process cannot be started, or its compiler refuses the kernel.
    pub fn cycles(&self, chip: Chip, call: &KernelCall) -> Result<KernelCycles, SimulationError> {
        // Without a clock nothing is known of how cycles and seconds compare.
        let clock = chip.clock_hz().unwrap_or(0.0);
        let format = match call.multiplies_int8() {
            true => Format::Int8,
            false => Format::Bf16,
        };
        let peak = chip.peak(format).unwrap_or(f64::INFINITY);
        let product_cycles = call.flops as f64 / peak * clock;
        let hbm_cycles = call.bytes as f64 / chip.hbm_bytes_per_second() as f64 * clock;
        let simulate = |part: Option<&Grid>| {
            let configuration = part.and_then(|part| with_grid(&call.configuration, part));
            let configuration = configuration.as_deref().unwrap_or(&call.configuration);
            let cycles = self.simulate(chip, &module(call, configuration))?;
            Ok::<f64, SimulationError>(cycles as f64)
        };
        let whole = grid_of(&call.configuration);
        let cores = chip.cores_per_device();
        let parts = whole.and_then(|whole| {
            let parts = whole.parts(product_cycles.max(hbm_cycles), cores)?;
            Some((whole, parts))
        });
        let (cycles, simulated_share) = match parts {
            None => (simulate(None)?, 1.0),
            Some((whole, parts)) => {
                let times = parts.iter().map(|part| simulate(Some(part)));
                let times: Vec<f64> = times.collect::<Result<_, _>>()?;
                let most = parts.iter().map(Grid::steps).max().unwrap_or(1);
                let share = most as f64 / whole.steps() as f64;
                (whole.extrapolated(&parts, &times, cores), share)
            }
        };
        Ok(KernelCycles {
            cycles: cycles.max(hbm_cycles) as u64,
            hbm_cycles: hbm_cycles as u64,
            product_cycles: product_cycles as u64,
            simulated_share,
        })
    }

    /// The cycles of all operations of a StableHLO module together.
    fn simulate(&self, chip: Chip, stablehlo: &str) -> Result<u64, SimulationError> {
        let accelerator = Accelerator::smallest(chip).ok_or(SimulationError::NotTpu(chip))?;
        let io = |path: &Path, what| {
            let path = path.to_owned();
            move |error| SimulationError::Io { path, what, error }
        };
        let folder = std::env::temp_dir();
        let folder =
            tempfile::tempdir_in(&folder).map_err(io(&folder, "no folder could be made"))?;
        let flags = std::env::var("LIBTPU_INIT_ARGS").unwrap_or_default();
        let mut child = Command::new(&self.program)
            .args(["kernel", "simulate", "--topology", &accelerator.name])
            .env(
                "LIBTPU_INIT_ARGS",
                format!("{flags} {FLAG}={}", folder.path().display()),
            )
            // One run wrote 1.2 GB of messages.
            .envs([("TPU_LOG_DIR", "disabled"), ("TPU_MIN_LOG_LEVEL", "3")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io(&self.program, "could not be started"))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A child that ends before it has read everything says why.
            let _ = stdin.write_all(stablehlo.as_bytes());
        }
        let output = child
            .wait_with_output()
            .map_err(io(&self.program, "failed"))?;
        // libtpu may end the process after it has written: only the file counts.
        let mut cycles = None;
        let files = fs::read_dir(folder.path()).map_err(io(folder.path(), "cannot be read"))?;
        for file in files.flatten() {
            let text =
                fs::read_to_string(file.path()).map_err(io(&file.path(), "cannot be read"))?;
            cycles = cycles_of(&text)
                .map(|found| found + cycles.unwrap_or(0))
                .or(cycles);
        }
        cycles.ok_or_else(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            SimulationError::NoResult(why(&said).to_owned())
        })
    }
}

/// The last line of what a child process said, but for a pointer to the compiler's documents.
fn why(said: &str) -> &str {
    let mut lines = said.lines().rev().filter(|line| !line.trim().is_empty());
    lines
        .find(|line| !line.starts_with("See http"))
        .unwrap_or("no message")
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

    /// The parts that are simulated in place of the whole, which takes `cycles` at least: a small one that
    /// keeps all `cores` busy and others that have more steps, from which [`Grid::extrapolated`] tells what a step takes.
    /// `None` where that is the whole.
    fn parts(&self, cycles: f64, cores: u64) -> Option<Vec<Grid>> {
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
        let parts = if outer_cycles <= MOST_CYCLES_OF_LAST {
            let mut steps = (MOST_CYCLES / outer_cycles).max(outer);
            let part = with(steps, self.last);
            let mut more = part.clone();
            while more == part && more != *self {
                steps *= 2.0;
                more = with(steps, self.last);
            }
            vec![part, more]
        } else {
            let sizes = [(outer, last), (outer, 2 * last), (2.0 * outer, last)];
            sizes.map(|(steps, last)| with(steps, last)).to_vec()
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

    /// What the whole takes if `parts` take `times`: `start + outer steps * each + steps * step`, where steps are those of
    /// one of `cores`. What the parts do not tell counts as part of a step.
    fn extrapolated(&self, parts: &[Grid], times: &[f64], cores: u64) -> f64 {
        let Some((first, first_time)) = parts.first().zip(times.first()) else {
            return 0.0;
        };
        let steps = |grid: &Grid| grid.steps().div_ceil(cores) as f64;
        let outer_steps = |grid: &Grid| steps(grid) / grid.last as f64;
        let others = || parts[1..].iter().zip(&times[1..]);
        // What another step of the outer dimensions takes, with as many of the last as in the first part.
        let outer_step = others()
            .find(|(part, _)| part.outer_steps() > first.outer_steps())
            .map(|(part, time)| (time - first_time) / (outer_steps(part) - outer_steps(first)));
        // What another step of the last dimension takes, in each step of the others.
        let step = others()
            .find(|(part, _)| part.last > first.last)
            .map(|(part, time)| (time - first_time) / (steps(part) - steps(first)));
        let step = step.unwrap_or(match outer_step {
            Some(outer_step) => outer_step / first.last as f64,
            None => first_time / steps(first),
        });
        let each = outer_step.map_or(0.0, |outer_step| outer_step - step * first.last as f64);
        first_time
            + (steps(self) - steps(first)) * step
            + (outer_steps(self) - outer_steps(first)) * each
    }
}

static BOUNDS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"iteration_bounds = array<i64: ([0-9, ]+)>").ok());

/// The text of the kernel in a call's configuration.
fn kernel_text(configuration: &Value) -> Option<String> {
    let body = configuration["custom_call_config"]["body"].as_str()?;
    String::from_utf8(STANDARD.decode(body).ok()?).ok()
}

/// The grid of the kernel in a call's configuration. `None` where it is not one of this program.
fn grid_of(configuration: &str) -> Option<Grid> {
    let text = kernel_text(&serde_json::from_str(configuration).ok()?)?;
    let found = BOUNDS.as_ref()?.captures(&text)?;
    let bounds = found[1].split(',').map(|bound| bound.trim().parse().ok());
    let bounds: Vec<u64> = bounds.collect::<Option<_>>()?;
    let (last, outer) = bounds.split_last()?;
    Some(Grid {
        outer: outer.to_vec(),
        last: *last,
    })
}

/// The kernel of a call's configuration with another grid.
fn with_grid(configuration: &str, grid: &Grid) -> Option<String> {
    let mut value: Value = serde_json::from_str(configuration).ok()?;
    let text = kernel_text(&value)?;
    let bounds = grid.outer.iter().chain([&grid.last]);
    let bounds: Vec<String> = bounds.map(ToString::to_string).collect();
    let bounds = format!("iteration_bounds = array<i64: {}>", bounds.join(", "));
    let text = BOUNDS.as_ref()?.replacen(&text, 1, bounds.as_str());
    value["custom_call_config"]["body"] = Value::String(STANDARD.encode(text.as_bytes()));
    Some(value.to_string())
}

/// A StableHLO module of one call. Its arguments and its result have the call's layouts: the compiler would otherwise
/// choose others for some, and add copies, which would be simulated too, for minutes, and count as the kernel's.
fn module(call: &KernelCall, configuration: &str) -> String {
    let places = 0..call.operands.len();
    let names: Vec<String> = places.map(|i| format!("%arg{i}")).collect();
    let with_layout = |of: &String| {
        let order = order(of);
        format!("tensor<{of}> {{mhlo.layout_mode = \"{{{order}}}\"}}")
    };
    let arguments = names.iter().zip(&call.operands);
    let arguments: Vec<String> = arguments
        .map(|(name, of)| format!("{name}: {}", with_layout(of)))
        .collect();
    let types = call.operands.iter().map(|of| format!("tensor<{of}>"));
    let types: Vec<String> = types.collect();
    let layouts: Vec<String> = call.operands.iter().map(|of| row_major(of)).collect();
    format!(
        "module @kernel {{\n  func.func public @main({}) -> ({}) {{\n    \
         %0 = stablehlo.custom_call @tpu_custom_call({}) {{backend_config = \"{}\", operand_layouts = [{}], \
         result_layouts = [{}]}} : ({}) -> tensor<{result}>\n    return %0 : tensor<{result}>\n  }}\n}}\n",
        arguments.join(", "),
        with_layout(&call.result),
        names.join(", "),
        configuration.replace('\\', "\\5C").replace('"', "\\22"),
        layouts.join(", "),
        row_major(&call.result),
        types.join(", "),
        result = call.result,
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

    fn configuration(bounds: &str) -> String {
        let text = format!("iteration_bounds = array<i64: {bounds}>, dimension_semantics");
        serde_json::json!({"custom_call_config": {"body": STANDARD.encode(text)}}).to_string()
    }

    fn grid(outer: &[u64], last: u64) -> Grid {
        Grid {
            outer: outer.to_vec(),
            last,
        }
    }

    #[test]
    fn grids_are_read_and_replaced() {
        let of = |bounds| grid_of(&configuration(bounds));
        assert_eq!(of("2, 5, 8"), Some(grid(&[2, 5], 8)));
        assert_eq!(of("64"), Some(grid(&[], 64)));
        let other = r#"{"custom_call_config":{"body":"not ours"}}"#;
        assert_eq!(grid_of(other), None);
        let replaced = with_grid(&configuration("2, 5, 8"), &grid(&[1, 3], 2));
        assert_eq!(replaced, Some(configuration("1, 3, 2")));
    }

    #[test]
    fn a_grid_is_shortened_from_outside() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, 1);
        // Small enough.
        assert_eq!(parts(&grid(&[2, 5], 8), 10_000.0), None);
        // One of ten is more than is simulated at least.
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 1], 8), grid(&[1, 2], 8)]);
        let found = parts(&grid(&[8], 5), 40_000.0).unwrap();
        assert_eq!(found, [grid(&[2], 5), grid(&[4], 5)]);
        // Steps of the last dimension alone are more than that.
        let found = parts(&grid(&[2, 1], 5), 250_000.0).unwrap();
        assert_eq!(
            found,
            [grid(&[1, 1], 1), grid(&[1, 1], 2), grid(&[2, 1], 1)]
        );
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 1), grid(&[], 2)]);
        // No part is smaller than the whole.
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
        assert_eq!(parts(&grid(&[2], 1), 1e6), None);
    }

    #[test]
    fn parts_keep_two_cores_busy() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, 2);
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 2], 8), grid(&[1, 4], 8)]);
        // Steps of the last dimension are shared where there are no others.
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 2), grid(&[], 4)]);
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
    }

    #[test]
    fn the_whole_is_extrapolated_from_its_parts() {
        let time = |grid: &Grid, cores| {
            let steps = grid.steps().div_ceil(cores) as f64;
            700.0 + steps / grid.last as f64 * 90.0 + steps * 11.0
        };
        let wholes = [
            grid(&[2, 5], 8),
            grid(&[8], 5),
            grid(&[1, 16], 5),
            grid(&[3, 3], 4),
        ];
        for (whole, cores) in wholes.iter().flat_map(|whole| [(whole, 1), (whole, 2)]) {
            for cycles in [4e4, 2e5, 1e6] {
                let Some(parts) = whole.parts(cycles, cores) else {
                    continue;
                };
                let times: Vec<f64> = parts.iter().map(|part| time(part, cores)).collect();
                let found = whole.extrapolated(&parts, &times, cores);
                let expected = time(whole, cores);
                assert!((found - expected).abs() < 1e-6, "{whole:?}: {found}");
            }
        }
    }

    #[test]
    fn arguments_and_result_have_the_calls_layouts() {
        let call = KernelCall {
            operands: vec!["2x64x320xbf16".to_owned(), "f32".to_owned()],
            result: "2x64x320xbf16".to_owned(),
            name: "attention".to_owned(),
            configuration: "{}".to_owned(),
            flops: 0,
            bytes: 0,
        };
        let text = module(&call, &call.configuration);
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
