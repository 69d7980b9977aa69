// Products with weights in the formats of published checkpoints (coded.h).
//
// A thread unpacks a chunk of a panel at a time, which stays in the first-level cache, and multiplies all rows with it:
//
//   inputs of 8 bits    the chunk as bytes and scales, inputs as byte_inputs.h has them: exact sums of integers
//   inputs of 16 bits   the same chunk, inputs as integers with a scale per row and group: exact sums as well, which the
//                       tiles of AMX make of many rows (amx_shorts.h)
//   in floats           the chunk as values in float32 and scales, and inputs in float32, which are not rounded
//   in pairs            the chunk as values in bfloat16 and scales, and inputs in bfloat16, of which none is rounded; in
//                       place of the two before, where vectors multiply such pairs (coded_pairs.h)
//
// Floats are for values that are no bytes: nf4, floats of 8 bits. Inputs of 8 bits become 16 where no instruction makes
// products of bytes, except with integers of 4 bits: others would saturate sums of 16 bits. Each output is one chain of
// float32 sums over its groups or inputs in order, for any number of rows, so a row's result does not depend on its batch.
//
// Many rows may be multiplied in bfloat16 instead, to which weights are then rounded.
#include <bit>

#include "linear/block.h"
#include "linear/coded.h"
#include "linear/coded_pairs.h"
#include "linear/product.h"
#include "linear/quantized_bytes.h"

#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)
#include "linear/amx_shorts.h"
#endif

namespace triptych {
namespace {

using coded::ByteGroup;
using coded::CodedForm;
using coded::FloatGroup;
using coded::Reader;

struct CodedLinear {
  Linear linear;  // dtype is that of x
  int64_t form;
  int64_t input_bits;  // 8 or 16
  int64_t wide_rows;   // so many rows or more are multiplied in bfloat16
};

constexpr int64_t kChunkBytes = kRegisters == 32 ? 16 << 10 : 8 << 10;  // unpacked
constexpr int kMaxByteRows = std::max(bytes::kPackedTileRows, bytes::kTileRows);
constexpr int kMaxShortRows = kRegisters == 32 ? 8 : 4;
constexpr float kLargestShort = 32767.0f;
constexpr int64_t kRowsPerIndex = 8;

// Add to sums [Rows][kPanel] the products of a tile's inputs x with some groups.
template <int Rows, int Units, bool Affine>
void multiply_byte_groups(const int32_t* x, int64_t groups, const float* weights, float* to) {
  using namespace bytes;
  using G = ByteGroup<Units, Affine>;
  vec sums[Rows][2];
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { sums[row][half] = load(to + row * kPanel + half * kLanes); }); });
  const ivec start = splat_int(kCenterBits);
  for (const float* const end = weights + groups * G::kFloats; weights < end; weights += G::kFloats, x += Rows * kRowUnits) {
    const auto of_row = [&](int part, int row) { return as_vec(splat_int(x[part * Rows + row])); };
    const auto part = [&](int index, int half) { return load(weights + (index + half) * kLanes); };
    unroll<Units>([&](auto unit) {
      constexpr int kUnitSteps = kSteps / Units;
      ivec dots[Rows][2], totals[Rows];
      const auto add_step = [&](int step, auto is_first) __attribute__((always_inline)) {
        const ivec values[2] = {load_ints(weights + 2 * step * kLanes), load_ints(weights + (2 * step + 1) * kLanes)};
        unroll<Rows>([&](auto row) __attribute__((always_inline)) {
          const ivec inputs = splat_int(x[kValues * Rows + row * kSteps + step]);
          const auto add = [&](ivec sum, ivec factor) __attribute__((always_inline)) {
            return is_first ? first_products<false>(sum, inputs, factor) : next_products(sum, inputs, factor);
          };
          unroll<2>([&](auto half) __attribute__((always_inline)) {
            dots[row][half] = add(is_first ? start : dots[row][half], values[half]);
          });
          if constexpr (Affine && Units == 2) totals[row] = add(is_first ? splat_int(0) : totals[row], splat_byte(1));
        });
      };
      add_step(unit * kUnitSteps, std::true_type());
#pragma GCC unroll 1
      for (int i = 1; i < kUnitSteps; ++i) add_step(unit * kUnitSteps + i, std::false_type());
      const vec scales[2] = {part(G::kScales + 2 * unit, 0), part(G::kScales + 2 * unit, 1)};
      unroll<Rows>([&](auto row) __attribute__((always_inline)) {
        const vec scale = of_row(kScales, row), center = of_row(kCenters, row);
        unroll<2>([&](auto half) __attribute__((always_inline)) {
          const vec dot = as_vec(dot_of(dots[row][half], start));
          sums[row][half] = fma(fma(dot, scale, center), scales[half], sums[row][half]);
        });
        if constexpr (Affine) {
          vec input_sum = of_row(kSums, row);
          if constexpr (Units == 2) {
            const vec zeros = of_row(kZeros, row) * splat(kGroup / 2);
            input_sum = fma(to_floats(dot_of(totals[row], splat_int(0))), scale, zeros);
          }
          unroll<2>([&](auto half) __attribute__((always_inline)) {
            sums[row][half] = fma(input_sum, part(G::kMinima + 2 * unit, half), sums[row][half]);
          });
        }
      });
    });
    const vec weight_sums[2] = {part(G::kSums, 0), part(G::kSums, 1)};
    unroll<Rows>([&](auto row) __attribute__((always_inline)) {
      const vec zeros = of_row(kZeros, row);
      unroll<2>([&](auto half) { sums[row][half] = fma(zeros, weight_sums[half], sums[row][half]); });
    });
  }
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { store(to + row * kPanel + half * kLanes, sums[row][half]); }); });
}

