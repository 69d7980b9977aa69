"""Tiny models of transformers with a tower for images beside a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from tests.worker.models.checkpoints import SIZES

TEXT = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
DEEPSTACK = TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MOE = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
IMAGE_TOKENS = {"image_token_id": 95, "video_token_id": 96}


def create(name: str, text: dict[str, Any], vision: dict[str, Any], **arguments: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **arguments)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def qwen3_vl(name: str = "Qwen3VL", **more: Any) -> Any:
    rope = ROPE | {"mrope_interleaved": True}
    return create(name, TEXT | {"head_dim": 8, "rope_parameters": rope} | more, DEEPSTACK, **IMAGE_TOKENS)


def qwen2_5_vl() -> Any:
    return create("Qwen2_5_VL", TEXT | {"rope_parameters": ROPE}, TOWER, **IMAGE_TOKENS)


def transpose_experts(directory: Path) -> None:
    """Give a saved checkpoint of Qwen 3 VL with experts the form of published ones, which have each expert's weights
    [inputs, outputs]; transformers writes them the other way round."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
