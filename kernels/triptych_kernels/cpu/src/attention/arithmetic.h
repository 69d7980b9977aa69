// The arithmetic of attention, the same for every query: what one span of keys gives to some rows, and how spans
// are put together.
//
// A row is one query head of one token. Keys are cut into spans at fixed positions; in a span each score is one chain
// of sums over the head, each weighted value one chain over the span's keys, and spans are merged in order. Keys that
// a row does not see weigh exactly 0, which changes no sum. So a row's result depends only on its query and its
// keys: not on other rows, the cut of its prompt into chunks, or the number of threads.
//
// The type C that products are computed in is
//
//   int16_t   over a cache of int8: queries and weights are rounded to 15 bits and a sign, sums of products are exact
//             integers, and scales are multiplied in afterwards (int8.h)
//   bf16      where queries and keys are, and there is an instruction: weights are rounded to bfloat16
//   float     otherwise
//
// Operands are spelt in units of four bytes: a float, or a pair that is multiplied at once.
#pragma once

#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>

#include "simd/scalar.h"
#include "simd/vec.h"

namespace triptych::attention {

constexpr int kSpan = 256;         // keys
constexpr int kPanel = 2 * kLanes;  // keys or elements of a head that are computed at a time
constexpr int kMaxTileRows = kRegisters == 32 ? 12 : 6;  // 24 sums, two vectors of a panel and a row's unit in 32
constexpr float kUnseen = -1e30f;  // score of a key that a row does not see; its difference to any other is finite

template <typename C>
constexpr int kPerUnit = sizeof(float) / sizeof(C);  // elements of type C
template <typename C>
constexpr bool kIsInt = std::is_same_v<C, int16_t>;

// sum + a . b, unit by unit; for int16_t the bits of the sum are those of an integer
template <typename C>
vec multiply_add(vec a, vec b, vec sum) {
  if constexpr (kPerUnit<C> == 1) {
    return fma(a, b, sum);
  } else if constexpr (kIsInt<C>) {
    return as_vec(add_dot(bits_of(sum), bits_of(a), bits_of(b)));
  } else {
    return add_bf16_dot(sum, a, b);
  }
}

// Words of four bytes are what keys of a cache are stored in; each has so many units.
template <typename C, typename T>
constexpr int kUnitsPerWord = kPerUnit<T> / kPerUnit<C>;

// Both elements of each pair of bfloat16.
inline vec even_of(vec pairs) { return as_vec(shift_left<16>(bits_of(pairs))); }
inline vec odd_of(vec pairs) { return as_vec(bits_of(pairs) & splat_int(static_cast<int32_t>(0xffff0000))); }

// The units of a word of kLanes keys of type T. Bytes 0 and 2 make a unit, and bytes 1 and 3.
template <typename C, typename T>
[[gnu::always_inline]] inline void load_units(const float* words, vec (&units)[kUnitsPerWord<C, T>]) {
  const vec word = in_register(load(words));
  if constexpr (kUnitsPerWord<C, T> == 1) {
    units[0] = word;
  } else if constexpr (kIsInt<C>) {
    units[0] = as_vec(even_bytes(bits_of(word)));
    units[1] = as_vec(odd_bytes(bits_of(word)));
  } else {
    units[0] = even_of(word);
    units[1] = odd_of(word);
  }
}

// f with the number of rows as a constant
template <int Rows = kMaxTileRows, typename F>
void with_rows(int64_t rows, const F& f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, f);
  }
  f(std::integral_constant<int, Rows>{});
}

// Where a panel of keys lies: kLanes keys in each vector, one word of each, words of a key `stride` floats apart. And
// what is read after it: `ahead_stride` bytes for every word.
struct KeyPanel {
  const float* vectors[2];
  int64_t stride;
  const char* ahead[2];
  int64_t ahead_stride;
};

// scores[row][0 .. kPanel - 1] = factors[row] * query[row] . keys, for int16_t the integers query[row] . keys; rows of
// scores are kSpan apart. `queries`: [units][rows]; keys of type T.
template <typename C, typename T>
void score(const float* queries, const KeyPanel& keys, int64_t words, int64_t rows,
           [[maybe_unused]] const float* factors, float* scores) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    vec products[kRows][2];
    unroll<kRows>([&](auto row) { products[row][0] = products[row][1] = zero(); });
    const float *first = keys.vectors[0], *second = keys.vectors[1], *query = queries;
    const char *first_ahead = keys.ahead[0], *second_ahead = keys.ahead[1];
    for (int64_t word = 0; word < words; ++word) {
      vec units[2][kUnitsPerWord<C, T>];
      load_units<C, T>(first, units[0]);
      load_units<C, T>(second, units[1]);
      prefetch_ahead(first_ahead);
      prefetch_ahead(second_ahead);
      unroll<kUnitsPerWord<C, T>>([&](auto unit) {
        unroll<kRows>([&](auto row) {
          const vec own = splat(query[unit * kRows + row]);
          products[row][0] = multiply_add<C>(own, units[0][unit], products[row][0]);
          products[row][1] = multiply_add<C>(own, units[1][unit], products[row][1]);
        });
      });
      query += kUnitsPerWord<C, T> * kRows;
      first += keys.stride;
      second += keys.stride;
      first_ahead += keys.ahead_stride;
      second_ahead += keys.ahead_stride;
    }
    unroll<kRows>([&](auto row) {
      unroll<2>([&](auto half) {
        float* to = scores + row * kSpan + half * kLanes;
        if constexpr (kIsInt<C>) {
          store(to, products[row][half]);  // what is computed with integers here makes GCC 12 keep sums in memory
        } else {
          store(to, products[row][half] * splat(factors[row]));
        }
      });
    });
  });
}

