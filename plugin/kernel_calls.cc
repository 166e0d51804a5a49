// Custom calls of API version 4 (typed): XLA gives each buffer with its shape, and the attributes by name. Version 3,
// which gives pointers alone, cannot be used in programs that are serialized: XLA:CPU loses whether the results of such
// a call are a tuple.
//
// A program may come from another version of maxdiff-rs, or from anywhere. So every handler checks type, rank and
// dimensions of what it is given before it computes; a kernel itself checks nothing.

#include "kernel_calls.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <new>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "isa.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// From xla/ffi/ffi_api.h, which includes headers of MLIR that TensorFlow's wheel lacks.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace maxdiff {

namespace {

namespace ffi = xla::ffi;

constexpr ffi::DataType kBf16 = ffi::DataType::BF16;
constexpr ffi::DataType kF32 = ffi::DataType::F32;
constexpr ffi::DataType kPred = ffi::DataType::PRED;
constexpr ffi::DataType kS8 = ffi::DataType::S8;
constexpr ffi::DataType kS32 = ffi::DataType::S32;
constexpr ffi::DataType kU8 = ffi::DataType::U8;
constexpr ffi::DataType kU32 = ffi::DataType::U32;

using Dims = std::vector<int64_t>;
using Types = std::initializer_list<ffi::DataType>;

// In expected dimensions: a size that is the caller's choice.
constexpr int64_t kAny = -1;

// A row-major array that XLA hands over.
struct Array {
  void* data = nullptr;
  ffi::DataType type = ffi::DataType::INVALID;
  Dims dims;

  // Counted from the end where negative; 0 for a dimension that is not there.
  int64_t Dim(int64_t i) const {
    if (i < 0) i += static_cast<int64_t>(dims.size());
    return i >= 0 && i < static_cast<int64_t>(dims.size()) ? dims[i] : 0;
  }

  int64_t Count() const { return CountOf(dims.begin(), dims.end()); }

  // Its rows: all dimensions but the last.
  int64_t Rows() const { return dims.empty() ? 1 : CountOf(dims.begin(), dims.end() - 1); }

  static int64_t CountOf(Dims::const_iterator begin, Dims::const_iterator end) {
    return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
  }
};

// `BF16|F32[2,*,3]`.
std::string ShapeText(Types types, const Dims& dims) {
  std::ostringstream text;
  for (const ffi::DataType& type : types) text << (&type == types.begin() ? "" : "|") << type;
  text << "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text << (i == 0 ? "" : ",");
    if (dims[i] == kAny) {
      text << "*";
    } else {
      text << dims[i];
    }
  }
  text << "]";
  return text.str();
}

std::string ShapeText(const Array& array) { return ShapeText({array.type}, array.dims); }

// Operands, result and attributes of a call, each checked as it is read. Once something is wrong, what is read is
// empty, and `Ok` says no.
class Call {
 public:
  Call(ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes)
      : in_(in), out_(out), attributes_(attributes) {}

  bool HasMoreOperands() const { return next_ < in_.size(); }

  // The next operand, whatever it is; `name` is for messages.
  Array Operand(const char* name) {
    const size_t index = next_++;
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = in_.get<ffi::AnyBuffer>(index);
    if (buffer.has_value()) return ArrayOf(*buffer);
    Fail("operand ", index, " (", name, ") is missing");
    return {};
  }

  // The next operand, of one of `types` and of dimensions `dims`.
  Array Operand(const char* name, Types types, const Dims& dims) {
    Array array = Operand(name);
    if (!Ok()) return {};
    if (Fits(array, types, dims)) return array;
    Fail("operand ", next_ - 1, " (", name, "): expected ", ShapeText(types, dims), ", found ", ShapeText(array));
    return {};
  }

  Array Result() {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = out_.get<ffi::AnyBuffer>(0);
    if (buffer.has_value() && out_.size() == 1) return ArrayOf(**buffer);
    Fail("expected 1 result, found ", out_.size());
    return {};
  }

