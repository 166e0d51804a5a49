// Contractions that XLA's CPU backend computes slowly, as functions over plain memory.
//
// Each instruction set that they are compiled for has a table of them; which one a process uses is decided in isa.cc.
// int8 products are the same whatever is used; sums of bf16 products differ by the order in which f32 is rounded.
// Weights come packed, so that one load gives what 16 columns multiply: packed[column / 16][k / group][column % 16]
// [k % group], with the columns padded by zeros to a multiple of 16 and a group of 1 (f32), 2 (bf16) or 4 (int8) values.
//
// Where a rounding is promised, it is made: the plugin is compiled with -ffp-contract=off, and what is a fused
// multiply-add is written as one.

#ifndef MAXDIFF_PLUGIN_KERNELS_H_
#define MAXDIFF_PLUGIN_KERNELS_H_

#include <cstdint>

namespace maxdiff::kernels {

enum class Element { kBf16, kInt8, kFloat };

// How packed weights are stored: as they are multiplied, or, for products of bf16, in integers that become bf16 where they
// are multiplied. They lie in the same order, int8 as bytes; of int4 the two values of a group share a byte, the first in
// its lower half.
enum class Stored { kAsMultiplied, kInt8, kInt4 };

// Rows of the lhs, or patches of an image: of kernel places `taps`, each `channels` long. A matrix [rows, k] is one
// tap of k channels. An image is [batch, height, width, channels]; its rows are the output's pixels.
struct Patches {
  const void* data;
  int64_t rows;
  int64_t channels;
  bool is_image;
  int64_t height, width;
  int64_t out_height, out_width;
  int64_t kernel_height, kernel_width;
  int64_t stride_y, stride_x;
  int64_t low_y, low_x;  // Padding above and on the left.
};

// out[r, n] = (start[n] + sum_k lhs[r, k] rhs[k, n]) * row_scale[r] * column_scale[n] + bias[n], each step rounded to
// f32, and the end to the result's type. What is null is left out. An int8 lhs is unsigned: the value plus 128, with
// padding of 128; `start` takes the 128 out again.
//
// Where weights are stored in integers, rhs is (integer - zero_point) * scale, in f32 and rounded to bf16, for each of
// `scale_groups` parts of the channels of a kernel place: [columns / 16][scale_groups][16], the zero points may be null. Without
// `group_scale` it is the integer.
struct Contraction {
  Element element;
  Stored stored;
  Patches lhs;
  int64_t columns;
  const void* packed;
  int64_t scale_groups;
  const float* group_scale;
  const float* zero_point;
  const int32_t* start;
  const float* row_scale;
  const float* column_scale;
  const float* bias;
  void* out;
  bool out_is_bf16;
  int64_t out_stride;  // Values from a row to the next; 0 where rows follow each other.
};

// An f32 operand that is rounded to int8, by AQT's numerics, where it is multiplied. `lines` of it have a range of their own: the
// rows of the lhs, or the images of a convolution; the columns of the rhs. A line has `pieces` of `channels` values of
// k each: a rhs of a convolution one for each kernel place, an image one for each pixel, which is a row then.
// [lines, pieces, channels], or [channels, lines] if transposed, with one piece.
struct FloatOperand {
  const float* data;
  int64_t lines, pieces, channels;
  bool pieces_are_rows;
  bool transposed;

  int64_t Count() const { return lines * pieces * channels; }
};

// The key of the noise for stochastic rounding, with the stream's part in it.
struct RoundingKey {
  uint32_t high, low;
};

// out = rounded lhs * rounded rhs * row_scale * column_scale + bias, all f32. The lhs is rounded stochastically if
// asked for. With `in_bf16` operands are values of bf16, and scales and each step of rounding are rounded to bf16 too.
// `patches` says what rows of the lhs are multiplied; its data and channels are not read.
struct QuantizedProduct {
  FloatOperand lhs, rhs;
  bool stochastic, in_bf16;
  RoundingKey key;
  Patches patches;
  const float* bias;
  float* out;
};

// Columns of bf16, or of int8, that are packed where they are multiplied. The value of a column at a kernel place and a channel is
// data[column * column_stride + channel * channel_stride + place], the places counted from the last if `reversed`. Without
// places one of the strides is 1.
struct Columns {
  const void* data;
  bool is_int8;
  int64_t count, channels, taps;
  int64_t column_stride, channel_stride;
  bool reversed;
};

// out = lhs columns * scale + bias, of bf16 with sums in f32; `scale` and `bias`, of each column, may be null. The lhs is bf16, of an even number of channels; or
// a matrix [columns.channels, rows] if transposed, whose `channels` are not read. Columns whose channels lie one after the
// other, and those with places, have an even number of channels too.
struct Product {
  Patches lhs;
  bool lhs_transposed;
  Columns columns;
  const float* scale;
  const float* bias;
  void* out;
  bool out_is_bf16;
};

// out[feature, channel, place] = the sum over all rows of gradient[row, feature] times the channel of `image` that is at the
// place of the row's patch: the derivative of a convolution's kernel. All bf16, with sums in f32.
struct KernelGradient {
  const uint16_t* gradient;
  int64_t features;
  Patches image;
  void* out;
  bool out_is_bf16;
};

constexpr int64_t kAdamWBlock = 256;

// A step of AdamW on `count` values whose moments are codes of 8 bits in blocks of 256; `largest` has a value for each block. The
// gradient is multiplied by `factor`. What comes out may lie where it was, and is what it was unless the step `counts`. A weight in
// bf16 is rounded at random if asked for.
struct AdamW8bit {
  struct Moment {
    const uint8_t* codes;
    const float* largest;
    uint8_t* out_codes;
    float* out_largest;
    // new = old * keep + gradient, or its square, * add.
    float keep, add;
  };

