// A pool of threads for loops that last microseconds: its threads spin for a moment before they sleep.
#pragma once

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

}  // namespace triptych

extern "C" {
// Use `count` threads (>= 1), the caller's own among them, from the next loop on. Returns a `Failure` (kernel.h);
// where the system does not start so many, the caller's thread computes by itself. In a forked child the threads are
// started again by the first loop.
int64_t triptych_set_threads(int64_t count);
}
