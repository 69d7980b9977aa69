// Filling weights with the blocks of .gguf files, in one pass: a block's codes are unpacked, and its place in a panel is
// written. Panels of quantized.h are those of coded.h with a float16 scale, and maybe a minimum, per group.
#include "linear/panel_codes.h"

namespace triptych {
namespace {

using coded::CodedForm;

// How GGML stores weights of a row, as formats.py numbers the types; the layouts are those of ggml-common.h in llama.cpp.
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

// A block, unpacked.
struct Block {
  uint16_t scale = 0, minimum = 0;  // float16; of powers of two the exponent
  uint8_t codes[coded::kSuperGroup];
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
inline void read_multiples(const uint8_t* packed, Block& to) {
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
template <int64_t Bytes, int64_t Weights, int Center = 0>
struct Stored {
  static constexpr int64_t kBytes = Bytes, kWeights = Weights;
  static constexpr int kCenter = Center;
};
template <int64_t Type>
struct Layout;

template <>
struct Layout<kQ4_0> : Stored<18, kGroup, 8> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, kGroup / 2, to.codes);
  }
};
template <>
struct Layout<kQ4_1> : Stored<20, kGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 4, kGroup / 2, to.codes);
  }
};
template <>
struct Layout<kQ5_0> : Stored<22, kGroup, 16> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 6, kGroup / 2, to.codes);
    add_fifth_bit(from + 2, to.codes);
  }
};
template <>
struct Layout<kQ5_1> : Stored<24, kGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 8, kGroup / 2, to.codes);
    add_fifth_bit(from + 4, to.codes);
  }
};
template <>
struct Layout<kQ8_0> : Stored<34, kGroup, coded::kSignedZero> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    for (int i = 0; i < kGroup; ++i) to.codes[i] = from[2 + i] ^ coded::kSignedZero;
  }
};
template <>
struct Layout<kIq4Nl> : Stored<18, kGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, kGroup / 2, to.codes);
  }
};
template <>
struct Layout<kMxfp4> : Stored<17, kGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = from[0];
    read_nibbles(from + 1, kGroup / 2, to.codes);
  }
};
template <>
struct Layout<kQ2K> : Stored<84, coded::kSuperGroup> {
  static void read(const uint8_t* from, Block& to) {
    for (int i = 0; i < kMaxUnits; ++i) {
      to.multiples[i] = (from[i] & 15) + coded::kSignedZero;
      to.minima[i] = from[i] >> 4;
    }
    read_quarters(from + 16, to.codes);
    to.scale = half_at(from + 80), to.minimum = half_at(from + 82);
  }
};
template <>
struct Layout<kQ3K> : Stored<110, coded::kSuperGroup, 4> {
  static void read(const uint8_t* from, Block& to) {
    read_quarters(from + 32, to.codes);
    add_bit(from, 2, to.codes);
    const uint8_t *low = from + 96, *high = from + 104;
    for (int i = 0; i < kMaxUnits; ++i) {
      const int multiple = (i < 8 ? low[i] & 15 : low[i - 8] >> 4) | (high[i % 4] >> 2 * (i / 4) & 3) << 4;
      to.multiples[i] = static_cast<uint8_t>(multiple - 32 + coded::kSignedZero);
    }
    to.scale = half_at(from + 108);
  }
};
template <>
struct Layout<kQ4K> : Stored<144, coded::kSuperGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_multiples(from + 4, to);
    for (int pair = 0; pair < 4; ++pair) read_nibbles(from + 16 + pair * kGroup, kGroup, to.codes + 2 * pair * kGroup);
  }
};
template <>
struct Layout<kQ5K> : Stored<176, coded::kSuperGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_multiples(from + 4, to);
    for (int pair = 0; pair < 4; ++pair) read_nibbles(from + 48 + pair * kGroup, kGroup, to.codes + 2 * pair * kGroup);
    add_bit(from + 16, 4, to.codes);
  }
};
template <>
struct Layout<kQ6K> : Stored<210, coded::kSuperGroup, 32> {
  static void read(const uint8_t* from, Block& to) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = from + half * 2 * kGroup, *high = from + 128 + half * kGroup;
      uint8_t* const codes = to.codes + half * 4 * kGroup;
      for (int i = 0; i < kGroup; ++i) {
        codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
        codes[kGroup + i] = (low[kGroup + i] & 15) | (high[i] >> 2 & 3) << 4;
        codes[2 * kGroup + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
        codes[3 * kGroup + i] = low[kGroup + i] >> 4 | high[i] >> 6 << 4;
      }
    }
    for (int i = 0; i < kMaxUnits; ++i) to.multiples[i] = from[192 + i] ^ coded::kSignedZero;
    to.scale = half_at(from + 208);
  }
};
template <>
struct Layout<kIq4Xs> : Stored<136, coded::kSuperGroup> {
  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    const uint16_t high = half_at(from + 2);
    for (int group = 0; group < 8; ++group) {
      const int low = from[4 + group / 2] >> 4 * (group % 2) & 15;
      const int multiple = (low | (high >> 2 * group & 3) << 4) - 32 + coded::kSignedZero;
      to.multiples[2 * group] = to.multiples[2 * group + 1] = static_cast<uint8_t>(multiple);
      read_nibbles(from + 8 + group * kGroup / 2, kGroup / 2, to.codes + group * kGroup);
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

// Whether a power of two times its codes is a number in float32; the largest value is 6.
inline bool is_finite_power(const Block& block) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (block.scale <= 252) return true;
  if (block.scale == 255) return false;
  const float power = block.scale == 253 ? 0x1p126f : 0x1p127f;
  return std::all_of(block.codes, block.codes + kGroup, [=](uint8_t code) { return std::isfinite(kValues[code & 7] * power); });
}

// Brings a block to what the panels hold, and notes if a scale is no number.
template <typename T>
void fit(Block& block, const CodedForm& form, int shift, int64_t* is_damaged) {
  if (form.scale == coded::kPowers) {
    if (!is_finite_power(block)) std::atomic_ref(*is_damaged).store(1, std::memory_order_relaxed);
    return;
  }
  if (shift < 0) {  // 4 bits that count from 0: a minimum, which is exact, takes their center's place
    block.minimum = to_half(static_cast<float>(shift) * from_half(block.scale));
    shift = 0;
  }
  check_half(block.scale, is_damaged);
  check_half(block.minimum, is_damaged);
  if (shift == 0) return;
  for (int i = 0; i < T::kWeights; ++i) block.codes[i] += shift;
}

// Writes a block's place in its panel, from its head on.
template <typename T>
void put_block(const Block& block, const CodedForm& form, int64_t lane, char* to) {
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
  const int scales = in_levels ? 1 : form.num_scales, units = in_levels ? form.num_scales : 0;
  for (int unit = 0; unit < scales; ++unit) put_scale(block.scale);
  for (int unit = 0; unit < scales && is_affine; ++unit) put_scale(block.minimum);
  for (int64_t group = 0; group < T::kWeights / kGroup; ++group) {
    for (int unit = 0; unit < units; ++unit) put_byte(block.multiples[2 * group + unit]);
    for (int unit = 0; unit < units && is_affine; ++unit) put_byte(block.minima[2 * group + unit]);
    const uint8_t* const codes = block.codes + group * kGroup;
    form.bits == 4 ? coded::put_codes(4, codes, to, lane) : coded::put_codes(form.bits, codes, to, lane);
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
      Block block;
      T::read(args.blocks + (row - args.first_row) * args.row_bytes + number * T::kBytes, block);
      fit<T>(block, form, shift, args.is_damaged);
      const Place place = place_of(row, args.half);
      char* const panel = args.panels + place.panel * form.panel_bytes(args.in_features);
      put_block<T>(block, form, place.lane, panel + number * block_bytes);
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
