//! Weights quantized on the host, with the numbers of the graph that [`super::lower`] makes (`docs/quantization.md`
//! has the formulas).

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Rounding, TensorFormat};
use crate::host_tensor::{HostTensor, HostTensorError, float8, packed};
use crate::shape::Shape;

use super::observer::{Extent, Observer};

/// Elements that one thread quantizes at a time.
const TASK: usize = 1 << 16;
/// Elements whose errors are summed in `f32`.
const SUMMED: usize = 1 << 12;
/// Elements at a time: each has a sum of its own, so that sums are vectorized.
const LANES: usize = 16;

/// The smallest scale of AMD Quark, 2^-23.
pub(super) const QUARK_SMALLEST: f64 = f32::EPSILON as f64;

/// The smallest scale of narrow integers, 2^-63, the root of the smallest normal number of `f32`; a smaller one becomes 1, as
/// DeepCompressor makes of 0. The reciprocals of those that stay are finite.
pub(super) const NARROW_SMALLEST: f64 = 1.0 / (1_u64 << 63) as f64;

/// Why a weight could not be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightQuantError {
    #[error(
        "values too large for {dtype}: they would become infinite; take float32 as weights_dtype and activations_dtype"
    )]
    Overflow { dtype: DType },
    #[error("{dtype} elements in this format are not quantized here")]
    Unsupported { dtype: DType },
    #[error("its {elements} input features are not a multiple of the group size {group}; {}", nearest_groups(*elements, *group))]
    Group { elements: usize, group: usize },
    #[error(
        "{together} input features share bytes in this format, and there are {elements}; leave the layer in float or int8 by a \
         rule of quant_rules"
    )]
    Together { elements: usize, together: usize },
    #[error("{expected} scales are expected, found {found}")]
    Scales { expected: usize, found: usize },
    #[error("a weight without dimensions has no output features")]
    Scalar,
    #[error(
        "what calibration saw of its inputs gives no error feedback: a feature is not finite, or all are zero; take more prompts, or \
         leave quantization_algorithm out"
    )]
    Hessian,
}

/// The group sizes next to `group` that divide, for messages.
pub fn nearest_groups(elements: usize, group: usize) -> String {
    let divides = |size: &usize| elements.is_multiple_of(*size);
    let below = (1..=elements.min(group.saturating_sub(1)))
        .rev()
        .find(divides);
    let above = (group + 1..=elements).find(divides);
    let sizes: Vec<String> = below
        .into_iter()
        .chain(above)
        .map(|s| s.to_string())
        .collect();
    format!("nearest: {}", sizes.join(" and "))
}

/// A weight in a format.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedWeight {
    pub format: TensorFormat,
    /// Integers or codes, in the shape of the weight.
    pub values: HostTensor,
    /// In the type of the weight, with the dimensions of [`scale_dims`].
    pub scale: HostTensor,
    /// With the dimensions of the scale, where the format has zero points: `s8`, or of llama.cpp's blocks the float that is added.
    pub zero_point: Option<HostTensor>,
    /// What multiplies all scales, where the format has it.
    pub tensor_scale: Option<HostTensor>,
    /// The lowest and the highest scale.
    pub scale_range: [f32; 2],
    /// Sum of the squares of the weight.
    pub signal: f64,
    /// Sum of the squares of what quantizing changed.
    pub noise: f64,
}

