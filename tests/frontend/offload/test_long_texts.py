"""Long texts, which a child process tokenizes: the same ids, and a refusal where it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.helpers.byte_tokenizer import BOS, byte_tokenizer
from tests.helpers.http_api import open_api
from triptych.errors import InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych_services.frontend.offload.long_texts import LONG_TEXT, LongTextEncoder
from triptych_services.frontend.requests.text_model import TextModel

TOKENIZER = byte_tokenizer()
TEXT = f"Hello world ü \U0001f600\n{BOS}" * 5000
LIMITS = {"max_model_len": 1 << 20, "max_tokens": None}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize(
    "arguments",
    [
        {"add_special_tokens": True},
        {"add_special_tokens": False, "max_tokens": 7},
        {"max_tokens": 7, "keeps_beginning": True},
    ],
)
async def test_child_gives_the_ids_of_the_tokenizer(arguments: dict[str, object]) -> None:
    encoder = LongTextEncoder(TOKENIZER)
    ids = await asyncio.to_thread(encoder.encode, TEXT, "prompt", **arguments)
    assert ids.dtype == np.uint32
    assert ids.tolist() == TOKENIZER.encode(TEXT, **arguments)


async def test_long_text_may_have_no_tokens() -> None:
    backend = Backend(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    text = TextModel(Tokenizer(backend, {}), {}, Path("unused"))
    spaces = " " * (LONG_TEXT + 1)
    assert (await text.encode(spaces, "prompt", **LIMITS)).tolist() == []
    assert (await text.encode(f"{spaces}a", "prompt", **LIMITS)).tolist() == [1]


async def test_one_process_is_kept_for_long_texts() -> None:
    text, before = TextModel(TOKENIZER, {}, Path("unused")), children()
    await text.encode("a" * LONG_TEXT, "prompt", **LIMITS)
    assert not children() - before
    results = await asyncio.gather(*(text.encode(TEXT, "prompt", **LIMITS) for _ in range(4)))
    assert all(ids.tolist() == TOKENIZER.encode(TEXT) for ids in results)
    assert len(children() - before) == 1


async def test_text_that_takes_too_long_is_refused_and_the_next_is_not() -> None:
    encoder = LongTextEncoder(TOKENIZER, limit_s=0.2)
    with pytest.raises(InvalidRequest, match=r"prompt: 40000000 characters take more time than the limit"):
        await asyncio.to_thread(encoder.encode, "ab " * 13_333_333 + "x", "prompt")
    ids = await asyncio.to_thread(encoder.encode, "Hello", "prompt")
    assert ids.tolist() == TOKENIZER.encode("Hello")


async def test_start_of_a_process_writes_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = LongTextEncoder(TOKENIZER)  # for that holds the interpreter's lock for tens of milliseconds
    monkeypatch.setattr(Tokenizer, "to_json", lambda self: pytest.fail("streams wait meanwhile"))
    ids = await asyncio.to_thread(encoder.encode, "Hello", "prompt")
    assert ids.tolist() == TOKENIZER.encode("Hello")


async def test_process_that_was_killed_is_started_again() -> None:
    encoder, before = LongTextEncoder(TOKENIZER), children()
    await asyncio.to_thread(encoder.encode, "Hello", "prompt")
    (child,) = children() - before
    child.kill()
    child.wait(30)
    ids = await asyncio.to_thread(encoder.encode, "world", "prompt")
    assert ids.tolist() == TOKENIZER.encode("world")


async def test_answer_of_many_tokens_is_whole() -> None:
    async with open_api() as api:
        prompt = "z" * 20_001
        answer = (await api.http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})).json()
        short = (await api.http.post("/tokenize", json={"prompt": "z", "return_token_strs": True})).json()
        assert answer["tokens"] == short["tokens"] * 20_001
        assert answer["token_strs"] == short["token_strs"] * 20_001
        assert answer["count"] == 20_001
