"""What the scheduler takes, and what it refuses at once."""

from __future__ import annotations

from services.enginecore.request import Request
from services.enginecore.scheduler.forecast import FirstTokenForecast
from services.enginecore.scheduler.roster import Roster
from triptych.config import SchedulerConfig
from triptych.errors import ConfigError, DeadlineUnreachable, DuplicateRequest, InvalidRequest, QueueFull


def check_config(config: SchedulerConfig, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raises ConfigError, naming both values, where a request might be admitted that could never finish."""
    if max_model_len > (num_blocks - 1) * block_size:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit into {num_blocks - 1} KV blocks of {block_size} tokens: "
            "lower model.max_model_len or raise cache.num_blocks"
        )
    if config.max_long_partial_prefills and not config.long_prefill_token_threshold:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills {config.max_long_partial_prefills} counts prompts longer than "
            "scheduler.long_prefill_token_threshold, which is 0: set that too, or neither"
        )
    if config.enable_chunked_prefill:
        return
    if config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {config.max_num_batched_tokens} is below max_model_len "
            f"{max_model_len}, and scheduler.enable_chunked_prefill is off: no step could hold a long prompt"
        )
    if config.long_prefill_token_threshold:
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold {config.long_prefill_token_threshold} splits prompts, and "
            "scheduler.enable_chunked_prefill is off: set one of them only"
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

    def check(self, request: Request, roster: Roster, now: float) -> None:
        """Whether this request may join those in the roster; `now` on the clock of its deadline.

        Raises:
            InvalidRequest: it can never run: no prompt, no room for an output, a priority under `fcfs`.
            DuplicateRequest: its request_id, or its number on its stream, is alive.
            QueueFull: `max_num_waiting` requests wait beyond those that `max_num_seqs` lets run.
            DeadlineUnreachable: by all that is measured its first token would come too late.
        """
        config, num_known, num_prompt = self._config, len(request.token_ids), request.num_prompt_tokens
        if not 1 <= num_prompt <= num_known:
            raise InvalidRequest("prompt", f"{num_prompt} tokens of {num_known}: at least one is needed")
        if num_prompt >= self._max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{num_prompt} tokens leave no room for an output: max_model_len is {self._max_model_len}",
            )
        if num_known >= self.limit_of(request):
            raise InvalidRequest(
                "token_ids", f"{num_known} known tokens reach the request's limit of {self.limit_of(request)}"
            )
        if config.policy == "fcfs" and request.priority:
            raise InvalidRequest("priority", f"{request.priority} is not 0, and scheduler.policy is fcfs")
        if roster.has_id(request.request_id):
            raise DuplicateRequest(f"request_id {request.request_id!r} is alive in this engine")
        if roster.by_number(request.session, request.number) is not None:
            raise DuplicateRequest(f"number {request.number} is alive on this stream")
        if len(roster) >= config.max_num_seqs + config.max_num_waiting:
            raise QueueFull(
                f"{len(roster)} requests run or wait, all that scheduler.max_num_seqs {config.max_num_seqs} and "
                f"scheduler.max_num_waiting {config.max_num_waiting} allow",
                self.forecast.endings.refuse(roster.num_seats),
            )
        if request.deadline is not None:
            self._check_deadline(request, roster, request.deadline - now)

    def _check_deadline(self, request: Request, roster: Roster, remaining_s: float) -> None:
        """What has expired already is not refused here: it ends as expired."""
        wait_s = self.forecast.wait_s(request, roster)
        if wait_s is not None and wait_s > remaining_s > 0:
            raise DeadlineUnreachable(
                f"the first token is predicted in {wait_s:.2f} s and the deadline is in {remaining_s:.2f} s: "
                "come back later, or with a later deadline",
                wait_s,
            )
