//! The sizes that PixArt was trained with, of which diffusers takes the one whose shape is nearest
//! (`use_resolution_binning`).

/// Heights and widths in sixteenths of the side of a square, wide ones first (diffusers' `ASPECT_RATIO_1024_BIN` and those
/// for 512 and 256 pixels).
const BINS: [[usize; 2]; 33] = [
    [8, 32],
    [8, 29],
    [9, 28],
    [9, 27],
    [9, 26],
    [10, 25],
    [10, 24],
    [11, 23],
    [11, 22],
    [11, 21],
    [12, 21],
    [12, 20],
    [13, 19],
    [13, 18],
    [14, 18],
    [14, 17],
    [15, 17],
    [15, 16],
    [16, 16],
    [16, 15],
    [17, 15],
    [17, 14],
    [18, 14],
    [18, 13],
    [19, 13],
    [20, 12],
    [21, 12],
    [22, 11],
    [23, 11],
    [24, 10],
    [25, 10],
    [27, 9],
    [32, 8],
];
/// Those that the table for 2048 pixels has beside them.
const LARGE_BINS: [[usize; 2]; 7] = [
    [8, 31],
    [8, 30],
    [26, 9],
    [28, 9],
    [29, 8],
    [30, 8],
    [31, 8],
];

/// Pixels of a side for each latent.
const PIXELS: usize = 8;

/// Height and width that a transformer for latents of `sample_size` a side was trained with, the nearest in shape to `size`;
/// `None` where diffusers has no table for it.
pub fn resolution_bin(sample_size: usize, [height, width]: [usize; 2]) -> Option<[usize; 2]> {
    let side = sample_size * PIXELS;
    let more: &[[usize; 2]] = match side {
        256 | 512 | 1024 => &[],
        2048 => &LARGE_BINS,
        _ => return None,
    };
    let shape = height as f64 / width as f64;
    let distance = |bin: &&[usize; 2]| (ratio(**bin) - shape).abs();
    let bins = BINS.iter().chain(more);
    // Of two that are as near, diffusers takes the wider.
    let nearest = bins.min_by(|a, b| {
        let by_shape = ratio(**a).total_cmp(&ratio(**b));
        distance(a).total_cmp(&distance(b)).then(by_shape)
    });
    nearest.map(|bin| bin.map(|sixteenths| sixteenths * side / 16))
}

/// The height over the width, with the two decimals of diffusers' tables.
fn ratio([height, width]: [usize; 2]) -> f64 {
    (100.0 * height as f64 / width as f64).round_ties_even() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What diffusers 0.42 gives (`PixArtImageProcessor.classify_height_width_bin` with its tables).
    #[test]
    fn sizes_are_those_of_diffusers_tables() {
        for (sample_size, size, expected) in CASES {
            assert_eq!(
                resolution_bin(sample_size, size),
                Some(expected),
                "{size:?}"
            );
        }
        assert_eq!(resolution_bin(96, [512, 512]), None);
    }

    const CASES: [(usize, [usize; 2], [usize; 2]); 12] = [
        (128, [1024, 1024], [1024, 1024]),
        (128, [720, 1280], [768, 1344]),
        (128, [1000, 1010], [1024, 1024]),
        (128, [640, 64], [2048, 512]),
        (64, [500, 700], [416, 576]),
        (64, [512, 768], [416, 608]),
        (32, [300, 200], [304, 208]),
        (256, [2048, 900], [3072, 1280]),
        (256, [3000, 820], [3712, 1024]),
        (256, [100, 390], [1024, 3968]),
        (128, [1280, 720], [1344, 768]),
        (128, [97, 100], [960, 1024]),
    ];
}
