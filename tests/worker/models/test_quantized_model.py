"""Models with quantized weights: what a file holds in blocks is kept, everything else is rounded to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from tests.checkpoint.gguf_files import random_blocks, use_own_cache, write_gguf
from tests.helpers.in_process import InProcessEngine
from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import GREEDY, dense, tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.hub import resolve_model
from triptych_kernels.cpu.library import isa
from triptych_kernels.weights import quantized
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.formats import BLOCK_FORMATS, ChannelFormat
from triptych_kernels.weights.quantized import NEVER, QuantizedWeight, Wide, choose_wide
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.quantization import choose_format
from triptych_services.worker.layers.weights import linear_weights
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(form of the matrices) -> model directory."""
    use_own_cache(monkeypatch, tmp_path / "cache")

    def write(kind: str) -> Path:
        torch.manual_seed(0)
        path = write_gguf(tmp_path / f"{kind}.gguf", num_layers=2, quantization=GGMLQuantizationType[kind])
        return resolve_model(str(path), progress=False)

    return write


def config_for(
    directory: Path, quantization: str, dtype: str = "float32", cache_dtype: str = "auto", **model: str
) -> ResolvedConfig:
    """Return a config; products keep 16 bits of their inputs unless `model` says otherwise."""
    if quantization in ("q4", "q8"):
        model = {"activation_bits": "16"} | model
    engine = EngineConfig(
        model=ModelConfig(model="a.gguf", quantization=quantization, dtype=dtype, **model),
        cache=CacheConfig(block_size=4, num_blocks=200, dtype=cache_dtype),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu"),
    )
    return resolve_config(engine, read_architecture(directory))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("quantization", ["q4", "q8"])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_a_files_own_blocks_are_kept(
    write, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str
) -> None:
    def fill_rows(*_: object, **__: object) -> None:
        raise AssertionError("quantized a second time")

    directory = write(kind)
    config = config_for(directory, quantization)
    monkeypatch.setattr(QuantizedWeight, "fill_rows", fill_rows)
    kept = load_model(config, open_checkpoint(directory))
    assert {weight.format for weight in linear_weights(kept)} == {BLOCK_FORMATS[kind]}
    monkeypatch.undo()
    plain = load_model(config_for(directory, "dequantized"), open_checkpoint(directory))
    for (name, layer), other in zip(plain.named_modules(), kept.modules(), strict=True):
        if hasattr(layer, "weight"):
            assert torch.equal(dense(other.weight), dense(layer.weight)), name


MIXES = {
    "Q4_K": "Q6_K", "Q5_0": "Q8_0", "Q5_K": "Q6_K", "Q3_K": "Q5_K", "Q2_K": "Q3_K", "Q5_1": "Q5_1", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "Q5_K", "MXFP4": "Q8_0",
}  # fmt: skip
"""Type of most matrices of a file -> that of values and of the MLP's second product, as llama.cpp mixes them."""


