//! What the TPU kernels stand for: one table of claims.

mod attention;
mod contracted;
mod convolution;
mod doubled;
mod gated;
mod group_norm;
mod image;
mod layer_norm;
mod narrow;
mod padded_heads;
mod rounded;
mod trained_convolution;
mod training;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{Binary, Builder, Composite, Graph, GraphError, Node, Op, PadDim, Tensor};
use crate::shape::Shape;

use super::mosaic::LANES;
use super::{Arithmetic, Attention, Features, Heads, Product};

use attention::attention;
use contracted::{ContractedDims, Scales};
pub use padded_heads::pad_heads;
pub use training::{claim_training, claims_in_training};

/// Rows from which the product is the kernel's, those of one int8 tile: 160 rows of SDXL's 1280 x 1280 take 8,317
/// cycles on v5e, the compiler's operations for them 23,700.
const LEAST_ROWS: usize = 32;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph with this program's TPU kernels in place of
///
/// - attention in bf16 that is not causal, of as many keys as a core can hold,
/// - products of bf16 activations with weights, together with the layer norm before them if such products alone read it,
///   and the bias, the rounding to bf16 and the gated GELU or the sum after them; where AQT's int8 quantizes both, a scale a
///   row, together with the range finding and the rounding,
/// - 3x3 and 1x1 convolutions of bf16 images, together with the bias, the rounding to bf16 and the sum after them; where
///   AQT's int8 quantizes image and weights, a scale an image, together with the rounding,
/// - 3x3 convolutions in bf16 of nearest upsampling, together with that, and those with up to 8 outputs,
/// - the ranges of bf16 images that int8 quantizes, a scale an image,
/// - RMS norms and rotary positions of heads of 128 features in bf16,
/// - group norms, nearest upsampling and pairs of channels of bf16 images that these kernels read,
/// - products that give the queries, keys and values of one attention, as one product.
///
/// The devices compute `parts` parts of the batch, which kernels take if each part is one of whole blocks. What int8
/// quantizes is left to the compiler where the chip's matrix units do not multiply it: Mosaic refuses it.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim(graph: &Graph, features: Features, parts: usize) -> Result<Graph> {
    let claims = Claims::of(graph, features, parts);
    let products = claims.with_norms(claims.products());
    let doubled = claims.doubled_convolutions();
    let mut convolutions = claims.convolutions(&products);
    let of_doubled: HashSet<usize> = doubled.values().map(|found| found.contraction).collect();
    convolutions.retain(|_, found| !of_doubled.contains(&found.contraction()));
    let readers = products.values().map(|found| found.contraction);
    let readers = readers.chain(convolutions.values().map(convolution::Found::contraction));
    let narrow = 0..graph.nodes.len();
    let narrow = narrow.filter_map(|i| Some((i, claims.narrow_convolution(i)?)));
    let narrow: HashMap<usize, narrow::Found> = narrow.collect();
    let readers = readers.chain(narrow.keys().copied());
    let readers: HashSet<usize> = readers.collect();
    let self_attentions = claims.self_attentions(&products);
    graph.substitute(&mut |b, i, copies| {
        if let Some(found) = self_attentions.get(&i) {
            return claims.self_attention_call(b, i, found, copies).map(Some);
        }
        if let Some(found) = products.get(&i) {
            let y = claims.product_call(b, &[found], copies)?;
            return b.reshape(y, &found.shape.dims).map(Some);
        }
        if let Some(found) = convolutions.get(&i) {
            return claims.convolution_call(b, found, copies).map(Some);
        }
        if let Some(found) = narrow.get(&i) {
            return claims.narrow_convolution_call(b, found, copies).map(Some);
        }
        if let Some(found) = doubled.get(&i) {
            return claims.doubled_convolution_call(b, found, copies).map(Some);
        }
        let node = &graph.nodes[i];
        let operands = node.operands.iter().map(|o| copies[*o as usize]);
        let operands: Vec<Tensor> = operands.collect();
        let kind = match (&node.op, &operands[..]) {
            (Op::Composite { kind, .. }, _) => kind,
            (Op::Concatenate(dim), &[a, c])
                if claims.is_split(&node.shape) && claims.is_read_by_kernels(i, &readers) =>
            {
                return image::concatenate(b, [a, c], *dim);
            }
            _ => return Ok(None),
        };
        if !claims.is_split(&node.shape) {
            return Ok(None);
        }
        match (kind, &operands[..]) {
            (Composite::Attention { causal: false }, &[q, k, v]) => {
                attention(b, features, [q, k, v])
            }
            (Composite::RmsNorm { epsilon }, &[x, weight]) => {
                let kernel = Heads::RmsNorm { epsilon: *epsilon };
                heads(b, kernel, x, &[weight])
            }
            (Composite::Rotary, &[x, ref tables @ ..]) => heads(b, Heads::Rotary, x, tables),
            (Composite::FindScale { kept, format }, &[x])
                if features.int8 && kept[..] == [0] && !claims.of_weights[i] =>
            {
                image::scale_of_images(b, x, *format)
            }
            (Composite::GroupNorm { .. }, &[x, weight, bias])
                if claims.is_read_by_kernels(i, &readers)
                    || convolutions.contains_key(&(node.operands[0] as usize)) =>
            {
                group_norm::group_norm(b, kind, [x, weight, bias])
            }
            (Composite::UpsampleNearest2x, &[x]) if claims.is_read_by_kernels(i, &readers) => {
                image::upsample(b, x)
            }
            _ => Ok(None),
        }
    })
}

