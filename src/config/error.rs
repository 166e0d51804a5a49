//! Problems of a configuration, with their place.

use std::fmt;

use super::verb::Verb;

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A `key=value` argument.
    CommandLine,
    /// A line of the configuration file, counted from 1; 0 means the file as a whole.
    File { path: String, line: u64 },
    /// Not written anywhere: the default of the schema.
    Default,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::CommandLine => f.write_str("command line"),
            Place::File { path, line: 0 } => f.write_str(path),
            Place::File { path, line } => write!(f, "{path}:{line}"),
            Place::Default => f.write_str("default"),
        }
    }
}

/// A problem, without its key and place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the configuration: {0}")]
    Read(String),
    /// The text is not YAML, or is outside the limits on size and nesting.
    #[error("not valid YAML: {0}")]
    Yaml(String),
    /// A command-line word that should have been `key=value`.
    #[error("expected key=value{advice}")]
    NotAnOverride { advice: String },
    /// The command line names a key that the schema does not have. The first sentence is
    /// MaxDiffusion's own.
    #[error("Key {key} was passed at the command line but isn't in config.{}", question(.nearest))]
    UnknownOverride {
        key: String,
        nearest: Option<String>,
    },
    /// The file names a key that the schema does not have.
    #[error("no such key{}", hint(.nearest))]
    UnknownKey { nearest: Option<String> },
    /// The same key stands twice in one mapping, with different values.
    #[error("given twice with different values (first on line {first}); keep one")]
    GivenTwice { first: u64 },
    /// The value has another type than the schema says.
    #[error("expected {expected}, found {found}")]
    WrongType { expected: String, found: String },
    /// The value is not one of a closed set.
    #[error("{found} is not a valid value; valid: {valid}{}", hint(.nearest))]
    NotAllowed {
        found: String,
        valid: String,
        nearest: Option<String>,
    },
    /// A value that MaxDiffusion knows and this program does not have yet.
    #[error("{found} is a MaxDiffusion value that is not here yet; valid: {valid}")]
    ValueNotYet { found: String, valid: String },
    /// The recipe is for a model of a family that is known and not built.
    #[error("{found} is {family}, which is not here yet; supported are {supported}")]
    UnsupportedFamily {
        found: String,
        family: &'static str,
        supported: String,
    },
    /// A number outside its range.
    #[error("{found} is out of range: expected {range}")]
    OutOfRange { found: String, range: String },
    /// A MaxDiffusion key whose feature does not exist here yet was changed.
    #[error("{feature} is not here yet: remove the key or set it to {default}")]
    KeyNotYet { feature: String, default: String },
    /// The option would be accepted and change nothing.
    #[error("has no effect: {0}")]
    NoEffect(String),
    /// The option is for other verbs.
    #[error("has no effect on `{verb}`; it affects {affects}")]
    NotThisVerb { verb: Verb, affects: String },
    /// The option is for the verb's other program.
    #[error("has no effect on `{verb} --step {step}`; it affects --step {other}")]
    NotThisStep {
        verb: Verb,
        step: &'static str,
        other: &'static str,
    },
    /// Values that are right one by one and wrong together. `keys` are those involved.
    #[error("{message}")]
    Conflict { keys: Vec<String>, message: String },
}

/// The problems inside one configuration, by dotted path.
pub(super) type Problems = Vec<(String, Problem)>;

fn hint(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map_or_else(String::new, |n| format!("; did you mean {n}?"))
}

fn question(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map_or_else(String::new, |n| format!(" Did you mean {n}?"))
}

/// One thing that is wrong: the key (dotted for nested keys, empty for the file as a whole), the
/// place and the problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    pub key: String,
    pub place: Place,
    pub problem: Problem,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConfigError {
            key,
            place,
            problem,
        } = self;
        match problem {
            // MaxDiffusion's sentence names the key and the place itself.
            Problem::UnknownOverride { .. } => write!(f, "{problem}"),
            _ if *place == Place::Default => write!(f, "{key}: {problem}"),
            _ if key.is_empty() => write!(f, "{place}: {problem}"),
            _ => write!(f, "{place}: {key}: {problem}"),
        }
    }
}

/// Everything that is wrong with one configuration: the file's errors by line, then those of the
/// command line. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl std::error::Error for ConfigErrors {}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        ConfigErrors(vec![error])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.0.as_slice() {
            return write!(f, "{only}");
        }
        write!(f, "{} errors in the configuration:", self.0.len())?;
        for error in &self.0 {
            write!(f, "\n  {error}")?;
        }
        Ok(())
    }
}
