//! The state of a run beside its tensors, and the manifest of a checkpoint.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::CheckpointError;
use crate::util::hash::Sha256;

/// The keys of [`TrainState::config`] that hold the samples of a batch and the batches of a step, which may change.
pub const BATCH_SIZE: &str = "total_train_batch_size";
pub const BATCHES_OF_STEP: &str = "gradient_accumulation_steps";

/// The field of [`TrainState::data`] that holds the number of batches that the run has had.
pub(in crate::train) const BATCHES: &str = "batches";

/// The state that a run needs to resume: `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainState {
    /// Completed optimizer steps; the next step has this number.
    pub step: u64,
    /// Seeds by use.
    pub seeds: BTreeMap<String, u64>,
    /// Where the data order stands.
    pub data: Value,
    /// The quantization settings of the step.
    pub quantization: Value,
    /// Counters that continue, such as skipped steps.
    pub counters: BTreeMap<String, u64>,
    /// The loss on what is held out of training, where it was measured at this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The configuration values that decide what the run computes.
    pub config: BTreeMap<String, Value>,
    /// SHA-256 of `config` in canonical form.
    pub config_sha256: String,
    pub maxdiff_version: String,
}

impl TrainState {
    /// A state of this version of the program.
    pub fn new(step: u64, config: BTreeMap<String, Value>) -> Self {
        TrainState {
            step,
            seeds: BTreeMap::new(),
            data: Value::Null,
            quantization: Value::Null,
            counters: BTreeMap::new(),
            validation_loss: None,
            config_sha256: config_sha256(&config),
            config,
            maxdiff_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// The number of the batch that the run goes on with, where its batches are those of `config`: after as many samples as the
    /// run has had, rounded up to a whole batch.
    pub fn next_batch(&self, config: &BTreeMap<String, Value>) -> u64 {
        let numbers = |config| samples_of_step(config).map(|number| number.unwrap_or(1).max(1));
        let [[size, _], [before, count]] = [config, &self.config].map(numbers);
        let had = self.data[BATCHES].as_u64();
        // Earlier versions kept no count; a run had the same batches all along.
        let had = had.unwrap_or_else(|| self.step * count);
        let samples = u128::from(had) * u128::from(before);
        u64::try_from(samples.div_ceil(u128::from(size))).unwrap_or(u64::MAX)
    }

    /// Compares the configuration of a run that wants to continue with the saved one, in which a missing field has its
    /// value in `defaults`. The number of samples in a step may differ: [`TrainState::next_batch`].
    ///
    /// # Errors
    /// Lists every field that differs.
    pub fn check_resume(
        &self,
        config: &BTreeMap<String, Value>,
        defaults: &BTreeMap<String, Value>,
    ) -> Result<(), ResumeMismatch> {
        if config_sha256(config) == self.config_sha256 {
            return Ok(());
        }
        let mut saved = defaults.clone();
        saved.extend(self.config.clone());
        let keys: std::collections::BTreeSet<&String> =
            self.config.keys().chain(config.keys()).collect();
        let text = |map: &BTreeMap<String, Value>, key: &str| {
            map.get(key).map(|v| canonical(v).to_string())
        };
        let fields: Vec<FieldMismatch> = keys
            .into_iter()
            .map(|key| FieldMismatch {
                key: key.clone(),
                saved: text(&saved, key),
                current: text(config, key),
            })
            .filter(|field| field.saved != field.current)
            .filter(|field| ![BATCH_SIZE, BATCHES_OF_STEP].contains(&field.key.as_str()))
            .collect();
        if fields.is_empty() {
            return Ok(());
        }
        Err(ResumeMismatch {
            step: self.step,
            saved_by: self.maxdiff_version.clone(),
            fields,
        })
    }
}

/// The samples of a batch and the batches of a step, where a configuration has them.
pub fn samples_of_step(config: &BTreeMap<String, Value>) -> [Option<u64>; 2] {
    [BATCH_SIZE, BATCHES_OF_STEP].map(|key| config.get(key).and_then(Value::as_u64))
}

/// A configuration field with another value than in the checkpoint; none where it is not set.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldMismatch {
    pub key: String,
    pub saved: Option<String>,
    pub current: Option<String>,
}

/// The configuration of a run differs from that of the checkpoint it resumes from.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumeMismatch {
    pub step: u64,
    /// The program's version that saved the checkpoint.
    pub saved_by: String,
    pub fields: Vec<FieldMismatch>,
}