/// Whether `parts` parts of the batch, the first dimension, are as large as each other.
fn is_split(shape: &Shape, parts: usize) -> bool {
    let batch = shape.dims.first();
    batch.is_some_and(|batch| batch.is_multiple_of(parts))
}

/// The rounding to bf16 of node `i`, a sum over the batch, if that is its only use and the batch one part: several add up theirs in
/// `f32`, as the compiler cannot add up all shapes in fewer bits.
fn rounding_of_sum(
    graph: &Graph,
    users: &[Vec<Option<usize>>],
    i: usize,
    parts: usize,
) -> Option<usize> {
    follow::rounding(graph, users, i).filter(|_| parts == 1)
}

/// What `kernel` computes of the heads `x` `[batch, positions, heads, features]` and of `others`, whose last dimension has the
/// features too. `None` where the kernel does not take them.
fn heads(b: &Builder, kernel: Heads, x: Tensor, others: &[Tensor]) -> Result<Option<Tensor>> {
    let shape = b.shape(x);
    let &[batch, positions, count, features] = &shape.dims[..] else {
        return Ok(None);
    };
    let takes = shape.dtype == DType::BF16 && features == LANES;
    if !takes || !kernel.fits(positions, count) {
        return Ok(None);
    }
    let mut operands = vec![b.reshape(x, &[batch, positions, count * features])?];
    for other in others {
        let rows = b.shape(*other).count() / features;
        operands.push(b.reshape(*other, &[1, rows, features])?);
    }
    let y = b.push(Op::CustomCall(Arc::new(kernel)), &operands)?;
    b.reshape(y, &shape.dims).map(Some)
}

/// A product with what belongs to it. Numbers are nodes.
#[derive(Clone)]
struct Found {
    kernel: Product,
    contraction: usize,
    /// The activation, before it is quantized if it is, and before its norm if the kernel has one.
    x: u32,
    /// The weight and the bias of the norm.
    norm: Option<[u32; 2]>,
    weights: u32,
    /// The scales in int8.
    scales: Scales,
    bias: Option<u32>,
    residual: Option<u32>,
    /// The dimension of the weights that is contracted.
    contracted: usize,
    /// The shape of the result.
    shape: Shape,
}

/// An attention whose operands one kernel computes.
struct SelfAttention {
    kernel: Attention,
    /// The products of queries, keys and values.
    qkv: [Found; 3],
}

/// Decides which products the kernel takes, by attributes, types and shapes.
struct Claims<'a> {
    graph: &'a Graph,
    features: Features,
    /// Parts of the batch.
    parts: usize,
    of_weights: Vec<bool>,
    /// What is computed from stored weights, in every run.
    from_stored: Vec<bool>,
    users: Vec<Vec<Option<usize>>>,
}

