"""Launchers take the tiles that are stored for their device, and only what their kernels offer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triptych_kernels.triton.tuning.tunable as tuning
from tests.kernels.triton.attention.test_paged_attention import build_step
from tools.tune.cases import NAME_TO_TUNABLE
from triptych_kernels.ops import gated_linear, linear
from triptych_kernels.triton.attention import decode as paged_attention_decode
from triptych_kernels.triton.attention import prefill as paged_attention_prefill
from triptych_kernels.triton.attention.plan import DECODE, PREFILL, DecodeTiles, PrefillTiles
from triptych_kernels.triton.linear import few_rows, quantized_linear, w8a8_linear
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.tuning.tunable import Tunable, as_plain, row_bucket
from triptych_kernels.weights.formats import QuantizedFormat

NAME = "Some GPU 80GB/x"
DECODE_KEY = {"head_dim": 64, "kv_dtype": "float16", "block_m": 16}

Store = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every device one of that name, and writes its file."""

    def forget() -> None:
        tuning.file_of_device.cache_clear()
        for tunable in NAME_TO_TUNABLE.values():
            tunable.forget()

    def write(kernels: Any, **head: Any) -> Path:
        path = tmp_path / "Some_GPU_80GB_x.json"
        head = {"device": NAME, "compute_capability": [9, 0], "kernels": kernels, **head}
        path.write_text(json.dumps(head))
        return path

    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "device_name", lambda device: NAME)
    forget()
    yield write
    forget()


def entry(key: dict[str, Any], config: Any) -> dict[str, Any]:
    plain = config if isinstance(config, dict) else as_plain(config)
    return {"key": key, "config": plain, "measured": "never", "us": 1.0, "default_us": 2.0}


