//! Training metrics: JSON lines, TensorBoard event files, a page of the run, and progress on the terminal.
//!
//! Nothing is overwritten: a resumed run appends to the JSON lines and makes an event file of its
//! own.

mod chart;
mod page;
mod progress;
pub mod tensorboard;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

pub use chart::{Line, escaped, svg};
pub use page::{PageSources, STYLE, write_page};
pub use progress::{Progress, StepReport, step_line};
use tensorboard::EventWriter;

/// Names of scalars, MaxDiffusion's where it has one.
pub mod names {
    pub const STEP_TIME_SECONDS: &str = "perf/step_time_seconds";
    pub const PER_DEVICE_TFLOPS: &str = "perf/per_device_tflops";
    pub const PER_DEVICE_TFLOPS_PER_SEC: &str = "perf/per_device_tflops_per_sec";
    pub const SAMPLES_PER_SEC: &str = "perf/samples_per_sec";
    /// Seconds that a step waited for its batches.
    pub const DATA_WAIT_SECONDS: &str = "perf/data_wait_seconds";
    /// The arithmetic of forward and backward pass, without what is recomputed, as a share of what the chips could do in
    /// bfloat16 in the same time.
    pub const MODEL_FLOPS_UTILIZATION: &str = "perf/model_flops_utilization";
    /// The time of the steps that count, as a share of the time since the run was first started.
    pub const GOODPUT: &str = "perf/goodput";
    pub const LOSS: &str = "learning/loss";
    pub const CURRENT_LEARNING_RATE: &str = "learning/current_learning_rate";
    pub const GRAD_NORM: &str = "learning/grad_norm";
    pub const VALIDATION_LOSS: &str = "learning/validation_loss";
    pub const SKIPPED_STEPS: &str = "learning/skipped_steps";
}

/// Why metrics could not be written.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    #[error("{path}: {source}")]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("image {tag}: not a png file: {reason}")]
    NotPng { tag: String, reason: String },
}

/// Where the metrics of a run go.
#[derive(Clone, Debug)]
pub struct MetricsOptions<'a> {
    /// Stands in every JSON line.
    pub run_name: &'a str,
    /// The JSON lines file, if any; an existing one is appended to.
    pub jsonl: Option<&'a Path>,
    /// The folder for event files, if any.
    pub tensorboard_dir: Option<&'a Path>,
    /// The first step of this process: above 0 in a run that continues from a checkpoint.
    pub first_step: u64,
    /// Steps between two flushes (`log_period`); 0 flushes at the end only.
    pub flush_every: u64,
}

/// Writes the scalars and images of a run.
///
/// Dropping the writer flushes the rest; call [`MetricsWriter::flush`] to
/// see the error of that.
pub struct MetricsWriter {
    run_name: String,
    jsonl: Option<(PathBuf, BufWriter<File>)>,
    events: Option<EventWriter>,
    flush_every: u64,
    since_flush: u64,
}

impl MetricsWriter {
    /// Opens the files, so that a folder that cannot be written to is found before training starts.
    ///
    /// # Errors
    /// When a folder or file cannot be made or opened for writing.
    pub fn open(options: &MetricsOptions) -> Result<Self, MetricsError> {
        let jsonl = options
            .jsonl
            .map(|path| Ok((path.to_owned(), BufWriter::new(open_lines(path)?))))
            .transpose()?;
        let events = options
            .tensorboard_dir
            .map(|dir| EventWriter::create(dir, options.first_step))
            .transpose()?;
        Ok(MetricsWriter {
            run_name: options.run_name.to_owned(),
            jsonl,
            events,
            flush_every: options.flush_every,
            since_flush: 0,
        })
    }

    /// The event file of this process.
    pub fn event_file(&self) -> Option<&Path> {
        self.events.as_ref().map(EventWriter::path)
    }

