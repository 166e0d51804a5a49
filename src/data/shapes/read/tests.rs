//! What the reader must get right, and what it must not accept.

use rayon::prelude::*;

use super::*;
use crate::data::rng::{KeyedRng, Stream};
use crate::data::shapes::{Shapes, ShapesOptions, Split};

fn dataset(resolution: usize, seed: u64) -> Shapes {
    let split = Split::Train;
    Shapes::new(ShapesOptions {
        resolution,
        seed,
        split,
        ..ShapesOptions::default()
    })
    .unwrap()
}

/// Gaussian by Box and Muller.
fn gaussian(rng: &mut KeyedRng) -> f64 {
    (-2.0 * (1.0 - rng.unit()).ln()).sqrt() * (std::f64::consts::TAU * rng.unit()).cos()
}

fn add_noise(image: &mut RgbImage, sigma: f64, index: u64) {
    let mut rng = KeyedRng::new(99, Stream::Order, index, 0);
    for value in image.iter_mut() {
        let noisy = f64::from(*value) + 255.0 * sigma * gaussian(&mut rng);
        *value = noisy.round().clamp(0.0, 255.0) as u8;
    }
}

/// Score over images spoilt by `spoil`, against their own captions or those of the image
/// `shift` later.
fn score(
    count: usize,
    resolution: usize,
    shift: usize,
    spoil: impl Fn(RgbImage, usize) -> RgbImage + Sync,
) -> ReadScore {
    let dataset = dataset(resolution, 5);
    let verdicts: Vec<Verdict> = (0..count)
        .into_par_iter()
        .map(|index| {
            let image = spoil(dataset.get(index).image(), index);
            let verdict = read(&image).matches(&dataset.scene(index + shift).0);
            if shift == 0 && !verdict.all {
                eprintln!("{}: {:?}", dataset.scene(index).0, read(&image));
            }
            verdict
        })
        .collect();
    let mut total = ReadScore::default();
    verdicts.into_iter().for_each(|verdict| total.add(verdict));
    println!("{total:?}");
    total
}

#[test]
fn colours_and_backgrounds_are_far_apart() {
    let names = Colour::ALL
        .map(|c| lab(rgb(c.rgb())))
        .into_iter()
        .chain(Background::ALL.map(|b| lab(rgb(b.rgb()))))
        .collect::<Vec<_>>();
    for (i, &a) in names.iter().enumerate() {
        for &b in &names[..i] {
            // Ten times what is just noticed side by side, and above twice the drift of 15 that
            // `MIN_CONTRAST` allows a background.
            assert!(distance(a, b) > 40.0, "{a:?} {b:?}: {}", distance(a, b));
        }
    }
}

#[test]
fn lab_of_known_colours() {
    // Values of the CIE formulas for sRGB white and red under D65.
    assert!(distance(lab([1.0; 3]), [100.0, 0.0, 0.0]) < 0.1);
    assert!(distance(lab([1.0, 0.0, 0.0]), [53.24, 80.09, 67.20]) < 0.1);
}

#[test]
fn clean_images_are_read_right() {
    let score = score(600, 32, 0, |image, _| image);
    assert!(score.fraction(score.all_right) >= 0.995, "{score:?}");
}

#[test]
fn noise_and_blur_are_borne() {
    let noisy = score(200, 32, 0, |mut image, index| {
        add_noise(&mut image, 0.05, index as u64);
        image
    });
    assert!(noisy.fraction(noisy.both_right) >= 0.97, "{noisy:?}");
    for sigma in [0.7, 1.0] {
        let blurred = score(100, 32, 0, |image, index| {
            let mut image = imageops::blur(&image, sigma);
            add_noise(&mut image, 0.05, index as u64);
            image
        });
        assert!(blurred.fraction(blurred.both_right) >= 0.97, "{blurred:?}");
    }
}

#[test]
fn faded_and_tinted_images_with_specks_are_borne() {
    let score = score(200, 32, 0, |mut image, index| {
        let mut rng = KeyedRng::new(98, Stream::Order, index as u64, 0);
        let tint: [f64; 3] = std::array::from_fn(|_| rng.between(-16.0, 16.0));
        for pixel in image.pixels_mut() {
            for (value, tint) in pixel.0.iter_mut().zip(tint) {
                let faded = 128.0 + (f64::from(*value) - 128.0) * 0.9 + tint;
                *value = faded.round().clamp(0.0, 255.0) as u8;
            }
        }
        for _ in 0..5 {
            let (x, y) = (rng.below(32) as u32, rng.below(32) as u32);
            image.put_pixel(x, y, image::Rgb(rng.pick(&Colour::ALL).rgb()));
        }
        image
    });
    assert!(score.fraction(score.both_right) >= 0.95, "{score:?}");
}

#[test]
fn other_resolutions_are_read() {
    for resolution in [24, 64, 100] {
        let score = score(60, resolution, 0, |image, _| image);
        assert!(
            score.fraction(score.both_right) >= 0.99,
            "{resolution}: {score:?}"
        );
    }
}

#[test]
fn captions_of_other_images_are_refused() {
    // Two images of one shape (a quarter of the pairs) agree in background, colour and kind
    // with odds of 1 / 72; those of two shapes hardly ever.
    let score = score(400, 32, 1, |image, _| image);
    assert!(score.fraction(score.both_right) < 0.015, "{score:?}");
    assert!(score.fraction(score.shapes_right) < 0.25, "{score:?}");
}

