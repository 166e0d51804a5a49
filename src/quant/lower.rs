//! Lowers annotated contractions: operands become integers with scales, and scales are applied to the product.

use crate::dtype::DType;
use crate::graph::RoundingStream;
use crate::graph::random::{RandomKey, rounding_noise};
use crate::graph::{
    Arithmetic, Builder, Comparison, Composite, Contraction, ContractionQuant, Granularity, Graph,
    GraphError, Input, Node, NumericsConvention, Op, Rounding, Tensor, TensorFormat, grouped_dims,
};
use crate::shape::Shape;
use crate::shard::LOCAL_SHARDS;

use super::QuantError;
use super::recorded::{RecordedScales, activation_feature, times_whole};
use super::rounding::{Affine, NoiseSource, find_scale, quantize};
use super::stored::with_stored_weights;
use super::weight::nearest_groups;

type Result<T> = std::result::Result<T, GraphError>;

/// The input that seeds stochastic rounding: `u32[2]`, another value each step.
pub const ROUNDING_KEY: &str = "rounding_key";

/// The graph with every annotated contraction in the formats of its annotation; stochastic rounding draws from the
/// graph's input [`ROUNDING_KEY`], a stream of its own for each use.
///
/// Range finding, rounding and the scaled product are composites; quantized weights are marked as stored.
///
/// # Errors
/// When a contraction rounds stochastically and the graph has no [`ROUNDING_KEY`] input, or its first contracting
/// dimension does not divide into the local shards.
pub fn lower(graph: &Graph) -> std::result::Result<Graph, QuantError> {
    let key_input = graph
        .inputs
        .iter()
        .find(|i| i.name == ROUNDING_KEY)
        .cloned();
    let mut keys = RoundingKeys {
        count: rounded_at_random(graph),
        used: 0,
        table: None,
    };
    lower_with_noise(graph, &mut |b, dims| {
        let Some(input) = &key_input else {
            return Err(b.invalid(format!(
                "stochastic rounding needs the input {ROUNDING_KEY} (u32[2]) in this program"
            )));
        };
        let words = keys.next(b, input)?;
        let dims = dims.to_vec();
        let kind = Composite::RoundingNoise { dims: dims.clone() };
        b.composite(kind, &[words], |b, operands| {
            let key = RandomKey::of_words(b, operands[0])?;
            rounding_noise(b, key, RoundingStream(0), &dims)
        })
    })
}

/// The keys of a program's uses of stochastic rounding, of which each has a [`RoundingStream`].
struct RoundingKeys {
    /// How many there are at most.
    count: usize,
    used: usize,
    /// The words of all keys, `u32[count, 2]`, once one of them is needed.
    table: Option<Tensor>,
}

impl RoundingKeys {
    /// The words of the next key. They come from outside of the block that rounds: blocks whose streams differ in what they take
    /// alone are equal, and so can be a loop.
    fn next(&mut self, b: &Builder, input: &Input) -> Result<Tensor> {
        let outside = b.root("rounding").without_remat();
        let table = match self.table {
            Some(table) => table,
            None => self.keys(&outside, input)?,
        };
        self.table = Some(table);
        let at = self.used;
        self.used += 1;
        outside.reshape(outside.slice_dim(table, 0, at, at + 1)?, &[2])
    }

    /// What each stream adds to the key's high word, from stream 1 on, and the low word.
    fn keys(&self, b: &Builder, input: &Input) -> Result<Tensor> {
        let words = b.declare(input.clone())?;
        let shape = Shape::new(DType::U32, [self.count]);
        let streams = b.add_scalar(b.iota(shape.clone(), 0)?, 1.0)?;
        let salts = b.mul_scalar(streams, f64::from(RoundingStream(1).salt()))?;
        let word = |at: usize| b.broadcast_to(b.slice_dim(words, 0, at, at + 1)?, &shape.dims);
        let column = |words: Tensor| b.reshape(words, &[self.count, 1]);
        let high = column(b.add(salts, word(0)?)?)?;
        b.concatenate(&[high, column(word(1)?)?], 1)
    }
}

