"""A .gguf file's metadata becomes the files of a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from transformers import LlamaConfig

from tests.checkpoint.gguf_files import (
    byte_level_vocabulary,
    llama3_rope_factors,
    random_weights,
    sentencepiece_vocabulary,
    write_gguf,
)
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.gguf.index import GgufIndex
from triptych.checkpoint.pooling import read_pooling
from triptych.errors import ModelError
from triptych.hub import resolve_model
from triptych.types.pooling import PoolingKind
from triptych_services.worker.loader.load import open_checkpoint

pytestmark = pytest.mark.usefixtures("cache")


def convert(path: Path, **options: Any) -> Path:
    return resolve_model(str(write_gguf(path, **options)), progress=False)


def test_the_config_is_that_of_the_model(tmp_path: Path) -> None:
    directory = convert(tmp_path / "model.gguf", num_layers=2, num_heads=4, num_kv_heads=2)
    architecture = read_architecture(directory)
    oracle = LlamaConfig.from_pretrained(directory)
    assert architecture.name == oracle.architectures[0] == "LlamaForCausalLM"
    assert architecture.num_layers == oracle.num_hidden_layers == 2
    assert architecture.num_heads == oracle.num_attention_heads == 4
    assert architecture.num_kv_heads == oracle.num_key_value_heads == 2
    assert architecture.head_dim == oracle.head_dim == 16
    assert architecture.block.norm.eps == oracle.rms_norm_eps == 1e-5
    assert architecture.vocab_size == oracle.vocab_size == 261
    assert architecture.tie_word_embeddings
    assert architecture.is_gguf
    assert architecture.dtype == "bfloat16"
    assert architecture.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("number", "kind"), [(1, PoolingKind.MEAN), (2, PoolingKind.FIRST), (3, PoolingKind.LAST)]
)
def test_the_file_says_which_states_become_a_vector(number: int, kind: PoolingKind, tmp_path: Path) -> None:
    directory = convert(tmp_path / "model.gguf", extra={"llama.pooling_type": number})
    pooling = read_pooling(directory)
    assert (pooling.kind, pooling.normalize, pooling.is_stated) == (kind, True, True)


def test_an_output_matrix_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    weights["output.weight"] = weights["token_embd.weight"]
    directory = convert(tmp_path / "model.gguf", weights=weights)
    assert not read_architecture(directory).tie_word_embeddings
    assert "lm_head.weight" in {tensor.name for tensor in GgufIndex.read(directory).tensors}


def test_the_index_finds_every_tensor_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    index = GgufIndex.read(convert(path, quantization=GGMLQuantizationType.Q4_0))
    data = path.read_bytes()
    (file,) = index.files
    assert file.file == str(path)
    assert file.file_size == len(data)
    oracle = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert {tensor.gguf_name for tensor in index.tensors} == set(oracle)
    for tensor in index.tensors:
        expected = oracle[tensor.gguf_name]
        assert data[tensor.offset : tensor.offset + tensor.size] == expected.data.tobytes()
        assert tensor.type == expected.tensor_type.name
        assert list(tensor.shape) == [int(size) for size in reversed(expected.shape)]


def test_rope_divisors_divide_the_frequencies(tmp_path: Path) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    divisors = llama3_rope_factors(32, 10000.0, factor=32.0, low=1.0, high=4.0, original=8192)
    weights["rope_freqs.weight"] = divisors
    rope = read_architecture(convert(tmp_path / "model.gguf", weights=weights)).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.attention_factor) == ("longrope", 1.0)
    assert rope.short_factor == rope.long_factor == tuple(divisors.tolist())


@pytest.mark.parametrize(("size", "low"), [(15, 1.0), (16, 0.0), (16, -1.0), (16, np.nan)])
def test_divisors_that_are_none_are_refused(tmp_path: Path, size: int, low: float) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    weights["rope_freqs.weight"] = np.linspace(low, 8, size, dtype=np.float32)
    with pytest.raises(ModelError, match="short_factor"):
        read_architecture(convert(tmp_path / "model.gguf", weights=weights))


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = read_architecture(convert(tmp_path / "model.gguf", extra=extra)).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "rwkv7"}, "general.architecture: 'rwkv7' is not supported, only .*llama"),
        ({"architecture": "clip"}, "is no language model, as files named mmproj are not"),
        ({"extra": {"general.type": "mmproj"}}, "general.type: 'mmproj'"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_used_count: is missing"),
        ({"extra": {"llama.rope.scaling.type": "magic"}}, "llama.rope.scaling.type: 'magic'"),
        ({"extra": {"llama.rope.dimension_count": 34}}, "llama.rope.dimension_count: 34 must be even"),
        ({"extra": {"llama.attention.value_length": 8}}, "llama.attention.value_length: 8 differs"),
        ({"extra": {"llama.pooling_type": 7}}, "llama.pooling_type: 7 is none of 0, 1, 2, 3, 4"),
        ({"extra": {"llama.attention.causal": False}}, "llama.attention.causal: False"),
        ({"extra": {"llama.attention.twist": 8}}, "llama.attention.twist: 8 is a key that"),
        (
            {"vocabulary": byte_level_vocabulary([], pre="gemma4")},
            "tokenizer.ggml.pre: 'gemma4' is not supported",
        ),
        ({"vocabulary": byte_level_vocabulary([]) | {"model": "rwkv"}}, "tokenizer.ggml.model: 'rwkv'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        convert(tmp_path / "model.gguf", **options)


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    weights["blk.0.attn_twist.weight"] = np.ones(32, dtype=np.float32)
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.attn_twist\.weight'"):
        convert(tmp_path / "model.gguf", weights=weights)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.gguf: not a GGUF file, or cut short"):
        resolve_model(str(path), progress=False)


def test_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    first = convert(path)
    assert resolve_model(str(path), progress=False) == first
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert resolve_model(str(path), progress=False) != first


def test_an_interrupted_conversion_is_redone(tmp_path: Path) -> None:
    directory = convert(tmp_path / "model.gguf")
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "config.json").write_text("{")  # as if the rename had not been atomic
    assert resolve_model(str(tmp_path / "model.gguf"), progress=False) == directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == whole


def test_end_of_turn_ends_an_answer_too(tmp_path: Path) -> None:
    directory = convert(tmp_path / "model.gguf", extra={"tokenizer.ggml.eot_token_id": 2})
    assert read_architecture(directory).eos_token_ids == (1, 2)


def test_the_tokenizer_config_names_the_special_tokens_and_the_template(tmp_path: Path) -> None:
    directory = convert(
        tmp_path / "model.gguf",
        vocabulary=sentencepiece_vocabulary([("a", -1.0)]),
        extra={"tokenizer.chat_template": "{{ 'hi' }}", "tokenizer.ggml.padding_token_id": 2},
    )
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["bos_token"] == "<s>"
    assert config["eos_token"] == config["pad_token"] == "</s>"
    assert config["chat_template"] == "{{ 'hi' }}"
    assert config["add_bos_token"] is True  # what SentencePiece models do unless told otherwise


def split(path: Path, directory: Path) -> list[Path]:
    """Write a file's tensors in three files, with llama.cpp's names and keys."""
    reader, parts = GGUFReader(path), []
    for number in range(3):
        part = directory / f"split-{number + 1:05}-of-00003.gguf"
        writer = GGUFWriter(part, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                sub_type = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    whole = open_checkpoint(convert(tmp_path / "model.gguf", num_layers=2))
    parts = split(tmp_path / "model.gguf", tmp_path)
    directories = {resolve_model(str(part), progress=False) for part in parts}
    joined = open_checkpoint(directories.pop())
    assert not directories  # whichever part is named
    assert joined.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert torch.equal(joined.read(name, torch.float32), whole.read(name, torch.float32))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second, _ = split(write_gguf(tmp_path / "model.gguf"), tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"split-00002-of-00003\.gguf: is missing, one of the 3 parts"):
        resolve_model(str(first), progress=False)


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    first, second, third = split(write_gguf(tmp_path / "model.gguf"), tmp_path)
    shutil.copy(third, second)
    with pytest.raises(ModelError, match=r"split\.no, split\.count: it is part 2 of 3 and not part 1 of 3"):
        resolve_model(str(first), progress=False)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, *_ = split(write_gguf(tmp_path / "model.gguf"), tmp_path)
    with pytest.raises(ModelError, match=r"part 0 of 3 and not part 0 of 1; parts are found by names like"):
        resolve_model(str(first.rename(tmp_path / "alone.gguf")), progress=False)
