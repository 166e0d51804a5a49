//! The images of `generate`, written as each is finished.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::RgbImage;
use serde_json::{Value, json};

use crate::pipelines::ImageRequest;
use crate::pipelines::image_file::{
    GenerationSettings, ImageFileError, labelled_grid, visible_scale, write_numbered,
};

/// The images of a call and their files. Clones are of the same call.
#[derive(Clone)]
pub struct ImageFiles {
    call: Arc<Call>,
    /// Held while a file is written, so that a stop leaves no half of one.
    written: Arc<Mutex<Vec<PathBuf>>>,
}

struct Call {
    folder: PathBuf,
    /// The settings that all images share.
    common: GenerationSettings,
    requests: Vec<ImageRequest>,
}

impl ImageFiles {
    /// For the images that `requests` asks for.
    pub fn new(folder: PathBuf, common: GenerationSettings, requests: Vec<ImageRequest>) -> Self {
        ImageFiles {
            call: Arc::new(Call {
                folder,
                common,
                requests,
            }),
            written: Arc::default(),
        }
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
        } = &*self.call;
        let settings = requests.get(index).map(|request| GenerationSettings {
            prompt: request.prompt.clone(),
            negative_prompt: request.negative_prompt.clone(),
            seed: request.seed,
            steps: request.steps as u32,
            guidance_scale: request.guidance_scale,
            ..common.clone()
        });
        let mut written = self.lock();
        let path = write_numbered(folder, "image", image, settings.as_ref())?;
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
        let labels: Vec<String> = self
            .call
            .requests
            .iter()
            .map(|request| request.prompt.clone())
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
        json!({
            "path": path,
            "prompt": request.map(|request| &request.prompt),
            "seed": request.map(|request| request.seed),
        })
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