impl<'a> Claims<'a> {
    fn of(graph: &'a Graph, features: Features, parts: usize) -> Claims<'a> {
        Claims {
            graph,
            features,
            parts,
            of_weights: graph.weight_only(),
            from_stored: graph.from_stored(),
            users: follow::users(graph),
        }
    }

    fn node(&self, id: u32) -> &'a Node {
        &self.graph.nodes[id as usize]
    }

    /// The products that the kernel takes, by the node whose value it gives.
    fn products(&self) -> HashMap<usize, Found> {
        let nodes = 0..self.graph.nodes.len();
        let live = nodes.filter(|i| !self.users[*i].is_empty() && !self.of_weights[*i]);
        live.filter_map(|i| self.with_what_follows(i, self.product(i)?))
            .collect()
    }

    /// The bias that follows node `i`, if one does, and the rounding to bf16 after it, which has to follow.
    fn bias_and_rounding(&self, i: usize) -> Option<(Option<u32>, usize)> {
        let (mut user, mut node) = self.only_user(i)?;
        let mut bias = None;
        if matches!(node.op, Op::Binary(Binary::Add)) {
            bias = Some(follow::vector(self.graph, i as u32, node)?);
            (user, node) = self.only_user(user)?;
        }
        matches!(node.op, Op::Convert(DType::BF16)).then_some((bias, user))
    }

    /// Node `i` as a product of rows with weights.
    fn product(&self, i: usize) -> Option<Found> {
        let node = &self.graph.nodes[i];
        let contracted = self.contracted(i)?;
        let ContractedDims::Dot(dims) = contracted.dims else {
            return None;
        };
        let last = self.node(contracted.lhs).shape.rank().checked_sub(1)?;
        let rows: Vec<usize> = (0..last).collect();
        let x = self.activation(&contracted, &rows)?;
        let &[of_weights] = &dims.rhs_contract[..] else {
            return None;
        };
        // Scales of groups lie along the second dimension.
        let is_matrix = self.is_split(&node.shape)
            && (contracted.scales.of_groups().is_none() || of_weights == 1)
            && dims.lhs_batch.is_empty()
            && dims.lhs_contract == [last]
            && self.node(contracted.weights).shape.rank() == 2;
        is_matrix.then(|| Found {
            kernel: Product {
                arithmetic: contracted.scales.arithmetic(),
                norm: None,
                gated: false,
                residual: false,
                features: self.features,
            },
            contraction: i,
            x,
            norm: None,
            weights: contracted.weights,
            scales: contracted.scales,
            bias: None,
            residual: None,
            contracted: of_weights,
            shape: node.shape.clone(),
        })
    }

    /// The product with the bias, the rounding to bf16, and the gated GELU or the sum that follow it, and the last node
    /// of them. `None` where it is not rounded to bf16, or no kernel fits.
    fn with_what_follows(&self, i: usize, mut found: Found) -> Option<(usize, Found)> {
        let root;
        (found.bias, root) = self.bias_and_rounding(i)?;
        if !self.fits(&found) {
            return None;
        }
        let fused = self.only_user(root).and_then(|(user, node)| {
            // Tokens may become an image before the image is added that they come from.
            let (root, (user, node)) = match &node.op {
                Op::Reshape(_) if node.shape.dims.last() == found.shape.dims.last() => {
                    (user, self.only_user(user)?)
                }
                _ => (root, (user, node)),
            };
            let kind = match &node.op {
                Op::Composite { kind, .. } => Some(kind),
                _ => None,
            };
            let (kernel, residual) = match (&node.op, kind) {
                (_, Some(Composite::GatedGelu)) => (
                    Product {
                        gated: true,
                        ..found.kernel
                    },
                    None,
                ),
                (Op::Binary(Binary::Add), _) => {
                    // Of two products that are added, the later takes the other's result.
                    let other = follow::other_term(root as u32, node)?;
                    if other as usize > root {
                        return None;
                    }
                    (
                        Product {
                            residual: true,
                            ..found.kernel
                        },
                        Some(other),
                    )
                }
                _ => return None,
            };
            let fused = Found {
                kernel,
                residual,
                shape: node.shape.clone(),
                ..found.clone()
            };
            self.fits(&fused).then_some((user, fused))
        });
        Some(fused.unwrap_or((root, found)))
    }

