//! Datasets, captions, tokenizers and pictures.
