//! The fixed reader: from an image back to what it shows.
//!
//! Nothing here is learned. The reader does not share code with the renderer, and it is made for
//! the images of a diffusion model, whose colours drift and whose edges are soft:
//!
//! 1. The image is brought to 32 x 32 and smoothed by the binomial kernel (1 2 1) / 4.
//! 2. The background is the background colour of the vocabulary that most pixels are nearest to in
//!    CIELAB; its actual value is the median of those pixels.
//! 3. A pixel is taken as a mixture `background + alpha (colour - background)` of the shape colour
//!    whose line it lies nearest to. An edge pixel of a red shape on white thereby stays red with
//!    a small alpha and does not become pink. Pixels with alpha above one half are foreground.
//! 4. Connected foreground pixels form a component; one that holds two colours is split; specks
//!    below [`MIN_AREA`] are ignored.
//! 5. The colour of a component is the vocabulary's nearest in CIELAB to the mean of its pixels
//!    that differ most from the background.
//! 6. The kind is that of the ideal shape with the highest intersection over union of alphas,
//!    after a search over its place and diameter; below [`MIN_OVERLAP`], or at a diameter outside
//!    [`DIAMETERS`], the component has no kind and matches no caption.

mod fit;

use image::RgbImage;
use image::imageops::{self, FilterType};

use fit::{Window, best_fit};

use super::{Background, Caption, Colour, Kind, OtherWords, Relation, Size};
use crate::data::DataError;

/// Side at which images are read.
const SIDE: usize = 32;
const PIXELS: usize = SIDE * SIDE;
/// Least sum of alphas of a shape, in pixels at 32 x 32; the smallest shape of the dataset, a
/// small triangle, has 33.
const MIN_AREA: f32 = 12.0;
/// Least intersection over union with the ideal shape.
const MIN_OVERLAP: f32 = 0.75;
/// Between the largest small diameter (9) and the smallest large one (12).
const SIZE_BOUNDARY: f32 = 10.5;
/// Diameters outside are of no size that the vocabulary knows; the dataset's are 8 to 13.2.
const DIAMETERS: std::ops::RangeInclusive<f32> = 5.5..=16.0;
/// Pixels beyond the foreground into which the soft edge of a shape may reach.
const REACH: usize = 3;
/// Least share of pixels that show the background; two large squares leave 0.66.
const MIN_BACKGROUND: f32 = 0.35;
/// Foreground pixels differ from the background at least so much (CIELAB distance), whatever their
/// alpha: a tint of the background is not a shape.
const MIN_CONTRAST: f32 = 14.0;
/// Share of a component's inner pixels that makes a second colour a second shape.
const SPLIT_SHARE: f32 = 0.25;

/// One shape that was found. Lengths and places are fractions of the image's side.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadShape {
    pub colour: Colour,
    /// None where no ideal shape of a known size fits.
    pub kind: Option<Kind>,
    pub size: Size,
    /// Centre of the bounding box of the fitted shape.
    pub center: (f32, f32),
    pub diameter: f32,
    /// Intersection over union with the fitted shape, 0 to 1.
    pub overlap: f32,
}

/// The contents of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// None where too little of the image has the colour of a background.
    pub background: Option<Background>,
    /// By descending area.
    pub shapes: Vec<ReadShape>,
}

/// How a reading compares with a caption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The background has the caption's colour.
    pub background: bool,
    /// The background is right, there are as many shapes as the caption names, and their colours
    /// are those of the caption, each as often as there.
    pub colours: bool,
    /// There are as many shapes as the caption names, and their kinds are those of the caption,
    /// each as often as there.
    pub shapes: bool,
    /// The background is right and the shapes can be paired with those of the caption so that
    /// colour and kind agree in each pair: a red square and a blue circle are not a red circle and
    /// a blue square. This is the figure meant by "colours and shapes are right".
    pub both: bool,
    /// `both`, with pairs that agree in size too.
    pub sizes: bool,
    /// `both`, with a pairing for which the caption's relation holds between the centres along the
    /// axis on which they are further apart. The same as `both` for one shape.
    pub relation: bool,
    /// One pairing has all of it.
    pub all: bool,
}

