//! How images are generated.

use crate::config::Config;
use crate::pipelines::text_to_image::Guidance;

/// How a denoising step is guided.
pub fn guidance(config: &Config) -> Guidance {
    match (
        config.do_classifier_free_guidance,
        config.guidance_in_two_passes,
    ) {
        (false, _) => Guidance::Off,
        (true, false) => Guidance::OneBatch,
        (true, true) => Guidance::TwoPasses,
    }
}
