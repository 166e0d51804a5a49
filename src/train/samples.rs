//! Sample images of a model while it is trained.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::data::Tokenizer;
use crate::emit::DotPrecision;
use crate::models::DiffusionModel;
use crate::models::clip::TOKEN_EMBEDDING;
use crate::pipelines::generator::{CompiledModel, SamplingOptions};
use crate::pipelines::image_file::{ImageFileError, labelled_grid, visible_scale, write_numbered};
use crate::pipelines::prompt::PromptSyntax;
use crate::pipelines::text_to_image::{DenoiseOptions, Guidance};
use crate::pipelines::textual_inversion::TextualInversions;
use crate::pipelines::traced::TracedModel;
use crate::pipelines::{
    ImageRequest, PipelineError, ReadWeights, TokenizedImage, WeightSource, requests_of, tokenize,
};
use crate::quant::{FakeQuantization, Policy};
use crate::runtime::{Array, RuntimeError, Session};
use crate::schedulers::SamplingPlan;
use crate::weights::lora::LoraRanks;

use super::inversion::InversionOptions;

/// Why sample images could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    ImageFile(#[from] ImageFileError),
    #[error("{}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Which sample images are made, and when.
#[derive(Clone, Debug)]
pub struct SampleOptions {
    /// Steps of training from one grid of images to the next.
    pub every: u64,
    /// Where the grids are written.
    pub dir: PathBuf,
    /// Images of captions as the model is trained on: brackets are text.
    pub images: Vec<ImageRequest>,
    pub plan: SamplingPlan,
    pub guidance: Guidance,
    pub quantization: Option<Policy>,
}

/// Gives the array of a weight, or of its moving average if there is one.
pub type Weights<'a> = &'a dyn Fn(&str) -> Option<&'a Array>;

/// Makes grids of sample images.
pub(super) struct Samples<'a> {
    pub session: &'a Session,
    /// With the element types of the weights that generate the images.
    pub model: &'a DiffusionModel,
    pub tokenizers: Vec<&'a Tokenizer>,
    /// The weights of the parts that are not trained; `None` where all are.
    pub files: Option<&'a ReadWeights<'a>>,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text.
    pub zero_empty_prompts: bool,
    /// Low-rank updates beside the denoiser's weights, and their factor.
    pub lora: Option<(LoraRanks, f64)>,
    /// The new token that is trained, if any.
    pub inversion: Option<&'a InversionOptions>,
    /// How the denoiser's scales are found, where they are not found anew in every step.
    pub fake_quantization: Option<FakeQuantization>,
    pub precision: DotPrecision,
    pub pixel_unshuffle: usize,
    pub options: &'a SampleOptions,
    /// Compiled for the first grid.
    pub compiled: Option<CompiledModel>,
}

impl<'a> Samples<'a> {
    /// Writes the grid of step `step`, and gives the bytes of its PNG file; nothing when `go_on`, which is asked at each
    /// denoising step, says to stop.
    ///
    /// # Errors
    /// When a program does not compile or fails, or the file cannot be written.
    pub fn make<'w>(
        &mut self,
        step: u64,
        weights: Weights<'w>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Vec<u8>>, SampleError>
    where
        'a: 'w,
    {
        let options = self.options;
        let requests = requests_of(&options.images, self.model.family);
        let mut images = tokenize(
            &self.tokenizers,
            &[],
            &requests,
            &[],
            PromptSyntax::Plain,
            &mut |_| Ok(()),
        )?;
        let tables = match self.inversion {
            Some(inversion) => self.tables(inversion, &mut images, weights)?,
            None => BTreeMap::new(),
        };
        let weights = &|name: &str| tables.get(name).or_else(|| weights(name));
        let compiled = match self.compiled.take() {
            Some(compiled) => compiled,
            None => self.compile(&images)?,
        };
        let compiled = self.compiled.insert(compiled);
        let source = match self.files {
            None => WeightSource::Devices(weights),
            Some(files) => WeightSource::Trained {
                on_devices: weights,
                files,
            },
        };
        let sampling = SamplingOptions {
            zero_empty_prompts: self.zero_empty_prompts,
            ..SamplingOptions::new(std::slice::from_ref(&options.plan))
        };
        let mut is_stopped = false;
        let output = compiled.run(self.session, &source, &images, &sampling, &mut |_| {
            is_stopped |= go_on().is_break();
            match is_stopped {
                true => Err("stopped".into()),
                false => Ok(()),
            }
        });
        if is_stopped {
            return Ok(None);
        }
        let output = output?;
        let columns = 4.min(output.images.len()) as u32;
        let scale = output
            .images
            .first()
            .map_or(1, |i| visible_scale(i.width()));
        let labels: Vec<String> = options.images.iter().map(|i| i.prompt.clone()).collect();
        let grid = labelled_grid(&output.images, &labels, columns, scale)?;
        let path = write_numbered(&options.dir, &format!("step-{step:08}"), &grid, None)?;
        read(&path).map(Some)
    }

    /// The embedding tables with the vectors of the new token, by name, in rows that no prompt needs; `images` have the ids of
    /// these rows then.
    fn tables(
        &self,
        inversion: &InversionOptions,
        images: &mut [TokenizedImage],
        weights: Weights<'_>,
    ) -> Result<BTreeMap<String, Array>, SampleError> {
        let array = |name: &str| {
            let missing = || RuntimeError::MissingWeight(name.to_owned());
            weights(name).ok_or_else(missing)
        };
        let host = |name: &str| array(name)?.to_host(self.session.mesh());
        let places = inversion.places.iter();
        let vectors = places.map(|place| Ok((place.first, host(&place.weight())?)));
        let vectors = vectors.collect::<Result<_, RuntimeError>>();
        let vectors = vectors.map_err(PipelineError::from)?;
        let trained = TextualInversions::in_training(inversion.token.clone(), vectors);
        let rows = trained
            .place(&self.model.text_encoders, &self.tokenizers, images)
            .map_err(PipelineError::from)?;
        let mut tables = BTreeMap::new();
        for (place, rows) in inversion.places.iter().zip(rows) {
            let name = place.table();
            let mut table = host(&name).map_err(PipelineError::from)?;
            rows.apply(place.part.name(), TOKEN_EMBEDDING, &mut table)
                .map_err(PipelineError::from)?;
            let spec = array(&name).map_err(PipelineError::from)?.spec();
            let table = self.session.put(&table, spec);
            tables.insert(name, table.map_err(PipelineError::from)?);
        }
        Ok(tables)
    }

    fn compile(&self, images: &[TokenizedImage]) -> Result<CompiledModel, PipelineError> {
        let first = images.first().and_then(|image| image.prompt.first());
        let chunks = first.map_or(1, |tokens| tokens.chunks.len());
        let options = DenoiseOptions {
            batch: self.options.images.len(),
            tokens: self.model.tokens * chunks,
            guidance: self.options.guidance,
            skip_layers: Vec::new(),
            quantization: self.options.quantization.clone(),
        };
        let mut traced = TracedModel::new(self.model, options, false)?;
        if let Some((ranks, scale)) = &self.lora {
            traced = traced.with_lora_beside(ranks, *scale)?;
        }
        if let Some(fake) = &self.fake_quantization {
            traced = traced.with_trained_ranges(fake)?;
        }
        let (session, unshuffle) = (self.session, self.pixel_unshuffle);
        let lowered = traced.lower(session)?;
        CompiledModel::compile(session, self.model, lowered, self.precision, unshuffle)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SampleError> {
    std::fs::read(path).map_err(|source| SampleError::Read {
        path: path.to_owned(),
        source,
    })
}
