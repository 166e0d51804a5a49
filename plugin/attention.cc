#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "isa.h"
#include "kernels.h"
#include "pool.h"
#include "tiles.h"  // Last: what follows is compiled for AVX-512.

#if defined(__x86_64__)

namespace maxdiff::kernels {

namespace {

// Rows of queries that share a block of keys, and the keys of a block: scores and weights of both stay in the
// second-level cache.
constexpr int kQueryRows = 96;
constexpr int64_t kKeyBlock = 512;
static_assert(kQueryRows % kRows == 0 && kQueryRows % kTileRows == 0);

struct Head {
  explicit Head(const Attention& a)
      : a(a),
        stride(a.heads * a.size),
        padded_keys(RoundUp(a.keys, UsedIsa() >= Isa::kAmx ? kStepBytes / 2 : kLanes)),
        terms(RoundUp(a.size, UsedIsa() >= Isa::kAmx ? kStepBytes / 2 : 2)),
        padded_size(RoundUp(a.size, kLanes)) {}

  static int64_t RoundUp(int64_t n, int64_t unit) { return CeilDiv(n, unit) * unit; }

  const Attention& a;
  int64_t stride;       // Elements from one row to the next.
  int64_t padded_keys;  // What the products with values run over: with zeros for what does not exist, as follows.
  int64_t terms;        // What the products with keys run over.
  int64_t padded_size;  // Columns of values.
  const char* keys = nullptr;    // Packed: columns are keys, k runs over the size.
  const char* values = nullptr;  // Packed: columns run over the size, k over keys.
};

void PackKeys(const Head& head, const uint16_t* k, int32_t* to) {
  const int64_t pairs = head.terms / 2;
  for (int64_t block = 0; block < head.padded_keys; block += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      int32_t* column = to + block * pairs + lane;
      const int64_t key = block + lane;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        int32_t value = 0;
        if (key < head.a.keys && 2 * pair < head.a.size) std::memcpy(&value, k + key * head.stride + 2 * pair, 4);
        column[pair * kLanes] = value;
      }
    }
  }
}

void PackValues(const Head& head, const uint16_t* v, int32_t* to) {
  const Attention& a = head.a;
  const int64_t pairs = head.padded_keys / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t key = 2 * pair;
    for (int64_t block = 0; block < head.padded_size; block += kLanes) {
      const __mmask16 mask = Lanes(a.size - block);
      const __mmask16 low_mask = key < a.keys ? mask : 0;
      const __mmask16 high_mask = key + 1 < a.keys ? mask : 0;
      const __m256i low = _mm256_maskz_loadu_epi16(low_mask, v + key * head.stride + block);
      const __m256i high = _mm256_maskz_loadu_epi16(high_mask, v + (key + 1) * head.stride + block);
      const __m512i both =
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      _mm512_storeu_si512(to + (block * pairs + pair * kLanes), both);
    }
  }
}

// Rows of bf16 in memory.
struct Rows {
  const uint16_t* data;
  int64_t stride;
  int count;
};

void MultiplyInRegisters(const Rows& rows, int64_t terms, const char* packed, int64_t vector_stride, int64_t vectors,
                         float* out, int64_t out_stride) {
  for (int row = 0; row < rows.count; row += kRows) {
    const int count = std::min(kRows, rows.count - row);
    const char* pointers[kRows];
    for (int r = 0; r < count; ++r) pointers[r] = reinterpret_cast<const char*>(rows.data + (row + r) * rows.stride);
    for (int64_t first = 0; first < vectors; first += kVectors) {
      const int these = static_cast<int>(std::min<int64_t>(kVectors, vectors - first));
      Target target = {};
      target.out = out + row * out_stride + first * kLanes;
      target.out_stride = out_stride;
      kTiles<Element::kBf16>[count - 1][these - 1](pointers, 1, terms / 2, packed + first * vector_stride,
                                                   vector_stride, 0, {nullptr, true, true}, target, 0xffff);
    }
  }
}

