// States of heads, a matrix each, that decay, take in one outer product for each token, and are read by one vector: the
// gated delta rule, and the state space of Mamba 2.
//
//     S = a S + key u          u = beta (value - a key . S)    or    step size * value
//     out = query . S
//
// A column of S, that is an element of the value, depends on no other. So a head is computed panel by panel, of as many
// columns as keep a panel in the first level, and tokens one after the other. That costs no more than products of whole
// chunks of tokens would, in float32, and a state has the same bits however tokens are cut into steps.
#include "kernel.h"
#include "parallel.h"
#include "recurrent/pages.h"

namespace triptych::recurrent {
namespace {

struct ScanHeads {
  int64_t dtype;             // of query, key, value, step, beta and out
  const void* query;         // [num_tokens, num_key_heads, key_dim], the last axis dense
  int64_t query_stride;      // elements from token to token
  int64_t query_head_stride;
  const void* key;           // [num_tokens, num_key_heads, key_dim] likewise
  int64_t key_stride;
  int64_t key_head_stride;
  const void* value;         // [num_tokens, num_heads, value_dim] likewise
  int64_t value_stride;
  int64_t value_head_stride;
  const void* step;          // [num_tokens, num_heads] likewise; with step_bias, before the softplus
  int64_t step_stride;
  const float* rates;        // [num_heads]; a = exp(-rates * step size)
  const float* step_bias;    // [num_heads]
  void* out;                 // [num_tokens, num_heads, value_dim], dense
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t key_dim;
  int64_t value_dim;
  const void* beta;          // [num_tokens, num_heads] before the sigmoid, of the delta rule; null: there is none
  int64_t beta_stride;
  double beta_scale;         // factor of that sigmoid
  const float* skip;         // [num_heads] factors of values that are added to what comes out; null: none
  double dt_min;             // limits of the step size
  double dt_max;
  Pages pages;               // states [num_heads, key_dim, value_dim]; of a guess [num_heads, key_dim + value_dim + 2]
};

constexpr int kMaxVectors = kRegisters / 8;  // of a panel's columns: three times as many stay in registers
constexpr int64_t kTokens = 16;              // that are prepared before the panels
constexpr float kNormEps = 1e-6f;

// A token as its head's panels read it.
struct Token {
  float decay;
  float factor;  // of what enters: beta, or the step size
  float match;   // key . query
};

template <typename T>
const T* at(const void* tensor, int64_t token, int64_t stride, int64_t inside) {
  return static_cast<const T*>(tensor) + token * stride + inside;
}

inline float dot(const float* a, const float* b, int64_t size) {
  vec total = zero();
  for (int64_t i = 0; i < size; i += kLanes) total = fma(load(a + i), load(b + i), total);
  return sum(total);
}

// One head of one row.
template <typename T>
class Head {
 public:
  Head(const ScanHeads& args, int64_t row, int64_t head)
      : args_(args), row_(row), head_(head), key_head_(head / (args.num_heads / args.num_key_heads)),
        keys_size_(padded(args.key_dim)), values_size_(padded(args.value_dim)) {
    static thread_local Scratch scratch;
    const int64_t floats = values_size_ * args.key_dim + kTokens * (2 * keys_size_ + 2 * values_size_);
    state_ = static_cast<float*>(scratch.get(floats * sizeof(float)));
    keys_ = state_ + values_size_ * args.key_dim;
    queries_ = keys_ + kTokens * keys_size_;
    values_ = queries_ + kTokens * keys_size_;
    outs_ = values_ + kTokens * values_size_;
  }

  void scan() {
    const Pages& pages = args_.pages;
    const float* const before = pages.before(row_);
    for_panels([&](auto vectors, int64_t column, float* panel) { read_panel<vectors>(before, column, panel); });
    replay(pages.num_replayed(row_));
    const int64_t known_end = pages.known_end(row_), end = pages.end(row_);
    take(pages.first(row_), known_end, false);
    if (float* const after = pages.after(row_)) {
      for_panels([&](auto vectors, int64_t column, float* panel) { write_panel<vectors>(after, column, panel); });
    }
    take(known_end, end, true);
  }

 private:
  void take(int64_t begin, int64_t end, bool are_guesses) {
    for (int64_t token = begin; token < end; token += kTokens) {
      const int64_t count = std::min(kTokens, end - token);
      for (int64_t t = 0; t < count; ++t) prepare(token + t, t);
      advance_all(count);
      for (int64_t t = 0; t < count; ++t) finish(token + t, t);
      for (int64_t t = 0; are_guesses && t < count; ++t) keep(t, guess(token + t - begin));
    }
  }

