//! CLIP score (Hessel et al. 2021): how well a picture fits its prompt, by a CLIP model of transformers' layout.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use image::DynamicImage;
use serde_json::{Map, Value, json};

use crate::data::Tokenizer;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::clip::vision::{ClipVisionConfig, PIXEL_VALUES, VisionOutput, clip_vision};
use crate::models::clip::{ClipTextConfig, INPUT_IDS, clip_text};
use crate::nn::{Precision, Remat};
use crate::pipelines::image_prompt::{DEVIATION, MEAN, Middle, clip_pixels};
use crate::runtime::Session;
use crate::shape::Shape;
use crate::util::files;
use crate::weights::Checkpoint;

use super::super::run::pixels;
use super::super::{Comparison, EvaluateError};
use super::batches::Network;

const ROOT: &str = "clip";
const BATCH: usize = 8;
const CONFIG: &str = "config.json";
const PROCESSOR: &str = "preprocessor_config.json";
/// transformers' `CLIPConfig` without the field.
const PROJECTION: u64 = 512;
/// Pillow's number of the bicubic filter.
const BICUBIC: u64 = 3;

/// A `CLIPModel` with its tokenizer.
pub(super) struct Clip {
    text: ClipTextConfig,
    vision: ClipVisionConfig,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
}

impl Clip {
    /// Opens a folder with `config.json`, weights and a tokenizer.
    ///
    /// # Errors
    /// When a file cannot be read, or is of another model, or pictures are prepared in another way than here.
    pub fn open(folder: &Path) -> Result<Clip, EvaluateError> {
        let (text, vision) = configs(&folder.join(CONFIG))?;
        check_processor(&folder.join(PROCESSOR), vision.image_size)?;
        let tokenizer = Tokenizer::from_dir(folder, text.max_position_embeddings)?;
        if tokenizer.vocabulary_size() > text.vocab_size {
            return Err(EvaluateError::Network {
                path: folder.to_owned(),
                reason: format!(
                    "the tokenizer has {} tokens, the model knows {}",
                    tokenizer.vocabulary_size(),
                    text.vocab_size
                ),
            });
        }
        let clip = Clip {
            text,
            vision,
            tokenizer,
            checkpoint: Checkpoint::open(folder)?,
        };
        clip.text_network(1)?.check(&clip.checkpoint)?;
        clip.vision_network(1)?.check(&clip.checkpoint)?;
        Ok(clip)
    }

    /// From token ids to `text_embeds`.
    fn text_network(&self, batch: usize) -> Result<Network<1>, EvaluateError> {
        let shape = Shape::new(DType::S32, [batch, self.text.max_position_embeddings]);
        Network::trace(ROOT, [(INPUT_IDS, shape)], |b, ids| {
            let encoded = clip_text(b, ROOT, &self.text, ids[0], Precision::F32, Remat::None)?;
            let missing = || b.invalid("a CLIP model projects the pooled output");
            encoded.text_embeds.ok_or_else(missing)
        })
    }

    /// From pixels to `image_embeds`.
    fn vision_network(&self, batch: usize) -> Result<Network<1>, EvaluateError> {
        let (channels, side) = (self.vision.num_channels, self.vision.image_size);
        let shape = Shape::new(DType::F32, [batch, channels, side, side]);
        Network::trace(ROOT, [(PIXEL_VALUES, shape)], |b, pixels| {
            let output = VisionOutput::Embeds;
            clip_vision(b, ROOT, &self.vision, pixels[0], output, Precision::F32)
        })
    }

    /// Sets the score of each picture and of its reference, and their means, of which a negative one is 0.
    ///
    /// # Errors
    /// When a picture cannot be read, or a network fails.
    pub fn measure(
        &self,
        session: &Session,
        comparisons: &mut [Comparison],
        done: &mut dyn FnMut(usize),
    ) -> Result<(), EvaluateError> {
        let paths = super::pictures(comparisons);
        let prompts: Vec<String> = super::prompts(comparisons).map(str::to_owned).collect();
        let count = prompts.len();
        let texts = self.texts(session, &prompts)?;
        let row = &mut |at: usize| {
            let picture = DynamicImage::from(pixels(&paths[at])?);
            let side = self.vision.image_size;
            Ok([clip_pixels(&picture, side, Middle::Transformers)?])
        };
        let network = self.vision_network(BATCH.min(paths.len()))?;
        let images = network.run(session, &self.checkpoint, paths.len(), row, done)?;
        let score = |at: usize| {
            let score = 100.0 * cosine(&images[at], &texts.embeddings[&prompts[at % count]]);
            super::finite("clip_score", &paths[at], vec![score as f32]).map(|_| score)
        };
        let scores: Vec<f64> = (0..paths.len()).map(score).collect::<Result<_, _>>()?;
        let runs = super::beside_reference(&scores, count);
        for (run, scores) in comparisons.iter_mut().zip(runs) {
            for (pair, scores) in run.pairs.iter_mut().zip(&scores) {
                pair.clip_score = Some(*scores);
            }
            run.clip_score = Some(super::means(&scores).map(|mean| mean.max(0.0)));
            run.notes.extend(self.note(&texts));
        }
        Ok(())
    }

