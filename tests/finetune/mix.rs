//! A run over several folders, each with a share of the samples.

use super::runs::Place;
use std::fs;

/// Two folders with weights, of which one has a picture of the other and one of another size: the run continues bit for bit.
#[test]
fn a_run_over_several_folders_continues_bit_for_bit() {
    let place = Place::new("sd15");
    let more = place.path("more");
    fs::create_dir(&more).unwrap();
    place.add_picture("wide", 40, 16, "another");
    for (name, from) in [("wide", "wide"), ("same", "0")] {
        for ending in ["png", "txt"] {
            let from = place.path("data").join(format!("{from}.{ending}"));
            fs::copy(from, more.join(format!("{name}.{ending}"))).unwrap();
        }
    }
    for ending in ["png", "txt"] {
        fs::remove_file(place.path("data").join(format!("wide.{ending}"))).unwrap();
    }
    let mix = |data: u64, others: u64| {
        let folder = place.path("data");
        format!(
            "train_data_mix={{\"{}\": {data}, \"{}\": {others}}}",
            folder.display(),
            more.display()
        )
    };
    let own = mix(3, 2);
    let words = |steps: &'static str| {
        [
            own.as_str(),
            "enable_bucket=True",
            "bucket_reso_steps=8",
            "per_device_batch_size=2",
            "learning_rate_schedule_steps=6",
            "lora_rank=2",
            steps,
        ]
    };
    let log = place.train("whole", &words("max_train_steps=6"));
    for (folder, expected) in [
        ("data", "weight 3, pictures 6, repeats 1, 60.0 %"),
        ("more", "weight 2, pictures 2, repeats 2, 40.0 %"),
    ] {
        let expected = format!("{}: {expected}", place.path(folder).display());
        assert!(log.contains(&expected), "{log}");
    }
    assert!(log.contains("2 buckets: 24x8 (1), 16x16 (7)"), "{log}");
    // The same picture is encoded once.
    assert!(log.contains("encoded 7 images"), "{log}");
    place.train("parts", &words("max_train_steps=3"));
    place.train("parts", &words("max_train_steps=6"));
    assert_eq!(place.losses("whole"), place.losses("parts"));

    let mut other = words("max_train_steps=8");
    let changed = mix(1, 1);
    other[0] = &changed;
    let (code, log) = place.try_train("parts", &other);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("train_data_mix: saved"), "{log}");
}
