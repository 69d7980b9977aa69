// Residual addition and RMS normalisation in one pass over a row; float32 inside, rounded once.
#include <algorithm>
#include <cmath>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"

namespace triptych {
namespace {

struct RmsNorm {
  int64_t x_dtype;
  int64_t dtype;            // of weight and out
  const void* x;            // [rows, vectors, size], rows x_stride elements apart
  int64_t x_stride;
  const void* weight;       // [size]
  const float* residual;    // [rows, vectors, size] or null
  float* sum;               // [rows, vectors, size], x + residual; null without a residual
  void* out;                // [rows, vectors, size]
  int64_t vectors;          // number of vectors of a row, each normalised on its own: 1, or the heads of a token
  int64_t size;
  double eps;
};

constexpr int64_t kRowsPerIndex = 4;

template <typename X, typename T>
void norm_vector(const X* x, const T* weight, const float* residual, float* sum_out, T* out, int64_t size, float eps) {
  vec squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    vec value = load(x + i);
    if (residual) {
      value = value + load(residual + i);
      store(sum_out + i, value);
    }
    squares = fma(value, value, squares);
  }
  float sum_of_squares = sum(squares);
  for (int64_t j = i; j < size; ++j) {
    float value = to_float(x[j]);
    if (residual) sum_out[j] = value += residual[j];
    sum_of_squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum_of_squares / static_cast<float>(size) + eps);
  const vec scales = splat(scale);
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const vec value = residual ? load(sum_out + i) : load(x + i);
    store(out + i, value * scales * load(weight + i));
  }
  for (; i < size; ++i) store_one(out + i, (residual ? sum_out[i] : to_float(x[i])) * scale * to_float(weight[i]));
}

template <typename X, typename T>
void norm_rows(const RmsNorm& args, int64_t rows) {
  const int64_t size = args.size, vectors = args.vectors;
  parallel_for((rows + kRowsPerIndex - 1) / kRowsPerIndex, [&](int64_t index) {
    const int64_t end = std::min((index + 1) * kRowsPerIndex, rows);
    for (int64_t row = index * kRowsPerIndex; row < end; ++row) {
      for (int64_t vector = 0; vector < vectors; ++vector) {
        const int64_t at = (row * vectors + vector) * size;
        norm_vector(static_cast<const X*>(args.x) + row * args.x_stride + vector * size,
                    static_cast<const T*>(args.weight), args.residual ? args.residual + at : nullptr,
                    args.sum ? args.sum + at : nullptr, static_cast<T*>(args.out) + at, size,
                    static_cast<float>(args.eps));
      }
    }
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(rms_norm, triptych::RmsNorm,
                x_dtype, dtype, x, x_stride, weight, residual, sum, out, vectors, size, eps) {
  using namespace triptych;
  if (args.dtype == kFloat32) return norm_rows<float, float>(args, rows);
  if (args.x_dtype == kFloat32) return norm_rows<float, bf16>(args, rows);
  norm_rows<bf16, bf16>(args, rows);
}
