// Allowed and banned tokens, biases and penalties, row by row: the row is copied, then its entries are changed.
#include <algorithm>
#include <cstdint>

#include "kernel.h"
#include "sampling/logits.h"
#include "parallel.h"

namespace triptych {
namespace {

// Rows of entries, ascending; where there are none, null and 0.
struct EntryRows {
  const int64_t* rows;  // [count]
  int64_t count;

  struct Range {
    int64_t begin, end;
  };
  Range of(int64_t row) const {
    const auto [first, last] = std::equal_range(rows, rows + count, row);
    return {first - rows, last - rows};
  }
};

struct ProcessLogits {
  const float* logits;  // [num_logits_rows, vocab_size], `stride` apart
  int64_t stride;
  int64_t vocab_size;
  const int64_t* logits_rows;  // [rows]
  float* processed;            // [rows, vocab_size]
  EntryRows allowed;
  const int64_t* allowed_ids;
  EntryRows banned;
  const int64_t* banned_ids;
  EntryRows biased;
  const int64_t* biased_ids;
  const float* biases;
  EntryRows penalized;
  const int64_t* penalized_ids;
  const int64_t* output_counts;
  const float* presence;  // this and what follows: [rows]
  const float* frequency;
  const float* repetition;
};

void penalize(const ProcessLogits& args, int64_t row, float* processed) {
  const auto [begin, end] = args.penalized.of(row);
  if (begin == end) return;
  const float presence = args.presence[row], frequency = args.frequency[row], repetition = args.repetition[row];
  for (int64_t i = begin; i < end; ++i) {
    float& logit = processed[args.penalized_ids[i]];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    const int64_t count = args.output_counts[i];
    if (count > 0) logit = logit - frequency * static_cast<float>(count) - presence;
  }
}

void process_row(const ProcessLogits& args, int64_t row) {
  const float* logits = args.logits + args.logits_rows[row] * args.stride;
  float* processed = args.processed + row * args.vocab_size;
  if (const auto [begin, end] = args.allowed.of(row); begin != end) {
    std::fill_n(processed, args.vocab_size, -kInfinity);
    for (int64_t i = begin; i < end; ++i) processed[args.allowed_ids[i]] = logits[args.allowed_ids[i]];
  } else {
    std::copy_n(logits, args.vocab_size, processed);
  }
  const auto [first_banned, end_banned] = args.banned.of(row);
  for (int64_t i = first_banned; i < end_banned; ++i) processed[args.banned_ids[i]] = -kInfinity;
  const auto [first_biased, end_biased] = args.biased.of(row);
  for (int64_t i = first_biased; i < end_biased; ++i) processed[args.biased_ids[i]] += args.biases[i];
  penalize(args, row, processed);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(process_logits, triptych::ProcessLogits,
                logits, stride, vocab_size, logits_rows, processed, allowed.rows, allowed.count, allowed_ids,
                banned.rows, banned.count, banned_ids, biased.rows, biased.count, biased_ids, biases,
                penalized.rows, penalized.count, penalized_ids, output_counts, presence, frequency, repetition) {
  triptych::parallel_for(rows, [&](int64_t row) { triptych::process_row(args, row); });
}