// out[row][0 .. kPanel - 1] = weights[row] . values; rows of out are `stride` apart.
// `weights`: [rows][kSpan] of type C, `values`: [units][kPanel].
template <typename C>
void mix(const float* weights, const float* values, int64_t units, int64_t rows, float* out, int64_t stride) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    vec sums[kRows][2];
    unroll<kRows>([&](auto row) { sums[row][0] = sums[row][1] = zero(); });
    const float *panel = values, *weight = weights;
    for (int64_t step = 0; step < units; ++step, panel += kPanel, ++weight) {
      const vec first = load(panel), second = load(panel + kLanes);
      unroll<kRows>([&](auto row) {
        const vec unit = splat(weight[row * (kSpan / kPerUnit<C>)]);
        sums[row][0] = multiply_add<C>(unit, first, sums[row][0]);
        sums[row][1] = multiply_add<C>(unit, second, sums[row][1]);
      });
    }
    unroll<kRows>([&](auto row) {
      store(out + row * stride, sums[row][0]);
      store(out + row * stride + kLanes, sums[row][1]);
    });
  });
}

// The largest score and the sum of the weights that were given out relative to it.
struct Softmax {
  float maximum, total;  // total 0: no key was seen
};

// The keys of a span that a row sees, [first, end), among those of whole panels, [begin_panels, end_panels).
struct RowSeen {
  int64_t first, end, begin_panels, end_panels;
  // Whether it does not see all of the keys from `key` on that a vector holds.
  bool cuts(int64_t key) const { return key < first || key + kLanes > end; }
  vec select(int64_t key, vec seen, vec unseen) const { return select_lanes(seen, unseen, first - key, end - key); }
};

// How the scores of one row change before the softmax. They are exponents of 2, so both are times log2 e.
struct ScoreChange {
  float soft_cap, slope;  // 0: none
  int64_t distance;       // position of the span's first key minus the query's
};

inline void change_scores(float* scores, const RowSeen& seen, const ScoreChange& change) {
  static constexpr float kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static_assert(kLanes <= std::size(kNumbers));
  const vec inverse = splat(1.0f / change.soft_cap), numbers = load(kNumbers);
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kLanes) {
    vec score = load(scores + key);
    if (change.soft_cap != 0.0f) score = tanh(score * inverse) * splat(change.soft_cap);
    if (change.slope != 0.0f) {
      score = fma(numbers + splat(static_cast<float>(key + change.distance)), splat(change.slope), score);
    }
    store(scores + key, score);
  }
}

// The largest of one row's scores; those of keys that it does not see become kUnseen.
inline float largest_score(float* scores, const RowSeen& seen) {
  vec maxima[2] = {splat(kUnseen), splat(kUnseen)};
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kPanel) {
    unroll<2>([&](auto half) {
      const int64_t at = key + half * kLanes;
      vec score = load(scores + at);
      if (seen.cuts(at)) {
        score = seen.select(at, score, splat(kUnseen));
        store(scores + at, score);
      }
      maxima[half] = max(maxima[half], score);
    });
  }
  return largest(max(maxima[0], maxima[1]));
}

// Turns one row's scores into weights 2^(score - maximum) of type C, float or bf16, and returns their sum.
// `weights` may be `scores`.
template <typename C>
float weigh(const float* scores, float maximum, const RowSeen& seen, float* weights) {
  vec totals[2] = {zero(), zero()};
  for (int64_t key = seen.begin_panels; key < seen.end_panels; key += kPanel) {
    const vec low = exp2_of_negative<kPerUnit<C> == 2>(load(scores + key) - splat(maximum));
    const vec high = exp2_of_negative<kPerUnit<C> == 2>(load(scores + key + kLanes) - splat(maximum));
    if constexpr (kPerUnit<C> == 1) {
      store(weights + key, low);
      store(weights + key + kLanes, high);
      totals[0] = totals[0] + low;
      totals[1] = totals[1] + high;
    } else {
      // what is summed are the rounded weights, so that together they are exactly 1
      const vec both = round_to_pairs(low, high);
      store(weights + key / 2, both);
      totals[0] = add_bf16_pairs(totals[0], both);
    }
  }
  return sum(totals[0] + totals[1]);
}

// Add what one more span gave: `sums` and `own` become those of both. `size`: a multiple of kPanel.
inline void merge(Softmax& own, float* sums, const Softmax& span, const float* span_sums, int64_t size) {
  if (span.total == 0.0f) return;
  if (own.total == 0.0f) {
    own = span;
    std::memcpy(sums, span_sums, size * sizeof *sums);
    return;
  }
  const float maximum = own.maximum > span.maximum ? own.maximum : span.maximum;
  const vec ours = exp2_of_negative<false>(splat(own.maximum - maximum));
  const vec theirs = exp2_of_negative<false>(splat(span.maximum - maximum));
  for (int64_t i = 0; i < size; i += kLanes) {
    store(sums + i, fma(load(sums + i), ours, load(span_sums + i) * theirs));
  }
  float lanes[kLanes];
  store(lanes, fma(splat(own.total), ours, splat(span.total) * theirs));
  own = {maximum, lanes[0]};
}

}  // namespace triptych::attention
