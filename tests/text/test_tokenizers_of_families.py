"""Tokenizers of published pipelines: random texts have the ids of transformers, ids in pieces its texts."""

from __future__ import annotations

import functools
import io
import json
import math
import random
import re
import tempfile
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.text.tokenizers_of_families import CORPUS, FAMILIES
from triptych.checkpoint.tokenizer_files import convert_tokenizer
from triptych.text.detokenizer import create_detokenizer
from triptych.text.tokenizer import Tokenizer

QUICK = ("qwen3.5", "gemma4", "phi3", "xlm-roberta", "bert-uncased")
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzABCXYZ",
    "0123456789٣५Ⅷ²½",
    " \t\n\r\u00a0\u2003\u200b\u3000",
    "'\"`.,;:!?-_/\\()[]{}<>|@#$%^&*+=~“”…。，、€",
    "éàüßñçøÅİıǅÉΩЖяא",
    "\u0301\u030a\u0327\u0653\u094d\u0e31",  # combining marks
    "你好世界日本語かなカナ한국어㐀𠀀",
    "مرحباשלוםहिन्दीไทย",
    "👩👍🏽🇫🇷🦊\u200d\ufe0f\U0001f468",
    "\x00\x01\x07\x1b\x7f\u0085\ufffd\ufeff\ue000\U0010ffff",
    "ﬁﬂⅨ㎏ｱＡ①",  # others under NFKC
)

ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")
SPELLED_OUT = re.compile("<(unk|s|/s|0x[0-9A-F]{2})>")


@functools.cache
def made(name: str) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as directory:
        family.build().save(f"{directory}/tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | family.config
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config))
        return AutoTokenizer.from_pretrained(directory), Tokenizer.from_directory(Path(directory))


def random_text(ours: Tokenizer) -> str:
    """Return a text of a few stretches: letters, runs, lines of the corpus, tokens spelled out."""
    tokens = list(ours.get_vocab())
    parts = []
    for _ in range(random.randint(0, 8)):
        kind = random.randrange(6)
        alphabet = random.choice(ALPHABETS)
        if kind < 3:
            parts.append("".join(random.choices(alphabet, k=random.randint(1, 12))))
        elif kind == 3:
            parts.append(random.choice(alphabet) * random.choice((2, 3, 7, 40)))
        elif kind == 4:
            line = random.choice(CORPUS)
            start = random.randint(0, len(line))
            parts.append(line[start : start + 30])
        else:
            parts.append(random.choice(tokens[-40:] if random.random() < 0.7 else tokens))
    return random.choice(("", " ")).join(parts)


def in_pieces(ours: Tokenizer, token_ids: list[int], *, skip: bool, num_before: int = 0) -> str:
    """Push runs of random lengths; the first ids are a prompt's, its text included."""
    before = create_detokenizer(ours, skip_special_tokens=skip)
    text = before.push(token_ids[:num_before])
    detokenizer = create_detokenizer(ours, prompt_token_ids=token_ids[:num_before], skip_special_tokens=skip)
    rest = token_ids[num_before:]
    while rest:
        length = random.choice((1, 1, 1, 2, 5))
        text += detokenizer.push(rest[:length])
        rest = rest[length:]
    return text + detokenizer.flush()


def check(name: str, num_texts: int) -> None:
    theirs, ours = made(name)
    for _ in range(num_texts):
        text = random_text(ours)
        adds = random.random() < 0.5
        token_ids = theirs(text, add_special_tokens=adds)["input_ids"]
        assert ours.encode(text, add_special_tokens=adds) == token_ids, repr(text)
        if ours.max_chars_per_token is not None:
            assert len(text) <= len(token_ids) * ours.max_chars_per_token, repr(text)
        for skip in (True, False):
            check_decode(theirs, ours, token_ids, skip=skip)
            check_decode(theirs, ours, random_ids(ours), skip=skip)


def random_ids(ours: Tokenizer) -> list[int]:
    """Return ids that no text leads to, any bytes among them."""
    ids = [token_id for token, token_id in ours.get_vocab().items() if not ONE_BYTE.fullmatch(token)]
    # the library spells a run of bytes as nothing but U+FFFD for one that is wrong, however late it comes
    return random.choices(ids, k=random.randint(0, 12))


def check_decode(
    theirs: PreTrainedTokenizerFast, ours: Tokenizer, token_ids: list[int], *, skip: bool
) -> None:
    expected = theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(token_ids, skip_special_tokens=skip) == expected, token_ids
    assert in_pieces(ours, token_ids, skip=skip) == expected, token_ids
    cut = random.randint(0, len(token_ids))
    assert in_pieces(ours, token_ids, skip=skip, num_before=cut) == expected, (token_ids, cut)


@pytest.mark.parametrize("name", QUICK)
def test_random_texts_become_the_ids_and_texts_of_transformers(name: str) -> None:
    check(name, 30)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_ids_and_texts_of_transformers(name: str) -> None:
    check(name, 400)


@pytest.mark.thorough
@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_have_the_ids_and_texts_of_their_library(
    kind: str, rule: str, has_prefix: bool, tmp_path: Path
) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=700, model_type=kind, num_threads=1,
        byte_fallback=True, add_dummy_prefix=has_prefix, normalization_rule_name=rule, minloglevel=2,
        remove_extra_whitespaces=False, character_coverage=0.99, hard_vocab_limit=False,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    backend = convert_tokenizer(tmp_path / "tokenizer.model", config)
    ours = Tokenizer(backend, {})
    num_compared = 0
    for _ in range(300):
        text = random_text(ours)
        if SPELLED_OUT.search(text):
            continue  # which the library takes for letters
        # the `tokenizers` library, and so transformers, normalizes clusters as one: CR LF becomes one space
        if rule != "identity" and backend.normalizer.normalize_str(text) != library.normalize(text):
            continue
        num_compared += 1
        token_ids = ours.encode(text, add_special_tokens=False)
        if kind == "bpe":
            assert token_ids == library.encode(text), repr(text)
        else:  # of several cuts that are as likely, either is right
            likely = [math.fsum(map(library.get_score, ids)) for ids in (token_ids, library.encode(text))]
            assert likely[0] == pytest.approx(likely[1], rel=1e-6), repr(text)
        expected = library.decode(token_ids)
        assert in_pieces(ours, token_ids, skip=True) == expected, repr(text)
    assert num_compared > 150
