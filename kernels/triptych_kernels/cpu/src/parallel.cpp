#include "parallel.h"

#include <pthread.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cassert>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernel.h"
#include "simd/scalar.h"

namespace triptych {
namespace {

// About 25 us on x86-64. The loops of a step follow each other within a tenth of it; if nothing follows, others
// may need the core.
constexpr int kSpins = 1000;

// Lets the other thread of the core work for a moment, or where a core has one, the memory.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// A word that one side changes and others wait for.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void change_by(uint32_t difference) {
    word_.fetch_add(difference, std::memory_order_seq_cst);
    wake();
  }

  // Returns when the value is another than `seen`. Meanwhile calls `work_on` until that returns false.
  template <typename F>
  void wait_while(uint32_t seen, const F& work_on) {
    for (int spin = 0; spin < kSpins;) {
      if (value() != seen) return;
      if (work_on()) continue;
      pause();
      ++spin;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == seen) sleep_while(seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;  // the common case: no system call
    wake_sleepers();
  }

#ifdef __linux__
  // not std::atomic::wait, which spins and yields again before it sleeps
  void sleep_while(uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  void wake_sleepers() {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }
#else
  void sleep_while(uint32_t seen) { word_.wait(seen, std::memory_order_seq_cst); }
  void wake_sleepers() { word_.notify_all(); }
#endif

  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Whether this thread is in the body of a loop.
thread_local bool is_in_loop = false;
// Which of the pool's threads this is; 0 is the caller of a loop.
thread_local int64_t thread_number = 0;

// The part of a loop that a thread begins with, and the memory that it will read in one to come.
struct alignas(64) Part {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
  std::atomic<const char*> expected{nullptr};
  std::atomic<int64_t> expected_bytes{0};
};

// Asks for a thread's expected memory, a few lines at a time.
class Lookahead {
 public:
  // Returns whether there is more to ask for. `part` may change meanwhile: then some lines are for nothing.
  bool fetch(const Part& part) {
    const char* const from = part.expected.load(std::memory_order_relaxed);
    if (from != from_) {
      from_ = from;
      done_ = 0;
    }
    if (done_ >= std::min(part.expected_bytes.load(std::memory_order_relaxed), kMaxBytes)) return false;
    for (int line = 0; line < kLines; ++line, done_ += kLineBytes) prefetch_line(from + done_);
    return true;
  }

 private:
  static constexpr int kLines = 4;  // so few that the next loop need not wait
  static constexpr int64_t kMaxBytes = 128 << 10;  // that stay in the second-level cache beside all else

  const char* from_ = nullptr;
  int64_t done_ = 0;
};

// Marks the calling thread as in a loop while it exists.
class InLoop {
 public:
  InLoop() {
    assert(!is_in_loop && "parallel_for inside of parallel_for would wait for itself");
    is_in_loop = true;
  }
  ~InLoop() { is_in_loop = false; }
  InLoop(const InLoop&) = delete;
};

class Pool {
 public:
  explicit Pool(int64_t size) : size_(size) {}

  // Throws std::system_error where so many threads cannot be started; the size is then 1.
  void resize(int64_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    stop();
    size_ = 1;
    start(size);
    size_ = std::max<int64_t>(size, 1);
  }

  void expect(const char* memory, int64_t count, int64_t bytes) {
    if (size() == 1) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (parts_ == nullptr) return;
    for (int64_t thread = 0; thread < size(); ++thread) {
      const int64_t first = count * thread / size(), end = count * (thread + 1) / size();
      parts_[thread].expected.store(memory + first * bytes, std::memory_order_relaxed);
      parts_[thread].expected_bytes.store((end - first) * bytes, std::memory_order_relaxed);
    }
  }

  int64_t size() const { return size_.load(std::memory_order_relaxed); }

  // Throws what a body throws, or std::system_error, see `start`.
  void run(int64_t count, Body body, const void* context) {
    if (count <= 0) return;
    const InLoop in_loop;
    if (size() == 1 || count == 1) {
      for (int64_t index = 0; index < count; ++index) body(context, index);
      return;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    if (threads_.empty()) start(size());  // in a forked child, or after another caller's resize to 1
    for (int64_t begin = 0; begin < count; begin += kMaxCount) {
      begin_ = begin;
      run_claimed(std::min(count - begin, kMaxCount), body, context);
    }
  }

  // As `run`.
  void run_parts(int64_t count, Body body, const void* context) {
    if (count <= 1 || size() == 1) return run(count, body, context);
    const InLoop in_loop;
    std::lock_guard<std::mutex> guard(mutex_);
    if (threads_.empty()) start(size());
    for (int64_t thread = 0; thread < size(); ++thread) {
      parts_[thread].next.store(count * thread / size(), std::memory_order_relaxed);
      parts_[thread].end = count * (thread + 1) / size();
    }
    begin_ = 0;
    const auto work_on_parts = [&] {
      for (int64_t i = 0; i < size(); ++i) {
        Part& part = parts_[(thread_number + i) % size()];
        for (int64_t index; (index = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;) body(context, index);
      }
    };
    using Work = decltype(work_on_parts);
    run_claimed(size(), [](const void* work, int64_t) { (*static_cast<const Work*>(work))(); }, &work_on_parts);
  }

 private:
  // A ticket is (epoch | count | next), so that one atomic step both claims an index and shows whether it is one
  // of the current loop: a thread that comes late reads nothing of the next loop by mistake.
  static constexpr int kBits = 20;
  static constexpr int64_t kMaxCount = (1 << kBits) - 1024;  // as many late threads cannot overflow `next`
  static constexpr uint64_t kMask = (1ull << kBits) - 1;

  void run_claimed(int64_t count, Body body, const void* context) {
    body_ = body;
    context_ = context;
    unfinished_.change_by(static_cast<uint32_t>(count));
    ++epoch_;
    ticket_.store((epoch_ << (2 * kBits)) | (static_cast<uint64_t>(count) << kBits), std::memory_order_release);
    begun_.change_by(1);
    work();
    while (const uint32_t left = unfinished_.value()) {
      unfinished_.wait_while(left, [&] { return lookahead_.fetch(parts_[0]); });
    }
    if (exception_) std::rethrow_exception(std::exchange(exception_, nullptr));
  }

  void work() {
    while (true) {
      const auto is_open = [](uint64_t ticket) { return (ticket & kMask) < ((ticket >> kBits) & kMask); };
      if (!is_open(ticket_.load(std::memory_order_acquire))) return;
      const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      if (!is_open(ticket)) return;
      try {
        body_(context_, begin_ + static_cast<int64_t>(ticket & kMask));
      } catch (...) {
        std::lock_guard<std::mutex> guard(exception_mutex_);
        exception_ = std::current_exception();
      }
      unfinished_.change_by(static_cast<uint32_t>(-1));
    }
  }

  void serve(int64_t thread, uint32_t seen) {
    is_in_loop = true;  // this thread runs only bodies of loops
    thread_number = thread;
    Lookahead lookahead;
    while (true) {
      begun_.wait_while(seen, [&] { return lookahead.fetch(parts_[thread]); });
      seen = begun_.value();
      if (is_stopping_.load()) return;
      work();
    }
  }

  // Throws std::system_error where the system does not start so many threads; then there are none.
  void start(int64_t size) {
    is_stopping_ = false;
    const uint32_t seen = begun_.value();
    parts_ = std::make_unique<Part[]>(std::max<int64_t>(size, 1));
    try {
      for (int64_t thread = 1; thread < size; ++thread) {
        threads_.emplace_back([this, thread, seen] { serve(thread, seen); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  void stop() {
    is_stopping_ = true;
    begun_.change_by(1);
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  std::mutex mutex_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Part[]> parts_;  // by the number of the thread
  Lookahead lookahead_;            // of the caller
  std::atomic<int64_t> size_;
  std::exception_ptr exception_;
  std::mutex exception_mutex_;
  std::atomic<bool> is_stopping_{false};
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t begin_ = 0;
  uint64_t epoch_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Signal begun_, unfinished_;
};

// Never destroyed: at the end of the process its threads may be anywhere. In a forked child, which has none of the
// threads while they may hold its locks, another pool takes its place.
Pool* the_pool = nullptr;

Pool& pool() {
  static const bool is_created = [] {
    the_pool = new Pool(1);
    pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool(the_pool->size()); });
    return true;
  }();
  static_cast<void>(is_created);
  return *the_pool;
}

}  // namespace

int num_threads() { return static_cast<int>(pool().size()); }

void parallel_for(int64_t count, Body body, const void* context) { pool().run(count, body, context); }

void parallel_for_parts(int64_t count, Body body, const void* context) { pool().run_parts(count, body, context); }

void expect(const void* memory, int64_t count, int64_t bytes) {
  pool().expect(static_cast<const char*>(memory), count, bytes);
}

}  // namespace triptych

extern "C" {
int64_t triptych_set_threads(int64_t count) {
  return triptych::failure_of([&] { triptych::pool().resize(count); });
}
int64_t triptych_num_threads() { return triptych::num_threads(); }
}
