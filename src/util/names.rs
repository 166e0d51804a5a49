//! Names that are like one that is not known: what may have been meant.

/// How like one name is to another, 0 to 1: the share of letters that need no insertion, deletion, substitution or
/// exchange with their neighbour.
fn likeness(name: &str, candidate: &str) -> f64 {
    strsim::normalized_damerau_levenshtein(name, candidate)
}

/// The candidate most like `name`, if one is like enough to be meant.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // 0.6 takes in two slips in a short name and refuses unrelated ones.
    const LIKE: f64 = 0.6;
    // The distance costs the product of both lengths: nobody mistypes hundreds of letters.
    const LONGEST: usize = 200;
    if name.len() > LONGEST {
        return None;
    }
    candidates
        .into_iter()
        .filter(|candidate| candidate.len() <= LONGEST)
        .map(|candidate| (likeness(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= LIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_owned())
}

/// The `count` candidates most like `name`, however unlike, the most like first.
pub fn most_like(
    name: &str,
    candidates: impl IntoIterator<Item = String>,
    count: usize,
) -> Vec<String> {
    let mut ranked: Vec<(f64, String)> = candidates
        .into_iter()
        .map(|candidate| (likeness(name, &candidate), candidate))
        .collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names = ranked.into_iter().map(|(_, candidate)| candidate);
    names.take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_seen_through_and_strangers_refused() {
        let known = ["quantization", "portion", "gpu", ""];
        for (typed, meant) in [
            ("quantisation", Some("quantization")),
            ("portoin", Some("portion")),
            ("gup", Some("gpu")),
            ("resolution", None),
            ("", Some("")),
        ] {
            assert_eq!(nearest(typed, known).as_deref(), meant, "{typed}");
        }
        assert_eq!(nearest(&"x".repeat(201), ["x"]), None);
    }

    #[test]
    fn the_most_like_come_first() {
        let known = ["v5e-16", "v4-8", "v5e-1"].map(str::to_owned);
        assert_eq!(most_like("v5e-1", known.clone(), 2), ["v5e-1", "v5e-16"]);
        assert_eq!(most_like("", known, 9).len(), 3);
    }
}
