// Low-rank adapters: what a row's own adapter adds to its outputs, B (A x) with the scaling in B.
//
// Rows of one adapter are multiplied by A together, before the product; each output gets its part of B when the product
// finishes it, before the activation. Every sum has one order for any number of rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"
#include "simd/scalar.h"
#include "stages.h"

namespace triptych {

// What an adapter adds to the two vectors of one panel.
struct AdapterPanel {
  int64_t first;        // of the products with A, where those of the first vector begin
  int64_t second;       // the same of the second vector; another in a gated weight
  int64_t count;        // products for each of both
  const void* weights;  // [count][2][kLanes]
};

// One adapter of one product, as Python (adapters.py) writes it.
struct Adapter {
  int64_t dtype;  // of A and B
  int64_t rank;   // of all pieces of the product together
  const void* a;  // [rank, in_features]
  const AdapterPanel* panels;
};

// Rows of a tile that read A once, and rows of A: as many sums as registers hold.
constexpr int kAdaptedRows = 4;
constexpr int kRanksTogether = kRegisters == 32 ? 4 : 2;
constexpr int64_t kRanksPerIndex = 8;

// sums[row][rank] of rows that lie anywhere
template <int Rows, int Ranks, typename X, typename W>
void multiply_adapted(const X* const (&x)[Rows], const W* a, int64_t size, float* const (&out)[Rows]) {
  vec sums[Rows][Ranks];
  unroll<Rows>([&](auto row) { unroll<Ranks>([&](auto rank) { sums[row][rank] = zero(); }); });
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    vec inputs[Rows];
    unroll<Rows>([&](auto row) { inputs[row] = load(x[row] + k); });
    unroll<Ranks>([&](auto rank) {
      const vec weights = load(a + rank * size + k);
      unroll<Rows>([&](auto row) { sums[row][rank] = fma(inputs[row], weights, sums[row][rank]); });
    });
  }
  unroll<Rows>([&](auto row) {
    unroll<Ranks>([&](auto rank) {
      float total = sum(sums[row][rank]);
      for (int64_t i = k; i < size; ++i) total += to_float(x[row][i]) * to_float(a[rank * size + i]);
      out[row][rank] = total;
    });
  });
}

template <int Rows, typename X, typename W>
void multiply_ranks(const X* const (&x)[Rows], const W* a, int64_t size, int64_t ranks, float* const (&out)[Rows]) {
  int64_t rank = 0;
  float* to[Rows];
  for (; rank + kRanksTogether <= ranks; rank += kRanksTogether) {
    for (int row = 0; row < Rows; ++row) to[row] = out[row] + rank;
    multiply_adapted<Rows, kRanksTogether>(x, a + rank * size, size, to);
  }
  for (; rank < ranks; ++rank) {
    for (int row = 0; row < Rows; ++row) to[row] = out[row] + rank;
    multiply_adapted<Rows, 1>(x, a + rank * size, size, to);
  }
}

// Rows of one adapter that one thread takes at a time.
struct AdaptedTile {
  const Adapter* adapter;
  int64_t rows[kAdaptedRows];
  int count;
};

template <typename X, typename W, int Rows = kAdaptedRows>
void multiply_tile_by_a(const AdaptedTile& tile, const X* x, int64_t x_stride, int64_t size, int64_t first,
                        int64_t ranks, float* out, int64_t out_stride) {
  if constexpr (Rows > 1) {
    if (tile.count < Rows) {
      return multiply_tile_by_a<X, W, Rows - 1>(tile, x, x_stride, size, first, ranks, out, out_stride);
    }
  }
  const X* inputs[Rows];
  float* outputs[Rows];
  for (int row = 0; row < Rows; ++row) {
    inputs[row] = x + tile.rows[row] * x_stride;
    outputs[row] = out + tile.rows[row] * out_stride + first;
  }
  multiply_ranks<Rows>(inputs, static_cast<const W*>(tile.adapter->a) + first * size, size, ranks, outputs);
}

// Tiles of rows of the same adapter, of all rows that have one.
inline int64_t tile_adapted_rows(const int32_t* slots, const Adapter* const* adapters, int64_t num_adapters,
                                 int64_t rows, AdaptedTile* tiles, AdaptedTile** open) {
  int64_t count = 0;
  std::fill_n(open, num_adapters, nullptr);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t slot = slots[row];
    if (slot < 0 || adapters[slot] == nullptr) continue;
    AdaptedTile*& tile = open[slot];
    if (tile == nullptr || tile->count == kAdaptedRows) {
      tile = &tiles[count++];
      tile->adapter = adapters[slot];
      tile->count = 0;
    }
    tile->rows[tile->count++] = row;
  }
  return count;
}

// Whether any row has an adapter that does something here.
inline bool has_adapted_rows(const int32_t* slots, const Adapter* const* adapters, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    if (slots[row] >= 0 && adapters[slots[row]] != nullptr) return true;
  }
  return false;
}

template <typename W>
void add_panel(const AdapterPanel& panel, const float* products, vec& first, vec& second) {
  const W* weights = static_cast<const W*>(panel.weights);
  const float *one = products + panel.first, *two = products + panel.second;
  vec sums[2][2] = {{zero(), zero()}, {zero(), zero()}};  // of even and odd products, half as long a chain
  int64_t i = 0;
  for (; i + 2 <= panel.count; i += 2, weights += 4 * kLanes) {
    unroll<2>([&](auto odd) {
      sums[0][odd] = fma(splat(one[i + odd]), load(weights + odd * 2 * kLanes), sums[0][odd]);
      sums[1][odd] = fma(splat(two[i + odd]), load(weights + odd * 2 * kLanes + kLanes), sums[1][odd]);
    });
  }
  if (i < panel.count) {
    sums[0][0] = fma(splat(one[i]), load(weights), sums[0][0]);
    sums[1][0] = fma(splat(two[i]), load(weights + kLanes), sums[1][0]);
  }
  first = first + (sums[0][0] + sums[0][1]);
  second = second + (sums[1][0] + sums[1][1]);
}

}  // namespace triptych
