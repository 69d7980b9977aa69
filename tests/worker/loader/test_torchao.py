"""Checkpoints of torchao: files that transformers wrote, and damaged ones, refused by name."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tests.worker.loader.test_quantized import PROJECTION, load, logits
from tests.worker.models.sequences import assert_equals_oracle
from tests.worker.quantized_files import (
    SCHEMES,
    SIZES,
    TORCHAO,
    Scheme,
    described,
    save_quantized,
    torch_type,
    torchao,
)
from tests.worker.torchao_recordings import NAMES, digest, write_recorded
from triptych.checkpoint.config_json import read_architecture
from triptych.errors import FeatureDisabled, ModelError
from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.layers.weights import linear_weights
from triptych_services.worker.loader.load import open_checkpoint

KINDS = {
    "int8": "torchao 8-bit per row",
    "float8": "torchao 8-bit e4m3 per row",
    "mixed": "torchao 4-bit g32, torchao 8-bit per row, torchao 3-bit g16",
    "int4": "torchao 8-bit per row, torchao-int4 4-bit g32",
    "nvfp4": "torchao-nvfp4 4-bit fp4 g16",
    "mxfp4": "torchao-mxfp4 4-bit fp4 g32",
    "mxfp8": "torchao-mxfp8 8-bit e4m3 g32",
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", NAMES)
def test_files_of_transformers_mean_what_torchao_makes_of_them(tmp_path: Path, name: str) -> None:
    meant = write_recorded(name, tmp_path)
    architecture = read_architecture(tmp_path)
    assert set(str(architecture.quantization).split(", ")) == set(KINDS[name].split(", "))
    checkpoint = open_checkpoint(tmp_path, architecture=architecture)
    assert checkpoint.tensors.keys() == meant.keys()
    for tensor, digests in meant.items():
        for dtype in (torch.float32, torch.bfloat16):
            assert digest(checkpoint.read(tensor, dtype)) == digests[str(dtype)], (tensor, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_parts_of_blocks_of_scales_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    write_recorded(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    whole = checkpoint.read(f"{PROJECTION}.weight", torch.float32)
    assert whole.shape == (160, 64)
    for dim, start, length in ((0, 100, 50), (0, 130, 30), (1, 32, 32)):
        part = checkpoint.read_part(f"{PROJECTION}.weight", torch.float32, dim, start, length)
        assert torch.equal(part, whole.narrow(dim, start, length))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_models_compute_what_transformers_does(tmp_path: Path, name: str) -> None:
    write_recorded(name, tmp_path)
    oracle = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path, attn_implementation="eager"))
    checkpoint = open_checkpoint(tmp_path)
    oracle.load_state_dict({key: checkpoint.read(key, torch.float32) for key in checkpoint.tensors})
    assert_equals_oracle(oracle.float().eval(), *logits(load(tmp_path, "none"), tmp_path))
    if not isa():
        return
    held = load(tmp_path, "stored")
    kept = [weight for weight in linear_weights(held) if isinstance(weight, QuantizedWeight)]
    # all but the output head; in the mixed one it has codes as well, and one matrix has none
    assert len(kept) == len(linear_weights(held)) - 1
    sequences, found = logits(held, tmp_path)
    for token_ids, ours in zip(sequences.token_ids, found, strict=True):
        expected = oracle(token_ids[None]).logits[0]
        assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()


def edit(directory: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    """Change the tensors and the metadata of a file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    change(tensors, notes)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, notes)


