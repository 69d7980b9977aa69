// Products of many rows with packed 4-bit weights, in bytes: inputs are rounded to 8 bits, weights stay what they are.
//
// Single channels are far larger than their neighbours, so that a scale per group of inputs is coarse. Therefore the
// Hadamard matrix H first turns sixteen inputs at a time, which spreads each channel over all of them, and the weights
// are turned as well:
//
//   x . w = (H x) . (H w) / 16        since H H = 16
//
// Integers of 4 bits, turned, are sums of sixteen of them with signs, exact in 8 bits once 8 is taken off:
//
//   w = d * (q - 8) + (m + 8 d)        each H (q - 8) is within -128 … 120
//
// Turned inputs lean to no side, so they need no zero point, and a group of 32 inputs takes 8 products of bytes and 3
// instructions. A panel is unpacked once for all rows of a block:
//
//   [groups] of
//     values   [8][kPanel] words     the turned integers, 4 signed bytes per word
//     starts   [kPanel] int32        kCenterBits - 128 * (sum of the integers): 128 was added to the inputs
//     scales   [kPanel] float        d / 16
//     bases    [kPanel] float        -kCenter * d / 16, exactly, as d was stored in 16 bits
//     minima   [kPanel] float        m + 8 d, only of affine weights
//
// A group's sum of products begins with `start` and is smaller than 2^22, so its bits are those of the float
// kCenter + sum: one fma makes sum * d / 16 of it, rounded once. Each output is one chain of float32 sums over its
// groups in order, for any number of rows, so a row's result does not depend on its batch.
#pragma once

#include <bit>

#include "linear/block.h"
#include "linear/quantized.h"

