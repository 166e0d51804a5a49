//! Prompt to image.

pub mod canny;
pub mod image_file;
pub mod model;
pub mod pixels;
pub mod text_to_image;
pub mod tiling;
