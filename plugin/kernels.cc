#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "pool.h"
#include "vectors.h"  // Last: what follows is compiled for its instructions.

namespace maxdiff::kernels {

#if defined(__x86_64__)

namespace {

// Rows and vectors of columns whose sums stay in registers: 24 of 32, which leaves 4 for columns and some for rows.
constexpr int kRows = 6;
constexpr int kVectors = 4;
constexpr int kColumns = kLanes * kVectors;
// Bytes of packed columns that are used for many rows in a row: a third of a second-level cache of 1 MiB.
constexpr int64_t kPanelBytes = 360 << 10;
// Rows in a task: what they keep of sums between parts of k stays in the first or second level cache.
constexpr int64_t kTaskRows = 30 * kRows;
// Multiply-adds below which waking another thread costs more than it gains.
constexpr int64_t kSmall = 1 << 20;

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
  static Vector Start(const int32_t*) { return _mm512_setzero_ps(); }
  static Vector MultiplyAdd(Vector sum, __m512i columns, __m512i row) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(columns), reinterpret_cast<__m512bh>(row));
  }
  static __m512 ToFloat(Vector v) { return v; }
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
  static Vector Start(const int32_t* start) {
    return start == nullptr ? Zero() : _mm512_loadu_si512(start);
  }
  static Vector MultiplyAdd(Vector sum, __m512i columns, __m512i row) {
    return _mm512_dpbusd_epi32(sum, row, columns);
  }
  static __m512 ToFloat(Vector v) { return _mm512_cvtepi32_ps(v); }
};

// What becomes of a tile's sums.
template <typename Scalar>
struct Target {
  // Sums between parts of k, kColumns apart; null when k is one part.
  Scalar* partial;
  bool first, last;
  const int32_t* start;
  const float* row_scale;
  const float* column_scale;
  const float* bias;
  void* out;
  int64_t out_stride;
  bool out_is_bf16;
  // Columns of the tile's last vector that exist.
  __mmask16 tail;
};

// Adds up a tile of `R` rows and `V` vectors of columns over `taps` pieces of `groups` groups each. Piece t of row r
// starts at rows[t * R + r]. Vector v of piece t starts at packed + v * vector_stride + t * tap_stride, in bytes.
template <Element element, int R, int V>
__attribute__((noinline)) void Tile(const char* const* rows, int64_t taps, int64_t groups, const char* packed,
                                    int64_t vector_stride, int64_t tap_stride,
                                    const Target<typename Sums<element>::Scalar>& target) {
  using S = Sums<element>;
  typename S::Vector sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v] = target.first ? S::Start(target.start == nullptr ? nullptr : target.start + v * kLanes)
                                : S::Load(target.partial + r * kColumns + v * kLanes);
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
  if (!target.last) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) S::Store(target.partial + r * kColumns + v * kLanes, sums[r][v]);
    }
    return;
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const __mmask16 mask = v + 1 == V ? target.tail : 0xffff;
    __m512 scale = _mm512_setzero_ps();
    __m512 bias = _mm512_setzero_ps();
    if (target.column_scale != nullptr) scale = _mm512_maskz_loadu_ps(mask, target.column_scale + v * kLanes);
    if (target.bias != nullptr) bias = _mm512_maskz_loadu_ps(mask, target.bias + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m512 y = S::ToFloat(sums[r][v]);
      if (target.row_scale != nullptr) y = _mm512_mul_ps(y, _mm512_set1_ps(target.row_scale[r]));
      if (target.column_scale != nullptr) y = _mm512_mul_ps(y, scale);
      if (target.bias != nullptr) y = _mm512_add_ps(y, bias);
      const int64_t place = r * target.out_stride + v * kLanes;
      if (target.out_is_bf16) {
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(target.out) + place, mask,
                                 reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y)));
      } else {
        _mm512_mask_storeu_ps(static_cast<float*>(target.out) + place, mask, y);
      }
    }
  }
}

template <Element element>
using TileFunction = void (*)(const char* const*, int64_t, int64_t, const char*, int64_t, int64_t,
                              const Target<typename Sums<element>::Scalar>&);

