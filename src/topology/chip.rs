//! Properties of each chip: peak rates, memory, clock, and the formats its matrix units run.

use std::fmt;

use crate::backend::tpu::mosaic::{MOST_VMEM_BYTES, VMEM_BYTES};
use crate::backend::tpu::{BreakEven, Features};

use super::TopologyError;

/// A chip generation the project compiles for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Chip {
    V4,
    V5e,
    V5p,
    V6e,
    Tpu7x,
    H100,
    H200,
}

/// Operand format of a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    Bf16,
    Int8,
    Int4,
    Fp8,
}

/// How many bytes of HBM take as long as rounding an element of a training step to int8 outside of kernels. To read it twice and write
/// it once would be 5; but gradients get noise, and each derivative reads another axis' scales. In a step of SDXL's innermost level for a
/// v5e all products together took 10, and those that 5 had let stay in int8 more than 16. So no product that is slower stays in int8, and
/// some that are faster do not.
const ROUNDING_BYTES: f64 = 32.0;

/// Peak rates of one chip in 10^12 operations per second; `None`: its matrix units lack the
/// format and the compiler does not stand in for it.
struct Rates {
    bf16: f64,
    int8: Option<f64>,
    int4: Option<f64>,
    fp8: Option<f64>,
}

impl Chip {
    pub const ALL: [Chip; 7] = [
        Chip::V4,
        Chip::V5e,
        Chip::V5p,
        Chip::V6e,
        Chip::Tpu7x,
        Chip::H100,
        Chip::H200,
    ];

    /// The chip of a device, from the kind its PJRT description gives (`TPU v5 lite`).
    pub fn from_device_kind(kind: &str) -> Option<Self> {
        match kind {
            "TPU v4" => Some(Chip::V4),
            "TPU v5 lite" | "TPU v5e" => Some(Chip::V5e),
            "TPU v5" | "TPU v5p" => Some(Chip::V5p),
            "TPU v6 lite" | "TPU v6e" => Some(Chip::V6e),
            "TPU7x" => Some(Chip::Tpu7x),
            _ if kind.contains("H100") => Some(Chip::H100),
            _ if kind.contains("H200") => Some(Chip::H200),
            _ => None,
        }
    }

    /// Devices the program sees on one chip: the two cores of a tpu7x are separate devices,
    /// those of v4 and v5p act as one (megacore).
    pub fn devices_per_chip(self) -> usize {
        match self {
            Chip::Tpu7x => 2,
            Chip::V4 | Chip::V5e | Chip::V5p | Chip::V6e | Chip::H100 | Chip::H200 => 1,
        }
    }

    /// Cores that share the work of one device: the steps of a kernel's grid, too.
    pub fn cores_per_device(self) -> u64 {
        match self {
            Chip::V4 | Chip::V5p => 2,
            Chip::V5e | Chip::V6e | Chip::Tpu7x | Chip::H100 | Chip::H200 => 1,
        }
    }

    /// Sources: the Cloud TPU pages of each version (v4: 275 in bf16 or int8; v5e 197/394;
    /// v5p 459/918; v6e 918/1836; TPU7x 2307, 4614 in fp8, fp8 of v5p and v6e as fast as their
    /// bf16), the int4 rates of JAX's Pallas TPU hardware table, and NVIDIA's data sheets of
    /// the H100 SXM and the H200, dense: the same processor.
    fn rates(self) -> Rates {
        let rates = |bf16, int8, int4, fp8| Rates {
            bf16,
            int8,
            int4,
            fp8,
        };
        match self {
            Chip::V4 => rates(275.0, Some(275.0), None, None),
            // The compiler turns fp8 operands to bf16 (measured: 190 of 197 on a large dot).
            Chip::V5e => rates(197.0, Some(394.0), Some(788.0), Some(197.0)),
            Chip::V5p => rates(459.0, Some(918.0), Some(1836.0), Some(459.0)),
            Chip::V6e => rates(918.0, Some(1836.0), Some(3672.0), Some(918.0)),
            Chip::Tpu7x => rates(2307.0, None, None, Some(4614.0)),
            Chip::H100 | Chip::H200 => rates(989.4, Some(1978.9), None, Some(1978.9)),
        }
    }

    /// Peak of one chip in `format`, operations per second; `None` when it is not native.
    pub fn peak(self, format: Format) -> Option<f64> {
        let rates = self.rates();
        let tera = match format {
            Format::Bf16 => Some(rates.bf16),
            Format::Int8 => rates.int8,
            Format::Int4 => rates.int4,
            Format::Fp8 => rates.fp8,
        };
        tera.map(|t| t * 1e12)
    }

    /// Peak of one device in bfloat16, operations per second.
    pub fn device_peak(self) -> Option<f64> {
        Some(self.peak(Format::Bf16)? / self.devices_per_chip() as f64)
    }

