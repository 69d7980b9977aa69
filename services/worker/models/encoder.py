"""Any encoder that a `ModelArchitecture` describes: embeddings, layers in which a token sees all of its text, a head.

What differs between families is in the description, as with decoders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import EncoderSpec, LayerSpec
from triptych.types.step import F32
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.ops import encode_attention, rotary_embedding
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.embedding import PositionEmbedding, VocabEmbedding
from triptych_services.worker.layers.linear import ColumnLinear, QKVLinear, RowLinear
from triptych_services.worker.layers.mlp import create_mlp
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.rotary import RotaryTables
from triptych_services.worker.layers.step_context import TextLayout
from triptych_services.worker.layers.weights import LoadedTensor, WeightedLayer, WeightTarget, empty_parameter

_FAR = 128
"""Distance from which on there is one bucket."""


class Encoder(nn.Module):
    """The network of a bare encoder, and its classifier if it has one."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        super().__init__()
        architecture = context.architecture
        assert architecture.encoder is not None, "described as an encoder"
        spec, norm = architecture.encoder, architecture.block.norm
        hidden_size, inner = architecture.hidden_size, f"{prefix}model"
        self._architecture = architecture
        self.embedding = EncoderEmbedding(context=context, prefix=inner)
        self.relative_bias: RelativeBias | None = None
        if spec.num_distance_buckets:
            self.relative_bias = RelativeBias(
                spec.num_distance_buckets,
                architecture.num_heads,
                context=context,
                prefix=f"{inner}.relative_bias",
            )
        tables = RotaryTables(context=context)
        layer_class = SumNormLayer if architecture.block.norms == "sum" else PreNormLayer
        self.layers = nn.ModuleList(
            layer_class(
                layer,
                index,
                tables=tables,
                bias=self.relative_bias,
                context=context,
                prefix=f"{inner}.layers.{index}",
            )
            for index, layer in enumerate(architecture.layers)
        )
        self.norm: nn.Module | None = None
        if spec.has_last_norm:
            self.norm = create_norm(hidden_size, norm, context=context, prefix=f"{inner}.norm")
        self.classifier: Classifier | None = None
        if spec.head is not None:
            self.classifier = Classifier(context=context, prefix=prefix)

    def forward(self, token_ids: Tensor, positions: Tensor, layout: TextLayout) -> Tensor:
        """Return the states [num_tokens, hidden_size] after the last layer.

        Args:
            token_ids: [num_tokens] int64, text after text.
            positions: [num_tokens] int64, the position of each token in its text.
        """
        residual = self.embedding(token_ids, positions, layout)
        hidden: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, layout)
        assert hidden is not None, "an encoder has a layer"
        if self.norm is None:
            return hidden
        normalised: Tensor = self.norm(hidden, residual)[0]
        return normalised

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        """As of `CausalLM`."""
        load_weights(self, tensors, self._architecture, ignored=["rotary_emb.inv_freq"])


class EncoderEmbedding(nn.Module):
    """The sum of what each token, its position and its type have, normalised."""

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        architecture, spec = context.architecture, _spec_of(context)
        hidden_size, ends = architecture.hidden_size, architecture.ends
        self.embed_tokens = VocabEmbedding(
            architecture.vocab_size, hidden_size, context=context, prefix=f"{prefix}.embed_tokens"
        )
        self.embed_positions: PositionEmbedding | None = None
        if ends.num_learned_positions:
            self.embed_positions = PositionEmbedding(
                ends.num_learned_positions,
                hidden_size,
                offset=ends.learned_position_offset,
                context=context,
                prefix=f"{prefix}.embed_positions",
            )
        self.embed_token_types: PositionEmbedding | None = None
        if spec.num_token_types:
            self.embed_token_types = PositionEmbedding(
                spec.num_token_types,
                hidden_size,
                offset=0,
                context=context,
                prefix=f"{prefix}.embed_token_types",
            )
        self.norm: nn.Module | None = None
        if ends.has_embedding_norm:
            self.norm = create_norm(
                hidden_size, architecture.block.norm, context=context, prefix=f"{prefix}.embed_norm"
            )

    def forward(self, token_ids: Tensor, positions: Tensor, layout: TextLayout) -> Tensor:
        """Return [num_tokens, hidden_size] float32."""
        embedded: Tensor = self.embed_tokens(token_ids)
        if self.embed_token_types is not None:
            embedded = embedded + self.embed_token_types(layout.token_types)
        if self.embed_positions is not None:
            embedded = embedded + self.embed_positions(positions)
        if self.norm is not None:
            embedded = self.norm(embedded).float()
        return embedded


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