  // Result `index` of several, of the type and the dimensions of an operand.
  void* ResultLike(size_t index, const Array& operand) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = out_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) {
      Fail("result ", index, " is missing");
      return nullptr;
    }
    const Array array = ArrayOf(**buffer);
    if (Fits(array, {operand.type}, operand.dims)) return array.data;
    Fail("result ", index, ": expected ", ShapeText(operand), ", found ", ShapeText(array));
    return nullptr;
  }

  // The result, of one of `types` and of dimensions `dims`.
  Array Result(Types types, const Dims& dims) {
    Array array = Result();
    if (!Ok()) return {};
    if (Fits(array, types, dims)) return array;
    Fail("the result: expected ", ShapeText(types, dims), ", found ", ShapeText(array));
    return {};
  }

  bool Has(std::string_view name) const { return attributes_.contains(name); }

  int64_t Int(std::string_view name, int64_t low, int64_t high) {
    const int64_t value = Attribute<int64_t>(name);
    if (!Ok()) return low;
    if (low <= value && value <= high) return value;
    Fail("attribute ", name, " is ", value, ", expected ", low, " to ", high);
    return low;
  }

  bool Flag(std::string_view name) { return Int(name, 0, 1) != 0; }

  float Float(std::string_view name) { return Attribute<float>(name); }

  // Notes something that is wrong; what is noted first counts.
  template <typename... Parts>
  void Fail(const Parts&... what) {
    if (error_.empty()) error_ = absl::StrCat(what...);
  }

  // Whether nothing is wrong so far.
  bool Ok() const { return error_.empty(); }

  // Whether the call is what the kernel takes: to be asked when all was read.
  bool IsWhole() {
    if (next_ != in_.size()) Fail("takes ", next_, " operands, found ", in_.size());
    return Ok();
  }

  // What is wrong; empty if nothing is.
  const std::string& error() const { return error_; }

 private:
  static Array ArrayOf(const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    return {buffer.untyped_data(), buffer.element_type(), Dims(dims.begin(), dims.end())};
  }

  static bool Fits(const Array& array, Types types, const Dims& dims) {
    const auto is_wanted = [](int64_t found, int64_t wanted) { return wanted == kAny || wanted == found; };
    return std::find(types.begin(), types.end(), array.type) != types.end() &&
           std::equal(array.dims.begin(), array.dims.end(), dims.begin(), dims.end(), is_wanted);
  }

  template <typename T>
  T Attribute(std::string_view name) {
    const ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Fail("attribute ", name, ": ", value.error().message());
    return {};
  }

  ffi::RemainingArgs in_;
  ffi::RemainingRets out_;
  ffi::Dictionary attributes_;
  size_t next_ = 0;
  std::string error_;
};

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

// Operands and attributes of what follows: Kernel in src/backend/cpu/kernel.rs. Each reads its call whole, and computes if
// nothing was wrong with it.

// Bounds of a window's attributes, so that products of them with dimensions do not overflow.
constexpr int64_t kMaxWindow = 1 << 15;

// The images that a convolution reads, and the size of its result's by the attributes of its window.
kernels::Patches ImagePatches(Call& call, const Array& lhs) {
  kernels::Patches p = {};
  p.is_image = true;
  p.height = lhs.Dim(1);
  p.width = lhs.Dim(2);
  p.kernel_height = call.Int("kernel_height", 1, kMaxWindow);
  p.kernel_width = call.Int("kernel_width", 1, kMaxWindow);
  p.stride_y = call.Int("stride_y", 1, kMaxWindow);
  p.stride_x = call.Int("stride_x", 1, kMaxWindow);
  p.low_y = call.Int("low_y", 0, kMaxWindow);
  p.low_x = call.Int("low_x", 0, kMaxWindow);
  const int64_t padded_height = p.height + p.low_y + call.Int("high_y", 0, kMaxWindow);
  const int64_t padded_width = p.width + p.low_x + call.Int("high_x", 0, kMaxWindow);
  if (padded_height < p.kernel_height || padded_width < p.kernel_width) {
    call.Fail("a window of ", p.kernel_height, "x", p.kernel_width, " is larger than the padded image of ",
              padded_height, "x", padded_width);
  }
  p.out_height = (padded_height - p.kernel_height) / p.stride_y + 1;
  p.out_width = (padded_width - p.kernel_width) / p.stride_x + 1;
  return p;
}

