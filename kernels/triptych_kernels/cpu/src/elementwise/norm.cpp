// Residual addition and normalisation in one pass over a vector; float32 inside, rounded once.
#include <algorithm>
#include <cmath>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"
#include "stages.h"

namespace triptych {
namespace {

struct Norm {
  int64_t x_dtype;
  int64_t weight_dtype;
  int64_t out_dtype;
  int64_t residual_dtype;
  const void* x;            // [rows, vectors, size], rows x_stride elements apart
  int64_t x_stride;
  const void* weight;       // [size] or null
  const void* residual;     // [rows, vectors, size] or null
  float* sum;               // [rows, vectors, size], x + residual, or null
  void* out;                // [rows, vectors, size]
  int64_t vectors;          // number of vectors of a row, each normalised on its own: 1, or the heads of a token
  int64_t size;
  double eps;
};

struct LayerNorm {
  Norm norm;
  const void* bias;         // [size] of the weight's dtype, or null
};

constexpr int64_t kRowsPerIndex = 4;

// The elements of a weight that does not exist.
struct Ones {};

template <typename W>
vec weights_at(const W* weight, int64_t i) {
  if constexpr (std::is_same_v<W, Ones>) return splat(1.0f);
  else return load(weight + i);
}

template <typename W>
float weight_at(const W* weight, int64_t i) {
  if constexpr (std::is_same_v<W, Ones>) return 1.0f;
  else return to_float(weight[i]);
}

// One vector: of which elements, and where its results go.
template <typename X, typename W, typename O>
struct Vector {
  const X* x;
  const W* weight;
  const void* residual;     // or null
  bool residual_is_narrow;  // bfloat16 in place of float32
  float* sum;               // with a residual
  O* out;
  int64_t size;
  float eps;

  vec residuals(int64_t i) const {
    if (residual_is_narrow) return load(static_cast<const bf16*>(residual) + i);
    return load(static_cast<const float*>(residual) + i);
  }
  float residual_at(int64_t i) const {
    if (residual_is_narrow) return to_float(static_cast<const bf16*>(residual)[i]);
    return static_cast<const float*>(residual)[i];
  }

