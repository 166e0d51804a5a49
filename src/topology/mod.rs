//! Accelerator names (`v5e-256`, `v5p-128`, `tpu7x-64`, `a3`, `h200`) and what stands behind them.
//!
//! [`Accelerator::lookup`] turns the name a user writes in `compile_topology` into the description
//! a PJRT plugin builds its topology from. The names and their shapes are those of MaxText's
//! `accelerator_to_spec_map.py`; libtpu itself knows only `v5e:4x4`, never `v5e-16`.

mod chip;
mod names;

pub use chip::{Chip, Format};

use thiserror::Error;

use crate::backend::Backend;
use crate::pjrt::NamedValue;
use crate::pjrt::install::PluginKind;

/// Why a topology or a chip feature is refused.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum TopologyError {
    /// The name is in no family. The first sentence is MaxText's.
    #[error(
        "Invalid compile topology: {name}. Nearest valid topology names: {}. Families: {families}",
        nearest.join(", ")
    )]
    UnknownName {
        name: String,
        nearest: Vec<String>,
        families: String,
    },
    #[error(
        "compile_topology_num_slices={found} with compile_topology={name}: the number of slices must be 1 to {most}"
    )]
    NumSlices { name: String, found: i64, most: i64 },
    #[error("{chip} does not run {format} matrix products; {advice}")]
    NotNative {
        chip: Chip,
        format: Format,
        advice: String,
    },
}

/// The compiler of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Platform {
    Tpu,
    Gpu,
}

impl Platform {
    /// The plugin that compiles for it.
    pub fn plugin(self) -> PluginKind {
        match self {
            Platform::Tpu => PluginKind::Tpu,
            Platform::Gpu => PluginKind::Cuda,
        }
    }
}

/// One row of the accelerator table: a slice of a pod, or one GPU host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accelerator {
    /// The name users write, `v5e-16`.
    pub name: String,
    pub chip: Chip,
    pub platform: Platform,
    /// Chips in each dimension of the slice; empty for GPU hosts.
    pub dims: Vec<u32>,
    /// The TPU compiler's own name, `v5e:4x4`; `None` for GPU hosts.
    pub topology_name: Option<String>,
    /// `default` or `megacore` (both cores of a chip act as one device).
    pub chip_config_name: Option<&'static str>,
    /// Chips on one host in each dimension.
    pub chips_per_host_bounds: Option<[i64; 3]>,
    /// Devices the program sees in one slice (or one GPU host).
    pub devices_per_slice: usize,
    /// Which dimensions close to a ring.
    pub wrap: Option<[bool; 3]>,
}

impl Accelerator {
    /// The row for a user's accelerator name.
    ///
    /// # Errors
    /// [`TopologyError::UnknownName`] with the nearest valid names and all families.
    pub fn lookup(name: &str) -> Result<Self, TopologyError> {
        names::find(name).ok_or_else(|| TopologyError::UnknownName {
            name: name.to_owned(),
            nearest: names::nearest(name),
            families: names::families(),
        })
    }

    /// The smallest slice of TPUs of a kind; `None` for GPUs.
    pub fn smallest(chip: Chip) -> Option<Self> {
        names::smallest(chip)
    }

    /// Every valid accelerator name, by family and size.
    pub fn names() -> Vec<String> {
        names::all().collect()
    }

    /// The backend that programs for it are lowered for.
    pub fn backend(&self) -> Backend {
        match self.platform {
            Platform::Tpu => Backend::Tpu {
                kernels: true,
                features: self.chip.features(),
            },
            Platform::Gpu => Backend::Gpu {
                features: None,
                kernels: true,
            },
        }
    }

    /// The topology name PJRT is asked for: empty for GPUs, whose shape is an option.
    pub fn pjrt_topology_name(&self) -> &str {
        self.topology_name.as_deref().unwrap_or("")
    }

    /// Refuses a number of slices that no program can be made for.
    ///
    /// # Errors
    /// [`TopologyError::NumSlices`] below 1, and where the devices would be more than a million.
    pub fn check_slices(&self, num_slices: i64) -> Result<(), TopologyError> {
        let most = (1 << 20)
            / i64::try_from(self.devices_per_slice)
                .unwrap_or(i64::MAX)
                .max(1);
        match (1..=most).contains(&num_slices) {
            true => Ok(()),
            false => Err(TopologyError::NumSlices {
                name: self.name.clone(),
                found: num_slices,
                most,
            }),
        }
    }

