//! Textual inversion (Gal et al. 2022, "An Image is Worth One Word"): trained vectors that prompts name by a token.
//!
//! A token stands for rows of each text encoder's embedding table. The table keeps its size: a vector takes the row of
//! a token that no prompt of the call has ([`TextualInversions::place`]). So programs are those without textual
//! inversions.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::data::{DataError, Tokenizer};
use crate::dtype::DType;
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::clip::TOKEN_EMBEDDING;
use crate::models::{Part, TextEncoder};
use crate::shape::Shape;
use crate::weights::{Checkpoint, WeightsError, is_pickle};

use super::batch::TokenizedImage;

/// The file that diffusers saves in a folder.
pub const FILE: &str = "learned_embeds.safetensors";
/// The tensor of web interfaces' files for models with one text encoder.
const WEB: &str = "emb_params";
/// The metadata of files of this program: the token, which files for SDXL name nowhere else.
pub const TOKEN: &str = "token";
/// The tensors of files for SDXL.
pub const SDXL: [(&str, Part); 2] = [
    ("clip_g", Part::TextEncoder2),
    ("clip_l", Part::TextEncoder),
];
/// Most vectors of a token: as many as fit into one sequence of CLIP.
const MOST_VECTORS: usize = 75;
/// `eos_token_id` of encoders that pool at the highest id, see [`crate::models::clip::ClipTextConfig`].
const POOLS_AT_HIGHEST: i32 = 2;

/// Why a textual inversion could not be read or used.
#[derive(Debug, thiserror::Error)]
pub enum InversionError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(
        "{}: a PyTorch pickle, which can run code when it is loaded; if you trust it, convert it with \
         safetensors.torch.save_file({{\"emb_params\": torch.load(path, weights_only=True)[\"string_to_param\"][\"*\"].detach()}}, \
         \"name.safetensors\"), or for diffusers' learned_embeds.bin with \
         safetensors.torch.save_file(torch.load(path, weights_only=True), \"{FILE}\")",
        path.display()
    )]
    Pickle { path: PathBuf },
    #[error(
        "{}: not a textual inversion: expected one tensor ({WEB}, or named by its token), or clip_l and clip_g for SDXL; found \
         {}",
        path.display(), found.join(", ")
    )]
    Format { path: PathBuf, found: Vec<String> },
    #[error(
        "{}: tensor {tensor} is {found}; expected [features], or [vectors, features] with 1 to {MOST_VECTORS} vectors",
        path.display()
    )]
    Dims {
        path: PathBuf,
        tensor: String,
        found: Shape,
    },
    #[error(
        "{}: tensor {tensor} has vectors of {found} features; expected {expected}, those of {part}: it was made for another model",
        path.display()
    )]
    Width {
        path: PathBuf,
        tensor: String,
        part: Part,
        expected: usize,
        found: usize,
    },
    #[error("{}: expected {expected}; found {}", path.display(), found.join(", "))]
    Encoders {
        path: PathBuf,
        expected: String,
        found: Vec<String>,
    },
    #[error("{}: {source}; textual_inversions=\"[{{path: {}, token: TOKEN}}]\" names another", path.display(), path.display())]
    Token { path: PathBuf, source: DataError },
    #[error(
        "the prompts and the {vectors} vectors of their textual inversions need more rows than the {rows} of {part}'s embedding \
         table: use fewer textual inversions at once"
    )]
    Rows {
        part: Part,
        vectors: usize,
        rows: usize,
    },
}

/// The vectors of a token, from a file.
#[derive(Clone, Debug)]
pub struct TextualInversion {
    path: PathBuf,
    token: String,
    /// `f32[vectors, features]`, by the tensors' names.
    tensors: BTreeMap<String, HostTensor>,
}

