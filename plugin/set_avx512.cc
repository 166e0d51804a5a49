// The kernels for AVX-512 with its products of bf16 and of int8; and for AMX, whose tiles some of them use where
// UsesTiles().

#include "set.h"

#if defined(__x86_64__)

#define MAXDIFF_SET avx512
#define MAXDIFF_BF16_DOT 1
#define MAXDIFF_INT8_DOT 1
#define MAXDIFF_TILES 1

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")

#include "vectors_avx512.inc"

#include "kernels.inc"

#pragma GCC pop_options

#endif  // defined(__x86_64__)
