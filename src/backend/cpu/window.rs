//! Where a convolution's kernel lies on its image.

use crate::graph::Attribute;
use crate::shape::Shape;

/// How a convolution's kernel moves, for height and width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub size: [usize; 2],
    pub strides: [usize; 2],
    /// Low and high.
    pub padding: [(usize, usize); 2],
}

impl Window {
    /// Kernel places.
    pub fn taps(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Height and width of the result for an image of this height and width; `None` where the padded image is smaller
    /// than the window.
    pub(super) fn places(&self, image: [usize; 2]) -> Option<[usize; 2]> {
        let mut places = [0; 2];
        for (i, size) in image.into_iter().enumerate() {
            let (low, high) = self.padding[i];
            let room = (size + low + high).checked_sub(self.size[i])?;
            places[i] = room.checked_div(self.strides[i])? + 1;
        }
        Some(places)
    }

    /// The window with the high padding that gives a result of these places, both `[batch, height, width, channels]`; `None`
    /// where none does.
    pub(super) fn of_result(mut self, images: &Shape, result: &Shape) -> Option<Window> {
        for at in [0, 1] {
            let (image, places) = (images.dims[1 + at], result.dims[1 + at]);
            let (low, _) = self.padding[at];
            let needed = places.checked_sub(1)? * self.strides[at] + self.size[at];
            self.padding[at].1 = needed.saturating_sub(image + low);
        }
        let places = self.places([images.dims[1], images.dims[2]])?;
        (places == [result.dims[1], result.dims[2]]).then_some(self)
    }

    /// The pixel of images `[batch, height, width, channels]` under each kernel place of a row of the result; `None`
    /// in the padding.
    pub(super) fn pixels(&self, row: usize, images: &Shape, result: &Shape) -> Vec<Option<usize>> {
        let [height, width] = [images.dims[1], images.dims[2]];
        let [out_height, out_width] = [result.dims[1], result.dims[2]];
        let image = row / (out_height * out_width);
        let [top, left] = [row / out_width % out_height, row % out_width];
        let mut pixels = Vec::with_capacity(self.taps());
        for y in 0..self.size[0] {
            for x in 0..self.size[1] {
                let y = (top * self.strides[0] + y).checked_sub(self.padding[0].0);
                let x = (left * self.strides[1] + x).checked_sub(self.padding[1].0);
                pixels.push(match (y, x) {
                    (Some(y), Some(x)) if y < height && x < width => {
                        Some((image * height + y) * width + x)
                    }
                    _ => None,
                });
            }
        }
        pixels
    }

    pub(super) fn attributes(&self) -> [(&'static str, Attribute); 8] {
        let size = |n: usize| Attribute::I64(n as i64);
        [
            ("kernel_height", size(self.size[0])),
            ("kernel_width", size(self.size[1])),
            ("stride_y", size(self.strides[0])),
            ("stride_x", size(self.strides[1])),
            ("low_y", size(self.padding[0].0)),
            ("low_x", size(self.padding[1].0)),
            ("high_y", size(self.padding[0].1)),
            ("high_x", size(self.padding[1].1)),
        ]
    }
}