// Reads and writes whole tiles of rows.
void MultiplyInTiles(const Rows& rows, int64_t terms, const char* packed, int64_t vector_stride, int64_t vectors,
                     float* out, int64_t out_stride) {
  const auto tile = [&](int row) {
    return TileRows{reinterpret_cast<const char*>(rows.data + row * rows.stride), rows.stride * 2};
  };
  for (int64_t vector = 0; vector < vectors; vector += 2) {
    for (int row = 0; row < rows.count; row += 2 * kTileRows) {
      const TileRows tiles[2] = {tile(row), tile(row + kTileRows)};
      kMultiplyTiles<Element::kBf16>[rows.count - row > kTileRows][vectors - vector > 1](
          tiles, 1, terms * 2 / kStepBytes, packed + vector * vector_stride, vector_stride, 0, true,
          out + row * out_stride + vector * kLanes, out_stride);
    }
  }
}

// Sets `out` to the product of rows with packed columns.
void Multiply(const Rows& rows, int64_t terms, const char* packed, int64_t vector_stride, int64_t vectors, float* out,
              int64_t out_stride) {
  const auto multiply = UsedIsa() >= Isa::kAmx ? MultiplyInTiles : MultiplyInRegisters;
  multiply(rows, terms, packed, vector_stride, vectors, out, out_stride);
}

// What is known of one query after some blocks of keys.
struct Softmax {
  float highest = -std::numeric_limits<float>::infinity();  // Of the scores.
  float total = 0;                                          // Of the weights, which are e^(score - highest).
};

// Takes a block of scores in, of which the first `real` exist, and gives their weights. Returns what weights of the
// blocks before are to be multiplied with.
float Weigh(Softmax& softmax, const float* scores, int64_t keys, int64_t real, float scale, uint16_t* weights) {
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 most = _mm512_set1_ps(softmax.highest);
  for (int64_t key = 0; key < real; key += kLanes) {
    most = _mm512_mask_max_ps(most, Lanes(real - key), most, _mm512_mul_ps(_mm512_loadu_ps(scores + key), factor));
  }
  // The maximum may miss a NaN. The weight of a NaN is one, and makes the row's total and result NaN.
  const float now = _mm512_reduce_max_ps(most);
  // Where all keys so far are at -infinity their weights are 0.
  const __m512 shift = _mm512_set1_ps(now == -std::numeric_limits<float>::infinity() ? 0.0f : now);
  __m512 total = _mm512_setzero_ps();
  for (int64_t key = 0; key < keys; key += kLanes) {
    // Rounded as for the maximum, so that it differs from itself by 0.
    const __m512 shifted = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + key), factor), shift);
    const __m512 weight = _mm512_maskz_mov_ps(Lanes(real - key), Exp(shifted));
    total = _mm512_add_ps(total, weight);
    StoreBf16(weights + key, 0xffff, weight);
  }
  const float before = softmax.highest == now ? 1.0f : std::exp(softmax.highest - now);
  softmax.highest = now;
  softmax.total = softmax.total * before + _mm512_reduce_add_ps(total);
  return before;
}

// sums = sums * factor + products, but just the products where `first`: then sums may be anything.
void Add(const float* products, int64_t count, float factor, bool first, float* sums) {
  for (int64_t i = 0; i < count; i += kLanes) {
    __m512 sum = _mm512_loadu_ps(products + i);
    if (!first) sum = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(factor)), sum);
    _mm512_storeu_ps(sums + i, sum);
  }
}

