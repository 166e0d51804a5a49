//! Writing safetensors files: streamed, atomic, and the same bytes for the same input.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::WeightsError;
use super::header::{self, TensorSpec};
use crate::dtype::DType;
use crate::shape::Shape;
use crate::util::files::{
    Access, AtomicFile, Durability, Existing, free_space, is_full, parent_of,
};

/// The error of a tensor's source.
pub type FetchError = Box<dyn std::error::Error + Send + Sync>;

/// A tensor to be written, with its bytes: row-major, little-endian.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub dims: &'a [usize],
    pub data: &'a [u8],
}

/// Writes `tensors` to `path`, replacing it when everything is written and on disk; until then, and
/// after an error, an existing file stays as it is.
///
/// # Errors
/// When a name stands twice, a tensor's bytes do not fit its shape, an element type has no
/// counterpart in the format, or the file cannot be written (no space left included).
pub fn save<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = TensorView<'a>>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    save_views(path, tensors, metadata, Existing::Replace)
}

/// As [`save`], to a file that must not exist.
///
/// # Errors
/// As [`save`]; [`WeightsError::Io`] of the kind [`io::ErrorKind::AlreadyExists`] when the file exists.
pub fn save_new<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = TensorView<'a>>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    save_views(path, tensors, metadata, Existing::Refuse)
}

fn save_views<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = TensorView<'a>>,
    metadata: &BTreeMap<String, String>,
    existing: Existing,
) -> Result<(), WeightsError> {
    let mut specs = Vec::new();
    let mut data = BTreeMap::new();
    for tensor in tensors {
        specs.push(TensorSpec {
            name: tensor.name.to_owned(),
            shape: Shape::new(tensor.dtype, tensor.dims),
        });
        data.insert(tensor.name, tensor.data);
    }
    let plan = FilePlan::new(path, &specs, metadata)?;
    check_free_space(path, parent_of(path), plan.bytes)?;
    let io = |source| write_error(path, plan.bytes, source);
    let mut file = AtomicFile::create(path, Access::Umask).map_err(io)?;
    plan.write(path, &mut file, |spec| {
        Ok(Cow::Borrowed(
            data.get(spec.name.as_str()).copied().unwrap_or_default(),
        ))
    })?;
    file.commit(path, existing, Durability::Synced).map_err(io)
}

/// The header and order of a file about to be written.
pub(crate) struct FilePlan<'a> {
    head: Vec<u8>,
    order: Vec<&'a TensorSpec>,
    /// Length of the whole file.
    pub bytes: u64,
}

impl<'a> FilePlan<'a> {
    /// Wide types come first and names are sorted within a type, as the `safetensors` crate does it:
    /// every tensor is aligned, and the order of `specs` does not matter.
    pub fn new(
        path: &Path,
        specs: &'a [TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WeightsError> {
        let mut order: Vec<&TensorSpec> = specs.iter().collect();
        order.sort_by_key(|s| (std::cmp::Reverse(s.shape.dtype.bits()), &s.name));
        let head = header::encode(path, &order, metadata)?;
        let data: usize = order.iter().map(|s| s.shape.bytes()).sum();
        Ok(FilePlan {
            bytes: head.len() as u64 + data as u64,
            head,
            order,
        })
    }

    /// Writes the file's bytes to `out`. `path` is for messages.
    pub fn write<'t>(
        &self,
        path: &Path,
        out: &mut impl Write,
        mut fetch: impl FnMut(&TensorSpec) -> Result<Cow<'t, [u8]>, FetchError>,
    ) -> Result<(), WeightsError> {
        let io = |source| write_error(path, self.bytes, source);
        out.write_all(&self.head).map_err(io)?;
        for spec in &self.order {
            let data = fetch(spec).map_err(|source| WeightsError::Fetch {
                path: path.to_owned(),
                tensor: spec.name.clone(),
                source,
            })?;
            if data.len() != spec.shape.bytes() {
                return Err(WeightsError::Tensor {
                    path: path.to_owned(),
                    tensor: spec.name.clone(),
                    reason: format!(
                        "{} takes {} bytes, {} given",
                        spec.shape,
                        spec.shape.bytes(),
                        data.len()
                    ),
                });
            }
            out.write_all(&data).map_err(io)?;
        }
        Ok(())
    }
}

/// What PyTorch's readers of the format look for.
pub(crate) fn pytorch_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// A new file whose tensors are written in any order: those whose values are known together lie apart in the file.
/// For the files of an [`AtomicDir`](crate::util::files::AtomicDir).
pub(crate) struct ScatteredFile {
    path: PathBuf,
    file: File,
    /// Length of the whole file.
    bytes: u64,
    /// Where the tensors that are still to be written lie, with their shapes.
    left: BTreeMap<String, (u64, Shape)>,
}

