//! A page of a run: its curves and its sample images in one HTML file, which needs no server and no script.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::chart::{Line, escaped, smoothed, svg};
use super::{MetricsError, names, read_json_lines};
use crate::util::files::{Access, AtomicFile, Durability, Existing};

/// Decay of the smoothed line of noisy scalars.
const SMOOTHING: f64 = 0.98;
/// Most grids of sample images on the page: the newest, and earlier ones at even distances.
const MOST_GRIDS: usize = 12;

/// The style of pages with charts.
pub const STYLE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1340px;margin:2em auto;padding:0 1em}\
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em 2em}h2{font-size:1.05em;margin:.6em 0 .2em}\
svg{width:100%;height:auto}svg text{font-size:11px;fill:currentColor}polyline{fill:none;stroke-width:1.6;\
stroke-linejoin:round;stroke-linecap:round}.grid{stroke:currentColor;stroke-opacity:.15}.legend{margin:0;font-size:13px}\
.legend span{margin-right:1.2em}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}\
img{max-width:100%;image-rendering:pixelated}";

/// What a chart shows of the metrics.
struct Chart {
    title: &'static str,
    /// How the names of its scalars begin.
    names: &'static str,
    is_smoothed: bool,
}

const CHARTS: [Chart; 9] = [
    Chart {
        title: "Loss",
        names: names::LOSS,
        is_smoothed: true,
    },
    Chart {
        title: "Validation loss, and from each noise level on",
        names: names::VALIDATION_LOSS,
        is_smoothed: false,
    },
    Chart {
        title: "Learning rate",
        names: names::CURRENT_LEARNING_RATE,
        is_smoothed: false,
    },
    Chart {
        title: "Norm of the gradient, and of parts of the model",
        names: names::GRAD_NORM,
        is_smoothed: true,
    },
    Chart {
        title: "Samples a second",
        names: names::SAMPLES_PER_SEC,
        is_smoothed: true,
    },
    Chart {
        title: "Seconds a step waited for data",
        names: names::DATA_WAIT_SECONDS,
        is_smoothed: true,
    },
    Chart {
        title: "Model flops utilization",
        names: names::MODEL_FLOPS_UTILIZATION,
        is_smoothed: true,
    },
    Chart {
        title: "Goodput: the share of all time since the first start that was spent in steps that count",
        names: names::GOODPUT,
        is_smoothed: false,
    },
    Chart {
        title: "Skipped steps",
        names: names::SKIPPED_STEPS,
        is_smoothed: false,
    },
];

/// What a page is made of.
#[derive(Clone, Copy, Debug)]
pub struct PageSources<'a> {
    pub run_name: &'a str,
    /// The JSON lines that [`super::MetricsWriter`] writes.
    pub jsonl: &'a Path,
    /// The folder of sample images, `step-<step>-<number>.png`.
    pub samples: Option<&'a Path>,
}

/// Writes the page of a run to `path`, in place of an earlier one.
///
/// # Errors
/// When the metrics or an image cannot be read, or the page cannot be written.
pub fn write_page(path: &Path, sources: &PageSources<'_>) -> Result<(), MetricsError> {
    let page = page(sources)?;
    let write = || {
        let mut file = AtomicFile::create(path, Access::Umask)?;
        file.write_all(page.as_bytes())?;
        file.commit(path, Existing::Replace, Durability::Unsynced)
    };
    write().map_err(|source| MetricsError::Io {
        path: path.to_owned(),
        source,
    })
}

fn page(sources: &PageSources<'_>) -> Result<String, MetricsError> {
    let metrics = read_json_lines(sources.jsonl)?;
    let scalars = scalars(&metrics.lines);
    let name = match sources.run_name {
        "" => "Training run",
        name => name,
    };
    let name = escaped(name);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{name}</title><style>{STYLE}</style></head>\n\
         <body><h1>{name}</h1>\n<main>"
    );
    for chart in &CHARTS {
        if let Some(svg) = svg(&lines(chart, &scalars)) {
            let _ = writeln!(out, "<section><h2>{}</h2>{svg}</section>", chart.title);
        }
    }
    out.push_str("</main>\n");
    for (step, path) in grids(sources.samples)? {
        let png = fs::read(&path).map_err(|source| MetricsError::Io { path, source })?;
        let png = STANDARD.encode(png);
        let _ = writeln!(
            out,
            "<h2>Samples after {step} steps</h2><img alt=\"samples after {step} steps\" src=\"data:image/png;base64,{png}\">"
        );
    }
    out.push_str("</body></html>\n");
    Ok(out)
}

/// The scalars of all steps by name; of two lines with one step the later one holds.
fn scalars(lines: &[Map<String, Value>]) -> BTreeMap<&str, BTreeMap<u64, f64>> {
    let mut scalars: BTreeMap<&str, BTreeMap<u64, f64>> = BTreeMap::new();
    for line in lines {
        let Some(step) = line.get("step").and_then(Value::as_u64) else {
            continue;
        };
        for (name, value) in line {
            if let Some(value) = value.as_f64().filter(|_| name != "step") {
                scalars.entry(name).or_default().insert(step, value);
            }
        }
    }
    scalars
}

