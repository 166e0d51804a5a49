//! Lists of blocks, as paths name them.

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::Graph;

/// The paths of all lists with `shortest` entries whose numbers follow each other, longer ones after those that they begin
/// with.
pub(super) fn lists(graph: &Graph, shortest: usize) -> Vec<String> {
    let mut numbers: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for path in &graph.scopes {
        for (dot, _) in path.match_indices('.') {
            let list = &path[..dot];
            if let Some((number, _)) = entry(path, list) {
                numbers.entry(list).or_default().insert(number);
            }
        }
    }
    let is_long = |numbers: &BTreeSet<usize>| {
        let mut length = 0;
        let mut before = None;
        numbers.iter().any(|number| {
            let follows = number
                .checked_sub(1)
                .is_some_and(|last| before == Some(last));
            length = if follows { length + 1 } else { 1 };
            before = Some(*number);
            length >= shortest
        })
    };
    let mut lists: Vec<&str> = numbers
        .iter()
        .filter(|(_, numbers)| is_long(numbers))
        .map(|(list, _)| *list)
        .collect();
    lists.sort_by_key(|list| list.len());
    lists.into_iter().map(str::to_string).collect()
}

/// The entry of `list` that a path lies in, and what follows it.
pub(super) fn entry<'p>(path: &'p str, list: &str) -> Option<(usize, &'p str)> {
    let rest = path.strip_prefix(list)?.strip_prefix('.')?;
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    let number = rest[..end].parse().ok()?;
    let rest = &rest[end..];
    let is_whole = rest.is_empty() || rest.starts_with(['.', '/']);
    is_whole.then_some((number, rest))
}
