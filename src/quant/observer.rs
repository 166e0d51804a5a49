//! Observers: from the values of a tensor to the range that its integers cover. Sources of the formulas are in
//! `docs/quantization.md`.

use crate::graph::TensorFormat;
use crate::util::named;

named! {
    /// What decides the range that integers cover.
    pub enum ObserverKind {
        /// The lowest and the highest value.
        MinMax = "min_max",
        /// The magnitude below which so many percent of all values but zeros are, in 4200 bins.
        Percentile = "percentile",
        /// PyTorch's search for the smallest L2 error, in 2048 bins.
        Histogram = "histogram",
        /// The same in 256 bins, as AMD Quark has it.
        HistogramPro = "histogrampro",
        /// The share of the whole range, in hundredths, with the smallest squared error.
        Mse = "mse",
        /// The lowest and the highest value, with the nearest power of two as scale.
        PowerOfTwo = "power_of_two",
        /// The moving averages of each batch's lowest and highest value.
        Ema = "ema",
    }
}

named! {
    /// Whose results observers give, for comparison.
    pub enum ObserverCompat {
        /// Those of AMD Quark 0.13 for one batch, with its defects: `histogram` always has the scale 1, `mse` looks at the last three
        /// of 2048 bins, `percentile` is that of 99.99999999 and takes nearly the lowest bin for both ends of a format with zero
        /// points.
        Quark = "quark",
    }
}

/// An observer with its setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observer {
    pub kind: ObserverKind,
    /// Of [`ObserverKind::Percentile`]: the others do not read it.
    pub percentile: f64,
    pub compat: Option<ObserverCompat>,
}

/// What one batch adds to a moving average: the default of PyTorch's `MovingAverageMinMaxObserver`.
const EMA_STEP: f32 = 0.01;
/// Bins of [`ObserverKind::Percentile`], those of AMD Quark.
const PERCENTILE_BINS: usize = 4200;
/// The percentile of AMD Quark, which cannot be set there.
const QUARK_PERCENTILE: f64 = 99.999_999_99;
/// The step of quantiles in PyTorch's search.
const QUANTILE_STEP: f64 = 1e-5;
/// The shares of the range that [`ObserverKind::Mse`] tries, in hundredths.
const SHARES: std::ops::RangeInclusive<u32> = 20..=100;

impl Default for Observer {
    fn default() -> Observer {
        Observer::of(ObserverKind::MinMax)
    }
}

impl Observer {
    /// With the usual settings.
    pub fn of(kind: ObserverKind) -> Observer {
        Observer {
            kind,
            percentile: 99.99,
            compat: None,
        }
    }

    /// Whether it reads how often each value occurs, and not only the lowest and the highest.
    pub fn reads_counts(self) -> bool {
        match self.kind {
            ObserverKind::MinMax | ObserverKind::PowerOfTwo | ObserverKind::Ema => false,
            ObserverKind::Percentile
            | ObserverKind::Histogram
            | ObserverKind::HistogramPro
            | ObserverKind::Mse => true,
        }
    }

    fn is_quarks(self) -> bool {
        self.compat == Some(ObserverCompat::Quark)
    }

    /// The range of values, each with how often it occurs, that lie in `whole`. `round` gives the scale of a range, and the
    /// squared error that it leaves.
    pub(super) fn extent(
        self,
        whole: Extent,
        values: impl Iterator<Item = (f32, f64)> + Clone,
        round: &mut dyn FnMut(Extent) -> (f32, f64),
        format: TensorFormat,
    ) -> Extent {
        let found = match self.kind {
            ObserverKind::Histogram if self.is_quarks() => unit_scale(format),
            ObserverKind::Mse if self.is_quarks() => {
                quark_mse(values, &mut |extent| round(extent).0, format)
            }
            ObserverKind::Percentile if self.is_quarks() => {
                let symmetric = !format.zero_point;
                match symmetric {
                    true => percentile(values, QUARK_PERCENTILE, true),
                    false => quark_percentile(values),
                }
            }
            ObserverKind::MinMax | ObserverKind::Ema => whole,
            ObserverKind::PowerOfTwo => power_of_two(whole, round(whole).0, format),
            ObserverKind::Percentile => percentile(values, self.percentile, !format.zero_point),
            ObserverKind::Histogram => Histogram::new(values, 2048).search(levels(format)),
            ObserverKind::HistogramPro => Histogram::new(values, 256).search(levels(format)),
            ObserverKind::Mse => smallest_error(whole, &mut |extent| round(extent).1),
        };
        found.in_format(format)
    }
}

