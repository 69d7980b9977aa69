"""Decoders of composite checkpoints, of families that this package reads alone as well; towers for images are left out.

A token of such a decoder has three positions, of which those of text are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families import experts, llama, shared_experts
from triptych.checkpoint.families.keys import WITH_IMAGES
from triptych.checkpoint.tensor_names import TensorNames

_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("vision_token_id", "image_token_index", "boi_token_index", "eoi_token_index", "tie_word_embeddings"),
)
_QWEN = TensorNames(
    renamed=(("model.", "model.language_model."),),
    older=(
        ("model.language_model.", "model.language_model."),
        ("model.visual.", "model.visual."),
        ("visual.", "model.visual."),
        ("model.", "model.language_model."),
    ),
    ignored_prefixes=("model.visual.",),
)


def qwen2_5_vl(config: ConfigFile) -> ModelArchitecture:
    """Read Qwen 2.5 VL, of which older files have the decoder's keys beside those of the tower."""
    return _read(config, llama.qwen2, _QWEN)


def qwen3_vl(config: ConfigFile) -> ModelArchitecture:
    return _read(config, llama.qwen3, _QWEN)


def qwen3_vl_moe(config: ConfigFile) -> ModelArchitecture:
    def read(text: ConfigFile) -> ModelArchitecture:
        text.assume(norm_topk_prob=True)
        return experts.qwen3_moe(text)

    return _read(config, read, replace(_QWEN, fused=shared_experts.transposed_experts("mlp.experts")))


def llama4(config: ConfigFile) -> ModelArchitecture:
    towers = (*WITH_IMAGES.ignored_prefixes, "vision_model.")
    return _read(config, shared_experts.llama4, replace(WITH_IMAGES, ignored_prefixes=towers))


def _read(
    config: ConfigFile, read: Callable[[ConfigFile], ModelArchitecture], names: TensorNames
) -> ModelArchitecture:
    """Read the decoder of a checkpoint.

    Args:
        read: Reads the config.json of the decoder alone.
        names: Those of the composite checkpoint.
    """
    config.pass_over(*_OF_IMAGES)
    text = config.text_section() if config.has("text_config") else config
    if config.has("tie_word_embeddings"):
        text.values = {**text.values, "tie_word_embeddings": config.boolean("tie_word_embeddings")}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.values.get(key), dict):
            text.values = {**text.values, key: _of_text(rope)}
    found = read(text)
    own = found.names
    return replace(
        found, names=replace(names, renamed=(*own.renamed, *names.renamed), fused=(*own.fused, *names.fused))
    )


def _of_text(rope: dict[str, object]) -> dict[str, object]:
    """Return a rotary embedding without what differs for images."""
    kept = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
