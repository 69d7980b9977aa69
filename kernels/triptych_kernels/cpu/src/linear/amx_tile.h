// Products of up to 32 rows with one panel of bfloat16 weights, in the tiles of AMX.
//
//              weights[0]  weights[1]      [16 pairs of inputs, 16 outputs] each: the two halves of a panel
//   inputs[0]   sums[0][0]  sums[0][1]     [16 rows, 16 outputs] float32 each
//   inputs[1]   sums[1][0]  sums[1][1]
//   [16 rows, 32 inputs] each
//
// Four sums for four loads is the most that eight tiles allow, and four chains of sums outlast the latency of a
// product. A panel is read where it lies: its rows of pairs are twice as long as a tile's. Fewer rows are smaller
// tiles: nothing is read past them.
//
// Each output is one chain of sums over its inputs, 32 at a time in order, for any number of rows, so a row's
// result does not depend on its batch.
#pragma once

#include "simd/amx.h"
#include "linear/finish.h"
#include "simd/scalar.h"

namespace triptych::amx {

constexpr int64_t kMaxRows = 2 * kTileRows;
constexpr int64_t kStep = kTileRowBytes / sizeof(bf16);               // inputs
constexpr int64_t kPairsBytes = kPanel * 2 * sizeof(bf16);            // of one pair of inputs in a panel
constexpr int64_t kStepBytes = kStep / 2 * kPairsBytes;               // of a panel
// Ahead of the weights in hand, past a panel into the next: so much is under way at 20 GB/s and 200 ns.
constexpr int64_t kAheadBytes = 2 * kStepBytes;
static_assert(kPairsBytes == 2 * kTileRowBytes, "half a panel is as wide as a tile");

enum Tile { kSums00, kSums01, kSums10, kSums11, kInputs0, kInputs1, kWeights0, kWeights1 };

// The calling thread has tiles for so many rows while this lives, and leaves none behind.
class Tiles {
 public:
  // rows: 1 to kMaxRows
  explicit Tiles(int64_t rows) {
    Config config;
    const auto set = [&](Tile tile, int64_t tile_rows) {
      config.rows[tile] = static_cast<uint8_t>(tile_rows);
      config.row_bytes[tile] = tile_rows ? kTileRowBytes : 0;
    };
    const int64_t upper = std::min<int64_t>(rows, kTileRows), lower = rows - upper;
    for (const Tile tile : {kSums00, kSums01, kInputs0}) set(tile, upper);
    for (const Tile tile : {kSums10, kSums11, kInputs1}) set(tile, lower);
    for (const Tile tile : {kWeights0, kWeights1}) set(tile, kTileRows);
    configure(config);
  }
  ~Tiles() { release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// sums += x . panel, over kStep inputs; Both: there are more than kTileRows rows.
template <bool Both>
[[gnu::always_inline]] inline void add_step(const bf16* x, int64_t x_stride, const bf16* panel) {
  const int64_t stride_bytes = x_stride * sizeof(bf16);
  load<kWeights0>(panel, kPairsBytes);
  load<kInputs0>(x, stride_bytes);
  multiply<kSums00, kInputs0, kWeights0>();
  load<kWeights1>(panel + kTileRowBytes / sizeof(bf16), kPairsBytes);
  multiply<kSums01, kInputs0, kWeights1>();
  if constexpr (Both) {
    load<kInputs1>(x + kTileRows * x_stride, stride_bytes);
    multiply<kSums10, kInputs1, kWeights0>();
    multiply<kSums11, kInputs1, kWeights1>();
  }
}

// The last `count` inputs, where they are no whole step, filled up with zeros.
template <bool Both>
void add_rest(const bf16* x, int64_t x_stride, const bf16* panel, int64_t rows, int64_t count) {
  alignas(64) bf16 inputs[kMaxRows][kStep] = {}, weights[kStep / 2][kPanel * 2] = {};
  for (int64_t row = 0; row < rows; ++row) std::memcpy(inputs[row], x + row * x_stride, count * sizeof(bf16));
  std::memcpy(weights, panel, (count + 1) / 2 * kPairsBytes);
  add_step<Both>(inputs[0], kStep, weights[0]);
}

// Into all caches, unlike that of tile.h: on Intel the other kind passes the second level by, from where further
// tiles of rows read the panel.
[[gnu::always_inline]] inline void prefetch_step(const bf16* panel) {
  const char* ahead = reinterpret_cast<const char*>(panel) + kAheadBytes;
#pragma GCC unroll 32
  for (int64_t line = 0; line < kStepBytes; line += kLineBytes) _mm_prefetch(ahead + line, _MM_HINT_T0);
}

template <bool Both>
[[gnu::always_inline]] inline void set_sums_to_zero() {
  set_zero<kSums00>();
  set_zero<kSums01>();
  if constexpr (Both) {
    set_zero<kSums10>();
    set_zero<kSums11>();
  }
}

// The tiles of sums become x . panel, over `in_features`; x and its rows as in `multiply_tile`. After each step of
// products vectors compute `beside`.
// Ahead: the weights come from memory, so those that follow are asked for.
template <bool Both, bool Ahead, typename F>
[[gnu::always_inline]] inline void sum_products(const bf16* x, int64_t x_stride, const bf16* panel, int64_t in_features,
                                                int64_t rows, const F& beside) {
  set_sums_to_zero<Both>();
  const int64_t whole = in_features / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kStep) {
    add_step<Both>(x + k, x_stride, panel + k * kPanel);
    if constexpr (Ahead) prefetch_step(panel + k * kPanel);
    beside();
  }
  if (whole < in_features) {
    add_rest<Both>(x + whole, x_stride, panel + whole * kPanel, rows, in_features - whole);
  }
}

// Rows of the sums lie `stride` bytes apart.
template <bool Both>
[[gnu::always_inline]] inline void store_sums(float* to, int64_t stride) {
  store<kSums00>(to, stride);
  store<kSums01>(to + kLanes, stride);
  if constexpr (Both) {
    float* const lower = to + kTileRows * stride / static_cast<int64_t>(sizeof(float));
    store<kSums10>(lower, stride);
    store<kSums11>(lower + kLanes, stride);
  }
}

// out[row][0 .. kPanel - 1] = x[row] . panel of `rows` rows, for which there are Tiles; rows of out are `out_stride` apart.
inline void multiply_panel(const bf16* x, int64_t x_stride, const bf16* panel, int64_t in_features, int64_t rows,
                           float* out, int64_t out_stride) {
  const int64_t stride = out_stride * static_cast<int64_t>(sizeof(float));
  if (rows > kTileRows) {
    sum_products<true, false>(x, x_stride, panel, in_features, rows, [] {});
    return store_sums<true>(out, stride);
  }
  sum_products<false, false>(x, x_stride, panel, in_features, rows, [] {});
  store_sums<false>(out, stride);
}

// The rows of a tile on their way from sums to results of type O.
template <typename O, Ending E>
class TileRows {
 public:
  explicit TileRows(const Linear& args) : args_(args), to_(args, 0, 0) {}