template <Element element>
constexpr TileFunction<element> kTiles[kRows][kVectors] = {
    {Tile<element, 1, 1>, Tile<element, 1, 2>, Tile<element, 1, 3>, Tile<element, 1, 4>},
    {Tile<element, 2, 1>, Tile<element, 2, 2>, Tile<element, 2, 3>, Tile<element, 2, 4>},
    {Tile<element, 3, 1>, Tile<element, 3, 2>, Tile<element, 3, 3>, Tile<element, 3, 4>},
    {Tile<element, 4, 1>, Tile<element, 4, 2>, Tile<element, 4, 3>, Tile<element, 4, 4>},
    {Tile<element, 5, 1>, Tile<element, 5, 2>, Tile<element, 5, 3>, Tile<element, 5, 4>},
    {Tile<element, 6, 1>, Tile<element, 6, 2>, Tile<element, 6, 3>, Tile<element, 6, 4>},
};

// Where rows of patches lie in memory.
class RowSource {
 public:
  RowSource(const Patches& p, int64_t bytes, const char* padding) : p_(p), bytes_(bytes), padding_(padding) {}

  // Pointers of `count` rows from `row` for kernel places [from, to): pointers[(tap - from) * count + r].
  void Rows(int64_t row, int count, int64_t from, int64_t to, const char** pointers) const {
    const char* data = static_cast<const char*>(p_.data);
    const int64_t step = p_.channels * bytes_;
    if (!p_.is_image) {
      for (int r = 0; r < count; ++r) pointers[r] = data + (row + r) * step;
      return;
    }
    const int64_t pixels = p_.out_height * p_.out_width;
    for (int r = 0; r < count; ++r) {
      const int64_t image = (row + r) / pixels;
      const int64_t pixel = (row + r) % pixels;
      const int64_t top = pixel / p_.out_width * p_.stride_y - p_.low_y;
      const int64_t left = pixel % p_.out_width * p_.stride_x - p_.low_x;
      for (int64_t tap = from; tap < to; ++tap) {
        const int64_t y = top + tap / p_.kernel_width;
        const int64_t x = left + tap % p_.kernel_width;
        const bool inside = y >= 0 && y < p_.height && x >= 0 && x < p_.width;
        pointers[(tap - from) * count + r] =
            inside ? data + ((image * p_.height + y) * p_.width + x) * step : padding_;
      }
    }
  }

 private:
  const Patches& p_;
  const int64_t bytes_;
  const char* padding_;
};

