"""The last token of each slot, on the device: what a step samples is the next one's input before the host knows it."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.runner.cuda.inputs import DeviceBatch


class LastTokens:
    """Read and written by kernels alone, in the order of the steps."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        # one more: what padding samples goes behind the last slot
        self._token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def complete(self, batch: DeviceBatch) -> Tensor:
        """[num_tokens] the step's token ids, those included that the host awaits."""
        kept = self._token_ids.index_select(0, batch.token_slots)
        return torch.where(batch.is_awaited, kept, batch.inputs.token_ids)

    def keep(self, slots: Tensor, token_ids: Tensor) -> None:
        """Remember what was sampled, [num_sampling] each; 0 in place of -1, as the host does for a row that failed."""
        self._token_ids.index_copy_(0, slots, token_ids.clamp_min(0))