/// Sums of verdicts over prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReadScore {
    pub prompts: usize,
    pub background_right: usize,
    pub colours_right: usize,
    pub shapes_right: usize,
    pub both_right: usize,
    pub sizes_right: usize,
    pub relation_right: usize,
    pub all_right: usize,
}

impl ReadScore {
    /// Adds one verdict.
    pub fn add(&mut self, verdict: Verdict) {
        self.prompts += 1;
        self.background_right += usize::from(verdict.background);
        self.colours_right += usize::from(verdict.colours);
        self.shapes_right += usize::from(verdict.shapes);
        self.both_right += usize::from(verdict.both);
        self.sizes_right += usize::from(verdict.sizes);
        self.relation_right += usize::from(verdict.relation);
        self.all_right += usize::from(verdict.all);
    }

    /// Reads each image and scores it against its caption, which is said with `words`.
    ///
    /// # Errors
    /// [`DataError::ShapesCaption`] for a caption that is not one of the dataset's.
    pub fn of<'a>(
        pairs: impl IntoIterator<Item = (&'a RgbImage, &'a str)>,
        words: &OtherWords,
    ) -> Result<Self, DataError> {
        let mut score = Self::default();
        for (image, caption) in pairs {
            score.add(read(image).matches(&words.parse(caption)?));
        }
        Ok(score)
    }

    /// `right` as a fraction of the prompts; 0 without prompts.
    pub fn fraction(&self, right: usize) -> f64 {
        if self.prompts == 0 {
            0.0
        } else {
            right as f64 / self.prompts as f64
        }
    }
}

impl Reading {
    /// Compares with a caption; [`Verdict`] defines each answer.
    pub fn matches(&self, caption: &Caption) -> Verdict {
        let wanted = caption.shapes();
        let background = self.background == Some(caption.background);
        let mut verdict = Verdict {
            background,
            colours: false,
            shapes: false,
            both: false,
            sizes: false,
            relation: false,
            all: false,
        };
        if self.shapes.len() != wanted.len() {
            return verdict;
        }
        let found: Vec<&ReadShape> = self.shapes.iter().collect();
        let mut pairings = vec![found.clone()];
        if found.len() == 2 {
            pairings.push(vec![found[1], found[0]]);
        }
        for pairing in pairings {
            let pairs = || pairing.iter().zip(&wanted);
            let colours = background && pairs().all(|(f, w)| f.colour == w.colour);
            let shapes = pairs().all(|(f, w)| f.kind == Some(w.kind));
            let both = colours && shapes;
            let sizes = both && pairs().all(|(f, w)| f.size == w.size);
            let relation = both
                && match (caption.second, &pairing[..]) {
                    (Some((relation, _)), [a, b]) => relation_between(a, b) == relation,
                    _ => true,
                };
            verdict.colours |= colours;
            verdict.shapes |= shapes;
            verdict.both |= both;
            verdict.sizes |= sizes;
            verdict.relation |= relation;
            verdict.all |= sizes && relation;
        }
        verdict
    }
}

fn relation_between(a: &ReadShape, b: &ReadShape) -> Relation {
    let (dx, dy) = (a.center.0 - b.center.0, a.center.1 - b.center.1);
    match (dy.abs() > dx.abs(), dx < 0.0, dy < 0.0) {
        (true, _, true) => Relation::Above,
        (true, _, false) => Relation::Below,
        (false, true, _) => Relation::LeftOf,
        (false, false, _) => Relation::RightOf,
    }
}

