// Vectors of floats and of 32-bit integers, as wide as the instruction set that this file is compiled for, and what
// is computed with them alone. Each instruction set has a header with the same functions.
#pragma once

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#else
#include "simd/neon.h"
#endif

namespace triptych {

// Pairs of bfloat16, where kHasBf16Products; elsewhere these have no bodies.
vec add_bf16_dot(vec sum, vec a, vec b);                            // sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1]
vec add_bf16_pairs(vec sum, vec a);                                 // sum[i] + a[2i] + a[2i + 1]
void pair_up(const bf16* low, const bf16* high, vec (&out)[2]);     // (low[i], high[i]) of 2 * kLanes bfloat16
vec round_to_pairs(vec low, vec high);                              // 2 * kLanes bfloat16: low's, then high's

// Dot products of a group of 32 inputs with weights, both in bytes, four of them in each lane at a time:
//
//   sums = first_products<Unsigned>(start, inputs, weights), sums = next_products(sums, inputs, weights) …
//   start + dot = dot_of(sums, start)
//
// Inputs are bytes from kLowestByte on, as `store_input_bytes` writes them: unsigned on x86-64, signed on ARM. Weights are
// signed, of at most 8 in magnitude unless kHasByteProducts; if Unsigned, they are 0 to 15, and what comes out is too small
// by kUnsignedStart.

// The floats of 8 bits, e4m3, of which the lanes hold the bits; none is NaN. An exponent of 0 means no leading 1, and then
// 2 * (1 + m / 8) - 1 = m / 4 is smaller than 1 + m / 8, in units of 2^-7.
inline vec from_float8(ivec bits) {
  const vec normal = as_vec(shift_left<20>(bits & splat_int(0x7f)) + splat_int(120 << 23));
  const vec magnitude = min(normal, fma(normal, splat(2.0f), splat(-0x1p-6f)));
  return as_vec(bits_of(magnitude) + shift_left<24>(bits & splat_int(0x80)));
}

// e^x is the result times 2^n, to 2 units in the last place.
// Source: the polynomial and the split of ln 2 are those of Cephes' expf.
inline vec exp_parts(vec x, vec& n) {
  n = round_to_whole(x * splat(1.44269504088896341f));
  const vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return fma(p, r * r, r + splat(1.0f));
}

// e^x for x <= 0; below -87 it is e^-87, which is nothing beside 1. NaN stays.
inline vec exp_of_negative(vec x) {
  vec n;
  const vec p = exp_parts(max(splat(-87.0f), x), n);  // in this order: of two of which one is NaN, `max` gives the second
  return scale_by_power(p, n);
}

// (2^r - 1) / r for r in [-1/2, 1/2].
// Source: polynomials of our own, fitted to the least relative error of 2^r.
template <bool Rounded>
inline vec exp2_slope(vec r) {
  vec p;
  if constexpr (Rounded) {
    p = fma(splat(5.5008903e-2f), r, splat(2.4221097e-1f));
    p = fma(p, r, splat(6.9328296e-1f));
  } else {
    p = fma(splat(1.3264724e-3f), r, splat(9.6715130e-3f));
    p = fma(p, r, splat(5.5507336e-2f));
    p = fma(p, r, splat(2.4022242e-1f));
    p = fma(p, r, splat(6.9314700e-1f));
  }
  return p;
}

// 2^x for x <= 0, 0 far below 2^-126; relative error 1e-7, or 1e-4 where the result will be rounded to bfloat16.
template <bool Rounded>
inline vec exp2_of_negative(vec x) {
  const vec n = round_to_whole(x), r = x - n;
  return scale_down(fma(exp2_slope<Rounded>(r), r, splat(1.0f)), n);
}

// tanh(x) with a relative error of 5e-7, near 0, too. NaN stays.
inline vec tanh(vec x) {
  // t = 2^y - 1 with 2^y = e^(-2 |x|); for small |x| that is no difference of near numbers, since n is then 0
  const vec y = max(splat(-64.0f), abs(x) * splat(-2.88539008177792681f));  // in this order: NaN stays
  const vec n = round_to_whole(y), r = y - n, power = scale_down(splat(1.0f), n);
  const vec t = fma(power, exp2_slope<false>(r) * r, power - splat(1.0f));
  const vec size = (zero() - t) / (splat(2.0f) + t);
  return select_negative(x, zero() - size, size);
}

// sum[i] + the sum of a[4i + j] b[4i + j] of unsigned and signed bytes, 0 <= j < 4, exactly.
inline ivec add_byte_dot(ivec sum, ivec a, ivec b) {
  if constexpr (kHasByteProducts && kLowestByte == 0) return next_products(sum, a, b);
  const ivec even = a & splat_int(0x00ff00ff), odd = shift_halves_right<8>(a);
  return add_dot(add_dot(sum, even, even_bytes(b)), odd, odd_bytes(b));
}

}  // namespace triptych
