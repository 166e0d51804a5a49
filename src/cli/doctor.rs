//! `doctor`: what is installed, what is wrong and the remedy.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{CliError, plugin, print};
use crate::pjrt::install::{self, InstallError, Installed, PluginKind};
use crate::pjrt::{CPU_THREADS_VARIABLE, Client, Kernels, Plugin, cpu_threads};
use crate::recipe;
use crate::runtime::{ExecutableCache, Usage};
use crate::util::files::free_space;

/// Free bytes below which an installation of the CPU plugin fails: the wheel, what is unpacked and the build.
const SPACE_TO_INSTALL: u64 = 1_600_000_000;

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

/// `doctor ...`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Load one plugin and print what it says: `doctor` runs itself so, for a plugin may end its process
    #[arg(long, hide = true, value_name = "KIND")]
    probe: Option<PluginKind>,
}

/// Something that is wrong.
struct Problem {
    what: String,
    remedy: String,
    /// Whether the program cannot do its work because of it.
    needed: bool,
}

/// Runs `doctor`: code 0 when programs run on this machine, 1 when something that is needed is wrong.
///
/// # Errors
/// The report cannot be written.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, CliError> {
    if let Some(kind) = args.probe {
        let probe = Probe::here(kind)?;
        let text = serde_json::to_string(&probe).map_err(CliError::failed)?;
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut problems = Vec::new();
    let folder = Folder::look();
    let plugins: Vec<PluginState> = PluginKind::ALL.map(PluginState::look).into();
    let tools = Tool::look();
    for state in &plugins {
        state.judge(&mut problems);
    }
    let installed = |kind| plugins.iter().any(|p| p.kind == kind && p.found.is_some());
    folder.judge(!installed(PluginKind::Cpu), &mut problems);
    judge_tools(&tools, !installed(PluginKind::Cpu), &mut problems);
    let cpu = Processor::look();
    cpu.judge(&mut problems);
    let hardware = device_files();
    let programs = Programs::look();
    let ok = !problems.iter().any(|p| p.needed);

    if args.json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ok": ok,
            "problems": problems.iter().map(|p| json!({
                "what": p.what, "remedy": p.remedy, "needed": p.needed,
            })).collect::<Vec<_>>(),
            "plugin_folder": folder.to_json(),
            "program_cache": programs.to_json(),
            "plugins": plugins.iter().map(PluginState::to_json).collect::<Vec<_>>(),
            "device_files": hardware,
            "processor": {
                "model": cpu.model,
                "threads": cpu.threads.as_ref().ok(),
                "features": cpu.features.iter().map(|(name, here)| ((*name).to_string(), json!(here)))
                    .collect::<Map<String, Value>>(),
            },
            "tools": tools.iter().map(|t| json!({
                "name": t.name, "found": t.found.as_ref().ok(), "needed_for": t.purpose,
                "package": t.package,
            })).collect::<Vec<_>>(),
        });
        print(&report.to_string())?;
    } else {
        print(&describe(
            &folder, &plugins, &programs, &hardware, &cpu, &tools, &problems,
        ))?;
    }
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn describe(
    folder: &Folder,
    plugins: &[PluginState],
    programs: &Programs,
    hardware: &[String],
    cpu: &Processor,
    tools: &[Tool],
    problems: &[Problem],
) -> String {
    let mut lines = vec![format!("maxdiff-rs {}", env!("CARGO_PKG_VERSION"))];
    lines.push(format!("plugins in {}", folder.describe()));
    lines.extend(plugins.iter().map(PluginState::describe));
    lines.push(format!("compiled programs in {}", programs.describe()));
    let files = if hardware.is_empty() {
        "none".to_string()
    } else {
        hardware.join(", ")
    };
    lines.push(format!("accelerator device files: {files}"));
    let has = |wanted: bool| {
        let names = cpu.features.iter().filter(|(_, here)| *here == wanted);
        names.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
    };
    let threads = match &cpu.threads {
        Ok(threads) => format!("computes with {threads} threads"),
        Err(_) => "number of threads not known, see below".to_string(),
    };
    lines.push(format!("processor: {}, {threads}", cpu.model));
    lines.push(format!("  has {}; lacks {}", has(true), has(false)));
    lines.push("tools".to_string());
    for tool in tools {
        let found = match &tool.found {
            Ok(version) => version.clone(),
            Err(reason) => format!("not found: {reason}"),
        };
        lines.push(format!("  {:<8} {found}", tool.name));
    }
    for problem in problems {
        let word = if problem.needed { "wrong" } else { "note" };
        lines.push(format!("{word}: {}; {}", problem.what, problem.remedy));
    }
    if !problems.iter().any(|p| p.needed) {
        lines.push("ready: programs run on this machine's CPU".to_string());
    }
    lines.join("\n")
}

