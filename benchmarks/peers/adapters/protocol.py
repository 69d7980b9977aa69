"""The protocol between the driver and an adapter: JSON lines, requests on stdin, one answer each on stdout.

    {"load": {"model": …, "num_threads": …, …}}             -> {"pids": […]}
    {"run": {"prompts": [[1, 2], …], "max_tokens": 128}}    -> {"pids": […], "wall_s": …, "num_tokens": […]}
    {"score": {"prompt": [1, 2], "tokens": [3, 4]}}         -> {"whole": {"logprobs": […], "is_best": […]}, "tokens": …}
    end of stdin                                            -> {}, and the process ends
    anything that fails                                     -> {"error": "…"}, and the process ends with status 1

Only the standard library, for the oldest Python that a peer may bring: this file runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Load:
    """A model to load, and the load to expect."""

    model: str
    """Path, in the form that this peer reads."""
    num_threads: int
    max_num_seqs: int
    """Requests at once, at most."""
    max_model_len: int
    """Prompt and output together, at most."""
    options: dict[str, str]
    """Options that distinguish the engines of one adapter; each adapter's docstring lists them."""


@dataclass(frozen=True)
class Ran:
    """Result of one batch."""

    wall_s: float
    """All prompts handed over to the last token of all."""
    num_tokens: list[int]
    """New tokens, per prompt."""


@dataclass(frozen=True)
class Scored:
    """Opinion of an engine on a given continuation, each token given all before it."""

    logprobs: list[float]
    """Log-probability of each token."""
    is_best: list[bool]
    """Whether no token was likelier."""


class LoadedEngine(ABC):
    """An engine that has loaded its model. Greedy, end-of-sequence ignored, no prefix taken from an earlier run."""

    @abstractmethod
    def run(self, prompts: list[list[int]], max_tokens: int) -> Ran:
        """Complete all prompts at once, `max_tokens` each."""

    def score(self, prompt: list[int], tokens: list[int]) -> dict[str, Scored]:
        """Return the scores of `tokens` by the way in which they were computed.

        `whole`: prompt and tokens in one step. `tokens`: the prompt in one step, then each token in its own.

        Raises:
            NotImplementedError: It has no way to ask for them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log-probabilities of given tokens")

    def pids(self) -> list[int]:
        """Roots of the process trees that are the engine, and not its client."""
        return [os.getpid()]

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; its processes end."""


def serve(load: Callable[[Load], LoadedEngine]) -> None:
    """Answer the driver until it closes our stdin."""
    answers = os.fdopen(os.dup(1), "w")  # not inheritable: no child of the engine holds it open
    os.dup2(2, 1)  # what the engine prints belongs in the log

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    engine = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "load" in request:
                engine = load(Load(**request["load"]))
                answer(pids=engine.pids())
                continue
            assert engine is not None, "the driver loads first"
            if "score" in request:
                answer(**{way: asdict(scored) for way, scored in engine.score(**request["score"]).items()})
            else:
                ran = engine.run(**request["run"])
                answer(pids=engine.pids(), wall_s=ran.wall_s, num_tokens=ran.num_tokens)
        if engine is not None:
            closing, engine = engine, None
            closing.close()
            answer()
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    finally:
        if engine is not None:
            engine.close()
