// Sixteen numbers at a time: bf16 in memory, fp32 in registers.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

inline __m512 widen(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline void store(uint16_t* p, __m512 x) {
  __m256bh out = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &out, 32);
}

inline __m512 rounded(__m512 x) {
  __m256bh half = _mm512_cvtneps_pbh(x);
  return widen((const uint16_t*)&half);
}

// exp(x): 2^n times a polynomial in the remainder, relative error about 1e-7; beyond fp32 it stays at the border.
inline __m512 exp_ps(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

}  // namespace
