"""Attention over the paged KV cache: rotate, write this step's keys and values, then attend."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import rotary_and_write_kv, rotary_embedding, write_kv
from triptych_services.worker.attention.base import AttentionBackend
from triptych_services.worker.layers.rotary import RotaryEmbedding
from triptych_services.worker.layers.step_context import StepContext


class Attention(nn.Module):
    """Causal attention of one layer, without projections; it has no weights."""

    def __init__(
        self,
        options: AttendOptions,
        *,
        layer_index: int,
        rotary: RotaryEmbedding | None,
        is_written: bool = True,
    ) -> None:
        """
        Args:
            options: Scale of the scores, and what the layer computes beyond plain attention.
            layer_index: Index of this layer's KV cache in `StepContext.kv_caches`.
            rotary: Table that layers share; None: queries and keys are not rotated.
            is_written: Whether this layer writes the cache, rather than an earlier one that has the same.
        """
        super().__init__()
        self.layer_index = layer_index
        self.rotary = rotary
        self.is_written = is_written
        self.options = options

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, context: StepContext
    ) -> Tensor:
        """Attend, and write the step's keys and values.

        All writes of a step come before any read, so rows may share blocks that one of them fills in this step.

        Args:
            query: [num_tokens, num_heads, head_dim], not rotated.
            key: [num_tokens, num_kv_heads, head_dim], not rotated; without heads if the cache is not written here.
            value: As `key`.
            positions: [num_tokens] int64.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        kv_cache = context.kv_caches[self.layer_index]
        batch = context.attention[kv_cache.group]
        cache: dict[str, Any] = {"kv_scales": kv_cache.scales, "impl": batch.backend.writer}
        if not self.is_written:
            if self.rotary is not None:
                table, is_interleaved = self.rotary.cos_sin_cache, self.rotary.is_interleaved
                query, _ = rotary_embedding(query, key, positions, table, interleaved=is_interleaved)
        elif self.rotary is None:
            write_kv(key, value, kv_cache.blocks, batch.slot_mapping, **cache)
        else:
            query = rotary_and_write_kv(
                query,
                key,
                value,
                positions,
                self.rotary.cos_sin_cache,
                kv_cache.blocks,
                batch.slot_mapping,
                interleaved=self.rotary.is_interleaved,
                **cache,
            )
        return batch.backend.attend(query, kv_cache, batch, self.options).flatten(1)


def check_layers(model: nn.Module, backend: AttentionBackend) -> None:
    """Check that the backend computes all options of the model's attention.

    Raises:
        FeatureDisabled: It does not compute an option of a layer; names both.
    """
    for layer in model.modules():
        options = getattr(layer, "options", None)  # those of attention are the only ones
        if not isinstance(options, AttendOptions):
            continue
        if lacking := sorted(options.in_use - backend.supported):
            raise FeatureDisabled(
                f"worker.attention_backend = {backend.name}",
                f"it does not compute {', '.join(lacking)}, which the model's attention needs; set it to auto",
            )
