"""Tokenizers that are published in another file than tokenizer.json: SentencePiece, tekken, tiktoken, WordPiece.

What a file does not say is never guessed: it is in the tokenizer's config, or known of the class that reads it, or the
file is refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.checkpoint.sentencepiece import Pieces, PieceType, Prefix, build_sentencepiece
from triptych.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_MAX_TOKENS = 1 << 22
_MAX_BYTES = 1 << 28  # ten times the largest

_ADVICE = (
    "or write a tokenizer.json: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH) of transformers"
)

_SENTENCEPIECE_CLASSES = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "InternLM2Tokenizer": (True, False),
    "BaichuanTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}
"""Classes with the ids of their .model file -> whether BOS is put before a text, and EOS behind it, if the config does
not say."""

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN_WORDS = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*{_CONTRACTION}?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
"""The words of Kimi K2, a regular expression."""
_TIKTOKEN_CLASSES = {"QWenTokenizer": _QWEN_WORDS, "TikTokenTokenizer": KIMI_WORDS}
"""Classes of tiktoken files, which do not say how a text is cut into words -> those words, a regular expression."""

FILES = ("tekken.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "spiece.model", "vocab.txt")
"""Files that `convert_tokenizer` reads, the first that there is."""


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the values of tokenizer_config.json; empty if there is none.

    Raises:
        ModelError: It is no JSON object.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(config).__name__}")
    return config


def find_tokenizer_file(directory: Path) -> Path | None:
    """Return the file that `convert_tokenizer` reads, or None."""
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


def convert_tokenizer(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file.

    Args:
        path: One of `FILES`.
        config: The values of tokenizer_config.json.

    Raises:
        ModelError: The file is broken or too large, or what it does not say is not known; names it.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size} bytes, more than {_MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    convert: Callable[[bytes, Mapping[str, Any]], Tokenizer]
    if path.name == "tekken.json":
        convert = _convert_tekken
    elif path.name == "vocab.txt":
        convert = _convert_word_pieces
    elif path.suffix == ".tiktoken" or path.name.startswith("tiktoken") or _is_tiktoken(data):
        convert = _convert_tiktoken
    else:
        convert = _convert_sentencepiece
    try:
        tokenizer = convert(data, config)
        _add_tokens(tokenizer, config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except Exception as error:  # the library raises that very class
        raise ModelError(f"{path}: cannot be used as a tokenizer: {error}, {_ADVICE}") from error
    return tokenizer


def _convert_sentencepiece(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    model = _parse_sentencepiece(data)
    kind = model.trainer_spec.model_type
    if kind not in (1, 2):
        raise ModelError(f"trainer_spec.model_type: {kind} is neither unigram (1) nor BPE (2), {_ADVICE}")
    class_name = _class_name(config)
    adds = _SENTENCEPIECE_CLASSES.get(class_name)
    if adds is None and not {"add_bos_token", "add_eos_token"} <= config.keys():
        raise ModelError(
            f"tokenizer_class: what {class_name or 'no class'} adds around a text is not known; "
            f"set add_bos_token and add_eos_token in tokenizer_config.json, {_ADVICE}"
        )
    rules = model.normalizer_spec
    # transformers 5 puts a space before the first stretch alone, if not told that the class is an old one
    is_old = bool(config.get("legacy")) or class_name == "T5Tokenizer" or rules.remove_extra_whitespaces
    prefix: Prefix = "always" if is_old else "first"
    tokenizer = build_sentencepiece(
        Pieces(
            [piece.piece for piece in model.pieces],
            [piece.score for piece in model.pieces],
            [piece.type for piece in model.pieces],
            is_unigram=kind == 1,
            prefix=prefix if rules.add_dummy_prefix else "never",
            removes_spaces=rules.remove_extra_whitespaces,
            characters=rules.precompiled_charsmap,
        )
    )
    default_bos, default_eos = adds or (False, False)
    _surround(
        tokenizer,
        _named(tokenizer, config, "bos_token", "<s>") if config.get("add_bos_token", default_bos) else None,
        _named(tokenizer, config, "eos_token", "</s>") if config.get("add_eos_token", default_eos) else None,
    )
    return tokenizer


def _convert_tekken(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    """Mistral's: byte pairs by rank; control tokens have the first ids."""
    values = json.loads(data)
    settings = values["config"]
    control = [
        token["token_str"] for token in sorted(values["special_tokens"], key=lambda each: each["rank"])
    ]
    num_special = settings["default_num_special_tokens"]
    num_plain = settings["default_vocab_size"] - num_special
    control += [f"<SPECIAL_{place}>" for place in range(len(control), num_special)]
    tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in values["vocab"][:num_plain]]
    tokenizer = _byte_pairs(tokens, settings["pattern"], first_id=num_special, control=control)
    if config.get("add_bos_token", True):
        _surround(tokenizer, _named(tokenizer, config, "bos_token", "<s>"), None)
    return tokenizer


def _is_tiktoken(data: bytes) -> bool:
    first, _, rank = data[:400].partition(b"\n")[0].partition(b" ")
    return rank.strip() == b"0" and len(first) > 1


