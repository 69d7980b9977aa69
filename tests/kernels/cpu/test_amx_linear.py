"""Products in the tiles of AMX, emulated, so that they run on processors without: against float64, and bit for bit
against the manual's formula; and who gets AMX."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.weights.coded_rows import FORMATS, random_rows
from triptych_kernels.cpu import library
from triptych_kernels.cpu.compile import AMX_EMULATED, build_emulated
from triptych_kernels.cpu.launch import launch
from triptych_kernels.cpu.library import (
    amx_refusal,
    forced_isa,
    isa,
    isas_of_processor,
    isas_to_build,
    request_permission,
    usable_isas,
    use_threads,
)
from triptych_kernels.ops import GATED_ACTIVATIONS, embedding, linear
from triptych_kernels.reference.linear import gated_linear as reference_gated_linear
from triptych_kernels.reference.linear import linear as reference_linear
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS
from triptych_kernels.weights.packed import PackedWeight
from triptych_kernels.weights.quantized import QuantizedWeight

pytestmark = pytest.mark.thorough  # the emulation is compiled for them

NUM_ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100)
# (out_features, in_features): less than a tile, half a panel, one and a bit, whole tiles, several panels and a tail
SHAPES = ((1, 2), (16, 30), (33, 34), (64, 96), (130, 582))
FLAGS = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni"


@pytest.fixture(scope="module")
def library_is_built() -> None:
    if "avx512" not in isas_of_processor() or shutil.which("g++") is None:
        pytest.skip("the emulation needs a processor with AVX-512, native kernels and g++")
    build_emulated()


@pytest.fixture
def emulated(library_is_built: None) -> Iterator[None]:
    with forced_isa(AMX_EMULATED):
        use_threads(3)
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    packed = PackedWeight(*weight.shape, torch.bfloat16, bias=bias is not None)
    packed.fill_rows(0, weight)
    if bias is not None:
        packed.fill_bias(0, bias)
    return packed


def pack_gated(weight: Tensor, bias: Tensor) -> PackedWeight:
    packed = PackedWeight(*weight.shape, torch.bfloat16, gated=True, bias=True)
    for half, rows, values in zip(("gate", "up"), weight.chunk(2), bias.chunk(2), strict=True):
        packed.fill_rows(0, rows, half)
        packed.fill_bias(0, values, half)
    return packed


def multiply(
    packed: PackedWeight, x: Tensor, out_dtype: torch.dtype, activation: str | None = None
) -> Tensor:
    """The product, into memory that was NaN; the rows around it stay so."""
    num_outputs = packed.out_features // (2 if packed.gated else 1)
    memory = torch.full((len(x) + 2, num_outputs), torch.nan, dtype=out_dtype)
    launch("linear", x, **packed.linear_operands(x, memory[1:-1], activation))
    assert memory[[0, -1]].isnan().all()
    return memory[1:-1]


def amid_nan(x: Tensor) -> Tensor:
    """The same rows, with NaN between them and after the last."""
    memory = torch.full((len(x) + 32, x.shape[1] + 38), torch.nan, dtype=x.dtype)
    memory[: len(x), : x.shape[1]] = x
    return memory[: len(x), : x.shape[1]]


def before_the_abyss(values: Tensor) -> Tensor:
    """The same, right before memory that ends the process that reads it."""
    size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    unreadable = ctypes.c_void_p(whole.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(unreadable, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[size - values.nbytes : size].view(values.dtype).view(values.shape).copy_(values)


def tile_products(x: Tensor, weight: Tensor) -> Tensor:
    """Return the result of TDPBF16PS, 32 inputs at a time: sums of even and odd products, added together."""
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], 32):
        partial = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for k in range(first, min(first + 32, x.shape[1])):
            product = x[:, k, None].double() * weight[None, :, k].double()  # exact
            partial[k % 2] = (partial[k % 2].double() + product).float()
        sums = sums + (partial[0] + partial[1])
    return sums


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_reference(emulated: None, shape: tuple[int, int]) -> None:
    weight, bias = random(*shape), random(shape[0])
    for given in (None, bias):
        packed = pack(weight, given)
        for num_rows in NUM_ROWS:
            x = random(num_rows, shape[1])
            for out_dtype, rtol in ((torch.float32, 0.0), (torch.bfloat16, 2**-8)):  # sums, and one rounding
                expected = reference_linear(x, weight, given, torch.float32, None)
                out = multiply(packed, amid_nan(x), out_dtype)
                assert out.dtype == out_dtype
                torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=1e-6 * shape[1] ** 0.5 * 4)


@pytest.mark.parametrize(("num_rows", "shape"), [(3, (40, 70)), (49, (16, 128))], ids=str)
def test_sums_are_those_of_the_manual(emulated: None, num_rows: int, shape: tuple[int, int]) -> None:
    weight, x = random(*shape), random(num_rows, shape[1])
    assert torch.equal(multiply(pack(weight), x, torch.float32), tile_products(x, weight))


def test_denormal_inputs_count_as_zero(emulated: None) -> None:
    x = torch.full((1, 32), 1e-39, dtype=torch.bfloat16)
    weight = torch.full((1, 32), 1e30, dtype=torch.bfloat16)
    assert float(x[0, 0]) > 0.0
    assert multiply(pack(weight), x, torch.float32).item() == 0.0
    use_threads(1)  # so that the product is computed on this thread
    multiply(pack(weight), x, torch.float32)
    assert float(torch.tensor(1e-39) * 1.0) > 0.0


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gated_products_are_those_of_the_reference(emulated: None, activation: str) -> None:
    for inner, size in ((3, 4), (16, 34), (50, 64)):
        weight, bias = random(2 * inner, size), random(2 * inner)
        packed = pack_gated(weight, bias)
        for num_rows in (1, 16, 40):
            x = random(num_rows, size)
            expected = reference_gated_linear(x.double(), weight.double(), bias.double(), activation)
            for out_dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
                out = multiply(packed, x, out_dtype, activation)
                torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-3)


def test_products_without_a_gate_are_activated(emulated: None) -> None:
    packed, x = pack(random(50, 64), random(50)), random(40, 64)
    out = multiply(packed, x, torch.float32, "relu2")
    assert torch.equal(out, multiply(packed, x, torch.float32).relu().square())


def test_a_row_has_the_same_bits_on_any_number_of_threads(emulated: None) -> None:
    packed, x = pack(random(130, 582)), random(199, 582)
    whole = multiply(packed, x, torch.float32)
    for num_threads in (1, 2, 5):
        use_threads(num_threads)
        for start, end in ((0, 1), (3, 19), (7, 40), (30, 100), (198, 199)):
            assert torch.equal(multiply(packed, x[start:end], torch.float32), whole[start:end])


def test_neither_rows_nor_outputs_reach_each_other(emulated: None) -> None:
    weight, x = random(70, 50), random(35, 50)
    clean = multiply(pack(weight), x, torch.float32)
    weight[32:] = torch.nan  # the next panel, which begins where the last inputs of the first one end
    x[20] = torch.inf
    out = multiply(pack(weight), x, torch.float32)
    others = [row for row in range(35) if row != 20]
    assert torch.equal(out[others, :32], clean[others, :32])
    assert out[:, 32:].isnan().all()


@pytest.mark.parametrize("shape", [(64, 64), (64, 34)], ids=str)
def test_nothing_is_read_past_inputs_and_weights(emulated: None, shape: tuple[int, int]) -> None:
    packed = pack(random(*shape))
    expected = multiply(packed, random(33, shape[1]), torch.float32)
    packed.data = before_the_abyss(packed.data)
    for num_rows in (1, 15, 17, 33):
        x = before_the_abyss(random(33, shape[1])[:num_rows])
        assert torch.equal(multiply(packed, x, torch.float32), expected[:num_rows])


def test_wide_quantized_products_are_those_of_bfloat16(emulated: None) -> None:
    packed = QuantizedWeight(75, 96, torch.bfloat16, BLOCK_FORMATS["Q4_1"])
    packed.fill_rows(0, random(75, 96).float())
    packed.wide_rows = 1
    rounded = embedding(torch.arange(75), packed, out_dtype=torch.bfloat16).double()
    x = random(50, 96)
    exact = x.double() @ rounded.T
    out = linear(x, packed, out_dtype=torch.float32)
    assert (out - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert torch.equal(linear(x[30:41], packed, out_dtype=torch.float32), out[30:41])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "GPTQ", "MXFP4"])
def test_tiles_of_bytes_give_what_vectors_give_few_rows(emulated: None, name: str) -> None:
    rows = random_rows(FORMATS[name], 75, 512)
    weight = CodedWeight(75, 512, torch.bfloat16, FORMATS[name], bias=True)
    weight.fill_codes(0, rows)
    weight.fill_bias(0, torch.arange(75.0))
    for dtype in (torch.bfloat16, torch.float32):
        x = random(45, 512).to(dtype)
        by_tiles = linear(x, weight, out_dtype=torch.float32)
        for first, end in ((0, 1), (3, 11), (30, 41)):
            assert torch.equal(linear(x[first:end], weight, out_dtype=torch.float32), by_tiles[first:end])
        exact = x.double() @ rows.dequantize(torch.float64).T + torch.arange(75)
        torch.testing.assert_close(by_tiles.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.thorough  # its target builds every instruction set
@pytest.mark.skipif("avx512" not in usable_isas(), reason="AVX-512 alone is not built")
def test_wide_quantized_products_in_bytes_are_those_of_vectors(emulated: None) -> None:
    weight, x = random(75, 608).float(), random(50, 608)

    def product(first: int, end: int) -> Tensor:
        packed = QuantizedWeight(75, 608, torch.bfloat16, BLOCK_FORMATS["Q4_1"])
        packed.fill_rows(0, weight)
        packed.wide_rows, packed.wide_bits = 1, 8
        return linear(x[first:end], packed, out_dtype=torch.float32)

    out = product(0, 50)
    assert torch.equal(product(30, 41), out[30:41])
    with forced_isa("avx512"):
        assert torch.equal(product(0, 50), out)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes the processor one with those flags, and the system answer so; every library is built."""

    def become(flags: str, refusal: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        for name in ("DIGEST", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"):
            (tmp_path / name).touch()
        monkeypatch.setattr(library, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(library, "DIGEST", tmp_path / "DIGEST")
        monkeypatch.setattr(library, "library_path", lambda isa: tmp_path / isa)
        monkeypatch.setattr(library, "request_permission", lambda: refusal)
        monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")

    def forget() -> None:
        usable_isas.cache_clear()
        amx_refusal.cache_clear()

    forget()
    yield become
    forget()


def test_amx_comes_first_where_processor_and_system_have_it(machine: Callable[[str, str], None]) -> None:
    machine(f"{FLAGS} amx_bf16 amx_tile amx_int8", "")
    assert usable_isas() == ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")
    assert (isa(), amx_refusal()) == ("amx", "")


def test_without_permission_the_next_isa_is_used(
    machine: Callable[[str, str], None],
) -> None:
    machine(f"{FLAGS} amx_bf16 amx_tile amx_int8", "Operation not permitted")
    assert usable_isas() == ("avx512_bf16", "avx512_vnni", "avx512", "avx2")
    assert (isa(), amx_refusal()) == ("avx512_bf16", "Operation not permitted")


@pytest.mark.parametrize("flags", [FLAGS, f"{FLAGS} amx_tile amx_int8"], ids=["no AMX", "no bfloat16"])
def test_a_processor_without_is_not_asked(machine: Callable[[str, str], None], flags: str) -> None:
    machine(flags, "must not be asked")
    assert (isa(), amx_refusal()) == ("avx512_bf16", "")


def test_what_the_compiler_could_not_build_is_not_used(
    machine: Callable[[str, str], None], tmp_path: Path
) -> None:
    machine(f"{FLAGS} amx_bf16 amx_tile amx_int8", "")
    (tmp_path / "amx").unlink()
    assert usable_isas() == ("avx512_bf16", "avx512_vnni", "avx512", "avx2")


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [("", ["amx", "avx2"]), ("Operation not permitted", ["avx512_bf16", "avx2"])],
    ids=["AMX", "no permission"],
)
def test_the_widest_and_the_narrowest_are_built(
    machine: Callable[[str, str], None], refusal: str, expected: list[str]
) -> None:
    machine(f"{FLAGS} amx_bf16 amx_tile amx_int8", refusal)
    assert isas_to_build() == expected


def test_linux_refuses_tiles_that_a_processor_lacks() -> None:
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has AMX")
    assert request_permission() != ""
