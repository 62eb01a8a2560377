// Decode-step kernels for CPUs with AVX-512 BF16, for a few rows (tokens) at a time.
//
// A product with a large weight matrix is bound by reading the weight once, so the weight is laid out as one stream:
// blocks of 16 output columns, and in each the inputs two by two, packed_w[n / 16][k / 2][16][2]. One vector of it
// meets the same two inputs of up to 16 rows while it is in a register, so eight rows cost little more than one.
//
// Every row is computed by the same operations in the same order, however many rows there are and wherever the keys
// it attends to lie. A token verified inside a tree therefore gets bit for bit the features it would get alone.
// Sums are in fp32.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes of the stream asked for before they are needed

struct Job {
  const uint16_t *x, *w, *bias, *add;
  uint16_t* y;
  int64_t k, n;
};

// Rows m0 .. m0 + M - 1 times 16 output columns from n0 on.
template <int M>
inline void block(const Job& job, int64_t m0, int64_t n0) {
  const uint16_t* x = job.x + m0 * job.k;
  const uint16_t* w = job.w + n0 * job.k;
  __m512 s[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) s[m] = _mm512_setzero_ps();
  for (int64_t k = 0; k < job.k; k += 2) {
    _mm_prefetch((const char*)(w + 16 * k) + kAhead, _MM_HINT_T0);
    __m512bh wk = (__m512bh)_mm512_loadu_si512(w + 16 * k);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      int32_t pair;
      std::memcpy(&pair, x + m * job.k + k, 4);
      s[m] = _mm512_dpbf16_ps(s[m], wk, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    __m512 sum = s[m];
    if (job.bias) sum = _mm512_add_ps(sum, widen(job.bias + n0));
    const int64_t at = (m0 + m) * job.n + n0;
    if (job.add) sum = _mm512_add_ps(rounded(sum), widen(job.add + at));  // rounds where two operations would
    store(job.y + at, sum);
  }
}

// Sums of 16 vectors, in order: four rounds of adding halves, each leaving half as many vectors.
inline __m512 sums16(__m512* v) {
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; i++) {
    __m512 a = v[2 * i], b = v[2 * i + 1];
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

// G query heads of one key/value head over the visible slots; weights is scratch for G times `padded` floats.
template <int G>
inline void attend_heads(const uint16_t* q, const uint16_t* k, const uint16_t* v, const int32_t* slots, int64_t count,
                         int64_t dim, float scale, float* weights, int64_t padded, uint16_t* out) {
  __m512 most[G], total[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) most[g] = _mm512_set1_ps(-INFINITY), total[g] = _mm512_setzero_ps();
  for (int64_t j = 0; j < count; j += 16)
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      __m512 s[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const uint16_t* key = k + int64_t(slots[j + i < count ? j + i : count - 1]) * dim;
        s[i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 32)
          s[i] = _mm512_dpbf16_ps(s[i], (__m512bh)_mm512_loadu_si512(key + d),
                                  (__m512bh)_mm512_loadu_si512(q + g * dim + d));
      }
      const __m512 scores = _mm512_mul_ps(sums16(s), _mm512_set1_ps(scale));
      _mm512_storeu_ps(weights + g * padded + j, scores);
      most[g] = _mm512_max_ps(most[g], scores);
    }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(most[g]));
    for (int64_t j = 0; j < count; j += 16) {
      const __mmask16 here = count - j >= 16 ? 0xffff : (1u << (count - j)) - 1;
      float* at = weights + g * padded + j;
      const __m512 e = _mm512_maskz_mov_ps(here, exp_ps(_mm512_sub_ps(_mm512_loadu_ps(at), peak)));
      _mm512_storeu_ps(at, e);
      total[g] = _mm512_add_ps(total[g], e);
    }
  }
  for (int64_t d0 = 0; d0 < dim; d0 += 32) {
    __m512 s[G][2];
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) s[g][0] = s[g][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
      const uint16_t* value = v + int64_t(slots[j]) * dim + d0;
      const __m512 low = widen(value), high = widen(value + 16);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        const __m512 weight = _mm512_set1_ps(weights[g * padded + j]);
        s[g][0] = _mm512_fmadd_ps(weight, low, s[g][0]);
        s[g][1] = _mm512_fmadd_ps(weight, high, s[g][1]);
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total[g]));
      store(out + g * dim + d0, _mm512_mul_ps(s[g][0], share));
      store(out + g * dim + d0 + 16, _mm512_mul_ps(s[g][1], share));
    }
  }
}

}  // namespace

using Block = void (*)(const Job&, int64_t, int64_t);
using Attend = void (*)(const uint16_t*, const uint16_t*, const uint16_t*, const int32_t*, int64_t, int64_t, float,
                        float*, int64_t, uint16_t*);
const Attend attend[] = {nullptr, attend_heads<1>, attend_heads<2>, attend_heads<3>, attend_heads<4>};

const Block blocks[] = {nullptr,   block<1>,  block<2>,  block<3>,  block<4>,  block<5>,  block<6>,  block<7>,
                        block<8>,  block<9>,  block<10>, block<11>, block<12>, block<13>, block<14>, block<15>};

