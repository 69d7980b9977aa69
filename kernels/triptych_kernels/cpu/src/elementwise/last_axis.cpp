// What torch computes over one axis of each row: sums, norms, softmax.
#include <algorithm>
#include <cmath>

#include "elementwise/strided.h"
#include "kernel.h"
#include "parallel.h"
#include "simd/functions.h"
#include "stages.h"

// Operations; Python learns names and order from `triptych_last_axis_operations`.
#define TRIPTYCH_OPERATIONS(f)                                                                      \
  f(sum) f(mean) f(amax) f(amin) f(norm) f(var) f(std) f(softmax) f(log_softmax) f(layer_norm) f(rms_norm)

namespace triptych {
namespace {

enum Operation : int64_t {
#define TRIPTYCH_ENUM(name) k_##name,
  TRIPTYCH_OPERATIONS(TRIPTYCH_ENUM)
#undef TRIPTYCH_ENUM
};

constexpr int64_t kElementsPerIndex = 8192;

// The layout of the int64 tensor `code`.
struct Code {
  int64_t operation;
  int64_t sizes[kAxes];  // of the axes of a row of x, the last is computed over
  Strided x, out;        // the last stride of out is not read for one result per line
  int64_t weight_dtype, bias_dtype;
  double parameter;      // eps of a norm; what is subtracted from the number of elements in a variance
};

struct LastAxis {
  const int64_t* code;
  const void* x;
  const void* weight;  // [size] or null
  const void* bias;    // [size] or null
  void* out;
};

bool gives_lines(int64_t operation) { return operation >= k_softmax; }

// f(vector) added up over the elements, f(element) for the last ones.
template <typename F>
float sum_of(const float* x, int64_t size, const F& f) {
  vec sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums = sums + f(load(x + i));
  float total = sum(sums);
  if (i < size) {
    float rest[kLanes] = {};
    std::copy(x + i, x + size, rest);
    total += sum(only((1u << (size - i)) - 1, f(load(rest))));
  }
  return total;
}

float sum_of_squares(const float* x, int64_t size, float mean) {
  return sum_of(x, size, [=](vec v) { return (v - splat(mean)) * (v - splat(mean)); });
}

template <typename F>
void change(float* x, int64_t size, const F& f) {  // x has room for whole vectors
  for (int64_t i = 0; i < size; i += kLanes) store(x + i, f(load(x + i)));
}

float extreme(const float* x, int64_t size, bool is_largest) {
  float found = x[0];
  for (int64_t i = 1; i < size; ++i) {
    if (std::isnan(x[i]) || (is_largest ? x[i] > found : x[i] < found)) found = x[i];
    if (std::isnan(found)) break;
  }
  return found;
}

// The only result of a line.
float reduce(const Code& code, const float* x, int64_t size) {
  const float count = static_cast<float>(size);
  switch (code.operation) {
    case k_sum: return sum_of(x, size, [](vec v) { return v; });
    case k_mean: return sum_of(x, size, [](vec v) { return v; }) / count;
    case k_amax: return extreme(x, size, true);
    case k_amin: return extreme(x, size, false);
    case k_norm: return std::sqrt(sum_of_squares(x, size, 0.0f));
    default: {
      const float mean = sum_of(x, size, [](vec v) { return v; }) / count;
      const float variance = sum_of_squares(x, size, mean) / std::max(count - static_cast<float>(code.parameter), 0.0f);
      return code.operation == k_std ? std::sqrt(variance) : variance;
    }
  }
}

// Computes a line in place. `weight` and `bias` are null or have room for whole vectors, as x has.
void transform(const Code& code, float* x, int64_t size, const float* weight, const float* bias) {
  const float count = static_cast<float>(size);
  if (code.operation == k_softmax || code.operation == k_log_softmax) {
    const vec most = splat(extreme(x, size, true));
    if (code.operation == k_softmax) {
      change(x, size, [=](vec v) { return exp(v - most); });
      const vec total = splat(sum_of(x, size, [](vec v) { return v; }));
      return change(x, size, [=](vec v) { return v / total; });
    }
    const vec log_total = splat(std::log(sum_of(x, size, [=](vec v) { return exp(v - most); })));
    return change(x, size, [=](vec v) { return v - most - log_total; });
  }
  const float mean = code.operation == k_rms_norm ? 0.0f : sum_of(x, size, [](vec v) { return v; }) / count;
  const float eps = static_cast<float>(code.parameter);
  const vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, size, mean) / count + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    vec value = (load(x + i) - splat(mean)) * scale;
    if (weight) value = value * load(weight + i);
    if (bias) value = value + load(bias + i);
    store(x + i, value);
  }
}

int64_t lines_of(const Code& code, int64_t rows) { return rows * (code.sizes[0] * code.sizes[1] * code.sizes[2]); }

// Lines first … end - 1 of all rows.
void compute(const LastAxis& args, int64_t first, int64_t end) {
  static thread_local Scratch scratch;
  const Code& code = *reinterpret_cast<const Code*>(args.code);
  const int64_t size = code.sizes[kAxes - 1], room = (size + kLanes - 1) / kLanes * kLanes;  // floats
  float* const x = static_cast<float*>(scratch.get(3 * room * sizeof(float)));
  float* const weight = args.weight ? x + room : nullptr;
  float* const bias = args.bias ? x + 2 * room : nullptr;
  std::fill(x, x + 3 * room, 0.0f);
  if (weight) read(code.weight_dtype, args.weight, 1, size, weight);
  if (bias) read(code.bias_dtype, args.bias, 1, size, bias);
  for (int64_t line = first; line < end; ++line) {
    int64_t row = line, at[kAxes] = {};
    for (int axis = kAxes - 2; axis >= 0; --axis) {
      at[axis] = row % code.sizes[axis];
      row /= code.sizes[axis];
    }
    read(code.x.dtype, code.x.at(args.x, row, at, 0), code.x.strides[kAxes - 1], size, x);
    void* const out = code.out.at(args.out, row, at, 0);
    if (gives_lines(code.operation)) {
      transform(code, x, size, weight, bias);
      write(code.out.dtype, out, code.out.strides[kAxes - 1], size, x);
    } else {
      const float result = reduce(code, x, size);
      write(code.out.dtype, out, 1, 1, &result);
    }
  }
}

}  // namespace
}  // namespace triptych

// The names of the operations in their order, with a space behind each.
extern "C" const char* triptych_last_axis_operations() {
#define TRIPTYCH_NAME(name) #name " "
  return TRIPTYCH_OPERATIONS(TRIPTYCH_NAME);
#undef TRIPTYCH_NAME
}

TRIPTYCH_STAGE(last_axis, triptych::LastAxis) {
  using namespace triptych;
  const Code& code = *reinterpret_cast<const Code*>(args.code);
  compute(args, lines_of(code, first), lines_of(code, end));
}

TRIPTYCH_KERNEL(last_axis, triptych::LastAxis, code, x, weight, bias, out) {
  using namespace triptych;
  const Code& code = *reinterpret_cast<const Code*>(args.code);
  for_rows(lines_of(code, rows), std::max<int64_t>(kElementsPerIndex / (code.sizes[kAxes - 1] + 1), 1),
           [&](int64_t first, int64_t end) { compute(args, first, end); });
}