impl QuantizedWeight {
    /// The values that the integers stand for, `(integers - zero point) * scale`, or codes, in `f32`.
    ///
    /// # Errors
    /// None for a weight that was quantized here.
    pub fn dequantized(&self) -> Result<Vec<f32>, HostTensorError> {
        let mut values: Vec<f32> = match (self.format.codebook(), self.values.shape.dtype) {
            (Some(codebook), _) => {
                let codes = self.values.whole_bytes();
                codes
                    .iter()
                    .map(|code| codebook[usize::from(*code & 15)])
                    .collect()
            }
            (None, DType::S8 | DType::S4) => {
                let bytes = self.values.whole_bytes();
                bytes.iter().map(|byte| f32::from(*byte as i8)).collect()
            }
            _ => self.values.to_f32_vec()?,
        };
        let mut scales = self.scale.to_f32_vec()?;
        if let Some(of_all) = &self.tensor_scale {
            let of_all = of_all.to_f32_vec()?;
            scales.iter_mut().for_each(|scale| *scale *= of_all[0]);
        }
        let zero_points = match &self.zero_point {
            Some(zero_point) => zero_point.to_f32_vec()?,
            None => vec![0.0; scales.len()],
        };
        let is_added = self.format.zero_point_type().is_float();
        let run = (values.len() / scales.len().max(1)).max(1);
        let parameters = scales.iter().zip(&zero_points);
        for (run, (scale, zero_point)) in values.chunks_mut(run).zip(parameters) {
            run.iter_mut().for_each(|x| {
                *x = match is_added {
                    true => *x * scale + zero_point,
                    false => (*x - zero_point) * scale,
                }
            });
        }
        Ok(values)
    }

    /// `10 log10(signal / noise)` in decibels; infinite where nothing was changed.
    pub fn sqnr_db(&self) -> f64 {
        match self.noise == 0.0 {
            true => f64::INFINITY,
            false => 10.0 * (self.signal / self.noise).log10(),
        }
    }
}

/// The dimensions of the scale of a weight `[out, in, ..]`: none, `[out]`, or `[out, in / group]`. `None` where the
/// weight has no such dimensions, or groups do not divide.
pub fn scale_dims(dims: &[usize], granularity: Granularity) -> Option<Vec<usize>> {
    match granularity {
        Granularity::Tensor => Some(Vec::new()),
        Granularity::Channel => Some(vec![*dims.first()?]),
        Granularity::Feature | Granularity::Part(_) => None,
        Granularity::Group(size) => {
            let (out, elements) = (*dims.first()?, *dims.get(1)?);
            let divides = size > 0 && elements.is_multiple_of(size);
            divides.then(|| vec![out, elements / size])
        }
    }
}

/// Quantizes a weight of finite `f32` or `bf16` as integers, or in AMD Quark's or Qwix's numerics as fp8. Every operation
/// rounds to its type, as in the graph.
///
/// # Errors
/// When values are infinite, groups do not divide the input features, or the format is another.
pub(super) fn quantize_integers(
    weight: &HostTensor,
    format: TensorFormat,
    scales: Scales<'_>,
) -> Result<QuantizedWeight, WeightQuantError> {
    let dtype = weight.shape.dtype;
    let is_quark = format.convention == NumericsConvention::Quark;
    let is_qwix = format.convention == NumericsConvention::Qwix;
    let is_known = match format.element {
        DType::S8 | DType::S4 => {
            format.convention.is_of_programs() && (!format.zero_point || is_quark)
        }
        DType::F8E4M3Fn => !format.zero_point && (is_quark || is_qwix),
        _ => false,
    };
    let is_known = is_known && format.rounding == Rounding::NearestEven;
    match dtype {
        DType::BF16 if is_known => quantized::<[u8; 2]>(weight, format, scales),
        DType::F32 if is_known => quantized::<[u8; 4]>(weight, format, scales),
        _ => Err(WeightQuantError::Unsupported { dtype }),
    }
}

/// Where the scales of a weight are from.
#[derive(Clone, Copy)]
pub(super) enum Scales<'a> {
    /// Of ranges that an observer decides.
    Found(Observer),
    /// These, in the order of the elements that have them; they are rounded to the weight's type.
    Given(&'a [f32]),
}

/// One element of a weight, little-endian.
pub(super) trait Element: Copy + Sync {
    fn all(data: &[u8]) -> &[Self];
    fn value(self) -> f32;
    /// The nearest value of this type.
    fn rounded(value: f32) -> f32;
    /// The elements of values of this type.
    fn bytes(values: &[f32]) -> Vec<u8>;
}

