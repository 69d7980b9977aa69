"""The options of a layer's attention, which `ops.paged_attention` and attention backends take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttendOptions:
    """The options of one layer, the same in every step.

    Of a query at position p, which sees the keys at first..p, with h its head:

        first    = max(0, p - window + 1, p // chunk * chunk)
        score[k] = cap(scale * query . key[k]) + alibi[h] * (k - p)      cap(x) = soft_cap * tanh(x / soft_cap)
        out      = sum of e^score[k] * value[k] / (e^sinks[h] + sum of e^score[k])

    `sinks` and `alibi` are on the device of the layer, and must keep their memory: a recorded step and a CUDA graph
    read it. A rank that has a share of the heads has their share of both.

    Sources: window, arXiv:2310.06825; chunk, Llama 4; soft_cap, Gemma 2, arXiv:2408.00118; sinks, GPT-OSS,
    arXiv:2508.10925; alibi, arXiv:2108.12409.
    """

    scale: float
    """Factor of the products of queries and keys."""
    window: int = 0
    """Largest number of keys that a query sees, including its own; 0: all."""
    chunk: int = 0
    """Number of positions of a chunk; a query sees the keys of its own chunk only. 0: all."""
    soft_cap: float = 0.0
    """Bound of the scores, which become soft_cap * tanh(score / soft_cap); 0: they stay as they are."""
    sinks: Tensor | None = None
    """[num_heads] float32, one more score for each head, which takes part in the softmax and has no value."""
    alibi: Tensor | None = None
    """[num_heads] float32, slopes: a score gets slope * (key position - query position) after it is capped."""
    distance_bias: Tensor | None = None
    """[num_heads, 2 * n - 1] float32, for texts of up to n tokens: a score gets column key position - query position +
    n - 1. Only `ops.encode_attention` computes it."""
    latent_dim: int = 0
    """Elements of a value, which are the first ones of its key, so that the cache holds one vector per token. 0: keys
    and values are vectors of their own. Only `ops.latent_attention` computes it."""
    is_causal: bool = True
    """Whether a query sees no later keys. `ops.paged_attention` takes True only, `ops.encode_attention` False only."""

    def __post_init__(self) -> None:
        """Check the values; `ops.paged_attention` checks that there is one for each head.

        Raises:
            ValueError: A value is out of its range, or a tensor is no vector of float32; names it.
        """
        for name in ("window", "chunk", "soft_cap"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"attention: {name} {value} must be 0 or positive")
        for name in ("sinks", "alibi"):
            value = getattr(self, name)
            if value is None or (value.dtype == torch.float32 and value.ndim == 1 and value.is_contiguous()):
                continue
            raise ValueError(
                f"attention: {name} {list(value.shape)} of {value.dtype} must be a contiguous [num_heads] of "
                "torch.float32"
            )

        bias = self.distance_bias
        if bias is not None and (bias.dtype != torch.float32 or bias.ndim != 2 or not bias.is_contiguous()):
            raise ValueError(
                f"attention: distance_bias {list(bias.shape)} of {bias.dtype} must be a contiguous "
                "[num_heads, 2 * n - 1] of torch.float32"
            )

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the options other than `scale` that are not at their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[1:]}
        return frozenset(
            name for name, (value, default) in values.items() if isinstance(value, Tensor) or value != default
        )

    @property
    def max_keys(self) -> int:
        """Largest number of keys that a query sees; 0: all."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=0)
