// A pool of threads for loops that last microseconds: its threads spin for a moment before they sleep.
#pragma once

#include <algorithm>
#include <cstdint>

namespace triptych {

using Body = void (*)(const void* context, int64_t index);

// Threads that loops run on, the caller included.
int num_threads();

// body(context, 0..count - 1), each once, on any free thread; returns when all are done. Indices are
// claimed one by one, so a thread that the system takes off its core delays only its own index. One loop at a
// time: a second caller waits. Loops do not nest, which is asserted. An exception that a body throws is thrown here,
// once all indices are done; of several exceptions, one.
void parallel_for(int64_t count, Body body, const void* context);

// The same for a lambda: f(index).
template <typename F>
void parallel_for(int64_t count, const F& f) {
  parallel_for(count, [](const void* context, int64_t index) { (*static_cast<const F*>(context))(index); }, &f);
}

// f(first row, last row + 1) for all rows, `rows_per_index` at a time.
template <typename F>
void for_rows(int64_t rows, int64_t rows_per_index, const F& f) {
  parallel_for((rows + rows_per_index - 1) / rows_per_index, [&](int64_t index) {
    f(index * rows_per_index, std::min((index + 1) * rows_per_index, rows));
  });
}

// The same as `parallel_for` for loops that read memory in the order of their indices: each thread begins with a part of
// its own, of neighbours, so that it reads on where it was, and takes from the parts of others when it is done. If a
// body throws, some indices may be left out.
void parallel_for_parts(int64_t count, Body body, const void* context);

template <typename F>
void parallel_for_parts(int64_t count, const F& f) {
  parallel_for_parts(count, [](const void* context, int64_t index) { (*static_cast<const F*>(context))(index); }, &f);
}

// Memory that a loop of `parallel_for_parts` to come will read: `count` pieces of `bytes`, one by each index. Threads
// that have nothing to do ask for the beginning of their parts until the next call. There may be no such memory any
// more: nothing is read.
void expect(const void* memory, int64_t count, int64_t bytes);

}  // namespace triptych

extern "C" {
// Use `count` threads (>= 1), the caller's own among them, from the next loop on. Returns a `Failure` (kernel.h);
// where the system does not start so many, the caller's thread computes by itself. In a forked child the threads are
// started again by the first loop.
int64_t triptych_set_threads(int64_t count);
}
