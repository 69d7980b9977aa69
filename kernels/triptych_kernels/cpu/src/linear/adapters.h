// Low-rank adapters: what a row's own adapter adds to its outputs, B (A x) with the scaling in B.
//
// Rows of one adapter are multiplied by A together, before the product; each output gets its part of B when the product
// finishes it, before the activation. Every sum has one order for any number of rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

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
  const void* weights;  // [count][2][kLanes], or in bfloat16 [count / 2][2][kLanes][2]
};

// One adapter of one product, as Python (adapters.py) writes it.
struct Adapter {
  int64_t dtype;  // of A and B
  int64_t rank;   // of all pieces of the product together
  const void* a;  // [rank, in_features]
  const AdapterPanel* panels;
  const char* weights;  // what the panels point to, one after the other
  int64_t num_bytes;    // of these
};

// The adapter of one row in a product in progress.
struct AdaptedRow {
  const AdapterPanel* panels;  // null: it has none
  const void* products;        // with A
};

// Rows of a tile that read A once, and rows of A: as many sums as registers hold.
constexpr int kAdaptedRows = 4;
constexpr int kRanksTogether = kRegisters == 32 ? 4 : 2;
static_assert(kAdaptedRows * kRanksTogether <= kLanes, "their sums are one vector");
constexpr int64_t kRanksPerIndex = 8;

// Whether the processor multiplies inputs and factors in pairs. Then the products with A are rounded to bfloat16, as the
// inputs are, so that B is multiplied in pairs, too.
template <typename X, typename W>
constexpr bool kInPairs = kHasBf16Products && std::is_same_v<X, bf16> && std::is_same_v<W, bf16>;

template <typename X, typename W>
using Product = std::conditional_t<kInPairs<X, W>, bf16, float>;

// sums[row][rank] of rows that lie anywhere
template <int Rows, int Ranks, typename X, typename W>
void multiply_adapted(const X* const (&x)[Rows], const W* a, int64_t size, Product<X, W>* const (&out)[Rows]) {
  vec sums[Rows][Ranks];
  unroll<Rows>([&](auto row) { unroll<Ranks>([&](auto rank) { sums[row][rank] = zero(); }); });
  int64_t k = 0;
  if constexpr (kInPairs<X, W>) {
    const auto load_pairs = [](const bf16* from) { return load(reinterpret_cast<const float*>(from)); };
    for (; k + 2 * kLanes <= size; k += 2 * kLanes) {
      vec inputs[Rows];
      unroll<Rows>([&](auto row) { inputs[row] = load_pairs(x[row] + k); });
      unroll<Ranks>([&](auto rank) {
        prefetch_line(a + (Ranks + rank) * size + k);  // rows of A are too short for the processor to foresee
        const vec weights = load_pairs(a + rank * size + k);
        unroll<Rows>([&](auto row) { sums[row][rank] = add_bf16_dot(sums[row][rank], inputs[row], weights); });
      });
    }
  }
  for (; k + kLanes <= size; k += kLanes) {
    vec inputs[Rows];
    unroll<Rows>([&](auto row) { inputs[row] = load(x[row] + k); });
    unroll<Ranks>([&](auto rank) {
      const vec weights = load(a + rank * size + k);
      unroll<Rows>([&](auto row) { sums[row][rank] = fma(inputs[row], weights, sums[row][rank]); });
    });
  }
  // together, since the sum of one vector takes as many instructions as its products; each by itself in its lane
  vec lanes[kLanes];
  unroll<kLanes>([&](auto i) { lanes[i] = zero(); });
  unroll<Rows>([&](auto row) { unroll<Ranks>([&](auto rank) { lanes[row * Ranks + rank] = sums[row][rank]; }); });
  float totals[kLanes];
  store(totals, triptych::sums(lanes));
  unroll<Rows>([&](auto row) {
    unroll<Ranks>([&](auto rank) {
      float total = totals[row * Ranks + rank];
      for (int64_t i = k; i < size; ++i) total += to_float(x[row][i]) * to_float(a[rank * size + i]);
      store_one(out[row] + rank, total);
    });
  });
}

template <int Rows, typename X, typename W>
void multiply_ranks(const X* const (&x)[Rows], const W* a, int64_t size, int64_t ranks,
                    Product<X, W>* const (&out)[Rows]) {
  int64_t rank = 0;
  Product<X, W>* to[Rows];
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
  bool is_first;  // of its adapter
};

template <typename X, typename W, int Rows = kAdaptedRows>
void multiply_tile_by_a(const AdaptedTile& tile, const X* x, int64_t x_stride, int64_t size, int64_t first,
                        int64_t ranks, Product<X, W>* out, int64_t out_stride) {
  if constexpr (Rows > 1) {
    if (tile.count < Rows) {
      return multiply_tile_by_a<X, W, Rows - 1>(tile, x, x_stride, size, first, ranks, out, out_stride);
    }
  }
  const X* inputs[Rows];
  Product<X, W>* outputs[Rows];
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
      const bool is_first = tile == nullptr;
      tile = &tiles[count++];
      tile->is_first = is_first;
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

// Adds what `products` with A give, in two chains of sums each.
inline void add_panel(const AdapterPanel& panel, const float* weights, const float* products, vec& first, vec& second) {
  const float *one = products + panel.first, *two = products + panel.second;
  vec sums[2][2] = {{zero(), zero()}, {zero(), zero()}};
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

// The same with pairs of weights, of which there is an even number.
template <typename P>
void add_panel(const AdapterPanel& panel, const bf16* weights, const P* products, vec& first, vec& second) {
  const P *one = products + panel.first, *two = products + panel.second;
  const auto load_pairs = [](const bf16* from) { return load(reinterpret_cast<const float*>(from)); };
  vec sums[2][2] = {{zero(), zero()}, {zero(), zero()}};
  const auto add = [&](int64_t i, auto chain) {
    const vec pairs[2] = {load_pairs(weights), load_pairs(weights + 2 * kLanes)};
    weights += 4 * kLanes;
    if constexpr (std::is_same_v<P, bf16>) {
      int32_t products_of_first, products_of_second;
      std::memcpy(&products_of_first, one + i, sizeof products_of_first);
      std::memcpy(&products_of_second, two + i, sizeof products_of_second);
      sums[0][chain] = add_bf16_dot(sums[0][chain], as_vec(splat_int(products_of_first)), pairs[0]);
      sums[1][chain] = add_bf16_dot(sums[1][chain], as_vec(splat_int(products_of_second)), pairs[1]);
    } else {
      sums[0][chain] = fma(splat(one[i + 1]), odd(pairs[0]), fma(splat(one[i]), even(pairs[0]), sums[0][chain]));
      sums[1][chain] = fma(splat(two[i + 1]), odd(pairs[1]), fma(splat(two[i]), even(pairs[1]), sums[1][chain]));
    }
  };
  int64_t i = 0;
  for (; i + 4 <= panel.count; i += 4) unroll<2>([&](auto chain) { add(i + 2 * chain, chain); });
  if (i < panel.count) add(i, std::integral_constant<int, 0>());
  first = first + (sums[0][0] + sums[0][1]);
  second = second + (sums[1][0] + sums[1][1]);
}

}  // namespace triptych