def _convert_tiktoken(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    words = _TIKTOKEN_CLASSES.get(_class_name(config))
    if words is None:
        raise ModelError(
            f"tokenizer_class: {_class_name(config)!r}: how it cuts a text into words is not in the file, and known "
            f"of {', '.join(_TIKTOKEN_CLASSES)} only, {_ADVICE}"
        )
    tokens = []
    for number, line in enumerate(data.splitlines()):
        text, _, rank = line.partition(b" ")
        try:
            tokens.append(base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise ModelError(f"line {number + 1}: {error}") from error
        if int(rank) != number:
            raise ModelError(f"line {number + 1}: rank {int(rank)}, expected {number}")
    return _byte_pairs(tokens, words, first_id=0, control=())


def _convert_word_pieces(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    """BERT's vocab.txt: a token per line."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if _class_name(config) not in ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"):
        raise ModelError(
            f"tokenizer_class: {_class_name(config)!r} is not known to read such a file, {_ADVICE}"
        )
    tokens = data.decode().splitlines()
    vocabulary = {token: place for place, token in enumerate(tokens)}
    unknown = _text(config.get("unk_token")) or "[UNK]"
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first, last = (
        _named(tokenizer, config, key, text) for key, text in (("cls_token", "[CLS]"), ("sep_token", "[SEP]"))
    )
    tokenizer.add_special_tokens(
        [token for token in ("[PAD]", unknown, first, last, "[MASK]") if token in vocabulary]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    return tokenizer


def _byte_pairs(tokens: Sequence[bytes], pattern: str, *, first_id: int, control: Sequence[str]) -> Tokenizer:
    """Return a tokenizer that joins bytes by rank.

    Args:
        tokens: By rank.
        pattern: Of the words that a text is cut into first.
        first_id: Id of the token of rank 0.
        control: Special tokens, from id 0 on.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    spelled = ["".join(map(letters.__getitem__, token)) for token in tokens]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        raise ModelError(f"{len(tokens) - len(ranks)} tokens are listed twice")
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right))
    vocabulary = {token: first_id + rank for rank, token in enumerate(spelled)}
    vocabulary |= {token: token_id for token_id, token in enumerate(control)}
    pairs = [(spelled[left], spelled[right]) for _, left, right in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the config's tokens, each with the id that it is to have."""
    from tokenizers import AddedToken

    added = {int(token_id): value for token_id, value in config.get("added_tokens_decoder", {}).items()}
    for token_id, value in sorted(added.items()):
        flags = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if key in value}
        token = AddedToken(value["content"], special=value.get("special", False), **flags)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        found = tokenizer.token_to_id(value["content"])
        if found != token_id:
            raise ModelError(
                f"added_tokens_decoder: {value['content']!r} is to have the id {token_id}, and has {found}, {_ADVICE}"
            )


def _surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    from tokenizers import processors

    before, after = [bos] if bos else [], [eos] if eos else []
    added = [(token, tokenizer.token_to_id(token)) for token in (*before, *after)]
    if added:
        second = [f"{token}:1" for token in before], [f"{token}:1" for token in after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second[0], "$B:1", *second[1]],
            special_tokens=added,
        )


def _class_name(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def _named(tokenizer: Tokenizer, config: Mapping[str, Any], key: str, default: str) -> str:
    """Return the text of a special token, which there must be."""
    text = _text(config.get(key)) or default
    if tokenizer.token_to_id(text) is None:
        raise ModelError(f"{key}: {text!r} is no token of the file, {_ADVICE}")
    return text


def _text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


@functools.cache
def _letters() -> dict[int, str]:
    """Return the letter of each byte in GPT-2's alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def _parse_sentencepiece(data: bytes) -> Any:
    """Return a `ModelProto`, with the fields that are used here. Source: sentencepiece_model.proto."""
    from google.protobuf.message import DecodeError

    model = _model_class()()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"neither a SentencePiece model nor a tiktoken file: {error}") from error
    if not 0 < len(model.pieces) <= _MAX_TOKENS:
        raise ModelError(f"{len(model.pieces)} pieces, expected 1 to {_MAX_TOKENS}")
    return model


@functools.cache
def _model_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="triptych/sentencepiece_model.proto", package="triptych.sentencepiece", syntax="proto2"
    )
    texts, flags = types.TYPE_STRING, types.TYPE_BOOL
    piece = (
        ("piece", 1, texts, None),
        ("score", 2, types.TYPE_FLOAT, None),
        ("type", 3, types.TYPE_INT32, str(int(PieceType.NORMAL))),
    )
    normalizer = (
        ("precompiled_charsmap", 2, types.TYPE_BYTES, None),
        ("add_dummy_prefix", 3, flags, "true"),
        ("remove_extra_whitespaces", 4, flags, "true"),
    )
    trainer = (("model_type", 3, types.TYPE_INT32, "1"),)
    for name, fields in (("Piece", piece), ("Trainer", trainer), ("Normalizer", normalizer)):
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            message.field.add(
                name=field, number=number, type=kind, label=types.LABEL_OPTIONAL, default_value=default
            )
    model = file.message_type.add(name="Model")
    for place, (field, part) in enumerate(
        (("pieces", "Piece"), ("trainer_spec", "Trainer"), ("normalizer_spec", "Normalizer")), 1
    ):
        label = types.LABEL_REPEATED if field == "pieces" else types.LABEL_OPTIONAL
        of_type = f".triptych.sentencepiece.{part}"
        model.field.add(name=field, number=place, type=types.TYPE_MESSAGE, type_name=of_type, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("triptych.sentencepiece.Model"))
