// What one core can do at most: read memory, and multiply in registers. limits.py compiles and times it.
#include "simd/vec.h"

#if defined(__AMX_BF16__)
#include "linear/amx_tile.h"
#endif

using namespace triptych;

namespace {
constexpr int kChains = 20;  // sums that do not wait for each other: more than latency times units
}

extern "C" float read_floats(const float* from, int64_t count) {
  vec sums[8];
  for (auto& sum : sums) sum = zero();
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
    unroll<8>([&](auto j) { sums[j] = sums[j] + load(from + i + j * kLanes); });
  }
  float total = 0;
  for (auto each : sums) total += sum(each);
  return total;
}

// Returns the operations per turn.
extern "C" int64_t multiply_float32(int64_t turns, float* out) {
  vec sums[kChains];
  unroll<kChains>([&](auto i) { sums[i] = splat(*out + i); });
  const vec factor = splat(*out);
  for (int64_t turn = 0; turn < turns; ++turn) {
    unroll<kChains>([&](auto i) { sums[i] = fma(sums[i], factor, factor); });
  }
  unroll<kChains>([&](auto i) { *out += sum(sums[i]); });
  return 2 * kLanes * kChains;
}

// Returns the operations per turn; 0 without an instruction for it.
extern "C" int64_t multiply_bfloat16(int64_t turns, float* out) {
#if defined(__AMX_BF16__)
  using namespace triptych::amx;
  const Tiles tiles(kMaxRows);  // of zeros; *out keeps what it has
  for (int64_t turn = 0; turn < turns; ++turn) {
    multiply<kSums00, kInputs0, kWeights0>();
    multiply<kSums01, kInputs0, kWeights1>();
    multiply<kSums10, kInputs1, kWeights0>();
    multiply<kSums11, kInputs1, kWeights1>();
  }
  return 2 * kMaxRows * kPanel * kStep + 0 * static_cast<int64_t>(*out);
#elif defined(__AVX512BF16__)
  vec sums[kChains];
  unroll<kChains>([&](auto i) { sums[i] = splat(*out + i); });
  __m512bh factor;
  std::memset(&factor, 0, sizeof factor);
  for (int64_t turn = 0; turn < turns; ++turn) {
    unroll<kChains>([&](auto i) { sums[i].v = _mm512_dpbf16_ps(sums[i].v, factor, factor); });
  }
  unroll<kChains>([&](auto i) { *out += sum(sums[i]); });
  return 4 * kLanes * kChains;
#else
  return turns * 0 * static_cast<int64_t>(*out);
#endif
}
