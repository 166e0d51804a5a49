// Sums of products in registers of AVX-512. To be included last, as vectors.h.

#ifndef MAXDIFF_PLUGIN_PRODUCTS_H_
#define MAXDIFF_PLUGIN_PRODUCTS_H_

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vectors.h"  // Last: what follows is compiled for its instructions.

#if defined(__x86_64__)

namespace maxdiff::kernels {

// Rows and vectors of columns whose sums stay in registers: 24 of 32, which leaves 4 for columns and some for rows.
constexpr int kRows = 6;
constexpr int kVectors = 4;
constexpr int kColumns = kLanes * kVectors;

// The sums of a tile: f32 for bf16 products, s32 for int8 products.
template <Element element>
struct Sums;

template <>
struct Sums<Element::kBf16> {
  using Scalar = float;
  using Vector = __m512;
  static constexpr int kGroup = 2;
  static constexpr int kBytes = 2;
  static Vector Load(const Scalar* from) { return _mm512_loadu_ps(from); }
  static void Store(Scalar* to, Vector v) { _mm512_storeu_ps(to, v); }
  static Vector Zero() { return _mm512_setzero_ps(); }
  static Vector MultiplyAdd(Vector sum, __m512i columns, __m512i row) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(columns), reinterpret_cast<__m512bh>(row));
  }
  static __m512 ToFloat(Vector v, const int32_t*) { return v; }
};

template <>
struct Sums<Element::kInt8> {
  using Scalar = int32_t;
  using Vector = __m512i;
  static constexpr int kGroup = 4;
  static constexpr int kBytes = 1;
  static Vector Load(const Scalar* from) { return _mm512_loadu_si512(from); }
  static void Store(Scalar* to, Vector v) { _mm512_storeu_si512(to, v); }
  static Vector Zero() { return _mm512_setzero_si512(); }
  static Vector MultiplyAdd(Vector sum, __m512i columns, __m512i row) {
    return _mm512_dpbusd_epi32(sum, row, columns);
  }
  static __m512 ToFloat(Vector v, const int32_t* start) {
    return _mm512_cvtepi32_ps(start == nullptr ? v : _mm512_add_epi32(v, _mm512_loadu_si512(start)));
  }
};

// What becomes of the sums of a block of rows and columns: see Contraction.
struct Target {
  const int32_t* start;
  const float* row_scale;
  const float* column_scale;
  const float* bias;
  void* out;
  int64_t out_stride;
  bool out_is_bf16;
};

// Stores the result of 16 columns from `column` of row `row`, of which those in `mask` exist.
template <Element element>
inline void Finish(const Target& target, int64_t row, int64_t column, __mmask16 mask,
                   typename Sums<element>::Vector sums) {
  __m512 y = Sums<element>::ToFloat(sums, target.start == nullptr ? nullptr : target.start + column);
  if (target.row_scale != nullptr) y = _mm512_mul_ps(y, _mm512_set1_ps(target.row_scale[row]));
  if (target.column_scale != nullptr) y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, target.column_scale + column));
  if (target.bias != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, target.bias + column));
  const int64_t place = row * target.out_stride + column;
  if (target.out_is_bf16) {
    StoreBf16(static_cast<uint16_t*>(target.out) + place, mask, y);
  } else {
    _mm512_mask_storeu_ps(static_cast<float*>(target.out) + place, mask, y);
  }
}

// Where sums are kept between parts of k, kColumns apart; null when k is one part.
template <typename Scalar>
struct Partial {
  Scalar* sums;
  bool first, last;
};

// Adds up a tile of `R` rows and `V` vectors of columns over `taps` pieces of `groups` groups each. Piece t of row r
// starts at rows[t * R + r]. Vector v of piece t starts at packed + v * vector_stride + t * tap_stride, in bytes. Of
// the last vector, the columns in `tail` exist.
template <Element element, int R, int V>
__attribute__((noinline)) void Tile(const char* const* rows, int64_t taps, int64_t groups, const char* packed,
                                    int64_t vector_stride, int64_t tap_stride,
                                    const Partial<typename Sums<element>::Scalar>& partial, const Target& target,
                                    __mmask16 tail) {
  using S = Sums<element>;
  typename S::Vector sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v] = partial.first ? S::Zero() : S::Load(partial.sums + r * kColumns + v * kLanes);
    }
  }
  for (int64_t t = 0; t < taps; ++t) {
    const char* row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = rows[t * R + r];
    const char* columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = packed + v * vector_stride + t * tap_stride;
    for (int64_t g = 0; g < groups; ++g) {
      __m512i column[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        column[v] = _mm512_loadu_si512(columns[v] + g * 64);
        _mm_prefetch(columns[v] + g * 64 + 1024, _MM_HINT_T0);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t group;
        std::memcpy(&group, row[r] + g * 4, 4);
        const __m512i value = _mm512_set1_epi32(group);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = S::MultiplyAdd(sums[r][v], column[v], value);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if (partial.last) {
        Finish<element>(target, r, v * kLanes, v + 1 == V ? tail : 0xffff, sums[r][v]);
      } else {
        S::Store(partial.sums + r * kColumns + v * kLanes, sums[r][v]);
      }
    }
  }
}

template <Element element>
using TileFunction = void (*)(const char* const*, int64_t, int64_t, const char*, int64_t, int64_t,
                              const Partial<typename Sums<element>::Scalar>&, const Target&, __mmask16);

template <Element element>
constexpr TileFunction<element> kTiles[kRows][kVectors] = {
    {Tile<element, 1, 1>, Tile<element, 1, 2>, Tile<element, 1, 3>, Tile<element, 1, 4>},
    {Tile<element, 2, 1>, Tile<element, 2, 2>, Tile<element, 2, 3>, Tile<element, 2, 4>},
    {Tile<element, 3, 1>, Tile<element, 3, 2>, Tile<element, 3, 3>, Tile<element, 3, 4>},
    {Tile<element, 4, 1>, Tile<element, 4, 2>, Tile<element, 4, 3>, Tile<element, 4, 4>},
    {Tile<element, 5, 1>, Tile<element, 5, 2>, Tile<element, 5, 3>, Tile<element, 5, 4>},
    {Tile<element, 6, 1>, Tile<element, 6, 2>, Tile<element, 6, 3>, Tile<element, 6, 4>},
};

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)

#endif  // MAXDIFF_PLUGIN_PRODUCTS_H_
