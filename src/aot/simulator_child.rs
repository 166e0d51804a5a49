//! The process that simulates kernels: this program, with libtpu told to simulate what it compiles.
//!
//! It takes StableHLO modules from its standard input, each after a line with the number of its bytes, and writes a line
//! when it is done with one ([`serve`]). libtpu writes a file for each operation into a folder that is the child's own.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::topology::Chip;

use super::vliw;

/// What libtpu is told in the child process.
const FLAG: &str = "--xla_jf_dump_static_llo_profile_to";

/// What the names of the files end with that it writes then.
const PROFILE: &str = "_static_llo_profile.textproto";

/// How often is looked whether to stop.
const POLL: Duration = Duration::from_millis(20);

/// The line that a child writes when it is done with a module.
const DONE: &str = "compiled";

/// Of what a child said, not more than this is looked at.
const MOST_SAID: u64 = 1 << 20;

/// Why a kernel was not simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    #[error("{}: {what}: {error}", path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        error: std::io::Error,
    },
    #[error("{0} has no TPU compiler")]
    NotTpu(Chip),
    #[error("the TPU compiler simulated nothing: {0}")]
    NoResult(String),
    #[error("stopped")]
    Stopped,
}

/// The texts that libtpu wrote, of an operation each.
#[derive(Default)]
pub struct Files {
    /// What the simulation says.
    pub profiles: Vec<String>,
    /// The instructions, for [`vliw::parse`].
    pub bundles: Vec<String>,
}

/// A running child.
pub struct SimulatorChild {
    program: PathBuf,
    process: Child,
    stdin: ChildStdin,
    done: Receiver<()>,
    /// libtpu's files.
    folder: TempDir,
    /// Its messages, and where those of the current module begin.
    said: File,
    begun: u64,
}

