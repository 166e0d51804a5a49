//! The table of accelerator names, stored as families with shared shapes.

use super::{Accelerator, Chip, Platform};
use crate::util::names::most_like;

/// A line of names `{prefix}-{suffix}` with one rule for all its rows.
struct Family {
    /// The name before the dash, as users write it.
    prefix: &'static str,
    chip: Chip,
    /// libtpu's name of the chip in a topology name.
    topology_prefix: &'static str,
    chip_config_name: &'static str,
    rows: Rows,
}

/// Where the suffixes of a family come from.
enum Rows {
    /// The 2-dimensional shapes of v5e and v6e.
    Square,
    /// The shapes of [`CUBE`] whose suffix is listed.
    CubeSubset(&'static [u32]),
    /// All shapes of [`CUBE`], and some of the family's own.
    Cube(&'static [(u32, [u32; 3])]),
}

const FAMILIES: [Family; 5] = [
    Family {
        prefix: "v5e",
        chip: Chip::V5e,
        topology_prefix: "v5e",
        chip_config_name: "default",
        rows: Rows::Square,
    },
    Family {
        prefix: "v6e",
        chip: Chip::V6e,
        topology_prefix: "v6e",
        chip_config_name: "default",
        rows: Rows::Square,
    },
    Family {
        prefix: "v4",
        chip: Chip::V4,
        topology_prefix: "v4",
        chip_config_name: "megacore",
        rows: Rows::CubeSubset(&[8, 16, 32, 64, 128, 256, 384, 512, 1024, 1536, 2048, 4096]),
    },
    Family {
        prefix: "v5p",
        chip: Chip::V5p,
        topology_prefix: "v5",
        chip_config_name: "megacore",
        rows: Rows::Cube(&[]),
    },
    Family {
        prefix: "tpu7x",
        chip: Chip::Tpu7x,
        topology_prefix: "tpu7x",
        chip_config_name: "default",
        rows: Rows::Cube(&[(2, [1, 1, 1]), (16384, [16, 16, 32]), (18432, [16, 24, 24])]),
    },
];

/// NVIDIA hosts by name, with their GPUs; several hosts are several slices. MaxText names `a3` alone.
const GPU_HOSTS: [(&str, Chip, usize); 3] = [
    ("a3", Chip::H100, 8),
    ("h100", Chip::H100, 1),
    ("h200", Chip::H200, 1),
];

#[rustfmt::skip]
const SQUARE: [(u32, [u32; 2]); 8] = [
    (1, [1, 1]), (4, [2, 2]), (8, [2, 4]), (16, [4, 4]),
    (32, [4, 8]), (64, [8, 8]), (128, [8, 16]), (256, [16, 16]),
];

/// Other names of a family, to guess what was meant: Google Cloud's accelerator type and the
/// marketing names. They are not accepted as such: one name for one thing.
#[rustfmt::skip]
const ALIASES: [(&str, &str); 6] = [
    ("v5litepod", "v5e"), ("trillium", "v6e"), ("v5", "v5p"),
    ("v7x", "tpu7x"), ("v7", "tpu7x"), ("ironwood", "tpu7x"),
];

/// Shapes shared by v4, v5p and tpu7x; the suffix counts cores, two on each chip.
#[rustfmt::skip]
const CUBE: [(u32, [u32; 3]); 96] = [
    (8, [2, 2, 1]), (16, [2, 2, 2]), (32, [2, 2, 4]), (64, [2, 4, 4]), (128, [4, 4, 4]),
    (256, [4, 4, 8]), (384, [4, 4, 12]), (512, [4, 8, 8]), (640, [4, 4, 20]), (768, [4, 8, 12]),
    (896, [4, 4, 28]), (1024, [8, 8, 8]), (1152, [4, 12, 12]), (1280, [4, 8, 20]),
    (1408, [4, 4, 44]), (1536, [8, 8, 12]), (1664, [4, 4, 52]), (1792, [4, 8, 28]),
    (1920, [4, 12, 20]), (2048, [8, 8, 16]), (2176, [4, 4, 68]), (2304, [8, 12, 12]),
    (2432, [4, 4, 76]), (2560, [8, 8, 20]), (2688, [4, 12, 28]), (2816, [4, 8, 44]),
    (2944, [4, 4, 92]), (3072, [8, 12, 16]), (3200, [4, 20, 20]), (3328, [4, 8, 52]),
    (3456, [12, 12, 12]), (3584, [8, 8, 28]), (3712, [4, 4, 116]), (3840, [8, 12, 20]),
    (3968, [4, 4, 124]), (4096, [8, 16, 16]), (4224, [4, 12, 44]), (4352, [4, 8, 68]),
    (4480, [4, 20, 28]), (4608, [12, 12, 16]), (4736, [4, 4, 148]), (4864, [4, 8, 76]),
    (4992, [4, 12, 52]), (5120, [8, 16, 20]), (5248, [4, 4, 164]), (5376, [8, 12, 28]),
    (5504, [4, 4, 172]), (5632, [8, 8, 44]), (5760, [12, 12, 20]), (5888, [4, 8, 92]),
    (6016, [4, 4, 188]), (6144, [12, 16, 16]), (6272, [4, 28, 28]), (6400, [8, 20, 20]),
    (6528, [4, 12, 68]), (6656, [8, 8, 52]), (6784, [4, 4, 212]), (6912, [12, 12, 24]),
    (7040, [4, 20, 44]), (7168, [8, 16, 28]), (7296, [4, 12, 76]), (7424, [4, 8, 116]),
    (7552, [4, 4, 236]), (7680, [12, 16, 20]), (7808, [4, 4, 244]), (7936, [4, 8, 124]),
    (8064, [12, 12, 28]), (8192, [16, 16, 16]), (8320, [4, 20, 52]), (8448, [8, 12, 44]),
    (8704, [8, 8, 68]), (8832, [4, 12, 92]), (8960, [8, 20, 28]), (9216, [12, 16, 24]),
    (9472, [4, 8, 148]), (9600, [12, 20, 20]), (9728, [8, 8, 76]), (9856, [4, 28, 44]),
    (9984, [8, 12, 52]), (10240, [16, 16, 20]), (10368, [12, 12, 36]), (10496, [4, 8, 164]),
    (10752, [12, 16, 28]), (10880, [4, 20, 68]), (11008, [4, 8, 172]), (11136, [4, 12, 116]),
    (11264, [8, 16, 44]), (11520, [12, 20, 24]), (11648, [4, 28, 52]), (11776, [8, 8, 92]),
    (11904, [4, 12, 124]), (12032, [4, 8, 188]), (12160, [4, 20, 76]), (12288, [16, 16, 24]),
    (13824, [12, 24, 24]), (17920, [16, 20, 28]),
];

impl Family {
    /// Suffixes with their shapes, smallest first.
    fn rows(&self) -> Vec<(u32, Vec<u32>)> {
        let cube = |rows: &[(u32, [u32; 3])]| -> Vec<(u32, Vec<u32>)> {
            rows.iter().map(|(s, d)| (*s, d.to_vec())).collect()
        };
        let mut rows = match self.rows {
            Rows::Square => SQUARE.iter().map(|(s, d)| (*s, d.to_vec())).collect(),
            Rows::CubeSubset(suffixes) => {
                let mut rows = cube(&CUBE);
                rows.retain(|(suffix, _)| suffixes.contains(suffix));
                rows
            }
            Rows::Cube(own) => [cube(&CUBE), cube(own)].concat(),
        };
        rows.sort_unstable();
        rows
    }

    fn accelerator(&self, suffix: u32, dims: Vec<u32>) -> Accelerator {
        let chips: u32 = dims.iter().product();
        let shape: Vec<String> = dims.iter().map(u32::to_string).collect();
        let wrap = match dims[..] {
            // A pod of v5e or v6e is 16 chips wide: only a full side closes to a ring.
            [x, y] => [x == 16, y == 16, false],
            // Optical switches close a 3-dimensional slice made of whole 4x4x4 cubes.
            _ => [dims.iter().all(|d| d % 4 == 0); 3],
        };
        Accelerator {
            name: format!("{}-{suffix}", self.prefix),
            chip: self.chip,
            platform: Platform::Tpu,
            topology_name: Some(format!("{}:{}", self.topology_prefix, shape.join("x"))),
            chip_config_name: Some(self.chip_config_name),
            chips_per_host_bounds: Some(if chips == 1 { [1, 1, 1] } else { [2, 2, 1] }),
            devices_per_slice: chips as usize * self.chip.devices_per_chip(),
            wrap: Some(wrap),
            dims,
        }
    }
}

pub(super) fn find(name: &str) -> Option<Accelerator> {
    if let Some((_, chip, gpus)) = GPU_HOSTS.iter().find(|(host, ..)| *host == name) {
        return Some(Accelerator {
            name: name.to_owned(),
            chip: *chip,
            platform: Platform::Gpu,
            dims: Vec::new(),
            topology_name: None,
            chip_config_name: None,
            chips_per_host_bounds: None,
            devices_per_slice: *gpus,
            wrap: None,
        });
    }
    let (prefix, suffix) = name.split_once('-')?;
    let family = FAMILIES.iter().find(|f| f.prefix == prefix)?;
    // `016` and `+16` parse as 16 but are no names.
    let (suffix, dims) = family
        .rows()
        .into_iter()
        .find(|(s, _)| s.to_string() == suffix)?;
    Some(family.accelerator(suffix, dims))
}

pub(super) fn smallest(chip: Chip) -> Option<Accelerator> {
    let family = FAMILIES.iter().find(|family| family.chip == chip)?;
    let (suffix, dims) = family.rows().into_iter().next()?;
    Some(family.accelerator(suffix, dims))
}

pub(super) fn all() -> impl Iterator<Item = String> {
    FAMILIES
        .iter()
        .flat_map(|f| {
            f.rows()
                .into_iter()
                .map(|(suffix, _)| format!("{}-{suffix}", f.prefix))
        })
        .chain(GPU_HOSTS.iter().map(|(name, ..)| (*name).to_owned()))
}

/// The valid names a mistyped one may have meant: the sizes around it when the family is right,
/// else the names spelt most like it.
pub(super) fn nearest(name: &str) -> Vec<String> {
    let lower = name.trim().to_lowercase();
    let sized = lower.split_once('-').and_then(|(prefix, suffix)| {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == prefix);
        let prefix = alias.map_or(prefix, |(_, prefix)| prefix);
        let family = FAMILIES.iter().find(|f| f.prefix == prefix)?;
        Some((family, suffix.parse::<u64>().ok()?))
    });
    if let Some((family, wanted)) = sized {
        let mut sizes: Vec<u32> = family.rows().into_iter().map(|(s, _)| s).collect();
        sizes.sort_by_key(|&s| u64::from(s).abs_diff(wanted));
        return sizes
            .iter()
            .take(2)
            .map(|s| format!("{}-{s}", family.prefix))
            .collect();
    }
    most_like(&lower, all(), 3)
}

/// All families in one line: short ones in full, long ones by their ends.
pub(super) fn families() -> String {
    let mut parts: Vec<String> = FAMILIES
        .iter()
        .map(|f| {
            let sizes: Vec<String> = f.rows().iter().map(|(s, _)| s.to_string()).collect();
            let sizes = match &sizes[..] {
                [first, .., last] if sizes.len() > 8 => format!("{first}..{last}"),
                _ => sizes.join(","),
            };
            format!("{}-{{{sizes}}}", f.prefix)
        })
        .collect();
    for (name, chip, gpus) in GPU_HOSTS {
        parts.push(match gpus {
            1 => format!("{name} (one {chip} a slice)"),
            _ => format!("{name} (one host of {gpus} {chip} GPUs a slice)"),
        });
    }
    parts.join(", ")
}
