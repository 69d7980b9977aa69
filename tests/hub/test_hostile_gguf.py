"""A .gguf file is converted or refused in one line, whatever its bytes are: mutations of a good one, from seeds."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
from gguf import GGUFReader

from tests.checkpoint.gguf_files import byte_level_vocabulary, write_gguf
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.gguf.header import TensorInfo, read_header
from triptych.errors import ModelError
from triptych.hub import resolve_model

pytestmark = pytest.mark.usefixtures("cache")

NUM_MUTATIONS = 150
ODD_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)


def convert(path: Path) -> None:
    """Convert a file, reading what came of it. Raises ModelError: The file is no good."""
    read_architecture(resolve_model(str(path), progress=False))


def refusal_of(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        convert(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def replaced(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old), "nothing to replace"
    path.write_bytes(data.replace(old, new))
    return path


def test_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = replaced(write_gguf(tmp_path / "model.gguf"), b"<|start|>", b"<|st\xff\xfft|>")
    assert "tokenizer.ggml.tokens is no UTF-8: " in refusal_of(path)


def test_merges_of_tokens_that_there_are_not_are_refused(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(["a b", "ab c"])
    vocabulary["merges"].append("ab nothing")
    path = write_gguf(tmp_path / "model.gguf", vocabulary=vocabulary)
    assert "gguf: tokenizer.ggml: cannot be used: " in refusal_of(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.key_length", "x"),
        ("llama.rope.scaling.factor", "x"),
        ("tokenizer.ggml.eot_token_id", "x"),
        ("tokenizer.ggml.padding_token_id", 4_000_000_000),
        ("split.count", "x"),
        ("llama.attention.value_length", 0.5),
    ],
)
def test_key_of_another_type_is_refused(tmp_path: Path, key: str, value: str | float) -> None:
    extra = {key: value} | ({"llama.rope.scaling.type": "linear"} if "rope" in key else {})
    assert refusal_of(write_gguf(tmp_path / "model.gguf", extra=extra))


def mutations(data: bytes, num_header_bytes: int, seed: int, number: int = NUM_MUTATIONS) -> Iterator[bytes]:
    random = Random(seed)
    for _ in range(number):
        mutated = bytearray(data)
        for _ in range(random.choice([1, 1, 1, 2, 4, 8])):
            at, kind = random.randrange(min(num_header_bytes, len(mutated))), random.random()
            if kind < 0.35:
                mutated[at] = random.randrange(256)
            elif kind < 0.6:
                mutated[at : at + 8] = struct.pack("<Q", random.choice(ODD_NUMBERS))
            elif kind < 0.8:
                mutated[at : at + 4] = struct.pack("<I", random.choice(ODD_NUMBERS) & 0xFFFFFFFF)
            elif kind < 0.9:
                del mutated[at : at + random.randrange(1, 64)]
            else:
                mutated[at:at] = random.randbytes(random.randrange(1, 32))
        yield bytes(mutated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_file_is_converted_or_refused(tmp_path: Path, cache: Path, seed: int) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    refusals: list[str] = []
    for number, mutated in enumerate(mutations(data, data.index(b"blk.0."), seed)):
        path.write_bytes(mutated)
        try:
            convert(path)
        except ModelError as error:
            refusals.append(str(error))
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
        shutil.rmtree(cache, ignore_errors=True)
    assert 0 < len(refusals) < NUM_MUTATIONS
    assert [text for text in refusals if "\n" in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_header_is_that_of_the_gguf_package_or_refused(tmp_path: Path, seed: int) -> None:
    path, mutated_path = write_gguf(tmp_path / "model.gguf", hidden_size=32), tmp_path / "mutated.gguf"
    data = path.read_bytes()
    num_read, num_mutations, refusals = 0, 2500, list[str]()
    tracemalloc.start()
    try:
        num_header_bytes = data.rindex(b"output_norm.weight") + 64
        for number, mutated in enumerate(mutations(data, num_header_bytes, seed, num_mutations)):
            mutated_path.write_bytes(mutated)
            try:
                header = read_header(mutated_path)
            except ModelError as error:
                refusals.append(str(error))
                continue
            except Exception as error:
                raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
            num_read += 1
            if num_read % 10 == 0:  # the package takes a hundred times as long
                compare(header.tensors, GGUFReader(mutated_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < num_read < num_mutations
    assert [text for text in refusals if "\n" in text] == []
    assert peak < 100 * len(data)


def compare(tensors: Mapping[str, TensorInfo], reader: GGUFReader) -> None:
    expected = {
        tensor.name: (tensor.tensor_type.name, tuple(map(int, tensor.shape[::-1])), tensor.data_offset)
        for tensor in reader.tensors
    }
    assert {name: (info.type.name, info.shape, info.offset) for name, info in tensors.items()} == expected
