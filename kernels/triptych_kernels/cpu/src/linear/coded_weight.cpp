// Filling weights in the formats of published checkpoints (coded.h), and reading rows back.
#include "linear/coded.h"

namespace triptych {
namespace {

using coded::CodedForm;
using coded::Reader;

// Parts of rows, each in the type in which panels store it, or null.
struct PackCodes {
  int64_t form;
  const uint8_t* codes;      // [rows, in_features]
  const char* scales;        // [rows, scales of all blocks]
  const char* offsets;       // the same
  const char* multiples;     // [rows, units]
  const char* minima;        // [rows, units]
  const float* factors;      // [rows]
  char* panels;
  int64_t in_features;
  int64_t first_row;         // where the first row goes, in its piece
  int64_t half;              // as for place_of
};

// Types of blocks of 256 weights with scales in two levels, as coded_weight.py numbers them.
enum SuperBlockType : int64_t { kQ4K, kQ5K, kQ6K };

struct PackSuperBlocks {
  int64_t form;           // has scales in two levels, and can hold the blocks without loss
  int64_t type;           // SuperBlockType
  const uint8_t* blocks;  // [rows, in_features / 256] blocks
  char* panels;
  int64_t in_features;
  int64_t first_row;      // where the first row goes, in its piece
  int64_t half;           // as for place_of
  int64_t* is_damaged;    // becomes 1 if a scale is no number
};

struct CodedEmbedding {
  int64_t form;
  int64_t out_dtype;
  const char* panels;
  const int64_t* token_ids;  // [rows]
  void* out;                 // [rows, in_features]
  int64_t in_features;
};

// Elements `from` of one output, of which panels hold kPanel side by side; returns what follows in the panel.
char* put(char* to, int64_t lane, const char*& from, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i, to += kPanel * bytes, from += bytes) std::memcpy(to + lane * bytes, from, bytes);
  return to;
}

// Codes of a group, at the words of its panel.
inline void put_codes(int64_t bits, const uint8_t* codes, char* words, int64_t lane) {
  const auto put_word = [&](int word, uint32_t value) {
    std::memcpy(words + (word * kPanel + lane) * sizeof value, &value, sizeof value);
  };
  // those of a step, one in each byte
  const auto step_of = [&](int step) {
    uint32_t value;
    std::memcpy(&value, codes + 4 * step, sizeof value);
    return value;
  };
  if (bits == 8) {
    for (int step = 0; step < bytes::kSteps; ++step) put_word(step, step_of(step));
    return;
  }
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int word = 0; word < 4; ++word) put_word(word, (step_of(word) & kLow) | (step_of(4 + word) & kLow) << 4);
  if (bits == 4) return;
  for (int plane = 0; plane < 2; ++plane) {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= (step_of(4 * plane + i) >> 4 & 0x03030303) << 2 * i;
    put_word(4 + plane, value);
  }
}

void pack_row(const PackCodes& args, const CodedForm& form, int64_t row, int64_t lane, char* panel) {
  const int64_t groups = args.in_features / kGroup, blocks = (args.in_features + form.block - 1) / form.block;
  const bool in_levels = form.scale == coded::kTwoLevels;
  const int64_t per_block = in_levels ? 1 : form.num_scales, scale_bytes = form.scale_bytes();
  const int64_t offset_bytes = form.offset == coded::kZeroPoint ? 1 : scale_bytes;
  const uint8_t* codes = args.codes + row * args.in_features;
  const char* scales = args.scales + row * blocks * per_block * scale_bytes;
  const char* offsets = args.offsets + row * blocks * per_block * offset_bytes;
  const char* multiples = args.multiples + row * groups * form.num_scales;
  const char* minima = args.minima + row * groups * form.num_scales;
  char* to = panel;
  if (args.factors) {
    const char* factor = reinterpret_cast<const char*>(args.factors + row);
    to = put(to, lane, factor, 1, sizeof *args.factors);
  }
  for (int64_t group = 0; group < groups; ++group, codes += kGroup) {
    if (group % (form.block / kGroup) == 0) {
      to = put(to, lane, scales, per_block, scale_bytes);
      if (args.offsets) to = put(to, lane, offsets, per_block, offset_bytes);
    }
    if (args.multiples) to = put(to, lane, multiples, form.num_scales, 1);
    if (args.minima) to = put(to, lane, minima, form.num_scales, 1);
    put_codes(form.bits, codes, to, lane);
    to += kPanel * kGroup * form.bits / 8;
  }
}

