"""Checkpoints in safetensors files with weights that another tool has quantized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from triptych.checkpoint.quantization.scheme import SchemeRule, StoredQuantization
from triptych.errors import ModelError
from triptych_kernels.weights.coded import CodedRows
from triptych_kernels.weights.formats import TABLES, QuantizedFormat, Table
from triptych_services.worker.layers.quantization import CodedPart, CodedTensor
from triptych_services.worker.loader.base import Checkpoint, StoredTensor
from triptych_services.worker.loader.layouts import FLOATS, LAYOUTS, CodedForm, CodedModule, Layout
from triptych_services.worker.loader.safetensors import SafetensorsCheckpoint
from triptych_services.worker.loader.torchao import TORCHAO_LAYOUTS

_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")
_MAX_STATE_BYTES = 1 << 16  # of the JSON beside codes of bitsandbytes, which is about 200


class BlockedLayout(Layout):
    """bitsandbytes in 4 bits: the matrix as one row of pairs, the first in its high bits, in blocks with a scale each.

    The scales may be codes as well, of 8 bits and a table of their own, in blocks with a scale each.
    """

    main = "weight"
    types = ("U8", "BF16", "F16", "F32")
    others = (
        "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4",
    )  # fmt: skip

    def describe(self, module: CodedModule) -> CodedForm:
        state = self._state(module)
        rows, columns = self._shape(module, state)
        size = self._integer(module, state, "blocksize")
        stored = module.check(self.main, self.types)
        if stored.size * 2 != rows * columns + (rows * columns) % 2:
            module.fail(
                self.main, f"has {stored.size} bytes", f"{rows * columns / 2:g} for {[rows, columns]}"
            )
        num_blocks = -(-rows * columns // size)
        is_nested = module.has("weight.nested_absmax")
        module.check("weight.absmax", ("U8",) if is_nested else ("F32",), (num_blocks,))
        if is_nested:
            nested = self._integer(module, state, "nested_blocksize")
            module.check("weight.nested_absmax", ("F32",), (-(-num_blocks // nested),))
            module.check("weight.nested_quant_map", ("F32",), (256,))
        module.check("weight.quant_map", ("F32",), (16,))
        table: Table = "nf4" if module.scheme.table == "nf4" else "bnb_fp4"
        found, known = module.view("weight.quant_map"), torch.tensor(TABLES[table])
        if not torch.allclose(found, known, rtol=0, atol=1e-6):
            module.fail("weight.quant_map", f"is {found.tolist()}", f"the values of {table}")
        group, remark = (
            (size, "") if columns % size == 0 else (1, f"blocks of {size} do not divide its inputs")
        )
        if group == columns:
            group = 0
        return CodedForm((rows, columns), QuantizedFormat(4, "none", group, table, "float32"), remark)

    def read(self, module: CodedModule, form: CodedForm, part: CodedPart, expert: int = 0) -> CodedRows:
        columns, state = form.shape[1], self._state(module)
        size = self._integer(module, state, "blocksize")
        pairs = module.view(self.main).reshape(-1).view(torch.uint8)
        first, last = part.row * columns, (part.row + part.rows) * columns
        pairs = pairs[first // 2 : -(-last // 2)]
        codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten()[first % 2 :][: last - first]
        codes = codes.view(part.rows, columns)[:, part.column : part.column + part.columns]
        rows = torch.arange(part.row, part.row + part.rows)[:, None] * columns
        inputs = torch.arange(part.column, part.column + part.columns, part.group or columns)
        blocks = (rows + inputs) // size
        scales = module.scales("weight.absmax", self._scales(module, state, blocks))
        return CodedRows(replace(form.format, group=part.group), codes, scales)

    def _scales(self, module: CodedModule, state: Mapping[str, Any], blocks: Tensor) -> Tensor:
        """Return the scales of some blocks, float32."""
        scales = module.view("weight.absmax")[blocks]
        if not module.has("weight.nested_absmax"):
            return scales
        outer = module.view("weight.nested_absmax")[
            blocks // self._integer(module, state, "nested_blocksize")
        ]
        offset = state.get("nested_offset")
        if type(offset) not in (int, float):
            self._fail(module, "nested_offset", offset)
        return module.view("weight.nested_quant_map")[scales.long()] * outer + float(str(offset))

    def _state(self, module: CodedModule) -> Mapping[str, Any]:
        name = self._state_part(module)
        stored = module.check(name, ("U8",))
        if stored.size > _MAX_STATE_BYTES:
            module.fail(name, f"has {stored.size} bytes", f"at most {_MAX_STATE_BYTES}")
        try:
            state = json.loads(module.view(name).numpy().tobytes())
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            module.fail(name, "is no JSON object", "one")
        return state

    def _state_part(self, module: CodedModule) -> str:
        return f"weight.quant_state.bitsandbytes__{module.scheme.table.removeprefix('bnb_')}"

    def _shape(self, module: CodedModule, state: Mapping[str, Any]) -> tuple[int, int]:
        shape = state.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(n) is int and 0 < n < 1 << 31 for n in shape)
        ):
            self._fail(module, "shape", shape)
        return shape[0], shape[1]

    def _integer(self, module: CodedModule, state: Mapping[str, Any], key: str) -> int:
        value = state.get(key)
        if type(value) is not int or not 0 < value <= 1 << 20:
            self._fail(module, key, value)
        return value

    def _fail(self, module: CodedModule, key: str, value: object) -> NoReturn:
        module.fail(self._state_part(module), f"has {key} = {str(value)[:100]}", f"a valid {key}")


_ALL_LAYOUTS: Mapping[str, Layout] = {**LAYOUTS, **TORCHAO_LAYOUTS, "bnb": BlockedLayout()}


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantized weight, and how it is read."""

    module: CodedModule
    layout: Layout
    form: CodedForm


