//! The pinned table: the wheels of each plugin and host.

use super::{InstallError, PluginKind, Result};

pub(super) const CPU_LIBRARY: &str = "pjrt_cpu_plugin.so";

/// A file of a wheel: its path there, and where it goes in the plugin's folder.
pub(super) struct Member {
    pub(super) from: &'static str,
    pub(super) to: &'static str,
}

/// A wheel pinned by version, platform and contents.
pub(super) struct Wheel {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    /// pip's platform tag.
    pub(super) platform: &'static str,
    pub(super) sha256: &'static str,
    /// In bytes, for messages.
    pub(super) size: u64,
    pub(super) members: &'static [Member],
}

/// How one plugin is made on one kind of host.
pub(super) struct Recipe {
    pub(super) kind: PluginKind,
    pub(super) arch: &'static str,
    pub(super) version: &'static str,
    /// The library's name in the plugin's folder.
    pub(super) library: &'static str,
    /// The folder of CUDA's tools in the plugin's folder.
    pub(super) cuda_data_dir: Option<&'static str>,
    pub(super) wheels: &'static [Wheel],
    /// Whether the library is compiled from [`SOURCES`] against the wheel's headers.
    pub(super) compiled: bool,
    /// Bytes written at the most, for messages.
    pub(super) disk: u64,
}

pub(super) const TENSORFLOW_MEMBERS: &[Member] = &[
    Member {
        from: "tensorflow/libtensorflow_cc.so.2",
        to: "libtensorflow_cc.so.2",
    },
    Member {
        from: "tensorflow/libtensorflow_framework.so.2",
        to: "libtensorflow_framework.so.2",
    },
];

/// The pinned table. Sums are those of the files on the Python package index.
pub(super) static RECIPES: &[Recipe] = &[
    Recipe {
        kind: PluginKind::Cpu,
        arch: "x86_64",
        version: PluginKind::Cpu.pinned_version(),
        library: CPU_LIBRARY,
        cuda_data_dir: None,
        wheels: &[Wheel {
            name: "tensorflow-cpu",
            version: "2.21.0",
            platform: "manylinux_2_27_x86_64",
            sha256: "2b847d217b02ee7731ed91431daf3250daa0196c3c94614d23be27232e6e5b6c",
            size: 273_829_956,
            members: TENSORFLOW_MEMBERS,
        }],
        compiled: true,
        disk: 1_250_000_000,
    },
    // The package is called `tensorflow` there; it has no GPU support either.
    Recipe {
        kind: PluginKind::Cpu,
        arch: "aarch64",
        version: PluginKind::Cpu.pinned_version(),
        library: CPU_LIBRARY,
        cuda_data_dir: None,
        wheels: &[Wheel {
            name: "tensorflow",
            version: "2.21.0",
            platform: "manylinux_2_27_aarch64",
            sha256: "4b24aca16d527a3cf1c37f720c04c484c3d20f4d0fdfa98632ac8b9f3be6eb5c",
            size: 281_828_020,
            members: TENSORFLOW_MEMBERS,
        }],
        compiled: true,
        disk: 1_250_000_000,
    },
    Recipe {
        kind: PluginKind::Tpu,
        arch: "x86_64",
        version: PluginKind::Tpu.pinned_version(),
        library: "libtpu.so",
        cuda_data_dir: None,
        wheels: &[Wheel {
            name: "libtpu",
            version: "0.0.51",
            platform: "manylinux_2_31_x86_64",
            sha256: "ba67ddbfdbac61c8da1fafc26cd51b93e9fe4d298016e2882eb986b1718cba34",
            size: 204_805_508,
            members: &[Member {
                from: "libtpu/libtpu.so",
                to: "libtpu.so",
            }],
        }],
        compiled: false,
        disk: 800_000_000,
    },
    Recipe {
        kind: PluginKind::Cuda,
        arch: "x86_64",
        version: PluginKind::Cuda.pinned_version(),
        library: "xla_cuda_plugin.so",
        cuda_data_dir: Some("cuda"),
        wheels: &[
            Wheel {
                name: "jax-cuda13-pjrt",
                version: "0.10.2",
                platform: "manylinux_2_27_x86_64",
                sha256: "a97e9cabe0e21d8dbcc70bd909ca1c34cd546d3ce2d94b4cd907a8d4f6179f6a",
                size: 124_395_292,
                members: &[Member {
                    from: "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
                    to: "xla_cuda_plugin.so",
                }],
            },
            Wheel {
                name: "nvidia-nvvm",
                version: "13.5.37",
                platform: "manylinux2010_x86_64",
                sha256: "c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070",
                size: 75_141_406,
                members: &[Member {
                    from: "nvidia/cu13/nvvm/libdevice/libdevice.10.bc",
                    to: "cuda/nvvm/libdevice/libdevice.10.bc",
                }],
            },
            Wheel {
                name: "nvidia-cuda-nvcc",
                version: "13.5.37",
                platform: "manylinux2014_x86_64",
                sha256: "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
                size: 47_028_279,
                members: &[Member {
                    from: "nvidia/cu13/bin/ptxas",
                    to: "cuda/bin/ptxas",
                }],
            },
        ],
        compiled: false,
        disk: 600_000_000,
    },
];

pub(super) fn recipe_for(
    recipes: &'static [Recipe],
    kind: PluginKind,
    os: &'static str,
    arch: &'static str,
) -> Result<&'static Recipe> {
    recipes
        .iter()
        .find(|recipe| os == "linux" && recipe.kind == kind && recipe.arch == arch)
        .ok_or(InstallError::UnsupportedHost { kind, os, arch })
}

/// The wheels of `recipe`, with the sums that pin them.
pub(super) fn source_of(recipe: &Recipe) -> String {
    let wheels: Vec<String> = recipe
        .wheels
        .iter()
        .map(|wheel| format!("{}=={} sha256:{}", wheel.name, wheel.version, wheel.sha256))
        .collect();
    wheels.join(", ")
}
