// Convolution of each channel over the tokens of a row, after those of earlier steps; float32 inside, rounded once.
#include "kernel.h"
#include "parallel.h"
#include "recurrent/pages.h"
#include "simd/functions.h"

namespace triptych::recurrent {
namespace {

struct CausalConv {
  int64_t dtype;        // of x and out
  const void* x;        // [num_tokens, channels], the last axis dense
  int64_t x_stride;     // elements from token to token
  const float* weight;  // [taps, channels], that of the token itself last
  const float* bias;    // [channels] or null
  void* out;            // [num_tokens, channels], dense
  int64_t channels;
  int64_t taps;
  int64_t has_silu;
  Pages pages;          // states [taps - 1, channels]: the last inputs, the oldest first
};

constexpr int64_t kChannels = 256;  // of one index
constexpr int64_t kTokens = 16;     // that are convolved at a time: their inputs lie in the first level

// Some channels of one row.
template <typename T>
void convolve(const CausalConv& args, int64_t row, int64_t first, int64_t count) {
  static thread_local Scratch scratch;
  const int64_t past = args.taps - 1, size = (count + kLanes - 1) / kLanes * kLanes;
  float* const inputs = static_cast<float*>(scratch.get((past + kTokens) * size * sizeof(float)));
  const float* const before = args.pages.before(row);
  for (int64_t tap = 0; tap < past; ++tap) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const float* const from = before + tap * args.channels + first + i;
      store(inputs + tap * size + i, before ? load_first(from, count - i) : zero());
    }
  }
  const int64_t end = args.pages.query_starts[row + 1];
  for (int64_t token = args.pages.query_starts[row]; token < end; token += kTokens) {
    const int64_t tokens = std::min(kTokens, end - token);
    for (int64_t t = 0; t < tokens; ++t) {
      const T* const x = static_cast<const T*>(args.x) + (token + t) * args.x_stride + first;
      T* const out = static_cast<T*>(args.out) + (token + t) * args.channels + first;
      for (int64_t i = 0; i < count; i += kLanes) {
        store(inputs + (past + t) * size + i, load_first(x + i, count - i));
        vec total = args.bias ? load_first(args.bias + first + i, count - i) : zero();
        for (int64_t tap = 0; tap < args.taps; ++tap) {
          const vec weight = load_first(args.weight + tap * args.channels + first + i, count - i);
          total = fma(weight, load(inputs + (t + tap) * size + i), total);
        }
        store_first(out + i, args.has_silu ? total * sigmoid(total) : total, count - i);
      }
    }
    std::copy(inputs + tokens * size, inputs + (tokens + past) * size, inputs);
  }
  float* const after = args.pages.after(row);
  for (int64_t tap = 0; after && tap < past; ++tap) {
    std::copy(inputs + tap * size, inputs + tap * size + count, after + tap * args.channels + first);
  }
}

}  // namespace
}  // namespace triptych::recurrent

TRIPTYCH_KERNEL(causal_conv, triptych::recurrent::CausalConv,
                dtype, x, x_stride, weight, bias, out, channels, taps, has_silu,
                pages.state, pages.stride, pages.read, pages.write, pages.query_starts) {
  using namespace triptych;
  const int64_t parts = (args.channels + recurrent::kChannels - 1) / recurrent::kChannels;
  parallel_for(rows * parts, [&](int64_t index) {
    const int64_t first = index % parts * recurrent::kChannels;
    const int64_t count = std::min(recurrent::kChannels, args.channels - first);
    if (args.dtype == kFloat32) return recurrent::convolve<float>(args, index / parts, first, count);
    recurrent::convolve<bf16>(args, index / parts, first, count);
  });
}
