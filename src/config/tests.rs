//! Loading: what is accepted, and the messages for what is refused.

mod effect;
mod errors;
mod reading;
mod schema;

use super::*;

fn words(overrides: &[&str]) -> Vec<String> {
    overrides.iter().map(|w| (*w).to_owned()).collect()
}

fn load(text: &str, overrides: &[&str], verb: Option<Verb>) -> Loaded {
    Config::from_text("run.yml", text, &words(overrides), verb).unwrap_or_else(|e| panic!("{e}"))
}

fn with(overrides: &[&str]) -> Config {
    load("", overrides, None).config
}

/// The messages of a load that must fail.
fn errors(text: &str, overrides: &[&str], verb: Option<Verb>) -> Vec<String> {
    match Config::from_text("run.yml", text, &words(overrides), verb) {
        Ok(_) => panic!("loaded"),
        Err(errors) => errors.0.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn derived_numbers_follow_maxdiffusion() {
    let mut c = Config::default();
    let d = c.derived(32, 2).unwrap();
    assert_eq!(
        (d.total_train_batch_size, d.quantization_local_shard_count),
        (64, 2)
    );
    c.quantization_local_shard_count = 0;
    assert_eq!(c.derived(32, 2).unwrap().quantization_local_shard_count, 0);
    c.quantization_local_shard_count = 4;
    assert_eq!(c.derived(32, 2).unwrap().quantization_local_shard_count, 4);
    c.per_device_batch_size = 0.1;
    assert_eq!(c.derived(30, 1).unwrap().total_train_batch_size, 3);
    assert_eq!(
        c.derived(4, 1).unwrap_err().to_string(),
        "per_device_batch_size: 0.1 for each of 4 devices makes a batch of 0.4: it has to be a whole number above 0"
    );
    assert!(c.derived(0, 1).is_err());
    check_local_shard_count(8, 2).unwrap();
    check_local_shard_count(8, 0).unwrap();
    let message = check_local_shard_count(8, 3).unwrap_err().to_string();
    assert!(
        message.contains("3 parts do not divide the batch of 8"),
        "{message}"
    );
}

#[test]
fn folders_and_sizes() {
    let mut c = Config {
        output_dir: "out".into(),
        run_name: "r".into(),
        ..Config::default()
    };
    assert_eq!(
        c.checkpoint_folder(),
        std::path::Path::new("out/r/checkpoints")
    );
    c.checkpoint_dir = "elsewhere".into();
    assert_eq!(c.checkpoint_folder(), std::path::Path::new("elsewhere"));
}
