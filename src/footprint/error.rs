//! The error for programs that are too large for their devices.

use std::fmt;

use crate::util::text::binary_size;

use super::Footprint;

/// A program that needs more memory than a device has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The program, `the train program`.
    pub title: String,
    /// The devices, `2 slices of v5e-16`.
    pub target: String,
    /// What it needs on each device: `at least 30.22 GiB`, or in the compiler's words `30.22G bytes`.
    pub needed: Option<String>,
    /// Bytes of memory of one device.
    pub limit: Option<u64>,
    pub footprint: Footprint,
    /// What makes it smaller.
    pub advice: Vec<String>,
    /// The compiler's message, if it was the compiler that refused it.
    pub message: String,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Footprint {
            weights,
            state,
            largest,
            ..
        } = &self.footprint;
        write!(f, "{} does not fit {}", self.title, self.target)?;
        if let Some(needed) = &self.needed {
            write!(f, ": it needs {needed} of memory on each device")?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", which has {}", binary_size(limit))?;
        }
        write!(f, "; weights take {}", binary_size(*weights))?;
        if *state > 0 {
            write!(f, " and optimizer state {}", binary_size(*state))?;
        }
        write!(f, " of it")?;
        if let Some((name, bytes)) = largest {
            write!(f, " (the largest: {name}, {})", binary_size(*bytes))?;
        }
        if !self.advice.is_empty() {
            write!(f, ". Try {}", self.advice.join(", or "))?;
        }
        match self.message.lines().next() {
            Some(line) if !line.is_empty() => write!(f, ". The compiler says: {line}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for OutOfMemory {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_too_large_says_what_takes_the_memory_and_what_to_try() {
        let error = OutOfMemory {
            title: "the train program".to_owned(),
            target: "v5e-16".to_owned(),
            needed: Some("30.22G bytes".to_owned()),
            limit: Some(16_909_328_384),
            footprint: Footprint {
                weights: 10 << 30,
                state: 20 << 30,
                largest: Some(("unet/conv_in.weight".to_owned(), 1 << 30)),
                ..Footprint::default()
            },
            advice: vec!["one".to_owned(), "two".to_owned()],
            message: String::new(),
        };
        assert_eq!(
            error.to_string(),
            "the train program does not fit v5e-16: it needs 30.22G bytes of memory on each device, which has 15.75 GiB; \
             weights take 10.00 GiB and optimizer state 20.00 GiB of it (the largest: unet/conv_in.weight, 1.00 GiB). Try \
             one, or two"
        );
    }
}
