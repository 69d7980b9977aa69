"""The description of a decoder that transformers computes, from a pass over it and not from keys of its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from triptych.checkpoint.architecture import (
    TRANSFORMERS_MODEL,
    BlockSpec,
    EndsSpec,
    LayerSpec,
    ModelArchitecture,
)
from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.config_json import CONFIG_FILE, read_eos_token_ids
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE
from triptych.errors import FeatureDisabled
from triptych_services.worker.models.fallback.attention import AttentionCall
from triptych_services.worker.models.fallback.decoder import Decoder
from triptych_services.worker.models.fallback.probe import Probe
from triptych_services.worker.models.fallback.skeleton import build

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_target_positions",
)
NOTES = ("_name_or_path", "transformers_version")  # of who wrote the file; they change no token
_UNLIMITED = 1 << 17  # positions of a model that names no limit


def describe(directory: Path) -> ModelArchitecture:
    """Describe the decoder of `directory`, and check that transformers computes it over a paged cache.

    Raises:
        FeatureDisabled: transformers has no such decoder, or it does something that a paged cache does not allow.
        ModelError: A file is missing or unreadable.
    """
    file = ConfigFile.read(directory / CONFIG_FILE)
    file.check_sizes()
    values = file.values
    if (directory / GGUF_INDEX_FILE).is_file():
        raise FeatureDisabled("model.backend = transformers", "GGUF files are read by native models only")
    model = build(values, torch.float32)
    text = model.config.get_text_config(decoder=True)
    max_positions = read_max_positions(text)
    probe = Probe(model, Decoder, max_positions=max_positions)
    calls = probe.attention_calls()
    probe.check_rows()
    first_position = probe.first_position()
    return ModelArchitecture(
        name=TRANSFORMERS_MODEL,
        vocab_size=probe.vocab_size,
        hidden_size=probe.hidden_size,
        layers=tuple(describe_layer(call, probe.input_sizes) for call in calls),
        max_position_embeddings=max_positions - first_position,
        tie_word_embeddings=probe.is_tied,
        dtype=read_dtype(values),
        bos_token_id=bos if isinstance(bos := getattr(text, "bos_token_id", None), int) else None,
        eos_token_ids=read_eos_token_ids(directory),
        block=BlockSpec(
            attention_soft_cap=max(call.soft_cap for call in calls),
            has_sinks=any(call.sinks is not None for call in calls),
        ),
        ends=EndsSpec(learned_position_offset=first_position),
        config={key: value for key, value in values.items() if key not in NOTES},
    )


def describe_layer(call: AttentionCall, input_sizes: Sequence[int]) -> LayerSpec:
    _, num_heads, head_dim = call.query.shape
    mask = call.mask
    attention, window = (
        ("chunked", mask.chunk) if mask.chunk else ("sliding" if mask.window else "full", mask.window)
    )
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        intermediate_size=max(input_sizes),
        attention=attention,
        window=window,
        value_dim=call.value.shape[2],
    )


def read_max_positions(text: PreTrainedConfig) -> int:
    lengths = [length for name in _LENGTHS if isinstance(length := getattr(text, name, None), int)]
    return lengths[0] if lengths and lengths[0] > 0 else _UNLIMITED


def read_dtype(values: Mapping[str, Any]) -> str:
    text = values.get("text_config") or {}
    for section in (values, text):
        for key in ("dtype", "torch_dtype"):
            if section.get(key) in ("float32", "bfloat16", "float16"):
                return str(section[key])
    return "float32"
