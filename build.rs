//! Compiles the protocol buffer messages of `proto/` without `protoc`.

use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let mut files = Vec::new();
    for entry in std::fs::read_dir("proto")? {
        let path: PathBuf = entry?.path();
        if path.extension().is_some_and(|e| e == "proto") {
            files.push(path);
        }
    }
    files.sort();
    prost_build::compile_fds(protox::compile(files, ["proto"])?)?;
    Ok(())
}