/// Operands that annotations round at random, in composites too.
fn rounded_at_random(graph: &Graph) -> usize {
    let of_node = |node: &Node| match &node.op {
        Op::DotGeneral {
            quant: Some(quant), ..
        }
        | Op::Convolution {
            quant: Some(quant), ..
        } => {
            let formats = [quant.forward.lhs, quant.forward.rhs].into_iter().flatten();
            formats
                .filter(|format| format.rounding == Rounding::Stochastic)
                .count()
        }
        Op::Composite { body, .. } => rounded_at_random(body),
        _ => 0,
    };
    graph.nodes.iter().map(of_node).sum()
}

/// [`lower`] with another source of rounding noise, such as inputs of the program.
///
/// # Errors
/// Errors of `noise`, and when a first contracting dimension does not divide into the local shards.
pub fn lower_with_noise(
    graph: &Graph,
    noise: &mut NoiseSource<'_>,
) -> std::result::Result<Graph, QuantError> {
    // A kernel for a composite would not compute what an annotation within it asks for.
    let graph = graph.inline_composites(&|_, body| body.nodes.iter().any(is_annotated));
    let (graph, stored) = with_stored_weights(graph)?;
    let of_weights = graph.weight_only();
    let mut recorded = RecordedScales::default();
    let lowered = graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let (contraction, result, quant) = match &node.op {
            Op::DotGeneral {
                dims,
                result,
                quant: Some(quant),
            } => (Contraction::Dot(dims.clone()), *result, quant),
            Op::Convolution {
                dims,
                result,
                quant: Some(quant),
            } => (Contraction::Convolution(dims.clone()), *result, quant),
            _ => return Ok(None),
        };
        let mut operand = |i: usize| {
            let id = node.operands[i];
            let quantized = [quant.forward.lhs, quant.forward.rhs][i];
            let stored = stored
                .get(&id)
                .filter(|_| quantized.is_some_and(TensorFormat::has_stored_scale));
            Ok::<_, GraphError>(match stored {
                Some(weight) => Operand {
                    values: copies[weight.node as usize],
                    float: weight.float,
                    is_weight: true,
                    stored: Some(StoredScale {
                        scale: b.declare(weight.scale.clone())?,
                        zero_point: match &weight.zero_point {
                            Some(input) => Some(b.declare(input.clone())?),
                            None => None,
                        },
                        tensor_scale: match &weight.tensor_scale {
                            Some(input) => Some(b.declare(input.clone())?),
                            None => None,
                        },
                    }),
                    recorded: None,
                },
                None => Operand {
                    values: copies[id as usize],
                    float: graph.nodes[id as usize].shape.dtype,
                    is_weight: of_weights[id as usize],
                    stored: None,
                    recorded: match quantized {
                        Some(format) if format.has_stored_scale() && !of_weights[id as usize] => {
                            Some(recorded.of(b, &graph, node, i, format)?)
                        }
                        _ => None,
                    },
                },
            })
        };
        let operands = [operand(0)?, operand(1)?];
        let mut lowering = Lowering {
            b,
            arithmetic: quant.forward.arithmetic,
            noise,
        };
        lowering
            .contraction(contraction, operands, result, &quant.forward)
            .map(Some)
    })?;
    Ok(lowered)
}

pub(super) fn is_annotated(node: &Node) -> bool {
    matches!(
        node.op,
        Op::DotGeneral { quant: Some(_), .. } | Op::Convolution { quant: Some(_), .. }
    )
}

/// One operand of a contraction.
#[derive(Clone, Copy)]
struct Operand {
    values: Tensor,
    /// The type in which it is multiplied unless it is multiplied as integers.
    float: DType,
    /// Whether it is computed from weights alone.
    is_weight: bool,
    /// What belongs to values that are integers of the checkpoint.
    stored: Option<StoredScale>,
    /// The scale that calibration found for an activation.
    recorded: Option<Tensor>,
}

/// A scale of the checkpoint, and its zero point.
#[derive(Clone, Copy)]
struct StoredScale {
    scale: Tensor,
    zero_point: Option<Tensor>,
    tensor_scale: Option<Tensor>,
}

/// An operand as the contraction multiplies it.
struct Quantized {
    values: Tensor,
    /// One for each index of the kept dimensions, in ascending order; `None` where values are floats, or `whole` is it.
    scale: Option<Tensor>,
    /// The one scale of all values, known before the program runs.
    whole: Option<Tensor>,
}

/// The integers of an operand, in its shape, with the scale along some of its dimensions.
pub(super) struct Integers {
    pub values: Tensor,
    pub scale: Tensor,
    pub zero_point: Option<Tensor>,
    /// What multiplies the scale.
    pub tensor_scale: Option<Tensor>,
    /// The dimensions along which scale and zero point lie, ascending; they divide those of the values.
    pub along: Vec<usize>,
}

