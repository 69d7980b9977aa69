// A recorded list of kernel calls, run with one call from outside.
#include "kernel.h"

namespace {

struct Call {
  int64_t (*kernel)(const void* args, int64_t rows);
  const void* args;
  int64_t count_index;  // which of the step's counts is this call's number of rows
};

}  // namespace

// Returns the `Failure` of the first call that has one; those after it are not run.
extern "C" int64_t triptych_run(const Call* calls, int64_t num_calls, const int64_t* counts) {
  for (int64_t i = 0; i < num_calls; ++i) {
    const int64_t failure = calls[i].kernel(calls[i].args, counts[calls[i].count_index]);
    if (failure != triptych::kNone) return failure;
  }
  return triptych::kNone;
}