impl std::error::Error for ResumeMismatch {}

impl fmt::Display for ResumeMismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "the configuration differs from that of the checkpoint of step {} (saved by version {}): \
             set the fields back, or train into another output_dir",
            self.step, self.saved_by
        )?;
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".to_owned());
        for field in &self.fields {
            write!(
                f,
                "\n  {}: saved {}, now {}",
                field.key,
                shown(&field.saved),
                shown(&field.current)
            )?;
        }
        Ok(())
    }
}

/// SHA-256, in hexadecimal digits, of a configuration with sorted keys.
pub fn config_sha256(config: &BTreeMap<String, Value>) -> String {
    let canonical: BTreeMap<&String, Value> =
        config.iter().map(|(k, v)| (k, canonical(v))).collect();
    Sha256::of(serde_json::json!(canonical).to_string()).to_string()
}

/// The value with the keys of every object sorted.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let sorted: BTreeMap<&String, &Value> = map.iter().collect();
            let entries = sorted.into_iter().map(|(k, v)| (k.clone(), canonical(v)));
            Value::Object(entries.collect())
        }
        Value::Array(values) => Value::Array(values.iter().map(canonical).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

/// `manifest.json`: written last, it names every file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub format: u32,
    pub step: u64,
    pub files: Vec<ManifestFile>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ManifestFile {
    /// Relative to the checkpoint's folder, with `/`.
    pub path: String,
    pub bytes: u64,
    pub sha256: String,
}

/// The manifest's text carries its own hash, so that damage to it is told from damage to a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    sha256: String,
}

impl Manifest {
    pub const FILE: &str = "manifest.json";
    pub const FORMAT: u32 = 1;
    /// A longer manifest was not written here.
    pub const MAX_BYTES: u64 = 16 << 20;

    fn seal(&self) -> String {
        Sha256::of(serde_json::json!(self).to_string()).to_string()
    }

    pub fn to_text(&self) -> String {
        let sealed = serde_json::json!({"manifest": self, "sha256": self.seal()});
        format!("{sealed}\n")
    }

    /// Reads and checks the text of a manifest; the error is the reason alone.
    pub fn from_text(text: &[u8]) -> Result<Self, String> {
        let sealed: Sealed =
            serde_json::from_slice(text).map_err(|e| format!("{}: {e}", Manifest::FILE))?;
        let manifest = sealed.manifest;
        if manifest.seal() != sealed.sha256 {
            return Err(format!("{}: damaged: its sha256 differs", Manifest::FILE));
        }
        if manifest.format != Manifest::FORMAT {
            return Err(format!(
                "{}: format {}, this program reads {}",
                Manifest::FILE,
                manifest.format,
                Manifest::FORMAT
            ));
        }
        if let Some(file) = manifest.files.iter().find(|f| !is_relative(&f.path)) {
            return Err(format!(
                "{}: {:?} is not a path inside the checkpoint",
                Manifest::FILE,
                file.path
            ));
        }
        Ok(manifest)
    }
}

/// Whether `path` is a plain path downwards.
pub(super) fn is_relative(path: &str) -> bool {
    !path.is_empty()
        && path
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != ".." && !part.contains('\\'))
}

