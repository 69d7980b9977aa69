// The keys that each token attends to: those that a small attention of its own, without values, scores highest.
//
// A key's score is the sum over heads of weight * max(query . key, 0), head by head, and each product is one chain of
// sums over the head (arithmetic.h). So it depends on the token and the key only: not on other tokens, the cut of the
// prompt into chunks, or the number of threads. Of equal scores the earlier key's is the higher one.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "attention/pack.h"
#include "kernel.h"
#include "parallel.h"

namespace triptych::attention {

// A step's choice; rows are its sequences.
struct ChooseKeys {
  int64_t dtype;                // of query
  int64_t cache_dtype;
  const void* query;            // [num_tokens, num_heads, head_dim], the last axis dense
  int64_t query_stride;         // elements from token to token
  int64_t query_head_stride;
  const float* weights;         // [num_tokens, num_heads], the last axis dense
  int64_t weights_stride;
  const void* keys;             // [num_blocks, block_size, head_dim], the last axis dense
  int64_t key_stride;           // elements from key to key, of the next block too
  const int32_t* block_tables;  // [rows, max_blocks]
  int64_t block_table_stride;
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* seq_lens;      // [rows]
  int32_t* slots;               // [num_tokens, max_keys], block * block_size + offset of each chosen key, in their order
  int32_t* counts;              // [num_tokens], how many there are
  int64_t num_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t max_keys;
};

namespace {

constexpr int64_t kChunk = 8 * kSpan;      // keys that a thread scores at a time: packing a token's queries is then little
constexpr int64_t kMostScores = 4 << 20;   // that wait for their choice, unless one token has more

struct Token {
  int32_t sequence, number, num_keys;
  int64_t scores;  // place of its first score; it has none if it attends to all of its keys
};

struct Chunk {
  int32_t token;  // among those of its group
  int32_t first;  // key
};

// The queries of one token on one thread.
template <typename Q, typename T, typename C>
class TokenQueries {
 public:
  TokenQueries(const ChooseKeys& args, const Token& token)
      : args_(args), token_(token), units_((args.head_dim + kPerUnit<C> - 1) / kPerUnit<C>),
        num_strips_((args.num_heads + kMaxTileRows - 1) / kMaxTileRows) {
    static thread_local Scratch scratch;
    const int64_t panel = units_ * kPanel, queries = units_ * args.num_heads + kLanes;
    const int64_t products = kMaxTileRows * kSpan;
    products_ = static_cast<float*>(scratch.get((products + panel + queries) * sizeof(float)));
    keys_ = products_ + products;
    queries_ = keys_ + panel;
    std::fill(ones_, ones_ + kMaxTileRows, 1.0f);
    for (int64_t strip = 0; strip < num_strips_; ++strip) pack_strip(strip);
  }

  // The scores of the keys first … end - 1, by whole panels.
  void score_keys(int64_t first, int64_t end, float* scores) {
    for (int64_t key = first; key < end; key += kPanel, scores += kPanel) {
      pack_keys(key, std::min(end - key, static_cast<int64_t>(kPanel)));
      score_panel(scores);
    }
  }

 private:
  // Strips of nearly equal height.
  int64_t strip_begin(int64_t strip) const { return args_.num_heads * strip / num_strips_; }

  void pack_strip(int64_t strip) {
    const int64_t begin = strip_begin(strip), count = strip_begin(strip + 1) - begin;
    const Q* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      rows[lane] = static_cast<const Q*>(args_.query) + token_.number * args_.query_stride +
                   (begin + std::min(lane, count - 1)) * args_.query_head_stride;
    }
    pack_queries<C>(rows, args_.head_dim, queries_ + begin * units_, count);  // the next strip overwrites lanes past it
  }

  // `count`: keys of the panel that there are; the others repeat the last one.
  void pack_keys(int64_t first, int64_t count) {
    const int32_t* blocks = args_.block_tables + token_.sequence * args_.block_table_stride;
    const T* rows[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t key = first + std::min(i, count - 1), block = key / args_.block_size;
      const int64_t slot = blocks[block] * args_.block_size + key - block * args_.block_size;
      rows[i] = static_cast<const T*>(args_.keys) + slot * args_.key_stride;
    }
    pack_queries<C>(rows, args_.head_dim, keys_, kPanel);
    pack_queries<C>(rows + kLanes, args_.head_dim, keys_ + kLanes, kPanel);
  }

  void score_panel(float* scores) {
    const char* nothing = reinterpret_cast<const char*>(keys_);
    const KeyPanel keys = {{keys_, keys_ + kLanes}, kPanel, {nothing, nothing}, 0};
    const float* weights = args_.weights + token_.number * args_.weights_stride;
    vec sums[2] = {zero(), zero()};
    for (int64_t strip = 0; strip < num_strips_; ++strip) {
      const int64_t begin = strip_begin(strip), count = strip_begin(strip + 1) - begin;
      score<C, C>(queries_ + begin * units_, keys, units_, count, ones_, products_);
      for (int64_t row = 0; row < count; ++row) {
        const vec weight = splat(weights[begin + row]);
        unroll<2>([&](auto half) {
          const vec product = max(load(products_ + row * kSpan + half * kLanes), zero());
          sums[half] = fma(weight, product, sums[half]);
        });
      }
    }
    store(scores, sums[0]);
    store(scores + kLanes, sums[1]);
  }

