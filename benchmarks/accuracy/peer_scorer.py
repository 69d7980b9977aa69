"""A peer, asked through its adapter in its own Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.accuracy.base import Pass, Scores
from benchmarks.harness.machine import compute_cpus
from benchmarks.harness.processes import Child
from benchmarks.peers.engines import Engine
from benchmarks.peers.environments import log_file
from benchmarks.peers.measurement import CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S, RUN_TIMEOUT_S, environment
from tests.oracle.entries import Entry


class PeerScorer:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.name

    def score(self, entries: Sequence[Entry]) -> Iterator[tuple[Pass, list[Scores]]]:
        model, cpus = self._engine.prepare(), compute_cpus()
        load = {
            "model": str(model),
            "num_threads": len(cpus),
            "max_num_seqs": len(entries),
            # One more token: engines that score a prompt generate one, too.
            "max_model_len": max(len(entry.prompt) + len(entry.tokens) for entry in entries) + 1,
            "options": dict(self._engine.options()),
        }
        env, log = environment(self._engine, cpus), log_file(f"{self._engine.name}-accuracy")
        with Child(self._engine.command, env=env, log=log) as adapter:
            adapter.ask({"load": load}, LOAD_TIMEOUT_S)
            answers = [
                adapter.ask({"score": {"prompt": entry.prompt, "tokens": entry.tokens}}, RUN_TIMEOUT_S)
                for entry in entries
            ]
            adapter.finish(CLOSE_TIMEOUT_S)
        for how in Pass:
            if how.value in answers[0]:
                yield (
                    how,
                    [
                        Scores(np.array(scored["logprobs"]), np.array(scored["is_best"], bool))
                        for scored in (answer[how.value] for answer in answers)
                    ],
                )