def write_mixed(path: Path, kind: str) -> Path:
    """Write a file with matrices of two types, and return the model directory."""

    def pack(name: str, weights: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        chosen = GGMLQuantizationType[MIXES[kind] if "attn_v" in name or "ffn_down" in name else kind]
        return random_blocks(chosen, *weights.shape), chosen

    write_gguf(path, hidden_size=256, intermediate_size=512, num_heads=4, pack=pack)
    return resolve_model(str(path), progress=False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("quantization", ["none", "q4"])
@pytest.mark.parametrize("kind", MIXES)
def test_the_codes_of_mixed_files_are_kept(
    kind: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    directory = write_mixed(tmp_path / "a.gguf", kind)
    plain = load_model(config_for(directory, "dequantized"), open_checkpoint(directory))
    kept = load_model(config_for(directory, quantization), open_checkpoint(directory))
    weights = list(linear_weights(kept))
    assert weights
    assert all(
        isinstance(weight, CodedWeight) or weight.format == BLOCK_FORMATS["Q8_0"] for weight in weights
    )
    for (name, layer), other in zip(plain.named_modules(), kept.modules(), strict=True):
        if hasattr(layer, "weight"):
            assert torch.equal(dense(other.weight), dense(layer.weight)), name
    exact = logprobs(directory, "dequantized", "float32")
    assert np.abs(logprobs(directory, quantization, "float32") - exact).mean() < 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Q4_K", {}, "Q4_K, Q6_K"),
        ("Q4_K", {"quantization": "dequantized"}, "none"),
        ("Q4_K", {"quantization": "q8"}, "q8"),
        ("Q5_1", {}, "Q5_1"),
        ("IQ4_XS", {"dtype": "float16"}, "none"),
    ],
)
def test_the_facts_say_the_types_that_are_kept(
    kind: str, options: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    directory = write_mixed(tmp_path / "a.gguf", kind)
    config = config_for(directory, **{"quantization": "none"} | options)
    runner = create_runner(config, directory, boot_id="test", on_phase=lambda phase, progress: None)
    assert runner.facts.model.quantization == said


@pytest.mark.parametrize("kind", ["F16", "TQ2_0"])
def test_files_without_codes_are_as_they_were(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")

    def pack(name: str, weights: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        chosen = GGMLQuantizationType[kind]
        return quantize(weights, chosen), chosen

    path = write_gguf(tmp_path / "a.gguf", hidden_size=256, intermediate_size=512, num_heads=4, pack=pack)
    directory = resolve_model(str(path), progress=False)
    kept: list[str] = []
    with caplog.at_level("INFO"):
        found = load_model(config_for(directory, "none"), open_checkpoint(directory), kept_types=kept)
    plain = load_model(config_for(directory, "dequantized"), open_checkpoint(directory))
    assert not kept
    assert "keep the codes" not in caplog.text
    for own, other in zip(linear_weights(found), linear_weights(plain), strict=True):
        assert type(own) is type(other)
        assert torch.equal(dense(own), dense(other))


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("quantization", "bits", "largest_error"), [("q4", 4, 0.09), ("q8", 8, 0.006)])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_other_tensors_are_quantized_and_the_head_to_8_bits(
    write, kind: str, quantization: str, bits: int, largest_error: float
) -> None:
    directory = write(kind)
    plain = load_model(config_for(directory, "dequantized"), open_checkpoint(directory))
    rounded = load_model(config_for(directory, quantization), open_checkpoint(directory))
    for (name, layer), other in zip(plain.named_modules(), rounded.modules(), strict=True):
        if not isinstance(getattr(other, "weight", None), QuantizedWeight):
            continue
        is_head = name.endswith(("embed_tokens", "lm_head"))
        assert other.weight.format.bits == (8 if is_head else bits)
        exact = dense(layer.weight)
        error = (dense(other.weight) - exact).norm() / exact.norm()
        assert 0 < error < (0.006 if is_head else largest_error), name


def test_packed_weights_take_the_smallest_lossless_format() -> None:
    tensor_types = {"a": "Q4_0", "b": "Q4_1", "c": "Q8_0", "d": "Q6_K"}

    def chosen(quantization: str, *sources: str, is_head: bool = False) -> str:
        config = replace(tiny_config(), quantization=quantization)
        context = ModelContext(config, tensor_types=tensor_types)
        format = choose_format(sources, in_features=32, is_head=is_head, context=context)
        if isinstance(format, ChannelFormat):
            return str(format.dtype)
        return "none" if format is None else f"{format.bits}{' affine' * format.is_affine}"

    assert chosen("none", "a") == "none"
    assert chosen("q4", "a", "a") == chosen("q8", "a") == chosen("q4", "a", is_head=True) == "4"
    assert chosen("q4", "a", "b") == chosen("q4", "a", "d") == "4 affine"
    assert chosen("q4", "a", "c") == chosen("q4", "d", is_head=True) == chosen("q8", "d") == "8"
    assert chosen("q4", "c", "d") == chosen("q8", "b", "d") == "8 affine"
    assert chosen("int8", "a", "d") == "8"  # as on CPUs; with a scale per output on CUDA devices
    assert chosen("fp8", "c") == "torch.float8_e4m3fn"
    assert chosen("int8", "b", is_head=True) == chosen("fp8", "d", is_head=True) == "8"


SEQUENCES = [[5, 9, 2, 7, 30, 11, 4, 8, 1, 2, 3], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]
LONG_SEQUENCES = [[(7 * i + 5 * j * j) % 97 for j in range(50)] for i in range(4)]


def logprobs(
    directory: Path,
    quantization: str,
    dtype: str,
    cache_dtype: str = "auto",
    sequences: Sequence[Sequence[int]] = SEQUENCES,
) -> np.ndarray:
    config = config_for(directory, quantization, dtype, cache_dtype)
    runner = create_runner(config, directory, boot_id="test", on_phase=lambda phase, progress: None)
    return np.concatenate(teacher_forced_logprobs(runner, sequences, [4, 2, 1, 20][: len(sequences)]))


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_kept_blocks_say_what_the_dequantized_weights_say(write, kind: str) -> None:
    directory = write(kind)
    exact = logprobs(directory, "none", "float32")
    error = np.abs(logprobs(directory, "q4", "float32") - exact).mean()
    bfloat16_error = np.abs(logprobs(directory, "none", "bfloat16") - exact).mean()
    assert error < bfloat16_error / 10
    assert np.abs(logprobs(directory, "q4", "bfloat16") - exact).mean() < 1.2 * bfloat16_error


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("quantization", ["q4", "q8", "int8"])
def test_inputs_of_8_bits_are_for_every_weight_but_the_heads(write, quantization: str) -> None:
    directory = write("F32")
    config = config_for(directory, quantization, activation_bits="8")
    model = load_model(config, open_checkpoint(directory))
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "weight", None), QuantizedWeight):
            is_head = name.endswith(("embed_tokens", "lm_head"))
            assert layer.weight.input_bits == (16 if is_head else 8), name
            assert layer.weight.format.bits == (4 if quantization == "q4" and not is_head else 8), name


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", ["none", "q4"])
def test_an_8_bit_cache_is_about_as_exact_as_bfloat16(write, quantization: str) -> None:
    directory = write("Q4_0")
    exact = logprobs(directory, "none", "float32", sequences=LONG_SEQUENCES)

    def error(quantization: str, dtype: str, cache_dtype: str) -> float:
        found = logprobs(directory, quantization, dtype, cache_dtype, LONG_SEQUENCES)
        return float(np.abs(found - exact).mean())

    bfloat16_error = error("none", "bfloat16", "auto")
    assert 0 < error(quantization, "float32", "int8") < 2 * bfloat16_error
    assert error(quantization, "bfloat16", "int8") < 2 * bfloat16_error


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("quantization", "cache_dtype", "activation_bits"),
    [
        ("q4", "auto", "16"),
        ("q4", "auto", "8"),
        ("q8", "auto", "16"),
        ("int8", "auto", "8"),
        ("q4", "int8", "8"),
    ],
)
def test_a_requests_tokens_do_not_depend_on_its_batch(
    write, quantization: str, cache_dtype: str, activation_bits: str
) -> None:
    directory = write("F32")
    config = config_for(directory, quantization, "bfloat16", cache_dtype, activation_bits=activation_bits)
    runner = create_runner(config, directory, boot_id="test", on_phase=lambda phase, progress: None)
    engine = InProcessEngine(runner, enable_prefix_caching=False, max_num_batched_tokens=64)
    prompts = [[(7 * i + 3 * j) % 97 for j in range(3 + 4 * i)] for i in range(8)]
    sampling = replace(GREEDY, max_tokens=12, ignore_eos=True)
    together = engine.generate(prompts, sampling)
    assert [engine.generate([prompt], sampling)[0] for prompt in prompts] == together


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wide_products_need_batch_invariance_off(write, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(quantized, "choose_wide", lambda *_: Wide(100, 8))
    directory = write("Q4_0")
    for quantization, batch_invariant, is_wide in (
        ("auto", "auto", True),
        ("q4", "false", True),
        ("q4", "auto", False),
        ("auto", "true", False),
    ):
        config = config_for(directory, quantization, dtype, batch_invariant=batch_invariant)
        model = load_model(config, open_checkpoint(directory))
        assert {(weight.wide_rows, weight.wide_bits) for weight in linear_weights(model)} == {
            (100, 8) if is_wide else (NEVER, 16)
        }


@pytest.mark.parametrize(
    ("isa_name", "weight_bits", "input_bits", "dtype", "wide"),
    [
        ("avx512_vnni", 4, 8, torch.float32, Wide(128, 8)),
        ("avx512_bf16", 4, 8, torch.bfloat16, Wide(128, 8)),
        ("avx512_bf16", 8, 8, torch.bfloat16, None),
        ("avx512_bf16", 4, 16, torch.bfloat16, Wide(64, 16)),
        ("avx512_bf16", 4, 16, torch.float32, None),
        ("avx512_vnni", 4, 16, torch.float32, None),
        ("amx", 4, 8, torch.bfloat16, Wide(32, 16)),
        ("amx", 8, 8, torch.bfloat16, Wide(32, 16)),
        ("amx", 4, 16, torch.bfloat16, Wide(12, 16)),
        ("amx", 32, 8, torch.bfloat16, Wide(12, 16)),
        ("amx", 32, 8, torch.float32, None),
        ("avx2", 4, 8, torch.float32, None),
    ],
)
def test_wide_arithmetic_is_chosen_by_instruction_set(
    isa_name: str, weight_bits: int, input_bits: int, dtype: torch.dtype, wide: Wide | None
) -> None:
    assert choose_wide(isa_name, weight_bits, input_bits, dtype) == wide