  const ChooseKeys& args_;
  const Token& token_;
  int64_t units_, num_strips_;
  float *products_, *keys_, *queries_;  // [kMaxTileRows][kSpan], [units][kPanel], by strips [units][heads]
  float ones_[kMaxTileRows];
};

// What is compared: NaN counts as the smallest.
inline float rank_of(float score) { return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score; }

// f(key, its slot) for all keys of a token.
template <typename F>
void for_slots(const ChooseKeys& args, const Token& token, const F& f) {
  const int32_t* blocks = args.block_tables + token.sequence * args.block_table_stride;
  for (int64_t key = 0; key < token.num_keys; ++blocks) {
    int64_t slot = *blocks * args.block_size;
    const int64_t end = std::min<int64_t>(key + args.block_size, token.num_keys);
    for (; key < end; ++key, ++slot) f(key, static_cast<int32_t>(slot));
  }
}

void choose(const ChooseKeys& args, const Token& token, const float* scores) {
  int32_t* to = args.slots + token.number * args.max_keys;
  args.counts[token.number] = static_cast<int32_t>(std::min<int64_t>(token.num_keys, args.max_keys));
  if (token.num_keys <= args.max_keys) {
    return for_slots(args, token, [&](int64_t, int32_t slot) { *to++ = slot; });
  }
  static thread_local Scratch scratch;
  float* ranks = static_cast<float*>(scratch.get(token.num_keys * sizeof(float)));
  std::transform(scores, scores + token.num_keys, ranks, rank_of);
  float* last = ranks + args.max_keys - 1;
  std::nth_element(ranks, last, ranks + token.num_keys, std::greater<float>());
  const float least = *last;
  // of those that equal the least as many as there is room for
  int64_t room = 1 + std::count(ranks, last, least);
  for_slots(args, token, [&](int64_t key, int32_t slot) {
    const float rank = rank_of(scores[key]);
    if (rank > least || (rank == least && room-- > 0)) *to++ = slot;
  });
}

// Tokens in groups, so that their scores take little memory: all scores of a group, then its choices.
template <typename Q, typename T, typename C>
void choose_keys(const ChooseKeys& args, int64_t num_sequences) {
  static thread_local Scratch token_memory, chunk_memory, score_memory;
  const int64_t num_tokens = args.query_starts[num_sequences];
  Token* const tokens = static_cast<Token*>(token_memory.get(num_tokens * sizeof(Token)));
  int64_t count = 0, num_scores = 0, num_chunks = 0;
  const auto finish_group = [&] {
    Chunk* const chunks = static_cast<Chunk*>(chunk_memory.get(num_chunks * sizeof(Chunk)));
    float* const scores = static_cast<float*>(score_memory.get(num_scores * sizeof(float)));
    Chunk* next = chunks;
    for (int64_t i = 0; i < count; ++i) {
      if (tokens[i].num_keys <= args.max_keys) continue;
      for (int64_t first = 0; first < tokens[i].num_keys; first += kChunk) {
        *next++ = {static_cast<int32_t>(i), static_cast<int32_t>(first)};
      }
    }
    parallel_for(num_chunks, [&](int64_t index) {
      const Token& token = tokens[chunks[index].token];
      const int64_t first = chunks[index].first, end = std::min<int64_t>(first + kChunk, token.num_keys);
      TokenQueries<Q, T, C>(args, token).score_keys(first, end, scores + token.scores + first);
    });
    parallel_for(count, [&](int64_t index) { choose(args, tokens[index], scores + tokens[index].scores); });
    count = num_scores = num_chunks = 0;
  };
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t start = args.query_starts[sequence], end = args.query_starts[sequence + 1];
    for (int64_t token = start; token < end; ++token) {
      const int64_t num_keys = args.seq_lens[sequence] - (end - 1 - token);
      const bool has_scores = num_keys > args.max_keys;
      const int64_t own_scores = has_scores ? (num_keys + kPanel - 1) / kPanel * kPanel : 0;
      if (num_scores > 0 && num_scores + own_scores > kMostScores) finish_group();
      tokens[count++] = {static_cast<int32_t>(sequence), static_cast<int32_t>(token), static_cast<int32_t>(num_keys),
                         num_scores};
      num_scores += own_scores;
      if (has_scores) num_chunks += (num_keys + kChunk - 1) / kChunk;
    }
  }
  if (count > 0) finish_group();
}

template <typename Q, typename T>
void choose_keys(const ChooseKeys& args, int64_t num_sequences) {
  if constexpr (kHasBf16Products && sizeof(Q) == 2 && sizeof(T) == 2) {
    choose_keys<Q, T, bf16>(args, num_sequences);
  } else {
    choose_keys<Q, T, float>(args, num_sequences);
  }
}

template <typename Q>
void choose_keys(const ChooseKeys& args, int64_t num_sequences) {
  if (args.cache_dtype == kFloat32) return choose_keys<Q, float>(args, num_sequences);
  choose_keys<Q, bf16>(args, num_sequences);
}

}  // namespace
}  // namespace triptych::attention

TRIPTYCH_KERNEL(choose_keys, triptych::attention::ChooseKeys,
                dtype, cache_dtype, query, query_stride, query_head_stride, weights, weights_stride, keys, key_stride,
                block_tables, block_table_stride, query_starts, seq_lens, slots, counts, num_heads, head_dim, block_size,
                max_keys) {
  using namespace triptych;
  using namespace triptych::attention;
  if (args.dtype == kFloat32) return choose_keys<float>(args, rows);
  choose_keys<bf16>(args, rows);
}
