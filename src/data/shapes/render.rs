//! Scenes to pixels, anti-aliased.

use super::{Kind, Scene, Shape};

/// Samples along each side of a pixel. 8 x 8 samples give 65 levels of coverage, finer than the
/// steps that the trained model resolves.
const SUBSAMPLES: usize = 8;

/// Whether the point `(x, y)`, relative to the shape's centre and in units of its diameter,
/// lies inside. The extents are those of [`Kind::extent`].
fn inside(kind: Kind, x: f64, y: f64) -> bool {
    let (width, height) = kind.extent();
    let (half_width, half_height) = (width / 2.0, height / 2.0);
    match kind {
        Kind::Circle => x * x + y * y <= half_width * half_width,
        Kind::Square => x.abs() <= half_width && y.abs() <= half_height,
        // The apex is up: the width grows linearly from top to bottom.
        Kind::Triangle => {
            let depth = (y + half_height) / height;
            (0.0..=1.0).contains(&depth) && x.abs() <= half_width * depth
        }
    }
}

/// Renders a scene as `resolution x resolution` RGB, `u8`, row-major HWC.
pub(super) fn render(scene: &Scene, resolution: usize) -> Vec<u8> {
    let background = scene.background.rgb();
    let mut canvas: Vec<[f64; 3]> = vec![background.map(f64::from); resolution * resolution];
    for shape in &scene.shapes {
        paint(&mut canvas, resolution, shape);
    }
    canvas
        .iter()
        .flat_map(|pixel| pixel.map(|v| v.round().clamp(0.0, 255.0) as u8))
        .collect()
}

fn paint(canvas: &mut [[f64; 3]], resolution: usize, shape: &Shape) {
    let scale = resolution as f64;
    let colour = shape.colour.rgb().map(f64::from);
    let (center_x, center_y) = (shape.center.0 * scale, shape.center.1 * scale);
    let diameter = shape.diameter * scale;
    let (width, height) = shape.kind.extent();
    let range = |center: f64, extent: f64| {
        let half = extent * diameter / 2.0;
        let low = (center - half).floor().max(0.0) as usize;
        let high = (center + half).ceil().clamp(0.0, scale) as usize;
        low..high
    };
    for row in range(center_y, height) {
        for column in range(center_x, width) {
            let mut hits = 0usize;
            for sub in 0..SUBSAMPLES * SUBSAMPLES {
                let offset = |k: usize| (k as f64 + 0.5) / SUBSAMPLES as f64;
                let x = column as f64 + offset(sub % SUBSAMPLES) - center_x;
                let y = row as f64 + offset(sub / SUBSAMPLES) - center_y;
                hits += usize::from(inside(shape.kind, x / diameter, y / diameter));
            }
            let alpha = hits as f64 / (SUBSAMPLES * SUBSAMPLES) as f64;
            for (value, target) in canvas[row * resolution + column].iter_mut().zip(colour) {
                *value += alpha * (target - *value);
            }
        }
    }
}
