//! Compiles a denoising step for a topology that need not be here, with the library alone.
//!
//! `cargo run --release --example compile -- configs/base_xl.yml compile_topology=v5e-16`

use std::error::Error;
use std::path::Path;

use maxdiff::config::{Config, Verb};
use maxdiff::pjrt::install::Trial;
use maxdiff::recipe::{self, Notice, Step};

fn main() -> Result<(), Box<dyn Error>> {
    maxdiff::pjrt::prepare_process()?;
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (file, overrides) = words
        .split_first()
        .ok_or("give CONFIG.yml [KEY=VALUE]...")?;
    let config = Config::load(Path::new(file), overrides, Some(Verb::Compile))?.config;
    let mut notify = |notice: Notice<'_>| eprintln!("{notice:?}");

    let compiler = recipe::compiler(&config, &|_| Trial::Unknown, &mut notify)?;
    let traced = recipe::trace(&config, Step::Denoise, compiler.mesh())?;
    let options = recipe::compile_options(&config, Step::Denoise, &traced);
    let compiled = compiler.compile(&traced, &options, &mut |_| {})?;
    println!("{}", compiled.step.report);
    compiled
        .bundle()?
        .bundle
        .write(Path::new("denoise.bundle"))?;
    Ok(())
}
