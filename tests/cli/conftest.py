"""Servers for the commands to call, on threads of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.fake_frontend import FakeFrontend
from tests.helpers.http_api import HttpApi, open_api
from triptych.client.loop_thread import LoopThread


@pytest.fixture
def frontend() -> Iterator[FakeFrontend]:
    """A gRPC frontend without a model."""
    with FakeFrontend() as fake:
        yield fake


@pytest.fixture
def api() -> Iterator[HttpApi]:
    """The HTTP API over a fake generator."""
    loop = LoopThread("http-api")
    opened = open_api()
    try:
        yield loop.run(opened.__aenter__())
        loop.run(opened.__aexit__(None, None, None))
    finally:
        loop.close()
