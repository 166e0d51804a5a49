// Vectors of 16 floats. What follows the inclusion, up to `#pragma GCC pop_options`, is compiled for AVX-512 and
// reached only where `Supported` says that the processor has it; so everything else is to be included before, or inline
// functions of the standard library would be compiled for it too.

#ifndef MAXDIFF_PLUGIN_VECTORS_H_
#define MAXDIFF_PLUGIN_VECTORS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma")

namespace maxdiff::kernels {

constexpr int kLanes = 16;

// The first `count` lanes; all of them from 16 on, none from 0 down.
inline __mmask16 Lanes(int64_t count) {
  return count >= kLanes ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 FromBf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 LoadBf16(const uint16_t* from, __mmask16 mask) {
  return FromBf16(_mm256_maskz_loadu_epi16(mask, from));
}

inline __m256i ToBf16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline float ScalarFromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline uint16_t ScalarToBf16(float x) { return _mm256_extract_epi16(ToBf16(_mm512_set1_ps(x)), 0); }

inline void StoreBf16(uint16_t* to, __mmask16 mask, __m512 x) { _mm256_mask_storeu_epi16(to, mask, ToBf16(x)); }

// e^x to about 2 units in the last place; 0 where it is below the smallest normal number, NaN for NaN.
inline __m512 Exp(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3365f), _CMP_NLT_UQ);
  // Of a NaN and a number, minimum and maximum are their second operand.
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-88.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  // ln 2 in two parts, the first with few enough bits that its product with n is exact.
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  // The Taylor series: its first left-out term is below 2^-26 for |r| <= ln 2 / 2.
  __m512 y = _mm512_set1_ps(1.0f / 5040);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 720));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(is_normal, y, n);
}

// 1 / (1 + e^-x)
inline __m512 Logistic(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, Exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline __m512 Erf(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
  __m512 y = _mm512_set1_ps(1.061405429f);
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-1.453152027f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.421413741f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.284496736f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.254829592f));
  const __m512 tail = Exp(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(x, x)));
  y = _mm512_fnmadd_ps(_mm512_mul_ps(y, t), tail, one);
  const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  return _mm512_mask_sub_ps(y, negative, _mm512_setzero_ps(), y);
}

}  // namespace maxdiff::kernels

#endif  // defined(__x86_64__)

#endif  // MAXDIFF_PLUGIN_VECTORS_H_
