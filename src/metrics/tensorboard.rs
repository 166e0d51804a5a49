//! TensorBoard event files: scalars and images.
//!
//! Every run, also a resumed one, writes a file of its own; TensorBoard reads all files of a folder
//! in the order of their names, which begin with the second they were made in.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;

use super::MetricsError;
use crate::proto::tensorflow::{Event, SessionLog, Summary, event, session_log, summary};
use crate::util::tfrecord::write_record;

/// The version that TensorBoard expects in the first record; from it on `SessionLog::START` marks
/// a restart.
const FILE_VERSION: &str = "brain.Event:2";

/// Appends events to one new event file.
pub struct EventWriter {
    path: PathBuf,
    out: BufWriter<File>,
}

impl EventWriter {
    /// Makes `events.out.tfevents.<seconds>.<host>` in `dir`, with a numbered ending when another
    /// run made that name in the same second.
    ///
    /// A run that continues from a checkpoint passes its `first_step`: TensorBoard then drops what
    /// an interrupted run had shown for that step and later ones.
    ///
    /// # Errors
    /// When the folder or the file cannot be made or written.
    pub fn create(dir: &Path, first_step: u64) -> Result<Self, MetricsError> {
        let io = |path: &Path, source| MetricsError::Io {
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(dir).map_err(|e| io(dir, e))?;
        let seconds = since_epoch().as_secs();
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy().replace(['/', '\0'], "_");
        let stem = format!("events.out.tfevents.{seconds:010}.{host}");
        let mut path = dir.join(&stem);
        let mut number = 0;
        let file = loop {
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => break file,
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                    number += 1;
                    path = dir.join(format!("{stem}.{number}"));
                }
                Err(e) => return Err(io(&path, e)),
            }
        };
        let mut writer = EventWriter {
            path,
            out: BufWriter::new(file),
        };
        writer.event(0, event::What::FileVersion(FILE_VERSION.to_owned()))?;
        if first_step > 0 {
            let start = SessionLog {
                status: session_log::SessionStatus::Start.into(),
                ..SessionLog::default()
            };
            writer.event(first_step, event::What::SessionLog(start))?;
        }
        writer.flush()?;
        Ok(writer)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the scalars of one step. TensorBoard keeps them as `f32`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), MetricsError> {
        let value = scalars
            .iter()
            .map(|&(tag, value)| summary::Value {
                tag: tag.to_owned(),
                value: Some(summary::value::Value::SimpleValue(value as f32)),
            })
            .collect();
        self.event(step, event::What::Summary(Summary { value }))
    }

    /// Writes an image, given as the bytes of a PNG file.
    ///
    /// # Errors
    /// When `png` is no PNG file, or the event file cannot be written.
    pub fn image(&mut self, step: u64, tag: &str, png: &[u8]) -> Result<(), MetricsError> {
        let not_png = |reason: String| MetricsError::NotPng {
            tag: tag.to_owned(),
            reason,
        };
        let reader = png::Decoder::new(std::io::Cursor::new(png))
            .read_info()
            .map_err(|e| not_png(e.to_string()))?;
        let info = reader.info();
        let side = |n: u32| i32::try_from(n).map_err(|e| not_png(e.to_string()));
        let image = summary::Image {
            height: side(info.height)?,
            width: side(info.width)?,
            colorspace: match info.color_type {
                png::ColorType::Grayscale => 1,
                png::ColorType::GrayscaleAlpha => 2,
                png::ColorType::Rgb | png::ColorType::Indexed => 3,
                png::ColorType::Rgba => 4,
            },
            encoded_image_string: png.to_vec(),
        };
        let value = vec![summary::Value {
            tag: tag.to_owned(),
            value: Some(summary::value::Value::Image(image)),
        }];
        self.event(step, event::What::Summary(Summary { value }))
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.out.flush().map_err(|source| MetricsError::Io {
            path: self.path.clone(),
            source,
        })
    }

    fn event(&mut self, step: u64, what: event::What) -> Result<(), MetricsError> {
        let event = Event {
            wall_time: since_epoch().as_secs_f64(),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            what: Some(what),
        };
        write_record(&mut self.out, &event.encode_to_vec()).map_err(|source| MetricsError::Io {
            path: self.path.clone(),
            source,
        })
    }
}