/// The folder that plugins are installed in.
struct Folder {
    path: Result<PathBuf, String>,
    writable: bool,
    free: Option<u64>,
}

impl Folder {
    fn look() -> Folder {
        let path = match install::plugin_dir() {
            Ok(path) => path,
            Err(error) => {
                return Folder {
                    path: Err(error.to_string()),
                    writable: false,
                    free: None,
                };
            }
        };
        // Before the first installation the folder is made inside one of these.
        let there = path.ancestors().find(|p| p.exists());
        let writable = there.is_some_and(|p| {
            use rustix::fs::Access;
            p.is_dir() && rustix::fs::access(p, Access::WRITE_OK | Access::EXEC_OK).is_ok()
        });
        let free = there.and_then(free_space);
        Folder {
            path: Ok(path),
            writable,
            free,
        }
    }

    fn describe(&self) -> String {
        match &self.path {
            Err(error) => error.clone(),
            Ok(path) => {
                let writable = if self.writable { "" } else { ", not writable" };
                let free = self.free.map_or_else(String::new, |free| {
                    format!(", {:.1} GB free", free as f64 / 1e9)
                });
                format!("{}{writable}{free}", path.display())
            }
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "path": self.path.as_ref().ok().map(|path| path.display().to_string()),
            "writable": self.writable,
            "free_bytes": self.free,
        })
    }

    fn judge(&self, to_install: bool, problems: &mut Vec<Problem>) {
        let remedy = format!(
            "set {} to a folder with {:.1} GB free that you may write in",
            install::PLUGIN_DIR_VARIABLE,
            SPACE_TO_INSTALL as f64 / 1e9
        );
        let what = match &self.path {
            Err(error) => error.clone(),
            Ok(path) if !self.writable => format!("{} is not writable", path.display()),
            Ok(path) if self.free.is_some_and(|f| f < SPACE_TO_INSTALL) => {
                format!("{} has too little space for a plugin", path.display())
            }
            Ok(_) => return,
        };
        problems.push(Problem {
            what,
            remedy,
            needed: to_install,
        });
    }
}

/// The folder that compiled programs are kept in where the configuration names no other, and what is in it.
struct Programs(Result<(PathBuf, Usage), String>);

impl Programs {
    fn look() -> Programs {
        let cache = recipe::program_cache("auto")
            .ok_or_else(|| "no folder: no cache directory is known for this user".to_string());
        Programs(cache.and_then(|cache| match cache.usage() {
            Ok(usage) => Ok((cache.dir().to_path_buf(), usage)),
            Err(error) => Err(error.to_string()),
        }))
    }

    fn describe(&self) -> String {
        match &self.0 {
            Err(error) => error.clone(),
            Ok((path, usage)) => format!(
                "{}: {}, {:.2} of at most {:.0} GB",
                path.display(),
                usage.programs,
                usage.bytes as f64 / 1e9,
                ExecutableCache::MAX_BYTES as f64 / 1e9,
            ),
        }
    }

    fn to_json(&self) -> Value {
        let found = self.0.as_ref().ok();
        json!({
            "path": found.map(|(path, _)| path.display().to_string()),
            "programs": found.map(|(_, usage)| usage.programs),
            "bytes": found.map(|(_, usage)| usage.bytes),
            "max_bytes": ExecutableCache::MAX_BYTES,
        })
    }
}

/// What is known of one kind of plugin.
struct PluginState {
    kind: PluginKind,
    found: Option<Installed>,
    /// Whether its files are not those that were installed.
    changed: bool,
    /// What it says when loaded, or why it cannot be; `None` when it is not installed.
    loaded: Option<Result<Probe, String>>,
}

/// What a loaded plugin says.
#[derive(Serialize, Deserialize)]
struct Probe {
    api_version: String,
    attributes: BTreeMap<String, String>,
    kernels: Kernels,
    /// The client's devices, where this machine has hardware for it.
    devices: Vec<String>,
}

impl Probe {
    /// Loads the plugin in this process.
    fn here(kind: PluginKind) -> Result<Probe, CliError> {
        let library = install::locate(kind).map_err(CliError::failed)?.library;
        let plugin = Plugin::load(library).map_err(CliError::failed)?;
        let mut devices = Vec::new();
        if recipe::has_hardware(kind) {
            let client = Client::create(&plugin, &[]).map_err(CliError::failed)?;
            let found = client.devices().iter();
            devices.extend(found.map(|d| format!("{} {}", d.description().kind, d.id())));
        }
        let attributes = plugin.attributes().iter();
        Ok(Probe {
            api_version: plugin.api_version().to_string(),
            attributes: attributes
                .map(|(name, value)| (name.clone(), value.to_string()))
                .collect(),
            kernels: plugin.kernels(),
            devices,
        })
    }

