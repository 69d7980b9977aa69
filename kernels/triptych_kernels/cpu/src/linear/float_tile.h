// Products of float32 inputs with weights that are float32, or 16 bits widened to it.
//
// A panel is [in_features] lines, the weights of one input for kPanel outputs:
//
//   float32    [2][kLanes]
//   bfloat16   [kLanes][2]    outputs i and kLanes + i share a word, which becomes both vectors without a shuffle
//   float16    [2][kLanes]
//
// Up to kMaxTileRows rows are one tile, which widens lines in registers. Of more rows the first tile keeps what it has
// widened for the others, in the second-level cache, and inputs are first laid out as the tiles read them: rows that
// lie a power of two apart would drive each other from the cache. Each output is one chain of sums over its inputs in
// order, in both ways and for any number of rows, so a row's result depends neither on its batch nor on the form of
// the weights.
#pragma once

#include "linear/product.h"
#include "linear/tile.h"

namespace triptych {

struct Float32Line {
  using Element = float;
  static constexpr bool kWidened = false;
  static void widen(const float* line, vec (&out)[2]) {
    out[0] = load(line);
    out[1] = load(line + kLanes);
  }
};

struct Bfloat16Line {
  using Element = uint16_t;
  static constexpr bool kWidened = true;
  // Place of a lane in the line.
  static int64_t place(int64_t lane) { return lane % kLanes * 2 + lane / kLanes; }
  static void widen(const uint16_t* line, vec (&out)[2]) {
    const vec words = load(reinterpret_cast<const float*>(line));
    out[0] = even(words);
    out[1] = odd(words);
  }
};

struct Float16Line {
  using Element = uint16_t;
  static constexpr bool kWidened = true;
  static int64_t place(int64_t lane) { return lane; }
  static void widen(const uint16_t* line, vec (&out)[2]) {
    out[0] = load_halves(line);
    out[1] = load_halves(line + kLanes);
  }
};

// Weights that lie so far ahead, and those of a cache line.
template <typename Line>
constexpr int64_t kAhead = kPrefetchBytes / sizeof(typename Line::Element);
template <typename Line>
constexpr int64_t kPerLine = 64 / sizeof(typename Line::Element);

inline void prefetch_near(const void* address) { __builtin_prefetch(address); }

// One tile of all rows, with one panel.
template <typename Line, int Rows>
void multiply_few(const Linear& args, const typename Line::Element* line, int64_t panel) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  Inputs<float> inputs(static_cast<const float*>(args.x), args.x_stride);
  for (int64_t k = 0; k < args.in_features; ++k, line += kPanel, inputs.advance(1)) {
    prefetch_once<kPanel * sizeof *line>(line + kAhead<Line>);
    vec weights[2];
    Line::widen(line, weights);
    unroll<Rows>([&](auto row) {
      const vec value = splat(*inputs.row(row));
      sums[row][0] = fma(value, weights[0], sums[row][0]);
      sums[row][1] = fma(value, weights[1], sums[row][1]);
    });
  }
  vec ends[Rows][2];
  unroll<Rows>([&](auto row) {
    ends[row][0] = sums[row][0];
    ends[row][1] = sums[row][1];
  });
  for (int row = 0; row < Rows; ++row) finish_row(args, row, panel, ends[row][0], ends[row][1]);
}

// Many rows: the tiles that they are cut into, and their inputs as tiles read them.
class RowTiles {
 public:
  // inputs: [num_bytes], which `lay_out` fills
  RowTiles(const Linear& args, int64_t rows, float* inputs)
      : rows_(rows), size_(args.in_features), count_((rows + kMaxTileRows - 1) / kMaxTileRows), inputs_(inputs) {}

  static int64_t num_bytes(const Linear& args, int64_t rows) {
    const RowTiles tiles(args, rows, nullptr);
    return tiles.count_ * tiles.tile_size() * sizeof(float);
  }

