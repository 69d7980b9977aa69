// Products of packed 4- and 8-bit weights with inputs rounded to 8-bit integers, with a scale and a zero point per row
// and group: input = scale * (integer - zero). The zero point matters: groups lean to one side, and without it the
// error is nearly twice as large.
//
// An instruction multiplies four unsigned bytes of a weight by four signed bytes of inputs. A tile's rows lie
// interleaved, so that one address reaches them all:
//
//   [tiles][groups] of
//     starts   [rows] int32        kCenterBits - zero of the weight * (sum of the group's integers - 32 * zero)
//     zeros    [rows] int32        -zero, in 16 bits
//     scales   [rows] float        value of a unit
//     centers  [rows] float        -kCenter * scale, exactly
//     sums     [rows] float        of the group's inputs
//     values   [rows][32] int8     the integers, in order
//
// A group's sum of products begins with `start`, takes -zero times the sum of the weight's integers, and is smaller
// than 2^22, so its bits are those of the float kCenter + sum: one fma makes sum * scale of it, rounded once. Inputs
// beyond 2^111 count as infinite.
#pragma once

#include <bit>
#include <limits>

#include "linear/block.h"
#include "linear/quantized.h"

namespace triptych::bytes {

constexpr int kSteps = kGroup / 4;
constexpr float kLevels = 254.0f;  // between the smallest and the largest input; both round up at times, to 255
constexpr int32_t kLowest = -128;
constexpr float kCenter = 12582912.0f;  // 1.5 * 2^23, with units of 1
constexpr int32_t kCenterBits = 0x4b400000;
static_assert(kGroup * 128 * 255 < 1 << 22 && kGroup * 15 * 255 < 1 << 22);

// Where the parts of a group begin, in units of 4 bytes and of the tile's rows.
enum Part { kStarts, kZeros, kScales, kCenters, kSums, kValues };
constexpr int64_t kRowUnits = kValues + kSteps;

constexpr int64_t kFewRows = 16;  // so many or fewer read packed weights, more read unpacked ones
constexpr int kTileRows = kRegisters == 32 ? 6 : 2;        // 24 sums, two weights, a mask and an input in 32 registers
constexpr int kPackedTileRows = kRegisters == 32 ? 8 : 2;  // each tile unpacks the weights, which costs more than spills
constexpr uint32_t kAllLanes = (1u << kLanes) - 1;

inline int64_t num_tiles(int64_t rows) {
  const int64_t height = rows <= kFewRows ? kPackedTileRows : kTileRows;
  return (rows + height - 1) / height;
}
inline int64_t first_row(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }

// Lane i of the result is the lanes of a[i], combined by f.
template <typename F>
vec fold(vec (&a)[kLanes], const F& f) {
  transpose(a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] = f(a[i], a[i + half]);
  }
  return a[0];
}

// The range of inputs that are not all finite: infinite, or NaN if there is one.
template <typename X>
float flawed_range(const X* x) {
  float range = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float value = std::fabs(to_float(x[i]));
    if (!(value <= range)) range = value;
    if (std::isnan(range)) break;
  }
  return range;
}

