"""The tokens that a step has sampled, on the host. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.types.step import LogprobColumns, RowError

I64 = NDArray[np.int64]

NOT_FINITE = RowError("the model's logits hold NaN or infinity")


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """One token per sampling row, in the order of the slots given."""

    token_ids: I64
    """[num_rows]; 0 where the row failed."""
    logprobs: LogprobColumns | None
    """Log-probabilities of the rows that asked and did not fail; None if there are none."""
    failures: tuple[tuple[int, RowError], ...]
    """(row, why), ascending."""