    /// The rate of products of `format` operands over that of bf16's. 1 means that the format saves memory but no time,
    /// and the user should be told.
    ///
    /// # Errors
    /// [`TopologyError::NotNative`] where the chip has no units for it.
    pub fn speedup(self, format: Format) -> Result<f64, TopologyError> {
        match self.peak(format) {
            Some(peak) => Ok(peak / (self.rates().bf16 * 1e12)),
            None => Err(TopologyError::NotNative {
                chip: self,
                format,
                advice: self.advice(),
            }),
        }
    }

    /// Whether its matrix units take int8. A v4 converts it: it is no faster than bf16.
    pub fn multiplies_int8(self) -> bool {
        self.speedup(Format::Int8).is_ok_and(|times| times > 1.0)
    }

    /// What this program's TPU kernels need to know of it.
    pub fn features(self) -> Features {
        Features {
            int8: self.multiplies_int8(),
            one_core: self.cores_per_device() == 1,
            // By the cycles of its products in int8; a tpu7x has none.
            wide_units: self == Chip::V6e,
            // A tpu7x rounds nothing to int8.
            bf16_vectors: self == Chip::V6e,
            int8_break_even: self.int8_break_even(),
            int8_kernels_break_even: self.int8_kernels_break_even(),
            kernel_memory: match self {
                // Its compiler gives a kernel no more.
                Chip::V4 => VMEM_BYTES,
                _ => MOST_VMEM_BYTES,
            },
        }
    }

    /// As [`Features::int8_break_even`] has it: [`ROUNDING_BYTES`] an element at the bandwidth of HBM take as long as what int8
    /// saves of two operations for each.
    fn int8_break_even(self) -> Option<usize> {
        let [bf16, int8] = [self.peak(Format::Bf16)?, self.peak(Format::Int8)?];
        let saved = 2.0 / bf16 - 2.0 / int8;
        let rounding = ROUNDING_BYTES / self.hbm_bytes_per_second() as f64;
        (saved > 0.0).then(|| (rounding / saved) as usize)
    }

    /// As [`Features::int8_kernels_break_even`] has it, by `scripts/int8_break_even` with libtpu 0.0.51.
    fn int8_kernels_break_even(self) -> Option<BreakEven> {
        let [forward, dlhs, drhs] = match self {
            Chip::V5e | Chip::V5p => [640, 640, 700],
            Chip::V6e => [2560, 2560, 1000],
            Chip::V4 | Chip::Tpu7x | Chip::H100 | Chip::H200 => return None,
        };
        Some(BreakEven {
            forward,
            dlhs,
            drhs,
        })
    }

    fn advice(self) -> String {
        let fast: Vec<String> = [Format::Int8, Format::Fp8]
            .into_iter()
            .filter_map(|f| Some((f, self.peak(f)?)))
            .filter(|(_, peak)| *peak > self.rates().bf16 * 1e12)
            .map(|(f, peak)| format!("use quantization={f}, {:.0} TFLOP/s a chip", peak / 1e12))
            .collect();
        if fast.is_empty() {
            "no low-precision format is faster than bf16 there".to_owned()
        } else {
            fast.join(", or ")
        }
    }

    /// HBM of one chip in bytes, as the vendor states it (programs get a little less:
    /// [`Chip::device_memory_bytes`]).
    pub fn hbm_bytes(self) -> u64 {
        const GIB: u64 = 1 << 30;
        match self {
            Chip::V4 | Chip::V6e => 32 * GIB,
            Chip::V5e => 16 * GIB,
            Chip::V5p => 95 * GIB,
            Chip::Tpu7x => 192 * GIB,
            Chip::H100 => 80 * GIB,
            Chip::H200 => 141_000_000_000,
        }
    }

    /// Bytes a second between one chip and its HBM.
    ///
    /// Sources: the Cloud TPU pages of each version, and NVIDIA's data sheets of the SXM parts.
    pub fn hbm_bytes_per_second(self) -> u64 {
        match self {
            Chip::V4 => 1_228_000_000_000,
            Chip::V5e => 819_000_000_000,
            Chip::V5p => 2_765_000_000_000,
            Chip::V6e => 1_640_000_000_000,
            Chip::Tpu7x => 7_370_000_000_000,
            Chip::H100 => 3_352_320_000_000,
            Chip::H200 => 4_800_000_000_000,
        }
    }

    /// Core clock in Hz, which turns the compiler's `estimated_cycles` into time; `None` where
    /// no source is known.
    ///
    /// v5e, v5p and v6e: the rate at which the cycles libtpu predicts for a large dot come out
    /// just below the published peak. v4: Jouppi et al. 2023 (arXiv 2304.01433), table 4.
    pub fn clock_hz(self) -> Option<f64> {
        match self {
            Chip::V4 => Some(1.05e9),
            Chip::V5e => Some(1.5e9),
            Chip::V5p | Chip::V6e => Some(1.75e9),
            Chip::Tpu7x | Chip::H100 | Chip::H200 => None,
        }
    }