impl SimulatorChild {
    /// Starts `program`, for the chips of `topology`. With `bundles` libtpu also writes the instructions.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(program: &Path, topology: &str, bundles: bool) -> Result<Self, SimulationError> {
        let temporary = std::env::temp_dir();
        let folder = tempfile::tempdir_in(&temporary)
            .map_err(failed_at(&temporary, "no folder could be made"))?;
        // Not in the folder of libtpu's files, all of which are read.
        let said = tempfile::tempfile().map_err(failed_at(&temporary, "no file could be made"))?;
        let messages = said.try_clone();
        let messages = messages.map_err(failed_at(&temporary, "no file could be made"))?;
        let flags = std::env::var("LIBTPU_INIT_ARGS").unwrap_or_default();
        let at = folder.path().display();
        let of_bundles = match bundles {
            true => vliw::flags(&at.to_string()),
            false => String::new(),
        };
        let not_started = || failed_at(program, "could not be started");
        let mut process = Command::new(program)
            .args(["kernel", "simulate", "--topology", topology])
            .env(
                "LIBTPU_INIT_ARGS",
                format!("{of_bundles} {flags} {FLAG}={at}"),
            )
            // One run wrote 1.2 GB of messages.
            .envs([("TPU_LOG_DIR", "disabled"), ("TPU_MIN_LOG_LEVEL", "3")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(messages)
            .spawn()
            .map_err(not_started())?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(not_started()(io::ErrorKind::BrokenPipe.into()));
        };
        let (tell, done) = channel();
        // It ends with the process.
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            for _ in lines.filter(|line| line == DONE) {
                if tell.send(()).is_err() {
                    break;
                }
            }
        });
        Ok(SimulatorChild {
            program: program.to_owned(),
            process,
            stdin,
            done,
            folder,
            said,
            begun: 0,
        })
    }

    /// Has a module compiled; whether the child lives on.
    ///
    /// # Errors
    /// When `stop` is set meanwhile, or the child cannot be waited for.
    pub fn compile(&mut self, stablehlo: &str, stop: &AtomicBool) -> Result<bool, SimulationError> {
        self.begun = self.said.metadata().map_or(0, |said| said.len());
        // A child that ends before it has read everything says why.
        let _ = writeln!(self.stdin, "{}", stablehlo.len());
        let _ = self.stdin.write_all(stablehlo.as_bytes());
        loop {
            match self.done.recv_timeout(POLL) {
                Ok(()) => return Ok(true),
                Err(RecvTimeoutError::Disconnected) => {
                    let failed = failed_at(&self.program, "failed");
                    return self.process.wait().map(|_| false).map_err(failed);
                }
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                    return Err(SimulationError::Stopped);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// What libtpu has written since it was taken last.
    ///
    /// # Errors
    /// When it cannot be read, or not removed.
    pub fn take_files(&self) -> Result<Files, SimulationError> {
        let folder = self.folder.path();
        let mut files = Files::default();
        let all = fs::read_dir(folder).map_err(failed_at(folder, "cannot be read"))?;
        for file in all.flatten() {
            let path = file.path();
            let name = file.file_name().to_string_lossy().into_owned();
            let texts = match name.ends_with(PROFILE) {
                true => Some(&mut files.profiles),
                false => vliw::is_of_operation(&name).then_some(&mut files.bundles),
            };
            if let Some(texts) = texts {
                let text = fs::read_to_string(&path);
                texts.push(text.map_err(failed_at(&path, "cannot be read"))?);
            }
            fs::remove_file(&path).map_err(failed_at(&path, "cannot be removed"))?;
        }
        Ok(files)
    }

    /// The last line of what the child said of the current module.
    pub fn last_words(&self) -> String {
        let end = self.said.metadata().map_or(0, |said| said.len());
        let begun = self.begun.max(end.saturating_sub(MOST_SAID));
        let mut text = vec![0; end.saturating_sub(begun) as usize];
        // Without the message, that there is no result is still true. The child writes on at its own place in the file.
        let _ = self.said.read_exact_at(&mut text, begun);
        why(&String::from_utf8_lossy(&text)).to_owned()
    }
}

impl Drop for SimulatorChild {
    fn drop(&mut self) {
        // One that has ended already is no error.
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// The child's side: gives each module that comes from `input` to `compile`, and tells `output` when it is done. An error of
/// `compile` goes to `errors`, and the next module follows.
///
/// # Errors
/// When the input is not as [`SimulatorChild`] writes it, or cannot be read.
pub fn serve<E: std::fmt::Display>(
    mut input: impl BufRead,
    mut output: impl Write,
    mut errors: impl Write,
    mut compile: impl FnMut(&str) -> Result<(), E>,
) -> io::Result<()> {
    loop {
        let mut length = String::new();
        if input.read_line(&mut length)? == 0 {
            return Ok(());
        }
        let length: u64 = length.trim().parse().map_err(io::Error::other)?;
        let mut text = String::new();
        input.by_ref().take(length).read_to_string(&mut text)?;
        if let Err(error) = compile(&text) {
            writeln!(errors, "{error}")?;
        }
        writeln!(output, "{DONE}")?;
        output.flush()?;
    }
}

fn failed_at<'a>(
    path: &'a Path,
    what: &'static str,
) -> impl FnOnce(io::Error) -> SimulationError + 'a {
    move |error| SimulationError::Io {
        path: path.to_owned(),
        what,
        error,
    }
}

/// The last line of what a child process said, but for a pointer to the compiler's documents.
fn why(said: &str) -> &str {
    let mut lines = said.lines().rev().filter(|line| !line.trim().is_empty());
    lines
        .find(|line| !line.starts_with("See http"))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_one_after_the_other_and_an_error_ends_none_but_its_own() {
        let input = "6\none\ntw3\nfoo5\nthree";
        let (mut output, mut errors, mut found) = (Vec::new(), Vec::new(), Vec::new());
        serve(input.as_bytes(), &mut output, &mut errors, |text| {
            found.push(text.to_owned());
            match text {
                "foo" => Err("no such kernel"),
                _ => Ok(()),
            }
        })
        .unwrap();
        assert_eq!(found, ["one\ntw", "foo", "three"]);
        assert_eq!(output, b"compiled\ncompiled\ncompiled\n");
        assert_eq!(errors, b"no such kernel\n");
        let unreadable = serve("x".as_bytes(), io::sink(), io::sink(), |_| {
            Ok::<_, String>(())
        });
        assert!(unreadable.is_err());
    }

    #[test]
    fn a_child_says_why_but_for_a_pointer_to_documents() {
        assert_eq!(why("first\nthe reason\nSee https://...\n\n"), "the reason");
        assert_eq!(why(""), "no message");
    }
}
