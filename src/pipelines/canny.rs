//! Canny's edge detector, the hint that most ControlNets take: OpenCV's `Canny` for 8-bit images, to the bit.
//!
//! Steps (Canny 1986, "A computational approach to edge detection"): gradients by 3x3 Sobel filters, with the border
//! repeated outwards; their L1 norm, from the channel where it is largest; suppression of every pixel that is not a
//! maximum across its edge; and hysteresis, which keeps what exceeds the high threshold and, of what exceeds the low
//! one, all that is connected to that. Nothing is smoothed first, as OpenCV does not either.

use super::pixels::RGB;

/// The thresholds that ControlNets' own examples use.
pub const THRESHOLDS: [u16; 2] = [100, 200];

/// Why an image has no edges to find.
#[derive(Debug, thiserror::Error)]
#[error("Canny: {height} x {width} pixels of 3 bytes take {expected}, found {found}")]
pub struct CannyError {
    pub height: usize,
    pub width: usize,
    /// The bytes of such an image; more than fit in memory count as the largest number.
    pub expected: usize,
    pub found: usize,
}

/// The state of a pixel while edges are traced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pixel {
    No,
    /// Above the low threshold: an edge if connected to one.
    Maybe,
    Edge,
}

/// The tangent of 22.5 degrees in units of 2^-15, OpenCV's constant.
const TAN_22: i32 = 13573;

/// The edges of an RGB image `[height, width, 3]`, as an image of the same size: white edges on black.
///
/// A gradient's L1 norm is at most 2040. Thresholds in the wrong order are swapped, as OpenCV does.
///
/// # Errors
/// When `rgb` does not have three bytes for each pixel.
pub fn canny(
    rgb: &[u8],
    [height, width]: [usize; 2],
    [low, high]: [u16; 2],
) -> Result<Vec<u8>, CannyError> {
    let expected = height.saturating_mul(width).saturating_mul(RGB);
    if rgb.len() != expected {
        return Err(CannyError {
            height,
            width,
            expected,
            found: rgb.len(),
        });
    }
    let (low, high) = (i32::from(low.min(high)), i32::from(low.max(high)));
    let gradients = Gradients::of(rgb, height, width);

    let mut pixels = vec![Pixel::No; height * width];
    let mut edges = Vec::new();
    for y in 0..height {
        for x in 0..width {
            let norm = gradients.norm(y, x, [0, 0]);
            if norm > low && gradients.is_maximum(y, x) {
                pixels[y * width + x] = if norm > high {
                    edges.push([y, x]);
                    Pixel::Edge
                } else {
                    Pixel::Maybe
                };
            }
        }
    }
    while let Some([y, x]) = edges.pop() {
        for ny in y.saturating_sub(1)..(y + 2).min(height) {
            for nx in x.saturating_sub(1)..(x + 2).min(width) {
                let neighbour = &mut pixels[ny * width + nx];
                if *neighbour == Pixel::Maybe {
                    *neighbour = Pixel::Edge;
                    edges.push([ny, nx]);
                }
            }
        }
    }
    let white = |&pixel: &Pixel| [if pixel == Pixel::Edge { 255 } else { 0 }; RGB];
    Ok(pixels.iter().flat_map(white).collect())
}

/// The horizontal and vertical gradient of each pixel, of the channel where it is largest.
struct Gradients {
    height: usize,
    width: usize,
    /// `[horizontal, vertical]`
    values: Vec<[i32; 2]>,
}

