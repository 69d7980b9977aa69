// Attention over the paged cache, for single queries, chunks of prompts and both together.
//
// attention_math.h says what is computed, attention_plan.h who computes it; here a thread does its part.
#include "attention/lookahead.h"
#include "attention/pack.h"

namespace triptych::attention {
namespace {

// The rows of one tile on one thread.
template <typename Q, typename T, typename C>
class TileRows {
 public:
  TileRows(const PagedAttention& args, const Tile& tile, int64_t kv_head)
      : args_(args), tile_(tile), kv_head_(kv_head), rows_(tile.num_queries * args.group()),
        units_(num_units<C>(args.head_dim)), size_(args.padded_head_dim()),
        num_strips_((rows_ + kMaxTileRows - 1) / kMaxTileRows) {
    static thread_local Scratch scratch;
    const int64_t floats = rows_ * (units_ + size_ + 3) + kMaxTileRows * (2 * kSpan + size_ + 2) +
                           kSpan * units_ + kSpan / kPerUnit<C> * size_ + size_ + 12 * kLanes;
    float* at = static_cast<float*>(scratch.get(floats * sizeof(float)));
    const auto take = [&](int64_t count) {
      float* own = at;
      at += (count + kLanes - 1) / kLanes * kLanes;
      return own;
    };
    keys_ = take(kSpan * units_);
    values_ = take(kSpan / kPerUnit<C> * size_);
    scores_ = take(kMaxTileRows * kSpan);
    weights_ = kPerUnit<C> == 1 ? scores_ : take(kMaxTileRows * kSpan);
    span_sums_ = take(kMaxTileRows * size_);
    queries_ = take(rows_ * units_ + kLanes);
    sums_ = take(rows_ * size_);
    zeros_ = take(size_);
    factors_ = take(rows_);
    softmax_ = reinterpret_cast<Softmax*>(take(2 * rows_));
    std::fill(zeros_, zeros_ + size_, 0.0f);
    std::fill(softmax_, softmax_ + rows_, Softmax{kUnseen, 0.0f});
    std::fill(factors_, factors_ + rows_, args.scale * kLog2E);
  }

  // All that the keys of some spans give; into `partials`, one after the other, or merged here if that is null.
  void attend(const Piece& piece, float* partials, Lookahead<T>& lookahead) {
    for (int64_t strip = 0; strip < num_strips_; ++strip) pack_queries(strip);
    for (int64_t span = piece.first_span; span < piece.end_span; ++span) {
      float* to = partials ? partials + (span - tile_.first_span) * rows_ * Plan::row_size(args_) : nullptr;
      attend_span(span, to, lookahead);
    }
  }

  void merge_all(const float* partials) {
    for (int64_t span = tile_.first_span; span < tile_.end_span; ++span) {
      for (int64_t row = 0; row < rows_; ++row, partials += Plan::row_size(args_)) {
        const Softmax& span_softmax = *reinterpret_cast<const Softmax*>(partials);
        merge(softmax_[row], sums_ + row * size_, span_softmax, partials + kPanel, size_);
      }
    }
  }

  void finish() const {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = tile_.first_token + row / args_.group();
      Q* out = static_cast<Q*>(args_.out) + (token * args_.num_heads + head_of(row)) * args_.head_dim;
      const float* sums = sums_ + row * size_;
      const vec total = splat(softmax_[row].total);
      int64_t d = 0;
      for (; d + kLanes <= args_.head_dim; d += kLanes) store(out + d, load(sums + d) / total);
      for (; d < args_.head_dim; ++d) store_one(out + d, sums[d] / softmax_[row].total);
    }
  }

 private:
  int64_t head_of(int64_t row) const { return kv_head_ * args_.group() + row % args_.group(); }

  // Strips of nearly equal height.
  int64_t strip_begin(int64_t strip) const { return rows_ * strip / num_strips_; }

  const Q* query_of(int64_t row) const {
    const int64_t token = tile_.first_token + row / args_.group();
    return static_cast<const Q*>(args_.query) + token * args_.query_stride + head_of(row) * args_.query_head_stride;
  }

  void pack_queries(int64_t strip) {
    const int64_t begin = strip_begin(strip), count = strip_begin(strip + 1) - begin;
    const Q* queries[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) queries[lane] = query_of(begin + std::min(lane, count - 1));
    float* to = queries_ + begin * units_;
    const auto ahead = [](int64_t) {};
    // lanes past the last row are overwritten by the next step
    if constexpr (kIsInt<C>) {
      const float* quantized[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        float* own = span_sums_ + std::min(lane, count - 1) * size_;  // nothing is summed yet
        if (lane < count) {
          const float scale = quantize_query(queries[lane], args_.head_dim, reinterpret_cast<int16_t*>(own));
          factors_[begin + lane] *= scale;
        }
        quantized[lane] = own;
      }
      pack_columns<float>(quantized, units_, to, count, ahead);
    } else {
      pack_columns<C>(queries, args_.head_dim, to, count, ahead);
    }
  }

