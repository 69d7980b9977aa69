// How weights of linear layers are packed, and how a product walks over them.
//
// A panel holds kPanel outputs, two vectors of lanes, and all of their inputs, in the order in which a product
// reads them:
//
//   float32    [panels][in_features][kPanel]
//   bfloat16   [panels][in_features / 2][kPanel][2]        pairs of inputs, as the dot-product instruction wants
//
// Outputs past the last are zero. In a gated weight (gate and up of an MLP) the first vector of each panel holds
// rows of the gate and the second the same rows of up, so that one tile holds both factors.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernel.h"
#include "linear/activation.h"
#include "linear/adapters.h"
#include "parallel.h"
#include "simd/vec.h"
#include "stages.h"

namespace triptych {

constexpr int kPanel = 2 * kLanes;

struct Linear {
  int64_t dtype;            // of weight and x
  int64_t out_dtype;
  const void* x;            // [rows, in_features], rows x_stride elements apart
  int64_t x_stride;
  const void* weight;       // panels
  const float* bias;        // [panels * kPanel] in the order of the panels, or null
  void* out;                // [rows, out_features], or half of them of a gated weight
  int64_t out_stride;
  int64_t in_features;
  int64_t out_features;
  int64_t activation;
  int64_t gated;            // whether panels hold gates and ups, which are multiplied; with an activation
  const Stages* stages;     // what makes the rows of x, or null
  const int32_t* slots;     // [rows] of each row's adapter, -1 for none; or null: there are no adapters
  const Adapter* const* adapters;  // [num_adapters] by slot, null where it does nothing here
  int64_t num_adapters;
  const AdaptedRow* adapted;  // [rows] in a step with adapters, which `with_adapters` sets; else null
  int64_t adapter_dtype;      // then that of the factors

  int64_t num_panels() const { return (out_features + kPanel - 1) / kPanel; }
};

// The work that one thread takes at a time.
struct Block {
  int64_t first_row, end_row, first_panel, end_panel;
};

// Rows of a block: of as many whole tiles as stay in the second-level cache, at least `min`; each block but the last
// a multiple of `multiple`.
struct BlockRows {
  int64_t tile, min, multiple;
};

// So few rows wait for memory.
constexpr int64_t kFewRows = 16;

// Rows are walked in blocks that stay in the second-level cache, panels one by one: f(block). Of few rows each thread
// reads a part of the weight from its beginning to its end.
template <typename F>
void for_blocks(int64_t rows, int64_t row_bytes, int64_t num_panels, const BlockRows& block_rows, const F& f) {
  constexpr int64_t kBlockBytes = 256 << 10;
  const int64_t max_block = std::max(kBlockBytes / row_bytes / block_rows.tile * block_rows.tile, block_rows.min);
  const int64_t num_blocks = (rows + max_block - 1) / max_block;
  const auto first_row = [&](int64_t block) {
    return block == num_blocks ? rows : rows * block / num_blocks / block_rows.multiple * block_rows.multiple;
  };
  const auto walk = [&](int64_t index) {
    const int64_t block = index / num_panels, panel = index % num_panels;
    f(Block{first_row(block), first_row(block + 1), panel, panel + 1});
  };
  rows <= kFewRows ? parallel_for_parts(num_blocks * num_panels, walk) : parallel_for(num_blocks * num_panels, walk);
}

// Row tiles of nearly equal height, none above `max_rows`: f(first row, number of rows).
template <typename F>
void for_row_tiles(int64_t begin, int64_t end, int64_t max_rows, const F& f) {
  const int64_t rows = end - begin, tiles = (rows + max_rows - 1) / max_rows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = begin + rows * tile / tiles;
    f(first, begin + rows * (tile + 1) / tiles - first);
  }
}

template <typename O>
void store_vec(O* out, vec value, int64_t count) {
  if (count >= kLanes) return store(out, value);
  float lanes[kLanes];
  store(lanes, value);
  for (int64_t i = 0; i < count; ++i) store_one(out + i, lanes[i]);
}

// Adds what a row's adapter does. Not inlined: products are made for many heights of tiles.
[[gnu::noinline]] inline void add_adapted(const Linear& args, const AdaptedRow& row, int64_t panel, vec& first,
                                          vec& second) {
  const AdapterPanel& own = row.panels[panel];
  if (args.adapter_dtype == kFloat32) {
    return add_panel(own, static_cast<const float*>(own.weights), static_cast<const float*>(row.products), first, second);
  }
  const auto* weights = static_cast<const bf16*>(own.weights);
  if constexpr (kHasBf16Products) {
    if (args.dtype == kBfloat16) return add_panel(own, weights, static_cast<const bf16*>(row.products), first, second);
  }
  add_panel(own, weights, static_cast<const float*>(row.products), first, second);
}

// Bytes of one adapter's B that are asked for before the product: of 8 adapters they fit the second-level cache.
constexpr int64_t kAheadOfPanels = 64 << 10;

