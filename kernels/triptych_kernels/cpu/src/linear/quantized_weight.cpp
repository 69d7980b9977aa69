// Quantizing weights to packed 4 and 8 bits, and reading rows back.
#include "linear/quantized.h"
#include "simd/scalar.h"

namespace triptych {
namespace {

struct PackQuantized {
  int64_t bits, affine;
  const float* rows;      // [rows, in_features]
  char* panels;
  int64_t in_features;
  int64_t first_row;
  int64_t half;
};

struct QuantizedEmbedding {
  int64_t bits, affine;
  int64_t out_dtype;
  const char* panels;
  const int64_t* token_ids;  // [rows]
  void* out;                 // [rows, in_features]
  int64_t in_features;
};

// Kinds of groups, as GGML's blocks of these names.
enum BlockType : int64_t { kQ4_0, kQ4_1, kQ8_0 };

struct Block {
  int64_t type;
  uint16_t scale;          // float16
  uint16_t minimum;        // float16, of kQ4_1
  uint8_t bytes[kGroup];   // the first 16 of 4-bit types: input i in the low nibble of byte i, i + 16 in its high one
};

// Integers as the format has them, with its own zero.
template <typename F>
void store_words(const Block& block, char* words) {
  uint8_t bytes[kGroup];
  if constexpr (F::kBits == 4) {
    std::memcpy(bytes, block.bytes, kGroup / 2);
  } else {
    for (int i = 0; i < kGroup; ++i) bytes[i] = block.bytes[i] + F::kZero;  // from two's complement
  }
  for (int word = 0; word < F::kWords; ++word) {
    std::memcpy(words + word * kPanel * sizeof(uint32_t), bytes + word * sizeof(uint32_t), sizeof(uint32_t));
  }
}

// `group`: of the panel; `lane`: of the output in it.
template <typename F>
void store_block(const Block& block, char* group, int64_t lane) {
  std::memcpy(group + lane * sizeof(uint16_t), &block.scale, sizeof block.scale);
  if constexpr (F::kAffine) {
    uint16_t minimum = block.minimum;
    if (F::kBits == 4 && block.type == kQ4_0) minimum = to_half(-8 * from_half(block.scale));  // exact
    std::memcpy(group + F::kScaleBytes + lane * sizeof(uint16_t), &minimum, sizeof minimum);
  }
  store_words<F>(block, group + F::kWordsAt + lane * sizeof(uint32_t));
}

// f(row, group) -> Block, for every row and group, into the panels. One thread fills neighbouring lanes.
template <typename F, typename Args, typename Make>
void fill_panels(const Args& args, int64_t rows, const Make& make) {
  const int64_t groups = args.in_features / kGroup;
  parallel_for((rows + kLanes - 1) / kLanes, [&](int64_t index) {
    const int64_t end = std::min((index + 1) * kLanes, rows);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t row = index * kLanes; row < end; ++row) {
        const Place place = place_of(args.first_row + row, args.half);
        char* to = args.panels + (place.panel * groups + group) * F::kGroupBytes;
        store_block<F>(make(row, group), to, place.lane);
      }
    }
  });
}

// The quantizers round as GGML's reference does (quantize_row_*_ref in ggml-quants.c).

inline float inverse_of(float scale) { return scale != 0 ? 1 / scale : 0; }

inline float largest_of(const float* x) {
  vec values = load(x);
  for (int i = kLanes; i < kGroup; i += kLanes) values = max(values, load(x + i));
  return largest(values);
}

inline float smallest_of(const float* x) {
  vec values = zero() - load(x);
  for (int i = kLanes; i < kGroup; i += kLanes) values = max(values, zero() - load(x + i));
  return -largest(values);
}

// The value of the largest magnitude, the first of them, with its sign.
inline float extreme_of(const float* x) {
  const float high = largest_of(x), low = smallest_of(x);
  if (high == -low) return *std::find_if(x, x + kGroup, [=](float value) { return std::abs(value) == high; });
  return high > -low ? high : low;
}

// The integers (x - start) / scale + bias, cut off, as a block of 4 bits.
inline Block make_block(int64_t type, const float* x, float scale, float start, float bias) {
  const float inverse = inverse_of(scale);
  int integers[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    integers[i] = std::min(15, static_cast<int>(std::fma(x[i] - start, inverse, bias)));
  }
  Block block{type, to_half(scale), to_half(start), {}};
  for (int i = 0; i < kGroup / 2; ++i) {
    block.bytes[i] = static_cast<uint8_t>(integers[i] | integers[i + kGroup / 2] << 4);
  }
  return block;
}