impl Gradients {
    fn of(rgb: &[u8], height: usize, width: usize) -> Self {
        let mut values = Vec::with_capacity(height * width);
        for y in 0..height {
            let rows = [y.saturating_sub(1), y, (y + 1).min(height - 1)];
            for x in 0..width {
                let columns = [x.saturating_sub(1), x, (x + 1).min(width - 1)];
                let mut largest = [0, 0];
                for channel in 0..RGB {
                    let at = |row: usize, column: usize| {
                        i32::from(rgb[(rows[row] * width + columns[column]) * RGB + channel])
                    };
                    let column = |c: usize| at(0, c) + 2 * at(1, c) + at(2, c);
                    let row = |r: usize| at(r, 0) + 2 * at(r, 1) + at(r, 2);
                    let gradient = [column(2) - column(0), row(2) - row(0)];
                    if norm(gradient) > norm(largest) {
                        largest = gradient;
                    }
                }
                values.push(largest);
            }
        }
        Gradients {
            height,
            width,
            values,
        }
    }

    /// The norm at the pixel `step` (down, right) away from one; 0 outside of the image.
    fn norm(&self, y: usize, x: usize, step: [isize; 2]) -> i32 {
        let (y, x) = (y.checked_add_signed(step[0]), x.checked_add_signed(step[1]));
        match (y, x) {
            (Some(y), Some(x)) if y < self.height && x < self.width => {
                norm(self.values[y * self.width + x])
            }
            _ => 0,
        }
    }

    /// Whether the norm exceeds those of both neighbours in the gradient's direction, rounded to a multiple of 45
    /// degrees. Of two equal pixels side by side the right or lower one is none; of two on a diagonal both are none.
    fn is_maximum(&self, y: usize, x: usize) -> bool {
        let [dx, dy] = self.values[y * self.width + x];
        let here = norm([dx, dy]);
        let both = |step: [isize; 2]| {
            let before = self.norm(y, x, step.map(|s| -s));
            (before, self.norm(y, x, step))
        };
        let rise = dy.abs() << 15;
        let shallow = dx.abs() * TAN_22;
        // tan(67.5) is tan(22.5) + 2.
        let steep = shallow + (dx.abs() << 16);
        if rise < shallow {
            let (left, right) = both([0, 1]);
            here > left && here >= right
        } else if rise > steep {
            let (above, below) = both([1, 0]);
            here > above && here >= below
        } else {
            let right = if (dx < 0) == (dy < 0) { 1 } else { -1 };
            let (above, below) = both([1, right]);
            here > above && here > below
        }
    }
}

