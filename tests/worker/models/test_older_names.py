"""Published checkpoints whose tensors have other names than those of transformers' modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
)

from tests.worker.models.checkpoints import SIZES, load_checkpoint, save_checkpoint
from tests.worker.models.families import FAMILIES, WINDOW
from tests.worker.models.sequences import Sequences, assert_equals_oracle
from tests.worker.tiny import tiny_config
from triptych_services.worker.loader.load import load_model, open_checkpoint


def rename_tensors(directory: Path, rename: Callable[[str], str]) -> set[str]:
    """Rename the tensors of a checkpoint and return the outermost modules."""
    path = directory / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    return {name.split(".")[0] for name in tensors}


def assert_logits_equal(oracle: Any, directory: Path, num_stages: int = 2) -> None:
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(model, architecture, (5, 18))
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(lambda row, left: left))
    config = tiny_config(architecture)
    for stage in range(num_stages):  # none misses a tensor, nor is given one of another
        rank = replace(config.rank, num_stages=num_stages, stage=stage)
        load_model(replace(config, rank=rank), open_checkpoint(directory))


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("GPT-2", "transformer."),
        ("GPT-BigCode", "transformer."),
        ("BLOOM", "transformer."),
        ("OPT", "model."),
    ],
)
def test_names_without_the_outermost_module_are_read(tmp_path: Path, family: str, prefix: str) -> None:
    oracle = save_checkpoint(FAMILIES[family].create(), tmp_path)
    outermost = rename_tensors(tmp_path, lambda name: name.removeprefix(prefix))
    assert prefix.rstrip(".") not in outermost
    assert_logits_equal(oracle, tmp_path)


@pytest.mark.parametrize("is_old", [False, True])
def test_the_decoder_of_a_composite_checkpoint_is_read(tmp_path: Path, is_old: bool) -> None:
    text = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
    text |= {"head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        attn_implementation="eager",
        image_token_id=96,
    )
    oracle = save_checkpoint(Gemma3ForConditionalGeneration(config), tmp_path)

    def rename(name: str) -> str:
        if is_old:  # as transformers writes them, too
            return name
        return "model." + name.replace("language_model.model.", "language_model.")

    outermost = rename_tensors(tmp_path, rename)
    old = {"language_model", "vision_tower", "multi_modal_projector"}
    assert outermost == (old if is_old else {"model"})
    assert_logits_equal(oracle, tmp_path)


def test_the_decoder_of_gemma_4_is_read_as_it_is_published(tmp_path: Path) -> None:
    """With towers for images and sound, sizes of full layers under keys of their own, and projections of keys that
    nothing reads."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2}
    tokens = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")
    config = Gemma4Config(
        text_config=FAMILIES["Gemma 4, shared keys"].config().to_dict(),
        vision_config=tower | vision | {"position_embedding_size": 16},
        audio_config=tower | {"output_proj_dims": 16, "subsampling_conv_channels": [4, 4]},
        **{name: 100 + number for number, name in enumerate(tokens)},  # which no text has
    )
    config._attn_implementation = "eager"
    oracle = save_checkpoint(Gemma4ForConditionalGeneration(config), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["text_config"]["per_layer_config"]
    written["text_config"] |= {"global_head_dim": 20, "num_global_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(written))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert len({name.split(".")[1] for name in tensors}) == 5
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.6.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, path)
    assert_logits_equal(oracle, tmp_path, num_stages=1)
