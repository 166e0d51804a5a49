// Custom calls of API version 4 (typed): XLA gives each buffer with its shape, and the attributes by name. Version 3,
// which gives pointers alone, cannot be used in programs that are serialized: XLA:CPU loses whether the results of such
// a call are a tuple.

#include "kernel_calls.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// From xla/ffi/ffi_api.h, which includes headers of MLIR that TensorFlow's wheel lacks.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace maxdiff {
namespace {

namespace ffi = xla::ffi;

// A row-major array that XLA hands over.
struct Array {
  void* data = nullptr;
  ffi::DataType type = ffi::DataType::INVALID;
  ffi::AnyBuffer::Dimensions dims;

  // Counted from the end where negative; 0 for a dimension that is not there.
  int64_t Dim(int64_t i) const {
    if (i < 0) i += static_cast<int64_t>(dims.size());
    return i >= 0 && i < static_cast<int64_t>(dims.size()) ? dims[i] : 0;
  }

  int64_t Count() const {
    return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
  }

  // Its rows: all dimensions but the last.
  int64_t Rows() const { return Dim(-1) == 0 ? 0 : Count() / Dim(-1); }
};

// Operands, result and attributes of a call. Whatever lacks or is of another type is zero, and named by `error`.
class Call {
 public:
  Call(ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes)
      : in_(in), out_(out), attributes_(attributes) {}

  Array In(size_t i) {
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = in_.get<ffi::AnyBuffer>(i);
    if (buffer.has_value()) return ArrayOf(*buffer);
    Fail(absl::StrCat("operand ", i, ": ", buffer.error().message()));
    return {};
  }

  Array In(size_t i, ffi::DataType type) { return OfType(In(i), type, absl::StrCat("operand ", i)); }

  Array Out() {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = out_.get<ffi::AnyBuffer>(0);
    if (buffer.has_value()) return ArrayOf(**buffer);
    Fail(absl::StrCat("result: ", buffer.error().message()));
    return {};
  }

  Array Out(ffi::DataType type) { return OfType(Out(), type, "result"); }

  bool Has(absl::string_view name) const { return attributes_.contains(std::string_view(name.data(), name.size())); }

  int64_t Int(absl::string_view name) { return Attribute<int64_t>(name); }

  float Float(absl::string_view name) { return Attribute<float>(name); }

  // What is wrong first; empty if nothing is.
  const std::string& error() const { return error_; }

 private:
  static Array ArrayOf(const ffi::AnyBuffer& buffer) {
    return {buffer.untyped_data(), buffer.element_type(), buffer.dimensions()};
  }

  Array OfType(Array array, ffi::DataType type, absl::string_view what) {
    if (array.type == type) return array;
    Fail(absl::StrCat(what, " has elements of type ", static_cast<int>(array.type), ", expected ",
                      static_cast<int>(type)));
    return {};
  }

  template <typename T>
  T Attribute(absl::string_view name) {
    const ffi::ErrorOr<T> value = attributes_.get<T>(std::string_view(name.data(), name.size()));
    if (value.has_value()) return *value;
    Fail(absl::StrCat("attribute ", name, ": ", value.error().message()));
    return {};
  }

  void Fail(std::string what) {
    if (error_.empty()) error_ = std::move(what);
  }

  ffi::RemainingArgs in_;
  ffi::RemainingRets out_;
  ffi::Dictionary attributes_;
  std::string error_;
};

constexpr ffi::DataType kBf16 = ffi::DataType::BF16;
constexpr ffi::DataType kF32 = ffi::DataType::F32;

const uint16_t* Bf16(const Array& array) { return static_cast<const uint16_t*>(array.data); }
const float* F32(const Array& array) { return static_cast<const float*>(array.data); }

// An array of bf16 or f32 values as f32.
class Widened {
 public:
  const float* Of(const Array& array) {
    if (array.type != kBf16) return F32(array);
    values_.resize(array.Count());
    const uint16_t* from = Bf16(array);
    for (size_t i = 0; i < values_.size(); ++i) {
      const uint32_t bits = uint32_t{from[i]} << 16;
      std::memcpy(&values_[i], &bits, sizeof(bits));
    }
    return values_.data();
  }

