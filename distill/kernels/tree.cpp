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
void best_of_rows(const T* x, const float* noise, int64_t noise_stride, float temperature, float scale,
                  const int64_t* job) {
  const int64_t batch = job[2], nodes = job[3], width = job[4], k = job[5];
#pragma omp parallel for schedule(static) if (batch * nodes > 1 && batch * nodes * width >= kWorthThreads)
  for (int64_t r = 0; r < batch * nodes; r++)
    best_of_row(x + r * width, noise ? noise + r / nodes * noise_stride : nullptr, (float*)job[0] + r * k,
                (int64_t*)job[1] + r * k, width, k, temperature, scale);
}

}  // namespace

// What stays the same from round to round (addresses, sizes) comes in one array per level: every argument costs Python
// a conversion.
extern "C" {

// value, id[batch, nodes, k]: the best of every row of x[batch, nodes, width] (bf16 if half, else fp32); see best_of_row.
// noise (or null) has a row of width floats for every row of the batch, noise_stride apart.
// job: value, id, batch, nodes, width, k.
void draftsmith_best(const void* x, int64_t half, const float* noise, int64_t noise_stride, float temperature, float scale,
                     const int64_t* job) {
  if (half)
    best_of_rows((const uint16_t*)x, noise, noise_stride, temperature, scale, job);
  else
    best_of_rows((const float*)x, noise, noise_stride, temperature, scale, job);
}

// Take over one level of a static tree. id[batch, shown, k] are the candidates of the nodes (shown = 1: the same for
// all), with value[batch, shown, k] where those that are not finite are none, else null; tree[batch, total] gets the
// chosen ones from column `at` on, -1 where there is none, and next[batch, grown] those that are grown on. Column 0 of
// the tree is the root, written with the first level.
// job: next, node and rank of each child, places of those grown on among them, batch, total, at, children, grown.
void draftsmith_take(const int64_t* id, const float* value, int64_t shown, int64_t k, const int64_t* root, int64_t* tree,
                    const int64_t* job) {
  int64_t* next = (int64_t*)job[0];
  const int64_t *node = (const int64_t*)job[1], *rank = (const int64_t*)job[2], *picked = (const int64_t*)job[3];
  const int64_t batch = job[4], total = job[5], at = job[6], children = job[7], grown = job[8];
  for (int64_t b = 0; b < batch; b++) {
    int64_t* row = tree + b * total + at;
    if (at == 1) row[-1] = root[b];
    for (int64_t c = 0; c < children; c++) {
      const int64_t from = (b * shown + (shown > 1 ? node[c] : 0)) * k + rank[c];
      row[c] = rank[c] < k && (!value || std::isfinite(value[from])) ? id[from] : -1;
    }
    for (int64_t g = 0; g < grown; g++) *next++ = std::max<int64_t>(row[picked[g]], 0);
  }
}

// Record the children of one level of a dynamic tree as candidates, and pick the nodes to grow on.
//
// chance, token[batch, shown, k]: log chances and ids of the children of the nodes (shown = 1: the same for all).
// seen[batch, nodes, fed]: which of the nodes fed so far each node sees.
// job: values, tokens, above[batch, most], the candidates so far (above is the parent's index, or -1 for the root);
//   picked[batch, per_level], candidate index of every node, replaced by those of the best children, best first;
//   next_token, parent[batch, keep], next_seen[batch, keep, fed + keep], the nodes to grow on, their parents among the
//   nodes and what they see; batch, nodes, most, per_level, recorded candidates, keep, fed.
void draftsmith_level(const float* chance, const int64_t* token, int64_t shown, int64_t k, const uint8_t* seen,
                      const int64_t* job) {
  float* values = (float*)job[0];
  int64_t *tokens = (int64_t*)job[1], *above = (int64_t*)job[2], *picked = (int64_t*)job[3];
  int64_t *next_token = (int64_t*)job[4], *parent = (int64_t*)job[5];
  uint8_t* next_seen = (uint8_t*)job[6];
  const int64_t batch = job[7], nodes = job[8], most = job[9], per_level = job[10], recorded = job[11];
  const int64_t keep = job[12], fed = job[13];
  std::vector<int64_t> order(nodes * k);
  for (int64_t b = 0; b < batch; b++, values += most, tokens += most, above += most, picked += per_level) {
    for (int64_t f = 0; f < nodes; f++) {
      const int64_t node = recorded ? picked[f] : -1;
      const float own = node < 0 ? 0.0f : values[node];
      for (int64_t j = 0; j < k; j++) {
        const int64_t at = recorded + f * k + j, from = (b * shown + (shown > 1 ? f : 0)) * k + j;
        values[at] = own + chance[from], tokens[at] = token[from], above[at] = node;
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

// The tree of the root and the `keep` best candidates, in the order they were recorded; token, parent[batch, keep + 1].
// No candidate is worth more than its parent, and parents come first, so all parents are in it.
// job: values, tokens, above[batch, most], batch, most, recorded candidates, keep.
void draftsmith_rerank(const int64_t* root, int64_t* token, int64_t* parent, const int64_t* job) {
  const float* values = (const float*)job[0];
  const int64_t *tokens = (const int64_t*)job[1], *above = (const int64_t*)job[2];
  const int64_t batch = job[3], most = job[4], recorded = job[5], keep = job[6];
  std::vector<int64_t> order(recorded), place(recorded);
  for (int64_t b = 0; b < batch; b++, values += most, tokens += most, above += most) {
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
