"""Published checkpoints whose tensors have other names than those of transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

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


def assert_logits_equal(oracle: Any, directory: Path) -> None:
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(model, architecture, (5, 18))
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(lambda row, left: left))
    config = tiny_config(architecture)
    for stage in range(2):  # neither misses a tensor, nor is given one of the other
        rank = replace(config.rank, num_stages=2, stage=stage)
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