/// What decides a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Extent {
    /// The lowest value, at most 0; of a symmetric format 0.
    pub lowest: f32,
    /// The highest value, at least 0; of a symmetric format the largest magnitude.
    pub highest: f32,
}

impl Extent {
    /// What decides the scale of a format whose values lie between these.
    pub fn in_format(self, format: TensorFormat) -> Extent {
        match format.zero_point {
            true => Extent {
                lowest: self.lowest.min(0.0),
                highest: self.highest.max(0.0),
            },
            false => Extent {
                lowest: 0.0,
                highest: self.lowest.abs().max(self.highest.abs()),
            },
        }
    }
}

/// A moving average of ranges.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MovingRange(Option<[f32; 2]>);

impl MovingRange {
    pub fn add(&mut self, [lowest, highest]: [f32; 2]) {
        self.0 = Some(match self.0 {
            None => [lowest, highest],
            Some([low, high]) => [
                low + EMA_STEP * (lowest - low),
                high + EMA_STEP * (highest - high),
            ],
        });
    }

    pub fn range(self) -> [f32; 2] {
        self.0.unwrap_or_default()
    }
}

/// The range whose scale is 1 and whose zero point is 0.
fn unit_scale(format: TensorFormat) -> Extent {
    let (lowest, highest) = format.element.integer_range();
    match format.zero_point {
        true => Extent {
            lowest: lowest as f32,
            highest: highest as f32,
        },
        false => Extent {
            lowest: 0.0,
            highest: format.bound() as f32,
        },
    }
}

/// How many values are in each of so many bins, of magnitudes where a symmetric format has negative values, and the ends of all bins.
fn quark_bins(
    values: impl Iterator<Item = (f32, f64)> + Clone,
    bins: usize,
    is_symmetric: bool,
) -> (Vec<f64>, [f32; 2]) {
    let is_negative = values.clone().any(|(x, _)| x < 0.0);
    let values = values.map(|(x, count)| match is_symmetric && is_negative {
        true => (x.abs(), count),
        false => (x, count),
    });
    let ends = [f32::INFINITY, f32::NEG_INFINITY];
    let [lowest, highest] = values
        .clone()
        .fold(ends, |[low, high], (x, _)| [low.min(x), high.max(x)]);
    let edges = [if is_symmetric { 0.0 } else { lowest }, highest];
    let mut counts = vec![0.0; bins];
    if edges[1] > edges[0] {
        values.for_each(|(x, count)| counts[bin(x, edges, bins)] += count);
    }
    (counts, edges)
}

/// The lower edge of a bin.
fn edge([lowest, highest]: [f32; 2], bins: usize, at: usize) -> f32 {
    let width = f64::from(highest - lowest) / bins as f64;
    (f64::from(lowest) + at as f64 * width) as f32
}

/// Quark's `PerTensorMSEObserver`: of the centres of the last three bins that which leaves the smallest error of all centres. `scale`
/// gives that of a range from 0 on.
fn quark_mse(
    values: impl Iterator<Item = (f32, f64)> + Clone,
    scale: &mut dyn FnMut(Extent) -> f32,
    format: TensorFormat,
) -> Extent {
    const BINS: usize = 2048;
    let (counts, edges) = quark_bins(values, BINS, !format.zero_point);
    let centre = |at: usize| (edge(edges, BINS, at) + edge(edges, BINS, at + 1)) / 2.0;
    let (lowest, highest) = format.element.integer_range();
    let [lowest, highest] = [lowest as f32, highest as f32];
    let zero_point = if format.zero_point { lowest } else { 0.0 };
    let mut best = (f64::INFINITY, Extent::default());
    for at in BINS - 3..BINS {
        let extent = Extent {
            lowest: 0.0,
            highest: centre(at),
        };
        let scale = scale(extent);
        let inverse = 1.0 / scale;
        let errors = counts.iter().enumerate().map(|(at, count)| {
            let x = centre(at);
            let code = ((x * inverse).round_ties_even() + zero_point).clamp(lowest, highest);
            count * f64::from((code - zero_point) * scale - x).powi(2)
        });
        let error: f64 = errors.sum();
        if error < best.0 {
            best = (error, extent);
        }
    }
    best.1
}

