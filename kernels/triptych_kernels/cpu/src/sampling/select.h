// The value at which weights reach a sum, by partitioning instead of sorting.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernel.h"
#include "simd/vec.h"

namespace triptych {

// Values to select from and room to part them.
struct Candidates {
  float* values;  // [count], with room for kLanes more, like the other two
  float* above;
  float* below;
  int64_t count = 0;

  // Room for `most` values.
  Candidates(Scratch& scratch, int64_t most) {
    const int64_t room = most + 2 * kLanes;
    values = static_cast<float*>(scratch.get(3 * room * static_cast<int64_t>(sizeof(float))));
    above = values + room;
    below = above + room;
  }

  void push(uint32_t lanes, vec a) { count += compress(values + count, lanes, a); }
};

// Sums of floats in groups, so that no float32 sum has many terms: its error stays near 1e-7.
constexpr int64_t kGroup = 32 * kLanes;

inline uint32_t lanes_up_to(int64_t count) {
  return count >= kLanes ? (1u << kLanes) - 1 : (1u << count) - 1;
}

template <typename Weigh>
double sum_weights(const float* values, int64_t count, const Weigh& weigh) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    vec partial = zero();
    for (int64_t i = begin; i < std::min(begin + kGroup, count); i += kLanes) {
      partial = partial + only(lanes_up_to(count - i), weigh(load(values + i)));
    }
    total += sum(partial);
  }
  return total;
}

// The largest v for which the weights of all values >= v sum up to `needed`; the smallest value where all of them
// do not. At least one value, none NaN; the candidates are used up. Takes about three passes over them.
template <typename Weigh>
float select(Candidates& candidates, double needed, const Weigh& weigh) {
  constexpr int64_t kFew = 32, kSamples = 9;
  float smallest = candidates.values[0];
  while (candidates.count > kFew) {
    auto& [values, above, below, count] = candidates;
    float samples[kSamples];
    for (int64_t i = 0; i < kSamples; ++i) samples[i] = values[(2 * i + 1) * count / (2 * kSamples)];
    std::nth_element(samples, samples + kSamples / 2, samples + kSamples);
    const float pivot = samples[kSamples / 2];
    const vec pivots = splat(pivot);
    int64_t num_above = 0, num_below = 0;
    double weight_above = 0.0;
    for (int64_t begin = 0; begin < count; begin += kGroup) {
      vec partial = zero();
      for (int64_t i = begin; i < std::min(begin + kGroup, count); i += kLanes) {
        const vec x = load(values + i);
        const uint32_t all = lanes_up_to(count - i);
        const uint32_t is_above = greater(x, pivots) & all;
        partial = partial + only(is_above, weigh(x));
        num_above += compress(above + num_above, is_above, x);
        num_below += compress(below + num_below, greater(pivots, x) & all, x);
      }
      weight_above += sum(partial);
    }
    if (weight_above >= needed) {
      std::swap(values, above);
      count = num_above;
      continue;
    }
    const double num_equal = static_cast<double>(count - num_above - num_below);
    needed -= weight_above + num_equal * sum(only(1, weigh(pivots)));
    if (needed <= 0.0) return pivot;
    smallest = pivot;
    std::swap(values, below);
    count = num_below;
  }
  float* end = candidates.values + candidates.count;
  std::sort(candidates.values, end, std::greater<float>());
  for (float* value = candidates.values; value < end; ++value) {
    needed -= sum(only(1, weigh(splat(*value))));
    smallest = *value;
    if (needed > 0.0) continue;
    return smallest;
  }
  return smallest;
}

}  // namespace triptych