/// Reads an image of any size; one that is not square is read as if stretched to a square.
pub fn read(image: &RgbImage) -> Reading {
    let pixels = smoothed(image);
    let (background, base) = background_of(&pixels);
    let mask = foreground(&pixels, base);
    let occupied: Vec<bool> = mask.iter().map(Option::is_some).collect();
    let components = split_by_colour(connected(&occupied), &mask);

    // Each pixel near a component belongs to the nearest one, so that a neighbour's soft edge does
    // not count as part of this shape.
    let mut owner = [usize::MAX; PIXELS];
    for (id, component) in components.iter().enumerate() {
        for &at in component {
            owner[at] = id;
        }
    }
    for _ in 0..REACH {
        let before = owner;
        for at in 0..PIXELS {
            if before[at] == usize::MAX
                && let Some(next) = neighbours(at)
                    .map(|n| before[n])
                    .find(|&id| id != usize::MAX)
            {
                owner[at] = next;
            }
        }
    }

    let mut shapes: Vec<(f32, ReadShape)> = Vec::new();
    for (id, component) in components.iter().enumerate() {
        let (colour, actual) = colour_of(&pixels, component, base);
        let alpha: [f32; PIXELS] = std::array::from_fn(|at| match owner[at] == id {
            true => along(pixels[at], base, actual).0.clamp(0.0, 1.0),
            false => 0.0,
        });
        let Some(window) = Window::new(&alpha).filter(|window| window.area() >= MIN_AREA) else {
            continue;
        };
        let fit = best_fit(&window);
        let known = fit.overlap >= MIN_OVERLAP && DIAMETERS.contains(&fit.diameter);
        let side = SIDE as f32;
        shapes.push((
            window.area(),
            ReadShape {
                colour,
                kind: known.then_some(fit.kind),
                size: if fit.diameter < SIZE_BOUNDARY {
                    Size::Small
                } else {
                    Size::Large
                },
                center: (fit.center.0 / side, fit.center.1 / side),
                diameter: fit.diameter / side,
                overlap: fit.overlap,
            },
        ));
    }
    shapes.sort_by(|a, b| b.0.total_cmp(&a.0));
    Reading {
        background,
        shapes: shapes.into_iter().map(|(_, shape)| shape).collect(),
    }
}

/// sRGB in 0..1.
type Rgb = [f32; 3];

fn rgb(value: [u8; 3]) -> Rgb {
    value.map(|v| f32::from(v) / 255.0)
}

fn smoothed(image: &RgbImage) -> Vec<Rgb> {
    let side = SIDE as u32;
    let resized;
    let image = if image.dimensions() == (side, side) {
        image
    } else {
        resized = imageops::resize(image, side, side, FilterType::Triangle);
        &resized
    };
    let mut pixels: Vec<Rgb> = image.pixels().map(|p| rgb(p.0)).collect();
    for channel in 0..3 {
        let mut plane: Vec<f32> = pixels.iter().map(|p| p[channel]).collect();
        binomial(&mut plane, SIDE);
        for (pixel, value) in pixels.iter_mut().zip(plane) {
            pixel[channel] = value;
        }
    }
    pixels
}

/// (1 2 1) / 4 along both axes of a row-major plane, edges repeated.
fn binomial(plane: &mut [f32], width: usize) {
    let height = plane.len() / width;
    for (lines, stride, count, step) in [(height, width, width, 1), (width, 1, height, width)] {
        for line in 0..lines {
            let start = line * stride;
            let mut before = plane[start];
            for k in 0..count {
                let at = start + k * step;
                let here = plane[at];
                let after = if k + 1 < count {
                    plane[at + step]
                } else {
                    here
                };
                plane[at] = (before + 2.0 * here + after) / 4.0;
                before = here;
            }
        }
    }
}