  int64_t count() const { return count_; }
  int64_t first_row(int64_t tile) const { return rows_ * tile / count_; }
  int64_t num_rows(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  // [in_features, kMaxTileRows]
  const float* inputs(int64_t tile) const { return inputs_ + tile * tile_size(); }

  void lay_out(const Linear& args, int64_t tile) const {
    const int64_t rows = num_rows(tile);
    make_rows(args.stages, first_row(tile), first_row(tile) + rows);
    const float* from = static_cast<const float*>(args.x) + first_row(tile) * args.x_stride;
    float* to = inputs_ + tile * tile_size();
    int64_t k = 0;
    if constexpr (kLanes >= kMaxTileRows) {
      for (; k + kLanes <= size_; k += kLanes) {
        vec square[kLanes];
        unroll<kLanes>([&](auto row) { square[row] = row < rows ? load(from + row * args.x_stride + k) : zero(); });
        transpose(square);
        // what a store writes past the tile's rows, the next one overwrites
        unroll<kLanes>([&](auto i) { store(to + (k + i) * kMaxTileRows, square[i]); });
      }
    }
    for (; k < size_; ++k) {
      for (int64_t row = 0; row < rows; ++row) to[k * kMaxTileRows + row] = from[row * args.x_stride + k];
    }
  }

 private:
  // With room for what the last of the overlapping stores leaves behind.
  int64_t tile_size() const { return size_ * kMaxTileRows + kLanes; }

  int64_t rows_, size_, count_;
  float* inputs_;
};

constexpr int64_t kChunk = 1024;  // inputs that have their float32 weights in the second-level cache at a time

// Where a tile takes its weights from. kFloatsAhead also fetches the chunk that follows in memory, so that memory is
// read while later tiles compute.
enum Source { kLines, kLinesKept, kFloats, kFloatsAhead };

// A chunk of the inputs of a panel.
template <typename Line>
struct Chunk {
  int64_t panel, first, end;            // inputs first … end - 1
  const typename Line::Element* lines;  // of the first input
  float* floats;                        // [end - first, kPanel], the same widened

  int64_t num_elements() const { return (end - first) * kPanel; }
};

// A tile of rows with a chunk of a panel.
//
// x: of the tile, as RowTiles lays it out; sums_before: [Rows, kPanel], of the chunks before, which become those of
// the chunks so far. The last chunk finishes the rows.
template <typename Line, Source From, int Rows>
void multiply_float_tile(const Linear& args, const Chunk<Line>& chunk, const float* x, int64_t first_row,
                         float* sums_before) {
  vec sums[Rows][2];
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  if (chunk.first > 0) {
    unroll<Rows>([&](auto row) {
      sums[row][0] = load(sums_before + row * kPanel);
      sums[row][1] = load(sums_before + row * kPanel + kLanes);
    });
  }
  const auto* line = chunk.lines;
  float* floats = chunk.floats;
  x += chunk.first * kMaxTileRows;
  for (int64_t k = chunk.first; k < chunk.end; ++k, x += kMaxTileRows, floats += kPanel) {
    vec weights[2];
    if constexpr (From == kFloatsAhead) {
      for (int64_t at = 0; at < kPanel; at += kPerLine<Line>) prefetch_near(line + chunk.num_elements() + at);
      line += kPanel;
    }
    if constexpr (From == kFloats || From == kFloatsAhead) {
      weights[0] = load(floats);
      weights[1] = load(floats + kLanes);
    } else {
      // widened weights are kept near; those that are read again where they lie must not pass the second level by
      if constexpr (From == kLinesKept) prefetch_once<kPanel * sizeof *line>(line + kAhead<Line>);
      if constexpr (From == kLines) {
        for (int64_t at = 0; at < kPanel; at += kPerLine<Line>) prefetch_near(line + kAhead<Line> + at);
      }
      Line::widen(line, weights);
      line += kPanel;
      if constexpr (From == kLinesKept) {
        store(floats, weights[0]);
        store(floats + kLanes, weights[1]);
      }
    }
    unroll<Rows>([&](auto row) {
      const vec value = splat(x[row]);
      sums[row][0] = fma(value, weights[0], sums[row][0]);
      sums[row][1] = fma(value, weights[1], sums[row][1]);
    });
  }
  if (chunk.end < args.in_features) {
    unroll<Rows>([&](auto row) {
      store(sums_before + row * kPanel, sums[row][0]);
      store(sums_before + row * kPanel + kLanes, sums[row][1]);
    });
    return;
  }
  vec ends[Rows][2];
  unroll<Rows>([&](auto row) {
    ends[row][0] = sums[row][0];
    ends[row][1] = sums[row][1];
  });
  for (int row = 0; row < Rows; ++row) finish_row(args, first_row + row, chunk.panel, ends[row][0], ends[row][1]);
}

// The same by the template made for that number of rows.
template <typename Line, Source From, int Rows = kMaxTileRows>
void multiply_float_rows(int64_t rows, const Linear& args, const Chunk<Line>& chunk, const float* x,
                         int64_t first_row, float* sums_before) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_float_rows<Line, From, Rows - 1>(rows, args, chunk, x, first_row, sums_before);
  }
  multiply_float_tile<Line, From, Rows>(args, chunk, x, first_row, sums_before);
}

