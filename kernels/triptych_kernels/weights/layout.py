"""The sizes of the panels that coded.h draws, and how it numbers their forms."""

from __future__ import annotations

from dataclasses import dataclass

from triptych_kernels.weights.formats import GROUP_SIZE, SUPER_GROUP_SIZE, QuantizedFormat

_TABLES = {"": 0, "fp4": 1, "iq4_nl": 2, "nf4": 3, "bnb_fp4": 4, "e4m3": 5}
_SCALES = {"float16": 0, "bfloat16": 1, "float32": 2, "e8m0": 3, "e4m3": 4, "k": 5}
_OFFSETS = {"none": 0, "minimum": 1, "zero": 2}
_BYTES_OF_SCALES = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1, "e4m3": 1, "k": 2}


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """The sizes of coded.h for a format and a number of inputs."""

    format: QuantizedFormat
    in_features: int

    @property
    def bits(self) -> int:
        """Bits of a code in memory: 4, 6 or 8."""
        return next(bits for bits in (4, 6, 8) if self.format.bits <= bits)

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.format.group or self.in_features

    @property
    def block(self) -> int:
        """Number of inputs of a block."""
        return SUPER_GROUP_SIZE if self.format.scale == "k" else max(self.group, GROUP_SIZE)

    @property
    def number(self) -> int:
        """The form as `CodedForm` reads it."""
        format = self.format
        return (
            self.bits
            | _TABLES[format.table] << 4
            | _SCALES[format.scale] << 8
            | _OFFSETS[format.offset] << 12
            | self.group << 16
        )

    @property
    def output_bytes(self) -> int:
        """Bytes of one output."""
        format, size = self.format, self.in_features
        scale_bytes = _BYTES_OF_SCALES[format.scale]
        offset_bytes = {"none": 0, "minimum": scale_bytes, "zero": 1}[format.offset]
        if format.scale == "k":
            levels = size // self.group * (2 if format.offset == "minimum" else 1)
            return self.codes_bytes + levels + self.num_blocks * (scale_bytes + offset_bytes)
        factor_bytes = 4 if format.scale == "e4m3" else 0
        return self.codes_bytes + factor_bytes + self.num_scales * (scale_bytes + offset_bytes)

    @property
    def codes_bytes(self) -> int:
        return self.in_features * self.bits // 8

    @property
    def num_blocks(self) -> int:
        return -(-self.in_features // self.block)

    @property
    def num_scales(self) -> int:
        return -(-self.in_features // self.group)
