//! `quantize`: a model with weights in fewer bits, from file to file.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::{Value as Json, json};

use super::doctor::try_load;
use super::{CliError, RecipeArgs, exists, notices, print, status};
use crate::config::Verb;
use crate::quant::Action;
use crate::recipe::{self, QuantizeReport, RuleMatch, format_text, mode_of};
use crate::weights::source::{QuantizedTensor, WrittenPart};

/// `quantize ...`
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Folder for the result; an existing one is not touched
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Print JSON: every quantized tensor, formats, rules and what they matched, bits a weight, parts, seconds
    #[arg(long)]
    json: bool,
}

/// Runs `quantize`.
///
/// # Errors
/// When the configuration is wrong, there is no such model, a weight is not finite, or the folder exists or cannot be
/// written.
pub fn run(args: &QuantizeArgs) -> Result<ExitCode, CliError> {
    let loaded = args.recipe.load_given(Verb::Quantize)?;
    if args.output.symlink_metadata().is_ok() {
        // Before a download.
        return Err(exists(&args.output));
    }
    let start = Instant::now();
    let mut observe = |done: u64, total: u64| match done {
        0 => status::count_bytes("writing", total),
        _ => status::set_position(done),
    };
    let mut notify = notices();
    let recipe_file = &args.recipe.config;
    let report = recipe::quantize(
        &loaded,
        recipe_file,
        &args.output,
        &try_load,
        &mut notify,
        &mut observe,
    )?;
    status::clear();
    let seconds = start.elapsed().as_secs_f64();
    match args.json {
        true => print(&format!("{:#}", to_json(args, &report, seconds)))?,
        false => print(&summary(args, &report, seconds))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Layers that the text shows: the worst.
const SHOWN: usize = 10;

/// What was done, the worst layers first.
fn summary(args: &QuantizeArgs, report: &QuantizeReport, seconds: f64) -> String {
    let mut rows: Vec<&QuantizedTensor> = report.tensors.iter().collect();
    rows.sort_by(|a, b| a.sqnr_db.total_cmp(&b.sqnr_db));
    rows.truncate(SHOWN);
    let width = rows.iter().map(|row| row.layer.len()).max().unwrap_or(0);
    let mut text = format!(
        "the layers that changed most, of {}:\n{:<width$}  {:<36}  {:>23}  {:>8}  {:>9}  {:>12}\n",
        report.tensors.len(),
        "layer",
        "format",
        "scales",
        "SQNR",
        "of output",
        "bytes"
    );
    for row in rows {
        let [lowest, highest] = row.scale_range;
        text.push_str(&format!(
            "{:<width$}  {:<36}  {:>10.3e} .. {:>9.3e}  {:>5.1} dB  {:>9}  {:>12}\n",
            row.layer,
            format_text(row.format),
            lowest,
            highest,
            row.sqnr_db,
            row.output_sqnr_db
                .map_or_else(String::new, |ratio| format!("{ratio:.1} dB")),
            row.bytes,
        ));
    }
    text.push_str("formats:\n");
    for sum in report.formats() {
        text.push_str(&format!(
            "  {}: {} layers, {:.3} bits a weight with scales, {:.1} MB from {:.1} MB\n",
            format_text(sum.format),
            sum.layers,
            sum.bits(),
            sum.bytes as f64 / 1e6,
            sum.source_bytes as f64 / 1e6,
        ));
    }
    text.push_str("rules, of which the first that matches decides:\n");
    for rule in &report.rules {
        text.push_str(&format!(
            "  {:<10}  {}: {} layers, {:.2} % of the UNet's weights\n",
            action(rule.action),
            rule.pattern,
            rule.layers.len(),
            share(report, rule)
        ));
    }
    text.push_str(&format!(
        "{}: {}, {} of {} dots and convolutions quantized, in {seconds:.1} s\n",
        args.output.display(),
        report.family.title(),
        report.tensors.len(),
        report.contractions,
    ));
    text.push_str(&format!(
        "{:.3} bits a quantized weight with its scales, {:.3} bits a weight of the UNet, which had {:.3}\n",
        report.bits_of_quantized(),
        report.bits_of_unet(),
        report.bits_of_source(),
    ));
    for WrittenPart {
        part,
        tensors,
        bytes,
    } in &report.parts
    {
        let megabytes = *bytes as f64 / 1e6;
        text.push_str(&format!("  {part}: {tensors} tensors, {megabytes:.1} MB\n"));
    }
    text
}

/// The mode that a rule gives.
fn action(action: Action) -> &'static str {
    match action {
        Action::Float => "float",
        Action::Quantize(formats) => mode_of(&formats).name(),
    }
}

/// Percent of the UNet's weights that are in the layers of a rule.
fn share(report: &QuantizeReport, rule: &RuleMatch) -> f64 {
    100.0 * rule.parameters as f64 / report.parameters as f64
}

fn to_json(args: &QuantizeArgs, report: &QuantizeReport, seconds: f64) -> Json {
    let tensors = report.tensors.iter().map(|row| {
        json!({
            "layer": row.layer,
            "shape": row.dims,
            "format": format_text(row.format),
            "scale_range": row.scale_range,
            // JSON has no infinity: null is a weight that did not change.
            "sqnr_db": row.sqnr_db.is_finite().then_some(row.sqnr_db),
            "output_sqnr_db": row.output_sqnr_db.filter(|ratio| ratio.is_finite()),
            "low_rank_alpha": row.low_rank_alpha,
            "source_bytes": row.source_bytes,
            "bytes": row.bytes,
        })
    });
    let formats = report.formats();
    let formats = formats.iter().map(|sum| {
        json!({
            "format": format_text(sum.format),
            "layers": sum.layers,
            "parameters": sum.parameters,
            "bits": sum.bits(),
            "bytes": sum.bytes,
            "source_bytes": sum.source_bytes,
        })
    });
    let rules = report.rules.iter().map(|rule| {
        json!({
            "pattern": rule.pattern,
            "mode": action(rule.action),
            "layers": rule.layers,
            "share_percent": share(report, rule),
        })
    });
    let parts = report.parts.iter().map(|written| {
        let value = json!({"tensors": written.tensors, "bytes": written.bytes});
        (written.part.to_string(), value)
    });
    json!({
        "output": args.output,
        "source": report.source,
        "family": report.family.title(),
        "quantization_config": report.stored.to_config(),
        "tensors": tensors.collect::<Vec<_>>(),
        "formats": formats.collect::<Vec<_>>(),
        "rules": rules.collect::<Vec<_>>(),
        "contractions": report.contractions,
        "parameters": report.parameters,
        "quantized_parameters": report.quantized_parameters(),
        "bits_of_quantized": report.bits_of_quantized(),
        "bits_of_unet": report.bits_of_unet(),
        "bits_of_source": report.bits_of_source(),
        "source_bytes": report.source_bytes,
        "calibration_steps": report.calibration_steps,
        "parts": parts.collect::<serde_json::Map<_, _>>(),
        "seconds": seconds,
    })
}
