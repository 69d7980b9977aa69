"""Llama and the families that share its network: RMSNorm, rotary grouped-query attention, gated MLP.

A family that differs in one block passes its own block to `LlamaForCausalLM`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.attention import Attention
from triptych_services.worker.layers.embedding import LogitsHead, VocabEmbedding
from triptych_services.worker.layers.linear import GatedLinear, QKVLinear, RowLinear
from triptych_services.worker.layers.norm import RMSNorm
from triptych_services.worker.layers.rotary import RotaryEmbedding
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import LoadedTensor, load_weights
from triptych_services.worker.parallel.shares import stage_layers

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


class CreateAttention(Protocol):
    """A constructor of one layer's attention, with its projections."""

    def __call__(
        self, *, layer_index: int, rotary: RotaryEmbedding, context: ModelContext, prefix: str
    ) -> nn.Module:
        """
        Args:
            layer_index: Index of the layer's KV cache in `StepContext.kv_caches`.
            rotary: Table of the whole model.
            prefix: Prefix of the layer; the block appends its own name in the checkpoint.
        """
        ...


class CreateMLP(Protocol):
    """A constructor of one layer's MLP."""

    def __call__(self, *, context: ModelContext, prefix: str) -> nn.Module:
        """Create the MLP of the layer with this prefix; the block appends its own name in the checkpoint."""
        ...


class LlamaForCausalLM(nn.Module):
    """The network, or one stage of it; a `CausalLM` and a `StagedModel`."""

    def __init__(
        self,
        *,
        context: ModelContext,
        prefix: str = "",
        attention: CreateAttention | None = None,
        mlp: CreateMLP | None = None,
    ) -> None:
        """
        Args:
            attention: Replaces `LlamaAttention`; called with the same arguments.
            mlp: Replaces `LlamaMLP`; called with the same arguments.
        """
        super().__init__()
        architecture = context.architecture
        _check_supported(architecture)
        self.model = LlamaModel(
            context=context,
            prefix=f"{prefix}model",
            attention=attention or LlamaAttention,
            mlp=mlp or LlamaMLP,
        )
        self.lm_head: LogitsHead | None = None
        self._is_tied, self._prefix = architecture.tie_word_embeddings, prefix
        self._num_layers = architecture.num_layers
        if context.rank.is_last_stage:
            # a tied head reads the embedding's tensor; far from the first stage it holds its own copy
            name = "model.embed_tokens" if self._is_tied else "lm_head"
            self.lm_head = LogitsHead(
                architecture.vocab_size,
                architecture.hidden_size,
                tied_to=self.model.embed_tokens if self._is_tied else None,
                context=context,
                prefix=f"{prefix}{name}",
            )

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, context)
        return hidden

    def is_elsewhere(self, name: str) -> bool:
        name = name.removeprefix(self._prefix)
        if (layer := _LAYER_NAME.match(name)) is not None:
            return int(layer[1]) < self._num_layers and int(layer[1]) not in self.model.layer_indices
        is_last = self.lm_head is not None
        match name:
            case "model.embed_tokens.weight":
                return self.model.embed_tokens is None and not (is_last and self._is_tied)
            case "model.norm.weight" | "lm_head.weight":
                return not is_last
        return False

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None, "only the last stage has a head"
        logits: Tensor = self.lm_head(hidden)
        return logits

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        # older checkpoints store the rotary frequencies, and some tied ones the head a second time
        ignored = ["rotary_emb.inv_freq"]
        if self._is_tied:
            ignored.append("lm_head.weight")
        load_weights(self, tensors, ignored=ignored)


class LlamaModel(nn.Module):
    """The embedding, the layers and the last norm, or the part of these that one stage has."""

    def __init__(
        self, *, context: ModelContext, prefix: str, attention: CreateAttention, mlp: CreateMLP
    ) -> None:
        super().__init__()
        architecture = context.architecture
        self.layer_indices = stage_layers(architecture, rank=context.rank)
        """Layers of the whole model that are here."""
        self.embed_tokens: VocabEmbedding | None = None
        if context.rank.is_first_stage:
            self.embed_tokens = VocabEmbedding(
                architecture.vocab_size,
                architecture.hidden_size,
                context=context,
                prefix=f"{prefix}.embed_tokens",
            )
        self.rotary = RotaryEmbedding(architecture.head_dim, architecture.rope, context=context)
        self.layers = nn.ModuleList(
            LlamaLayer(
                self_attn=attention(
                    layer_index=index - self.layer_indices.start,
                    rotary=self.rotary,
                    context=context,
                    prefix=f"{prefix}.layers.{index}",
                ),
                mlp=mlp(context=context, prefix=f"{prefix}.layers.{index}"),
                context=context,
                prefix=f"{prefix}.layers.{index}",
            )
            for index in self.layer_indices
        )
        self.norm: RMSNorm | None = None
        if context.rank.is_last_stage:
            self.norm = RMSNorm(
                architecture.hidden_size, architecture.rms_norm_eps, context=context, prefix=f"{prefix}.norm"
            )

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after the last norm, or this stage's residual."""
        # [num_tokens, hidden_size] float32
        residual: Tensor = token_ids if self.embed_tokens is None else self.embed_tokens(token_ids)
        hidden: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, context)
        assert hidden is not None, "a stage has a layer"
        if self.norm is None:
            # any norm adds the two as the next stage's first one would, to the bit; what it normalises is not used
            last = self.layers[-1]
            assert isinstance(last, LlamaLayer), "as created"
            summed: Tensor = last.post_attention_layernorm(hidden, residual)[1]
            return summed
        normalised: Tensor = self.norm(hidden, residual)[0]
        return normalised