/// `f32`
impl Element for [u8; 4] {
    fn all(data: &[u8]) -> &[Self] {
        data.as_chunks().0
    }
    fn value(self) -> f32 {
        f32::from_le_bytes(self)
    }
    fn rounded(value: f32) -> f32 {
        value
    }
    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// The elements of a weight of `f32`.
pub(super) fn f32_elements(weight: &HostTensor) -> Vec<f32> {
    let elements = <[u8; 4]>::all(&weight.data).iter();
    elements.map(|element| element.value()).collect()
}

/// `bf16`
impl Element for [u8; 2] {
    fn all(data: &[u8]) -> &[Self] {
        data.as_chunks().0
    }
    fn value(self) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(self)) << 16)
    }
    /// Of a number that is not NaN.
    fn rounded(value: f32) -> f32 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        f32::from_bits(rounded & 0xffff_0000)
    }
    fn bytes(values: &[f32]) -> Vec<u8> {
        let halves = values.iter().map(|v| (v.to_bits() >> 16) as u16);
        halves.flat_map(u16::to_le_bytes).collect()
    }
}

/// Sums over a part of a weight.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    pub signal: f64,
    /// The sum of squared errors.
    pub noise: f64,
}

impl Sums {
    fn add(self, other: Sums) -> Sums {
        Sums {
            signal: self.signal + other.signal,
            noise: self.noise + other.noise,
        }
    }
}

/// The dimensions of the scale of a weight.
pub(super) fn dims_of_scale(
    weight: &HostTensor,
    format: TensorFormat,
) -> Result<Vec<usize>, WeightQuantError> {
    let dims = &weight.shape.dims;
    scale_dims(dims, format.granularity).ok_or(match format.granularity {
        Granularity::Group(group) if dims.len() > 1 => WeightQuantError::Group {
            elements: dims[1],
            group,
        },
        _ => WeightQuantError::Scalar,
    })
}