impl TextualInversion {
    /// Reads a safetensors file of web interfaces, of diffusers (or a folder that it saved) or for SDXL. The token is
    /// `token`, else the one that diffusers' file or the metadata names, else the file's name without its ending.
    ///
    /// # Errors
    /// When it cannot be read, is a pickle, or holds something else.
    pub fn open(path: &Path, token: Option<&str>) -> Result<TextualInversion, InversionError> {
        let file = match path.is_dir() {
            true => path.join(FILE),
            false => path.to_owned(),
        };
        let pickle = || InversionError::Pickle { path: file.clone() };
        if is_pickle(&file.to_string_lossy()) {
            return Err(pickle());
        }
        let checkpoint = Checkpoint::open(&file).map_err(|error| match error {
            WeightsError::Pickle { .. } => pickle(),
            error => error.into(),
        })?;
        let names: Vec<&str> = checkpoint.names().collect();
        let own = match names.as_slice() {
            ["clip_g", "clip_l"] | ["clip_g"] | ["clip_l"] | [WEB] => None,
            [own] => Some(*own),
            found => {
                return Err(InversionError::Format {
                    found: found.iter().map(|name| (*name).to_owned()).collect(),
                    path: file,
                });
            }
        };
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let recorded = checkpoint.metadata().get(TOKEN).map(String::as_str);
        let own = own.or(recorded);
        let mut tensors = BTreeMap::new();
        for name in &names {
            let mut tensor = checkpoint.read_as(name, DType::F32)?;
            tensor.shape.dims = match *tensor.shape.dims {
                [features] if features > 0 => vec![1, features],
                [vectors, features] if (1..=MOST_VECTORS).contains(&vectors) && features > 0 => {
                    vec![vectors, features]
                }
                _ => {
                    return Err(InversionError::Dims {
                        tensor: (*name).to_owned(),
                        found: tensor.shape,
                        path: file,
                    });
                }
            };
            tensors.insert((*name).to_owned(), tensor);
        }
        Ok(TextualInversion {
            token: token.or(own).unwrap_or(&stem).trim().to_owned(),
            path: file,
            tensors,
        })
    }

    /// The word that prompts name it by.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The vectors for one of a model's text encoders, `encoders`.
    fn vectors(
        &self,
        encoder: &TextEncoder,
        encoders: &[TextEncoder],
    ) -> Result<&HostTensor, InversionError> {
        let has = |part: Part| encoders.iter().any(|encoder| encoder.part == part);
        let is_sdxl = SDXL
            .iter()
            .any(|(name, _)| self.tensors.contains_key(*name));
        let is_for_another = self.tensors.contains_key("clip_g") && !has(Part::TextEncoder2);
        let found = match is_sdxl {
            _ if is_for_another => None,
            true => {
                let named = SDXL.iter().find(|(_, part)| *part == encoder.part);
                named.and_then(|(name, _)| self.tensors.get_key_value(*name))
            }
            false if encoders.len() == 1 => self.tensors.first_key_value(),
            false => None,
        };
        let Some((tensor, vectors)) = found else {
            let wanted = encoders.iter().map(|encoder| encoder.part.name());
            let wanted: Vec<&str> = wanted.collect();
            let expected = match has(Part::TextEncoder2) {
                true => "the tensors clip_l and clip_g",
                false => "one tensor",
            };
            return Err(InversionError::Encoders {
                path: self.path.clone(),
                expected: format!(
                    "{expected}, vectors for the model's {}",
                    wanted.join(" and ")
                ),
                found: self.tensors.keys().cloned().collect(),
            });
        };
        let (expected, found) = (encoder.config.features(), vectors.shape.dims[1]);
        match expected == found {
            true => Ok(vectors),
            false => Err(InversionError::Width {
                path: self.path.clone(),
                tensor: tensor.clone(),
                part: encoder.part,
                expected,
                found,
            }),
        }
    }
}

/// The textual inversions that a model's prompts may name.
#[derive(Clone, Debug, Default)]
pub struct TextualInversions(Vec<Added>);

/// A textual inversion whose token the tokenizers know.
#[derive(Clone, Debug)]
struct Added {
    path: PathBuf,
    token: String,
    /// For each text encoder, the first of the ids, which are behind the vocabulary, and `f32[vectors, features]`.
    vectors: Vec<(i32, HostTensor)>,
}