  // Takes the state through guesses of an earlier step, as `take` has done then.
  void replay(int64_t num_guesses) {
    for (int64_t first = 0; first < num_guesses; first += kTokens) {
      const int64_t count = std::min(kTokens, num_guesses - first);
      for (int64_t t = 0; t < count; ++t) recall(guess(first + t), t);
      advance_all(count);
    }
  }

  void advance_all(int64_t count) {
    for_panels([&](auto vectors, int64_t column, float* panel) {
      args_.beta ? advance<vectors, true>(panel, column, count) : advance<vectors, false>(panel, column, count);
    });
  }

  float* guess(int64_t index) const {
    return args_.pages.guess(row_, index) + head_ * (args_.key_dim + args_.value_dim + 2);
  }

  // What enters with a prepared token: key, value, decay and factor.
  void keep(int64_t t, float* to) const {
    const float* const key = keys_ + t * keys_size_;
    const float* const value = values_ + t * values_size_;
    to = std::copy(key, key + args_.key_dim, to);
    to = std::copy(value, value + args_.value_dim, to);
    to[0] = tokens_[t].decay;
    to[1] = tokens_[t].factor;
  }

  void recall(const float* from, int64_t t) {
    widen(from, args_.key_dim, keys_ + t * keys_size_);
    widen(from + args_.key_dim, args_.value_dim, values_ + t * values_size_);
    std::fill_n(queries_ + t * keys_size_, keys_size_, 0.0f);  // nothing comes out
    from += args_.key_dim + args_.value_dim;
    tokens_[t] = {from[0], from[1], 0.0f};
  }

  static int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

  // f(number of vectors, first column, panel [key_dim, vectors * kLanes]) for all panels; the last may have fewer.
  template <typename F>
  void for_panels(const F& f) {
    for (int64_t column = 0; column < values_size_; column += kMaxVectors * kLanes) {
      const int64_t vectors = std::min<int64_t>((values_size_ - column) / kLanes, kMaxVectors);
      unroll<kMaxVectors>([&](auto index) {
        constexpr int kVectors = index + 1;
        if (vectors == kVectors) f(std::integral_constant<int, kVectors>(), column, state_ + column * args_.key_dim);
      });
    }
  }

  int64_t matrix() const { return head_ * args_.key_dim * args_.value_dim; }

  template <int kVectors>
  void read_panel(const float* before, int64_t column, float* panel) const {
    for (int64_t i = 0; i < args_.key_dim; ++i) {
      const float* const from = before + matrix() + i * args_.value_dim + column;
      unroll<kVectors>([&](auto v) {
        const vec own = before ? load_first(from + v * kLanes, args_.value_dim - column - v * kLanes) : zero();
        store(panel + (i * kVectors + v) * kLanes, own);
      });
    }
  }

  template <int kVectors>
  void write_panel(float* after, int64_t column, const float* panel) const {
    for (int64_t i = 0; i < args_.key_dim; ++i) {
      float* const to = after + matrix() + i * args_.value_dim + column;
      unroll<kVectors>([&](auto v) {
        store_first(to + v * kLanes, load(panel + (i * kVectors + v) * kLanes), args_.value_dim - column - v * kLanes);
      });
    }
  }

  void prepare(int64_t token, int64_t t) {
    float* const key = keys_ + t * keys_size_;
    float* const query = queries_ + t * keys_size_;
    const int64_t key_at = key_head_ * args_.key_head_stride, query_at = key_head_ * args_.query_head_stride;
    widen(at<T>(args_.key, token, args_.key_stride, key_at), args_.key_dim, key);
    widen(at<T>(args_.query, token, args_.query_stride, query_at), args_.key_dim, query);
    widen(at<T>(args_.value, token, args_.value_stride, head_ * args_.value_head_stride), args_.value_dim,
          values_ + t * values_size_);
    const float raw = to_float(*at<T>(args_.step, token, args_.step_stride, head_)) + args_.step_bias[head_];
    const float size = std::clamp(softplus(raw), static_cast<float>(args_.dt_min), static_cast<float>(args_.dt_max));
    Token& own = tokens_[t];
    own.decay = std::exp(-args_.rates[head_] * size);
    own.factor = size;
    if (args_.beta) {
      scale(key, 1.0f / std::sqrt(dot(key, key, keys_size_) + kNormEps));
      scale(query, 1.0f / std::sqrt((dot(query, query, keys_size_) + kNormEps) * static_cast<float>(args_.key_dim)));
      own.factor = static_cast<float>(args_.beta_scale) /
                   (1.0f + std::exp(-to_float(*at<T>(args_.beta, token, args_.beta_stride, head_))));
    }
    own.match = dot(key, query, keys_size_);
  }

