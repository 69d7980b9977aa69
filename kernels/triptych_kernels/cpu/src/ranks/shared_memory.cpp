// Sums and gathers over ranks that are processes of one machine, through memory that they share.
//
//   shared memory   [ state of rank 0 | state of rank 1 | … | slots of rank 0 | slots of rank 1 | … ]
//   slots           [ an even piece | an odd piece ]
//
// What is exchanged is cut into pieces that stay in a core's cache. For each piece a rank fills its slot, publishes the
// piece's number, waits until all others have published theirs, and reads their slots. A slot is filled again two pieces
// later: by then every rank has published the piece between, so it has read this one. Every rank adds in the order of
// ranks, so all get the same bits.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"

namespace triptych {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;
constexpr int64_t kChunkBytes = 16 << 10;  // of a piece, for one thread
constexpr int64_t kMaxRanks = 64;
constexpr int kSpins = 4000;               // about 100 us on x86-64: as long as ranks usually differ in a layer
constexpr long kSleepNs = 50'000'000;      // between two looks at the clock

// Of one rank, in a page of its own so that no two share a cache line.
struct alignas(4096) State {
  std::atomic<uint32_t> published;  // number of the last piece in its slots
  std::atomic<uint32_t> sleepers;   // ranks that sleep until it publishes
};

// The memory, and who uses it.
struct Ranks {
  void* memory;
  int64_t rank;
  int64_t num_ranks;
  int64_t timeout_ms;

  State& state(int64_t of) const { return static_cast<State*>(memory)[of]; }
  char* slot(int64_t of, uint32_t piece) const {
    return static_cast<char*>(memory) + num_ranks * sizeof(State) + (2 * of + piece % 2) * kPieceBytes;
  }
};

struct SumOverRanks {
  Ranks ranks;
  int64_t dtype;
  void* x;       // [rows, size], replaced by the sum
  int64_t size;
};

struct GatherOverRanks {
  Ranks ranks;
  const void* x;          // [rows, lengths[rank]], elements of 4 bytes
  const int64_t* starts;  // [num_ranks + 1] first column of each rank's, and the number of all columns
  void* out;              // [rows, starts[num_ranks]]
};

int64_t now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
  const timespec at_most = {0, kSleepNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &at_most, nullptr, 0);  // of several processes
#else
  static_cast<void>(word), static_cast<void>(seen);
  usleep(50);
#endif
}

void publish(State& state, uint32_t piece) {
  state.published.store(piece, std::memory_order_seq_cst);
#ifdef __linux__
  if (state.sleepers.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&state.published), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

bool has_come(uint32_t published, uint32_t piece) { return static_cast<int32_t>(published - piece) >= 0; }

void wait_for(State& state, uint32_t piece, int64_t timeout_ms) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has_come(state.published.load(std::memory_order_acquire), piece)) return;
    pause();
  }
  const int64_t deadline = now_ms() + timeout_ms;
  state.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (true) {
    const uint32_t seen = state.published.load(std::memory_order_seq_cst);
    const bool is_here = has_come(seen, piece);
    if (is_here || now_ms() > deadline) {
      state.sleepers.fetch_sub(1, std::memory_order_relaxed);
      if (!is_here) throw Refused{kRankGone};
      return;
    }
    sleep_while(state.published, seen);
  }
}

// fill(slot), publish, wait for all others, read(piece).
template <typename Fill, typename Read>
void exchange(const Ranks& ranks, const Fill& fill, const Read& read) {
  State& own = ranks.state(ranks.rank);
  const uint32_t piece = own.published.load(std::memory_order_relaxed) + 1;
  fill(ranks.slot(ranks.rank, piece));
  publish(own, piece);
  for (int64_t other = 0; other < ranks.num_ranks; ++other) {
    if (other != ranks.rank) wait_for(ranks.state(other), piece, ranks.timeout_ms);
  }
  read(piece);
}

template <typename F>
void in_chunks(int64_t bytes, const F& f) {
  parallel_for((bytes + kChunkBytes - 1) / kChunkBytes, [&](int64_t index) {
    const int64_t begin = index * kChunkBytes;
    f(begin, std::min(begin + kChunkBytes, bytes));
  });
}

template <typename T>
void add_up(const T* const* parts, int64_t num_ranks, T* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    vec total = load(parts[0] + i);
    for (int64_t rank = 1; rank < num_ranks; ++rank) total = total + load(parts[rank] + i);
    store(out + i, total);
  }
  for (; i < count; ++i) {
    float total = to_float(parts[0][i]);
    for (int64_t rank = 1; rank < num_ranks; ++rank) total += to_float(parts[rank][i]);
    store_one(out + i, total);
  }
}

