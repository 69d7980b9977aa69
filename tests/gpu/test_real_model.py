"""SmolLM2-135M on the device says what transformers says, where its files are at hand.

They are where `python -m triptych.hub` puts them, $TRIPTYCH_HOME or ~/.cache/triptych; the folder can be copied from
another machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.helpers.in_process import InProcessEngine
from tests.oracle.entries import NUM_NEW_TOKENS, QUANTIZED_NEAR_TIE, Entry, check, read_entries
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.base import StepRunner
from triptych_services.worker.runner.startup.create import create_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
MAX_EXCUSED = 2  # divergences at a near tie, of 40 runs


@pytest.fixture
def directory() -> Path:
    home = Path(os.environ.get("TRIPTYCH_HOME") or "~/.cache/triptych").expanduser()
    found = sorted(home.glob("models/SmolLM2-135M-Instruct.Q4_1-*/complete.json"))
    if not found:
        pytest.skip(f"{home} holds no SmolLM2; copy it there from a machine with a network")
    return found[-1].parent


@pytest.fixture
def entries(directory: Path) -> list[Entry]:
    return read_entries(directory)


def make_runner(directory: Path, device: torch.device, quantization: str, max_seqs: int) -> StepRunner:
    engine = EngineConfig(
        model=ModelConfig(
            model=str(directory), dtype="float32", quantization=quantization, max_model_len=1600
        ),
        cache=CacheConfig(num_blocks=640),
        scheduler=SchedulerConfig(max_num_seqs=max_seqs, max_num_batched_tokens=512),
        worker=WorkerConfig(device=device.type),
    )
    resolved = resolve_config(engine, read_architecture(directory))
    return create_runner(resolved, directory, boot_id="b", on_phase=lambda phase, progress: None)


def test_greedy_tokens_are_those_of_transformers(
    device: torch.device, directory: Path, entries: list[Entry]
) -> None:
    """Prompts in chunks, beside each other's decodes, and again on their prefixes."""
    engine = InProcessEngine(make_runner(directory, device, "none", 32), max_num_batched_tokens=256)
    prompts = [entry.prompt for entry in entries]
    excused: list[str] = []
    check("at first", entries, engine.generate(prompts, GREEDY), excused)
    again = engine.generate(prompts, GREEDY, first_number=len(prompts))
    assert engine.scheduler.counters.prefix_hits
    check("on prefixes", entries, again, excused)
    assert len(excused) <= MAX_EXCUSED, excused


def test_the_files_own_blocks_say_the_same(
    device: torch.device, directory: Path, entries: list[Entry]
) -> None:
    """Weights as they are stored: in 4 bits, the head in 8."""
    engine = InProcessEngine(make_runner(directory, device, "q4", 32), max_num_batched_tokens=512)
    excused: list[str] = []
    outputs = engine.generate([entry.prompt for entry in entries], GREEDY)
    check("in 4 bits", entries, outputs, excused, near_tie=QUANTIZED_NEAR_TIE)
    assert len(excused) <= MAX_EXCUSED, excused
