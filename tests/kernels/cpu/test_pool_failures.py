"""Failures of the kernels' threads and scratch memory: an error, never a crash or a wait."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triptych_kernels.cpu.compile import SOURCES
from triptych_kernels.cpu.library import isa

PROBE = """
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "kernel.h"
#include "parallel.h"

using namespace triptych;

// Many short loops, with sleeps between them, on three threads.
static int count() {
  std::atomic<int64_t> total{0};
  for (int64_t i = 0; i < 3000; ++i) {
    parallel_for(7, [&](int64_t index) { total += index; });
    if (i % 100 == 0) usleep(1000);
  }
  std::printf("%lld", static_cast<long long>(total.load()));
  return 0;
}

// A body throws: all others run, the caller gets the exception, and the next loop is as ever.
static int raise() {
  std::atomic<int> num_run{0};
  try {
    parallel_for(50, [&](int64_t index) {
      if (index == 13) throw std::runtime_error("thirteen");
      ++num_run;
    });
  } catch (const std::runtime_error& error) {
    std::printf("%s after %d, ", error.what(), num_run.load());
  }
  return count();
}

static int nest() {
  parallel_for(2, [](int64_t) { parallel_for(2, [](int64_t) {}); });
  return 0;
}

static int scratch() {
  Scratch scratch;
  const Failure failure = failure_of([&] { scratch.get(int64_t{1} << 60); });
  std::printf("%d %d", static_cast<int>(failure), scratch.get(100) != nullptr);
  return 0;
}

int main(int, char** argv) {
  triptych_set_threads(3);
  const std::string what = argv[1];
  return what == "count" ? count() : what == "raise" ? raise() : what == "nest" ? nest() : scratch();
}
"""


@pytest.fixture(scope="module", params=["", "-U__linux__"], ids=["linux", "elsewhere"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program over the pool as it is on Linux, and as it is on other systems."""
    if shutil.which("g++") is None or not isa():
        pytest.skip("needs g++ and a processor that native kernels are built for")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(PROBE)
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{SOURCES}", *filter(None, [request.param])]
    sources = [str(folder / "probe.cpp"), str(SOURCES / "parallel.cpp")]
    subprocess.run(["g++", *flags, *sources, "-o", str(folder / "probe")], check=True, timeout=300)
    return folder / "probe"


def run_probe(probe: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(probe), what], capture_output=True, text=True, timeout=60)


def test_loops_that_sleep_between_compute_every_index(probe: Path) -> None:
    assert run_probe(probe, "count").stdout == str(3000 * 21)


def test_an_exception_of_a_body_reaches_the_caller(probe: Path) -> None:
    assert run_probe(probe, "raise").stdout == f"thirteen after 49, {3000 * 21}"


def test_a_nested_loop_ends_the_process_and_says_why(probe: Path) -> None:
    done = run_probe(probe, "nest")
    assert done.returncode < 0
    assert "parallel_for inside of parallel_for" in done.stderr


def test_scratch_is_usable_after_a_request_too_large(probe: Path) -> None:
    assert run_probe(probe, "scratch").stdout == "1 1"


LIMIT = """
import os, resource, sys
import torch
from triptych_kernels.cpu.library import use_threads
from triptych_kernels.cpu.program import record
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_kernels.ops import linear
from triptych_kernels.weights.formats import QuantizedFormat

UNLIMITED = resource.getrlimit(resource.RLIMIT_AS)

def limit(more_bytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, UNLIMITED[1]))

def lift():
    resource.setrlimit(resource.RLIMIT_AS, UNLIMITED)
"""

MEMORY = """
weight = QuantizedWeight(32, 2048, torch.float32, QuantizedFormat(8))
weight.fill_rows(0, torch.randn(32, 2048))
x = torch.randn(8192, 2048)
use_threads(1)
expected = linear(x[:100], weight)
program = record(lambda recording: (linear(recording.input(x, count="rows"), weight),))
limit(16 << 20)
for call in (lambda: linear(x, weight), lambda: program.run({"rows": len(x)})):
    try:
        call()
    except MemoryError as error:
        print(error)
assert torch.equal(linear(x[:100], weight), expected)
lift()
assert torch.equal(linear(x, weight)[:100], expected)
program.run({"rows": len(x)})
assert torch.equal(program.outputs[0][:100], expected)
print("done")
"""

THREADS = """
weight = QuantizedWeight(512, 64, torch.float32, QuantizedFormat(8))
weight.fill_rows(0, torch.randn(512, 64))
x = torch.randn(30, 64)
expected = linear(x, weight)
limit(100 << 20)
try:
    use_threads(500)
except RuntimeError as error:
    print(error)
assert torch.equal(linear(x, weight), expected)
lift()
use_threads(4)
assert torch.equal(linear(x, weight), expected)
print("done")
"""

FORK = """
weight = QuantizedWeight(512, 64, torch.float32, QuantizedFormat(8))
weight.fill_rows(0, torch.randn(512, 64))
x = torch.randn(30, 64)
use_threads(3)
expected = linear(x, weight)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(linear(x, weight), expected) else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(linear(x, weight), expected)
print("child", os.waitstatus_to_exitcode(status))
"""


def run_python(program: str) -> list[str]:
    if not isa() or sys.platform != "linux":
        pytest.skip("needs native kernels, and limits of memory as Linux has them")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LIMIT + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_a_kernel_without_memory_raises_and_later_computes() -> None:
    at_once, recorded, done = run_python(MEMORY)
    assert at_once.startswith("quantized_linear: the system has no memory")
    assert recorded.startswith("a recorded step: the system has no memory")
    assert done == "done"


@pytest.mark.thorough
def test_threads_that_do_not_start_are_an_error() -> None:
    refused, done = run_python(THREADS)
    assert refused.startswith("500 threads: the system starts no further thread")
    assert done == "done"


@pytest.mark.thorough
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    assert run_python(FORK) == ["child 0"]
