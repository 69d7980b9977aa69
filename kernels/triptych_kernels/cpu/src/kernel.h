// What every kernel looks like from outside: a function of its arguments and of the number of rows.
//
// The arguments are a struct of 8-byte fields (pointers, int64_t, double), which Python fills as words; rows are
// what changes from step to step, so a recorded list of calls serves steps of any size.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#define TRIPTYCH_KERNEL(name, Args) extern "C" void triptych_##name(const Args& args, int64_t rows)

namespace triptych {

// Element types as the arguments name them.
enum DType : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Memory that a kernel needs while it runs, kept from call to call; one per place of use and calling thread.
class Scratch {
 public:
  // [bytes], aligned to a cache line; its content is undefined, what `get` gave before is void.
  void* get(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(std::aligned_alloc(64, size_));
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