    /// The embedding of each prompt.
    fn texts(&self, session: &Session, prompts: &[String]) -> Result<Texts, EvaluateError> {
        let mut rows = BTreeMap::new();
        let mut cut = 0;
        for prompt in prompts {
            if rows.contains_key(prompt) {
                continue;
            }
            let encoded = self.tokenizer.encode(prompt)?;
            cut += usize::from(!encoded.dropped.is_empty());
            rows.insert(prompt.clone(), encoded.ids);
        }
        let ids: Vec<&Vec<i32>> = rows.values().collect();
        let row = &mut |at: usize| Ok([HostTensor::from_i32([ids[at].len()], ids[at])?]);
        let network = self.text_network(BATCH.min(ids.len()))?;
        let found = network.run(session, &self.checkpoint, ids.len(), row, &mut |_| {})?;
        Ok(Texts {
            embeddings: rows.into_keys().zip(found).collect(),
            cut,
        })
    }

    /// What to know of prompts that are too long.
    fn note(&self, texts: &Texts) -> Option<String> {
        (texts.cut > 0).then(|| {
            format!(
                "{} prompts have more than {} tokens: the CLIP score is of their beginnings",
                texts.cut,
                self.tokenizer.length()
            )
        })
    }
}

/// What CLIP says of prompts.
struct Texts {
    embeddings: BTreeMap<String, Vec<f32>>,
    /// Prompts of which CLIP sees the beginning only.
    cut: usize,
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let both = a.iter().zip(b);
        both.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn network_error(path: &Path) -> impl Fn(String) -> EvaluateError {
    let path: PathBuf = path.to_owned();
    move |reason| EvaluateError::Network {
        path: path.clone(),
        reason,
    }
}

fn object(path: &Path) -> Result<Map<String, Value>, EvaluateError> {
    let fail = network_error(path);
    let text = files::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    serde_json::from_str(&text).map_err(|e| fail(format!("not a JSON object: {e}")))
}

/// The two encoders of a `CLIPConfig`.
fn configs(path: &Path) -> Result<(ClipTextConfig, ClipVisionConfig), EvaluateError> {
    let fail = network_error(path);
    let fields = object(path)?;
    if fields.get("model_type") != Some(&json!("clip")) {
        let found = fields.get("model_type").unwrap_or(&Value::Null);
        return Err(fail(format!(
            "model_type: expected \"clip\", a CLIPModel such as openai/clip-vit-base-patch16; found {found}"
        )));
    }
    let projection = fields.get("projection_dim").and_then(Value::as_u64);
    let encoder = |name: &str, class: &str| {
        let mut own = Map::new();
        // Old files have what differs from the defaults in a second field.
        for name in [name.to_owned(), format!("{name}_dict")] {
            let given = fields.get(&name).and_then(Value::as_object);
            own.extend(given.cloned().unwrap_or_default());
        }
        own.insert("architectures".to_owned(), json!([class]));
        let projection = projection.unwrap_or(PROJECTION);
        own.insert("projection_dim".to_owned(), json!(projection));
        own
    };
    let text = ClipTextConfig::from_map(encoder("text_config", "CLIPTextModelWithProjection"));
    let vision = encoder("vision_config", "CLIPVisionModelWithProjection");
    let vision = ClipVisionConfig::from_json(&Value::Object(vision).to_string());
    let (text, vision) = (
        text.map_err(|e| fail(e.to_string()))?,
        vision.map_err(|e| fail(e.to_string()))?,
    );
    match vision.num_channels {
        3 => Ok((text, vision)),
        channels => Err(fail(format!(
            "vision_config: num_channels = {channels}; pictures have 3"
        ))),
    }
}

/// Refuses a model whose pictures are prepared in another way than [`clip_pixels`] does. A folder without the file is one of
/// CLIP's own.
fn check_processor(path: &Path, side: usize) -> Result<(), EvaluateError> {
    if !path.is_file() {
        return Ok(());
    }
    let fields = object(path)?;
    let side = side as u64;
    let channels = |expected: [f32; 3], found: &Value| {
        let found = found.as_array().filter(|values| values.len() == 3);
        found.is_some_and(|values| {
            let both = expected.iter().zip(values);
            both.map(|(x, y)| (f64::from(*x) - y.as_f64().unwrap_or(f64::NAN)).abs())
                .all(|difference| difference < 1e-6)
        })
    };
    let is_side = |found: &Value| found.as_u64() == Some(side);
    let crops = |x: &Value| is_side(x) || (is_side(&x["height"]) && is_side(&x["width"]));
    let scales = |x: &Value| is_side(x) || is_side(&x["shortest_edge"]);
    let check = |key: &str, expected: String, fits: &dyn Fn(&Value) -> bool| {
        let Some(found) = fields.get(key).filter(|found| !fits(found)) else {
            return Ok(());
        };
        Err(network_error(path)(format!(
            "{key}: expected {expected}, as CLIP's; found {found}"
        )))
    };
    check("resample", BICUBIC.to_string(), &|x| {
        x.as_u64() == Some(BICUBIC)
    })?;
    check("size", side.to_string(), &scales)?;
    check("crop_size", side.to_string(), &crops)?;
    check("image_mean", format!("{MEAN:?}"), &|x| channels(MEAN, x))?;
    check("image_std", format!("{DEVIATION:?}"), &|x| {
        channels(DEVIATION, x)
    })
}
