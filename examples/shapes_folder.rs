//! Writes the pictures that `train` would see of `dataset_type=shapes`, with their captions, as a folder that `dataset_type=folder` and
//! `instance_data_dir` read.
//!
//! `cargo run --release --example shapes_folder -- DIR CONFIG.yml [KEY=VALUE]...` takes what `train` takes, of it the keys of the
//! dataset, and writes `max_train_samples` pictures and `DIR/metadata.jsonl`. Each has a caption of its own, and at least four of five
//! have two shapes: a model learns a word from few pictures if they show it in many places.

use std::collections::HashSet;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use maxdiff::config::{Config, Loaded, Verb};
use maxdiff::data::Dataset;
use maxdiff::data::shapes::Shapes;
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
    let numbers = varied(&shapes)?;
    let dir = Path::new(dir);
    fs::create_dir_all(dir)?;
    let mut rows = BufWriter::new(File::create_new(dir.join("metadata.jsonl"))?);
    for (file, number) in numbers.into_iter().enumerate() {
        let sample = shapes.get(number);
        let name = format!("{file:05}.png");
        sample.image().save(dir.join(&name))?;
        let row = serde_json::json!({"file_name": name, "text": sample.captions.concat()});
        writeln!(rows, "{row}")?;
    }
    rows.flush()?;
    Ok(())
}

/// Draws of a sample for each that is wanted, after which the captions are taken to be used up.
const MOST_DRAWS: usize = 1000;

/// Numbers of as many samples as the dataset counts: no two have the same caption, and one of five at most has a single shape.
fn varied(shapes: &Shapes) -> Result<Vec<usize>, String> {
    let wanted = shapes.count();
    let mut seen = HashSet::new();
    let mut singles = 0;
    let mut chosen = Vec::new();
    for number in 0..wanted.saturating_mul(MOST_DRAWS) {
        if chosen.len() == wanted {
            break;
        }
        let (caption, _) = shapes.scene(number);
        let single = caption.second.is_none();
        if single && 5 * (singles + 1) > wanted || !seen.insert(caption) {
            continue;
        }
        singles += usize::from(single);
        chosen.push(number);
    }
    match chosen.len() == wanted {
        true => Ok(chosen),
        false => Err(format!(
            "max_train_samples={wanted}: {} different captions were found; ask for fewer pictures",
            chosen.len()
        )),
    }
}
