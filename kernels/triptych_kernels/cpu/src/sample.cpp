// Logits to tokens: filters as thresholds found without sorting, noise only where a token can still win.
//
//   scan     every row's largest logit and the maxima of its blocks; greedy rows are done
//   cut      the smallest logit that min_p, top_k and top_p keep; looks into the blocks that can matter
//   draw     argmax(logit / temperature + gumbel) over what is kept
//
// Threads share many rows by row, few rows by segment; a row's result is the same either way.
#include <cmath>

#include "kernel.h"
#include "logits.h"
#include "parallel.h"
#include "philox.h"
#include "select.h"
#include "vec.h"

namespace triptych {
namespace {

struct Sample {
  const float* logits;  // [rows, vocab_size], `stride` apart
  int64_t stride;
  int64_t vocab_size;
  const float* temperature;  // this and what follows: [rows]
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* token_ids;  // -1: the largest logit is not finite
};

// With fewer rows a thread, the last rows would keep one thread busy and the others waiting.
constexpr int64_t kRowsPerThread = 4;

// No noise is above, -log(-log(1 - 2^-33)) = 22.88: e^-22.9, rounded down.
constexpr float kHopeless = 1.1e-10f;

// Tokens this far below the best, in units of the temperature: a million of them have a mass of 4e-12.
constexpr float kNegligible = 40.0f;

// Blocks that are looked into first for top_p: few tokens, which nearly always suffice.
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
double total_mass(const RandomRow& random, float bound, double* of_segments, const Loop& loop) {
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
    of_segments[segment] = mass;
  });
  double total = 0.0;
  for (int64_t segment = 0; segment < row.num_segments(); ++segment) total += of_segments[segment];
  return total;
}

// The smallest logit that all filters keep. Each keeps the largest, equal ones together, so each is a bound above
// the one before.
template <typename Loop>
float find_threshold(const RandomRow& random, double* of_segments, const Loop& loop) {
  thread_local Scratch scratch;
  Candidates candidates(scratch, random.row.num_blocks() * kBlock);
  const auto weigh = [&](vec x) { return random.weigh(x); };
  float threshold = kLowest;
  if (random.min_p > 0.0f) {
    threshold = static_cast<float>(random.best.logit + random.temperature * std::log(static_cast<double>(random.min_p)));
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
    needed *= total_mass(random, threshold, of_segments, loop);
    gather(random, std::max(threshold, bound_of_largest(random, kFirstBlocks, candidates)), candidates);
    if (sum_weights(candidates.values, candidates.count, weigh) < needed) gather(random, threshold, candidates);
  }
  return select(candidates, needed, weigh);
}

struct Winner {
  double score;
  int64_t token_id;

  void challenge(double other_score, int64_t other_id) {
    if (other_score > score || (other_score == score && other_id < token_id)) *this = {other_score, other_id};
  }
};

// Let the tokens of one block draw whose words reach `bound`; those of smaller words cannot win.
void draw_block(const RandomRow& random, int64_t block, float threshold, uint32_t bound, Winner& winner) {
  uint32_t words[Noise::kWords][Noise::kCounters];
  if (!random.noise.any_at_least(bound, block, words)) return;
  const int64_t begin = block * kBlock, count = std::min(kBlock, random.row.size - begin);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = words[i % Noise::kWords][i / Noise::kWords];
    const float logit = random.row.logits[begin + i];
    if (word >= bound && logit >= threshold) winner.challenge(random.score(logit, word), begin + i);
  }
}

