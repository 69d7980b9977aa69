// What this machine can do at most: multiply in registers, and read from each cache and from memory.
//
// A call is one piece of some milliseconds on all threads of the pool. The caller takes the best of several, since
// other processes may compute at the same time.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"

#if defined(__AMX_BF16__)
#include "linear/amx_tile.h"
#endif

namespace triptych {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPiece = std::chrono::microseconds(1500);

constexpr int64_t kTurns = 1000;           // between looks at the clock
constexpr int64_t kReadBytes = 256 << 10;  // the same

// x, which the compiler must take for another value from here on: so no product is moved out of a loop, computed once
// for several sums, or left out. Costs no instruction.
template <typename V>
[[gnu::always_inline]] inline V hidden(V x) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(x.v));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(x.v));
#else
  asm volatile("" : "+w"(x.low), "+w"(x.high));
#endif
  return x;
}

// Each does `turns` turns and returns the operations of one: a multiplication and an addition are two. 0: there is no
// instruction for it.
using Products = int64_t (*)(int64_t turns);

// The sums do not wait for each other: there are more of them than the latency of a product (5 cycles) times two units,
// and few enough for the 16 registers of AVX2. They are variables and no array, which the compiler would hold in memory.
constexpr int kChains = 12;
template <typename V, typename F>
[[gnu::always_inline]] inline void multiply(int64_t turns, V a, V b, const F& add_product) {
  V s0 = a, s1 = a, s2 = a, s3 = a, s4 = a, s5 = a, s6 = a, s7 = a, s8 = a, s9 = a, s10 = a, s11 = a;
  for (int64_t turn = 0; turn < turns; ++turn) {
    s0 = add_product(s0, a = hidden(a), b);
    s1 = add_product(s1, a = hidden(a), b);
    s2 = add_product(s2, a = hidden(a), b);
    s3 = add_product(s3, a = hidden(a), b);
    s4 = add_product(s4, a = hidden(a), b);
    s5 = add_product(s5, a = hidden(a), b);
    s6 = add_product(s6, a = hidden(a), b);
    s7 = add_product(s7, a = hidden(a), b);
    s8 = add_product(s8, a = hidden(a), b);
    s9 = add_product(s9, a = hidden(a), b);
    s10 = add_product(s10, a = hidden(a), b);
    s11 = add_product(s11, a = hidden(a), b);
  }
  hidden(s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11);
}

int64_t multiply_float32(int64_t turns) {
  // sums approach 2
  multiply(turns, splat(0.5f), splat(1.0f), [](vec sum, vec a, vec b) { return fma(sum, a, b); });
  return 2 * kLanes * kChains;
}

// In place of intrinsics, around which GCC 12 copies the sums, so that a loop is bound by copies.
#define TRIPTYCH_ADD_PRODUCT(instruction) asm(instruction " %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v))

int64_t multiply_bfloat16([[maybe_unused]] int64_t turns) {
#if defined(__AVX512BF16__)
  multiply(turns, splat(1.0f), splat(1.0f), [](vec sum, vec a, vec b) {
    TRIPTYCH_ADD_PRODUCT("vdpbf16ps");
    return sum;
  });
  return 4 * kLanes * kChains;
#elif !defined(__x86_64__)
  if constexpr (kHasBf16Products) {
    multiply(turns, splat(1.0f), splat(1.0f), [](vec sum, vec a, vec b) { return add_bf16_dot(sum, a, b); });
    return 4 * kLanes * kChains;
  }
  return 0;
#else
  return 0;
#endif
}

int64_t multiply_16_bits(int64_t turns) {
  multiply(turns, splat_int(0x10001), splat_int(0x10001), [](ivec sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
    TRIPTYCH_ADD_PRODUCT("vpdpwssd");
#elif defined(__AVXVNNI__)
    TRIPTYCH_ADD_PRODUCT("%{vex%} vpdpwssd");
#elif defined(__x86_64__)
    ivec products;
    asm("vpmaddwd %2, %1, %0" : "=v"(products.v) : "v"(a.v), "v"(b.v));
    asm("vpaddd %1, %0, %0" : "+v"(sum.v) : "v"(products.v));
#else
    sum = add_dot(sum, a, b);
#endif
    return sum;
  });
  return 4 * kLanes * kChains;
}

// Bytes by bytes, summed in 32 bits, or in 16 as products of nibbles are where no instruction does more.
int64_t multiply_8_bits(int64_t turns) {
  multiply(turns, splat_int(0x01010101), splat_int(0x01010101), [](ivec sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
    TRIPTYCH_ADD_PRODUCT("vpdpbusd");
#elif defined(__AVXVNNI__)
    TRIPTYCH_ADD_PRODUCT("%{vex%} vpdpbusd");
#elif defined(__x86_64__)
    ivec products;
    asm("vpmaddubsw %2, %1, %0" : "=v"(products.v) : "v"(a.v), "v"(b.v));
    asm("vpaddw %1, %0, %0" : "+v"(sum.v) : "v"(products.v));
#else
    sum = next_products(sum, a, b);
#endif
    return sum;
  });
  return 8 * kLanes * kChains;
}

