//! Opening checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::WeightsError;
use super::gguf;
use super::header::{self, MAX_HEADER_BYTES, UniqueMap};
use super::location::{Location, Order, Parts};
use super::quantized::{self, Quantization};
use super::shared_bytes::{SharedBytes, of_file};
use super::stored::BlockPart;
use crate::shape::Shape;
use crate::util::files;
use crate::util::hash::{Hasher, Sha256};
use crate::util::known::Stamp;
use crate::util::names::nearest;

/// Names that diffusers and transformers give their weights, in the order they are looked for.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
const PICKLE_SUFFIXES: [&str; 5] = ["bin", "ckpt", "pt", "pth", "pkl"];

/// An open checkpoint: headers checked, tensors still on disk.
///
/// Its tensors are those of the files, or a choice of them under other names ([`Checkpoint::view`]).
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) opened: Arc<Opened>,
    pub(super) tensors: BTreeMap<String, Location>,
    pub(super) quantization: Option<Arc<Quantization>>,
}

/// The files behind a checkpoint and its views.
#[derive(Debug)]
pub(super) struct Opened {
    path: PathBuf,
    pub files: Vec<(PathBuf, File)>,
    metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a `.safetensors.index.json` with its shards, a `.gguf` file, or a submodule
    /// directory in diffusers' or transformers' layout. Quantized tensors of a `.gguf` file are shown in `f32`.
    ///
    /// In a directory an index goes before a single file, as in diffusers, and the default variant
    /// before others; a variant (`.fp16`) is taken when it is the only one.
    ///
    /// # Errors
    /// When there are no weights, a file is damaged or a pickle, or shards are missing or do not
    /// hold what the index says.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let metadata = fs::metadata(path).map_err(|e| io(path, e))?;
        let file = if metadata.is_dir() {
            find_in_directory(path)?
        } else {
            path.to_owned()
        };
        let mut opened = Opened {
            path: path.to_owned(),
            files: Vec::new(),
            metadata: BTreeMap::new(),
        };
        let mut tensors = BTreeMap::new();
        if file.extension().is_some_and(|e| e == "json") {
            opened.add_shards(&mut tensors, &file)?;
        } else {
            opened.add_file(&mut tensors, &file, None)?;
        }
        let checkpoint = Checkpoint {
            opened: Arc::new(opened),
            tensors,
            quantization: None,
        };
        checkpoint.with_foreign_weights()
    }

    /// The same as the part's `config.json`, of the path `place`, describes it: quantized or not.
    ///
    /// # Errors
    /// When the description is not one that is read here, or the tensors are not as it says.
    pub fn described_by(
        mut self,
        place: &Path,
        config: &Map<String, Value>,
    ) -> Result<Self, WeightsError> {
        if let Some((method, description)) = quantized::foreign(config) {
            self.described_by_others(place, method, description)?;
            return Ok(self);
        }
        let Some(quantization) = Quantization::of_config(place, config)? else {
            return Ok(self);
        };
        quantization.check(self.path(), &self.iter().collect())?;
        for (name, location) in &mut self.tensors {
            let format = quantization.format_of(name);
            let Some((format, shared)) = format.and_then(|f| Some((f, SharedBytes::of(f)?))) else {
                continue;
            };
            if let Some(shape) = of_file(&location.shape, format) {
                location.shape = shape;
                location.order = Order::Shared(shared);
            }
        }
        self.quantization = Some(Arc::new(quantization));
        Ok(self)
    }

    /// How weights are stored, if some are quantized.
    pub fn quantization(&self) -> Option<&Quantization> {
        self.quantization.as_deref()
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.opened.path
    }

    /// The safetensors files behind it.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.opened.files.iter().map(|(path, _)| path.as_path())
    }

    /// The free-form metadata of the header; of several shards the first one's entry holds.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.opened.metadata
    }

    /// The hash of all that decides the tensors: their names and places, and the stamps of the files. The same while
    /// these stay as they are, and for links to them. `None` when a file was written to just now.
    ///
    /// # Errors
    /// When a file's metadata cannot be read.
    pub fn stamp(&self) -> Result<Option<Sha256>, WeightsError> {
        let mut hasher = Hasher::default();
        for (path, file) in &self.opened.files {
            let metadata = file.metadata().map_err(|e| io(path, e))?;
            let Some(stamp) = Stamp::of(&metadata) else {
                return Ok(None);
            };
            hasher.update(format!("{stamp}\n"));
        }
        for (name, location) in &self.tensors {
            hasher.update(format!("{name} {location:?}\n"));
        }
        Ok(Some(hasher.finish()))
    }

    /// Names and shapes, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Shape)> {
        self.tensors.iter().map(|(n, l)| (n.as_str(), &l.shape))
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The element type and dimensions of a tensor.
    pub fn info(&self, name: &str) -> Option<&Shape> {
        self.tensors.get(name).map(|l| &l.shape)
    }

    pub(super) fn locate(&self, name: &str) -> Result<&Location, WeightsError> {
        self.tensors
            .get(name)
            .ok_or_else(|| WeightsError::NoSuchTensor {
                path: self.path().to_owned(),
                name: name.to_owned(),
                nearest: nearest(name, self.names()),
            })
    }
}

