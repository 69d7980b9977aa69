"""Holds the graph of modules in shape: no import circles, and few small modules that one other module uses.

A circle is counted although the imports are for type checkers only: to read one module of it, one reads all. A module
below 150 lines with one importer is mostly a class that was carved from a file that was full; it belongs beside its
caller.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.ratchets import hold  # noqa: E402 - run as a script

PACKAGES = ("triptych", "triptych_kernels", "triptych_services", "benchmarks", "tools")
SMALL_LINES = 150
ALLOWED = {
    "*_pb2*": "generated",
    "triptych_services.*.app": "one per process, imported by its __main__",
    "triptych_services.worker.follower_app": "one per process, imported by its __main__",
    "triptych_services.*.create": "makes one choice among several behind a `base.py`",
    "triptych_services.worker.layers.*": "a layer that model families share, in this tree and in other packages",
    "triptych_services.*.servicer": "one per gRPC service, imported by the app that serves it",
    "triptych_services.*.*_servicer": "one per gRPC service, imported by the app that serves it",
    "triptych_services.frontend.http.*routes": "one per dialect, imported by the app that serves it",
    "triptych_services.worker.models.*": "an entry of the registry of models",
    "triptych_services.worker.sampling.logits_processors.*": "an entry of the list of logits processors",
    "triptych_services.worker.attention.flash*": "one attention backend among several",
    "triptych_services.worker.loader.random": "one source of tensors among several",
    "triptych_kernels.torch.*": "a family of ops has a module in each implementation",
    "triptych_kernels.ops.*": "a family of ops has a module in each implementation",
    "triptych_kernels.cpu.attention": "a family of ops has a module in each implementation",
    "triptych_kernels.triton.*.*": "a kernel that is launched from one place",
    "triptych.observe.metrics.*": "the metrics of one service",
    "triptych.cli.*": "a command of the command line, or a part of one",
    "triptych.vllm.*": "lies where its counterpart in vLLM lies",
    "benchmarks.*.*": "one benchmark, listed by its folder",
}
"""Modules that may be small and have one importer, with the reason."""


def main() -> int:
    """Print the circles and the small modules; return 1 if there are more than there may be."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=str(ROOT / "build" / "grimp"))
    importers = {module: graph.find_modules_that_directly_import(module) for module in graph.modules}
    num_lines = {
        module: len(path.read_text().splitlines())
        for module in graph.modules
        if (path := path_of(module)) is not None
    }
    held = [
        hold("import circles", list(circles(importers))),
        hold("modules below 150 lines with one importer", list(fragments(importers, num_lines))),
    ]
    return 0 if all(held) else 1


def path_of(module: str) -> Path | None:
    """Return the file of a module; None for a package, or if there is none."""
    relative = module.replace(".", "/") + ".py"
    folders = (ROOT / "libs", ROOT / "kernels", ROOT)
    return next((folder / relative for folder in folders if (folder / relative).is_file()), None)


def circles(importers: dict[str, set[str]]) -> Iterator[str]:
    """Yield the shortest way around for each import that lies on a circle, one per circle.

    Args:
        importers: Module to the modules that import it.
    """
    left = {module: set(others) for module, others in importers.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            around: list[str] = error.args[1]  # each is imported by the next; the last is the first
            yield " <- ".join(around)
            left[around[1]].discard(around[0])
        else:
            return


def fragments(importers: dict[str, set[str]], num_lines: dict[str, int]) -> Iterator[str]:
    """Yield the modules that are small, have one importer and no reason to.

    Args:
        importers: Module to the modules that import it.
        num_lines: Module to its lines, without packages.
    """
    for module, count in sorted(num_lines.items()):
        if count < SMALL_LINES and len(importers[module]) == 1 and not is_allowed(module):
            yield f"{module}: {count} lines, imported by {next(iter(importers[module]))}"


def is_allowed(module: str) -> bool:
    """Return whether a module may be small and have one importer."""
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
