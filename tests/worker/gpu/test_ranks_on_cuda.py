"""Ranks over NCCL: their sums inside CUDA graphs, and what they say together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.processes import free_port
from tests.worker.ranks import Answer, Case, run_ranks, save_checkpoint
from tests.worker.tiny import tiny_config
from triptych.config import ParallelConfig
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.parallel.process_group import ProcessGroup
from triptych_services.worker.runner.cuda.graph_recorder import CudaGraphRecorder

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.fixture
def group(device: torch.device) -> Iterator[ProcessGroup]:
    """Return a group of one rank, connected like many."""
    config = tiny_config()
    parallel = ParallelConfig(rendezvous_address=f"127.0.0.1:{free_port()}", timeout_s=60.0)
    config = replace(
        config,
        rank=RankFacts(device=f"cuda:{device.index}"),
        engine=replace(config.engine, parallel=parallel),
    )
    group = ProcessGroup(config)
    yield group
    group.close()


def test_sums_are_launched_without_waiting_and_recorded(group: ProcessGroup, device: torch.device) -> None:
    inputs = torch.zeros(3, 40, device=device)
    outputs = torch.zeros(3, 40, device=device)

    def launch() -> None:
        outputs.copy_(group.all_gather(group.all_reduce(inputs + 1.0), (40,)))

    launch()
    (replay,) = CudaGraphRecorder(device).record(lambda _: launch())
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    inputs.fill_(6.0)
    replay()
    launch()
    assert not busy.query(), "the host has waited"
    assert outputs.unique().tolist() == [7.0]
    del replay  # NCCL waits for graphs to be gone


def test_two_ranks_say_what_one_says(device: torch.device, tmp_path: Path) -> None:
    if (num_devices := torch.cuda.device_count()) < 2:
        pytest.skip(f"NCCL wants a device for each of two ranks, and there is {num_devices}")
    directory = tmp_path / "model"
    directory.mkdir()
    case = Case(save_checkpoint(directory, SIZES), 1, device="cuda")
    cases = {"one": case, "two": replace(case, num_ranks=2, port=free_port())}
    answers: dict[str, list[Answer]] = run_ranks(cases, tmp_path)
    (alone,), (first, second) = answers["one"], answers["two"]
    assert first.kernels == alone.kernels
    assert "graphs" in first.kernels
    assert first.token_ids == alone.token_ids
    for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(
            ours, expected, rtol=1e-3, atol=1e-3
        )  # float32 with products in TF32 pieces
    assert second.token_ids == first.token_ids
    assert all(map(np.array_equal, second.logprobs, first.logprobs))