/// Lowers one contraction, at its scope.
struct Lowering<'a, 'n> {
    b: &'a Builder,
    arithmetic: Arithmetic,
    noise: &'a mut NoiseSource<'n>,
}

impl Lowering<'_, '_> {
    fn contraction(
        &mut self,
        mut contraction: Contraction,
        [mut lhs, mut rhs]: [Operand; 2],
        result: DType,
        quant: &ContractionQuant,
    ) -> Result<Tensor> {
        let b = self.b;
        let shards = quant.local_shards;
        match &mut contraction {
            Contraction::Dot(dims) if shards > 1 => {
                let (batch, contract) = (&mut dims.lhs_batch, &mut dims.lhs_contract);
                lhs.values = split_contraction(b, lhs.values, batch, contract, shards)?;
                let (batch, contract) = (&mut dims.rhs_batch, &mut dims.rhs_contract);
                rhs.values = split_contraction(b, rhs.values, batch, contract, shards)?;
            }
            Contraction::Convolution(dims) if dims.batch_groups > 1 => {
                return Err(b.invalid(
                    "a convolution with batch groups cannot have one scale a batch element",
                ));
            }
            _ => {}
        }
        let ranks = [lhs, rhs].map(|operand| b.dims(operand.values).len());
        let kept = contraction.kept(ranks);
        let [of_lhs, of_rhs] = [0, 1].map(|side| Place {
            contraction: &contraction,
            side,
            kept: &kept[side],
        });
        let mut l = self.operand(lhs, of_lhs, quant.lhs)?;
        let mut r = self.operand(rhs, of_rhs, quant.rhs)?;
        if [&l, &r].iter().all(|one| !b.dtype(one.values).is_float()) {
            // Every device multiplies int8.
            for one in [&mut l, &mut r] {
                one.values = b.convert(one.values, DType::S8)?;
            }
        }
        let wholes = [l.whole, r.whole];
        for (whole, other) in wholes.into_iter().zip([&mut r, &mut l]) {
            if let Some(whole) = whole {
                other.scale = Some(times_whole(b, other.scale, whole, result)?);
            }
        }
        let kind = Composite::ScaledContraction {
            contraction: contraction.clone(),
            lhs_scale: l.scale.is_some(),
            rhs_scale: r.scale.is_some(),
        };
        let mut operands = vec![l.values, r.values];
        operands.extend(l.scale);
        operands.extend(r.scale);
        let product = |b: &Builder, operands: &[Tensor]| {
            let scaled = [l.scale.is_some(), r.scale.is_some()];
            scaled_product(b, operands, &contraction, scaled, result)
        };
        let partial = b.composite(kind, &operands, product)?;
        if shards == 1 {
            return Ok(partial);
        }
        let mut axes = vec![None; b.dims(partial).len()];
        axes[0] = Some(LOCAL_SHARDS);
        b.sum(b.constrain(partial, &axes)?, &[0])
    }

    fn operand(
        &mut self,
        operand: Operand,
        place: Place<'_>,
        format: Option<TensorFormat>,
    ) -> Result<Quantized> {
        let b = self.b;
        let Some(format) = format else {
            return Ok(Quantized {
                values: operand.values,
                scale: None,
                whole: None,
            });
        };
        if let Some(scale) = operand.recorded {
            return self.recorded(operand, scale, format, place.contraction);
        }
        let mut integers = self.integers(operand, place, format)?;
        if !format.scales_results() || self.arithmetic == Arithmetic::Emulated {
            let mark = |t: Tensor| stored(b, t, operand.is_weight);
            integers.scale = mark(integers.scale)?;
            integers.zero_point = integers.zero_point.map(mark).transpose()?;
            return Ok(Quantized {
                values: dequantized(b, &integers, format, operand.float)?,
                scale: None,
                whole: None,
            });
        }
        Ok(Quantized {
            scale: Some(scale_of_kept(b, &integers, place.kept)?),
            values: integers.values,
            whole: None,
        })
    }