    /// Writes the scalars of one step: one JSON line, one event.
    ///
    /// JSON has no NaN and no infinity: they are `null` in the JSON line and kept in the event.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), MetricsError> {
        if let Some((path, out)) = &mut self.jsonl {
            let mut line = Map::new();
            line.insert("step".to_owned(), step.into());
            for &(name, value) in scalars {
                line.insert(name.to_owned(), value.into());
            }
            line.insert("run_name".to_owned(), self.run_name.as_str().into());
            // One write a line: a flush in between never splits one.
            let text = format!("{}\n", Value::Object(line));
            out.write_all(text.as_bytes())
                .map_err(|source| MetricsError::Io {
                    path: path.clone(),
                    source,
                })?;
        }
        if let Some(events) = &mut self.events {
            events.scalars(step, scalars)?;
        }
        self.since_flush += 1;
        if self.flush_every > 0 && self.since_flush >= self.flush_every {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes an image (the bytes of a PNG file) to the event file. JSON lines hold no images, so
    /// without a TensorBoard folder it goes nowhere: images are kept as files besides.
    ///
    /// # Errors
    /// When `png` is no PNG file, or the file cannot be written.
    pub fn image(&mut self, step: u64, tag: &str, png: &[u8]) -> Result<(), MetricsError> {
        match &mut self.events {
            Some(events) => events.image(step, tag, png),
            None => Ok(()),
        }
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.since_flush = 0;
        if let Some((path, out)) = &mut self.jsonl {
            out.flush().map_err(|source| MetricsError::Io {
                path: path.clone(),
                source,
            })?;
        }
        if let Some(events) = &mut self.events {
            events.flush()?;
        }
        Ok(())
    }
}

/// Opens a JSON lines file for appending. A last line that a killed run left unfinished is closed,
/// so that the next line does not run into it.
fn open_lines(path: &Path) -> Result<File, MetricsError> {
    let io = |source| MetricsError::Io {
        path: path.to_owned(),
        source,
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(io)?;
    }
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
        .map_err(io)?;
    if file.metadata().map_err(io)?.len() > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1)).map_err(io)?;
        file.read_exact(&mut last).map_err(io)?;
        if last != *b"\n" {
            file.write_all(b"\n").map_err(io)?;
        }
    }
    Ok(file)
}

/// The lines of a JSON lines file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JsonLines {
    /// In the order of the file: after a resume the later of two lines with one step holds.
    pub lines: Vec<Map<String, Value>>,
    /// How many lines were no JSON object, as a killed run may leave one.
    pub unreadable: usize,
}

/// Reads what [`MetricsWriter`] wrote.
///
/// # Errors
/// When the file cannot be read.
pub fn read_json_lines(path: &Path) -> Result<JsonLines, MetricsError> {
    let io = |source| MetricsError::Io {
        path: path.to_owned(),
        source,
    };
    let mut result = JsonLines::default();
    for line in BufReader::new(File::open(path).map_err(io)?).split(b'\n') {
        let line = line.map_err(io)?;
        match serde_json::from_slice(&line) {
            Ok(object) => result.lines.push(object),
            Err(_) => result.unreadable += usize::from(!line.is_empty()),
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options<'a>(jsonl: &'a Path, dir: Option<&'a Path>) -> MetricsOptions<'a> {
        MetricsOptions {
            run_name: "test",
            jsonl: Some(jsonl),
            tensorboard_dir: dir,
            first_step: 0,
            flush_every: 2,
        }
    }

    #[test]
    fn a_line_a_step_in_the_order_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/metrics.jsonl");
        let mut writer = MetricsWriter::open(&options(&path, None)).unwrap();
        let scalars = [(names::LOSS, 0.5), (names::STEP_TIME_SECONDS, 0.25)];
        writer.scalars(0, &scalars).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "", "flushed too early");
        writer.scalars(1, &[(names::LOSS, f64::NAN)]).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            concat!(
                r#"{"step":0,"learning/loss":0.5,"perf/step_time_seconds":0.25,"run_name":"test"}"#,
                "\n",
                r#"{"step":1,"learning/loss":null,"run_name":"test"}"#,
                "\n"
            )
        );
    }

    #[test]
    fn dropping_the_writer_flushes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let events = dir.path().join("tensorboard");
        let mut writer = MetricsWriter::open(&options(&path, Some(&events))).unwrap();
        writer.scalars(3, &[(names::LOSS, 1.0)]).unwrap();
        let event_file = writer.event_file().unwrap().to_owned();
        drop(writer);
        assert_eq!(read_json_lines(&path).unwrap().lines.len(), 1);
        assert_eq!(tensorboard::read_events(&event_file).len(), 2);
    }

    #[test]
    fn a_resumed_run_appends_after_a_cut_off_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        fs::write(
            &path,
            "{\"step\":0,\"learning/loss\":1.0}\n{\"step\":1,\"learn",
        )
        .unwrap();
        let mut writer = MetricsWriter::open(&options(&path, None)).unwrap();
        writer.scalars(1, &[(names::LOSS, 0.75)]).unwrap();
        drop(writer);
        let read = read_json_lines(&path).unwrap();
        assert_eq!(read.unreadable, 1);
        let losses: Vec<_> = read.lines.iter().map(|l| l[names::LOSS].as_f64()).collect();
        assert_eq!(losses, [Some(1.0), Some(0.75)]);
    }

    #[test]
    fn an_unwritable_folder_is_found_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let path = file.join("metrics.jsonl");
        let Err(error) = MetricsWriter::open(&options(&path, None)) else {
            panic!("opened a file inside a file");
        };
        assert!(error.to_string().contains("metrics.jsonl"), "{error}");
    }
}
