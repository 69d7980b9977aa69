"""Reads config.json and generation_config.json of a checkpoint, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

from triptych.checkpoint.architecture import ModelArchitecture, RopeParameters
from triptych.errors import ModelError
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
GGUF_INDEX_FILE = "gguf_index.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
"""Present beside config.json if the weights are in a .gguf file. Its form: `triptych.checkpoint.gguf.index`."""

_I32_MAX = (1 << 31) - 1
_FLOAT32_MAX = 3.4028234e38
_MAXIMA = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "num_local_experts": 1 << 16,
    "vocab_size": 1 << 24,
}
"""Numbers of config.json that lists and buffers are made for -> a thousand times what models have."""

_WINDOWED = frozenset({"MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures with attention that reads `sliding_window`."""


def read_architecture(directory: Path) -> ModelArchitecture:
    """Parse `directory/config.json` (and the EOS ids of generation_config.json, where there is one).

    Facts that have no field here and would change the maths (windows that differ by layer, a partial rotary
    embedding, weights quantized by another tool) are refused by name; an unknown architecture or rope
    kind is kept, for the model registry and the layers to refuse.

    Raises:
        ModelError: a file is missing or unreadable, or a key is missing or odd; names file, key and value.
    """
    config = _JsonFile.read(directory / CONFIG_FILE)
    generation = _JsonFile.read_optional(directory / GENERATION_CONFIG_FILE)
    _check_supported(config)

    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads {num_heads}")
    head_dim = config.integer("head_dim", default=0, minimum=0)
    if not head_dim:
        if hidden_size % num_heads:
            config.fail("hidden_size", hidden_size, f"must be a multiple of num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    max_positions = config.integer("max_position_embeddings")
    num_experts, num_experts_per_tok = _experts(config)

    return ModelArchitecture(
        name=_architecture_name(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=_rope_parameters(config, max_positions),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        attention_bias=config.boolean("attention_bias", default=False),
        mlp_bias=config.boolean("mlp_bias", default=False),
        hidden_act=config.text("hidden_act", default="silu"),
        dtype=_dtype(config),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=_eos_token_ids(directory, generation, config),
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        sliding_window=_sliding_window(config, max_positions),
        is_gguf=(directory / GGUF_INDEX_FILE).is_file(),
    )


def read_generation_defaults(directory: Path) -> dict[str, float | int]:
    """Return the sampling defaults that generation_config.json names, by field of `SamplingParams`.

    Fields that the table of sampling fields does not let a checkpoint set are passed over.

    Raises:
        ModelError: A value is not a number.
    """
    generation = _JsonFile.read_optional(directory / GENERATION_CONFIG_FILE)
    defaults: dict[str, float | int] = {}
    for key, spec in SAMPLING_FIELDS.items():
        if not spec.may_come_from_checkpoint or generation.values.get(key) is None:
            continue
        if spec.kind is FieldKind.INTEGER:
            defaults[key] = generation.integer(key, minimum=int(spec.low))
        else:
            defaults[key] = generation.number(key)
    return defaults


def read_model_class(directory: Path) -> tuple[str, tuple[str, ...]]:
    """Return `model_type` and `architectures` of config.json; empty ones where it has none."""
    values = _JsonFile.read_optional(directory / CONFIG_FILE).values
    return str(values.get("model_type") or ""), tuple(map(str, values.get("architectures") or ()))


def check_inside(index: Path, name: str) -> None:
    """Check that a file that an index names is one of the model's own.

    Raises:
        ModelError: It is outside of the index's directory.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(f"{index}: names {name!r}, which is outside of the model's directory")


class _JsonFile:
    """The keys of one JSON object, each fetched with its type checked; errors name file, key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> _JsonFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; a model directory needs {path.name}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: must hold a JSON object, not {type(values).__name__}")
        return cls(path, values)

    @classmethod
    def read_optional(cls, path: Path) -> _JsonFile:
        return cls.read(path) if path.exists() else cls(path, {})

    def section(self, key: str) -> _JsonFile | None:
        """A nested object under `key`; None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, value, "must be an object")
        return _JsonFile(self.path, value)

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < minimum:
            self.fail(key, value, f"must be an integer >= {minimum}")
        maximum = _MAXIMA.get(key, _I32_MAX)
        if value > maximum:
            self.fail(key, value, f"is above the limit {maximum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, minimum=0)

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not abs(value) <= _FLOAT32_MAX:  # NaN is refused, too
            self.fail(key, value, "must be a number that 32 bits can hold")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            self.fail(key, value, "must be true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, value, "must be a string")
        return value

    def fail(self, key: str, value: object, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: {key}: {value!r} {why}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: {key}: is missing")
            return default
        return value


def _architecture_name(config: _JsonFile) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", names, "must be a list of one name, such as ['LlamaForCausalLM']")
    return names[0]


def _experts(config: _JsonFile) -> tuple[int, int]:
    """How many experts there are, and how many a token goes through; zeros where each layer has one MLP."""
    if config.values.get("num_local_experts") is None:
        return 0, 0
    num_experts = config.integer("num_local_experts")
    num_experts_per_tok = config.integer("num_experts_per_tok")
    if num_experts_per_tok > num_experts:
        config.fail(
            "num_experts_per_tok", num_experts_per_tok, f"must be at most num_local_experts {num_experts}"
        )
    return num_experts, num_experts_per_tok


def _dtype(config: _JsonFile) -> str:
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    dtype = config.text(key, default="float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        config.fail(key, dtype, "must be one of float32, bfloat16, float16")
    return dtype


def _rope_parameters(config: _JsonFile, max_positions: int) -> RopeParameters:
    """Both layouts: `rope_parameters` holds everything; formerly `rope_theta` stood beside `rope_scaling`."""
    rope = config.section("rope_parameters") or config.section("rope_scaling") or _JsonFile(config.path, {})
    for key, value in rope.values.items():
        if isinstance(value, dict):
            config.fail("rope_parameters", {key: value}, "differ by layer type, which is not supported")
    theta = rope if rope.values.get("rope_theta") is not None else config
    kind = rope.text("rope_type" if "rope_type" in rope.values else "type", default="default")
    for section in (rope, config):
        if section.number("partial_rotary_factor", default=1.0) != 1.0:
            section.fail(
                "partial_rotary_factor",
                section.values["partial_rotary_factor"],
                "is not supported: all of a head must be rotated",
            )
    if kind == "llama3":  # a factor that defines the kind has no default
        factors = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        original = rope.integer("original_max_position_embeddings")
    else:
        factors = {"factor": rope.number("factor", default=None if kind == "linear" else 1.0)}
        original = rope.integer("original_max_position_embeddings", default=max_positions)
    return RopeParameters(
        theta=theta.number("rope_theta", default=10000.0),
        kind=kind,
        original_max_position_embeddings=original,
        **factors,
    )


def _eos_token_ids(directory: Path, generation: _JsonFile, config: _JsonFile) -> tuple[int, ...]:
    """The ids of both files: the tokenizer's own first, if it is among them, then generation_config.json's, where chat
    models add their end-of-turn."""
    token_ids: list[int] = []
    for file in (generation, config):
        value = file.values.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < _MAXIMA["vocab_size"]:
                file.fail("eos_token_id", value, "must be a token id or a list of them")
            if token_id not in token_ids:
                token_ids.append(token_id)
    own = _tokenizer_eos_token_id(directory)
    return tuple(sorted(token_ids, key=lambda token_id: token_id != own))


def _tokenizer_eos_token_id(directory: Path) -> int | None:
    """The id of tokenizer_config.json's `eos_token`; None if there is none, or if the file does not list its id."""
    values = _JsonFile.read_optional(directory / _TOKENIZER_CONFIG_FILE).values
    eos, added = values.get("eos_token"), values.get("added_tokens_decoder")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if isinstance(eos, str) and isinstance(added, dict):
        for token_id, token in added.items():
            if isinstance(token, dict) and token.get("content") == eos and token_id.isdecimal():
                return int(token_id)
    return None


def _check_supported(config: _JsonFile) -> None:
    """Stop at facts that `ModelArchitecture` cannot carry, rather than compute something else."""
    quantization = config.section("quantization_config")
    if quantization is not None:
        method = quantization.values.get("quant_method")
        config.fail("quantization_config.quant_method", method, "is not supported; use plain or GGUF weights")


def _sliding_window(config: _JsonFile, max_positions: int) -> int:
    """Return how many keys a token sees in every layer; 0: all, as where the window is as long as the context."""
    layer_types = config.values.get("layer_types")
    if layer_types is not None:
        kinds = set(layer_types)
        if kinds == {"full_attention"}:
            return 0
        if kinds != {"sliding_attention"}:
            config.fail("layer_types", layer_types, "must all be 'full_attention' or all 'sliding_attention'")
        window = config.integer("sliding_window")
    elif not _has_window(config):
        return 0
    else:
        window = config.integer("sliding_window")
    if window >= max_positions:
        return 0
    name = _architecture_name(config)
    if name not in _WINDOWED:
        config.fail(
            "sliding_window", window, f"is not supported for {name}, but for {', '.join(sorted(_WINDOWED))}"
        )
    return window


def _has_window(config: _JsonFile) -> bool:
    """Whether `sliding_window` counts where no `layer_types` say so.

    Qwen2 and Qwen3 write it next to a switch, which is off unless it is set, and next to the number of layers that
    come before the first one with a window.
    """
    if config.values.get("sliding_window") is None:
        return False
    first_layer = config.values.get("max_window_layers")
    if not config.boolean("use_sliding_window", default=first_layer is None):
        return False
    if first_layer is None or config.integer("max_window_layers", minimum=0) == 0:
        return True
    num_layers = config.integer("num_hidden_layers")
    if first_layer < num_layers:
        config.fail("max_window_layers", first_layer, f"must be 0 or at least num_hidden_layers {num_layers}")
    return False
