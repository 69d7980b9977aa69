"""Latent self-attention with its projections: multi-head latent attention, as in DeepSeek-V2.

A head's keys and values are never made. What would make them from the latents is applied to the queries, and to what
these attend to:

    query . (K latent) = (K^T query) . latent          sum of weight * (V latent) = V (sum of weight * latent)

so that all heads attend to one vector per token, which is all that the cache holds. Prompts are computed in the same
way, and so a token has the same bits however its prompt is cut: docs/adr/0085.

An indexer, where there is one, chooses the vectors that a token attends to, by keys of its own that lie behind them in
the cache: docs/adr/0121.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import IndexerSpec, LatentSpec, LayerSpec, NormSpec
from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import (
    choose_keys,
    chosen_attention,
    head_linear,
    linear,
    rotary_embedding,
    write_latent,
)
from triptych_kernels.weights.packed import HeadWeight, PackedWeight, can_pack
from triptych_services.worker.attention.base import AttentionBatch, KvCache
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.linear import ColumnLinear, PackedLinear, Piece, RowLinear
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.rotary import RotaryEmbedding, RotaryTables
from triptych_services.worker.layers.self_attention import QueryScales
from triptych_services.worker.layers.step_context import ChosenKeys, StepContext
from triptych_services.worker.layers.weights import (
    AnyWeight,
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    linear_target,
)
from triptych_services.worker.parallel.shares import share

_INDEXER_EPS = 1e-6  # of the norm of its keys, whatever the model's is


class LatentSelfAttention(nn.Module):
    """Latent attention; `prefix` is that of its projections. Ranks share the heads, and each has the whole cache."""

    def __init__(
        self,
        spec: LayerSpec,
        *,
        layer_index: int,
        tables: RotaryTables,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            layer_index: Index of the layer's KV cache in `StepContext.kv_caches`.
            tables: Rotary tables of the whole model.

        Raises:
            FeatureDisabled: The layer has what latent attention is not computed with.
        """
        super().__init__()
        assert spec.latent is not None, "this class is for such layers"
        assert spec.rope is not None, "a part of each key is rotated"
        self.latent, self.layer_index = spec.latent, layer_index
        hidden_size, block = context.architecture.hidden_size, context.architecture.block
        _check_supported(spec, context)
        first_head, self.num_heads = share(spec.num_heads, what="num_heads", rank=context.rank)
        query_size = spec.head_dim
        scale = block.attention_scale or query_size**-0.5
        self.options = AttendOptions(scale, latent_dim=self.latent.kv_rank)
        norm = partial(create_norm, spec=NormSpec(eps=self.latent.norm_eps), context=context)
        width = self.latent.vector_dim
        down = Piece("kv_a_proj_with_mqa", width, 0, width)
        self.q_a_layernorm: nn.Module | None = None
        self.q_b_proj: ColumnLinear | None = None
        if self.latent.q_rank:
            query = Piece("q_a_proj", self.latent.q_rank, 0, self.latent.q_rank)
            self.q_a_layernorm = norm(self.latent.q_rank, prefix=f"{prefix}.q_a_layernorm")
            self.q_b_proj = ColumnLinear(
                self.latent.q_rank,
                spec.num_heads * query_size,
                activation=None,
                bias=False,
                context=context,
                prefix=f"{prefix}.q_b_proj",
            )
        else:
            sizes = spec.num_heads, first_head, self.num_heads
            query = Piece("q_proj", *(number * query_size for number in sizes))
        self.down_proj = PackedLinear(hidden_size, (query, down), bias=False, context=context, prefix=prefix)
        self.kv_a_layernorm = norm(self.latent.kv_rank, prefix=f"{prefix}.kv_a_layernorm")
        self.kv_b_proj = AbsorbedProjections(spec, self.latent, context=context, prefix=f"{prefix}.kv_b_proj")
        self.rotary = tables.find(self.latent.rope_dim, spec.rope)
        self.indexer = create_indexer(self.latent, self.rotary, context=context, prefix=f"{prefix}.indexer")
        scaling = block.query_scaling
        self.query_scales = None if scaling is None else QueryScales(*scaling, context=context)
        self.o_proj = RowLinear(
            spec.num_heads * (spec.value_dim or query_size),
            hidden_size,
            bias=block.out_bias,
            context=context,
            prefix=f"{prefix}.o_proj",
        )

    def forward(self, hidden: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        kv_cache, latent = context.kv_caches[self.layer_index], self.latent
        batch = context.attention[kv_cache.group]
        packed = self.down_proj(hidden, context.adapter_slots)
        query, vector, rope_key = packed.split(
            (packed.shape[1] - latent.vector_dim, latent.kv_rank, latent.rope_dim), dim=1
        )
        query_source = query
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            query_source = self.q_a_layernorm(query)
            query = self.q_b_proj(query_source, context.adapter_slots)
        # [num_tokens, num_heads, nope_dim | rope_dim]
        query = query.view(len(query), self.num_heads, latent.nope_dim + latent.rope_dim)
        rope_query, rope_key = rotary_embedding(
            query[..., latent.nope_dim :],
            rope_key[:, None],
            positions,
            self.rotary.cos_sin_cache,
            interleaved=self.rotary.is_interleaved,
        )
        behind_latent, choosing = rope_key[:, 0], None
        if self.indexer is not None:
            choosing = self.indexer(hidden, query_source, positions, context.adapter_slots)
            behind_latent = torch.cat((behind_latent, choosing.key), dim=1)
        vectors = kv_cache.blocks[:, 0, 0]  # [num_blocks, block_size, width]
        write_latent(
            self.kv_a_layernorm(vector),
            behind_latent,
            vectors,
            batch.slot_mapping,
            impl=batch.backend.writer,
        )
        if choosing is not None:
            context.chosen_keys[:] = [
                choosing.choose(vectors[..., latent.vector_dim :], batch, latent.num_chosen_keys)
            ]
        query = self.kv_b_proj.absorb_keys(query[..., : latent.nope_dim])
        query = torch.cat((query, rope_query), dim=2)
        if self.query_scales is not None:
            query = query * self.query_scales(positions).to(query.dtype)
        values = self.kv_b_proj.make_values(self._attend(query, kv_cache, batch, context))
        out: Tensor = self.o_proj(values.flatten(1), context.adapter_slots)
        return out

    def _attend(
        self, query: Tensor, kv_cache: KvCache, batch: AttentionBatch, context: StepContext
    ) -> Tensor:
        """Return what each head attends to, [num_tokens, num_heads, kv_rank]."""
        if self.latent.indexer is None:
            return batch.backend.attend(query, kv_cache, batch, self.options)
        (chosen,) = context.chosen_keys
        return chosen_attention(
            query,
            kv_cache.blocks.flatten(0, 3)[:, : self.latent.vector_dim],
            chosen.slots,
            chosen.counts,
            scale=self.options.scale,
            value_dim=self.latent.kv_rank,
            impl=batch.backend.writer,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Choosing:
    """The queries of an indexer for a step's tokens, and the keys by which these are chosen."""

    query: Tensor
    """[num_tokens, num_heads, head_dim], rotated."""
    weights: Tensor
    """[num_tokens, num_heads] float32."""
    key: Tensor
    """[num_tokens, head_dim], rotated."""

    def choose(self, keys: Tensor, batch: AttentionBatch, num_keys: int) -> ChosenKeys:
        """Choose of the keys [num_blocks, block_size, head_dim] in the cache, this step's among them."""
        slots, counts = choose_keys(
            self.query,
            self.weights,
            keys,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            max_keys=num_keys,
            query_lens_list=batch.query_lens_list,
            seq_lens_list=batch.seq_lens_list,
            impl=batch.backend.writer,
        )
        return ChosenKeys(slots, counts)


class Indexer(nn.Module):
    """The small attention that chooses keys; `prefix` is its own. Every rank has all of it, and chooses the same.

    The Hadamard transform of its queries and keys in DeepSeek's code changes no product; it is for 8 bits, which
    they do not have here. Factors that all scores share change no order, and are left out.
    """

    def __init__(
        self,
        latent: LatentSpec,
        spec: IndexerSpec,
        *,
        rotary: RotaryEmbedding,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            rotary: The table of the layer.
        """
        super().__init__()
        self.spec, self.rotary = spec, rotary
        hidden_size, size = context.architecture.hidden_size, spec.num_heads * spec.head_dim
        query = Piece("wq_b", size, 0, size)
        key = Piece("wk", spec.head_dim, 0, spec.head_dim)
        self.wq_b = PackedLinear(latent.q_rank, (query,), bias=False, context=context, prefix=prefix)
        self.wk = PackedLinear(hidden_size, (key,), bias=False, context=context, prefix=prefix)
        norm = NormSpec(kind="layer", eps=_INDEXER_EPS, bias=True)
        self.k_norm = create_norm(spec.head_dim, norm, context=context, prefix=f"{prefix}.k_norm")
        self.weights_proj = HeadWeights(
            hidden_size, spec.num_heads, context=context, prefix=f"{prefix}.weights_proj"
        )

    def forward(
        self, hidden: Tensor, query_source: Tensor, positions: Tensor, adapter_slots: Tensor | None
    ) -> Choosing:
        """
        Args:
            hidden: [num_tokens, hidden_size], the layer's input.
            query_source: [num_tokens, q_rank], what the layer's queries are made of.
        """
        query = self.wq_b(query_source, adapter_slots).view(
            len(hidden), self.spec.num_heads, self.spec.head_dim
        )
        key = self.k_norm(self.wk(hidden, adapter_slots))
        query, key = rotary_embedding(
            query, key[:, None], positions, self.rotary.cos_sin_cache, interleaved=self.spec.is_interleaved
        )
        return Choosing(query, self.weights_proj(hidden), key[:, 0])


def create_indexer(
    latent: LatentSpec, rotary: RotaryEmbedding, *, context: ModelContext, prefix: str
) -> Indexer | None:
    """Return the indexer of a layer; None: the layer has none of its own."""
    spec = latent.indexer
    if spec is None or spec.is_shared:
        return None
    return Indexer(latent, spec, rotary=rotary, context=context, prefix=prefix)


class HeadWeights(WeightedLayer):
    """The weight of each head of an indexer. It is never quantized: it is small, and decides what is chosen."""

    def __init__(self, hidden_size: int, num_heads: int, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight: AnyWeight
        if context.device.type == "cpu" and can_pack(hidden_size, context.dtype):
            self.weight = PackedWeight(num_heads, hidden_size, context.dtype)
        else:
            self.weight = empty_parameter(num_heads, hidden_size, context=context)

    def forward(self, x: Tensor) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, num_heads] in float32."""
        return linear(x, self.weight, out_dtype=torch.float32)

    def weight_targets(self) -> dict[str, WeightTarget]:
        rows, columns = self.weight.shape
        return {f"{self.prefix}.weight": linear_target(self.weight, (rows, columns))}


class AbsorbedProjections(WeightedLayer):
    """The projections of a latent to the keys and values of this rank's heads, turned for queries and results.

    The checkpoint has them as one tensor, head by head: [num_heads * (nope_dim + value_dim), kv_rank]. They are in the
    model's precision and never quantized, since they multiply by head.
    """

    def __init__(self, spec: LayerSpec, latent: LatentSpec, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.spec, self.latent = spec, latent
        self.first_head, self.num_heads = share(spec.num_heads, what="num_heads", rank=context.rank)
        self.rows_per_head = latent.nope_dim + spec.value_dim

        def weight(out_features: int, in_features: int) -> nn.Parameter | HeadWeight:
            if context.device.type == "cpu" and can_pack(in_features, context.dtype):
                return HeadWeight(self.num_heads, out_features, in_features, context.dtype)
            return empty_parameter(self.num_heads, out_features, in_features, context=context)

        self.keys = weight(latent.kv_rank, latent.nope_dim)
        self.values = weight(spec.value_dim, latent.kv_rank)

    def absorb_keys(self, query: Tensor) -> Tensor:
        """Map queries [num_tokens, num_heads, nope_dim] to [num_tokens, num_heads, kv_rank]."""
        return head_linear(query, self.keys)

    def make_values(self, attended: Tensor) -> Tensor:
        """Map weighted latents [num_tokens, num_heads, kv_rank] to [num_tokens, num_heads, value_dim]."""
        return head_linear(attended, self.values)

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape = (self.spec.num_heads * self.rows_per_head, self.latent.kv_rank)
        return {
            f"{self.prefix}.weight": WeightTarget(
                self._fill,
                shape,
                self.num_heads * self.rows_per_head,
                start=self.first_head * self.rows_per_head,
            )
        }

    def _fill(self, rows: Tensor) -> None:
        for head, own in enumerate(rows.reshape(self.num_heads, self.rows_per_head, -1)):
            keys, values = own.split((self.latent.nope_dim, self.spec.value_dim))
            for weight, part in ((self.keys, keys.t()), (self.values, values)):
                if isinstance(weight, HeadWeight):
                    weight.fill_head(head, part)
                else:
                    weight[head].copy_(part)


def _check_supported(spec: LayerSpec, context: ModelContext) -> None:
    """Refuse what the description can say and latent attention is not computed with.

    Raises:
        FeatureDisabled: Names it.
    """
    block = context.architecture.block
    for what, is_missing in (
        (f"attention = {spec.attention}", spec.attention != "full"),
        (f"qk_norm = {block.qk_norm}", block.qk_norm != "none"),
        ("qkv_bias", block.qkv_bias),
        (f"attention_soft_cap = {block.attention_soft_cap}", block.attention_soft_cap != 0.0),
        ("sinks", block.has_sinks),
        ("alibi_slopes", bool(block.alibi_slopes)),
        (f"clip_qkv = {block.clip_qkv}", block.clip_qkv != 0.0),
        ("scales_queries_without_rope", block.scales_queries_without_rope),
    ):
        if is_missing:
            raise FeatureDisabled(
                f"{context.architecture.name}: {what}", "latent attention is not computed with it"
            )