void Contract(Call& call) {
  const Array lhs = call.Operand("lhs");
  const bool is_int8 = lhs.type == kU8;
  const bool is_float = lhs.type == kF32;
  const int64_t group = is_int8 ? 4 : is_float ? 1 : 2;
  const bool is_image = call.Has("kernel_height");
  if ((!is_int8 && !is_float && lhs.type != kBf16) || (is_image ? lhs.dims.size() != 4 : lhs.dims.empty()) ||
      lhs.Dim(-1) < group || lhs.Dim(-1) % group != 0) {
    call.Fail("operand 0 (lhs): expected BF16|F32|U8 of ", is_image ? "4 dimensions" : "1 or more dimensions",
              ", the last a multiple of ", group, ", found ", ShapeText(lhs));
  }
  kernels::Contraction c = {};
  Dims out_dims = lhs.dims;
  int64_t taps = 1;
  if (is_image && call.Ok()) {
    c.lhs = ImagePatches(call, lhs);
    out_dims[1] = c.lhs.out_height;
    out_dims[2] = c.lhs.out_width;
    taps = c.lhs.kernel_height * c.lhs.kernel_width;
  }
  if (call.Ok()) out_dims.back() = kAny;
  const Array out = call.Result({kBf16, kF32}, out_dims);
  c.element = is_int8 ? kernels::Element::kInt8 : is_float ? kernels::Element::kFloat : kernels::Element::kBf16;
  c.columns = out.Dim(-1);
  c.out = out.data;
  c.out_is_bf16 = out.type == kBf16;
  c.lhs.data = lhs.data;
  c.lhs.rows = out.Rows();
  c.lhs.channels = lhs.Dim(-1);

  const int64_t blocks = (c.columns + 15) / 16;
  const int64_t groups_of_k = taps * c.lhs.channels / group;
  Widened group_scale, zero_point;
  if (call.Has("stored_bits")) {
    // Integers that become bf16.
    const int64_t bits = call.Int("stored_bits", 4, 8);
    const bool is_int4 = bits == 4;
    if (bits != 4 && bits != 8) call.Fail("attribute stored_bits is ", bits, ", expected 4 or 8");
    if (is_int8 || is_float) call.Fail("operand 0 (lhs): expected BF16 for weights that are stored in integers, found ", ShapeText(lhs));
    c.stored = is_int4 ? kernels::Stored::kInt4 : kernels::Stored::kInt8;
    c.packed = is_int4 ? call.Operand("packed rhs", {kU8}, {blocks, groups_of_k, 16}).data
                       : call.Operand("packed rhs", {kS8}, {blocks, groups_of_k, 16, group}).data;
    c.scale_groups = call.Int("scale_groups", 0, std::max<int64_t>(c.lhs.channels / group, 0));
    if (c.scale_groups > 0) {
      if (c.lhs.channels / group % c.scale_groups != 0) {
        call.Fail("attribute scale_groups is ", c.scale_groups, ", which does not divide ", c.lhs.channels / group,
                  " pairs of channels");
      }
      const Dims dims = {blocks, c.scale_groups, 16};
      c.group_scale = group_scale.Of(call.Operand("group_scale", {kF32, kBf16}, dims));
      if (call.Flag("zero_point")) c.zero_point = zero_point.Of(call.Operand("zero_point", {kF32, kBf16}, dims));
    }
  } else {
    c.packed = call.Operand("packed rhs", {is_int8 ? kS8 : lhs.type}, {blocks, groups_of_k, 16, group}).data;
  }
  if (is_int8) c.start = static_cast<const int32_t*>(call.Operand("start", {kS32}, {blocks * 16}).data);
  Widened row_scale, column_scale, bias;
  if (call.Flag("row_scale")) {
    out_dims = out.dims;
    if (!out_dims.empty()) out_dims.pop_back();
    c.row_scale = row_scale.Of(call.Operand("row_scale", {kF32, kBf16}, out_dims));
  }
  if (call.Flag("column_scale")) {
    c.column_scale = column_scale.Of(call.Operand("column_scale", {kF32, kBf16}, {c.columns}));
  }
  if (call.Flag("bias")) c.bias = bias.Of(call.Operand("bias", {kF32, kBf16}, {c.columns}));
  if (call.IsWhole()) kernels::Used().contract(c);
}

// A matrix [lines, k], or [k, lines] if transposed.
kernels::FloatOperand Matrix(const Array& x, bool transposed) {
  kernels::FloatOperand operand = {};
  operand.data = F32(x);
  operand.lines = x.Dim(transposed ? 1 : 0);
  operand.pieces = 1;
  operand.channels = x.Dim(transposed ? 0 : 1);
  operand.transposed = transposed;
  return operand;
}

// Multiply-adds of int8 whose sum fits 32 bits, whatever the values are: 255 * 128 * 65,000 < 2^31.
constexpr int64_t kMostTerms = 65000;