class EncoderAttention(nn.Module):
    """Attention of a token to its whole text, or to a window around it; `prefix` is that of its projections."""

    def __init__(
        self,
        spec: LayerSpec,
        *,
        tables: RotaryTables,
        bias: RelativeBias | None,
        context: ModelContext,
        prefix: str,
    ) -> None:
        super().__init__()
        hidden_size, block = context.architecture.hidden_size, context.architecture.block
        self.qkv_proj = QKVLinear(
            hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=block.qkv_bias,
            context=context,
            prefix=prefix,
        )
        self.rotary = None if spec.rope is None else tables.find(spec.head_dim, spec.rope)
        self.options = AttendOptions(
            scale=block.attention_scale or spec.head_dim**-0.5,
            window=spec.window if spec.attention == "sliding" else 0,
            distance_bias=None if bias is None else bias.table,
            is_causal=False,
        )
        self.o_proj = RowLinear(
            spec.num_heads * spec.head_dim,
            hidden_size,
            bias=block.out_bias,
            context=context,
            prefix=f"{prefix}.o_proj",
        )

    def forward(self, hidden: Tensor, positions: Tensor, layout: TextLayout) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        query, key, value = self.qkv_proj.split_heads(self.qkv_proj(hidden))
        if self.rotary is not None:
            query, key = rotary_embedding(
                query, key, positions, self.rotary.cos_sin_cache, interleaved=self.rotary.is_interleaved
            )
        attended = encode_attention(
            query,
            key,
            value,
            layout.query_starts,
            layout.seq_lens,
            self.options,
            seq_lens_list=layout.seq_lens_list,
        )
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class EncoderLayer(nn.Module):
    """Attention, then the MLP; a subclass says where the norms are. The residual is kept in float32 (docs/adr/0003)."""

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        *,
        tables: RotaryTables,
        bias: RelativeBias | None,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """Create the layer; `tables` and `bias` are those of the whole model."""
        super().__init__()
        self.dtype = context.dtype
        self.attention = EncoderAttention(
            spec, tables=tables, bias=bias, context=context, prefix=f"{prefix}.self_attn"
        )
        self.mlp = create_mlp(spec, context=context, prefix=f"{prefix}.mlp")
        self.attention_norm, self.mlp_norm = self._create_norms(index, context, prefix)

    def _create_norms(
        self, index: int, context: ModelContext, prefix: str
    ) -> tuple[nn.Module | None, nn.Module]:
        raise NotImplementedError


class SumNormLayer(EncoderLayer):
    """A layer that normalises each sum: `x = norm(x + f(x))`."""

    def _create_norms(self, index: int, context: ModelContext, prefix: str) -> tuple[nn.Module, nn.Module]:
        size, norm = context.architecture.hidden_size, context.architecture.block.norm
        return (
            create_norm(size, norm, context=context, prefix=f"{prefix}.post_attention_layernorm"),
            create_norm(size, norm, context=context, prefix=f"{prefix}.post_feedforward_layernorm"),
        )

    def forward(
        self, hidden: Tensor | None, residual: Tensor, positions: Tensor, layout: TextLayout
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer.

        Args:
            hidden: The residual in the model's precision; None in the first layer.
            residual: [num_tokens, hidden_size] float32.

        Returns:
            Both, after this layer.
        """
        assert self.attention_norm is not None, "created with the layer"
        hidden = residual.to(self.dtype) if hidden is None else hidden
        hidden, _ = self.attention_norm(self.attention(hidden, positions, layout), residual)
        hidden, _ = self.mlp_norm(self.mlp(hidden), hidden.float())
        return hidden, hidden.float()


class PreNormLayer(EncoderLayer):
    """A layer that normalises what attention and MLP read: `x = x + f(norm(x))`."""

    def _create_norms(
        self, index: int, context: ModelContext, prefix: str
    ) -> tuple[nn.Module | None, nn.Module]:
        size, norm = context.architecture.hidden_size, context.architecture.block.norm
        first: nn.Module | None = None
        if index or _spec_of(context).has_first_norm:
            first = create_norm(size, norm, context=context, prefix=f"{prefix}.input_layernorm")
        return first, create_norm(size, norm, context=context, prefix=f"{prefix}.post_attention_layernorm")

    def forward(
        self, hidden: Tensor | None, residual: Tensor, positions: Tensor, layout: TextLayout
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer.

        Args:
            hidden: Output of the layer before, not yet added to the residual; None in the first layer.
            residual: [num_tokens, hidden_size] float32.

        Returns:
            The layer's last output, not yet added, and the residual.
        """
        if hidden is None:
            normalised = (
                residual.to(self.dtype) if self.attention_norm is None else self.attention_norm(residual)
            )
        else:
            assert self.attention_norm is not None, "only the first layer may have none"
            normalised, residual = self.attention_norm(hidden, residual)
        attended = self.attention(normalised, positions, layout)
        normalised, residual = self.mlp_norm(attended, residual)
        return self.mlp(normalised), residual


class Classifier(nn.Module):
    """The head of an encoder that classifies texts or scores pairs."""

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        spec = _spec_of(context).head
        assert spec is not None, "described with a head"
        hidden_size = context.architecture.hidden_size
        self.pooling = spec.pooling
        self.is_tanh = spec.activation == "tanh"
        self.dtype, self.device = context.dtype, context.device
        self.dense = ColumnLinear(
            hidden_size,
            hidden_size,
            activation=None if self.is_tanh else spec.activation,
            bias=spec.dense_bias,
            context=context,
            prefix=f"{prefix}head.dense",
        )
        self.norm: nn.Module | None = None
        if spec.has_norm:
            norm = context.architecture.block.norm
            self.norm = create_norm(hidden_size, norm, context=context, prefix=f"{prefix}head.norm")
        self.out = ColumnLinear(
            hidden_size,
            spec.num_labels,
            activation=None,
            bias=True,
            context=context,
            prefix=f"{prefix}classifier",
        )

    def forward(self, pooled: Tensor) -> Tensor:
        """Map pooled states [num_texts, hidden_size] to float32 scores [num_texts, num_labels]."""
        hidden = self.dense(pooled.to(self.dtype))
        if self.is_tanh:
            hidden = torch.tanh(hidden)
        if self.norm is not None:
            hidden = self.norm(hidden)
        scores: Tensor = self.out(hidden)
        return scores.float()

    def of_vector(self, pooled: F32) -> F32:
        """Return the scores [num_labels] of one text, of which the pooled states are [hidden_size]."""
        with torch.inference_mode():
            scores: F32 = self(torch.from_numpy(pooled)[None].to(self.device))[0].numpy(force=True)
        return scores


def _spec_of(context: ModelContext) -> EncoderSpec:
    assert context.architecture.encoder is not None, "described as an encoder"
    return context.architecture.encoder
