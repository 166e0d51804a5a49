//! Environment variables that plugins read when they load.

use crate::pjrt::error::PjrtError;

/// Sets each variable that is not set.
///
/// # Errors
/// [`PjrtError::Environment`] when there is one to set and the process has other threads: they may
/// be reading the environment, from C, where nothing guards it.
pub fn set_defaults(variables: &[(&str, &str)]) -> Result<(), PjrtError> {
    let missing: Vec<_> = variables
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    // A process without /proc is not known to be alone.
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, |tasks| tasks.count());
    if threads != 1 {
        return Err(PjrtError::Environment {
            missing: missing
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
        });
    }
    for (name, value) in missing {
        // SAFETY: this is the only thread, and it starts none here: nobody reads meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_told_what_to_set() {
        // The test harness runs this beside its main thread.
        let error = set_defaults(&[("MAXDIFF_TEST_NEVER_SET", "1")]).unwrap_err();
        assert!(
            error.to_string().contains("MAXDIFF_TEST_NEVER_SET=1"),
            "{error}"
        );
        assert!(std::env::var_os("MAXDIFF_TEST_NEVER_SET").is_none());
    }

    #[test]
    fn what_is_set_is_left_alone() {
        assert!(std::env::var_os("PATH").is_some());
        set_defaults(&[("PATH", "elsewhere")]).unwrap();
        assert_ne!(std::env::var("PATH").unwrap(), "elsewhere");
    }
}