// Multiplies the rows of `tiles` by A: products[row][rank] in float32 or, where they are multiplied in pairs, bfloat16;
// rows of products are `rank` floats apart. Of `args` the inputs are read.
inline void multiply_by_a(const Linear& args, const AdaptedTile* tiles, int64_t count, int64_t rank, float* products) {
  const int64_t chunks = (rank + kRanksPerIndex - 1) / kRanksPerIndex;
  parallel_for(count * chunks, [&](int64_t index) {
    const AdaptedTile& tile = tiles[index / chunks];
    const int64_t first = index % chunks * kRanksPerIndex, ranks = std::min(kRanksPerIndex, tile.adapter->rank - first);
    if (ranks <= 0) return;
    if (tile.is_first) {  // B is read in pieces, row by row, which no processor foresees
      const char* const end = tile.adapter->weights + std::min(tile.adapter->num_bytes, kAheadOfPanels);
      for (const char* at = tile.adapter->weights + index % chunks * 64; at < end; at += chunks * 64) prefetch_line(at);
    }
    const auto multiply = [&]<typename X, typename W>(const X* x, W) {
      multiply_tile_by_a<X, W>(tile, x, args.x_stride, args.in_features, first, ranks,
                               reinterpret_cast<Product<X, W>*>(products), rank * sizeof(float) / sizeof(Product<X, W>));
    };
    const bool is_wide = tile.adapter->dtype == kFloat32;
    if (args.dtype == kFloat32) {
      const auto* x = static_cast<const float*>(args.x);
      is_wide ? multiply(x, float()) : multiply(x, bf16());
    } else {
      const auto* x = static_cast<const bf16*>(args.x);
      is_wide ? multiply(x, float()) : multiply(x, bf16());
    }
  });
}

inline int64_t largest_rank(const AdaptedTile* tiles, int64_t count) {
  int64_t rank = 0;
  for (int64_t i = 0; i < count; ++i) rank = std::max(rank, tiles[i].adapter->rank);
  return rank;
}

// f(arguments of the product), which have the products with A of each row that has an adapter. Rows are made first if
// there is such a row.
template <typename F>
void with_adapters(const Linear& args, int64_t rows, const F& f) {
  if (args.slots == nullptr || !has_adapted_rows(args.slots, args.adapters, rows)) return f(args);
  make_all_rows(args.stages);
  static thread_local Scratch tile_memory, open_memory, row_memory, products_memory;
  auto* tiles = static_cast<AdaptedTile*>(tile_memory.get(rows * sizeof(AdaptedTile)));
  auto** open = static_cast<AdaptedTile**>(open_memory.get(args.num_adapters * sizeof(AdaptedTile*)));
  const int64_t count = tile_adapted_rows(args.slots, args.adapters, args.num_adapters, rows, tiles, open);
  const int64_t rank = largest_rank(tiles, count);
  auto* products = static_cast<float*>(products_memory.get(rows * rank * sizeof(float)));
  auto* adapted_rows = static_cast<AdaptedRow*>(row_memory.get(rows * sizeof(AdaptedRow)));
  for (int64_t row = 0; row < rows; ++row) {
    const Adapter* adapter = args.slots[row] < 0 ? nullptr : args.adapters[args.slots[row]];
    adapted_rows[row] = {adapter == nullptr ? nullptr : adapter->panels, products + row * rank};
  }
  Linear adapted = args;
  adapted.stages = nullptr;
  adapted.adapted = adapted_rows;
  adapted.adapter_dtype = tiles[0].adapter->dtype;
  multiply_by_a(args, tiles, count, rank, products);
  f(adapted);
}

// Finish one row of a tile: the two vectors of panel `panel`.
template <typename O>
void finish_row(const Linear& args, int64_t row, int64_t panel, vec first, vec second) {
  if (args.bias) {
    first = first + load(args.bias + panel * kPanel);
    second = second + load(args.bias + panel * kPanel + kLanes);
  }
  if (args.adapted && args.adapted[row].panels) add_adapted(args, args.adapted[row], panel, first, second);
  constexpr bool kRounded = sizeof(O) == sizeof(bf16);
  O* out = static_cast<O*>(args.out) + row * args.out_stride;
  if (args.gated) {
    store_vec(out + panel * kLanes, activate_gated<kRounded>(args.activation, first, second),
              args.out_features / 2 - panel * kLanes);
    return;
  }
  if (args.activation != kNoActivation) {
    first = activate<kRounded>(args.activation, first);
    second = activate<kRounded>(args.activation, second);
  }
  out += panel * kPanel;
  const int64_t left = args.out_features - panel * kPanel;
  store_vec(out, first, left);
  if (left > kLanes) store_vec(out + kLanes, second, left - kLanes);
}

inline void finish_row(const Linear& args, int64_t row, int64_t panel, vec first, vec second) {
  if (args.out_dtype == kFloat32) return finish_row<float>(args, row, panel, first, second);
  finish_row<bf16>(args, row, panel, first, second);
}

// Panel row of output `row` of one piece of a weight: where its elements go.
struct Place {
  int64_t panel, lane;
};
// `half`: -1 for a plain weight, 0 for the gate, 1 for up.
inline Place place_of(int64_t row, int64_t half) {
  if (half < 0) return {row / kPanel, row % kPanel};
  return {row / kLanes, half * kLanes + row % kLanes};
}

}  // namespace triptych
