// The vectors of vec.h, with AVX-512.
#pragma once

#include <immintrin.h>

#include "simd/element.h"

namespace triptych {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;  // vectors that the processor holds
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
// The same, in a register from here on: for each use of what it has loaded GCC 12 may load again.
inline vec in_register(vec a) {
  asm("" : "+v"(a.v));
  return a;
}
inline void store(float* to, vec a) { _mm512_storeu_ps(to, a.v); }
#if defined(__AVX512BF16__)
inline void store(bf16* to, vec a) {
  const __m256bh half = _mm512_cvtneps_pbh(a.v);
  __m256i halves;
  std::memcpy(&halves, &half, sizeof halves);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#else
// each lane's bfloat16 in its upper half
inline __m512i round_to_bf16(vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}
inline void store(bf16* to, vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(a), 16)));
}
#endif

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

// even[0], odd[0], even[1], odd[1] … in two vectors
inline void interleave(vec& even, vec& odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = even.v;
  even.v = _mm512_permutex2var_ps(first, low, odd.v);
  odd.v = _mm512_permutex2var_ps(first, high, odd.v);
}

// Lanes first, first + 1 … end - 1 of `inside`, the others of `outside`; the bounds may lie outside of the vector.
inline vec select_lanes(vec inside, vec outside, int64_t first, int64_t end) {
  const auto below = [](int64_t lane) { return lane <= 0 ? 0u : lane >= kLanes ? 0xffffu : (1u << lane) - 1u; };
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below(end) & ~below(first)), outside.v, inside.v)};
}

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
inline ivec shift_left(ivec a) {
  return {_mm512_slli_epi32(a.v, Bits)};
}
template <int Bits>
inline ivec shift_halves_right(ivec a) {
  return {_mm512_srli_epi16(a.v, Bits)};
}
// The signed bytes 0 and 2, or 1 and 3, of each word as two 16-bit integers.
inline ivec even_bytes(ivec a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
inline ivec odd_bytes(ivec a) { return {_mm512_srai_epi16(a.v, 8)}; }
inline ivec operator+(ivec a, ivec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline ivec add_bytes(ivec a, ivec b) { return {_mm512_add_epi8(a.v, b.v)}; }  // modulo 256, each for itself
inline ivec subtract_bytes(ivec a, ivec b) { return {_mm512_sub_epi8(a.v, b.v)}; }
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

// kLanes bytes without signs.
inline ivec load_bytes(const void* from) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}
// The bytes of a table of 16, by indices of 4 bits.
inline ivec look_up_bytes(const uint8_t* table, ivec indices) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(bytes, indices.v)};
}
// The floats of a table of 16, by indices of 4 bits, one in each lane.
inline vec look_up(const float* table, ivec indices) {
  return {_mm512_permutexvar_ps(indices.v, _mm512_loadu_ps(table))};
}

// The two bfloat16 of each lane.
inline vec even(vec pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))}; }
inline vec odd(vec pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi32(~0xffff)))};
}

#if defined(__AVX512BF16__)

constexpr bool kHasBf16Products = true;

inline vec add_bf16_dot(vec sum, vec a, vec b) {
  __m512bh x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  return {_mm512_dpbf16_ps(sum.v, x, y)};
}
inline vec add_bf16_pairs(vec sum, vec a) { return add_bf16_dot(sum, a, {_mm512_castsi512_ps(_mm512_set1_epi16(0x3f80))}); }
inline void pair_up(const bf16* low, const bf16* high, vec (&out)[2]) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const auto load_pairs = [](const bf16* from) {
    return _mm512_castps_si512(in_register(load(reinterpret_cast<const float*>(from))).v);
  };
  const __m512i x = load_pairs(low), y = load_pairs(high);
  out[0].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, first, y));
  out[1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, second, y));
}
inline vec round_to_pairs(vec low, vec high) {
  const __m512bh both = _mm512_cvtne2ps_pbh(high.v, low.v);
  vec bits;
  std::memcpy(&bits, &both, sizeof bits);
  return bits;
}
// out[2i] = first[i], out[2i + 1] = second[i]
inline void store_pairs(bf16* out, vec first, vec second) {
  alignas(64) static constexpr auto kOrder = [] {
    struct {
      int16_t from[2 * kLanes];
    } order{};
    for (int i = 0; i < kLanes; ++i) {
      order.from[2 * i] = i;
      order.from[2 * i + 1] = kLanes + i;
    }
    return order;
  }();
  const __m512i bits = _mm512_castps_si512(round_to_pairs(first, second).v);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(&kOrder), bits));
}

