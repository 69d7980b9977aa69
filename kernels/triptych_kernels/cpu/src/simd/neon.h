// The vectors of vec.h, with ARM's Advanced SIMD (NEON): two registers of four lanes are one vector, so that kernels
// have the eight lanes and sixteen vectors of AVX2.
#pragma once

#include <arm_neon.h>

#include "simd/element.h"

namespace triptych {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
struct vec {
  float32x4_t low, high;
};
inline vec zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
inline vec splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline vec operator+(vec a, vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline vec operator-(vec a, vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline vec operator*(vec a, vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline vec operator/(vec a, vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline vec fma(vec a, vec b, vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }

// What comparisons give: all bits of a lane, or none.
struct mask {
  uint32x4_t low, high;
};
inline mask operator&(mask a, mask b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
inline mask is_greater(vec a, vec b) { return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)}; }
inline vec select(mask chosen, vec a, vec b) {
  return {vbslq_f32(chosen.low, a.low, b.low), vbslq_f32(chosen.high, a.high, b.high)};
}
// Bit i is for lane i.
inline uint32_t bits_of(mask a) {
  const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
  return vaddvq_u32(vorrq_u32(vandq_u32(a.low, low), vandq_u32(a.high, high)));
}
inline mask mask_of(uint32_t lanes) {
  const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
  return {vtstq_u32(vdupq_n_u32(lanes), low), vtstq_u32(vdupq_n_u32(lanes), high)};
}

// Of two of which one is NaN, the second, as on x86-64.
inline vec max(vec a, vec b) { return select(is_greater(a, b), a, b); }
inline vec min(vec a, vec b) { return select(is_greater(b, a), a, b); }
inline vec abs(vec a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline vec select_negative(vec x, vec negative, vec other) {
  const mask is_negative = {vcltzq_s32(vreinterpretq_s32_f32(x.low)), vcltzq_s32(vreinterpretq_s32_f32(x.high))};
  return select(is_negative, negative, other);
}
inline float sum(vec a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
inline float largest(vec a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
inline vec load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline vec load(const bf16* from) {
  const uint16x8_t halves = vld1q_u16(&from->bits);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
}
inline vec in_register(vec a) {
  asm("" : "+w"(a.low), "+w"(a.high));
  return a;
}
inline void store(float* to, vec a) {
  vst1q_f32(to, a.low);
  vst1q_f32(to + 4, a.high);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline uint16x8_t round_to_bf16(vec a) {
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a.low), a.high));
}
#else
inline uint16x8_t round_to_bf16(vec a) {
  const auto round = [](float32x4_t half) {  // into the upper half of each lane
    const uint32x4_t bits = vreinterpretq_u32_f32(half);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vbslq_u32(vceqq_f32(half, half), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
  };
  return vshrn_high_n_u32(vshrn_n_u32(round(a.low), 16), round(a.high), 16);
}
#endif
inline void store(bf16* to, vec a) { vst1q_u16(&to->bits, round_to_bf16(a)); }

inline uint32_t equal(vec a, vec b) {
  return bits_of(mask{vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)});
}
inline uint32_t greater(vec a, vec b) { return bits_of(is_greater(a, b)); }
inline uint32_t at_least(vec a, vec b) {
  return bits_of(mask{vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)});
}
inline uint32_t unordered(vec a, vec b) { return ~(equal(a, a) & equal(b, b)) & 0xff; }
inline vec only(uint32_t lanes, vec a) { return select(mask_of(lanes), a, zero()); }
inline int64_t compress(float* to, uint32_t lanes, vec a) {
  float values[kLanes];
  store(values, a);
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {  // without a branch; a write past the count is the next one's place
    to[count] = values[lane];
    count += (lanes >> lane) & 1;
  }
  return count;
}

inline vec scale_by_power(vec x, vec n) {
  const auto power = [](float32x4_t exponent) {
    const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(exponent), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
  };
  return {vmulq_f32(x.low, power(n.low)), vmulq_f32(x.high, power(n.high))};
}
// The same, where n may lie below all exponents: then it is 0. NaN stays.
inline vec scale_down(vec x, vec n) { return select(is_greater(splat(-126.0f), n), zero(), scale_by_power(x, n)); }
inline vec round_to_whole(vec x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

// Lane i of the result is the sum of a[i].
inline vec sums(const vec (&a)[kLanes]) {
  float32x4_t b[kLanes];
  unroll<kLanes>([&](auto i) { b[i] = vaddq_f32(a[i].low, a[i].high); });
  return {vpaddq_f32(vpaddq_f32(b[0], b[1]), vpaddq_f32(b[2], b[3])),
          vpaddq_f32(vpaddq_f32(b[4], b[5]), vpaddq_f32(b[6], b[7]))};
}

// a[i][j] becomes a[j][i].
[[gnu::always_inline]] inline void transpose(vec (&a)[kLanes]) {
  const auto turn = [](float32x4_t& w, float32x4_t& x, float32x4_t& y, float32x4_t& z) __attribute__((always_inline)) {
    const float64x2_t wx0 = vreinterpretq_f64_f32(vtrn1q_f32(w, x)), wx1 = vreinterpretq_f64_f32(vtrn2q_f32(w, x));
    const float64x2_t yz0 = vreinterpretq_f64_f32(vtrn1q_f32(y, z)), yz1 = vreinterpretq_f64_f32(vtrn2q_f32(y, z));
    w = vreinterpretq_f32_f64(vtrn1q_f64(wx0, yz0));
    x = vreinterpretq_f32_f64(vtrn1q_f64(wx1, yz1));
    y = vreinterpretq_f32_f64(vtrn2q_f64(wx0, yz0));
    z = vreinterpretq_f32_f64(vtrn2q_f64(wx1, yz1));
  };
  unroll<2>([&](auto half) {
    turn(a[4 * half].low, a[4 * half + 1].low, a[4 * half + 2].low, a[4 * half + 3].low);
    turn(a[4 * half].high, a[4 * half + 1].high, a[4 * half + 2].high, a[4 * half + 3].high);
  });
  unroll<4>([&](auto i) { std::swap(a[i].high, a[4 + i].low); });
}

// even[0], odd[0], even[1], odd[1] … in two vectors
inline void interleave(vec& even, vec& odd) {
  const vec first = even, second = odd;
  even = {vzip1q_f32(first.low, second.low), vzip2q_f32(first.low, second.low)};
  odd = {vzip1q_f32(first.high, second.high), vzip2q_f32(first.high, second.high)};
}

// Lanes first, first + 1 … end - 1 of `inside`, the others of `outside`; the bounds may lie outside of the vector.
inline vec select_lanes(vec inside, vec outside, int64_t first, int64_t end) {
  const auto below = [](int64_t lane) { return lane <= 0 ? 0u : lane >= kLanes ? 0xffu : (1u << lane) - 1u; };
  return select(mask_of(below(end) & ~below(first)), inside, outside);
}

struct ivec {
  int32x4_t low, high;
};
inline ivec splat_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline ivec load_ints(const void* from) {
  const auto* bytes = static_cast<const int8_t*>(from);
  return {vreinterpretq_s32_s8(vld1q_s8(bytes)), vreinterpretq_s32_s8(vld1q_s8(bytes + 16))};
}
inline ivec operator&(ivec a, ivec b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
template <int Bits>
inline ivec shift_left(ivec a) {
  return {vshlq_n_s32(a.low, Bits), vshlq_n_s32(a.high, Bits)};
}
template <int Bits>
inline ivec shift_right(ivec a) {
  const auto shift = [](int32x4_t x) { return vreinterpretq_s32_u32(vreinterpretq_u32_s32(x) >> Bits); };
  return {shift(a.low), shift(a.high)};
}
template <int Bits>
inline ivec shift_halves_right(ivec a) {
  const auto shift = [](int32x4_t x) { return vreinterpretq_s32_u16(vreinterpretq_u16_s32(x) >> Bits); };
  return {shift(a.low), shift(a.high)};
}
// The signed bytes 0 and 2, or 1 and 3, of each word as two 16-bit integers.
inline ivec odd_bytes(ivec a) {
  const auto extend = [](int32x4_t x) { return vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(x), 8)); };
  return {extend(a.low), extend(a.high)};
}
inline ivec even_bytes(ivec a) {
  const auto raise = [](int32x4_t x) { return vreinterpretq_s32_s16(vshlq_n_s16(vreinterpretq_s16_s32(x), 8)); };
  return odd_bytes({raise(a.low), raise(a.high)});
}
inline ivec operator+(ivec a, ivec b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline ivec add_bytes(ivec a, ivec b) {  // modulo 256, each for itself
  const auto add = [](int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s8(vaddq_s8(vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(y)));
  };
  return {add(a.low, b.low), add(a.high, b.high)};
}
inline ivec subtract_bytes(ivec a, ivec b) {
  const auto subtract = [](int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(y)));
  };
  return {subtract(a.low, b.low), subtract(a.high, b.high)};
}
inline ivec max(ivec a, ivec b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
inline int32_t sum(ivec a) { return vaddvq_s32(vaddq_s32(a.low, a.high)); }
inline int32_t largest(ivec a) { return vmaxvq_s32(vmaxq_s32(a.low, a.high)); }
inline ivec bits_of(vec a) { return {vreinterpretq_s32_f32(a.low), vreinterpretq_s32_f32(a.high)}; }
inline vec as_vec(ivec bits) { return {vreinterpretq_f32_s32(bits.low), vreinterpretq_f32_s32(bits.high)}; }
inline ivec to_ints(vec a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }  // to nearest
inline vec to_floats(ivec a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
inline int16x8_t to_shorts(ivec a) { return vqmovn_high_s32(vqmovn_s32(a.low), a.high); }
inline void store_bytes(int8_t* to, ivec a) { vst1_s8(to, vqmovn_s16(to_shorts(a))); }
inline void store_shorts(int16_t* to, ivec a) { vst1q_s16(to, to_shorts(a)); }
// As 16-bit integers, the middle two of each four swapped: so `even_bytes` and `odd_bytes` pair them.
inline void store_shorts_in_pairs(int16_t* to, ivec a) {
  const int16x8_t shorts = to_shorts(a);
  vst1q_s16(to, __builtin_shufflevector(shorts, shorts, 0, 2, 1, 3, 4, 6, 5, 7));
}
// The pairs (low[i], high[i]) of 2 * kLanes bytes as 16-bit integers.
inline void pair_up_bytes(const int8_t* low, const int8_t* high, ivec (&out)[2]) {
  const int8x16_t x = vld1q_s8(low), y = vld1q_s8(high);
  const auto extend = [](int8x16_t pairs) -> ivec {
    return {vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(pairs))), vreinterpretq_s32_s16(vmovl_high_s8(pairs))};
  };
  out[0] = extend(vzip1q_s8(x, y));
  out[1] = extend(vzip2q_s8(x, y));
}
inline void in_order(ivec (&)[2]) {}
inline vec load_halves(const void* from) {
  const auto* halves = static_cast<const uint16_t*>(from);
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + 4)))};
}
inline ivec load_bytes(const void* from) {
  const uint16x8_t shorts = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(from)));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(shorts))), vreinterpretq_s32_u32(vmovl_high_u16(shorts))};
}
inline ivec look_up_bytes(const uint8_t* table, ivec indices) {
  const uint8x16_t bytes = vld1q_u8(table);
  const auto find = [&](int32x4_t x) { return vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_s32(x))); };
  return {find(indices.low), find(indices.high)};
}
inline vec look_up(const float* table, ivec indices) {
  int32_t at[kLanes];
  vst1q_s32(at, indices.low);
  vst1q_s32(at + 4, indices.high);
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = table[at[i] & 15];
  return load(values);
}
// sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1] of 16-bit integers
inline ivec add_dot(ivec sum, ivec a, ivec b) {
  const auto dot = [](int32x4_t x, int32x4_t y) {
    const int16x8_t left = vreinterpretq_s16_s32(x), right = vreinterpretq_s16_s32(y);
    return vpaddq_s32(vmull_s16(vget_low_s16(left), vget_low_s16(right)), vmull_high_s16(left, right));
  };
  return {vaddq_s32(sum.low, dot(a.low, b.low)), vaddq_s32(sum.high, dot(a.high, b.high))};
}