impl ScatteredFile {
    /// Begins the file.
    ///
    /// # Errors
    /// When the header cannot be made, or the file exists or cannot be written.
    pub fn create(
        path: &Path,
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WeightsError> {
        let plan = FilePlan::new(path, specs, metadata)?;
        let mut offset = plan.head.len() as u64;
        let mut left = BTreeMap::new();
        for spec in &plan.order {
            left.insert(spec.name.clone(), (offset, spec.shape.clone()));
            offset += spec.shape.bytes() as u64;
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).open(path);
        let written = file.and_then(|file| file.write_all_at(&plan.head, 0).map(|()| file));
        Ok(ScatteredFile {
            path: path.to_owned(),
            file: written.map_err(|source| write_error(path, plan.bytes, source))?,
            bytes: plan.bytes,
            left,
        })
    }

    /// Writes the bytes of a tensor.
    ///
    /// # Errors
    /// When the file has no such tensor or has it already, the bytes do not fit its shape, or cannot be written.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<(), WeightsError> {
        let wrong = |reason: String| WeightsError::Tensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            reason,
        };
        let Some((offset, shape)) = self.left.remove(name) else {
            return Err(wrong("is not among those that are left to write".into()));
        };
        if data.len() != shape.bytes() {
            let (expected, found) = (shape.bytes(), data.len());
            return Err(wrong(format!(
                "{shape} takes {expected} bytes, {found} given"
            )));
        }
        let written = self.file.write_all_at(data, offset);
        written.map_err(|source| write_error(&self.path, self.bytes, source))
    }

    /// Makes the whole file durable.
    ///
    /// # Errors
    /// When a tensor is not written yet, or the file cannot be.
    pub fn finish(self) -> Result<(), WeightsError> {
        if let Some(name) = self.left.into_keys().next() {
            return Err(WeightsError::Tensor {
                path: self.path,
                tensor: name,
                reason: "is not written".into(),
            });
        }
        let synced = self.file.sync_all();
        synced.map_err(|source| write_error(&self.path, self.bytes, source))
    }
}

/// Refuses to begin what cannot fit. `path` is for the message, `dir` is where it goes.
pub(crate) fn check_free_space(path: &Path, dir: &Path, needed: u64) -> Result<(), WeightsError> {
    match free_space(dir) {
        Some(free) if free < needed => Err(WeightsError::NoSpace {
            path: path.to_owned(),
            needed,
            free: Some(free),
        }),
        _ => Ok(()),
    }
}

