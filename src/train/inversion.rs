//! Textual inversion as what is trained (Gal et al. 2022, "An Image is Worth One Word"): vectors of a new token beside the
//! embedding tables of the text encoders. The tables stay as they are.

use std::collections::BTreeMap;

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, Graph, GraphError, Init, Op};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::Part;
use crate::models::clip::TOKEN_EMBEDDING;
use crate::pipelines::textual_inversion::{SDXL, TOKEN};
use crate::shape::Shape;

/// The name of the vectors below the root of their text encoder.
const VECTORS: &str = "learned_embeds";

/// A token to train.
#[derive(Clone, Debug, PartialEq)]
pub struct InversionOptions {
    /// The word that captions and prompts name it by.
    pub token: String,
    /// How many vectors it stands for.
    pub vectors: usize,
    /// One for each text encoder.
    pub places: Vec<InversionPlace>,
}

/// The ids of a token for one text encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InversionPlace {
    pub part: Part,
    /// The first id of the vectors, behind the vocabulary.
    pub first: i32,
    /// The token whose row of the table the vectors start from.
    pub initializer: i32,
}

/// Whether a weight is the vectors of a new token.
pub fn is_learned(name: &str) -> bool {
    name.rsplit_once('/').is_some_and(|(_, key)| key == VECTORS)
}

impl InversionPlace {
    /// The name of the vectors' weight.
    pub(super) fn weight(&self) -> String {
        format!("{}/{VECTORS}", self.part)
    }

    /// The name of the embedding table.
    pub(super) fn table(&self) -> String {
        format!("{}/{TOKEN_EMBEDDING}", self.part)
    }
}

impl InversionOptions {
    /// The graph in which ids from [`InversionPlace::first`] on take rows of new weights, `f32[vectors, features]`, in place of
    /// rows of the embedding table. For all else that reads ids they are the id 0: an encoder that pools at the highest
    /// id finds the end token.
    ///
    /// # Errors
    /// When a text encoder is not a part of the program.
    pub fn beside(&self, graph: &Graph) -> Result<Graph, GraphError> {
        let lookups = self
            .places
            .iter()
            .map(|place| Lookup::find(graph, place))
            .collect::<Result<Vec<_>, _>>()?;
        graph.substitute(&mut |b, at, copies| {
            let node = &graph.nodes[at];
            let mut found = lookups.iter();
            let Some(lookup) = found.find(|lookup| node.operands.contains(&lookup.ids)) else {
                return Ok(None);
            };
            let ids = copies[lookup.ids as usize];
            let first = b.scalar(DType::S32, f64::from(lookup.place.first))?;
            let is_new = b.compare(Comparison::Ge, ids, first)?;
            let zero = b.scalar(DType::S32, 0.0)?;
            let known = b.select(is_new, zero, ids)?;
            let operand = |id: &u32| match *id == lookup.ids {
                true => known,
                false => copies[*id as usize],
            };
            let operands: Vec<_> = node.operands.iter().map(operand).collect();
            let copy = b.copy_node(node, &operands)?;
            if at != lookup.node {
                return Ok(Some(copy));
            }
            let dims = b.dims(copy);
            let features = dims[dims.len() - 1];
            let vectors = b.root(lookup.place.part).param(
                VECTORS,
                Shape::new(DType::F32, [self.vectors, features]),
                Init::Zeros,
                &[None, Some("embed")],
            )?;
            let index = b.select(is_new, b.sub(ids, first)?, zero)?;
            let rows = b.convert(b.take(vectors, index)?, b.dtype(copy))?;
            let of_ids: Vec<usize> = (0..dims.len() - 1).collect();
            let is_new = b.broadcast_in_dim(is_new, &of_ids, &dims)?;
            b.select(is_new, rows, copy).map(Some)
        })
    }

    /// The weights to train as they start: the row of the initializer token for each vector. `table` reads the embedding
    /// table of a part.
    ///
    /// # Errors
    /// Errors of `table`.
    pub fn initial<E: From<HostTensorError>>(
        &self,
        table: &mut dyn FnMut(Part) -> Result<HostTensor, E>,
    ) -> Result<BTreeMap<String, HostTensor>, E> {
        let mut weights = BTreeMap::new();
        for place in &self.places {
            let row = row(&table(place.part)?.convert(DType::F32)?, place.initializer);
            let dims = [self.vectors, row.len() / size_of::<f32>()];
            let vectors = HostTensor::new(Shape::new(DType::F32, dims), row.repeat(self.vectors))?;
            weights.insert(place.weight(), vectors);
        }
        Ok(weights)
    }

    /// The name of a weight in [`super::INVERSION_FILE`]: the token, or for models with two text encoders what web interfaces
    /// call them. `None` for other weights.
    pub fn file_place(&self, weight: &str) -> Option<String> {
        let place = self.places.iter().find(|place| place.weight() == weight)?;
        let mut names = SDXL.iter();
        let named = names.find(|(_, part)| *part == place.part);
        match (self.places.as_slice(), named) {
            ([_], _) => Some(self.token.clone()),
            (_, named) => named.map(|(name, _)| (*name).to_owned()),
        }
    }

    /// The metadata of the file, which names the token also where the tensors do not.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        BTreeMap::from([(TOKEN.to_owned(), self.token.clone())])
    }
}

/// Row `index` of `f32[rows, features]`, as bytes; nothing where there is none.
fn row(table: &HostTensor, index: i32) -> Vec<u8> {
    let bytes = table.shape.dims.get(1).copied().unwrap_or(0) * size_of::<f32>();
    let mut rows = table.data.chunks_exact(bytes.max(1));
    let row = usize::try_from(index).ok().and_then(|at| rows.nth(at));
    row.unwrap_or_default().to_vec()
}

/// Where a program looks ids up in an embedding table.
struct Lookup<'a> {
    place: &'a InversionPlace,
    node: usize,
    /// The node of the ids.
    ids: u32,
}

impl<'a> Lookup<'a> {
    fn find(graph: &Graph, place: &'a InversionPlace) -> Result<Lookup<'a>, GraphError> {
        let table = place.table();
        let nodes = graph.nodes.iter().enumerate();
        let mut lookups = nodes.filter(|(_, node)| matches!(node.op, Op::Gather { .. }));
        let found = lookups.find_map(|(at, node)| {
            let [of, ids] = node.operands[..] else {
                return None;
            };
            let Op::Parameter(index) = graph.nodes[of as usize].op else {
                return None;
            };
            (graph.inputs[index].name == table).then_some((at, ids))
        });
        match found {
            Some((node, ids)) => Ok(Lookup { place, node, ids }),
            None => Err(Builder::new().invalid(format!(
                "nothing is looked up in {table}, which vectors are to be put beside"
            ))),
        }
    }
}
