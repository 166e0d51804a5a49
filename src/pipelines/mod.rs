//! Prompt to image.

pub mod image_file;
pub mod model;
pub mod pixels;
pub mod prompt;
pub mod prompt_file;
pub mod text_to_image;