// A group of a row's inputs: values * scale, to 15 bits and a sign.
struct Shorts {
  int16_t values[kGroup];  // the middle two of each four swapped, which are then those of `even_bytes` and `odd_bytes`
  float scale;
  float sums[2];           // of the inputs of each half
  float sum;
};

// The same with inputs of 16 bits, x [groups][Rows].
template <int Rows, int Units, bool Affine>
void multiply_short_groups(const Shorts* x, int64_t groups, const float* weights, float* to) {
  using G = ByteGroup<Units, Affine>;
  vec sums[Rows][2];
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { sums[row][half] = load(to + row * kPanel + half * kLanes); }); });
  for (const float* const end = weights + groups * G::kFloats; weights < end; weights += G::kFloats, x += Rows) {
    const auto part = [&](int index, int half) { return load(weights + (index + half) * kLanes); };
    unroll<Units>([&](auto unit) {
      constexpr int kUnitSteps = bytes::kSteps / Units;
      ivec dots[Rows][2];
      unroll<Rows>([&](auto row) { dots[row][0] = dots[row][1] = splat_int(0); });
#pragma GCC unroll 1
      for (int step = unit * kUnitSteps; step < (unit + 1) * kUnitSteps; ++step) {
        const ivec values[2] = {load_ints(weights + 2 * step * kLanes), load_ints(weights + (2 * step + 1) * kLanes)};
        unroll<2>([&](auto is_odd) {
          const ivec pairs[2] = {is_odd ? odd_bytes(values[0]) : even_bytes(values[0]),
                                 is_odd ? odd_bytes(values[1]) : even_bytes(values[1])};
          unroll<Rows>([&](auto row) {
            int32_t two;
            std::memcpy(&two, x[row].values + 4 * step + 2 * is_odd, sizeof two);
            const ivec inputs = splat_int(two);
            dots[row][0] = add_dot(dots[row][0], inputs, pairs[0]);
            dots[row][1] = add_dot(dots[row][1], inputs, pairs[1]);
          });
        });
      }
      unroll<2>([&](auto half) {
        const vec scales = part(G::kScales + 2 * unit, half);
        unroll<Rows>([&](auto row) {
          vec sum = fma(to_floats(dots[row][half]) * splat(x[row].scale), scales, sums[row][half]);
          if constexpr (Affine) {
            const float input_sum = Units == 2 ? x[row].sums[unit] : x[row].sum;
            sum = fma(splat(input_sum), part(G::kMinima + 2 * unit, half), sum);
          }
          sums[row][half] = sum;
        });
      });
    });
  }
  unroll<Rows>([&](auto row) { unroll<2>([&](auto half) { store(to + row * kPanel + half * kLanes, sums[row][half]); }); });
}

