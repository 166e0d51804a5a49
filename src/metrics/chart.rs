//! Line charts as SVG, without scripts.

use std::fmt::Write;

/// The size of a chart in pixels, and what of it is beside the plot.
const SIZE: [f64; 2] = [640.0, 260.0];
const LEFT: f64 = 64.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 28.0;
/// About how many lines the grid has in each direction.
const TICKS: f64 = 5.0;
/// Most points of a line: more are averaged.
const MOST_POINTS: usize = 600;
/// Colours that people with colour blindness tell apart (Okabe and Ito 2008).
const COLOURS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
];

/// A line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub name: String,
    /// Steps, ascending, and finite values.
    pub points: Vec<[f64; 2]>,
    /// Whether it is drawn faintly, behind a smoothed one.
    pub is_faint: bool,
}

/// The moving average of `points` with decay `decay`, without a bias to its start (Kingma and Ba 2014, section 3).
pub fn smoothed(points: &[[f64; 2]], decay: f64) -> Vec<[f64; 2]> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let smooth = |[step, value]: &[f64; 2]| {
        sum = decay * sum + (1.0 - decay) * value;
        weight = decay * weight + (1.0 - decay);
        [*step, sum / weight]
    };
    points.iter().map(smooth).collect()
}

/// The chart of `lines` as an SVG element with a legend; nothing where no line has a point.
pub fn svg(lines: &[Line]) -> Option<String> {
    let points = || lines.iter().flat_map(|line| line.points.iter());
    let [x, y] = [0, 1].map(|which| range(points().map(|point| point[which])));
    let (x, y) = (x?, widened(y?));
    let place = |[step, value]: [f64; 2]| {
        let [width, height] = [SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM];
        let across = (step - x[0]) / (x[1] - x[0]).max(f64::MIN_POSITIVE);
        let up = (value - y[0]) / (y[1] - y[0]);
        [LEFT + across * width, SIZE[1] - BOTTOM - up * height]
    };
    let mut out = format!("<svg viewBox=\"0 0 {} {}\" role=\"img\">", SIZE[0], SIZE[1]);
    for value in ticks(y) {
        let [left, height] = place([x[0], value]);
        let label = short(value);
        let right = SIZE[0] - RIGHT;
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{left:.1} {height:.1}H{right:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{label}</text>",
            left - 6.0,
            height + 4.0
        );
    }
    for step in ticks(x) {
        let [across, _] = place([step, y[0]]);
        let _ = write!(
            out,
            "<text x=\"{across:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            SIZE[1] - 8.0,
            short(step)
        );
    }
    for (line, colour) in lines.iter().zip(colours(lines)) {
        let opacity = if line.is_faint { 0.25 } else { 1.0 };
        let points: Vec<String> = averaged(&line.points)
            .into_iter()
            .map(place)
            .map(|[x, y]| format!("{x:.1},{y:.1}"))
            .collect();
        // A single point has no length: its round ends show it.
        let points = match points.as_slice() {
            [one] => format!("{one} {one}"),
            several => several.join(" "),
        };
        let _ = write!(
            out,
            "<polyline points=\"{points}\" stroke=\"{colour}\" stroke-opacity=\"{opacity}\"/>"
        );
    }
    out.push_str("</svg>");
    let named = lines.iter().zip(colours(lines));
    let named: Vec<String> = named
        .filter(|(line, _)| !line.is_faint)
        .filter_map(|(line, colour)| {
            let [_, last] = line.points.last()?;
            let (name, last) = (escaped(&line.name), short(*last));
            Some(format!(
                "<span><i style=\"background:{colour}\"></i>{name}: {last}</span>"
            ))
        })
        .collect();
    let _ = write!(out, "<p class=\"legend\">{}</p>", named.join(" "));
    Some(out)
}

/// The colour of each line; a faint one has that of the line after it.
fn colours(lines: &[Line]) -> impl Iterator<Item = &'static str> {
    let mut which = 0;
    lines.iter().map(move |line| {
        let colour = COLOURS[which % COLOURS.len()];
        which += usize::from(!line.is_faint);
        colour
    })
}

