"""Log-probabilities of prompt tokens, for rows that ask; each chunk of a prompt reports its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.types.step import PromptLogprobs, RowError, RowKey
from triptych_kernels import ops
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.prompt_targets import PromptTargets, ScoredPrompts, take_prompt_targets
from triptych_services.worker.runner.request_rows import RequestRows, StepRows
from triptych_services.worker.sampling.batch import to_device
from triptych_services.worker.sampling.sampled import NOT_FINITE

MAX_SCORED_AT_ONCE = 256
"""Number of prompt tokens with logits in memory at one time: 256 x 128k in float32 take 131 MB. A larger number would
not make the product with the head faster."""


class PromptScorer:
    """Computes the log-probabilities of prompt tokens. Owned by the runner; reads its rows."""

    def __init__(
        self,
        rows: RequestRows,
        compute_logits: Callable[[Tensor, Tensor | None], Tensor],
        adapter_slots: Tensor | None = None,
    ) -> None:
        """
        Args:
            compute_logits: Computes logits from hidden states and the slots of their rows' adapters; see `logits_of`.
            adapter_slots: Memory on the host with the slot of each of the step's tokens; None: no token has one.
        """
        self._rows = rows
        self._adapter_slots = adapter_slots
        self._compute_logits = compute_logits

    def take_targets(self, step: StepRows) -> PromptTargets | None:
        """See `take_prompt_targets`."""
        return take_prompt_targets(self._rows, step)

    def finish(self, output: StepOutput, targets: PromptTargets) -> ScoredPrompts:
        """Launch the computation, wait for the device, and read the results."""
        return self.read(targets, [tensor.numpy(force=True) for tensor in self.launch(output, targets)])

    def launch(self, output: StepOutput, targets: PromptTargets) -> tuple[Tensor, ...]:
        """Compute the log-probabilities of a step's targets, without waiting for the device.

        Returns:
            The columns of `ops.token_logprobs`, for all targets; `read` takes their values.
        """
        hidden = output.hidden
        assert hidden is not None, "a row that is in the middle of its prompt does not sample"
        tokens, token_ids = (
            to_device(column, hidden.device) for column in (targets.tokens, targets.token_ids)
        )
        parts = []
        for start in range(0, len(tokens), MAX_SCORED_AT_ONCE):
            part = slice(start, start + MAX_SCORED_AT_ONCE)
            slots = None
            if self._adapter_slots is not None:
                slots = self._adapter_slots[torch.from_numpy(targets.tokens[part])].to(hidden.device)
            logits = self._compute_logits(ops.gather_rows(hidden, tokens[part]), slots)
            rows = torch.arange(len(logits), device=hidden.device)
            num_top = min(targets.num_top, logits.shape[1])
            parts.append(ops.token_logprobs(logits, rows, token_ids[part], num_top))
            del logits  # not to be held beside the next ones
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def read(self, targets: PromptTargets, values: Sequence[NDArray[np.generic]]) -> ScoredPrompts:
        """Report the values of the tensors that `launch` returned."""
        logprobs, ranks, top_ids, top_logprobs = values
        reported: dict[RowKey, PromptLogprobs] = {}
        failures: dict[RowKey, RowError] = {}
        start = 0
        for row in targets.rows:
            part = slice(start, start + row.num_positions)
            start = part.stop
            if np.isnan(logprobs[part]).any():
                failures[row.key] = NOT_FINITE
                continue
            token_ids = _side_by_side(targets.token_ids[part], top_ids[part, : row.num_top])
            reported[row.key] = PromptLogprobs(
                first_position=row.first_position,
                token_ids=token_ids.astype(np.uint32),
                logprobs=_side_by_side(logprobs[part], top_logprobs[part, : row.num_top]).astype(np.float32),
                ranks=ranks[part].astype(np.uint32),
            )
        return ScoredPrompts(reported, failures)


def _side_by_side(first: NDArray[np.generic], rest: NDArray[np.generic]) -> NDArray[np.generic]:
    """Concatenate [rows] and [rows, n] to [rows, 1 + n]."""
    return np.concatenate((first[:, None], rest), axis=1)
