//! The `maxdiff-rs` program. Everything is in the library, where tests reach it.

use std::process::ExitCode;

/// Plugins that this program loads take their memory from it too, and compilers take it in small parts, from many threads:
/// with the C library's allocator libtpu works half as long again.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // Plugins read the environment as they load, and it may only be changed while this is the only thread.
    if let Err(error) = maxdiff::pjrt::prepare_process() {
        maxdiff::cli::tell(&format!("warning: {error}"));
    }
    maxdiff::cli::main()
}
