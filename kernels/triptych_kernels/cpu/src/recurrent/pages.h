// Where the recurrent states of a step's rows lie, and what their kernels share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd/vec.h"

namespace triptych::recurrent {

// The last fields of each kernel here; its rows are those of the step.
struct Pages {
  float* state;                 // [pages, …], pages `stride` floats apart
  int64_t stride;
  const int32_t* read;          // [rows] pages with the states before the step; 0: zeros
  const int32_t* write;         // [rows] pages for the states after it, perhaps the same; 0: none is kept
  const int32_t* query_starts;  // [rows + 1], the first token of each row

  // null: zeros, or not kept
  const float* before(int64_t row) const { return read[row] ? state + read[row] * stride : nullptr; }
  float* after(int64_t row) const { return write[row] ? state + write[row] * stride : nullptr; }
};

// The first `count` of kLanes elements, zeros after them.
template <typename T>
inline vec load_first(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  std::copy(from, from + count, lanes);
  return load(lanes);
}

template <typename T>
inline void store_first(T* to, vec x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T lanes[kLanes];
  store(lanes, x);
  std::copy(lanes, lanes + count, to);
}

// log(1 + e^x)
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace triptych::recurrent
