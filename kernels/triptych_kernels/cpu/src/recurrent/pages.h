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
  float* guesses;               // [slots, guesses, …] what guessed tokens leave there; null: no row guesses
  int64_t slot_stride;          // floats from slot to slot
  int64_t guess_stride;         // floats from guess to guess
  const int32_t* slots;         // [rows] the slot of each row; not read where both counts are 0
  const int32_t* replayed;      // [rows] guesses of an earlier step that the state before this one lacks
  const int32_t* guessed;       // [rows] the last tokens of each row, which the state after the step lacks

  // null: zeros, or not kept
  const float* before(int64_t row) const { return read[row] ? state + read[row] * stride : nullptr; }
  float* after(int64_t row) const { return write[row] ? state + write[row] * stride : nullptr; }
  int64_t num_replayed(int64_t row) const { return guesses ? replayed[row] : 0; }
  int64_t first(int64_t row) const { return query_starts[row]; }
  // the first guess, or the end
  int64_t known_end(int64_t row) const { return end(row) - (guesses ? guessed[row] : 0); }
  int64_t end(int64_t row) const { return query_starts[row + 1]; }
  // of a row with guesses of this step or an earlier one
  float* guess(int64_t row, int64_t index) const {
    return guesses + slots[row] * slot_stride + index * guess_stride;
  }
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
