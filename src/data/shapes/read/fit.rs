//! The ideal shape that covers a component best.

use super::super::Kind;
use super::{PIXELS, SIDE, binomial};

/// Free border around the alpha map, in pixels, into which an ideal shape may grow.
const BORDER: usize = 4;

/// The part of an alpha map that is not empty, with a border.
pub(super) struct Window {
    alpha: Vec<f32>,
    width: usize,
    /// Place in the image of the window's corner; negative where the border leaves the image.
    left: f32,
    top: f32,
    area: f32,
    /// Centroid in pixels of the image.
    centroid: (f32, f32),
}

impl Window {
    /// The window of a map of `SIDE x SIDE` alphas; None where all are zero.
    pub(super) fn new(alpha: &[f32; PIXELS]) -> Option<Self> {
        let occupied = |at: &usize| alpha[*at] > 0.0;
        let columns = (0..PIXELS).filter(occupied).map(|at| at % SIDE);
        let rows = (0..PIXELS).filter(occupied).map(|at| at / SIDE);
        let (left, right) = (columns.clone().min()?, columns.max()?);
        let (top, bottom) = (rows.clone().min()?, rows.max()?);
        let width = right - left + 1 + 2 * BORDER;
        let height = bottom - top + 1 + 2 * BORDER;
        let mut window = vec![0.0; width * height];
        let (mut area, mut x, mut y) = (0.0, 0.0, 0.0);
        for at in (0..PIXELS).filter(occupied) {
            let (column, row) = (at % SIDE, at / SIDE);
            window[(row - top + BORDER) * width + column - left + BORDER] = alpha[at];
            area += alpha[at];
            x += alpha[at] * (column as f32 + 0.5);
            y += alpha[at] * (row as f32 + 0.5);
        }
        Some(Self {
            alpha: window,
            width,
            left: left as f32 - BORDER as f32,
            top: top as f32 - BORDER as f32,
            area,
            centroid: (x / area, y / area),
        })
    }

    /// Sum of the alphas.
    pub(super) fn area(&self) -> f32 {
        self.area
    }
}

/// An ideal shape, lengths in pixels at `SIDE`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) kind: Kind,
    /// Centre of the bounding box.
    pub(super) center: (f32, f32),
    pub(super) diameter: f32,
    /// Soft intersection over union with the component.
    pub(super) overlap: f32,
}

/// The kind that fits best.
pub(super) fn best_fit(window: &Window) -> Fit {
    let [first, rest @ ..] = Kind::ALL.map(|kind| fit(kind, window));
    rest.into_iter().fold(first, |best, next| {
        if next.overlap > best.overlap {
            next
        } else {
            best
        }
    })
}

/// Area of a shape of diameter 1, and how far its centroid lies below the centre of its box.
fn area_and_centroid(kind: Kind) -> (f32, f32) {
    let (width, height) = kind.extent();
    let (width, height) = (width as f32, height as f32);
    match kind {
        Kind::Circle => (std::f32::consts::FRAC_PI_4, 0.0),
        Kind::Square => (width * height, 0.0),
        Kind::Triangle => (width * height / 2.0, height / 6.0),
    }
}

/// Starts at the map's centroid and area, then moves place and diameter while that helps.
fn fit(kind: Kind, window: &Window) -> Fit {
    let (unit_area, drop) = area_and_centroid(kind);
    let diameter = (window.area / unit_area).sqrt();
    let mut best = [
        window.centroid.0,
        window.centroid.1 - drop * diameter,
        diameter,
    ];
    let mut overlap = overlap_of(kind, best, window);
    let mut step = 0.6;
    while step > 0.1 {
        let mut moved = false;
        for k in 0..best.len() {
            for sign in [-1.0, 1.0] {
                let mut next = best;
                next[k] += sign * step;
                let value = overlap_of(kind, next, window);
                if value > overlap {
                    (best, overlap, moved) = (next, value, true);
                }
            }
        }
        if !moved {
            step /= 2.0;
        }
    }
    Fit {
        kind,
        center: (best[0], best[1]),
        diameter: best[2],
        overlap,
    }
}

/// Soft intersection over union, `sum min / sum max`, of an alpha map and a smoothed ideal shape.
fn overlap_of(kind: Kind, [x, y, diameter]: [f32; 3], window: &Window) -> f32 {
    let mut ideal: Vec<f32> = (0..window.alpha.len())
        .map(|at| {
            let dx = window.left + (at % window.width) as f32 + 0.5 - x;
            let dy = window.top + (at / window.width) as f32 + 0.5 - y;
            (0.5 - signed_distance(kind, dx, dy, diameter)).clamp(0.0, 1.0)
        })
        .collect();
    // The image was smoothed alike.
    binomial(&mut ideal, window.width);
    let (mut low, mut high) = (0.0, 0.0);
    for (&a, &b) in window.alpha.iter().zip(&ideal) {
        low += a.min(b);
        high += a.max(b);
    }
    if high > 0.0 { low / high } else { 0.0 }
}

/// Distance to the outline in pixels, negative inside; near corners a lower bound.
fn signed_distance(kind: Kind, x: f32, y: f32, diameter: f32) -> f32 {
    let (width, height) = kind.extent();
    let (half_width, half_height) = (
        width as f32 * diameter / 2.0,
        height as f32 * diameter / 2.0,
    );
    match kind {
        Kind::Circle => (x * x + y * y).sqrt() - half_width,
        Kind::Square => (x.abs() - half_width).max(y.abs() - half_height),
        Kind::Triangle => {
            // The slanted side runs from (0, -half_height) to (half_width, half_height).
            let slant = (half_width * half_width + 4.0 * half_height * half_height).sqrt();
            let side =
                (x.abs() * 2.0 * half_height - (y + half_height) * half_width) / slant.max(1e-6);
            side.max(y - half_height)
        }
    }
}