// The best of one segment and of `winner`.
//
// With u in (0, 1) from the word, gumbel = -log(-log u) <= -log(1 - u): a token cannot reach the score S unless
// 1 - u <= e^(logit / temperature - S), and no token of a block can unless one word is large enough for the maximum.
void draw_segment(const RandomRow& random, int64_t segment, float threshold, Winner& winner) {
  const int64_t end = random.row.segment_end(segment);
  for (int64_t begin = segment * kSegmentBlocks; begin < end; begin += kUnit) {
    alignas(64) float chances[kUnit];
    uint32_t hopeful = 0;
    for (int64_t i = 0; i < kUnit; i += kLanes) {
      const vec maxima = load(random.maxima + begin + i);
      const vec distance = (maxima - splat(random.best.logit)) * splat(random.inverse_temperature);
      const vec chance = exp_of_negative(min(distance - splat(static_cast<float>(winner.score)), zero()));
      store(chances + i, chance);
      hopeful |= (at_least(maxima, splat(threshold)) & at_least(chance, splat(kHopeless))) << i;
    }
    for (; hopeful != 0; hopeful &= hopeful - 1) {
      const int i = __builtin_ctz(hopeful);
      // a little more room than there is, for the rounding of the chance
      const double room = chances[i] * 1.0001 * 0x1p32 + 1.0;
      const uint32_t bound = room < 0x1p32 ? ~static_cast<uint32_t>(room) : 0;
      draw_block(random, begin + i, threshold, bound, winner);
    }
  }
}

template <typename Loop>
int64_t draw(const RandomRow& random, float threshold, Winner* of_segments, const Loop& loop) {
  uint32_t words[Noise::kWords][Noise::kCounters];
  const int64_t best = random.best.token_id;
  random.noise.any_at_least(0, best / kBlock, words);
  const uint32_t word = words[best % Noise::kWords][best % kBlock / Noise::kWords];
  const Winner to_beat = {random.score(random.best.logit, word), best};
  loop(random.row.num_segments(), [&](int64_t segment) {
    Winner winner = to_beat;
    draw_segment(random, segment, threshold, winner);
    of_segments[segment] = winner;
  });
  Winner winner = to_beat;
  for (int64_t segment = 0; segment < random.row.num_segments(); ++segment) {
    winner.challenge(of_segments[segment].score, of_segments[segment].token_id);
  }
  return winner.token_id;
}

// What the segments of a row, wherever they are computed, leave behind.
struct SegmentResult {
  Best best;
  double mass;
  Winner winner;
};

// loop(count, f): calls f(0..count - 1), in any order, on any thread.
template <typename Loop>
int64_t sample_row(const Sample& args, int64_t index, const Loop& loop) {
  const LogitsRow row = {args.logits + index * args.stride, args.vocab_size};
  const int64_t num_segments = row.num_segments();
  const int64_t num_maxima = (row.num_blocks() + kUnit - 1) / kUnit * kUnit;
  thread_local Scratch maxima_scratch, best_scratch, mass_scratch, winner_scratch;
  float* maxima = static_cast<float*>(maxima_scratch.get(num_maxima * sizeof(float)));
  Best* bests = static_cast<Best*>(best_scratch.get(num_segments * sizeof(Best)));
  loop(num_segments, [&](int64_t segment) { bests[segment] = scan_segment(row, segment, maxima); });
  Best best = bests[0];
  for (int64_t segment = 1; segment < num_segments; ++segment) best = better(best, bests[segment]);
  if (!best.is_usable()) return -1;
  const float temperature = args.temperature[index];
  if (temperature == 0.0f) return best.token_id;
  std::fill(maxima + row.num_blocks(), maxima + num_maxima, -kInfinity);
  const RandomRow random = {
      row, maxima, best, temperature, 1.0f / temperature,
      args.top_k[index], args.top_p[index], args.min_p[index],
      Noise(static_cast<uint64_t>(args.seeds[index]), static_cast<uint64_t>(args.positions[index])),
  };
  double* masses = static_cast<double*>(mass_scratch.get(num_segments * sizeof(double)));
  const float threshold = find_threshold(random, masses, loop);
  Winner* winners = static_cast<Winner*>(winner_scratch.get(num_segments * sizeof(Winner)));
  return draw(random, threshold, winners, loop);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(sample, triptych::Sample) {
  using namespace triptych;
  if (rows >= kRowsPerThread * num_threads()) {
    parallel_for(rows, [&](int64_t index) {
      args.token_ids[index] = sample_row(args, index, [](int64_t count, const auto& f) {
        for (int64_t i = 0; i < count; ++i) f(i);
      });
    });
    return;
  }
  for (int64_t index = 0; index < rows; ++index) {
    args.token_ids[index] =
        sample_row(args, index, [](int64_t count, const auto& f) { parallel_for(count, f); });
  }
}