// Tiles first … end - 1 with one panel.
template <typename Line>
void multiply_panel(const Linear& args, const RowTiles& tiles, int64_t first, int64_t end, int64_t panel) {
  static thread_local Scratch scratch;
  const int64_t size = args.in_features, chunk_size = std::min(size, kChunk);
  const int64_t num_kept = Line::kWidened ? chunk_size : 0;
  const int64_t num_sums = chunk_size < size ? (end - first) * kMaxTileRows : 0;
  float* const kept = static_cast<float*>(scratch.get((num_kept + num_sums) * kPanel * sizeof(float)));
  float* const sums = kept + num_kept * kPanel;
  for (int64_t start = 0; start < size; start += chunk_size) {
    const auto* lines = static_cast<const typename Line::Element*>(args.weight) + (panel * size + start) * kPanel;
    float* floats = kept;
    if constexpr (!Line::kWidened) floats = const_cast<float*>(lines);
    const Chunk<Line> chunk{panel, start, std::min(start + chunk_size, size), lines, floats};
    for (int64_t tile = first; tile < end; ++tile) {
      constexpr Source kFirst = Line::kWidened ? kLinesKept : kLines;
      const auto multiply = tile == first       ? multiply_float_rows<Line, kFirst>
                            : tile == first + 1 ? multiply_float_rows<Line, kFloatsAhead>
                                                : multiply_float_rows<Line, kFloats>;
      multiply(tiles.num_rows(tile), args, chunk, tiles.inputs(tile), tiles.first_row(tile),
               sums + (tile - first) * kMaxTileRows * kPanel);
    }
  }
}

// Blocks of tiles stay in the second-level cache beside a chunk of weights.
template <typename Line>
void multiply_many(const Linear& args, int64_t rows) {
  constexpr int64_t kBlockBytes = 256 << 10, kMinTiles = 4, kRunsPerThread = 4, kMaxRun = 8;
  static thread_local Scratch scratch;
  const RowTiles tiles(args, rows, static_cast<float*>(scratch.get(RowTiles::num_bytes(args, rows))));
  parallel_for(tiles.count(), [&](int64_t tile) { tiles.lay_out(args, tile); });
  const int64_t tile_bytes = args.in_features * kMaxTileRows * sizeof(float);
  const int64_t max_tiles = std::max(kBlockBytes / tile_bytes, kMinTiles), num_panels = args.num_panels();
  const int64_t num_blocks = (tiles.count() + max_tiles - 1) / max_tiles;
  const int64_t run = std::clamp<int64_t>(num_blocks * num_panels / (kRunsPerThread * num_threads()), 1, kMaxRun);
  const int64_t num_runs = (num_panels + run - 1) / run;
  parallel_for(num_blocks * num_runs, [&](int64_t index) {
    const int64_t block = index / num_runs, first = index % num_runs * run;
    for (int64_t panel = first; panel < std::min(first + run, num_panels); ++panel) {
      multiply_panel<Line>(args, tiles, tiles.count() * block / num_blocks, tiles.count() * (block + 1) / num_blocks,
                           panel);
    }
  });
}

// The product that the arguments describe, with weights in lines of this form.
template <typename Line, int Rows = kMaxTileRows>
void multiply_floats(const Linear& args, int64_t rows) {
  if (rows > kMaxTileRows) return multiply_many<Line>(args, rows);
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_floats<Line, Rows - 1>(args, rows);
  }
  using Element = typename Line::Element;
  const int64_t panel_size = args.in_features * kPanel;
  make_all_rows(args.stages);
  for_blocks(rows, 1, args.num_panels(), {Rows, Rows, 1}, [&](const Block& block) {
    for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) {
      multiply_few<Line, Rows>(args, static_cast<const Element*>(args.weight) + panel * panel_size, panel);
    }
  });
}

template <typename Line, int Rows = kMaxTileRows>
void multiply_few_rows(const Linear& args, int64_t rows, int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_few_rows<Line, Rows - 1>(args, rows, panel);
  }
  const auto* lines = static_cast<const typename Line::Element*>(args.weight) + panel * args.in_features * kPanel;
  multiply_few<Line, Rows>(args, lines, panel);
}

// The steps of such a product; few rows are read where they lie.
template <typename Line>
ProductSteps float_product(void (*run)(const Linear& args, const WeightForm& form, int64_t rows)) {
  return {
      .tile_height = [](int64_t) -> int64_t { return kMaxTileRows; },
      .input_bytes = [](const Linear& args, int64_t rows) -> int64_t {
        return rows <= kMaxTileRows ? 0 : RowTiles::num_bytes(args, rows);
      },
      .prepare = [](const Linear& args, int64_t rows, int64_t tile, void* inputs) {
        if (rows > kMaxTileRows) RowTiles(args, rows, static_cast<float*>(inputs)).lay_out(args, tile);
      },
      .multiply = [](const Linear& args, const WeightForm&, int64_t rows, const void* inputs, int64_t panel) {
        if (rows <= kMaxTileRows) return multiply_few_rows<Line>(args, rows, panel);
        const RowTiles tiles(args, rows, static_cast<float*>(const_cast<void*>(inputs)));
        multiply_panel<Line>(args, tiles, 0, tiles.count(), panel);
      },
      .run = run,
  };
}

}  // namespace triptych
