// Log-probabilities of chosen tokens and of their best rivals: one pass over a row, then a look into the blocks
// that hold the best.
#include <algorithm>
#include <cmath>

#include "kernel.h"
#include "sampling/logits.h"
#include "sampling/select.h"
#include "simd/vec.h"

namespace triptych {
namespace {

struct TokenLogprobs {
  const float* logits;  // [num_logits_rows, vocab_size], `stride` apart
  int64_t stride;
  int64_t vocab_size;
  const int64_t* logits_rows;  // [rows]
  const int64_t* token_ids;    // [rows]
  int64_t num_top;
  float* chosen_logprobs;  // [rows]
  int64_t* ranks;          // [rows]
  int64_t* top_ids;        // [rows, num_top]
  float* top_logprobs;     // [rows, num_top]
};

struct Segment {
  Best best;
  double mass;          // relative to the segment's own best
  int64_t num_likelier;  // than the chosen token
};

Segment weigh_segment(const LogitsRow& row, int64_t segment, float chosen, float* maxima) {
  Segment result = {scan_segment(row, segment, maxima), 0.0, 0};
  if (!(result.best.logit > -kInfinity)) return result;
  alignas(64) float room[kBlock];
  const vec best = splat(result.best.logit), bound = splat(chosen);
  for (int64_t block = segment * kSegmentBlocks; block < row.segment_end(segment); ++block) {
    const float* values = row.block(block, room);
    vec partial = zero();
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const vec x = load(values + i);
      partial = partial + exp_of_negative(x - best);
      result.num_likelier += __builtin_popcount(greater(x, bound));
    }
    result.mass += sum(partial);
  }
  return result;
}

struct Token {
  float logit;
  int64_t id;

  bool operator<(const Token& other) const {  // likelier first, of equals the lowest id
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// The `num_top` likeliest tokens, in order.
const Token* find_top(const LogitsRow& row, const float* maxima, int64_t num_top) {
  thread_local Scratch bound_scratch, token_scratch;
  float bound = -kInfinity;
  if (num_top <= row.num_blocks()) {  // as many maxima as that are as many tokens
    Candidates candidates(bound_scratch, row.num_blocks());
    std::copy(maxima, maxima + row.num_blocks(), candidates.values);
    candidates.count = row.num_blocks();
    bound = select(candidates, static_cast<double>(num_top), [](vec) { return splat(1.0f); });
  }
  Token* tokens = static_cast<Token*>(token_scratch.get((row.num_blocks() * kBlock) * sizeof(Token)));
  int64_t count = 0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (maxima[block] < bound) continue;
    const int64_t end = std::min((block + 1) * kBlock, row.size);
    for (int64_t id = block * kBlock; id < end; ++id) {
      if (row.logits[id] >= bound) tokens[count++] = {row.logits[id], id};
    }
  }
  std::partial_sort(tokens, tokens + num_top, tokens + count);
  return tokens;
}

template <typename Loop>
void look_up_row(const TokenLogprobs& args, int64_t index, const Loop& loop) {
  const LogitsRow row = {args.logits + args.logits_rows[index] * args.stride, args.vocab_size};
  const float chosen = row.logits[args.token_ids[index]];
  thread_local Scratch maxima_scratch, segment_scratch;
  float* maxima = static_cast<float*>(maxima_scratch.get(row.num_blocks() * sizeof(float)));
  Segment* segments = static_cast<Segment*>(segment_scratch.get(row.num_segments() * sizeof(Segment)));
  loop(row.num_segments(), [&](int64_t segment) {
    segments[segment] = weigh_segment(row, segment, chosen, maxima);
  });
  Best best = segments[0].best;
  for (int64_t segment = 1; segment < row.num_segments(); ++segment) best = better(best, segments[segment].best);
  float* top_logprobs = args.top_logprobs + index * args.num_top;
  int64_t* top_ids = args.top_ids + index * args.num_top;
  if (!best.is_usable()) {  // no probabilities
    args.chosen_logprobs[index] = std::nanf("");
    args.ranks[index] = 1;
    std::fill_n(top_logprobs, args.num_top, std::nanf(""));
    std::fill_n(top_ids, args.num_top, 0);
    return;
  }
  double mass = 0.0;
  int64_t num_likelier = 0;
  for (int64_t segment = 0; segment < row.num_segments(); ++segment) {
    const double distance = static_cast<double>(segments[segment].best.logit) - best.logit;
    mass += segments[segment].mass * std::exp(distance);
    num_likelier += segments[segment].num_likelier;
  }
  const double log_mass = std::log(mass);  // beside the best, so that large logits cost no digits
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - best.logit - log_mass);
  };
  args.chosen_logprobs[index] = logprob(chosen);
  args.ranks[index] = 1 + num_likelier;
  if (args.num_top == 0) return;
  const Token* tokens = find_top(row, maxima, args.num_top);
  for (int64_t i = 0; i < args.num_top; ++i) {
    top_ids[i] = tokens[i].id;
    top_logprobs[i] = logprob(tokens[i].logit);
  }
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(token_logprobs, triptych::TokenLogprobs,
                logits, stride, vocab_size, logits_rows, token_ids, num_top, chosen_logprobs, ranks, top_ids,
                top_logprobs) {
  triptych::for_rows(rows, [&](int64_t index, const auto& loop) { triptych::look_up_row(args, index, loop); });
}
