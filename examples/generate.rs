//! Generates images from prompts with the library alone.
//!
//! `cargo run --release --example generate -- configs/quickstart.yml`, after training it.

use std::error::Error;
use std::path::Path;

use maxdiff::config::{Config, Loaded, Verb};
use maxdiff::pipelines::{Event, GenerateRequest, ImageRequest, Pipeline};
use maxdiff::pjrt::install::Trial;
use maxdiff::recipe::{self, Notice};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (file, overrides) = words
        .split_first()
        .ok_or("give CONFIG.yml [KEY=VALUE]...")?;
    let file = Path::new(file);
    let Loaded { config, given, .. } = Config::load(file, overrides, Some(Verb::Generate))?;
    let mut notify = |notice: Notice<'_>| eprintln!("{notice:?}");

    let options = recipe::generation(&config, &given, file, &mut notify)?.options;
    let session = recipe::open_session(&config, &|_| Trial::Unknown, &mut notify)?.session;
    let mut pipeline = Pipeline::open(session, options)?;
    let image = ImageRequest::new("a large red circle on a white background");
    let generated = pipeline.generate(&GenerateRequest::new(vec![image]), &mut |event| {
        if let Event::Step = event {
            eprint!(".");
        }
        Ok(())
    })?;
    let path = config.run_dir().join("red_circle.png");
    generated.images[0].save(&path)?;
    println!("\n{}", path.display());
    Ok(())
}
