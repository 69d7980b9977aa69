"""The description of an encoder that transformers computes, from passes over it without its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from triptych.checkpoint.architecture import (
    TRANSFORMERS_ENCODER,
    EncoderHead,
    EncoderSpec,
    EndsSpec,
    LayerSpec,
    ModelArchitecture,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.config_json import CONFIG_FILE, read_eos_token_ids
from triptych.checkpoint.families.registry import CLASSIFIER_SUFFIX
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE
from triptych.checkpoint.labels import read_labels
from triptych.errors import FeatureDisabled
from triptych_services.worker.models.fallback.attention import AttentionCall
from triptych_services.worker.models.fallback.describe import (
    NOTES,
    describe_layer,
    read_dtype,
    read_max_positions,
)
from triptych_services.worker.models.fallback.encoder import EncoderParts
from triptych_services.worker.models.fallback.layers import features, is_projection
from triptych_services.worker.models.fallback.probe import (
    Probe,
    RowWise,
    StandIns,
    input_embedding,
    probe_ids,
    simplify,
)
from triptych_services.worker.models.fallback.skeleton import build_encoder

log = logging.getLogger(__name__)

_FEATURE = "model.backend = transformers"
_LENGTHS = (1, 2, 3, 7, 16, 61)
"""Tokens of the texts that a model must compute one by one; a class that cuts them to pieces fails at some."""
_LONG = 2048
"""Most positions of a model that is called with more tokens than that; a pass over more would take seconds."""
_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
"""Names of what a class with a classifier may give its body."""
_OPTIONS = frozenset({"window", "is_causal"})
"""Options of `AttendOptions` that attention within texts has."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The findings about a model."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int
    first_position: int
    head_pooling: str
    """As of `EncoderHead`; empty: it has no classifier."""
    has_token_types: bool


def describe_encoder(directory: Path) -> ModelArchitecture:
    """Describe the encoder of `directory`, which computes all texts of a step at once, or else one by one.

    Raises:
        FeatureDisabled: Its class is no encoder of texts, or does neither.
        ModelError: A file is missing or unreadable.
    """
    file = ConfigFile.read(directory / CONFIG_FILE)
    file.check_sizes()
    values = file.values
    if (directory / GGUF_INDEX_FILE).is_file():
        raise FeatureDisabled(_FEATURE, "GGUF files are read by native models only")
    model = build_encoder(values, torch.float32, is_by_text=False)
    is_by_text = False
    try:
        found = _examine_at_once(model)
    except FeatureDisabled as obstacle:
        model = build_encoder(values, torch.float32, is_by_text=True)
        found = _examine_by_text(model)
        is_by_text = True
        log.info("transformers' modules compute each text by itself, slower: %s", obstacle)
    num_labels = len(read_labels(file)) if found.head_pooling else 0
    config: Any = model.config
    return ModelArchitecture(
        name=TRANSFORMERS_ENCODER,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        layers=found.layers,
        max_position_embeddings=found.max_positions - found.first_position,
        tie_word_embeddings=False,
        dtype=read_dtype(values),
        bos_token_id=bos if isinstance(bos := getattr(config, "bos_token_id", None), int) else None,
        eos_token_ids=read_eos_token_ids(directory),
        ends=EndsSpec(learned_position_offset=found.first_position),
        encoder=EncoderSpec(
            num_token_types=config.type_vocab_size if found.has_token_types else 0,
            head=EncoderHead(num_labels, pooling=found.head_pooling) if found.head_pooling else None,
            is_by_text=is_by_text,
        ),
        head="score" if found.head_pooling else "none",
        num_labels=num_labels,
        config={key: value for key, value in values.items() if key not in NOTES},
    )


def _examine_at_once(model: PreTrainedModel) -> _Found:
    """Check that only attention mixes tokens, and that `encode_attention` computes it."""
    parts, max_positions = EncoderParts(model), read_max_positions(model.config)
    probe = Probe(model, lambda _: parts, max_positions=max_positions)
    calls = probe.attention_calls()
    for call in calls:
        _check_call(probe.class_name, call)
    probe.check_rows()
    _check_length(probe.class_name, parts, probe.vocab_size, max_positions)
    first_position = probe.first_position()
    return _Found(
        layers=tuple(describe_layer(call, probe.input_sizes) for call in calls),
        vocab_size=probe.vocab_size,
        hidden_size=probe.hidden_size,
        max_positions=max_positions,
        first_position=first_position,
        head_pooling=_find_head(model, parts, probe.vocab_size, RowWise()),
        has_token_types=parts.has_token_types,
    )


@torch.inference_mode()
def _check_length(class_name: str, parts: EncoderParts, vocab_size: int, max_positions: int) -> None:
    """Check that a step may have more tokens than a text."""
    if max_positions > _LONG:
        return
    ids = probe_ids(max_positions + 1, vocab_size)
    try:
        with StandIns():
            parts(ids, torch.zeros_like(ids), RowWise())
    except Exception as error:  # whatever a class raises for a text that is too long
        raise FeatureDisabled(
            _FEATURE, f"{class_name} takes no step of {len(ids)} tokens: {error}"
        ) from error


def _check_call(class_name: str, call: AttentionCall) -> None:
    lacking = sorted(call.options().in_use - _OPTIONS)
    if call.value.shape != call.key.shape:
        lacking.append("values of another width than keys")
    if lacking:
        raise FeatureDisabled(
            _FEATURE, f"{class_name}: {call.name} needs {lacking[0]}, which attention within texts has not"
        )


