// Products of a tile of rows with one panel of bfloat16 weights.
//
// Each output is one chain of sums over its inputs in order, for any number of rows, so a row's result does
// not depend on its batch.
#pragma once

#include "linear/finish.h"
#include "simd/scalar.h"

namespace triptych {

constexpr int kMaxTileRows = kRegisters == 32 ? 12 : 6;  // 24 sums, two weights and an input in 32 registers
constexpr int64_t kPrefetchBytes = 2048;  // ahead of the weights in hand; past a panel lies the next one

// Inputs of a tile's rows, one step at a time. Every third row has a pointer of its own and the next two are reached
// from it by one and two strides, which an instruction's address can say: twelve addresses would not fit the
// registers.
template <typename T>
struct Inputs {
  const T *rows0, *rows3, *rows6, *rows9;
  int64_t stride;

  Inputs(const T* x, int64_t x_stride)
      : rows0(x), rows3(x + 3 * x_stride), rows6(x + 6 * x_stride), rows9(x + 9 * x_stride), stride(x_stride) {}
  const T* row(int row) const {
    const T* first = row < 3 ? rows0 : row < 6 ? rows3 : row < 9 ? rows6 : rows9;
    return first + row % 3 * stride;
  }
  void advance(int64_t count) {
    rows0 += count;
    rows3 += count;
    rows6 += count;
    rows9 += count;
  }
};

// out[row][half] = x[row] . panel, over `in_features`, in pairs: by the instruction for them, or as two products in
// float32.
template <int Rows>
void multiply(const bf16* x, int64_t x_stride, const bf16* panel, int64_t in_features, vec (&out)[Rows][2]) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
  Inputs<bf16> inputs(x, x_stride);
  for (int64_t k = 0; k < in_features; k += 2, panel += 2 * kPanel, inputs.advance(2)) {
    prefetch_once<2 * kPanel * sizeof *panel>(panel + kPrefetchBytes / sizeof *panel);
    const vec halves[2] = {load(reinterpret_cast<const float*>(panel)),
                           load(reinterpret_cast<const float*>(panel + kPanel))};
    if constexpr (kHasBf16Products) {
      unroll<Rows>([&](auto row) {
        int32_t pair;
        std::memcpy(&pair, inputs.row(row), sizeof pair);
        const vec value = as_vec(splat_int(pair));
        sums[row][0] = add_bf16_dot(sums[row][0], value, halves[0]);
        sums[row][1] = add_bf16_dot(sums[row][1], value, halves[1]);
      });
    } else {
      unroll<2>([&](auto half) {
        const vec low = even(halves[half]), high = odd(halves[half]);
        unroll<Rows>([&](auto row) {
          const bf16* pair = inputs.row(row);
          sums[row][half] = fma(splat(to_float(pair[0])), low, sums[row][half]);
          sums[row][half] = fma(splat(to_float(pair[1])), high, sums[row][half]);
        });
      });
    }
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

template <int Rows, typename T>
void multiply_tile(const Linear& args, const T* x, int64_t x_stride, const T* weights, int64_t row, int64_t panel) {
  vec sums[Rows][2];
  multiply<Rows>(x, x_stride, weights, args.in_features, sums);
  finish_rows(args, row, Rows, panel, sums);
}

// A tile of up to kMaxTileRows rows, by the template made for their number.
//
// x: of the first row, rows x_stride elements apart; weights: of the panel. `row` and `panel` say where the results
// go.
template <typename T, int Rows = kMaxTileRows>
void multiply_rows(const Linear& args, const T* x, int64_t x_stride, const T* weights, int64_t row, int64_t rows,
                   int64_t panel) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<T, Rows - 1>(args, x, x_stride, weights, row, rows, panel);
  }
  multiply_tile<Rows, T>(args, x, x_stride, weights, row, panel);
}

}  // namespace triptych
