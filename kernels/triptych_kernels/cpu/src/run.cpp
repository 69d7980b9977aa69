// A recorded list of kernel calls, run with one call from outside.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernel.h"
#include "parallel.h"

namespace {

constexpr int64_t kFewRows = 16;  // that wait for memory; more compute
constexpr int64_t kNoChild = -1, kHangs = -2;
constexpr int kPollUs = 500, kPolls = 20'000;  // 10 s

struct Call {
  int64_t (*kernel)(const void* args, int64_t rows);
  const void* args;
  int64_t count_index;  // which of the step's counts is this call's number of rows
  const void* ahead;    // the panels that the next product after this one reads; null: as before this call
  int64_t num_panels;
  int64_t panel_bytes;
};

}  // namespace

// Returns the `Failure` of the first call that has one; those after it are not run.
extern "C" int64_t triptych_run(const Call* calls, int64_t num_calls, const int64_t* counts) {
  for (int64_t i = 0; i < num_calls; ++i) {
    const int64_t rows = counts[calls[i].count_index];
    if (calls[i].ahead && rows <= kFewRows) triptych::expect(calls[i].ahead, calls[i].num_panels, calls[i].panel_bytes);
    const int64_t failure = calls[i].kernel(calls[i].args, rows);
    if (failure != triptych::kNone) return failure;
  }
  return triptych::kNone;
}

// Runs the calls in a child process, for kernels that may not work on this machine. The pool must have one thread.
// Returns the number of the signal that ended the child, or 0, kNoChild or kHangs.
extern "C" int64_t triptych_run_in_child(const Call* calls, int64_t num_calls, const int64_t* counts) {
  const pid_t child = fork();
  if (child < 0) return kNoChild;
  if (child == 0) {
    for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) signal(number, SIG_DFL);
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    triptych_run(calls, num_calls, counts);
    _exit(0);
  }
  int status = 0;
  for (int poll = 0; poll < kPolls; ++poll) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (ended < 0) return kNoChild;  // someone else has waited for it
    usleep(kPollUs);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return kHangs;
}