@torch.inference_mode()
def _examine_by_text(model: PreTrainedModel) -> _Found:
    """Check that texts of any length are computed, and that a token sees those after it."""
    class_name, vocab_size = type(model).__name__, input_embedding(model).num_embeddings
    parts = EncoderParts(model)
    projections = [module for module in model.modules() if is_projection(module)]
    sizes = [features(module)[0] for module in projections]
    simplify(parts)
    for module in projections:  # `Projection` takes their places, which has no weight in torch's form
        assert isinstance(module.weight, Tensor), "a projection's"
        weight = torch.full((), torch.nan).expand(module.weight.shape)
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    tables, sees_all = _Tables(), False
    for length in _LENGTHS:
        ids = probe_ids(length, vocab_size)
        states = _states(class_name, parts, ids, tables)
        if not states.isfinite().all():
            raise FeatureDisabled(
                _FEATURE, f"{class_name} reads weights of its projections beside calling them"
            )
        other = _states(class_name, parts, torch.cat((ids[:-1], (ids[-1:] + 1) % vocab_size)), tables)
        sees_all |= length > 1 and not torch.equal(states[0], other[0])
    if not sees_all:
        raise FeatureDisabled(
            _FEATURE, f"{class_name} is no encoder: the first token of a text does not see the last one"
        )
    num_heads = max(1, int(getattr(model.config, "num_attention_heads", 1)))
    layer = LayerSpec(num_heads, num_heads, states.shape[1] // num_heads, max(sizes, default=1), rope=None)
    return _Found(
        layers=(layer,) * max(1, int(getattr(model.config, "num_hidden_layers", 1))),
        vocab_size=vocab_size,
        hidden_size=states.shape[1],
        max_positions=min(read_max_positions(model.config), *tables.limits(_LENGTHS[-1])),
        first_position=0,
        head_pooling=_find_head(model, parts, vocab_size, None),
        has_token_types=parts.has_token_types,
    )


def _states(class_name: str, parts: EncoderParts, ids: Tensor, tables: _Tables) -> Tensor:
    try:
        with StandIns(), tables:
            states: Tensor = parts(ids, None, None)
    except Exception as error:  # whatever a class raises that needs other inputs, or other lengths
        raise FeatureDisabled(
            _FEATURE, f"{class_name} does not compute a text of {len(ids)} tokens: {error}"
        ) from error
    if states.ndim != 2 or len(states) != len(ids):
        raise FeatureDisabled(
            _FEATURE, f"{class_name} makes states {list(states.shape)} of {len(ids)} tokens, not one of each"
        )
    return states


class _Tables(TorchDispatchMode):
    """Notes which rows of tables are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self._looked_up: list[tuple[int, Tensor]] = []
        """(rows of a table, those that were looked up)"""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.embedding.default:
            self._looked_up.append((len(args[0]), args[1].flatten().clone()))
        return func(*args, **(kwargs or {}))

    def limits(self, num_tokens: int) -> list[int]:
        """Return how many positions each table has that is looked up one row after the other; at least one number.

        Args:
            num_tokens: Length of the longest text that was computed.
        """
        found = [1 << 30]
        for num_rows, rows in self._looked_up:
            if len(rows) == num_tokens and torch.equal(rows - rows[0], torch.arange(num_tokens)):
                found.append(num_rows - int(rows[0]))
        return found


@torch.inference_mode()
def _find_head(
    model: PreTrainedModel, parts: EncoderParts, vocab_size: int, attention: RowWise | None
) -> str:
    """Return the state that a classifier reads, by what it computes of each; empty if there is none.

    Raises:
        FeatureDisabled: It reads something else.
    """
    class_name = type(model).__name__
    if not class_name.endswith(CLASSIFIER_SUFFIX):
        return ""
    _randomize_head(model, parts)
    seen: list[Tensor] = []
    inputs: set[str] = set()

    def look(module: nn.Module, arguments: Any, given: dict[str, Any], out: Any) -> None:
        seen.append(out[0][0])
        inputs.update(name for name, value in given.items() if isinstance(value, Tensor))

    hook = parts.body.register_forward_hook(look, with_kwargs=True)
    given = {"token_type_ids": torch.zeros(1, 5, dtype=torch.int64)} if parts.has_token_types else {}
    parts.calls.attention = attention
    try:
        with StandIns():
            scores = model(input_ids=probe_ids(5, vocab_size)[None], **given).logits[0]
        hook.remove()
        (states,) = seen
        parts.cut()
        kinds = {"first": states[0], "last": states[-1], "mean": states.mean(0)}
        kind_to_scores = {kind: parts.score(state) for kind, state in kinds.items()}
    except Exception as error:  # whatever a class raises of which the body cannot be replaced
        raise FeatureDisabled(
            _FEATURE, f"{class_name}: its classifier cannot be called by itself: {error}"
        ) from error
    if other := sorted(inputs - _INPUTS):
        raise FeatureDisabled(_FEATURE, f"{class_name} gives its body {other[0]}, which depends on its task")
    fitting = [kind for kind, own in kind_to_scores.items() if torch.allclose(own, scores, 1e-5, 1e-5)]
    if len(fitting) != 1:
        raise FeatureDisabled(
            _FEATURE,
            f"{class_name}: its classifier does not read the first state, the last, or the mean of all",
        )
    return fitting[0]


def _randomize_head(model: PreTrainedModel, parts: EncoderParts) -> None:
    """Let the modules behind the body compute with random weights, so that no two states have the same scores."""
    inside = {id(module) for module in parts.body.modules()}
    pooler = getattr(parts.body, "pooler", None)
    behind = [module for module in model.modules() if id(module) not in inside]
    generator = torch.Generator().manual_seed(0)
    for module in (*behind, *(() if pooler is None else pooler.modules())):
        module.__dict__.pop("forward", None)  # what `simplify` has put there
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                values = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
