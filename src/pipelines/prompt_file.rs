//! Files of prompts: one prompt in each line, with options.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::util::files;

/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// The options, for messages.
const OPTIONS: &str =
    "--n negative prompt, --w width, --h height, --d seed, --l guidance scale, --s steps";

/// A problem of a file of prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptFileError {
    #[error("cannot read the prompts {}: {source}", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("prompts {}: {message}", path.display())]
    File { path: PathBuf, message: String },
    #[error("prompts {} line {line}: {message}", path.display())]
    Line {
        path: PathBuf,
        line: usize,
        message: String,
    },
}

/// A prompt with what its line says of the image; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLine {
    pub prompt: String,
    pub negative: Option<String>,
    pub seed: Option<u64>,
    pub guidance_scale: Option<f64>,
    pub steps: Option<u32>,
    /// In pixels, as the height.
    pub width: Option<u32>,
    pub height: Option<u32>,
}

/// Reads a file of prompts: one a line, empty lines and those that start with `#` left out. After
/// its prompt a line may have `--n negative prompt`, `--w width`, `--h height`, `--d seed`,
/// `--l guidance scale` and `--s steps`, in any order, as in the sample prompts of kohya's trainers.
/// Two dashes that no letter follows are text.
///
/// # Errors
/// [`PromptFileError::Io`]; [`PromptFileError::File`] for a file of more than 16 MiB or without
/// prompts; [`PromptFileError::Line`] for a line that is not UTF-8 or has no prompt, and for options
/// that are unknown, given twice, or not what they should be.
pub fn read_prompts(path: &Path) -> Result<Vec<PromptLine>, PromptFileError> {
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| PromptFileError::Io {
            path: path.to_owned(),
            source,
        })?;
    let error = |message: String| PromptFileError::File {
        path: path.to_owned(),
        message,
    };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(error(format!("larger than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let mut prompts = Vec::new();
    for (number, line) in bytes.split(|b| *b == b'\n').enumerate() {
        let parsed = match std::str::from_utf8(line) {
            Err(e) => Err(format!("not UTF-8: {e}")),
            Ok(line) => {
                let line = line.trim();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                parse_line(line)
            }
        };
        prompts.push(parsed.map_err(|message| PromptFileError::Line {
            path: path.to_owned(),
            line: number + 1,
            message,
        })?);
    }
    if prompts.is_empty() {
        return Err(error("it holds no prompt".into()));
    }
    Ok(prompts)
}

fn parse_line(line: &str) -> Result<PromptLine, String> {
    let starts: Vec<usize> = line
        .match_indices("--")
        .map(|(at, _)| at)
        .filter(|at| line[..*at].is_empty() || line[..*at].ends_with(char::is_whitespace))
        .filter(|at| line[at + 2..].starts_with(|c: char| c.is_ascii_alphabetic()))
        .collect();
    let prompt = line[..starts.first().copied().unwrap_or(line.len())].trim();
    if prompt.is_empty() {
        return Err("no prompt before the options".into());
    }
    let mut parsed = PromptLine {
        prompt: prompt.to_owned(),
        ..PromptLine::default()
    };
    for (k, start) in starts.iter().enumerate() {
        let end = starts.get(k + 1).copied().unwrap_or(line.len());
        let option = line[start + 2..end].trim();
        let (name, value) = option
            .split_once(char::is_whitespace)
            .unwrap_or((option, ""));
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "n" => set(&mut parsed.negative, name, value, "a text", |_| true),
            "w" => set(&mut parsed.width, name, value, "a width in pixels", |w| {
                *w > 0
            }),
            "h" => set(&mut parsed.height, name, value, "a height in pixels", |h| {
                *h > 0
            }),
            "d" => set(
                &mut parsed.seed,
                name,
                value,
                "a whole number from 0",
                |_| true,
            ),
            "l" => set(
                &mut parsed.guidance_scale,
                name,
                value,
                "a number from 0",
                |l: &f64| l.is_finite() && *l >= 0.0,
            ),
            "s" => set(&mut parsed.steps, name, value, "a number of steps", |s| {
                *s > 0
            }),
            _ => Err(format!(
                "unknown option --{name}: expected one of {OPTIONS}"
            )),
        }?;
    }
    Ok(parsed)
}

fn set<T: std::str::FromStr>(
    option: &mut Option<T>,
    name: &str,
    value: &str,
    expected: &str,
    valid: impl Fn(&T) -> bool,
) -> Result<(), String> {
    if option.is_some() {
        return Err(format!("--{name} is given twice"));
    }
    let parsed = value
        .parse()
        .ok()
        .filter(|_| !value.is_empty())
        .filter(valid);
    match parsed {
        None => Err(format!(
            "--{name} {value}: expected {expected} (the options are {OPTIONS})"
        )),
        Some(value) => {
            *option = Some(value);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<Vec<PromptLine>, PromptFileError> {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("prompts.txt");
        std::fs::write(&path, content).unwrap();
        read_prompts(&path)
    }

    fn prompt(prompt: &str) -> PromptLine {
        PromptLine {
            prompt: prompt.into(),
            ..PromptLine::default()
        }
    }

    #[test]
    fn a_line_is_a_prompt_with_options() {
        let content = "\u{feff}# comment\n\na cat, (red:1.2)\r\n  \
             été 猫 --n blurry, low quality --w 512 --h 768 --d 18446744073709551615 --l 7.5 --s 20\n\
             #--w\na well-made -- rather old--fashioned - teapot --S 4 --N a -- b\n";
        let found = read(content.as_bytes()).unwrap();
        let expected = [
            prompt("a cat, (red:1.2)"),
            PromptLine {
                negative: Some("blurry, low quality".into()),
                seed: Some(u64::MAX),
                guidance_scale: Some(7.5),
                steps: Some(20),
                width: Some(512),
                height: Some(768),
                ..prompt("été 猫")
            },
            PromptLine {
                negative: Some("a -- b".into()),
                steps: Some(4),
                ..prompt("a well-made -- rather old--fashioned - teapot")
            },
        ];
        assert_eq!(found, expected);
        assert_eq!(read(b"a --l 0 --d 0").unwrap()[0].guidance_scale, Some(0.0));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let error = |line: &str, expected: &str| {
            let error = read(format!("fine\n# {line}\n{line}\n").as_bytes()).unwrap_err();
            assert!(
                matches!(error, PromptFileError::Line { line: 3, .. }),
                "{error}"
            );
            let message = error.to_string();
            assert!(message.contains("prompts.txt line 3: "), "{message}");
            assert!(message.contains(expected), "{message}");
        };
        error(
            "a --ar 16:9",
            "unknown option --ar: expected one of --n negative prompt, --w width",
        );
        error("a --steps 3", "--s steps");
        error("a --w 0", "--w 0: expected a width in pixels");
        error("a --w -5", "--w -5");
        error("a --h 1.5", "a height");
        error("a --d -1", "whole number");
        error("a --d 18446744073709551616", "whole number");
        error("a --l nan", "a number from 0");
        error("a --l 1e999", "a number from 0");
        error("a --s", "a number of steps");
        error("a --s 0", "a number of steps");
        error("a --n", "a text");
        error("a --s 3 --s 3", "--s is given twice");
        error("--w 512", "no prompt");
    }

    #[test]
    fn files_without_prompts_are_refused() {
        let error = |content: &[u8]| read(content).unwrap_err().to_string();
        assert!(error(b"").contains("no prompt"));
        assert!(error(b"# a\n\n").contains("no prompt"));
        assert!(error(b"a\nb\xff\n").contains("line 2: not UTF-8"));
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("large.txt");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        let message = read_prompts(&path).unwrap_err().to_string();
        assert!(message.contains("larger than 16 MiB"), "{message}");
        let absent = read_prompts(&dir.path().join("absent")).unwrap_err();
        assert!(matches!(absent, PromptFileError::Io { .. }));
    }
}
