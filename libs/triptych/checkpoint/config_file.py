"""One JSON object of a checkpoint, each key fetched with its type checked; errors name file, key and value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, NoReturn

from triptych.errors import FeatureDisabled, ModelError

_I32_MAX = (1 << 31) - 1
_FLOAT32_MAX = 3.4028234e38
MAX_VOCAB_SIZE = 1 << 24
_MAXIMA = {
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "d_model": 1 << 20,
    "intermediate_size": 1 << 24,
    "ffn_dim": 1 << 24,
    "ffn_hidden_size": 1 << 24,
    "n_inner": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "n_layer": 1 << 12,
    "n_layers": 1 << 12,
    "num_mtp_layers": 1 << 12,
    "num_nextn_predict_layers": 1 << 12,
    "mtp_num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "n_head": 1 << 16,
    "n_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "rotary_dim": 1 << 16,
    "num_local_experts": 1 << 16,
    "num_experts": 1 << 16,
    "vocab_size": MAX_VOCAB_SIZE,
}
"""Numbers of config.json that lists and buffers are made for -> a thousand times what models have."""

_HARMLESS = frozenset(
    (
        # who wrote it, and with what
        "architectures",
        "model_type",
        "transformers_version",
        "transformers.js_config",
        "torch_dtype",
        "dtype",
        "auto_map",
        # read by `triptych.checkpoint.quantization`, at the top or in a section
        "quantization_config",
        "tokenizer_class",
        "tokenizer_name",
        "custom_pipelines",
        "model_max_length",
        "max_sequence_length",
        "output_past",
        "n_special",
        "predict_special_tokens",
        "gradient_checkpointing",
        "unsloth_fixed",
        "unsloth_version",
        # training
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "emb_pdrop",
        "resid_pdrop",
        "attention_probs_dropout_prob",
        "hidden_dropout",
        "hidden_dropout_prob",
        "residual_dropout",
        "embedding_dropout",
        "embed_dropout",
        "dropout",
        "activation_dropout",
        "classifier_dropout",
        "layerdrop",
        "resid_dropout",
        "ffn_dropout",
        "initializer_range",
        "init_std",
        "initializer_factor",
        "initializer_cutoff_factor",
        "router_aux_loss_coef",
        "output_router_logits",
        "router_jitter_noise",
        "pretraining_tp",
        "z_loss_weight",
        # what the caller of a model in Python asks for
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_return_dict",
        "torchscript",
        "use_bfloat16",
        "chunk_size_feed_forward",
        "is_decoder",
        "attn_implementation",
        "use_flash_attn",
        "cache_implementation",
        # of generation: generation_config.json is read instead
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "prefix",
        "pad_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "eod_token_id",
        "decoder_start_token_id",
        # of other heads on the same body
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "sentence_transformers",
        "sbert_ce_default_activation_function",
        "is_matryoshka",
        "matryoshka_dimensions",
        "finetuning_task",
        "task_specific_params",
        "pruned_heads",
        "tie_encoder_decoder",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "tf_legacy_loss",
        "cross_attention_hidden_size",
    )
)

_HARMLESS_VALUES: Mapping[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_causal": True,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_llama_config": True,
}
"""Keys that change no token as long as they have this value."""


class ConfigFile:
    """The keys of one JSON object. It notes which are read: what no family reads may change the model's numbers."""

    def __init__(self, path: Path, values: Mapping[str, Any], *, section: str = "") -> None:
        """
        Args:
            section: Place of this object within the file, with a dot at its end: `text_config.`.
        """
        self.path = path
        self.values = values
        self._section = section
        self._read: set[str] = set()
        self._sections: dict[str, ConfigFile] = {}

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a file.

        Raises:
            ModelError: It is missing or no JSON object.
        """
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
    def read_optional(cls, path: Path) -> ConfigFile:
        return cls.read(path) if path.exists() else cls(path, {})

    def has(self, key: str) -> bool:
        """Return whether there is a value under `key` that is not null."""
        return self.values.get(key) is not None

    def section(self, key: str) -> ConfigFile | None:
        """Return the object under `key`; None where it is absent or null."""
        if key in self._sections:
            return self._sections[key]
        value = self._get(key, default={})
        if not isinstance(value, dict):
            self.fail(key, value, "must be an object")
        if not self.has(key):
            return None
        self._sections[key] = ConfigFile(self.path, value, section=f"{self._section}{key}.")
        return self._sections[key]

    def text_section(self) -> ConfigFile:
        """Return `text_config` of a composite checkpoint, with what such files say once for all parts."""
        section = self.section("text_config")
        if section is None:
            raise ModelError(f"{self.path}: text_config: is missing")
        inherited = ("architectures", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")
        said_once = {key: self.values[key] for key in inherited if self.has(key) and not section.has(key)}
        section.values = {**section.values, **said_once}
        self.pass_over(*inherited)
        return section

    def pass_over(self, *keys: str) -> None:
        """Note that these keys are of no concern here: of an image tower, or implied by others."""
        self._read.update(keys)

    def assume(self, **defaults: Any) -> None:
        """Take these values for keys that are absent; null says that there is none."""
        self.values = {**defaults, **self.values}

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < minimum:
            self.fail(key, value, f"must be an integer >= {minimum}")
        maximum = _MAXIMA.get(key, _I32_MAX)
        if value > maximum:
            self.fail(key, value, f"is above the limit {maximum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        self._read.add(key)
        return self.integer(key, minimum=0) if self.has(key) else None

    def number(self, key: str, *, default: float | None = None) -> float:
        return self._number(key, self._get(key, default))

    def positive(self, key: str, *, default: float | None = None, maximum: float = 1e9) -> float:
        """Return a number that others are divided by or that has a logarithm."""
        value = self.number(key, default=default)
        if not 0 < value <= maximum:
            self.fail(key, value, f"must be above 0 and at most {maximum:g}")
        return value

    def indices(self, key: str, *, length: int) -> frozenset[int]:
        """Return the entries of a list of layers, of which there are so many; empty where it is absent or null."""
        values = self._get(key, default=[])
        if not isinstance(values, list) or not all(
            type(value) is int and 0 <= value < length for value in values
        ):
            self.fail(key, values, f"must be a list of layers, from 0 to {length - 1}")
        return frozenset(values)

    def numbers(self, key: str, *, length: int) -> tuple[float, ...]:
        """Return a list of so many numbers."""
        values = self._get(key, None)
        if not isinstance(values, list) or len(values) != length:
            self.fail(key, values, f"must be a list of {length} numbers")
        return tuple(self._number(key, value) for value in values)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            self.fail(key, value, "must be true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, value, "must be a string")
        return value

    def words(self, key: str, *, length: int, among: Iterable[str]) -> tuple[str, ...]:
        """Return a list of so many strings, each one of `among`."""
        values, known = self._get(key, None), tuple(among)
        if not isinstance(values, list) or len(values) != length:
            found = f"{len(values)} entries" if isinstance(values, list) else _shown(values)
            raise ModelError(f"{self.path}: {self._section}{key}: has {found}, must be a list of {length}")
        for value in values:
            if value not in known:
                self.fail(key, value, f"is none of {', '.join(known)}")
        return tuple(values)

    def expect(self, key: str, value: Any, *, otherwise: str) -> None:
        """Check that a key has this value, or is absent or null.

        Raises:
            FeatureDisabled: It has another; `otherwise` says what that means.
        """
        self._read.add(key)
        if self.has(key) and self.values[key] != value:
            raise FeatureDisabled(
                f"{self._section}{key} = {_shown(self.values[key])}",
                f"{self.path}: {otherwise}, which is not built",
            )

    def fail(self, key: str, value: object, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: {self._section}{key}: {_shown(value)} {why}")

    def check_sizes(self) -> None:
        """Check the integers of this object and of those in it, for code that reads them without a limit.

        Raises:
            ModelError: One is above the limit of its key; names both.
        """
        for key, value in self.values.items():
            if type(value) is int and value > _MAXIMA.get(key, _I32_MAX):
                self.fail(key, value, f"is above the limit {_MAXIMA.get(key, _I32_MAX)}")
            if isinstance(value, dict):
                ConfigFile(self.path, value, section=f"{self._section}{key}.").check_sizes()

    def refuse_unread(self) -> None:
        """Check that every key has been read, in sections that have been read too.

        Null says nothing, a name that begins with an underscore is a note of the program that wrote the file, and some
        keys change no token.

        Raises:
            ModelError: Others remain, which may change the model's numbers; names them.
        """
        unread = [
            key
            for key, value in self.values.items()
            if value is not None
            and key not in self._read
            and key not in _HARMLESS
            and not key.startswith("_")
            and (key not in _HARMLESS_VALUES or value != _HARMLESS_VALUES[key])
        ]
        if unread:
            key = unread[0]
            others = f" ({len(unread) - 1} more: {', '.join(unread[1:6])})" if unread[1:] else ""
            self.fail(
                key,
                self.values[key],
                f"is a key that this family does not have here, so its meaning would be lost{others}; remove it from "
                "the file if it changes no number of the model",
            )
        for section in self._sections.values():
            section.refuse_unread()

    def _number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) <= _FLOAT32_MAX:  # NaN is refused, too
            self.fail(key, value, "must be a number that 32 bits can hold")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: {self._section}{key}: is missing")
            return default
        return value


def check_inside(index: Path, name: str) -> None:
    """Check that a file that an index names is one of the model's own.

    Raises:
        ModelError: It is outside of the index's directory.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(f"{index}: names {name!r}, which is outside of the model's directory")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:200] + "…"
