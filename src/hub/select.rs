//! Which files of a repository are needed: the rules by which folders are opened, on names alone.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{Fault, HubError, SelectError};
use super::name::RepoId;
use crate::models::spec::Signs;
use crate::models::{Family, Part};
use crate::util::splits::of_split;
use crate::weights::source::{SourceError, check_class, denoisers, is_null, no_denoiser};
use crate::weights::{Choice, choose, is_pickle, lora, parse_index};

const INDEX: &str = "model_index.json";
const SCHEDULER: &str = "scheduler/scheduler_config.json";
/// The first, the next two together, or the last hold a tokenizer.
const TOKENIZER: [&str; 4] = ["tokenizer.json", "vocab.json", "merges.txt", "spiece.model"];
const TOKENIZER_OPTIONS: [&str; 3] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
];
const PROCESSOR: &str = "preprocessor_config.json";
/// What reads pickles in Python and writes safetensors.
const PIPELINE: &str = "diffusers.DiffusionPipeline";

/// The kind of files to find in a repository.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// A whole model: a pipeline in diffusers' layout, or one `.safetensors` file. With `expected`, of this family and
    /// no other, as the configuration file of this name wants it. The part `without` and its tokenizer are left out.
    Model {
        expected: Option<(Family, &'a str)>,
        without: Option<Part>,
    },
    /// One part of a model, such as a ControlNet: `config.json` and weights.
    Part,
    /// A `CLIPModel`: a part that has a tokenizer beside it, and may say how it takes pictures.
    Clip,
    /// The files of a tokenizer, or of the folder `tokenizer`.
    Tokenizer,
    /// A LoRA; with `file`, that one of several.
    Lora { file: Option<&'a str> },
    /// The parquet files of a split of a dataset, in a folder of the repository and below it.
    Dataset { split: &'a str, folder: &'a str },
}

/// The files that a repository, or what is here of it, has.
pub(super) struct Listing<'a> {
    pub repo: &'a RepoId,
    pub names: &'a BTreeSet<String>,
    /// Whether the repository is known not to have a file.
    pub absent: &'a dyn Fn(&str) -> bool,
    /// Whether what is here decides which layout the repository has, since there is nobody to ask.
    pub guess: bool,
}

/// The files to have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// The files that are needed come last, and weights after all others: a snapshot that has them all was not
    /// interrupted before one that it can do without.
    pub files: Vec<String>,
    /// The path to open, relative to the snapshot.
    pub open: String,
    /// Files whose absence decided what to take.
    pub absent: Vec<String>,
}

type Read<'a> = &'a mut dyn FnMut(&str) -> Result<Vec<u8>, HubError>;

/// Chooses the files. `read` gives the content of one that is in the listing.
pub(super) fn plan(
    wanted: &Wanted<'_>,
    listing: &Listing<'_>,
    read: Read<'_>,
) -> Result<Plan, Fault> {
    let mut chosen = Chosen {
        listing,
        optional: Vec::new(),
        needed: Vec::new(),
        weights: Vec::new(),
        missing: Vec::new(),
        pickles: Vec::new(),
        absent: Vec::new(),
    };
    let open = match wanted {
        Wanted::Model { expected, without } => chosen.model(*expected, *without, read)?,
        Wanted::Part => {
            chosen.part("", read)?;
            String::new()
        }
        Wanted::Clip => {
            if chosen.has(PROCESSOR) {
                chosen.optional.push(PROCESSOR.to_owned());
            }
            chosen.tokenizer("", true);
            chosen.part("", read)?;
            String::new()
        }
        Wanted::Tokenizer => {
            let folder = match chosen.has_tokenizer("tokenizer/") && !chosen.has_tokenizer("") {
                true => "tokenizer",
                false => "",
            };
            chosen.tokenizer(folder, true);
            folder.to_owned()
        }
        Wanted::Lora { file } => chosen.lora(*file)?,
        Wanted::Dataset { split, folder } => {
            chosen.dataset(split, folder)?;
            (*folder).to_owned()
        }
    };
    if !chosen.pickles.is_empty() {
        return Err(SelectError::Pickles {
            repo: listing.repo.clone(),
            names: chosen.pickles,
            class: match wanted {
                Wanted::Clip => "transformers.CLIPModel",
                Wanted::Model { .. }
                | Wanted::Part
                | Wanted::Tokenizer
                | Wanted::Lora { .. }
                | Wanted::Dataset { .. } => PIPELINE,
            },
        }
        .into());
    }
    if !chosen.missing.is_empty() {
        return Err(SelectError::Missing {
            names: chosen.missing,
        }
        .into());
    }
    let files = [chosen.optional, chosen.needed, chosen.weights].concat();
    Ok(Plan {
        files,
        open,
        absent: chosen.absent,
    })
}

