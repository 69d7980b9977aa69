// How 4- and 8-bit weights are packed, and what a product with them reads of its inputs.
//
// Panels as in panel.h, each of groups of kGroup inputs:
//
//   [panels][groups] of
//     scales   [kPanel] float16           d
//     minima   [kPanel] float16           m, only in affine formats
//     words    [words][kPanel] uint32     the integers of an output as its GGML block has them, 4 bytes per word
//
//   w = d * (q - zero)        zero = 8 for 4 bits, which are stored unsigned       Q4_0
//                             zero = 128 for 8 bits, to which 128 was added        Q8_0
//   w = d * q + m             affine 4 bits, zero = 0                              Q4_1
//   w = d * (q - 128) + m     affine 8 bits, which hold a Q4_1 and a Q8_0 side by side without loss
//
// A word is read as pairs of 16-bit integers: 8 nibbles are the pairs (v >> 4j) & 0x000f000f, four bytes the pairs
// v & 0x00ff00ff and (v >> 8) & 0x00ff00ff. The order of inputs that this gives (kPairOrder) is the order in which
// a product's inputs are written; within a group sums are exact, so any order will do.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "simd/vec.h"
#include "linear/panel.h"

namespace triptych {

constexpr int kGroup = 32;
constexpr int64_t kAheadBytes = 8192;         // of the weights in hand: they are so small that less is too late
constexpr float kSmallestMagnitude = 1e-30f;  // a group with less counts as 0, since its inverse might not be finite

template <int Bits, bool Affine>
struct Format {
  static constexpr int kBits = Bits;
  static constexpr bool kAffine = Affine;
  static constexpr int kZero = Bits == 8 ? 128 : Affine ? 0 : 8;
  static constexpr int kWords = kGroup * Bits / 32;     // of one output, per group
  static constexpr int kPairs = 16 / Bits;              // of inputs, per word
  static constexpr int64_t kScaleBytes = kPanel * sizeof(uint16_t);
  static constexpr int64_t kWordsAt = kScaleBytes * (Affine ? 2 : 1);
  static constexpr int64_t kGroupBytes = kWordsAt + kPanel * kGroup * Bits / 8;
};

// f(Format) of the format that the arguments name.
template <typename F>
void with_format(int64_t bits, int64_t affine, const F& f) {
  if (bits == 4) {
    affine ? f(Format<4, true>()) : f(Format<4, false>());
  } else {
    affine ? f(Format<8, true>()) : f(Format<8, false>());
  }
}

// Input in group at each place of a group as products read it.
template <int Bits>
constexpr auto pair_order() {
  struct Order {
    int16_t input[kGroup];
  } order{};
  for (int place = 0; place < kGroup; ++place) {
    const int pairs = 16 / Bits, pair = place / 2, word = pair / pairs, shift = pair % pairs, half = place % 2;
    if (Bits == 4) {
      // GGML's byte i holds input i in its low nibble and i + 16 in its high one
      order.input[place] = 4 * word + 2 * half + shift / 2 + shift % 2 * (kGroup / 2);
    } else {
      order.input[place] = 4 * word + 2 * half + shift;
    }
  }
  return order;
}
template <int Bits>
inline constexpr auto kPairOrder = pair_order<Bits>();

// Integers of 4 bits without signs, as a table for `look_up`.
inline constexpr float kCounts[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Pair `pair` of each word.
template <int Bits, int Pair>
inline ivec pair_of(ivec words) {
  if constexpr ((Pair + 1) * Bits == 16) return shift_halves_right<Pair * Bits>(words);  // nothing above to mask
  return shift_right<Pair * Bits>(words) & splat_int(Bits == 4 ? 0x000f000f : 0x00ff00ff);
}

// Notes a scale in float16 that is no number.
inline void check_half(uint16_t bits, int64_t* is_damaged) {
  if ((bits & 0x7c00) == 0x7c00) std::atomic_ref(*is_damaged).store(1, std::memory_order_relaxed);
}

// One group of inputs of a row: values * scale, to 15 bits and a sign.
struct Activations {
  int16_t values[kGroup];  // in kPairOrder
  float scale;
  float sum;               // of the group's inputs
  int32_t offset;          // -zero * (sum of `values`): what the products' integers begin with
};

}  // namespace triptych
