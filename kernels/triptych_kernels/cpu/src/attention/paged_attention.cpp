// Attention over the paged cache, for single queries, chunks of prompts and both together.
//
// arithmetic.h says what is computed, plan.h who computes it; here a thread does its part.
#include "attention/pack.h"

namespace triptych::attention {
namespace {

constexpr int64_t kLargestBlockInPlace = 64;

// The rows of one tile on one thread.
template <typename Q, typename T, typename C>
class TileRows {
 public:
  // `unit`: the first of the rows.
  TileRows(const PagedAttention& args, const Plan& plan, const Unit& unit)
      : args_(args), plan_(plan), unit_(unit), tile_(plan.tile(*unit.piece)),
        rows_(tile_.num_queries * args.group()), words_(args.head_dim / kPerUnit<T>),
        units_(words_ * kUnitsPerWord<C, T>), size_(args.padded_value_dim()),
        num_strips_((rows_ + kMaxTileRows - 1) / kMaxTileRows) {
    static thread_local Scratch scratch;
    const int64_t floats = rows_ * (units_ + size_ + 4) + kMaxTileRows * (2 * kSpan + size_ + 2) +
                           kSpan * units_ + kPanel * words_ + kSpan / kPerUnit<C> * size_ + args.padded_head_dim() +
                           14 * kLanes;
    float* at = static_cast<float*>(scratch.get(floats * sizeof(float)));
    const auto take = [&](int64_t count) {
      float* own = at;
      at += (count + kLanes - 1) / kLanes * kLanes;
      return own;
    };
    keys_ = take(kSpan * units_);
    gathered_ = take(kPanel * words_);
    values_ = take(kSpan / kPerUnit<C> * size_);
    scores_ = take(kMaxTileRows * kSpan);
    weights_ = kPerUnit<C> == 1 ? scores_ : take(kMaxTileRows * kSpan);
    span_sums_ = take(kMaxTileRows * size_);
    queries_ = take(rows_ * units_ + kLanes);
    sums_ = take(rows_ * size_);
    zeros_ = take(args.padded_head_dim());
    factors_ = take(rows_);
    softmax_ = reinterpret_cast<Softmax*>(take(2 * rows_));
    queries_of_rows_ = reinterpret_cast<int32_t*>(take(rows_));
    for (int32_t query = 0, row = 0; query < tile_.num_queries; ++query) {
      for (int64_t head = 0; head < args.group(); ++head) queries_of_rows_[row++] = query;
    }
    std::fill(zeros_, zeros_ + args.padded_head_dim(), 0.0f);
    std::fill(softmax_, softmax_ + rows_, Softmax{kUnseen, 0.0f});
    std::fill(factors_, factors_ + rows_, args.scale * kLog2E);
    if (args.sinks) begin_with_sinks();
  }

  // All that the keys of some spans give; into `partials`, one after the other, or merged here if that is null.
  void attend(float* partials) {
    for (int64_t strip = 0; strip < num_strips_; ++strip) pack_strip(strip);
    for (Unit unit = unit_; unit.span < unit.piece->end_span; ++unit.span) {
      float* to = partials ? partials + (unit.span - tile_.first_span) * rows_ * Plan::row_size(args_) : nullptr;
      attend_span(unit, to);
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
      const int64_t token = tile_.first_token + queries_of_rows_[row];
      Q* out = static_cast<Q*>(args_.out) + (token * args_.num_heads + head_of(row)) * args_.value_dim;
      const float* sums = sums_ + row * size_;
      const vec total = splat(softmax_[row].total);
      int64_t d = 0;
      for (; d + kLanes <= args_.value_dim; d += kLanes) store(out + d, load(sums + d) / total);
      for (; d < args_.value_dim; ++d) store_one(out + d, sums[d] / softmax_[row].total);
    }
  }

 private:
  // A sink is what a span with one key of that score and a value of zeros would give.
  void begin_with_sinks() {
    std::fill(sums_, sums_ + rows_ * size_, 0.0f);
    for (int64_t row = 0; row < rows_; ++row) {
      const float score = args_.sinks[head_of(row)] * static_cast<float>(kLog2E);
      softmax_[row] = {std::max(score, kUnseen), 1.0f};
    }
  }

  int64_t head_of(int64_t row) const {
    return unit_.kv_head * group_ + row - queries_of_rows_[row] * group_;
  }

  // `begin`: of a span.
  ScoreChange change_of(int64_t row, int64_t begin) const {
    const double slope = args_.alibi ? args_.alibi[head_of(row)] : 0.0;
    return {static_cast<float>(args_.soft_cap * kLog2E), static_cast<float>(slope * kLog2E),
            begin - tile_.position - queries_of_rows_[row]};
  }

  // Strips of nearly equal height.
  int64_t strip_begin(int64_t strip) const { return rows_ * strip / num_strips_; }

  const Q* query_of(int64_t row) const {
    const int64_t token = tile_.first_token + queries_of_rows_[row];
    return static_cast<const Q*>(args_.query) + token * args_.query_stride + head_of(row) * args_.query_head_stride;
  }

