//! Random numbers inside a program, as plain integer arithmetic on counters.
//!
//! Counter-based generators give the same bits on every backend and under every sharding, and a partitioned
//! program computes its part without communication; StableHLO's `rng_bit_generator` promises neither.

use crate::dtype::DType;
use crate::shape::Shape;

use super::{Binary, Builder, Comparison, GraphError, RoundingStream, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

/// The two words of a Threefry key: scalars of type `u32`.
#[derive(Clone, Copy, Debug)]
pub struct RandomKey {
    pub high: Tensor,
    pub low: Tensor,
}

impl RandomKey {
    /// The key with the high and the low word of `words`, `u32[2]`.
    ///
    /// # Errors
    /// When `words` has other sizes.
    pub fn of_words(b: &Builder, words: Tensor) -> Result<RandomKey> {
        let word = |i| b.reshape(b.slice_dim(words, 0, i, i + 1)?, &[]);
        Ok(RandomKey {
            high: word(0)?,
            low: word(1)?,
        })
    }
}

fn word(b: &Builder, x: Tensor, value: u32) -> Result<Tensor> {
    b.full(&b.shape(x), f64::from(value))
}

fn rotate_left(b: &Builder, x: Tensor, bits: u32) -> Result<Tensor> {
    let left = b.binary(Binary::ShiftLeft, x, word(b, x, bits)?)?;
    let right = shift_right(b, x, 32 - bits)?;
    b.binary(Binary::Or, left, right)
}

/// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
///
/// All four tensors are `u32`; the key words broadcast to the counters' shape.
pub fn threefry2x32(b: &Builder, key: RandomKey, counters: [Tensor; 2]) -> Result<[Tensor; 2]> {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    const PARITY: u32 = 0x1BD1_1BDA;
    let parity = b.binary(Binary::Xor, key.high, key.low)?;
    let parity = b.binary(Binary::Xor, parity, word(b, parity, PARITY)?)?;
    let schedule = [key.high, key.low, parity];
    let mut x = [
        b.add(counters[0], schedule[0])?,
        b.add(counters[1], schedule[1])?,
    ];
    for group in 0..5 {
        for bits in ROTATIONS[group % 2] {
            x[0] = b.add(x[0], x[1])?;
            x[1] = b.binary(Binary::Xor, rotate_left(b, x[1], bits)?, x[0])?;
        }
        x[0] = b.add(x[0], schedule[(group + 1) % 3])?;
        let injected = b.add_scalar(schedule[(group + 2) % 3], group as f64 + 1.0)?;
        x[1] = b.add(x[1], injected)?;
    }
    Ok(x)
}

/// An independent key for each `stream`.
pub fn fold_in(b: &Builder, key: RandomKey, stream: u32) -> Result<RandomKey> {
    let zero = b.scalar(DType::U32, 0.0)?;
    let stream = b.scalar(DType::U32, f64::from(stream))?;
    let [high, low] = threefry2x32(b, key, [zero, stream])?;
    Ok(RandomKey { high, low })
}

/// The words of the keys that [`fold_in`] makes for the streams 0 to `count - 1`: `u32[count, 2]`. A table takes the operations of
/// one key.
///
/// # Errors
/// None for the words of a key.
pub fn fold_in_each(b: &Builder, key: RandomKey, count: usize) -> Result<Tensor> {
    let shape = Shape::new(DType::U32, [count]);
    let streams = b.iota(shape.clone(), 0)?;
    let [high, low] = threefry2x32(b, key, [b.full(&shape, 0.0)?, streams])?;
    let column = |words| b.reshape(words, &[count, 1]);
    b.concatenate(&[column(high)?, column(low)?], 1)
}

/// `x` with elements that are zero at random, each with probability `share` in `[0, 1)`, to a 32nd bit. The others are as
/// they were.
///
/// A mask needs no better bits than rounding does: [`rounding_bits`].
///
/// # Errors
/// None for the words of a key.
pub fn dropped(b: &Builder, x: Tensor, key: RandomKey, share: f64) -> Result<Tensor> {
    let bits = rounding_bits(b, key, RoundingStream(0), &b.dims(x))?;
    // Of all words as many are below it as the share says; one at least is not.
    let bound = (share * WORD as f64).round().min(f64::from(u32::MAX));
    let stays = b.compare(Comparison::Ge, bits, b.full(&b.shape(bits), bound)?)?;
    b.select(stays, x, b.full(&b.shape(x), 0.0)?)
}

/// The row-major position of every element in `u32` words, of a tensor whose rows lie along its last dimension: the position, which
/// wraps around, and of tensors with more than 2^32 elements the number of the word that holds its row, which tells equal ones apart.
struct Position {
    high: Option<Tensor>,
    low: Tensor,
}

impl Position {
    /// Of a tensor whose positions take a word for each `most` elements: 2^32, or fewer in tests.
    fn new(b: &Builder, dims: &[usize], most: u64) -> Result<Self> {
        let last = dims.len().saturating_sub(1);
        let of_row = |rows: u32| {
            let row = position_among(b, dims, last)?;
            shift_right(b, row, rows)
        };
        Ok(Position {
            high: rows_of_word(dims, most).map(of_row).transpose()?,
            low: position_among(b, dims, dims.len())?,
        })
    }
}

/// The row-major position of every element in the first `rank` dimensions, in a word that wraps around.
fn position_among(b: &Builder, dims: &[usize], rank: usize) -> Result<Tensor> {
    let shape = Shape::new(DType::U32, dims);
    let mut total = b.full(&shape, 0.0)?;
    let mut stride = 1u64;
    for d in (0..rank).rev() {
        let index = b.iota(shape.clone(), d)?;
        total = b.add(total, b.mul_scalar(index, stride as f64)?)?;
        stride = (stride * dims[d] as u64) % WORD;
    }
    Ok(total)
}

/// Positions that one word tells apart.
const WORD: u64 = 1 << 32;

/// Of a tensor with more positions than a word tells apart, the binary logarithm of as many rows as a word does, a power of two.
pub fn rows_in_a_word(dims: &[usize]) -> Option<u32> {
    rows_of_word(dims, WORD)
}

fn rows_of_word(dims: &[usize], most: u64) -> Option<u32> {
    let count: u128 = dims.iter().map(|size| *size as u128).product();
    let columns = dims.last().map_or(1, |columns| *columns as u64);
    (count > u128::from(most)).then(|| (most / columns.max(1)).max(1).ilog2())
}

/// Uniform bits, both 32-bit words of a Threefry block for each element.
fn blocks(b: &Builder, key: RandomKey, dims: &[usize]) -> Result<[Tensor; 2]> {
    let Position { high, low } = Position::new(b, dims, WORD)?;
    let high = high.map_or_else(|| word(b, low, 0), Ok)?;
    threefry2x32(b, key, [high, low])
}

/// `u32` bits as `f32` in `[0, 1)`, from their 24 highest.
fn unit(b: &Builder, bits: Tensor) -> Result<Tensor> {
    let top = shift_right(b, bits, 8)?;
    b.mul_scalar(b.convert(top, DType::F32)?, 2f64.powi(-24))
}

/// Uniform `f32` in `[0, 1)`.
pub fn uniform(b: &Builder, key: RandomKey, dims: &[usize]) -> Result<Tensor> {
    let [bits, _] = blocks(b, key, dims)?;
    unit(b, bits)
}

/// Standard normal `f32`, by Box and Muller's transform of the two words of each block.
pub fn normal(b: &Builder, key: RandomKey, dims: &[usize]) -> Result<Tensor> {
    let [first, second] = blocks(b, key, dims)?;
    // 1 - u lies in (0, 1]: the logarithm is finite.
    let open = b.add_scalar(b.neg(unit(b, first)?)?, 1.0)?;
    let radius = b.sqrt(b.mul_scalar(b.log(open)?, -2.0)?)?;
    let angle = b.mul_scalar(unit(b, second)?, std::f64::consts::TAU)?;
    b.mul(radius, b.cos(angle)?)
}

/// Uniform `f32` noise in `(-0.5, 0.5)` for stochastic rounding, one of 256 numbers around zero: a byte `b` is `(b - 127.5) / 256`.
///
/// Every element that is rounded takes one, so it has to be cheap and unbiased, but not Threefry. Four rows share a word, each takes a
/// byte of it, the first the lowest, where TPUs and processors keep integers of 8 bits: one hash is made for four elements. Bytes are enough, as a step of int8
/// then goes up with a probability that is wrong by at most 2^-9 (Qwix's `low_bit_uniform`); and such noise is a number of bfloat16. The
/// hash is that of [`rounding_bits`], but that positions are multiplied first, which kernels do for a whole block at once. Pairs of elements at
/// 16 distances, of the same row, of neighbouring ones and of those that share words, are as even as those of independent numbers.
///
/// # Errors
/// None for the words of a key.
pub fn rounding_noise(
    b: &Builder,
    key: RandomKey,
    stream: RoundingStream,
    dims: &[usize],
) -> Result<Tensor> {
    noise_of(b, key, stream, dims, WORD)
}

/// What [`rounding_noise`] multiplies positions with.
pub const POSITION_FACTOR: u32 = 0x9E37_79B1;

/// Rows that share the words of [`rounding_noise`], a byte for each.
pub const ROWS_OF_NOISE: u32 = 4;

/// Of a tensor whose positions take a word for each `most` elements.
fn noise_of(
    b: &Builder,
    key: RandomKey,
    stream: RoundingStream,
    dims: &[usize],
    most: u64,
) -> Result<Tensor> {
    let last = dims.len().saturating_sub(1);
    let row = position_among(b, dims, last)?;
    let rows_of_word = rows_of_word(dims, most);
    let words = rows_of_word.map(|rows| shift_right(b, row, rows));
    let [high, low] = words_of(b, key, stream, words.transpose()?)?;
    let times = |x: Tensor, factor: u32| b.mul(x, word(b, x, factor)?);
    let columns = dims.last().map_or(1, |columns| *columns as u32);
    let shared = shift_right(b, row, ROWS_OF_NOISE.ilog2())?;
    let mut position = times(shared, columns)?;
    if !dims.is_empty() {
        position = b.add(position, b.iota(b.shape(row), last)?)?;
    }
    let x = b.add(times(position, POSITION_FACTOR)?, low)?;
    let x = b.binary(Binary::Xor, x, high)?;
    let x = times(shift_xor(b, x, 16)?, ROUNDING_FACTORS[0])?;
    let x = times(shift_xor(b, x, 15)?, ROUNDING_FACTORS[1])?;
    let x = shift_xor(b, x, 16)?;
    let place = b.binary(Binary::And, row, word(b, row, ROWS_OF_NOISE - 1)?)?;
    let upper = b.binary(Binary::ShiftRightLogical, x, times(place, 8)?)?;
    let byte = b.binary(Binary::And, upper, word(b, upper, 0xFF)?)?;
    let byte = b.binary(Binary::Xor, byte, word(b, byte, 0x80)?)?;
    let steps = b.add_scalar(b.convert(byte, DType::F32)?, -127.5)?;
    b.mul_scalar(steps, 2f64.powi(-8))
}

/// By how much the number of the word that holds a row adds to the low word of a key.
pub const WORDS_FACTOR: u32 = 0x85EB_CA6B;

/// The key of [`rounding_noise_at`] for the elements of `row`, of a tensor with 2^`rows` rows in a word of positions.
pub fn key_of_row([high, low]: [u32; 2], row: u32, rows: u32) -> [u32; 2] {
    [
        high,
        low.wrapping_add((row >> rows).wrapping_mul(WORDS_FACTOR)),
    ]
}

/// The factors of the hash of [`rounding_bits`].
pub const ROUNDING_FACTORS: [u32; 2] = [0x7FEB_352D, 0x846C_A68B];

/// Uniform bits for stochastic rounding to bf16, and for masks, `u32`.
///
/// Rounding and masks need bits that are cheap and unbiased, not Threefry's 20 rounds: each element's position is mixed with
/// both key words by a two-multiply integer hash (Wellons, "Prospecting for hash functions", 2018: `lowbias32`).
pub fn rounding_bits(
    b: &Builder,
    key: RandomKey,
    stream: RoundingStream,
    dims: &[usize],
) -> Result<Tensor> {
    bits_of(b, key, stream, Position::new(b, dims, WORD)?)
}

fn bits_of(
    b: &Builder,
    key: RandomKey,
    stream: RoundingStream,
    position: Position,
) -> Result<Tensor> {
    let [high, low] = words_of(b, key, stream, position.high)?;
    let mut x = b.binary(Binary::Xor, position.low, high)?;
    x = shift_xor(b, x, 16)?;
    x = b.mul(x, word(b, x, ROUNDING_FACTORS[0])?)?;
    x = shift_xor(b, x, 15)?;
    x = b.add(x, low)?;
    x = b.mul(x, word(b, x, ROUNDING_FACTORS[1])?)?;
    shift_xor(b, x, 16)
}

/// The high and the low word of a stream's key, for rows in words of positions of these numbers.
fn words_of(
    b: &Builder,
    key: RandomKey,
    stream: RoundingStream,
    words: Option<Tensor>,
) -> Result<[Tensor; 2]> {
    let high = b.add_scalar(key.high, f64::from(stream.salt()))?;
    let low = match words {
        None => key.low,
        Some(words) => b.add(b.mul(words, word(b, words, WORDS_FACTOR)?)?, key.low)?,
    };
    Ok([high, low])
}

fn shift_right(b: &Builder, x: Tensor, bits: u32) -> Result<Tensor> {
    b.binary(Binary::ShiftRightLogical, x, word(b, x, bits)?)
}

fn shift_xor(b: &Builder, x: Tensor, bits: u32) -> Result<Tensor> {
    let shifted = shift_right(b, x, bits)?;
    b.binary(Binary::Xor, x, shifted)
}

/// [`rounding_noise`] of the element at `[row, column]` of a tensor of rows of `columns`, of at most 2^32 elements, by the key's high and
/// low words.
pub fn rounding_noise_at(
    [high, low]: [u32; 2],
    stream: RoundingStream,
    [row, column]: [u32; 2],
    columns: u32,
) -> f32 {
    let position = (row / ROWS_OF_NOISE)
        .wrapping_mul(columns)
        .wrapping_add(column);
    let x =
        position.wrapping_mul(POSITION_FACTOR).wrapping_add(low) ^ high.wrapping_add(stream.salt());
    let x = (x ^ (x >> 16)).wrapping_mul(ROUNDING_FACTORS[0]);
    let x = (x ^ (x >> 15)).wrapping_mul(ROUNDING_FACTORS[1]);
    let place = (row % ROWS_OF_NOISE) as usize;
    let byte = (x ^ (x >> 16)).to_le_bytes()[place] as i8;
    (f32::from(byte) + 0.5) / 256.0
}

/// [`rounding_bits`] of the element at `position` of a tensor of at most 2^32 elements, by the key's high and low words.
pub fn rounding_bits_at([high, low]: [u32; 2], stream: RoundingStream, position: u32) -> u32 {
    let mut x = position ^ high.wrapping_add(stream.salt());
    x ^= x >> 16;
    x = x.wrapping_mul(ROUNDING_FACTORS[0]);
    x ^= x >> 15;
    x = x.wrapping_add(low).wrapping_mul(ROUNDING_FACTORS[1]);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, evaluate};
    use crate::host_tensor::HostTensor;

    fn key(b: &Builder, high: u32, low: u32) -> RandomKey {
        let scalar = |v: u32| b.scalar(DType::U32, f64::from(v)).unwrap();
        RandomKey {
            high: scalar(high),
            low: scalar(low),
        }
    }

    fn run(graph: &Graph) -> Vec<Vec<f64>> {
        evaluate(graph, &[])
            .unwrap()
            .iter()
            .map(|t: &HostTensor| t.to_f64_vec().unwrap())
            .collect()
    }

    #[test]
    fn threefry_gives_the_published_known_answers() {
        // Random123 distribution, kat_vectors: threefry2x32 20.
        for (k, c, expected) in [
            ([0, 0], [0, 0], [0x6b20_0159_u32, 0x99ba_4efe_u32]),
            ([u32::MAX; 2], [u32::MAX; 2], [0x1cb9_96fc, 0xbb00_2be7]),
            (
                [0x1319_8a2e, 0x0370_7344],
                [0x243f_6a88, 0x85a3_08d3],
                [0xc492_3a9c, 0x483d_f7a0],
            ),
        ] {
            let b = Builder::new();
            let counters = key(&b, c[0], c[1]);
            let out = threefry2x32(&b, key(&b, k[0], k[1]), [counters.high, counters.low]).unwrap();
            b.output("a", out[0], None).unwrap();
            b.output("b", out[1], None).unwrap();
            let found = run(&b.finish());
            assert_eq!(found, [[f64::from(expected[0])], [f64::from(expected[1])]]);
        }
    }

    #[test]
    fn a_table_of_keys_has_those_of_each_stream() {
        let b = Builder::new();
        let k = key(&b, 7, 42);
        let table = fold_in_each(&b, k, 3).unwrap();
        b.output("table", table, None).unwrap();
        let mut expected = Vec::new();
        for stream in 0..3 {
            let one = fold_in(&b, k, stream).unwrap();
            expected.extend([one.high, one.low]);
        }
        for (at, word) in expected.iter().enumerate() {
            b.output(&at.to_string(), *word, None).unwrap();
        }
        let row = b.reshape(b.slice_dim(table, 0, 2, 3).unwrap(), &[2]);
        let last = RandomKey::of_words(&b, row.unwrap()).unwrap();
        b.output("high", last.high, None).unwrap();
        b.output("low", last.low, None).unwrap();
        let found = run(&b.finish());
        assert_eq!(found[0], found[1..7].concat());
        assert_eq!([&found[7], &found[8]], [&found[5], &found[6]]);
    }

    /// The share of zeros is within five standard errors, no neighbours or rows go together, and what stays does not change.
    #[test]
    fn a_share_of_elements_is_dropped() {
        const ROWS: usize = 200;
        const COLUMNS: usize = 150;
        for share in [0.0, 0.1, 0.5, 0.9] {
            let b = Builder::new();
            let shape = Shape::new(DType::F32, [ROWS, COLUMNS]);
            let x = b.full(&shape, 3.0).unwrap();
            let x = dropped(&b, x, key(&b, 1, 2), share).unwrap();
            b.output("x", x, None).unwrap();
            let found = &run(&b.finish())[0];
            assert!(found.iter().all(|v| *v == 0.0 || *v == 3.0));
            let zeros = |at: usize| f64::from(u8::from(found[at] == 0.0)) - share;
            let count = (ROWS * COLUMNS) as f64;
            let spread = share * (1.0 - share);
            let mean = (0..found.len()).map(zeros).sum::<f64>() / count;
            assert!(
                mean.abs() <= 5.0 * (spread / count).sqrt(),
                "{share}: {mean}"
            );
            for lag in [1, COLUMNS] {
                let both = (lag..found.len()).map(|at| zeros(at) * zeros(at - lag));
                let both = both.sum::<f64>() / count;
                assert!(both.abs() <= 5.0 * spread / count.sqrt(), "{share}: {both}");
            }
        }
    }

    #[test]
    fn positions_past_a_word_have_a_second_one() {
        let b = Builder::new();
        let dims = [2, 5, 2];
        let whole = Position::new(&b, &dims, 20).unwrap();
        assert!(whole.high.is_none());
        // 11 elements are five rows, of which a power of two is four.
        let split = Position::new(&b, &dims, 11).unwrap();
        let k = key(&b, 7, 42);
        b.output("low", split.low, None).unwrap();
        b.output("high", split.high.unwrap(), None).unwrap();
        let bits = bits_of(&b, k, RoundingStream(0), split).unwrap();
        b.output("bits", bits, None).unwrap();
        let noise = noise_of(&b, k, RoundingStream(3), &dims, 11).unwrap();
        b.output("noise", noise, None).unwrap();
        let found = run(&b.finish());
        let expected = |of: &dyn Fn(u32) -> u32| (0..20).map(|i| f64::from(of(i))).collect();
        let all: Vec<Vec<f64>> = vec![
            expected(&|i| i),
            expected(&|i| i / 8),
            expected(&|i| rounding_bits_at(key_of_row([7, 42], i / 2, 2), RoundingStream(0), i)),
            (0..20)
                .map(|i| {
                    f64::from(rounding_noise_at(
                        key_of_row([7, 42], i / 2, 2),
                        RoundingStream(3),
                        [i / 2, i % 2],
                        2,
                    ))
                })
                .collect(),
        ];
        assert_eq!(found, all);
    }

    /// The dimensions of a gradient's four parts, as large as those of SDXL's: a word holds no more elements than it tells apart.
    #[test]
    fn words_hold_rows_that_they_tell_apart() {
        assert_eq!(rows_in_a_word(&[4, 256, 4096, 5120]), Some(19));
        assert_eq!(rows_in_a_word(&[1024, 1024, 10_240]), Some(18));
        assert_eq!(rows_in_a_word(&[1 << 20, 1 << 12]), None);
        assert_eq!(rows_in_a_word(&[(1 << 20) + 1, 1 << 12]), Some(20));
        let b = Builder::new();
        let large = Position::new(&b, &[4, 256, 4096, 5120], WORD).unwrap();
        assert!(large.high.is_some());
    }

    /// Elements that go into one sum lie beside each other, or a row's length apart, and those of four rows are made from one word. Their
    /// noise is as that of independent numbers: pairs fill a grid of 16 by 16 cells evenly, which a bound of five standard errors of chi squared tells.
    #[test]
    fn noise_of_one_sum_is_independent() {
        const COUNT: usize = 1 << 16;
        const CELLS: usize = 16;
        for (key, first, columns) in [
            ([0, 0], 0, 64),
            ([0, 7], 0, 320),
            ([0x1234_5678, 0x9ABC_DEF0], 1 << 20, 640),
            ([0xDEAD_BEEF, 1], 4096, 10_240),
        ] {
            let noise = |i: usize| {
                let at = [first + (i / columns) as u32, (i % columns) as u32];
                rounding_noise_at(key, RoundingStream(0), at, columns as u32)
            };
            let cell = |i: usize| ((noise(i) + 0.5) * CELLS as f32) as usize;
            let cells: Vec<usize> = (0..COUNT + 9 * columns).map(cell).collect();
            for distance in [1, 2, 3, 8, 16, 64, 128, 320]
                .into_iter()
                .chain([1, 2, 3, 4, 5, 8].map(|rows| rows * columns))
                .chain([columns + 1, 3 * columns - 1])
            {
                let mut counts = [0u32; CELLS * CELLS];
                for (one, other) in cells.iter().zip(&cells[distance..]).take(COUNT) {
                    counts[one * CELLS + other] += 1;
                }
                let mean = COUNT as f64 / counts.len() as f64;
                let squares = counts.map(|count| (f64::from(count) - mean).powi(2) / mean);
                let degrees = counts.len() as f64 - 1.0;
                let excess = (squares.iter().sum::<f64>() - degrees) / (2.0 * degrees).sqrt();
                assert!(
                    excess < 5.0,
                    "{key:?}, {columns} columns, {distance} apart: {excess}"
                );
            }
        }
    }

    #[test]
    fn samples_have_the_moments_of_their_distributions() {
        let b = Builder::new();
        let k = fold_in(&b, key(&b, 0, 42), 3).unwrap();
        let n = 40_000;
        for (name, t) in [
            ("uniform", uniform(&b, k, &[n]).unwrap()),
            ("normal", normal(&b, k, &[200, n / 200]).unwrap()),
            (
                "noise",
                rounding_noise(&b, k, RoundingStream(5), &[n]).unwrap(),
            ),
        ] {
            b.output(name, t, None).unwrap();
        }
        let found = run(&b.finish());
        // Mean and variance within five standard errors.
        for (values, mean, var, fourth) in [
            (&found[0], 0.5, 1.0 / 12.0, 1.0 / 80.0),
            (&found[1], 0.0, 1.0, 3.0),
            (&found[2], 0.0, 1.0 / 12.0, 1.0 / 80.0),
        ] {
            let count = values.len() as f64;
            let m = values.iter().sum::<f64>() / count;
            let v = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
            let var: f64 = var;
            let fourth: f64 = fourth;
            assert!((m - mean).abs() < 5.0 * (var / count).sqrt(), "mean {m}");
            let spread = ((fourth - var * var) / count).sqrt();
            assert!((v - var).abs() < 5.0 * spread, "variance {v}");
            // Neighbours are uncorrelated.
            let lag: f64 = values
                .windows(2)
                .map(|w| (w[0] - mean) * (w[1] - mean))
                .sum();
            assert!((lag / count / var).abs() < 5.0 / count.sqrt(), "lag {lag}");
        }
        assert!(found[0].iter().all(|v| (0.0..1.0).contains(v)));
        assert!(found[2].iter().all(|v| (-0.5..0.5).contains(v)));
    }
}
