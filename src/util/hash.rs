//! SHA-256, and how it is written.

use std::fmt;
use std::io::{self, BufReader, Write};
use std::path::Path;

use sha2::Digest;

use super::files;

/// A SHA-256; displayed as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sha256([u8; 32]);

impl Sha256 {
    /// The hash of bytes in memory.
    pub fn of(bytes: impl AsRef<[u8]>) -> Self {
        Sha256(sha2::Sha256::digest(bytes).into())
    }

    /// The hash of a file's content.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of_file(path: &Path) -> io::Result<Self> {
        let mut input = BufReader::with_capacity(1 << 20, files::open(path)?);
        let mut hasher = Hasher::default();
        io::copy(&mut input, &mut hasher)?;
        Ok(hasher.finish())
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The hash that is displayed as `digits`.
    pub fn parse(digits: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if digits.len() != 64 || !digits.is_ascii() {
            return None;
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Sha256(bytes))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

/// The SHA-256 of bytes that come one after the other.
#[derive(Clone, Debug, Default)]
pub struct Hasher(sha2::Sha256);

impl Hasher {
    pub fn update(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.update(bytes);
    }

    /// The hash of all bytes so far.
    pub fn finish(self) -> Sha256 {
        Sha256(self.0.finalize().into())
    }
}

impl Write for Hasher {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.update(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Two lower-case hexadecimal digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn bytes_pieces_and_files_have_the_published_hash() {
        assert_eq!(Sha256::of("abc").to_string(), ABC);
        assert_eq!(Sha256::parse(ABC), Some(Sha256::of("abc")));
        for wrong in ["", &ABC[1..], &ABC.replace('b', "g")] {
            assert_eq!(Sha256::parse(wrong), None);
        }
        let mut hasher = Hasher::default();
        hasher.update("a");
        hasher.update("bc");
        assert_eq!(hasher.finish().to_string(), ABC);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(Sha256::of_file(&path).unwrap(), Sha256::of("abc"));
        assert!(Sha256::of_file(dir.path()).is_err());
    }
}
