"""A .gguf file's metadata becomes the files of a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
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
from triptych.errors import ModelError
from triptych.hub import resolve_model

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
    assert index.file == str(path)
    assert index.file_size == len(data)
    oracle = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert {tensor.gguf_name for tensor in index.tensors} == set(oracle)
    for tensor in index.tensors:
        expected = oracle[tensor.gguf_name]
        assert data[tensor.offset : tensor.offset + tensor.size] == expected.data.tobytes()
        assert tensor.type == expected.tensor_type.name
        assert list(tensor.shape) == [int(size) for size in reversed(expected.shape)]


def test_llama3_rope_divisors_become_the_four_numbers_again(tmp_path: Path) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    weights["rope_freqs.weight"] = llama3_rope_factors(
        32, 10000.0, factor=32.0, low=1.0, high=4.0, original=8192
    )
    rope = read_architecture(convert(tmp_path / "model.gguf", weights=weights)).layers[0].rope
    assert rope is not None
    assert (
        rope.kind,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    ) == ("llama3", 32.0, 1.0, 4.0, 8192)


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    weights = random_weights(261, 1, 64, 96, 2, 1)
    weights["rope_freqs.weight"] = np.linspace(1, 8, 16, dtype=np.float32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        convert(tmp_path / "model.gguf", weights=weights)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = read_architecture(convert(tmp_path / "model.gguf", extra=extra)).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture: 'gemma3' is not supported"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count: 8 experts"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: 'yarn'"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count: 8 differs"),
        (
            {"vocabulary": byte_level_vocabulary([], pre="tekken")},
            "tokenizer.ggml.pre: 'tekken' is not supported",
        ),
        ({"vocabulary": byte_level_vocabulary([]) | {"model": "bert"}}, "tokenizer.ggml.model: 'bert'"),
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
    weights["blk.0.attn_q_norm.weight"] = np.ones(32, dtype=np.float32)
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.attn_q_norm\.weight'"):
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
