//! DreamBooth with prior preservation, from the outside.

use std::fs;

use super::runs::Place;

/// Class pictures are drawn once, by the model as it was, and train beside the subject's, of which a part counts.
#[test]
fn class_pictures_are_drawn_once_and_train_beside_the_subjects() {
    let place = Place::new("sd15");
    for at in 0..6 {
        fs::remove_file(place.path("data").join(format!("{at}.txt"))).unwrap();
    }
    place.make_transparent();
    let data = format!("instance_data_dir={}", place.path("data").display());
    let class = format!("class_data_dir={}", place.path("class").display());
    let words = |more: &[&'static str]| {
        let own = [
            data.as_str(),
            class.as_str(),
            "instance_prompt=a picture of sks",
            "with_prior_preservation=True",
            "class_prompt=a picture",
            "num_class_images=5",
            "per_device_batch_size=2",
            "learning_rate=1e-3",
            "lora_rank=2",
            "masked_loss=alpha",
        ];
        [&own, more].concat()
    };
    let pictures = || {
        let files = fs::read_dir(place.path("class")).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files
            .iter()
            .map(|file| fs::read(file).unwrap())
            .collect::<Vec<_>>()
    };
    let log = place.train("whole", &words(&["max_train_steps=4"]));
    assert!(log.contains("5 class pictures"), "{log}");
    // Both prompts and the empty one.
    assert!(
        log.contains("encoded 11 images") && log.contains("encoded 3 captions"),
        "{log}"
    );
    let drawn = pictures();
    assert_eq!(drawn.len(), 5);
    // What is missing is drawn again as it was.
    fs::remove_file(place.path("class/class-00005.png")).unwrap();
    let log = place.train("parts", &words(&["max_train_steps=2"]));
    assert!(
        log.contains("5 class pictures") && !log.contains("encoded"),
        "{log}"
    );
    assert!(drawn == pictures());
    let log = place.train("parts", &words(&["max_train_steps=4"]));
    assert!(!log.contains("class pictures"), "{log}");
    assert_eq!(place.losses("whole"), place.losses("parts"));
    place.train(
        "other",
        &words(&["max_train_steps=1", "prior_loss_weight=0.5"]),
    );
    let [whole, other] = ["whole", "other"].map(|out| place.losses(out)[0]);
    assert!(other < whole && other > 0.5 * whole, "{other} {whole}");

    for (words, expected) in [
        (
            &[data.as_str(), "with_prior_preservation=True"][..],
            "prior preservation without class prompt",
        ),
        (
            &[data.as_str(), "dataset_type=folder", "train_data_dir=x"],
            "give one of the two",
        ),
        (
            &[
                "instance_data_dir=/nowhere",
                "with_prior_preservation=True",
                "class_prompt=x",
            ],
            "instance_data_dir=/nowhere: no such folder",
        ),
        (
            &[
                data.as_str(),
                "with_prior_preservation=True",
                "class_prompt=x",
                "enable_bucket=True",
            ],
            "class pictures are squares",
        ),
    ] {
        let (code, log) = place.try_train("none", words);
        assert_eq!(code, Some(2), "{log}");
        assert!(log.contains(expected), "{log}");
    }
}