#if defined(__AMX_BF16__)
// The products of whole tiles that a product of 32 rows consists of; the tiles hold zeros.
template <typename F>
int64_t multiply_tiles(int64_t turns, int64_t inputs, const F& add_products) {
  const amx::Tiles tiles(amx::kMaxRows);
  for (int64_t turn = 0; turn < turns; ++turn) add_products();
  return 2 * amx::kMaxRows * kPanel * inputs;
}
#endif

int64_t multiply_bfloat16_tiles([[maybe_unused]] int64_t turns) {
#if defined(__AMX_BF16__)
  using namespace amx;
  return multiply_tiles(turns, kTileRowBytes / 2, [] {
    amx::multiply<kSums00, kInputs0, kWeights0>();
    amx::multiply<kSums01, kInputs0, kWeights1>();
    amx::multiply<kSums10, kInputs1, kWeights0>();
    amx::multiply<kSums11, kInputs1, kWeights1>();
  });
#else
  return 0;
#endif
}

// Needs a processor with amx_int8, which the others of this library do not.
int64_t multiply_8_bit_tiles([[maybe_unused]] int64_t turns) {
#if defined(__AMX_BF16__)
  return multiply_tiles(turns, amx::kTileRowBytes, [] {
    asm volatile(
        "tdpbusd %tmm6, %tmm4, %tmm0\n\t"
        "tdpbusd %tmm7, %tmm4, %tmm1\n\t"
        "tdpbusd %tmm6, %tmm5, %tmm2\n\t"
        "tdpbusd %tmm7, %tmm5, %tmm3");
  });
#else
  return 0;
#endif
}

// In the order of `PRODUCTS` in machine.py.
constexpr Products kProducts[] = {multiply_float32, multiply_bfloat16, multiply_16_bits, multiply_8_bits,
                                  multiply_bfloat16_tiles, multiply_8_bit_tiles};

void read(const char* from, int64_t bytes) {
  constexpr int64_t kVectors = 8;
  for (const char* end = from + bytes; from < end; from += kVectors * sizeof(vec)) {
    unroll<kVectors>([&](auto i) { hidden(load_ints(from + i * sizeof(vec))); });
  }
}

// One thread's part of a piece.
struct alignas(64) Share {
  Clock::time_point start, end;
  double cpu_s = 0;  // time that the thread was on a core
  double done = 0;
};

double thread_cpu_s() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Calls work(thread), which returns how much it has done, on each thread again and again for `kPiece`. Throws what
// parallel_for throws.
template <typename Work>
std::vector<Share> piece_of(const Work& work) {
  std::vector<Share> shares(num_threads());
  parallel_for(std::ssize(shares), [](int64_t) {});  // threads that have slept are awake now
  parallel_for(std::ssize(shares), [&](int64_t thread) {
    Share& share = shares[thread];
    share.cpu_s = -thread_cpu_s();
    share.start = Clock::now();
    do {
      share.done += work(thread);
      share.end = Clock::now();
    } while (share.end - share.start < kPiece);
    share.cpu_s += thread_cpu_s();
  });
  return shares;
}

// What all threads have done per second of time on a core: right where other processes take cores away, for work in
// which threads do not wait for what they share.
double rate_on_cores(const std::vector<Share>& shares) {
  double rate = 0;
  for (const Share& share : shares) rate += share.done / share.cpu_s;
  return rate;
}

// What all threads have done per second, from the first start to the last end.
double rate_of_all(const std::vector<Share>& shares) {
  Clock::time_point first = shares[0].start, last = shares[0].end;
  double done = 0;
  for (const Share& share : shares) {
    first = std::min(first, share.start);
    last = std::max(last, share.end);
    done += share.done;
  }
  return done / std::chrono::duration<double>(last - first).count();
}

}  // namespace
}  // namespace triptych

extern "C" {

// Writes the operations per second of one kind of products, on all threads together; 0 without an instruction for it.
// Returns a `Failure`.
int64_t triptych_product_rate(int64_t kind, double* rate) {
  using namespace triptych;
  return failure_of([&] {
    const Products multiply = kProducts[kind];
    *rate = multiply(0) == 0
                ? 0.0
                : rate_on_cores(piece_of([&](int64_t) { return static_cast<double>(kTurns * multiply(kTurns)); }));
  });
}

// Writes the bytes per second that all threads together read, each from its own part of `memory`
// [threads][bytes_per_thread], in steps of `step_bytes`, which divides a part and is a multiple of 512. A thread goes on
// where it was in the last piece, by next[thread], an offset in its part. Returns a `Failure`.
int64_t triptych_read_rate(const char* memory, int64_t bytes_per_thread, int64_t step_bytes, int64_t* next, double* rate) {
  using namespace triptych;
  return failure_of([&] {
    const int64_t num_steps = std::max<int64_t>(1, kReadBytes / step_bytes);
    *rate = rate_of_all(piece_of([&](int64_t thread) {
      for (int64_t step = 0; step < num_steps; ++step) {
        read(memory + thread * bytes_per_thread + next[thread], step_bytes);
        next[thread] = (next[thread] + step_bytes) % bytes_per_thread;
      }
      return static_cast<double>(num_steps * step_bytes);
    }));
  });
}
}
