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
    Quantize,
}

impl Verb {
    pub const ALL: [Verb; 6] = [
        Verb::Train,
        Verb::Generate,
        Verb::Compile,
        Verb::Lower,
        Verb::ModuleRun,
        Verb::Quantize,
    ];

    /// As typed on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Train => "train",
            Verb::Generate => "generate",
            Verb::Compile => "compile",
            Verb::Lower => "lower",
            Verb::ModuleRun => "module run",
            Verb::Quantize => "quantize",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
