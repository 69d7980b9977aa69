// Filling weights with the blocks of .gguf files, in one pass: a block is read, and its place in a panel is written.
// Panels of quantized.h are those of coded.h with a float16 scale, and maybe a minimum, per group.
#include "linear/panel_codes.h"

namespace triptych {
namespace {

using coded::CodedForm;

// How GGML stores weights of a row, as formats.py numbers the types. The layouts are those of ggml-common.h in
// llama.cpp.
enum BlockType : int64_t {
  kQ4_0, kQ4_1, kQ8_0, kQ5_0, kQ5_1, kIq4Nl, kMxfp4,
  kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Xs,
};

struct PackBlocks {
  int64_t form;           // of the weight, which can hold the blocks without loss
  int64_t type;           // BlockType
  const uint8_t* blocks;  // [rows] of a row's blocks
  int64_t row_bytes;      // from one row to the next
  char* panels;
  int64_t in_features;
  int64_t first_row;      // where the first row goes, in its piece
  int64_t half;           // as for place_of
  int64_t* is_damaged;    // becomes 1 if a scale is no number
};

constexpr int kMaxUnits = coded::kSuperGroup / coded::kHalfGroup;

// The scales of a block.
struct Scales {
  uint16_t scale = 0, minimum = 0;  // float16; of powers of two the exponent
  uint8_t multiples[kMaxUnits];     // of each half of a group; plus 128
  uint8_t minima[kMaxUnits] = {};
};

inline uint16_t half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// The low halves of `count` bytes, then their high ones.
inline void read_nibbles(const uint8_t* packed, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) {
    codes[i] = packed[i] & 15;
    codes[count + i] = packed[i] >> 4;
  }
}

// Each 32 bytes hold four groups in parts of 2 bits, the lowest ones first.
inline void read_quarters(const uint8_t* packed, uint8_t* codes) {
  for (int half = 0; half < 2; ++half, packed += kGroup) {
    for (int group = 0; group < 4; ++group, codes += kGroup) {
      for (int i = 0; i < kGroup; ++i) codes[i] = packed[i] >> 2 * group & 3;
    }
  }
}

// 32 bytes hold a bit of each weight of eight groups, the first group's lowest.
inline void add_bit(const uint8_t* packed, int at, uint8_t* codes) {
  for (int group = 0; group < 8; ++group, codes += kGroup) {
    for (int i = 0; i < kGroup; ++i) codes[i] |= (packed[i] >> group & 1) << at;
  }
}

// 4 bytes hold the fifth bit of 32 weights.
inline void add_fifth_bit(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < kGroup; ++i) codes[i] |= (packed[i / 8] >> i % 8 & 1) << 4;
}

// Multiples and minima of 6 bits in 12 bytes; see get_scale_min_k4 in llama.cpp.
inline void read_multiples(const uint8_t* packed, Scales& to) {
  for (int group = 0; group < 8; ++group) {
    const uint8_t first = packed[group % 4], second = packed[4 + group % 4], third = packed[8 + group % 4];
    const uint8_t multiple = group < 4 ? first & 63 : (third & 15) | first >> 6 << 4;
    const uint8_t minimum = group < 4 ? second & 63 : third >> 4 | second >> 6 << 4;
    for (const int half : {0, 1}) {
      to.multiples[2 * group + half] = multiple + coded::kSignedZero;
      to.minima[2 * group + half] = minimum;
    }
  }
}