impl TextualInversions {
    /// One in training, whose token the tokenizers know: for each text encoder the first of its ids, and
    /// `f32[vectors, features]`.
    pub fn in_training(token: String, vectors: Vec<(i32, HostTensor)>) -> TextualInversions {
        TextualInversions(vec![Added {
            path: PathBuf::new(),
            token,
            vectors,
        }])
    }

    /// Adds a textual inversion, and its token to the tokenizers of the text encoders.
    ///
    /// # Errors
    /// When it is not one for these text encoders, or a vocabulary has the token already.
    pub fn add(
        &mut self,
        inversion: &TextualInversion,
        encoders: &[TextEncoder],
        tokenizers: &mut [Tokenizer],
    ) -> Result<(), InversionError> {
        let vectors = encoders
            .iter()
            .map(|encoder| inversion.vectors(encoder, encoders).cloned());
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        let vectors = tokenizers.iter_mut().zip(vectors);
        let vectors = vectors.map(|(tokenizer, vectors)| {
            let first = tokenizer.add_token(&inversion.token, vectors.shape.dims[0]);
            let first = first.map_err(|source| InversionError::Token {
                path: inversion.path.clone(),
                source,
            })?;
            Ok((first, vectors))
        });
        self.0.push(Added {
            path: inversion.path.clone(),
            token: inversion.token.clone(),
            vectors: vectors.collect::<Result<_, InversionError>>()?,
        });
        Ok(())
    }

    /// A warning for each token that no prompt has.
    pub fn unused(&self, images: &[TokenizedImage]) -> Vec<String> {
        let has = |image: &TokenizedImage, which: usize, id: i32| {
            let prompts = [image.prompt.get(which), image.negative.get(which)];
            prompts.into_iter().flatten().any(|p| p.ids().contains(&id))
        };
        let is_unused = |added: &&Added| {
            let mut firsts = added.vectors.iter().enumerate();
            !firsts.any(|(which, (first, _))| images.iter().any(|i| has(i, which, *first)))
        };
        let unused = self.0.iter().filter(is_unused);
        unused
            .map(|added| {
                let (token, path) = (&added.token, added.path.display());
                format!("no prompt has {token}, the token of the textual inversion {path}")
            })
            .collect()
    }

    /// Gives the vectors that prompts of `images` name the rows of tokens that none of these prompts has, and the
    /// prompts the ids of these rows. Returns the rows to replace in the embedding table of each text encoder.
    ///
    /// # Errors
    /// When there are not enough such rows.
    pub fn place(
        &self,
        encoders: &[TextEncoder],
        tokenizers: &[impl Borrow<Tokenizer>],
        images: &mut [TokenizedImage],
    ) -> Result<Vec<EmbeddingRows>, InversionError> {
        let encoders = encoders.iter().zip(tokenizers).enumerate();
        encoders
            .map(|(which, (encoder, tokenizer))| {
                let mut ids: Vec<&mut i32> = images
                    .iter_mut()
                    .flat_map(|image| [image.prompt.get_mut(which), image.negative.get_mut(which)])
                    .flatten()
                    .flat_map(|prompt| &mut prompt.chunks)
                    .flat_map(|chunk| &mut chunk.ids)
                    .collect();
                let used: BTreeSet<i32> = ids.iter().map(|id| **id).collect();
                let vectors: Vec<(i32, &HostTensor, usize)> = self
                    .0
                    .iter()
                    .filter_map(|added| added.vectors.get(which))
                    .flat_map(|(first, tensor)| {
                        let each = 0..tensor.shape.dims[0];
                        each.map(move |index| (first + index as i32, tensor, index))
                    })
                    .filter(|(id, ..)| used.contains(id))
                    .collect();
                // An encoder that pools at the highest id has to find the end token there.
                let pools_at = encoder.config.clip().map(|clip| clip.eos_token_id);
                let rows = match pools_at {
                    Some(POOLS_AT_HIGHEST) => tokenizer.borrow().end_id() as usize,
                    Some(_) | None => encoder.config.vocab_size(),
                };
                let free = (0..rows).rev().filter(|row| !used.contains(&(*row as i32)));
                let placed: BTreeMap<i32, usize> =
                    vectors.iter().map(|(id, ..)| *id).zip(free).collect();
                if placed.len() < vectors.len() {
                    return Err(InversionError::Rows {
                        part: encoder.part,
                        vectors: vectors.len(),
                        rows,
                    });
                }
                for id in &mut ids {
                    if let Some(row) = placed.get(*id) {
                        **id = *row as i32;
                    }
                }
                Ok(EmbeddingRows {
                    part: encoder.part,
                    rows: vectors
                        .into_iter()
                        .map(|(id, tensor, index)| (placed[&id], row_of(tensor, index)))
                        .collect(),
                })
            })
            .collect()
    }
}

