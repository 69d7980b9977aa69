"""A safetensors file is read or refused by a ModelError, whatever its header says: mutations from seeds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from triptych.errors import ModelError
from triptych_services.worker.loader.load import open_checkpoint

NUM_MUTATIONS = 400
ODD = (
    0,
    -1,
    1,
    3,
    7,
    1 << 31,
    1 << 62,
    (1 << 64) - 1,
    1 << 80,
    0.5,
    "x",
    None,
    [],
    {},
    "F32",
    "BF16",
    "F8_E4M3",
    "I64",
)


def mutated(data: bytes, random: Random) -> bytes:
    """Change the header's length, its bytes, or a value in it."""
    (length,) = struct.unpack("<Q", data[:8])
    kind = random.random()
    if kind < 0.2:
        return (
            struct.pack("<Q", random.choice([n for n in ODD if type(n) is int and 0 <= n < 1 << 64]))
            + data[8:]
        )
    if kind < 0.5:
        changed = bytearray(data)
        for _ in range(random.choice((1, 2, 8))):
            changed[random.randrange(8 + length)] = random.randrange(256)
        return bytes(changed)
    header = json.loads(data[8 : 8 + length])
    entry = header[random.choice([name for name in header if name != "__metadata__"])]
    field = random.choice(list(entry))
    if isinstance(entry[field], list) and entry[field] and random.random() < 0.7:
        entry[field][random.randrange(len(entry[field]))] = random.choice(ODD)
    else:
        entry[field] = random.choice(ODD)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + length :]


def read_all(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    for name in checkpoint.tensors:
        checkpoint.read(name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_mutated_header_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    path, random = tmp_path / "model.safetensors", Random(seed)
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}, path)
    data = path.read_bytes()
    outcomes = set[str]()
    for number in range(NUM_MUTATIONS):
        path.write_bytes(mutated(data, random))
        try:
            read_all(tmp_path)
        except ModelError:
            outcomes.add("refused")
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
        else:
            outcomes.add("read")
    assert outcomes == {"read", "refused"}