    /// The products, with a layer norm inside where products alone read it and the kernel takes it in all of them.
    fn with_norms(&self, mut products: HashMap<usize, Found>) -> HashMap<usize, Found> {
        let mut readers: HashMap<u32, Vec<usize>> = HashMap::new();
        for (root, found) in &products {
            readers.entry(found.x).or_default().push(*root);
        }
        for (x, roots) in readers {
            let normed = roots.iter().map(|root| {
                let found = self.normed(&products[root])?;
                Some((*root, found))
            });
            let normed: Option<Vec<(usize, Found)>> = normed.collect();
            let contractions = roots.iter().map(|root| products[root].contraction);
            if let Some(normed) = normed
                && self.is_read_by(x, contractions.collect())
            {
                products.extend(normed);
            }
        }
        products
    }

    /// Whether nothing but these contractions reads node `x`, quantized or as it is.
    fn is_read_by(&self, x: u32, contractions: HashSet<usize>) -> bool {
        // The integers and their scales.
        let rounded = contractions.iter().flat_map(|contraction| {
            let operands = &self.graph.nodes[*contraction].operands;
            [Some(&operands[0]), operands.get(2)].into_iter().flatten()
        });
        let rounded: HashSet<usize> = rounded.map(|id| *id as usize).collect();
        let is_part = |user: usize| rounded.contains(&user) || contractions.contains(&user);
        self.users[x as usize].iter().all(|user| {
            user.is_some_and(|user| {
                let mut readers = self.users[user].iter();
                contractions.contains(&user)
                    || rounded.contains(&user) && readers.all(|reader| reader.is_some_and(is_part))
            })
        })
    }

    /// The product with the layer norm that its activation comes from. `None` where that is none, or no kernel fits.
    fn normed(&self, found: &Found) -> Option<Found> {
        let norm = self.node(found.x);
        let Op::Composite {
            kind: Composite::LayerNorm { epsilon },
            ..
        } = &norm.op
        else {
            return None;
        };
        let &[x, weight, bias] = &norm.operands[..] else {
            return None;
        };
        let normed = Found {
            kernel: Product {
                norm: Some(*epsilon),
                ..found.kernel
            },
            x,
            norm: Some([weight, bias]),
            ..found.clone()
        };
        (self.node(x).shape.dtype == DType::BF16 && self.fits(&normed)).then_some(normed)
    }

    /// Whether node `i` is quantized, read by the contractions `readers`, which kernels compute, or the program's result,
    /// itself or after a group norm. What the compiler reads it lays out as it likes: between its own convolutions, copies to
    /// a kernel and back take longer than its own operations.
    fn is_read_by_kernels(&self, i: usize, readers: &HashSet<usize>) -> bool {
        self.users[i].iter().all(|user| {
            user.is_none_or(|user| match &self.graph.nodes[user].op {
                Op::Reshape(_) | Op::Slice { .. } => self.is_read_by_kernels(user, readers),
                _ if readers.contains(&user) => true,
                Op::Composite { kind, .. } => match kind {
                    Composite::GroupNorm { .. } => self.is_read_by_kernels(user, readers),
                    Composite::FindScale { .. } | Composite::Quantize { .. } => true,
                    _ => false,
                },
                _ => false,
            })
        })
    }

    /// The only node that reads node `i`.
    fn only_user(&self, i: usize) -> Option<(usize, &'a Node)> {
        match self.users[i][..] {
            [Some(user)] => Some((user, &self.graph.nodes[user])),
            _ => None,
        }
    }

