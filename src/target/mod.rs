//! What a kind of hardware wants a program to look like: a rewrite of the lowered graph before emission.
//!
//! The models say what is computed; here, in one place, stands how a target's compiler wants it written. Every rule
//! keeps values equal (to rounding for floats, exactly for integers), the operations' scopes, and the element types of
//! contractions. `docs/performance.md` gives the measurement behind each rule.

mod cpu;
mod kernels;
mod pattern;

pub use cpu::for_cpu;
pub use kernels::with_kernels;
