// Attention over a cache of 8 bits: scales, and operands as 16-bit integers.
//
//   score  = factor * query_scale * key_scale * sum of query[i] * key[i]
//   values = weight_scale * sum over the span's keys of weight * value[i], where weight * weight_scale is the
//            softmax's weight times the value's scale
//
// The sums are of integers, so they are exact in any order.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/arithmetic.h"

namespace triptych::attention {

constexpr float kLargestElement = 127.0f;  // of a cache
constexpr float kLargestShort = 32767.0f;
constexpr float kLargestSum = 2147483000.0f;
static_assert(kSpan * kLargestElement * kLargestShort < kLargestSum, "a span's sums fit 32 bits");
constexpr float kVanishing = 1e-30f;  // what is smaller counts as 0, since its inverse might not be finite

// kLanes elements from `first` on; past the end at `size` zeros.
template <typename Q>
vec load_part(const Q* row, int64_t first, int64_t size) {
  if (first + kLanes <= size) return load(row + first);
  Q part[kLanes] = {};
  std::memcpy(part, row + first, (size - first) * sizeof(Q));
  return load(part);
}

// The largest integer of a query: sums over the head fit 32 bits, too.
inline float largest_of_query(int64_t head_dim) {
  return std::min(kLargestShort, std::floor(kLargestSum / (kLargestElement * head_dim)));
}

// A query's units, then up to kLanes / 2 zeros; returns their scale, NaN where the query is not finite.
// `limit`: of the integers.
template <typename Q>
float quantize_query(const Q* query, int64_t head_dim, float limit, int16_t* to) {
  vec maxima = zero();
  uint32_t flawed = 0;
  for (int64_t first = 0; first < head_dim; first += kLanes) {
    const vec x = load_part(query, first, head_dim);
    flawed |= unordered(x, x - x);  // infinities, too
    maxima = max(maxima, abs(x));
  }
  const float maximum = largest(maxima);
  const vec inverse = splat(!flawed && maximum > kVanishing ? limit / maximum : 0.0f);
  for (int64_t first = 0; first < head_dim; first += kLanes) {
    store_shorts_in_pairs(to + first, to_ints(load_part(query, first, head_dim) * inverse));
  }
  return flawed ? std::numeric_limits<float>::quiet_NaN() : maximum / limit;
}

// Turns one row's sums of products into scores.
inline void scale_products(float* scores, const RowSeen& seen, float factor, const float* key_scales) {
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kLanes) {
    store(scores + key, to_floats(load_ints(scores + key)) * load(key_scales + key) * splat(factor));
  }
}

// Turns one row's scores into weights, as `weigh` does, and returns their sum. `out` gets the weights times the scales
// of their values as 16-bit integers; `scale` that of the integers, NaN where one that the row sees is. Destroys
// `scores`.
inline float weigh_shorts(float* scores, float maximum, const float* value_scales, const RowSeen& seen, int16_t* out,
                          float& scale) {
  vec totals[2] = {zero(), zero()}, maxima[2] = {zero(), zero()};
  vec products = zero();  // NaN if one is
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kPanel) {
    unroll<2>([&](auto half) {
      const int64_t at = key + half * kLanes;
      const vec weight = exp2_of_negative<false>(load(scores + at) - splat(maximum));
      vec product = weight * load(value_scales + at);
      if (seen.cuts(at)) product = seen.select(at, product, zero());  // what is not seen may be NaN
      store(scores + at, product);
      totals[half] = totals[half] + weight;
      maxima[half] = max(maxima[half], product);
      products = products + product;
    });
  }
  const float most = largest(max(maxima[0], maxima[1]));
  const vec inverse = splat(most > kVanishing ? kLargestShort / most : 0.0f);
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kLanes) {
    store_shorts(out + key, to_ints(load(scores + key) * inverse));
  }
  scale = unordered(products, products) ? std::numeric_limits<float>::quiet_NaN() : most / kLargestShort;
  return sum(totals[0] + totals[1]);
}

// The integers that values were summed to become floats, times a scale; count is a multiple of kPanel.
inline void scale_sums(float* sums, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i += kPanel) {
    ivec panel[2] = {load_ints(sums + i), load_ints(sums + i + kLanes)};
    in_order(panel);  // as values were paired up
    store(sums + i, to_floats(panel[0]) * splat(scale));
    store(sums + i + kLanes, to_floats(panel[1]) * splat(scale));
  }
}

}  // namespace triptych::attention
