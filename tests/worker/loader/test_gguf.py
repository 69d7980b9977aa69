"""Files as llama.cpp's converter writes them are the models of transformers that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.gguf_families import CONVERSIONS
from tests.checkpoint.gguf_recordings import recordings, write_recorded
from tests.hub.conftest import cache  # noqa: F401 - a fixture
from tests.worker.models.checkpoints import load_checkpoint, save_checkpoint
from tests.worker.models.sequences import CUTS, Sequences
from triptych.hub import resolve_model

pytestmark = pytest.mark.usefixtures("cache")


def saved(name: str, directory: Path) -> Any:
    return save_checkpoint(CONVERSIONS[name].tiny.create(), directory)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_logits_of_a_converted_file_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = saved(name, tmp_path / "checkpoint")
    write_recorded(name, tmp_path / "checkpoint", tmp_path / "model.gguf")
    model, architecture = load_checkpoint(resolve_model(str(tmp_path / "model.gguf"), progress=False))
    sequences = Sequences(model, architecture, (1, 5, 18, 30))
    with torch.inference_mode():
        for token_ids, logits in zip(sequences.token_ids, sequences.run(CUTS["whole prompts"]), strict=True):
            expected = oracle(token_ids[None]).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_every_architecture_of_llama_cpp_is_recorded() -> None:
    assert recordings().keys() == CONVERSIONS.keys()