template <Element element>
void ContractAs(const Contraction& c) {
  using S = Sums<element>;
  using Scalar = typename S::Scalar;
  const int64_t taps = c.lhs.is_image ? c.lhs.kernel_height * c.lhs.kernel_width : 1;
  const int64_t channels = c.lhs.channels;
  const int64_t groups = channels / S::kGroup;
  const int64_t vectors = CeilDiv(c.columns, kLanes);
  const int64_t vector_stride = taps * groups * 64;
  const std::vector<char> padding(c.lhs.is_image ? channels * S::kBytes : 0,
                                  element == Element::kInt8 ? static_cast<char>(128) : 0);
  const RowSource source(c.lhs, S::kBytes, padding.data());

  // Parts of k whose packed columns fit in the cache: several kernel places, or a part of the channels of one.
  const int64_t fitting = std::max<int64_t>(1, kPanelBytes / (kVectors * 64));
  const int64_t parts_of_tap = groups > fitting ? CeilDiv(groups, fitting) : 1;
  const int64_t groups_in_part = CeilDiv(groups, parts_of_tap);
  const int64_t most_taps = parts_of_tap > 1 ? 1 : std::min(taps, std::max<int64_t>(1, fitting / groups));
  const int64_t tap_parts = CeilDiv(taps, most_taps);
  const int64_t taps_in_part = CeilDiv(taps, tap_parts);
  const int64_t parts = tap_parts * parts_of_tap;

  const int64_t panels = CeilDiv(vectors, kVectors);
  Pool& pool = Pool::Get();
  // Enough tasks for every thread to have its share, whatever the shape.
  int64_t row_tasks = CeilDiv(c.lhs.rows, kTaskRows);
  const int64_t wanted = CeilDiv(4 * pool.threads(), panels);
  row_tasks = std::max(row_tasks, std::min(wanted, CeilDiv(c.lhs.rows, 2 * kRows)));
  const int64_t row_tiles = CeilDiv(c.lhs.rows, kRows);
  const int64_t tiles_in_task = CeilDiv(row_tiles, row_tasks);
  row_tasks = CeilDiv(row_tiles, tiles_in_task);
  const bool is_small = c.lhs.rows * c.columns * taps * channels < kSmall;

  auto work = [&](int64_t task) {
    thread_local Scratch sums_memory;
    thread_local Scratch rows_memory;
    const int64_t panel = task / row_tasks;
    const int64_t first_row = task % row_tasks * tiles_in_task * kRows;
    const int64_t end_row = std::min(c.lhs.rows, first_row + tiles_in_task * kRows);
    const int64_t row_groups = CeilDiv(end_row - first_row, kRows);
    const int panel_vectors = static_cast<int>(std::min<int64_t>(kVectors, vectors - panel * kVectors));
    const int64_t column = panel * kColumns;
    const int64_t last_columns = c.columns - column - (panel_vectors - 1) * kLanes;
    const __mmask16 tail = last_columns >= kLanes ? 0xffff : static_cast<__mmask16>((1u << last_columns) - 1);
    Scalar* partial = parts == 1 ? nullptr : sums_memory.Get<Scalar>(row_groups * kRows * kColumns);
    const char** pointers = rows_memory.Get<const char*>(taps_in_part * kRows);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from_tap = part / parts_of_tap * taps_in_part;
      const int64_t to_tap = std::min(taps, from_tap + taps_in_part);
      const int64_t from_group = part % parts_of_tap * groups_in_part;
      const int64_t to_group = std::min(groups, from_group + groups_in_part);
      const char* packed = static_cast<const char*>(c.packed) + panel * kVectors * vector_stride +
                           (from_tap * groups + from_group) * 64;
      for (int64_t tile = 0; tile < row_groups; ++tile) {
        // Rows spread evenly over the tiles, so that none is thin.
        const int64_t rows = end_row - first_row;
        const int64_t begin = first_row + rows * tile / row_groups;
        const int count = static_cast<int>(first_row + rows * (tile + 1) / row_groups - begin);
        source.Rows(begin, count, from_tap, to_tap, pointers);
        if (from_group > 0) {
          for (int64_t i = 0; i < count * (to_tap - from_tap); ++i) pointers[i] += from_group * 4;
        }
        Target<Scalar> target;
        target.partial = partial == nullptr ? nullptr : partial + (begin - first_row) * kColumns;
        target.first = part == 0;
        target.last = part + 1 == parts;
        target.start = c.start == nullptr ? nullptr : c.start + column;
        target.row_scale = c.row_scale == nullptr ? nullptr : c.row_scale + begin;
        target.column_scale = c.column_scale == nullptr ? nullptr : c.column_scale + column;
        target.bias = c.bias == nullptr ? nullptr : c.bias + column;
        target.out_is_bf16 = c.out_is_bf16;
        target.out = static_cast<char*>(c.out) + (begin * c.columns + column) * (c.out_is_bf16 ? 2 : 4);
        target.out_stride = c.columns;
        target.tail = tail;
        kTiles<element>[count - 1][panel_vectors - 1](pointers, to_tap - from_tap, to_group - from_group, packed,
                                                      vector_stride, groups * 64, target);
      }
    }
  };
  const int64_t tasks = panels * row_tasks;
  if (is_small) {
    for (int64_t task = 0; task < tasks; ++task) work(task);
  } else {
    pool.Run(tasks, work);
  }
}

// Rows of queries that share a block of keys, and the keys of a block: scores and weights of both stay in the
// second-level cache.
constexpr int kQueryRows = 8 * kRows;
constexpr int64_t kKeyBlock = 512;

struct Head {
  const Attention& a;
  int64_t stride;         // Elements from one row to the next.
  int64_t padded_keys;    // A multiple of kLanes.
  int64_t padded_size;    // A multiple of kLanes.
  const char* keys;       // Packed: columns are keys, k runs over the size.
  const char* values;     // Packed: columns run over the size, k over keys.
};

void PackKeys(const Attention& a, const uint16_t* k, int64_t stride, int64_t padded_keys, int32_t* to) {
  const int64_t pairs = a.size / 2;
  for (int64_t block = 0; block < padded_keys; block += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      int32_t* column = to + block * pairs + lane;
      const int64_t key = block + lane;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        int32_t value = 0;
        if (key < a.keys) std::memcpy(&value, k + key * stride + 2 * pair, 4);
        column[pair * kLanes] = value;
      }
    }
  }
}

void PackValues(const Attention& a, const uint16_t* v, int64_t stride, int64_t padded_keys, int64_t padded_size,
                int32_t* to) {
  const int64_t pairs = padded_keys / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t key = 2 * pair;
    for (int64_t block = 0; block < padded_size; block += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, a.size - block);
      const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
      const __mmask16 low_mask = key < a.keys ? mask : 0;
      const __mmask16 high_mask = key + 1 < a.keys ? mask : 0;
      const __m256i low = _mm256_maskz_loadu_epi16(low_mask, v + key * stride + block);
      const __m256i high = _mm256_maskz_loadu_epi16(high_mask, v + (key + 1) * stride + block);
      const __m512i both =
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      _mm512_storeu_si512(to + (block * pairs + pair * kLanes), both);
    }
  }
}

