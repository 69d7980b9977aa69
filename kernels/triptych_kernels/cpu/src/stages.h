// Calls that another call computes row by row: before it reads a row, it has them make it.
//
// A kernel that computes each row from the same row of what it reads can be a stage: beside its own function it has one
// for some of its rows. So a step goes from one loop to the next, with a wait for all threads, half as often.
#pragma once

#include <cstdint>

#include "parallel.h"

// Declares the function of kernel `name` for rows first … end - 1, which runs on the calling thread alone. What it throws
// the call that reads the rows throws.
#define TRIPTYCH_STAGE(name, Args) \
  extern "C" void triptych_##name##_rows(const Args& args, int64_t first, int64_t end)

namespace triptych {

// One call, as Python (fusion.py) writes it.
struct Stage {
  void (*make)(const void* args, int64_t first, int64_t end);
  const void* args;
};

// Calls in their order.
struct Stages {
  const int64_t* rows;  // of each of them in this step
  int64_t count;
  const Stage* first;
};

constexpr int64_t kStagedRows = 8;  // that one thread makes at a time: as many as are made before others are worth waking

inline void make_rows(const Stages* stages, int64_t first, int64_t end) {
  if (stages == nullptr) return;
  for (int64_t i = 0; i < stages->count; ++i) stages->first[i].make(stages->first[i].args, first, end);
}

// All rows, for a call that reads rows before it computes others.
inline void make_all_rows(const Stages* stages) {
  if (stages == nullptr) return;
  for_rows(*stages->rows, kStagedRows, [&](int64_t first, int64_t end) { make_rows(stages, first, end); });
}

}  // namespace triptych
