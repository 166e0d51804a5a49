//! `quantize`: a model with weights in fewer bits, from file to file.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::{Value as Json, json};

use super::doctor::try_load;
use super::{CliError, RecipeArgs, check_new_file, exists, notices, print, status, write_new};
use crate::config::Verb;
use crate::recipe::{
    self, Budget, Plan, QuantizeReport, QuantizeRequest, Treated, format_text, mode_of_rule,
};
use crate::report::operations;
use crate::weights::source::{QuantizedTensor, WrittenPart};

/// `quantize ...`
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Folder for the result; an existing one is not touched
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Choose the format of each layer from quantization_candidates, so that they have at most so many bits a weight
    #[arg(long, value_name = "BITS", conflicts_with = "budget_bytes")]
    budget_bits: Option<f64>,
    /// The same, so that the denoiser's files have at most so many bytes
    #[arg(long, value_name = "BYTES")]
    budget_bytes: Option<u64>,
    /// File for the rules that were chosen under a budget, which quant_rules takes; an existing one is not touched
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Tell what an error of each layer does to what denoising steps leave of samples, by calibration; a budget does too
    #[arg(long)]
    sensitivity: bool,
    /// Page with every layer's error, and curves of it over layers and steps; an existing file is not touched
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON: every quantized tensor, formats, operations, rules and what they matched, bits a weight, parts, seconds
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
    let budget = args.budget_bits.map(Budget::Bits);
    let budget = budget.or(args.budget_bytes.map(Budget::Bytes));
    if args.plan.is_some() && budget.is_none() {
        return Err(CliError::Usage(
            "--plan has no effect without a budget: give --budget-bits or --budget-bytes; rules of a file are taken by \
             quant_rules=FILE"
                .to_owned(),
        ));
    }
    for file in args.plan.iter().chain(&args.html) {
        check_new_file(file)?;
    }
    let request = QuantizeRequest {
        output: &args.output,
        budget,
        sensitivity: args.sensitivity,
    };
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
        &request,
        &try_load,
        &mut notify,
        &mut observe,
    )?;
    status::clear();
    let seconds = start.elapsed().as_secs_f64();
    if let (Some(file), Some(plan)) = (&args.plan, &report.plan) {
        write_new(file, plan.to_yaml().as_bytes())?;
    }
    if let Some(file) = &args.html {
        write_new(file, recipe::quantize_page(&report).as_bytes())?;
    }
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
            row.errors
                .as_ref()
                .map_or_else(String::new, |errors| format!("{:.1} dB", errors.sqnr_db)),
            row.bytes,
        ));
    }
    text.push_str("formats:\n");
    for sum in report.formats() {
        text.push_str(&format!(
            "  {}: {} layers, {:.3} bits a weight with scales, {:.1} MB from {:.1} MB{}\n",
            format_text(sum.format),
            sum.layers,
            sum.bits(),
            sum.bytes as f64 / 1e6,
            sum.source_bytes as f64 / 1e6,
            match report.percent_of_flops(sum.flops) {
                Some(percent) => format!(", {percent:.2} % of the operations"),
                None => String::new(),
            }
        ));
    }
    text.push_str(&float_summary(report));
    if let Some(plan) = &report.plan {
        text.push_str(&plan_summary(plan));
    }
    text.push_str("rules, of which the first that matches decides:\n");
    for rule in report.given_rules() {
        text.push_str(&format!(
            "  {:<10}  {}: {} layers, {:.2} % of the UNet's weights\n",
            rule.mode(),
            rule.pattern,
            rule.layers.len(),
            report.percent_of_weights(rule)
        ));
    }
    for treated in &report.treated {
        text.push_str(&treated_summary(treated));
    }
    text.push_str(&format!(
        "{}: {}, {} of {} dots and convolutions quantized, in {seconds:.1} s{}\n",
        args.output.display(),
        report.family.title(),
        report.tensors.len(),
        report.contractions,
        match report.calibration_seconds {
            Some(took) => format!(", of which calibration took {took:.1}"),
            None => String::new(),
        }
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

/// The operations that are not quantized, and what all are of.
fn float_summary(report: &QuantizeReport) -> String {
    let (Some(flops), Some(of_layers)) = (&report.flops, report.float_flops()) else {
        return String::new();
    };
    let [height, width] = flops.image_size;
    format!(
        "  not quantized: layers in float, {:.2} % of the operations; products of two activations (attention), {:.2} %\n  of {} \
         in a run of the denoiser on one image of {height}x{width} pixels with {} tokens of text\n",
        flops.percent(of_layers),
        flops.percent(flops.of_activations),
        operations(flops.all()),
        flops.tokens,
    )
}

/// The layers that an algorithm treated, and the others.
fn treated_summary(treated: &Treated) -> String {
    let left = match treated.convolutions.len() {
        0 => String::new(),
        left => format!("; {left} convolutions, which it does not treat, are rounded to nearest"),
    };
    format!(
        "algorithm {}: {} layers{left}\n",
        treated.algorithm, treated.layers
    )
}

/// How many layers have each candidate.
fn plan_summary(plan: &Plan) -> String {
    let mut text = format!(
        "chosen: {:.3} bits a weight with scales in {} layers, {} bytes; the sum of their errors is {:.3e}: {}\n",
        plan.bits(),
        plan.layers.len(),
        plan.bytes(),
        plan.error(),
        plan.measure.text()
    );
    for (at, rule) in plan.candidates.iter().enumerate() {
        let taken = plan.layers.iter().filter(|layer| layer.taken().rule == at);
        let weights: usize = taken.clone().map(|layer| layer.parameters).sum();
        let name = mode_of_rule(rule);
        text.push_str(&format!(
            "  {name}: {} layers, {weights} weights\n",
            taken.count()
        ));
    }
    text
}

/// Relative errors, of their powers.
fn roots(powers: &[f64]) -> Vec<f64> {
    powers.iter().map(|power| power.sqrt()).collect()
}

fn plan_json(plan: &Plan) -> Json {
    let layers = plan.layers.iter().map(|layer| {
        let candidates = layer.candidates.iter().map(|candidate| {
            json!({
                "mode": mode_of_rule(&plan.candidates[candidate.rule]),
                "bytes": candidate.bytes,
                "error": candidate.error,
                "sqnr_db": candidate.tensor.as_ref().map(|t| t.sqnr_db).filter(|ratio| ratio.is_finite()),
            })
        });
        json!({
            "layer": layer.layer,
            "parameters": layer.parameters,
            "candidates": candidates.collect::<Vec<_>>(),
            "chosen": layer.chosen,
        })
    });
    json!({
        "error_is": plan.measure.text(),
        "bits": plan.bits(),
        "bytes": plan.bytes(),
        "error": plan.error(),
        "layers": layers.collect::<Vec<_>>(),
    })
}

fn to_json(args: &QuantizeArgs, report: &QuantizeReport, seconds: f64) -> Json {
    let tensors = report.tensors.iter().map(|row| {
        let errors = row.errors.as_ref();
        json!({
            "layer": row.layer,
            "shape": row.dims,
            "format": format_text(row.format),
            "scale_range": row.scale_range,
            // JSON has no infinity: null is a weight that did not change.
            "sqnr_db": row.sqnr_db.is_finite().then_some(row.sqnr_db),
            "output_sqnr_db": errors.map(|e| e.sqnr_db).filter(|ratio| ratio.is_finite()),
            "relative_errors": errors.map(|e| roots(&e.of_layer)),
            "step_errors": errors.filter(|e| !e.of_result.is_empty()).map(|e| roots(&e.of_result)),
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
            "flops": sum.flops,
            "flops_percent": report.percent_of_flops(sum.flops),
        })
    });
    let flops = report.flops.as_ref().map(|flops| {
        let [height, width] = flops.image_size;
        let share =
            |of: Option<u64>| json!({"flops": of, "flops_percent": report.percent_of_flops(of)});
        json!({
            "height": height,
            "width": width,
            "tokens": flops.tokens,
            "all": flops.all(),
            "layers_in_float": share(report.float_flops()),
            "products_of_activations": share(Some(flops.of_activations)),
        })
    });
    let algorithms = report.treated.iter().map(|treated| {
        json!({
            "name": treated.algorithm.name(),
            "layers": treated.layers,
            "convolutions_to_nearest": treated.convolutions,
        })
    });
    let rules = report.rules.iter().map(|rule| {
        json!({
            "pattern": rule.pattern,
            "mode": rule.mode(),
            "layers": rule.layers,
            "share_percent": report.percent_of_weights(rule),
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
        "flops": flops,
        "rules": rules.collect::<Vec<_>>(),
        "algorithms": algorithms.collect::<Vec<_>>(),
        "plan": report.plan.as_ref().map(plan_json),
        "contractions": report.contractions,
        "parameters": report.parameters,
        "quantized_parameters": report.quantized_parameters(),
        "bits_of_quantized": report.bits_of_quantized(),
        "bits_of_unet": report.bits_of_unet(),
        "bits_of_source": report.bits_of_source(),
        "source_bytes": report.source_bytes,
        "calibration_steps": report.calibration_steps,
        "calibration_seconds": report.calibration_seconds,
        "parts": parts.collect::<serde_json::Map<_, _>>(),
        "seconds": seconds,
    })
}
