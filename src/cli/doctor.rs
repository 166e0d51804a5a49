//! `doctor`: what is installed, what is wrong and how to fix it.

use std::process::{Command, ExitCode, Output, Stdio};

use clap::Args;
use serde_json::{Map, Value, json};

use super::{CliError, plugin, print};
use crate::doctor::{
    Diagnosis, PluginFolder, PluginState, Probe, Problem, Processor, ProgramFolder, Tool,
};
use crate::pjrt::install::{PluginKind, Trial};
use crate::pjrt::{ISA, Kernels};
use crate::runtime::ExecutableCache;

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

/// Runs `doctor`: code 0 when programs run on this machine, 1 when something that is needed is wrong.
///
/// # Errors
/// The report cannot be written.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, CliError> {
    if let Some(kind) = args.probe {
        let probe = Probe::new(kind)?;
        let text = serde_json::to_string(&probe).map_err(CliError::failed)?;
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let found = Diagnosis::new(&probe);
    let text = match args.json {
        true => report(&found).to_string(),
        false => describe(&found),
    };
    print(&text)?;
    Ok(match found.is_ready() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Loads the plugin in a process of its own: on a processor or driver that it is not made for, a plugin ends
/// the process instead of returning an error.
fn probe(kind: PluginKind) -> Result<Probe, String> {
    let output = run_probe(kind).map_err(|e| e.to_string())?;
    if output.status.success() {
        return serde_json::from_slice(&output.stdout).map_err(|e| e.to_string());
    }
    Err(match error_of(&output) {
        Some(error) => error,
        None => format!("it ended its process ({})", end_of(&output)),
    })
}

/// The trial before a plugin's first load here.
pub fn try_load(kind: PluginKind) -> Trial {
    match run_probe(kind) {
        Ok(output) if output.status.success() => Trial::Loaded,
        Ok(output) if error_of(&output).is_none() => Trial::Ended(end_of(&output)),
        Ok(_) | Err(_) => Trial::Unknown,
    }
}

fn run_probe(kind: PluginKind) -> std::io::Result<Output> {
    Command::new(std::env::current_exe()?)
        .args(["doctor", "--quiet", "--probe", kind.name()])
        .stdin(Stdio::null())
        .output()
}

/// The error with which the process ended by itself.
fn error_of(output: &Output) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    let error = said.lines().find_map(|l| l.strip_prefix("error: "))?;
    Some(error.to_owned())
}

/// How the process ended otherwise.
fn end_of(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().next_back().unwrap_or("nothing");
    format!("{}; its last message: {last}", output.status)
}

fn report(found: &Diagnosis) -> Value {
    let folder = &found.plugin_folder;
    let path = folder.path.as_ref().ok();
    let cpu = &found.processor;
    let features = cpu.features.iter();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ok": found.is_ready(),
        "problems": found.problems.iter().map(|p| json!({
            "what": p.what, "remedy": p.remedy, "needed": p.needed,
        })).collect::<Vec<_>>(),
        "plugin_folder": {
            "path": path.map(|path| path.display().to_string()),
            "writable": folder.writable,
            "free_bytes": folder.free,
        },
        "program_cache": program_folder_report(found.program_folder.as_ref().ok()),
        "plugins": found.plugins.iter().map(plugin_report).collect::<Vec<_>>(),
        "device_files": found.device_files,
        "processor": {
            "model": cpu.model,
            "threads": cpu.threads.as_ref().ok(),
            "features": features.map(|(name, here)| ((*name).to_string(), json!(here)))
                .collect::<Map<String, Value>>(),
        },
        "tools": found.tools.iter().map(|t| json!({
            "name": t.name, "found": t.found.as_ref().ok(), "needed_for": t.purpose,
            "package": t.package,
        })).collect::<Vec<_>>(),
    })
}

fn program_folder_report(folder: Option<&ProgramFolder>) -> Value {
    json!({
        "path": folder.map(|folder| folder.path.display().to_string()),
        "programs": folder.map(|folder| folder.usage.programs),
        "bytes": folder.map(|folder| folder.usage.bytes),
        "max_bytes": ExecutableCache::MAX_BYTES,
    })
}

