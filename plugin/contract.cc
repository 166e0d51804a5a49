#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "pool.h"
#include "tiles.h"  // Last: what follows is compiled for AVX-512.

#if defined(__x86_64__)

namespace maxdiff::kernels {

namespace {

// Multiply-adds below which waking another thread costs more than it gains.
constexpr int64_t kSmall = 1 << 20;

// A part of k: several kernel places, or a part of the channels of one. A unit is a number of channels.
struct Part {
  int64_t from_tap, to_tap;
  int64_t from_unit, to_unit;
};

// k cut evenly into parts of at most `most` units, where each of `taps` kernel places has `units`.
class Parts {
 public:
  Parts(int64_t taps, int64_t units, int64_t most) : taps_(taps), units_(units) {
    parts_of_tap_ = CeilDiv(units, most);
    units_in_part_ = CeilDiv(units, parts_of_tap_);
    const int64_t most_taps = parts_of_tap_ > 1 ? 1 : std::min(taps, most / units);
    const int64_t tap_parts = CeilDiv(taps, most_taps);
    taps_in_part_ = CeilDiv(taps, tap_parts);
    count_ = CeilDiv(taps, taps_in_part_) * parts_of_tap_;
  }

  int64_t count() const { return count_; }
  int64_t taps_in_part() const { return taps_in_part_; }
  int64_t units_in_part() const { return units_in_part_; }

  Part operator[](int64_t i) const {
    const int64_t tap = i / parts_of_tap_ * taps_in_part_;
    const int64_t unit = i % parts_of_tap_ * units_in_part_;
    return {tap, std::min(taps_, tap + taps_in_part_), unit, std::min(units_, unit + units_in_part_)};
  }

 private:
  int64_t taps_, units_;
  int64_t parts_of_tap_, units_in_part_, taps_in_part_, count_;
};

// Where rows of patches lie in memory.
class RowSource {
 public:
  // A row's patch in the image: where its kernel place (0, 0) is.
  struct Place {
    int64_t image, top, left;
  };

  RowSource(const Patches& p, int64_t bytes, char padding)
      : p_(AsImage(p)), step_(p.channels * bytes), padding_(step_, padding) {}

  // The places of `count` rows from `row`.
  void Places(int64_t row, int count, Place* places) const {
    int64_t x = row % p_.out_width;
    int64_t y = row / p_.out_width % p_.out_height;
    int64_t image = row / p_.out_width / p_.out_height;
    for (int r = 0; r < count; ++r) {
      places[r] = {image, y * p_.stride_y - p_.low_y, x * p_.stride_x - p_.low_x};
      if (++x < p_.out_width) continue;
      x = 0;
      if (++y < p_.out_height) continue;
      y = 0;
      ++image;
    }
  }

  // The pixel that kernel place `tap` of a patch multiplies; null outside of the image.
  const char* Inside(const Place& place, int64_t tap) const {
    const int64_t y = place.top + tap / p_.kernel_width;
    const int64_t x = place.left + tap % p_.kernel_width;
    if (y < 0 || y >= p_.height || x < 0 || x >= p_.width) return nullptr;
    return static_cast<const char*>(p_.data) + ((place.image * p_.height + y) * p_.width + x) * step_;
  }

  // The same, or a pixel of padding.
  const char* Pixel(const Place& place, int64_t tap) const {
    const char* pixel = Inside(place, tap);
    return pixel == nullptr ? padding_.data() : pixel;
  }

  // Bytes from a pixel to the one that the next place in a row of the output multiplies.
  int64_t stride() const { return p_.stride_x * step_; }

 private:
  // The rows of a matrix are pixels of one line.
  static Patches AsImage(Patches p) {
    if (p.is_image) return p;
    p.height = p.out_height = 1;
    p.width = p.out_width = p.rows;
    p.kernel_height = p.kernel_width = p.stride_y = p.stride_x = 1;
    p.low_y = p.low_x = 0;
    return p;
  }

