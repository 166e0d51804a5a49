//! The steps of a kernel's grid, of which some are simulated in place of all.

use std::sync::LazyLock;

use regex::Regex;

/// Of a grid, no more steps of the outer dimensions are simulated than take about this many cycles at the chip's peak
/// rates, but at least one, and once more another.
pub const MOST_CYCLES: f64 = 10_000.0;

static BOUNDS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"iteration_bounds = array<i64: ([0-9, ]+)>").ok());

/// The steps of a kernel: those of the grid's outer dimensions, and of the last one, whose steps share work.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    outer: Vec<u64>,
    last: u64,
}

impl Grid {
    /// The grid of a kernel's text.
    pub fn of(text: &str) -> Option<Grid> {
        let found = BOUNDS.as_ref()?.captures(text)?;
        let bounds = found[1].split(',').map(|bound| bound.trim().parse().ok());
        let bounds: Vec<u64> = bounds.collect::<Option<_>>()?;
        let (last, outer) = bounds.split_last()?;
        Some(Grid {
            outer: outer.to_vec(),
            last: *last,
        })
    }

    /// The text with this grid in place of its own.
    pub fn put_into(&self, text: &str) -> String {
        let bounds = self.outer.iter().chain([&self.last]);
        let bounds: Vec<String> = bounds.map(ToString::to_string).collect();
        let bounds = format!("iteration_bounds = array<i64: {}>", bounds.join(", "));
        let place = BOUNDS.as_ref();
        let text_of = |place: &Regex| place.replacen(text, 1, bounds.as_str()).into_owned();
        place.map_or_else(|| text.to_owned(), text_of)
    }

    pub fn steps(&self) -> u64 {
        self.outer_steps() * self.last
    }

    fn outer_steps(&self) -> u64 {
        self.outer.iter().product()
    }

    /// The parts that are simulated in place of the whole, which takes `cycles` at least and is `work` times what may be simulated
    /// of the last dimension: a small one that keeps all `cores` busy and one that has more steps, if there is room, from which
    /// [`Grid::extrapolated`] tells what a step takes. `None` where that is the whole.
    pub fn parts(&self, cycles: f64, work: f64, cores: u64) -> Option<Vec<Grid>> {
        if cycles <= MOST_CYCLES {
            return None;
        }
        let with = |steps: f64, last: u64| {
            // From the outermost dimension inwards.
            let mut left = self.outer_steps() as f64 / steps;
            let outer = self.outer.iter().map(|bound| {
                let kept = (*bound as f64 / left) as u64;
                let kept = kept.clamp(1, *bound);
                left /= *bound as f64 / kept as f64;
                kept
            });
            Grid {
                outer: outer.collect(),
                last,
            }
        };
        let outer_cycles = cycles / self.outer_steps() as f64;
        let (outer, last) = match self.outer_steps() >= cores {
            true => (cores as f64, 1),
            false => (1.0, cores),
        };
        let parts = if work <= self.outer_steps() as f64 {
            let mut steps = (MOST_CYCLES / outer_cycles).max(outer);
            let part = with(steps, self.last);
            let mut more = part.clone();
            while more == part && more != *self {
                steps *= 2.0;
                more = with(steps, self.last);
            }
            vec![part, more]
        } else {
            let more = match 2 * last <= self.last {
                true => with(outer, 2 * last),
                false => with(2.0 * outer, last),
            };
            vec![with(outer, last), more]
        };
        let fits = |part: &Grid| part.last <= self.last && part.outer_steps() <= self.outer_steps();
        let mut fitting: Vec<Grid> = Vec::new();
        for part in parts.into_iter().filter(fits) {
            if !fitting.contains(&part) {
                fitting.push(part);
            }
        }
        (!fitting.is_empty() && !fitting.contains(self)).then_some(fitting)
    }

