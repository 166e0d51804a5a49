//! Writes the pictures that `train` would see of `dataset_type=shapes`, with their captions, as a folder that `dataset_type=folder` and
//! `instance_data_dir` read.
//!
//! `cargo run --release --example shapes_folder -- DIR CONFIG.yml [KEY=VALUE]...` takes what `train` takes, of it the keys of the
//! dataset, and writes `max_train_samples` pictures and `DIR/metadata.jsonl`.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use maxdiff::config::{Config, Loaded, Verb};
use maxdiff::data::Dataset;
use maxdiff::recipe::{self, Notice};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [dir, file, overrides @ ..] = &words[..] else {
        return Err("give DIR CONFIG.yml [KEY=VALUE]...".into());
    };
    let Loaded { config, .. } = Config::load(Path::new(file), overrides, Some(Verb::Train))?;
    let mut notify = |notice: Notice<'_>| eprintln!("{notice:?}");
    let Dataset::Shapes(shapes) = recipe::dataset(&config, &mut notify)? else {
        return Err("dataset_type is not shapes".into());
    };
    let dir = Path::new(dir);
    fs::create_dir_all(dir)?;
    let mut captions = BufWriter::new(File::create_new(dir.join("metadata.jsonl"))?);
    for number in 0..shapes.count() {
        let sample = shapes.get(number);
        let name = format!("{number:05}.png");
        sample.image().save(dir.join(&name))?;
        let row = serde_json::json!({"file_name": name, "text": sample.captions.concat()});
        writeln!(captions, "{row}")?;
    }
    captions.flush()?;
    Ok(())
}
