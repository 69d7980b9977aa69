// Products of inputs in bfloat16 with codes of which values are bfloat16 exactly, two inputs of a row at a time: integers
// of up to 8 bits, floats of 8 and of 4. Neither inputs nor values are rounded; a scale multiplies the sum of a unit, of
// which all inputs share it.
//
// The two inputs of a pair are those of bytes 0 and 2, or 1 and 3, of a step's codes, so a lookup by 16 bits finds both
// values of a pair at once, and needs neither masks nor conversions. Inputs of a tile of rows:
//
//   [in_features / 2][rows] pairs, [in_features / 32][kPairSums][rows] float sums
//
// An output is one chain of sums over its units, a unit one chain over its pairs, for any number of rows.
#pragma once

#include "linear/coded.h"
#include "linear/product.h"
#include "simd/shorts.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace triptych::coded {

constexpr int64_t kGroupPairs = kGroup / 2;
constexpr int64_t kMaxUnit = 2 * kGroup;  // a longer chain is what one row would wait for
// The sums of a group's inputs that its rows have: of each half, of the group, and of it with the one before.
enum PairSum { kFirstHalf, kSecondHalf, kWholeGroup, kTwoGroups, kPairSums };
constexpr int64_t kPairUnits = kGroupPairs + kPairSums;  // of 4 bytes, of a row's group
constexpr int kPairRows = 6;      // of a tile: 12 sums of units, 12 of all, two weights and an input in 32 registers
constexpr int kLonePairRows = 8;  // one tile that keeps sums of all in memory is faster than two
constexpr int kRowsInRegisters = 5;  // while codes are looked up; sums of all of more rows are kept in memory

constexpr int64_t kChunkGroups = 4;  // that are unpacked together, which leaves room for inputs in the first-level cache

// What shares a scale, as these products have it.
struct PairUnits {
  int64_t inputs;    // of a unit: 16, 32 or 64
  bool is_affine;

  PairUnits(const CodedForm& form, int64_t in_features) : inputs(kGroup), is_affine(form.is_affine()) {
    if (form.num_scales == 2) inputs = kHalfGroup;
    else if (form.scale != kTwoLevels && form.block % kMaxUnit == 0 && in_features % kMaxUnit == 0) inputs = kMaxUnit;
  }
  bool starts(int64_t group, int half) const {
    return inputs == kHalfGroup || (half == 0 && (inputs == kGroup || group % 2 == 0));
  }
  bool ends(int64_t group, int half) const {
    return inputs == kHalfGroup || (half == 1 && (inputs == kGroup || group % 2 == 1));
  }
  // Of the unit that ends there.
  PairSum sum(int half) const {
    return inputs == kMaxUnit ? kTwoGroups : inputs == kGroup ? kWholeGroup : half == 0 ? kFirstHalf : kSecondHalf;
  }
  int scale(int half) const { return inputs == kHalfGroup ? half : 0; }
};

// pairs<Codes, Step>(words, half, out): the values of four codes of each output of a half, those of inputs 0 and 2 and
// those of 1 and 3.
// kDirectRows: so many rows or fewer look codes up as they multiply, each tile again, beside its products; for more,
// values are unpacked once.
class PairTable {
 public:
  static constexpr int64_t kDirectRows = 32;
  explicit PairTable(const float* values) {
    bf16 table[2 * kLanes];  // twice, since the bit above an index is that of another code
    store(table, load(values));
    store(table + kLanes, load(values));
    table_ = load_ints(table);
  }
  template <typename, int Step>
  void pairs(const char* words, int half, ivec (&out)[2]) const {
    const ivec word = load_ints(words + (Step % 4 * kPanel + half * kLanes) * sizeof(uint32_t));
    constexpr int kShift = Step / 4 * 4;
    ivec even = word;
    if constexpr (kShift > 0) even = shift_halves_right<kShift>(word);
    out[0] = look_up_shorts(table_, even);
    out[1] = look_up_shorts(table_, shift_halves_right<8 + kShift>(word));
  }