class QuantizedCheckpoint(Checkpoint):
    """The weights of such files, under the names that they have in a checkpoint without quantization.

    A weight is one tensor here, however many its codes and scales are in. What is not quantized is read as it is.
    """

    def __init__(
        self, directory: Path, quantization: StoredQuantization, device: torch.device | None = None
    ) -> None:
        """Open the files and check all that their headers tell.

        Raises:
            ModelError: As of `SafetensorsCheckpoint`; or a tensor of a quantized weight is missing, left over, or of
                another type or shape; or a module has no scheme, or a scheme no module. Names file and tensor.
        """
        self._files = SafetensorsCheckpoint(directory, device, has_codes=True)
        self._quantization = quantization
        self.file_name_to_size = self._files.file_name_to_size
        self._layouts = {name: self._layout(name) for name in quantization.layouts}
        self._weights: dict[str, _Weight] = {}
        self.kv_scales: list[str] = []
        """Names of scales of keys and values."""
        modules, plain = self._group()
        self._describe(modules, plain)
        self.tensors = {name: self._stored(weight) for name, weight in self._weights.items()} | {
            name: self._files.tensors[name] for name in plain
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.read_part(name, dtype, 0, 0, self.tensors[name].shape[0])

    def read_part(self, name: str, dtype: torch.dtype, dim: int, start: int, length: int) -> Tensor:
        if name not in self._weights:
            return self._files.read_part(name, dtype, dim, start, length)
        shape, format = self.tensors[name].shape, self.tensors[name].format
        assert format is not None, "quantized weights have one"

        def matrix(expert: int) -> CodedTensor:
            rows, columns = shape[-2:]
            return CodedTensor(
                name, format, (rows, columns), lambda part: self.read_codes(name, part, expert), dtype, set()
            )

        if len(shape) == 2:
            return matrix(0).narrow(dim, start, length)
        experts = range(start, start + length) if dim == 0 else range(shape[0])
        found = torch.stack([matrix(expert).narrow(0, 0, shape[1]) for expert in experts])
        return found if dim == 0 else found.narrow(dim, start, length)

    def read_codes(self, name: str, part: CodedPart, expert: int = 0) -> CodedRows:
        weight = self._weights[name]
        return weight.layout.read(weight.module, weight.form, part, expert)

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        if name not in self._weights:
            return self._files.read_bytes(name, start, length)
        found = b""
        for part in self._weights[name].module.parts.values():
            size = self._files.tensors[part].size
            if start < size and length:
                found += (own := self._files.read_bytes(part, start, min(length, size - start)))
                start, length = 0, length - len(own)
            else:
                start -= size
        return found

    def release(self, name: str) -> None:
        for part in self._parts(name):
            self._files.release(part)

    def read_ahead(self, name: str) -> None:
        for part in self._parts(name):
            self._files.read_ahead(part)

    def _parts(self, name: str) -> Iterable[str]:
        """Return the names of the tensors of the files that a tensor is made of."""
        weight = self._weights.get(name)
        return [name] if weight is None else weight.module.parts.values()

    def _layout(self, name: str) -> Layout:
        if name not in _ALL_LAYOUTS:
            raise ModelError(
                f"{self._quantization.source}: the layout {name} is not known, only {', '.join(_ALL_LAYOUTS)}"
            )
        return _ALL_LAYOUTS[name]

    def _group(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Return the tensors of each module that may be quantized, by their endings, and the names of all others."""
        endings = {ending for layout in self._layouts.values() for ending in layout.endings}
        by_length = sorted(endings, key=len, reverse=True)
        modules: dict[str, dict[str, str]] = {}
        plain: list[str] = []
        for name in self._files.tensors:
            if name.rpartition(".")[2] in _KV_SCALES:
                self._add_kv_scale(name)
                continue
            ending = next((e for e in by_length if _ends(name, e)), None)
            if ending is None:
                self._check_plain(name)
                plain.append(name)
            else:
                modules.setdefault(name[: -len(ending)].removesuffix("."), {})[ending] = name
        return modules, plain

    def _add_kv_scale(self, name: str) -> None:
        view = self._files.view(name)
        if (
            not view.is_floating_point()
            or view.numel() > 1 << 16
            or not bool(torch.isfinite(view.float()).all())
        ):
            raise ModelError(f"{self._files.file_of(name)}: {name}: must be a scale of keys and values")
        self.kv_scales.append(name)

    def _describe(self, modules: Mapping[str, Mapping[str, str]], plain: list[str]) -> None:
        """Describe the quantized weights; modules that are not quantized go to `plain`."""
        find, used = self._quantization.rule_finder(), set[SchemeRule]()
        for name, parts in modules.items():
            layouts = [name for name, layout in self._layouts.items() if self._has(layout, parts)]
            rule = find(name)
            if not layouts:
                plain += self._unquantized(name, parts)
                continue
            file = self._files.file_of(next(iter(parts.values())))
            if rule is None or rule.scheme is None:
                raise ModelError(
                    f"{file}: {name}: is stored as {' or '.join(layouts)}, but {self._quantization.source} says that "
                    "it is not quantized"
                )
            if rule.scheme.layout not in layouts:
                raise ModelError(
                    f"{file}: {name}: is stored as {' or '.join(layouts)}, but {self._quantization.source} says "
                    f"{rule.scheme}"
                )
            used.add(rule)
            self._add(CodedModule(name, rule.scheme, parts, self._files), plain)
        unused = [rule for rule in self._quantization.rules if rule.is_required and rule not in used]
        if unused or not used:
            what = f"{unused[0].pattern!r} ({unused[0].scheme})" if unused else self._quantization.method
            raise ModelError(
                f"{self._quantization.source}: says {what}, but no module of the files is stored so; compare "
                "config.json with the weights"
            )

    def _add(self, module: CodedModule, plain: list[str]) -> None:
        layout = self._layouts[module.scheme.layout]
        known = {ending: name for ending, name in module.parts.items() if ending in layout.endings}
        if left := [name for ending, name in module.parts.items() if ending not in known]:
            raise ModelError(
                f"{self._files.file_of(left[0])}: {left[0]}: does not belong to a weight stored as {module.scheme}"
            )
        name = f"{module.name}.{layout.output}" if layout.output else module.name
        if name in plain:
            raise ModelError(
                f"{self._files.file_of(name)}: {name}: is there in two forms, plain and {module.scheme}"
            )
        module = replace(module, parts={layout.main: known[layout.main]} | known)
        self._weights[name] = _Weight(module, layout, layout.describe(module))

    def _has(self, layout: Layout, parts: Mapping[str, str]) -> bool:
        """Return whether a module has the codes of a layout."""
        if layout.main not in parts:
            return False
        if layout.main != "weight":
            return True
        is_coded = isinstance(layout, BlockedLayout)
        return (
            "weight.absmax" in parts
            if is_coded
            else self._files.tensors[parts["weight"]].type in layout.types
        )

    def _unquantized(self, name: str, parts: Mapping[str, str]) -> list[str]:
        """Return the tensors of a module without codes, which may only be its weight.

        Raises:
            ModelError: There are others, or the weight is in a form that needs a scale.
        """
        left = [part for ending, part in parts.items() if ending != "weight"]
        if left:
            raise ModelError(
                f"{self._files.file_of(left[0])}: {left[0]}: there are no codes that it belongs to; expected "
                f"{' or '.join(sorted({layout.main for layout in self._layouts.values()}))} beside it"
            )
        self._check_plain(parts["weight"])
        return [parts["weight"]]

    def _check_plain(self, name: str) -> None:
        if self._files.tensors[name].type not in FLOATS:
            raise ModelError(
                f"{self._files.file_of(name)}: {name}: is {self._files.tensors[name].type}, which weights stored as "
                f"{self._quantization.method} do not need"
            )

    def _stored(self, weight: _Weight) -> StoredTensor:
        size = sum(self._files.tensors[part].size for part in weight.module.parts.values())
        order = f", {weight.form.remark}" if weight.form.remark else ""
        return StoredTensor(weight.form.shape, f"{weight.module.scheme}{order}", size, weight.form.format)


def _ends(name: str, ending: str) -> bool:
    return name.endswith(ending if ending.startswith("_") else f".{ending}")