  template <typename From>
  static void widen(const From* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += kLanes) store(to + i, load_first(from + i, size - i));
  }

  void scale(float* x, float factor) const {
    for (int64_t i = 0; i < keys_size_; i += kLanes) store(x + i, load(x + i) * splat(factor));
  }

  // Takes the panel through the prepared tokens. A pass over it adds what enters with one token, and multiplies the
  // result with the next token's key and query: as the state before that token. Its decay is applied to the products.
  template <int kVectors, bool kDelta>
  void advance(float* panel, int64_t column, int64_t count) {
    vec by_key[kVectors], by_query[kVectors], entering[kVectors];
    const auto clear = [&] { unroll<kVectors>([&](auto v) { by_key[v] = by_query[v] = zero(); }); };
    const auto multiply = [&](auto v, vec state, float key, float query) {
      if constexpr (kDelta) by_key[v] = fma(splat(key), state, by_key[v]);
      by_query[v] = fma(splat(query), state, by_query[v]);
    };
    clear();
    for (int64_t i = 0; i < args_.key_dim; ++i) {
      unroll<kVectors>([&](auto v) {
        multiply(v, load(panel + (i * kVectors + v) * kLanes), keys_[i], queries_[i]);
      });
    }
    for (int64_t t = 0; t < count; ++t) {
      const Token& token = tokens_[t];
      const vec decay = splat(token.decay);
      unroll<kVectors>([&](auto v) {
        vec value = load(values_ + t * values_size_ + column + v * kLanes);
        if constexpr (kDelta) value = fma(zero() - decay, by_key[v], value);
        entering[v] = splat(token.factor) * value;
        const vec out = fma(splat(token.match), entering[v], decay * by_query[v]);
        store(outs_ + t * values_size_ + column + v * kLanes, out);
      });
      clear();
      const bool is_last = t + 1 == count;
      const float* const key = keys_ + t * keys_size_;
      const float* const next_key = is_last ? key : key + keys_size_;  // its products are not used
      const float* const next_query = queries_ + (is_last ? t : t + 1) * keys_size_;
      for (int64_t i = 0; i < args_.key_dim; ++i) {
        const vec own = splat(key[i]);
        unroll<kVectors>([&](auto v) {
          float* const place = panel + (i * kVectors + v) * kLanes;
          const vec state = fma(own, entering[v], decay * load(place));
          store(place, state);
          multiply(v, state, next_key[i], next_query[i]);
        });
      }
    }
  }

  void finish(int64_t token, int64_t t) const {
    T* const to = static_cast<T*>(args_.out) + (token * args_.num_heads + head_) * args_.value_dim;
    const vec skip = splat(args_.skip ? args_.skip[head_] : 0.0f);
    for (int64_t i = 0; i < args_.value_dim; i += kLanes) {
      vec out = load(outs_ + t * values_size_ + i);
      if (args_.skip) out = fma(skip, load(values_ + t * values_size_ + i), out);
      store_first(to + i, out, args_.value_dim - i);
    }
  }

  const ScanHeads& args_;
  const int64_t row_, head_, key_head_;
  const int64_t keys_size_, values_size_;  // of a key and a value, in whole vectors
  float* state_;                           // panel after panel
  float* keys_;                            // [kTokens, keys_size_], zeros in the padding; as are the next two
  float* queries_;
  float* values_;                          // [kTokens, values_size_]
  float* outs_;                            // [kTokens, values_size_]
  Token tokens_[kTokens];
};

}  // namespace
}  // namespace triptych::recurrent

TRIPTYCH_KERNEL(scan_heads, triptych::recurrent::ScanHeads,
                dtype, query, query_stride, query_head_stride, key, key_stride, key_head_stride, value, value_stride,
                value_head_stride, step, step_stride, rates, step_bias, out, num_heads, num_key_heads, key_dim,
                value_dim, beta, beta_stride, beta_scale, skip, dt_min, dt_max,
                pages.state, pages.stride, pages.read, pages.write, pages.query_starts, pages.guesses, pages.slot_stride,
                pages.guess_stride, pages.slots, pages.replayed, pages.guessed) {
  using namespace triptych;
  parallel_for(rows * args.num_heads, [&](int64_t index) {
    const int64_t row = index / args.num_heads, head = index % args.num_heads;
    if (args.dtype == kFloat32) return recurrent::Head<float>(args, row, head).scan();
    recurrent::Head<bf16>(args, row, head).scan();
  });
}
