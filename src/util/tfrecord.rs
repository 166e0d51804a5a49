//! TFRecord files: records one after another, as TensorFlow and TensorBoard write them.
//!
//! A record is `length: u64 le`, `masked crc32c of the length: u32 le`, the payload, and
//! `masked crc32c of the payload: u32 le`
//! (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

use std::io::{self, Read, Write};

const MASK_DELTA: u32 = 0xa282_ead8;
/// Bytes of a record beside its payload: before it, and after it.
const HEAD: u64 = 12;
const FOOT: u64 = 4;
/// Largest payload that is read: it lies in memory as a whole.
const MAX_PAYLOAD: u64 = 512 << 20;
/// How files begin that gzip compressed.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// What is wrong with a file, and where.
#[derive(Debug, thiserror::Error)]
#[error("the record at byte {offset}: {problem}")]
pub struct RecordError {
    /// The first byte of the record.
    pub offset: u64,
    pub problem: RecordProblem,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(
        "cut short: it does not end before byte {end}, but the file ends at {length}; copy or download the file again"
    )]
    CutShort { end: u128, length: u64 },
    #[error("the checksum of its length is wrong: the file is damaged, or no TFRecord file")]
    Length,
    #[error("the file is compressed with gzip: unpack it")]
    Gzip,
    #[error("its content has {length} bytes, more than the {} MiB that are read", MAX_PAYLOAD >> 20)]
    TooLarge { length: u64 },
    #[error("the checksum of its content is wrong: the file is damaged; copy or download it again")]
    Content,
}

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its first byte in the file.
    pub offset: u64,
    pub payload: Vec<u8>,
}

/// The records of a file, their checksums checked. It ends after the first error: nobody knows where the next record
/// begins.
#[derive(Debug)]
pub struct Records<R> {
    input: R,
    offset: u64,
    length: u64,
}

impl<R: Read> Records<R> {
    /// The records from byte `offset` on, at which `input` stands, of a file of `length` bytes.
    pub fn new(input: R, offset: u64, length: u64) -> Records<R> {
        Records {
            input,
            offset,
            length,
        }
    }

    fn payload(&mut self) -> Result<Vec<u8>, RecordProblem> {
        self.check_end(HEAD + FOOT)?;
        let length = self.bytes::<8>()?;
        let checksum = self.bytes::<4>()?;
        if u32::from_le_bytes(checksum) != masked_crc32c(&length) {
            return Err(match self.offset == 0 && length.starts_with(&GZIP) {
                true => RecordProblem::Gzip,
                false => RecordProblem::Length,
            });
        }
        let length = u64::from_le_bytes(length);
        self.check_end(u128::from(HEAD + FOOT) + u128::from(length))?;
        if length > MAX_PAYLOAD {
            return Err(RecordProblem::TooLarge { length });
        }
        let mut payload = Vec::new();
        (&mut self.input).take(length).read_to_end(&mut payload)?;
        let checksum = self.bytes::<4>()?;
        match u32::from_le_bytes(checksum) == masked_crc32c(&payload) {
            true => Ok(payload),
            false => Err(RecordProblem::Content),
        }
    }

    /// Refuses a record of at least `size` bytes that the file has no room for.
    fn check_end(&self, size: impl Into<u128>) -> Result<(), RecordProblem> {
        let (end, length) = (u128::from(self.offset) + size.into(), self.length);
        match end <= u128::from(length) {
            true => Ok(()),
            false => Err(RecordProblem::CutShort { end, length }),
        }
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl<R: Read> Iterator for Records<R> {
    type Item = Result<Record, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.offset;
        if offset >= self.length {
            return None;
        }
        Some(match self.payload() {
            Ok(payload) => {
                self.offset += HEAD + payload.len() as u64 + FOOT;
                Ok(Record { offset, payload })
            }
            Err(problem) => {
                self.offset = self.length;
                Err(RecordError { offset, problem })
            }
        })
    }
}

/// The checksum of `data` as TFRecord stores it: rotated and offset, so that a checksum of data
/// that contains checksums stays meaningful.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
        .rotate_right(15)
        .wrapping_add(MASK_DELTA)
}

