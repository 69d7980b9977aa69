"""The real scheduler and a real runner in one process, with a window of steps in flight and no wire."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tests.helpers.scheduling import owners_of
from triptych.config import SchedulerConfig
from triptych.config.step_size import size_for_worker
from triptych.types.outputs import StageTimings
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import SamplingParams
from triptych.types.step import F32, PromptLogprobs
from triptych.types.submit import single_choice
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.scheduler import Scheduler
from triptych_services.worker.runner.base import PendingStep, Runner


class InProcessEngine:
    """Generates as the two services do, `steps_in_flight` steps being launched before the oldest is waited for."""

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int = 0,
        max_model_len: int = 0,
        steps_in_flight: int = 2,
        enable_prefix_caching: bool = True,
        **scheduler: Any,
    ) -> None:
        """`num_blocks` and `max_model_len`: the runner's, or fewer."""
        facts = runner.facts
        kv = replace(facts.kv, num_blocks=num_blocks or facts.kv.num_blocks, soft_num_blocks=None)
        model = replace(facts.model, max_model_len=max_model_len or facts.model.max_model_len)
        self.scheduler = Scheduler(
            size_for_worker(SchedulerConfig(**scheduler), facts.max_num_seqs, facts.max_num_batched_tokens),
            replace(facts, kv=kv, model=model),
            enable_prefix_caching=enable_prefix_caching,
            clock=time.monotonic,
        )
        self.prompt_logprobs: defaultdict[int, list[PromptLogprobs]] = defaultdict(list)
        """Parts of each request's prompt as they were reported, by its number."""
        self.logprobs: defaultdict[int, list[F32]] = defaultdict(list)
        """By each request's number: those of its tokens and of the likeliest ones, if it asks."""
        self.vectors: dict[int, F32] = {}
        """Those of each pooled request, by its number."""
        self.timings: dict[int, StageTimings] = {}
        """Those of each request, by its number."""
        self._runner = runner
        self._window = steps_in_flight
        runner.reset()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        first_number: int = 0,
        pooling: Mapping[int, PoolingParams] | None = None,
    ) -> list[list[int]]:
        """Tokens of each prompt, all submitted at once. `pooling`: numbers of those that are pooled instead."""
        tokens: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts, first_number):
            submit = single_choice(
                number,
                f"r{number}",
                prompt,
                sampling,
                seed=sampling.seed if sampling.seed is not None else number,
                pooling=(pooling or {}).get(number),
            )
            self.scheduler.requests.add(*Request.choices_of(submit, session=0))
            tokens[number] = []
        pending: deque[PendingStep] = deque()
        while self.scheduler.has_work or pending:
            while len(pending) < self._window and (plan := self.scheduler.schedule()) is not None:
                self._runner.prepare(plan)
                pending.append(self._runner.launch(plan))
            if not pending:  # all that is left waits for its form to be compiled
                time.sleep(0.001)
                continue
            result = pending.popleft().wait()
            output = self.scheduler.update(result)
            assert not output.failed, output.failed[0].error
            for request, part in output.prompt_logprobs:
                self.prompt_logprobs[request.number].append(part)
            self.timings |= {end.request.number: end.request.timings for end in output.finished}
            self.vectors |= {request.number: vectors for request, vectors in output.vectors}
            numbers = [number for _, number in owners_of(output)]
            for number, token_id in zip(numbers, output.token_ids.tolist(), strict=True):
                tokens[number].append(token_id)
            if (columns := result.logprobs) is not None:
                row_to_number = dict(zip(output.rows.tolist(), numbers, strict=True))
                own = np.split(columns.logprobs, columns.offsets[1:-1])
                for row, logprobs in zip(columns.rows.tolist(), own, strict=True):
                    if row in row_to_number:  # others are behind the end of an answer
                        self.logprobs[row_to_number[row]].append(logprobs)
        self.scheduler.check_integrity()
        assert self.scheduler.snapshot().num_used_blocks == 0
        return list(tokens.values())

    def scores_of(self, number: int) -> PromptLogprobs:
        """All that was reported of one prompt, in one piece."""
        parts = self.prompt_logprobs[number]
        assert parts[0].first_position == 1
        for part, successor in pairwise(parts):
            assert part.end == successor.first_position, "a part is missing, or comes twice"
        columns = ("token_ids", "logprobs", "ranks")
        return PromptLogprobs(
            1, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns)
        )
