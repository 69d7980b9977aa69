// The blocks of .gguf files, of kLanes rows side by side: their scales, and their codes as panel_codes.h puts them.
#pragma once

#include "linear/panel_codes.h"

namespace triptych::blocks {

// How GGML stores weights of a row, as formats.py numbers the types. The layouts are those of ggml-common.h in
// llama.cpp.
enum BlockType : int64_t {
  kQ4_0, kQ4_1, kQ8_0, kQ5_0, kQ5_1, kIq4Nl, kMxfp4,
  kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Xs,
};

// Words of 4 bytes of a block, each of kLanes rows: all that is computed of blocks is computed of rows side by side.
using Words = const ivec*;
// Codes of a group, those of 4 inputs in the bytes of a word.
using Steps = ivec[bytes::kSteps];

constexpr int kGroups = coded::kSuperGroup / kGroup;  // of the largest blocks

// The scales of a block, of each row.
struct Scales {
  ivec scale = splat_int(0), minimum = splat_int(0);  // float16 in the lower half; of powers of two the exponent
  ivec multiples[kGroups / 2] = {}, minima[kGroups / 2] = {};  // four in the bytes of a word; of two levels only
};

template <int Bits>
inline ivec bits_at(ivec words, int mask) {
  return shift_right<Bits>(words) & bytes::splat_byte(mask);
}
inline ivec lower_half(ivec words) { return words & splat_int(0xffff); }
inline ivec upper_half(ivec words) { return shift_right<16>(words); }

// The low halves of 16 bytes, then their high ones.
inline void read_nibbles(Words from, Steps& to) {
  unroll<4>([&](auto i) {
    to[i] = bits_at<0>(from[i], 15);
    to[4 + i] = bits_at<4>(from[i], 15);
  });
}

// Each 32 bytes hold groups in parts of `Bits`, the lowest ones first.
template <int Bits, int Group>
void read_parts(Words from, Steps& to) {
  constexpr int kParts = 8 / Bits;
  unroll<bytes::kSteps>([&](auto step) {
    to[step] = bits_at<Group % kParts * Bits>(from[Group / kParts * bytes::kSteps + step], (1 << Bits) - 1);
  });
}

// 32 bytes hold a bit of each weight of eight groups, the first group's lowest.
template <int Group, int At>
void add_bit(Words from, Steps& to) {
  unroll<bytes::kSteps>([&](auto step) { to[step] = to[step] + shift_left<At>(bits_at<Group>(from[step], 1)); });
}

// A word holds the fifth bit of 32 weights.
inline void add_fifth_bit(ivec word, Steps& to) {
  unroll<bytes::kSteps>([&](auto step) {
    const ivec four = shift_right<4 * step>(word) & splat_int(15);
    // bit i to byte i
    const ivec pairs = (four + shift_left<14>(four)) & splat_int(0x00030003);
    to[step] = to[step] + shift_left<4>((pairs + shift_left<7>(pairs)) & bytes::splat_byte(1));
  });
}

// A type: the bytes and the weights of a block; the bytes before its first word; what its codes count from, if they are
// integers without a minimum; and the scales of two levels in a block. `scales` and `codes` read a block.
template <int Bytes, int Weights, int Head, int Center = 0, int Units = 0>
struct Stored {
  static constexpr int kBytes = Bytes, kWeights = Weights, kHead = Head, kCenter = Center, kUnits = Units;
  static constexpr int kWords = (Bytes - Head) / 4;
  static constexpr bool kHasTail = (Bytes - Head) % 4 != 0;  // a float16 behind the last word
};
// A float16, then codes of 4 bits.
template <int Bytes, int Center>
struct HalfAndNibbles : Stored<Bytes, kGroup, 2, Center> {
  static void scales(ivec head, Words, Scales& to) { to.scale = head; }
  template <int>
  static void codes(Words from, Steps& to) {
    read_nibbles(from, to);
  }
};
inline void read_scale_and_minimum(ivec word, Scales& to) {
  to.scale = lower_half(word);
  to.minimum = upper_half(word);
}
// Multiples and minima of 6 bits in three words; see get_scale_min_k4 in llama.cpp.
struct SixBitMultiples {
  static void scales(ivec, Words from, Scales& to) {
    read_scale_and_minimum(from[0], to);
    to.multiples[0] = bits_at<0>(from[1], 63);
    to.multiples[1] = bits_at<0>(from[3], 15) + bits_at<2>(from[1], 0x30);
    to.minima[0] = bits_at<0>(from[2], 63);
    to.minima[1] = bits_at<4>(from[3], 15) + bits_at<2>(from[2], 0x30);
  }
};

template <int64_t Type>
struct Layout;
template <>
struct Layout<kQ4_0> : HalfAndNibbles<18, 8> {};
template <>
struct Layout<kIq4Nl> : HalfAndNibbles<18, 0> {};
template <>
struct Layout<kMxfp4> : Stored<17, kGroup, 1> {
  static void scales(ivec head, Words, Scales& to) { to.scale = head; }
  template <int>
  static void codes(Words from, Steps& to) {
    read_nibbles(from, to);
  }
};
template <>
struct Layout<kQ4_1> : Stored<20, kGroup, 0> {
  static void scales(ivec, Words from, Scales& to) { read_scale_and_minimum(from[0], to); }
  template <int>
  static void codes(Words from, Steps& to) {
    read_nibbles(from + 1, to);
  }
};
template <>
struct Layout<kQ8_0> : Stored<34, kGroup, 2, coded::kSignedZero> {
  static void scales(ivec head, Words, Scales& to) { to.scale = head; }
  template <int>
  static void codes(Words from, Steps& to) {
    unroll<bytes::kSteps>([&](auto step) { to[step] = add_bytes(from[step], bytes::splat_byte(coded::kSignedZero)); });
  }
};
template <>
struct Layout<kQ5_0> : Stored<22, kGroup, 2, 16> {
  static void scales(ivec head, Words, Scales& to) { to.scale = head; }
  template <int>
  static void codes(Words from, Steps& to) {
    read_nibbles(from + 1, to);
    add_fifth_bit(from[0], to);
  }
};
template <>
struct Layout<kQ5_1> : Stored<24, kGroup, 0> {
  static void scales(ivec, Words from, Scales& to) { read_scale_and_minimum(from[0], to); }
  template <int>
  static void codes(Words from, Steps& to) {
    read_nibbles(from + 2, to);
    add_fifth_bit(from[1], to);
  }
};
template <>
struct Layout<kQ2K> : Stored<84, coded::kSuperGroup, 0, 0, 16> {
  static void scales(ivec, Words from, Scales& to) {
    unroll<4>([&](auto i) {
      to.multiples[i] = bits_at<0>(from[i], 15);
      to.minima[i] = bits_at<4>(from[i], 15);
    });
    read_scale_and_minimum(from[20], to);
  }
  template <int Group>
  static void codes(Words from, Steps& to) {
    read_parts<2, Group>(from + 4, to);
  }
};
template <>
struct Layout<kQ3K> : Stored<110, coded::kSuperGroup, 0, 4, 16> {
  static void scales(ivec tail, Words from, Scales& to) {
    unroll<4>([&](auto i) {
      const ivec multiples = bits_at<i / 2 * 4>(from[24 + i % 2], 15) + shift_left<4>(bits_at<2 * i>(from[26], 3));
      to.multiples[i] = add_bytes(multiples, bytes::splat_byte(-32));
    });
    to.scale = tail;
  }
  template <int Group>
  static void codes(Words from, Steps& to) {
    read_parts<2, Group>(from + 8, to);
    add_bit<Group, 2>(from, to);
  }
};
template <>
struct Layout<kQ4K> : Stored<144, coded::kSuperGroup, 0, 0, 8>, SixBitMultiples {
  template <int Group>
  static void codes(Words from, Steps& to) {
    read_parts<4, Group>(from + 4, to);
  }
};
template <>
struct Layout<kQ5K> : Stored<176, coded::kSuperGroup, 0, 0, 8>, SixBitMultiples {
  template <int Group>
  static void codes(Words from, Steps& to) {
    read_parts<4, Group>(from + 12, to);
    add_bit<Group, 4>(from + 4, to);
  }
};
template <>
struct Layout<kQ6K> : Stored<210, coded::kSuperGroup, 0, 32, 16> {
  static void scales(ivec tail, Words from, Scales& to) {
    unroll<4>([&](auto i) { to.multiples[i] = from[48 + i]; });
    to.scale = tail;
  }
  // 64 bytes hold the lower bits of four groups, of two in their low halves; 32 the upper ones
  template <int Group>
  static void codes(Words from, Steps& to) {
    const Words low = from + Group / 4 * 16 + Group % 2 * 8, high = from + 32 + Group / 4 * 8;
    unroll<bytes::kSteps>([&](auto step) {
      to[step] = bits_at<Group % 4 / 2 * 4>(low[step], 15) + shift_left<4>(bits_at<Group % 4 * 2>(high[step], 3));
    });
  }
};
template <>
struct Layout<kIq4Xs> : Stored<136, coded::kSuperGroup, 0, 0, 8> {
  static void scales(ivec, Words from, Scales& to) {
    to.scale = lower_half(from[0]);
    const ivec high = upper_half(from[0]);
    unroll<2>([&](auto word) {
      ivec multiples = splat_int(0);
      unroll<4>([&](auto i) {
        constexpr int kGroupOf = 4 * word + i;
        const ivec low = shift_right<4 * kGroupOf>(from[1]) & splat_int(15);
        const ivec upper = shift_right<2 * kGroupOf>(high) & splat_int(3);
        multiples = multiples + shift_left<8 * i>(low + shift_left<4>(upper));
      });
      to.multiples[word] = add_bytes(multiples, bytes::splat_byte(-32));
    });
  }
  template <int Group>
  static void codes(Words from, Steps& to) {
    read_nibbles(from + 2 + 4 * Group, to);
  }
};

// f(Layout) of a type.
template <int64_t Type = kQ4_0, typename F>
void with_layout(int64_t type, const F& f) {
  if constexpr (Type <= kIq4Xs) {
    type == Type ? f(Layout<Type>()) : with_layout<Type + 1>(type, f);
  }
}

}  // namespace triptych::blocks