/// Quark's `PerTensorPercentileObserver` of a format with zero points: both ends are lower edges of nearly the lowest bins.
fn quark_percentile(values: impl Iterator<Item = (f32, f64)> + Clone) -> Extent {
    let values = values.filter(|(x, _)| *x != 0.0);
    let (counts, edges) = quark_bins(values, PERCENTILE_BINS, false);
    let total: f64 = counts.iter().sum();
    let share = (100.0 - QUARK_PERCENTILE) / 200.0;
    let mut below = 0.0;
    let shares = counts.iter().map(|count| {
        below += count / total;
        below
    });
    let shares: Vec<f64> = shares.collect();
    let first = |is: &dyn Fn(f64) -> bool| shares.iter().position(|s| is(*s)).unwrap_or(0);
    Extent {
        lowest: edge(edges, PERCENTILE_BINS, first(&|s| s <= 1.0 - share)),
        highest: edge(edges, PERCENTILE_BINS, first(&|s| s >= share)),
    }
}

/// Numbers that a format has.
fn levels(format: TensorFormat) -> f64 {
    2f64.powi(format.element.bits() as i32)
}

/// The range whose scale is the power of two nearest to `scale`, that of `whole`: `2^round(log2(scale))`.
fn power_of_two(whole: Extent, scale: f32, format: TensorFormat) -> Extent {
    if whole.highest == whole.lowest {
        return whole;
    }
    let nearest = f64::from(scale).log2().round_ties_even().exp2();
    Extent {
        lowest: 0.0,
        highest: (format.bound() * nearest) as f32,
    }
}

/// Which bin of `bins` between two edges a value is in, as `torch.histc` counts.
fn bin(value: f32, [lowest, highest]: [f32; 2], bins: usize) -> usize {
    let place = (value - lowest) * bins as f32 / (highest - lowest);
    (place as usize).min(bins - 1)
}

/// The range of all values but zeros without the outermost. A symmetric one ends at the lower edge of the bin in which
/// the percentile is, as AMD Quark's does; of another each end loses half of what is left out.
fn percentile(
    values: impl Iterator<Item = (f32, f64)> + Clone,
    percentile: f64,
    is_symmetric: bool,
) -> Extent {
    let values = values.filter(|(x, _)| *x != 0.0);
    let values = values.map(|(x, count)| (if is_symmetric { x.abs() } else { x }, count));
    let edges = values
        .clone()
        .fold([0f32; 2], |[low, high], (x, _)| [low.min(x), high.max(x)]);
    let [lowest, highest] = edges;
    if lowest == highest {
        return Extent::default();
    }
    let mut counts = vec![0.0; PERCENTILE_BINS];
    let mut total = 0.0;
    for (x, count) in values {
        counts[bin(x, edges, PERCENTILE_BINS)] += count;
        total += count;
    }
    let edge = |at: usize| {
        let width = f64::from(highest - lowest) / PERCENTILE_BINS as f64;
        (f64::from(lowest) + at as f64 * width) as f32
    };
    let mut below = 0.0;
    let shares: Vec<f64> = counts
        .iter()
        .map(|count| {
            below += count;
            below / total
        })
        .collect();
    let first = |share: f64| shares.iter().position(|s| *s >= share).unwrap_or(0);
    let kept = percentile / 100.0;
    match is_symmetric {
        true => Extent {
            lowest: 0.0,
            highest: edge(first(kept)),
        },
        false => Extent {
            lowest: edge(first((1.0 - kept) / 2.0)),
            highest: edge(first((1.0 + kept) / 2.0) + 1),
        },
    }
}

