// Products with packed 4- and 8-bit weights.
//
// Inputs are rounded to 16-bit integers with a scale per row and group, finer than bfloat16; or to 8-bit ones, of
// which quantized_bytes.h makes twice as many products in the same time. The integers of a group
// multiply exactly; then each output is one chain of float32 sums over its groups in order, for any number of
// rows, so a row's result does not depend on its batch.
//
// Many rows may be multiplied otherwise: each panel is unpacked once and used for all of them, in bfloat16, or in bytes
// as wide_bytes.h does with weights of 4 bits.
#include <bit>

#include "linear/block.h"
#include "linear/product.h"
#include "linear/quantized.h"
#include "linear/quantized_bytes.h"
#include "linear/wide_bytes.h"

namespace triptych {
namespace {

struct QuantizedLinear {
  Linear linear;   // dtype is that of x
  int64_t bits;
  int64_t affine;
  int64_t input_bits;  // 8 or 16
  int64_t wide_rows;   // so many rows or more are multiplied as `wide_bits` says
  int64_t wide_bits;   // 16: in bfloat16; 8: in bytes, weights of 4 bits only
};

// 24 sums, two weights, two words, a mask and an input in 32 registers; in 16 registers, 8 sums with weights of 8 bits. Of
// 4 bits, two words give 8 vectors of weights, and a fourth row would be kept in memory: 97 instead of 116 GOP/s on Zen 4.
template <typename F>
constexpr int kTileRows = kRegisters == 32 ? 6 : F::kBits == 8 ? 4 : 3;
// one tile that keeps some sums in memory is faster than two
template <typename F>
constexpr int kLoneTileRows = kRegisters == 32 ? 8 : kTileRows<F>;
constexpr int64_t kRowsPerIndex = 8;
constexpr float kLargestInteger = 32767.0f;

// `values` in the order in which products read them.
template <int Bits>
void store_in_pair_order(const int16_t (&values)[kGroup], int16_t* out) {
  using Vector [[gnu::vector_size(kGroup * sizeof(int16_t))]] = int16_t;
  Vector vector;
  std::memcpy(&vector, values, sizeof vector);
  [&]<int... Place>(std::integer_sequence<int, Place...>) {
    vector = __builtin_shufflevector(vector, vector, kPairOrder<Bits>.input[Place]...);
  }(std::make_integer_sequence<int, kGroup>{});
  std::memcpy(out, &vector, sizeof vector);
}

// In units of a part of the largest magnitude, or of the range if the integers have 8 bits and a zero point, less which
// they are stored.
template <typename F, int InputBits, typename X>
void quantize_group(const X* x, Activations& out) {
  constexpr int kVectors = kGroup / kLanes;
  constexpr float kUnits = InputBits == 8 ? bytes::kLevels : kLargestInteger;
  vec values[kVectors];
  ivec bits = splat_int(0);
  vec low = zero(), high = zero();
  unroll<kVectors>([&](auto i) {
    values[i] = load(x + i * kLanes);
    bits = max(bits, bits_of(abs(values[i])));  // magnitudes are ordered as their bits are, NaN above all
    low = max(low, zero() - values[i]);
    high = max(high, values[i]);
  });
  float magnitude = std::bit_cast<float>(largest(bits));
  if (InputBits == 8 && std::isfinite(magnitude)) magnitude = largest(high) + largest(low);
  const vec inverse = splat(magnitude < kSmallestMagnitude ? 0.0f : kUnits / magnitude);
  int16_t integers[kGroup];
  ivec totals = splat_int(0);
  unroll<kVectors>([&](auto i) {
    const ivec rounded = to_ints(values[i] * inverse);
    totals = totals + rounded;
    store_shorts(integers + i * kLanes, rounded);
  });
  const int32_t total = sum(totals);
  store_in_pair_order<F::kBits>(integers, out.values);
  out.scale = magnitude / kUnits;
  out.sum = out.scale * static_cast<float>(total);
  out.offset = -F::kZero * total;
}

template <typename F, typename X>
void round_group(const X* x, bf16* out) {
  int16_t values[kGroup];
  for (int i = 0; i < kGroup; i += kLanes) store(reinterpret_cast<bf16*>(values) + i, load(x + i));
  store_in_pair_order<F::kBits>(values, reinterpret_cast<int16_t*>(out));
}

// f(first input of a group, number of the group among those of all rows), for rows first … end - 1
template <typename X, typename F>
void for_groups(const Linear& args, int64_t first, int64_t end, const F& f) {
  const int64_t groups = args.in_features / kGroup;
  for (int64_t row = first; row < end; ++row) {
    const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
    for (int64_t group = 0; group < groups; ++group) f(x + group * kGroup, row * groups + group);
  }
}

// x: of all rows
template <typename F, int InputBits>
void quantize_rows(const Linear& args, int64_t first, int64_t end, Activations* x) {
  const auto quantize = [&](const auto* from, int64_t group) { quantize_group<F, InputBits>(from, x[group]); };
  args.dtype == kFloat32 ? for_groups<float>(args, first, end, quantize) : for_groups<bf16>(args, first, end, quantize);
}

// out[row][half] = x[row] . panel, over `groups`
template <typename F, int Rows>
void multiply(const Activations* x, int64_t groups, const char* panel, vec (&out)[Rows][2]) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  const Activations* x3 = x + 3 * groups;  // so that an address is one of two pointers and few strides
  for (const Activations* const end = x + groups; x < end; ++x, ++x3, panel += F::kGroupBytes) {
    const auto inputs = [&](auto row) -> const Activations& {
      return row < 3 ? x[row * groups] : x3[(row - 3) * groups];
    };
    if constexpr (F::kAffine) {
      unroll<2>([&](auto half) {
        const vec minima = load_halves(panel + F::kScaleBytes + half * kLanes * sizeof(uint16_t));
        unroll<Rows>([&](auto row) { sums[row][half] = fma(splat(inputs(row).sum), minima, sums[row][half]); });
      });
    }
    ivec dots[Rows][2];
    unroll<Rows>([&](auto row) { dots[row][0] = dots[row][1] = splat_int(inputs(row).offset); });
    const char* words = panel + F::kWordsAt;
#pragma GCC unroll 1  // the code of all tiles together stays small; this long a body gains nothing
    for (int word = 0; word < F::kWords; ++word) {
      const char* at = words + word * kPanel * sizeof(uint32_t);
      prefetch_once<kPanel * sizeof(uint32_t)>(at + kAheadBytes);
      const ivec first = load_ints(at), second = load_ints(at + kLanes * sizeof(uint32_t));
      unroll<F::kPairs>([&](auto pair) {
        const ivec weights[2] = {pair_of<F::kBits, pair>(first), pair_of<F::kBits, pair>(second)};
        unroll<Rows>([&](auto row) {
          int32_t two;
          std::memcpy(&two, inputs(row).values + 2 * (word * F::kPairs + pair), sizeof two);
          const ivec value = splat_int(two);
          dots[row][0] = add_dot(dots[row][0], value, weights[0]);
          dots[row][1] = add_dot(dots[row][1], value, weights[1]);
        });
      });
    }
    unroll<2>([&](auto half) {
      const vec scales = load_halves(panel + half * kLanes * sizeof(uint16_t));
      unroll<Rows>([&](auto row) {
        sums[row][half] = fma(to_floats(dots[row][half]) * splat(inputs(row).scale), scales, sums[row][half]);
      });
    });
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

template <typename F, int Rows>
void multiply_tile(const Linear& args, const Activations* x, int64_t row, int64_t panel) {
  const int64_t groups = args.in_features / kGroup;
  vec sums[Rows][2];
  multiply<F, Rows>(x + row * groups, groups,
                    static_cast<const char*>(args.weight) + panel * groups * F::kGroupBytes, sums);
  for (int i = 0; i < Rows; ++i) finish_row(args, row + i, panel, sums[i][0], sums[i][1]);
}

// The tile of `rows` rows, by the template made for that number.
template <typename F, int Rows = kLoneTileRows<F>>
void multiply_rows(const Linear& args, const Activations* x, int64_t row, int64_t rows, int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<F, Rows - 1>(args, x, row, rows, panel);
  }
  multiply_tile<F, Rows>(args, x, row, panel);
}

// Rows of a block with one of its panels; `rows` are all that there are.
template <typename F>
void multiply_panel(const Linear& args, const Activations* x, int64_t rows, const Block& block, int64_t panel) {
  const int64_t tile_rows = rows <= kLoneTileRows<F> ? kLoneTileRows<F> : kTileRows<F>;
  for_row_tiles(block.first_row, block.end_row, tile_rows, [&](int64_t row, int64_t count) {
    multiply_rows<F>(args, x, row, count, panel);
  });
}

inline int64_t activation_bytes(const Linear& args, int64_t rows) {
  return rows * (args.in_features / kGroup) * sizeof(Activations);
}

template <typename F, int InputBits>
void multiply_narrow(const Linear& args, int64_t rows) {
  static thread_local Scratch scratch;
  auto* x = static_cast<Activations*>(scratch.get(activation_bytes(args, rows)));
  for_rows(rows, kRowsPerIndex, [&](int64_t first, int64_t end) {
    make_rows(args.stages, first, end);
    quantize_rows<F, InputBits>(args, first, end, x);
  });
  for_blocks(rows, activation_bytes(args, 1), args.num_panels(), kBlockRows<float>, [&](const Block& block) {
    for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) {
      multiply_panel<F>(args, x, rows, block, panel);
    }
  });
}

// The steps of such a product.
template <typename F, int InputBits>
ProductSteps narrow_product(void (*run)(const Linear& args, const WeightForm& form, int64_t rows)) {
  return {
      .tile_height = [](int64_t) -> int64_t { return kRowsPerIndex; },
      .input_bytes = activation_bytes,
      .prepare = [](const Linear& args, int64_t rows, int64_t tile, void* inputs) {
        const int64_t tiles = (rows + kRowsPerIndex - 1) / kRowsPerIndex;
        quantize_rows<F, InputBits>(args, rows * tile / tiles, rows * (tile + 1) / tiles,
                                    static_cast<Activations*>(inputs));
      },
      .multiply = [](const Linear& args, const WeightForm&, int64_t rows, const void* inputs, int64_t panel) {
        multiply_panel<F>(args, static_cast<const Activations*>(inputs), rows, {0, rows, panel, panel + 1}, panel);
      },
      .run = run,
  };
}

// Inputs in 8 bits. Without an instruction that sums products of bytes, those with weights of 8 bits are made of pairs of
// 16 bits: two planes of nibbles would take as many instructions.
template <typename F>
void multiply_bytes(const Linear& args, int64_t rows) {
  if constexpr (F::kBits == 4 || kHasByteProducts) {
    bytes::multiply<F>(args, rows);
  } else {
    multiply_narrow<F, 8>(args, rows);
  }
}

// The next groups of a panel of weights as bfloat16, its inputs in kPairOrder.
template <typename F>
void unpack_groups(const char*& panel, int64_t groups, bf16* out) {
  for (int64_t group = 0; group < groups; ++group, panel += F::kGroupBytes) {
    for (int64_t at = 0; at < F::kGroupBytes; at += kLineBytes) prefetch_once(panel + kAheadBytes + at);
    unroll<2>([&](auto half) {
      const int64_t at = half * kLanes;
      const vec scales = load_halves(panel + at * sizeof(uint16_t));
      vec starts = scales * splat(-F::kZero);
      if constexpr (F::kAffine) starts = starts + load_halves(panel + F::kScaleBytes + at * sizeof(uint16_t));
      const auto put = [&](int pair, vec first, vec second) {
        store_pairs(out + ((group * kGroup / 2 + pair) * kPanel + at) * 2, fma(first, scales, starts),
                    fma(second, scales, starts));
      };
      for (int word = 0; word < F::kWords; ++word) {
        const ivec words = load_ints(panel + F::kWordsAt + (word * kPanel + at) * sizeof(uint32_t));
        unroll<F::kPairs>([&](auto pair) {
          if constexpr (F::kBits == 4) {  // without masks: an index is the lowest 4 bits of a lane
            put(word * F::kPairs + pair, look_up(kCounts, shift_right<4 * pair>(words)),
                look_up(kCounts, shift_right<16 + 4 * pair>(words)));
          } else {
            const ivec integers = pair_of<F::kBits, pair>(words);
            put(word * F::kPairs + pair, to_floats(integers & splat_int(0xffff)), to_floats(shift_right<16>(integers)));
          }
        });
      }
    });
  }
}

template <typename F>
void multiply_wide(const Linear& args, int64_t rows) {
  static thread_local Scratch inputs;
  auto* x = static_cast<bf16*>(inputs.get(rows * args.in_features * sizeof(bf16)));
  for_rows(rows, kRowsPerIndex, [&](int64_t first, int64_t end) {
    make_rows(args.stages, first, end);
    const auto round = [&](const auto* from, int64_t group) { round_group<F>(from, x + group * kGroup); };
    args.dtype == kFloat32 ? for_groups<float>(args, first, end, round) : for_groups<bf16>(args, first, end, round);
  });
  const int64_t groups = args.in_features / kGroup;
  parallel_for(args.num_panels(), [&](int64_t panel) {
    const char* from = static_cast<const char*>(args.weight) + panel * groups * F::kGroupBytes;
    multiply_unpacked(args, x, args.in_features, rows, panel,
                      [&](int64_t count, bf16* to) { unpack_groups<F>(from, count, to); });
  });
}

// The product that the arguments describe.
template <typename F>
void multiply_format(const Linear& linear, const WeightForm& form, int64_t rows) {
  if (rows >= form.wide_rows) {
    if constexpr (F::kBits == 4) {
      if (form.wide_bits == 8) return wide_bytes::multiply<F>(linear, rows);
    }
    return multiply_wide<F>(linear, rows);
  }
  if (form.input_bits == 8) return multiply_bytes<F>(linear, rows);
  multiply_narrow<F, 16>(linear, rows);
}

}  // namespace