// put(first input of a vector, integers), and scale and sums of `out`
template <typename X, typename Put>
void round_group(const X* x, Shorts& out, const Put& put) {
  constexpr int kVectors = kGroup / kLanes;
  vec values[kVectors];
  ivec bits = splat_int(0);
  unroll<kVectors>([&](auto i) {
    values[i] = load(x + i * kLanes);
    bits = max(bits, bits_of(abs(values[i])));  // magnitudes are ordered as their bits are, NaN above all
  });
  const float magnitude = std::bit_cast<float>(largest(bits));
  const vec inverse = splat(magnitude < kSmallestMagnitude ? 0.0f : kLargestShort / magnitude);
  ivec totals[2] = {splat_int(0), splat_int(0)};
  unroll<kVectors>([&](auto i) {
    const ivec rounded = to_ints(values[i] * inverse);
    totals[2 * i / kVectors] = totals[2 * i / kVectors] + rounded;
    put(i * kLanes, rounded);
  });
  const int32_t first = sum(totals[0]), second = sum(totals[1]);
  out.scale = magnitude / kLargestShort;
  out.sums[0] = out.scale * static_cast<float>(first);
  out.sums[1] = out.scale * static_cast<float>(second);
  out.sum = out.scale * static_cast<float>(first + second);
}

template <typename X>
void quantize_group(const X* x, Shorts& out) {
  round_group(x, out, [&](int first, ivec integers) { store_shorts_in_pairs(out.values + first, integers); });
}

// The same with values in float32 and inputs x [inputs][Rows]. Each half of a group has a sum of its own, so that these
// chains of one row need not wait for each other.
template <int Rows>
void multiply_float_groups(const float* x, int64_t groups, const float* weights, float* to) {
  constexpr int kUnitInputs = kGroup / 2;
  for (const float* const end = x + groups * kGroup * Rows; x < end; weights += FloatGroup::kFloats) {
    for (int unit = 0; unit < 2; ++unit) {
      const float* values = weights + unit * kUnitInputs * kPanel;
      vec dots[Rows][2];
      unroll<Rows>([&](auto row) { dots[row][0] = dots[row][1] = zero(); });
#pragma GCC unroll 2
      for (int input = 0; input < kUnitInputs; ++input, x += Rows, values += kPanel) {
        const vec halves[2] = {load(values), load(values + kLanes)};
        unroll<Rows>([&](auto row) {
          const vec value = splat(x[row]);
          dots[row][0] = fma(value, halves[0], dots[row][0]);
          dots[row][1] = fma(value, halves[1], dots[row][1]);
        });
      }
      const float* const scales = weights + FloatGroup::kScales + unit * kPanel;
      unroll<2>([&](auto half) {
        const vec scale = load(scales + half * kLanes);
        unroll<Rows>([&](auto row) {
          float* const sum = to + row * kPanel + half * kLanes;
          store(sum, fma(dots[row][half], scale, load(sum)));
        });
      });
    }
  }
}

// f(std::integral_constant) of the number of rows of a tile.
template <int Rows, typename F>
void with_rows(int64_t rows, const F& f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, f);
  }
  f(std::integral_constant<int, Rows>());
}

// Rows that are multiplied together, and the inputs that a tile of them reads.
struct ByteTiles {
  using Element = int32_t;
  static constexpr int kMaxRows = kMaxByteRows;
  static int64_t count(int64_t rows) { return bytes::num_tiles(rows); }
  static int64_t height(int64_t rows) {
    return rows <= bytes::kFewRows ? bytes::kPackedTileRows : bytes::kTileRows;
  }
  static int64_t row_units(const Linear& args) { return bytes::row_units(args); }
  static void prepare(const Linear& args, int64_t rows, int64_t tile, Element* to) {
    bytes::quantize_tile(args, rows, tile, to);
  }
  template <int Units, bool Affine>
  static void multiply(const Element* x, int64_t rows, int64_t groups, const float* weights, float* sums) {
    with_rows<kMaxRows>(rows, [&](auto count) { multiply_byte_groups<count, Units, Affine>(x, groups, weights, sums); });
  }
};

