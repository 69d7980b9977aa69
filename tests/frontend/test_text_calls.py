"""The calls on texts, in front of a fake engine."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.frontend import frontend_core
from triptych.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from triptych.observe.metrics import FrontendMetrics
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator

TOKENIZER = byte_tokenizer()


async def test_tokenize_and_detokenize() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        text = core.generator.text
        assert await text.tokenize("Hello") == TOKENIZER.encode("Hello")
        chat = RawChat([{"role": "user", "content": "Hi"}])
        assert await text.tokenize(chat) == TOKENIZER.encode("user: Hi\nassistant:")
        assert await text.detokenize(TOKENIZER.encode("Größe")) == "Größe"
        with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: 300 is not in the vocabulary, 0\.\.299"):
            await text.detokenize([5, 300])
        with pytest.raises(InvalidRequest, match=r"token_ids: 262145 tokens are above the limit 262144"):
            await text.detokenize([5] * 262145)
        with pytest.raises(ModelNotFound):
            await text.tokenize("x", model="gpt-5")
        with pytest.raises(ModelNotFound, match=r"'x{200,256}; served: tiny"):
            await text.tokenize("x", model="x" * 100_000)


async def test_bytes_and_places_of_tokens() -> None:
    async with FakeEngine() as engine, frontend_core(engine) as core:
        text = core.generator.text
        token_ids = await text.tokenize("Größe")
        assert b"".join(await text.token_bytes(token_ids)) == "Größe".encode()
        assert len(await text.find_offsets("Größe")) == len(token_ids)


async def test_without_a_tokenizer_texts_are_refused() -> None:
    router, metrics = Router(), FrontendMetrics.create(CollectorRegistry())
    generator = Generator(router, metrics, Migrator(router, metrics, MigrationTerms()))
    with pytest.raises(EngineUnavailable, match="the tokenizer is being loaded"):
        await generator.text.tokenize("Hello")
