//! One page that shows runs side by side, with everything it needs inside.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{Comparison, EvaluateError};
use crate::util::text::binary_size;

/// Pictures that a page shows of each run.
const MOST: usize = 64;
/// Size of the curve, in pixels, and the space around it.
const CHART: [f64; 2] = [640.0, 320.0];
const BORDER: f64 = 60.0;

const STYLE: &str = "body{font:14px sans-serif;margin:2em;max-width:100em}table{border-collapse:collapse}\
td,th{padding:.3em .8em;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}\
img{image-rendering:pixelated;min-width:128px;max-width:384px}small{color:#555}";

/// The page of some runs beside `reference`, all compared with it.
///
/// # Errors
/// When a picture cannot be read.
pub fn page(reference: &Path, runs: &[Comparison]) -> Result<String, EvaluateError> {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>evaluate</title><style>{STYLE}</style></head>\
         <body>\n<h1>Runs beside {}</h1>\n",
        escaped(&reference.display().to_string())
    );
    page.push_str(&table(runs));
    page.push_str(&curve(runs));
    page.push_str(&drifts(runs));
    pictures(&mut page, runs)?;
    page.push_str("</body></html>\n");
    Ok(page)
}

fn table(runs: &[Comparison]) -> String {
    let mut text = "<table><tr><th>run</th><th>PSNR, dB</th><th>SSIM</th><th>drift after the last step</th>\
                    <th>LPIPS</th><th>CLIP score (reference)</th><th>ImageReward (reference)</th><th>FID (reference)</th><th>Inception score (reference)</th>\
                    <th>colours and shapes right (reference)</th><th>denoiser's files (reference)</th></tr>\n"
        .to_owned();
    let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), binary_size);
    for run in runs {
        let drift = run.drift.as_ref().and_then(|drift| drift.last());
        let _ = writeln!(
            text,
            "<tr><td>{}{}</td><td>{}</td><td>{:.4}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{}</td></tr>",
            escaped(&run.folder.display().to_string()),
            run.notes
                .iter()
                .map(|note| format!("<br><small>{}</small>", escaped(note)))
                .collect::<String>(),
            decibels(run.psnr),
            run.ssim,
            drift.map_or_else(String::new, |drift| format!("{drift:.4}")),
            run.lpips
                .map_or_else(String::new, |lpips| format!("{lpips:.4}")),
            run.clip_score.map_or_else(String::new, both),
            run.image_reward.map_or_else(String::new, both),
            run.fid
                .map_or_else(String::new, |fid| match run.reference_fid {
                    None => format!("{fid:.2}"),
                    Some(before) => both([before, fid]),
                }),
            run.inception_score
                .map_or_else(String::new, |scores| both(scores.map(|s| s.mean))),
            run.adherence
                .map_or_else(String::new, |[before, after]| format!(
                    "{:.1} % ({:.1} %)",
                    100.0 * after,
                    100.0 * before
                )),
            match run.bytes {
                [None, None] => String::new(),
                [before, after] => format!("{} ({})", bytes(after), bytes(before)),
            },
        );
    }
    text.push_str("</table>\n");
    text
}

/// A number, and in brackets that of the reference.
fn both([before, after]: [f64; 2]) -> String {
    format!("{after:.2} ({before:.2})")
}

fn decibels(psnr: f64) -> String {
    match psnr.is_finite() {
        true => format!("{psnr:.2}"),
        false => "equal".to_owned(),
    }
}