// As many groups as a vector has lanes, since reductions and divisions then cost as much as of one: x[i] becomes row
// rows[i] of the group at to[i], where there are `height` rows.
template <typename F, typename X>
void quantize_groups(const X* const (&x)[kLanes], const int64_t (&rows)[kLanes], int32_t* const (&to)[kLanes],
                     int64_t height) {
  constexpr int kVectors = kGroup / kLanes;
  vec smallest[kLanes], largest_values[kLanes];
  uint32_t flawed = 0;
  for (int i = 0; i < kLanes; ++i) {
    smallest[i] = largest_values[i] = zero();
    uint32_t finite = ~0u;
    unroll<kVectors>([&](auto j) {
      const vec values = load(x[i] + j * kLanes);
      finite &= greater(splat(std::numeric_limits<float>::infinity()), abs(values));
      smallest[i] = min(smallest[i], values);
      largest_values[i] = max(largest_values[i], values);
    });
    if (finite != kAllLanes) flawed |= 1u << i;
  }
  const vec low = fold(smallest, [](vec a, vec b) { return min(a, b); });
  vec range = fold(largest_values, [](vec a, vec b) { return max(a, b); }) - low;
  if (flawed != 0) {
    float ranges[kLanes];
    store(ranges, range);
    for (int i = 0; i < kLanes; ++i) {
      if (flawed >> i & 1) ranges[i] = flawed_range(x[i]);
    }
    range = load(ranges);
  }
  const uint32_t counts = at_least(range, splat(kSmallestMagnitude)) | unordered(range, range);
  const vec inverse = only(counts, splat(kLevels) / range);
  const ivec shift = to_ints((zero() - low) * inverse) + splat_int(kLowest);
  float inverses[kLanes], scales[kLanes];
  int32_t shifts[kLanes];
  store(inverses, inverse);
  store(scales, range / splat(kLevels));
  store(reinterpret_cast<float*>(shifts), as_vec(shift));

  vec integers[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    auto* const bytes = reinterpret_cast<int8_t*>(to[i] + kValues * height + rows[i] * kSteps);
    ivec sum = splat_int(0);
    unroll<kVectors>([&](auto j) {
      const ivec rounded = to_ints(load(x[i] + j * kLanes) * splat(inverses[i])) + splat_int(shifts[i]);
      sum = sum + rounded;
      store_bytes(bytes + j * kLanes, rounded);
    });
    integers[i] = to_floats(sum);
  }
  float totals[kLanes];
  store(totals, sums(integers));
  for (int i = 0; i < kLanes; ++i) {
    const int32_t total = static_cast<int32_t>(totals[i]) - kGroup * shifts[i];
    // without its last two bits, so that its product with kCenter = 3 * 2^22 is exact
    const float scale = std::bit_cast<float>(std::bit_cast<int32_t>(scales[i]) & ~3);
    int32_t* const at = to[i] + rows[i];
    const auto put = [&](int64_t part, auto value) { std::memcpy(at + part * height, &value, sizeof value); };
    put(kStarts, kCenterBits - F::kZero * total);
    put(kZeros, -shifts[i] & 0xffff);
    put(kScales, scale);
    put(kCenters, -kCenter * scale);
    put(kSums, scale * static_cast<float>(total));
  }
}

// A panel as it is packed.
template <typename F>
struct Packed {
  static constexpr int kParts = 8 / F::kBits;  // of a word
  static constexpr int kWords = F::kWords;
  const char* at;

  void next() {
    prefetch_once<F::kGroupBytes>(at + kAheadBytes);
    at += F::kGroupBytes;
  }
  template <int Part>
  ivec weights(int word, int half) const {
    const char* words = at + F::kWordsAt + (word * kPanel + half * kLanes) * sizeof(uint32_t);
    const ivec bytes = load_ints(words);
    if constexpr (F::kBits == 8) return bytes;
    return shift_right<4 * Part>(bytes) & splat_int(0x0f0f0f0f);
  }
  vec scales(int half) const { return load_halves(at + half * kLanes * sizeof(uint16_t)); }
  vec minima(int half) const { return load_halves(at + F::kScaleBytes + half * kLanes * sizeof(uint16_t)); }
  // the sums of the group's integers
  ivec totals(int half) const {
    ivec total = splat_int(0);
    for (int word = 0; word < kWords; ++word) {
      unroll<kParts>([&](auto part) {
        total = add_byte_dot<F::kBits>(total, weights<part>(word, half), splat_int(0x01010101));
      });
    }
    return total;
  }
};

// A panel with a byte for each weight, sums of them, and scales in float32.
template <typename F>
struct Unpacked {
  static constexpr int kParts = Packed<F>::kParts;
  static constexpr int kWords = F::kWords;
  static constexpr int kFirstVectors = F::kAffine ? 6 : 4;  // scales, sums, minima
  static constexpr int64_t kGroupFloats = (kFirstVectors + 2 * kSteps) * kLanes;
  float* at;

