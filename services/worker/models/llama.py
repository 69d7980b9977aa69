"""Llama and what shares its network: RMSNorm, rotary grouped-query attention, gated MLP.

A family that differs in a block hands its own to `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from services.worker.attention.base import AttentionBatch, KvCache
from services.worker.context.resolved import ResolvedConfig
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import LogitsHead, VocabEmbedding
from services.worker.layers.linear import GatedLinear, QKVLinear, RowLinear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.quantization import StoredBlocks
from services.worker.layers.rotary import RotaryEmbedding
from services.worker.layers.weights import load_weights
from triptych.errors import FeatureDisabled


class CreateBlock(Protocol):
    """Makes one layer's attention or MLP."""

    def __call__(self, *, config: ResolvedConfig, prefix: str) -> nn.Module:
        """
        Args:
            prefix: of the layer; the block appends its own name in the checkpoint.
        """
        ...


class LlamaForCausalLM(nn.Module):
    """The whole network; a `CausalLM`."""

    def __init__(
        self,
        *,
        config: ResolvedConfig,
        prefix: str = "",
        attention: CreateBlock | None = None,
        mlp: CreateBlock | None = None,
    ) -> None:
        """
        Args:
            attention: called like `LlamaAttention`, which it replaces.
            mlp: likewise `LlamaMLP`.
        """
        super().__init__()
        _check_supported(config)
        architecture = config.architecture
        self.model = LlamaModel(
            config=config,
            prefix=f"{prefix}model",
            attention=attention or LlamaAttention,
            mlp=mlp or LlamaMLP,
        )
        self.lm_head = LogitsHead(
            architecture.vocab_size,
            architecture.hidden_size,
            tied_to=self.model.embed_tokens if architecture.tie_word_embeddings else None,
            config=config,
            prefix=f"{prefix}lm_head",
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KvCache], batch: AttentionBatch
    ) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, kv_caches, batch)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def load_weights(self, tensors: Iterable[tuple[str, Tensor | StoredBlocks]]) -> None:
        # older checkpoints store the rotary frequencies, and some tied ones the head a second time
        ignored = ["rotary_emb.inv_freq"]
        if self.lm_head.is_tied:
            ignored.append("lm_head.weight")
        load_weights(self, tensors, ignored=ignored)


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self, *, config: ResolvedConfig, prefix: str, attention: CreateBlock, mlp: CreateBlock
    ) -> None:
        super().__init__()
        architecture = config.architecture
        self.embed_tokens = VocabEmbedding(
            architecture.vocab_size, architecture.hidden_size, config=config, prefix=f"{prefix}.embed_tokens"
        )
        self.rotary = RotaryEmbedding(architecture.head_dim, architecture.rope, config=config)
        self.layers = nn.ModuleList(
            LlamaLayer(config=config, prefix=f"{prefix}.layers.{index}", attention=attention, mlp=mlp)
            for index in range(architecture.num_layers)
        )
        self.norm = RMSNorm(
            architecture.hidden_size, architecture.rms_norm_eps, config=config, prefix=f"{prefix}.norm"
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KvCache], batch: AttentionBatch
    ) -> Tensor:
        residual: Tensor = self.embed_tokens(token_ids)  # [num_tokens, hidden_size] float32
        hidden: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, self.rotary, positions, kv_cache, batch)
        normalised: Tensor = self.norm(hidden, residual)[0]
        return normalised


class LlamaLayer(nn.Module):
    """Attention, then MLP. Each norm first adds what the block before it computed to the residual, which is
    kept in float32: see docs/adr/0003."""

    def __init__(
        self, *, config: ResolvedConfig, prefix: str, attention: CreateBlock, mlp: CreateBlock
    ) -> None:
        super().__init__()
        hidden_size, eps = config.architecture.hidden_size, config.architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, config=config, prefix=f"{prefix}.input_layernorm")
        self.self_attn = attention(config=config, prefix=prefix)
        self.post_attention_layernorm = RMSNorm(
            hidden_size, eps, config=config, prefix=f"{prefix}.post_attention_layernorm"
        )
        self.mlp = mlp(config=config, prefix=prefix)

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        rotary: RotaryEmbedding,
        positions: Tensor,
        kv_cache: KvCache,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output, not yet added, and the residual; `hidden` is the layer before's, None in the first."""
        if hidden is None:
            hidden = self.input_layernorm(residual)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rotary, positions, kv_cache, batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaAttention(nn.Module):
    """Projections around grouped-query attention."""

    def __init__(
        self,
        *,
        config: ResolvedConfig,
        prefix: str,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
    ) -> None:
        """
        Args:
            qkv_bias: of the first projections; None: as `attention_bias` says.
            out_bias: likewise of the last one.
            qk_norm: normalise each head's query and key before they are rotated.
        """
        super().__init__()
        architecture = config.architecture
        prefix = f"{prefix}.self_attn"
        num_heads, head_dim = architecture.num_heads, architecture.head_dim
        self.qkv_proj = QKVLinear(
            architecture.hidden_size,
            num_heads,
            architecture.num_kv_heads,
            head_dim,
            bias=architecture.attention_bias if qkv_bias is None else qkv_bias,
            config=config,
            prefix=prefix,
        )
        self.qk_norm = qk_norm
        if qk_norm:
            eps = architecture.rms_norm_eps
            self.q_norm = RMSNorm(head_dim, eps, config=config, prefix=f"{prefix}.q_norm")
            self.k_norm = RMSNorm(head_dim, eps, config=config, prefix=f"{prefix}.k_norm")
        self.attention = Attention(head_dim, window=architecture.sliding_window)
        self.o_proj = RowLinear(
            num_heads * head_dim,
            architecture.hidden_size,
            bias=architecture.attention_bias if out_bias is None else out_bias,
            config=config,
            prefix=f"{prefix}.o_proj",
        )

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryEmbedding,
        positions: Tensor,
        kv_cache: KvCache,
        batch: AttentionBatch,
    ) -> Tensor:
        query, key, value = self.qkv_proj.split_heads(self.qkv_proj(hidden))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = self.attention(query, key, value, rotary, positions, kv_cache, batch)
        out: Tensor = self.o_proj(attended)
        return out


class LlamaMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`"""

    def __init__(self, *, config: ResolvedConfig, prefix: str) -> None:
        super().__init__()
        architecture = config.architecture
        prefix = f"{prefix}.mlp"
        hidden_size, intermediate_size = architecture.hidden_size, architecture.intermediate_size
        self.gate_up_proj = GatedLinear(
            hidden_size,
            intermediate_size,
            activation=architecture.hidden_act,
            bias=architecture.mlp_bias,
            config=config,
            prefix=prefix,
        )
        self.down_proj = RowLinear(
            intermediate_size,
            hidden_size,
            bias=architecture.mlp_bias,
            config=config,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


def _check_supported(config: ResolvedConfig) -> None:
    """Refuse what would change the result.

    Raises:
        FeatureDisabled: The activation is not silu.
    """
    architecture = config.architecture
    if architecture.hidden_act != "silu":
        raise FeatureDisabled(
            f"hidden_act {architecture.hidden_act}", f"{architecture.name} is built with silu alone"
        )
