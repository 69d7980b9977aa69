"""Decoders of composite checkpoints, of families that this package reads alone as well; towers for images are left out.

A token of such a decoder has three positions, of which those of text are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.families import experts, llama, shared_experts
from triptych.checkpoint.families.keys import WITH_IMAGES, stacked_experts
from triptych.checkpoint.families.registry import find_family
from triptych.checkpoint.tensor_names import TensorNames
from triptych.errors import FeatureDisabled

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
_PARTS = replace(
    WITH_IMAGES,
    older=(*WITH_IMAGES.older, ("image_newline", "model.image_newline")),
    ignored_prefixes=(*WITH_IMAGES.ignored_prefixes, "model.image_newline"),
)
_IDEFICS = TensorNames(
    renamed=(("model.", "model.text_model."),), ignored_prefixes=("model.vision_model.", "model.connector.")
)
_OF_PROJECTORS = (
    *("ignore_index", "vocab_size"),  # of training; of the decoder, once more
    *("image_seq_length", "image_grid_pinpoints", "vision_aspect_ratio", "video_token_index", "scale_factor"),
    *("projector_hidden_act", "projector_hidden_size", "projector_bias", "projector_use_layernorm"),
    *("multimodal_projector_bias", "downsample_factor", "downsample_ratio", "use_image_newline_parameter"),
    *("vision_feature_layer", "vision_feature_select_strategy", "do_image_splitting", "encoder_patch_size"),
    *("max_image_tokens", "min_image_tokens", "max_num_patches", "max_pixels_tolerance", "max_tiles"),
    *("min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail"),
)
_OF_IDEFICS = (
    "perceiver_config",
    "is_llama_config",
    "neftune_noise_alpha",
    "use_resampler",
    "pixel_shuffle_factor",
)
"""Keys of the tower that the decoders of such files have among their own."""

_DECODERS = {
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Model type of a decoder -> its architecture alone."""
_VICUNA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Sizes that transformers takes where files name none, as LLaVA 1.5 does."""


def llava(config: ConfigFile) -> ModelArchitecture:
    """Read LLaVA, InternVL, LFM2 VL: any decoder beside a tower and a projector."""
    return _read_any(config, _PARTS)


def idefics3(config: ConfigFile) -> ModelArchitecture:
    """Read Idefics 3 and SmolVLM."""
    config.pass_over("pad_token_id")
    return _read_any(config, _IDEFICS)


def _read_any(config: ConfigFile, names: TensorNames) -> ModelArchitecture:
    """Read a decoder by its model type.

    Raises:
        FeatureDisabled: It is of another type than those that are known beside a tower.
    """

    def read(text: ConfigFile) -> ModelArchitecture:
        kind = text.values.get("model_type", "llama")
        if kind not in _DECODERS:
            raise FeatureDisabled(
                f"text_config.model_type = {kind!r}",
                f"{text.path}: decoders beside images are one of {', '.join(_DECODERS)}",
            )
        if kind == "llama":
            text.assume(**_VICUNA)
        text.values = {**text.values, "architectures": [_DECODERS[kind]]}
        text.pass_over(*_OF_IDEFICS)
        text.expect("qk_layer_norms", False, otherwise="queries and keys are normalised")
        return find_family(text).read(text)

    config.pass_over(*_OF_PROJECTORS)
    return _read(config, read, names)


def qwen2_5_vl(config: ConfigFile) -> ModelArchitecture:
    """Read Qwen 2 VL and 2.5 VL; older files have the decoder's keys beside those of the tower."""
    return _read(config, llama.qwen2, _QWEN)


def qwen3_vl(config: ConfigFile) -> ModelArchitecture:
    return _read(config, llama.qwen3, _QWEN)


def qwen3_vl_moe(config: ConfigFile) -> ModelArchitecture:
    def read(text: ConfigFile) -> ModelArchitecture:
        text.assume(norm_topk_prob=True)
        return experts.qwen3_moe(text)

    return _read(config, read, replace(_QWEN, fused=stacked_experts("mlp.experts", is_transposed=True)))


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