 private:
  std::vector<float> values_;
};

// Operands and attributes of what follows: Kernel in src/graph/kernel.rs. Each reads its call whole, and computes if
// nothing was wrong with it.

void Contract(Call& call) {
  const Array lhs = call.In(0);
  const Array out = call.Out();
  const bool is_int8 = lhs.type == ffi::DataType::U8;
  kernels::Contraction c = {};
  c.element = is_int8 ? kernels::Element::kInt8 : kernels::Element::kBf16;
  c.columns = out.Dim(-1);
  c.out = out.data;
  c.out_is_bf16 = out.type == kBf16;
  c.lhs.data = lhs.data;
  c.lhs.rows = out.Rows();
  c.lhs.channels = lhs.Dim(-1);
  c.lhs.is_image = call.Has("kernel_height");
  if (c.lhs.is_image) {
    c.lhs.height = lhs.Dim(1);
    c.lhs.width = lhs.Dim(2);
    c.lhs.out_height = out.Dim(1);
    c.lhs.out_width = out.Dim(2);
    c.lhs.kernel_height = call.Int("kernel_height");
    c.lhs.kernel_width = call.Int("kernel_width");
    c.lhs.stride_y = call.Int("stride_y");
    c.lhs.stride_x = call.Int("stride_x");
    c.lhs.low_y = call.Int("low_y");
    c.lhs.low_x = call.Int("low_x");
  }
  c.packed = call.In(1, is_int8 ? ffi::DataType::S8 : kBf16).data;
  size_t next = 2;
  if (is_int8) c.start = static_cast<const int32_t*>(call.In(next++, ffi::DataType::S32).data);
  Widened row_scale, column_scale, bias;
  if (call.Int("row_scale") != 0) c.row_scale = row_scale.Of(call.In(next++));
  if (call.Int("column_scale") != 0) c.column_scale = column_scale.Of(call.In(next++));
  if (call.Int("bias") != 0) c.bias = bias.Of(call.In(next++));
  if (call.error().empty()) kernels::Contract(c);
}

void Attention(Call& call) {
  const Array q = call.In(0, kBf16);
  const Array k = call.In(1, kBf16);
  kernels::Attention a = {};
  a.batch = q.Dim(0);
  a.queries = q.Dim(1);
  a.heads = q.Dim(2);
  a.size = q.Dim(3);
  a.keys = k.Dim(1);
  a.scale = call.Float("scale");
  a.causal = call.Int("causal") != 0;
  a.q = Bf16(q);
  a.k = Bf16(k);
  a.v = Bf16(call.In(2, kBf16));
  a.out = static_cast<uint16_t*>(call.Out(kBf16).data);
  if (call.error().empty()) kernels::Attend(a);
}

void AbsMax(Call& call) {
  const Array x = call.In(0, kBf16);
  const Array out = call.Out(kBf16);
  const bool scale = call.Int("scale") != 0;
  const int64_t rows = out.Count();
  if (!call.error().empty() || rows == 0) return;
  kernels::AbsMax(Bf16(x), rows, x.Count() / rows, scale, static_cast<uint16_t*>(out.data));
}

void Quantize(Call& call) {
  const Array x = call.In(0, kBf16);
  const Array scale = call.In(1, kBf16);
  const Array out = call.Out(ffi::DataType::U8);
  const int64_t rows = scale.Count();
  if (!call.error().empty() || rows == 0) return;
  kernels::Quantize(Bf16(x), Bf16(scale), rows, x.Count() / rows, static_cast<uint8_t*>(out.data));
}

void LayerNorm(Call& call) {
  const Array x = call.In(0, kBf16);
  const Array weight = call.In(1, kF32);
  const Array bias = call.In(2, kF32);
  const Array out = call.Out(kBf16);
  const float epsilon = call.Float("epsilon");
  if (!call.error().empty()) return;
  kernels::LayerNorm(Bf16(x), F32(weight), F32(bias), x.Rows(), x.Dim(-1), epsilon, static_cast<uint16_t*>(out.data));
}

void GroupNorm(Call& call) {
  const Array x = call.In(0, kBf16);
  kernels::GroupNormalization norm = {};
  norm.x = Bf16(x);
  norm.weight = F32(call.In(1, kF32));
  norm.bias = F32(call.In(2, kF32));
  norm.batch = x.Dim(0);
  norm.pixels = x.Dim(1) * x.Dim(2);
  norm.channels = x.Dim(3);
  norm.groups = call.Int("groups");
  norm.epsilon = call.Float("epsilon");
  norm.silu = call.Int("silu") != 0;
  norm.out = static_cast<uint16_t*>(call.Out(kBf16).data);
  if (call.error().empty()) kernels::GroupNorm(norm);
}

void Geglu(Call& call) {
  const Array x = call.In(0, kBf16);
  const Array out = call.Out(kBf16);
  if (!call.error().empty()) return;
  kernels::Geglu(Bf16(x), out.Rows(), out.Dim(-1), static_cast<uint16_t*>(out.data));
}

template <void (*kCompute)(Call&)>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  constexpr auto kImplementation = [](ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes) {
    Call call(in, out, attributes);
    kCompute(call);
    return call.error().empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(call.error());
  };
  static auto* const handler =
      ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(kImplementation).release();
  return handler->Call(frame);
}

}  // namespace

absl::Status RegisterKernels() {
  constexpr std::pair<const char*, XLA_FFI_Handler*> kCalls[] = {
      {"maxdiff.contract", Handle<Contract>},    {"maxdiff.attention", Handle<Attention>},
      {"maxdiff.abs_max", Handle<AbsMax>},       {"maxdiff.quantize", Handle<Quantize>},
      {"maxdiff.layer_norm", Handle<LayerNorm>}, {"maxdiff.group_norm", Handle<GroupNorm>},
      {"maxdiff.geglu", Handle<Geglu>},
  };
  const XLA_FFI_Api* api = ffi::GetXlaFfiApi();
  for (const auto& [name, handler] : kCalls) {
    if (XLA_FFI_Error* error = ffi::Ffi::RegisterStaticHandler(api, name, "Host", handler)) {
      const std::string message = ffi::internal::GetErrorMessage(api, error);
      ffi::internal::DestroyError(api, error);
      return absl::InternalError(absl::StrCat("cannot register the kernel ", name, ": ", message));
    }
  }
  return absl::OkStatus();
}

}  // namespace maxdiff
