"""The choice of what computes a checkpoint: this project's own layers, or the modules of transformers."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.config_json import CONFIG_FILE, read_architecture
from triptych.checkpoint.families.registry import architecture_name
from triptych.errors import FeatureDisabled
from triptych_services.worker.models.decoder import DecoderForCausalLM, check_supported
from triptych_services.worker.models.registry import find_model

log = logging.getLogger(__name__)


def choose_architecture(directory: Path, backend: str) -> ModelArchitecture:
    """Describe a checkpoint for what will compute it.

    Args:
        backend: `model.backend`: auto, native or transformers.

    Raises:
        FeatureDisabled: It cannot be computed so; names what is not supported, and what would serve it.
        ModelError: A file is missing or odd. What a native family finds wrong is never left to transformers.
    """
    if backend == "transformers":
        return _describe(directory)
    try:
        architecture = _describe_native(directory)
    except FeatureDisabled as refusal:
        if backend == "native":
            raise
        return _describe(directory, refusal)
    return architecture


def _describe_native(directory: Path) -> ModelArchitecture:
    model = find_model(architecture_name(ConfigFile.read(directory / CONFIG_FILE)))
    architecture = read_architecture(directory)
    if model is DecoderForCausalLM:
        check_supported(architecture)
    return architecture


def _describe(directory: Path, refusal: FeatureDisabled | None = None) -> ModelArchitecture:
    """Describe a checkpoint for transformers.

    Args:
        refusal: Why no native model computes it; None: the operator asked for transformers.
    """
    why = "model.backend asks for it" if refusal is None else str(refusal)
    if find_spec("transformers") is None:
        install = "install it with `pip install 'triptych[transformers]'`"
        if refusal is None:
            raise FeatureDisabled("model.backend = transformers", f"transformers is not installed; {install}")
        raise FeatureDisabled(
            refusal.features, f"{refusal.why}; transformers may compute it, and is not installed; {install}"
        )
    from triptych_services.worker.models.fallback.describe import describe
    from triptych_services.worker.models.fallback.describe_encoder import describe_encoder
    from triptych_services.worker.models.fallback.skeleton import find_encoder

    try:
        is_encoder = find_encoder(ConfigFile.read(directory / CONFIG_FILE).values) is not None
        architecture = describe_encoder(directory) if is_encoder else describe(directory)
    except FeatureDisabled as other:
        if refusal is None:
            raise
        raise FeatureDisabled(
            refusal.features, f"{refusal.why}; nor does transformers serve it: {other}"
        ) from other
    log.info("transformers' modules compute this model: %s", why)
    return architecture