    /// Loads the plugin in a process of its own: on a processor or driver that it is not made for, a plugin ends
    /// the process instead of returning an error.
    fn apart(kind: PluginKind) -> Result<Probe, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let output = Command::new(program)
            .args(["doctor", "--quiet", "--probe", kind.name()])
            .stdin(Stdio::null())
            .output()
            .map_err(|e| e.to_string())?;
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).map_err(|e| e.to_string());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let error = said.lines().find_map(|l| l.strip_prefix("error: "));
        Err(match error {
            Some(error) => error.to_string(),
            None => format!(
                "it ended its process ({}), saying last: {}",
                output.status,
                said.lines().next_back().unwrap_or("nothing")
            ),
        })
    }
}

impl PluginState {
    fn look(kind: PluginKind) -> PluginState {
        let located = install::locate(kind);
        let listed = || {
            let plugins = install::list().ok()?;
            plugins.into_iter().find(|p| p.kind == kind)
        };
        let changed = matches!(located, Err(InstallError::LibraryChanged { .. }));
        let (found, loaded) = match located {
            Ok(found) => (Some(found), Some(Probe::apart(kind))),
            Err(InstallError::NotInstalled { .. }) => (None, None),
            Err(error) => (listed(), Some(Err(error.to_string()))),
        };
        PluginState {
            kind,
            found,
            changed,
            loaded,
        }
    }

    fn remedy(&self) -> String {
        match &self.loaded {
            // libtpu serves one process at a time where there is a TPU.
            Some(Err(error)) if error.contains("libtpu_lockfile") => {
                "end the other program that uses the TPU; if there is none, remove /tmp/libtpu_lockfile"
                    .to_string()
            }
            // A plugin that is the one installed and cannot be loaded is not mended by installing it anew.
            _ => match &self.found {
                Some(found) if self.changed => format!("run `{}`", found.install_command()),
                _ => format!("run `maxdiff-rs plugin install {}`", self.kind),
            },
        }
    }

    fn judge(&self, problems: &mut Vec<Problem>) {
        let mut add = |what: String, needed: bool| {
            problems.push(Problem {
                what,
                remedy: self.remedy(),
                needed,
            });
        };
        match &self.loaded {
            None if self.kind == PluginKind::Cpu => {
                add("the cpu plugin is not installed".to_string(), true);
            }
            // `hardware=auto` passes over an accelerator without its plugin, and takes the processor.
            None if recipe::has_hardware(self.kind) => add(
                format!(
                    "this machine has hardware for the {} plugin, which is not installed",
                    self.kind
                ),
                false,
            ),
            None => {}
            Some(Err(error)) => add(
                format!("the {} plugin cannot be used: {error}", self.kind),
                true,
            ),
            Some(Ok(_)) if self.found.as_ref().is_some_and(|f| f.stale) => add(
                format!(
                    "the {} plugin was built from other sources than this program's, so its kernels are not used",
                    self.kind
                ),
                false,
            ),
            Some(Ok(_)) => {}
        }
    }

    fn describe(&self) -> String {
        let state = match (&self.found, &self.loaded) {
            (Some(found), Some(Ok(probe))) => format!(
                "{}, PJRT API {}{}, {}, devices: {}{}",
                found.version,
                probe.api_version,
                if found.stale { ", stale" } else { "" },
                found.library.display(),
                if probe.devices.is_empty() {
                    "none".to_string()
                } else {
                    probe.devices.join(", ")
                },
                kernels(&probe.kernels)
                    .map_or_else(String::new, |text| format!("\n           {text}")),
            ),
            (_, Some(Err(_))) => "cannot be used, see below".to_string(),
            (_, Some(Ok(_)) | None) => "not installed".to_string(),
        };
        format!("  {:<8} {state}", self.kind.name())
    }

    fn to_json(&self) -> Value {
        let (probe, error) = match &self.loaded {
            Some(Ok(probe)) => (Some(probe), None),
            Some(Err(error)) => (None, Some(error)),
            None => (None, None),
        };
        json!({
            "kind": self.kind,
            "installed": self.found.as_ref().map(plugin::describe),
            "pinned_version": self.kind.pinned_version(),
            "api_version": probe.map(|p| &p.api_version),
            "attributes": probe.map(|p| &p.attributes),
            "devices": probe.map(|p| &p.devices),
            "kernels": probe.map(|p| &p.kernels),
            "error": error,
        })
    }
}

