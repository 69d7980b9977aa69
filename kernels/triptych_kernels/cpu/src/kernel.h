// The interface of every kernel: a function of its arguments and of the number of rows.
//
// The arguments are a struct of 8-byte fields (pointers, int64_t, double), which Python fills by the names that the
// library gives for them; rows are what changes from step to step, so a recorded list of calls serves steps of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <type_traits>

// Defines a kernel, which returns a `Failure`, and the table of its struct's fields. The fields after the struct's name
// are all of its fields in their order, or this does not compile; of a struct inside, `inner.field`.
#define TRIPTYCH_KERNEL(name, Args, ...)                                                       \
  extern "C" const triptych::Field* triptych_##name##_fields() {                               \
    using Struct = Args;                                                                       \
    static constexpr triptych::Field fields[] = {TRIPTYCH_FOR_EACH(TRIPTYCH_FIELD, __VA_ARGS__){nullptr, 0, 0}}; \
    static_assert(triptych::fill(fields, sizeof(Struct)), "not the fields of the struct, in order"); \
    return fields;                                                                             \
  }                                                                                            \
  static void run_##name(const Args& args, int64_t rows);                                      \
  extern "C" int64_t triptych_##name(const Args& args, int64_t rows) {                         \
    return triptych::failure_of([&] { run_##name(args, rows); });                              \
  }                                                                                            \
  static void run_##name(const Args& args, [[maybe_unused]] int64_t rows)

#define TRIPTYCH_FIELD(field) {#field, offsetof(Struct, field), triptych::kind_of<decltype(Struct::field)>()},

// f(a) f(b) … for up to 64 arguments: each level expands what the one before put off.
#define TRIPTYCH_FOR_EACH(f, ...) TRIPTYCH_EXPAND_3(TRIPTYCH_NEXT(f, __VA_ARGS__))
#define TRIPTYCH_EXPAND_3(...) TRIPTYCH_EXPAND_2(TRIPTYCH_EXPAND_2(TRIPTYCH_EXPAND_2(TRIPTYCH_EXPAND_2(__VA_ARGS__))))
#define TRIPTYCH_EXPAND_2(...) TRIPTYCH_EXPAND_1(TRIPTYCH_EXPAND_1(TRIPTYCH_EXPAND_1(TRIPTYCH_EXPAND_1(__VA_ARGS__))))
#define TRIPTYCH_EXPAND_1(...) TRIPTYCH_EXPAND_0(TRIPTYCH_EXPAND_0(TRIPTYCH_EXPAND_0(TRIPTYCH_EXPAND_0(__VA_ARGS__))))
#define TRIPTYCH_EXPAND_0(...) __VA_ARGS__
#define TRIPTYCH_NEXT(f, first, ...) f(first) __VA_OPT__(TRIPTYCH_AGAIN TRIPTYCH_NOTHING (f, __VA_ARGS__))
#define TRIPTYCH_AGAIN() TRIPTYCH_NEXT
#define TRIPTYCH_NOTHING ()

namespace triptych {

// Element types as the arguments name them.
enum DType : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt64 = 3, kBool = 4 };

// Why a kernel has not computed, for Python (launch.py) to raise.
enum Failure : int64_t { kNone = 0, kNoMemory = 1, kNoThreads = 2, kRankGone = 3 };

// Thrown by a kernel that fails for a reason of its own.
struct Refused {
  Failure why;
};

// A field of a kernel's struct, for Python (launch.py) to fill. The field after the last has no name.
struct Field {
  const char* name;
  int64_t offset;
  int64_t kind;  // a letter of Python's struct module; P is the address of what a kernel may write, Q of what it reads
};

template <typename T>
constexpr char kind_of() {
  static_assert(sizeof(T) == 8, "fields have 8 bytes");
  if (std::is_pointer_v<T>) return std::is_const_v<std::remove_pointer_t<T>> ? 'Q' : 'P';
  return std::is_floating_point_v<T> ? 'd' : 'q';
}

// Whether these fields, before the one without a name, fill a struct of so many bytes in order.
template <size_t N>
constexpr bool fill(const Field (&fields)[N], size_t bytes) {
  for (size_t i = 0; i + 1 < N; ++i) {
    if (fields[i].offset != static_cast<int64_t>(8 * i)) return false;
  }
  return bytes == 8 * (N - 1);
}

// Runs f and returns what the system refused it. Any other exception is a bug and ends the process.
template <typename F>
Failure failure_of(const F& f) noexcept {
  try {
    f();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::system_error&) {
    return kNoThreads;
  } catch (const Refused& refused) {
    return refused.why;
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
