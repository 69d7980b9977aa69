"""The guesses of a model that several ranks compute: rank 0 makes them, and all ranks verify them.

    rank 0         its guesses ──┐ one sum of counts and tokens, ──► the same guesses on all ranks,
    other ranks    zeros ────────┘ in steps that may have some       which choose the same tokens

The plan says which steps may have some, so all ranks take part in the same sums. Only rank 0 has proposers, and judges
by its times what guesses bring.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from triptych.types.step import empty_u32
from triptych_services.worker.context.rank_group import RankGroup
from triptych_services.worker.runner.drafting.base import I64, GuessReport
from triptych_services.worker.runner.drafting.speculation import (
    MAX_GUESSES_PER_STEP,
    Speculation,
    with_guesses,
)
from triptych_services.worker.runner.request_rows import RequestRows, StepRows


class SharedGuesses:
    """Takes the place of a `Speculation` in the runner of each rank, on its thread."""

    def __init__(self, rows: RequestRows, group: RankGroup, own: Speculation | None) -> None:
        """
        Args:
            group: Ranks that share all layers, which call the same methods in the same order.
            own: What guesses, at rank 0; None at the others.
        """
        self._rows = rows
        self._group = group
        self._own = own
        self._fastest = math.inf
        """The seconds of the fastest sum. Others have waited, too, for a rank that was behind with the step, which a
        sum of the model would have waited for."""

    @property
    def state_layers(self) -> tuple[int, ...]:
        """See `Speculation.state_layers`."""
        return () if self._own is None else self._own.state_layers

    def guess(self, step: StepRows) -> StepRows:
        """Return the step with the guesses of rank 0; see `Speculation.guess`.

        Raises:
            RankUnavailable: Another rank is gone, or did not answer in time.
        """
        if step.sample_limits is None:
            return step
        num_rows = step.sampling_slots.size
        numbers = torch.zeros(1, num_rows + MAX_GUESSES_PER_STEP, dtype=torch.float32)  # exact up to 2 ** 24
        if self._own is not None:
            step = self._own.guess(step)
            if (places := step.places) is not None:
                token_ids = places.guesses[places.guesses >= 0]
                numbers[0, :num_rows] = torch.from_numpy(places.counts)
                numbers[0, num_rows : num_rows + token_ids.size] = torch.from_numpy(token_ids)
        started = time.perf_counter()
        summed = self._group.all_reduce(numbers)[0].long().numpy()
        if self._own is not None:
            self._fastest = min(self._fastest, time.perf_counter() - started)
            self._own.note_wait(num_rows, self._fastest)
            return step
        counts = summed[:num_rows]
        return with_guesses(self._rows, step, summed[num_rows : num_rows + int(counts.sum())], counts)

    def finish(
        self,
        step: StepRows,
        token_counts: I64 | None,
        forward_ns: int,
        states: Tensor | None = None,
        layer_states: Tensor | None = None,
    ) -> GuessReport:
        """Take in what the rows of a step have got; see `Speculation.finish`. Only rank 0 reports."""
        if self._own is None:
            return GuessReport(empty_u32())
        return self._own.finish(step, token_counts, forward_ns, states, layer_states)
