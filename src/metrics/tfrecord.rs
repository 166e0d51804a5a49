//! TFRecord framing: the container of TensorBoard's event files.
//!
//! A record is `length: u64 le`, `masked crc32c of the length: u32 le`, the payload, and
//! `masked crc32c of the payload: u32 le`
//! (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

use std::io::{self, Write};

const MASK_DELTA: u32 = 0xa282_ead8;

/// The checksum of `data` as TFRecord stores it: rotated and offset, so that a checksum of data
/// that contains checksums stays meaningful.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(MASK_DELTA)
}

/// Appends one framed record to `out`.
pub(super) fn write_record(out: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    let length = (payload.len() as u64).to_le_bytes();
    // One write call per record: a process that is killed between two calls leaves whole records.
    let mut frame = Vec::with_capacity(payload.len() + 16);
    frame.extend(length);
    frame.extend(masked_crc32c(&length).to_le_bytes());
    frame.extend(payload);
    frame.extend(masked_crc32c(payload).to_le_bytes());
    out.write_all(&frame)
}

/// The payloads of a file, its checksums checked.
#[cfg(test)]
pub(super) fn payloads(mut data: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<8>() {
        let (crc, rest) = rest.split_first_chunk::<4>().unwrap();
        assert_eq!(u32::from_le_bytes(*crc), masked_crc32c(length));
        let (payload, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let (crc, rest) = rest.split_first_chunk::<4>().unwrap();
        assert_eq!(u32::from_le_bytes(*crc), masked_crc32c(payload));
        payloads.push(payload.to_vec());
        data = rest;
    }
    assert!(data.is_empty(), "{} bytes are not a record", data.len());
    payloads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_the_published_ones() {
        // RFC 3720, appendix B.4: 32 zero bytes. The masked value is what TensorBoard's own
        // masked_crc32c gives.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc32c(&[0; 32]), 0x0fd7_fffa);
    }

    #[test]
    fn records_follow_each_other_without_gaps() {
        let written = [b"".to_vec(), b"abc".to_vec(), vec![7; 5000]];
        let mut data = Vec::new();
        for payload in &written {
            write_record(&mut data, payload).unwrap();
        }
        assert_eq!(data.len(), 3 * 16 + 3 + 5000);
        assert_eq!(payloads(&data), written);
    }
}
