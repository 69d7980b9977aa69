// The vectors of vec.h, with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "simd/element.h"

namespace triptych {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
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
inline vec in_register(vec a) {
  asm("" : "+x"(a.v));
  return a;
}
inline void store(float* to, vec a) { _mm256_storeu_ps(to, a.v); }
// each lane's bfloat16 in its upper half
inline __m256i round_to_bf16(vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, nan, is_nan);
}
inline void store(bf16* to, vec a) {
  const __m256i halves = _mm256_srli_epi32(round_to_bf16(a), 16);
  const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
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

inline void interleave(vec& even, vec& odd) {
  const __m256 low = _mm256_unpacklo_ps(even.v, odd.v), high = _mm256_unpackhi_ps(even.v, odd.v);
  even.v = _mm256_permute2f128_ps(low, high, 0x20);
  odd.v = _mm256_permute2f128_ps(low, high, 0x31);
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

struct ivec {
  __m256i v;
};
inline ivec splat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline ivec load_ints(const void* from) { return {_mm256_loadu_si256(static_cast<const __m256i*>(from))}; }
inline ivec operator&(ivec a, ivec b) { return {_mm256_and_si256(a.v, b.v)}; }
template <int Bits>
inline ivec shift_right(ivec a) {
  return {_mm256_srli_epi32(a.v, Bits)};
}
template <int Bits>
inline ivec shift_left(ivec a) {
  return {_mm256_slli_epi32(a.v, Bits)};
}
template <int Bits>
inline ivec shift_halves_right(ivec a) {
  return {_mm256_srli_epi16(a.v, Bits)};
}
inline ivec even_bytes(ivec a) { return {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8)}; }
inline ivec odd_bytes(ivec a) { return {_mm256_srai_epi16(a.v, 8)}; }
inline ivec operator+(ivec a, ivec b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline ivec add_bytes(ivec a, ivec b) { return {_mm256_add_epi8(a.v, b.v)}; }
inline ivec subtract_bytes(ivec a, ivec b) { return {_mm256_sub_epi8(a.v, b.v)}; }
inline ivec max(ivec a, ivec b) { return {_mm256_max_epi32(a.v, b.v)}; }
template <typename F>
inline int32_t fold(ivec a, const F& f) {
  __m128i half = f(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  half = f(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(f(half, _mm_shuffle_epi32(half, 0xb1)));
}
inline int32_t sum(ivec a) {
  return fold(a, [](__m128i x, __m128i y) { return _mm_add_epi32(x, y); });
}
inline int32_t largest(ivec a) {
  return fold(a, [](__m128i x, __m128i y) { return _mm_max_epi32(x, y); });
}
inline ivec bits_of(vec a) { return {_mm256_castps_si256(a.v)}; }
inline vec as_vec(ivec bits) { return {_mm256_castsi256_ps(bits.v)}; }
inline ivec to_ints(vec a) { return {_mm256_cvtps_epi32(a.v)}; }  // to nearest
inline vec to_floats(ivec a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline void store_bytes(int8_t* to, ivec a) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
}
inline void pair_up_bytes(const int8_t* low, const int8_t* high, ivec (&out)[2]) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  out[0].v = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
  out[1].v = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y));
}
inline void store_shorts_in_pairs(int16_t* to, ivec a) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shufflehi_epi16(_mm_shufflelo_epi16(shorts, 0xd8), 0xd8));
}
inline void in_order(ivec (&)[2]) {}
inline void store_shorts(int16_t* to, ivec a) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), shorts);
}
inline vec load_halves(const void* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}

inline ivec load_bytes(const void* from) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)))};
}
inline ivec look_up_bytes(const uint8_t* table, ivec indices) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(bytes, indices.v)};
}
inline vec look_up(const float* table, ivec indices) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), indices.v);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), indices.v);
  return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(indices.v, 28)))};
}

inline vec even(vec pairs) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.v), 16))}; }
inline vec odd(vec pairs) {
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs.v), _mm256_set1_epi32(~0xffff)))};
}

constexpr bool kHasBf16Products = false;

inline void store_pairs(bf16* out, vec first, vec second) {
  const __m256i low = _mm256_srli_epi32(round_to_bf16(first), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_blend_epi16(low, round_to_bf16(second), 0xaa));
}

using u64s = __m256i;
constexpr int kCounterLanes = 4;
inline u64s splat_u64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
inline u64s first_numbers() { return _mm256_setr_epi64x(0, 1, 2, 3); }
inline u64s add(u64s a, u64s b) { return _mm256_add_epi64(a, b); }
inline u64s multiply_low(u64s a, u64s b) { return _mm256_mul_epu32(a, b); }
inline u64s high_half(u64s a) { return _mm256_srli_epi64(a, 32); }
inline u64s exclusive_or(u64s a, u64s b, u64s c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline u64s larger_u32(u64s a, u64s b) { return _mm256_max_epu32(a, b); }
inline uint32_t low_at_least(u64s a, uint32_t bound) {
  const __m256i reaches = _mm256_cmpeq_epi32(larger_u32(a, _mm256_set1_epi32(static_cast<int>(bound))), a);
  return _mm256_movemask_ps(_mm256_castsi256_ps(reaches)) & 0x55;
}
inline void store(uint64_t* to, u64s a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }

// By assembly, since for its intrinsics GCC 12 copies each sum.
inline ivec add_dot(ivec sum, ivec a, ivec b) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.v) : "x"(a.v), "x"(b.v));
#else
  const __m256i products = _mm256_madd_epi16(a.v, b.v);
  asm("vpaddd %1, %0, %0" : "+x"(sum.v) : "x"(products));
#endif
  return sum;
}

constexpr int32_t kLowestByte = 0;
inline void store_input_bytes(void* to, ivec a) {
  const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packus_epi16(shorts, shorts));
}
#if defined(__AVXVNNI__)
constexpr bool kHasByteProducts = true;
constexpr int32_t kUnsignedStart = 0;
inline ivec next_products(ivec sums, ivec inputs, ivec weights) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums.v) : "x"(inputs.v), "x"(weights.v));
  return sums;
}
template <bool Unsigned>
inline ivec first_products(ivec start, ivec inputs, ivec weights) {
  return next_products(start, inputs, weights);
}
inline ivec dot_of(ivec sums, ivec) { return sums; }
#else
// Products of bytes are summed in 16 bits: those of a group, 8 times 2 products of 255 and -8, are -32,640 at least. With
// unsigned weights the sums begin at the lowest integer, of which there are two in a lane.
constexpr bool kHasByteProducts = false;
constexpr int32_t kUnsignedStart = 1 << 16;
inline ivec next_products(ivec sums, ivec inputs, ivec weights) {
  const __m256i products = _mm256_maddubs_epi16(inputs.v, weights.v);
  asm("vpaddw %1, %0, %0" : "+x"(sums.v) : "x"(products));
  return sums;
}
template <bool Unsigned>
inline ivec first_products(ivec, ivec inputs, ivec weights) {
  if constexpr (Unsigned) return next_products({_mm256_set1_epi16(-32768)}, inputs, weights);
  return {_mm256_maddubs_epi16(inputs.v, weights.v)};
}
inline ivec dot_of(ivec sums, ivec start) { return start + ivec{_mm256_madd_epi16(sums.v, _mm256_set1_epi16(1))}; }
#endif

}  // namespace triptych
