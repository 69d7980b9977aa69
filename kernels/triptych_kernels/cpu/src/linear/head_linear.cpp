// Products of each head's inputs with a weight of its own, as if all heads together were one product with a weight that
// is zero but for its diagonal blocks:
//
//   out[row][head] = weight[head] . x[row][head]
//
// The panels of all heads lie one after the other, each head's beginning with a panel of its own.
#include "linear/block.h"
#include "linear/float_tile.h"

namespace triptych {
namespace {

struct HeadLinear {
  Linear linear;  // of the first head: its x and out, with rows as far apart as those of all heads
  int64_t num_heads;
  int64_t x_head_stride;    // elements from head to head
  int64_t out_head_stride;

  template <typename T, typename O>
  Linear of_head(int64_t head) const {
    Linear own = linear;
    own.x = static_cast<const T*>(linear.x) + head * x_head_stride;
    own.out = static_cast<O*>(linear.out) + head * out_head_stride;
    own.weight = static_cast<const T*>(linear.weight) + head * linear.num_panels() * linear.in_features * kPanel;
    return own;
  }

  template <typename T>
  Linear of_head(int64_t head) const {
    return linear.out_dtype == kFloat32 ? of_head<T, float>(head) : of_head<T, bf16>(head);
  }
};

// f(arguments of a head's product, a block of it), the heads' panels one after the other.
template <typename T, typename F>
void for_head_blocks(const HeadLinear& args, int64_t rows, int64_t row_bytes, const BlockRows& block_rows, const F& f) {
  const int64_t num_panels = args.linear.num_panels();
  for_blocks(rows, row_bytes, args.num_heads * num_panels, block_rows, [&](const Block& block) {
    const int64_t head = block.first_panel / num_panels, panel = block.first_panel % num_panels;
    f(args.of_head<T>(head), Block{block.first_row, block.end_row, panel, panel + 1});
  });
}

void multiply_bfloat16(const HeadLinear& args, int64_t rows) {
  const int64_t in_features = args.linear.in_features, panel_size = in_features * kPanel;
  for_head_blocks<bf16>(args, rows, in_features * sizeof(bf16), kBlockRows<bf16>,
                        [&](const Linear& own, const Block& block) {
                          multiply_block(own, static_cast<const bf16*>(own.x), own.x_stride,
                                         static_cast<const bf16*>(own.weight) + block.first_panel * panel_size, block);
                        });
}

template <int Rows = kMaxTileRows>
void multiply_float32(const HeadLinear& args, int64_t rows) {
  if (rows > kMaxTileRows) {
    for (int64_t head = 0; head < args.num_heads; ++head) multiply_many<Float32Line>(args.of_head<float>(head), rows);
    return;
  }
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_float32<Rows - 1>(args, rows);
  }
  const int64_t panel_size = args.linear.in_features * kPanel;
  for_head_blocks<float>(args, rows, 1, {Rows, Rows, 1}, [&](const Linear& own, const Block& block) {
    const float* weights = static_cast<const float*>(own.weight) + block.first_panel * panel_size;
    multiply_few<Float32Line, Rows>(own, weights, block.first_panel);
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(head_linear, triptych::HeadLinear,
                linear.dtype, linear.out_dtype, linear.x, linear.x_stride, linear.weight, linear.bias, linear.out,
                linear.out_stride, linear.in_features, linear.out_features, linear.activation, linear.gated,
                linear.stages, linear.slots, linear.adapters, linear.num_adapters, linear.adapted,
                linear.adapter_dtype, num_heads, x_head_stride, out_head_stride) {
  triptych::make_all_rows(args.linear.stages);
  if (args.linear.dtype == triptych::kFloat32) return triptych::multiply_float32(args, rows);
  triptych::multiply_bfloat16(args, rows);
}
