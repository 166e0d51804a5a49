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

/// Of a grid, no more steps are simulated than take about this many cycles at the chip's peak rates.
const MOST_CYCLES: f64 = 30_000.0;

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
        let least = product_cycles.max(hbm_cycles);
        let mut most = MOST_CYCLES;
        let part = shortened(&call.configuration, least, most);
        let mut more = part.clone();
        while part.share < 1.0 && more.share == part.share {
            most *= 2.0;
            more = shortened(&call.configuration, least, most);
        }
        let simulate = |part: &Part| {
            let cycles = self.simulate(chip, &module(call, &part.configuration));
            cycles.map(|cycles| cycles as f64)
        };
        let mut cycles = simulate(&more)?;
        if more.share < 1.0 {
            let slope = (cycles - simulate(&part)?) / (more.share - part.share);
            cycles += slope * (1.0 - more.share);
        }
        Ok(KernelCycles {
            cycles: cycles.max(hbm_cycles) as u64,
            hbm_cycles: hbm_cycles as u64,
            product_cycles: product_cycles as u64,
            simulated_share: more.share,
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
            SimulationError::NoResult(said.lines().next_back().unwrap_or("no message").to_owned())
        })
    }
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

/// A kernel with some steps of its grid.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    configuration: String,
    /// The share of the whole grid's steps.
    share: f64,
}

/// The kernel with fewer steps in its grid's outer dimensions, which take about `most` cycles if the whole takes
/// `cycles`. The last dimension stays whole: kernels share work between its steps.
fn shortened(configuration: &str, cycles: f64, most: f64) -> Part {
    static BOUNDS: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"iteration_bounds = array<i64: ([0-9, ]+)>").ok());
    let whole = Part {
        configuration: configuration.to_owned(),
        share: 1.0,
    };
    let Ok(mut value) = serde_json::from_str::<Value>(configuration) else {
        return whole;
    };
    let body = &mut value["custom_call_config"]["body"];
    let text = body.as_str().and_then(|body| STANDARD.decode(body).ok());
    let Some(text) = text.and_then(|text| String::from_utf8(text).ok()) else {
        return whole;
    };
    let Some(found) = BOUNDS.as_ref().and_then(|bounds| bounds.captures(&text)) else {
        return whole;
    };
    let bounds = found[1].split(',').map(|bound| bound.trim().parse::<u64>());
    let Ok(mut bounds) = bounds.collect::<Result<Vec<u64>, _>>() else {
        return whole;
    };
    let mut scale = 1.0;
    let outer = bounds.len().saturating_sub(1);
    for bound in &mut bounds[..outer] {
        let steps = (*bound as f64 * most * scale / cycles) as u64;
        let steps = steps.clamp(1, *bound);
        scale *= *bound as f64 / steps as f64;
        *bound = steps;
    }
    let bounds: Vec<String> = bounds.iter().map(ToString::to_string).collect();
    let shorter = text.replacen(
        &found[0],
        &format!("iteration_bounds = array<i64: {}>", bounds.join(", ")),
        1,
    );
    *body = Value::String(STANDARD.encode(shorter));
    Part {
        configuration: value.to_string(),
        share: 1.0 / scale,
    }
}

/// A StableHLO module of one call.
fn module(call: &KernelCall, configuration: &str) -> String {
    let arguments = call.operands.iter().enumerate();
    let arguments: Vec<String> = arguments
        .map(|(i, of)| format!("%arg{i}: tensor<{of}>"))
        .collect();
    let names: Vec<String> = (0..call.operands.len())
        .map(|i| format!("%arg{i}"))
        .collect();
    let types: Vec<String> = call
        .operands
        .iter()
        .map(|of| format!("tensor<{of}>"))
        .collect();
    let layouts: Vec<String> = call.operands.iter().map(|of| row_major(of)).collect();
    format!(
        "module @kernel {{\n  func.func public @main({}) -> tensor<{result}> {{\n    \
         %0 = stablehlo.custom_call @tpu_custom_call({}) {{backend_config = \"{}\", operand_layouts = [{}], \
         result_layouts = [{}]}} : ({}) -> tensor<{result}>\n    return %0 : tensor<{result}>\n  }}\n}}\n",
        arguments.join(", "),
        names.join(", "),
        configuration.replace('\\', "\\5C").replace('"', "\\22"),
        layouts.join(", "),
        row_major(&call.result),
        types.join(", "),
        result = call.result,
    )
}

/// The layout of an array of a type in StableHLO.
fn row_major(of: &str) -> String {
    let rank = of.matches('x').count();
    let order: Vec<String> = (0..rank).rev().map(|d| d.to_string()).collect();
    match rank {
        0 => "dense<> : tensor<0xindex>".to_owned(),
        _ => format!("dense<[{}]> : tensor<{rank}xindex>", order.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(bounds: &str) -> String {
        let text = format!("iteration_bounds = array<i64: {bounds}>, dimension_semantics");
        serde_json::json!({"custom_call_config": {"body": STANDARD.encode(text)}}).to_string()
    }

    #[test]
    fn a_grid_is_shortened_from_outside() {
        let of = |bounds, cycles| shortened(&configuration(bounds), cycles, 30_000.0);
        let part = |bounds, share| Part {
            configuration: configuration(bounds),
            share,
        };
        // Small enough.
        assert_eq!(of("2, 5, 8", 20_000.0), part("2, 5, 8", 1.0));
        // 240,000 are 8 times what is simulated.
        assert_eq!(of("2, 5, 8", 240_000.0), part("1, 1, 8", 0.1));
        assert_eq!(of("8, 5", 60_000.0), part("4, 5", 0.5));
        // The last dimension stays.
        assert_eq!(of("64", 1e6), part("64", 1.0));
        let other = r#"{"custom_call_config":{"body":"not ours"}}"#;
        assert_eq!(shortened(other, 1e6, 30_000.0).share, 1.0);
    }

    #[test]
    fn cycles_are_read_from_libtpus_text() {
        let text = "hlo_op_estimate {\n  hlo_op_name: \"m.1\"\n  estimated_cycles: 3179\n  num_equivalent_hlos: 2\n}\n";
        assert_eq!(cycles_of(text), Some(6358));
        assert_eq!(cycles_of(""), None);
    }
}