/// Checks the paths of files to be saved.
pub(super) fn check_paths<'a>(
    paths: impl Iterator<Item = &'a str>,
    reserved: &[&str],
) -> Result<(), CheckpointError> {
    let mut seen = std::collections::BTreeSet::new();
    for path in paths {
        let reason = if !is_relative(path) {
            "not a path inside the checkpoint"
        } else if reserved.contains(&path) {
            "a name that the checkpoint itself uses"
        } else if !seen.insert(path) {
            "it stands twice"
        } else {
            continue;
        };
        return Err(CheckpointError::Path {
            path: path.to_owned(),
            reason,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(rate: f64) -> BTreeMap<String, Value> {
        BTreeMap::from([
            ("learning_rate".to_owned(), json!(rate)),
            (
                "unet".to_owned(),
                json!({"b": [1, {"y": 1, "x": 2}], "a": "s"}),
            ),
        ])
    }

    #[test]
    fn a_resumed_run_must_have_the_same_configuration() {
        // A float with many digits, through the file's text.
        let saved = TrainState::new(7, config(0.100_000_000_000_000_05));
        let text = serde_json::to_string(&saved).unwrap();
        let saved: TrainState = serde_json::from_str(&text).unwrap();
        assert_eq!(
            saved.check_resume(&config(0.100_000_000_000_000_05), &BTreeMap::new()),
            Ok(())
        );
        // A key that came later has its default in the checkpoint.
        let mut later = config(0.100_000_000_000_000_05);
        later.insert("position_spread".to_owned(), json!(1.0));
        let defaults = BTreeMap::from([("position_spread".to_owned(), json!(1.0))]);
        assert_eq!(saved.check_resume(&later, &defaults), Ok(()));
        later.insert("position_spread".to_owned(), json!(0.5));
        assert!(saved.check_resume(&later, &defaults).is_err());

        let mut other = config(0.5);
        other.remove("unet");
        other.insert("seed".to_owned(), json!(3));
        let error = saved.check_resume(&other, &BTreeMap::new()).unwrap_err();
        let lines: Vec<String> = error.to_string().lines().map(str::to_owned).collect();
        assert!(lines[0].contains("checkpoint of step 7"), "{}", lines[0]);
        assert_eq!(
            lines[1],
            "  learning_rate: saved 0.10000000000000005, now 0.5"
        );
        assert_eq!(lines[2], "  seed: saved not set, now 3");
        assert_eq!(
            lines[3],
            r#"  unet: saved {"a":"s","b":[1,{"x":2,"y":1}]}, now not set"#
        );
    }

    #[test]
    fn the_hash_does_not_depend_on_the_order_of_keys() {
        let mut reordered = config(1.0);
        reordered.insert(
            "unet".to_owned(),
            json!({"a": "s", "b": [1, {"x": 2, "y": 1}]}),
        );
        assert_eq!(config_sha256(&config(1.0)), config_sha256(&reordered));
        assert_ne!(config_sha256(&config(1.0)), config_sha256(&config(2.0)));
    }

    #[test]
    fn every_flipped_bit_of_a_manifest_is_found() {
        let manifest = Manifest {
            format: 1,
            step: 12,
            files: vec![ManifestFile {
                path: "unet/config.json".to_owned(),
                bytes: 30,
                sha256: "ab".repeat(32),
            }],
        };
        let text = manifest.to_text();
        assert_eq!(Manifest::from_text(text.as_bytes()), Ok(manifest));
        for bit in 0..text.len() * 8 {
            let mut damaged = text.as_bytes().to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::from_text(&damaged).is_err(), "bit {bit}");
        }
        for cut in 0..text.len() - 1 {
            assert!(
                Manifest::from_text(&text.as_bytes()[..cut]).is_err(),
                "cut {cut}"
            );
        }
    }

    #[test]
    fn paths_stay_inside() {
        for path in ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\\b"] {
            assert!(!is_relative(path), "{path}");
        }
        assert!(is_relative("unet/config.json"));
        let check = |paths: &[&'static str]| check_paths(paths.iter().copied(), &["state.json"]);
        assert!(check(&["a", "b"]).is_ok());
        let twice = check(&["a", "a"]).unwrap_err().to_string();
        assert!(twice.ends_with("it stands twice"), "{twice}");
        assert!(check(&["state.json"]).is_err());
    }
}
