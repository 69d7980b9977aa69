// Floats of 8 bits, e4m3, widened by whole vectors of their bytes.
#pragma once

#include "simd/vec.h"

namespace triptych {

// widen_float8s(words, out): those of bytes 0 to 3 of each lane, of which none is NaN, in units of kFloat8Unit.

#if defined(__AVX512F__)

// As float16 their exponents mean so much less, and what has no leading 1 keeps its meaning.
constexpr float kFloat8Unit = 256.0f;

inline void widen_float8s(ivec words, vec (&out)[4]) {
  alignas(64) static constexpr auto kLowFirst = [] {
    struct {
      int16_t from[2 * kLanes];
    } order{};
    for (int i = 0; i < 2 * kLanes; ++i) order.from[i] = static_cast<int16_t>(2 * (i % kLanes) + i / kLanes);
    return order;
  }();
  unroll<2>([&](auto odd) {
    // each in the upper byte of 16 bits; moved to the exponent's place, its sign is there twice
    const __m512i upper = odd ? words.v : _mm512_slli_epi16(words.v, 8);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(upper, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m512i parted = _mm512_permutexvar_epi16(_mm512_load_si512(&kLowFirst), halves);
    out[odd].v = _mm512_cvtph_ps(_mm512_castsi512_si256(parted));
    out[2 + odd].v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(parted, 1));
  });
}

#else

constexpr float kFloat8Unit = 1.0f;

inline void widen_float8s(ivec words, vec (&out)[4]) {
  unroll<4>([&](auto i) {
    ivec bits = words;
    if constexpr (i > 0) bits = shift_right<8 * i>(words);
    out[i] = from_float8(bits);
  });
}

#endif

}  // namespace triptych
