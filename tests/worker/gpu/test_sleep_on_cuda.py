"""A worker's sleep on the device: its memory is there for others, and the same tokens come after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_models import SHAPES, generate, make_runner
from triptych.errors import MemoryShort
from triptych.types.facts import SleepLevel
from triptych.types.sampling import SamplingParams
from triptych_services.worker.runner.sleepable_runner import SleepableRunner

MIB = 1 << 20
NUM_BLOCKS = 40_000  # some GiB of keys and values
PROMPTS = [[(7 * i + 3 * j) % 1009 for j in range(5 + 11 * i)] for i in range(6)]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=5)
MAX_KEPT_BYTES = 64 * MIB  # of compiled kernels, and of torch's own libraries


@pytest.fixture
def runner(device: torch.device, tmp_path: Path) -> SleepableRunner:
    model = SHAPES["groups of 3, heads of 64, tied"]().to(device).eval()
    runner = make_runner(model, tmp_path, num_blocks=NUM_BLOCKS)
    del model
    return runner


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


@pytest.mark.parametrize("level", list(SleepLevel))
def test_sleep_frees_the_device_and_keeps_tokens(
    runner: SleepableRunner, level: SleepLevel, device: torch.device
) -> None:
    expected, _ = generate(runner, PROMPTS, SAMPLING)
    kv = runner.facts.kv
    kv_bytes = 2 * 4 * kv.num_blocks * kv.block_size * kv.num_layers * kv.num_kv_heads * kv.head_dim
    for _ in range(2):
        awake = free_bytes(device)
        released = runner.sleep(level)
        assert released >= kv_bytes + runner.facts.weight_bytes
        assert free_bytes(device) - awake >= kv_bytes + runner.facts.weight_bytes
        assert torch.cuda.memory_allocated(device) < MIB, "something of the model is kept"
        assert torch.cuda.memory_reserved(device) < MAX_KEPT_BYTES
        runner.wake()
        assert generate(runner, PROMPTS, SAMPLING)[0] == expected
        assert awake - free_bytes(device) < MAX_KEPT_BYTES, "a sleep leaks"


def test_wake_without_memory_names_figures_and_can_be_repeated(
    runner: SleepableRunner, device: torch.device
) -> None:
    expected, _ = generate(runner, PROMPTS, SAMPLING)
    runner.sleep(SleepLevel.WEIGHTS_ON_HOST)
    hog = torch.empty(free_bytes(device) - 512 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(MemoryShort, match=r"waking takes \d+ MiB on cuda:\d+, but \d+ MiB are free"):
        runner.wake()
    torch.cuda.empty_cache()
    assert free_bytes(device) > 400 * MIB, "the attempt has kept something"
    del hog
    torch.cuda.empty_cache()
    runner.wake()
    assert generate(runner, PROMPTS, SAMPLING)[0] == expected