  void pack_strip(int64_t strip) {
    const int64_t begin = strip_begin(strip), count = strip_begin(strip + 1) - begin;
    const Q* queries[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) queries[lane] = query_of(begin + std::min(lane, count - 1));
    float* to = queries_ + begin * units_;
    // lanes past the last row are overwritten by the next step
    if constexpr (kIsInt<C>) {
      const float* quantized[kLanes];
      const float limit = largest_of_query(args_.head_dim);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        float* own = span_sums_ + std::min(lane, count - 1) * size_;  // nothing is summed yet
        if (lane < count) {
          const float scale = quantize_query(queries[lane], args_.head_dim, limit, reinterpret_cast<int16_t*>(own));
          factors_[begin + lane] *= scale;
        }
        quantized[lane] = own;
      }
      attention::pack_queries<float>(quantized, units_, to, count);
    } else {
      attention::pack_queries<C>(queries, args_.head_dim, to, count);
    }
  }

  void attend_span(const Unit& unit, float* partials) {
    const Seen seen(args_, tile_, unit.span);
    const SpanMemory<T> memory(args_, plan_, unit, reinterpret_cast<const T*>(zeros_));
    const SpanScales<T> scales(args_, tile_, unit.kv_head, unit.span * kSpan, seen.first, seen.end);
    const auto pack_values_of = [&](int64_t panel, int64_t first) {
      pack_values<C>(memory.values(panel), memory.ahead(), first, args_.value_dim, packed_values(first, panel),
                     kSpan / kPerUnit<C> * kPanel);
    };
    const auto stored_keys = [&](int64_t panel) {
      if (memory.keys_are_vectors()) return memory.keys(panel);
      memory.gather_keys(panel, words_, gathered_);
      return packed_panel(gathered_);
    };
    if (num_strips_ == 1) {  // panels are used once: what can stay where it is does
      const auto score_panel = [&](int64_t panel) {
        if (args_.is_latent) {
          score<C, C>(queries_, latent_keys(memory, panel), units_, rows_, factors_, scores_ + panel * kPanel);
        } else {
          score<C, T>(queries_, stored_keys(panel), words_, rows_, factors_, scores_ + panel * kPanel);
        }
      };
      const auto mix_values = [&](int64_t first, int64_t end) {
        mix_in_place<C>(weights_ + first * kPanel / kPerUnit<C>, memory.values(first), memory.ahead(),
                        (end - first) * kPanel, args_.value_dim, rows_, span_sums_, size_);
        const int64_t rest = args_.value_dim / kPanel * kPanel;
        if (rest == args_.value_dim) return;
        for (int64_t panel = first; panel < end; ++panel) pack_values_of(panel, rest);
        mix_packed(rest, first, end, rows_);
      };
      return attend_strip(unit.span, 0, score_panel, scales, mix_values, partials);
    }
    // words of larger blocks lie so far apart that they share few lines of the first-level cache
    const bool in_place =
        kUnitsPerWord<C, T> == 1 && memory.keys_are_vectors() && args_.block_size <= kLargestBlockInPlace;
    for (int64_t panel = seen.first_panel(); !in_place && panel < seen.end_panel(); ++panel) {
      if (args_.is_latent) {
        latent_keys(memory, panel);
      } else {
        unpack_keys<C, T>(stored_keys(panel), words_, keys_ + panel * kPanel * units_);
      }
    }
    for (int64_t panel = seen.first_panel(); panel < seen.end_panel(); ++panel) {
      pack_values_of(panel, 0);
    }
    for (int64_t strip = 0; strip < num_strips_; ++strip) {
      const int64_t first_row = strip_begin(strip), count = strip_begin(strip + 1) - first_row;
      const auto score_panel = [&](int64_t panel) {
        const KeyPanel keys = in_place ? memory.keys(panel) : packed_panel(keys_ + panel * kPanel * units_);
        score<C, C>(queries_ + first_row * units_, keys, units_, count, factors_ + first_row,
                    scores_ + panel * kPanel);
      };
      const auto mix_values = [&](int64_t first, int64_t end) { mix_packed(0, first, end, count); };
      attend_strip(unit.span, strip, score_panel, scales, mix_values, partials);
    }
  }

  // A panel of latent vectors as keys, which stay there.
  KeyPanel latent_keys(const SpanMemory<T>& memory, int64_t panel) {
    float* keys = keys_ + panel * kPanel * units_;
    if constexpr (!kIsInt<C>) pack_rows<C>(memory.values(panel), memory.ahead(), args_.head_dim, keys);
    return packed_panel(keys);
  }

  // Words or units that lie as [word][kPanel].
  static KeyPanel packed_panel(const float* keys) {
    const char* nothing = reinterpret_cast<const char*>(keys);
    return {{keys, keys + kLanes}, kPanel, {nothing, nothing}, 0};
  }

  // Where the values of a panel of keys are packed, from an element on that begins a part of the head.
  float* packed_values(int64_t element, int64_t panel) const {
    return values_ + element * kSpan / kPerUnit<C> + panel * kPanel / kPerUnit<C> * kPanel;
  }