void QuantizedProduct(Call& call) {
  kernels::QuantizedProduct p = {};
  Dims out_dims;
  if (call.Has("kernel_height")) {
    const Array lhs = call.Operand("lhs", {kF32}, {kAny, kAny, kAny, kAny});
    if (call.Ok()) p.patches = ImagePatches(call, lhs);
    const Array rhs = call.Operand("rhs", {kF32}, {kAny, p.patches.kernel_height, p.patches.kernel_width, lhs.Dim(3)});
    p.lhs = {F32(lhs), lhs.Dim(0), lhs.Dim(1) * lhs.Dim(2), lhs.Dim(3), true, false};
    p.rhs = {F32(rhs), rhs.Dim(0), rhs.Dim(1) * rhs.Dim(2), rhs.Dim(3), false, false};
    out_dims = {lhs.Dim(0), p.patches.out_height, p.patches.out_width, rhs.Dim(0)};
  } else {
    const Array lhs = call.Operand("lhs", {kF32}, {kAny, kAny});
    p.lhs = Matrix(lhs, call.Flag("lhs_transposed"));
    const bool transposed = call.Flag("rhs_transposed");
    const int64_t k = p.lhs.channels;
    p.rhs = Matrix(call.Operand("rhs", {kF32}, transposed ? Dims{k, kAny} : Dims{kAny, k}), transposed);
    out_dims = {p.lhs.lines, p.rhs.lines};
  }
  const int64_t terms = p.rhs.pieces * p.rhs.channels;
  if (call.Ok() && (terms < 1 || terms > kMostTerms)) {
    call.Fail("operand 1 (rhs): expected 1 to ", kMostTerms, " terms of each sum, found ", terms);
  }
  p.in_bf16 = call.Flag("in_bf16");
  p.stochastic = call.Flag("stochastic");
  if (p.stochastic) {
    const auto* key = static_cast<const uint32_t*>(call.Operand("key", {kU32}, {2}).data);
    if (call.Ok()) p.key = {key[0], key[1]};
  }
  if (call.Flag("bias")) p.bias = F32(call.Operand("bias", {kF32}, {p.rhs.lines}));
  const Array out = call.Result({kF32}, out_dims);
  p.patches.rows = out.Rows();
  p.out = static_cast<float*>(out.data);
  if (call.IsWhole()) kernels::Used().multiply_quantized(p);
}

// A matrix [count, channels], or [channels, count] if transposed.
kernels::Columns MatrixColumns(const Array& x, bool transposed) {
  kernels::Columns columns = {};
  columns.data = x.data;
  columns.is_int8 = x.type == kS8;
  columns.count = x.Dim(transposed ? 1 : 0);
  columns.channels = x.Dim(transposed ? 0 : 1);
  columns.taps = 1;
  columns.column_stride = transposed ? 1 : columns.channels;
  columns.channel_stride = transposed ? columns.count : 1;
  return columns;
}

// A convolution's kernel [count, channels, height, width]; of the derivative by its image [channels, count, height, width].
kernels::Columns KernelColumns(const Array& x, bool image_gradient) {
  kernels::Columns columns = {};
  columns.data = x.data;
  columns.is_int8 = x.type == kS8;
  columns.count = x.Dim(image_gradient ? 1 : 0);
  columns.channels = x.Dim(image_gradient ? 0 : 1);
  columns.taps = x.Dim(2) * x.Dim(3);
  columns.column_stride = image_gradient ? columns.taps : columns.channels * columns.taps;
  columns.channel_stride = image_gradient ? columns.count * columns.taps : columns.taps;
  columns.reversed = image_gradient;
  return columns;
}

