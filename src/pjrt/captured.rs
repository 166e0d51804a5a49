//! What libtpu writes to standard error while it loads: that it gets no huge pages, which is no trouble of the user's.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::stdio::dup2_stderr;

/// Runs `load`. What it logs to standard error is shown at the level `debug` instead; other text comes afterwards.
pub(super) fn captured<T>(load: impl FnOnce() -> T) -> T {
    let Ok(capture) = Capture::begin() else {
        return load();
    };
    let result = load();
    let text = capture.end();
    for line in text.split_inclusive('\n') {
        let (other, log) = split_log(line);
        // Of other threads. What cannot be written has no reader any more.
        drop(io::stderr().write_all(other.as_bytes()));
        if !log.is_empty() {
            tracing::debug!("libtpu: {}", log.trim_end());
        }
    }
    result
}

/// Standard error on its way to a file.
struct Capture {
    file: File,
    stderr: OwnedFd,
}

impl Capture {
    fn begin() -> io::Result<Capture> {
        let file = tempfile::tempfile()?;
        let stderr = io::stderr().as_fd().try_clone_to_owned()?;
        dup2_stderr(&file)?;
        Ok(Capture { file, stderr })
    }

    /// Gives standard error back, and what was written to it.
    fn end(mut self) -> String {
        // Cannot fail for descriptors that are open.
        let _ = dup2_stderr(&self.stderr);
        let mut text = Vec::new();
        let _ = self.file.rewind();
        let _ = self.file.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// A line up to where the log begins in it, and the rest: a spinner that is drawn meanwhile ends no line.
fn split_log(line: &str) -> (&str, &str) {
    let mut starts = line.match_indices(['I', 'W', 'E', 'F']).map(|(at, _)| at);
    let start = starts.find(|at| is_log(&line[*at..]));
    line.split_at(start.unwrap_or(line.len()))
}

/// Whether a text begins as those of Google's logging do: `E1122 16:56:50.552274`.
fn is_log(line: &str) -> bool {
    let mut bytes = line.bytes();
    let level = bytes.next();
    let is_dated = bytes.by_ref().take(4).filter(u8::is_ascii_digit).count() == 4;
    matches!(level, Some(b'I' | b'W' | b'E' | b'F')) && is_dated && bytes.next() == Some(b' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_told_from_others() {
        assert!(is_log(
            "E1122 16:56:50.552274    2761 hugepage_text.cc:344] RAW: File"
        ));
        for other in ["", "E", "error: no", "E112 16:56", "Ended 1 of 2", "E1122x"] {
            assert!(!is_log(other), "{other}");
        }
        let log = "E1122 16:56:50.552274    2761 hugepage_text.cc:344] RAW: File\n";
        let drawn = "\r\u{1b}[2K⠉ opening the compiler, 0s   ";
        assert_eq!(split_log(&format!("{drawn}{log}")), (drawn, log));
        assert_eq!(split_log(log), ("", log));
        assert_eq!(split_log("error: no\n"), ("error: no\n", ""));
    }
}