  // Takes the tiles of sums over: of `rows` rows from `row` on.
  template <bool Both>
  void take(int64_t row, int64_t rows, int64_t panel) {
    store_sums<Both>(sums_[0], sizeof sums_[0]);
    to_ = PanelRows<O, E>(args_, row, panel);
    next_ = 0;
    rows_ = rows;
  }

  // Finishes so many more rows, or those that are left.
  [[gnu::always_inline]] void finish(int64_t count) {
    for (const int64_t end = std::min(next_ + count, rows_); next_ < end; ++next_) {
      to_.finish(triptych::load(sums_[next_]), triptych::load(sums_[next_] + kLanes));
    }
  }

 private:
  const Linear& args_;
  PanelRows<O, E> to_;
  int64_t next_ = 0, rows_ = 0;  // no rows yet
  alignas(64) float sums_[kMaxRows][kPanel];
};

// f(rows on their way) for the case that these panels are.
template <typename F>
void with_tile_rows(const Linear& args, int64_t end_panel, const F& f) {
  with_ending(args, end_panel, [&]<typename O, Ending E>() { f(TileRows<O, E>(args)); });
}

// Rows first … end - 1 of a block in tiles of `tile_rows`, which divides them and for which there are Tiles. While
// tiles multiply, vectors finish the rows of the tile before.
// x, weights: as in multiply_rows of tile.h
template <bool Both, typename Rows>
void multiply_tiles(const Linear& args, const bf16* x, int64_t x_stride, const bf16* weights, const Block& block,
                    int64_t first, int64_t end, int64_t tile_rows, Rows& before) {
  const int64_t steps = std::max<int64_t>(args.in_features / kStep, 1), per_step = (tile_rows + steps - 1) / steps;
  const auto beside = [&]() __attribute__((always_inline)) { before.finish(per_step); };
  for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel, weights += args.in_features * kPanel) {
    for (int64_t row = first; row < end; row += tile_rows) {
      const bf16* const own = x + row * x_stride;
      if (row == first) {
        sum_products<Both, true>(own, x_stride, weights, args.in_features, tile_rows, beside);
      } else {
        sum_products<Both, false>(own, x_stride, weights, args.in_features, tile_rows, beside);
      }
      before.finish(tile_rows);
      before.template take<Both>(row, tile_rows, panel);
    }
  }
  before.finish(tile_rows);
}

// The same for any number of rows.
inline void multiply_rows(const Linear& args, const bf16* x, int64_t x_stride, const bf16* weights, const Block& block,
                          int64_t first, int64_t end, int64_t tile_rows) {
  if (first == end) return;
  const Tiles tiles(tile_rows);
  with_tile_rows(args, block.end_panel, [&](auto&& rows) {
    const auto multiply = [&](auto both) {
      multiply_tiles<both()>(args, x, x_stride, weights, block, first, end, tile_rows, rows);
    };
    tile_rows > kTileRows ? multiply(std::true_type()) : multiply(std::false_type());
  });
}

// Whole tiles of rows, then those that are left, so that tiles are configured twice at most.
inline void multiply_block(const Linear& args, const bf16* x, int64_t x_stride, const bf16* weights,
                           const Block& block) {
  const int64_t rest = (block.end_row - block.first_row) % kMaxRows, first_left = block.end_row - rest;
  multiply_rows(args, x, x_stride, weights, block, block.first_row, first_left, kMaxRows);
  multiply_rows(args, x, x_stride, weights, block, first_left, block.end_row, rest);
}

// Steps of a panel that are unpacked together.
constexpr int64_t kPieceSteps = 4;

// The first tile of rows with a panel that is unpacked meanwhile: vectors make a piece of weights while tiles multiply the
// piece before it, which is in the first-level cache.
// weights: for the whole panel if it is kept, else for two pieces; unpack as in `multiply_unpacked`
template <bool Both, typename Unpack>
void multiply_and_unpack(const Linear& args, const bf16* x, int64_t x_stride, int64_t rows, int64_t panel, bf16* weights,
                         bool is_kept, const Unpack& unpack) {
  const Tiles tiles(rows);
  const int64_t steps = args.in_features / kStep;
  const auto place = [&](int64_t step) {
    return weights + (is_kept ? step : step % (2 * kPieceSteps)) * kStep * kPanel;
  };
  const auto unpack_piece = [&](int64_t first) {
    if (first < steps) unpack(std::min(kPieceSteps, steps - first), place(first));
  };
  set_sums_to_zero<Both>();
  unpack_piece(0);
  for (int64_t first = 0; first < steps; first += kPieceSteps) {
    unpack_piece(first + kPieceSteps);
    for (int64_t step = first; step < std::min(first + kPieceSteps, steps); ++step) {
      add_step<Both>(x + step * kStep, x_stride, place(step));
    }
  }
  with_tile_rows(args, panel + 1, [&](auto&& of_tile) {
    of_tile.template take<Both>(0, rows, panel);
    of_tile.finish(rows);
  });
}

template <typename Unpack>
void multiply_unpacked(const Linear& args, const bf16* x, int64_t x_stride, int64_t rows, int64_t panel,
                       const Unpack& unpack) {
  static thread_local Scratch memory;
  const bool is_kept = rows > kMaxRows;  // further tiles read it again
  const int64_t inputs = is_kept ? args.in_features : 2 * kPieceSteps * kStep;
  auto* const weights = static_cast<bf16*>(memory.get(inputs * kPanel * sizeof(bf16)));
  const int64_t first = std::min(rows, kMaxRows);
  const auto multiply = first > kTileRows ? multiply_and_unpack<true, Unpack> : multiply_and_unpack<false, Unpack>;
  multiply(args, x, x_stride, first, panel, weights, is_kept, unpack);
  if (is_kept) multiply_block(args, x, x_stride, weights, {first, rows, panel, panel + 1});
}

}  // namespace triptych::amx
