// Growing draft trees on a CPU: choosing candidates out of a whole vocabulary, and keeping the books of a dynamic tree.
//
// A level of a tree costs a drafter dozens of small tensor operations and several passes over its logits. Here it is one
// pass (scores, the best of them, and their log-sum-exp) and one call for the rest. Ties go to the lower index.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kBlock = 256;         // scores that are looked at together, in the first-level cache
constexpr int64_t kWorthThreads = 1 << 15;  // logits from which a second thread pays

inline __m512 load(const uint16_t* x, __mmask16 here) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, x)), 16));
}

inline __m512 load(const float* x, __mmask16 here) { return _mm512_maskz_loadu_ps(here, x); }

// The k best of one row's scores x / temperature (+ noise), best first; with scale > 0 not the scores themselves but
// their log-softmax after multiplication with scale.
template <typename T>
void best_of_row(const T* x, const float* noise, float* value, int64_t* id, int64_t width, int64_t k, float temperature,
                 float scale) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY), divisor = _mm512_set1_ps(temperature);
  const __m512 factor = _mm512_set1_ps(scale);
  alignas(64) float score[kBlock];
  __m512 total = _mm512_setzero_ps();
  float highest = -INFINITY;
  int64_t found = 0;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    __m512 most = nothing;
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 here = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
      __m512 s = load(x + begin + i, here);
      if (temperature != 1.0f) s = _mm512_div_ps(s, divisor);
      if (noise) s = _mm512_add_ps(s, _mm512_maskz_loadu_ps(here, noise + begin + i));
      s = _mm512_mask_mov_ps(nothing, here, s);
      _mm512_store_ps(score + i, s);
      most = _mm512_max_ps(most, s);
    }
    const float peak = _mm512_reduce_max_ps(most);
    if (scale > 0 && peak > highest) {
      total = _mm512_mul_ps(total, _mm512_set1_ps(std::exp(scale * (highest - peak))));
      highest = peak;
    }
    if (scale > 0 && highest > -INFINITY)
      for (int64_t i = 0; i < count; i += 16) {
        const __m512 below = _mm512_sub_ps(_mm512_load_ps(score + i), _mm512_set1_ps(highest));
        total = _mm512_add_ps(total, exp_ps(_mm512_mul_ps(below, factor)));
      }
    if (found == k && !(peak > value[k - 1])) continue;
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 here = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
      const __m512 s = _mm512_load_ps(score + i);
      uint32_t good = found < k ? here : _mm512_cmp_ps_mask(s, _mm512_set1_ps(value[k - 1]), _CMP_GT_OQ);
      for (; good; good &= good - 1) {
        const int64_t at = i + __builtin_ctz(good);
        if (found == k && !(score[at] > value[k - 1])) continue;
        int64_t place = found < k ? found++ : k - 1;
        for (; place > 0 && value[place - 1] < score[at]; place--) value[place] = value[place - 1], id[place] = id[place - 1];
        value[place] = score[at], id[place] = begin + at;
      }
    }
  }
  if (scale > 0 && highest > -INFINITY) {
    const float log_total = std::log(_mm512_reduce_add_ps(total));
    for (int64_t j = 0; j < k; j++) value[j] = scale * (value[j] - highest) - log_total;
  }
}

template <typename T>
void best_of_rows(const T* x, const float* noise, float* value, int64_t* id, int64_t rows, int64_t width, int64_t k,
                  int64_t rows_per_noise, int64_t noise_stride, float temperature, float scale) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * width >= kWorthThreads)
  for (int64_t r = 0; r < rows; r++)
    best_of_row(x + r * width, noise ? noise + r / rows_per_noise * noise_stride : nullptr, value + r * k, id + r * k, width,
                k, temperature, scale);
}

}  // namespace

