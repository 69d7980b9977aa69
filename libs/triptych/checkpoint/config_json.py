"""Reads config.json and generation_config.json of a checkpoint, without torch or transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_file import MAX_VOCAB_SIZE, ConfigFile
from triptych.checkpoint.families.registry import find_family, head_of
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE, GgufIndex
from triptych.checkpoint.gguf.layout import file_names
from triptych.checkpoint.labels import read_labels
from triptych.checkpoint.quantization.read import read_quantization
from triptych.checkpoint.quantization.scheme import StoredQuantization
from triptych.checkpoint.tensor_names import TensorNames, bare_names, names_of_tensors
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MODULES_FILE = "modules.json"
"""Present where the checkpoint is one of sentence-transformers."""

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def read_architecture(directory: Path) -> ModelArchitecture:
    """Describe the decoder of `directory/config.json`, by the family that its `architectures` names.

    Raises:
        FeatureDisabled: No family has this architecture, or the family says something that is not built.
        ModelError: A file is missing or unreadable, a key is missing or odd, or the family does not know it; names
            file, key and value.
    """
    config = ConfigFile.read(directory / CONFIG_FILE)
    quantization = read_quantization(directory, config)
    family = find_family(config)
    described = family.read(config)
    if family.knows_all_keys:
        config.refuse_unread()
    described = _with_head(directory, config, described)
    if described.names.fused_in_some:
        names = described.names.of_files(names_of_tensors(directory))
        described = replace(described, names=names)
    return replace(
        described,
        eos_token_ids=read_eos_token_ids(directory),
        quantization=quantization,
        gguf_names=_gguf_names(directory, described),
        config={} if family.knows_all_keys else config.values,
    )


def read_stored_quantization(directory: Path) -> StoredQuantization | None:
    """Return how the weights of a checkpoint are quantized; None if it does not say that they are.

    Raises:
        FeatureDisabled, ModelError: As of `read_architecture`.
    """
    return read_quantization(directory, ConfigFile.read_optional(directory / CONFIG_FILE))


def _gguf_names(directory: Path, described: ModelArchitecture) -> TensorNames | None:
    if not (directory / GGUF_INDEX_FILE).is_file():
        return None
    return file_names((tensor.name for tensor in GgufIndex.read(directory).tensors), described.names)


def _with_head(directory: Path, config: ConfigFile, body: ModelArchitecture) -> ModelArchitecture:
    """Return the description of a checkpoint with what follows its last norm.

    Published embedding models are stored as bodies, with names to match, whatever `architectures` says: some of those
    with a head of their own have none in the file.
    """
    head = head_of(body.name)
    is_stated = (directory / MODULES_FILE).is_file()
    names = body.names
    if is_stated or head == "none":
        names = replace(names, older=(*names.older, *bare_names(names)))
        if head == "logits" and not body.tie_word_embeddings:
            stored = names_of_tensors(directory)
            head = "none" if stored and f"{names.stored('lm_head')}.weight" not in stored else head
    if head == "logits":
        return replace(body, names=names)
    labels = read_labels(config) if head == "score" else ()
    return replace(body, names=names, head=head, num_labels=len(labels), tie_word_embeddings=False)


def read_generation_defaults(directory: Path) -> dict[str, float | int]:
    """Return the sampling defaults that generation_config.json names, by field of `SamplingParams`.

    Fields that the table of sampling fields does not let a checkpoint set are passed over.

    Raises:
        ModelError: A value is not a number.
    """
    generation = ConfigFile.read_optional(directory / GENERATION_CONFIG_FILE)
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
    values = ConfigFile.read_optional(directory / CONFIG_FILE).values
    architectures = values.get("architectures")
    return str(values.get("model_type") or ""), tuple(
        map(str, architectures if isinstance(architectures, list) else ())
    )


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids that end a text.

    The tokenizer's own comes first, if it is among them, then generation_config.json's, where chat models add their
    end-of-turn, then config.json's.

    Raises:
        ModelError: A value is no token id.
    """
    token_ids: list[int] = []
    config = ConfigFile.read(directory / CONFIG_FILE)
    generation = ConfigFile.read_optional(directory / GENERATION_CONFIG_FILE)
    text = config.section("text_config")
    for file in (generation, config, *([] if text is None else [text])):
        value = file.values.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < MAX_VOCAB_SIZE:
                file.fail("eos_token_id", value, "must be a token id or a list of them")
            if token_id not in token_ids:
                token_ids.append(token_id)
    own = _tokenizer_eos_token_id(directory)
    return tuple(sorted(token_ids, key=lambda token_id: token_id != own))


def _tokenizer_eos_token_id(directory: Path) -> int | None:
    """The id of tokenizer_config.json's `eos_token`; None if there is none, or if the file does not list its id."""
    values = ConfigFile.read_optional(directory / _TOKENIZER_CONFIG_FILE).values
    eos, added = values.get("eos_token"), values.get("added_tokens_decoder")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if isinstance(eos, str) and isinstance(added, dict):
        for token_id, token in added.items():
            if (
                isinstance(token, dict)
                and token.get("content") == eos
                and token_id.isdecimal()
                and len(token_id) < 10
            ):
                return int(token_id)
    return None