  const Patches p_;
  const int64_t step_;
  const std::vector<char> padding_;
};

int64_t Taps(const Patches& p) { return p.is_image ? p.kernel_height * p.kernel_width : 1; }

char Padding(Element element) { return element == Element::kInt8 ? static_cast<char>(128) : 0; }

// The result from row `row` and column `column` on.
Target TargetFrom(const Contraction& c, int64_t row, int64_t column) {
  Target target;
  target.start = c.start == nullptr ? nullptr : c.start + column;
  target.row_scale = c.row_scale == nullptr ? nullptr : c.row_scale + row;
  target.column_scale = c.column_scale == nullptr ? nullptr : c.column_scale + column;
  target.bias = c.bias == nullptr ? nullptr : c.bias + column;
  target.out = static_cast<char*>(c.out) + (row * c.columns + column) * (c.out_is_bf16 ? 2 : 4);
  target.out_stride = c.columns;
  target.out_is_bf16 = c.out_is_bf16;
  return target;
}

// Runs tasks on all threads, unless the contraction is small.
template <typename Work>
void RunTasks(const Contraction& c, int64_t tasks, const Work& work) {
  if (c.lhs.rows * c.columns * Taps(c.lhs) * c.lhs.channels < kSmall) {
    for (int64_t task = 0; task < tasks; ++task) work(task);
  } else {
    Pool::Get().Run(tasks, work);
  }
}

// With sums in registers of AVX-512.
template <Element element>
void ContractInRegisters(const Contraction& c) {
  using S = Sums<element>;
  using Scalar = typename S::Scalar;
  // Bytes of packed columns that are used for many rows in a row: a third of a second-level cache of 1 MiB.
  constexpr int64_t kPanelBytes = 360 << 10;
  // Rows in a task: what they keep of sums between parts of k stays in the first or second level cache.
  constexpr int64_t kTaskRows = 30 * kRows;
  const int64_t taps = Taps(c.lhs);
  const int64_t groups = c.lhs.channels / S::kGroup;
  const int64_t vectors = CeilDiv(c.columns, kLanes);
  const int64_t vector_stride = taps * groups * 64;
  const RowSource source(c.lhs, S::kBytes, Padding(element));
  const Parts parts(taps, groups, kPanelBytes / (kVectors * 64));
  const int64_t panels = CeilDiv(vectors, kVectors);
  // Enough tasks for every thread to have its share, whatever the shape.
  int64_t row_tasks = CeilDiv(c.lhs.rows, kTaskRows);
  const int64_t wanted = CeilDiv(4 * Pool::Get().threads(), panels);
  row_tasks = std::max(row_tasks, std::min(wanted, CeilDiv(c.lhs.rows, 2 * kRows)));
  const int64_t row_tiles = CeilDiv(c.lhs.rows, kRows);
  const int64_t tiles_in_task = CeilDiv(row_tiles, row_tasks);
  row_tasks = CeilDiv(row_tiles, tiles_in_task);

  RunTasks(c, panels * row_tasks, [&](int64_t task) {
    thread_local Scratch sums_memory;
    thread_local Scratch rows_memory;
    const int64_t panel = task / row_tasks;
    const int64_t first_row = task % row_tasks * tiles_in_task * kRows;
    const int64_t rows = std::min(c.lhs.rows - first_row, tiles_in_task * kRows);
    const int64_t row_groups = CeilDiv(rows, kRows);
    const int panel_vectors = static_cast<int>(std::min<int64_t>(kVectors, vectors - panel * kVectors));
    const int64_t column = panel * kColumns;
    const __mmask16 tail = Lanes(c.columns - column - (panel_vectors - 1) * kLanes);
    Scalar* sums = sums_memory.Get<Scalar>(row_groups * kRows * kColumns);
    const char** pointers = rows_memory.Get<const char*>(parts.taps_in_part() * kRows);
    for (int64_t i = 0; i < parts.count(); ++i) {
      const Part part = parts[i];
      const char* packed = static_cast<const char*>(c.packed) + panel * kVectors * vector_stride +
                           (part.from_tap * groups + part.from_unit) * 64;
      for (int64_t tile = 0; tile < row_groups; ++tile) {
        // Rows spread evenly over the tiles, so that none is thin.
        const int64_t begin = rows * tile / row_groups;
        const int count = static_cast<int>(rows * (tile + 1) / row_groups - begin);
        const char** pointer = pointers;
        RowSource::Place places[kRows];
        source.Places(first_row + begin, count, places);
        for (int64_t tap = part.from_tap; tap < part.to_tap; ++tap) {
          for (int r = 0; r < count; ++r) *pointer++ = source.Pixel(places[r], tap) + part.from_unit * 4;
        }
        const Partial<Scalar> partial = {sums + begin * kColumns, i == 0, i + 1 == parts.count()};
        kTiles<element>[count - 1][panel_vectors - 1](pointers, part.to_tap - part.from_tap,
                                                      part.to_unit - part.from_unit, packed, vector_stride, groups * 64,
                                                      partial, TargetFrom(c, first_row + begin, column), tail);
      }
    }
  });
}

// With sums in tiles of AMX. A task has a block of rows and a block of columns; what it reads of the rows in a part of k
// stays in the second-level cache, and what it reads of two tiles of columns nearly in the first.
constexpr int64_t kBlockRows = 128;
constexpr int64_t kMostPanels = 16;
constexpr int64_t kMostSteps = 40;
// Tiles of rows and of columns that are multiplied at once, and what they make.
constexpr int64_t kTilesAtOnce = 2;
constexpr int64_t kPairRows = kTilesAtOnce * kTileRows;
constexpr int64_t kPanelColumns = kTilesAtOnce * kTileColumns;
constexpr int64_t kSumsAtOnce = kPairRows * kPanelColumns;

// Whether tiles are used for a contraction: they take whole steps of channels, and pay where they have rows.
template <Element element>
bool TakesTiles(const Contraction& c) {
  return UsedIsa() >= Isa::kAmx && c.lhs.rows >= kTileRows && c.lhs.channels * Sums<element>::kBytes % kStepBytes == 0;
}

// Finds the tiles of `rows` rows from `first_row` for the steps of `part`: tiles[tile * taps + tap]. Rows that are not
// evenly spaced in memory are copied to `copies`.
void FindTiles(const RowSource& source, int64_t first_row, int64_t rows, const Part& part, TileRows* tiles,
               char* copies) {
  const int64_t offset = part.from_unit * kStepBytes;
  const int64_t bytes = (part.to_unit - part.from_unit) * kStepBytes;
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, rows - row));
    RowSource::Place places[kTileRows];
    source.Places(first_row + row, count, places);
    const RowSource::Place& last = places[kTileRows - 1];
    const bool in_line = count == kTileRows && last.image == places[0].image && last.top == places[0].top;
    for (int64_t tap = part.from_tap; tap < part.to_tap; ++tap) {
      const char* from = source.Inside(places[0], tap);
      if (in_line && from != nullptr && source.Inside(last, tap) != nullptr) {
        *tiles++ = {from + offset, source.stride()};
        continue;
      }
      *tiles++ = {copies, bytes};
      // The sums of rows that do not exist are not read.
      for (int r = 0; r < count; ++r) std::memcpy(copies + r * bytes, source.Pixel(places[r], tap) + offset, bytes);
      copies += kTileRows * bytes;
    }
  }
}