  void next() { at += kGroupFloats; }
  template <int Part>
  float* place(int word, int half) const {
    return at + (kFirstVectors + 2 * (Part * kWords + word) + half) * kLanes;
  }
  template <int Part>
  ivec weights(int word, int half) const {
    return load_ints(place<Part>(word, half));
  }
  vec scales(int half) const { return load(at + half * kLanes); }
  ivec totals(int half) const { return load_ints(at + (2 + half) * kLanes); }
  vec minima(int half) const { return load(at + (4 + half) * kLanes); }
};

template <typename F>
void unpack(Packed<F> from, int64_t groups, Unpacked<F> to) {
  for (int64_t group = 0; group < groups; ++group, from.next(), to.next()) {
    unroll<2>([&](auto half) {
      ivec totals = splat_int(0);
      unroll<F::kWords>([&](auto word) {
        unroll<Packed<F>::kParts>([&](auto part) {
          const ivec weights = from.template weights<part>(word, half);
          totals = add_byte_dot<F::kBits>(totals, weights, splat_int(0x01010101));
          store(to.template place<part>(word, half), as_vec(weights));
        });
      });
      store(to.at + half * kLanes, from.scales(half));
      store(to.at + (2 + half) * kLanes, as_vec(totals));
      if constexpr (F::kAffine) store(to.at + (4 + half) * kLanes, from.minima(half));
    });
  }
}

// out[row][half] = row of the tile . panel. Each output is one chain of float32 sums over its groups in order.
template <typename F, int Rows, typename Panel>
void multiply(const int32_t* x, int64_t groups, Panel panel, vec (&out)[Rows][2]) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  for (const int32_t* const end = x + groups * Rows * kRowUnits; x < end; x += Rows * kRowUnits, panel.next()) {
    const auto splat_float = [&](int part, int row) { return as_vec(splat_int(x[part * Rows + row])); };
    ivec dots[Rows][2];
    unroll<Rows>([&](auto row) { dots[row][0] = dots[row][1] = splat_int(x[kStarts * Rows + row]); });
#pragma GCC unroll 1
    for (int word = 0; word < Panel::kWords; ++word) {
      unroll<Panel::kParts>([&](auto part) {
        const ivec weights[2] = {panel.template weights<part>(word, 0), panel.template weights<part>(word, 1)};
        unroll<Rows>([&](auto row) {
          const ivec inputs = splat_int(x[kValues * Rows + row * kSteps + part * Panel::kWords + word]);
          dots[row][0] = add_byte_dot<F::kBits>(dots[row][0], weights[0], inputs);
          dots[row][1] = add_byte_dot<F::kBits>(dots[row][1], weights[1], inputs);
        });
      });
    }
    const ivec totals[2] = {panel.totals(0), panel.totals(1)};
    const vec scales[2] = {panel.scales(0), panel.scales(1)};
    vec minima[2];
    if constexpr (F::kAffine) {
      minima[0] = panel.minima(0);
      minima[1] = panel.minima(1);
    }
    unroll<Rows>([&](auto row) {
      const vec scale = splat_float(kScales, row), center = splat_float(kCenters, row);
      if constexpr (F::kAffine) {
        const vec sum = splat_float(kSums, row);
        unroll<2>([&](auto half) { sums[row][half] = fma(sum, minima[half], sums[row][half]); });
      }
      const ivec zero_point = splat_int(x[kZeros * Rows + row]);
      unroll<2>([&](auto half) {
        const vec dot = as_vec(add_dot(dots[row][half], zero_point, totals[half]));
        sums[row][half] = fma(fma(dot, scale, center), scales[half], sums[row][half]);
      });
    });
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

// The tile of `rows` rows, by the template made for that number.
template <typename F, typename Panel, int Rows = std::is_same_v<Panel, Packed<F>> ? kPackedTileRows : kTileRows>
void multiply_rows(const Linear& args, const int32_t* x, int64_t row, int64_t rows, Panel weights, int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<F, Panel, Rows - 1>(args, x, row, rows, weights, panel);
  }
  vec sums[Rows][2];
  multiply<F, Rows>(x, args.in_features / kGroup, weights, sums);
  for (int i = 0; i < Rows; ++i) finish_row(args, row + i, panel, sums[i][0], sums[i][1]);
}

