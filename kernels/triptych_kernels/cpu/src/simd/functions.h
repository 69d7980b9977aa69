// Functions of a vector of floats that no instruction computes.
#pragma once

#include <cmath>

#include "simd/vec.h"

namespace triptych {

// f of each lane by itself.
template <typename F>
inline vec each(vec x, const F& f) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = f(lane);
  return load(lanes);
}

template <typename F>
inline vec each(vec x, vec y, const F& f) {
  float lanes[kLanes], others[kLanes];
  store(lanes, x);
  store(others, y);
  for (int i = 0; i < kLanes; ++i) lanes[i] = f(lanes[i], others[i]);
  return load(lanes);
}

// e^x; infinite or 0 beyond the range of float. NaN stays.
inline vec exp(vec x) {
  vec n;
  const vec p = exp_parts(min(splat(89.5f), max(splat(-104.0f), x)), n);  // in this order, as in `exp_of_negative`
  const vec half = round_to_whole(n * splat(0.5f));  // 2^n itself may lie outside of float
  return scale_by_power(scale_by_power(p, half), n - half);
}

inline vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }

// The error function, to 1.5e-7 absolute.
// Source: Abramowitz and Stegun, 7.1.26.
inline vec erf(vec x) {
  const vec size = abs(x), t = splat(1.0f) / fma(splat(0.3275911f), size, splat(1.0f));
  vec p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const vec value = splat(1.0f) - p * t * exp(zero() - size * size);
  return select_negative(x, zero() - value, value);
}

}  // namespace triptych
