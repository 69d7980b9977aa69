"""What is measured: the rows of the comparison, and the prompts that they are measured with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 1280
"""Prompt and output of every workload fit; engines that reserve memory by it reserve no more."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch: all prompts at once, greedy, end-of-sequence ignored."""

    num_prompts: int
    input_len: int
    """Tokens per prompt."""
    output_len: int
    """New tokens per prompt."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output, over all prompts."""
        return self.num_prompts * (self.input_len + self.output_len)

    @property
    def is_prefill(self) -> bool:
        """One new token: what is measured is the prompt."""
        return self.output_len == 1


@dataclass(frozen=True, slots=True)
class Row:
    """One figure per engine."""

    key: str
    """As `--rows` names it."""
    title: str
    unit: str
    less_is_better: bool = False
    workload: Workload | None = None
    """None: a figure of the process, not of a batch."""
    repeats: int = 1
    """Batches per round: short ones say little alone."""

    def figure(self, wall_s: float) -> float:
        """The rate of one batch: output tokens over the whole wall time, or prompt tokens where that is the point."""
        assert self.workload is not None, self.key
        per_prompt = self.workload.input_len if self.workload.is_prefill else self.workload.output_len
        return self.workload.num_prompts * per_prompt / wall_s


FIRST_TOKEN = Workload(1, 128, 1)

START = Row("start", "start to first token", "s", less_is_better=True)
MEMORY = Row("memory", "peak memory", "GB", less_is_better=True)
IDLE = Row("idle", "idle CPU", "%", less_is_better=True)
ROWS = (
    Row("1", "1 stream", "tok/s", workload=Workload(1, 128, 128), repeats=3),
    Row("8", "8 streams", "tok/s", workload=Workload(8, 128, 128), repeats=2),
    Row("32", "32 streams", "tok/s", workload=Workload(32, 128, 128)),
    Row("64", "64 streams", "tok/s", workload=Workload(64, 128, 128)),
    Row("prefill", "prefill of 1,024", "tok/s", workload=Workload(1, 1024, 1), repeats=3),
    START,
    MEMORY,
    IDLE,
)


def draw_prompts(workload: Workload, vocab_size: int, *key: int) -> list[list[int]]:
    """Random prompts as token ids: the same `key`, the same prompts.

    With a key of its own for every batch of a round, no prefix cache helps anybody; with the same one for every
    engine, none gets easier prompts than another.
    """
    shape = (workload.num_prompts, workload.input_len)
    prompts: list[list[int]] = np.random.default_rng(key).integers(0, vocab_size, shape).tolist()
    return prompts
