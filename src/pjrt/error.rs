//! Errors between this program and a plugin.

use std::fmt;
use std::path::PathBuf;

/// The status codes of a plugin's errors: absl's, with absl's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl ErrorCode {
    /// The code of absl number `code`; numbers that absl does not have are [`ErrorCode::Unknown`].
    pub(super) fn from_raw(code: i32) -> Self {
        match code {
            1 => Self::Cancelled,
            3 => Self::InvalidArgument,
            4 => Self::DeadlineExceeded,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            10 => Self::Aborted,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            13 => Self::Internal,
            14 => Self::Unavailable,
            15 => Self::DataLoss,
            16 => Self::Unauthenticated,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cancelled => "cancelled",
            Self::Unknown => "unknown",
            Self::InvalidArgument => "invalid argument",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::NotFound => "not found",
            Self::AlreadyExists => "already exists",
            Self::PermissionDenied => "permission denied",
            Self::ResourceExhausted => "resource exhausted",
            Self::FailedPrecondition => "failed precondition",
            Self::Aborted => "aborted",
            Self::OutOfRange => "out of range",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::DataLoss => "data loss",
            Self::Unauthenticated => "unauthenticated",
        })
    }
}

/// A version of the PJRT C API. Within a major version, minor versions only append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ApiVersion {
    pub major: i32,
    pub minor: i32,
}

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An error of the PJRT runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PjrtError {
    /// The plugin refused or failed a call; `message` is the plugin's own text.
    #[error("{function}: {code}: {message}")]
    Plugin {
        function: &'static str,
        code: ErrorCode,
        message: String,
    },

    /// The plugin's file cannot be loaded as a shared library, or has no function table.
    #[error("cannot load the plugin {}: {reason}", path.display())]
    Load { path: PathBuf, reason: String },

    /// The file is a shared library, but not a PJRT plugin.
    #[error("{} is not a pjrt plugin: it does not export {symbol}", path.display())]
    MissingSymbol { path: PathBuf, symbol: &'static str },

    /// The plugin's function table ends before this function.
    #[error(
        "the plugin speaks pjrt api {found}, which is too old: {function} needs {needed}; install a newer plugin"
    )]
    ApiTooOld {
        function: &'static str,
        needed: ApiVersion,
        found: ApiVersion,
    },

    /// The plugin has room for this function in its table and left it empty.
    #[error("the plugin (pjrt api {found}) does not implement {function}")]
    MissingFunction {
        function: &'static str,
        found: ApiVersion,
    },

    /// The plugin is of another major version of the interface.
    #[error("{} speaks pjrt api {found}; this program speaks major version 0", path.display())]
    ApiMajorVersion { path: PathBuf, found: ApiVersion },

    /// Variables that a plugin reads must be set, and the process has threads already.
    #[error(
        "the plugin reads {} from the environment, and it is too late to set: set it before starting the program",
        missing.join(", ")
    )]
    Environment { missing: Vec<String> },

    /// The plugin answered in a way the interface does not allow.
    #[error("{function}: the plugin broke the interface: {what}")]
    Protocol {
        function: &'static str,
        what: String,
    },

    /// The optimized program is not the message the plugin says it is.
    #[error("cannot read the optimized program (format {format}): {reason}")]
    OptimizedProgram { format: String, reason: String },

    /// Host bytes do not fill the shape they are given for.
    #[error(
        "{element_type} with dimensions {dims:?} takes {expected} bytes on the host, found {found}"
    )]
    HostSize {
        element_type: &'static str,
        dims: Vec<i64>,
        expected: usize,
        found: usize,
    },

    /// A negative dimension, or an array larger than memory.
    #[error("{element_type} with dimensions {dims:?} is not an array that fits memory")]
    Dimensions {
        element_type: &'static str,
        dims: Vec<i64>,
    },

    /// This element type has no fixed size on the host.
    #[error("cannot transfer {element_type} between host and device")]
    NotTransferable { element_type: &'static str },

    /// The environment asks for a number of threads that is none.
    #[error("{variable} is '{value}', expected a whole number from 1 to {most}")]
    CpuThreads {
        variable: &'static str,
        value: String,
        most: usize,
    },

    /// A device was given where one of the same client is meant.
    #[error("device {id} is of another client than what it is used with")]
    ForeignDevice { id: i64 },

    /// Arguments that do not fit the executable's devices or each other.
    #[error("cannot execute {executable}: {what}")]
    Arguments { executable: String, what: String },
}

impl PjrtError {
    /// The plugin's status code, where the plugin raised the error.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Plugin { code, .. } => Some(*code),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_absl_numbers() {
        assert_eq!(ErrorCode::from_raw(3), ErrorCode::InvalidArgument);
        assert_eq!(ErrorCode::from_raw(16), ErrorCode::Unauthenticated);
        assert_eq!(ErrorCode::from_raw(99), ErrorCode::Unknown);
        let distinct: std::collections::HashSet<_> = (1..=16).map(ErrorCode::from_raw).collect();
        assert_eq!(distinct.len(), 16);
    }

    #[test]
    fn messages_say_what_was_needed_and_found() {
        let error = PjrtError::ApiTooOld {
            function: "PJRT_Executable_Fingerprint",
            needed: ApiVersion {
                major: 0,
                minor: 57,
            },
            found: ApiVersion {
                major: 0,
                minor: 30,
            },
        };
        let text = error.to_string();
        assert!(text.contains("0.30") && text.contains("0.57"), "{text}");
        assert!(text.contains("PJRT_Executable_Fingerprint"), "{text}");
    }
}
