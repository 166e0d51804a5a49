//! The denoising of images of one size.

use crate::emit::DotPrecision;
use crate::lowering::Lowered;
use crate::models::DiffusionModel;
use crate::runtime::Session;

use super::PipelineError;
use super::denoiser::Denoiser;
use super::text_to_image::{DenoiseOptions, DenoiseStep, Guidance};

/// The denoising step of a model for images of one size.
pub(super) struct Pass {
    pub denoiser: Denoiser,
    /// SDXL's time ids of an image's rows, one after the other.
    pub time_ids: Vec<f32>,
}

impl Pass {
    /// Compiles `step` of `model`, which was lowered for `session`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        step: DenoiseStep<Lowered>,
        options: &DenoiseOptions,
        precision: DotPrecision,
    ) -> Result<Pass, PipelineError> {
        let dims = model.sample_dims(options.batch);
        let [without, with] = model.time_ids();
        Ok(Pass {
            denoiser: Denoiser::compile(session, step, dims, precision)?,
            time_ids: match options.guidance {
                Guidance::Off => with,
                Guidance::OneBatch | Guidance::TwoPasses => [without, with].concat(),
            },
        })
    }

    /// Rows times columns of a sample.
    pub fn places(&self) -> usize {
        let [_, _, rows, columns] = self.denoiser.sample_dims();
        rows * columns
    }
}
