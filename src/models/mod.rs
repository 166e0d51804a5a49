//! Diffusion models and text encoders.
