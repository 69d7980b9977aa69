// How weights of the formats of published checkpoints are packed, as codes of 4, 6 or 8 bits with their own scales.
//
// A panel holds kPanel outputs, as in panel.h. Its inputs are cut into blocks that share scales:
//
//   [panels] of
//     factors        [kPanel] float32              only beside scales in float8
//     [blocks] of
//       scales       [scales][kPanel]              one, or one per 16 inputs; of two levels the upper one
//       offsets      [scales][kPanel]              minima as scales are; or zero points in bytes, their code plus 128
//       [groups of 32 inputs] of
//         multiples  [1 or 2][kPanel] bytes        of scales in two levels only: the lower one plus 128
//         minima     [1 or 2][kPanel] bytes        of minima in two levels only
//         words      [4][kPanel] uint32            4 bits of each code, as quantized.h has them
//         planes     [2][kPanel] uint32            the upper 2 bits of codes of 6
//
//   weight = scale * (value(code) - center) + offset
//
// Codes of 8 bits have 8 words. What a format's name does not say, `CodedForm` is told when a kernel is called, so there
// is one unpacker: of a group it makes bytes and floats for products of integers (`unpack_bytes`), values and scales in
// float32 (`unpack_values`), or weights, in float32 exactly those of the file (`unpack_floats`, `unpack_pairs`).
#pragma once

#include "linear/byte_inputs.h"
#include "linear/byte_panels.h"
#include "simd/float8.h"