struct Chosen<'a> {
    listing: &'a Listing<'a>,
    optional: Vec<String>,
    needed: Vec<String>,
    weights: Vec<String>,
    missing: Vec<String>,
    pickles: Vec<String>,
    absent: Vec<String>,
}

impl Chosen<'_> {
    fn has(&self, name: &str) -> bool {
        self.listing.names.contains(name)
    }

    /// Whether the repository is known not to have the file, which is remembered.
    fn is_absent(&mut self, name: &str) -> bool {
        let absent = (self.listing.absent)(name);
        if absent {
            self.absent.push(name.to_owned());
        }
        absent
    }

    /// As [`Chosen::is_absent`], for a file that decides which layout the repository has.
    fn is_no_layout(&mut self, name: &str) -> bool {
        self.is_absent(name) || (self.listing.guess && !self.has(name))
    }

    /// The names in one folder, sorted; the empty name is the outermost.
    fn names_in(&self, folder: &str) -> Vec<String> {
        let prefix = prefix(folder);
        let names = self.listing.names.iter();
        names
            .filter_map(|name| name.strip_prefix(&prefix))
            .filter(|name| !name.contains('/'))
            .map(str::to_owned)
            .collect()
    }

    fn need(&mut self, name: String) {
        match self.has(&name) {
            true => self.needed.push(name),
            false => self.missing.push(name),
        }
    }

    fn model(
        &mut self,
        expected: Option<(Family, &str)>,
        without: Option<Part>,
        read: Read<'_>,
    ) -> Result<String, Fault> {
        let at = Path::new(&self.listing.repo.to_string()).to_owned();
        let mut index = Map::new();
        if self.has(INDEX) {
            self.needed.push(INDEX.to_owned());
            index = object(INDEX, &read(INDEX)?)?;
            check_class(&at, &index).map_err(SelectError::Model)?;
        } else if !denoisers().any(|part| self.has(&config_of(part))) {
            let mut configs = denoisers().map(config_of);
            if self.is_no_layout(INDEX) && configs.all(|name| self.is_no_layout(&name)) {
                return self.single_file();
            }
            self.missing.push(INDEX.to_owned());
            return Ok(String::new());
        } else if !self.is_no_layout(INDEX) {
            self.missing.push(INDEX.to_owned());
        }
        // Without an index, what is there counts.
        let listed = |name: &str, marker: &str| match index.is_empty() {
            true => self.has(&format!("{name}/{marker}")),
            false => index.get(name).is_some_and(Value::is_array) && !is_null(&index, name),
        };
        let parts: Vec<Part> = Part::ALL
            .into_iter()
            .filter(|part| listed(part.name(), "config.json"))
            .collect();
        let tokenizers: Vec<&str> = Part::ALL
            .into_iter()
            .filter_map(Part::tokenizer)
            .filter(|name| TOKENIZER.iter().any(|file| listed(name, file)))
            .collect();
        let scheduler = listed("scheduler", "scheduler_config.json");
        let Some(denoiser) = denoisers().find(|part| parts.contains(part)) else {
            let found = self.listing.names.iter().cloned().collect();
            return Err(SelectError::Model(no_denoiser(&at, &index, found)).into());
        };
        let denoiser_config = config_of(denoiser);
        if let Some((expected, config)) = expected
            && self.has(&denoiser_config)
        {
            let denoiser = object(&denoiser_config, &read(&denoiser_config)?)?;
            let found = Family::of_folder(&Signs {
                denoiser: &denoiser,
                has: &|part| parts.contains(&part),
            });
            if found != expected {
                return Err(SelectError::Model(SourceError::WrongFamily {
                    path: at,
                    found,
                    expected,
                    config: config.to_owned(),
                })
                .into());
            }
        }
        for part in parts.into_iter().filter(|part| Some(*part) != without) {
            self.part(part.name(), read)?;
        }
        let left_out = without.and_then(Part::tokenizer);
        for name in tokenizers {
            if Some(name) != left_out {
                self.tokenizer(name, false);
            }
        }
        if scheduler && !self.is_absent(SCHEDULER) {
            self.need(SCHEDULER.to_owned());
        }
        Ok(String::new())
    }

    /// The one file of a whole model in a repository without parts.
    fn single_file(&mut self) -> Result<String, Fault> {
        let expected = "model_index.json, unet/config.json, transformer/config.json or one .safetensors file of a whole model";
        let name = self.only_safetensors(
            expected,
            "download one with `hf download REPOSITORY FILE --local-dir DIR` and name that file",
        )?;
        self.weights.push(name);
        // The folder, which is opened by its only file.
        Ok(String::new())
    }

    fn only_safetensors(
        &self,
        expected: &'static str,
        advice: &'static str,
    ) -> Result<String, SelectError> {
        let names = self.names_in("");
        let files = names.iter().filter(|name| name.ends_with(".safetensors"));
        let files: Vec<String> = files.cloned().collect();
        match files.as_slice() {
            [one] => Ok(one.clone()),
            [] => {
                let names: Vec<String> = names.into_iter().filter(|n| is_pickle(n)).collect();
                Err(match names.is_empty() {
                    true => SelectError::Other {
                        names: self.listing.names.iter().cloned().collect(),
                        expected,
                    },
                    false => SelectError::Pickles {
                        repo: self.listing.repo.clone(),
                        names,
                        class: PIPELINE,
                    },
                })
            }
            _ => Err(SelectError::Several {
                names: files,
                advice,
            }),
        }
    }

    /// Configuration and weights in one folder.
    fn part(&mut self, folder: &str, read: Read<'_>) -> Result<(), Fault> {
        let prefix = prefix(folder);
        self.need(format!("{prefix}config.json"));
        let name = match choose(&self.names_in(folder)) {
            Choice::File(name) => format!("{prefix}{name}"),
            Choice::Variants(names) => {
                let names = names.iter().map(|name| format!("{prefix}{name}")).collect();
                return Err(SelectError::Variants { names }.into());
            }
            Choice::Pickle(name) => {
                self.pickles.push(format!("{prefix}{name}"));
                return Ok(());
            }
            Choice::Nothing => {
                self.missing.push(format!("{prefix}*.safetensors"));
                return Ok(());
            }
        };
        if !name.ends_with(".json") {
            self.weights.push(name);
            return Ok(());
        }
        let map = parse_index(Path::new(&name), &read(&name)?).map_err(SelectError::Index)?;
        let shards: BTreeSet<String> = map.into_values().map(|s| format!("{prefix}{s}")).collect();
        self.needed.push(name);
        for shard in shards {
            match self.has(&shard) {
                true => self.weights.push(shard),
                false => self.missing.push(shard),
            }
        }
        Ok(())
    }

    fn has_tokenizer(&self, prefix: &str) -> bool {
        let has = |name: &str| self.has(&format!("{prefix}{name}"));
        let [whole, vocab, merges, pieces] = TOKENIZER;
        has(whole) || (has(vocab) && has(merges)) || has(pieces)
    }

    /// The files of a tokenizer. Without `must`, a repository that has none may do without: one can be named.
    fn tokenizer(&mut self, folder: &str, must: bool) {
        let prefix = prefix(folder);
        for (names, list) in [
            (&TOKENIZER_OPTIONS[..], &mut self.optional),
            (&TOKENIZER[..], &mut self.needed),
        ] {
            let names = names.iter().map(|name| format!("{prefix}{name}"));
            list.extend(names.filter(|n| self.listing.names.contains(n)));
        }
        if self.has_tokenizer(&prefix) {
            return;
        }
        let mut names = TOKENIZER.iter().map(|name| format!("{prefix}{name}"));
        if must || !names.all(|name| self.is_absent(&name)) {
            self.missing.push(format!(
                "{prefix}tokenizer.json, or vocab.json and merges.txt"
            ));
        }
    }

    /// The parquet files of a split. Of `train-00000-of-00002.parquet` both have to be there.
    fn dataset(&mut self, split: &str, folder: &str) -> Result<(), SelectError> {
        let prefix = prefix(folder);
        let names = self.listing.names.iter().cloned();
        let tables = names.filter(|name| name.starts_with(&prefix) && name.ends_with(".parquet"));
        let tables: Vec<String> = tables.collect();
        if tables.is_empty() {
            return Err(SelectError::Other {
                names: self.listing.names.iter().cloned().collect(),
                expected: "parquet files; the hub makes them of many datasets: dataset_revision=refs/convert/parquet",
            });
        }
        let of_split = of_split(&tables, split);
        if of_split.is_empty() {
            return Err(SelectError::Split {
                names: tables,
                split: split.to_owned(),
            });
        }
        for (before, count) in of_split.iter().filter_map(|name| shard_of(name)) {
            let shards = (0..count).map(|at| format!("{before}-{at:05}-of-{count:05}"));
            let is_there = |shard: &String| of_split.iter().any(|name| name.starts_with(shard));
            let missing = shards.filter(|shard| !is_there(shard));
            let missing: Vec<String> = missing.map(|shard| format!("{shard}*.parquet")).collect();
            self.missing.extend(missing);
        }
        self.missing.dedup();
        self.weights = of_split;
        Ok(())
    }

    fn lora(&mut self, file: Option<&str>) -> Result<String, Fault> {
        // PEFT's settings lie beside the weights.
        let beside = match file.and_then(|file| file.rsplit_once('/')) {
            Some((folder, _)) => format!("{folder}/{}", lora::CONFIG_FILE),
            None => lora::CONFIG_FILE.to_owned(),
        };
        if self.has(&beside) {
            self.optional.push(beside);
        }
        let name = match file {
            Some(file) if self.has(file) => file.to_owned(),
            Some(file) => {
                self.missing.push(file.to_owned());
                return Ok(String::new());
            }
            None => {
                let default = lora::FILES.into_iter().find(|name| self.has(name));
                match default {
                    Some(name) => name.to_owned(),
                    None if lora::FILES.into_iter().all(|name| self.is_no_layout(name)) => self
                        .only_safetensors(
                            "a .safetensors file",
                            "name one with lora_config.weight_name",
                        )?,
                    None => {
                        self.missing.push(lora::FILES.join(" or "));
                        return Ok(String::new());
                    }
                }
            }
        };
        if is_pickle(&name) {
            self.pickles.push(name.clone());
        }
        self.weights.push(name.clone());
        Ok(match file {
            // Whoever names the file names it in the folder.
            Some(_) => String::new(),
            None => name,
        })
    }
}

/// What the name of `data/train-00000-of-00002-abc.parquet` begins with, and how many files there are of it.
fn shard_of(name: &str) -> Option<(&str, usize)> {
    let (before, rest) = name.split_once("-of-")?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let count = rest.get(..5).filter(|count| digits(count))?;
    let (before, at) = before.rsplit_once('-')?;
    let count = count.parse().ok()?;
    digits(at).then_some((before, count))
}

/// The configuration of a part.
fn config_of(part: Part) -> String {
    format!("{}/config.json", part.name())
}

fn prefix(folder: &str) -> String {
    match folder.is_empty() {
        true => String::new(),
        false => format!("{folder}/"),
    }
}

fn object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, SelectError> {
    serde_json::from_slice(bytes).map_err(|error| SelectError::Json {
        file: file.to_owned(),
        reason: error.to_string(),
    })
}
