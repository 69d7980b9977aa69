"""Run a recorded step journal again and report the first divergence.

  triptych replay JOURNAL                                        against the scheduler of this version
  triptych replay JOURNAL --against worker                       against a worker of the recorded config
  triptych replay JOURNAL --against worker --address HOST:PORT   against a worker that runs, and that no engine holds

An engine records with --journal.path DIR. Against the scheduler, what the engine was told is told again, at the
recorded times, and every step must come out the same, byte for byte. Against a worker the recorded steps are computed
again, and every token must be the same. In float32 it is, with as many threads, but for near-ties (two best logits
within 1e-4); in bfloat16, with another number of threads or on other hardware near-ties are common, and a first
difference is no proof of a fault.

Exit codes: 0 no divergence, 1 a divergence, 2 no usable journal or worker.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from triptych.errors import ConfigError

_MODULES = {"scheduler": "services.enginecore.replay", "worker": "services.worker.replay"}
_INTERRUPTED = 130  # as a shell reports death by SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="JOURNAL", help="a file, or a directory: the newest in it")
    parser.add_argument(
        "--against",
        choices=tuple(_MODULES),
        default="scheduler",
        help="what to run it against (default: scheduler)",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the worker; none: one is started, of the recorded config"
    )


def run(arguments: argparse.Namespace) -> int:
    words = [arguments.journal]
    if arguments.address is not None:
        if arguments.against != "worker":
            raise ConfigError("--address: names a worker, and the journal is run against the scheduler")
        words.append(f"--address={arguments.address}")
    # -P: a directory called `services` where the user happens to stand is not ours
    command = [sys.executable, "-P", "-m", "triptych.client.child", str(os.getpid())]
    with subprocess.Popen([*command, _MODULES[arguments.against], *words]) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the terminal has told the child too: let it stop what it has started
            child.wait()
            return _INTERRUPTED
    return code if code >= 0 else 128 - code
