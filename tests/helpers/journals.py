"""Engine cores that keep a journal, and ways to replay and change one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.scheduling import Clock
from tests.helpers.stack import NaiveRunner, make_config
from tools.replay.engine import Replay, replay
from triptych.config import JournalConfig
from triptych.types.facts import KvLayout
from triptych.types.journal import JournalEvent
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych.types.submit import single_choice
from triptych.wire.journal import JournalReader, event_to_bytes, framed, header_to_bytes
from triptych_services.enginecore.engine import EngineCore
from triptych_services.enginecore.journal.recorder import create_engine

STARTED_AT_MS = 1_763_700_000_000
SESSION = 1


class RecordedRun:
    """A journaled engine core and a naive worker, five blocks of 16 tokens and a clock that the test sets."""

    def __init__(
        self,
        directory: Path,
        *,
        started_at_ms: int = STARTED_AT_MS,
        num_blocks: int = 6,
        max_model_len: int = 80,
        max_bytes: int = 1 << 20,
        engine_id: str = "engine-0",
        max_samples_per_row: int = 1,
        num_stages: int = 1,
        kv: KvLayout | None = None,
        **scheduler: Any,
    ) -> None:
        config = make_config(**{"max_num_seqs": 4, "max_num_batched_tokens": 48, **scheduler})
        config = replace(
            config,
            engine=replace(config.engine, engine_id=engine_id),
            journal=JournalConfig(path=str(directory), max_bytes=max_bytes),
        )
        self.clock = Clock()
        self.engine: EngineCore = create_engine(config, started_at_ms, lambda: self.clock())
        self.runner = NaiveRunner(config, num_blocks, max_model_len, max_samples_per_row)
        self.runner.facts = replace(self.runner.facts, num_stages=num_stages, kv=kv or self.runner.facts.kv)
        self.runner.reset()
        self.plans: deque[StepPlan] = deque()
        self._numbers: dict[int, int] = {}

    def start(self) -> RecordedRun:
        self.engine.frontends.open_session(SESSION)
        self.connect()
        return self

    def connect(self, *, after_crash: bool = False) -> None:
        self.engine.worker_ready(self.runner.facts, after_crash=after_crash)

    def lose_worker(self) -> None:
        self.engine.worker_lost()
        self.runner.reset()
        self.plans.clear()

    def submit(
        self,
        prompt: Sequence[int],
        session: int = SESSION,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> int:
        number = self._numbers[session] = self._numbers.get(session, 0) + 1
        self.engine.frontends.submit(
            session,
            single_choice(
                number,
                f"{session}-{number}",
                prompt,
                SamplingParams(**{"max_tokens": 12, **(sampling or {})}),
                seed=number,
                **fields,
            ),
        )
        return number

    def plan(self) -> bool:
        self.clock.now += 0.001
        self.engine.expire()
        plan = self.engine.plan()
        if plan is not None:
            self.plans.append(plan)
        return plan is not None

    def finish_step(self) -> StepResult | None:
        """Let the worker answer the oldest plan; None if there is none."""
        if not self.plans:
            return None
        self.clock.now += 0.005
        result = self.runner.execute(self.plans.popleft())
        self.engine.apply(result)
        self.engine.take_outputs()
        return result

    def run(self, max_turns: int = 10_000) -> RecordedRun:
        """Plan and apply as the loop does, until nothing is left."""
        for _ in range(max_turns):
            while len(self.plans) <= self.runner.facts.num_stages and self.plan():
                pass
            if not self.plans:
                break
            self.finish_step()
        return self


def replayed(path: Path) -> Replay:
    with JournalReader(path) as journal:
        return replay(journal)


def doctor(path: Path, change: Callable[[list[JournalEvent]], Iterable[JournalEvent]]) -> None:
    """Rewrite a journal with other events."""
    with JournalReader(path) as journal:
        header, events, path = journal.header, list(journal), journal.path
    records = (header_to_bytes(header), *map(event_to_bytes, change(events)))
    path.write_bytes(b"".join(map(framed, records)))
