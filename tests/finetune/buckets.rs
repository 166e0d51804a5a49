//! Aspect-ratio buckets: those of kohya's trainers, and a run over several of them.

use maxdiff::data::{BucketOptions, Buckets};

use super::runs::Place;
use crate::common::Golden;

/// Values of the golden file, two and two.
fn pairs(golden: &Golden, name: &str) -> Vec<[usize; 2]> {
    let values = golden.values(name).chunks_exact(2);
    values
        .map(|pair| [0, 1].map(|at| pair[at] as usize))
        .collect()
}

#[test]
fn pictures_go_to_the_buckets_of_kohyas_trainers() {
    let golden = Golden::read("buckets.safetensors");
    let sizes = pairs(&golden, "in/sizes");
    assert_eq!(sizes.len(), 1000);
    for (case, values) in golden.meta["cases"].as_object().unwrap() {
        let value = |at: usize| values[at].as_u64().unwrap() as usize;
        let options = BucketOptions {
            resolution: value(0),
            min_side: value(1),
            max_side: value(2),
            steps: value(3),
        };
        let buckets = Buckets::new(options).unwrap();
        let turned = |[height, width]: [usize; 2]| [width, height];
        let made: Vec<[usize; 2]> = buckets.sizes().map(turned).collect();
        assert_eq!(
            made,
            pairs(&golden, &format!("out/{case}/buckets")),
            "{case}"
        );
        let chosen = sizes
            .iter()
            .map(|[width, height]| turned(buckets.of([*height, *width])));
        let chosen: Vec<[usize; 2]> = chosen.collect();
        assert_eq!(
            chosen,
            pairs(&golden, &format!("out/{case}/chosen")),
            "{case}"
        );
    }
}

/// Pictures of three shapes train in turns, also in two batches of a step, with masks and with tags in two orders; the run
/// continues bit for bit, and its programs come from the cache. One picture is too small. A changed mask is encoded again.
#[test]
fn a_run_over_several_buckets_continues_bit_for_bit() {
    let place = Place::new("sdxl");
    for (name, width, height) in [("wide", 40, 16), ("high", 18, 40), ("small", 60, 7)] {
        place.add_picture(name, width, height, "one, caption\nanother");
    }
    place.add_masks(|x| if x < 9 { 255 } else { 40 });
    let masks = place.masks();
    let [masked, folder] = masks.each_ref().map(String::as_str);
    let words = |steps| {
        [
            masked,
            folder,
            "caption_shuffles=2",
            "enable_bucket=True",
            "bucket_reso_steps=8",
            "max_bad_image_fraction=0.2",
            "random_flip=True",
            "per_device_batch_size=2",
            "gradient_accumulation_steps=2",
            "learning_rate_schedule_steps=6",
            "learning_rate=1e-3",
            "folder_repeats=True",
            "lora_rank=2",
            steps,
        ]
    };
    let log = place.train("whole", &words("max_train_steps=6"));
    assert!(
        log.contains("small.png: 60x7 pixels are below the smallest bucket"),
        "{log}"
    );
    assert!(
        log.contains("3 buckets: 24x8 (1), 16x16 (6), 8x24 (1)"),
        "{log}"
    );
    assert!(log.contains("encoded 16 images"), "{log}");
    assert!(log.contains("encoded 10 captions"), "{log}");
    place.train("parts", &words("max_train_steps=3"));
    let log = place.train("parts", &words("max_train_steps=6"));
    assert!(log.contains("loaded from the cache"), "{log}");
    assert_eq!(place.losses("whole"), place.losses("parts"));
    assert!(place.losses("whole").iter().all(|loss| loss.is_finite()));
    image::GrayImage::from_pixel(20, 16, image::Luma([255]))
        .save(place.path("masks/0.png"))
        .unwrap();
    let log = place.train("other", &words("max_train_steps=1"));
    assert!(log.contains("encoded 2 images"), "{log}");

    for (word, expected) in [
        ("bucket_reso_steps=9", "the nearest is 10"),
        ("min_bucket_reso=20", "min_bucket_reso=20"),
        ("max_bucket_reso=8", "max_bucket_reso=8"),
    ] {
        let (code, log) =
            place.try_train("none", &["enable_bucket=True", "bucket_reso_steps=8", word]);
        assert_eq!(code, Some(2), "{log}");
        assert!(log.contains(expected), "{log}");
    }
}
