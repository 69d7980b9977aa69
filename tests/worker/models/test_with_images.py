"""Decoders of composite checkpoints say what transformers' whole models say of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from tests.worker.models.checkpoints import SIZES, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.models.test_older_names import assert_logits_equal, rename_tensors

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


def test_qwen_3_vl(tmp_path: Path) -> None:
    oracle = save_checkpoint(qwen3_vl(), tmp_path)
    assert_logits_equal(oracle, tmp_path)


def test_qwen_3_vl_with_experts(tmp_path: Path) -> None:
    """Published files have each expert's weights [inputs, outputs]; transformers writes them the other way round."""
    oracle = save_checkpoint(qwen3_vl("Qwen3VLMoe", **MOE), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()},
        path,
    )
    assert_logits_equal(oracle, tmp_path)


@pytest.mark.parametrize("is_old", [False, True])
def test_qwen_2_5_vl(is_old: bool, tmp_path: Path) -> None:
    """Older files have the keys of the decoder beside the others, and names as if there were no tower."""
    oracle = save_checkpoint(qwen2_5_vl(), tmp_path)

    def rename(name: str) -> str:
        if is_old:
            return name
        inner = name.replace("model.", "language_model.", 1)
        return name if name.startswith("lm_head.") else f"model.{inner}"

    outermost = rename_tensors(tmp_path, rename)
    assert outermost == ({"model", "visual", "lm_head"} if is_old else {"model", "lm_head"})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if is_old:
        text = config.pop("text_config")
        del text["rope_parameters"], text["model_type"]
        own = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
        path.write_text(json.dumps(text | config | own))
    assert_logits_equal(oracle, tmp_path)


def test_llama_4(tmp_path: Path) -> None:
    text = FAMILIES["Llama 4"].config().to_dict()
    vision = {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "projector_input_dim": 16, "projector_output_dim": 16,
        "vision_output_dim": 16,
    }  # fmt: skip
    oracle = save_checkpoint(create("Llama4", text, vision), tmp_path)
    assert_logits_equal(oracle, tmp_path)