/// Which of a plugin's kernels programs call, or why none; `None` for a plugin without any.
fn kernels(kernels: &Kernels) -> Option<String> {
    match kernels {
        Kernels::None => None,
        Kernels::Used(names) => Some(format!("kernels: {}", names.join(" "))),
        Kernels::Unsupported(missing) => Some(format!(
            "kernels: none, the processor lacks {}",
            missing.join(" ")
        )),
        Kernels::Stale => Some("kernels: none, the plugin is stale".to_string()),
    }
}

/// Device files of TPUs (`accel*`, numbered VFIO groups) and of NVIDIA GPUs.
fn device_files() -> Vec<String> {
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

/// A program that installing plugins needs.
struct Tool {
    name: &'static str,
    purpose: &'static str,
    /// Debian's package.
    package: &'static str,
    /// Its version, or why it cannot be run.
    found: Result<String, String>,
}

impl Tool {
    fn look() -> Vec<Tool> {
        let tool = |name, purpose, package, command: &[&str]| Tool {
            name,
            purpose,
            package,
            found: first_line(command),
        };
        vec![
            tool(
                "python3",
                "download plugins",
                "python3",
                &["python3", "--version"],
            ),
            tool(
                "pip",
                "download plugins",
                "python3-pip",
                &["python3", "-m", "pip", "--version"],
            ),
            tool("g++", "build the cpu plugin", "g++", &["g++", "--version"]),
        ]
    }
}

fn first_line(command: &[&str]) -> Result<String, String> {
    let [program, arguments @ ..] = command else {
        return Err("no command".to_string());
    };
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(|e| e.to_string())?;
    let line = |bytes: &[u8], last: bool| {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.lines().filter(|l| !l.trim().is_empty());
        let line = if last {
            lines.next_back()
        } else {
            lines.next()
        };
        line.unwrap_or_default().to_string()
    };
    if output.status.success() {
        Ok(line(&output.stdout, false))
    } else {
        Err(line(&output.stderr, true))
    }
}

fn judge_tools(tools: &[Tool], to_install: bool, problems: &mut Vec<Problem>) {
    let missing: Vec<&Tool> = tools.iter().filter(|t| t.found.is_err()).collect();
    if missing.is_empty() {
        return;
    }
    let names: Vec<String> = missing
        .iter()
        .map(|t| format!("{} (to {})", t.name, t.purpose))
        .collect();
    let packages: Vec<&str> = missing.iter().map(|t| t.package).collect();
    problems.push(Problem {
        what: format!("missing: {}", names.join(", ")),
        remedy: format!(
            "run `sudo apt-get update && sudo apt-get install --yes {}`",
            packages.join(" ")
        ),
        needed: to_install,
    });
}

/// The processor by `/proc/cpuinfo`.
struct Processor {
    model: String,
    /// That programs compute with, or why it is not known.
    threads: Result<usize, String>,
    features: Vec<(&'static str, bool)>,
}

impl Processor {
    fn look() -> Processor {
        let text = fs::read_to_string(Path::new("/proc/cpuinfo")).unwrap_or_default();
        Processor {
            threads: cpu_threads().map_err(|error| error.to_string()),
            ..Processor::parse(&text)
        }
    }

    fn judge(&self, problems: &mut Vec<Problem>) {
        if let Err(error) = &self.threads {
            problems.push(Problem {
                what: error.clone(),
                remedy: format!("set {CPU_THREADS_VARIABLE} to a number of threads, or unset it"),
                needed: true,
            });
        }
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

    #[test]
    fn missing_tools_are_named_with_one_command() {
        let tool = |name, package, found: Result<&str, &str>| Tool {
            name,
            purpose: "work",
            package,
            found: found.map(str::to_string).map_err(str::to_string),
        };
        let tools = [
            tool("python3", "python3", Ok("Python 3.12")),
            tool("pip", "python3-pip", Err("No module named pip")),
            tool("g++", "g++", Err("not found")),
        ];
        let mut problems = Vec::new();
        judge_tools(&tools, true, &mut problems);
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].what, "missing: pip (to work), g++ (to work)");
        assert_eq!(
            problems[0].remedy,
            "run `sudo apt-get update && sudo apt-get install --yes python3-pip g++`"
        );
        assert!(problems[0].needed);
        problems.clear();
        judge_tools(&tools[..1], true, &mut problems);
        assert!(problems.is_empty());
    }

    #[test]
    fn a_command_that_fails_tells_why() {
        assert!(first_line(&["maxdiff-no-such-program"]).is_err());
        let failed = first_line(&["sh", "-c", "echo first >&2; echo last >&2; exit 3"]);
        assert_eq!(failed, Err("last".to_string()));
        assert_eq!(
            first_line(&["sh", "-c", "echo one; echo two"]),
            Ok("one".to_string())
        );
    }
}
