"""The real model in the formats of other tools: the loss of a text is that of the weights that the codes mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle.entries import read_entries
from tests.oracle.reference import load_reference, weights_file
from tests.worker.quantized_files import SCHEMES, save_quantized
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.hub import resolve_model
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor"),
]

NUM_TOKENS = 256
WITHIN = 0.01
"""Largest relative difference of the losses."""
FORMATS = ("awq", "gptq zeros", "packed zeros", "nf4 nested", "int8", "fp8", "nvfp4")
"""Schemes of which the groups divide the model's 576 inputs."""


def text_of(directory: Path) -> list[int]:
    """Return the first tokens of the longest recorded prompt."""
    return max((entry.prompt for entry in read_entries(directory)), key=len)[:NUM_TOKENS]


def loss_by_runner(directory: Path, tokens: list[int], dtype: str, said: str) -> float:
    """Return the mean of -log p of all tokens but the first.

    Args:
        said: What the worker's facts say of its weights.
    """
    engine = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype, max_model_len=512),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=NUM_TOKENS),
        worker=WorkerConfig(device="cpu", num_threads=2),
    )
    config = resolve_config(engine, read_architecture(directory))
    runner = create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)
    assert runner.facts.model.quantization == said
    row = new_row(0, tokens, range(1, 30), sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = runner.execute(step_plan(1, new=[row], chunks={0: len(tokens)}))
    (scored,) = result.prompt_logprobs.values()
    return -float(np.mean(scored.logprobs[:, 0]))


@torch.inference_mode()
def loss_by(model: Any, tokens: list[int]) -> float:
    scores = model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    return -float(scores.gather(1, torch.tensor(tokens[1:])[:, None]).mean())


def check(directory: Path, tokens: list[int], model: Any, dtype: str, said: str) -> None:
    expected = loss_by(model, tokens)
    found = loss_by_runner(directory, tokens, dtype, said)
    print(f"{said}, {dtype}: loss {found:.5f}, transformers {expected:.5f}")
    assert expected < 5, "the model knows the language"
    assert abs(found - expected) < WITHIN * expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_loss_is_that_of_the_weights_that_are_meant(tmp_path: Path, name: str, dtype: str) -> None:
    embedded = resolve_model("embedded")
    model = save_quantized(tmp_path, SCHEMES[name], load_reference(embedded), keeps_numbers=True)
    check(tmp_path, text_of(embedded), model, dtype, SCHEMES[name].type)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_file_with_its_own_codes(dtype: str) -> None:
    """Under its path, and not its name, its codes are kept."""
    embedded = resolve_model("embedded")
    model = load_reference(embedded)
    check(resolve_model(str(weights_file(embedded))), text_of(embedded), model, dtype, "Q4_1, Q8_0")
