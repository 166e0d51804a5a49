//! Compiles the VAE's decoder of a published model for a chip that need not be here, and prints its report: the predicted
//! time of one image, and the memory that it takes.
//!
//! `cargo run --release --example compile_decoder -- configs/base_xl.yml compile_topology=v5e-1`
//!
//! Kernels are simulated in processes of `target/release/maxdiff-rs`; without it they have no time.

use std::error::Error;
use std::path::{Path, PathBuf};

use maxdiff::aot::Simulator;
use maxdiff::config::{Config, Verb};
use maxdiff::models::vae::{self, AutoencoderKlConfig};
use maxdiff::pipelines::latents::trace_decode;
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

    let mut compiler = recipe::compiler(&config, &|_| Trial::Unknown, &mut notify)?;
    if let Some(program) = program()? {
        compiler = compiler.with_simulator(Simulator::new(program));
    }
    let mut model = recipe::model(&config, None)?;
    let published = model.family.spec().published.as_ref();
    let published = published.ok_or("a model of pixels has no decoder")?;
    model.vae = Some(AutoencoderKlConfig::from_json(published.vae)?.into());
    let traced = trace_decode(&model, vae::ROOT, model.sample_size)?;
    // One image is decoded in one tile, on one device.
    let options = recipe::compile_options(&config, Step::Denoise, &traced);
    let compiled = compiler.compile(&traced, &options, &mut |_| {})?;
    println!("{}", compiled.step.report);
    Ok(())
}

/// `maxdiff-rs` of the same build, if it was built.
fn program() -> Result<Option<PathBuf>, std::io::Error> {
    let own = std::env::current_exe()?;
    let program = own.ancestors().nth(2).map(|dir| dir.join("maxdiff-rs"));
    Ok(program.filter(|program| program.is_file()))
}
