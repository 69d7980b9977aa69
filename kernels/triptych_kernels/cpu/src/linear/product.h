// Products in two steps, which a kernel shares out among threads itself: the inputs are prepared tile by tile, then each
// panel is multiplied with all rows. Both run on the calling thread. A row's result is that of the kernel of the weight,
// bit by bit.
#pragma once

#include "linear/panel.h"

namespace triptych {

// The form in which a weight is held, as the arguments name it.
enum WeightKind : int64_t { kPackedWeight = 0, kWidenedWeight = 1, kQuantizedWeight = 2, kCodedWeight = 3 };

// What a product depends on beside `Linear`.
struct WeightForm {
  int64_t kind;
  int64_t form;        // of widened weights, see widened_linear.cpp; of coded ones, see coded.h
  int64_t bits;        // this and what follows: of quantized weights; see quantized_linear.cpp
  int64_t affine;
  int64_t input_bits;
  int64_t wide_rows;
  int64_t wide_bits;
};

struct ProductSteps {
  int64_t (*tile_height)(int64_t rows);  // rows that are prepared together at most
  int64_t (*input_bytes)(const Linear& args, int64_t rows);
  // inputs: [input_bytes] of all rows
  void (*prepare)(const Linear& args, int64_t rows, int64_t tile, void* inputs);
  void (*multiply)(const Linear& args, const WeightForm& form, int64_t rows, const void* inputs, int64_t panel);
  // Both steps in loops of its own, which is faster for many rows.
  void (*run)(const Linear& args, const WeightForm& form, int64_t rows);

  int64_t num_tiles(int64_t rows) const { return (rows + tile_height(rows) - 1) / tile_height(rows); }
  int64_t first_row(int64_t tile, int64_t rows) const { return rows * tile / num_tiles(rows); }
};

// args.dtype: of the inputs
ProductSteps packed_product(const Linear& args);
ProductSteps widened_product(const WeightForm& form);
ProductSteps quantized_product(const WeightForm& form);
ProductSteps coded_product(const Linear& args, const WeightForm& form);

inline ProductSteps product_of(const Linear& args, const WeightForm& form) {
  switch (form.kind) {
    case kWidenedWeight: return widened_product(form);
    case kQuantizedWeight: return quantized_product(form);
    case kCodedWeight: return coded_product(args, form);
    default: return packed_product(args);
  }
}

}  // namespace triptych
