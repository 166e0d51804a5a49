//! ImageReward (Xu et al., 2023, arXiv:2304.05977): how well people would like a picture of a prompt, by a BLIP that was trained
//! on their choices.

use std::path::Path;

use image::DynamicImage;

use crate::data::Tokenizer;
use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::host_tensor::HostTensor;
use crate::models::clip::INPUT_IDS;
use crate::models::clip::vision::PIXEL_VALUES;
use crate::pipelines::image_prompt::{Middle, clip_pixels};
use crate::runtime::Session;
use crate::shape::Shape;
use crate::weights::Checkpoint;

use super::super::run::pixels;
use super::super::{Comparison, EvaluateError};
use super::batches::Network;
use super::blip::{Blip, dense};

const ROOT: &str = "image_reward";
const BLIP: &str = "blip";
const ATTENTION_MASK: &str = "attention_mask";
const BATCH: usize = 8;
/// Tokens of a prompt, with start and end.
const LENGTH: usize = 35;
/// The linear layers behind BLIP, by their numbers in `mlp.layers`; dropouts have the others. Nothing is between them.
const LAYERS: [(usize, usize); 5] = [(0, 1024), (2, 128), (4, 64), (6, 16), (7, 1)];
/// Of the rewards of the pictures that it was trained on.
const MEAN: f64 = 0.16717362830052426;
const DEVIATION: f64 = 1.0333394966054072;

/// The network with its weights and tokenizer.
pub(super) struct ImageReward {
    blip: Blip,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
}

impl ImageReward {
    /// Opens a folder with the weights and BERT's vocabulary.
    ///
    /// # Errors
    /// When a file cannot be read, or has not the network's weights.
    pub fn open(folder: &Path) -> Result<ImageReward, EvaluateError> {
        let checkpoint = Checkpoint::open(folder)?;
        let blip = Blip::of(&checkpoint, BLIP)?;
        let tokenizer = Tokenizer::blip_from_dir(folder, LENGTH)?;
        if tokenizer.vocabulary_size() != blip.vocabulary() {
            return Err(EvaluateError::Network {
                path: folder.to_owned(),
                reason: format!(
                    "vocab.txt and BLIP's two tokens are {} tokens, the weights know {}",
                    tokenizer.vocabulary_size(),
                    blip.vocabulary()
                ),
            });
        }
        let network = ImageReward {
            blip,
            tokenizer,
            checkpoint,
        };
        network.trace(1)?.check(&network.checkpoint)?;
        Ok(network)
    }

    /// From pixels and token ids to the reward.
    fn trace(&self, batch: usize) -> Result<Network<3>, EvaluateError> {
        let side = self.blip.side();
        let tokens = Shape::new(DType::S32, [batch, LENGTH]);
        let inputs = [
            (PIXEL_VALUES, Shape::new(DType::F32, [batch, 3, side, side])),
            (INPUT_IDS, tokens.clone()),
            (ATTENTION_MASK, tokens),
        ];
        Network::trace(ROOT, inputs, |b, inputs| {
            self.reward(&b.root(ROOT), [inputs[0], inputs[1], inputs[2]])
        })
    }

    /// `[batch, 1]`
    fn reward(&self, b: &Builder, [pixels, ids, mask]: [Tensor; 3]) -> Result<Tensor, GraphError> {
        let mut x = self.blip.encode(&b.scope(BLIP), pixels, ids, mask)?;
        for (index, features) in LAYERS {
            let own = b.scope("mlp").scope("layers").scope(index);
            x = dense(&own, x, features)?;
        }
        let x = b.add_scalar(x, -MEAN)?;
        b.mul_scalar(x, 1.0 / DEVIATION)
    }

    /// Sets the reward of each picture and of its reference, and their means.
    ///
    /// # Errors
    /// When a picture cannot be read, or the network fails.
    pub fn measure(
        &self,
        session: &Session,
        comparisons: &mut [Comparison],
        done: &mut dyn FnMut(usize),
    ) -> Result<(), EvaluateError> {
        let paths = super::pictures(comparisons);
        let texts = super::prompts(comparisons).map(|prompt| self.text(prompt));
        let texts: Vec<Text> = texts.collect::<Result<_, _>>()?;
        let count = texts.len();
        let row = &mut |at: usize| {
            let picture = DynamicImage::from(pixels(&paths[at])?);
            let text = &texts[at % count];
            Ok([
                clip_pixels(&picture, self.blip.side(), Middle::Torchvision)?,
                HostTensor::from_i32([LENGTH], &text.ids)?,
                HostTensor::from_i32([LENGTH], &text.mask)?,
            ])
        };
        let network = self.trace(BATCH.min(paths.len()))?;
        let found = network.run(session, &self.checkpoint, paths.len(), row, done)?;
        let rewards = found.into_iter().zip(&paths);
        let rewards = rewards.map(|(row, path)| super::finite("image_reward", path, row));
        let rewards: Vec<f64> = rewards.collect::<Result<_, _>>()?;
        let cut = texts.iter().filter(|text| text.is_cut).count();
        let runs = super::beside_reference(&rewards, count);
        for (run, rewards) in comparisons.iter_mut().zip(runs) {
            for (pair, rewards) in run.pairs.iter_mut().zip(&rewards) {
                pair.image_reward = Some(*rewards);
            }
            run.image_reward = Some(super::means(&rewards));
            if cut > 0 {
                run.notes.push(format!(
                    "{cut} of {count} prompts have more than {LENGTH} tokens: ImageReward is of their beginnings"
                ));
            }
        }
        Ok(())
    }

    fn text(&self, prompt: &str) -> Result<Text, EvaluateError> {
        let pieces = self.tokenizer.pieces(prompt)?;
        let room = self.tokenizer.room();
        let seen = pieces.len().min(room) + LENGTH - room;
        Ok(Text {
            ids: self.tokenizer.lay_out(pieces.iter().map(|piece| piece.id)),
            mask: (0..LENGTH).map(|at| i32::from(at < seen)).collect(),
            is_cut: pieces.len() > room,
        })
    }
}

/// A prompt as the network takes it.
struct Text {
    ids: Vec<i32>,
    /// 0 for padding.
    mask: Vec<i32>,
    is_cut: bool,
}
