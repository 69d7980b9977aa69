"""The command line of `benchmarks/gpu.py`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_figures.report import Report
from benchmarks.gpu_figures.supervisor import supervise

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 480.0


def main(argv: Sequence[str], description: str) -> int:
    """0: no figure failed; 1: one did; 2: wrong usage, or nothing to measure on."""
    arguments = _parse(argv, description)
    if arguments.events_fd is not None:
        _measure(arguments)
        return 0
    report = Report(sys.stdout, arguments.json)
    # so that a checkout without an installed package will do
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "libs"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    try:
        supervise(
            [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *argv],
            report,
            budget_s=arguments.budget_s,
            environment=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
    except RuntimeError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    print(f"{len(report.titles)} figures, {report.num_failed} failed; {arguments.json}", flush=True)
    return 1 if report.num_failed else 0


def _measure(arguments: argparse.Namespace) -> None:
    import torch

    from benchmarks.gpu_figures.measuring import measure_rows, tell_through
    from benchmarks.gpu_figures.rows import REAL, TINY
    from benchmarks.gpu_figures.sections import all_rows

    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit(f"gpu.py: torch {torch.__version__} sees no CUDA device; try --device cpu --tiny")
        device = torch.device("cuda", torch.cuda.current_device())
    rows = [
        row
        for row in all_rows(device, TINY if arguments.tiny else REAL, arguments.checkpoint)
        if any(part in row.title for part in arguments.only or [""])
    ]
    tell = tell_through(arguments.events_fd)
    measure_rows(rows, tell, device, first=arguments.first, budget_s=arguments.budget_s)


def _parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that say nothing, to see that all of it runs"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="figures whose title holds one of these; default: all"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="of benchmarks/gpu_checkpoint.py, for the time to first token",
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S",
        help="after as many seconds no further figure is begun (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu-figures.json"), metavar="FILE",
        help="every figure, written after each (default: %(default)s)",
    )  # fmt: skip
    # of the process that measures, see supervisor.py
    parser.add_argument("--events-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)
