//! The library's notices, on standard error.

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::{progress, tell};
use crate::hub::Progress;
use crate::recipe::Notice;

/// Without a progress bar, files above this many bytes are logged.
const LARGE: u64 = 100_000_000;

/// Shows notices as they come: progress not under `--quiet`, all else always.
pub fn notices() -> impl FnMut(Notice<'_>) {
    let mut bar = ProgressBar::hidden();
    move |notice| match notice {
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
            bar = download_bar(bytes);
        }
        Notice::Download { progress, .. } => show_download(&bar, progress),
    }
}

/// On a stream that is no terminal, indicatif hides the bar.
fn download_bar(bytes: u64) -> ProgressBar {
    if !tracing::enabled!(tracing::Level::INFO) {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(bytes);
    let template = "{bar:30} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left: {msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

fn show_download(bar: &ProgressBar, event: Progress<'_>) {
    match event {
        Progress::Start { .. } => {}
        Progress::File { name, bytes } => {
            bar.set_message(name.to_owned());
            if bar.is_hidden() && bytes >= LARGE {
                progress(&format!("  {name}, {}", HumanBytes(bytes)));
            }
        }
        Progress::Bytes { done } => bar.set_position(done),
        Progress::Retry { reason, wait } => bar.suspend(|| {
            tell(&format!(
                "warning: {reason}; trying again in {:.0} s",
                wait.as_secs_f64()
            ));
        }),
        Progress::Done => bar.finish_and_clear(),
    }
}