struct ShortTiles {
  using Element = Shorts;
  static constexpr int kMaxRows = kMaxShortRows;
  static int64_t count(int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }
  static int64_t height(int64_t) { return kMaxRows; }
  static int64_t row_units(const Linear& args) { return args.in_features / kGroup; }
  static void prepare(const Linear& args, int64_t rows, int64_t tile, Element* to) {
    const int64_t begin = rows * tile / count(rows), height = rows * (tile + 1) / count(rows) - begin;
    make_rows(args.stages, begin, begin + height);
    const int64_t groups = row_units(args);
    const auto quantize = [&](const auto* x) {
      for (int64_t row = 0; row < height; ++row, x += args.x_stride) {
        Element* const at = to + begin * groups + row;
        for (int64_t group = 0; group < groups; ++group) quantize_group(x + group * kGroup, at[group * height]);
      }
    };
    const int64_t first = begin * args.x_stride;
    args.dtype == kFloat32 ? quantize(static_cast<const float*>(args.x) + first)
                           : quantize(static_cast<const bf16*>(args.x) + first);
  }
  template <int Units, bool Affine>
  static void multiply(const Element* x, int64_t rows, int64_t groups, const float* weights, float* sums) {
    with_rows<kMaxRows>(rows, [&](auto count) { multiply_short_groups<count, Units, Affine>(x, groups, weights, sums); });
  }
};

#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)

// The same results as of ShortTiles, faster for as many rows as kMinRows.
struct AmxShortTiles {
  using Element = uint8_t;
  static constexpr int64_t kMinRows = 9;
  static int64_t count(int64_t rows) { return (rows + amx::kTileRows - 1) / amx::kTileRows; }
  static int64_t row_units(const Linear& args) { return args.in_features / kGroup * amx::kShortBytes; }
  static void prepare(const Linear& args, int64_t rows, int64_t tile, Element* to) {
    const int64_t begin = rows * tile / count(rows), height = rows * (tile + 1) / count(rows) - begin;
    make_rows(args.stages, begin, begin + height);
    const auto quantize = [&](const auto* x) {
      Element* of_group = to + begin * row_units(args);
      for (int64_t group = 0; group < args.in_features / kGroup; ++group, of_group += height * amx::kShortBytes) {
        for (int64_t row = 0; row < height; ++row) {
          Element* const high = of_group + row * amx::kShortStride;
          Shorts own;
          round_group(x + row * args.x_stride + group * kGroup, own, [&](int first, ivec integers) {
            const ivec upper = shift_right<8>(integers + splat_int(1 << 15)) + splat_int(-128);
            store_bytes(reinterpret_cast<int8_t*>(high + first), upper);
            store_input_bytes(high + kGroup + first, integers & splat_int(0xff));
          });
          const float floats[amx::kShortFloats] = {own.scale, own.sums[0], own.sums[1], own.sum};
          std::memcpy(of_group + height * amx::kShortStride + row * sizeof floats, floats, sizeof floats);
        }
      }
    };
    const int64_t first = begin * args.x_stride;
    args.dtype == kFloat32 ? quantize(static_cast<const float*>(args.x) + first)
                           : quantize(static_cast<const bf16*>(args.x) + first);
  }
  template <int Units, bool Affine>
  static void multiply(const Element* x, int64_t rows, int64_t groups, const float* weights, float* sums) {
    amx::multiply_short_tile<Units, Affine>(x, rows, groups, weights, sums);
  }
};

#endif