  void attend_span(int64_t span, float* partials, Lookahead<T>& lookahead) {
    const Seen seen(args_, tile_, span);
    const SpanRows<T> rows(pages_of<T>(args_, tile_, kv_head_), span * kSpan, seen.first, seen.end,
                           reinterpret_cast<const T*>(zeros_));
    const SpanScales<T> scales(args_, tile_, kv_head_, span * kSpan, seen.first, seen.end);
    const auto ahead = [&](int64_t bytes) __attribute__((always_inline)) { lookahead.read(bytes); };
    const auto pack_keys_of = [&](int64_t panel, float* to) {
      pack_keys<C>(rows.keys + panel * kPanel, args_.head_dim, to, ahead);
    };
    const auto pack_values_of = [&](int64_t panel, float* to) {
      pack_values<C>(rows.values + panel * kPanel, args_.head_dim, to, kSpan / kPerUnit<C> * kPanel, ahead);
    };
    if (num_strips_ == 1) {  // panels are used once, so they stay in the first-level cache
      const auto keys = [&](int64_t panel) {
        pack_keys_of(panel, keys_);
        return keys_;
      };
      const auto mix_values = [&](int64_t first, int64_t end) {
        for (int64_t panel = first; panel < end; ++panel) {
          if constexpr (kIsInt<C>) {
            for (int64_t d = 0; d < args_.head_dim; d += kPanel) {
              ahead(kPanel * std::min<int64_t>(kPanel, args_.head_dim - d));
              mix_bytes(weights_ + panel * kPanel / 2, rows.values + panel * kPanel, d, args_.head_dim, rows_,
                        span_sums_ + d, size_);
            }
          } else {
            pack_values_of(panel, values_);
            mix_panels(panel, panel + 1, values_, rows_);
          }
        }
      };
      return attend_strip(span, 0, keys, scales, mix_values, partials);
    }
    for (int64_t panel = seen.first_panel(); panel < seen.end_panel(); ++panel) {
      pack_keys_of(panel, keys_ + panel * kPanel * units_);
    }
    for (int64_t panel = seen.first_panel(); panel < seen.end_panel(); ++panel) {
      pack_values_of(panel, values_ + panel * kPanel / kPerUnit<C> * kPanel);
    }
    for (int64_t strip = 0; strip < num_strips_; ++strip) {
      const auto keys = [&](int64_t panel) { return keys_ + panel * kPanel * units_; };
      const auto mix_values = [&](int64_t first, int64_t end) {
        const int64_t count = strip_begin(strip + 1) - strip_begin(strip);
        mix_panels(first, end, values_ + first * kPanel / kPerUnit<C> * kPanel, count);
      };
      attend_strip(span, strip, keys, scales, mix_values, partials);
    }
  }

  // Add the weighted values of some panels of keys, packed at `values`, to those of the span.
  void mix_panels(int64_t first, int64_t end, const float* values, int64_t count) {
    for (int64_t d = 0; d < size_; d += kPanel) {
      mix<C>(weights_ + first * kPanel / kPerUnit<C>, values + d * kSpan / kPerUnit<C>,
             (end - first) * kPanel / kPerUnit<C>, count, span_sums_ + d, size_);
    }
  }