fn norm([dx, dy]: [i32; 2]) -> i32 {
    dx.abs() + dy.abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The edges of a grey image, one character a pixel.
    fn edges(rows: &[&[u8]], thresholds: [u16; 2]) -> Vec<String> {
        let size = [rows.len(), rows[0].len()];
        let rgb: Vec<u8> = rows
            .iter()
            .flat_map(|row| row.iter().flat_map(|&v| [v; 3]))
            .collect();
        let found = canny(&rgb, size, thresholds).unwrap();
        found
            .chunks(3 * size[1])
            .map(|row| {
                row.chunks(3)
                    .map(|p| match p {
                        [0, 0, 0] => '.',
                        [255, 255, 255] => '#',
                        _ => panic!("{p:?}"),
                    })
                    .collect()
            })
            .collect()
    }

    #[test]
    fn a_step_is_one_line_on_its_first_side() {
        // Both sides of a step have the gradient 4 * 60 = 240: the left and the upper one count.
        let row: &[u8] = &[10, 10, 10, 70, 70, 70];
        assert_eq!(edges(&[row; 4], [100, 200]), ["..#..."; 4]);
        let (dark, light): (&[u8], &[u8]) = (&[10; 4], &[70; 4]);
        assert_eq!(
            edges(&[dark, dark, light, light], [100, 200]),
            ["....", "####", "....", "...."]
        );
        // 4 * 50 = 200 does not exceed 200, and falls as well as rises.
        let row: &[u8] = &[60, 60, 60, 10, 10, 10];
        assert_eq!(edges(&[row; 3], [100, 200]), ["......"; 3]);
        assert_eq!(edges(&[row; 3], [100, 199]), ["..#..."; 3]);
    }

    #[test]
    fn a_single_pixel_is_ringed() {
        // Around a point of 100: 200 beside it, 100 + 100 at its corners, 0 on it. Of these the corners lie in the
        // direction of (1, 1), where there is nothing larger; above and on the left there is nothing before them.
        let mut rows = [[0u8; 5]; 5];
        rows[2][2] = 100;
        let rows: Vec<&[u8]> = rows.iter().map(|r| r.as_slice()).collect();
        assert_eq!(
            edges(&rows, [100, 199]),
            [".....", ".###.", ".#.#.", ".###.", "....."]
        );
    }

    #[test]
    fn diagonals_follow_the_gradient() {
        // Both sides of a diagonal step of 100 have the gradient (300, 300). Neighbours along it are two diagonals
        // away, where it is smaller.
        let step = |y: usize, x: usize| if x + y >= 6 { 100u8 } else { 0 };
        let rows: Vec<Vec<u8>> = (0..7)
            .map(|y| (0..7).map(|x| step(y, x)).collect())
            .collect();
        let rows: Vec<&[u8]> = rows.iter().map(|r| r.as_slice()).collect();
        let found = edges(&rows, [100, 200]);
        for (y, row) in found.iter().enumerate().take(6).skip(1) {
            let mut expected = ".......".to_string();
            expected.replace_range(5 - y..7 - y, "##");
            assert_eq!(*row, expected);
        }
        // A level between them has the largest gradient, and those beside it, two diagonals apart, are equal.
        let ramp = |y: usize, x: usize| match (x + y).cmp(&6) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => 100u8,
            std::cmp::Ordering::Greater => 200,
        };
        let rows: Vec<Vec<u8>> = (0..7)
            .map(|y| (0..7).map(|x| ramp(y, x)).collect())
            .collect();
        let rows: Vec<&[u8]> = rows.iter().map(|r| r.as_slice()).collect();
        let found = edges(&rows, [100, 200]);
        for (y, row) in found.iter().enumerate().take(6).skip(1) {
            let mut expected = ".......".to_string();
            expected.replace_range(6 - y..7 - y, "#");
            assert_eq!(*row, expected);
        }
    }

    #[test]
    fn weak_edges_stay_where_they_touch_strong_ones() {
        // The step weakens downwards. On its right side the gradient is (4 v, 24): above 200 down to v = 48, and above
        // 100 to the end.
        let rows = [60, 56, 52, 48, 44, 40, 36].map(|v| vec![0, 0, 0, v, v, v]);
        let rows: Vec<&[u8]> = rows.iter().map(|r| r.as_slice()).collect();
        assert_eq!(edges(&rows, [100, 200]), ["...#.."; 7]);
        // Without the strong part nothing stays.
        assert_eq!(edges(&rows[4..], [100, 200]), ["......"; 3]);
    }

    #[test]
    fn the_channel_with_the_largest_gradient_decides() {
        // Red falls by 20, green rises by 60: together they would be weak.
        let rgb: Vec<u8> = [[20, 0, 0], [20, 0, 0], [0, 60, 0], [0, 60, 0]]
            .concat()
            .repeat(3);
        let found = canny(&rgb, [3, 4], THRESHOLDS).unwrap();
        let row: Vec<u8> = found.chunks(3).take(4).map(|p| p[0]).collect();
        assert_eq!(row, [0, 255, 0, 0]);
    }

    #[test]
    fn sizes_are_checked_and_thresholds_swapped() {
        let error = canny(&[0; 11], [2, 2], THRESHOLDS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Canny: 2 x 2 pixels of 3 bytes take 12, found 11"
        );
        assert!(canny(&[], [usize::MAX, 2], THRESHOLDS).is_err());
        assert!(canny(&[], [0, 7], THRESHOLDS).unwrap().is_empty());
        assert_eq!(canny(&[9; 3], [1, 1], THRESHOLDS).unwrap(), [0; 3]);
        let row: &[u8] = &[10, 10, 10, 70, 70, 70];
        assert_eq!(edges(&[row; 3], [200, 100]), edges(&[row; 3], [100, 200]));
    }
}
