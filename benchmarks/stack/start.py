"""Measures a start: from the start of a Python program to its first token, three processes included.

The program is `LLM(...).generate(...)` with the embedded model. CPU time is of all processes, up to the first token.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.process_tree import cpu_seconds, descendants
from benchmarks.harness.processes import Child

TIMEOUT_S = 120.0
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
            with Child([sys.executable, "-c", PROGRAM, quantization]) as child:
                child.receive(TIMEOUT_S)
                wall_s = time.monotonic() - child.started_s
                own = {os.getpid()}
                cpu_s = cpu_seconds(one for one in descendants(own) if one.pid not in own)
                child.finish(TIMEOUT_S)
            yield Figure(f"{quantization}, start to first token", "s", (wall_s,))
            yield Figure(f"{quantization}, CPU time", "s", (cpu_s,))


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=5)
    parser.add_argument("--quantization", nargs="+", default=["none", "q4"], help="(default: both)")
    sys.exit(run(parser, measure))
