"""The packages themselves, where they are installed: what they say of a step is what the definition says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.worker.attention.test_backends import HEADS, KV_HEADS, OPTIONS, STEPS, Step, make_step
from triptych_services.worker.attention.base import AttentionBackend, KvCache
from triptych_services.worker.attention.flash_attn import FlashAttention2, FlashAttention3
from triptych_services.worker.attention.flashinfer import FlashInferAttention
from triptych_services.worker.attention.paged import PagedAttention

HEAD_DIM = 64
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # weights and results rounded to the dtype, once each


def backend_of(name: str, device: torch.device) -> tuple[AttentionBackend, int]:
    """And the size of blocks to try it with."""
    if name in ("triton", "torch"):
        return PagedAttention(name), 16
    if name == "flash-attn":
        pytest.importorskip("flash_attn")
        return FlashAttention2(), 256
    if name == "flash-attn-3":
        pytest.importorskip("flash_attn_interface")
        if torch.cuda.get_device_capability(device)[0] != 9:
            pytest.skip("FlashAttention 3 is for compute capability 9.x")
        return FlashAttention3(), 16
    pytest.importorskip("flashinfer")
    return FlashInferAttention(device, heads_per_kv_head=HEADS // KV_HEADS), 16


def on_device(step: Step, device: torch.device, dtype: torch.dtype) -> Step:
    batch = step.batch
    return Step(
        step.query.to(device, dtype),
        KvCache(step.cache.blocks.to(device, dtype)),
        replace(
            batch,
            slot_mapping=batch.slot_mapping.to(device),
            block_tables=batch.block_tables.to(device),
            query_starts=batch.query_starts.to(device),
            seq_lens=batch.seq_lens.to(device),
        ),
    )


def expected(step: Step) -> torch.Tensor:
    """Return the reference result of the same rounded inputs."""
    cpu = torch.device("cpu")
    return on_device(step, cpu, torch.float32).expected()


def close(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def check(attended: torch.Tensor, exact: torch.Tensor) -> None:
        torch.testing.assert_close(
            attended.float().cpu(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )

    return check


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("name", ["triton", "torch", "flash-attn", "flash-attn-3", "flashinfer"])
def test_a_step_is_what_the_definition_says(device: torch.device, name: str, rows, dtype) -> None:
    """Blocks that no row owns are NaN, in the packages' caches as in ours."""
    backend, block_size = backend_of(name, device)
    step = on_device(make_step(rows, block_size, backend, head_dim=HEAD_DIM), device, dtype)
    attended = backend.attend(step.query, step.cache, step.batch, OPTIONS)
    assert attended.dtype == dtype
    close(dtype)(attended, expected(step))


@pytest.mark.parametrize("name", ["triton", "flash-attn", "flash-attn-3"])
def test_recorded_decodes_follow_lengths_and_tables(device: torch.device, name: str) -> None:
    backend, block_size = backend_of(name, device)
    dtype = torch.bfloat16
    bounds = on_device(
        make_step(((1, 600),) * 3, block_size, backend, head_dim=HEAD_DIM, seed=9), device, dtype
    )
    query, blocks, batch = bounds.query.contiguous(), bounds.cache.blocks, bounds.batch
    backend.attend(query, bounds.cache, batch, OPTIONS)  # compiles, or loads
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        attended = backend.attend(query, bounds.cache, batch, OPTIONS)
    for seed, seq_lens in enumerate(((3, 8, 1), (590, 1, 39), (257, 256, 600))):
        rows = [(1, seq_len) for seq_len in seq_lens]
        step = on_device(make_step(rows, block_size, backend, head_dim=HEAD_DIM, seed=seed), device, dtype)
        query.copy_(step.query)
        blocks.fill_(torch.nan)
        blocks[: len(step.cache.blocks)] = step.cache.blocks
        batch.seq_lens.copy_(step.batch.seq_lens)
        batch.block_tables.zero_()
        batch.block_tables[:, : step.batch.block_tables.shape[1]] = step.batch.block_tables
        graph.replay()
        close(dtype)(attended, expected(step))


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3", "flashinfer"])
def test_steps_launched_ahead_keep_their_own_lengths(device: torch.device, name: str) -> None:
    backend, block_size = backend_of(name, device)
    dtype = torch.bfloat16
    steps = [
        on_device(
            make_step(
                STEPS["decodes" if seed % 3 else "mixed"], block_size, backend, head_dim=HEAD_DIM, seed=seed
            ),
            device,
            dtype,
        )
        for seed in range(12)
    ]
    backend.attend(steps[0].query, steps[0].cache, steps[0].batch, OPTIONS)
    backend.attend(steps[1].query, steps[1].cache, steps[1].batch, OPTIONS)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(50_000_000)  # some 25 ms in which the device reads nothing
    attended = [backend.attend(step.query, step.cache, step.batch, OPTIONS) for step in steps]
    for step, found in zip(steps, attended, strict=True):
        close(dtype)(found, expected(step))