// The result of rows and columns whose sums are kPanelColumns apart.
template <Element element>
void FinishRows(const Target& target, int64_t rows, int64_t columns, const typename Sums<element>::Scalar* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kLanes) {
      const auto sum = Sums<element>::Load(sums + row * kPanelColumns + column);
      Finish<element>(target, row, column, Lanes(columns - column), sum);
    }
  }
}

template <Element element>
class TiledContraction {
 public:
  explicit TiledContraction(const Contraction& c)
      : c_(c),
        taps_(Taps(c.lhs)),
        steps_(c.lhs.channels * S::kBytes / kStepBytes),
        source_(c.lhs, S::kBytes, Padding(element)),
        parts_(taps_, steps_, kMostSteps),
        row_blocks_(CeilDiv(c.lhs.rows, kBlockRows)),
        panels_(CeilDiv(c.columns, kPanelColumns)) {
    const int64_t wanted = CeilDiv(4 * Pool::Get().threads(), row_blocks_);
    panels_in_block_ = std::min(kMostPanels, CeilDiv(panels_, wanted));
  }

  int64_t tasks() const { return row_blocks_ * CeilDiv(panels_, panels_in_block_); }

  void Do(int64_t task) const {
    thread_local Scratch sums_memory;
    thread_local Scratch tiles_memory;
    thread_local Scratch copies_memory;
    const TileState state;
    Block block;
    block.row = task % row_blocks_ * kBlockRows;
    block.rows = std::min(c_.lhs.rows - block.row, kBlockRows);
    block.panel = task / row_blocks_ * panels_in_block_;
    block.panels = std::min(panels_ - block.panel, panels_in_block_);
    const int64_t tiles_in_part = CeilDiv(block.rows, kTileRows) * parts_.taps_in_part();
    Scalar* sums = sums_memory.Get<Scalar>(block.panels * CeilDiv(block.rows, kPairRows) * kSumsAtOnce);
    TileRows* tiles = tiles_memory.Get<TileRows>(tiles_in_part);
    char* copies = copies_memory.Get<char>(tiles_in_part * parts_.units_in_part() * kTileBytes);
    for (int64_t i = 0; i < parts_.count(); ++i) {
      FindTiles(source_, block.row, block.rows, parts_[i], tiles, copies);
      MultiplyPart(block, i, tiles, sums);
    }
  }

