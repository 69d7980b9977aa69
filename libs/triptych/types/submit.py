"""What passes between a frontend and an engine besides outputs."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.types.facts import ModelFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32


@dataclass(frozen=True, slots=True, eq=False)
class SubmitRequest:
    """One request as the engine takes it: validated, tokenized, one choice."""

    number: int
    """Its name in this frontend's session; never used twice there."""
    request_id: str
    """Its name in the logs; unique in the engine while alive."""
    token_ids: U32
    """[num_known] prompt, then what another engine emitted already."""
    num_prompt_tokens: int
    sampling: SamplingParams
    """`max_tokens` is never None here; it counts from the end of the prompt."""
    seed: int
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_remaining_ms: int | None = None
    adapter: str = ""
    whole_output: bool = False
    """Nobody looks at the tokens before the last one: those of several steps may come together."""


@dataclass(frozen=True, slots=True)
class EngineWelcome:
    """An engine's state as its frontends see it."""

    engine_id: str
    epoch: int
    """Unix ms at the engine's start."""
    ready: bool
    why_not_ready: str = ""
    model: ModelFacts | None = None
    """Once it has been ready."""
    has_priorities: bool = True


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a stream between a frontend and an engine begins with, or goes on with."""

    name: str
    """To resume the session by."""
    is_resumed: bool
    """The session that was asked for goes on."""
    messages_received: int
    """Submits and aborts that have taken effect, counted in messages since the session's start."""
    resume_ttl_s: float
    """How long the session outlives a broken stream."""
