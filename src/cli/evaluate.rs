//! `evaluate`: runs of `generate` beside a reference.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value as Json, json};

use super::{CliError, check_new_file, print, tell, write_new};
use crate::evaluate::{Comparison, EvaluateError, Requirement, Run, compare, page};

/// `evaluate ...`
#[derive(Debug, Args)]
pub struct EvaluateArgs {
    /// Folder of the reference's pictures, made by `generate`: that of the run, or `images` in it
    #[arg(value_name = "REFERENCE")]
    reference: PathBuf,
    /// Folders of pictures of the same prompts and seeds
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Folders of the models that drew the pictures, of the reference and of each run in this order: for bytes, and for the curve
    #[arg(long, value_name = "DIR", num_args = 1..)]
    models: Vec<PathBuf>,
    /// A bound that every run has to meet, such as "psnr>30", "ssim>=0.9" or "drift<0.1"; otherwise the exit code is 1
    #[arg(long, value_name = "BOUND")]
    require: Vec<Requirement>,
    /// Page with the pictures side by side, and the curve of quality against bytes; an existing file is not touched
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON: every metric of every run and of every picture
    #[arg(long)]
    json: bool,
}

/// Runs `evaluate`.
///
/// # Errors
/// When the runs have other prompts, seeds or sizes, or a file cannot be read or written.
pub fn run(args: &EvaluateArgs) -> Result<ExitCode, CliError> {
    if let Some(path) = &args.html {
        check_new_file(path)?;
    }
    if ![0, args.runs.len() + 1].contains(&args.models.len()) {
        return Err(CliError::Usage(format!(
            "--models has {} folders; expected one for the reference and one for each run, {} in all",
            args.models.len(),
            args.runs.len() + 1
        )));
    }
    let open = |folder: &Path, at: usize| {
        let run = Run::open(folder)?;
        match args.models.get(at) {
            Some(model) => run.of_model(model),
            None => Ok(run),
        }
    };
    let reference = open(&args.reference, 0).map_err(refused)?;
    let mut comparisons = Vec::with_capacity(args.runs.len());
    for (at, folder) in args.runs.iter().enumerate() {
        let run = open(folder, at + 1).map_err(refused)?;
        comparisons.push(compare(&reference, &run).map_err(refused)?);
    }
    if let Some(path) = &args.html {
        let page = page(&args.reference, &comparisons).map_err(refused)?;
        write_new(path, page.as_bytes())?;
    }
    match args.json {
        true => print(&format!("{:#}", to_json(args, &comparisons)))?,
        false => print(&comparisons.iter().map(summary).collect::<String>())?,
    }
    let mut missed = false;
    for comparison in &comparisons {
        for requirement in args.require.iter().filter(|r| !r.is_met(comparison)) {
            missed = true;
            let found = comparison.metric(requirement.metric);
            tell(&format!(
                "{}: {requirement} is not met: {}",
                comparison.folder.display(),
                found.map_or_else(
                    || format!("there is no {} of these pictures", requirement.metric),
                    |found| format!("it is {found:.4}")
                )
            ));
        }
    }
    Ok(ExitCode::from(u8::from(missed)))
}

/// Runs that cannot be compared are a wrong command line; files that cannot be read are not.
fn refused(error: EvaluateError) -> CliError {
    match error {
        EvaluateError::Unpaired { .. }
        | EvaluateError::Sizes { .. }
        | EvaluateError::Small { .. }
        | EvaluateError::Samples { .. }
        | EvaluateError::Empty { .. }
        | EvaluateError::Model { .. }
        | EvaluateError::Foreign { .. } => CliError::usage(error),
        EvaluateError::Folder { .. }
        | EvaluateError::File(_)
        | EvaluateError::Picture { .. }
        | EvaluateError::Weights(_)
        | EvaluateError::Host(_) => CliError::failed(error),
    }
}

fn summary(run: &Comparison) -> String {
    let mut text = format!(
        "{}: {} pictures, PSNR {}, SSIM {:.4}",
        run.folder.display(),
        run.pairs.len(),
        match run.psnr.is_finite() {
            true => format!("{:.2} dB", run.psnr),
            false => "infinite: all are equal".to_owned(),
        },
        run.ssim
    );
    if let Some(last) = run.drift.as_ref().and_then(|drift| drift.last()) {
        text.push_str(&format!(", drift {last:.4}"));
    }
    if let Some([before, after]) = run.adherence {
        text.push_str(&format!(
            ", colours and shapes right in {:.1} % (reference {:.1} %)",
            100.0 * after,
            100.0 * before
        ));
    }
    if let Some(bytes) = run.bytes[1] {
        text.push_str(&format!(", denoiser {:.2} MB", bytes as f64 / 1e6));
    }
    text.push('\n');
    for note in &run.notes {
        text.push_str(&format!("  {note}\n"));
    }
    text
}

fn to_json(args: &EvaluateArgs, runs: &[Comparison]) -> Json {
    let runs = runs.iter().map(|run| {
        let pictures = run.pairs.iter().map(|pair| {
            json!({
                "prompt": pair.prompt,
                "seed": pair.seed,
                "reference": pair.reference,
                "path": pair.path,
                // JSON has no infinity: null is a picture that is equal.
                "psnr": pair.psnr.is_finite().then_some(pair.psnr),
                "ssim": pair.ssim,
            })
        });
        let unmet = args.require.iter().filter(|r| !r.is_met(run));
        json!({
            "folder": run.folder,
            "psnr": run.psnr.is_finite().then_some(run.psnr),
            "ssim": run.ssim,
            "drift": run.drift,
            "adherence": run.adherence.map(|[_, of_run]| of_run),
            "reference_adherence": run.adherence.map(|[of_reference, _]| of_reference),
            "bytes": run.bytes[1],
            "reference_bytes": run.bytes[0],
            "notes": run.notes,
            "unmet": unmet.map(ToString::to_string).collect::<Vec<_>>(),
            "pictures": pictures.collect::<Vec<_>>(),
        })
    });
    json!({
        "reference": args.reference,
        "runs": runs.collect::<Vec<_>>(),
    })
}
