//! Texts that messages share.

/// At most `most` names with commas between them, and how many more there are; `nothing` for none.
pub fn listed(names: &[String], most: usize) -> String {
    if names.is_empty() {
        return "nothing".to_owned();
    }
    let shown = names[..names.len().min(most)].join(", ");
    match names.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The text, or its first `most` characters and three dots.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// Bytes in the binary unit that leaves 1 to 1023 before the point: for memory.
pub fn binary_size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_and_counted() {
        let names = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(listed(&names, 3), "a, b, c");
        assert_eq!(listed(&names, 2), "a, b and 1 more");
        assert_eq!(listed(&[], 2), "nothing");
    }

    #[test]
    fn texts_are_cut_at_characters() {
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöü", 2), "äö...");
    }

    #[test]
    fn sizes_take_the_unit_that_fits() {
        assert_eq!(binary_size(0), "0 B");
        assert_eq!(binary_size(1023), "1023 B");
        assert_eq!(binary_size(3 << 20), "3.00 MiB");
        assert_eq!(binary_size(16_909_328_384), "15.75 GiB");
        assert_eq!(binary_size(u64::MAX), "16777216.00 TiB");
    }
}