/// The error of a write, which names a full device, an exceeded quota and a file size limit.
pub(crate) fn write_error(path: &Path, needed: u64, source: io::Error) -> WeightsError {
    match is_full(&source) {
        true => WeightsError::NoSpace {
            path: path.to_owned(),
            needed,
            free: free_space(parent_of(path)),
        },
        false => WeightsError::Io {
            path: path.to_owned(),
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;

    use safetensors::SafeTensors;

    use super::*;
    use crate::weights::Checkpoint;

    fn specs() -> Vec<TensorSpec> {
        [
            ("b", DType::U8, vec![3]),
            ("a", DType::F16, vec![2, 1]),
            ("empty", DType::F32, vec![0, 4]),
            ("scalar", DType::F32, vec![]),
        ]
        .map(|(name, dtype, dims)| TensorSpec {
            name: name.to_owned(),
            shape: Shape::new(dtype, dims),
        })
        .to_vec()
    }

    fn bytes_of(spec: &TensorSpec) -> Vec<u8> {
        vec![spec.name.as_bytes()[0]; spec.shape.bytes()]
    }

    fn save_all(path: &Path, specs: &[TensorSpec]) -> Result<(), WeightsError> {
        let metadata = BTreeMap::from([("format".into(), "pt".into()), ("a".into(), "1".into())]);
        let data: Vec<Vec<u8>> = specs.iter().map(bytes_of).collect();
        let views = specs.iter().zip(&data).map(|(spec, data)| TensorView {
            name: &spec.name,
            dtype: spec.shape.dtype,
            dims: &spec.shape.dims,
            data,
        });
        save(path, views, &metadata)
    }

    fn files(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_reference_implementation_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        save_all(&path, &specs()).unwrap();
        let data = fs::read(&path).unwrap();
        let (header, metadata) = SafeTensors::read_metadata(&data).unwrap();
        assert_eq!(header % 8, 0);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = SafeTensors::deserialize(&data).unwrap();
        assert_eq!(tensors.len(), 4);
        for spec in specs() {
            let tensor = tensors.tensor(&spec.name).unwrap();
            assert_eq!(tensor.shape(), spec.shape.dims);
            assert_eq!(tensor.data(), bytes_of(&spec));
        }
        assert_eq!(files(dir.path()), ["model.safetensors"]);
    }

    #[test]
    fn the_order_given_does_not_change_the_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("1"), dir.path().join("2"));
        let mut reversed = specs();
        reversed.reverse();
        save_all(&one, &specs()).unwrap();
        save_all(&two, &reversed).unwrap();
        assert_eq!(fs::read(&one).unwrap(), fs::read(&two).unwrap());
    }

    #[test]
    fn a_tensor_that_cannot_be_written_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        fs::write(&path, "old").unwrap();
        // The first of the file is written by then.
        let view = |name, data| TensorView {
            name,
            dtype: DType::F32,
            dims: &[2],
            data,
        };
        let views = [view("a", &[0; 8]), view("b", &[0; 7])];
        let error = save(&path, views, &BTreeMap::new()).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("tensor b: f32[2] takes 8 bytes, 7 given"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(files(dir.path()), ["model.safetensors"]);
    }

    #[test]
    fn wrong_input_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let view = |name, dtype, dims, data| TensorView {
            name,
            dtype,
            dims,
            data,
        };
        let error = |views: &[TensorView]| {
            let error = save(&path, views.iter().copied(), &BTreeMap::new()).unwrap_err();
            error.to_string()
        };
        let short = error(&[view("a", DType::F32, &[2], &[0; 7])]);
        assert!(
            short.ends_with("tensor a: f32[2] takes 8 bytes, 7 given"),
            "{short}"
        );
        let twice = view("a", DType::U8, &[1], &[0]);
        let twice = error(&[twice, twice]);
        assert!(
            twice.ends_with("tensor a: the name stands twice"),
            "{twice}"
        );
        let packed = error(&[view("a", DType::S4, &[2], &[0])]);
        assert!(
            packed.ends_with("safetensors has no element type s4"),
            "{packed}"
        );
        let odd = error(&[view("a", DType::F4E2M1Fn, &[3], &[0; 2])]);
        assert!(odd.ends_with("does not fill whole bytes"), "{odd}");
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    /// A writer on a device that is full after `left` bytes.
    struct Full {
        left: usize,
    }

    impl Write for Full {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            if self.left == 0 && !data.is_empty() {
                return Err(ErrorKind::StorageFull.into());
            }
            let n = data.len().min(self.left);
            self.left -= n;
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_device_that_fills_up_at_any_byte_is_told_as_such() {
        let specs = specs();
        let path = Path::new("model.safetensors");
        let plan = FilePlan::new(path, &specs, &BTreeMap::new()).unwrap();
        for left in 0..plan.bytes as usize {
            let error = plan
                .write(path, &mut Full { left }, |s| Ok(bytes_of(s).into()))
                .unwrap_err();
            assert!(
                matches!(error, WeightsError::NoSpace { needed, .. } if needed == plan.bytes),
                "{left}: {error}"
            );
        }
        let left = plan.bytes as usize;
        plan.write(path, &mut Full { left }, |s| Ok(bytes_of(s).into()))
            .unwrap();
    }

    #[test]
    fn tensors_may_be_written_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let (in_order, scattered) = (dir.path().join("1"), dir.path().join("2"));
        save_all(&in_order, &specs()).unwrap();
        let metadata = BTreeMap::from([("format".into(), "pt".into()), ("a".into(), "1".into())]);
        let mut file = ScatteredFile::create(&scattered, &specs(), &metadata).unwrap();
        for spec in specs() {
            file.write(&spec.name, &bytes_of(&spec)).unwrap();
        }
        let again = file.write("a", &[0; 4]).unwrap_err().to_string();
        assert!(
            again.ends_with("tensor a: is not among those that are left to write"),
            "{again}"
        );
        file.finish().unwrap();
        assert_eq!(fs::read(&in_order).unwrap(), fs::read(&scattered).unwrap());

        let exists = ScatteredFile::create(&scattered, &specs(), &metadata);
        assert!(matches!(exists, Err(WeightsError::Io { .. })));
        let other = dir.path().join("3");
        let mut file = ScatteredFile::create(&other, &specs(), &metadata).unwrap();
        let short = file.write("a", &[0; 3]).unwrap_err().to_string();
        assert!(
            short.ends_with("tensor a: f16[2,1] takes 4 bytes, 3 given"),
            "{short}"
        );
        let unfinished = file.finish().unwrap_err().to_string();
        assert!(
            unfinished.ends_with("tensor b: is not written"),
            "{unfinished}"
        );
    }

    #[test]
    fn what_cannot_fit_is_refused_before_it_begins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        fs::write(&path, "old").unwrap();
        // That it has no bytes would be told when it is written.
        let huge = TensorView {
            name: "huge",
            dtype: DType::U8,
            dims: &[1 << 60],
            data: &[],
        };
        let error = save(&path, [huge], &BTreeMap::new()).unwrap_err();
        assert!(
            matches!(error, WeightsError::NoSpace { free: Some(_), .. }),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn saving_over_a_file_keeps_readers_of_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        save_all(&path, &specs()).unwrap();
        let old = Checkpoint::open(&path).unwrap();
        let other = [TensorSpec {
            name: "x".to_owned(),
            shape: Shape::new(DType::F32, [1]),
        }];
        save_all(&path, &other).unwrap();
        assert_eq!(old.read("b").unwrap().data, b"bbb");
        let new = Checkpoint::open(&path).unwrap();
        assert_eq!(new.names().collect::<Vec<_>>(), ["x"]);
    }
}
