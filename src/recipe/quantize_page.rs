//! One page of what `quantize` did: which layers are sensitive, and what each became.

use std::fmt::Write;

use crate::metrics::{Line, STYLE, escaped, svg};
use crate::report::operations;
use crate::weights::source::QuantizedTensor;

use super::quantize::QuantizeReport;
use super::{format_text, mode_of_rule};

/// Layers whose errors are drawn step by step: the worst.
const DRAWN: usize = 5;

/// The page of a report, with everything it needs inside.
pub fn quantize_page(report: &QuantizeReport) -> String {
    let title = escaped(&format!("quantize {}", report.source.display()));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}\
         table{{border-collapse:collapse;font-size:13px}}td,th{{padding:.2em .8em;text-align:left;border-bottom:1px solid #8884}}\
         </style></head>\n<body><h1>{title}</h1>\n<p>{}: {:.3} bits a quantized weight with its scales, {:.3} bits a weight of the \
         denoiser, which had {:.3}.</p>\n",
        report.family.title(),
        report.bits_of_quantized(),
        report.bits_of_unet(),
        report.bits_of_source(),
    );
    page.push_str("<main>");
    let sections = [
        (
            "Error of each layer, decibels below what it computes of reference inputs, the worst first",
            of_layers(report),
        ),
        (
            "Error that each layer makes of what steps leave of samples, decibels below the samples, the worst first",
            of_results(report),
        ),
        (
            "The same of each step: all layers together, and the worst",
            of_steps(report),
        ),
        (
            "What each candidate costs each layer, decibels, the worst first",
            of_candidates(report),
        ),
    ];
    for (title, lines) in sections {
        if let Some(chart) = svg(&lines) {
            let _ = writeln!(
                page,
                "<section><h2>{}</h2>{chart}</section>",
                escaped(title)
            );
        }
    }
    page.push_str("</main>\n");
    page.push_str(&formats_table(report));
    page.push_str(&rules_table(report));
    page.push_str("<h2>Layers</h2>\n");
    page.push_str(&table(report));
    page.push_str("</body></html>\n");
    page
}

/// `10 log10`, of what is not zero.
fn decibels(power: f64) -> Option<f64> {
    (power > 0.0 && power.is_finite()).then(|| 10.0 * power.log10())
}

/// A line through values in falling order.
fn falling(name: &str, values: impl Iterator<Item = f64>) -> Line {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    let points = values.into_iter().enumerate();
    Line {
        name: name.to_owned(),
        points: points.map(|(at, value)| [at as f64, value]).collect(),
        is_faint: false,
    }
}

fn of_layers(report: &QuantizeReport) -> Vec<Line> {
    let ratio =
        |tensor: &QuantizedTensor| -tensor.errors.as_ref().map_or(tensor.sqnr_db, |e| e.sqnr_db);
    vec![falling("the last layer", report.tensors.iter().map(ratio))]
}

fn of_results(report: &QuantizeReport) -> Vec<Line> {
    let errors = report
        .tensors
        .iter()
        .filter_map(|tensor| tensor.errors.as_ref());
    let errors = errors.filter_map(|errors| decibels(errors.drift()?.powi(2)));
    vec![falling("the last layer", errors)]
}

fn of_steps(report: &QuantizeReport) -> Vec<Line> {
    let of = |tensor: &QuantizedTensor| Some(tensor.errors.as_ref()?.of_result.clone());
    let mut layers: Vec<(&str, Vec<f64>)> = report
        .tensors
        .iter()
        .filter_map(|tensor| Some((tensor.layer.as_str(), of(tensor)?)))
        .collect();
    let steps = layers
        .iter()
        .map(|(_, steps)| steps.len())
        .max()
        .unwrap_or(0);
    let all = (0..steps).map(|step| layers.iter().filter_map(|(_, steps)| steps.get(step)).sum());
    let all: Vec<f64> = all.collect();
    layers.sort_by(|a, b| b.1.iter().sum::<f64>().total_cmp(&a.1.iter().sum()));
    layers.truncate(DRAWN);
    let line = |name: &str, steps: &[f64]| Line {
        name: format!("{name}, in the last step"),
        points: steps
            .iter()
            .enumerate()
            .filter_map(|(step, power)| Some([step as f64 + 1.0, decibels(*power)?]))
            .collect(),
        is_faint: false,
    };
    let lines = std::iter::once(line("all", &all));
    lines
        .chain(layers.iter().map(|(name, steps)| line(name, steps)))
        .collect()
}

