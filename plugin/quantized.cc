// Products whose operands are rounded to int8 in the same call, as training needs them: their values are new in every step.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "isa.h"
#include "kernels.h"
#include "pool.h"
#include "vectors.h"  // Last: what follows is compiled for its instructions.

#if defined(__x86_64__)

namespace maxdiff::kernels {

namespace {

// Values below which waking another thread costs more than it gains.
constexpr int64_t kSmall = 1 << 14;

// Bytes along k that are rounded at once: 16 groups of 4, one for each lane.
constexpr int64_t kStep = 64;

// Transposes 16 vectors of 16 lanes.
inline void Transpose(__m512i v[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Lane group l of v[i + j] now has column 4 l + j of rows i to i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even_upper = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    const __m512i even_lower = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    const __m512i odd_upper = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
    const __m512i odd_lower = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(even_upper, even_lower, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(even_upper, even_lower, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xdd);
  }
}

// Uniform in [-0.5, 0.5), of 16 elements from `position` on: graph::random::rounding_noise.
class Noise {
 public:
  explicit Noise(const RoundingKey& key) : high_(_mm512_set1_epi32(key.high)), low_(_mm512_set1_epi32(key.low)) {}

  __m512 operator()(int64_t position) const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(position)), lanes);
    x = _mm512_xor_si512(x, high_);
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_add_epi32(x, low_);
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int32_t>(0x846ca68b)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    const __m512 unit = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(x, 8)), _mm512_set1_ps(0x1p-24f));
    return _mm512_sub_ps(unit, _mm512_set1_ps(0.5f));
  }

 private:
  const __m512i high_, low_;
};

// Without their sign, floats order as integers, with NaN above everything.
__m512i Magnitude(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

// What int8's steps are worth for the largest magnitudes, by AQT.
__m512 ScaleOf(__m512i largest) {
  const __mmask16 empty = _mm512_testn_epi32_mask(largest, largest);
  const __m512 range = _mm512_mask_mov_ps(_mm512_castsi512_ps(largest), empty, _mm512_set1_ps(1.0f));
  return _mm512_mul_ps(range, _mm512_set1_ps(static_cast<float>(1.0 / 127.5)));
}

__m512 InverseOf(__m512 scale) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 inverse = _mm512_div_ps(one, scale);
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  return _mm512_mask_mov_ps(inverse, _mm512_cmp_ps_mask(inverse, infinity, _CMP_EQ_OQ), one);
}

// 16 values as integers of 32 bits, by AQT; 0 for NaN.
template <bool stochastic>
__m512i Round(__m512 x, __m512 inverse, const Noise& noise, int64_t position) {
  __m512 y = _mm512_mul_ps(x, inverse);
  if constexpr (stochastic) y = _mm512_add_ps(y, noise(position));
  // NaN passes both, and its conversion's low byte is 0.
  y = _mm512_min_ps(_mm512_set1_ps(127.0f), _mm512_max_ps(_mm512_set1_ps(-127.0f), y));
  return _mm512_cvtps_epi32(y);
}

// Where rounded values go: `stride` bytes for a row of the lhs; of the rhs a block of 16 columns has `stride` bytes.
struct Rounded {
  char* data;
  int64_t stride;
  float* scale;
  int32_t* start;  // Of the rhs: -128 times the sum of each column.
};

// Parts of an operand that are rounded one by one: as many lines as a vector has lanes, or an image.
int64_t Blocks(const FloatOperand& x) { return x.pieces_are_rows ? x.lines : CeilDiv(x.lines, kLanes); }

// Rounds the values of one operand. A line is what has a range of its own: a row of the lhs or all rows of an image of
// it, or a column of the rhs.
template <bool is_lhs, bool stochastic>
class Rounding {
 public:
  Rounding(const FloatOperand& x, const RoundingKey& key, int64_t padded, const Rounded& out)
      : x_(x), noise_(key), padded_(padded), out_(out) {}

  void Do(int64_t block) const {
    if (x_.pieces_are_rows) return RoundImage(block);
    const int64_t line = block * kLanes;
    const int lines = static_cast<int>(std::min<int64_t>(kLanes, x_.lines - line));
    x_.transposed ? RoundColumns(line, lines) : RoundRows(line, lines);
  }

