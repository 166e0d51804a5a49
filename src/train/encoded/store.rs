//! What was encoded, in files: safetensors shards whose entries are found by the hash of what they were made of.
//!
//! Any number of processes may read and write one folder: shards are never changed, appear under their names when they
//! are complete, and are called by what they hold, so that two processes that encode the same write the same file.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::host_tensor::HostTensor;
use crate::util::hash::{Hasher, Sha256};
use crate::weights::{Checkpoint, TensorView, WeightsError, save};

/// The metadata with the hash of a shard's tensors.
const HASH: &str = "sha256";
/// Hexadecimal digits of a shard's name.
const NAME_LENGTH: usize = 32;
const EXTENSION: &str = "safetensors";

/// Why an entry could not be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{dir} has no entry {key}")]
    Missing { dir: PathBuf, key: String },
}

/// Tensors by name.
pub type Entry = BTreeMap<&'static str, HostTensor>;

/// A folder of shards.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    shards: Vec<Checkpoint>,
    /// The shard of each entry.
    places: HashMap<String, usize>,
    /// Shards that could not be read, with the reasons.
    damaged: Vec<(PathBuf, String)>,
}

impl Store {
    /// Opens the shards that hold any of the entries `wanted`, and compares their hashes. A shard that is damaged counts
    /// as missing, and is removed once its entries are made again ([`Store::remove_damaged`]).
    ///
    /// # Errors
    /// When the folder cannot be made or listed.
    pub fn open(dir: &Path, wanted: &BTreeSet<String>) -> Result<Store, StoreError> {
        let io = |source| StoreError::Io {
            path: dir.to_owned(),
            source,
        };
        fs::create_dir_all(dir).map_err(io)?;
        let mut paths = Vec::new();
        for entry in fs::read_dir(dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if is_shard(&path) {
                paths.push(path);
            }
        }
        paths.sort();
        let opened: Vec<_> = paths
            .into_par_iter()
            .map(|path| match read(&path, Some(wanted)) {
                Ok(shard) => Ok(shard),
                Err(reason) => Err((path, reason)),
            })
            .collect();
        let mut store = Store {
            dir: dir.to_owned(),
            shards: Vec::new(),
            places: HashMap::new(),
            damaged: Vec::new(),
        };
        for shard in opened {
            match shard {
                Ok(Some(shard)) => store.take(shard),
                Ok(None) => {}
                Err(damaged) => store.damaged.push(damaged),
            }
        }
        Ok(store)
    }

    /// The shards that could not be read, with the reasons.
    pub fn damaged(&self) -> &[(PathBuf, String)] {
        &self.damaged
    }

    /// Removes the damaged shards.
    ///
    /// # Errors
    /// When one cannot be removed.
    pub fn remove_damaged(&mut self) -> Result<(), StoreError> {
        for (path, _) in std::mem::take(&mut self.damaged) {
            // A shard of the same name may have been written in its place, by this process or another.
            if path.exists() && read(&path, None).is_err() {
                fs::remove_file(&path).map_err(|source| StoreError::Io { path, source })?;
            }
        }
        Ok(())
    }

    pub fn has(&self, key: &str) -> bool {
        self.places.contains_key(key)
    }

    /// Writes entries by their keys as one shard.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn add(&mut self, entries: &BTreeMap<String, Entry>) -> Result<(), StoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let tensors: BTreeMap<String, &HostTensor> = entries
            .iter()
            .flat_map(|(key, entry)| {
                let named = move |(name, tensor)| (format!("{key}.{name}"), tensor);
                entry.iter().map(named)
            })
            .collect();
        let mut hasher = Hasher::default();
        for (name, tensor) in &tensors {
            update(&mut hasher, name, tensor);
        }
        let metadata = BTreeMap::from([(HASH.to_owned(), hasher.finish().to_string())]);
        let keys: Vec<&str> = entries.keys().map(String::as_str).collect();
        let name = Sha256::of(keys.concat()).to_string();
        let name = format!("{}.{EXTENSION}", &name[..NAME_LENGTH]);
        let path = self.dir.join(name);
        let views = tensors.iter().map(|(name, tensor)| TensorView {
            name,
            dtype: tensor.shape.dtype,
            dims: &tensor.shape.dims,
            data: &tensor.data,
        });
        save(&path, views, &metadata)?;
        self.take(Checkpoint::open(&path)?);
        Ok(())
    }

    /// The tensor `name` of an entry.
    ///
    /// # Errors
    /// When there is no such entry, or it cannot be read.
    pub fn read(&self, key: &str, name: &str) -> Result<HostTensor, StoreError> {
        let Some(shard) = self.places.get(key) else {
            return Err(StoreError::Missing {
                dir: self.dir.clone(),
                key: key.to_owned(),
            });
        };
        Ok(self.shards[*shard].read(&format!("{key}.{name}"))?)
    }

    fn take(&mut self, shard: Checkpoint) {
        let at = self.shards.len();
        for name in shard.names() {
            self.places.insert(key_of(name).to_owned(), at);
        }
        self.shards.push(shard);
    }
}