/// PSNR against the bytes of the denoiser's files, of the runs that have both.
fn curve(runs: &[Comparison]) -> String {
    let points = runs.iter().filter_map(|run| {
        let bytes = run.bytes[1]? as f64;
        run.psnr.is_finite().then_some((bytes, run.psnr, run))
    });
    let mut points: Vec<(f64, f64, &Comparison)> = points.collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    if points.len() < 2 {
        return String::new();
    }
    let most = |of: fn(&(f64, f64, &Comparison)) -> f64| points.iter().map(of).fold(0.0, f64::max);
    let scales = [most(|p| p.0), most(|p| p.1)];
    let place = |bytes: f64, psnr: f64| {
        let [width, height] = CHART;
        let x = BORDER + bytes / scales[0] * (width - 2.0 * BORDER);
        let y = height - BORDER - psnr / scales[1] * (height - 2.0 * BORDER);
        (x, y)
    };
    let line: Vec<String> = points
        .iter()
        .map(|(bytes, psnr, _)| {
            let (x, y) = place(*bytes, *psnr);
            format!("{x:.1},{y:.1}")
        })
        .collect();
    let mut text = format!(
        "<h2>PSNR against bytes</h2>\n<svg width=\"{}\" height=\"{}\" font-size=\"11\"><polyline fill=\"none\" stroke=\"#888\" \
         points=\"{}\"/>",
        CHART[0],
        CHART[1],
        line.join(" ")
    );
    for (bytes, psnr, run) in &points {
        let (x, y) = place(*bytes, *psnr);
        let name = run.folder.file_name().unwrap_or_default();
        let _ = write!(
            text,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/><text x=\"{:.1}\" y=\"{:.1}\">{}: {psnr:.1} dB, {}</text>",
            x + 6.0,
            y - 6.0,
            escaped(&name.to_string_lossy()),
            binary_size(*bytes as u64)
        );
    }
    text.push_str("</svg>\n");
    text
}

/// The drift of each run after each step.
fn drifts(runs: &[Comparison]) -> String {
    let mut text = String::new();
    for run in runs {
        let Some(drift) = &run.drift else { continue };
        let steps: Vec<String> = drift.iter().map(|x| format!("{x:.4}")).collect();
        let _ = writeln!(
            text,
            "<h2>Drift of {}</h2><p>Relative distance of the samples after each step: {}</p>",
            escaped(&run.folder.display().to_string()),
            steps.join(", ")
        );
    }
    text
}

/// A row for each prompt: the reference's picture, then each run's.
fn pictures(page: &mut String, runs: &[Comparison]) -> Result<(), EvaluateError> {
    let Some(first) = runs.first() else {
        return Ok(());
    };
    page.push_str("<h2>Pictures</h2>\n<table><tr><th>prompt</th><th>reference</th>");
    for run in runs {
        let _ = write!(
            page,
            "<th>{}</th>",
            escaped(&run.folder.display().to_string())
        );
    }
    page.push_str("</tr>\n");
    for (at, pair) in first.pairs.iter().take(MOST).enumerate() {
        let _ = write!(
            page,
            "<tr><td>{}<br><small>seed {}</small></td><td>{}</td>",
            escaped(&pair.prompt),
            pair.seed,
            picture(&pair.reference)?
        );
        for run in runs {
            // Pairs stand in the order of the reference's pictures.
            if let Some(pair) = run.pairs.get(at) {
                let _ = write!(
                    page,
                    "<td>{}<br><small>{} dB, SSIM {:.4}{}{}{}</small></td>",
                    picture(&pair.path)?,
                    decibels(pair.psnr),
                    pair.ssim,
                    pair.lpips
                        .map_or_else(String::new, |lpips| format!(", LPIPS {lpips:.4}")),
                    pair.clip_score.map_or_else(String::new, |scores| format!(
                        ", CLIP score {}",
                        both(scores)
                    )),
                    pair.image_reward
                        .map_or_else(String::new, |rewards| format!(
                            ", ImageReward {}",
                            both(rewards)
                        )),
                );
            }
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
    if let Some(left @ 1..) = first.pairs.len().checked_sub(MOST) {
        let _ = writeln!(
            page,
            "<p>{left} more pictures are compared and not shown.</p>"
        );
    }
    Ok(())
}

fn picture(path: &Path) -> Result<String, EvaluateError> {
    let bytes = fs::read(path).map_err(|source| EvaluateError::Folder {
        path: path.to_owned(),
        source,
    })?;
    let bytes = STANDARD.encode(bytes);
    Ok(format!(
        "<img src=\"data:image/png;base64,{bytes}\" alt=\"\">"
    ))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