    fn fits(&self, found: &Found) -> bool {
        let x = &self.node(found.x).shape;
        let (Some(terms), Some(columns)) = (x.dims.last(), found.shape.dims.last()) else {
            return false;
        };
        let rows = found.shape.count() / (*columns).max(1);
        let fills_lanes = match found.kernel.arithmetic {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => true,
            // The compiler is faster where a tile is not full: 0.032 ms for 8,192 rows and 320 features on a v5e, in place of
            // 0.076.
            Arithmetic::Bf16 => [terms, columns]
                .iter()
                .all(|size| size.is_multiple_of(LANES)),
            Arithmetic::Stored(_) => *terms >= LANES && *columns >= LANES,
        };
        // Rows are padded behind the last one only.
        let own = rows / self.parts;
        let fills_blocks = |rows| found.kernel.padded_rows(rows, *terms, *columns) == Some(rows);
        let is_split = self.parts == 1 || fills_blocks(own) && fills_blocks(rows);
        own >= LEAST_ROWS && fills_lanes && is_split && found.kernel.fits(own, *terms, *columns)
    }

    /// Whether the parts of the batch, the first dimension, are as large as each other.
    fn is_split(&self, shape: &Shape) -> bool {
        is_split(shape, self.parts)
    }

    /// The attentions whose queries, keys and values are products of the same rows that one kernel computes side by
    /// side: rows are then normalized and rounded once.
    fn self_attentions(&self, products: &HashMap<usize, Found>) -> HashMap<usize, SelfAttention> {
        let nodes = self.graph.nodes.iter().enumerate();
        let found = nodes.filter_map(|(i, node)| {
            let kernel = side_by_side_kernel(node, self.features)?;
            if self.users[i].is_empty() || !self.is_split(&node.shape) {
                return None;
            }
            let qkv = node.operands.iter().map(|operand| {
                let product = self.before_reshapes(*operand as usize, i)?;
                products.get(&product).cloned()
            });
            let qkv: Option<Vec<Found>> = qkv.collect();
            let qkv: [Found; 3] = qkv?.try_into().ok()?;
            let found = SelfAttention { kernel, qkv };
            self.lies_side_by_side(&found, &node.shape)
                .then_some((i, found))
        });
        found.collect()
    }

    /// What node `i` is a reshape of, maybe several times, if only `reader` reads it.
    fn before_reshapes(&self, mut i: usize, mut reader: usize) -> Option<usize> {
        while self.only_user(i).is_some_and(|(user, _)| user == reader) {
            let node = &self.graph.nodes[i];
            match node.op {
                Op::Reshape(_) => (reader, i) = (i, node.operands[0] as usize),
                _ => return Some(i),
            }
        }
        None
    }

    /// Whether one kernel can compute the products, and another reads them as the queries, keys and values of an attention whose
    /// result has this shape.
    fn lies_side_by_side(&self, found: &SelfAttention, attention: &Shape) -> bool {
        let [q, ..] = &found.qkv;
        let same = found.qkv.iter().all(|found| {
            let recorded = found.scales.recorded() == q.scales.recorded();
            recorded
                && (found.kernel, found.x, found.norm, &found.shape)
                    == (q.kernel, q.x, q.norm, &q.shape)
        });
        let [batch, length] = [0, 1].map(|d| attention.dims[d]);
        let rows = batch * length;
        let columns: usize = attention.dims[2..].iter().product();
        let x = &self.node(q.x).shape;
        let terms = x.dims.last().copied().unwrap_or(0);
        let alone = Shape::new(DType::BF16, [batch, length, columns]);
        let plain = !q.kernel.gated && !q.kernel.residual;
        same && plain
            && Attention::padded(length, length) == [length; 2]
            && found.kernel.fits(&alone, &alone)
            && [rows, rows / self.parts]
                .iter()
                .all(|rows| q.kernel.padded_rows(*rows, terms, 3 * columns) == Some(*rows))
    }

    /// The kernels' calls in place of attention and of the products before it.
    fn self_attention_call(
        &self,
        b: &Builder,
        attention: usize,
        found: &SelfAttention,
        copies: &[Tensor],
    ) -> Result<Tensor> {
        let shape = &self.graph.nodes[attention].shape;
        let [batch, length] = [0, 1].map(|d| shape.dims[d]);
        let columns: usize = shape.dims[2..].iter().product();
        let y = self.product_call(b, &found.qkv.each_ref(), copies)?;
        let y = b.reshape(y, &[batch, length, 3 * columns])?;
        let kernel = Arc::new(found.kernel.clone());
        let y = b.push(Op::CustomCall(kernel), &[y; 3])?;
        b.reshape(y, &shape.dims)
    }

