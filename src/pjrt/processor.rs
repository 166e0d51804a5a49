//! The processor, as far as machine code depends on it.

use std::io;
use std::path::Path;

/// Where Linux tells of the processor.
pub const CPUINFO: &str = "/proc/cpuinfo";

/// The processor's model and features; `None` where Linux tells no features.
///
/// # Errors
/// When [`CPUINFO`] cannot be read.
pub fn processor() -> io::Result<Option<String>> {
    std::fs::read_to_string(Path::new(CPUINFO)).map(|text| describe(&text))
}

/// All processors of a machine are taken for alike.
fn describe(cpuinfo: &str) -> Option<String> {
    let first = cpuinfo.split("\n\n").next()?;
    // x86's names, then arm64's.
    const MODEL: [&str; 7] = [
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "CPU implementer",
        "CPU part",
        "CPU variant",
    ];
    let mut known = Vec::new();
    let mut features = None;
    for (name, value) in first.lines().filter_map(|line| line.split_once(':')) {
        match name.trim() {
            "flags" | "Features" => {
                let mut sorted: Vec<&str> = value.split_whitespace().collect();
                sorted.sort_unstable();
                features = Some(sorted.join(" "));
            }
            name if MODEL.contains(&name) => known.push(format!("{name}: {}", value.trim())),
            _ => {}
        }
    }
    known.push(features?);
    Some(known.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processors_differ_by_any_feature_and_a_silent_one_has_none() {
        let cpuinfo = |flags: &str| {
            format!(
                "processor : 0\nmodel name\t: A\nMHz : 1\nflags\t: {flags}\n\nprocessor : 1\nmodel name : B\n"
            )
        };
        let described = |flags: &str| describe(&cpuinfo(flags));
        assert_eq!(described("fpu avx2").unwrap(), "model name: A\navx2 fpu");
        assert_ne!(described("fpu avx2"), described("fpu avx2 avx512f"));
        assert_eq!(describe("model name : A\n"), None);
    }
}
