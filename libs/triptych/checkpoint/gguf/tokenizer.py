"""The tokenizer inside a .gguf file -> tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.checkpoint.sentencepiece import Pieces, add_special_pieces, build_sentencepiece
from triptych.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The words of GPT-2 and of those after it; source: the regexes of llama.cpp's llama-vocab.cpp, which are
# those of the models' own tokenizer.json.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

_BYTE_LEVEL_KINDS = {
    "gpt-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
}
"""`tokenizer.ggml.pre` -> how text is cut into words before merging."""


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; `metadata` and errors as in `build_tokenizer`."""
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"), pretty=False)
    config = _tokenizer_config(metadata)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys of `metadata` describe.

    Raises:
        ModelError: a kind of tokenizer that is not known here, as a guess would split text differently;
            or a key that is missing or odd.
    """
    model = metadata.get("tokenizer.ggml.model")
    kinds = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer, "t5": _sentencepiece_tokenizer}
    if not isinstance(model, str) or model not in kinds:
        raise ModelError(f"gguf: tokenizer.ggml.model: {model!r} is not supported, only {', '.join(kinds)}")
    try:
        tokenizer = kinds[model](metadata)
    except ModelError:
        raise
    except Exception as error:  # the library raises that very class: merges of tokens that there are not
        raise ModelError(f"gguf: tokenizer.ggml: cannot be used: {error}") from error
    if _adds_bos(metadata):
        _prepend_bos(tokenizer, metadata)
    return tokenizer


def stop_token_ids(metadata: dict[str, Any]) -> list[int]:
    """The ids that end an answer: end of text, and end of turn or message where they differ."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _byte_level_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    kind = _BYTE_LEVEL_KINDS.get(pre) if isinstance(pre, str) else None
    if kind is None:
        raise ModelError(
            f"gguf: tokenizer.ggml.pre: {pre!r} is not supported, only "
            f"{', '.join(_BYTE_LEVEL_KINDS)}; use the model's safetensors directory"
        )
    merges = [_split_merge(merge) for merge in _required(metadata, "tokenizer.ggml.merges")]
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=kind == "llama3"))
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if kind == "digits":
        cuts = [pre_tokenizers.Digits(individual_digits=True)]
    elif kind in ("llama3", "qwen2"):
        cuts = [pre_tokenizers.Split(Regex(_LLAMA3_WORDS if kind == "llama3" else _QWEN2_WORDS), "isolated")]
    use_gpt2_words = kind in ("gpt2", "digits")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_gpt2_words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    add_special_pieces(tokenizer, metadata["tokenizer.ggml.tokens"], _token_types(metadata))
    return tokenizer


def _sentencepiece_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece, as llama.cpp reads it: BPE with scores ("llama"), or unigram ("t5")."""
    return build_sentencepiece(
        Pieces(
            list(_vocabulary(metadata)),
            _required(metadata, "tokenizer.ggml.scores"),
            _token_types(metadata),
            is_unigram=metadata["tokenizer.ggml.model"] == "t5",
            prefix="always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never",
            removes_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
            characters=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
        )
    )


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """Return whether prompts begin with BOS: as the file says, else as llama.cpp does for this kind of tokenizer."""
    silent = (
        metadata["tokenizer.ggml.model"] == "llama"
        or _BYTE_LEVEL_KINDS.get(metadata.get("tokenizer.ggml.pre", "")) == "llama3"
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", silent))


def _prepend_bos(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    from tokenizers import processors

    bos = _token(metadata, "bos_token_id")
    if bos is None:
        raise ModelError("gguf: tokenizer.ggml.bos_token_id: is missing, but add_bos_token asks for it")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
    )


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
        "bos_token": _token(metadata, "bos_token_id"),
        "eos_token": _token(metadata, "eos_token_id"),
        "unk_token": _token(metadata, "unknown_token_id"),
        "pad_token": _token(metadata, "padding_token_id"),
        "model_max_length": metadata.get("llama.context_length"),
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _token(metadata: dict[str, Any], key: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"gguf: tokenizer.ggml.{key}: {token_id} is outside the {len(tokens)} tokens")
    return str(tokens[token_id])


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(
            f"gguf: tokenizer.ggml.tokens: {len(tokens) - len(vocabulary)} tokens are listed twice"
        )
    return vocabulary


def _token_types(metadata: dict[str, Any]) -> list[int]:
    return list(_required(metadata, "tokenizer.ggml.token_type"))


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or " " in right:
        raise ModelError(f"gguf: tokenizer.ggml.merges: {merge!r} is not two tokens and a space")
    return left, right


def _required(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"gguf: {key}: is missing")
    return metadata[key]
