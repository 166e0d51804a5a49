//! One line at the end of the terminal: what is happening now.
//!
//! There is one line in a process, because there is one standard error. It is drawn only on a terminal and not under
//! `--quiet`; everything else is written above it.

use std::io::{self, Write};
use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time between two drawings of the spinner.
const TICK: Duration = Duration::from_millis(100);

/// Not drawn until [`show`].
static LINE: LazyLock<ProgressBar> =
    LazyLock::new(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()));

/// Lets the line be drawn, where standard error is a terminal.
pub fn show() {
    LINE.set_draw_target(ProgressDrawTarget::stderr());
    LINE.finish_and_clear();
}

/// Something that has no measure: how long it has taken.
pub fn spin(what: &str) {
    begin("{spinner} {msg}, {elapsed}", what, 0, 0);
}

/// Something that counts bytes up to `total`; [`advance`] adds them.
pub fn count_bytes(what: &str, total: u64) {
    // As wide as the terminal: a line that is wider would be drawn as two.
    let template = "{spinner} {msg} {wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}";
    begin(template, what, 0, total);
}

/// Something in `total` steps, of which `done` are done; [`advance`] adds some, and [`set_left`] says how long the rest
/// takes.
pub fn count_steps(what: &str, done: u64, total: u64) {
    let template = "{spinner} {msg} {bar:30} step {pos}/{len}{prefix}";
    begin(template, what, done, total);
}

/// More bytes or steps are done.
pub fn advance(count: u64) {
    LINE.inc(count);
}

/// Says otherwise what is counted.
pub fn rename(what: &str) {
    LINE.set_message(what.to_owned());
}

/// How many bytes are done.
pub fn set_position(done: u64) {
    LINE.set_position(done);
}

/// How long the steps that are left will take.
pub fn set_left(left: Duration) {
    LINE.set_prefix(format!(", {:#} left", indicatif::HumanDuration(left)));
}

/// Nothing is happening.
pub fn clear() {
    LINE.finish_and_clear();
}

/// Whether the line is drawn.
pub fn is_shown() -> bool {
    !LINE.is_hidden()
}

/// Writes something above the line.
pub fn above<T>(write: impl FnOnce() -> T) -> T {
    LINE.suspend(write)
}

/// Standard error above the line, for the log.
pub fn stderr() -> impl Write {
    Above
}

struct Above;

impl Write for Above {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        above(|| io::stderr().lock().write(text))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn begin(template: &str, what: &str, done: u64, total: u64) {
    if LINE.is_hidden() {
        return;
    }
    // What is cleared is not drawn while it is changed.
    LINE.finish_and_clear();
    if let Ok(style) = ProgressStyle::with_template(template) {
        LINE.set_style(style);
    }
    LINE.set_prefix("");
    LINE.set_message(what.to_owned());
    LINE.set_length(total);
    LINE.reset();
    LINE.set_position(done);
    LINE.enable_steady_tick(TICK);
}