/// Row `index` of `f32[rows, features]`, as bytes.
fn row_of(tensor: &HostTensor, index: usize) -> Vec<u8> {
    let bytes = tensor.data.len() / tensor.shape.dims[0];
    tensor.data[index * bytes..][..bytes].to_vec()
}

/// Rows of a text encoder's embedding table to replace.
#[derive(Clone, Debug)]
pub struct EmbeddingRows {
    part: Part,
    /// The number of the row, and its `f32` values as bytes.
    rows: Vec<(usize, Vec<u8>)>,
}

impl EmbeddingRows {
    /// Replaces the rows where `tensor`, the weight `key` of the part `root`, is the table.
    ///
    /// # Errors
    /// When the table's elements are not floats.
    pub fn apply(
        &self,
        root: &str,
        key: &str,
        tensor: &mut HostTensor,
    ) -> Result<(), HostTensorError> {
        if root != self.part.name() || key != TOKEN_EMBEDDING {
            return Ok(());
        }
        let features = tensor.shape.dims[1];
        let bytes = features * tensor.shape.dtype.bits() / 8;
        for (row, values) in &self.rows {
            let values = HostTensor::new(Shape::new(DType::F32, [features]), values.clone())?;
            let values = values.convert(tensor.shape.dtype)?;
            tensor.data[row * bytes..][..bytes].copy_from_slice(&values.data);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::word_level_json;
    use crate::models::HiddenState;
    use crate::models::TextPlace;
    use crate::models::clip::ClipTextConfig;
    use crate::pipelines::prompt::{PromptSyntax, encode_prompt};
    use crate::weights::{TensorView, save};

    fn open(tensors: &[(&str, &[usize])]) -> Result<TextualInversion, InversionError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("Stem.v1.safetensors");
        let tensors: Vec<(String, HostTensor)> = tensors
            .iter()
            .map(|(name, dims)| {
                let count: usize = dims.iter().product();
                let values: Vec<f32> = (1..=count).map(|v| v as f32).collect();
                let tensor = HostTensor::from_f32(dims.to_vec(), &values).unwrap();
                ((*name).to_owned(), tensor)
            })
            .collect();
        let views = tensors.iter().map(|(name, tensor)| TensorView {
            name,
            dtype: tensor.shape.dtype,
            dims: &tensor.shape.dims,
            data: &tensor.data,
        });
        save(&path, views, &BTreeMap::new()).unwrap();
        TextualInversion::open(&path, None)
    }

    fn clip(features: usize, eos_token_id: i32) -> ClipTextConfig {
        ClipTextConfig {
            vocab_size: 8,
            hidden_size: features,
            eos_token_id,
            ..ClipTextConfig::default()
        }
    }

    fn encoder(part: Part, features: usize) -> TextEncoder {
        TextEncoder {
            part,
            config: clip(features, 1).into(),
            hidden: HiddenState::Normed { skip: 0 },
            place: TextPlace::Beside,
            masked: false,
            tokens: 6,
        }
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(&word_level_json(["a b c"]).unwrap(), 6).unwrap()
    }

    #[test]
    fn the_token_is_the_files_or_its_name() {
        fn token(tensors: &[(&str, &[usize])]) -> String {
            open(tensors).unwrap().token().to_owned()
        }
        assert_eq!(token(&[("emb_params", &[2, 4])]), "Stem.v1");
        assert_eq!(
            token(&[("clip_l", &[1, 4]), ("clip_g", &[1, 6])]),
            "Stem.v1"
        );
        assert_eq!(token(&[("<cat>", &[4])]), "<cat>");
    }

    #[test]
    fn vectors_for_other_encoders_are_refused() {
        fn error(tensors: &[(&str, &[usize])], encoders: &[TextEncoder]) -> String {
            let mut tokenizers: Vec<_> = encoders.iter().map(|_| tokenizer()).collect();
            let inversion = open(tensors);
            let added = inversion.and_then(|inversion| {
                TextualInversions::default().add(&inversion, encoders, &mut tokenizers)
            });
            added
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        }
        let one = [encoder(Part::TextEncoder, 4)];
        let two = [
            encoder(Part::TextEncoder, 4),
            encoder(Part::TextEncoder2, 6),
        ];
        let wide = error(&[("emb_params", &[2, 5])], &one);
        let expected =
            "tensor emb_params has vectors of 5 features; expected 4, those of text_encoder";
        assert!(wide.contains(expected), "{wide}");
        let both: &[(&str, &[usize])] = &[("clip_l", &[2, 4]), ("clip_g", &[2, 6])];
        assert_eq!(error(both, &two), "");
        assert_eq!(error(both, &two[1..]), "");
        assert!(error(both, &one).contains("expected one tensor"));
        let single = error(&[("<cat>", &[2, 4])], &two);
        assert!(
            single.contains("expected the tensors clip_l and clip_g"),
            "{single}"
        );
        for dims in [&[0, 4][..], &[76, 4], &[1, 1, 4], &[]] {
            let found = error(&[("emb_params", dims)], &one);
            assert!(
                found.contains("expected [features], or [vectors, features]"),
                "{found}"
            );
        }
        assert!(error(&[("a", &[4]), ("b", &[4])], &one).contains("found a, b"));
    }

    #[test]
    fn vectors_take_rows_that_no_prompt_has() {
        let encoders = [encoder(Part::TextEncoder, 4)];
        let mut tokenizers = vec![tokenizer()];
        let mut inversions = TextualInversions::default();
        inversions
            .add(
                &open(&[("<x>", &[2, 4])]).unwrap(),
                &encoders,
                &mut tokenizers,
            )
            .unwrap();
        let encode = |text| encode_prompt(&tokenizers[0], text, PromptSyntax::Weighted).unwrap();
        let image = |prompt, negative| TokenizedImage {
            plan: 0,
            guidance_scale: 1.0,
            prompt: vec![encode(prompt)],
            negative: vec![encode(negative)],
            negative_is_empty: false,
            seed: 0,
            init: 0,
        };
        let unused = inversions.unused(&[image("a", "b")]);
        assert!(
            unused[0].starts_with("no prompt has <x>, the token of"),
            "{unused:?}"
        );
        // Of the 8 rows, 0 and 1 are start and end, 3 and 5 the words, 6 and 7 the ids of the vectors.
        let mut images = [image("a <x>", "c")];
        assert!(inversions.unused(&images).is_empty());
        let rows = inversions
            .place(&encoders, &tokenizers, &mut images)
            .unwrap();
        assert_eq!(images[0].prompt[0].ids(), [0, 3, 4, 2, 1, 1]);
        let mut table = HostTensor::zeros(Shape::new(DType::BF16, [8, 4]));
        rows[0]
            .apply("text_encoder", TOKEN_EMBEDDING, &mut table)
            .unwrap();
        let values = table.to_f32_vec().unwrap();
        assert_eq!(values[8..12], [5.0, 6.0, 7.0, 8.0]);
        assert_eq!(values[16..20], [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(values.iter().filter(|value| **value == 0.0).count(), 24);

        // Where the highest id is pooled, the end token must stay the highest.
        let mut legacy = encoders.clone();
        legacy[0].config = clip(4, POOLS_AT_HIGHEST).into();
        let mut images = [image("a <x>", "c")];
        let error = inversions
            .place(&legacy, &tokenizers, &mut images)
            .unwrap_err();
        assert!(matches!(
            error,
            InversionError::Rows {
                vectors: 2,
                rows: 1,
                ..
            }
        ));
    }
}
