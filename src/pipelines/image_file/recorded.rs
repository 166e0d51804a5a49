//! The settings that image files carry, read back.

use std::io::BufReader;
use std::path::Path;

use super::ImageFileError;
use super::settings::{GenerationSettings, PARAMETERS, SETTINGS};
use super::web_ui::WebSettings;
use crate::util::files;
use crate::util::text::listed;

/// Most memory that the texts of a file may take, and most that ours may have when unpacked.
const MAX_TEXT_BYTES: usize = 16 << 20;
/// Keywords that an error lists.
const LISTED: usize = 8;

/// The settings recorded in an image.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// Every setting, written by this program.
    Own(GenerationSettings),
    /// The text that web interfaces write.
    Web(WebSettings),
}

/// The settings that [`super::write_numbered`] wrote into a PNG file, or else those that a web interface wrote.
///
/// # Errors
/// [`ImageFileError::Open`]; [`ImageFileError::Read`] for a file that is no PNG or holds more than 16 MiB of texts;
/// [`ImageFileError::NoSettings`] for one without settings, which says what texts it has;
/// [`ImageFileError::Settings`] for settings that are not what they should be.
pub fn read_recorded(path: &Path) -> Result<Recorded, ImageFileError> {
    let texts = Texts::read(path)?;
    let error = |message| ImageFileError::Settings {
        path: path.to_owned(),
        message,
    };
    if let Some(json) = &texts.settings {
        let mut settings: GenerationSettings =
            serde_json::from_str(json).map_err(|e| error(e.to_string()))?;
        if (settings.width, settings.height) == (0, 0) {
            (settings.width, settings.height) = texts.size;
        }
        return Ok(Recorded::Own(settings));
    }
    match &texts.parameters {
        Some(text) => WebSettings::read(text, texts.size)
            .map(Recorded::Web)
            .map_err(|message| error(format!("text `{PARAMETERS}`: {message}"))),
        None => Err(ImageFileError::NoSettings {
            path: path.to_owned(),
            found: texts.found(),
        }),
    }
}

/// The texts of a PNG file.
#[derive(Default)]
struct Texts {
    /// Width and height of the image.
    size: (u32, u32),
    /// The first text of each of our keywords: any number of others may each unpack to a large one.
    parameters: Option<String>,
    settings: Option<String>,
    keywords: Vec<String>,
}

impl Texts {
    fn read(path: &Path) -> Result<Self, ImageFileError> {
        let error = |message: String| ImageFileError::Read {
            path: path.to_owned(),
            message,
        };
        let file = files::open(path).map_err(|source| ImageFileError::Open {
            path: path.to_owned(),
            source,
        })?;
        let limits = png::Limits {
            bytes: MAX_TEXT_BYTES,
        };
        let mut reader = png::Decoder::new_with_limits(BufReader::new(file), limits)
            .read_info()
            .map_err(|e| error(e.to_string()))?;
        // Texts may also stand after the image.
        reader.finish().map_err(|e| error(e.to_string()))?;
        let info = reader.info();
        let mut texts = Self {
            size: (info.width, info.height),
            ..Self::default()
        };
        let mut keep = |keyword: &str, text: &dyn Fn() -> Result<String, png::DecodingError>| {
            let kept = texts.keep(keyword, text);
            kept.map_err(|e| error(format!("text `{keyword}`: {e}")))
        };
        for chunk in &info.uncompressed_latin1_text {
            keep(&chunk.keyword, &|| Ok(chunk.text.clone()))?;
        }
        for chunk in &info.utf8_text {
            keep(&chunk.keyword, &|| {
                let mut chunk = chunk.clone();
                chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
                chunk.get_text()
            })?;
        }
        for chunk in &info.compressed_latin1_text {
            keep(&chunk.keyword, &|| {
                let mut chunk = chunk.clone();
                chunk.decompress_text_with_limit(MAX_TEXT_BYTES)?;
                chunk.get_text()
            })?;
        }
        Ok(texts)
    }