 private:
  // Of `count` values that follow each other.
  static float ScaleOfLine(const float* from, int64_t count) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += kLanes) {
      largest = _mm512_max_epu32(largest, Magnitude(_mm512_maskz_loadu_ps(Lanes(count - i), from + i)));
    }
    return _mm512_cvtss_f32(ScaleOf(_mm512_set1_epi32(static_cast<int32_t>(_mm512_reduce_max_epu32(largest)))));
  }

  // 64 values from `from` on, of which `count` exist; the rest are zeros.
  __m512i RoundStep(const float* from, int64_t count, __m512 inverse) const {
    __m128i bytes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __mmask16 mask = Lanes(count - i * kLanes);
      const __m512 value = _mm512_maskz_loadu_ps(mask, from + i * kLanes);
      const __m512i rounded = Round<stochastic>(value, inverse, noise_, from - x_.data + i * kLanes);
      bytes[i] = _mm512_maskz_cvtepi32_epi8(mask, rounded);
    }
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes[0]), bytes[1], 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes[2]), bytes[3], 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

  // Plus 128.
  static __m512i Unsigned(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(128))); }

  static void StoreStep(char* to, int64_t bytes, __m512i value) {
    _mm512_mask_storeu_epi8(to, bytes >= kStep ? ~0ull : (1ull << bytes) - 1, value);
  }

  void RoundPiece(const float* from, __m512 inverse, char* to) const {
    for (int64_t i = 0; i < padded_; i += kStep) {
      StoreStep(to + i, padded_ - i, Unsigned(RoundStep(from + i, x_.channels - i, inverse)));
    }
  }

  void RoundImage(int64_t image) const {
    const float* from = x_.data + image * x_.pieces * x_.channels;
    const float scale = ScaleOfLine(from, x_.pieces * x_.channels);
    const __m512 inverse = InverseOf(_mm512_set1_ps(scale));
    out_.scale[image] = scale;
    for (int64_t piece = 0; piece < x_.pieces; ++piece) {
      const int64_t row = image * x_.pieces + piece;
      RoundPiece(from + piece * x_.channels, inverse, out_.data + row * out_.stride);
    }
  }

  // Lines that lie in memory one after the other.
  void RoundRows(int64_t line, int lines) const {
    const int64_t size = x_.pieces * x_.channels;
    __m512 inverses[kLanes];
    for (int r = 0; r < lines; ++r) {
      const float scale = ScaleOfLine(x_.data + (line + r) * size, size);
      out_.scale[line + r] = scale;
      inverses[r] = InverseOf(_mm512_set1_ps(scale));
    }
    if constexpr (is_lhs) {
      for (int r = 0; r < lines; ++r) {
        RoundPiece(x_.data + (line + r) * size, inverses[r], out_.data + (line + r) * out_.stride);
      }
      return;
    }
    __m512i sums = _mm512_setzero_si512();
    char* to = out_.data + line / kLanes * out_.stride;
    for (int64_t piece = 0; piece < x_.pieces; ++piece) {
      for (int64_t i = 0; i < padded_; i += kStep) {
        __m512i step[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          const float* from = x_.data + (line + r) * size + piece * x_.channels + i;
          step[r] = r < lines ? RoundStep(from, x_.channels - i, inverses[r]) : _mm512_setzero_si512();
        }
        Transpose(step);
        const int64_t groups = std::min(padded_ - i, kStep) / 4;
        for (int64_t g = 0; g < groups; ++g) StoreGroup(to + g * 64, step[g], &sums);
        to += groups * 64;
      }
    }
    StoreStart(line, sums);
  }

  // Lines of which each value of k lies beside that of the next line.
  void RoundColumns(int64_t line, int lines) const {
    const __mmask16 mask = Lanes(lines);
    const int64_t k = x_.channels;
    const float* from = x_.data + line;
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; ++i) {
      largest = _mm512_max_epu32(largest, Magnitude(_mm512_maskz_loadu_ps(mask, from + i * x_.lines)));
    }
    const __m512 scale = ScaleOf(largest);
    _mm512_mask_storeu_ps(out_.scale + line, mask, scale);
    const __m512 inverse = InverseOf(scale);
    __m512i sums = _mm512_setzero_si512();
    char* packed = out_.data + line / kLanes * out_.stride;
    for (int64_t i = 0; i < padded_; i += kStep) {
      __m512i step[kLanes];
      for (int g = 0; g < kLanes; ++g) step[g] = RoundGroup(from, i + g * 4, inverse, mask);
      const int64_t bytes = std::min(padded_ - i, kStep);
      if constexpr (is_lhs) {
        Transpose(step);
        for (int r = 0; r < lines; ++r) StoreStep(out_.data + (line + r) * out_.stride + i, bytes, Unsigned(step[r]));
      } else {
        for (int64_t g = 0; g < bytes / 4; ++g) StoreGroup(packed + i / 4 * 64 + g * 64, step[g], &sums);
      }
    }
    if constexpr (!is_lhs) StoreStart(line, sums);
  }

  // 4 values of k from `i` on of 16 lines; zeros past the end.
  __m512i RoundGroup(const float* from, int64_t i, __m512 inverse, __mmask16 mask) const {
    __m512i group = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4 && i + j < x_.channels; ++j) {
      const float* values = from + (i + j) * x_.lines;
      const __m512i rounded =
          Round<stochastic>(_mm512_maskz_loadu_ps(mask, values), inverse, noise_, values - x_.data);
      const __m512i byte = _mm512_and_si512(rounded, _mm512_set1_epi32(0xff));
      group = _mm512_or_si512(group, _mm512_sll_epi32(byte, _mm_cvtsi32_si128(static_cast<int>(8 * j))));
    }
    return group;
  }

  static void StoreGroup(char* to, __m512i group, __m512i* sums) {
    _mm512_storeu_si512(to, group);
    *sums = _mm512_dpbusd_epi32(*sums, _mm512_set1_epi8(1), group);
  }

  void StoreStart(int64_t line, __m512i sums) const {
    _mm512_storeu_si512(out_.start + line, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-128)));
  }

  const FloatOperand& x_;
  const Noise noise_;
  const int64_t padded_;
  const Rounded out_;
};

