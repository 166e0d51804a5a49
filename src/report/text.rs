//! The report as text.

use std::fmt::{self, Display, Formatter};

use super::{ByPurpose, CompileReport, Link, Purpose};
use crate::util::text::binary_size;

/// Collectives listed in full; the rest is counted.
const LISTED: usize = 20;

impl Display for CompileReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        line(f, "parameters", &thousands(self.parameters))?;
        line(f, "compile time", &format!("{:.1} s", self.compile_seconds))?;
        self.fmt_memory(f)?;
        self.fmt_flops(f)?;
        self.fmt_predicted(f)?;
        self.fmt_unknown_loops(f)?;
        self.fmt_traffic(f)?;
        self.fmt_collectives(f)
    }
}

impl CompileReport {
    fn fmt_memory(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        writeln!(f, "memory of one device")?;
        let share = |bytes: u64| match memory.hbm_limit {
            Some(limit) if limit > 0 => format!("{:5.1} %", percent(bytes, limit)),
            _ => String::new(),
        };
        let rows = [
            ("arguments", Some(memory.argument)),
            ("outputs", Some(memory.output)),
            ("temporaries", Some(memory.temp)),
            ("code", Some(memory.code)),
            ("peak", memory.peak),
            ("limit", memory.hbm_limit),
        ];
        for (name, bytes) in rows {
            if let Some(bytes) = bytes {
                item(f, name, &binary_size(bytes), &share(bytes))?;
            }
        }
        Ok(())
    }

    fn fmt_flops(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let all: u64 = self.flops.values().sum();
        writeln!(f, "operations of dots and convolutions on one device")?;
        for (element, &flops) in &self.flops {
            let share = format!("{:5.1} %", percent(flops, all));
            item(f, element, &operations(flops), &share)?;
        }
        item(f, "total", &operations(all), "")
    }

    fn fmt_predicted(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(predicted) = &self.predicted_ms else {
            return line(f, "predicted time", "not known for this target");
        };
        writeln!(f, "predicted time, without waiting for collectives")?;
        let mut kinds: Vec<(&String, &f64)> = predicted.by_kind.iter().collect();
        kinds.sort_by(|a, b| b.1.total_cmp(a.1));
        for (kind, &ms) in kinds {
            let share = format!("{:5.1} %", ms / predicted.total * 100.0);
            item(f, kind, &format!("{ms:.3} ms"), &share)?;
        }
        item(f, "total", &format!("{:.3} ms", predicted.total), "")?;
        for kernel in &predicted.kernels {
            writeln!(
                f,
                "  kernel {:<17}{:>10.3} ms in {:>4}  ({}) -> {}",
                kernel.name,
                kernel.ms,
                kernel.count,
                kernel.operands.join(", "),
                kernel.result
            )?;
        }
        if !predicted.unpredicted.is_empty() {
            let flops = predicted.unpredicted.iter().map(|u| u.flops).sum();
            writeln!(
                f,
                "  not predicted: {} operations with {}",
                predicted.unpredicted.len(),
                operations(flops)
            )?;
        }
        Ok(())
    }

    /// Operations and bytes of these loops are too few as well, so they are reported with or without a prediction.
    fn fmt_unknown_loops(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for unknown in &self.unknown_trip_counts {
            let name = match unknown.op_name.as_str() {
                "" => &unknown.instruction,
                op_name => op_name,
            };
            writeln!(f, "counted once, iterations unknown: {name}")?;
        }
        Ok(())
    }

    fn fmt_traffic(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "bytes one device hands to collectives")?;
        writeln!(
            f,
            "  {:<16}{:>14}{:>14}",
            "", "inside a slice", "across slices"
        )?;
        for purpose in Purpose::ALL {
            let get = |bytes: &ByPurpose| binary_size(bytes.of(purpose));
            writeln!(
                f,
                "  {:<16}{:>14}{:>14}",
                purpose.name().replace('_', " "),
                get(&self.ici_bytes),
                get(&self.dcn_bytes)
            )?;
        }
        writeln!(
            f,
            "  {:<16}{:>14}{:>14}",
            "total",
            binary_size(self.ici_bytes.total()),
            binary_size(self.dcn_bytes.total())
        )
    }

    fn fmt_collectives(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.collectives.is_empty() {
            return line(f, "collectives", "none");
        }
        let mut list: Vec<_> = self.collectives.iter().collect();
        // Across slices first, then by size: the expensive ones on top.
        list.sort_by_key(|c| (std::cmp::Reverse(c.link), std::cmp::Reverse(c.bytes)));
        writeln!(f, "collectives ({})", list.len())?;
        for c in list.iter().take(LISTED) {
            let link = match c.link {
                Link::Ici => "ICI",
                Link::Dcn => "DCN",
            };
            let name = if c.op_name.is_empty() {
                &c.instruction
            } else {
                &c.op_name
            };
            writeln!(
                f,
                "  {link} {:<19}{:>12} in {:>4}  {:<14}{name}",
                c.kind,
                binary_size(c.bytes),
                c.count,
                c.purpose.name().replace('_', " "),
            )?;
        }
        if list.len() > LISTED {
            writeln!(f, "  and {} more (--json lists all)", list.len() - LISTED)?;
        }
        Ok(())
    }
}

fn line(f: &mut Formatter<'_>, name: &str, value: &str) -> fmt::Result {
    writeln!(f, "{name:<18}{value:>14}")
}

fn item(f: &mut Formatter<'_>, name: &str, value: &str, share: &str) -> fmt::Result {
    writeln!(
        f,
        "{}",
        format!("  {name:<16}{value:>14}  {share}").trim_end()
    )
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64 * 100.0
    }
}

/// `3.618 TFLOP`.
pub fn operations(flops: u64) -> String {
    const UNITS: [(&str, f64); 3] = [("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)];
    let value = flops as f64;
    match UNITS.iter().find(|(_, scale)| value >= *scale) {
        Some((unit, scale)) => format!("{:.3} {unit}", value / scale),
        None => format!("{flops} FLOP"),
    }
}

/// `2,567,463,684`.
fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(thousands(2_567_463_684), "2,567,463,684");
        assert_eq!(thousands(12), "12");
        assert_eq!(operations(6_990_000_000_000), "6.990 TFLOP");
        assert_eq!(operations(42), "42 FLOP");
    }
}
