// The rows of keys and values that a thread reads, in their order, so that memory is asked for them in time: pages lie
// anywhere, so the processor cannot guess the next one.
#pragma once

#include "attention/pages.h"
#include "simd/scalar.h"

namespace triptych::attention {

constexpr int64_t kAhead = kPanel;  // rows; a head of 64 in 8 bits is then 2 KiB ahead, one in float32 8 KiB

// Ask for what will be read kAhead rows after these, `bytes` from byte `first` of each on.
template <int Count, typename T>
[[gnu::always_inline]] inline void prefetch_rows_ahead(const T* const* rows, int64_t first) {
  if (first % 64 != 0) return;  // a line that was asked for
  unroll<Count>([&](auto i) { prefetch_line(reinterpret_cast<const char*>(rows[i + kAhead]) + first); });
}

// One span of one key head: what a thread attends to at a time.
struct Unit {
  int64_t item, first_head, kv_head, span;
  const Piece* piece;

  // The first of an item.
  Unit(const Plan& plan, int64_t item)
      : item(item), first_head(plan.first_head(item)), kv_head(first_head), piece(&plan.piece(item)) {
    span = piece->first_span;
  }

  // The next one that the same thread takes; false if there is none.
  bool advance(const Plan& plan) {
    if (++span < piece->end_span) return true;
    span = piece->first_span;
    if (++kv_head < first_head + plan.heads_per_item) return true;
    const int64_t next = item + num_threads();  // a guess: threads claim items in turn
    if (next >= plan.num_items()) return false;
    *this = Unit(plan, next);
    return true;
  }
};

// Addresses of the keys of a span, by vectors of kLanes keys, and of its values, key by key; both by whole panels. After
// each stand those of what the thread reads next. Values that no query sees are zeros; such keys are any.
template <typename T>
class SpanMemory {
 public:
  SpanMemory(const PagedAttention& args, const Plan& plan, Unit unit, const T* zeros)
      : pages_(pages_of<T>(args, plan.tile(*unit.piece), unit.kv_head)), seen_(args, plan.tile(*unit.piece), unit.span),
        span_begin_(unit.span * kSpan), first_panel_(seen_.first_panel()),
        num_rows_((seen_.end_panel() - first_panel_) * kPanel) {
    const int64_t first = first_panel_ * kPanel;
    std::fill(values_, values_ + seen_.first - first, zeros);
    std::fill(values_ + seen_.end - first, values_ + num_rows_, zeros);
    pages_.for_pages(span_begin_ + seen_.first, span_begin_ + seen_.end,
                     [&](int64_t key, int64_t count, const T* page, int64_t offset) {
                       const T** to = values_ + key - span_begin_ - first;
                       const T* from = page + pages_.values + offset * pages_.head_dim;
                       for (; count > 0; --count, from += pages_.head_dim) *to++ = from;
                     });
    if (keys_are_vectors()) add_keys();
    add_next(args, plan, unit, zeros);
  }

  // Whether `keys` gives them; else they must be gathered.
  bool keys_are_vectors() const { return pages_.block_size % kLanes == 0; }

  KeyPanel keys(int64_t panel) const {
    const float* const* own = keys_ + (panel - first_panel_) * 2;
    const bool is_last = panel + 1 == seen_.end_panel();
    const int64_t stride = pages_.block_size;
    return {{own[0], own[1]}, stride,
            {reinterpret_cast<const char*>(own[2]), reinterpret_cast<const char*>(own[3])},
            static_cast<int64_t>((is_last ? kLanes : stride) * sizeof(float))};
  }

  // A panel of keys from anywhere: to[word][kPanel].
  void gather_keys(int64_t panel, int64_t words, float* to) const {
    const int64_t first = panel * kPanel, begin = std::max(first, seen_.first);
    pages_.for_pages(span_begin_ + begin, span_begin_ + std::min(first + kPanel, seen_.end),
                     [&](int64_t key, int64_t count, const T* page, int64_t offset) {
                       const float* from = reinterpret_cast<const float*>(page) + offset;
                       float* own = to + key - span_begin_ - first;
                       const auto copy = [&](auto size) {
                         for (int64_t word = 0; word < words; ++word, from += pages_.block_size, own += kPanel) {
                           std::memcpy(own, from, size * sizeof(float));
                         }
                       };
                       // one move for each word of the small blocks that someone may choose
                       if (count == kLanes / 2) return copy(std::integral_constant<int64_t, kLanes / 2>{});
                       if (count == kLanes / 4) return copy(std::integral_constant<int64_t, kLanes / 4>{});
                       copy(count);
                     });
  }

  const T* const* values(int64_t panel) const { return values_ + (panel - first_panel_) * kPanel; }

 private:
  void add_keys() {
    const int64_t first = first_panel_ * 2, num_vectors = num_rows_ / kLanes;
    const int64_t begin = seen_.first / kLanes, end = (seen_.end + kLanes - 1) / kLanes;
    pages_.for_pages(span_begin_ + begin * kLanes, span_begin_ + end * kLanes,
                     [&](int64_t key, int64_t count, const T* page, int64_t offset) {
                       const float** to = keys_ + (key - span_begin_) / kLanes - first;
                       const float* from = reinterpret_cast<const float*>(page) + offset;
                       for (; count > 0; count -= kLanes, from += kLanes) *to++ = from;
                     });
    std::fill(keys_, keys_ + begin - first, keys_[begin - first]);
    std::fill(keys_ + end - first, keys_ + num_vectors, keys_[end - first - 1]);
    keys_[num_vectors] = reinterpret_cast<const float*>(values_[0]);
    keys_[num_vectors + 1] = reinterpret_cast<const float*>(values_[kLanes]);
  }

  void add_next(const PagedAttention& args, const Plan& plan, Unit unit, const T* zeros) {
    const T** to = values_ + num_rows_;
    std::fill(to, to + kAhead, zeros);
    if (!unit.advance(plan)) return;
    const Tile& tile = plan.tile(*unit.piece);
    const Seen seen(args, tile, unit.span);
    const int64_t first = unit.span * kSpan + seen.first, end = unit.span * kSpan + seen.end;
    const Pages<T> pages = pages_of<T>(args, tile, unit.kv_head);
    // a block of kLanes keys as if its bytes were rows
    pages.for_pages(first, std::min(first + kAhead, end), [&](int64_t, int64_t count, const T* page, int64_t) {
      for (; count > 0; --count, page += pages.head_dim) *to++ = page;
    });
    if constexpr (std::is_same_v<T, int8_t>) {  // scales are read all at once where a span begins
      const Pages<float> scales = scales_of(args, tile, unit.kv_head);
      scales.for_pages(first, end, [&](int64_t, int64_t count, const float* page, int64_t offset) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(float)) {
          prefetch_line(page + offset + i);
          prefetch_line(page + scales.values + offset + i);
        }
      });
    }
  }

  const Pages<T> pages_;
  const Seen seen_;
  const int64_t span_begin_, first_panel_, num_rows_;
  const float* keys_[kSpan / kLanes + 2];
  const T* values_[kSpan + kAhead];
};

}  // namespace triptych::attention
