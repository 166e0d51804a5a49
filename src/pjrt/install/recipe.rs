//! The pinned table: the wheels of each plugin and host.

use super::{InstallError, PluginKind, Result};

pub(super) const CPU_LIBRARY: &str = "pjrt_cpu_plugin.so";

/// A file of a wheel: its path there, and where it goes in the plugin's folder.
pub(super) struct Member {
    pub(super) from: &'static str,
    pub(super) to: &'static str,
}

impl Member {
    /// A file that keeps its place.
    const fn same(path: &'static str) -> Member {
        Member {
            from: path,
            to: path,
        }
    }
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
    /// Whether it is for hosts with an NVIDIA GPU alone.
    pub(super) needs_gpu: bool,
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

/// What compiles for GPUs, none of which has to be there.
const CUDA: Recipe = Recipe {
    kind: PluginKind::Cuda,
    arch: "x86_64",
    needs_gpu: false,
    version: PluginKind::Cuda.pinned_version(),
    library: "plugin/xla_cuda_plugin.so",
    cuda_data_dir: Some("nvidia/cu13"),
    wheels: &[CUDA_PLUGIN, LIBDEVICE, PTXAS],
    compiled: false,
    disk: 600_000_000,
};

/// The plugin looks for the libraries that its programs call in `../nvidia`, as the wheels lay them out.
const CUDA_PLUGIN: Wheel = Wheel {
    name: "jax-cuda13-pjrt",
    version: PluginKind::Cuda.pinned_version(),
    platform: "manylinux_2_27_x86_64",
    sha256: "e5ff589d43064913bb74027682d89639c7ea48f9f81c2bae6fc75117e913f93e",
    size: 134_162_640,
    members: &[Member {
        from: "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
        to: "plugin/xla_cuda_plugin.so",
    }],
};

const LIBDEVICE: Wheel = Wheel {
    name: "nvidia-nvvm",
    version: "13.0.88",
    platform: "manylinux2010_x86_64",
    sha256: "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
    size: 61_601_415,
    members: &[Member::same("nvidia/cu13/nvvm/libdevice/libdevice.10.bc")],
};

/// Of the first CUDA 13, so that every driver for CUDA 13 loads what it assembles.
const PTXAS: Wheel = Wheel {
    name: "nvidia-cuda-nvcc",
    version: "13.0.88",
    platform: "manylinux2014_x86_64",
    sha256: "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    size: 37_384_532,
    members: &[Member::same("nvidia/cu13/bin/ptxas")],
};

const CUBLAS: Wheel = Wheel {
    name: "nvidia-cublas",
    version: "13.1.0.3",
    platform: "manylinux_2_27_x86_64",
    sha256: "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
    size: 423_133_236,
    members: &[
        Member::same("nvidia/cu13/lib/libcublas.so.13"),
        Member::same("nvidia/cu13/lib/libcublasLt.so.13"),
    ],
};

const CUDA_RUNTIME: Wheel = Wheel {
    name: "nvidia-cuda-runtime",
    version: "13.0.96",
    platform: "manylinux2014_x86_64",
    sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    size: 2_243_632,
    members: &[Member::same("nvidia/cu13/lib/libcudart.so.13")],
};

/// cuDNN compiles some of its kernels when they are first used.
const NVRTC: Wheel = Wheel {
    name: "nvidia-cuda-nvrtc",
    version: "13.0.88",
    platform: "manylinux2010_x86_64",
    sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    size: 90_215_200,
    members: &[
        Member::same("nvidia/cu13/lib/libnvrtc.so.13"),
        Member::same("nvidia/cu13/lib/libnvrtc-builtins.so.13.0"),
    ],
};

const CUDNN: Wheel = Wheel {
    name: "nvidia-cudnn-cu13",
    version: "9.19.0.56",
    platform: "manylinux_2_27_x86_64",
    sha256: "d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf",
    size: 366_066_321,
    members: &[
        Member::same("nvidia/cudnn/lib/libcudnn.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_adv.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_cnn.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_engines_runtime_compiled.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_graph.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_heuristic.so.9"),
        Member::same("nvidia/cudnn/lib/libcudnn_ops.so.9"),
    ],
};

/// Several GPUs talk through it.
const NCCL: Wheel = Wheel {
    name: "nvidia-nccl-cu13",
    version: "2.28.9",
    platform: "manylinux_2_18_x86_64",
    sha256: "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
    size: 196_493_177,
    members: &[Member::same("nvidia/nccl/lib/libnccl.so.2")],
};

/// The pinned table, in which the first recipe for a host counts. Sums are those of the files on the Python package index.
pub(super) static RECIPES: &[Recipe] = &[
    Recipe {
        kind: PluginKind::Cpu,
        arch: "x86_64",
        needs_gpu: false,
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
        needs_gpu: false,
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
        needs_gpu: false,
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
        needs_gpu: true,
        wheels: &[
            CUDA_PLUGIN,
            LIBDEVICE,
            PTXAS,
            CUBLAS,
            CUDA_RUNTIME,
            NVRTC,
            CUDNN,
            NCCL,
        ],
        disk: 2_200_000_000,
        ..CUDA
    },
    CUDA,
];

pub(super) fn recipe_for(
    recipes: &'static [Recipe],
    kind: PluginKind,
    os: &'static str,
    arch: &'static str,
    has_gpu: bool,
) -> Result<&'static Recipe> {
    let fits = |recipe: &&Recipe| {
        recipe.kind == kind && recipe.arch == arch && (has_gpu || !recipe.needs_gpu)
    };
    recipes
        .iter()
        .find(|recipe| os == "linux" && fits(recipe))
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
