//! Training that is killed at random moments and started again.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::runs::Place;
use crate::common::text;
use maxdiff::metrics::read_json_lines;

/// How often a run is killed; `scripts/kills` asks for 50.
fn kills() -> u32 {
    let asked = std::env::var("MAXDIFF_KILLS").ok();
    asked.map_or(2, |count| count.parse().unwrap())
}

/// The loss of each step, which a run that was killed may have computed more than once.
fn losses(run: &Path) -> BTreeMap<u64, Vec<f64>> {
    let mut losses: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for line in read_json_lines(&run.join("metrics.jsonl")).unwrap().lines {
        let step = line["step"].as_u64().unwrap();
        losses
            .entry(step)
            .or_default()
            .push(line["learning/loss"].as_f64().unwrap());
    }
    losses
}

/// Whenever it is killed, also while it encodes, a run continues with the losses of one that was not, and no shard is ever
/// found damaged.
#[test]
fn a_run_that_is_killed_at_any_moment_continues() {
    let place = Place::new("sd15");
    let encoded = place.path("encoded");
    let words = [
        "max_train_steps=8",
        "checkpoint_every=1",
        "checkpoints_total_limit=2",
        "per_device_batch_size=2",
        "random_flip=True",
        "caption_dropout=0.3",
        "lora_rank=2",
        "resume=auto",
    ];
    place.train("whole", &words);
    // A run as those that are killed: with compiled programs, and with everything to encode.
    fs::remove_dir_all(&encoded).unwrap();
    let start = Instant::now();
    place.train("timed", &words);
    let whole = start.elapsed();
    let seed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    let mut random = StdRng::seed_from_u64(seed);
    let (mut killed, mut ended) = (0, 0);
    while killed < kills() {
        // Half of the runs have to encode again.
        if (killed + ended) % 2 == 0 && encoded.exists() {
            fs::remove_dir_all(&encoded).unwrap();
        }
        let moment = whole.mul_f64(random.random_range(0.0..1.0));
        let mut run = place.train_command("killed", &words).spawn().unwrap();
        std::thread::sleep(moment);
        let is_over = run.try_wait().unwrap().is_some();
        run.kill().unwrap();
        let output = run.wait_with_output().unwrap();
        let log = text(&output.stderr);
        assert!(!log.contains("made again"), "seed {seed}: {log}");
        match is_over {
            false => killed += 1,
            true => {
                assert!(output.status.success(), "seed {seed}: {log}");
                ended += 1;
                // The next one starts anew.
                fs::remove_dir_all(place.path("killed")).unwrap();
            }
        }
        assert!(
            ended < 50 + 5 * kills(),
            "seed {seed}: no run lives as long as the first"
        );
    }
    let log = place.train("killed", &words);
    assert!(!log.contains("made again"), "seed {seed}: {log}");
    let expected = losses(&place.path("whole"));
    assert_eq!(expected.len(), 8);
    let found = losses(&place.path("killed"));
    assert_eq!(
        expected.keys().collect::<Vec<_>>(),
        found.keys().collect::<Vec<_>>()
    );
    for (step, losses) in found {
        assert!(
            losses.iter().all(|loss| *loss == expected[&step][0]),
            "seed {seed}, step {step}: {losses:?}"
        );
    }
    // Long enough that a kill between two runs would show.
    assert!(whole > Duration::from_millis(100));
}
