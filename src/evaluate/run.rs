//! The pictures of one run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use image::RgbImage;

use super::{EvaluateError, weight_bytes};
use crate::models::Part;
use crate::pipelines::image_file::{GenerationSettings, Recorded, read_recorded};

/// What a picture is of. Two pictures of one run with the same prompt and seed are told apart by their order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub prompt: String,
    pub negative_prompt: String,
    pub seed: u64,
    pub occurrence: usize,
}

impl Key {
    fn text(&self) -> String {
        format!("'{}' with seed {}", self.prompt, self.seed)
    }
}

/// A picture that this program has drawn.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub key: Key,
    pub path: PathBuf,
    pub settings: GenerationSettings,
}

impl Drawn {
    /// # Errors
    /// When the file cannot be decoded.
    pub fn pixels(&self) -> Result<RgbImage, EvaluateError> {
        pixels(&self.path)
    }
}

/// The pixels of a file.
///
/// # Errors
/// When it cannot be decoded.
pub(super) fn pixels(path: &Path) -> Result<RgbImage, EvaluateError> {
    let pixels = image::open(path).map_err(|error| unreadable(path, &error))?;
    Ok(pixels.to_rgb8())
}

/// Width and height of a file's picture, of which only the beginning is read.
///
/// # Errors
/// When it is no picture.
pub(super) fn size(path: &Path) -> Result<[usize; 2], EvaluateError> {
    let (width, height) =
        image::image_dimensions(path).map_err(|error| unreadable(path, &error))?;
    Ok([width as usize, height as usize])
}

fn unreadable(path: &Path, error: &image::ImageError) -> EvaluateError {
    EvaluateError::Picture {
        path: path.to_owned(),
        message: error.to_string(),
    }
}

/// The pictures of one call of `generate`, or of several that wrote into one folder.
#[derive(Clone, Debug)]
pub struct Run {
    pub folder: PathBuf,
    /// In the order in which they were drawn.
    pub images: Vec<Drawn>,
    /// Bytes of the denoiser's files of the model that drew them, if it is told.
    pub bytes: Option<u64>,
}

/// The beginning of the names of pictures.
const STEM: &str = "image-";

impl Run {
    /// The pictures in `folder`, or in `images` in it.
    ///
    /// # Errors
    /// When there are none, or one has no settings of this program.
    pub fn open(folder: &Path) -> Result<Run, EvaluateError> {
        let inner = folder.join("images");
        let place = if inner.is_dir() { &inner } else { folder };
        let names = names(place)?;
        let pictures = names
            .iter()
            .filter(|name| name.starts_with(STEM) && name.ends_with(".png"));
        let mut counts: BTreeMap<(String, String, u64), usize> = BTreeMap::new();
        let mut images = Vec::new();
        for name in pictures {
            let path = place.join(name);
            let Recorded::Own(settings) = read_recorded(&path)? else {
                return Err(EvaluateError::Foreign { path });
            };
            let (prompt, negative) = (&settings.prompt, &settings.negative_prompt);
            let alike = (prompt.clone(), negative.clone(), settings.seed);
            let count = counts.entry(alike).or_default();
            let key = Key {
                prompt: prompt.clone(),
                negative_prompt: negative.clone(),
                seed: settings.seed,
                occurrence: *count,
            };
            *count += 1;
            images.push(Drawn {
                key,
                path,
                settings,
            });
        }
        match images.is_empty() {
            true => Err(EvaluateError::Empty {
                path: folder.to_owned(),
                found: names,
            }),
            false => Ok(Run {
                folder: folder.to_owned(),
                images,
                bytes: None,
            }),
        }
    }

    /// The same, drawn by the model in the folder `model`.
    ///
    /// # Errors
    /// When the folder has no denoiser with files of weights.
    pub fn of_model(mut self, model: &Path) -> Result<Run, EvaluateError> {
        let of_part = |part: Part| weight_bytes(&model.join(part.name()));
        let bytes = of_part(Part::Unet).or_else(|| of_part(Part::Transformer));
        self.bytes = Some(bytes.ok_or_else(|| EvaluateError::Model {
            path: model.to_owned(),
        })?);
        Ok(self)
    }

    /// The pictures of this run, each with that of `other`.
    ///
    /// # Errors
    /// Names pictures that one of the runs lacks.
    pub(super) fn pairs<'a>(
        &'a self,
        other: &'a Run,
    ) -> Result<Vec<[&'a Drawn; 2]>, EvaluateError> {
        let keys = |run: &'a Run| -> BTreeSet<&'a Key> {
            run.images.iter().map(|image| &image.key).collect()
        };
        for (having, lacking) in [(self, other), (other, self)] {
            let (all, there) = (keys(having), keys(lacking));
            let missing: Vec<String> = all.difference(&there).map(|key| key.text()).collect();
            if !missing.is_empty() {
                return Err(EvaluateError::Unpaired {
                    lacking: lacking.folder.clone(),
                    having: having.folder.clone(),
                    keys: missing,
                });
            }
        }
        let others: BTreeMap<&Key, &Drawn> = other
            .images
            .iter()
            .map(|image| (&image.key, image))
            .collect();
        let pairs = self.images.iter();
        Ok(pairs
            .filter_map(|image| Some([image, *others.get(&image.key)?]))
            .collect())
    }
}

/// The names of a folder's files, in order.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, EvaluateError> {
    let fail = |source| EvaluateError::Folder {
        path: folder.to_owned(),
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        names.push(
            entry
                .map_err(fail)?
                .file_name()
                .to_string_lossy()
                .into_owned(),
        );
    }
    names.sort();
    Ok(names)
}

/// Settings in which pairs of pictures differ beside their models.
pub(super) fn differences(pairs: &[[&Drawn; 2]]) -> Vec<String> {
    type Setting = fn(&GenerationSettings) -> String;
    let settings: [(&str, Setting); 3] = [
        ("steps", |s| s.steps.to_string()),
        ("guidance_scale", |s| s.guidance_scale.to_string()),
        ("scheduler", |s| s.scheduler.clone()),
    ];
    let differs = settings.into_iter().filter_map(|(name, of)| {
        let mut pairs = pairs
            .iter()
            .map(|pair| pair.map(|image| of(&image.settings)));
        let [before, after] = pairs.find(|[before, after]| before != after)?;
        Some(format!(
            "{name} differs: {before} in the reference, {after} here"
        ))
    });
    differs.collect()
}
