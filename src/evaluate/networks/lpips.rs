//! LPIPS (Zhang et al. 2018): how far apart two pictures are for the layers of a network that classifies pictures.

use std::collections::BTreeMap;
use std::path::Path;

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Init, Tensor};
use crate::host_tensor::HostTensor;
use crate::nn::{Conv2d, Pool, Precision, conv2d, max_pool};
use crate::runtime::Session;
use crate::shape::Shape;
use crate::util::named;
use crate::weights::Checkpoint;

use super::super::run::{pixels, size};
use super::super::{Comparison, EvaluateError};
use super::batches::Network;

const ROOT: &str = "lpips";
/// The first weight, whose shape tells which network a file has.
const FIRST: &str = "features.0.weight";
/// Pixels of a batch of pairs, about; the features of a pixel take 0.7 kB in VGG16.
const PIXELS: usize = 1 << 20;
/// Pairs of a batch at most.
const BATCH: usize = 8;
/// What the network takes of red, green and blue in [-1, 1]: `(x - SHIFT) / SCALE`.
const SHIFT: [f32; 3] = [-0.030, -0.088, -0.188];
const SCALE: [f32; 3] = [0.458, 0.448, 0.450];
/// Keeps the norm of features that are all 0 from being 0, as torchmetrics does.
const EPSILON: f64 = 1e-8;

named! {
    /// A network of torchvision, by the names of lpips.
    pub enum Backbone {
        /// AlexNet.
        Alex = "alex",
        /// VGG16.
        Vgg = "vgg",
    }
}

/// A convolution followed by a ReLU, with its number in torchvision's `features`.
struct Layer {
    index: usize,
    channels: usize,
    kernel: usize,
    stride: usize,
    padding: i64,
}

/// Layers whose last result is compared.
struct Stage {
    /// What comes before them.
    pool: Option<Pool>,
    layers: &'static [Layer],
}

const fn layer(index: usize, channels: usize, kernel: usize, padding: i64) -> Layer {
    Layer {
        index,
        channels,
        kernel,
        stride: 1,
        padding,
    }
}

const fn stage(pool: usize, layers: &'static [Layer]) -> Stage {
    Stage {
        pool: match pool {
            0 => None,
            kernel => Some(Pool {
                kernel,
                stride: 2,
                padding: 0,
            }),
        },
        layers,
    }
}

const ALEX: [Stage; 5] = [
    stage(
        0,
        &[Layer {
            index: 0,
            channels: 64,
            kernel: 11,
            stride: 4,
            padding: 2,
        }],
    ),
    stage(3, &[layer(3, 192, 5, 2)]),
    stage(3, &[layer(6, 384, 3, 1)]),
    stage(0, &[layer(8, 256, 3, 1)]),
    stage(0, &[layer(10, 256, 3, 1)]),
];
const VGG: [Stage; 5] = [
    stage(0, &[layer(0, 64, 3, 1), layer(2, 64, 3, 1)]),
    stage(2, &[layer(5, 128, 3, 1), layer(7, 128, 3, 1)]),
    stage(
        2,
        &[
            layer(10, 256, 3, 1),
            layer(12, 256, 3, 1),
            layer(14, 256, 3, 1),
        ],
    ),
    stage(
        2,
        &[
            layer(17, 512, 3, 1),
            layer(19, 512, 3, 1),
            layer(21, 512, 3, 1),
        ],
    ),
    stage(
        2,
        &[
            layer(24, 512, 3, 1),
            layer(26, 512, 3, 1),
            layer(28, 512, 3, 1),
        ],
    ),
];