ProductSteps quantized_product(const WeightForm& form) {
  ProductSteps product;
  with_format(form.bits, form.affine, [&](auto format) {
    using F = decltype(format);
    product = narrow_product<F, 16>(multiply_format<F>);
    if (form.input_bits != 8) return;
    if constexpr (F::kBits == 4 || kHasByteProducts) {
      product = bytes::product<F>(multiply_format<F>);
    } else {
      product = narrow_product<F, 8>(multiply_format<F>);
    }
  });
  return product;
}

}  // namespace triptych

TRIPTYCH_KERNEL(quantized_linear, triptych::QuantizedLinear,
                linear.dtype, linear.out_dtype, linear.x, linear.x_stride, linear.weight, linear.bias, linear.out,
                linear.out_stride, linear.in_features, linear.out_features, linear.activation, linear.gated,
                linear.stages, linear.slots, linear.adapters, linear.num_adapters, linear.adapted,
                linear.adapter_dtype, bits, affine, input_bits, wide_rows, wide_bits) {
  using namespace triptych;
  const WeightForm form{kQuantizedWeight, 0, args.bits, args.affine, args.input_bits, args.wide_rows, args.wide_bits};
  with_adapters(args.linear, rows, [&](const Linear& linear) {
    with_format(args.bits, args.affine, [&](auto format) { multiply_format<decltype(format)>(linear, form, rows); });
  });
}
