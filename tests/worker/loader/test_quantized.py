"""Checkpoints that another tool has quantized: weights as the published layouts mean them, and refusals by name."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers.processes import free_port
from tests.worker.models.sequences import Sequences, assert_equals_oracle
from tests.worker.quantized_files import (
    SCHEMES,
    SIZES,
    Scheme,
    groups_config,
    int8,
    is_quantized,
    packed,
    save_experts,
    save_quantized,
)
from tests.worker.quantized_recordings import MODULE, NAMES, write_recorded
from tests.worker.ranks import Case, compute, run_ranks
from tests.worker.tiny import dense, tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.errors import FeatureDisabled, ModelError
from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.base import Half
from triptych_kernels.weights.coded import StoredCodes
from triptych_kernels.weights.coded_weight import CodedWeight
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.layers.quantization import CodedPart
from triptych_services.worker.layers.weights import linear_weights
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.startup.create import create_runner

PROJECTION = "model.layers.0.mlp.up_proj"
DEQUANTIZED = ("gptq order",)
"""Schemes with codes that no product reads."""


PACKED = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.type.startswith(("gptq", "awq", "pack", "mxfp4", "nvfp4", "torchao-int4"))
]
PACKED = [name for name in PACKED if name not in DEQUANTIZED]
"""Schemes of which kernels read the codes as they are packed."""


def load(directory: Path, quantization: str) -> CausalLM:
    """Load a model with activations in float32.

    Args:
        quantization: stored, or none: dequantized.
    """
    config = replace(tiny_config(read_architecture(directory)), dtype="float32", weight_dtype="float32")
    return load_model(replace(config, quantization=quantization), open_checkpoint(directory))


def logits(model: CausalLM, directory: Path) -> tuple[Sequences, list[torch.Tensor]]:
    sequences = Sequences(model, read_architecture(directory), lengths=(9, 4))
    return sequences, sequences.run(lambda row, left: left)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_what_the_layout_means(tmp_path: Path, name: str) -> None:
    model = save_quantized(tmp_path, SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert checkpoint.tensors.keys() == expected.keys()
    for tensor, meant in expected.items():
        assert torch.equal(checkpoint.read(tensor, torch.float32), meant), tensor
        if is_quantized(tensor):
            assert checkpoint.tensors[tensor].type == SCHEMES[name].type


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_tools_make_of_them(tmp_path: Path, name: str) -> None:
    meant = write_recorded(name, tmp_path)
    found = open_checkpoint(tmp_path).read(f"{MODULE}.weight", meant.dtype)
    if name == "bitsandbytes 8-bit":  # which multiplies by the scale and by 1 / 127 one after the other
        torch.testing.assert_close(found, meant, rtol=2**-22, atol=0)
    else:
        assert torch.equal(found, meant)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_dequantized_models_compute_what_transformers_does(tmp_path: Path, name: str) -> None:
    oracle = save_quantized(tmp_path, SCHEMES[name])
    assert_equals_oracle(oracle, *logits(load(tmp_path, "none"), tmp_path))


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_held_codes_mean_the_same_weights(tmp_path: Path, name: str) -> None:
    oracle = save_quantized(tmp_path, SCHEMES[name])
    held, plain = load(tmp_path, "stored"), load(tmp_path, "none")
    if name not in DEQUANTIZED:
        num_held = sum(isinstance(weight, QuantizedWeight) for weight in linear_weights(held))
        assert num_held == len(linear_weights(held)) - 1, "all but the output head"
    for (module, layer), other in zip(plain.named_modules(), held.modules(), strict=True):
        if hasattr(layer, "weight"):
            assert torch.equal(dense(other.weight), dense(layer.weight)), module
    sequences, found = logits(held, tmp_path)
    for token_ids, ours in zip(sequences.token_ids, found, strict=True):
        expected = oracle(token_ids[None]).logits[0]
        assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_codes_fill_the_bytes_that_unpacked_ones_fill(
    tmp_path: Path, name: str, is_gated: bool
) -> None:
    save_quantized(tmp_path, SCHEMES[name], wanted=lambda tensor: tensor.startswith(PROJECTION))
    checkpoint = open_checkpoint(tmp_path)
    tensor = f"{PROJECTION}.weight"
    format = checkpoint.tensors[tensor].format
    assert format is not None
    wide = replace(format, group=min(format.group or 64, 64))  # two ranks cut groups of 128
    is_plain = not wide.table and wide.offset != "minimum"
    for held in (wide, replace(wide, bits=8, offset="zero") if is_plain else wide):
        filled, expected = (CodedWeight(160, 64, torch.float32, held, gated=is_gated) for _ in range(2))
        halves: tuple[Half | None, ...] = ("gate", "up") if is_gated else (None, None)
        # pieces of two projections: odd rows of the file at odd places, and the share of another rank each
        for row, (start, rows) in enumerate([(0, 3), (3, 71), (74, 6)]):
            for number, half in enumerate(halves):
                part = CodedPart(7 + row + start, rows, 64 * number, 64, wide.group)
                codes = checkpoint.read_codes(tensor, part)
                assert isinstance(codes.codes, StoredCodes)
                first = start + (0 if is_gated else 80 * number)
                filled.fill_codes(first, codes, half)
                expected.fill_codes(first, replace(codes, codes=codes.unpacked()), half)
        assert torch.equal(filled.data, expected.data)
        assert filled.data.any()


@pytest.mark.parametrize(
    "name", ["gptq zeros", "awq", "fp8 exponents", "nvfp4", "nf4 nested", "torchao zeros", "torchao int4"]
)
def test_ranks_read_their_shares(tmp_path: Path, name: str) -> None:
    model = save_quantized(tmp_path, SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path)
    for tensor in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        meant = model.state_dict()[tensor]
        for dim, start, length in ((0, 0, 0), (0, 11, 21), (0, 32, 32), (1, 64, 64), (1, 7, 90), (1, 96, 32)):
            found = checkpoint.read_part(tensor, torch.float32, dim, start, length)
            assert torch.equal(found, meant.narrow(dim, start, length)), (tensor, dim, start)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gptq zeros", "fp8 blocks", "nvfp4"])
def test_experts_of_their_own_names(tmp_path: Path, name: str) -> None:
    config = Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        head_dim=32,
        decoder_sparse_step=1,
    )
    oracle = save_experts(tmp_path, SCHEMES[name], Qwen3MoeForCausalLM(config))
    assert_equals_oracle(oracle, *logits(load(tmp_path, "none"), tmp_path))
    _, found = logits(load(tmp_path, "stored"), tmp_path)
    _, expected = logits(load(tmp_path, "none"), tmp_path)
    assert all((a - b).abs().max() < 2e-3 * b.abs().max() for a, b in zip(found, expected, strict=True))


@pytest.mark.thorough
def test_stacked_experts_of_gpt_oss(tmp_path: Path) -> None:
    config = GptOssConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    oracle = save_experts(tmp_path, None, GptOssForCausalLM(config))
    assert_equals_oracle(oracle, *logits(load(tmp_path, "none"), tmp_path))
    _, found = logits(load(tmp_path, "stored"), tmp_path)
    _, expected = logits(load(tmp_path, "none"), tmp_path)
    assert all((a - b).abs().max() < 2e-3 * b.abs().max() for a, b in zip(found, expected, strict=True))
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert checkpoint.tensors[name].shape == (4, 192, 128)
    meant = oracle.state_dict()[name].transpose(1, 2)
    assert torch.equal(checkpoint.read_part(name, torch.float32, 0, 1, 2), meant[1:3])


def test_what_is_dequantized_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, SCHEMES["gptq order"])
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "stored")
    assert "14 weights stored as gptq 4-bit g32, its inputs are in the order" in caplog.text


def change(name: str, edit: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        edited = edit(tensors.pop(f"{PROJECTION}.{name}"))
        if edited is not None:
            tensors[f"{PROJECTION}.{name}"] = edited

    return apply


def set_first(value: float) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("scheme", "damage", "message"),
    [
        ("gptq", change("scales", lambda t: None), "there is no scales, which gptq 4-bit g128 needs"),
        ("gptq", change("qweight", lambda t: None), "there are no codes that it belongs to; expected qweight"),
        ("gptq", change("qweight", lambda t: t.float()), r"qweight: is F32 \[16, 256\]; .* needs I32"),
        ("gptq", change("qweight", lambda t: t[:-1]), r"scales: is F16 \[1, 256\]|g_idx: is I32"),
        ("gptq", change("scales", set_first(torch.nan)), "scales: holds a scale that is no number"),
        ("gptq", change("g_idx", set_first(7)), "g_idx: has groups 0 to 7; .* needs 0 to 0"),
        ("gptq", change("g_idx", set_first(-1)), "g_idx: has groups -1 to 0; .* needs 0 to 0"),
        ("gptq", change("qzeros", set_first(0)), "qzeros: has zeros from 1 to 8; .* needs 8"),
        ("gptq zeros", change("qzeros", lambda t: t[:, 1:]), r"qzeros: is I32 \[4, 31\]; .* needs I32 \[4, 32\]"),
        ("awq", change("scales", lambda t: t[1:]), r"scales: is F16 \[1, 256\]; .* needs .* \[2, 256\]"),
        ("packed", change("weight_shape", set_first(3)), r"weight_shape: is \[3, 128\]"),
        ("packed", change("weight_scale", set_first(torch.inf)), "weight_scale: holds a scale that is no number"),
        ("fp8", change("weight_scale", lambda t: torch.zeros(())), "weight_scale: is zero"),
        ("fp8", change("weight_scale", lambda t: None), "there is no weight_scale_inv, which fp8|no codes"),
        ("fp8 blocks", change("weight_scale_inv", lambda t: t[:, :0]), r"weight_scale_inv: is F32 \[2, 0\]"),
        ("fp8", change("weight", lambda t: t.view(torch.uint8).fill_(127).view(torch.float8_e4m3fn)), "no number"),
        ("nvfp4", change("weight_global_scale", set_first(0)), "weight_global_scale: is 0.0"),
        ("nvfp4", change("weight_global_scale", set_first(1e-38)), "weight: rows 0 to .* is no number in float32"),
        ("nvfp4", change("weight_packed", lambda t: t[:, :-1]), "has 126 inputs; .* needs a multiple of 16"),
        ("mxfp4", change("weight_scale", set_first(255)), "weight_scale: holds a scale that is no number"),
        ("nf4", change("weight.quant_map", set_first(3)), "quant_map: is .* needs the values of nf4"),
        ("nf4", change("weight.absmax", lambda t: t[1:]), r"absmax: is F32 \[511\]; .* needs F32 \[512\]"),
        ("nf4", change("weight.quant_state.bitsandbytes__nf4", set_first(0)), "is no JSON object"),
        ("llm-int8", change("weight_format", lambda t: t + 1), r"weight_format: is \[1\]"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(tmp_path: Path, scheme: str, damage: Any, message: str) -> None:
    save_quantized(tmp_path, SCHEMES[scheme], wanted=lambda name: name.startswith(PROJECTION))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(tmp_path).read(f"{PROJECTION}.weight", torch.float32)
    assert PROJECTION in caught.value.message


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"quant_method": "runes"}, ModelError, "'runes' is not supported, only .*gptq"),
        ({"quant_method": "gptq", "bits": 5}, ModelError, "bits: 5 must be one of 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "twist": 1}, ModelError, "quantization_config.twist: 1 is a key"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, FeatureDisabled, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(a+)+": {"bits": 8}}}, ModelError, "may take forever"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {"bits": 8}}}, ModelError, "no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*vision": {"bits": 8}}}, ModelError, "no module of the"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, FeatureDisabled, "version = gemv"),
        ({"quant_method": "awq", "bits": 4}, ModelError, "g_idx: is I32, which weights stored as awq do not need"),
        ({"quant_method": "fp8"}, ModelError, "I32, which weights stored as fp8 do not need"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, FeatureDisabled, "W4A8_AWQ"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, ModelError, "says that it is not quantized"),
        (
            groups_config("pack-quantized", num_bits=4, strategy="group", group_size=32)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}}, FeatureDisabled, "weights are sparse",
        ),
        (
            groups_config("pack-quantized", num_bits=4, strategy="group", group_size=32)
            | {"transform_config": {"config_groups": {"u": {}}}}, FeatureDisabled, "weights are rotated",
        ),
        (groups_config("marlin-24", num_bits=4, strategy="group", group_size=32), FeatureDisabled, "marlin-24"),
    ],
)  # fmt: skip
def test_configs_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    save_quantized(tmp_path, SCHEMES["gptq"], wanted=lambda name: name.startswith(PROJECTION))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path, architecture=read_architecture(tmp_path))


def test_groups_of_modules_have_schemes_of_their_own(tmp_path: Path) -> None:
    config = groups_config("mixed-precision", num_bits=8, type="int", strategy="channel")
    first = config["config_groups"]["group_0"]
    first |= {"format": "int-quantized", "targets": ["re:.*down_proj"]}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    second = {
        "format": "pack-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
    }
    config["config_groups"] = {"all": second, "down": first}
    write = packed(4, 32)

    def either(weight: Any, rng: Any) -> Any:
        return int8(weight, rng) if weight.shape[1] == SIZES["intermediate_size"] else write(weight, rng)

    model = save_quantized(tmp_path, Scheme(config, either, ""))
    checkpoint = open_checkpoint(tmp_path)
    for name, meant in model.state_dict().items():
        assert torch.equal(checkpoint.read(name, torch.float32), meant), name
    assert checkpoint.tensors[f"{PROJECTION}.weight"].type == "pack-quantized 4-bit g32"
    assert "int-quantized" in checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].type


def test_quantization_twice_is_refused_with_both_named(tmp_path: Path) -> None:
    save_quantized(tmp_path, SCHEMES["gptq"])
    config = EngineConfig(model=ModelConfig(quantization="q4"), worker=WorkerConfig(device="cpu"))
    with pytest.raises(FeatureDisabled, match=r"model.quantization = q4: .* config.json: .* says gptq"):
        resolve_config(config, read_architecture(tmp_path))


def test_scales_of_keys_and_values_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheme = SCHEMES["float8 rows"]
    cached = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}
    save_quantized(tmp_path, replace(scheme, config=scheme.config | cached))
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}, path)
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "none")
    assert "as 8-bit float, with 1 scales of them (model.layers.0.self_attn.k_scale)" in caplog.text
    config = replace(tiny_config(read_architecture(tmp_path)), kv_dtype="float8_e4m3fn")
    with pytest.raises(FeatureDisabled, match=r"cache\.dtype = float8_e4m3fn"):
        load_model(config, open_checkpoint(tmp_path))


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_ranks_say_what_one_says(tmp_path: Path, num_stages: int) -> None:
    cases = {}
    for name in (
        "gptq",
        "awq",
        "fp8 blocks",
        "nvfp4",
        "torchao zeros",
        "torchao int4",
    ):  # of which groups of 128 are cut by the ranks
        save_quantized(tmp_path / name, SCHEMES[name])
        cases[name] = Case(tmp_path / name, 2, num_stages=num_stages, port=free_port())
    for name, (first, second) in run_ranks(cases, tmp_path).items():
        alone = compute(replace(cases[name], num_ranks=1, num_stages=1), rank=0)
        assert first.token_ids == second.token_ids == alone.token_ids, name
        assert first.weight_bytes < 0.8 * alone.weight_bytes, name
        for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=5e-3, err_msg=name)


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("awq", {}, "awq 4-bit g64 with zeros"),
        ("awq", {"quantization": "dequantized", "dtype": "bfloat16"}, "awq 4-bit g64 with zeros as bfloat16"),
        ("gptq order", {"dtype": "float32"}, "gptq 4-bit g32 as float32"),
        (
            "torchao zeros",
            {"quantization": "dequantized", "dtype": "bfloat16"},
            "torchao 3-bit g64 as bfloat16",
        ),
    ],
)
def test_the_facts_say_how_weights_are_held(
    tmp_path: Path, name: str, options: dict[str, str], said: str
) -> None:
    save_quantized(tmp_path, SCHEMES[name])
    engine = EngineConfig(
        model=ModelConfig(**options),
        cache=CacheConfig(block_size=4, num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu"),
    )
    config = resolve_config(engine, read_architecture(tmp_path))
    runner = create_runner(config, tmp_path, boot_id="b", on_phase=lambda phase, progress: None)
    assert runner.facts.model.quantization == said


@pytest.mark.parametrize(
    "num_mutations",
    [pytest.param(60, marks=pytest.mark.thorough), pytest.param(1500, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "name", ["gptq zeros", "gptq order", "awq", "packed zeros", "fp8 blocks", "nvfp4", "nf4 nested"]
)
def test_mutated_tensors_are_read_or_refused(tmp_path: Path, name: str, num_mutations: int) -> None:
    save_quantized(tmp_path, SCHEMES[name], wanted=lambda tensor: tensor.startswith(PROJECTION))
    path, drawn = tmp_path / "model.safetensors", random.Random(0)
    whole = load_file(path)
    parts = [tensor for tensor in whole if tensor.startswith(PROJECTION)]
    for _ in range(num_mutations):
        tensors, part = dict(whole), drawn.choice(parts)
        old = tensors.pop(part)
        kind = drawn.randrange(5)
        if kind == 0:  # another dtype of equal bytes
            dtype = drawn.choice([torch.uint8, torch.int8, torch.float8_e4m3fn])
            tensors[part] = old.reshape(-1).view(torch.uint8).view(dtype)
        elif kind == 1:  # a part of it
            tensors[part] = old.reshape(-1)[: drawn.randrange(old.numel())]
        elif kind == 2:  # the other way round
            tensors[part] = old.t() if old.dim() == 2 else old[None]
        elif kind == 3:  # other bytes
            edited = old.clone().reshape(-1).view(torch.uint8)
            edited[drawn.randrange(len(edited))] = drawn.randrange(256)
            tensors[part] = edited.view(old.dtype).reshape(old.shape)
        save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path)
        try:
            found = open_checkpoint(tmp_path).read(f"{PROJECTION}.weight", torch.float32)
        except (ModelError, FeatureDisabled):
            continue
        assert found.shape == (SIZES["intermediate_size"], SIZES["hidden_size"])
        assert torch.isfinite(found).all()
