// Prefetching of what attention will read next.
#pragma once

#include "attention/pages.h"

namespace triptych::attention {

// An instruction that the compiler may not take for nothing: GCC drops calls of functions that only prefetch.
inline void prefetch_line(const char* address) { asm volatile("prefetcht0 %0" : : "m"(*address)); }

// Asks memory for what a thread will read, in the order in which it reads it: pages lie anywhere, so the processor
// cannot guess the next one.
template <typename T>
class Lookahead {
 public:
  // From the first of `heads` of item `index` of the plan on.
  Lookahead(const PagedAttention& args, const Plan& plan, int64_t index) : args_(args), plan_(plan) {
    open_item(index);
    read(kAheadBytes);
  }

  // So many bytes are read now: ask for as many more.
  [[gnu::always_inline]] void read(int64_t bytes) {
    for (left_ += bytes; left_ > 0; left_ -= 64, at_ += 64) {
      if (at_ >= end_ && !open_page()) return;
      prefetch_line(at_);
    }
  }

 private:
  static constexpr int64_t kAheadBytes = 8 << 10;  // two panels of a head of 64 in bfloat16; more brings nothing

  void open_item(int64_t index) {
    index_ = index;
    if (index >= plan_.num_items()) return;
    piece_ = &plan_.piece(index);
    head_ = plan_.first_head(index);
    open_span(piece_->first_span);
  }

  void open_span(int64_t span) {
    const Seen seen(args_, plan_.tile(*piece_), span);
    span_ = span;
    first_key_ = span * kSpan + seen.first;
    end_key_ = span * kSpan + seen.end;
    pages_ = pages_of<T>(args_, plan_.tile(*piece_), head_);
    open_half(0);
    if constexpr (std::is_same_v<T, int8_t>) read_scales();
  }

  // Keys, then values.
  void open_half(int64_t half) {
    half_ = half;
    key_ = first_key_;
    block_ = first_key_ / args_.block_size;
    offset_ = first_key_ - block_ * args_.block_size;
  }

  // Scales are read all at once where a span begins.
  void read_scales() const {
    const Pages<float> scales = scales_of(args_, plan_.tile(*piece_), head_);
    scales.for_pages(first_key_, end_key_, [&](int64_t, int64_t count, const float* from) {
      for (const float* half : {from, from + scales.values}) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(float)) prefetch_line(reinterpret_cast<const char*>(half + i));
      }
    });
  }

  // The next page; false if there is none.
  [[gnu::noinline]] bool open_page() {
    if (index_ >= plan_.num_items()) {
      left_ = 0;
      return false;
    }
    const int64_t count = std::min(end_key_ - key_, pages_.block_size - offset_);
    const T* from = pages_.first + pages_.blocks[block_++] * pages_.stride + half_ * pages_.values;
    at_ = reinterpret_cast<const char*>(from + offset_ * pages_.head_dim);
    end_ = at_ + count * pages_.head_dim * static_cast<int64_t>(sizeof(T));
    key_ += count;
    offset_ = 0;
    if (key_ < end_key_) return true;
    // panels are filled up with zeros, which are read but have no addresses in the cache
    const int64_t first_panel = first_key_ / kPanel, end_panel = (end_key_ + kPanel - 1) / kPanel;
    const int64_t num_zeros = (end_panel - first_panel) * kPanel - (end_key_ - first_key_);
    left_ -= num_zeros * args_.head_dim * static_cast<int64_t>(sizeof(T));
    if (half_ == 0) {
      open_half(1);
      return true;
    }
    if (span_ + 1 < piece_->end_span) {
      open_span(span_ + 1);
    } else if (head_ + 1 < plan_.first_head(index_) + plan_.heads_per_item) {
      ++head_;
      open_span(piece_->first_span);
    } else {
      open_item(index_ + num_threads());  // a guess: threads claim items in turn
    }
    return true;
  }

  const PagedAttention& args_;
  const Plan& plan_;
  const Piece* piece_ = nullptr;
  Pages<T> pages_ = {};
  int64_t index_, head_, span_, half_, key_, first_key_, end_key_, block_, offset_;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t left_ = 0;  // bytes that are still to be asked for
};

}  // namespace triptych::attention
