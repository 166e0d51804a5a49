//! How fast a dataset is encoded, and then read from its cache: an epoch of each, without training.
//!
//! `cargo run --release --example dataset_epochs -- CONFIG.yml [KEY=VALUE]...` takes what `train` takes. It prints the samples a second of
//! both epochs, and the most memory that the process has had at the end of each. (`train` logs how long
//! encoding waited for pictures.)

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use maxdiff::config::{Config, Loaded, Verb};
use maxdiff::pjrt::install::Trial;
use maxdiff::recipe::{self, Notice};
use maxdiff::train::{EncodedDataset, EncodedSamples, FineTune, Task, TrainEvent};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (file, overrides) = words
        .split_first()
        .ok_or("give CONFIG.yml [KEY=VALUE]...")?;
    let Loaded { config, given, .. } = Config::load(Path::new(file), overrides, Some(Verb::Train))?;
    let mut notify = |notice: Notice<'_>| eprintln!("{notice:?}");
    let start = Instant::now();
    let training = recipe::training(&config, &given, Path::new(file), &mut notify)?;
    let session = recipe::open_session(&config, &|_| Trial::Unknown, &mut notify)?.session;
    let options = training.options(&session, &mut notify)?;
    let Task::FineTune(tuning) = options.task else {
        return Err("a model of pixels encodes nothing: name a published model".into());
    };
    let FineTune {
        base,
        dataset,
        batches,
        tags,
        cache,
    } = *tuning;
    println!(
        "listed and read once: {:.1} s, {} MB",
        start.elapsed().as_secs_f64(),
        peak_megabytes()
    );
    let (samples, batch) = (dataset.len(), batches.batch_size);
    let sizes: Vec<[usize; 2]> = dataset.sizes().into_keys().collect();
    let wanted = EncodedSamples {
        dataset,
        options: batches,
        tags,
        sizes: &sizes,
        keeps_ids: false,
        held_out: 0,
        dir: &cache,
    };
    let (mut encoding, mut encoded) = (Instant::now(), 0);
    let dataset = EncodedDataset::new(&session, &base, options.precision, wanted, &mut |event| {
        match event {
            TrainEvent::Encoding { done: 0, .. } => encoding = Instant::now(),
            TrainEvent::Encoding { total, .. } => encoded = total,
            _ => {}
        }
        ControlFlow::Continue(())
    })?;
    let seconds = encoding.elapsed().as_secs_f64();
    println!(
        "encoded {encoded}: {:.0} a second, {} MB",
        encoded as f64 / seconds,
        peak_megabytes()
    );
    let start = Instant::now();
    let count = (samples / batch).max(1);
    for number in 0..count {
        dataset.inputs(number as u64)?;
    }
    println!(
        "read {} from the cache: {:.0} a second, {} MB",
        count * batch,
        (count * batch) as f64 / start.elapsed().as_secs_f64(),
        peak_megabytes()
    );
    Ok(())
}

/// The most memory that this process has had, where the system tells.
fn peak_megabytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    kibibytes.unwrap_or(0u64) * 1024 / 1_000_000
}