constexpr int32_t kLowestByte = -128;
constexpr int32_t kUnsignedStart = 0;
inline void store_input_bytes(void* to, ivec a) { store_bytes(static_cast<int8_t*>(to), a); }
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasByteProducts = true;
#else
constexpr bool kHasByteProducts = false;
#endif
inline ivec next_products(ivec sums, ivec inputs, ivec weights) {
  const auto add = [](int32x4_t sum, int32x4_t x, int32x4_t y) {
    const int8x16_t left = vreinterpretq_s8_s32(x), right = vreinterpretq_s8_s32(y);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, left, right);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right)), high = vmull_high_s8(left, right);
    return vpadalq_s16(sum, vpaddq_s16(low, high));  // sums of two fit 16 bits: a weight has at most 15 in magnitude
#endif
  };
  return {add(sums.low, inputs.low, weights.low), add(sums.high, inputs.high, weights.high)};
}
template <bool Unsigned>
inline ivec first_products(ivec start, ivec inputs, ivec weights) {
  return next_products(start, inputs, weights);
}
inline ivec dot_of(ivec sums, ivec) { return sums; }

// The two bfloat16 of each lane.
inline vec even(vec pairs) {
  const auto raise = [](float32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 16)); };
  return {raise(pairs.low), raise(pairs.high)};
}
inline vec odd(vec pairs) { return as_vec(bits_of(pairs) & splat_int(~0xffff)); }

