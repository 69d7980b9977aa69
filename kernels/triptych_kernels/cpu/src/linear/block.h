// Products of a block of rows with a run of panels, by the tiles that the instruction set has for the type.
#pragma once

#include "linear/tile.h"

#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)
#include "linear/amx_tile.h"
#endif

namespace triptych {

// x: of row 0, rows x_stride elements apart; weights: of the block's first panel. Results go where `args` says.
template <typename T>
void multiply_block(const Linear& args, const T* x, int64_t x_stride, const T* weights, const Block& block) {
  for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel, weights += args.in_features * kPanel) {
    for_row_tiles(block.first_row, block.end_row, kMaxTileRows, [&](int64_t row, int64_t count) {
      multiply_rows(args, x + row * x_stride, x_stride, weights, row, count, panel);
    });
  }
}

// The same of all rows with one panel of which unpack(groups, to) makes the next so many groups of 32 inputs.
template <typename Unpack>
void multiply_unpacked(const Linear& args, const bf16* x, int64_t x_stride, int64_t rows, int64_t panel,
                       const Unpack& unpack) {
#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)
  amx::multiply_unpacked(args, x, x_stride, rows, panel, unpack);
#else
  static thread_local Scratch memory;
  auto* const weights = static_cast<bf16*>(memory.get(args.in_features * kPanel * sizeof(bf16)));
  unpack(args.in_features / 32, weights);
  multiply_block<bf16>(args, x, x_stride, weights, {0, rows, panel, panel + 1});
#endif
}

// How many rows a block of them has.
template <typename T>
constexpr BlockRows kBlockRows = {.tile = 12, .min = 48, .multiple = 1};

#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)

template <>
inline void multiply_block(const Linear& args, const bf16* x, int64_t x_stride, const bf16* weights,
                           const Block& block) {
  amx::multiply_block(args, x, x_stride, weights, block);
}

// whole tiles in every block but the last
template <>
constexpr BlockRows kBlockRows<bf16> = {.tile = amx::kMaxRows, .min = 2 * amx::kMaxRows, .multiple = amx::kMaxRows};

#endif

}  // namespace triptych