    /// A GPU as XLA's compiler asks for it (`GpuTargetConfigProto`, as text), when none is here; `None` for TPUs.
    ///
    /// Limits are those of compute capability 9.0 in NVIDIA's programming guide; multiprocessors, clock, bandwidth and
    /// memory are of the SXM parts' data sheets. Versions are the oldest that the plugin's wheel runs with.
    pub fn gpu_target_config(self) -> Option<String> {
        let (name, memory) = match self {
            Chip::H100 => ("NVIDIA H100 80GB HBM3", 84_929_347_584u64),
            Chip::H200 => ("NVIDIA H200", 141_000_000_000),
            Chip::V4 | Chip::V5e | Chip::V5p | Chip::V6e | Chip::Tpu7x => return None,
        };
        let bandwidth = self.hbm_bytes_per_second();
        Some(format!(
            "gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 \
             shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 \
             block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 \
             memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98 \
             device_memory_size: {memory} shared_memory_per_block_optin: 232448 \
             cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536 \
             registers_per_block_limit: 65536 }} platform_name: \"CUDA\" dnn_version_info {{ major: 9 minor: 8 }} \
             runtime_version {{ major: 13 }} device_description_str: \"{name}\""
        ))
    }

    /// HBM a program may use on one device, as libtpu 0.0.51 states it in a topology's
    /// `device_memory_bytes_limit`. That attribute, where the caller has it, is to be preferred.
    pub fn device_memory_bytes(self) -> Option<u64> {
        match self {
            Chip::V5e => Some(16_909_328_384),
            Chip::V5p => Some(102_786_658_304),
            Chip::V6e => Some(33_545_912_320),
            Chip::Tpu7x => Some(101_724_450_816),
            Chip::V4 | Chip::H100 | Chip::H200 => None,
        }
    }
}

impl fmt::Display for Chip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Chip::V4 => "TPU v4",
            Chip::V5e => "TPU v5e",
            Chip::V5p => "TPU v5p",
            Chip::V6e => "TPU v6e",
            Chip::Tpu7x => "TPU v7x",
            Chip::H100 => "H100",
            Chip::H200 => "H200",
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Bf16 => "bf16",
            Format::Int8 => "int8",
            Format::Int4 => "int4",
            Format::Fp8 => "fp8",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_on_v7x_is_an_error_that_names_fp8() {
        let error = Chip::Tpu7x.speedup(Format::Int8).unwrap_err().to_string();
        assert_eq!(
            error,
            "TPU v7x does not run int8 matrix products; use quantization=fp8, 4614 TFLOP/s a chip"
        );
    }

    #[test]
    fn speedups_tell_where_a_format_gains_nothing() {
        let speedup = |chip: Chip, format| chip.speedup(format).unwrap();
        assert_eq!(speedup(Chip::V5e, Format::Int8), 2.0);
        assert_eq!(speedup(Chip::V6e, Format::Fp8), 1.0);
        assert_eq!(speedup(Chip::Tpu7x, Format::Fp8), 2.0);
        assert_eq!(speedup(Chip::V4, Format::Int8), 1.0);
        let v4 = Chip::V4.speedup(Format::Fp8).unwrap_err().to_string();
        assert!(v4.contains("no low-precision format is faster"), "{v4}");
    }

    #[test]
    fn a_device_never_has_more_memory_than_its_share_of_the_chip() {
        for chip in Chip::ALL {
            if let Some(usable) = chip.device_memory_bytes() {
                let share = chip.hbm_bytes() / chip.devices_per_chip() as u64;
                // v5p is sold as 95 GB; libtpu gives out 95.7 GiB.
                assert!(usable <= share + (1 << 30), "{chip}: {usable} of {share}");
                assert!(usable > share * 9 / 10, "{chip}: {usable} of {share}");
            }
        }
    }

    #[test]
    fn clocks_explain_the_peaks() {
        // A 128x128 unit makes 2 * 128 * 128 operations a cycle: 8 units on v4, 4 on v5e and
        // 8 on v5p reproduce the published bf16 peaks within 1 %.
        for (chip, units) in [(Chip::V4, 8.0), (Chip::V5e, 4.0), (Chip::V5p, 8.0)] {
            let peak = units * 2.0 * 128.0 * 128.0 * chip.clock_hz().unwrap();
            let published = chip.peak(Format::Bf16).unwrap();
            assert!((peak / published - 1.0).abs() < 0.01, "{chip}: {peak}");
        }
    }
}