/// Least and largest of `values`.
fn range(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    values.fold(None, |range, value| {
        let [least, largest] = range.unwrap_or([value, value]);
        Some([least.min(value), largest.max(value)])
    })
}

/// A range that is not empty.
fn widened([least, largest]: [f64; 2]) -> [f64; 2] {
    let margin = match largest - least {
        0.0 if least == 0.0 => 1.0,
        0.0 => least.abs() * 0.1,
        length => length * 0.05,
    };
    [least - margin, largest + margin]
}

/// Round numbers in a range: multiples of 1, 2 or 5 times a power of 10.
fn ticks([least, largest]: [f64; 2]) -> Vec<f64> {
    let rough = (largest - least) / TICKS;
    if rough <= 0.0 || !rough.is_finite() {
        return vec![least];
    }
    let power = 10f64.powf(rough.log10().floor());
    let mut steps = [1.0, 2.0, 5.0].map(|factor| factor * power).into_iter();
    let step = steps.find(|step| *step >= rough).unwrap_or(10.0 * power);
    let first = (least / step).ceil();
    let count = (largest / step).floor() - first;
    (0..=count.max(0.0) as usize)
        .map(|at| (first + at as f64) * step)
        .collect()
}

/// At most [`MOST_POINTS`] points, each the mean of as many neighbours.
fn averaged(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let each = points.len().div_ceil(MOST_POINTS).max(1);
    let mean = |points: &[[f64; 2]]| {
        let count = points.len() as f64;
        [0, 1].map(|which| points.iter().map(|point| point[which]).sum::<f64>() / count)
    };
    points.chunks(each).map(mean).collect()
}

/// A number with four digits.
fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e6).contains(&size) {
        let digits = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
        let text = format!("{value:.digits$}");
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text,
        }
    } else {
        format!("{value:.2e}")
    }
}

/// Text as HTML shows it.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[[f64; 2]]) -> Line {
        Line {
            name: "a<b".to_owned(),
            points: points.to_vec(),
            is_faint: false,
        }
    }

    #[test]
    fn a_line_goes_from_corner_to_corner_of_its_range() {
        let svg = svg(&[line(&[[0.0, 1.0], [10.0, 3.0]])]).unwrap();
        // 5 % of the range is below and above.
        let height = SIZE[1] - TOP - BOTTOM;
        let [low, high] = [1.0, 21.0].map(|part| SIZE[1] - BOTTOM - part / 22.0 * height);
        let right = SIZE[0] - RIGHT;
        let points = format!("points=\"{LEFT:.1},{low:.1} {right:.1},{high:.1}\"");
        assert!(svg.contains(&points), "{svg}");
        assert!(svg.contains("a&lt;b: 3</span>"), "{svg}");
        for value in ["1", "1.5", "2", "2.5", "3"] {
            assert!(svg.contains(&format!("\"end\">{value}</text>")), "{svg}");
        }
    }

    #[test]
    fn single_points_equal_values_and_none_are_drawn() {
        assert_eq!(svg(&[]), None);
        assert_eq!(svg(&[line(&[])]), None);
        for points in [&[[3.0, 0.0]][..], &[[3.0, 7.0], [4.0, 7.0]]] {
            let svg = svg(&[line(points)]).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn long_lines_keep_their_mean() {
        let points: Vec<[f64; 2]> = (0..5000).map(|at| [f64::from(at), 2.0]).collect();
        let fewer = averaged(&points);
        assert!(fewer.len() <= MOST_POINTS && fewer.len() > MOST_POINTS / 2);
        assert!(fewer.iter().all(|point| point[1] == 2.0));
        assert_eq!(smoothed(&points[..3], 0.9), points[..3]);
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (1234.5678, "1235"),
            (0.012344, "0.01234"),
            (-2.0, "-2"),
            (1e-5, "1.00e-5"),
            (20000.0, "20000"),
            (100.0, "100"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