def noted(**changes: Any) -> Callable[[dict[str, Tensor], dict[str, str]], None]:
    """Return a change of the metadata of one weight; `_data` is changed key by key."""

    def change(tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
        values = json.loads(notes[f"{PROJECTION}.weight"])
        data = {**values["_data"], **changes.pop("_data", {})}
        notes[f"{PROJECTION}.weight"] = json.dumps(values | {"_data": data} | changes)

    return change


def stored(part: str, turn: Callable[[Tensor], Tensor | None]) -> Callable[..., None]:
    """Return a change of one tensor of that weight."""

    def change(tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
        turned = turn(tensors.pop(f"{PROJECTION}._weight_{part}"))
        if turned is not None:
            tensors[f"{PROJECTION}._weight_{part}"] = turned

    return change


def renamed(new: str) -> Callable[..., None]:
    def change(tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
        notes[new] = notes.pop(f"{PROJECTION}.weight")

    return change


def text(value: str) -> Callable[..., None]:
    def change(tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
        notes[f"{PROJECTION}.weight"] = value

    return change


def with_no_number(scales: Tensor) -> Tensor:
    scales.view(torch.uint8)[0, 0] = 0xFF
    return scales


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


@pytest.mark.parametrize(
    ("scheme", "damage", "message"),
    [
        ("bytes", stored("scale", lambda t: None), "names .*_weight_scale, which is in no file; expected qdata, scale"),
        ("bytes", stored("qdata", lambda t: None), "names .*_weight_qdata, which is in no file"),
        ("bytes", stored("qdata", lambda t: t.float()), r"_weight_qdata: is F32 \[256, 128\]; .* needs I8"),
        ("bytes", stored("qdata", lambda t: t[0]), r"_weight_qdata: is \[128\]; .* needs a matrix"),
        ("bytes", stored("scale", lambda t: t[:, 1:]), r"_weight_scale: is BF16 \[256, 3\]; .* needs .* \[256, 4\]"),
        ("bytes", stored("scale", filled(torch.nan)), "_weight_scale: holds a scale that is no number"),
        ("bytes", stored("qdata", filled(8)), "_weight_qdata: holds 8 to 8; .* needs -8 to 7"),
        ("zeros", stored("zero_point", filled(-5)), "_weight_zero_point: holds -5 to -5; .* needs -4 to 3"),
        ("zeros", stored("zero_point", lambda t: t[1:]), r"_weight_zero_point: is I8 \[255, 2\]"),
        ("float8", stored("qdata", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)), "no number"),
        ("float8", stored("qdata", lambda t: t.view(torch.int8)), "is I8 .* needs F8_E4M3"),
        ("int4", stored("scale", lambda t: t.t()), r"_weight_scale: is BF16 \[256, 2\]; .* needs .* \[2, 256\]"),
        ("int4", stored("zero_point", filled(torch.inf)), "_weight_zero_point: holds a scale that is no number"),
        ("int4", noted(_data={"block_size": [2, 64]}), "a scale for 2 outputs; .* needs one for each"),
        ("bytes", noted(_data={"block_size": [1, 48]}), r"is \[256, 128\]; .* needs whole blocks of \[1, 48\]"),
        ("bytes", noted(_data={"block_size": [1, 0]}), r"block_size is \[1, 0\]; expected two positive numbers"),
        ("bytes", noted(_data={"block_size": None}), "block_size is None; expected two numbers"),
        ("bytes", noted(_data={"target_dtype": "int4"}), "target_dtype is int4; expected torch.int1 to torch.int8"),
        ("bytes", noted(_tensor_data_names=["qdata", "scale"]), "_tensor_data_names is .*; expected .*zero_point"),
        ("int8", noted(_tensor_data_names=["qdata", "scale", {}]), "_tensor_data_names is .*; expected qdata, scale"),
        ("bytes", noted(_data={"block_size": [1, 32]}, _type=["Int8Tensor"]), "Int8Tensor.* is a|of torchao's"),
        ("bytes", text("qdata"), "is 'qdata'; expected a JSON object"),
        ("bytes", text("[" * 100_000), "expected a JSON object"),
        ("bytes", text('{"_type": "Int8Tensor"}'), "_data is None; expected an object"),
        ("bytes", text('{"_type": "Tensor"}'), "is I8, which weights stored as torchao do not"),
        ("bytes", renamed("format"), "no metadata of a header describe .*up_proj.weight"),
        ("bytes", renamed("model.layers.7.mlp.up_proj.weight"), r"layers.7.*_weight_qdata, which is in no file"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, scheme: str, damage: Any, message: str) -> None:
    save_quantized(tmp_path, SCHEMES[f"torchao {scheme}"], wanted=lambda name: name.startswith(PROJECTION))
    edit(tmp_path, damage)
    with pytest.raises((ModelError, FeatureDisabled), match=message) as caught:
        open_checkpoint(tmp_path).read(f"{PROJECTION}.weight", torch.float32)
    assert "up_proj" in str(caught.value)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("nvfp4", noted(_data={"is_swizzled_scales": False}), "is_swizzled_scales is False; expected true"),
        ("nvfp4", noted(_data={"block_size": 32}), "block_size is 32; expected 16"),
        ("mxfp4", noted(_data={"block_size": [1, 32]}), r"block_size is \[1, 32\]; expected 32"),
        ("nvfp4", stored("per_tensor_scale", filled(0.0)), "_weight_per_tensor_scale: is 0.0; .* not zero"),
        ("nvfp4", stored("scale", lambda t: t[1:]), r"_weight_scale: is F8_E4M3 \[63, 16\]; .* \[64, 16\]"),
        ("mxfp4", stored("qdata", lambda t: t[:, :31]), r"_weight_qdata: has 62 inputs; .* multiple of 32"),
        ("mxfp8", stored("qdata", lambda t: t.view(torch.uint8)), "is U8 .* needs F8_E4M3"),
        ("mxfp8", stored("scale", with_no_number), "_weight_scale: holds a scale that is no number"),
        ("mxfp8", noted(_data={"elem_dtype": torch_type("float8_e5m2")}), "MXTensor of float8_e5m2: .* read"),
        ("mxfp8", noted(_data={"elem_dtype": None}), "a MXTensor of : .* are read"),
        ("mxfp8", noted(_data={}, _tensor_data_names=["qdata"]), "_data_names is .*; expected qdata, scale"),
    ],
)  # fmt: skip
def test_damaged_blocks_of_scales_are_named(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    write_recorded(name, tmp_path)
    edit(tmp_path, damage)
    with pytest.raises((ModelError, FeatureDisabled), match=message):
        open_checkpoint(tmp_path).read(f"{PROJECTION}.weight", torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"_type": "Int4TilePackedTo4dTensor"},
            "torchao: weight is a Int4TilePackedTo4dTensor: .*up_proj.weight",
        ),
        ({"_type": "Int4PlainInt32Tensor"}, "quantize the model with .* plain Int4WeightOnlyConfig"),
        (
            {"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]},
            "act_pre_scale: .* multiplies the inputs",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_quantized(tmp_path, SCHEMES["torchao int8"])
    edit(tmp_path, noted(**changes))
    with pytest.raises(FeatureDisabled, match=message):
        read_architecture(tmp_path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    save_quantized(tmp_path, SCHEMES["torchao int8"], wanted=lambda name: name.startswith(PROJECTION))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:100],
        whole[:8] + b"[" + whole[9:],
        (1 << 40).to_bytes(8, "little") + whole[8:],
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"weight file of \d+ bytes cannot be read: .* fetch it again"):
            read_architecture(tmp_path)
    path.unlink()
    assert str(read_architecture(tmp_path).quantization) == "torchao"
    (tmp_path / "pytorch_model.bin").write_bytes(whole)
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin, which may hold code .* safe_serialization=True"
    ):
        open_checkpoint(tmp_path)


def test_groups_that_products_lack_are_dequantized_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 1}
    note = described("IntxUnpackedToInt8Tensor", (1, 48), "zero_point", target_dtype=torch_type("int5"))
    scheme = Scheme(TORCHAO, torchao(5, 48, symmetric=False), "torchao 5-bit g48", note)
    oracle = save_quantized(tmp_path, scheme, LlamaForCausalLM(LlamaConfig(**SIZES | sizes)))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, "stored")
    if isa():
        assert "7 weights stored as torchao 5-bit g48 become float32" in caplog.text
    assert_equals_oracle(oracle, *logits(model, tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torchao zeros", "torchao float8 blocks", "torchao int4"])
def test_mutated_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    save_quantized(tmp_path, SCHEMES[name], wanted=lambda tensor: tensor.startswith(PROJECTION))
    whole, drawn = (tmp_path / "model.safetensors").read_bytes(), random.Random(0)
    length = int.from_bytes(whole[:8], "little")
    outcomes = set[str]()
    for number in range(200):
        mutated = bytearray(whole)
        for _ in range(drawn.randrange(1, 4)):
            place = drawn.randrange(8, 8 + length if number % 4 else len(whole))
            mutated[place] = drawn.choice(b'0123456789,:"[]{}_axq \xff')
        (tmp_path / "model.safetensors").write_bytes(mutated)
        try:
            found = open_checkpoint(tmp_path).read(f"{PROJECTION}.weight", torch.float32)
        except (ModelError, FeatureDisabled, KeyError) as error:
            outcomes.add(type(error).__name__)
            continue
        outcomes.add("read")
        assert found.dim() == 2
        assert torch.isfinite(found).all()
    assert {"read", "ModelError"} <= outcomes
