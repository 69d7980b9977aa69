"""Every stored form becomes exactly the numbers that the `gguf` package makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as oracle
from gguf.quants import quantize

from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.base import Half
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import GGUF_FORMATS, PANEL_FORMATS
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.loader import gguf_blocks
from triptych_services.worker.loader.gguf_blocks import dequantize, read_codes, stored_size, supported_types

QUANTIZED = [name for name in supported_types() if name not in ("F32", "F16", "BF16")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_blocks", [1, 1025])  # within one chunk, and over many with a rest
@pytest.mark.parametrize("name", QUANTIZED)
def test_any_blocks_are_as_the_package_has_them(
    name: str, num_blocks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "_CHUNK_WEIGHTS", 1 << 10)
    kind = GGMLQuantizationType[name]
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    # Any bytes are a block: scales come out odd, infinite or not a number, as the format allows.
    blocks = np.random.default_rng(num_blocks).integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    expected = torch.from_numpy(oracle(blocks, kind)).to(dtype)
    weights = dequantize(torch.from_numpy(blocks).view(-1), name, dtype)
    assert weights.dtype == dtype
    assert weights.shape == (num_blocks * num_weights,)
    torch.testing.assert_close(weights.view(num_blocks, -1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_packs_is_unpacked(name: str, dtype: torch.dtype) -> None:
    weights = np.random.default_rng(0).standard_normal((7, 96), dtype=np.float32)
    packed = quantize(weights, GGMLQuantizationType[name])
    expected = torch.from_numpy(oracle(packed, GGMLQuantizationType[name])).to(dtype)
    data = torch.from_numpy(packed.view(np.uint8).reshape(-1).copy())
    torch.testing.assert_close(dequantize(data, name, dtype).view(7, 96), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", supported_types())
def test_sizes_are_those_of_the_package(name: str) -> None:
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert stored_size(name, 5 * num_weights) == 5 * num_bytes


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_blocks_fill_the_bytes_that_their_codes_fill(name: str, is_gated: bool) -> None:
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    in_features, format = 256, GGUF_FORMATS[name]
    # Bytes below 64 are neither infinite scales nor the largest exponents.
    shape = 37, 2 * in_features // num_weights * num_bytes
    blocks = torch.from_numpy(np.random.default_rng(0).integers(0, 64, shape, dtype=np.uint8))
    halves: tuple[Half | None, ...] = ("gate", "up") if is_gated else (None, None)
    create = QuantizedWeight if format in PANEL_FORMATS else CodedWeight
    filled, expected = (create(74, in_features, torch.float32, format, gated=is_gated) for _ in range(2))
    # two projections, each of another rank's share of the inputs, the first in two pieces
    for number, half in enumerate(halves):
        share = blocks.tensor_split(2, dim=1)[number]
        start = 0 if is_gated else 37 * number
        filled.fill_blocks(start + 5, name, share[5:], half)
        filled.fill_blocks(start, name, share[:5], half)
        expected.fill_codes(start, read_codes(share, name), half)
    assert torch.equal(filled.data, expected.data)
    assert filled.data.any()
