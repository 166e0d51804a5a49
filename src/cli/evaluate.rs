//! `evaluate`: runs of `generate` beside a reference.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value as Json, json};

use super::doctor::try_load;
use super::{CliError, check_new_file, notices, print, progress, status, tell, write_new};
use crate::config::{Config, Loaded};
use crate::evaluate::{
    Comparison, EvaluateError, InceptionScore, NetworkFiles, Networks, Requirement, Resize, Run,
    compare, page,
};
use crate::hub::Wanted;
use crate::recipe::{self, hub};
use crate::util::Named;

/// Keys of the configuration that decide how a network runs, and how its repository is found.
const KEYS: [&str; 4] = ["hardware", "jax_cache_dir", "revision", "hf_access_token"];

/// `evaluate ...`
#[derive(Debug, Args)]
pub struct EvaluateArgs {
    /// Folder of the reference's pictures, made by `generate`: that of the run, or `images` in it
    #[arg(value_name = "REFERENCE")]
    reference: PathBuf,
    /// Folders of pictures of the same prompts and seeds; then, if a network is given, keys such as hardware=cpu, jax_cache_dir=DIR
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Folders of the models that drew the pictures, of the reference and of each run in this order: for bytes, and for the curve
    #[arg(long, value_name = "DIR", num_args = 1..)]
    models: Vec<PathBuf>,
    /// CLIP model for clip_score: a folder of transformers' CLIPModel, or a repository on the hub such as
    /// openai/clip-vit-base-patch16 (revision=NAME for another than main)
    #[arg(long, value_name = "NAME")]
    clip: Option<PathBuf>,
    /// Folder for image_reward: ImageReward's weights as model.safetensors, and the vocab.txt of bert-base-uncased
    #[arg(long, value_name = "DIR")]
    image_reward: Option<PathBuf>,
    /// Safetensors file for lpips: torchvision's AlexNet or VGG16 (features.*) with the lin0 to lin4 of lpips
    #[arg(long, value_name = "FILE")]
    lpips: Option<PathBuf>,
    /// Safetensors file for fid and inception_score: the InceptionV3 of pytorch-fid or torch-fidelity
    #[arg(long, value_name = "FILE")]
    inception: Option<PathBuf>,
    /// How pictures get the size that the InceptionV3 takes: as torch-fidelity and torchmetrics do it, or clean-fid
    #[arg(
        long,
        value_name = "NAME",
        requires = "inception",
        value_parser = PossibleValuesParser::new(Resize::NAMES)
            .try_map(|name| Resize::from_name(&name).ok_or("no such way"))
    )]
    inception_resize: Option<Resize>,
    /// Folder of pictures that fid is a distance from, such as photographs, in place of the reference's
    #[arg(long, value_name = "DIR", requires = "inception")]
    fid_reference: Option<PathBuf>,
    /// A bound that every run has to meet, such as "psnr>30", "lpips<0.1" or "drift<0.1"; otherwise the exit code is 1
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
    let (runs, mut keys) = split(&args.runs);
    // Keys may be the last words, behind the models.
    let (models, more) = split(&args.models);
    keys.extend(more);
    if runs.is_empty() {
        return Err(CliError::Usage(
            "expected folders of pictures to compare with the reference's".to_owned(),
        ));
    }
    if ![0, runs.len() + 1].contains(&models.len()) {
        return Err(CliError::Usage(format!(
            "--models has {} folders; expected one for the reference and one for each run, {} in all",
            models.len(),
            runs.len() + 1
        )));
    }
    check_requirements(args)?;
    let config = config(args, &keys)?;
    let networks = open_networks(args, &config)?;
    let open = |folder: &Path, at: usize| {
        let run = Run::open(folder)?;
        match models.get(at) {
            Some(model) => run.of_model(model),
            None => Ok(run),
        }
    };
    let reference = open(&args.reference, 0).map_err(refused)?;
    let mut comparisons = Vec::with_capacity(runs.len());
    for (at, folder) in runs.iter().enumerate() {
        let run = open(folder, at + 1).map_err(refused)?;
        comparisons.push(compare(&reference, &run).map_err(refused)?);
    }
    if let Some(networks) = &networks {
        measure(networks, &config, &mut comparisons)?;
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

/// The folders, and the words that are keys of the configuration: those with a `=` that are no folder.
fn split(words: &[PathBuf]) -> (Vec<&PathBuf>, Vec<String>) {
    let is_key = |word: &&PathBuf| word.to_string_lossy().contains('=') && !word.exists();
    let (keys, folders): (Vec<&PathBuf>, Vec<&PathBuf>) = words.iter().partition(is_key);
    let keys = keys.iter().map(|word| word.to_string_lossy().into_owned());
    (folders, keys.collect())
}

/// Refuses a bound of what no network computes, before anything is.
fn check_requirements(args: &EvaluateArgs) -> Result<(), CliError> {
    for requirement in &args.require {
        let Some(network) = requirement.metric.network() else {
            continue;
        };
        if network.weights(&args.network_files()).is_none() {
            return Err(CliError::Usage(format!(
                "{requirement}: {} needs the weights of a network: give --{network} with {}",
                requirement.metric,
                network.meaning(),
            )));
        }
    }
    Ok(())
}

/// The configuration that networks run with.
fn config(args: &EvaluateArgs, keys: &[String]) -> Result<Config, CliError> {
    let files = args.network_files();
    for word in keys {
        let name = word.split('=').next().unwrap_or_default();
        if !KEYS.contains(&name) {
            return Err(CliError::Usage(format!(
                "{word}: no folder of this name, and no key that evaluate takes; it takes {}",
                KEYS.join(", ")
            )));
        }
        if files.is_empty() {
            return Err(CliError::Usage(format!(
                "{word} has no effect without a network: --clip, --image-reward, --lpips or --inception"
            )));
        }
    }
    let Loaded {
        config, warnings, ..
    } = Config::from_overrides(keys, None)?;
    for warning in warnings {
        tell(&format!("warning: {warning}"));
    }
    for (key, given) in [
        ("revision", keys.iter().any(|k| k.starts_with("revision="))),
        ("hf_access_token", !config.hf_access_token.is_empty()),
    ] {
        let names_repository = files.clip.as_ref().is_some_and(|path| !path.exists());
        if given && !names_repository {
            return Err(CliError::Usage(format!(
                "{key} has no effect: --clip names no repository on the hub"
            )));
        }
    }
    Ok(config)
}

/// The networks that the command line has weights for; `None` without any.
fn open_networks(args: &EvaluateArgs, config: &Config) -> Result<Option<Networks>, CliError> {
    let mut files = args.network_files();
    if let Some(name) = &mut files.clip {
        let (revision, token) = (&config.revision, &config.hf_access_token);
        let text = name.to_string_lossy().into_owned();
        if let Some(found) = hub::find(&text, revision, token, &Wanted::Clip, &mut notices())? {
            *name = found.path;
        }
    }
    match files.is_empty() {
        true => Ok(None),
        false => Ok(Some(Networks::open(&files).map_err(refused)?)),
    }
}

fn measure(
    networks: &Networks,
    config: &Config,
    comparisons: &mut [Comparison],
) -> Result<(), CliError> {
    status::spin("opening the devices");
    let opened = recipe::open_session(config, &try_load, &mut notices())?;
    progress(&format!("networks: {}", opened.chosen));
    status::spin("compiling");
    let mut current = None;
    let measured = networks.measure(&opened.session, comparisons, &mut |network, done, total| {
        if current.replace(network) != Some(network) {
            status::count_steps(network.name(), 0, total as u64);
        }
        status::set_position(done as u64);
    });
    status::clear();
    measured.map_err(refused)
}

impl EvaluateArgs {
    fn network_files(&self) -> NetworkFiles {
        NetworkFiles {
            clip: self.clip.clone(),
            image_reward: self.image_reward.clone(),
            lpips: self.lpips.clone(),
            inception: self.inception.clone(),
            resize: self.inception_resize.unwrap_or_default(),
            fid_reference: self.fid_reference.clone(),
        }
    }
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
        | EvaluateError::Network { .. }
        | EvaluateError::Foreign { .. } => CliError::usage(error),
        EvaluateError::Folder { .. }
        | EvaluateError::File(_)
        | EvaluateError::Picture { .. }
        | EvaluateError::NotFinite { .. }
        | EvaluateError::Weights(_)
        | EvaluateError::Tokenizer(_)
        | EvaluateError::Pipeline(_)
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
    if let Some(lpips) = run.lpips {
        text.push_str(&format!(", LPIPS {lpips:.4}"));
    }
    if let Some([before, after]) = run.clip_score {
        text.push_str(&format!(", CLIP score {after:.2} (reference {before:.2})"));
    }
    if let Some([before, after]) = run.image_reward {
        text.push_str(&format!(", ImageReward {after:.3} (reference {before:.3})"));
    }
    if let Some(fid) = run.fid {
        text.push_str(&format!(", FID {fid:.2}"));
        if let Some(before) = run.reference_fid {
            text.push_str(&format!(" (reference {before:.2})"));
        }
    }
    if let Some([before, after]) = run.inception_score {
        text.push_str(&format!(
            ", Inception score {:.2} (reference {:.2})",
            after.mean, before.mean
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

fn score_json(score: InceptionScore) -> Json {
    json!({"mean": score.mean, "deviation": score.deviation})
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
                "lpips": pair.lpips,
                "clip_score": pair.clip_score.map(|[_, of_run]| of_run),
                "reference_clip_score": pair.clip_score.map(|[of_reference, _]| of_reference),
                "image_reward": pair.image_reward.map(|[_, of_run]| of_run),
                "reference_image_reward": pair.image_reward.map(|[of_reference, _]| of_reference),
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
            "lpips": run.lpips,
            "clip_score": run.clip_score.map(|[_, of_run]| of_run),
            "reference_clip_score": run.clip_score.map(|[of_reference, _]| of_reference),
            "image_reward": run.image_reward.map(|[_, of_run]| of_run),
            "reference_image_reward": run.image_reward.map(|[of_reference, _]| of_reference),
            "fid": run.fid,
            "reference_fid": run.reference_fid,
            "inception_resize": run.fid.map(|_| args.network_files().resize.name()),
            "inception_score": run.inception_score.map(|[_, of_run]| score_json(of_run)),
            "reference_inception_score": run.inception_score.map(|[of_reference, _]| score_json(of_reference)),
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
