"""config.json becomes plain numbers, the same that transformers reads from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig, MixtralConfig

from triptych.checkpoint.architecture import ExpertsSpec, RopeParameters
from triptych.checkpoint.config_json import read_architecture, read_generation_defaults
from triptych.checkpoint.families import registry
from triptych.errors import FeatureDisabled, ModelError

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write_config(directory: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (MINIMAL | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_generation(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_what_transformers_saves_is_read_back(tmp_path: Path) -> None:
    oracle = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="silu",
        dtype="bfloat16",
        bos_token_id=5,
        eos_token_id=[6, 7],
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    )
    oracle.save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert read.name == "LlamaForCausalLM"
    assert read.num_layers == oracle.num_hidden_layers
    assert read.num_heads == oracle.num_attention_heads
    assert read.num_kv_heads == oracle.num_key_value_heads
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(read, name) == getattr(oracle, name), name
    block = read.block
    assert (block.norm.kind, block.norm.eps) == ("rms", oracle.rms_norm_eps)
    assert block.qkv_bias == block.out_bias == oracle.attention_bias
    assert block.mlp_bias == oracle.mlp_bias
    assert block.activation == oracle.hidden_act
    assert read.eos_token_ids == (6, 7)
    assert read.dtype == "bfloat16"
    assert {layer.rope for layer in read.layers} == {RopeParameters(theta=5e5, kind="llama3", **LLAMA3)}
    assert not read.is_gguf


def test_what_is_left_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    read, oracle = read_architecture(write_config(tmp_path)), LlamaConfig(**MINIMAL)
    assert read.num_kv_heads == oracle.num_key_value_heads == 3
    assert read.head_dim == oracle.head_dim == 8
    assert read.block.norm.eps == oracle.rms_norm_eps
    rope = read.layers[0].rope
    assert rope is not None
    assert rope.theta == oracle.rope_parameters["rope_theta"]
    assert rope.kind == oracle.rope_parameters["rope_type"]
    assert read.tie_word_embeddings == oracle.tie_word_embeddings
    assert read.block.activation == oracle.hidden_act
    assert read.dtype == "float32"
    assert read.eos_token_ids == ()


def test_the_experts_of_a_mixture_are_counted(tmp_path: Path) -> None:
    MixtralConfig(architectures=["MixtralForCausalLM"], num_experts_per_tok=3).save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert read.layers[0].experts == ExpertsSpec(8, 3)
    read = read_architecture(write_config(tmp_path))
    assert read.num_experts == 0


@pytest.mark.parametrize("old", [{"type": "llama3"}, {"rope_type": "llama3"}])
def test_the_old_layout_of_rope_means_the_same_as_the_new(tmp_path: Path, old: dict[str, str]) -> None:
    new = read_architecture(
        write_config(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 500000, **LLAMA3})
    )
    assert read_architecture(write_config(tmp_path, rope_theta=500000, rope_scaling=old | LLAMA3)) == new
    rope = read_architecture(write_config(tmp_path, rope_theta=7e4, rope_scaling=None)).layers[0].rope
    assert rope == RopeParameters(theta=7e4, original_max_position_embeddings=64)


@pytest.mark.parametrize("spell", [lambda text: text, lambda text: {"content": text}])
def test_the_tokenizers_own_end_of_text_comes_first(tmp_path: Path, spell: Callable[[str], Any]) -> None:
    write_config(tmp_path, eos_token_id=2)
    write_generation(tmp_path, eos_token_id=[9, 8])
    tokens = {"8": {"content": "<|eot|>"}, "9": {"content": "<|end|>"}, "7": {"content": "<|pad|>"}}
    for name, expected in (("<|eot|>", (8, 9, 2)), ("<|pad|>", (9, 8, 2)), ("<|none|>", (9, 8, 2))):
        values = {"eos_token": spell(name), "added_tokens_decoder": tokens}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        assert read_architecture(tmp_path).eos_token_ids == expected


def test_the_end_of_text_ids_of_both_files_count(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=2)
    assert read_architecture(tmp_path).eos_token_ids == (2,)
    write_generation(tmp_path, eos_token_id=[9, 8])
    assert read_architecture(tmp_path).eos_token_ids == (9, 8, 2)
    write_config(tmp_path, eos_token_id=[8, 3])
    assert read_architecture(tmp_path).eos_token_ids == (9, 8, 3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", ..., "hidden_size: is missing"),
        ("vocab_size", "97", "vocab_size: '97' must be an integer >= 1"),
        ("num_hidden_layers", 0, "num_hidden_layers: 0 must be an integer >= 1"),
        ("num_hidden_layers", True, "num_hidden_layers: True must be"),
        ("num_hidden_layers", 10**9, "num_hidden_layers: 1000000000 is above the limit 4096"),
        ("vocab_size", 10**12, "vocab_size: 1000000000000 is above the limit 16777216"),
        ("max_position_embeddings", 10**15, "max_position_embeddings: 10{15} is above the limit 2147483647"),
        ("eos_token_id", 10**30, "eos_token_id: 10{30} must be a token id"),
        ("rope_theta", math.nan, "rope_theta: nan must be a number that 32 bits can hold"),
        ("rms_norm_eps", math.inf, "rms_norm_eps: inf must be a number"),
        ("num_key_value_heads", 2, "num_key_value_heads: 2 must divide num_attention_heads 3"),
        ("hidden_size", 25, "hidden_size: 25 must be a multiple of num_attention_heads 3"),
        ("architectures", ["A", "B"], "architectures: .* must be a list of one name"),
        ("architectures", ..., "architectures: None must be"),
        ("torch_dtype", "int8", "torch_dtype: 'int8' must be one of"),
        ("rms_norm_eps", "small", "rms_norm_eps: 'small' must be a number"),
        ("tie_word_embeddings", 1, "tie_word_embeddings: 1 must be true or false"),
        ("eos_token_id", "</s>", "eos_token_id: '</s>' must be a token id"),
        ("rope_scaling", 3, "rope_scaling: 3 must be an object"),
        ("rope_scaling", {"rope_type": "linear"}, "factor: is missing"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: is missing"),
        (
            "rope_parameters",
            {"full_attention": {"rope_theta": 1.0}},
            "rope_parameters.full_attention: .* differs by layer type",
        ),
        (
            "rope_parameters",
            {"rope_type": "spiral"},
            "rope_parameters.rope_type: 'spiral' is none of default, ",
        ),
        ("rope_parameters", {"rope_type": "linear", "factor": math.nan}, "factor: nan must be a number"),
        ("rope_parameters", {"rope_theta": 1.0, "twist": 2}, "rope_parameters.twist: 2 is a key that this"),
        ("partial_rotary_factor", 1.5, "partial_rotary_factor: 1.5 must be above 0 and at most 1"),
        ("quantization_config", {"quant_method": "runes"}, "quant_method: 'runes' is not supported, only "),
        ("hidden_act", "swoosh", "hidden_act: 'swoosh' is none of silu, "),
        ("sliding_window", 32, "sliding_window: 32 is a key that this family does not have here"),
        ("attention_chunk_size", 8, "attention_chunk_size: 8 is a key that this family does not have"),
        ("layer_types", ["full_attention"] * 3, "layer_types: has 3 entries, must be a list of 2"),
        ("layer_types", ["full_attention", "linear"], "layer_types: 'linear' is none of full_attention"),
    ],
)
def test_what_is_odd_names_file_key_and_value(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read_architecture(write_config(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 2},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0},
        {"rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 1, "_name_or_path": "a"},
        {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True},
    ],
)
def test_what_changes_nothing_is_served(tmp_path: Path, harmless: dict[str, Any]) -> None:
    architecture = read_architecture(write_config(tmp_path, **harmless))
    assert [layer.attention for layer in architecture.layers] == ["full", "full"]


QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (32, 32)),
        (MISTRAL | {"sliding_window": 64}, (0, 0)),
        (MISTRAL | {"sliding_window": None}, (0, 0)),
        (MISTRAL | {"sliding_window": ..., "max_position_embeddings": 8192}, (4096, 4096)),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, (0, 32)),
        (QWEN, (0, 0)),
        (QWEN | {"use_sliding_window": True}, (0, 0)),
        (QWEN | {"use_sliding_window": False}, (0, 0)),
        (QWEN | {"max_window_layers": 2}, (0, 0)),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, (32, 32)),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, (0, 32)),
    ],
)
def test_the_windows_of_layers_are_read(
    tmp_path: Path, config: dict[str, Any], windows: tuple[int, ...]
) -> None:
    architecture = read_architecture(write_config(tmp_path, **config))
    assert tuple(layer.window for layer in architecture.layers) == windows


def test_a_layer_with_a_window_needs_its_length(tmp_path: Path) -> None:
    config = MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(ModelError, match="sliding_window: is missing"):
        read_architecture(write_config(tmp_path, **config))


def test_what_is_not_built_is_told_from_what_is_odd(tmp_path: Path) -> None:
    with pytest.raises(FeatureDisabled, match=r"use_qk_norm = True: .*config.json: .* is not built"):
        read_architecture(
            write_config(tmp_path, architectures=["CohereForCausalLM"], use_qk_norm=True, layer_norm_eps=1e-5)
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"swiglu_limit": 5.0}, FeatureDisabled, r"swiglu_limit = 5\.0: .*activation is another"),
        ({"swiglu_alpha": 2.0}, FeatureDisabled, r"swiglu_alpha = 2\.0: .*activation is another"),
        ({"experts_per_token": 3}, FeatureDisabled, "experts_per_token = 3: .*contradicts"),
        ({"rope_scaling": None}, ModelError, "rope_parameters: None must be an object"),
        ({"quantization_config": {"quant_method": "mxfp5"}}, ModelError, "'mxfp5' is not supported"),
    ],
)
def test_what_is_not_built_of_gpt_oss_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "sliding_window": 8,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "initial_context_length": 16,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    }
    architecture = read_architecture(write_config(tmp_path, **config))
    assert [layer.attention for layer in architecture.layers] == ["sliding", "full"]
    with pytest.raises(error, match=message):
        read_architecture(write_config(tmp_path, **config | changes))


def test_the_decoder_of_a_composite_checkpoint_is_read(tmp_path: Path) -> None:
    text = {key: value for key, value in MINIMAL.items() if key != "architectures"}
    text |= {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 6, "torch_dtype": None}
    composite = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 5],
        "text_config": text,
        "vision_config": {"hidden_size": 7},
    }
    (tmp_path / "config.json").write_text(json.dumps(composite))
    read = read_architecture(tmp_path)
    assert (read.name, read.dtype, read.eos_token_ids) == (composite["architectures"][0], "bfloat16", (1, 5))
    assert (read.hidden_size, read.names.stored("model.norm.weight")) == (
        24,
        "model.language_model.norm.weight",
    )
    composite["text_config"] = text | {"novelty": 1}
    (tmp_path / "config.json").write_text(json.dumps(composite))
    with pytest.raises(ModelError, match=r"text_config\.novelty: 1 is a key that this family does not have"):
        read_architecture(tmp_path)


def test_a_model_of_another_package_sees_all_keys(tmp_path: Path) -> None:
    read = read_architecture(write_config(tmp_path, architectures=["OursForCausalLM"], novelty=[1, 2]))
    assert (read.name, read.num_heads, read.config["novelty"]) == ("OursForCausalLM", 3, [1, 2])


def test_a_family_of_another_package_is_found_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "triptych.families"
        return [EntryPoint("OursForCausalLM", "triptych.checkpoint.families.llama:qwen3", group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    read = read_architecture(write_config(tmp_path, architectures=["OursForCausalLM"]))
    assert read.block.qk_norm == "head"
    with pytest.raises(ModelError, match="novelty: 1 is a key"):
        read_architecture(write_config(tmp_path, architectures=["OursForCausalLM"], novelty=1))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "cannot be read as JSON"), ("[]", "must hold a JSON object, not list")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        read_architecture(tmp_path)


def test_generation_defaults_are_the_sampling_fields_that_are_there(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, eos_token_id=[1, 2]
    ).save_pretrained(tmp_path)
    assert read_generation_defaults(tmp_path) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }


def test_an_odd_generation_default_names_file_key_and_value(tmp_path: Path) -> None:
    write_generation(tmp_path, temperature="warm")
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature: 'warm' must be a number"):
        read_generation_defaults(tmp_path)
