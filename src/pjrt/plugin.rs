//! Plugins, and what must be set before one is loaded.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::captured::captured;
use super::error::{ApiVersion, PjrtError};
use super::ffi::{self, Api};
use super::install::sources_sha256;
use super::values::NamedValue;

/// A loaded PJRT plugin. Clones are the same plugin.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<Inner>,
}

struct Inner {
    api: Api,
    path: PathBuf,
    attributes: BTreeMap<String, NamedValue>,
}

/// Plugins by canonical path: each library is loaded and initialized once in a process.
static LOADED: LazyLock<Mutex<HashMap<PathBuf, Plugin>>> = LazyLock::new(Mutex::default);

impl Plugin {
    /// Loads the plugin at `path`, or returns it where this process has loaded it already. It is
    /// never unloaded.
    ///
    /// Call [`prepare_process`] before the first load: libtpu reads the environment as it loads.
    ///
    /// The library's code runs with the rights of this process: load what the user named.
    ///
    /// # Errors
    /// The file is missing or not a library, is not a plugin, or speaks a version of the interface
    /// with another function table than this program's.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, PjrtError> {
        let path = path.as_ref();
        let path = path.canonicalize().map_err(|error| PjrtError::Load {
            path: path.to_path_buf(),
            reason: error.to_string(),
        })?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plugin) = loaded.get(&path) {
            return Ok(plugin.clone());
        }
        let api = match path.file_name().is_some_and(|name| name == "libtpu.so") {
            true => captured(|| ffi::keeping_sigterm(|| ffi::load(&path)))?,
            false => ffi::load(&path)?,
        };
        let attributes = api.attributes()?;
        let plugin = Self {
            inner: Arc::new(Inner {
                api,
                path: path.clone(),
                attributes,
            }),
        };
        loaded.insert(path, plugin.clone());
        Ok(plugin)
    }

    /// Where the plugin was loaded from.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The version of the PJRT C API that the plugin speaks.
    pub fn api_version(&self) -> ApiVersion {
        self.inner.api.version()
    }

    /// The plugin's attributes: `xla_version`, `stablehlo_current_version`,
    /// `stablehlo_minimum_version` and the like.
    pub fn attributes(&self) -> &BTreeMap<String, NamedValue> {
        &self.inner.attributes
    }

    /// Which of its own kernels programs may call.
    pub fn kernels(&self) -> Kernels {
        Kernels::announced(self.attributes(), &sources_sha256())
    }

    /// Whether it was built from sources of this program, in this version or another.
    pub(super) fn is_own(&self) -> bool {
        self.attributes().contains_key(SOURCES)
    }

    pub(super) fn api(&self) -> Api {
        self.inner.api
    }
}

/// The attribute that names the instruction set of a plugin's kernels.
pub const ISA: &str = "maxdiff_isa";

/// The attributes that list the instruction sets of a plugin's kernels, from the lowest, separated by commas: those that
/// this machine can use, and the others. The former include plain C++ with the arithmetic of others, for tests alone.
pub const USABLE_ISAS: &str = "maxdiff_usable_isas";
pub const UNUSABLE_ISAS: &str = "maxdiff_unusable_isas";

/// The environment variable by which the CPU plugin takes another instruction set than the highest.
pub const ISA_VARIABLE: &str = "MAXDIFF_CPU_ISA";

/// The attribute that has the SHA-256 of a plugin's sources.
const SOURCES: &str = "maxdiff_sources";

/// The kernels that a plugin has beside its compiler, and whether programs may call them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernels {
    /// The plugin has none, as on every accelerator.
    None,
    /// They are used: the custom calls' targets.
    Used(Vec<String>),
    /// The processor lacks these features, by the names of `/proc/cpuinfo`.
    Unsupported(Vec<String>),
    /// The plugin was built from other sources than this program's, so what its kernels take is not known.
    Stale,
}

impl Kernels {
    /// Whether programs may call them.
    pub fn are_used(&self) -> bool {
        matches!(self, Self::Used(_))
    }

    /// The kernels that a plugin's attributes announce, for a program whose plugin sources have the hash `own`.
    fn announced(attributes: &BTreeMap<String, NamedValue>, own: &str) -> Self {
        let list = |name| match attributes.get(name) {
            Some(NamedValue::String(text)) if !text.is_empty() => {
                text.split(',').map(str::to_owned).collect()
            }
            _ => Vec::new(),
        };
        match attributes.get(SOURCES) {
            Some(NamedValue::String(sources)) if sources == own => {}
            // Plugins of earlier versions had a number there.
            None if !attributes.contains_key("maxdiff_kernels") => return Self::None,
            _ => return Self::Stale,
        }
        let missing = list("maxdiff_missing_features");
        match missing.is_empty() {
            true => Self::Used(list("maxdiff_kernels")),
            false => Self::Unsupported(missing),
        }
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("path", &self.inner.path)
            .field("api_version", &self.api_version())
            .finish()
    }
}