fn lines(chart: &Chart, scalars: &BTreeMap<&str, BTreeMap<u64, f64>>) -> Vec<Line> {
    let mut lines = Vec::new();
    for (name, values) in scalars.range(chart.names..) {
        if !name.starts_with(chart.names) {
            break;
        }
        let points: Vec<[f64; 2]> = values.iter().map(|(s, v)| [*s as f64, *v]).collect();
        let name = name.rsplit('/').next().unwrap_or(name).replace('_', " ");
        if chart.is_smoothed {
            lines.push(Line {
                name: name.clone(),
                points: points.clone(),
                is_faint: true,
            });
        }
        lines.push(Line {
            points: match chart.is_smoothed {
                true => smoothed(&points, SMOOTHING),
                false => points,
            },
            name,
            is_faint: false,
        });
    }
    lines
}

/// The grids to show, the newest first, with their steps.
fn grids(folder: Option<&Path>) -> Result<Vec<(u64, PathBuf)>, MetricsError> {
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        return Ok(Vec::new());
    };
    let io = |source| MetricsError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut newest: BTreeMap<u64, PathBuf> = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let step = name
            .strip_prefix("step-")
            .and_then(|name| name.strip_suffix(".png"))
            .and_then(|name| name.split('-').next())
            .and_then(|step| step.parse().ok());
        if let Some(step) = step {
            // Of a step that was drawn twice the grid with the higher number.
            let known = newest.entry(step).or_insert_with(|| path.clone());
            if path > *known {
                *known = path;
            }
        }
    }
    let all: Vec<(u64, PathBuf)> = newest.into_iter().rev().collect();
    let count = all.len().min(MOST_GRIDS);
    let spread = |at: usize| match count {
        0 | 1 => at,
        count => at * (all.len() - 1) / (count - 1),
    };
    Ok((0..count).map(|at| all[spread(at)].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_curves_and_the_grids_and_needs_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let jsonl = dir.path().join("metrics.jsonl");
        // The second line of step 1 holds; what is not finite is left out.
        let text = r#"{"step":0,"learning/loss":4.0,"learning/grad_norm":1.0,"run_name":"r"}
{"step":1,"learning/loss":9.0,"learning/grad_norm":null}
{"step":1,"learning/loss":2.0}
{"step":2,"learning/validation_loss":0.5,"learning/validation_loss_from_750":0.25}
{"step":2,"lear"#;
        fs::write(&jsonl, text).unwrap();
        let samples = dir.path().join("samples");
        fs::create_dir(&samples).unwrap();
        for at in 0..30 {
            let name = format!("step-{at:08}-00001.png");
            fs::write(samples.join(name), [at as u8; 3]).unwrap();
        }
        fs::write(samples.join("step-00000029-00002.png"), [99; 3]).unwrap();
        fs::write(samples.join("other.png"), "").unwrap();
        let path = dir.path().join("report.html");
        let sources = PageSources {
            run_name: "a <run> & more",
            jsonl: &jsonl,
            samples: Some(&samples),
        };
        for _ in 0..2 {
            write_page(&path, &sources).unwrap();
        }
        let page = fs::read_to_string(&path).unwrap();
        assert!(page.contains("<h1>a &lt;run&gt; &amp; more</h1>"));
        for (title, is_there) in [
            ("<h2>Loss</h2>", true),
            (
                "<h2>Validation loss, and from each noise level on</h2>",
                true,
            ),
            (
                "<h2>Norm of the gradient, and of parts of the model</h2>",
                true,
            ),
            ("<h2>Skipped steps</h2>", false),
        ] {
            assert_eq!(page.contains(title), is_there, "{title}");
        }
        assert!(page.contains("validation loss from 750: 0.25"));
        assert!(!page.contains("9.0") && !page.contains("<script") && !page.contains("http"));
        assert_eq!(page.matches("<svg").count(), 3);
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        let encoded = |bytes: [u8; 3]| format!("base64,{}\"", STANDARD.encode(bytes));
        let shown = page.matches("data:image/png").count();
        assert_eq!(shown, MOST_GRIDS);
        // The newest first, with its later drawing, and the first last.
        assert!(page.find(&encoded([99; 3])).unwrap() < page.find(&encoded([0; 3])).unwrap());
        assert!(!page.contains(&encoded([29; 3])));
        // Nothing is left of writing.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_run_without_steps_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let jsonl = dir.path().join("metrics.jsonl");
        fs::write(&jsonl, "").unwrap();
        let sources = PageSources {
            run_name: "",
            jsonl: &jsonl,
            samples: None,
        };
        let page = page(&sources).unwrap();
        assert!(page.contains("<h1>Training run</h1>") && page.ends_with("</html>\n"));
    }
}
