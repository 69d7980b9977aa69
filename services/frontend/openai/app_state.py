"""The objects of the app that its routes use."""

from __future__ import annotations

from starlette.requests import Request

from triptych_services.frontend.generate import Generator
from triptych_services.frontend.openai.request_body import BodyReader


def generator_of(request: Request) -> Generator:
    """Return the generator of the app that serves a request."""
    generator: Generator = request.app.state.generator
    return generator


def reader_of(request: Request) -> BodyReader:
    """Return the reader of bodies of the app that serves a request."""
    reader: BodyReader = request.app.state.reader
    return reader