inline Block quantize_q4_0(const float* x) { return make_block(kQ4_0, x, extreme_of(x) / -8, 0, 8.5f); }

inline Block quantize_q4_1(const float* x) {
  const float low = smallest_of(x);
  return make_block(kQ4_1, x, (largest_of(x) - low) / 15, low, 0.5f);
}

inline Block quantize_q8_0(const float* x) {
  const float scale = std::abs(extreme_of(x)) / 127, inverse = inverse_of(scale);
  Block block{kQ8_0, to_half(scale), 0, {}};
  for (int i = 0; i < kGroup; ++i) {
    const float value = x[i] * inverse;
    // just below one half, so that what is just below it does not become a whole in the sum
    block.bytes[i] = static_cast<uint8_t>(static_cast<int>(value + std::copysign(0.49999997f, value)));
  }
  return block;
}

// Sum of the squares of what 4-bit rounding changed.
inline float squared_error(const float* x, const Block& block) {
  const float scale = from_half(block.scale);
  const vec start = splat(block.type == kQ4_0 ? -8 * scale : from_half(block.minimum));
  float integers[kGroup];
  for (int i = 0; i < kGroup / 2; ++i) {
    integers[i] = block.bytes[i] & 15;
    integers[i + kGroup / 2] = block.bytes[i] >> 4;
  }
  vec squares = zero();
  for (int i = 0; i < kGroup; i += kLanes) {
    const vec error = fma(load(integers + i), splat(scale), start) - load(x + i);
    squares = fma(error, error, squares);
  }
  return sum(squares);
}

template <typename F>
Block quantize(const float* x) {
  if constexpr (F::kBits == 8) return quantize_q8_0(x);
  const Block symmetric = quantize_q4_0(x);
  if constexpr (!F::kAffine) return symmetric;
  const Block affine = quantize_q4_1(x);
  return squared_error(x, affine) < squared_error(x, symmetric) ? affine : symmetric;
}

template <typename F, typename O>
void embed(const QuantizedEmbedding& args, int64_t rows) {
  const int64_t groups = args.in_features / kGroup;
  parallel_for(rows, [&](int64_t row) {
    const Place place = place_of(args.token_ids[row], -1);
    const char* from = args.panels + place.panel * groups * F::kGroupBytes;
    O* to = static_cast<O*>(args.out) + row * args.in_features;
    for (int64_t group = 0; group < groups; ++group, from += F::kGroupBytes, to += kGroup) {
      uint16_t scale, minimum = 0;
      std::memcpy(&scale, from + place.lane * sizeof scale, sizeof scale);
      if constexpr (F::kAffine) {
        std::memcpy(&minimum, from + F::kScaleBytes + place.lane * sizeof minimum, sizeof minimum);
      }
      const char* words = from + F::kWordsAt + place.lane * sizeof(uint32_t);
      for (int at = 0; at < kGroup; ++at) {
        uint32_t word;
        std::memcpy(&word, words + at / 2 / F::kPairs * kPanel * sizeof word, sizeof word);
        const int shift = at / 2 % F::kPairs * F::kBits + at % 2 * 16;
        const int integer = static_cast<int>(word >> shift & ((1u << F::kBits) - 1)) - F::kZero;
        const float value = std::fma(static_cast<float>(integer), from_half(scale), from_half(minimum));
        store_one(to + kPairOrder<F::kBits>.input[at], value);
      }
    }
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(pack_quantized, triptych::PackQuantized,
                bits, affine, rows, panels, in_features, first_row, half) {
  using namespace triptych;
  with_format(args.bits, args.affine, [&](auto format) {
    using F = decltype(format);
    fill_panels<F>(args, rows, [&](int64_t row, int64_t group) {
      return quantize<F>(args.rows + row * args.in_features + group * kGroup);
    });
  });
}

TRIPTYCH_KERNEL(quantized_embedding, triptych::QuantizedEmbedding,
                bits, affine, out_dtype, panels, token_ids, out, in_features) {
  using namespace triptych;
  with_format(args.bits, args.affine, [&](auto format) {
    if (args.out_dtype == kFloat32) return embed<decltype(format), float>(args, rows);
    embed<decltype(format), bf16>(args, rows);
  });
}
