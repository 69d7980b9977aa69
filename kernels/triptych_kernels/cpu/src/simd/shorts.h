// Integers of 16 bits, two in each lane, where pairs of bfloat16 are multiplied on x86-64.
#pragma once

#include "simd/vec.h"

#if defined(__AVX512BF16__)

namespace triptych {

inline ivec operator|(ivec a, ivec b) { return {_mm512_or_si512(a.v, b.v)}; }
// The entries of a table of 2 * kLanes, by indices of 5 bits, whatever is above them.
inline ivec look_up_shorts(ivec table, ivec indices) { return {_mm512_permutexvar_epi16(indices.v, table.v)}; }
// The same of two tables, one after the other, by indices of 6 bits.
inline ivec look_up_shorts(ivec low, ivec high, ivec indices) {
  return {_mm512_permutex2var_epi16(low.v, indices.v, high.v)};
}
// The lanes of the mask only.
inline void store_lanes(float* to, uint32_t lanes, vec a) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(lanes), a.v);
}

}  // namespace triptych

#endif
