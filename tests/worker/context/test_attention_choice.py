"""Resolution of `worker.attention_backend` on a device, and its refusals by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.tiny import tiny_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig
from triptych.errors import FeatureDisabled
from triptych_kernels.triton.attention.plan import MAX_HEAD_DIM
from triptych_services.worker.context.attention_choice import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    FLASHINFER,
    TRITON_MAX_HEAD_DIM,
    AttentionSite,
    choose_attention_backend,
    installed_packages,
)
from triptych_services.worker.context.resolve import choose_batch_invariance, resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits

HOPPER = AttentionSite(
    tiny_architecture(head_dim=128),
    device="cuda:0",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=256,
    native_kernels=True,
    compute_capability=(9, 0),
    packages=frozenset({FLASH_ATTN, FLASHINFER}),
)
CPU = replace(
    HOPPER,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    compute_capability=(0, 0),
    packages=frozenset(),
)


def refusal(requested: str, site: AttentionSite, **changes: Any) -> str:
    with pytest.raises(FeatureDisabled) as refused:
        choose_attention_backend(requested, replace(site, **changes))
    assert refused.value.features == (f"worker.attention_backend = {requested}",)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "native"),
        ({"dtype": "bfloat16"}, "native"),
        ({"dtype": "float16"}, "torch"),
        ({"native_kernels": False}, "torch"),
        ({"device": "simulated"}, "none"),
        ({"device": "cuda:3"}, "triton"),
        ({"device": "cuda:0", "kv_dtype": "int8"}, "triton"),
    ],
)
def test_auto_is_what_the_project_has_for_the_device(changes, chosen) -> None:
    assert choose_attention_backend("auto", replace(CPU, **changes)) == chosen


@pytest.mark.parametrize(
    ("requested", "changes", "chosen"),
    [
        ("triton", {}, "triton"),
        ("torch", {}, "torch"),
        ("torch", {"kv_dtype": "int8"}, "torch"),
        ("flash-attn", {}, "flash-attn"),
        (
            "flash-attn",
            {"dtype": "float16", "kv_dtype": "float16", "compute_capability": (8, 0)},
            "flash-attn",
        ),
        ("flash-attn", {"compute_capability": (8, 0), "block_size": 512}, "flash-attn"),
        ("flash-attn", {"packages": frozenset({FLASH_ATTN, FLASH_ATTN_3}), "block_size": 16}, "flash-attn-3"),
        ("flash-attn", {"packages": frozenset({FLASH_ATTN_3}), "block_size": 1}, "flash-attn-3"),
        (
            "flash-attn",
            {"packages": frozenset({FLASH_ATTN, FLASH_ATTN_3}), "compute_capability": (10, 0)},
            "flash-attn",
        ),
        ("flashinfer", {"block_size": 5}, "flashinfer"),
        (
            "flashinfer",
            {"compute_capability": (7, 5), "dtype": "float16", "kv_dtype": "float16"},
            "flashinfer",
        ),
    ],
)
def test_what_fits_is_served(requested, changes, chosen) -> None:
    assert choose_attention_backend(requested, replace(HOPPER, **changes)) == chosen


@pytest.mark.parametrize("requested", ["triton", "flash-attn", "flashinfer"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_what_needs_cuda_is_refused_elsewhere(requested, device) -> None:
    assert f"CUDA devices only, and this is {device}" in refusal(requested, HOPPER, device=device)


@pytest.mark.parametrize(
    ("requested", "changes", "says"),
    [
        ("flash-attn", {"packages": frozenset()}, "flash-attn is not installed"),
        ("flashinfer", {"packages": frozenset()}, "flashinfer-python is not installed"),
        (
            "flash-attn",
            {"block_size": 16},
            "reads pages of a multiple of 256 tokens, and cache.block_size is 16; set cache.block_size to 256",
        ),
        (
            "flash-attn",
            {"packages": frozenset({FLASH_ATTN_3}), "compute_capability": (8, 6)},
            "compute capability 9.x, and this device has 8.6",
        ),
        (
            "flash-attn",
            {
                "packages": frozenset({FLASH_ATTN, FLASH_ATTN_3}),
                "compute_capability": (8, 6),
                "block_size": 16,
            },
            "cache.block_size is 16",
        ),
        (
            "flash-attn",
            {"compute_capability": (7, 5)},
            "from compute capability 8.0 on, and this device has 7.5",
        ),
        (
            "flashinfer",
            {"compute_capability": (7, 0)},
            "from compute capability 7.5 on, and this device has 7.0",
        ),
        ("flash-attn", {"architecture": tiny_architecture(head_dim=36)}, "the model's head_dim is 36"),
        ("flash-attn", {"architecture": tiny_architecture(head_dim=264)}, "the model's head_dim is 264"),
        ("flashinfer", {"architecture": tiny_architecture(head_dim=96)}, "the model's head_dim is 96"),
        ("flash-attn", {"dtype": "float32", "kv_dtype": "float32"}, "not model.dtype = float32"),
        ("flashinfer", {"dtype": "float32"}, "not model.dtype = float32"),
        ("flash-attn", {"kv_dtype": "int8"}, "which is bfloat16, not cache.dtype = int8"),
        ("flashinfer", {"kv_dtype": "float16"}, "which is bfloat16, not cache.dtype = float16"),
    ],
)
def test_refusals_name_the_conflict_and_the_remedy(requested, changes, says) -> None:
    message = refusal(requested, HOPPER, **changes)
    assert says in message
    assert "to auto" in message


@pytest.mark.parametrize("changes", [{"packages": frozenset()}, {"block_size": 16}], ids=str)
def test_flash_attention_3_is_said_to_be_built_from_source(changes) -> None:
    where = "build it from the directory hopper of github.com/Dao-AILab/flash-attention"
    assert where in refusal("flash-attn", HOPPER, **changes)
    assert where not in refusal("flash-attn", HOPPER, compute_capability=(8, 0), **changes)


@pytest.mark.parametrize("requested", ["auto", "triton"])
def test_longer_heads_than_triton_takes_are_refused(requested: str) -> None:
    assert TRITON_MAX_HEAD_DIM == MAX_HEAD_DIM
    longer = tiny_architecture(head_dim=512)
    says = "up to 256 elements, and the model's head_dim is 512; set it to torch"
    assert says in refusal(requested, HOPPER, architecture=longer)
    assert choose_attention_backend("torch", replace(HOPPER, architecture=longer)) == "torch"
    assert choose_attention_backend("auto", replace(CPU, architecture=longer)) == "native"


def test_plain_torch_does_not_read_caches_of_8_bits_on_cpus() -> None:
    assert "cache.dtype = int8" in refusal("torch", CPU, kv_dtype="int8")
    assert "there is no attention" in refusal("torch", CPU, device="simulated")


def test_the_configs_word_reaches_the_resolved_config() -> None:
    engine = EngineConfig(
        cache=CacheConfig(block_size=256), worker=WorkerConfig(attention_backend="flash-attn")
    )
    config = resolve_for_device(
        engine,
        tiny_architecture(dtype="bfloat16"),
        DeviceTraits(
            device="cuda:0",
            prefers_bfloat16=True,
            native_kernels=False,
            compute_capability=(9, 0),
            attention_packages=frozenset({FLASH_ATTN}),
        ),
    )
    assert (config.attention_backend, config.batch_invariant) == ("flash-attn", False)


QUANTIZED_SITE = AttentionSite(
    tiny_architecture(), "cuda:0", "bfloat16", "bfloat16", 256, native_kernels=False
)


@pytest.mark.parametrize(
    ("attention", "requested", "is_invariant"),
    [
        ("auto", "auto", True),
        ("triton", "true", True),
        ("flash-attn", "auto", False),
        ("flashinfer", "false", False),
        ("torch", "auto", False),
    ],
)
def test_batch_invariance_needs_attention_that_is_invariant(attention, requested, is_invariant) -> None:
    engine = engine_of(attention, requested)
    assert choose_batch_invariance(engine, QUANTIZED_SITE, "int8") == is_invariant


@pytest.mark.parametrize(
    ("quantization", "is_free"), [("q4", False), ("q8", False), ("int8", True), ("fp8", True)]
)
def test_on_cuda_the_promise_is_made_unasked_where_it_is_free(quantization, is_free) -> None:
    assert choose_batch_invariance(engine_of("auto", "auto"), QUANTIZED_SITE, quantization) == is_free
    assert choose_batch_invariance(engine_of("auto", "true"), QUANTIZED_SITE, quantization)


@pytest.mark.parametrize("attention", ["flash-attn", "flashinfer", "torch"])
def test_a_promise_that_the_attention_would_break_is_refused(attention) -> None:
    with pytest.raises(
        FeatureDisabled, match=f"batch_invariant = true: worker.attention_backend = {attention}"
    ):
        choose_batch_invariance(engine_of(attention, "true"), QUANTIZED_SITE, "q8")


def engine_of(attention: str, batch_invariant: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(batch_invariant=batch_invariant), worker=WorkerConfig(attention_backend=attention)
    )


def test_packages_are_found_without_being_imported(monkeypatch, tmp_path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise SystemExit('no device')")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise SystemExit('no device')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_packages() >= {FLASH_ATTN_3, FLASHINFER}