// A type: the bytes and the weights of a block; what its codes count from, if they are integers without a minimum.
// `scales` and `codes` read a block. Of types of 4 bits `nibbles` reads a group as panels have it: input i in the low
// half of byte i, i + 16 in its high one.
template <int64_t Bytes, int64_t Weights, int Center = 0>
struct Stored {
  static constexpr int64_t kBytes = Bytes, kWeights = Weights;
  static constexpr int kCenter = Center;
  static constexpr bool kHasNibbles = false;
};
template <int64_t Bytes, int64_t Weights, int64_t NibblesAt, int Center = 0>
struct StoredNibbles : Stored<Bytes, Weights, Center> {
  static constexpr bool kHasNibbles = true;
  static void codes(const uint8_t* from, uint8_t* to) {
    for (int64_t at = 0; at < Weights; at += kGroup) read_nibbles(from + NibblesAt + at / 2, kGroup / 2, to + at);
  }
  static void nibbles(const uint8_t* from, int64_t group, uint8_t* to) {
    std::memcpy(to, from + NibblesAt + group * kGroup / 2, kGroup / 2);
  }
};
// With a float16 scale, and behind it maybe a minimum.
struct HalfScale {
  static void scales(const uint8_t* from, Scales& to) { to.scale = half_at(from); }
};
struct HalfScaleAndMinimum {
  static void scales(const uint8_t* from, Scales& to) { to.scale = half_at(from), to.minimum = half_at(from + 2); }
};
// And with multiples of both.
struct SixBitMultiples {
  static void scales(const uint8_t* from, Scales& to) {
    HalfScaleAndMinimum::scales(from, to);
    read_multiples(from + 4, to);
  }
};

template <int64_t Type>
struct Layout;

