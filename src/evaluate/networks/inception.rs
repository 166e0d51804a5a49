//! The InceptionV3 of FID and of the Inception score: Szegedy et al. (2015) as TensorFlow's frozen graph of 2015-12-05 has it, with
//! the names of pytorch-fid and torch-fidelity.

use std::path::{Path, PathBuf};

use image::RgbImage;

use crate::data::is_image;
use crate::data::resample::bicubic_floats;
use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, DotDims, GraphError, Init, Tensor};
use crate::host_tensor::HostTensor;
use crate::nn::{Pool, Precision, average_pool, batch_norm, max_pool};
use crate::runtime::Session;
use crate::shape::Shape;
use crate::util::named;
use crate::weights::Checkpoint;

use super::super::run::{names, pixels};
use super::super::statistics::{SPLITS, frechet_distance, inception_score};
use super::super::{Comparison, EvaluateError};
use super::batches::Network;

const ROOT: &str = "inception";
const BATCH: usize = 8;
/// Side of the pictures that the network takes.
const SIDE: usize = 299;
/// Numbers that FID compares, and the classes whose logits come after them in a row of results.
const FEATURES: usize = 2048;
const CLASSES: usize = 1008;
/// In the norms.
const EPSILON: f64 = 0.001;
/// Pictures below which a Fréchet distance says more of their number than of their quality: what its authors advise.
const ENOUGH: usize = 10_000;

named! {
    /// How pictures get the size that the network takes.
    #[derive(Default)]
    pub enum Resize {
        /// Bilinear as in TensorFlow 1, which leaves pixels out where pictures get smaller: what torch-fidelity, torchmetrics and
        /// most published numbers have.
        Tensorflow = "tensorflow" (default),
        /// Pillow's bicubic filter on floats: clean-fid's.
        Clean = "clean",
    }
}

/// The network with its weights.
pub(super) struct Inception {
    checkpoint: Checkpoint,
    resize: Resize,
    /// Pictures that the distance is from, in place of the reference's.
    others: Vec<PathBuf>,
}

impl Inception {
    /// # Errors
    /// When the file cannot be read, or has not the network's weights; when there is no picture in `others`.
    pub fn open(
        path: &Path,
        resize: Resize,
        others: Option<&Path>,
    ) -> Result<Inception, EvaluateError> {
        let checkpoint = Checkpoint::open(path)?;
        trace(1)?.check(&checkpoint)?;
        Ok(Inception {
            checkpoint,
            resize,
            others: others.map(images).transpose()?.unwrap_or_default(),
        })
    }

    /// The pictures that it has to see.
    pub fn pictures(&self, comparisons: &[Comparison]) -> Vec<PathBuf> {
        [super::pictures(comparisons), self.others.clone()].concat()
    }

    /// Sets the distance of each run from the reference, and the scores of both. Where there are other pictures, the distances
    /// are from them, and the reference has one too.
    ///
    /// # Errors
    /// When a picture cannot be read, or the network fails.
    pub fn measure(
        &self,
        session: &Session,
        comparisons: &mut [Comparison],
        done: &mut dyn FnMut(usize),
    ) -> Result<(), EvaluateError> {
        let count = super::pictures(comparisons).len() / (comparisons.len() + 1);
        let paths = self.pictures(comparisons);
        let row = &mut |at: usize| Ok([resized(&pixels(&paths[at])?, self.resize)?]);
        let network = trace(BATCH.min(paths.len()))?;
        let mut features = network.run(session, &self.checkpoint, paths.len(), row, done)?;
        for (row, path) in features.iter().zip(&paths) {
            super::check_finite("inception", path, row)?;
        }
        let logits: Vec<Vec<f32>> = features
            .iter_mut()
            .map(|row| row.split_off(FEATURES))
            .collect();
        let set = |at: usize| at * count..(at + 1) * count;
        let of_reference = inception_score(&logits[set(0)]);
        let others = &features[paths.len() - self.others.len()..];
        let (from, reference_fid) = match others {
            [] => (&features[set(0)], None),
            _ => (others, frechet_distance(others, &features[set(0)])),
        };
        for (at, run) in comparisons.iter_mut().enumerate() {
            run.fid = frechet_distance(from, &features[set(at + 1)]);
            run.reference_fid = reference_fid;
            let score = inception_score(&logits[set(at + 1)]);
            run.inception_score = of_reference
                .zip(score)
                .map(|(before, after)| [before, after]);
            run.notes.extend(fid_note(count.min(from.len())));
            run.notes.extend(score_note(count));
        }
        Ok(())
    }
}

