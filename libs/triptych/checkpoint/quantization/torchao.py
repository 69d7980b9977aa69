"""Weights of torchao, which the headers of the safetensors files describe one by one; without torch.

A weight lies in the files as some tensors, and the header's `__metadata__` says as JSON what they are:

    model.layers.0.mlp.up_proj._weight_qdata, …._weight_scale, …._weight_zero_point
    "model.layers.0.mlp.up_proj.weight": {
        "_type": "IntxUnpackedToInt8Tensor",
        "_data": {"block_size": [1, 32], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}, …},
        "_tensor_data_names": ["qdata", "scale", "zero_point"]}

config.json says with which calls they were made, and for which modules. It is not needed to read them, nor does
transformers do so. Source: `flatten_tensor_state_dict` of torchao 0.18, which transformers writes by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.quantization.scheme import SchemeRule, StoredQuantization, WeightScheme
from triptych.checkpoint.safetensors_header import SINGLE_FILE, read_header, read_shard_index
from triptych.errors import FeatureDisabled, ModelError

_CODES = re.compile(r"(.+)\._(\w+)_qdata")
"""The name of a tensor of codes: its module and its parameter."""
_PLAIN = "Tensor"
"""The type of parameters that are not quantized."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of torchao's tensors."""

    layout: str
    parts: tuple[str, ...]
    """Tensors that a weight of this class has."""
    optional: tuple[str, ...] = ()
    """Tensors that it may have."""
    bits: int = 8
    """Bits of a code; 0: its `target_dtype` says them."""
    table: str = ""
    codes_in_byte: int = 1
    block: int = 0
    """Inputs that share a scale, where the class says it and scales lie in blocks; 0: its `block_size` says it."""


_STATIC_INPUTS = ("act_quant_scale", "act_quant_zero_point")
_WHOLE_SCALES = ("per_tensor_scale", "act_per_tensor_scale")
_MX = "MXTensor"
_KINDS = {
    "Int8Tensor": _Kind("torchao", ("qdata", "scale"), ("zero_point", *_STATIC_INPUTS)),
    "IntxUnpackedToInt8Tensor": _Kind("torchao", ("qdata", "scale", "zero_point"), bits=0),
    "Float8Tensor": _Kind("torchao", ("qdata", "scale"), table="e4m3"),
    "Int4Tensor": _Kind("torchao-int4", ("qdata", "scale", "zero_point"), bits=4, codes_in_byte=2),
    "NVFP4Tensor": _Kind("torchao-nvfp4", ("qdata", "scale"), _WHOLE_SCALES, bits=4, table="fp4", block=16),
    f"{_MX} of float4_e2m1fn_x2": _Kind("torchao-mxfp4", ("qdata", "scale"), bits=4, table="fp4", block=32),
    f"{_MX} of float8_e4m3fn": _Kind("torchao-mxfp8", ("qdata", "scale"), table="e4m3", block=32),
}
_OF_INPUTS = ("act_quant_kwargs", "activation_quantization")
"""Attributes that are there if the inputs of the product are rounded to 8 bits."""


