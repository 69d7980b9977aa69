"""Measures a start: from the start of a Python program to its first token, three processes included.

The program is `LLM(...).generate(...)` with the embedded model. CPU time is of all processes, up to the first token. A
start that finds no bytecode compiles every module, so the state of that is beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from benchmarks.harness.processes import Child

TIMEOUT_S = 120.0
PACKAGES = ("triptych", "triptych_services", "triptych_kernels")
PROGRAM = """
import json, sys
from triptych import LLM
with LLM(quantization=sys.argv[1]) as llm:
    llm.generate("The capital of France is", {"max_tokens": 1, "temperature": 0})
    print(json.dumps({"done": True}), flush=True)
    sys.stdin.read()
    print(json.dumps({"ended": True}), flush=True)
"""


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        for quantization in arguments.quantization:
            bytecode = bytecode_state()
            with Child([sys.executable, "-c", PROGRAM, quantization]) as child:
                child.receive(TIMEOUT_S)
                wall_s = time.monotonic() - child.started_s
                own = {os.getpid()}
                cpu_s = cpu_seconds(one for one in descendants(own) if one.pid not in own)
                child.finish(TIMEOUT_S)
            yield Figure(f"{quantization}, start to first token", "s", (wall_s,), note=bytecode)
            yield Figure(f"{quantization}, CPU time", "s", (cpu_s,), note=bytecode)


def bytecode_state() -> str:
    """Return for how many modules of the project a process like this one finds bytecode, and whether it writes some."""
    folders = [
        Path(folder)
        for package in PACKAGES
        if (spec := importlib.util.find_spec(package)) is not None
        for folder in spec.submodule_search_locations or ()
    ]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    cached = [Path(importlib.util.cache_from_source(str(path))) for path in modules]
    num_found = sum(path.is_file() for path in cached)
    writes = "is not written" if sys.dont_write_bytecode else "is written"
    return f"bytecode of {num_found} of {len(modules)} modules is there, and {writes}"


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument("--quantization", nargs="+", default=["none", "q4"], help="(default: both)")
    sys.exit(run(parser, measure))
