//! Prompts to pictures, for `generate` and for the sample images of `train`.

use image::{Rgb, RgbImage};

use crate::config::Config;
use crate::data::Tokenizer;
use crate::host_tensor::HostTensor;
use crate::pipelines::text_to_image::{Request, TextToImage, WeightLookup};
use crate::runtime::Session;

use super::recipe;

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub prompt: String,
    pub seed: u64,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Makes a picture for each of `prompts`, in batches of the pipeline's size. `progress` is told the picture and the
/// step that are done.
///
/// # Errors
/// When a prompt cannot be encoded, or a program fails.
#[allow(clippy::too_many_arguments)]
pub fn make_images(
    session: &Session,
    pipeline: &TextToImage,
    weights: WeightLookup<'_>,
    tokenizer: &Tokenizer,
    prompts: &[Prompted],
    negative_prompt: &str,
    config: &Config,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<RgbImage>, Failure> {
    let scheduler = recipe::scheduler(config)?;
    let plan = recipe::sampling_plan(config, &scheduler)?;
    let batch = pipeline.batch();
    let encode = |text: &str| -> Result<Vec<i32>, Failure> {
        let encoded = tokenizer.encode(text)?;
        for warning in encoded.warnings() {
            eprintln!("warning: '{text}': {warning}");
        }
        Ok(encoded.ids)
    };
    let negative = encode(negative_prompt)?;
    let mut images = Vec::with_capacity(prompts.len());
    for chunk in prompts.chunks(batch) {
        let mut prompt_ids = Vec::new();
        let mut negative_ids = Vec::new();
        let mut seeds = Vec::new();
        // A last, smaller batch is filled up with its first prompt; those pictures are dropped.
        for row in 0..batch {
            let prompted = chunk.get(row).unwrap_or(&chunk[0]);
            prompt_ids.extend(encode(&prompted.prompt)?);
            negative_ids.extend(&negative);
            seeds.push(prompted.seed);
        }
        let done = images.len();
        let sample = pipeline.run(
            session,
            weights,
            &Request {
                prompt_ids: &prompt_ids,
                negative_ids: &negative_ids,
                seeds: &seeds,
                guidance_scale: config.guidance_scale as f32,
                plan: &plan,
            },
            &mut |step| progress(done, step),
        )?;
        images.extend(to_images(&sample)?.into_iter().take(chunk.len()));
    }
    Ok(images)
}

/// Pictures from `[batch, 3, rows, columns]` in [-1, 1].
fn to_images(sample: &HostTensor) -> Result<Vec<RgbImage>, Failure> {
    let dims = &sample.shape.dims;
    if dims.len() != 4 || dims[1] != 3 {
        return Err(format!(
            "the model makes samples {}, not RGB pictures; decoding latents needs a VAE, which is not here yet",
            sample.shape
        )
        .into());
    }
    let values = sample.to_f32_vec()?;
    if values.iter().any(|v| !v.is_finite()) {
        return Err("the model's sample is not finite".into());
    }
    let (rows, columns) = (dims[2], dims[3]);
    let plane = rows * columns;
    Ok((0..dims[0])
        .map(|n| {
            RgbImage::from_fn(columns as u32, rows as u32, |x, y| {
                let at = y as usize * columns + x as usize;
                Rgb([0, 1, 2].map(|c| {
                    let v = values[(n * 3 + c) * plane + at];
                    ((v + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8
                }))
            })
        })
        .collect())
}
