// Vectors of floats as wide as the instruction set that this file is compiled for, and bfloat16 in and out.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace triptych {

// f(0), f(1) … f(Count - 1) with constant indices, so that arrays that only such calls touch live in registers.
template <int Count, typename F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  [&]<int... Index>(std::integer_sequence<int, Index...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, Index>{}), ...);
  }(std::make_integer_sequence<int, Count>{});
}

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline void store_one(float* to, float x) { *to = x; }
inline void store_one(bf16* to, float x) { *to = to_bf16(x); }

#if defined(__AVX512F__)

constexpr int kLanes = 16;
struct vec {
  __m512 v;
};
inline vec zero() { return {_mm512_setzero_ps()}; }
inline vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline vec operator+(vec a, vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vec operator-(vec a, vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vec operator*(vec a, vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vec operator/(vec a, vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vec fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vec max(vec a, vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vec min(vec a, vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline vec abs(vec a) { return {_mm512_abs_ps(a.v)}; }
// negative[i] where x[i] < 0, else other[i]
inline vec select_negative(vec x, vec negative, vec other) {
  return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x.v)), other.v, negative.v)};
}
inline float sum(vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(vec a) { return _mm512_reduce_max_ps(a.v); }
inline vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline vec load(const bf16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void store(float* to, vec a) { _mm512_storeu_ps(to, a.v); }
inline void store(bf16* to, vec a) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh(a.v);
  __m256i halves;
  std::memcpy(&halves, &half, sizeof halves);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

// Bit i is for lane i; NaN is neither equal nor greater.
inline uint32_t equal(vec a, vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t greater(vec a, vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t at_least(vec a, vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// where a or b is NaN
inline uint32_t unordered(vec a, vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
// the lanes of the mask, zero in others
inline vec only(uint32_t lanes, vec a) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>(lanes), a.v)}; }
// The lanes of the mask side by side, the others undefined: writes kLanes floats, returns how many count.
inline int64_t compress(float* to, uint32_t lanes, vec a) {
  // not straight to memory, which takes Zen 4 and 5 some 100 cycles
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), a.v));
  return __builtin_popcount(lanes);
}

// 2^n * x; n is a whole number.
inline vec scale_by_power(vec x, vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// The same, where n may lie below all exponents: then it is 0. NaN stays.
inline vec scale_down(vec x, vec n) { return scale_by_power(x, n); }
inline vec round_to_whole(vec x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// Lane i of the result is the sum of a[i].
inline vec sums(const vec (&a)[kLanes]) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const vec* v = a + 4 * i;
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
    const __m512d lo = _mm512_castps_pd(low), hi = _mm512_castps_pd(high);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)), _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
  }
  const auto fold = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return {fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]))};
}

// a[i][j] becomes a[j][i].
[[gnu::always_inline]] inline void transpose(vec (&a)[kLanes]) {
  __m512 b[kLanes];
  unroll<8>([&](auto i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i].v, a[2 * i + 1].v);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i].v, a[2 * i + 1].v);
  });
  unroll<4>([&](auto i) {
    const __m512d x0 = _mm512_castps_pd(b[4 * i]), x1 = _mm512_castps_pd(b[4 * i + 1]);
    const __m512d y0 = _mm512_castps_pd(b[4 * i + 2]), y1 = _mm512_castps_pd(b[4 * i + 3]);
    a[4 * i].v = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, y0));
    a[4 * i + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, y0));
    a[4 * i + 2].v = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, y1));
    a[4 * i + 3].v = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, y1));
  });
  // now a[4 i + j] holds column j of each 4 x 4 square of rows 4 i …, one square in each quarter
  unroll<4>([&](auto j) {
    const __m512 low = _mm512_shuffle_f32x4(a[j].v, a[4 + j].v, 0x88);
    const __m512 high = _mm512_shuffle_f32x4(a[j].v, a[4 + j].v, 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(a[8 + j].v, a[12 + j].v, 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(a[8 + j].v, a[12 + j].v, 0xdd);
    b[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
    b[4 + j] = _mm512_shuffle_f32x4(high, high2, 0x88);
    b[8 + j] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    b[12 + j] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  });
  unroll<kLanes>([&](auto i) { a[i].v = b[i]; });
}

// Lanes first, first + 1 … end - 1 of `inside`, the others of `outside`; the bounds may lie outside of the vector.
inline vec select_lanes(vec inside, vec outside, int64_t first, int64_t end) {
  const auto below = [](int64_t lane) { return lane <= 0 ? 0u : lane >= kLanes ? 0xffffu : (1u << lane) - 1u; };
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below(end) & ~below(first)), outside.v, inside.v)};
}

