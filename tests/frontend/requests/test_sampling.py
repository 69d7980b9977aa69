"""Each limit of the sampling fields, crossed once through each API: field, value and limit are named."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.grpc_api import Api, ask, error_of
from tests.helpers.grpc_api import open_api as open_grpc
from tests.helpers.http_api import HttpApi
from tests.helpers.http_api import open_api as open_http
from triptych.errors import InvalidRequest
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind
from triptych.v1 import generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

HTTP_LIMITS = {"seed": (-(1 << 63), (1 << 64) - 1)}
"""Limits that are wider over HTTP, where seeds may have a sign."""


def show(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def crossings(limits: dict[str, tuple[float, float]]) -> Iterator[Any]:
    """Yield each numeric field with a value beyond one of its limits, and that limit."""
    for name, spec in SAMPLING_FIELDS.items():
        if spec.kind not in (FieldKind.INTEGER, FieldKind.NUMBER):
            continue
        low, high = limits.get(name, (spec.low, spec.high))
        step = 1 if spec.kind is FieldKind.INTEGER else 0.25
        below, above = low if spec.excludes_low else low - step, high + step
        for value, limit in ((below, low), (above, high)):
            if math.isfinite(limit) and value not in spec.unsupported_values:
                yield pytest.param(name, value, limit, id=f"{name}={show(value)}")


HTTP = [case for case in crossings(HTTP_LIMITS) if case.values[0] != "prompt_logprobs" or case.values[1] > 0]


def to_generation(values: dict[str, float]) -> dict[str, Any] | None:
    """Return the parts of a message that hold these fields, or None if it cannot hold one of them."""
    parts: dict[str, Any] = {"sampling": {}, "length": {}}
    descriptor = generation_pb2.Generation.DESCRIPTOR
    for name, value in values.items():
        homes = [
            part for part in parts if name in descriptor.fields_by_name[part].message_type.fields_by_name
        ]
        if not homes:
            return None
        parts[homes[0]][name] = value
    try:
        generation_pb2.Generation(**parts)
    except (ValueError, TypeError):
        return None
    return parts


GRPC = [case for case in crossings({}) if to_generation({case.values[0]: case.values[1]}) is not None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors() -> AsyncIterator[tuple[HttpApi, Api]]:
    async with FakeEngine() as engine, open_grpc(engine) as api, open_http(api.core.generator) as http:
        yield http, api


async def message_of(http: HttpApi, body: dict[str, Any]) -> tuple[str, str]:
    response = await http.http.post("/v1/completions", json={"prompt": "Hello", **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    return error["param"], error["message"]


@pytest.mark.parametrize(("name", "value", "limit"), HTTP)
async def test_over_http(doors: tuple[HttpApi, Api], name: str, value: float, limit: float) -> None:
    param, message = await message_of(doors[0], {name: value})
    assert param == name
    assert message.startswith(f"{name}: {show(value)} ")
    assert show(limit) in message


@pytest.mark.parametrize(("name", "value", "limit"), GRPC)
async def test_over_grpc(doors: tuple[HttpApi, Api], name: str, value: float, limit: float) -> None:
    parts = to_generation({name: value})
    assert parts is not None
    error = await error_of(doors[1].generation.StreamGenerate(ask(text="Hello", **parts)))
    assert isinstance(error, InvalidRequest)
    (violation,) = error.violations
    assert violation.field.rpartition(".")[2] == name
    assert violation.description.startswith(f"{show(value)} ")
    assert show(limit) in violation.description


async def test_all_at_once(doors: tuple[HttpApi, Api]) -> None:
    http, api = doors
    wrong = {case.values[0]: case.values[1] for case in HTTP}
    _, message = await message_of(http, wrong)
    assert [name for name in wrong if f"{name}: " not in message] == []
    wrong = {case.values[0]: case.values[1] for case in GRPC}
    parts = to_generation(wrong)
    assert parts is not None
    error = await error_of(api.generation.StreamGenerate(ask(text="Hello", **parts)))
    assert isinstance(error, InvalidRequest)
    assert {violation.field.rpartition(".")[2] for violation in error.violations} == set(wrong)