    /// The kernel's call in place of products of the same rows and what belongs to them, `[1, rows, columns]`, with the
    /// columns of each product side by side. Several products are neither gated nor added to anything.
    fn product_call(&self, b: &Builder, products: &[&Found], copies: &[Tensor]) -> Result<Tensor> {
        let copy = |id: u32| copies[id as usize];
        let found = products[0];
        let each = found.shape.dims.last().copied().unwrap_or(1);
        let columns = products.len() * each;
        let block = match found.kernel.gated {
            true => found.kernel.gated_block(columns),
            false => None,
        };
        // Stored weights lie the other way: their scales are then those of registers.
        let along_terms = match found.kernel.arithmetic {
            Arithmetic::Stored(_) => 0,
            Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => 1,
        };
        let weights = products.iter().map(|found| {
            let mut weights = copy(found.weights);
            if found.contracted != along_terms || block.is_some() || products.len() > 1 {
                // What is stored of a weight is its packed form.
                weights = self.before_storage(found.weights, copies);
            }
            match found.contracted == along_terms {
                false => b.transpose(weights, &[1, 0]),
                true => Ok(weights),
            }
        });
        let mut weights = side_by_side(b, weights, 1 - along_terms)?;
        let terms = b.dims(weights)[along_terms];
        let scales = products.iter().map(|found| {
            let own = self.node(found.weights).shape.dims[1 - found.contracted];
            let [scale, bias] = [found.scales.of_columns(), found.bias].map(|id| id.map(copy));
            of_columns(b, own, [scale, bias])
        });
        let mut scales = side_by_side(b, scales, 1)?;
        if let Some(block) = block {
            weights = in_turns(b, weights, 1 - along_terms, block)?;
            scales = in_turns(b, scales, 1, block)?;
        }
        let all_columns = b.dims(weights)[1 - along_terms];
        let lying = [&[1], &b.dims(weights)[..]].concat();
        let weights = b.reshape(weights, &lying)?;
        let scales = b.reshape(scales, &[1, found.kernel.rows_of_columns(), all_columns])?;
        let rows = found.shape.count() / each;
        let padded = found.kernel.padded_rows(rows, terms, columns);
        let padded = padded.unwrap_or(rows);
        let matrix = |x: Tensor, columns: usize| -> Result<Tensor> {
            let x = b.reshape(x, &[1, rows, columns])?;
            pad_to(b, x, &[1, padded, columns])
        };
        let mut operands = vec![matrix(copy(found.x), terms)?, weights, scales];
        if let Some([weight, bias]) = found.norm {
            let of_features = of_columns(b, terms, [weight, bias].map(|id| Some(copy(id))))?;
            operands.push(b.reshape(of_features, &[1, 2, terms])?);
        }
        if let Some(scale) = found.scales.recorded() {
            operands.push(inverse_of_features(b, copy(scale), &[1, 1, terms])?);
        }
        if found.scales.of_groups().is_some() {
            let scales = products
                .iter()
                .filter_map(|found| found.scales.of_groups())
                .map(|scale| {
                    let scale = b.convert(self.before_storage(scale, copies), DType::F32)?;
                    b.transpose(scale, &[1, 0])
                });
            let mut scales = side_by_side(b, scales, 1)?;
            if let Some(block) = block {
                scales = in_turns(b, scales, 1, block)?;
            }
            let groups = b.dims(scales)[0];
            operands.push(b.reshape(scales, &[1, groups, all_columns])?);
        }
        if let Some(residual) = found.residual {
            operands.push(matrix(copy(residual), columns)?);
        }
        let y = b.push(Op::CustomCall(Arc::new(found.kernel)), &operands)?;
        match padded == rows {
            true => Ok(y),
            false => b.slice_dim(y, 1, 0, rows),
        }
    }

    /// The value that is marked as stored at `id`: packed, it is what is stored.
    fn before_storage(&self, id: u32, copies: &[Tensor]) -> Tensor {
        match self.node(id).op {
            Op::Stored => copies[self.node(id).operands[0] as usize],
            _ => copies[id as usize],
        }
    }
}

