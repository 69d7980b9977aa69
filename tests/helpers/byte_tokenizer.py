"""A real tokenizer small enough to reason about: one token per byte, a few words, two control tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triptych.text import tokenizer as text_tokenizer

WORDS = ("Hello", "world", "the", "Ġworld", "Ġthe", "stop", "Ġstop")
BOS, EOS = "<|bos|>", "<|eos|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> text_tokenizer.Tokenizer:
    """Return a tokenizer over `byte_backend`."""
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": chat_template}
    return text_tokenizer.Tokenizer(byte_backend(), config)


def byte_backend() -> Tokenizer:
    """Ids 0..255 are the bytes in the order of GPT-2's alphabet; words and control tokens follow."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return backend


def write_model_directory(directory: Path) -> Path:
    """Write the files that a frontend needs of a model: its tokenizer, and a config.json to recognise it."""
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(byte_backend().to_str())
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 40}')
    return directory
