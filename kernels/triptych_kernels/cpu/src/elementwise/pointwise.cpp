// What a model computes element by element, over views of any strides, several operations in one pass.
//
// A call is a list of steps. Each computes one block of elements from operands in memory, from results of steps before
// it and from constants, rounds it once to the dtype that torch would give it, and may store it. Blocks fit the first
// cache, so that results between steps need no memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "elementwise/strided.h"
#include "kernel.h"
#include "parallel.h"
#include "simd/functions.h"
#include "stages.h"

// Operations; Python learns names and order from `triptych_pointwise_operations`.
#define TRIPTYCH_OPERATIONS(f)                                                                              \
  f(copy) f(neg) f(abs) f(sqrt) f(rsqrt) f(reciprocal) f(exp) f(log) f(log1p) f(tanh) f(erf) f(sigmoid) f(silu) \
  f(cos) f(sin) f(logical_not) f(add) f(sub) f(mul) f(div) f(pow) f(minimum) f(maximum) f(eq) f(ne) f(lt) f(le) \
  f(gt) f(ge) f(where)

namespace triptych {

// A double is a vector of one lane.
static double load(const double* from) { return *from; }
static void store(double* to, double x) { *to = x; }

namespace {

constexpr int kInputs = 12, kOutputs = 4, kSteps = 16, kConstants = 16;
constexpr int64_t kBlock = 256;      // elements
constexpr int64_t kSegment = 4096;   // elements of a line that one thread computes at a time
constexpr int64_t kStepsPerIndex = 16384;  // elements times steps that are worth another thread

enum Operation : int64_t {
#define TRIPTYCH_ENUM(name) k_##name,
  TRIPTYCH_OPERATIONS(TRIPTYCH_ENUM)
#undef TRIPTYCH_ENUM
};

struct Step {
  int64_t operation;
  int64_t sources[3];  // an input; kInputs + a step before; or kInputs + kSteps + a constant
  int64_t output;      // where the result is stored too; -1: nowhere
  int64_t dtype;       // of the result
};

// The layout of the int64 tensor `code`.
struct Code {
  int64_t sizes[kAxes];  // of the axes of a row
  int64_t is_flat;       // whether rows follow each other as the elements of the last axis do, the only one
  int64_t is_exact;      // whether to compute in float64, which holds integers to 2^53
  int64_t num_steps;
  Strided inputs[kInputs];
  Strided outputs[kOutputs];
  double constants[kConstants];
  Step steps[kSteps];
};

struct Pointwise {
  const int64_t* code;
  const void *in0, *in1, *in2, *in3, *in4, *in5, *in6, *in7, *in8, *in9, *in10, *in11;
  void *out0, *out1, *out2, *out3;
};

template <typename Real>
constexpr int64_t kLanesOf = std::is_same_v<Real, float> ? kLanes : 1;

inline vec truth(uint32_t lanes) { return only(lanes, splat(1.0f)); }
inline vec eq(vec a, vec b) { return truth(equal(a, b)); }
inline vec gt(vec a, vec b) { return truth(greater(a, b)); }
inline vec ge(vec a, vec b) { return truth(at_least(a, b)); }
inline double eq(double a, double b) { return a == b; }
inline double gt(double a, double b) { return a > b; }
inline double ge(double a, double b) { return a >= b; }
inline vec one_less(vec a) { return splat(1.0f) - a; }
inline double one_less(double a) { return 1.0 - a; }
inline vec absolute(vec a) { return abs(a); }
inline double absolute(double a) { return std::fabs(a); }
// NaN if one of two is
inline vec nan_where_unordered(vec a, vec b) {
  return only(unordered(a, b), splat(std::numeric_limits<float>::quiet_NaN()));
}
inline vec smaller(vec a, vec b) { return min(b, a) + nan_where_unordered(a, b); }
inline vec larger(vec a, vec b) { return max(b, a) + nan_where_unordered(a, b); }
inline double smaller(double a, double b) { return std::min(a, b); }
inline double larger(double a, double b) { return std::max(a, b); }
// a where the condition is 1, b where it is 0
inline vec choose(vec condition, vec a, vec b) { return select_negative(zero() - condition, a, b); }
inline double choose(double condition, double a, double b) { return condition != 0.0 ? a : b; }
inline vec negative(vec a) { return a * splat(-1.0f); }
inline double negative(double a) { return -a; }

template <typename Real, typename F>
void map(int64_t count, Real* out, const Real* a, const F& f) {
  for (int64_t i = 0; i < count; i += kLanesOf<Real>) store(out + i, f(load(a + i)));
}
template <typename Real, typename F>
void map(int64_t count, Real* out, const Real* a, const Real* b, const F& f) {
  for (int64_t i = 0; i < count; i += kLanesOf<Real>) store(out + i, f(load(a + i), load(b + i)));
}

// The operations that are computed in float32 only. Blocks are padded to whole vectors.
bool compute_float(int64_t operation, int64_t n, float* out, const float* a, const float* b) {
  switch (operation) {
    case k_sqrt: map(n, out, a, [](vec x) { return each(x, [](float y) { return std::sqrt(y); }); }); return true;
    case k_rsqrt: map(n, out, a, [](vec x) { return each(x, [](float y) { return 1.0f / std::sqrt(y); }); }); return true;
    case k_reciprocal: map(n, out, a, [](vec x) { return splat(1.0f) / x; }); return true;
    case k_exp: map(n, out, a, [](vec x) { return exp(x); }); return true;
    case k_log: map(n, out, a, [](vec x) { return each(x, [](float y) { return std::log(y); }); }); return true;
    case k_log1p: map(n, out, a, [](vec x) { return each(x, [](float y) { return std::log1p(y); }); }); return true;
    case k_tanh: map(n, out, a, [](vec x) { return tanh(x); }); return true;
    case k_erf: map(n, out, a, [](vec x) { return erf(x); }); return true;
    case k_sigmoid: map(n, out, a, [](vec x) { return sigmoid(x); }); return true;
    case k_silu: map(n, out, a, [](vec x) { return x / (splat(1.0f) + exp(zero() - x)); }); return true;
    case k_cos: map(n, out, a, [](vec x) { return each(x, [](float y) { return std::cos(y); }); }); return true;
    case k_sin: map(n, out, a, [](vec x) { return each(x, [](float y) { return std::sin(y); }); }); return true;
    case k_div: map(n, out, a, b, [](vec x, vec y) { return x / y; }); return true;
    case k_pow:
      map(n, out, a, b, [](vec x, vec y) { return each(x, y, [](float u, float v) { return std::pow(u, v); }); });
      return true;
    default: return false;
  }
}

template <typename Real>
void compute(int64_t operation, int64_t n, Real* out, const Real* a, const Real* b, const Real* c) {
  if constexpr (std::is_same_v<Real, float>) {
    if (compute_float(operation, n, out, a, b)) return;
  }
  switch (operation) {
    case k_copy: return map(n, out, a, [](auto x) { return x; });
    case k_neg: return map(n, out, a, [](auto x) { return negative(x); });
    case k_abs: return map(n, out, a, [](auto x) { return absolute(x); });
    case k_logical_not: return map(n, out, a, [](auto x) { return one_less(x); });
    case k_add: return map(n, out, a, b, [](auto x, auto y) { return x + y; });
    case k_sub: return map(n, out, a, b, [](auto x, auto y) { return x - y; });
    case k_mul: return map(n, out, a, b, [](auto x, auto y) { return x * y; });
    case k_minimum: return map(n, out, a, b, [](auto x, auto y) { return smaller(x, y); });
    case k_maximum: return map(n, out, a, b, [](auto x, auto y) { return larger(x, y); });
    case k_eq: return map(n, out, a, b, [](auto x, auto y) { return eq(x, y); });
    case k_ne: return map(n, out, a, b, [](auto x, auto y) { return one_less(eq(x, y)); });
    case k_lt: return map(n, out, a, b, [](auto x, auto y) { return gt(y, x); });
    case k_le: return map(n, out, a, b, [](auto x, auto y) { return ge(y, x); });
    case k_gt: return map(n, out, a, b, [](auto x, auto y) { return gt(x, y); });
    case k_ge: return map(n, out, a, b, [](auto x, auto y) { return ge(x, y); });
    case k_where:
      for (int64_t i = 0; i < n; i += kLanesOf<Real>) store(out + i, choose(load(a + i), load(b + i), load(c + i)));
      return;
    default: return;
  }
}

template <typename Real>
void round_to(int64_t dtype, int64_t n, Real* values) {
  if (dtype == kBool) {
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] != 0;
    return;
  }
  if constexpr (std::is_same_v<Real, float>) {
    if (dtype != kBfloat16) return;
    for (int64_t i = 0; i < n; i += kLanes) {
      bf16 rounded[kLanes];
      store(rounded, load(values + i));
      store(values + i, load(rounded));
    }
  } else if (dtype == kInt64) {
    for (int64_t i = 0; i < n; ++i) values[i] = std::trunc(values[i]);
  }
}

// Runs the steps over parts of lines; one per thread and loop index.
template <typename Real>
class Lines {
 public:
  Lines(const Pointwise& args, int64_t most)
      : code_(*reinterpret_cast<const Code*>(args.code)),
        inputs_{args.in0, args.in1, args.in2, args.in3, args.in4, args.in5, args.in6, args.in7, args.in8, args.in9,
                args.in10, args.in11},
        outputs_{args.out0, args.out1, args.out2, args.out3} {
    const int64_t count = std::min(most, kBlock);
    for (int64_t i = 0; i < code_.num_steps; ++i) {
      for (const int64_t source : code_.steps[i].sources) {
        if (source < kInputs + kSteps) continue;
        Real* const values = constants_[source - kInputs - kSteps];
        std::fill(values, values + padded(count), static_cast<Real>(code_.constants[source - kInputs - kSteps]));
      }
    }
  }

