// The kernels for AVX2 with FMA and the int8 product of AVX-VNNI.

#include "set.h"

#if defined(__x86_64__)

#define MAXDIFF_SET avx_vnni
#define MAXDIFF_BF16_DOT 0
#define MAXDIFF_INT8_DOT 1
#define MAXDIFF_TILES 0

#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")

#include "vectors_avx2.inc"

#include "kernels.inc"

#pragma GCC pop_options

#endif  // defined(__x86_64__)