  // x or its sum with the residual, once that is stored
  vec values(int64_t i) const { return residual ? load(sum + i) : load(x + i); }
  float value(int64_t i) const { return residual ? sum[i] : to_float(x[i]); }
};

template <typename X, typename W, typename O>
void rms_norm(const Vector<X, W, O>& v) {
  vec squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= v.size; i += kLanes) {
    vec value = load(v.x + i);
    if (v.residual) {
      value = value + v.residuals(i);
      store(v.sum + i, value);
    }
    squares = fma(value, value, squares);
  }
  float sum_of_squares = sum(squares);
  for (int64_t j = i; j < v.size; ++j) {
    float value = to_float(v.x[j]);
    if (v.residual) v.sum[j] = value += v.residual_at(j);
    sum_of_squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum_of_squares / static_cast<float>(v.size) + v.eps);
  const vec scales = splat(scale);
  for (i = 0; i + kLanes <= v.size; i += kLanes) store(v.out + i, v.values(i) * scales * weights_at(v.weight, i));
  for (; i < v.size; ++i) store_one(v.out + i, v.value(i) * scale * weight_at(v.weight, i));
}

// The mean is subtracted before squares are summed, since their difference would lose what both have in common.
template <typename X, typename W, typename O>
void layer_norm(const Vector<X, W, O>& v, const W* bias) {
  vec totals = zero();
  int64_t i = 0;
  for (; i + kLanes <= v.size; i += kLanes) {
    vec value = load(v.x + i);
    if (v.residual) {
      value = value + v.residuals(i);
      store(v.sum + i, value);
    }
    totals = totals + value;
  }
  float total = sum(totals);
  for (; i < v.size; ++i) {
    float value = to_float(v.x[i]);
    if (v.residual) v.sum[i] = value += v.residual_at(i);
    total += value;
  }
  const float mean = total / static_cast<float>(v.size);
  const vec means = splat(mean);
  vec squares = zero();
  for (i = 0; i + kLanes <= v.size; i += kLanes) {
    const vec distance = v.values(i) - means;
    squares = fma(distance, distance, squares);
  }
  float sum_of_squares = sum(squares);
  for (; i < v.size; ++i) sum_of_squares += (v.value(i) - mean) * (v.value(i) - mean);
  const float scale = 1.0f / std::sqrt(sum_of_squares / static_cast<float>(v.size) + v.eps);
  const vec scales = splat(scale);
  for (i = 0; i + kLanes <= v.size; i += kLanes) {
    const vec normalised = (v.values(i) - means) * scales;
    store(v.out + i, fma(normalised, weights_at(v.weight, i), bias ? weights_at(bias, i) : zero()));
  }
  for (; i < v.size; ++i) {
    const float normalised = (v.value(i) - mean) * scale;
    store_one(v.out + i, std::fma(normalised, weight_at(v.weight, i), bias ? weight_at(bias, i) : 0.0f));
  }
}

// f(vector) for every vector of rows first … end - 1.
template <typename X, typename W, typename O, typename F>
void for_vectors(const Norm& args, int64_t first, int64_t end, const F& f) {
  static thread_local Scratch scratch;
  const int64_t size = args.size, vectors = args.vectors;
  const bool is_narrow = args.residual_dtype == kBfloat16;
  const auto* const residual = static_cast<const char*>(args.residual);
  float* const own_sum = residual && !args.sum ? static_cast<float*>(scratch.get(size * sizeof(float))) : nullptr;
  for (int64_t row = first; row < end; ++row) {
    for (int64_t vector = 0; vector < vectors; ++vector) {
      const int64_t at = (row * vectors + vector) * size;
      f(Vector<X, W, O>{static_cast<const X*>(args.x) + row * args.x_stride + vector * size,
                        static_cast<const W*>(args.weight),
                        residual ? residual + at * (is_narrow ? sizeof(bf16) : sizeof(float)) : nullptr, is_narrow,
                        args.sum ? args.sum + at : own_sum, static_cast<O*>(args.out) + at, size,
                        static_cast<float>(args.eps)});
    }
  }
}

// f(element) of the type that the arguments name.
template <typename F>
void with_type(int64_t dtype, const F& f) {
  dtype == kFloat32 ? f(float()) : f(bf16());
}

// f(x, weight, out), elements of the types that the arguments name.
template <typename F>
void with_types(const Norm& args, const F& f) {
  with_type(args.x_dtype, [&](auto x) {
    with_type(args.out_dtype, [&](auto out) {
      if (!args.weight) return f(x, Ones(), out);
      with_type(args.weight_dtype, [&](auto weight) { f(x, weight, out); });
    });
  });
}

}  // namespace
}  // namespace triptych

TRIPTYCH_STAGE(rms_norm, triptych::Norm) {
  using namespace triptych;
  with_types(args, [&]<typename X, typename W, typename O>(X, W, O) {
    for_vectors<X, W, O>(args, first, end, [](const Vector<X, W, O>& vector) { rms_norm(vector); });
  });
}

TRIPTYCH_STAGE(layer_norm, triptych::LayerNorm) {
  using namespace triptych;
  with_types(args.norm, [&]<typename X, typename W, typename O>(X, W, O) {
    const W* const bias = static_cast<const W*>(args.bias);
    for_vectors<X, W, O>(args.norm, first, end, [&](const Vector<X, W, O>& vector) { layer_norm(vector, bias); });
  });
}

TRIPTYCH_KERNEL(rms_norm, triptych::Norm,
                x_dtype, weight_dtype, out_dtype, residual_dtype, x, x_stride, weight, residual, sum, out, vectors,
                size, eps) {
  triptych::for_rows(rows, triptych::kRowsPerIndex,
                     [&](int64_t first, int64_t end) { triptych_rms_norm_rows(args, first, end); });
}

TRIPTYCH_KERNEL(layer_norm, triptych::LayerNorm,
                norm.x_dtype, norm.weight_dtype, norm.out_dtype, norm.residual_dtype, norm.x, norm.x_stride,
                norm.weight, norm.residual, norm.sum, norm.out, norm.vectors, norm.size, norm.eps, bias) {
  triptych::for_rows(rows, triptych::kRowsPerIndex,
                     [&](int64_t first, int64_t end) { triptych_layer_norm_rows(args, first, end); });
}
