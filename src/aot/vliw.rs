//! A kernel's instructions by functional unit, as libtpu writes them of what it compiles.
//!
//! A core issues one bundle a cycle, which has slots for each unit. libtpu writes a line for each bundle of the code, with the slots
//! that it fills, after two lines with the units and how many slots each has:
//!
//! ```text
//! == CAPACITY:
//! MATMUL, XLU, VALU
//!     2     2    4
//! == UTILIZATION:
//! 0 1 4
//! ```

use crate::report::{VliwBundles, VliwUnit};

/// The flags that have libtpu write such a file for each operation into `folder`. Of each pass it would write another, 500 in all.
pub fn flags(folder: &str) -> String {
    format!(
        "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={PASS}"
    )
}

/// The pass that tells it of the code that runs.
const PASS: &str = "final_hlo-static-per-bundle-utilization";

/// What surrounds the operations is in files of such names.
const AROUND: [&str; 2] = ["-TLP-", "-<late-"];

/// Whether a file of this name tells it of an operation.
pub fn is_of_operation(name: &str) -> bool {
    name.contains(PASS) && !AROUND.iter().any(|around| name.contains(around))
}

/// The bundles in such a text; `None` if it is none.
pub fn parse(text: &str) -> Option<VliwBundles> {
    let mut lines = text.lines().filter(|line| !line.starts_with("=="));
    let names = lines.next()?.split(',').map(str::trim);
    let slots = numbers(lines.next()?)?;
    let mut units: Vec<VliwUnit> = names
        .zip(&slots)
        .map(|(name, slots)| VliwUnit {
            name: name.to_owned(),
            slots: *slots,
            filled: 0,
            full: 0,
        })
        .collect();
    let mut count = 0;
    for line in lines {
        let filled = numbers(line)?;
        if filled.len() != units.len() {
            return None;
        }
        for (unit, filled) in units.iter_mut().zip(filled) {
            unit.filled += filled;
            unit.full += u64::from(filled >= unit.slots);
        }
        count += 1;
    }
    (slots.len() == units.len() && count > 0).then_some(VliwBundles { count, units })
}

fn numbers(line: &str) -> Option<Vec<u64>> {
    let numbers = line.split_whitespace().map(|number| number.parse().ok());
    numbers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundles_are_counted_by_unit() {
        let text = "== CAPACTIY:\nMATMUL, VALU, VSTORE:SPILL\n    2     4     1\n\
                    == UTILIZATION:\n0 4 0\n1 3 0\n2 4 1\n";
        let unit = |name: &str, slots, filled, full| VliwUnit {
            name: name.to_owned(),
            slots,
            filled,
            full,
        };
        let units = vec![
            unit("MATMUL", 2, 3, 1),
            unit("VALU", 4, 11, 2),
            unit("VSTORE:SPILL", 1, 1, 1),
        ];
        assert_eq!(parse(text), Some(VliwBundles { count: 3, units }));
        for other in [
            "",
            "A, B\n1 2\n",
            "A, B\n1 2\n1\n",
            "A, B\n1\n1 1\n",
            "A\n1\nx\n",
        ] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }

    #[test]
    fn files_of_operations_are_known_by_name() {
        let of = |name: &str| is_of_operation(&format!("17-{name}-00-{PASS}.txt"));
        assert!(of("attention.2"));
        assert!(!of("TLP"));
        assert!(!of("<late-initialization>"));
        assert!(!is_of_operation("17-attention.2-hlo.txt"));
    }
}