fn quantized<T: Element>(
    weight: &HostTensor,
    format: TensorFormat,
    from: Scales<'_>,
) -> Result<QuantizedWeight, WeightQuantError> {
    let dtype = &weight.shape.dtype;
    let scale_dims = dims_of_scale(weight, format)?;
    let count: usize = scale_dims.iter().product();
    if let Scales::Given(given) = from
        && given.len() != count
    {
        return Err(WeightQuantError::Scales {
            expected: count,
            found: given.len(),
        });
    }
    let elements = T::all(&weight.data);
    let run = (elements.len() / count.max(1)).max(1);
    let mut values = vec![0; elements.len()];
    let mut scales = vec![0.0; count];
    let mut zero_points = vec![0; count];
    let given = |scale: f32| RunRounding::of_scale::<T>(T::rounded(scale), format);
    let sums = match count {
        // One scale for many elements.
        1 => {
            let mut round = |rounding: RunRounding| {
                let parts = values.par_chunks_mut(TASK).zip(elements.par_chunks(TASK));
                let sums = parts.map(|(out, elements)| rounding.run(elements, out));
                sums.reduce(Sums::default, Sums::add)
            };
            let rounding = match from {
                Scales::Given(scales) => given(scales[0]),
                Scales::Found(observer) => {
                    let parts = elements.par_chunks(TASK);
                    let range = parts
                        .map(|part| Extent::of(part, format))
                        .reduce(Extent::default, Extent::with);
                    let mut tried = |range: Extent| {
                        let rounding = RunRounding::new::<T>(range, format);
                        (rounding.scale, round(rounding).noise)
                    };
                    let range = observer.extent(range, occurring(elements), &mut tried, format);
                    RunRounding::new::<T>(range, format)
                }
            };
            (scales[0], zero_points[0]) = rounding.parameters();
            round(rounding)
        }
        _ => {
            let runs = (TASK / run).max(1);
            let parts = values.par_chunks_mut(runs * run);
            let parts = parts.zip(elements.par_chunks(runs * run));
            let parts = parts.zip(scales.par_chunks_mut(runs));
            let parts = parts.zip(zero_points.par_chunks_mut(runs)).enumerate();
            let sums = parts.map(|(part, (((out, elements), scales), zero_points))| {
                let each = out.chunks_mut(run).zip(elements.chunks(run));
                each.zip(scales.iter_mut().zip(zero_points))
                    .enumerate()
                    .map(|(at, ((out, elements), parameters))| {
                        let rounding = match from {
                            Scales::Given(scales) => given(scales[part * runs + at]),
                            Scales::Found(observer) => found::<T>(observer, elements, out, format),
                        };
                        (*parameters.0, *parameters.1) = rounding.parameters();
                        rounding.run(elements, out)
                    })
                    .fold(Sums::default(), Sums::add)
            });
            sums.reduce(Sums::default, Sums::add)
        }
    };
    if scales.iter().any(|scale| !scale.is_finite()) {
        return Err(WeightQuantError::Overflow { dtype: *dtype });
    }
    let lowest = scales.iter().copied().fold(f32::INFINITY, f32::min);
    let highest = scales.iter().copied().fold(0.0, f32::max);
    let scale_shape = Shape::new(*dtype, scale_dims);
    Ok(QuantizedWeight {
        format,
        values: HostTensor {
            shape: weight.shape.with_dtype(format.element),
            data: match format.element {
                DType::S4 => packed(&values),
                _ => values,
            },
        },
        zero_point: format.zero_point.then(|| HostTensor {
            shape: scale_shape.with_dtype(DType::S8),
            data: zero_points,
        }),
        scale: HostTensor {
            data: T::bytes(&scales),
            shape: scale_shape,
        },
        tensor_scale: None,
        scale_range: [lowest, highest],
        signal: sums.signal,
        noise: sums.noise,
    })
}

/// The rounding by the range that `observer` decides for elements with one scale; `out` has room for what they become.
fn found<T: Element>(
    observer: Observer,
    elements: &[T],
    out: &mut [u8],
    format: TensorFormat,
) -> RunRounding {
    let mut tried = |range: Extent| {
        let rounding = RunRounding::new::<T>(range, format);
        (rounding.scale, rounding.run(elements, out).noise)
    };
    let extent = Extent::of(elements, format);
    let extent = observer.extent(extent, occurring(elements), &mut tried, format);
    RunRounding::new::<T>(extent, format)
}

/// Values, each of which occurs once.
fn occurring<T: Element>(elements: &[T]) -> impl Iterator<Item = (f32, f64)> + Clone {
    elements.iter().map(|element| (element.value(), 1.0))
}

impl Extent {
    fn of<T: Element>(elements: &[T], format: TensorFormat) -> Extent {
        if !format.zero_point {
            return Extent {
                lowest: 0.0,
                highest: absmax(elements),
            };
        }
        let values = elements.iter().map(|e| e.value());
        values.fold(Extent::default(), |extent, x| Extent {
            lowest: extent.lowest.min(x),
            highest: extent.highest.max(x),
        })
    }

    fn with(self, other: Extent) -> Extent {
        Extent {
            lowest: self.lowest.min(other.lowest),
            highest: self.highest.max(other.highest),
        }
    }
}

/// The largest magnitude. Bits of numbers without sign have the numbers' order.
fn absmax<T: Element>(elements: &[T]) -> f32 {
    let bits = elements
        .iter()
        .map(|e| (e.value().to_bits() & 0x7fff_ffff) as i32);
    f32::from_bits(bits.fold(0, i32::max) as u32)
}

/// How the elements that share a scale become integers.
#[derive(Clone, Copy)]
pub(super) struct RunRounding {
    scale: f32,
    /// What elements are multiplied with.
    inverse: f32,
    zero_point: f32,
    /// The lowest and the highest integer.
    bounds: [f32; 2],
    becomes: Becomes,
}

