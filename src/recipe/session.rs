//! The devices of this machine that `hardware` asks for.

use crate::config::{Config, DEFAULT_GPU_MEMORY_FRACTION, Hardware};
use crate::pjrt::install::{self, InstallError, Installed, PluginKind, TryLoad};
use crate::pjrt::{Kernels, NamedValue, Plugin, has_tpu};
use crate::runtime::{ExecutableCache, RuntimeError, Session};

use super::mesh::parallelism;
use super::{Notice, Notify, RecipeError};

/// A session and what to tell the user of it.
pub struct Opened {
    pub session: Session,
    /// Which hardware was taken, and why.
    pub chosen: String,
}

/// Opens the devices that `hardware` asks for. `auto` takes a TPU if there is one, then a GPU, then the CPU, and says
/// which and why; hardware without its plugin is skipped with a warning. A named kind that cannot be used is an error.
/// `try_load` is for a plugin that has not been loaded here ([`install::locate_checked`]).
///
/// # Errors
/// When the plugin is not installed, finds no device, or the parallelism does not fit the devices.
pub fn open_session(
    config: &Config,
    try_load: &TryLoad<'_>,
    notify: &mut Notify<'_>,
) -> Result<Opened, RecipeError> {
    let locate = |kind| install::locate_checked(kind, try_load);
    let named = match config.hardware {
        Hardware::Auto => None,
        Hardware::Cpu => Some(PluginKind::Cpu),
        Hardware::Tpu => Some(PluginKind::Tpu),
        Hardware::Gpu => Some(PluginKind::Cuda),
    };
    let (installed, passed) = match named {
        Some(kind) => (locate(kind).map_err(RecipeError::failed)?, Vec::new()),
        None => choose(has_hardware, locate)?,
    };
    for kind in passed.iter().filter_map(Passed::not_installed) {
        notify(Notice::Warning(&format!(
            "this machine has hardware for the {kind} plugin, which is not installed; run \
             `maxdiff-rs plugin install {kind}` to use it"
        )));
    }
    let session = open(config, &installed, notify)?;
    if session.client().plugin().kernels() == Kernels::Stale {
        notify(Notice::Warning(&format!(
            "the {kind} plugin was built from other sources than this program's, so its kernels are not used; run \
             `maxdiff-rs plugin install {kind}`",
            kind = installed.kind
        )));
    }
    let devices = session.devices().len();
    Ok(Opened {
        chosen: format!(
            "{} {} device{}, plugin {} (hardware={}{})",
            devices,
            session.client().platform_name(),
            if devices == 1 { "" } else { "s" },
            installed.version,
            config.hardware.name(),
            reasons(&passed)
        ),
        session,
    })
}

/// Why `hardware=auto` did not take a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    NoHardware(PluginKind),
    NotInstalled(PluginKind),
}

impl Passed {
    fn not_installed(&self) -> Option<PluginKind> {
        match self {
            Passed::NoHardware(_) => None,
            Passed::NotInstalled(kind) => Some(*kind),
        }
    }
}

/// The choice of `hardware=auto`, and the kinds that it skips on the way.
fn choose(
    has_hardware: impl Fn(PluginKind) -> bool,
    locate: impl Fn(PluginKind) -> Result<Installed, InstallError>,
) -> Result<(Installed, Vec<Passed>), RecipeError> {
    let mut passed = Vec::new();
    for kind in [PluginKind::Tpu, PluginKind::Cuda] {
        if !has_hardware(kind) {
            passed.push(Passed::NoHardware(kind));
            continue;
        }
        match locate(kind) {
            Ok(installed) => return Ok((installed, passed)),
            Err(InstallError::NotInstalled { .. }) => passed.push(Passed::NotInstalled(kind)),
            Err(error) => return Err(RecipeError::failed(error)),
        }
    }
    let installed = locate(PluginKind::Cpu).map_err(RecipeError::failed)?;
    Ok((installed, passed))
}

fn reasons(passed: &[Passed]) -> String {
    let mut absent = Vec::new();
    let mut reasons = Vec::new();
    for passed in passed {
        match passed {
            Passed::NoHardware(kind) => absent.push(format!("no {kind}")),
            Passed::NotInstalled(kind) => {
                reasons.push(format!("the {kind} plugin is not installed"));
            }
        }
    }
    if !absent.is_empty() {
        reasons.insert(0, format!("{} in this machine", absent.join(", ")));
    }
    if reasons.is_empty() {
        return String::new();
    }
    format!(": {}", reasons.join("; "))
}

/// Whether this machine has hardware of the plugin's kind, by its device files.
pub fn has_hardware(kind: PluginKind) -> bool {
    match kind {
        PluginKind::Cpu => true,
        PluginKind::Cuda => install::has_gpu(),
        PluginKind::Tpu => has_tpu(),
    }
}

fn open(
    config: &Config,
    installed: &Installed,
    notify: &mut Notify<'_>,
) -> Result<Session, RecipeError> {
    let plugin = Plugin::load(&installed.library).map_err(RecipeError::failed)?;
    let options = client_options(config, installed.kind)?;
    let session = Session::open(
        &plugin,
        &options,
        &parallelism(config),
        config.logical_axis_rules.clone(),
    )
    .map_err(|error| match error {
        // The mesh is the configuration's.
        RuntimeError::Shard(error) => RecipeError::usage(error),
        error if has_hardware(installed.kind) => RecipeError::failed(error),
        error => RecipeError::failed(without_hardware(config, &error)),
    })?;
    let mut session = session.with_cuda_data_dir(installed.cuda_data_dir.as_deref());
    if let Some(cache) = program_cache(&config.jax_cache_dir)
        && let Err(error) = session.keep_programs(cache)
    {
        notify(Notice::Warning(&format!(
            "{error}; compiled programs are not kept"
        )));
    }
    Ok(session)
}

