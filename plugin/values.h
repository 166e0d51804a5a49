// Element types, layouts and named values: the C API's spelling to XLA's and back.
#ifndef MAXDIFF_PLUGIN_VALUES_H_
#define MAXDIFF_PLUGIN_VALUES_H_

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "status.h"
#include "xla/layout.h"
#include "xla/layout_util.h"
#include "xla/pjrt/pjrt_common.h"
#include "xla/primitive_util.h"
#include "xla/xla_data.pb.h"

namespace maxdiff {

struct ElementTypePair {
  PJRT_Buffer_Type c;
  xla::PrimitiveType xla;
};

inline constexpr ElementTypePair kElementTypes[] = {
    {PJRT_Buffer_Type_PRED, xla::PRED},
    {PJRT_Buffer_Type_S2, xla::S2},
    {PJRT_Buffer_Type_S4, xla::S4},
    {PJRT_Buffer_Type_S8, xla::S8},
    {PJRT_Buffer_Type_S16, xla::S16},
    {PJRT_Buffer_Type_S32, xla::S32},
    {PJRT_Buffer_Type_S64, xla::S64},
    {PJRT_Buffer_Type_U2, xla::U2},
    {PJRT_Buffer_Type_U4, xla::U4},
    {PJRT_Buffer_Type_U8, xla::U8},
    {PJRT_Buffer_Type_U16, xla::U16},
    {PJRT_Buffer_Type_U32, xla::U32},
    {PJRT_Buffer_Type_U64, xla::U64},
    {PJRT_Buffer_Type_F16, xla::F16},
    {PJRT_Buffer_Type_F32, xla::F32},
    {PJRT_Buffer_Type_F64, xla::F64},
    {PJRT_Buffer_Type_BF16, xla::BF16},
    {PJRT_Buffer_Type_C64, xla::C64},
    {PJRT_Buffer_Type_C128, xla::C128},
    {PJRT_Buffer_Type_F4E2M1FN, xla::F4E2M1FN},
    {PJRT_Buffer_Type_F8E3M4, xla::F8E3M4},
    {PJRT_Buffer_Type_F8E4M3, xla::F8E4M3},
    {PJRT_Buffer_Type_F8E4M3FN, xla::F8E4M3FN},
    {PJRT_Buffer_Type_F8E4M3B11FNUZ, xla::F8E4M3B11FNUZ},
    {PJRT_Buffer_Type_F8E4M3FNUZ, xla::F8E4M3FNUZ},
    {PJRT_Buffer_Type_F8E5M2, xla::F8E5M2},
    {PJRT_Buffer_Type_F8E5M2FNUZ, xla::F8E5M2FNUZ},
    {PJRT_Buffer_Type_F8E8M0FNU, xla::F8E8M0FNU},
    {PJRT_Buffer_Type_TOKEN, xla::TOKEN},
};

inline absl::StatusOr<xla::PrimitiveType> ToXlaType(PJRT_Buffer_Type type) {
  for (const ElementTypePair& pair : kElementTypes) {
    if (pair.c == type && type != PJRT_Buffer_Type_TOKEN) return pair.xla;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("element type ", static_cast<int>(type), " is not one a host buffer can have"));
}

inline PJRT_Buffer_Type ToCType(xla::PrimitiveType type) {
  for (const ElementTypePair& pair : kElementTypes) {
    if (pair.xla == type) return pair.c;
  }
  return PJRT_Buffer_Type_INVALID;
}

inline absl::StatusOr<absl::Span<const int64_t>> CheckDimensions(const int64_t* dims,
                                                                 size_t num_dims) {
  if (num_dims > 0) MAXDIFF_RETURN_IF_ERROR(CheckNotNull(dims, "dims"));
  absl::Span<const int64_t> span(dims, num_dims);
  int64_t elements = 1;
  for (int64_t dim : span) {
    if (dim < 0 || __builtin_mul_overflow(elements, dim, &elements)) {
      return absl::InvalidArgumentError(
          absl::StrCat("dimension ", dim, " is negative or makes the array too large"));
    }
  }
  return span;
}

// The layout that the C API describes, for arrays of `rank` dimensions: untiled minor-to-major
// orders only, which is all that the CPU has.
inline absl::StatusOr<xla::Layout> ToXlaLayout(const PJRT_Buffer_MemoryLayout* layout,
                                               size_t rank) {
  if (layout == nullptr) return xla::LayoutUtil::GetDefaultLayoutForRank(rank);
  if (layout->type != PJRT_Buffer_MemoryLayout_Type_Tiled || layout->tiled.num_tiles != 0) {
    return absl::UnimplementedError(
        "only untiled layouts given as minor_to_major are supported by the CPU plugin");
  }
  if (layout->tiled.minor_to_major_size != rank) {
    return absl::InvalidArgumentError(absl::StrCat("minor_to_major has ",
                                                   layout->tiled.minor_to_major_size,
                                                   " entries for an array of rank ", rank));
  }
  if (rank > 0) {
    MAXDIFF_RETURN_IF_ERROR(CheckNotNull(layout->tiled.minor_to_major, "minor_to_major"));
  }
  absl::Span<const int64_t> order(layout->tiled.minor_to_major, rank);
  std::vector<bool> seen(rank, false);
  for (int64_t dim : order) {
    if (dim < 0 || dim >= static_cast<int64_t>(rank) || seen[dim]) {
      return absl::InvalidArgumentError("minor_to_major is not a permutation of the dimensions");
    }
    seen[dim] = true;
  }
  return xla::LayoutUtil::MakeLayout(order);
}

// Whether `strides` are those of a dense row-major array; extents of one may have any stride.
inline bool IsDenseRowMajor(absl::Span<const int64_t> dims, absl::Span<const int64_t> strides,
                            xla::PrimitiveType type) {
  if (xla::primitive_util::IsSubByteNonPredType(type)) return false;
  int64_t expected = xla::primitive_util::ByteWidth(type);
  for (int64_t i = static_cast<int64_t>(dims.size()) - 1; i >= 0; --i) {
    if (dims[i] > 1 && strides[i] != expected) return false;
    expected *= dims[i];
  }
  return true;
}

// Named values and the storage they point into; neither moves once added.
class NamedValues {
 public:
  void Add(std::string name, xla::PjRtValueType value) {
    entries_.push_back(std::make_unique<Entry>(Entry{std::move(name), std::move(value)}));
    const Entry& entry = *entries_.back();
    PJRT_NamedValue out = {};
    out.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    out.name = entry.name.data();
    out.name_size = entry.name.size();
    out.value_size = 1;
    if (auto* text = std::get_if<std::string>(&entry.value)) {
      out.type = PJRT_NamedValue_kString;
      out.string_value = text->data();
      out.value_size = text->size();
    } else if (auto* flag = std::get_if<bool>(&entry.value)) {
      out.type = PJRT_NamedValue_kBool;
      out.bool_value = *flag;
    } else if (auto* integer = std::get_if<int64_t>(&entry.value)) {
      out.type = PJRT_NamedValue_kInt64;
      out.int64_value = *integer;
    } else if (auto* list = std::get_if<std::vector<int64_t>>(&entry.value)) {
      out.type = PJRT_NamedValue_kInt64List;
      out.int64_array_value = list->data();
      out.value_size = list->size();
    } else {
      out.type = PJRT_NamedValue_kFloat;
      out.float_value = std::get<float>(entry.value);
    }
    values_.push_back(out);
  }

  template <typename Map>
  void AddAll(const Map& map) {
    for (const auto& [name, value] : map) Add(name, value);
  }

  const PJRT_NamedValue* data() const { return values_.data(); }
  size_t size() const { return values_.size(); }

 private:
  struct Entry {
    std::string name;
    xla::PjRtValueType value;
  };
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<PJRT_NamedValue> values_;
};

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_VALUES_H_
