//! How a run tells a person where it is: a bar on a terminal, lines elsewhere.

use std::io::Write;
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One completed training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The step's number, counted over the whole run.
    pub step: u64,
    /// Wall time of the step.
    pub seconds: f64,
    /// TFLOP/s that one device did.
    pub tflops_per_device: f64,
    pub loss: f64,
    /// Samples of the global batch.
    pub samples: u64,
}

/// MaxDiffusion's step line (`train_utils.py`, `write_metrics_to_tensorboard`), which scripts read.
pub fn step_line(report: &StepReport) -> String {
    format!(
        "completed step: {}, seconds: {:.3}, TFLOP/s/device: {:.3}, loss: {:.3}",
        report.step, report.seconds, report.tflops_per_device, report.loss
    )
}

/// Share of the newest step in the running mean of step times.
const SMOOTHING: f64 = 0.1;

/// Steps whose losses the bar shows the mean of; earlier ones count less and less.
const LOSS_STEPS: u64 = 50;

/// Shows the progress of a training run on standard error.
///
/// On a terminal: a bar with the step, the running mean of the loss, samples/s and the time left. Elsewhere: the step
/// line every `log_period` steps and at the end, and a line with samples/s and the time left at
/// each tenth of the run.
pub struct Progress {
    bar: ProgressBar,
    lines: Option<Box<dyn Write + Send>>,
    quiet: bool,
    total_steps: u64,
    first_step: u64,
    log_period: u64,
    reports: u64,
    step_seconds: f64,
    /// The running mean of the losses that are finite, and how many there were.
    mean_loss: (f64, u64),
}