struct FloatTiles {
  using Element = float;
  static int64_t count(int64_t rows) { return (rows + kMaxTileRows - 1) / kMaxTileRows; }
  static int64_t height(int64_t) { return kMaxTileRows; }
  static int64_t row_units(const Linear& args) { return args.in_features; }
  static void prepare(const Linear& args, int64_t rows, int64_t tile, Element* to) {
    const int64_t begin = rows * tile / count(rows), height = rows * (tile + 1) / count(rows) - begin;
    make_rows(args.stages, begin, begin + height);
    const auto lay_out = [&](const auto* x) {
      for (int64_t row = 0; row < height; ++row, x += args.x_stride) {
        float* const at = to + begin * args.in_features + row;
        for (int64_t i = 0; i < args.in_features; ++i) at[i * height] = to_float(x[i]);
      }
    };
    const int64_t first = begin * args.x_stride;
    args.dtype == kFloat32 ? lay_out(static_cast<const float*>(args.x) + first)
                           : lay_out(static_cast<const bf16*>(args.x) + first);
  }
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

struct PairTiles {
  using Element = int32_t;
  static int64_t count(int64_t rows) { return (rows + height(rows) - 1) / height(rows); }
  static int64_t height(int64_t rows) { return rows <= coded::kLonePairRows ? coded::kLonePairRows : coded::kPairRows; }
  static int64_t row_units(const Linear& args) { return args.in_features / kGroup * coded::kPairUnits; }
  static void prepare(const Linear& args, int64_t rows, int64_t tile, Element* to) {
    const int64_t begin = rows * tile / count(rows), height = rows * (tile + 1) / count(rows) - begin;
    make_rows(args.stages, begin, begin + height);
    coded::lay_out_pairs(static_cast<const bf16*>(args.x) + begin * args.x_stride, args.x_stride, height,
                         args.in_features, to + begin * row_units(args));
  }
};

#endif

// sums: [rows][kPanel]
void finish_sums(const Linear& args, int64_t first_row, int64_t rows, int64_t panel, const float* sums) {
  for (int64_t row = 0; row < rows; ++row, sums += kPanel) {
    finish_row(args, first_row + row, panel, load(sums), load(sums + kLanes));
  }
}

// Tiles first … end - 1 of `rows` rows with a panel. unpack(reader, groups, chunk) takes the next groups, multiply(count,
// x, group, groups, chunk, sums) adds a tile of `count` rows of which x are all inputs.
template <typename Tiles, typename Unpack, typename Multiply>
void walk_panel(const Linear& args, const CodedForm& form, int64_t rows, int64_t first, int64_t end,
                const typename Tiles::Element* x, int64_t panel, int64_t chunk_groups, int64_t group_floats,
                const Unpack& unpack, const Multiply& multiply) {
  static thread_local Scratch memory;
  const int64_t groups = args.in_features / kGroup, row_units = Tiles::row_units(args), count = Tiles::count(rows);
  const auto first_row = [&](int64_t tile) { return rows * tile / count; };
  const int64_t begin_row = first_row(first), num_rows = first_row(end) - begin_row;
  auto* const chunk = static_cast<float*>(memory.get((chunk_groups * group_floats + num_rows * kPanel) * sizeof(float)));
  float* const sums = chunk + chunk_groups * group_floats;
  std::fill_n(sums, num_rows * kPanel, 0.0f);
  Reader reader(form, static_cast<const char*>(args.weight) + panel * form.panel_bytes(args.in_features));
  for (int64_t group = 0; group < groups; group += chunk_groups) {
    const int64_t now = std::min(chunk_groups, groups - group);
    unpack(reader, now, chunk);
    for (int64_t tile = first; tile < end; ++tile) {
      const int64_t row = first_row(tile), height = first_row(tile + 1) - row;
      multiply(height, x + row * row_units, group, now, chunk, sums + (row - begin_row) * kPanel);
    }
  }
  finish_sums(args, begin_row, num_rows, panel, sums);
}

// Groups of a chunk.
constexpr int64_t groups_in_chunk(int64_t group_floats) {
  return std::max<int64_t>(kChunkBytes / (group_floats * int64_t{sizeof(float)}), 1);
}

template <typename Tiles, int Units, bool Affine>
void multiply_integers(const Linear& args, const CodedForm& form, int64_t rows, int64_t first, int64_t end,
                       const typename Tiles::Element* x, int64_t panel) {
  constexpr int64_t kFloats = ByteGroup<Units, Affine>::kFloats;
  const int64_t group_units = Tiles::row_units(args) / (args.in_features / kGroup);
  coded::with_codes(form, [&](auto codes) {
    walk_panel<Tiles>(
        args, form, rows, first, end, x, panel, groups_in_chunk(kFloats), kFloats,
        coded::unpack_bytes<Units, Affine, decltype(codes)>,
        [&](int64_t height, const auto* inputs, int64_t group, int64_t groups, const float* weights, float* sums) {
          Tiles::template multiply<Units, Affine>(inputs + group * group_units * height, height, groups, weights, sums);
        });
  });
}

template <typename Tiles>
void multiply_panel(Tiles, const Linear& args, const CodedForm& form, int64_t rows, int64_t first, int64_t end,
                    const typename Tiles::Element* x, int64_t panel) {
  const bool is_affine = form.is_affine();
  const auto multiply = form.num_scales == 2
                            ? (is_affine ? multiply_integers<Tiles, 2, true> : multiply_integers<Tiles, 2, false>)
                            : (is_affine ? multiply_integers<Tiles, 1, true> : multiply_integers<Tiles, 1, false>);
  multiply(args, form, rows, first, end, x, panel);
}

void multiply_panel(FloatTiles, const Linear& args, const CodedForm& form, int64_t rows, int64_t first, int64_t end,
                    const float* x, int64_t panel) {
  walk_panel<FloatTiles>(
      args, form, rows, first, end, x, panel, groups_in_chunk(FloatGroup::kFloats), FloatGroup::kFloats,
      coded::unpack_values,
      [](int64_t height, const float* inputs, int64_t group, int64_t groups, const float* weights, float* sums) {
        with_rows<kMaxTileRows>(height, [&](auto count) {
          multiply_float_groups<count>(inputs + group * kGroup * height, groups, weights, sums);
        });
      });
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

void multiply_panel(PairTiles, const Linear& args, const CodedForm& form, int64_t rows, int64_t first, int64_t end,
                    const int32_t* x, int64_t panel) {
  using coded::PairGroup;
  const coded::PairUnits units(form, args.in_features);
  const int64_t size = args.in_features, count = PairTiles::count(rows);
  const auto sums_of = [&](const int32_t* inputs, int64_t height) {
    return reinterpret_cast<const float*>(inputs + size / 2 * height);
  };
  coded::with_pairs(form, [&](auto codes, const auto& value) {
    using Codes = decltype(codes);
    using Value = std::decay_t<decltype(value)>;
    if (rows <= Value::kDirectRows) {
      for (int64_t tile = first; tile < end; ++tile) {
        const int64_t row = rows * tile / count, height = rows * (tile + 1) / count - row;
        const int32_t* const inputs = x + row * PairTiles::row_units(args);
        float sums[coded::kLonePairRows * kPanel];
        Reader reader(form, static_cast<const char*>(args.weight) + panel * form.panel_bytes(size));
        with_rows<coded::kLonePairRows>(height, [&](auto rows) {
          coded::multiply_pairs_directly<rows, Codes>(reader, value, units, inputs, sums_of(inputs, rows), size / kGroup,
                                                      sums);
        });
        finish_sums(args, row, height, panel, sums);
      }
      return;
    }
    walk_panel<PairTiles>(
        args, form, rows, first, end, x, panel, coded::kChunkGroups, PairGroup::kFloats,
        [&](Reader& reader, int64_t groups, float* chunk) {
          coded::unpack_pair_values<Codes>(reader, value, units, groups, chunk);
        },
        [&](int64_t height, const int32_t* inputs, int64_t group, int64_t groups, const float* weights, float* sums) {
          with_rows<coded::kPairRows>(height, [&](auto count) {
            coded::multiply_pair_groups<count>(inputs + group * coded::kGroupPairs * height,
                                               sums_of(inputs, height) + group * coded::kPairSums * height, units,
                                               groups, weights, sums);
          });
        });
  });
}

#endif

template <typename Tiles>
void multiply_all(const Linear& args, const CodedForm& form, int64_t rows) {
  using Element = typename Tiles::Element;
  static thread_local Scratch scratch;
  auto* const x = static_cast<Element*>(scratch.get(rows * Tiles::row_units(args) * sizeof(Element)));
  const int64_t tiles = Tiles::count(rows), panels = args.num_panels();
  parallel_for(tiles, [&](int64_t tile) { Tiles::prepare(args, rows, tile, x); });
  // All rows walk a panel, which is unpacked once; in blocks only if there are few panels to share out.
  constexpr int64_t kItemsPerThread = 4, kMinTiles = 8;
  const int64_t max_blocks = (kItemsPerThread * num_threads() + panels - 1) / panels;
  const int64_t blocks = std::clamp<int64_t>(tiles / kMinTiles, 1, max_blocks);
  const auto multiply = [&](int64_t index) {
    const int64_t block = index / panels;
    multiply_panel(Tiles(), args, form, rows, tiles * block / blocks, tiles * (block + 1) / blocks, x, index % panels);
  };
  rows <= kFewRows ? parallel_for_parts(panels, multiply) : parallel_for(blocks * panels, multiply);
}

void multiply_wide(const Linear& args, const CodedForm& form, int64_t rows) {
  static thread_local Scratch inputs;
  const auto* x = static_cast<const bf16*>(args.x);
  int64_t stride = args.x_stride;
  if (args.dtype == kFloat32) {
    stride = args.in_features;
    auto* const rounded = static_cast<bf16*>(inputs.get(rows * stride * sizeof(bf16)));
    for_rows(rows, kRowsPerIndex, [&](int64_t first, int64_t end) {
      make_rows(args.stages, first, end);
      for (int64_t row = first; row < end; ++row) {
        const float* const from = static_cast<const float*>(args.x) + row * args.x_stride;
        for (int64_t i = 0; i < stride; i += kLanes) store(rounded + row * stride + i, load(from + i));
      }
    });
    x = rounded;
  } else {
    make_all_rows(args.stages);
  }
  parallel_for(args.num_panels(), [&](int64_t panel) {
    Reader reader(form, static_cast<const char*>(args.weight) + panel * form.panel_bytes(args.in_features));
    multiply_unpacked(args, x, stride, rows, panel,
                      [&](int64_t groups, bf16* to) { coded::unpack_pairs(reader, groups, to); });
  });
}

// f(Tiles) of the arithmetic of few rows, of inputs of this dtype.
template <typename F>
void with_tiles(const CodedForm& form, [[maybe_unused]] int64_t dtype, int64_t input_bits, const F& f) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  const bool is_rounded = input_bits == 8 && form.has_bytes();
  if (dtype == kBfloat16 && form.has_pairs() && !is_rounded) return f(PairTiles());
#endif
  if (!form.has_bytes()) return f(FloatTiles());
  input_bits == 8 && form.has_byte_products() ? f(ByteTiles()) : f(ShortTiles());
}

void multiply_form(const Linear& args, const WeightForm& held, int64_t rows) {
  const CodedForm form(held.form);
  if (rows >= held.wide_rows) return multiply_wide(args, form, rows);
  with_tiles(form, args.dtype, held.input_bits, [&](auto tiles) {
    using Tiles = decltype(tiles);
#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)
    if constexpr (std::is_same_v<Tiles, ShortTiles>) {
      if (rows >= AmxShortTiles::kMinRows) return multiply_all<AmxShortTiles>(args, form, rows);
    }
#endif
    multiply_all<Tiles>(args, form, rows);
  });
}

// The steps of such a product.
template <typename Tiles>
ProductSteps steps() {
  using Element = typename Tiles::Element;
  return {
      .tile_height = Tiles::height,
      .input_bytes = [](const Linear& args, int64_t rows) -> int64_t {
        return rows * Tiles::row_units(args) * sizeof(Element);
      },
      .prepare = [](const Linear& args, int64_t rows, int64_t tile, void* inputs) {
        Tiles::prepare(args, rows, tile, static_cast<Element*>(inputs));
      },
      .multiply = [](const Linear& args, const WeightForm& form, int64_t rows, const void* inputs, int64_t panel) {
        const auto* const x = static_cast<const Element*>(inputs);
        multiply_panel(Tiles(), args, CodedForm(form.form), rows, 0, Tiles::count(rows), x, panel);
      },
      .run = multiply_form,
  };
}

}  // namespace

ProductSteps coded_product(const Linear& args, const WeightForm& form) {
  ProductSteps product;
  with_tiles(CodedForm(form.form), args.dtype, form.input_bits, [&](auto tiles) { product = steps<decltype(tiles)>(); });
  return product;
}

}  // namespace triptych

TRIPTYCH_KERNEL(coded_linear, triptych::CodedLinear,
                linear.dtype, linear.out_dtype, linear.x, linear.x_stride, linear.weight, linear.bias, linear.out,
                linear.out_stride, linear.in_features, linear.out_features, linear.activation, linear.gated,
                linear.stages, linear.slots, linear.adapters, linear.num_adapters, linear.adapted,
                linear.adapter_dtype, form, input_bits, wide_rows) {
  using namespace triptych;
  const WeightForm form{kCodedWeight, args.form, 0, 0, args.input_bits, args.wide_rows, 16};
  with_adapters(args.linear, rows, [&](const Linear& linear) { multiply_form(linear, form, rows); });
}
