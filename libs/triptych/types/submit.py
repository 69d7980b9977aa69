"""Messages between a frontend and an engine, except outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from triptych.types.adapters import AdapterFacts
from triptych.types.facts import ModelFacts
from triptych.types.kv_transfer import LEASE_BYTES, EngineRole, KvEndpoint, KvSource, Width
from triptych.types.pooling import GENERATION, PoolingParams
from triptych.types.sampling import MAX_CHOICES, SamplingParams
from triptych.types.step import U32, U64, RequestGuesses

MAX_SUBMIT_BYTES = 32 << 20
"""Limit of one request in bytes: half of the largest message between the tiers."""
MAX_FRONTEND_STATE_BYTES = 16 << 10
"""Limit of `SubmitRequest.frontend_state`."""
_SCALAR_BYTES = 512  # of all fields of one number each, with their tags


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The part of a request that all tiers carry as it is, from the client's call to the engine's queue.

    Its deadline is no part of it: it is time left in a message, and a reading of each process's own clock elsewhere.
    """

    request_id: str = ""
    """Its name in the logs; unique among its frontend's requests while it is alive."""
    priority: int = 0
    """Requests with a lower number run first."""
    tenant: str = ""
    """The tenant that its tokens are charged to."""
    cache_salt: str = ""
    """Prefixes are shared only between requests with equal salts."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SubmitRequest:
    """One request as the engine takes it: validated, tokenized, with one or several choices."""

    head: RequestHead
    numbers: U32
    """[num_choices] the name of each choice in this frontend's session; never used twice there."""
    seeds: U64
    """[num_choices] key of each choice's random numbers."""
    prompt_token_ids: U32
    """[num_prompt_tokens] shared by all choices."""
    emitted: tuple[U32, ...] = ()
    """[num_choices] the tokens of each that another engine has emitted already; empty if none of any."""
    sampling: SamplingParams
    """`max_tokens` is never None here; it counts from the end of the prompt."""
    deadline_remaining_ms: int | None = None
    pooling: PoolingParams | None = None
    """How its row becomes vectors; None: it generates tokens. A pooled request has one choice."""
    adapter: str = ""
    """Name of the adapter that is applied to the weights. Empty: none is."""
    adapter_digest: str = ""
    """Digest of the adapter that the frontend knows by this name. An engine that has another refuses the request."""
    whole_output: bool = False
    """The tokens before the last one are not looked at: those of several steps may come together."""
    num_engine_deaths: int = 0
    """Engines that died in a row while it was in flight there: it may be the reason."""
    is_moved: bool = False
    """Another engine has admitted it, and its tenant has paid there."""
    keep_ms: int = 0
    """How long the engine keeps it without a reader, for another frontend to go on with; 0: not at all."""
    resume_secret: bytes = b""
    """If it is kept: by which an `AttachRequest` finds it."""
    frontend_state: bytes = b""
    """If it is kept: what a frontend needs to know to go on with it. The engine does not read it."""
    kv_lease: Annotated[bytes, Width(LEASE_BYTES, may_be_empty=True)] = b""
    """The name under which other workers may pull the prompt's blocks. Empty: they may not."""
    kv_source: KvSource | None = None
    """The place at which the prompt's blocks can be pulled. None: there is none."""
    cached_tokens: tuple[int | None, ...] = ()
    """[num_choices] prompt tokens that the engine with the first token of each found in its cache; None: not known.
    Empty: not known of any."""
    guesses: RequestGuesses | None = None
    """Counts of those of its choices that had guesses at other engines; None: none had."""
    model_digest: str = ""
    """`ModelIdentity.digest` of the engine's model when the engine was chosen to go on with `emitted`. An engine that
    has another model by now refuses the request, which goes on where its tokens stay the same. Empty: any model."""

    @property
    def num_choices(self) -> int:
        return len(self.numbers)

    @property
    def num_bytes(self) -> int:
        """An upper bound of its size in a message, in bytes."""
        head = self.head
        num_chars = len(head.request_id) + len(head.tenant) + len(head.cache_salt) + len(self.adapter)
        columns = self.numbers.nbytes + self.seeds.nbytes + self.prompt_token_ids.nbytes
        emitted = sum(8 + token_ids.nbytes for token_ids in self.emitted)
        kept = len(self.resume_secret) + len(self.frontend_state) + 4 * len(self.cached_tokens)
        kept += len(self.model_digest) + len(self.adapter_digest)
        kept += 0 if self.guesses is None else 12 * len(self.guesses.numbers)
        return columns + emitted + kept + 4 * num_chars + self.sampling.num_bytes + _SCALAR_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class AttachRequest:
    """A request of another session, which is to go on in this one.

    It is as long as what the client has shown, since the number of choices is not confirmed yet.
    """

    secret: bytes
    """Its `resume_secret`."""
    first_number: int
    """The name of its first choice in the new session; the others follow. None is used twice there."""
    num_choices: int
    """As the client claims."""
    seen: Mapping[int, int] = field(default_factory=dict)
    """Index of a choice, below `num_choices` -> output tokens that the client has. Of the others it has none."""
    tenant: str | None = None
    """The tenant that it must be of; None: any."""

    @property
    def numbers(self) -> range:
        """The names of all choices."""
        return range(self.first_number, self.first_number + self.num_choices)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a message, at most."""
        return _SCALAR_BYTES + 8 * len(self.seen)


def single_choice(
    number: int,
    request_id: str,
    token_ids: Sequence[int] | U32,
    sampling: SamplingParams,
    *,
    seed: int,
    num_prompt_tokens: int | None = None,
    priority: int = 0,
    tenant: str = "",
    cache_salt: str = "",
    **fields: Any,
) -> SubmitRequest:
    """Return a request with one choice.

    Args:
        token_ids: Prompt, then what another engine has emitted.
        num_prompt_tokens: How many of them are the prompt; None: all.
        priority, tenant, cache_salt: Fields of `RequestHead`.
        fields: Other fields of `SubmitRequest`, as they are.
    """
    column = np.array(token_ids, np.uint32)
    num_prompt_tokens = len(column) if num_prompt_tokens is None else num_prompt_tokens
    emitted = column[num_prompt_tokens:]
    return SubmitRequest(
        head=RequestHead(request_id, priority, tenant, cache_salt),
        numbers=np.array([number], np.uint32),
        seeds=np.array([seed], np.uint64),
        prompt_token_ids=column[:num_prompt_tokens],
        emitted=(emitted,) if len(emitted) else (),
        sampling=sampling,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine's scheduler. Frontends refuse other requests before they send them."""

    has_priorities: bool = True
    """Whether requests may have a priority other than 0."""
    max_choices: int = MAX_CHOICES
    """Choices that can run and wait together: a request with more can never be admitted."""
    keeps_requests: bool = False
    """Whether it keeps requests for other frontends to go on with."""
    max_running: int = 0
    """Choices that run at a time at most. 0: not known."""


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Facts and limits that requests for a model are checked against, which one engine or several serve."""

    model: ModelFacts
    """The facts of the engine with the longest max_model_len."""
    limits: EngineLimits
    """The widest limits of the engines."""
    default_len: int
    """Tokens of prompt and output of a request that leaves `max_tokens` open. All engines of about the longest
    max_model_len can serve it, which differ a little where memory is the limit."""
    adapter: AdapterFacts | None = None
    """Adapter that is applied to the model's weights. None: none is."""

    @property
    def name(self) -> str:
        """Name by which requests mean the model with its adapter."""
        return self.model.name if self.adapter is None else self.adapter.name

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter. Empty: there is none."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def fingerprint(self) -> str:
        """Digest of the checkpoint; with an adapter, of both. Equal where the same weights compute."""
        base = self.model.identity.fingerprint
        if self.adapter is None or not base:
            return base
        return hashlib.sha256(f"{base} {self.adapter.digest}".encode()).hexdigest()

    def context_for(self, num_prompt_tokens: int) -> int:
        """Return the tokens that such a request may fill; more than `default_len` if that leaves it little."""
        longest = self.model.max_model_len
        is_enough = 2 * (self.default_len - num_prompt_tokens) >= longest - num_prompt_tokens
        return self.default_len if is_enough else longest


