// One row of logits as the sampling kernels read it: in blocks, of which those with
// large maxima matter, and in segments, which threads share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "parallel.h"
#include "simd/vec.h"

namespace triptych {

constexpr int64_t kBlock = 64;                        // tokens behind one maximum
constexpr int64_t kSegmentBlocks = 128;               // 8,192 tokens, 32 KB: about 1 us
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();  // bound of what is more than -inf

struct LogitsRow {
  const float* logits;  // [size]
  int64_t size;
  const uint32_t* allowed = nullptr;  // bit t % 32 of word t / 32 for token t: it may be chosen; null: each may

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  int64_t num_segments() const { return (num_blocks() + kSegmentBlocks - 1) / kSegmentBlocks; }
  int64_t segment_end(int64_t segment) const { return std::min((segment + 1) * kSegmentBlocks, num_blocks()); }

  bool allows(int64_t token_id) const {
    return allowed == nullptr || (allowed[token_id / 32] >> (token_id % 32) & 1) != 0;
  }

  // A bit for each token of a block that is in the row and may be chosen.
  uint64_t allowed_in(int64_t index) const {
    const int64_t left = size - index * kBlock;
    const uint64_t inside = left >= kBlock ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    if (allowed == nullptr) return inside;
    const uint64_t high = left > 32 ? allowed[2 * index + 1] : 0;
    return (high << 32 | allowed[2 * index]) & inside;
  }

  // [kBlock], -inf past the end of the row and where a token may not be chosen; `room` is for such a block.
  const float* block(int64_t index, float (&room)[kBlock]) const {
    const float* from = logits + index * kBlock;
    const uint64_t tokens = allowed_in(index);
    if (tokens == ~uint64_t{0}) return from;
    if (size - index * kBlock < kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) room[i] = (tokens >> i & 1) != 0 ? from[i] : -kInfinity;
      return room;
    }
    constexpr uint32_t kAll = (1u << kLanes) - 1;
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const uint32_t lanes = static_cast<uint32_t>(tokens >> i) & kAll;
      store(room + i, only(lanes, load(from + i)) + only(kAll & ~lanes, splat(-kInfinity)));
    }
    return room;
  }
};

struct Best {
  float logit = -kInfinity;
  int64_t token_id = 0;  // of equals the lowest
  bool has_nan = false;

  bool is_usable() const { return !has_nan && std::isfinite(logit); }
};

// The best of one segment; fills its part of `maxima`, [num_blocks] of the row.
inline Best scan_segment(const LogitsRow& row, int64_t segment, float* maxima) {
  const int64_t begin = segment * kSegmentBlocks, end = row.segment_end(segment);
  alignas(64) float room[kBlock];
  Best best;
  uint32_t nan_lanes = 0;
  for (int64_t block = begin; block < end; ++block) {
    if (row.allowed_in(block) == 0) {  // a form forbids most of them, and their logits are not read
      maxima[block] = -kInfinity;
      continue;
    }
    const float* values = row.block(block, room);
    vec top = load(values);
    vec second = load(values + kLanes);
    nan_lanes |= unordered(top, second);
    for (int64_t i = 2 * kLanes; i < kBlock; i += 2 * kLanes) {
      const vec a = load(values + i), b = load(values + i + kLanes);
      nan_lanes |= unordered(a, b);
      top = max(top, a);
      second = max(second, b);
    }
    maxima[block] = largest(max(top, second));
  }
  best.has_nan = nan_lanes != 0;
  if (best.has_nan) return best;
  const float* first = std::max_element(maxima + begin, maxima + end);
  best.logit = *first;
  const int64_t block = first - maxima;
  const float* values = row.block(block, room);
  best.token_id = block * kBlock + (std::find(values, values + kBlock, best.logit) - values);
  return best;
}

// Returns the better of two, the first of which is before the second in the row.
inline Best better(const Best& first, const Best& second) {
  Best best = second.logit > first.logit ? second : first;
  best.has_nan = first.has_nan || second.has_nan;
  return best;
}

// f(index, loop) for every row, where loop(count, g) calls g(0 .. count - 1) for its segments: threads share many
// rows by row, few rows by segment.
template <typename F>
void for_rows(int64_t rows, const F& f) {
  // with fewer rows a thread, the last ones would keep one thread busy and the others waiting
  constexpr int64_t kRowsPerThread = 4;
  if (rows >= kRowsPerThread * num_threads()) {
    parallel_for(rows, [&](int64_t index) {
      f(index, [](int64_t count, const auto& g) {
        for (int64_t i = 0; i < count; ++i) g(i);
      });
    });
    return;
  }
  for (int64_t index = 0; index < rows; ++index) {
    f(index, [](int64_t count, const auto& g) { parallel_for(count, g); });
  }
}

}  // namespace triptych
