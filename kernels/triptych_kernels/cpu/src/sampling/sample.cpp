// Logits to tokens: filters as thresholds found without sorting, noise only where a token can still win.
//
//   scan     every row's largest logit and the maxima of its blocks; greedy rows are done
//   cut      the smallest logit that min_p, top_k and top_p keep; looks into the blocks that can matter
//   draw     argmax(logit / temperature + gumbel) over what is kept
//
// A row's result is the same however threads share it.
#include <atomic>
#include <cmath>
#include <limits>

#include "kernel.h"
#include "sampling/logits.h"
#include "sampling/philox.h"
#include "sampling/select.h"
#include "simd/vec.h"

namespace triptych {
namespace {

struct Sample {
  const float* logits;  // [num_logits_rows, vocab_size], `stride` apart
  int64_t stride;
  int64_t vocab_size;
  const int64_t* logits_rows;  // [rows]; null: each row in its place
  const uint32_t* mask_words;  // [num_masks, num_words], see `LogitsRow`
  int64_t num_words;
  const int32_t* mask_rows;  // [rows], -1: no mask; null: no row has one
  const float* temperature;  // this and what follows: [rows]
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* token_ids;  // -1: the largest logit is not finite
};

// No noise is above, -log(-log(1 - 2^-33)) = 22.88: e^-22.9, rounded down.
constexpr float kHopeless = 1.1e-10f;

// Tokens this far below the best, in units of the temperature: a million of them have a mass of 4e-12.
constexpr float kNegligible = 40.0f;

// Blocks that are looked into first for top_p, few tokens, which mostly suffice; then eight times as many.
constexpr int64_t kFirstBlocks = 32;

constexpr int64_t kUnit = 16;  // block maxima that are weighed at a time

double gumbel(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// A random row, scanned.
struct RandomRow {
  LogitsRow row;
  const float* maxima;  // [num_blocks], -inf up to a multiple of kUnit
  Best best;
  float temperature;
  float inverse_temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  Noise noise;

  // The probability of a token with this logit, relative to the best's.
  vec weigh(vec x) const {
    return exp_of_negative((x - splat(best.logit)) * splat(inverse_temperature));
  }

  // How far above the best's logit a token comes, in units of the temperature; the noise included.
  double score(float logit, uint32_t word) const {
    return (static_cast<double>(logit) - static_cast<double>(best.logit)) / temperature + gumbel(word);
  }
};

struct Winner {
  double score;
  int64_t token_id;

  void challenge(double other_score, int64_t other_id) {
    if (other_score > score || (other_score == score && other_id < token_id)) *this = {other_score, other_id};
  }
};

// The result of a segment of a row, computed by any thread.
struct Segment {
  Best best;
  double mass;
  Winner winner;
};

// All logits of at least `bound`, which is more than -inf.
void gather(const RandomRow& random, float bound, Candidates& candidates) {
  alignas(64) float room[kBlock];
  candidates.count = 0;
  for (int64_t block = 0; block < random.row.num_blocks(); ++block) {
    if (random.maxima[block] < bound) continue;
    const float* values = random.row.block(block, room);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const vec x = load(values + i);
      candidates.push(at_least(x, splat(bound)), x);
    }
  }
}

// Some bound that at least `count` logits reach, close to the best of them; `kLowest` if there is none.
float bound_of_largest(const RandomRow& random, int64_t count, Candidates& candidates) {
  const int64_t num_blocks = random.row.num_blocks();
  if (count > num_blocks) return kLowest;
  std::copy(random.maxima, random.maxima + num_blocks, candidates.values);
  candidates.count = num_blocks;
  const float bound = select(candidates, static_cast<double>(count), [](vec) { return splat(1.0f); });
  return std::max(bound, kLowest);
}

// The mass of the logits of at least `bound`, relative to the best's.
template <typename Loop>
double total_mass(const RandomRow& random, float bound, Segment* segments, const Loop& loop) {
  const LogitsRow& row = random.row;
  loop(row.num_segments(), [&](int64_t segment) {
    alignas(64) float room[kBlock];
    double mass = 0.0;
    for (int64_t block = segment * kSegmentBlocks; block < row.segment_end(segment); ++block) {
      if (random.maxima[block] < bound) continue;
      const float* values = row.block(block, room);
      vec partial = zero();
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const vec x = load(values + i);
        partial = partial + only(at_least(x, splat(bound)), random.weigh(x));
      }
      mass += sum(partial);
    }
    segments[segment].mass = mass;
  });
  double total = 0.0;
  for (int64_t segment = 0; segment < row.num_segments(); ++segment) total += segments[segment].mass;
  return total;
}

// The smallest logit that all filters keep. Each keeps the largest, equal ones together, so each is a bound above
// the one before.
template <typename Loop>
float find_threshold(const RandomRow& random, Segment* segments, const Loop& loop) {
  thread_local Scratch scratch;
  Candidates candidates(scratch, random.row.num_blocks() * kBlock);
  const auto weigh = [&](vec x) { return random.weigh(x); };
  float threshold = kLowest;
  if (random.min_p > 0.0f) {
    const double distance = random.temperature * std::log(static_cast<double>(random.min_p));
    threshold = std::max(threshold, static_cast<float>(random.best.logit + distance));
  }
  const bool has_top_k = 0 < random.top_k && random.top_k < random.row.size;
  if (has_top_k) {
    threshold = std::max(threshold, bound_of_largest(random, random.top_k, candidates));
    gather(random, threshold, candidates);
    if (candidates.count > random.top_k) {
      threshold = select(candidates, static_cast<double>(random.top_k), [](vec) { return splat(1.0f); });
    }
  }
  if (random.top_p >= 1.0f) return threshold;
  threshold = std::max(threshold, random.best.logit - kNegligible * random.temperature);
  double needed = random.top_p;
  if (has_top_k) {
    gather(random, threshold, candidates);
    needed *= sum_weights(candidates.values, candidates.count, weigh);
  } else {
    needed *= total_mass(random, threshold, segments, loop);
    for (int64_t blocks = kFirstBlocks;; blocks *= 8) {
      const float bound = std::max(threshold, bound_of_largest(random, blocks, candidates));
      gather(random, bound, candidates);
      if (bound == threshold || sum_weights(candidates.values, candidates.count, weigh) >= needed) break;
    }
  }
  return select(candidates, needed, weigh);
}

// A score that all segments of a row have to beat, shared by the threads that draw: it saves work and decides nothing.
class ScoreToBeat {
 public:
  explicit ScoreToBeat(double score) : score_(score) {}
  double get() const { return score_.load(std::memory_order_relaxed); }
  void raise(double score) {
    double seen = get();
    while (seen < score && !score_.compare_exchange_weak(seen, score, std::memory_order_relaxed)) {
    }
  }

