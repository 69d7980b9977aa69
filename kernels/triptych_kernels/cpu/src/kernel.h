// What every kernel looks like from outside: a function of its arguments and of the number of rows.
//
// The arguments are a struct of 8-byte fields (pointers, int64_t, double), which Python fills as words; rows are
// what changes from step to step, so a recorded list of calls serves steps of any size.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>

// Defines a kernel, which returns a `Failure`.
#define TRIPTYCH_KERNEL(name, Args)                                                  \
  static void run_##name(const Args& args, int64_t rows);                            \
  extern "C" int64_t triptych_##name(const Args& args, int64_t rows) {               \
    return triptych::failure_of([&] { run_##name(args, rows); });                    \
  }                                                                                  \
  static void run_##name(const Args& args, [[maybe_unused]] int64_t rows)

namespace triptych {

// Element types as the arguments name them.
enum DType : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Why a kernel has not computed, for Python (launch.py) to raise.
enum Failure : int64_t { kNone = 0, kNoMemory = 1, kNoThreads = 2 };

// Runs f and returns what the system refused it. Any other exception is a bug and ends the process.
template <typename F>
Failure failure_of(const F& f) noexcept {
  try {
    f();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::system_error&) {
    return kNoThreads;
  }
  return kNone;
}

// Memory that a kernel needs while it runs, kept from call to call; one per place of use and calling thread.
class Scratch {
 public:
  // Returns [bytes], aligned to a cache line. Its content is undefined, what `get` gave before is void.
  // Throws std::bad_alloc where the system has no memory; a later, smaller request may succeed.
  void* get(int64_t bytes) {
    if (bytes > size_) {
      const int64_t size = (bytes + 4095) / 4096 * 4096;
      size_ = 0;
      memory_.reset();
      memory_.reset(std::aligned_alloc(64, size));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace triptych