impl Progress {
    /// For steps `first_step..total_steps`. A `log_period` of 0 shows the last step's line only; with `quiet`, warnings
    /// alone are shown.
    pub fn new(total_steps: u64, first_step: u64, log_period: u64, quiet: bool) -> Self {
        let target = match quiet {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        let bar = ProgressBar::with_draw_target(Some(total_steps), target);
        // On a stream that is no terminal, indicatif hides the bar.
        let lines: Option<Box<dyn Write + Send>> = bar
            .is_hidden()
            .then(|| Box::new(std::io::stderr()) as Box<dyn Write + Send>);
        let mut progress = Progress::with_parts(bar, lines, first_step, log_period);
        progress.quiet = quiet;
        progress
    }

    /// Writes lines to `out`, whatever standard error is.
    pub fn to_lines(
        out: impl Write + Send + 'static,
        total_steps: u64,
        first_step: u64,
        log_period: u64,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total_steps), ProgressDrawTarget::hidden());
        Progress::with_parts(bar, Some(Box::new(out)), first_step, log_period)
    }

    fn with_parts(
        bar: ProgressBar,
        lines: Option<Box<dyn Write + Send>>,
        first_step: u64,
        log_period: u64,
    ) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        bar.set_position(first_step);
        Progress {
            total_steps: bar.length().unwrap_or(0),
            bar,
            lines,
            quiet: false,
            first_step,
            log_period,
            reports: 0,
            step_seconds: 0.0,
            mean_loss: (0.0, 0),
        }
    }

    /// Shows a completed step.
    pub fn step(&mut self, report: &StepReport) {
        self.reports += 1;
        // The first step includes compilation or cold caches, so the second starts the mean anew.
        self.step_seconds = if self.reports <= 2 {
            report.seconds
        } else {
            self.step_seconds + SMOOTHING * (report.seconds - self.step_seconds)
        };
        let (mean_loss, losses) = &mut self.mean_loss;
        if report.loss.is_finite() {
            *losses += 1;
            *mean_loss += (report.loss - *mean_loss) / (*losses).min(LOSS_STEPS) as f64;
        }
        let mean_loss = *mean_loss;
        let done = self.first_step + self.reports;
        self.bar.set_position(done);
        self.bar.set_message(format!(
            "mean loss {mean_loss:.4}, {}",
            self.rate(report, done)
        ));

        let last = done >= self.total_steps;
        let line = last || (self.log_period > 0 && report.step.is_multiple_of(self.log_period));
        let tenth = |n: u64| n * 10 / self.total_steps.max(1);
        let rate = (!last && tenth(done) > tenth(done - 1)).then(|| self.rate(report, done));
        if let Some(out) = &mut self.lines
            && !self.quiet
        {
            // A closed standard error must not stop a run.
            if line {
                let _ = writeln!(out, "{}", step_line(report));
            }
            if let Some(rate) = rate {
                let _ = writeln!(out, "progress: {done}/{} steps, {rate}", self.total_steps);
            }
            let _ = out.flush();
        }
    }

    /// Says on the bar what happens until the next step.
    pub fn between(&mut self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// Shows a line above the bar, or as a line, unless quiet.
    pub fn message(&mut self, text: &str) {
        if !self.quiet {
            self.warn(text);
        }
    }

    /// As [`Progress::message`], quiet or not.
    pub fn warn(&mut self, text: &str) {
        match &mut self.lines {
            Some(out) => {
                let _ = writeln!(out, "{text}");
            }
            None => self.bar.println(text),
        }
    }

    fn rate(&self, report: &StepReport, done: u64) -> String {
        let left = self.total_steps.saturating_sub(done) as f64 * self.step_seconds;
        let per_second = report.samples as f64 / self.step_seconds;
        let eta = Duration::try_from_secs_f64(left).map_or_else(
            |_| "unknown".to_owned(),
            |d| format!("{:#}", HumanDuration(d)),
        );
        format!("{per_second:.1} samples/s, eta {eta}")
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn run(total: u64, first: u64, period: u64) -> Vec<String> {
        let out = Shared::default();
        let mut progress = Progress::to_lines(out.clone(), total, first, period);
        for step in first..total {
            progress.step(&StepReport {
                step,
                // The first step takes long: it must not show in the rate of later ones.
                seconds: if step == first { 100.0 } else { 0.5 },
                tflops_per_device: 1.25,
                loss: 0.5,
                samples: 8,
            });
        }
        drop(progress);
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_step_line_is_maxdiffusions() {
        let report = StepReport {
            step: 12,
            seconds: 0.123_45,
            tflops_per_device: 3.0,
            loss: 0.987_65,
            samples: 1,
        };
        assert_eq!(
            step_line(&report),
            "completed step: 12, seconds: 0.123, TFLOP/s/device: 3.000, loss: 0.988"
        );
    }

    #[test]
    fn lines_come_every_period_and_at_the_end() {
        let lines = run(12, 0, 5);
        let steps: Vec<_> = lines
            .iter()
            .filter_map(|l| l.strip_prefix("completed step: "))
            .map(|l| l.split(',').next().unwrap())
            .collect();
        assert_eq!(steps, ["0", "5", "10", "11"]);
    }

    #[test]
    fn a_resumed_run_counts_from_its_first_step() {
        let lines = run(10, 7, 0);
        assert_eq!(
            lines,
            [
                "progress: 8/10 steps, 0.1 samples/s, eta 3m",
                "progress: 9/10 steps, 16.0 samples/s, eta 1s",
                "completed step: 9, seconds: 0.500, TFLOP/s/device: 1.250, loss: 0.500",
            ]
        );
    }

    #[test]
    fn the_bar_shows_the_mean_of_finite_losses() {
        let mut progress = Progress::to_lines(std::io::sink(), 100, 0, 0);
        let mut show = |loss: f64| {
            progress.step(&StepReport {
                step: 0,
                seconds: 0.5,
                tflops_per_device: 1.0,
                loss,
                samples: 1,
            });
            progress.bar.message()
        };
        assert!(show(1.0).starts_with("mean loss 1.0000, "));
        show(3.0);
        assert!(show(f64::NAN).starts_with("mean loss 2.0000, "));
        for _ in 0..48 {
            show(2.0);
        }
        // From then on the newest counts a fiftieth.
        assert!(show(4.5).starts_with("mean loss 2.0500, "));
    }

    #[test]
    fn odd_step_times_do_not_panic() {
        let mut progress = Progress::to_lines(std::io::sink(), 3, 0, 1);
        for seconds in [0.0, f64::NAN, -1.0] {
            progress.step(&StepReport {
                step: 0,
                seconds,
                tflops_per_device: f64::INFINITY,
                loss: f64::NAN,
                samples: 0,
            });
        }
    }
}
