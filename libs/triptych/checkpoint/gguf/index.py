"""gguf_index.json: the place of each tensor in a .gguf file, so that loading parses no GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.errors import ModelError

GGUF_INDEX_FILE = "gguf_index.json"
"""Present beside config.json if the weights are in .gguf files."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, under the name that it has in our layers."""

    name: str
    """`model.layers.0.self_attn.q_proj.weight`; of several projections in one tensor, see `layout.file_names`."""
    gguf_name: str
    """`blk.0.attn_q.weight`"""
    type: str
    """GGML type: F32, Q4_1, …; kept even if it cannot be read: the loader refuses it by name."""
    shape: tuple[int, ...]
    """As our layers have it: [rows, columns], columns being the axis that blocks run along."""
    offset: int
    """In bytes from the start of the file."""
    size: int
    """In bytes."""
    permuted_heads: int = 0
    """> 0: a query or key projection of that many heads, with rows that GGUF's llama keeps in another order,
    for its own form of rotary embedding; the loader undoes it. 0: as in Hugging Face."""
    spread_heads: tuple[int, int, int] | None = None
    """[heads of keys, heads of values for each of them, elements]: the heads of values of a recurrent layer, of which
    the file has the first ones of all keys, then the second ones, …; the loader puts those of a key together. They are
    the last rows, or the columns of the output projection. None: as in Hugging Face."""
    change: str = ""
    """Function of the checkpoint's numbers that the file has, which the loader undoes too: plus_one, minus_exp, or
    empty: they are the same."""
    part: int = 0
    """Number of the file that has it."""
    number: float | None = None
    """The only number of a tensor that the file has in its metadata; None: it is at `offset`."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One of the files that hold the tensors."""

    file: str
    """Path of the .gguf file: absolute, or relative to the index's directory."""
    file_size: int
    """In bytes."""
    mtime_ns: int | None
    """Time of the file's last change; None where its content is known by checksum."""


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """All tensors of a model, under our names."""

    files: tuple[GgufFile, ...]
    """More than one where the model was split."""
    tensors: tuple[GgufTensor, ...]

    def write(self, directory: Path) -> None:
        """Write `directory/gguf_index.json`."""
        (directory / GGUF_INDEX_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, directory: Path) -> GgufIndex:
        """Read `directory/gguf_index.json`.

        Raises:
            ModelError: it is missing or not what `write` writes.
        """
        path = directory / GGUF_INDEX_FILE
        try:
            values = json.loads(path.read_text())
            tensors = [_read_tensor(entry) for entry in values.pop("tensors")]
            files = [GgufFile(**file) for file in values.pop("files")]
            return cls(files=tuple(files), tensors=tuple(tensors), **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path}: cannot be read: {error!r}; delete {directory} to convert anew"
            ) from error


def _read_tensor(entry: dict[str, Any]) -> GgufTensor:
    spread = entry.get("spread_heads")
    return GgufTensor(
        **entry | {"shape": tuple(entry["shape"]), "spread_heads": None if spread is None else tuple(spread)}
    )