/// What the plugin is told when its client is created.
fn client_options(
    config: &Config,
    kind: PluginKind,
) -> Result<Vec<(String, NamedValue)>, RecipeError> {
    if config.num_devices > 0 && kind != PluginKind::Cpu {
        return Err(RecipeError::Usage(format!(
            "num_devices={} splits a CPU into virtual devices; on {kind} all devices are used: leave it at -1",
            config.num_devices
        )));
    }
    if config.gpu_memory_fraction != DEFAULT_GPU_MEMORY_FRACTION && kind != PluginKind::Cuda {
        return Err(RecipeError::Usage(format!(
            "gpu_memory_fraction={} is for GPUs, and this runs on {kind}: leave it out",
            config.gpu_memory_fraction
        )));
    }
    Ok(match kind {
        PluginKind::Cpu => {
            let devices = config.num_devices.max(1);
            vec![("cpu_device_count".to_string(), NamedValue::Int64(devices))]
        }
        PluginKind::Cuda => {
            let fraction = config.gpu_memory_fraction as f32;
            vec![("memory_fraction".to_string(), NamedValue::Float(fraction))]
        }
        PluginKind::Tpu => Vec::new(),
    })
}

/// The error of a plugin whose hardware is not in this machine, with what to do.
fn without_hardware(config: &Config, error: &RuntimeError) -> String {
    let hardware = config.hardware.name();
    format!(
        "hardware={hardware}: this machine has none, as far as its device files tell ({error}); leave hardware=auto to use \
         what is here, or compile for hardware that is not here with `maxdiff-rs compile` and compile_topology"
    )
}

/// The cache of compiled programs that `jax_cache_dir` names; `None` where there is to be none.
pub fn program_cache(jax_cache_dir: &str) -> Option<ExecutableCache> {
    let dir = match jax_cache_dir {
        "" => return None,
        "auto" => ExecutableCache::default_dir()?,
        // As MaxDiffusion reads paths.
        path => match (path.strip_prefix("~/"), dirs::home_dir()) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => path.into(),
        },
    };
    Some(ExecutableCache::new(dir, ExecutableCache::MAX_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_told_what_their_hardware_knows() {
        let mut config = Config::default();
        let told =
            |config: &Config, kind| client_options(config, kind).map(|told| format!("{told:?}"));
        let of_kinds = |config: &Config| {
            [PluginKind::Cpu, PluginKind::Cuda, PluginKind::Tpu]
                .map(|kind| told(config, kind).is_ok())
        };
        assert_eq!(of_kinds(&config), [true; 3]);
        config.gpu_memory_fraction = 0.5;
        assert_eq!(of_kinds(&config), [false, true, false]);
        let gpu = told(&config, PluginKind::Cuda).unwrap();
        assert_eq!(gpu, "[(\"memory_fraction\", Float(0.5))]");
        config = Config::default();
        config.num_devices = 2;
        assert_eq!(of_kinds(&config), [true, false, false]);
        let cpu = told(&config, PluginKind::Cpu).unwrap();
        assert_eq!(cpu, "[(\"cpu_device_count\", Int64(2))]");
    }

    #[test]
    fn auto_takes_the_first_hardware_whose_plugin_is_here() {
        use PluginKind::{Cpu, Cuda, Tpu};
        let choose = |hardware: &[PluginKind], plugins: &[PluginKind]| {
            let locate = |kind: PluginKind| {
                let missing = InstallError::NotInstalled {
                    kind,
                    dir: "plugins".into(),
                };
                let installed = Installed {
                    kind,
                    version: "1".to_owned(),
                    library: "p.so".into(),
                    source: String::new(),
                    sha256: String::new(),
                    cuda_data_dir: None,
                    stale: false,
                };
                plugins.contains(&kind).then_some(installed).ok_or(missing)
            };
            let (taken, passed) = choose(|kind| hardware.contains(&kind), locate)?;
            Ok::<_, RecipeError>((taken.kind, reasons(&passed)))
        };
        let taken = |hardware, plugins| choose(hardware, plugins).unwrap();
        let none = ": no tpu, no cuda13 in this machine";
        assert_eq!(taken(&[], &[Cpu]), (Cpu, none.to_owned()));
        assert_eq!(taken(&[Tpu, Cuda], &[Cpu, Tpu]), (Tpu, String::new()));
        assert_eq!(
            taken(&[Cuda], &[Cpu, Tpu]),
            (
                Cpu,
                ": no tpu in this machine; the cuda13 plugin is not installed".to_owned()
            )
        );
        assert_eq!(
            taken(&[Tpu, Cuda], &[Cpu, Cuda]),
            (Cuda, ": the tpu plugin is not installed".to_owned())
        );
        let error = choose(&[Cuda], &[]).unwrap_err().to_string();
        assert!(error.contains("plugin install cpu"), "{error}");
    }
}
