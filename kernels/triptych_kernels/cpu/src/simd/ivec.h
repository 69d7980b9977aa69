// Vectors of 32-bit integers, as many as `vec` has floats, and what products of 16-bit integers need.
#pragma once

#include "simd/vec.h"

namespace triptych {

#if defined(__AVX512F__)

struct ivec {
  __m512i v;
};
inline ivec splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline ivec load_ints(const void* from) { return {_mm512_loadu_si512(from)}; }
inline ivec operator&(ivec a, ivec b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int Bits>
inline ivec shift_right(ivec a) {
  return {_mm512_srli_epi32(a.v, Bits)};
}
template <int Bits>
inline ivec shift_halves_right(ivec a) {
  return {_mm512_srli_epi16(a.v, Bits)};
}
// The signed bytes 0 and 2, or 1 and 3, of each word as two 16-bit integers.
inline ivec even_bytes(ivec a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
inline ivec odd_bytes(ivec a) { return {_mm512_srai_epi16(a.v, 8)}; }
inline ivec operator+(ivec a, ivec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline ivec max(ivec a, ivec b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t sum(ivec a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t largest(ivec a) { return _mm512_reduce_max_epi32(a.v); }
inline ivec bits_of(vec a) { return {_mm512_castps_si512(a.v)}; }
inline vec as_vec(ivec bits) { return {_mm512_castsi512_ps(bits.v)}; }
inline ivec to_ints(vec a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest
inline vec to_floats(ivec a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline void store_bytes(int8_t* to, ivec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(a.v));
}
// The pairs (low[i], high[i]) of 2 * kLanes bytes as 16-bit integers, in an order that `in_order` undoes.
inline void pair_up_bytes(const int8_t* low, const int8_t* high, ivec (&out)[2]) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  out[0].v = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y));
  out[1].v = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y));
}
// As 16-bit integers, the middle two of each four swapped: so `even_bytes` and `odd_bytes` pair them.
inline void store_shorts_in_pairs(int16_t* to, ivec a) {
  const __m256i shorts = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm512_cvtsepi32_epi16(a.v), 0xd8), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), shorts);
}
inline void in_order(ivec (&a)[2]) {
  const __m512i first = a[0].v;
  a[0].v = _mm512_shuffle_i32x4(first, a[1].v, 0x44);
  a[1].v = _mm512_shuffle_i32x4(first, a[1].v, 0xee);
}
inline void store_shorts(int16_t* to, ivec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(a.v));
}
inline vec load_halves(const void* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
// sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1] of 16-bit integers
inline ivec add_dot(ivec sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}

#else

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
inline ivec shift_halves_right(ivec a) {
  return {_mm256_srli_epi16(a.v, Bits)};
}
inline ivec even_bytes(ivec a) { return {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8)}; }
inline ivec odd_bytes(ivec a) { return {_mm256_srai_epi16(a.v, 8)}; }
inline ivec operator+(ivec a, ivec b) { return {_mm256_add_epi32(a.v, b.v)}; }
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
inline ivec add_dot(ivec sum, ivec a, ivec b) {
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
}

#endif

}  // namespace triptych
