"""Fixtures of every test."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.pairwise import bring_new_pairs

# A shell that starts us in the background has SIGINT ignored, which children inherit; tests send it to both.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes of pytest-xdist share the cores, and torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    _num_threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads))

# Read when a Triton kernel is defined, so before any test imports one; tools/test_gpu.py knows that there is a device.
if "TRITON_INTERPRET" not in os.environ and not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may have none; its tests need none
    import hypothesis

    # No test depends on the time that it takes, since machines are busy, nor on chance. `--hypothesis-profile=random`,
    # as in `make test-all`, draws other examples each time: what it finds becomes an example of its own.
    for name, draws_the_same in (("random", False), ("triptych", True)):
        hypothesis.settings.register_profile(
            name,
            derandomize=draws_the_same,
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("triptych")


LONGEST_FILES = (
    "oracle/test_greedy_tokens.py",
    "e2e/test_stack.py",
    "oracle/test_logprobs.py",
    "e2e/test_fine_tunes.py",
    "e2e/test_disaggregated.py",
    "e2e/test_hostile_tenant.py",
    "kernels/triton/test_compiles.py",
    "kernels/triton/attention/test_paged_attention.py",
    "kernels/ops/test_sample.py",
    "chaos/test_planted_bugs.py",
)
"""Files that take longer than 15 s, the longest first."""
LONG_TO_COLLECT_AND_THOROUGH = ("test_openapi_conformance.py", "test_embeddings.py")
MANY_CASES = 12
"""Up to so many cases of one test are all kept out of the slow set."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that take long to collect where none of their tests is run."""
    is_left_out = (
        "not thorough" in config.option.markexpr and collection_path.name in LONG_TO_COLLECT_AND_THOROUGH
    )
    return True if is_left_out else None


def pytest_collection() -> None:
    """Look for no garbage while tens of thousands of tests are made: each look at all objects finds none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the tests, and all that they import, out of the looks that follow."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _thin(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        _sort(items)


def _thin(items: list[pytest.Item]) -> None:
    """Mark as thorough, or as slow, what the quick set need not have of a test with many cases.

    Of more than MANY_CASES, those are slow whose values have all met, two by two, in earlier cases. Where the test is
    marked with `quick_cases(n)`, those behind the first `n` are thorough.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("quick_cases")
        num_quick = len(same) if marker is None else marker.args[0]
        for item in same[num_quick:]:
            item.add_marker(pytest.mark.thorough)
        if len(same) > MANY_CASES:
            first = 0 if marker is None else num_quick
            are_new = list(bring_new_pairs([_params(item) for item in same]))
            for item, is_new in list(zip(same, are_new, strict=True))[first:]:
                if not is_new:
                    item.add_marker(pytest.mark.slow)


def _params(item: pytest.Item) -> dict[str, object]:
    """Return parameter -> value."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return params


def _sort(items: list[pytest.Item]) -> None:
    """Begin with the longest files where processes share the tests, so that they end at about the same time."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _random_numbers_are_those_of_the_test(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers wherever and after whatever it runs, so that one that passes here passes there."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # where no test has imported it, none draws from it
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed tells devices that are not there, too, which takes most of the time of a small test.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture(autouse=True)
def _the_log_is_as_it_was() -> Iterator[None]:
    """A test that runs a service's main sends the process's log elsewhere; the next test must not find it there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
