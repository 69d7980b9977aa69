// Panels of weights as products of bytes read them, and the seam for stored formats.
//
// A group of 32 inputs has, for each output, 32 signed bytes and two or three floats:
//
//   w = scale * byte + minimum
//
// `Unpacked` holds that for many rows: 8 steps of 4 bytes, beside the scales, the sums of scale * byte, and minima. It
// is all that the tile of many rows knows of a format. A stored format is a type like `Packed`, which gives these parts of
// the group at hand (StoredPanel); `unpack` does the rest. Weights that are read from a table (nf4, MXFP4, IQ4_NL: a byte
// shuffle) or put together from planes of bits (Q5_K, Q6_K) differ in `signed_weights` only, those with scales of other
// groups in `scales` and `minima`.
#pragma once

#include <concepts>

#include "linear/byte_inputs.h"

namespace triptych::bytes {

inline ivec splat_byte(int x) { return splat_int(static_cast<int32_t>(0x01010101u * (x & 0xff))); }

// A half is one of a panel's two vectors of outputs.
template <typename P>
concept StoredPanel = requires(P panel, const P group) {
  requires std::same_as<decltype(P::kAffine), const bool>;        // whether there are minima
  requires P::kIsNibbles || kHasByteProducts;                     // whether bytes are from -8 to 7, as products may need
  { group.template signed_weights<0>(0) } -> std::same_as<ivec>;  // <step>(half): of inputs 4 * step to 4 * step + 3
  { group.scales(0) } -> std::same_as<vec>;                       // (half)
  { group.minima(0) } -> std::same_as<vec>;                       // (half), read only if kAffine
  panel.next();                                                   // to the next group
};

// The sums of a group's bytes, step by step. Those of nibbles, 8 * 15 at most, fit a byte.
template <bool IsNibbles>
struct Totals {
  ivec sums = splat_int(0);

  void add(ivec weights) { sums = IsNibbles ? add_bytes(sums, weights) : next_products(sums, splat_byte(1), weights); }
  ivec end() const {
    if constexpr (!IsNibbles) return sums;
    const ivec start = splat_int(0);
    return dot_of(first_products<false>(start, splat_byte(1), sums), start);
  }
};

// A panel as quantized.h describes it; tiles of few rows read it themselves.
template <typename F>
struct Packed {
  static constexpr bool kAffine = F::kAffine;
  static constexpr bool kIsNibbles = F::kBits == 4;
  static constexpr bool kUnsigned = F::kBits == 4;  // whether `weights` are kOffset more than the signed ones
  static constexpr int kWords = F::kWords, kParts = kSteps / kWords;
  static constexpr int32_t kOffset = F::kBits == 4 ? kNibbleOffset : 128;
  using GroupTotals = Totals<kIsNibbles>;
  const char* at;

  void next() {
    prefetch_once<F::kGroupBytes>(at + kAheadBytes);
    at += F::kGroupBytes;
  }
  // of step Part * kWords + word
  template <int Part>
  ivec weights(int word, int half) const {
    const ivec bytes = load_ints(at + F::kWordsAt + (word * kPanel + half * kLanes) * sizeof(uint32_t));
    if constexpr (F::kBits == 8) return add_bytes(bytes, splat_byte(-kOffset));
    return shift_right<4 * Part>(bytes) & splat_byte(15);
  }
  template <int Step>
  ivec signed_weights(int half) const {
    const ivec bytes = weights<Step / kWords>(Step % kWords, half);
    return kUnsigned ? add_bytes(bytes, splat_byte(-kOffset)) : bytes;
  }
  vec scales(int half) const { return load_halves(at + half * kLanes * sizeof(uint16_t)); }
  vec minima(int half) const {
    const vec stored = load_halves(at + F::kScaleBytes + half * kLanes * sizeof(uint16_t));
    return fma(scales(half), splat(kOffset - F::kZero), stored);
  }
  // sums of scale * byte, where `totals` are those of `weights`
  vec sums(int half, const GroupTotals& totals) const {
    return to_floats(totals.end() + splat_int(kUnsigned ? -kGroup * kOffset : 0)) * scales(half);
  }
};

// A panel of bytes and floats.
template <bool Affine>
struct Unpacked {
  static constexpr bool kAffine = Affine;
  static constexpr bool kUnsigned = false;
  static constexpr int kParts = 2, kWords = kSteps / kParts;
  static constexpr int kFirstVectors = Affine ? 6 : 4;  // scales, sums, minima
  static constexpr int64_t kGroupFloats = (kFirstVectors + 2 * kSteps) * kLanes;
  struct GroupTotals {  // which `sums` knows
    void add(ivec) {}
  };
  float* at;

  void next() { at += kGroupFloats; }
  float* place(int step, int half) const { return at + (kFirstVectors + 2 * step + half) * kLanes; }
  template <int Part>
  ivec weights(int word, int half) const {
    return load_ints(place(Part * kWords + word, half));
  }
  vec scales(int half) const { return load(at + half * kLanes); }
  vec sums(int half, GroupTotals) const { return load(at + (2 + half) * kLanes); }
  vec minima(int half) const { return load(at + (4 + half) * kLanes); }
};

template <StoredPanel P>
void unpack(P from, int64_t groups, Unpacked<P::kAffine> to) {
  for (int64_t group = 0; group < groups; ++group, from.next(), to.next()) {
    unroll<2>([&](auto half) {
      Totals<P::kIsNibbles> totals;
      unroll<kSteps>([&](auto step) {
        const ivec weights = from.template signed_weights<step>(half);
        totals.add(weights);
        store(to.place(step, half), as_vec(weights));
      });
      const vec scales = from.scales(half);
      store(to.at + half * kLanes, scales);
      store(to.at + (2 + half) * kLanes, to_floats(totals.end()) * scales);
      if constexpr (P::kAffine) store(to.at + (4 + half) * kLanes, from.minima(half));
    });
  }
}

}  // namespace triptych::bytes