/// CIELAB under D65. Its lightness is linear near black, where noise would otherwise look large.
fn lab(pixel: Rgb) -> [f32; 3] {
    let [r, g, b] = pixel.map(|v| {
        if v <= 0.04045 {
            v / 12.92
        } else {
            ((v + 0.055) / 1.055).powf(2.4)
        }
    });
    let f = |t: f32| {
        if t > 0.008_856 {
            t.cbrt()
        } else {
            7.787 * t + 16.0 / 116.0
        }
    };
    let x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505);
    let y = f(0.2126 * r + 0.7152 * g + 0.0722 * b);
    let z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089);
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

fn distance(a: [f32; 3], b: [f32; 3]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b) * (a - b))
        .sum::<f32>()
        .sqrt()
}

/// The background of the vocabulary that most pixels are nearest to, among all colours, and the
/// median of those pixels; no background, and white, if they are too few.
fn background_of(pixels: &[Rgb]) -> (Option<Background>, Rgb) {
    let backgrounds = Background::ALL.map(|b| lab(rgb(b.rgb())));
    let colours = Colour::ALL.map(|c| lab(rgb(c.rgb())));
    let mut members: [Vec<Rgb>; 3] = Default::default();
    for &pixel in pixels {
        let value = lab(pixel);
        let nearest_colour = colours
            .iter()
            .map(|&c| distance(c, value))
            .fold(f32::INFINITY, f32::min);
        let (id, nearest) = backgrounds
            .iter()
            .map(|&b| distance(b, value))
            .enumerate()
            .fold(
                (0, f32::INFINITY),
                |best, (id, d)| if d < best.1 { (id, d) } else { best },
            );
        if nearest < nearest_colour {
            members[id].push(pixel);
        }
    }
    let mut best = 0;
    for id in 1..members.len() {
        if members[id].len() > members[best].len() {
            best = id;
        }
    }
    let background = Background::ALL[best];
    let members = &members[best];
    if (members.len() as f32) < MIN_BACKGROUND * PIXELS as f32 {
        return (None, rgb(Background::White.rgb()));
    }
    let median = std::array::from_fn(|channel| {
        let mut values: Vec<f32> = members.iter().map(|p| p[channel]).collect();
        values.sort_by(f32::total_cmp);
        values[values.len() / 2]
    });
    (Some(background), median)
}

/// Position of `pixel` along the line from `base` (0) to `colour` (1), and its distance from the
/// segment between the two and a little beyond, in sRGB.
fn along(pixel: Rgb, base: Rgb, colour: Rgb) -> (f32, f32) {
    let axis: Rgb = std::array::from_fn(|k| colour[k] - base[k]);
    let offset: Rgb = std::array::from_fn(|k| pixel[k] - base[k]);
    let length: f32 = axis.iter().map(|v| v * v).sum();
    let dot: f32 = axis.iter().zip(offset).map(|(a, o)| a * o).sum();
    let alpha = dot / length.max(1e-6);
    let clamped = alpha.clamp(0.0, 1.0);
    let residual = distance(offset, axis.map(|v| v * clamped));
    (alpha, residual)
}

/// The shape colour each foreground pixel is a mixture of; None for background.
fn foreground(pixels: &[Rgb], base: Rgb) -> Vec<Option<Colour>> {
    let base_lab = lab(base);
    pixels
        .iter()
        .map(|&pixel| {
            let (colour, alpha, _) = Colour::ALL
                .into_iter()
                .map(|colour| {
                    let (alpha, residual) = along(pixel, base, rgb(colour.rgb()));
                    (colour, alpha, residual)
                })
                .fold((Colour::Red, 0.0, f32::INFINITY), |best, next| {
                    if next.2 < best.2 { next } else { best }
                });
            (alpha >= 0.5 && distance(lab(pixel), base_lab) >= MIN_CONTRAST).then_some(colour)
        })
        .collect()
}

/// The up to four pixels beside `at`.
fn neighbours(at: usize) -> impl Iterator<Item = usize> {
    let (row, column) = (at / SIDE, at % SIDE);
    [
        (row > 0).then(|| at - SIDE),
        (column > 0).then(|| at - 1),
        (column + 1 < SIDE).then(|| at + 1),
        (row + 1 < SIDE).then(|| at + SIDE),
    ]
    .into_iter()
    .flatten()
}

