//! The loops of a kernel, of which few trips are simulated in place of all.

use std::sync::LazyLock;

use regex::Regex;

use crate::shape::gcd;

/// Trips of loops that are simulated. Where there are no more than both together, all are.
const FEW_TRIPS: [usize; 2] = [2, 3];

/// How many trips of loops are simulated: `simulated` of `common`, which each of the loops has or has a multiple of.
#[derive(Clone, Debug, PartialEq)]
pub struct Trips {
    pub simulated: usize,
    pub common: usize,
    /// The loops.
    of: Vec<String>,
}

impl Trips {
    /// Few trips of a kernel's loops, and then more. Of a kernel that multiplies these are of loops that do: products outside of loops
    /// take longer to compile, once more for each number of trips, than all trips of other loops to simulate. `None` where there are no
    /// such loops, or no more trips than would be simulated.
    pub fn few(text: &str) -> Option<[Trips; 2]> {
        let multiplies = text.contains(MULTIPLIES);
        let loops = loops(text).into_iter();
        let loops: Vec<Loop> = loops.filter(|of| of.multiplies == multiplies).collect();
        let common = loops.iter().map(|of| of.trips).reduce(gcd)?;
        (common > FEW_TRIPS.iter().sum()).then(|| {
            FEW_TRIPS.map(|simulated| Trips {
                simulated,
                common,
                of: loops.iter().map(|of| of.name.clone()).collect(),
            })
        })
    }

    /// The text with so many trips of these loops.
    pub fn put_into(&self, text: &str) -> String {
        let fewer = |found: &regex::Captures<'_>| {
            let (name, all) = (&found[1], found[2].parse().unwrap_or(self.common));
            let trips = match self.of.iter().any(|of| of == name) {
                true => all / self.common * self.simulated,
                false => all,
            };
            format!("{name}_u = arith.constant {trips} : i32")
        };
        let place = TRIPS.as_ref();
        place.map_or_else(
            || text.to_owned(),
            |place| place.replace_all(text, fewer).into_owned(),
        )
    }
}

/// A loop that is in no other.
#[derive(Debug)]
struct Loop {
    name: String,
    trips: usize,
    multiplies: bool,
}

/// What multiplies in a kernel's text.
const MULTIPLIES: &str = "tpu.matmul";

static TRIPS: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(%\w+)_u = arith\.constant ([0-9]+) : i32").ok());

/// The loops of a kernel's text, without those inside of others.
fn loops(text: &str) -> Vec<Loop> {
    let mut loops: Vec<Loop> = Vec::new();
    // The braces that are open, and those that were at the loop that is.
    let (mut open, mut at_loop) = (0i64, None);
    for line in text.lines() {
        let trips = TRIPS.as_ref().and_then(|trips| trips.captures(line));
        let trips = trips.and_then(|found| Some((found[1].to_owned(), found[2].parse().ok()?)));
        match (trips, at_loop, loops.last_mut()) {
            (Some((name, trips)), None, _) => loops.push(Loop {
                name,
                trips,
                multiplies: false,
            }),
            (_, Some(_), Some(last)) => last.multiplies |= line.contains(MULTIPLIES),
            _ => {}
        }
        if line.contains("scf.for") && at_loop.is_none() {
            at_loop = Some(open);
        }
        open += line.matches('{').count() as i64 - line.matches('}').count() as i64;
        at_loop = at_loop.filter(|before| open > *before);
    }
    loops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trips_of_loops_that_multiply_are_shortened_alike() {
        let looped = |trips: u64, body: &str| {
            format!(
                "%v{trips}_u = arith.constant {trips} : i32\nscf.for %v{trips} = %l to %v{trips}_u {{\n{body}scf.yield\n}}\n"
            )
        };
        let of = |text: &str| {
            let [few, more] = Trips::few(text)?;
            assert_eq!([few.simulated, more.simulated], FEW_TRIPS);
            assert_eq!((more.common, &more.of), (few.common, &few.of));
            Some((few.common, few.of))
        };
        let branch = "scf.if %c {\n} else {\n}\n";
        let product = "%p = tpu.matmul %a, %b\n";
        let loops = |body: &str| [24, 16].map(|trips| looped(trips, body)).concat();
        let both = vec!["%v24".to_owned(), "%v16".to_owned()];
        assert_eq!(of(&loops(branch)), Some((8, both.clone())));
        assert_eq!(of(&loops(product)), Some((8, both)));
        // Loops inside of others have all their trips.
        assert_eq!(
            of(&looped(8, &loops(product))),
            Some((8, vec!["%v8".to_owned()]))
        );
        // Loops beside products have all too, whether those are in loops of their own or in none.
        let beside = looped(24, branch) + &looped(16, product);
        assert_eq!(of(&beside), Some((16, vec!["%v16".to_owned()])));
        assert_eq!(of(&(loops(branch) + product)), None);
        assert_eq!(of(product), None);
        // So few that all are simulated.
        assert_eq!(of(&looped(5, product)), None);

        let [_, more] = Trips::few(&beside).unwrap();
        assert_eq!(
            more.put_into(&beside),
            beside.replace("constant 16", "constant 3")
        );
    }
}
