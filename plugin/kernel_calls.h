// The kernels as custom calls that compiled programs make.

#ifndef MAXDIFF_PLUGIN_KERNEL_CALLS_H_
#define MAXDIFF_PLUGIN_KERNEL_CALLS_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels.h"
#include "xla/service/custom_call_status_internal.h"
#include "xla/service/custom_call_target_registry.h"

namespace maxdiff {

// The configuration of a call: `name=integer` pairs between spaces.
class CallConfig {
 public:
  CallConfig(const char* text, size_t length) {
    for (absl::string_view pair : absl::StrSplit(absl::string_view(text, length), ' ', absl::SkipEmpty())) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(pair, absl::MaxSplits('=', 1));
      int64_t value;
      if (!absl::SimpleAtoi(parts.second, &value) || !values_.emplace(parts.first, value).second) Fail(pair);
    }
  }

  int64_t Get(absl::string_view name) {
    const auto found = values_.find(name);
    if (found != values_.end()) return found->second;
    Fail(name);
    return 0;
  }

  bool Has(absl::string_view name) const { return values_.contains(name); }

  // What is missing or wrong; empty if nothing is.
  const std::string& error() const { return error_; }

 private:
  void Fail(absl::string_view what) {
    if (error_.empty()) error_ = absl::StrCat("the call's configuration lacks or misspells '", what, "'");
  }

  absl::flat_hash_map<absl::string_view, int64_t> values_;
  std::string error_;
};

// Writes the field itself: TensorFlow's library does not export the function that does.
inline void ReportFailure(const std::string& message, XlaCustomCallStatus* status) { status->message = message; }

// A float from its bits: configurations hold integers alone.
inline float FromBits(int64_t bits) {
  const uint32_t narrow = static_cast<uint32_t>(bits);
  float value;
  std::memcpy(&value, &narrow, sizeof(value));
  return value;
}

// Operands and attributes: Kernel::Contract in src/graph/kernel.rs.
inline void ContractCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  kernels::Contraction c = {};
  c.element = config.Get("int8") != 0 ? kernels::Element::kInt8 : kernels::Element::kBf16;
  c.columns = config.Get("columns");
  c.out = out;
  c.out_is_bf16 = config.Get("bf16") != 0;
  c.lhs.data = in[0];
  c.lhs.rows = config.Get("rows");
  c.lhs.channels = config.Get("channels");
  c.lhs.is_image = config.Has("height");
  if (c.lhs.is_image) {
    c.lhs.height = config.Get("height");
    c.lhs.width = config.Get("width");
    c.lhs.out_height = config.Get("out_height");
    c.lhs.out_width = config.Get("out_width");
    c.lhs.kernel_height = config.Get("kernel_height");
    c.lhs.kernel_width = config.Get("kernel_width");
    c.lhs.stride_y = config.Get("stride_y");
    c.lhs.stride_x = config.Get("stride_x");
    c.lhs.low_y = config.Get("low_y");
    c.lhs.low_x = config.Get("low_x");
  }
  c.packed = in[1];
  int next = 2;
  if (c.element == kernels::Element::kInt8) c.start = static_cast<const int32_t*>(in[next++]);
  if (config.Get("row_scale") != 0) c.row_scale = static_cast<const float*>(in[next++]);
  if (config.Get("column_scale") != 0) c.column_scale = static_cast<const float*>(in[next++]);
  if (config.Get("bias") != 0) c.bias = static_cast<const float*>(in[next++]);
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::Contract(c);
}

// Operands and attributes: Kernel::Attention in src/graph/kernel.rs.
inline void AttentionCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  kernels::Attention a = {};
  a.batch = config.Get("batch");
  a.heads = config.Get("heads");
  a.queries = config.Get("queries");
  a.keys = config.Get("keys");
  a.size = config.Get("size");
  a.scale = FromBits(config.Get("scale_bits"));
  a.q = static_cast<const uint16_t*>(in[0]);
  a.k = static_cast<const uint16_t*>(in[1]);
  a.v = static_cast<const uint16_t*>(in[2]);
  a.out = static_cast<uint16_t*>(out);
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::Attend(a);
}