namespace triptych::coded {

enum Table : int64_t { kIntegers, kFloat4, kIq4Nl, kNormal4, kTree4, kFloat8 };
enum Scale : int64_t { kHalves, kBfloats, kFloats, kPowers, kFloat8s, kTwoLevels };
enum Offset : int64_t { kNoOffset, kMinimum, kZeroPoint };

constexpr int64_t kSuperGroup = 256;  // inputs that share the upper of two levels
constexpr int kHalfGroup = kGroup / 2;
constexpr int kSignedZero = 128;      // of zero points and multiples, which are stored without signs

// Values of tables of bytes, plus 128; those of kFloat4 are twice the weight's. For each of four quarters of a vector.
template <int... Values>
struct ByteTable {
  static constexpr uint8_t kBytes[] = {static_cast<uint8_t>(Values + 128)...};
  static constexpr float kFloats[] = {static_cast<float>(Values)...};
};
using Float4Table = ByteTable<0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12>;
using Iq4NlTable = ByteTable<-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113>;

// Values of integers of 4 bits that count from their center.
inline constexpr float kSignedCounts[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
// Source: bitsandbytes, `get_4bit_type`.
inline constexpr float kNormal4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
inline constexpr float kTree4Values[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};

// What a weight's `form` says, as coded_weight.py puts it together.
struct CodedForm {
  int64_t bits, table, scale, offset, group;
  int num_scales;     // per block; of two levels per group of 32
  int64_t block;      // inputs
  int64_t head_bytes, group_bytes, words_at;

  explicit CodedForm(int64_t form)
      : bits(form & 15), table(form >> 4 & 15), scale(form >> 8 & 15), offset(form >> 12 & 3), group(form >> 16) {
    num_scales = group == kHalfGroup ? 2 : 1;
    const bool in_levels = scale == kTwoLevels;
    block = in_levels ? kSuperGroup : std::max<int64_t>(group, kGroup);
    const int64_t bytes = scale == kFloats ? 4 : scale == kPowers || scale == kFloat8s ? 1 : 2;
    const int64_t offset_bytes = offset == kMinimum ? bytes : offset == kZeroPoint ? 1 : 0;
    head_bytes = (in_levels ? 1 : num_scales) * (bytes + offset_bytes) * kPanel;
    words_at = in_levels ? num_scales * (offset == kMinimum ? 2 : 1) * kPanel : 0;
    group_bytes = words_at + kPanel * kGroup * bits / 8;
  }

  bool has_factors() const { return scale == kFloat8s; }
  int64_t scale_bytes() const { return scale == kFloats ? 4 : scale == kPowers || scale == kFloat8s ? 1 : 2; }
  bool is_affine() const { return offset != kNoOffset; }
  // Whether its values are bytes, and whether inputs of 8 bits can be multiplied with them.
  bool has_bytes() const { return table <= kIq4Nl; }
  // Whether its values are bfloat16.
  bool has_pairs() const { return table != kNormal4 && table != kTree4; }
  bool has_byte_products() const { return kHasByteProducts || (table == kIntegers && bits == 4); }
  int64_t panel_bytes(int64_t in_features) const {
    return (has_factors() ? kPanel * 4 : 0) + (in_features + block - 1) / block * head_bytes +
           in_features / kGroup * group_bytes;
  }
};

// The groups of a panel, one after the other.
class Reader {
 public:
  Reader(const CodedForm& form, const char* panel)
      : form_(form), factors_(panel), head_(panel + (form.has_factors() ? kPanel * 4 : 0)), at_(head_ + form.head_bytes) {}

  const CodedForm& form() const { return form_; }
  const char* words() const { return at_ + form_.words_at; }

  void next() {
    for (int64_t at = 0; at < form_.group_bytes; at += kLineBytes) prefetch_once(at_ + kAheadBytes + at);
    at_ += form_.group_bytes;
    if (++group_ == form_.block / kGroup) {
      group_ = 0;
      head_ = at_;
      at_ += form_.head_bytes;
    }
  }

  // Of half `half` of the outputs and of the unit's inputs; a group has one unit or two.
  vec scales(int unit, int half) const {
    if (form_.scale == kTwoLevels) {
      return levels(head_, at_ + unit * kPanel, half, -kSignedZero);
    }
    const vec scales = stored(head_ + unit * form_.scale_bytes() * kPanel, half);
    return form_.has_factors() ? scales * load(reinterpret_cast<const float*>(factors_) + half * kLanes) : scales;
  }
  // What is added to scale * (code - center).
  vec offsets(int unit, int half, vec scales) const {
    const int64_t scale_bytes = form_.scale_bytes();
    if (form_.scale == kTwoLevels) {
      const vec minima = levels(head_ + scale_bytes * kPanel, at_ + (form_.num_scales + unit) * kPanel, half, 0);
      return zero() - minima;
    }
    const char* const first = head_ + form_.num_scales * scale_bytes * kPanel;
    if (form_.offset == kMinimum) return stored(first + unit * scale_bytes * kPanel, half);
    const ivec zeros = load_bytes(first + unit * kPanel + half * kLanes) + splat_int(-kSignedZero);
    return zero() - to_floats(zeros) * scales;
  }

 private:
  vec levels(const char* upper, const char* lower, int half, int zero) const {
    const ivec multiples = load_bytes(lower + half * kLanes) + splat_int(zero);
    return to_floats(multiples) * load_halves(upper + half * kLanes * 2);
  }
  vec stored(const char* at, int half) const {
    switch (form_.scale) {
      case kHalves: return load_halves(at + half * kLanes * 2);
      case kBfloats: return load(reinterpret_cast<const bf16*>(at) + half * kLanes);
      case kFloats: return load(reinterpret_cast<const float*>(at) + half * kLanes);
      case kPowers: return as_vec(shift_left<23>(load_bytes(at + half * kLanes)));
      default: return from_float8(load_bytes(at + half * kLanes));
    }
  }

  const CodedForm& form_;
  const char *factors_, *head_, *at_;
  int64_t group_ = 0;
};

// The bytes of each lane, without signs.
inline void split_bytes(ivec words, ivec (&out)[4]) {
  out[0] = words & splat_int(0xff);
  out[1] = shift_right<8>(words) & splat_int(0xff);
  out[2] = shift_right<16>(words) & splat_int(0xff);
  out[3] = shift_right<24>(words);
}

// Codes of 4 inputs of each output, as bytes without signs.
template <int Step>
ivec nibbles(const char* words, int half) {
  const ivec word = load_ints(words + (Step % 4 * kPanel + half * kLanes) * sizeof(uint32_t));
  return (Step < 4 ? word : shift_right<4>(word)) & bytes::splat_byte(15);
}

struct Nibbles {
  static constexpr int kCenter = 8;
  template <int Step>
  static ivec codes(const char* words, int half) {
    return nibbles<Step>(words, half);
  }
};
struct SixBits {
  static constexpr int kCenter = 32;
  template <int Step>
  static ivec codes(const char* words, int half) {
    const ivec plane = load_ints(words + ((4 + Step / 4) * kPanel + half * kLanes) * sizeof(uint32_t));
    constexpr int kShift = 2 * (Step % 4);  // of bits that belong at bit 4
    ivec upper = plane;
    if constexpr (kShift < 4) upper = shift_left<4 - kShift>(plane);
    if constexpr (kShift > 4) upper = shift_right<kShift - 4>(plane);
    return nibbles<Step>(words, half) + (upper & bytes::splat_byte(0x30));
  }
};
struct Bytes {
  static constexpr int kCenter = 128;
  template <int Step>
  static ivec codes(const char* words, int half) {
    return load_ints(words + (Step * kPanel + half * kLanes) * sizeof(uint32_t));
  }
};
// Values of a table instead of its codes.
template <typename T>
struct Looked {
  static constexpr int kCenter = 128;
  static constexpr const float* kFloats = T::kFloats;
  template <int Step>
  static ivec codes(const char* words, int half) {
    return look_up_bytes(T::kBytes, nibbles<Step>(words, half));
  }
};

// f(Codes) of forms of which values are bytes.
template <typename F>
void with_codes(const CodedForm& form, const F& f) {
  if (form.table == kFloat4) return f(Looked<Float4Table>());
  if (form.table == kIq4Nl) return f(Looked<Iq4NlTable>());
  if (form.bits == 4) return f(Nibbles());
  if (form.bits == 6) return f(SixBits());
  f(Bytes());
}

// The center of codes that have no signs of their own in this form.
template <typename Codes>
int center_of(const CodedForm& form) {
  // codes with a minimum count from 0, in 6 bits from the center
  return form.offset == kMinimum && form.bits != 6 ? 0 : Codes::kCenter;
}
// What the values that codes become are multiplied with.
inline float unit_of(const CodedForm& form) {
  return form.table == kFloat4 ? 0.5f : form.table == kFloat8 ? kFloat8Unit : 1.0f;
}

// A group as products with bytes read it, in vectors: bytes of 8 steps, scales of each unit, the sum of scale * byte, and
// minima of each unit.
template <int Units, bool Affine>
struct ByteGroup {
  static constexpr int kScales = 2 * bytes::kSteps, kSums = kScales + 2 * Units, kMinima = kSums + 2;
  static constexpr int64_t kFloats = (kMinima + (Affine ? 2 * Units : 0)) * kLanes;
};

template <int Units, bool Affine, typename Codes>
void unpack_bytes(Reader& from, int64_t groups, float* to) {
  using G = ByteGroup<Units, Affine>;
  constexpr int kUnitSteps = bytes::kSteps / Units;
  const vec unit_value = splat(unit_of(from.form()));
  const vec shift = splat(static_cast<float>(Codes::kCenter - center_of<Codes>(from.form())));
  for (int64_t group = 0; group < groups; ++group, from.next(), to += G::kFloats) {
    const char* const words = from.words();
    unroll<2>([&](auto half) {
      vec sums = zero();
      unroll<Units>([&](auto unit) {
        bytes::Totals<!kHasByteProducts> totals;
        unroll<kUnitSteps>([&](auto i) {
          constexpr int kStep = unit * kUnitSteps + i;
          const ivec codes = Codes::template codes<kStep>(words, half);
          const ivec weights = add_bytes(codes, bytes::splat_byte(-Codes::kCenter));
          totals.add(weights);
          store(to + (2 * kStep + half) * kLanes, as_vec(weights));
        });
        const vec scales = from.scales(unit, half) * unit_value;
        sums = fma(to_floats(totals.end()), scales, sums);
        store(to + (G::kScales + 2 * unit + half) * kLanes, scales);
        if constexpr (Affine) {
          const vec offsets = from.offsets(unit, half, scales);
          store(to + (G::kMinima + 2 * unit + half) * kLanes, fma(scales, shift, offsets));
        }
      });
      store(to + (G::kSums + half) * kLanes, sums);
    });
  }
}

// widen<Codes, Step>(words, half, out): the values of four codes of each output of a half, without their scale.
// start(scales): what is added to values times scales where there is no offset.
struct FloatTable {
  const float* values;
  template <typename, int Step>
  void widen(const char* words, int half, vec (&out)[4]) const {
    // an index is the lowest 4 bits of a lane, whatever is above
    const ivec word = load_ints(words + (Step % 4 * kPanel + half * kLanes) * sizeof(uint32_t));
    unroll<4>([&](auto i) {
      constexpr int kShift = 8 * i + Step / 4 * 4;
      if constexpr (kShift == 0) out[i] = look_up(values, word);
      if constexpr (kShift > 0) out[i] = look_up(values, shift_right<kShift>(word));
    });
  }
  vec start(vec) const { return zero(); }
};
struct Float8 {
  template <typename Codes, int Step>
  void widen(const char* words, int half, vec (&out)[4]) const {
    widen_float8s(Codes::template codes<Step>(words, half), out);
  }
  vec start(vec) const { return zero(); }
};
// Codes beside an offset.
struct Integer {
  int center;
  template <typename Codes, int Step>
  void widen(const char* words, int half, vec (&out)[4]) const {
    ivec codes[4];
    split_bytes(Codes::template codes<Step>(words, half), codes);
    unroll<4>([&](auto i) { out[i] = to_floats(codes[i] + splat_int(-center)); });
  }
  vec start(vec) const { return zero(); }
};
// Codes without one: `scale * center` is exact, so that it can be taken off at the end.
struct Unsigned {
  float center;
  template <typename Codes, int Step>
  void widen(const char* words, int half, vec (&out)[4]) const {
    ivec codes[4];
    split_bytes(Codes::template codes<Step>(words, half), codes);
    unroll<4>([&](auto i) { out[i] = to_floats(codes[i]); });
  }
  vec start(vec scales) const { return scales * splat(-center); }
};

// f(Codes, Value) of forms of which values are no bytes.
template <typename F>
void with_floats(const CodedForm& form, const F& f) {
  switch (form.table) {
    case kNormal4: return f(Nibbles(), FloatTable{kNormal4Values});
    case kTree4: return f(Nibbles(), FloatTable{kTree4Values});
    default: return f(Bytes(), Float8());
  }
}

// f(Codes, Value) of any form.
template <typename F>
void with_values(const CodedForm& form, const F& f) {
  if (!form.has_bytes()) return with_floats(form, f);
  with_codes(form, [&](auto codes) {
    using Codes = decltype(codes);
    const int center = center_of<Codes>(form);
    if constexpr (std::is_same_v<Codes, Bytes> || std::is_same_v<Codes, SixBits>) {
      return form.is_affine() ? f(codes, Integer{center}) : f(codes, Unsigned{static_cast<float>(center)});
    } else if constexpr (std::is_same_v<Codes, Nibbles>) {
      return f(codes, FloatTable{center == 0 ? kCounts : kSignedCounts});
    } else {
      return f(codes, FloatTable{Codes::kFloats});
    }
  });
}

// f(first of two inputs in the group, half, weights of both): of a group, in order.
template <typename Codes, typename Value, typename F>
[[gnu::always_inline]] inline void for_weights(const Reader& from, const Value& value, vec unit_value, const F& f) {
  const CodedForm& form = from.form();
  unroll<2>([&](auto half) {
    vec scales[2], offsets[2];
    for (int unit = 0; unit < form.num_scales; ++unit) {
      scales[unit] = from.scales(unit, half) * unit_value;
      offsets[unit] = form.is_affine() ? from.offsets(unit, half, scales[unit]) : value.start(scales[unit]);
    }
    if (form.num_scales == 1) {
      scales[1] = scales[0];
      offsets[1] = offsets[0];
    }
    unroll<bytes::kSteps>([&](auto step) {
      constexpr int kUnit = step / (bytes::kSteps / 2);
      vec values[4];
      value.template widen<Codes, step>(from.words(), half, values);
      for (vec& each : values) each = fma(each, scales[kUnit], offsets[kUnit]);
      f(4 * step, half, values[0], values[1]);
      f(4 * step + 2, half, values[2], values[3]);
    });
  });
}

// f(first of two inputs in the group, half, weights of both, `to` of the group): of all groups.
template <int64_t GroupSize, typename T, typename F>
void for_groups(Reader& from, int64_t groups, T* to, const F& f) {
  const vec unit_value = splat(unit_of(from.form()));
  with_values(from.form(), [&](auto codes, auto value) {
    for (int64_t group = 0; group < groups; ++group, from.next(), to += GroupSize) {
      for_weights<decltype(codes)>(from, value, unit_value, [&](int input, int half, vec first, vec second) {
        f(input, half, first, second, to);
      });
    }
  });
}

// [groups * kGroup][kPanel] float32
inline void unpack_floats(Reader& from, int64_t groups, float* to) {
  for_groups<kGroup * kPanel>(from, groups, to, [](int input, int half, vec first, vec second, float* group) {
    store(group + input * kPanel + half * kLanes, first);
    store(group + (input + 1) * kPanel + half * kLanes, second);
  });
}

// [groups * kGroup / 2][kPanel] pairs of bfloat16
inline void unpack_pairs(Reader& from, int64_t groups, bf16* to) {
  for_groups<kGroup * kPanel>(from, groups, to, [](int input, int half, vec first, vec second, bf16* group) {
    store_pairs(group + input * kPanel + 2 * half * kLanes, first, second);
  });
}

// A group of values that are no bytes as their products read it: values without scales, [kGroup][kPanel], and the scales
// of both halves of the group, [2][kPanel].
struct FloatGroup {
  static constexpr int64_t kScales = kGroup * kPanel, kFloats = kScales + 2 * kPanel;
};

inline void unpack_values(Reader& from, int64_t groups, float* to) {
  const vec unit_value = splat(unit_of(from.form()));
  const int last_unit = from.form().num_scales - 1;
  with_floats(from.form(), [&](auto codes, auto value) {
    for (int64_t group = 0; group < groups; ++group, from.next(), to += FloatGroup::kFloats) {
      unroll<2>([&](auto half) {
        unroll<bytes::kSteps>([&](auto step) {
          vec values[4];
          value.template widen<decltype(codes), step>(from.words(), half, values);
          unroll<4>([&](auto i) { store(to + (4 * step + i) * kPanel + half * kLanes, values[i]); });
        });
        for (const int unit : {0, 1}) {
          const vec scales = from.scales(std::min(unit, last_unit), half) * unit_value;
          store(to + FloatGroup::kScales + unit * kPanel + half * kLanes, scales);
        }
      });
    }
  });
}

}  // namespace triptych::coded
