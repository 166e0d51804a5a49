//! The blocks of GGUF files: codes, and the scales of groups of them, in one run of bytes (`ggml-quants.h` of llama.cpp).

use half::f16;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use crate::host_tensor::packed;

/// A kind of block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// What is shown of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockPart {
    Codes,
    Scales,
    /// What is added to the product of a code and its scale.
    Minimums,
}

/// The most elements of a block, and the most scales.
const MOST: usize = 256;
const MOST_GROUPS: usize = 16;
/// Blocks that one thread takes apart at a time.
const TASK: usize = 1 << 10;

/// A block, taken apart.
struct Unpacked {
    codes: [i8; MOST],
    scales: [f32; MOST_GROUPS],
    minimums: [f32; MOST_GROUPS],
}

impl BlockType {
    /// All of them.
    pub const ALL: [BlockType; 8] = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q4K,
        BlockType::Q5K,
        BlockType::Q6K,
    ];

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            BlockType::Q4_0 => "Q4_0",
            BlockType::Q4_1 => "Q4_1",
            BlockType::Q5_0 => "Q5_0",
            BlockType::Q5_1 => "Q5_1",
            BlockType::Q8_0 => "Q8_0",
            BlockType::Q4K => "Q4_K",
            BlockType::Q5K => "Q5_K",
            BlockType::Q6K => "Q6_K",
        }
    }

    /// Elements of a block.
    pub fn elements(self) -> usize {
        match self {
            BlockType::Q4_0
            | BlockType::Q4_1
            | BlockType::Q5_0
            | BlockType::Q5_1
            | BlockType::Q8_0 => 32,
            BlockType::Q4K | BlockType::Q5K | BlockType::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            BlockType::Q4_0 => 18,
            BlockType::Q4_1 => 20,
            BlockType::Q5_0 => 22,
            BlockType::Q5_1 => 24,
            BlockType::Q8_0 => 34,
            BlockType::Q4K => 144,
            BlockType::Q5K => 176,
            BlockType::Q6K => 210,
        }
    }

    /// Elements that share a scale.
    pub fn group(self) -> usize {
        match self {
            BlockType::Q6K => 16,
            _ => 32,
        }
    }

    /// The format of a weight of such blocks. It stands for the floats of ggml's `dequantize_row`, bit for bit.
    pub fn format(self) -> TensorFormat {
        let (element, scale) = match self {
            BlockType::Q4_0 => (DType::S4, DType::F16),
            BlockType::Q4_1 => (DType::U4, DType::F16),
            BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q8_0 => (DType::S8, DType::F16),
            BlockType::Q4K => (DType::U4, DType::F32),
            // A product of a scale in f16 and one of 6 or 8 bits.
            BlockType::Q5K | BlockType::Q6K => (DType::S8, DType::F32),
        };
        TensorFormat {
            element,
            granularity: Granularity::Group(self.group()),
            zero_point: self.has_minimums(),
            range: Range::Stored(scale),
            ..TensorFormat::int8(NumericsConvention::Gguf)
        }
    }

    pub fn has_minimums(self) -> bool {
        match self {
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => true,
            BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::Q6K => false,
        }
    }

    /// The values of `part` that a block has.
    pub fn values(self, part: BlockPart) -> usize {
        match part {
            BlockPart::Codes => self.elements(),
            BlockPart::Scales | BlockPart::Minimums => self.elements() / self.group(),
        }
    }

    /// The type of `part`.
    pub fn dtype(self, part: BlockPart) -> DType {
        let format = self.format();
        match (part, format.range) {
            (BlockPart::Codes, _) => format.element,
            (_, Range::Stored(scale)) => scale,
            (_, Range::Dynamic | Range::Static(_)) => DType::F32,
        }
    }

    /// `part` of whole blocks, as a tensor has it.
    pub fn extract(self, part: BlockPart, blocks: &[u8]) -> Vec<u8> {
        let dtype = self.dtype(part);
        let count = self.values(part);
        // Codes of 4 bits are packed at the end.
        let is_packed = dtype.bits() < 8;
        let size = if is_packed { 1 } else { dtype.storage_bytes(1) };
        let mut data = vec![0; blocks.len() / self.bytes() * count * size];
        data.par_chunks_mut(TASK * count * size)
            .zip(blocks.par_chunks(TASK * self.bytes()))
            .for_each(|(out, blocks)| {
                let mut unpacked = Unpacked {
                    codes: [0; MOST],
                    scales: [0.0; MOST_GROUPS],
                    minimums: [0.0; MOST_GROUPS],
                };
                let blocks = blocks.chunks_exact(self.bytes());
                for (out, block) in out.chunks_exact_mut(count * size).zip(blocks) {
                    self.unpack(block, &mut unpacked);
                    match part {
                        BlockPart::Codes => {
                            for (out, code) in out.iter_mut().zip(unpacked.codes) {
                                *out = code as u8;
                            }
                        }
                        BlockPart::Scales => write_floats(dtype, &unpacked.scales, out),
                        BlockPart::Minimums => write_floats(dtype, &unpacked.minimums, out),
                    }
                }
            });
        match is_packed {
            true => packed(&data),
            false => data,
        }
    }

    /// Takes a block apart. Elements follow ggml's `dequantize_row`.
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        // The fifth bits of 32 codes.
        let fifth = |at: usize, i: usize| (block[at + i / 8] >> (i % 8) & 1) << 4;
        // The halves of 16 bytes: the lower ones are the first 16 codes.
        let nibble = |at: usize, i: usize| block[at + i % 16] >> (4 * (i / 16)) & 0xf;
        match self {
            BlockType::Q4_0 => {
                out.scales[0] = half(0);
                each(&mut out.codes, 32, |i| nibble(2, i) as i8 - 8);
            }
            BlockType::Q4_1 => {
                (out.scales[0], out.minimums[0]) = (half(0), half(2));
                each(&mut out.codes, 32, |i| nibble(4, i) as i8);
            }
            BlockType::Q5_0 => {
                out.scales[0] = half(0);
                each(&mut out.codes, 32, |i| {
                    (nibble(6, i) | fifth(2, i)) as i8 - 16
                });
            }
            BlockType::Q5_1 => {
                (out.scales[0], out.minimums[0]) = (half(0), half(2));
                each(&mut out.codes, 32, |i| (nibble(8, i) | fifth(4, i)) as i8);
            }
            BlockType::Q8_0 => {
                out.scales[0] = half(0);
                each(&mut out.codes, 32, |i| block[2 + i] as i8);
            }
            BlockType::Q4K => {
                scales_and_minimums(block, out);
                // 32 bytes hold two groups.
                each(&mut out.codes, 256, |i| {
                    (block[16 + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 0xf) as i8
                });
            }
            BlockType::Q5K => {
                scales_and_minimums(block, out);
                each(&mut out.codes, 256, |i| {
                    let low = block[48 + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 0xf;
                    let high = block[16 + i % 32] >> (i / 32) & 1;
                    (low | high << 4) as i8
                });
            }
            BlockType::Q6K => {
                let scale = half(208);
                for (i, out) in out.scales.iter_mut().enumerate() {
                    *out = scale * f32::from(block[192 + i] as i8);
                }
                // 64 bytes hold four groups of 32: first the lower halves, then the upper ones.
                each(&mut out.codes, 256, |i| {
                    let low = block[i / 128 * 64 + i % 64] >> (4 * (i / 64 % 2)) & 0xf;
                    let high = block[128 + i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
                    (low | high << 4) as i8 - 32
                });
            }
        }
    }
}

fn each(codes: &mut [i8; MOST], count: usize, code: impl Fn(usize) -> i8) {
    for (i, out) in codes[..count].iter_mut().enumerate() {
        *out = code(i);
    }
}

/// The eight scales and minimums of a block of Q4_K or Q5_K: 6 bits each, in 12 bytes after the two that they multiply.
fn scales_and_minimums(block: &[u8], out: &mut Unpacked) {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let (scale, minimum) = (half(0), half(2));
    let packed = &block[4..16];
    for i in 0..8 {
        let (s, m) = match i {
            0..4 => (packed[i] & 0x3f, packed[i + 4] & 0x3f),
            _ => {
                let low = packed[i + 4];
                (
                    low & 0xf | packed[i - 4] >> 2 & 0x30,
                    low >> 4 | packed[i] >> 2 & 0x30,
                )
            }
        };
        out.scales[i] = scale * f32::from(s);
        out.minimums[i] = -(minimum * f32::from(m));
    }
}

fn write_floats(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        // They were read from f16.
        DType::F16 => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = f16::from_f32(*value).to_le_bytes();
            }
        }
        _ => {
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
    }
}