void Product(Call& call) {
  kernels::Product p = {};
  Dims out_dims;
  if (call.Has("kernel_height")) {
    const Array lhs = call.Operand("lhs", {kBf16}, {kAny, kAny, kAny, kAny});
    if (call.Ok()) p.lhs = ImagePatches(call, lhs);
    p.lhs.data = lhs.data;
    p.lhs.channels = lhs.Dim(3);
    const bool image_gradient = call.Flag("image_gradient");
    Dims dims = {kAny, lhs.Dim(3), p.lhs.kernel_height, p.lhs.kernel_width};
    if (image_gradient) std::swap(dims[0], dims[1]);
    p.columns = KernelColumns(call.Operand("rhs", {kBf16, kS8}, dims), image_gradient);
    out_dims = {lhs.Dim(0), p.lhs.out_height, p.lhs.out_width, p.columns.count};
  } else {
    const Array lhs = call.Operand("lhs", {kBf16}, {kAny, kAny});
    p.lhs_transposed = call.Flag("lhs_transposed");
    const bool transposed = call.Flag("rhs_transposed");
    const int64_t k = lhs.Dim(p.lhs_transposed ? 0 : 1);
    p.lhs.data = lhs.data;
    p.lhs.channels = k;
    const Dims dims = transposed ? Dims{k, kAny} : Dims{kAny, k};
    p.columns = MatrixColumns(call.Operand("rhs", {kBf16, kS8}, dims), transposed);
    out_dims = {lhs.Dim(p.lhs_transposed ? 1 : 0), p.columns.count};
  }
  const bool any_count = p.lhs_transposed && p.columns.column_stride == 1;
  if (call.Ok() && (p.columns.channels < 1 || (p.columns.channels % 2 != 0 && !any_count))) {
    call.Fail("operand 0 (lhs): expected an even number of channels, found ", p.columns.channels);
  }
  if (call.Flag("scale")) p.scale = F32(call.Operand("scale", {kF32}, {p.columns.count}));
  if (call.Flag("bias")) p.bias = F32(call.Operand("bias", {kF32}, {p.columns.count}));
  const Array out = call.Result({kBf16, kF32}, out_dims);
  p.lhs.rows = out.Rows();
  p.out = out.data;
  p.out_is_bf16 = out.type == kBf16;
  if (call.IsWhole()) kernels::Used().multiply(p);
}

void KernelGradient(Call& call) {
  kernels::KernelGradient g = {};
  const Array gradient = call.Operand("gradient", {kBf16}, {kAny, kAny, kAny, kAny});
  const Array image = call.Operand("image", {kBf16}, {gradient.Dim(0), kAny, kAny, kAny});
  if (call.Ok()) g.image = ImagePatches(call, image);
  g.gradient = Bf16(gradient);
  g.features = gradient.Dim(3);
  g.image.data = image.data;
  g.image.rows = gradient.Rows();
  g.image.channels = image.Dim(3);
  const bool fits = gradient.Dim(1) == g.image.out_height && gradient.Dim(2) == g.image.out_width && g.image.rows > 0;
  if (call.Ok() && !fits) {
    call.Fail("operand 0 (gradient): expected ", g.image.out_height, "x", g.image.out_width, " places, found ",
              ShapeText(gradient));
  }
  const Array out =
      call.Result({kBf16, kF32}, {g.features, g.image.channels, g.image.kernel_height, g.image.kernel_width});
  g.out = out.data;
  g.out_is_bf16 = out.type == kBf16;
  if (call.IsWhole()) kernels::Used().find_kernel_gradient(g);
}

void AdamW8bit(Call& call) {
  kernels::AdamW8bit step = {};
  const Array weight = call.Operand("weight");
  if (weight.type != kBf16 && weight.type != kF32) {
    call.Fail("operand 0 (weight): expected BF16 or F32, found ", ShapeText(weight));
  }
  step.count = weight.Count();
  step.weight = weight.data;
  step.weight_is_bf16 = weight.type == kBf16;
  step.out = call.ResultLike(0, weight);
  const Dims blocks = {(step.count + kernels::kAdamWBlock - 1) / kernels::kAdamWBlock};
  for (size_t at = 0; at < 2; ++at) {
    const Array codes = call.Operand("codes", {kU8}, weight.dims);
    const Array largest = call.Operand("largest", {kF32}, blocks);
    kernels::AdamW8bit::Moment& moment = step.moments[at];
    moment.codes = static_cast<const uint8_t*>(codes.data);
    moment.largest = F32(largest);
    moment.out_codes = static_cast<uint8_t*>(call.ResultLike(1 + 2 * at, codes));
    moment.out_largest = static_cast<float*>(call.ResultLike(2 + 2 * at, largest));
    moment.keep = call.Float(at == 0 ? "keep_first" : "keep_second");
    moment.add = call.Float(at == 0 ? "add_first" : "add_second");
  }
  const Array gradient = call.Operand("gradient", {kBf16, kF32}, weight.dims);
  step.gradient = gradient.data;
  step.gradient_is_bf16 = gradient.type == kBf16;
  const float* scalars = F32(call.Operand("scalars", {kF32}, {5}));
  step.epsilon = call.Float("epsilon");
  step.weight_decay = call.Float("weight_decay");
  step.stochastic = call.Has("salt");
  if (step.stochastic) {
    const auto* key = static_cast<const uint32_t*>(call.Operand("key", {kU32}, {2}).data);
    const auto salt = static_cast<uint32_t>(call.Int("salt", 0, std::numeric_limits<uint32_t>::max()));
    if (call.Ok()) step.key = {key[0] + salt, key[1]};
  }
  if (!call.IsWhole()) return;
  step.factor = scalars[0];
  step.rate = scalars[1];
  step.corrections[0] = scalars[2];
  step.corrections[1] = scalars[3];
  step.counts = scalars[4] > 0;
  kernels::Used().step_adamw_8bit(step);
}

