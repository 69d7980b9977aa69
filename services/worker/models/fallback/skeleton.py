"""Models of transformers without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from triptych.checkpoint.families.registry import CLASSIFIER_SUFFIX
from triptych.errors import FeatureDisabled, ModelError
from triptych_services.worker.models.fallback import IMPLEMENTATION
from triptych_services.worker.models.fallback.attention import register_attention
from triptych_services.worker.models.fallback.experts import register_experts

log = logging.getLogger(__name__)

_FEATURE = "model.backend = transformers"
_OTHER_HEADS = ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel")
"""Endings of classes of an encoder with a head that is left out."""


def find_class(values: Mapping[str, Any]) -> type[PreTrainedModel]:
    """Return the class that computes a checkpoint; code in the checkpoint is never run.

    Args:
        values: The keys of config.json.

    Raises:
        FeatureDisabled: transformers has no decoder of that name.
    """
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for one in listed for name in ([one] if isinstance(one, str) else one)}
    wanted = [str(name) for name in values.get("architectures") or ()]
    found = next((name for name in wanted if name in names), None)
    if found is None:
        what = f"architecture {wanted[0]}" if wanted else "architectures"
        remote = (
            "; `auto_map` names code in the checkpoint, which is never run" if "auto_map" in values else ""
        )
        raise FeatureDisabled(
            what,
            f"transformers {transformers.__version__} has no decoder or encoder of texts of that name{remote}",
        )
    model_class: type[PreTrainedModel] = getattr(transformers, found)
    return model_class


def find_encoder(values: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Return the class that computes an encoder, with its classifier if the checkpoint has one; None for others.

    A head for masked words, or for another task of pretraining, is left out.
    """
    for name in map(str, values.get("architectures") or ()):
        for kind in encoder_types():
            body = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(kind) or first_name(MODEL_MAPPING_NAMES[kind])
            found: str | None = None
            if name == MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind):
                found = name
            elif name in (body, first_name(MODEL_MAPPING_NAMES[kind])) or (
                name.endswith(_OTHER_HEADS)
                and name
                in (
                    MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind),
                    MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(kind),
                )
            ):
                found = body
            if found is not None:
                model_class: type[PreTrainedModel] = getattr(transformers, found)
                return model_class
    return None


def encoder_types() -> list[str]:
    """Return the types of models that may be encoders of texts; a probe says which of them are."""
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys()
    kinds = {
        *MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        *(classifiers - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()),
    }
    return sorted(kinds & MODEL_MAPPING_NAMES.keys())


