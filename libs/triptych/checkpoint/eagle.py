"""EAGLE-3: a checkpoint of its own with a head that guesses the token after the next, from states of a model's layers.

    input     [norm(embedding of the next token), norm(fc([states before some layers of the model]))]
    state     fc(states) + attention(input) + MLP(norm(of that sum))
    output    head(norm(state)), over a vocabulary of its own that the model's contains

There are two layouts: that of the authors, with the keys of a Llama and some more, and that of the library speculators,
with the layer in a section. Source: EAGLE-3, https://arxiv.org/abs/2503.01840; `eagle/model/cnets.py` of
https://github.com/SafeAILab/EAGLE; `speculators/models/eagle3` of https://github.com/vllm-project/speculators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.config_json import CONFIG_FILE
from triptych.checkpoint.families.registry import find_family
from triptych.checkpoint.quantization.read import read_quantization
from triptych.checkpoint.tensor_names import TensorNames, names_of_tensors
from triptych.errors import FeatureDisabled

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_TYPE_TO_ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`model_type` of the layer -> the family that has such layers."""
_DRAFT_VOCAB, _LAYERS = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """A head, as its config.json describes it."""

    architecture: ModelArchitecture
    """Its layer, as that of a model with the head's vocabulary; it has no end tokens of its own."""
    vocab_size: int
    """Tokens of the model for which it was trained."""
    state_size: int
    """Elements of a state of that model."""
    layers: tuple[int, ...]
    """For each state that it reads the layers of the model before it; empty: see `layers_of`."""
    adds_normalised: bool
    """Whether the residual begins with the normalised states, not with the states."""
    has_embedding: bool
    """Whether it has an embedding of its own; if not, it reads the model's."""

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return `layers` for a model with so many: a low state, a middle and a high one, where nothing is said."""
        return self.layers or (2, num_layers // 2, num_layers - 3)


def is_eagle3(directory: Path) -> bool:
    """Return whether a checkpoint is such a head. The first ones that were published call themselves Llamas."""
    values = ConfigFile.read(directory / CONFIG_FILE).values
    names = values.get("architectures")
    has_name = isinstance(names, list) and any(name in _ARCHITECTURES for name in names)
    return has_name or values.get("speculators_model_type") == "eagle3" or _DRAFT_VOCAB in values


def read_eagle3(directory: Path) -> Eagle3Spec:
    """Read config.json of a head, and the names of its tensors.

    Raises:
        FeatureDisabled: It is of a form that is not built; names the key.
        ModelError: A key is missing, odd or not known; names file, key and value.
    """
    config = ConfigFile.read(directory / CONFIG_FILE)
    if read_quantization(directory, config) is not None:
        raise FeatureDisabled(
            f"{config.path}: quantization_config", "the weights of a head are read in 16 or 32 bits only"
        )
    _expect_form(config)
    layer = config.section("transformer_layer_config") or config
    described = _read_layer(layer)
    vocab_size = described.vocab_size
    draft_vocab_size = config.integer(_DRAFT_VOCAB, default=vocab_size)
    if draft_vocab_size > vocab_size:
        config.fail(_DRAFT_VOCAB, draft_vocab_size, f"must be at most vocab_size {vocab_size}")
    if described.num_layers != 1:
        layer.fail(
            "num_hidden_layers", described.num_layers, "must be 1: heads of several layers are not built"
        )
    layers, adds_normalised = _read_layers(config), config.boolean("norm_before_residual", default=False)
    state_size = config.integer("target_hidden_size", default=described.hidden_size)
    config.refuse_unread()
    return Eagle3Spec(
        replace(
            described,
            vocab_size=draft_vocab_size,
            tie_word_embeddings=False,
            names=TensorNames(older=(("midlayer.", "layers.0."),)),
        ),
        vocab_size,
        state_size,
        layers,
        adds_normalised,
        f"{EMBEDDING}.weight" in names_of_tensors(directory),
    )


def _expect_form(config: ConfigFile) -> None:
    """Refuse what is beside the layer and is not built."""
    config.expect("speculators_model_type", "eagle3", otherwise="it guesses in another way")
    for key in ("norm_before_fc", "fc_norm"):
        config.expect(key, False, otherwise="states have norms before they are joined")
    config.expect("norm_output", False, otherwise="further guesses read a normalised state")
    config.expect("bias", False, otherwise="what joins the states has a bias")
    # how it was trained, and for which model
    config.pass_over(
        "embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version"
    )
    config.pass_over("tie_word_embeddings")  # said by the model that it was trained for; the head has its own
    if (details := config.section("eagle_config")) is not None:
        details.expect("use_aux_hidden_state", True, otherwise="it reads the last state of the model")
        details.expect("use_input_layernorm_in_first_layer", True, otherwise="the embedding has no norm")
        details.expect("use_last_layernorm", True, otherwise="no norm is before the head")
        details.expect("use_mtp_layernorm", False, otherwise="states have norms before they are joined")


def _read_layer(layer: ConfigFile) -> ModelArchitecture:
    """Describe the head's layer as that of a family that has such layers, but for its input."""
    kind = layer.text("model_type", default="llama")
    if kind not in _TYPE_TO_ARCHITECTURE:
        layer.fail("model_type", kind, f"is none of {', '.join(_TYPE_TO_ARCHITECTURE)}")
    if kind == "llama":  # keys that were left from the config of a Qwen
        layer.expect("use_sliding_window", False, otherwise="the layer has a window")
        layer.pass_over("max_window_layers")
    layer.values = {**layer.values, "architectures": [_TYPE_TO_ARCHITECTURE[kind]]}
    return find_family(layer).read(layer)


def _read_layers(config: ConfigFile) -> tuple[int, ...]:
    """Return the layers before each state; empty where the file says nothing.

    A number is that of the layers before the state. In `eagle_config`, if the first one is 1, it is that of the last of
    these layers, from 0: so ModelOpt and SpecForge write it, and SGLang reads it.
    """
    details = config.section("eagle_config")
    at = config if details is None or config.has(_LAYERS) else details
    config.pass_over(_LAYERS)
    at.pass_over(_LAYERS)
    if not at.has(_LAYERS):
        return ()
    numbers = at.values[_LAYERS]
    if not isinstance(numbers, list) or not numbers or not all(type(each) is int for each in numbers):
        at.fail(_LAYERS, numbers, "must be a list of numbers of layers")
    is_last = at is details and numbers[0] == 1
    return tuple(number + is_last for number in numbers)
