"""Multi-token prediction: a layer behind the last one of a checkpoint, which guesses the token after the next.

    input     projection([norm(embedding of the next token), norm(state behind the last norm)])
    output    norm(layer(input)), of which the model's own head makes the logits

Source: DeepSeek-V3, section 2.2, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.checkpoint.architecture import LayerSpec, ModelArchitecture


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The modules of such a layer beside those that every layer has."""

    token_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    last_norm: str = "shared_head.norm"
    shared: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")
    """Endings of tensors that are copies of the model's own, and not loaded."""
    state_first: bool = False
    """Whether the state comes before the embedding in what is projected."""
    beside: str = ""
    """Beginning of their names, without the dot: `mtp`; empty: it is that of the layer."""


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """The first such layer of a checkpoint."""

    prefix: str
    """Beginning of its tensors' names, without the dot: `model.layers.61`."""
    layer: LayerSpec
    names: MtpNames
    num_layers: int
    """Such layers in the checkpoint, of which only the first is computed."""

    def module(self, name: str) -> str:
        """Return the whole name of one of `MtpNames`."""
        return f"{self.names.beside or self.prefix}.{name}"

    def holds(self, tensor: str) -> bool:
        """Return whether a tensor is one of this layer, or of what is beside it."""
        if tensor.startswith(f"{self.prefix}."):
            return True
        beside = self.names.beside
        return bool(beside) and tensor.startswith(f"{beside}.") and not tensor.startswith(f"{beside}.layers.")


_LAYER = re.compile(r"\.\d+\.$")
"""The end of a prefix that is one of a layer."""
_DEEPSEEK = MtpNames()
_QWEN = MtpNames(
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    projection="fc",
    last_norm="norm",
    shared=(),
    beside="mtp",
)
_NAMES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": MtpNames(
        token_norm="token_layernorm",
        state_norm="hidden_layernorm",
        projection="input_proj",
        last_norm="final_layernorm",
        shared=(),
        state_first=True,
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
"""Architecture -> names of its layers, of which those of `TensorNames.ignored_prefixes` with a number are the prefixes.
"""


def find_mtp(architecture: ModelArchitecture) -> MtpSpec | None:
    """Return the layer with which a checkpoint guesses by its config.json; None: it has none that is built."""
    names = _NAMES.get(architecture.name)
    prefixes = [prefix for prefix in architecture.names.ignored_prefixes if _LAYER.search(prefix)]
    # a layer that guesses attends, also where the last one of the model has a state
    layer = next((layer for layer in reversed(architecture.layers) if layer.attention != "none"), None)
    if names is None or not prefixes or layer is None or architecture.is_gguf:
        return None
    return MtpSpec(prefixes[0].removesuffix("."), layer, names, len(prefixes))