    /// An activation by the scale that calibration found: one for all of it, or one for each feature, which the weight
    /// has taken over.
    fn recorded(
        &mut self,
        operand: Operand,
        scale: Tensor,
        format: TensorFormat,
        contraction: &Contraction,
    ) -> Result<Quantized> {
        let b = self.b;
        let along = match format.granularity {
            Granularity::Feature => vec![activation_feature(b, contraction)?],
            _ => Vec::new(),
        };
        let values = quantize(b, operand.values, scale, &along, format, self.noise)?;
        let of_all = along.is_empty();
        let (values, whole) = match self.arithmetic {
            Arithmetic::Native => (values, of_all.then_some(scale)),
            Arithmetic::Emulated if !of_all => (b.convert(values, operand.float)?, None),
            Arithmetic::Emulated => {
                let integers = Integers {
                    values,
                    scale,
                    zero_point: None,
                    tensor_scale: None,
                    along,
                };
                (dequantized(b, &integers, format, operand.float)?, None)
            }
        };
        Ok(Quantized {
            values,
            scale: None,
            whole,
        })
    }

    /// The integers of the checkpoint, or of values that are rounded here. Those of a weight are what is stored of it.
    fn integers(
        &mut self,
        operand: Operand,
        place: Place<'_>,
        format: TensorFormat,
    ) -> Result<Integers> {
        let b = self.b;
        let dims = b.dims(operand.values);
        let (grouped, along) = place.along(b, &dims, format.granularity)?;
        if let Some(stored) = operand.stored {
            return Ok(Integers {
                values: b.stored(operand.values)?,
                scale: stored.scale,
                zero_point: stored.zero_point,
                tensor_scale: stored.tensor_scale,
                along,
            });
        }
        // Groups become a dimension of their own, before their elements.
        let (x, of_x) = match grouped {
            None => (operand.values, along.clone()),
            Some((at, size)) => {
                let mut split = dims.clone();
                split[at] = size;
                split.insert(at, dims[at] / size);
                let of_x = along.iter().map(|d| d + usize::from(*d > at)).collect();
                (b.reshape(operand.values, &split)?, of_x)
            }
        };
        let (values, scale, zero_point) = match format.zero_point {
            true => {
                let affine = Affine::new(b, x, &of_x, format)?;
                let values = affine.quantize(b, x, &of_x, format.element)?;
                (values, affine.scale, Some(affine.zero_point))
            }
            false => {
                let scale = find_scale(b, x, &of_x, format)?;
                let values = quantize(b, x, scale, &of_x, format, self.noise)?;
                (values, scale, None)
            }
        };
        let values = match grouped {
            None => values,
            Some(_) => b.reshape(values, &dims)?,
        };
        Ok(Integers {
            values: stored(b, values, operand.is_weight)?,
            scale,
            zero_point,
            tensor_scale: None,
            along,
        })
    }
}

/// What a contraction multiplies in place of the activation `x` where `format` finds its scales at run time, in `f32`.
///
/// # Errors
/// When groups do not divide the features of `x`, or the format rounds stochastically.
pub(super) fn rounded_activation(
    b: &Builder,
    x: Tensor,
    place: Place<'_>,
    format: TensorFormat,
) -> Result<Tensor> {
    let operand = Operand {
        values: x,
        float: DType::F32,
        is_weight: false,
        stored: None,
        recorded: None,
    };
    let noise = &mut |b: &Builder, _: &[usize]| {
        Err(b.invalid("an activation whose rounding is measured is rounded to nearest"))
    };
    let mut lowering = Lowering {
        b,
        arithmetic: Arithmetic::Native,
        noise,
    };
    let integers = lowering.integers(operand, place, format)?;
    dequantized(b, &integers, format, DType::F32)
}