// The query `q`, the key and the value of an attention, and its sizes and scale.
template <typename T>
kernels::AttentionOf<T> AttentionOperands(Call& call, const Array& q) {
  const Array k = call.Operand("key", {q.type}, {q.Dim(0), kAny, q.Dim(2), q.Dim(3)});
  const Array v = call.Operand("value", {q.type}, k.dims);
  if (q.type == kBf16 && q.Dim(3) % 2 != 0) {
    call.Fail("operand 0 (query): expected an even last dimension, found ", ShapeText(q));
  }
  kernels::AttentionOf<T> a = {};
  a.batch = q.Dim(0);
  a.queries = q.Dim(1);
  a.heads = q.Dim(2);
  a.size = q.Dim(3);
  a.keys = k.Dim(1);
  a.scale = call.Float("scale");
  a.q = static_cast<const T*>(q.data);
  a.k = static_cast<const T*>(k.data);
  a.v = static_cast<const T*>(v.data);
  return a;
}

const Dims kOfHeads = {kAny, kAny, kAny, kAny};

// Computes an attention whose query is `q`.
template <typename T>
void AttentionAs(Call& call, const Array& q, void (*attend)(const kernels::AttentionOf<T>&)) {
  kernels::AttentionOf<T> a = AttentionOperands<T>(call, q);
  a.out = static_cast<T*>(call.Result({q.type}, {a.batch, a.queries, a.heads, a.size}).data);
  a.causal = call.Flag("causal");
  if (!a.causal && call.HasMoreOperands()) {
    a.visible = static_cast<const bool*>(call.Operand("mask", {kPred}, {a.batch, a.keys}).data);
  }
  if (call.IsWhole()) attend(a);
}

void Attention(Call& call) {
  const Array q = call.Operand("query", {kBf16, kF32}, kOfHeads);
  if (q.type == kF32) return AttentionAs<float>(call, q, kernels::Used().attend_f32);
  AttentionAs<uint16_t>(call, q, kernels::Used().attend);
}

void AttentionGradient(Call& call) {
  kernels::AttentionGradient g = {};
  g.of = AttentionOperands<uint16_t>(call, call.Operand("query", {kBf16}, kOfHeads));
  const Dims of_queries = {g.of.batch, g.of.queries, g.of.heads, g.of.size};
  const Dims of_keys = {g.of.batch, g.of.keys, g.of.heads, g.of.size};
  g.result = Bf16(call.Operand("result", {kBf16}, of_queries));
  g.gradient = Bf16(call.Operand("gradient", {kBf16}, of_queries));
  g.of_q = static_cast<uint16_t*>(call.ResultLike(0, {nullptr, kBf16, of_queries}));
  g.of_k = static_cast<uint16_t*>(call.ResultLike(1, {nullptr, kBf16, of_keys}));
  g.of_v = static_cast<uint16_t*>(call.ResultLike(2, {nullptr, kBf16, of_keys}));
  if (call.IsWhole()) kernels::Used().find_attention_gradient(g);
}

// Checks that `leading` has the first dimensions of x, and gives how many values of x belong to each of its values.
int64_t ValuesOfEach(Call& call, const Array& x, const Array& leading, const char* name) {
  const size_t rank = leading.dims.size();
  const bool fits = rank <= x.dims.size() && std::equal(leading.dims.begin(), leading.dims.end(), x.dims.begin());
  if (!fits) call.Fail(name, ": expected leading dimensions of ", ShapeText(x), ", found ", ShapeText(leading));
  return fits ? Array::CountOf(x.dims.begin() + rank, x.dims.end()) : 0;
}

void AbsMax(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16) call.Fail("operand 0 (x): expected BF16, found ", ShapeText(x));
  const Array out = call.Result();
  if (out.type != kBf16) call.Fail("the result: expected BF16, found ", ShapeText(out));
  const int64_t size = ValuesOfEach(call, x, out, "the result");
  const bool scale = call.Flag("scale");
  if (!call.IsWhole()) return;
  kernels::Used().abs_max(Bf16(x), out.Count(), size, scale, static_cast<uint16_t*>(out.data));
}

