//! Prompt to image.

pub mod model;
pub mod text_to_image;