impl Opened {
    /// Adds the tensors of one file. `listed` are those that the index says it holds.
    fn add_file(
        &mut self,
        tensors: &mut BTreeMap<String, Location>,
        path: &Path,
        listed: Option<&[&str]>,
    ) -> Result<(), WeightsError> {
        let file = files::open(path).map_err(|e| io(path, e))?;
        if is_gguf(path, &file)? {
            return self.add_gguf(tensors, path, file);
        }
        let header = read_header(path, &file)?;
        if let Some(listed) = listed {
            check_listed(path, listed, &header)?;
        }
        let index = self.files.len();
        self.files.push((path.to_owned(), file));
        for (key, value) in header.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        for tensor in header.tensors {
            let location = Location {
                file: index,
                offset: tensor.offset,
                shape: tensor.shape,
                order: Order::AsShown,
                made: None,
            };
            tensors.insert(tensor.name, location);
        }
        Ok(())
    }

    /// Adds the tensors of a GGUF file.
    fn add_gguf(
        &mut self,
        tensors: &mut BTreeMap<String, Location>,
        path: &Path,
        file: File,
    ) -> Result<(), WeightsError> {
        let bytes = file.metadata().map_err(|e| io(path, e))?.len();
        let header = gguf::read(path, &file, bytes)?;
        let index = self.files.len();
        self.files.push((path.to_owned(), file));
        self.metadata.extend(header.metadata);
        for tensor in header.tensors {
            let at = |shape: Shape, order: Order| Location {
                file: index,
                offset: tensor.offset,
                shape,
                order,
                made: None,
            };
            let location = match tensor.kind {
                gguf::Kind::Plain(dtype) => at(Shape::new(dtype, tensor.dims), Order::AsShown),
                gguf::Kind::Blocks(kind) => {
                    let blocks = tensor.dims.iter().product::<usize>() / kind.elements();
                    let run = kind.group();
                    let part = |part: BlockPart, dims: Vec<usize>| {
                        at(
                            Shape::new(kind.dtype(part), dims),
                            Order::Blocks(kind, part),
                        )
                    };
                    let beside = |which| part(which, vec![blocks * kind.values(which)]);
                    Location::of_parts(Parts {
                        format: kind.format(),
                        codes: part(BlockPart::Codes, tensor.dims),
                        scale: beside(BlockPart::Scales),
                        zero_point: kind.has_minimums().then(|| beside(BlockPart::Minimums)),
                        tensor_scale: None,
                        table: None,
                        run,
                        smooth: None,
                        low_rank: None,
                    })
                }
            };
            tensors.insert(tensor.name, location);
        }
        Ok(())
    }

    fn add_shards(
        &mut self,
        tensors: &mut BTreeMap<String, Location>,
        index: &Path,
    ) -> Result<(), WeightsError> {
        let weight_map = read_index(index)?;
        let dir = index.parent().unwrap_or(Path::new(""));
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            shards.entry(shard).or_default().push(tensor);
        }
        let missing: Vec<String> = shards
            .keys()
            .filter(|shard| !dir.join(shard).is_file())
            .map(|&shard| shard.to_owned())
            .collect();
        if !missing.is_empty() {
            return Err(WeightsError::MissingShards {
                index: index.to_owned(),
                missing,
            });
        }
        for (shard, listed) in shards {
            self.add_file(tensors, &dir.join(shard), Some(&listed))?;
        }
        Ok(())
    }
}

