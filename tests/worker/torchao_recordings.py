"""Small models that torchao has quantized and transformers has saved, recorded.

A recording is the files of a checkpoint as transformers wrote them, and digests of the weights that torchao itself
makes of them. So a test of ours needs no torchao, and nothing of the format was written by us.

`python -m tests.worker.torchao_recordings` records them anew, in an environment with torchao 0.18 beside the
dependencies of the tests.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

RECORDINGS_FILE = Path(__file__).with_name("torchao_recordings.xz")
NAMES = ("mixed", "int4", "int8", "float8", "nvfp4", "mxfp4", "mxfp8")
MEANT_FILE = "meant.json"
_BLOCKED = ("nvfp4", "mxfp4", "mxfp8")
_WIDE = {"num_hidden_layers": 1, "intermediate_size": 160}
"""Sizes of which the scales are in more than one block of 128 outputs and 4 groups, and the last ones are not full."""
_SIZES = {
    "vocab_size": 33,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def digest(weight: Tensor) -> str:
    return sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@cache
def _files() -> Mapping[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(RECORDINGS_FILE.read_bytes()))) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def write_recorded(name: str, directory: Path) -> dict[str, dict[str, str]]:
    """Write a checkpoint, and return the digests of its weights: name -> dtype -> digest."""
    for path, content in _files().items():
        recording, _, file = path.partition("/")
        if recording == name and file != MEANT_FILE:
            (directory / file).write_bytes(content)
    meant: dict[str, dict[str, str]] = json.loads(_files()[f"{name}/{MEANT_FILE}"])
    return meant


def _configs() -> dict[str, Any]:
    """Return torchao's configs; what they do not need a GPU for."""
    from torchao import quantization as ao
    from torchao.prototype import mx_formats as mx

    rows = ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0))
    fours = ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)
    )
    threes = ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=ao.PerGroup(16), mapping_type=ao.MappingType.ASYMMETRIC
    )
    mixed = {
        "model.embed_tokens": rows,
        "re:model\\.layers\\.0\\.mlp\\..+": threes,
        "model.layers.1.mlp.down_proj": None,
        "_default": fours,
    }
    return {
        "int8": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "float8": ao.Float8WeightOnlyConfig(),
        "mixed": ao.FqnToConfig(mixed),
        "int4": ao.Int8WeightOnlyConfig(version=2),  # of all but one matrix
        **{
            name: mx.MXDynamicActivationMXWeightConfig(activation_dtype=dtype, weight_dtype=dtype)
            for name, dtype in (("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8", torch.float8_e4m3fn))
        },
        "nvfp4": mx.NVFP4WeightOnlyConfig(),
    }


def _as_int4(model: Any) -> None:
    """Give one matrix the form that torchao makes on GPUs only, with its own quantization of given scales."""
    from torchao.prototype.gptq.api import _int4_row_quantize_zp_precomputed_qparams as quantize
    from torchao.quantization import Int4Tensor

    module = model.model.layers[0].mlp.gate_proj
    weight = module.weight.dequantize(torch.float32)
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).t().contiguous().bfloat16()
    zeros = (low.t() + scales.float() * 8).contiguous().bfloat16()
    codes = quantize(weight, scales, zeros, 32)
    pairs = (codes[:, 1::2] << 4) | (codes[:, ::2] & 15)  # mslk's `pack_int4`
    module.weight = torch.nn.Parameter(Int4Tensor(pairs, scales, zeros, [1, 32], weight.shape), False)


def _meant(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight that torchao makes of a tensor."""
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp
    from torchao.quantization import Int4Tensor, IntxUnpackedToInt8Tensor

    if isinstance(tensor, Int4Tensor):
        pairs = tensor.qdata
        codes = torch.stack([pairs << 4 >> 4, pairs >> 4], dim=-1).flatten(1)
        scales, zeros = tensor.scale.float(), tensor.zero_point.float()
        return _int4_row_dequantize_zp(codes.float(), scales, zeros, tensor.block_size[1]).to(dtype)
    if isinstance(tensor, IntxUnpackedToInt8Tensor):
        attributes = {name: getattr(tensor, name) for name in tensor.tensor_attribute_names}
        parts = {name: getattr(tensor, name) for name in tensor.tensor_data_names}
        return IntxUnpackedToInt8Tensor(**parts, **attributes | {"dtype": dtype}).dequantize()
    return tensor.dequantize(dtype) if hasattr(tensor, "qdata") else tensor.to(dtype)


def _record(name: str, plain: Path, directory: Path, config: Any) -> None:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from transformers import TorchAoConfig

    is_mixed = name == "mixed"
    quantization = TorchAoConfig(config, include_input_output_embeddings=is_mixed)
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=quantization)
    if name == "int4":
        _as_int4(model)
    model.save_pretrained(directory, max_shard_size="60KB" if is_mixed else "1GB")
    tensors, notes = dict[str, Tensor](), dict[str, str]()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            notes |= file.metadata()
    weights, left = unflatten_tensor_state_dict(tensors, notes)
    assert not left, "torchao reads what it has written"
    meant = {
        key: {str(dtype): digest(_meant(weight, dtype)) for dtype in (torch.float32, torch.bfloat16)}
        for key, weight in weights.items()
    }
    (directory / MEANT_FILE).write_text(json.dumps(meant))


def record() -> None:
    """Quantize a small model by each config, and write what transformers made of it."""
    torch.manual_seed(0)
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as place, tarfile.open(fileobj=buffer, mode="w") as archive:
        plain, wide = Path(place) / "plain", Path(place) / "wide"
        LlamaForCausalLM(LlamaConfig(**_SIZES)).bfloat16().save_pretrained(plain)
        LlamaForCausalLM(LlamaConfig(**_SIZES | _WIDE)).bfloat16().save_pretrained(wide)
        for name, config in _configs().items():
            directory = Path(place) / name
            _record(name, wide if name in _BLOCKED else plain, directory, config)
            for path in sorted(directory.iterdir()):
                member = tarfile.TarInfo(f"{name}/{path.name}")
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))
    RECORDINGS_FILE.write_bytes(lzma.compress(buffer.getvalue(), preset=9))
    print(f"{RECORDINGS_FILE}: {RECORDINGS_FILE.stat().st_size} bytes by torchao {version('torchao')}")


if __name__ == "__main__":
    record()
