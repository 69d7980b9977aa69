"""A family of decoders: a Llama that multiplies its logits by a key of config.json."""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families.llama import llama


def scaled_llama(config: ConfigFile) -> ModelArchitecture:
    """Describe a checkpoint by its config.json."""
    architecture = llama(config)
    scale = config.number("logit_scale", default=1.0)
    return replace(architecture, ends=replace(architecture.ends, logits_multiplier=scale))
