//! The state of this machine: what is installed, what is wrong, and how to fix it.

mod folders;
mod plugin;
mod processor;
mod tools;

use crate::pjrt::install::PluginKind;

pub use folders::{PluginFolder, ProgramFolder};
pub use plugin::{PluginState, Probe};
pub use processor::{Processor, device_files};
pub use tools::Tool;

/// Something that is wrong.
#[derive(Debug)]
pub struct Problem {
    pub what: String,
    pub remedy: String,
    /// Whether it stops programs from running.
    pub needed: bool,
}

/// The state of this machine: what is installed and what is wrong.
pub struct Diagnosis {
    pub plugin_folder: PluginFolder,
    /// One for each kind.
    pub plugins: Vec<PluginState>,
    pub program_folder: Result<ProgramFolder, String>,
    /// Device files of accelerators.
    pub device_files: Vec<String>,
    pub processor: Processor,
    /// The programs that installing plugins needs.
    pub tools: Vec<Tool>,
    pub problems: Vec<Problem>,
}

impl Diagnosis {
    /// Looks at this machine. `probe` loads the installed plugin of a kind ([`Probe::new`]), better in another process:
    /// on a processor or driver that it is not made for, a plugin ends its process instead of returning an error.
    pub fn new(probe: &dyn Fn(PluginKind) -> Result<Probe, String>) -> Diagnosis {
        let plugin_folder = PluginFolder::find();
        let plugins: Vec<PluginState> = PluginKind::ALL
            .map(|kind| PluginState::new(kind, probe))
            .into();
        let tools = Tool::find_all();
        let processor = Processor::read();
        let has_cpu_plugin = plugins
            .iter()
            .any(|p| p.kind == PluginKind::Cpu && p.found.is_some());
        // Where an accelerator runs programs, the processor does not have to.
        let is_accelerated = plugins.iter().any(PluginState::accelerates);
        let to_install = !has_cpu_plugin && !is_accelerated;
        let problems = plugins
            .iter()
            .filter_map(|plugin| plugin.problem(is_accelerated));
        let mut problems: Vec<Problem> = problems.collect();
        problems.extend(plugin_folder.problem(to_install));
        problems.extend(tools::problem(&tools, to_install));
        problems.extend(processor.problem());
        Diagnosis {
            plugin_folder,
            plugins,
            program_folder: ProgramFolder::find(),
            device_files: device_files(),
            processor,
            tools,
            problems,
        }
    }

    /// Whether programs run on this machine.
    pub fn is_ready(&self) -> bool {
        !self.problems.iter().any(|problem| problem.needed)
    }
}
