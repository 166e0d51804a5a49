//! The images of `generate`, written as each is finished.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::RgbImage;
use serde_json::{Value, json};

use crate::host_tensor::HostTensor;
use crate::pipelines::ImageRequest;
use crate::pipelines::image_file::{
    GenerationSettings, ImageFileError, labelled_grid, visible_scale, write_latents, write_numbered,
};

/// The images of a call and their files. Clones are of the same call.
#[derive(Clone)]
pub struct ImageFiles {
    call: Arc<Call>,
    /// The samples of unfinished images after each step, by their numbers, where they are to be written.
    samples: Arc<Mutex<BTreeMap<usize, Vec<HostTensor>>>>,
    /// Held while a file is written, so that a stop leaves no half of one.
    written: Arc<Mutex<Vec<PathBuf>>>,
}

struct Call {
    folder: PathBuf,
    /// The settings that all images share.
    common: GenerationSettings,
    requests: Vec<ImageRequest>,
    /// The images to start from.
    inputs: Vec<Input>,
}

/// An image to start from.
struct Input {
    path: String,
    /// A part of the names of what is drawn from it, where there are several.
    name: Option<String>,
}

impl Input {
    /// The files `paths`, named after their stems; those of one stem also by their number.
    fn all(paths: &[String]) -> Vec<Input> {
        let stem = |path: &String| {
            let stem = Path::new(path).file_stem().unwrap_or_default();
            let kept = |c: char| match c.is_alphanumeric() || c == '-' {
                true => c,
                false => '_',
            };
            let stem: String = stem.to_string_lossy().chars().map(kept).collect();
            stem.chars().take(MOST_OF_NAME).collect::<String>()
        };
        let stems: Vec<String> = paths.iter().map(stem).collect();
        let inputs = paths.iter().enumerate().map(|(at, path)| {
            let alike = stems.iter().filter(|stem| **stem == stems[at]).count();
            let name = match alike {
                1 => stems[at].clone(),
                _ => format!("{}_{}", stems[at], at + 1),
            };
            Input {
                path: path.clone(),
                name: (paths.len() > 1).then_some(name),
            }
        });
        inputs.collect()
    }
}

/// Most characters of an input's name in the names of files.
const MOST_OF_NAME: usize = 60;

impl Call {
    /// What image number `index` of the request starts from.
    fn input(&self, index: usize) -> Option<&Input> {
        self.inputs.get(self.requests.get(index)?.init)
    }
}

impl ImageFiles {
    /// For the images that `requests` asks for, from those at `inputs`.
    pub fn new(
        folder: PathBuf,
        common: GenerationSettings,
        requests: Vec<ImageRequest>,
        inputs: &[String],
    ) -> Self {
        ImageFiles {
            call: Arc::new(Call {
                folder,
                common,
                requests,
                inputs: Input::all(inputs),
            }),
            written: Arc::default(),
            samples: Arc::default(),
        }
    }

    /// Keeps what image number `index` of the request is after one more step, for the file beside it.
    pub fn keep_sample(&self, index: usize, sample: &HostTensor) {
        let samples = self.samples.lock();
        let mut samples = samples.unwrap_or_else(PoisonError::into_inner);
        samples.entry(index).or_default().push(sample.clone());
    }

    /// Writes image number `index` of the request, and gives its path.
    ///
    /// # Errors
    /// When it cannot be encoded or written.
    pub fn write(&self, index: usize, image: &RgbImage) -> Result<PathBuf, ImageFileError> {
        let Call {
            folder,
            common,
            requests,
            ..
        } = &*self.call;
        let input = self.call.input(index);
        let mut options = common.options.clone();
        if let Some(input) = input.filter(|input| input.name.is_some()) {
            options.insert("image".to_owned(), input.path.clone());
        }
        let settings = requests.get(index).map(|request| GenerationSettings {
            prompt: request.prompt.clone(),
            negative_prompt: request.negative_prompt.clone(),
            seed: request.seed,
            steps: request.steps as u32,
            guidance_scale: request.guidance_scale,
            options,
            ..common.clone()
        });
        let mut written = self.lock();
        let stem = match input.and_then(|input| input.name.as_ref()) {
            Some(name) => format!("image-{name}"),
            None => "image".to_owned(),
        };
        let path = write_numbered(folder, &stem, image, settings.as_ref())?;
        let samples = self.samples.lock();
        let samples = samples
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&index);
        if let Some(samples) = samples {
            write_latents(&path, &samples)?;
        }
        written.push(path.clone());
        Ok(path)
    }

    /// Writes a preview, and gives its path.
    ///
    /// # Errors
    /// When it cannot be encoded or written.
    pub fn write_preview(&self, preview: &RgbImage) -> Result<PathBuf, ImageFileError> {
        let _written = self.lock();
        write_numbered(&self.call.folder, "preview", preview, None)
    }

    /// Writes a labelled grid of `images`, all of the call, and gives its path.
    ///
    /// # Errors
    /// When the grid would be too large, or cannot be written.
    pub fn write_grid(&self, images: &[RgbImage]) -> Result<PathBuf, ImageFileError> {
        let labels = self.call.requests.iter().enumerate();
        let labels: Vec<String> = labels
            .map(|(index, request)| {
                let input = self.call.input(index);
                match input.and_then(|input| input.name.as_ref()) {
                    Some(name) => format!("{name}: {}", request.prompt),
                    None => request.prompt.clone(),
                }
            })
            .collect();
        let columns = (images.len() as f64).sqrt().ceil() as u32;
        let scale = images
            .first()
            .map_or(1, |image| visible_scale(image.width()));
        let grid = labelled_grid(images, &labels, columns, scale)?;
        let _written = self.lock();
        write_numbered(&self.call.folder, "grid", &grid, None)
    }

    /// What image number `index` of the request is called on the terminal.
    pub fn name(&self, index: usize) -> String {
        match self.call.requests.len() {
            1 => "the image".to_owned(),
            all => format!("image {} of {all}", index + 1),
        }
    }

    /// Image number `index` of the request as JSON.
    pub fn report(&self, index: usize, path: &Path) -> Value {
        let request = self.call.requests.get(index);
        let mut report = json!({
            "path": path,
            "prompt": request.map(|request| &request.prompt),
            "seed": request.map(|request| request.seed),
        });
        if let Some(input) = self.call.input(index) {
            report["image"] = input.path.as_str().into();
        }
        report
    }

    /// All written images as JSON.
    pub fn reports(&self) -> Vec<Value> {
        let written = self.lock();
        let written = written.iter().enumerate();
        written
            .map(|(index, path)| self.report(index, path))
            .collect()
    }

    /// How many images are written, and where.
    pub fn summary(&self) -> String {
        self.summary_of(self.lock().len())
    }

    /// As [`ImageFiles::summary`] of a call that is stopped: waits for a file that is being written, and lets no other begin.
    pub fn end(&self) -> String {
        let written = self.lock();
        let summary = self.summary_of(written.len());
        std::mem::forget(written);
        summary
    }

    fn summary_of(&self, written: usize) -> String {
        let all = self.call.requests.len();
        match written {
            0 => "no image is finished".to_owned(),
            _ => format!(
                "{written} of {all} images are written in {}",
                self.call.folder.display()
            ),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
