// Filling weights with the blocks of .gguf files, in one pass: a block is read, and its place in a panel is written.
// Panels of quantized.h are those of coded.h with a float16 scale, and maybe a minimum, per group.
#include "linear/block_layouts.h"
#include "simd/columns.h"

namespace triptych {
namespace {

using blocks::bits_at;
using blocks::Scales;
using blocks::Steps;
using coded::CodedForm;

struct PackBlocks {
  int64_t form;           // of the weight, which can hold the blocks without loss
  int64_t type;           // blocks::BlockType
  const uint8_t* blocks;  // [rows] of a row's blocks
  int64_t row_bytes;      // from one row to the next
  char* panels;
  int64_t in_features;
  int64_t first_row;      // where the first row goes, in its piece
  int64_t half;           // as for place_of
  int64_t* is_damaged;    // becomes 1 if a scale is no number
};

// kLanes rows of a file. Past the last one it is that one again.
struct Rows {
  const uint8_t* at[kLanes];

  Rows(const uint8_t* first, int64_t row_bytes, int64_t count) {
    for (int64_t lane = 0; lane < kLanes; ++lane) at[lane] = first + std::min(lane, count - 1) * row_bytes;
  }
  void next(int64_t num_bytes) {
    for (const uint8_t*& row : at) row += num_bytes;
  }
};

// The words of a block of each row; returns what lies before or behind them.
template <typename T>
ivec load_block(const Rows& rows, ivec (&words)[T::kWords]) {
  unroll<T::kWords / 4>([&](auto i) { load_columns(rows.at, T::kHead + 16 * i, words + 4 * i); });
  ivec last[4];
  if constexpr (constexpr int kLeft = T::kWords % 4; kLeft != 0) {
    load_columns(rows.at, T::kHead + 4 * T::kWords - 16, last);
    unroll<kLeft>([&](auto i) { words[T::kWords - kLeft + i] = last[4 - kLeft + i]; });
  }
  if constexpr (T::kHasTail) {
    load_columns(rows.at, T::kBytes - 16, last);
    return blocks::upper_half(last[3]);
  }
  if constexpr (T::kHead == 0) return splat_int(0);
  uint32_t heads[kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(heads + lane, rows.at[lane], T::kHead);
  return load_ints(heads);
}

// What is written of a panel: some lanes of one of its vectors, one element after the other.
class Column {
 public:
  // `lane` is the first of `count` within the panel.
  Column(char* panel, int64_t lane, int64_t count)
      : to_(panel), half_(lane / kLanes), first_(lane % kLanes), count_(count) {}

  void put_word(ivec word) {
    put<uint32_t>(word, [](char* to, ivec x) { store(reinterpret_cast<float*>(to), as_vec(x)); });
  }
  // Of the lower 16 or 8 bits of each lane.
  void put_half(ivec x) {
    put<uint16_t>(x, [](char* to, ivec x) { store_shorts(reinterpret_cast<int16_t*>(to), signed_of(x, 0x8000)); });
  }
  void put_byte(ivec x) {
    put<uint8_t>(x, [](char* to, ivec x) { store_bytes(reinterpret_cast<int8_t*>(to), signed_of(x, 0x80)); });
  }

 private:
  static ivec signed_of(ivec x, int sign) {
    return ((x + splat_int(sign)) & splat_int(2 * sign - 1)) + splat_int(-sign);
  }

  template <typename Element, typename F>
  void put(ivec x, const F& store_all) {
    char* const to = to_ + half_ * kLanes * sizeof(Element);
    to_ += kPanel * sizeof(Element);
    if (count_ == kLanes) return store_all(to, x);
    Element elements[kLanes];
    store_all(reinterpret_cast<char*>(elements), x);
    std::memcpy(to + first_ * sizeof(Element), elements, count_ * sizeof(Element));
  }

  char* to_;
  int64_t half_, first_, count_;
};

inline void put_codes(int64_t bits, const Steps& steps, Column& to) {
  if (bits == 8) {
    unroll<bytes::kSteps>([&](auto step) { to.put_word(steps[step]); });
    return;
  }
  unroll<4>([&](auto i) {
    to.put_word(bits_at<0>(steps[i], 15) + shift_left<4>(bits_at<0>(steps[4 + i], 15)));
  });
  if (bits == 4) return;
  unroll<2>([&](auto plane) {
    ivec word = splat_int(0);
    unroll<4>([&](auto i) { word = word + shift_left<2 * i>(bits_at<4>(steps[4 * plane + i], 3)); });
    to.put_word(word);
  });
}

// What is added to codes, from where the file counts to where the panels do.
template <typename T>
int shift_of(const CodedForm& form) {
  if (form.table != coded::kIntegers) return 0;
  const int middle = 1 << (form.bits - 1);
  // 6 and 8 bits beside a minimum have signs
  return (form.offset == coded::kMinimum && form.bits == 4 ? 0 : middle) - T::kCenter;
}

// Whether a power of two times the codes of a block of kMxfp4 is a number in float32; the largest value is 6.
bool is_finite_power(const uint8_t* block) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const int exponent = block[0];
  if (exponent <= 252 || exponent == 255) return exponent <= 252;
  const float power = exponent == 253 ? 0x1p126f : 0x1p127f;
  return std::all_of(block + 1, block + 1 + kGroup / 2, [=](uint8_t codes) {
    return std::isfinite(kValues[codes & 7] * power) && std::isfinite(kValues[codes >> 4 & 7] * power);
  });
}

// Packs some rows of one vector of a panel, block by block.
template <typename T>
class Packer {
 public:
  Packer(const PackBlocks& args, const CodedForm& form, int64_t row, int64_t count)
      : form_(form), shift_(shift_of<T>(form)),
        rows_(args.blocks + (row - args.first_row) * args.row_bytes, args.row_bytes, count),
        to_(panel_of(args, form, row), place_of(row, args.half).lane, count) {}