class Spy:
    """A kernel that notes how it is launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.options.append(options)
            self.kernel[grid](*args, **options)

        return launch


def spy_on(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Spy:
    spy = Spy(getattr(module, name))
    monkeypatch.setattr(module, name, spy)
    return spy


def test_attention_is_launched_with_what_is_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    store(
        {
            "paged_attention_decode": [entry(DECODE_KEY, DecodeTiles(64, 8, 3, 3))],
            "paged_attention_prefill": [
                entry({"head_dim": 64, "kv_dtype": "float16"}, PrefillTiles(64, 32, 4, 2))
            ],
        }
    )
    decode = spy_on(monkeypatch, paged_attention_decode, "_attend_splits")
    prefill = spy_on(monkeypatch, paged_attention_prefill, "_attend_part")
    build_step([(1, 300), (40, 90), (1, 3)], torch.float16, device).assert_attends_like_the_reference()
    (options,) = decode.options
    assert (options["BLOCK_N"], options["num_warps"], options["num_stages"]) == (64, 8, 3)
    (options,) = prefill.options
    assert (options["BLOCK_M"], options["BLOCK_N"], options["num_warps"], options["num_stages"]) == (
        64,
        32,
        4,
        2,
    )


def test_a_quantized_product_is_launched_with_stored_tiles(
    store: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    key = {"out_features": 96, "in_features": 64, "bits": 4, "is_affine": True, "rows": 32}
    tiles = next(t for t in quantized_linear.BY_INTEGERS.candidates(*key.values()) if t.block_n == 64)
    store({"quantized_linear": [entry(key, tiles)]})
    kernel = spy_on(monkeypatch, quantized_linear, "_multiply_groups")
    weight = GroupQuantizedWeight(96, 64, torch.float16, QuantizedFormat(4, "minimum"), device=device)
    weight.fill_rows(0, torch.randn(96, 64))
    for num_rows in (16, 17):
        linear(torch.randn(num_rows, 64).half().to(device), weight)
    default = quantized_linear.BY_INTEGERS.default(96, 64, 4, True, 16)
    launched = [(o["BLOCK_N"], o["BLOCK_M"], o["num_warps"], o["num_stages"]) for o in kernel.options]
    assert launched == [(t.block_n, t.block_m, t.num_warps, t.num_stages) for t in (default, tiles)]


def test_an_8_bit_product_is_launched_with_stored_tiles(
    store: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    weight = ChannelQuantizedWeight(160, 96, torch.float16, torch.int8, device=device)
    weight.fill_rows(0, torch.randn(160, 96).half())
    x = torch.randn(20, 96).half().to(device)
    by_default = linear(x, weight)
    w8a8_linear.TILES.forget()
    tuning.file_of_device.cache_clear()
    key = {"out_features": 160, "in_features": 96, "element_dtype": "int8", "rows": 32}
    tiles = next(t for t in w8a8_linear.TILES.candidates(160, 96, torch.int8, 32) if t.block_n == 64)
    store({"w8a8_linear": [entry(key, tiles)]})
    kernel = spy_on(monkeypatch, w8a8_linear, "_multiply_bytes")
    assert torch.equal(linear(x, weight), by_default)
    assert kernel.options[0]["BLOCK_N"] == 64


@pytest.mark.parametrize(
    ("multiply", "tunable"), [(linear, few_rows.LINEAR), (gated_linear, few_rows.GATED_LINEAR)]
)
def test_plain_products_are_torchs_except_for_few_rows(
    multiply: Callable[..., Tensor],
    tunable: Tunable[Any],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    key = {"out_features": 96, "in_features": 64, "dtype": "float16"}
    _, *tried = tunable.candidates(96, 64, torch.float16, 4)
    few, *_, more = tried
    entries = [entry(key | {"rows": rows}, c) for rows, c in ((1, few_rows.ByTorch()), (4, few), (16, more))]
    assert entries[0]["config"] == {}
    store({tunable.name: entries})
    kernel = spy_on(monkeypatch, few_rows, "_multiply_few_rows")
    x, weight = (torch.randn(n, 64).half().to(device) for n in (17, 96))
    for num_rows in (1, 2, 4, 5, 16, 17):
        out = multiply(x[:num_rows], weight, impl="triton")
        expected = multiply(x[:num_rows], weight, impl="reference").half()
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=2**-8)
    launched = [(o["BLOCK_N"], o["BLOCK_K"], o["num_warps"], o["num_stages"]) for o in kernel.options]
    assert launched == [(t.block_n, t.block_k, t.num_warps, t.num_stages) for t in (few, few, more, more)]


def test_without_a_file_the_default_is_used_and_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=tuning.__name__)
    cpu = torch.device("cpu")
    for head_dim in (64, 128):
        for _ in range(2):
            assert DECODE.chosen(cpu, head_dim, torch.float16, 16) == DECODE.default(
                head_dim, torch.float16, 16
            )
    assert [record.getMessage() for record in caplog.records] == [
        f"kernels: nothing measured is stored for {NAME}, so all tiles are the reasoned ones"
    ]


def test_another_key_than_the_stored_one_has_its_default(store: Store) -> None:
    store({"paged_attention_decode": [entry(DECODE_KEY, DecodeTiles(64, 8, 3, 3))]})
    cpu = torch.device("cpu")
    assert DECODE.chosen(cpu, 64, torch.float16, 16) == DecodeTiles(64, 8, 3, 3)
    for key in ((128, torch.float16, 16), (64, torch.bfloat16, 16), (64, torch.float16, 32)):
        assert DECODE.chosen(cpu, *key) == DECODE.default(*key)


def test_a_devices_file_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store({"paged_attention_decode": [entry(DECODE_KEY, DecodeTiles(64, 8, 3, 3))]})
    cpu = torch.device("cpu")
    first = DECODE.chosen(cpu, 64, torch.float16, 16)
    path.unlink()
    monkeypatch.setattr(tuning, "device_name", None)
    assert DECODE.chosen(cpu, 64, torch.float16, 16) is first
    PREFILL.chosen(cpu, 64, torch.float16)


GOOD = entry(DECODE_KEY, DecodeTiles(64, 8, 3, 3))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry(DECODE_KEY, DecodeTiles(64, 8, 9, 3))], "none of the"),
        ([entry(DECODE_KEY, {"block_n": 64})], "none of the"),
        (
            [entry({"head_dim": 64}, DecodeTiles(64, 8, 3, 3))],
            "the key must name head_dim, kv_dtype, block_m",
        ),
        ([entry(DECODE_KEY | {"kv_dtype": "float17"}, DecodeTiles(64, 8, 3, 3))], "'float17' is neither"),
        ([GOOD, GOOD], "the key occurs twice"),
        ([GOOD | {"speed": 1}], "entry 0"),
    ],
)
def test_an_entry_that_is_not_offered_is_refused(
    store: Store, entries: list[dict[str, Any]], said: str
) -> None:
    path = store({"paged_attention_decode": entries})
    with pytest.raises(ValueError, match=said) as refusal:
        DECODE.chosen(torch.device("cpu"), 64, torch.float16, 16)
    assert str(path) in str(refusal.value)
    assert "paged_attention_decode" in str(refusal.value)


@pytest.mark.parametrize(
    ("head", "said"),
    [({"device": "Other GPU"}, "'Other GPU'"), ({"compute_capability": 9}, "not a file of tiles")],
)
def test_a_file_of_another_device_or_form_is_refused(store: Store, head: dict[str, Any], said: str) -> None:
    path = store({}, **head)
    with pytest.raises(ValueError, match=said) as refusal:
        DECODE.chosen(torch.device("cpu"), 64, torch.float16, 16)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(0.5, 16), (16, 16), (16.5, 32), (17, 32), (65, 128), (513, 4096), (100_000, 4096)],
)
def test_buckets_of_rows(num_rows: float, bucket: int) -> None:
    assert row_bucket(num_rows) == bucket


@pytest.mark.parametrize("name", NAME_TO_TUNABLE)
def test_forcing_a_config_ends(name: str) -> None:
    tunable, cpu = NAME_TO_TUNABLE[name], torch.device("cpu")
    with tunable.forced(cpu, (1,), "outer"):
        with tunable.forced(cpu, (1,), "inner"):
            assert tunable.chosen(cpu, 1) == "inner"
        assert tunable.chosen(cpu, 1) == "outer"
    assert (cpu, (1,)) not in tunable._choices
