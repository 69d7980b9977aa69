// Products with packed float32 and bfloat16 weights, float32 sums.
#include "linear/block.h"
#include "linear/float_tile.h"

namespace triptych {
namespace {

void multiply_bfloat16(const Linear& args, int64_t rows) {
  const bf16* const x = static_cast<const bf16*>(args.x);
  const bf16* const weights = static_cast<const bf16*>(args.weight);
  const int64_t panel_size = args.in_features * kPanel;
  make_all_rows(args.stages);
  for_blocks(rows, args.in_features * sizeof(bf16), args.num_panels(), kBlockRows<bf16>, [&](const Block& block) {
    multiply_block(args, x, args.x_stride, weights + block.first_panel * panel_size, block);
  });
}

// Copies of rows into the panels of a weight.
struct Pack {
  int64_t dtype;
  const void* rows;      // [rows, in_features]
  void* panels;
  int64_t in_features;
  int64_t first_row;     // where the first row goes, in its piece
  int64_t half;          // as for place_of
};

template <typename T>
void pack(const Pack& args, int64_t rows) {
  constexpr int64_t kTogether = sizeof(T) == 2 ? 2 : 1;  // neighbouring inputs
  constexpr int64_t kLine = 64 / sizeof(T) / kTogether;  // groups of them that a cache line of a row holds
  const int64_t groups = args.in_features / kTogether, lanes = args.half < 0 ? kPanel : kLanes;
  const int64_t first = args.first_row, end = first + rows;
  // rows of one panel write into the same lines, so one thread takes them all
  parallel_for((end - 1) / lanes - first / lanes + 1, [&](int64_t index) {
    const int64_t panel_row = (first / lanes + index) * lanes;
    const int64_t begin_row = std::max(panel_row, first), end_row = std::min(panel_row + lanes, end);
    for (int64_t line = 0; line < groups; line += kLine) {
      for (int64_t row = begin_row; row < end_row; ++row) {
        const T* from = static_cast<const T*>(args.rows) + (row - first) * args.in_features;
        const Place place = place_of(row, args.half);
        T* to = static_cast<T*>(args.panels) + place.panel * args.in_features * kPanel + place.lane * kTogether;
        for (int64_t group = line; group < std::min(line + kLine, groups); ++group) {
          std::memcpy(to + group * kPanel * kTogether, from + group * kTogether, kTogether * sizeof(T));
        }
      }
    }
  });
}

// Rows of a weight, as an embedding reads them.
struct Embedding {
  int64_t dtype;
  int64_t out_dtype;
  int64_t is_packed;
  const void* weight;        // panels, or [tokens, size]
  const int64_t* token_ids;  // [rows]
  void* out;                 // [rows, size]
  int64_t size;
};

template <typename T, typename O>
void embed(const Embedding& args, int64_t rows) {
  constexpr int64_t kTogether = sizeof(T) == 2 ? 2 : 1;
  parallel_for(rows, [&](int64_t row) {
    const T* from = static_cast<const T*>(args.weight);
    O* to = static_cast<O*>(args.out) + row * args.size;
    if (!args.is_packed) {
      from += args.token_ids[row] * args.size;
      for (int64_t k = 0; k < args.size; ++k) store_one(to + k, to_float(from[k]));
      return;
    }
    const Place place = place_of(args.token_ids[row], -1);
    from += place.panel * args.size * kPanel + place.lane * kTogether;
    for (int64_t k = 0; k < args.size; k += kTogether, from += kPanel * kTogether) {
      prefetch_once(from + 16 * kPanel * kTogether);
      for (int64_t i = 0; i < kTogether; ++i) store_one(to + k + i, to_float(from[i]));
    }
  });
}

struct GatherRows {
  const void* x;
  const int64_t* rows;  // [rows]
  void* out;
  int64_t row_bytes;
};

}  // namespace

ProductSteps packed_product(const Linear& args) {
  if (args.dtype == kFloat32) {
    return float_product<Float32Line>([](const Linear& linear, const WeightForm&, int64_t rows) {
      multiply_floats<Float32Line>(linear, rows);
    });
  }
  return {  // rows are read where they lie
      .tile_height = [](int64_t) -> int64_t { return kMaxTileRows; },
      .input_bytes = [](const Linear&, int64_t) -> int64_t { return 0; },
      .prepare = [](const Linear&, int64_t, int64_t, void*) {},
      .multiply = [](const Linear& linear, const WeightForm&, int64_t rows, const void*, int64_t panel) {
        const bf16* weights = static_cast<const bf16*>(linear.weight) + panel * linear.in_features * kPanel;
        multiply_block(linear, static_cast<const bf16*>(linear.x), linear.x_stride, weights, {0, rows, panel, panel + 1});
      },
      .run = [](const Linear& linear, const WeightForm&, int64_t rows) { multiply_bfloat16(linear, rows); },
  };
}

}  // namespace triptych

TRIPTYCH_KERNEL(linear, triptych::Linear,
                dtype, out_dtype, x, x_stride, weight, bias, out, out_stride, in_features, out_features, activation,
                gated, stages, slots, adapters, num_adapters, adapted, adapter_dtype) {
  triptych::with_adapters(args, rows, [&](const triptych::Linear& linear) {
    if (args.dtype == triptych::kFloat32) return triptych::multiply_floats<triptych::Float32Line>(linear, rows);
    triptych::multiply_bfloat16(linear, rows);
  });
}

TRIPTYCH_KERNEL(pack_rows, triptych::Pack,
                dtype, rows, panels, in_features, first_row, half) {
  if (args.dtype == triptych::kFloat32) return triptych::pack<float>(args, rows);
  triptych::pack<triptych::bf16>(args, rows);
}

TRIPTYCH_KERNEL(embedding, triptych::Embedding,
                dtype, out_dtype, is_packed, weight, token_ids, out, size) {
  using namespace triptych;
  if (args.dtype == kFloat32) return embed<float, float>(args, rows);
  if (args.out_dtype == kFloat32) return embed<bf16, float>(args, rows);
  embed<bf16, bf16>(args, rows);
}

TRIPTYCH_KERNEL(gather_rows, triptych::GatherRows,
                x, rows, out, row_bytes) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<char*>(args.out) + row * args.row_bytes,
                static_cast<const char*>(args.x) + args.rows[row] * args.row_bytes, args.row_bytes);
  }
}

extern "C" int64_t triptych_panel_size() { return triptych::kPanel; }
