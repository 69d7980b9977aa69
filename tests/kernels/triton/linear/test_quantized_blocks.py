"""Rounding weights to groups, as Triton's products hold them: by GGUF's own package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triptych_kernels.triton.linear.quantized_weight import Groups, quantize_rows_to_groups, read_blocks
from triptych_kernels.weights.formats import BLOCK_FORMATS, QuantizedFormat

gguf = pytest.importorskip("gguf", reason="machines that only run kernels may lack it")
quants = pytest.importorskip("gguf.quants")


def random(*shape: int) -> Tensor:
    """Groups of different sizes, as in real weights."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2 ** torch.randn(*shape[:-1], shape[-1] // 32, generator=generator)
    return torch.randn(shape, generator=generator) * sizes.repeat_interleave(32, -1)


def blocks(values: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """Return the blocks of a GGUF file for these weights, and their values."""
    kind = gguf.GGMLQuantizationType[type]
    data = quants.quantize(values.numpy(), kind)
    return torch.from_numpy(data), torch.from_numpy(quants.dequantize(data, kind))


def meant_by(groups: Groups) -> Tensor:
    integers = groups.integers.float()
    return (integers * groups.scales.float()[..., None] + groups.minimums.float()[..., None]).flatten(1)


@pytest.mark.parametrize("type", BLOCK_FORMATS)
def test_stored_blocks_are_read(type: str) -> None:
    data, meant = blocks(random(7, 96), type)
    assert torch.equal(meant_by(read_blocks(type, data)), meant)


@pytest.mark.parametrize("type", BLOCK_FORMATS)
def test_weights_are_rounded_as_ggml_does(type: str) -> None:
    rows = random(40, 128)
    rows[3, 32:64] = 0.0
    rows[4, 0], rows[4, 5] = -9.0, 9.0  # the first of two of the largest size decides a Q4_0
    if type == "Q4_1":
        rows = rows.abs() + 100  # where it is the nearer form
    groups = quantize_rows_to_groups(rows, BLOCK_FORMATS[type])
    assert torch.equal(meant_by(groups), blocks(rows, type)[1])


def test_each_affine_group_takes_the_nearer_form() -> None:
    rows = random(40, 128) + torch.randn(40, 4).repeat_interleave(32, 1)
    forms = [blocks(rows, type)[1].view(40, 4, 32) for type in ("Q4_0", "Q4_1")]
    errors = [(form - rows.view(40, 4, 32)).square().sum(-1) for form in forms]
    nearer = torch.where((errors[1] < errors[0])[..., None], forms[1], forms[0])
    assert 0 < int((errors[1] < errors[0]).sum()) < 160, "both forms are seen"
    groups = quantize_rows_to_groups(rows, QuantizedFormat(4, "minimum"))
    assert torch.equal(meant_by(groups), nearer.flatten(1))
