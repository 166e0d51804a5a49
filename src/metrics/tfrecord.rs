//! TFRecord framing: the container of TensorBoard's event files and of `tf.Example` data sets.
//!
//! A record is `length: u64 le`, `masked crc32c of the length: u32 le`, the payload, and
//! `masked crc32c of the payload: u32 le`
//! (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

use std::io::{self, Read, Write};

/// A payload longer than this is taken for a damaged length.
pub const MAX_RECORD_BYTES: u64 = 1 << 30;

const MASK_DELTA: u32 = 0xa282_ead8;

/// Why a record could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("record {index}: the file ends inside it, after {found} of {expected} bytes")]
    Truncated {
        index: u64,
        expected: u64,
        found: u64,
    },
    #[error(
        "record {index}: crc32c of the {part} is {found:#010x}, the file says {expected:#010x}"
    )]
    Checksum {
        index: u64,
        part: &'static str,
        expected: u32,
        found: u32,
    },
    #[error("record {index}: declares {found} bytes, the most that is read is {MAX_RECORD_BYTES}")]
    TooLong { index: u64, found: u64 },
    #[error("record {index}: {source}")]
    Io { index: u64, source: io::Error },
}

/// The checksum of `data` as TFRecord stores it: rotated and offset, so that a checksum of data
/// that contains checksums stays meaningful.
pub fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(MASK_DELTA)
}

/// Appends one framed record to `out`.
pub fn write_record(out: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    let length = (payload.len() as u64).to_le_bytes();
    // One write call per record: a process that is killed between two calls leaves whole records.
    let mut frame = Vec::with_capacity(payload.len() + 16);
    frame.extend(length);
    frame.extend(masked_crc32c(&length).to_le_bytes());
    frame.extend(payload);
    frame.extend(masked_crc32c(payload).to_le_bytes());
    out.write_all(&frame)
}

/// Iterates over the payloads of a stream of records, checking every checksum.
///
/// It stops after the first error: what follows a damaged frame cannot be found.
pub struct RecordReader<R> {
    input: R,
    index: u64,
    failed: bool,
}

impl<R: Read> RecordReader<R> {
    pub fn new(input: R) -> Self {
        RecordReader {
            input,
            index: 0,
            failed: false,
        }
    }

    /// Reads up to `expected` bytes; fewer only at the end of the stream.
    fn take(&mut self, expected: u64) -> Result<Vec<u8>, RecordError> {
        let mut data = Vec::new();
        // `take` grows the buffer as bytes arrive, so a damaged length cannot ask for memory.
        (&mut self.input)
            .take(expected)
            .read_to_end(&mut data)
            .map_err(|source| RecordError::Io {
                index: self.index,
                source,
            })?;
        Ok(data)
    }

    fn checked(&self, part: &'static str, data: &[u8], crc: [u8; 4]) -> Result<(), RecordError> {
        let (expected, found) = (u32::from_le_bytes(crc), masked_crc32c(data));
        if expected == found {
            return Ok(());
        }
        Err(RecordError::Checksum {
            index: self.index,
            part,
            expected,
            found,
        })
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, RecordError> {
        let head = self.take(12)?;
        if head.is_empty() {
            return Ok(None);
        }
        let truncated = |index, expected, found: usize| RecordError::Truncated {
            index,
            expected,
            found: found as u64,
        };
        let Ok([a, b, c, d, e, f, g, h, crc @ ..]) = <[u8; 12]>::try_from(head.as_slice()) else {
            return Err(truncated(self.index, 12, head.len()));
        };
        let length = [a, b, c, d, e, f, g, h];
        self.checked("length", &length, crc)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_RECORD_BYTES {
            return Err(RecordError::TooLong {
                index: self.index,
                found: length,
            });
        }
        let mut payload = self.take(length + 4)?;
        let found = payload.len();
        let whole = found as u64 == length + 4;
        match payload.split_last_chunk::<4>() {
            Some((data, crc)) if whole => self.checked("payload", data, *crc)?,
            _ => return Err(truncated(self.index, length + 16, 12 + found)),
        }
        payload.truncate(found - 4);
        self.index += 1;
        Ok(Some(payload))
    }
}

impl<R: Read> Iterator for RecordReader<R> {
    type Item = Result<Vec<u8>, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let record = self.read();
        self.failed = record.is_err();
        record.transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payloads: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for payload in payloads {
            write_record(&mut out, payload).unwrap();
        }
        out
    }

    fn read(data: &[u8]) -> Vec<Result<Vec<u8>, RecordError>> {
        RecordReader::new(data).collect()
    }

    #[test]
    fn checksums_are_the_published_ones() {
        // RFC 3720, appendix B.4: 32 zero bytes. The masked value is what TensorBoard's own
        // masked_crc32c gives.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc32c(&[0; 32]), 0x0fd7_fffa);
    }

    #[test]
    fn round_trips_and_finds_the_end() {
        let data = frame(&[b"", b"abc", &[7; 5000]]);
        let payloads: Vec<_> = read(&data).into_iter().map(Result::unwrap).collect();
        assert_eq!(payloads, [b"".to_vec(), b"abc".to_vec(), vec![7; 5000]]);
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_found() {
        let data = frame(&[b"first", b"second"]);
        let first = frame(&[b"first"]).len();
        for cut in (1..data.len()).filter(|&cut| cut != first) {
            let records = read(&data[..cut]);
            let last = records.last().unwrap();
            assert!(
                matches!(last, Err(RecordError::Truncated { .. })),
                "cut at {cut}: {last:?}"
            );
            assert_eq!(records.len(), if cut < first { 1 } else { 2 });
        }
        for bit in 0..data.len() * 8 {
            let mut damaged = data.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&damaged).last().unwrap().is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_damaged_length_does_not_ask_for_memory() {
        let length = u64::MAX.to_le_bytes();
        let mut data = length.to_vec();
        data.extend(masked_crc32c(&length).to_le_bytes());
        let error = read(&data).pop().unwrap().unwrap_err();
        assert!(matches!(error, RecordError::TooLong { .. }), "{error}");
    }
}
