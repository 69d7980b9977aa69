"""What a candidate is run on: calls of the op itself, at real sizes, over operands that no cache holds together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.triton.tuning.tunable import KeyValue, Tunable

UNCACHED_BYTES = 256 << 20  # four times the L2 of an H200
_MAX_COPIES = 16
TOLERANCE = 2.0**-6
"""Of a row's error by its length: roundings of bfloat16 in other places come to less, a lost key of 4,000 to more."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One size of an operation."""

    name: str
    calls: Sequence[Callable[[], Tensor]]
    """Alike, but each reads weights or a cache of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One choice to make."""

    tunable: Tunable
    key: tuple[KeyValue, ...]
    build: Callable[[torch.device], list[Workload]]
    """Its operands, allocated on the device; on the meta device for those who only compile."""

    @property
    def title(self) -> str:
        values = (f"{name}={str(value).removeprefix('torch.')}" for name, value in self.named_key.items())
        return f"{self.tunable.name}({', '.join(values)})"

    @property
    def named_key(self) -> dict[str, KeyValue]:
        return dict(zip(self.tunable.key, self.key, strict=True))


def num_copies(operand_bytes: int) -> int:
    """How many operands of this size no cache holds together."""
    return min(max(-(-UNCACHED_BYTES // max(operand_bytes, 1)), 1), _MAX_COPIES)


def problem_of(result: Tensor, expected: Tensor, *, same_bits: bool) -> str | None:
    """What is wrong with a candidate's result beside the default's; None: nothing.

    Args:
        result: [rows, ...], as `expected`.
        same_bits: see `Tunable`.
    """
    if same_bits:
        num_other = int((result != expected).sum())
        return f"{num_other} numbers are not the default's very bits" if num_other else None
    error = (result.double() - expected.double()).flatten(1).norm(dim=1)
    worst = (error / expected.double().flatten(1).norm(dim=1)).max()
    if worst <= TOLERANCE:
        return None
    return f"a row differs from the default's by {float(worst):.2g} of its length, more than {TOLERANCE:.2g}"