 private:
  ivec table_;
};

// The same of integers of 6 bits.
class SixBitTable {
 public:
  static constexpr int64_t kDirectRows = 16;
  explicit SixBitTable(int center) {
    bf16 table[4 * kLanes];
    float values[kLanes];
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(part * kLanes + i - center);
      store(table + part * kLanes, load(values));
    }
    low_ = load_ints(table);
    high_ = load_ints(table + 2 * kLanes);
  }
  template <typename Codes, int Step>
  void pairs(const char* words, int half, ivec (&out)[2]) const {
    const ivec codes = Codes::template codes<Step>(words, half);
    out[0] = look_up_shorts(low_, high_, codes);
    out[1] = look_up_shorts(low_, high_, shift_halves_right<8>(codes));
  }

 private:
  ivec low_, high_;
};

// Values that are widened to float32, of which the upper halves are all.
template <typename Value>
struct PairsOfFloats {
  static constexpr int64_t kDirectRows = kLonePairRows;
  Value value;
  template <typename Codes, int Step>
  void pairs(const char* words, int half, ivec (&out)[2]) const {
    vec values[4];
    value.template widen<Codes, Step>(words, half, values);
    unroll<2>([&](auto i) { out[i] = shift_right<16>(bits_of(values[i])) | bits_of(values[2 + i]); });
  }
};

// f(Codes, Value) of forms of which values are bfloat16.
template <typename F>
void with_pairs(const CodedForm& form, const F& f) {
  if (form.table == kFloat8) return f(Bytes(), PairsOfFloats<Float8>{{}});
  with_codes(form, [&](auto codes) {
    using Codes = decltype(codes);
    const int center = center_of<Codes>(form);
    if constexpr (std::is_same_v<Codes, Bytes>) {
      f(codes, PairsOfFloats<Integer>{{center}});
    } else if constexpr (std::is_same_v<Codes, SixBits>) {
      f(codes, SixBitTable(center));
    } else if constexpr (std::is_same_v<Codes, Nibbles>) {
      f(codes, PairTable(center == 0 ? kCounts : kSignedCounts));
    } else {
      f(codes, PairTable(Codes::kFloats));
    }
  });
}

// A group as tiles read it: pairs [kGroupPairs][kPanel], and scales and minima [2][kPanel] of each unit that ends in it.
struct PairGroup {
  static constexpr int64_t kScales = kGroupPairs * kPanel, kMinima = kScales + 2 * kPanel;
  static constexpr int64_t kFloats = kMinima + 2 * kPanel;
};

template <typename Codes, typename Value>
void unpack_pair_values(Reader& from, const Value& value, const PairUnits& units, int64_t groups, float* to) {
  const vec unit_value = splat(unit_of(from.form()));
  for (int64_t group = 0; group < groups; ++group, from.next(), to += PairGroup::kFloats) {
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      unroll<bytes::kSteps>([&](auto step) __attribute__((always_inline)) {
        ivec pairs[2];
        value.template pairs<Codes, step>(from.words(), half, pairs);
        unroll<2>([&](auto i) __attribute__((always_inline)) {
          store(to + (2 * step + i) * kPanel + half * kLanes, as_vec(pairs[i]));
        });
      });
      for (const int part : {0, 1}) {
        if (!units.ends(group, part)) continue;
        const vec scales = from.scales(units.scale(part), half) * unit_value;
        const int64_t at = part * kPanel + half * kLanes;
        store(to + PairGroup::kScales + at, scales);
        if (units.is_affine) store(to + PairGroup::kMinima + at, from.offsets(units.scale(part), half, scales));
      }
    });
  }
}

