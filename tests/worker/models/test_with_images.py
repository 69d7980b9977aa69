"""Decoders of composite checkpoints say what transformers' whole models say of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.composites import (
    MOE,
    ROPE,
    TEXT,
    TOWER,
    create,
    qwen2_5_vl,
    qwen3_vl,
    transpose_experts,
)
from tests.worker.models.families import FAMILIES
from tests.worker.models.test_older_names import assert_logits_equal, rename_tensors
from triptych.checkpoint.config_json import read_architecture
from triptych.errors import FeatureDisabled


def test_qwen_3_vl(tmp_path: Path) -> None:
    oracle = save_checkpoint(qwen3_vl(), tmp_path)
    assert_logits_equal(oracle, tmp_path)


def test_qwen_3_vl_with_experts(tmp_path: Path) -> None:
    oracle = save_checkpoint(qwen3_vl("Qwen3VLMoe", **MOE), tmp_path)
    transpose_experts(tmp_path)
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


CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16, "vocab_size": 16,
}  # fmt: skip
SIGLIP = {key: value for key, value in CLIP.items() if key not in ("projection_dim", "vocab_size")} | {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
}
SIGLIP2 = SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 4}
INTERN = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": [8, 8], "patch_size": [4, 4],
}  # fmt: skip
IDEFICS = {key: value for key, value in SIGLIP.items() if key not in ("model_type", "vision_use_head")}


@pytest.mark.parametrize(
    ("name", "text", "vision"),
    [
        ("Llava", TEXT | {"model_type": "llama"}, CLIP),
        ("LlavaNext", TEXT | {"model_type": "mistral", "sliding_window": None}, CLIP),
        ("LlavaOnevision", TEXT | {"model_type": "qwen2"}, SIGLIP),
        ("InternVL", TEXT | {"model_type": "qwen3", "head_dim": 8}, INTERN),
        ("Lfm2Vl", TEXT | {"model_type": "lfm2", "block_multiple_of": 8}, SIGLIP2),
        ("SmolVLM", TEXT | {"model_type": "llama"}, IDEFICS),
        ("Idefics3", TEXT | {"model_type": "llama"}, IDEFICS),
        ("Qwen2VL", TEXT | {"rope_parameters": ROPE}, TOWER | {"embed_dim": 16, "mlp_ratio": 1}),
    ],
)
def test_decoders_of_any_family(
    name: str, text: dict[str, Any], vision: dict[str, Any], tmp_path: Path
) -> None:
    oracle = save_checkpoint(create(name, text, vision), tmp_path)
    assert_logits_equal(oracle, tmp_path)


def test_a_decoder_of_another_kind_is_named(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "gemma"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FeatureDisabled, match=r"text_config.model_type = 'gemma': .*one of granite, lfm2"):
        read_architecture(tmp_path)


def test_llava_has_the_sizes_that_its_file_leaves_out(tmp_path: Path) -> None:
    """As published: LLaVA 1.5 names only what Vicuna has in another way than transformers' default."""
    text = {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
        "torch_dtype": "float16", "vocab_size": 32064,
    }  # fmt: skip
    whole = {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
        "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "text_config": text,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
        "vision_config": CLIP, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    read = read_architecture(tmp_path)
    assert (read.hidden_size, len(read.layers), read.num_kv_heads, read.head_dim) == (4096, 32, 32, 128)
    assert read.layers[0].intermediate_size == 11008
