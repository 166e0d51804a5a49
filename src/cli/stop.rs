//! Ctrl-C and SIGTERM.

use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use super::CliError;

/// Calls `tell` at the first SIGINT or SIGTERM and ends the process, with code 130 or 143. The process is not asked when
/// it likes to stop: a compiler or a step may take minutes.
///
/// # Errors
/// When the signals cannot be taken.
pub fn end_on_signals(tell: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CliError::failed)?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            tell();
            // Without the plugin's destructors: its threads are at work.
            low_level::exit(128 + signal);
        }
    });
    Ok(())
}