/// libtpu logs its start at lower levels.
const QUIET: &[(&str, &str)] = &[("TPU_MIN_LOG_LEVEL", "2")];

/// Variables for libtpu on a machine without a TPU: without them it asks a metadata server that is
/// not there what machine this is, and complains; and it keeps a lock that only one process at a
/// time may hold, which guards a device that is not there. The accelerator type stands for this
/// machine alone; topologies do not depend on it.
const WITHOUT_TPU: &[(&str, &str)] = &[
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_ACCELERATOR_TYPE", "v5litepod-1"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
];

/// Sets the environment variables that plugins read, where the user has not set them.
///
/// Call it first in `main`, before any thread is started.
///
/// # Errors
/// [`PjrtError::Environment`] when a variable is to be set and the process has threads already.
pub fn prepare_process() -> Result<(), PjrtError> {
    let mut variables = QUIET.to_vec();
    if !has_tpu() {
        variables.extend_from_slice(WITHOUT_TPU);
    }
    ffi::set_defaults(&variables)
}

/// Whether this machine has a TPU: by its PCI device, or by the file of Google's own driver, which containers may
/// see without the PCI bus. A VFIO group tells nothing: any device that is passed through has one.
pub fn has_tpu() -> bool {
    has_tpu_device(Path::new("/sys/bus/pci/devices")) || Path::new("/dev/accel0").exists()
}

/// Whether a PCI device of Google's that is neither network nor storage is among these: on
/// Google's cloud those two come with every virtual machine.
fn has_tpu_device(devices: &Path) -> bool {
    let Ok(devices) = std::fs::read_dir(devices) else {
        return false;
    };
    devices.flatten().any(|device| {
        let read = |name| std::fs::read_to_string(device.path().join(name)).unwrap_or_default();
        read("vendor").trim() == "0x1ae0"
            && !matches!(read("class").trim().get(..4), Some("0x01" | "0x02"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_used_only_of_a_plugin_of_the_same_sources() {
        let announced = |attributes: &[(&str, &str)]| {
            let attributes = attributes.iter().map(|(name, value)| {
                let value = NamedValue::String((*value).to_string());
                ((*name).to_string(), value)
            });
            Kernels::announced(&attributes.collect(), "ab12")
        };
        let kernels = ("maxdiff_kernels", "maxdiff.contract,maxdiff.geglu");
        let missing = ("maxdiff_missing_features", "");
        let own = ("maxdiff_sources", "ab12");
        let names = vec!["maxdiff.contract".to_string(), "maxdiff.geglu".to_string()];
        assert_eq!(announced(&[own, kernels, missing]), Kernels::Used(names));
        let other = ("maxdiff_sources", "ab13");
        assert_eq!(announced(&[other, kernels, missing]), Kernels::Stale);
        assert_eq!(announced(&[kernels, missing]), Kernels::Stale);
        let missing = ("maxdiff_missing_features", "avx2,fma");
        assert_eq!(
            announced(&[own, ("maxdiff_kernels", ""), missing]),
            Kernels::Unsupported(vec!["avx2".to_string(), "fma".to_string()])
        );
        assert_eq!(announced(&[("xla_version", "2")]), Kernels::None);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Plugin::load("/nowhere/pjrt_plugin.so").unwrap_err();
        assert!(matches!(error, PjrtError::Load { .. }), "{error}");
        assert!(
            error.to_string().contains("/nowhere/pjrt_plugin.so"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_is_no_library_is_refused_with_the_loaders_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plugin.so");
        std::fs::write(&path, "not a library").unwrap();
        let error = Plugin::load(&path).unwrap_err();
        let PjrtError::Load { reason, .. } = &error else {
            panic!("{error}")
        };
        assert!(reason.contains("plugin.so"), "{reason}");
    }

    #[test]
    fn a_library_that_is_no_plugin_is_refused() {
        // The C library is a library on every machine that runs this.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last());
        let libc = libc
            .into_iter()
            .find(|path| path.contains("libc.so"))
            .unwrap();
        let error = Plugin::load(libc).unwrap_err();
        assert!(
            matches!(
                error,
                PjrtError::MissingSymbol {
                    symbol: "GetPjrtApi",
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn a_tpu_is_told_from_a_cloud_machines_network_card() {
        let root = tempfile::tempdir().unwrap();
        let add = |name: &str, vendor: &str, class: &str| {
            let device = root.path().join(name);
            std::fs::create_dir(&device).unwrap();
            std::fs::write(device.join("vendor"), vendor).unwrap();
            std::fs::write(device.join("class"), class).unwrap();
        };
        add("0000:00:00.0", "0x8086\n", "0x120000\n");
        add("0000:00:01.0", "0x1ae0\n", "0x020000\n");
        assert!(!has_tpu_device(root.path()));
        add("0000:00:02.0", "0x1ae0\n", "0x120000\n");
        assert!(has_tpu_device(root.path()));
        assert!(!has_tpu_device(&root.path().join("nowhere")));
    }
}