impl Backbone {
    fn stages(self) -> &'static [Stage] {
        match self {
            Backbone::Alex => &ALEX,
            Backbone::Vgg => &VGG,
        }
    }

    /// Least side of a picture: smaller ones leave nothing for the last layers.
    pub fn smallest(self) -> usize {
        match self {
            Backbone::Alex => 31,
            Backbone::Vgg => 16,
        }
    }

    /// The shape of [`FIRST`].
    fn first(self) -> [usize; 4] {
        match self {
            Backbone::Alex => [64, 3, 11, 11],
            Backbone::Vgg => [64, 3, 3, 3],
        }
    }
}

/// A network with its weights: torchvision's `features.*` and lpips' `lin0.model.1.weight` to `lin4.model.1.weight` in one
/// safetensors file.
pub(super) struct Lpips {
    backbone: Backbone,
    checkpoint: Checkpoint,
}

impl Lpips {
    /// # Errors
    /// When the file cannot be read, or has not the weights of one of the networks.
    pub fn open(path: &Path) -> Result<Lpips, EvaluateError> {
        let checkpoint = Checkpoint::open(path)?;
        let found = checkpoint.info(FIRST).map(|shape| shape.dims.clone());
        let is = |backbone: &Backbone| found.as_deref() == Some(&backbone.first());
        let Some(backbone) = Backbone::ALL.into_iter().find(is) else {
            return Err(EvaluateError::Network {
                path: path.to_owned(),
                reason: format!(
                    "expected {FIRST} of {:?} (AlexNet) or {:?} (VGG16), with torchvision's names, and lin0.model.1.weight to \
                     lin4.model.1.weight of lpips; found {}",
                    Backbone::Alex.first(),
                    Backbone::Vgg.first(),
                    found.map_or_else(|| "no such tensor".to_owned(), |dims| format!("{dims:?}"))
                ),
            });
        };
        let lpips = Lpips {
            backbone,
            checkpoint,
        };
        let side = backbone.smallest();
        lpips.trace([side; 2], 1)?.check(&lpips.checkpoint)?;
        Ok(lpips)
    }

    fn trace(
        &self,
        [width, height]: [usize; 2],
        batch: usize,
    ) -> Result<Network<1>, EvaluateError> {
        let shape = Shape::new(DType::F32, [batch, 2, height, width, 3]);
        Network::trace(ROOT, [("pictures", shape)], |b, pairs| {
            distance(&b.root(ROOT), self.backbone, pairs[0])
        })
    }

    /// Sets the distance of each pair of each run, and their means.
    ///
    /// # Errors
    /// When a picture is too small or cannot be read, or the network fails.
    pub fn measure(
        &self,
        session: &Session,
        comparisons: &mut [Comparison],
        done: &mut dyn FnMut(usize),
    ) -> Result<(), EvaluateError> {
        // A program is of one size.
        let mut by_size: BTreeMap<[usize; 2], Vec<[usize; 2]>> = BTreeMap::new();
        for (run, comparison) in comparisons.iter().enumerate() {
            for (at, pair) in comparison.pairs.iter().enumerate() {
                let size = size(&pair.path)?;
                let least = self.backbone.smallest();
                if size.iter().any(|side| *side < least) {
                    return Err(EvaluateError::Small {
                        path: pair.path.clone(),
                        size: size.map(|side| side as u32),
                        what: "lpips",
                        least,
                    });
                }
                by_size.entry(size).or_default().push([run, at]);
            }
        }
        let mut before = 0;
        for (size, places) in by_size {
            let batch = (PIXELS / (size[0] * size[1])).clamp(1, BATCH);
            let network = self.trace(size, batch.min(places.len()))?;
            let row = &mut |at: usize| {
                let [run, at] = places[at];
                let pair = &comparisons[run].pairs[at];
                Ok([row(&pair.reference, &pair.path, size)?])
            };
            let found =
                network.run(session, &self.checkpoint, places.len(), row, &mut |count| {
                    done(before + count)
                })?;
            before += places.len();
            for ([run, at], value) in places.iter().zip(found) {
                let pair = &mut comparisons[*run].pairs[*at];
                pair.lpips = Some(super::finite("lpips", &pair.path, value)?);
            }
        }
        for comparison in comparisons {
            let values = comparison.pairs.iter().filter_map(|pair| pair.lpips);
            let count = comparison.pairs.len() as f64;
            comparison.lpips = Some(values.sum::<f64>() / count);
        }
        Ok(())
    }
}

