"""Fresh memory that shows what a kernel forgot to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let `torch.empty` return tensors of NaN, or of the largest integer, inside the context."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        fresh = empty(*args, **kwargs)
        return fresh.fill_(torch.nan if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    with patch("torch.empty", poisoned):
        yield