    /// Options for `PJRT_TopologyDescription_Create`, for `num_slices` such slices.
    ///
    /// For GPUs the slice is one host and the plugin takes its shape as
    /// `slices x hosts per slice x devices per host`.
    ///
    /// # Errors
    /// As [`Accelerator::check_slices`].
    pub fn create_options(
        &self,
        num_slices: i64,
    ) -> Result<Vec<(String, NamedValue)>, TopologyError> {
        self.check_slices(num_slices)?;
        let mut options = Vec::new();
        let mut add = |key: &str, value| options.push((key.to_owned(), value));
        match self.platform {
            Platform::Tpu => {
                if let Some(config) = self.chip_config_name {
                    add("chip_config_name", NamedValue::String(config.to_owned()));
                }
                if let Some(bounds) = self.chips_per_host_bounds {
                    add(
                        "chips_per_host_bounds",
                        NamedValue::Int64List(bounds.to_vec()),
                    );
                }
                add("num_slices", NamedValue::Int64(num_slices));
                if let Some(wrap) = self.wrap {
                    let wrap = wrap.iter().map(|&w| i64::from(w)).collect();
                    add("wrap", NamedValue::Int64List(wrap));
                }
            }
            Platform::Gpu => {
                let shape = format!("{num_slices}x1x{}", self.devices_per_slice);
                add("topology", NamedValue::String(shape));
                if let Some(config) = self.chip.gpu_target_config() {
                    add("target_config", NamedValue::String(config));
                }
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str) -> Accelerator {
        Accelerator::lookup(name).unwrap()
    }

    #[test]
    fn the_table_has_maxtexts_224_rows_and_two_more() {
        let names = Accelerator::names();
        let count = |family: &str| names.iter().filter(|n| n.starts_with(family)).count();
        // MaxText's, and one H100 and one H200.
        assert_eq!(names.len(), 224 + 2);
        assert_eq!(
            ["v5e-", "v6e-", "v4-", "v5p-", "tpu7x-", "a3"].map(count),
            [8, 8, 12, 96, 99, 1]
        );
        let unique: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn every_row_is_consistent() {
        for name in Accelerator::names() {
            let a = row(&name);
            assert_eq!(a.name, name);
            let chips: u32 = a.dims.iter().product();
            let suffix: usize = match name.split_once('-') {
                Some((_, suffix)) => suffix.parse().unwrap(),
                None => continue,
            };
            // v4 and v5p are named by cores, two of which make one megacore device;
            // the other families are named by devices.
            let (devices, devices_per_chip) = match a.chip {
                Chip::V4 | Chip::V5p => (suffix / 2, 1),
                Chip::V5e | Chip::V6e => (suffix, 1),
                Chip::Tpu7x => (suffix, 2),
                Chip::H100 | Chip::H200 => unreachable!("GPUs have no suffix"),
            };
            assert_eq!(a.devices_per_slice, devices, "{name}");
            assert_eq!(chips as usize * devices_per_chip, devices, "{name}");
            let bounds = a.chips_per_host_bounds.unwrap();
            for (d, bound) in a.dims.iter().zip(bounds) {
                assert_eq!(
                    i64::from(*d) % bound,
                    0,
                    "{name}: host bounds do not divide"
                );
            }
        }
    }

    #[test]
    fn rows_match_maxtexts() {
        #[rustfmt::skip]
        let expected = [
            ("v5e-1", "v5e:1x1", "default", [1, 1, 1], 1, [false; 3]),
            ("v5e-16", "v5e:4x4", "default", [2, 2, 1], 16, [false; 3]),
            ("v5e-128", "v5e:8x16", "default", [2, 2, 1], 128, [false, true, false]),
            ("v6e-256", "v6e:16x16", "default", [2, 2, 1], 256, [true, true, false]),
            ("v4-8", "v4:2x2x1", "megacore", [2, 2, 1], 4, [false; 3]),
            ("v4-4096", "v4:8x16x16", "megacore", [2, 2, 1], 2048, [true; 3]),
            ("v5p-64", "v5:2x4x4", "megacore", [2, 2, 1], 32, [false; 3]),
            ("v5p-128", "v5:4x4x4", "megacore", [2, 2, 1], 64, [true; 3]),
            ("v5p-17920", "v5:16x20x28", "megacore", [2, 2, 1], 8960, [true; 3]),
            ("tpu7x-2", "tpu7x:1x1x1", "default", [1, 1, 1], 2, [false; 3]),
            ("tpu7x-8", "tpu7x:2x2x1", "default", [2, 2, 1], 8, [false; 3]),
            ("tpu7x-18432", "tpu7x:16x24x24", "default", [2, 2, 1], 18432, [true; 3]),
        ];
        for (name, topology, config, bounds, devices, wrap) in expected {
            let a = row(name);
            assert_eq!(a.topology_name.as_deref(), Some(topology));
            assert_eq!(a.chip_config_name, Some(config), "{name}");
            assert_eq!(a.chips_per_host_bounds, Some(bounds), "{name}");
            assert_eq!(a.devices_per_slice, devices, "{name}");
            assert_eq!(a.wrap, Some(wrap), "{name}");
        }
    }

    #[test]
    fn create_options_of_a_tpu_slice() {
        let list = |v: &[i64]| NamedValue::Int64List(v.to_vec());
        assert_eq!(
            row("v5e-16").create_options(2).unwrap(),
            [
                ("chip_config_name", NamedValue::String("default".into())),
                ("chips_per_host_bounds", list(&[2, 2, 1])),
                ("num_slices", NamedValue::Int64(2)),
                ("wrap", list(&[0, 0, 0])),
            ]
            .map(|(k, v)| (k.to_owned(), v))
        );
    }

    #[test]
    fn slices_are_between_one_and_what_makes_a_million_devices() {
        let slice = row("v5e-256");
        for fits in [1, 4096] {
            slice.check_slices(fits).unwrap();
        }
        for refused in [i64::MIN, 0, 4097, 100_000_000_000_000_000] {
            assert_eq!(
                slice.check_slices(refused).unwrap_err().to_string(),
                format!(
                    "compile_topology_num_slices={refused} with compile_topology=v5e-256: the number of slices must be 1 to 4096"
                )
            );
        }
    }

    #[test]
    fn create_options_of_gpu_hosts_give_the_shape_and_the_processor() {
        let cases = [
            ("a3", 8, "4x1x8", "NVIDIA H100"),
            ("h100", 1, "4x1x1", "NVIDIA H100"),
            ("h200", 1, "4x1x1", "NVIDIA H200"),
        ];
        for (name, gpus, shape, processor) in cases {
            let a = row(name);
            assert_eq!((a.platform, a.devices_per_slice), (Platform::Gpu, gpus));
            assert_eq!(a.pjrt_topology_name(), "");
            let options = a.create_options(4).unwrap();
            let shape = NamedValue::String(shape.into());
            assert_eq!(options[0], ("topology".to_owned(), shape));
            let (key, NamedValue::String(config)) = &options[1] else {
                panic!("{options:?}")
            };
            assert_eq!(key, "target_config");
            assert!(config.contains(processor), "{config}");
        }
    }

    #[test]
    fn no_slices_is_refused() {
        let error = row("v5e-16").create_options(0).unwrap_err().to_string();
        assert!(error.contains("compile_topology_num_slices=0"), "{error}");
    }

    #[test]
    fn an_unknown_name_lists_the_nearest_and_the_families() {
        let error = Accelerator::lookup("v5e-48").unwrap_err().to_string();
        assert!(
            error.starts_with(
                "Invalid compile topology: v5e-48. Nearest valid topology names: v5e-32, v5e-64."
            ),
            "{error}"
        );
        for family in [
            "v4-{8..4096}",
            "v5p-{8..17920}",
            "tpu7x-{2..18432}",
            "a3",
            "h200",
        ] {
            assert!(error.contains(family), "{family} not in {error}");
        }
        let nearest = |name: &str| match Accelerator::lookup(name).unwrap_err() {
            TopologyError::UnknownName { nearest, .. } => nearest,
            other => panic!("{other}"),
        };
        assert_eq!(nearest("v5p-100000"), ["v5p-17920", "v5p-13824"]);
        assert_eq!(nearest("V5E-16")[0], "v5e-16");
        assert_eq!(nearest("v5e16")[0], "v5e-16");
        assert_eq!(nearest("v7x-8")[0], "tpu7x-8");
        assert_eq!(nearest("v5litepod-256")[0], "v5e-256");
        assert!(!nearest("").is_empty());
    }
}
