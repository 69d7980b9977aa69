"""Host memory for results: read once, used again."""

from __future__ import annotations

import numpy as np
import torch

from triptych_services.worker.runner.cuda.streams import ResultBlock, ResultBlocks


def filled(blocks: ResultBlocks, *tensors: torch.Tensor) -> ResultBlock:
    block = blocks.take(tensors)
    for part, tensor in zip(block.parts, tensors, strict=True):
        part.copy_(tensor)
    return block


def test_results_are_read_in_their_shape_and_dtype() -> None:
    tensors = (
        torch.arange(5),
        torch.rand(3, 7),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.arange(6, dtype=torch.int32).view(3, 2).T,
        torch.tensor(2.5),
    )
    blocks = ResultBlocks(pinned=False)
    for value, tensor in zip(blocks.read(filled(blocks, *tensors)), tensors, strict=True):
        np.testing.assert_array_equal(value, tensor.numpy())
        assert value.dtype == tensor.numpy().dtype


def test_a_read_block_is_reused_without_changing_values() -> None:
    blocks = ResultBlocks(pinned=False)
    first, second = (filled(blocks, torch.full((4,), number)) for number in (1, 2))
    assert first.memory.data_ptr() != second.memory.data_ptr(), "both steps are in flight"
    (ones,) = blocks.read(first)
    third = filled(blocks, torch.full((4,), 3))
    assert third.memory.data_ptr() == first.memory.data_ptr()
    assert [ones.tolist(), *(blocks.read(block)[0].tolist() for block in (second, third))] == [
        [1] * 4,
        [2] * 4,
        [3] * 4,
    ]


def test_a_step_of_more_results_gets_a_larger_block() -> None:
    blocks = ResultBlocks(pinned=False)
    blocks.read(filled(blocks, torch.zeros(4)))
    large = filled(blocks, torch.rand(100_000))
    assert large.memory.nbytes >= 400_000
    (value,) = blocks.read(large)
    np.testing.assert_array_equal(value, large.parts[0].numpy())
    assert filled(blocks, torch.zeros(4)).memory.data_ptr() == large.memory.data_ptr()


def test_a_step_without_results_needs_no_room() -> None:
    blocks = ResultBlocks(pinned=False)
    assert blocks.read(filled(blocks)) == ()