// A block of 256 weights.
struct SuperBlock {
  uint16_t scale = 0, minimum = 0;  // float16
  uint8_t codes[coded::kSuperGroup];
  uint8_t multiples[2 * coded::kSuperGroup / kGroup];  // of each half of a group; plus 128
  uint8_t minima[2 * coded::kSuperGroup / kGroup] = {};
};

constexpr int64_t super_block_bytes(int64_t type) { return type == kQ4K ? 144 : type == kQ5K ? 176 : 210; }

// Multiples and minima of 6 bits in 12 bytes; see get_scale_min_k4 in llama.cpp.
void read_multiples(const uint8_t* packed, SuperBlock& to) {
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

// Each 32 bytes hold two groups: the low halves of bytes, then the high ones.
void read_nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int pair = 0; pair < 4; ++pair, packed += kGroup, codes += 2 * kGroup) {
    for (int i = 0; i < kGroup; ++i) {
      codes[i] = packed[i] & 15;
      codes[kGroup + i] = packed[i] >> 4;
    }
  }
}

template <int64_t Type>
SuperBlock read_super_block(const uint8_t* from) {
  SuperBlock to;
  if constexpr (Type == kQ6K) {
    const uint8_t *low = from, *high = from + 128;
    for (int half = 0; half < 2; ++half, low += 2 * kGroup, high += kGroup) {
      uint8_t* const codes = to.codes + half * 4 * kGroup;
      for (int i = 0; i < kGroup; ++i) {
        codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
        codes[kGroup + i] = (low[kGroup + i] & 15) | (high[i] >> 2 & 3) << 4;
        codes[2 * kGroup + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
        codes[3 * kGroup + i] = low[kGroup + i] >> 4 | high[i] >> 6 << 4;
      }
    }
    for (int i = 0; i < 16; ++i) to.multiples[i] = from[192 + i] ^ coded::kSignedZero;
    std::memcpy(&to.scale, from + 208, sizeof to.scale);
    return to;
  }
  std::memcpy(&to.scale, from, sizeof to.scale);
  std::memcpy(&to.minimum, from + 2, sizeof to.minimum);
  read_multiples(from + 4, to);
  if constexpr (Type == kQ4K) {
    read_nibbles(from + 16, to.codes);
  } else {
    read_nibbles(from + 48, to.codes);
    const uint8_t* const fifth = from + 16;
    for (int group = 0; group < 8; ++group) {
      for (int i = 0; i < kGroup; ++i) to.codes[group * kGroup + i] |= (fifth[i] >> group & 1) << 4;
    }
  }
  return to;
}

// A block's place in its panel, from the block's head on.
void put_super_block(const SuperBlock& block, const CodedForm& form, int64_t lane, char* to) {
  const bool is_affine = form.offset == coded::kMinimum;
  const auto put_half = [&](uint16_t bits) {
    std::memcpy(to + lane * sizeof bits, &bits, sizeof bits);
    to += kPanel * sizeof bits;
  };
  const auto put_byte = [&](uint8_t byte) {
    to[lane] = static_cast<char>(byte);
    to += kPanel;
  };
  put_half(block.scale);
  if (is_affine) put_half(block.minimum);
  for (int64_t group = 0; group < coded::kSuperGroup / kGroup; ++group) {
    for (int unit = 0; unit < form.num_scales; ++unit) put_byte(block.multiples[2 * group + unit]);
    for (int unit = 0; unit < form.num_scales && is_affine; ++unit) put_byte(block.minima[2 * group + unit]);
    const uint8_t* const codes = block.codes + group * kGroup;
    form.bits == 4 ? put_codes(4, codes, to, lane) : put_codes(form.bits, codes, to, lane);
    to += kPanel * kGroup * form.bits / 8;
  }
}

// Rows first … end - 1, which are of one panel.
template <int64_t Type>
void pack_super_blocks(const PackSuperBlocks& args, const CodedForm& form, int64_t first, int64_t end) {
  const int64_t blocks = args.in_features / coded::kSuperGroup;
  const int64_t block_bytes = form.head_bytes + coded::kSuperGroup / kGroup * form.group_bytes;
  // 6 bits beside a minimum count from their center
  const uint8_t shift = form.bits == 6 && Type != kQ6K ? coded::SixBits::kCenter : 0;
  for (int64_t number = 0; number < blocks; ++number) {  // the rows of a panel together, which share its lines
    for (int64_t row = first; row < end; ++row) {
      const uint8_t* from = args.blocks + ((row - args.first_row) * blocks + number) * super_block_bytes(Type);
      SuperBlock block = read_super_block<Type>(from);
      check_half(block.scale, args.is_damaged);
      check_half(block.minimum, args.is_damaged);
      for (uint8_t& code : block.codes) code += shift;
      const Place place = place_of(row, args.half);
      char* const panel = args.panels + place.panel * form.panel_bytes(args.in_features);
      put_super_block(block, form, place.lane, panel + number * block_bytes);
    }
  }
}

// f(first, end): rows of one panel, which write into the same lines, so that one thread takes them all.
template <typename F>
void for_panel_rows(int64_t first, int64_t rows, int64_t half, const F& f) {
  const int64_t lanes = half < 0 ? kPanel : kLanes, end = first + rows;
  parallel_for((end - 1) / lanes - first / lanes + 1, [&](int64_t index) {
    const int64_t panel_row = (first / lanes + index) * lanes;
    f(std::max(panel_row, first), std::min(panel_row + lanes, end));
  });
}

template <typename O>
void embed(const CodedEmbedding& args, int64_t rows) {
  const CodedForm form(args.form);
  parallel_for(rows, [&](int64_t row) {
    const Place place = place_of(args.token_ids[row], -1);
    O* to = static_cast<O*>(args.out) + row * args.in_features;
    Reader reader(form, args.panels + place.panel * form.panel_bytes(args.in_features));
    float group[kGroup * kPanel];
    for (int64_t at = 0; at < args.in_features; at += kGroup, to += kGroup) {
      coded::unpack_floats(reader, 1, group);
      for (int input = 0; input < kGroup; ++input) store_one(to + input, group[input * kPanel + place.lane]);
    }
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(pack_codes, triptych::PackCodes,
                form, codes, scales, offsets, multiples, minima, factors, panels, in_features, first_row, half) {
  using namespace triptych;
  const CodedForm form(args.form);
  for_panel_rows(args.first_row, rows, args.half, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const Place place = place_of(row, args.half);
      char* const panel = args.panels + place.panel * form.panel_bytes(args.in_features);
      pack_row(args, form, row - args.first_row, place.lane, panel);
    }
  });
}

TRIPTYCH_KERNEL(pack_super_blocks, triptych::PackSuperBlocks,
                form, type, blocks, panels, in_features, first_row, half, is_damaged) {
  using namespace triptych;
  const CodedForm form(args.form);
  const auto pack = args.type == kQ4K   ? pack_super_blocks<kQ4K>
                    : args.type == kQ5K ? pack_super_blocks<kQ5K>
                                        : pack_super_blocks<kQ6K>;
  for_panel_rows(args.first_row, rows, args.half,
                 [&](int64_t first, int64_t end) { pack(args, form, first, end); });
}

TRIPTYCH_KERNEL(coded_embedding, triptych::CodedEmbedding,
                form, out_dtype, panels, token_ids, out, in_features) {
  using namespace triptych;
  args.out_dtype == kFloat32 ? embed<float>(args, rows) : embed<bf16>(args, rows);
}