pub(super) fn io(path: &Path, source: std::io::Error) -> WeightsError {
    WeightsError::Io {
        path: path.to_owned(),
        source,
    }
}

/// A shard must hold exactly the tensors that its index lists, so that none is taken from two
/// places or left behind.
fn check_listed(path: &Path, listed: &[&str], header: &header::Header) -> Result<(), WeightsError> {
    let error = |tensor: &str, reason: &str| WeightsError::Tensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        reason: reason.to_owned(),
    };
    let held: std::collections::BTreeSet<&str> =
        header.tensors.iter().map(|t| t.name.as_str()).collect();
    if let Some(name) = listed.iter().find(|name| !held.contains(*name)) {
        return Err(error(
            name,
            "the index places it in this shard, which lacks it",
        ));
    }
    // Both are without duplicates, so that a held tensor is unlisted only if there are more.
    if held.len() > listed.len() {
        let listed: std::collections::BTreeSet<&str> = listed.iter().copied().collect();
        if let Some(name) = held.difference(&listed).next() {
            return Err(error(
                name,
                "in this shard, but the index does not place it here",
            ));
        }
    }
    Ok(())
}

/// Whether a file begins as GGUF files do.
fn is_gguf(path: &Path, file: &File) -> Result<bool, WeightsError> {
    let mut magic = [0; 4];
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) => Ok(&magic == gguf::MAGIC),
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(io(path, e)),
    }
}

fn read_header(path: &Path, file: &File) -> Result<header::Header, WeightsError> {
    let file_bytes = file.metadata().map_err(|e| io(path, e))?.len();
    let mut head = [0; 8];
    let present = usize::try_from(file_bytes).map_or(8, |n| n.min(8));
    file.read_exact_at(&mut head[..present], 0)
        .map_err(|e| io(path, e))?;
    refuse_other_formats(path, &head[..present])?;
    let length = u64::from_le_bytes(head);
    if present == 8 && length > MAX_HEADER_BYTES {
        return Err(WeightsError::Header {
            path: path.to_owned(),
            reason: format!(
                "it declares a header of {length} bytes, the most is {MAX_HEADER_BYTES}"
            ),
        });
    }
    let expected = if present < 8 { 8 } else { 8 + length };
    if expected > file_bytes {
        return Err(WeightsError::Truncated {
            path: path.to_owned(),
            expected,
            found: file_bytes,
        });
    }
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, 8).map_err(|e| io(path, e))?;
    header::parse(path, &json, expected, file_bytes)
}

fn refuse_other_formats(path: &Path, head: &[u8]) -> Result<(), WeightsError> {
    // A zip archive, as torch.save writes it. Read as a header's length it would be over the limit,
    // unless the four bytes after the mark are zero, which no zip writer leaves so.
    let by_name = path.to_str().is_some_and(is_pickle);
    let by_content = head.starts_with(b"PK\x03\x04") && head.get(4..8) != Some(&[0; 4]);
    if by_name || by_content {
        return Err(WeightsError::Pickle {
            path: path.to_owned(),
        });
    }
    if head == b"version " {
        return Err(WeightsError::LfsPointer {
            path: path.to_owned(),
        });
    }
    Ok(())
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// The index's map from tensor to shard, with shards that are names of files in the same folder.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    let bad = |reason: String| WeightsError::Index {
        path: path.to_owned(),
        reason,
    };
    let bytes = fs::metadata(path).map_err(|e| io(path, e))?.len();
    if bytes > MAX_HEADER_BYTES {
        return Err(bad(format!(
            "{bytes} bytes, the most is {MAX_HEADER_BYTES}"
        )));
    }
    let text = files::read(path).map_err(|e| io(path, e))?;
    parse_index(path, &text)
}

