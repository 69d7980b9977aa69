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
  Pages pages;          // states [taps - 1, channels]: the last inputs, the oldest first; of a guess its input
};

constexpr int64_t kChannels = 256;  // of one index
constexpr int64_t kTokens = 16;     // that are convolved at a time: their inputs lie in the first level

// Some channels of one row.
template <typename T>
class Channels {
 public:
  Channels(const CausalConv& args, int64_t row, int64_t first, int64_t count)
      : args_(args), row_(row), first_(first), count_(count), past_(args.taps - 1),
        size_((count + kLanes - 1) / kLanes * kLanes) {
    static thread_local Scratch scratch;
    inputs_ = static_cast<float*>(scratch.get((past_ + kTokens) * size_ * sizeof(float)));
  }

  void convolve() {
    const Pages& pages = args_.pages;
    const float* const before = pages.before(row_);
    for (int64_t tap = 0; tap < past_; ++tap) {
      read(before ? before + tap * args_.channels + first_ : nullptr, inputs_ + tap * size_);
    }
    for (int64_t index = 0; index < pages.num_replayed(row_); ++index) {
      read(pages.guess(row_, index) + first_, inputs_ + past_ * size_);
      forget(1);
    }
    const int64_t known_end = pages.known_end(row_), end = pages.end(row_);
    take(pages.first(row_), known_end, false);
    float* const after = pages.after(row_);
    for (int64_t tap = 0; after && tap < past_; ++tap) {
      write(inputs_ + tap * size_, after + tap * args_.channels + first_);
    }
    take(known_end, end, true);
  }

 private:
  // Convolves tokens behind the last inputs, which become theirs.
  void take(int64_t begin, int64_t end, bool are_guesses) {
    for (int64_t token = begin; token < end; token += kTokens) {
      const int64_t tokens = std::min(kTokens, end - token);
      for (int64_t t = 0; t < tokens; ++t) {
        const T* const x = static_cast<const T*>(args_.x) + (token + t) * args_.x_stride + first_;
        T* const out = static_cast<T*>(args_.out) + (token + t) * args_.channels + first_;
        for (int64_t i = 0; i < count_; i += kLanes) {
          store(inputs_ + (past_ + t) * size_ + i, load_first(x + i, count_ - i));
          vec total = args_.bias ? load_first(args_.bias + first_ + i, count_ - i) : zero();
          for (int64_t tap = 0; tap < args_.taps; ++tap) {
            const vec weight = load_first(args_.weight + tap * args_.channels + first_ + i, count_ - i);
            total = fma(weight, load(inputs_ + (t + tap) * size_ + i), total);
          }
          store_first(out + i, args_.has_silu ? total * sigmoid(total) : total, count_ - i);
        }
        if (are_guesses) write(inputs_ + (past_ + t) * size_, args_.pages.guess(row_, token + t - begin) + first_);
      }
      forget(tokens);
    }
  }

  void read(const float* from, float* to) const {
    for (int64_t i = 0; i < count_; i += kLanes) store(to + i, from ? load_first(from + i, count_ - i) : zero());
  }

  void write(const float* from, float* to) const { std::copy(from, from + count_, to); }

  void forget(int64_t tokens) { std::copy(inputs_ + tokens * size_, inputs_ + (tokens + past_) * size_, inputs_); }

  const CausalConv& args_;
  const int64_t row_, first_, count_, past_, size_;
  float* inputs_;  // [past_ + kTokens, size_]
};

}  // namespace
}  // namespace triptych::recurrent

TRIPTYCH_KERNEL(causal_conv, triptych::recurrent::CausalConv,
                dtype, x, x_stride, weight, bias, out, channels, taps, has_silu,
                pages.state, pages.stride, pages.read, pages.write, pages.query_starts, pages.guesses, pages.slot_stride,
                pages.guess_stride, pages.slots, pages.replayed, pages.guessed) {
  using namespace triptych;
  const int64_t parts = (args.channels + recurrent::kChannels - 1) / recurrent::kChannels;
  parallel_for(rows * parts, [&](int64_t index) {
    const int64_t first = index % parts * recurrent::kChannels;
    const int64_t count = std::min(recurrent::kChannels, args.channels - first);
    if (args.dtype == kFloat32) return recurrent::Channels<float>(args, index / parts, first, count).convolve();
    recurrent::Channels<bf16>(args, index / parts, first, count).convolve();
  });
}
