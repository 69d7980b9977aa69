"""The tokenizer that a program gets from a server does what transformers' own does with the same files."""

from __future__ import annotations

import hashlib
import io
import zipfile

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.helpers.byte_tokenizer import BOS, EOS, write_model_directory
from tests.helpers.fake_frontend import MAX_MODEL_LEN, FakeFrontend
from triptych import LLM
from triptych.errors import FeatureDisabled, InvalidRequest, ModelError

TEXT = f"Hello the world{EOS} größer 🙂"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the world"}]


@pytest.fixture(scope="module")
def frontend():
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture(scope="module")
def tokenizer(frontend):
    with LLM(address=frontend.address) as llm:
        return llm.get_tokenizer()  # it needs no server any more


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_model_directory(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    "name",
    ["bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "pad_token_id",
     "unk_token_id", "vocab_size", "chat_template"],
)  # fmt: skip
def test_attributes(tokenizer, theirs, name):
    assert getattr(tokenizer, name) == getattr(theirs, name)


def test_sizes_and_vocabulary(tokenizer, theirs):
    assert len(tokenizer) == len(theirs)
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert set(tokenizer.all_special_tokens) == set(theirs.all_special_tokens)
    assert sorted(tokenizer.all_special_ids) == sorted(theirs.all_special_ids)
    assert tokenizer.model_max_length == MAX_MODEL_LEN  # of the server, which knows more than the files


@pytest.mark.parametrize(
    "options", [{}, {"add_special_tokens": False}, {"truncation": True, "max_length": 5}]
)
def test_encoding(tokenizer, theirs, options):
    assert tokenizer.encode(TEXT, **options) == theirs.encode(TEXT, **options)
    ours, other = tokenizer([TEXT, "a"], **options), theirs([TEXT, "a"], **options)
    assert ours.input_ids == ours["input_ids"] == other.input_ids
    assert ours.attention_mask == other.attention_mask
    assert tokenizer("a", **options).input_ids == theirs("a", **options).input_ids


@pytest.mark.parametrize("skip", [False, True])
def test_decoding(tokenizer, theirs, skip):
    ids = theirs.encode(TEXT)
    for given in (ids, ids[3], np.array(ids), tuple(ids)):
        expected = theirs.decode(list(given) if isinstance(given, tuple) else given, skip_special_tokens=skip)
        assert tokenizer.decode(given, skip_special_tokens=skip) == expected
    rows = [ids, [5], []]
    assert tokenizer.batch_decode(rows, skip) == theirs.batch_decode(rows, skip_special_tokens=skip)
    assert tokenizer.decode(rows, skip) == tokenizer.batch_decode(rows, skip)
    assert tokenizer.batch_decode(np.array([ids, ids]), skip) == [tokenizer.decode(ids, skip)] * 2
    assert tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=skip) == theirs.convert_ids_to_tokens(
        ids, skip_special_tokens=skip
    )


def test_tokens_as_the_vocabulary_spells_them(tokenizer, theirs):
    tokens = theirs.tokenize(TEXT)
    assert tokenizer.tokenize(TEXT) == tokens
    assert tokenizer.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert tokenizer.convert_tokens_to_ids(BOS) == theirs.convert_tokens_to_ids(BOS)
    assert tokenizer.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids("no such token")
    assert tokenizer.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert tokenizer.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ mood }}", "mood": "!"},
    ],
)
def test_chat_templates(tokenizer, theirs, options):
    text = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, **options) == text
    ids = theirs.apply_chat_template(CHAT, return_dict=False, **options)
    assert tokenizer.apply_chat_template(CHAT, **options) == ids
    assert tokenizer.apply_chat_template(CHAT, return_dict=True, **options).input_ids == ids


def test_what_cannot_be_a_template_or_a_text_is_named(tokenizer):
    with pytest.raises(InvalidRequest, match=r"chat_template: .*line 1"):
        tokenizer.apply_chat_template(CHAT, chat_template="{% for %}")
    with pytest.raises(InvalidRequest, match="text: expected text, not None"):
        tokenizer.encode(None)


def test_files_that_came_damaged_are_not_used(frontend, monkeypatch):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../tokenizer.json", "{}")
    good = frontend.tokenizer.archive
    for content, digest, told in (
        (good[:-1], frontend.tokenizer.digest, "its digest differs"),
        (b"no archive", None, "cannot be unpacked"),
        (archive.getvalue(), None, "no such file"),
    ):
        monkeypatch.setattr(frontend.tokenizer, "archive", content)
        monkeypatch.setattr(frontend.tokenizer, "digest", digest or hashlib.sha256(content).hexdigest())
        with LLM(address=frontend.address) as llm, pytest.raises(ModelError, match=told):
            llm.get_tokenizer()


def test_an_endless_archive_is_cut(frontend, monkeypatch):
    monkeypatch.setattr("triptych.client.grpc_client._MAX_TOKENIZER_BYTES", 1500)
    with LLM(address=frontend.address) as llm, pytest.raises(ModelError, match="has more than"):
        llm.get_tokenizer()


def test_missing_packages_are_named(frontend, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with LLM(address=frontend.address) as llm:
        with pytest.raises(FeatureDisabled, match=r"needs jinja2; pip install 'triptych\[tokenizer\]'"):
            llm.get_tokenizer()