 private:
  std::atomic<double> score_;
};

// The best of one segment among those that can win.
//
// With u in (0, 1) from the word, gumbel = -log(-log u) <= -log(1 - u): a token cannot reach the score S unless
// 1 - u <= e^(logit / temperature - S), and no token of a block can unless its word is large enough for the maximum.
Winner draw_segment(const RandomRow& random, int64_t segment, float threshold, ScoreToBeat& to_beat) {
  Winner winner = {-std::numeric_limits<double>::infinity(), random.row.size};
  const auto enter = [&](int64_t token_id, uint32_t word) {
    if (token_id >= random.row.size || random.row.logits[token_id] < threshold) return;
    if (!random.row.allows(token_id)) return;
    winner.challenge(random.score(random.row.logits[token_id], word), token_id);
  };
  const int64_t end = random.row.segment_end(segment);
  for (int64_t begin = segment * kSegmentBlocks; begin < end; begin += kUnit) {
    const vec score = splat(static_cast<float>(to_beat.get()));
    alignas(64) float chances[kUnit];
    uint32_t hopeful = 0;
    for (int64_t i = 0; i < kUnit; i += kLanes) {
      const vec maxima = load(random.maxima + begin + i);
      const vec distance = (maxima - splat(random.best.logit)) * splat(random.inverse_temperature);
      const vec chance = exp_of_negative(min(distance - score, zero()));
      store(chances + i, chance);
      hopeful |= (at_least(maxima, splat(threshold)) & at_least(chance, splat(kHopeless))) << i;
    }
    for (; hopeful != 0; hopeful &= hopeful - 1) {
      const int i = __builtin_ctz(hopeful);
      // a little more room than there is, for the rounding of the chance
      const double room = chances[i] * 1.0001 * 0x1p32 + 1.0;
      const uint32_t bound = room < 0x1p32 ? ~static_cast<uint32_t>(room) : 0;
      random.noise.for_words_at_least(bound, (begin + i) * kBlock, enter);
    }
    to_beat.raise(winner.score);
  }
  return winner;
}

template <typename Loop>
int64_t draw(const RandomRow& random, float threshold, Segment* segments, const Loop& loop) {
  double score_of_best = 0.0;
  random.noise.for_words_at_least(0, random.best.token_id / kBlock * kBlock, [&](int64_t token_id, uint32_t word) {
    if (token_id == random.best.token_id) score_of_best = random.score(random.best.logit, word);
  });
  ScoreToBeat to_beat(score_of_best);
  loop(random.row.num_segments(), [&](int64_t segment) {
    segments[segment].winner = draw_segment(random, segment, threshold, to_beat);
  });
  Winner winner = {score_of_best, random.best.token_id};
  for (int64_t segment = 0; segment < random.row.num_segments(); ++segment) {
    winner.challenge(segments[segment].winner.score, segments[segment].winner.token_id);
  }
  return winner.token_id;
}

template <typename Loop>
int64_t sample_row(const Sample& args, int64_t index, const Loop& loop) {
  const int64_t mask = args.mask_rows == nullptr ? -1 : args.mask_rows[index];
  const LogitsRow row = {
      args.logits + (args.logits_rows == nullptr ? index : args.logits_rows[index]) * args.stride,
      args.vocab_size,
      mask < 0 ? nullptr : args.mask_words + mask * args.num_words,
  };
  const int64_t num_segments = row.num_segments();
  const int64_t num_maxima = (row.num_blocks() + kUnit - 1) / kUnit * kUnit;
  thread_local Scratch maxima_scratch, segment_scratch;
  float* maxima = static_cast<float*>(maxima_scratch.get(num_maxima * sizeof(float)));
  Segment* segments = static_cast<Segment*>(segment_scratch.get(num_segments * sizeof(Segment)));
  loop(num_segments, [&](int64_t segment) { segments[segment].best = scan_segment(row, segment, maxima); });
  Best best = segments[0].best;
  for (int64_t segment = 1; segment < num_segments; ++segment) best = better(best, segments[segment].best);
  if (!best.is_usable()) return -1;
  const float temperature = args.temperature[index];
  if (temperature == 0.0f) return best.token_id;
  std::fill(maxima + row.num_blocks(), maxima + num_maxima, -kInfinity);
  const RandomRow random = {
      row, maxima, best, temperature, 1.0f / temperature,
      args.top_k[index], args.top_p[index], args.min_p[index],
      Noise(static_cast<uint64_t>(args.seeds[index]), static_cast<uint64_t>(args.positions[index])),
  };
  return draw(random, find_threshold(random, segments, loop), segments, loop);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(sample, triptych::Sample,
                logits, stride, vocab_size, logits_rows, mask_words, num_words, mask_rows,
                temperature, top_k, top_p, min_p, seeds, positions, token_ids) {
  triptych::for_rows(rows, [&](int64_t index, const auto& loop) {
    args.token_ids[index] = triptych::sample_row(args, index, loop);
  });
}
