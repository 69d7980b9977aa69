"""A learned number for each head and distance of two tokens, which is added to their score."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.weights import WeightedLayer, WeightTarget, empty_parameter

_FAR = 128
"""Distance from which on there is one bucket."""


class RelativeBias(WeightedLayer):
    """A number for each head and bucket of distances, spread over all distances; layers share the table.

    Source: T5, arXiv:1910.10683, section 2.1; MPNet, arXiv:2004.09297.
    """

    def __init__(self, num_buckets: int, num_heads: int, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = empty_parameter(num_buckets, num_heads, context=context, dtype=torch.float32)
        longest = context.max_positions
        self._buckets = distance_buckets(torch.arange(1 - longest, longest), num_buckets)
        table = torch.zeros(num_heads, 2 * longest - 1, device=context.device)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor
        """[num_heads, 2 * max_positions - 1] float32, as `AttendOptions.distance_bias`."""

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = tuple(self.weight.shape)
        return {f"{self.prefix}.weight": WeightTarget(self._store, shape, shape[0])}

    def _store(self, stored: Tensor) -> None:
        self.weight.copy_(stored)
        self.table.copy_(stored.float().cpu()[self._buckets].t())


def distance_buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each distance, key position - query position.

    Half of the buckets are for keys behind the query. Of each half the first half holds one distance each, and the
    others hold more and more of them, up to `_FAR`.
    """
    half = num_buckets // 2
    exact = half // 2
    sizes = distances.abs()
    scaled = torch.log(sizes.clamp(min=1).float() / exact) / math.log(_FAR / exact) * (half - exact)
    far = (exact + scaled.long()).clamp(max=half - 1)
    return torch.where(sizes < exact, sizes, far) + half * (distances > 0)
