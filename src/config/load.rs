//! From a file and `key=value` overrides to a checked [`Config`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value};

use crate::models::Family;
use crate::models::family::UNSUPPORTED;
use crate::pipelines::image_file::NamedSampler;
use crate::schedulers::SchedulerKind;
use crate::util::names::nearest;

use super::check;
use super::error::{ConfigError, ConfigErrors, Place, Problem, Problems};
use super::field::{Field, Schema, parse_text};
use super::key::{Key, Mark, Status, Ty, find_key};
use super::meant::{advice, meant};
use super::model::builtin_unet_config;
use super::recipes::Recipe;
use super::schema::Config;
use super::text::show;
use super::values::ModelConfig;
use super::verb::Verb;
use super::yaml::{Document, join, parse_document, parse_flow, read_file};

/// Keys whose values all compute the same, with what is computed for those that are not here.
const SAME_RESULT: [(&str, &str); 2] = [
    ("attention", "'dot_product'"),
    ("remat_policy", "NONE, the default"),
];

/// A configuration that passed every check, and what was remarked on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    pub config: Config,
    /// Full sentences with the place, for the terminal.
    pub warnings: Vec<String>,
    pub given: Given,
}

/// What the file and the command line gave, without defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    values: Map<String, Value>,
    origins: Origins,
}

impl Given {
    /// The value that was written for a key, by its dotted path.
    pub fn get(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        let value = self.values.get(names.next()?)?;
        names.try_fold(value, |inside, name| inside.get(name))
    }

    /// Where a key was written.
    pub fn place(&self, path: &str) -> Place {
        self.origins.place(path)
    }

    /// Where a key, or entries of its dict, were written: the first line in the file, then the command line. None for a
    /// default.
    pub fn places(&self, key: &str) -> Vec<String> {
        self.origins.places(key)
    }
}

impl Config {
    /// Reads the YAML file at `path`, or the recipe of that name ([`Recipe`]), applies `overrides` (`key=value`) and
    /// checks the whole.
    ///
    /// With a verb, what only concerns other verbs is not checked, and an override that the verb
    /// does not read is refused; without, everything is checked. Relative paths of `unet_config`
    /// and `text_encoder_config` in the file count from the file's folder; all other paths count
    /// from the current folder. An empty `run_name` becomes the environment variable
    /// `JOBSET_NAME`, as in MaxDiffusion.
    ///
    /// # Errors
    /// All that is wrong, not the first only.
    pub fn load(
        path: &Path,
        overrides: &[String],
        verb: Option<Verb>,
    ) -> Result<Loaded, ConfigErrors> {
        let name = path.display().to_string();
        let text = match Recipe::in_place_of(path) {
            Some(recipe) => recipe.text.to_owned(),
            None => read_file(path).map_err(|message| ConfigError {
                key: String::new(),
                place: Place::File {
                    path: name.clone(),
                    line: 0,
                },
                problem: Problem::Read(match path.components().count() == 1 && !path.exists() {
                    true => format!("{message}; {}", Recipe::advice(&name)),
                    false => message,
                }),
            })?,
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut loaded = Loader::new(Some((&name, &text, folder)), overrides).finish(verb)?;
        loaded.config.name_from_environment();
        Ok(loaded)
    }

    /// A configuration of defaults and `overrides` alone.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_overrides(
        overrides: &[String],
        verb: Option<Verb>,
    ) -> Result<Loaded, ConfigErrors> {
        let mut loaded = Loader::new(None, overrides).finish(verb)?;
        loaded.config.name_from_environment();
        Ok(loaded)
    }

