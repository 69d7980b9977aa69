// Attention over a cache of 8 bits: scales, and operands as 16-bit integers.
//
//   score  = factor * query_scale * key_scale * sum of query[i] * key[i]
//   values = weight_scale * sum over the span's keys of weight * value[i], where weight * weight_scale is the
//            softmax's weight times the value's scale
//
// The sums are of integers, so they are exact in any order.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/arithmetic.h"

namespace triptych::attention {

constexpr float kLargestElement = 127.0f;  // of a cache
constexpr float kLargestShort = 32767.0f;
constexpr float kLargestSum = 2147483000.0f;
static_assert(kSpan * kLargestElement * kLargestShort < kLargestSum, "a span's sums fit 32 bits");
constexpr float kVanishing = 1e-30f;  // what is smaller counts as 0, since its inverse might not be finite

// Packs one vector of `head_dim` elements. Those of int8 are paired 0 and 2, 1 and 3, 4 and 6 …
template <typename C>
int64_t num_units(int64_t head_dim) {
  return kIsInt<C> ? (head_dim + 3) / 4 * 2 : (head_dim + kPerUnit<C> - 1) / kPerUnit<C>;
}

// kLanes elements from `first` on; past the end at `size` zeros.
template <typename Q>
vec load_part(const Q* row, int64_t first, int64_t size) {
  if (first + kLanes <= size) return load(row + first);
  Q part[kLanes] = {};
  std::memcpy(part, row + first, (size - first) * sizeof(Q));
  return load(part);
}

// A query's units, then up to kLanes / 2 zeros; returns their scale, NaN where the query is not finite.
template <typename Q>
float quantize_query(const Q* query, int64_t head_dim, int16_t* to) {
  vec maxima = zero();
  uint32_t flawed = 0;
  for (int64_t first = 0; first < head_dim; first += kLanes) {
    const vec x = load_part(query, first, head_dim);
    flawed |= unordered(x, x - x);  // infinities, too
    maxima = max(maxima, abs(x));
  }
  const float maximum = largest(maxima);
  // sums over the head fit 32 bits, too
  const float limit = std::min(kLargestShort, std::floor(kLargestSum / (kLargestElement * head_dim)));
  const vec inverse = splat(!flawed && maximum > kVanishing ? limit / maximum : 0.0f);
  for (int64_t first = 0; first < head_dim; first += kLanes) {
    store_shorts_in_pairs(to + first, to_ints(load_part(query, first, head_dim) * inverse));
  }
  return flawed ? std::numeric_limits<float>::quiet_NaN() : maximum / limit;
}

// Columns of kLanes keys: to[unit][lane] of rows[lane]; units are kPanel apart.
template <typename Ahead>
void pack_columns_of_bytes(const int8_t* const* rows, int64_t size, float* to, const Ahead& ahead) {
  constexpr int64_t kElements = kLanes * 4;
  vec words[kLanes];
  const auto store_word = [&](int64_t word) __attribute__((always_inline)) {
    store(to + 2 * word * kPanel, as_vec(even_bytes(bits_of(words[word]))));
    store(to + (2 * word + 1) * kPanel, as_vec(odd_bytes(bits_of(words[word]))));
  };
  int64_t first = 0;
  for (; first + kElements <= size; first += kElements, to += 2 * kLanes * kPanel) {
    ahead(kLanes * kElements);
    unroll<kLanes>([&](auto lane) { words[lane] = as_vec(load_ints(rows[lane] + first)); });
    transpose(words);
    unroll<kLanes>([&](auto word) { store_word(word); });
  }
  if (first == size) return;
  ahead(kLanes * (size - first));
  unroll<kLanes>([&](auto lane) {
    int8_t part[kElements] = {};
    std::memcpy(part, rows[lane] + first, size - first);
    words[lane] = as_vec(load_ints(part));
  });
  transpose(words);
  for (int64_t word = 0; 4 * word < size - first; ++word) store_word(word);
}

// The pairs (low[i], high[i]) of the last elements from `first` on, fewer than kPanel; then zeros.
inline void pair_up_last_bytes(const int8_t* low, const int8_t* high, int64_t first, int64_t size, ivec (&out)[2]) {
  int8_t parts[2][kPanel] = {};
  std::memcpy(parts[0], low + first, size - first);
  std::memcpy(parts[1], high + first, size - first);
  pair_up_bytes(parts[0], parts[1], out);
}

// out[row][0 .. kPanel - 1] += weights[row] . values, as `mix` does, of one panel of keys with its values in place:
// they are used once and need not be packed. `first`: the part of the head.
inline void mix_bytes(const float* weights, const int8_t* const* values, int64_t first, int64_t head_dim, int64_t rows,
                      float* out, int64_t stride) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    vec sums[kRows][2];
    unroll<kRows>([&](auto row) {
      sums[row][0] = load(out + row * stride);
      sums[row][1] = load(out + row * stride + kLanes);
    });
    const auto add = [&](int64_t pair, const ivec(&elements)[2]) __attribute__((always_inline)) {
      unroll<kRows>([&](auto row) {
        const vec weight = splat(weights[row * (kSpan / 2) + pair]);
        sums[row][0] = multiply_add<int16_t>(weight, as_vec(elements[0]), sums[row][0]);
        sums[row][1] = multiply_add<int16_t>(weight, as_vec(elements[1]), sums[row][1]);
      });
    };
    ivec elements[2];
    if (first + kPanel <= head_dim) {
      for (int64_t pair = 0; pair < kPanel / 2; ++pair) {
        pair_up_bytes(values[2 * pair] + first, values[2 * pair + 1] + first, elements);
        add(pair, elements);
      }
    } else {
      for (int64_t pair = 0; pair < kPanel / 2; ++pair) {
        pair_up_last_bytes(values[2 * pair], values[2 * pair + 1], first, head_dim, elements);
        add(pair, elements);
      }
    }
    unroll<kRows>([&](auto row) {
      store(out + row * stride, sums[row][0]);
      store(out + row * stride + kLanes, sums[row][1]);
    });
  });
}

// One row's weights of the keys [first, end) of its span as 16-bit integers, the scales of their values in them;
// returns the scale of the integers, NaN where one that the row sees is. Destroys `weights`.
inline float quantize_weights(float* weights, const float* value_scales, int64_t first, int64_t end,
                              int64_t seen_first, int64_t seen_end, int16_t* out) {
  vec maxima = zero();
  uint32_t flawed = 0;
  for (int64_t key = first; key < end; key += kLanes) {
    vec weight = load(weights + key) * load(value_scales + key);
    if (key < seen_first || key + kLanes > seen_end) {  // what is not seen may be NaN
      weight = select_lanes(weight, zero(), seen_first - key, seen_end - key);
    }
    store(weights + key, weight);
    flawed |= unordered(weight, weight);
    maxima = max(maxima, weight);
  }
  const float maximum = largest(maxima);
  const vec inverse = splat(maximum > kVanishing ? kLargestShort / maximum : 0.0f);
  for (int64_t key = first; key < end; key += kLanes) store_shorts(out + key, to_ints(load(weights + key) * inverse));
  return flawed ? std::numeric_limits<float>::quiet_NaN() : maximum / kLargestShort;
}

// The integers that values were summed to become floats, times a scale; count is a multiple of kPanel.
inline void scale_sums(float* sums, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i += kPanel) {
    ivec panel[2] = {load_ints(sums + i), load_ints(sums + i + kLanes)};
    in_order(panel);
    store(sums + i, to_floats(panel[0]) * splat(scale));
    store(sums + i + kLanes, to_floats(panel[1]) * splat(scale));
  }
}

}  // namespace triptych::attention
