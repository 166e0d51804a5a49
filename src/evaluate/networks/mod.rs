//! What networks say of pictures: CLIP score, ImageReward, LPIPS, FID and the Inception score. Each network is a graph like any
//! model's, its weights are files of the user, and its precision is float32.

mod batches;
mod blip;
mod clip_score;
mod image_reward;
mod inception;
mod lpips;

use std::path::{Path, PathBuf};

use crate::runtime::Session;
use crate::util::named;

use super::{Comparison, EvaluateError, Metric};

pub use inception::{Resize, resized};
pub use lpips::Backbone;

use clip_score::Clip;
use image_reward::ImageReward;
use inception::Inception;
use lpips::Lpips;

named! {
    /// A network, by the option that names its weights.
    pub enum NetworkKind {
        /// transformers' `CLIPModel`, a folder or a repository on the hub.
        Clip = "clip",
        /// ImageReward, a folder.
        ImageReward = "image-reward",
        /// AlexNet or VGG16 of torchvision with the weights of lpips, a safetensors file.
        Lpips = "lpips",
        /// The InceptionV3 of FID, a safetensors file.
        Inception = "inception",
    }
}

impl NetworkKind {
    /// What its weights are.
    pub fn meaning(self) -> &'static str {
        match self {
            NetworkKind::Clip => {
                "a folder of transformers' CLIPModel, or a repository such as openai/clip-vit-base-patch16"
            }
            NetworkKind::ImageReward => {
                "a folder with ImageReward's weights as model.safetensors and the vocab.txt of bert-base-uncased"
            }
            NetworkKind::Lpips => {
                "a safetensors file of torchvision's AlexNet or VGG16 and of lpips' linear layers"
            }
            NetworkKind::Inception => {
                "a safetensors file of pytorch-fid's or torch-fidelity's InceptionV3"
            }
        }
    }

    /// Its weights among `files`.
    pub fn weights(self, files: &NetworkFiles) -> Option<&Path> {
        match self {
            NetworkKind::Clip => files.clip.as_deref(),
            NetworkKind::ImageReward => files.image_reward.as_deref(),
            NetworkKind::Lpips => files.lpips.as_deref(),
            NetworkKind::Inception => files.inception.as_deref(),
        }
    }
}

impl Metric {
    /// The network that computes it; `None` for those that need none.
    pub fn network(self) -> Option<NetworkKind> {
        match self {
            Metric::ClipScore => Some(NetworkKind::Clip),
            Metric::ImageReward => Some(NetworkKind::ImageReward),
            Metric::Lpips => Some(NetworkKind::Lpips),
            Metric::Fid | Metric::InceptionScore => Some(NetworkKind::Inception),
            Metric::Psnr | Metric::Ssim | Metric::Drift | Metric::Adherence | Metric::Bytes => None,
        }
    }
}

/// Where the weights of networks are.
#[derive(Clone, Debug, Default)]
pub struct NetworkFiles {
    /// A folder with `config.json`, weights and tokenizer of a `CLIPModel`.
    pub clip: Option<PathBuf>,
    /// A folder with the weights of ImageReward and `vocab.txt` of bert-base-uncased.
    pub image_reward: Option<PathBuf>,
    /// A safetensors file with `features.*` of torchvision's AlexNet or VGG16 and `lin0.model.1.weight` to
    /// `lin4.model.1.weight` of lpips.
    pub lpips: Option<PathBuf>,
    /// A safetensors file of pytorch-fid's or torch-fidelity's InceptionV3.
    pub inception: Option<PathBuf>,
    pub resize: Resize,
    /// A folder of pictures that FID is a distance from, in place of the reference's.
    pub fid_reference: Option<PathBuf>,
}

impl NetworkFiles {
    /// Whether there are weights for none.
    pub fn is_empty(&self) -> bool {
        let mut all = NetworkKind::ALL.iter();
        all.all(|network| network.weights(self).is_none())
    }
}

/// The networks that there are weights for.
pub struct Networks {
    clip: Option<Clip>,
    image_reward: Option<ImageReward>,
    lpips: Option<Lpips>,
    inception: Option<Inception>,
}