fn plugin_report(plugin: &PluginState) -> Value {
    let (probe, error) = match &plugin.loaded {
        Some(Ok(probe)) => (Some(probe), None),
        Some(Err(error)) => (None, Some(error)),
        None => (None, None),
    };
    json!({
        "kind": plugin.kind,
        "installed": plugin.found.as_ref().map(plugin::describe),
        "pinned_version": plugin.kind.pinned_version(),
        "api_version": probe.map(|p| &p.api_version),
        "attributes": probe.map(|p| &p.attributes),
        "devices": probe.map(|p| &p.devices),
        "kernels": probe.map(|p| &p.kernels),
        "error": error,
    })
}

fn describe(found: &Diagnosis) -> String {
    let mut lines = vec![format!("maxdiff-rs {}", env!("CARGO_PKG_VERSION"))];
    let folder = describe_plugin_folder(&found.plugin_folder);
    lines.push(format!("plugins in {folder}"));
    lines.extend(found.plugins.iter().map(describe_plugin));
    let folder = match &found.program_folder {
        Ok(folder) => describe_program_folder(folder),
        Err(error) => error.clone(),
    };
    lines.push(format!("compiled programs in {folder}"));
    let files = match found.device_files.as_slice() {
        [] => "none".to_string(),
        files => files.join(", "),
    };
    lines.push(format!("accelerator device files: {files}"));
    lines.extend(describe_processor(&found.processor));
    lines.push("tools".to_string());
    lines.extend(found.tools.iter().map(describe_tool));
    lines.extend(found.problems.iter().map(describe_problem));
    if found.is_ready() {
        lines.push("ready: programs run on this machine's CPU".to_string());
    }
    lines.join("\n")
}

fn describe_plugin_folder(folder: &PluginFolder) -> String {
    let path = match &folder.path {
        Err(error) => return error.clone(),
        Ok(path) => path,
    };
    let writable = if folder.writable {
        ""
    } else {
        ", not writable"
    };
    let free = folder.free.map_or_else(String::new, |free| {
        format!(", {:.1} GB free", free as f64 / 1e9)
    });
    format!("{}{writable}{free}", path.display())
}

fn describe_program_folder(folder: &ProgramFolder) -> String {
    format!(
        "{}: {}, {:.2} of at most {:.0} GB",
        folder.path.display(),
        folder.usage.programs,
        folder.usage.bytes as f64 / 1e9,
        ExecutableCache::MAX_BYTES as f64 / 1e9,
    )
}

fn describe_processor(cpu: &Processor) -> [String; 2] {
    let has = |wanted: bool| {
        let names = cpu.features.iter().filter(|(_, here)| *here == wanted);
        names.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
    };
    let threads = match &cpu.threads {
        Ok(threads) => format!("computes with {threads} threads"),
        Err(_) => "number of threads not known, see below".to_string(),
    };
    [
        format!("processor: {}, {threads}", cpu.model),
        format!("  has {}; lacks {}", has(true), has(false)),
    ]
}

fn describe_tool(tool: &Tool) -> String {
    let found = match &tool.found {
        Ok(version) => version.clone(),
        Err(reason) => format!("not found: {reason}"),
    };
    format!("  {:<8} {found}", tool.name)
}

fn describe_problem(problem: &Problem) -> String {
    let word = if problem.needed { "wrong" } else { "note" };
    format!("{word}: {}; {}", problem.what, problem.remedy)
}

fn describe_plugin(plugin: &PluginState) -> String {
    let state = match (&plugin.found, &plugin.loaded) {
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
            kernels(probe).map_or_else(String::new, |text| format!("\n           {text}")),
        ),
        (_, Some(Err(_))) => "cannot be used, see below".to_string(),
        (_, Some(Ok(_)) | None) => "not installed".to_string(),
    };
    format!("  {:<8} {state}", plugin.kind.name())
}

/// Which of a plugin's kernels programs call and with what instructions, or why none; `None` for a plugin without any.
fn kernels(probe: &Probe) -> Option<String> {
    match &probe.kernels {
        Kernels::None => None,
        Kernels::Used(names) => Some(format!(
            "kernels: {}\n           instruction set: {}",
            names.join(" "),
            probe.attributes.get(ISA).map_or("unknown", String::as_str),
        )),
        Kernels::Unsupported(missing) => Some(format!(
            "kernels: none, the processor lacks {}",
            missing.join(" ")
        )),
        Kernels::Stale => Some("kernels: none, the plugin is stale".to_string()),
    }
}
