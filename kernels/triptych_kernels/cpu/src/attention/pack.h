// Packing of queries, keys and values into the order in which attention multiplies them; values in their place.
#pragma once

#include "attention/int8.h"
#include "attention/lookahead.h"

namespace triptych::attention {

// A vector of a row's units.
template <typename C, typename T>
vec load_row(const T* row) {
  if constexpr (kPerUnit<C> == 2) {
    return load(reinterpret_cast<const float*>(row));
  } else {
    return load(row);
  }
}

// The same of its last `left` elements, fewer than a vector has, then zeros.
template <typename C, typename T>
vec load_end_of_row(const T* row, int64_t left) {
  T part[kLanes * kPerUnit<C>] = {};
  std::memcpy(part, row, left * sizeof(T));
  return load_row<C>(part);
}

// Columns of kLanes queries: to[unit][lane] of rows[lane]; units of `to` are `stride` apart.
template <typename C, typename Q>
void pack_queries(const Q* const* rows, int64_t size, float* to, int64_t stride) {
  constexpr int64_t kElements = kLanes * kPerUnit<C>;
  vec columns[kLanes];
  int64_t first = 0;
  for (; first + kElements <= size; first += kElements, to += kLanes * stride) {
    unroll<kLanes>([&](auto lane) { columns[lane] = load_row<C>(rows[lane] + first); });
    transpose(columns);
    unroll<kLanes>([&](auto column) { store(to + column * stride, columns[column]); });
  }
  const int64_t left = size - first;
  if (left == 0) return;
  unroll<kLanes>([&](auto lane) { columns[lane] = load_end_of_row<C>(rows[lane] + first, left); });
  transpose(columns);
  for (int64_t at = 0, column = 0; at < left; at += kPerUnit<C>, ++column) store(to + column * stride, columns[column]);
}

// The units of a panel of keys: to[unit][kPanel]
template <typename C, typename T>
void unpack_keys(KeyPanel keys, int64_t words, float* to) {
  for (int64_t word = 0; word < words; ++word, to += kUnitsPerWord<C, T> * kPanel) {
    for (int half = 0; half < 2; ++half) {
      vec units[kUnitsPerWord<C, T>];
      load_units<C, T>(keys.vectors[half], units);
      unroll<kUnitsPerWord<C, T>>([&](auto unit) { store(to + unit * kPanel + half * kLanes, units[unit]); });
      prefetch_ahead(keys.ahead[half]);
      keys.vectors[half] += keys.stride;
      keys.ahead[half] += keys.ahead_stride;
    }
  }
}

// The units of a panel of latent vectors, which are rows: to[unit][kPanel]
template <typename C, typename T>
void pack_rows(const T* const* rows, int64_t ahead, int64_t size, float* to) {
  for (int64_t row = 0; row < kPanel; ++row) {
    for (int64_t at = 0; at < size * static_cast<int64_t>(sizeof(T)); at += kLineBytes) {
      prefetch_ahead(reinterpret_cast<const char*>(rows[row + ahead]) + at);
    }
  }
  pack_queries<C>(rows, size, to, kPanel);
  pack_queries<C>(rows + kLanes, size, to + kLanes, kPanel);
}

// kPanel elements of a row from `first` on; past its end, which lies inside, zeros.
template <typename T>
struct LastElements {
  T elements[kPanel] = {};
  LastElements(const T* row, int64_t first, int64_t size) {
    std::memcpy(elements, row + first, (size - first) * sizeof(T));
  }
};

// Values of bfloat16 that become floats are loaded as even and odd elements.
template <typename C, typename T>
constexpr bool kLoadsEvenAndOdd = kPerUnit<C> == 1 && sizeof(T) == 2;

// A step of values in place: kPanel elements of a key, paired with those of the next one if units are pairs. Those of
// 8 bits are in an order that `in_order` undoes.
template <typename C, typename T>
[[gnu::always_inline]] inline void load_values(const T* own, [[maybe_unused]] const T* next, vec (&out)[2]) {
  if constexpr (kIsInt<C>) {
    ivec pairs[2];
    pair_up_bytes(own, next, pairs);
    out[0] = as_vec(pairs[0]);
    out[1] = as_vec(pairs[1]);
  } else if constexpr (kPerUnit<C> == 2) {
    pair_up(own, next, out);
  } else if constexpr (kLoadsEvenAndOdd<C, T>) {
    const vec pairs = in_register(load(reinterpret_cast<const float*>(own)));
    out[0] = even_of(pairs);
    out[1] = odd_of(pairs);
  } else {
    out[0] = load(own);
    out[1] = load(own + kLanes);
  }
}
// Values of the keys of one panel, their elements from `first` on: to[part of the head][unit][kPanel], where a unit is a
// key, or two neighbours; parts are `stride` apart.
template <typename C, typename T>
void pack_values(const T* const* values, int64_t ahead, int64_t first, int64_t head_dim, float* to, int64_t stride) {
  for (int64_t key = 0; key < kPanel; key += kPerUnit<C>, to += kPanel) {
    const T *own = values[key], *next = values[key + kPerUnit<C> - 1];
    float* part = to;
    for (int64_t at = first; at < head_dim; at += kPanel, part += stride) {
      prefetch_rows_ahead<kPerUnit<C>>(values + key, ahead, at * sizeof(T));
      vec panel[2];
      if (at + kPanel <= head_dim) {
        load_values<C>(own + at, next + at, panel);
      } else {
        const LastElements<T> last(own, at, head_dim), next_last(next, at, head_dim);
        load_values<C>(last.elements, next_last.elements, panel);
      }
      if constexpr (kLoadsEvenAndOdd<C, T>) interleave(panel[0], panel[1]);
      store(part, panel[0]);
      store(part + kLanes, panel[1]);
    }
  }
}

// out[row] = weights[row] . values, as `mix` does, of `count` keys with their values in place, for the whole panels
// of head_dim: few rows use them once, so they need not be packed.
template <typename C, typename T>
void mix_in_place(const float* weights, const T* const* values, int64_t ahead, int64_t count, int64_t head_dim,
                  int64_t rows, float* out, int64_t stride) {
  with_rows(rows, [&](auto constant) __attribute__((noinline)) {
    constexpr int kRows = constant;
    const auto mix_parts = [&](auto parts, int64_t first) __attribute__((always_inline)) {
      constexpr int kParts = parts;
      vec sums[kRows][kParts][2];
      unroll<kRows>([&](auto row) {
        unroll<kParts>([&](auto part) { sums[row][part][0] = sums[row][part][1] = zero(); });
      });
      const float* weight = weights;
      for (int64_t key = 0; key < count; key += kPerUnit<C>, ++weight) {
        vec panels[kParts][2];
        unroll<kParts>([&](auto part) {
          const int64_t at = first + part * kPanel;
          prefetch_rows_ahead<kPerUnit<C>>(values + key, ahead, at * sizeof(T));
          load_values<C>(values[key] + at, values[key + kPerUnit<C> - 1] + at, panels[part]);
        });
        unroll<kRows>([&](auto row) {
          const vec unit = splat(weight[row * (kSpan / kPerUnit<C>)]);
          unroll<kParts>([&](auto part) {
            unroll<2>([&](auto half) {
              sums[row][part][half] = multiply_add<C>(unit, panels[part][half], sums[row][part][half]);
            });
          });
        });
      }
      unroll<kRows>([&](auto row) {
        unroll<kParts>([&](auto part) {
          if constexpr (kLoadsEvenAndOdd<C, T>) interleave(sums[row][part][0], sums[row][part][1]);
          float* to = out + row * stride + first + part * kPanel;
          store(to, sums[row][part][0]);
          store(to + kLanes, sums[row][part][1]);
        });
      });
    };
    int64_t first = 0;
    if constexpr (2 * kRows <= kMaxTileRows) {  // registers hold the sums of two panels
      constexpr std::integral_constant<int, 2> kTwo;
      for (; first + 2 * kPanel <= head_dim; first += 2 * kPanel) mix_parts(kTwo, first);
    }
    for (; first + kPanel <= head_dim; first += kPanel) mix_parts(std::integral_constant<int, 1>{}, first);
  });
}

}  // namespace triptych::attention
