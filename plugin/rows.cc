// Kernels whose work is a pass or two over memory: norms, quantization, gated activations.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vectors.h"  // Last: what follows is compiled for its instructions.

#if defined(__x86_64__)

namespace maxdiff::kernels {

namespace {

// Values below which waking another thread costs more than it gains.
constexpr int64_t kSmall = 1 << 15;

// Calls work(begin, end) for parts of [0, count) on all threads; `size` values belong to each.
template <typename Work>
void InParts(int64_t count, int64_t size, const Work& work) {
  Pool& pool = Pool::Get();
  const int64_t parts = count * size < kSmall ? 1 : std::min<int64_t>(count, 2 * pool.threads());
  pool.Run(parts, [&](int64_t part) { work(count * part / parts, count * (part + 1) / parts); });
}

// Statistics of `count` values that sum to `sum` and whose squares sum to `squares`: the mean, and what to multiply
// deviations with.
struct Moments {
  Moments(double sum, double squares, double count, float epsilon) {
    mean = static_cast<float>(sum / count);
    const double variance = squares / count - (sum / count) * (sum / count);
    // Rounding may leave less than zero; NaN stays what it is.
    inverse = static_cast<float>(1.0 / std::sqrt((variance < 0 ? 0 : variance) + epsilon));
  }

  float mean;
  float inverse;
};

__m512 Silu(__m512 y) { return _mm512_mul_ps(y, Logistic(y)); }

// Sums of each channel and of its square over pixels, `channels` apart in `sums`.
void ChannelSums(const uint16_t* x, int64_t pixels, int64_t channels, float* sums) {
  constexpr int kVectors = 4;
  for (int64_t c = 0; c < channels; c += kVectors * kLanes) {
    __mmask16 masks[kVectors];
    __m512 sum[kVectors];
    __m512 squares[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      masks[v] = Lanes(channels - c - v * kLanes);
      sum[v] = squares[v] = _mm512_setzero_ps();
    }
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m512 value = LoadBf16(x + pixel * channels + c + v * kLanes, masks[v]);
        sum[v] = _mm512_add_ps(sum[v], value);
        squares[v] = _mm512_fmadd_ps(value, value, squares[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      _mm512_mask_storeu_ps(sums + c + v * kLanes, masks[v], sum[v]);
      _mm512_mask_storeu_ps(sums + channels + c + v * kLanes, masks[v], squares[v]);
    }
  }
}

}  // namespace

void AbsMax(const uint16_t* x, int64_t rows, int64_t k, bool scale, uint16_t* out) {
  InParts(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // Without its sign, bf16 orders as an integer, with NaN above everything.
      const __m512i magnitude = _mm512_set1_epi16(0x7fff);
      __m512i most = _mm512_setzero_si512();
      for (int64_t i = 0; i < k; i += 32) {
        const __mmask32 mask = k - i >= 32 ? ~0u : (1u << (k - i)) - 1;
        const __m512i value = _mm512_maskz_loadu_epi16(mask, x + row * k + i);
        most = _mm512_max_epu16(most, _mm512_and_si512(value, magnitude));
      }
      uint16_t lanes[32];
      _mm512_storeu_si512(lanes, most);
      out[row] = *std::max_element(lanes, lanes + 32);
      if (!scale) continue;
      const float range = out[row] == 0 ? 1.0f : ScalarFromBf16(out[row]);
      out[row] = ScalarToBf16(range * static_cast<float>(1.0 / 127.5));
    }
  });
}

void Quantize(const uint16_t* x, const uint16_t* scale, int64_t rows, int64_t k, uint8_t* out) {
  // Long rows are cut, so that a single image occupies all threads.
  const int64_t pieces = k >= kSmall ? CeilDiv(k, kSmall) : 1;
  InParts(rows * pieces, k / pieces, [&](int64_t begin, int64_t end) {
    const __m512 low = _mm512_set1_ps(-127.0f);
    const __m512 high = _mm512_set1_ps(127.0f);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t row = at / pieces;
      const int64_t first = k * (at % pieces) / pieces;
      const int64_t last = k * (at % pieces + 1) / pieces;
      const float inverse = ScalarFromBf16(ScalarToBf16(1.0f / ScalarFromBf16(scale[row])));
      const __m512 factor = _mm512_set1_ps(inverse == std::numeric_limits<float>::infinity() ? 1.0f : inverse);
      for (int64_t i = first; i < last; i += kLanes) {
        const __mmask16 mask = Lanes(last - i);
        __m512 y = _mm512_mul_ps(LoadBf16(x + row * k + i, mask), factor);
        y = FromBf16(ToBf16(y));
        // NaN passes both, and its conversion's low byte is 0.
        y = _mm512_min_ps(high, _mm512_max_ps(low, y));
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y));
        _mm_mask_storeu_epi8(out + row * k + i, mask, _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(128))));
      }
    }
  });
}