extern "C" {

// y[rows, n] = x[rows, k] w[n, k]^T (+ bias[n]) (+ add[rows, n]); w packed, k a multiple of 8, n of 16.
void draftsmith_linear(const uint16_t* x, const uint16_t* w, const uint16_t* bias, const uint16_t* add, uint16_t* y,
                       int64_t rows, int64_t k, int64_t n) {
  const Job job{x, w, bias, add, y, k, n};
#pragma omp parallel for schedule(static)
  for (int64_t n0 = 0; n0 < n; n0 += 16) {
    int64_t m = 0;
    for (; m + 16 <= rows; m += 16) block<16>(job, m, n0);
    if (m < rows) blocks[rows - m](job, m, n0);
  }
}

// y = x / sqrt(mean(x^2) + eps) rounded to bf16, times w: what transformers' RMS norm computes; size a multiple of 16.
void draftsmith_rms_norm(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) sum = _mm512_fmadd_ps(widen(x + i), widen(x + i), sum);
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / size + eps));
    for (int64_t i = 0; i < size; i += 16)
      store(y + i, _mm512_mul_ps(rounded(_mm512_mul_ps(widen(x + i), scale)), widen(w + i)));
  }
}

// out[b, n, h, :] = attention of q[b, n, h, :] over the slots of row b that mask[b, n, :] allows (null: all of them).
// k, v: [batch, kv_heads, capacity, dim] with the given strides in elements; head h reads key/value head h / groups.
// q has q_stride elements between tokens; dim a multiple of 32; every row sees at least one slot.
void draftsmith_attend(const uint16_t* q, const uint16_t* k, const uint16_t* v, const uint8_t* mask, uint16_t* out,
                       const int64_t* sizes, float scale) {
  const int64_t batch = sizes[0], n = sizes[1], heads = sizes[2], kv_heads = sizes[3], dim = sizes[4], view = sizes[5];
  const int64_t q_stride = sizes[6], kv_batch = sizes[7], kv_head = sizes[8], groups = heads / kv_heads;
#pragma omp parallel
  {
    std::vector<int32_t> slots(view);
    const int64_t padded = (view + 15) / 16 * 16;
    std::vector<float> weights(4 * padded);
    int64_t listed = -1, count = 0;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < batch * n * kv_heads; task++) {
      const int64_t row = task / kv_heads, g = task % kv_heads, b = row / n;
      if (row != listed) {
        listed = row, count = 0;
        for (int64_t t = 0; t < view; t++)
          if (!mask || mask[row * view + t]) slots[count++] = t;
      }
      const int64_t at = b * kv_batch + g * kv_head;
      for (int64_t h = g * groups, left = groups; left > 0;) {
        const int64_t some = left < 4 ? left : 4;
        attend[some](q + row * q_stride + h * dim, k + at, v + at, slots.data(), count, dim, scale, weights.data(), padded,
               out + (row * heads + h) * dim);
        h += some, left -= some;
      }
    }
  }
}

// y[rows, size] = silu(gate) * up of gate_up[rows, 2 * size], rounded to bf16 in between; size a multiple of 16.
void draftsmith_silu_mul(const uint16_t* gate_up, uint16_t* y, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, y += size)
    for (int64_t i = 0; i < size; i += 16) {
      const __m512 g = widen(gate_up + i), one = _mm512_set1_ps(1.0f);
      const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), g))));
      store(y + i, _mm512_mul_ps(rounded(silu), widen(gate_up + size + i)));
    }
}

// Rotate the query and key heads of qkv[batch * n, heads + 2 * kv_heads, dim] in place and write keys and values into
// their slots of k, v [batch, kv_heads, capacity, dim]. cos, sin: [batch * n, dim]; dim a multiple of 32.
void draftsmith_rotate_write(uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, uint16_t* k, uint16_t* v,
                             const int64_t* slots, const int64_t* sizes) {
  const int64_t rows = sizes[0], n = sizes[1], heads = sizes[2], kv_heads = sizes[3], dim = sizes[4];
  const int64_t kv_batch = sizes[5], kv_head = sizes[6], half = dim / 2;
  for (int64_t row = 0; row < rows; row++, cos += dim, sin += dim) {
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      uint16_t* x = qkv + (row * (heads + 2 * kv_heads) + h) * dim;
      for (int64_t i = 0; i < half; i += 16) {
        const __m512 a = widen(x + i), b = widen(x + half + i);
        const __m512 a_cos = rounded(_mm512_mul_ps(a, widen(cos + i)));
        const __m512 b_sin = rounded(_mm512_mul_ps(b, widen(sin + i)));
        const __m512 b_cos = rounded(_mm512_mul_ps(b, widen(cos + half + i)));
        const __m512 a_sin = rounded(_mm512_mul_ps(a, widen(sin + half + i)));
        store(x + i, _mm512_sub_ps(a_cos, b_sin));
        store(x + half + i, _mm512_add_ps(b_cos, a_sin));
      }
    }
    for (int64_t h = 0; h < kv_heads; h++) {
      const uint16_t* key = qkv + (row * (heads + 2 * kv_heads) + heads + h) * dim;
      const int64_t at = row / n * kv_batch + h * kv_head + slots[row] * dim;
      std::memcpy(k + at, key, 2 * dim);
      std::memcpy(v + at, key + kv_heads * dim, 2 * dim);
    }
  }
}

// out[i] = -v, v in (0, 1) made of 31 bits hashed from (i, low, high): what sampling.py turns into Gumbel noise.
void draftsmith_hash(int32_t low, int32_t high, float* out, int64_t n) {
  auto mix = [](uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
  };
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const int32_t bits = mix(mix(uint32_t(i) ^ uint32_t(low)) ^ uint32_t(high)) & 0x7fffffffu;
    const float v = (float(bits) + 0.5f) * 0x1p-31f;
    out[i] = -(v < 1.0f - 0x1p-24f ? v : 1.0f - 0x1p-24f);
  }
}
}
