"""Stages on the device: launched ahead in threads of one process, and over NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import free_port
from tests.worker.gpu.test_ranks_on_cuda import SIZES
from tests.worker.ranks import Answer, Case, run_ranks, save_checkpoint
from tests.worker.runner.stages_in_threads import StagesInThreads, create_stages
from tests.worker.runner.test_pipeline_stage import assert_same, execute


def test_all_kinds_of_sampling_go_through_stages(device: torch.device, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, SIZES)
    (alone,) = create_stages(model, 1, device=device.type, enforce_eager=True)
    stages = StagesInThreads(create_stages(model, 2, device=device.type, enforce_eager=True))
    assert_same(execute(stages, 3), execute(alone, 0))
    stages.close()


def test_two_stages_say_what_one_process_says(device: torch.device, tmp_path: Path) -> None:
    if (num_devices := torch.cuda.device_count()) < 2:
        pytest.skip(f"NCCL wants a device for each of two stages, and there is {num_devices}")
    model = tmp_path / "model"
    model.mkdir()
    case = Case(save_checkpoint(model, SIZES), 1, device=device.type, enforce_eager=True)
    cases = {"one": case, "two": replace(case, num_ranks=2, num_stages=2, port=free_port())}
    answers: dict[str, list[Answer]] = run_ranks(cases, tmp_path)
    (alone,), (first, last) = answers["one"], answers["two"]
    assert first.token_ids == last.token_ids == alone.token_ids