template <>
struct Layout<kQ4_0> : StoredNibbles<18, kGroup, 2, 8>, HalfScale {};
template <>
struct Layout<kQ4_1> : StoredNibbles<20, kGroup, 4>, HalfScaleAndMinimum {};
template <>
struct Layout<kQ8_0> : Stored<34, kGroup, coded::kSignedZero>, HalfScale {
  static void codes(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < kGroup; ++i) to[i] = from[2 + i] ^ coded::kSignedZero;
  }
};
template <>
struct Layout<kQ5_0> : Stored<22, kGroup, 16>, HalfScale {
  static void codes(const uint8_t* from, uint8_t* to) {
    read_nibbles(from + 6, kGroup / 2, to);
    add_fifth_bit(from + 2, to);
  }
};
template <>
struct Layout<kQ5_1> : Stored<24, kGroup>, HalfScaleAndMinimum {
  static void codes(const uint8_t* from, uint8_t* to) {
    read_nibbles(from + 8, kGroup / 2, to);
    add_fifth_bit(from + 4, to);
  }
};
template <>
struct Layout<kIq4Nl> : StoredNibbles<18, kGroup, 2>, HalfScale {};
template <>
struct Layout<kMxfp4> : StoredNibbles<17, kGroup, 1> {
  static void scales(const uint8_t* from, Scales& to) { to.scale = from[0]; }
};
template <>
struct Layout<kQ2K> : Stored<84, coded::kSuperGroup> {
  static void scales(const uint8_t* from, Scales& to) {
    for (int i = 0; i < kMaxUnits; ++i) {
      to.multiples[i] = (from[i] & 15) + coded::kSignedZero;
      to.minima[i] = from[i] >> 4;
    }
    HalfScaleAndMinimum::scales(from + 80, to);
  }
  static void codes(const uint8_t* from, uint8_t* to) { read_quarters(from + 16, to); }
};
template <>
struct Layout<kQ3K> : Stored<110, coded::kSuperGroup, 4> {
  static void scales(const uint8_t* from, Scales& to) {
    const uint8_t *low = from + 96, *high = from + 104;
    for (int i = 0; i < kMaxUnits; ++i) {
      const int multiple = (i < 8 ? low[i] & 15 : low[i - 8] >> 4) | (high[i % 4] >> 2 * (i / 4) & 3) << 4;
      to.multiples[i] = static_cast<uint8_t>(multiple - 32 + coded::kSignedZero);
    }
    to.scale = half_at(from + 108);
  }
  static void codes(const uint8_t* from, uint8_t* to) {
    read_quarters(from + 32, to);
    add_bit(from, 2, to);
  }
};
template <>
struct Layout<kQ4K> : Stored<144, coded::kSuperGroup>, SixBitMultiples {
  static constexpr bool kHasNibbles = true;
  static void codes(const uint8_t* from, uint8_t* to) {
    for (int pair = 0; pair < 4; ++pair) read_nibbles(from + 16 + pair * kGroup, kGroup, to + 2 * pair * kGroup);
  }
  static void nibbles(const uint8_t* from, int64_t group, uint8_t* to) {
    const uint8_t* const pair = from + 16 + group / 2 * kGroup;
    constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
    const int64_t shift = group % 2 * 4;
    for (int i = 0; i < kGroup / 2; i += 8) {  // in words, since compilers build the vectors of bytes one by one
      uint64_t low, high;
      std::memcpy(&low, pair + i, sizeof low);
      std::memcpy(&high, pair + kGroup / 2 + i, sizeof high);
      low = (low >> shift & kLow) | (high >> shift & kLow) << 4;
      std::memcpy(to + i, &low, sizeof low);
    }
  }
};
template <>
struct Layout<kQ5K> : Stored<176, coded::kSuperGroup>, SixBitMultiples {
  static void codes(const uint8_t* from, uint8_t* to) {
    for (int pair = 0; pair < 4; ++pair) read_nibbles(from + 48 + pair * kGroup, kGroup, to + 2 * pair * kGroup);
    add_bit(from + 16, 4, to);
  }
};
template <>
struct Layout<kQ6K> : Stored<210, coded::kSuperGroup, 32> {
  static void scales(const uint8_t* from, Scales& to) {
    for (int i = 0; i < kMaxUnits; ++i) to.multiples[i] = from[192 + i] ^ coded::kSignedZero;
    to.scale = half_at(from + 208);
  }
  static void codes(const uint8_t* from, uint8_t* to) {
    for (int half = 0; half < 2; ++half, to += 4 * kGroup) {
      const uint8_t *low = from + half * 2 * kGroup, *high = from + 128 + half * kGroup;
      for (int i = 0; i < kGroup; ++i) {
        to[i] = (low[i] & 15) | (high[i] & 3) << 4;
        to[kGroup + i] = (low[kGroup + i] & 15) | (high[i] >> 2 & 3) << 4;
        to[2 * kGroup + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
        to[3 * kGroup + i] = low[kGroup + i] >> 4 | high[i] >> 6 << 4;
      }
    }
  }
};
template <>
struct Layout<kIq4Xs> : StoredNibbles<136, coded::kSuperGroup, 8> {
  static void scales(const uint8_t* from, Scales& to) {
    to.scale = half_at(from);
    const uint16_t high = half_at(from + 2);
    for (int group = 0; group < 8; ++group) {
      const int low = from[4 + group / 2] >> 4 * (group % 2) & 15;
      const int multiple = (low | (high >> 2 * group & 3) << 4) - 32 + coded::kSignedZero;
      to.multiples[2 * group] = to.multiples[2 * group + 1] = static_cast<uint8_t>(multiple);
    }
  }
};

// What is added to codes, from where the file counts to where the panels do.
template <typename T>
int shift_of(const CodedForm& form) {
  if (form.table != coded::kIntegers) return 0;
  const int middle = 1 << (form.bits - 1);
  // 6 and 8 bits beside a minimum have signs
  return (form.offset == coded::kMinimum && form.bits == 4 ? 0 : middle) - T::kCenter;
}

// Whether a power of two times the codes of a group is a number in float32; the largest value is 6.
template <typename T>
bool is_finite_power(int exponent, const uint8_t* from) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (exponent <= 252 || exponent == 255) return exponent <= 252;
  uint8_t codes[T::kWeights];
  T::codes(from, codes);
  const float power = exponent == 253 ? 0x1p126f : 0x1p127f;
  return std::all_of(codes, codes + kGroup, [=](uint8_t code) { return std::isfinite(kValues[code & 7] * power); });
}

// Scales as the panels hold them; notes if one is no number.
template <typename T>
Scales read_scales(const uint8_t* from, const CodedForm& form, int shift, int64_t* is_damaged) {
  Scales scales;
  T::scales(from, scales);
  if (form.scale == coded::kPowers) {
    if (!is_finite_power<T>(scales.scale, from)) std::atomic_ref(*is_damaged).store(1, std::memory_order_relaxed);
    return scales;
  }
  // 4 bits that count from 0: a minimum, which is exact, takes their center's place
  if (shift < 0) scales.minimum = to_half(static_cast<float>(shift) * from_half(scales.scale));
  check_half(scales.scale, is_damaged);
  check_half(scales.minimum, is_damaged);
  return scales;
}

