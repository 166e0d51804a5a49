// Sums of products in tiles of AMX: 16 rows of 64 bytes. To be included last, as vectors.h.

#ifndef MAXDIFF_PLUGIN_TILES_H_
#define MAXDIFF_PLUGIN_TILES_H_

#include <algorithm>
#include <cstdint>

#include "products.h"  // Last: what follows is compiled for its instructions.

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8")

namespace maxdiff::kernels {

constexpr int kTileRows = 16;
// Of a row of the lhs in one product: 32 values of bf16, or 64 of int8. The packed columns of a step are one tile.
constexpr int64_t kStepBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kStepBytes;
// Columns of a tile of sums: as many as rows, and 4 bytes each.
constexpr int kTileColumns = 16;

// While one lives this thread has tiles, whose state the system saves with it from then on.
class TileState {
 public:
  TileState() {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    std::fill_n(layout.row_bytes, 8, kStepBytes);
    std::fill_n(layout.rows, 8, kTileRows);
    asm volatile("" ::: "memory");  // The instruction's macro does not say that it reads memory.
    _tile_loadconfig(&layout);
  }
  ~TileState() { _tile_release(); }
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
};

// 16 rows of the lhs.
struct TileRows {
  const char* data;
  int64_t stride;  // In bytes.
};

// Multiplies `R` tiles of rows (1 or 2) with `V` of columns over `taps` pieces of `steps` steps each. Piece t of tile r
// is rows[r * taps + t]; columns are as for Tile. Sets `sums` [R * 16, `sums_stride`] where `first`, else adds to them.
template <Element element, int R, int V>
__attribute__((noinline)) void MultiplyTiles(const TileRows* rows, int64_t taps, int64_t steps, const char* packed,
                                             int64_t vector_stride, int64_t tap_stride, bool first,
                                             typename Sums<element>::Scalar* sums, int64_t sums_stride) {
// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns: registers are named by constants.
#define MAXDIFF_ADD_PRODUCT(sum, row, column)  \
  do {                                         \
    if constexpr (element == Element::kBf16) { \
      _tile_dpbf16ps(sum, row, column);        \
    } else {                                   \
      _tile_dpbusd(sum, row, column);          \
    }                                          \
  } while (false)
  asm volatile("" ::: "memory");  // The instructions' macros do not say that they read memory.
  const int64_t stride = sums_stride * 4;
  auto* lower_sums = sums + kTileRows * sums_stride;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, stride);
    if constexpr (V == 2) _tile_loadd(1, sums + kTileColumns, stride);
    if constexpr (R == 2) _tile_loadd(2, lower_sums, stride);
    if constexpr (R == 2 && V == 2) _tile_loadd(3, lower_sums + kTileColumns, stride);
  }
  for (int64_t t = 0; t < taps; ++t) {
    const TileRows upper = rows[t];
    const TileRows lower = rows[(R - 1) * taps + t];
    const char* left = packed + t * tap_stride;
    const char* right = left + vector_stride;
    for (int64_t step = 0; step < steps; ++step) {
      _tile_loadd(4, upper.data + step * kStepBytes, upper.stride);
      if constexpr (R == 2) _tile_loadd(5, lower.data + step * kStepBytes, lower.stride);
      _tile_loadd(6, left + step * kTileBytes, kStepBytes);
      if constexpr (V == 2) _tile_loadd(7, right + step * kTileBytes, kStepBytes);
      MAXDIFF_ADD_PRODUCT(0, 4, 6);
      if constexpr (V == 2) MAXDIFF_ADD_PRODUCT(1, 4, 7);
      if constexpr (R == 2) MAXDIFF_ADD_PRODUCT(2, 5, 6);
      if constexpr (R == 2 && V == 2) MAXDIFF_ADD_PRODUCT(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  if constexpr (V == 2) _tile_stored(1, sums + kTileColumns, stride);
  if constexpr (R == 2) _tile_stored(2, lower_sums, stride);
  if constexpr (R == 2 && V == 2) _tile_stored(3, lower_sums + kTileColumns, stride);
#undef MAXDIFF_ADD_PRODUCT
}

template <Element element>
using MultiplyTilesFunction = void (*)(const TileRows*, int64_t, int64_t, const char*, int64_t, int64_t, bool,
                                       typename Sums<element>::Scalar*, int64_t);

template <Element element>
constexpr MultiplyTilesFunction<element> kMultiplyTiles[2][2] = {
    {MultiplyTiles<element, 1, 1>, MultiplyTiles<element, 1, 2>},
    {MultiplyTiles<element, 2, 1>, MultiplyTiles<element, 2, 2>},
};

}  // namespace maxdiff::kernels

#pragma GCC pop_options

#endif  // defined(__x86_64__)

#endif  // MAXDIFF_PLUGIN_TILES_H_
