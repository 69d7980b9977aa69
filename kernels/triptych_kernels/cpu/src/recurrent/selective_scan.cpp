// The state space of Mamba 1: each channel has a state of its own, in which each element has its own decay.
#include "kernel.h"
#include "parallel.h"
#include "recurrent/pages.h"
#include "simd/functions.h"

namespace triptych::recurrent {
namespace {

struct SelectiveScan {
  int64_t dtype;       // of x, dt, b, c and out
  const void* x;       // [num_tokens, channels], the last axis dense
  int64_t x_stride;    // elements from token to token
  const void* dt;      // [num_tokens, channels] likewise
  int64_t dt_stride;
  const void* b;       // [num_tokens, state_size] likewise
  int64_t b_stride;
  const void* c;       // [num_tokens, state_size] likewise
  int64_t c_stride;
  const float* rates;  // [state_size, channels]
  const float* skip;   // [channels]
  void* out;           // [num_tokens, channels], dense
  int64_t channels;
  int64_t state_size;
  Pages pages;         // states [state_size, channels]
};

// kLanes channels of one row, or the last of them.
template <typename T>
void scan_channels(const SelectiveScan& args, int64_t row, int64_t first) {
  static thread_local Scratch scratch;
  const int64_t count = std::min<int64_t>(kLanes, args.channels - first);
  float* const state = static_cast<float*>(scratch.get(2 * args.state_size * kLanes * sizeof(float)));
  float* const rates = state + args.state_size * kLanes;
  const float* const before = args.pages.before(row);
  for (int64_t n = 0; n < args.state_size; ++n) {
    const int64_t at = n * args.channels + first;
    store(state + n * kLanes, before ? load_first(before + at, count) : zero());
    store(rates + n * kLanes, load_first(args.rates + at, count));
  }
  const vec skip = load_first(args.skip + first, count);
  const int64_t end = args.pages.query_starts[row + 1];
  for (int64_t token = args.pages.query_starts[row]; token < end; ++token) {
    const vec x = load_first(static_cast<const T*>(args.x) + token * args.x_stride + first, count);
    const vec raw = load_first(static_cast<const T*>(args.dt) + token * args.dt_stride + first, count);
    const vec dt = each(raw, softplus), negative = zero() - dt, entering = dt * x;
    const T* const b = static_cast<const T*>(args.b) + token * args.b_stride;
    const T* const c = static_cast<const T*>(args.c) + token * args.c_stride;
    vec total = skip * x;
    for (int64_t n = 0; n < args.state_size; ++n) {
      const vec decay = exp_of_negative(load(rates + n * kLanes) * negative);
      const vec next = fma(splat(to_float(b[n])), entering, decay * load(state + n * kLanes));
      store(state + n * kLanes, next);
      total = fma(splat(to_float(c[n])), next, total);
    }
    store_first(static_cast<T*>(args.out) + token * args.channels + first, total, count);
  }
  float* const after = args.pages.after(row);
  for (int64_t n = 0; after && n < args.state_size; ++n) {
    store_first(after + n * args.channels + first, load(state + n * kLanes), count);
  }
}

}  // namespace
}  // namespace triptych::recurrent

TRIPTYCH_KERNEL(selective_scan, triptych::recurrent::SelectiveScan,
                dtype, x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, rates, skip, out, channels, state_size,
                pages.state, pages.stride, pages.read, pages.write, pages.query_starts) {
  using namespace triptych;
  constexpr int64_t kVectors = 4;  // of one index
  const int64_t parts = (args.channels + kVectors * kLanes - 1) / (kVectors * kLanes);
  parallel_for(rows * parts, [&](int64_t index) {
    const int64_t begin = index % parts * kVectors * kLanes;
    for (int64_t first = begin; first < std::min(begin + kVectors * kLanes, args.channels); first += kLanes) {
      if (args.dtype == kFloat32) {
        recurrent::scan_channels<float>(args, index / parts, first);
      } else {
        recurrent::scan_channels<bf16>(args, index / parts, first);
      }
    }
  });
}
