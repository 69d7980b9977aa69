// Attention of whole texts without a cache: every query sees the keys before it and after it, or those within a window.
//
// The arithmetic is that of arithmetic.h: spans of keys at fixed positions of a text, merged in order. A tile is some
// queries of one text and one head; its thread packs the text's keys and values, span by span.
#include <algorithm>

#include "attention/pack.h"
#include "kernel.h"
#include "linear/block.h"
#include "parallel.h"

namespace triptych::attention {

// A step of attention; rows are its texts.
struct EncodeAttention {
  int64_t dtype;                // of query, key, value and out
  const void* query;            // [num_tokens, num_heads, head_dim], the last axis dense
  int64_t query_stride;         // elements from token to token
  int64_t query_head_stride;
  const void* key;              // [num_tokens, num_kv_heads, head_dim] likewise
  int64_t key_stride;
  int64_t key_head_stride;
  const void* value;            // [num_tokens, num_kv_heads, head_dim] likewise
  int64_t value_stride;
  int64_t value_head_stride;
  const int32_t* query_starts;  // [rows + 1], the first token of each text
  void* out;                    // [num_tokens, num_heads, head_dim], dense
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  double scale;
  int64_t window;               // a query at p sees keys above p - window and below p + window; 0: all
  const float* distance_bias;   // [num_heads, num_distances], added to scores by the key's position - the query's; or null
  int64_t num_distances;        // odd; that of 0 is in the middle
};

namespace {

constexpr int64_t kTextQueries = 16 * kMaxTileRows;  // of a tile: packing is then a twentieth of the work

// Whether products are computed in the tiles of AMX, whatever the number of rows. Packed keys and values lie as a panel
// of weights does; queries and weights are read where they lie.
#if defined(__AMX_BF16__) || defined(TRIPTYCH_AMX_EMULATED)
template <typename C>
constexpr bool kHasTiles = std::is_same_v<C, bf16>;
constexpr int64_t kMaxStrip = amx::kMaxRows;
using amx::multiply_panel, amx::Tiles;
#else
template <typename C>
constexpr bool kHasTiles = false;
constexpr int64_t kMaxStrip = kMaxTileRows;
struct Tiles {
  explicit Tiles(int64_t) {}
};
inline void multiply_panel(const bf16*, int64_t, const bf16*, int64_t, int64_t, float*, int64_t) {}  // never called
#endif
template <typename C>
constexpr int64_t kStripRows = kHasTiles<C> ? kMaxStrip : kMaxTileRows;

struct TextTile {
  int32_t first_token;  // of the text
  int32_t num_keys;     // of the text
  int32_t first_query, num_queries;
};

// The queries of one tile on one thread.
template <typename T, typename C>
class TextQueries {
 public:
  TextQueries(const EncodeAttention& args, const TextTile& tile, int64_t head)
      : args_(args), tile_(tile), head_(head), rows_(tile.num_queries),
        units_((args.head_dim + kPerUnit<C> - 1) / kPerUnit<C>),
        size_((args.head_dim + kPanel - 1) / kPanel * kPanel),
        num_strips_((rows_ + kStripRows<C> - 1) / kStripRows<C>) {
    static thread_local Scratch scratch;
    const int64_t floats = rows_ * (units_ + size_ + 3) + kStripRows<C> * (2 * kSpan + size_) + kSpan * units_ +
                           kSpan / kPerUnit<C> * size_ + size_ + 10 * kLanes;
    float* at = static_cast<float*>(scratch.get(floats * sizeof(float)));
    const auto take = [&](int64_t count) {
      float* own = at;
      at += (count + kLanes - 1) / kLanes * kLanes;
      return own;
    };
    keys_ = take(kSpan * units_);
    values_ = take(kSpan / kPerUnit<C> * size_);
    scores_ = take(kStripRows<C> * kSpan);
    weights_ = kPerUnit<C> == 1 ? scores_ : take(kStripRows<C> * kSpan);
    span_sums_ = take(kStripRows<C> * size_);
    queries_ = take(rows_ * units_ + kLanes);
    sums_ = take(rows_ * size_);
    zeros_ = take(size_);
    factors_ = take(rows_);
    softmax_ = reinterpret_cast<Softmax*>(take(2 * rows_));
    std::fill(zeros_, zeros_ + size_, 0.0f);
    std::fill(softmax_, softmax_ + rows_, Softmax{kUnseen, 0.0f});
    std::fill(factors_, factors_ + rows_, static_cast<float>(args.scale * kLog2E));
  }

