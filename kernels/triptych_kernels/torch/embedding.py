"""Looking up tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def embedding(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return functional.embedding(token_ids, weight).to(out_dtype)
