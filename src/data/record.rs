//! TFRecord files whose records are TensorFlow's `tf.train.Example`, with an image in each.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;

use super::{DataError, io, named};
use crate::proto::tensorflow::feature::Kind;
use crate::proto::tensorflow::{Example, Feature};
use crate::util::files;
use crate::util::tfrecord::{Record, Records};

/// Features of the records that MaxDiffusion prepares: latents and text embeddings, each a serialized tensor.
const PREPARED: [&str; 9] = [
    "clip_embeddings",
    "encoder_hidden_states",
    "hidden_states",
    "input_ids",
    "latents",
    "moments",
    "pixel_values",
    "prompt_embeds",
    "text_embeds",
];

/// An image in a TFRecord file.
#[derive(Clone, Debug)]
pub struct RecordImage {
    /// The first byte of its record in the file.
    pub offset: u64,
    /// Its record in the file, from 0.
    pub number: usize,
    /// The feature that has it.
    pub feature: Arc<str>,
}

impl RecordImage {
    /// The bytes of the image, which lies in the file `path`.
    ///
    /// # Errors
    /// When the file cannot be read, or has another record there by now.
    pub fn bytes(&self, path: &Path) -> Result<Vec<u8>, DataError> {
        let mut file = RecordFile::open(path, self.offset)?;
        let Some(record) = file.next() else {
            let message = format!("there is no record at byte {} any more", self.offset);
            return Err(file.error(message));
        };
        let (_, example) = record?;
        let image = image_of(&example, &self.feature);
        image
            .map(<[u8]>::to_vec)
            .map_err(|message| file.error_at(self.offset, &message))
    }
}

/// The examples of a file, each with the first byte of its record.
#[derive(Debug)]
pub struct RecordFile {
    path: PathBuf,
    records: Records<BufReader<File>>,
}

impl RecordFile {
    /// The examples of the file `path` from byte `offset` on, where a record begins.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path, offset: u64) -> Result<RecordFile, DataError> {
        let error = |e| io("open the TFRecord file", path, e);
        let mut file = files::open(path).map_err(error)?;
        let length = file.metadata().map_err(error)?.len();
        file.seek(SeekFrom::Start(offset)).map_err(error)?;
        Ok(RecordFile {
            path: path.to_owned(),
            records: Records::new(BufReader::new(file), offset, length),
        })
    }

    fn example(&self, record: &Record) -> Result<(u64, Example), DataError> {
        let example = Example::decode(record.payload.as_slice());
        let example = example
            .map_err(|e| self.error_at(record.offset, &format!("no tf.train.Example: {e}")))?;
        Ok((record.offset, example))
    }

    /// What is wrong with the record at byte `offset`.
    pub fn error_at(&self, offset: u64, message: &str) -> DataError {
        self.error(format!("the record at byte {offset}: {message}"))
    }

    fn error(&self, message: String) -> DataError {
        DataError::Record {
            path: self.path.clone(),
            message,
        }
    }
}

impl Iterator for RecordFile {
    type Item = Result<(u64, Example), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let record = self.records.next()?;
        Some(match record {
            Ok(record) => self.example(&record),
            Err(error) => Err(self.error(error.to_string())),
        })
    }
}

/// The image that the feature `name` has, or what is there in its place.
pub fn image_of<'a>(example: &'a Example, name: &str) -> Result<&'a [u8], String> {
    match values_of(example, name)? {
        [image] => Ok(image),
        several => Err(format!(
            "the feature {name} has {} values, expected one encoded image",
            several.len()
        )),
    }
}

/// The values of the feature `name`, or what is there in their place.
pub fn values_of<'a>(example: &'a Example, name: &str) -> Result<&'a [Vec<u8>], String> {
    let none = BTreeMap::new();
    let features = example.features.as_ref().map(|all| &all.feature);
    let Some(feature) = features.and_then(|all| all.get(name)) else {
        return Err(missing(name, features.unwrap_or(&none)));
    };
    match &feature.kind {
        Some(Kind::BytesList(list)) => Ok(&list.value),
        Some(Kind::FloatList(_) | Kind::Int64List(_)) => Err(format!(
            "the feature {name} has numbers, expected bytes: an image file or a text"
        )),
        None => Ok(&[]),
    }
}

fn missing(name: &str, features: &BTreeMap<String, Feature>) -> String {
    let prepared = PREPARED
        .into_iter()
        .filter(|own| features.contains_key(*own));
    let prepared: Vec<&str> = prepared.collect();
    if !prepared.is_empty() {
        return format!(
            "it holds latents and text embeddings ({}) that MaxDiffusion computed with a model that it does not name, and no \
             picture; train from the pictures and captions that they were made of, which this program encodes once, before the \
             first step",
            prepared.join(", ")
        );
    }
    let names: Vec<String> = features.keys().cloned().collect();
    format!(
        "there is no feature {name}; its features are {}: name them by image_column and caption_column",
        named(&names, names.len())
    )
}