    /// As [`Config::load`] with the file's text at hand; `name` stands for it in messages. The
    /// environment is not read.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_text(
        name: &str,
        text: &str,
        overrides: &[String],
        verb: Option<Verb>,
    ) -> Result<Loaded, ConfigErrors> {
        Loader::new(Some((name, text, Path::new(""))), overrides).finish(verb)
    }

    fn name_from_environment(&mut self) {
        if self.run_name.is_empty()
            && let Ok(name) = std::env::var("JOBSET_NAME")
        {
            self.run_name = name;
        }
    }

    /// Refuses overrides that only change the other of the two programs that `verb` can make: with `training` the one
    /// of `generate`, without it that of `train`.
    ///
    /// # Errors
    /// All such overrides.
    pub fn check_step(
        overrides: &[String],
        verb: Verb,
        training: bool,
    ) -> Result<(), ConfigErrors> {
        let (mine, step, other, others) = match training {
            true => (Verb::Train, "train", "denoise", Verb::Generate),
            false => (Verb::Generate, "denoise", "train", Verb::Train),
        };
        let mut errors = Vec::new();
        for word in overrides {
            let path = word.split_once('=').map_or(word.as_str(), |(path, _)| path);
            let Some(key) = find_key(Config::KEYS, path.split('.').next().unwrap_or(path)) else {
                continue;
            };
            if key.verbs.contains(&others) && !key.verbs.contains(&mine) {
                errors.push(ConfigError {
                    key: path.to_owned(),
                    place: Place::CommandLine,
                    problem: Problem::NotThisStep { verb, step, other },
                });
            }
        }
        match errors.is_empty() {
            true => Ok(()),
            false => Err(ConfigErrors(errors)),
        }
    }

    /// The keys that a run keeps when it continues a checkpoint, with their values.
    pub fn fixed_on_resume(&self) -> BTreeMap<String, Value> {
        Config::KEYS
            .iter()
            .filter(|key| key.is(Mark::FixedOnResume))
            .map(|key| (key.name.to_owned(), self.show_key(key.name)))
            .collect()
    }

    /// Every key with its value, a secret apart; as a YAML file it loads to the same configuration.
    pub fn to_json(&self) -> Value {
        let mut all = self.show();
        if !self.hf_access_token.is_empty() {
            all["hf_access_token"] = "(not shown)".into();
        }
        all
    }
}

/// Where each value was written, by dotted path.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Origins {
    file: String,
    lines: HashMap<String, u64>,
    overridden: HashSet<String>,
}

impl Origins {
    /// The place of a key, or of the nearest key around it that was written.
    pub(super) fn place(&self, path: &str) -> Place {
        let mut at = path;
        loop {
            if self.overridden.contains(at) {
                return Place::CommandLine;
            }
            if let Some(line) = self.lines.get(at) {
                return self.line(*line);
            }
            match at.rsplit_once('.') {
                Some((outer, _)) => at = outer,
                None => return Place::Default,
            }
        }
    }

    /// Whether the command line gave a key, or an entry of its dict.
    fn is_overridden(&self, key: &str) -> bool {
        self.overridden.iter().any(|path| is_of(path, key))
    }

    fn places(&self, key: &str) -> Vec<String> {
        let written = self.lines.iter().filter(|(path, _)| {
            // The command line replaced the others.
            is_of(path, key) && self.place(path) != Place::CommandLine
        });
        let first_line = written.map(|(_, line)| *line).min();
        let command_line = self.is_overridden(key).then_some(Place::CommandLine);
        let file = first_line.map(|line| self.line(line));
        let places = file.into_iter().chain(command_line);
        places.map(|place| place.to_string()).collect()
    }

    fn line(&self, line: u64) -> Place {
        Place::File {
            path: self.file.clone(),
            line,
        }
    }

    /// Precedence of a key: 0 not given, 1 given by the file, 2 by the command line.
    fn rank(&self, path: &str) -> u8 {
        match self.place(path) {
            Place::Default => 0,
            Place::File { .. } => 1,
            Place::CommandLine => 2,
        }
    }

    /// Records that the command line gave `value` to `path`: a dict its entries, anything else
    /// the whole.
    fn override_with(&mut self, path: &str, value: &Value) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (name, inner) in map {
                    self.override_with(&join(path, name), inner);
                }
            }
            _ => {
                let inside = format!("{path}.");
                self.lines.retain(|p, _| !p.starts_with(&inside));
                self.overridden.insert(path.to_owned());
            }
        }
    }
}

