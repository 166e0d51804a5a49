//! Errors of ahead-of-time compilation.

use std::sync::LazyLock;

use regex::Regex;

use crate::footprint::OutOfMemory;
use crate::lowering::LowerError;
use crate::pjrt::install::InstallError;
use crate::pjrt::{ErrorCode, PjrtError};
use crate::report::ReportError;
use crate::shard::ShardError;
use crate::topology::TopologyError;

/// Why a program could not be compiled ahead of time.
#[derive(Debug, thiserror::Error)]
pub enum AotError {
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error(transparent)]
    Pjrt(#[from] PjrtError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
}

impl AotError {
    /// Whether the model or the options are wrong, rather than a plugin, a compiler or the size of a device.
    pub fn is_usage(&self) -> bool {
        match self {
            AotError::Topology(_) | AotError::Shard(_) | AotError::Lower(_) => true,
            AotError::Install(_)
            | AotError::Pjrt(_)
            | AotError::Report(_)
            | AotError::OutOfMemory(_) => false,
        }
    }
}

/// The compiler's text, where its complaint is the device's main memory. Where it is a memory inside the chip (vmem,
/// smem), one operation asks too much of it, and none of the advice on whole programs helps.
pub(super) fn out_of_memory_message(error: &PjrtError) -> Option<&str> {
    let PjrtError::Plugin { code, message, .. } = error else {
        return None;
    };
    let memory = *code == ErrorCode::ResourceExhausted || message.contains("Ran out of memory");
    let elsewhere = memory_space(message).is_some_and(|space| space != "hbm");
    (memory && !elsewhere).then_some(message)
}

/// `Ran out of memory in memory space vmem`.
fn memory_space(message: &str) -> Option<&str> {
    static SPACE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"out of memory in memory space ([a-z_]+)").ok());
    let space = SPACE.as_ref()?.captures(message)?.get(1)?;
    Some(space.as_str())
}

/// `Used 20.31G of 15.75G hbm`.
pub(super) fn needed_memory(message: &str) -> Option<String> {
    static USED: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"Used ([0-9.]+[KMGT]) of [0-9.]+[KMGT] hbm").ok());
    Some(USED.as_ref()?.captures(message)?[1].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_figure_is_found_in_its_complaint() {
        let message = "Ran out of memory in memory space hbm. Used 30.22G of 15.75G hbm. Exceeded hbm capacity by 14.47G.";
        assert_eq!(needed_memory(message).as_deref(), Some("30.22G"));
        assert_eq!(needed_memory("no figures"), None);
    }

    #[test]
    fn only_the_main_memory_is_what_a_program_does_not_fit() {
        let told = |code, message: &str| {
            out_of_memory_message(&PjrtError::Plugin {
                function: "PJRT_Compile",
                code,
                message: message.to_owned(),
            })
            .is_some()
        };
        let (exhausted, internal) = (ErrorCode::ResourceExhausted, ErrorCode::Internal);
        assert!(told(
            internal,
            "Ran out of memory in memory space hbm. Used 30.22G of 15.75G hbm."
        ));
        assert!(told(exhausted, "out of host memory"));
        for space in ["vmem", "smem"] {
            let message = format!("Ran out of memory in memory space {space} while allocating");
            assert!(!told(exhausted, &message), "{space}");
            assert!(!told(internal, &message), "{space}");
        }
        assert!(!told(internal, "another error"));
    }
}
