//! The verbs of the command line that take a configuration.

use std::fmt;

/// A verb of the command line that takes a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Train,
    Generate,
    Compile,
    Lower,
    ModuleRun,
}

impl Verb {
    pub const ALL: [Verb; 5] = [
        Verb::Train,
        Verb::Generate,
        Verb::Compile,
        Verb::Lower,
        Verb::ModuleRun,
    ];

    /// As typed on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Train => "train",
            Verb::Generate => "generate",
            Verb::Compile => "compile",
            Verb::Lower => "lower",
            Verb::ModuleRun => "module run",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