  // `keys(panel)` gives a packed panel of keys, `mix_values(first, end)` mixes some panels of values.
  template <typename Keys, typename MixValues>
  void attend_strip(int64_t span, int64_t strip, const Keys& keys, const SpanScales<T>& scales,
                    const MixValues& mix_values, float* partials) {
    const int64_t begin = span * kSpan, first_row = strip_begin(strip), count = strip_begin(strip + 1) - first_row;
    const auto position = [&](int64_t row) { return tile_.position + row / args_.group(); };
    const auto first_seen = [&](int64_t row) { return std::max<int64_t>(args_.first_seen(position(row)) - begin, 0); };
    const auto end_seen = [&](int64_t row) { return std::min<int64_t>(position(row) + 1 - begin, kSpan); };
    const int64_t first = first_seen(first_row) / kPanel;
    const int64_t end = (end_seen(first_row + count - 1) + kPanel - 1) / kPanel;
    Softmax softmax[kMaxTileRows];
    [[maybe_unused]] float weight_scales[kMaxTileRows] = {};
    std::fill(softmax, softmax + count, Softmax{kUnseen, 0.0f});
    if (first < end) {
      for (int64_t panel = first; panel < end; ++panel) {
        score<C>(queries_ + first_row * units_, keys(panel), units_, count, factors_ + first_row,
                 scales.of_keys(panel * kPanel), scores_ + panel * kPanel);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first_row + i;
        if (first_seen(row) >= end_seen(row)) continue;
        const int64_t begin_key = first * kPanel, end_key = end * kPanel;
        float* weights = weights_ + i * kSpan / kPerUnit<C>;
        if constexpr (kIsInt<C>) {
          float* scores = scores_ + i * kSpan;
          softmax[i] = weigh<float>(scores, begin_key, end_key, first_seen(row), end_seen(row), scores);
          weight_scales[i] = quantize_weights(scores, scales.values, begin_key, end_key, first_seen(row), end_seen(row),
                                              reinterpret_cast<int16_t*>(weights));
        } else {
          softmax[i] = weigh<C>(scores_ + i * kSpan, begin_key, end_key, first_seen(row), end_seen(row), weights);
        }
      }
      std::fill(span_sums_, span_sums_ + count * size_, 0.0f);
      mix_values(first, end);
      if constexpr (kIsInt<C>) {
        for (int64_t i = 0; i < count; ++i) scale_sums(span_sums_ + i * size_, size_, weight_scales[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first_row + i;
      if (partials) {
        float* to = partials + row * Plan::row_size(args_);
        *reinterpret_cast<Softmax*>(to) = softmax[i];
        std::copy_n(span_sums_ + i * size_, size_, to + kPanel);
      } else {
        merge(softmax_[row], sums_ + row * size_, softmax[i], span_sums_ + i * size_, size_);
      }
    }
  }

  static constexpr double kLog2E = 1.4426950408889634;

  const PagedAttention& args_;
  const Tile& tile_;
  int64_t kv_head_, rows_, units_, size_, num_strips_;
  float *keys_, *values_, *scores_, *weights_, *span_sums_, *queries_, *sums_, *zeros_;
  float* factors_;  // [rows], of what a query and a key give
  Softmax* softmax_;
};

template <typename Q, typename T, typename C>
void attend(const PagedAttention& args, int64_t num_sequences) {
  const Plan plan(args, num_sequences);
  parallel_for(plan.num_items(), [&](int64_t index) {
    const Piece& piece = plan.piece(index);
    const Tile& tile = plan.tile(piece);
    Lookahead<T> lookahead(args, plan, index);
    for (int64_t i = 0; i < plan.heads_per_item; ++i) {
      const int64_t kv_head = plan.first_head(index) + i;
      TileRows<Q, T, C> rows(args, tile, kv_head);
      if (tile.num_pieces == 1) {
        rows.attend(piece, nullptr, lookahead);
      } else {
        const int64_t spans = tile.end_span - tile.first_span;
        float* partials = plan.partials + tile.partials +
                          kv_head * spans * tile.num_queries * args.group() * Plan::row_size(args);
        rows.attend(piece, partials, lookahead);
        auto& unfinished = plan.unfinished[piece.tile * args.num_kv_heads + kv_head];
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        rows.merge_all(partials);
      }
      rows.finish();
    }
  });
}

template <typename Q, typename T>
void attend(const PagedAttention& args, int64_t num_sequences) {
  if constexpr (std::is_same_v<T, int8_t>) {
    attend<Q, T, int16_t>(args, num_sequences);
  } else if constexpr (kHasBf16Products && sizeof(Q) == 2 && sizeof(T) == 2) {
    attend<Q, T, bf16>(args, num_sequences);
  } else {
    attend<Q, T, float>(args, num_sequences);
  }
}

template <typename Q>
void attend(const PagedAttention& args, int64_t num_sequences) {
  if (args.cache_dtype == kFloat32) return attend<Q, float>(args, num_sequences);
  if (args.cache_dtype == kInt8) return attend<Q, int8_t>(args, num_sequences);
  attend<Q, bf16>(args, num_sequences);
}

}  // namespace
}  // namespace triptych::attention

TRIPTYCH_KERNEL(paged_attention, triptych::attention::PagedAttention,
                dtype, cache_dtype, query, query_stride, query_head_stride, kv_cache, kv_scales, block_tables,
                block_table_stride, query_starts, seq_lens, out, num_heads, num_kv_heads, head_dim, block_size,
                scale, window) {
  using namespace triptych;
  using namespace triptych::attention;
  if (args.dtype == kFloat32) return attend<float>(args, rows);
  attend<bf16>(args, rows);
}
