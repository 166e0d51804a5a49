//! XLA's CPU backend, and the kernels of the CPU plugin.

mod claim;
pub mod kernel;
mod quantized;
mod rewrite;
mod training;
mod window;

pub use claim::claim;
pub use rewrite::rewrite;
pub use training::claim_training;

/// The instruction sets that the plugin's kernels need and this processor lacks, by the names that `/proc/cpuinfo` has.
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
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512_bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512_vnni", is_x86_feature_detected!("avx512vnni")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn needed_features() -> Vec<(&'static str, bool)> {
    vec![("avx512_bf16", false)]
}