// Adds to sums `to` [Rows][kPanel] the products of a tile's inputs with some groups.
// pairs, input_sums: of these groups
template <int Rows>
void multiply_pair_groups(const int32_t* pairs, const float* input_sums, const PairUnits& units, int64_t groups,
                          const float* weights, float* to) {
  vec sums[Rows][2], dots[Rows][2];
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { sums[row][half] = load(to + row * kPanel + half * kLanes); }); });
  const auto add_half = [&](const float* values) __attribute__((always_inline)) {
#pragma GCC unroll 1
    for (int64_t pair = 0; pair < kGroupPairs / 2; ++pair, pairs += Rows, values += kPanel) {
      const vec halves[2] = {load(values), load(values + kLanes)};
      unroll<Rows>([&](auto row) __attribute__((always_inline)) {
        const vec inputs = as_vec(splat_int(pairs[row]));
        unroll<2>([&](auto half) { dots[row][half] = add_bf16_dot(dots[row][half], inputs, halves[half]); });
      });
    }
  };
  const auto finish = [&](int part) __attribute__((always_inline)) {
    const float* const scales = weights + PairGroup::kScales + part * kPanel;
    const float* const minima = weights + PairGroup::kMinima + part * kPanel;
    const float* const of_rows = input_sums + units.sum(part) * Rows;
    unroll<2>([&](auto half) {
      const vec scale = load(scales + half * kLanes);
      vec minimum = zero();
      if (units.is_affine) minimum = load(minima + half * kLanes);
      unroll<Rows>([&](auto row) {
        sums[row][half] = fma(dots[row][half], scale, sums[row][half]);
        if (units.is_affine) sums[row][half] = fma(splat(of_rows[row]), minimum, sums[row][half]);
      });
    });
  };
  for (int64_t group = 0; group < groups; ++group, weights += PairGroup::kFloats, input_sums += kPairSums * Rows) {
    for (const int part : {0, 1}) {
      if (units.starts(group, part)) unroll<Rows>([&](auto row) { dots[row][0] = dots[row][1] = zero(); });
      add_half(weights + part * (kGroupPairs / 2) * kPanel);
      if (units.ends(group, part)) finish(part);
    }
  }
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { store(to + row * kPanel + half * kLanes, sums[row][half]); }); });
}

// Adds to `to` [Rows][kPanel] the products of a tile's inputs with a panel of which codes are looked up as they are
// multiplied, in the same order of sums.
template <int Rows, typename Codes, typename Value>
void multiply_pairs_directly(Reader& from, const Value& value, const PairUnits& units, const int32_t* pairs,
                             const float* input_sums, int64_t groups, float* to) {
  constexpr bool kHasRoom = Rows <= kRowsInRegisters;
  const vec unit_value = splat(unit_of(from.form()));
  vec held[kHasRoom ? Rows : 1][2], dots[Rows][2];
  unroll<Rows>([&](auto row) __attribute__((always_inline)) {
    dots[row][0] = dots[row][1] = zero();
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      if constexpr (kHasRoom) held[row][half] = zero();
      else store(to + row * kPanel + half * kLanes, zero());
    });
  });
  for (int64_t group = 0; group < groups; ++group, from.next(), input_sums += kPairSums * Rows) {
    const char* const words = from.words();
    unroll<2>([&](auto part) __attribute__((always_inline)) {
      if (units.starts(group, part)) {
        unroll<Rows>([&](auto row) __attribute__((always_inline)) { dots[row][0] = dots[row][1] = zero(); });
      }
      unroll<bytes::kSteps / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int kStep = part * bytes::kSteps / 2 + i;
        ivec values[2][2];
        unroll<2>([&](auto half) __attribute__((always_inline)) {
          value.template pairs<Codes, kStep>(words, half, values[half]);
        });
        unroll<2>([&](auto odd) __attribute__((always_inline)) {
          unroll<Rows>([&](auto row) __attribute__((always_inline)) {
            const vec inputs = as_vec(splat_int(pairs[(2 * kStep + odd) * Rows + row]));
            unroll<2>([&](auto half) __attribute__((always_inline)) {
              dots[row][half] = add_bf16_dot(dots[row][half], inputs, as_vec(values[half][odd]));
            });
          });
        });
      });
      if (units.ends(group, part)) {
        const float* const of_rows = input_sums + units.sum(part) * Rows;
        unroll<2>([&](auto half) __attribute__((always_inline)) {
          const vec scales = from.scales(units.scale(part), half) * unit_value;
          vec minima = zero();
          if (units.is_affine) minima = from.offsets(units.scale(part), half, scales);
          unroll<Rows>([&](auto row) __attribute__((always_inline)) {
            float* const at = to + row * kPanel + half * kLanes;
            vec sum = fma(dots[row][half], scales, kHasRoom ? held[kHasRoom ? row : 0][half] : load(at));
            if (units.is_affine) sum = fma(splat(of_rows[row]), minima, sum);
            if constexpr (kHasRoom) held[row][half] = sum;
            else store(at, sum);
          });
        });
      }
    });
    pairs += kGroupPairs * Rows;
  }
  if constexpr (kHasRoom) {
    unroll<Rows>([&](auto row) __attribute__((always_inline)) {
      unroll<2>([&](auto half) __attribute__((always_inline)) { store(to + row * kPanel + half * kLanes, held[row][half]); });
    });
  }
}