class RequestNeeds(NamedTuple):
    """The demands of a request that engines of one kind may differ in."""

    num_tokens: int = 0
    """Tokens of the prompt and of the longest output."""
    num_choices: int = 1
    has_priority: bool = False
    """Its priority is not 0."""
    task: str = GENERATION
    """Name of its task, as in `ModelFacts.tasks`."""


@dataclass(frozen=True, slots=True)
class PrefixHash:
    """How an engine names the blocks of its prefix cache."""

    name: str
    block_size: int
    """Tokens per block."""
    test_vector: bytes
    """The hash of tokens that both sides know."""


@dataclass(frozen=True, slots=True)
class EngineWelcome:
    """An engine's state as its frontends see it."""

    engine_id: str
    ready: bool
    why_not_ready: str = ""
    model: ModelFacts | None = None
    """Once it has been ready."""
    limits: EngineLimits = EngineLimits()
    prefix_hash: PrefixHash | None = None
    """The names of its blocks. None: it caches no prefixes, or has not been ready yet."""
    boot_id: str = ""
    """Drawn at the engine's start. Empty: not known."""
    role: EngineRole = EngineRole.BOTH
    kv_endpoint: KvEndpoint | None = None
    """The place at which other workers pull its worker's KV blocks. None: there is none."""
    num_other_frontends: int = 0
    """Frontends beside the one that reads this that are connected and take up streams."""
    takes_streams: bool = False
    """Whether the frontend that reads this takes up streams, as it has said itself."""
    adapters: tuple[AdapterFacts, ...] = ()
    """Adapters that requests may name."""