/// The events of a file.
#[cfg(test)]
pub(super) fn read_events(path: &Path) -> Vec<Event> {
    let data = fs::read(path).unwrap();
    let records = crate::util::tfrecord::Records::new(data.as_slice(), 0, data.len() as u64);
    let payloads = records.map(|record| record.unwrap().payload);
    payloads
        .map(|payload| Event::decode(payload.as_slice()).unwrap())
        .collect()
}

/// A clock before 1970 reads as 1970: a wrong clock must not stop a run.
fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn png(width: u32, height: u32) -> Vec<u8> {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> = (0..width * height * 3).map(|i| i as u8).collect();
        encoder
            .write_header()
            .and_then(|mut w| w.write_image_data(&pixels))
            .unwrap();
        out
    }

    #[test]
    fn the_encoding_is_the_published_one() {
        // Written out by hand from event.proto's field numbers: wall_time = 1 (fixed64), step = 2
        // (varint), summary = 5 { value = 1 { tag = 1, simple_value = 2 (fixed32) } }.
        let event = Event {
            wall_time: 1.5,
            step: 300,
            what: Some(event::What::Summary(Summary {
                value: vec![summary::Value {
                    tag: "loss".to_owned(),
                    value: Some(summary::value::Value::SimpleValue(0.25)),
                }],
            })),
        };
        let mut expected = vec![0x09];
        expected.extend(1.5_f64.to_le_bytes());
        expected.extend([0x10, 0xac, 0x02, 0x2a, 13, 0x0a, 11, 0x0a, 4]);
        expected.extend(b"loss");
        expected.push(0x15);
        expected.extend(0.25_f32.to_le_bytes());
        assert_eq!(event.encode_to_vec(), expected);
    }

    #[test]
    fn reads_back_scalars_and_images() {
        let dir = tempfile::tempdir().unwrap();
        let file = png(6, 4);
        let mut writer = EventWriter::create(dir.path(), 0).unwrap();
        writer
            .scalars(
                7,
                &[
                    ("learning/loss", 0.125),
                    ("perf/step_time_seconds", f64::NAN),
                ],
            )
            .unwrap();
        writer.image(8, "samples", &file).unwrap();
        writer.flush().unwrap();

        let name = writer.path().file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        let events = read_events(writer.path());
        assert_eq!(
            events[0].what,
            Some(event::What::FileVersion("brain.Event:2".to_owned()))
        );
        let Some(event::What::Summary(scalars)) = &events[1].what else {
            panic!("{events:?}");
        };
        assert_eq!(events[1].step, 7);
        assert_eq!(scalars.value[0].tag, "learning/loss");
        assert_eq!(
            scalars.value[0].value,
            Some(summary::value::Value::SimpleValue(0.125))
        );
        assert!(matches!(
            scalars.value[1].value,
            Some(summary::value::Value::SimpleValue(v)) if v.is_nan()
        ));
        let Some(event::What::Summary(images)) = &events[2].what else {
            panic!("{events:?}");
        };
        let Some(summary::value::Value::Image(image)) = &images.value[0].value else {
            panic!("{images:?}");
        };
        assert_eq!((image.width, image.height, image.colorspace), (6, 4, 3));
        assert_eq!(image.encoded_image_string, file);
    }

    #[test]
    fn a_resumed_run_writes_its_own_file_and_marks_the_restart() {
        let dir = tempfile::tempdir().unwrap();
        let first = EventWriter::create(dir.path(), 0).unwrap();
        let before = fs::read(first.path()).unwrap();
        let resumed = EventWriter::create(dir.path(), 50).unwrap();
        assert_ne!(first.path(), resumed.path());
        assert_eq!(fs::read(first.path()).unwrap(), before);
        let events = read_events(resumed.path());
        assert_eq!(events[1].step, 50);
        assert!(matches!(
            &events[1].what,
            Some(event::What::SessionLog(log)) if log.status() == session_log::SessionStatus::Start
        ));
    }

    #[test]
    fn refuses_bytes_that_are_no_png() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), 0).unwrap();
        let error = writer.image(1, "samples", b"GIF89a").unwrap_err();
        assert!(
            error.to_string().starts_with("image samples: not a png"),
            "{error}"
        );
    }
}
