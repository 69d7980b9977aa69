"""Choosing tokens, as a multiple of the time that one read of the logits takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_figures.limits import Bench
from benchmarks.gpu_figures.rows import Measured, Row
from triptych_kernels.logit_index import PenaltyColumns
from triptych_kernels.ops import process_logits, sample

_PENALIZED_TOKENS = 512  # distinct ones of a row's prompt and output
_SPREAD = 3.0  # standard deviation of the logits: a few hundred tokens hold most of the probability
_CASES: tuple[tuple[str, dict[str, float], bool], ...] = (
    ("greedy", {"temperature": 0.0}, False),
    ("temperature", {}, False),
    ("top-k 50", {"top_k": 50}, False),
    ("top-p 0.9", {"top_p": 0.9}, False),
    ("min-p 0.05", {"min_p": 0.05}, False),
    ("top-k 50, top-p 0.9, penalties", {"top_k": 50, "top_p": 0.9}, True),
)
"""Name, what differs from plain sampling, whether rows are penalized."""


def sampling_rows(bench: Bench) -> Iterator[Row]:
    """All rows of a step ask the same."""
    sizes = bench.sizes
    for name, columns, penalized in _CASES:
        title = f"{name}, {sizes.sampling_rows} x {sizes.vocab_size:,}"
        yield Row("sampling", title, partial(measure_sampling, bench, columns, penalized))


def measure_sampling(bench: Bench, columns: dict[str, float], penalized: bool) -> Measured:
    sizes = bench.sizes
    num_rows, vocab_size = sizes.sampling_rows, sizes.vocab_size
    logits_bytes = 4 * num_rows * vocab_size
    calls = []
    for _ in range(bench.num_copies(logits_bytes)):
        logits = torch.randn(num_rows, vocab_size, device=bench.device) * _SPREAD
        calls.append(_call(logits, columns, penalized=penalized))
    if (calls[0]() < 0).any():
        raise ValueError("a row of finite logits found no token")
    timing = bench.time(calls)
    read_s = logits_bytes / bench.bandwidth
    return Measured(
        timing.median / read_s,
        "reads of the logits",
        1.0,
        f"one read, {read_s * 1e6:.1f} us",
        less_is_better=True,
        low=timing.low / read_s,
        high=timing.high / read_s,
        note=timing.note,
    )


def _call(logits: Tensor, asked: dict[str, float], *, penalized: bool) -> Callable[[], Tensor]:
    num_rows, device = logits.shape[0], logits.device
    values = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | asked
    choose_from = partial(
        sample,
        temperature=torch.full((num_rows,), values["temperature"], device=device),
        top_k=torch.full((num_rows,), int(values["top_k"]), dtype=torch.int32, device=device),
        top_p=torch.full((num_rows,), values["top_p"], device=device),
        min_p=torch.full((num_rows,), values["min_p"], device=device),
        seeds=torch.randint(1 << 62, (num_rows,), device=device),
        positions=torch.arange(num_rows, device=device),
    )
    rows = torch.arange(num_rows, device=device)
    penalties = _penalties(logits) if penalized else None

    def choose() -> Tensor:
        processed = logits if penalties is None else process_logits(logits, rows, penalties=penalties)
        return choose_from(processed)

    return choose


def _penalties(logits: Tensor) -> PenaltyColumns:
    """Of every row, half of its distinct tokens standing in the output."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    count = min(_PENALIZED_TOKENS, vocab_size)
    token_ids = torch.rand(num_rows, vocab_size, device=device).topk(count).indices  # distinct
    return PenaltyColumns(
        rows=torch.arange(num_rows, device=device).repeat_interleave(count),
        token_ids=token_ids.flatten(),
        output_counts=(torch.arange(num_rows * count, device=device) % 2),
        presence=torch.full((num_rows,), 0.3, device=device),
        frequency=torch.full((num_rows,), 0.2, device=device),
        repetition=torch.full((num_rows,), 1.1, device=device),
    )