@dataclass(slots=True)
class _Headers:
    """The headers of all files of a checkpoint, taken together."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a tensor -> its shape."""
    notes: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Key of the metadata -> the file that has it, and its text."""

    def add(self, path: Path) -> None:
        """Read one file.

        Raises:
            ModelError: It is missing, cut short or no safetensors file.
        """
        header = read_header(path)
        self.shapes |= {name: tensor.shape for name, tensor in header.tensors.items()}
        self.notes |= {key: (path, text) for key, text in header.metadata.items()}


def torchao(section: ConfigFile) -> StoredQuantization:
    """Read the schemes of the weights in the files beside config.json; none where there are no safetensors files."""
    section.pass_over("quant_method", "quant_type", "quant_type_kwargs", "modules_to_not_convert",
                      "include_input_output_embeddings", "untie_embedding_weights")  # fmt: skip
    headers = _Headers()
    for path in _files(section.path.parent):
        headers.add(path)
    rules: list[SchemeRule] = []
    for name, (path, text) in headers.notes.items():
        if "." in name and (scheme := _Note(path, name, text).scheme(headers.shapes)) is not None:
            module = name.rpartition(".")[0]
            rules.append(SchemeRule(f"{re.escape(module)}$", scheme, is_required=True))
    for tensor in headers.shapes:
        codes = _CODES.fullmatch(tensor)
        if codes is not None and f"{codes[1]}.{codes[2]}" not in headers.notes:
            raise ModelError(
                f"{section.path.parent}: {tensor}: no metadata of a header describe {codes[1]}.{codes[2]}, without "
                "which codes of torchao have no meaning; save the model anew with transformers' `save_pretrained`"
            )
    return StoredQuantization("torchao", "", tuple(rules))


def _files(directory: Path) -> list[Path]:
    single = directory / SINGLE_FILE
    names = sorted(set(read_shard_index(directory).values()))
    return [directory / name for name in names] or [path for path in (single,) if path.is_file()]


@dataclass(frozen=True, slots=True)
class _Note:
    """The metadata of one parameter."""

    path: Path
    name: str
    text: str

    def scheme(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightScheme | None:
        """Return the scheme of the weight; None: it is not quantized.

        Raises:
            FeatureDisabled: It is of a class that is not read, or its inputs are multiplied; names it.
            ModelError: A key is missing or odd, or a tensor is not there; names file, parameter and what is expected.
        """
        values = self._object()
        type_ = values.get("_type")
        if type_ == _PLAIN:
            return None
        name = str(type_)
        if name == _MX:
            name += f" of {_dtype(_object_at(values, '_data').get('elem_dtype'))}"
        kind = _KINDS.get(name)
        module, _, parameter = self.name.rpartition(".")
        if kind is None or parameter != "weight":
            self._refuse(
                f"{parameter} is a {name[:100]}",
                f"of torchao's tensors {', '.join(_KINDS)} of 'weight' are read; quantize the model with "
                "Int8WeightOnlyConfig, IntxWeightOnlyConfig, Float8WeightOnlyConfig or a plain Int4WeightOnlyConfig",
            )
        data = values.get("_data")
        if not isinstance(data, dict):
            self._fail("_data", data, "an object")
        self._check_parts(values.get("_tensor_data_names"), name, kind, shapes)
        is_rounded = any(data.get(key) is not None for key in _OF_INPUTS)
        if kind.block:
            self._check_blocks(data, kind.block)
            bits = kind.bits if is_rounded else 16
            return WeightScheme(kind.layout, kind.bits, kind.block, table=kind.table, input_bits=bits)
        *_, rows, columns = 0, 0, *shapes[f"{module}._weight_qdata"]
        columns *= kind.codes_in_byte
        height, width = self._block(data.get("block_size"))
        is_whole = 1 < height >= rows and width >= columns
        return WeightScheme(
            kind.layout,
            kind.bits or self._bits(data.get("target_dtype")),
            group=0 if width >= columns else width,
            group_rows=0 if is_whole else height,
            table=kind.table,
            input_bits=8 if is_rounded else 16,
        )

    def _object(self) -> dict[str, Any]:
        try:
            values = json.loads(self.text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ModelError(
                f"{self.path}: __metadata__: {self.name}: is {self.text[:100]!r}; expected a JSON object, as torchao "
                "writes it"
            )
        return values

    def _check_parts(
        self, found: object, type_: str, kind: _Kind, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check that the tensors of a weight are there, and that all of them are known."""
        names = found if isinstance(found, list) else []
        if "act_pre_scale" in names:
            self._refuse("act_pre_scale", "it multiplies the inputs of the product, which is not built")
        known = {*kind.parts, *kind.optional}
        if not isinstance(found, list) or not set(kind.parts) <= set(map(str, names)) <= known:
            expected = ", ".join(kind.parts) + (" and maybe " + ", ".join(kind.optional)) * bool(
                kind.optional
            )
            self._fail("_tensor_data_names", found, f"{expected} of {type_}")
        for part in names:
            tensor = f"{self.name.rpartition('.')[0]}._weight_{part}"
            if tensor not in shapes:
                raise ModelError(
                    f"{self.path}: __metadata__: {self.name}: names {tensor}, which is in no file; expected "
                    f"{', '.join(names)} of {type_}"
                )

    def _check_blocks(self, data: Mapping[str, Any], block: int) -> None:
        """Check the keys of a class with scales in blocks, of which torchao's configs make these only."""
        if data.get("block_size") != block:
            self._fail("block_size", data.get("block_size"), f"{block}")
        if data.get("is_swizzled_scales") is not True:
            self._fail("is_swizzled_scales", data.get("is_swizzled_scales"), "true")

    def _block(self, found: object) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale."""
        if not isinstance(found, list) or len(found) != 2:
            self._fail("block_size", found, "two numbers, of outputs and inputs that share a scale")
        if not all(type(size) is int and 0 < size < 1 << 31 for size in found):
            self._fail("block_size", found, "two positive numbers")
        return found[0], found[1]

    def _bits(self, found: object) -> int:
        bits = re.fullmatch(r"int([1-8])", _dtype(found))
        if bits is None:
            self._fail("target_dtype", found, "torch.int1 to torch.int8")
        return int(bits[1])

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise FeatureDisabled(f"torchao: {what}", f"{self.path}: {self.name}: {why}")

    def _fail(self, key: str, found: object, expected: str) -> NoReturn:
        raise ModelError(
            f"{self.path}: __metadata__: {self.name}: {key} is {str(found)[:100]}; expected {expected}"
        )


def _object_at(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object of a key; an empty one where there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _dtype(found: object) -> str:
    """Return the name of a dtype as torchao writes it; empty: it is none."""
    return str(found.get("_data")) if isinstance(found, dict) else ""
