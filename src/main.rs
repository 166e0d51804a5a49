//! The `maxdiff-rs` program. Everything is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Plugins read the environment as they load, and it may only be changed while this is the only thread.
    if let Err(error) = maxdiff::pjrt::prepare_process() {
        maxdiff::cli::tell(&format!("warning: {error}"));
    }
    maxdiff::cli::main()
}