// Channels of a piece with the zeros that follow them. Tiles take whole steps, and pay even where half of one is zeros.
int64_t Padded(const QuantizedProduct& p) {
  const int64_t channels = p.rhs.channels;
  const bool tiles = UsedIsa() >= Isa::kAmx && p.patches.rows >= 16 && channels >= 16;
  const int64_t step = tiles ? kStep : 4;
  const int64_t padded = CeilDiv(channels, step) * step;
  // Rows whose distance is a power of two share few places in the first-level cache.
  return p.rhs.pieces == 1 && padded % 1024 == 0 ? padded + kStep : padded;
}

void RoundOperands(const QuantizedProduct& p, int64_t padded, const Rounded& lhs, const Rounded& rhs) {
  const Rounding<true, false> nearest(p.lhs, p.key, padded, lhs);
  const Rounding<true, true> stochastic(p.lhs, p.key, padded, lhs);
  const Rounding<false, false> of_rhs(p.rhs, p.key, padded, rhs);
  const int64_t lhs_blocks = Blocks(p.lhs);
  const int64_t blocks = lhs_blocks + Blocks(p.rhs);
  const auto round = [&](int64_t block) {
    if (block >= lhs_blocks) {
      of_rhs.Do(block - lhs_blocks);
    } else if (p.stochastic) {
      stochastic.Do(block);
    } else {
      nearest.Do(block);
    }
  };
  const int64_t values = p.lhs.Count() + p.rhs.Count();
  const int64_t tasks = values < kSmall ? 1 : std::min<int64_t>(blocks, 8 * Pool::Get().threads());
  Pool::Get().Run(tasks, [&](int64_t task) {
    for (int64_t block = blocks * task / tasks; block < blocks * (task + 1) / tasks; ++block) round(block);
  });
}

}  // namespace

void MultiplyQuantized(const QuantizedProduct& p) {
  const int64_t rows = p.patches.rows;
  const int64_t columns = p.rhs.lines;
  if (rows == 0 || columns == 0) return;
  const int64_t padded = Padded(p);
  const int64_t k = p.rhs.pieces * padded;
  const int64_t column_blocks = CeilDiv(columns, kLanes);
  const int64_t lhs_rows = p.lhs.lines * (p.lhs.pieces_are_rows ? p.lhs.pieces : 1);
  thread_local Scratch lhs_memory, rhs_memory, scales_memory, start_memory;
  float* scales = scales_memory.Get<float>(p.lhs.lines + columns + rows);
  const Rounded lhs = {lhs_memory.Get<char>(lhs_rows * padded), padded, scales, nullptr};
  const Rounded rhs = {rhs_memory.Get<char>(column_blocks * kLanes * k), kLanes * k, scales + p.lhs.lines,
                       start_memory.Get<int32_t>(column_blocks * kLanes)};
  RoundOperands(p, padded, lhs, rhs);

  const float* row_scale = lhs.scale;
  if (p.lhs.pieces_are_rows) {
    float* of_rows = rhs.scale + columns;
    const int64_t rows_of_image = rows / p.lhs.lines;
    for (int64_t image = 0; image < p.lhs.lines; ++image) {
      std::fill_n(of_rows + image * rows_of_image, rows_of_image, lhs.scale[image]);
    }
    row_scale = of_rows;
  }
  Contraction c = {};
  c.element = Element::kInt8;
  c.lhs = p.patches;
  c.lhs.data = lhs.data;
  c.lhs.channels = padded;
  c.columns = columns;
  c.packed = rhs.data;
  c.start = rhs.start;
  c.row_scale = row_scale;
  c.column_scale = rhs.scale;
  c.bias = p.bias;
  c.out = p.out;
  Contract(c);
}

#pragma GCC pop_options

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)