 private:
  using S = Sums<element>;
  using Scalar = typename S::Scalar;

  // What a task computes.
  struct Block {
    int64_t row, rows;
    int64_t panel, panels;
  };

  // Adds part `i` of k to the sums of a block, and stores the results after the last.
  void MultiplyPart(const Block& block, int64_t i, const TileRows* tiles, Scalar* sums) const {
    const Part part = parts_[i];
    const int64_t taps = part.to_tap - part.from_tap;
    const bool is_last = i + 1 == parts_.count();
    const int64_t vector_stride = taps_ * steps_ * kTileBytes;
    for (int64_t panel = block.panel; panel < block.panel + block.panels; ++panel) {
      const char* packed = static_cast<const char*>(c_.packed) + panel * kTilesAtOnce * vector_stride +
                           (part.from_tap * steps_ + part.from_unit) * kTileBytes;
      const int64_t column = panel * kPanelColumns;
      const int64_t columns = std::min(kPanelColumns, c_.columns - column);
      for (int64_t row = 0; row < block.rows; row += kPairRows) {
        const int64_t rows = std::min(kPairRows, block.rows - row);
        kMultiplyTiles<element>[rows > kTileRows][columns > kTileColumns](
            tiles + row / kTileRows * taps, taps, part.to_unit - part.from_unit, packed, vector_stride,
            steps_ * kTileBytes, i == 0, sums, kPanelColumns);
        if (is_last) FinishRows<element>(TargetFrom(c_, block.row + row, column), rows, columns, sums);
        // What is summed in one part needs no place of its own.
        if (parts_.count() > 1) sums += kSumsAtOnce;
      }
    }
  }

  const Contraction& c_;
  const int64_t taps_, steps_;
  const RowSource source_;
  const Parts parts_;
  const int64_t row_blocks_, panels_;
  int64_t panels_in_block_;
};

template <Element element>
void ContractAs(const Contraction& c) {
  if (!TakesTiles<element>(c)) return ContractInRegisters<element>(c);
  const TiledContraction<element> tiled(c);
  RunTasks(c, tiled.tasks(), [&](int64_t task) { tiled.Do(task); });
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

#pragma GCC pop_options

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)
