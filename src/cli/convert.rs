//! `convert`: a model in any layout as a diffusers folder, or as one file with the names of the original code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::{Value as Json, json};

use super::{CliError, completions, notices, print, progress, status, tell};
use crate::dtype::DType;
use crate::hub::Wanted;
use crate::recipe::hub;
use crate::weights::source::{Layout, ModelSource, PipelineKind, SourceError, WrittenPart};

/// `convert ...`
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Single .safetensors file in the original layout, a folder with one, a diffusers folder, or the name of a
    /// repository on the hub
    #[arg(value_name = "IN")]
    source: PathBuf,
    /// diffusers folder for the result, or a .safetensors file with the original code's names; an existing one is not touched
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// dtype=fp16, bf16 or fp32: the type of the floats (default: as in the source); revision=NAME: of the repository;
    /// parts=denoiser: of a file, the UNet or transformer alone (default: all)
    #[arg(value_name = "KEY=VALUE", add = completions::convert_options())]
    options: Vec<String>,
    /// Print JSON: family, parts, ignored tensors, seconds
    #[arg(long)]
    json: bool,
}

/// Runs `convert`.
///
/// # Errors
/// When the source is no model that is supported, the folder exists or cannot be written, or an option is unknown.
pub fn run(args: &ConvertArgs) -> Result<ExitCode, CliError> {
    let Options {
        dtype,
        revision,
        denoiser_alone,
    } = options(&args.options)?;
    let single_file = args.output.extension().is_some_and(|e| e == "safetensors");
    if denoiser_alone.is_some() && !single_file {
        return Err(CliError::Usage(
            "parts has no effect: a folder has all parts; for the denoiser alone name a file that ends in .safetensors"
                .to_owned(),
        ));
    }
    if args.output.exists() {
        // Before a download.
        let path = args.output.clone();
        return Err(CliError::usage(SourceError::Exists { path }));
    }
    let name = args.source.to_str().unwrap_or_default();
    let wanted = Wanted::Model {
        expected: None,
        without: None,
    };
    let found = hub::find(
        name,
        revision.unwrap_or_default(),
        "",
        &wanted,
        &mut notices(),
    )?;
    if found.is_none() && revision.is_some() {
        return Err(CliError::Usage(format!(
            "revision has no effect: {} is not the name of a repository",
            args.source.display()
        )));
    }
    let start = Instant::now();
    let path = found.map_or_else(|| args.source.clone(), |found| found.path);
    let source = ModelSource::open(&path).map_err(CliError::failed)?;
    for note in &source.notes {
        tell(&format!("note: {note}"));
    }
    if single_file && !source.tokenizers.is_empty() {
        tell(
            "note: the file has no tokenizer; programs that need one must be given it, as this one is by \
             tokenizer_model_name_or_path=FOLDER",
        );
    } else if source.tokenizers.is_empty() {
        tell(
            "note: there is no tokenizer to copy; programs that need one must be given it, as diffusers is by \
             from_pretrained(DIR, tokenizer=...)",
        );
    }
    for ignored in &source.ignored {
        progress(&format!("ignored: {ignored}"));
    }
    let mut observe = |done: u64, total: u64| match done {
        0 => status::count_bytes("writing", total),
        _ => status::set_position(done),
    };
    let written = match single_file {
        true => {
            let alone = denoiser_alone.unwrap_or(false);
            source.write_single_file(&args.output, dtype, alone, &mut observe)
        }
        false => source.write_pipeline(&args.output, dtype, &mut observe),
    };
    let parts = written.map_err(|error| match error {
        SourceError::Exists { .. } => CliError::usage(error),
        _ => CliError::failed(error),
    })?;
    let left_out = source.components.keys();
    let left_out = left_out.filter(|part| parts.iter().all(|written| written.part != **part));
    for part in left_out {
        progress(&format!(
            "ignored: {part}: not in a file of the denoiser alone"
        ));
    }
    status::clear();
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let report = report(args, &source, &parts, seconds);
        print(&format!("{report:#}"))?;
    } else {
        print(&summary(args, &source, &parts, seconds))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Default)]
struct Options<'a> {
    dtype: Option<DType>,
    revision: Option<&'a str>,
    /// Whether the file has the denoiser alone, where that is said.
    denoiser_alone: Option<bool>,
}

fn options(words: &[String]) -> Result<Options<'_>, CliError> {
    let mut options = Options::default();
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let before = match (key, value) {
            ("dtype", "fp16") => options.dtype.replace(DType::F16).is_some(),
            ("dtype", "bf16") => options.dtype.replace(DType::BF16).is_some(),
            ("dtype", "fp32") => options.dtype.replace(DType::F32).is_some(),
            ("parts", "all") => options.denoiser_alone.replace(false).is_some(),
            ("parts", "denoiser") => options.denoiser_alone.replace(true).is_some(),
            ("revision", name) if !name.is_empty() => options.revision.replace(name).is_some(),
            _ => {
                return Err(CliError::Usage(format!(
                    "'{word}' is not an option of convert; it takes dtype=fp16, dtype=bf16 or dtype=fp32, \
                     parts=all or parts=denoiser, and revision=NAME"
                )));
            }
        };
        if before {
            return Err(CliError::Usage(format!("{key} is given twice")));
        }
    }
    Ok(options)
}

fn summary(
    args: &ConvertArgs,
    source: &ModelSource,
    parts: &[WrittenPart],
    seconds: f64,
) -> String {
    let kind = match source.kind {
        PipelineKind::Text => "",
        PipelineKind::Inpaint => ", inpainting",
        PipelineKind::Control => ", with a control image",
    };
    let mut text = format!(
        "{}: {}{kind}, in {seconds:.1} s\n",
        args.output.display(),
        source.family.title()
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
        "family": source.family.title(),
        "recipe": source.family.spec().recipe,
        "layout": match source.layout {
            Layout::Pipeline => "pipeline",
            Layout::SingleFile => "single_file",
            Layout::Run => "run",
        },
        "inpaint": source.kind == PipelineKind::Inpaint,
        "parts": parts,
        "ignored": ignored,
        "notes": source.notes,
        "seconds": seconds,
    })
}