fn of_candidates(report: &QuantizeReport) -> Vec<Line> {
    let Some(plan) = &report.plan else {
        return Vec::new();
    };
    let of = |at: usize| {
        let each = plan.layers.iter().flat_map(|layer| &layer.candidates);
        each.filter(move |candidate| candidate.rule == at)
            .filter_map(|c| decibels(c.error))
    };
    let rules = plan.candidates.iter().enumerate();
    rules
        .map(|(at, rule)| falling(&format!("{}, the last layer", mode_of_rule(rule)), of(at)))
        .collect()
}

/// What is in each format, and which share of the denoiser's operations, where they are known.
fn formats_table(report: &QuantizeReport) -> String {
    let percent = |flops: Option<u64>| {
        let known = report.percent_of_flops(flops);
        known.map_or_else(String::new, |percent| format!("{percent:.2}"))
    };
    let mut text = "<h2>Formats</h2>\n<table><tr><th>format</th><th>layers</th><th>bits a weight with scales</th><th>bytes</th>\
                    <th>% of the operations</th></tr>\n"
        .to_owned();
    for sum in report.formats() {
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{:.3}</td><td>{}</td><td>{}</td></tr>",
            escaped(&format_text(sum.format)),
            sum.layers,
            sum.bits(),
            sum.bytes,
            percent(sum.flops)
        );
    }
    let of_activations = report.flops.as_ref().map(|flops| flops.of_activations);
    for (name, flops) in [
        ("not quantized: layers in float", report.float_flops()),
        (
            "not quantized: products of two activations (attention)",
            of_activations,
        ),
    ] {
        let _ = writeln!(
            text,
            "<tr><td>{name}</td><td></td><td></td><td></td><td>{}</td></tr>",
            percent(flops)
        );
    }
    text.push_str("</table>\n");
    if let Some(flops) = &report.flops {
        let [height, width] = flops.image_size;
        let _ = writeln!(
            text,
            "<p>{} in a run of the denoiser on one image of {height}x{width} pixels with {} tokens of text.</p>",
            operations(flops.all()),
            flops.tokens
        );
    }
    text
}

/// What each rule decided, in the order in which they are asked, without those that a plan made.
fn rules_table(report: &QuantizeReport) -> String {
    let mut text = "<h2>Rules, of which the first that matches decides</h2>\n<table><tr><th>pattern</th><th>mode</th>\
                    <th>layers</th><th>% of the weights</th></tr>\n"
        .to_owned();
    for rule in report.given_rules() {
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.2}</td></tr>",
            escaped(&rule.pattern),
            rule.mode(),
            rule.layers.len(),
            report.percent_of_weights(rule)
        );
    }
    text.push_str("</table>\n");
    for treated in &report.treated {
        let _ = writeln!(
            text,
            "<p>Algorithm {}: {} layers; {} convolutions, which it does not treat, are rounded to nearest.</p>",
            treated.algorithm,
            treated.layers,
            treated.convolutions.len()
        );
    }
    text
}

/// Every quantized layer, the one that costs most first.
fn table(report: &QuantizeReport) -> String {
    let mut rows: Vec<&QuantizedTensor> = report.tensors.iter().collect();
    let cost = |row: &QuantizedTensor| {
        let drift = row.errors.as_ref().and_then(|errors| errors.drift());
        drift.unwrap_or_else(|| 10f64.powf(-row.sqnr_db / 20.0))
    };
    rows.sort_by(|a, b| cost(b).total_cmp(&cost(a)));
    let mut text =
        "<table><tr><th>layer</th><th>format</th><th>lowest scale</th><th>highest scale</th>\
                    <th>SQNR of the weight, dB</th><th>of what it computes, dB</th>\
                    <th>error of a step's result</th><th>bytes</th></tr>\n"
            .to_owned();
    for row in rows {
        let errors = row.errors.as_ref();
        let [lowest, highest] = row.scale_range;
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{lowest:.3e}</td><td>{highest:.3e}</td><td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(&row.layer),
            escaped(&format_text(row.format)),
            row.sqnr_db,
            errors.map_or_else(String::new, |errors| format!("{:.1}", errors.sqnr_db)),
            errors
                .and_then(|errors| errors.drift())
                .map_or_else(String::new, |drift| format!("{drift:.2e}")),
            row.bytes
        );
    }
    text.push_str("</table>\n");
    text
}
