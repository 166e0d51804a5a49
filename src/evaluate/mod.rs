//! Runs of `generate` compared: pictures of the same prompts and seeds, drawn by a reference and by other programs.

mod drift;
mod html;
mod networks;
mod requirement;
mod run;
mod similarity;
mod statistics;

use std::path::{Path, PathBuf};

use crate::data::DataError;
use crate::data::shapes::{Caption, ReadScore};
use crate::pipelines::PipelineError;
use crate::pipelines::image_file::ImageFileError;
use crate::util::named;
use crate::util::text::listed;
use crate::weights::WeightsError;

pub use html::page;
pub use networks::{Backbone, NetworkFiles, NetworkKind, Networks, Observe, Resize, resized};
pub use requirement::{Requirement, RequirementError};
pub use run::{Drawn, Key, Run};
pub use similarity::{SMALLEST, decibels, mean_squared_error, ssim};
pub use statistics::{InceptionScore, SPLITS, frechet_distance, inception_score};

/// Names that an error shows.
const SHOWN: usize = 4;

named! {
    /// What is told of a run.
    pub enum Metric {
        /// Peak signal-to-noise ratio of all pictures together, in decibels: torchmetrics' `PeakSignalNoiseRatio(data_range=1)`.
        Psnr = "psnr",
        /// Structural similarity, the mean of all pictures: torchmetrics' `StructuralSimilarityIndexMeasure(data_range=1)`.
        Ssim = "ssim",
        /// Relative L2 distance of the samples after the last step, the mean of all pictures.
        Drift = "drift",
        /// Share of the pictures whose colours and shapes are those of the prompt, as the fixed reader of `shapes` reads them.
        Adherence = "adherence",
        /// Bytes of the denoiser's files.
        Bytes = "bytes",
        /// Distance of the features of a network, the mean of all pictures: torchmetrics'
        /// `LearnedPerceptualImagePatchSimilarity(normalize=True)`.
        Lpips = "lpips",
        /// 100 times the cosine of the embeddings of picture and prompt, the mean of all pictures, at least 0: torchmetrics' `CLIPScore`.
        ClipScore = "clip_score",
        /// ImageReward of picture and prompt, the mean of all pictures: image-reward's `score`.
        ImageReward = "image_reward",
        /// Fréchet distance of the Inception features of the run's pictures from those of the reference's, or of a folder's.
        Fid = "fid",
        /// Inception score of the run's pictures, the mean of its parts: torch-fidelity's.
        InceptionScore = "inception_score",
    }
}

/// Why runs cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    #[error("{path}: {source}")]
    Folder {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path}: no pictures: expected files image-*.png of `generate`, here or in a folder images; found {}",
        listed(found, SHOWN)
    )]
    Empty { path: PathBuf, found: Vec<String> },
    #[error(transparent)]
    File(#[from] ImageFileError),
    #[error("{path}: {message}")]
    Picture { path: PathBuf, message: String },
    #[error(
        "{path}: its settings are a web interface's; `evaluate` compares pictures that this program has drawn"
    )]
    Foreign { path: PathBuf },
    #[error(
        "{} has no picture of {}, which {} has: compare runs of the same prompts and seeds",
        lacking.display(), listed(keys, SHOWN), having.display()
    )]
    Unpaired {
        lacking: PathBuf,
        having: PathBuf,
        keys: Vec<String>,
    },
    #[error(
        "{} has {}x{} pixels, {} has {}x{}: compare runs of the same sizes",
        reference.display(), sizes[0][0], sizes[0][1], picture.display(), sizes[1][0], sizes[1][1]
    )]
    Sizes {
        reference: PathBuf,
        picture: PathBuf,
        sizes: [[u32; 2]; 2],
    },
    #[error(
        "{} has {}x{} pixels; {what} is of pictures with sides of at least {least}",
        path.display(), size[0], size[1]
    )]
    Small {
        path: PathBuf,
        size: [u32; 2],
        what: &'static str,
        least: usize,
    },
    #[error(
        "{} has samples {found:?}, {} has {expected:?}: draw both with as many steps",
        path.display(), reference.display()
    )]
    Samples {
        reference: PathBuf,
        path: PathBuf,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    #[error("{path}: expected a model's folder, with .safetensors files in unet or transformer")]
    Model { path: PathBuf },
    /// The files of a network are of another one.
    #[error("{path}: {reason}")]
    Network { path: PathBuf, reason: String },
    #[error(
        "{path}: {what}: what the network computes of it is not finite; are its weights whole?"
    )]
    NotFinite { what: &'static str, path: PathBuf },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Tokenizer(#[from] DataError),
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Host(#[from] crate::host_tensor::HostTensorError),
}

/// A picture beside that of the reference.
#[derive(Clone, Debug)]
pub struct Pair {
    pub prompt: String,
    pub seed: u64,
    pub reference: PathBuf,
    pub path: PathBuf,
    /// In decibels; infinite where both are the same.
    pub psnr: f64,
    pub ssim: f64,
    /// `None` without the network, as all that follow.
    pub lpips: Option<f64>,
    /// Of the reference's picture and of the run's; may be negative.
    pub clip_score: Option<[f64; 2]>,
    /// Of the reference's picture and of the run's.
    pub image_reward: Option<[f64; 2]>,
}

/// A run beside the reference.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub folder: PathBuf,
    pub pairs: Vec<Pair>,
    /// Of all pictures together, in decibels; infinite where all are the same.
    pub psnr: f64,
    pub ssim: f64,
    /// The relative L2 distance of the samples after each step, the mean of all pictures. `None` unless both runs wrote
    /// their samples.
    pub drift: Option<Vec<f64>>,
    /// The share of right pictures of the reference and of the run; `None` of prompts that are none of `shapes`.
    pub adherence: Option<[f64; 2]>,
    /// Bytes of the denoisers' files of the reference and of the run, where their models are told.
    pub bytes: [Option<u64>; 2],
    /// The mean of all pictures; `None` without the network, as all that follow.
    pub lpips: Option<f64>,
    /// Of the reference's pictures and of the run's.
    pub clip_score: Option<[f64; 2]>,
    /// Of the reference's pictures and of the run's.
    pub image_reward: Option<[f64; 2]>,
    /// `None` also of a single picture.
    pub fid: Option<f64>,
    /// The reference's own, where distances are from other pictures.
    pub reference_fid: Option<f64>,
    /// Of the reference's pictures and of the run's; `None` also of fewer than [`SPLITS`].
    pub inception_score: Option<[InceptionScore; 2]>,
    /// Settings in which the runs differ, and what to know of numbers, as whole sentences.
    pub notes: Vec<String>,
}

