// Philox4x32-10 for 16 neighbouring counters at a time, the noise of 64 tokens.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "simd/vec.h"

namespace triptych {

// The noise of one row: key = seed, counter = (position, token id / 4, 0), word = token id % 4.
class Noise {
 public:
  static constexpr int kTokens = 64;

  Noise(uint64_t seed, uint64_t position) : position_(position) {
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (auto& [low_key, high_key] : keys_) {
      low_key = low;
      high_key = high;
      low += 0x9e3779b9u;  // the golden ratio and sqrt(3) - 1, scaled to 2^32
      high += 0xbb67ae85u;
    }
  }

  // f(token, word) for those of the tokens 0..63 after `first` with a word of at least `bound`, in any order; `first`
  // is a multiple of 64.
  template <typename F>
  void for_words_at_least(uint32_t bound, int64_t first_token, const F& f) const {
    u64s c[kVectors][kWords];
    const u64s first = add(first_numbers(), splat_u64(static_cast<uint64_t>(first_token) / kWords));
    unroll<kVectors>([&](auto v) {
      c[v][0] = splat_u64(position_ & 0xffffffffu);
      c[v][1] = splat_u64(position_ >> 32);
      c[v][2] = add(first, splat_u64(v * kCounterLanes));
      c[v][3] = splat_u64(0);
    });
    const u64s multiplier0 = splat_u64(0xd2511f53u), multiplier1 = splat_u64(0xcd9e8d57u);
    unroll<kRounds>([&](auto round) {
      const u64s key0 = splat_u64(keys_[round].low), key1 = splat_u64(keys_[round].high);
      unroll<kVectors>([&](auto v) {
        const u64s product0 = multiply_low(c[v][0], multiplier0), product1 = multiply_low(c[v][2], multiplier1);
        c[v][0] = exclusive_or(high_half(product1), c[v][1], key0);
        c[v][1] = product1;
        c[v][2] = exclusive_or(high_half(product0), c[v][3], key1);
        c[v][3] = product0;
      });
    });
    u64s best = splat_u64(0);
    unroll<kVectors * kWords>([&](auto i) { best = larger_u32(best, c[i / kWords][i % kWords]); });
    if (low_at_least(best, bound) == 0) return;
    for (int v = 0; v < kVectors; ++v) {
      for (int w = 0; w < kWords; ++w) {
        uint32_t reaching = low_at_least(c[v][w], bound);
        if (reaching == 0) continue;
        uint64_t lanes[kCounterLanes];
        store(lanes, c[v][w]);
        for (; reaching != 0; reaching &= reaching - 1) {
          const int lane = __builtin_ctz(reaching) / 2;
          f(first_token + (v * kCounterLanes + lane) * kWords + w, static_cast<uint32_t>(lanes[lane]));
        }
      }
    }
  }

 private:
  static constexpr int kRounds = 10, kWords = 4, kVectors = kTokens / kWords / kCounterLanes;
  struct RoundKey {
    uint64_t low, high;
  };
  uint64_t position_;
  RoundKey keys_[kRounds];
};

}  // namespace triptych
