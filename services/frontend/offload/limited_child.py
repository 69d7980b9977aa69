"""The main program of a `LimitedProcess`: answers lines, and ends where one takes too much CPU time or memory.

    python -P limited_child.py SCRIPT

Bytes may follow a line, as many as its `num_bytes`; they are the `data` of the message, and of the answer. It ends when
the input is closed, also while it computes.
The file SCRIPT has a function `begin(message)`, which is given the first message. It returns its answer, and the
function that answers all others, or None if there is none. This file imports next to nothing, so that it starts
quickly.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from triptych.rpc.time_slice import set_time_slice

# Compilers and templates recurse along what they are given; a worker gives the compiler of grammars as much.
_STACK_BYTES = 512 << 20
_MAX_BYTES = 4 << 30
"""The most address space of the process, of which the stack is a part. Beyond it an allocation fails."""

_NICENESS = 10
"""Serving goes first where cores are short: the frontend and, on one machine, the model. At 5, one child that computes
without end on 2 cores made others' gaps 1.6 times as long."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(begin: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer | None]]) -> None:
    """Answer until the input ends."""
    answer: Answer | None = None
    for line in sys.stdin.buffer:
        started = time.process_time() if answer is not None else 0.0  # the first one pays for the start, too
        message = json.loads(line)
        if num_bytes := message.pop("num_bytes"):
            message["data"] = sys.stdin.buffer.read(num_bytes)
        # Its default action ends the process, inside a library as well.
        signal.setitimer(signal.ITIMER_PROF, message.pop("limit_s"))
        if answer is None:
            result, answer = begin(message)
        else:
            result = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = result.pop("data", b"")
        head = {**result, "num_bytes": len(data), "cpu_s": time.process_time() - started}
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _run(begin: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer | None]]) -> None:
    try:
        serve(begin)
    except BrokenPipeError:
        pass  # the frontend has ended
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _give_way() -> None:
    """Let serving go first."""
    os.nice(_NICENESS)
    set_time_slice(0)  # longer than the slices of the services' threads, which take our core when they wake
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) > 1:
        os.sched_setaffinity(0, cpus[1:])  # a service finds one core without us, however many we are


def _load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location("limited_work", script)
    assert spec is not None, script
    assert spec.loader is not None, script
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the frontend, which closes our input
    _give_way()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_run, args=(_load(sys.argv[1]).begin,)).start()
    end_of_input = select.poll()
    end_of_input.register(sys.stdin.fileno(), 0)  # POLLHUP comes unasked
    end_of_input.poll()
    os._exit(0)
