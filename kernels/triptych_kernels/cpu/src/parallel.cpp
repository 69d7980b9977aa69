#include "parallel.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace triptych {
namespace {

// About 25 us. The loops of a step follow each other within a tenth of it; where nothing follows, the core is
// wanted by somebody else.
constexpr int kSpins = 1000;

// A word that one side changes and others wait for.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void change_by(uint32_t difference) {
    word_.fetch_add(difference, std::memory_order_seq_cst);
    wake();
  }

  // Returns when the value is another than `seen`.
  void wait_while(uint32_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (value() != seen) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == seen) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;  // the common case: no system call
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  void resize(int64_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    stop();
    size_ = std::max<int64_t>(size, 1);
  }

  int64_t size() const { return size_; }

  void run(int64_t count, Body body, const void* context) {
    if (count <= 0) return;
    if (size_ == 1 || count == 1) {
      for (int64_t index = 0; index < count; ++index) body(context, index);
      return;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    if (threads_.empty()) start();
    for (int64_t begin = 0; begin < count; begin += kMaxCount) {
      begin_ = begin;
      run_claimed(std::min(count - begin, kMaxCount), body, context);
    }
  }

 private:
  // A ticket is (epoch | count | next), so that one atomic step both claims an index and tells whether it is one
  // of the loop in hand: a thread that comes late reads nothing of the next loop by mistake.
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
    while (const uint32_t left = unfinished_.value()) unfinished_.wait_while(left);
  }

  void work() {
    while (true) {
      const auto is_open = [](uint64_t ticket) { return (ticket & kMask) < ((ticket >> kBits) & kMask); };
      if (!is_open(ticket_.load(std::memory_order_acquire))) return;
      const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      if (!is_open(ticket)) return;
      body_(context_, begin_ + static_cast<int64_t>(ticket & kMask));
      unfinished_.change_by(static_cast<uint32_t>(-1));
    }
  }

  void serve(uint32_t seen) {
    while (true) {
      begun_.wait_while(seen);
      seen = begun_.value();
      if (is_stopping_.load()) return;
      work();
    }
  }

  void start() {
    is_stopping_ = false;
    const uint32_t seen = begun_.value();
    for (int64_t thread = 1; thread < size_; ++thread) {
      threads_.emplace_back([this, seen] { serve(seen); });
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
  int64_t size_ = 1;
  std::atomic<bool> is_stopping_{false};
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t begin_ = 0;
  uint64_t epoch_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Signal begun_, unfinished_;
};

// Never destroyed: at the end of the process its threads may be anywhere.
Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

}  // namespace

int num_threads() { return static_cast<int>(pool().size()); }

void parallel_for(int64_t count, Body body, const void* context) { pool().run(count, body, context); }

}  // namespace triptych

extern "C" {
void triptych_set_threads(int64_t count) { triptych::pool().resize(count); }
}