/// Whether a file is called as shards are. Others in the folder are the user's: they are neither read nor removed.
fn is_shard(path: &Path) -> bool {
    let is_name =
        |name: &str| name.len() == NAME_LENGTH && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    path.extension().is_some_and(|e| e == EXTENSION)
        && path
            .file_stem()
            .and_then(|n| n.to_str())
            .is_some_and(is_name)
}

fn key_of(tensor: &str) -> &str {
    tensor.split_once('.').map_or(tensor, |(key, _)| key)
}

fn update(hasher: &mut Hasher, name: &str, tensor: &HostTensor) {
    hasher.update(format!("{name} {}\n", tensor.shape));
    hasher.update(&tensor.data);
}

/// A shard, if it has any of the entries `wanted`, of which `None` is all; or why it cannot be used.
fn read(path: &Path, wanted: Option<&BTreeSet<String>>) -> Result<Option<Checkpoint>, String> {
    let shard = Checkpoint::open(path).map_err(|error| error.to_string())?;
    let Some(expected) = shard.metadata().get(HASH) else {
        return Err("it has no hash".to_owned());
    };
    let is_wanted = |name: &str| wanted.is_none_or(|wanted| wanted.contains(key_of(name)));
    if !shard.names().any(is_wanted) {
        return Ok(None);
    }
    let mut hasher = Hasher::default();
    for name in shard.names() {
        let tensor = shard.read(name).map_err(|error| error.to_string())?;
        update(&mut hasher, name, &tensor);
    }
    match hasher.finish().to_string() == *expected {
        true => Ok(Some(shard)),
        false => Err("its content is not what was written".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: f32) -> Entry {
        let tensor = HostTensor::from_f32([2], &[value, value + 0.5]).unwrap();
        Entry::from([("mean", tensor)])
    }

    fn keys(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn shards(dir: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn entries_are_found_again_by_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Store::open(dir.path(), &keys(&["a", "b"])).unwrap();
        let mut second = Store::open(dir.path(), &keys(&["a", "b"])).unwrap();
        let both = BTreeMap::from([("a".to_owned(), entry(1.0)), ("b".to_owned(), entry(2.0))]);
        first.add(&both).unwrap();
        // Two processes that made the same have one file.
        second.add(&both).unwrap();
        assert_eq!(shards(dir.path()).len(), 1);
        let found = Store::open(dir.path(), &keys(&["b"])).unwrap();
        assert!(found.has("b") && found.damaged().is_empty());
        assert_eq!(found.read("b", "mean").unwrap(), entry(2.0)["mean"]);
        let error = found.read("c", "mean").unwrap_err().to_string();
        assert!(error.contains("no entry c"), "{error}");
        // What is not wanted is not read.
        assert!(!Store::open(dir.path(), &keys(&["c"])).unwrap().has("a"));
    }

    #[test]
    fn every_damaged_byte_and_every_cut_makes_a_shard_missing() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = keys(&["a"]);
        let mut store = Store::open(dir.path(), &wanted).unwrap();
        let entries = BTreeMap::from([("a".to_owned(), entry(1.0))]);
        store.add(&entries).unwrap();
        let path = shards(dir.path()).remove(0);
        let whole = fs::read(&path).unwrap();
        let is_missing = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let store = Store::open(dir.path(), &wanted).unwrap();
            !store.has("a")
        };
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            // Spaces fill the header up; another white space there changes nothing.
            let harmless = bytes[at].is_ascii_whitespace() || whole[at] == b' ';
            assert!(is_missing(&bytes) || harmless, "byte {at}");
        }
        for cut in 0..whole.len() {
            assert!(is_missing(&whole[..cut]), "cut at {cut}");
        }
        assert!(!is_missing(&whole));

        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let mut store = Store::open(dir.path(), &wanted).unwrap();
        assert_eq!(store.damaged().len(), 1);
        // Its entry is made again under the same name, which stays.
        store.add(&entries).unwrap();
        store.remove_damaged().unwrap();
        assert_eq!(fs::read(&path).unwrap(), whole);
        // One that nothing replaced goes.
        let other = dir.path().join(format!("{}.safetensors", "0a".repeat(16)));
        fs::write(&other, &whole[..9]).unwrap();
        // One of another name is not this program's.
        let foreign = dir.path().join("lora.safetensors");
        fs::write(&foreign, &whole[..9]).unwrap();
        let mut store = Store::open(dir.path(), &wanted).unwrap();
        store.remove_damaged().unwrap();
        assert!(!other.exists() && path.exists() && foreign.exists());
    }
}
