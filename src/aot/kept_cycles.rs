//! Cycles of simulated kernels, kept on disk: a compiler tells the same of the same module.

use crate::runtime::{CacheKey, ExecutableCache};
use crate::topology::Chip;

/// Bytes of the folder, at most: those of some 10,000 simulations.
const MOST_BYTES: u64 = 1 << 20;
/// The folder, in that of compiled programs.
const FOLDER: &str = "cycles";
/// What else the compiler reads.
const VARIABLE: &str = "LIBTPU_INIT_ARGS";

/// What one build of the compiler told of kernels. Like the cache of programs it makes a run faster or has no effect.
#[derive(Debug, Clone)]
pub struct KeptCycles {
    folder: ExecutableCache,
    /// The compiler's own description of its build.
    compiler: String,
}

impl KeptCycles {
    /// Those in the cache `programs`.
    pub fn new(programs: &ExecutableCache, compiler: &str) -> KeptCycles {
        KeptCycles {
            folder: ExecutableCache::new(programs.dir().join(FOLDER), MOST_BYTES),
            compiler: compiler.to_owned(),
        }
    }

    /// The cycles of a StableHLO module's operations together, if they were simulated before.
    pub fn read(&self, chip: Chip, stablehlo: &str) -> Option<u64> {
        let kept = self.folder.read(&self.key(chip, stablehlo));
        let kept = kept.unwrap_or_else(|error| {
            tracing::debug!("{error}; the kernel is simulated again");
            None
        });
        Some(u64::from_le_bytes(kept?.try_into().ok()?))
    }

    /// Keeps the cycles of a module.
    pub fn write(&self, chip: Chip, stablehlo: &str, cycles: u64) {
        let key = self.key(chip, stablehlo);
        if let Err(error) = self.folder.write(&key, &cycles.to_le_bytes()) {
            tracing::debug!("{error}; cycles are not kept");
        }
    }

    fn key(&self, chip: Chip, stablehlo: &str) -> CacheKey {
        let told = format!("{:?}", std::env::var_os(VARIABLE));
        CacheKey::of(&[
            FOLDER.as_bytes(),
            self.compiler.as_bytes(),
            told.as_bytes(),
            format!("{chip:?}").as_bytes(),
            stablehlo.as_bytes(),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_are_kept_for_one_compiler_chip_and_module() {
        let folder = tempfile::tempdir().unwrap();
        let programs = ExecutableCache::new(folder.path(), 1 << 20);
        let kept = KeptCycles::new(&programs, "libtpu 1");
        assert_eq!(kept.read(Chip::V5e, "module"), None);
        kept.write(Chip::V5e, "module", 3179);
        assert_eq!(kept.read(Chip::V5e, "module"), Some(3179));
        assert_eq!(kept.read(Chip::V6e, "module"), None);
        assert_eq!(kept.read(Chip::V5e, "other module"), None);
        let other = KeptCycles::new(&programs, "libtpu 2");
        assert_eq!(other.read(Chip::V5e, "module"), None);
        // It is no program.
        assert_eq!(programs.usage().unwrap().programs, 0);
    }

    #[test]
    fn a_folder_that_cannot_be_used_keeps_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let kept = KeptCycles::new(&ExecutableCache::new(file.path(), 1 << 20), "libtpu 1");
        kept.write(Chip::V5e, "module", 3179);
        assert_eq!(kept.read(Chip::V5e, "module"), None);
    }
}