/// Told which network is at work, and how many of how many pictures it has seen.
pub type Observe<'a> = dyn FnMut(NetworkKind, usize, usize) + 'a;

impl Networks {
    /// Opens the files and compares them with the networks, without reading weights.
    ///
    /// # Errors
    /// When a file is missing, or has not the weights of the network.
    pub fn open(files: &NetworkFiles) -> Result<Networks, EvaluateError> {
        let image_reward = files.image_reward.as_deref();
        Ok(Networks {
            clip: files.clip.as_deref().map(Clip::open).transpose()?,
            image_reward: image_reward.map(ImageReward::open).transpose()?,
            lpips: files.lpips.as_deref().map(Lpips::open).transpose()?,
            inception: files
                .inception
                .as_deref()
                .map(|path| Inception::open(path, files.resize, files.fid_reference.as_deref()))
                .transpose()?,
        })
    }

    /// Adds to comparisons with one reference what the networks say of their pictures. One network after the other has its
    /// weights on the devices.
    ///
    /// # Errors
    /// When a picture cannot be read or is too small, a weight cannot be read, a network does not compile, or a result is not
    /// finite.
    pub fn measure(
        &self,
        session: &Session,
        comparisons: &mut [Comparison],
        observe: &mut Observe<'_>,
    ) -> Result<(), EvaluateError> {
        let pairs: usize = comparisons.iter().map(|run| run.pairs.len()).sum();
        if pairs == 0 {
            return Ok(());
        }
        if let Some(lpips) = &self.lpips {
            let done = &mut |count| observe(NetworkKind::Lpips, count, pairs);
            lpips.measure(session, comparisons, done)?;
        }
        if let Some(clip) = &self.clip {
            let all = pictures(comparisons).len();
            let done = &mut |count| observe(NetworkKind::Clip, count, all);
            clip.measure(session, comparisons, done)?;
        }
        if let Some(image_reward) = &self.image_reward {
            let all = pictures(comparisons).len();
            let done = &mut |count| observe(NetworkKind::ImageReward, count, all);
            image_reward.measure(session, comparisons, done)?;
        }
        if let Some(inception) = &self.inception {
            let all = inception.pictures(comparisons).len();
            let done = &mut |count| observe(NetworkKind::Inception, count, all);
            inception.measure(session, comparisons, done)?;
        }
        Ok(())
    }
}

/// The reference's pictures, then each run's: as many of each.
fn pictures(comparisons: &[Comparison]) -> Vec<PathBuf> {
    let reference = comparisons.first().into_iter().flat_map(|run| &run.pairs);
    let reference = reference.map(|pair| pair.reference.clone());
    let runs = comparisons.iter().flat_map(|run| &run.pairs);
    reference
        .chain(runs.map(|pair| pair.path.clone()))
        .collect()
}

/// The prompt of each of the reference's pictures.
fn prompts(comparisons: &[Comparison]) -> impl Iterator<Item = &str> {
    let first = comparisons.first().into_iter().flat_map(|run| &run.pairs);
    first.map(|pair| pair.prompt.as_str())
}

/// Numbers of [`pictures`], of `count` of the reference, as those of each run: the reference's and its own of each pair.
fn beside_reference(numbers: &[f64], count: usize) -> impl Iterator<Item = Vec<[f64; 2]>> {
    let (of_reference, rest) = numbers.split_at(count);
    rest.chunks(count).map(move |own| {
        let pairs = of_reference.iter().zip(own);
        pairs.map(|(before, after)| [*before, *after]).collect()
    })
}

/// The means of the reference's numbers and of the run's.
fn means(pairs: &[[f64; 2]]) -> [f64; 2] {
    let count = pairs.len() as f64;
    [0, 1].map(|at| pairs.iter().map(|pair| pair[at]).sum::<f64>() / count)
}

/// The one number of a row of results.
fn finite(what: &'static str, path: &Path, row: Vec<f32>) -> Result<f64, EvaluateError> {
    check_finite(what, path, &row)?;
    Ok(row.first().copied().map_or(0.0, f64::from))
}

fn check_finite(what: &'static str, path: &Path, row: &[f32]) -> Result<(), EvaluateError> {
    match row.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(EvaluateError::NotFinite {
            what,
            path: path.to_owned(),
        }),
    }
}
