"""Self-attention with its projections, and whatever a family does to queries and keys in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from triptych.checkpoint.architecture import LayerSpec, NormSpec
from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import embedding, rotary_embedding
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.attention import Attention
from triptych_services.worker.layers.linear import QKVLinear, RowLinear
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.rotary import RotaryTables
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    parameter_target,
)
from triptych_services.worker.parallel.shares import share

_GATE_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": softplus}
"""`BlockSpec.output_gate_function` -> the function."""


class SelfAttention(nn.Module):
    """Grouped-query attention; `prefix` is that of its projections."""

    def __init__(
        self,
        spec: LayerSpec,
        *,
        layer_index: int,
        tables: RotaryTables,
        input_size: int = 0,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            layer_index: Index of the layer's KV cache in `StepContext.kv_caches`.
            tables: Rotary tables of the whole model.
            input_size: Elements of what is projected to queries, keys and values; 0: those of a state.

        Raises:
            FeatureDisabled: Ranks would share what is normalised.
        """
        super().__init__()
        hidden_size, block = context.architecture.hidden_size, context.architecture.block
        head_dim, is_written = spec.head_dim, spec.kv_from < 0
        self.qkv_proj = QKVLinear(
            input_size or hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            head_dim,
            bias=block.qkv_bias,
            gate=block.output_gate,
            lacking=("v_proj",) * spec.value_is_key if is_written else ("k_proj", "v_proj"),
            context=context,
            prefix=prefix,
        )
        self.output_gate, self.gate_function = block.output_gate, _GATE_FUNCTIONS[block.output_gate_function]
        self.clip_qkv = block.clip_qkv
        lacks_norm = spec.rope is None and block.qk_norm_needs_rope
        self.qk_norm = "none" if lacks_norm else block.qk_norm
        self.q_norm, self.k_norm, self.v_norm = self._create_norms(head_dim, is_written, context, prefix)
        self.rotary = None if spec.rope is None else tables.find(head_dim, spec.rope)
        self.is_normalised_last = block.qk_norm_after_rope
        self.query_scales: QueryScales | None = None
        if block.query_scaling is not None and (spec.rope is None or not block.scales_queries_without_rope):
            first = int(block.scales_queries_without_rope)
            self.query_scales = QueryScales(*block.query_scaling, first=first, context=context)
        self.sinks: Sinks | None = None
        if block.has_sinks:
            self.sinks = Sinks(spec.num_heads, context=context, prefix=f"{prefix}.sinks")
        self.attention = Attention(
            self._options(spec, context),
            layer_index=layer_index,
            rotary=None if self.is_normalised_last else self.rotary,
            is_written=is_written,
        )
        self.o_proj = RowLinear(
            spec.num_heads * head_dim,
            hidden_size,
            bias=block.out_bias,
            context=context,
            prefix=f"{prefix}.o_proj",
        )

    def _create_norms(
        self, head_dim: int, has_keys: bool, context: ModelContext, prefix: str
    ) -> tuple[nn.Module | None, nn.Module | None, nn.Module | None]:
        """Return the norms of queries, keys and values that there are: of each head, or of all heads together."""
        architecture = context.architecture
        if self.qk_norm == "all" and context.rank.tensor_parallel_size > 1:
            raise FeatureDisabled(
                f"parallel.tensor_parallel_size = {context.rank.tensor_parallel_size}",
                f"{architecture.name} normalises the queries of all heads together; set it to 1",
            )
        heads = (self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads) if self.qk_norm == "all" else (1, 1)
        spec = architecture.block.qk_norm_spec if self.qk_norm != "none" else None

        def norm(name: str, num_heads: int, spec: NormSpec | None, is_there: bool) -> nn.Module | None:
            if spec is None or not is_there:
                return None
            return create_norm(num_heads * head_dim, spec, context=context, prefix=f"{prefix}.{name}")

        return (
            norm("q_norm", heads[0], spec, True),
            norm("k_norm", heads[1], spec, has_keys),
            norm("v_norm", 1, architecture.block.v_norm, has_keys),
        )

    def _options(self, spec: LayerSpec, context: ModelContext) -> AttendOptions:
        block = context.architecture.block
        first_head, _ = share(spec.num_heads, what="num_heads", rank=context.rank)
        slopes = block.alibi_slopes[first_head : first_head + self.qkv_proj.num_heads]
        return AttendOptions(
            scale=block.attention_scale or spec.head_dim**-0.5,
            window=spec.window if spec.attention == "sliding" else 0,
            chunk=spec.window if spec.attention == "chunked" else 0,
            soft_cap=block.attention_soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight,
            alibi=torch.tensor(slopes, device=context.device) if slopes else None,
        )

    def forward(self, hidden: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        packed = self.qkv_proj(hidden, context.adapter_slots)
        query, key, value = self.qkv_proj.split_heads(packed)
        if self.is_normalised_last and self.rotary is not None:
            query, key = rotary_embedding(
                query, key, positions, self.rotary.cos_sin_cache, interleaved=self.rotary.is_interleaved
            )
        if self.qk_norm == "head":
            query = query if self.q_norm is None else self.q_norm(query)
            key = key if self.k_norm is None else self.k_norm(key)
        elif self.qk_norm == "all":
            query, key = self._normalise_together(packed, query, key)
        if self.v_norm is not None:
            value = self.v_norm(value)
        if self.clip_qkv:
            query, key, value = (x.clamp(-self.clip_qkv, self.clip_qkv) for x in (query, key, value))
        if self.query_scales is not None:
            query = query * self.query_scales(positions).to(query.dtype)
        attended = self.attention(query, key, value, positions, context)
        if self.output_gate != "none":
            attended = self._gated(attended, self.gate_function(packed[:, self.qkv_proj.num_columns :]))
        out: Tensor = self.o_proj(attended, context.adapter_slots)
        return out

    def _gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """Multiply [num_tokens, num_heads * head_dim] by gates of each element, or of each head."""
        if self.output_gate == "elements":
            return attended * gates
        heads = attended.unflatten(1, (gates.shape[1], -1))
        return (heads * gates[:, :, None]).flatten(1)

    def _normalise_together(self, packed: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise the queries of all heads as one vector, and the keys."""
        num_query, num_key = query.shape[1] * query.shape[2], key.shape[1] * key.shape[2]
        assert self.q_norm is not None, "this layer has one"
        assert self.k_norm is not None, "see `check_supported`"
        normalised_query = self.q_norm(packed[:, :num_query])
        normalised_key = self.k_norm(packed[:, num_query : num_query + num_key])
        return normalised_query.view(query.shape), normalised_key.view(key.shape)


class QueryScales(nn.Module):
    """A factor of each position's query, `1 + beta * log(1 + floor((position + first) / length))`.

    Source: scalable softmax as in Llama 4, https://github.com/meta-llama/llama-models.
    """

    def __init__(self, beta: float, length: int, *, first: int = 0, context: ModelContext) -> None:
        super().__init__()
        positions = first + torch.arange(context.max_positions, dtype=torch.float32)
        scales = 1 + beta * torch.log(1 + torch.floor(positions / length))
        self.register_buffer("scales", scales[:, None].to(context.device), persistent=False)
        self.scales: Tensor
        """[max_positions, 1] float32."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return [num_tokens, 1, 1] float32."""
        return embedding(positions, self.scales)[:, :, None]


class Sinks(WeightedLayer):
    """One more score per head, for the heads of this rank."""

    def __init__(self, num_heads: int, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.num_heads = num_heads
        self.start, length = share(num_heads, what="num_heads", rank=context.rank)
        self.weight = empty_parameter(length, context=context, dtype=torch.float32)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {self.prefix: parameter_target(self.weight, (self.num_heads,), start=self.start)}
