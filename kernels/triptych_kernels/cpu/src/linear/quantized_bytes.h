// Products of packed weights with inputs rounded to 8-bit integers (byte_inputs.h), four bytes of a weight at a time.
//
// Of a group, with D the exact sum of the products of bytes, inputs = s * (u - z) and weights = d * b + m:
//
//   inputs . weights = d * (s * D) - (s * z) * sum(d * b) + m * sum(inputs)
//
// so a zero point and a minimum cost an fma each, and what they multiply is known once per panel. D is smaller than 2^22,
// so the bits of kCenterBits + D are those of the float kCenter + D: one fma makes s * D of it, rounded once.
#pragma once

#include "linear/block.h"
#include "linear/byte_panels.h"
#include "linear/product.h"

namespace triptych::bytes {

static_assert(kGroup * 128 * 255 < 1 << 22);

// so many or fewer rows read packed weights, more read unpacked ones; one block of for_blocks
constexpr int64_t kFewRows = kRegisters == 32 ? 48 : 16;
static_assert(kFewRows <= kBlockRows<float>.min);
// 24 sums, two weights and an input in 32 registers; or 10 integer ones, two weights, an input and two products in 16
constexpr int kTileRows = kRegisters == 32 ? 6 : 5;
constexpr int kPackedTileRows = kRegisters == 32 ? 8 : 4;  // each tile unpacks the weights, which costs more than spills

inline int64_t num_tiles(int64_t rows) {
  const int64_t height = rows <= kFewRows ? kPackedTileRows : kTileRows;
  return (rows + height - 1) / height;
}
inline int64_t first_row(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }

// out[row][half] = row of the tile . panel. Each output is one chain of float32 sums over its groups in order.
template <int Rows, typename Panel>
void multiply(const int32_t* x, int64_t groups, Panel panel, vec (&out)[Rows][2]) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  for (const int32_t* const end = x + groups * Rows * kRowUnits; x < end; x += Rows * kRowUnits, panel.next()) {
    const auto start = [&](int row) { return splat_int(Panel::kUnsigned ? x[kStarts * Rows + row] : kCenterBits); };
    ivec dots[Rows][2];
    typename Panel::GroupTotals totals[2];
    const auto add_word = [&](int word, auto is_first) __attribute__((always_inline)) {
      unroll<Panel::kParts>([&](auto part) __attribute__((always_inline)) {
        const ivec weights[2] = {panel.template weights<part>(word, 0), panel.template weights<part>(word, 1)};
        unroll<2>([&](auto half) { totals[half].add(weights[half]); });
        unroll<Rows>([&](auto row) __attribute__((always_inline)) {
          const ivec inputs = splat_int(x[kValues * Rows + row * kSteps + part * Panel::kWords + word]);
          unroll<2>([&](auto half) __attribute__((always_inline)) {
            if constexpr (is_first && part == 0) {
              dots[row][half] = first_products<Panel::kUnsigned>(start(row), inputs, weights[half]);
            } else {
              dots[row][half] = next_products(dots[row][half], inputs, weights[half]);
            }
          });
        });
      });
    };
    add_word(0, std::true_type());
#pragma GCC unroll 1
    for (int word = 1; word < Panel::kWords; ++word) add_word(word, std::false_type());

    const vec scales[2] = {panel.scales(0), panel.scales(1)};
    const vec weight_sums[2] = {panel.sums(0, totals[0]), panel.sums(1, totals[1])};
    vec minima[2];
    if constexpr (Panel::kAffine) {
      minima[0] = panel.minima(0);
      minima[1] = panel.minima(1);
    }
    unroll<Rows>([&](auto row) __attribute__((always_inline)) {
      const auto of_row = [&](int part) { return as_vec(splat_int(x[part * Rows + row])); };
      const vec scale = of_row(kScales), center = of_row(kCenters), zeros = of_row(kZeros), input_sum = of_row(kSums);
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        vec sum = sums[row][half];
        if constexpr (Panel::kAffine) sum = fma(input_sum, minima[half], sum);
        sum = fma(zeros, weight_sums[half], sum);
        const vec dot = as_vec(dot_of(dots[row][half], start(row)));
        sums[row][half] = fma(fma(dot, scale, center), scales[half], sum);
      });
    });
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

// The tile of `rows` rows, by the template made for that number.
template <int Rows, typename Panel>
void multiply_rows(const Linear& args, const int32_t* x, int64_t row, int64_t rows, Panel weights, int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<Rows - 1>(args, x, row, rows, weights, panel);
  }
  vec sums[Rows][2];
  multiply<Rows>(x, args.in_features / kGroup, weights, sums);
  for (int i = 0; i < Rows; ++i) finish_row(args, row + i, panel, sums[i][0], sums[i][1]);
}

inline int64_t row_units(const Linear& args) { return args.in_features / kGroup * kRowUnits; }

// The rows of a tile in bytes; to: of all rows.
template <typename X>
void quantize_tile(const Linear& args, int64_t rows, int64_t tile, int32_t* to) {
  const int64_t groups = args.in_features / kGroup;
  const int64_t begin = first_row(tile, rows), height = first_row(tile + 1, rows) - begin, count = height * groups;
  make_rows(args.stages, begin, begin + height);
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
    quantize_groups(x, row_of, places, height);
  }
}

