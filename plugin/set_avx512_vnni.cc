// The kernels for AVX-512 with its int8 product, and without that of bf16.

#include "set.h"

#if defined(__x86_64__)

#define MAXDIFF_SET avx512_vnni
#define MAXDIFF_BF16_DOT 0
#define MAXDIFF_INT8_DOT 1
#define MAXDIFF_TILES 0

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")

#include "vectors_avx512.inc"

#include "kernels.inc"

#pragma GCC pop_options

#endif  // defined(__x86_64__)