/// What is rounded.
#[derive(Clone, Copy)]
enum Becomes {
    /// An integer: of the product with the inverse in the weight's type.
    OfTyped,
    /// An integer: of the product in `f32`.
    OfProduct,
    /// An integer: of the quotient with the scale in `f32`.
    OfQuotient,
    /// `f8E4M3FN`: of the quotient with the scale in the weight's type.
    Float8OfQuotient,
    /// `f8E4M3FN`: of the product with the inverse in the weight's type.
    Float8OfTyped,
}

impl RunRounding {
    pub fn new<T: Element>(extent: Extent, format: TensorFormat) -> RunRounding {
        let bound = format.bound() as f32;
        let (lowest, highest) = (format.ends()[0] as f32, format.ends()[1] as f32);
        let absmax = extent.highest;
        let scale = match format.convention {
            NumericsConvention::Aqt => {
                let range = if absmax == 0.0 { 1.0 } else { absmax };
                T::rounded(range * bound.recip())
            }
            NumericsConvention::Qwix => {
                // The square root of the smallest normal number, of bf16 as of f32.
                let smallest = f32::MIN_POSITIVE.sqrt();
                match T::rounded(absmax * bound.recip()) {
                    scale if scale >= smallest => scale,
                    _ => 1.0,
                }
            }
            NumericsConvention::Quark if format.element.is_float() => {
                match T::rounded(absmax / bound) {
                    0.0 => QUARK_SMALLEST as f32,
                    scale => scale,
                }
            }
            NumericsConvention::Quark => {
                let scale = match format.zero_point {
                    false => absmax / bound,
                    true => T::rounded(extent.highest - extent.lowest) / (highest - lowest),
                };
                T::rounded(scale).max(QUARK_SMALLEST as f32)
            }
            NumericsConvention::Narrow => match T::rounded(absmax / bound) {
                scale if scale >= NARROW_SMALLEST as f32 => scale,
                _ => 1.0,
            },
            // They are refused before.
            NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::MxE2M3
            | NumericsConvention::MxE3M2
            | NumericsConvention::Nv => 1.0,
        };
        let mut rounding = RunRounding::of_scale::<T>(scale, format);
        if format.zero_point {
            let quotient = match format.granularity {
                // PyTorch promotes numbers with no dimensions.
                Granularity::Tensor => extent.lowest / scale,
                Granularity::Channel
                | Granularity::Group(_)
                | Granularity::Part(_)
                | Granularity::Feature => T::rounded(extent.lowest / scale),
            };
            rounding.zero_point = (lowest - nearest_even(quotient)).clamp(lowest, highest);
        }
        rounding
    }

    /// That of a scale, which is a number of the weight's type, around zero.
    pub fn of_scale<T: Element>(scale: f32, format: TensorFormat) -> RunRounding {
        let bounds = format.ends().map(|end| end as f32);
        let (inverse, becomes) = match format.convention {
            NumericsConvention::Aqt => match T::rounded(scale.recip()) {
                f32::INFINITY => (1.0, Becomes::OfTyped),
                inverse => (inverse, Becomes::OfTyped),
            },
            NumericsConvention::Quark if format.element.is_float() => {
                (1.0, Becomes::Float8OfQuotient)
            }
            NumericsConvention::Qwix if format.element.is_float() => {
                (scale.recip(), Becomes::Float8OfTyped)
            }
            NumericsConvention::Quark => (scale.recip(), Becomes::OfProduct),
            NumericsConvention::Narrow => (1.0, Becomes::OfQuotient),
            NumericsConvention::Qwix
            | NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::MxE2M3
            | NumericsConvention::MxE3M2
            | NumericsConvention::Nv => (scale.recip(), Becomes::OfTyped),
        };
        RunRounding {
            scale,
            inverse,
            zero_point: 0.0,
            bounds,
            becomes,
        }
    }

