"""The model classes by the architecture's name in config.json; a class is imported when it is first needed."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from triptych.checkpoint.architecture import TRANSFORMERS_ENCODER, TRANSFORMERS_MODEL
from triptych.checkpoint.families.registry import own_architectures, own_encoders
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.models.base import CausalLM, StagedModel

ENTRY_POINT_GROUP = "triptych.models"
"""Entry points of installed packages that contain models: name = architecture, value = `module:Class`."""

_DECODER = "triptych_services.worker.models.decoder:DecoderForCausalLM"
_ENCODER = "triptych_services.worker.models.encoder:Encoder"

_name_to_model: dict[str, type[CausalLM] | str] = {
    **dict.fromkeys(own_architectures(), _DECODER),
    **dict.fromkeys(own_encoders(), _ENCODER),
    TRANSFORMERS_MODEL: "triptych_services.worker.models.fallback.model:TransformersForCausalLM",
    TRANSFORMERS_ENCODER: "triptych_services.worker.models.fallback.encoder:TransformersEncoder",
}


def register_model(name: str, model: type[CausalLM] | str) -> None:
    """Register a model for an architecture.

    Args:
        name: Name in `architectures` of config.json.
        model: The class, or `module:Class`, which is imported when a config first names it.

    Raises:
        ValueError: The name belongs to another model, or the string has another form.
    """
    if isinstance(model, str) and model.count(":") != 1:
        raise ValueError(f"{name}: {model!r} must be 'module:Class'")
    if _name_to_model.get(name, model) != model:
        raise ValueError(f"{name}: is registered already, as {_name_to_model[name]!r}")
    _name_to_model[name] = model


def find_model(name: str) -> type[CausalLM]:
    """Return the class for an architecture: a registered one, else that of an installed package.

    Raises:
        FeatureDisabled: There is none; names the nearest that have one.
    """
    model = _name_to_model.get(name)
    if model is None:  # looking through all installed packages takes milliseconds
        installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        model = installed.get(name)
    if model is None:
        known = sorted({*_name_to_model, *installed} - {TRANSFORMERS_MODEL, TRANSFORMERS_ENCODER})
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.0))
        raise FeatureDisabled(
            f"architecture {name}",
            f"no native model is registered for it, but for {len(known)}, the nearest of them {near}",
        )
    if isinstance(model, str):
        module_name, class_name = model.split(":")
        model_class: type[CausalLM] = getattr(import_module(module_name), class_name)
        return model_class
    return model


def create_model(*, context: ModelContext) -> CausalLM:
    """Create the model that `context.architecture` names; its weights are undefined until they are loaded.

    Raises:
        FeatureDisabled: There is no model for this architecture, or it needs something that is not supported.
    """
    sharing = context.group.tensor_parallel_size, context.rank.tensor_parallel_size
    assert sharing[0] == sharing[1], "ranks that share layers are connected"
    model = find_model(context.architecture.name)
    if context.rank.num_stages > 1 and not issubclass(model, StagedModel):
        raise FeatureDisabled(
            f"parallel.pipeline_parallel_size = {context.rank.num_stages}",
            f"{model.__name__} has no `is_elsewhere`, so it computes all layers in one stage; set it to 1",
        )
    return model(context=context)
