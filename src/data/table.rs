//! A parquet file with a column of images, as Hugging Face's `datasets` writes them.
//!
//! The images of one row group are decompressed together, so the few groups that were read last are kept.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::{DataError, inside, io};
use crate::util::files;

/// How a row has its image.
#[derive(Debug)]
enum Stored {
    Bytes(Vec<u8>),
    /// A file beside the table or below.
    Path(String),
    Nothing,
}

/// The images of a row group.
type Images = Arc<Vec<Stored>>;

/// The row groups that were read last.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<((PathBuf, usize), Images)>>);

/// A parquet file.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    /// The folder that paths of images begin in, and do not leave.
    folder: PathBuf,
    image_column: String,
    recent: Arc<Recent>,
}

/// An image in a parquet file.
#[derive(Clone, Debug)]
pub struct TableRow {
    pub table: Arc<Table>,
    pub group: usize,
    /// Its row in the group.
    pub row: usize,
    /// Its row in the file, from 0.
    pub number: usize,
}

/// Where the bytes of a row's image are.
#[derive(Debug)]
pub enum RowImage {
    Bytes(Vec<u8>),
    File(PathBuf),
}

impl TableRow {
    /// The image of the row.
    ///
    /// # Errors
    /// When the row has none, the table cannot be read, or a path leads out of its folder.
    pub fn image(&self) -> Result<RowImage, DataError> {
        let table = &self.table;
        let images = table.images(self.group)?;
        match images.get(self.row) {
            Some(Stored::Bytes(bytes)) => Ok(RowImage::Bytes(bytes.clone())),
            Some(Stored::Path(path)) => {
                let path = inside(&table.folder, Path::new(path))?;
                Ok(RowImage::File(path))
            }
            Some(Stored::Nothing) | None => {
                let column = &table.image_column;
                Err(table.error(format!(
                    "row {}, column {column}: there is no image",
                    self.number
                )))
            }
        }
    }
}

impl Table {
    /// The table `path`, whose images may be files in `folder`. Tables that share `recent` keep a few groups together.
    pub fn new(path: PathBuf, folder: PathBuf, image_column: String, recent: Arc<Recent>) -> Table {
        Table {
            path,
            folder,
            image_column,
            recent,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn image_column(&self) -> &str {
        &self.image_column
    }

    pub fn error(&self, message: String) -> DataError {
        DataError::Table {
            path: self.path.clone(),
            message,
        }
    }

    /// # Errors
    /// When it is no parquet file, or cannot be read.
    pub fn open(&self) -> Result<SerializedFileReader<File>, DataError> {
        let file = files::open(&self.path).map_err(|e| io("open the table", &self.path, e))?;
        SerializedFileReader::new(file).map_err(|e| self.error(e.to_string()))
    }

    /// The part of the schema with the column `name`.
    ///
    /// # Errors
    /// When there is none; lists those that there are.
    pub fn column(&self, file: &SerializedFileReader<File>, name: &str) -> Result<Type, DataError> {
        let schema = file.metadata().file_metadata().schema();
        let Some(field) = schema.get_fields().iter().find(|f| f.name() == name) else {
            let columns: Vec<&str> = schema.get_fields().iter().map(|f| f.name()).collect();
            return Err(self.error(format!(
                "there is no column {name}; its columns are {}: name them by image_column and caption_column",
                columns.join(", ")
            )));
        };
        Type::group_type_builder(schema.name())
            .with_fields(vec![Arc::clone(field)])
            .build()
            .map_err(|e| self.error(e.to_string()))
    }

    /// The images of a row group.
    fn images(&self, group: usize) -> Result<Images, DataError> {
        let key = (self.path.clone(), group);
        let recent = || self.recent.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, images)) = recent().iter().find(|(own, _)| *own == key) {
            return Ok(Arc::clone(images));
        }
        let file = self.open()?;
        let column = self.column(&file, &self.image_column)?;
        let images = Arc::new(self.rows(&file, group, &column, &mut stored)?);
        let mut recent = recent();
        // Each thread reads the rows of a group one after another.
        if recent.len() > rayon::current_num_threads() {
            recent.pop_front();
        }
        recent.push_back((key, Arc::clone(&images)));
        Ok(images)
    }

    /// What `take` makes of the one column of each row of a group.
    ///
    /// # Errors
    /// When the group cannot be read; what `take` says.
    pub fn rows<T>(
        &self,
        file: &SerializedFileReader<File>,
        group: usize,
        column: &Type,
        take: &mut dyn FnMut(&Field) -> Result<T, String>,
    ) -> Result<Vec<T>, DataError> {
        let error = |e: ParquetError| self.error(e.to_string());
        let reader = file.get_row_group(group).map_err(error)?;
        let rows = reader.get_row_iter(Some(column.clone())).map_err(error)?;
        let rows = rows.map(|row: Result<Row, ParquetError>| {
            let row = row.map_err(error)?;
            let field = row.get_column_iter().next().map(|(_, field)| field);
            take(field.unwrap_or(&Field::Null)).map_err(|e| self.error(e))
        });
        rows.collect()
    }
}

/// The image of a row: bytes, a path, or as the `datasets` library writes it both with these names, one of which may be null.
fn stored(field: &Field) -> Result<Stored, String> {
    Ok(match field {
        Field::Bytes(bytes) => Stored::Bytes(bytes.data().to_vec()),
        Field::Str(path) => Stored::Path(path.clone()),
        Field::Group(row) => {
            let named = |name: &str| {
                let mut fields = row.get_column_iter();
                let found = fields.find(|(own, field)| *own == name && **field != Field::Null);
                found.map(|(_, field)| field)
            };
            match named("bytes").or_else(|| named("path")) {
                Some(field @ (Field::Bytes(_) | Field::Str(_))) => stored(field)?,
                _ => Stored::Nothing,
            }
        }
        Field::Null => Stored::Nothing,
        _ => return Err("the column of images has neither bytes nor paths".to_owned()),
    })
}
