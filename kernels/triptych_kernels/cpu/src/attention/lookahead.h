// The rows of keys and values that a thread reads, in their order, so that memory is asked for them in time: pages lie
// anywhere, so the processor cannot guess the next one.
#pragma once

#include "attention/pages.h"
#include "simd/scalar.h"

namespace triptych::attention {

constexpr int64_t kBytesAhead = 8 << 10;  // 128 lines: a thread then waits for all that the second level can ask for
constexpr int64_t kMostAhead = 128;       // rows

// The rows that a thread asks for ahead of those that it reads: whole panels.
template <typename T>
int64_t rows_ahead(int64_t head_dim) {
  const int64_t panel_bytes = kPanel * head_dim * static_cast<int64_t>(sizeof(T));
  return std::clamp<int64_t>(kBytesAhead / panel_bytes, 1, kMostAhead / kPanel) * kPanel;
}

// Ask for what will be read `ahead` rows after these, from byte `first` of each on.
template <int Count, typename T>
[[gnu::always_inline]] inline void prefetch_rows_ahead(const T* const* rows, int64_t ahead, int64_t first) {
  if (first % kLineBytes != 0) return;  // a line that was asked for
  unroll<Count>([&](auto i) { prefetch_ahead(reinterpret_cast<const char*>(rows[i + ahead]) + first); });
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
// each stand those of what the thread reads next. Values that no query sees are zeros; such keys are any. Latent vectors
// have the addresses of values.
template <typename T>
class SpanMemory {
 public:
  SpanMemory(const PagedAttention& args, const Plan& plan, Unit unit, const T* zeros)
      : pages_(pages_of<T>(args, plan.tile(*unit.piece), unit.kv_head)), seen_(args, plan.tile(*unit.piece), unit.span),
        span_begin_(unit.span * kSpan), first_panel_(seen_.first_panel()),
        num_rows_((seen_.end_panel() - first_panel_) * kPanel), ahead_(rows_ahead<T>(args.head_dim)),
        is_latent_(args.is_latent) {
    const int64_t first = first_panel_ * kPanel;
    std::fill(values_, values_ + seen_.first - first, zeros);
    std::fill(values_ + seen_.end - first, values_ + num_rows_, zeros);
    pages_.for_pages(span_begin_ + seen_.first, span_begin_ + seen_.end,
                     [&](int64_t key, int64_t count, const T* page, int64_t offset) {
                       const T** to = values_ + key - span_begin_ - first;
                       const T* from = page + pages_.values + offset * pages_.vector_stride;
                       for (; count > 0; --count, from += pages_.vector_stride) *to++ = from;
                     });
    if (keys_are_vectors()) add_keys();
    add_next(args, plan, unit, zeros);
  }

  // Whether `keys` gives them; else they must be gathered.
  bool keys_are_vectors() const { return pages_.block_size % kLanes == 0 && !is_latent_; }

  KeyPanel keys(int64_t panel) const {
    const float* const* own = keys_ + (panel - first_panel_) * 2;
    const int64_t stride = pages_.block_size, next = (panel - first_panel_) * kPanel + ahead_;
    if (next < num_rows_) {
      const float* const* read = keys_ + next / kLanes;
      return {{own[0], own[1]}, stride, {bytes(read[0]), bytes(read[1])}, stride * 4};
    }
    const T* const* read = values_ + (next - num_rows_);
    return {{own[0], own[1]}, stride, {bytes(read[0]), bytes(read[kLanes])}, kLineBytes};
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

  // Rows from a value to what is read so much later.
  int64_t ahead() const { return ahead_; }

 private:
  static const char* bytes(const void* address) { return static_cast<const char*>(address); }

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
  }

  void add_next(const PagedAttention& args, const Plan& plan, Unit unit, const T* zeros) {
    const T** to = values_ + num_rows_;
    std::fill(to, to + ahead_, zeros);
    if (!unit.advance(plan)) return;
    const Tile& tile = plan.tile(*unit.piece);
    const Seen seen(args, tile, unit.span);
    const int64_t first = unit.span * kSpan + seen.first, end = unit.span * kSpan + seen.end;
    const Pages<T> pages = pages_of<T>(args, tile, unit.kv_head);
    // a block of keys as if its bytes were rows
    const int64_t end_keys = is_latent_ ? first : std::min(first + ahead_, end);
    pages.for_pages(first, end_keys, [&](int64_t, int64_t count, const T* page, int64_t) {
      for (; count > 0; --count, page += pages.vector_stride) *to++ = page;
    });
    const int64_t left = values_ + num_rows_ + ahead_ - to;
    pages.for_pages(first, std::min(first + left, end), [&](int64_t, int64_t count, const T* page, int64_t offset) {
      const T* from = page + pages.values + offset * pages.vector_stride;
      for (; count > 0; --count, from += pages.vector_stride) *to++ = from;
    });
    if constexpr (std::is_same_v<T, int8_t>) {  // scales are read all at once where a span begins
      const Pages<float> scales = scales_of(args, tile, unit.kv_head);
      scales.for_pages(first, end, [&](int64_t, int64_t count, const float* page, int64_t offset) {
        for (int64_t i = 0; i < count; i += kLineBytes / sizeof(float)) {
          prefetch_line(page + offset + i);
          prefetch_line(page + scales.values + offset + i);
        }
      });
    }
  }

  const Pages<T> pages_;
  const Seen seen_;
  const int64_t span_begin_, first_panel_, num_rows_, ahead_;
  const bool is_latent_;
  const float* keys_[kSpan / kLanes];
  const T* values_[kSpan + kMostAhead];
};

}  // namespace triptych::attention