// All rows in bytes.
template <typename F, typename X>
void quantize(const Linear& args, int64_t rows, int32_t* to) {
  const int64_t groups = args.in_features / kGroup;
  parallel_for(num_tiles(rows), [&](int64_t tile) {
    const int64_t begin = first_row(tile, rows), height = first_row(tile + 1, rows) - begin, count = height * groups;
    for (int64_t first = 0; first < count; first += kLanes) {
      const X* x[kLanes];
      int64_t row_of[kLanes];
      int32_t* places[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t at = std::min(first + i, count - 1), row = at / groups, group = at % groups;
        x[i] = static_cast<const X*>(args.x) + (begin + row) * args.x_stride + group * kGroup;
        row_of[i] = row;
        places[i] = to + (begin * groups + group * height) * kRowUnits;
      }
      quantize_groups<F>(x, row_of, places, height);
    }
  });
}

// Ask for part `part` of `parts` of these bytes.
inline void prefetch_part(const char* from, int64_t bytes, int64_t part, int64_t parts) {
  const int64_t lines = bytes / 64;
  for (int64_t line = lines * part / parts; line < lines * (part + 1) / parts; ++line) prefetch_line(from + 64 * line);
}

template <typename F>
void multiply(const Linear& args, int64_t rows) {
  static thread_local Scratch scratch;
  const int64_t groups = args.in_features / kGroup, row_units = groups * kRowUnits;
  auto* x = static_cast<int32_t*>(scratch.get(rows * row_units * sizeof(int32_t)));
  args.dtype == kFloat32 ? quantize<F, float>(args, rows, x) : quantize<F, bf16>(args, rows, x);

  const auto packed = [&](int64_t panel) {
    return Packed<F>{static_cast<const char*>(args.weight) + panel * groups * F::kGroupBytes};
  };
  const auto multiply_tiles = [&](int64_t begin, int64_t end, auto weights, int64_t panel) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = first_row(tile, rows);
      multiply_rows<F>(args, x + row * row_units, row, first_row(tile + 1, rows) - row, weights, panel);
    }
  };
  const int64_t tiles = num_tiles(rows), panels = args.num_panels();
  if (rows <= kFewRows) {
    const int64_t row_bytes = row_units * sizeof(int32_t), panel_bytes = groups * F::kGroupBytes;
    return for_blocks(rows, row_bytes, panels, panel_bytes, kBlockRows<float>, [&](const Block& block) {
      for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) {
        multiply_tiles(0, tiles, packed(panel), panel);
      }
    });
  }
  // blocks of tiles that stay in the second-level cache
  constexpr int64_t kBlockBytes = 256 << 10, kMinTiles = 8;
  const int64_t tile_bytes = kTileRows * row_units * sizeof(int32_t);
  const int64_t max_block = std::max(kBlockBytes / tile_bytes, kMinTiles);
  const int64_t blocks = (tiles + max_block - 1) / max_block;
  const int64_t panel_bytes = groups * F::kGroupBytes;
  parallel_for(blocks * panels, [&](int64_t index) {
    static thread_local Scratch memory;
    const int64_t block = index / panels, panel = index % panels;
    const Unpacked<F> weights{static_cast<float*>(memory.get(groups * Unpacked<F>::kGroupFloats * sizeof(float)))};
    unpack(packed(panel), groups, weights);
    // meanwhile the panel that this thread is likely to take next comes from memory
    const int64_t first = tiles * block / blocks, end = tiles * (block + 1) / blocks, next = panel + num_threads();
    for (int64_t tile = first; tile < end; ++tile) {
      if (next < panels) prefetch_part(packed(next).at, panel_bytes, tile - first, end - first);
      multiply_tiles(tile, tile + 1, weights, panel);
    }
  });
}

}  // namespace triptych::bytes