  void pack_block() {
    ivec words[T::kWords];
    const ivec rest = load_block<T>(rows_, words);
    Scales scales;
    T::scales(rest, words, scales);
    check(scales);
    put_head(scales);
    unroll<T::kWeights / kGroup>([&](auto group) {
      if constexpr (T::kUnits > 0) {
        put_units<group>(scales.multiples, coded::kSignedZero);
        if (form_.is_affine()) put_units<group>(scales.minima, 0);
      }
      Steps steps;
      T::template codes<group>(words, steps);
      const ivec shift = bytes::splat_byte(std::max(shift_, 0));
      unroll<bytes::kSteps>([&](auto step) { steps[step] = add_bytes(steps[step], shift); });
      put_codes(form_.bits, steps, to_);
    });
    rows_.next(T::kBytes);
  }
  bool is_damaged() const { return is_damaged_ || largest(exponents_) == kNoNumber; }

 private:
  static constexpr int kNoNumber = 0x7c00;  // the exponent of a float16 that is none

  static char* panel_of(const PackBlocks& args, const CodedForm& form, int64_t row) {
    return args.panels + place_of(row, args.half).panel * form.panel_bytes(args.in_features);
  }

  // Also lets 4 bits that count from 0 have a minimum, which is exact, in their center's place.
  void check(Scales& scales) {
    if (form_.scale == coded::kPowers) {
      if (largest(scales.scale) <= 252) return;
      for (const uint8_t* const block : rows_.at) is_damaged_ |= !is_finite_power(block);
      return;
    }
    if (shift_ < 0) {
      uint32_t halves[kLanes];
      store(reinterpret_cast<float*>(halves), as_vec(scales.scale));
      for (uint32_t& half : halves) half = to_half(static_cast<float>(shift_) * from_half(half));
      scales.minimum = load_ints(halves);
    }
    const ivec exponent = splat_int(kNoNumber);
    exponents_ = max(exponents_, max(scales.scale & exponent, scales.minimum & exponent));
  }

  void put_head(const Scales& scales) {
    const auto put_scale = [&](ivec scale) {
      form_.scale == coded::kPowers ? to_.put_byte(scale) : to_.put_half(scale);
    };
    const int in_head = form_.scale == coded::kTwoLevels ? 1 : form_.num_scales;
    for (int unit = 0; unit < in_head; ++unit) put_scale(scales.scale);
    for (int unit = 0; unit < in_head && form_.is_affine(); ++unit) put_scale(scales.minimum);
  }

  // Of each half of a group, or of all of it.
  template <int Group>
  void put_units(const ivec* units, int zero) {
    constexpr bool kOfHalves = T::kUnits == 2 * blocks::kGroups;
    unroll<2>([&](auto half) {
      constexpr int kUnit = kOfHalves ? 2 * Group + half : Group;
      if (half < form_.num_scales) to_.put_byte(shift_right<kUnit % 4 * 8>(units[kUnit / 4]) + splat_int(zero));
    });
  }

  const CodedForm& form_;
  const int shift_;
  Rows rows_;
  Column to_;
  ivec exponents_ = splat_int(0);
  bool is_damaged_ = false;
};

// Rows first … end - 1, which are of one panel.
template <typename T>
void pack_rows(const PackBlocks& args, const CodedForm& form, int64_t first, int64_t end) {
  const int64_t blocks = args.in_features / T::kWeights;
  const int64_t middle = std::clamp(first - place_of(first, args.half).lane + kLanes, first, end);
  const bool is_one = args.half >= 0 || middle == first || middle == end;
  bool is_damaged = false;
  if (is_one) {
    Packer<T> packer(args, form, first, end - first);
    for (int64_t block = 0; block < blocks; ++block) packer.pack_block();
    is_damaged = packer.is_damaged();
  } else {  // both vectors together, which share lines
    Packer<T> low(args, form, first, middle - first), high(args, form, middle, end - middle);
    for (int64_t block = 0; block < blocks; ++block) low.pack_block(), high.pack_block();
    is_damaged = low.is_damaged() || high.is_damaged();
  }
  if (is_damaged) std::atomic_ref(*args.is_damaged).store(1, std::memory_order_relaxed);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(pack_blocks, triptych::PackBlocks,
                form, type, blocks, row_bytes, panels, in_features, first_row, half, is_damaged) {
  using namespace triptych;
  const CodedForm form(args.form);
  blocks::with_layout(args.type, [&](auto layout) {
    using T = decltype(layout);
    coded::for_panels(args.first_row, rows, args.half, 1, [&](const auto& for_each_panel) {
      for_each_panel([&](int64_t first, int64_t end) { pack_rows<T>(args, form, first, end); });
    });
  });
}
