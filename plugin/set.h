// What the kernels of every instruction set include, before a set's instructions are switched on: inline functions of
// the standard library that were first seen after that would be compiled for them, and the linker may take such a copy
// for the whole library.
//
// The kernels are one source that is compiled once for each set (set_*.cc): kernels.inc over the vectors of the set, in
// a namespace of the set's own. A set's file defines
//
//   MAXDIFF_SET       the namespace
//   MAXDIFF_BF16_DOT  whether one instruction adds products of pairs of bf16; else they are widened and multiplied in f32
//   MAXDIFF_INT8_DOT  whether one instruction adds products of four int8; else they are widened to 16 bits
//   MAXDIFF_TILES     whether the tiles of AMX are compiled too, for where UsesTiles() says so
//
// and includes one of vectors_*.inc, which all have the same types and functions: 16 lanes, of which an AVX2 register
// is half. Another architecture needs vectors of its own, a set_*.cc and a line in isa.cc.

#ifndef MAXDIFF_PLUGIN_SET_H_
#define MAXDIFF_PLUGIN_SET_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace maxdiff::kernels {

// Lanes of a vector, and columns in a block of packed weights.
constexpr int kLanes = 16;

// Bytes of a vector.
constexpr int64_t kVectorBytes = 64;

// The bits of a float that is an infinity; of no NaN.
constexpr uint32_t kInfinityBits = 0x7f800000;

}  // namespace maxdiff::kernels

#endif  // MAXDIFF_PLUGIN_SET_H_
