"""Logits to tokens on this CPU: each implementation's time as a multiple of the time that one read of the logits takes.

python kernels/benchmarks/sample.py [--threads 2] [--rounds 30]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych_kernels.cpu.library import isa, use_threads
from triptych_kernels.logit_index import PenaltyColumns
from triptych_kernels.ops import process_logits, sample, token_logprobs

SHAPES = ((1, 49_152), (64, 49_152), (1, 128_256), (8, 128_256))
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "random, T 0.6": {"temperature": 0.6},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
SPREADS = {"peaked": 4.0, "flat": 1.0}
"""Standard deviations of the logits: of the nucleus of 0.9, they leave a hundred tokens, and most of the vocabulary."""
NUM_PENALIZED, NUM_TOP = 500, 5


def best_of(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of many calls: what others compute on the machine meanwhile does not count."""
    fastest = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def columns(num_rows: int, asked: dict[str, float]) -> dict[str, Any]:
    return {
        "temperature": torch.full((num_rows,), asked["temperature"]),
        "top_k": torch.full((num_rows,), int(asked.get("top_k", 0)), dtype=torch.int32),
        "top_p": torch.full((num_rows,), asked.get("top_p", 1.0)),
        "min_p": torch.full((num_rows,), asked.get("min_p", 0.0)),
        "seeds": torch.arange(num_rows),
        "positions": torch.arange(num_rows) * 7,
    }


def penalties(num_rows: int, vocab_size: int) -> PenaltyColumns:
    return PenaltyColumns(
        rows=torch.arange(num_rows).repeat_interleave(NUM_PENALIZED),
        token_ids=torch.stack(
            [torch.randperm(vocab_size)[:NUM_PENALIZED] for _ in range(num_rows)]
        ).flatten(),
        output_counts=torch.ones(num_rows * NUM_PENALIZED, dtype=torch.int64),
        presence=torch.full((num_rows,), 0.5),
        frequency=torch.full((num_rows,), 0.1),
        repetition=torch.full((num_rows,), 1.1),
    )


def calls(logits: Tensor) -> dict[str, Callable[..., object]]:
    """What is measured, by name; each takes `impl`."""
    num_rows, vocab_size = logits.shape
    rows, chosen = torch.arange(num_rows), logits.argmax(dim=-1)
    penalized = penalties(num_rows, vocab_size)
    return {
        **{
            f"sample: {name}": partial(sample, logits, **columns(num_rows, asked))
            for name, asked in FILTERS.items()
        },
        "process_logits: penalties": partial(process_logits, logits, rows, penalties=penalized),
        f"token_logprobs: {NUM_TOP}": partial(token_logprobs, logits, rows, chosen, NUM_TOP),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    use_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{isa()}, {arguments.threads} threads; best of {arguments.rounds}")
    for num_rows, vocab_size in SHAPES:
        for spread, deviation in SPREADS.items():
            logits = torch.randn(num_rows, vocab_size) * deviation
            read = best_of(logits.sum, arguments.rounds)
            print(f"\n{num_rows} x {vocab_size}, {spread}; one read: {read * 1e6:.0f} us")
            print(f"{'':>26} {'native us':>10} {'reads':>6} {'torch us':>10} {'reads':>6} {'ratio':>6}")
            for name, call in calls(logits).items():
                native, plain = (
                    best_of(partial(call, impl=impl), arguments.rounds) for impl in ("cpu", "torch")
                )
                print(
                    f"{name:>26} {native * 1e6:>10.0f} {native / read:>6.1f} {plain * 1e6:>10.0f} "
                    f"{plain / read:>6.1f} {plain / native:>6.1f}"
                )


if __name__ == "__main__":
    main()
