// The kernels for AVX2 with FMA.

#include "set.h"

#if defined(__x86_64__)

#define MAXDIFF_SET avx2
#define MAXDIFF_BF16_DOT 0
#define MAXDIFF_INT8_DOT 0
#define MAXDIFF_TILES 0

#pragma GCC push_options
#pragma GCC target("avx2,fma")

#include "vectors_avx2.inc"

#include "kernels.inc"

#pragma GCC pop_options

#endif  // defined(__x86_64__)
