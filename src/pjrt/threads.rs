//! How many threads programs on the CPU compute with.

use super::error::PjrtError;

/// The environment variable that sets the number of threads.
pub const CPU_THREADS_VARIABLE: &str = "MAXDIFF_CPU_THREADS";

/// More than this is taken for a mistake; the plugin's bound is the same.
const MOST_CPU_THREADS: usize = 1024;

/// The threads that programs on the CPU compute with: as many as `MAXDIFF_CPU_THREADS` says, or as this process may
/// use by its affinity and by the quota of its control group.
///
/// # Errors
/// [`PjrtError::CpuThreads`] when the variable is set to anything but a number from 1 to 1024.
pub fn cpu_threads() -> Result<usize, PjrtError> {
    let set =
        std::env::var_os(CPU_THREADS_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    match set {
        Some(value) if !value.is_empty() => parse(&value),
        _ => Ok(std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MOST_CPU_THREADS)),
    }
}

fn parse(value: &str) -> Result<usize, PjrtError> {
    value
        .parse()
        .ok()
        .filter(|threads| (1..=MOST_CPU_THREADS).contains(threads))
        .ok_or_else(|| PjrtError::CpuThreads {
            variable: CPU_THREADS_VARIABLE,
            value: value.to_owned(),
            most: MOST_CPU_THREADS,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_threads_is_taken_and_nonsense_is_refused_by_name() {
        assert_eq!(parse("1").unwrap(), 1);
        assert_eq!(parse("1024").unwrap(), 1024);
        for nonsense in [
            "0",
            "-1",
            "1025",
            "two",
            "1.5",
            " 2",
            "99999999999999999999",
        ] {
            let error = parse(nonsense).unwrap_err().to_string();
            let expected = format!(
                "MAXDIFF_CPU_THREADS is '{nonsense}', expected a whole number from 1 to 1024"
            );
            assert_eq!(error, expected);
        }
    }
}
