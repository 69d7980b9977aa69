"""From the architecture's name in config.json to a model class, imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from services.worker.context.resolved import ResolvedConfig
from services.worker.models.base import CausalLM
from triptych.errors import FeatureDisabled

ENTRY_POINT_GROUP = "triptych.models"
"""Installed packages offer models here: entry point name = architecture, value = `module:Class`."""

_name_to_model: dict[str, type[CausalLM] | str] = {
    "LlamaForCausalLM": "services.worker.models.llama:LlamaForCausalLM",
    # the same network; a sliding window, its one difference, is refused where config.json is read
    "MistralForCausalLM": "services.worker.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "services.worker.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "services.worker.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "services.worker.models.qwen3:Qwen3ForCausalLM",
}


def register_model(name: str, model: type[CausalLM] | str) -> None:
    """Make `create_model` know an architecture.

    Args:
        name: as in `architectures` of config.json.
        model: the class, or `module:Class`, imported when a config first names it.
    Raises:
        ValueError: the name belongs to another model, or the string has no such form.
    """
    if isinstance(model, str) and model.count(":") != 1:
        raise ValueError(f"{name}: {model!r} must be 'module:Class'")
    if _name_to_model.get(name, model) != model:
        raise ValueError(f"{name}: is registered already, as {_name_to_model[name]!r}")
    _name_to_model[name] = model


def find_model(name: str) -> type[CausalLM]:
    """The class for an architecture: registered ones first, then those of installed packages.

    Raises:
        FeatureDisabled: nobody offers it; names those there are.
    """
    offered = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    model = _name_to_model.get(name) or offered.get(name)
    if model is None:
        known = ", ".join(sorted({*_name_to_model, *offered}))
        raise FeatureDisabled(f"architecture {name}", f"no model is registered for it; there are {known}")
    if isinstance(model, str):
        module_name, class_name = model.split(":")
        model_class: type[CausalLM] = getattr(import_module(module_name), class_name)
        return model_class
    return model


def create_model(*, config: ResolvedConfig) -> CausalLM:
    """The model that `config.architecture` names, its weights undefined until loaded.

    Raises:
        FeatureDisabled: no model for this architecture, or it asks for something that is not built.
    """
    assert config.group.size == config.rank.tensor_parallel_size, (
        "whoever shares out layers connects the ranks"
    )
    return find_model(config.architecture.name)(config=config)