// Multiplies rows of bf16 with packed columns; adds to or sets `sums` [rows, kColumns apart per panel].
void Multiply(const char* const* rows, int count, int64_t groups, const char* packed, int64_t vector_stride,
              int64_t vectors, float* out, int64_t out_stride) {
  for (int64_t first = 0; first < vectors; first += kVectors) {
    const int these = static_cast<int>(std::min<int64_t>(kVectors, vectors - first));
    Target<float> target = {};
    target.first = true;
    target.last = true;
    target.out = out + first * kLanes;
    target.out_stride = out_stride;
    target.tail = 0xffff;
    kTiles<Element::kBf16>[count - 1][these - 1](rows, 1, groups, packed + first * vector_stride, vector_stride, 0,
                                                 target);
  }
}

// The queries [first, first + count) of one head, at q.
void AttendRows(const Head& head, int64_t first, const uint16_t* q, uint16_t* out, int count, Scratch& memory) {
  const Attention& a = head.a;
  const int64_t size = head.padded_size;
  float* scores = memory.Get<float>(kQueryRows * (kKeyBlock + kKeyBlock / 2 + 2 * size + 2));
  uint16_t* weights = reinterpret_cast<uint16_t*>(scores + kQueryRows * kKeyBlock);
  float* sums = scores + kQueryRows * (kKeyBlock + kKeyBlock / 2);
  float* products = sums + kQueryRows * size;
  float* highest = products + kQueryRows * size;
  float* totals = highest + kQueryRows;
  std::fill(sums, sums + count * size, 0.0f);
  std::fill(highest, highest + count, -std::numeric_limits<float>::infinity());
  std::fill(totals, totals + count, 0.0f);
  const __m512 scale = _mm512_set1_ps(a.scale);
  const int64_t seen = a.causal ? std::min(a.keys, first + count) : a.keys;
  for (int64_t block = 0; block < seen; block += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, head.padded_keys - block);
    const char* rows[kRows];
    for (int begin = 0; begin < count; begin += kRows) {
      const int these = std::min(kRows, count - begin);
      for (int r = 0; r < these; ++r) {
        rows[r] = reinterpret_cast<const char*>(q + (begin + r) * head.stride);
      }
      Multiply(rows, these, a.size / 2, head.keys + block * a.size * 2, a.size * kLanes * 2, keys / kLanes,
               scores + begin * kKeyBlock, kKeyBlock);
    }
    for (int r = 0; r < count; ++r) {
      float* row = scores + r * kKeyBlock;
      const int64_t visible = a.causal ? std::min(a.keys, first + r + 1) : a.keys;
      const int64_t real = std::clamp<int64_t>(visible - block, 0, keys);
      __m512 most = _mm512_set1_ps(highest[r]);
      for (int64_t key = 0; key < real; key += kLanes) {
        const __mmask16 mask = real - key >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (real - key)) - 1);
        most = _mm512_mask_max_ps(most, mask, most, _mm512_mul_ps(_mm512_loadu_ps(row + key), scale));
      }
      // The maximum may miss a NaN. The weight of a NaN is one, and makes the row's total and result NaN.
      const float now = _mm512_reduce_max_ps(most);
      // Where all keys so far are at -infinity their weights are 0.
      const __m512 shift = _mm512_set1_ps(now == -std::numeric_limits<float>::infinity() ? 0.0f : now);
      __m512 total = _mm512_setzero_ps();
      for (int64_t key = 0; key < keys; key += kLanes) {
        const int64_t left = std::max<int64_t>(0, real - key);
        const __mmask16 mask = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
        // Rounded as for the maximum, so that it differs from itself by 0.
        const __m512 shifted = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(row + key), scale), shift);
        const __m512 weight = _mm512_maskz_mov_ps(mask, Exp(shifted));
        total = _mm512_add_ps(total, weight);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + r * kKeyBlock + key),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight)));
      }
      const float factor = highest[r] == now ? 1.0f : std::exp(highest[r] - now);
      highest[r] = now;
      totals[r] = totals[r] * factor + _mm512_reduce_add_ps(total);
      if (block > 0 && factor != 1.0f) {
        for (int64_t d = 0; d < size; d += kLanes) {
          float* place = sums + r * size + d;
          _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), _mm512_set1_ps(factor)));
        }
      }
    }
    for (int begin = 0; begin < count; begin += kRows) {
      const int these = std::min(kRows, count - begin);
      for (int r = 0; r < these; ++r) {
        rows[r] = reinterpret_cast<const char*>(weights + (begin + r) * kKeyBlock);
      }
      Multiply(rows, these, keys / 2, head.values + block * kLanes * 2, head.padded_keys * kLanes * 2, size / kLanes,
               products + begin * size, size);
    }
    for (int64_t i = 0; i < count * size; i += kLanes) {
      _mm512_storeu_ps(sums + i, _mm512_add_ps(_mm512_loadu_ps(sums + i), _mm512_loadu_ps(products + i)));
    }
  }
  for (int r = 0; r < count; ++r) {
    const __m512 total = _mm512_set1_ps(totals[r]);
    for (int64_t d = 0; d < a.size; d += kLanes) {
      const int64_t left = std::min<int64_t>(kLanes, a.size - d);
      const __m512 y = _mm512_div_ps(_mm512_loadu_ps(sums + r * size + d), total);
      _mm256_mask_storeu_epi16(out + r * head.stride + d, static_cast<__mmask16>((1u << left) - 1),
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y)));
    }
  }
}

}  // namespace

