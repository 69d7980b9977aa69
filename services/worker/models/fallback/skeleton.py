"""Models of transformers without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from triptych.errors import FeatureDisabled, ModelError
from triptych_services.worker.models.fallback import IMPLEMENTATION
from triptych_services.worker.models.fallback.attention import register_attention
from triptych_services.worker.models.fallback.experts import register_experts

log = logging.getLogger(__name__)


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
            what, f"transformers {transformers.__version__} has no decoder of that name{remote}"
        )
    model_class: type[PreTrainedModel] = getattr(transformers, found)
    return model_class


def read_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of transformers for the class, which calls our attention.

    Raises:
        FeatureDisabled: The weights are quantized by another tool, or there is no such class.
        ModelError: transformers does not take these values.
    """
    wanted = find_class(values).config_class
    if values.get("quantization_config"):
        raise FeatureDisabled(
            "quantization_config", "model.backend = transformers reads weights in floating point only"
        )
    assert wanted is not None, "every class of a decoder has one"
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
    config._attn_implementation = IMPLEMENTATION
    config._experts_implementation = IMPLEMENTATION
    config.use_cache = False
    return config


def build(values: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Create the model of a config.json without memory for its parameters, which are on the meta device.

    Args:
        values: The keys of config.json.
        dtype: Precision of parameters.

    Raises:
        FeatureDisabled, ModelError: As `find_class` and `read_config`.
    """
    register_attention()
    register_experts()
    model_class, config = find_class(values), read_config(values)
    try:
        with _parameters_on_meta(), _WithoutMemory(), no_init_weights():
            model = model_class._from_config(config, dtype=dtype)
    except Exception as error:  # whatever a class raises that has only attention of its own
        raise FeatureDisabled(
            "model.backend = transformers",
            f"{model_class.__name__} cannot be built with our attention: {error!r}",
        ) from error
    # `post_init` has been kept from setting weights; ties are no weights
    model.tie_weights()
    _drop_other_parts(model)
    return model.eval()


def text_body(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the name of a model's body, and its part that texts go through.

    Raises:
        FeatureDisabled: The class has no body of its own.
    """
    name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    body = getattr(model, name, None)
    if not isinstance(body, nn.Module):
        raise FeatureDisabled(
            "model.backend = transformers", f"{type(model).__name__} keeps its layers beside its head"
        )
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