#else

constexpr bool kHasBf16Products = false;

inline void store_pairs(bf16* out, vec first, vec second) {
  const __m512i low = _mm512_srli_epi32(round_to_bf16(first), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, round_to_bf16(second)));
}

#endif

// Vectors of u64 of which the low halves are the u32 in hand: where products of 32 x 32 bits come and go without a
// shuffle. The high halves hold remains, which nothing reads.
using u64s = __m512i;
constexpr int kCounterLanes = 8;
inline u64s splat_u64(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
inline u64s first_numbers() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
inline u64s add(u64s a, u64s b) { return _mm512_add_epi64(a, b); }
inline u64s multiply_low(u64s a, u64s b) { return _mm512_mul_epu32(a, b); }
inline u64s high_half(u64s a) { return _mm512_srli_epi64(a, 32); }
inline u64s exclusive_or(u64s a, u64s b, u64s c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline u64s larger_u32(u64s a, u64s b) { return _mm512_max_epu32(a, b); }
// Bit 2 * i is for lane i.
inline uint32_t low_at_least(u64s a, uint32_t bound) {
  return _mm512_mask_cmpge_epu32_mask(0x5555, a, _mm512_set1_epi32(static_cast<int>(bound)));
}
inline void store(uint64_t* to, u64s a) { _mm512_storeu_si512(to, a); }

// sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1] of 16-bit integers
inline ivec add_dot(ivec sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));  // for its intrinsic GCC 12 copies each sum
#else
  const __m512i products = _mm512_madd_epi16(a.v, b.v);
  asm("vpaddd %1, %0, %0" : "+v"(sum.v) : "v"(products));
#endif
  return sum;
}

constexpr int32_t kLowestByte = 0;
inline void store_input_bytes(void* to, ivec a) {
  const __m128i bytes = _mm512_cvtusepi32_epi8(a.v);
  _mm_storeu_si128(static_cast<__m128i*>(to), bytes);
}
#if defined(__AVX512VNNI__)
constexpr bool kHasByteProducts = true;
constexpr int32_t kUnsignedStart = 0;
inline ivec next_products(ivec sums, ivec inputs, ivec weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(inputs.v), "v"(weights.v));
  return sums;
}
template <bool Unsigned>
inline ivec first_products(ivec start, ivec inputs, ivec weights) {
  return next_products(start, inputs, weights);
}
inline ivec dot_of(ivec sums, ivec) { return sums; }
#else
// In 16 bits, as in avx2.h.
constexpr bool kHasByteProducts = false;
constexpr int32_t kUnsignedStart = 1 << 16;
inline ivec next_products(ivec sums, ivec inputs, ivec weights) {
  const __m512i products = _mm512_maddubs_epi16(inputs.v, weights.v);
  asm("vpaddw %1, %0, %0" : "+v"(sums.v) : "v"(products));
  return sums;
}
template <bool Unsigned>
inline ivec first_products(ivec, ivec inputs, ivec weights) {
  if constexpr (Unsigned) return next_products({_mm512_set1_epi16(-32768)}, inputs, weights);
  return {_mm512_maddubs_epi16(inputs.v, weights.v)};
}
inline ivec dot_of(ivec sums, ivec start) { return start + ivec{_mm512_madd_epi16(sums.v, _mm512_set1_epi16(1))}; }
#endif

}  // namespace triptych
