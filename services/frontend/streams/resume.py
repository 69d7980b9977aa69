"""Streams that outlive their frontend: the client's token, and what a frontend needs to know to go on with one."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import InvalidRequest, NotKept
from triptych.types.sampling import MAX_CHOICES, OutputKind
from triptych.types.submit import MAX_FRONTEND_STATE_BYTES
from triptych_services.frontend.requests.prepare import PreparedRequest
from triptych_services.frontend.requests.raw import RawChat

_SECRET_BYTES = 16
_COUNT_BYTES = 2
_VERSION = 1
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=dict)
MAX_TOKEN_CHARS = 512


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """Names a stream: who has it goes on with it. Nothing can be read from it but the engine's name."""

    engine_id: str
    secret: bytes
    num_choices: int
    """Those that were submitted together."""

    def __str__(self) -> str:
        count = self.num_choices.to_bytes(_COUNT_BYTES, "big")
        packed = self.secret + count + self.engine_id.encode()
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, path: str = "resume_token") -> ResumeToken:
        """Read a token. Raises InvalidRequest on `path` if it is none."""
        bad = InvalidRequest(path, f"{text!r:.80} is no token of a stream")
        if len(text) > MAX_TOKEN_CHARS:
            raise bad
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            engine_id = packed[_SECRET_BYTES + _COUNT_BYTES :].decode()
        except (ValueError, binascii.Error):
            raise bad from None
        num_choices = int.from_bytes(packed[_SECRET_BYTES : _SECRET_BYTES + _COUNT_BYTES], "big")
        if not engine_id or not 1 <= num_choices <= MAX_CHOICES:
            raise bad
        return cls(engine_id, packed[:_SECRET_BYTES], num_choices)


@dataclass(frozen=True, slots=True)
class SeenChoice:
    """The part of a choice that a client has."""

    num_tokens: int = 0
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Retention:
    """How a request is kept at its engine. Owned by the request; each submission has a secret of its own."""

    keep_ms: int
    state: bytes
    num_choices: int
    secret: bytes = field(default=b"", repr=False)
    """Secret of the last submission. Empty: only some of the choices were submitted, and are not kept."""

    def renew(self, num_choices: int) -> dict[str, Any]:
        """Return the fields of a `SubmitRequest` of so many choices."""
        if num_choices != self.num_choices:
            self.secret = b""
            return {}
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        return {"keep_ms": self.keep_ms, "resume_secret": self.secret, "frontend_state": self.state}

    def token(self, engine_id: str) -> str:
        """Return the client's token while an engine has the request; empty if it is not kept."""
        return str(ResumeToken(engine_id, self.secret, self.num_choices)) if self.secret else ""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The part of a request that an engine does not need and another frontend does."""

    api: str
    answer: Mapping[str, Any]
    """As the API that began the stream has noted it."""
    model: str
    fingerprint: str
    seed: int
    num_choices: int
    output_kind: OutputKind
    min_interval_tokens: int
    echo: str
    is_limited_by_context: bool
    has_output: bool
    """Whether tokens were asked for; if not, the engine computes one all the same."""
    client_names: Sequence[str]
    chat: Mapping[str, Any] | None
    """Fields of the `RawChat` by which its answer is split. None: it stays one text."""

    @classmethod
    def of(cls, request: PreparedRequest) -> StreamState:
        """Return what is to be known of a request that an engine is about to get."""
        raw, chat = request.raw, request.raw.prompt
        assert raw.answer is not None, "it is to be kept"
        return cls(
            api=raw.api,
            answer=raw.answer,
            model=request.terms.name,
            fingerprint=request.fingerprint,
            seed=request.seed,
            num_choices=len(raw.emitted) or request.sampling.n,
            output_kind=raw.output_kind,
            min_interval_tokens=raw.min_interval_tokens,
            echo=request.echo,
            is_limited_by_context=request.is_limited_by_context,
            has_output=request.sampling.max_tokens != 0,
            client_names=raw.client_names,
            chat=_chat_fields(chat) if isinstance(chat, RawChat) and request.split is not None else None,
        )

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return _ENCODER.encode({"version": _VERSION, **fields}).encode("utf-8", "surrogatepass")

    @classmethod
    def from_bytes(cls, data: bytes) -> StreamState:
        """Read what another frontend has written. Raises NotKept if it was one of another version."""
        fields = json.loads(data.decode("utf-8", "surrogatepass")) if data else {}
        if fields.pop("version", None) != _VERSION:
            raise NotKept("the stream began at a frontend of another version; send the request again")
        return cls(**{**fields, "output_kind": OutputKind(fields["output_kind"])})

    @property
    def raw_chat(self) -> RawChat | None:
        """The conversation without its messages, as far as its answer depends on it."""
        return None if self.chat is None else RawChat((), **self.chat)


def create_retention(request: PreparedRequest, keep_s: float) -> Retention | None:
    """Return how a request is kept; None if it is not.

    Those are not kept whose API does not go on with streams, those that report log-probabilities of the prompt, those
    that go on with a part of their choices, and those of which there is more to be known than an engine takes.
    """
    raw = request.raw
    if not keep_s or raw.answer is None or request.sampling.prompt_logprobs is not None:
        return None
    if raw.emitted and tuple(raw.emitted) != tuple(range(len(raw.emitted))):
        return None
    state = StreamState.of(request)
    data = state.to_bytes()
    if len(data) > MAX_FRONTEND_STATE_BYTES:
        return None
    return Retention(round(keep_s * 1000), data, state.num_choices)


def _chat_fields(chat: RawChat) -> dict[str, Any]:
    return {
        "tools": list(chat.tools),
        "tool_choice": chat.tool_choice,
        "parallel_tool_calls": chat.parallel_tool_calls,
        "includes_reasoning": chat.includes_reasoning,
        "continue_final_message": chat.continue_final_message,
    }