/// Four-connected components of the set pixels.
fn connected(mask: &[bool]) -> Vec<Vec<usize>> {
    let mut seen = [false; PIXELS];
    let mut components = Vec::new();
    for start in 0..PIXELS {
        if !mask[start] || seen[start] {
            continue;
        }
        seen[start] = true;
        let mut component = vec![start];
        let mut next = 0;
        while next < component.len() {
            for n in neighbours(component[next]) {
                if mask[n] && !seen[n] {
                    seen[n] = true;
                    component.push(n);
                }
            }
            next += 1;
        }
        components.push(component);
    }
    components
}

/// Pixels of a component all of whose neighbours belong to it; the whole component if none does.
fn core(component: &[usize]) -> Vec<usize> {
    let mut member = [false; PIXELS];
    for &at in component {
        member[at] = true;
    }
    let inner: Vec<usize> = component
        .iter()
        .copied()
        .filter(|&at| neighbours(at).all(|n| member[n]))
        .collect();
    if inner.is_empty() {
        component.to_vec()
    } else {
        inner
    }
}

/// Divides components in which a second colour fills a good part of the inside: two shapes that
/// touch.
fn split_by_colour(components: Vec<Vec<usize>>, mask: &[Option<Colour>]) -> Vec<Vec<usize>> {
    let mut result = Vec::new();
    for component in components {
        let inner = core(&component);
        let mut counts: Vec<(usize, Colour)> = Colour::ALL
            .into_iter()
            .map(|c| (inner.iter().filter(|&&at| mask[at] == Some(c)).count(), c))
            .collect();
        counts.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
        let (second_count, second) = counts[1];
        if (second_count as f32) < SPLIT_SHARE * inner.len() as f32 {
            result.push(component);
            continue;
        }
        let first = counts[0].1;
        let seeds: Vec<(usize, bool)> = inner
            .iter()
            .filter(|&&at| mask[at] == Some(first) || mask[at] == Some(second))
            .map(|&at| (at, mask[at] == Some(second)))
            .collect();
        let squared = |a: usize, b: usize| {
            let (dx, dy) = ((a % SIDE).abs_diff(b % SIDE), (a / SIDE).abs_diff(b / SIDE));
            dx * dx + dy * dy
        };
        let (mut a, mut b) = ([false; PIXELS], [false; PIXELS]);
        for &at in &component {
            let nearest = seeds.iter().min_by_key(|(seed, _)| squared(*seed, at));
            match nearest {
                Some((_, true)) => b[at] = true,
                _ => a[at] = true,
            }
        }
        // Colours scattered over each other do not make shapes: the parts must connect again.
        result.extend(connected(&a));
        result.extend(connected(&b));
    }
    result
}

/// The vocabulary's colour of a component and the actual one: the mean of the two fifths of its
/// inner pixels that are furthest from the background, which soft edges have diluted least.
fn colour_of(pixels: &[Rgb], component: &[usize], base: Rgb) -> (Colour, Rgb) {
    let mut inner = core(component);
    inner.sort_by(|&a, &b| distance(pixels[b], base).total_cmp(&distance(pixels[a], base)));
    inner.truncate((inner.len() * 2 / 5).max(1));
    let actual: Rgb = std::array::from_fn(|channel| {
        inner.iter().map(|&at| pixels[at][channel]).sum::<f32>() / inner.len() as f32
    });
    let value = lab(actual);
    let nearest = Colour::ALL
        .into_iter()
        .map(|c| (c, distance(lab(rgb(c.rgb())), value)))
        .fold((Colour::Red, f32::INFINITY), |best, next| {
            if next.1 < best.1 { next } else { best }
        });
    (nearest.0, actual)
}

#[cfg(test)]
mod tests;