// Writes a block's place in its panel, from its head on.
template <typename T>
void put_block(const uint8_t* from, const Scales& scales, const CodedForm& form, int shift, int64_t lane, char* to) {
  const bool is_affine = form.offset == coded::kMinimum, in_levels = form.scale == coded::kTwoLevels;
  const auto put_byte = [&](uint8_t byte) {
    to[lane] = static_cast<char>(byte);
    to += kPanel;
  };
  const auto put_scale = [&](uint16_t bits) {
    if (form.scale == coded::kPowers) return put_byte(bits);
    std::memcpy(to + lane * sizeof bits, &bits, sizeof bits);
    to += kPanel * sizeof bits;
  };
  const int in_head = in_levels ? 1 : form.num_scales, units = in_levels ? form.num_scales : 0;
  for (int unit = 0; unit < in_head; ++unit) put_scale(scales.scale);
  for (int unit = 0; unit < in_head && is_affine; ++unit) put_scale(scales.minimum);
  const bool has_nibbles = T::kHasNibbles && form.bits == 4;  // whatever they count from
  uint8_t codes[T::kWeights];
  if (!has_nibbles) {
    T::codes(from, codes);
    for (uint8_t& code : codes) code += shift;
  }
  for (int64_t group = 0; group < T::kWeights / kGroup; ++group) {
    for (int unit = 0; unit < units; ++unit) put_byte(scales.multiples[2 * group + unit]);
    for (int unit = 0; unit < units && is_affine; ++unit) put_byte(scales.minima[2 * group + unit]);
    if constexpr (T::kHasNibbles) {
      uint8_t nibbles[kGroup / 2];
      if (has_nibbles) T::nibbles(from, group, nibbles), coded::put_nibbles(nibbles, to, lane);
    }
    if (!has_nibbles) coded::put_codes(form.bits, codes + group * kGroup, to, lane);
    to += kPanel * kGroup * form.bits / 8;
  }
}

// Rows first … end - 1, which are of one panel.
template <typename T>
void pack_rows(const PackBlocks& args, const CodedForm& form, int64_t first, int64_t end) {
  const int64_t blocks = args.in_features / T::kWeights;
  const int64_t block_bytes = form.head_bytes + T::kWeights / kGroup * form.group_bytes;
  const int shift = shift_of<T>(form);
  for (int64_t number = 0; number < blocks; ++number) {  // the rows of a panel together, which share its lines
    for (int64_t row = first; row < end; ++row) {
      const uint8_t* const from = args.blocks + (row - args.first_row) * args.row_bytes + number * T::kBytes;
      const Scales scales = read_scales<T>(from, form, shift, args.is_damaged);
      const Place place = place_of(row, args.half);
      char* const panel = args.panels + place.panel * form.panel_bytes(args.in_features);
      put_block<T>(from, scales, form, shift, place.lane, panel + number * block_bytes);
    }
  }
}

// f(Layout) of a type.
template <int64_t Type = kQ4_0, typename F>
void with_layout(int64_t type, const F& f) {
  if constexpr (Type <= kIq4Xs) {
    type == Type ? f(Layout<Type>()) : with_layout<Type + 1>(type, f);
  }
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(pack_blocks, triptych::PackBlocks,
                form, type, blocks, row_bytes, panels, in_features, first_row, half, is_damaged) {
  using namespace triptych;
  const CodedForm form(args.form);
  with_layout(args.type, [&](auto layout) {
    using T = decltype(layout);
    coded::for_panels(args.first_row, rows, args.half, 1, [&](const auto& for_each_panel) {
      for_each_panel([&](int64_t first, int64_t end) { pack_rows<T>(args, form, first, end); });
    });
  });
}
