//! Datasets of Hugging Face: parquet files with a column of images, as bytes or paths, and a column of captions.
//!
//! Images stay where they are. Those of a row group are decompressed together, so samples are best read in their order.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::file::reader::FileReader;
use parquet::record::Field;
use rayon::prelude::*;

use super::Listed;
use super::list::{caption_of, extension};
use crate::data::DataError;
use crate::data::picture::{ImageFile, Part};
use crate::data::table::{Recent, Table, TableRow};
use crate::util::files;
use crate::util::splits::of_split;

/// The columns and the split of a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableOptions {
    pub image_column: String,
    pub caption_column: String,
    /// Files of other splits are left out, where their names tell.
    pub split: String,
    /// The files by their paths in the folder, which may be links to elsewhere; `None` looks for them.
    pub files: Option<Vec<PathBuf>>,
}

/// The images of `root`, a parquet file or a folder of them, in the order of the files' names and of their rows.
///
/// # Errors
/// When there is no file of the split, a file is no parquet, lacks one of the columns (which are listed), or a row has no
/// caption or no image.
pub(super) fn captioned_images(
    root: &Path,
    options: &TableOptions,
) -> Result<Vec<Listed>, DataError> {
    let (folder, names) = match &options.files {
        Some(files) => (root.to_owned(), files.clone()),
        None => tables(root, &options.split)?,
    };
    let recent = Arc::new(Recent::default());
    let read = |name: &PathBuf| {
        let column = options.image_column.clone();
        let table = Table::new(
            folder.join(name),
            folder.clone(),
            column,
            Arc::clone(&recent),
        );
        list(table, name, &options.caption_column)
    };
    let listed: Vec<Vec<Listed>> = names.par_iter().map(read).collect::<Result<_, _>>()?;
    let listed: Vec<Listed> = listed.into_iter().flatten().collect();
    match listed.is_empty() {
        true => Err(DataError::EmptyFolder {
            root: root.to_owned(),
        }),
        false => Ok(listed),
    }
}

/// The folder of the files of a split, and their paths in it.
fn tables(root: &Path, split: &str) -> Result<(PathBuf, Vec<PathBuf>), DataError> {
    if root.is_file() {
        let name = PathBuf::from(root.file_name().unwrap_or_default());
        return Ok((files::parent_of(root).to_owned(), vec![name]));
    }
    let mut all = BTreeSet::new();
    super::list::list(root, Path::new(""), &mut all)?;
    all.retain(|path| extension(path) == "parquet");
    let none = |found: String| DataError::NoTables {
        root: root.to_owned(),
        split: split.to_owned(),
        found,
    };
    if all.is_empty() {
        return Err(none("there are no .parquet files".to_owned()));
    }
    let all: Vec<PathBuf> = all.into_iter().collect();
    let of_split = of_split(&all, split);
    if of_split.is_empty() {
        let names: Vec<String> = all.iter().map(|path| path.display().to_string()).collect();
        return Err(none(format!("there are {}", names.join(", "))));
    }
    Ok((root.to_owned(), of_split))
}

/// The rows with their captions.
fn list(table: Table, name: &Path, caption_column: &str) -> Result<Vec<Listed>, DataError> {
    let file = table.open()?;
    table.column(&file, table.image_column())?;
    let column = table.column(&file, caption_column)?;
    let table = Arc::new(table);
    let mut listed = Vec::new();
    for group in 0..file.num_row_groups() {
        let captions = table.rows(&file, group, &column, &mut |field| Ok(captions_of(field)))?;
        for (row, captions) in captions.into_iter().enumerate() {
            let number = listed.len();
            let captions = captions
                .map_err(|e| table.error(format!("row {number}, column {caption_column}: {e}")))?;
            let row = TableRow {
                table: Arc::clone(&table),
                group,
                row,
                number,
            };
            listed.push(Listed {
                name: name.join(number.to_string()),
                image: ImageFile {
                    path: table.path().to_owned(),
                    part: Some(Part::Row(row)),
                },
                captions,
            });
        }
    }
    Ok(listed)
}