    /// Scale and zero point, as they are stored.
    pub fn parameters(self) -> (f32, u8) {
        (self.scale, self.zero_point as i8 as u8)
    }

    /// What is stored of one number, and the number that it stands for. Of integers alone.
    pub fn one<T: Element>(self, x: f32) -> (u8, f32) {
        let x = T::rounded(x);
        let (code, steps) = self.integer(match self.becomes {
            Becomes::OfTyped | Becomes::Float8OfTyped => T::rounded(x * self.inverse),
            Becomes::OfProduct | Becomes::Float8OfQuotient => x * self.inverse,
            Becomes::OfQuotient => x / self.scale,
        });
        (code, steps * self.scale)
    }

    /// The nearest integer to `y` steps, and how many steps it is from the zero point. The integer is in the lowest byte of a
    /// number so large that it has no fraction.
    fn integer(self, y: f32) -> (u8, f32) {
        let [lowest, highest] = self.bounds;
        let y = (nearest_even(y) + self.zero_point).clamp(lowest, highest);
        ((y + WHOLE).to_bits() as u8, y - self.zero_point)
    }

    /// Quantizes elements of this scale.
    pub fn run<T: Element>(self, elements: &[T], out: &mut [u8]) -> Sums {
        let [lowest, highest] = self.bounds;
        let integer = |y: f32| self.integer(y);
        let float8 = |y: f32| {
            let code = float8::encode(y.clamp(lowest, highest));
            (code, float8::decode(code))
        };
        let parts = elements.chunks(SUMMED).zip(out.chunks_mut(SUMMED));
        let sums = parts.map(|(elements, out)| match self.becomes {
            Becomes::OfTyped => self.part(elements, out, |x| integer(T::rounded(x * self.inverse))),
            Becomes::OfProduct => self.part(elements, out, |x| integer(x * self.inverse)),
            Becomes::OfQuotient => self.part(elements, out, |x| integer(x / self.scale)),
            Becomes::Float8OfQuotient => {
                self.part(elements, out, |x| float8(T::rounded(x / self.scale)))
            }
            Becomes::Float8OfTyped => {
                self.part(elements, out, |x| float8(T::rounded(x * self.inverse)))
            }
        });
        sums.fold(Sums::default(), Sums::add)
    }

    /// `quantize` gives what is stored of an element, and how many scales that is worth.
    fn part<T: Element>(
        self,
        elements: &[T],
        out: &mut [u8],
        quantize: impl Fn(f32) -> (u8, f32),
    ) -> Sums {
        let (mut signal, mut noise) = ([0.0; LANES], [0.0; LANES]);
        let one = |element: T, out: &mut u8, signal: &mut f32, noise: &mut f32| {
            let x = element.value();
            let (stored, steps) = quantize(x);
            *out = stored;
            let error = x - steps * self.scale;
            *signal += x * x;
            *noise += error * error;
        };
        let (whole, rest) = elements.as_chunks::<LANES>();
        let (whole_out, rest_out) = out.as_chunks_mut::<LANES>();
        for (elements, out) in whole.iter().zip(whole_out) {
            for i in 0..LANES {
                one(elements[i], &mut out[i], &mut signal[i], &mut noise[i]);
            }
        }
        for (i, (element, out)) in rest.iter().zip(rest_out).enumerate() {
            one(*element, out, &mut signal[i], &mut noise[i]);
        }
        let sum = |lanes: [f32; LANES]| lanes.into_iter().map(f64::from).sum();
        Sums {
            signal: sum(signal),
            noise: sum(noise),
        }
    }
}

/// 1.5 * 2^23: numbers near it are whole.
const WHOLE: f32 = 12_582_912.0;

/// The nearest whole number, ties to even, of a magnitude below 2^22. Two additions are vectorized on every processor,
/// `f32::round_ties_even` is not.
fn nearest_even(y: f32) -> f32 {
    (y + WHOLE) - WHOLE
}
