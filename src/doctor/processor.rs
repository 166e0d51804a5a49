//! The processor, and the device files of accelerators.

use std::fs;
use std::path::Path;

use crate::pjrt::{CPU_THREADS_VARIABLE, cpu_threads};

use super::Problem;

/// Processor features that decide how fast dots are, by `/proc/cpuinfo`'s names.
#[cfg(target_arch = "aarch64")]
const CPU_FEATURES: &[&str] = &["asimddp", "i8mm", "bf16", "sve"];
#[cfg(not(target_arch = "aarch64"))]
const CPU_FEATURES: &[&str] = &[
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
];

/// The processor by `/proc/cpuinfo`.
pub struct Processor {
    pub model: String,
    /// Number of threads of programs, or why it is not known.
    pub threads: Result<usize, String>,
    /// Which of the features that decide how fast dots are it has.
    pub features: Vec<(&'static str, bool)>,
}

impl Processor {
    pub(super) fn read() -> Processor {
        let text = fs::read_to_string(Path::new("/proc/cpuinfo")).unwrap_or_default();
        Processor {
            threads: cpu_threads().map_err(|error| error.to_string()),
            ..Processor::parse(&text)
        }
    }

    pub(super) fn problem(&self) -> Option<Problem> {
        let error = self.threads.as_ref().err()?;
        Some(Problem {
            what: error.clone(),
            remedy: format!("set {CPU_THREADS_VARIABLE} to a number of threads, or unset it"),
            needed: true,
        })
    }

    fn parse(text: &str) -> Processor {
        let field = |names: &[&str]| {
            text.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                names.contains(&name.trim()).then(|| value.trim())
            })
        };
        let flags: Vec<&str> = field(&["flags", "Features"])
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        Processor {
            model: field(&["model name", "CPU part"])
                .unwrap_or("unknown")
                .to_string(),
            threads: Ok(1),
            features: CPU_FEATURES
                .iter()
                .map(|name| (*name, flags.contains(name)))
                .collect(),
        }
    }
}

/// Device files of TPUs (`accel*`, numbered VFIO groups) and of NVIDIA GPUs.
pub fn device_files() -> Vec<String> {
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut found: Vec<String> = [("/dev", "accel"), ("/dev/vfio", ""), ("/dev", "nvidia")]
        .into_iter()
        .flat_map(|(folder, prefix)| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries
                .filter(move |e| numbered(&e.file_name().to_string_lossy(), prefix))
                .map(|e| e.path().display().to_string())
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_whole_words_of_the_flags() {
        let first = CPU_FEATURES[0];
        let text = format!(
            "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu {first} {}x\nFeatures\t: fp {first} {}x\n",
            CPU_FEATURES[1], CPU_FEATURES[1]
        );
        let cpu = Processor::parse(&text);
        assert_eq!(cpu.model, "A Processor");
        assert_eq!(cpu.features[0], (first, true));
        assert!(cpu.features[1..].iter().all(|(_, here)| !here));
        assert_eq!(Processor::parse("").model, "unknown");
    }
}