/// `(integers - zero point) * scale` in `f32`, rounded to `float`: where scales do not leave the sum of a contraction. In
/// GGUF's numerics `integers * scale + zero point`; codes of a codebook become its numbers first.
pub(super) fn dequantized(
    b: &Builder,
    integers: &Integers,
    format: TensorFormat,
    float: DType,
) -> Result<Tensor> {
    let kind = Composite::Dequantize {
        along: integers.along.clone(),
        zero_point: integers.zero_point.is_some(),
        result: float,
    };
    let scale = match integers.tensor_scale {
        None => integers.scale,
        Some(one) => {
            let wide = b.convert(integers.scale, DType::F32)?;
            b.mul(wide, b.broadcast_to(one, &b.dims(wide))?)?
        }
    };
    let mut operands = vec![integers.values, scale];
    operands.extend(integers.zero_point);
    let along = &integers.along;
    b.composite(kind, &operands, |b, operands| {
        let shape = b.shape(operands[0]);
        let (split, places) = grouped_dims(&shape.dims, along, &b.dims(operands[1]));
        let codes = b.convert(operands[0], DType::F32)?;
        let wide = match format.codebook() {
            None => codes,
            Some(codebook) => looked_up(b, codes, codebook, 0)?,
        };
        let wide = b.reshape(wide, &split)?;
        let spread = |t: Tensor| {
            let wide = b.convert(t, DType::F32)?;
            b.broadcast_in_dim(wide, &places, &split)
        };
        let scale = spread(operands[1])?;
        let value = match operands.get(2) {
            None => b.mul(wide, scale)?,
            Some(zero_point) => match format.convention {
                NumericsConvention::Gguf => b.add(b.mul(wide, scale)?, spread(*zero_point)?)?,
                _ => b.mul(b.sub(wide, spread(*zero_point)?)?, scale)?,
            },
        };
        b.convert(b.reshape(value, &shape.dims)?, float)
    })
}

/// The numbers of a codebook, of codes from `first` on in `f32`. A tree of selections: it becomes part of what multiplies
/// the weight on every backend, where a gather would not.
fn looked_up(b: &Builder, codes: Tensor, codebook: &[f32], first: usize) -> Result<Tensor> {
    let shape = b.shape(codes);
    if let [one] = codebook {
        return b.full(&shape, f64::from(*one));
    }
    let (low, high) = codebook.split_at(codebook.len() / 2);
    let middle = first + low.len();
    let is_low = b.compare(Comparison::Lt, codes, b.full(&shape, middle as f64)?)?;
    let low = looked_up(b, codes, low, first)?;
    b.select(is_low, low, looked_up(b, codes, high, middle)?)
}

/// Marks what stays in memory of a weight.
fn stored(b: &Builder, values: Tensor, is_weight: bool) -> Result<Tensor> {
    match is_weight {
        true => b.stored(values),
        false => Ok(values),
    }
}

/// The dimension that groups divide, and their size.
type Groups = (usize, usize);

/// Where an operand stands.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub contraction: &'a Contraction,
    /// 0 for the lhs, 1 for the rhs.
    pub side: usize,
    /// The dimensions of the operand that are not contracted, of [`Contraction::kept`].
    pub kept: &'a [usize],
}

impl Place<'_> {
    /// The dimension of an operand of `rank` dimensions that groups divide: the contracted one, of a convolution the input
    /// channels. `None` where there is no such one.
    pub fn grouped_dimension(self, rank: usize) -> Option<usize> {
        let mut contracted: Vec<usize> = match self.contraction {
            Contraction::Dot(_) => (0..rank).filter(|d| !self.kept.contains(d)).collect(),
            Contraction::Convolution(conv) => vec![[&conv.lhs, &conv.rhs][self.side].feature],
        };
        contracted.pop().filter(|_| contracted.is_empty())
    }

    /// The dimensions along which the scales of groups of dimension `at` lie: those that are kept and `at`. Groups of a
    /// convolution's kernel have all positions of the kernel; each position of its image has groups of its own.
    fn beside_groups(self, at: usize, rank: usize) -> Vec<usize> {
        let is_image = matches!(self.contraction, Contraction::Convolution(_)) && self.side == 0;
        let is_along = |d: &usize| is_image || *d == at || self.kept.contains(d);
        (0..rank).filter(is_along).collect()
    }

    /// The dimensions along which scales lie, and where they are those of groups the dimension that these divide, with their size.
    pub fn along(
        self,
        b: &Builder,
        dims: &[usize],
        granularity: Granularity,
    ) -> Result<(Option<Groups>, Vec<usize>)> {
        Ok(match granularity {
            Granularity::Tensor => (None, Vec::new()),
            Granularity::Channel => (None, self.kept.to_vec()),
            Granularity::Group(size) => {
                let at = self.grouped_of_size(b, dims, size)?;
                (Some((at, size)), self.beside_groups(at, dims.len()))
            }
            Granularity::Part(parts) => match dims.first() {
                Some(of) if parts > 0 && of.is_multiple_of(parts) => {
                    (Some((0, of / parts)), vec![0])
                }
                first => {
                    return Err(b.invalid(format!(
                        "quantization_local_shard_count={parts} does not divide the first dimension of this activation ({}), \
                         whose parts have a scale each",
                        first.map_or_else(|| "it has none".to_owned(), ToString::to_string)
                    )));
                }
            },
            Granularity::Feature => {
                return Err(b.invalid("a scale for each feature is recorded, not found"));
            }
        })
    }

    /// The dimension that groups of `size` elements divide.
    fn grouped_of_size(self, b: &Builder, dims: &[usize], size: usize) -> Result<usize> {
        match self.grouped_dimension(dims.len()) {
            Some(at) if size > 0 && dims[at].is_multiple_of(size) => Ok(at),
            Some(at) => Err(b.invalid(format!(
                "groups of {size} do not divide the {} elements along the contracting dimension; {}",
                dims[at],
                nearest_groups(dims[at], size)
            ))),
            None => Err(b.invalid("groups need one contracting dimension")),
        }
    }
}

