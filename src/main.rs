//! The `maxdiff-rs` program. Everything is in the library, where tests reach it.

fn main() -> std::process::ExitCode {
    maxdiff::cli::main()
}
