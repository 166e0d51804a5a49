//! The library's notices, on standard error.

use indicatif::HumanBytes;

use super::{progress, status, tell};
use crate::hub::Progress;
use crate::recipe::Notice;

/// Where the terminal shows no progress, files above this many bytes are logged.
const LARGE: u64 = 100_000_000;

/// Shows notices as they come: progress not under `--quiet`, all else always.
pub fn notices() -> impl FnMut(Notice<'_>) {
    |notice| match notice {
        Notice::Warning(text) => tell(&format!("warning: {text}")),
        Notice::Note(text) => tell(&format!("note: {text}")),
        Notice::Progress(text) => progress(text),
        Notice::Download {
            repo,
            cache,
            progress:
                Progress::Start {
                    commit,
                    files,
                    bytes,
                },
        } => {
            progress(&format!(
                "downloading {repo} at {commit}: {files} files, {}, to {}",
                HumanBytes(bytes),
                cache.display()
            ));
            status::count_bytes("downloading", bytes);
        }
        Notice::Download { progress, .. } => show_download(progress),
    }
}

fn show_download(event: Progress<'_>) {
    match event {
        Progress::Start { .. } => {}
        Progress::File { name, bytes } => {
            // A folder tells what the file is, in fewer letters.
            let what = name.rsplit_once('/').map_or(name, |(folder, _)| folder);
            status::rename(&format!("downloading {what}"));
            if !status::is_shown() && bytes >= LARGE {
                progress(&format!("  {name}, {}", HumanBytes(bytes)));
            }
        }
        Progress::Bytes { done } => status::set_position(done),
        Progress::Retry { reason, wait } => tell(&format!(
            "warning: {reason}; trying again in {:.0} s",
            wait.as_secs_f64()
        )),
        Progress::Done => status::clear(),
    }
}