#else  // AVX2 and FMA

constexpr int kLanes = 8;
struct vec {
  __m256 v;
};
inline vec zero() { return {_mm256_setzero_ps()}; }
inline vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline vec operator+(vec a, vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline vec operator-(vec a, vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline vec operator*(vec a, vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline vec operator/(vec a, vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline vec fma(vec a, vec b, vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline vec max(vec a, vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline vec min(vec a, vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline vec abs(vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline vec select_negative(vec x, vec negative, vec other) { return {_mm256_blendv_ps(other.v, negative.v, x.v)}; }
inline float sum(vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline vec load(const bf16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline void store(float* to, vec a) { _mm256_storeu_ps(to, a.v); }
inline void store(bf16* to, vec a) {
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, a.v);
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = to_bf16(lanes[lane]);
}

inline uint32_t equal(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)); }
inline uint32_t greater(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)); }
inline uint32_t at_least(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)); }
inline uint32_t unordered(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)); }
inline vec only(uint32_t lanes, vec a) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bits);
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, bits)))};
}
inline int64_t compress(float* to, uint32_t lanes, vec a) {
  alignas(32) float values[kLanes];
  _mm256_store_ps(values, a.v);
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {  // without a branch; a write past the count is the next one's place
    to[count] = values[lane];
    count += (lanes >> lane) & 1;
  }
  return count;
}

inline vec scale_by_power(vec x, vec n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(power))};
}
// The same, where n may lie below all exponents: then it is 0. NaN stays.
inline vec scale_down(vec x, vec n) {
  return {_mm256_and_ps(scale_by_power(x, n).v, _mm256_cmp_ps(n.v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ))};
}
inline vec round_to_whole(vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// Lane i of the result is the sum of a[i].
inline vec sums(const vec (&a)[kLanes]) {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(a[4].v, a[5].v), _mm256_hadd_ps(a[6].v, a[7].v));
  return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31))};
}

// a[i][j] becomes a[j][i].
[[gnu::always_inline]] inline void transpose(vec (&a)[kLanes]) {
  __m256 b[kLanes];
  unroll<2>([&](auto i) {
    const __m256 x0 = _mm256_unpacklo_ps(a[4 * i].v, a[4 * i + 1].v), x1 = _mm256_unpackhi_ps(a[4 * i].v, a[4 * i + 1].v);
    const __m256 y0 = _mm256_unpacklo_ps(a[4 * i + 2].v, a[4 * i + 3].v);
    const __m256 y1 = _mm256_unpackhi_ps(a[4 * i + 2].v, a[4 * i + 3].v);
    b[4 * i] = _mm256_shuffle_ps(x0, y0, 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(x0, y0, 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(x1, y1, 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(x1, y1, 0xee);
  });
  unroll<4>([&](auto j) {
    a[j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    a[4 + j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  });
}

// Lanes first, first + 1 … end - 1 of `inside`, the others of `outside`; the bounds may lie outside of the vector.
inline vec select_lanes(vec inside, vec outside, int64_t first, int64_t end) {
  const auto bound = [](int64_t lane) {
    return _mm256_set1_epi32(static_cast<int32_t>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane));
  };
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i chosen = _mm256_andnot_si256(_mm256_cmpgt_epi32(bound(first), lanes), _mm256_cmpgt_epi32(bound(end), lanes));
  return {_mm256_blendv_ps(outside.v, inside.v, _mm256_castsi256_ps(chosen))};
}

#endif

// e^x for x <= 0, to 2 units in the last place; below -87 it is e^-87, which is nothing beside 1. NaN stays.
// Source: the polynomial and the split of ln 2 are those of Cephes' expf.
inline vec exp_of_negative(vec x) {
  x = max(splat(-87.0f), x);  // in this order: of two of which one is NaN, `max` gives the second
  const vec n = round_to_whole(x * splat(1.44269504088896341f));
  const vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  return scale_by_power(p, n);
}

// 2^x for x <= 0, 0 far below 2^-126; relative error 1e-7, or 1e-4 where the result will be rounded to bfloat16.
// Source: polynomials of our own, fitted to the least relative error over [-1/2, 1/2] with 2^0 = 1.
template <bool Rounded>
inline vec exp2_of_negative(vec x) {
  const vec n = round_to_whole(x), r = x - n;
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
  return scale_down(fma(p, r, splat(1.0f)), n);
}

}  // namespace triptych