/// Whether a path is that of the key, or of something in its dict.
fn is_of(path: &str, key: &str) -> bool {
    let rest = path.strip_prefix(key);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

struct Loader {
    values: Map<String, Value>,
    origins: Origins,
    errors: Vec<ConfigError>,
    warnings: Vec<String>,
    /// The file is not valid YAML: errors that follow from its content are not reported.
    broken: bool,
}

impl Loader {
    fn new(file: Option<(&str, &str, &Path)>, overrides: &[String]) -> Self {
        let mut loader = Loader {
            values: Map::new(),
            origins: Origins::default(),
            errors: Vec::new(),
            warnings: Vec::new(),
            broken: false,
        };
        if let Some((name, text, folder)) = file {
            loader.read_document(name, text, folder);
        }
        // Parts of a model's dict come last: they change the dict of the model that is chosen.
        let parts_of_a_model = |word: &&String| {
            word.starts_with("unet_config.") || word.starts_with("text_encoder_config.")
        };
        for word in overrides.iter().filter(|w| !parts_of_a_model(w)) {
            loader.apply(word);
        }
        for word in overrides.iter().filter(parts_of_a_model) {
            loader.apply(word);
        }
        loader.expand_sampler();
        loader
    }

    fn read_document(&mut self, name: &str, text: &str, folder: &Path) {
        self.origins.file = name.to_owned();
        let document = match parse_document(text) {
            Ok(document) => document,
            Err((line, problem)) => {
                self.broken = true;
                let place = self.origins.line(line);
                self.error(String::new(), place, problem);
                Document::default()
            }
        };
        for (path, line, problem) in document.problems {
            let place = self.origins.line(line);
            self.error(path, place, problem);
        }
        for (path, line) in document.repeated {
            let place = self.origins.line(line);
            self.warnings
                .push(format!("{place}: {path}: given twice with the same value"));
        }
        self.values = document.values;
        self.origins.lines = document.lines;
        for key in ["unet_config", "text_encoder_config"] {
            if let Some(Value::String(path)) = self.values.get_mut(key)
                && !path.is_empty()
            {
                *path = folder.join(&*path).display().to_string();
            }
        }
    }

    fn error(&mut self, key: String, place: Place, problem: Problem) {
        self.errors.push(ConfigError {
            key,
            place,
            problem,
        });
    }

    fn override_error(&mut self, key: &str, problem: Problem) {
        self.error(key.to_owned(), Place::CommandLine, problem);
    }

    /// Applies one `key=value`.
    fn apply(&mut self, word: &str) {
        let Some((path, text)) = word.split_once('=') else {
            let advice = advice(word);
            self.override_error(word, Problem::NotAnOverride { advice });
            return;
        };
        let ty = match type_of(path) {
            Ok(ty) => ty,
            Err(problem) => {
                self.override_error(path, problem);
                return;
            }
        };
        let parsed = match ty {
            Some(ty) => parse_text(ty, text),
            // Inside a free dict the text says its type itself.
            None => Ok(parse_flow(text).unwrap_or_else(|_| Value::from(text))),
        };
        let value = match parsed {
            Ok(value) => value,
            Err(message) => {
                let problem = Problem::WrongType {
                    expected: ty.map_or_else(String::new, |t| t.to_string()),
                    found: format!("{} ({message})", show(&Value::from(text))),
                };
                self.override_error(path, problem);
                return;
            }
        };
        if self.origins.overridden.contains(path) {
            self.warnings.push(format!(
                "command line: {path}: given more than once; the last counts"
            ));
        }
        if let Err(problem) = self.seed_model(path) {
            self.override_error(path, problem);
            return;
        }
        self.origins.override_with(path, &value);
        let segments: Vec<&str> = path.split('.').collect();
        merge(&mut self.values, &segments, value);
    }

    /// A sampler by the name that web interfaces have for it becomes the sampler here and its settings, where these are
    /// not given.
    fn expand_sampler(&mut self) {
        const SCHEDULER: &str = "scheduler";
        let name = self.values.get(SCHEDULER).and_then(Value::as_str);
        let Some(name) = name.filter(|name| SchedulerKind::from_name(name).is_none()) else {
            return;
        };
        let Some(NamedSampler { kind, settings }) = NamedSampler::read(name) else {
            return;
        };
        self.values.insert(SCHEDULER.to_owned(), kind.name().into());
        for (key, value) in settings {
            let path = format!("diffusion_scheduler_config.{key}");
            let dict = self.values.get("diffusion_scheduler_config");
            let is_written = dict.and_then(|dict| dict.get(key)).is_some();
            let is_newer = self.origins.rank(SCHEDULER) == 2;
            if self.origins.overridden.contains(&path) || (is_written && !is_newer) {
                continue;
            }
            let Ok(Some(ty)) = type_of(&path) else {
                continue;
            };
            let value = parse_text(ty, &value).unwrap_or(Value::String(value));
            match self.origins.place(SCHEDULER) {
                Place::File { line, .. } => drop(self.origins.lines.insert(path.clone(), line)),
                Place::CommandLine | Place::Default => self.origins.override_with(&path, &value),
            }
            let segments: Vec<&str> = path.split('.').collect();
            merge(&mut self.values, &segments, value);
        }
    }

    /// Before `unet_config.x=y` the dict has to be there: the one in the file, or the known
    /// model's.
    fn seed_model(&mut self, path: &str) -> Result<(), Problem> {
        let Some((key, _)) = path.split_once('.') else {
            return Ok(());
        };
        if !matches!(type_of(key), Ok(Some(Ty::Model(_)))) {
            return Ok(());
        }
        let conflict = |message: String| Problem::Conflict {
            keys: vec![key.to_owned()],
            message,
        };
        match self.values.get(key) {
            Some(Value::Object(_)) => return Ok(()),
            Some(Value::String(file)) if !file.is_empty() => {
                return Err(conflict(format!(
                    "{key} is the file {file}: change it there, or write the dict in the configuration"
                )));
            }
            _ => {}
        }
        let defaults = Config::default();
        let model = self
            .values
            .get("pretrained_model_name_or_path")
            .and_then(Value::as_str)
            .unwrap_or(&defaults.pretrained_model_name_or_path);
        let builtin = (key == "unet_config")
            .then(|| builtin_unet_config(model))
            .flatten()
            .and_then(|text| serde_json::from_str::<Value>(text).ok());
        match builtin {
            Some(dict) => {
                self.values.insert(key.to_owned(), dict);
                Ok(())
            }
            None => Err(conflict(format!(
                "there is no {key} to change a part of: write the dict in the configuration"
            ))),
        }
    }

    /// The error of a recipe for a family that is known and not built, which stands for the errors of all keys that
    /// only such recipes have.
    fn unsupported_family(&self) -> Option<ConfigError> {
        let value = |key: &str| self.values.get(key).and_then(Value::as_str);
        let found = UNSUPPORTED.iter().find_map(|family| {
            let says = |(key, start): &&(&str, &str)| {
                value(key).is_some_and(|text| text.starts_with(start))
            };
            Some((family, family.recipe.iter().find(says)?.0))
        });
        let (family, key) = found?;
        let supported: Vec<&str> = Family::published().map(|(f, _)| f.title()).collect();
        Some(ConfigError {
            key: key.to_owned(),
            place: self.origins.place(key),
            problem: Problem::UnsupportedFamily {
                found: show(&self.values[key]),
                family: family.name,
                supported: supported.join(", "),
            },
        })
    }

    fn finish(mut self, verb: Option<Verb>) -> Result<Loaded, ConfigErrors> {
        if let Some(error) = self.unsupported_family() {
            return Err(error.into());
        }
        let mut config = Config::default();
        let mut problems = Problems::new();
        config.read_map(&self.values, "", &mut problems);
        for (path, problem) in problems {
            let place = self.origins.place(&path);
            // A kernel, or what is computed twice, is a way to compute the same function, so a file that names another
            // one is still right; asking for it on the command line is not.
            let same = SAME_RESULT.iter().find(|(key, _)| *key == path);
            if let (Some((_, instead)), Place::File { .. }, Problem::ValueNotYet { found, .. }) =
                (same, &place, &problem)
            {
                self.warnings.push(format!(
                    "{place}: {path}: {found} is not here yet; computed as {instead}, which gives the same result"
                ));
                continue;
            }
            self.error(path, place, problem);
        }
        self.unify(&mut config);
        let shown = config.show();
        let values = std::mem::take(&mut self.values);
        self.check_status(Config::KEYS, &values, &shown, "", &shown, verb);
        if !self.broken {
            let wrong: HashSet<String> = self.errors.iter().map(|e| e.key.clone()).collect();
            for (keys, message) in check::conflicts(&config, verb) {
                // A consequence of a refused value is not reported as another error.
                if keys.iter().any(|k| wrong.contains(*k)) {
                    continue;
                }
                let place = keys
                    .iter()
                    .map(|k| self.origins.place(k))
                    .max_by_key(|p| match p {
                        Place::Default => 0,
                        Place::File { .. } => 1,
                        Place::CommandLine => 2,
                    })
                    .unwrap_or(Place::Default);
                let problem = Problem::Conflict {
                    keys: keys.iter().map(|k| (*k).to_owned()).collect(),
                    message,
                };
                self.error(keys.join(", "), place, problem);
            }
            self.warnings.extend(check::remarks(&config, verb));
            self.two_architectures(&config, &values);
        }
        if self.errors.is_empty() {
            return Ok(Loaded {
                config,
                warnings: self.warnings,
                given: Given {
                    values,
                    origins: self.origins,
                },
            });
        }
        self.errors.sort_by_key(|e| match e.place {
            Place::File { line, .. } => (0, line),
            Place::CommandLine => (1, 0),
            Place::Default => (2, 0),
        });
        Err(ConfigErrors(self.errors))
    }

    /// Warns of a model whose UNet is not taken, because `unet_config` gives another.
    fn two_architectures(&mut self, config: &Config, values: &Map<String, Value>) {
        const MODEL: &str = "pretrained_model_name_or_path";
        let model = &config.pretrained_model_name_or_path;
        // Parts of the dict (`unet_config.x=y`) change the architecture of the model that is named.
        // A run on pixels has the architecture that its recipe gives.
        let folder = Path::new(model);
        let is_run = folder.is_dir() && !folder.join("model_index.json").exists();
        let is_named = values.contains_key(MODEL) && !model.is_empty() && !is_run;
        if is_named && self.origins.rank("unet_config") > 0 {
            let place = self.origins.place(MODEL);
            self.warnings.push(format!(
                "{place}: {MODEL}: the UNet is not that of {model}, but that of unet_config ({})",
                self.origins.place("unet_config")
            ));
        }
    }

    /// Makes the short keys and the long ones of `diffusion_scheduler_config` say the same: what
    /// was said more strongly wins, and what was said equally strongly has to agree.
    fn unify(&mut self, config: &mut Config) {
        let long = config.diffusion_scheduler_config._class_name;
        let sampler = self.stronger(
            ("scheduler", config.scheduler),
            ("diffusion_scheduler_config._class_name", long),
        );
        config.scheduler = sampler;
        config.diffusion_scheduler_config._class_name = sampler;
        let long = config.diffusion_scheduler_config.prediction_type;
        let prediction = self.stronger(
            ("prediction_type", config.prediction_type),
            ("diffusion_scheduler_config.prediction_type", long),
        );
        config.prediction_type = prediction;
        config.diffusion_scheduler_config.prediction_type = prediction;
    }

    fn stronger<T: PartialEq + Copy + std::fmt::Display>(
        &mut self,
        (short, a): (&str, Option<T>),
        (long, b): (&str, Option<T>),
    ) -> Option<T> {
        let Some(first) = a else { return b };
        let (rank_a, rank_b) = (self.origins.rank(short), self.origins.rank(long));
        if rank_b > rank_a {
            return b;
        }
        if let Some(second) = b
            && rank_a == rank_b
            && first != second
        {
            let place = self.origins.place(short);
            let problem = Problem::Conflict {
                keys: vec![short.to_owned(), long.to_owned()],
                message: format!("{first} here and {second} in {long}: give it once"),
            };
            self.error(short.to_owned(), place, problem);
        }
        Some(first)
    }

    /// Refuses a key that changes nothing on the command line, where somebody asks for it now, and warns of one in a
    /// file, which may be MaxDiffusion's and serves all verbs.
    fn without_effect(&mut self, key: String, place: Place, reason: String) {
        let problem = Problem::NoEffect(reason);
        match place {
            Place::CommandLine => self.error(key, place, problem),
            Place::File { .. } | Place::Default => {
                self.warnings.push(format!("{place}: {key}: {problem}"));
            }
        }
    }

    /// Refuses or remarks on every written key that changes nothing.
    fn check_status(
        &mut self,
        keys: &'static [Key],
        values: &Map<String, Value>,
        shown: &Value,
        path: &str,
        config: &Value,
        verb: Option<Verb>,
    ) {
        for (name, value) in values {
            let Some(key) = find_key(keys, name) else {
                continue;
            };
            let at = join(path, name);
            let shown = &shown[name];
            if let (Ty::Dict(inner), Value::Object(map)) = (key.ty, value) {
                self.check_status(inner, map, shown, &at, config, verb);
                continue;
            }
            let place = match key.ty {
                // Its entries are no keys of their own.
                Ty::Free if self.origins.is_overridden(&at) => Place::CommandLine,
                _ => self.origins.place(&at),
            };
            let on_command_line = place == Place::CommandLine;
            let relevant = verb.is_none_or(|v| key.verbs.contains(&v));
            if !relevant {
                if let (true, Some(verb)) = (on_command_line, verb) {
                    let affects = key.affects();
                    self.error(at, place, Problem::NotThisVerb { verb, affects });
                }
                continue;
            }
            let default = (key.default)();
            let changed = *shown != default;
            match key.status {
                Status::IgnoredByMaxDiffusion if changed => {
                    self.without_effect(at, place, "MaxDiffusion ignores it too".to_owned());
                }
                Status::NoEffect(reason) if changed => {
                    self.without_effect(at, place, reason.to_owned());
                }
                Status::NotYet(feature) if changed => {
                    let problem = Problem::KeyNotYet {
                        feature: feature.to_owned(),
                        default: show(&default),
                    };
                    self.error(at, place, problem);
                }
                Status::Used | Status::Ours => {
                    if let Some(condition) = key.condition
                        && (changed || on_command_line)
                        && !condition.holds(config)
                    {
                        self.without_effect(at, place, format!("it needs {condition}"));
                    }
                }
                Status::IgnoredByMaxDiffusion | Status::NoEffect(_) | Status::NotYet(_) => {}
            }
        }
    }
}

/// The type of a dotted path; `None` inside a free dict.
fn type_of(path: &str) -> Result<Option<Ty>, Problem> {
    let mut keys = Config::KEYS;
    let mut outer = String::new();
    let mut segments = path.split('.').peekable();
    while let Some(segment) = segments.next() {
        let Some(key) = find_key(keys, segment) else {
            let nearest = match (outer.as_str(), meant(segment)) {
                ("", Some(meant)) => Some(meant.to_owned()),
                _ => nearest(segment, keys.iter().map(|k| k.name)).map(|n| join(&outer, &n)),
            };
            return Err(Problem::UnknownOverride {
                key: path.to_owned(),
                nearest,
            });
        };
        if segments.peek().is_none() {
            return Ok(Some(key.ty));
        }
        outer = join(&outer, segment);
        match key.ty {
            Ty::Dict(inner) => keys = inner,
            Ty::Model(_) | Ty::Free if segments.clone().count() == 1 => return Ok(None),
            other => {
                return Err(Problem::WrongType {
                    expected: format!("{outer} without a part of its own ({other})"),
                    found: path.to_owned(),
                });
            }
        }
    }
    // `split` yields at least one segment, so the loop has returned.
    Ok(None)
}

/// Puts `value` at the path; dicts are merged entry by entry, anything else is replaced.
fn merge(into: &mut Map<String, Value>, path: &[&str], value: Value) {
    let Some((first, rest)) = path.split_first() else {
        return;
    };
    if rest.is_empty() {
        match (into.get_mut(*first), value) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                for (name, inner) in new {
                    merge(old, &[&name], inner);
                }
            }
            (_, value) => {
                into.insert((*first).to_owned(), value);
            }
        }
        return;
    }
    let slot = into
        .entry((*first).to_owned())
        .or_insert_with(|| Value::Object(Map::new()));
    if !slot.is_object() {
        *slot = Value::Object(Map::new());
    }
    if let Value::Object(inner) = slot {
        merge(inner, rest, value);
    }
}

impl ModelConfig {
    /// The dict: as written, or read from its file. `None` when unset.
    ///
    /// # Errors
    /// The file cannot be read or is not a JSON object.
    pub fn resolve(&self, key: &str) -> Result<Option<Map<String, Value>>, ConfigErrors> {
        match self {
            ModelConfig::Unset => Ok(None),
            ModelConfig::Inline(map) => Ok(Some(map.clone())),
            ModelConfig::Path(path) => super::model::read_json(Path::new(path), key).map(Some),
        }
    }
}