/// As [`read_index`], of the content of the file `path`.
pub(crate) fn parse_index(
    path: &Path,
    text: &[u8],
) -> Result<BTreeMap<String, String>, WeightsError> {
    let bad = |reason: String| WeightsError::Index {
        path: path.to_owned(),
        reason,
    };
    let index: Index = serde_json::from_slice(text).map_err(|e| bad(e.to_string()))?;
    let UniqueMap(weight_map) = index.weight_map;
    for (tensor, shard) in &weight_map {
        let mut components = Path::new(shard).components();
        let one_name = matches!(components.next(), Some(Component::Normal(name)) if name == shard.as_str())
            && components.next().is_none();
        if !one_name || !shard.ends_with(".safetensors") {
            return Err(bad(format!(
                "tensor {tensor} lies in {shard:?}; only .safetensors files of the same folder are read"
            )));
        }
    }
    Ok(weight_map)
}

/// The index or file to open in a submodule directory.
fn find_in_directory(dir: &Path) -> Result<PathBuf, WeightsError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let name = entry.map_err(|e| io(dir, e))?.file_name();
        names.extend(name.into_string().ok());
    }
    names.sort();
    let choice = choose(&names);
    match choice {
        Choice::File(name) => return Ok(dir.join(name)),
        Choice::Variants(found) => {
            return Err(WeightsError::AmbiguousVariant {
                path: dir.to_owned(),
                found,
            });
        }
        Choice::Pickle(_) | Choice::Nothing => {}
    }
    if names.iter().any(|name| name == "model_index.json") {
        let part = |name: &&String| find_in_directory(&dir.join(name)).is_ok();
        return Err(WeightsError::Pipeline {
            path: dir.to_owned(),
            parts: names.iter().filter(part).cloned().collect(),
        });
    }
    Err(match choice {
        Choice::Pickle(name) => WeightsError::Pickle {
            path: dir.join(name),
        },
        _ => WeightsError::NoWeights {
            path: dir.to_owned(),
            looked_for: defaults().collect(),
            found: names,
        },
    })
}

/// Which file of a submodule directory its weights are read from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// A safetensors file or the index of several.
    File(String),
    /// Several variants and no default.
    Variants(Vec<String>),
    /// Nothing but a pickle.
    Pickle(String),
    Nothing,
}

/// The names that are looked for before variants of them.
fn defaults() -> impl Iterator<Item = String> {
    STEMS.iter().flat_map(|stem| {
        [".safetensors.index.json", ".safetensors"].map(|end| format!("{stem}{end}"))
    })
}

/// Chooses among the sorted `names` of a directory's files, as [`Checkpoint::open`] does.
pub(crate) fn choose(names: &[String]) -> Choice {
    for stem in STEMS {
        let mut defaults = defaults().filter(|name| name.starts_with(&format!("{stem}.")));
        if let Some(default) = defaults.find(|name| names.contains(name)) {
            return Choice::File(default);
        }
        let mut variants = variants(stem, names);
        if variants.len() > 1 {
            return Choice::Variants(variants);
        }
        if let Some(variant) = variants.pop() {
            return Choice::File(variant);
        }
    }
    match names.iter().find(|name| is_pickle(name)) {
        Some(name) => Choice::Pickle(name.clone()),
        None => Choice::Nothing,
    }
}

/// Whether a file's name is that of a PyTorch pickle.
pub(crate) fn is_pickle(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, suffix)| PICKLE_SUFFIXES.contains(&suffix))
}