void Quantize(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16) call.Fail("operand 0 (x): expected BF16, found ", ShapeText(x));
  const Array scale = call.Operand("scale");
  if (scale.type != kBf16) call.Fail("operand 1 (scale): expected BF16, found ", ShapeText(scale));
  const int64_t size = ValuesOfEach(call, x, scale, "operand 1 (scale)");
  const Array out = call.Result({kU8}, x.dims);
  if (!call.IsWhole()) return;
  kernels::Used().quantize(Bf16(x), Bf16(scale), scale.Count(), size, static_cast<uint8_t*>(out.data));
}

void LayerNorm(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16 || x.dims.empty()) {
    call.Fail("operand 0 (x): expected BF16 of 1 or more dimensions, found ", ShapeText(x));
  }
  const Array weight = call.Operand("weight", {kF32}, {x.Dim(-1)});
  const Array bias = call.Operand("bias", {kF32}, {x.Dim(-1)});
  const Array out = call.Result({kBf16}, x.dims);
  const float epsilon = call.Float("epsilon");
  if (!call.IsWhole()) return;
  kernels::Used().layer_norm(Bf16(x), F32(weight), F32(bias), x.Rows(), x.Dim(-1), epsilon, static_cast<uint16_t*>(out.data));
}

// The image, weight and bias of a group norm, and its attributes.
kernels::GroupNormalization GroupNormOperands(Call& call, const Array& x) {
  kernels::GroupNormalization norm = {};
  norm.x = Bf16(x);
  norm.weight = F32(call.Operand("weight", {kF32}, {x.Dim(3)}));
  norm.bias = F32(call.Operand("bias", {kF32}, {x.Dim(3)}));
  norm.batch = x.Dim(0);
  norm.pixels = x.Dim(1) * x.Dim(2);
  norm.channels = x.Dim(3);
  norm.groups = call.Int("groups", 1, std::numeric_limits<int64_t>::max());
  norm.epsilon = call.Float("epsilon");
  norm.silu = call.Flag("silu");
  if (norm.channels % norm.groups != 0) {
    call.Fail("operand 0 (x): expected channels that divide into ", norm.groups, " groups, found ", ShapeText(x));
  }
  return norm;
}

void GroupNorm(Call& call) {
  const Array x = call.Operand("x", {kBf16}, {kAny, kAny, kAny, kAny});
  kernels::GroupNormalization norm = GroupNormOperands(call, x);
  norm.out = static_cast<uint16_t*>(call.Result({kBf16}, x.dims).data);
  if (call.IsWhole()) kernels::Used().group_norm(norm);
}

// The results for the gradients of a norm's x, weight and bias; the latter two if asked for.
template <typename Gradient>
void NormResults(Call& call, const Array& x, Gradient& g) {
  g.of_x = static_cast<uint16_t*>(call.ResultLike(0, x));
  if (!call.Flag("affine")) return;
  const Array of_channels = {nullptr, kF32, {x.Dim(-1)}};
  g.of_weight = static_cast<float*>(call.ResultLike(1, of_channels));
  g.of_bias = static_cast<float*>(call.ResultLike(2, of_channels));
}

void GroupNormGradient(Call& call) {
  const Array x = call.Operand("x", {kBf16}, {kAny, kAny, kAny, kAny});
  kernels::GroupNormGradient g = {};
  g.of = GroupNormOperands(call, x);
  g.gradient = Bf16(call.Operand("gradient", {kBf16}, x.dims));
  NormResults(call, x, g);
  if (call.IsWhole()) kernels::Used().find_group_norm_gradient(g);
}

void LayerNormGradient(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16 || x.Dim(-1) == 0) {
    call.Fail("operand 0 (x): expected BF16 of 1 or more features, found ", ShapeText(x));
  }
  kernels::LayerNormGradient g = {};
  g.x = Bf16(x);
  g.weight = F32(call.Operand("weight", {kF32}, {x.Dim(-1)}));
  call.Operand("bias", {kF32}, {x.Dim(-1)});
  g.gradient = Bf16(call.Operand("gradient", {kBf16}, x.dims));
  g.rows = x.Rows();
  g.k = x.Dim(-1);
  g.epsilon = call.Float("epsilon");
  NormResults(call, x, g);
  if (call.IsWhole()) kernels::Used().find_layer_norm_gradient(g);
}

