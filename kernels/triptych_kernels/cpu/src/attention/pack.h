// Packing of queries, keys and values into the order in which attention multiplies them.
#pragma once

#include "attention/int8.h"

namespace triptych::attention {

// A vector of a row's units, from element `first` on.
template <typename C, typename T>
vec load_units(const T* row) {
  if constexpr (kPerUnit<C> == 2) {
    return load(reinterpret_cast<const float*>(row));
  } else {
    return load(row);
  }
}

// The same of the last `left` elements, fewer than a vector has, then zeros.
template <typename C, typename T>
vec load_last_units(const T* row, int64_t left) {
  T part[kLanes * kPerUnit<C>] = {};
  std::memcpy(part, row, left * sizeof(T));
  return load_units<C>(part);
}

// Columns of kLanes rows: to[unit][lane] of rows[lane]; steps of `to` are `stride` apart. ahead(bytes) is called as
// often as so many bytes have been read.
template <typename C, typename T, typename Ahead>
void pack_columns(const T* const* rows, int64_t size, float* to, int64_t stride, const Ahead& ahead) {
  constexpr int64_t kElements = kLanes * kPerUnit<C>;
  vec columns[kLanes];
  int64_t first = 0;
  for (; first + kElements <= size; first += kElements, to += kLanes * stride) {
    ahead(kLanes * kElements * sizeof(T));
    unroll<kLanes>([&](auto lane) { columns[lane] = load_units<C>(rows[lane] + first); });
    transpose(columns);
    unroll<kLanes>([&](auto unit) { store(to + unit * stride, columns[unit]); });
  }
  if (first == size) return;
  ahead(kLanes * (size - first) * sizeof(T));
  unroll<kLanes>([&](auto lane) { columns[lane] = load_last_units<C>(rows[lane] + first, size - first); });
  transpose(columns);
  for (int64_t unit = 0; unit * kPerUnit<C> < size - first; ++unit) store(to + unit * stride, columns[unit]);
}

// One panel of keys: to[unit][kPanel]
template <typename C, typename T, typename Ahead>
void pack_keys(const T* const* keys, int64_t head_dim, float* to, const Ahead& ahead) {
  if constexpr (kIsInt<C>) {
    pack_columns_of_bytes(keys, head_dim, to, ahead);
    pack_columns_of_bytes(keys + kLanes, head_dim, to + kLanes, ahead);
  } else {
    pack_columns<C>(keys, head_dim, to, kPanel, ahead);
    pack_columns<C>(keys + kLanes, head_dim, to + kLanes, kPanel, ahead);
  }
}

// Two vectors of a row as a panel holds it, from its element `first` on; past the row's end zeros.
template <typename T>
void load_panel(const T* row, int64_t first, int64_t size, vec (&out)[2]) {
  unroll<2>([&](auto half) {
    const int64_t at = first + half * kLanes;
    out[half] = at + kLanes <= size ? load(row + at) : at < size ? load_last_units<float>(row + at, size - at) : zero();
  });
}

// Values of the keys of one panel: to[part of the head][unit][kPanel], where a unit is a key, or two neighbours;
// parts are `stride` apart.
template <typename C, typename T, typename Ahead>
void pack_values(const T* const* values, int64_t head_dim, float* to, int64_t stride, const Ahead& ahead) {
  for (int64_t key = 0; key < kPanel; key += kPerUnit<C>, to += kPanel) {
    ahead(kPerUnit<C> * head_dim * sizeof(T));
    for (int64_t first = 0; first < head_dim; first += kPanel) {
      vec own[2], next[2];
      ivec pairs[2];
      float* part = to + first / kPanel * stride;
      if constexpr (kIsInt<C>) {
        if (first + kPanel <= head_dim) {
          pair_up_bytes(values[key] + first, values[key + 1] + first, pairs);
        } else {
          pair_up_last_bytes(values[key], values[key + 1], first, head_dim, pairs);
        }
        unroll<2>([&](auto half) { own[half] = as_vec(pairs[half]); });
      } else if constexpr (kPerUnit<C> == 1) {
        load_panel(values[key], first, head_dim, own);
      } else if (first + kPanel <= head_dim) {
        pair_up(values[key] + first, values[key + 1] + first, own);
      } else {
        load_panel(values[key], first, head_dim, own);
        load_panel(values[key + 1], first, head_dim, next);
        unroll<2>([&](auto half) { own[half] = pair_up(own[half], next[half]); });
      }
      store(part, own[0]);
      store(part + kLanes, own[1]);
    }
  }
}

}  // namespace triptych::attention