// out[2i] = first[i], out[2i + 1] = second[i]
inline void store_pairs(bf16* out, vec first, vec second) {
  const uint16x8x2_t halves = {{round_to_bf16(first), round_to_bf16(second)}};
  vst2q_u16(&out->bits, halves);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

constexpr bool kHasBf16Products = true;

inline vec add_bf16_dot(vec sum, vec a, vec b) {
  const auto dot = [](float32x4_t s, float32x4_t x, float32x4_t y) {
    return vbfdotq_f32(s, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(y));
  };
  return {dot(sum.low, a.low, b.low), dot(sum.high, a.high, b.high)};
}
// not by a product with ones: GCC 12 takes bfloat16 constants for float16
inline vec add_bf16_pairs(vec sum, vec a) { return sum + even(a) + odd(a); }
inline void pair_up(const bf16* low, const bf16* high, vec (&out)[2]) {
  unroll<2>([&](auto half) {
    const uint16x8_t x = vld1q_u16(&low[half * kLanes].bits), y = vld1q_u16(&high[half * kLanes].bits);
    out[half] = {vreinterpretq_f32_u16(vzip1q_u16(x, y)), vreinterpretq_f32_u16(vzip2q_u16(x, y))};
  });
}
inline vec round_to_pairs(vec low, vec high) {
  return {vreinterpretq_f32_u16(round_to_bf16(low)), vreinterpretq_f32_u16(round_to_bf16(high))};
}

#else

constexpr bool kHasBf16Products = false;

#endif

// Vectors of u64 of which the low halves are the u32 in hand; see avx512.h.
struct u64s {
  uint64x2_t low, high;
};
constexpr int kCounterLanes = 4;
inline u64s splat_u64(uint64_t x) { return {vdupq_n_u64(x), vdupq_n_u64(x)}; }
inline u64s first_numbers() { return {uint64x2_t{0, 1}, uint64x2_t{2, 3}}; }
inline u64s add(u64s a, u64s b) { return {vaddq_u64(a.low, b.low), vaddq_u64(a.high, b.high)}; }
inline u64s multiply_low(u64s a, u64s b) {
  return {vmull_u32(vmovn_u64(a.low), vmovn_u64(b.low)), vmull_u32(vmovn_u64(a.high), vmovn_u64(b.high))};
}
inline u64s high_half(u64s a) { return {vshrq_n_u64(a.low, 32), vshrq_n_u64(a.high, 32)}; }
inline u64s exclusive_or(u64s a, u64s b, u64s c) {
  return {veorq_u64(veorq_u64(a.low, b.low), c.low), veorq_u64(veorq_u64(a.high, b.high), c.high)};
}
inline u64s larger_u32(u64s a, u64s b) {
  const auto larger = [](uint64x2_t x, uint64x2_t y) {
    return vreinterpretq_u64_u32(vmaxq_u32(vreinterpretq_u32_u64(x), vreinterpretq_u32_u64(y)));
  };
  return {larger(a.low, b.low), larger(a.high, b.high)};
}
// Bit 2 * i is for lane i.
inline uint32_t low_at_least(u64s a, uint32_t bound) {
  const uint32x4_t bounds = vdupq_n_u32(bound);
  return bits_of(mask{vcgeq_u32(vreinterpretq_u32_u64(a.low), bounds), vcgeq_u32(vreinterpretq_u32_u64(a.high), bounds)}) & 0x55;
}
inline void store(uint64_t* to, u64s a) {
  vst1q_u64(to, a.low);
  vst1q_u64(to + 2, a.high);
}

}  // namespace triptych
