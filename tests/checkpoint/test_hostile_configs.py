"""A config.json of any content is read or refused, with one error that names the file and the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_published_configs import PUBLISHED
from triptych.checkpoint.config_json import read_architecture, read_model_class
from triptych.checkpoint.families import registry
from triptych.checkpoint.quantization import read
from triptych.errors import FeatureDisabled, ModelError

ODD: tuple[Any, ...] = (0, -1, 2.5, 10**400, math.nan, True, "x", [None], {"full_attention": 1})
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
MORE_KEYS = {
    "layer_types",
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
}


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search of installed packages, which takes longer than all else."""
    for module in (registry, read):
        monkeypatch.setattr(module, "entry_points", lambda group: ())


def error_of(directory: Path, config: dict[str, Any]) -> str:
    """Return the one error that a config.json gives; empty if it is read."""
    (directory / "config.json").write_text(json.dumps(config))
    read_model_class(directory)
    try:
        read_architecture(directory)
    except (ModelError, FeatureDisabled) as error:
        return str(error)
    return ""


def check(directory: Path, config: dict[str, Any]) -> None:
    error = error_of(directory, config)
    assert not error or (str(directory / "config.json") in error and len(error) < 2000)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_key_of_any_value_is_read_or_refused(tmp_path: Path, model: str) -> None:
    architecture, config, _ = PUBLISHED[model]
    whole = config | {"architectures": [architecture]}
    for key in {*whole, *MORE_KEYS}:
        for value in ODD:
            check(tmp_path, whole | {key: value})
    text = config.get("text_config")
    for key in text or ():
        for value in ODD:
            check(tmp_path, whole | {"text_config": text | {key: value}})


@pytest.mark.parametrize("model", ["AFM-4.5B", "Phi-4-mini", "EXAONE-4.0-32B", "Hunyuan-7B", "Olmo-3-7B"])
def test_a_rotary_embedding_of_any_values_is_read_or_refused(tmp_path: Path, model: str) -> None:
    architecture, config, _ = PUBLISHED[model]
    whole, rope = config | {"architectures": [architecture]}, config["rope_scaling"]
    for key in {*rope, "rope_type", "rope_theta", "attention_factor", "mscale_all_dim"}:
        for value in ODD:
            check(tmp_path, whole | {"rope_scaling": rope | {key: value}})
            check(tmp_path, whole | {"rope_parameters": rope | {key: value}, "rope_scaling": None})


@pytest.mark.parametrize(
    ("model", "changes", "key"),
    [
        ("Qwen3-30B-A3B", {"mlp_only_layers": 5}, "mlp_only_layers"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("SmolLM3-3B", {"no_rope_layers": "x"}, "no_rope_layers"),
        ("SmolLM3-3B", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval"),
        ("SmolLM3-3B", {"layer_types": {"a": 1}}, "layer_types"),
        ("Mistral-7B-v0.1", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma-3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("granite-3.1-2b", {"logits_scaling": 0}, "logits_scaling"),
        ("granite-3.1-2b", {"attention_multiplier": 0}, "attention_multiplier"),
        ("Hunyuan-7B", {"head_dim": 2, "attention_head_dim": 2}, "head_dim"),
        ("Hunyuan-7B", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha"),
        ("phi-2", {"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        ("phi-2", {"partial_rotary_factor": 0.0375}, "partial_rotary_factor"),
        ("deepseek-coder-6.7b", {"rope_theta": 0}, "rope_theta"),
        ("deepseek-coder-6.7b", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ("AFM-4.5B", {"rope_theta": 1.0}, "rope_theta"),
        ("AFM-4.5B", {"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast"),
        ("Phi-4-mini", {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ("gemma-3-4b", {"text_config": []}, "text_config"),
        ("gemma-3-4b", {"text_config": None}, "text_config"),
    ],
)
def test_what_would_divide_by_nothing_names_its_key(
    tmp_path: Path, model: str, changes: dict[str, Any], key: str
) -> None:
    architecture, config, _ = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"architectures": [architecture]}))
    with pytest.raises(ModelError, match=rf"config\.json: [a-z_.]*{key}: "):
        read_architecture(tmp_path)


@pytest.mark.parametrize("depth", [900, 200_000])
def test_deep_nesting_is_refused(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_architecture(tmp_path)
