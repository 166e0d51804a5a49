//! XLA's CPU backend, and the kernels of the CPU plugin.

mod attention;
mod claim;
mod gradient;
pub mod kernel;
mod operands;
mod optimizer;
mod pack;
mod phases;
mod product;
mod quantized;
mod rewrite;
mod training;
mod window;

pub use claim::claim;
pub use rewrite::rewrite;
pub use training::{claim_training, claims_in_training};

/// What the plugin's kernels need (`plugin/isa.cc`) and this processor lacks, by the names that `/proc/cpuinfo` has.
pub fn missing_features() -> Vec<&'static str> {
    let needed = needed_features();
    needed
        .into_iter()
        .filter(|(_, found)| !found)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(target_arch = "x86_64")]
fn needed_features() -> Vec<(&'static str, bool)> {
    vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn needed_features() -> Vec<(&'static str, bool)> {
    vec![("avx2", false)]
}