// The others take rows of `size` values; operands and attributes: Kernel in src/graph/kernel.rs.
inline void AbsMaxCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  const int64_t rows = config.Get("rows");
  const int64_t size = config.Get("size");
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::AbsMax(static_cast<const uint16_t*>(in[0]), rows, size, static_cast<uint16_t*>(out));
}

inline void QuantizeCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  const int64_t rows = config.Get("rows");
  const int64_t size = config.Get("size");
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::Quantize(static_cast<const uint16_t*>(in[0]), static_cast<const uint16_t*>(in[1]), rows, size,
                    static_cast<uint8_t*>(out));
}

inline void LayerNormCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  const int64_t rows = config.Get("rows");
  const int64_t size = config.Get("size");
  const float epsilon = FromBits(config.Get("epsilon_bits"));
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::LayerNorm(static_cast<const uint16_t*>(in[0]), static_cast<const float*>(in[1]),
                     static_cast<const float*>(in[2]), rows, size, epsilon, static_cast<uint16_t*>(out));
}

inline void GroupNormCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  kernels::GroupNormalization norm = {};
  norm.x = static_cast<const uint16_t*>(in[0]);
  norm.weight = static_cast<const float*>(in[1]);
  norm.bias = static_cast<const float*>(in[2]);
  norm.batch = config.Get("batch");
  norm.pixels = config.Get("pixels");
  norm.channels = config.Get("channels");
  norm.groups = config.Get("groups");
  norm.epsilon = FromBits(config.Get("epsilon_bits"));
  norm.silu = config.Get("silu") != 0;
  norm.out = static_cast<uint16_t*>(out);
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::GroupNorm(norm);
}

inline void GegluCall(void* out, const void** in, const char* text, size_t length, XlaCustomCallStatus* status) {
  CallConfig config(text, length);
  const int64_t rows = config.Get("rows");
  const int64_t size = config.Get("size");
  if (!config.error().empty()) return ReportFailure(config.error(), status);
  kernels::Geglu(static_cast<const uint16_t*>(in[0]), rows, size, static_cast<uint16_t*>(out));
}

using KernelCall = void (*)(void*, const void**, const char*, size_t, XlaCustomCallStatus*);

// A call whose result is one array. XLA does not serialize whether a result is a tuple (xla/backends/cpu/runtime/
// thunk_proto_serdes.cc) and leaves the flag of a call that it loads uninitialized: a loaded program may hand over, in
// place of the array, a list of one pointer to it. That list is a local variable of the caller, an absl::InlinedVector
// with room for four: it lies just above this frame, where no array is. Inlining would move the frame.
template <KernelCall kCall>
__attribute__((noinline)) void OneResult(void* out, const void** in, const char* text, size_t length,
                                         XlaCustomCallStatus* status) {
  constexpr uintptr_t kCallersFrame = 4096;
  const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const uintptr_t address = reinterpret_cast<uintptr_t>(out);
  if (address > frame && address - frame < kCallersFrame) out = *static_cast<void**>(out);
  kCall(out, in, text, length, status);
}

inline void RegisterKernels() {
  if (!kernels::Supported()) return;
  constexpr std::pair<const char*, KernelCall> kCalls[] = {
      {"maxdiff.contract", OneResult<ContractCall>},    {"maxdiff.attention", OneResult<AttentionCall>},
      {"maxdiff.abs_max", OneResult<AbsMaxCall>},       {"maxdiff.quantize", OneResult<QuantizeCall>},
      {"maxdiff.layer_norm", OneResult<LayerNormCall>}, {"maxdiff.group_norm", OneResult<GroupNormCall>},
      {"maxdiff.geglu", OneResult<GegluCall>},
  };
  for (const auto& [name, call] : kCalls) {
    xla::CustomCallTargetRegistry::Global()->Register(name, reinterpret_cast<void*>(call), "Host");
  }
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_KERNEL_CALLS_H_
