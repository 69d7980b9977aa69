// The activations of products, in float32, chosen for a vector of outputs at a time.
#pragma once

#include "simd/vec.h"

namespace triptych {

// The operation on finished outputs; packed.py has their names.
enum Activation : int64_t {
  kNoActivation = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4, kRelu2 = 5, kQuickGelu = 6,
  kSwigluOai = 7  // of gates and ups only
};

// x / (1 + e^-u), with an exponential that cannot overflow
inline vec times_sigmoid(vec x, vec u) {
  const vec power = exp_of_negative(zero() - abs(u));  // e^-|u|
  const vec one = splat(1.0f);
  return x * select_negative(u, power, one) / (one + power);
}

inline vec silu(vec x) { return times_sigmoid(x, x); }

inline vec gelu_tanh(vec x) {
  // 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  return times_sigmoid(x, splat(1.5957691216057308f) * fma(splat(0.044715f) * x * x, x, x));
}

// Where the result will be rounded to bfloat16: the error is at most 5.3e-6, of a positive x 6.5e-6 of the result, and
// less than what rounding adds from -3 on. Below -4.75 the result is less than 2e-8. NaN stays.
// Source: a polynomial of our own for (Phi(x) - 1/2) / x in 2 x^2 / 4.75^2 - 1, fitted to the least error of the result,
// which is exact at 4.75.
inline vec gelu_to_round(vec x) {
  const vec own = max(splat(-4.75f), x), y = min(splat(4.75f), own);  // in this order: NaN stays
  const vec t = fma(y * splat(0.088642659f), y, splat(-1.0f));
  vec p = splat(0.0014705131f);
  for (const float c : {-0.0040004672f, 0.0047323601f, -0.0067886668f, 0.013525201f, -0.021851173f, 0.030393217f,
                        -0.040530633f, 0.053233765f, -0.073669314f, 0.14874835f}) {
    p = fma(p, t, splat(c));
  }
  return own * fma(p, y, splat(0.5f));
}

// 0.5 x (1 + erf(x / sqrt(2))); the relative error of erfc is 1.2e-7 everywhere.
// Rounded: to bfloat16, as in `gelu_to_round`.
// Source: Numerical Recipes, 2nd edition, section 6.2, `erfcc`.
template <bool Rounded>
inline vec gelu(vec x) {
  if constexpr (Rounded) return gelu_to_round(x);
  const vec z = abs(x) * splat(0.70710678118654752f), one = splat(1.0f);
  const vec t = one / fma(splat(0.5f), z, one);
  vec p = splat(0.17087277f);
  for (const float c : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                        1.00002368f, -1.26551223f}) {
    p = fma(p, t, splat(c));
  }
  const vec half_erfc = splat(0.5f) * t * exp_of_negative(p - z * z);
  return x * select_negative(x, half_erfc, one - half_erfc);
}

inline vec relu(vec x) { return max(zero(), x); }  // in this order: NaN stays

inline vec quick_gelu(vec x) { return times_sigmoid(x, splat(1.702f) * x); }

// The clamped activation of GPT-OSS: gate * sigmoid(1.702 gate) * (up + 1) of gates up to 7, ups from -7 to 7.
inline vec swiglu_oai(vec gate, vec up) {
  const vec limit = splat(7.0f);  // in this order: NaN stays
  return quick_gelu(min(limit, gate)) * (max(zero() - limit, min(limit, up)) + splat(1.0f));
}

// Not inlined: products are made for many heights of tiles, and this costs less than the exponentials inside.
// Rounded: results will be rounded to bfloat16.
template <bool Rounded>
[[gnu::noinline]] vec activate(int64_t activation, vec x) {
  switch (activation) {
    case kSilu: return silu(x);
    case kGelu: return gelu<Rounded>(x);
    case kGeluTanh: return gelu_tanh(x);
    case kRelu: return relu(x);
    case kRelu2: return relu(x) * relu(x);
    case kQuickGelu: return quick_gelu(x);
    default: return x;
  }
}

template <bool Rounded>
[[gnu::noinline]] vec activate_gated_rarely(int64_t activation, vec gate, vec up) {
  return activation == kSwigluOai ? swiglu_oai(gate, up) : activate<Rounded>(activation, gate) * up;
}

// silu, which nearly all gates have, is inlined: a call would be 1.6 % of a product of 64 rows of 576 inputs.
template <bool Rounded>
inline vec activate_gated(int64_t activation, vec gate, vec up) {
  return activation == kSilu ? silu(gate) * up : activate_gated_rarely<Rounded>(activation, gate, up);
}

}  // namespace triptych