void LayerNorm(const uint16_t* x, const float* weight, const float* bias, int64_t rows, int64_t k, float epsilon,
               uint16_t* out) {
  InParts(rows, k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* from = x + row * k;
      __m512 sum = _mm512_setzero_ps();
      __m512 squares = _mm512_setzero_ps();
      for (int64_t i = 0; i < k; i += kLanes) {
        const __m512 value = LoadBf16(from + i, Lanes(k - i));
        sum = _mm512_add_ps(sum, value);
        squares = _mm512_fmadd_ps(value, value, squares);
      }
      const Moments moments(_mm512_reduce_add_ps(sum), _mm512_reduce_add_ps(squares), k, epsilon);
      const __m512 mean = _mm512_set1_ps(moments.mean);
      const __m512 inverse = _mm512_set1_ps(moments.inverse);
      for (int64_t i = 0; i < k; i += kLanes) {
        const __mmask16 mask = Lanes(k - i);
        __m512 y = _mm512_mul_ps(_mm512_sub_ps(LoadBf16(from + i, mask), mean), inverse);
        y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, weight + i));
        y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, bias + i));
        StoreBf16(out + row * k + i, mask, y);
      }
    }
  });
}

void GroupNorm(const GroupNormalization& norm) {
  const int64_t channels = norm.channels;
  const int64_t pixels = norm.pixels;
  const int64_t size = channels / norm.groups;
  Pool& pool = Pool::Get();
  const bool is_small = norm.batch * pixels * channels < kSmall;
  const int64_t parts = is_small ? 1 : std::min<int64_t>(pixels, 2 * pool.threads());
  std::vector<float> sums(norm.batch * parts * 2 * channels);
  pool.Run(norm.batch * parts, [&](int64_t task) {
    const int64_t begin = pixels * (task % parts) / parts;
    const int64_t end = pixels * (task % parts + 1) / parts;
    const uint16_t* from = norm.x + (task / parts * pixels + begin) * channels;
    ChannelSums(from, end - begin, channels, sums.data() + task * 2 * channels);
  });
  // For each image and channel a factor and a shift.
  std::vector<float> affine(norm.batch * 2 * channels);
  for (int64_t image = 0; image < norm.batch; ++image) {
    float* factor = affine.data() + image * 2 * channels;
    float* shift = factor + channels;
    for (int64_t group = 0; group < norm.groups; ++group) {
      double sum = 0;
      double squares = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const float* of_part = sums.data() + (image * parts + part) * 2 * channels;
        for (int64_t c = group * size; c < (group + 1) * size; ++c) {
          sum += of_part[c];
          squares += of_part[channels + c];
        }
      }
      const Moments moments(sum, squares, static_cast<double>(pixels * size), norm.epsilon);
      for (int64_t c = group * size; c < (group + 1) * size; ++c) {
        factor[c] = moments.inverse * norm.weight[c];
        shift[c] = norm.bias[c] - moments.mean * factor[c];
      }
    }
  }
  InParts(norm.batch * pixels, channels, [&](int64_t begin, int64_t end) {
    for (int64_t pixel = begin; pixel < end; ++pixel) {
      const float* factor = affine.data() + pixel / pixels * 2 * channels;
      for (int64_t c = 0; c < channels; c += kLanes) {
        const __mmask16 mask = Lanes(channels - c);
        const __m512 value = LoadBf16(norm.x + pixel * channels + c, mask);
        __m512 y = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, factor + c));
        y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, factor + channels + c));
        if (norm.silu) y = Silu(FromBf16(ToBf16(y)));
        StoreBf16(norm.out + pixel * channels + c, mask, y);
      }
    }
  });
}

void Geglu(const uint16_t* x, int64_t rows, int64_t size, uint16_t* out) {
  InParts(rows, 2 * size, [&](int64_t begin, int64_t end) {
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 scale = _mm512_set1_ps(0.70710678f);
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* values = x + row * 2 * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 mask = Lanes(size - i);
        const __m512 gate = LoadBf16(values + size + i, mask);
        const __m512 phi = _mm512_fmadd_ps(Erf(_mm512_mul_ps(gate, scale)), half, half);
        const __m512 y = _mm512_mul_ps(LoadBf16(values + i, mask), _mm512_mul_ps(gate, phi));
        StoreBf16(out + row * size + i, mask, y);
      }
    }
  });
}

#pragma GCC pop_options

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)
