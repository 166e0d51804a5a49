//! The bytes of a bundle.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `MAXDIFFB` |
//! | 4 | version of this layout, little endian |
//! | 8 | length of the header, little endian |
//! | 8 | length of the payload, little endian |
//! | | header, JSON |
//! | | payload |
//! | 32 | SHA-256 of everything before |

use serde_json::Value;

use super::{Bundle, Header};
use crate::util::hash::{Sha256, hex};

/// The first bytes of every bundle.
pub const MAGIC: [u8; 8] = *b"MAXDIFFB";

/// Version of the layout.
pub const VERSION: u32 = 2;

const PREFIX: usize = 8 + 4 + 8 + 8;
const DIGEST: usize = 32;

/// A problem of a bundle's bytes.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("not a bundle: it does not begin with MAXDIFFB")]
    Magic,
    #[error("bundle of version {found}; this program reads version {VERSION}")]
    Version { found: u32 },
    #[error("truncated bundle: {found} bytes of {expected}")]
    Truncated { expected: u64, found: u64 },
    #[error("{extra} bytes follow the end of the bundle")]
    Trailing { extra: u64 },
    #[error("damaged bundle: its sha-256 is {found}, the one written in it is {expected}")]
    Digest { expected: String, found: String },
    #[error("the header's programs have {expected} bytes, the payload {found}")]
    Payload { expected: u64, found: u64 },
    #[error("the header cannot be understood: {0}")]
    Header(#[from] serde_json::Error),
}

/// The header as JSON.
pub(super) fn value(header: &Header) -> Value {
    // Keys are field names and values numbers and strings: there is nothing JSON cannot hold.
    serde_json::to_value(header).unwrap_or_default()
}

/// A bundle's bytes.
pub fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let header = value(header).to_string();
    let mut bytes = Vec::with_capacity(PREFIX + header.len() + payload.len() + DIGEST);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(payload);
    let digest = Sha256::of(&bytes);
    bytes.extend(digest.bytes());
    bytes
}

/// The bundle in `bytes`, all of them.
///
/// # Errors
/// [`FrameError`] for anything that [`encode`] of this version does not write.
pub fn decode(bytes: &[u8]) -> Result<Bundle, FrameError> {
    let found = bytes.len() as u64;
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return Err(FrameError::Magic);
    }
    let at_least = |expected: usize| FrameError::Truncated {
        expected: expected as u64,
        found,
    };
    let (prefix, rest) = bytes
        .split_at_checked(PREFIX)
        .ok_or_else(|| at_least(PREFIX + DIGEST))?;
    let number = |from: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&prefix[from..from + 8]);
        u64::from_le_bytes(word)
    };
    let version = number(8) as u32;
    if version != VERSION {
        return Err(FrameError::Version { found: version });
    }
    let (header_length, payload_length) = (number(12), number(20));
    let expected = [header_length, payload_length, DIGEST as u64]
        .into_iter()
        .fold(PREFIX as u64, u64::saturating_add);
    if found < expected {
        return Err(FrameError::Truncated { expected, found });
    }
    if found > expected {
        return Err(FrameError::Trailing {
            extra: found - expected,
        });
    }
    // The sum of both lengths is that of a slice in memory: each fits a usize.
    let (header, rest) = rest.split_at(header_length as usize);
    let (payload, written) = rest.split_at(payload_length as usize);
    let digest = Sha256::of(&bytes[..bytes.len() - DIGEST]);
    if digest.bytes() != written {
        return Err(FrameError::Digest {
            expected: hex(written),
            found: digest.to_string(),
        });
    }
    let header: Header = serde_json::from_slice(header)?;
    let programs = header.programs.iter();
    let expected = programs.fold(0, |sum: u64, program| {
        sum.saturating_add(program.payload_bytes)
    });
    if expected != payload_length {
        return Err(FrameError::Payload {
            expected,
            found: payload_length,
        });
    }
    Ok(Bundle {
        header,
        payload: payload.to_vec(),
    })
}
