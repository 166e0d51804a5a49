//! How like two pictures of the same size are, by torchmetrics' definitions. Channels are numbers from 0 to 1.

use image::RgbImage;

/// Side of the windows of [`ssim`]: `2 * int(3.5 * SIGMA + 0.5) + 1`.
const WINDOW: usize = 11;
/// Least side of a picture: half a window is reflected.
pub const SMALLEST: usize = WINDOW / 2 + 1;
/// Standard deviation of a window's weights.
const SIGMA: f64 = 1.5;
/// What keeps quotients of dark and of flat windows finite: `0.01^2` and `0.03^2`.
const SMALL: [f64; 2] = [0.01 * 0.01, 0.03 * 0.03];

fn channel(value: u8) -> f64 {
    f64::from(value) / 255.0
}

/// The mean of the squared differences of all channels.
pub fn mean_squared_error(a: &RgbImage, b: &RgbImage) -> f64 {
    let both = a.as_raw().iter().zip(b.as_raw());
    let squares: f64 = both.map(|(a, b)| (channel(*a) - channel(*b)).powi(2)).sum();
    squares / a.as_raw().len().max(1) as f64
}

/// The peak signal-to-noise ratio of a mean squared error, in decibels; infinite without an error.
pub fn decibels(error: f64) -> f64 {
    match error == 0.0 {
        true => f64::INFINITY,
        false => -10.0 * error.log10(),
    }
}

/// Structural similarity (Wang et al. 2004): the mean over all channels and all pixels, each the middle of a window with
/// weights of a normal distribution. At the edges windows see the picture reflected. `None` of pictures with a side below
/// [`SMALLEST`].
pub fn ssim(a: &RgbImage, b: &RgbImage) -> Option<f64> {
    let sides = [a.width() as usize, a.height() as usize];
    if sides.iter().any(|side| *side < SMALLEST) {
        return None;
    }
    let mut sum = 0.0;
    for at in 0..3 {
        let values =
            |image: &RgbImage| -> Vec<f64> { image.pixels().map(|p| channel(p.0[at])).collect() };
        let (x, y) = (values(a), values(b));
        let product =
            |x: &[f64], y: &[f64]| -> Vec<f64> { x.iter().zip(y).map(|(x, y)| x * y).collect() };
        let [xx, yy, xy] = [product(&x, &x), product(&y, &y), product(&x, &y)];
        let [x, y, xx, yy, xy] = [x, y, xx, yy, xy].map(|values| blurred(&values, sides));
        for at in 0..x.len() {
            let (x, y) = (x[at], y[at]);
            let [of_x, of_y] = [xx[at] - x * x, yy[at] - y * y].map(|variance| variance.max(0.0));
            let likeness = (2.0 * x * y + SMALL[0]) * (2.0 * (xy[at] - x * y) + SMALL[1]);
            sum += likeness / ((x * x + y * y + SMALL[0]) * (of_x + of_y + SMALL[1]));
        }
    }
    Some(sum / (3 * sides[0] * sides[1]) as f64)
}

/// The weighted mean of the window around each value of an image of `[width, height]`.
fn blurred(values: &[f64], [width, height]: [usize; 2]) -> Vec<f64> {
    let weights = weights();
    let mean = |middle: usize, size: usize, value: &dyn Fn(usize) -> f64| -> f64 {
        let places = (0..WINDOW).map(|at| reflected(middle + at, size));
        places
            .zip(weights)
            .map(|(place, weight)| value(place) * weight)
            .sum()
    };
    let rows: Vec<f64> = (0..values.len())
        .map(|at| {
            let row = at / width * width;
            mean(at % width, width, &|column| values[row + column])
        })
        .collect();
    (0..rows.len())
        .map(|at| mean(at / width, height, &|row| rows[row * width + at % width]))
        .collect()
}

/// The place of a line of `size` values that place `at` of the line with half a window before and after it shows: edges are
/// not repeated.
fn reflected(at: usize, size: usize) -> usize {
    let place = at.abs_diff(WINDOW / 2);
    match place < size {
        true => place,
        false => 2 * (size - 1) - place,
    }
}

/// Weights of the places of a line of a window; their sum is 1.
fn weights() -> [f64; WINDOW] {
    let middle = (WINDOW / 2) as f64;
    let weights: [f64; WINDOW] = std::array::from_fn(|at| {
        let distance = (at as f64 - middle) / SIGMA;
        (-distance * distance / 2.0).exp()
    });
    let sum: f64 = weights.iter().sum();
    weights.map(|weight| weight / sum)
}
