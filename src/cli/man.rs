//! `man`: the program's help as pages for `man`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::{CliError, print};
use crate::util::files::{self, Existing};

/// `man ...`
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder for the pages, made if need be (default: all pages one after the other to the standard output)
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Replace pages that are there
    #[arg(long, requires = "dir")]
    replace: bool,
}

/// A page, by the name of its file.
struct Page {
    name: String,
    text: Vec<u8>,
}

/// Runs `man` for the program `command`.
///
/// # Errors
/// A page exists already, or cannot be written.
pub fn run(args: &ManArgs, command: Command) -> Result<ExitCode, CliError> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, &mut pages).map_err(CliError::failed)?;
    let Some(dir) = &args.dir else {
        for page in &pages {
            print(&String::from_utf8_lossy(&page.text))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    if !args.replace {
        // All of them before any is written.
        if let Some(page) = pages.iter().find(|page| dir.join(&page.name).exists()) {
            return Err(CliError::Usage(format!(
                "{}: exists already; --replace overwrites it",
                dir.join(&page.name).display()
            )));
        }
    }
    let failed = |path: &Path, e: io::Error| {
        CliError::failed(io::Error::new(e.kind(), format!("{}: {e}", path.display())))
    };
    fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
    let existing = match args.replace {
        true => Existing::Replace,
        false => Existing::Refuse,
    };
    for page in &pages {
        let path = dir.join(&page.name);
        files::write(&path, &page.text, existing).map_err(|e| failed(&path, e))?;
        print(&path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The page of a command, then those of its subcommands.
fn add_pages(command: &Command, pages: &mut Vec<Page>) -> io::Result<()> {
    let page = Man::new(command.clone()).source(concat!("maxdiff-rs ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    if let Some(after) = command.get_after_long_help() {
        sections(&after.to_string()).to_writer(&mut text)?;
    }
    pages.push(Page {
        name: page.get_filename(),
        text,
    });
    let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    for subcommand in shown {
        add_pages(subcommand, pages)?;
    }
    Ok(())
}

/// What follows the options in the help: a line that is not indented and ends with a colon is a heading, and all else
/// keeps its lines.
fn sections(text: &str) -> Roff {
    let mut page = Roff::new();
    let mut is_open = false;
    for line in text.lines() {
        match line.strip_suffix(':') {
            Some(heading) if !line.starts_with(' ') => {
                if is_open {
                    page.control("fi", []);
                }
                page.control("SH", [heading.to_uppercase().as_str()]);
                page.control("nf", []);
                is_open = true;
            }
            _ => {
                page.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
            }
        }
    }
    if is_open {
        page.control("fi", []);
    }
    page
}