impl Comparison {
    /// The number of a metric; `None` where the runs lack what it is of.
    pub fn metric(&self, metric: Metric) -> Option<f64> {
        match metric {
            Metric::Psnr => Some(self.psnr),
            Metric::Ssim => Some(self.ssim),
            Metric::Drift => self.drift.as_ref()?.last().copied(),
            Metric::Adherence => self.adherence.map(|[_, of_run]| of_run),
            Metric::Bytes => self.bytes[1].map(|bytes| bytes as f64),
            Metric::Lpips => self.lpips,
            Metric::ClipScore => self.clip_score.map(|[_, of_run]| of_run),
            Metric::ImageReward => self.image_reward.map(|[_, of_run]| of_run),
            Metric::Fid => self.fid,
            Metric::InceptionScore => self.inception_score.map(|[_, of_run]| of_run.mean),
        }
    }
}

/// Compares a run with the reference, picture by picture.
///
/// # Errors
/// When the runs have other prompts, seeds or sizes, or a file cannot be read.
pub fn compare(reference: &Run, run: &Run) -> Result<Comparison, EvaluateError> {
    let pairs = reference.pairs(run)?;
    let mut compared = Vec::with_capacity(pairs.len());
    let (mut errors, mut similar) = (0.0, 0.0);
    let mut scores = [ReadScore::default(), ReadScore::default()];
    let mut of_shapes = true;
    for [before, after] in &pairs {
        let pixels = [before.pixels()?, after.pixels()?];
        let sizes = pixels.each_ref().map(|p| [p.width(), p.height()]);
        if sizes[0] != sizes[1] {
            return Err(EvaluateError::Sizes {
                reference: before.path.clone(),
                picture: after.path.clone(),
                sizes,
            });
        }
        let error = mean_squared_error(&pixels[0], &pixels[1]);
        let similarity = ssim(&pixels[0], &pixels[1]).ok_or_else(|| EvaluateError::Small {
            path: before.path.clone(),
            size: sizes[0],
            what: "structural similarity",
            least: SMALLEST,
        })?;
        match Caption::parse(&before.key.prompt) {
            Err(_) => of_shapes = false,
            Ok(caption) => {
                for (score, pixels) in scores.iter_mut().zip(&pixels) {
                    score.add(crate::data::shapes::read(pixels).matches(&caption));
                }
            }
        }
        errors += error;
        similar += similarity;
        compared.push(Pair {
            prompt: before.key.prompt.clone(),
            seed: before.key.seed,
            reference: before.path.clone(),
            path: after.path.clone(),
            psnr: decibels(error),
            ssim: similarity,
            lpips: None,
            clip_score: None,
            image_reward: None,
        });
    }
    let count = compared.len() as f64;
    Ok(Comparison {
        folder: run.folder.clone(),
        psnr: decibels(errors / count),
        ssim: similar / count,
        drift: drift::drift(&pairs)?,
        adherence: of_shapes.then(|| scores.map(|score| score.fraction(score.both_right))),
        bytes: [reference.bytes, run.bytes],
        lpips: None,
        clip_score: None,
        image_reward: None,
        fid: None,
        reference_fid: None,
        inception_score: None,
        notes: run::differences(&pairs),
        pairs: compared,
    })
}

/// The sum of the sizes of a folder's files of weights.
fn weight_bytes(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder).ok()?;
    let files = entries.filter_map(|entry| entry.ok()).filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().ends_with(".safetensors")
    });
    let sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
    Some(sizes.sum()).filter(|bytes| *bytes > 0)
}