  // Elements begin … end - 1 of one line.
  void run(int64_t row, const int64_t (&at)[kAxes], int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = std::min(end - first, kBlock);
      for (int64_t i = 0; i < code_.num_steps; ++i) {
        const Step& step = code_.steps[i];
        const Real* sources[3];
        for (int j = 0; j < 3; ++j) sources[j] = source(step.sources[j], j, row, at, first, count);
        compute(step.operation, count, results_[i], sources[0], sources[1], sources[2]);
        round_to(step.dtype, count, results_[i]);
        if (step.output >= 0) {
          const Strided& view = code_.outputs[step.output];
          write(view.dtype, view.at(outputs_[step.output], row, at, first), view.strides[kAxes - 1], count, results_[i]);
        }
      }
    }
  }

 private:
  static int64_t padded(int64_t count) { return (count + kLanesOf<Real> - 1) / kLanesOf<Real> * kLanesOf<Real>; }

  const Real* source(int64_t number, int place, int64_t row, const int64_t (&at)[kAxes], int64_t first, int64_t count) {
    if (number < 0) return nullptr;
    if (number >= kInputs + kSteps) return constants_[number - kInputs - kSteps];
    if (number >= kInputs) return results_[number - kInputs];
    const Strided& view = code_.inputs[number];
    read(view.dtype, view.at(inputs_[number], row, at, first), view.strides[kAxes - 1], count, loaded_[place]);
    return loaded_[place];
  }

