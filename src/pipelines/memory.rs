//! Advice for programs that are too large for their devices.

/// What makes programs smaller, for messages.
#[derive(Clone, Debug, Default)]
pub struct MemoryAdvice {
    /// Weights and activations of the text encoders and the denoiser.
    pub model: Vec<String>,
    /// The activations of the autoencoder.
    pub images: Vec<String>,
}