/// The pictures of a folder, by their names.
fn images(folder: &Path) -> Result<Vec<PathBuf>, EvaluateError> {
    let names = names(folder)?;
    let files = names.iter().map(|name| folder.join(name));
    let images: Vec<PathBuf> = files.filter(|path| is_image(path)).collect();
    match images.is_empty() {
        false => Ok(images),
        true => Err(EvaluateError::Network {
            path: folder.to_owned(),
            reason: "no pictures: expected .png, .jpg, .jpeg or .webp files; FID is a distance from them".to_owned(),
        }),
    }
}

/// What the least number of pictures means for the distance.
fn fid_note(count: usize) -> Option<String> {
    match count {
        0..2 => Some("FID is of at least 2 pictures".to_owned()),
        2..ENOUGH => Some(format!(
            "FID is of {count} pictures and too high: compare it only with that of as many pictures; published ones are of \
             {ENOUGH} or more"
        )),
        _ => None,
    }
}

fn score_note(count: usize) -> Option<String> {
    (count < SPLITS).then(|| {
        format!("the Inception score is of {SPLITS} parts, so of at least {SPLITS} pictures")
    })
}

/// `f32[299, 299, 3]` with channels from 0 to 255.
pub fn resized(
    image: &RgbImage,
    resize: Resize,
) -> Result<HostTensor, crate::host_tensor::HostTensorError> {
    let side = SIDE as u32;
    let values = match resize {
        Resize::Tensorflow => bilinear(image),
        Resize::Clean => bicubic_floats(image, side, side)
            .into_iter()
            .map(|x| x.clamp(0.0, 255.0))
            .collect(),
    };
    HostTensor::from_f32([SIDE, SIDE, 3], &values)
}

/// `ResizeBilinear` of TensorFlow 1: the first pixels lie above each other, not the middles of the pictures, and each pixel is
/// between four neighbours, however much smaller the picture gets.
fn bilinear(image: &RgbImage) -> Vec<f32> {
    let places = |size: u32| {
        let scale = (f64::from(size) / SIDE as f64) as f32;
        (0..SIDE).map(move |at| {
            let place = at as f32 * scale;
            let low = place as u32;
            (low, (low + 1).min(size - 1), place - low as f32)
        })
    };
    let columns: Vec<(u32, u32, f32)> = places(image.width()).collect();
    let mut values = Vec::with_capacity(SIDE * SIDE * 3);
    for (top, bottom, down) in places(image.height()) {
        for (left, right, across) in &columns {
            for channel in 0..3 {
                let pixel = |x: u32, y: u32| f32::from(image.get_pixel(x, y).0[channel]);
                let between = |y: u32| {
                    let first = pixel(*left, y);
                    first + (pixel(*right, y) - first) * across
                };
                let first = between(top);
                values.push(first + (between(bottom) - first) * down);
            }
        }
    }
    values
}

fn trace(batch: usize) -> Result<Network<1>, EvaluateError> {
    let shape = Shape::new(DType::F32, [batch, SIDE, SIDE, 3]);
    Network::trace(ROOT, [("pictures", shape)], |b, x| {
        inception(&b.root(ROOT), x[0])
    })
}

/// A convolution without bias, its norm and a ReLU.
#[derive(Clone, Copy)]
struct Unit {
    name: &'static str,
    channels: usize,
    /// Height and width.
    kernel: [usize; 2],
    stride: usize,
    /// Whether the image keeps its size but for the stride.
    padded: bool,
}