  const Code& code_;
  const void* inputs_[kInputs];
  void* outputs_[kOutputs];
  alignas(64) Real loaded_[3][kBlock];
  alignas(64) Real results_[kSteps][kBlock];
  alignas(64) Real constants_[kConstants][kBlock];
};

// What is passed through: lines of a row each, or one line of all rows; cut into segments.
struct Walk {
  const Code& code;
  int64_t length, lines_per_row, segments;

  Walk(const Code& code, int64_t rows)
      : code(code), length(code.sizes[kAxes - 1] * (code.is_flat ? rows : 1)),
        lines_per_row(code.sizes[0] * code.sizes[1] * code.sizes[2]), segments((length + kSegment - 1) / kSegment) {}
  int64_t units(int64_t rows) const { return (code.is_flat ? 1 : rows * lines_per_row) * segments; }
};

// Units first … end - 1, after `row` rows.
template <typename Real>
void run_units(const Pointwise& args, const Walk& walk, int64_t row, int64_t first, int64_t end) {
  const Code& code = walk.code;
  Lines<Real> steps(args, walk.length);
  const int64_t start = code.is_flat ? row * code.sizes[kAxes - 1] : 0;
  for (int64_t unit = first; unit < end; ++unit) {
    int64_t line = unit / walk.segments, at[kAxes] = {};
    const int64_t begin = unit % walk.segments * kSegment;
    if (!code.is_flat) {
      for (int axis = kAxes - 2; axis >= 0; --axis) {
        at[axis] = line % code.sizes[axis];
        line /= code.sizes[axis];
      }
      line += row;
    }
    steps.run(line, at, start + begin, start + std::min(begin + kSegment, walk.length));
  }
}

const Code& code_of(const Pointwise& args) { return *reinterpret_cast<const Code*>(args.code); }

template <typename Real>
void run_rows(const Pointwise& args, int64_t first, int64_t end) {
  const Walk walk(code_of(args), end - first);
  run_units<Real>(args, walk, first, 0, walk.units(end - first));
}

template <typename Real>
void run_steps(const Pointwise& args, int64_t rows) {
  const Walk walk(code_of(args), rows);
  const int64_t work = std::min(walk.length, kSegment) * walk.code.num_steps + 1;
  for_rows(walk.units(rows), std::max<int64_t>(kStepsPerIndex / work, 1),
           [&](int64_t first, int64_t end) { run_units<Real>(args, walk, 0, first, end); });
}

}  // namespace
}  // namespace triptych

// The names of the operations in their order, with a space behind each.
extern "C" const char* triptych_pointwise_operations() {
#define TRIPTYCH_NAME(name) #name " "
  return TRIPTYCH_OPERATIONS(TRIPTYCH_NAME);
#undef TRIPTYCH_NAME
}

TRIPTYCH_STAGE(pointwise, triptych::Pointwise) {
  if (triptych::code_of(args).is_exact) return triptych::run_rows<double>(args, first, end);
  triptych::run_rows<float>(args, first, end);
}

TRIPTYCH_KERNEL(pointwise, triptych::Pointwise,
                code, in0, in1, in2, in3, in4, in5, in6, in7, in8, in9, in10, in11, out0, out1, out2, out3) {
  if (triptych::code_of(args).is_exact) return triptych::run_steps<double>(args, rows);
  triptych::run_steps<float>(args, rows);
}
