// Words that lie in rows in memory, a row for each lane, as vectors.
#pragma once

#include "simd/vec.h"

namespace triptych {

// out[i]: word i of the four that begin at byte `at` of each lane's row.
void load_columns(const uint8_t* const (&rows)[kLanes], int64_t at, ivec* out);

#if defined(__AVX512F__)

inline void load_columns(const uint8_t* const (&rows)[kLanes], int64_t at, ivec* out) {
  __m512i a[4];  // in each quarter a row
  unroll<4>([&](auto i) {
    const auto row = [&](int number) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[number] + at)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(8 + i)), row(12 + i), 1);
    a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  });
  const __m512i x0 = _mm512_unpacklo_epi32(a[0], a[1]), x1 = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i y0 = _mm512_unpacklo_epi32(a[2], a[3]), y1 = _mm512_unpackhi_epi32(a[2], a[3]);
  out[0].v = _mm512_unpacklo_epi64(x0, y0);
  out[1].v = _mm512_unpackhi_epi64(x0, y0);
  out[2].v = _mm512_unpacklo_epi64(x1, y1);
  out[3].v = _mm512_unpackhi_epi64(x1, y1);
}

#elif defined(__AVX2__)

inline void load_columns(const uint8_t* const (&rows)[kLanes], int64_t at, ivec* out) {
  __m256i a[4];  // in each half a row
  unroll<4>([&](auto i) {
    const auto row = [&](int number) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[number] + at)); };
    a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
  });
  const __m256i x0 = _mm256_unpacklo_epi32(a[0], a[1]), x1 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i y0 = _mm256_unpacklo_epi32(a[2], a[3]), y1 = _mm256_unpackhi_epi32(a[2], a[3]);
  out[0].v = _mm256_unpacklo_epi64(x0, y0);
  out[1].v = _mm256_unpackhi_epi64(x0, y0);
  out[2].v = _mm256_unpacklo_epi64(x1, y1);
  out[3].v = _mm256_unpackhi_epi64(x1, y1);
}

#else

inline void load_columns(const uint8_t* const (&rows)[kLanes], int64_t at, ivec* out) {
  const auto load_four = [&](int first, int32x4_t (&columns)[4]) {
    int32x4x2_t pairs[2];
    unroll<2>([&](auto i) {
      const auto row = [&](int number) { return vreinterpretq_s32_u8(vld1q_u8(rows[first + number] + at)); };
      pairs[i] = vtrnq_s32(row(2 * i), row(2 * i + 1));
    });
    unroll<2>([&](auto i) {
      columns[i] = vcombine_s32(vget_low_s32(pairs[0].val[i]), vget_low_s32(pairs[1].val[i]));
      columns[2 + i] = vcombine_s32(vget_high_s32(pairs[0].val[i]), vget_high_s32(pairs[1].val[i]));
    });
  };
  int32x4_t low[4], high[4];
  load_four(0, low);
  load_four(4, high);
  unroll<4>([&](auto i) { out[i] = {low[i], high[i]}; });
}

#endif

}  // namespace triptych