  int64_t count;
  // Of the first value, for the random bits.
  int64_t position;
  const void* weight;
  void* out;
  bool weight_is_bf16;
  const void* gradient;
  bool gradient_is_bf16;
  Moment moments[2];
  float factor, rate, corrections[2], epsilon, weight_decay;
  bool counts, stochastic;
  RoundingKey key;
};

// out = softmax(q k^T * scale) v for each head, all bf16 or all f32: q and out [batch, queries, heads * size], k and v
// [batch, keys, heads * size]; `size` is even in bf16. If causal, a query sees the keys up to its own place. If not, `visible`
// [batch, keys] may say which keys queries see; where there are none, out is the mean of v. Softmax runs over blocks of
// keys, so no matrix of scores is stored. A query has NaN where a score of its is NaN or infinity, and where all are
// -infinity.
template <typename T>
struct AttentionOf {
  int64_t batch, heads, queries, keys, size;
  float scale;
  bool causal;
  const T* q;
  const T* k;
  const T* v;
  const bool* visible;
  T* out;
};

using Attention = AttentionOf<uint16_t>;

// The gradients of q, k and v of an Attention that is not causal and has no mask, from its result and that one's gradient; all bf16.
// They may lie where q, k and v do. What `of` has of results is not used.
struct AttentionGradient {
  Attention of;
  const uint16_t* result;
  const uint16_t* gradient;
  uint16_t* of_q;
  uint16_t* of_k;
  uint16_t* of_v;
};

// out = (x - mean) / sqrt(variance + epsilon) * weight[channel] + bias[channel] over the pixels and channels of each of
// `groups` groups of channels of images [batch, pixels, channels], then y * logistic(y) if asked for; x and out are bf16.
struct GroupNormalization {
  const uint16_t* x;
  const float* weight;
  const float* bias;
  int64_t batch, pixels, channels, groups;
  float epsilon;
  bool silu;
  uint16_t* out;
};

// The gradients of x, weight and bias of a row of `k` normalized values each, from the result's gradient; those of weight and bias
// may be null. That of x may lie where x does.
struct LayerNormGradient {
  const uint16_t* x;
  const float* weight;
  const uint16_t* gradient;
  int64_t rows, k;
  float epsilon;
  uint16_t* of_x;
  float* of_weight;
  float* of_bias;
};

// The same of a GroupNormalization, whose `out` is not used.
struct GroupNormGradient {
  GroupNormalization of;
  const uint16_t* gradient;
  uint16_t* of_x;
  float* of_weight;
  float* of_bias;
};

// The kernels of one instruction set. They throw std::bad_alloc where memory for their own use cannot be had.
struct KernelSet {
  void (*contract)(const Contraction& contraction);
  void (*multiply_quantized)(const QuantizedProduct& product);
  void (*multiply)(const Product& product);
  void (*find_kernel_gradient)(const KernelGradient& gradient);
  void (*step_adamw_8bit)(const AdamW8bit& step);
  void (*attend)(const Attention& attention);
  void (*attend_f32)(const AttentionOf<float>& attention);
  void (*find_attention_gradient)(const AttentionGradient& gradient);

  // out[r] = max_k |x[r, k]|, all bf16; NaN where there is one. With `scale` what int8's steps are worth then, by AQT:
  // that times 1 / 127.5, with 1 in place of 0.
  void (*abs_max)(const uint16_t* x, int64_t rows, int64_t k, bool scale, uint16_t* out);

  // out[r, k] = round(clamp(bf16(x[r, k] * bf16(1 / scale[r])), -127, 127)) + 128, to even at ties, with 1 in place of an
  // infinite inverse and 0 in place of a rounded NaN; x and scale are bf16.
  void (*quantize)(const uint16_t* x, const uint16_t* scale, int64_t rows, int64_t k, uint8_t* out);

  // out[r, k] = (x[r, k] - mean) / sqrt(variance + epsilon) * weight[k] + bias[k] over each row; x and out are bf16.
  void (*layer_norm)(const uint16_t* x, const float* weight, const float* bias, int64_t rows, int64_t k, float epsilon,
                     uint16_t* out);

  void (*group_norm)(const GroupNormalization& norm);

  // out[r, k] = x[r, k] * gelu(x[r, size + k]) for rows of twice `size` values, bf16.
  void (*geglu)(const uint16_t* x, int64_t rows, int64_t size, uint16_t* out);

  // The sum of the squares of bf16 or f32 values.
  float (*sum_squares)(const void* x, bool is_bf16, int64_t count);

  void (*find_layer_norm_gradient)(const LayerNormGradient& gradient);
  void (*find_group_norm_gradient)(const GroupNormGradient& gradient);
  // The gradient of geglu's x, which it may overwrite, from its result's [rows, size].
  void (*find_geglu_gradient)(const uint16_t* x, const uint16_t* gradient, int64_t rows, int64_t size, uint16_t* out);
};

}  // namespace maxdiff::kernels

#endif  // MAXDIFF_PLUGIN_KERNELS_H_