    /// Takes a text, if it is wanted and not there yet: others are not unpacked.
    fn keep(
        &mut self,
        keyword: &str,
        text: &dyn Fn() -> Result<String, png::DecodingError>,
    ) -> Result<(), png::DecodingError> {
        self.keywords.push(keyword.to_owned());
        if let Some(place) = self.place(keyword) {
            *place = Some(text()?);
        }
        Ok(())
    }

    /// Where the text of a keyword goes, if it is wanted and not there yet.
    fn place(&mut self, keyword: &str) -> Option<&mut Option<String>> {
        let place = match keyword {
            PARAMETERS => &mut self.parameters,
            SETTINGS => &mut self.settings,
            _ => return None,
        };
        place.is_none().then_some(place)
    }

    /// A description of the texts that are there instead of settings.
    fn found(&self) -> String {
        if self.keywords.is_empty() {
            return "it has no texts at all".to_owned();
        }
        let keywords = self.keywords.iter();
        let quoted: Vec<String> = keywords.map(|keyword| format!("`{keyword}`")).collect();
        format!("it has the texts {}", listed(&quoted, LISTED))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use image::RgbImage;
    use tempfile::TempDir;

    use super::super::web_sampler::WebSampler;
    use super::super::write_numbered;
    use super::*;

    fn settings(prompt: &str) -> GenerationSettings {
        GenerationSettings {
            prompt: prompt.into(),
            negative_prompt: "blurry, \"bad\"\nNegative prompt: x".into(),
            seed: u64::MAX,
            steps: 20,
            guidance_scale: 7.1,
            scheduler: "EulerAncestralDiscreteScheduler".into(),
            web_sampler: None,
            config: "base_xl".into(),
            width: 512,
            height: 768,
            model: "dreams, v2: \"pruned\"".into(),
            model_hash: Some("6ce0161689".into()),
            hires: None,
            options: [("prediction_type".into(), "v_prediction é猫\n".into())].into(),
        }
    }

    fn write(dir: &TempDir, settings: Option<&GenerationSettings>) -> PathBuf {
        write_numbered(dir.path(), "x", &RgbImage::new(5, 3), settings).unwrap()
    }

    fn own(path: &Path) -> GenerationSettings {
        match read_recorded(path).unwrap() {
            Recorded::Own(settings) => settings,
            Recorded::Web(read) => panic!("{read:?}"),
        }
    }

    /// An image with these texts, whatever they are.
    fn with_texts(dir: &TempDir, add: impl Fn(&mut png::Encoder<'_, &mut Vec<u8>>)) -> PathBuf {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, 5, 3);
        add(&mut encoder);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&[0; 15]).unwrap();
        writer.finish().unwrap();
        let path = dir.path().join("texts.png");
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn every_setting_survives() {
        let dir = TempDir::new().unwrap();
        for prompt in [
            "a small red circle",
            "piñata",
            "été 🎈\nin two lines\r\n and \\ \"quotes\" 'x'",
            "猫が屋根に座っている",
            "قطة على سطح",
            "",
            "nul \0 and \u{1f}",
            "Negative prompt: none\nSteps: 3, Seed: 4",
        ] {
            let settings = settings(prompt);
            let path = write(&dir, Some(&settings));
            assert_eq!(own(&path), settings);
            let expected = settings.parameters().replace('\0', " ");
            assert_eq!(Texts::read(&path).unwrap().parameters, Some(expected));
        }
    }

    #[test]
    fn texts_that_fit_latin_1_are_plain_ones() {
        let dir = TempDir::new().unwrap();
        let kinds = |prompt: &str| {
            let plain = GenerationSettings {
                prompt: prompt.into(),
                ..GenerationSettings::default()
            };
            let bytes = fs::read(write(&dir, Some(&plain))).unwrap();
            let count = |kind: &[u8]| bytes.windows(4).filter(|w| *w == kind).count();
            (count(b"tEXt"), count(b"iTXt"))
        };
        assert_eq!(kinds("piñata"), (2, 0));
        assert_eq!(kinds("🎈"), (0, 2));
    }

    #[test]
    fn parameters_have_the_layout_of_web_interfaces() {
        let version = env!("CARGO_PKG_VERSION");
        let plain = GenerationSettings {
            prompt: "a cat".into(),
            negative_prompt: "blurry".into(),
            seed: 1,
            steps: 20,
            guidance_scale: 7.0,
            scheduler: "EulerAncestralDiscreteScheduler".into(),
            web_sampler: Some(WebSampler {
                name: "Euler a".into(),
                schedule: "Uniform",
            }),
            config: "sd15".into(),
            width: 512,
            height: 512,
            ..GenerationSettings::default()
        };
        let line = "Steps: 20, Sampler: Euler a, Schedule type: Uniform, CFG scale: 7, Seed: 1, Size: 512x512";
        assert_eq!(
            plain.parameters(),
            format!(
                "a cat\nNegative prompt: blurry\n{line}, Model: sd15, Version: maxdiff-rs {version}"
            )
        );
        let named = GenerationSettings {
            prompt: String::new(),
            negative_prompt: String::new(),
            model: "dreams, v2: \"é\"".into(),
            model_hash: Some("6ce0161689".into()),
            ..plain
        };
        assert_eq!(
            named.parameters(),
            format!(
                "{line}, Model hash: 6ce0161689, Model: \"dreams, v2: \\\"é\\\"\", Version: maxdiff-rs {version}"
            )
        );
    }

    #[test]
    fn settings_of_older_versions_take_the_size_of_the_image() {
        let dir = TempDir::new().unwrap();
        let json = r#"{"prompt":"a","negative_prompt":"","seed":3,"steps":8,"guidance_scale":1.5,
            "scheduler":"ddim","config":"quickstart"}"#;
        let path = with_texts(&dir, |encoder| {
            encoder
                .add_text_chunk(SETTINGS.into(), json.into())
                .unwrap();
        });
        let settings = own(&path);
        assert_eq!((settings.width, settings.height), (5, 3));
        assert_eq!((settings.seed, settings.steps), (3, 8));
    }

    #[test]
    fn images_without_settings_say_what_they_have() {
        let dir = TempDir::new().unwrap();
        let error = |path: &Path| match read_recorded(path).unwrap_err() {
            ImageFileError::NoSettings { found, .. } => found,
            error => panic!("{error}"),
        };
        assert_eq!(error(&write(&dir, None)), "it has no texts at all");
        let path = with_texts(&dir, |encoder| {
            let text = "a\nSteps: 3".to_owned();
            encoder.add_text_chunk("prompt".into(), text).unwrap();
            encoder
                .add_itxt_chunk("workflow".into(), "{}".into())
                .unwrap();
            encoder
                .add_ztxt_chunk("Comment".into(), "x".into())
                .unwrap();
        });
        let found = error(&path);
        assert!(found.contains("`prompt`, `workflow`, `Comment`"), "{found}");
        let many = with_texts(&dir, |encoder| {
            for k in 0..20 {
                encoder.add_text_chunk(format!("k{k}"), "x".into()).unwrap();
            }
        });
        assert!(
            error(&many).ends_with("`k7` and 12 more"),
            "{}",
            error(&many)
        );
    }

    #[test]
    fn texts_are_read_in_every_kind_of_chunk() {
        let dir = TempDir::new().unwrap();
        let text = "a cat\nSteps: 3, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 5x3";
        let of = |add: &dyn Fn(&mut png::Encoder<'_, &mut Vec<u8>>)| {
            read_recorded(&with_texts(&dir, add)).unwrap()
        };
        let plain = of(&|encoder| {
            encoder
                .add_text_chunk(PARAMETERS.into(), text.into())
                .unwrap();
        });
        let packed = of(&|encoder| {
            encoder
                .add_ztxt_chunk(PARAMETERS.into(), text.into())
                .unwrap();
        });
        let unicode = of(&|encoder| {
            encoder
                .add_itxt_chunk(PARAMETERS.into(), text.into())
                .unwrap();
        });
        assert!(matches!(plain, Recorded::Web(_)), "{plain:?}");
        assert_eq!([&packed, &unicode], [&plain, &plain]);
    }

    #[test]
    fn images_of_web_interfaces_are_read() {
        let dir = TempDir::new().unwrap();
        let web = |text: &str| {
            let path = with_texts(&dir, |encoder| {
                encoder
                    .add_text_chunk(PARAMETERS.into(), text.into())
                    .unwrap();
            });
            read_recorded(&path)
        };
        let read = match web("a cat\nSteps: 3, Sampler: Euler a, CFG scale: 7, Seed: 5").unwrap() {
            Recorded::Web(read) => read,
            Recorded::Own(settings) => panic!("{settings:?}"),
        };
        assert_eq!(read.settings.prompt, "a cat");
        assert_eq!(
            (
                read.settings.seed,
                read.settings.width,
                read.settings.height
            ),
            (5, 5, 3)
        );
        let error = web("a\nSteps: 3").unwrap_err().to_string();
        assert!(
            error.contains("text `parameters`: `Sampler` is missing"),
            "{error}"
        );
    }

    #[test]
    fn malformed_settings_are_named() {
        let dir = TempDir::new().unwrap();
        let error = |json: &str| {
            let path = with_texts(&dir, |encoder| {
                encoder
                    .add_itxt_chunk(SETTINGS.into(), json.into())
                    .unwrap();
            });
            let error = read_recorded(&path).unwrap_err();
            assert!(matches!(error, ImageFileError::Settings { .. }), "{error}");
            error.to_string()
        };
        assert!(error("").contains("texts.png"));
        assert!(error("[]").contains("invalid"));
        assert!(error("{\"prompt\":\"a\"}").contains("missing field"));
        let json = serde_json::to_string(&settings("a")).unwrap();
        assert!(error(&json.replace("\"seed\":", "\"seed\":-")).contains("invalid"));
        assert!(error(&json.replace("\"steps\"", "\"later\":1,\"steps\"")).contains("`later`"));
        error(&"[".repeat(100_000));
    }

    #[test]
    fn broken_and_swollen_files_are_named() {
        let dir = TempDir::new().unwrap();
        let path = write(&dir, Some(&settings("a")));
        let bytes = fs::read(&path).unwrap();
        let error = || {
            let error = read_recorded(&path).unwrap_err();
            assert!(matches!(error, ImageFileError::Read { .. }), "{error}");
            error.to_string()
        };
        for length in [0, 4, 20, bytes.len() / 2] {
            fs::write(&path, &bytes[..length]).unwrap();
            assert!(error().contains("x-00001.png"));
        }
        fs::write(&path, b"GIF89a").unwrap();
        error();
        fs::remove_file(&path).unwrap();
        let missing = read_recorded(&path).unwrap_err();
        assert!(matches!(missing, ImageFileError::Open { .. }), "{missing}");
        // A text that unpacks to more than may be read, in a small file.
        let text = "a".repeat(MAX_TEXT_BYTES + 1);
        let mut chunk = png::text_metadata::ITXtChunk::new(SETTINGS, text);
        chunk.compressed = true;
        let mut bytes = Vec::new();
        let mut writer = png::Encoder::new(&mut bytes, 5, 3).write_header().unwrap();
        writer.write_text_chunk(&chunk).unwrap();
        writer.write_image_data(&[0; 15]).unwrap();
        writer.finish().unwrap();
        assert!(bytes.len() < 1 << 20);
        fs::write(&path, bytes).unwrap();
        assert!(error().contains("text `maxdiff`"));
    }
}