namespace triptych::wide_bytes {

constexpr int kTurned = 16;              // inputs that H turns together
constexpr int kSpan = kTurned * kLanes;  // inputs of a row that are rounded together
constexpr int kWords = kGroup / 4;
constexpr float kLevels = 127.0f;
constexpr float kOffset = 128.0f;       // added to inputs, which then have no sign
constexpr float kCenter = 12582912.0f;  // 1.5 * 2^23, with units of 1
constexpr int32_t kCenterBits = 0x4b400000;
static_assert(kGroup * 127 * 128 < 1 << 22);

// A row's part of a span: lane i of each vector belongs to the i-th sixteen inputs.
//
//   values  [4][kLanes] words     the turned inputs, 4 bytes per word
//   scales  [kLanes] float        value of a unit, equal within a group
//   sums    [kLanes] float        of a group's inputs, in its first lane
enum Part { kValues = 0, kScales = 4 * kLanes, kSums = 5 * kLanes, kRowUnits = 6 * kLanes };

constexpr int kTileRows = kRegisters == 32 ? 6 : 2;  // 12 sums of integers and 12 of floats in 32 registers

inline int64_t num_spans(int64_t in_features) { return (in_features + kSpan - 1) / kSpan; }
inline int64_t num_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
inline int64_t first_row(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }

// One row's inputs x of a span, `count` sixteens of them.
template <typename X>
void quantize_span(const X* x, int64_t count, int32_t* to) {
  vec values[kTurned];
  unroll<kTurned / kLanes>([&](auto part) {
    vec square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = i < count ? load(x + i * kTurned + part * kLanes) : zero();
    transpose(square);
    unroll<kLanes>([&](auto i) { values[part * kLanes + i] = square[i]; });
  });
  unroll<4>([&](auto stage) {
    constexpr int kStride = kTurned >> (stage + 1);
    unroll<kTurned>([&](auto i) {
      if constexpr ((i & kStride) == 0) {
        const vec low = values[i], high = values[i + kStride];
        values[i] = low + high;
        values[i + kStride] = low - high;
      }
    });
  });
  ivec bits = splat_int(0);
  unroll<kTurned>([&](auto i) { bits = max(bits, bits_of(abs(values[i]))); });  // ordered as floats are, NaN above all
  int32_t magnitudes[kLanes];
  float sums[kLanes];
  store(reinterpret_cast<float*>(magnitudes), as_vec(bits));
  store(sums, values[0]);
  for (int i = 0; i < kLanes; i += 2) {
    magnitudes[i] = magnitudes[i + 1] = std::max(magnitudes[i], magnitudes[i + 1]);
    sums[i] += sums[i + 1];
  }
  const vec magnitude = load(reinterpret_cast<const float*>(magnitudes));
  const uint32_t counts = at_least(magnitude, splat(kSmallestMagnitude)) | unordered(magnitude, magnitude);
  const vec inverse = only(counts, splat(kLevels) / magnitude);
  unroll<4>([&](auto word) {
    const auto byte = [&](int i) { return to_ints(fma(values[4 * word + i], inverse, splat(kOffset))); };
    const ivec low = byte(0) + shift_left<8>(byte(1)), high = byte(2) + shift_left<8>(byte(3));
    store(reinterpret_cast<float*>(to + kValues + word * kLanes), as_vec(low + shift_left<16>(high)));
  });
  store(reinterpret_cast<float*>(to + kScales), magnitude * splat(1.0f / kLevels));
  std::memcpy(to + kSums, sums, sizeof sums);
}

// [tiles][spans][rows of the tile][kRowUnits]
template <typename X>
void quantize(const Linear& args, int64_t rows, int32_t* to) {
  const int64_t spans = num_spans(args.in_features);
  parallel_for(num_tiles(rows), [&](int64_t tile) {
    const int64_t begin = first_row(tile, rows), height = first_row(tile + 1, rows) - begin;
    make_rows(args.stages, begin, begin + height);
    for (int64_t row = 0; row < height; ++row) {
      const X* x = static_cast<const X*>(args.x) + (begin + row) * args.x_stride;
      for (int64_t span = 0; span < spans; ++span) {
        const int64_t count = std::min<int64_t>(args.in_features - span * kSpan, kSpan) / kTurned;
        quantize_span(x + span * kSpan, count, to + (begin * spans + span * height + row) * kRowUnits);
      }
    }
  });
}

// Where the parts of a group begin in a panel, in vectors.
template <bool Affine>
struct Unpacked {
  static constexpr int kStarts = 2 * kWords;
  static constexpr int kScales = kStarts + 2;
  static constexpr int kBases = kScales + 2;
  static constexpr int kMinima = kBases + 2;
  static constexpr int64_t kGroupFloats = (kMinima + (Affine ? 2 : 0)) * kLanes;
};

// Word of 4 bytes (a, b, c, d) -> (a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d).
inline ivec turn_bytes(ivec x) {
  const ivec even = x & splat_int(0x00ff00ff), low_bytes = even + shift_left<8>(even);
  x = subtract_bytes(add_bytes(low_bytes, shift_halves_right<8>(x)), x & splat_int(0xff00ff00));
  const ivec low = x & splat_int(0xffff);
  return subtract_bytes(add_bytes(low + shift_left<16>(low), shift_right<16>(x)), x & splat_int(0xffff0000));
}

// Half of a group: its first or its last 16 inputs, which are the low or the high nibbles of its words.
template <int Shift>
void turn_nibbles(const char* words, ivec (&out)[4]) {
  ivec a[4];
  unroll<4>([&](auto i) {
    a[i] = shift_right<Shift>(load_ints(words + i * kPanel * sizeof(uint32_t))) & splat_int(0x0f0f0f0f);
  });
  const ivec sums[2] = {add_bytes(a[0], a[2]), add_bytes(a[1], a[3])};
  const ivec differences[2] = {subtract_bytes(a[0], a[2]), subtract_bytes(a[1], a[3])};
  out[0] = subtract_bytes(turn_bytes(add_bytes(sums[0], sums[1])), splat_int(8 * kTurned));  // of the first byte
  out[1] = turn_bytes(subtract_bytes(sums[0], sums[1]));
  out[2] = turn_bytes(add_bytes(differences[0], differences[1]));
  out[3] = turn_bytes(subtract_bytes(differences[0], differences[1]));
}

template <typename F>
void unpack_panel(const char* from, int64_t groups, float* to) {
  using U = Unpacked<F::kAffine>;
  for (const char* const end = from + groups * F::kGroupBytes; from < end; from += F::kGroupBytes, to += U::kGroupFloats) {
    unroll<2>([&](auto half) {
      const auto put = [&](int part, vec value) { store(to + (part + half) * kLanes, value); };
      ivec total = splat_int(0);
      unroll<2>([&](auto nibble) {
        ivec words[4];
        turn_nibbles<4 * nibble>(from + F::kWordsAt + half * kLanes * sizeof(uint32_t), words);
        unroll<4>([&](auto i) {
          total = add_byte_dot(total, splat_int(0x80808080), words[i]);
          put(2 * (4 * nibble + i), as_vec(words[i]));
        });
      });
      const vec scales = load_halves(from + half * kLanes * sizeof(uint16_t)) * splat(1.0f / kTurned);
      put(U::kStarts, as_vec(to_ints(zero() - to_floats(total)) + splat_int(kCenterBits)));
      put(U::kScales, scales);
      put(U::kBases, scales * splat(-kCenter));
      if constexpr (F::kAffine) {
        const vec minima = load_halves(from + F::kScaleBytes + half * kLanes * sizeof(uint16_t));
        put(U::kMinima, fma(scales, splat(8.0f * kTurned), minima));
      }
    });
  }
}

// out[row][half] = row of the tile . panel
template <bool Affine, int Rows>
void multiply(const int32_t* x, int64_t groups, const float* panel, vec (&out)[Rows][2]) {
  using U = Unpacked<Affine>;
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  const auto part = [&](int index, int half) { return load(panel + (index + half) * kLanes); };
  for (int64_t group = 0; group < groups;) {
    const int64_t end = std::min<int64_t>(group + kLanes / 2, groups);
#pragma GCC unroll 1
    for (const int32_t* inputs = x; group < end; ++group, inputs += 2, panel += U::kGroupFloats) {
      const auto of_row = [&](int index, int row) { return as_vec(splat_int(inputs[row * kRowUnits + index])); };
      ivec dots[Rows][2];
      unroll<2>([&](auto half) {
        const ivec start = load_ints(panel + (U::kStarts + half) * kLanes);
        unroll<Rows>([&](auto row) { dots[row][half] = start; });
      });
      unroll<kWords>([&](auto word) {
        const ivec weights[2] = {load_ints(panel + 2 * word * kLanes), load_ints(panel + (2 * word + 1) * kLanes)};
        unroll<Rows>([&](auto row) {
          const ivec value = splat_int(inputs[row * kRowUnits + word % 4 * kLanes + word / 4]);
          dots[row][0] = add_byte_dot(dots[row][0], value, weights[0]);
          dots[row][1] = add_byte_dot(dots[row][1], value, weights[1]);
        });
      });
      if constexpr (Affine) {
        const vec minima[2] = {part(U::kMinima, 0), part(U::kMinima, 1)};
        unroll<Rows>([&](auto row) {
          const vec sum = of_row(kSums, row);
          unroll<2>([&](auto half) { sums[row][half] = fma(sum, minima[half], sums[row][half]); });
        });
      }
      const vec scales[2] = {part(U::kScales, 0), part(U::kScales, 1)};
      const vec bases[2] = {part(U::kBases, 0), part(U::kBases, 1)};
      unroll<Rows>([&](auto row) {
        const vec scale = of_row(kScales, row);
        unroll<2>([&](auto half) {
          sums[row][half] = fma(fma(as_vec(dots[row][half]), scales[half], bases[half]), scale, sums[row][half]);
        });
      });
    }
    x += Rows * kRowUnits;
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

// The tile of `rows` rows, by the template made for that number.
template <bool Affine, int Rows = kTileRows>
void multiply_rows(const Linear& args, const int32_t* x, int64_t row, int64_t rows, const float* weights,
                   int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<Affine, Rows - 1>(args, x, row, rows, weights, panel);
  }
  vec sums[Rows][2];
  multiply<Affine, Rows>(x, args.in_features / kGroup, weights, sums);
  for (int i = 0; i < Rows; ++i) finish_row(args, row + i, panel, sums[i][0], sums[i][1]);
}

template <typename F>
void multiply(const Linear& args, int64_t rows) {
  static thread_local Scratch scratch;
  const int64_t row_units = num_spans(args.in_features) * kRowUnits;
  auto* x = static_cast<int32_t*>(scratch.get(rows * row_units * sizeof(int32_t)));
  args.dtype == kFloat32 ? quantize<float>(args, rows, x) : quantize<bf16>(args, rows, x);

  // Each block unpacks the panels, which costs as much as 15 of its rows. So there are few: they stay in the third-level
  // cache, from which a tile takes 3 bytes in a cycle, and share out evenly among the threads.
  constexpr int64_t kBlockBytes = 2 << 20, kMinTiles = 32, kRunsPerThread = 4;
  const int64_t tiles = num_tiles(rows), panels = args.num_panels();
  const int64_t max_tiles = std::max(kBlockBytes / (kTileRows * row_units * int64_t{sizeof(int32_t)}), kMinTiles);
  const int64_t wanted = std::max((tiles + max_tiles - 1) / max_tiles, kRunsPerThread * num_threads() / panels);
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, (tiles + kMinTiles - 1) / kMinTiles);
  const int64_t groups = args.in_features / kGroup;
  parallel_for(blocks * panels, [&](int64_t index) {
    static thread_local Scratch memory;
    const int64_t block = index / panels, panel = index % panels;
    const int64_t size = groups * Unpacked<F::kAffine>::kGroupFloats;
    auto* const weights = static_cast<float*>(memory.get(size * sizeof(float)));
    unpack_panel<F>(static_cast<const char*>(args.weight) + panel * groups * F::kGroupBytes, groups, weights);
    for (int64_t tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; ++tile) {
      const int64_t row = first_row(tile, rows), end = first_row(tile + 1, rows);
      multiply_rows<F::kAffine>(args, x + row * row_units, row, end - row, weights, panel);
    }
  });
}

}  // namespace triptych::wide_bytes
