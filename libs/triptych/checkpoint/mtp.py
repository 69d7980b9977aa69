"""Multi-token prediction: a layer behind the last one of a checkpoint, which guesses the token after the next.

    input     projection([norm(embedding of the next token), norm(state behind the last norm)])
    output    norm(layer(input)), of which the model's own head makes the logits

Source: DeepSeek-V3, section 2.2, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.checkpoint.architecture import LayerSpec, ModelArchitecture


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The modules of such a layer beside those that every layer has, as they follow its prefix."""

    token_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    last_norm: str = "shared_head.norm"
    shared: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")
    """Endings of tensors that are copies of the model's own, and not loaded."""
    state_first: bool = False
    """Whether the state comes before the embedding in what is projected."""


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """The first such layer of a checkpoint."""

    prefix: str
    """Beginning of its tensors' names, without the dot: `model.layers.61`."""
    layer: LayerSpec
    names: MtpNames
    num_layers: int
    """Such layers in the checkpoint, of which only the first is computed."""


_DEEPSEEK = MtpNames()
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
}
"""Architecture -> names of its layers, of which `TensorNames.ignored_prefixes` are the prefixes."""


def find_mtp(architecture: ModelArchitecture) -> MtpSpec | None:
    """Return the layer with which a checkpoint guesses by its config.json; None: it has none that is built."""
    names, prefixes = _NAMES.get(architecture.name), architecture.names.ignored_prefixes
    if names is None or not prefixes or architecture.is_gguf:
        return None
    return MtpSpec(prefixes[0].removesuffix("."), architecture.layers[-1], names, len(prefixes))