template <typename T>
void sum_over_ranks(const SumOverRanks& args, int64_t rows) {
  const Ranks& ranks = args.ranks;
  const int64_t bytes = rows * args.size * static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    const int64_t length = std::min(kPieceBytes, bytes - begin);
    char* own = static_cast<char*>(args.x) + begin;
    exchange(
        ranks,
        [&](char* slot) {
          in_chunks(length, [&](int64_t from, int64_t to) { std::memcpy(slot + from, own + from, to - from); });
        },
        [&](uint32_t piece) {
          in_chunks(length, [&](int64_t from, int64_t to) {
            const T* parts[kMaxRanks];
            for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
              const char* part = rank == ranks.rank ? own : ranks.slot(rank, piece);
              parts[rank] = reinterpret_cast<const T*>(part + from);
            }
            add_up(parts, ranks.num_ranks, reinterpret_cast<T*>(own + from), (to - from) / static_cast<int64_t>(sizeof(T)));
          });
        });
  }
}

// Copies the elements from `begin` on of a rank's part to their places in the rows of all.
void place(const GatherOverRanks& args, int64_t rank, int64_t begin, int64_t end, const uint32_t* from) {
  const int64_t first = args.starts[rank], columns = args.starts[rank + 1] - first;
  const int64_t all = args.starts[args.ranks.num_ranks];
  while (begin < end) {
    const int64_t row = begin / columns, column = begin % columns;
    const int64_t count = std::min(end - begin, columns - column);
    std::memcpy(static_cast<uint32_t*>(args.out) + row * all + first + column, from, count * sizeof(uint32_t));
    begin += count, from += count;
  }
}

void gather_over_ranks(const GatherOverRanks& args, int64_t rows) {
  const Ranks& ranks = args.ranks;
  constexpr int64_t kElements = kPieceBytes / sizeof(uint32_t), kChunk = kChunkBytes / sizeof(uint32_t);
  const auto elements_of = [&](int64_t rank) { return rows * (args.starts[rank + 1] - args.starts[rank]); };
  const uint32_t* x = static_cast<const uint32_t*>(args.x);
  int64_t most = 0;
  for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) most = std::max(most, elements_of(rank));
  for (int64_t begin = 0; begin < most; begin += kElements) {
    const auto end_of = [&](int64_t rank) { return std::min(begin + kElements, elements_of(rank)); };
    const int64_t own_bytes = std::max<int64_t>(end_of(ranks.rank) - begin, 0) * sizeof(uint32_t);
    exchange(
        ranks,
        [&](char* slot) {
          const char* own = reinterpret_cast<const char*>(x + begin);
          in_chunks(own_bytes, [&](int64_t from, int64_t to) { std::memcpy(slot + from, own + from, to - from); });
        },
        [&](uint32_t piece) {
          constexpr int64_t kChunks = kElements / kChunk;
          parallel_for(ranks.num_ranks * kChunks, [&](int64_t index) {
            const int64_t rank = index / kChunks, from = begin + index % kChunks * kChunk;
            const int64_t to = std::min(from + kChunk, end_of(rank));
            if (from >= to) return;
            const uint32_t* part = rank == ranks.rank
                                       ? x + from
                                       : reinterpret_cast<const uint32_t*>(ranks.slot(rank, piece)) + (from - begin);
            place(args, rank, from, to, part);
          });
        });
  }
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(sum_over_ranks, triptych::SumOverRanks,
                ranks.memory, ranks.rank, ranks.num_ranks, ranks.timeout_ms, dtype, x, size) {
  using namespace triptych;
  if (args.dtype == kFloat32) return sum_over_ranks<float>(args, rows);
  sum_over_ranks<bf16>(args, rows);
}

TRIPTYCH_KERNEL(gather_over_ranks, triptych::GatherOverRanks,
                ranks.memory, ranks.rank, ranks.num_ranks, ranks.timeout_ms, x, starts, out) {
  triptych::gather_over_ranks(args, rows);
}

extern "C" {
// Bytes of the memory that so many ranks share, which must be zero at first; 0 if there are too many.
int64_t triptych_shared_bytes(int64_t num_ranks) {
  using namespace triptych;
  return num_ranks > kMaxRanks ? 0 : num_ranks * (static_cast<int64_t>(sizeof(State)) + 2 * kPieceBytes);
}
}