class LlamaLayer(nn.Module):
    """Attention, then the MLP.

    Each norm first adds the output of the block before it to the residual, which is kept in float32: docs/adr/0003.
    """

    def __init__(self, *, self_attn: nn.Module, mlp: nn.Module, context: ModelContext, prefix: str) -> None:
        super().__init__()
        hidden_size, eps = context.architecture.hidden_size, context.architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, context=context, prefix=f"{prefix}.input_layernorm")
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(
            hidden_size, eps, context=context, prefix=f"{prefix}.post_attention_layernorm"
        )
        self.mlp = mlp

    def forward(
        self, hidden: Tensor | None, residual: Tensor, positions: Tensor, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Compute one layer.

        Args:
            hidden: Output of the layer before, not yet added to the residual; None in the first layer.

        Returns:
            The MLP's output, not yet added, and the residual.
        """
        if hidden is None:
            hidden = self.input_layernorm(residual)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, context)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaAttention(nn.Module):
    """Grouped-query attention with its projections."""

    def __init__(
        self,
        *,
        layer_index: int,
        rotary: RotaryEmbedding,
        context: ModelContext,
        prefix: str,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
    ) -> None:
        """
        Args:
            qkv_bias: Whether the query, key and value projections have biases; None: as `attention_bias` says.
            out_bias: Whether the output projection has a bias; None: as `attention_bias` says.
            qk_norm: Whether each head's query and key are normalised before they are rotated.
        """
        super().__init__()
        architecture = context.architecture
        prefix = f"{prefix}.self_attn"
        num_heads, head_dim = architecture.num_heads, architecture.head_dim
        self.qkv_proj = QKVLinear(
            architecture.hidden_size,
            num_heads,
            architecture.num_kv_heads,
            head_dim,
            bias=architecture.attention_bias if qkv_bias is None else qkv_bias,
            context=context,
            prefix=prefix,
        )
        self.qk_norm = qk_norm
        if qk_norm:
            eps = architecture.rms_norm_eps
            self.q_norm = RMSNorm(head_dim, eps, context=context, prefix=f"{prefix}.q_norm")
            self.k_norm = RMSNorm(head_dim, eps, context=context, prefix=f"{prefix}.k_norm")
        options = AttendOptions(scale=head_dim**-0.5, window=architecture.sliding_window)
        self.attention = Attention(options, layer_index=layer_index, rotary=rotary)
        self.o_proj = RowLinear(
            num_heads * head_dim,
            architecture.hidden_size,
            bias=architecture.attention_bias if out_bias is None else out_bias,
            context=context,
            prefix=f"{prefix}.o_proj",
        )

    def forward(self, hidden: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, hidden_size]."""
        query, key, value = self.qkv_proj.split_heads(self.qkv_proj(hidden))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = self.attention(query, key, value, positions, context)
        out: Tensor = self.o_proj(attended)
        return out


class LlamaMLP(nn.Module):
    """The gated MLP `down(silu(gate(x)) * up(x))`."""

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        super().__init__()
        architecture = context.architecture
        prefix = f"{prefix}.mlp"
        hidden_size, intermediate_size = architecture.hidden_size, architecture.intermediate_size
        self.gate_up_proj = GatedLinear(
            hidden_size,
            intermediate_size,
            activation=architecture.hidden_act,
            bias=architecture.mlp_bias,
            context=context,
            prefix=prefix,
        )
        self.down_proj = RowLinear(
            intermediate_size,
            hidden_size,
            bias=architecture.mlp_bias,
            context=context,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


def _check_supported(architecture: ModelArchitecture) -> None:
    """Refuse what would change the result.

    Raises:
        FeatureDisabled: The activation is not silu.
    """
    if architecture.hidden_act != "silu":
        raise FeatureDisabled(
            f"hidden_act {architecture.hidden_act}", f"{architecture.name} is built with silu only"
        )