  void attend() {
    if constexpr (!kHasTiles<C>) {
      for (int64_t strip = 0; strip < num_strips_; ++strip) pack_strip(strip);
    }
    const int64_t first = first_seen(0), end = end_seen(rows_ - 1);
    for (int64_t span = first / kSpan; span * kSpan < end; ++span) attend_span(span * kSpan, first, end);
    finish();
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;

  // Keys that the query of a row sees.
  int64_t first_seen(int64_t row) const {
    return args_.window ? std::max<int64_t>(tile_.first_query + row - args_.window + 1, 0) : 0;
  }
  int64_t end_seen(int64_t row) const {
    return args_.window ? std::min<int64_t>(tile_.first_query + row + args_.window, tile_.num_keys) : tile_.num_keys;
  }

  // Strips of nearly equal height.
  int64_t strip_begin(int64_t strip) const { return rows_ * strip / num_strips_; }

  void pack_strip(int64_t strip) {
    const int64_t begin = strip_begin(strip), count = strip_begin(strip + 1) - begin;
    const T* queries[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t token = tile_.first_token + tile_.first_query + begin + std::min(lane, count - 1);
      queries[lane] =
          static_cast<const T*>(args_.query) + token * args_.query_stride + head_ * args_.query_head_stride;
    }
    pack_queries<C>(queries, args_.head_dim, queries_ + begin * units_, count);  // the next strip overwrites lanes past it
  }

  // A key or a value of the text; past its end, zeros.
  const T* row_of(const void* tensor, int64_t stride, int64_t head_stride, int64_t position) const {
    if (position >= tile_.num_keys) return reinterpret_cast<const T*>(zeros_);
    const int64_t kv_head = head_ / (args_.num_heads / args_.num_kv_heads);
    return static_cast<const T*>(tensor) + (tile_.first_token + position) * stride + kv_head * head_stride;
  }

  void pack_panel(int64_t begin, int64_t panel) {
    const T* rows[kPanel];
    const int64_t first = begin + panel * kPanel;
    for (int64_t i = 0; i < kPanel; ++i) rows[i] = row_of(args_.key, args_.key_stride, args_.key_head_stride, first + i);
    float* keys = keys_ + panel * kPanel * units_;
    attention::pack_queries<C>(rows, args_.head_dim, keys, kPanel);
    attention::pack_queries<C>(rows + kLanes, args_.head_dim, keys + kLanes, kPanel);
    for (int64_t i = 0; i < kPanel; ++i) {
      rows[i] = row_of(args_.value, args_.value_stride, args_.value_head_stride, first + i);
    }
    pack_values<C>(rows, 0, 0, args_.head_dim, values_ + panel * kPanel / kPerUnit<C> * kPanel,
                   kSpan / kPerUnit<C> * kPanel);
  }

  // `begin`: of the span; `first`, `end`: keys that queries of the tile see.
  void attend_span(int64_t begin, int64_t first, int64_t end) {
    const int64_t first_panel = std::max<int64_t>(first - begin, 0) / kPanel;
    const int64_t end_panel = (std::min<int64_t>(end - begin, kSpan) + kPanel - 1) / kPanel;
    for (int64_t panel = first_panel; panel < end_panel; ++panel) pack_panel(begin, panel);
    for (int64_t strip = 0; strip < num_strips_; ++strip) attend_strip(begin, strip);
  }

  void attend_strip(int64_t begin, int64_t strip) {
    const int64_t first_row = strip_begin(strip), count = strip_begin(strip + 1) - first_row;
    const auto seen_by = [&](int64_t row) {
      return RowSeen{std::max<int64_t>(first_seen(row) - begin, 0), std::min<int64_t>(end_seen(row) - begin, kSpan), 0,
                     0};
    };
    const int64_t first = seen_by(first_row).first / kPanel;
    const int64_t end = (seen_by(first_row + count - 1).end + kPanel - 1) / kPanel;
    if (first >= end) return;
    score_strip(first_row, count, first, end);
    Softmax softmax[kStripRows<C>];
    std::fill(softmax, softmax + count, Softmax{kUnseen, 0.0f});
    RowSeen seen[kStripRows<C>];
    for (int64_t i = 0; i < count; ++i) {  // apart from the weights: the next row need not wait for a row's maximum
      seen[i] = seen_by(first_row + i);
      seen[i].begin_panels = first * kPanel;
      seen[i].end_panels = end * kPanel;
      if (args_.distance_bias) add_bias(scores_ + i * kSpan, seen[i], begin - tile_.first_query - first_row - i);
      softmax[i].maximum = largest_score(scores_ + i * kSpan, seen[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (seen[i].first >= seen[i].end) continue;
      softmax[i].total =
          weigh<C>(scores_ + i * kSpan, softmax[i].maximum, seen[i], weights_ + i * kSpan / kPerUnit<C>);
    }
    mix_strip(count, first, end);
    for (int64_t i = 0; i < count; ++i) {
      merge(softmax_[first_row + i], sums_ + (first_row + i) * size_, softmax[i], span_sums_ + i * size_, size_);
    }
  }

  // Scores of `count` rows and the keys of panels first … end - 1 of the span.
  void score_strip(int64_t first_row, int64_t count, int64_t first, int64_t end) {
    if constexpr (kHasTiles<C>) {
      const Tiles tiles(count);
      const int64_t token = tile_.first_token + tile_.first_query + first_row;
      const auto* queries = static_cast<const bf16*>(args_.query) + token * args_.query_stride +
                            head_ * args_.query_head_stride;
      for (int64_t panel = first; panel < end; ++panel) {
        const auto* keys = reinterpret_cast<const bf16*>(keys_ + panel * kPanel * units_);
        multiply_panel(queries, args_.query_stride, keys, args_.head_dim, count, scores_ + panel * kPanel, kSpan);
      }
      const vec factor = splat(factors_[0]);
      for (int64_t i = 0; i < count; ++i) {
        float* const scores = scores_ + i * kSpan;
        for (int64_t key = first * kPanel; key < end * kPanel; key += kLanes) {
          store(scores + key, load(scores + key) * factor);
        }
      }
      return;
    }
    for (int64_t panel = first; panel < end; ++panel) {
      const float* keys = keys_ + panel * kPanel * units_;
      const char* nothing = reinterpret_cast<const char*>(keys);
      score<C, C>(queries_ + first_row * units_, {{keys, keys + kLanes}, kPanel, {nothing, nothing}, 0}, units_, count,
                  factors_ + first_row, scores_ + panel * kPanel);
    }
  }

  // Sums of the values of panels first … end - 1 by the weights of `count` rows.
  void mix_strip(int64_t count, int64_t first, int64_t end) {
    const int64_t first_unit = first * kPanel / kPerUnit<C>, num_keys = (end - first) * kPanel;
    if constexpr (kHasTiles<C>) {
      const Tiles tiles(count);
      const auto* weights = reinterpret_cast<const bf16*>(weights_ + first_unit);
      for (int64_t element = 0; element < size_; element += kPanel) {
        const float* values = values_ + element * kSpan / kPerUnit<C> + first_unit * kPanel;
        multiply_panel(weights, kSpan, reinterpret_cast<const bf16*>(values), num_keys, count, span_sums_ + element,
                       size_);
      }
      return;
    }
    for (int64_t element = 0; element < size_; element += kPanel) {
      const float* values = values_ + element * kSpan / kPerUnit<C> + first_unit * kPanel;
      mix<C>(weights_ + first_unit, values, num_keys / kPerUnit<C>, count, span_sums_ + element, size_);
    }
  }

  // `distance`: of the span's first key from the query. Scores are exponents of 2.
  void add_bias(float* scores, const RowSeen& seen, int64_t distance) const {
    const float* bias = args_.distance_bias + head_ * args_.num_distances + args_.num_distances / 2 + distance;
    const vec log2e = splat(static_cast<float>(kLog2E));
    int64_t key = seen.first;
    for (; key + kLanes <= seen.end; key += kLanes) store(scores + key, fma(load(bias + key), log2e, load(scores + key)));
    for (; key < seen.end; ++key) scores[key] = std::fma(bias[key], static_cast<float>(kLog2E), scores[key]);
  }

  void finish() const {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = tile_.first_token + tile_.first_query + row;
      T* out = static_cast<T*>(args_.out) + (token * args_.num_heads + head_) * args_.head_dim;
      const float* sums = sums_ + row * size_;
      const vec total = splat(softmax_[row].total);
      int64_t d = 0;
      for (; d + kLanes <= args_.head_dim; d += kLanes) store(out + d, load(sums + d) / total);
      for (; d < args_.head_dim; ++d) store_one(out + d, sums[d] / softmax_[row].total);
    }
  }

  const EncodeAttention& args_;
  const TextTile tile_;
  const int64_t head_, rows_, units_, size_, num_strips_;
  float *keys_, *values_, *scores_, *weights_, *span_sums_, *queries_, *sums_, *zeros_, *factors_;
  Softmax* softmax_;
};

template <typename T, typename C>
void encode(const EncodeAttention& args, int64_t num_texts) {
  static thread_local Scratch memory;
  int64_t num_tiles = 0;
  const auto for_tiles = [&](const auto& f) {
    for (int64_t text = 0; text < num_texts; ++text) {
      const int32_t start = args.query_starts[text], count = args.query_starts[text + 1] - start;
      for (int32_t query = 0; query < count; query += kTextQueries) {
        f(TextTile{start, count, query, std::min<int32_t>(kTextQueries, count - query)});
      }
    }
  };
  for_tiles([&](const TextTile&) { ++num_tiles; });
  auto* tiles = static_cast<TextTile*>(memory.get(num_tiles * sizeof(TextTile)));
  TextTile* at = tiles;
  for_tiles([&](const TextTile& tile) { *at++ = tile; });
  parallel_for(num_tiles * args.num_heads, [&](int64_t index) {
    TextQueries<T, C>(args, tiles[index / args.num_heads], index % args.num_heads).attend();
  });
}

}  // namespace
}  // namespace triptych::attention

TRIPTYCH_KERNEL(encode_attention, triptych::attention::EncodeAttention,
                dtype, query, query_stride, query_head_stride, key, key_stride, key_head_stride, value, value_stride,
                value_head_stride, query_starts, out, num_heads, num_kv_heads, head_dim, scale, window,
                distance_bias, num_distances) {
  using namespace triptych;
  using namespace triptych::attention;
  if (args.dtype == kFloat32) return encode<float, float>(args, rows);
  if constexpr (kHasBf16Products) return encode<bf16, bf16>(args, rows);
  encode<bf16, float>(args, rows);
}