void SumOfSquares(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16 && x.type != kF32) call.Fail("operand 0 (x): expected BF16 or F32, found ", ShapeText(x));
  const Array out = call.Result({kF32}, {});
  if (!call.IsWhole()) return;
  *static_cast<float*>(out.data) = kernels::Used().sum_squares(x.data, x.type == kBf16, x.Count());
}

void GegluGradient(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16 || x.dims.empty() || x.Dim(-1) % 2 != 0) {
    call.Fail("operand 0 (x): expected BF16 of an even last dimension, found ", ShapeText(x));
  }
  Dims dims = x.dims;
  if (!dims.empty()) dims.back() /= 2;
  const Array gradient = call.Operand("gradient", {kBf16}, dims);
  void* out = call.ResultLike(0, x);
  if (!call.IsWhole()) return;
  kernels::Used().find_geglu_gradient(Bf16(x), Bf16(gradient), gradient.Rows(), gradient.Dim(-1),
                                      static_cast<uint16_t*>(out));
}

void Geglu(Call& call) {
  const Array x = call.Operand("x");
  if (x.type != kBf16 || x.dims.empty() || x.Dim(-1) % 2 != 0) {
    call.Fail("operand 0 (x): expected BF16 of an even last dimension, found ", ShapeText(x));
  }
  Dims dims = x.dims;
  if (!dims.empty()) dims.back() /= 2;
  const Array out = call.Result({kBf16}, dims);
  if (!call.IsWhole()) return;
  kernels::Used().geglu(Bf16(x), out.Rows(), out.Dim(-1), static_cast<uint16_t*>(out.data));
}

struct Kernel {
  const char* name;
  void (*compute)(Call&);
};

constexpr Kernel kKernels[] = {
    {"maxdiff.contract", Contract},    {"maxdiff.attention", Attention},  {"maxdiff.abs_max", AbsMax},
    {"maxdiff.quantize", Quantize},    {"maxdiff.layer_norm", LayerNorm}, {"maxdiff.group_norm", GroupNorm},
    {"maxdiff.geglu", Geglu},          {"maxdiff.quantized_product", QuantizedProduct},
    {"maxdiff.product", Product},      {"maxdiff.kernel_gradient", KernelGradient},
    {"maxdiff.adamw_8bit", AdamW8bit}, {"maxdiff.attention_gradient", AttentionGradient},
    {"maxdiff.layer_norm_gradient", LayerNormGradient}, {"maxdiff.group_norm_gradient", GroupNormGradient},
    {"maxdiff.geglu_gradient", GegluGradient}, {"maxdiff.sum_of_squares", SumOfSquares},
};

// Computes a call. Nothing that goes wrong in it ends the process.
ffi::Error Compute(const Kernel& kernel, Call call) {
  try {
    kernel.compute(call);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, absl::StrCat(kernel.name, ": out of host memory"));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(absl::StrCat(kernel.name, ": ", error.what()));
  }
  if (call.Ok()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(absl::StrCat(kernel.name, ": ", call.error()));
}

template <size_t kIndex>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  constexpr auto kImplementation = [](ffi::RemainingArgs in, ffi::RemainingRets out, ffi::Dictionary attributes) {
    return Compute(kKernels[kIndex], Call(in, out, attributes));
  };
  static auto* const handler =
      ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(kImplementation).release();
  return handler->Call(frame);
}

absl::Status Register(const char* name, XLA_FFI_Handler* handler) {
  const XLA_FFI_Api* api = ffi::GetXlaFfiApi();
  XLA_FFI_Error* error = ffi::Ffi::RegisterStaticHandler(api, name, "Host", handler);
  if (error == nullptr) return absl::OkStatus();
  const std::string message = ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
  return absl::InternalError(absl::StrCat("cannot register the kernel ", name, ": ", message));
}

template <size_t... kIndices>
absl::Status RegisterAll(std::index_sequence<kIndices...>) {
  absl::Status status;
  // Up to the first that fails.
  (void)((status = Register(kKernels[kIndices].name, Handle<kIndices>)).ok() && ...);
  return status;
}

}  // namespace

absl::Status RegisterKernels() {
  if (!kernels::Supported()) return absl::OkStatus();
  return RegisterAll(std::make_index_sequence<std::size(kKernels)>());
}

std::string KernelNames() {
  std::string names;
  if (!kernels::Supported()) return names;
  for (const Kernel& kernel : kKernels) absl::StrAppend(&names, names.empty() ? "" : ",", kernel.name);
  return names;
}

}  // namespace maxdiff