/// `f32[2, height, width, 3]`, both pictures with channels from 0 to 1.
fn row(
    reference: &Path,
    picture: &Path,
    [width, height]: [usize; 2],
) -> Result<HostTensor, EvaluateError> {
    let mut values = Vec::with_capacity(2 * width * height * 3);
    for path in [reference, picture] {
        let pixels = pixels(path)?;
        values.extend(pixels.as_raw().iter().map(|byte| f32::from(*byte) / 255.0));
    }
    Ok(HostTensor::from_f32([2, height, width, 3], &values)?)
}

/// The distances `[batch]` of pairs `[batch, 2, height, width, 3]` with channels from 0 to 1: of each stage the squared
/// differences of features of length 1, weighted by channel, in the mean of all places; the sum of the stages.
fn distance(b: &Builder, backbone: Backbone, pairs: Tensor) -> Result<Tensor, GraphError> {
    let dims = b.dims(pairs);
    let (batch, height, width) = (dims[0], dims[2], dims[3]);
    let x = b.reshape(pairs, &[2 * batch, height, width, 3])?;
    let x = b.add_scalar(b.mul_scalar(x, 2.0)?, -1.0)?;
    let row = |values: [f32; 3]| b.constant(HostTensor::from_f32([3], &values)?);
    let mut x = b.div(b.sub(x, row(SHIFT)?)?, row(SCALE)?)?;
    let mut total = b.full(&Shape::new(DType::F32, [batch]), 0.0)?;
    for (number, stage) in backbone.stages().iter().enumerate() {
        if let Some(pool) = stage.pool {
            x = max_pool(b, x, pool)?;
        }
        for layer in stage.layers {
            x = convolved(&b.scope("features").scope(layer.index), x, layer)?;
        }
        let of_stage = stage_distance(&b.scope(format!("lin{number}.model.1")), x)?;
        total = b.add(total, of_stage)?;
    }
    Ok(total)
}

fn convolved(b: &Builder, x: Tensor, layer: &Layer) -> Result<Tensor, GraphError> {
    let conv = Conv2d {
        stride: layer.stride,
        padding: (layer.padding, layer.padding),
        ..Conv2d::same(layer.channels, layer.kernel)
    };
    let y = conv2d(b, x, conv, Precision::F32)?;
    b.max(y, b.scalar(DType::F32, 0.0)?)
}

/// The weighted distance of the features of each pair `[2 * batch, height, width, channels]`.
fn stage_distance(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let [rows, height, width, channels] = crate::nn::dims(b, "features", x)?;
    let squares = b.reduce_keep(crate::graph::Reduction::Sum, b.square(x)?, &[3])?;
    let norm = b.sqrt(b.add_scalar(squares, EPSILON)?)?;
    let x = b.div(x, norm)?;
    let x = b.reshape(x, &[rows / 2, 2, height, width, channels])?;
    let halves = b.split(x, 1, 2)?;
    let difference = b.square(b.sub(halves[0], halves[1])?)?;
    let shape = Shape::new(DType::F32, [1, channels, 1, 1]);
    let weight = b.param("weight", shape, Init::Zeros, &[None; 4])?;
    let weighted = b.mul(difference, b.reshape(weight, &[channels])?)?;
    // One dimension after the other: sums of a million numbers in one go would lose digits.
    let mut sum = weighted;
    for dim in [4, 3, 2] {
        sum = b.sum(sum, &[dim])?;
    }
    let mean = b.mul_scalar(sum, 1.0 / (height * width) as f64)?;
    b.reshape(mean, &[rows / 2])
}
