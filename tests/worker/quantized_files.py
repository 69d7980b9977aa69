"""Checkpoints with quantized weights, written by the published layouts, with what their numbers mean.

Each writer takes weights [out_features, in_features] and returns the tensors of a module by their endings, and the
weights that they mean, computed here with numpy in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[np.ndarray, np.random.Generator], Written]
Note = Callable[[int, int], dict[str, Any]]
"""Describes a weight of so many outputs and inputs, for the header of the file."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes [n, m] as a stream of bits in each row, lowest first, in int32."""
    stream = (codes[..., None].astype(np.int64) >> np.arange(bits)) & 1  # [n, m, bits]
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream.astype(np.uint8), axis=1, bitorder="little").view("<i4")


def affine(
    weight: np.ndarray, bits: int, group: int, zero: int | None, dtype: type = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [out, in], scales and zeros [out, groups]; `zero` None: a zero for each group."""
    groups = weight.reshape(len(weight), -1, group)
    if zero is None:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scales = ((high - low) / (2**bits - 1)).astype(dtype)
        zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1).astype(np.int64)
    else:
        scales = (np.abs(groups).max(2) / (2 ** (bits - 1) - 0.5)).astype(dtype)
        zeros = np.full_like(scales, zero, dtype=np.int64)
    codes = np.round(groups / scales[..., None].astype(np.float32)) + zeros[..., None]
    return np.clip(codes, 0, 2**bits - 1).astype(np.int64).reshape(weight.shape), scales, zeros


def meaning(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> Tensor:
    """Return scale * (code - zero), with the group of each input."""
    exact = scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32)
    return torch.from_numpy(exact)


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, version: int = 1, order: bool = False
) -> Writer:
    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        permutation = rng.permutation(columns) if order else np.arange(columns)
        codes, scales, zeros = affine(
            weight[:, permutation], bits, size, 2 ** (bits - 1) if symmetric else None
        )
        g_idx = np.empty(columns, dtype=np.int32)
        g_idx[permutation] = np.arange(columns) // size
        codes = codes[:, np.argsort(permutation)]
        tensors = {
            "qweight": words_of(codes, bits).T,
            "qzeros": words_of((zeros - (version == 1)).T, bits),
            "scales": scales.T,
            "g_idx": g_idx,
        }
        return _tensors(tensors), meaning(codes, scales, zeros, g_idx)

    return write


def awq(group: int = 32) -> Writer:
    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        codes, scales, zeros = affine(weight, 4, group, None)
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the output in each place of a word

        def interleaved(matrix: np.ndarray) -> np.ndarray:
            return words_of(matrix.reshape(len(matrix), -1, 8)[..., order].reshape(matrix.shape), 4)

        tensors = {
            "qweight": interleaved(codes.T),
            "qzeros": interleaved(zeros.T),
            "scales": scales.T,
        }
        return _tensors(tensors), meaning(codes, scales, zeros, np.arange(weight.shape[1]) // group)

    return write


def packed(bits: int, group: int, *, symmetric: bool = True) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = affine(weight, bits, size, 2 ** (bits - 1) if symmetric else None)
        rounded = torch.from_numpy(scales.astype(np.float32)).bfloat16()
        tensors = _tensors({"weight_packed": words_of(codes, bits), "weight_shape": np.array(weight.shape)})
        tensors["weight_scale"] = rounded
        if not symmetric:
            tensors |= _tensors({"weight_zero_point": words_of(zeros.T, bits).T})
        return tensors, meaning(codes, rounded.float().numpy(), zeros, np.arange(weight.shape[1]) // size)

    return write


def float8(
    rows: int, columns: int, scale: str = "weight_scale", dtype: torch.dtype = torch.float32
) -> Writer:
    """8-bit floats in blocks of so many outputs and inputs; 0: all."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        height, width = rows or len(weight), columns or weight.shape[1]
        pads = [(0, -len(weight) % height), (0, -weight.shape[1] % width)]
        blocks = np.pad(weight, pads).reshape(-(-len(weight) // height), height, -1, width)
        scales = torch.from_numpy(np.abs(blocks).max((1, 3)) / 448)
        if dtype == torch.float8_e8m0fnu:
            scales = torch.exp2(torch.log2(scales).ceil())
        scales = scales.to(dtype)
        spread = scales.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        spread = spread[: len(weight), : weight.shape[1]]
        codes = (torch.from_numpy(weight) / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        if not rows and not columns:
            scales = scales.reshape(())
        return {"weight": codes, scale: scales, "input_scale": torch.ones(())}, codes.float() * spread

    return write


def int8(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """compressed-tensors' int-quantized, with a scale per output."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 127).bfloat16()
    codes = (torch.from_numpy(weight) / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def llm_int8(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """bitsandbytes in 8 bits."""
    largest = torch.from_numpy(np.abs(weight).max(1))
    codes = (torch.from_numpy(weight) * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest * (1 / 127))[:, None]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the code of the nearest value of a table."""
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def pairs_of(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def nvfp4(codes_name: str, whole_name: str, *, divides: bool) -> Writer:
    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        groups = weight.reshape(len(weight), -1, 16)
        whole = torch.tensor(np.abs(weight).max() / 6 / 448, dtype=torch.float32)
        whole_stored = 1 / whole if divides else whole
        meant_whole = 1 / whole_stored if divides else whole_stored
        scales = (torch.from_numpy(np.abs(groups).max(2) / 6) / meant_whole).to(torch.float8_e4m3fn)
        exact = (scales.float() * meant_whole)[..., None]
        codes = nearest(groups / np.maximum(exact.numpy(), 1e-9), E2M1)
        tensors = _tensors({codes_name: pairs_of(codes.reshape(weight.shape))})
        tensors |= {"weight_scale": scales, whole_name: whole_stored.reshape(1), "input_scale": torch.ones(1)}
        return tensors, (torch.from_numpy(E2M1[codes]) * exact).reshape(weight.shape)

    return write


def microscaled(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return codes, biased exponents, and what they mean, of MXFP4: groups of 32 inputs."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int64) - 2
    codes = nearest(groups / np.exp2(exponents)[..., None], E2M1)
    meant = E2M1[codes] * np.exp2(exponents)[..., None].astype(np.float32)
    return codes, (exponents + 127).astype(np.uint8), torch.from_numpy(meant.reshape(weight.shape))


def mxfp4(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """compressed-tensors' mxfp4-pack-quantized."""
    codes, exponents, meant = microscaled(weight)
    return _tensors(
        {"weight_packed": pairs_of(codes.reshape(weight.shape)), "weight_scale": exponents}
    ), meant


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], dtype=np.float32,
)  # fmt: skip
BNB_FP4 = (
    np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], dtype=np.float32) / 12
)


def bnb(kind: str, *, nested: bool, size: int = 64) -> Writer:
    """bitsandbytes in 4 bits: blocks of the flattened matrix, the first of a pair in the high bits."""
    table = NF4 if kind == "nf4" else BNB_FP4

    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        blocks = weight.reshape(-1, size)
        largest = torch.from_numpy(np.abs(blocks).max(1))
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": size,
            "dtype": "float32",
            "shape": weight.shape,
        }
        tensors = {"weight.absmax": largest, "weight.quant_map": torch.from_numpy(table)}
        if nested:
            curve, offset = torch.linspace(-1, 1, 256) ** 3, float(largest.mean())
            padded = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
            outer = padded.abs().max(1).values
            inner = (padded / outer[:, None])[..., None].sub(curve).abs().argmin(-1).to(torch.uint8)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.absmax": inner.flatten()[: len(largest)], "weight.nested_absmax": outer,
                        "weight.nested_quant_map": curve}  # fmt: skip
            largest = (curve[inner.long()] * outer[:, None]).flatten()[: len(largest)] + offset
        codes = nearest(blocks / largest.numpy()[:, None], table)
        flat = codes.reshape(-1)
        tensors["weight"] = torch.from_numpy(flat[0::2] << 4 | flat[1::2])[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(
            np.frombuffer(text, np.uint8).copy()
        )
        return tensors, (torch.from_numpy(table[codes]) * largest[:, None]).reshape(weight.shape)

    return write


def torchao(bits: int, group: int, *, symmetric: bool = True) -> Writer:
    """torchao's IntxUnpackedToInt8Tensor."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        middle = 2 ** (bits - 1)
        codes, scales, zeros = affine(weight, bits, group, middle if symmetric else None, np.float32)
        rounded = torch.from_numpy(scales).bfloat16()
        whole = {"_weight_qdata": codes - middle, "_weight_zero_point": zeros - middle}
        tensors = {key: torch.from_numpy(array).to(torch.int8) for key, array in whole.items()}
        groups = np.arange(weight.shape[1]) // group
        return tensors | {"_weight_scale": rounded}, meaning(codes, rounded.float().numpy(), zeros, groups)

    return write


def torchao_int4(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """torchao's Int4Tensor, in groups of 64."""
    groups = weight.reshape(len(weight), -1, 64)
    low, high = (torch.from_numpy(edge) for edge in (groups.min(2), groups.max(2)))
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + scales.float() * 8).bfloat16()
    exact, added = scales.float()[..., None], zeros.float()[..., None]
    codes = ((torch.from_numpy(groups) - added) / exact).round().clamp(-8, 7)
    nibbles = codes.view(len(weight), -1).numpy().astype(np.int64) & 15
    tensors = _tensors({"_weight_qdata": pairs_of(nibbles).astype(np.uint8)})
    tensors |= {"_weight_scale": scales.t(), "_weight_zero_point": zeros.t()}
    return tensors, (codes * exact + added).view(len(weight), -1)


def torchao_bytes(write: Writer) -> Writer:
    """Return a writer of torchao's Int8Tensor or Float8Tensor, of one of codes and scales named as elsewhere."""

    def renamed(weight: np.ndarray, rng: np.random.Generator) -> Written:
        tensors, meant = write(weight, rng)
        named = {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"].float()}
        return named, meant

    return renamed


def described(type_: str, block: tuple[int, int], *parts: str, **data: Any) -> Note:
    """Return torchao's metadata of a weight: of blocks of so many outputs and inputs; 0: all."""

    def note(rows: int, columns: int) -> dict[str, Any]:
        data["block_size"] = [block[0] or rows, block[1] or columns]
        return {"_type": type_, "_data": data, "_tensor_data_names": ["qdata", "scale", *parts]}

    return note


def torch_type(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@dataclass(frozen=True)
class Scheme:
    """A scheme, its section of config.json, and its writer."""

    config: dict[str, Any]
    write: Writer
    type: str
    """The name that the loader gives it."""
    note: Note | None = None
    """Describes each weight in the header; None: config.json says all."""


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    values = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True}
    return values | others


def groups_config(layout: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    """compressed-tensors, with one group of modules."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


BYTES_IN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
BNB_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
FP4 = {"num_bits": 4, "type": "float"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {}}, "modules_to_not_convert": None}
ROUNDED = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {}}

SCHEMES = {
    "gptq": Scheme(gptq_config(4, 128), gptq(4, 128), "gptq 4-bit g128"),
    "gptq zeros": Scheme(
        gptq_config(4, 32, sym=False), gptq(4, 32, symmetric=False), "gptq 4-bit g32 with zeros"
    ),
    "gptq v2": Scheme(
        gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, 64, symmetric=False, version=2), "gptq_v2 4-bit g64 with zeros",
    ),
    "gptq order": Scheme(
        gptq_config(4, 32, desc_act=True), gptq(4, 32, order=True),
        "gptq 4-bit g32, its inputs are in the order of their activations",
    ),
    "gptq 8": Scheme(gptq_config(8, 32), gptq(8, 32), "gptq 8-bit g32"),
    "gptq 3": Scheme(gptq_config(3, 32, sym=False), gptq(3, 32, symmetric=False), "gptq 3-bit g32 with zeros"),
    "gptq 2": Scheme(gptq_config(2, 16), gptq(2, 16), "gptq 2-bit g16"),
    "gptq rows": Scheme(gptq_config(4, -1), gptq(4, -1), "gptq 4-bit per row"),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64),
        "awq 4-bit g64 with zeros",
    ),
    "auto-round": Scheme(
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
         "packing_format": "auto_round:auto_gptq"}, gptq(4, 128), "gptq 4-bit g128",
    ),
    "packed": Scheme(
        groups_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128), packed(4, 128),
        "pack-quantized 4-bit g128",
    ),
    "packed zeros": Scheme(
        groups_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        packed(4, 32, symmetric=False), "pack-quantized 4-bit g32 with zeros",
    ),
    "packed rows": Scheme(
        groups_config("pack-quantized", num_bits=8, type="int", strategy="channel"), packed(8, -1),
        "pack-quantized 8-bit per row",
    ),
    "packed 3": Scheme(
        groups_config("pack-quantized", num_bits=3, type="int", strategy="group", group_size=64), packed(3, 64),
        "pack-quantized 3-bit g64",
    ),
    "int8": Scheme(
        groups_config("int-quantized", BYTES_IN, num_bits=8, type="int", strategy="channel"), int8,
        "int-quantized 8-bit per row",
    ),
    "float8 rows": Scheme(
        groups_config("float-quantized", BYTES_IN, num_bits=8, type="float", strategy="channel"), float8(1, 0),
        "float-quantized 8-bit e4m3 per row",
    ),
    "fp8 blocks": Scheme(
        FP8 | {"weight_block_size": [128, 128]}, float8(128, 128, "weight_scale_inv"), "fp8 8-bit e4m3 128x128"
    ),
    "fp8 exponents": Scheme(
        FP8 | {"weight_block_size": [48, 32], "scale_fmt": "ue8m0"},
        float8(48, 32, "weight_scale_inv", torch.float8_e8m0fnu), "fp8 8-bit e4m3 48x32",
    ),
    "fp8": Scheme(FP8, float8(0, 0), "fp8 8-bit e4m3 per tensor"),
    "fbgemm": Scheme({"quant_method": "fbgemm_fp8"}, float8(1, 0), "fp8 8-bit e4m3 per row"),
    "modelopt fp8": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, float8(0, 0), "float-quantized 8-bit e4m3 per tensor"
    ),
    "nvfp4": Scheme(
        groups_config("nvfp4-pack-quantized", **FP4, strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", divides=True), "nvfp4-pack-quantized 4-bit fp4 g16",
    ),
    "modelopt nvfp4": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        nvfp4("weight", "weight_scale_2", divides=False), "nvfp4 4-bit fp4 g16",
    ),
    "mxfp4": Scheme(
        groups_config("mxfp4-pack-quantized", **FP4, strategy="group", group_size=32), mxfp4,
        "mxfp4-pack-quantized 4-bit fp4 g32",
    ),
    "nf4": Scheme(BNB_4 | {"bnb_4bit_quant_type": "nf4"}, bnb("nf4", nested=False), "bnb 4-bit nf4"),
    "nf4 nested": Scheme(BNB_4 | {"bnb_4bit_quant_type": "nf4"}, bnb("nf4", nested=True), "bnb 4-bit nf4"),
    "bnb fp4": Scheme(BNB_4 | {"bnb_4bit_quant_type": "fp4"}, bnb("fp4", nested=False), "bnb 4-bit bnb_fp4"),
    "llm-int8": Scheme(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "llm-int8 8-bit per row"
    ),
    "torchao bytes": Scheme(
        TORCHAO, torchao(4, 32), "torchao 4-bit g32",
        described("IntxUnpackedToInt8Tensor", (1, 32), "zero_point", target_dtype=torch_type("int4")),
    ),
    "torchao zeros": Scheme(
        TORCHAO, torchao(3, 64, symmetric=False), "torchao 3-bit g64",
        described("IntxUnpackedToInt8Tensor", (1, 64), "zero_point", target_dtype=torch_type("int3")),
    ),
    "torchao int8": Scheme(
        TORCHAO, torchao_bytes(int8), "torchao 8-bit per row",
        described("Int8Tensor", (1, 0), act_quant_kwargs=ROUNDED),
    ),
    "torchao float8": Scheme(
        TORCHAO, torchao_bytes(float8(0, 0)), "torchao 8-bit e4m3 per tensor", described("Float8Tensor", (0, 0))
    ),
    "torchao float8 blocks": Scheme(
        TORCHAO, torchao_bytes(float8(64, 32)), "torchao 8-bit e4m3 64x32", described("Float8Tensor", (64, 32))
    ),
    "torchao int4": Scheme(
        TORCHAO, torchao_int4, "torchao-int4 4-bit g64", described("Int4Tensor", (1, 64), "zero_point")
    ),
}  # fmt: skip


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def save_quantized(
    directory: Path,
    scheme: Scheme,
    model: Any = None,
    *,
    wanted: Callable[[str], bool] = is_quantized,
    dtype: torch.dtype = torch.float32,
    keeps_numbers: bool = False,
) -> Any:
    """Write a checkpoint and return transformers' model of the weights that it means.

    Args:
        model: A model of transformers; None: a small Llama.
        wanted: Names of weights that are quantized.
        dtype: Of those that are not.
        keeps_numbers: Whether the model's own weights are written, and not random ones.
    """
    rng = np.random.default_rng(0)
    model = model or LlamaForCausalLM(LlamaConfig(**SIZES))
    model.eval()
    tensors: dict[str, Tensor] = {}
    notes = {"format": "pt"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = (
                parameter.numpy().copy()
                if keeps_numbers
                else (rng.standard_normal(parameter.shape) * 0.3).astype(np.float32)
            )
            if wanted(name):
                parts, meant = scheme.write(drawn, rng)
                tensors |= {
                    f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()
                }
                parameter.copy_(meant)
                if scheme.note is not None:
                    notes[name] = json.dumps(scheme.note(*meant.shape))
            else:
                tensors[name] = torch.from_numpy(drawn).to(dtype)
                parameter.copy_(tensors[name])
    return _save(directory, scheme.config, tensors, model, notes)


def save_experts(directory: Path, scheme: Scheme | None, model: Any) -> Any:
    """Write a mixture, with tensors of each expert, or None: stacked, as GPT-OSS is published; return what it means."""
    rng = np.random.default_rng(0)
    model.eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = (rng.standard_normal(parameter.shape) * 0.3).astype(np.float32)
            if scheme is None and name.endswith(("gate_up_proj", "down_proj")):
                codes, exponents, meant = microscaled(np.swapaxes(drawn, 1, 2))
                tensors |= _tensors({f"{name}_blocks": pairs_of(codes), f"{name}_scales": exponents})
                parameter.copy_(meant.transpose(1, 2))
            elif scheme is not None and ".experts." in name:
                parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                for expert, weights in enumerate(drawn):
                    module = f"{name.rpartition('.')[0]}.{expert}"
                    for part, rows in zip(parts, np.split(weights, len(parts)), strict=True):
                        written, meant = scheme.write(rows, rng)
                        tensors |= {f"{module}.{part}.{key}": tensor for key, tensor in written.items()}
                        start = parts.index(part) * len(rows)
                        parameter[expert, start : start + len(rows)] = meant
            else:
                tensors[name] = torch.from_numpy(drawn)
                parameter.copy_(tensors[name])
    return _save(directory, scheme.config if scheme else {"quant_method": "mxfp4"}, tensors, model)


def _save(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    model: Any,
    notes: dict[str, str] | None = None,
) -> Any:
    directory.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        notes,
    )
    values = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "quantization_config": config,
    }
    (directory / "config.json").write_text(json.dumps(values, default=str))
    return model
