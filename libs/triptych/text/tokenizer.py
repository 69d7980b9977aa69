"""Text <-> token ids, over the `tokenizers` library and a model's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import models

from triptych.checkpoint.tokenizer_files import TOKENIZER_FILE, read_tokenizer_config
from triptych.errors import ModelError

CHAT_TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of templates by name."""

_DEFAULT = "default"
_BYTES_OF_TEXT = frozenset(range(0xF5)) - {0xC0, 0xC1}  # of UTF-8


class Tokenizer:
    """One model's tokenizer. Immutable once built and safe to use from several threads.

    What `encode` adds around a text (BOS, for the models that want one) is the post-processor's in
    tokenizer.json; `add_bos_token` in tokenizer_config.json does not count, as in transformers 5.
    """

    def __init__(self, backend: Backend, config: dict[str, Any]) -> None:
        backend.no_truncation()  # some files carry the settings of their training
        backend.no_padding()
        self._backend = backend
        self._spelling = read_spelling(backend)
        self.token_bytes: Callable[[int], bytes] = _BytesOfTokens(backend, self._spelling).__getitem__
        """Returns the UTF-8 bytes of a token, special tokens spelled out; empty for an unknown id."""
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Ids of the control tokens, which text for people leaves out."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """Tokens known here; a model's logits may have more columns, for padding."""
        self.num_base_tokens = backend.get_vocab_size(with_added_tokens=False)
        """Tokens known here without those that were added to the vocabulary."""
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.unk_token = _token_text(config.get("unk_token"))
        self.pad_token = _token_text(config.get("pad_token"))
        self.class_name: str = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
        """Name of its class in transformers."""
        self.other_templates = _templates(config.get("chat_template"))
        """Name -> Jinja source of the model's chat templates but the one that is used by default."""
        self.chat_template: str | None = self.other_templates.pop(_DEFAULT, None)
        """Jinja source; None where the model has none."""
        self.max_chars_per_token = _max_chars_per_token(backend)
        """Return the most characters of a text that one token can represent, or None if there is no bound."""

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and, if there are, chat templates in files of their own.

        Raises:
            ModelError: A file is missing or broken.
        """
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a model directory needs it")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: cannot be read as a tokenizer: {error}") from error
        config = read_tokenizer_config(directory)
        # newer checkpoints keep them apart, and those take priority, as in transformers
        apart = {file.stem: file for file in (directory / MORE_TEMPLATES).glob("*.jinja")}
        if (directory / CHAT_TEMPLATE_FILE).is_file():
            apart[_DEFAULT] = directory / CHAT_TEMPLATE_FILE
        if apart:
            config["chat_template"] = [
                {"name": name, "template": file.read_text(encoding="utf-8")} for name, file in apart.items()
            ]
        return cls(backend, config)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        keeps_beginning: bool = False,
    ) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids.

        Args:
            add_special_tokens: Add what the model wants around a plain text; off for a rendered chat template,
                which has written it already.
            max_tokens: Keep only the end of the text, so that there are at most so many tokens. What is added
                around the text stays, as with Hugging Face's `truncation_side`.
            keeps_beginning: Keep the beginning of the text in place of its end.
        """
        if max_tokens is not None:
            return self._encode_cut(text, add_special_tokens, max_tokens, keeps_beginning)
        # Of the library's ways this one holds the GIL least, which counts on a thread beside an event loop:
        # at most 3 ms for 1 MB of text, where `encode` held it for 26.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of two texts, joined as the model's post-processor does.

        Args:
            max_tokens: Take the ends of the longer text off, until there are at most so many tokens. None: all stay.
        """
        encodings = self._backend.encode_batch_fast([first, second], add_special_tokens=False)
        if max_tokens is not None:
            room = max(0, max_tokens - self._backend.num_special_tokens_to_add(True))
            lens = [len(encoding.ids) for encoding in encodings]
            shorter, longer = sorted((0, 1), key=lens.__getitem__)  # the second where both are as long
            num_kept = min(lens[shorter], room // 2)
            encodings[shorter].truncate(num_kept)
            encodings[longer].truncate(room - num_kept)
        ids: list[int] = self._backend.post_process(encodings[0], encodings[1], True).ids
        return ids

    def find_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Return where in `text` each token of `encode` begins and ends, in code points; (0, 0) for an added one."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        return offsets

    def _encode_cut(
        self, text: str, add_special_tokens: bool, max_tokens: int, keeps_beginning: bool
    ) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        num_added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        direction = "right" if keeps_beginning else "left"
        encoding.truncate(max(0, max_tokens - num_added), direction=direction)
        encoding = self._backend.post_process(encoding, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids[:max_tokens] if keeps_beginning else ids[-max_tokens:]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as a whole: equal to what an `IncrementalDetokenizer` says in pieces.

        Bytes that are not UTF-8 become U+FFFD; ids that are not known here have no text.
        """
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        if not self.is_exact:
            return self.decode_all(token_ids)
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` by the library's decoder, special tokens spelled out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        """Return the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token as the vocabulary spells it."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def is_exact(self) -> bool:
        """Whether a text is the bytes of its tokens, joined. Otherwise `token_bytes` shows tokens, and no more."""
        return self._spelling.is_exact

    @property
    def strips_leading_space(self) -> bool:
        """Whether `encode` puts a space before every text, which `decode` then leaves out."""
        return self._spelling.strips_leading_space


class _BytesOfTokens(dict[int, bytes]):
    """Token id -> its bytes, found at the first look-up. The others cost no call of Python's."""

    def __init__(self, backend: Backend, spelling: Spelling) -> None:
        super().__init__()
        self._backend = backend
        self._spelling = spelling

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        found = self[token_id] = b"" if token is None else self._spelling.bytes_of(token)
        return found


def _max_chars_per_token(backend: Backend) -> int | None:
    """Return the length of the longest token, if no part of a text is left out or becomes the unknown token."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not isinstance(backend.model, models.BPE) or not _has_all_bytes(backend, vocabulary):
        return None
    shrinks_by = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks_by = 4  # no composed character has more parts
        elif step["type"] not in ("Prepend", "Replace") or "Regex" in step.get("pattern", ()):
            return None
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if (
            step["type"] not in ("ByteLevel", "Split", "Digits", "Metaspace")
            or step.get("behavior") == "Removed"
        ):
            return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # it takes any number of spaces with it
    return shrinks_by * max(map(len, vocabulary), default=1)


def _has_all_bytes(backend: Backend, vocabulary: Mapping[str, int]) -> bool:
    """Return whether any text is made of tokens, so that none of it is unknown."""
    if backend.model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    return all(
        letter in vocabulary for letter, byte in _byte_level_alphabet().items() if byte in _BYTES_OF_TEXT
    )


def _steps(part: Any, list_name: str) -> list[dict[str, Any]]:
    """Return the description of a normalizer or pre-tokenizer, its parts where it is a sequence."""
    if part is None:
        return []
    description: dict[str, Any] = json.loads(part.__getstate__())
    if description["type"] != "Sequence":
        return [description]
    steps: list[dict[str, Any]] = description[list_name]
    return steps


def _token_text(value: Any) -> str | None:
    """A special token's text: older files write a string, others an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _templates(value: Any) -> dict[str, str]:
    """Return name -> source of the templates of tokenizer_config.json: one, or a list of named ones."""
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {} if value is None else {_DEFAULT: value}


class Spelling(Protocol):
    """Text is the bytes of its tokens, joined: what makes it possible to decode token by token."""

    is_exact: bool
    """Whether the text of tokens is what the tokenizer's own decoder makes of them."""
    strips_leading_space: bool
    """Whether the first space of a text is the tokenizer's own and is left out of it."""

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token of the vocabulary; any part of a UTF-8 sequence."""
        ...


class ByteLevelSpelling:
    """GPT-2 and after: each byte of a token is one of 256 printable characters."""

    is_exact = True
    strips_leading_space = False

    def __init__(self) -> None:
        self._character_to_byte = _byte_level_alphabet()

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([self._character_to_byte[character] for character in token])
        except KeyError:  # an added token, which is plain text
            return token.encode()


class ByteFallbackSpelling:
    """SentencePiece: `▁` is a space, `<0x0A>` is a byte, all else is text."""

    is_exact = True

    def __init__(self, space: str, *, strips_leading_space: bool) -> None:
        self._space = space
        self.strips_leading_space = strips_leading_space

    def bytes_of(self, token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(self._space, " ").encode()


class ShownSpelling:
    """Decoders that join tokens by rules of their own, so that a text is not the sum of its tokens.

    A token is shown as the decoder makes it, as the second of two, so that it has the space before it.
    """

    is_exact = False
    strips_leading_space = True

    def __init__(self, backend: Backend) -> None:
        self._decoder = backend.decoder

    def bytes_of(self, token: str) -> bytes:
        if self._decoder is None:
            return f" {token}".encode()
        first: str = self._decoder.decode([token])
        both: str = self._decoder.decode([token, token])
        return both[len(first) :].encode()


def read_spelling(backend: Backend) -> Spelling:
    """Return the spelling that the decoder of tokenizer.json describes."""
    description = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps: list[dict[str, Any]] = description.get("decoders", [description])
    match steps:
        case [{"type": "ByteLevel"}]:
            return ByteLevelSpelling()
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]:
            return ByteFallbackSpelling(space, strips_leading_space=False)
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]:
            return ByteFallbackSpelling(space, strips_leading_space=True)
    return ShownSpelling(backend)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable bytes of Latin-1 are themselves, the others go from U+0100 up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
