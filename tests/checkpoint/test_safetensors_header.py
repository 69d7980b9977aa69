"""Headers of .safetensors files are those that the library reads, and others are refused by what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from triptych.checkpoint.safetensors_header import read_header, read_shard_index
from triptych.errors import ModelError

TENSORS = {
    "a": np.ones((3, 5), np.float32),
    "empty": np.ones((0, 4), np.float16),
    "b": np.ones((), np.int64),
    "c": np.ones(7, bool),
}
ODD = (-1, 1, 3, 60, 67, 1 << 63, 1 << 80, 0.5, True, "x", None, [], {}, "F32", "I8", "F4", [3], [60, 68, 70])


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file, and what follows it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: object, numbers: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


def test_header_is_that_of_the_library(path: Path) -> None:
    header = read_header(path)
    assert (header.file_size, header.metadata) == (path.stat().st_size, {"format": "pt"})
    with safe_open(path, framework="numpy") as file:
        assert list(header.tensors) == file.offset_keys()
        for name, tensor in header.tensors.items():
            view = file.get_slice(name)
            assert (tensor.type, list(tensor.shape)) == (view.get_dtype(), view.get_shape())
            assert tensor.size == TENSORS[name].nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"shape": [3, 4]}}, r"a: has 60 bytes; expected 12 times 32 bits, of \[3, 4\]"),
        ({"a": {"shape": [-3, -5]}}, r"a: shape is \[-3, -5\]; expected a list of sizes"),
        ({"a": {"dtype": "F31"}}, "a: dtype is 'F31'; expected one of BOOL, "),
        ({"a": {"dtype": "F4"}}, "a: has 60 bytes; expected 15 times 4 bits"),
        ({"a": {"data_offsets": [68, 8]}}, "a: has -60 bytes"),
        ({"a": {"data_offsets": [9, 69]}}, "a: begins at byte 9; expected 8, where the one before it ends"),
        ({"a": {"data_offsets": [0, 60]}}, "a: begins at byte 0; expected 8, where"),
        (
            {"a": {"data_offsets": 3}},
            "a: data_offsets are 3; expected the first byte and that after the last",
        ),
        ({"a": None}, "a: dtype is None"),
        ({"__metadata__": {"format": 3}}, "__metadata__: is {'format': 3}; expected an object of texts"),
    ],
)
def test_contradiction_is_named(path: Path, change: dict[str, Any], message: str) -> None:
    header, numbers = parts_of(path)
    assert header["a"]["data_offsets"] == [8, 68]
    for name, values in change.items():
        header[name] = values and header[name] | values
    write(path, header, numbers)
    with pytest.raises(ModelError, match=rf"weight file of \d+ bytes cannot be read: .*({message})"):
        read_header(path)


def test_header_that_is_none_is_named(path: Path) -> None:
    header, numbers = parts_of(path)
    entry = json.dumps(header["a"])
    for text, message in (
        (b"[]", r"its header is \[\]; expected an object"),
        (b"[" * 100_000, "recursion"),
        (b"{\xff}", "codec can't decode"),
        (f'{{"a": {entry}, "a": {entry}}}'.encode(), "its header has 'a' twice; expected it once"),
        (b"{}", r"describes 0 bytes of tensors; expected 75, which follow it"),
    ):
        write(path, text, numbers)
        with pytest.raises(ModelError, match=message):
            read_header(path)
    write(path, header, numbers)
    with pytest.raises(ModelError, match=r"its header has \d+ bytes; expected 2 to 100; "):
        read_header(path, max_bytes=100)
    for content in (b"", b"12345678", (1 << 40).to_bytes(8, "little") + numbers):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"its header has \d+ bytes; expected 2 to "):
            read_header(path)
    path.unlink()
    with pytest.raises(ModelError, match="weight file cannot be read: No such file"):
        read_header(path)


def test_mutated_header_is_read_where_the_library_reads_it(path: Path) -> None:
    whole, random = path.read_bytes(), Random(0)
    outcomes = set[str]()
    for number in range(150):
        if number % 2:
            header, numbers = parts_of(path)
            entry = header[random.choice([name for name in header if name != "__metadata__"])]
            key = random.choice(list(entry))
            if isinstance(entry[key], list) and entry[key] and random.random() < 0.7:
                entry[key][random.randrange(len(entry[key]))] = random.choice(ODD)
            else:
                entry[key] = random.choice(ODD)
            write(path.with_name("mutated"), header, numbers)
        else:
            mutated = bytearray(whole)
            mutated[random.randrange(8 + len(whole) - 75 - 8)] = random.choice(b'0123456789,:"[]{}_axq \xff')
            path.with_name("mutated").write_bytes(mutated)
        outcomes.add(compare_with_library(path.with_name("mutated")))
    assert outcomes == {"read", "refused"}


def compare_with_library(path: Path) -> str:
    """Return whether a file is read or refused, which the library must do too."""
    expected = found = None
    reason = ""
    try:
        with safe_open(path, framework="numpy") as file:
            expected = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    except (SafetensorError, OverflowError):
        pass
    try:
        found = {name: list(tensor.shape) for name, tensor in read_header(path).tensors.items()}
    except ModelError as error:
        reason = str(error)
    # the library reads the last of two tensors of a name
    assert found == expected or "twice" in reason, reason
    return "refused" if found is None else "read"


def test_index_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    assert read_shard_index(tmp_path) == {}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "../two.safetensors"}}')
    with pytest.raises(ModelError, match=r"names '../two.safetensors', which is outside"):
        read_shard_index(tmp_path)
    index.write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"index\.json: cannot be read: RecursionError"):
        read_shard_index(tmp_path)
