//! Prompt to image.