/// Appends one framed record to `out`.
///
/// # Errors
/// When it cannot be written.
pub fn write_record(out: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    let length = (payload.len() as u64).to_le_bytes();
    // One write call per record: a process that is killed between two calls leaves whole records.
    let mut frame = Vec::with_capacity(payload.len() + (HEAD + FOOT) as usize);
    frame.extend(length);
    frame.extend(masked_crc32c(&length).to_le_bytes());
    frame.extend(payload);
    frame.extend(masked_crc32c(payload).to_le_bytes());
    out.write_all(&frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(data: &[u8]) -> Result<Vec<Record>, RecordError> {
        Records::new(data, 0, data.len() as u64).collect()
    }

    fn written(payloads: &[&[u8]]) -> Vec<u8> {
        let mut data = Vec::new();
        for payload in payloads {
            write_record(&mut data, payload).unwrap();
        }
        data
    }

    #[test]
    fn checksums_are_the_published_ones() {
        // RFC 3720, appendix B.4: 32 zero bytes. The masked value is what TensorBoard's own
        // masked_crc32c gives.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc32c(&[0; 32]), 0x0fd7_fffa);
    }

    #[test]
    fn records_follow_each_other_without_gaps() {
        let payloads = [&b""[..], b"abc", &[7; 5000]];
        let data = written(&payloads);
        assert_eq!(data.len(), 3 * 16 + 3 + 5000);
        let records = read(&data).unwrap();
        let offsets: Vec<u64> = records.iter().map(|record| record.offset).collect();
        assert_eq!(offsets, [0, 16, 35]);
        assert!(
            records
                .iter()
                .zip(payloads)
                .all(|(record, own)| record.payload == own)
        );
        // From the second on.
        let rest = Records::new(&data[16..], 16, data.len() as u64);
        let rest: Vec<Record> = rest.map(Result::unwrap).collect();
        assert_eq!(rest, records[1..]);
    }

    /// Every cut between records, and every byte that is another, is an error of the record in which it is.
    #[test]
    fn cuts_and_wrong_bytes_are_found() {
        let data = written(&[b"first", b"", b"the third"]);
        let ends = [0, 21, 37, 62];
        assert_eq!(data.len(), 62);
        let starts = |at: usize| *ends.iter().rfind(|end| **end <= at).unwrap();
        for cut in 0..data.len() {
            match read(&data[..cut]) {
                Ok(records) => assert_eq!(ends[records.len()], cut),
                Err(error) => {
                    assert_eq!(error.offset, starts(cut) as u64, "{cut}");
                    assert!(matches!(error.problem, RecordProblem::CutShort { .. }));
                }
            }
        }
        for at in 0..data.len() {
            let mut wrong = data.clone();
            wrong[at] ^= 0x10;
            let error = read(&wrong).unwrap_err();
            assert_eq!(error.offset, starts(at) as u64, "{at}");
            let is_of_length = at - starts(at) < HEAD as usize;
            assert!(match error.problem {
                RecordProblem::Length => is_of_length,
                RecordProblem::Content => !is_of_length,
                _ => false,
            });
        }
    }

    /// A length that its checksum confirms, and that no memory has.
    #[test]
    fn lengths_beyond_the_file_are_refused() {
        for length in [1 << 20, 1 << 40, u64::MAX] {
            let length = u64::to_le_bytes(length);
            let checksum = masked_crc32c(&length).to_le_bytes();
            let data = [&length[..], &checksum, &[0; 100]].concat();
            let error = read(&data).unwrap_err();
            assert!(matches!(error.problem, RecordProblem::CutShort { .. }));
            // Of a file that has room for it.
            let mut records = Records::new(data.as_slice(), 0, u64::MAX);
            assert!(records.next().unwrap().is_err());
            assert!(records.next().is_none());
        }
        let gzip = [&GZIP[..], &[8; 30]].concat();
        let error = read(&gzip).unwrap_err().to_string();
        assert!(error.contains("byte 0: the file is compressed"), "{error}");
    }
}
