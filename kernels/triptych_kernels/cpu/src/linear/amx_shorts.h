// Products of inputs of 16 bits with a chunk of weights in bytes, in the tiles of AMX.
//
// An input is 256 * high + low, a signed byte and one without sign. A tile of rows keeps of each group:
//
//   bytes   [rows][high: kGroup, low: kGroup]     a cache line per row
//   floats  [rows][scale, sums of both halves, sum]
//
// For each unit of inputs that share a scale of the weights there are four sums of integers, which are exact:
//
//           weights[0]  weights[1]      [inputs / 4, 16 outputs of 4 bytes]: the two halves of a panel
//   high     sums[0]     sums[1]        [rows, 16 outputs] int32
//   low      sums[2]     sums[3]
//
// 256 * high + low is then what products of 16 bits sum to, and is finished in float32 as they are, so that a row's result
// is theirs, bit by bit. Vectors finish a unit while tiles multiply the next one.
#pragma once

#include "linear/coded.h"
#include "simd/amx.h"

namespace triptych::amx {

constexpr int kShortFloats = 4;                                                      // per row and group
constexpr int64_t kShortBytes = 2 * kGroup + kShortFloats * int64_t{sizeof(float)};  // the same
constexpr int64_t kShortStride = 2 * kGroup;                                         // of rows of bytes

enum ShortTile { kHighSums0, kHighSums1, kLowSums0, kLowSums1, kHigh, kLow, kBytes0, kBytes1 };

// The calling thread has tiles for so many rows and inputs of a unit while this lives, and leaves none behind.
class ShortTiles {
 public:
  ShortTiles(int64_t rows, int unit_inputs) {
    Config config;
    const auto set = [&](ShortTile tile, int64_t tile_rows, int64_t row_bytes) {
      config.rows[tile] = static_cast<uint8_t>(tile_rows);
      config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    for (const ShortTile tile : {kHighSums0, kHighSums1, kLowSums0, kLowSums1}) set(tile, rows, kTileRowBytes);
    for (const ShortTile tile : {kHigh, kLow}) set(tile, rows, unit_inputs);
    for (const ShortTile tile : {kBytes0, kBytes1}) set(tile, unit_inputs / 4, kTileRowBytes);
    configure(config);
  }
  ~ShortTiles() { release(); }
  ShortTiles(const ShortTiles&) = delete;
  ShortTiles& operator=(const ShortTiles&) = delete;
};

// Sums of one unit, in the order of the tiles.
struct alignas(64) ShortSums {
  int32_t of[4][kTileRows][kLanes];
};

// to: of a unit; x: high bytes of its inputs; weights: its steps
[[gnu::always_inline]] inline void sum_shorts(const uint8_t* x, const float* weights, ShortSums& to) {
  constexpr int64_t kStepBytes = kPanel * sizeof(float), kSumBytes = kLanes * sizeof(int32_t);
  load<kBytes0>(weights, kStepBytes);
  load<kHigh>(x, kShortStride);
  set_zero<kHighSums0>();
  multiply_bytes<kHighSums0, kHigh, kBytes0, true>();
  load<kBytes1>(weights + kLanes, kStepBytes);
  set_zero<kHighSums1>();
  multiply_bytes<kHighSums1, kHigh, kBytes1, true>();
  load<kLow>(x + kGroup, kShortStride);
  set_zero<kLowSums0>();
  multiply_bytes<kLowSums0, kLow, kBytes0, false>();
  set_zero<kLowSums1>();
  multiply_bytes<kLowSums1, kLow, kBytes1, false>();
  store<kHighSums0>(to.of[0], kSumBytes);
  store<kHighSums1>(to.of[1], kSumBytes);
  store<kLowSums0>(to.of[2], kSumBytes);
  store<kLowSums1>(to.of[3], kSumBytes);
}

// Add to sums `to` [rows][kPanel] the products of a tile's inputs x with some groups; up to kTileRows rows.
template <int Units, bool Affine>
void multiply_short_tile(const uint8_t* x, int64_t rows, int64_t groups, const float* weights, float* to) {
  using G = coded::ByteGroup<Units, Affine>;
  constexpr int kUnitInputs = kGroup / Units;
  const ShortTiles tiles(rows, kUnitInputs);
  ShortSums sums[2];
  const auto start = [&](int64_t unit) {
    const int64_t group = unit / Units, in_group = unit % Units;
    sum_shorts(x + group * rows * kShortBytes + in_group * kUnitInputs,
               weights + group * G::kFloats + in_group * kUnitInputs / 4 * kPanel, sums[unit % 2]);
  };
  const auto finish = [&](int64_t unit) {
    const int64_t group = unit / Units, in_group = unit % Units;
    const float* const own = weights + group * G::kFloats;
    const auto part = [&](int index, int half) { return triptych::load(own + (index + 2 * in_group + half) * kLanes); };
    const vec scales[2] = {part(G::kScales, 0), part(G::kScales, 1)};
    const vec minima[2] = {Affine ? part(G::kMinima, 0) : zero(), Affine ? part(G::kMinima, 1) : zero()};
    const auto* of_row = reinterpret_cast<const float*>(x + group * rows * kShortBytes + rows * kShortStride);
    const auto& integers = sums[unit % 2].of;
    float* at = to;
    for (int64_t row = 0; row < rows; ++row, of_row += kShortFloats, at += kPanel) {
      const vec scale = splat(of_row[0]);
      unroll<2>([&](auto half) {
        const ivec dot = shift_left<8>(load_ints(integers[half][row])) + load_ints(integers[2 + half][row]);
        vec sum = fma(to_floats(dot) * scale, scales[half], triptych::load(at + half * kLanes));
        if constexpr (Affine) sum = fma(splat(of_row[Units == 2 ? 1 + in_group : 3]), minima[half], sum);
        triptych::store(at + half * kLanes, sum);
      });
    }
  };
  start(0);
  for (int64_t unit = 1; unit < groups * Units; ++unit) {
    start(unit);
    finish(unit - 1);
  }
  finish(groups * Units - 1);
}

}  // namespace triptych::amx