  // The weighted values of some panels of keys, which are packed, from an element on.
  void mix_packed(int64_t element, int64_t first, int64_t end, int64_t count) {
    const int64_t first_unit = first * kPanel / kPerUnit<C>, num_units = (end - first) * kPanel / kPerUnit<C>;
    for (; element < size_; element += kPanel) {
      mix<C>(weights_ + first_unit, packed_values(element, first), num_units, count, span_sums_ + element, size_);
    }
  }

  // `score_panel(panel)` scores a panel of keys, `mix_values(first, end)` mixes some panels of values.
  template <typename ScorePanel, typename MixValues>
  void attend_strip(int64_t span, int64_t strip, const ScorePanel& score_panel, const SpanScales<T>& scales,
                    const MixValues& mix_values, float* partials) {
    const int64_t begin = span * kSpan, first_row = strip_begin(strip), count = strip_begin(strip + 1) - first_row;
    const auto seen_by = [&](int64_t row) {
      const int64_t position = tile_.position + queries_of_rows_[row];
      return RowSeen{std::max<int64_t>(args_.first_seen(position) - begin, 0),
                     std::min<int64_t>(position + 1 - begin, kSpan), 0, 0};
    };
    const int64_t first = seen_by(first_row).first / kPanel;
    const int64_t end = (seen_by(first_row + count - 1).end + kPanel - 1) / kPanel;
    Softmax softmax[kMaxTileRows];
    [[maybe_unused]] float weight_scales[kMaxTileRows] = {};
    std::fill(softmax, softmax + count, Softmax{kUnseen, 0.0f});
    if (first < end) {
      for (int64_t panel = first; panel < end; ++panel) {
        score_panel(panel);
      }
      RowSeen seen[kMaxTileRows];
      for (int64_t i = 0; i < count; ++i) {  // apart from the weights: the next row need not wait for a row's maximum
        seen[i] = seen_by(first_row + i);
        seen[i].begin_panels = first * kPanel;
        seen[i].end_panels = end * kPanel;
        if constexpr (kIsInt<C>) {
          scale_products(scores_ + i * kSpan, seen[i], factors_[first_row + i], scales.keys);
        }
        if (changes_scores_) change_scores(scores_ + i * kSpan, seen[i], change_of(first_row + i, begin));
        softmax[i].maximum = largest_score(scores_ + i * kSpan, seen[i]);
      }
      for (int64_t i = 0; i < count; ++i) {
        if (seen[i].first >= seen[i].end) continue;
        float *scores = scores_ + i * kSpan, *weights = weights_ + i * kSpan / kPerUnit<C>;
        if constexpr (kIsInt<C>) {
          softmax[i].total = weigh_shorts(scores, softmax[i].maximum, scales.values, seen[i],
                                          reinterpret_cast<int16_t*>(weights), weight_scales[i]);
        } else {
          softmax[i].total = weigh<C>(scores, softmax[i].maximum, seen[i], weights);
        }
      }
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
  const Plan& plan_;
  const Unit unit_;
  const Tile& tile_;
  const bool changes_scores_ = args_.soft_cap != 0.0 || args_.alibi;
  int64_t group_ = args_.group(), rows_, words_, units_, size_, num_strips_;
  float *keys_, *gathered_, *values_, *scores_, *weights_, *span_sums_, *queries_, *sums_, *zeros_;
  float* factors_;  // [rows], of what a query and a key give
  int32_t* queries_of_rows_;  // [rows], in the tile
  Softmax* softmax_;
};

template <typename Q, typename T, typename C>
void attend(const PagedAttention& args, int64_t num_sequences) {
  const Plan plan(args, num_sequences);
  parallel_for(plan.num_items(), [&](int64_t index) {
    Unit unit(plan, index);
    const Tile& tile = plan.tile(*unit.piece);
    for (; unit.kv_head < unit.first_head + plan.heads_per_item; ++unit.kv_head) {
      TileRows<Q, T, C> rows(args, plan, unit);
      if (tile.num_pieces == 1) {
        rows.attend(nullptr);
      } else {
        const int64_t spans = tile.end_span - tile.first_span;
        float* partials = plan.partials + tile.partials +
                          unit.kv_head * spans * tile.num_queries * args.group() * Plan::row_size(args);
        rows.attend(partials);
        auto& unfinished = plan.unfinished[unit.piece->tile * args.num_kv_heads + unit.kv_head];
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
                dtype, cache_dtype, query, query_stride, query_head_stride, kv_cache, vector_stride, kv_scales,
                block_tables, block_table_stride, query_starts, seq_lens, out, num_heads, num_kv_heads, head_dim,
                value_dim, is_latent, block_size, scale, window, chunk, soft_cap, sinks, alibi, stages) {
  using namespace triptych;
  using namespace triptych::attention;
  make_all_rows(args.stages);  // tokens see those before them
  if (args.dtype == kFloat32) return attend<float>(args, rows);
  attend<bf16>(args, rows);
}