#[test]
fn one_wrong_word_is_noticed() {
    let dataset = dataset(32, 6);
    for index in 0..60 {
        let (caption, scene) = dataset.scene(index);
        let image = dataset.get(index).image();
        let other = |all: &[Colour], c| *all.iter().find(|&&o| o != c).unwrap();
        let mut wrong = caption;
        wrong.first.colour = other(&Colour::ALL, caption.first.colour);
        assert!(!read(&image).matches(&wrong).both || wrong == caption);
        let mut wrong = caption;
        wrong.first.kind = *Kind::ALL
            .iter()
            .find(|&&k| k != scene.shapes[0].kind)
            .unwrap();
        let verdict = read(&image).matches(&wrong);
        assert!(!verdict.shapes && verdict.colours, "{caption}");
        let mut wrong = caption;
        wrong.background = *Background::ALL
            .iter()
            .find(|&&b| b != caption.background)
            .unwrap();
        let verdict = read(&image).matches(&wrong);
        assert!(!verdict.colours && verdict.shapes, "{caption}");
        if let Some((relation, second)) = caption.second {
            let mut wrong = caption;
            wrong.second = Some((
                match relation {
                    Relation::Above => Relation::Below,
                    Relation::Below => Relation::Above,
                    Relation::LeftOf => Relation::RightOf,
                    Relation::RightOf => Relation::LeftOf,
                },
                second,
            ));
            let verdict = read(&image).matches(&wrong);
            let same = (caption.first.colour, caption.first.kind) == (second.colour, second.kind);
            assert!(verdict.both && (same || !verdict.relation), "{caption}");
        }
    }
}

#[test]
fn images_without_shapes_are_accepted_for_no_caption() {
    let parse = |text: &str| Caption::parse(text).unwrap();
    let flat = RgbImage::from_pixel(32, 32, image::Rgb([255; 3]));
    assert!(read(&flat).shapes.is_empty());
    let red = RgbImage::from_pixel(32, 32, image::Rgb(Colour::Red.rgb()));
    let mut noise = RgbImage::new(32, 32);
    add_noise(&mut noise, 0.5, 3);
    // A bar as long as the image is red, and no shape of the vocabulary.
    let mut bar = flat.clone();
    for x in 0..32 {
        for y in 12..18 {
            bar.put_pixel(x, y, image::Rgb(Colour::Red.rgb()));
        }
    }
    for image in [&flat, &red, &noise, &bar] {
        for colour in Colour::ALL {
            for kind in Kind::ALL {
                let (colour, kind) = (colour.name(), kind.name());
                let caption = parse(&format!("a large {colour} {kind} on a white background"));
                let verdict = read(image).matches(&caption);
                assert!(!verdict.both, "{caption}: {:?}", read(image));
            }
        }
    }
}

#[test]
fn shapes_that_touch_are_told_apart_by_colour() {
    let mut image = RgbImage::from_pixel(32, 32, image::Rgb([255; 3]));
    for y in 10..21 {
        for x in 4..26 {
            let colour = if x < 15 { Colour::Red } else { Colour::Blue };
            image.put_pixel(x, y, image::Rgb(colour.rgb()));
        }
    }
    let caption =
        Caption::parse("a large red square left of a large blue square on a white background");
    let verdict = read(&image).matches(&caption.unwrap());
    assert!(verdict.all, "{:?}", read(&image));
}

#[test]
fn scores_reject_foreign_captions() {
    let image = RgbImage::new(32, 32);
    let score = ReadScore::of([(&image, "a photo of a cat")], &OtherWords::default());
    assert!(matches!(score, Err(DataError::ShapesCaption { .. })));
}

#[test]
fn other_forms_have_no_kind() {
    type Inside = fn(f64, f64) -> bool;
    let forms: [(&str, Inside); 7] = [
        ("ring", |x, y| (3.0..6.5).contains(&x.hypot(y))),
        ("flat ellipse", |x, y| (x / 7.0).hypot(y / 3.5) < 1.0),
        ("flat rectangle", |x, y| x.abs() < 6.0 && y.abs() < 3.0),
        ("angle", |x, y| {
            x.abs().max(y.abs()) < 6.0 && (x < -1.0 || y > 1.0)
        }),
        ("cross", |x, y| {
            x.abs().max(y.abs()) < 6.0 && x.abs().min(y.abs()) < 2.0
        }),
        ("half circle", |x, y| x.hypot(y) < 6.5 && y < 0.0),
        ("triangle on its tip", |x, y| {
            y.abs() < 6.5 && x.abs() < (6.5 - y) / 2.0
        }),
    ];
    for (name, inside) in forms {
        let image = RgbImage::from_fn(32, 32, |x, y| {
            let shown = inside(f64::from(x) - 15.5, f64::from(y) - 15.5);
            image::Rgb(if shown { Colour::Red.rgb() } else { [255; 3] })
        });
        let shapes = read(&image).shapes;
        assert_eq!(
            (shapes.len(), shapes[0].kind),
            (1, None),
            "{name}: {shapes:?}"
        );
        assert_eq!(shapes[0].colour, Colour::Red, "{name}");
    }
}
