"""Decides which new requests are queued, and which are refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triptych.config import SchedulerConfig
from triptych.errors import ConfigError, DeadlineUnreachable, DuplicateRequest, InvalidRequest, QueueFull
from triptych.types.facts import KvKind, WorkerFacts
from triptych.types.submit import MAX_SUBMIT_BYTES, EngineLimits
from triptych_services.enginecore.kv.groups import check_layout, longest_step
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.forecast import FirstTokenForecast
from triptych_services.enginecore.scheduler.policy import create_policy
from triptych_services.enginecore.scheduler.request_states import RequestStates


def check_config(config: SchedulerConfig) -> None:
    """Check that options can work together, whatever the worker is.

    Raises:
        ConfigError: They cannot; names both values.
    """
    if 0 < config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {config.max_num_batched_tokens} is below scheduler.max_num_seqs "
            f"{config.max_num_seqs}: each row that decodes takes a token of a step; raise the one or lower the other"
        )
    if config.max_long_partial_prefills and not config.long_prefill_token_threshold:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills {config.max_long_partial_prefills} counts prompts longer than "
            "scheduler.long_prefill_token_threshold, which is 0: set that too, or neither"
        )
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold {config.long_prefill_token_threshold} splits prompts, and "
            "scheduler.enable_chunked_prefill is off: set one of them only"
        )


def without_chunks(config: SchedulerConfig) -> SchedulerConfig:
    """Return the config of a model that computes each prompt in one step."""
    return replace(
        config, enable_chunked_prefill=False, long_prefill_token_threshold=0, max_long_partial_prefills=0
    )


def check_facts(config: SchedulerConfig, facts: WorkerFacts) -> None:
    """Check that every request that could be admitted could finish.

    Raises:
        ConfigError: It could not; names both values.
    """
    kv, max_model_len = facts.kv, facts.model.max_model_len
    check_layout(
        kv,
        max_model_len=max_model_len,
        chunk=longest_step_of(config, facts),
        max_samples_per_row=facts.max_samples_per_row,
        max_steps_in_flight=facts.max_steps_in_flight,
    )
    if kv.is_plain and max_model_len > kv.num_tokens:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit into {kv.num_blocks - 1} KV blocks of {kv.block_size} tokens: "
            "lower model.max_model_len or raise cache.num_blocks"
        )
    if facts.model.is_encoder and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {config.max_num_batched_tokens} is below max_model_len "
            f"{max_model_len}, and an encoder computes each text whole in one step: raise the one or lower the other"
        )
    states = [group.block_size for group in kv.groups if group.kind is KvKind.STATE]
    if states and not config.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler.enable_chunked_prefill is off, and the model keeps recurrent states, for which prompts are cut "
            f"every {min(states)} tokens: turn it on"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {config.max_num_batched_tokens} is below max_model_len "
            f"{max_model_len}, and scheduler.enable_chunked_prefill is off: no step could hold a long prompt"
        )


def longest_step_of(config: SchedulerConfig, facts: WorkerFacts) -> int:
    """Return the most positions between what a row needs no more and the end of its next step."""
    max_tokens = config.long_prefill_token_threshold or config.max_num_batched_tokens
    return longest_step(max_tokens, facts.max_steps_in_flight, facts.max_samples_per_row)


def limits_of(config: SchedulerConfig) -> EngineLimits:
    """Return what frontends must know of a config."""
    return EngineLimits(
        has_priorities=create_policy(config).has_priorities,
        max_choices=config.max_num_seqs + config.max_num_waiting,
        max_running=config.max_num_seqs,
    )


class Admission:
    """Checks new requests and makes room in the queue. The scheduler owns it."""

    def __init__(self, config: SchedulerConfig, max_model_len: int, *, num_stages: int = 1) -> None:
        self.forecast = FirstTokenForecast(config, num_stages=num_stages)
        self.limits = limits_of(config)
        self._config = config
        self._max_model_len = max_model_len

    def limit_of(self, request: Request) -> int:
        """Return the number of tokens that a request may grow to, prompt included."""
        if request.is_pooled:
            return min(self._max_model_len, request.num_prompt_tokens) + 1
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, request.num_prompt_tokens + max_tokens)

    def check(self, choices: Sequence[Request], states: RequestStates, now: float) -> None:
        """Check that the choices of one client's request may be added, whether or not the queue has room.

        Args:
            choices: All choices of the request.
            states: All requests that have not ended.
            now: Seconds on the clock of the deadlines.

        Raises:
            InvalidRequest: It can never run: no prompt, no room for an output, more choices than ever fit, or a
                priority under a policy that has none.
            DuplicateRequest: Its request_id is in use by its tenant in its session, or a number by its session. Choices
                that move here one after the other share an id.
            DeadlineUnreachable: Its first token is predicted for after its deadline, and it has not moved here.
        """
        config, first = self._config, choices[0]
        num_prompt, num_bytes = first.num_prompt_tokens, first.content.num_bytes
        if not num_prompt:
            raise InvalidRequest("prompt", "0 tokens: at least one is needed")
        if first.is_pooled and num_prompt > self._max_model_len:
            raise InvalidRequest(
                "prompt", f"{num_prompt} tokens are above the limit: max_model_len is {self._max_model_len}"
            )
        if num_prompt >= self._max_model_len and not first.is_pooled:
            raise InvalidRequest(
                "prompt",
                f"{num_prompt} tokens leave no room for an output: max_model_len is {self._max_model_len}",
            )
        if first.head.priority and not self.limits.has_priorities:
            raise InvalidRequest(
                "priority", f"{first.head.priority} is not 0, and scheduler.policy is {config.policy}"
            )
        if len(choices) > self.limits.max_choices:
            raise InvalidRequest(
                "n",
                f"{len(choices)} choices are above the limit {self.limits.max_choices}: scheduler.max_num_seqs "
                f"{config.max_num_seqs} plus scheduler.max_num_waiting {config.max_num_waiting}",
            )
        if num_bytes > MAX_SUBMIT_BYTES:
            raise InvalidRequest(
                "sampling",
                f"prompt and sampling parameters take {num_bytes} bytes, above the limit {MAX_SUBMIT_BYTES}",
            )
        if states.index.has_id_of(first) and not first.is_moved:
            raise DuplicateRequest(f"request_id {first.head.request_id!r} is alive on this session")
        for request in choices:
            num_known, limit = len(request.token_ids), self.limit_of(request)
            if num_known >= limit:
                raise InvalidRequest(
                    "emitted_token_ids", f"{num_known} known tokens reach the request's limit of {limit}"
                )
            if states.index.by_number(request.session, request.number) is not None:
                raise DuplicateRequest(f"number {request.number} is alive on this session")
        if first.deadline is not None and not first.is_moved:
            self._check_deadline(first, states, first.deadline - now)

    def displace_for(self, choices: Sequence[Request], states: RequestStates) -> list[Request]:
        """Decide which requests leave a full queue so that these choices can be added; none if there is room.

        Requests that leave have never run, here or elsewhere. They belong to the tenant with the most waiting requests
        on the least urgent level. Its last requests leave first, all choices of a client's request together. They leave
        for a more urgent request, or for one of a tenant that has fewer waiting even with it.

        Raises:
            QueueFull: There is no room for all of the choices, and no request has to leave.
        """
        first, config = choices[0], self._config
        num_places = self.limits.max_choices
        if first.is_moved:  # set by frontends; the output that a client sends along gives it no right
            num_places += config.max_num_seqs  # a reserve for requests that other engines had to give up
        num_missing = min(len(states.index) + len(choices) - num_places, len(choices))
        num_held_bytes = states.index.num_content_bytes
        has_bytes = num_held_bytes + first.content.num_bytes <= config.max_waiting_bytes
        if num_missing <= 0 and has_bytes:
            return []
        if not has_bytes:
            raise QueueFull(
                f"requests that run or wait hold {num_held_bytes} bytes of prompts and sampling parameters; "
                f"with this one scheduler.max_waiting_bytes {config.max_waiting_bytes} is exceeded",
                self._retry_after_s(states),
            )
        leaving: list[Request] = []
        shares = states.shares
        greediest = shares.greediest()
        if greediest is not None and greediest.priority >= first.head.priority:
            is_more_urgent = greediest.priority > first.head.priority
            num_own = shares.num_waiting(first.head.priority, first.head.tenant) + len(choices)
            for group in states.waiting.latest_of(greediest.index):
                if len(group) != states.index.num_alive_of(group[0]):
                    continue  # some of its choices run
                if not is_more_urgent and greediest.num_waiting - len(leaving) - len(group) < num_own:
                    break
                leaving += group
                if len(leaving) >= num_missing:
                    return leaving
        raise QueueFull(
            f"{len(states.index)} choices run or wait, all that scheduler.max_num_seqs {config.max_num_seqs} and "
            f"scheduler.max_num_waiting {config.max_num_waiting} allow",
            self._retry_after_s(states),
        )

    def displaced_error(self, states: RequestStates) -> QueueFull:
        """Return the error for a waiting request that has to make room for another."""
        return QueueFull(
            "the queue is full, and this request was the last of the tenant with the most waiting requests; "
            "it made room for a more urgent one or another tenant's",
            self._retry_after_s(states),
        )

    def _retry_after_s(self, states: RequestStates) -> float:
        return self.forecast.endings.refuse(states.num_usable_rows)

    def _check_deadline(self, request: Request, states: RequestStates, remaining_s: float) -> None:
        """Refuse a request if its first token would come too late. One that has expired already ends as expired."""
        wait_s = self.forecast.wait_s(request, states)
        if wait_s is not None and wait_s > remaining_s > 0:
            raise DeadlineUnreachable(
                f"the first token is predicted in {wait_s:.2f} s and the deadline is in {remaining_s:.2f} s: "
                "come back later, or with a later deadline",
                wait_s,
            )
