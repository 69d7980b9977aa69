"""What the scheduler takes, and what it refuses at once."""

from __future__ import annotations

from collections.abc import Sequence

from services.enginecore.request import Request
from services.enginecore.scheduler.forecast import FirstTokenForecast
from services.enginecore.scheduler.request_states import RequestStates
from triptych.config import SchedulerConfig
from triptych.errors import ConfigError, DeadlineUnreachable, DuplicateRequest, InvalidRequest, QueueFull
from triptych.types.submit import MAX_SUBMIT_BYTES


def check_config(config: SchedulerConfig) -> None:
    """Raises ConfigError, naming both values, for options that cannot work together, whatever the worker."""
    if config.max_num_batched_tokens < config.max_num_seqs:
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


def check_facts(config: SchedulerConfig, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raises ConfigError, naming both values, where a request might be admitted that could never finish."""
    if max_model_len > (num_blocks - 1) * block_size:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit into {num_blocks - 1} KV blocks of {block_size} tokens: "
            "lower model.max_model_len or raise cache.num_blocks"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {config.max_num_batched_tokens} is below max_model_len "
            f"{max_model_len}, and scheduler.enable_chunked_prefill is off: no step could hold a long prompt"
        )


class Admission:
    """Owned by the scheduler."""

    def __init__(self, config: SchedulerConfig, max_model_len: int) -> None:
        self.forecast = FirstTokenForecast(config)
        self._config = config
        self._max_model_len = max_model_len

    def limit_of(self, request: Request) -> int:
        """Tokens that a request may grow to, prompt included."""
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, request.num_prompt_tokens + max_tokens)

    @property
    def max_choices(self) -> int:
        """Choices that can be running and waiting together."""
        return self._config.max_num_seqs + self._config.max_num_waiting

    def check(self, choices: Sequence[Request], states: RequestStates, now: float) -> None:
        """Check that the choices of one client's request may be added, room in the queue aside.

        Args:
            now: On the clock of the deadlines, in seconds.

        Raises:
            InvalidRequest: It can never run: no prompt, no room for an output, more choices than ever fit, a
                priority under `fcfs`.
            DuplicateRequest: Its request_id, or a number, is alive on its session.
            DeadlineUnreachable: By all that is measured its first token would come too late.
        """
        config, first = self._config, choices[0]
        num_prompt = first.num_prompt_tokens
        if not num_prompt:
            raise InvalidRequest("prompt", "0 tokens: at least one is needed")
        if num_prompt >= self._max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{num_prompt} tokens leave no room for an output: max_model_len is {self._max_model_len}",
            )
        if config.policy == "fcfs" and first.priority:
            raise InvalidRequest("priority", f"{first.priority} is not 0, and scheduler.policy is fcfs")
        if len(choices) > self.max_choices:
            raise InvalidRequest(
                "n",
                f"{len(choices)} choices are above the limit {self.max_choices}: scheduler.max_num_seqs "
                f"{config.max_num_seqs} plus scheduler.max_num_waiting {config.max_num_waiting}",
            )
        if first.content.num_bytes > MAX_SUBMIT_BYTES:
            raise InvalidRequest(
                "sampling",
                f"prompt and sampling parameters take {first.content.num_bytes} bytes, above the limit "
                f"{MAX_SUBMIT_BYTES}",
            )
        if states.has_id(first.session, first.request_id):
            raise DuplicateRequest(f"request_id {first.request_id!r} is alive on this session")
        for request in choices:
            num_known, limit = len(request.token_ids), self.limit_of(request)
            if num_known >= limit:
                raise InvalidRequest(
                    "emitted_token_ids", f"{num_known} known tokens reach the request's limit of {limit}"
                )
            if states.by_number(request.session, request.number) is not None:
                raise DuplicateRequest(f"number {request.number} is alive on this session")
        if first.deadline is not None:
            self._check_deadline(first, states, first.deadline - now)

    def displace_for(self, choices: Sequence[Request], states: RequestStates) -> list[Request]:
        """Decide who leaves a full queue so that these choices can be added; nobody where there is room.

        Those that leave have never run, here or elsewhere. They belong to the tenant with the most waiting requests on
        the least urgent level; its last come first, all choices of a client's request together. They leave for a more
        urgent request, or for one whose tenant has fewer waiting even with it.

        Raises:
            QueueFull: There is no room for all of them, and nobody has to leave.
        """
        first, config = choices[0], self._config
        num_places = self.max_choices
        if first.has_emitted:
            num_places += config.max_num_seqs  # a reserve for requests that other engines had to give up
        num_missing = min(len(states) + len(choices) - num_places, len(choices))
        has_bytes = states.num_content_bytes + first.content.num_bytes <= config.max_waiting_bytes
        if num_missing <= 0 and has_bytes:
            return []
        if not has_bytes:
            raise QueueFull(
                f"requests that run or wait hold {states.num_content_bytes} bytes of prompts and sampling parameters; "
                f"with this one scheduler.max_waiting_bytes {config.max_waiting_bytes} is exceeded",
                self._retry_after_s(states),
            )
        leaving: list[Request] = []
        shares = states.shares
        greediest = shares.greediest()
        if greediest is not None and greediest.priority >= first.priority:
            is_more_urgent = greediest.priority > first.priority
            num_mine = shares.num_waiting(first.priority, first.tenant) + len(choices)
            for group in states.waiting.latest_of(greediest.account):
                if len(group) != states.num_alive_of(group[0]):
                    continue  # some of its choices run
                if not is_more_urgent and greediest.num_waiting - len(leaving) - len(group) < num_mine:
                    break
                leaving += group
                if len(leaving) >= num_missing:
                    return leaving
        raise QueueFull(
            f"{len(states)} choices run or wait, all that scheduler.max_num_seqs {config.max_num_seqs} and "
            f"scheduler.max_num_waiting {config.max_num_waiting} allow",
            self._retry_after_s(states),
        )

    def displaced(self, states: RequestStates) -> QueueFull:
        """Return the error for a waiting request that has to make room for another."""
        return QueueFull(
            "the queue is full, and this request was the last of the tenant with the most waiting requests; "
            "it made room for a more urgent one or another tenant's",
            self._retry_after_s(states),
        )

    def _retry_after_s(self, states: RequestStates) -> float:
        return self.forecast.endings.refuse(states.num_usable_rows)

    def _check_deadline(self, request: Request, states: RequestStates, remaining_s: float) -> None:
        """What has expired already is not refused here: it ends as expired."""
        wait_s = self.forecast.wait_s(request, states)
        if wait_s is not None and wait_s > remaining_s > 0:
            raise DeadlineUnreachable(
                f"the first token is predicted in {wait_s:.2f} s and the deadline is in {remaining_s:.2f} s: "
                "come back later, or with a later deadline",
                wait_s,
            )
