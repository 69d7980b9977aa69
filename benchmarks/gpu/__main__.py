"""Measures every figure of the GPU worker in one run: limits, kernels, models, start.

    make bench-gpu ARGS="--write-checkpoint /some/disk/8b"       once, 16 GB, for the time to first token
    make bench-gpu ARGS="--checkpoint /some/disk/8b"             all of it, within 8 minutes
    make bench-gpu ARGS="--only 'attention: decode' limits"
    make bench-gpu ARGS="--device cpu --tiny"                    no GPU: sees that all of it runs

Needs torch, triton, numpy and safetensors, and neither an installed Triptych nor a network. Models have random
weights, drawn on the device. A figure that fails, kills its process or hangs it is an error in its row: another
process measures the rest.

Kernels are timed as replays of a CUDA graph over operands that no cache holds, models by the clock of the host. The
limits are this device's own: the bandwidth of a large copy, bytes read and written counted, and the rate of a large
bfloat16 product of random numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.command import create_parser, module_command, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.processes import Answers, Child, ChildError

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.sizes import Sizes
    from benchmarks.gpu.timing import Row

BUDGET_S = 480.0  # after which no further figure is measured
START_TIMEOUT_S = 120.0  # imports, and a CUDA context
ROW_TIMEOUT_S = 150.0  # a model of 16 GB is drawn and its kernels compiled within a fraction of that
GRACE_S = 60.0  # that a row may run past the budget


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    options = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    options += ["--checkpoint", str(arguments.checkpoint.resolve())] if arguments.checkpoint else []
    options += ["--only", *arguments.only] if arguments.only else []
    yield from supervise(module_command("benchmarks.gpu", "--child", *options), BUDGET_S)


def supervise(
    command: list[str], budget_s: float, *, row_timeout_s: float = ROW_TIMEOUT_S
) -> Iterator[Figure]:
    """Yield an outcome of every row, whatever becomes of the processes that measure them.

    Args:
        command: Of the measuring process. It says its titles, then answers with the figure of each row.
        budget_s: Seconds after which no further row is measured; `GRACE_S` later the last one is ended.
    """
    deadline_s = time.monotonic() + budget_s
    titles: list[str] = []
    index = 0
    while not titles or index < len(titles):
        try:
            with Child(command) as child:
                titles = child.receive(START_TIMEOUT_S)["titles"]
                has_failed = False  # an illegal memory access ends a process's device for good
                while index < len(titles) and not has_failed:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        yield Figure(titles[index], note="skipped: the time budget is spent")
                    else:
                        answer = child.ask({"index": index}, min(row_timeout_s, left_s + GRACE_S))
                        figure = Figure.from_json(answer)
                        has_failed = bool(figure.error)
                        yield figure
                    index += 1
        except ChildError as error:
            if not titles:
                yield Figure("no figure", error=str(error))
                return
            yield Figure(titles[index], error=f"the measuring process was lost: {error}")
            index += 1


def all_rows(device: torch.device, sizes: Sizes, checkpoint: Path | None) -> Iterator[Row]:
    """Yield all rows in the order in which a budget that runs out should find them."""
    from benchmarks.gpu import kernels, model_rows, start
    from benchmarks.gpu.timing import Bench

    bench, loaded = Bench(device, sizes), model_rows.LoadedModel()
    yield from kernels.limit_rows(bench)
    yield from kernels.sampling_rows(bench)
    yield from kernels.attention_rows(bench)
    yield from model_rows.model_rows(bench, loaded)
    yield from start.start_rows(bench, loaded, checkpoint)


def answer_rows(arguments: argparse.Namespace) -> None:
    """Be the measuring process: say the titles, then measure the rows that are asked for."""
    answers = Answers()
    import torch

    from benchmarks.gpu.sizes import REAL, TINY

    if arguments.device == "cuda" and not torch.cuda.is_available():
        message = f"torch {torch.__version__} sees no CUDA device; try --device cpu --tiny"
        answers.write({"error": message})
        return
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    parts = arguments.only or [""]
    candidates = all_rows(device, TINY if arguments.tiny else REAL, arguments.checkpoint)
    rows = [row for row in candidates if any(part in row.title for part in parts)]
    if not rows:
        answers.write({"error": f"--only {' '.join(parts)}: no figure's title holds that"})
        return
    answers.write({"titles": [row.title for row in rows]})
    for line in sys.stdin:
        answers.write(outcome(rows[json.loads(line)["index"]]).as_json())


def outcome(row: Row) -> Figure:
    """Return the figure of a row, or its error."""
    from benchmarks.gpu.timing import release_memory

    try:
        release_memory()
        return replace(row.measure(), name=row.title)
    except Exception as error:  # whatever it is, it is this row's result
        message = " ".join(str(error).split())[:600]  # tracebacks of compilers are pages long
        return Figure(row.title, error=f"{type(error).__name__}: {message}")


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, to see that it runs")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART",
        help="figures with one of these in their titles; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="written before, for the time to first token",
    )  # fmt: skip
    parser.add_argument("--write-checkpoint", type=Path, metavar="DIR", help="write it and measure nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(json=Path("build/gpu-figures.json"))
    arguments = parser.parse_args()
    if arguments.write_checkpoint:
        import torch

        from benchmarks.gpu.models import LLAMA_8B
        from benchmarks.gpu.start import write_checkpoint

        write_checkpoint(arguments.write_checkpoint, LLAMA_8B, torch.device(arguments.device))
    elif arguments.child:
        answer_rows(arguments)
    else:
        sys.exit(run(parser, measure))