/// The scale of an operand with one value for each index of its `kept` dimensions: all of one scale, of a channel's own, or of
/// the one of their part of the first dimension.
fn scale_of_kept(b: &Builder, integers: &Integers, kept: &[usize]) -> Result<Tensor> {
    let dims = b.dims(integers.values);
    let sizes: Vec<usize> = kept.iter().map(|d| dims[*d]).collect();
    let parts = b.dims(integers.scale);
    match parts[..] {
        [parts] if sizes != [parts] && kept.first() == Some(&0) => {
            let mut split = sizes.clone();
            split[0] /= parts;
            split.insert(0, parts);
            b.reshape(b.broadcast_in_dim(integers.scale, &[0], &split)?, &sizes)
        }
        _ => b.broadcast_to(integers.scale, &sizes),
    }
}

/// `lhs rhs`, times the scales that follow it in `operands`, in `result`. Integers accumulate in `s32`, 8-bit floats in
/// `f32`, in which they are also scaled; where one operand is float, what the other is stored as is converted to its type.
///
/// # Errors
/// When the operands do not fit the contraction, or a scale is missing.
pub fn scaled_product(
    b: &Builder,
    operands: &[Tensor],
    contraction: &Contraction,
    scaled: [bool; 2],
    result: DType,
) -> Result<Tensor> {
    let (mut lhs, mut rhs) = (operands[0], operands[1]);
    let types = [b.dtype(lhs), b.dtype(rhs)];
    let floats = types.map(|dtype| dtype.is_float() && dtype.bits() > 8);
    // Products of 8-bit floats may be larger than what f16 holds, until scales make them small.
    let (accumulator, scaled_in) = match floats {
        [false, false] if types[0].is_float() => (DType::F32, DType::F32),
        [false, false] => (DType::S32, result),
        _ => (result, result),
    };
    match floats {
        [true, false] => rhs = b.convert(rhs, types[0])?,
        [false, true] => lhs = b.convert(lhs, types[1])?,
        _ => {}
    }
    let ranks = [lhs, rhs].map(|t| b.dims(t).len());
    let product = b.push(Op::contraction(contraction, accumulator), &[lhs, rhs])?;
    let mut out = b.convert(product, scaled_in)?;
    let mut scales = operands[2..].iter();
    let places = contraction.places(ranks);
    for (_, places) in scaled.iter().zip(&places).filter(|(scaled, _)| **scaled) {
        let Some(scale) = scales.next() else {
            return Err(b.invalid("a scaled contraction without one of its scales"));
        };
        let scale = b.convert(*scale, scaled_in)?;
        out = b.mul(out, b.broadcast_in_dim(scale, places, &b.dims(out))?)?;
    }
    b.convert(out, result)
}

/// Splits the first contracting dimension into `shards` parts and makes the parts the first batch dimension.
fn split_contraction(
    b: &Builder,
    x: Tensor,
    batch: &mut Vec<usize>,
    contract: &mut [usize],
    shards: usize,
) -> Result<Tensor> {
    let at = contract[0];
    let mut dims = b.dims(x);
    if !dims[at].is_multiple_of(shards) {
        return Err(b.invalid(format!(
            "quantization_local_shard_count={shards} does not divide the batch of {} that this weight gradient sums over",
            dims[at]
        )));
    }
    dims[at] /= shards;
    dims.insert(at, shards);
    for d in batch.iter_mut().chain(contract.iter_mut()) {
        if *d >= at {
            *d += 1;
        }
    }
    batch.insert(0, at);
    b.reshape(x, &dims)
}
