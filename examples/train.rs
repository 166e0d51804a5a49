//! Trains a model with the library alone.
//!
//! `cargo run --release --example train -- configs/quickstart.yml max_train_steps=100`

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use maxdiff::config::{Config, Loaded, Verb};
use maxdiff::pjrt::install::Trial;
use maxdiff::recipe::{self, Notice};
use maxdiff::train::{TrainEvent, Trainer};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (file, overrides) = words
        .split_first()
        .ok_or("give CONFIG.yml [KEY=VALUE]...")?;
    let Loaded { config, given, .. } = Config::load(Path::new(file), overrides, Some(Verb::Train))?;
    let mut notify = |notice: Notice<'_>| eprintln!("{notice:?}");

    let training = recipe::training(&config, &given, Path::new(file), &mut notify)?;
    let session = recipe::open_session(&config, &|_| Trial::Unknown, &mut notify)?.session;
    let options = training.options(&session, &mut notify)?;
    let outcome = Trainer::new(session, options)?.run(&mut |event| {
        if let TrainEvent::Step(report) = event {
            println!("step {}: loss {:.4}", report.step, report.loss);
        }
        ControlFlow::Continue(())
    })?;
    println!("{outcome:?}");
    Ok(())
}