/// The parts one after the other along `dim`; a part alone as it is.
fn side_by_side(
    b: &Builder,
    parts: impl Iterator<Item = Result<Tensor>>,
    dim: usize,
) -> Result<Tensor> {
    let parts = parts.collect::<Result<Vec<Tensor>>>()?;
    match parts[..] {
        [alone] => Ok(alone),
        _ => b.concatenate(&parts, dim),
    }
}

/// The kernel for the attention that `node` is, or calls the kernel of, if its queries, keys and values lay side by side. `None`
/// where heads alone would have to be padded.
fn side_by_side_kernel(node: &Node, features: Features) -> Option<Attention> {
    let kernel = match &node.op {
        Op::Composite {
            kind: Composite::Attention { causal: false },
            ..
        } => {
            let [length, heads, size] = [1, 2, 3].map(|d| node.shape.dims[d]);
            let is_whole = Attention::padded_size(size) == size;
            let fills_registers = size > 64 || heads.is_multiple_of(2);
            (is_whole && fills_registers).then(|| Attention {
                scale: 1.0 / (size as f64).sqrt(),
                size,
                keys: length,
                side_by_side: false,
                features,
            })?
        }
        Op::CustomCall(call) => {
            let call: &dyn Any = call.as_ref();
            call.downcast_ref::<Attention>()?.clone()
        }
        _ => return None,
    };
    Some(Attention {
        side_by_side: true,
        ..kernel
    })
}

/// The reciprocals of recorded scales in `f32`, as AMD Quark's numerics have them: one, or one for each of the features that
/// are the last of `dims`.
fn inverse_of_features(b: &Builder, scale: Tensor, dims: &[usize]) -> Result<Tensor> {
    let scale = b.convert(scale, DType::F32)?;
    let inverse = b.div(b.full(&b.shape(scale), 1.0)?, scale)?;
    let places: Vec<usize> = b.dims(inverse).iter().map(|_| dims.len() - 1).collect();
    b.broadcast_in_dim(inverse, &places, dims)
}

/// Scales, where there are any, and biases of columns, or weights and biases of features, `f32[1 or 2, columns]`. Without a
/// bias they are zeros.
fn of_columns(b: &Builder, columns: usize, [scale, bias]: [Option<Tensor>; 2]) -> Result<Tensor> {
    let row = |x: Tensor| b.reshape(b.convert(x, DType::F32)?, &[1, columns]);
    let bias = match bias {
        Some(bias) => row(bias)?,
        None => b.full(&Shape::new(DType::F32, [1, columns]), 0.0)?,
    };
    match scale {
        Some(scale) => b.concatenate(&[row(scale)?, bias], 0),
        None => Ok(bias),
    }
}

/// The matrix `x` with blocks of `block` from the first and from the second half of dimension `dim` in turn.
fn in_turns(b: &Builder, x: Tensor, dim: usize, block: usize) -> Result<Tensor> {
    let dims = b.dims(x);
    if dim + 1 == dims.len() {
        // A reshape is made in every run, and one that joins parts of the last dimension moves all numbers.
        let half = dims[dim] / 2;
        let parts = (0..half).step_by(block).flat_map(|at| [at, half + at]);
        let parts = parts.map(|at| b.slice_dim(x, dim, at, at + block));
        return side_by_side(b, parts, dim);
    }
    let blocks = [2, dims[dim] / 2 / block, block];
    let split = [&dims[..dim], &blocks, &dims[dim + 1..]].concat();
    let mut order: Vec<usize> = (0..split.len()).collect();
    order.swap(dim, dim + 1);
    let x = b.reshape(x, &split)?;
    let x = b.transpose(x, &order)?;
    b.reshape(x, &dims)
}

/// `x` with zeros after its elements, up to `dims`.
fn pad_to(b: &Builder, x: Tensor, dims: &[usize]) -> Result<Tensor> {
    let own = b.dims(x);
    if own == dims {
        return Ok(x);
    }
    let missing = dims.iter().zip(&own).map(|(to, from)| PadDim {
        high: (to - from) as i64,
        ..PadDim::default()
    });
    b.pad(x, 0.0, &missing.collect::<Vec<_>>())
}