inline void quantize_tile(const Linear& args, int64_t rows, int64_t tile, int32_t* to) {
  args.dtype == kFloat32 ? quantize_tile<float>(args, rows, tile, to) : quantize_tile<bf16>(args, rows, tile, to);
}

template <typename F>
Packed<F> packed_panel(const Linear& args, int64_t panel) {
  return {static_cast<const char*>(args.weight) + panel * (args.in_features / kGroup) * F::kGroupBytes};
}

// A tile of rows with a panel, of which MaxRows is the largest height.
template <int MaxRows, typename Panel>
void multiply_tile(const Linear& args, const int32_t* x, int64_t rows, int64_t tile, Panel weights, int64_t panel) {
  const int64_t row = first_row(tile, rows);
  multiply_rows<MaxRows>(args, x + row * row_units(args), row, first_row(tile + 1, rows) - row, weights, panel);
}

// Few rows with a panel, which each tile unpacks.
template <typename F>
void multiply_few_rows(const Linear& args, const int32_t* x, int64_t rows, int64_t panel) {
  for (int64_t tile = 0; tile < num_tiles(rows); ++tile) {
    multiply_tile<kPackedTileRows>(args, x, rows, tile, packed_panel<F>(args, panel), panel);
  }
}

// The panel unpacked, in memory of the calling thread.
template <typename F>
Unpacked<F::kAffine> unpacked_panel(const Linear& args, int64_t panel) {
  static thread_local Scratch memory;
  using Weights = Unpacked<F::kAffine>;
  const int64_t groups = args.in_features / kGroup;
  const Weights weights{static_cast<float*>(memory.get(groups * Weights::kGroupFloats * sizeof(float)))};
  unpack(packed_panel<F>(args, panel), groups, weights);
  return weights;
}

// Ask for part `part` of `parts` of these bytes.
inline void prefetch_part(const char* from, int64_t bytes, int64_t part, int64_t parts) {
  const int64_t lines = bytes / 64;
  for (int64_t line = lines * part / parts; line < lines * (part + 1) / parts; ++line) prefetch_line(from + 64 * line);
}

template <typename F>
void multiply(const Linear& args, int64_t rows) {
  static thread_local Scratch scratch;
  const int64_t row_bytes = row_units(args) * sizeof(int32_t), tiles = num_tiles(rows), panels = args.num_panels();
  auto* x = static_cast<int32_t*>(scratch.get(rows * row_bytes));
  parallel_for(tiles, [&](int64_t tile) { quantize_tile(args, rows, tile, x); });
  if (rows <= kFewRows) {
    return for_blocks(rows, row_bytes, panels, kBlockRows<float>, [&](const Block& block) {
      for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) multiply_few_rows<F>(args, x, rows, panel);
    });
  }
  // All rows walk a panel, which is unpacked once; in blocks only if there are few panels to share out. Inputs come from
  // the second or third cache at a rate far below theirs: a tile multiplies each byte with a whole panel.
  constexpr int64_t kItemsPerThread = 4, kMinTiles = 8;
  const int64_t max_blocks = (kItemsPerThread * num_threads() + panels - 1) / panels;
  const int64_t blocks = std::clamp<int64_t>(tiles / kMinTiles, 1, max_blocks);
  const int64_t panel_bytes = args.in_features / kGroup * F::kGroupBytes;
  parallel_for(blocks * panels, [&](int64_t index) {
    const int64_t block = index / panels, panel = index % panels;
    const auto weights = unpacked_panel<F>(args, panel);
    // meanwhile the panel that this thread is likely to take next comes from memory
    const int64_t first = tiles * block / blocks, end = tiles * (block + 1) / blocks, next = panel + num_threads();
    for (int64_t tile = first; tile < end; ++tile) {
      if (next < panels) prefetch_part(packed_panel<F>(args, next).at, panel_bytes, tile - first, end - first);
      multiply_tile<kTileRows>(args, x, rows, tile, weights, panel);
    }
  });
}

// The steps of such a product.
template <typename F>
ProductSteps product(void (*run)(const Linear& args, const WeightForm& form, int64_t rows)) {
  return {
      .tile_height = [](int64_t rows) -> int64_t { return rows <= kFewRows ? kPackedTileRows : kTileRows; },
      .input_bytes = [](const Linear& args, int64_t rows) -> int64_t { return rows * row_units(args) * sizeof(int32_t); },
      .prepare = [](const Linear& args, int64_t rows, int64_t tile, void* inputs) {
        quantize_tile(args, rows, tile, static_cast<int32_t*>(inputs));
      },
      .multiply = [](const Linear& args, const WeightForm&, int64_t rows, const void* inputs, int64_t panel) {
        const auto* x = static_cast<const int32_t*>(inputs);
        if (rows <= kFewRows) return multiply_few_rows<F>(args, x, rows, panel);
        const auto weights = unpacked_panel<F>(args, panel);
        for (int64_t tile = 0; tile < num_tiles(rows); ++tile) {
          multiply_tile<kTileRows>(args, x, rows, tile, weights, panel);
        }
      },
      .run = run,
  };
}

}  // namespace triptych::bytes