/// The captions of a row: a text, or a list of texts.
fn captions_of(field: &Field) -> Result<Vec<String>, &'static str> {
    let text = |field: &Field| match field {
        Field::Str(text) => caption_of(text),
        Field::Null => Err("there is no caption"),
        _ => Err("expected a text or a list of texts"),
    };
    match field {
        Field::ListInternal(several) if !several.elements().is_empty() => {
            several.elements().iter().map(text).collect()
        }
        one => Ok(vec![text(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Cursor;

    use image::{ImageFormat, Rgb, RgbImage};
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use tempfile::TempDir;

    use super::*;
    use crate::data::{Folder, FolderOptions, Layout};

    fn png(red: u8) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        let image = RgbImage::from_pixel(9, 6, Rgb([red, 0, 0]));
        image.write_to(&mut bytes, ImageFormat::Png).unwrap();
        bytes.into_inner()
    }

    /// Rows of bytes, path and caption.
    type Rows<'a> = [(Option<Vec<u8>>, Option<&'a str>, Option<&'a str>)];

    /// A file as the `datasets` library writes it, with row groups of two rows.
    fn write(path: &Path, rows: &Rows<'_>) {
        let schema = "message schema { optional group image { optional binary bytes; optional binary path (STRING); } \
                      optional binary text (STRING); }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
        let file = File::create(path).unwrap();
        let mut writer =
            SerializedFileWriter::new(file, schema, Arc::new(properties.build())).unwrap();
        for rows in rows.chunks(2) {
            let mut group = writer.next_row_group().unwrap();
            let columns: [(i16, Vec<Option<Vec<u8>>>); 3] = [
                (2, rows.iter().map(|row| row.0.clone()).collect()),
                (
                    2,
                    rows.iter()
                        .map(|row| row.1.map(|t| t.as_bytes().to_vec()))
                        .collect(),
                ),
                (
                    1,
                    rows.iter()
                        .map(|row| row.2.map(|t| t.as_bytes().to_vec()))
                        .collect(),
                ),
            ];
            for (level, values) in columns {
                let levels: Vec<i16> = values
                    .iter()
                    .map(|value| level - i16::from(value.is_none()))
                    .collect();
                let values: Vec<ByteArray> =
                    values.into_iter().flatten().map(ByteArray::from).collect();
                let mut column = group.next_column().unwrap().unwrap();
                let typed = column.typed::<ByteArrayType>();
                typed.write_batch(&values, Some(&levels), None).unwrap();
                column.close().unwrap();
            }
            group.close().unwrap();
        }
        writer.close().unwrap();
    }

    fn open(root: &Path, image: &str, caption: &str, split: &str) -> Result<Folder, DataError> {
        Folder::open(FolderOptions {
            layout: Layout::Tables(TableOptions {
                image_column: image.to_owned(),
                caption_column: caption.to_owned(),
                split: split.to_owned(),
                files: None,
            }),
            max_bad_image_fraction: 0.4,
            cache_bytes: 0,
            ..FolderOptions::new(root, 6)
        })
    }

    fn message(root: &Path, image: &str, caption: &str, split: &str) -> String {
        open(root, image, caption, split).unwrap_err().to_string()
    }

    #[test]
    fn rows_have_bytes_or_paths_and_broken_ones_are_named() {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        fs::write(dir.path().join("data/x.png"), png(30)).unwrap();
        let first: &Rows<'_> = &[
            (Some(png(10)), Some("a.png"), Some(" one ")),
            (Some(png(20)), None, Some("two")),
            (None, Some("data/x.png"), Some("three")),
        ];
        write(&dir.path().join("data/train-00000-of-00002.parquet"), first);
        let second: &Rows<'_> = &[
            (Some(png(40)), None, Some("four")),
            (None, None, Some("five")),
        ];
        write(
            &dir.path().join("data/train-00001-of-00002.parquet"),
            second,
        );
        write(
            &dir.path().join("data/test-00000-of-00001.parquet"),
            &second[1..],
        );
        let folder = open(dir.path(), "image", "text", "train").unwrap();
        let captions: Vec<&str> = folder.captions().collect();
        assert_eq!(captions, ["one", "two", "three", "four"]);
        let reds = [0, 1, 2, 3].map(|at| folder.get(at).unwrap().pixels[0]);
        assert_eq!(reds, [10, 20, 30, 40]);
        let bad = PathBuf::from("data/train-00001-of-00002.parquet/1");
        assert_eq!(folder.bad_images(), [bad]);
        // One file alone.
        let alone = dir.path().join("data/train-00001-of-00002.parquet");
        let error = message(&alone, "image", "text", "train");
        assert!(error.contains("1 of 2"), "{error}");
    }

    #[test]
    fn what_a_table_lacks_is_named() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("train.parquet");
        let of = |image, caption, split| message(dir.path(), image, caption, split);
        assert!(of("image", "text", "train").contains("no .parquet files"));
        write(&path, &[(Some(png(1)), None, Some("x"))]);
        let error = of("image", "prompt", "train");
        let expected = "no column prompt; its columns are image, text";
        assert!(error.contains(expected), "{error}");
        assert!(of("picture", "text", "train").contains("no column picture"));
        assert!(of("image", "image", "train").contains("row 0, column image: expected a text"));
        let error = of("image", "text", "validation");
        assert!(
            error.contains("split validation") && error.contains("train.parquet"),
            "{error}"
        );
        write(
            &path,
            &[(Some(png(1)), None, Some("x")), (Some(png(1)), None, None)],
        );
        assert!(of("image", "text", "train").contains("row 1, column text: there is no caption"));
        write(&path, &[(None, Some("../x.png"), Some("x"))]);
        assert!(of("image", "text", "train").contains("1 of 1 images"));
        let whole = fs::read(&path).unwrap();
        for cut in (0..whole.len()).step_by(37) {
            fs::write(&path, &whole[..cut]).unwrap();
            let error = of("image", "text", "train");
            assert!(error.contains("train.parquet"), "{error}");
        }
    }
}
