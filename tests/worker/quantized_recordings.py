"""Weights that the published tools have quantized and dequantized again, recorded.

A recording is one linear layer: its section of config.json, its tensors, and the weights that the tool itself makes
of them. So a test of ours needs neither the tool nor its dependencies.

`python -m tests.worker.quantized_recordings GPTQMODEL` records them anew, in an environment with compressed-tensors
0.20 and bitsandbytes 0.50 beside the dependencies of the tests. GPTQMODEL is the directory of gptqmodel's source
distribution (7.7), of which one file is used: the package needs others that are not on every index.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

RECORDINGS_FILE = Path(__file__).with_name("quantized_recordings.xz")
MODULE = "model.layers.0.mlp.up_proj"
SHAPE = 32, 256

_GROUPS: dict[str, dict[str, Any]] = {
    "pack-quantized 4-bit g32": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "pack-quantized 4-bit g128, zeros": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False,
    },
    "pack-quantized 3-bit g64": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64},
    "pack-quantized 2-bit g32, zeros": {
        "num_bits": 2, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False,
    },
    "pack-quantized 8-bit rows": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int-quantized rows": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int-quantized tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "float-quantized rows": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float-quantized blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}  # fmt: skip
"""Name, which begins with compressed-tensors' format -> arguments of its `QuantizationArgs`."""
_BLOCKS: dict[str, dict[str, Any]] = {
    "bitsandbytes nf4": {"quant_type": "nf4", "blocksize": 64, "compress_statistics": False},
    "bitsandbytes nf4, nested": {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True},
    "bitsandbytes fp4, nested, blocks of 128": {
        "quant_type": "fp4", "blocksize": 128, "compress_statistics": True,
    },
}  # fmt: skip
"""Name -> arguments of bitsandbytes' `quantize_4bit`."""
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
NAMES = (*_GROUPS, *_BLOCKS, "bitsandbytes 8-bit", "gptqmodel awq")


@cache
def _recordings() -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    head, _, tensors = lzma.decompress(RECORDINGS_FILE.read_bytes()).partition(b"\n")
    return json.loads(head), load(tensors)


def write_recorded(name: str, directory: Path) -> Tensor:
    """Write a recording as a checkpoint of one layer, and return the weights that the tool makes of it."""
    configs, tensors = _recordings()
    own = {
        key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")
    }
    meant = own.pop("meant")
    save_file({f"{MODULE}.{key}": tensor for key, tensor in own.items()}, directory / "model.safetensors")
    values = {"architectures": ["LlamaForCausalLM"], "quantization_config": configs[name]}
    (directory / "config.json").write_text(json.dumps(values))
    return meant


def _drawn(seed: int) -> Tensor:
    """Return weights as of a linear layer, some of them larger, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SHAPE, generator=generator) * 0.02
    weight[3, ::50] *= 8
    return weight.bfloat16()


def _by_compressed_tensors(name: str, weight: Tensor) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return the section of config.json, the tensors, and what compressed-tensors makes of them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**_GROUPS[name])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=name.split()[0])
    rows, columns = weight.shape
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(*weight.float().aminmax())
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        blocks = weight.view(1, 1, -1)
    else:
        blocks = weight.view(rows, columns // (args.group_size or columns), -1)
    scales, zeros = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    if args.strategy == "tensor":
        scales, zeros = scales.view(1), zeros.view(1)
    state |= {"weight_scale": scales, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=name.split()[0], quantization_status="compressed",
        ignore=["lm_head"],
    )  # fmt: skip
    values = json.loads(config.model_dump_json()) | {"quant_method": "compressed-tensors"}
    return values, stored, compressor.decompress(stored, scheme)["weight"]


def _by_bitsandbytes(name: str, weight: Tensor) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return the section of config.json, the tensors, and what bitsandbytes makes of them."""
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    if name not in _BLOCKS:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        config = BitsAndBytesConfig(load_in_8bit=True)
        return config.to_dict(), stored, functional.int8_vectorwise_dequant(codes, scales)
    arguments = _BLOCKS[name]
    codes, state = functional.quantize_4bit(weight, **arguments)
    stored = {"weight": codes} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=arguments["quant_type"],
        bnb_4bit_use_double_quant=arguments["compress_statistics"],
    )
    return config.to_dict(), stored, functional.dequantize_4bit(codes, state)


def _by_gptqmodel(source: Path, weight: Tensor) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return the section of config.json, the tensors, and what gptqmodel makes of those of AWQ."""
    file = source / "gptqmodel/quantization/awq/utils/packing_utils.py"
    spec = spec_from_file_location("packing_utils", file)
    assert spec is not None, "it is a file of Python"
    assert spec.loader is not None, "it is a file of Python"
    packing = module_from_spec(spec)
    spec.loader.exec_module(packing)
    groups = weight.float().t().reshape(-1, 64, len(weight))  # inputs first
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    codes = (groups / scales.float()[:, None]).round().int() + zeros[:, None]
    qweight, qzeros = packing.pack_awq(codes.clamp(0, 15).flatten(0, 1), zeros, 4)
    meant = packing.dequantize_gemm(qweight, qzeros, scales, 4, 64)
    return _AWQ, {"qweight": qweight, "qzeros": qzeros, "scales": scales}, meant.t()


def record(gptqmodel: Path) -> None:
    """Quantize a layer by each of the tools, and write what they made of it.

    Args:
        gptqmodel: Directory of gptqmodel's source.
    """
    configs, tensors = dict[str, Any](), dict[str, Tensor]()
    for seed, name in enumerate(NAMES):
        weight = _drawn(seed)
        if name in _GROUPS:
            configs[name], stored, meant = _by_compressed_tensors(name, weight)
        elif name == "gptqmodel awq":
            configs[name], stored, meant = _by_gptqmodel(gptqmodel, weight)
        else:
            configs[name], stored, meant = _by_bitsandbytes(name, weight)
        for key, tensor in (stored | {"meant": meant}).items():
            tensors[f"{name}/{key}"] = tensor.detach().clone().contiguous()
    head = json.dumps(configs, default=str).encode()
    RECORDINGS_FILE.write_bytes(lzma.compress(head + b"\n" + save(tensors), preset=9))
    tools = ", ".join(f"{tool} {version(tool)}" for tool in ("compressed-tensors", "bitsandbytes"))
    print(f"{RECORDINGS_FILE}: {RECORDINGS_FILE.stat().st_size} bytes, {len(NAMES)} layers by {tools}")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
