// What this machine can do at most: read memory, and multiply in registers. limits.py compiles and calls it.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#include "simd/vec.h"

#if defined(__AMX_BF16__)
#include "linear/amx_tile.h"
#endif

using namespace triptych;

namespace {
constexpr int kChains = 20;  // sums that do not wait for each other: more than latency times units
constexpr int kRounds = 12;  // the fastest counts
constexpr int64_t kFloatsRead = 32 << 20;  // per thread, 128 MiB: more than caches hold
constexpr int64_t kTurns = 1'000'000;  // some milliseconds

float read_floats(const float* from, int64_t count) {
  vec sums[8];
  for (auto& sum : sums) sum = zero();
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
    unroll<8>([&](auto j) { sums[j] = sums[j] + load(from + i + j * kLanes); });
  }
  float total = 0;
  for (auto each : sums) total += sum(each);
  return total;
}

// Returns the operations per turn.
int64_t multiply_float32(int64_t turns, float* out) {
  vec sums[kChains];
  unroll<kChains>([&](auto i) { sums[i] = splat(*out + i); });
  const vec factor = splat(*out);
  for (int64_t turn = 0; turn < turns; ++turn) {
    unroll<kChains>([&](auto i) { sums[i] = fma(sums[i], factor, factor); });
  }
  unroll<kChains>([&](auto i) { *out += sum(sums[i]); });
  return 2 * kLanes * kChains;
}

// Returns the operations per turn; 0 without an instruction for it.
int64_t multiply_bfloat16(int64_t turns, float* out) {
#if defined(__AMX_BF16__)
  using namespace triptych::amx;
  const Tiles tiles(kMaxRows);  // of zeros; *out keeps what it has
  for (int64_t turn = 0; turn < turns; ++turn) {
    multiply<kSums00, kInputs0, kWeights0>();
    multiply<kSums01, kInputs0, kWeights1>();
    multiply<kSums10, kInputs1, kWeights0>();
    multiply<kSums11, kInputs1, kWeights1>();
  }
  return 2 * kMaxRows * kPanel * kStep + 0 * static_cast<int64_t>(*out);
#elif defined(__AVX512BF16__)
  vec sums[kChains];
  unroll<kChains>([&](auto i) { sums[i] = splat(*out + i); });
  __m512bh factor;
  std::memset(&factor, 0, sizeof factor);
  for (int64_t turn = 0; turn < turns; ++turn) {
    unroll<kChains>([&](auto i) { sums[i].v = _mm512_dpbf16_ps(sums[i].v, factor, factor); });
  }
  unroll<kChains>([&](auto i) { *out += sum(sums[i]); });
  return 4 * kLanes * kChains;
#else
  return turns * 0 * static_cast<int64_t>(*out);
#endif
}

// Returns the shortest time in seconds in which all threads carry out work(thread) at once.
template <class Work>
double best_seconds(int num_threads, Work work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    std::barrier start(num_threads);
    std::vector<Clock::time_point> starts(num_threads), ends(num_threads);
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i) {
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        starts[i] = Clock::now();
        work(i);
        ends[i] = Clock::now();
      });
    }
    for (auto& thread : threads) thread.join();
    const auto first = *std::min_element(starts.begin(), starts.end());
    const auto last = *std::max_element(ends.begin(), ends.end());
    best = std::min(best, std::chrono::duration<double>(last - first).count());
  }
  return best;
}

double gigaflops(int num_threads, int64_t (*multiply)(int64_t, float*)) {
  std::vector<float> sums(num_threads * 16);  // a cache line each
  const int64_t per_turn = multiply(1, sums.data());
  const double seconds = best_seconds(num_threads, [&](int i) { multiply(kTurns, &sums[i * 16]); });
  return num_threads * kTurns * per_turn / seconds / 1e9;
}
}  // namespace

// Writes GB/s of reading, then GFLOP/s of float32 and of bfloat16, 0 without an instruction for it.
extern "C" void measure_limits(int num_threads, double* limits) {
  std::vector<std::vector<float>> memory(num_threads, std::vector<float>(kFloatsRead, 1.0f));
  std::vector<float> sums(num_threads);
  const double read_seconds =
      best_seconds(num_threads, [&](int i) { sums[i] = read_floats(memory[i].data(), kFloatsRead); });
  volatile float kept = sums[0];
  (void)kept;
  limits[0] = num_threads * kFloatsRead * sizeof(float) / read_seconds / 1e9;
  limits[1] = gigaflops(num_threads, multiply_float32);
  limits[2] = gigaflops(num_threads, multiply_bfloat16);
}
