// Elements in memory: bfloat16 and float32; and loops with constant indices.
#pragma once

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

}  // namespace triptych
