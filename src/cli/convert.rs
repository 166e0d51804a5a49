//! `convert`: a model in any layout as a diffusers folder.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::{Value as Json, json};

use super::{CliError, print, progress, tell};
use crate::dtype::DType;
use crate::weights::source::{Layout, ModelSource, SourceError, WrittenPart};

/// `convert ...`
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Single .safetensors file in the original layout, a folder with one, or a diffusers folder
    #[arg(value_name = "IN")]
    source: PathBuf,
    /// Folder for the result; an existing one is not touched
    #[arg(value_name = "OUT_DIR")]
    output: PathBuf,
    /// dtype=fp16, bf16 or fp32: the type of the floats (default: as in the source)
    #[arg(value_name = "KEY=VALUE")]
    options: Vec<String>,
    /// Print JSON: family, parts, what was not taken over, seconds
    #[arg(long)]
    json: bool,
}

/// Runs `convert`.
///
/// # Errors
/// When the source is no model that is supported, the folder exists or cannot be written, or an option is unknown.
pub fn run(args: &ConvertArgs) -> Result<ExitCode, CliError> {
    let dtype = dtype(&args.options)?;
    let start = Instant::now();
    let source = ModelSource::open(&args.source).map_err(CliError::failed)?;
    for note in &source.notes {
        tell(&format!("note: {note}"));
    }
    if source.tokenizers == [None, None] {
        tell(
            "note: there is no tokenizer to copy; programs that need one must be given it, as diffusers is by \
             from_pretrained(DIR, tokenizer=...)",
        );
    }
    for ignored in &source.ignored {
        progress(&format!("not taken over: {ignored}"));
    }
    let parts = source
        .write_pipeline(&args.output, dtype)
        .map_err(|error| match error {
            SourceError::Exists { .. } => CliError::usage(error),
            _ => CliError::failed(error),
        })?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let report = report(args, &source, &parts, seconds);
        print(&format!("{report:#}"))?;
    } else {
        print(&summary(args, &source, &parts, seconds))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The `dtype` among the options.
fn dtype(options: &[String]) -> Result<Option<DType>, CliError> {
    let mut dtype = None;
    for option in options {
        let known = match option.as_str() {
            "dtype=fp16" => DType::F16,
            "dtype=bf16" => DType::BF16,
            "dtype=fp32" => DType::F32,
            _ => {
                return Err(CliError::Usage(format!(
                    "'{option}' is no option of convert; it takes dtype=fp16, dtype=bf16 or dtype=fp32"
                )));
            }
        };
        if dtype.replace(known).is_some() {
            return Err(CliError::Usage("dtype is given twice".to_owned()));
        }
    }
    Ok(dtype)
}

fn summary(
    args: &ConvertArgs,
    source: &ModelSource,
    parts: &[WrittenPart],
    seconds: f64,
) -> String {
    let inpaint = if source.inpaint { ", inpainting" } else { "" };
    let mut text = format!(
        "{}: {}{inpaint}, in {seconds:.1} s\n",
        args.output.display(),
        source.family.name()
    );
    for written in parts {
        text.push_str(&format!(
            "  {}: {} tensors, {:.1} MB\n",
            written.part,
            written.tensors,
            written.bytes as f64 / 1e6
        ));
    }
    text
}

fn report(args: &ConvertArgs, source: &ModelSource, parts: &[WrittenPart], seconds: f64) -> Json {
    let parts: serde_json::Map<String, Json> = parts
        .iter()
        .map(|w| {
            let value = json!({"tensors": w.tensors, "bytes": w.bytes});
            (w.part.to_string(), value)
        })
        .collect();
    let ignored: Vec<Json> = source
        .ignored
        .iter()
        .map(|i| json!({"reason": i.reason, "names": i.names}))
        .collect();
    json!({
        "output": args.output,
        "family": source.family.name(),
        "recipe": source.family.recipe(),
        "layout": match source.layout {
            Layout::Pipeline => "pipeline",
            Layout::SingleFile => "single_file",
        },
        "inpaint": source.inpaint,
        "parts": parts,
        "ignored": ignored,
        "notes": source.notes,
        "seconds": seconds,
    })
}