/// One pixel to one.
const fn pointwise(name: &'static str, channels: usize) -> Unit {
    same(name, channels, [1, 1])
}

const fn same(name: &'static str, channels: usize, kernel: [usize; 2]) -> Unit {
    Unit {
        name,
        channels,
        kernel,
        stride: 1,
        padded: true,
    }
}

/// 3 x 3 pixels without those beyond the edge.
const fn inner(name: &'static str, channels: usize, stride: usize) -> Unit {
    Unit {
        name,
        channels,
        kernel: [3, 3],
        stride,
        padded: false,
    }
}

/// The windows that halve an image, and those that keep its size.
const HALVED: Pool = Pool {
    kernel: 3,
    stride: 2,
    padding: 0,
};
const KEPT: Pool = Pool {
    kernel: 3,
    stride: 1,
    padding: 1,
};

/// The results of the last pooling and their logits without biases, `[batch, 2048 + 1008]`, of pictures
/// `[batch, 299, 299, 3]` with channels from 0 to 255.
fn inception(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let x = b.mul_scalar(b.add_scalar(x, -128.0)?, 1.0 / 128.0)?;
    let x = chain(
        b,
        x,
        &[
            inner("Conv2d_1a_3x3", 32, 2),
            inner("Conv2d_2a_3x3", 32, 1),
            same("Conv2d_2b_3x3", 64, [3, 3]),
        ],
    )?;
    let x = max_pool(b, x, HALVED)?;
    let x = chain(
        b,
        x,
        &[
            pointwise("Conv2d_3b_1x1", 80),
            inner("Conv2d_4a_3x3", 192, 1),
        ],
    )?;
    let mut x = max_pool(b, x, HALVED)?;
    for (name, pooled) in [("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)] {
        x = block_a(&b.scope(name), x, pooled)?;
    }
    x = block_b(&b.scope("Mixed_6a"), x)?;
    for (name, inner) in [
        ("Mixed_6b", 128),
        ("Mixed_6c", 160),
        ("Mixed_6d", 160),
        ("Mixed_6e", 192),
    ] {
        x = block_c(&b.scope(name), x, inner)?;
    }
    x = block_d(&b.scope("Mixed_7a"), x)?;
    x = block_e(&b.scope("Mixed_7b"), x, average_pool)?;
    // The frozen graph has a maximum here, where the paper has a mean.
    x = block_e(&b.scope("Mixed_7c"), x, max_pool)?;
    let pixels: usize = b.dims(x)[1..3].iter().product();
    let features = b.mul_scalar(b.sum(x, &[1, 2])?, 1.0 / pixels as f64)?;
    let logits = logits(&b.scope("fc"), features)?;
    b.concatenate(&[features, logits], 1)
}

fn logits(b: &Builder, features: Tensor) -> Result<Tensor, GraphError> {
    let shape = Shape::new(DType::F32, [CLASSES, FEATURES]);
    let weight = b.param("weight", shape, Init::Zeros, &[None; 2])?;
    let contract = DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    b.dot_general(features, weight, contract, DType::F32)
}

fn block_a(b: &Builder, x: Tensor, pooled: usize) -> Result<Tensor, GraphError> {
    let branches = [
        chain(b, x, &[pointwise("branch1x1", 64)])?,
        chain(
            b,
            x,
            &[
                pointwise("branch5x5_1", 48),
                same("branch5x5_2", 64, [5, 5]),
            ],
        )?,
        chain(
            b,
            x,
            &[
                pointwise("branch3x3dbl_1", 64),
                same("branch3x3dbl_2", 96, [3, 3]),
                same("branch3x3dbl_3", 96, [3, 3]),
            ],
        )?,
        chain(
            b,
            average_pool(b, x, KEPT)?,
            &[pointwise("branch_pool", pooled)],
        )?,
    ];
    b.concatenate(&branches, 3)
}

fn block_b(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let branches = [
        chain(b, x, &[inner("branch3x3", 384, 2)])?,
        chain(
            b,
            x,
            &[
                pointwise("branch3x3dbl_1", 64),
                same("branch3x3dbl_2", 96, [3, 3]),
                inner("branch3x3dbl_3", 96, 2),
            ],
        )?,
        max_pool(b, x, HALVED)?,
    ];
    b.concatenate(&branches, 3)
}

fn block_c(b: &Builder, x: Tensor, inner: usize) -> Result<Tensor, GraphError> {
    let branches = [
        chain(b, x, &[pointwise("branch1x1", 192)])?,
        chain(
            b,
            x,
            &[
                pointwise("branch7x7_1", inner),
                same("branch7x7_2", inner, [1, 7]),
                same("branch7x7_3", 192, [7, 1]),
            ],
        )?,
        chain(
            b,
            x,
            &[
                pointwise("branch7x7dbl_1", inner),
                same("branch7x7dbl_2", inner, [7, 1]),
                same("branch7x7dbl_3", inner, [1, 7]),
                same("branch7x7dbl_4", inner, [7, 1]),
                same("branch7x7dbl_5", 192, [1, 7]),
            ],
        )?,
        chain(
            b,
            average_pool(b, x, KEPT)?,
            &[pointwise("branch_pool", 192)],
        )?,
    ];
    b.concatenate(&branches, 3)
}

fn block_d(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let branches = [
        chain(
            b,
            x,
            &[pointwise("branch3x3_1", 192), inner("branch3x3_2", 320, 2)],
        )?,
        chain(
            b,
            x,
            &[
                pointwise("branch7x7x3_1", 192),
                same("branch7x7x3_2", 192, [1, 7]),
                same("branch7x7x3_3", 192, [7, 1]),
                inner("branch7x7x3_4", 192, 2),
            ],
        )?,
        max_pool(b, x, HALVED)?,
    ];
    b.concatenate(&branches, 3)
}

fn block_e(
    b: &Builder,
    x: Tensor,
    pool: impl Fn(&Builder, Tensor, Pool) -> Result<Tensor, GraphError>,
) -> Result<Tensor, GraphError> {
    let middle = chain(b, x, &[pointwise("branch3x3_1", 384)])?;
    let double = chain(
        b,
        x,
        &[
            pointwise("branch3x3dbl_1", 448),
            same("branch3x3dbl_2", 384, [3, 3]),
        ],
    )?;
    let branches = [
        chain(b, x, &[pointwise("branch1x1", 320)])?,
        unit(b, middle, same("branch3x3_2a", 384, [1, 3]))?,
        unit(b, middle, same("branch3x3_2b", 384, [3, 1]))?,
        unit(b, double, same("branch3x3dbl_3a", 384, [1, 3]))?,
        unit(b, double, same("branch3x3dbl_3b", 384, [3, 1]))?,
        chain(b, pool(b, x, KEPT)?, &[pointwise("branch_pool", 192)])?,
    ];
    b.concatenate(&branches, 3)
}

fn chain(b: &Builder, x: Tensor, units: &[Unit]) -> Result<Tensor, GraphError> {
    units.iter().try_fold(x, |x, layer| unit(b, x, *layer))
}

fn unit(b: &Builder, x: Tensor, unit: Unit) -> Result<Tensor, GraphError> {
    let b = b.scope(unit.name);
    let [_, _, _, channels] = crate::nn::dims(&b, "convolution", x)?;
    let [height, width] = unit.kernel;
    let shape = Shape::new(DType::F32, [unit.channels, channels, height, width]);
    let conv = b.scope("conv");
    let weight = conv.param("weight", shape, Init::Zeros, &[None; 4])?;
    let padding = unit.kernel.map(|side| match unit.padded {
        true => (side / 2) as i64,
        false => 0,
    });
    let dims = ConvDims {
        padding: padding.map(|side| (side, side)).to_vec(),
        ..ConvDims::of_image(unit.stride, (0, 0))
    };
    let y = conv.convolution(x, weight, dims, DType::F32)?;
    let y = batch_norm(&b.scope("bn"), y, EPSILON, Precision::F32)?;
    b.max(y, b.scalar(DType::F32, 0.0)?)
}