void Contract(const Contraction& contraction) {
  if (contraction.lhs.rows == 0 || contraction.columns == 0) return;
  switch (contraction.element) {
    case Element::kBf16:
      return ContractAs<Element::kBf16>(contraction);
    case Element::kInt8:
      return ContractAs<Element::kInt8>(contraction);
  }
}

void Attend(const Attention& a) {
  if (a.batch * a.heads * a.queries * a.size == 0) return;
  const int64_t stride = a.heads * a.size;
  const int64_t padded_keys = CeilDiv(a.keys, kLanes) * kLanes;
  const int64_t padded_size = CeilDiv(a.size, kLanes) * kLanes;
  Pool& pool = Pool::Get();
  const int64_t blocks = CeilDiv(a.queries, kQueryRows);
  // Each task packs the keys and values of its head: as few tasks a head as keep all threads busy.
  const int64_t wanted = CeilDiv(4 * pool.threads(), a.batch * a.heads);
  const int64_t chunks = std::min(blocks, wanted);
  pool.Run(a.batch * a.heads * chunks, [&](int64_t task) {
    thread_local Scratch keys_memory;
    thread_local Scratch values_memory;
    thread_local Scratch memory;
    const int64_t chunk = task % chunks;
    const int64_t head_index = task / chunks % a.heads;
    const int64_t image = task / chunks / a.heads;
    const int64_t from = image * a.keys * stride + head_index * a.size;
    int32_t* keys = keys_memory.Get<int32_t>(padded_keys * a.size / 2);
    int32_t* values = values_memory.Get<int32_t>(padded_keys / 2 * padded_size);
    PackKeys(a, a.k + from, stride, padded_keys, keys);
    PackValues(a, a.v + from, stride, padded_keys, padded_size, values);
    const Head head = {a,           stride,      padded_keys,
                       padded_size, reinterpret_cast<const char*>(keys), reinterpret_cast<const char*>(values)};
    const int64_t begin = blocks * chunk / chunks * kQueryRows;
    const int64_t end = std::min(a.queries, blocks * (chunk + 1) / chunks * kQueryRows);
    for (int64_t row = begin; row < end; row += kQueryRows) {
      const int64_t place = (image * a.queries + row) * stride + head_index * a.size;
      const int count = static_cast<int>(std::min<int64_t>(kQueryRows, end - row));
      AttendRows(head, row, a.q + place, a.out + place, count, memory);
    }
  });
}

#pragma GCC pop_options

#endif  // defined(__x86_64__)

std::string MissingFeatures() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  std::string missing;
  const auto need = [&](const char* name, int is_here) {
    if (!is_here) missing += (missing.empty() ? "" : ",") + std::string(name);
  };
  need("avx512f", __builtin_cpu_supports("avx512f"));
  need("avx512bw", __builtin_cpu_supports("avx512bw"));
  need("avx512dq", __builtin_cpu_supports("avx512dq"));
  need("avx512vl", __builtin_cpu_supports("avx512vl"));
  need("avx512_bf16", __builtin_cpu_supports("avx512bf16"));
  need("avx512_vnni", __builtin_cpu_supports("avx512vnni"));
  return missing;
#else
  return "avx512f";
#endif
}

}  // namespace maxdiff::kernels
