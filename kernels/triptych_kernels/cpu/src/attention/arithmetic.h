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
//             integers, and scales are multiplied in afterwards (attention_int8.h)
//   bf16      where queries and keys are, and there is an instruction: weights are rounded to bfloat16
//   float     otherwise
//
// Operands are spelt in units of four bytes: a float, or a pair that is multiplied at once.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "simd/ivec.h"

namespace triptych::attention {

constexpr int kSpan = 256;         // keys
constexpr int kPanel = 2 * kLanes;  // keys or elements of a head that are computed at a time
#if defined(__AVX512F__)
constexpr int kMaxTileRows = 12;   // 24 sums, two vectors of a panel and a row's unit in 32 registers
#else
constexpr int kMaxTileRows = 6;
#endif
#if defined(__AVX512BF16__)
constexpr bool kHasBf16Products = true;
#else
constexpr bool kHasBf16Products = false;
#endif
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
#if defined(__AVX512BF16__)
    __m512bh x, y;
    std::memcpy(&x, &a, sizeof x);
    std::memcpy(&y, &b, sizeof y);
    return {_mm512_dpbf16_ps(sum.v, x, y)};
#endif
  }
}

#if defined(__AVX512BF16__)
// The pairs (low[i], high[i]) of vectors that were loaded from bfloat16.
inline vec pair_up(vec low, vec high) {
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low.v), 16),
                                              _mm512_castps_si512(high.v)))};
}
// The pairs (low[i], high[i]) of 2 * kLanes bfloat16.
inline void pair_up(const bf16* low, const bf16* high, vec (&out)[2]) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const __m512i x = _mm512_loadu_si512(low), y = _mm512_loadu_si512(high);
  out[0].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, first, y));
  out[1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, second, y));
}
#endif

// out[row][lane] += sum over steps of a[step][row] . panel[step][lane], in units
template <typename C, int Rows, int RowStride, int StepStride>
[[gnu::always_inline]] inline void multiply(const float* a, const float* panel, int64_t steps, vec (&out)[Rows][2]) {
  vec sums[Rows][2];  // of its own: sums that others can see would be stored at every step
  unroll<Rows>([&](auto row) {
    sums[row][0] = out[row][0];
    sums[row][1] = out[row][1];
  });
  for (int64_t step = 0; step < steps; ++step, panel += kPanel, a += StepStride) {
    const vec first = load(panel), second = load(panel + kLanes);
    unroll<Rows>([&](auto row) {
      const vec unit = splat(a[row * RowStride]);
      sums[row][0] = multiply_add<C>(unit, first, sums[row][0]);
      sums[row][1] = multiply_add<C>(unit, second, sums[row][1]);
    });
  }
  unroll<Rows>([&](auto row) {
    out[row][0] = sums[row][0];
    out[row][1] = sums[row][1];
  });
}

// f with the number of rows as a constant
template <int Rows = kMaxTileRows, typename F>
void with_rows(int64_t rows, const F& f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, f);
  }
  f(std::integral_constant<int, Rows>{});
}

// scores[row][0 .. kPanel - 1] = factors[row] * query[row] . keys, for int16_t times key_scales[0 .. kPanel - 1];
// rows of scores are kSpan apart. `queries`: [units][rows], `keys`: [units][kPanel].
template <typename C>
void score(const float* queries, const float* keys, int64_t units, int64_t rows, const float* factors,
           const float* key_scales, float* scores) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    vec products[kRows][2];
    unroll<kRows>([&](auto row) { products[row][0] = products[row][1] = zero(); });
    multiply<C, kRows, 1, kRows>(queries, keys, units, products);
    for (int row = 0; row < kRows; ++row) {
      for (int half = 0; half < 2; ++half) {
        vec product = products[row][half];
        if constexpr (kIsInt<C>) product = to_floats(bits_of(product)) * load(key_scales + half * kLanes);
        store(scores + row * kSpan + half * kLanes, product * splat(factors[row]));
      }
    }
  });
}

// out[row][0 .. kPanel - 1] += weights[row] . values; rows of out are `stride` apart.
// `weights`: [rows][kSpan] of type C, `values`: [units][kPanel].
template <typename C>
void mix(const float* weights, const float* values, int64_t units, int64_t rows, float* out, int64_t stride) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    vec sums[kRows][2];
    unroll<kRows>([&](auto row) {
      sums[row][0] = load(out + row * stride);
      sums[row][1] = load(out + row * stride + kLanes);
    });
    multiply<C, kRows, kSpan / kPerUnit<C>, 1>(weights, values, units, sums);
    unroll<kRows>([&](auto row) {
      store(out + row * stride, sums[row][0]);
      store(out + row * stride + kLanes, sums[row][1]);
    });
  });
}

// tanh of each, to 1e-7 of 1
inline vec tanh(vec x) {
  const vec power = exp_of_negative(splat(-2.0f) * abs(x)), one = splat(1.0f);
  const vec size = (one - power) / (one + power);
  return select_negative(x, zero() - size, size);
}

// The largest score and the sum of the weights that were given out relative to it.
struct Softmax {
  float maximum, total;  // total 0: no key was seen
};

// Turns one row's scores of the keys [first, end) of its span into weights 2^(score - maximum) of type C, float or
// bf16; keys outside of [seen_first, seen_end) get 0. first and end are multiples of kPanel.
// `weights` may be `scores`.
template <typename C>
Softmax weigh(float* scores, int64_t first, int64_t end, int64_t seen_first, int64_t seen_end,
              float* weights) {
  vec maxima = splat(kUnseen);
  for (int64_t key = first; key < end; key += kLanes) {
    vec score = load(scores + key);
    if (key < seen_first || key + kLanes > seen_end) {
      score = select_lanes(score, splat(kUnseen), seen_first - key, seen_end - key);
      store(scores + key, score);
    }
    maxima = max(maxima, score);
  }
  const float maximum = largest(maxima);
  vec total = zero();
  for (int64_t key = first; key < end; key += kPanel) {
    const vec low = exp2_of_negative<kPerUnit<C> == 2>(load(scores + key) - splat(maximum));
    const vec high = exp2_of_negative<kPerUnit<C> == 2>(load(scores + key + kLanes) - splat(maximum));
    if constexpr (kPerUnit<C> == 1) {
      store(weights + key, low);
      store(weights + key + kLanes, high);
      total = total + low + high;
    } else {
#if defined(__AVX512BF16__)
      // what is summed are the rounded weights, so that together they are exactly 1
      const __m512bh both = _mm512_cvtne2ps_pbh(high.v, low.v);
      std::memcpy(weights + key / 2, &both, sizeof both);
      const __m512i ones = _mm512_set1_epi16(0x3f80);
      __m512bh one;
      std::memcpy(&one, &ones, sizeof one);
      total.v = _mm512_dpbf16_ps(total.v, both, one);
#endif
    }
  }
  return {maximum, sum(total)};
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