// Pairs and sums of as many groups as a vector has lanes, since sums of all cost as much as of one: lane i of each pair,
// and of the sums of both halves, is of the group at x[i].
inline void pair_groups(const bf16* const (&x)[kLanes], int64_t count, vec (&pairs)[kLanes], vec (&sums)[2]) {
  alignas(64) static constexpr auto kOrder = [] {
    struct {
      int16_t from[kGroup];
    } order{};
    for (int i = 0; i < kGroup; ++i) order.from[i] = static_cast<int16_t>(i / 4 * 4 + i % 4 / 2 + i % 2 * 2);
    return order;
  }();
  const ivec order = load_ints(&kOrder);
  for (int64_t i = 0; i < kLanes; ++i) pairs[i] = i < count ? as_vec(look_up_shorts(load_ints(x[i]), order)) : zero();
  transpose(pairs);
  sums[0] = sums[1] = zero();
  unroll<kGroupPairs>([&](auto pair) {
    constexpr int kHalf = 2 * pair / kGroupPairs;
    sums[kHalf] = add_bf16_pairs(sums[kHalf], pairs[pair]);
  });
}

// Lays out rows x [height] of a tile, `stride` apart.
inline void lay_out_pairs(const bf16* x, int64_t stride, int64_t height, int64_t in_features, int32_t* to) {
  const int64_t groups = in_features / kGroup, together = height == 1 ? kLanes : 1;
  auto* const sums = reinterpret_cast<float*>(to + in_features / 2 * height);
  float before[kLonePairRows] = {};
  for (int64_t group = 0; group < groups; group += together) {
    const int64_t count = height == 1 ? std::min<int64_t>(kLanes, groups - group) : height;
    const bf16* from[kLanes];
    for (int64_t i = 0; i < count; ++i) from[i] = x + (height == 1 ? i * kGroup : i * stride) + group * kGroup;
    vec pairs[kLanes], halves[2];
    pair_groups(from, count, pairs, halves);
    float of_halves[2][kLanes];
    unroll<2>([&](auto half) { store(of_halves[half], halves[half]); });
    auto* const at = reinterpret_cast<float*>(to + group * kGroupPairs * height);
    if (height == 1) transpose(pairs);
    for (int64_t i = 0; i < (height == 1 ? count : kGroupPairs); ++i) {
      height == 1 ? store(at + i * kGroupPairs, pairs[i]) : store_lanes(at + i * height, (1u << height) - 1, pairs[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = height == 1 ? 0 : i, own = height == 1 ? group + i : group;
      float* const of_group = sums + own * kPairSums * height + row;
      const float first = of_halves[0][i], second = of_halves[1][i], whole = first + second;
      of_group[kFirstHalf * height] = first;
      of_group[kSecondHalf * height] = second;
      of_group[kWholeGroup * height] = whole;
      of_group[kTwoGroups * height] = before[row] + whole;
      before[row] = whole;
    }
  }
}

}  // namespace triptych::coded

#endif