extern "C" {

// value, id[rows, k]: the best of every row of x[rows, width] (bf16 if half, else fp32), see best_of_row.
// noise (or null) has a row of width floats, noise_stride apart, for every rows_per_noise rows of x.
void draftsmith_best(const void* x, const float* noise, float* value, int64_t* id, int64_t half, int64_t rows,
                     int64_t width, int64_t k, int64_t rows_per_noise, int64_t noise_stride, float temperature,
                     float scale) {
  if (half)
    best_of_rows((const uint16_t*)x, noise, value, id, rows, width, k, rows_per_noise, noise_stride, temperature, scale);
  else
    best_of_rows((const float*)x, noise, value, id, rows, width, k, rows_per_noise, noise_stride, temperature, scale);
}

// Record the children of one level as candidates, and pick the nodes to grow on.
//
// chance, token[batch, shared ? 1 : nodes, k]: log chances and ids of the children of each of the nodes.
// values, tokens, above[batch, capacity]: the candidates so far, `recorded` of them; above is the parent's index or -1.
// picked[batch, stride]: candidate index of every node, replaced by those of the `keep` best children, best first.
// seen[batch, nodes, fed]: which fed nodes each node sees; next_seen[batch, keep, fed + keep] likewise, one level down.
// next_token, parent[batch, keep]: the nodes to grow on, and their parents among `nodes`.
void draftsmith_level(const float* chance, const int64_t* token, float* values, int64_t* tokens, int64_t* above,
                      int64_t* picked, const uint8_t* seen, int64_t* next_token, int64_t* parent, uint8_t* next_seen,
                      int64_t batch, int64_t nodes, int64_t shared, int64_t k, int64_t capacity, int64_t recorded,
                      int64_t stride, int64_t keep, int64_t fed) {
  std::vector<int64_t> order(nodes * k);
  for (int64_t b = 0; b < batch; b++, values += capacity, tokens += capacity, above += capacity, picked += stride) {
    for (int64_t f = 0; f < nodes; f++) {
      const float own = picked[f] < 0 ? 0.0f : values[picked[f]];
      for (int64_t j = 0; j < k; j++) {
        const int64_t at = recorded + f * k + j, from = (shared ? b : b * nodes + f) * k + j;
        values[at] = own + chance[from], tokens[at] = token[from], above[at] = picked[f];
      }
    }
    if (!keep) continue;
    const float* fresh = values + recorded;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + keep, order.end(), [fresh](int64_t i, int64_t j) {
      return fresh[i] > fresh[j] || (fresh[i] == fresh[j] && i < j);
    });
    for (int64_t i = 0; i < keep; i++) {
      const int64_t at = b * keep + i;
      picked[i] = recorded + order[i], parent[at] = order[i] / k, next_token[at] = tokens[picked[i]];
      uint8_t* row = next_seen + at * (fed + keep);
      std::memcpy(row, seen + (b * nodes + parent[at]) * fed, fed);
      std::memset(row + fed, 0, keep);
      row[fed + i] = 1;
    }
  }
}

// The tree of the root and the `keep` best of `recorded` candidates, in the order they were recorded; token, parent
// [batch, keep + 1]. No candidate is worth more than its parent, and parents come first, so all parents are in it.
void draftsmith_rerank(const float* values, const int64_t* tokens, const int64_t* above, const int64_t* root,
                       int64_t* token, int64_t* parent, int64_t batch, int64_t capacity, int64_t recorded, int64_t keep) {
  std::vector<int64_t> order(recorded), place(recorded);
  for (int64_t b = 0; b < batch; b++, values += capacity, tokens += capacity, above += capacity) {
    std::iota(order.begin(), order.end(), 0);
    if (keep < recorded)
      std::nth_element(order.begin(), order.begin() + keep, order.end(), [values](int64_t i, int64_t j) {
        return values[i] > values[j] || (values[i] == values[j] && i < j);
      });
    std::sort(order.begin(), order.begin() + keep);
    *token++ = root[b], *parent++ = 0;
    for (int64_t i = 0; i < keep; i++) {
      const int64_t at = order[i];
      place[at] = i + 1;
      *token++ = tokens[at], *parent++ = above[at] < 0 ? 0 : place[above[at]];
    }
  }
}

// ancestors[batch, n, n] (with the diagonal) and depths[batch, n] of trees whose parents precede their children.
void draftsmith_geometry(const int64_t* parents, uint8_t* ancestors, int64_t* depths, int64_t batch, int64_t n) {
  for (int64_t b = 0; b < batch; b++, parents += n, ancestors += n * n, depths += n) {
    std::memset(ancestors, 0, n);
    ancestors[0] = 1, depths[0] = 0;
    for (int64_t i = 1; i < n; i++) {
      std::memcpy(ancestors + i * n, ancestors + parents[i] * n, n);
      ancestors[i * n + i] = 1, depths[i] = depths[parents[i]] + 1;
    }
  }
}
}
