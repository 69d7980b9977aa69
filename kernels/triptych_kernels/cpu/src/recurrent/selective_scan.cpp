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
  Pages pages;         // states [state_size, channels]; of a guess step sizes and what enters, [2, channels], and B
};

constexpr int64_t kChannels = 64;  // of one index, which has a copy of a guess's B: others may read theirs later

inline float* guessed_b(const SelectiveScan& args, int64_t row, int64_t guess, int64_t part) {
  return args.pages.guess(row, guess) + 2 * args.channels + part * args.state_size;
}

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
  const auto advance = [&](int64_t n, float b, vec entering, vec negative) {
    const vec decay = exp_of_negative(load(rates + n * kLanes) * negative);
    const vec next = fma(splat(b), entering, decay * load(state + n * kLanes));
    store(state + n * kLanes, next);
    return next;
  };
  for (int64_t guess = 0; guess < args.pages.num_replayed(row); ++guess) {
    const float* const kept = args.pages.guess(row, guess) + first;
    const float* const b = guessed_b(args, row, guess, first / kChannels);
    const vec negative = zero() - load_first(kept, count), entering = load_first(kept + args.channels, count);
    for (int64_t n = 0; n < args.state_size; ++n) advance(n, b[n], entering, negative);
  }
  const int64_t known_end = args.pages.known_end(row), end = args.pages.end(row);
  for (int64_t token = args.pages.first(row); token < end; ++token) {
    const vec x = load_first(static_cast<const T*>(args.x) + token * args.x_stride + first, count);
    const vec raw = load_first(static_cast<const T*>(args.dt) + token * args.dt_stride + first, count);
    const vec dt = each(raw, softplus), negative = zero() - dt, entering = dt * x;
    const T* const b = static_cast<const T*>(args.b) + token * args.b_stride;
    const T* const c = static_cast<const T*>(args.c) + token * args.c_stride;
    vec total = skip * x;
    for (int64_t n = 0; n < args.state_size; ++n) {
      total = fma(splat(to_float(c[n])), advance(n, to_float(b[n]), entering, negative), total);
    }
    store_first(static_cast<T*>(args.out) + token * args.channels + first, total, count);
    if (token >= known_end) {
      float* const kept = args.pages.guess(row, token - known_end) + first;
      store_first(kept, dt, count);
      store_first(kept + args.channels, entering, count);
    }
    float* const after = token + 1 == known_end ? args.pages.after(row) : nullptr;
    for (int64_t n = 0; after && n < args.state_size; ++n) {
      store_first(after + n * args.channels + first, load(state + n * kLanes), count);
    }
  }
}

// kChannels channels of one row, or the last of them.
template <typename T>
void scan_part(const SelectiveScan& args, int64_t row, int64_t part) {
  const int64_t begin = part * kChannels, end = std::min(begin + kChannels, args.channels);
  for (int64_t first = begin; first < end; first += kLanes) scan_channels<T>(args, row, first);
  const int64_t known_end = args.pages.known_end(row);
  for (int64_t token = known_end; token < args.pages.end(row); ++token) {  // all channels have read the older ones
    const T* const b = static_cast<const T*>(args.b) + token * args.b_stride;
    float* const kept = guessed_b(args, row, token - known_end, part);
    for (int64_t n = 0; n < args.state_size; ++n) kept[n] = to_float(b[n]);
  }
}

}  // namespace
}  // namespace triptych::recurrent

TRIPTYCH_KERNEL(selective_scan, triptych::recurrent::SelectiveScan,
                dtype, x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, rates, skip, out, channels, state_size,
                pages.state, pages.stride, pages.read, pages.write, pages.query_starts, pages.guesses, pages.slot_stride,
                pages.guess_stride, pages.slots, pages.replayed, pages.guessed) {
  using namespace triptych;
  const int64_t parts = (args.channels + recurrent::kChannels - 1) / recurrent::kChannels;
  parallel_for(rows * parts, [&](int64_t index) {
    if (args.dtype == kFloat32) return recurrent::scan_part<float>(args, index / parts, index % parts);
    recurrent::scan_part<bf16>(args, index / parts, index % parts);
  });
}