/// The share of `whole` with the smallest squared error. Of two with the same error it is the larger.
fn smallest_error(whole: Extent, error: &mut dyn FnMut(Extent) -> f64) -> Extent {
    let mut best = (f64::INFINITY, whole);
    for share in SHARES.rev() {
        let share = share as f32 / 100.0;
        let extent = Extent {
            lowest: whole.lowest * share,
            highest: whole.highest * share,
        };
        let error = error(extent);
        if error < best.0 {
            best = (error, extent);
        }
    }
    best.1
}

/// How many values are in each of some equal parts of their range.
struct Histogram {
    lowest: f64,
    width: f64,
    counts: Vec<f64>,
}

impl Histogram {
    fn new(values: impl Iterator<Item = (f32, f64)> + Clone, bins: usize) -> Histogram {
        let outside = [f32::INFINITY, f32::NEG_INFINITY];
        let edges = values
            .clone()
            .fold(outside, |[low, high], (x, _)| [low.min(x), high.max(x)]);
        let mut counts = vec![0.0; bins];
        for (x, count) in values {
            counts[bin(x, edges, bins)] += count;
        }
        Histogram {
            lowest: f64::from(edges[0]),
            width: (f64::from(edges[1]) - f64::from(edges[0])) / bins as f64,
            counts,
        }
    }

    /// PyTorch's `HistogramObserver._non_linear_param_search`: from the whole range, the end with fewer bins up to the
    /// next quantile moves, as long as the error falls.
    fn search(&self, levels: f64) -> Extent {
        let last = self.counts.len() - 1;
        let total: f64 = self.counts.iter().sum();
        let mut below = 0.0;
        let sums: Vec<f64> = self
            .counts
            .iter()
            .map(|count| {
                below += count;
                below
            })
            .collect();
        let (mut alpha, mut beta) = (0.0, 1.0);
        let (mut start, mut end) = (0, last);
        let mut smallest = f64::INFINITY;
        // Values that are all the same have no bins.
        while alpha < beta && self.width > 0.0 {
            let (next_alpha, next_beta) = (alpha + QUANTILE_STEP, beta - QUANTILE_STEP);
            let (mut left, mut right) = (start, end);
            while left < end && sums[left] < next_alpha * total {
                left += 1;
            }
            while right > start && sums[right] > next_beta * total {
                right -= 1;
            }
            let (mut next_start, mut next_end) = (start, end);
            if left - start > end - right {
                (next_start, alpha) = (left, next_alpha);
            } else {
                (next_end, beta) = (right, next_beta);
            }
            if (next_start, next_end) == (start, end) {
                continue;
            }
            let error = self.error(next_start, next_end, levels);
            if error > smallest {
                break;
            }
            smallest = error;
            (start, end) = (next_start, next_end);
        }
        Extent {
            lowest: (self.lowest + self.width * start as f64) as f32,
            highest: (self.lowest + self.width * (end + 1) as f64) as f32,
        }
    }

    /// The squared error where `levels` steps cover the bins from `start` to `end`, with values spread evenly in a bin.
    fn error(&self, start: usize, end: usize, levels: f64) -> f64 {
        let step = self.width * (end - start + 1) as f64 / levels;
        let cubes = |from: f64, to: f64| (to * to * to - from * from * from) / 3.0;
        let bins = self.counts.iter().enumerate();
        let errors = bins.map(|(at, count)| {
            let begin = (at as f64 - start as f64) * self.width;
            let stop = begin + self.width;
            let of = |x: f64| (x / step).floor().clamp(0.0, levels - 1.0);
            let (of_begin, of_stop) = (of(begin), of(stop));
            let centre = |level: f64| (level + 0.5) * step;
            let sum = cubes(begin - centre(of_begin), step / 2.0)
                + (of_stop - of_begin - 1.0) * cubes(-step / 2.0, step / 2.0)
                + cubes(-step / 2.0, stop - centre(of_stop));
            count / self.width * sum
        });
        errors.sum()
    }
}
