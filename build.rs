//! Turns every `.proto` of `proto/` into Rust messages, without `protoc`.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let mut files: Vec<PathBuf> = std::fs::read_dir("proto")?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.retain(|path| path.extension().is_some_and(|ext| ext == "proto"));
    // A folder has no order of its own, and generated code should not differ between machines.
    files.sort();
    let descriptors = protox::compile(&files, ["proto"])?;
    prost_build::Config::new()
        .btree_map(["."])
        .include_file("messages.rs")
        .compile_fds(descriptors)?;
    Ok(())
}
