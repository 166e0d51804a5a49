//! Checkpoint files: safetensors, diffusers directories.