    /// What the whole takes if `parts` take `times`: as much more for each step of one of `cores` as the second part's take than
    /// the first's.
    pub fn extrapolated(&self, parts: &[Grid], times: &[f64], cores: u64) -> f64 {
        let steps = |grid: &Grid| grid.steps().div_ceil(cores) as f64;
        match (parts, times) {
            ([part, more], [time, more_time]) => {
                let step = (more_time - time) / (steps(more) - steps(part));
                time + (steps(self) - steps(part)) * step
            }
            ([part], [time]) => time / steps(part) * steps(self),
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cycles of the last dimension's steps that may be simulated.
    const MOST_OF_LAST: f64 = 75_000.0;

    fn grid(outer: &[u64], last: u64) -> Grid {
        Grid {
            outer: outer.to_vec(),
            last,
        }
    }

    #[test]
    fn grids_are_read_and_replaced() {
        let text = |bounds| format!("iteration_bounds = array<i64: {bounds}>, dimension_semantics");
        assert_eq!(Grid::of(&text("2, 5, 8")), Some(grid(&[2, 5], 8)));
        assert_eq!(Grid::of(&text("64")), Some(grid(&[], 64)));
        assert_eq!(Grid::of("module {}"), None);
        assert_eq!(grid(&[1, 3], 2).put_into(&text("2, 5, 8")), text("1, 3, 2"));
    }

    #[test]
    fn a_grid_is_shortened_from_outside() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, cycles / MOST_OF_LAST, 1);
        // Small enough.
        assert_eq!(parts(&grid(&[2, 5], 8), 10_000.0), None);
        // One of ten is more than is simulated at least.
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 1], 8), grid(&[1, 2], 8)]);
        let found = parts(&grid(&[8], 5), 40_000.0).unwrap();
        assert_eq!(found, [grid(&[2], 5), grid(&[4], 5)]);
        // Steps of the last dimension alone are more than that.
        let found = parts(&grid(&[2, 1], 5), 250_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 1], 1), grid(&[1, 1], 2)]);
        let found = parts(&grid(&[3], 1), 400_000.0).unwrap();
        assert_eq!(found, [grid(&[1], 1), grid(&[2], 1)]);
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 1), grid(&[], 2)]);
        // On a faster chip as much work takes fewer cycles, and as long to simulate.
        let found = grid(&[5], 8).parts(205_000.0, 10.7, 1).unwrap();
        assert_eq!(found, [grid(&[1], 1), grid(&[1], 2)]);
        // No part is smaller than the whole.
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
        assert_eq!(parts(&grid(&[2], 1), 1e6), None);
    }

    #[test]
    fn parts_keep_two_cores_busy() {
        let parts = |whole: &Grid, cycles| whole.parts(cycles, cycles / MOST_OF_LAST, 2);
        let found = parts(&grid(&[2, 5], 8), 240_000.0).unwrap();
        assert_eq!(found, [grid(&[1, 2], 8), grid(&[1, 4], 8)]);
        // Steps of the last dimension are shared where there are no others.
        let found = parts(&grid(&[], 64), 1e6).unwrap();
        assert_eq!(found, [grid(&[], 2), grid(&[], 4)]);
        assert_eq!(parts(&grid(&[1], 1), 1e6), None);
    }

    #[test]
    fn the_whole_is_extrapolated_from_its_parts() {
        let time = |grid: &Grid, cores, outer_step: f64| {
            let steps = grid.steps().div_ceil(cores) as f64;
            700.0 + steps / grid.last as f64 * outer_step + steps * 11.0
        };
        let wholes = [
            grid(&[2, 5], 8),
            grid(&[8], 5),
            grid(&[1, 16], 5),
            grid(&[3, 3], 4),
        ];
        for (whole, cores) in wholes.iter().flat_map(|whole| [(whole, 1), (whole, 2)]) {
            for cycles in [4e4, 2e5, 1e6] {
                let Some(parts) = whole.parts(cycles, cycles / MOST_OF_LAST, cores) else {
                    continue;
                };
                // Parts with as many outer steps do not tell what these take of their own.
                let tells = parts[1].outer_steps() > parts[0].outer_steps();
                let outer_step = if tells { 90.0 } else { 0.0 };
                let times = parts.iter().map(|part| time(part, cores, outer_step));
                let times: Vec<f64> = times.collect();
                let found = whole.extrapolated(&parts, &times, cores);
                let expected = time(whole, cores, outer_step);
                assert!((found - expected).abs() < 1e-6, "{whole:?}: {found}");
            }
        }
    }
}