/// The files of named variants: `stem.fp16.safetensors`, `stem.safetensors.index.fp16.json` and
/// its older form `stem.fp16.safetensors.index.json`. Where a variant has an index, its shards and
/// single file are left out.
fn variants(stem: &str, names: &[String]) -> Vec<String> {
    let one_word = |v: &str| !v.is_empty() && !v.contains('.') && !v.contains("-of-");
    let mut found: BTreeMap<&str, &String> = BTreeMap::new();
    for name in names {
        let Some(rest) = name.strip_prefix(stem).and_then(|r| r.strip_prefix('.')) else {
            continue;
        };
        let index = rest
            .strip_suffix(".safetensors.index.json")
            .or_else(|| {
                rest.strip_prefix("safetensors.index.")
                    .and_then(|r| r.strip_suffix(".json"))
            })
            .filter(|v| one_word(v));
        if let Some(variant) = index {
            found.insert(variant, name);
        } else if let Some(variant) = rest.strip_suffix(".safetensors").filter(|v| one_word(v)) {
            found.entry(variant).or_insert(name);
        }
    }
    found.into_values().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::weights::{TensorView, save};

    /// A file of `names`, each an `f32[3]` holding its number three times.
    fn write(path: &Path, names: &[&str]) {
        let data: Vec<Vec<u8>> = (0..names.len())
            .map(|i| (i as f32).to_le_bytes().repeat(3))
            .collect();
        let views = names.iter().zip(&data).map(|(&name, data)| TensorView {
            name,
            dtype: DType::F32,
            dims: &[3],
            data,
        });
        save(
            path,
            views,
            &BTreeMap::from([("format".into(), "pt".into())]),
        )
        .unwrap();
    }

    fn write_index(path: &Path, map: &[(&str, &str)]) {
        let map: BTreeMap<_, _> = map.iter().copied().collect();
        let json = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
        fs::write(path, json.to_string()).unwrap();
    }

    fn error(path: &Path) -> String {
        Checkpoint::open(path).unwrap_err().to_string()
    }

    #[test]
    fn reads_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("any name.safetensors");
        write(&path, &["b", "a", "c"]);
        let c = Checkpoint::open(&path).unwrap();
        assert_eq!(c.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(c.metadata()["format"], "pt");
        assert_eq!(c.info("a").unwrap().to_string(), "f32[3]");
        assert_eq!(c.read("a").unwrap().to_f32_vec().unwrap(), [1.0; 3]);
        let cast = c.read_as("c", DType::BF16).unwrap();
        assert_eq!(cast.shape.to_string(), "bf16[3]");
        assert_eq!(cast.to_f32_vec().unwrap(), [2.0; 3]);
    }

    #[test]
    fn an_unknown_name_gets_the_nearest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write(&path, &["conv_in.weight", "conv_in.bias"]);
        let c = Checkpoint::open(&path).unwrap();
        let error = c.read("conv_in.weigth").unwrap_err().to_string();
        assert!(
            error.ends_with("no tensor conv_in.weigth; the nearest name is conv_in.weight"),
            "{error}"
        );
    }

    #[test]
    fn a_directory_gives_its_default_then_its_only_variant() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let opened = || {
            let c = Checkpoint::open(dir.path()).unwrap();
            let name = c.files().next().unwrap().file_name().unwrap().to_owned();
            name.into_string().unwrap()
        };
        write(&at("diffusion_pytorch_model.fp16.safetensors"), &["half"]);
        assert_eq!(opened(), "diffusion_pytorch_model.fp16.safetensors");
        write(
            &at("diffusion_pytorch_model.non_ema.safetensors"),
            &["full"],
        );
        let both = error(dir.path());
        assert!(
            both.contains("model.fp16.safetensors, diffusion_pytorch_model.non_ema.safetensors"),
            "{both}"
        );
        write(&at("diffusion_pytorch_model.safetensors"), &["full"]);
        assert_eq!(opened(), "diffusion_pytorch_model.safetensors");
    }

    #[test]
    fn a_sharded_variant_is_found_by_its_index() {
        for index in [
            "model.safetensors.index.fp16.json",
            "model.fp16.safetensors.index.json",
        ] {
            let dir = tempfile::tempdir().unwrap();
            let shard = "model.fp16-00001-of-00001.safetensors";
            write(&dir.path().join(shard), &["a"]);
            write_index(&dir.path().join(index), &[("a", shard)]);
            let c = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(c.names().collect::<Vec<_>>(), ["a"]);
        }
    }

    #[test]
    fn shards_are_read_as_one() {
        let dir = tempfile::tempdir().unwrap();
        write(
            &dir.path().join("x-00001-of-00002.safetensors"),
            &["a", "b"],
        );
        write(&dir.path().join("x-00002-of-00002.safetensors"), &["c"]);
        let index = dir
            .path()
            .join("diffusion_pytorch_model.safetensors.index.json");
        let (one, two) = (
            "x-00001-of-00002.safetensors",
            "x-00002-of-00002.safetensors",
        );
        write_index(&index, &[("a", one), ("b", one), ("c", two)]);
        let c = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(c.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(c.read("b").unwrap().to_f32_vec().unwrap(), [1.0; 3]);
        assert_eq!(c.read("c").unwrap().to_f32_vec().unwrap(), [0.0; 3]);

        write_index(&index, &[("a", one), ("b", two), ("c", two)]);
        let moved = error(&index);
        assert!(
            moved.ends_with("tensor b: in this shard, but the index does not place it here"),
            "{moved}"
        );
        write_index(&index, &[("a", one), ("b", one), ("c", two), ("d", two)]);
        let lacking = error(&index);
        assert!(
            lacking.ends_with("tensor d: the index places it in this shard, which lacks it"),
            "{lacking}"
        );
        write_index(
            &index,
            &[("a", one), ("b", "y.safetensors"), ("c", "z.safetensors")],
        );
        let missing = error(&index);
        assert!(
            missing.ends_with("shards that are not in the folder: y.safetensors, z.safetensors"),
            "{missing}"
        );
    }

    #[test]
    fn an_index_cannot_point_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        write(&dir.path().join("secret.safetensors"), &["a"]);
        write(&inner.join("fine.safetensors"), &["a"]);
        let index = inner.join("model.safetensors.index.json");
        let absolute = dir.path().join("secret.safetensors");
        for shard in [
            "../secret.safetensors",
            absolute.to_str().unwrap(),
            "./fine.safetensors",
            "fine.safetensors/",
            "sub/fine.safetensors",
            "..",
            "",
            "fine.bin",
        ] {
            write_index(&index, &[("a", shard)]);
            let error = error(&inner);
            assert!(
                error.contains("only .safetensors files of the same folder"),
                "{shard}: {error}"
            );
        }
        fs::write(
            &index,
            r#"{"weight_map":{"a":"fine.safetensors","a":"fine.safetensors"}}"#,
        )
        .unwrap();
        assert!(error(&inner).contains("a stands twice"));
    }

    #[test]
    fn every_truncation_is_told_with_its_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write(&path, &["a", "b"]);
        let whole = fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            match Checkpoint::open(&path) {
                Err(WeightsError::Truncated {
                    expected, found, ..
                }) => {
                    assert_eq!(found, cut as u64);
                    assert!(expected > found && expected <= whole.len() as u64);
                }
                other => panic!("cut at {cut}: {other:?}"),
            }
        }
        fs::write(&path, [whole.as_slice(), b"x"].concat()).unwrap();
        assert!(matches!(
            Checkpoint::open(&path),
            Err(WeightsError::TrailingBytes { .. })
        ));
    }

    #[test]
    fn other_formats_are_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, data: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, data).unwrap();
            error(&path)
        };
        let zip = b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl";
        for error in [
            write("x.ckpt", zip),
            write("renamed.safetensors", zip),
            write("x.bin", b"\x80\x02}q\x00."),
            error(dir.path()),
        ] {
            assert!(error.contains("safe_serialization=True"), "{error}");
        }
        let lfs = write(
            "p.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
        );
        assert!(lfs.contains("git lfs pull"), "{lfs}");
        let html = write("h.safetensors", b"<!DOCTYPE html><html></html>");
        assert!(html.contains("declares a header of"), "{html}");
    }

    #[test]
    fn an_empty_or_a_pipeline_folder_says_what_to_pass() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        let empty = error(dir.path());
        assert!(
            empty.ends_with("model.safetensors; the folder has config.json"),
            "{empty}"
        );
        fs::write(dir.path().join("model_index.json"), "{}").unwrap();
        fs::create_dir(dir.path().join("unet")).unwrap();
        fs::create_dir(dir.path().join("scheduler")).unwrap();
        write(
            &dir.path().join("unet/diffusion_pytorch_model.safetensors"),
            &["a"],
        );
        let pipeline = error(dir.path());
        assert!(
            pipeline.ends_with("pass one of its parts: unet"),
            "{pipeline}"
        );
    }
}