// The queries [first, first + count) of one head, at q.
void AttendRows(const Head& head, int64_t first, const uint16_t* q, uint16_t* out, int count, Scratch& memory) {
  const Attention& a = head.a;
  const int64_t size = head.padded_size;
  // For each query: scores, sums and products in f32; weights and the query itself in bf16.
  float* scores = memory.Get<float>(kQueryRows * (kKeyBlock + 2 * size + kKeyBlock / 2 + head.terms / 2));
  float* sums = scores + kQueryRows * kKeyBlock;
  float* products = sums + kQueryRows * size;
  uint16_t* weights = reinterpret_cast<uint16_t*>(products + kQueryRows * size);
  uint16_t* queries = weights + kQueryRows * kKeyBlock;
  for (int r = 0; r < count; ++r) {
    std::copy_n(q + r * head.stride, a.size, queries + r * head.terms);
    std::fill_n(queries + r * head.terms + a.size, head.terms - a.size, uint16_t{0});
  }
  Softmax softmax[kQueryRows];
  const int64_t seen = a.causal ? std::min(a.keys, first + count) : a.keys;
  for (int64_t block = 0; block < seen; block += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, head.padded_keys - block);
    Multiply({queries, head.terms, count}, head.terms, head.keys + block * head.terms * 2, head.terms * kLanes * 2,
             keys / kLanes, scores, kKeyBlock);
    float factors[kQueryRows];
    for (int r = 0; r < count; ++r) {
      const int64_t visible = a.causal ? std::min(a.keys, first + r + 1) : a.keys;
      const int64_t real = std::clamp<int64_t>(visible - block, 0, keys);
      factors[r] = Weigh(softmax[r], scores + r * kKeyBlock, keys, real, a.scale, weights + r * kKeyBlock);
    }
    Multiply({weights, kKeyBlock, count}, keys, head.values + block * kLanes * 2, head.padded_keys * kLanes * 2,
             size / kLanes, products, size);
    for (int r = 0; r < count; ++r) Add(products + r * size, size, factors[r], block == 0, sums + r * size);
  }
  for (int r = 0; r < count; ++r) {
    const __m512 total = _mm512_set1_ps(softmax[r].total);
    for (int64_t d = 0; d < a.size; d += kLanes) {
      const __m512 y = _mm512_div_ps(_mm512_loadu_ps(sums + r * size + d), total);
      StoreBf16(out + r * head.stride + d, Lanes(a.size - d), y);
    }
  }
}

}  // namespace

void Attend(const Attention& a) {
  if (a.batch * a.heads * a.queries * a.size == 0) return;
  Pool& pool = Pool::Get();
  const int64_t blocks = CeilDiv(a.queries, kQueryRows);
  // Each task packs the keys and values of its head: as few tasks a head as keep all threads busy.
  const int64_t wanted = CeilDiv(4 * pool.threads(), a.batch * a.heads);
  const int64_t chunks = std::min(blocks, wanted);
  pool.Run(a.batch * a.heads * chunks, [&](int64_t task) {
    thread_local Scratch keys_memory;
    thread_local Scratch values_memory;
    thread_local Scratch memory;
    std::optional<TileState> tiles;
    if (UsedIsa() >= Isa::kAmx) tiles.emplace();
    const int64_t chunk = task % chunks;
    const int64_t head_index = task / chunks % a.heads;
    const int64_t image = task / chunks / a.heads;
    Head head(a);
    const int64_t from = image * a.keys * head.stride + head_index * a.size;
    int32_t* keys = keys_memory.Get<int32_t>(head.padded_keys * head.terms / 2);
    int32_t* values = values_memory.Get<int32_t>(head.padded_keys / 2 * head.padded_size);
    PackKeys(head, a.k + from, keys);
    PackValues(head, a.v + from, values);
    head.keys = reinterpret_cast<const char*>(keys);
    head.values = reinterpret_cast<const char*>(values);
    const int64_t begin = blocks * chunk / chunks * kQueryRows;
    const int64_t end = std::min(a.queries, blocks * (chunk + 1) / chunks * kQueryRows);
    for (int64_t row = begin; row < end; row += kQueryRows) {
      const int64_t place = (image * a.queries + row) * head.stride + head_index * a.size;
      const int count = static_cast<int>(std::min<int64_t>(kQueryRows, end - row));
      AttendRows(head, row, a.q + place, a.out + place, count, memory);
    }
  });
}

#pragma GCC pop_options

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)
