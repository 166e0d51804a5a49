// The kernels in plain C++, with the arithmetic that instruction sets have for products: for tests, on any processor.

#include "set.h"

#define MAXDIFF_TILES 0

// What avx2 has; and avx_vnni and avx512_vnni for bf16.
#define MAXDIFF_SET emulated_avx2
#define MAXDIFF_BF16_DOT 0
#define MAXDIFF_INT8_DOT 0
#include "vectors_scalar.inc"

#include "kernels.inc"
#undef MAXDIFF_SET
#undef MAXDIFF_BF16_DOT
#undef MAXDIFF_INT8_DOT

// What avx512 has; and avx_vnni and avx512_vnni for int8.
#define MAXDIFF_SET emulated_avx512
#define MAXDIFF_BF16_DOT 1
#define MAXDIFF_INT8_DOT 1
#include "vectors_scalar.inc"

#include "kernels.inc"
