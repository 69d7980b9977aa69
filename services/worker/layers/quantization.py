"""In which form a linear layer's weight is held, by what the operator asked for and what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.config.resolved import ResolvedConfig
from triptych_kernels.cpu.quantized_weight import BLOCK_FORMATS, QuantizedFormat, common_format

_QUANTIZED_TO = {
    "q4": QuantizedFormat(4, is_affine=True),  # each group as a Q4_0 or a Q4_1, whichever is nearer
    "q8": QuantizedFormat(8, is_affine=False),
}
_HEAD_FORMAT = QuantizedFormat(8, is_affine=False)  # nothing after it evens out its errors


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """A matrix as its file holds it, for weights that keep the blocks."""

    type: str
    """One of `triptych_kernels.cpu.quantized_weight.BLOCK_FORMATS`."""
    data: Tensor
    """[rows, bytes of a row] uint8, rows in Hugging Face's order; a view of the file, to be copied at once."""
    shape: tuple[int, int]
    dequantize: Callable[[], Tensor]
    """[rows, columns] floating point, for whoever cannot keep them."""


def choose_format(
    sources: Sequence[str], *, is_head: bool = False, config: ResolvedConfig
) -> QuantizedFormat | None:
    """The format for a weight made of these tensors of the checkpoint, the smallest that loses nothing.

    Args:
        is_head: it computes logits; what of it is not in blocks is quantized to 8 bits.
    Returns:
        None: in `config.dtype`, not quantized.
    """
    if config.quantization == "none":
        return None
    otherwise = _HEAD_FORMAT if is_head else _QUANTIZED_TO[config.quantization]
    formats = [
        BLOCK_FORMATS[type] if keeps_blocks(type, config) else otherwise
        for type in (config.tensor_types.get(name, "") for name in sources)
    ]
    return common_format(formats)


def keeps_blocks(type: str, config: ResolvedConfig) -> bool:
    """Whether linear weights keep the blocks of tensors stored in this form: those of 4 bits under q8 as well,
    since 8 bits could only say the same."""
    return config.quantization != "none" and type in BLOCK_FORMATS
