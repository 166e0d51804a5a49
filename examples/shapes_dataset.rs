//! Writes pictures of coloured shapes with captions as a dataset: parquet files as Hugging Face's `datasets` writes them, tar
//! archives as WebDataset's, and TFRecord files.
//!
//! `cargo run --release --example shapes_dataset -- DIR [COUNT [SIDE]]` writes `DIR/tables/train-00000-of-00020.parquet`,
//! `DIR/archives/00000.tar` and `DIR/records/00000.tfrecord`, a thousand pictures in each; by default 20,000 of 64 pixels.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Cursor, Write};
use std::path::Path;
use std::sync::Arc;

use image::ImageFormat;
use maxdiff::data::{Sample, Shapes, ShapesOptions};
use maxdiff::proto::tensorflow::feature::Kind;
use maxdiff::proto::tensorflow::{BytesList, Example, Feature, Features};
use maxdiff::util::tfrecord::write_record;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use prost::Message;

/// Pictures of a file.
const OF_FILE: usize = 1000;
/// Rows of a group of a parquet file: the `datasets` library's default.
const OF_GROUP: usize = 100;
const SCHEMA: &str = "message schema { optional group image { optional binary bytes; optional binary path (STRING); } \
                      optional binary text (STRING); }";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let dir = words.first().ok_or("give DIR [COUNT [SIDE]]")?;
    let number = |at: usize, default: usize| words.get(at).map_or(Ok(default), |word| word.parse());
    let shapes = Shapes::new(ShapesOptions {
        count: number(1, 20_000)?,
        resolution: number(2, 64)?,
        ..ShapesOptions::default()
    })?;
    write_dataset(Path::new(dir), &shapes)
}

/// Writes the samples of `shapes` to `dir/tables`, `dir/archives` and `dir/records`.
///
/// # Errors
/// When a file cannot be written.
pub fn write_dataset(dir: &Path, shapes: &Shapes) -> Result<()> {
    let [tables, archives, records] = ["tables", "archives", "records"].map(|name| dir.join(name));
    for folder in [&tables, &archives, &records] {
        fs::create_dir_all(folder)?;
    }
    let files = shapes.count().div_ceil(OF_FILE);
    for file in 0..files {
        let numbers = file * OF_FILE..((file + 1) * OF_FILE).min(shapes.count());
        let pictures = numbers.map(|number| picture(number, &shapes.get(number)));
        let pictures = pictures.collect::<Result<Vec<_>>>()?;
        let name = format!("train-{file:05}-of-{files:05}.parquet");
        write_table(&tables.join(name), &pictures)?;
        write_archive(&archives.join(format!("{file:05}.tar")), &pictures)?;
        write_records(&records.join(format!("{file:05}.tfrecord")), &pictures)?;
    }
    Ok(())
}

/// A picture as the bytes of a PNG file, with its caption.
struct Picture {
    number: usize,
    png: Vec<u8>,
    caption: String,
}

fn picture(number: usize, sample: &Sample) -> Result<Picture> {
    let mut png = Cursor::new(Vec::new());
    sample.image().write_to(&mut png, ImageFormat::Png)?;
    Ok(Picture {
        number,
        png: png.into_inner(),
        caption: sample.captions.concat(),
    })
}

fn write_table(path: &Path, pictures: &[Picture]) -> Result<()> {
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
    let file = File::create(path)?;
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties.build()))?;
    for rows in pictures.chunks(OF_GROUP) {
        let mut group = writer.next_row_group()?;
        type Column = fn(&Picture) -> Option<Vec<u8>>;
        let columns: [(i16, Column); 3] = [
            (2, |picture| Some(picture.png.clone())),
            // The bytes are there, so no path is needed.
            (1, |_| None),
            (1, |picture| Some(picture.caption.clone().into_bytes())),
        ];
        for (level, column) in columns {
            let values: Vec<ByteArray> = rows
                .iter()
                .filter_map(column)
                .map(ByteArray::from)
                .collect();
            let levels = vec![level; rows.len()];
            if let Some(mut next) = group.next_column()? {
                let typed = next.typed::<ByteArrayType>();
                typed.write_batch(&values, Some(&levels), None)?;
                next.close()?;
            }
        }
        group.close()?;
    }
    writer.close()?;
    Ok(())
}

fn write_archive(path: &Path, pictures: &[Picture]) -> Result<()> {
    let mut archive = tar::Builder::new(File::create(path)?);
    for picture in pictures {
        for (ending, bytes) in [
            ("png", &picture.png[..]),
            ("txt", picture.caption.as_bytes()),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            let name = format!("{:06}.{ending}", picture.number);
            archive.append_data(&mut header, name, bytes)?;
        }
    }
    archive.finish()?;
    Ok(())
}

fn write_records(path: &Path, pictures: &[Picture]) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    for picture in pictures {
        write_record(&mut out, &example(&picture.png, &picture.caption))?;
    }
    out.flush()?;
    Ok(())
}

/// The `tf.train.Example` of an image file with its caption.
pub fn example(image: &[u8], caption: &str) -> Vec<u8> {
    let feature = |name: &str, value: &[u8]| {
        let value = vec![value.to_vec()];
        let kind = Some(Kind::BytesList(BytesList { value }));
        (name.to_owned(), Feature { kind })
    };
    let feature = [feature("image", image), feature("text", caption.as_bytes())].into();
    let features = Some(Features { feature });
    Example { features }.encode_to_vec()
}