def first_name(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else names[0]


def read_config(
    values: Mapping[str, Any], wanted: type[PreTrainedConfig], *, attention: str = IMPLEMENTATION
) -> PreTrainedConfig:
    """Return the config of transformers for a class.

    Args:
        wanted: Type of the class's config.
        attention: Name of the attention that the class calls.

    Raises:
        FeatureDisabled: The weights are quantized by another tool.
        ModelError: transformers does not take these values.
    """
    if values.get("quantization_config"):
        raise FeatureDisabled(
            "quantization_config",
            "model.backend = transformers reads weights in floating point only; set it to native where a native model "
            "serves the architecture, or give a checkpoint that is not quantized",
        )
    config_class, model_type = wanted, str(values.get("model_type"))
    if model_type in CONFIG_MAPPING:  # a composite's, maybe
        config_class = CONFIG_MAPPING[model_type]
    try:
        config: PreTrainedConfig = config_class.from_dict(
            PreTrainedConfig._decode_special_floats(dict(values))
        )
    except Exception as error:  # whatever transformers raises for odd values
        raise ModelError(f"config.json: transformers cannot read it: {error}") from error
    if not isinstance(config, wanted):
        config = config.get_text_config(decoder=True)  # of a checkpoint that has other parts besides
    config._attn_implementation = attention
    config._experts_implementation = IMPLEMENTATION
    config.use_cache = False
    return config


def build(values: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Create the decoder of a config.json without memory for its parameters, which are on the meta device.

    Args:
        values: The keys of config.json.
        dtype: Precision of parameters.

    Raises:
        FeatureDisabled, ModelError: As `find_class` and `read_config`.
    """
    model_class = find_class(values)
    assert model_class.config_class is not None, "every class of a decoder has one"
    model = _build(model_class, read_config(values, model_class.config_class), dtype)
    _drop_other_parts(model)
    return model


def build_encoder(values: Mapping[str, Any], dtype: torch.dtype, *, is_by_text: bool) -> PreTrainedModel:
    """Create the encoder of a config.json likewise, without a pooler that no classifier reads.

    Args:
        is_by_text: Whether each text is a call of its own, with the attention that the class has.
    """
    model_class = find_encoder(values)
    assert model_class is not None, "the caller has found it"
    assert model_class.config_class is not None, "every class of an encoder has one"
    attention = IMPLEMENTATION
    if is_by_text:
        attention = "sdpa" if model_class._supports_sdpa else "eager"
    config = read_config(values, model_class.config_class, attention=attention)
    if (
        config.is_encoder_decoder
        and model_class.__name__ not in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values()
    ):
        raise FeatureDisabled(_FEATURE, f"{model_class.__name__} has a decoder behind its encoder")
    config.chunk_size_feed_forward = 0  # tokens that an MLP computes at once; they change no number
    model = _build(model_class, config, dtype)
    if not model_class.__name__.endswith(CLASSIFIER_SUFFIX):
        take_pooler(model)
    return model


def take_pooler(body: nn.Module) -> nn.Module | None:
    """Take the pooler out of a body, and return it; None: it has none."""
    pooler = getattr(body, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return None
    # some classes call it without looking; those with a bare layer look, and would go on with its result
    absent = None if hasattr(pooler, "in_features") else _NoPooler()
    body.pooler = absent  # type: ignore[assignment]
    return pooler


class _NoPooler(nn.Module):
    """Makes nothing of a text's states."""

    def forward(self, hidden: Any) -> None:
        return None


def _build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    register_attention()
    register_experts()
    try:
        with _parameters_on_meta(), _WithoutMemory(), no_init_weights():
            model = model_class._from_config(config, dtype=dtype)
    except Exception as error:  # whatever a class raises that has only attention of its own
        raise FeatureDisabled(
            _FEATURE, f"{model_class.__name__} cannot be built with our attention: {error!r}"
        ) from error
    # `post_init` has been kept from setting weights; ties are no weights
    model.tie_weights()
    return model.eval()


def text_body(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the name of a model's body, and its part that texts go through.

    Raises:
        FeatureDisabled: The class has no body of its own.
    """
    name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    body = getattr(model, name, None)
    if not isinstance(body, nn.Module):
        raise FeatureDisabled(_FEATURE, f"{type(model).__name__} keeps its layers beside its head")
    return name, getattr(body, "language_model", body)


def _drop_other_parts(model: PreTrainedModel) -> None:
    """Remove towers of images and sound, and ignore their tensors: only texts are computed."""
    name, text = text_body(model)
    whole = getattr(model, name)
    if text is whole:
        return
    for child_name, child in list(whole.named_children()):
        if child is not text:
            delattr(whole, child_name)
            ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), rf"(^|\.){child_name}\."]
            model._keys_to_ignore_on_load_unexpected = ignored


class _WithoutMemory(TorchFunctionMode):
    """Puts on the meta device what only parameters are made of: memory without content, and much of one number."""

    _MUCH = 1 << 20
    _OF_ONE_NUMBER = (torch.zeros, torch.ones, torch.randn, torch.rand)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty or (func in self._OF_ONE_NUMBER and _num_elements(args, kwargs) >= self._MUCH):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _num_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    size = args[0] if args and isinstance(args[0], (tuple, list)) else args or kwargs.get("size", ())
    return math.prod(size)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let parameters that are created take no memory; buffers, such as rotary frequencies, are computed."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        created = module._parameters[name]
        if created is not None and created.device.type != "meta":
            module._parameters[name] = nn.Parameter(created.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
